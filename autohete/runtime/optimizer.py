"""AdamW on the states of one block, through PyTorch's fused kernel.

``torch.optim.AdamW(fused=True)`` calls the same kernel, but allocates its states lazily and refuses 16-bit gradients of fp32
master weights. Here the states are one flat buffer each, made once, and the kernel takes it for one parameter, which is quicker
than a dozen. 16-bit gradients are widened and new parameters narrowed piece by piece while they are in cache. Only at multiples
of 64 elements are parameters joined and pieces cut: the kernel's result is then the same to the bit as for each parameter
alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from autohete.errors import InputError

#: Elements of a piece, by device. Smaller ones pay for more calls of the kernel, larger ones need more scratch, and fall out
#: of a CPU's cache; benchmarks/README.md has the figures.
PIECES = {"cpu": 256 * 1024, "cuda": 16 * 1024 * 1024}
#: What a saved state calls the moments, as PyTorch does, and the fp32 master weights.
MOMENTS, MASTER = ("exp_avg", "exp_avg_sq"), "master"
#: Elements: only at multiples of it are parameters joined and pieces cut.
_JOINT = 64


@dataclass(frozen=True, slots=True)
class Adam:
    """AdamW's settings, with the ranges of ``torch.optim.AdamW``.

    Args:
        lr: learning rate, 0 or more; :meth:`autohete.Trainer.set_learning_rate` changes it between steps.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment, 0 or more.
        weight_decay: decoupled, 0 or more.

    Raises:
        InputError: a setting is of another type or out of its range.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < math.inf:
                raise InputError(f"{name} is {value!r}: give a finite number that is 0 or more, such as Adam({name}=1e-3)")
        if (
            not isinstance(self.betas, tuple)
            or len(self.betas) != 2
            or not all(_is_number(beta) and 0 <= beta < 1 for beta in self.betas)
        ):
            raise InputError(f"betas is {self.betas!r}: give two numbers in [0, 1), such as Adam(betas=(0.9, 0.95))")


def _is_number(value: object) -> bool:
    """A plain number: a tensor, or text, would be read when the update runs, if at all."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
        self.moments = torch.zeros(2, parameters.numel(), dtype=torch.float32, device=parameters.device)
        self.master = None if parameters.dtype is torch.float32 else parameters.float()
        self._spans = list(pairwise([0, *accumulate(sizes)]))
        self._steps = [0] * len(sizes)
        # No larger than the largest parameter: a small block's scratch would be larger than all else that a pass needs.
        self._piece = min(PIECES[parameters.device.type], -(-max(sizes, default=0) // _JOINT) * _JOINT)
        self._scratch_elements = 0 if self.master is None else min(self._piece, sum(sizes))

    @property
    def tensors(self) -> list[Tensor]:
        """What occupies memory."""
        return [self.moments] if self.master is None else [self.moments, self.master]

    def scratch(self) -> Tensor:
        """Room for a piece of gradients in fp32, which an update of 16-bit parameters needs."""
        return torch.empty(self._scratch_elements, dtype=torch.float32, device=self.moments.device)

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
        for begin, end, step in self._runs(present):
            # The CPU's kernel reads it on the host, the CUDA kernel on the device: four bytes that are no state.
            count = torch.full((), step, dtype=torch.float32, device=parameters.device)
            if self.master is None:
                self._step(parameters[begin:end], gradients[begin:end], self.moments[:, begin:end], count)
                continue
            for start in range(begin, end, self._piece):
                piece = slice(start, min(start + self._piece, end))
                weights = self.master[piece]
                wide = scratch[: len(weights)].copy_(gradients[piece])
                self._step(weights, wide, self.moments[:, piece], count)
                parameters[piece].copy_(weights)

    def saved(self, place: int) -> dict[str, Any]:
        """Copies of one parameter's step count, moments and master weights (if there are), each flat and on the CPU."""
        span = slice(*self._spans[place])
        moments = {name: moment[span] for name, moment in zip(MOMENTS, self.moments, strict=True)}
        master = {} if self.master is None else {MASTER: self.master[span]}
        return {"step": self._steps[place]} | {name: tensor.to("cpu", copy=True) for name, tensor in (moments | master).items()}

    def load(self, place: int, saved: dict[str, Any]) -> None:
        """Take over what :meth:`saved` gave, in any shape."""
        span = slice(*self._spans[place])
        self._steps[place] = saved["step"]
        for name, moment in zip(MOMENTS, self.moments, strict=True):
            moment[span].copy_(saved[name].reshape(-1))
        if self.master is not None:
            self.master[span].copy_(saved[MASTER].reshape(-1))

    def _runs(self, present: set[int]) -> list[tuple[int, int, int]]:
        """Begin, end and step of parameters next to each other that can be updated as one."""
        runs: list[tuple[int, int, int]] = []
        for place in sorted(present):
            (begin, end), step = self._spans[place], self._steps[place]
            if runs and runs[-1][1:] == (begin, step) and (begin - runs[-1][0]) % _JOINT == 0:
                runs[-1] = (runs[-1][0], end, step)
            else:
                runs.append((begin, end, step))
        return runs

    def _step(self, weights: Tensor, gradients: Tensor, moments: Tensor, count: Tensor) -> None:
        """AdamW's kernel."""
        adam = self.adam
        torch._fused_adamw_(
            [weights],
            [gradients],
            [moments[0]],
            [moments[1]],
            [],
            [count],
            lr=adam.lr,
            beta1=adam.betas[0],
            beta2=adam.betas[1],
            weight_decay=adam.weight_decay,
            eps=adam.eps,
            amsgrad=False,
            maximize=False,
        )
