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
from autohete.planner.chain import Chain, Stage
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
        budget = (
            profile.hardware.gpu_capacity_bytes - _there_bytes(profile) - (profile.units[first].input_bytes if first else 0)
        )
        chain = Chain(_stages(profile)[first:], budget, nested=self.nested)
        units = (*[UnitPlan()] * first, *(UnitPlan(kept[0], again=tuple(kept[1:-1])) for kept in chain.forwards()))
        plan = Plan("rotor", units, rules=(GpuUpdatesAfterBackward(),))
        # The program counts a recomputation as a forward.
        exact = chain.exact and all(unit.shorter_recompute_seconds is None for unit in profile.units)
        return replace(plan, bound_seconds=_iteration_seconds(profile, plan)) if exact else plan


def _iteration_seconds(profile: Profile, plan: Plan) -> float:
    """Iteration time: the GPU runs all tasks one after another, and no other lane has any."""
    units = profile.units
    passes = sum(round(unit.forward_seconds * 1e9) for unit in units)
    passes += sum(round(unit.backward_seconds * 1e9) for unit in units[profile.first_trained :])
    for done in plan.recomputations():
        for again in done:
            times = units[again.unit]
            passes += round((times.forward_seconds if again.hands_on else times.recompute_seconds) * 1e9)
    passes += round(profile.loss.seconds * 1e9)
    updates = sum(round(unit.gpu_update_seconds * 1e9) for unit in units if not unit.is_frozen)
    return (profile.workload.micro_batches * passes + updates) * 1e-9


def _gradients(profile: Profile) -> list[int]:
    return [unit.trained_parameters * profile.element_bytes for unit in profile.units]


def _there_bytes(profile: Profile) -> int:
    """Bytes that are always allocated. Includes gradients if those of several micro-batches are accumulated."""
    states = sum(map(profile.state_bytes, range(len(profile.units))))
    resident = states + sum(map(profile.parameter_bytes, range(len(profile.units))))
    return resident + (sum(_gradients(profile)) if profile.workload.micro_batches > 1 else 0)


def _stages(profile: Profile) -> list[Stage]:
    """Stages for the embedding, the blocks, and the head with the loss."""
    units, loss, gradients, last = profile.units, profile.loss, _gradients(profile), len(profile.units) - 1
    held_logits = loss.logits_bytes if loss.keeps_logits else 0
    accumulates = profile.workload.micro_batches > 1
    stages = []
    for unit, times in enumerate(units):
        output = loss.logits_bytes if unit == last else units[unit + 1].input_bytes
        made, backward = gradients[unit], times.backward_workspace_bytes
        left = 0 if accumulates else made
        if accumulates:  # to gradients that are there, one parameter after another
            made = times.added_elements * profile.element_bytes
        if profile.workload.tied_embeddings and unit == 0:
            made = left = 0  # exists from the head's backward on
        if unit == last:
            tied = gradients[0] if profile.workload.tied_embeddings else 0
            made, left = made + tied, left + tied + held_logits
            backward = max(
                loss.logits_bytes + held_logits + backward + times.input_bytes + made,
                loss.peak_bytes,
            )
        elif unit > profile.first_trained:
            backward += times.input_bytes + made
        else:
            backward += made
        stages.append(
            Stage(
                forward_ns=round(times.forward_seconds * 1e9),
                input_bytes=times.input_bytes if unit else 0,
                output_bytes=output,
                gradient_bytes=0 if unit == last else output,
                kept_bytes=times.kept_bytes if unit else times.activation_bytes,
                keeping_bytes=times.forward_workspace_bytes,
                dropping_bytes=times.checkpointed_workspace_bytes,
                backward_bytes=backward,
                left_bytes=left,
                keeps=unit in (0, last),
            )
        )
    return stages


SYSTEM = Rotor
