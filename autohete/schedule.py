"""The joint: the tasks of one iteration, with edges that may reach back one iteration.

A schedule exists before it runs, is data, and says everything that an executor needs. Two executors read it
(``sim`` and ``runtime``); neither sees the plan or the policy it came from. ``str(schedule)`` and
:func:`parse_schedule` are inverse.
"""

from __future__ import annotations

import graphlib
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from autohete.errors import ScheduleError, check_fields, check_member

#: Names of the lanes and memories of one GPU and its host.
GPU, H2D, D2H, CPU = "gpu", "h2d", "d2h", "cpu"
GPU_MEMORY, HOST_MEMORY = "gpu", "host"
#: And of a drive that it has.
NVME_READ, NVME_WRITE, NVME_MEMORY = "nvme_read", "nvme_write", "nvme"
#: What several GPUs do together.
COLLECTIVE = "collective"


class Kind(StrEnum):
    """What a task does; the value is its mnemonic in task ids."""

    FORWARD = "F"
    LOSS = "L"
    RECOMPUTE = "R"
    BACKWARD = "B"
    GPU_UPDATE = "W"
    PREFETCH_FORWARD = "PF"
    PREFETCH_BACKWARD = "PB"
    REFRESH = "H"
    FETCH_ACTIVATIONS = "AF"
    OFFLOAD_ACTIVATIONS = "AO"
    WRITE_BACK_FORWARD = "WF"
    WRITE_BACK_BACKWARD = "WB"
    OFFLOAD_GRADIENTS = "G"
    CPU_UPDATE = "U"
    FETCH_STATES = "SF"
    WRITE_BACK_STATES = "SB"
    ACCUMULATE = "A"
    READ_STATES = "NR"
    WRITE_STATES = "NW"
    WRITE_GRADIENTS = "NG"
    GATHER_FORWARD = "CF"
    GATHER_BACKWARD = "CB"
    REDUCE_GRADIENTS = "CR"
    GATHER_UPDATED = "CU"
    GRADIENT_NORM = "N"
    CLIP = "C"

    __hash__ = str.__hash__  # an enumeration's own is a call of Python, for each of the ids that lowering looks up


KIND_MEANING: dict[Kind, str] = {
    Kind.FORWARD: "forward",
    Kind.LOSS: "loss",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.GPU_UPDATE: "GPU update",
    Kind.PREFETCH_FORWARD: "prefetch of parameters for forward",
    Kind.PREFETCH_BACKWARD: "prefetch of parameters for backward",
    Kind.REFRESH: "refresh of updated parameters",
    Kind.FETCH_ACTIVATIONS: "fetch of activations",
    Kind.OFFLOAD_ACTIVATIONS: "offload of activations",
    Kind.WRITE_BACK_FORWARD: "write-back of parameters after forward",
    Kind.WRITE_BACK_BACKWARD: "write-back of parameters after their update",
    Kind.OFFLOAD_GRADIENTS: "offload of gradients",
    Kind.CPU_UPDATE: "CPU update",
    Kind.FETCH_STATES: "fetch of optimizer states",
    Kind.WRITE_BACK_STATES: "write-back of optimizer states",
    Kind.ACCUMULATE: "accumulation of gradients on the host",
    Kind.READ_STATES: "read of optimizer states from NVMe",
    Kind.WRITE_STATES: "write of optimizer states to NVMe",
    Kind.WRITE_GRADIENTS: "write of gradients to NVMe",
    Kind.GATHER_FORWARD: "all-gather of parameters for forward",
    Kind.GATHER_BACKWARD: "all-gather of parameters for backward",
    Kind.REDUCE_GRADIENTS: "reduction of gradients over the GPUs",
    Kind.GATHER_UPDATED: "all-gather of updated parameters",
    Kind.GRADIENT_NORM: "norm of gradients",
    Kind.CLIP: "clip coefficient",
}
#: What all GPUs do together.
COLLECTIVES = (Kind.GATHER_FORWARD, Kind.GATHER_BACKWARD, Kind.REDUCE_GRADIENTS, Kind.GATHER_UPDATED)
_MNEMONICS = frozenset(kind.value for kind in Kind)
KIND_ORDER: dict[Kind, int] = {kind: order for order, kind in enumerate(Kind)}


