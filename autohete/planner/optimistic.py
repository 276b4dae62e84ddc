"""A judge that does not simulate: what a plan takes at least, in time and in every memory.

A policy that gets this judge makes a plan at least as fast and as small as the one that it would make: it chooses from lower
bounds instead of times, and keeps on the GPU what may fit there. So a policy whose plan is too slow or too large even so needs
no simulation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from autohete.hardware import Hardware
from autohete.lowering import never_fits
from autohete.lowering.copies import lane_between
from autohete.lowering.footprint import pinned_memory, resident_buffers
from autohete.lowering.frozen import without_frozen
from autohete.lowering.shards import Shards
from autohete.lowering.stages import of_one_rank
from autohete.plan import Plan
from autohete.plan.moves import When
from autohete.plan.policy import Judgement, Verdict
from autohete.plan.rules import Barrier, RefreshAfterUpdates, SerialUpdates, UpdatesAfterBackward
from autohete.planner.rows import TASKS_PER_UNIT, here_bytes, recompute_seconds
from autohete.planner.unit_costs import Costs
from autohete.profile import Profile
from autohete.schedule import D2H, GPU_MEMORY, H2D, HOST_MEMORY, PINNED_MEMORY, Value

#: With so many micro-batches memory is as short as with more.
_FEW = 3


def lower_bytes(profile: Profile, plan: Plan) -> Counter[str]:
    """What each memory holds at the loss, whatever the timing: what rests there, and on the GPU what forward keeps. Of the GPUs
    of a pipeline, the one that holds most.
    """
    profile, plan = of_one_rank(profile, plan), without_frozen(profile, plan)
    found = Counter(dict.fromkeys((home for unit in plan.units for home in unit.homes), 0))
    of_ranks: Counter[int] = Counter()
    ranks = plan.backward_ranks()
    for buffer in resident_buffers(profile, plan, Shards(profile, plan)):
        if plan.is_pipeline and buffer.memory == GPU_MEMORY and buffer.id.unit is not None:
            of_ranks[ranks[buffer.id.unit]] += buffer.size_bytes
        else:
            found[buffer.memory] += buffer.size_bytes
    if pinned_memory(profile) == PINNED_MEMORY:
        found[HOST_MEMORY] += found[PINNED_MEMORY]
    for i, unit in enumerate(plan.units):
        of_ranks[ranks[i]] += here_bytes(profile, i, unit)
    of_ranks[ranks[-1]] += profile.loss.peak_bytes
    found[GPU_MEMORY] += max(of_ranks.values())
    return found


def capacities(hardware: Hardware) -> dict[str, int]:
    """The size of each memory."""
    host = hardware.host
    return {
        GPU_MEMORY: hardware.gpu_capacity_bytes,
        **({} if host.pinned_bytes is None else {PINNED_MEMORY: host.pinned_bytes}),
        HOST_MEMORY: host.memory_bytes,
        **{place.name: place.capacity_bytes for place in hardware.places},
    }


class OptimisticJudge:
    """A :data:`~autohete.plan.policy.Judge` of lower bounds.

    Args:
        profile: times and sizes.
        limit: plans that take as long are not looked at more closely.
    """

    def __init__(self, profile: Profile, limit: float) -> None:
        self._profile, self._limit = profile, limit
        self._few = profile.with_micro_batches(min(profile.workload.micro_batches, _FEW))
        self._capacities = capacities(profile.hardware)
        self._known: dict[Plan, Judgement] = {}
        self._costs: dict[tuple[object, ...], Costs] = {}
        units, first = profile.units, profile.first_trained
        passes = sum(unit.forward_seconds for unit in units) + sum(unit.backward_seconds for unit in units[first:])
        self._passes = (passes + profile.loss.seconds) * profile.workload.micro_batches
        self._rounding = 0.5e-9 * TASKS_PER_UNIT * len(units) * profile.workload.micro_batches

    @property
    def least_seconds(self) -> float:
        """A lower bound of the time of every plan: all passes without recomputation."""
        return self._passes - self._rounding

    def __call__(self, plan: Plan) -> Judgement:
        """Lower bounds of the time and of the memory of ``plan``."""
        if plan not in self._known:
            self._known[plan] = self._judged(plan)
        return self._known[plan]

    def _judged(self, plan: Plan) -> Judgement:
        used = lower_bytes(self._profile, plan)
        short = [memory for memory, size in used.items() if size > self._capacities.get(memory, -1)]
        if short:
            return Judgement(Verdict.short_of(GPU_MEMORY if GPU_MEMORY in short else short[0]), 0.0, used, exact=False)
        seconds = self.seconds(plan)
        few = self._few if plan.ranks == 1 else self._profile  # ranks may need as many micro-batches as they divide
        never = seconds < self._limit and never_fits(few, plan)
        return Judgement(Verdict.GPU_OUT_OF_MEMORY if never else Verdict.OK, seconds, used, exact=False)

    def seconds(self, plan: Plan) -> float:
        """The time of the busiest engine; or of the passes and the updates that follow them, if nothing else runs meanwhile."""
        profile = self._profile
        again = sum(recompute_seconds(profile, i, unit) for i, unit in enumerate(plan.units))
        passes = self._passes + again * profile.workload.micro_batches
        if plan.is_pipeline:  # whose GPUs share the passes
            return passes - self._rounding
        key = plan.update_bytes, plan.elementwise_bytes, plan.scales_gradients, plan.flat_buffers
        plan = without_frozen(profile, plan)
        if key not in self._costs:
            self._costs[key] = Costs(profile, replace(plan, rules=(), slots=None, delayed=False))
        costs = [self._costs[key].of(i, unit) for i, unit in enumerate(plan.units)]
        updates = sum(one.cpu_update for one in costs)
        lanes = [H2D, D2H]
        for place in profile.hardware.places:
            lanes += [lane_between(place.name, place.beside), lane_between(place.beside, place.name)]
        loads = [sum(one.seconds(lane) for one in costs) for lane in lanes]
        loads += [sum(one.collective_seconds() for one in costs)]
        loads += [passes + sum(one.gpu_update for one in costs), updates + sum(one.sums for one in costs)]
        kinds = set(map(type, plan.rules))
        if Barrier in kinds and kinds & {UpdatesAfterBackward, SerialUpdates} and not plan.delayed:
            last = RefreshAfterUpdates in kinds
            refreshes = sum(one.seconds_at(H2D, When.AFTER_UPDATE, Value.PARAMETERS) for one in costs) if last else 0.0
            loads.append(passes + updates + refreshes)
        return max(loads) - self._rounding
