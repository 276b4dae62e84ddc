"""Units that both sides update: the GPU the first elements, the CPU the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from support.paper import profile_with

from autohete.errors import InputError
from autohete.lowering import lower
from autohete.plan import Format, Plan, Processor, Route, UnitPlan, Update
from autohete.policies import parse_policy
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, Kind, Schedule, TaskId, Value, validate
from autohete.simulate import judge_for, simulate_policy
from autohete.testing import strategies
from autohete.testing.checks import plan_faults


@st.composite
def shared(draw: st.DrawFn) -> tuple[Profile, Plan]:
    """A profile and a plan in which some unit is updated on both sides."""
    some = strategies.profiles(max_micro_batches=2), strategies.profiles_of_several_gpus(max_micro_batches=2)
    profile = draw(st.one_of(*some))
    return profile, draw(strategies.with_shared_updates(profile, draw(strategies.plans(profile))))


def with_share(plan: Plan, share: float) -> Plan:
    """The same share of every unit that is updated on both sides."""
    return replace(
        plan, units=tuple(replace(u, update=replace(u.update, share=share)) if u.update.share else u for u in plan.units)
    )


def durations(schedule: Schedule, kind: Kind) -> dict[int, int]:
    """Of the tasks of a kind, by their units."""
    return {task.id.unit: task.duration_ns for task in schedule.tasks if task.id.kind is kind}


def on_gpu(schedule: Schedule) -> dict[int | None, int]:
    """Bytes of the optimizer states that rest on the GPU, by their units."""
    there = (b for b in schedule.resident if b.id.value is Value.OPTIMIZER_STATES and b.memory == GPU_MEMORY)
    return {b.id.unit: b.size_bytes for b in there}


@pytest.mark.slow
@given(shared())
def test_every_promise_is_kept(given: tuple[Profile, Plan]) -> None:
    """Both sides' updates take finished gradients and are seen by the next forward, and memory balances."""
    profile, plan = given
    schedule = lower(profile, plan)
    both = durations(schedule, Kind.GPU_UPDATE).keys() & durations(schedule, Kind.CPU_UPDATE).keys()
    event("on both sides" if both else "too small to share")
    assert plan_faults(profile, plan) == []


@pytest.mark.slow
@given(shared())
def test_a_share_of_nothing_is_no_share(given: tuple[Profile, Plan]) -> None:
    """Where the share is less than an element, the schedule is that of an update on the CPU, to the letter."""
    profile, plan = given
    plan = strategies.without_contradictions(profile, with_share(plan, 1e-12))
    assert str(lower(profile, plan)) == str(lower(profile, with_share(plan, 0.0)))


@pytest.mark.slow
@given(shared())
def test_both_sides_do_the_work_of_one(given: tuple[Profile, Plan]) -> None:
    """States, gradients and the time of updates are divided between the sides, and nothing of them is lost."""
    profile, plan = given
    plan = replace(plan, rules=())
    halves, alone = lower(profile, plan), lower(profile, with_share(plan, 0.0))
    gpu = replace(plan, units=tuple(_on_gpu(unit) if unit.update.share else unit for unit in plan.units))
    resident = lower(profile, gpu)
    for unit, one in enumerate(plan.units):
        if not one.update.share or not profile.state_bytes(unit):  # where the cut is shows in the states
            continue
        parts = [durations(halves, kind).get(unit, 0) for kind in (Kind.GPU_UPDATE, Kind.CPU_UPDATE)]
        wholes = durations(resident, Kind.GPU_UPDATE)[unit], durations(alone, Kind.CPU_UPDATE)[unit]
        share = on_gpu(halves).get(unit, 0) / max(on_gpu(resident)[unit], 1)
        assert parts[0] == pytest.approx(share * wholes[0], abs=1, rel=1e-6)
        assert parts[1] == pytest.approx((1 - share) * wholes[1], abs=1, rel=1e-6)
        assert abs(share - one.update.share) * on_gpu(resident)[unit] <= profile.optimizer_bytes  # at most an element


def _on_gpu(unit: UnitPlan) -> UnitPlan:
    return replace(unit, update=Update(Processor.GPU), gradients=Route(), sum_bytes=None, sums_pinned=False)


