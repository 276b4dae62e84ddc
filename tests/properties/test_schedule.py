"""The schedule as data: its text form, and what its validation refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autohete.errors import ScheduleError
from autohete.lowering import lower
from autohete.plan import Processor
from autohete.schedule import (
    KIND_MEANING,
    Buffer,
    Discipline,
    Edge,
    Flow,
    Free,
    Kind,
    Lane,
    Memory,
    Schedule,
    SharedResource,
    Task,
    TaskId,
    parse_buffer_id,
    parse_instance,
    parse_schedule,
    parse_task_id,
    validate,
)
from autohete.schedule.order import delayed_units
from autohete.testing import strategies

task_ids = st.builds(TaskId, st.sampled_from(Kind), *[st.integers(0, 10**6)] * 4)

# --- text ---------------------------------------------------------------------------------------------------------


@given(task_ids)
def test_task_id_is_its_text(task: TaskId) -> None:
    """Parsing a printed task id gives the task id."""
    assert parse_task_id(str(task)) == task


@given(task_ids, st.integers(0, 10**6))
def test_instance_is_its_text(task: TaskId, iteration: int) -> None:
    """Parsing a printed instance gives task and iteration."""
    assert parse_instance(task.at(iteration)) == (task, iteration)


@pytest.mark.parametrize("text", ["", "F", "3", "X3", "F-1", "F3@1", "f3", "F3 ", "FF3"])
def test_no_task_id(text: str) -> None:
    """What is not a task id is refused, with what may be written."""
    with pytest.raises(ScheduleError, match="is not a task id: write a kind"):
        parse_task_id(text)


@pytest.mark.parametrize("text", ["", "F3", "F3@", "F3@-1", "@1", "F3@1@2"])
def test_no_instance(text: str) -> None:
    """What is not an instance is refused, with an example."""
    with pytest.raises(ScheduleError, match="write it such as F3@1"):
        parse_instance(text)


def test_every_kind_has_a_meaning() -> None:
    """Every kind of task is explained in words."""
    assert KIND_MEANING.keys() == set(Kind)


@given(st.one_of(strategies.schedules(), strategies.schedules(sharing=True)))
def test_schedule_is_its_text(schedule: Schedule) -> None:
    """Parsing a printed schedule gives the schedule, and printing that the same text."""
    assert parse_schedule(str(schedule)) == schedule
    assert str(parse_schedule(str(schedule))) == str(schedule)


@pytest.mark.slow
@given(st.data())
def test_lowered_schedule_is_its_text(data: st.DataObject) -> None:
    """Parsing the printed schedule of a plan gives the schedule."""
    profile = data.draw(strategies.profiles())
    schedule = lower(profile, data.draw(strategies.plans(profile)))
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.slow
@given(st.data())
def test_delayed_units_are_those_of_a_delayed_plan(data: st.DataObject) -> None:
    """Wherever the gradients of however many micro-batches are added up, only delayed updates are found to be delayed."""
    profile = data.draw(strategies.profiles(max_micro_batches=3))
    plan = data.draw(strategies.plans(profile))
    trained = {i for i, block in enumerate(profile.units) if not block.is_frozen}
    on_cpu = {i for i, unit in enumerate(plan.units) if unit.update.on is Processor.CPU} & trained
    assert delayed_units(lower(profile, plan)) == (on_cpu if plan.delayed else set())


def test_resource_that_nobody_uses_is_refused() -> None:
    """A shared resource without lanes says nothing, and its text could not be read back."""
    with pytest.raises(ScheduleError, match="shared resource 'link' serves no lane"):
        validate(Schedule((Lane("gpu"),), (), resources=(SharedResource("link", 1.0, ()),)))


def test_comments_and_blank_lines_are_passed_over() -> None:
    """A person may annotate a schedule's text."""
    text = "# by hand\n\nautohete-schedule 2\nlane gpu fifo  # the GPU\n\ntask F0 gpu 3 # forward\n"
    assert parse_schedule(text) == Schedule((Lane("gpu"),), (Task(TaskId(Kind.FORWARD, 0), "gpu", 3),))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("engine gpu", "line 2: 'engine' is not one of lane, memory"),
        ("lane gpu", "line 2: cannot read 'lane gpu'"),
        ("lane gpu lifo", "line 2: cannot read 'lane gpu lifo'"),
        ("memory gpu much", "line 2: cannot read"),
        ("flow gpu 1.0", "line 2: cannot read"),
        ("share link", "line 2: cannot read"),
        ("resident other:gpu", "line 2: 'other' is not a buffer"),
        ("resident other:gpu:much", "line 2: cannot read"),
        ("resident x.1:gpu:1", "line 2: 'x.1:gpu' is not a buffer: write a value"),
        ("resident workspace_Q.1:gpu:1", "line 2: 'workspace_Q.1:gpu' is not a buffer"),
        ("task F0 gpu", "line 2: cannot read"),
        ("task F0 gpu 1.5", "line 2: cannot read"),
        ("task Q0 gpu 1", "line 2: 'Q0' is not a task id"),
        ("task F0 gpu 1 after=Q0", "line 2: 'Q0' is not a task id"),
        ("task F0 gpu 1 before=F1", r"line 2: cannot read .*unknown before"),
        ("task F0 gpu 1 urgent", "line 2: cannot read"),
        ("task F0 gpu 1 after=F1 after=F2", "line 2: cannot read .*after"),
    ],
)
def test_unreadable_line_is_named(line: str, fault: str) -> None:
    """A line that cannot be read is an error with its number."""
    with pytest.raises(ScheduleError, match=fault):
        parse_schedule(f"autohete-schedule 2\n{line}\n")


