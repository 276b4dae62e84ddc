"""How this runtime executes a published system's plan."""

from __future__ import annotations

from dataclasses import replace

from autohete.plan import Activations, BlockPlan, Plan
from autohete.profile import Profile


def as_executed(plan: Plan, profile: Profile) -> Plan:
    """``plan`` with the bytes that the runtime moves and keeps.

    Who computes, moves and updates what, when, and what waits for what stay those of the system. Its transfer formats and
    passes over host memory do not: gradients and parameters cross in the type that the GPU computes with, and the CPU step is
    one fused kernel (``runtime/optimizer.py``) on states, gradient and the only host copy of the parameters.
    """
    element = profile.element_bytes
    return replace(
        plan,
        gradient_bytes=element,
        refresh_bytes=element,
        gradients_pinned=True,
        refresh_pinned=True,
        refresh_through_buffer=False,
        fetch_bytes=None,
        update_bytes=24.0 + 2 * element if element == 2 else 28.0,
        elementwise_bytes=0,
        host_optimizer_bytes=profile.optimizer_bytes + 2 * element,
        host_pinned_bytes=(),
        host_parameter_bytes=element,
        one_host_copy=True,
        host_buffer_bytes=0,
        bound_seconds=None,  # proven for the system's own bytes
    )


def everything_resident(profile: Profile, activations: Activations = Activations.KEEP) -> Plan:
    """Nothing leaves the device; with activations kept, which is the yardstick of budgets, or recomputed."""
    inner = [BlockPlan(activations) for _ in profile.blocks[1:-1]]
    plan = Plan("resident", (BlockPlan(), *inner, BlockPlan()), 0, 0.0, 0, 0, 0)
    return as_executed(plan, profile)
