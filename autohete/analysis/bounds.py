"""How far a result is from what is possible: lower bounds of the period of a schedule, and what imposes them."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from autohete.execution.trace import Nanoseconds, Trace
from autohete.schedule import KIND_MEANING, Discipline, Graph, Kind, Schedule, TaskId, graph_of


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
        """The cause of the bound, in words: a lane, or the tasks of the critical cycle."""
        if self.lane_seconds >= self.cycle_seconds:
            return f"the work of lane {self.lane}"
        total = sum(self.shares.values())
        parts = [f"{KIND_MEANING[kind]} {100 * ns / total:.0f} %" for kind, ns in self.shares.items() if ns * 50 >= total]
        return f"a cycle of waits: {', '.join(parts)}"


def period_bounds(schedule: Schedule, trace: Trace | None = None) -> Bounds:
    """The bounds of ``schedule``, which must be valid.

    Args:
        schedule: whose period is bounded.
        trace: an execution of it. If its iterations repeat, and its tasks start as early as they can, its times prove the
            critical cycle, which otherwise takes a search.
    """
    durations = [task.duration_ns for task in schedule.tasks]
    work = {lane.name: sum(durations[i] for i in schedule.tasks_of(lane.name)) for lane in schedule.lanes}
    lane = max(work, key=lambda name: work[name])
    cycle, ratio = (trace and _proven_cycle(trace, durations)) or _critical_cycle(schedule, durations)
    tasks = [schedule.tasks[i] for i in cycle]
    shares: dict[Kind, int] = {}
    for task in tasks:
        shares[task.id.kind] = shares.get(task.id.kind, 0) + task.duration_ns
    shares = dict(sorted(shares.items(), key=lambda item: -item[1]))
    return Bounds(lane, work[lane] * 1e-9, tuple(task.id for task in tasks), float(ratio) * 1e-9, shares)


def _proven_cycle(trace: Trace, durations: list[int]) -> tuple[list[int], Fraction] | None:
    """The critical cycle, read from the last two iterations of ``trace``; None if they do not prove it.

    If each task starts as much later as in the iteration before, and never before the end of what it waits for, no cycle takes
    longer than that. If it starts at the end of one that it waits for, then so does that one, and so on: among these ends is a
    cycle that takes as long.
    """
    if trace.iterations < 2:
        return None
    before, start = trace.start_ns[-2:]
    period = int(start[0] - before[0])
    edges = trace.schedule.once(_edges)
    u, v, back = edges.T
    wait = start[v] + period * back - (start + np.array(durations, np.int64))[u]
    if (start - before != period).any() or wait.min(initial=0) < 0:
        return None
    came_by: list[tuple[int, int] | None] = [None] * len(durations)
    for before_it, task, spans in edges[wait == 0].tolist():
        came_by[task] = before_it, spans
    cycle = _cycle_among(came_by)
    span = sum(back for _, back in cycle)
    return ([task for task, _ in cycle], Fraction(period)) if span else None


def _edges(schedule: Schedule) -> Nanoseconds:
    """A row for each edge, including those that order fifo lanes: predecessor, successor, and the iterations in between."""
    return np.array(list(graph_of(schedule).edges()), np.int64).reshape(-1, 3)


def _critical_cycle(schedule: Schedule, durations: list[int]) -> tuple[list[int], Fraction]:
    """Tasks of the cycle with the largest duration per iteration spanned, and that ratio in nanoseconds.

    Move from one cycle to a better one until none is left (Newton's method; Dasdan 2004, "Experimental analysis of the fastest
    optimum cycle ratio and mean algorithms"). All numbers are whole, so the ratio is exact.
    """
    following = schedule.once(_following)
    best, ratio = _busiest_fifo_lane(graph_of(schedule), durations)
    while cycle := _longer_cycle(following, durations, ratio):
        span = sum(back for _, back in cycle)
        best = [task for task, _ in cycle]
        ratio = Fraction(sum(durations[task] for task in best), span)
    return best, ratio


def _following(schedule: Schedule) -> list[list[tuple[int, int]]]:
    """For each task its successors, with the iterations in between: edges, and the order of fifo lanes."""
    following: list[list[tuple[int, int]]] = [[] for _ in schedule.tasks]
    for u, v, back in graph_of(schedule).edges():
        following[u].append((v, back))
    return following


def _busiest_fifo_lane(graph: Graph, durations: list[int]) -> tuple[list[int], Fraction]:
    """A first cycle: the tasks of a fifo lane follow one another, and the first follows the last."""
    best: tuple[list[int], Fraction] = ([], Fraction(0))
    for lane, tasks in zip(graph.lanes, graph.lane_tasks, strict=True):
        if lane.discipline is Discipline.FIFO:
            best = max(best, (tasks, Fraction(sum(durations[task] for task in tasks))), key=lambda item: item[1])
    return best


def _longer_cycle(following: list[list[tuple[int, int]]], durations: list[int], ratio: Fraction) -> list[tuple[int, int]]:
    """A cycle that takes longer per iteration than ``ratio``: its tasks, each with the span of the edge after it; [] if none.

    Finds longest paths (Bellman and Ford), where an edge is as long as its task's duration, less ``ratio`` if it spans an
    iteration. They end unless there is such a cycle, and then it soon shows among the edges that paths came by last.
    """
    whole, period = ratio.denominator, ratio.numerator
    longest = [0] * len(durations)
    came_by: list[tuple[int, int] | None] = [None] * len(durations)
    changed = True
    while changed:
        changed = False
        for u, edges in enumerate(following):
            end = longest[u] + whole * durations[u]
            for v, back in edges:
                length = end - period if back else end
                if length > longest[v]:
                    longest[v], came_by[v], changed = length, (u, back), True
        if changed and (cycle := _cycle_among(came_by)):
            return cycle
    return []


def _cycle_among(came_by: list[tuple[int, int] | None]) -> list[tuple[int, int]]:
    """A cycle in which each task is followed by the one that came by it, if there is any."""
    seen = [-1] * len(came_by)  # from where each was seen first
    for start in range(len(came_by)):
        task = start
        while seen[task] < 0:
            seen[task] = start
            edge = came_by[task]
            if edge is None:
                break
            task = edge[0]
        else:
            if seen[task] == start:
                return _backwards(came_by, task)
    return []


def _backwards(came_by: list[tuple[int, int] | None], last: int) -> list[tuple[int, int]]:
    """The cycle through ``last``."""
    edges: list[tuple[int, int]] = []
    task = last
    while not edges or task != last:
        edge = came_by[task]
        assert edge is not None, "a cycle goes on"
        edges.append(edge)
        task = edge[0]
    return edges[::-1]
