"""Pipelines: each rank computes some of the units, and sends what the next one needs.

A stage is lowered by itself, as if it were a whole model; a transfer (``transfers.py``) is a task of both. :func:`joined` makes
one schedule of all stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from autohete.analysis.ranks import Ranks
from autohete.lowering.builder import Builder
from autohete.lowering.durations import Duration
from autohete.plan import PassOrder, Plan
from autohete.schedule import Task, TaskId


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """The units that one rank computes.

    Args:
        rank: its index.
        first, last: its units.
        head: the last unit of the model.
        forwards_ahead: how many forwards precede the first backward at most.
    """

    rank: int
    first: int
    last: int
    head: int
    forwards_ahead: int = 1

    @property
    def units(self) -> range:
        """Its units, lowest first."""
        return range(self.first, self.last + 1)

    @property
    def is_last(self) -> bool:
        """Whether it has the head, and so the loss."""
        return self.last == self.head


def stages_of(plan: Plan, micro_batches: int) -> list[PipelineStage]:
    """The stages of a pipeline; a single one if every rank computes all units."""
    head, ranks = len(plan.units) - 1, plan.ranks
    stages = []
    for rank in range(ranks):
        units = [i for i, unit in enumerate(plan.units) if (unit.rank or 0) == rank]
        at_once = plan.pass_order is PassOrder.ALL_FORWARDS_FIRST and plan.is_pipeline
        stages.append(PipelineStage(rank, units[0], units[-1], head, micro_batches if at_once else ranks - rank))
    return stages


def joined(stages: Sequence[tuple[Builder, list[int]]], ranks: Ranks) -> tuple[tuple[Task, ...], tuple[Duration, ...]]:
    """The tasks of all stages, each with its builder and issue order, and their durations."""
    found: dict[TaskId, Task] = {}
    lasting: dict[TaskId, Duration] = {}
    chains: list[list[TaskId]] = []
    for rank, (builder, order) in enumerate(stages):
        tasks = [ranks.task(task, rank) for task in builder.tasks(order)]
        chains.append([task.id for task in tasks])
        for task, duration in zip(tasks, builder.durations(order), strict=True):
            sends = task.id.rank == rank  # all but a transfer that is received
            if sends:
                lasting[task.id] = duration
            other = found.get(task.id)
            found[task.id] = task if other is None else _of_both(*((task, other) if sends else (other, task)))
    order_of_all = _merged(chains, found)
    return tuple(found[task] for task in order_of_all), tuple(lasting[task] for task in order_of_all)


def _of_both(sent: Task, received: Task) -> Task:
    """A transfer, which waits for both of its ends, takes memory at one and frees it at the other. It runs where it is sent."""
    return sent._replace(
        after=tuple(dict.fromkeys(sent.after + received.after)),
        allocates=sent.allocates + received.allocates,
        frees=sent.frees + received.frees,
    )


def _merged(chains: Sequence[Sequence[TaskId]], tasks: dict[TaskId, Task]) -> list[TaskId]:
    """An order of all tasks that keeps that of each chain on its lanes, and every wait within an iteration."""
    before: defaultdict[TaskId, set[TaskId]] = defaultdict(set)
    for chain in chains:
        latest: dict[str, TaskId] = {}
        for task in chain:
            lane = tasks[task].lane
            if lane in latest:
                before[task].add(latest[lane])
            latest[lane] = task
    for one in tasks.values():
        before[one.id].update(edge.task for edge in one.after if not edge.back)
    after: defaultdict[TaskId, list[TaskId]] = defaultdict(list)
    for task, some in before.items():
        for earlier in some:
            after[earlier].append(task)
    places = {task: (place, rank) for rank, chain in reversed([*enumerate(chains)]) for place, task in enumerate(chain)}
    waits = {task: len(before[task]) for task in tasks}
    ready = [(places[task], task) for task, count in waits.items() if not count]
    heapify(ready)
    return [*_in_order(ready, after, waits, places)]


def _in_order(
    ready: list[tuple[tuple[int, int], TaskId]],
    after: defaultdict[TaskId, list[TaskId]],
    waits: dict[TaskId, int],
    places: dict[TaskId, tuple[int, int]],
) -> Iterator[TaskId]:
    while ready:
        _, task = heappop(ready)
        yield task
        for one in after[task]:
            waits[one] -= 1
            if not waits[one]:
                heappush(ready, (places[one], one))
