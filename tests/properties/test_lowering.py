"""What every plan's schedule promises about whose data whom reaches, and what every policy promises about its plan.

Only written edges count here, not the order of fifo lanes: an executor with wider lanes must train the same numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.paper import profile_with

import autohete
from autohete.analysis.worst_case import worst_case
from autohete.errors import InfeasibleError, InputError
from autohete.hardware import load_hardware
from autohete.lowering import _kept, lower
from autohete.plan import Activations, Footprint, Format, ParameterSlots, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Verdict
from autohete.plan.rules import GpuUpdatesAfterBackward, Rule, Slots, UpdatesAfterBackward, Window
from autohete.policies import POLICIES, NamedPolicy, parse_policy
from autohete.profile import Profile, analytic_profile
from autohete.schedule import HOST_MEMORY, Kind, validate
from autohete.simulate import judge_for, simulate_plan
from autohete.testing import strategies
from autohete.testing.checks import execution_faults, gradient_faults, parameter_faults, plan_faults
from autohete.workload import Workload


@st.composite
def planned(draw: st.DrawFn) -> tuple[Profile, Plan]:
    profile = draw(strategies.profiles(max_micro_batches=3))
    return profile, draw(strategies.plans(profile))


@st.composite
def planned_twice(draw: st.DrawFn) -> tuple[Profile, Profile, Plan]:
    """A plan for two profiles that differ in times, rates and capacities."""
    profile, plan = draw(planned())
    other, node = draw(strategies.hardware()), profile.hardware
    pinned = None if node.host.pinned_bytes is None else other.host.memory_bytes
    node = replace(other, host=replace(other.host, pinned_bytes=pinned), places=node.places)
    blocks = tuple(
        replace(block, forward_seconds=2 * block.forward_seconds, backward_seconds=3 * block.backward_seconds)
        for block in profile.units
    )
    return replace(profile, hardware=node, units=blocks), profile, plan


def small_profile() -> Profile:
    workload = Workload("small", hidden_size=64, transformer_blocks=4, heads=2, vocabulary_size=500, sequence_length=64)
    return analytic_profile(workload, load_hardware("rtx4090-workstation"))


def plan_of(inner: UnitPlan, *rules: Rule) -> Plan:
    """A plan of six units whose four inner ones are alike, all updated where ``inner`` is."""
    outer = UnitPlan(update=inner.update)
    return Plan("by hand", (outer, inner, inner, inner, inner, outer), rules, update_bytes=28)


@pytest.mark.slow
@given(planned())
def test_every_plan_becomes_a_valid_schedule(case: tuple[Profile, Plan]) -> None:
    """Every plan's schedule can be executed for ever."""
    profile, plan = case
    validate(lower(profile, plan))


@pytest.mark.slow
@given(planned_twice())
def test_one_lowering_serves_all_rates(case: tuple[Profile, Profile, Plan]) -> None:
    """A plan lowered for other hardware before is the same as one lowered afresh, and keeps every promise."""
    before, profile, plan = case
    afresh = lower(profile, plan)
    _kept.cache_clear()
    for _ in range(2):  # the second time it is kept
        lower(before, plan)
    schedule = lower(profile, plan)
    assert _kept.cache_info().hits
    assert str(schedule) == str(afresh)
    assert plan_faults(profile, plan) == []
    for memory in schedule.memories:  # what is known of one schedule of a plan is known of all
        assert worst_case(schedule, memory.name) == worst_case(afresh, memory.name)


@pytest.mark.slow
@given(planned())
def test_forward_sees_the_update_before(case: tuple[Profile, Plan]) -> None:
    """From every update a path of edges leads to the next forward of its block, through the copies that carry it."""
    profile, plan = case
    assert parameter_faults(profile, plan, lower(profile, plan)) == []


def test_backward_fetch_waits_for_the_write_back_of_the_update() -> None:
    """Parameters updated on the GPU that leave after forward are fetched from a host copy that has the update."""
    profile = small_profile()
    plan = plan_of(UnitPlan(parameters=Route(HOST_MEMORY, stays_after_backward=True)))
    assert parameter_faults(profile, plan, lower(profile, plan)) == []


