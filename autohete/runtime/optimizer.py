"""AdamW on the states of one block, through PyTorch's fused kernel.

``torch.optim.AdamW(fused=True)`` calls the same kernel, but allocates its states lazily and refuses 16-bit gradients of fp32
master weights. Here the states are one flat buffer each, made once, and 16-bit gradients are widened and new parameters
narrowed piece by piece while they are in cache. Pieces are a multiple of 64 elements long: the kernel's result is then
the same to the bit as in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
        self._bounds = [0]
        for size in sizes:
            self._bounds.append(self._bounds[-1] + size)
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
        for place in present:
            self._steps[place] += 1
        for place in sorted(present):
            for begin, end in self._pieces(place):
                if self.master is None:
                    self._step(place, parameters[begin:end], gradients[begin:end], begin, end)
                else:
                    wide = scratch[: end - begin].copy_(gradients[begin:end])
                    self._step(place, self.master[begin:end], wide, begin, end)
                    parameters[begin:end].copy_(self.master[begin:end])

    def _pieces(self, place: int) -> Iterator[tuple[int, int]]:
        begin, end = self._bounds[place], self._bounds[place + 1]
        length = end - begin if self.master is None else self._piece
        for start in range(begin, end, max(length, 1)):
            yield start, min(start + length, end)

    def _step(self, place: int, weights: Tensor, gradients: Tensor, begin: int, end: int) -> None:
        adam = self.adam
        torch._fused_adamw_(
            [weights],
            [gradients],
            [self.moments[0, begin:end]],
            [self.moments[1, begin:end]],
            [],
            [self._steps[place]],
            lr=adam.lr,
            beta1=adam.betas[0],
            beta2=adam.betas[1],
            weight_decay=adam.weight_decay,
            eps=adam.eps,
            amsgrad=False,
            maximize=False,
        )
