"""The answer of ``autohete plan``: each statement against a simulation of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.answers import GIB, LARGE, MIB, NODE, QUICK, SYSTEM, TIGHT, TINY, WORKLOAD, answer, profile_at, site
from support.command import SMALL, autohete, refused

from autohete.answer import AND, Answer, Candidate, Gain, Offloading, Sampling, Site, find_answer
from autohete.answer.answer_document import answer_json
from autohete.answer.certainty import MODEL_ERROR
from autohete.answer.draws import draw, open_figures
from autohete.answer.levers import levers, pull
from autohete.answer.needs import _smallest
from autohete.answer.policies import Judged, default_policies, ranked
from autohete.answer.purchases import single_purchases
from autohete.answer.result import Change, Need
from autohete.answer.trials import gains, trials, with_price
from autohete.cli.axes import _option_parser
from autohete.cli.plan import with_options
from autohete.cli.question import Question
from autohete.errors import InfeasibleError, InputError
from autohete.hardware import load_hardware
from autohete.plan.policy import Verdict
from autohete.policies import POLICIES, NamedPolicy, parse_policy, search_space
from autohete.policies.joint import JointFrom
from autohete.profile import Profile, analytic_profile
from autohete.quantities import format_bytes, format_count, format_ratio, parse_count
from autohete.report.answer_text import answer_text, need_text
from autohete.schedule import GPU_MEMORY, HOST_MEMORY
from autohete.simulate import Simulation, simulate_again, simulate_plan, simulate_policy
from autohete.simulate.largest import GrowingFigure, largest, misfit
from autohete.simulate.summary import answer_or_refusal
from autohete.workload import Kernels
from autohete.workload.training import Lora, Training


def simulated(profile: Profile, policies: Sequence[str] = QUICK) -> dict[str, Simulation]:
    """What can be planned and fits, by policy."""
    found = {}
    for name in policies:
        try:
            simulation = simulate_policy(profile, parse_policy(name))
        except (InfeasibleError, InputError):
            continue
        if simulation.verdict is Verdict.OK:
            found[name] = simulation
    return found


def said(found: Answer) -> str:
    """The text on one line."""
    return " ".join(answer_text(found).split())


def gain_of(found: Answer, start: str) -> Gain:
    """The gain from the one change whose name begins with ``start``."""
    return next(
        gain for gain in (*found.purchases, *found.levers) if gain.change.name.startswith(start) and AND not in gain.change.name
    )


def given_shape(options: Sequence[str]) -> dict[str, Any]:
    """What the command line's parser makes of options that describe the training."""
    question: Question = _option_parser()(options, result_action="return_value")
    return question.shape.changes()


# --- which plan ---------------------------------------------------------------------------------------------------


def test_the_best_policy_is_the_fastest_that_fits() -> None:
    """Ranked as simulations of their own say, with their times and the time for all tokens."""
    found, alone = answer(), simulated(profile_at(site(gpu_memory=TIGHT)))
    times = {each.name: each.seconds for each in found.candidates if each.fits}
    assert times == {name: simulation.iteration_seconds for name, simulation in alone.items()}
    assert len(times) > 1
    assert found.best is not None
    assert list(times.values()) == sorted(times.values())
    assert found.best.seconds == min(times.values())
    assert found.next_best is not None
    assert found.training_seconds == pytest.approx(10**9 / alone[found.best.name].tokens_per_second)


def test_budgets_are_the_peaks_of_the_plan() -> None:
    """Used and available bytes of all three memories are those of the plan by itself; the system's part is left free."""
    found = answer()
    assert found.best is not None
    profile = profile_at(site(gpu_memory=TIGHT))
    alone = simulated(profile)[found.best.name]
    gpu, pinned, host = found.budgets
    assert (gpu.used_bytes, host.used_bytes) == (alone.gpu.peak_bytes, alone.host.peak_bytes)
    assert gpu.available_bytes == alone.gpu.capacity_bytes == gpu.total_bytes - GIB
    assert host.available_bytes == alone.host.capacity_bytes == host.total_bytes - SYSTEM
    limit = replace(profile.hardware.host, pinned_bytes=profile.hardware.host.memory_bytes)
    limited = replace(profile, hardware=replace(profile.hardware, host=limit))
    again = simulate_plan(limited, alone.plan)
    assert again.pinned is not None
    assert pinned.used_bytes == again.pinned.peak_bytes
    assert pinned.used_bytes is not None
    assert 0 < pinned.used_bytes <= alone.host.peak_bytes
    assert not pinned.limited


def test_a_limit_of_pinned_memory_is_its_budget() -> None:
    """A limit that was given is what is available, and more of it is a purchase."""
    found = answer(policies=("autohete",), host_pinned_memory="2GiB")
    assert (found.budgets[1].available_bytes, found.budgets[1].limited) == (2 * GIB, True)
    assert gain_of(found, "twice the pinned memory").change.moved == {"host.pinned_memory": f"{4 * GIB}B"}


