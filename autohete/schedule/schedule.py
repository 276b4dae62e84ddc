"""The parts of a schedule, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, TypeVarTuple, cast

from autohete.errors import check_fields
from autohete.schedule.ids import D2H, GPU_MEMORY, H2D, HOST_MEMORY, BufferId, TaskId
from autohete.tabular import frame

if TYPE_CHECKING:
    from pandas import DataFrame

#: First line of a schedule's text; the number is the version of the form.
HEADER = "autohete-schedule 2"
COUNTS_LANES = "counts-lanes"
PART_OF = "part_of="
TO = ">"
#: The ends of the lanes of every GPU.
_ENDS = {H2D: (HOST_MEMORY, GPU_MEMORY), D2H: (GPU_MEMORY, HOST_MEMORY)}

T = TypeVar("T")
Args = TypeVarTuple("Args")


class Edge(NamedTuple):
    """Start after ``task`` of the same iteration (``back`` 0) or of the previous one (``back`` 1) has ended."""

    task: TaskId
    back: int = 0

    def __str__(self) -> str:
        return f"{self.task}@-1" if self.back else str(self.task)


class Buffer(NamedTuple):
    """A number of bytes in a memory. Its id is unique in the schedule."""

    id: BufferId
    size_bytes: int

    @property
    def memory(self) -> str:
        """Name of its memory."""
        return self.id.memory

    def __str__(self) -> str:
        return f"{self.id}:{self.size_bytes}"


class Free(NamedTuple):
    """Release of a buffer that was allocated in this iteration (``back`` 0) or in the previous one."""

    id: BufferId
    back: int = 0

    def __str__(self) -> str:
        return f"{self.id}@-1" if self.back else str(self.id)


class Task(NamedTuple):
    """One action on one lane.

    Args:
        id: kind and unit.
        lane: name of the lane that runs it.
        duration_ns: integer nanoseconds on an undisturbed lane. (Not float seconds: both executors and every check
            agree to the last tick only on integers.)
        after: tasks that must have ended before it starts.
        priority: smaller is more urgent; matters on priority lanes.
        allocates: buffers that are allocated when it starts.
        frees: buffers that are freed when it ends.
    """

    id: TaskId
    lane: str
    duration_ns: int
    after: tuple[Edge, ...] = ()
    priority: int = 0
    allocates: tuple[Buffer, ...] = ()
    frees: tuple[Free, ...] = ()

    def __str__(self) -> str:
        words = [f"task {self.id} {self.lane} {self.duration_ns}"]
        if self.priority:
            words.append(f"priority={self.priority}")
        for key, items in (("after", self.after), ("allocates", self.allocates), ("frees", self.frees)):
            if items:
                words.append(f"{key}={','.join(map(str, items))}")
        return " ".join(words)


class Discipline(StrEnum):
    """``FIFO``: tasks in schedule order, like a CUDA stream. ``PRIORITY``: the most urgent ready task."""

    FIFO = "fifo"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True)
class Lane:
    """An engine that does one task at a time.

    Args:
        name: its name.
        discipline: the order of its tasks.
        source, target: the memories between which it copies. None: those of ``h2d`` and ``d2h`` follow from the name; others
            copy nothing.
    """

    name: str
    discipline: Discipline = Discipline.FIFO
    source: str | None = None
    target: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def ends(self) -> tuple[str, str] | None:
        """The memories between which it copies: source and target. None: it copies nothing."""
        if self.source is None or self.target is None:
            return _ENDS.get(self.name)
        return self.source, self.target

    def __str__(self) -> str:
        ends = f" {self.source}{TO}{self.target}" if self.source is not None else ""
        return f"lane {self.name} {self.discipline}{ends}"


@dataclass(frozen=True, slots=True)
class Flow:
    """The use of shared resources by a working lane: ``demand`` in units/s if alone, and its ``weight`` in a share."""

    lane: str
    demand: float
    weight: float

    def __str__(self) -> str:
        return f"flow {self.lane} {self.demand!r} {self.weight!r}"


@dataclass(frozen=True, slots=True)
class SharedResource:
    """A capacity that is divided among the flows of several lanes; see ``sharing.py``.

    Args:
        name: its name.
        capacity: in units/s of the flows; or, if it ``counts_lanes``, how many lanes can work at full speed at once (cores).
        lanes: the lanes that draw from it.
        counts_lanes: see ``capacity``.
    """

    name: str
    capacity: float
    lanes: tuple[str, ...]
    counts_lanes: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        counts = f" {COUNTS_LANES}" if self.counts_lanes else ""
        return f"share {self.name} {self.capacity!r} {','.join(self.lanes)}{counts}"


@dataclass(frozen=True, slots=True)
class Memory:
    """A memory and its capacity.

    Args:
        name: its name.
        capacity_bytes: its capacity.
        part_of: the memory of which it is a part with a separate limit. Its contents also count there.
    """

    name: str
    capacity_bytes: int
    part_of: str | None = None

    def __str__(self) -> str:
        part = f" {PART_OF}{self.part_of}" if self.part_of is not None else ""
        return f"memory {self.name} {self.capacity_bytes}{part}"


class SavedNames(NamedTuple):
    """Tensors that a forward saves and that are one part of its activations.

    Args:
        unit: index of the unit.
        part: index of the part.
        names: their names, as the plan gives them.
    """

    unit: int
    part: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"saved {self.unit} {self.part} {','.join(self.names)}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tasks of one iteration.

    Args:
        lanes: engines. The first one (the GPU) is the one whose passes count iterations.
        tasks: in issue order; a fifo lane executes its tasks in this order.
        memories: capacities against which occupancy is checked.
        resident: buffers that live permanently.
        saved: for units whose saved tensors go several ways, the names of those in each part of the activations. What has
            another name is in the part that is not listed.
        flows, resources: shared bandwidth.
    """

    lanes: tuple[Lane, ...]
    tasks: tuple[Task, ...]
    memories: tuple[Memory, ...] = ()
    resident: tuple[Buffer, ...] = ()
    flows: tuple[Flow, ...] = ()
    resources: tuple[SharedResource, ...] = ()
    saved: tuple[SavedNames, ...] = ()
    #: Results of :meth:`once`, by function and arguments.
    _known: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        return f"<Schedule: {len(self.tasks):,} tasks on {', '.join(lane.name for lane in self.lanes)}>"

    def to_frame(self) -> DataFrame:
        """Return a frame of pandas with a row for each task, in issue order.

        Raises:
            InputError: pandas is not installed.
        """
        return frame(
            {
                "task": str(task.id),
                "kind": str(task.id.kind),
                "unit": task.id.unit,
                "lane": task.lane,
                "duration_seconds": task.duration_ns * 1e-9,
                "after": " ".join(map(str, task.after)),
            }
            for task in self.tasks
        )

    def __str__(self) -> str:
        parts = (*self.lanes, *self.memories, *self.flows, *self.resources)
        resident = (f"resident {buffer}" for buffer in self.resident)
        return "\n".join([HEADER, *map(str, parts), *resident, *map(str, self.saved), *map(str, self.tasks)]) + "\n"

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in an iteration."""
        return 1 + max((task.id.micro_batch for task in self.tasks), default=0)

    def within(self, memory: str) -> frozenset[str]:
        """``memory`` and its parts: a buffer in any of them occupies it."""
        return frozenset({memory, *(part.name for part in self.memories if part.part_of == memory)})

    def timed(
        self,
        durations_ns: Sequence[int],
        memories: tuple[Memory, ...],
        flows: tuple[Flow, ...] = (),
        resources: tuple[SharedResource, ...] = (),
    ) -> Schedule:
        """Return the schedule with other durations, capacities and shared bandwidth.

        Args:
            durations_ns: one for each task.
            memories: those of this schedule, with any capacity.
            flows, resources: shared bandwidth.
        """
        ids, lanes, _, *others = self.once(_columns)
        tasks = tuple(map(Task._make, zip(ids, lanes, durations_ns, *others, strict=True)))
        timed = replace(self, tasks=tasks, memories=memories, flows=flows, resources=resources)
        object.__setattr__(timed, "_known", self._known)
        return timed

    def once(self, function: Callable[[Schedule, *Args], T], *args: *Args) -> T:
        """Return ``function(self, *args)``, computed once for all schedules that differ in what :meth:`timed` changes.

        Args:
            function: its result must not depend on durations, capacities or shared bandwidth.
        """
        key = function, args
        if key not in self._known:
            self._known[key] = function(self, *args)
        return cast("T", self._known[key])

    def tasks_of(self, lane: str) -> list[int]:
        """Return the indices of the tasks of ``lane`` in issue order."""
        return self.once(_tasks_of, lane)


def _columns(schedule: Schedule) -> Sequence[tuple[Any, ...]]:
    """The tasks, field by field."""
    return tuple(zip(*schedule.tasks, strict=True)) or ((),) * len(Task._fields)


def _tasks_of(schedule: Schedule, lane: str) -> list[int]:
    return [i for i, task in enumerate(schedule.tasks) if task.lane == lane]
