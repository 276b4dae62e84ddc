"""Checkpointing of chains: the dynamic program of ``rotor`` against exhaustive enumeration, and the plans that say it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paper import profile_with

from autohete.errors import InputError
from autohete.lowering import lower
from autohete.plan import Activations, Plan, Route, UnitPlan
from autohete.plan.policy import Verdict
from autohete.plan.rules import GpuUpdatesAfterBackward
from autohete.planner.chain import Chain, Stage
from autohete.planner.remat_program import least_recomputation
from autohete.policies import parse_policy
from autohete.policies.chain_costs import activation_budget_bytes, stages
from autohete.policies.dtr import Iteration
from autohete.profile import LossProfile, Profile, UnitProfile
from autohete.schedule import GPU, GPU_MEMORY, HOST_MEMORY, Kind, Schedule, parse_schedule, validate
from autohete.simulate import judge_for, simulate_plan
from autohete.workload import Workload

KEEP, SELECTIVE, RECOMPUTE, DROP = Activations
#: Policies with fixed decisions in which nothing leaves the GPU.
FIXED = ["resident:checkpointing=full", "resident", "sqrt_checkpoint", "sqrt_checkpoint:keep_last"]
#: What each forward of each unit keeps.
Forwards = tuple[tuple[Activations, ...], ...]


# --- all ways -----------------------------------------------------------------------------------------------------


def sweeps(units: int, first: int = 0) -> Iterator[tuple[Activations, ...]]:
    """What so many units may keep that are computed one after another, the first of which has its input."""
    for kept in [KEEP, RECOMPUTE, DROP]:
        if units and not (first == 0 and kept is DROP):
            for rest in sweeps(units - 1, first + 1):
                if not (kept is KEEP and rest[:1] == (DROP,)):
                    yield (kept, *rest)
    if not units:
        yield ()


def all_ways(forwards: Forwards, top: int) -> Iterator[Forwards]:
    """All ways to go on with backward of the units up to ``top``, after such forwards."""
    if top < 0:
        yield forwards
    elif forwards[top][-1] is KEEP:
        yield from all_ways(forwards, top - 1)
    else:
        start = max(unit for unit in range(top + 1) if forwards[unit][-1] is RECOMPUTE)
        for kept in sweeps(top - start + 1):
            if kept[-1] is KEEP:
                again = (*[()] * start, *((one,) for one in kept), *[()] * (len(forwards) - top - 1))
                yield from all_ways(tuple(a + b for a, b in zip(forwards, again, strict=True)), top - 1)


def plan_of(inner: Forwards) -> Plan:
    units = [UnitPlan(kept[0], again=kept[1:-1]) for kept in inner]
    return Plan("by hand", (UnitPlan(), *units, UnitPlan()), rules=(GpuUpdatesAfterBackward(),))


def all_plans(blocks: int) -> list[Plan]:
    """Every plan in which nothing leaves the GPU."""
    return [plan_of(way) for first in sweeps(blocks) for way in all_ways(tuple((kept,) for kept in first), blocks - 1)]


def peak_and_time(schedule: Schedule) -> tuple[int, int]:
    """Bytes and nanoseconds of an iteration in which one thing happens after another."""
    assert {task.lane for task in schedule.tasks} == {GPU}
    used = peak = sum(buffer.size_bytes for buffer in schedule.resident if buffer.memory == GPU_MEMORY)
    sizes = {buffer.id: buffer.size_bytes for task in schedule.tasks for buffer in task.allocates}
    for task in schedule.tasks:
        used += sum(buffer.size_bytes for buffer in task.allocates)
        peak = max(peak, used)
        used -= sum(sizes[free.id] for free in task.frees)
    return peak, sum(task.duration_ns for task in schedule.tasks)


PLANS = {blocks: all_plans(blocks) for blocks in (1, 2, 3)}


@st.composite
def chains(draw: st.DrawFn, least: int, most: int) -> Profile:
    """Profiles of different units with small numbers."""
    small, profile = st.integers(0, 20), profile_with(10**9, draw(st.sampled_from([1, 2])))
    workload = replace(profile.workload, transformer_blocks=draw(st.integers(least, most)), tied_embeddings=draw(st.booleans()))
    alike = draw(st.booleans())

    def block(unit: int) -> UnitProfile:
        given, forward = draw(small), draw(small)
        return UnitProfile(
            workload.role(unit),
            draw(st.integers(1, 5)),
            forward * 1e-9,
            draw(small) * 1e-9,
            draw(small) * 1e-9,
            input_bytes=given,
            activation_bytes=given + draw(small),
            forward_workspace_bytes=draw(small),
            backward_workspace_bytes=draw(small),
            gpu_update_workspace_bytes=draw(small),
            measured_checkpointed_workspace_bytes=draw(st.none() | small),
            shorter_recompute_seconds=draw(st.none() | st.integers(0, forward).map(lambda ns: ns * 1e-9)),
        )

    units = [block(unit) for unit in range(workload.unit_count)]
    if alike:
        units[1:-1] = [units[1]] * (len(units) - 2)
    loss = LossProfile(1e-9, draw(small), draw(small), draw(st.booleans()))
    return replace(profile, workload=workload, units=tuple(units), loss=loss)


def with_memory(profile: Profile, gpu_bytes: int) -> Profile:
    return replace(profile, hardware=profile_with(gpu_bytes, 1).hardware)


def test_there_are_as_many_ways_as_counted_by_hand() -> None:
    """One block keeps or not; of two, the upper may be computed again from the lower, whose own second forward may keep all."""
    assert len(PLANS[1]) == 2
    # KK KR RK RR, and RD, in whose recomputation the lower keeps all or is computed once more.
    assert len(PLANS[2]) == 6
    assert len(set(PLANS[3])) == len(PLANS[3]) > 20


@settings(max_examples=30)
@given(chains(1, 3))
def test_rotor_is_the_quickest_plan_that_fits(profile: Profile) -> None:
    """Under every budget that makes a difference, and one byte less: the best of all plans; else one that takes least."""
    found = [peak_and_time(lower(profile, plan)) for plan in PLANS[profile.workload.transformer_blocks]]
    least = min(peak for peak, _ in found)
    for budget in sorted({peak - less for peak, _ in found for less in (0, 1)}):
        asked = with_memory(profile, budget)
        plan = parse_policy("rotor").plan(asked, judge_for(asked))
        peak, time = peak_and_time(lower(asked, plan))
        assert peak <= max(budget, least)
        if budget < least:
            continue
        assert time == min(time for peak, time in found if peak <= budget)
        assert plan.bound_seconds is not None
        assert round(plan.bound_seconds * 1e9) == time


@settings(max_examples=25)
@given(chains(4, 12), st.integers(0, 3))
def test_rotor_is_never_slower_than_fixed_segments(profile: Profile, choice: int) -> None:
    """Where checkpointing of every block, or in segments, fits, rotor fits and takes no longer."""
    policy = FIXED[choice]
    peak, time = peak_and_time(lower(profile, parse_policy(policy).plan(profile, judge_for(profile))))
    tight = with_memory(profile, peak)
    found, once = (parse_policy(name).plan(tight, judge_for(tight)) for name in ("rotor", "rotor:nested=off"))
    assert peak_and_time(lower(tight, found))[0] <= peak
    assert peak_and_time(lower(tight, found))[1] <= peak_and_time(lower(tight, once))[1] <= time
    assert all(len(unit.forwards) <= 2 for unit in once.units)


@pytest.mark.slow
@settings(max_examples=25)
@given(chains(1, 5), st.integers(0, 3))
def test_the_integer_program_and_the_dynamic_program_prove_each_other(profile: Profile, choice: int) -> None:
    """At some budgets Checkmate and Rotor take the same time, and have the same bound; where stages may free what others kept,
    nothing takes longer.
    """
    found = [parse_policy(name).plan(profile, judge_for(profile)) for name in FIXED]
    peak = sorted(peak_and_time(lower(profile, plan))[0] for plan in found)[choice]
    for budget in (peak, peak - 3, peak - 12):
        asked = with_memory(profile, budget)
        judge = judge_for(asked)
        plans = [parse_policy(name).plan(asked, judge) for name in ("rotor", "checkmate")]
        rotor, checkmate = (peak_and_time(lower(asked, plan)) for plan in plans)
        assert rotor[1] == checkmate[1] or min(rotor[0], checkmate[0]) > budget
        assert checkmate[0] <= max(budget, rotor[0])
        freely = least_recomputation(stages(asked), activation_budget_bytes(asked), 10, persistent=False)
        if rotor[0] <= budget:
            assert plans[0].bound_seconds == pytest.approx(plans[1].bound_seconds, rel=1e-6)
            kept = least_recomputation(stages(asked), activation_budget_bytes(asked), 10)
            assert freely.bound_ns <= kept.bound_ns + 1e-6


def test_freeing_what_has_served_can_save_recomputation() -> None:
    """Of this chain in the least memory, the plans' best takes 47 ns of forwards; a way that frees an input early takes 43."""
    sizes = [(9, 0, 6), (4, 14, 20), (1, 4, 14), (7, 7, 12), (5, 10, 23)]
    outputs = [given for _, given, _ in sizes[1:]] + [0]
    chain = [
        Stage(forward, forward, given, output, output, kept, 0, 0, 0, 0, keeps=unit in (0, 4))
        for unit, ((forward, given, kept), output) in enumerate(zip(sizes, outputs, strict=True))
    ]
    least = Chain(chain, 0).least_bytes
    ways = [least_recomputation(chain, least, 60, persistent=persistent) for persistent in (True, False)]
    assert [round(way.bound_ns, 3) for way in ways] == [47, 43]
    assert least_recomputation(chain, least - 1, 60).bound_ns == float("inf")


