"""What separates the published systems: rules, each of which only adds order to the tasks of an iteration.

So a rule can make a schedule slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from autohete.lowering.builder import Builder
from autohete.plan import Plan
from autohete.schedule import Kind, TaskId


class Rule(Protocol):
    """Adds order."""

    def apply(self, builder: Builder) -> None:
        """Let tasks wait."""


@dataclass(frozen=True, slots=True)
class BlockingMoves:
    """The GPU waits for each write-back after forward of ``units``: it moves their parameters synchronously."""

    units: tuple[int, ...]

    def apply(self, builder: Builder) -> None:
        """See :class:`Rule`."""
        for unit in self.units:
            builder.hold_up(TaskId(Kind.FORWARD, unit), TaskId(Kind.WRITE_BACK_FORWARD, unit))


@dataclass(frozen=True, slots=True)
class BlockingGradients:
    """The GPU waits for each copy of gradients of ``units``: it runs on the compute stream."""

    units: tuple[int, ...]

    def apply(self, builder: Builder) -> None:
        """See :class:`Rule`."""
        for unit in self.units:
            builder.hold_up(TaskId(Kind.BACKWARD, unit), TaskId(Kind.OFFLOAD_GRADIENTS, unit))


@dataclass(frozen=True, slots=True)
class Window:
    """Units share ``size`` places: a forward waits for the write-back, a backward for the update, of the unit whose place it
    takes (StrongHold).
    """

    size: int

    def apply(self, builder: Builder) -> None:
        """See :class:`Rule`."""
        last = builder.passes[-1].unit, max(task.unit for task in builder.passes)
        for unit in range(last[0], last[1] + 1):
            if unit + self.size <= last[1]:
                builder.after(TaskId(Kind.FORWARD, unit + self.size), builder.find(Kind.WRITE_BACK_FORWARD, unit))
            if unit - self.size >= 0:
                builder.after(builder.first_backward(unit - self.size), builder.find(Kind.CPU_UPDATE, unit))


@dataclass(frozen=True, slots=True)
class GradientSlots:
    """Gradients of at most ``slots`` units wait on the GPU for their copy."""

    slots: int

    def apply(self, builder: Builder) -> None:
        """See :class:`Rule`."""
        for task in builder.passes:
            if task.kind is Kind.BACKWARD:
                builder.after(task, builder.find(Kind.OFFLOAD_GRADIENTS, task.unit + self.slots))


@dataclass(frozen=True, slots=True)
class SerialUpdates:
    """After backward, copy (of ``copied`` units), update and refresh of one unit end before the next unit's begin."""

    units: tuple[int, ...]
    copied: frozenset[int]

    def apply(self, builder: Builder) -> None:
        """See :class:`Rule`."""
        previous: TaskId | None = None
        for unit in self.units:
            begin = TaskId(Kind.OFFLOAD_GRADIENTS if unit in self.copied else Kind.CPU_UPDATE, unit)
            builder.after(begin, builder.passes[-1])
            builder.after(begin, previous)
            previous = builder.find(Kind.REFRESH, unit) or TaskId(Kind.CPU_UPDATE, unit)


@dataclass(frozen=True, slots=True)
class UpdatesAfterBackward:
    """The first CPU update of ``units`` waits for all gradients, ``back`` iterations earlier."""

    units: tuple[int, ...]
    back: int = 0

    def apply(self, builder: Builder) -> None:
        """See :class:`Rule`."""
        first = TaskId(Kind.CPU_UPDATE, self.units[0])
        builder.after(first, builder.passes[-1], self.back)
        for unit in self.units:
            builder.after(first, TaskId(Kind.OFFLOAD_GRADIENTS, unit), self.back)


@dataclass(frozen=True, slots=True)
class GpuUpdatesAfterBackward:
    """GPU updates of ``units`` wait for the last backward."""

    units: tuple[int, ...]

    def apply(self, builder: Builder) -> None:
        """See :class:`Rule`."""
        for unit in self.units:
            builder.after(TaskId(Kind.GPU_UPDATE, unit), builder.passes[-1])


@dataclass(frozen=True, slots=True)
class RefreshAfterBackward:
    """Refreshes of ``units`` wait for the last backward."""

    units: tuple[int, ...]

    def apply(self, builder: Builder) -> None:
        """See :class:`Rule`."""
        for unit in self.units:
            builder.after(TaskId(Kind.REFRESH, unit), builder.passes[-1])


@dataclass(frozen=True, slots=True)
class RefreshAfterUpdates:
    """The first refresh of ``refreshed`` units waits for the last update of ``units``."""

    units: tuple[int, ...]
    refreshed: tuple[int, ...]

    def apply(self, builder: Builder) -> None:
        """See :class:`Rule`."""
        builder.after(TaskId(Kind.REFRESH, self.refreshed[0]), TaskId(Kind.CPU_UPDATE, self.units[-1]))


@dataclass(frozen=True, slots=True)
class Barrier:
    """The next forward waits for every update, refresh and write-back of an update."""

    units: int

    def apply(self, builder: Builder) -> None:
        """See :class:`Rule`."""
        ends = [
            task
            for kind in (Kind.CPU_UPDATE, Kind.REFRESH, Kind.GPU_UPDATE, Kind.WRITE_BACK_BACKWARD)
            for unit in range(self.units)
            if (task := builder.find(kind, unit))
        ]
        # A fetch that does not wait for a pass of its own iteration must not slip past the barrier.
        fetches = [builder.find(Kind.PREFETCH_FORWARD, unit) for unit in range(self.units)]
        early = [fetch for fetch in fetches if fetch and all(edge.back for edge in builder.waits(fetch))]
        for task in (builder.passes[0], *early):
            for end in ends:
                builder.after(task, end, back=1)


def rules_of(plan: Plan) -> Iterator[Rule]:
    """The rules of a plan, in the order in which they are applied."""
    units = range(len(plan.blocks))
    updated, refreshed = plan.updated_on_cpu, plan.refreshed
    copied = [unit for unit in updated if plan.copied_after_backward(unit)]
    moves = tuple(
        unit
        for unit in units
        if plan.blocks[unit].write_back_after_forward
        and not plan.blocks[unit].keep_after_forward
        and plan.blocks[unit].backward_prefetch_distance == 0
    )
    if moves:
        yield BlockingMoves(moves)
    if plan.blocking_gradients:
        yield BlockingGradients(tuple(unit for unit in updated if unit not in copied))
    if plan.gradient_slots is not None:
        yield GradientSlots(plan.gradient_slots)
    if plan.window is not None:
        yield Window(plan.window)
    if plan.gpu_update_after_backward:
        yield GpuUpdatesAfterBackward(tuple(unit for unit in units if unit not in updated))
    if plan.serial_updates:
        yield SerialUpdates(updated, frozenset(copied))
    if plan.update_after_backward and updated:
        yield UpdatesAfterBackward(updated, int(plan.delayed))
    if plan.delayed:
        yield RefreshAfterBackward(refreshed)
    if plan.refresh_after_updates and refreshed:
        yield RefreshAfterUpdates(updated, refreshed)
    if plan.barrier:
        yield Barrier(len(plan.blocks))
