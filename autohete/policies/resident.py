"""No offloading: ordinary training with everything on the GPU. The baseline, and the first to run out of memory.

Several GPUs train data-parallel: with stage 0 like PyTorch's DistributedDataParallel, with stage 3 like FSDP2, where each unit
is gathered while the one before it is computed and released after each use. Reductions overlap backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Plan, UnitPlan
from autohete.plan.policy import Judge
from autohete.plan.rules import GpuUpdatesAfterBackward
from autohete.policies.checkpointing import Checkpointing, with_checkpointing
from autohete.policies.several_gpus import shared
from autohete.profile import Profile


@dataclass(frozen=True, slots=True)
class Resident:
    """Everything on the GPU. Gradients live until a fused AdamW uses them after backward.

    Args:
        checkpointing: full, selective, none, or the better of full and none.
        zero_stage: what several GPUs shard: 0 nothing, 1 optimizer states, 2 gradients as well, 3 parameters as well.
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    zero_stage: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.zero_stage <= 3:
            raise InputError(f"resident:zero_stage={self.zero_stage} must be 0, 1, 2 or 3")

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""

        def plan_for(activations: Activations) -> Plan:
            inner = UnitPlan(activations)
            units = (UnitPlan(), *[inner] * (len(profile.blocks) - 2), UnitPlan())
            return Plan(policy="resident", units=shared(units, self.zero_stage, profile), rules=(GpuUpdatesAfterBackward(),))

        return with_checkpointing(self.checkpointing, plan_for, judge)


SYSTEM = Resident