@dataclass(frozen=True, slots=True, order=True)
class TaskId:
    """A task within an iteration: ``F3`` is forward of unit 3, ``F3m1`` of its second micro-batch, ``F3r2`` on the third GPU.

    Args:
        kind: what it does.
        unit: which part of the model.
        micro_batch, rank: which of several, from 0.
        again: which of several recomputations of a unit, from 0: ``R3a1`` is the second.
    """

    kind: Kind
    unit: int
    micro_batch: int = 0
    rank: int = 0
    again: int = 0

    def __post_init__(self) -> None:
        if type(self.kind) is not Kind:  # a lowering makes thousands of ids: only a fault is worth a call
            check_member("kind", self.kind, Kind)

    def __str__(self) -> str:
        micro_batch = f"m{self.micro_batch}" if self.micro_batch else ""
        rank = f"r{self.rank}" if self.rank else ""
        again = f"a{self.again}" if self.again else ""
        return f"{self.kind}{self.unit}{micro_batch}{rank}{again}"

    def at(self, iteration: int) -> str:
        """The id of one instance: ``F3@1``."""
        return f"{self}@{iteration}"


_TASK = re.compile(r"([A-Z]+)(\d+)(?:m(\d+))?(?:r(\d+))?(?:a(\d+))?")


def parse_task_id(text: str) -> TaskId:
    """Inverse of ``str(TaskId)``."""
    match = _TASK.fullmatch(text)
    if match is None or match[1] not in _MNEMONICS:
        raise ScheduleError(f"{text!r} is not a task id: write a kind ({' '.join(Kind)}) and a unit, such as F3")
    return TaskId(Kind(match[1]), int(match[2]), int(match[3] or 0), int(match[4] or 0), int(match[5] or 0))


def parse_instance(text: str) -> tuple[TaskId, int]:
    """Inverse of :meth:`TaskId.at`: ``F3@1`` is forward of unit 3 in iteration 1."""
    task, at, iteration = text.partition("@")
    if not at or not iteration.isdecimal() or _TASK.fullmatch(task) is None:
        raise ScheduleError(f"{text!r} is not a task of an iteration: write it such as F3@1")
    return parse_task_id(task), int(iteration)


@dataclass(frozen=True, slots=True)
class Edge:
    """Start after ``task`` of the same iteration (``back`` 0) or of the one before (``back`` 1) has ended."""

    task: TaskId
    back: int = 0

    def __str__(self) -> str:
        return f"{self.task}@-1" if self.back else str(self.task)


class Value(StrEnum):
    """What takes memory."""

    PARAMETERS = "parameters"
    PARAMETER_SHARD = "parameter_shard"
    GRADIENTS = "gradients"
    GRADIENT_SHARD = "gradient_shard"
    ARRIVED_GRADIENTS = "arrived_gradients"
    OPTIMIZER_STATES = "optimizer_states"
    PINNED_STATES = "pinned_states"
    ACTIVATIONS = "activations"
    INPUT = "input"
    INPUT_GRADIENT = "input_gradient"
    LOGITS = "logits"
    LOGITS_GRADIENT = "logits_gradient"
    WORKSPACE = "workspace"
    PARAMETER_SLOTS = "parameter_slots"
    POLICY_BUFFERS = "policy_buffers"
    GRADIENT_NORM = "gradient_norm"
    CLIP_COEFFICIENT = "clip_coefficient"
    OTHER = "other"

    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class Copy:
    """What a copy carries, from which memory to which."""

    value: Value
    source: str
    target: str

    def __post_init__(self) -> None:
        check_fields(self)


