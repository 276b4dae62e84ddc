"""Lane threads: they run what the schedule says in its order, fail loudly, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import batches, lanes_alive, model_for, train_plainly
from support.small import SMALL, profile_of

from autohete.errors import InputError, ScheduleError, TaskError
from autohete.execution.trace import Clock, check_trace
from autohete.lowering import lower
from autohete.policies import parse_policy
from autohete.runtime.device import EmulatedDevice
from autohete.runtime.lanes import LaneThreads
from autohete.runtime.settings import Execution, Recipe
from autohete.runtime.torch_executor import TorchExecutor
from autohete.schedule import Schedule, Task, parse_schedule, parse_task_id
from autohete.simulate import judge_for
from autohete.testing.strategies import schedules

RING = parse_schedule(
    "autohete-schedule 2\nlane gpu fifo\nlane h2d priority\nlane d2h fifo\nlane cpu priority\n"
    "task F0 gpu 3 after=H0@-1\ntask F1 gpu 2\ntask G0 d2h 2 after=F0\ntask U0 cpu 5 after=G0\ntask H0 h2d 1 after=U0\n"
)


def nothing(task: Task, iteration: int) -> None:
    """Do nothing."""


@settings(max_examples=50)
@given(schedules(), st.integers(1, 6))
def test_the_order_is_that_of_the_schedule(schedule: Schedule, iterations: int) -> None:
    """Each task runs once, after all its edges, no lane overlaps itself, fifo lanes keep their order."""
    ran: list[str] = []
    with LaneThreads(schedule, lambda task, iteration: ran.append(task.id.at(iteration))) as lanes:
        for _ in range(iterations):
            lanes.admit()
    assert len(set(ran)) == len(ran) == iterations * len(schedule.tasks)
    # Which of two ready tasks a priority lane sees first depends on the instant; edges and exclusion do not.
    assert [fault for fault in check_trace(lanes.trace()) if "more urgent" not in fault] == []
    assert lanes_alive() == []


def test_late_admission_waits_for_nothing_that_is_over() -> None:
    """An iteration that is admitted when the one before has ended long ago runs all the same."""
    with LaneThreads(RING, nothing) as lanes:
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

    with LaneThreads(RING, action) as lanes:
        lanes.admit()
        lanes.wait(parse_task_id("F1"), 0)  # returns although U0 is still at work
        gate.set()


@pytest.mark.parametrize(
    ("task", "state"),
    [
        ("F0", "All parameters are from step 0, the last complete one"),
        ("G0", "All parameters are from step 0, the last complete one"),
        (
            "U0",
            "Parameters are from different steps (updated in part by step 1: block 0): load a saved state to continue from a "
            "complete step",
        ),
        ("H0", "All parameters are from step 1, the last complete one"),
    ],
)
def test_a_failure_reaches_the_caller_with_its_name(task: str, state: str) -> None:
    """An exception in any lane is raised where the caller waits, names the task and the state, and ends all threads."""

    def action(performed: Task, iteration: int) -> None:
        if performed.id.at(iteration) == f"{task}@1":
            raise ValueError("no such luck")

    lanes = LaneThreads(RING, action)
    begin = time.perf_counter()
    said = re.escape(f"{task}@1 failed: ValueError: no such luck. {state}")
    with pytest.raises(TaskError, match=f"^{said}$") as caught, lanes:
        for _ in range(50):
            lanes.admit()
    assert isinstance(caught.value.__cause__, ValueError)
    assert lanes_alive() == []
    assert time.perf_counter() - begin < 10  # at once, not at some time-out


#: F0 of an iteration fails while U0 of the one before is still at work.
OVERLAPPING = parse_schedule(
    "autohete-schedule 2\nlane gpu fifo\nlane cpu priority\ntask F0 gpu 1\ntask F1 gpu 1\n"
    "task U1 cpu 1 after=F1\ntask U0 cpu 1 after=F0,U1\n"
)


@pytest.mark.parametrize("also_fails", [False, True])
def test_tasks_of_earlier_iterations_end_before_a_failure_is_told(also_fails: bool) -> None:
    """What an iteration before the failed one has left to do is done first, and a second failure there is told, too."""
    failed, ran = threading.Event(), []

    def action(task: Task, iteration: int) -> None:
        name = task.id.at(iteration)
        if name == "F0@1":
            failed.set()
            raise ValueError("the first")
        if name == "U1@0":
            assert failed.wait(10)
            time.sleep(0.05)
        if also_fails and name == "U0@0":
            raise ValueError("the second")
        ran.append(name)

    state = (
        "; then U0@0 failed: ValueError: the second. Parameters are from different steps (step 0: block 1; "
        "updated in part by step 0: block 0): load a saved state to continue from a complete step"
        if also_fails
        else ". All parameters are from step 0, the last complete one"
    )
    with (
        pytest.raises(TaskError, match=f"^{re.escape(f'F0@1 failed: ValueError: the first{state}')}$"),
        LaneThreads(OVERLAPPING, action) as lanes,
    ):
        for _ in range(3):
            lanes.admit()
        lanes.drain()
    assert ran == ["F0@0", "F1@0", "U1@0", *["U0@0"] * (not also_fails)]
    assert lanes.progress.updated(0) == [0, 1]
    assert lanes.progress.updated(1) == []


@settings(max_examples=50)
@given(schedules(), st.integers(1, 4), st.data())
def test_any_failure_leaves_earlier_iterations_complete(schedule: Schedule, iterations: int, data: st.DataObject) -> None:
    """Whichever tasks fail: those of iterations before the earliest of them all run, and the caller hears of it."""
    count = len(schedule.tasks)
    fails = data.draw(st.sets(st.integers(0, iterations * count - 1), min_size=1, max_size=3))
    names = {schedule.tasks[instance % count].id.at(instance // count) for instance in fails}
    ran: list[str] = []

    def action(task: Task, iteration: int) -> None:
        ran.append(task.id.at(iteration))
        if ran[-1] in names:
            raise ValueError

    with pytest.raises(TaskError) as caught, LaneThreads(schedule, action) as lanes:
        for _ in range(iterations):
            lanes.admit()
    assert lanes_alive() == []
    assert names.intersection(ran) == set(re.findall(r"(\S+) failed: ValueError", str(caught.value)))
    earliest = min(int(name.partition("@")[2]) for name in names.intersection(ran))
    assert {task.id.at(i) for task in schedule.tasks for i in range(earliest)} <= set(ran)
    assert len(set(ran)) == len(ran)


def test_an_error_of_the_caller_completes_what_was_admitted() -> None:
    """Leaving the block by an exception ends the lanes when the iterations that were admitted are complete."""
    ran = []

    def action(task: Task, iteration: int) -> None:
        time.sleep(0.01)
        ran.append(task)

    with pytest.raises(KeyError), LaneThreads(RING, action) as lanes:
        lanes.admit()
        lanes.admit()
        raise KeyError
    assert len(ran) == 2 * len(RING.tasks)
    assert lanes_alive() == []


def test_a_failure_that_was_not_told_is_a_note_on_the_callers_error() -> None:
    """An error of the caller keeps its place, and says what else has failed."""

    def action(task: Task, iteration: int) -> None:
        if str(task.id) == "U0":
            raise ValueError("no such luck")

    with pytest.raises(KeyError) as caught, LaneThreads(RING, action) as lanes:
        lanes.admit()
        raise KeyError
    (note,) = caught.value.__notes__
    assert note.startswith("U0@0 failed: ValueError: no such luck. Parameters are from different steps")


def test_an_interrupt_of_closing_abandons_what_was_admitted() -> None:
    """A second interrupt, while the first one's clean-up waits, begins no further task and says where that leaves the model."""
    ran = []

    def action(task: Task, iteration: int) -> None:
        if task.id.at(iteration) == "F0@3":
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.02)
        ran.append(task.id.at(iteration))

    with pytest.raises(KeyboardInterrupt) as caught, LaneThreads(RING, action) as lanes:
        for _ in range(100):
            lanes.admit()
        raise KeyboardInterrupt  # the first one
    assert lanes_alive() == []
    assert len(ran) < 10 * len(RING.tasks)
    assert caught.value.__notes__ == ["All parameters are from step 2, the last complete one"]
    assert "U0@2" in ran
    assert "U0@3" not in ran


