"""No offloading: ordinary training with everything on the GPU. The yardstick, and what runs out of memory first."""

from __future__ import annotations

from dataclasses import dataclass

from autohete.errors import check_fields
from autohete.plan import Activations, BlockPlan, Plan
from autohete.policies.checkpointing import Checkpointing, with_checkpointing
from autohete.policy import Judge
from autohete.profile import Profile


@dataclass(frozen=True, slots=True)
class Resident:
    """Everything on the GPU; gradients live until a fused AdamW takes them after backward.

    Args:
        checkpointing: full, none, or the better of both.
    """

    checkpointing: Checkpointing = Checkpointing.BEST

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.policy.Policy`."""

        def plan_for(activations: Activations) -> Plan:
            inner = BlockPlan(activations)
            return Plan(
                policy="resident",
                blocks=(BlockPlan(), *[inner] * (len(profile.blocks) - 2), BlockPlan()),
                gradient_bytes=profile.element_bytes,
                update_bytes=0,
                refresh_bytes=profile.element_bytes,
                host_optimizer_bytes=0,
                host_parameter_bytes=0,
                gpu_update_after_backward=True,
            )

        return with_checkpointing(self.checkpointing, plan_for, judge)
