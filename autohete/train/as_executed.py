"""Adapts the plan of a published system to what this runtime executes."""

from __future__ import annotations

from dataclasses import replace

from autohete.plan import Activations, Footprint, Format, Plan, UnitPlan
from autohete.profile import Profile


def as_executed(plan: Plan, profile: Profile, *, pins: bool = False) -> Plan:
    """Return ``plan`` with the bytes that the runtime moves and keeps.

    Placement, order and waits stay those of the system. Its transfer formats and passes over host memory change: gradients
    and parameters cross in the type that the GPU computes with, and the CPU step is one fused kernel
    (``runtime/optimizer.py``) on states, gradient and the only host copy of the parameters.

    Args:
        plan: plan of a system.
        profile: the profile that it was planned for.
        pins: whether gradients and the parameter copy are in pinned memory, as on a GPU.
    """
    element = profile.element_bytes
    units = tuple(
        replace(
            unit,
            gradients=replace(unit.gradients, carried=Format()),
            refresh=Format(),
            parameters=replace(unit.parameters, carried=Format()),
        )
        for unit in plan.units
    )
    return replace(
        plan,
        units=units,
        update_bytes=24.0 + 2 * element if element == 2 else 28.0,
        elementwise_bytes=0,
        scales_gradients=element == 2,  # during the cast to fp32
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
    """Return the plan in which nothing leaves the device. With activations kept it is the reference for budgets in percent."""
    inner = [UnitPlan(activations) for _ in profile.units[1:-1]]
    return as_executed(Plan("resident", (UnitPlan(), *inner, UnitPlan())), profile)