@given(st.integers(0, 100), st.integers(1, 20))
def test_sub_groups_are_divided_as_by_deepspeed(ratio: int, sub_group_size: int) -> None:
    """The GPU has the first ``int((1 - ratio) * n)`` sub-groups, to the element."""
    profile = profile_with(10**12, 1)
    policy = parse_policy(f"twin_flow:checkpointing=none,ratio={ratio},sub_group_size={sub_group_size}")
    schedule = lower(profile, policy.plan(profile, judge_for(profile)))
    groups = -(-16 // sub_group_size)
    elements = min((100 - ratio) * groups // 100 * sub_group_size, 16)
    assert sum(on_gpu(schedule).values()) == elements * profile.optimizer_bytes
    sent = [task for task in schedule.tasks if task.id.kind is Kind.OFFLOAD_GRADIENTS]
    assert sum(task.duration_ns for task in sent) == 3 * (16 - elements)  # there, back, and there


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("pin_memory", ["on", "off"])
def test_every_split_has_its_rules(gpus: int, micro_batches: int, pin_memory: str) -> None:
    """Wherever a unit is cut, each rule of Twin-Flow changes something."""
    profile = profile_with(10**12, micro_batches, gpus)
    for ratio in range(0, 101, 5):
        flags = f"checkpointing=none,pin_memory={pin_memory},sub_group_size=1,ratio={ratio}"
        lower(profile, parse_policy(f"twin_flow:{flags}").plan(profile, judge_for(profile)))


def test_sub_groups_fill_the_gpu() -> None:
    """Without a ratio the GPU updates as many sub-groups as its memory has room for; smaller ones fill it better."""
    plenty = simulate_policy(profile_with(10**12, 1), parse_policy("twin_flow:checkpointing=none,ratio=0")).gpu.peak_bytes
    found = []
    for size in (4, 2, 1):
        profile = profile_with(plenty - 24, 1)
        simulation = simulate_policy(profile, parse_policy(f"twin_flow:checkpointing=none,sub_group_size={size}"))
        assert simulation.gpu.fits
        found.append(sum(on_gpu(simulation.schedule).values()))
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_the_gradient_stays_until_both_have_taken_it() -> None:
    """Not the copy frees the gradient, but the update on the GPU, which waits for the copy."""
    profile = profile_with(10**12, 1)
    units = [UnitPlan(update=Update(Processor.CPU, 0.5)) if unit == 2 else UnitPlan() for unit in range(5)]
    tasks = {task.id: task for task in lower(profile, Plan("by hand", tuple(units))).tasks}
    copy, update = tasks[TaskId(Kind.OFFLOAD_GRADIENTS, 2)], tasks[TaskId(Kind.GPU_UPDATE, 2)]
    assert not copy.frees
    assert [str(free) for free in update.frees] == ["gradients.2:gpu"]
    assert copy.id in [edge.task for edge in update.after]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": Route(HOST_MEMORY)}, "let parameters stay there"),
        ({"gradients_replace_parameters": True}, "give gradients memory of their own"),
        ({"states": Route("nvme")}, "leave states out"),
    ],
)
def test_what_cannot_be_shared_is_refused(change: dict[str, object], message: str) -> None:
    """A unit whose parameters, gradients or states are elsewhere is updated on one side."""
    with pytest.raises(InputError, match=message):
        replace(UnitPlan(update=Update(Processor.CPU, 0.5), gradients=Route(carried=Format(4))), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("on", "share", "norm_on", "message"),
    [
        (Processor.CPU, 1.0, None, "is 1.0: give 0 or more and less than 1"),
        (Processor.CPU, -0.1, None, "is -0.1: give 0 or more"),
        (Processor.GPU, 0.5, None, "but the GPU updates all"),
        (Processor.CPU, 0.5, Processor.CPU, "the host has no norm"),
    ],
)
def test_an_impossible_share_is_refused(on: Processor, share: float, norm_on: Processor | None, message: str) -> None:
    """The GPU updates less than all, and takes the norm of its part."""
    with pytest.raises(InputError, match=message):
        Update(on, share, norm_on)


def test_sums_on_the_host_are_not_shared() -> None:
    """With several micro-batches the gradients of a unit that both sides update are added up on the GPU."""
    unit = UnitPlan(update=Update(Processor.CPU, 0.5), gradients=Route(HOST_MEMORY))
    with pytest.raises(InputError, match="gradients of unit 0 are accumulated on the host, but the GPU updates a part"):
        lower(profile_with(10**12, 2), Plan("by hand", (unit,) * 5))
    validate(lower(profile_with(10**12, 2), Plan("by hand", (replace(unit, gradients=Route()),) * 5)))


def test_gradients_of_this_step_are_not_delayed() -> None:
    """The GPU has no gradients of the step before."""
    with pytest.raises(InputError, match="leave delayed or the share out"):
        Plan("by hand", (UnitPlan(update=Update(Processor.CPU, 0.5)),) * 5, delayed=True)