#: What the kinds of task do that copy.
COPIES = {
    Kind.PREFETCH_FORWARD: Copy(Value.PARAMETERS, HOST_MEMORY, GPU_MEMORY),
    Kind.PREFETCH_BACKWARD: Copy(Value.PARAMETERS, HOST_MEMORY, GPU_MEMORY),
    Kind.REFRESH: Copy(Value.PARAMETERS, HOST_MEMORY, GPU_MEMORY),
    Kind.WRITE_BACK_FORWARD: Copy(Value.PARAMETERS, GPU_MEMORY, HOST_MEMORY),
    Kind.WRITE_BACK_BACKWARD: Copy(Value.PARAMETERS, GPU_MEMORY, HOST_MEMORY),
    Kind.OFFLOAD_GRADIENTS: Copy(Value.GRADIENTS, GPU_MEMORY, HOST_MEMORY),
    Kind.OFFLOAD_ACTIVATIONS: Copy(Value.ACTIVATIONS, GPU_MEMORY, HOST_MEMORY),
    Kind.FETCH_ACTIVATIONS: Copy(Value.ACTIVATIONS, HOST_MEMORY, GPU_MEMORY),
    Kind.FETCH_STATES: Copy(Value.OPTIMIZER_STATES, HOST_MEMORY, GPU_MEMORY),
    Kind.WRITE_BACK_STATES: Copy(Value.OPTIMIZER_STATES, GPU_MEMORY, HOST_MEMORY),
    Kind.READ_STATES: Copy(Value.OPTIMIZER_STATES, NVME_MEMORY, HOST_MEMORY),
    Kind.WRITE_STATES: Copy(Value.OPTIMIZER_STATES, HOST_MEMORY, NVME_MEMORY),
    Kind.WRITE_GRADIENTS: Copy(Value.GRADIENTS, HOST_MEMORY, NVME_MEMORY),
}


@dataclass(frozen=True, slots=True)
class BufferId:
    """A value in a memory: ``activations.3:gpu`` are those of unit 3.

    Args:
        value: what it is.
        memory: where.
        unit: whose; None: of the whole model.
        use: the kind of task that it is there for, where a value is there more than once in an iteration: ``parameters_B.3``.
        micro_batch: of which it is.
        again: which of several recomputations it is there for.
        rank: of which GPU, or of its process on the host: ``activations.3r2:gpu.2``.
    """

    value: Value
    memory: str
    unit: int | None = None
    use: Kind | None = None
    micro_batch: int = 0
    again: int = 0
    rank: int = 0

    def __post_init__(self) -> None:
        if type(self.value) is not Value or not (self.use is None or type(self.use) is Kind):  # as for task ids
            check_fields(self)

    @property
    def group(self) -> str:
        """What it has in common with others units': ``parameters_B``."""
        return str(self.value) if self.use is None else f"{self.value}_{self.use}"

    def __str__(self) -> str:
        unit = "" if self.unit is None else f".{self.unit}"
        micro_batch = f"m{self.micro_batch}" if self.micro_batch else ""
        again = f"a{self.again}" if self.again else ""
        rank = f"r{self.rank}" if self.rank else ""
        return f"{self.group}{unit}{micro_batch}{rank}{again}:{self.memory}"


_BUFFER = re.compile(r"([a-z_]+?)(?:_([A-Z]+))?(?:\.(\d+))?(?:m(\d+))?(?:r(\d+))?(?:a(\d+))?:([^:]+)")


def parse_buffer_id(text: str) -> BufferId:
    """Inverse of ``str(BufferId)``."""
    match = _BUFFER.fullmatch(text)
    if match is None or match[1] not in _VALUES or (match[2] or Kind.FORWARD) not in _MNEMONICS:
        raise ScheduleError(
            f"{text!r} is not a buffer: write a value ({' '.join(Value)}), a unit and a memory, such as activations.3:gpu"
        )
    unit = None if match[3] is None else int(match[3])
    use = Kind(match[2]) if match[2] else None
    return BufferId(Value(match[1]), match[7], unit, use, int(match[4] or 0), int(match[6] or 0), int(match[5] or 0))


