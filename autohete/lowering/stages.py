"""Pipelines: each rank computes some of the units, and sends what the next one needs.

A stage is lowered by itself, as if it were a whole model; a transfer is a task of both. :func:`joined` makes one schedule of
all stages. Its lanes and memories are named as :func:`autohete.analysis.ranks.every_rank` does it: ``gpu.1`` is that of rank 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from autohete.analysis.ranks import numbered
from autohete.lowering import durations
from autohete.lowering.builder import Builder, on_gpu
from autohete.lowering.durations import Duration
from autohete.plan import PassOrder, Plan
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, SEND, TRANSFERS, Buffer, BufferId, Edge, Free, Kind, Lane, Task, TaskId, Value

if TYPE_CHECKING:
    from autohete.lowering.compute import Compute


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


def joined(stages: Sequence[tuple[Builder, list[int]]]) -> tuple[tuple[Task, ...], tuple[Duration, ...]]:
    """The tasks of all stages, each with its builder and issue order, and their durations."""
    found: dict[TaskId, Task] = {}
    lasting: dict[TaskId, Duration] = {}
    chains: list[list[TaskId]] = []
    for rank, (builder, order) in enumerate(stages):
        tasks = [_of_rank(task, rank) for task in builder.tasks(order)]
        chains.append([task.id for task in tasks])
        for task, duration in zip(tasks, builder.durations(order), strict=True):
            if (other := found.get(task.id)) is not None:  # a transfer: the sender's lane and time
                mine, yours = (task, other) if task.lane != _RECEIVE else (other, task)
                parts = (mine.after + yours.after, mine.allocates + yours.allocates, mine.frees + yours.frees)
                task = mine._replace(after=tuple(dict.fromkeys(parts[0])), allocates=parts[1], frees=parts[2])
            if task.lane != _RECEIVE:
                lasting.setdefault(task.id, duration)
            found[task.id] = task
    order_of_all = _merged(chains, found)
    return tuple(found[task] for task in order_of_all), tuple(lasting[task] for task in order_of_all)


def lane_of_rank(lane: Lane, rank: int) -> Lane:
    """The lane of one rank."""
    ends = lane.ends if rank or lane.source else None
    if ends is None:
        return replace(lane, name=numbered(lane.name, rank))
    source, target = (numbered(end, rank) if end == GPU_MEMORY else end for end in ends)
    return replace(lane, name=numbered(lane.name, rank), source=source, target=target)


#: The lane of a transfer where it is received. It is no lane of a schedule.
_RECEIVE = "receive"


class Transfers:
    """Adds the transfers of a stage to its builder: what it receives before a pass, and what it sends after one.

    Args:
        builder: collects the tasks.
        profile: sizes.
        compute: the passes, which use what is received and make what is sent.
        stage: the units of the stage.
    """

    def __init__(self, builder: Builder, profile: Profile, compute: Compute, stage: PipelineStage) -> None:
        self._builder, self._profile, self._compute, self._stage = builder, profile, compute, stage

    def before(self, task: TaskId) -> TaskId | None:
        """Receive what the pass ``task`` needs from another rank. Returns the transfer, if any."""
        stage, unit, m = self._stage, task.unit, task.micro_batch
        if task.kind is Kind.FORWARD and unit == stage.first and stage.rank:
            receive = self._add(Kind.SEND_INPUT, unit, m, stage.rank - 1, stage.rank)
            self._compute.receive_input(receive)
            return receive
        if task.kind is Kind.BACKWARD and unit == stage.last and not stage.is_last:
            receive = self._add(Kind.SEND_INPUT_GRADIENT, unit + 1, m, stage.rank + 1, stage.rank)
            size = self._profile.units[unit + 1].input_bytes
            self._builder.allocate(receive, on_gpu(Value.INPUT_GRADIENT, unit + 1, m), size)
            return receive
        return None

    def after(self, task: TaskId) -> None:
        """Send what the pass ``task`` has made to the rank that needs it."""
        stage, unit, m = self._stage, task.unit, task.micro_batch
        if task.kind is Kind.FORWARD and unit == stage.last and not stage.is_last:
            send = self._add(Kind.SEND_INPUT, unit + 1, m, stage.rank, stage.rank + 1)
            self._compute.send_input(send)
        elif task.kind is Kind.BACKWARD and unit == stage.first and stage.rank and unit > self._profile.first_trained:
            send = self._add(Kind.SEND_INPUT_GRADIENT, unit, m, stage.rank, stage.rank - 1)
            self._builder.free(send, on_gpu(Value.INPUT_GRADIENT, unit, m))
        else:
            return
        self._builder.after(send, task)

    def _add(self, kind: Kind, unit: int, micro_batch: int, sender: int, receiver: int) -> TaskId:
        """Add a transfer, on the lane of the sender or on none."""
        seconds = durations.transfer(self._profile.units[unit].input_bytes, sender, receiver)
        lane = SEND if sender == self._stage.rank else _RECEIVE
        return self._builder.add(TaskId(kind, unit, micro_batch, sender), lane, seconds)


def _of_rank(task: Task, rank: int) -> Task:
    return task._replace(
        id=_id_of_rank(task.id, rank),
        lane=task.lane if task.lane == _RECEIVE else numbered(task.lane, rank),
        after=tuple(Edge(_id_of_rank(edge.task, rank), edge.back) for edge in task.after),
        allocates=tuple(Buffer(buffer_of_rank(buffer.id, rank), buffer.size_bytes) for buffer in task.allocates),
        frees=tuple(Free(buffer_of_rank(free.id, rank), free.back) for free in task.frees),
    )


def _id_of_rank(task: TaskId, rank: int) -> TaskId:
    return task if task.kind in TRANSFERS else task._replace(rank=rank)


def buffer_of_rank(buffer: BufferId, rank: int) -> BufferId:
    """The buffer of one rank. Ranks have the host in common."""
    own = buffer.memory == GPU_MEMORY
    return buffer._replace(memory=numbered(buffer.memory, rank if own else 0), rank=rank)


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
