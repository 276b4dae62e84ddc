"""Bounds of the period, busy shares, overlap and the causes of idleness."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.plans import with_drives

from autohete.analysis.bounds import period_bounds
from autohete.analysis.usage import Cause, binding_waits, usage
from autohete.policies import POLICIES, parse_policy
from autohete.schedule import Kind, Schedule, TaskId, graph_of, parse_schedule, validate
from autohete.sim import SimExecutor
from autohete.simulate import Simulation, run_until_steady, simulate
from autohete.simulate.summary import summarize
from autohete.testing.strategies import schedules
from autohete.workload import named_workload

HEADER = "autohete-schedule 2\nlane gpu fifo\nlane h2d fifo\nlane d2h fifo\nlane cpu priority\n"


def schedule(text: str) -> Schedule:
    """A hand-made schedule on the usual lanes."""
    return validate(parse_schedule(HEADER + text))


def example(policy: str, workload: str = "gpt-4b") -> Simulation:
    """A policy on the node of the figure."""
    return simulate(named_workload(workload), with_drives("a100-40gb-epyc7713"), parse_policy(policy))


def test_the_busiest_lane_bounds_a_loose_schedule() -> None:
    """Lanes that do not wait for one another take as long as the busiest of them."""
    bounds = period_bounds(schedule("task F0 gpu 70\ntask U0 cpu 100\n"))
    assert (bounds.lane, round(bounds.seconds * 1e9)) == ("cpu", 100)
    assert bounds.binds == "the work of lane cpu"


def test_a_cycle_of_waits_bounds_a_tight_schedule() -> None:
    """Tasks that wait for one another in a ring take as long as the ring."""
    ring = schedule("task F0 gpu 30 after=H0@-1\ntask G0 d2h 20 after=F0\ntask U0 cpu 100 after=G0\ntask H0 h2d 10 after=U0\n")
    bounds = period_bounds(ring)
    assert round(bounds.cycle_seconds * 1e9) == 160
    assert {str(task) for task in bounds.cycle} == {"F0", "G0", "U0", "H0"}
    assert bounds.binds.startswith("a cycle of waits: CPU update 62 %")


def test_a_cycle_that_spans_two_iterations_counts_half() -> None:
    """A ring that reaches back twice has two iterations for its length; then a lane can be the tighter bound."""
    bounds = period_bounds(schedule("task F0 gpu 50 after=U0@-1\ntask U0 cpu 60 after=F0@-1\n"))
    assert round(bounds.cycle_seconds * 1e9) == (50 + 60) / 2
    assert round(bounds.seconds * 1e9) == 60


def test_the_first_iteration_ends_where_the_second_begins() -> None:
    """Of several iterations the first lasts until the next one starts; a single one lasts until the run ends."""
    two_lanes = schedule("task F0 gpu 30\ntask U0 cpu 100 after=F0\n")
    once, twice = (SimExecutor().run(two_lanes, iterations) for iterations in (1, 2))
    assert round(once.first_iteration_seconds() * 1e9) == round(once.makespan_seconds * 1e9) == 130
    assert round(twice.first_iteration_seconds() * 1e9) == 30


@given(schedules(sharing=False))
def test_fifo_schedules_run_at_their_bound(found: Schedule) -> None:
    """Bounds never exceed the steady period; where no lane chooses, the period is the bound."""
    trace, steady = run_until_steady(found, SimExecutor())
    bound = period_bounds(found).seconds
    assert bound <= steady.period_seconds * (1 + 1e-9) + 1e-15 or not steady.settled
    fifo = all(lane.discipline == "fifo" for lane in found.lanes)
    members = trace.lane_tasks(found.lanes[0].name)
    if fifo and steady.settled and len(members) == len(found.tasks):
        assert steady.period_seconds == pytest.approx(bound)


@given(schedules(), st.integers(1, 6))
def test_a_trace_proves_the_bounds_that_a_search_finds(found: Schedule, iterations: int) -> None:
    """Whatever the trace is like, the bounds are those of the schedule; the cycle takes as long as they say."""
    bounds = period_bounds(found, SimExecutor().run(found, iterations))
    assert (bounds.seconds, bounds.lane) == (period_bounds(found).seconds, period_bounds(found).lane)
    lasting = {task.id: task.duration_ns for task in found.tasks}
    spans: dict[tuple[TaskId, TaskId], int] = {}
    for u, v, back in graph_of(found).edges():
        ends = found.tasks[u].id, found.tasks[v].id
        spans[ends] = min(spans.get(ends, 1), back)
    span = sum(spans[ends] for ends in zip(bounds.cycle, (*bounds.cycle[1:], *bounds.cycle[:1]), strict=True))
    assert bounds.cycle_seconds * span == pytest.approx(sum(lasting[task] for task in bounds.cycle) * 1e-9)


def test_the_trace_of_a_fifo_schedule_proves_its_critical_cycle() -> None:
    """Then nothing is searched."""
    found = example("zero_offload")
    with patch("autohete.analysis.bounds._critical_cycle", side_effect=AssertionError("searched")):
        bounds = period_bounds(found.schedule, found.trace)
    assert bounds == replace(period_bounds(found.schedule), cycle=bounds.cycle, shares=bounds.shares)


@given(schedules(max_tasks=6))
def test_no_cycle_of_waits_is_longer_than_the_critical_one(found: Schedule) -> None:
    """The critical cycle has the largest ratio of all cycles that visit no task twice."""
    edges = list(graph_of(found).edges())
    durations = [task.duration_ns for task in found.tasks]

    def ratios(path: list[int], back: int) -> Iterator[Fraction]:
        for before, after, span in edges:
            if before == path[-1] and after == path[0]:
                yield Fraction(sum(durations[task] for task in path), back + span)
            elif before == path[-1] and after > path[0] and after not in path:
                yield from ratios([*path, after], back + span)

    longest = max((ratio for task in range(len(durations)) for ratio in ratios([task], 0)), default=Fraction(0))
    assert period_bounds(found).cycle_seconds == float(longest) * 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "workload"),
    [*((name, "gpt-2b") for name in POLICIES), *((name, "gpt-10b") for name in POLICIES if name != "joint")],
)
def test_bounds_hold_for_every_policy(policy: str, workload: str) -> None:
    """bound <= period <= sum of durations of one iteration, stretched at most as far as sharing slows a lane."""
    found = example(policy, workload)
    bounds = period_bounds(found.schedule)
    assert bounds.seconds <= found.iteration_seconds * (1 + 1e-6)
    serial = sum(task.duration_ns for task in found.schedule.tasks) * 1e-9
    assert found.iteration_seconds <= serial * 2.5


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_busy_and_idle_make_the_whole_iteration(policy: str) -> None:
    """The GPU's busy time and its idle time by cause add up to the iteration; shares stay between 0 and 1."""
    found = example(policy)
    use = usage(found.trace, found.steady)
    busy = use.lanes["gpu"].busy_share * found.iteration_seconds
    assert busy + sum(use.idle_seconds.values()) == pytest.approx(found.iteration_seconds, rel=1e-6)
    for lane in use.lanes.values():
        assert 0 <= lane.busy_share <= 1 + 1e-12
        assert 0 <= lane.overlap_share <= 1 + 1e-12