@pytest.mark.parametrize(
    "where",
    [
        *(f"lane_run.LaneRun.{name}" for name in ("complete", "next")),
        *(f"pacing.Pace.{name}" for name in ("_share", "_sleep_until")),
        "lanes.torch.set_num_threads",
        "device.EmulatedDevice.stream",
        "device.EmulatedDevice.ended_ns",
    ],
)
def test_no_fault_of_a_lane_is_a_hang(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a lane's own bookkeeping reaches the caller as a task's does, and ends all threads."""

    def broken(*_: object) -> NoReturn:
        raise ArithmeticError("broken")

    monkeypatch.setattr(f"autohete.runtime.{where}", broken)
    ahead = where.endswith(("stream", "ended_ns"))  # where lanes have streams
    monkeypatch.setattr(EmulatedDevice, "runs_ahead", ahead)
    shared = parse_schedule(f"{RING}flow h2d 1.0 1.0\nflow d2h 1.0 1.0\nshare dram 1.0 h2d,d2h\n")
    schedule = shared if where.endswith("_share") else RING
    begin = time.perf_counter()
    with (
        pytest.raises(TaskError, match=r"^lane \w+ failed: ArithmeticError: broken") as caught,
        LaneThreads(schedule, nothing, Execution(paced=not ahead)) as lanes,
    ):
        for _ in range(3):
            lanes.admit()
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert lanes_alive() == []
    assert time.perf_counter() - begin < 10


def test_a_system_without_threads_is_an_error_that_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not all lanes can start, those that have are ended."""
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "autohete-d2h":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    before = sys.getswitchinterval()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        LaneThreads(RING, nothing)
    assert lanes_alive() == []
    assert sys.getswitchinterval() == before


def test_the_switch_interval_is_restored_by_the_last_lanes() -> None:
    """Lanes that overlap leave Python's switch interval as the first of them has found it."""
    before = sys.getswitchinterval()
    first, second = (LaneThreads(RING, nothing) for _ in range(2))
    first.close()
    assert sys.getswitchinterval() < before
    first.close()
    second.close()
    assert sys.getswitchinterval() == before


def test_closed_lanes_take_nothing() -> None:
    """Admitting and waiting after the end are refused."""
    with LaneThreads(RING, nothing) as lanes:
        lanes.admit()
    with pytest.raises(InputError, match="the lanes are closed: create new ones"):
        lanes.admit()
    with pytest.raises(InputError, match="the lanes are closed: create new ones"):
        lanes.drain()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"paced": "off"}, "paced is 'off': give True or False"),
        ({"threads": {"cpu": True}}, "threads of lane cpu is True: give a whole number"),
        ({"threads": {"cpu": 0}}, "threads of lane cpu is 0: give at least 1"),
        ({"history": 2.5}, "history is 2.5: give a whole number"),
        ({"history": 0}, "history is 0: give at least 1"),
    ],
    ids=str,
)
def test_arguments_of_lanes_are_checked(argument: dict[str, Any], message: str) -> None:
    """Switches and counts are no strings that are merely true, and a refusal starts no thread."""
    with pytest.raises(InputError, match=message):
        LaneThreads(RING, nothing, Execution(**argument))
    assert lanes_alive() == []