def test_what_stays_on_the_gpu_is_recommended_where_offloading_does_not_pay() -> None:
    """With a large GPU the answer says not to offload; with a tight one that offloading is needed."""
    large, tight = answer(LARGE), answer()
    assert large.offloading is Offloading.DOES_NOT_PAY
    assert large.best is not None
    assert large.best.name == "resident"
    assert "Do not offload: everything fits on the GPU" in answer_text(large)
    assert tight.offloading is Offloading.NEEDED
    assert "Offloading is needed" in answer_text(tight)
    assert not simulated(profile_at(site(gpu_memory=TIGHT)), ["resident"])


def test_noise_is_no_reason_to_offload() -> None:
    """Less than 1 % faster is not worth moving anything; more is."""

    def candidate(name: str, policy: str, seconds: float) -> Candidate:
        summary, simulation = answer_or_refusal(profile_at(site(gpu_memory=LARGE)), parse_policy(policy))
        assert simulation is not None
        summary = replace(summary, policy=name, iteration_seconds=seconds, tokens_per_second=1 / seconds)
        return Candidate(summary, simulation.plan)

    for seconds, first in ((0.995, "stays"), (0.98, "moves")):
        order = ranked([candidate("moves", "zero_offload", seconds), candidate("stays", "resident", 1.0)])
        assert order[0].name == first


def test_what_several_searches_end_at_is_listed_once() -> None:
    """Stage 3 is found by the search of ordinary training and by its own. Without time there is nothing to list."""
    found = answer(LARGE, policies=("resident:checkpointing=none", "resident:checkpointing=none", "zero_offload"))
    assert [each.name.partition(":")[0] for each in found.candidates] == ["resident", "zero_offload"]
    assert ranked([]) == ()


def test_equal_plans_are_one() -> None:
    """A policy that arrives at another's plan is no next best."""
    found = answer(LARGE, policies=("resident", "resident:checkpointing=none", "zero_offload"))
    first, second = (each for each in found.candidates if each.name.startswith("resident"))
    assert second.same_plan_as == first.name
    assert found.next_best is not None
    assert found.next_best.name == "zero_offload"
    assert f"same plan as {first.name}" in said(found)


@pytest.mark.parametrize("policy", ["zero_offload", "stronghold", "zero_infinity", "resident"])
@pytest.mark.parametrize("gpu_memory", [TIGHT, LARGE])
def test_a_policy_is_judged_with_its_best_flags(policy: str, gpu_memory: str) -> None:
    """The fastest of all that its users can choose, although most of them are not simulated."""
    profile = profile_at(site(gpu_memory=gpu_memory))
    names = search_space(policy, profile)
    alone = simulated(profile, names)
    found = Judged(profile, names)()
    assert len(names) > 1
    assert found.fits is bool(alone)
    if alone:
        assert found.seconds == min(one.iteration_seconds for one in alone.values())
        assert found.seconds == alone[found.name].iteration_seconds


def test_a_framework_limits_the_flags() -> None:
    """Only flags with which it can run the policy count."""
    profile = profile_at(site(gpu_memory=LARGE))
    names = search_space("resident", profile)
    each = [Judged(profile, (name,))() for name in names]
    for framework in ("megatron", "trainer"):
        able = [one.seconds for one in each if one.fits and framework in one.runs_in]
        found = Judged(profile, names, (framework,))()
        assert able
        assert framework in found.runs_in
        assert found.seconds == min(able)


@pytest.mark.slow
def test_a_policy_that_refuses_is_a_row() -> None:
    """In the answer and in a comparison; only where all refuse the question is refused."""
    clipped = replace(WORKLOAD, clip_norm=1.0)
    found = answer(LARGE, policies=("resident", "stronghold"), workload=clipped)
    refusing = found.candidates[-1]
    assert (refusing.name, refusing.summary.verdict) == ("stronghold", Verdict.INVALID)
    assert "cannot plan this:\n  stronghold cannot clip" in answer_text(found)
    with pytest.raises(InputError, match="clip"):
        answer(LARGE, policies=("stronghold",), workload=clipped)
    asked = ["simulate", *SMALL, "--micro-batches", "2", "--json", "--policy", "patrickstar"]
    rows = json.loads(autohete(*asked, "--policy", "resident").stdout)
    assert [row["verdict"] for row in rows] == ["invalid", "ok"]
    assert "cannot accumulate" in rows[0]["explanation"]
    assert "cannot accumulate" in refused(*asked)