def test_idleness_has_its_cause() -> None:
    """A gap is charged to the lanes along the chain of waits that ends it, each for as long as it ran inside the gap."""
    ring = schedule("task F0 gpu 30 after=H0@-1\ntask G0 d2h 20 after=F0\ntask U0 cpu 100 after=G0\ntask H0 h2d 10 after=U0\n")
    trace, steady = run_until_steady(ring, SimExecutor())
    idle = {cause: round(seconds * 1e9) for cause, seconds in usage(trace, steady).idle_seconds.items()}
    assert idle == {Cause.D2H: 20, Cause.OPTIMIZER: 100, Cause.H2D: 10, Cause.PLACES: 0, Cause.COLLECTIVE: 0, Cause.NOTHING: 0}


def test_overlap_is_what_the_gpu_hides() -> None:
    """A copy that runs half beside the GPU and half beside nothing overlaps by half."""
    half = schedule("task F0 gpu 50 after=PF0@-1\ntask PF0 h2d 100\n")
    trace, steady = run_until_steady(half, SimExecutor())
    assert usage(trace, steady).lanes["h2d"].overlap_share == pytest.approx(0.5)


@pytest.mark.slow
def test_first_iterations_and_drain_are_apart() -> None:
    """A barrier-free first iteration is shorter than a steady one, and after the last one the CPU has work left."""
    summary = summarize(example("autohete"), parse_policy("autohete"))
    assert summary.iteration_seconds is not None
    assert summary.first_iteration_seconds is not None
    assert summary.drain_seconds is not None
    assert summary.first_iteration_seconds <= summary.iteration_seconds
    assert 0 < summary.drain_seconds < summary.iteration_seconds
    barrier = summarize(example("zero_offload"), parse_policy("zero_offload"))
    assert barrier.first_iteration_seconds == pytest.approx(barrier.iteration_seconds)


def test_zero_offload_is_as_serial_as_its_code() -> None:
    """ZeRO-Offload's iteration is the plain sum of its GPU passes, gradient copies, CPU step and one upload."""
    found = example("zero_offload")
    serial = sum(t.duration_ns for t in found.schedule.tasks if t.id.kind is not Kind.GPU_UPDATE) * 1e-9
    assert found.iteration_seconds == pytest.approx(serial, rel=1e-6)


def test_each_task_waits_for_what_ended_last() -> None:
    """Along an edge, for the lane, across the iterations; the first task of all waits for nothing."""
    found = schedule("task F0 gpu 30 after=H0@-1\ntask F1 gpu 10\ntask U0 cpu 50 after=F0\ntask H0 h2d 10 after=U0\n")
    waits = binding_waits(SimExecutor().run(found, 2))
    assert waits == [None, 0, 0, 2, 3, 4, 4, 6]


@given(schedules(sharing=False))
def test_waits_explain_starts(found: Schedule) -> None:
    """The binding wait of a task ends where it starts, unless it waited for nothing since the run began."""
    trace = SimExecutor().run(found, 3)
    starts, ends = trace.start_ns.ravel().tolist(), trace.end_ns.ravel().tolist()
    for start, cause in zip(starts, binding_waits(trace), strict=True):
        assert start == (0 if cause is None else ends[cause])
