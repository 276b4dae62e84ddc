"""The policies that are judged, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autohete.answer.result import NOISE, Candidate
from autohete.frameworks import Decided, runs_in
from autohete.plan import Plan
from autohete.policies import POLICIES, parse_policy
from autohete.profile import Profile
from autohete.simulate.summary import answer_or_refusal

#: Decides for each unit, and is never slower than another policy that fits. For one GPU.
JOINT = "joint"


def default_policies(gpus: int = 1) -> tuple[str, ...]:
    """Every registered system with its default flags; with several GPUs also ordinary training that shards what it needs not
    replicate."""
    return (*POLICIES, *(["resident:zero_stage=2", "resident:zero_stage=3"] if gpus > 1 else []))


def longest_first(names: Sequence[str]) -> list[str]:
    """Policies in the order in which to start them: those that search take as long as all others together."""
    return sorted(names, key=lambda name: name.partition(":")[0] not in (JOINT, "autohete"))


def judged(profile: Profile, name: str) -> Candidate:
    policy = parse_policy(name)
    summary, simulation = answer_or_refusal(profile, policy)
    if simulation is None:
        return Candidate(summary, None)
    decided = Decided(profile, policy.system, simulation.plan, simulation.iteration_seconds, simulation.gpu.peak_bytes)
    return Candidate(summary, simulation.plan, runs_in=runs_in(decided))


def ranked(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Order candidates: those that fit, fastest first.

    A plan that moves nothing precedes plans that are faster only by noise; of several such plans, the simplest is first.
    """
    order = sorted(
        candidates,
        key=lambda each: (each.seconds, each.fits and (not each.stays, each.name.partition(":")[0] == JOINT), each.name),
    )
    limit = order[0].seconds * (1 + NOISE)
    stays = [each for each in order if each.fits and each.stays and each.seconds <= limit]
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
