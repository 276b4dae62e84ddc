"""The times of all tasks of a run. Both executors write this form; everything that measures or draws reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autohete.errors import check_fields
from autohete.schedule import Discipline, Schedule, TaskId, urgency
from autohete.tabular import frame

if TYPE_CHECKING:
    from pandas import DataFrame

Nanoseconds = NDArray[np.int64]

#: A steady cycle may take several iterations: blocks that miss their turn on a lane in one iteration catch up in the next.
_LONGEST_CYCLE = 4
#: The last iteration has no successor to compete with; it is drain, not steady state.
_DRAIN = 1


class Clock(StrEnum):
    """The clock that a time comes from. Every number in the output names its clock."""

    SIMULATED = "simulated"
    EMULATED = "emulated"
    MEASURED_CPU = "measured-cpu"
    MEASURED_CUDA = "measured-cuda"


@dataclass(frozen=True, slots=True)
class Span:
    """One task instance: when its edges were satisfied, and when it started and ended (ns from the start of the run)."""

    task: TaskId
    iteration: int
    lane: str
    ready_ns: int
    start_ns: int
    end_ns: int

    def __str__(self) -> str:
        return f"{self.task.at(self.iteration)} {self.lane} {self.start_ns}..{self.end_ns}"


@dataclass(frozen=True, slots=True)
class Steady:
    """The steady state of a periodic schedule.

    Args:
        first: first iteration of a full cycle.
        cycle: iterations in a cycle.
        period_seconds: mean time of one iteration.
        settled: whether the run was long enough to see the cycle repeat; if not, the window is the second half of the run.
    """

    first: int
    cycle: int
    period_seconds: float
    settled: bool


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Times of all task instances; each array has shape (iterations, tasks), in nanoseconds.

    Args:
        schedule: the schedule that was executed.
        clock: the clock of these times.
        ready_ns, start_ns, end_ns: when all edges were satisfied, when the task began and ended.
    """

    schedule: Schedule
    clock: Clock
    ready_ns: Nanoseconds
    start_ns: Nanoseconds
    end_ns: Nanoseconds

    def __post_init__(self) -> None:
        check_fields(self)

    def __repr__(self) -> str:
        tasks = len(self.schedule.tasks)
        return f"<Trace: {self.iterations} iterations of {tasks:,} tasks in {self.makespan_seconds:.6g} s, {self.clock}>"

    def to_frame(self) -> DataFrame:
        """Return a frame of pandas with a row for each span, in seconds from the start of the run.

        Raises:
            InputError: pandas is not installed.
        """
        return frame(
            {
                "iteration": span.iteration,
                "task": str(span.task),
                "kind": str(span.task.kind),
                "unit": span.task.unit,
                "lane": span.lane,
                "ready_seconds": span.ready_ns * 1e-9,
                "start_seconds": span.start_ns * 1e-9,
                "end_seconds": span.end_ns * 1e-9,
            }
            for span in self.spans()
        )

    @property
    def iterations(self) -> int:
        """Number of iterations that were run."""
        return int(self.start_ns.shape[0])

    @property
    def makespan_seconds(self) -> float:
        """Time from the start of the run to the end of its last task."""
        return float(self.end_ns.max(initial=0)) * 1e-9

    def spans(self) -> Iterator[Span]:
        """Iterate over all instances, iteration by iteration in issue order."""
        for iteration in range(self.iterations):
            for i, task in enumerate(self.schedule.tasks):
                ready, start, end = (int(a[iteration, i]) for a in (self.ready_ns, self.start_ns, self.end_ns))
                yield Span(task.id, iteration, task.lane, ready, start, end)

    def lane_tasks(self, lane: str) -> list[int]:
        """Return the indices of the tasks of ``lane`` in issue order."""
        return self.schedule.tasks_of(lane)

    def anchors(self) -> Nanoseconds:
        """Return the start of each iteration: the start of its first task on the first lane."""
        tasks = self.lane_tasks(self.schedule.lanes[0].name)
        first: Nanoseconds = self.start_ns[:, tasks].min(axis=1) if tasks else self.start_ns.min(axis=1, initial=0)
        return first

    def first_iteration_seconds(self) -> float:
        """Return the time from the start of the run to the start of its second iteration (or to its end)."""
        return float(self.anchors()[1]) * 1e-9 if self.iterations > 1 else self.makespan_seconds

    def drain_seconds(self) -> float:
        """Return how long other lanes run after the first lane's last task: time that further iterations would have hidden."""
        last = self.end_ns[:, self.lane_tasks(self.schedule.lanes[0].name)].max(initial=0)
        return self.makespan_seconds - float(last) * 1e-9

    def steady(self) -> Steady:
        """Return the steady state, in which all times of an iteration repeat those of ``cycle`` iterations before."""
        anchors = self.anchors()
        offsets = np.concatenate([self.start_ns, self.end_ns], axis=1) - anchors[:, None]
        last = self.iterations - 1 - _DRAIN
        for cycle in range(1, _LONGEST_CYCLE + 1):
            if last + 1 < 2 * cycle:
                break
            span = int(anchors[last] - anchors[last - cycle])
            # Rounding of shared rates can move a time by some ticks from one iteration to the next; nothing else can.
            tolerance = 2 + span // 1_000_000 if self.schedule.resources else 0
            # A task that is overtaken by more urgent tasks of all later iterations runs in the drain: not a steady state.
            if self.end_ns[last].max(initial=0) > anchors[-1] + span + tolerance:
                continue
            recent, before = offsets[last - cycle + 1 : last + 1], offsets[last - 2 * cycle + 1 : last - cycle + 1]
            if abs(recent - before).max(initial=0) <= tolerance:
                return Steady(last - cycle, cycle, span * 1e-9 / cycle, settled=True)
        first = max(0, last // 2)
        if last <= first:
            return Steady(0, self.iterations, self.makespan_seconds / self.iterations, settled=False)
        return Steady(first, last - first, float(anchors[last] - anchors[first]) * 1e-9 / (last - first), settled=False)


def check_trace(trace: Trace) -> list[str]:
    """Return the faults of a trace against its schedule, in words; an empty list means a correct execution.

    Independent of both executors. Each task runs once and after all its edges, no lane overlaps itself, fifo keeps issue
    order, priority never takes a less urgent ready task.
    """
    return [*_check_edges(trace), *_check_lanes(trace)]


def _check_edges(trace: Trace) -> Iterator[str]:
    index = {task.id: i for i, task in enumerate(trace.schedule.tasks)}
    for i, task in enumerate(trace.schedule.tasks):
        for iteration in np.flatnonzero(trace.end_ns[:, i] < trace.start_ns[:, i]):
            yield f"{task.id.at(int(iteration))} ends before it starts"
        for edge in task.after:
            before = trace.end_ns[: trace.iterations - edge.back, index[edge.task]]
            for late in np.flatnonzero(trace.start_ns[edge.back :, i] < before):
                yield f"{task.id.at(int(late) + edge.back)} starts before {edge.task.at(int(late))} has ended"


def _check_lanes(trace: Trace) -> Iterator[str]:
    tasks = trace.schedule.tasks
    for lane in trace.schedule.lanes:
        members = trace.lane_tasks(lane.name)
        issue = [(iteration, i) for iteration in range(trace.iterations) for i in members]
        # A task without duration may share its instant with others; the ends decide which came first.
        ran = sorted(issue, key=lambda item: (trace.start_ns[item], trace.end_ns[item]))
        for before, after in zip(ran, ran[1:], strict=False):
            if trace.start_ns[after] < trace.end_ns[before]:
                first, second = (tasks[i].id.at(iteration) for iteration, i in (before, after))
                yield f"lane {lane.name}: {second} starts before {first} has ended"
        if lane.discipline is Discipline.FIFO:
            times = [int(trace.start_ns[item]) for item in issue]
            for place, (earlier, later) in enumerate(zip(times, times[1:], strict=False)):
                if later < earlier:
                    iteration, i = issue[place + 1]
                    yield f"lane {lane.name}: {tasks[i].id.at(iteration)} runs before its turn"
        else:
            yield from _check_urgency(trace, lane.name, ran)


def _check_urgency(trace: Trace, lane: str, ran: list[tuple[int, int]]) -> Iterator[str]:
    tasks = trace.schedule.tasks

    def order(item: tuple[int, int]) -> tuple[int, ...]:
        priority, *others = urgency(tasks[item[1]])
        return (priority, item[0], *others)

    for place, chosen in enumerate(ran):
        for passed in ran[place + 1 :]:
            # Ready strictly before the choice; a task that becomes ready at the same instant may come a round later.
            if trace.ready_ns[passed] < trace.start_ns[chosen] < trace.start_ns[passed] and order(passed) < order(chosen):
                yield (
                    f"lane {lane}: {tasks[chosen[1]].id.at(chosen[0])} is taken while the more urgent "
                    f"{tasks[passed[1]].id.at(passed[0])} is ready"
                )
