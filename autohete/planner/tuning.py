"""Prefetch tuning: after the program, prefetches move earlier where GPU memory is guaranteed to be free.

The guarantee follows from the order of the waits within an iteration. Tuning adds a prefetch's bytes to every step in which it
would newly be alive. It stops when a step would exceed the capacity, or when the overlapped passes already hide the copy. The
worst case over all steps, whatever the timing, is :func:`autohete.analysis.worst_case.worst_case`.
The steps of an iteration form a ring: a prefetch for an early forward may begin in the previous iteration's backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from autohete.lowering import lower
from autohete.plan import Plan, UnitPlan
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, Edge, Kind, Schedule, Task, TaskId

_PREFETCHES = (Kind.PREFETCH_FORWARD, Kind.PREFETCH_BACKWARD)
PASSES = (Kind.FORWARD, Kind.LOSS, Kind.RECOMPUTE, Kind.BACKWARD)


@lru_cache(maxsize=256)  # a search for the other order tunes the same plans
def tune_prefetches(profile: Profile, plan: Plan) -> tuple[UnitPlan, ...]:
    """The plan's units with prefetch distances as large as memory allows and time requires."""
    if not plan.offloaded_parameter_units:
        return plan.units
    # Distances are those of the first micro-batch, in which prefetches reach back into the last one.
    return _Tuning(profile.with_micro_batches(min(profile.workload.micro_batches, 3)), plan).units()


class _Tuning:
    def __init__(self, profile: Profile, plan: Plan) -> None:
        self.profile, self.plan = profile, plan
        schedule = lower(profile, plan)
        self.capacity = next(m.capacity_bytes for m in schedule.memories if m.name == GPU_MEMORY)
        self.steps = [task.id for task in schedule.tasks if task.id.kind in PASSES]
        self.place = {task: i for i, task in enumerate(self.steps)}
        self.seconds = {task.id: task.duration_ns * 1e-9 for task in schedule.tasks}
        self.used = bytes_at_steps(schedule, self.steps)

    def units(self) -> tuple[UnitPlan, ...]:
        """Tune backward from the last unit down, in the order of the copies; then forward from the first unit up."""
        units = list(self.plan.units)
        offloaded = [i for i, unit in enumerate(units) if unit.parameters.home != GPU_MEMORY]
        for i in reversed(offloaded):
            user, route = TaskId(Kind.RECOMPUTE, i), units[i].parameters
            if TaskId(Kind.BACKWARD, i) not in self.place:  # frozen, and so is all below
                continue
            start = self.place[user if user in self.place else TaskId(Kind.BACKWARD, i)]
            floor = self.place[TaskId(Kind.FORWARD, i)] + 1
            ahead = self.widened(i, start, route.ahead_of_backward, floor)
            units[i] = replace(units[i], parameters=replace(route, ahead_in_backward=ahead))
        for i in offloaded:
            start, route = self.place[TaskId(Kind.FORWARD, i)], units[i].parameters
            floor = self.place.get(TaskId(Kind.BACKWARD, i), start) + 1 - len(self.steps)
            ahead = self.widened(i, start, route.ahead, floor)
            units[i] = replace(units[i], parameters=replace(route, ahead=ahead, ahead_in_backward=route.ahead_of_backward))
        return tuple(units)

    def widened(self, unit: int, start: int, distance: int, floor: int) -> int:
        """The distance of a prefetch that is used at step ``start`` and may run in steps from ``floor`` on."""
        size = self.profile.parameter_bytes(unit)
        # Twice the copy time: the previous copy may still occupy the link.
        wanted = 2 * max(self.seconds.get(TaskId(kind, unit), 0.0) for kind in _PREFETCHES)
        hidden = sum(self.seconds[self.steps[i]] for i in range(start - distance, start))
        while hidden < wanted:
            earlier = start - distance - 1
            if earlier < floor or self.used[earlier] + size > self.capacity:
                break
            self.used[earlier] += size
            hidden += self.seconds[self.steps[earlier]]
            distance += 1
        return distance


def bytes_at_steps(schedule: Schedule, steps: list[TaskId]) -> list[int]:
    """Bytes of GPU memory at each step if everything is freed as late as the edges within the iteration allow.

    A buffer is alive from the first step during which its allocating task may run to the last step that may run before its
    freeing task has ended.
    """
    life = _Lifetimes(schedule, steps)
    count = len(steps)
    change = [0] * (count + 1)

    def alive(begin: int, stop: int, size: int) -> None:
        change[begin] += size
        change[max(stop, begin)] -= size

    alive(0, count, sum(buffer.size_bytes for buffer in schedule.resident if buffer.memory == GPU_MEMORY))
    freed_by = {free.id: (task.id, free.back) for task in schedule.tasks for free in task.frees}
    for task in schedule.tasks:
        begin = life.earliest(task)
        for buffer in task.allocates:
            if buffer.memory == GPU_MEMORY:
                end, back = freed_by[buffer.id]
                stop = life.stop(end) + back * count
                if begin < 0:  # it starts in the previous iteration
                    alive(begin + count, count, buffer.size_bytes)
                alive(max(begin, 0), min(stop, count), buffer.size_bytes)
                if stop > count:  # it extends into the next iteration
                    alive(0, stop - count, buffer.size_bytes)
    used, total = [], 0
    for step in range(count):
        total += change[step]
        used.append(total)
    return used


class _Lifetimes:
    """The steps between which a task can run, according to its edges alone."""

    def __init__(self, schedule: Schedule, steps: list[TaskId]) -> None:
        self.count = len(steps)
        self.place = {task: i for i, task in enumerate(steps)}
        self.tasks = {task.id: task for task in schedule.tasks}
        self.first: dict[TaskId, int] = {}
        self.gone: dict[TaskId, int] = {}
        for step in steps:
            stack = [edge.task for edge in self.tasks[step].after if not edge.back]
            while stack:
                before = stack.pop()
                if before not in self.place and before not in self.gone:
                    self.gone[before] = self.place[step]
                    stack += [edge.task for edge in self.tasks[before].after if not edge.back]

    def earliest(self, task: Task) -> int:
        """The earliest step during which ``task`` can start. Negative: in the previous iteration."""
        if task.id in self.place:
            return self.place[task.id]
        if task.id not in self.first:
            self._resolve(task.id)
        return self.first[task.id]

    def _resolve(self, task: TaskId) -> None:
        """Find the earliest step of ``task`` and of all that it waits for; they may be as many as there are units."""
        opened: list[tuple[TaskId, Iterator[Edge]]] = []
        following: TaskId | None = task
        while following is not None or opened:
            if following is not None:
                # States that share slots wait for each other across iterations. A task being resolved gets the earliest start.
                self.first[following] = -self.count + 1
                opened.append((following, iter(self.tasks[following].after)))
            current, edges = opened[-1]
            following = next((e.task for e in edges if e.task not in self.place and e.task not in self.first), None)
            if following is None:
                opened.pop()
                begins = [self._after(edge) for edge in self.tasks[current].after]
                self.first[current] = max([self.first[current], *begins])

    def _after(self, edge: Edge) -> int:
        """The earliest step of what waits for ``edge``, as far as that goes."""
        begin = self.place[edge.task] + 1 if edge.task in self.place else self.first[edge.task]
        return begin - edge.back * self.count

    def stop(self, task: TaskId) -> int:
        """The first step that cannot begin before ``task`` has ended."""
        return self.place[task] + 1 if task in self.place else self.gone.get(task, self.count)
