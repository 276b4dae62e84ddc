"""Occupancy: a pure function of a trace that loses and invents no byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autohete.analysis.occupancy import Occupancy, contents, occupancy, unavoidable_bytes
from autohete.errors import ScheduleError
from autohete.execution.trace import Nanoseconds, Trace
from autohete.lowering import lower
from autohete.schedule import (
    GPU_MEMORY,
    Buffer,
    BufferId,
    Discipline,
    Edge,
    Free,
    Kind,
    Lane,
    Memory,
    Schedule,
    Task,
    TaskId,
    Value,
    parse_buffer_id,
)
from autohete.schedule.order import topological
from autohete.sim import SimExecutor
from autohete.testing import strategies


@st.composite
def traces(draw: st.DrawFn, iterations: int = 6) -> Trace:
    """Executions of schedules made by hand and of plans."""
    if draw(st.booleans()):
        schedule = draw(strategies.schedules(sharing=draw(st.booleans())))
    else:
        profile = draw(strategies.profiles())
        schedule = lower(profile, draw(strategies.plans(profile)))
    return SimExecutor().run(schedule, iterations)


def at(found: Occupancy, instant: int) -> int:
    """Bytes used from ``instant`` on."""
    return int(found.bytes_used[np.searchsorted(found.times_ns, instant, side="right") - 1])


def places(schedule: Schedule, buffer: Buffer) -> list[str]:
    """The memories that ``buffer`` occupies: where it is, and that of which this is a part."""
    here = next(memory for memory in schedule.memories if memory.name == buffer.memory)
    return [here.name] if here.part_of is None else [here.name, here.part_of]


def counted(trace: Trace, memory: str, instant: int) -> int:
    """Bytes used from ``instant`` on, counted buffer by buffer in the slowest and plainest way."""
    used = sum(buffer.size_bytes for buffer in trace.schedule.resident if memory in places(trace.schedule, buffer))
    tasks = trace.schedule.tasks
    ends = {free.id: (i, free.back) for i, task in enumerate(tasks) for free in task.frees}
    for i, task in enumerate(tasks):
        for buffer in task.allocates:
            if memory not in places(trace.schedule, buffer):
                continue
            freeing, back = ends[buffer.id]
            for iteration in range(-back, trace.iterations):
                born = iteration < 0 or trace.start_ns[iteration, i] <= instant
                gone = iteration + back < trace.iterations and trace.end_ns[iteration + back, freeing] <= instant
                used += buffer.size_bytes * (born and not gone)
    return used


@pytest.mark.slow
@given(traces())
def test_occupancy_is_never_negative(trace: Trace) -> None:
    """No instant has less than the resident bytes in use, and instants are in order."""
    for memory in trace.schedule.memories:
        found = occupancy(trace, memory.name)
        resident = sum(buffer.size_bytes for buffer in trace.schedule.resident if memory.name in places(trace.schedule, buffer))
        assert found.bytes_used.min() >= resident >= 0
        assert found.times_ns[0] >= 0
        assert (np.diff(found.times_ns) > 0).all()


@pytest.mark.slow
@given(traces(), st.data())
def test_occupancy_counts_every_buffer(trace: Trace, data: st.DataObject) -> None:
    """At any instant the bytes in use are those of the buffers born and not yet gone."""
    memory = data.draw(st.sampled_from(trace.schedule.memories)).name
    found = occupancy(trace, memory)
    for instant in data.draw(st.lists(st.sampled_from(found.times_ns.tolist()), min_size=1, max_size=5)):
        for moment in (instant, instant + 1):
            assert at(found, moment) == counted(trace, memory, moment)


@pytest.mark.slow
@given(traces(), st.data())
def test_traces_of_one_order_have_one_peak(trace: Trace, data: st.DataObject) -> None:
    """However long tasks last: where starts and ends come in the same order, the peaks are equal to the byte."""
    instants = np.unique(np.concatenate([trace.start_ns.ravel(), trace.end_ns.ravel()]))
    gaps = data.draw(st.lists(st.integers(1, 10**6), min_size=len(instants), max_size=len(instants)))
    moved = np.cumsum(gaps)

    def later(times: Nanoseconds) -> Nanoseconds:
        return np.asarray(moved[np.searchsorted(instants, times)], np.int64)

    other = replace(trace, start_ns=later(trace.start_ns), end_ns=later(trace.end_ns))
    for memory in trace.schedule.memories:
        assert occupancy(other, memory.name).peak_bytes == occupancy(trace, memory.name).peak_bytes


@pytest.mark.slow
@given(traces())
def test_no_execution_avoids_what_is_unavoidable(trace: Trace) -> None:
    """Whatever the timing, the peak is at least that; where all tasks are on one fifo lane, it is that."""
    for memory in trace.schedule.memories:
        least, peak = unavoidable_bytes(trace.schedule, memory.name), occupancy(trace, memory.name).peak_bytes
        assert least <= peak
        busy = [lane for lane in trace.schedule.lanes if trace.lane_tasks(lane.name)]
        if len(busy) == 1 and busy[0].discipline is Discipline.FIFO:
            assert least == peak


@pytest.mark.slow
@given(traces())
def test_memory_balances(trace: Trace) -> None:
    """What is in use after the run is what was there before it: resident buffers, and those that cross iterations."""
    for memory in trace.schedule.memories:
        found = occupancy(trace, memory.name)
        crossing = {free.id for task in trace.schedule.tasks for free in task.frees if free.back}
        held = [b for t in trace.schedule.tasks for b in t.allocates if b.id in crossing] + list(trace.schedule.resident)
        assert found.bytes_used[-1] == sum(
            buffer.size_bytes for buffer in held if memory.name in places(trace.schedule, buffer)
        )


@pytest.mark.slow
@given(traces())
def test_holders_explain_the_peak(trace: Trace) -> None:
    """The peak is the most that is ever in use, its holders add up to it, largest first, and the capacity decides."""
    for memory in trace.schedule.memories:
        found = occupancy(trace, memory.name)
        assert sum(found.holders.values()) == found.peak_bytes >= found.bytes_used.max()
        assert list(found.holders.values()) == sorted(found.holders.values(), reverse=True)
        assert found.fits == (found.peak_bytes <= memory.capacity_bytes)


@pytest.mark.slow
@given(traces(iterations=24))
def test_occupancy_is_periodic_in_the_steady_state(trace: Trace) -> None:
    """In the steady window the bytes in use repeat those of the cycle before."""
    steady = trace.steady()
    anchors = trace.anchors()
    first, middle, last = (int(anchors[i]) for i in (steady.first - steady.cycle, steady.first, steady.first + steady.cycle))
    period = last - middle
    # Exactly, so only where the whole later half repeats to the tick.
    half = trace.iterations // 2
    offsets = np.concatenate([trace.start_ns, trace.end_ns], axis=1)
    shifts = offsets[half + steady.cycle :] - offsets[half : -steady.cycle]
    assume(steady.settled and period > 0 and middle - first == period and (shifts == period).all())
    for memory in trace.schedule.memories:
        found = occupancy(trace, memory.name)
        # Instants of lanes that lag behind by more than the later half cannot matter in its last quarter.
        late = found.times_ns[(found.times_ns >= middle) & (found.times_ns < last)]
        assume(int(trace.end_ns[half].max()) < first)
        for instant in late.tolist():
            assert at(found, instant) == at(found, instant - period)


def by_hand() -> Trace:
    """Forward 0..2 allocates activations of 5 and frees a workspace of 3; backward 2..5 frees the activations."""
    forward, backward = TaskId(Kind.FORWARD, 1), TaskId(Kind.BACKWARD, 1)
    activations, workspace = parse_buffer_id("activations.1:gpu"), parse_buffer_id("workspace_F.1:gpu")
    schedule = Schedule(
        lanes=(Lane("gpu"),),
        tasks=(
            Task(
                forward,
                "gpu",
                2,
                allocates=(Buffer(activations, 5), Buffer(workspace, 3)),
                frees=(Free(workspace),),
            ),
            Task(backward, "gpu", 3, (Edge(forward),), frees=(Free(activations),)),
        ),
        memories=(Memory(GPU_MEMORY, 17), Memory("host", 1)),
        resident=tuple(Buffer(BufferId(Value.PARAMETERS, GPU_MEMORY, unit), size) for unit, size in enumerate([4, 6])),
    )
    return SimExecutor().run(schedule, 2)


def test_occupancy_by_hand() -> None:
    """The example in the docstring above, byte for byte: the peak is at the first forward, a byte over the capacity."""
    found = occupancy(by_hand(), GPU_MEMORY)
    assert found.times_ns.tolist() == [0, 2, 5, 7, 10]
    assert found.bytes_used.tolist() == [18, 15, 18, 15, 10]
    assert (found.peak_bytes, found.peak_ns, found.task, found.fits) == (18, 0, "F1@0", False)
    assert found.holders == {"parameters": 10, "activations": 5, "workspace_F": 3}


def test_memory_that_nobody_uses() -> None:
    """A memory without buffers is empty from beginning to end."""
    found = occupancy(by_hand(), "host")
    assert (found.bytes_used.tolist(), found.peak_bytes, found.holders, found.fits) == ([0], 0, {}, True)


@pytest.mark.parametrize(
    ("text", "group"),
    [("activations.3:gpu", "activations"), ("workspace_F.0m2:gpu", "workspace_F"), ("policy_buffers:host", "policy_buffers")],
)
def test_the_group_of_a_buffer(text: str, group: str) -> None:
    """What units have in common; the text reads back."""
    found = parse_buffer_id(text)
    assert found.group == group
    assert str(found) == text


def test_a_cycle_of_waits_is_refused_in_finite_time() -> None:
    """A schedule that nobody has validated may have one."""
    with pytest.raises(ScheduleError, match="wait for each other in a cycle"):
        topological(3, [(0, 1, 0), (1, 2, 0), (2, 1, 0)])
    assert topological(3, [(2, 0, 0), (0, 1, 0), (1, 2, 1)]) == [2, 0, 1]


@pytest.mark.slow
@given(traces())
def test_contents_add_up_to_the_occupancy(trace: Trace) -> None:
    """What fills a memory, group by group, is its occupancy at every instant, and at the peak what holds it."""
    for memory in trace.schedule.memories:
        whole = occupancy(trace, memory.name)
        times, groups = contents(trace, memory.name)
        total = np.sum([*groups.values(), np.zeros(len(times), np.int64)], axis=0)
        assert [at(whole, int(time)) for time in times] == total.tolist()
        assert set(whole.times_ns.tolist()) <= set(times.tolist())
        assert set(whole.holders) <= set(groups)
