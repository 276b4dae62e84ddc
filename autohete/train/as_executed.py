"""Adapts the plan of a published system to what this runtime executes."""

from __future__ import annotations

from dataclasses import replace

from autohete.plan import Activations, Footprint, Format, Plan, SavedRoute, UnitPlan
from autohete.plan.rules import ByPriority, GradientsLeaveBeforeBackward
from autohete.profile import Profile, UnitProfile


def as_executed(plan: Plan, profile: Profile, *, pins: bool = False) -> Plan:
    """Return ``plan`` with the bytes that the runtime moves and keeps.

    Placement, order and waits stay those of the system, but for one wait: where updates are delayed, backward waits until the
    gradients of the previous iteration have left, as each unit has one place for them. The system's transfer formats and passes
    over memory change: gradients and parameters cross in the type that the GPU computes with, and no kernel of a system checks
    gradients (those that do more with them stay: a Trainer refuses such a plan); the CPU step is one fused kernel
    (``runtime/optimizer.py``) on states, gradient and the only host copy of the parameters. Lanes of several ranks take their
    tasks in the order of issue: what is most urgent at a moment may differ from rank to rank, but the order of their
    collectives must not.

    Args:
        plan: plan of a system.
        profile: the profile that it was planned for.
        pins: whether gradients and the parameter copy are in pinned memory, as on a GPU.
    """
    element = profile.element_bytes
    rules = tuple(rule for rule in plan.rules if profile.hardware.gpus == 1 or not isinstance(rule, ByPriority))
    units = tuple(
        replace(
            unit,
            gradients=replace(unit.gradients, carried=Format()),
            refresh=Format(),
            parameters=replace(unit.parameters, carried=Format()),
            parameters_with_states=False,
            saved=_named(unit, profile.units[i]),
        )
        for i, unit in enumerate(plan.units)
    )
    return replace(
        plan,
        units=units,
        sums_in_place=False,
        sums_whole=False,
        holds_inputs=False,
        rules=(*rules, GradientsLeaveBeforeBackward()) if plan.delayed else rules,
        update_bytes=24.0 + 2 * element if element == 2 else 28.0,
        elementwise_bytes=0,
        scales_gradients=element == 2,  # during the cast to fp32
        check_bytes=0,
        footprint=Footprint(
            gpu_buffer_bytes=plan.footprint.gpu_buffer_bytes,
            host_optimizer_bytes=profile.optimizer_bytes + (0 if pins else 2 * element),
            host_pinned_bytes=(element, element) if pins else (),
            host_parameter_bytes=element,
            one_host_copy=True,
        ),
        bound_seconds=None,  # proven for the system's own bytes
    )


def _named(unit: UnitPlan, costs: UnitProfile) -> tuple[SavedRoute, ...]:
    """The routes of saved tensors, with the names of those that selective recomputation makes again if they were measured."""
    measured = costs.measured_selective_workspace_bytes is not None
    if unit.activations is not Activations.SELECTIVE or not measured or any(one.recomputed for one in unit.saved):
        return unit.saved
    given = [one.name for one in unit.saved]
    return (*unit.saved, *(SavedRoute(name, recomputed=True) for name in costs.selected if name not in given))


def everything_resident(profile: Profile, activations: Activations = Activations.KEEP) -> Plan:
    """Return the plan in which nothing leaves the device. With activations kept it is the reference for budgets in percent."""
    inner = [UnitPlan(activations) for _ in profile.units[1:-1]]
    return as_executed(Plan("resident", (UnitPlan(), *inner, UnitPlan())), profile)
