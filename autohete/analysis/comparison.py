"""Where two runs of one schedule differ: by kind of task, lane, cause of waiting and order, not only on average.

Usually one is simulated and the other measured. All means are over the steady window of each run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from autohete.analysis.occupancy import occupancy
from autohete.analysis.usage import Cause, usage
from autohete.errors import InputError, check_fields
from autohete.execution.trace import Clock, Nanoseconds, Steady, Trace
from autohete.schedule import GPU, KIND_ORDER, Kind, Schedule, TaskId

_WORST_TASKS = 5
_NAMED_SWAPS = 3


@dataclass(frozen=True, slots=True)
class Pair:
    """One quantity of both runs; its unit is in the name of the field that holds it.

    Args:
        a, b: values in A and B.
        difference: B minus A.
        percent: the difference in percent of A; None if only A is zero.
    """

    a: float
    b: float
    difference: float
    percent: float | None


def pair(a: float, b: float) -> Pair:
    """Return ``a`` and ``b`` with their difference."""
    if a == b:
        return Pair(a, b, 0.0, 0.0)
    return Pair(a, b, b - a, 100 * (b / a - 1) if a else None)


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One of the two runs: its name, its clock, the number of its iterations, and the steady window that was compared."""

    name: str
    clock: Clock
    iterations: int
    steady: Steady

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class KindDifference:
    """All tasks of a kind.

    Args:
        kind: their kind.
        tasks: number of them in an iteration.
        mean_seconds: of one task.
        iteration_seconds: of all of them in one iteration; kinds are sorted by this.
        wait_seconds: mean time from ready (all edges satisfied) to start, that is, the time a task waits for its lane.
    """

    kind: Kind
    tasks: int
    mean_seconds: Pair
    iteration_seconds: Pair
    wait_seconds: Pair

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Swap:
    """Two tasks that A ran one after the other, and B in the opposite order.

    Args:
        first, then: the tasks in A's order; ``F0@+1`` is ``F0`` of the following iteration.
        times: number of occurrences in the window.
    """

    first: str
    then: str
    times: int


@dataclass(frozen=True, slots=True)
class LaneDifference:
    """One lane.

    Args:
        lane: its name.
        busy_seconds: total time of its tasks in one iteration.
        neighbours: number of pairs of tasks that A ran directly one after the other and whose order was compared.
        swapped: number of these pairs that B ran in the opposite order.
        swaps: the most frequent swapped pairs.
    """

    lane: str
    busy_seconds: Pair
    neighbours: int
    swapped: int
    swaps: tuple[Swap, ...]


@dataclass(frozen=True, slots=True)
class TaskDifference:
    """One task, such as ``F3``, and its mean time over the iterations."""

    task: str
    lane: str
    mean_seconds: Pair


@dataclass(frozen=True, slots=True)
class Comparison:
    """Where two runs of one schedule differ.

    Args:
        a, b: the runs.
        iteration_seconds: steady time of one iteration.
        kinds: sorted by their share of the difference, in absolute value, largest first.
        lanes: in the order of the schedule.
        idle_seconds: idle time of the GPU in one iteration, by cause; empty if no lane is called ``gpu``.
        tasks: the tasks whose mean times differ most, at most five; tasks without a difference are left out.
        peak_bytes: peak of each memory over the whole run, by name.
    """

    a: ComparedRun
    b: ComparedRun
    iteration_seconds: Pair
    kinds: tuple[KindDifference, ...]
    lanes: tuple[LaneDifference, ...]
    idle_seconds: dict[Cause, Pair]
    tasks: tuple[TaskDifference, ...]
    peak_bytes: dict[str, Pair]


