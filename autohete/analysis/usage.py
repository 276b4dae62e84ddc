"""Utilization: how busy each lane is, how much of its work overlaps the GPU, and what the GPU waits for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from autohete.execution.trace import Nanoseconds, Steady, Trace
from autohete.schedule import COLLECTIVE, CPU, D2H, GPU, H2D, SEND, Lane, graph_of


class Cause(StrEnum):
    """The cause of idle time of the GPU."""

    H2D = "H2D"
    D2H = "D2H"
    OPTIMIZER = "optimizer"
    PLACES = "places"
    COLLECTIVE = "other GPUs"
    NOTHING = "nothing"


_CAUSE = {
    H2D: Cause.H2D,
    D2H: Cause.D2H,
    CPU: Cause.OPTIMIZER,
    COLLECTIVE: Cause.COLLECTIVE,
    SEND: Cause.COLLECTIVE,
}


def _cause(lane: Lane) -> Cause:
    """The cause of a wait for the work of ``lane``."""
    name, _, other_rank = lane.name.partition(".")
    if name == GPU and other_rank:
        return Cause.COLLECTIVE
    return _CAUSE.get(name, Cause.NOTHING if lane.ends is None else Cause.PLACES)


@dataclass(frozen=True, slots=True)
class LaneUse:
    """Utilization of a lane in the steady state.

    Args:
        busy_share: share of the time in which it works.
        overlap_share: share of its work that runs while the GPU computes.
    """

    busy_share: float
    overlap_share: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Utilization of each lane, by name, and the GPU's idle seconds per iteration, by cause."""

    lanes: dict[str, LaneUse]
    idle_seconds: dict[Cause, float]


def usage(trace: Trace, steady: Steady) -> Usage:
    """Compute the utilization of all lanes over the steady window."""
    anchors = trace.anchors()
    begin = int(anchors[steady.first])
    last = steady.first + steady.cycle
    end = int(anchors[last]) if last < trace.iterations else int(trace.end_ns.max(initial=0))
    length = max(end - begin, 1)
    gpu_starts, gpu_ends = _clipped(trace, GPU, begin, end)
    lanes: dict[str, LaneUse] = {}
    for lane in trace.schedule.lanes:
        starts, ends = _clipped(trace, lane.name, begin, end)
        busy = int((ends - starts).sum())
        hidden = float((_busy_until(gpu_starts, gpu_ends, ends) - _busy_until(gpu_starts, gpu_ends, starts)).sum())
        lanes[lane.name] = LaneUse(busy / length, hidden / busy if busy else 0.0)
    idle = _idle_by_cause(trace, begin, end)
    return Usage(lanes, {cause: idle[cause] * 1e-9 / steady.cycle for cause in Cause})


def _clipped(trace: Trace, lane: str, begin: int, end: int) -> tuple[Nanoseconds, Nanoseconds]:
    """Return the starts and ends of a lane's work, clipped to the window, in order."""
    tasks = trace.lane_tasks(lane)
    starts, ends = (np.clip(times[:, tasks].ravel(), begin, end) for times in (trace.start_ns, trace.end_ns))
    keep = ends > starts
    order = np.argsort(starts[keep])
    return starts[keep][order], ends[keep][order]


def _busy_until(starts: Nanoseconds, ends: Nanoseconds, times: Nanoseconds) -> NDArray[np.float64]:
    """Return how long the intervals have been busy up to each of ``times``."""
    if not len(starts):
        return np.zeros(len(times))
    points = np.stack([starts, ends], axis=1).ravel()
    done = np.concatenate([[0], np.cumsum(ends - starts)])
    levels = np.stack([done[:-1], done[1:]], axis=1).ravel()
    busy: NDArray[np.float64] = np.interp(times, points, levels)
    return busy


def _idle_by_cause(trace: Trace, begin: int, end: int) -> dict[Cause, int]:
    """Return the GPU's idle nanoseconds in the window, by the lane whose work the GPU was waiting for.

    From the end of a gap, walk back along the binding waits: the last edge that a task waited for, or what occupied its lane.
    """
    idle = dict.fromkeys(Cause, 0)
    walk = _Walk(trace)
    gpu = walk.lane_order[GPU].tolist()
    busy_until = begin
    for instance in gpu:
        start, stop = walk.start[instance], walk.end[instance]
        if stop <= begin:
            continue
        for cause, length in walk.back(instance, max(busy_until, begin), min(start, end)):
            idle[cause] += length
        busy_until = max(busy_until, stop)
        if start >= end:
            break
    return idle


def binding_waits(trace: Trace) -> list[int | None]:
    """Return for each instance (``iteration * tasks + task``) the one whose end let it start: the last that it waited for,
    which an edge names or which occupied its lane. None for the first of a lane without edges.
    """
    walk = _Walk(trace)
    return [walk.bound_by(instance) for instance in range(len(walk.start))]


class _Walk:
    """Finds, for each instance (``iteration * tasks + task``), the instance that it waited for last."""

    def __init__(self, trace: Trace) -> None:
        graph = graph_of(trace.schedule)
        self.schedule, self.index = trace.schedule, graph.index
        self.causes = {lane.name: _cause(lane) for lane in trace.schedule.lanes}
        self.tasks = len(trace.schedule.tasks)
        starts, ends = trace.start_ns.ravel(), trace.end_ns.ravel()
        order = np.lexsort((ends, starts))
        lanes = np.array(graph.lane)[order % self.tasks]
        #: Of each lane its instances in the order in which it did them, and of each instance the one before; -1 if none.
        self.lane_order = {lane.name: order[lanes == i] for i, lane in enumerate(trace.schedule.lanes)}
        before = np.full(len(order), -1)
        for instances in self.lane_order.values():
            before[instances[1:]] = instances[:-1]
        self.start, self.end, self.before = starts.tolist(), ends.tolist(), before.tolist()

    def bound_by(self, instance: int) -> int | None:
        """Return the instance whose end let this one start."""
        iteration, task = divmod(instance, self.tasks)
        edges = self.schedule.tasks[task].after
        candidates = [(iteration - e.back) * self.tasks + self.index[e.task] for e in edges if iteration >= e.back]
        if self.before[instance] >= 0:
            candidates.append(self.before[instance])
        return max(candidates, key=lambda i: self.end[i], default=None)

    def back(self, instance: int, begin: int, end: int) -> list[tuple[Cause, int]]:
        """Split the gap from ``begin`` to ``end`` before ``instance`` by cause."""
        idle: list[tuple[Cause, int]] = []
        seen: set[int] = set()  # tasks without duration may precede each other in one instant
        while end > begin:
            seen.add(instance)
            binding = self.bound_by(instance)
            if binding is None or self.end[binding] <= begin or binding in seen:
                idle.append((Cause.NOTHING, end - begin))
                break
            if self.end[binding] < end:
                idle.append((Cause.NOTHING, end - self.end[binding]))
                end = self.end[binding]
            start = max(begin, self.start[binding])
            lane = self.schedule.tasks[binding % self.tasks].lane
            idle.append((self.causes[lane], end - start))
            instance, end = binding, start
        return idle
