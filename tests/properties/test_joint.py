"""The joint planner against exhaustive enumeration and against every shipped system, and its answers when nothing fits."""

from __future__ import annotations

import csv
import os
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autohete.errors import InfeasibleError, InputError
from autohete.hardware import Cpu, Gpu, Hardware, Host, Interconnect, Link, load_hardware
from autohete.plan import Activations, Plan, Processor, UnitPlan
from autohete.plan.policy import Judge, Judgement, Verdict
from autohete.planner.choices import Assignment, Choices
from autohete.planner.joint_search import JointSearch
from autohete.policies import POLICIES, System, variants
from autohete.policies.autohete import AutoHete
from autohete.policies.joint import Joint, JointFrom, PlanFamily, best_plan, every_choice, of_blocks
from autohete.profile import Profile, analytic_profile
from autohete.schedule import GPU_MEMORY, HOST_MEMORY
from autohete.simulate import judge_for, with_memory
from autohete.testing import strategies
from autohete.workload import GPT2_KERNELS, Kernels, Precision, Units, Workload, named_workload
from autohete.workload.config import read_model
from autohete.workload.optimizers import Optimizer
from autohete.workload.training import Training

NODE = "a100-40gb-epyc7713"
WIDE = os.environ.get("AUTOHETE_HYPOTHESIS") == "wide"


def drawn_profile(seed: int, blocks: int) -> Profile:
    """A random model on engines from too slow to too fast for one another, whose units differ, with little GPU memory."""
    rng = random.Random(seed)

    def rate(low: float, high: float) -> float:
        return float(10 ** rng.uniform(low, high))

    workload = Workload(
        f"seed-{seed}",
        hidden_size=2 * rng.choice([64, 128, 256]),
        transformer_blocks=blocks,
        heads=2,
        vocabulary_size=rng.choice([100, 2000]),
        sequence_length=rng.choice([64, 256, 1024]),
        batch_size=rng.randint(1, 8),
        precision=rng.choice(list(Precision)),
        tied_embeddings=rng.random() < 0.5,
        kernels=rng.choice(list(GPT2_KERNELS)),
        micro_batches=rng.choice([1, 1, 2]),
    )
    h2d, d2h = rate(9.5, 11), rate(9.5, 11)
    hardware = Hardware(
        "random",
        Gpu(10**15, 1, rate(12.5, 14.5), rate(12, 13.5), rate(11.5, 12.5), 0.85, 0.8, rate(-7, -5)),
        Link(h2d, h2d * rng.uniform(0.4, 1), 1e-5),
        Link(d2h, d2h * rng.uniform(0.4, 1), 1e-5),
        Host(10**15, rate(10.5, 11.7), rng.uniform(0.4, 0.8)),
        Cpu(8, rate(9.7, 11), rng.choice([None, rate(9.7, 11)]), rng.choice([0.5, 1.0])),
    )
    profile = unequal(analytic_profile(workload, hardware), seed)
    resident = family_of(profile).judged(((0, 0),) * len(profile.units)).gpu_peak_bytes
    gpu = replace(hardware.gpu, memory_bytes=int(resident * rng.uniform(0.25, 1.05)))
    return replace(profile, hardware=replace(hardware, gpu=gpu))


def unequal(profile: Profile, seed: int) -> Profile:
    """The same, but each unit has its own size."""
    rng, blocks = random.Random(seed), []
    for block in profile.units:
        factor = rng.uniform(0.3, 1.7)
        blocks.append(
            replace(
                block,
                parameters=round(block.parameters * factor),
                forward_seconds=block.forward_seconds * factor,
                backward_seconds=block.backward_seconds * factor,
                gpu_update_seconds=block.gpu_update_seconds * factor,
            )
        )
    return replace(profile, units=tuple(blocks))


def family_of(profile: Profile, choices: Choices | None = None, judge: Judge | None = None) -> PlanFamily:
    """The plans of some choices; of every one there is if none are given."""
    return PlanFamily(profile, judge or judge_for(profile), choices or every_choice(profile))


