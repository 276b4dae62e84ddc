"""Pinned memory with a limit of its own: a part of the host's, counted in both, and named where it binds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from support.paper import profile_with

from autohete.errors import InfeasibleError
from autohete.lowering import lower
from autohete.plan import Plan
from autohete.plan.policy import Verdict
from autohete.policies import parse_policy
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, PINNED_MEMORY, Buffer, BufferId, Free, Schedule, Task
from autohete.simulate import judge_for, simulate_plan, simulate_policy, simulate_safely
from autohete.testing import strategies

PLENTY = 10**15


def limited(profile: Profile, pinned_bytes: int | None) -> Profile:
    """The profile with a limit of pinned memory, or without."""
    host = replace(profile.hardware.host, memory_bytes=PLENTY, pinned_bytes=pinned_bytes)
    return replace(profile, hardware=replace(profile.hardware, host=host))


@st.composite
def planned(draw: st.DrawFn) -> tuple[Profile, Plan]:
    """A profile of one GPU or several, and any plan."""
    some = strategies.profiles(max_micro_batches=2), strategies.profiles_of_several_gpus(max_micro_batches=2)
    profile = limited(draw(st.one_of(*some)), None)
    return profile, draw(strategies.plans(profile))


def unlimited(schedule: Schedule) -> Schedule:
    """What is pinned is in the host's memory, and of one value there is one resident buffer."""

    def task(one: Task) -> Task:
        allocates = tuple(Buffer(b.id._replace(memory=memory(b.memory)), b.size_bytes) for b in one.allocates)
        frees = tuple(Free(free.id._replace(memory=memory(free.id.memory)), free.back) for free in one.frees)
        return one._replace(allocates=allocates, frees=frees)

    def memory(name: str) -> str:
        return HOST_MEMORY if name == PINNED_MEMORY else name

    resident: dict[BufferId, int] = {}
    for buffer in schedule.resident:
        there = buffer.id._replace(memory=memory(buffer.memory))
        resident[there] = resident.get(there, 0) + buffer.size_bytes
    return replace(
        schedule,
        tasks=tuple(map(task, schedule.tasks)),
        memories=tuple(one for one in schedule.memories if one.name != PINNED_MEMORY),
        resident=tuple(Buffer(there, size) for there, size in resident.items()),
    )


@pytest.mark.slow
@given(planned())
def test_a_limit_changes_only_where_buffers_are(given: tuple[Profile, Plan]) -> None:
    """A schedule with a limit is the one without, but for where buffers are: no time and no byte depend on it."""
    profile, plan = given
    with_limit, without = lower(limited(profile, 1000), plan), lower(profile, plan)
    event("pins" if with_limit.resident != without.resident else "pins nothing at rest")
    assert str(unlimited(with_limit)) == str(without)


@pytest.mark.slow
@given(planned())
def test_the_pinned_peak_is_a_part_of_the_hosts(given: tuple[Profile, Plan]) -> None:
    """Pinned memory never holds more than the host's, which holds as much with a limit as without."""
    profile, plan = given
    found = simulate_plan(limited(profile, PLENTY), plan)
    assert found.pinned is not None
    assert found.pinned.peak_bytes <= found.host.peak_bytes == simulate_plan(profile, plan).host.peak_bytes


@pytest.mark.slow
@given(planned(), st.integers(-2, 2))
def test_what_fits_fits_with_more(given: tuple[Profile, Plan], more: int) -> None:
    """The peak is the least limit with which a plan fits; below it the verdict names pinned memory, unless another is short."""
    profile, plan = given
    profile = limited(profile, PLENTY)
    plenty = simulate_plan(profile, plan)
    assert plenty.pinned is not None
    size = max(plenty.pinned.peak_bytes + more, 0)
    found = simulate_plan(limited(profile, size), plan)
    short = size < plenty.pinned.peak_bytes and plenty.verdict is Verdict.OK
    assert found.verdict is (Verdict.PINNED_OUT_OF_MEMORY if short else plenty.verdict)


@pytest.mark.parametrize("policy", ["offload_activations", "streamed_states:checkpointing=none", "zero_offload", "autohete"])
def test_the_smallest_limit_is_named(policy: str) -> None:
    """Where pinned memory is short, the error names it, and with the bytes that it names the same call succeeds."""
    gpu_bytes = 300 if policy == "autohete" else 10**12
    with pytest.raises(InfeasibleError) as caught:
        simulate_safely(profile_with(gpu_bytes, 1, pinned_bytes=0), parse_policy(policy))
    assert caught.value.constraint == PINNED_MEMORY
    needed = caught.value.needed_bytes
    found = simulate_safely(profile_with(gpu_bytes, 1, pinned_bytes=needed), parse_policy(policy))
    assert found.verdict is Verdict.OK
    assert found.pinned is not None
    assert found.pinned.peak_bytes <= needed
    with pytest.raises(InfeasibleError):
        simulate_safely(profile_with(gpu_bytes, 1, pinned_bytes=needed - 1), parse_policy(policy))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["autohete", "joint"])
def test_planners_keep_to_the_limit(policy: str) -> None:
    """A planner finds a plan within any limit with which it has one, and none is faster for a lower limit."""
    slowest = 0.0
    for pinned_bytes in (200, 80, 79, 48, 40, 16):
        found = simulate_policy(profile_with(300, 1, pinned_bytes=pinned_bytes), parse_policy(policy))
        assert found.verdict is Verdict.OK
        assert found.pinned is not None
        assert found.pinned.peak_bytes <= pinned_bytes
        assert found.iteration_seconds >= slowest * (1 - 1e-9)
        slowest = found.iteration_seconds


@pytest.mark.slow
@given(strategies.synthetic_profiles(), st.integers(0, 10**9))
def test_the_program_counts_what_is_pinned(profile: Profile, pinned_bytes: int) -> None:
    """What the planner of AutoHete counts as pinned is what schedules pin: no plan that it finds is over the limit."""
    system, profile = parse_policy("autohete"), limited(profile, pinned_bytes)
    try:
        found = judge_for(profile).simulation(system.plan(profile, judge_for(profile)))
    except InfeasibleError:
        event("nothing fits")
        return
    assert found.pinned is not None
    assert found.pinned.peak_bytes <= pinned_bytes
