"""Waits for memory: they bring the worst case down to what a trace holds, and cost the trace nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, event, given
from hypothesis import strategies as st
from support.orders import Orders
from support.schedules import COPIED, drawn_schedule, redrawn

from autohete.analysis.memory_waits import least_bytes, with_memory_waits
from autohete.analysis.occupancy import occupancy
from autohete.analysis.worst_case import worst_case
from autohete.execution.trace import Trace, check_trace
from autohete.hardware import load_hardware
from autohete.lowering import lower
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.schedule import GPU_MEMORY, Discipline, Schedule, parse_schedule, validate
from autohete.sim import SimExecutor
from autohete.simulate import run_until_steady, safety, simulate_policy
from autohete.testing import strategies
from autohete.workload import Workload


def with_capacities(schedule: Schedule, capacities: dict[str, int]) -> Schedule:
    """The same with other capacities."""
    memories = tuple(replace(m, capacity_bytes=capacities.get(m.name, m.capacity_bytes)) for m in schedule.memories)
    return replace(schedule, memories=memories)


def with_room_for(trace: Trace) -> Trace:
    """The trace of a schedule whose memories are as large as it needs, and no larger."""
    peaks = {memory.name: occupancy(trace, memory.name).peak_bytes for memory in trace.schedule.memories}
    return replace(trace, schedule=with_capacities(trace.schedule, peaks))


def waits_added(schedule: Schedule, safe: Schedule) -> int:
    """How many waits ``safe`` has more, after checking that nothing else of it is different."""
    pairs = list(zip(schedule.tasks, safe.tasks, strict=True))
    tasks = tuple(after._replace(after=after.after[: len(before.after)]) for before, after in pairs)
    assert replace(safe, tasks=tasks) == schedule
    return sum(len(after.after) - len(before.after) for before, after in pairs)


def without_moments(schedule: Schedule) -> Schedule:
    """The same if its lanes are all fifo; else each task lasts at least a nanosecond.

    A wait for a task that starts and ends in the very moment in which a lane chooses by priority costs time: the lane takes
    what is ready.
    """
    if all(lane.discipline is Discipline.FIFO for lane in schedule.lanes):
        return schedule
    return replace(schedule, tasks=tuple(task._replace(duration_ns=max(1, task.duration_ns)) for task in schedule.tasks))


def overtakes(trace: Trace) -> bool:
    """Whether an iteration frees memory before the previous one has allocated all: no wait can keep this order."""
    frees = [i for i, task in enumerate(trace.schedule.tasks) if task.frees]
    allocates = [i for i, task in enumerate(trace.schedule.tasks) if task.allocates]
    first_freed, last_allocated = trace.end_ns[1:, frees].min(axis=1, initial=2**62), trace.start_ns[:-1, allocates].max(axis=1)
    return bool((first_freed <= last_allocated).any())


@pytest.mark.slow
@given(st.data())
def test_a_plan_that_fits_is_made_safe_for_nothing(data: st.DataObject) -> None:
    """Whatever a plan decides: in as much memory as its trace holds, added waits alone make it fit, and its period stays."""
    profile = data.draw(strategies.profiles())
    schedule = without_moments(lower(profile, data.draw(strategies.plans(profile))))
    trace, steady = run_until_steady(schedule, SimExecutor())
    assume(steady.settled)  # some drift for longer than is simulated: a chain of copies that is hardly slower than the rest
    tight = with_room_for(trace).schedule
    safe = with_memory_waits(tight, with_room_for(trace))
    assert safe is not None
    event("with waits" if waits_added(tight, safe) else "as it is")
    assert all(worst_case(validate(safe), memory.name).fits for memory in safe.memories)
    again, repeated = run_until_steady(safe, SimExecutor())
    assert check_trace(again) == []
    assert repeated.settled
    if overtakes(trace):
        event("overtakes")
    else:
        assert repeated.period_seconds == steady.period_seconds


@pytest.mark.slow
@given(st.data(), st.integers(0, 2**32))
def test_nothing_that_lasts_longer_or_shorter_exceeds_a_capacity(data: st.DataObject, seed: int) -> None:
    """A schedule that was made safe stays within its memories whatever its tasks last, and in whatever order they end."""
    trace = with_room_for(SimExecutor().run(drawn_schedule(data), 8))
    safe = with_memory_waits(trace.schedule, trace)
    assume(safe is not None)
    assert safe is not None
    waits_added(trace.schedule, safe)
    other = SimExecutor().run(redrawn(data, safe), 5)
    peaks = Orders(safe).peaks_of_one(seed, 4)
    for memory in safe.memories:
        assert max(occupancy(other, memory.name).peak_bytes, peaks[memory.name]) <= memory.capacity_bytes


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["resident:zero_stage=2", "autohete"])
def test_the_least_memory_of_several_gpus_is_no_more_than_any_trace_holds(policy: str) -> None:
    """A thrifty order reduces gradients at once, which leaves a part of them, though it takes the part before it frees them."""
    workload = Workload("gpt", 2048, 8, 4, 2000, 64, 1)
    profile = analytic_profile(workload, load_hardware("a100-40gb-epyc7713").shared_by(4))
    found = simulate_policy(profile, parse_policy(policy))
    assert least_bytes(found.schedule, GPU_MEMORY) <= occupancy(found.trace, GPU_MEMORY).peak_bytes


@pytest.mark.slow
@given(st.data())
def test_the_least_memory_is_enough(data: st.DataObject) -> None:
    """With the least that is named, waits make any plan fit, whatever trace they are looked for in.

    No trace holds less of the GPU's memory. Of the host's, the order that saves GPU memory may hold more than another.
    """
    profile = data.draw(strategies.profiles())
    schedule = lower(profile, data.draw(strategies.plans(profile)))
    least = {memory.name: least_bytes(schedule, memory.name) for memory in schedule.memories}
    trace, other = (SimExecutor().run(each, 4) for each in (schedule, redrawn(data, schedule)))
    assert least[GPU_MEMORY] <= occupancy(trace, GPU_MEMORY).peak_bytes
    tight = with_capacities(schedule, least)
    safe = with_memory_waits(tight, replace(other, schedule=tight))
    assert safe is not None
    waits_added(tight, safe)
    assert all(worst_case(validate(safe), memory.name).fits for memory in safe.memories)


#: The loss waits for the copy of the iteration before, the next forward for the loss: two buffers may be held at once.
TWO_AT_ONCE = """autohete-schedule 2
lane gpu fifo
lane d2h fifo
memory gpu 66
resident other:gpu:7
task F0 gpu 10 allocates=activations.0:gpu:30
task AO0 d2h 1 after=F0 frees=activations.0:gpu
task L0 gpu 5 after=AO0@-1
"""


def test_a_wait_by_hand() -> None:
    """Where two buffers do not fit, forward waits for the copy that is over by then in the trace."""
    schedule = validate(parse_schedule(TWO_AT_ONCE))
    assert worst_case(schedule, GPU_MEMORY).peak_bytes == 67
    safe = with_memory_waits(schedule, SimExecutor().run(schedule, 4))
    assert safe is not None
    assert waits_added(schedule, safe) == 1
    assert [str(edge) for edge in safe.tasks[0].after] == ["AO0@-1"]
    assert worst_case(safe, GPU_MEMORY).peak_bytes == 37


def test_a_schedule_that_cannot_be_made_safe_is_not() -> None:
    """A buffer larger than the memory has no wait that would help."""
    schedule = with_capacities(validate(parse_schedule(COPIED.format(""))), {GPU_MEMORY: 36})
    assert with_memory_waits(schedule, SimExecutor().run(schedule, 4)) is None


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["autohete", "autohete:priority=off", "zero_offload:paper,tile_overlap"])
def test_a_plan_of_real_size_needs_few_waits(policy: str) -> None:
    """At 50 blocks at most three waits a block make it fit under any timing, and cost nothing."""
    workload = Workload("known", 4096, 48, 32, batch_size=4)
    found = simulate_policy(analytic_profile(workload, load_hardware("a100-40gb-epyc7713")), parse_policy(policy))
    answer = safety(found)
    assert not answer.gpu.fits
    assert answer.cost == 0
    assert answer.safe is not None
    assert 0 < answer.safe.waits <= 3 * workload.unit_count
    assert answer.safe.gpu.fits
    assert worst_case(answer.safe.schedule, GPU_MEMORY).fits