def some_choices(profile: Profile, seed: int, most: int) -> Choices:
    """So few choices for each unit that all their combinations can be simulated; doing nothing is among them."""
    rng, every = random.Random(seed), every_choice(profile)

    def few(some: tuple[UnitPlan, ...]) -> tuple[UnitPlan, ...]:
        return some[:1] + tuple(one for one in some[1:] if one in rng.sample(some, min(most, len(some))))

    others = [few(every.others[0]), *[few(every.others[1])] * (len(every.others) - 2), few(every.others[-1])]
    return Choices(every.activations, tuple(others))


def every_assignment(choices: Choices) -> list[Assignment]:
    """All combinations."""
    places = [list(product(range(len(a)), range(len(o)))) for a, o in zip(choices.activations, choices.others, strict=True)]
    return list(product(*places))


#: Transformer blocks, and how many choices of parameters and updates each unit has beside doing nothing.
SMALL = [(seed, blocks, most) for seed in range(300 if WIDE else 4) for blocks, most in ((1, 3), (2, 1))]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "blocks", "most"), SMALL)
def test_the_search_is_within_a_percent_of_the_best_of_all(seed: int, blocks: int, most: int) -> None:
    """On a small random case the search alone is at most 1 % slower than the best assignment, which the bound is not above."""
    profile = drawn_profile(seed, blocks)
    choices = some_choices(profile, seed, most)
    family = family_of(profile, choices)
    judged = [family.judged(assignment) for assignment in every_assignment(choices)]
    best = min((found.seconds for found in judged if found.verdict is Verdict.OK), default=None)
    relaxed = family.relaxation()
    bound = relaxed.bound()
    if best is None:
        return
    assert bound is not None, "something fits"
    assert bound <= best
    search = JointSearch(relaxed, family.judged, bound)
    search.start()
    search.go_on()
    assert search.best is not None, "a plan exists and was not found"
    assert search.best.seconds <= best * 1.01


@pytest.mark.parametrize("gpus", [1, 3])
@pytest.mark.parametrize("seed", range(200 if WIDE else 6))
def test_no_assignment_goes_below_its_rows(seed: int, gpus: int) -> None:
    """No simulated iteration is shorter, and no peak lower, than the rows say; the host holds what they say at rest."""
    profile = drawn_profile(seed, 2 + seed % 4)
    join = Interconnect(gpus, 10 ** (9 + seed % 3), 1e-6, concurrent_share=0.7)
    profile = replace(profile, hardware=replace(profile.hardware, interconnect=join).shared_by(gpus))
    family, rng = family_of(profile), random.Random(seed)
    model = family.relaxation().model
    for _ in range(12):
        assignment = tuple(
            (rng.randrange(len(a)), rng.randrange(len(o)))
            for a, o in zip(family.choices.activations, family.choices.others, strict=True)
        )
        found = family.judged(assignment)
        assert found.seconds >= model.seconds.of(assignment).max()
        assert found.gpu_peak_bytes >= model.gpu_bytes.of(assignment).max() * (1 - 1e-12)
        assert found.host_peak_bytes >= model.host_bytes.of(assignment)[0]


@pytest.mark.parametrize("seed", range(200) if WIDE else (6, 7, 29))
def test_clipped_updates_run_beside_the_copies_of_lower_units(seed: int) -> None:
    """With clipping the GPU updates after the last backward, which may hide what the first units wait for: rows allow it."""
    drawn = drawn_profile(seed, 2 + seed % 4)
    family = family_of(replace(drawn, workload=replace(drawn.workload, clip_norm=1.0)))
    model, units = family.relaxation().model, len(drawn.units)
    on_cpu = [
        next(i for i, one in enumerate(some) if one.update.on is Processor.CPU and not one.parameters.leaves)
        for some in family.choices.others
    ]
    for first in range(1, units):
        assignment = tuple((0, on_cpu[unit] if unit < first else 0) for unit in range(units))
        assert family.judged(assignment).seconds >= model.seconds.of(assignment).max()


def test_sums_on_the_host_take_the_time_that_the_rows_say() -> None:
    """Where the CPU adds up many gradients and all else is quick, the iteration is the work of its row; no row is longer."""
    quick = {"links.h2d.bandwidth": "400GB/s", "links.d2h.bandwidth": "400GB/s", "cpu.update_bandwidth": "10GB/s"}
    workload = Workload("sums", 2048, 4, 8, vocabulary_size=1000, sequence_length=16, batch_size=1, micro_batches=16)
    family = family_of(analytic_profile(workload, load_hardware(NODE, quick)))
    added = [
        next(i for i, one in enumerate(others) if one.update.on is Processor.CPU and one.accumulates_on_host)
        for others in family.choices.others
    ]
    assignment = tuple((0, i) for i in added)
    seconds, rows = family.judged(assignment).seconds, family.relaxation().model.seconds.of(assignment)
    assert rows.max() <= seconds <= 1.1 * rows.max()