@pytest.mark.parametrize("gpu_memory", ["1400MiB", TIGHT, "3GiB"])
def test_a_quick_search_is_never_slower_than_its_start(gpu_memory: str) -> None:
    """Nor does it fail where that fits."""
    profile = profile_at(site(gpu_memory=gpu_memory))
    start = simulated(profile, ["autohete"])["autohete"]
    found = simulate_policy(profile, NamedPolicy("joint", JointFrom((start.plan,), quick=True)))
    assert found.verdict is Verdict.OK
    assert found.iteration_seconds <= start.iteration_seconds * (1 + 1e-9)


def test_changes_start_from_what_is_known() -> None:
    """``joint`` starts from the current plan, its units split for sublayers, and for several changes from the plan of each."""
    where = site(gpu_memory=LARGE)
    profile = profile_at(where)
    best = Judged(profile, ("resident",))()
    assert best.plan is not None
    known = {lever.name: change for lever in levers(WORKLOAD) if (change := pull(WORKLOAD, [lever])) is not None}
    lean, sublayers, optimizer = (known[name] for name in ("lean kernels", "sublayers", "8-bit AdamW"))
    both = replace(lean, name=AND.join((lean.name, optimizer.name)))
    bought = Change("2 GPUs", {}, gpus=2)
    alone = {name: replace(best.plan, policy=name) for name in (lean.name, optimizer.name)}
    tried = trials(profile, where, [lean, sublayers, both, bought], [best], ["joint", "resident"], alone)
    starts = {trial.change.name: trial.starts for trial in tried if trial.plan is None and trial.policy == "joint"}
    assert starts[both.name] == (best.plan, *alone.values())
    (split,) = starts[sublayers.name]
    assert len(split.units) == 2 * len(best.plan.units) - 2
    assert starts[lean.name][0] == best.plan
    assert starts[bought.name] == ()


def test_an_executed_schedule_keeps_its_waits() -> None:
    """With the same times it takes as long as before; with others its waits stay those that were found for it."""
    profile = profile_at(site(gpu_memory=TIGHT))
    start = next(one for one in simulated(profile, ["joint", "autohete"]).values())
    waiting = simulate_plan(profile, replace(start.plan, memory_waits=True))
    assert waiting.waits
    assert simulate_again(waiting, profile).iteration_seconds == waiting.iteration_seconds
    faster = profile_at(site(gpu_memory=TIGHT), moved={"links.h2d.bandwidth": "51GB/s"})
    again = simulate_again(waiting, faster)
    assert [task.after for task in again.schedule.tasks] == [task.after for task in waiting.schedule.tasks]
    assert {task.id: task.duration_ns for task in again.schedule.tasks} == {
        task.id: task.duration_ns for task in simulate_plan(faster, start.plan).schedule.tasks
    }


# --- what other hardware would bring ------------------------------------------------------------------------------

#: The start of a purchase's name, and the figures that it changes.
PURCHASES = {
    "8.0 GiB more GPU memory": {"gpu.memory": f"{1700 * MIB + 8 * GIB}B"},
    "twice the host memory": {"host.memory": "256GiB"},
    "the next generation of the link": {"links.h2d.bandwidth": "51GB/s", "links.d2h.bandwidth": "52.8GB/s"},
    "25 % more DRAM": {"host.memory_bandwidth": "104GB/s"},
    "20 CPU cores instead of 16": {"cpu.cores": "20", "cpu.update_bandwidth": "56.25GB/s"},
}


@pytest.mark.parametrize("name", PURCHASES)
def test_a_purchase_brings_what_planning_anew_brings(name: str) -> None:
    """The best and the next best policies, planned for the changed hardware, or the old plan there: the fastest is reported."""
    found = answer()
    assert found.best is not None
    assert found.next_best is not None
    there = profile_at(site(gpu_memory=TIGHT), moved=PURCHASES[name])
    times = [s.iteration_seconds for s in simulated(there, [found.best.name, found.next_best.name]).values()]
    assert found.best.plan is not None
    times.append(simulate_plan(there, found.best.plan).iteration_seconds)
    gain = gain_of(found, name)
    assert gain.iteration_seconds == pytest.approx(min(times), rel=1e-6)
    assert gain.saved_seconds == pytest.approx(min(each.seconds for each in found.candidates) - min(times), abs=1e-6)
    assert (f"{gain.change.name}: no effect" in said(found)) is not gain.helps


def test_a_faster_link_that_slows_updates_down_is_said_to() -> None:
    """A faster link or CPU may take DRAM bandwidth from what the iteration waits for; the reader may leave it unused."""
    gain = replace(gain_of(answer(), "the next generation of the link"), saved_share=-0.12, saved_seconds=-0.1)
    found = replace(answer(), purchases=(gain,))
    assert f"{gain.change.name}: no effect, or 12 % slower: copies and CPU updates take DRAM bandwidth from" in said(found)
    more = replace(found, purchases=(replace(gain, change=replace(gain.change, gpus=2)),))  # of which one may idle
    assert f"{gain.change.name}: no effect" in said(more)
    assert "DRAM bandwidth from" not in said(more)


