"""The largest batch, sequence or model that fits under a policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from autohete.errors import InfeasibleError, InputError, check_fields
from autohete.hardware import Hardware
from autohete.plan import Plan
from autohete.plan.policy import Judgement, Policy, Verdict
from autohete.profile import Profile, analytic_profile
from autohete.simulate import judge_for, simulate_plan
from autohete.workload import LIMITS, Workload


class GrowingFigure(StrEnum):
    """A figure of the workload that may grow, by its name there."""

    BATCH = "batch_size"
    SEQUENCE = "sequence_length"
    BLOCKS = "transformer_blocks"


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest value of a figure.

    Args:
        workload: with that value; it fits, unless the value is 0.
        figure: the figure that has grown.
        value: of it; 0 if not even 1 fits.
        limit: why one more is too many.
    """

    workload: Workload
    figure: GrowingFigure
    value: int
    limit: str

    def __post_init__(self) -> None:
        check_fields(self)


class _Fits(Exception):
    """A policy has judged a plan that fits. No error: it ends a search that would go on for a faster plan."""


def misfit(profile: Profile, policy: Policy) -> str:
    """Why no plan of ``policy`` fits; empty if one does. Ends at the first one: the fastest does not matter here.

    Raises:
        InputError: the policy cannot plan the workload at all.
    """
    judge = judge_for(profile)

    def first(plan: Plan) -> Judgement:
        judgement = judge(plan)
        if judgement.verdict is Verdict.OK and not plan.delayed:
            raise _Fits
        return judgement

    try:
        found = simulate_plan(profile, policy.plan(profile, first))
    except _Fits:
        return ""
    except InfeasibleError as error:
        return f"{error.constraint}-out-of-memory"
    return "" if found.verdict is Verdict.OK else str(found.verdict)


def largest(workload: Workload, hardware: Hardware, policy: Policy, figure: GrowingFigure) -> Largest:
    """The largest ``figure`` with which ``workload`` fits under ``policy``; one more does not.

    Doubles the figure until it does not fit, and halves the interval. A policy that searches may fit again above; that is not
    looked for. It searches only until a plan fits.

    Raises:
        InputError: the policy cannot plan the workload at all.
    """

    def why_not(value: int) -> str:
        """Why it does not fit; empty if it does."""
        if value > LIMITS[figure]:
            return f"{figure} is at most {LIMITS[figure]:,}"
        try:
            grown = analytic_profile(replace(workload, **{figure: value}), hardware)  # type: ignore[arg-type]
        except InputError as error:  # such as more tokens than learned positions
            return str(error)
        return misfit(grown, policy)

    fits, too_many = 0, 1
    while not (limit := why_not(too_many)):
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        reason = why_not(middle)
        if reason:
            too_many, limit = middle, reason
        else:
            fits = middle
    return Largest(replace(workload, **{figure: max(fits, 1)}), figure, fits, limit)  # type: ignore[arg-type]
