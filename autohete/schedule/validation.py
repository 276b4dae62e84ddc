"""Checks that a schedule can be executed forever: names, edges, sharing, buffers."""

from __future__ import annotations

import graphlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from autohete.errors import ScheduleError
from autohete.schedule.ids import BufferId, TaskId
from autohete.schedule.schedule import Discipline, Schedule, Task


def validate(schedule: Schedule) -> Schedule:
    """Check that the schedule can be executed forever. Returns the schedule itself.

    Raises:
        ScheduleError: states the fault and the tasks that have it.
    """
    schedule.once(_validate_order)
    for task in schedule.tasks:
        if type(task.duration_ns) is not int or task.duration_ns < 0:
            raise ScheduleError(f"task {task.id} lasts {task.duration_ns} ns: a duration is a whole number, not negative")
    _validate_sharing(schedule, [lane.name for lane in schedule.lanes])
    return schedule


def _validate_order(schedule: Schedule) -> None:
    """Check all that durations do not change."""
    if not schedule.lanes:
        raise ScheduleError("a schedule without a lane has no iterations to count: give at least one")
    lanes = _unique("lane", [lane.name for lane in schedule.lanes])
    memories = _unique("memory", [memory.name for memory in schedule.memories])
    _validate_parts(schedule)
    for lane in schedule.lanes:
        for end in (lane.source, lane.target):
            if end is not None and end not in memories:
                raise ScheduleError(
                    f"lane {lane.name!r} copies from or to {end!r}, which is not one of the memories {', '.join(memories)}"
                )
        if (lane.source is None) != (lane.target is None):
            raise ScheduleError(f"lane {lane.name!r} has only one end: give source and target, or neither")
    places = {task.id: place for place, task in enumerate(schedule.tasks)}
    if len(places) < len(schedule.tasks):
        _unique("task", [str(task.id) for task in schedule.tasks])
    waits = _Predecessors(schedule, lanes, places)
    _validate_buffers(schedule, memories, _Ancestors(waits, _order(schedule, waits)), places)


_NOT_IN_NAMES = re.compile(r"[^\w.-]")


def _check_names(what: str, names: list[str]) -> None:
    """Refuse names whose text form cannot be parsed back."""
    for name in names:
        if _NOT_IN_NAMES.search(name) or not name:
            raise ScheduleError(f"{what} {name!r}: a name has letters, digits, '_', '.' and '-' only")


def _unique(what: str, names: list[str]) -> list[str]:
    _check_names(what, names)
    name, times = Counter(names).most_common(1)[0] if names else ("", 0)
    if times > 1:
        raise ScheduleError(f"{what} {name!r} exists {times} times: names are unique")
    return names


def _validate_parts(schedule: Schedule) -> None:
    whole = [memory.name for memory in schedule.memories if memory.part_of is None]
    for memory in schedule.memories:
        if memory.part_of is not None and memory.part_of not in whole:
            raise ScheduleError(
                f"memory {memory.name!r} is a part of {memory.part_of!r}: give one of {', '.join(whole) or 'none'}, which are "
                "no parts themselves"
            )


def _validate_sharing(schedule: Schedule, lanes: list[str]) -> None:
    flows = _unique("flow of lane", [flow.lane for flow in schedule.flows])
    for flow in schedule.flows:
        if flow.lane not in lanes:
            raise ScheduleError(f"a flow belongs to lane {flow.lane!r}, which is not one of {', '.join(lanes)}")
        if not all(math.isfinite(value) and value > 0 for value in (flow.demand, flow.weight)):
            raise ScheduleError(f"the flow of lane {flow.lane!r} needs a positive finite demand and weight")
    _unique("shared resource", [resource.name for resource in schedule.resources])
    for resource in schedule.resources:
        if not (math.isfinite(resource.capacity) and resource.capacity > 0):
            raise ScheduleError(f"shared resource {resource.name!r} has capacity {resource.capacity}: give a positive one")
        if not resource.lanes:
            raise ScheduleError(f"shared resource {resource.name!r} serves no lane: name some or leave it out")
        for lane in resource.lanes:
            if lane not in flows:
                raise ScheduleError(f"shared resource {resource.name!r} serves lane {lane!r}, which has no flow")


