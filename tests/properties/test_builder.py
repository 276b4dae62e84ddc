"""The builder derives from what tasks read and write what waits for what; rules add order and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autohete.analysis.occupancy import occupancy
from autohete.errors import RuleError
from autohete.execution.trace import Trace
from autohete.hardware import load_hardware
from autohete.lowering import lower
from autohete.lowering.builder import Builder, on_gpu
from autohete.lowering.waits import CycleError
from autohete.plan import Activations, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.rules import (
    Barrier,
    BlockingCopies,
    GpuUpdatesAfterBackward,
    GpuUpdatesAfterRecompute,
    Rule,
    Slots,
    UpdatesAfterBackward,
    Window,
)
from autohete.policies import parse_policy
from autohete.profile import Profile, analytic_profile
from autohete.schedule import (
    COPIES,
    CPU,
    D2H,
    GPU,
    GPU_MEMORY,
    H2D,
    HOST_MEMORY,
    Discipline,
    Kind,
    Lane,
    Schedule,
    TaskId,
    Value,
    parse_task_id,
    validate,
)
from autohete.simulate import judge_for
from autohete.testing import checks, strategies
from autohete.testing.checks import idle_rules
from autohete.testing.list_scheduler import list_schedule
from autohete.workload import Workload

FORWARD, BACKWARD = TaskId(Kind.FORWARD, 0), TaskId(Kind.BACKWARD, 0)


def waits(builder: Builder) -> dict[str, list[str]]:
    """What each task waits for, as text."""
    order = builder.order()
    builder.waits.reduce(order)
    return {str(task.id): sorted(map(str, task.after)) for task in builder.tasks(order)}


def nanosecond(_: Profile) -> float:
    """The duration of every task."""
    return 1e-9


def two_passes() -> Builder:
    """Forward and backward of one unit, both of which read its parameters."""
    builder = Builder([FORWARD, BACKWARD])
    for task in (FORWARD, BACKWARD):
        builder.task(task.kind, 0, GPU, nanosecond)
        builder.read(task, Value.PARAMETERS, 0)
    return builder


def test_a_writer_waits_for_readers_and_the_next_readers_for_it() -> None:
    """The refresh waits for backward, the last to read on the GPU's lane; the next forward for the refresh."""
    builder = two_passes()
    refresh = builder.task(Kind.REFRESH, 0, H2D, nanosecond)
    builder.write(refresh, Value.PARAMETERS, 0)
    builder.order_by_data()
    assert waits(builder) == {"F0": ["H0@-1"], "B0": ["F0"], "H0": ["B0"]}


def test_what_is_made_anew_waits_for_nobody() -> None:
    """A fetch into memory of its own waits only for what it copies; passes also wait for each other."""
    builder = Builder([FORWARD, BACKWARD])
    fetch = builder.task(Kind.PREFETCH_FORWARD, 0, H2D, nanosecond)
    builder.read(fetch, Value.PARAMETERS, 0, HOST_MEMORY)
    builder.make(fetch, on_gpu(Value.PARAMETERS, 0), 8)
    for task in (FORWARD, BACKWARD):
        builder.task(task.kind, 0, GPU, nanosecond)
        builder.read(task, Value.PARAMETERS, 0)
    back = builder.task(Kind.WRITE_BACK_FORWARD, 0, D2H, nanosecond)
    builder.read(back, Value.PARAMETERS, 0)
    update = builder.task(Kind.CPU_UPDATE, 0, CPU, nanosecond)
    builder.write(update, Value.PARAMETERS, 0, HOST_MEMORY)
    builder.order_by_data()
    found = waits(builder)
    assert found == {"PF0": ["U0@-1"], "F0": ["B0@-1", "PF0"], "B0": ["F0"], "WF0": ["PF0"], "U0": ["PF0"]}


