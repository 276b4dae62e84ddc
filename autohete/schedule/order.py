"""The order between tasks that holds in every execution of a schedule."""

from __future__ import annotations

from autohete.errors import ScheduleError
from autohete.schedule import Discipline, Kind, Schedule
from autohete.schedule.graph import graph_of


def order(schedule: Schedule) -> list[tuple[int, int, int]]:
    """All (predecessor, successor, back) that hold in every execution: explicit edges, and the order imposed by the lanes.

    A fifo lane fully orders its own tasks. On a priority lane each task waits for its own instance of the previous
    iteration.
    """
    return schedule.once(_order)


def _order(schedule: Schedule) -> list[tuple[int, int, int]]:
    graph = graph_of(schedule)
    fifo = [lane.discipline is Discipline.FIFO for lane in schedule.lanes]
    edges = {(i, i, 1) for i, lane in enumerate(graph.lane) if not fifo[lane]}
    for u, successors in enumerate(graph.successors):
        lane = graph.lane[u]
        edges |= {(u, v, back) for v, back in successors if not (fifo[lane] and graph.lane[v] == lane)}
    for lane, tasks in enumerate(graph.lane_tasks):
        if fifo[lane] and tasks:
            edges |= {(u, v, 0) for u, v in zip(tasks, tasks[1:], strict=False)} | {(tasks[-1], tasks[0], 1)}
    return sorted(edges)


def topological(tasks: int, edges: list[tuple[int, int, int]]) -> list[int]:
    """All tasks of an iteration in topological order; ties are broken by the order in the schedule.

    Raises:
        ScheduleError: tasks wait for each other.
    """
    before: list[list[int]] = [[] for _ in range(tasks)]
    for u, v, back in edges:
        if not back:
            before[v].append(u)
    ordered: dict[int, None] = {}
    opened: set[int] = set()
    for task in range(tasks):
        stack = [task]
        while stack:
            missing = [u for u in before[stack[-1]] if u not in ordered]
            if missing and stack[-1] in opened:
                raise ScheduleError("tasks wait for each other in a cycle: validate() names them")
            opened.add(stack[-1])
            stack += missing
            if not missing:
                ordered[stack.pop()] = None
    return list(ordered)


def delayed_units(schedule: Schedule) -> set[int]:
    """The units whose CPU update does not wait for the gradients of its own iteration."""
    before = {task.id: [edge.task for edge in task.after if not edge.back] for task in schedule.tasks}
    delayed: set[int] = set()
    for update in before:
        if update.kind is Kind.CPU_UPDATE:
            seen, rest = {update}, [update]
            while rest:
                new = [task for task in before[rest.pop()] if task not in seen]
                seen.update(new)
                rest += new
            if not any(task.kind is Kind.OFFLOAD_GRADIENTS and task.unit == update.unit for task in seen):
                delayed.add(update.unit)
    return delayed