def test_fragmented_memory_has_a_cure() -> None:
    """Where the allocator would take more than the GPU has, the answer says so, and only there."""
    found = answer(LARGE)
    assert found.best is not None
    assert "expandable_segments" not in said(found)
    capacity = found.profile.hardware.gpu_capacity_bytes
    summary = replace(found.best.summary, gpu_reserved_bytes=capacity + GIB)
    more = replace(found, candidates=(replace(found.best, summary=summary), *found.candidates[1:]))
    assert f"more than its {format_bytes(capacity)}, as free memory is in pieces: set PYTORCH_CUDA_ALLOC_CONF" in said(more)
    assert found.simulation is not None
    assert f"expandable_segments:True, with which it reserves {format_bytes(found.simulation.gpu.expanded_bytes)}" in said(more)


def test_samples_of_different_lengths_are_said_to_take_memory() -> None:
    """What is reserved is said to be after these; where that is all there is, that training waits, with the cure."""
    workload = replace(WORKLOAD, kernels=Kernels.EAGER, sequence_length=256, sample_lengths=(16, 256))
    roomy, tight = (
        find_answer(analytic_profile(workload, where.whole()), where, policies=("resident",), sampling=Sampling(0))
        for where in (Site("a100-40gb-epyc7713", {}), Site("a100-40gb-epyc7713", {"gpu.memory": "2.62GiB"}))
    )
    assert "of the GPU for what is used, after samples of 16 to 256 tokens" in said(roomy)
    assert "expandable_segments" not in said(roomy)
    assert "training waits where it gives back what is in pieces: set PYTORCH_CUDA_ALLOC_CONF" in said(tight)


def test_memory_binds_where_more_of_it_helps() -> None:
    """On a tight GPU more of its memory saves time; where all stays on the GPU no memory would."""
    assert answer().binds == (GPU_MEMORY,)
    assert gain_of(answer(), "8.0 GiB more GPU memory").helps
    assert answer(LARGE).binds == ()
    assert "binds: no memory" in answer_text(answer(LARGE))
    assert not any(gain.helps for gain in answer(LARGE).purchases)


@pytest.mark.slow
def test_one_more_gpu_is_bought_by_tokens() -> None:
    """Each GPU has its own batch, so its gain is in time for a token."""
    where = Site("a100-40gb-epyc7713", {})
    found = find_answer(analytic_profile(WORKLOAD, where.whole()), where, policies=("resident",), sampling=Sampling(0))
    gain = gain_of(found, "2 GPUs instead of 1")
    hardware = load_hardware("a100-40gb-epyc7713").shared_by(2)
    alone = simulated(analytic_profile(WORKLOAD, hardware), default_policies(2))
    assert gain.tokens_per_second == pytest.approx(max(s.tokens_per_second for s in alone.values()), rel=1e-6)


def test_a_second_gpu_over_pcie_is_an_assumption() -> None:
    """The purchase says that the way between GPUs is assumed, and its gain that another policy plans it."""
    where = Site(NODE, {"gpu.memory": LARGE})
    profile = analytic_profile(WORKLOAD, where.hardware())
    (change,) = (each for each in single_purchases(where, None) if each.gpus == 2)
    candidates = [Judged(profile, ("zero_offload",))()]
    tried = [trial for trial in trials(profile, where, [change], candidates, ["resident"]) if trial.policy == "resident"]
    (gain,) = gains(profile, [change], candidates, tried, [trial() for trial in tried])
    assert gain.policy == "resident"
    shown = said(replace(answer(), candidates=(candidates[0],), purchases=(gain,)))
    assert "2 GPUs instead of 1, each with this batch, over PCIe without peer-to-peer (an assumption): " in shown
    assert "with resident: another policy" in shown


def test_a_lever_brings_what_asking_for_it_brings() -> None:
    """A wide vocabulary makes chunked losses worth a line with the time of that workload; once they are on there is none."""
    wide = replace(WORKLOAD, vocabulary_size=64_000)
    asked = ("resident",)
    found = answer("6GiB", policies=asked, workload=wide)
    gain = gain_of(found, "chunked loss")
    there = simulated(profile_at(site(gpu_memory="6GiB"), replace(wide, chunked_loss=True)), asked)["resident"]
    assert gain.iteration_seconds == there.iteration_seconds
    assert gain.peaks == {one.memory: one.peak_bytes for one in there.memories}
    again = answer("6GiB", policies=asked, workload=replace(wide, chunked_loss=True))
    assert "chunked loss" not in {gain.change.name for gain in again.levers}


def test_levers_are_best_first_and_say_what_they_change() -> None:
    """Those that keep the mathematics are apart from those that do not; optimizers and adapters are of the second kind."""
    found = answer()
    times = [gain.seconds_per_token for gain in found.levers]
    assert times == sorted(times)
    exact = {gain.change.name for gain in found.levers if gain.change.exact}
    assert {"lean kernels", "2 x 2 sequences"} <= exact
    assert not any(word in name for name in exact for word in ("AdamW", "LoRA", "fp8", "4 x 4"))
    text = said(found)
    assert text.index("with the same gradients") < text.index("lean kernels") < text.index("with other mathematics")


