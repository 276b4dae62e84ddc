"""Offloaded activations: copies of what backward needs to where it rests after forward, and back for backward."""

from __future__ import annotations

from autohete.lowering.builder import Builder, on_gpu
from autohete.lowering.copies import Copies
from autohete.lowering.shards import Shards
from autohete.plan import Plan
from autohete.plan.moves import Move
from autohete.schedule import HOST_MEMORY, BufferId, Kind, TaskId, Value


class OffloadedActivations:
    """Adds the copies of activations, or of inputs if activations are recomputed, to a builder.

    Args:
        builder: collects the tasks.
        copies: adds them.
        plan: how early they are fetched.
        shards: the parts of activations.
        pinned: the memory of pinned buffers.
    """

    def __init__(self, builder: Builder, copies: Copies, plan: Plan, shards: Shards, pinned: str) -> None:
        self._builder, self._copies, self._plan, self._pinned = builder, copies, plan, pinned
        self._parts, self._results = shards.saved_parts, shards.results
        #: The ranks of each unit's forward and of its backward.
        self._came_from, self._goes_to = plan.forward_ranks(), plan.backward_ranks()

    def after_forward(self, forward: TaskId) -> None:
        """Copy to where they rest, part by part."""
        unit, micro_batch, b = forward.unit, forward.micro_batch, self._builder
        for part in self._copies.parts_away[unit]:
            away = self._copies.add(Kind.OFFLOAD_ACTIVATIONS, unit, -1 - unit, micro_batch, part)
            move = self._move(Kind.OFFLOAD_ACTIVATIONS, unit, micro_batch, part)
            b.after(away, forward)
            if self._came_from[unit] != self._goes_to[unit]:  # into the memory that the other rank has freed
                fetch = TaskId(Kind.FETCH_ACTIVATIONS, unit, micro_batch, again=part)
                b.waits_elsewhere.append((away, fetch, self._goes_to[unit], 1))
                b.after(b.maker(on_gpu(Value.INPUT, unit, micro_batch)), away, back=1)  # no backward here does that
            b.read(away, move.value, unit)
            b.make(away, self._at(move.target, move, unit, micro_batch), move.size_bytes)
            if self._has_input(unit, part):
                b.free(away, on_gpu(Value.INPUT, unit, micro_batch))
            if move.value is Value.ACTIVATIONS:
                b.free(away, on_gpu(Value.ACTIVATIONS, unit, micro_batch, again=part))
            if further := self._copies.find(Kind.WRITE_ACTIVATIONS, unit, micro_batch, part):
                write = self._copies.add(Kind.WRITE_ACTIVATIONS, unit, -1 - unit, micro_batch, part)
                b.read(write, move.value, unit, HOST_MEMORY)
                b.make(write, self._at(further.target, move, unit, micro_batch), move.size_bytes)
                b.free(write, self._at(move.target, move, unit, micro_batch))

    def bring(self, user: TaskId) -> None:
        """Copy back for the pass ``user``, if it is the first pass of backward that needs them."""
        unit, micro_batch, b = user.unit, user.micro_batch, self._builder
        if not self._copies.parts_away[unit] or user != b.first_backward(unit, micro_batch):
            return
        priority, forward = b.backward_priority(unit), TaskId(Kind.FORWARD, unit, micro_batch)
        # What may begin earlier is issued earlier, so that on a fifo lane it does not queue behind what has to wait longer.
        for part in sorted(self._copies.parts_away[unit], key=lambda part: -self._ahead(unit, part)):
            ahead = self._ahead(unit, part)
            move = self._move(Kind.FETCH_ACTIVATIONS, unit, micro_batch, part)
            there = self._at(move.source, move, unit, micro_batch)
            if further := self._copies.find(Kind.READ_ACTIVATIONS, unit, micro_batch, part):
                read = self._copies.add(Kind.READ_ACTIVATIONS, unit, priority, micro_batch, part)
                there = self._at(move.source, move, unit, micro_batch, Kind.BACKWARD)
                b.read(read, move.value, unit, further.source)
                b.make(read, there, move.size_bytes)
                b.free(read, self._at(further.source, move, unit, micro_batch))
                b.beside(read, user, ahead + bool(ahead), forward)  # one pass earlier than the fetch may begin
            fetch = self._copies.add(Kind.FETCH_ACTIVATIONS, unit, priority, micro_batch, part)
            b.read(fetch, move.value, unit, move.source)
            b.make(fetch, on_gpu(move.value, unit, micro_batch, Kind.BACKWARD, part), move.size_bytes)
            if self._came_from[unit] == self._goes_to[unit]:
                b.free(fetch, there)
            else:
                away = TaskId(Kind.OFFLOAD_ACTIVATIONS, unit, micro_batch, again=part)
                b.waits_elsewhere.append((fetch, away, self._came_from[unit], 0))
                b.frees_elsewhere.append((fetch, there, self._came_from[unit]))
            b.beside(fetch, user, ahead, forward)

    def _move(self, kind: Kind, unit: int, micro_batch: int, part: int) -> Move:
        move = self._copies.find(kind, unit, micro_batch, part)
        assert move is not None, "the parts that leave have copies there and back"
        return move

    def _has_input(self, unit: int, part: int) -> bool:
        """Whether the input goes with a part."""
        parts = self._parts(unit)
        return parts[part].route == self._plan.units[unit].kept if parts else not part

    def _ahead(self, unit: int, part: int) -> int:
        parts = self._parts(unit)
        if not parts and part:
            return self._results(unit)[part - 1].route.ahead
        return (parts[part].route if parts else self._plan.units[unit].kept).ahead

    def _at(self, memory: str, move: Move, unit: int, micro_batch: int, use: Kind | None = None) -> BufferId:
        return BufferId(move.value, self._pinned if memory == HOST_MEMORY else memory, unit, use, micro_batch, move.part)