#: Fewer systems are tried where examples are few.
TRIED = 200 if WIDE else 12


@st.composite
def questions(draw: st.DrawFn) -> tuple[Profile, list[System]]:
    """A training on one GPU or several, with drives or adapters or several micro-batches, and variants of shipped systems.
    Memories are often just as large as the first of these needs.
    """
    profile = draw(
        st.one_of(strategies.profiles(max_micro_batches=3), strategies.profiles_of_several_gpus(max_micro_batches=2))
    )
    every = [one for system in POLICIES.values() if system is not Joint for one in variants(system, profile)]
    systems = random.Random(draw(st.integers(0, 10**6))).sample(every, min(TRIED, len(every)))
    plenty = profile
    for memory in (GPU_MEMORY, HOST_MEMORY):
        plenty = with_memory(plenty, memory, 10**15)
    used = judged_by(systems[0], plenty)
    for memory in (GPU_MEMORY, HOST_MEMORY):
        if used is not None and draw(st.booleans()):
            profile = with_memory(profile, memory, max(1, used.peaks[memory]))
    return profile, systems


def judged_by(system: System, profile: Profile) -> Judgement | None:
    """What the plan of a system comes to; None if it has none."""
    judge = judge_for(profile)
    try:
        return judge(system.plan(profile, judge))
    except (InfeasibleError, InputError):
        return None


@pytest.mark.slow
@given(questions())
@settings(max_examples=300 if WIDE else 3)
def test_no_shipped_system_is_faster_or_smaller(question: tuple[Profile, list[System]]) -> None:
    """On any input the plan fits wherever one of any system fits, with any flags of its search space, and is at most as slow;
    no system fits into less than the memory that an error names.
    """
    profile, systems = question
    judge = judge_for(profile)
    try:
        plan = Joint().plan(profile, judge)
    except InfeasibleError as error:
        less = with_memory(profile, error.constraint, error.needed_bytes - 1)
        assert not [one for one in systems if (other := judged_by(one, less)) and other.verdict is Verdict.OK]
        return
    found = judge(plan)
    assert found.verdict is Verdict.OK
    assert plan.bound_seconds is None or plan.bound_seconds <= found.seconds
    for system in systems:
        other = judged_by(system, profile)
        assert other is None or other.verdict is not Verdict.OK or found.seconds <= other.seconds * (1 + 1e-6), system


def planned(profile: Profile, judge: Judge) -> Plan | None:
    """None: nothing fits."""
    try:
        return Joint().plan(profile, judge)
    except InfeasibleError:
        return None


@pytest.mark.slow
def test_it_gains_over_three_integers() -> None:
    """The largest model trains at least 20 % faster than with AutoHete on the published node: states stream to the GPU."""
    workload = replace(named_workload("gpt-22b"), precision=Precision.FP16, kernels=Kernels.EAGER)
    profile = analytic_profile(workload, load_hardware(NODE))
    judge = judge_for(profile)
    plan = Joint().plan(profile, judge)
    assert judge(plan).seconds * 1.2 <= judge(AutoHete().plan(profile, judge)).seconds
    assert any(unit.fetches_states for unit in plan.units)


@pytest.mark.slow
def test_doing_nothing_is_a_plan() -> None:
    """On a GPU that has room for everything no iteration is longer than where all stays there, and nothing is recomputed."""
    profile = analytic_profile(named_workload("gpt-2b"), load_hardware("h200-pcie5", {"gpu.memory": "400GiB"}))
    judge = judge_for(profile)
    plan = Joint().plan(profile, judge)
    assert judge(plan).seconds <= judge(POLICIES["resident"]().plan(profile, judge)).seconds
    assert plan.checkpointed_units == 0


