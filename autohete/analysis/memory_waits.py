"""Waits that make a schedule fit its memories under any timing.

Take any order in which all tasks of a schedule can run, and let every allocation wait for whatever is freed before it in that
order. Consider the buffers held at any moment of any execution. One of them is allocated last *in that order*. Its task has
started, so everything that the order frees before it is free. What is held is therefore a subset of what the order itself
held at that point, and no execution holds more than the order does.

With the order of a steady-state trace such waits cost nothing: every predecessor has ended when the trace needs it, so every
task still starts at the same time. A schedule whose trace fits can therefore be made safe without losing time. There are two
exceptions. Where the only task to wait for starts and ends in the very moment in which a lane chooses by priority, the lane
takes another that is ready; only tasks without duration do this. And no wait can make a task follow one of the next
iteration, which matters where an iteration frees memory before the previous one has allocated all of its own.

Waits are added only for allocations that would exceed the capacity without them. If the order of the trace does not suffice, or
the trace does not fit or repeat, that of :func:`thrifty_order` is used, which needs little memory and may cost time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autohete.analysis.occupancy import Lives, event_order, lives
from autohete.analysis.worst_case import worst_case
from autohete.execution.trace import Nanoseconds, Trace
from autohete.schedule import GPU_MEMORY, BufferId, Edge, Schedule, Task
from autohete.schedule.order import order, topological

#: Iterations over which waits are followed backwards. Plans free nothing later than that.
_DEPTH = 3
#: Iterations of a thrifty order, and those of them that repeat forever.
_ITERATIONS, _REPEATING = 6, range(2, 4)


@dataclass(frozen=True, slots=True, eq=False)
class Guide:
    """An order of all tasks from which waits are taken.

    Args:
        start, end: start and end of each task, shape (iterations, tasks), integers of any unit.
        rows: the iterations that repeat forever; at least one precedes them.
    """

    start: Nanoseconds
    end: Nanoseconds
    rows: range


def with_memory_waits(schedule: Schedule, trace: Trace) -> Schedule | None:
    """Return ``schedule`` with enough waits that its worst case fits every memory. None if no such waits are found.

    Args:
        schedule: valid; returned unchanged if it already fits.
        trace: an execution of it, long enough to reach its steady state.
    """
    if _fits(schedule):
        return schedule
    for guide in (_of_trace(trace), thrifty_order(schedule)):
        safe = _MemoryWaits(schedule, guide).add()
        if _fits(safe):
            return safe
    return None


def least_bytes(schedule: Schedule, memory: str) -> int:
    """Bytes of ``memory`` with which waits make ``schedule`` fit under any timing: what its thrifty order holds.

    For the GPU's memory no order is known that holds less; for other memories one may exist.
    """
    return schedule.once(_least_bytes, memory)


def _least_bytes(schedule: Schedule, memory: str) -> int:
    guide, buffers = thrifty_order(schedule), lives(schedule, memory)
    change = np.zeros(guide.start.size * 2, np.int64)  # change after each start and end, which a thrifty order numbers
    # Same length as the indices: some NumPy versions read past the end of values that have to be repeated.
    sizes = np.tile(np.array(buffers.sizes, np.int64), len(guide.start))
    np.add.at(change, guide.start[:, buffers.allocates].ravel(), sizes)
    np.add.at(change, guide.end[:, buffers.frees].ravel(), -sizes)
    before = sum(size for _, size in buffers.resident) + sum(np.multiply(buffers.sizes, buffers.backs).tolist())
    repeating = guide.start[_REPEATING.start : _REPEATING.stop]
    return int(before + np.cumsum(change)[repeating].max(initial=0))


def _fits(schedule: Schedule) -> bool:
    return all(worst_case(schedule, memory.name).fits for memory in schedule.memories)


def _of_trace(trace: Trace) -> Guide:
    """The order of the steady-state cycle of ``trace``."""
    steady = trace.steady()
    last = min(steady.first + steady.cycle, trace.iterations - 1)
    return Guide(trace.start_ns, trace.end_ns, range(min(steady.first + 1, last), last + 1))


def thrifty_order(schedule: Schedule) -> Guide:
    """An order that needs little GPU memory: tasks that allocate it run when needed, all others as soon as possible.

    The tasks of the first lane are needed one after another, together with everything they wait for.
    """
    return schedule.once(_thrifty_order)


def _thrifty_order(schedule: Schedule) -> Guide:
    tasks = len(schedule.tasks)
    before: list[list[tuple[int, int]]] = [[] for _ in range(tasks)]
    after: list[list[tuple[int, int]]] = [[] for _ in range(tasks)]
    edges = order(schedule)
    for u, v, back in edges:
        before[v].append((u, back))
        after[u].append((v, back))
    sizes = {buffer.id: buffer.size_bytes for task in schedule.tasks for buffer in task.allocates}
    takes = [task.lane == schedule.lanes[0].name or _takes(task, sizes) for task in schedule.tasks]
    lazy = [takes[i] or _only_takes(task) for i, task in enumerate(schedule.tasks)]
    gives = [not takes[i] and any(free.id.memory == GPU_MEMORY for free in task.frees) for i, task in enumerate(schedule.tasks)]
    waits = [[sum(back <= i for _, back in edges) for edges in before] for i in range(_ITERATIONS)]
    steps = [task for task in topological(tasks, edges) if schedule.tasks[task].lane == schedule.lanes[0].name]
    place: dict[tuple[int, int], int] = {}
    ready: deque[tuple[int, int]] = deque()
    now = 0

    def run(i: int, task: int) -> None:
        place[i, task] = len(place)
        for v, back in after[task]:
            if i + back < _ITERATIONS:
                waits[i + back][v] -= 1
                if not waits[i + back][v] and not lazy[v] and i + back <= now:
                    ready.append((i + back, v))

    def run_ready() -> None:
        while ready:
            instance = ready.popleft()
            if instance not in place:
                run(*instance)

    def need(i: int, task: int) -> None:
        stack = [(i, task)]
        while stack:
            at, needed = stack[-1]
            missing = [(at - back, u) for u, back in before[needed] if at >= back and (at - back, u) not in place]
            stack += missing
            if not missing:
                stack.pop()
                if (at, needed) not in place:
                    run(at, needed)
                    run_ready()

    def needs_memory(i: int, task: int) -> bool:
        """Whether a task that has not run and that ``task`` waits for takes GPU memory."""
        seen, stack = {(i, task)}, [(i, task)]
        while stack:
            at, needed = stack.pop()
            missing = {(at - back, u) for u, back in before[needed] if at >= back and (at - back, u) not in place} - seen
            if any(takes[u] for _, u in missing):
                return True
            seen |= missing
            stack += missing
        return False

    for now in range(_ITERATIONS):
        ready.extend((now, task) for task in range(tasks) if not waits[now][task] and not lazy[task])
        run_ready()
        for task in steps:
            need(now, task)
            for v, back in after[task]:  # what frees memory runs, even if it waits for what takes memory of the host
                if gives[v] and not back and (now, v) not in place and not needs_memory(now, v):
                    need(now, v)
        for task in range(tasks):
            need(now, task)  # the rest: no wait can express that it follows a task of the next iteration
    start = np.array([[2 * place[i, task] for task in range(tasks)] for i in range(_ITERATIONS)], np.int64)
    return Guide(start, start + 1, _REPEATING)


def _only_takes(task: Task) -> bool:
    """Whether ``task`` allocates memory of any kind without freeing GPU memory."""
    frees = any(free.id.memory == GPU_MEMORY for free in task.frees)
    return not frees and any(buffer.size_bytes for buffer in task.allocates)


def _takes(task: Task, sizes: Mapping[BufferId, int]) -> bool:
    """Whether ``task`` leaves less GPU memory than it finds. A reduction leaves more: a part of the gradients remains."""
    taken = sum(buffer.size_bytes for buffer in task.allocates if buffer.memory == GPU_MEMORY)
    return taken > sum(sizes[free.id] for free in task.frees if free.id.memory == GPU_MEMORY)


class _MemoryWaits:
    """A schedule that collects waits following the order of a guide."""

    def __init__(self, schedule: Schedule, guide: Guide) -> None:
        self.schedule, self.guide = schedule, guide
        edges = order(schedule)
        self.before: list[list[tuple[int, int]]] = [[] for _ in schedule.tasks]
        self.after: list[list[tuple[int, int]]] = [[] for _ in schedule.tasks]
        for u, v, back in edges:
            self.before[v].append((u, back))
            self.after[u].append((v, back))
        self.start, self.end = event_order(schedule, guide.start, guide.end)
        self.added: list[tuple[int, int, int]] = []
        self.ended = self._ended(topological(len(schedule.tasks), edges))

    def add(self) -> Schedule:
        """Return the schedule with the waits that every memory needs, as far as the guide has them."""
        for memory in self.schedule.memories:
            self._add(lives(self.schedule, memory.name), memory.capacity_bytes)
        return self._made()

    def _add(self, buffers: Lives, capacity: int) -> None:
        rows, starts = list(self.guide.rows), self.start[:, buffers.allocates]
        frees, backs, sizes = (np.array(column, np.int64) for column in (buffers.frees, buffers.backs, buffers.sizes))
        room = capacity - sum(size for _, size in buffers.resident)
        allocating = sorted(dict.fromkeys(buffers.allocates), key=lambda a: int(self.start[rows[0], a]))
        for a in allocating:
            begun = (starts <= self.start[rows, a][:, None, None]).sum(axis=1) + backs
            while (self._alive(begun, self._late(a)[frees]) @ sizes).max(initial=0) > room:
                wait = self._best(buffers, a)
                if wait is None:
                    break
                f, back = wait
                self.added.append((f, a, back))
                self.before[a].append(wait)
                self.after[f].append((a, back))
                self._learn([(a, level, self.ended[level - back][f] | 1 << f) for level in range(back, _DEPTH)])

    def _learn(self, news: list[tuple[int, int, int]]) -> None:
        """Enter what has ended at the start of tasks, given as (task, level, bits), and at those of all tasks that wait for
        them.
        """
        while news:
            task, level, bits = news.pop()
            gained = bits & ~self.ended[level][task]
            if gained:
                self.ended[level][task] |= gained
                news += ((v, level + back, gained) for v, back in self.after[task] if level + back < _DEPTH)

    def _alive(self, begun: NDArray[np.int64], late: NDArray[np.int64]) -> NDArray[np.int64]:
        """Upper bound of the buffers alive while a task is the last in the guide's order to have allocated.

        Args:
            begun: how often the life of each buffer has begun by then, shape (rows of the guide, buffers).
            late: for the task that frees each, see :meth:`_late`.
        """
        freed = np.maximum(np.array(self.guide.rows)[:, None] + 1 - late, 0) * (late < _DEPTH)
        alive: NDArray[np.int64] = np.maximum(begun - freed, 0)
        return alive

    def _late(self, a: int) -> NDArray[np.int64]:
        """For each task, the age in iterations of its last instance that has ended, under any timing, when ``a`` starts."""
        tasks = len(self.schedule.tasks)
        known = np.zeros(tasks, np.int64)
        for level in self.ended:
            bits = np.frombuffer(level[a].to_bytes(tasks // 8 + 1, "little"), np.uint8)
            known += np.unpackbits(bits, bitorder="little")[:tasks]
        return _DEPTH - known

    def _best(self, buffers: Lives, a: int) -> tuple[int, int] | None:
        """Among the frees that ``a`` could wait for and does not, the one with the most slack."""
        guide, rows = self.guide, np.array(self.guide.rows)
        frees = np.array(list(dict.fromkeys(buffers.frees)), int)
        late, slack, backs = self._late(a)[frees], np.full(len(frees), -1, np.int64), np.zeros(len(frees), int)
        for back in (1, 0):  # the wait for the later instance, if there is one, replaces the other
            ended = (self.end[rows - back][:, frees] < self.start[rows, a][:, None]).all(axis=0) & (late > back)
            least = (guide.start[rows, a][:, None] - guide.end[rows - back][:, frees]).min(axis=0)
            slack[ended], backs[ended] = least[ended], back
        if not len(frees) or slack.max() < 0:
            return None
        best = int(slack.argmax())
        return int(frees[best]), int(backs[best])

    def _ended(self, in_order: list[int]) -> list[list[int]]:
        """Per level and task, a bit for each task whose instance ``level`` iterations earlier has ended at its start.

        Args:
            in_order: the tasks, each after those that it waits for.
        """
        levels: list[list[int]] = []
        for level in range(_DEPTH):
            sets = list(levels[-1]) if levels else [0] * len(self.before)
            levels.append(sets)
            for task in in_order:
                for u, back in self.before[task]:
                    if back <= level:
                        sets[task] |= levels[level - back][u] | 1 << u
        return levels

    def _made(self) -> Schedule:
        """Return the schedule with those of the added waits that no other wait implies."""
        waits: dict[int, list[Edge]] = {}
        for f, a, back in self.added:
            others = [(u, b) for u, b in self.before[a] if (u, b) != (f, back)]
            if not any(b <= back and self.ended[back - b][u] >> f & 1 for u, b in others):
                waits.setdefault(a, []).append(Edge(self.schedule.tasks[f].id, back))
        tasks = [task._replace(after=(*task.after, *waits.get(i, ()))) for i, task in enumerate(self.schedule.tasks)]
        return replace(self.schedule, tasks=tuple(tasks)) if waits else self.schedule
