"""Rotor (Beaumont et al. 2019, hal-02352969, "Optimal checkpointing for heterogeneous chains"): fastest within the memory.

After a first iteration has measured times and sizes of all units, a dynamic program decides for each forward of each unit,
including recomputations, whether it keeps everything backward needs (*Fall*), its input (*Fck*) or nothing (*Fnone*). A unit
may be recomputed several times, because segments nest; an input that is kept stays until its unit's backward
(*persistent* schedules). The program and its decisions are described in ``planner/chain.py``. The authors' code
(gitlab.inria.fr/hiepacs/rotor) was read in its adaptation by ColossalAI at 11d570fd,
``colossalai/auto_parallel/checkpoint/ckpt_solver_rotor.py``; the text of the paper was not read. Differences:

- Units are those of the workload, such as transformer blocks; embedding and head keep their activations.
- The code rounds all sizes up to a 500th of the memory (``memory_slots``); here they are exact.
- The code assumes that gradients are always allocated. Here those of a unit exist from its backward until the update, which
  follows the last backward, so more memory is available to the units whose backward comes first.
- All other memory is what this package counts: parameters, optimizer states, logits and their gradient.

Among all plans in which nothing leaves the GPU and each unit keeps everything, its input or nothing, this is the fastest that
fits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autohete.errors import check_fields
from autohete.plan import Plan, UnitPlan
from autohete.plan.policy import Judge
from autohete.plan.rules import GpuUpdatesAfterBackward
from autohete.planner.chain import Chain
from autohete.policies.chain_costs import activation_budget_bytes, iteration_seconds, stages
from autohete.profile import Profile


@dataclass(frozen=True, slots=True)
class Rotor:
    """Rotor.

    Args:
        nested: a unit may be recomputed several times, as published. Off: at most once.
    """

    nested: bool = True

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`. If nothing fits, returns the fastest plan with the least memory."""
        first = profile.first_trained  # those below have no backward
        chain = Chain(stages(profile), activation_budget_bytes(profile), nested=self.nested)
        units = (*[UnitPlan()] * first, *(UnitPlan(kept[0], again=tuple(kept[1:-1])) for kept in chain.forwards()))
        plan = Plan("rotor", units, rules=(GpuUpdatesAfterBackward(),))
        return replace(plan, bound_seconds=iteration_seconds(profile, plan)) if chain.exact else plan


SYSTEM = Rotor
