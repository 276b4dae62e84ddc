"""An answer and its parts, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autohete.answer.draws import Sampling
from autohete.plan import Plan, Processor
from autohete.plan.policy import Verdict
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY
from autohete.simulate import Simulation
from autohete.simulate.largest import Largest
from autohete.simulate.summary import Summary
from autohete.workload import Workload

#: Relative differences of times below this are treated as ties.
NOISE = 0.01


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
    def stays(self) -> bool:
        """Whether nothing ever leaves the GPU: the plan does not offload, although it may recompute."""
        return self.plan is not None and not any(
            unit.parameters.home != GPU_MEMORY
            or unit.update.on is Processor.CPU
            or unit.activations_leave
            or unit.states.leaves
            or unit.gradients.leaves
            for unit in self.plan.units
        )


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
    """Something to buy, or to change for nothing.

    Args:
        name: in words.
        moved: hardware figures: dotted key -> text with unit.
        gpus: GPUs that then train together; None: as many as now.
        workload: the workload after the change; None: the same.
        memory: the memory that grows; empty if none does.
    """

    name: str
    moved: Mapping[str, str]
    gpus: int | None = None
    workload: Workload | None = None
    memory: str = ""


@dataclass(frozen=True, slots=True)
class Gain:
    """The effect of a change, with the best of several policies planned anew.

    Args:
        change: see :class:`Change`.
        policy: the best policy then; empty if none fits.
        verdict, explanation: of that policy; if none fits, of the one that was recommended before.
        iteration_seconds: time then; None if none fits.
        tokens_per_second: on all GPUs.
        saved_seconds: of the fastest iteration as it is now, for the same number of tokens; None if nothing fitted before.
        saved_share: of the time for a token.
    """

    change: Change
    policy: str
    verdict: Verdict
    explanation: str
    iteration_seconds: float | None
    tokens_per_second: float | None
    saved_seconds: float | None
    saved_share: float | None

    @property
    def helps(self) -> bool:
        """Whether it brings more than noise."""
        if self.iteration_seconds is None:
            return False
        return self.saved_share is None or self.saved_share >= NOISE


@dataclass(frozen=True, slots=True)
class Need:
    """The least memory with which something fits, found with a policy and simulated.

    Args:
        grows: the memories that have to grow; all others stay as they are.
        gpu_bytes, host_bytes, pinned_bytes: total sizes, with what is reserved or left to the system; None: no limit.
        policy, iteration_seconds: the policy that then fits with the least, and how fast it is.
    """

    grows: tuple[str, ...]
    gpu_bytes: int
    host_bytes: int
    pinned_bytes: int | None
    policy: str
    iteration_seconds: float


@dataclass(frozen=True, slots=True)
class Interval:
    """The interval of the recommended plan's time, from the ranges of the hardware's figures.

    Args:
        sampling: number and seed of the draws.
        figures: how many figures were drawn.
        low_seconds, high_seconds: 5 and 95 % of the iteration time.
        short: in how many draws each memory was too small for this plan.
    """

    sampling: Sampling
    figures: int
    low_seconds: float
    high_seconds: float
    short: Mapping[str, int]

    @property
    def fitting(self) -> int:
        """In how many draws the plan fits."""
        return self.sampling.draws - sum(self.short.values())


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
        gains: the effect of each purchase; ``free``: the effect of each change that costs nothing. If nothing fits, faster
            links, memory or processors are left out, since they do not change that.
        adapters: if nothing fits, the result of training adapters instead of all parameters.
        needs: the least memory, if nothing fits.
        largest: the largest sizes that fit: the requested ones, and the batch if nothing fits.
        interval: None if not asked, if nothing fits, or if times were measured.
        given: names of the figures that were given; all others are assumptions.
        runnable: frameworks of which one has to run the recommended plan; empty if any plan may be recommended.
    """

    profile: Profile
    system_bytes: int
    tokens: int
    candidates: tuple[Candidate, ...]
    simulation: Simulation | None
    budgets: tuple[Budget, ...]
    gains: tuple[Gain, ...]
    free: tuple[Gain, ...]
    adapters: tuple[Gain, ...]
    needs: tuple[Need, ...]
    largest: tuple[Largest, ...]
    interval: Interval | None
    given: tuple[str, ...]
    runnable: tuple[str, ...] = ()

    @property
    def best(self) -> Candidate | None:
        """The recommended policy; None if none fits."""
        return self.candidates[0] if self.candidates[0].fits else None

    @property
    def next_best(self) -> Candidate | None:
        """The fastest candidate with another plan, or None."""
        return next((each for each in self.candidates[1:] if each.fits and not each.same_plan_as), None)

    @property
    def do_not_offload(self) -> bool:
        """Whether the recommended plan moves nothing: offloading would not make it faster by more than noise."""
        return self.best is not None and self.best.stays

    @property
    def binds(self) -> tuple[str, ...]:
        """The memories that bind: those that are too small, or of which more makes training faster."""
        if self.best is None:
            return tuple(dict.fromkeys(memory for need in self.needs for memory in need.grows))
        return tuple(gain.change.memory for gain in self.gains if gain.change.memory and gain.helps)

    @property
    def training_seconds(self) -> float | None:
        """Time for all tokens; None if nothing fits."""
        return None if self.simulation is None else self.tokens / self.simulation.tokens_per_second
