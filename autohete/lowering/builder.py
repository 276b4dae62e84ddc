"""Collects the tasks of an iteration with what they read and write, and derives the dependencies from that."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from autohete.lowering import durations
from autohete.lowering.durations import Duration
from autohete.lowering.waits import Waits
from autohete.plan.rules import Life
from autohete.schedule import (
    COPIES,
    GPU,
    GPU_MEMORY,
    HOST_MEMORY,
    PINNED_MEMORY,
    Buffer,
    BufferId,
    Edge,
    Free,
    Kind,
    Task,
    TaskId,
    Value,
)

#: Where a value is: the value, its unit, the memory, the micro-batch and the part.
Place = tuple[Value, int | None, str, int, int]

#: An access of a task (its index among the drafts) to a place: whether it writes, and whether it starts afresh in newly
#: allocated memory. A plain tuple, because accesses are by far the most numerous objects.
Access = tuple[int, bool, bool]

#: Values that exist once per micro-batch.
_OF_MICRO_BATCHES = frozenset(
    {
        Value.ACTIVATIONS,
        Value.INPUT,
        Value.INPUT_GRADIENT,
        Value.LOGITS,
        Value.LOGITS_GRADIENT,
        Value.ARRIVED_GRADIENTS,
        Value.WORKSPACE,
    }
)


#: Values of which parts have places of their own.
_IN_PARTS = (Value.OPTIMIZER_STATES, Value.ACTIVATIONS)
#: When updates wait for the whole backward, the last gradients are issued before the copies for an update. Refreshes come last:
#: on a fifo lane, one that waits for its update must not block what is needed earlier.
_PHASES = {
    Kind.GPU_UPDATE: 1,
    Kind.CPU_UPDATE: 1,
    Kind.FETCH_STATES: 1,
    Kind.WRITE_BACK_STATES: 1,
    Kind.READ_STATES: 1,
    Kind.WRITE_STATES: 1,
    Kind.WRITE_BACK_BACKWARD: 1,
    Kind.WRITE_PARAMETERS: 1,
    Kind.REFRESH: 2,
    Kind.GATHER_UPDATED: 2,
}


#: Number of ids cached between lowerings. A search uses the same ids over and over.
_IDS = 2**15
task_id = lru_cache(_IDS)(TaskId)


@lru_cache(_IDS)
def on_gpu(value: Value, unit: int | None, micro_batch: int = 0, use: Kind | None = None, again: int = 0) -> BufferId:
    """Id of a buffer in the GPU's memory."""
    return BufferId(value, GPU_MEMORY, unit, use, micro_batch, again)


def _place(value: Value, unit: int | None, memory: str, micro_batch: int, part: int) -> Place:
    if memory == PINNED_MEMORY:  # readers of a value on the host need not know whether it is pinned
        memory = HOST_MEMORY
    micro_batch = micro_batch if micro_batch and value in _OF_MICRO_BATCHES else 0
    return value, unit, memory, micro_batch, part if part and value in _IN_PARTS else 0


@lru_cache(_IDS)
def _place_of(buffer: BufferId) -> Place:
    """The place of a buffer. For a value that micro-batches share, their buffers only distinguish successive memory."""
    return _place(buffer.value, buffer.unit, buffer.memory, buffer.micro_batch, buffer.again)


@dataclass(slots=True)
class Draft:
    """A task under construction. :class:`~autohete.lowering.waits.Turn` describes when it is issued."""

    id: TaskId
    lane: str
    duration: Duration
    priority: int
    place: int
    follows: int
    allocates: tuple[Buffer, ...] = ()
    frees: tuple[Free, ...] = ()

    @property
    def phase(self) -> int:
        """Phase of its kind."""
        return _PHASES.get(self.id.kind, 0)


