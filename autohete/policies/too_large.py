"""A check that avoids simulating a plan that certainly exceeds the GPU's memory."""

from __future__ import annotations

from autohete.plan import Activations, Plan
from autohete.planner.choices import Choices
from autohete.planner.rows import Costs
from autohete.profile import Profile


def surely_exceeds_gpu(profile: Profile, plan: Plan) -> bool:
    """Whether the GPU memory at the loss, independent of timing, exceeds the capacity: resident bytes and what forward keeps.

    If True, a simulation has the verdict ``GPU_OUT_OF_MEMORY``. If False (always with several GPUs), it may have any verdict.
    """
    if profile.hardware.gpus > 1:
        return False
    costs = Costs(profile, plan, Choices((), ()))
    needed, leaving = float(plan.footprint.gpu_buffer_bytes), 0.0
    for i, unit in enumerate(plan.units):
        leaving = max(leaving, costs.leaving_bytes(i, unit))
        needed += costs.resident_bytes(i, unit)
        if unit.activations is not Activations.DROP:
            needed += costs.here_bytes(i, unit)
    if plan.slots is not None:
        needed += plan.slots.count * leaving * (2 if plan.slots.with_gradients else 1)
    return needed > profile.hardware.gpu_capacity_bytes
