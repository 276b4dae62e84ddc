"""The seam of decisions: a policy turns a profile into a plan, and touches nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from autohete.errors import check_fields
from autohete.plan import Plan
from autohete.profile import Profile


class Verdict(StrEnum):
    """Whether a plan runs."""

    OK = "ok"
    GPU_OUT_OF_MEMORY = "gpu-out-of-memory"
    HOST_OUT_OF_MEMORY = "host-out-of-memory"
    PINNED_OUT_OF_MEMORY = "pinned-out-of-memory"
    NVME_OUT_OF_MEMORY = "nvme-out-of-memory"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a plan comes to.

    Args:
        verdict: whether it fits.
        seconds: steady iteration time.
        gpu_peak_bytes, host_peak_bytes: peak occupancy.
        pinned_peak_bytes: of pinned memory, where that has a limit.
    """

    verdict: Verdict
    seconds: float
    gpu_peak_bytes: int
    host_peak_bytes: int
    pinned_peak_bytes: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


#: Tries a plan without running it: lowers and simulates. Given to a policy, so that policies import no executor.
Judge = Callable[[Plan], Judgement]


class Policy(Protocol):
    """A system's way of deciding. Deterministic: the same profile and judge give the same plan."""

    @property
    def name(self) -> str:
        """Name and flags in the form in which :func:`autohete.policies.parse_policy` reads them."""
        ...

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """Decide for ``profile.workload`` on ``profile.hardware``.

        A policy that searches raises :class:`~autohete.errors.InfeasibleError` when nothing fits; one with fixed rules
        returns its plan all the same, and the judgement says that memory is exceeded.
        """
        ...


def better(plans: Iterable[Plan], judge: Judge) -> Plan:
    """The fastest plan that fits; if none fits, the one that exceeds the GPU's memory least."""
    judged = [(judge(plan), plan) for plan in plans]
    fitting = [(judgement.seconds, i) for i, (judgement, _) in enumerate(judged) if judgement.verdict is Verdict.OK]
    if fitting:
        return judged[min(fitting)[1]][1]
    return min(judged, key=lambda item: item[0].gpu_peak_bytes)[1]
