"""Offloaded activations: copies of what backward needs to where it rests after forward, and back for backward."""

from __future__ import annotations

from autohete.lowering.builder import Builder, on_gpu
from autohete.lowering.copies import Copies
from autohete.plan import Plan
from autohete.plan.moves import Move
from autohete.schedule import HOST_MEMORY, BufferId, Kind, TaskId, Value


class OffloadedActivations:
    """Adds the copies of activations, or of inputs if activations are recomputed, to a builder.

    Args:
        builder: collects the tasks.
        copies: adds them.
        plan: how early they are fetched.
        pinned: the memory of pinned buffers.
    """

    def __init__(self, builder: Builder, copies: Copies, plan: Plan, pinned: str) -> None:
        self._builder, self._copies, self._plan, self._pinned = builder, copies, plan, pinned

    def after_forward(self, forward: TaskId) -> None:
        """Copy to where they rest."""
        unit, micro_batch = forward.unit, forward.micro_batch
        move = self._copies.find(Kind.OFFLOAD_ACTIVATIONS, unit, micro_batch)
        if move is None:
            return
        b, away = self._builder, self._copies.add(Kind.OFFLOAD_ACTIVATIONS, unit, -1 - unit, micro_batch)
        b.after(away, forward)
        b.read(away, move.value, unit)
        b.make(away, self._at(move.target, move, unit, micro_batch), move.size_bytes)
        b.free(away, on_gpu(Value.INPUT, unit, micro_batch))
        if move.value is Value.ACTIVATIONS:
            b.free(away, on_gpu(Value.ACTIVATIONS, unit, micro_batch))
        if further := self._copies.find(Kind.WRITE_ACTIVATIONS, unit, micro_batch):
            write = self._copies.add(Kind.WRITE_ACTIVATIONS, unit, -1 - unit, micro_batch)
            b.read(write, move.value, unit, HOST_MEMORY)
            b.make(write, self._at(further.target, move, unit, micro_batch), move.size_bytes)
            b.free(write, self._at(move.target, move, unit, micro_batch))

    def bring(self, user: TaskId) -> None:
        """Copy back for the pass ``user``, if it is the first pass of backward that needs them."""
        unit, micro_batch = user.unit, user.micro_batch
        move = self._copies.find(Kind.FETCH_ACTIVATIONS, unit, micro_batch)
        if move is None or user != self._builder.first_backward(unit, micro_batch):
            return
        b, priority = self._builder, self._builder.backward_priority(unit)
        ahead, forward = self._plan.units[unit].kept.ahead, TaskId(Kind.FORWARD, unit, micro_batch)
        there = self._at(move.source, move, unit, micro_batch)
        if further := self._copies.find(Kind.READ_ACTIVATIONS, unit, micro_batch):
            read = self._copies.add(Kind.READ_ACTIVATIONS, unit, priority, micro_batch)
            there = self._at(move.source, move, unit, micro_batch, Kind.BACKWARD)
            b.read(read, move.value, unit, further.source)
            b.make(read, there, move.size_bytes)
            b.free(read, self._at(further.source, move, unit, micro_batch))
            b.beside(read, user, ahead + bool(ahead), forward)  # one pass earlier than the fetch may begin
        fetch = self._copies.add(Kind.FETCH_ACTIVATIONS, unit, priority, micro_batch)
        b.read(fetch, move.value, unit, move.source)
        b.make(fetch, on_gpu(move.value, unit, micro_batch, Kind.BACKWARD), move.size_bytes)
        b.free(fetch, there)
        b.beside(fetch, user, ahead, forward)

    def _at(self, memory: str, move: Move, unit: int, micro_batch: int, use: Kind | None = None) -> BufferId:
        return BufferId(move.value, self._pinned if memory == HOST_MEMORY else memory, unit, use, micro_batch)
