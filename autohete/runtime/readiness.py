"""Which task may start: counts what each admitted instance still waits for, and queues it once it waits for nothing.

An instance is an integer: ``iteration * tasks + task``. Nothing here takes a lock: the caller has one.
"""

from __future__ import annotations

from collections.abc import Iterable

from autohete.execution.queues import lane_queues
from autohete.schedule import Graph


class Readiness:
    """The edges that admitted instances of a schedule still wait for, and the queue of each lane.

    Args:
        graph: the schedule's lanes and edges.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph, self._tasks = graph, len(graph.lane)
        self._in_first = [waits for waits, _ in graph.waits]
        self._in_later = [waits + back for waits, back in graph.waits]
        #: Lane of each successor, and its distance as an instance, by task.
        self._successors = [
            [(graph.lane[after], after - task + back * self._tasks) for after, back in successors]
            for task, successors in enumerate(graph.successors)
        ]
        #: Number of edges that are not satisfied, for each admitted instance that is not ready.
        self._waits: dict[int, int] = {}
        self._queues = lane_queues(graph)

    def admit(self, iteration: int, ended: Iterable[int]) -> set[int]:
        """Add the instances of an iteration; return the lanes for which some are ready.

        Args:
            iteration: its number.
            ended: tasks of the iteration before that have already ended: edges from them need no wait.
        """
        waits = list(self._in_later if iteration else self._in_first)
        for task in ended:
            for after, back in self._graph.successors[task]:
                waits[after] -= back
        lanes = set()
        for task, count in enumerate(waits):
            if count:
                self._waits[iteration * self._tasks + task] = count
            else:
                lane = self._graph.lane[task]
                self._queues[lane].push(iteration * self._tasks + task)
                lanes.add(lane)
        return lanes

    def end(self, instance: int) -> list[tuple[int, int]]:
        """Satisfy the edges from ``instance``, which has ended; return the lane and instance of all that become ready."""
        waits, ready = self._waits, []
        for lane, distance in self._successors[instance % self._tasks]:
            successor = instance + distance
            if successor in waits:  # otherwise its iteration has not been admitted
                waits[successor] = left = waits[successor] - 1
                if not left:
                    del waits[successor]
                    self._queues[lane].push(successor)
                    ready.append((lane, successor))
        return ready

    def take(self, lane: int) -> int | None:
        """Remove and return the instance that the lane starts now; None if it has to wait."""
        return self._queues[lane].pop()