@pytest.mark.slow
@given(planned())
def test_update_takes_finished_gradients(case: tuple[Profile, Plan]) -> None:
    """Gradients are copied after their backward and taken after their copy; delayed ones are not overwritten unread."""
    profile, plan = case
    assert gradient_faults(profile, plan, lower(profile, plan)) == []


@pytest.mark.parametrize("forgotten", [Kind.REFRESH, Kind.CPU_UPDATE, Kind.OFFLOAD_GRADIENTS])
def test_search_for_paths_notices(forgotten: Kind) -> None:
    """With the waits for one kind of task taken away, the two tests above have something to say."""
    profile, plan = small_profile(), plan_of(UnitPlan(update=Update(Processor.CPU)))
    schedule = lower(profile, plan)
    careless = replace(
        schedule,
        tasks=tuple(t._replace(after=tuple(e for e in t.after if e.task.kind is not forgotten)) for t in schedule.tasks),
    )
    assert not parameter_faults(profile, plan, schedule) + gradient_faults(profile, plan, schedule)
    assert parameter_faults(profile, plan, careless) + gradient_faults(profile, plan, careless)


def test_gradient_slots_do_not_contradict_updates_after_backward() -> None:
    """The GPU may wait for the copies of gradients while the updates wait for all of backward."""
    plan = plan_of(UnitPlan(update=Update(Processor.CPU)), UpdatesAfterBackward(), Slots(Kind.OFFLOAD_GRADIENTS, 1))
    assert plan_faults(small_profile(), plan) == []


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Window(0), "size is 0"),
        (lambda: Slots(Kind.OFFLOAD_GRADIENTS, 0), "count is 0"),
        (lambda: Slots(Kind.FORWARD, 1), "a forward moves nothing: give a copy"),
        (lambda: ParameterSlots(-1), "count is -1"),
        (lambda: Footprint(gpu_buffer_bytes=-1), "gpu_buffer_bytes is -1"),
        (lambda: Footprint(host_buffer_bytes=-1), "host_buffer_bytes is -1"),
        (lambda: Footprint(host_optimizer_bytes=-1), "host_optimizer_bytes is -1"),
        (lambda: Footprint(host_parameter_bytes=-1), "host_parameter_bytes is -1"),
        (lambda: Footprint(host_pinned_bytes=(4, -1)), "host_pinned_bytes is -1"),
        (lambda: Format(-1), "element_bytes is -1"),
        (lambda: replace(plan_of(UnitPlan()), update_bytes=-1.0), "update_bytes is -1.0"),
        (lambda: replace(plan_of(UnitPlan()), update_bytes=float("nan")), "update_bytes is nan"),
        (lambda: replace(plan_of(UnitPlan()), elementwise_bytes=float("inf")), "elementwise_bytes is inf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_absurd_number_in_a_plan_is_refused(make: Callable[[], object], named: str) -> None:
    """A plan with a size below zero, no places at all, or no number is a typed error that names the field."""
    with pytest.raises(InputError, match=named):
        make()


def calls_to_lower(transformer_blocks: int) -> int:
    """Calls of Python functions, steps of generators included, that lowering a window of StrongHold takes."""
    workload = Workload("deep", hidden_size=64, transformer_blocks=transformer_blocks, heads=2)
    profile = analytic_profile(workload, load_hardware("rtx4090-workstation"))
    plan = parse_policy("stronghold:window=4,checkpointing=full").plan(profile, judge_for(profile))
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        lower(profile, plan)
    finally:
        sys.setprofile(before)
    return calls


def test_lowering_grows_with_the_model() -> None:
    """Four times the blocks take about four times the steps, also where blocks share preallocated slots."""
    assert calls_to_lower(128) < 5 * calls_to_lower(32)


def test_plan_for_another_model_is_refused() -> None:
    """A plan with another number of blocks than the profile is a typed error with both numbers."""
    profile, plan = small_profile(), plan_of(UnitPlan())
    with pytest.raises(InputError, match="the plan has 5 units, the profile 6"):
        lower(profile, replace(plan, units=plan.units[1:]))


# --- policies -----------------------------------------------------------------------------------------------------

# Searching policies simulate dozens of plans per example.
fewer = settings(max_examples=25 if settings.get_current_profile_name() == "ci" else 200)


def planned_by(profile: Profile, policy: NamedPolicy) -> Plan | None:
    """The policy's plan, or None where nothing fits or the policy cannot clip; any other error fails the test."""
    try:
        return policy.plan(profile, judge_for(profile))
    except InfeasibleError:
        return None
    except InputError as error:
        if not (profile.workload.clips and "cannot clip gradients" in str(error)):
            raise
        return None


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(POLICIES))
@given(data=st.data())
@fewer
def test_every_policy_plans(name: str, data: st.DataObject) -> None:
    """Every policy ends on every input: with a plan of one entry per block that keeps every promise, or infeasible."""
    profile, policy = data.draw(strategies.profiles()), data.draw(strategies.policies(name))
    plan = planned_by(profile, policy)
    if plan is None:
        refuses = (
            "autohete",
            "joint",
            *strategies.NEED_DRIVES,
            "flashneuron",  # unless its place is the host
            *(["stronghold", "block_swap", "slideformer"] if profile.workload.clips else []),
        )
        assert name in refuses, "policies with fixed rules return their plan, if there are drives for it"
        return
    assert len(plan.units) == len(profile.units)
    assert plan.policy == policy.name
    assert (execution_faults if plan.is_pipeline else plan_faults)(profile, plan) == []
    if name in ("autohete", "joint"):
        assert simulate_plan(profile, plan).verdict is Verdict.OK, "what is searched for fits"


