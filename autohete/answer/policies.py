"""The policies that are judged, and their order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autohete.answer.result import NOISE, Candidate
from autohete.errors import AutoHeteError
from autohete.frameworks import Decided, runs_in
from autohete.plan import Plan
from autohete.plan.policy import Verdict
from autohete.planner.optimistic import OptimisticJudge
from autohete.policies import FOUND_SOONER, PIPELINES, POLICIES, STALE, NamedPolicy, parse_policy
from autohete.profile import Profile
from autohete.simulate import Simulation, simulate_policy
from autohete.simulate.summary import answer_or_refusal, summarize

#: Decides for each unit, and is never slower than another policy that fits. For one GPU.
JOINT = "joint"


def default_policies(gpus: int = 1, pipeline: int = 1) -> tuple[str, ...]:
    """Every registered system whose plan no other finds sooner, and that trains synchronously; with several GPUs also ordinary
    training that shards what it needs not replicate. Where so many GPUs are to have stages of a ``pipeline``, those that plan
    stages.
    """
    if pipeline > 1:
        return PIPELINES
    others = ("resident:zero_stage=2", "resident:zero_stage=3") if gpus > 1 else ()
    return (*(name for name in POLICIES if name not in (*FOUND_SOONER, *STALE)), *others)


def longest_first(names: Sequence[str]) -> list[str]:
    """Policies in the order in which to start them: those that search take as long as all others together."""
    return sorted(names, key=lambda name: name.partition(":")[0] not in (JOINT, "autohete"))


@dataclass(frozen=True, slots=True)
class Judged:
    """A policy judged with each of some flags.

    Args:
        profile: of the workload on the hardware.
        names: the policy with its flags, the default ones first.
        runnable: frameworks, of which one has to run the plan; none: any plan may be.
    """

    profile: Profile
    names: tuple[str, ...]
    runnable: tuple[str, ...] = ()

    def __call__(self) -> Candidate:
        """The result with the flags that are fastest; if none fits, with the first ones."""
        best: tuple[Simulation, NamedPolicy, tuple[str, ...]] | None = None
        policies = [parse_policy(name) for name in self.names]
        for least, policy in self._hopeful(policies) if len(policies) > 1 else ():
            if best is not None and least >= best[0].comparable_seconds:
                break
            with suppress(AutoHeteError):  # does not fit, or cannot plan this
                found = simulate_policy(self.profile, policy)
                able = self._runs_in(found, policy)
                if found.verdict is not Verdict.OK or (self.runnable and not {*able} & {*self.runnable}):
                    continue
                if best is None or found.comparable_seconds < best[0].comparable_seconds:
                    best = found, policy, able
        if best is not None:
            return Candidate(summarize(*best[:2]), best[0].plan, runs_in=best[2])
        summary, simulation = answer_or_refusal(self.profile, policies[0])
        if simulation is None:
            return Candidate(summary, None)
        return Candidate(summary, simulation.plan, runs_in=self._runs_in(simulation, policies[0]))

    def _runs_in(self, found: Simulation, policy: NamedPolicy) -> tuple[str, ...]:
        return runs_in(Decided(self.profile, policy.system, found.plan, found.iteration_seconds, found.gpu.peak_bytes))

    def _hopeful(self, policies: Sequence[NamedPolicy]) -> list[tuple[float, NamedPolicy]]:
        """What may fit, with a lower bound of its time, the lowest first."""
        optimist, found = OptimisticJudge(self.profile, math.inf), []
        for policy in policies:
            with suppress(AutoHeteError):
                judged = optimist(policy.plan(self.profile, optimist))
                if judged.verdict is Verdict.OK:
                    found.append((judged.seconds, policy))
        return sorted(found, key=lambda one: one[0])


def ranked(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Order candidates: those that fit, fastest first.

    A plan that moves nothing precedes plans that are faster only by noise; of several such plans, the simplest is first. What
    several searches end at is listed once.
    """
    if not candidates:
        return ()
    order = sorted(
        {each.name: each for each in candidates}.values(),
        key=lambda each: (
            each.seconds_per_token,
            each.fits and (not each.stays, each.name.partition(":")[0] == JOINT),
            each.name,
        ),
    )
    limit = order[0].seconds_per_token * (1 + NOISE)
    stays = [each for each in order if each.fits and each.stays and each.seconds_per_token <= limit]
    if stays:
        simplest = min(stays, key=_effort)
        order.remove(simplest)
        order.insert(0, simplest)
    first: dict[Plan, str] = {}
    ranked = []
    for each in order:
        if each.fits and each.plan is not None:
            earlier = first.setdefault(each.plan, each.name)
            each = replace(each, same_plan_as="" if earlier == each.name else earlier)
        ranked.append(each)
    return tuple(ranked)


def _effort(each: Candidate) -> tuple[int, bool]:
    """How much a candidate that moves nothing does: recomputations, then whether it is more than ordinary training."""
    assert each.plan is not None
    return each.plan.checkpointed_units, each.name.partition(":")[0] != "resident"
