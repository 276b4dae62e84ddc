"""How far a result is from what is possible: lower bounds of the period of a schedule, and what imposes them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from autohete.schedule import KIND_MEANING, Graph, Kind, Schedule, TaskId


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds of the steady period, on undisturbed lanes.

    Args:
        lane, lane_seconds: the lane with the most work per iteration, and that work.
        cycle, cycle_seconds: the critical cycle of waits (edges and the order of fifo lanes), and its length per
            iteration it spans: the maximum cycle ratio.
        shares: nanoseconds of the cycle by kind, largest first.
    """

    lane: str
    lane_seconds: float
    cycle: tuple[TaskId, ...]
    cycle_seconds: float
    shares: dict[Kind, int]

    @property
    def seconds(self) -> float:
        """The larger of both: no execution of the schedule has a shorter period."""
        return max(self.lane_seconds, self.cycle_seconds)

    @property
    def binds(self) -> str:
        """In words, what imposes the bound: a lane, or what the critical cycle spends its time on."""
        if self.lane_seconds >= self.cycle_seconds:
            return f"the work of lane {self.lane}"
        total = sum(self.shares.values())
        parts = [f"{KIND_MEANING[kind]} {100 * ns / total:.0f} %" for kind, ns in self.shares.items() if ns * 50 >= total]
        return f"a cycle of waits: {', '.join(parts)}"


def period_bounds(schedule: Schedule) -> Bounds:
    """The bounds of ``schedule``, which must be valid."""
    work = dict.fromkeys((lane.name for lane in schedule.lanes), 0)
    for task in schedule.tasks:
        work[task.lane] += task.duration_ns
    lane = max(work, key=lambda name: work[name])
    cycle, ratio = _critical_cycle(schedule.graph())
    tasks = [schedule.tasks[i] for i in cycle]
    shares: dict[Kind, int] = {}
    for task in tasks:
        shares[task.id.kind] = shares.get(task.id.kind, 0) + task.duration_ns
    shares = dict(sorted(shares.items(), key=lambda item: -item[1]))
    return Bounds(lane, work[lane] * 1e-9, tuple(task.id for task in tasks), float(ratio) * 1e-9, shares)


def _critical_cycle(graph: Graph) -> tuple[list[int], Fraction]:
    """Tasks of the cycle with the largest duration per iteration spanned, and that ratio in nanoseconds.

    Linear program: the least T with start times s such that s[v] >= s[u] + duration[u] - back * T on every edge. Its dual
    is a circulation on critical cycles. The cycle is read off the dual and its ratio taken exactly, so rounding inside the
    solver can make the bound at most weaker, never wrong.
    """
    durations = [task.duration_ns for task in graph.schedule.tasks]
    edges = list(graph.edges())
    scale = max(sum(durations), 1)
    if not edges:
        return [], Fraction(0)
    rows = np.arange(len(edges))
    u, v, back = (np.array(column) for column in zip(*edges, strict=True))
    tasks = len(durations)
    entries = np.concatenate([np.ones(len(edges)), -np.ones(len(edges)), -back.astype(float)])
    places = (np.tile(rows, 3), np.concatenate([u, v, np.full(len(edges), tasks)]))
    matrix = csr_array((entries, places), shape=(len(edges), tasks + 1))
    # A task that waits for itself contributes u and v in one place; csr adds them up to zero, as it should.
    limits = -np.array(durations, float)[u] / scale
    cost = np.zeros(tasks + 1)
    cost[-1] = 1
    found = linprog(cost, A_ub=matrix, b_ub=limits, bounds=[(None, None)] * tasks + [(0, None)], method="highs")
    if found.status != 0:
        return [], Fraction(0)
    flow = -found.ineqlin.marginals
    following = {int(u[e]): e for e in np.argsort(flow) if flow[e] > 1e-9}
    return _best_cycle(following, edges, durations)


def _best_cycle(
    following: dict[int, int], edges: list[tuple[int, int, int]], durations: list[int]
) -> tuple[list[int], Fraction]:
    """The best of the cycles that one strongest outgoing edge per task forms."""
    best: tuple[list[int], Fraction] = ([], Fraction(0))
    visited: set[int] = set()
    for start in following:
        path: list[int] = []
        node: int | None = start
        while node is not None and node not in visited:
            visited.add(node)
            path.append(node)
            node = edges[following[node]][1] if node in following else None
        if node in path:
            cycle = path[path.index(node) :]
            span = sum(edges[following[task]][2] for task in cycle)
            if span:
                ratio = Fraction(sum(durations[task] for task in cycle), span)
                best = max(best, (cycle, ratio), key=lambda item: item[1])
    return best
