"""AutoTM's placements: what leaves, and beside which pass, against the simulation of all placements."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from support.paper import profile_with

from autohete.plan.policy import Verdict
from autohete.planner.placement_program import GAP, PassTimes, Placed, Placement, least_by_placement
from autohete.policies import parse_policy
from autohete.policies.autotm import placements_of, plan_with
from autohete.policies.chain_costs import activation_budget_bytes, stages
from autohete.profile import Profile
from autohete.schedule import D2H, H2D
from autohete.simulate import judge_for, simulate_plan

#: A tensor stays, or goes at once or beside the next pass, and comes back at once or beside the pass before.
CHOICES = [None, *(Placement(*beside) for beside in product([False, True], repeat=2))]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_no_other_placement_is_faster(micro_batches: int) -> None:
    """Under every budget that makes a difference: of all placements of three blocks those that fit, as simulated."""
    profile = profile_with(10**6, micro_batches)
    judge, found = judge_for(profile), []
    for chosen in product(CHOICES, repeat=3):
        some: dict[tuple[int, str | None], Placement] = {
            (unit, None): copies for unit, copies in enumerate(chosen, 1) if copies is not None
        }
        found.append(judge(plan_with(profile, some)))
    for budget in sorted({one.gpu_peak_bytes for one in found}):
        asked = profile_with(budget, micro_batches)
        answer = judge_for(asked)(parse_policy("autotm").plan(asked, judge_for(asked)))
        assert answer.verdict is Verdict.OK
        assert answer.seconds <= (1 + GAP) * min(one.seconds for one in found if one.gpu_peak_bytes <= budget)


@pytest.mark.parametrize("gpu_bytes", [344, 350, 360, 380, 400, 420])
def test_the_cost_of_the_program_is_the_simulated_time(gpu_bytes: int) -> None:
    """Synchronous copies, and of each pass its time or that of the copies beside it, add up to the iteration; updates follow.
    The bound of the program is no more than 1 % below.
    """
    profile = profile_with(gpu_bytes, 1, selective=True)
    tensors = [(unit, size) for unit in (1, 2, 3) for size in (4, 16, 20)]
    times = PassTimes([u.forward_seconds for u in profile.units], [u.backward_seconds for u in profile.units], 1e-9)
    placed = [Placed(unit, size, profile.d2h_seconds(size), profile.h2d_seconds(size)) for unit, size in tensors]
    found = least_by_placement(stages(profile), times, placed, activation_budget_bytes(profile))
    assert found.placements is not None
    names = [(unit, name) for unit in (1, 2, 3) for name in (None, "result", "norm")]
    chosen = {name: copies for name, copies in zip(names, found.placements, strict=True) if copies is not None}
    assert chosen == placements_of(profile)
    simulation = simulate_plan(profile, plan_with(profile, chosen))
    assert simulation.verdict is Verdict.OK
    assert simulation.iteration_seconds == pytest.approx(found.seconds + 16e-9, abs=1e-12)
    assert found.bound_seconds - 1e-12 <= found.seconds <= found.bound_seconds / (1 - GAP) + 1e-12


def test_copies_begin_and_end_with_their_pass() -> None:
    """What is decided to move beside a pass starts with it, unless another copy in that direction is before it, and the pass
    after it waits; what is not decided so starts when the pass before has ended.
    """
    profile = profile_with(350, 1, selective=True)
    chosen = placements_of(profile)
    trace = simulate_plan(profile, plan_with(profile, chosen)).trace
    spans = {str(span.task): span for span in trace.spans() if span.iteration == 1}
    assert {span.lane for span in spans.values()} == {"gpu", H2D, D2H}
    assert chosen[3, None] == Placement(away_beside=True, back_beside=False)
    assert spans["AF3a1"].start_ns == spans["B4"].end_ns
    assert spans["B3"].start_ns == spans["AF3a1"].end_ns
    assert chosen[2, "norm"].back_beside
    assert spans["AF2a2"].start_ns == spans["B3"].start_ns


def _tight(profile: Profile) -> Profile:
    return replace(profile, hardware=profile_with(200, 1).hardware)


def test_nothing_fits() -> None:
    """Then all blocks send all that they save, and each copy is waited for; without memory at all the program has no plan."""
    profile = _tight(profile_with(10**6, 1, selective=True))
    plan = parse_policy("autotm").plan(profile, judge_for(profile))
    assert all(unit.kept.leaves and unit.kept.ahead == 0 and not unit.saved for unit in plan.units[1:-1])
    waits = 6 * 10e-9
    assert judge_for(profile)(plan).seconds == pytest.approx(86e-9 + waits, abs=1e-12)
    assert least_by_placement(stages(profile), PassTimes([], [], 0.0), [], 0).placements is None


def test_where_all_fits_nothing_moves() -> None:
    """The plan is that of ordinary training."""
    profile = profile_with(10**6, 1, selective=True)
    plan = parse_policy("autotm").plan(profile, judge_for(profile))
    assert not any(unit.activations_leave for unit in plan.units)
