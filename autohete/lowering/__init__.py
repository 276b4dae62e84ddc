"""Lowering of plans to tasks. :func:`lower` is the only place that makes tasks from plans.

:func:`_tasks` follows the course of an iteration: bring what a pass needs, compute the pass, and send what it leaves behind to
where it rests (``compute.py``, ``parameters.py``, ``activations.py``, ``updates.py``). Each task declares what it reads and
writes; the dependencies follow from that (``builder.py``, ``waits.py``). Published systems differ in their rules, which only
add order (``autohete/plan/rules.py``).
"""

from __future__ import annotations

from dataclasses import replace

from autohete.errors import InfeasibleError, InputError, RuleError
from autohete.lowering.activations import OffloadedActivations
from autohete.lowering.builder import Builder
from autohete.lowering.clipping import Clipping
from autohete.lowering.compute import Compute, passes_of
from autohete.lowering.footprint import nvme_bytes, resident_buffers, shared_bandwidth
from autohete.lowering.parameters import Parameters, Stay
from autohete.lowering.shards import Shards
from autohete.lowering.slots import least_slots, lives_of, share_slots
from autohete.lowering.updates import Updates
from autohete.lowering.waits import CycleError, explained
from autohete.plan import Plan, Processor
from autohete.plan.rules import ByPriority, Rule
from autohete.profile import Profile
from autohete.quantities import format_bytes
from autohete.schedule import (
    COLLECTIVE,
    CPU,
    D2H,
    GPU,
    GPU_MEMORY,
    H2D,
    HOST_MEMORY,
    NVME_MEMORY,
    NVME_READ,
    NVME_WRITE,
    PINNED_MEMORY,
    Discipline,
    Kind,
    Lane,
    Memory,
    Schedule,
)
from autohete.workload import Precision

__all__ = ["least_parameter_slots", "lower"]


def lower(profile: Profile, plan: Plan) -> Schedule:
    """Return the schedule of ``plan`` for the workload and hardware of ``profile``.

    Raises:
        InfeasibleError: NVMe is too small for what rests there.
        InputError: the plan is for another number of units, its gradients replace parameters that are still needed, it has too
            few slots, several GPUs cannot shard what they should, or one of its rules contradicts another rule or the data
            dependencies, changes nothing, or duplicates another rule.
    """
    if len(plan.units) != len(profile.blocks):
        raise InputError(f"the plan has {len(plan.units)} units, the profile {len(profile.blocks)}: plan for this workload")
    fp32 = profile.workload.precision is Precision.FP32
    if fp32 and any(unit.gradients_replace_parameters and unit.update_on is Processor.GPU for unit in plan.units):
        raise InputError(
            "gradients cannot replace fp32 parameters that the GPU updates: they are their own master weights; update on the "
            "CPU, or train in 16 bit"
        )
    if profile.workload.micro_batches > 1:
        _check_accumulation(plan)
    if profile.workload.tied_embeddings and plan.units[0].parameters.leaves:
        raise InputError("the head shares the embedding's matrix, so that cannot leave the GPU: let the first unit stay there")
    shards = Shards(profile, plan)
    shards.check()
    on_nvme = nvme_bytes(profile, plan, shards)
    _check_nvme(profile, on_nvme)
    builder, order = _ordered(profile, plan, shards)
    _check_rules(profile, plan, shards, builder)
    discipline, hardware = Discipline.PRIORITY if builder.by_priority else Discipline.FIFO, profile.hardware
    nvme = hardware.nvme if on_nvme else None
    flows, resources = shared_bandwidth(hardware, updates_beside_gpu=plan.updates_beside_gpu, uses_nvme=nvme is not None)
    lanes = (H2D, D2H, CPU, *((NVME_READ, NVME_WRITE) if nvme else ()))
    # GPUs must agree on the order of their collectives.
    together = (Lane(COLLECTIVE),) if hardware.gpus > 1 else ()
    memories = [Memory(GPU_MEMORY, hardware.gpu_capacity_bytes), Memory(HOST_MEMORY, hardware.host.memory_bytes)]
    if hardware.host.pinned_bytes is not None:
        memories.append(Memory(PINNED_MEMORY, hardware.host.pinned_bytes, part_of=HOST_MEMORY))
    if nvme is not None:
        memories.append(Memory(NVME_MEMORY, nvme.capacity_bytes))
    return Schedule(
        lanes=(Lane(GPU), *(Lane(name, discipline) for name in lanes), *together),
        tasks=builder.tasks(order),
        memories=tuple(memories),
        resident=tuple(resident_buffers(profile, plan, shards, on_nvme)),
        flows=flows,
        resources=resources,
    )


def _ordered(profile: Profile, plan: Plan, shards: Shards) -> tuple[Builder, list[int]]:
    """Return the tasks with all waits from data, rules and slots, and their issue order."""
    builder, stays = _tasks(profile, plan, shards)
    builder.order_by_data()
    _apply(plan.rules, builder)
    try:
        order = builder.order()
        if plan.slots is not None:
            share_slots(builder, lives_of(builder, stays, order), plan.slots.count)
            order = builder.order()
    except CycleError as error:
        raise explained(error, [draft.id for draft in builder.drafts], plan.rules) from None
    builder.waits.reduce(order)
    return builder, order


