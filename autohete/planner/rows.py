"""What each choice of each unit adds to the work of the engines and to the contents of the memories, as rows of numbers.

A row of seconds is a lower bound of the iteration time: an engine's total work, or a cycle of waits, which takes at least the
sum of its tasks. A row of bytes is a lower bound of what a memory holds at a pass. Neither depends on timing. Both are sums
over units, so they are the rows of a linear program. :class:`autohete.planner.plan_bounds.TimeBounds` does the same for three
integers.

The rows hold for plans whose rules are among ``Slots`` and ``ByPriority``. These rules leave GPU updates in place: between
the backward of their unit and that of the unit below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autohete.plan import Activations, Plan, Processor, UnitPlan
from autohete.planner.choices import Assignment, Choices
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY

Numbers = NDArray[np.float64]

#: Durations are rounded to nanoseconds: up to this many tasks per unit and micro-batch may each be half a nanosecond shorter.
_TASKS_PER_UNIT = 16


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Numbers for each choice of each unit: for activations and for the rest, each of shape (units, choices)."""

    activations: Numbers
    others: Numbers

    def __add__(self, other: Table) -> Table:
        return Table(self.activations + other.activations, self.others + other.others)

    def __mul__(self, factor: float) -> Table:
        return Table(self.activations * factor, self.others * factor)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Sums over units: each row is ``fixed`` plus what the choice of each unit adds.

    Args:
        fixed: constant term of each row.
        activations, others: what the choices add, each of shape (rows, units, choices).
    """

    fixed: Numbers
    activations: Numbers
    others: Numbers

    def __add__(self, other: Rows) -> Rows:
        return Rows(self.fixed + other.fixed, self.activations + other.activations, self.others + other.others)

    def __mul__(self, factor: float) -> Rows:
        return Rows(self.fixed * factor, self.activations * factor, self.others * factor)

    def of(self, assignment: Assignment | NDArray[np.integer[Any]]) -> Numbers:
        """Evaluate the rows for ``assignment``, given as pairs or as an array of shape (units, 2)."""
        units, (a, o) = np.arange(len(assignment)), np.array(assignment).T
        return np.asarray(self.fixed + self.activations[:, units, a].sum(axis=1) + self.others[:, units, o].sum(axis=1))

    def take(self, rows: Iterable[int]) -> Rows:
        """The rows at the given indices."""
        places = np.array(list(rows), int)
        return Rows(self.fixed[places], self.activations[places], self.others[places])


def stacked(parts: Iterable[Rows]) -> Rows:
    """Concatenate the rows of all ``parts``."""
    every = list(parts)
    return Rows(
        np.concatenate([part.fixed for part in every]),
        np.concatenate([part.activations for part in every]),
        np.concatenate([part.others for part in every]),
    )


class Costs:
    """Seconds and bytes of each choice of each unit.

    Args:
        profile: times and sizes.
        plan: any plan of the policy; defines its updates and its footprint.
        choices: the available choices of every unit.
    """

    def __init__(self, profile: Profile, plan: Plan, choices: Choices) -> None:
        self.profile, self.plan, self.choices = profile, plan, choices
        self.n, self.micro_batches = len(profile.units), profile.workload.micro_batches
        self.weights = np.array([profile.parameter_bytes(unit) for unit in range(self.n)], float)
        self.first_trained = profile.first_trained
        self.trained = [block.trained_parameters for block in profile.units]
        self.gradients = np.array([count * profile.element_bytes for count in self.trained], float)

    def table(self, of: Callable[[int, UnitPlan], float], *, others: bool) -> Table:
        """``of`` for each choice of one half, padded with zeros to equal length; zero for the other half."""

        def array(choices: tuple[tuple[UnitPlan, ...], ...], wanted: bool) -> Numbers:
            found = np.zeros((self.n, max(map(len, choices))))
            if wanted:
                for unit, some in enumerate(choices):
                    found[unit, : len(some)] = [of(unit, one) for one in some]
            return found

        return Table(array(self.choices.activations, not others), array(self.choices.others, others))

    # --- activations

    def kept_bytes(self, unit: int, one: UnitPlan) -> int:
        """What forward leaves for backward, in any memory."""
        if unit < self.first_trained:
            return 0
        block = self.profile.units[unit]
        if one.activations is Activations.SELECTIVE and block.selective is not None:
            return block.input_bytes + block.selective.kept_bytes
        return block.input_bytes if one.activations is Activations.RECOMPUTE else block.activation_bytes

    def away_bytes(self, unit: int, one: UnitPlan) -> int:
        """The same, if it is on the host."""
        return self.kept_bytes(unit, one) if one.kept.leaves else 0

    def here_bytes(self, unit: int, one: UnitPlan) -> int:
        """The same, if it is on the GPU."""
        return 0 if one.kept.leaves else self.kept_bytes(unit, one)

    def forward_bytes(self, unit: int, one: UnitPlan) -> int:
        """What its forward takes in addition to the output."""
        block = self.profile.units[unit]
        if one.activations is Activations.RECOMPUTE or unit < self.first_trained:
            return block.input_bytes + block.checkpointed_workspace_bytes
        if one.activations is Activations.SELECTIVE:
            return self.kept_bytes(unit, one) + block.selective_workspace_bytes[0]
        return block.activation_bytes + block.forward_workspace_bytes

    def recompute_seconds(self, unit: int, one: UnitPlan) -> float:
        """Recomputation time per micro-batch."""
        block = self.profile.units[unit]
        if unit < self.first_trained:
            return 0.0
        if one.activations is Activations.SELECTIVE and block.selective is not None:
            return block.selective.seconds
        return block.recompute_seconds if one.activations is Activations.RECOMPUTE else 0.0

    def returned_seconds(self, unit: int, one: UnitPlan) -> float:
        """Time to copy what backward needs to the GPU, per micro-batch."""
        leaves = one.kept.leaves and unit >= self.first_trained
        return self.profile.h2d_seconds(self.away_bytes(unit, one)) if leaves else 0.0

    def sent_seconds(self, unit: int, one: UnitPlan) -> float:
        """Time to copy it to the host, per micro-batch."""
        leaves = one.kept.leaves and unit >= self.first_trained
        return self.profile.d2h_seconds(self.away_bytes(unit, one)) if leaves else 0.0

    # --- parameters

    def fetch_seconds(self, unit: int, one: UnitPlan) -> float:
        """Time of one fetch of its parameters."""
        if not one.parameters.leaves:
            return 0.0
        carried = self.profile.parameter_bytes(unit)
        if one.update_on is Processor.CPU:
            trained = one.parameters.fetched.bytes_of(self.trained[unit], self.profile.element_bytes)
            carried = trained + self.profile.frozen_bytes(unit)
        return self.profile.h2d_seconds(carried, pinned=one.parameters.fetched.pinned)

    def forward_fetch_seconds(self, unit: int, one: UnitPlan) -> float:
        """Time of the fetch for forward; 0 if there is none."""
        stays = one.parameters.stays_after_backward and unit >= self.first_trained
        return 0.0 if stays else self.fetch_seconds(unit, one)

    def backward_fetch_seconds(self, unit: int, one: UnitPlan) -> float:
        """Time of the fetch for backward; 0 if there is none."""
        stays = one.parameters.stays_after_forward or unit < self.first_trained
        return 0.0 if stays else self.fetch_seconds(unit, one)

    def leaving_bytes(self, unit: int, one: UnitPlan) -> float:
        """Parameters that leave the GPU."""
        return self.weights[unit] if one.parameters.leaves else 0.0

    def stays_after_forward_bytes(self, unit: int, one: UnitPlan) -> float:
        """Parameters that leave the GPU but stay from forward to backward."""
        stays = one.parameters.leaves and one.parameters.stays_after_forward and unit >= self.first_trained
        return self.weights[unit] if stays else 0.0

    def stays_after_backward_bytes(self, unit: int, one: UnitPlan) -> float:
        """Parameters that leave the GPU but stay from backward to the next forward."""
        stays = one.parameters.leaves and one.parameters.stays_after_backward and unit >= self.first_trained
        return self.weights[unit] if stays else 0.0

    # --- updates

    def updated_on(self, unit: int, one: UnitPlan, side: Processor) -> bool:
        """Whether that processor updates the unit. None updates a frozen one."""
        return one.update_on is side and not self.profile.units[unit].is_frozen

    def gpu_update_seconds(self, unit: int, one: UnitPlan) -> float:
        """Time of an update on the GPU."""
        return self.profile.units[unit].gpu_update_seconds if self.updated_on(unit, one, Processor.GPU) else 0.0

    def cpu_update_seconds(self, unit: int, one: UnitPlan) -> float:
        """Time of an update on the CPU, undisturbed."""
        if not self.updated_on(unit, one, Processor.CPU):
            return 0.0
        return self.profile.cpu_update_seconds(unit, self.plan.update_bytes, self.plan.elementwise_bytes)

    def gradient_bytes(self, unit: int, one: UnitPlan) -> int:
        """Size of the gradients copied to the CPU."""
        if not self.updated_on(unit, one, Processor.CPU):
            return 0
        return one.gradients.carried.bytes_of(self.trained[unit], self.profile.element_bytes)

    def sums_seconds(self, unit: int, one: UnitPlan) -> float:
        """CPU time to accumulate the gradients of the micro-batches."""
        if not (one.accumulates_on_host and self.updated_on(unit, one, Processor.CPU)):
            return 0.0
        one_sum = self.profile.elementwise_seconds(3 * self.gradient_bytes(unit, one))
        return (self.micro_batches - 1) * one_sum

    def gradient_seconds(self, unit: int, one: UnitPlan) -> float:
        """Time of one copy of its gradients."""
        size = self.gradient_bytes(unit, one)
        copied = self.updated_on(unit, one, Processor.CPU)
        return self.profile.d2h_seconds(size, pinned=one.gradients.carried.pinned) if copied else 0.0

    def home_seconds(self, unit: int, one: UnitPlan) -> float:
        """Time to copy parameters that the GPU has updated to the host."""
        if not (one.parameters.leaves and self.updated_on(unit, one, Processor.GPU)):
            return 0.0
        return self.profile.d2h_seconds(self.gradients[unit])

    def refresh_seconds(self, unit: int, one: UnitPlan) -> float:
        """Time to copy parameters that the CPU has updated to those that stay on the GPU."""
        if not (one.refreshed and self.updated_on(unit, one, Processor.CPU)):
            return 0.0
        size = one.refresh.bytes_of(self.trained[unit], self.profile.element_bytes)
        return self.profile.h2d_seconds(size, pinned=one.refresh.pinned)

    def state_bytes(self, unit: int, one: UnitPlan) -> int:
        """Optimizer states that are fetched to the GPU."""
        return self.profile.state_bytes(unit) if self.streams(unit, one) else 0

    def streams(self, unit: int, one: UnitPlan) -> bool:
        """Whether optimizer states are fetched to the GPU."""
        return one.fetches_states and self.updated_on(unit, one, Processor.GPU)

    def state_fetch_seconds(self, unit: int, one: UnitPlan) -> float:
        """Time to copy the states to the GPU."""
        return self.profile.h2d_seconds(self.state_bytes(unit, one)) if self.streams(unit, one) else 0.0

    def state_home_seconds(self, unit: int, one: UnitPlan) -> float:
        """Time to copy the states back."""
        return self.profile.d2h_seconds(self.state_bytes(unit, one)) if self.streams(unit, one) else 0.0

    def resident_bytes(self, unit: int, one: UnitPlan) -> float:
        """Parameters and states that never leave the GPU."""
        states = one.update_on is Processor.GPU and not one.fetches_states
        held = self.profile.state_bytes(unit) if states else 0
        return held + (0.0 if one.parameters.leaves else self.weights[unit])

    def host_bytes(self, unit: int, one: UnitPlan) -> float:
        """Parameters and states on the host."""
        pageable = max(self.plan.footprint.host_optimizer_bytes * self.trained[unit] - self.profile.saved_bytes(unit), 0)
        return self.pinned_bytes(unit, one) + (pageable if one.update_on is Processor.CPU else 0)

    def pinned_bytes(self, unit: int, one: UnitPlan) -> float:
        """The pinned part of it: everything that copies read and write, since these run at the rate of pinned memory."""
        count, held = self.trained[unit], self.plan.footprint
        found = held.host_parameter_bytes * count + self.profile.frozen_bytes(unit) if one.parameters.leaves else 0
        if one.update_on is Processor.CPU:
            return found + sum(self.profile.hardware.host.pinned(count * size) for size in held.host_pinned_bytes)
        return found + self.state_bytes(unit, one)

    def summed_bytes(self, unit: int, one: UnitPlan) -> float:
        """Gradients that stay on the GPU from the first micro-batch to the last."""
        return self.gradients[unit] if self.micro_batches > 1 and one.gradients.home == GPU_MEMORY else 0.0


class Model:
    """The rows of one problem.

    Args:
        costs: of the choices.

    Attributes:
        seconds: lower bounds of the iteration time; the first is the work of the GPU.
        stalls: estimated waits to add to them if a copy overlaps only the adjacent passes.
        gpu_bytes: lower bound of what the GPU holds at a pass; ``pending``: what typical timing adds to each.
        host_bytes: lower bound of what the host holds, and the same with everything in transit.
        pinned_bytes: the pinned part of ``host_bytes``.
    """

    def __init__(self, costs: Costs) -> None:
        self._costs, self._n, self._profile = costs, costs.n, costs.profile
        self._m = float(costs.micro_batches)
        self._units = np.arange(self._n)
        self._forward = np.array([unit.forward_seconds for unit in self._profile.units])
        self._reached = self._units >= costs.first_trained  # by backward
        self._backward = np.array([unit.backward_seconds for unit in self._profile.units]) * self._reached
        table = costs.table
        self._recompute = table(costs.recompute_seconds, others=False)
        self._gpu_update = table(costs.gpu_update_seconds, others=True)
        self._returned = table(costs.returned_seconds, others=False)
        self._backward_fetch = table(costs.backward_fetch_seconds, others=True)
        self._state_fetch = table(costs.state_fetch_seconds, others=True)
        self.seconds, self.stalls = self._all_seconds()
        self.gpu_bytes, self.pending = self._all_gpu_bytes()
        self.host_bytes = self._on_host(costs.host_bytes)
        self.pinned_bytes = self._on_host(costs.pinned_bytes)

    # --- time

    def _all_seconds(self) -> tuple[Rows, Rows]:
        costs, table, m = self._costs, self._costs.table, self._m
        forward_fetch = table(costs.forward_fetch_seconds, others=True)
        refresh, gradients = table(costs.refresh_seconds, others=True), table(costs.gradient_seconds, others=True)
        copies = table(lambda i, one: costs.gradient_seconds(i, one) * (m if one.accumulates_on_host else 1), others=True)
        home, updates = table(costs.home_seconds, others=True), table(costs.cpu_update_seconds, others=True)
        up = (self._returned + self._backward_fetch + forward_fetch) * m + refresh + self._state_fetch
        down = table(costs.sent_seconds, others=False) * m + copies + home + table(costs.state_home_seconds, others=True)
        cpu = updates + table(costs.sums_seconds, others=True)
        everything = np.ones((1, self._n))
        gpu = self._gpu_work()
        slowed = self._sum(everything, cpu) + gpu * self._profile.hardware.cpu_lost_beside_gpu
        loads = [gpu, *(self._sum(everything, one) for one in self._engines(up, down, cpu)), slowed]
        # From the last backward of unit m to its next forward: what follows a backward up to m and precedes its forward.
        under = (self._units[None, :] <= self._units[:, None]).astype(float)
        # A unit without backward may be fetched at any time.
        after = Table(forward_fetch.activations, forward_fetch.others * self._reached[:, None])
        between = self._engines(after + refresh, gradients + home, updates)
        base = self._gpu_from()
        cycles = [base + self._sum(under, one) for one in between]
        floor = 0.5e-9 * _TASKS_PER_UNIT * self._n * m
        seconds = stacked([*loads, *cycles, self._before_backward(gpu)])
        stall = self._stall(gradients)
        nothing = self._sum(np.zeros((self._n * len(between), self._n)), stall)
        stalls = stacked(
            [
                self._sum(everything, stall),
                self._sum(np.zeros((len(loads) - 1, self._n)), stall),
                Rows(nothing.fixed, *(np.tile(part, (len(between), 1, 1)) for part in self._above(stall))),
                self._sum(under, stall),
            ]
        )
        return Rows(seconds.fixed - floor, seconds.activations, seconds.others), stalls

    def _above(self, table: Table) -> tuple[Numbers, Numbers]:
        rows = self._sum((self._units[None, :] >= self._units[:, None]).astype(float), table)
        return rows.activations, rows.others

    def _gpu_work(self) -> Rows:
        everything = np.ones((1, self._n))
        passes = self._m * (self._forward.sum() + self._backward.sum() + self._profile.loss.seconds)
        return self._sum(everything, self._recompute * self._m + self._gpu_update, np.array([passes]))

    def _gpu_from(self) -> Rows:
        """GPU work from the first forward of each unit to its last backward."""
        at_or_above = (self._units[None, :] >= self._units[:, None]).astype(float)
        above = (self._units[None, :] > self._units[:, None]).astype(float)
        passes = (at_or_above + self._m - 1) @ (self._forward + self._backward) + self._m * self._profile.loss.seconds
        return self._sum(at_or_above + self._m - 1, self._recompute, passes) + self._sum(above, self._gpu_update)

    def _before_backward(self, gpu: Rows) -> Rows:
        """GPU work with the passes between the last forward and last backward of each unit replaced by the copies there.

        Nothing is fetched for backward before its own forward has ended, and no states before the last forward has ended.
        """
        at_or_above = (self._units[None, :] >= self._units[:, None]).astype(float)
        above = (self._units[None, :] > self._units[:, None]).astype(float)
        passes = above @ (self._forward + self._backward) + self._profile.loss.seconds
        beside = self._sum(above, self._recompute + self._gpu_update, passes)
        fetched = self._sum(at_or_above, self._returned + self._backward_fetch) + self._sum(above, self._state_fetch)
        every = Rows(*(np.repeat(part, self._n, axis=0) for part in (gpu.fixed, gpu.activations, gpu.others)))
        return every + beside * -1.0 + fetched

    def _engines(self, up: Table, down: Table, cpu: Table) -> list[Table]:
        """Time of the copies up, the copies down and the CPU, each at full rate, and of all within their shared capacity."""
        hardware = self._profile.hardware
        h2d, d2h = hardware.h2d, hardware.d2h
        update = hardware.cpu.update_bandwidth
        link = max(h2d.duplex_bandwidth + d2h.duplex_bandwidth, h2d.bandwidth, d2h.bandwidth)
        dram = max(hardware.host.usable_bandwidth, update)
        copied = up * h2d.bandwidth + down * d2h.bandwidth
        return [up, down, cpu, copied * (1 / link), (copied + cpu * update) * (1 / dram)]

    def _stall(self, gradients: Table) -> Table:
        """Time that the GPU waits for each unit if only the adjacent passes hide a copy."""
        forward, backward = self._forward[:, None], self._backward[:, None]
        passes = self._costs.table(lambda i, _: self._forward[i] + self._backward[i], others=True).others

        def over(table: Table, hidden: Numbers) -> Table:
            return Table(np.maximum(table.activations - hidden, 0), np.maximum(table.others - hidden, 0))

        fetches = over(self._backward_fetch, backward) + over(self._returned, backward)
        fetches = fetches + over(self._costs.table(self._costs.forward_fetch_seconds, others=True), forward)
        states = Table(np.zeros_like(self._state_fetch.activations), np.maximum(self._state_fetch.others - passes, 0))
        return (fetches * self._m) + over(gradients, backward) + states

    # --- memory

    def _all_gpu_bytes(self) -> tuple[Rows, Rows]:
        """Bytes at the loss, at each forward, at each backward and at each update."""
        costs, table, blocks, loss = self._costs, self._costs.table, self._profile.units, self._profile.loss
        units, n = self._units, self._n
        at, below, above = (
            np.array(compare(units[None, :], units[:, None]), float) for compare in (np.equal, np.less, np.greater)
        )
        everything, one_row = np.ones((n, n)), np.ones((1, n))
        resident, kept = table(costs.resident_bytes, others=True), table(costs.here_bytes, others=False)
        down, up = table(costs.stays_after_forward_bytes, others=True), table(costs.stays_after_backward_bytes, others=True)
        leaving, streamed = table(costs.leaving_bytes, others=True), table(costs.state_bytes, others=True)
        summed = table(costs.summed_bytes, others=True)
        inputs = np.array([unit.input_bytes for unit in blocks], float)
        first, reached = costs.first_trained, self._reached
        handed, given = np.where(units > first, inputs, 0), np.append(inputs[1:], 0)
        logits = loss.logits_bytes * (float(loss.keeps_logits) + (units == n - 1))
        tied = (self._profile.workload.tied_embeddings * costs.gradients[0]) * (units > 0)
        gradient = costs.gradients + tied
        there = self._sum(everything, resident) + self._sum(below, kept + down) + self._sum(above, up)
        at_loss = self._sum(one_row, resident + kept + down, np.array([float(loss.peak_bytes)]))
        last_output = np.where(units == n - 1, float(loss.logits_bytes), given)
        at_forward = there + self._sum(at, leaving + table(costs.forward_bytes, others=False), last_output)
        during = np.array([unit.activation_bytes + unit.backward_workspace_bytes for unit in blocks], float)
        at_backward = there + self._sum(at, leaving, (during + gradient + handed + given + logits) * reached)
        at_backward = at_backward + self._sum(below + at, summed)
        keeps = loss.logits_bytes * float(loss.keeps_logits) * (units > first)
        at_update = there + self._sum(at, leaving + streamed, (gradient + handed) * reached + keeps) + self._sum(below, summed)
        sure = stacked([at_loss, at_forward, at_backward, at_update])
        # Bytes fetched for the next pass, and bytes waiting for their copy.
        next_down = (units[None, :] == units[:, None] - 1).astype(float)
        next_up = (units[None, :] == units[:, None] + 1).astype(float)
        away = table(costs.away_bytes, others=False)
        for_backward = table(lambda i, one: costs.leaving_bytes(i, one) * (not one.parameters.stays_after_forward), others=True)
        for_forward = table(lambda i, one: costs.leaving_bytes(i, one) * (not one.parameters.stays_after_backward), others=True)
        waiting = table(lambda i, one: costs.gradients[i] * (one.update_on is Processor.CPU), others=True)
        pending = stacked(
            [
                self._sum((units[None, :] == n - 2).astype(float), away),
                self._sum(next_up, for_forward) + self._sum(next_down, away),
                self._sum(next_down, for_backward + away) + self._sum(next_up, waiting + streamed) + self._sum(at, streamed),
                self._sum(next_up, streamed + waiting) + self._sum(next_down, streamed + for_backward + away),
            ]
        )
        return sure, pending

    def _on_host(self, resting: Callable[[int, UnitPlan], float]) -> Rows:
        """Lower bound of what the host holds, and the same with everything in transit."""
        everything = np.ones((1, self._n))
        rests = self._sum(everything, self._costs.table(resting, others=True))
        passes = self._sum(everything, self._costs.table(self._costs.away_bytes, others=False) * self._m)
        return stacked([rests, rests + passes])

    def _sum(self, weights: Numbers, table: Table, fixed: Numbers | None = None) -> Rows:
        """Rows that sum the units of ``table`` with ``weights``, of shape (rows, units)."""
        return Rows(
            np.zeros(len(weights)) if fixed is None else np.asarray(fixed, float),
            weights[:, :, None] * table.activations[None],
            weights[:, :, None] * table.others[None],
        )
