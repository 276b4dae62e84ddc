"""PressureFit: the gaps that are cut, when fetches begin, and the plans that follow, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.paper import PLENTY, profile_with

from autohete.errors import InputError
from autohete.plan import Activations
from autohete.plan.policy import Verdict
from autohete.policies import parse_policy
from autohete.policies.pressure_fit import Gap, PassChain, Score, Trigger, fitted, pass_chain
from autohete.profile import Profile
from autohete.simulate import judge_for, simulate_plan


def chain(micro_batches: int = 1, *, recomputed: tuple[int, ...] = ()) -> PassChain:
    """The tasks of the model on paper; nothing stays."""
    return pass_chain(profile_with(PLENTY, micro_batches), recomputed, ())


def gaps(of: PassChain) -> dict[tuple[Gap, int], tuple[tuple[int, int], ...]]:
    return {one.key: one.spans for one in of.gaps}


def test_tasks_of_an_iteration() -> None:
    """A unit is updated right after its backward, and a recomputation precedes it."""
    assert [f"{one.kind}{one.unit}" for one in chain(recomputed=(2,)).passes] == [
        *("F0", "F1", "F2", "F3", "F4", "L4", "B4", "W4", "B3", "W3", "R2", "B2", "W2", "B1", "W1", "B0", "W0"),
    ]


def test_updates_of_clipped_gradients_follow_backward() -> None:
    """The norm is there after the last backward only."""
    clipped = pass_chain(profile_with(PLENTY, 1, clip_norm=1.0), (), ())
    assert [f"{one.kind}{one.unit}" for one in clipped.passes[-6:]] == ["B0", "W4", "W3", "W2", "W1", "W0"]


def test_memory_of_the_first_backward_of_a_block() -> None:
    """During B3 the GPU holds the parameters of the embedding and the blocks, 8 + 3 * 16 bytes, what these keep, 4 * 36, the
    embedding's input, 4, the inputs of blocks 1 to 3, 12, and the gradients of block 3, its output and its input, 16 + 8. The
    largest temporaries are those of the loss: logits, their gradient and more, 4 + 4 + 8.
    """
    found = chain()
    place = next(i for i, one in enumerate(found.passes) if f"{one.kind}{one.unit}" == "B3")
    assert found.held[place] == 56 + (3 * 36 + 36) + 4 + 12 + 16 + 8
    assert found.workspace_bytes == 16


def test_gaps_of_one_and_of_two_micro_batches() -> None:
    """Each value has a gap between two uses. The head computes backward right after forward, and the last micro-batch is
    followed by an update.
    """
    once, twice = gaps(chain()), gaps(chain(2))
    assert once[Gap.AFTER_FORWARD, 1] == ((1, 12),)  # F0 F1 F2 F3 F4 L4 B4 W4 B3 W3 B2 W2 B1
    assert once[Gap.ARRIVAL, 1] == ((-1, 1),)
    assert (Gap.AFTER_FORWARD, 4) not in once
    assert {gap for gap, _ in once} == {Gap.ARRIVAL, Gap.AFTER_FORWARD, Gap.KEPT}
    # F0 to F4, L4, B4 to B0: eleven tasks; then the same with updates.
    assert twice[Gap.AFTER_BACKWARD, 1] == ((9, 12),)
    assert twice[Gap.GRADIENTS, 1] == ((9, 23),)
    assert twice[Gap.KEPT, 1] == ((1, 9), (12, 23))


def test_one_gap_is_cut_at_the_worst_task_before_another() -> None:
    """At the worst task, B4, all copies are hidden. So parameters, of which the host has a copy, go before what has to be
    copied there; of them those first that are first used last. 40 bytes are three blocks' parameters, 16 bytes each.
    """
    whole = chain()
    most = int(whole.held.max())
    cut = fitted(whole, most - 1, Score.STALL, headroom=False)
    assert [one.key for one in cut.cut] == [(Gap.AFTER_FORWARD, 3)]
    assert cut.fits
    further = fitted(whole, most - 40, Score.STALL, headroom=False)
    assert [one.unit for one in further.cut] == [3, 2, 1]
    assert int(further.pressure.max()) == most - 48


def test_scores_differ_in_what_they_avoid() -> None:
    """On a slow link only what is away for long hides its copies, which parameters need none of to the host."""
    profile = profile_with(PLENTY, 1)
    slow = replace(profile.hardware.h2d, bandwidth=0.4e9, duplex_bandwidth=0.4e9)
    found = pass_chain(replace(profile, hardware=replace(profile.hardware, h2d=slow)), (), ())
    by = {one.key: one for one in found.gaps}
    # F1 ends at 8 ns, and B1 begins at 64. 16 bytes begin to come at 14 ns, and take 40; 40 bytes leave in 10, and take 100.
    assert found.delay_seconds(by[Gap.AFTER_FORWARD, 1]) == 0
    assert found.delay_seconds(by[Gap.KEPT, 1]) == pytest.approx((8 + 10 + 100 - 64) * 1e-9)
    capacity = int(found.held.max()) - 1
    for score in Score:
        assert fitted(found, capacity, score, headroom=False).cut[0].gap is Gap.AFTER_FORWARD


def test_fetches_begin_late_or_pack_a_queue() -> None:
    """Alone, parameters of block 1, 4 ns, need one task to come; behind those of the embedding, states and more they begin
    earlier. No fetch of the first forward begins before the first task has ended.
    """
    cut = fitted(chain(), 0, Score.STALL, headroom=False)
    late, packed = cut.ahead(Trigger.LATEST_SAFE), cut.ahead(Trigger.PACKED_FIFO)
    assert late[Gap.AFTER_FORWARD, 1] == 0  # the update of block 2 takes as long, and is no pass
    assert late[Gap.ARRIVAL, 1] == packed[Gap.ARRIVAL, 1] == 0
    assert all(packed[key] >= late[key] for key in late)
    assert any(packed[key] > late[key] for key in late)


def test_packed_fetches_begin_later_if_memory_is_short() -> None:
    """What comes early counts from then on, so that the clamped fetches begin no earlier than the packed ones."""
    whole = chain()
    cut = fitted(whole, int(whole.held.max()) - 100, Score.STALL, headroom=False)
    packed, clamped = cut.ahead(Trigger.PACKED_FIFO), cut.ahead(Trigger.PACKED_FIT)
    assert all(clamped[key] <= packed[key] for key in packed)


def planned(profile: Profile, policy: str = "dataflow") -> tuple[Verdict, float, int]:
    found = simulate_plan(profile, parse_policy(policy).plan(profile, judge_for(profile)))
    return found.verdict, found.iteration_seconds, found.gpu.peak_bytes


def test_more_memory_is_not_slower_and_every_budget_is_kept() -> None:
    """From budgets of a fifth to plenty the plan fits, and takes no longer with more."""
    times = []
    for gpu_bytes in (160, 200, 260, 300, PLENTY):
        verdict, seconds, peak = planned(profile_with(gpu_bytes, 1))
        assert verdict is Verdict.OK
        assert peak <= gpu_bytes
        times.append(seconds)
    assert times == sorted(times, reverse=True)


def test_recomputation_is_an_option() -> None:
    """With little memory blocks are recomputed, unless that is off."""
    profile = profile_with(180, 1)
    for policy, recomputed in (("dataflow", True), ("dataflow:recompute=off", False)):
        plan = parse_policy(policy).plan(profile, judge_for(profile))
        assert any(unit.activations is Activations.RECOMPUTE for unit in plan.units) is recomputed


def test_saved_tensors_that_are_cheap_are_made_again() -> None:
    """What the profile can make again is not kept, though no block is recomputed."""
    profile = profile_with(PLENTY, 1, selective=True)
    plan = parse_policy("dataflow").plan(profile, judge_for(profile))
    assert [one.name for one in plan.units[1].saved if one.recomputed] == ["norm"]


def test_several_gpus_are_refused() -> None:
    """It plans for one GPU."""
    profile = profile_with(PLENTY, 1, 2)
    with pytest.raises(InputError, match="dataflow plans for one GPU, not for 2"):
        parse_policy("dataflow").plan(profile, judge_for(profile))