def test_levers_are_combined() -> None:
    """What helps alone is tried together: the combination is the workload with all of them, simulated."""
    found = answer("2000MiB", policies=("resident",))
    assert found.best is None
    combined = [gain for gain in found.levers if AND in gain.change.name and gain.fits]
    assert combined
    for gain in combined[:2]:
        assert gain.change.workload is not None
        there = profile_at(site(gpu_memory="2000MiB"), gain.change.workload)
        assert simulated(there, ("resident",))["resident"].iteration_seconds == gain.iteration_seconds


def test_two_purchases_together_are_planned_together() -> None:
    """With the figures of both."""
    found = answer()
    pair = next(gain for gain in found.purchases if AND in gain.change.name)
    alone = [gain_of(found, name).change.moved for name in pair.change.name.split(AND)]
    assert pair.change.moved == {**alone[0], **alone[1]}
    assert found.best is not None
    there = profile_at(site(gpu_memory=TIGHT), moved=pair.change.moved)
    assert found.best.plan is not None
    assert pair.iteration_seconds is not None
    assert pair.iteration_seconds <= simulate_plan(there, found.best.plan).iteration_seconds * (1 + 1e-6)


def test_a_price_is_for_each_hour_saved() -> None:
    """Of the whole training; what saves nothing has none."""
    gain, now = gain_of(answer(), "8.0 GiB more GPU memory"), answer().simulation
    assert gain.tokens_per_second is not None
    assert now is not None
    priced = with_price(gain, {"gpu-memory": 1000.0}, 10**9)
    hours = [10**9 / rate / 3600 for rate in (now.tokens_per_second, gain.tokens_per_second)]
    assert priced.price_per_hour == pytest.approx(1000 / (hours[0] - hours[1]), rel=1e-6)
    assert with_price(gain, {"link": 1000.0}, 10**9).price_per_hour is None
    assert with_price(replace(gain, saved_share=0.0), {"gpu-memory": 1000.0}, 10**9).price_per_hour is None


# --- where nothing fits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["resident", "zero_offload", "autohete"])
def test_the_least_memory_is_enough_and_less_is_not(policy: str) -> None:
    """With the memory that the answer prints the policy fits; with a tenth of a GiB less it does not."""
    found = answer(TINY, policies=(policy,))
    assert found.best is None
    need = next(need for need in found.needs if need.grows == (GPU_MEMORY,))
    printed = re.search(r"a GPU with ([0-9.]+) GiB", said(found))
    assert printed is not None
    assert abs(float(printed[1]) * GIB - need.gpu_bytes) <= 1
    enough = simulated(profile_at(site(gpu_memory=f"{printed[1]}GiB")), [policy])
    assert enough[policy].iteration_seconds == pytest.approx(need.iteration_seconds)
    assert not simulated(profile_at(site(gpu_memory=f"{need.gpu_bytes - GIB // 10 - 1}B")), [policy])
    assert "DOES NOT FIT" in answer_text(found)
    assert found.binds == (GPU_MEMORY,)


def test_a_place_that_cannot_hold_a_plan_has_a_reason() -> None:
    """It does not compute, which is no lack of bytes."""
    text = said(answer(policies=("resident", "smart_infinity")))
    assert "in nvme, which does not compute on" in text
    assert "there are 0 B" not in text


def test_of_equal_needs_the_most_tokens_decide() -> None:
    """A pipeline whose stages share a batch may have the shorter iteration, and still be slower."""
    pipeline = Need((GPU_MEMORY,), 8 * GIB, 64 * GIB, None, "pipeline", 1.0, 2000.0)
    shared = replace(pipeline, policy="resident:zero_stage=3", iteration_seconds=3.0, tokens_per_second=2500.0)
    assert _smallest([(pipeline,), (shared,)], (GPU_MEMORY,)) == shared
    assert need_text(shared, ()).endswith("resident:zero_stage=3, 3.00 s per iteration, 2,500 tokens/s.")


def test_if_no_memory_alone_is_enough_both_are_named() -> None:
    """A host and a GPU that are both too small: the answer names a size for each, and both together work."""
    found = answer(TINY, policies=("zero_offload",), host_memory="4100MiB")
    (need,) = found.needs
    assert need.grows == (GPU_MEMORY, HOST_MEMORY)
    both = {"gpu.memory": f"{need.gpu_bytes}B", "host.memory": f"{need.host_bytes}B"}
    small = site(gpu_memory=TINY, host_memory="4100MiB")
    assert simulated(profile_at(small, moved=both), ["zero_offload"])
    for key, size in both.items():
        assert not simulated(profile_at(small, moved={key: size}), ["zero_offload"])


