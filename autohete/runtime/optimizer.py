"""AdamW on the states of one block, through PyTorch's fused kernel.

``torch.optim.AdamW(fused=True)`` calls the same kernel, but allocates its states lazily and refuses 16-bit gradients of fp32
master weights. Here each state is one flat buffer, allocated once, and the kernel takes all parameters of a block in one call.
16-bit gradients are widened and new parameters narrowed in pieces that fit in cache. Parameters are joined and pieces are cut
only at multiples of 64 elements of a parameter. The result is then bit-identical to that for each parameter alone, because the
CPU's kernel computes the last elements, which do not fill a vector, differently.

States may belong to a part of a block, which may begin and end anywhere, even within a parameter. The group of 64 elements that
contains such a cut is then computed as a whole, with zeros for the missing elements, and only the present elements are kept.
This takes at most 2 KiB while the kernel runs, which is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autohete.errors import InputError

#: Elements per piece, by device. Smaller pieces need more kernel calls; larger ones need more scratch memory and do not fit in
#: a CPU's cache. See benchmarks/README.md for the figures.
PIECES = {"cpu": 256 * 1024, "cuda": 16 * 1024 * 1024}
#: Keys in a saved state for the moments, as in PyTorch, and for the fp32 master weights.
MOMENTS, MASTER = ("exp_avg", "exp_avg_sq"), "master"
#: Bytes of fp32.
_WIDE = 4
#: Parameters are joined and pieces are cut only at multiples of this many elements. A multiple of every vector width.
_JOINT = 64


@dataclass(frozen=True, slots=True)
class Adam:
    """AdamW settings, with the ranges of ``torch.optim.AdamW``.

    Args:
        lr: learning rate, 0 or more; :meth:`autohete.Trainer.set_learning_rate` changes it between steps.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the root of the second moment, 0 or more.
        weight_decay: decoupled, 0 or more.

    Raises:
        InputError: a setting has the wrong type or is out of range.
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
    """Whether ``value`` is a plain number. A tensor or text would fail only when the update runs, if at all."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def state_bytes(dtype: torch.dtype) -> int:
    """Bytes of optimizer state per element: moments, and master weights if the parameters have 16 bits."""
    return (2 if dtype is torch.float32 else 3) * _WIDE


class ElementRange(NamedTuple):
    """The elements of a parameter from ``first`` up to, but not including, ``last``, out of ``size``."""

    first: int
    last: int
    size: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.last - self.first

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of ``tensor``, as a flat view. ``tensor`` is contiguous and has the parameter's elements."""
        return tensor.view(-1)[self.first : self.last]


def parts_of(sizes: Sequence[int], begin: int, end: int) -> list[ElementRange]:
    """The part of each parameter, stored one after another, that lies between the elements ``begin`` and ``end``."""
    found = []
    for size, stop in zip(sizes, accumulate(sizes), strict=True):
        first, last = (min(max(place - (stop - size), 0), size) for place in (begin, end))
        found.append(ElementRange(first, last, size))
    return found


class _Stretch(NamedTuple):
    """Contiguous elements of a parameter that are passed to the kernel as one tensor.

    Args:
        place: index of the parameter.
        begin, end: range in the flat states.
        skipped: number of elements of the parameter's part before them.
        lead, width: they are the elements after the first ``lead`` in a group of ``width`` that is computed as a whole. Width
            0: they need no others for the kernel to compute them as with the rest of the parameter.
    """

    place: int
    begin: int
    end: int
    skipped: int
    lead: int
    width: int

    def of(self, gradient: Tensor) -> Tensor:
        """These elements of the gradient of the parameter's part."""
        return gradient[self.skipped : self.skipped + self.end - self.begin]

    def widened(self, tensor: Tensor) -> Tensor:
        """``tensor`` within its group, padded with zeros; ``tensor`` itself if no group is needed."""
        if not self.width:
            return tensor
        group = tensor.new_zeros(self.width)
        group[self.lead : self.lead + len(tensor)] = tensor
        return group