_VALUES = frozenset(value.value for value in Value)


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes of a memory; its id is unique in the schedule."""

    id: BufferId
    size_bytes: int

    @property
    def memory(self) -> str:
        """Where it is."""
        return self.id.memory

    def __str__(self) -> str:
        return f"{self.id}:{self.size_bytes}"


@dataclass(frozen=True, slots=True)
class Free:
    """Release of a buffer that was allocated in this iteration (``back`` 0) or in the one before."""

    id: BufferId
    back: int = 0

    def __str__(self) -> str:
        return f"{self.id}@-1" if self.back else str(self.id)


@dataclass(frozen=True, slots=True)
class Task:
    """One action on one lane.

    Args:
        id: kind and unit.
        lane: name of the lane that does it.
        duration_ns: integer nanoseconds on an undisturbed lane. (Not float seconds: both executors and every check
            agree to the last tick only on integers.)
        after: what must have ended before it starts.
        priority: smaller is more urgent; matters on priority lanes.
        allocates: buffers that come to life when it starts.
        frees: buffers that end when it ends.
    """

    id: TaskId
    lane: str
    duration_ns: int
    after: tuple[Edge, ...] = ()
    priority: int = 0
    allocates: tuple[Buffer, ...] = ()
    frees: tuple[Free, ...] = ()


class Discipline(StrEnum):
    """``FIFO``: tasks in schedule order, like a CUDA stream. ``PRIORITY``: the most urgent ready task."""

    FIFO = "fifo"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class Lane:
    """An engine that does one task at a time."""

    name: str
    discipline: Discipline = Discipline.FIFO

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Flow:
    """What a lane draws from shared resources while it works: ``demand`` units/s alone, and its ``weight`` in a share."""

    lane: str
    demand: float
    weight: float


@dataclass(frozen=True, slots=True)
class SharedResource:
    """A capacity that several lanes' flows divide among them; see ``sharing.py``.

    Args:
        name: its name.
        capacity: in units/s of the flows; or, if it ``counts_lanes``, how many lanes can work at full speed at once (cores).
        lanes: who draws from it.
        counts_lanes: see ``capacity``.
    """

    name: str
    capacity: float
    lanes: tuple[str, ...]
    counts_lanes: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory and what it holds."""

    name: str
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tasks of one iteration.

    Args:
        lanes: engines; the first is the one whose passage counts iterations (the GPU).
        tasks: in issue order: a fifo lane executes its tasks in this order.
        memories: capacities to check occupancy against.
        resident: buffers that live all the time.
        flows, resources: shared bandwidth.
    """

    lanes: tuple[Lane, ...]
    tasks: tuple[Task, ...]
    memories: tuple[Memory, ...] = ()
    resident: tuple[Buffer, ...] = ()
    flows: tuple[Flow, ...] = ()
    resources: tuple[SharedResource, ...] = ()

    def __str__(self) -> str:
        return "\n".join(_lines(self)) + "\n"

    def graph(self) -> Graph:
        """The schedule with names resolved to indices, for executors. Call :meth:`validate` first."""
        return Graph(self)

    def validate(self) -> Schedule:
        """Check that the schedule can be executed for ever; returns itself.

        Raises:
            ScheduleError: names the fault and the tasks that have it.
        """
        _validate(self)
        return self


#: Priority, micro-batch, unit, kind, rank, recomputation: smaller is more urgent.
Urgency = tuple[int, int, int, int, int, int]


def urgency(task: Task) -> Urgency:
    """The order of a priority lane among tasks of one iteration; the iteration comes after the priority."""
    return (task.priority, task.id.micro_batch, task.id.unit, KIND_ORDER[task.id.kind], task.id.rank, task.id.again)


class Graph:
    """A schedule's edges as index lists.

    Attributes:
        lane: lane index of each task.
        successors: for each task the (task, back) pairs that wait for it.
        waits: how many same-iteration and how many back-reaching edges each task has.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
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
        found: list[list[int]] = [[] for _ in self.schedule.lanes]
        for i, lane in enumerate(self.lane):
            found[lane].append(i)
        return found

    @cached_property
    def urgency(self) -> list[Urgency]:
        """For each task the order of a priority lane, in which the iteration comes after the first number."""
        return [urgency(task) for task in self.schedule.tasks]

    def edges(self) -> Iterator[tuple[int, int, int]]:
        """All (predecessor, successor, back): the written ones, and the order that fifo lanes impose, wrap-around included."""
        for before, successors in enumerate(self.successors):
            for after, back in successors:
                yield before, after, back
        for lane, tasks in zip(self.schedule.lanes, self.lane_tasks, strict=True):
            if lane.discipline is Discipline.FIFO and tasks:
                for before, after in zip(tasks, tasks[1:], strict=False):
                    yield before, after, 0
                yield tasks[-1], tasks[0], 1


