"""From a plan to tasks: :func:`lower` is the only maker of tasks from plans.

Read :func:`lower` as an iteration passes: what is fetched before a pass, the pass, what is released after it, where its
gradient goes, who updates it and how the new parameters come back. Each task says what it reads and writes
(``compute.py``, ``copies.py``); what waits for what follows from that (``builder.py``). What separates the published systems
are rules, which only add order (``rules.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

from autohete.errors import InputError
from autohete.lowering.builder import Builder
from autohete.lowering.compute import Compute, passes_of
from autohete.lowering.copies import Copies
from autohete.lowering.footprint import resident_buffers, shared_bandwidth
from autohete.lowering.rules import Rule, rules_of
from autohete.lowering.slots import Life, least_slots, share_slots
from autohete.plan import Plan
from autohete.profile import Profile
from autohete.schedule import (
    CPU,
    D2H,
    GPU,
    GPU_MEMORY,
    H2D,
    HOST_MEMORY,
    Discipline,
    Lane,
    Memory,
    Schedule,
)
from autohete.workload import Precision

__all__ = ["least_parameter_slots", "lower"]


def lower(profile: Profile, plan: Plan, rules: Iterable[Rule] | None = None) -> Schedule:
    """The schedule of ``plan`` for the workload and hardware of ``profile``.

    Args:
        profile: what and where.
        plan: what was decided.
        rules: the order that is added to what data need; None: the plan's own.

    Raises:
        InputError: the plan is for another number of blocks, or its gradients replace parameters that are still needed.
    """
    if len(plan.blocks) != len(profile.blocks):
        raise InputError(f"the plan has {len(plan.blocks)} blocks, the profile {len(profile.blocks)}: plan for this workload")
    fp32 = profile.workload.precision is Precision.FP32
    if plan.gradients_replace_parameters and fp32 and plan.offloaded_optimizer_blocks < len(plan.blocks):
        raise InputError(
            "gradients cannot replace fp32 parameters that the GPU updates: they are their own master weights; update on the "
            "CPU, or train in 16 bit"
        )
    builder, lives = _tasks(profile, plan)
    builder.order_by_data()
    if plan.parameter_slots is not None:
        share_slots(builder, lives, plan.parameter_slots, fifo=not plan.priority)
    for rule in rules_of(plan) if rules is None else rules:
        rule.apply(builder)
    discipline, hardware = Discipline.PRIORITY if plan.priority else Discipline.FIFO, profile.hardware
    flows, resources = shared_bandwidth(hardware, updates_beside_gpu=plan.updates_beside_gpu)
    return Schedule(
        lanes=(Lane(GPU), *(Lane(name, discipline) for name in (H2D, D2H, CPU))),
        tasks=builder.tasks(),
        memories=(Memory(GPU_MEMORY, hardware.gpu_capacity_bytes), Memory(HOST_MEMORY, hardware.host.memory_bytes)),
        resident=tuple(resident_buffers(profile, plan)),
        flows=flows,
        resources=resources,
    )


def least_parameter_slots(profile: Profile, plan: Plan) -> int:
    """The fewest ``parameter_slots`` with which ``plan`` can be lowered; 0 if no block's parameters leave."""
    builder, lives = _tasks(profile, plan)
    return least_slots(lives, len(builder.passes))


def _tasks(profile: Profile, plan: Plan) -> tuple[Builder, list[Life]]:
    """The tasks of an iteration as a program would issue them, and the lives of parameters that come and go."""
    builder = Builder(passes_of(plan))
    compute, copies = Compute(builder, profile, plan), Copies(builder, profile, plan)
    units = range(len(plan.blocks))
    for unit in units:
        copies.fetch_for_forward(unit)
        compute.forward(unit)
        copies.after_forward(unit)
        copies.offload_activations(unit)
    compute.loss()
    for unit in reversed(units):
        copies.fetch_for_backward(unit)
        copies.fetch_activations(unit)
        compute.backward(unit)
        if not plan.gpu_update_after_backward:
            copies.gpu_update(unit)
        if not plan.serial_updates:
            copies.update_on_cpu(unit)
        elif not plan.copied_after_backward(unit):
            copies.offload_gradients(unit)
    for unit in reversed(units):
        if plan.gpu_update_after_backward:
            copies.gpu_update(unit)
    for unit in reversed(units):
        if plan.serial_updates and plan.copied_after_backward(unit):
            copies.offload_gradients(unit)
        if plan.serial_updates:
            copies.cpu_update(unit)
    # Refreshes last: on a fifo lane one that waits for its update must not hold up what backward needs.
    copies.refresh_all()
    for unit in units:
        copies.after_backward(unit)
    return builder, copies.lives
