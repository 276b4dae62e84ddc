"""The summary of one simulated answer, as shown in tables, JSON and CSV: plain numbers, no arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import groupby

from autohete.analysis.bounds import period_bounds
from autohete.analysis.usage import Cause, Usage, usage
from autohete.errors import AutoHeteError, InfeasibleError
from autohete.execution.trace import Clock
from autohete.plan import Activations, PlanCounts, Processor, UnitPlan
from autohete.plan.policy import Verdict
from autohete.policies import NamedPolicy
from autohete.profile import Profile
from autohete.quantities import format_bytes
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY
from autohete.simulate import Simulation, safety, simulate_policy
from autohete.workload import Workload

#: The memories that have fields of their own in a summary.
_OWN_FIELDS = (GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY)


@dataclass(frozen=True, slots=True)
class PlaceUse:
    """What a plan uses of another place of the hardware."""

    peak_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of one policy. Rates and times are None if training does not fit, since nothing runs.

    Args:
        workload, hardware, policy: names.
        gpus: number of GPUs that train together; host memory is one GPU's share.
        parallelism: how they divide each batch, such as ``tp=8``; empty if each has its own.
        assumptions: every figure of the workload and flag of the policy, given or not.
        notes: hardware figures that were changed, and why.
        clock: clock of the times.
        verdict: whether it fits; ``explanation`` names what is short, empty if it fits.
        iteration_seconds: steady time; ``first_iteration_seconds`` and ``drain_seconds`` are the start and end of a run.
        proven_within: upper bound on the relative gap between the iteration time and the best possible of this policy's
            plans; None if the policy does not search.
        settled: whether the steady state was seen to repeat; if not, times are an average over half of a long run.
        tflops_per_gpu: model TFLOP/s, not counting recomputation.
        gpu_peak_bytes, host_peak_bytes: allocated bytes, by which the verdict goes; None without a plan.
        gpu_reserved_bytes: what PyTorch's caching allocator takes from the GPU for that, see
            :mod:`autohete.analysis.allocator`; None if training does not fit.
        gpu_capacity_bytes, host_capacity_bytes: memory available to tensors.
        pinned_peak_bytes, pinned_capacity_bytes, pinned_worst_bytes: the same for pinned host memory; None if it has no limit
            of its own.
        gpu_worst_bytes, host_worst_bytes: the most that this schedule may need under any timing; None if unlimited, or if
            training does not fit anyway.
        memory_waits: number of additional waits that make it fit under any timing; None if no such waits are known.
        safe_iteration_seconds: steady time with these waits.
        lanes: busy share of each lane; ``overlaps``: share of its work that runs while the GPU computes.
        idle_seconds: the GPU's idle time per iteration, by cause.
        bound_seconds: lower bound on the period of this schedule; ``binds`` names what imposes it. This and the following
            fields describe the schedule even if it does not fit.
        plan: counts of the plan's decisions.
        gpu_holders: contents of the GPU's memory at its peak, in bytes.
    """

    workload: str
    hardware: str
    policy: str
    gpus: int
    parallelism: str
    assumptions: dict[str, object]
    notes: tuple[str, ...]
    clock: Clock
    verdict: Verdict
    explanation: str
    iteration_seconds: float | None
    first_iteration_seconds: float | None
    drain_seconds: float | None
    proven_within: float | None
    settled: bool
    samples_per_second: float | None
    tokens_per_second: float | None
    tflops_per_gpu: float | None
    gpu_peak_bytes: int | None
    host_peak_bytes: int | None
    gpu_reserved_bytes: int | None
    gpu_capacity_bytes: int
    host_capacity_bytes: int
    gpu_worst_bytes: int | None
    host_worst_bytes: int | None
    pinned_peak_bytes: int | None
    pinned_capacity_bytes: int | None
    pinned_worst_bytes: int | None
    places: dict[str, PlaceUse]
    memory_waits: int | None
    safe_iteration_seconds: float | None
    lanes: dict[str, float]
    overlaps: dict[str, float]
    idle_seconds: dict[Cause, float]
    bound_seconds: float | None
    binds: str
    plan: PlanCounts | None
    gpu_holders: dict[str, int]


def proven_within(simulation: Simulation) -> float | None:
    """Return the relative gap between the iteration time and the lower bound of its policy's plans; None: no bound."""
    bound = simulation.plan.bound_seconds
    if not bound or simulation.verdict is not Verdict.OK:
        return None
    return max(simulation.iteration_seconds / bound - 1, 0.0)


def described_blocks(workload: Workload) -> list[str]:
    """The blocks of a model in words; those that are alike are one entry, with their number."""
    each = (workload.unit_count - 2) // workload.transformer_blocks  # units of a block
    alike = Counter(workload.described(unit) for unit in range(1, workload.unit_count - 1, each))
    return [f"{count} x ({text})" for text, count in alike.items()]


