"""What the decisions for a unit come to: seconds as sums over its copies, and bytes as sums over what rests of it.

Copies and resting places are those that lowering and the footprint read (``autohete/plan/moves.py``), so a planner that adds
these numbers up need not know which decisions there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from autohete.errors import check_fields
from autohete.lowering import durations
from autohete.lowering.clipping import scaled_bytes
from autohete.lowering.copies import kind_of, lane_of, seconds_of
from autohete.lowering.footprint import pinned_arrays
from autohete.lowering.shards import Shards
from autohete.plan import Activations, Plan, Processor, Route, UnitPlan
from autohete.plan.moves import Batches, Move, Resting, UnitSizes, When, moves, rests
from autohete.profile import Profile
from autohete.schedule import H2D, HOST_MEMORY, PINNED_MEMORY, Kind, Value


class UnitCopy(NamedTuple):
    """A copy that a unit makes.

    Args:
        move: what is copied.
        lane: where it runs.
        seconds: how long one takes, undisturbed.
        times: how often an iteration makes it.
    """

    move: Move
    lane: str
    seconds: float
    times: int


@dataclass(frozen=True, slots=True)
class UnitCollective:
    """A collective of several GPUs for a unit: a gather of parameters, or a reduction of gradients.

    Args:
        when: the moment of the unit's iteration.
        seconds: how long one takes, undisturbed.
        times: how often an iteration makes it.
    """

    when: When
    seconds: float
    times: int

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """What decisions for a unit come to, for one GPU and its process on the host.

    Args:
        copies: the copies of an iteration.
        resting: what rests in every memory. What is pinned is in pinned memory, whether or not that has a limit.
        gpu_update, cpu_update: seconds of the update on each processor; 0 if it has none.
        sums: seconds in which the CPU adds up the gradients of an iteration's micro-batches.
        collectives: what several GPUs do together.
        gradient_bytes: complete gradients on the GPU: all, or its part.
    """

    copies: tuple[UnitCopy, ...]
    resting: tuple[Resting, ...]
    gpu_update: float
    cpu_update: float
    sums: float
    collectives: tuple[UnitCollective, ...] = ()
    gradient_bytes: int = 0

    def seconds(self, lane: str) -> float:
        """The time of its copies on ``lane`` in an iteration."""
        return sum(copy.seconds * copy.times for copy in self.copies if copy.lane == lane)

    def at(self, lane: str, when: When, *values: Value) -> list[UnitCopy]:
        """Its copies on ``lane`` at a moment of the last micro-batch; of all values if none is given."""
        return [
            copy
            for copy in self.copies
            if copy.lane == lane
            and copy.move.when is when
            and copy.move.batches is not Batches.OTHERS
            and (not values or copy.move.value in values)
        ]

    def seconds_at(self, lane: str, when: When, *values: Value) -> float:
        """The time of these copies."""
        return sum(copy.seconds for copy in self.at(lane, when, *values))

    def collective_seconds(self, *moments: When) -> float:
        """The time of its collectives at some moments of the last micro-batch; if none is given, of the whole iteration."""
        if not moments:
            return sum(one.seconds * one.times for one in self.collectives)
        return sum(one.seconds for one in self.collectives if one.when in moments)

    def brings_parameters(self, when: When) -> bool:
        """Whether parameters are fetched to the GPU at a moment, or gathered there."""
        return bool(self.at(H2D, when, Value.PARAMETERS)) or any(one.when is when for one in self.collectives)

    def resting_bytes(self, memory: str, *values: Value) -> int:
        """Size of what rests in ``memory``; of all values if none is given."""
        return sum(one.size_bytes for one in self.resting if one.memory == memory and (not values or one.value in values))

    @property
    def sums_on_host(self) -> bool:
        """Whether the host accumulates the gradients of several micro-batches."""
        return any(copy.move.value is Value.GRADIENTS and copy.move.batches is Batches.OTHERS for copy in self.copies)

    @property
    def pinned_bytes(self) -> int:
        """Size of what rests in pinned memory."""
        return self.resting_bytes(PINNED_MEMORY)

    @property
    def host_bytes(self) -> int:
        """Size of what rests on the host, pinned or not."""
        return self.resting_bytes(HOST_MEMORY) + self.pinned_bytes


class Costs:
    """The costs of any decisions for any unit. Decisions on what a frozen unit does not have are to be left out.

    Args:
        profile: times and sizes.
        plan: any plan of the policy; defines its updates and its footprint.
    """

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self.profile, self._plan = profile, plan
        places: dict[object, int] = {}
        #: For each unit, the first one that is like it: a profile says nothing else of a unit.
        self.alike = [places.setdefault((one, i >= profile.first_trained), i) for i, one in enumerate(profile.units)]
        self._known: dict[tuple[int, UnitPlan], UnitCosts] = {}
        self._everywhere: dict[UnitPlan, tuple[Plan, Shards]] = {}

    def of(self, unit: int, one: UnitPlan) -> UnitCosts:
        """The costs of the decisions ``one`` for a unit."""
        key = self.alike[unit], one
        if key not in self._known:
            self._known[key] = self._of(*key)
        return self._known[key]

    def _of(self, unit: int, one: UnitPlan) -> UnitCosts:
        profile, held, (plan, shards) = self.profile, self._plan.footprint, self._planned_everywhere(one)
        sizes = shards.sizes(unit)
        copies = tuple(self._copies(unit, one, sizes))
        arrays = pinned_arrays(profile, held, sizes.cpu_updated)
        added = [copy for copy in copies if copy.move.value is Value.GRADIENTS and copy.move.batches is Batches.OTHERS]
        added = added if one.cpu_adds else []  # otherwise they are copied back, and the GPU adds
        traffic = plan.update_bytes, plan.elementwise_bytes
        gpu, cpu = (
            (scaled_bytes(profile, plan, unit, side), shards.share(unit, side)) for side in (Processor.GPU, Processor.CPU)
        )
        return UnitCosts(
            copies,
            (*rests(one, sizes, held, PINNED_MEMORY), Resting(Value.PINNED_STATES, PINNED_MEMORY, arrays)),
            gpu_update=durations.gpu_update(unit, *gpu)(profile) * shards.updates_on(unit, Processor.GPU),
            cpu_update=durations.cpu_update(unit, *traffic, *cpu)(profile) * shards.updates_on(unit, Processor.CPU),
            # Adding reads two values and writes one.
            sums=sum(copy.times * profile.elementwise_seconds(3 * copy.move.size_bytes) for copy in added),
            collectives=tuple(self._collectives(unit, one, shards)),
            gradient_bytes=shards.reduced(unit) * sizes.element_bytes,
        )

    def _collectives(self, unit: int, one: UnitPlan, shards: Shards) -> Iterator[UnitCollective]:
        profile, stage, batches = self.profile, shards.stage(unit), self.profile.workload.micro_batches
        if shards.gpus == 1:
            return
        gather = profile.unit_collective_seconds(unit, profile.parameter_bytes(unit))
        if stage == 3:
            yield UnitCollective(When.BEFORE_FORWARD, gather, batches)
        if stage == 3 and unit >= profile.first_trained and not one.parameters.stays_after_forward:
            yield UnitCollective(When.BEFORE_BACKWARD, gather, batches)
        if shards.is_frozen(unit):
            return
        seconds = profile.unit_collective_seconds(unit, profile.gradient_elements(unit) * profile.element_bytes)
        every = one.accumulates_on_host or shards.reduces_each(unit)
        rounds = 2 if not stage or self._plan.flat_buffers.reduces_all else 1
        yield UnitCollective(When.AFTER_BACKWARD, rounds * seconds, batches if every else 1)
        if stage in (1, 2):
            updated = profile.units[unit].trained_parameters * profile.element_bytes
            yield UnitCollective(When.AFTER_UPDATE, profile.collective_seconds(updated), 1)

    def _planned_everywhere(self, one: UnitPlan) -> tuple[Plan, Shards]:
        """The plan that decides the same for every unit. What forward keeps is no matter of sizes, and not free everywhere."""
        if one not in self._everywhere:
            units = (replace(one, activations=Activations.KEEP, again=(), kept=Route(), saved=()),) * len(self.profile.units)
            plan = replace(self._plan, units=units)
            self._everywhere[one] = plan, Shards(self.profile, plan)
        return self._everywhere[one]

    def _copies(self, unit: int, one: UnitPlan, sizes: UnitSizes) -> Iterator[UnitCopy]:
        batches = self.profile.workload.micro_batches
        others = dict.fromkeys((Batches.OTHERS, Batches.LATER), batches - 1)
        times = {Batches.ALL: batches, Batches.FIRST: 1, Batches.LAST: 1, **others}
        tasks: dict[tuple[Kind, When, Batches, int], Move] = {}
        for move in moves(one, sizes, has_backward=unit >= self.profile.first_trained):
            key = kind_of(move), move.when, move.batches, move.part
            before = tasks[key].size_bytes if key in tasks else 0
            tasks[key] = move._replace(size_bytes=before + move.size_bytes)
        for move in tasks.values():
            yield UnitCopy(move, lane_of(move), seconds_of(move)(self.profile), times[move.batches])