# --- validation ---------------------------------------------------------------------------------------------------


def _validate(schedule: Schedule) -> None:
    if not schedule.lanes:
        raise ScheduleError("a schedule without a lane has no iterations to count: give at least one")
    lanes = _unique("lane", [lane.name for lane in schedule.lanes])
    memories = _unique("memory", [memory.name for memory in schedule.memories])
    ids = set(_unique("task", [str(task.id) for task in schedule.tasks]))
    for task in schedule.tasks:
        if task.lane not in lanes:
            raise ScheduleError(f"task {task.id} has no lane: {task.lane!r} is not one of {', '.join(lanes) or 'none'}")
        if type(task.duration_ns) is not int or task.duration_ns < 0:
            raise ScheduleError(f"task {task.id} lasts {task.duration_ns} ns: a duration is a whole number, not negative")
        seen: set[Edge] = set()
        for edge in task.after:
            if str(edge.task) not in ids:
                raise ScheduleError(f"unknown edge: {task.id} waits for {edge}, but no task is called {edge.task}")
            if edge.back not in (0, 1):
                raise ScheduleError(f"{task.id} waits for {edge.task} {edge.back} iterations back: only 0 or 1 can be said")
            if edge in seen:
                raise ScheduleError(f"{task.id} waits for {edge} twice: say it once")
            seen.add(edge)
    _validate_sharing(schedule, lanes)
    _validate_buffers(schedule, memories, _Ancestors(schedule, _validate_order(schedule)))


_NOT_IN_NAMES = re.compile(r"[^\w.-]")


def _check_names(what: str, names: list[str]) -> None:
    """Refuse names whose text form could not be read back."""
    for name in names:
        if _NOT_IN_NAMES.search(name) or not name:
            raise ScheduleError(f"{what} {name!r}: a name has letters, digits, '_', '.' and '-' only")


def _unique(what: str, names: list[str]) -> list[str]:
    _check_names(what, names)
    name, times = Counter(names).most_common(1)[0] if names else ("", 0)
    if times > 1:
        raise ScheduleError(f"{what} {name!r} exists {times} times: names are unique")
    return names


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


def _validate_order(schedule: Schedule) -> dict[TaskId, set[TaskId]]:
    """Refuse cycles within an iteration; returns the direct predecessors."""
    predecessors = {task.id: {edge.task for edge in task.after if edge.back == 0} for task in schedule.tasks}
    with_lanes = {task: set(before) for task, before in predecessors.items()}
    for lane in schedule.lanes:
        if lane.discipline is Discipline.FIFO:
            ids = [task.id for task in schedule.tasks if task.lane == lane.name]
            for before, after in zip(ids, ids[1:], strict=False):
                with_lanes[after].add(before)
    try:
        graphlib.TopologicalSorter(with_lanes).prepare()
    except graphlib.CycleError as error:
        cycle = " -> ".join(str(task) for task in error.args[1])
        raise ScheduleError(f"cycle: {cycle}; each waits for the one before (edges, or the order of a fifo lane)") from error
    return with_lanes