def test_what_does_not_fit_is_told_the_largest_batch() -> None:
    """Where nothing fits the answer says which batch would; faster links, which do not change that, are not simulated."""
    found = answer("2000MiB", policies=("resident",))
    assert found.best is None
    (grown,) = found.largest
    assert (
        grown.value
        == largest(
            WORKLOAD, profile_at(site(gpu_memory="2000MiB")).hardware, parse_policy("resident"), GrowingFigure.BATCH
        ).value
    )
    assert {gain.change.memory for gain in found.purchases} == {GPU_MEMORY, HOST_MEMORY}


@pytest.mark.slow
def test_no_policy_fits_a_larger_batch_than_the_largest() -> None:
    """Where the fastest policy is not the one that fits most, either: one that stays on the GPU has less room."""
    found = answer("3GiB", sizes=(GrowingFigure.BATCH,))
    hardware = profile_at(site(gpu_memory="3GiB")).hardware
    each = {name: largest(WORKLOAD, hardware, parse_policy(name), GrowingFigure.BATCH).value for name in QUICK}
    assert found.best is not None
    assert each[found.best.name] < found.largest[0].value == max(each.values())


def test_what_does_not_fit_is_told_what_adapters_take() -> None:
    """Adapters are simulated as if they were asked for."""
    found = answer("2000MiB", policies=("resident",))
    for name, quantised in (("LoRA of rank 16", False), ("QLoRA of rank 16", True)):
        gain = gain_of(found, name)
        workload = replace(WORKLOAD, training=Training(Lora(16, quantised=quantised)))
        assert gain.change.workload == workload
        there = analytic_profile(workload, profile_at(site(gpu_memory="2000MiB")).hardware)
        asked = simulate_policy(there, parse_policy("resident"))
        assert gain.verdict is asked.verdict
        assert gain.iteration_seconds == (asked.iteration_seconds if asked.verdict is Verdict.OK else None)
        assert gain.change.name in said(found)


def test_the_command_line_names_levers_by_options_that_pull_them() -> None:
    """The options of each lever, given to the command line's own parser, make its workload."""
    found = answer("2000MiB", policies=("resident",))
    for before, after in zip(found.levers, with_options(found).levers, strict=True):
        asked = given_shape(after.change.name.split())
        assert replace(WORKLOAD, **asked) == before.change.workload


@pytest.mark.parametrize("columns", [60, 100])
def test_the_page_holds_in_a_narrow_terminal(columns: int) -> None:
    """Lines wrap to the terminal, and no word is lost; the page is never wider than 80 columns."""
    narrow, usual = answer_text(answer(), columns), answer_text(answer())
    assert max(map(len, narrow.splitlines())) <= min(columns, 80)
    assert narrow.split() == usual.split()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*POLICIES, "zero_offload:delayed_update"])
@pytest.mark.parametrize("gpu_memory", ["1150MiB", "1400MiB", TIGHT, LARGE])
def test_a_search_that_ends_early_says_the_same(name: str, gpu_memory: str) -> None:
    """Whether a policy fits does not depend on whether it looks for the fastest plan."""
    profile = profile_at(site(gpu_memory=gpu_memory, host_memory="12GiB"))
    try:
        found = simulate_policy(profile, parse_policy(name)).verdict is Verdict.OK
    except InfeasibleError:
        found = False
    assert (misfit(profile, parse_policy(name)) == "") is found


# --- draws --------------------------------------------------------------------------------------------------------


def test_draws_lie_in_their_ranges_around_the_value() -> None:
    """Half of the draws of a figure lie below its value; none outside of its range; a seed gives the same again."""
    figures = open_figures(NODE, [])
    found = draw(figures, Sampling(16, seed=3))
    assert found == draw(figures, Sampling(16, seed=3)) != draw(figures, Sampling(16, seed=4))
    for figure in figures:
        values = np.array([float(one[figure.key].removesuffix(figure.unit)) for one in found])
        assert (values >= figure.low * (1 - 1e-6)).all()
        assert (values <= figure.high * (1 + 1e-6)).all()
        if figure.low < figure.value < figure.high:
            assert (values < figure.value).sum() == 8


def test_what_was_given_is_not_drawn() -> None:
    """Nor what is in proportion to it, what the reader knows, and what only several GPUs have."""
    everything = {figure.key for figure in open_figures(NODE, [])}
    others = {figure.key for figure in open_figures(NODE, ["links.h2d.bandwidth", "gpu.gemm_efficiency"])}
    link = {"links.h2d.bandwidth", "links.h2d.duplex_bandwidth", "links.h2d.pageable_bandwidth"}
    assert everything - others == {*link, "gpu.gemm_efficiency"}
    assert not everything & {"host.memory", "cpu.cores"}
    one, two = (open_figures("a100-40gb-epyc7713", [], gpus) for gpus in (1, 2))
    assert {figure.key for figure in two} > {figure.key for figure in one}