def test_a_late_reader_is_waited_for_before_memory_is_freed() -> None:
    """What a copy of the iteration before still reads is freed when that has ended."""
    builder = Builder([FORWARD, BACKWARD])
    builder.task(Kind.FORWARD, 0, GPU, nanosecond)
    builder.read(FORWARD, Value.PARAMETERS, 0)
    builder.free(FORWARD, on_gpu(Value.PARAMETERS, 0), back=1)
    fetch = builder.task(Kind.PREFETCH_BACKWARD, 0, H2D, nanosecond)
    builder.make(fetch, on_gpu(Value.PARAMETERS, 0), 8)
    builder.task(Kind.BACKWARD, 0, GPU, nanosecond)
    builder.read(BACKWARD, Value.PARAMETERS, 0)
    back = builder.task(Kind.WRITE_BACK_BACKWARD, 0, D2H, nanosecond)
    builder.after(back, BACKWARD)
    builder.read(back, Value.PARAMETERS, 0)
    builder.order_by_data()
    assert "WB0@-1" in waits(builder)["F0"]


def test_waits_that_follow_from_others_are_left_out() -> None:
    """Over any number of tasks, within an iteration and from one to the next."""
    builder = two_passes()
    update, refresh = builder.task(Kind.CPU_UPDATE, 0, CPU, nanosecond), builder.task(Kind.REFRESH, 0, H2D, nanosecond)
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
    with pytest.raises(CycleError) as caught:
        builder.order()
    assert sorted(caught.value.waits) == [(0, 1, 0), (1, 0, 0)]


def test_of_tasks_that_may_be_issued_next_the_first_declared_is() -> None:
    """A task that has to wait for a later one is issued right after it, and the rest keep their order."""
    builder = two_passes()
    first, second = (builder.task(Kind.REFRESH, unit, H2D, nanosecond) for unit in (1, 2))
    builder.after(FORWARD, first)
    order = builder.order()
    assert [str(builder.drafts[i].id) for i in order] == ["H1", "F0", "B0", "H2"]
    builder.in_turn([second, first])
    assert [str(builder.drafts[i].id) for i in builder.order()] == ["H2", "H1", "F0", "B0"]


@st.composite
def with_fewer_rules(draw: st.DrawFn) -> tuple[Profile, Plan, Plan]:
    """A random plan, and the same with some of its rules. Without ``ByPriority`` the issue order may imply another rule."""
    profile = draw(strategies.profiles(max_micro_batches=3))
    plan = draw(strategies.plans(profile))
    fewer = replace(plan, rules=tuple(rule for rule in plan.rules if draw(st.booleans())))
    return profile, plan, strategies.without_contradictions(profile, fewer)


@pytest.mark.slow
@given(with_fewer_rules())
def test_any_subset_of_rules_trains_the_same(drawn: tuple[Profile, Plan, Plan]) -> None:
    """What data need does not depend on rules: the schedule is valid, and nothing is read before it is there."""
    profile, _, plan = drawn
    schedule = validate(lower(profile, plan))
    assert checks.parameter_faults(profile, plan, schedule) == []
    assert checks.gradient_faults(profile, plan, schedule) == []
    assert checks.activation_faults(profile, plan, schedule) == []


@pytest.mark.slow
@given(with_fewer_rules())
def test_a_rule_never_makes_a_schedule_faster(drawn: tuple[Profile, Plan, Plan]) -> None:
    """Where tasks keep their order and durations and share nothing, each starts no later without a rule than with it."""
    profile, plan, fewer = drawn
    full, few = (lower(profile, one) for one in (plan, fewer))
    place = {task.id: i for i, task in enumerate(full.tasks)}
    lasting = {task.id: task.duration_ns for task in full.tasks}

    def starts(schedule: Schedule) -> list[list[int]]:
        lanes = tuple(Lane(lane.name, Discipline.FIFO) for lane in schedule.lanes)
        tasks = sorted((task._replace(duration_ns=lasting[task.id]) for task in schedule.tasks), key=lambda t: place[t.id])
        fixed = validate(replace(schedule, lanes=lanes, tasks=tuple(tasks), flows=(), resources=()))
        found: list[list[int]] = list_schedule(fixed, 3).start_ns.tolist()
        return found

    assert all(
        early <= late
        for some, every in zip(starts(few), starts(full), strict=True)
        for early, late in zip(some, every, strict=True)
    )


