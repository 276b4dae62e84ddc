"""AdamW on the states of one block, through PyTorch's fused kernel.

``torch.optim.AdamW(fused=True)`` calls the same kernel, but allocates its states lazily and refuses 16-bit gradients of fp32
master weights. Here the states are one flat buffer each, made once, and the kernel takes all parameters of a block in one call.
16-bit gradients are widened and new parameters narrowed piece by piece while they are in cache. Only at multiples of 64
elements are parameters joined and pieces cut: the kernel's result is then the same to the bit as for each parameter alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
        self._sizes = sizes
        self._pieces_of_moments = [torch.split(moment, sizes) for moment in self.moments]
        self._spans = list(pairwise([0, *accumulate(sizes)]))
        self._steps = [0] * len(sizes)
        # No larger than the largest parameter: a small block's scratch would be larger than all else that a pass needs.
        self._piece = min(PIECES[parameters.device.type], -(-max(sizes, default=0) // _JOINT) * _JOINT)
        self._scratch_elements = 0 if self.master is None else min(self._piece, sum(sizes))

    @property
    def tensors(self) -> list[Tensor]:
        """What occupies memory."""
        return [self.moments] if self.master is None else [self.moments, self.master]

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Work with other tensors from now on, which have the values of :attr:`tensors`: their copies in another memory."""
        self.moments = tensors[0]
        self.master = tensors[1] if len(tensors) > 1 else None
        self._pieces_of_moments = [torch.split(moment, self._sizes) for moment in self.moments]

    def scratch(self) -> Tensor:
        """Room for a piece of gradients in fp32, which an update of 16-bit parameters needs."""
        return torch.empty(self._scratch_elements, dtype=torch.float32, device=self.moments.device)

    @torch.no_grad()
    def update(
        self, parameters: Tensor, gradients: Sequence[Tensor | None], scratch: Tensor, scale: Tensor | None = None
    ) -> None:
        """One step.

        Args:
            parameters: (n,), receives the result; may be the memory of ``gradients`` itself if these are in 16 bit.
            gradients: of each parameter, contiguous, in the type of ``parameters``; None: it does not change, as in
                ``torch.optim``.
            scratch: made by :meth:`scratch`.
            scale: multiplies the gradients, in fp32, before; those in fp32 are changed in place.
        """
        found = {place: gradient.view(-1) for place, gradient in enumerate(gradients) if gradient is not None}
        for place in found:
            self._steps[place] += 1
        if self.master is None:
            if found:
                if scale is not None:
                    torch._foreach_mul_(list(found.values()), scale)
                self._step(found, torch.split(parameters, self._sizes))
            return
        for places in self._runs(found):
            count = self._count(self._steps[places[0]])
            begin, end = self._spans[places[0]][0], self._spans[places[-1]][1]
            for start in range(begin, end, self._piece):
                stop = min(start + self._piece, end)
                wide, weights = scratch[: stop - start], self.master[start:stop]
                for place in places:
                    first, last = self._spans[place]
                    low, high = max(first, start), min(last, stop)
                    if low < high:
                        wide[low - start : high - start].copy_(found[place][low - first : high - first])
                if scale is not None:
                    wide.mul_(scale)
                self._kernel([weights], [wide], *([moment[start:stop]] for moment in self.moments), [count])
                parameters[start:stop].copy_(weights)

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

    def _step(self, gradients: dict[int, Tensor], parameters: Sequence[Tensor]) -> None:
        """All parameters that have a gradient, in one call of the kernel."""
        counts = {step: self._count(step) for step in {self._steps[place] for place in gradients}}
        first, second = self._pieces_of_moments
        self._kernel(
            [parameters[place] for place in gradients],
            list(gradients.values()),
            [first[place] for place in gradients],
            [second[place] for place in gradients],
            [counts[self._steps[place]] for place in gradients],
        )

    def _runs(self, places: Iterable[int]) -> list[list[int]]:
        """Parameters next to each other that can be updated as one."""
        runs: list[list[int]] = []
        for place in places:
            begin = self._spans[place][0]
            if (
                runs
                and self._spans[runs[-1][-1]][1] == begin
                and self._steps[runs[-1][0]] == self._steps[place]
                and (begin - self._spans[runs[-1][0]][0]) % _JOINT == 0
            ):
                runs[-1].append(place)
            else:
                runs.append([place])
        return runs

    def _count(self, step: int) -> Tensor:
        """The CPU's kernel reads it on the host, the CUDA kernel on the device: four bytes that are no state."""
        return torch.full((), step, dtype=torch.float32, device=self.moments.device)

    def _kernel(self, *lists: list[Tensor]) -> None:
        """AdamW's kernel on weights, gradients, first and second moments, and step counts."""
        adam = self.adam
        weights, gradients, first, second, counts = lists
        torch._fused_adamw_(
            weights,
            gradients,
            first,
            second,
            [],
            counts,
            lr=adam.lr,
            beta1=adam.betas[0],
            beta2=adam.betas[1],
            weight_decay=adam.weight_decay,
            eps=adam.eps,
            amsgrad=False,
            maximize=False,
        )