def test_counts_are_not_drawn(tmp_path: Path) -> None:
    """A file may give ranges of counts; between two of their values there is nothing to draw, and every draw can be loaded."""
    text = f'base = "{NODE}"\n'
    for key in ("gpu.multiprocessors", "cpu.cores", "host.memory_domains"):
        text += f'[{key}]\nvalue = 2\nrange = [1, 9]\nsource = "two machines"\ndate = 2026-11-22\n'
    (tmp_path / "node.toml").write_text(text)
    figures = open_figures(str(tmp_path / "node.toml"), [])
    assert {figure.key for figure in figures} == {figure.key for figure in open_figures(NODE, [])}
    for moved in draw(figures, Sampling(4)):
        load_hardware(tmp_path / "node.toml", moved)


def test_the_interval_has_the_figures_and_the_model_in_it() -> None:
    """5 and 95 % of many random times: the plan's at a draw of the figures, times an error of the model."""
    found = answer("3GiB", policies=("resident", "zero_offload"), draws=8)
    assert found.interval is not None
    assert found.simulation is not None
    where = site(gpu_memory="3GiB")
    times, fitting = [], 0
    for moved in draw(open_figures(NODE, where.given), Sampling(8)):
        again = simulate_plan(profile_at(replace(where, given={**where.given, **moved})), found.simulation.plan)
        times.append(again.iteration_seconds)
        fitting += again.verdict is Verdict.OK
    rng = np.random.default_rng(1)
    errors = rng.normal(0, MODEL_ERROR / np.sqrt(2 / np.pi), 200_000)
    assert np.abs(errors).mean() == pytest.approx(MODEL_ERROR, rel=0.01)
    many = np.log(rng.choice(times, 200_000)) + errors
    expected = np.exp(np.quantile(many, [0.05, 0.95]))
    assert (found.interval.low_seconds, found.interval.high_seconds) == pytest.approx(expected, rel=0.01)
    assert found.interval.fitting == fitting < 8
    assert found.interval.short == {GPU_MEMORY: 8 - fitting}
    assert found.interval.low_seconds <= found.simulation.iteration_seconds <= found.interval.high_seconds
    assert answer().interval is None


def test_offloading_pays_only_beyond_the_uncertainty() -> None:
    """A gain that the model's error may hide is called uncertain; a large one pays."""
    found = answer(TIGHT, draws=4)
    assert found.interval is not None
    staying = next(each for each in answer(LARGE).candidates if each.stays)
    both = replace(found, candidates=(*found.candidates, staying))
    for probability, expected in ((0.99, Offloading.PAYS), (0.8, Offloading.UNDECIDED)):
        told = replace(both, interval=replace(found.interval, faster_than_staying=probability))
        assert told.offloading is expected
        assert ("It is not certain that offloading pays" in said(told)) is (expected is Offloading.UNDECIDED)


# --- what is printed ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("gpu_memory", [LARGE, TIGHT, TINY])
def test_the_page_holds_at_80_columns(gpu_memory: str) -> None:
    """No line is longer, or ends in a blank, whether it fits or not."""
    lines = answer_text(answer(gpu_memory, draws=4, sizes=(GrowingFigure.BATCH,))).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.slow
def test_everything_printed_is_in_the_json() -> None:
    """Times, sizes and purchases of the page are numbers there."""
    found = answer(sizes=(GrowingFigure.BATCH,), draws=4)
    data = json.loads(json.dumps(answer_json(found)))
    assert found.best is not None
    assert data["policy"] == found.best.name
    assert data["best"]["iteration_seconds"] == found.best.seconds
    assert [one["change"]["name"] for one in data["purchases"]] == [gain.change.name for gain in found.purchases]
    assert data["largest"] == [{"figure": "batch_size", "value": found.largest[0].value, "limit": found.largest[0].limit}]
    assert data["interval"]["sampling"] == {"draws": 4, "seed": 0}
    assert {each["policy"] for each in data["policies"]} == set(QUICK)
    nothing = json.loads(json.dumps(answer_json(answer(TINY))))
    assert (nothing["fits"], nothing["policy"], nothing["best"]) == (False, None, None)
    assert nothing["needs"]