def test_a_chain_of_unlike_units_is_searched_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With too few ways kept the plan still fits, in the least memory too, and is not called the quickest."""
    monkeypatch.setattr("autohete.planner.chain._MOST_WAYS", 2)
    profile = deep(10**9)
    blocks = [replace(block, activation_bytes=200 + 7 * unit**2) for unit, block in enumerate(profile.units)]
    least, found = least_bytes("rotor", replace(deep(1), units=tuple(blocks))), {}
    for budget in (least, least + 700, 10**9):
        asked = replace(deep(budget), units=tuple(blocks))
        plan = parse_policy("rotor").plan(asked, judge_for(asked))
        found[budget] = peak, _ = peak_and_time(lower(asked, plan))
        assert plan.bound_seconds is None
        assert peak <= budget
    assert found[least][0] == least
    assert found[10**9][1] == min(time for _, time in found.values())


def least_bytes(policy: str, profile: Profile) -> int:
    """What a plan takes that does not fit."""
    return peak_and_time(lower(profile, parse_policy(policy).plan(profile, judge_for(profile))))[0]


def deep(gpu_bytes: int, count: int = 12) -> Profile:
    """Blocks whose inputs take as much as what they keep beside, and no gradients to speak of."""
    profile = profile_with(gpu_bytes, 1)
    inner = replace(profile.units[1], input_bytes=100, activation_bytes=200, parameters=1)
    blocks = (profile.units[0], *[inner] * count, replace(profile.units[-1], input_bytes=100, activation_bytes=110))
    return replace(profile, workload=replace(profile.workload, transformer_blocks=count), units=blocks)


@pytest.mark.slow
@settings(max_examples=15)
@given(chains(2, 8), st.integers(0, 3), st.integers(0, 20))
def test_a_link_never_costs_time(profile: Profile, choice: int, less: int) -> None:
    """POFO fits wherever Rotor does and is never slower."""
    fixed = parse_policy(FIXED[choice]).plan(profile, judge_for(profile))
    asked = with_memory(profile, peak_and_time(lower(profile, fixed))[0] - less)
    judge = judge_for(asked)
    rotor, pofo = (judge(parse_policy(name).plan(asked, judge)) for name in ("rotor", "pofo"))
    assert pofo.verdict is Verdict.OK or rotor.verdict is not Verdict.OK
    assert pofo.seconds <= rotor.seconds or rotor.verdict is not Verdict.OK


@settings(max_examples=25)
@given(chains(1, 10), st.integers(0, 60))
def test_what_is_dropped_in_time_fits_and_is_never_best_by_chance(profile: Profile, percent: int) -> None:
    """Where DTR's iteration has stayed within the budget its plan does, too, and Rotor is at most as slow in that memory."""
    peaks = [
        peak_and_time(lower(profile, parse_policy(name).plan(profile, judge_for(profile))))[0]
        for name in ("resident:checkpointing=none", "resident:checkpointing=full")
    ]
    budget = min(peaks) + (peaks[0] - min(peaks)) * percent // 60
    asked = with_memory(profile, budget)
    judge = judge_for(asked)
    iteration = Iteration(asked, tensors=False)
    iteration.run()
    plan = parse_policy("dtr:tensors=off").plan(asked, judge)
    peak, time = peak_and_time(lower(asked, plan))
    assert peak <= budget or not iteration.fits
    best = with_memory(profile, peak)
    assert time >= peak_and_time(lower(best, parse_policy("rotor").plan(best, judge_for(best))))[1]


