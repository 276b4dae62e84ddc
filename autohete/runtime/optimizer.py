"""AdamW on the states of one block, through PyTorch's fused kernel.

``torch.optim.AdamW(fused=True)`` calls the same kernel, but allocates its states lazily and refuses 16-bit gradients of fp32
master weights. Here the states are one flat buffer each, made once, and 16-bit gradients are widened and new parameters
narrowed piece by piece while they are in cache. Pieces are a multiple of 64 elements long: the kernel's result is then
the same to the bit as in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

#: Elements of a piece, by device. Smaller ones pay for more calls of the kernel, larger ones need more scratch, and fall out
#: of a CPU's cache; benchmarks/README.md has the figures.
PIECES = {"cpu": 256 * 1024, "cuda": 16 * 1024 * 1024}


@dataclass(frozen=True, slots=True)
class Adam:
    """AdamW's settings."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


class AdamStates:
    """Moments, step counts and, for 16-bit parameters, fp32 master weights of one block.

    Args:
        adam: the settings.
        parameters: flat, all parameters of the block one after another; (n,) in fp32 or a 16-bit type.
        sizes: elements of each parameter.

    In fp32 the parameters are their own master weights, wherever they are when :meth:`update` is called.
    """

    def __init__(self, adam: Adam, parameters: Tensor, sizes: list[int]) -> None:
        self.adam = adam
        self.moments = torch.zeros(2, parameters.numel(), device=parameters.device)
        self.master = None if parameters.dtype is torch.float32 else parameters.float()
        self._sizes = sizes
        self._bounds = [0, *accumulate(sizes)]
        # Not a state of the device: the fused CPU kernel reads it on the host, the CUDA kernel four bytes per parameter.
        self._steps = [torch.zeros((), device=parameters.device) for _ in sizes]
        self._piece = PIECES[parameters.device.type]
        self._scratch_elements = 0 if self.master is None else min(self._piece, max(sizes, default=0))

    @property
    def tensors(self) -> list[Tensor]:
        """What occupies memory."""
        return [self.moments] if self.master is None else [self.moments, self.master]

    def scratch(self) -> Tensor:
        """Room for a piece of gradients in fp32, which an update of 16-bit parameters needs."""
        return torch.empty(self._scratch_elements, device=self.moments.device)

    @torch.no_grad()
    def update(self, parameters: Tensor, gradients: Tensor, present: set[int], scratch: Tensor) -> None:
        """One step.

        Args:
            parameters: (n,), receives the result; may be the memory of ``gradients`` itself if it is in 16 bit.
            gradients: (n,), in the type of ``parameters``.
            present: which parameters have a gradient; the others do not change, as in ``torch.optim``.
            scratch: made by :meth:`scratch`.
        """
        places = sorted(present)
        torch._foreach_add_([self._steps[place] for place in places], 1)
        if self.master is None:
            flat = (parameters, gradients, *self.moments)
            self._step(places, *([split[place] for place in places] for split in (f.split(self._sizes) for f in flat)))
            return
        for place in places:
            for begin, end in self._pieces(place):
                weights, moments = self.master[begin:end], self.moments[:, begin:end]
                wide = scratch[: end - begin].copy_(gradients[begin:end])
                self._step([place], [weights], [wide], [moments[0]], [moments[1]])
                parameters[begin:end].copy_(weights)

    def _pieces(self, place: int) -> Iterator[tuple[int, int]]:
        begin, end = self._bounds[place], self._bounds[place + 1]
        for start in range(begin, end, self._piece):
            yield start, min(start + self._piece, end)

    def _step(
        self, places: list[int], weights: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor]
    ) -> None:
        """AdamW's kernel on all of these parameters, or on a piece of one."""
        adam = self.adam
        torch._fused_adamw_(
            weights,
            gradients,
            first,
            second,
            [],
            [self._steps[place] for place in places],
            lr=adam.lr,
            beta1=adam.betas[0],
            beta2=adam.betas[1],
            weight_decay=adam.weight_decay,
            eps=adam.eps,
            amsgrad=False,
            maximize=False,
        )