def test_what_was_not_given_is_said() -> None:
    """Batch, sequence, kernels, optimizer, precision and what the system keeps are in the answer unless they were given."""
    names = {
        "batch_size": "batch size 4",
        "sequence_length": "sequence length 512",
        "micro_batches": "micro batches 1",
        "kernels": "kernels fused",
        "optimizer": "optimizer adamw",
        "precision": "precision bf16",
        "chunked_loss": "chunked loss off",
        "hardware": f"hardware {NODE}",
        "gpu_memory": "GPU memory 1.7 GiB",
        "host_memory": "host memory 128.0 GiB",
        "system_memory": "4.0 GiB of host memory left to the system",
        "tokens": "1B tokens",
    }
    nothing, everything = answer(), replace(answer(), given=tuple(names))
    assumed, others = (
        text[text.index("assumed, not given: ") : text.index("model: ")] for text in map(said, (nothing, everything))
    )
    assert [text for text in names.values() if text not in assumed] == []
    assert [text for text in names.values() if text in others] == []
    assert answer_json(everything)["assumptions"].keys().isdisjoint(names)


@pytest.mark.slow
def test_the_same_question_has_the_same_answer(tmp_path: Path) -> None:
    """Byte for byte, on one core and on two, as text, as JSON and as a page; what was given is not assumed."""
    tiny = ["--hidden", "256", "--blocks", "2", "--heads", "4", "--vocabulary", "1000", "--precision", "fp16"]
    asked = ["plan", *tiny, "--hardware", NODE, "--draws", "2", "--tokens", "300M"]
    files = [str(tmp_path / name) for name in ("1.json", "1.html", "2.html")]
    first = autohete(*asked, "--jobs", "1", "--json", files[0], "--html", files[1])
    second = autohete(*asked, "--jobs", "2", "--json", "--html", files[2])
    assert (first.stderr, second.stderr) == ("", "")
    assert Path(files[0]).read_text() == second.stdout
    assert Path(files[1]).read_bytes() == Path(files[2]).read_bytes()
    shown = " ".join(first.stdout.split())
    assert "300M tokens take" in shown
    assumed = shown[shown.index("assumed, not given: ") :]
    assert re.search(r"chosen for the most tokens/s: batch size \d+, micro batches \d+", shown)
    assert not re.search("precision|300M|hardware", assumed)


@pytest.mark.slow
def test_a_measured_profile_has_an_answer_without_other_hardware() -> None:
    """Its policies, budgets and least memory; nothing is drawn, bought or made larger, since times were measured."""
    for gpu_memory, fits in ((TIGHT, True), (TINY, False)):
        profile = profile_at(site(gpu_memory=gpu_memory), less=0)
        found, usual = find_answer(profile, None, policies=QUICK), answer(gpu_memory)
        assert [each.name for each in found.candidates] == [each.name for each in usual.candidates]
        assert (found.best is not None) is fits
        assert (found.budgets, found.needs) == (usual.budgets, usual.needs)
        assert (found.purchases, found.levers, found.largest, found.interval) == ((), (), (), None)
        assert "effect of a purchase" not in said(found)


@pytest.mark.slow
def test_the_plan_of_one_policy_is_drawn_and_written(tmp_path: Path) -> None:
    """As a picture, as a schedule and as JSON, beside the page, which is printed."""
    names = ["plan.png", "plan.txt", "plan.json"]
    picture, schedule, data = (tmp_path / name for name in names)
    asked = ["plan", *SMALL, "--policy", "zero_offload"]
    done = autohete(*asked, "--gantt", str(picture), "--schedule", str(schedule), "--json", str(data))
    assert (done.returncode, done.stderr) == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert schedule.read_text().startswith("autohete-schedule")
    assert data.read_text() == autohete(*asked, "--json").stdout
    assert "zero_offload: of 6 units, " in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


@given(st.integers(1, 9999), st.sampled_from([0, 3, 6, 9, 12]))
def test_a_count_is_read_as_it_is_written(digits: int, zeros: int) -> None:
    """Any number of four digits and its zeros."""
    assert parse_count(format_count(digits * 10**zeros)) == digits * 10**zeros


@pytest.mark.parametrize(
    ("seconds", "said"), [(1.12, "12 % slower"), (1.994, "99 % slower"), (8.57, "8.6x slower"), (0.5, "2.0x faster")]
)
def test_what_is_many_times_slower_is_said_to_be(seconds: float, said: str) -> None:
    """A ratio below two is in percent of the other time; ``757 % slower`` would have to be worked out."""
    assert format_ratio(seconds, 1.0) == said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "many"], "write it such as 1B, 300M or 50k"),
        (["--tokens", "0"], "is not between 1 and"),
        (["--draws", "-1"], "draws is -1: give at least 0"),
        (["--draws", "5000"], "at most 1,000"),
        (["--jobs", "0"], "--jobs is 0"),
        (["--system-memory", "4"], "has no unit"),
        (["--system-memory", "500GiB"], "leaves nothing of 128.0 GiB"),
        (["--html", "no/such/x.html"], "cannot be written"),
        (["--policy", "resident", "--html", "x.html"], "leave out --policy"),
    ],
)
def test_bad_questions_are_refused(arguments: list[str], message: str) -> None:
    """In one line that says what to give."""
    assert message in refused("plan", *SMALL, "--hardware", NODE, *arguments)
