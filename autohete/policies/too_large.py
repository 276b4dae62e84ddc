"""A check that avoids simulating a plan that certainly exceeds the GPU's memory."""

from __future__ import annotations

from autohete.lowering.footprint import resident_buffers
from autohete.lowering.frozen import without_frozen
from autohete.lowering.shards import Shards
from autohete.plan import Plan
from autohete.planner.rows import here_bytes
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY


def surely_exceeds_gpu(profile: Profile, plan: Plan) -> bool:
    """Whether the GPU memory at the loss, independent of timing, exceeds the capacity: resident bytes and what forward keeps.

    If True, a simulation has the verdict ``GPU_OUT_OF_MEMORY``. If False, it may have any verdict.
    """
    plan = without_frozen(profile, plan)
    resident = resident_buffers(profile, plan, Shards(profile, plan))
    needed = sum(buffer.size_bytes for buffer in resident if buffer.memory == GPU_MEMORY)
    needed += sum(here_bytes(profile, i, unit) for i, unit in enumerate(plan.units))
    return needed > profile.hardware.gpu_capacity_bytes
