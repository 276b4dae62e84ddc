"""Occupancy of each memory over time: one pure function of a trace, for both executors.

Memory is checked, not waited for: a real allocator fails instead of waiting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import itemgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autohete.errors import unknown_name
from autohete.execution.trace import Nanoseconds, Trace
from autohete.schedule import Buffer, BufferId, Discipline, Schedule
from autohete.schedule.order import order, topological

#: After every instant.
_NEVER = int(np.iinfo(np.int64).max)


class ReservedPeak(Protocol):
    """What an allocator takes from a memory; see :class:`autohete.analysis.allocator.ReservedMemory`."""

    @property
    def peak_bytes(self) -> int:
        """The most that is taken at a time."""

    @property
    def retries(self) -> int:
        """How often it is full until something is given back."""

    @property
    def expanded_bytes(self) -> int:
        """The most that is taken with ``expandable_segments``."""


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """One memory over time.

    Args:
        memory: its name.
        capacity_bytes: its capacity.
        times_ns: instants of change; ``bytes_used[k]`` holds from ``times_ns[k]`` until the next.
        bytes_used: occupied bytes.
        peak_bytes: maximum of ``bytes_used``.
        peak_ns: the first instant of the peak.
        holders: contents at the peak, largest first: buffer group -> bytes (``activations`` for ``activations.3``).
        task: the instance whose allocation reached the peak; empty if nothing is allocated.
        reservation: what an allocator takes from the memory for it; None: nothing more.
    """

    memory: str
    capacity_bytes: int
    times_ns: Nanoseconds
    bytes_used: Nanoseconds
    peak_bytes: int
    peak_ns: int
    holders: dict[str, int]
    task: str
    reservation: ReservedPeak | None = None

    @property
    def reserved_bytes(self) -> int:
        """The most that is taken from the memory at a time: of a GPU's, what PyTorch's allocator reserves."""
        return self.peak_bytes if self.reservation is None else self.reservation.peak_bytes

    @property
    def retries(self) -> int:
        """How often an allocator finds the memory full until it gives something back."""
        return 0 if self.reservation is None else self.reservation.retries

    @property
    def expanded_bytes(self) -> int:
        """The most that PyTorch's allocator takes from the memory with ``expandable_segments``."""
        return self.peak_bytes if self.reservation is None else self.reservation.expanded_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak stays within the capacity."""
        return self.peak_bytes <= self.capacity_bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Instances:
    """The buffers of :class:`Lives` in a number of iterations, one after the other, for arithmetic on all of them.

    Args:
        buffer: of each instance, which of the buffers it is.
        sizes: bytes of each instance.
        allocates, frees: tasks that allocate and free the buffers.
        born, dead: shape (buffers, iterations + 1): which of the starts and ends, with those before and after the run, count.
    """

    buffer: Nanoseconds
    sizes: Nanoseconds
    allocates: Nanoseconds
    frees: Nanoseconds
    born: NDArray[np.bool_]
    dead: NDArray[np.bool_]


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
    return schedule.once(_lives, memory)


def _lives(schedule: Schedule, memory: str) -> Lives:
    within, (allocated, freed) = schedule.within(memory), schedule.once(_buffers)
    buffers = Lives([], [], [], [], [], [(b.id.group, b.size_bytes) for b in schedule.resident if b.memory in within])
    for i, buffer in sorted(chain.from_iterable(allocated[one] for one in within), key=itemgetter(0)):
        end, back = freed[buffer.id]
        buffers.allocates.append(i)
        buffers.frees.append(end)
        buffers.backs.append(back)
        buffers.sizes.append(buffer.size_bytes)
        buffers.groups.append(buffer.id.group)
    return buffers


def _buffers(schedule: Schedule) -> tuple[defaultdict[str, list[tuple[int, Buffer]]], dict[BufferId, tuple[int, int]]]:
    """What is allocated in each memory, with the task that does so; and for each buffer, which task frees it, and how many
    iterations later.
    """
    allocated: defaultdict[str, list[tuple[int, Buffer]]] = defaultdict(list)
    for i, task in enumerate(schedule.tasks):
        for buffer in task.allocates:
            allocated[buffer.memory].append((i, buffer))
    return allocated, {free.id: (i, free.back) for i, task in enumerate(schedule.tasks) for free in task.frees}


def unavoidable_bytes(schedule: Schedule, memory: str) -> int:
    """Return how much of ``memory`` every execution of ``schedule``, which must be valid, occupies at some time.

    What the tasks of one fifo lane allocate and free among themselves has one peak, however long they take.
    """
    return schedule.once(_unavoidable_bytes, memory)


def _unavoidable_bytes(schedule: Schedule, memory: str) -> int:
    buffers, tasks, peaks = lives(schedule, memory), schedule.tasks, [0]
    of_lanes: defaultdict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
    for life in zip(buffers.allocates, buffers.frees, buffers.backs, buffers.sizes, strict=True):
        if tasks[life[0]].lane == tasks[life[1]].lane:
            of_lanes[tasks[life[0]].lane].append(life)
    for lane in schedule.lanes:
        if lane.discipline is not Discipline.FIFO or lane.name not in of_lanes:
            continue
        place = {task: n for n, task in enumerate(schedule.tasks_of(lane.name))}
        changes = [0] * (len(place) + 1)  # at the start of each task
        for a, f, back, size in of_lanes[lane.name]:
            changes[0] += back * size
            changes[place[a]] += size
            changes[place[f] + 1] -= size
        peaks.append(max(accumulate(changes)))
    return max(peaks) + sum(size for _, size in buffers.resident)


def occupancy(trace: Trace, memory: str) -> Occupancy:
    """Compute the bytes of ``memory`` that ``trace`` occupies over time.

    A buffer lives from the start of the task that allocates it to the end of the task that frees it. Within one instant,
    frees come before allocations. Buffers that an iteration frees for its predecessor exist from the beginning.
    """
    schedule = trace.schedule
    capacities = {m.name: m.capacity_bytes for m in schedule.memories}
    if memory not in capacities:
        raise unknown_name("memory", memory, capacities)
    capacity, buffers = capacities[memory], lives(schedule, memory)
    resident = sum(size for _, size in buffers.resident)
    if not buffers.sizes:
        zero = np.zeros(1, np.int64)
        return Occupancy(memory, capacity, zero, zero + resident, resident, 0, sum_groups(buffers.resident), "")
    instances = schedule.once(_instances, memory, trace.iterations)
    buffer, size_of = instances.buffer, instances.sizes
    birth, times, rank = _ordered(trace, instances)
    used = resident + np.cumsum(np.concatenate([size_of, -size_of])[rank])
    times = times[rank]
    peak_at = int(used.argmax())
    peak_ns, peak = int(times[peak_at]), int(used[peak_at])
    place = np.empty(len(rank), np.int64)
    place[rank] = np.arange(len(rank))
    held = np.flatnonzero((place[: len(birth)] <= peak_at) & (place[len(birth) :] > peak_at))
    holders = sum_groups([*buffers.resident, *((buffers.groups[buffer[i]], buffers.sizes[buffer[i]]) for i in held)])
    last = int(rank[peak_at])  # the event that reaches the peak is a birth
    iteration = last - int(np.searchsorted(buffer, buffer[last])) - buffers.backs[buffer[last]]
    task = schedule.tasks[buffers.allocates[buffer[last]]].id.at(iteration)
    times, used = times[times < _NEVER], used[times < _NEVER]
    if times[0] > 0:  # until the first allocation only resident buffers exist
        times, used = np.concatenate([[0], times]), np.concatenate([[resident], used])
    return Occupancy(memory, capacity, *_last_of_instant(np.maximum(times, 0), used), peak, max(peak_ns, 0), holders, task)


def _ordered(trace: Trace, instances: _Instances) -> tuple[Nanoseconds, Nanoseconds, Nanoseconds]:
    """Return the times of births, those of births and then deaths, and the places of the latter in the order of events."""
    birth, death = _events(instances, trace.start_ns, trace.end_ns)
    if (birth == death).any():  # then time alone does not order the events of one instant
        begun, ended = _events(instances, *event_order(trace.schedule, trace.start_ns, trace.end_ns))
    else:
        begun, ended = np.ones_like(birth), np.zeros_like(death)
    times = np.concatenate([birth, death])
    return birth, times, np.lexsort((np.concatenate([begun, ended]), times))


def changes(trace: Trace, memory: str) -> Iterator[tuple[int, int, bool]]:
    """Iterate over the allocations and frees of ``memory`` in their order, as :func:`occupancy` adds them up.

    Yields:
        Which instance of a buffer, which of the buffers of :func:`lives`, and whether it is allocated. Those that outlive the
        run are not freed.
    """
    if not lives(trace.schedule, memory).sizes:
        return
    instances = trace.schedule.once(_instances, memory, trace.iterations)
    birth, times, rank = _ordered(trace, instances)
    for event in rank[times[rank] < _NEVER].tolist():
        instance = event % len(birth)
        yield instance, int(instances.buffer[instance]), event < len(birth)


def contents(trace: Trace, memory: str) -> tuple[Nanoseconds, dict[str, Nanoseconds]]:
    """Return what fills ``memory`` over time: instants of change, and the bytes of each buffer group from each of them on.

    The groups add up to :func:`occupancy`, at the same instants.
    """
    buffers, instances = lives(trace.schedule, memory), trace.schedule.once(_instances, memory, trace.iterations)
    birth, death = _events(instances, trace.start_ns, trace.end_ns)
    buffer = instances.buffer
    instants: Nanoseconds = np.unique(np.maximum(np.concatenate([[0], birth, death[death < _NEVER]]), 0))
    resident = sum_groups(buffers.resident)
    changes = {group: np.zeros(len(instants) + 1, np.int64) for group in dict.fromkeys([*resident, *buffers.groups])}
    for times, sign in ((birth, 1), (death, -1)):
        places = np.searchsorted(instants, np.maximum(times, 0))  # those that outlive the run are behind the last instant
        for each, place in zip(buffer.tolist(), places.tolist(), strict=True):
            changes[buffers.groups[each]][place] += sign * buffers.sizes[each]
    return instants, {group: resident.get(group, 0) + np.cumsum(some[:-1]) for group, some in changes.items()}


def _instances(schedule: Schedule, memory: str, iterations: int) -> _Instances:
    buffers = lives(schedule, memory)
    backs = np.array(buffers.backs, bool)
    buffer = np.repeat(np.arange(len(backs)), iterations + backs)
    born, dead = np.ones((len(backs), iterations + 1), bool), np.ones((len(backs), iterations + 1), bool)
    born[:, 0] = dead[:, -1] = backs
    sizes, allocates, frees = (np.array(some, np.int64) for some in (buffers.sizes, buffers.allocates, buffers.frees))
    return _Instances(buffer, sizes[buffer], allocates, frees, born, dead)


def _events(instances: _Instances, starts: Nanoseconds, ends: Nanoseconds) -> tuple[Nanoseconds, Nanoseconds]:
    """Return the times at which each buffer of each iteration is born and dies, buffer by buffer.

    If a buffer is freed in the next iteration, its first instance exists before the run, and its last one outlives the run.
    """
    buffers = (len(instances.frees), 1)
    births = np.concatenate([np.full(buffers, -1), starts.T[instances.allocates]], axis=1)
    deaths = np.concatenate([ends.T[instances.frees], np.full(buffers, _NEVER)], axis=1)
    return births[instances.born], deaths[instances.dead]


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
        schedule: the executed schedule.
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
    places = np.empty(times.size, np.int64)
    places[np.lexsort([key.ravel() for key in keys])] = np.arange(times.size)
    starts, stops = places.reshape(times.shape)
    return starts, stops