def test_text_without_header_is_refused() -> None:
    """Text that does not begin as a schedule does is no schedule."""
    for text in ("", "lane gpu fifo\n"):
        with pytest.raises(ScheduleError, match="begins with the line"):
            parse_schedule(text)


# --- faults -------------------------------------------------------------------------------------------------------

F0, F1, B0, B1 = (TaskId(kind, block) for kind in (Kind.FORWARD, Kind.BACKWARD) for block in (0, 1))


def two(first: Task, second: Task, discipline: Discipline = Discipline.PRIORITY) -> Schedule:
    """A schedule of two tasks on lanes ``gpu`` and ``h2d`` with one memory."""
    return Schedule((Lane("gpu", discipline), Lane("h2d")), (first, second), (Memory("gpu", 10),))


def refuses(schedule: Schedule, fault: str) -> None:
    with pytest.raises(ScheduleError, match=fault):
        validate(schedule)


PLAIN = two(Task(F0, "gpu", 1), Task(F1, "gpu", 1))
X = Buffer(parse_buffer_id("other:gpu"), 1)


def test_plain_schedule_is_valid() -> None:
    """The schedule that the faults below are planted in has none."""
    assert validate(PLAIN) is PLAIN


def test_cycle() -> None:
    """Tasks that wait for each other are named."""
    refuses(two(Task(F0, "gpu", 1, (Edge(F1),)), Task(F1, "h2d", 1, (Edge(F0),))), r"cycle: .*F0 -> .*waits for the one before")


def test_cycle_of_one() -> None:
    """A task cannot wait for itself in one iteration."""
    refuses(two(Task(F0, "gpu", 1, (Edge(F0),)), Task(F1, "gpu", 1)), "cycle: F0 -> F0")


def test_waiting_for_oneself_an_iteration_back_is_no_cycle() -> None:
    """A task may wait for itself in the iteration before."""
    validate(two(Task(F0, "gpu", 1, (Edge(F0, back=1),)), Task(F1, "gpu", 1)))


def test_cycle_by_fifo_order() -> None:
    """On a fifo lane a task that waits for a later one is stuck, on a priority lane it is not."""
    first, second = Task(F0, "gpu", 1, (Edge(F1),)), Task(F1, "gpu", 1)
    refuses(two(first, second, Discipline.FIFO), "cycle: .*order of a fifo lane")
    validate(two(first, second, Discipline.PRIORITY))


def test_unknown_edge() -> None:
    """An edge to a task that does not exist is named with both ends."""
    refuses(two(Task(F0, "gpu", 1, (Edge(B0),)), Task(F1, "gpu", 1)), "unknown edge: F0 waits for B0, but no task is called B0")


def test_double_edge() -> None:
    """An edge is said once."""
    refuses(two(Task(F0, "gpu", 1), Task(F1, "gpu", 1, (Edge(F0), Edge(F0)))), "F1 waits for F0 twice")


@pytest.mark.parametrize("back", [-1, 2])
def test_edge_that_reaches_too_far(back: int) -> None:
    """An edge reaches to this iteration or the one before."""
    refuses(two(Task(F0, "gpu", 1), Task(F1, "gpu", 1, (Edge(F0, back),))), f"F1 waits for F0 {back} iterations back")


def test_task_without_a_lane() -> None:
    """A task on a lane that does not exist is named with the lanes that do."""
    refuses(two(Task(F0, "nvme", 1), Task(F1, "gpu", 1)), "task F0 has no lane: 'nvme' is not one of gpu, h2d")


def test_negative_duration() -> None:
    """A duration cannot be negative."""
    refuses(two(Task(F0, "gpu", -3), Task(F1, "gpu", 1)), "task F0 lasts -3 ns")


def test_memory_freed_twice() -> None:
    """A buffer ends once."""
    freed = (Free(X.id),)
    refuses(
        two(Task(F0, "gpu", 1, allocates=(X,), frees=freed), Task(F1, "gpu", 1, (Edge(F0),), frees=freed)),
        "memory freed twice: 'other:gpu' by F0 and by F1",
    )


def test_memory_never_freed() -> None:
    """A buffer that nobody frees would be there once more with each iteration."""
    refuses(two(Task(F0, "gpu", 1, allocates=(X,)), Task(F1, "gpu", 1)), "'other:gpu', allocated by F0, is never freed")


