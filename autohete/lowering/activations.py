"""Offloaded activations: copies of what backward needs to the host after forward, and back for backward."""

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
        """Copy to the host."""
        unit, micro_batch = forward.unit, forward.micro_batch
        move = self._copies.find(Kind.OFFLOAD_ACTIVATIONS, unit, micro_batch)
        if move is None:
            return
        b, away = self._builder, self._copies.add(Kind.OFFLOAD_ACTIVATIONS, unit, -1 - unit, micro_batch)
        b.after(away, forward)
        b.read(away, move.value, unit)
        b.make(away, self._on_host(move, unit, micro_batch), move.size_bytes)
        b.free(away, on_gpu(Value.INPUT, unit, micro_batch))
        if move.value is Value.ACTIVATIONS:
            b.free(away, on_gpu(Value.ACTIVATIONS, unit, micro_batch))

    def bring(self, user: TaskId) -> None:
        """Copy back for the pass ``user``, if it is the first pass of backward that needs them."""
        unit, micro_batch = user.unit, user.micro_batch
        move = self._copies.find(Kind.FETCH_ACTIVATIONS, unit, micro_batch)
        if move is None or user != self._builder.first_backward(unit, micro_batch):
            return
        b = self._builder
        fetch = self._copies.add(Kind.FETCH_ACTIVATIONS, unit, b.backward_priority(unit), micro_batch)
        b.read(fetch, move.value, unit, HOST_MEMORY)
        b.make(fetch, on_gpu(move.value, unit, micro_batch, Kind.BACKWARD), move.size_bytes)
        b.free(fetch, self._on_host(move, unit, micro_batch))
        b.beside(fetch, user, self._plan.units[unit].kept.ahead, TaskId(Kind.FORWARD, unit, micro_batch))

    def _on_host(self, move: Move, unit: int, micro_batch: int) -> BufferId:
        return BufferId(move.value, self._pinned, unit, None, micro_batch)
