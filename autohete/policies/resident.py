"""No offloading: ordinary training with everything on the GPU. The yardstick, and what runs out of memory first."""

from __future__ import annotations

from dataclasses import dataclass

from autohete.errors import check_fields
from autohete.plan import Activations, Plan, UnitPlan
from autohete.plan.rules import GpuUpdatesAfterBackward
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
            inner = UnitPlan(activations)
            units = (UnitPlan(), *[inner] * (len(profile.blocks) - 2), UnitPlan())
            return Plan(policy="resident", units=units, rules=(GpuUpdatesAfterBackward(),))

        return with_checkpointing(self.checkpointing, plan_for, judge)


SYSTEM = Resident
