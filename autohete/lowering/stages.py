"""Pipelines: each rank computes stages of consecutive units, and sends what the rank of the next stage needs.

A rank is lowered by itself, as if its units were a whole model; a transfer (``transfers.py``) is a task of both of its ends.
:func:`joined` makes one schedule of all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import zip_longest
from typing import NamedTuple

from autohete.analysis.ranks import Ranks
from autohete.lowering.builder import Builder
from autohete.lowering.durations import Duration
from autohete.plan import DealtStage, PassOrder, Plan
from autohete.profile import Profile
from autohete.schedule import Edge, Free, Task, TaskId


class StageTurn(NamedTuple):
    """The passes of a stage for one micro-batch: its forwards, or what its backward computes."""

    is_forward: bool
    stage: range
    micro_batch: int


@dataclass(frozen=True, slots=True)
class PipelineRank:
    """What one rank computes.

    Args:
        rank: its index.
        stages: the units of each of its stages, the lowest stage first; of dealt stages, those whose backward it computes.
        turns: their passes in order.
        visits: of dealt stages, the number of turns in each, in order.
    """

    rank: int
    stages: tuple[range, ...]
    turns: tuple[StageTurn, ...]
    visits: tuple[int, ...] = ()

    @property
    def units(self) -> tuple[int, ...]:
        """Its units, lowest first."""
        return tuple(unit for stage in self.stages for unit in stage)


def of_one_rank(profile: Profile, plan: Plan) -> Profile:
    """The profile of the GPUs that compute the same units: all, or those with the same place in pipelines side by side."""
    if plan.ranks == 1:
        return profile
    return replace(profile, hardware=replace(profile.hardware, gpus=profile.hardware.gpus // plan.ranks))


def ranks_of(plan: Plan, micro_batches: int) -> list[PipelineRank]:
    """What each rank of a pipeline computes; a single one if every rank computes all units."""
    if plan.dealt is not None:
        dealt = plan.dealt.turns(len(plan.units))
        return [_dealt(rank, [stage for stage, its in dealt if its == rank], micro_batches) for rank in range(plan.ranks)]
    ranks, found = plan.ranks, []
    at_once = plan.is_pipeline and plan.pass_order is PassOrder.ALL_FORWARDS_FIRST
    for rank in range(ranks):
        mine = plan.stages[rank::ranks]
        turns = _turns(rank, ranks, mine, micro_batches, at_once=at_once)
        found.append(PipelineRank(rank, mine, turns))
    return found


def _dealt(rank: int, mine: Sequence[DealtStage], micro_batches: int) -> PipelineRank:
    """What a rank computes that is dealt these stages: each for all micro-batches."""
    visits = [
        [
            StageTurn(is_forward, stage.units, m)
            for m in range(micro_batches)
            for is_forward in (True, False)
            if (stage.forward if is_forward else stage.backward)
        ]
        for stage in mine
    ]
    ends = tuple(sorted((stage.units for stage in mine if stage.backward), key=lambda units: units.start))
    return PipelineRank(rank, ends, tuple(turn for turns in visits for turn in turns), tuple(map(len, visits)))


def _turns(rank: int, ranks: int, mine: Sequence[range], micro_batches: int, *, at_once: bool) -> tuple[StageTurn, ...]:
    """The passes of a rank in order.

    A group of micro-batches passes through one of its stages after the other: forward from the lowest, backward from the
    highest. After the forwards with which the rank fills the pipeline, backwards alternate with the forwards that are left
    (github NVIDIA/Megatron-LM at d98e8a64, ``megatron/core/pipeline_parallel/schedules.py``: ``get_schedule_table``,
    ``get_pp_rank_microbatches``).
    """
    size = micro_batches if at_once else ranks
    groups = [range(m, min(m + size, micro_batches)) for m in range(0, micro_batches, size)]
    forwards = [StageTurn(True, stage, m) for group in groups for stage in mine for m in group]
    backwards = [StageTurn(False, stage, m) for group in groups for stage in reversed(mine) for m in group]
    filling = (ranks - rank - 1) * min(len(mine), 2) + (len(mine) - 1) * ranks
    ahead = len(forwards) if at_once else filling
    steady = zip_longest(forwards[ahead:], backwards)
    return (*forwards[:ahead], *(turn for turns in steady for turn in turns if turn))


def joined(stages: Sequence[tuple[Builder, list[int]]], ranks: Ranks) -> tuple[tuple[Task, ...], tuple[Duration, ...]]:
    """The tasks of all ranks, each with its builder and issue order, and their durations."""
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
    for rank, (builder, _) in enumerate(stages):
        for waiting, before, owner, back in builder.waits_elsewhere:
            one, edge = found[ranks.task_id(waiting, rank)], Edge(ranks.task_id(before, owner), back)
            found[one.id] = one._replace(after=tuple(dict.fromkeys((*one.after, edge))))
        for freeing, buffer, owner in builder.frees_elsewhere:
            one = found[ranks.task_id(freeing, rank)]
            found[one.id] = one._replace(frees=(*one.frees, Free(ranks.buffer_id(buffer, owner))))
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
    """An order of all tasks that keeps that of each rank on its lanes, and every wait within an iteration."""
    before: defaultdict[TaskId, set[TaskId]] = defaultdict(set)
    for rank, chain in enumerate(chains):
        latest: dict[str, TaskId] = {}
        for task in chain:
            lane = tasks[task].lane
            if task.rank != rank:  # received: the sender has the lane
                continue
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