class _Predecessors:
    """The predecessors of each task, by index in the schedule: edges, and the order of fifo lanes.

    Attributes:
        same, previous: for each task, the tasks of its iteration and those of the previous one.
    """

    def __init__(self, schedule: Schedule, lanes: list[str], places: dict[TaskId, int]) -> None:
        self.same: list[list[int]] = [[] for _ in schedule.tasks]
        self.previous: list[list[int]] = [[] for _ in schedule.tasks]
        of_lane: dict[str, list[int]] = {lane: [] for lane in lanes}
        for place, task in enumerate(schedule.tasks):
            if task.lane not in of_lane:
                raise ScheduleError(f"task {task.id} has no lane: {task.lane!r} is not one of {', '.join(lanes) or 'none'}")
            of_lane[task.lane].append(place)
            for edge in task.after:
                before = places.get(edge.task)
                if before is None:
                    raise ScheduleError(f"unknown edge: {task.id} waits for {edge}, but no task is called {edge.task}")
                if edge.back not in (0, 1):
                    raise ScheduleError(f"{task.id} waits for {edge.task} {edge.back} iterations back: give 0 or 1")
                (self.previous if edge.back else self.same)[place].append(before)
            if len(set(task.after)) < len(task.after):
                twice, _ = Counter(task.after).most_common(1)[0]
                raise ScheduleError(f"{task.id} waits for {twice} twice: give the edge once")
        for lane in schedule.lanes:
            tasks = of_lane[lane.name]
            if tasks and lane.discipline is Discipline.FIFO:
                self.previous[tasks[0]].append(tasks[-1])
                for before, after in pairwise(tasks):
                    self.same[after].append(before)


def _order(schedule: Schedule, waits: _Predecessors) -> Sequence[int]:
    """Return an order that satisfies all waits within an iteration. Refuses cycles."""
    if all(before < place for place, some in enumerate(waits.same) for before in some):
        return range(len(schedule.tasks))
    sorter = graphlib.TopologicalSorter(dict(enumerate(waits.same)))
    try:
        return list(sorter.static_order())
    except graphlib.CycleError as error:
        cycle = " -> ".join(str(schedule.tasks[place].id) for place in error.args[1])
        raise ScheduleError(f"cycle: {cycle}; each waits for the one before (edges, or the order of a fifo lane)") from error


def _validate_buffers(schedule: Schedule, memories: list[str], ancestors: _Ancestors, places: dict[TaskId, int]) -> None:
    allocated: dict[BufferId, Task] = {}
    freed: dict[BufferId, Task] = {}
    for resident, times in Counter(buffer.id for buffer in schedule.resident).items():
        if times > 1:
            raise ScheduleError(f"resident buffer '{resident}' exists {times} times: give its bytes once")
    buffers = list(schedule.resident)
    for task in schedule.tasks:
        for buffer in task.allocates:
            if buffer.id in allocated:
                raise ScheduleError(f"buffer '{buffer.id}' is allocated twice: by {allocated[buffer.id].id} and by {task.id}")
            allocated[buffer.id] = task
            buffers.append(buffer)
    for buffer in buffers:
        if buffer.memory not in memories:
            raise ScheduleError(
                f"buffer '{buffer.id}' is in memory {buffer.memory!r}: not one of {', '.join(memories) or 'none'}"
            )
        if buffer.size_bytes < 0:
            raise ScheduleError(f"buffer '{buffer.id}' has {buffer.size_bytes} bytes: a size cannot be negative")
    for task in schedule.tasks:
        for free in task.frees:
            if free.id not in allocated:
                raise ScheduleError(f"{task.id} frees '{free.id}', which no task allocates")
            if free.id in freed:
                raise ScheduleError(f"memory freed twice: '{free.id}' by {freed[free.id].id} and by {task.id}")
            if free.back not in (0, 1):
                raise ScheduleError(f"{task.id} frees '{free.id}' of {free.back} iterations back: give 0 or 1")
            freed[free.id] = task
            owner = allocated[free.id]
            if not ancestors.includes(places[task.id], places[owner.id], free.back):
                raise ScheduleError(f"{task.id} frees '{free.id}' but does not wait for {owner.id}, which allocates it")
    for buffer_id, task in allocated.items():
        if buffer_id not in freed:
            raise ScheduleError(
                f"buffer '{buffer_id}', allocated by {task.id}, is never freed: memory would grow with each iteration"
            )


class _Ancestors:
    """Tasks that have begun, in any execution, before a task ends, in its iteration and in the previous one.

    Sets are the bits of integers: 1,000 tasks take a millisecond or two, a set per task a hundred times that.
    """

    def __init__(self, waits: _Predecessors, order: Sequence[int]) -> None:
        same, previous = [0] * len(order), [0] * len(order)
        for task in order:
            bits = 1 << task
            for before in waits.same[task]:
                bits |= same[before]
            same[task] = bits
        for task in order:
            bits = 0
            for before in waits.same[task]:
                bits |= previous[before]
            for before in waits.previous[task]:
                bits |= same[before]
            previous[task] = bits
        self._sets = (same, previous)

    def includes(self, task: int, before: int, back: int) -> bool:
        """Whether ``before``, ``back`` iterations earlier, is ``task`` itself or among its transitive predecessors."""
        return bool(self._sets[back][task] >> before & 1)
