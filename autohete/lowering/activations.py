"""Offloaded activations: copies of what backward needs to the host after forward, and back for backward."""

from __future__ import annotations

from autohete.lowering import durations
from autohete.lowering.builder import Builder, on_gpu
from autohete.lowering.footprint import pinned_memory
from autohete.plan import Activations, Plan
from autohete.profile import Profile
from autohete.schedule import D2H, H2D, HOST_MEMORY, BufferId, Kind, TaskId, Value


class OffloadedActivations:
    """Adds the copies of activations, or of inputs if activations are recomputed, to a builder.

    Args:
        builder: collects the tasks.
        profile: their durations.
        plan: the units whose activations are offloaded.
    """

    def __init__(self, builder: Builder, profile: Profile, plan: Plan) -> None:
        self._builder, self._profile, self._plan = builder, profile, plan
        self._leaves = [unit.kept.leaves for unit in plan.units]

    def after_forward(self, forward: TaskId) -> None:
        """Copy to the host."""
        unit, micro_batch = forward.unit, forward.micro_batch
        if not self._leaves[unit]:
            return
        b, value, size = self._builder, self._value(unit), self._bytes(unit)
        away = b.task(Kind.OFFLOAD_ACTIVATIONS, unit, D2H, durations.to_host(size), -1 - unit, micro_batch)
        b.after(away, forward)
        b.read(away, value, unit)
        b.make(away, self._on_host(value, unit, micro_batch), size)
        b.free(away, on_gpu(Value.INPUT, unit, micro_batch))
        if value is Value.ACTIVATIONS:
            b.free(away, on_gpu(Value.ACTIVATIONS, unit, micro_batch))

    def bring(self, user: TaskId) -> None:
        """Copy back for the pass ``user``, if it is the first pass of backward that needs them."""
        unit, micro_batch = user.unit, user.micro_batch
        if not self._leaves[unit] or user != self._builder.first_backward(unit, micro_batch):
            return
        b, value, size = self._builder, self._value(unit), self._bytes(unit)
        fetch = b.task(Kind.FETCH_ACTIVATIONS, unit, H2D, durations.to_gpu(size), b.backward_priority(unit), micro_batch)
        b.read(fetch, value, unit, HOST_MEMORY)
        b.make(fetch, on_gpu(value, unit, micro_batch, Kind.BACKWARD), size)
        b.free(fetch, self._on_host(value, unit, micro_batch))
        b.beside(fetch, user, self._plan.units[unit].kept.ahead, TaskId(Kind.FORWARD, unit, micro_batch))

    def _value(self, unit: int) -> Value:
        return Value.ACTIVATIONS if self._plan.units[unit].activations is Activations.KEEP else Value.INPUT

    def _bytes(self, unit: int) -> int:
        times = self._profile.units[unit]
        return times.input_bytes if self._value(unit) is Value.INPUT else times.activation_bytes

    def _on_host(self, value: Value, unit: int, micro_batch: int) -> BufferId:
        return BufferId(value, pinned_memory(self._profile), unit, None, micro_batch)