def _validate_buffers(schedule: Schedule, memories: list[str], ancestors: _Ancestors) -> None:
    allocated: dict[BufferId, Task] = {}
    freed: dict[BufferId, Task] = {}
    for found, times in Counter(buffer.id for buffer in schedule.resident).items():
        if times > 1:
            raise ScheduleError(f"resident buffer '{found}' exists {times} times: give its bytes once")
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
                raise ScheduleError(f"{task.id} frees '{free.id}' of {free.back} iterations back: only 0 or 1 can be said")
            freed[free.id] = task
            owner = allocated[free.id]
            if not ancestors.includes(task.id, owner.id, free.back):
                raise ScheduleError(f"{task.id} frees '{free.id}' but does not wait for {owner.id}, which allocates it")
    for buffer_id, task in allocated.items():
        if buffer_id not in freed:
            raise ScheduleError(
                f"buffer '{buffer_id}', allocated by {task.id}, is never freed: memory would grow with each iteration"
            )


class _Ancestors:
    """What has surely begun before a task ends, in its iteration and in the one before.

    Sets are bits of integers: 1,000 tasks take a millisecond or two, a set per task a hundred times that.
    """

    def __init__(self, schedule: Schedule, predecessors: dict[TaskId, set[TaskId]]) -> None:
        self._bit = {task: 1 << i for i, task in enumerate(graphlib.TopologicalSorter(predecessors).static_order())}
        back: dict[TaskId, set[TaskId]] = {task.id: {e.task for e in task.after if e.back} for task in schedule.tasks}
        for lane in schedule.lanes:
            ids = [task.id for task in schedule.tasks if task.lane == lane.name]
            if ids and lane.discipline is Discipline.FIFO:
                back[ids[0]].add(ids[-1])
        same: dict[TaskId, int] = {}
        previous: dict[TaskId, int] = {}
        for task in self._bit:
            same[task] = self._bit[task]
            for before in predecessors[task]:
                same[task] |= same[before]
        for task in self._bit:
            bits = 0
            for before in predecessors[task]:
                bits |= previous[before]
            for before in back[task]:
                bits |= same[before]
            previous[task] = bits
        self._sets = (same, previous)

    def includes(self, task: TaskId, before: TaskId, back: int) -> bool:
        """Whether ``before``, ``back`` iterations earlier, is ``task`` itself or among its transitive predecessors."""
        return bool(self._sets[back][task] & self._bit[before])


# --- text form ----------------------------------------------------------------------------------------------------

_HEADER = "autohete-schedule 2"
_COUNTS = " counts-lanes"


def _lines(schedule: Schedule) -> Iterator[str]:
    yield _HEADER
    for lane in schedule.lanes:
        yield f"lane {lane.name} {lane.discipline}"
    for memory in schedule.memories:
        yield f"memory {memory.name} {memory.capacity_bytes}"
    for flow in schedule.flows:
        yield f"flow {flow.lane} {flow.demand!r} {flow.weight!r}"
    for resource in schedule.resources:
        yield f"share {resource.name} {resource.capacity!r} {','.join(resource.lanes)}{_COUNTS * resource.counts_lanes}"
    for buffer in schedule.resident:
        yield f"resident {buffer}"
    for task in schedule.tasks:
        words = [f"task {task.id} {task.lane} {task.duration_ns}"]
        if task.priority:
            words.append(f"priority={task.priority}")
        for key, items in (("after", task.after), ("allocates", task.allocates), ("frees", task.frees)):
            if items:
                words.append(f"{key}={','.join(map(str, items))}")
        yield " ".join(words)