@pytest.mark.slow
@pytest.mark.parametrize(("key", "size", "memory"), [("gpu.memory", "2GiB", "gpu"), ("host.memory", "60GB", "host")])
def test_an_infeasible_budget_names_the_smallest_that_works(key: str, size: str, memory: str) -> None:
    """The error says which memory binds and how much would do; that much does, and 3 % less does not."""
    workload = named_workload("gpt-10b")
    profile = analytic_profile(workload, load_hardware(NODE, {key: size}))
    with pytest.raises(InfeasibleError, match=f"{memory} memory for tensors is .*short by .*smallest that works is") as caught:
        Joint().plan(profile, judge_for(profile))
    assert caught.value.constraint == memory
    reserved = profile.hardware.gpu.reserved_bytes if memory == "gpu" else 0

    def verdict_with(budget: int) -> Verdict:
        enough = analytic_profile(workload, load_hardware(NODE, {key: f"{budget}B"}))
        judge = judge_for(enough)
        return judge(Joint().plan(enough, judge)).verdict

    assert verdict_with(caught.value.needed_bytes + reserved) is Verdict.OK
    with pytest.raises(InfeasibleError):
        verdict_with(int(caught.value.needed_bytes * 0.97) + reserved)


@pytest.mark.slow
def test_a_plan_of_another_system_keeps_what_that_is_made_of() -> None:
    """Where a shipped system is fastest, its units, rules and footprint are the plan's."""
    profile = analytic_profile(named_workload("gpt-2b"), load_hardware(NODE))
    judge = judge_for(profile)
    plan = best_plan(profile, judge, every_choice(profile).where(_stays_on_gpu))
    shipped = []
    for system in POLICIES.values():
        if system is Joint:
            continue
        try:
            shipped.append(system().plan(profile, judge))
        except InfeasibleError:
            continue
    assert any((one.units, one.rules, one.footprint) == (plan.units, plan.rules, plan.footprint) for one in shipped)


def _stays_on_gpu(unit: UnitPlan) -> bool:
    """All of it."""
    return not (unit.kept.leaves or unit.parameters.leaves or unit.states.leaves) and unit.update.on is Processor.GPU


