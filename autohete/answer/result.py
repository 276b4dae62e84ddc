"""An answer and its parts, as data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from autohete.answer.draws import Sampling
from autohete.errors import InputError
from autohete.plan import Plan, Processor
from autohete.plan.policy import Verdict
from autohete.profile import Profile
from autohete.quantities import format_rate, format_seconds
from autohete.schedule import GPU_MEMORY
from autohete.simulate import Simulation
from autohete.simulate.largest import Largest
from autohete.simulate.summary import Summary
from autohete.tabular import frame, html_table
from autohete.workload import Workload

if TYPE_CHECKING:
    from pandas import DataFrame

#: Relative differences of times below this are treated as ties.
NOISE = 0.01
#: Joins the names of changes that are made together.
AND = " + "
#: What is at least so probable is stated as a fact.
SURE = 0.95


@dataclass(frozen=True, slots=True)
class Candidate:
    """The result of one policy.

    Args:
        summary: its result, or why it has none.
        plan: None if the policy has none.
        same_plan_as: an earlier candidate with the same decisions; empty if they are its own.
        runs_in: frameworks that can run it, in order of preference.
    """

    summary: Summary
    plan: Plan | None
    same_plan_as: str = ""
    runs_in: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The policy."""
        return self.summary.policy

    @property
    def fits(self) -> bool:
        """Whether it trains."""
        return self.summary.verdict is Verdict.OK

    @property
    def seconds(self) -> float:
        """Time of one iteration; infinite if it does not train."""
        return float("inf") if self.summary.iteration_seconds is None else self.summary.iteration_seconds

    @property
    def seconds_per_token(self) -> float:
        """Time of a token on all GPUs, by which policies are compared; infinite if it does not train."""
        return 1 / self.summary.tokens_per_second if self.summary.tokens_per_second else float("inf")

    @property
    def stays(self) -> bool:
        """Whether nothing ever leaves the GPU: the plan does not offload, although it may recompute."""
        return self.plan is not None and not any(
            unit.parameters.home != GPU_MEMORY
            or unit.update.on is not Processor.GPU
            or unit.activations_leave
            or unit.states.leaves
            or unit.gradients.leaves
            for unit in self.plan.units
        )


def fastest_staying(candidates: Iterable[Candidate]) -> Candidate | None:
    """The fastest of some candidates that fits and moves nothing, or None."""
    return min((each for each in candidates if each.fits and each.stays), key=lambda each: each.seconds_per_token, default=None)


@dataclass(frozen=True, slots=True)
class Budget:
    """One memory under the recommended plan.

    Args:
        memory: ``gpu``, ``pinned``, ``host``, or the name of a place.
        used_bytes: peak; None if nothing fits.
        available_bytes: for tensors.
        total_bytes: of which the rest is reserved or left to the system.
        limited: whether it has a limit of its own; without one, all of the host's memory may be pinned.
    """

    memory: str
    used_bytes: int | None
    available_bytes: int
    total_bytes: int
    limited: bool = True


@dataclass(frozen=True, slots=True)
class Change:
    """Something to buy, or a lever: another way to train the same model.

    Args:
        name: in words; several changes together are joined by :data:`AND`.
        moved: hardware figures: dotted key -> text with unit.
        gpus: GPUs that then train together; None: as many as now.
        workload: the workload after the change; None: the same.
        memory: the memory that grows; empty if none does.
        exact: whether the same gradients are computed from the same sequences in each iteration.
        item: what a purchase has its price under.
    """

    name: str
    moved: Mapping[str, str]
    gpus: int | None = None
    workload: Workload | None = None
    memory: str = ""
    exact: bool = True
    item: str = ""


@dataclass(frozen=True, slots=True)
class Gain:
    """The effect of a change, with the best of several policies planned anew.

    Args:
        change: see :class:`Change`.
        policy: the best policy then; empty if none fits.
        verdict, explanation: of that policy; if none fits, of the one that was recommended before.
        iteration_seconds: time then; None if none fits.
        tokens_per_second: on all GPUs.
        peaks: bytes used of each memory then.
        saved_seconds: of the fastest iteration as it is now, for the same number of tokens; None if nothing fitted before.
        saved_share: of the time for a token.
        price_per_hour: price of the purchase for each hour that it saves of the whole training; None without a price, or if
            nothing is saved.
    """

    change: Change
    policy: str
    verdict: Verdict
    explanation: str
    iteration_seconds: float | None
    tokens_per_second: float | None
    peaks: Mapping[str, int]
    saved_seconds: float | None
    saved_share: float | None
    price_per_hour: float | None = None

    @property
    def fits(self) -> bool:
        """Whether a policy trains after the change."""
        return self.iteration_seconds is not None

    @property
    def helps(self) -> bool:
        """Whether it brings more than noise."""
        return self.fits and (self.saved_share is None or self.saved_share >= NOISE)

    @property
    def seconds_per_token(self) -> float:
        """Time for a token on all GPUs; infinite if nothing fits."""
        return math.inf if self.tokens_per_second is None else 1 / self.tokens_per_second


