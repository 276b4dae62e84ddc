"""Which task may start: counts what each admitted instance still waits for, and queues it once it waits for nothing.

Most edges are satisfied when the task before has ended. On a device that runs ahead some are when it has been issued.

An instance is an integer: ``iteration * tasks + task``. Nothing here takes a lock: the caller has one.
"""

from __future__ import annotations

from collections.abc import Iterable

from autohete.execution.queues import lane_queues
from autohete.runtime.ahead import NOTHING_AHEAD, Ahead
from autohete.schedule import Graph


class Readiness:
    """The edges that admitted instances of a schedule still wait for, and the queue of each lane.

    Args:
        graph: the schedule's lanes and edges.
        ahead: the edges that are satisfied when the task before has been issued.
    """

    def __init__(self, graph: Graph, ahead: Ahead = NOTHING_AHEAD) -> None:
        self._graph, self._tasks = graph, len(graph.lane)
        self._in_first = [waits for waits, _ in graph.waits]
        self._in_later = [waits + back for waits, back in graph.waits]
        #: Successors of each task, and the number of iterations until each, by the moment that satisfies the edge.
        self._at_issue, self._at_end = (
            [
                [edge for edge in successors if ((task, *edge) in ahead.edges) is wanted]
                for task, successors in enumerate(graph.successors)
            ]
            for wanted in (True, False)
        )
        #: Number of edges that are not satisfied, for each admitted instance that is not ready.
        self._waits: dict[int, int] = {}
        self._queues = lane_queues(graph)

    def admit(self, iteration: int, ended: Iterable[int], issued: Iterable[int] = ()) -> set[int]:
        """Add the instances of an iteration; return the lanes for which some are ready.

        Args:
            iteration: its number.
            ended: tasks of the iteration before that have already ended: edges from them need no wait.
            issued: those that have already been issued.
        """
        waits = list(self._in_later if iteration else self._in_first)
        for tasks, successors in ((ended, self._at_end), (issued, self._at_issue)):
            for task in tasks:
                for after, back in successors[task]:
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
        return self._satisfy(instance, self._at_end)

    def issue(self, instance: int) -> list[tuple[int, int]]:
        """The same for ``instance``, which has been issued."""
        return self._satisfy(instance, self._at_issue)

    def _satisfy(self, instance: int, successors: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
        waits, ready, task = self._waits, [], instance % self._tasks
        for after, back in successors[task]:
            successor = instance + after - task + back * self._tasks
            if successor in waits:  # otherwise its iteration has not been admitted
                waits[successor] = left = waits[successor] - 1
                if not left:
                    del waits[successor]
                    lane = self._graph.lane[after]
                    self._queues[lane].push(successor)
                    ready.append((lane, successor))
        return ready

    def take(self, lane: int) -> int | None:
        """Remove and return the instance that the lane starts now; None if it has to wait."""
        return self._queues[lane].pop()