def _check_nvme(profile: Profile, needed: int) -> None:
    """Refuse a plan that exceeds the NVMe capacity. What rests there does not depend on time."""
    nvme = profile.hardware.nvme
    have = nvme.capacity_bytes if nvme else 0
    if needed > have:
        there = f"has {format_bytes(have)} of it" if nvme else "has none"
        raise InfeasibleError(
            f"the plan lets {format_bytes(needed)} ({needed} B) rest on NVMe, but {profile.hardware.name} {there}: give it a "
            "larger table [nvme], choose other hardware, or another policy",
            constraint="nvme",
            capacity_bytes=have,
            needed_bytes=needed,
        )


def _check_accumulation(plan: Plan) -> None:
    if plan.delayed:
        raise InputError("a delayed update takes gradients while the next are accumulated: use one micro-batch, or delay none")
    for i, unit in enumerate(plan.units):
        if unit.gradients_replace_parameters:
            raise InputError(
                f"gradients of unit {i} would replace parameters that the next micro-batch needs: use one micro-batch, or let "
                "gradients have memory of their own"
            )
        if unit.gpu_share and unit.accumulates_on_host:
            raise InputError(
                f"gradients of unit {i} are accumulated on the host, but the GPU updates a part: accumulate on the GPU, use "
                "one micro-batch, or leave gpu_share out"
            )
        if unit.gradients_on_nvme and unit.accumulates_on_host:
            raise InputError(
                f"gradients of unit {i} wait on nvme, where nothing can be added to them: accumulate on the GPU, use one "
                "micro-batch, or leave gradients_on_nvme out"
            )
        if plan.in_slot(i) and not unit.accumulates_on_host:
            raise InputError(
                f"gradients of unit {i} are to be accumulated on the GPU, but live in a slot with parameters that leave it: "
                "accumulate on the host, use one micro-batch, or slots without gradients"
            )


def least_parameter_slots(profile: Profile, plan: Plan) -> int:
    """The fewest parameter slots with which ``plan`` can be lowered; 0 if no unit's parameters leave the GPU.

    The result depends on whether slots have room for gradients, but not on the count in ``plan.slots``.
    """
    builder, stays = _tasks(profile, plan, Shards(profile, plan))
    builder.order_by_data()
    _apply(plan.rules, builder)
    return least_slots(lives_of(builder, stays, builder.order()), len(builder.passes))


def _tasks(profile: Profile, plan: Plan, shards: Shards) -> tuple[Builder, list[Stay]]:
    """Return the tasks of an iteration in program order, and the stays of parameters that come and go."""
    micro_batches = profile.workload.micro_batches
    recomputations = plan.recomputations()
    builder = Builder(passes_of(recomputations, micro_batches), gradients_back=int(plan.delayed))
    compute, clipping = Compute(builder, profile, plan, shards, recomputations), Clipping(builder, profile, plan, shards)
    updates, parameters = Updates(builder, profile, plan, shards, clipping), Parameters(builder, profile, plan, shards)
    activations = OffloadedActivations(builder, profile, plan)

    def update(unit: int) -> None:
        updates.update(unit)
        parameters.after_update(unit)

    for task in builder.passes:
        if task.kind is Kind.LOSS:
            compute.loss(task)
            continue
        parameters.bring(task)
        if task.kind is Kind.FORWARD:
            compute.forward(task)
            parameters.after_forward(task)
            activations.after_forward(task)
            continue
        activations.bring(task)
        if task.kind is Kind.RECOMPUTE:
            compute.recompute(task)
            continue
        compute.backward(task)
        if task.micro_batch + 1 < micro_batches:
            updates.between(task)
            parameters.after_backward(task.unit)
            continue
        updates.after_backward(task)
        if not clipping.clips:
            update(task.unit)
    if clipping.clips:  # no update can start before all gradients are complete
        clipping.coefficient()
        for unit in reversed(range(len(plan.units))):
            update(unit)
    parameters.refresh_all()
    return builder, parameters.stays


def _apply(rules: tuple[Rule, ...], builder: Builder) -> None:
    """Apply the rules. ``ByPriority`` comes first, because other rules depend on the lanes' discipline."""
    for author, rule in sorted(enumerate(rules, start=1), key=lambda item: not isinstance(item[1], ByPriority)):
        builder.waits.author = author
        rule.apply(builder)
    builder.waits.author = 0


def _check_rules(profile: Profile, plan: Plan, shards: Shards, builder: Builder) -> None:
    """Refuse rules that change nothing or duplicate another rule.

    Clipping orders updates too, which makes some rules redundant. But a rule describes a system independently of the workload,
    so it is refused only if it also changes nothing without clipping.
    """
    rules = plan.rules
    idle = _idle_rules(rules, builder)
    if idle and profile.workload.clips:
        unclipped, _ = _ordered(replace(profile, workload=replace(profile.workload, clip_norm=None)), plan, shards)
        idle &= _idle_rules(rules, unclipped)
    for author, rule in enumerate(rules, start=1):
        if rule in rules[: author - 1]:
            raise RuleError(f"the plan has {rule} twice: give it once", rule)
        if author not in idle:
            continue
        others = [rules[other - 1] for claimant, other in builder.waits.claims if claimant == author and other]
        if others:
            raise RuleError(f"{rule} asks only for what {others[0]} asks for: leave one of them out", rule)
        raise RuleError(
            f"{rule} changes nothing in this plan: what it asks for follows from what data need and from the other rules, or "
            "there are no tasks that it is about; leave it out",
            rule,
        )


def _idle_rules(rules: tuple[Rule, ...], builder: Builder) -> set[int]:
    """Return the rules that add no wait of their own, as indices counted from 1."""
    needed = builder.waits.authors()
    return {
        author
        for author, rule in enumerate(rules, start=1)
        if author not in needed and not (isinstance(rule, ByPriority) and builder.has_choice())
    }
