"""The policy interface: a policy turns a profile into a plan and has no side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from autohete.errors import InputError, check_fields
from autohete.plan import Plan
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY


class Verdict(str):
    """Whether a plan runs: ``ok``; ``invalid``, if the policy has no plan for this workload on this hardware; or the memory
    that is too small, such as ``nvme-out-of-memory``. There is one object for each text, so ``is`` compares verdicts.
    """

    __slots__ = ()
    _known: ClassVar[dict[str, Verdict]] = {}
    OK: ClassVar[Verdict]
    INVALID: ClassVar[Verdict]
    GPU_OUT_OF_MEMORY: ClassVar[Verdict]
    HOST_OUT_OF_MEMORY: ClassVar[Verdict]
    PINNED_OUT_OF_MEMORY: ClassVar[Verdict]

    def __new__(cls, text: str) -> Verdict:
        if text not in ("ok", "invalid") and not text.removesuffix(_SHORT) < text:
            raise InputError(f"{text!r} is no verdict: give ok, invalid, or the name of a memory and {_SHORT}")
        return cls._known.setdefault(text, super().__new__(cls, text))

    def __getnewargs__(self) -> tuple[str]:
        return (str(self),)

    @classmethod
    def short_of(cls, memory: str) -> Verdict:
        """The verdict that ``memory`` is too small."""
        return cls(memory + _SHORT)

    @property
    def short(self) -> str:
        """The memory that is too small; empty if none is."""
        return self.removesuffix(_SHORT) if self.endswith(_SHORT) else ""


_SHORT = "-out-of-memory"
Verdict.OK, Verdict.INVALID = Verdict("ok"), Verdict("invalid")
Verdict.GPU_OUT_OF_MEMORY = Verdict.short_of(GPU_MEMORY)
Verdict.HOST_OUT_OF_MEMORY = Verdict.short_of(HOST_MEMORY)
Verdict.PINNED_OUT_OF_MEMORY = Verdict.short_of(PINNED_MEMORY)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The simulated time and memory of a plan.

    Args:
        verdict: whether it fits.
        seconds: steady-state iteration time; of pipelines, whose ranks share a batch, that of as many iterations as train the
            batches of all GPUs.
        peaks: peak occupancy of each memory.
        exact: simulated in full, not estimated.
    """

    verdict: Verdict
    seconds: float
    peaks: Mapping[str, int] = field(default_factory=dict)
    exact: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.verdict, Verdict):
            raise InputError(f"verdict is {self.verdict!r}: give a Verdict, such as Verdict.OK")

    @property
    def gpu_peak_bytes(self) -> int:
        """Peak occupancy of the GPU."""
        return self.peaks.get(GPU_MEMORY, 0)

    @property
    def host_peak_bytes(self) -> int:
        """Peak occupancy of the host."""
        return self.peaks.get(HOST_MEMORY, 0)


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
