"""Collects the tasks of an iteration and what they read and write, and derives from that what waits for what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autohete.errors import InputError
from autohete.order import topological
from autohete.schedule import GPU, GPU_MEMORY, KIND_MEANING, Buffer, BufferId, Edge, Free, Kind, Task, TaskId, Value

#: A year and a half. Some thousands of such tasks in a row still fit 64-bit nanoseconds.
_LONGEST_TASK_SECONDS = 5e7

#: Where a value is: what, of which unit, in which memory.
Place = tuple[Value, int, str]


@dataclass(frozen=True, slots=True)
class _Access:
    """What a task does at a place: it only reads, it changes what is there, or it begins anew in memory of its own."""

    task: TaskId
    writes: bool = False
    begins: bool = False


class _Draft:
    """A task that still collects its edges."""

    def __init__(self, task: TaskId, lane: str, seconds: float, priority: int) -> None:
        self.id, self.lane, self.priority = task, lane, priority
        if not seconds < _LONGEST_TASK_SECONDS:
            raise InputError(
                f"{task} ({KIND_MEANING[task.kind]}) would last {seconds:.3g} s: the workload is too large for this hardware, "
                f"or a rate too low; a task may last {_LONGEST_TASK_SECONDS:.0e} s"
            )
        self.duration_ns = round(seconds * 1e9)
        self.after: dict[Edge, None] = {}
        self.allocates: list[Buffer] = []
        self.frees: list[Free] = []


class Builder:
    """The tasks of an iteration in the order in which a program would issue them.

    Args:
        passes: what the GPU computes, in order; they follow one another.

    Attributes:
        place: of each pass among them.
    """

    def __init__(self, passes: Sequence[TaskId]) -> None:
        self.passes = passes
        self.place = {task: place for place, task in enumerate(passes)}
        self._drafts: dict[TaskId, _Draft] = {}
        self._accesses: dict[Place, list[_Access]] = {}
        self._freed: list[tuple[TaskId, Place]] = []
        #: Fetches that are as synchronous as the pass that they are for.
        self._synchronous: dict[TaskId, list[TaskId]] = {}

    # --- tasks

    def task(self, kind: Kind, unit: int, lane: str, seconds: float, priority: int = 0) -> TaskId:
        """Add a task; a pass waits for the pass before it."""
        task = TaskId(kind, unit)
        self._drafts[task] = _Draft(task, lane, seconds, priority)
        place = self.place.get(task, 0)
        if place:
            self.after(task, self.passes[place - 1])
        return task

    def find(self, kind: Kind, unit: int) -> TaskId | None:
        """The task, if there is one."""
        task = TaskId(kind, unit)
        return task if task in self._drafts else None

    def first_backward(self, unit: int) -> TaskId:
        """The pass that needs the unit's parameters first in backward."""
        recompute = TaskId(Kind.RECOMPUTE, unit)
        return recompute if recompute in self.place else TaskId(Kind.BACKWARD, unit)

    # --- values

    def read(self, task: TaskId, value: Value, unit: int, memory: str = GPU_MEMORY) -> None:
        """``task`` needs what is there, as those before it in the order of declarations have left it, in this or the last
        iteration.
        """
        self._accesses.setdefault((value, unit, memory), []).append(_Access(task))

    def write(self, task: TaskId, value: Value, unit: int, memory: str = GPU_MEMORY) -> None:
        """``task`` changes what is there, when nobody needs what was there any more."""
        self._accesses.setdefault((value, unit, memory), []).append(_Access(task, writes=True))

    def make(
        self, task: TaskId, value: Value, unit: int, size_bytes: int, memory: str = GPU_MEMORY, use: Kind | None = None
    ) -> None:
        """``task`` makes it anew, in memory that it allocates."""
        self._accesses.setdefault((value, unit, memory), []).append(_Access(task, writes=True, begins=True))
        self.allocate(task, value, unit, size_bytes, memory, use)

    def allocate(
        self, task: TaskId, value: Value, unit: int | None, size_bytes: int, memory: str = GPU_MEMORY, use: Kind | None = None
    ) -> None:
        """Bytes from the start of ``task`` on."""
        self._drafts[task].allocates.append(Buffer(BufferId(value, memory, unit, use), size_bytes))

    def free(
        self, task: TaskId, value: Value, unit: int | None, memory: str = GPU_MEMORY, use: Kind | None = None, back: int = 0
    ) -> None:
        """Free when ``task`` ends, of this iteration or of the one before."""
        self._drafts[task].frees.append(Free(BufferId(value, memory, unit, use), back))
        if unit is not None:
            self._freed.append((task, (value, unit, memory)))

    def workspace(self, task: TaskId, size_bytes: int) -> None:
        """Bytes while ``task`` runs."""
        if size_bytes:
            self.allocate(task, Value.WORKSPACE, task.unit, size_bytes, use=task.kind)
            self.free(task, Value.WORKSPACE, task.unit, use=task.kind)

    # --- order

    def after(self, task: TaskId, before: TaskId | None, back: int = 0) -> None:
        """``task`` waits for ``before`` of this iteration or of the one before; for nothing if there is no such task."""
        if before is not None:
            self._drafts[task].after[Edge(before, back)] = None

    def beside(self, fetch: TaskId, user: TaskId, distance: int) -> None:
        """Let ``fetch`` start when all passes but the ``distance`` last before the pass ``user`` have ended."""
        place = self.place[user] - 1 - min(distance, len(self.passes) - 1)
        if user.kind is not Kind.FORWARD:  # what forward still reads is not fetched a second time
            place = max(place, self.place[TaskId(Kind.FORWARD, user.unit)])
        self.after(fetch, self.passes[place % len(self.passes)], back=int(place < 0))
        if distance == 0:
            self._synchronous.setdefault(user, []).append(fetch)

    def hold_up(self, done: TaskId, blocker: TaskId) -> None:
        """The pass after ``done``, and what it fetches synchronously, waits for ``blocker``."""
        place = self.place[done] + 1
        if place < len(self.passes):
            for task in (self.passes[place], *self._synchronous.get(self.passes[place], ())):
                self.after(task, blocker)

    def waits(self, task: TaskId) -> list[Edge]:
        """What ``task`` waits for by what has been said so far, without what its data need."""
        return list(self._drafts[task].after)

    def lane(self, task: TaskId) -> str:
        """Where it runs."""
        return self._drafts[task].lane

    def order_by_data(self) -> None:
        """Let every task wait for what it reads, and before it overwrites or frees for whoever still reads."""
        for accesses in self._accesses.values():
            for task, before, back in self._data_edges(accesses):
                self.after(task, before, back)
        for task, place in self._freed:
            for before, back in self._last_readers(task, self._accesses.get(place, [])):
                self.after(task, before, back)

    def tasks(self) -> tuple[Task, ...]:
        """All tasks, as they were added; each with the waits that no other of its waits implies.

        Raises:
            ScheduleError: tasks wait for each other.
        """
        return tuple(
            Task(d.id, d.lane, d.duration_ns, after, d.priority, tuple(d.allocates), tuple(d.frees))
            for d, after in zip(self._drafts.values(), self._needed_waits(), strict=True)
        )

    def _needed_waits(self) -> list[tuple[Edge, ...]]:
        """Of each task, without those that follow from others; sets are bits of integers."""
        place = {task: i for i, task in enumerate(self._drafts)}
        waits = [[(edge, place[edge.task]) for edge in draft.after] for draft in self._drafts.values()]
        edges = [(other, i, edge.back) for i, some in enumerate(waits) for edge, other in some]
        #: What has ended when a task begins, of this iteration and of the one before; and what other waits of it say of these.
        ended, implied = ([[0, 0] for _ in waits] for _ in range(2))
        order = topological(len(waits), edges)
        for back in (0, 1):
            for i in order:
                through, to = 0, 0
                for edge, other in waits[i]:
                    if edge.back == back:
                        through |= ended[other][0]
                        to |= 1 << other
                    elif back:
                        through |= ended[other][1]
                implied[i][back], ended[i][back] = through, through | to
        return [tuple(edge for edge, other in some if not implied[i][edge.back] >> other & 1) for i, some in enumerate(waits)]

    def _last_readers(self, task: TaskId, accesses: list[_Access]) -> Iterator[tuple[TaskId, int]]:
        """Who reads last what ``task`` frees, on other lanes than the GPU's, whose passes follow one another."""
        count = len(accesses)
        place = max((i for i, access in enumerate(accesses) if access.task == task), default=count)
        for distance in range(1, count + 1):
            before = accesses[(place - distance) % count]
            if before.begins or before.task == task:
                break
            if not before.writes and self._drafts[before.task].lane != GPU:
                yield before.task, int(distance > place)

    def _data_edges(self, accesses: list[_Access]) -> Iterator[tuple[TaskId, TaskId, int]]:
        """(task, what it waits for, iterations back) by what is done at one place, iteration after iteration."""
        count = len(accesses)
        for place, access in enumerate(accesses):
            if access.begins:
                continue
            read = read_on_gpu = False
            for distance in range(1, count):
                before = accesses[(place - distance) % count]
                edge = (access.task, before.task, int(distance > place))
                if before.writes:
                    if before.task != access.task and not (access.writes and read):
                        yield edge
                    break
                if access.writes and before.task != access.task:
                    on_gpu = self._drafts[before.task].lane == GPU
                    if not (on_gpu and read_on_gpu):  # passes follow one another: the last of them is enough
                        yield edge
                    read, read_on_gpu = True, read_on_gpu or on_gpu
