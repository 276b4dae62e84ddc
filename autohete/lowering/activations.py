"""The way of offloaded activations: to the host after their forward, and back for their backward."""

from __future__ import annotations

from autohete.lowering.builder import Builder
from autohete.lowering.compute import on_gpu
from autohete.plan import Activations, Plan
from autohete.profile import Profile
from autohete.schedule import D2H, H2D, HOST_MEMORY, BufferId, Kind, TaskId, Value


class OffloadedActivations:
    """Adds the copies of activations to a builder.

    Args:
        builder: collects them.
        profile: how long they last.
        plan: says whose are offloaded.
    """

    def __init__(self, builder: Builder, profile: Profile, plan: Plan) -> None:
        self._builder, self._profile, self._plan = builder, profile, plan

    def after_forward(self, unit: int, micro_batch: int) -> None:
        """To the host."""
        if self._plan.units[unit].activations is not Activations.OFFLOAD:
            return
        b, size = self._builder, self._profile.blocks[unit].activation_bytes
        away = b.task(Kind.OFFLOAD_ACTIVATIONS, unit, D2H, self._profile.d2h_seconds(size), -1 - unit, micro_batch)
        b.read(away, Value.ACTIVATIONS, unit)
        b.make(away, BufferId(Value.ACTIVATIONS, HOST_MEMORY, unit, None, micro_batch), size)
        b.free(away, on_gpu(Value.INPUT, unit, micro_batch))
        b.free(away, on_gpu(Value.ACTIVATIONS, unit, micro_batch))

    def bring(self, user: TaskId) -> None:
        """Back for the pass ``user``."""
        unit, micro_batch = user.unit, user.micro_batch
        if self._plan.units[unit].activations is not Activations.OFFLOAD:
            return
        b, size = self._builder, self._profile.blocks[unit].activation_bytes
        fetch = b.task(Kind.FETCH_ACTIVATIONS, unit, H2D, self._profile.h2d_seconds(size), -1 - unit, micro_batch)
        b.read(fetch, Value.ACTIVATIONS, unit, HOST_MEMORY)
        b.make(fetch, on_gpu(Value.ACTIVATIONS, unit, micro_batch, Kind.BACKWARD), size)
        b.free(fetch, BufferId(Value.ACTIVATIONS, HOST_MEMORY, unit, None, micro_batch))
        b.beside(fetch, user, self._plan.units[unit].parameters.ahead_in_backward, TaskId(Kind.FORWARD, unit, micro_batch))
