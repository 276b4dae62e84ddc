"""Removes decisions that do not apply to frozen units.

A frozen unit has no gradients, states or updates, so decisions about them mean nothing there. Units below the first trained one
have no backward either: their forward keeps nothing, and their parameters do not stay for a pass that does not exist. Policies
need not know this: their decisions are read as if they had left such things out.
"""

from __future__ import annotations

from dataclasses import replace

from autohete.errors import InputError
from autohete.plan import Activations, Plan, UnitPlan
from autohete.profile import Profile


def without_frozen(profile: Profile, plan: Plan) -> Plan:
    """Return ``plan`` without decisions on what its frozen units do not have.

    Raises:
        InputError: all parameters are frozen, or the first trained unit drops its input, which nothing below it recomputes.
    """
    if not any(block.is_frozen for block in profile.units):
        return plan
    first = profile.first_trained
    if plan.units[first].activations is Activations.DROP:
        raise InputError(
            f"unit {first} drops its input, but the frozen units below it have no backward and are not recomputed: let it keep "
            "its input (recompute)"
        )
    units = [
        _untrained(unit, has_backward=i >= first) if profile.units[i].is_frozen else unit for i, unit in enumerate(plan.units)
    ]
    # A plan for several GPUs, or one that delays updates, is checked as it was given.
    return replace(plan, units=tuple(units))


def _untrained(unit: UnitPlan, *, has_backward: bool) -> UnitPlan:
    """The decisions for a frozen unit: where its parameters rest, and what it keeps for backward if it has one."""
    route = unit.parameters
    if not has_backward and route.leaves:
        route = replace(route, stays_after_forward=False, stays_after_backward=False)
    if not has_backward:
        return UnitPlan(parameters=route, zero_stage=unit.zero_stage, rank=unit.rank)
    return UnitPlan(
        activations=unit.activations,
        parameters=route,
        kept=unit.kept,
        saved=unit.saved,
        results=unit.results,
        again=unit.again,
        zero_stage=unit.zero_stage,
        rank=unit.rank,
    )
