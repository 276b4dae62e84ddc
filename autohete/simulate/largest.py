"""The largest batch, sequence or model that fits under a policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from autohete.errors import InfeasibleError, InputError, check_fields
from autohete.hardware import Hardware
from autohete.plan import Plan
from autohete.plan.policy import Judgement, Policy, Verdict
from autohete.profile import Profile, analytic_profile
from autohete.profile.divided import least_tokens
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
    looked for. It searches only until a plan fits. Sequences are as long as the GPUs can divide, and blocks at least as many as
    the policy takes, such as one for each stage of a pipeline.

    Raises:
        InputError: the policy cannot plan the workload at all.
    """
    step = least_tokens(hardware.parallelism) if figure is GrowingFigure.SEQUENCE else 1

    def grown(value: int) -> Workload:
        return replace(workload, **{figure: value * step})  # type: ignore[arg-type]

    def why_not(value: int) -> str:
        """Why it does not fit; empty if it does."""
        if value * step > LIMITS[figure]:
            return f"{figure} is at most {LIMITS[figure]:,}"
        try:
            profile = analytic_profile(grown(value), hardware)
        except InputError as error:  # such as more tokens than learned positions
            return str(error)
        return misfit(profile, policy)

    def first() -> tuple[int, str]:
        """The least value that the policy takes, and why that does not fit."""
        given = workload.transformer_blocks if figure is GrowingFigure.BLOCKS else 1
        for value in range(1, given):
            try:
                return value, why_not(value)
            except InputError:
                continue
        return given, why_not(given)

    fits, (too_many, limit) = 0, first()
    least = too_many
    while not limit:
        fits, too_many = too_many, 2 * too_many
        limit = why_not(too_many)
    while fits and too_many - fits > 1:
        middle = (fits + too_many) // 2
        reason = why_not(middle)
        if reason:
            too_many, limit = middle, reason
        else:
            fits = middle
    return Largest(grown(fits or least), figure, fits * step, limit)