@pytest.mark.parametrize(
    ("argument", "message"),
    [({"paced": "no"}, "paced is 'no': give True or False"), ({"budget": 0}, "budget is 0: give True or False")],
    ids=str,
)
def test_arguments_of_the_executor_are_checked(argument: dict[str, Any], message: str) -> None:
    """Its switches are True or False, and it runs a whole number of iterations."""
    with pytest.raises(InputError, match=message):
        TorchExecutor(model_for(SMALL), iter(()), Recipe(), Execution(**argument))
    executor = TorchExecutor(model_for(SMALL), iter(()))
    for iterations in (0, True, 1.0):
        with pytest.raises(InputError, match=f"iterations is {iterations}: give "):
            executor.run(RING, iterations)  # type: ignore[arg-type]


def test_an_invalid_schedule_starts_no_thread() -> None:
    """What cannot be executed is refused before any lane exists."""
    broken = parse_schedule("autohete-schedule 2\nlane gpu fifo\ntask F0 gpu 1 after=F1\ntask F1 gpu 1 after=F0\n")
    with pytest.raises(ScheduleError, match="cycle"):
        LaneThreads(broken, nothing)
    assert lanes_alive() == []


def test_paced_tasks_end_no_earlier_than_planned() -> None:
    """A paced run takes at least the time that its schedule takes, and follows it in order."""
    slow = parse_schedule(
        "autohete-schedule 2\nlane gpu fifo\nlane cpu fifo\ntask F0 gpu 2000000 after=U0@-1\ntask U0 cpu 3000000 after=F0\n"
    )
    with LaneThreads(slow, nothing, Execution(paced=True)) as lanes:
        for _ in range(10):
            lanes.admit()
    assert lanes.trace().makespan_seconds >= 10 * 0.005
    assert check_trace(lanes.trace()) == []


@pytest.mark.parametrize("sharing", ["", "flow gpu 1.0 1.0\nshare dram 1.0 gpu\n"], ids=["alone", "shared"])
def test_a_paced_task_that_takes_too_long_is_told_with_how_much(sharing: str) -> None:
    """Work that outlasts the duration of its task is in ``late`` by the time that it took beyond that."""
    slow = parse_schedule(f"autohete-schedule 2\nlane gpu fifo\ntask F0 gpu 20000000\n{sharing}")

    def work(task: Task, iteration: int) -> None:
        time.sleep(0.06 if iteration == 1 else 0)

    with LaneThreads(slow, work, Execution(paced=True)) as lanes:
        for _ in range(3):
            lanes.admit()
    assert lanes.late["F0@1"] >= 40_000_000
    assert all(nanoseconds > 0 for nanoseconds in lanes.late.values())


def test_the_executor_trains() -> None:
    """Behind the seam of both executors stands the same training, to the bit."""
    profile = profile_of(SMALL)
    schedule = lower(profile, parse_policy("zero_offload").plan(profile, judge_for(profile)))
    executor = TorchExecutor(model_for(SMALL), iter(batches(SMALL, 3)))
    torch.manual_seed(2)
    trace = executor.run(schedule, 3)
    plain = train_plainly(SMALL, 3)
    assert executor.result.losses == plain.losses
    assert all(torch.equal(a, b) for a, b in zip(executor.result.parameters, plain.parameters, strict=True))
    assert trace.clock is Clock.MEASURED_CPU
    assert check_trace(trace) == []


def test_too_few_batches_are_refused() -> None:
    """Running out of data is an error that says how much there was, and ends the lanes."""
    profile = profile_of(SMALL)
    schedule = lower(profile, parse_policy("resident").plan(profile, judge_for(profile)))
    with pytest.raises(InputError, match="3 iterations need 3 batches, but there are 1"):
        TorchExecutor(model_for(SMALL), iter(batches(SMALL, 1))).run(schedule, 3)
    assert lanes_alive() == []