@pytest.mark.slow
@given(with_fewer_rules(), st.integers(0, 5))
def test_a_rule_given_twice_is_harmless_and_named(drawn: tuple[Profile, Plan, Plan], place: int) -> None:
    """A rule that the plan already has changes nothing, and is among its idle rules, however the rules are ordered."""
    profile, plan, _ = drawn
    if place < len(plan.rules):
        again = replace(plan, rules=(plan.rules[place], *plan.rules))
        assert str(lower(profile, again)) == str(lower(profile, plan))
        assert plan.rules[place] in idle_rules(profile, again)


@pytest.mark.slow
@given(with_fewer_rules())
def test_rules_change_no_duration(drawn: tuple[Profile, Plan, Plan]) -> None:
    """Any subset of a plan's rules leaves its tasks, their lanes and their durations as they are, and what lanes share."""
    profile, *both = drawn
    full, few = (lower(profile, plan) for plan in both)
    lasting = [{task.id: (task.lane, task.duration_ns) for task in schedule.tasks} for schedule in (full, few)]
    assert lasting[0] == lasting[1]
    assert (full.flows, full.resources) == (few.flows, few.resources)


SMALL = analytic_profile(
    Workload("small", 64, 4, 2, vocabulary_size=500, sequence_length=64), load_hardware("rtx4090-workstation")
)
_G = Kind.OFFLOAD_GRADIENTS
ON_CPU = Plan("by hand", (UnitPlan(update=Update(Processor.CPU)),) * 6, update_bytes=28)


@pytest.mark.parametrize(
    ("rules", "idle"),
    [
        ((Window(9),), (Window(9),)),
        ((GpuUpdatesAfterBackward(),), (GpuUpdatesAfterBackward(),)),
        ((BlockingCopies(Kind.WRITE_BACK_FORWARD), Barrier()), (BlockingCopies(Kind.WRITE_BACK_FORWARD),)),
        ((Slots(_G, 1), Slots(_G, 2)), (Slots(_G, 2),)),
        ((BlockingCopies(_G), Slots(_G, 1)), (BlockingCopies(_G), Slots(_G, 1))),
        ((Slots(_G, 1), UpdatesAfterBackward()), ()),
    ],
    ids=str,
)
def test_idle_rules_are_named(rules: tuple[Rule, ...], idle: tuple[Rule, ...]) -> None:
    """What repeats another rule, or concerns nothing in the plan, is lowered, and named by a check."""
    assert tuple(idle_rules(SMALL, replace(ON_CPU, rules=rules))) == idle


def test_updates_wait_for_the_recomputation_that_follows() -> None:
    """Each part of an update follows the recomputation of the unit below, and precedes that unit's backward; where nothing is
    recomputed, it follows its own backward.
    """
    states = Route(HOST_MEMORY, parts=2)
    again, kept = UnitPlan(Activations.RECOMPUTE, states=states), UnitPlan(states=states)
    plan = Plan("by hand", (kept, again, again, kept, again, kept), (GpuUpdatesAfterRecompute(),))
    order = [task.id for task in lower(SMALL, plan).tasks if task.lane == GPU]
    place = {task: i for i, task in enumerate(order)}
    for unit, follows in {5: "R4", 4: "B4", 3: "R2", 2: "R1", 1: "B1", 0: "B0"}.items():
        parts = [place[TaskId(Kind.GPU_UPDATE, unit, again=part)] for part in (0, 1)]
        after, before = place[parse_task_id(follows)], place.get(TaskId(Kind.BACKWARD, unit - 1), len(order))
        assert after < parts[0] < parts[1] < before


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["resident:zero_stage=2", "resident:zero_stage=2,deepspeed", "zero_offload:paper"])
def test_a_slow_interconnect_costs_time_and_no_memory(policy: str) -> None:
    """On several GPUs backward waits for a free buffer; without the rule its gradients pile up before their reductions."""
    slots = Slots(Kind.REDUCE_GRADIENTS, 2)
    workload = Workload("gpt", 4096, 12, 32, vocabulary_size=500, sequence_length=64, batch_size=1)

    def peak(bandwidth: str, *rules: Rule) -> int:
        hardware = load_hardware("rtx4090-8gpu", {"interconnect.bandwidth": bandwidth}).shared_by(4)
        profile = analytic_profile(workload, hardware)
        plan = parse_policy(f"{policy},checkpointing=none").plan(profile, judge_for(profile))
        (own,) = (rule for rule in plan.rules if isinstance(rule, Slots))
        assert own.kind is slots.kind
        assert own.count == (2 if policy == "resident:zero_stage=2" else math.ceil(2 * 500e6 / profile.units[1].parameters))
        plan = replace(plan, rules=(*(rule for rule in plan.rules if rule != own), *rules))
        return occupancy(list_schedule(validate(lower(profile, plan)), 4), GPU_MEMORY).peak_bytes

    assert peak("100MB/s", slots) == peak("18GB/s", slots) < peak("100MB/s")


