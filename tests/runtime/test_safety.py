"""Within a feasible budget nothing late ends a training: real threads, real delays, a ledger that holds every byte."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from support.measured import profile_for
from support.reference import slowed, train_by_schedule
from support.small import SMALL, STEPS, plainly

from autohete.errors import InfeasibleError
from autohete.policies import parse_policy
from autohete.profile import Profile
from autohete.runtime.lanes import Action
from autohete.schedule import CPU, D2H, H2D
from autohete.simulate import judge_for, simulate_plan, simulate_safely
from autohete.train.as_executed import as_executed, everything_resident
from autohete.workload import Precision, Workload

pytestmark = pytest.mark.slow

POLICIES = [
    "autohete",
    "autohete:priority=off",
    "zero_offload:paper,tile_overlap",
    "zero_offload:paper,tile_overlap,checkpointing=full",
    "stronghold:window=1",
    "patrickstar:chunk_size=1",
]
#: Deeper than wide, so that copies have something to fall behind of.
DEEP = replace(SMALL, transformer_blocks=6)
WIDE = os.environ.get("AUTOHETE_HYPOTHESIS") == "wide"
SEEDS, AT_THE_LEAST = (200, 100) if WIDE else (12, 12)
#: The longest that a task may be held up, if all may, and if only those of one lane may.
DELAY_SECONDS, LATE_SECONDS = 0.003, 0.01


def within(profile: Profile, gpu_bytes: int) -> Profile:
    """The profile with so much GPU memory for tensors."""
    gpu = replace(profile.hardware.gpu, memory_bytes=gpu_bytes + profile.hardware.gpu.reserved_bytes)
    return replace(profile, hardware=replace(profile.hardware, gpu=gpu))


@cache
def budgets(workload: Workload, policy: str) -> tuple[int, int]:
    """The smallest budget that is named for a policy, and what everything resident would need."""
    profile = profile_for(workload)
    with pytest.raises(InfeasibleError) as caught:
        simulate_safely(within(profile, 1), parse_policy(policy), as_executed)
    assert caught.value.constraint == "gpu"
    return caught.value.needed_bytes, simulate_plan(profile, everything_resident(profile)).gpu.peak_bytes


def late(seed: int) -> Callable[[Action], Action]:
    """All tasks held up at random, or only those of one lane, which then falls behind."""
    if seed % 2:
        return slowed(seed, DELAY_SECONDS)
    lane, delayed = random.Random(seed).choice([D2H, D2H, H2D, CPU]), slowed(seed, LATE_SECONDS)

    def around(action: Action) -> Action:
        held_up = delayed(action)
        return lambda task, iteration: (held_up if task.lane == lane else action)(task, iteration)

    return around


def check_training(workload: Workload, policy: str, gpu_bytes: int, seed: int) -> None:
    """Train with tasks held up at random: the ledgers raise if a byte more is needed than there is."""
    predicted = simulate_safely(within(profile_for(workload), gpu_bytes), parse_policy(policy), as_executed)
    outcome, _ = train_by_schedule(workload, STEPS, predicted.schedule, late(seed))
    assert outcome == plainly(workload)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_late_tasks_never_exceed_a_feasible_budget(seed: int) -> None:
    """From the smallest budget that is named to all of what residence needs, delays neither exceed it nor change a bit."""
    rng = random.Random(seed)
    policy = POLICIES[seed // 2 % len(POLICIES)]
    workload = replace(DEEP, precision=rng.choice([Precision.FP32, Precision.BF16]), tied_embeddings=rng.random() < 0.5)
    least, resident = budgets(workload, policy)
    check_training(workload, policy, round(least + rng.random() ** 2 * max(resident - least, 0)), seed)


@pytest.mark.parametrize("seed", range(AT_THE_LEAST))
def test_the_smallest_budget_holds_under_delays(seed: int) -> None:
    """At the smallest budget that is named, delays neither exceed it nor change a bit; a byte less is refused."""
    policy = POLICIES[seed // 2 % len(POLICIES)]
    least, _ = budgets(DEEP, policy)
    check_training(DEEP, policy, least, seed)
    with pytest.raises(InfeasibleError):
        simulate_safely(within(profile_for(DEEP), least - 1), parse_policy(policy), as_executed)


@pytest.mark.parametrize("seed", range(SEEDS // 3))
@pytest.mark.parametrize("policy", ["zero_offload:delayed_update", "zero_offload:delayed_update,paper"])
def test_late_gradients_of_delayed_updates_change_no_bit(policy: str, seed: int) -> None:
    """Where a gradient may still be leaving when the next iteration begins, its copy may be late: it is not overwritten."""
    profile, held_up = profile_for(DEEP), slowed(seed, 4 * LATE_SECONDS)
    plan = as_executed(parse_policy(policy).plan(profile, judge_for(profile)), profile)

    def around(action: Action) -> Action:
        waiting = held_up(action)
        return lambda task, iteration: (waiting if task.lane == D2H else action)(task, iteration)

    outcome, _ = train_by_schedule(DEEP, STEPS, simulate_plan(profile, plan).schedule, around)
    assert outcome == plainly(DEEP, frozenset(range(len(plan.units))))
