"""Plans for batches of several lengths. They differ in what becomes of activations, so a change of the plan moves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autohete.errors import InputError, check_whole
from autohete.plan import Activations, Route, UnitPlan
from autohete.profile import Profile
from autohete.simulate import Simulation, safety, simulate_plan


def check_buckets(given: object) -> tuple[int, ...]:
    """Return the lengths that a user gives, in order.

    Raises:
        InputError: they are not positive whole numbers.
    """
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InputError(f"buckets is {given!r}: give lengths of sequences, such as [128, 256, 512]")
    for length in given:
        check_whole("a length in buckets", length, 1)
    return tuple(sorted({*given}))


def keeping_more(largest: Simulation, profile: Profile) -> Simulation:
    """Return the plan of ``largest`` for shorter batches. As many of the last units as fit keep all their activations on the
    GPU; all others, and all parameters, gradients and states, are as they were.

    Args:
        largest: simulation of the longest batches.
        profile: of shorter ones.
    """
    profile = replace(profile, hardware=largest.profile.hardware)
    others = [i for i, unit in enumerate(largest.plan.units) if unit != _keeping(unit)]

    def tried(count: int) -> Simulation | None:
        chosen = others[len(others) - count :]
        units = tuple(_keeping(unit) if i in chosen else unit for i, unit in enumerate(largest.plan.units))
        try:
            return safety(simulate_plan(profile, replace(largest.plan, units=units))).safe
        except InputError:  # a rule of the plan needs what is recomputed
            return None

    found, most, beyond = [tried(0)], 0, len(others) + 1
    while beyond - most > 1:
        middle = (most + beyond) // 2
        found.append(tried(middle))
        most, beyond = (most, middle) if found[-1] is None else (middle, beyond)
    fitting = [one for one in found if one is not None]
    return min(fitting, key=lambda one: one.iteration_seconds) if fitting else largest


def _keeping(unit: UnitPlan) -> UnitPlan:
    """The same decisions, but for activations that stay on the GPU."""
    return replace(unit, activations=Activations.KEEP, again=(), kept=Route(), saved=())
