"""Times of a schedule whose lanes are all fifo and never slow each other: each task begins when what it waits for has ended.

Then the order on each lane is fixed in advance: a task ends its duration after the latest of the ends that it waits for
(Baccelli et al. 1992, "Synchronization and Linearity", section 2.5). The times are those
that a discrete-event simulation finds, at a seventh to a tenth of the cost. The recurrence is linear in the max-plus algebra:
if all ends of an iteration are as much later than those of the iteration before, so are those of all further iterations.

A lane may get less than its demand even when it works alone, such as a place behind the host that is faster than its
memory. Its tasks are longer then, by a constant factor.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autohete.execution.sharing import FULL_RATE, Sharing
from autohete.execution.trace import Clock, Nanoseconds, Trace
from autohete.schedule import Discipline, Schedule, graph_of
from autohete.schedule.order import order, topological

#: A task, its lane, and the tasks that it waits for: of its iteration and of the one before.
Step = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def undisturbed_trace(schedule: Schedule, iterations: int) -> Trace | None:
    """Return the trace of ``iterations`` of a valid schedule; None if a lane goes by priority, or lanes slow each other."""
    if any(lane.discipline is not Discipline.FIFO for lane in schedule.lanes):
        return None
    sharing = Sharing(schedule)
    alone = {name: sharing.rates([name])[name] for name in sorted(sharing.lanes)}
    durations = [task.duration_ns for task in schedule.tasks]
    for name, rate in alone.items():
        if rate < FULL_RATE:
            for task in schedule.tasks_of(name):
                durations[task] = -(-durations[task] * FULL_RATE // rate)
    ready, end = _times(schedule.once(_steps), durations, len(schedule.lanes), iterations)
    start = end - np.array(durations, np.int64)
    if _is_slowed(schedule, sharing, alone, start, end):
        return None
    return Trace(schedule, Clock.SIMULATED, ready, start, end)


def _times(steps: list[Step], durations: list[int], lanes: int, iterations: int) -> tuple[Nanoseconds, Nanoseconds]:
    """When each task is ready and ends, shape (iterations, tasks)."""
    tasks = len(durations)
    free, then = [0] * lanes, [0] * tasks
    ready_ns, ended_ns = np.empty((iterations, tasks), np.int64), np.empty((iterations, tasks), np.int64)
    for iteration in range(iterations):
        ready, now = [0] * tasks, [0] * tasks
        for task, lane, same, previous in steps:
            at = 0
            for before in same:
                if now[before] > at:
                    at = now[before]
            for before in previous:
                if then[before] > at:
                    at = then[before]
            ready[task] = at
            if free[lane] > at:
                at = free[lane]
            now[task] = free[lane] = at + durations[task]
        ready_ns[iteration], ended_ns[iteration] = ready, now
        then = now
        if iteration:
            later = ended_ns[iteration] - ended_ns[iteration - 1]
            if (later == later.max(initial=0)).all():
                further = later * np.arange(1, iterations - iteration)[:, None]
                ended_ns[iteration + 1 :] = ended_ns[iteration] + further
                never = [task for task, _, same, previous in steps if not (same or previous)]
                further[:, never] = 0  # what waits for nothing is ready from the beginning
                ready_ns[iteration + 1 :] = ready_ns[iteration] + further
                break
    return ready_ns, ended_ns


def _steps(schedule: Schedule) -> list[Step]:
    """The tasks of an iteration, each after all that it waits for."""
    graph = graph_of(schedule)
    same: list[list[int]] = [[] for _ in schedule.tasks]
    previous: list[list[int]] = [[] for _ in schedule.tasks]
    for before, successors in enumerate(graph.successors):
        for task, back in successors:
            (previous if back else same)[task].append(before)
    turns = topological(len(schedule.tasks), order(schedule))
    return [(task, graph.lane[task], tuple(same[task]), tuple(previous[task])) for task in turns]


def _is_slowed(schedule: Schedule, sharing: Sharing, alone: Mapping[str, int], start: Nanoseconds, end: Nanoseconds) -> bool:
    """Whether lanes that share bandwidth ever work at the same time and get another rate than each gets ``alone``."""
    if not alone:
        return False
    spans = []
    for name in alone:
        tasks = schedule.tasks_of(name)
        begun, ended = start[:, tasks].ravel(), end[:, tasks].ravel()
        lasting = ended > begun  # what takes no time slows nothing
        spans.append((begun[lasting], ended[lasting]))
    begins = np.concatenate([begun for begun, _ in spans])  # a set of lanes that work together begins with one of them
    active = np.zeros(len(begins), np.int64)
    for bit, (begun, ended) in enumerate(spans):
        active |= (np.searchsorted(begun, begins, "right") > np.searchsorted(ended, begins, "right")).astype(np.int64) << bit
    together = ([name for bit, name in enumerate(alone) if some >> bit & 1] for some in np.unique(active).tolist())
    return any(rate != alone[name] for some in together for name, rate in sharing.rates(some).items())
