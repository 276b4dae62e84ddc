"""Full or no activation checkpointing, or the better of the two, as published comparisons run their baselines."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from autohete.errors import check_member
from autohete.plan import Activations, Plan
from autohete.plan.policy import Judge, better


class Checkpointing(StrEnum):
    """Which transformer blocks recompute their activations: all, all selectively, none, or the better of all and none."""

    BEST = "best"
    FULL = "full"
    SELECTIVE = "selective"
    NONE = "none"


def with_checkpointing(choice: Checkpointing, plan_for: Callable[[Activations], Plan], judge: Judge) -> Plan:
    """The plan of ``plan_for`` under ``choice``. For ``BEST``, the faster one that fits."""
    check_member("choice", choice, Checkpointing)
    if choice is Checkpointing.FULL:
        return plan_for(Activations.RECOMPUTE)
    if choice is Checkpointing.SELECTIVE:
        return plan_for(Activations.SELECTIVE)
    if choice is Checkpointing.NONE:
        return plan_for(Activations.KEEP)
    return better([plan_for(Activations.RECOMPUTE), plan_for(Activations.KEEP)], judge)