def assumptions(workload: Workload, policy: NamedPolicy | None) -> dict[str, object]:
    """Return the assumptions of an answer; figures that were not given have their defaults."""
    figures = {
        field.name: getattr(workload, field.name) for field in fields(workload) if field.name not in ("architecture", "table")
    }
    return {
        **figures,
        "blocks": described_blocks(workload),
        "optimizer": str(workload.training.optimizer),
        "policy": {} if policy is None else {field.name: getattr(policy.system, field.name) for field in fields(policy.system)},
    }


#: Reported where several processes update on one CPU; sources are beside the figure in the presets.
_BOUND = (
    "assumes that each process is bound to its own cores (deepspeed --bind_cores_to_rank, or torchrun --numa-binding=exclusive "
    "with OMP_NUM_THREADS); without binding, all together may update as slowly as one (cpu.ranks_update_bandwidth)"
)
#: Reported where nothing is known of what NCCL's kernels take from the GPU.
_FREE = "assumes that collectives do not slow down what the GPU computes beside them (interconnect.concurrent_share is 1)"


def _notes(simulation: Simulation) -> tuple[str, ...]:
    """Remarks on the hardware, and assumptions about several GPUs and about processes that share a CPU."""
    hardware, join = simulation.profile.hardware, simulation.profile.hardware.interconnect
    several = hardware.all_gpus_of_node > 1 and any(unit.update.on is Processor.CPU for unit in simulation.plan.units)
    free = hardware.gpus > 1 and join is not None and join.concurrent_share == 1
    return (*hardware.remarks, *([_BOUND] if several else []), *([_FREE] if free else []))


def summarize(simulation: Simulation, policy: NamedPolicy | None, *, only_numbers: bool = False) -> Summary:
    """Summarize ``simulation``, which ``policy`` planned.

    Args:
        simulation: by the simulator, or an execution.
        policy: whose plan it is; None: one without flags that are known.
        only_numbers: leave out the assumptions, and what lanes do over time, which take as long to find as all the rest.
    """
    s = simulation
    fits = s.verdict is Verdict.OK
    bounds = period_bounds(s.schedule, s.trace)
    use = Usage({}, {}) if only_numbers else usage(s.trace, s.steady)
    timing = safety(s) if fits else None
    safe = timing.safe if timing else None
    explanation = ""
    if not fits:
        short = next(memory for memory in s.memories if not memory.fits)
        holder, size = next(iter(short.holders.items()))
        explanation = (
            f"needs {format_bytes(short.peak_bytes)} of {short.memory} memory{f' at {short.task}' if short.task else ''}, "
            f"there are {format_bytes(short.capacity_bytes)} for tensors; largest: {holder.replace('_', ' ')} "
            f"{format_bytes(size)}"
        )
    return Summary(
        workload=s.profile.workload.name,
        hardware=s.profile.hardware.name,
        policy=s.plan.policy,
        gpus=s.profile.hardware.all_gpus,
        parallelism=str(s.profile.hardware.parallelism),
        assumptions={} if only_numbers else assumptions(s.profile.workload, policy),
        notes=_notes(s),
        clock=s.trace.clock,
        verdict=s.verdict,
        explanation=explanation,
        iteration_seconds=s.iteration_seconds if fits else None,
        first_iteration_seconds=s.trace.first_iteration_seconds() if fits else None,
        drain_seconds=s.trace.drain_seconds() if fits else None,
        proven_within=proven_within(s),
        settled=s.steady.settled,
        samples_per_second=s.samples_per_second if fits else None,
        tokens_per_second=s.tokens_per_second if fits else None,
        tflops_per_gpu=s.tflops_per_gpu if fits else None,
        gpu_peak_bytes=s.gpu.peak_bytes,
        host_peak_bytes=s.host.peak_bytes,
        gpu_reserved_bytes=s.gpu.reserved_bytes if fits else None,
        gpu_capacity_bytes=s.gpu.capacity_bytes,
        host_capacity_bytes=s.host.capacity_bytes,
        gpu_worst_bytes=timing.gpu.peak_bytes if timing else None,
        host_worst_bytes=timing.host.peak_bytes if timing else None,
        pinned_peak_bytes=s.pinned.peak_bytes if s.pinned else None,
        pinned_capacity_bytes=s.profile.hardware.host.pinned_bytes,
        pinned_worst_bytes=timing.worst[PINNED_MEMORY].peak_bytes if timing and s.pinned else None,
        places={
            one.memory: PlaceUse(one.peak_bytes, one.capacity_bytes) for one in s.memories if one.memory not in _OWN_FIELDS
        },
        memory_waits=safe.waits if safe else None,
        safe_iteration_seconds=safe.iteration_seconds if safe else None,
        lanes={name: lane.busy_share for name, lane in use.lanes.items()},
        overlaps={name: lane.overlap_share for name, lane in use.lanes.items()},
        idle_seconds=use.idle_seconds,
        bound_seconds=bounds.seconds,
        binds=bounds.binds,
        plan=counts(s),
        gpu_holders=s.gpu.holders,
    )


