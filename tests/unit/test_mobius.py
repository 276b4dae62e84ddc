"""Mobius: stages that return to the GPU of their forward, and how many layers each has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.paper import PLENTY, profile_with

from autohete.errors import InfeasibleError, InputError
from autohete.execution.trace import check_trace
from autohete.lowering import lower
from autohete.lowering.budget import with_memory
from autohete.plan import DealtStages, Plan
from autohete.plan.policy import Verdict
from autohete.policies import parse_policy
from autohete.policies.mobius import MobiusStages, even
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, validate
from autohete.sim import SimExecutor
from autohete.simulate import judge_for, simulate_plan


def of(blocks: int, gpus: int = 2, gpu_bytes: int = PLENTY) -> Profile:
    """A profile of so many equal blocks between embedding and head."""
    profile = profile_with(gpu_bytes, 3, gpus=gpus)
    first, block, *_, last = profile.units
    workload = replace(profile.workload, transformer_blocks=blocks)
    more: Profile = replace(profile, workload=workload, units=(first, *[block] * blocks, last))
    return more


def planned(profile: Profile, policy: str = "mobius") -> Plan:
    """The plan of a policy."""
    return parse_policy(policy).plan(profile, judge_for(profile))


@pytest.mark.parametrize(
    ("units", "gpus", "rounds", "starts"),
    [
        (8, 2, 2, [(0, 2, 4, 6)]),
        (5, 2, 2, [(0, 1, 3, 4), (0, 1, 2, 3)]),  # the last stage of the first round, or of the last one, has one more
        (11, 4, 2, [(0, 1, 3, 5, 7, 8, 9, 10), (0, 1, 2, 3, 4, 5, 7, 9)]),
        (4, 4, 1, [(0, 1, 2, 3)]),
    ],
)
def test_stages_are_even(units: int, gpus: int, rounds: int, starts: list[tuple[int, ...]]) -> None:
    """In each round the first stage has as many units as the others or one less."""
    assert [*even(units, gpus, rounds)] == starts


def test_backward_returns_to_the_gpu_of_forward() -> None:
    """A GPU has the same stages in both directions, the highest first in backward."""
    profile = of(6)
    plan = planned(profile, "mobius:rounds=2")
    assert plan.dealt == DealtStages(2, (0, 2, 4), (6, 4, 2, 0), returns=True)
    assert plan.forward_ranks() == plan.backward_ranks() == (0, 0, 1, 1, 0, 0, 1, 1)
    schedule = validate(lower(profile, plan))
    passes = [str(task.id._replace(rank=0)) for task in schedule.tasks if task.lane == "gpu" and not task.id.micro_batch]
    assert passes == ["F0", "F1", "F4", "F5", "R4", "R5", "B5", "B4", "R0", "R1", "B1", "B0"]
    assert check_trace(SimExecutor().run(schedule, 3)) == []


def test_stages_that_do_not_return_go_to_the_next_gpu() -> None:
    """The same cuts without returning: the GPU of a stage's backward is another one, if the GPUs do not divide its way."""
    there = DealtStages(3, (0, 1, 2, 3, 4), (5, 4, 3, 2, 1, 0))
    back = replace(there, returns=True)
    assert [rank for _, rank in there.turns(6)] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1]
    assert [rank for _, rank in back.turns(6)] == [0, 1, 2, 0, 1, 2, 1, 0, 2, 1, 0]


def test_a_gpu_without_a_stage_is_refused() -> None:
    """Stages that return are as many as those of forward and the highest."""
    with pytest.raises(InputError, match="give each at least one"):
        DealtStages(4, (0, 1), (2, 1, 0), returns=True)


def test_what_a_gpu_begins_backward_with_comes_anew() -> None:
    """A GPU's highest stage but the last one of all is uploaded when it is needed, stages below while another is computed."""
    profile = of(6)
    plan = planned(profile, "mobius:rounds=2")
    assert [unit.parameters.ahead_of_backward for unit in plan.units] == [1, 1, 1, 1, 0, 0, 1, 1]


def test_stages_fit_in_pairs() -> None:
    """Two stages of a GPU fit into half of its memory; if none do, each stage has as few units as can be."""
    profile = of(14, gpu_bytes=900)
    assert simulate_plan(profile, planned(profile)).verdict is Verdict.OK
    stages = MobiusStages(profile)
    assert stages.fit((0, 4, 8, 12)) is False  # four blocks take 4 * (2 * 16 + 36 + 8) bytes in backward, and two stages more
    assert stages.fit((0, 2, 4, 6, 8, 10, 12, 14)) is True
    dealt = planned(of(14, gpu_bytes=60)).dealt
    assert dealt is not None
    assert len(dealt.backward) == 16


def test_what_is_fastest_begins_soon_and_hides_its_uploads() -> None:
    """Times by hand: two GPUs, four stages of one unit or two of two; nothing of an upload shows."""
    profile = of(2)
    stages = MobiusStages(profile)
    # Forward of both: embedding 2, block 6, block 6, head 3; backward with forward 6, 18, 18 and 10; a transfer takes 1.
    assert stages.seconds((0, 2)) == pytest.approx(1e-9 * (8 + 1 + 2 * 9 + 2 * 28 + 1 + 24))
    assert stages.seconds((0, 1, 2, 3)) < stages.seconds((0, 2))


def test_each_stage_has_a_unit() -> None:
    """More rounds than units allow are as many as they allow; a GPU without a unit is refused."""
    assert planned(of(6), "mobius:rounds=5").dealt == planned(of(6), "mobius:rounds=4").dealt
    with pytest.raises(InputError, match="3 units are too few for 4: give fewer GPUs"):
        planned(of(1, gpus=4))


@pytest.mark.slow
def test_joint_names_a_memory_that_works_beside_stages_that_cannot_wait_for_memory() -> None:
    """What its error names is enough, although copies of dealt stages do not wait and their GPUs need different memories."""
    profile = of(4, gpus=4, gpu_bytes=100)
    with pytest.raises(InfeasibleError) as caught:
        planned(profile, "joint")
    assert caught.value.constraint == GPU_MEMORY
    enough = with_memory(profile, GPU_MEMORY, caught.value.needed_bytes)
    assert judge_for(enough)(planned(enough, "joint")).verdict is Verdict.OK