def compare(a: Trace, b: Trace, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare ``b`` with ``a``; ``names`` are the names shown for them.

    Both must have the same lanes, memories, tasks and edges. Planned durations may differ, and so may what decides the order
    of tasks: disciplines, priorities, issue order.

    Raises:
        InputError: the schedules differ, or a run has no iteration.
    """
    _check_alike(a.schedule, b.schedule, names)
    for trace, name in zip((a, b), names, strict=True):
        if not trace.iterations:
            raise InputError(f"{name} has no iterations, so there is nothing to compare: give a run with at least 1")
    runs = _SteadyRun(a, a.schedule), _SteadyRun(b, a.schedule)
    sides = [
        ComparedRun(name, run.trace.clock, run.trace.iterations, run.steady) for name, run in zip(names, runs, strict=True)
    ]
    return Comparison(
        a=sides[0],
        b=sides[1],
        iteration_seconds=pair(*(run.steady.period_seconds for run in runs)),
        kinds=_kinds(a.schedule, *runs),
        lanes=tuple(_lane(lane.name, a.lane_tasks(lane.name), *runs) for lane in a.schedule.lanes),
        idle_seconds=_idle(*runs),
        tasks=_worst_tasks(a.schedule, *runs),
        peak_bytes={m.name: pair(*(occupancy(trace, m.name).peak_bytes for trace in (a, b))) for m in a.schedule.memories},
    )


class _SteadyRun:
    """A trace with its tasks in the order of ``schedule``, and sums over its steady window, one per task."""

    def __init__(self, trace: Trace, schedule: Schedule) -> None:
        self.trace, self.steady = trace, trace.steady()
        place = {task.id: i for i, task in enumerate(trace.schedule.tasks)}
        tasks = [place[task.id] for task in schedule.tasks]
        self.start: Nanoseconds = trace.start_ns[:, tasks]
        self.end: Nanoseconds = trace.end_ns[:, tasks]
        window = slice(self.steady.first, self.steady.first + self.steady.cycle)
        self._took = (self.end - self.start)[window].sum(axis=0)
        self._waited = (self.start - trace.ready_ns[:, tasks])[window].sum(axis=0)

    def took(self, tasks: list[int]) -> float:
        """Return the seconds per iteration that ``tasks`` take in total."""
        return int(self._took[tasks].sum()) * 1e-9 / self.steady.cycle

    def waited(self, tasks: list[int]) -> float:
        """Return the seconds per iteration that ``tasks`` wait for their lanes in total."""
        return int(self._waited[tasks].sum()) * 1e-9 / self.steady.cycle


# --- what is compared ---------------------------------------------------------------------------------------------


def _check_alike(a: Schedule, b: Schedule, names: tuple[str, str]) -> None:
    for what, in_a, in_b in (
        ("lane", [lane.name for lane in a.lanes], [lane.name for lane in b.lanes]),
        ("memory", [memory.name for memory in a.memories], [memory.name for memory in b.memories]),
        ("task", [task.id for task in a.tasks], [task.id for task in b.tasks]),
    ):
        _check_same(what, in_a, in_b, names)
    if a.lanes[0].name != b.lanes[0].name:
        first = " and ".join(f"{name} by lane {s.lanes[0].name}" for name, s in zip(names, (a, b), strict=True))
        raise _unlike(f"iterations are counted in {first}")
    others = {task.id: task for task in b.tasks}
    for task in a.tasks:
        other = others[task.id]
        if task.lane != other.lane:
            raise _unlike(f"task {task.id} runs on lane {task.lane} in {names[0]} and on {other.lane} in {names[1]}")
        _check_same(f"a wait of {task.id} for", task.after, other.after, names)


def _check_same(what: str, in_a: Iterable[object], in_b: Iterable[object], names: tuple[str, str]) -> None:
    """Raise an error that names the items that only one side has, in its order."""
    lists = [str(x) for x in in_a], [str(x) for x in in_b]
    for name, mine, others in ((names[0], lists[0], set(lists[1])), (names[1], lists[1], set(lists[0]))):
        alone = [text for text in mine if text not in others]
        if alone:
            more = f" and {len(alone) - 5} more" if len(alone) > 5 else ""
            raise _unlike(f"only {name} has {what} {', '.join(alone[:5])}{more}")


def _unlike(difference: str) -> InputError:
    return InputError(f"these are not runs of one schedule: {difference}; compare runs with the same lanes, tasks and waits")


# --- differences --------------------------------------------------------------------------------------------------


def _kinds(schedule: Schedule, a: _SteadyRun, b: _SteadyRun) -> tuple[KindDifference, ...]:
    members: dict[Kind, list[int]] = {}
    for i, task in enumerate(schedule.tasks):
        members.setdefault(task.id.kind, []).append(i)
    kinds = [
        KindDifference(
            kind=kind,
            tasks=len(tasks),
            mean_seconds=pair(a.took(tasks) / len(tasks), b.took(tasks) / len(tasks)),
            iteration_seconds=pair(a.took(tasks), b.took(tasks)),
            wait_seconds=pair(a.waited(tasks) / len(tasks), b.waited(tasks) / len(tasks)),
        )
        for kind, tasks in sorted(members.items(), key=lambda item: KIND_ORDER[item[0]])
    ]
    return tuple(sorted(kinds, key=lambda kind: -abs(kind.iteration_seconds.difference)))


def _worst_tasks(schedule: Schedule, a: _SteadyRun, b: _SteadyRun) -> tuple[TaskDifference, ...]:
    differences = [
        TaskDifference(str(task.id), task.lane, pair(a.took([i]), b.took([i]))) for i, task in enumerate(schedule.tasks)
    ]
    different = [task for task in differences if task.mean_seconds.difference]
    return tuple(sorted(different, key=lambda task: -abs(task.mean_seconds.difference))[:_WORST_TASKS])


def _idle(a: _SteadyRun, b: _SteadyRun) -> dict[Cause, Pair]:
    if not any(lane.name == GPU for lane in a.trace.schedule.lanes):
        return {}
    idle = [usage(run.trace, run.steady).idle_seconds for run in (a, b)]
    return {cause: pair(*(seconds[cause] for seconds in idle)) for cause in Cause}


def _lane(lane: str, tasks: list[int], a: _SteadyRun, b: _SteadyRun) -> LaneDifference:
    ids = [a.trace.schedule.tasks[i].id for i in tasks]
    neighbours = swapped = 0
    times: Counter[tuple[str, str]] = Counter()
    for first, then, back, is_swapped in _neighbours(tasks, a, b):
        neighbours += 1
        if is_swapped:
            swapped += 1
            times[_names(ids[first], ids[then], back)] += 1
    swaps = tuple(Swap(first, then, count) for (first, then), count in times.most_common(_NAMED_SWAPS))
    return LaneDifference(lane, pair(a.took(tasks), b.took(tasks)), neighbours, swapped, swaps)


def _neighbours(tasks: list[int], a: _SteadyRun, b: _SteadyRun) -> Iterator[tuple[int, int, int, bool]]:
    """Yield pairs that A ran directly in succession: places in ``tasks``, iterations between them, whether B swapped them.

    The windows may have different lengths: the shorter is repeated, as the steady state repeats.
    """
    cycles, firsts = (a.steady.cycle, b.steady.cycle), (a.steady.first, b.steady.first)
    same = [tuple(first + k % cycle for first, cycle in zip(firsts, cycles, strict=True)) for k in range(max(cycles))]
    start, end = a.start[:, tasks].ravel(), a.end[:, tasks].ravel()
    ran = np.lexsort((end, start)).tolist()
    for before, after in zip(ran, ran[1:], strict=False):
        # If two tasks without duration share an instant, their order is unknown.
        if (start[before], end[before]) == (start[after], end[after]):
            continue
        (iteration, first), (next_iteration, then) = divmod(before, len(tasks)), divmod(after, len(tasks))
        later = next_iteration - iteration
        for other in (in_b for in_a, in_b in same if in_a == iteration and 0 <= in_b + later < b.trace.iterations):
            x, y = (other, tasks[first]), (other + later, tasks[then])
            yield first, then, later, (b.start[y], b.end[y]) < (b.start[x], b.end[x])


def _names(first: TaskId, then: TaskId, later: int) -> tuple[str, str]:
    """Return the names of two tasks, the second ``later`` iterations after the first; the earlier iteration's has no suffix."""
    return f"{first}@+{-later}" if later < 0 else str(first), f"{then}@+{later}" if later > 0 else str(then)
