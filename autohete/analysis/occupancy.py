"""Occupancy of each memory over time: one pure function of a trace, for both executors.

Memory is checked, not waited for: a real allocator fails instead of waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autohete.errors import unknown_name
from autohete.execution.trace import Nanoseconds, Trace
from autohete.schedule import Schedule
from autohete.schedule.order import order, topological

#: After every instant.
_NEVER = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """One memory over time.

    Args:
        memory: its name.
        capacity_bytes: what it holds.
        times_ns: instants of change; ``bytes_used[k]`` holds from ``times_ns[k]`` until the next.
        bytes_used: occupied bytes.
        peak_bytes: maximum of ``bytes_used``.
        peak_ns: the first instant of the peak.
        holders: contents at the peak, largest first: buffer group -> bytes (``activations`` for ``activations.3``).
        task: the instance whose allocation reached the peak; empty if nothing is allocated.
    """

    memory: str
    capacity_bytes: int
    times_ns: Nanoseconds
    bytes_used: Nanoseconds
    peak_bytes: int
    peak_ns: int
    holders: dict[str, int]
    task: str

    @property
    def fits(self) -> bool:
        """Whether the peak stays within the capacity."""
        return self.peak_bytes <= self.capacity_bytes


@dataclass(frozen=True, slots=True)
class Lives:
    """Lifetimes of the buffers of one memory: the tasks that allocate and free each, and what is always resident.

    Args:
        allocates, frees: task indices, one per buffer.
        backs: 1 where a buffer is freed in the iteration after the one that allocates it.
        sizes: bytes.
        groups: buffer groups.
        resident: group and bytes of buffers that are never freed.
    """

    allocates: list[int]
    frees: list[int]
    backs: list[int]
    sizes: list[int]
    groups: list[str]
    resident: list[tuple[str, int]]


def lives(schedule: Schedule, memory: str) -> Lives:
    """Return the lifetimes of the buffers of ``memory`` and its parts."""
    within = schedule.within(memory)
    freed = {free.id: (i, free.back) for i, task in enumerate(schedule.tasks) for free in task.frees}
    found = Lives([], [], [], [], [], [(b.id.group, b.size_bytes) for b in schedule.resident if b.memory in within])
    for i, task in enumerate(schedule.tasks):
        for buffer in task.allocates:
            if buffer.memory in within:
                end, back = freed[buffer.id]
                found.allocates.append(i)
                found.frees.append(end)
                found.backs.append(back)
                found.sizes.append(buffer.size_bytes)
                found.groups.append(buffer.id.group)
    return found


def occupancy(trace: Trace, memory: str) -> Occupancy:
    """Compute the bytes of ``memory`` that ``trace`` occupies over time.

    A buffer lives from the start of the task that allocates it to the end of the task that frees it. Within one instant,
    frees come before allocations. Buffers that an iteration frees for its predecessor exist from the beginning.
    """
    schedule = trace.schedule
    capacities = {m.name: m.capacity_bytes for m in schedule.memories}
    if memory not in capacities:
        raise unknown_name("memory", memory, capacities)
    capacity, found = capacities[memory], lives(schedule, memory)
    resident = sum(size for _, size in found.resident)
    if not found.sizes:
        zero = np.zeros(1, np.int64)
        return Occupancy(memory, capacity, zero, zero + resident, resident, 0, sum_groups(found.resident), "")
    birth, death = _events(found, trace.start_ns, trace.end_ns)
    lived = [trace.iterations + back for back in found.backs]
    buffer = np.repeat(np.arange(len(lived)), lived)
    if (birth == death).any():  # then time alone does not order the events of one instant
        begun, ended = _events(found, *event_order(schedule, trace.start_ns, trace.end_ns))
    else:
        begun, ended = np.ones_like(birth), np.zeros_like(death)
    times, size_of = np.concatenate([birth, death]), np.array(found.sizes, np.int64)[buffer]
    rank = np.lexsort((np.concatenate([begun, ended]), times))
    used = resident + np.cumsum(np.concatenate([size_of, -size_of])[rank])
    times = times[rank]
    peak_at = int(used.argmax())
    peak_ns, peak = int(times[peak_at]), int(used[peak_at])
    place = np.empty(len(rank), np.int64)
    place[rank] = np.arange(len(rank))
    held = np.flatnonzero((place[: len(birth)] <= peak_at) & (place[len(birth) :] > peak_at))
    holders = sum_groups([*found.resident, *((found.groups[buffer[i]], found.sizes[buffer[i]]) for i in held)])
    last = int(rank[peak_at])  # the event that reaches the peak is a birth
    iteration = last - int(np.searchsorted(buffer, buffer[last])) - found.backs[buffer[last]]
    task = schedule.tasks[found.allocates[buffer[last]]].id.at(iteration)
    times, used = times[times < _NEVER], used[times < _NEVER]
    if times[0] > 0:  # until the first allocation only resident buffers exist
        times, used = np.concatenate([[0], times]), np.concatenate([[resident], used])
    return Occupancy(memory, capacity, *_last_of_instant(np.maximum(times, 0), used), peak, max(peak_ns, 0), holders, task)


def _events(found: Lives, starts: Nanoseconds, ends: Nanoseconds) -> tuple[Nanoseconds, Nanoseconds]:
    """Return the times at which each buffer of each iteration is born and dies, buffer by buffer.

    If a buffer is freed in the next iteration, its first instance exists before the run, and its last one outlives the run.
    """
    backs = np.array(found.backs, bool)
    first, last = np.full((len(backs), 1), -1), np.full((len(backs), 1), _NEVER)
    births = np.concatenate([first, starts.T[found.allocates]], axis=1)
    deaths = np.concatenate([ends.T[found.frees], last], axis=1)
    born, dead = np.ones(births.shape, bool), np.ones(deaths.shape, bool)
    born[:, 0] = dead[:, -1] = backs
    return births[born], deaths[dead]


def _last_of_instant(times: Nanoseconds, used: Nanoseconds) -> tuple[Nanoseconds, Nanoseconds]:
    """Keep one value per instant: the last one."""
    last = np.flatnonzero(np.diff(times, append=times[-1] + 1))
    return times[last], used[last]


def sum_groups(items: list[tuple[str, int]]) -> dict[str, int]:
    """Return the bytes per group, largest first."""
    sums: dict[str, int] = {}
    for group, size in items:
        sums[group] = sums.get(group, 0) + size
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def event_order(schedule: Schedule, start: Nanoseconds, end: Nanoseconds) -> tuple[Nanoseconds, Nanoseconds]:
    """Return the starts and ends of an execution as places in one total order.

    Within one instant, tasks that have run for a while end first; then tasks start in the order of their waits, and those
    without duration end immediately.

    Args:
        schedule: what was executed.
        start, end: when each task did, shape (iterations, tasks).
    """
    iterations, tasks = start.shape
    turn = np.empty(tasks, np.int64)
    turn[topological(tasks, order(schedule))] = np.arange(tasks)
    times = np.stack([start, end])
    later = np.stack([np.ones_like(start), (end == start).astype(np.int64)])
    iteration = np.broadcast_to(np.arange(iterations)[None, :, None], times.shape)
    ends = np.broadcast_to(np.arange(2)[:, None, None], times.shape)
    keys = (ends, np.broadcast_to(turn, times.shape), iteration, later, times)
    found = np.empty(times.size, np.int64)
    found[np.lexsort([key.ravel() for key in keys])] = np.arange(times.size)
    starts, stops = found.reshape(times.shape)
    return starts, stops
