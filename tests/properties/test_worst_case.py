"""The worst case of a memory: exact over all orders that a schedule allows, and never passed whatever the tasks last."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.orders import Orders
from support.schedules import COPIED, drawn_schedule, redrawn

from autohete.analysis.occupancy import occupancy
from autohete.analysis.worst_case import worst_case
from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.lowering import lower
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.schedule import GPU_MEMORY, Buffer, Schedule, Value, parse_schedule, validate
from autohete.sim import SimExecutor
from autohete.simulate import judge_for
from autohete.testing import strategies
from autohete.workload import named_workload


@pytest.mark.slow
@settings(max_examples=150)
@given(strategies.schedules(max_tasks=4))
def test_the_worst_case_is_that_of_all_orders(schedule: Schedule) -> None:
    """On small schedules the bound is the most of all states, tried one by one; without one, more iterations hold more."""
    orders = Orders(schedule)
    for memory in schedule.memories:
        found, few = worst_case(schedule, memory.name), orders.peak_of_all(memory.name, 3)
        if found.peak_bytes is None:
            event("no limit")
            assert orders.peak_of_all(memory.name, 5) > few
            assert not found.fits
        else:
            assert found.peak_bytes == orders.peak_of_all(memory.name, 4) == max(few, found.peak_bytes)
            assert sum(found.holders.values()) == found.peak_bytes


@pytest.mark.slow
@given(st.data())
def test_no_durations_pass_the_worst_case(data: st.DataObject) -> None:
    """Whatever plan, policy and durations: no simulated moment holds more than the bound, which does not depend on them."""
    schedule = drawn_schedule(data)
    other = redrawn(data, schedule)
    trace = SimExecutor().run(other, 5)
    for memory in schedule.memories:
        found = worst_case(schedule, memory.name)
        assert worst_case(other, memory.name) == found
        assert found.peak_bytes is None or occupancy(trace, memory.name).peak_bytes <= found.peak_bytes


@pytest.mark.slow
@given(st.data(), st.integers(0, 2**32))
def test_no_delays_pass_the_worst_case(data: st.DataObject, seed: int) -> None:
    """Nor does any order in which some tasks start, and some end, only when nothing else can."""
    schedule = drawn_schedule(data)
    for memory, peak in Orders(schedule).peaks_of_one(seed, 4).items():
        found = worst_case(schedule, memory).peak_bytes
        assert found is None or peak <= found


@pytest.mark.slow
@given(st.data())
def test_every_plan_has_a_worst_case(data: st.DataObject) -> None:
    """Whatever a plan decides, each task that frees memory is waited for, sooner or later, by the one that allocates it."""
    profile = data.draw(strategies.profiles())
    schedule = lower(profile, data.draw(strategies.plans(profile)))
    assert all(worst_case(schedule, memory.name).peak_bytes is not None for memory in schedule.memories)


def test_the_worst_case_by_hand() -> None:
    """A forward that waits for the copy of the iteration before holds one buffer; one that does not, any number."""
    waiting, free = (validate(parse_schedule(COPIED.format(after))) for after in ("after=AO0@-1 ", ""))
    found = worst_case(waiting, GPU_MEMORY)
    assert (found.peak_bytes, found.capacity_bytes, found.task, found.fits) == (37, 100, "F0", True)
    assert found.holders == {"activations": 30, "other": 7}
    lagging = worst_case(free, GPU_MEMORY)
    assert (lagging.peak_bytes, lagging.task, lagging.fits) == (None, "AO0", False)
    assert not worst_case(replace(waiting, memories=(replace(waiting.memories[0], capacity_bytes=36),)), GPU_MEMORY).fits
    with pytest.raises(InputError, match="unknown memory 'disk'"):
        worst_case(waiting, "disk")


def test_a_copy_that_is_late_counts() -> None:
    """Where gradients leave beside backward, the simulation holds few of them at a time, and the worst case all of them."""
    profile = analytic_profile(named_workload("gpt-10b"), load_hardware("a100-40gb-epyc7713"))
    policy = parse_policy("zero_offload:paper,tile_overlap,checkpointing=full")
    schedule = lower(profile, policy.plan(profile, judge_for(profile)))
    simulated, bound = occupancy(SimExecutor().run(schedule, 3), GPU_MEMORY), worst_case(schedule, GPU_MEMORY)
    assert bound.peak_bytes is not None
    assert bound.peak_bytes > 1.2 * simulated.peak_bytes
    gradients = sum(b.size_bytes for task in schedule.tasks for b in task.allocates if b.id.value is Value.GRADIENTS)
    assert bound.holders["gradients"] == gradients


@pytest.mark.slow
@given(strategies.schedules(), st.integers(2**44, 2**60), st.integers(0, 2**32))
def test_sizes_beyond_floating_point_are_bounded(schedule: Schedule, scale: int, seed: int) -> None:
    """The bound of absurd sizes is above all that happens, and hardly above that of the same sizes on a small scale."""

    def scaled(buffer: Buffer) -> Buffer:
        return buffer._replace(size_bytes=buffer.size_bytes * scale)

    tasks = tuple(task._replace(allocates=tuple(map(scaled, task.allocates))) for task in schedule.tasks)
    large = replace(schedule, tasks=tasks, resident=tuple(map(scaled, schedule.resident)))
    peaks = Orders(large).peaks_of_one(seed, 3)
    for memory in schedule.memories:
        small, found = worst_case(schedule, memory.name).peak_bytes, worst_case(large, memory.name).peak_bytes
        if small is not None:
            assert found is not None
            assert small * scale <= found <= small * scale * (1 + 1e-9)
            assert peaks[memory.name] <= found
