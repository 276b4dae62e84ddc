"""How this runtime executes a published system's plan."""

from __future__ import annotations

from dataclasses import replace

from autohete.plan import Activations, Footprint, Format, Plan, UnitPlan
from autohete.profile import Profile


def as_executed(plan: Plan, profile: Profile, *, pins: bool = False) -> Plan:
    """``plan`` with the bytes that the runtime moves and keeps.

    Who computes, moves and updates what, when, and what waits for what stay those of the system. Its transfer formats and
    passes over host memory do not: gradients and parameters cross in the type that the GPU computes with, and the CPU step is
    one fused kernel (``runtime/optimizer.py``) on states, gradient and the only host copy of the parameters.

    Args:
        plan: of a system.
        profile: for which it was planned.
        pins: gradient and copy are in pinned memory, as on a GPU.
    """
    element = profile.element_bytes
    units = tuple(
        replace(unit, gradients=Format(), refresh=Format(), parameters=replace(unit.parameters, fetched=Format()))
        for unit in plan.units
    )
    return replace(
        plan,
        units=units,
        update_bytes=24.0 + 2 * element if element == 2 else 28.0,
        elementwise_bytes=0,
        scales_gradients=element == 2,  # while they are widened
        footprint=Footprint(
            gpu_buffer_bytes=plan.footprint.gpu_buffer_bytes,
            host_optimizer_bytes=profile.optimizer_bytes + (0 if pins else 2 * element),
            host_pinned_bytes=(element, element) if pins else (),
            host_parameter_bytes=element,
            one_host_copy=True,
        ),
        bound_seconds=None,  # proven for the system's own bytes
    )


def everything_resident(profile: Profile, activations: Activations = Activations.KEEP) -> Plan:
    """Nothing leaves the device; with activations kept, which is the yardstick of budgets, or recomputed."""
    inner = [UnitPlan(activations) for _ in profile.blocks[1:-1]]
    return as_executed(Plan("resident", (UnitPlan(), *inner, UnitPlan())), profile)
