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
from autohete.schedule import COPIES, D2H, GPU_MEMORY, H2D, HOST_MEMORY, Copy, Kind, TaskId, Value, lending_rank

#: The kind of task that copies a value to or from its end nearer to the GPU; of parameters, also by the moment.
_KINDS = {copy: kind for kind, copy in COPIES.items() if copy.value is not Value.PARAMETERS}
_KINDS[Copy(Value.GRADIENTS, HOST_MEMORY, arrives=True)] = Kind.READ_STATES  # in one task
_KINDS_OF_PARAMETERS = {
    (When.BEFORE_FORWARD, GPU_MEMORY, True): Kind.PREFETCH_FORWARD,
    (When.BEFORE_BACKWARD, GPU_MEMORY, True): Kind.PREFETCH_BACKWARD,
    (When.AFTER_FORWARD, GPU_MEMORY, False): Kind.WRITE_BACK_FORWARD,
    (When.AFTER_UPDATE, GPU_MEMORY, False): Kind.WRITE_BACK_BACKWARD,
    (When.AFTER_UPDATE, GPU_MEMORY, True): Kind.REFRESH,
    (When.BEFORE_FORWARD, HOST_MEMORY, True): Kind.READ_FORWARD,
    (When.BEFORE_BACKWARD, HOST_MEMORY, True): Kind.READ_BACKWARD,
    (When.AFTER_UPDATE, HOST_MEMORY, False): Kind.WRITE_PARAMETERS,
    (When.AFTER_UPDATE, HOST_MEMORY, True): Kind.READ_UPDATED,
}
#: The memories of every GPU and its host; others are places.
_NEAR = (GPU_MEMORY, HOST_MEMORY)
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
        away = [sorted({part for kind, _, _, part in some if kind is Kind.OFFLOAD_ACTIVATIONS}) for some in self._moves]
        #: For each unit, the parts of what forward keeps that rest elsewhere than on the GPU.
        self.parts_away: list[list[int]] = away

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
    return lane_between(move.source, move.target)


def lane_between(source: str, target: str) -> str:
    """The name of the lane that copies from one memory to another. A place has a lane for reads and one for writes."""
    if source not in _NEAR:
        return f"{source}_read"
    if target not in _NEAR:
        return f"{target}_write"
    return H2D if target == GPU_MEMORY else D2H


def update_lane(place: str) -> str:
    """The name of the lane on which a place updates what rests in it."""
    return f"{place}_update"


def kind_of(move: Move) -> Kind:
    """The kind of task that makes ``move``."""
    near = GPU_MEMORY if GPU_MEMORY in (move.source, move.target) else HOST_MEMORY
    arrives = move.target == near
    if move.value is Value.PARAMETERS:
        return _KINDS_OF_PARAMETERS[move.when, near, arrives]
    return _KINDS[Copy(Value.ACTIVATIONS if move.value is Value.INPUT else move.value, near, arrives)]


def seconds_of(move: Move) -> Duration:
    """How long ``move`` takes on an undisturbed lane."""
    if lending_rank(move.source) is not None or lending_rank(move.target) is not None:
        return durations.transfer(move.size_bytes, 0, 0)  # ranks that lend memory are of the same node
    if move.source not in _NEAR:
        return durations.with_place(move.source, move.size_bytes, write=False)
    if move.target not in _NEAR:
        return durations.with_place(move.target, move.size_bytes, write=True)
    if move.target == GPU_MEMORY:
        return durations.to_gpu(move.size_bytes, pinned=move.pinned)
    return durations.to_host(move.size_bytes, pinned=move.pinned, fresh=move.fresh, returned_bytes=move.returned_bytes)


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