@pytest.mark.slow
@given(strategies.profiles(), strategies.policies())
@fewer
def test_same_input_same_plan(profile: Profile, policy: NamedPolicy) -> None:
    """Twice the same question gives the same plan and the same printed schedule."""
    first, second = planned_by(profile, policy), planned_by(profile, policy)
    assert first == second
    if first and second:
        assert str(lower(profile, first)) == str(lower(profile, second))


def test_clipping_keeps_gradients_until_the_last_backward() -> None:
    """Where the GPU updates each unit as soon as it can, clipping lets gradients pile up; the sums are by hand.

    Parameters and states take 64 and 128 bytes all the time. In backward of a block there are activations of the embedding and
    of the block, 40 and 36, an input of 4 for each block from there down, the gradients of two inputs, 4 each, and a workspace
    of 8.
    """
    inner = UnitPlan(Activations.RECOMPUTE)
    plan = Plan("by hand", (UnitPlan(), inner, inner, inner, UnitPlan()))
    always, passing = 64 + 128, 40 + 36 + 2 * 4 + 8
    unclipped, clipped = (simulate_plan(profile_with(10**12, 1, clip_norm=clip_norm), plan).gpu for clip_norm in (None, 1.0))
    assert (unclipped.peak_bytes, unclipped.task) == (always + passing + 3 * 4 + 16, "B3@0")  # the block's own gradients
    assert (clipped.peak_bytes, clipped.task) == (always + passing + 4 + 3 * 16 + 8, "B1@0")  # all but the embedding's


def test_rules_that_clipping_makes_idle_stay() -> None:
    """A rule that orders updates may be given with clipping, which orders them already."""
    plan = Plan("by hand", (UnitPlan(),) * 5, (GpuUpdatesAfterBackward(),))
    clipped = profile_with(10**12, 1, clip_norm=1.0)
    assert lower(clipped, plan) == lower(clipped, replace(plan, rules=()))


def test_norm_is_taken_where_gradients_are() -> None:
    """The GPU takes it before gradients leave, the CPU of what is accumulated on the host, or where the plan says so."""
    on_cpu = UnitPlan(update=Update(Processor.CPU), gradients=Route(HOST_MEMORY))
    for micro_batches, unit, lane in [
        (1, UnitPlan(), "gpu"),
        (1, on_cpu, "gpu"),
        (1, replace(on_cpu, update=Update(Processor.CPU, norm_on=Processor.CPU)), "cpu"),
        (2, on_cpu, "cpu"),
        (2, UnitPlan(update=Update(Processor.CPU)), "gpu"),
    ]:
        schedule = lower(profile_with(10**12, micro_batches, clip_norm=1.0), Plan("by hand", (unit,) * 5, update_bytes=28))
        assert {task.lane for task in schedule.tasks if task.id.kind is Kind.GRADIENT_NORM} == {lane}
    with pytest.raises(InputError, match="which are accumulated on the host"):
        unit = replace(on_cpu, update=Update(Processor.CPU, norm_on=Processor.GPU))
        lower(profile_with(10**12, 2, clip_norm=1.0), Plan("by hand", (unit,) * 5, update_bytes=28))


