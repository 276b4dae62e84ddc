"""The most that a memory can hold, over all orders that a schedule allows, however long its tasks take.

The progress of an execution is one count per event: how often each task has started, and how often it has ended. A start
waits for ends, of its own iteration or of the one before, so the reachable counts are those that satisfy

    starts of v  <=  ends of u + back        for every edge and for the order of every fifo lane,
    ends of t    <=  starts of t,

The number of live instances of a buffer is the starts of its allocating task minus the ends of its freeing task. The worst
case is therefore the optimum of a linear program over differences. Its constraint matrix is a network matrix, so the optimum
is integral: the bound is exact, and its dual is a proof that is checked in integers. No window of iterations has to be chosen.

A lane runs one task at a time, and the instances of one task in turn. Nothing else about priority lanes is used: that two
of their tasks exclude each other could only lower the true worst case.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from autohete.analysis.occupancy import Lives, lives, sum_groups
from autohete.errors import check_fields, unknown_name
from autohete.schedule import Schedule
from autohete.schedule.order import order

#: Sums of whole numbers below this are exact in the solver's floating point.
_EXACT = 2**50


@dataclass(frozen=True, slots=True)
class WorstCase:
    """The most that one memory can hold.

    Args:
        memory: its name.
        capacity_bytes: its capacity.
        peak_bytes: the most that any order of the schedule's tasks occupies; None if there is no limit.
        task: the first lane's latest task at the peak; without a limit, the task whose free may lag ever further behind.
        holders: contents at the peak, largest first: buffer group -> bytes. Empty without a limit.
    """

    memory: str
    capacity_bytes: int
    peak_bytes: int | None
    task: str
    holders: dict[str, int]

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def fits(self) -> bool:
        """Whether no execution exceeds the capacity."""
        return self.peak_bytes is not None and self.peak_bytes <= self.capacity_bytes


def worst_case(schedule: Schedule, memory: str) -> WorstCase:
    """Compute the most bytes of ``memory`` that any execution of ``schedule``, which must be valid, can occupy.

    Raises:
        InputError: the schedule has no such memory.
    """
    capacities = {m.name: m.capacity_bytes for m in schedule.memories}
    if memory not in capacities:
        raise unknown_name("memory", memory, capacities)
    peak, task, holders = schedule.once(_worst, memory)
    return WorstCase(memory, capacities[memory], peak, task, dict(holders))


def _worst(schedule: Schedule, memory: str) -> tuple[int | None, str, dict[str, int]]:
    """Peak, task and holders of the worst case, which durations and capacities do not change."""
    buffers, tasks = lives(schedule, memory), len(schedule.tasks)
    component = schedule.once(_components)
    # The freeing task waits for the allocating one; if later allocations wait for it, both are in one component.
    freed = zip(buffers.allocates, buffers.frees, buffers.sizes, strict=True)
    lagging = next((f for a, f, size in freed if size and component[a] != component[f]), None)
    if lagging is not None:
        return None, str(schedule.tasks[lagging].id), {}
    # Where floating point would not be exact, sizes are rounded up to a unit: the bound still holds.
    unit = max(1, -(-sum(buffers.sizes) // _EXACT))
    counts = _most(buffers, tasks, unit, schedule.once(_constraints)) if any(buffers.sizes) else [0] * (2 * tasks)
    held = list(buffers.resident)
    for a, f, back, size, group in zip(
        buffers.allocates, buffers.frees, buffers.backs, buffers.sizes, buffers.groups, strict=True
    ):
        alive = counts[a] - counts[tasks + f] + back
        held.append((group, alive * -(-size // unit) * unit))
    holders = {group: size for group, size in sum_groups(held).items() if size}
    first = [i for i, task in enumerate(schedule.tasks) if task.lane == schedule.lanes[0].name]
    last = max(first, key=lambda i: (counts[i], i), default=None)
    task = "" if last is None else str(schedule.tasks[last].id)
    return sum(holders.values()), task, holders


def _components(schedule: Schedule) -> list[int]:
    """For each task, which of those it is among that each wait for all others, in this iteration or another."""
    edges, tasks = order(schedule), len(schedule.tasks)
    if not edges:
        return [0] * tasks
    u, v, _ = zip(*edges, strict=True)
    graph = csr_array((np.ones(len(edges), bool), (u, v)), shape=(tasks, tasks))
    found: list[int] = connected_components(graph, connection="strong")[1].tolist()
    return found


def _constraints(schedule: Schedule) -> tuple[list[tuple[int, int, int]], csr_array]:
    """What the order demands of how often each task has started, then how often each has ended: each row (above, below, limit)
    lets one count exceed another by at most the limit. The same as a matrix, without the limits.
    """
    tasks = len(schedule.tasks)
    rows = [(v, tasks + u, back) for u, v, back in order(schedule)] + [(tasks + i, i, 0) for i in range(tasks)]
    above, below, _ = (np.array(column) for column in zip(*rows, strict=True))
    places = np.arange(len(rows))
    entries = np.repeat([1.0, -1.0], len(rows)), (np.tile(places, 2), np.concatenate([above, below]))
    return rows, csr_array(entries, shape=(len(rows), 2 * tasks))


def _most(buffers: Lives, tasks: int, unit: int, constraints: tuple[list[tuple[int, int, int]], csr_array]) -> list[int]:
    """Return how often each task has started, then how often each has ended, at the worst case."""
    weights = [0] * (2 * tasks)
    for a, f, size in zip(buffers.allocates, buffers.frees, buffers.sizes, strict=True):
        weights[a] += -(-size // unit)
        weights[tasks + f] -= -(-size // unit)
    rows, matrix = constraints
    limits = np.array([limit for _, _, limit in rows])
    solved = linprog(-np.array(weights, float), A_ub=matrix, b_ub=limits, bounds=(None, None), method="highs")
    assert solved.status == 0, f"the bound of a valid schedule exists, but: {solved.message}"
    counts, flow = ([round(x) for x in column] for column in (solved.x, -solved.ineqlin.marginals))
    assert _proven(counts, flow, weights, rows), "the solver's optimum is whole and proven by its dual"
    return counts


def _proven(counts: list[int], flow: list[int], weights: list[int], rows: list[tuple[int, int, int]]) -> bool:
    """Whether ``counts`` satisfy all ``rows`` and ``flow`` proves that no others weigh more: duality, in exact arithmetic."""
    balance = [0] * len(weights)
    for amount, (above, below, _) in zip(flow, rows, strict=True):
        balance[above] += amount
        balance[below] -= amount
    kept = all(counts[above] - counts[below] <= limit for above, below, limit in rows)
    weight = sum(w * n for w, n in zip(weights, counts, strict=True))
    limit = sum(amount * limit for amount, (_, _, limit) in zip(flow, rows, strict=True))
    return kept and min(flow, default=0) >= 0 and balance == weights and weight == limit
