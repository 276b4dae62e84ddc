"""Full or no activation checkpointing, or the better of the two, as published comparisons run their baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum

from autohete.errors import InputError, check_member
from autohete.lowering import never_fits
from autohete.plan import Activations, Plan, SavedRoute
from autohete.plan.policy import Judge, Verdict, better
from autohete.profile import Profile
from autohete.profile.costs import ALTERNATE
from autohete.workload import EAGER_KERNELS

#: Operations of the host that ``torch.utils.checkpoint``, reentrant, adds to the recomputation of a block of transformers.
#: Not reentrant, it adds 90 to 140 to the forward and 170 to 280 to the recomputation (benchmarks/host_time.py).
_CHECKPOINT_OPERATIONS = 60


class Checkpointing(StrEnum):
    """Which transformer blocks recompute their activations: all, all selectively, none, or the better of all and none.

    ``ALTERNATE`` recomputes all but the results of every second product with weights and of fused attention: ``op`` of
    torchtitan (9dec370, ``parallelize_llama.py``, ``_apply_ac_to_transformer_block``), which fms-fsdp and others have as well.
    What the host does for it, a call of Python for each operation, is not modelled.
    """

    BEST = "best"
    FULL = "full"
    SELECTIVE = "selective"
    ALTERNATE = "alternate"
    NONE = "none"


def choosable(profile: Profile) -> tuple[Checkpointing, ...]:
    """What users choose from: the better of all and none, or selective recomputation where the profile supports it."""
    selects = all(unit.selected for unit in profile.units[max(1, profile.first_trained) : -1])
    return (Checkpointing.BEST, Checkpointing.SELECTIVE) if selects else (Checkpointing.BEST,)


def with_checkpointing(choice: Checkpointing, plan_for: Callable[[Activations], Plan], profile: Profile, judge: Judge) -> Plan:
    """The plan of ``plan_for`` under ``choice``. For ``BEST``, the faster one that fits."""
    check_member("choice", choice, Checkpointing)

    def recomputing() -> Plan:
        plan = plan_for(Activations.RECOMPUTE)
        if profile.workload.kernels not in EAGER_KERNELS:
            return plan
        return replace(plan, hooks=replace(plan.hooks, recomputation=_CHECKPOINT_OPERATIONS))

    if choice is Checkpointing.FULL:
        return recomputing()
    if choice is Checkpointing.ALTERNATE:
        return _alternate(recomputing(), profile)
    if choice is Checkpointing.SELECTIVE:
        return plan_for(Activations.SELECTIVE)
    if choice is Checkpointing.NONE:
        return plan_for(Activations.KEEP)
    full, none = recomputing(), plan_for(Activations.KEEP)
    if judge(full).verdict is Verdict.OK and never_fits(profile, none):
        return full  # the other need not be simulated
    return better([full, none], judge)


def _alternate(plan: Plan, profile: Profile) -> Plan:
    """``plan``, whose recomputations take the results of every second product."""
    again = [one.activations is Activations.RECOMPUTE for one in plan.units]
    for i, (unit, recomputes) in enumerate(zip(profile.units, again, strict=True)):
        if recomputes and ALTERNATE not in [one.name for one in unit.results]:
            raise InputError(
                "checkpointing=alternate needs blocks of softmax attention and a dense MLP, without adapters, whose profile "
                f"names what their products give, but unit {i} is none: give full or selective"
            )
    kept = (SavedRoute(ALTERNATE),)
    units = (replace(one, results=kept) if recomputes else one for one, recomputes in zip(plan.units, again, strict=True))
    return replace(plan, units=tuple(units))