@dataclass(frozen=True, slots=True)
class Need:
    """The least memory with which something fits, found with a policy and simulated.

    Args:
        grows: the memories that have to grow; all others stay as they are.
        gpu_bytes, host_bytes, pinned_bytes: total sizes, with what is reserved or left to the system; None: no limit.
        policy, iteration_seconds, tokens_per_second: the policy that then fits with the least, and how fast it is; if several
            do, the one with the most tokens/s, as stages of a pipeline share a batch.
    """

    grows: tuple[str, ...]
    gpu_bytes: int
    host_bytes: int
    pinned_bytes: int | None
    policy: str
    iteration_seconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Interval:
    """The interval of the recommended plan's time, from the ranges of the hardware's figures and the error of the model.

    Args:
        sampling: number and seed of the draws.
        figures: how many figures were drawn.
        model_error: mean error of the model's times, as a share.
        low_seconds, high_seconds: 5 and 95 % of the iteration time.
        short: in how many draws each memory was too small for this plan.
        faster_than_staying: probability that the plan is faster than the fastest one that moves nothing; None if there is no
            other that does.
    """

    sampling: Sampling
    figures: int
    model_error: float
    low_seconds: float
    high_seconds: float
    short: Mapping[str, int]
    faster_than_staying: float | None

    @property
    def fitting(self) -> int:
        """In how many draws the plan fits."""
        return self.sampling.draws - sum(self.short.values())


class Offloading(StrEnum):
    """Whether to move anything off the GPU."""

    NEEDED = "needed"
    PAYS = "pays"
    UNDECIDED = "undecided"
    DOES_NOT_PAY = "does not pay"


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Everything that is known about one workload on one hardware.

    Args:
        profile: of the workload on one GPU's share of the hardware, less what is left to the system.
        system_bytes: host memory that is reserved for the system.
        tokens: the number of tokens to train on.
        candidates: all policies: what trains, fastest first, then the others. The first is recommended.
        simulation: of the recommended plan; None if nothing fits.
        budgets: GPU, pinned and host memory, and places.
        levers: the effect of other ways to train, alone and combined, best first.
        purchases: the effect of each purchase, and of two together, best first. If nothing fits, faster links, memory or
            processors are left out, since they do not change that.
        needs: the least memory, if nothing fits.
        largest: the largest sizes that fit: the requested ones, and the batch if nothing fits.
        interval: None if not asked, if nothing fits, or if times were measured.
        given: names of the figures that were given; all others are assumptions.
        chosen: names of the figures that were searched for.
        left_out: what there was no time for.
        runnable: frameworks of which one has to run the recommended plan; empty if any plan may be recommended.
    """

    profile: Profile
    system_bytes: int
    tokens: int
    candidates: tuple[Candidate, ...]
    simulation: Simulation | None
    budgets: tuple[Budget, ...]
    levers: tuple[Gain, ...]
    purchases: tuple[Gain, ...]
    needs: tuple[Need, ...]
    largest: tuple[Largest, ...]
    interval: Interval | None
    given: tuple[str, ...]
    chosen: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    runnable: tuple[str, ...] = ()

    def __repr__(self) -> str:
        best = (
            "nothing fits" if self.best is None else f"{self.best.name} takes {format_seconds(self.best.seconds)} per iteration"
        )
        return f"<Answer: {self.profile.workload.name} on {self.profile.hardware.name}: {best}>"

    def _repr_html_(self) -> str:
        return html_table(
            f"{self.profile.workload.name} on {self.profile.hardware.name}",
            (
                {
                    "policy": each.name,
                    "verdict": each.summary.verdict,
                    "iteration": format_seconds(each.seconds) if each.fits else "-",
                    "tokens/s": format_rate(each.summary.tokens_per_second) if each.summary.tokens_per_second else "-",
                    "why": each.summary.explanation,
                }
                for each in self.candidates
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the document of ``autohete plan --json``: everything, in SI units."""
        from autohete.answer.answer_document import answer_json

        return answer_json(self)

    def to_frame(self) -> DataFrame:
        """Return a frame of pandas with a row for each policy, in the order of :attr:`candidates`.

        Raises:
            InputError: pandas is not installed.
        """
        return frame(self.to_dict()["policies"])

    def gantt(self, iterations: int = 2) -> Any:
        """Return a figure of matplotlib with the best plan, see :meth:`autohete.simulate.Simulation.gantt`.

        Raises:
            InputError: nothing fits.
        """
        if self.simulation is None:
            raise InputError("there is nothing to draw: nothing fits; needs has the least memory with which something does")
        return self.simulation.gantt(iterations)

    @property
    def best(self) -> Candidate | None:
        """The recommended policy; None if none fits."""
        return self.candidates[0] if self.candidates[0].fits else None

    @property
    def next_best(self) -> Candidate | None:
        """The fastest candidate with another plan, or None."""
        return next((each for each in self.candidates[1:] if each.fits and not each.same_plan_as), None)

    @property
    def staying(self) -> Candidate | None:
        """The fastest candidate that fits and moves nothing, or None."""
        return fastest_staying(self.candidates)

    @property
    def offloading(self) -> Offloading | None:
        """Whether offloading pays: whether it is faster beyond the uncertainty. None if nothing fits."""
        if self.best is None:
            return None
        if self.best.stays:
            return Offloading.DOES_NOT_PAY
        if self.staying is None:
            return Offloading.NEEDED
        sure = self.interval is None or self.interval.faster_than_staying is None or self.interval.faster_than_staying >= SURE
        return Offloading.PAYS if sure else Offloading.UNDECIDED

    @property
    def binds(self) -> tuple[str, ...]:
        """The memories that bind: those that are too small, or of which more makes training faster."""
        if self.best is None:
            return tuple(dict.fromkeys(memory for need in self.needs for memory in need.grows))
        return tuple(gain.change.memory for gain in self.purchases if gain.change.memory and gain.helps)

    @property
    def training_seconds(self) -> float | None:
        """Time for all tokens; None if nothing fits."""
        return None if self.simulation is None else self.tokens / self.simulation.tokens_per_second