def test_rules_that_contradict_each_other() -> None:
    """A plan whose tasks would wait for each other is refused with the names of the rules, and what to leave out."""
    with pytest.raises(RuleError, match=r"wait for each other: .* Leave out .*UpdatesAfterBackward\(\)"):
        lower(SMALL, replace(ON_CPU, rules=(Window(1), UpdatesAfterBackward())))


def most_at_a_time(trace: Trace, kind: Kind) -> int:
    """Of the values that copies of a kind take from the GPU or bring to it, the most that are there at one instant."""
    tasks, copy = trace.schedule.tasks, COPIES[kind]
    ends = {free.id: (place, free.back) for place, task in enumerate(tasks) for free in task.frees}
    copied = {b.id for task in tasks if task.id.kind is kind for b in task.allocates}
    copied |= {free.id for task in tasks if task.id.kind is kind for free in task.frees}
    lives = []
    for place, task in enumerate(tasks):
        for buffer in task.allocates:
            if buffer.id in copied and (buffer.id.value, buffer.memory) == (copy.value, GPU_MEMORY):
                end, back = ends[buffer.id]
                last = trace.iterations - back
                lives += [(trace.start_ns[i, place], trace.end_ns[i + back, end]) for i in range(last)]
    return max((sum(begin <= at < end for begin, end in lives) for at, _ in lives), default=0)


@pytest.mark.parametrize("kind", [Kind.OFFLOAD_GRADIENTS, Kind.OFFLOAD_ACTIVATIONS, Kind.FETCH_ACTIVATIONS, Kind.FETCH_STATES])
@pytest.mark.parametrize("count", [1, 2])
def test_no_more_than_the_slots_are_taken(kind: Kind, count: int) -> None:
    """Values that come or leave ahead fill their slots, and no more; without the rule there are more."""
    kept = Route(HOST_MEMORY, ahead=4) if kind in (Kind.OFFLOAD_ACTIVATIONS, Kind.FETCH_ACTIVATIONS) else Route()
    states = Route(HOST_MEMORY, ahead=4) if kind is Kind.FETCH_STATES else Route()
    on = Processor.CPU if kind is Kind.OFFLOAD_GRADIENTS else Processor.GPU
    outer = UnitPlan(update=Update(on), states=states)
    plan = Plan("by hand", (outer, *[replace(outer, kept=kept)] * 6, outer), update_bytes=28)
    # What leaves piles up behind slow copies, what comes behind slow users.
    rate = "1PB/s" if COPIES[kind].arrives else "1MB/s"
    links = {"links.h2d.bandwidth": rate, "links.d2h.bandwidth": rate, "host.memory_bandwidth": "1PB/s"}
    workload = Workload("small", 64, 6, 2, vocabulary_size=500, sequence_length=64, tied_embeddings=False)
    profile = analytic_profile(workload, load_hardware("rtx4090-workstation", links))

    def most(plan: Plan) -> int:
        schedule = validate(lower(profile, plan))
        assert checks.activation_faults(profile, plan, schedule) == []
        return most_at_a_time(list_schedule(schedule, 4), kind)

    assert most(replace(plan, rules=(Slots(kind, count),))) == count < most(plan)