def test_memory_freed_before_its_allocation() -> None:
    """What frees a buffer waits for what allocates it."""
    refuses(
        two(Task(F0, "gpu", 1, allocates=(X,)), Task(F1, "h2d", 1, frees=(Free(X.id),))),
        "F1 frees 'other:gpu' but does not wait for F0",
    )


def test_memory_freed_before_its_allocation_an_iteration_back() -> None:
    """What frees a buffer of the iteration before waits for what allocated it, or occupancy could fall below zero."""
    refuses(
        two(Task(F0, "gpu", 9, allocates=(X,)), Task(F1, "h2d", 1, frees=(Free(X.id, back=1),))),
        "F1 frees 'other:gpu.* but does not wait for F0",
    )


def test_memory_freed_by_fifo_order() -> None:
    """The order of a fifo lane is a way of waiting too."""
    validate(two(Task(F0, "gpu", 1, allocates=(X,)), Task(F1, "gpu", 1, frees=(Free(X.id),)), Discipline.FIFO))


def test_memory_of_nobody_freed() -> None:
    """Only what some task allocates can be freed."""
    refuses(two(Task(F0, "gpu", 1, frees=(Free(X.id),)), Task(F1, "gpu", 1)), "F0 frees 'other:gpu', which no task allocates")


def test_memory_freed_too_far_back() -> None:
    """A buffer of this iteration or the one before can be freed."""
    refuses(
        two(Task(F0, "gpu", 1, allocates=(X,), frees=(Free(X.id, 2),)), Task(F1, "gpu", 1)),
        "F0 frees 'other:gpu' of 2 iterations back",
    )


def test_memory_allocated_twice() -> None:
    """A buffer begins once."""
    refuses(
        two(Task(F0, "gpu", 1, allocates=(X,)), Task(F1, "gpu", 1, allocates=(X,))),
        "'other:gpu' is allocated twice: by F0 and by F1",
    )


def test_unknown_memory() -> None:
    """A buffer is in a memory that exists."""
    refuses(
        replace(PLAIN, resident=(Buffer(parse_buffer_id("other:nvme"), 1),)),
        "buffer 'other:nvme' is in memory 'nvme': not one of gpu",
    )


@pytest.mark.parametrize("whole", ["host", "pinned", "part"])
def test_part_of_no_memory(whole: str) -> None:
    """A memory is a part of one that exists and is no part itself."""
    parts = (Memory("pinned", 1, whole), Memory("part", 1, "gpu"))
    refuses(replace(PLAIN, memories=(*PLAIN.memories, *parts)), f"memory 'pinned' is a part of '{whole}': give one of gpu")


def test_negative_size() -> None:
    """A size cannot be negative."""
    refuses(replace(PLAIN, resident=(Buffer(X.id, -1),)), "buffer 'other:gpu' has -1 bytes")


FLOW = Flow("gpu", 1.0, 1.0)
LINK = SharedResource("link", 1.0, ("gpu",))


@pytest.mark.parametrize(
    ("doubled", "fault"),
    [
        (replace(PLAIN, lanes=(*PLAIN.lanes, Lane("gpu"))), "lane 'gpu' exists 2 times"),
        (replace(PLAIN, memories=PLAIN.memories * 2), "memory 'gpu' exists 2 times"),
        (replace(PLAIN, tasks=PLAIN.tasks[:1] * 2), "task 'F0' exists 2 times"),
        (replace(PLAIN, flows=(FLOW, FLOW)), "flow of lane 'gpu' exists 2 times"),
        (replace(PLAIN, flows=(FLOW,), resources=(LINK, LINK)), "shared resource 'link' exists 2 times"),
        (replace(PLAIN, resident=(X, X)), "buffer 'other:gpu' exists 2 times"),
    ],
    ids=["lane", "memory", "task", "flow", "resource", "resident buffer"],
)
def test_duplicate_name(doubled: Schedule, fault: str) -> None:
    """Names are unique."""
    refuses(doubled, fault)


NOT_POSITIVE = [0.0, -1.0, float("nan"), float("inf")]


@pytest.mark.parametrize("bad", NOT_POSITIVE)
def test_bad_flow(bad: float) -> None:
    """A flow's demand and weight are positive numbers."""
    for flow in (Flow("gpu", bad, 1.0), Flow("gpu", 1.0, bad)):
        refuses(replace(PLAIN, flows=(flow,), resources=(LINK,)), "flow of lane 'gpu' needs a positive")


@pytest.mark.parametrize("bad", NOT_POSITIVE)
def test_bad_capacity(bad: float) -> None:
    """A shared resource's capacity is a positive number."""
    refuses(replace(PLAIN, flows=(FLOW,), resources=(replace(LINK, capacity=bad),)), "shared resource 'link' has capacity")


def test_flow_of_no_lane() -> None:
    """A flow belongs to a lane."""
    refuses(replace(PLAIN, flows=(Flow("nvme", 1.0, 1.0),)), "a flow belongs to lane 'nvme'")


def test_resource_that_serves_a_lane_without_flow() -> None:
    """A resource's lanes say what they draw."""
    refuses(replace(PLAIN, resources=(LINK,)), "shared resource 'link' serves lane 'gpu', which has no flow")