def test_what_the_link_moves_in_time_is_not_recomputed() -> None:
    """Two thirds of what twelve blocks keep fit: with a fast link nothing is recomputed and nothing waits."""
    profile = deep(10**9)
    peak, time = peak_and_time(lower(profile, parse_policy("resident:checkpointing=none").plan(profile, judge_for(profile))))
    blocks = sum(unit.activation_bytes for unit in profile.units[1:-1])
    for bandwidth, recomputes in ((1e12, False), (1e6, True)):
        link = replace(profile.hardware.h2d, bandwidth=bandwidth, duplex_bandwidth=bandwidth)
        hardware = replace(with_memory(profile, peak - blocks // 3).hardware, h2d=link, d2h=link)
        asked = replace(profile, hardware=hardware)
        judge = judge_for(asked)
        plan = parse_policy("pofo").plan(asked, judge)
        assert judge(plan).verdict is Verdict.OK
        assert any(unit.activations is not KEEP for unit in plan.units) == recomputes
        assert any(unit.kept.leaves for unit in plan.units) != recomputes
        assert (round(judge(plan).seconds * 1e9) > time) == recomputes


def test_the_tightest_memory_takes_segments_within_segments() -> None:
    """Units are recomputed several times where that alone fits, and the simulation says the same peak and time."""
    profile = deep(10**9)
    least = least_bytes("rotor", deep(1))
    assert least < least_bytes("rotor:nested=off", deep(1))
    assert simulate_plan(profile, parse_policy("sqrt_checkpoint").plan(profile, judge_for(profile))).gpu.peak_bytes > least
    tight = deep(least)
    found = simulate_plan(tight, parse_policy("rotor").plan(tight, judge_for(tight)))
    assert max(len(unit.forwards) for unit in found.plan.units) > 3
    assert found.verdict is Verdict.OK
    assert found.gpu.peak_bytes == least
    assert round(found.iteration_seconds * 1e9, 6) == peak_and_time(found.schedule)[1]


# --- plans --------------------------------------------------------------------------------------------------------


def test_segments_within_segments_as_text() -> None:
    """The passes of a plan are those that its forwards say, and the text of its schedule can be read back."""
    schedule = validate(
        lower(profile_with(10**9, 1), plan_of(((RECOMPUTE, RECOMPUTE, KEEP), (DROP, DROP, KEEP), (DROP, KEEP))))
    )
    assert " ".join(str(task.id) for task in schedule.tasks if task.id.kind is not Kind.GPU_UPDATE) == (
        "F0 F1 F2 F3 F4 L4 B4 R1 R2 R3 B3 R1a1 R2a1 B2 B1 B0"
    )
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([UnitPlan(DROP)], r"unit 1 drops its input, but unit 0, which would make it again, keeps its activations"),
        ([UnitPlan(KEEP), UnitPlan(DROP)], r"unit 2 drops its input, but unit 1"),
        ([UnitPlan(SELECTIVE), UnitPlan(DROP)], r"unit 1, which would make .* is not recomputed as a whole"),
        ([UnitPlan(RECOMPUTE, again=(RECOMPUTE,))], r"again specifies recompute: it has more entries than units above need"),
        (
            [UnitPlan(RECOMPUTE, again=(RECOMPUTE,)), UnitPlan(DROP, again=(DROP,))],
            r"unit 2 is recomputed right before its backward, which needs all, but again specifies drop",
        ),
        (
            [UnitPlan(RECOMPUTE), UnitPlan(DROP, again=(DROP,)), UnitPlan(DROP)],
            r"unit 2 drops its input, but unit 1, which would make it again",
        ),
    ],
)
def test_what_nothing_makes_again_is_refused(units: list[UnitPlan], message: str) -> None:
    """A plan whose recomputations do not add up names the unit and what to change."""
    with pytest.raises(InputError, match=message):
        Plan("by hand", (UnitPlan(), *units, UnitPlan()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"activations": KEEP, "again": (DROP,)}, "leave again out"),
        ({"activations": DROP, "again": (KEEP,)}, "leave keep out of again"),
        ({"activations": RECOMPUTE, "again": (DROP,)}, "let again drop none after it"),
        ({"activations": DROP, "again": ("drop",)}, "^again is 'drop': give Activations.KEEP"),
        ({"activations": DROP, "kept": Route(HOST_MEMORY)}, "leave kept out, or keep its input"),
        ({"activations": SELECTIVE, "again": (RECOMPUTE,)}, "all that its one recomputation needs: leave again out"),
        ({"activations": DROP, "again": (SELECTIVE,)}, "only a forward is selective"),
    ],
)
def test_what_a_unit_cannot_keep_is_refused(given: dict[str, object], message: str) -> None:
    """What a unit's forwards keep is checked before any plan."""
    with pytest.raises(InputError, match=message):
        UnitPlan(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("", [RECOMPUTE, DROP, RECOMPUTE, DROP, RECOMPUTE, DROP, DROP]),
        (":keep_last", [RECOMPUTE, DROP, RECOMPUTE, DROP, KEEP, KEEP, KEEP]),
        (":segments=1", [RECOMPUTE, *[DROP] * 6]),
        (":segments=99", [RECOMPUTE] * 7),
    ],
)
def test_segments_of_a_square_root(flags: str, kept: list[Activations]) -> None:
    """Seven blocks in three segments of two, of which the last has the rest; and in other numbers of them."""
    profile = profile_with(10**9, 1)
    workload: Workload = replace(profile.workload, transformer_blocks=7)
    blocks = (profile.units[0], *[profile.units[1]] * 7, profile.units[-1])
    profile = replace(profile, workload=workload, units=blocks)
    plan = parse_policy(f"sqrt_checkpoint{flags}").plan(profile, judge_for(profile))
    assert [unit.activations for unit in plan.units[1:-1]] == kept