def answer(profile: Profile, policy: NamedPolicy, *, only_numbers: bool = False) -> tuple[Summary, Simulation | None]:
    """Simulate and :func:`summarize`. If nothing fits, or nothing can run on one pool of memory, return no simulation."""
    try:
        simulation = simulate_policy(profile, policy)
    except InfeasibleError as error:
        return _unanswered(profile, policy, Verdict.short_of(error.constraint), str(error), error), None
    return summarize(simulation, policy, only_numbers=only_numbers), simulation


def answer_or_refusal(profile: Profile, policy: NamedPolicy) -> tuple[Summary, Simulation | None]:
    """Like :func:`answer`, but report a refusal by the policy or by lowering with the verdict ``invalid``."""
    try:
        return answer(profile, policy)
    except AutoHeteError as error:
        return _unanswered(profile, policy, Verdict.INVALID, str(error).removeprefix(f"{policy.name}: ")), None


class UnitTraining(StrEnum):
    """How a unit's parameters are trained."""

    TRAINED = "trained"
    FROZEN = "frozen"
    FROZEN_BELOW = "frozen, without backward"


def training_of(profile: Profile, unit: int) -> UnitTraining:
    """Return whether a unit is trained, frozen, or frozen below all that is trained, where backward does not come."""
    if not profile.units[unit].is_frozen:
        return UnitTraining.TRAINED
    return UnitTraining.FROZEN if unit >= profile.first_trained else UnitTraining.FROZEN_BELOW


def counts(simulation: Simulation) -> PlanCounts:
    """Return the counts of a plan without the decisions about frozen units: they have no updates, and some no backward."""
    plan, profile = simulation.plan, simulation.profile
    told = [(unit, training_of(profile, number)) for number, unit in enumerate(plan.units)]
    return replace(
        plan.counts,
        checkpointed_units=sum(
            unit.activations is not Activations.KEEP for unit, training in told if training is not UnitTraining.FROZEN_BELOW
        ),
        offloaded_optimizer_units=sum(
            unit.update.on is not Processor.GPU for unit, training in told if training is UnitTraining.TRAINED
        ),
    )


def runs_of_equal_units(simulation: Simulation) -> list[tuple[int, int, UnitPlan]]:
    """Return first unit, last unit and decisions of each run of units planned and trained alike; the embedding is its own."""
    units = range(len(simulation.plan.units))
    return _runs(simulation, [units[:1], units[1:]])


def runs_of_equal_roles(simulation: Simulation) -> list[tuple[int, int, UnitPlan]]:
    """The same for units of one role after the other: all that do not belong to a role are left out between them."""
    blocks = simulation.profile.units
    roles = dict.fromkeys(block.role for block in blocks)
    return _runs(simulation, [[unit for unit, block in enumerate(blocks) if block.role is role] for role in roles])


def _runs(simulation: Simulation, parts: Iterable[Iterable[int]]) -> list[tuple[int, int, UnitPlan]]:
    plan, profile = simulation.plan, simulation.profile
    found = []
    for part in parts:
        for (decided, _), same in groupby(part, lambda unit: (plan.units[unit], training_of(profile, unit))):
            units = list(same)
            found.append((units[0], units[-1], decided))
    return found


def _unanswered(
    profile: Profile, policy: NamedPolicy, verdict: Verdict, explanation: str, short: InfeasibleError | None = None
) -> Summary:
    """Summarize the reason for having no plan; ``short`` names the memory that is too small, if any."""
    needed = {short.constraint: short.needed_bytes} if short else {}
    return Summary(
        workload=profile.workload.name,
        hardware=profile.hardware.name,
        policy=policy.name,
        gpus=profile.hardware.all_gpus,
        parallelism=str(profile.hardware.parallelism),
        assumptions=assumptions(profile.workload, policy),
        notes=profile.hardware.remarks,
        clock=Clock.SIMULATED,
        verdict=verdict,
        explanation=explanation,
        iteration_seconds=None,
        first_iteration_seconds=None,
        drain_seconds=None,
        proven_within=None,
        settled=True,
        samples_per_second=None,
        tokens_per_second=None,
        tflops_per_gpu=None,
        gpu_peak_bytes=needed.get("gpu"),
        host_peak_bytes=needed.get("host"),
        gpu_reserved_bytes=None,
        gpu_capacity_bytes=profile.hardware.gpu_capacity_bytes,
        host_capacity_bytes=profile.hardware.host.memory_bytes,
        gpu_worst_bytes=None,
        host_worst_bytes=None,
        pinned_peak_bytes=needed.get("pinned"),
        pinned_capacity_bytes=profile.hardware.host.pinned_bytes,
        pinned_worst_bytes=None,
        places={}
        if short is None or short.constraint in _OWN_FIELDS
        else {short.constraint: PlaceUse(short.needed_bytes, short.capacity_bytes)},
        memory_waits=None,
        safe_iteration_seconds=None,
        lanes={},
        overlaps={},
        idle_seconds={},
        bound_seconds=None,
        binds="",
        plan=None,
        gpu_holders={},
    )
