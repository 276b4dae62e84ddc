"""Model states: where those of each block are, what copies and updates do with them, and how they are taken over and returned.

A block's parameters are in one flat buffer on the device (none while they are offloaded), with a copy on the host. Master
weights and moments are on the side that updates. If both sides update a part of a block, the device has the states of the first
elements; the host has the states, gradients and copy of the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autohete.errors import DriveError, InputError, ScheduleError
from autohete.runtime.collectives import Collectives
from autohete.runtime.gradient_norm import Clipping
from autohete.runtime.ledger import WORKSPACE, accounting
from autohete.runtime.nonfinite import UpdateGate, not_finite_among
from autohete.runtime.optimizer import ElementRange, UnitStates, WholeStates, parts_of, states_of_unit
from autohete.runtime.rank_states import RankStates
from autohete.runtime.state_files import Files, Stored, copied_to
from autohete.runtime.units import FAR, Memories, MovingStates, Sums, UnitSide, UnitTensors, parts_in
from autohete.runtime.update_rules import UpdateSettings
from autohete.schedule import (
    COPIES,
    CPU,
    GPU_MEMORY,
    HOST_MEMORY,
    KIND_MEANING,
    KIND_ORDER,
    PINNED_MEMORY,
    Kind,
    Schedule,
    Value,
)
from autohete.schedule.order import delayed_units
from autohete.schedule.parts import part_ranges

#: Keys in a saved state for a parameter's values, and for the gradient that a delayed update has not applied yet.
VALUES, GRADIENT = "values", "gradient"
_PREFETCHES = {Kind.PREFETCH_FORWARD, Kind.PREFETCH_BACKWARD}
_NEAR = (GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY)
_UPDATES = {Kind.GPU_UPDATE, Kind.CPU_UPDATE}
#: Kinds that say nothing of where states are.
_OF_PASSES = {Kind.RECOMPUTE, *(kind for kind, copy in COPIES.items() if copy.value is Value.ACTIVATIONS)}
#: Kinds that need a whole block, so not one that both sides update: parameters or states that leave, sums on the host.
_OF_WHOLE_BLOCKS = {Kind.ACCUMULATE, *(kind for kind, copy in COPIES.items() if copy.value is not Value.ACTIVATIONS)} - {
    Kind.OFFLOAD_GRADIENTS,
    Kind.REFRESH,
}


class States:
    """The model states of a training run. It owns the parameters from :meth:`take_over` to :meth:`give_back`.

    Args:
        owned: trained parameters of each block.
        frozen: frozen parameters of each block that move with them.
        schedule: its tasks and buffers define where each block's states live.
        updates: what the updates compute.
        memories: where they live.
        clipping: how gradients are scaled before an update.
        poison: overwrite released parameters with NaN, so that a schedule that still reads them is detected.
        collectives: if this is one of several ranks.
        folder: of the file with what rests in another place than the device and the host; None: ``TMPDIR``.

    Attributes:
        ranks: what all ranks do together; None: there is one.
        schedule: as given.
        micro_batches: number of those in an iteration.
        gate: called before each update, with the iteration whose gradients it uses.
    """

    def __init__(
        self,
        owned: tuple[tuple[nn.Parameter, ...], ...],
        frozen: tuple[tuple[nn.Parameter, ...], ...],
        schedule: Schedule,
        updates: UpdateSettings,
        memories: Memories,
        clipping: Clipping,
        *,
        poison: bool,
        collectives: Collectives | None = None,
        folder: str | None = None,
    ) -> None:
        self.updates, self.memories, self.clipping, self.gate = updates, memories, clipping, UpdateGate()
        #: Called with a parameter whose summed gradient is not finite.
        self.not_finite: Callable[[int, int], None] | None = None
        #: Takes each parameter's optimizer states when the model is given back.
        self.handed_to: Callable[[nn.Parameter, dict[str, Any]], None] | None = None
        #: What those of single iterations compute, if different.
        self.updates_at: dict[int, UpdateSettings] = {}
        self.schedule, self.micro_batches, self._poison = schedule, schedule.micro_batches, poison
        self.kinds = _kinds_of_blocks(schedule, len(owned))
        #: A slot also holds the gradient, which then has no bytes of its own in the schedule, in the first micro-batch either:
        #: products that add to the sums of earlier ones have none in later ones.
        self._gradients_in_slots = any(
            (buffer.id.value, buffer.id.unit) == (Value.GRADIENTS, task.id.unit)
            and not buffer.size_bytes
            and not buffer.id.micro_batch
            and owned[task.id.unit]  # those of a unit without trained parameters have no bytes either
            and self.kinds[task.id.unit] & _PREFETCHES
            for task in schedule.tasks
            for buffer in task.allocates
        )
        self._delayed = delayed_units(schedule)
        #: Block and micro-batch of the gradients that are copied to the host.
        self._leaving = {
            (task.id.unit, task.id.micro_batch) for task in schedule.tasks if task.id.kind is Kind.OFFLOAD_GRADIENTS
        }
        #: Held while gradients get their places: sums may be fetched while a backward begins.
        self._placing = threading.Lock()
        norms = (task for task in schedule.tasks if task.id.kind is Kind.GRADIENT_NORM)
        self._norm_on_host = {task.id.unit for task in norms if task.lane == CPU}
        #: The memories on the way of each block's optimizer states, from where they rest to where they are updated.
        self._state_ways = _ways_of_states(schedule, self.kinds)
        #: The blocks whose parameters rest neither on the device nor on the host.
        self._far = {b.id.unit for b in schedule.resident if b.id.value is Value.PARAMETERS and b.memory not in _NEAR}
        #: The number of parts in which they move.
        self._part_counts = [1] * len(owned)
        for task in schedule.tasks:
            if task.id.kind is Kind.GPU_UPDATE:
                self._part_counts[task.id.unit] = max(self._part_counts[task.id.unit], task.id.again + 1)
        self.files = Files(memories.accelerator, folder)
        #: The block whose stored tensors were at hand last, and these: several uses of a block read its file once.
        self._read: tuple[int, list[Tensor]] | None = None
        self.units = [UnitTensors(mine, memories.torch_device, still) for mine, still in zip(owned, frozen, strict=True)]
        self.ranks = None if collectives is None else RankStates(self, collectives)
        for i, unit in enumerate(self.units):
            unit.cut = self._cut_of(i)
        self._slots: list[Tensor] | None = None
        self._buffers: list[Tensor] = []

    def take_over(self, held: dict[int, dict[str, Any]] | None = None) -> None:
        """Bring the states to where the first iteration expects them. This frees the modules' own memory.

        Args:
            held: optimizer states with which they begin, by the parameter's id; emptied. None: as before the first step.
        """
        self._slots = self._make_slots()
        sizes = self._resident_bytes(Value.POLICY_BUFFERS)
        self._buffers = [self.memories.on_device(size, torch.uint8, "policy_buffers") for size in sizes]
        for i, unit in enumerate(self.units):
            self._take_over(i, unit)
            for place, parameter in enumerate(unit.parameters):
                if held and id(parameter) in held:
                    self.load(i, place, {VALUES: self.values(i, place)} | held[id(parameter)])
                    del held[id(parameter)]

    def continue_from(self, before: States) -> None:
        """Continue after the last iteration of ``before``, with what is known of its updates and gradients."""
        self.gate, self.updates_at, self.handed_to = before.gate, before.updates_at, before.handed_to
        self.clipping.continue_from(before.clipping)
        for mine, theirs in zip(self.units, before.units, strict=True):
            mine.host.iteration = theirs.host.iteration  # of gradients that wait for a delayed update

    def is_placed_as(self, other: States) -> bool:
        """Whether all states are where ``other`` has them, between iterations."""
        return self._placement() == other._placement()

    def adopt(self, other: States) -> None:
        """Take all states from ``other``, which has them in the same places. They stay where they are."""
        self.units, self._slots, self._buffers = other.units, other._slots, other._buffers
        other.units, other._slots, other._buffers = [], None, []
        self.files, other.files = other.files, self.files  # of which nothing is open

    def count(self) -> None:
        """Count what is on the device, where the states have been adopted."""
        claim = self.memories.claim
        for tensor in self._slots or ():
            claim(tensor, "parameter_slots")
        for tensor in self._buffers:
            claim(tensor, "policy_buffers")
        for i, unit in enumerate(self.units):
            if unit.device.parameters is not None and not (self._slots and self.kinds[i] & _PREFETCHES):
                claim(unit.device.parameters, "parameters")
            if unit.device.shard is not None:
                claim(unit.device.shard, "parameter_shard")
            for part in unit.device.states:
                for tensor in part.optimizer.tensors if self._state_ways[i] == [GPU_MEMORY] else ():
                    claim(tensor, "optimizer_states")

    def _placement(self) -> object:
        """What the schedule says of the places of all states."""
        cuts, kinds = [unit.cut for unit in self.units], [some - _OF_PASSES for some in self.kinds]
        rest = [(b.id.value, b.id.unit, b.memory, b.size_bytes) for b in self.schedule.resident]
        parts = self._gradients_in_slots, self._norm_on_host, self._leaving, self._part_counts
        return cuts, kinds, rest, parts, self._state_ways

    def give_back(self) -> None:
        """Return the parameters to the modules, with their trained values, each in its own host memory, and their optimizer
        states to whoever takes them.

        A block for which there is no memory is tried again once those of the other blocks have been released.

        Raises:
            DriveError: a block cannot be read. All others are back.
        """
        self._slots, self._buffers, self._read = None, [], None
        with ExitStack() as last:
            last.callback(self.files.close)
            self.memories.settle()
            if self.ranks is not None:
                self.ranks.gives_back = True
            failed = []
            for i in range(len(self.units)):
                try:
                    self._give_back(i)
                except (MemoryError, RuntimeError, DriveError):  # PyTorch's of a full memory is the last one
                    failed.append(i)
            for i in failed:
                last.callback(self._give_back, i)

    def _give_back(self, i: int) -> None:
        unit = self.units[i]
        taken = (unit.stored.parameters, *(flat for side in unit.sides for flat in (side.parameters, side.shard)))
        if any(flat is not None for flat in taken):  # take_over has not failed before this block
            for place, parameter in enumerate((*unit.parameters, *unit.frozen)):
                parameter.data = self.values(i, place)
                parameter.grad = None
                if self.handed_to is not None and place < len(unit.parameters):
                    self.handed_to(parameter, self.saved_states(i, place))
        unit.forget_states()
        unit.forget_passes()

    # --- between steps, after every update has ended

    def values(self, i: int, place: int) -> Tensor:
        """The current values of a parameter of block ``i``, in its shape and type, copied to new host memory. Frozen parameters
        follow the trained ones.
        """
        if (index := place - len(self.units[i].parameters)) >= 0:
            with self._at_hand(i):
                return self.units[i].places.value(self._frozen(i)[0], index)
        # Master weights are rounded in the same way as by the update.
        with self._at_hand(i):
            return self._trained(i, place, self.units[i].layout.dtypes[place])

    def assign(self, i: int, place: int, values: Tensor) -> None:
        """Set the values of a parameter of block ``i`` wherever it is. Unchanged elements keep their master weights."""
        unit = self.units[i]
        with self._at_hand(i, changes=True):
            if (index := place - len(unit.parameters)) >= 0:
                for data in self._frozen(i):
                    unit.places.assign(data, index, values)
            else:
                for there, part in (*self._newest(i, place), *self._copies(i, place)):
                    found = values.reshape(-1)[part].to(there.device)
                    there.copy_(torch.where(_bits(found) != _bits(there.to(found.dtype)), found.to(there.dtype), there))
            self.memories.settle()

    def places(self) -> dict[int, tuple[int, int]]:
        """Block, and place in it, of each parameter that the states have, by its id; the trained ones come first."""
        held = ((i, (*unit.parameters, *unit.frozen)) for i, unit in enumerate(self.units))
        return {id(parameter): (i, place) for i, some in held for place, parameter in enumerate(some)}

    def saved_states(self, i: int, place: int) -> dict[str, Any]:
        """Copy a parameter's optimizer states, in its shape; also the gradient, if its update is delayed."""
        unit, found = self.units[i], dict[str, Any]()
        with self._at_hand(i):
            for states in self._parts(i):
                for name, value in states.optimizer.saved(place).items():
                    if isinstance(states.optimizer, UnitStates) and isinstance(value, Tensor):
                        value = torch.cat([found[name].view(-1), value]) if name in found else value
                    found[name] = value
        if self.ranks is not None and unit.stage:
            tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
            found |= self.ranks.whole(i, place, tensors)
        shape = unit.layout.shapes[place]
        if isinstance(self._parts(i)[0].optimizer, UnitStates):
            found = {name: value.view(shape) if isinstance(value, Tensor) else value for name, value in found.items()}
        gradient = unit.host.gradients[place] if self.delays(i) and unit.host.gradients else None
        if gradient is not None:
            found[GRADIENT] = gradient.to("cpu", copy=True).view(unit.layout.shapes[place])
        return found

    def load(self, i: int, place: int, saved: dict[str, Any]) -> None:
        """Load values and the result of :meth:`saved_states`."""
        unit = self.units[i]
        with self._at_hand(i, changes=True):
            for states in self._parts(i):
                states.optimizer.load(place, saved)
            for there, part in self._copies(i, place):
                there.copy_(saved[VALUES].reshape(-1)[part])
            self.memories.settle()
        if self.delays(i):
            host = unit.host
            host.gradients = host.gradients or [None] * len(unit.parameters)
            gradient = saved[GRADIENT].reshape(-1) if GRADIENT in saved else None
            host.gradients[place] = None if gradient is None else host.places[place].copy_(gradient)
        self.memories.settle()

    def delays_as(self, other: States) -> bool:
        """Whether the updates of the same blocks are delayed."""
        return self._delayed == other._delayed

    def delays(self, i: int) -> bool:
        """Whether block ``i`` is updated with the gradients of the previous step."""
        return i in self._delayed

    def parameters(self) -> list[Tensor]:
        """A copy of every trained parameter in block order, wherever it is; of its master weight, if it has one.

        Call it after every update has ended.
        """
        found = []
        for i, unit in enumerate(self.units):
            with self._at_hand(i):
                found += [self._trained(i, place, torch.float32) for place in range(len(unit.parameters))]
        self.memories.settle()
        return found

    @contextmanager
    def present(self, i: int) -> Iterator[None]:
        """Hold the parameters of block ``i`` on the device during the context."""
        if self.units[i].device.parameters is not None:
            yield
            return
        far = self.units[i].stored.parameters is not None
        if self.units[i].device.shard is None:
            self.copy_parameters(i, FAR if far else HOST_MEMORY, GPU_MEMORY)
        if self.ranks is not None and self.units[i].stage == 3:
            self.ranks.meet(f"the parameters of block {i}")
            self.ranks.gather_parameters(i)
        try:
            yield
        finally:
            self.poison(i)
            self.release(i)
            self.memories.settle()

    @contextmanager
    def _at_hand(self, i: int, *, changes: bool = False) -> Iterator[None]:
        """Hold what of block ``i`` rests in the file in memory during the context, and write it to the file if it changes.

        Raises:
            DriveError: it cannot be read or written.
        """
        unit, parts = self.units[i], [part for part in self._parts(i) if part.stored and not part.resting]
        whole = [one for one in (unit.stored.parameters, unit.stored.frozen) if one is not None]
        stored = [*whole, *(one for part in parts for one in part.stored)]
        if not stored:
            yield
            return
        if self._read is None or self._read[0] != i or len(self._read[1]) != len(stored):
            self._read = None  # before the next one is there
            self._read = i, [one.read() for one in stored]
        held = iter(self._read[1])
        unit.far.parameters, unit.far.frozen = (
            None if one is None else next(held) for one in (unit.stored.parameters, unit.stored.frozen)
        )
        absent = [part.optimizer.tensors for part in parts]
        for part in parts:
            part.optimizer.use([next(held) for _ in part.stored])
        try:
            yield
            if changes:
                for one, tensor in zip(stored, self._read[1], strict=True):
                    one.write(tensor)
        except BaseException:
            self._read = None
            raise
        finally:
            unit.far.parameters = unit.far.frozen = None
            for part, tensors in zip(parts, absent, strict=True):
                part.optimizer.use(tensors)

    # --- where states are

    def _take_over(self, i: int, unit: UnitTensors) -> None:
        flat = torch.empty(unit.elements, dtype=unit.dtype, device="cpu")
        for parameter, view in zip(unit.parameters, unit.views(flat), strict=True):
            view.copy_(parameter.detach())
            parameter.data = torch.empty(0, dtype=parameter.dtype, device="cpu")
            parameter.grad = None  # a step starts without gradients
        try:
            self._place_states(i, unit, flat)
            self._place_frozen(i, unit)
        except BaseException:
            unit.forget_states()
            for parameter, view in zip(unit.parameters, unit.views(flat), strict=True):
                parameter.data = view.clone()
            raise
        unit.bind()

    def _place_frozen(self, i: int, unit: UnitTensors) -> None:
        """Copy the frozen parameters to where they rest. A copy is on the device if the first forward fetches nothing."""
        if i in self._far:
            unit.stored.frozen = self.files.holding(torch.zeros(unit.places.size_bytes, dtype=torch.uint8, device="cpu"))
        elif self.kinds[i] & _PREFETCHES:
            unit.host.frozen = self.memories.on_host(unit.places.size_bytes, torch.uint8, "parameters")
        if not unit.frozen:
            return
        with self._at_hand(i, changes=True):
            for data in self._frozen(i):
                for index, parameter in enumerate(unit.frozen):
                    unit.places.assign(data, index, parameter.detach())

    def _frozen(self, i: int) -> list[Tensor]:
        """The bytes of the frozen parameters of block ``i`` in all memories."""
        return [side.frozen for side in self.units[i].sides if side.frozen is not None]

    def _place_states(self, i: int, unit: UnitTensors, flat: Tensor) -> None:
        kinds, memories = self.kinds[i], self.memories
        groups = [self.updates.group_of(parameter) for parameter in unit.parameters]
        for side in self._updating_sides(i):
            held = unit.on_host if side is unit.host else range(unit.shard.start, unit.cut or unit.shard.stop)
            begin, end = held.start, held.stop
            home = HOST_MEMORY if unit.cut and side is unit.host else self._state_ways[i][0]
            for elements in part_ranges(end - begin, self._part_counts[i]):
                first = begin + elements.start
                part = flat[first : begin + elements.stop]
                part = part.to(memories.torch_device) if home == GPU_MEMORY else part
                states = states_of_unit(self.updates, part, unit.layout, groups, first)
                side.states.append(moving := MovingStates(states, first))
                if home not in _NEAR:
                    moving.stored = [self.files.holding(tensor) for tensor in states.tensors]
                    states.use([one.absent for one in moving.stored])
                    continue
                if home == HOST_MEMORY and len(self._state_ways[i]) > 1:  # copied to the device and back in each step
                    pinned = [memories.on_host(tensor.numel(), tensor.dtype, "optimizer_states") for tensor in states.tensors]
                    states.use([to.view(one.shape).copy_(one) for to, one in zip(pinned, states.tensors, strict=True)])
                    continue
                claim = memories.claim if home == GPU_MEMORY else memories.claim_host
                for tensor in states.tensors:
                    claim(tensor, "optimizer_states")
        there = flat[unit.on_host.start : unit.on_host.stop]
        if kinds & {Kind.CPU_UPDATE, Kind.FETCH_GRADIENTS}:
            unit.host.room = memories.on_host(len(there), unit.dtype, "gradients").zero_()
            unit.host.places = _split(unit.host.room, unit)
        if i in self._far:
            unit.stored.parameters = self.files.holding(there)
        elif kinds & {Kind.CPU_UPDATE, *_PREFETCHES}:
            unit.host.parameters = memories.on_host(len(there), unit.dtype, "parameters").copy_(there)
        if unit.stage == 3:
            if not kinds & _PREFETCHES:
                mine = flat[unit.shard.start : unit.shard.stop]
                unit.device.shard = memories.on_device(len(mine), unit.dtype, "parameter_shard").copy_(mine)
        elif Kind.PREFETCH_FORWARD not in kinds:  # they never leave, or the first forward fetches nothing
            self.put(i).copy_(flat)

    def _cut_of(self, i: int) -> int:
        """Number of elements of block ``i`` that the device updates if both sides update a part, derived from the bytes of
        their states in the schedule; 0: one side updates all.

        Raises:
            ScheduleError: the schedule does not define it, or moves what such a block can only move as a whole.
        """
        kinds, unit = self.kinds[i], self.units[i]
        if not kinds >= _UPDATES:
            return 0
        told = f"GPU and CPU each update a part of block {i}"
        if moved := sorted(kinds & _OF_WHOLE_BLOCKS, key=KIND_ORDER.__getitem__):
            raise ScheduleError(
                f"{told}, but the schedule has a {KIND_MEANING[moved[0]]} for it: let its parameters, states and sums of "
                "gradients stay where they are used, or one side update all of it"
            )
        if i in self._delayed or i in self._norm_on_host:
            why = "its CPU update is delayed" if i in self._delayed else "the norm of its gradients is computed on the host"
            raise ScheduleError(f"{told}, but {why}: the host has only a part of the gradients; let one side update all of it")
        groups = [self.updates.group_of(parameter) for parameter in unit.parameters]
        if unit.layout.is_mixed or not self.updates.may_be_cut(groups):
            raise ScheduleError(
                f"{told}, but its optimizer updates whole parameters, or they have several types: let one side update all of it"
            )
        states = (b for b in self.schedule.resident if (b.id.value, b.id.unit) == (Value.OPTIMIZER_STATES, i))
        size = sum(b.size_bytes for b in states if b.memory == GPU_MEMORY)
        of_each = self.updates.state_bytes(unit.dtype, groups[0])
        whole = unit.elements if self.ranks is None or not unit.stage else self.ranks.largest_share(unit)
        if not of_each or size % of_each or not 0 < size < whole * of_each:
            raise ScheduleError(
                f"{told}, but the schedule gives the GPU {size} bytes of its optimizer states: give a positive multiple of "
                f"{of_each}, the bytes of an element, less than the {whole * of_each} of the whole block"
            )
        return min(unit.shard.start + size // of_each, unit.shard.stop)

    def _updating_sides(self, i: int) -> list[UnitSide]:
        """The sides that update the block: the device before the host, which has the later elements."""
        unit, kinds = self.units[i], self.kinds[i]
        if unit.cut:
            return [unit.device, unit.host]
        return [unit.host if Kind.CPU_UPDATE in kinds else unit.device]

    def _newest(self, i: int, place: int) -> Iterator[tuple[Tensor, slice]]:
        """The up-to-date values of a parameter of block ``i`` after every update: flat tensors, each with its elements.

        Master weights, if there are any: a gradient may have overwritten the parameters.
        """
        unit = self.units[i]
        for side in self._updating_sides(i):
            # The updating side is current; what it updates on the device may have been written back and released.
            here, base = side.parameters, unit.on_host.start if side is unit.host else 0
            if here is None and side.shard is not None:
                here, base = side.shard, unit.shard.start
            if here is None:
                here = next(flat for flat in (unit.host.parameters, unit.far.parameters) if flat is not None)
                base = unit.on_host.start
            for part in side.states:
                if (master := part.optimizer.newest(place)) is not None:
                    elements = part.optimizer.parts[place]
                    yield master, slice(elements.first, elements.last)
                else:
                    assert here is not None
                    yield unit.overlap(here[part.begin - base :][: part.optimizer.elements], part.begin, place)

    def _parts(self, i: int) -> list[MovingStates]:
        """The optimizer states of block ``i``, in the order of its elements."""
        return [part for side in self._updating_sides(i) for part in side.states]

    def _copies(self, i: int, place: int) -> Iterator[tuple[Tensor, slice]]:
        """The copies of a parameter of block ``i`` in all memories: flat tensors, each with its elements."""
        unit = self.units[i]
        places = (
            (unit.host.parameters, unit.on_host.start),
            (unit.far.parameters, unit.on_host.start),
            (unit.device.shard, unit.shard.start),
            (unit.device.parameters, 0),
        )
        return (unit.overlap(flat, begin, place) for flat, begin in places if flat is not None)

    def _trained(self, i: int, place: int, dtype: torch.dtype) -> Tensor:
        """The newest values of a parameter of block ``i``, in its shape, copied to new host memory."""
        unit = self.units[i]
        found = torch.empty(unit.layout.shapes[place], dtype=dtype, device="cpu")
        newest, is_whole = self._newest(i, place), not unit.stage
        if unit.stage in (1, 2) and dtype is unit.dtype and unit.device.parameters is not None:  # gathered after each update
            newest, is_whole = iter([unit.overlap(unit.device.parameters, 0, place)]), True
        mine = []
        for there, part in newest:
            found.view(-1)[part].copy_(there)
            mine.append(found.view(-1)[part])
        if is_whole or self.ranks is None:
            return found
        return self.ranks.whole(i, place, {VALUES: torch.cat(mine)})[VALUES].view(unit.layout.shapes[place])

    # --- memory on the device

    def _resident_bytes(self, value: Value) -> list[int]:
        """Sizes of the buffers of ``value`` that are permanently on the device."""
        return [b.size_bytes for b in self.schedule.resident if b.id.value is value and b.memory == GPU_MEMORY]

    def _make_slots(self) -> list[Tensor] | None:
        """Preallocated slots for fetched parameters, each as large as the largest block that leaves."""
        total = sum(self._resident_bytes(Value.PARAMETER_SLOTS))
        if not total:
            return None
        leaving = [unit for unit, kinds in zip(self.units, self.kinds, strict=True) if kinds & _PREFETCHES]
        slot = max(unit.size_bytes + self._gradients_in_slots * unit.trained_bytes for unit in leaving)
        return [self.memories.on_device(slot, torch.uint8, "parameter_slots") for _ in range(total // slot)]

    def put(self, i: int) -> Tensor:
        """Give the parameters of block ``i`` memory on the device, and return that of the trained ones, flat."""
        unit = self.units[i]
        unit.put(self._place_for(i))
        assert unit.device.parameters is not None, "there is room for them"
        return unit.device.parameters

    def _place_for(self, i: int) -> torch.UntypedStorage:
        """Device memory for the parameters of block ``i``."""
        if self._slots is None or not self.kinds[i] & _PREFETCHES:
            return self.memories.on_device(self.units[i].size_bytes, torch.uint8, "parameters").untyped_storage()
        if not self._slots:
            raise ScheduleError("all slots for parameters are taken: the schedule fetches earlier than it releases")
        return self._slots.pop().untyped_storage()

    def poison(self, i: int) -> None:
        """If enabled, overwrite the parameters of block ``i`` on the device before they are released."""
        side = self.units[i].device
        if self._poison and side.parameters is not None and side.frozen is not None:
            side.parameters.fill_(torch.nan)
            side.frozen.fill_(0xFF)  # NaN in any floating-point type

    def release(self, i: int) -> None:
        """Release the device memory of the parameters of block ``i``, if any.

        The memory is released once the work of the current task is done: another lane may reuse it at once.
        """
        unit = self.units[i]
        flat = unit.device.parameters
        if flat is None:
            return
        self.memories.current.alive.append(flat)
        if self._slots is not None:
            slot = torch.empty(0, dtype=torch.uint8, device=flat.device).set_(flat.untyped_storage())
            self.memories.once_done(partial(self._slots.append, slot))
        unit.device.parameters = unit.device.frozen = None
        unit.bind()

    def release_on_host(self, i: int) -> None:
        """Release the host's memory of parameters of block ``i`` that have passed it."""
        if i in self._far:
            host = self.units[i].host
            self.memories.current.alive += [host.parameters, host.frozen]
            host.parameters = host.frozen = None

    def make_gradients(self, i: int) -> None:
        """Provide device memory for the gradients of block ``i``: in its slot, or wherever autograd allocates them."""
        unit = self.units[i]
        side = unit.device
        with self._placing:
            if side.gradients:  # those of the previous micro-batch
                side.sums, side.places = Sums(side.gradients, side.reserved, side.places), []
            side.gradients = [None] * len(unit.parameters)
        if self._gradients_in_slots and self.kinds[i] & _PREFETCHES:
            assert side.parameters is not None
            storage = side.parameters.untyped_storage()
            behind = (storage.nbytes() - unit.trained_bytes) // unit.dtype.itemsize  # the end of the slot
            flat = torch.empty(0, dtype=unit.dtype, device=side.parameters.device)
            side.places = unit.views(flat.set_(storage, behind, (unit.elements,), (1,)))
        else:
            # Reserve all of it now, like the schedule, so that memory does not depend on the order of gradients.
            side.reserved = self.memories.reserve(unit.elements * unit.dtype.itemsize, "gradients")

    def take_gradient(self, i: int, place: int, gradient: Tensor) -> None:
        """Keep the gradient that a backward has found for a parameter. Accumulates for a matrix that two blocks share.

        Raises:
            ScheduleError: the schedule has no memory for it yet.
            InputError: the gradient is sparse.
        """
        side = self.units[i].device
        if not side.gradients:
            raise ScheduleError(
                f"{self.memories.current.task} finds a gradient of block {i}, for which the schedule has no room yet: if "
                "the head shares the embedding's matrix, make the schedule with tied_embeddings"
            )
        if gradient.layout is not torch.strided:
            raise InputError(
                f"block {i} has a gradient of layout {gradient.layout}: an update needs dense gradients, such as those of "
                "nn.Embedding(sparse=False)"
            )
        held = side.gradients[place]
        if held is not None:
            held.add_(gradient)
        elif side.places:
            side.gradients[place] = side.places[place].copy_(gradient)
        else:
            if gradient.untyped_storage().nbytes() != gradient.nbytes or not gradient.is_contiguous():
                gradient = gradient.clone(memory_format=torch.contiguous_format)  # not the whole tensor it is a part of
            self.memories.forget(gradient)
            side.gradients[place] = gradient
        side.iteration = self.memories.current.iteration

    def _drop_used(self, unit: UnitTensors, entry: int = 0) -> None:
        """Drop gradients on the device that have been used: of a shard those of an entry, as others may be on their way."""
        if unit.stage >= 2:
            self.memories.current.alive.append(unit.device.reduced.pop(entry))
        else:
            self._drop_gradients(unit.device)

    def _drop_gradients(self, side: UnitSide) -> None:
        self.memories.current.alive += [side.gradients, side.reserved]
        side.gradients, side.places, side.reserved = [], [], None

    def end_backward(self, i: int) -> None:
        """Set aside a micro-batch's gradients that are to be copied to the host: the next backward may begin before that."""
        if self.ranks is not None:  # which reduce them first
            self.ranks.end_backward(i)
            return
        side, micro_batch = self.units[i].device, self.memories.current.micro_batch
        if micro_batch + 1 < self.micro_batches and (i, micro_batch) in self._leaving:
            side.leaving[micro_batch] = side.gradients, side.reserved
            side.gradients, side.places, side.reserved = [], [], None

    def add_gradients(self, i: int) -> None:
        """Add the finished gradients of a micro-batch to the sums of the previous ones, in the same order as PyTorch."""
        side = self.units[i].device
        assert side.sums is not None
        sums = side.sums
        for place, gradient in enumerate(side.gradients):
            if gradient is not None and sums.places and sums.gradients[place] is None:
                sums.gradients[place], side.gradients[place] = sums.places[place].copy_(gradient), None
        _add(sums.gradients, side.gradients)
        self._check_sums(i, sums.gradients)
        self.memories.current.alive += [side.gradients, side.reserved]
        side.gradients, side.reserved, side.sums = sums.gradients, sums.reserved, None

    def add_arrived(self, i: int) -> None:
        """The same on the host, for gradients that have arrived there."""
        side = self.units[i].host
        if self.memories.current.micro_batch not in side.arrived:
            raise ScheduleError(f"{self.memories.current.task} adds gradients that have not been copied to the host")
        arrived = side.arrived.pop(self.memories.current.micro_batch)
        for place, gradient in enumerate(arrived):
            if gradient is not None and side.gradients[place] is None:
                side.gradients[place] = side.places[place].copy_(gradient)
                arrived[place] = None
        _add(side.gradients, arrived)
        self._check_sums(i, side.gradients)

    def _check_sums(self, i: int, sums: Sequence[Tensor | None]) -> None:
        """Report sums over all micro-batches that are not finite, though each gradient is: in 16 bit a sum may be too large."""
        if self.not_finite is not None and self.memories.current.micro_batch == self.micro_batches - 1:
            places = [place for place, held in enumerate(sums) if held is not None]
            found = not_finite_among([held for held in sums if held is not None], self.memories.accelerator)
            self.memories.once_done(partial(self._refuse, i, places, found))

    def _refuse(self, i: int, places: Sequence[int], found: Callable[[], int | None]) -> None:
        bad = found()
        if bad is not None and self.not_finite is not None:
            self.not_finite(i, places[bad])

    def replace_parameters(self, i: int) -> None:
        """Overwrite the parameters of block ``i`` with its finished gradients."""
        side = self.units[i].device
        assert side.parameters is not None
        if not all(map(self.updates.has_masters, self.units[i].layout.dtypes)):
            raise ScheduleError(
                f"{self.memories.current.task} replaces parameters of block {i} by their gradients, but some have no master "
                "weights, and the update needs them: choose a policy that keeps parameters, such as zero_offload"
            )
        places = self.units[i].views(side.parameters)
        replaced = [
            None if gradient is None else place.copy_(gradient) for place, gradient in zip(places, side.gradients, strict=True)
        ]
        self._drop_gradients(side)
        side.gradients = replaced

    # --- updates

    def updates_of(self, iteration: int) -> UpdateSettings:
        """What the updates of an iteration compute."""
        return self.updates_at.get(iteration, self.updates)

    def _scale_of(self, iteration: int) -> Tensor | None:
        """The factor of the gradients of an iteration: that of clipping, and what undoes the scale of the loss."""
        factor, scale = self.clipping.coefficient(iteration), self.updates_of(iteration).loss_scale
        if scale == 1.0:
            return factor
        return (torch.ones(()) if factor is None else factor) / scale

    def measure_gradients(self, i: int) -> None:
        """Compute the norms of the block's gradients where they are complete."""
        gradients, iteration = self.complete_gradients(i), self.memories.current.iteration
        own = gradients if self.ranks is None else self.ranks.own_only(i, gradients)
        factor = 1.0 / self.updates_of(iteration).loss_scale
        self.clipping.measure(iteration, i, own, factor, self.memories.accelerator)
        if self.ranks is not None and i not in self._norm_on_host:  # those on the host wait for the lane of collectives
            self.ranks.measure_shared(i, gradients)

    def complete_gradients(self, i: int) -> Sequence[Tensor | None]:
        """The gradients of a block where its norm is computed; of several ranks' flat parts this rank's."""
        unit = self.units[i]
        if i in self._norm_on_host:
            return unit.host.gradients
        return (
            unit.gradients_of(parts_of(unit.sizes, unit.shard.start, unit.shard.stop)) if unit.stage else unit.device.gradients
        )

    def clip(self, i: int) -> None:
        """Compute the scale of this iteration's gradients from all norms."""
        if self.ranks is not None:
            self.ranks.complete_norms(self._norm_on_host)
        self.clipping.combine(self.memories.current.iteration)

    def gpu_update(self, i: int) -> None:
        """Update with a part of the device's states, or with all of them."""
        side, part = self.units[i].device, self.memories.current.part
        self._update(i, side, self.units[i].gradients_of(side.states[part].optimizer.parts))
        if part + 1 == len(side.states):
            self._drop_used(self.units[i])

    def cpu_update(self, i: int) -> None:
        """Update with the host's states, and write the new parameters to the host's copy."""
        side = self.units[i].host
        self._update(i, side, side.gradients)
        if i in self._delayed and side.gradients:  # a step that fails before it has others must not leave these again
            side.gradients = [None] * len(side.gradients)

    def _update(self, i: int, side: UnitSide, gradients: Sequence[Tensor | None]) -> None:
        part, parameters = side.states[self.memories.current.part], side.parameters
        optimizer, base = part.optimizer, self.units[i].on_host.start if side is self.units[i].host else 0
        if parameters is None and side.shard is not None:
            parameters, base = side.shard, self.units[i].shard.start
        if parameters is None and side is self.units[i].host and optimizer.master is not None:  # on the way to their place
            there = self.memories.on_host(len(self.units[i].on_host), self.units[i].dtype, "parameters")
            optimizer.restore(there)
            parameters = side.parameters = there
        assert parameters is not None
        if len(part.resting) < len(self._state_ways[i]) - 1:
            raise ScheduleError(f"{self.memories.current.task} updates with states that the schedule has not fetched before it")
        optimizer.updates = self.updates_of(self.memories.current.iteration)
        if all(gradient is None for gradient in gradients):  # a delayed update in the first iteration, or a skipped one
            return
        mine = parameters[part.begin - base :][: optimizer.elements]
        if self.gate.admits(side.iteration, i):
            scratch, counted = optimizer.scratch(), None
            watched: AbstractContextManager[None] = nullcontext()
            if side is self.units[i].device:
                self.memories.claim(scratch, WORKSPACE)
                if self.memories.device is not None:
                    counted = self.memories.reserve(optimizer.temporary_bytes, WORKSPACE)
                watched = self._watched(optimizer)
            scale = self._scale_of(side.iteration)
            with watched:
                optimizer.update(mine, gradients, scratch, scale)
            del counted
        else:
            optimizer.restore(mine)  # gradients may have overwritten the parameters

    def _watched(self, optimizer: UnitStates | WholeStates) -> AbstractContextManager[None]:
        """Count what an update of whole parameters allocates on the device, as it depends on their shapes."""
        ledger, count = self.memories.device, self.memories.count
        if isinstance(optimizer, UnitStates) or ledger is None or count is None:
            return nullcontext()
        return accounting(ledger, self.memories.current.task, WORKSPACE, count.compare)

    # --- copies

    def copy_parameters(self, i: int, source: str, target: str) -> None:
        """Copy parameters from one memory to their place in another, or to new memory on the device."""
        unit = self.units[i]
        if source not in _NEAR:
            self._read_parameters(i, target)
            return
        there, here = unit.side(source).parameters, unit.side(target).parameters
        if there is None:
            raise ScheduleError(f"{self.memories.current.task} copies parameters from {source}, but they are not there")
        if target not in _NEAR:
            self._read = None
            assert unit.stored.parameters is not None
            unit.stored.parameters.write(there)
            return
        frozen = unit.side(source).frozen
        if here is None and target == HOST_MEMORY:
            unit.host.parameters = self.memories.on_host(len(unit.on_host), unit.dtype, "parameters").copy_(
                there, non_blocking=True
            )
            return
        if target == GPU_MEMORY and unit.stage == 3:
            if unit.device.shard is None:
                unit.device.shard = self.memories.on_device(len(unit.shard), unit.dtype, "parameter_shard")
            unit.device.shard[unit.on_host.start - unit.shard.start :].copy_(there, non_blocking=True)
            return
        if here is not None:
            # Of a block that both sides update, or several ranks, only the host's part is copied, and only to the device.
            mine = here if target == HOST_MEMORY else here[unit.on_host.start : unit.on_host.stop]
            mine.copy_(there, non_blocking=True)
            return
        assert target == GPU_MEMORY
        self.put(i).copy_(there, non_blocking=True)
        if frozen is not None and unit.device.frozen is not None:
            unit.device.frozen.copy_(frozen, non_blocking=True)
        unit.bind()

    def _read_parameters(self, i: int, target: str) -> None:
        """Read parameters from the file to new memory on the host or on the device."""
        unit = self.units[i]
        trained, frozen = unit.stored.parameters, unit.stored.frozen
        assert trained is not None
        assert frozen is not None
        self._read = None  # what was at hand between steps
        if target == GPU_MEMORY:
            trained.read(self.put(i))
            assert unit.device.frozen is not None
            frozen.read(unit.device.frozen)
            unit.bind()
            return
        on_host = self.memories.on_host
        unit.host.parameters = trained.read(on_host(len(unit.on_host), unit.dtype, "parameters"))
        unit.host.frozen = frozen.read(on_host(unit.places.size_bytes, torch.uint8, "parameters"))

    def copy_states(self, i: int, source: str, target: str) -> None:
        """Copy optimizer states from one memory to new places nearer to the update, or back to where they were.

        Raises:
            ScheduleError: they are not in ``source``.
            DriveError: they cannot be read or written.
        """
        (side,) = self._updating_sides(i)
        part = side.states[self.memories.current.part]
        optimizer, way, place = part.optimizer, self._state_ways[i], len(part.resting)
        if way[place] != source:
            raise ScheduleError(
                f"{self.memories.current.task} copies states from {source}, but they are in {way[place]} memory"
            )
        if source not in _NEAR and Kind.WRITE_GRADIENTS in self.kinds[i]:
            if (gradients := self.units[i].stored.gradients) is None:
                raise ScheduleError(f"{self.memories.current.task} reads gradients that have not been written")
            gradients.read(self.units[i].host.room)
        if target in way[place:]:
            sources: Sequence[Tensor | Stored] = optimizer.tensors if place or not part.stored else part.stored
            copied = [self._copied(one, target) for one in sources]
            part.resting.append(optimizer.tensors)
            optimizer.use(copied)
            return
        if target not in _NEAR:
            self._read = None
        places: Sequence[Tensor | Stored] = part.resting[-1] if target in _NEAR else part.stored
        for tensor, there in zip(optimizer.tensors, places, strict=True):
            if isinstance(there, Stored):
                there.write(tensor)
            else:
                there.copy_(tensor, non_blocking=True)
        self.memories.current.alive.append(optimizer.tensors)
        optimizer.use(part.resting.pop())

    def _fetch_sums(self, i: int) -> None:
        """Copy the sums of the previous micro-batches to new memory on the device, for a backward to add to them."""
        unit = self.units[i]
        places = unit.views(self.memories.on_device(unit.elements, unit.dtype, "gradients"))
        copied = [
            None if held is None else place.copy_(held.view(place.shape), non_blocking=True)
            for place, held in zip(places, unit.host.gradients, strict=True)
        ]
        with self._placing:
            if unit.device.gradients:  # of a matrix that two blocks share, the other block's gradient is there
                unit.device.sums = Sums(copied, places=places)
            else:
                unit.device.gradients, unit.device.places = copied, places

    def _write_gradients(self, i: int) -> None:
        """Write the gradients from their places on the host to the file. An update needs them read back."""
        unit = self.units[i]
        assert unit.host.room is not None
        if unit.stored.gradients is None:
            unit.stored.gradients = self.files.place_for(unit.host.room)
        unit.stored.gradients.write(unit.host.room)
        for gradient in unit.host.gradients:
            if gradient is not None:
                gradient.fill_(torch.nan)  # invalid until they are read back

    def _copied(self, source: Tensor | Stored, target: str) -> Tensor:
        """A copy of states in new memory."""
        make = self.memories.on_device if target == GPU_MEMORY else self.memories.on_host
        return copied_to(make(source.shape.numel(), source.dtype, "optimizer_states").view(source.shape), source)

    def copy_gradients(self, i: int, source: str, target: str) -> None:
        """Copy gradients from one memory to their places in another, or next to the sums to which they will be added. The
        source then drops them.
        """
        if target not in _NEAR:
            self._write_gradients(i)
            return
        if target == GPU_MEMORY:
            self._fetch_sums(i)
            return
        unit, micro_batch = self.units[i], self.memories.current.micro_batch
        there, here = unit.side(source), unit.side(target)
        entry = micro_batch if Kind.ACCUMULATE in self.kinds[i] else 0
        beside = entry > 0
        places = here.places
        if beside:
            places = _split(self.memories.on_host(len(unit.on_host), unit.dtype, "arrived_gradients"), unit)
        parts, (leaving, reserved) = _parts_on_host(unit), there.leaving.pop(micro_batch, (None, None))
        found = unit.gradients_of(parts, entry) if leaving is None else parts_in(parts, leaving)
        copied = _copied_together(places, found)
        if beside:
            here.arrived[micro_batch] = copied
        else:
            here.gradients = copied
        here.iteration = there.iteration
        if leaving is not None:
            self.memories.current.alive += [leaving, reserved]
        elif not unit.cut:  # otherwise the update on the device uses them, too
            self._drop_used(unit, entry)


def _copied_together(places: Sequence[Tensor], sources: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copy tensors to their places by one call; those that are not None."""
    pairs = [(place, source) for place, source in zip(places, sources, strict=True) if source is not None]
    if pairs:
        torch._foreach_copy_([place for place, _ in pairs], [source for _, source in pairs], non_blocking=True)
    return [None if source is None else place for place, source in zip(places, sources, strict=True)]


def _parts_on_host(unit: UnitTensors) -> list[ElementRange]:
    """For each parameter, the elements whose gradients are on the host."""
    if unit.layout.is_mixed:
        sizes = [shape.numel() for shape in unit.layout.shapes]
        return parts_of(sizes, 0, sum(sizes))
    return parts_of(unit.sizes, unit.on_host.start, unit.on_host.stop)


def _split(flat: Tensor, unit: UnitTensors) -> list[Tensor]:
    """Flat views of ``flat`` for these elements, one per parameter."""
    if unit.layout.is_mixed:
        return [view.view(-1) for view in unit.views(flat)]
    return list(torch.split(flat, [part.elements for part in _parts_on_host(unit)]))


def _add(sums: list[Tensor | None], gradients: list[Tensor | None]) -> None:
    for place, gradient in enumerate(gradients):
        held = sums[place]
        if held is None:
            sums[place] = gradient
        elif gradient is not None:
            held.add_(gradient)


def ends_of_copies(schedule: Schedule) -> dict[str, tuple[str, str]]:
    """The memories between which each lane with copies copies: source and target.

    Raises:
        ScheduleError: a lane with a copy does not define them.
    """
    ends = {lane.name: lane.ends for lane in schedule.lanes}
    for task in schedule.tasks:
        if task.id.kind in COPIES and ends.get(task.lane) is None:
            raise ScheduleError(f"{task.id} is a copy, but lane {task.lane} has no source and target: give it both")
    return {name: pair for name, pair in ends.items() if pair is not None}


def _ways_of_states(schedule: Schedule, kinds: Sequence[set[Kind]]) -> list[list[str]]:
    """For each block, the memories on the way of its optimizer states, from where they rest to where they are updated."""
    ends = ends_of_copies(schedule)
    ways = [[GPU_MEMORY if Kind.GPU_UPDATE in some else HOST_MEMORY] for some in kinds]
    for kind in (Kind.FETCH_STATES, Kind.READ_STATES):
        for task in schedule.tasks:
            if task.id.kind is kind and ends[task.lane][0] not in ways[task.id.unit]:
                ways[task.id.unit].insert(0, ends[task.lane][0])
    return ways


def _bits(values: Tensor) -> Tensor:
    """View as integers, which are equal if and only if ``values`` are bit-identical, NaN included."""
    return values.contiguous().view({2: torch.int16, 4: torch.int32}[values.itemsize])


def _kinds_of_blocks(schedule: Schedule, units: int) -> list[set[Kind]]:
    """The kinds of task of each block.

    Raises:
        ScheduleError: the schedule is not for a model of ``blocks`` blocks.
    """
    kinds: list[set[Kind]] = [set() for _ in range(units)]
    for task in schedule.tasks:
        if task.id.unit >= units:
            raise ScheduleError(
                f"{task.id} is of block {task.id.unit}, but the model has {units} blocks (embedding and head "
                "included): make the schedule for this model"
            )
        if task.id.kind not in Kind:
            raise ScheduleError(f"the runtime has no action for {KIND_MEANING[task.id.kind]}")
        kinds[task.id.unit].add(task.id.kind)
    for i, found in enumerate(kinds):
        if Kind.FORWARD not in found:
            raise ScheduleError(f"the schedule has no forward of block {i}, but the model has {units} blocks")
    return kinds