def parse_schedule(text: str) -> Schedule:
    """Inverse of ``str(schedule)``. Blank lines and ``#`` comments are passed over. Does not :meth:`Schedule.validate`.

    Raises:
        ScheduleError: a line that cannot be read, with its number.
    """
    parts: dict[str, list[object]] = {key: [] for key in ("lane", "memory", "flow", "share", "resident", "task")}
    lines = [(number, line.split("#", 1)[0].split()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, words) for number, words in lines if words]
    if not lines or " ".join(lines[0][1]) != _HEADER:
        raise ScheduleError(f"a schedule's text begins with the line {_HEADER!r}")
    for number, words in lines[1:]:
        if words[0] not in parts:
            raise ScheduleError(f"line {number}: {words[0]!r} is not one of {', '.join(parts)}")
        try:
            parts[words[0]].append(_PARSERS[words[0]](words[1:]))
        except (ValueError, IndexError, KeyError) as error:
            raise ScheduleError(f"line {number}: cannot read {' '.join(words)!r} ({error})") from error
        except ScheduleError as error:
            raise ScheduleError(f"line {number}: {error}") from error
    return Schedule(
        lanes=tuple(parts["lane"]),  # type: ignore[arg-type]
        tasks=tuple(parts["task"]),  # type: ignore[arg-type]
        memories=tuple(parts["memory"]),  # type: ignore[arg-type]
        resident=tuple(parts["resident"]),  # type: ignore[arg-type]
        flows=tuple(parts["flow"]),  # type: ignore[arg-type]
        resources=tuple(parts["share"]),  # type: ignore[arg-type]
    )


def _parse_lane(words: list[str]) -> Lane:
    name, discipline = words
    return Lane(name, Discipline(discipline))


def _parse_memory(words: list[str]) -> Memory:
    name, capacity = words
    return Memory(name, int(capacity))


def _parse_flow(words: list[str]) -> Flow:
    lane, demand, weight = words
    return Flow(lane, float(demand), float(weight))


def _parse_share(words: list[str]) -> SharedResource:
    name, capacity, lanes, *counts = words
    if counts not in ([], [_COUNTS.strip()]):
        raise ValueError(f"{' '.join(counts)!r} is not {_COUNTS.strip()!r}")
    return SharedResource(name, float(capacity), tuple(lanes.split(",")), bool(counts))


def _parse_buffer(text: str) -> Buffer:
    buffer, _, size = text.rpartition(":")
    return Buffer(parse_buffer_id(buffer), int(size))


def _parse_resident(words: list[str]) -> Buffer:
    (text,) = words
    return _parse_buffer(text)


def _back(text: str) -> tuple[str, int]:
    return (text.removesuffix("@-1"), 1) if text.endswith("@-1") else (text, 0)


def _parse_edge(text: str) -> Edge:
    name, back = _back(text)
    return Edge(parse_task_id(name), back)


def _parse_free(text: str) -> Free:
    name, back = _back(text)
    return Free(parse_buffer_id(name), back)


def _parse_task(words: list[str]) -> Task:
    options = dict(word.split("=", 1) for word in words[3:])
    if len(options) < len(words) - 3:
        raise ValueError("an option is given twice")
    if unknown := options.keys() - {"priority", "after", "allocates", "frees"}:
        raise ValueError(f"unknown {', '.join(sorted(unknown))}")

    def items(key: str) -> list[str]:
        return options[key].split(",") if key in options else []

    return Task(
        id=parse_task_id(words[0]),
        lane=words[1],
        duration_ns=int(words[2]),
        after=tuple(_parse_edge(item) for item in items("after")),
        priority=int(options.get("priority", 0)),
        allocates=tuple(_parse_buffer(item) for item in items("allocates")),
        frees=tuple(_parse_free(item) for item in items("frees")),
    )


_PARSERS = {
    "lane": _parse_lane,
    "memory": _parse_memory,
    "flow": _parse_flow,
    "share": _parse_share,
    "resident": _parse_resident,
    "task": _parse_task,
}
