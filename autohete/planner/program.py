"""AutoHete's integer program: three integers that minimise the iteration time within the GPU and host memory.

Three integers over n blocks have about n^3 values. These are few enough to enumerate, so the program is solved exactly, and a
search that continues from its solution has a lower bound for every choice.

The objective is the largest of several lower bounds of the period, so no plan can beat its value; see
:class:`autohete.planner.plan_bounds.TimeBounds`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from autohete.errors import check_fields, check_member
from autohete.hardware import Hardware
from autohete.planner.budgets import Budgets, Objective
from autohete.planner.plan_bounds import CountChoices, Numbers, TimeBounds, all_choices, below
from autohete.planner.steps import GRADIENT_SLOTS, BlockCosts, Counts, OnHost

#: Among plans that the bounds cannot distinguish, one that moves and computes less is better in practice.
_LOAD_WEIGHT = 5e-4


@dataclass(frozen=True, slots=True)
class Solution:
    """The program's answer: the counts and the least objective value (for seconds, the counts are those with little work among
    several near the optimum).
    """

    counts: Counts
    value: float


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Choices sorted by ascending objective value."""

    choices: CountChoices
    values: Numbers


@dataclass(frozen=True, slots=True)
class Allowed:
    """Values that each of the three integers may have. None: all."""

    checkpointed: tuple[int, ...] | None = None
    offloaded: tuple[int, ...] | None = None
    cpu_updated: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def of(self, choices: CountChoices) -> CountChoices:
        """The allowed ones of ``choices``."""
        for field in fields(self):
            values = getattr(self, field.name)
            if values is not None:
                choices = choices.take(np.isin(getattr(choices, field.name), values))
        return choices


