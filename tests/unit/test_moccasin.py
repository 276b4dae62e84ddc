"""Moccasin's intervals: what is computed twice, against exhaustive choice and the dynamic and integer programs of others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from support.paper import profile_with

from autohete.lowering import lower
from autohete.plan import Activations, Plan, SavedRoute, UnitPlan
from autohete.plan.policy import Judgement, Verdict
from autohete.plan.rules import GpuUpdatesAfterBackward
from autohete.planner.chain import Stage
from autohete.planner.interval_program import GAP, Alone, FirstInterval, Remade, least_by_intervals, peak_bytes
from autohete.policies import parse_policy
from autohete.policies.chain_costs import stages
from autohete.policies.moccasin import what_is_made_alone
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY
from autohete.simulate import judge_for

KEEP, SELECTIVE, RECOMPUTE, DROP = Activations
NOTHING = Alone((), 0, 0)


def intervals_of(units: int, names: tuple[str, ...]) -> Iterator[tuple[FirstInterval, ...]]:
    """All ways to keep what so many units save, of which the first and last keep all."""
    one = [
        FirstInterval(KEEP),
        FirstInterval(RECOMPUTE),
        FirstInterval(DROP),
        *(FirstInterval(SELECTIVE, (name,)) for name in names),
    ]
    for inner in product(one, repeat=units - 2):
        chosen = (FirstInterval(KEEP), *inner, FirstInterval(KEEP))
        pairs = zip(chosen, chosen[1:], strict=False)
        if not any(upper.kept is DROP and lower.kept in (KEEP, SELECTIVE) for lower, upper in pairs):
            yield chosen


def plan_of(intervals: tuple[FirstInterval, ...]) -> Plan:
    units = (UnitPlan(one.kept, saved=tuple(SavedRoute(name, recomputed=True) for name in one.again)) for one in intervals)
    return Plan("by hand", tuple(units), rules=(GpuUpdatesAfterBackward(),))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_its_plan_is_the_fastest_of_all_that_compute_twice(micro_batches: int) -> None:
    """Under every budget that makes a difference: all intervals of three blocks, whose norm can be made again by itself."""
    profile = profile_with(10**6, micro_batches, selective=True)
    judge = judge_for(profile)
    found = [judge(plan_of(one)) for one in intervals_of(5, ("norm",))]
    assert len(found) == 34  # of 64, those in which nothing is dropped above a block that keeps
    for budget in sorted({one.gpu_peak_bytes for one in found}):
        asked = profile_with(budget, micro_batches, selective=True)
        plan = parse_policy("moccasin").plan(asked, judge_for(asked))
        answer = judge_for(asked)(plan)
        assert answer.verdict is Verdict.OK
        best = min(one.seconds for one in found if one.gpu_peak_bytes <= budget)
        assert answer.seconds == pytest.approx(best, abs=1e-12)
        assert plan.bound_seconds is not None
        assert plan.bound_seconds <= best + 1e-12


def test_the_memory_that_it_adds_up_is_that_of_the_schedule() -> None:
    """In all intervals of three blocks the peak is what the lowered schedules take, beside what is always there."""
    profile = profile_with(10**6, 1, selective=True)
    chain, alone = _program_of(profile)
    judge = judge_for(profile)
    there = {judge(plan_of(one)).peaks[GPU_MEMORY] - peak_bytes(chain, alone, one) for one in intervals_of(5, ("norm",))}
    assert there == {192}


def _program_of(profile: Profile) -> tuple[list[Stage], list[Alone]]:
    chain = stages(profile)
    return chain, [what_is_made_alone(stage, unit) for stage, unit in zip(chain, profile.units, strict=True)]


def _deep(gpu_bytes: int, blocks: int, *, input_bytes: int, kept_bytes: int) -> Profile:
    """Unlike blocks, so that no order of what they keep is known beforehand."""
    profile = profile_with(gpu_bytes, 1)
    inner = [
        replace(
            profile.units[1],
            input_bytes=input_bytes + 3 * unit % 7,
            activation_bytes=input_bytes + 3 * unit % 7 + kept_bytes + 5 * unit % 11,
            forward_seconds=(40 + 7 * unit % 13) * 1e-9,
            parameters=1,
        )
        for unit in range(blocks)
    ]
    units = (profile.units[0], *inner, profile.units[-1])
    return replace(profile, workload=replace(profile.workload, transformer_blocks=blocks), units=units)


def _answer(policy: str, profile: Profile) -> Judgement:
    judge = judge_for(profile)
    return judge(parse_policy(policy).plan(profile, judge))


@pytest.mark.parametrize(("input_bytes", "kept_bytes"), [(10, 90), (60, 40)])
def test_it_takes_at_most_the_gap_more_than_the_programs_of_others(input_bytes: int, kept_bytes: int) -> None:
    """Without names of tensors: within the budget, at most 0.5 % above ``rotor`` with two computations each, and above
    ``checkmate`` as long as that computes nothing three times. Intervals of inputs end early, too.
    """
    profile = _deep(10**9, 9, input_bytes=input_bytes, kept_bytes=kept_bytes)
    most = _answer("resident:checkpointing=none", profile).gpu_peak_bytes
    least = _answer("rotor:nested=off", replace(profile, hardware=profile_with(1, 1).hardware)).gpu_peak_bytes
    kinds = set()
    for part in (0, 5, 20, 45, 70, 100):
        asked = replace(profile, hardware=profile_with(least + (most - least) * part // 100, 1).hardware)
        found = _answer("moccasin", asked)
        assert found.verdict is Verdict.OK
        assert found.seconds <= (1 + GAP) * _answer("rotor:nested=off", asked).seconds
        others = parse_policy("checkmate").plan(asked, judge_for(asked))
        assert judge_for(asked)(others).seconds <= (1 + GAP) * found.seconds
        if all(len(unit.forwards) <= 2 for unit in others.units):
            assert found.seconds <= (1 + GAP) * judge_for(asked)(others).seconds
        kinds |= {unit.activations for unit in parse_policy("moccasin").plan(asked, judge_for(asked)).units}
    assert kinds == {KEEP, RECOMPUTE, DROP}


def test_the_launches_of_tensors_that_are_made_again_count() -> None:
    """Of two tensors of equal size the one is released whose kernels and launches take less, whichever take longer."""
    stage = Stage(100, 100, 10, 10, 10, 100, 0, 100, 0, 0)
    ends = replace(stage, keeps=True, input_bytes=0, kept_bytes=0)
    chain = [ends, stage, stage, replace(ends, backward_bytes=300)]
    slow, quick = Remade("slow", 30, 20, 1), Remade("quick", 30, 2, 9)
    alone = [NOTHING, Alone((slow, quick), 0, 0), Alone((slow, quick), 0, 0), NOTHING]
    everything = peak_bytes(chain, alone, [FirstInterval(KEEP)] * 4)
    found = least_by_intervals(chain, alone, everything - 60)
    assert found.intervals is not None
    assert [one.again for one in found.intervals] == [(), ("quick",), ("quick",), ()]
    assert found.bound_ns == pytest.approx(400 + 2 * 9, rel=GAP)


def test_nothing_fits() -> None:
    """Below the least memory there is no bound, and the plan is that of the least memory with two computations."""
    profile = profile_with(200, 1)
    plan = parse_policy("moccasin").plan(profile, judge_for(profile))
    assert plan.bound_seconds is None
    assert plan.units == parse_policy("rotor:nested=off").plan(profile, judge_for(profile)).units
    chain, alone = _program_of(profile)
    assert least_by_intervals(chain, alone, 0).intervals is None
    assert lower(profile, plan).tasks
