"""Harmony: how layers are packed, which packs are tried, and what that makes of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.paper import PLENTY, profile_with

from autohete.errors import InputError
from autohete.lowering import lower
from autohete.lowering.budget import with_memory
from autohete.plan import Activations, DealtStages
from autohete.plan.policy import Verdict
from autohete.policies import parse_policy
from autohete.policies.harmony import Harmony, candidates, plan_of
from autohete.profile import Profile
from autohete.schedule import Kind, TaskId, validate
from autohete.simulate import judge_for, simulate_plan
from autohete.testing.checks import Paths

#: What a block of the paper's takes in backward: parameters and gradients, activations, workspace, and output and its gradient.
BLOCK = 2 * 16 + 36 + 8 + 8


def of(blocks: int, gpus: int = 1) -> Profile:
    """A profile of so many equal blocks between embedding and head."""
    profile = profile_with(PLENTY, 3, gpus=gpus)
    first, block, *_, last = profile.units
    workload = replace(profile.workload, transformer_blocks=blocks)
    more: Profile = replace(profile, workload=workload, units=(first, *[block] * blocks, last))
    return more


def test_packs_are_filled_from_the_top_or_even() -> None:
    """With room for less than four blocks: the head and three, three, and what is left; or three packs of even size or time."""
    found = [*candidates(of(7), 3.9 * BLOCK)]
    assert {one.backward for one in found} == {(5, 2, 0), (5, 3, 0)}


def test_forward_takes_the_packs_of_backward_or_larger_ones() -> None:
    """Forward needs less memory, so that its own packs are fewer; those of backward are tried as well."""
    found = [*candidates(of(12), 3.9 * BLOCK)]
    same = [one for one in found if one.forward == tuple(reversed(one.backward))[:-1]]
    fewer = [one for one in found if len(one.forward) < len(one.backward) - 1]
    assert same
    assert fewer
    assert len(found) == len(set(found))


@pytest.mark.parametrize("gpus", [2, 4])
def test_every_gpu_has_a_task(gpus: int) -> None:
    """However much memory there is, no GPU is left without a task."""
    found = [*candidates(of(7, gpus), PLENTY)]
    assert found
    for one in found:
        assert len(one.forward) + len(one.backward) >= gpus


def test_no_layer_fits() -> None:
    """A capacity below that of a layer gives no packs: each layer is one, so that an answer says what is missing."""
    assert [*candidates(of(3), BLOCK / 2)] == []
    tiny = profile_with(BLOCK // 4, 3)
    plan = parse_policy("harmony").plan(tiny, judge_for(tiny))
    assert plan.dealt == DealtStages(1, (0, 1, 2, 3), (4, 3, 2, 1, 0))
    assert simulate_plan(tiny, plan).verdict is Verdict.GPU_OUT_OF_MEMORY


def test_a_pack_is_uploaded_once_the_one_before_is_done() -> None:
    """The parameters of a pack come when its GPU has computed the pack before for the last micro-batch, not earlier."""
    profile = of(3, 2)
    plan = parse_policy("harmony:pack_size=2").plan(profile, judge_for(profile))
    assert plan.dealt == DealtStages(2, (0, 1), (3, 1, 0))
    paths = Paths(validate(lower(profile, plan)))
    for fetch, before in (("PB1r1", TaskId(Kind.FORWARD, 2, 2, rank=1)), ("PF3", TaskId(Kind.FORWARD, 0, 2))):
        task = next(one for one in paths.tasks if str(one) == fetch)
        assert paths.exist(before, task)


def test_the_fastest_candidate_that_fits_is_taken() -> None:
    """No candidate is faster, and each unit with which a pack of backward begins is recomputed from its input."""
    profile = with_memory(of(12, 2), "gpu", 5 * BLOCK)
    plan = parse_policy("harmony").plan(profile, judge_for(profile))
    tried = [*candidates(profile, 5 * BLOCK * 10 / 11)]
    assert len(tried) > 1
    assert plan.dealt in tried
    simulated = [simulate_plan(profile, plan_of(profile, one)) for one in tried]
    fitting = [one.iteration_seconds for one in simulated if one.verdict is Verdict.OK]
    assert simulate_plan(profile, plan).iteration_seconds == min(fitting)
    assert plan.dealt is not None
    assert {plan.units[unit].activations for unit in plan.dealt.backward[1:]} == {Activations.RECOMPUTE}


def test_too_few_packs_are_refused() -> None:
    """One pack is not for two GPUs; nor are packs of a negative size for any."""
    profile = of(3, 2)
    with pytest.raises(InputError, match="give a smaller pack_size"):
        parse_policy("harmony:pack_size=5").plan(profile, judge_for(profile))
    with pytest.raises(InputError, match="give the units of a pack"):
        Harmony(-1)