def _stretches(parts: Sequence[ElementRange], joint: int) -> list[_Stretch]:
    """All elements of ``parts``, cut where a part begins or ends within a group of ``joint`` elements."""
    found: list[_Stretch] = []
    for place, part in enumerate(parts):
        after_first = min(-(-part.first // joint) * joint, part.last)
        before_last = part.last if part.last == part.size else max(part.last // joint * joint, part.first)
        cuts = sorted({part.first, after_first, before_last, part.last})
        for first, last in zip(cuts, cuts[1:], strict=False):
            lead = first % joint
            is_whole = not lead and (last == part.size or last % joint == 0)
            begin, width = found[-1].end if found else 0, 0 if is_whole else min(joint, part.size - (first - lead))
            found.append(_Stretch(place, begin, begin + last - first, first - part.first, lead, width))
    return found


class AdamStates:
    """Moments, step counts and, for 16-bit parameters, fp32 master weights of one block, or of a part of it.

    Args:
        adam: the settings.
        parameters: flat, those of the block one after another; (n,) in fp32 or a 16-bit type.
        sizes: number of elements of each parameter of the block.
        begin: number of elements of the block before the first of ``parameters``.

    Attributes:
        parts: the elements of each parameter that are here.

    In fp32 the parameters are their own master weights, wherever they are when :meth:`update` is called.
    """

    def __init__(self, adam: Adam, parameters: Tensor, sizes: Sequence[int], begin: int = 0) -> None:
        self.adam = adam
        self.moments = torch.zeros(2, parameters.numel(), dtype=torch.float32, device=parameters.device)
        self.master = None if parameters.dtype is torch.float32 else parameters.float()
        self.parts = parts_of(sizes, begin, begin + parameters.numel())
        # A GPU's kernel computes all elements in the same way, so no groups are needed.
        self._stretches = _stretches(self.parts, _JOINT if parameters.device.type == "cpu" else 1)
        self._steps = [0] * len(sizes)
        # At most the largest parameter. Otherwise a small block's scratch would exceed everything else a pass needs.
        largest = max((part.elements for part in self.parts), default=0)
        self._piece = min(PIECES[parameters.device.type], -(-largest // _JOINT) * _JOINT)
        self._scratch_elements = 0 if self.master is None else min(self._piece, parameters.numel())

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.moments.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that occupy memory."""
        return [self.moments] if self.master is None else [self.moments, self.master]

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Use ``tensors`` from now on: copies of :attr:`tensors` in another memory, with the same values."""
        self.moments = tensors[0]
        self.master = tensors[1] if len(tensors) > 1 else None

    def scratch(self) -> Tensor:
        """Allocate scratch for a piece of gradients in fp32, which an update of 16-bit parameters needs."""
        return torch.empty(self._scratch_elements, dtype=torch.float32, device=self.moments.device)

    @torch.no_grad()
    def update(
        self, parameters: Tensor, gradients: Sequence[Tensor | None], scratch: Tensor, scale: Tensor | None = None
    ) -> None:
        """Run one optimizer step.

        Args:
            parameters: (n,), receives the result; may share the memory of ``gradients`` if these are in 16 bit.
            gradients: one per parameter's part, contiguous, in the type of ``parameters``. None: the parameter does not
                change, as in ``torch.optim``.
            scratch: a result of :meth:`scratch`.
            scale: factor applied to the gradients first, in fp32; fp32 gradients are changed in place.
        """
        found = {place: gradient.view(-1) for place, gradient in enumerate(gradients) if gradient is not None}
        for place in found:
            self._steps[place] += 1
        changing = [(stretch, stretch.of(found[stretch.place])) for stretch in self._stretches if stretch.place in found]
        if self.master is None:
            if changing:
                if scale is not None:
                    torch._foreach_mul_([gradient for _, gradient in changing], scale)
                self._step(changing, parameters)
            return
        for run in self._runs(changing):
            first, count = run[0][0], self._count(self._steps[run[0][0].place])
            begin, end = first.begin, run[-1][0].end
            for start in range(begin, end, self._piece):
                stop = min(start + self._piece, end)
                wide, weights = scratch[: stop - start], self.master[start:stop]
                for stretch, gradient in run:
                    low, high = max(stretch.begin, start), min(stretch.end, stop)
                    if low < high:
                        wide[low - start : high - start].copy_(gradient[low - stretch.begin : high - stretch.begin])
                if scale is not None:
                    wide.mul_(scale)
                mean, square = (moment[start:stop] for moment in self.moments)
                self._kernel([first], [weights], [wide], [mean], [square], [count])
                parameters[start:stop].copy_(weights)

    def saved(self, place: int) -> dict[str, Any]:
        """Copy a parameter's step count, and its part's moments and master weights (if any), flat on the CPU."""
        span = self._span(place)
        moments = {name: moment[span] for name, moment in zip(MOMENTS, self.moments, strict=True)}
        master = {} if self.master is None else {MASTER: self.master[span]}
        return {"step": self._steps[place]} | {name: tensor.to("cpu", copy=True) for name, tensor in (moments | master).items()}

    def load(self, place: int, saved: dict[str, Any]) -> None:
        """Load a parameter's part of the result of :meth:`saved` for the whole parameter, in any shape."""
        span, part = self._span(place), self.parts[place]
        self._steps[place] = saved["step"]
        for name, moment in zip(MOMENTS, self.moments, strict=True):
            moment[span].copy_(part.of(saved[name].reshape(-1)))
        if self.master is not None:
            self.master[span].copy_(part.of(saved[MASTER].reshape(-1)))

    def _span(self, place: int) -> slice:
        """The range of a parameter's part in the flat states."""
        begin = sum(part.elements for part in self.parts[:place])
        return slice(begin, begin + self.parts[place].elements)

    def _step(self, changing: Sequence[tuple[_Stretch, Tensor]], parameters: Tensor) -> None:
        """Update all parameters that have a gradient, in one call of the kernel."""
        stretches, gradients = [stretch for stretch, _ in changing], [gradient for _, gradient in changing]
        counts = {step: self._count(step) for step in {self._steps[stretch.place] for stretch in stretches}}
        weights, first, second = (
            [flat[stretch.begin : stretch.end] for stretch in stretches] for flat in (parameters, *self.moments)
        )
        self._kernel(stretches, weights, gradients, first, second, [counts[self._steps[s.place]] for s in stretches])

    def _runs(self, changing: Iterable[tuple[_Stretch, Tensor]]) -> list[list[tuple[_Stretch, Tensor]]]:
        """Group adjacent stretches that can be updated as one."""
        runs: list[list[tuple[_Stretch, Tensor]]] = []
        for stretch, gradient in changing:
            if (
                runs
                and runs[-1][-1][0].end == stretch.begin
                and not (runs[-1][0][0].width or stretch.width)
                and self._steps[runs[-1][0][0].place] == self._steps[stretch.place]
                and (stretch.begin - runs[-1][0][0].begin) % _JOINT == 0
            ):
                runs[-1].append((stretch, gradient))
            else:
                runs.append([(stretch, gradient)])
        return runs

    def _count(self, step: int) -> Tensor:
        """A step count for the kernel, on the host for the CPU and on the device for CUDA: four bytes, not counted as state."""
        return torch.full((), step, dtype=torch.float32, device=self.moments.device)

    def _kernel(
        self,
        stretches: Sequence[_Stretch],
        weights: list[Tensor],
        gradients: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
        counts: list[Tensor],
    ) -> None:
        """Call AdamW's kernel on weights, gradients, first and second moments, and step counts of ``stretches``."""
        adam, changed = self.adam, (weights, first, second)
        weights, gradients, first, second = (
            [stretch.widened(tensor) for stretch, tensor in zip(stretches, each, strict=True)]
            for each in (weights, gradients, first, second)
        )
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
        for place, stretch in enumerate(stretches):
            if stretch.width:
                for here, found in zip(changed, (weights, first, second), strict=True):
                    here[place].copy_(found[place][stretch.lead : stretch.lead + len(here[place])])