class Builder:
    """The tasks of an iteration in program order.

    Args:
        passes: the GPU's passes in order; each waits for the one before.
        gradients_back: age, in iterations, of the gradients that an update on the CPU uses.
        begins: of dealt stages, the index of the first pass of each of the rank's.

    Attributes:
        place: index of each pass among the passes.
        drafts: the tasks so far.
        waits: the dependencies, by index among the drafts.
        by_priority: copies, collectives and CPU updates run the most urgent ready task first.
        waits_elsewhere: waits for tasks of other ranks: the task, what it waits for, its rank, and the iterations in between.
        frees_elsewhere: buffers of other ranks that tasks free: the task, the buffer, and its rank.
    """

    def __init__(self, passes: Sequence[TaskId], gradients_back: int = 0, begins: Sequence[int] = ()) -> None:
        self.passes, self.gradients_back, self.by_priority = passes, gradients_back, False
        self._begins = begins
        self.waits_elsewhere: list[tuple[TaskId, TaskId, int, int]] = []
        self.frees_elsewhere: list[tuple[TaskId, BufferId, int]] = []
        self.place = {task: place for place, task in enumerate(passes)}
        self.waits = Waits()
        self.drafts: list[Draft] = []
        self._index: dict[TaskId, int] = {}
        self._accesses: defaultdict[Place, list[Access]] = defaultdict(list)
        #: For each buffer, the task that makes it; and the one that frees it, with the number of iterations in between.
        self._made: dict[BufferId, int] = {}
        self._freed: dict[BufferId, tuple[int, int]] = {}
        #: What prolongs tasks.
        self._prolonged: defaultdict[TaskId, list[Duration]] = defaultdict(list)
        #: Synchronous fetches of each pass.
        self._synchronous: dict[TaskId, list[TaskId]] = {}
        #: Waits for passes of the previous iteration that are not declared yet.
        self._undeclared: list[tuple[TaskId, TaskId, int]] = []
        #: Tasks that run one after another, with the author of that order.
        self._turns: list[tuple[int, Sequence[TaskId]]] = []
        self._passed = -1  # index of the last pass so far
        needed = dict.fromkeys(task.unit for task in passes if task.kind in (Kind.RECOMPUTE, Kind.BACKWARD))
        #: Priorities of copies for backward, by unit: before all copies for the next forward, in the order of use.
        self._backward_priority = {unit: place - len(needed) for place, unit in enumerate(needed)}

    # --- tasks

    def task(self, kind: Kind, unit: int, lane: str, duration: Duration, priority: int = 0, micro_batch: int = 0) -> TaskId:
        """Add a task."""
        return self.add(task_id(kind, unit, micro_batch), lane, duration, priority)

    def add(self, task: TaskId, lane: str, duration: Duration, priority: int = 0) -> TaskId:
        """Add a task. A pass waits for the pass before it, the first one for the last of the previous iteration."""
        self._index[task] = len(self.drafts)
        place = self.place.get(task, -1)
        if place >= 0:
            self._passed = place
        self.drafts.append(Draft(task, lane, duration, priority, place, self._passed))
        self.waits.add_task()
        if place >= 0:
            self.after(task, self.passes[place - 1], back=int(not place))
        return task

    def prolong(self, task: TaskId, duration: Duration) -> None:
        """Let ``task``, which may not be declared yet, take so much longer."""
        self._prolonged[task].append(duration)

    def of(self, kind: Kind) -> list[TaskId]:
        """Return the tasks of a kind, in issue order."""
        return [draft.id for draft in self.drafts if draft.id.kind is kind]

    def find(self, kind: Kind, unit: int, micro_batch: int = 0) -> TaskId | None:
        """Return the task, or None if it does not exist."""
        task = TaskId(kind, unit, micro_batch)
        return task if task in self._index else None

    def lane(self, task: TaskId) -> str:
        """Return the lane that runs the task."""
        return self.drafts[self._index[task]].lane

    def lives(self, kind: Kind) -> list[Life]:
        """Lives of what the copies or reductions of a kind move, in the order in which they take places at its near end."""
        copy = COPIES.get(kind)  # None: a reduction, which frees what it has reduced
        near = (GPU_MEMORY,) if copy is None or copy.near == GPU_MEMORY else (HOST_MEMORY, PINNED_MEMORY)
        found: list[tuple[int, Life]] = []
        for i, draft in enumerate(self.drafts):
            if draft.id.kind is not kind:
                continue
            takes_away = copy is None or not copy.arrives
            moved = [each.id for each in (draft.frees if takes_away else draft.allocates) if each.id.memory in near]
            if moved:  # if several move together: the last begin and the last end
                begin = max(self._last_writer(buffer, i) for buffer in moved) if takes_away else i
                back, end = max(self._freed[buffer] for buffer in moved)
                found.append((begin, Life(self.drafts[begin].id, self.drafts[end].id, back)))
        return [life for _, life in sorted(found, key=lambda item: item[0])]

    def _last_writer(self, buffer: BufferId, reader: int) -> int:
        """The task that completes what ``reader`` reads: for a gradient that several passes add to, the last of them."""
        writers = (task for task, writes, _ in self._accesses.get(_place_of(buffer), ()) if writes)
        return max((task for task in writers if task < reader), default=self._made[buffer])

    def first_backward(self, unit: int, micro_batch: int = 0) -> TaskId:
        """Return the first pass of backward that needs the unit's parameters."""
        recompute = TaskId(Kind.RECOMPUTE, unit, micro_batch)
        return recompute if recompute in self.place else TaskId(Kind.BACKWARD, unit, micro_batch)

    def backward_priority(self, unit: int) -> int:
        """Priority of a copy for the unit's backward."""
        return self._backward_priority[unit]

    def index(self, task: TaskId) -> int:
        """Index of the task among the drafts."""
        return self._index[task]

    # --- values

    def read(self, task: TaskId, value: Value, unit: int, memory: str = GPU_MEMORY, part: int | None = None) -> None:
        """``task`` reads a value, or a part of it, as left by the tasks declared before it, or else by the previous iteration.

        Args:
            part: None: the one that the task's id names.
        """
        place = _place(value, unit, memory, task.micro_batch, task.again if part is None else part)
        self._accesses[place].append((self._index[task], False, False))

    def write(self, task: TaskId, value: Value, unit: int, memory: str = GPU_MEMORY) -> None:
        """``task`` changes the value in place, after all readers of the old one."""
        self._accesses[_place(value, unit, memory, task.micro_batch, task.again)].append((self._index[task], True, False))

    def make(self, task: TaskId, buffer: BufferId, size_bytes: int) -> None:
        """``task`` makes the value afresh, in memory that it allocates."""
        self._accesses[_place_of(buffer)].append((self._index[task], True, True))
        self.allocate(task, buffer, size_bytes)

    def renew(self, task: TaskId, value: Value, unit: int, memory: str) -> None:
        """``task`` writes the value to a second copy, beside that which the tasks declared before it read."""
        self._accesses[_place(value, unit, memory, task.micro_batch, task.again)].append((self._index[task], True, True))

    def maker(self, buffer: BufferId) -> TaskId:
        """The task that allocates ``buffer``."""
        return self.drafts[self._made[buffer]].id

    def last_access(self, buffer: BufferId) -> TaskId:
        """The last declared task that reads or writes the value of ``buffer``."""
        return self.drafts[self._accesses[_place_of(buffer)][-1][0]].id

    def allocate(self, task: TaskId, buffer: BufferId, size_bytes: int) -> None:
        """Allocate the buffer when ``task`` starts."""
        index = self._made[buffer] = self._index[task]
        self.drafts[index].allocates += (Buffer(buffer, size_bytes),)

    def free(self, task: TaskId, buffer: BufferId, back: int = 0) -> None:
        """Free the buffer when ``task`` ends. With ``back`` 1, the buffer is that of the previous iteration."""
        index = self._index[task]
        self._freed[buffer] = back, index
        self.drafts[index].frees += (Free(buffer, back),)

    def workspace(self, task: TaskId, size_bytes: int) -> None:
        """Allocate ``size_bytes`` while ``task`` runs."""
        if size_bytes:
            buffer = on_gpu(Value.WORKSPACE, task.unit, task.micro_batch, task.kind, task.again)
            draft = self.drafts[self._index[task]]
            draft.allocates += (Buffer(buffer, size_bytes),)
            draft.frees += (Free(buffer),)  # no other task reads it

    # --- order

    def after(self, task: TaskId, before: TaskId | None, back: int = 0) -> None:
        """Make ``task`` wait for ``before`` of this iteration (``back=0``) or the previous one. None adds no wait."""
        if before in self._index:
            self.waits.add(self._index[task], self._index[before], back)
        elif before is not None:
            self._undeclared.append((task, before, back))

    def in_turn(self, tasks: Sequence[TaskId]) -> None:
        """Run ``tasks`` of one lane in this order, whatever its discipline."""
        self._turns.append((self.waits.author, tasks))

    def take_most_urgent(self) -> None:
        """Let all lanes but the GPU's run the most urgent ready task first."""
        self.by_priority = True

    def starts_early(self, task: TaskId) -> bool:
        """Whether the task waits only for tasks of the previous iteration."""
        return all(back for _, back in self.waits.of(self._index[task]))

    def beside(self, fetch: TaskId, user: TaskId, distance: int, source: TaskId | None = None) -> None:
        """Let ``fetch`` start once all passes before ``user``, except the last ``distance``, have ended.

        Args:
            source: a pass that must have ended in any case: what forward still reads is not fetched a second time.
        """
        place = self._beside(user, distance, source)
        self.after(fetch, self.passes[place % len(self.passes)], back=int(place < 0))
        if distance == 0:
            self._synchronous.setdefault(user, []).append(fetch)

    def _beside(self, user: TaskId, distance: int, source: TaskId | None) -> int:
        """Index of the pass that must have ended."""
        place = self.place[user] - 1 - min(distance, len(self.passes) - 1)
        return place if source not in self.place else max(place, self.place[source])

    def passes_since(self, user: TaskId, stages: int) -> int:
        """Passes before ``user`` from so many of the rank's dealt stages before its own on, if need be of iterations before."""
        mine = bisect_right(self._begins, self.place[user]) - 1
        back, stage = divmod(mine - stages, len(self._begins))
        return self.place[user] - self._begins[stage] - back * len(self.passes)

    def issue_beside(self, task: TaskId, user: TaskId, distance: int, source: TaskId | None = None) -> None:
        """Issue ``task`` when :meth:`beside` would let it start, ahead of what follows the passes from there on."""
        draft = self.drafts[self._index[task]]
        place = self._beside(user, distance, source)
        if 0 <= place < draft.follows:
            draft.follows, self.waits.issues_early = place, True

    def hold_up(self, blocker: TaskId, overlapped: int = 0) -> None:
        """Make a pass and its synchronous fetches wait for ``blocker``: ``overlapped`` passes after the one that follows it."""
        place = self.drafts[self._index[blocker]].follows + 1 + overlapped
        if place < len(self.passes):
            for task in (self.passes[place], *self._synchronous.get(self.passes[place], ())):
                self.after(task, blocker)

    def order_by_data(self) -> None:
        """Add the waits that data require: read after write, write after read, and free after the last access."""
        for task, before, back in self._undeclared:
            self.waits.add(self._index[task], self._index[before], back)
        for accesses in self._accesses.values():
            self._order_accesses(accesses)
        for buffer, (_, freed_by) in self._freed.items():
            if there := self._accesses.get(_place_of(buffer)):
                self._wait_for_readers(freed_by, there)

    def _order_accesses(self, accesses: Sequence[Access]) -> None:
        """Add the waits between the accesses to one place, across iterations."""
        last = len(accesses) - 1
        while last >= 0 and not accesses[last][1]:
            last -= 1
        if last < 0:
            return
        add, writer, back = self.waits.add, accesses[last][0], 1
        readers = [(task, 1) for task, _, _ in accesses[last + 1 :]]  # since the last write, with their iteration
        for task, writes, begins in accesses:
            if not writes:
                if task != writer:
                    add(task, writer, back)
                readers.append((task, 0))
                continue
            if not begins and not self._wait_for(task, readers) and task != writer:
                self.waits.add(task, writer, back)
            writer, back, readers = task, 0, []

    def _wait_for(self, task: int, readers: Sequence[tuple[int, int]]) -> bool:
        """Make ``task`` wait for the latest readers. Returns whether there are any other than itself."""
        found = read_on_gpu = False
        for reader, back in reversed(readers):
            if reader != task:
                on_gpu = self.drafts[reader].lane == GPU
                if not (on_gpu and read_on_gpu):  # passes are serial: waiting for the last one suffices
                    self.waits.add(task, reader, back)
                found, read_on_gpu = True, read_on_gpu or on_gpu
        return found

    def _wait_for_readers(self, task: int, accesses: Sequence[Access]) -> None:
        """Make ``task`` wait for the other latest readers of what it frees."""
        count = len(accesses)
        place = count - 1
        while place >= 0 and accesses[place][0] != task:
            place -= 1
        place = count if place < 0 else place
        read_on_gpu = self.drafts[task].lane == GPU
        for distance in range(1, count + 1):
            before, writes, begins = accesses[(place - distance) % count]
            if begins or before == task:
                break
            on_gpu = self.drafts[before].lane == GPU
            if not writes and not (on_gpu and read_on_gpu):
                self.waits.add(task, before, int(distance > place))
                read_on_gpu = read_on_gpu or on_gpu

    def order(self) -> list[int]:
        """Indices of the tasks among the drafts, in issue order; see :meth:`Waits.order`."""
        for author, tasks in self._turns:
            self.waits.author = author
            for before, task in zip(tasks, tasks[1:], strict=False):
                if self.by_priority:
                    self.after(task, before)
                else:  # on a fifo lane the issue order suffices
                    self.waits.issue(self._index[task], self._index[before])
        self.waits.author = 0
        self._turns.clear()
        return self.waits.order(self.drafts)

    def tasks(self, order: Sequence[int]) -> tuple[Task, ...]:
        """All tasks in this order, each with its non-redundant waits, and without a duration."""
        found = []
        for i in order:
            d = self.drafts[i]
            after = tuple([Edge(self.drafts[before].id, back) for before, back in self.waits.needed(i)])
            priority = d.priority if self.by_priority else 0
            found.append(Task(d.id, d.lane, 0, after, priority, d.allocates, d.frees))
        return tuple(found)

    def durations(self, order: Sequence[int]) -> tuple[Duration, ...]:
        """Their durations."""
        drafts = [self.drafts[i] for i in order]
        longer = self._prolonged
        return tuple([durations.total((one.duration, *longer[one.id])) if one.id in longer else one.duration for one in drafts])
