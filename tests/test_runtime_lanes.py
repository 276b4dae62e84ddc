"""Lane threads: they run what the schedule says in its order, fail loudly, and leave nothing behind."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import batches, model_for, train_plainly
from test_runtime_exactness import SMALL, profile_of

from autohete.errors import InputError, ScheduleError, TaskError
from autohete.lowering import lower
from autohete.policies import parse_policy
from autohete.runtime.executor import TorchExecutor
from autohete.runtime.lanes import LaneThreads
from autohete.runtime.model import next_token_loss
from autohete.schedule import Schedule, Task, parse_schedule, parse_task_id
from autohete.simulate import judge_for
from autohete.testing.strategies import schedules
from autohete.trace import Clock, check_trace

RING = parse_schedule(
    "autohete-schedule 1\nlane gpu fifo\nlane h2d priority\nlane d2h fifo\nlane cpu priority\n"
    "task F0 gpu 3 after=H0@-1\ntask F1 gpu 2\ntask G0 d2h 2 after=F0\ntask U0 cpu 5 after=G0\ntask H0 h2d 1 after=U0\n"
)


def nothing(task: Task, iteration: int) -> None:
    """Do nothing."""


def lanes_alive() -> list[str]:
    """Names of lane threads that have not ended."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("autohete-")]


@settings(max_examples=50)
@given(schedules(), st.integers(1, 6))
def test_the_order_is_that_of_the_schedule(schedule: Schedule, iterations: int) -> None:
    """Each task runs once, after all its edges, no lane overlaps itself, fifo lanes keep their order."""
    ran: list[str] = []
    with LaneThreads(schedule, lambda task, iteration: ran.append(task.id.at(iteration)), Clock.MEASURED_CPU) as lanes:
        for _ in range(iterations):
            lanes.admit()
    assert len(set(ran)) == len(ran) == iterations * len(schedule.tasks)
    # Which of two ready tasks a priority lane sees first depends on the instant; edges and exclusion do not.
    assert [fault for fault in check_trace(lanes.trace()) if "more urgent" not in fault] == []
    assert lanes_alive() == []


def test_late_admission_waits_for_nothing_that_is_over() -> None:
    """An iteration that is admitted when the one before has ended long ago runs all the same."""
    with LaneThreads(RING, nothing, Clock.MEASURED_CPU) as lanes:
        for iteration in range(3):
            assert lanes.admit() == iteration
            lanes.wait(parse_task_id("H0"), iteration)
    assert check_trace(lanes.trace()) == []


def test_a_step_returns_before_its_tail() -> None:
    """Whoever waits for a task gets on while the tasks behind it still run."""
    gate = threading.Event()

    def action(task: Task, iteration: int) -> None:
        if str(task.id) == "U0":
            assert gate.wait(10)

    with LaneThreads(RING, action, Clock.MEASURED_CPU) as lanes:
        lanes.admit()
        lanes.wait(parse_task_id("F1"), 0)  # returns although U0 is still at work
        gate.set()


@pytest.mark.parametrize("task", ["F0", "G0", "U0", "H0"])
def test_a_failure_reaches_the_caller_with_its_name(task: str) -> None:
    """An exception in any lane is raised where the caller waits, names the task, keeps its cause, and ends all threads."""

    def action(performed: Task, iteration: int) -> None:
        if performed.id.at(iteration) == f"{task}@1":
            raise ValueError("no such luck")

    lanes = LaneThreads(RING, action, Clock.MEASURED_CPU)
    begin = time.perf_counter()
    with pytest.raises(TaskError, match=f"^{task}@1 failed: ValueError: no such luck$") as caught, lanes:
        for _ in range(50):
            lanes.admit()
    assert isinstance(caught.value.__cause__, ValueError)
    assert lanes_alive() == []
    assert time.perf_counter() - begin < 10  # at once, not at some time-out


def test_an_error_of_the_caller_ends_the_threads() -> None:
    """Leaving the block by an exception ends the lanes without waiting for what was admitted."""
    with pytest.raises(KeyError), LaneThreads(RING, nothing, Clock.MEASURED_CPU) as lanes:
        lanes.admit()
        raise KeyError
    assert lanes_alive() == []


def test_an_invalid_schedule_starts_no_thread() -> None:
    """What cannot be executed is refused before any lane exists."""
    broken = parse_schedule("autohete-schedule 1\nlane gpu fifo\ntask F0 gpu 1 after=F1\ntask F1 gpu 1 after=F0\n")
    with pytest.raises(ScheduleError, match="cycle"):
        LaneThreads(broken, nothing, Clock.MEASURED_CPU)
    assert lanes_alive() == []


def test_paced_tasks_end_no_earlier_than_planned() -> None:
    """A paced run takes at least the time that its schedule takes, and follows it in order."""
    slow = parse_schedule(
        "autohete-schedule 1\nlane gpu fifo\nlane cpu fifo\ntask F0 gpu 2000000 after=U0@-1\ntask U0 cpu 3000000 after=F0\n"
    )
    with LaneThreads(slow, nothing, Clock.EMULATED, paced=True) as lanes:
        for _ in range(10):
            lanes.admit()
    assert lanes.trace().makespan_seconds >= 10 * 0.005
    assert check_trace(lanes.trace()) == []


def test_the_executor_trains() -> None:
    """Behind the seam of both executors stands the same training, to the bit."""
    profile = profile_of(SMALL)
    schedule = lower(profile, parse_policy("zero_offload").plan(profile, judge_for(profile)))
    executor = TorchExecutor(model_for(SMALL), iter(batches(SMALL, 3)), next_token_loss)
    torch.manual_seed(2)
    trace = executor.run(schedule, 3)
    plain = train_plainly(SMALL, 3)
    assert executor.losses == plain.losses
    assert all(torch.equal(a, b) for a, b in zip(executor.parameters, plain.parameters, strict=True))
    assert trace.clock is Clock.MEASURED_CPU
    assert check_trace(trace) == []


def test_too_few_batches_are_refused() -> None:
    """Running out of data is an error that says how much there was, and ends the lanes."""
    profile = profile_of(SMALL)
    schedule = lower(profile, parse_policy("resident").plan(profile, judge_for(profile)))
    with pytest.raises(InputError, match="3 iterations need as many batches, but there are 1"):
        TorchExecutor(model_for(SMALL), iter(batches(SMALL, 1)), next_token_loss).run(schedule, 3)
    assert lanes_alive() == []