def test_selective_recomputation_is_among_the_choices() -> None:
    """Where activations are short of memory it is chosen, and the plan is quicker than without it."""
    workload = Workload("x", 512, 3, 8, 1000, 1024, 4, kernels=Kernels.FUSED_SOFTMAX)
    profile = analytic_profile(workload, load_hardware(NODE, {"links.h2d.bandwidth": "1GB/s", "links.d2h.bandwidth": "1GB/s"}))
    resident = family_of(profile).judged(((0, 0),) * len(profile.units)).gpu_peak_bytes
    gpu = replace(profile.hardware.gpu, memory_bytes=round(0.75 * resident), reserved_bytes=0)
    profile = replace(profile, hardware=replace(profile.hardware, gpu=gpu))
    judge, every = judge_for(profile), every_choice(profile)
    without = every.where(lambda unit: unit.activations is not Activations.SELECTIVE)
    plan = best_plan(profile, judge, every)
    other = best_plan(profile, judge, without, quick=True)  # which tries no other systems, of which some choose it, too
    assert any(unit.activations is Activations.SELECTIVE for unit in plan.units)
    assert judge(plan).verdict is Verdict.OK
    assert judge(plan).seconds < 0.98 * judge(other).seconds


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, *range(100 if WIDE else 3)])
def test_more_choices_never_give_a_slower_plan(seed: int | None) -> None:
    """A plan may recompute selectively and is no slower for that: for a large model that once was, and for random ones."""
    if seed is None:
        workload = replace(named_workload("gpt-10b"), kernels=Kernels.FUSED_SOFTMAX)
        profile = analytic_profile(workload, load_hardware(NODE))
    else:
        drawn = drawn_profile(seed, 6)
        workload = replace(drawn.workload, kernels=Kernels.FUSED_SOFTMAX)
        profile = analytic_profile(workload, drawn.hardware)
    judge, every = judge_for(profile), every_choice(profile)
    without = every.where(lambda unit: unit.activations is not Activations.SELECTIVE)
    assert without != every
    try:
        fewer = best_plan(profile, judge, without)
    except InfeasibleError:
        return
    more = best_plan(profile, judge, every)
    assert judge(more).seconds <= judge(fewer).seconds


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 58, *range(100 if WIDE else 4)])
def test_a_known_plan_is_never_worse_with_more_memory(seed: int) -> None:
    """With more memory the planner, given the plan for less, is never slower than with less. Not given it, it once was, where
    the seed is 11 or 58.
    """
    profile = drawn_profile(seed, 6)
    less = judge_for(profile)
    if (plan := planned(profile, less)) is None:
        return
    gpu = replace(profile.hardware.gpu, memory_bytes=profile.hardware.gpu.memory_bytes * 5 // 4)
    larger = replace(profile, hardware=replace(profile.hardware, gpu=gpu))
    more = judge_for(larger)
    found = more(JointFrom((plan,)).plan(larger, more))
    assert found.verdict is Verdict.OK
    assert found.seconds <= less(plan).seconds


@pytest.mark.slow
def test_sublayers_are_never_worse_than_planned_as_blocks() -> None:
    """Deciding for sublayers is no slower than deciding for blocks and treating both sublayers of a block alike."""
    hardware = load_hardware("rtx4090-workstation", {"gpu.memory": "6GiB"})
    workload = named_workload("gpt-2b", transformer_blocks=8, units=Units.SUBLAYER, batch_size=8)
    profile = analytic_profile(workload, hardware)
    judge = judge_for(profile)
    family = PlanFamily(profile, judge, every_choice(profile))
    coarse = of_blocks(family)
    assert coarse is not None
    assignment = family.choices.assignment(coarse)
    assert assignment is not None
    alike = family.judged(assignment)
    assert all(coarse[unit] == coarse[unit + 1] for unit in range(1, len(coarse) - 2, 2))
    assert alike.verdict is Verdict.OK
    assert judge(best_plan(profile, judge, family.choices)).seconds <= alike.seconds


def test_a_relaxed_value_is_no_higher_with_fewer_rows() -> None:
    """More memory never raises the bound."""
    profile = drawn_profile(3, 4)
    relaxed = family_of(profile).relaxation()
    bounds = [
        replace(relaxed, budgets=replace(relaxed.budgets, gpu_bytes=relaxed.budgets.gpu_bytes * factor)).bound()
        for factor in (1, 1.5, 4)
    ]
    found = [bound for bound in bounds if bound is not None]
    assert len(found) >= 2
    assert all(more <= less * (1 + 1e-6) for less, more in zip(found, found[1:], strict=False))


def test_the_documented_gains_are_those_of_the_file() -> None:
    """The results page says the median and the largest gain of the file, in which no model is slower than with AutoHete."""
    root = Path(__file__).parents[2]
    rows = list(csv.DictReader((root / "paper_figs" / "joint.csv").read_text().splitlines()))
    gains = [100 * float(row["gain"]) for row in rows]
    assert min(gains) >= 0
    page = " ".join((root / "docs" / "results.md").read_text().split())
    assert f"by {median(gains):.0f} % at the median and {max(gains):.0f} % at most" in page


@pytest.mark.slow
def test_an_8b_model_in_two_micro_batches_trains_within_10_gib() -> None:
    """Sums that rest on the host, states in parts and waits for memory: Llama-3.1-8B with 65,536 tokens in two micro-batches
    and updates on the GPU runs in 9.8 GiB of an H100, predicted with at least 98 % of the 10,209 tokens/s that another system
    was measured at, on a GPU whose products reach 0.75 of the peak, as they do for less than a second.
    """
    training = Training(optimizer=Optimizer.ADAMW_PURE_BF16)
    llama = replace(
        read_model("llama-3.1-8b"), batch_size=32, sequence_length=1024, micro_batches=2, chunked_loss=True, training=training
    )
    profile = analytic_profile(llama, load_hardware("h100-pcie5", {"gpu.memory": "9.8GiB", "gpu.gemm_efficiency": "0.75"}))
    judge = judge_for(profile)
    judged = judge(Joint().plan(profile, judge))
    assert judged.verdict is Verdict.OK
    assert 65536 / judged.seconds > 0.98 * 10_209


def test_no_unit_moves_in_more_parts_than_are_worth_a_copy() -> None:
    """An embedding may have a million times as many parameters as a block."""
    profile = drawn_profile(0, 3)
    sizes = [10**6, *[1] * (len(profile.units) - 2), 10**6]
    units = tuple(replace(unit, parameters=size) for unit, size in zip(profile.units, sizes, strict=True))
    parts = {one.states.parts for some in every_choice(replace(profile, units=units)).others for one in some}
    assert parts == {1, 32}
