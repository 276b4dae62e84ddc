"""The policy interface: a policy turns a profile into a plan and has no side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from autohete.errors import check_fields
from autohete.plan import Plan
from autohete.profile import Profile


class Verdict(StrEnum):
    """Whether a plan runs. ``INVALID``: the policy has no plan for this workload on this hardware."""

    OK = "ok"
    GPU_OUT_OF_MEMORY = "gpu-out-of-memory"
    HOST_OUT_OF_MEMORY = "host-out-of-memory"
    PINNED_OUT_OF_MEMORY = "pinned-out-of-memory"
    NVME_OUT_OF_MEMORY = "nvme-out-of-memory"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The simulated time and memory of a plan.

    Args:
        verdict: whether it fits.
        seconds: steady-state iteration time.
        gpu_peak_bytes, host_peak_bytes: peak occupancy.
        pinned_peak_bytes: peak of pinned memory, where pinned memory is limited.
        exact: simulated in full, not estimated.
    """

    verdict: Verdict
    seconds: float
    gpu_peak_bytes: int
    host_peak_bytes: int
    pinned_peak_bytes: int = 0
    exact: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


#: Evaluates a plan by lowering and simulating it. Passed to a policy, so that policies import no executor.
Judge = Callable[[Plan], Judgement]


@runtime_checkable
class EstimatingJudge(Protocol):
    """A judge that can also estimate, which takes less time where an iteration has many micro-batches."""

    def __call__(self, plan: Plan) -> Judgement: ...
    def estimate(self, plan: Plan) -> Judgement: ...


def estimates(judge: Judge) -> Judge:
    """Return the estimates of ``judge``; of one that has none, ``judge`` itself."""
    return judge.estimate if isinstance(judge, EstimatingJudge) else judge


class Policy(Protocol):
    """How a system decides. Deterministic: the same profile and judge give the same plan."""

    @property
    def name(self) -> str:
        """Name and flags in the form that :func:`autohete.policies.parse_policy` reads."""
        ...

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """Return the plan for ``profile.workload`` on ``profile.hardware``.

        A policy that searches raises :class:`~autohete.errors.InfeasibleError` when nothing fits. A policy with fixed decisions
        returns its plan anyway; the judgement then reports that memory is exceeded.
        """
        ...


def better(plans: Iterable[Plan], judge: Judge) -> Plan:
    """Return the fastest plan that fits, or if none fits, the one with the lowest GPU peak."""
    judged = [(judge(plan), plan) for plan in plans]
    fitting = [(judgement.seconds, i) for i, (judgement, _) in enumerate(judged) if judgement.verdict is Verdict.OK]
    if fitting:
        return judged[min(fitting)[1]][1]
    return min(judged, key=lambda item: item[0].gpu_peak_bytes)[1]
