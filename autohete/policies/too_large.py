"""A check that avoids simulating a plan that certainly exceeds the GPU's memory."""

from __future__ import annotations

from autohete.plan import Plan
from autohete.planner.optimistic import lower_bytes
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY


def surely_exceeds_gpu(profile: Profile, plan: Plan) -> bool:
    """Whether the GPU memory at the loss, independent of timing, exceeds the capacity.

    If True, a simulation has the verdict ``GPU_OUT_OF_MEMORY``. If False, it may have any verdict.
    """
    return lower_bytes(profile, plan)[GPU_MEMORY] > profile.hardware.gpu_capacity_bytes
