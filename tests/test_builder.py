"""The builder derives from what tasks read and write what waits for what; rules add order and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autohete.errors import ScheduleError
from autohete.lowering import lower
from autohete.lowering.builder import Builder
from autohete.lowering.rules import rules_of
from autohete.plan import Plan
from autohete.profile import Profile
from autohete.schedule import CPU, D2H, GPU, H2D, HOST_MEMORY, Discipline, Kind, Lane, TaskId, Value
from autohete.testing import checks, strategies
from autohete.testing.list_scheduler import list_schedule

FORWARD, BACKWARD = TaskId(Kind.FORWARD, 0), TaskId(Kind.BACKWARD, 0)


def waits(builder: Builder) -> dict[str, list[str]]:
    """What each task waits for, as text."""
    return {str(task.id): sorted(map(str, task.after)) for task in builder.tasks()}


def two_passes() -> Builder:
    """Forward and backward of one unit, both of which read its parameters."""
    builder = Builder([FORWARD, BACKWARD])
    for task in (FORWARD, BACKWARD):
        builder.task(task.kind, 0, GPU, 1e-9)
        builder.read(task, Value.PARAMETERS, 0)
    return builder


def test_a_writer_waits_for_readers_and_the_next_readers_for_it() -> None:
    """The refresh waits for backward, the last to read on the GPU's lane; the next forward for the refresh."""
    builder = two_passes()
    refresh = builder.task(Kind.REFRESH, 0, H2D, 1e-9)
    builder.write(refresh, Value.PARAMETERS, 0)
    builder.order_by_data()
    assert waits(builder) == {"F0": ["H0@-1"], "B0": ["F0"], "H0": ["B0"]}


def test_what_is_made_anew_waits_for_nobody() -> None:
    """A fetch into memory of its own waits only for what it copies."""
    builder = Builder([FORWARD, BACKWARD])
    fetch = builder.task(Kind.PREFETCH_FORWARD, 0, H2D, 1e-9)
    builder.read(fetch, Value.PARAMETERS, 0, HOST_MEMORY)
    builder.make(fetch, Value.PARAMETERS, 0, 8)
    for task in (FORWARD, BACKWARD):
        builder.task(task.kind, 0, GPU, 1e-9)
        builder.read(task, Value.PARAMETERS, 0)
    back = builder.task(Kind.WRITE_BACK_FORWARD, 0, D2H, 1e-9)
    builder.read(back, Value.PARAMETERS, 0)
    update = builder.task(Kind.CPU_UPDATE, 0, CPU, 1e-9)
    builder.write(update, Value.PARAMETERS, 0, HOST_MEMORY)
    builder.order_by_data()
    found = waits(builder)
    assert found == {"PF0": ["U0@-1"], "F0": ["PF0"], "B0": ["F0"], "WF0": ["PF0"], "U0": ["PF0"]}


def test_a_late_reader_is_waited_for_before_memory_is_freed() -> None:
    """What a copy of the iteration before still reads is freed when that has ended."""
    builder = Builder([FORWARD, BACKWARD])
    builder.task(Kind.FORWARD, 0, GPU, 1e-9)
    builder.read(FORWARD, Value.PARAMETERS, 0)
    builder.free(FORWARD, Value.PARAMETERS, 0, back=1)
    fetch = builder.task(Kind.PREFETCH_BACKWARD, 0, H2D, 1e-9)
    builder.make(fetch, Value.PARAMETERS, 0, 8)
    builder.task(Kind.BACKWARD, 0, GPU, 1e-9)
    builder.read(BACKWARD, Value.PARAMETERS, 0)
    back = builder.task(Kind.WRITE_BACK_BACKWARD, 0, D2H, 1e-9)
    builder.after(back, BACKWARD)
    builder.read(back, Value.PARAMETERS, 0)
    builder.order_by_data()
    assert "WB0@-1" in waits(builder)["F0"]


def test_waits_that_follow_from_others_are_left_out() -> None:
    """Over any number of tasks, within an iteration and from one to the next."""
    builder = two_passes()
    update, refresh = builder.task(Kind.CPU_UPDATE, 0, CPU, 1e-9), builder.task(Kind.REFRESH, 0, H2D, 1e-9)
    for task, before, back in (
        (update, BACKWARD, 0),
        (refresh, update, 0),
        (refresh, FORWARD, 0),
        (FORWARD, refresh, 1),
        (FORWARD, update, 1),
        (BACKWARD, refresh, 1),
    ):
        builder.after(task, before, back)
    assert waits(builder) == {"F0": ["H0@-1"], "B0": ["F0"], "U0": ["B0"], "H0": ["U0"]}


def test_a_cycle_is_refused() -> None:
    """A rule may ask for what the data forbid."""
    builder = two_passes()
    builder.after(FORWARD, BACKWARD)
    with pytest.raises(ScheduleError, match="wait for each other in a cycle"):
        builder.tasks()


@st.composite
def with_fewer_rules(draw: st.DrawFn) -> tuple[Profile, Plan, list[int]]:
    """A random plan, and some of its rules by their places."""
    profile = draw(strategies.profiles())
    plan = draw(strategies.plans(profile))
    return profile, plan, [place for place, _ in enumerate(rules_of(plan)) if draw(st.booleans())]


@given(with_fewer_rules())
def test_any_subset_of_rules_trains_the_same(drawn: tuple[Profile, Plan, list[int]]) -> None:
    """What data need does not depend on rules: the schedule is valid, and nothing is read before it is there."""
    profile, plan, kept = drawn
    rules = list(rules_of(plan))
    schedule = lower(profile, plan, [rules[place] for place in kept]).validate()
    assert checks.parameter_faults(profile, plan, schedule) == []
    assert checks.gradient_faults(plan, schedule) == []
    assert checks.activation_faults(plan, schedule) == []


@given(with_fewer_rules())
def test_a_rule_never_makes_a_schedule_faster(drawn: tuple[Profile, Plan, list[int]]) -> None:
    """Where lanes keep their order and share nothing, each task starts no later without a rule than with it."""
    profile, plan, kept = drawn
    rules = list(rules_of(plan))

    def starts(schedule_rules: list[int]) -> list[list[int]]:
        schedule = lower(profile, plan, [rules[place] for place in schedule_rules])
        lanes = tuple(Lane(lane.name, Discipline.FIFO) for lane in schedule.lanes)
        fixed = replace(schedule, lanes=lanes, flows=(), resources=()).validate()
        found: list[list[int]] = list_schedule(fixed, 3).start_ns.tolist()
        return found

    assert all(
        few <= all_of
        for some, every in zip(starts(kept), starts(list(range(len(rules)))), strict=True)
        for few, all_of in zip(some, every, strict=True)
    )