def test_sums_have_a_size_of_their_own() -> None:
    """Every micro-batch but the last copies sums of ``sum_bytes``; what is added has that size; the last copies gradients."""
    unit = UnitPlan(update=Update(Processor.CPU), gradients=Route(HOST_MEMORY, carried=Format(8)), sum_bytes=2)
    schedule = lower(profile_with(10**12, 3), Plan("by hand", (unit,) * 5, update_bytes=28))
    lasts = {(task.id.kind, task.id.micro_batch): task.duration_ns for task in schedule.tasks if task.id.unit == 1}
    assert [lasts[Kind.OFFLOAD_GRADIENTS, batch] for batch in range(3)] == [2, 2, 8]  # 4 parameters at 4 bytes a nanosecond
    assert [lasts[Kind.ACCUMULATE, batch] for batch in (1, 2)] == [6, 6]  # reads two of 8 bytes, writes one
    for sum_bytes, other in [
        (0, unit),
        (65, unit),
        (2, UnitPlan(update=Update(Processor.CPU))),
        (2, UnitPlan()),
    ]:
        with pytest.raises(InputError, match=f"sum_bytes is {sum_bytes}: give 1 to 64 bytes if the CPU accumulates gradients"):
            replace(other, sum_bytes=sum_bytes)


def with_memory(profile: Profile, gpu_bytes: int, host_bytes: int) -> Profile:
    """``profile`` with so much memory for tensors."""
    hardware = profile.hardware
    gpu = replace(hardware.gpu, memory_bytes=hardware.gpu.reserved_bytes + gpu_bytes)
    return replace(profile, hardware=replace(hardware, gpu=gpu, host=replace(hardware.host, memory_bytes=host_bytes)))


@given(strategies.profiles())
@fewer
def test_infeasible_says_what_is_missing(profile: Profile) -> None:
    """An infeasible answer names the memory that binds, what there is of it, and that more is needed."""
    with_little = with_memory(profile, 1, 1)
    with pytest.raises(InfeasibleError, match=r"no plan fits: .* memory for tensors is .*, short by") as caught:
        parse_policy("autohete").plan(with_little, judge_for(with_little))
    assert caught.value.constraint in ("gpu", "host")
    assert caught.value.needed_bytes > caught.value.capacity_bytes == 1


@given(strategies.policies())
@example(parse_policy("resident"))
def test_policy_is_its_name(policy: NamedPolicy) -> None:
    """A policy's name reads back as the policy."""
    assert parse_policy(policy.name) == policy


_PRINT_ALL = """
from autohete.hardware import load_hardware
from autohete.lowering import lower
from autohete.policies import POLICIES, parse_policy
from autohete.profile import analytic_profile
from autohete.simulate import judge_for
from autohete.workload import Workload
from dataclasses import replace

workload = Workload("small", 1024, 6, 8, sequence_length=512)
hardware = load_hardware("rtx4090-workstation")
hardware = replace(hardware, gpu=replace(hardware.gpu, memory_bytes=hardware.gpu.reserved_bytes + 28 * 10**8))
hardware = replace(hardware, places=tuple(replace(place, update_bandwidth=1e9) for place in hardware.places))
profile = analytic_profile(workload, hardware)
for name in sorted(POLICIES):
    policy = parse_policy(name)
    plan = policy.plan(profile, judge_for(profile))
    print(plan, lower(profile, plan))
"""


@pytest.mark.slow
def test_schedules_do_not_depend_on_the_hash_seed() -> None:
    """Plans and printed schedules of all policies are byte-identical in processes with different hash seeds."""
    printed = set()
    for seed in ("0", "1", "2"):
        environment = {**os.environ, "PYTHONPATH": str(Path(autohete.__file__).parents[1]), "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", _PRINT_ALL], env=environment, check=True, capture_output=True)
        printed.add(done.stdout)
    assert len(printed) == 1
    assert printed.pop().count(b"autohete-schedule 2") == len(POLICIES)
