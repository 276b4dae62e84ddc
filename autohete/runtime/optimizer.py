"""Optimizer states of one unit, in flat buffers, and their updates.

``torch.optim`` calls the same functions of PyTorch, but allocates states lazily, one by one, and refuses 16-bit gradients of
fp32 master weights. Here each state is one flat buffer, allocated once. 16-bit gradients are widened and new parameters
narrowed in pieces that fit in cache. Parameters are joined and pieces are cut only at multiples of 64 elements of a parameter.
The result is then bit-identical to that for each parameter alone, because the CPU's kernels compute the last elements, which do
not fill a vector, differently.

States may belong to a part of a unit, which may begin and end anywhere, even within a parameter. The group of 64 elements that
contains such a cut is then computed as a whole, with zeros for the missing elements, and only the present elements are kept.
This takes at most 2 KiB while a kernel runs, which is not counted.

Other rules than those per element update one whole parameter at a time; see :class:`WholeStates`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autohete.errors import ScheduleError
from autohete.runtime.update_rules import StateTensor, Step, UpdateSettings

#: Elements per piece, by device; on the CPU of each two threads. Smaller pieces need more kernel calls, each of which begins
#: and ends in all threads together; larger ones need more scratch memory and do not fit in a cache. See benchmarks/README.md
#: for the figures.
PIECES = {"cpu": 256 * 1024, "cuda": 16 * 1024 * 1024}
#: Keys in a saved state for the number of steps and for the fp32 master weights.
STEP, MASTER = "step", "master"
#: Parameters are joined and pieces are cut only at multiples of this many elements. A multiple of every vector width.
_JOINT = 64


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
        flat = tensor.view(-1)
        return flat if self.last - self.first == self.size else flat[self.first : self.last]


def parts_of(sizes: Sequence[int], begin: int, end: int) -> list[ElementRange]:
    """The part of each parameter, stored one after another, that lies between the elements ``begin`` and ``end``."""
    found = []
    for size, stop in zip(sizes, accumulate(sizes), strict=True):
        first, last = (min(max(place - (stop - size), 0), size) for place in (begin, end))
        found.append(ElementRange(first, last, size))
    return found


class Layout(NamedTuple):
    """The trained parameters of a unit, one after another in flat memory whose elements are of their narrowest type. Parameters
    of a wider type take several elements; each begins at a multiple of its own element.

    Args:
        shapes, dtypes: of each parameter.
    """

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, parameters: Iterable[Tensor]) -> Layout:
        """That of ``parameters``."""
        some = list(parameters)
        return cls(tuple(parameter.shape for parameter in some), tuple(parameter.dtype for parameter in some))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the flat memory."""
        return min(self.dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)

    @property
    def is_mixed(self) -> bool:
        """Whether the parameters have several types."""
        return len({*self.dtypes}) > 1

    @property
    def sizes(self) -> list[int]:
        """Elements of the flat memory that each parameter takes."""
        width = self.dtype.itemsize
        return [shape.numel() * dtype.itemsize // width for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parameters in ``flat``."""
        places = zip(torch.split(flat, self.sizes), self.dtypes, self.shapes, strict=True)
        return [place.view(dtype).view(shape) for place, dtype, shape in places]


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
        size = self.end - self.begin
        return gradient if gradient.numel() == size else gradient[self.skipped : self.skipped + size]

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


def _piece_on(device: torch.device) -> int:
    """The most elements of a piece."""
    return PIECES[device.type] * (max(1, torch.get_num_threads() // 2) if device.type == "cpu" else 1)


class UnitStates:
    """Optimizer states and step counts and, for 16-bit parameters, fp32 master weights of one unit, or of a part of it.

    Args:
        updates: what an update computes.
        parameters: flat, those of the unit one after another; (n,) in fp32 or a 16-bit type.
        sizes: number of elements of each parameter of the unit.
        groups: index of the group of each of them; none: they are all in the first. They all have the same rule.
        begin: number of elements of the unit before the first of ``parameters``.

    Attributes:
        parts: the elements of each parameter that are here.

    Without masters the parameters are updated wherever they are when :meth:`update` is called.
    """

    def __init__(
        self, updates: UpdateSettings, parameters: Tensor, sizes: Sequence[int], groups: Sequence[int] = (), begin: int = 0
    ) -> None:
        self.updates = updates
        count, dtype, device = parameters.numel(), parameters.dtype, parameters.device
        self._groups = groups or [0] * len(sizes)
        one = self._groups[0] if sizes else 0
        self._rule, wide = updates.rules[one], updates.state_dtype(dtype)
        self._names = self._rule.names(wide, updates.groups[one])
        self.states = torch.zeros(len(self._names), count, dtype=wide, device=device)
        self.master = parameters.float() if updates.has_masters(dtype) else None
        self.parts = parts_of(sizes, begin, begin + count)
        # A GPU's kernel computes all elements in the same way, so no groups of elements are needed.
        self._stretches = _stretches(self.parts, _JOINT if device.type == "cpu" else 1)
        self._has_groups = any(stretch.width for stretch in self._stretches)
        #: The states, each cut at the stretches, until they are elsewhere.
        self._cut_states: list[tuple[Tensor, ...]] | None = None
        self._steps = [0] * len(sizes)
        # At most the largest parameter. Otherwise a small unit's scratch would exceed everything else a pass needs.
        largest = max((part.elements for part in self.parts), default=0)
        self._piece = min(_piece_on(device), -(-largest // _JOINT) * _JOINT)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.states.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that occupy memory."""
        return [self.states] if self.master is None else [self.states, self.master]

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Use ``tensors`` from now on: copies of :attr:`tensors` in another memory, with the same values."""
        self.states, self._cut_states = tensors[0], None
        self.master = tensors[1] if len(tensors) > 1 else None

    def scratch(self) -> Tensor:
        """Allocate scratch for a piece of gradients in fp32, which an update of 16-bit parameters with masters needs."""
        wide = 0 if self.master is None else min(self._piece, self.elements)
        return torch.empty(wide, dtype=torch.float32, device=self.states.device)

    @property
    def temporary_bytes(self) -> int:
        """Bytes that PyTorch allocates at most during an update besides the scratch; 0 for fused kernels."""
        groups, first = {self._groups[stretch.place] for stretch in self._stretches}, 0 in self._steps
        in_place = all(self._rule.is_in_place(self.updates.groups[group], first=first) for group in groups)
        return 0 if in_place else self._rule.temporaries * min(self._piece, self.elements) * self.states.element_size()

    @torch.no_grad()
    def update(
        self, parameters: Tensor, gradients: Sequence[Tensor | None], scratch: Tensor, scale: Tensor | None = None
    ) -> None:
        """Run one optimizer step.

        Args:
            parameters: (n,), receives the result; may share the memory of ``gradients`` if there are masters.
            gradients: one per parameter's part, contiguous, in the type of ``parameters``. None: the parameter does not
                change, as in ``torch.optim``.
            scratch: a result of :meth:`scratch`.
            scale: factor applied to the gradients first; those that are not widened are changed in place.
        """
        found = {place: gradient.view(-1) for place, gradient in enumerate(gradients) if gradient is not None}
        for place in found:
            self._steps[place] += 1
        numbered = [
            (number, stretch.of(found[stretch.place]))
            for number, stretch in enumerate(self._stretches)
            if stretch.place in found
        ]
        if self.master is None:
            if numbered:
                if scale is not None:
                    torch._foreach_mul_([gradient for _, gradient in numbered], scale)
                self._update_in_place(numbered, parameters)
            return
        for run in self._runs((self._stretches[number], gradient) for number, gradient in numbered):
            first = run[0][0]
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
                self._step([first], [weights], [wide], [[state[start:stop]] for state in self.states])
                parameters[start:stop].copy_(weights)

    def newest(self, place: int) -> Tensor | None:
        """The master weights of a parameter's part, flat; None: it has none."""
        return None if self.master is None else self.master[self._span(place)]

    def restore(self, parameters: Tensor) -> None:
        """Set parameters to their master weights, where they have some."""
        if self.master is not None:
            parameters.copy_(self.master)

    def saved(self, place: int) -> dict[str, Any]:
        """Copy a parameter's step count, and its part's states and master weights (if any), flat on the CPU."""
        span = self._span(place)
        tensors = {name: state[span] for name, state in zip(self._names, self.states, strict=True)}
        master = {} if self.master is None else {MASTER: self.master[span]}
        return {STEP: self._steps[place]} | {name: tensor.to("cpu", copy=True) for name, tensor in (tensors | master).items()}

    def load(self, place: int, saved: dict[str, Any]) -> None:
        """Load a parameter's part of the result of :meth:`saved` for the whole parameter, in any shape. States that are not
        there begin with zeros.
        """
        span, part = self._span(place), self.parts[place]
        self._steps[place] = saved[STEP]
        for name, state in zip(self._names, self.states, strict=True):
            if name in saved:
                state[span].copy_(part.of(saved[name].reshape(-1)))
            else:
                state[span].zero_()
        if self.master is not None:
            self.master[span].copy_(part.of(saved[MASTER].reshape(-1)))

    def _span(self, place: int) -> slice:
        """The range of a parameter's part in the flat states."""
        begin = sum(part.elements for part in self.parts[:place])
        return slice(begin, begin + self.parts[place].elements)

    def _is_first(self, stretch: _Stretch) -> bool:
        """Whether its parameter is updated for the first time."""
        return self._steps[stretch.place] == 1

    def _update_in_place(self, changing: Sequence[tuple[int, Tensor]], parameters: Tensor) -> None:
        """Update all parameters that have a gradient: in one call where PyTorch allocates nothing, otherwise in pieces.

        Args:
            changing: numbers of the stretches, with their gradients.
            parameters: flat.
        """
        calls: dict[tuple[int, bool], list[tuple[int, Tensor]]] = {}
        for number, gradient in changing:
            stretch = self._stretches[number]
            calls.setdefault((self._groups[stretch.place], self._is_first(stretch)), []).append((number, gradient))
        sizes = [stretch.end - stretch.begin for stretch in self._stretches]
        if self._cut_states is None:
            self._cut_states = [state.split_with_sizes(sizes) for state in self.states]
        cut = (parameters.split_with_sizes(sizes), *self._cut_states)  # a call per tensor, not one per stretch
        for (group, first), some in calls.items():
            if self._rule.is_in_place(self.updates.groups[group], first=first):
                weights, *states = ([parts[number] for number, _ in some] for parts in cut)
                self._step([self._stretches[number] for number, _ in some], weights, [each for _, each in some], states)
                continue
            for number, gradient in some:
                stretch = self._stretches[number]
                for start in range(stretch.begin, stretch.end, self._piece):
                    stop = min(start + self._piece, stretch.end)
                    weights, *states = ([flat[start:stop]] for flat in (parameters, *self.states))
                    self._step([stretch], weights, [gradient[start - stretch.begin : stop - stretch.begin]], states)

    def _runs(self, changing: Iterable[tuple[_Stretch, Tensor]]) -> list[list[tuple[_Stretch, Tensor]]]:
        """Group adjacent stretches that can be updated as one."""
        runs: list[list[tuple[_Stretch, Tensor]]] = []
        for stretch, gradient in changing:
            if (
                runs
                and runs[-1][-1][0].end == stretch.begin
                and not (runs[-1][0][0].width or stretch.width)
                and self._alike(runs[-1][0][0].place, stretch.place)
                and (stretch.begin - runs[-1][0][0].begin) % _JOINT == 0
            ):
                runs[-1].append((stretch, gradient))
            else:
                runs.append([(stretch, gradient)])
        return runs

    def _alike(self, one: int, other: int) -> bool:
        """Whether two parameters are updated with the same settings."""
        return (self._steps[one], self._groups[one]) == (self._steps[other], self._groups[other])

    def _step(
        self, stretches: Sequence[_Stretch], weights: list[Tensor], gradients: list[Tensor], states: list[list[Tensor]]
    ) -> None:
        """Run a step on parts of ``stretches`` that have the same settings: weights, gradients, and each of the states."""
        changed = (weights, *states)
        if self._has_groups:
            weights, gradients, *states = (
                [stretch.widened(tensor) for stretch, tensor in zip(stretches, each, strict=True)]
                for each in (weights, gradients, *states)
            )
        group = self.updates.groups[self._groups[stretches[0].place]]
        counts = [self._steps[stretch.place] for stretch in stretches]
        self._rule.step(group, Step(weights, gradients, dict(zip(self._names, states, strict=True)), counts))
        for place, stretch in enumerate(stretches if self._has_groups else ()):
            if stretch.width:
                for here, found in zip(changed, (weights, *states), strict=True):
                    here[place].copy_(found[place][stretch.lead : stretch.lead + len(here[place])])


class WholeStates:
    """Optimizer states, step counts and master weights of the parameters of one unit, each of which is updated as a whole.

    All states are in one buffer of bytes, those of wide numbers first, so that each begins at a multiple of its numbers' size.

    Args:
        updates: what an update computes.
        parameters: flat, those of the unit one after another; (n,) in fp32 or a 16-bit type.
        layout: the parameters in it.
        groups: index of the group of each of them.

    Attributes and methods are those of :class:`UnitStates`.
    """

    #: What a step allocates is counted while it runs.
    temporary_bytes = 0

    def __init__(self, updates: UpdateSettings, parameters: Tensor, layout: Layout, groups: Sequence[int]) -> None:
        self.updates, device = updates, parameters.device
        self._layout, self._groups, self._steps = layout, groups, [0] * len(layout.shapes)
        self._kept = [updates.states_of(*each) for each in zip(layout.shapes, layout.dtypes, groups, strict=True)]
        entries = [(place, name, state) for place, kept in enumerate(self._kept) for name, state in kept.items()]
        entries.sort(key=lambda entry: -entry[2].dtype.itemsize)
        ends = [0, *accumulate(state.size_bytes for _, _, state in entries)]
        #: Where the bytes of each state begin, by the parameter's index and the state's name.
        self._begins = {(place, name): begin for (place, name, _), begin in zip(entries, ends, strict=False)}
        self.states = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        masters = [place for place, dtype in enumerate(layout.dtypes) if updates.has_masters(dtype)]
        values = layout.views(parameters)
        self.master = torch.cat([values[place].reshape(-1).float() for place in masters]) if masters else None
        ends = list(accumulate((layout.shapes[place].numel() for place in masters), initial=0))
        #: Where the master weights of those parameters are that have some.
        self._masters = {place: slice(*span) for place, span in zip(masters, pairwise(ends), strict=True)}
        self.elements = parameters.numel()
        sizes = [shape.numel() for shape in layout.shapes]
        self.parts = parts_of(sizes, 0, sum(sizes))
        for place in range(len(sizes)):
            self._reset(place)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that occupy memory."""
        return [self.states] if self.master is None else [self.states, self.master]

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Use ``tensors`` from now on: copies of :attr:`tensors` in another memory, with the same values."""
        self.states = tensors[0]
        self.master = tensors[1] if len(tensors) > 1 else None

    def scratch(self) -> Tensor:
        """Allocate scratch for the largest gradient in fp32, if there are master weights."""
        wide = 0 if self.master is None else max((part.size for part in self.parts), default=0)
        return torch.empty(wide, dtype=torch.float32, device=self.states.device)

    @torch.no_grad()
    def update(
        self, parameters: Tensor, gradients: Sequence[Tensor | None], scratch: Tensor, scale: Tensor | None = None
    ) -> None:
        """Run one optimizer step; see :meth:`UnitStates.update`."""
        values = self._layout.views(parameters)
        for place, gradient in enumerate(gradients):
            if gradient is None:
                continue
            self._steps[place] += 1
            shape, group, master = self._layout.shapes[place], self._groups[place], self.newest(place)
            weights, wide = values[place], gradient.view(shape)
            if master is not None:
                weights, wide = master.view(shape), scratch[: shape.numel()].view(shape).copy_(wide)
            if scale is not None:
                wide.mul_(scale)
            states = {name: [tensor] for name, tensor in self._tensors(place).items()}
            step = Step([weights], [wide], states, [self._steps[place]])
            self.updates.rules[group].step(self.updates.groups[group], step)
            if master is not None:
                values[place].copy_(weights)

    def newest(self, place: int) -> Tensor | None:
        """The master weights of a parameter, flat; None: it has none."""
        return None if self.master is None or place not in self._masters else self.master[self._masters[place]]

    def restore(self, parameters: Tensor) -> None:
        """Set parameters to their master weights, where they have some."""
        for place, value in enumerate(self._layout.views(parameters)):
            if (master := self.newest(place)) is not None:
                value.copy_(master.view(value.shape))

    def saved(self, place: int) -> dict[str, Any]:
        """Copy a parameter's step count, states and master weights (if any), in their shapes, on the CPU."""
        tensors = self._tensors(place)
        if (master := self.newest(place)) is not None:
            tensors[MASTER] = master.view(self._layout.shapes[place])
        return {STEP: self._steps[place]} | {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}

    def load(self, place: int, saved: dict[str, Any]) -> None:
        """Load the result of :meth:`saved`. States that are not there begin as before the first step."""
        self._reset(place)
        self._steps[place] = saved[STEP]
        for name, tensor in self._tensors(place).items():
            if name in saved:
                tensor.copy_(saved[name])
        if (master := self.newest(place)) is not None:
            master.copy_(saved[MASTER].reshape(-1))

    def _reset(self, place: int) -> None:
        """Let states be as before the first step."""
        for name, tensor in self._tensors(place).items():
            initial = self._kept[place][name].initial
            if initial is None:
                tensor.zero_()
            else:
                tensor.copy_(initial)

    def _tensors(self, place: int) -> dict[str, Tensor]:
        """A parameter's states, in their shapes."""
        return {name: self._tensor(place, name, state) for name, state in self._kept[place].items()}

    def _tensor(self, place: int, name: str, state: StateTensor) -> Tensor:
        begin = self._begins[place, name]
        return self.states[begin : begin + state.size_bytes].view(state.dtype).view(state.shape)


def states_of_unit(
    updates: UpdateSettings, parameters: Tensor, layout: Layout, groups: Sequence[int], begin: int = 0
) -> UnitStates | WholeStates:
    """Return the states of a unit, or of a part of it.

    Args:
        updates: what an update computes.
        parameters: flat, those of the part.
        layout: all parameters of the unit.
        groups: index of the group of each of them.
        begin: number of elements of the unit before the part.

    Raises:
        ScheduleError: it is a part, but the rules need whole parameters.
    """
    if updates.may_be_cut(groups) and not layout.is_mixed:
        return UnitStates(updates, parameters, layout.sizes, groups, begin)
    if parameters.numel() < sum(layout.sizes):
        raise ScheduleError(
            "the schedule updates a unit in parts, but its optimizer updates whole parameters, or its parameters have "
            "different optimizers or types: let one side update all of the unit, in one part"
        )
    return WholeStates(updates, parameters, layout, groups)
