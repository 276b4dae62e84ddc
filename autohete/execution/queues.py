"""Queues of ready task instances, one per discipline. They decide what a lane takes next, in every executor.

An instance is an integer: ``iteration * tasks + task``.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from autohete.schedule import Discipline, Graph


class LaneQueue(Protocol):
    """Ready instances of one lane."""

    def push(self, instance: int) -> None:
        """Add ``instance``, which has become ready."""

    def pop(self) -> int | None:
        """Remove and return the instance to start now, or None if the lane has to wait."""


class FifoQueue:
    """Instances in issue order, like a CUDA stream: an instance that is not ready blocks those behind it."""

    def __init__(self, tasks: list[int], tasks_per_iteration: int) -> None:
        self._tasks = tasks
        self._per_iteration = tasks_per_iteration
        self._ready: set[int] = set()
        self._position = 0
        self._base = 0

    def push(self, instance: int) -> None:
        self._ready.add(instance)

    def pop(self) -> int | None:
        instance = self._base + self._tasks[self._position]
        if instance not in self._ready:
            return None
        self._ready.remove(instance)
        self._position += 1
        if self._position == len(self._tasks):
            self._position = 0
            self._base += self._per_iteration
        return instance


class PriorityQueue:
    """The most urgent ready instance: by priority, iteration, and the remaining keys of :data:`autohete.schedule.Urgency`.

    Args:
        priority: of each task.
        rank: the place of each task in the order of all that comes after priority and iteration.
    """

    def __init__(self, priority: list[int], rank: list[int]) -> None:
        self._priority, self._rank = priority, rank
        self._heap: list[tuple[int, int, int, int]] = []

    def push(self, instance: int) -> None:
        iteration, task = divmod(instance, len(self._priority))
        heapq.heappush(self._heap, (self._priority[task], iteration, self._rank[task], instance))

    def pop(self) -> int | None:
        return heapq.heappop(self._heap)[-1] if self._heap else None


def lane_queues(graph: Graph) -> list[LaneQueue]:
    """Return one queue per lane of the graph's schedule."""
    tasks = len(graph.lane)
    priority, rank = [0] * tasks, [0] * tasks
    if any(lane.discipline is Discipline.PRIORITY for lane in graph.lanes):
        priority = [priority for priority, *_ in graph.urgency]
        for place, task in enumerate(sorted(range(tasks), key=lambda task: graph.urgency[task][1:])):
            rank[task] = place
    return [
        FifoQueue(members, tasks) if lane.discipline is Discipline.FIFO else PriorityQueue(priority, rank)
        for lane, members in zip(graph.lanes, graph.lane_tasks, strict=True)
    ]
