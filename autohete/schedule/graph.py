"""A schedule with names resolved to indices, and the order of a priority lane."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from autohete.schedule.ids import KIND_ORDER
from autohete.schedule.schedule import Discipline, Schedule, Task

#: Priority, micro-batch, unit, kind, rank, recomputation: smaller is more urgent.
Urgency = tuple[int, int, int, int, int, int]


def urgency(task: Task) -> Urgency:
    """Sort key of a priority lane for tasks of one iteration. The iteration itself ranks right after the priority."""
    return (task.priority, task.id.micro_batch, task.id.unit, KIND_ORDER[task.id.kind], task.id.rank, task.id.again)


class Graph:
    """A schedule's edges as index lists. Durations are not part of it.

    Attributes:
        lanes: the schedule's lanes.
        lane: lane index of each task.
        successors: for each task the (task, back) pairs that wait for it.
        waits: number of same-iteration edges and of back-reaching edges of each task.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.lanes, self._tasks = schedule.lanes, schedule.tasks
        self.index = {task.id: i for i, task in enumerate(schedule.tasks)}
        lanes = {lane.name: i for i, lane in enumerate(schedule.lanes)}
        self.lane = [lanes[task.lane] for task in schedule.tasks]
        self.successors: list[list[tuple[int, int]]] = [[] for _ in schedule.tasks]
        self.waits: list[tuple[int, int]] = []
        for i, task in enumerate(schedule.tasks):
            back = 0
            for edge in task.after:
                self.successors[self.index[edge.task]].append((i, edge.back))
                back += edge.back
            self.waits.append((len(task.after) - back, back))

    @cached_property
    def lane_tasks(self) -> list[list[int]]:
        """Task indices of each lane in issue order."""
        tasks: list[list[int]] = [[] for _ in self.lanes]
        for i, lane in enumerate(self.lane):
            tasks[lane].append(i)
        return tasks

    @cached_property
    def urgency(self) -> list[Urgency]:
        """For each task, the sort key of a priority lane. The iteration ranks right after its first number."""
        return [urgency(task) for task in self._tasks]

    def edges(self) -> Iterator[tuple[int, int, int]]:
        """All (predecessor, successor, back): explicit edges, and the order that fifo lanes impose, including wrap-around."""
        for before, successors in enumerate(self.successors):
            for after, back in successors:
                yield before, after, back
        for lane, tasks in zip(self.lanes, self.lane_tasks, strict=True):
            if lane.discipline is Discipline.FIFO and tasks:
                for before, after in zip(tasks, tasks[1:], strict=False):
                    yield before, after, 0
                yield tasks[-1], tasks[0], 1


def graph_of(schedule: Schedule) -> Graph:
    """The schedule with names resolved to indices, for executors. Call :func:`validate` first."""
    return schedule.once(Graph)
