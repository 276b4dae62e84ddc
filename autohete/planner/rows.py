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
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autohete.hardware import Place
from autohete.lowering.copies import lane_between
from autohete.lowering.shards import parts_of
from autohete.plan import Activations, UnitPlan
from autohete.plan.moves import When
from autohete.planner.choices import Assignment, Choices
from autohete.planner.unit_costs import Costs, UnitCopy, UnitCosts
from autohete.profile import Profile, UnitProfile
from autohete.schedule import D2H, GPU_MEMORY, H2D, HOST_MEMORY, Value

Numbers = NDArray[np.float64]

#: Durations are rounded to nanoseconds: up to this many tasks per unit and micro-batch may each be half a nanosecond shorter.
TASKS_PER_UNIT = 16
#: What forward leaves for backward.
_KEPT = (Value.ACTIVATIONS, Value.INPUT)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Numbers for each choice of each unit: for activations and for the rest, each of shape (units, choices)."""

    activations: Numbers
    others: Numbers

    def __add__(self, other: Table) -> Table:
        return Table(self.activations + other.activations, self.others + other.others)

    def __mul__(self, factor: float | Numbers) -> Table:
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


def kept_bytes(profile: Profile, unit: int, one: UnitPlan) -> int:
    """What a forward leaves for backward, in any memory."""
    if unit < profile.first_trained or one.activations is Activations.DROP:
        return 0
    block = profile.units[unit]
    return block.input_bytes + sum(part.size_bytes for part in parts_of(one, block) if not part.recomputed)


def here_bytes(profile: Profile, unit: int, one: UnitPlan) -> int:
    """The same, if it is on the GPU."""
    if unit < profile.first_trained or one.activations is Activations.DROP:
        return 0
    if not unit and one.activations is Activations.RECOMPUTE:  # tokens, which come again
        return 0
    block = profile.units[unit]
    here = sum(part.size_bytes for part in parts_of(one, block) if not (part.recomputed or part.route.leaves))
    return here + block.input_bytes * (not one.kept.leaves)


def _forward_bytes(profile: Profile, unit: int, one: UnitPlan) -> int:
    """What a forward takes in addition to the output."""
    block = profile.units[unit]
    if one.activations is Activations.RECOMPUTE or unit < profile.first_trained:
        return block.input_bytes + block.checkpointed_workspace_bytes
    return kept_bytes(profile, unit, one) + block.workspace_bytes_without(_recomputed(block, one))[0]


def _recomputed(block: UnitProfile, one: UnitPlan) -> frozenset[str]:
    """The saved tensors that are made again."""
    return frozenset(name for part in parts_of(one, block) if part.recomputed for name in part.names)


def recompute_seconds(profile: Profile, unit: int, one: UnitPlan) -> float:
    """Recomputation time per micro-batch."""
    block = profile.units[unit]
    if unit < profile.first_trained:
        return 0.0
    if one.activations is Activations.SELECTIVE:
        return block.again_seconds(_recomputed(block, one))
    taken = block.product_seconds([kept.name for kept in one.results])
    return max(block.recompute_seconds - taken, 0.0) if one.activations is Activations.RECOMPUTE else 0.0


def _state_bytes(one: UnitCosts) -> int:
    """Optimizer states that are fetched to the GPU: at least the largest that come together are there at an update."""
    return max((copy.move.size_bytes for copy in one.at(H2D, When.BEFORE_UPDATE, Value.OPTIMIZER_STATES)), default=0)


def _kept_down(one: UnitCosts) -> list[UnitCopy]:
    """The copies of what forward keeps to the host."""
    return one.at(D2H, When.AFTER_FORWARD, *_KEPT)


def _passes_host(one: UnitCosts) -> bool:
    """Whether what forward keeps only passes the host."""
    return any(c.move.source == HOST_MEMORY and c.move.value in _KEPT and c.move.when is When.AFTER_FORWARD for c in one.copies)


def _bytes_in(place: str, one: UnitCosts) -> float:
    """What rests in a place, and what forward keeps there."""
    kept = sum(c.move.size_bytes for c in one.copies if c.move.target == place and c.move.value in _KEPT)
    return one.resting_bytes(place) + kept


def _place_seconds(place: Place, one: UnitCosts) -> float:
    """The least time that a place takes for its copies: reads and writes in turns, or at the rate of both together."""
    read, write = (one.seconds(lane_between(*ends)) for ends in ((place.name, place.beside), (place.beside, place.name)))
    if place.both_bandwidth is None:
        return read + write
    return (read * place.read_bandwidth + write * place.write_bandwidth) / max(
        place.both_bandwidth, place.read_bandwidth, place.write_bandwidth
    )


_Alike = tuple[list[tuple[int, tuple[UnitPlan, ...]]], list[int]]


class _Tables:
    """Makes tables.

    Args:
        costs: of any decisions.
        choices: the available choices of every unit.
    """

    def __init__(self, costs: Costs, choices: Choices) -> None:
        self._costs = costs
        self._activations, self._others = (self._alike(every) for every in (choices.activations, choices.others))

    def _alike(self, every: tuple[tuple[UnitPlan, ...], ...]) -> _Alike:
        """The choices that differ, with a unit that has them, and for each unit the place of its own."""
        places: dict[tuple[int, tuple[UnitPlan, ...]], int] = {}
        where = [places.setdefault((self._costs.alike[unit], some), len(places)) for unit, some in enumerate(every)]
        return list(places), where

    def passes(self, number: Callable[[Profile, int, UnitPlan], float]) -> Table:
        """A number that follows from what forward keeps."""

        def of(unit: int, one: UnitPlan) -> float:
            return number(self._costs.profile, unit, one)

        return Table(_array(self._activations, of), _array(self._others))

    def moves(self, number: Callable[[UnitCosts], float]) -> Table:
        """A number that follows from copies. Those of both halves add up: what a half leaves undecided moves nothing."""

        def of(unit: int, one: UnitPlan) -> float:
            return number(self._costs.of(unit, one))

        return Table(_array(self._activations, of), _array(self._others, of))

    def others(self, number: Callable[[UnitCosts], float]) -> Table:
        """A number that follows from all but activations."""
        return Table(_array(self._activations), self.moves(number).others)


def _array(alike: _Alike, of: Callable[[int, UnitPlan], float] | None = None) -> Numbers:
    """The number of each choice of each unit, padded with zeros to equal length; zeros if none is given."""
    different, where = alike
    found = np.zeros((len(different), max(len(some) for _, some in different)))
    if of is not None:
        for row, (unit, some) in zip(found, different, strict=True):
            row[: len(some)] = [of(unit, one) for one in some]
    return found[where]


class Model:
    """The rows of one problem.

    Args:
        costs: of any decisions.
        choices: the available choices of every unit.

    Attributes:
        seconds: lower bounds of the iteration time; the first is the work of the GPU.
        stalls: estimated waits to add to them if a copy overlaps only the adjacent passes.
        gpu_bytes: lower bound of what the GPU holds at a pass; ``pending``: what typical timing adds to each.
        host_bytes: lower bound of what the host holds, and the same with everything in transit.
        pinned_bytes: the pinned part of ``host_bytes``.
        place_bytes: lower bound of what each other place holds that some choice uses.
    """

    def __init__(self, costs: Costs, choices: Choices) -> None:
        self._profile, tables = costs.profile, _Tables(costs, choices)
        self._tables, self._n, self._m = tables, len(self._profile.units), self._profile.workload.micro_batches
        self._units = np.arange(self._n)
        self._forward = np.array([unit.forward_seconds for unit in self._profile.units])
        self._reached = (self._units >= self._profile.first_trained).astype(float)  # by backward
        self._backward = np.array([unit.backward_seconds for unit in self._profile.units]) * self._reached
        self._recompute = tables.passes(recompute_seconds)
        self._gpu_update = tables.others(lambda one: one.gpu_update)
        self._shared = self._profile.hardware.gpus > 1
        #: Updates, and copies for them, that precede the backward of the unit below: none if gradients are clipped. Those of
        #: several GPUs wait for a reduction, so a rule may let them follow.
        self._maybe_early = float(not self._profile.workload.clips)
        self._early = self._maybe_early * (not self._shared)
        self._for_forward = self._copies(H2D, When.BEFORE_FORWARD)
        self._for_backward = self._copies(H2D, When.BEFORE_BACKWARD)
        self._for_update = self._copies(H2D, When.BEFORE_UPDATE)
        #: Sizes of the copies of activations to the host.
        self._away = tables.moves(lambda one: sum(c.move.size_bytes for c in _kept_down(one)))
        used = {home for every in (choices.activations, choices.others) for some in every for one in some for home in one.homes}
        hardware = self._profile.hardware
        self._places = [place for each in hardware.places if each.name in used and (place := hardware.place(each.name))]
        self.seconds, self.stalls = self._all_seconds()
        self.gpu_bytes, self.pending = self._all_gpu_bytes()
        self.host_bytes = self._on_host(lambda one: one.host_bytes)
        self.pinned_bytes = self._on_host(lambda one: one.pinned_bytes)
        everything = np.ones((1, self._n))
        self.place_bytes = {
            place.name: self._sum(everything, tables.moves(partial(_bytes_in, place.name))) for place in self._places
        }

    # --- time

    def _copies(self, lane: str, when: When, *values: Value) -> Table:
        """Time of the copies at a moment of the last micro-batch."""
        return self._tables.moves(lambda one: one.seconds_at(lane, when, *values))

    def _all_seconds(self) -> tuple[Rows, Rows]:
        tables = self._tables
        gradients, updates = self._copies(D2H, When.AFTER_BACKWARD), tables.others(lambda one: one.cpu_update)
        up, down = tables.moves(lambda one: one.seconds(H2D)), tables.moves(lambda one: one.seconds(D2H))
        cpu = updates + tables.others(lambda one: one.sums)
        everything = np.ones((1, self._n))
        gpu = self._gpu_work()
        slowed = self._sum(everything, cpu) + gpu * self._profile.hardware.cpu_lost_beside_gpu
        collectives = [tables.others(lambda one: one.collective_seconds())] if self._shared else []
        engines = [*collectives, *self._engines(up, down, cpu)]
        loads = [gpu, *(self._sum(everything, one) for one in engines), slowed]
        # From the last backward of unit m to its next forward: what follows a backward up to m and precedes its forward.
        under = (self._units[None, :] <= self._units[:, None]).astype(float)
        # A unit without backward may be fetched at any time.
        after = self._for_forward * self._reached[:, None] + self._copies(H2D, When.AFTER_UPDATE, Value.PARAMETERS)
        home = self._copies(D2H, When.AFTER_UPDATE, Value.PARAMETERS)
        between = self._engines(after, gradients + home, updates)
        if self._shared:
            follow = tables.others(lambda one: one.collective_seconds(When.AFTER_BACKWARD, When.AFTER_UPDATE))
            gathered = tables.others(lambda one: one.collective_seconds(When.BEFORE_FORWARD))
            between.append(follow + gathered * self._reached[:, None])
        base = self._gpu_from()
        cycles = [base + self._sum(under, one) for one in between]
        floor = 0.5e-9 * TASKS_PER_UNIT * self._n * self._m
        of_places = [self._sum(everything, tables.moves(partial(_place_seconds, place))) for place in self._places]
        seconds = stacked([*loads, *cycles, self._before_backward(gpu), *of_places])
        stall = self._stall(gradients)
        nothing = self._sum(np.zeros((self._n * len(between), self._n)), stall)
        stalls = stacked(
            [
                self._sum(everything, stall),
                self._sum(np.zeros((len(loads) - 1, self._n)), stall),
                Rows(nothing.fixed, *(np.tile(part, (len(between), 1, 1)) for part in self._above(stall))),
                self._sum(under, stall),
                *(self._sum(np.zeros((1, self._n)), stall) for _ in of_places),
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
        recomputed = self._sum(at_or_above + self._m - 1, self._recompute, passes)
        return recomputed + self._sum(above, self._gpu_update * self._early)

    def _before_backward(self, gpu: Rows) -> Rows:
        """GPU work with the passes between the last forward and last backward of each unit replaced by the copies there.

        Nothing is fetched for backward before its own forward has ended, and nothing for updates before the last forward has.
        """
        at_or_above = (self._units[None, :] >= self._units[:, None]).astype(float)
        above = (self._units[None, :] > self._units[:, None]).astype(float)
        passes = above @ (self._forward + self._backward) + self._profile.loss.seconds
        beside = self._sum(above, self._recompute + self._gpu_update * self._maybe_early, passes)
        fetched = self._sum(at_or_above, self._for_backward) + self._sum(above, self._for_update * self._early)
        every = Rows(*(np.repeat(part, self._n, axis=0) for part in (gpu.fixed, gpu.activations, gpu.others)))
        return every + beside * -1.0 + fetched

    def _engines(self, up: Table, down: Table, cpu: Table) -> list[Table]:
        """Time of the copies up, the copies down and the CPU, each at full rate, and of all within their shared capacity."""
        hardware = self._profile.hardware
        h2d, d2h, update = hardware.h2d_copies, hardware.d2h_copies, hardware.cpu.update_bandwidth
        link = max(h2d.duplex_bandwidth + d2h.duplex_bandwidth, h2d.bandwidth, d2h.bandwidth)
        copied = up * h2d.bandwidth + down * d2h.bandwidth
        return [up, down, cpu, copied * (1 / link), (copied + cpu * update) * (1 / hardware.dram_bandwidth)]

    def _stall(self, gradients: Table) -> Table:
        """Time that the GPU waits for each unit if only the adjacent passes hide a copy."""
        forward, backward = self._forward[:, None], self._backward[:, None]

        def over(table: Table, hidden: Numbers) -> Table:
            return Table(np.maximum(table.activations - hidden, 0), np.maximum(table.others - hidden, 0))

        fetches = over(self._for_backward, backward) + over(self._for_forward, forward)
        if self._shared:

            def joined(when: When) -> Table:
                return self._tables.others(lambda one: one.collective_seconds(when))

            fetches = fetches + over(joined(When.BEFORE_BACKWARD), backward) + over(joined(When.BEFORE_FORWARD), forward)
            gradients = gradients + joined(When.AFTER_BACKWARD)
        return fetches * self._m + over(gradients, backward) + over(self._for_update, forward + backward)

    # --- memory

    def _all_gpu_bytes(self) -> tuple[Rows, Rows]:
        """Bytes at the loss, at each forward, at each backward and at each update."""
        profile, tables, blocks, loss = self._profile, self._tables, self._profile.units, self._profile.loss
        units, n = self._units, self._n
        at, below, above = (
            np.array(compare(units[None, :], units[:, None]), float) for compare in (np.equal, np.less, np.greater)
        )
        everything, one_row = np.ones((n, n)), np.ones((1, n))
        resident, kept = tables.others(lambda one: one.resting_bytes(GPU_MEMORY)), tables.passes(here_bytes)
        # Parameters that are fetched for one of two passes stay from that pass to the other.
        weights = np.array([profile.parameter_bytes(unit) for unit in range(n)], float)[:, None]
        for_forward = tables.others(lambda one: one.brings_parameters(When.BEFORE_FORWARD)) * weights
        for_backward = tables.others(lambda one: one.brings_parameters(When.BEFORE_BACKWARD)) * weights
        leaving = Table(for_forward.activations, np.maximum(for_forward.others, for_backward.others))
        reached = self._reached
        down, up = (leaving + fetched * -1.0 for fetched in (for_backward, for_forward))
        down = down * reached[:, None]
        streamed = tables.moves(_state_bytes)
        gradients = np.array([profile.gradient_elements(unit) * profile.element_bytes for unit in range(n)], float)
        complete = tables.others(lambda one: one.gradient_bytes)
        summed = tables.others(lambda one: one.gradient_bytes * (not one.sums_on_host)) * float(self._m > 1)
        waiting = tables.others(lambda one: one.gradient_bytes * bool(one.at(D2H, When.AFTER_BACKWARD, Value.GRADIENTS)))
        inputs = np.array([unit.input_bytes for unit in blocks], float)
        handed, given = np.where(units > profile.first_trained, inputs, 0), np.append(inputs[1:], 0)
        logits = loss.logits_bytes * float(loss.keeps_logits) + loss.passed_bytes * (units == n - 1)
        tied = (profile.workload.tied_embeddings * gradients[0]) * (units > 0)
        gradient = gradients + tied
        there = self._sum(everything, resident) + self._sum(below, kept + down) + self._sum(above, up)
        at_loss = self._sum(one_row, resident + kept + down, np.array([float(loss.peak_bytes)]))
        last_output = np.where(units == n - 1, float(loss.logits_bytes), given)
        at_forward = there + self._sum(at, leaving + tables.passes(_forward_bytes), last_output)
        during = np.array([unit.activation_bytes + unit.backward_workspace_bytes for unit in blocks], float)
        at_backward = there + self._sum(at, leaving, (during + gradient + handed + given + logits) * reached)
        # Each of later micro-batches is added, one parameter after another.
        returning = tables.moves(lambda one: sum(c.move.size_bytes for c in one.at(H2D, When.BEFORE_BACKWARD, Value.GRADIENTS)))
        added = np.array([profile.added_elements(i) / max(profile.gradient_elements(i), 1) for i in range(n)])[:, None]
        at_backward = at_backward + self._sum(below, summed) + self._sum(at, (summed + returning) * added)
        keeps = loss.logits_bytes * float(loss.keeps_logits) * (units > profile.first_trained)
        at_update = there + self._sum(at, leaving + streamed, (gradient + handed) * reached + keeps) + self._sum(below, summed)
        if self._shared:
            at_update = self._sum(everything, resident) + self._sum(at, streamed + complete)
        sure = stacked([at_loss, at_forward, at_backward, at_update])
        updated = tables.others(lambda one: one.gradient_bytes * (one.gpu_update > 0)) * float(self._shared and self._m == 1)
        # Bytes fetched for the next pass, and bytes waiting for their copy, or on several GPUs for the updates after backward.
        away, next_down = self._away, (units[None, :] == units[:, None] - 1).astype(float)
        next_up = (units[None, :] == units[:, None] + 1).astype(float)
        pending = stacked(
            [
                self._sum((units[None, :] == n - 2).astype(float), away),
                self._sum(next_up, for_forward) + self._sum(next_down, away),
                self._sum(next_down, for_backward + returning + away)
                + self._sum(next_up, waiting + streamed)
                + self._sum(above, updated)
                + self._sum(at, streamed),
                self._sum(next_up, streamed + waiting) + self._sum(next_down, streamed + for_backward + returning + away),
            ]
        )
        return sure, pending

    def _on_host(self, resting: Callable[[UnitCosts], float]) -> Rows:
        """Lower bound of what the host holds, and the same with everything in transit."""
        away = self._tables.moves(lambda one: 0.0 if _passes_host(one) else sum(c.move.size_bytes for c in _kept_down(one)))
        everything = np.ones((1, self._n))
        rests = self._sum(everything, self._tables.others(resting))
        return stacked([rests, rests + self._sum(everything, away * self._m)])

    def _sum(self, weights: Numbers, table: Table, fixed: Numbers | None = None) -> Rows:
        """Rows that sum the units of ``table`` with ``weights``, of shape (rows, units)."""
        return Rows(
            np.zeros(len(weights)) if fixed is None else np.asarray(fixed, float),
            weights[:, :, None] * table.activations[None],
            weights[:, :, None] * table.others[None],
        )