@dataclass(frozen=True, slots=True)
class Program:
    """The program for one workload and node.

    Args:
        costs: seconds and bytes per block.
        hardware: links and shared bandwidth.
        priority: whether updates run lower block indices first.
        budgets: capacity of each memory.
        pending: also count what typical timing adds to the GPU's memory: a gradient that waits for its copy, and the
            parameters fetched ahead. Without it the program is a relaxation: no plan can beat its value.
        allowed: the values that the integers may have.
    """

    costs: BlockCosts
    hardware: Hardware
    priority: bool
    budgets: Budgets
    pending: bool = True
    allowed: Allowed = Allowed()

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def times(self) -> TimeBounds:
        """Lower bounds of the iteration time for any choices."""
        return TimeBounds(self.costs, self.hardware, self.priority)

    def solve(self, objective: Objective = Objective.SECONDS) -> Solution | None:
        """The optimum, or None if nothing fits."""
        check_member("objective", objective, Objective)
        limit, weight = np.inf, 0.0
        if objective is Objective.SECONDS:
            weight = _LOAD_WEIGHT
            # Any value bounds the enumeration. Use that of the choice whose busiest engine has the least work.
            fitting, times = self.fitting(), self.times
            if not len(fitting):
                return None
            loads = times.loads(fitting) + _LOAD_WEIGHT * times.total_load(fitting)
            limit = float(times.seconds(fitting.take(slice(int(loads.argmin()), int(loads.argmin()) + 1)))[0])
        ranking = self.ranked(objective, limit)
        if not len(ranking.choices):
            return None
        place = int((ranking.values + weight * self.times.total_load(ranking.choices)).argmin())
        return Solution(ranking.choices[place], float(ranking.values[0]))

    def ranked(self, objective: Objective = Objective.SECONDS, limit: float = np.inf) -> Ranking:
        """All choices that fit with an objective of at most ``limit``, best first; ties are broken by the least work."""
        choices, times = self.fitting(objective), self.times
        if objective is Objective.SECONDS:
            choices = choices.take(times.loads(choices) <= limit)
            values = times.seconds(choices)
        else:
            values = self._bytes(choices, objective)
        order = np.lexsort((times.total_load(choices), values))
        order = order[values[order] <= limit]
        return Ranking(choices.take(order), values[order])

    def fitting(self, objective: Objective = Objective.SECONDS) -> CountChoices:
        """The choices within all budgets. A memory that is minimised has no budget."""
        return self.within_budgets(all_choices(self.costs.count), objective)

    def within_budgets(self, choices: CountChoices, objective: Objective = Objective.SECONDS) -> CountChoices:
        """The allowed elements of ``choices`` that fit, and that the optimizer can update."""
        choices = self.allowed.of(choices)
        if not self.costs.updates_on_cpu:
            choices = choices.take(choices.cpu_updated == 0)
        for memory, budget in self.budgets.limits().items():
            if objective is not memory:
                choices = choices.take(self._bytes(choices, memory) <= budget)
        return choices

    def _bytes(self, x: CountChoices, memory: Objective) -> Numbers:
        count = {
            Objective.PINNED_BYTES: self.pinned_bytes,
            Objective.HOST_BYTES: self.host_bytes,
            Objective.GPU_BYTES: self.gpu_bytes,
        }
        return count[memory](x)

    def host_bytes(self, x: CountChoices) -> Numbers:
        """Host memory of each choice."""
        return self._on_host(x, self.costs.host)

    def pinned_bytes(self, x: CountChoices) -> Numbers:
        """Pinned host memory of each choice."""
        return self._on_host(x, self.costs.pinned)

    def _on_host(self, x: CountChoices, size: OnHost) -> Numbers:
        updated, offloaded, both = below(size.updated), below(size.offloaded), below(size.both)
        first, end = self.costs.count - x.cpu_updated, x.offloaded + 1
        start = np.minimum(np.maximum(first, 1), end)  # of the offloaded blocks that the CPU updates
        found = updated[-1] - updated[first] - (updated[end] - updated[start])
        return np.asarray(found + offloaded[start] - offloaded[1] + both[end] - both[start], float)

    def gpu_bytes(self, x: CountChoices) -> Numbers:
        """GPU memory of each choice at the loss or at a backward, whichever is higher. Includes pending bytes if asked for."""
        costs, n = self.costs, self.costs.count
        weights, states = below(costs.weights), below(costs.states)
        first, units = costs.first_trained, range(n)
        kept = below(costs.activations)
        recomputed = below([costs.activations[i] - costs.input[i] * (i >= first) for i in units])
        c, p, unit = np.arange(n - 1)[:, None], np.arange(n - 1)[:, None], np.arange(n + 1)[None, :]
        # What the blocks below each block keep for backward; rows are over the first integer.
        alive = kept[unit] - np.maximum(recomputed[np.minimum(c + 1, unit)] - recomputed[1], 0)
        alive[:, 0] = 0
        extra = np.zeros((n - 1, n + 1))  # rows: second integer; columns: backwards, then the loss
        size = np.array([*costs.weights, 0])
        fetched = (unit >= 1) & (unit <= p)
        extra += np.where(fetched, size[unit], 0)
        if self.pending:  # the block below is fetched during its backward
            extra += np.where((unit >= 2) & (unit - 1 <= p) & (unit < n), size[np.maximum(unit - 1, 0)], 0)
        backward = np.array(costs.activations) + np.array(costs.workspace) + np.array(costs.gradient_bytes)
        inputs = np.array(costs.input)
        backward[first + 1 :] += inputs[first + 1 :]  # the gradients of its input and of its output
        backward[first:-1] += inputs[first + 1 :]
        backward[-1] += costs.loss.passed_bytes
        if costs.loss.keeps_logits:
            backward[first:] += costs.loss.logits_bytes
        backward[1:] += costs.long_gradient
        extra += np.append(backward, costs.loss.peak_bytes)
        peak = np.array([(row + extra).max(axis=1) for row in alive]) + weights[-1] - (weights[p[:, 0] + 1] - weights[1])
        found = peak[x.checkpointed, x.offloaded] + states[n - x.cpu_updated]
        if costs.micro_batches > 2 and not costs.shared:
            # Between the first and the last, all sums for the GPU are there, and a backward adds to one of them in place.
            found = found + np.maximum(below(costs.gradient_bytes)[n - x.cpu_updated] - max(costs.gradient_bytes), 0)
        held = below(costs.kept)
        found = found + held[np.maximum(np.minimum(x.offloaded, n - x.cpu_updated - 1), 0) + 1] - held[1]
        if self.pending:  # gradients waiting for their copy
            found = found + np.where(x.cpu_updated > 1, (GRADIENT_SLOTS - 1) * max(costs.gradient_bytes[1:-1]), 0)
        return np.asarray(found, float)
