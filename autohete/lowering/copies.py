"""The copies of a plan as tasks: lane, duration and kind follow from what moves, from where to where."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from autohete.lowering import durations
from autohete.lowering.builder import Builder, task_id
from autohete.lowering.durations import Duration
from autohete.lowering.shards import Shards
from autohete.plan import Plan, UnitPlan
from autohete.plan.moves import Move, UnitSizes, When, moves
from autohete.profile import Profile
from autohete.schedule import (
    D2H,
    GPU_MEMORY,
    H2D,
    HOST_MEMORY,
    NVME_MEMORY,
    NVME_READ,
    NVME_WRITE,
    Kind,
    TaskId,
    Value,
)

#: The lane between two memories.
_LANES = {
    (HOST_MEMORY, GPU_MEMORY): H2D,
    (GPU_MEMORY, HOST_MEMORY): D2H,
    (NVME_MEMORY, HOST_MEMORY): NVME_READ,
    (HOST_MEMORY, NVME_MEMORY): NVME_WRITE,
}
#: The kind of task that copies a value from one memory to another; of parameters, also by the moment.
_KINDS = {
    (Value.ACTIVATIONS, D2H): Kind.OFFLOAD_ACTIVATIONS,
    (Value.ACTIVATIONS, H2D): Kind.FETCH_ACTIVATIONS,
    (Value.INPUT, D2H): Kind.OFFLOAD_ACTIVATIONS,
    (Value.INPUT, H2D): Kind.FETCH_ACTIVATIONS,
    (Value.GRADIENTS, D2H): Kind.OFFLOAD_GRADIENTS,
    (Value.GRADIENTS, H2D): Kind.FETCH_GRADIENTS,
    (Value.GRADIENTS, NVME_WRITE): Kind.WRITE_GRADIENTS,
    (Value.GRADIENTS, NVME_READ): Kind.READ_STATES,  # in one task
    (Value.OPTIMIZER_STATES, NVME_READ): Kind.READ_STATES,
    (Value.OPTIMIZER_STATES, H2D): Kind.FETCH_STATES,
    (Value.OPTIMIZER_STATES, D2H): Kind.WRITE_BACK_STATES,
    (Value.OPTIMIZER_STATES, NVME_WRITE): Kind.WRITE_STATES,
}
_KINDS_OF_PARAMETERS = {
    (When.BEFORE_FORWARD, H2D): Kind.PREFETCH_FORWARD,
    (When.BEFORE_BACKWARD, H2D): Kind.PREFETCH_BACKWARD,
    (When.AFTER_FORWARD, D2H): Kind.WRITE_BACK_FORWARD,
    (When.AFTER_UPDATE, D2H): Kind.WRITE_BACK_BACKWARD,
    (When.AFTER_UPDATE, H2D): Kind.REFRESH,
}
_Key = tuple[Kind, bool, bool, int]


class Copies:
    """Adds the copies of ``plan`` to a builder.

    Args:
        builder: collects the tasks.
        profile: the sizes of the values.
        plan: the decisions.
        shards: what several GPUs shard.
    """

    def __init__(self, builder: Builder, profile: Profile, plan: Plan, shards: Shards) -> None:
        self._builder = builder
        self._last = builder.passes[-1].micro_batch
        self._moves = [_by_kind(unit, shards.sizes(i), i >= profile.first_trained) for i, unit in enumerate(plan.units)]

    def find(self, kind: Kind, unit: int, micro_batch: int = 0, part: int = 0) -> Move | None:
        """Return the move that a copy of ``kind`` makes; None if the unit has no such copy in this micro-batch."""
        return self._moves[unit].get((kind, not micro_batch, micro_batch == self._last, part))

    def add(self, kind: Kind, unit: int, priority: int, micro_batch: int = 0, part: int = 0) -> TaskId:
        """Add the copy of ``kind``, which the unit makes, as a task on the lane between its memories."""
        move = self._moves[unit][kind, not micro_batch, micro_batch == self._last, part]
        task = task_id(kind, unit, micro_batch, again=part)
        return self._builder.add(task, lane_of(move), seconds_of(move), priority)


def lane_of(move: Move) -> str:
    """The lane between the memories of ``move``."""
    return _LANES[move.source, move.target]


def kind_of(move: Move) -> Kind:
    """The kind of task that makes ``move``."""
    lane = lane_of(move)
    return _KINDS_OF_PARAMETERS[move.when, lane] if move.value is Value.PARAMETERS else _KINDS[move.value, lane]


def seconds_of(move: Move) -> Duration:
    """How long ``move`` takes on an undisturbed lane."""
    lane = lane_of(move)
    if lane == H2D:
        return durations.to_gpu(move.size_bytes, pinned=move.pinned)
    if lane == D2H:
        return durations.to_host(move.size_bytes, pinned=move.pinned)
    return durations.on_drives(move.size_bytes, write=lane == NVME_WRITE)


@lru_cache(maxsize=2**10)  # most units of a plan are alike
def _by_kind(unit: UnitPlan, sizes: UnitSizes, has_backward: bool) -> dict[_Key, Move]:
    """The moves of a unit by the kind of their tasks, whether they are for the first and for the last micro-batch, and part.
    Updates have no micro-batch.
    """
    result: dict[_Key, Move] = {}
    for move in moves(unit, sizes, has_backward=has_backward):
        for first, last in product((True, False), repeat=2):
            key = kind_of(move), first, last, move.part
            at_update = move.when in (When.BEFORE_UPDATE, When.AFTER_UPDATE)
            if at_update or move.batches.includes(first=first, last=last):
                before = result[key].size_bytes if key in result else 0
                result[key] = move._replace(size_bytes=before + move.size_bytes)
    return result
