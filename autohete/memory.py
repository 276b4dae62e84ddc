"""How full each memory is over time: one pure function of a trace, for both executors.

Memory is checked, not waited for: a real allocator does not wait, it fails.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from autohete.errors import unknown_name
from autohete.trace import Nanoseconds, Trace


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """One memory over time.

    Args:
        memory: its name.
        capacity_bytes: what it holds.
        times_ns: instants of change; ``bytes_used[k]`` holds from ``times_ns[k]`` until the next.
        bytes_used: occupied bytes.
        peak_bytes: the most of them.
        peak_ns: the first instant of the peak.
        holders: what occupies the peak, largest first: buffer group -> bytes (``activations`` for ``activations.3``).
        task: the instance whose allocation made the peak, empty if nothing is allocated.
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


def group_of(buffer: str) -> str:
    """``activations.3`` belongs to ``activations``."""
    return re.sub(r"\.\d+$", "", buffer)


def occupancy(trace: Trace, memory: str) -> Occupancy:
    """The bytes of ``memory`` that ``trace`` occupies over time.

    A buffer lives from the start of the task that allocates it to the end of the task that frees it. At one instant what
    ends is freed before what begins is allocated. Buffers that an iteration frees for its predecessor are there from
    the beginning.
    """
    schedule = trace.schedule
    capacities = {m.name: m.capacity_bytes for m in schedule.memories}
    if memory not in capacities:
        raise unknown_name("memory", memory, capacities)
    capacity = capacities[memory]
    freed = {free.name: (i, free.back) for i, task in enumerate(schedule.tasks) for free in task.frees}
    base = [buffer for buffer in schedule.resident if buffer.memory == memory]
    columns: list[tuple[int, int, int, int, str]] = []  # allocating task, freeing task, back, bytes, group
    for i, task in enumerate(schedule.tasks):
        for buffer in task.allocates:
            if buffer.memory == memory:
                columns.append((i, *freed[buffer.name], buffer.size_bytes, group_of(buffer.name)))
    iterations = trace.iterations
    births, deaths, sizes = [], [], []
    for allocates, frees, back, size, _ in columns:
        first, last = trace.start_ns[:, allocates], trace.end_ns[:, frees]
        if back:  # the first one was there before the run, the last one outlives it
            first = np.concatenate([[-1], first])
            last = np.concatenate([last, [np.iinfo(np.int64).max]])
        births.append(first)
        deaths.append(last)
        sizes.append(np.full(len(first), size, np.int64))
    resident = sum(buffer.size_bytes for buffer in base)
    if not columns:
        groups = sum_groups([(group_of(buffer.name), buffer.size_bytes) for buffer in base])
        zero = np.zeros(1, np.int64)
        return Occupancy(memory, capacity, zero, zero + resident, resident, 0, groups, "")
    birth, death, size_of = (np.concatenate(parts) for parts in (births, deaths, sizes))
    times = np.concatenate([birth, death])
    # 0: the end of something older; 1: a birth; 2: the end of something born in this very instant.
    order = np.concatenate([np.ones(len(birth), np.int64), np.where(death > birth, 0, 2)])
    change = np.concatenate([size_of, -size_of])
    rank = np.lexsort((order, times))
    keep = times[rank] < np.iinfo(np.int64).max
    times, used = times[rank][keep], resident + np.cumsum(change[rank][keep])
    peak_at = int(used.argmax())
    peak_ns, peak = int(times[peak_at]), int(used[peak_at])
    held, newest = _holders(trace, columns, peak_ns, iterations)
    groups = sum_groups([*((group_of(b.name), b.size_bytes) for b in base), *held.items()])
    if times[0] > 0:  # until the first allocation there is what is resident
        times, used = np.concatenate([[0], times]), np.concatenate([[resident], used])
    return Occupancy(memory, capacity, *_last_of_instant(np.maximum(times, 0), used), peak, max(peak_ns, 0), groups, newest)


def _last_of_instant(times: Nanoseconds, used: Nanoseconds) -> tuple[Nanoseconds, Nanoseconds]:
    """One value per instant: the one that holds afterwards."""
    last = np.flatnonzero(np.diff(times, append=times[-1] + 1))
    return times[last], used[last]


def _holders(
    trace: Trace, columns: list[tuple[int, int, int, int, str]], at_ns: int, iterations: int
) -> tuple[dict[str, int], str]:
    held: list[tuple[str, int]] = []
    newest = ""
    for allocates, frees, back, size, group in columns:
        for iteration in range(-back, iterations):
            birth = int(trace.start_ns[iteration, allocates]) if iteration >= 0 else -1
            ends = iteration + back
            death = int(trace.end_ns[ends, frees]) if ends < iterations else np.iinfo(np.int64).max
            if birth <= at_ns and (death > at_ns or birth == death == at_ns):
                held.append((group, size))
                if birth == at_ns:
                    newest = trace.schedule.tasks[allocates].id.at(iteration)
    return sum_groups(held), newest


def sum_groups(items: list[tuple[str, int]]) -> dict[str, int]:
    """Bytes per group, the largest first."""
    sums: dict[str, int] = {}
    for group, size in items:
        sums[group] = sums.get(group, 0) + size
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
