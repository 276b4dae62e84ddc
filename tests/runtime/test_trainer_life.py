"""A Trainer's life: whatever ends it, the model comes back of a known step, and nothing is left running."""

from __future__ import annotations

import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.measured import MEDIUM, profile_for
from support.reference import batches, lanes_alive, model_for, train_plainly
from support.said import said
from torch import Tensor, nn

from autohete import Trainer
from autohete.errors import DeviceOutOfMemoryError, InputError, NonFiniteLossError, TaskError
from autohete.hardware import load_hardware
from autohete.profile.profile_file import read_profile
from autohete.runtime.actions import Actions
from autohete.runtime.losses import next_token_loss
from autohete.runtime.partition import partition
from autohete.runtime.torch_executor import TorchExecutor
from autohete.schedule import Kind, Task
from autohete.train.measured import measured_profile_on
from autohete.train.worker import Worker

pytestmark = pytest.mark.slow

STEPS = 3
UPDATES = (Kind.GPU_UPDATE, Kind.CPU_UPDATE)
#: Each with a budget that makes it move what it can.
POLICIES = {
    "autohete": "40%",
    "stronghold:window=1": "60%",
    "zero_offload": None,
    "resident": None,
    "twin_flow:ratio=50,sub_group_size=100000,bucket_size=1": None,
}


@cache
def after(steps: int) -> list[list[Tensor]]:
    """The parameters of each block after so many steps of plain training, embedding first."""
    parameters = iter(train_plainly(MEDIUM, steps).parameters)
    return [[next(parameters) for _ in owned] for owned in partition(model_for(MEDIUM)).owned]


def blocks_of(model: nn.Module) -> list[list[Tensor]]:
    """The parameters of each block now."""
    return [[parameter.detach() for parameter in owned] for owned in partition(model).owned]


def same(block: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two blocks are bitwise equal."""
    return all(torch.equal(a, b) for a, b in zip(block, other, strict=True))


def trainer_for(model: nn.Module, policy: str) -> Trainer:
    """A trainer that need not measure."""
    return Trainer(model, policy=policy, gpu_memory=POLICIES[policy], profile=profile_for(MEDIUM))


def failing(task: str, fail: Callable[[], NoReturn]) -> Callable[[Actions, Task, int], None]:
    """What performs tasks, but for one instance such as ``F2@1``, which fails."""
    perform = Actions.act

    def perform_or_fail(actions: Actions, one: Task, iteration: int) -> None:
        if one.id.at(iteration) == task:
            fail()
        perform(actions, one, iteration)

    return perform_or_fail


@cache
def tasks_of(policy: str) -> list[Task]:
    """The tasks of an iteration."""
    with trainer_for(model_for(MEDIUM), policy) as trainer:
        return list(trainer.prepare(batches(MEDIUM, 1)[0]).schedule.tasks)


@settings(max_examples=40)
@given(st.sampled_from(list(POLICIES)), st.integers(0, STEPS - 1), st.booleans(), st.data())
def test_after_any_failure_each_block_is_of_the_step_that_is_said(
    policy: str, iteration: int, before: bool, data: st.DataObject
) -> None:
    """An error in any task, before or after its work, leaves every block bitwise at the step that the error names for it."""
    model, perform = model_for(MEDIUM), Actions.act
    failed = data.draw(st.sampled_from(tasks_of(policy)), "task")

    def failing(actions: Actions, task: Task, at: int) -> None:
        fails = task.id == failed.id and at == iteration
        if fails and before:
            raise ValueError("no such luck")
        perform(actions, task, at)
        if fails:
            raise ValueError("no such luck")

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(TaskError, match=f"^{failed.id}@{iteration} failed: ValueError: no such luck. ") as caught,
        trainer_for(model, policy) as trainer,
    ):
        patch.setattr(Actions, "act", failing)
        torch.manual_seed(2)
        for batch in batches(MEDIUM, STEPS):
            trainer.step(batch)
    assert lanes_alive() == []
    message, found = str(caught.value), blocks_of(model)
    expected = said(message, len(found))
    assert all(same(found[i], after(steps)[i]) for i, steps in expected.items())
    missing = set(range(len(found))) - expected.keys()
    gpu, cpu = ({task.id.unit for task in tasks_of(policy) if task.id.kind is kind} for kind in UPDATES)
    assert all(f"updated in part by step {iteration}: block {block}" in message for block in missing)
    assert all(not same(found[i], after(steps)[i]) for i in missing & gpu & cpu - {failed.id.unit} for steps in range(STEPS))
    if failed.id.kind in UPDATES:  # here all of it was done, or nothing
        assert failed.id.unit in missing <= {failed.id.unit} | gpu & cpu
        if failed.id.unit not in gpu & cpu:
            assert same(found[failed.id.unit], after(iteration + (not before))[failed.id.unit])
    else:
        assert missing <= gpu & cpu


@pytest.mark.parametrize("policy", POLICIES)
def test_an_error_of_the_caller_leaves_the_last_step(policy: str) -> None:
    """An exception between two steps, while the last one's updates are under way, leaves the model after that step."""
    model = model_for(MEDIUM)
    with pytest.raises(KeyError), trainer_for(model, policy) as trainer:
        torch.manual_seed(2)
        for batch in batches(MEDIUM, STEPS):
            trainer.step(batch)
        raise KeyError
    assert all(map(same, blocks_of(model), after(STEPS)))
    assert lanes_alive() == []


def test_a_failure_that_an_interrupt_hid_is_told_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that fails when the caller has been interrupted already is a note on the interrupt, with the state."""
    model = model_for(MEDIUM)

    def fail() -> NoReturn:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        raise ValueError("no such luck")

    with pytest.raises(KeyboardInterrupt) as caught, trainer_for(model, "resident") as trainer:
        monkeypatch.setattr(Actions, "act", failing("F2@1", fail))
        torch.manual_seed(2)
        for batch in batches(MEDIUM, STEPS):
            trainer.step(batch)
    (note,) = caught.value.__notes__
    assert note == "F2@1 failed: ValueError: no such luck. All parameters are from step 0, the last complete one"
    assert all(map(same, blocks_of(model), after(1)))
    assert lanes_alive() == []


def test_a_failure_is_told_once() -> None:
    """Closing says what has failed if no call has, and nothing if one has."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        if armed:
            raise ValueError("no such luck")
        return next_token_loss(logits, targets)

    for told in (True, False):
        armed = False
        trainer = Trainer(model_for(MEDIUM), policy="resident", profile=profile_for(MEDIUM), loss=loss)
        trainer.prepare(batches(MEDIUM, 1)[0])
        armed = True
        if told:
            for use in (partial(trainer.step, batches(MEDIUM, 1)[0]), trainer.parameters):
                with pytest.raises(TaskError, match=r"^L5@0 failed: ValueError: no such luck. No parameter has been changed$"):
                    use()
        else:
            trainer._held.running().session.lanes.admit()
            with pytest.raises(TaskError, match=r"^F0@0 failed: KeyError: \(0, 0\). No parameter has been changed$"):
                trainer.close()
        trainer.close()
    assert lanes_alive() == []


def test_a_skipped_step_says_what_has_been_changed() -> None:
    """That no parameter has been changed is said only where it is so; delayed updates take the gradients of the step before."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(logits, targets) * (torch.nan if next(calls) == 4 else 1.0)  # the first two are a probe's

    for policy, changed in (
        ("zero_offload", r"No parameter has been changed by this step;"),
        ("zero_offload:delayed_update", r"No parameter .* this step \(blocks 0 to 5: by the gradients of the step before, as"),
    ):
        calls = iter(range(10))
        with Trainer(model_for(MEDIUM), policy=policy, profile=profile_for(MEDIUM), loss=loss) as trainer:
            for batch in batches(MEDIUM, 2):
                trainer.step(batch)
            before = trainer.parameters()
            assert trainer._held.running().changed_by(
                1
            ) == "This step has updated blocks 0 to 5: load a saved state to continue from a complete step" or (
                "delayed" in policy
            )
            with pytest.raises(NonFiniteLossError, match=changed):
                trainer.step(batches(MEDIUM, 1)[0])
            unchanged = all(map(torch.equal, before, trainer.parameters()))
            assert unchanged == (policy == "zero_offload")


def test_out_of_memory_says_which_step_the_model_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that a task passes is an error that keeps its fields and says which step is complete."""
    model = model_for(MEDIUM)

    def fail() -> NoReturn:
        raise DeviceOutOfMemoryError("F2@2: gpu memory is full", "F2@2", 8, 4, {})

    with pytest.raises(DeviceOutOfMemoryError) as caught, trainer_for(model, "resident") as trainer:
        monkeypatch.setattr(Actions, "act", failing("F2@2", fail))
        torch.manual_seed(2)
        for batch in batches(MEDIUM, STEPS):
            trainer.step(batch)
    assert str(caught.value) == "F2@2: gpu memory is full. All parameters are from step 1, the last complete one"
    assert (caught.value.task, caught.value.size_bytes, caught.value.capacity_bytes) == ("F2@2", 8, 4)
    assert all(map(same, blocks_of(model), after(2)))


def test_the_callers_threads_change_no_bit() -> None:
    """Whatever number of threads the caller has set, the lanes compute in one each."""
    expected = after(STEPS)
    model = model_for(MEDIUM)
    torch.set_num_threads(2)
    try:
        with trainer_for(model, "resident") as trainer:
            torch.manual_seed(2)
            for batch in batches(MEDIUM, STEPS):
                trainer.step(batch)
    finally:
        torch.set_num_threads(1)
    assert all(map(same, blocks_of(model), expected))


# --- one model, one trainer ---------------------------------------------------------------------------------------


def trained(model: nn.Module, steps: int) -> list[list[Tensor]]:
    """The blocks of ``model`` after training on the first batch only."""
    with trainer_for(model, "stronghold:window=1") as trainer:
        torch.manual_seed(2)
        for _ in range(steps):
            trainer.step(batches(MEDIUM, 1)[0])
    return blocks_of(model)


class _Shell(nn.Module):
    """A model around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(ids)
        return logits


class _Borrower(nn.Module):
    """A model of its own whose embedding is another one's."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.inner = model_for(MEDIUM)
        self.inner.embedding = other.embedding

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(ids)
        return logits


@pytest.mark.parametrize("around", [lambda model: model, _Shell, _Borrower], ids=["same", "shell", "shared"])
def test_a_model_has_one_trainer(around: Callable[[nn.Module], nn.Module]) -> None:
    """A model in training, or one that shares a parameter with it, is refused by whatever would take it over, until then."""
    model = model_for(MEDIUM)
    other = around(model)
    batch = batches(MEDIUM, 1)[0]
    with trainer_for(model, "stronghold:window=1") as trainer:
        torch.manual_seed(2)
        trainer.step(batch)
        for attempt in (
            lambda: Trainer(other, policy="resident").step(batch),
            lambda: measured_profile_on(load_hardware("a100-40gb-epyc7713"), other, batch),
            lambda: TorchExecutor(other, iter([batch])).run(trainer.prediction.schedule, 1),  # type: ignore[union-attr]
        ):
            with pytest.raises(InputError, match=r"is already being trained, or shares \S+ with a model that is: close that"):
                attempt()
        trainer.step(batch)
    assert all(map(same, blocks_of(model), trained(model_for(MEDIUM), 2)))
    Trainer(other, policy="resident", profile=profile_for(MEDIUM)).close()
    with Trainer(other, policy="resident", profile=profile_for(MEDIUM)) as after_it:
        after_it.step(batch)
    assert lanes_alive() == []


def test_a_trainer_is_used_once() -> None:
    """Entering it twice, or using it when it is closed, is refused; closing it again does nothing."""
    batch = batches(MEDIUM, 1)[0]
    trainer = trainer_for(model_for(MEDIUM), "resident")
    with trainer:
        with pytest.raises(InputError, match="already in a with statement"), trainer:
            pass
        trainer.step(batch)
    for use in (
        lambda: trainer.step(batch),
        lambda: trainer.prepare(batch),
        lambda: trainer.evaluate([batch]),
        trainer.parameters,
        trainer.trace,
        trainer.__enter__,
    ):
        with pytest.raises(InputError, match="the trainer is closed"):
            use()
    trainer.close()
    unused = trainer_for(model_for(MEDIUM), "resident")
    unused.close()
    unused.close()
    with pytest.raises(InputError, match="the trainer is closed"):
        unused.step(batch)
    assert lanes_alive() == []


def test_two_threads_may_step() -> None:
    """Steps of several threads are done one after another: as many steps in one thread give the same bits."""
    model, batch = model_for(MEDIUM), batches(MEDIUM, 1)[0]
    with trainer_for(model, "stronghold:window=1") as trainer:
        trainer.prepare(batch)
        torch.manual_seed(2)
        threads = [threading.Thread(target=lambda: [trainer.step(batch) for _ in range(3)]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(map(same, blocks_of(model), trained(model_for(MEDIUM), 6)))


@pytest.mark.parametrize("seed", range(5))
def test_closing_while_others_step(seed: int) -> None:
    """Closed by another thread at any time, a step ends or says so, and the model is of the last step that ended."""
    model, batch = model_for(MEDIUM), batches(MEDIUM, 1)[0]
    trainer = trainer_for(model, "stronghold:window=1")
    losses: list[float] = []
    refusals: list[str] = []

    def step() -> None:
        try:
            while True:
                losses.append(trainer.step(batch))
        except InputError as error:
            refusals.append(str(error))

    torch.manual_seed(2)
    threads = [threading.Thread(target=step)] + [threading.Thread(target=trainer.close) for _ in range(2)]
    threads[0].start()
    time.sleep(random.Random(seed).uniform(0, 0.5))
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert refusals
    assert refusals[0].startswith(("the trainer is closed", "the trainer was closed during profiling or planning"))
    assert lanes_alive() == []
    assert all(map(same, blocks_of(model), trained(model_for(MEDIUM), len(losses)) if losses else after(0)))


def test_closing_stops_measuring() -> None:
    """Closed by another thread while it measures, it stops soon, and the model is as before."""
    model = model_for(MEDIUM)
    trainer = Trainer(model)
    said: list[str] = []

    def prepare() -> None:
        try:
            trainer.prepare(batches(MEDIUM, 1)[0])
        except InputError as error:
            said.append(str(error))

    thread = threading.Thread(target=prepare)
    thread.start()
    time.sleep(0.5)
    begin = time.perf_counter()
    trainer.close()
    thread.join()
    assert said == ["the trainer was closed during profiling or planning: nothing has been trained"]
    assert time.perf_counter() - begin < 5
    assert all(map(same, blocks_of(model), after(0)))
    assert lanes_alive() == []


def test_a_trainer_does_not_wait_for_itself() -> None:
    """Used by the loss that it calls, it is refused with a reason instead of waiting for ever."""
    model = model_for(MEDIUM)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        trainer.parameters()
        return next_token_loss(logits, targets)

    trainer = Trainer(model, policy="resident", profile=profile_for(MEDIUM), loss=loss)
    with pytest.raises(InputError, match=r"^the trainer is called from within its own step"), trainer:
        trainer.step(batches(MEDIUM, 1)[0])
    assert all(map(same, blocks_of(model), after(0)))


@pytest.mark.parametrize(
    "where",
    [
        *(f"train.preparation.{name}" for name in ("observed", "measure", "simulate_safely")),
        "train.training_run.Session",
        "runtime.session.Takeover",
        "runtime.session.LaneThreads",
        "policies.resident.Resident.plan",
    ],
)
def test_a_failure_of_preparing_leaves_the_model(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of preparing fails, the model computes as before, and the same trainer can try again."""

    def broken(*_: object, **__: object) -> NoReturn:
        raise ArithmeticError("broken")

    model, batch = model_for(MEDIUM), batches(MEDIUM, 1)[0]
    profile = None if where.endswith("measure") else profile_for(MEDIUM)
    trainer = Trainer(model, policy="resident", profile=profile, hardware=load_hardware("a100-40gb-epyc7713"))
    with monkeypatch.context() as patch:
        patch.setattr(f"autohete.{where}", broken)
        with pytest.raises(ArithmeticError, match="broken"):
            trainer.step(batch)
        assert lanes_alive() == ["autohete-trainer"]
    assert all(map(same, blocks_of(model), after(0)))
    assert model(batch[0]).isfinite().all()
    torch.manual_seed(2)
    with trainer:
        trainer.step(batches(MEDIUM, 1)[0])
    assert lanes_alive() == []


# --- dropped, and at the end of Python ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deleted", "cycle", "own lane"])
def test_a_dropped_trainer_gives_the_model_back(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that nobody closes completes its step, ends its threads, gives the model back, and is warned of."""
    model, perform = model_for(MEDIUM), Actions.act
    held: list[Any] = []
    dropped = threading.Event()

    def performing(actions: Actions, task: Task, iteration: int) -> None:
        perform(actions, task, iteration)
        if task.id.at(iteration) == "B2@1" and how == "own lane":
            assert dropped.wait(10)
            held.clear()  # the last reference
            gc.collect()

    trainer = trainer_for(model, "stronghold:window=1")
    monkeypatch.setattr(Actions, "act", performing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        torch.manual_seed(2)
        for _ in range(2):
            trainer.step(batches(MEDIUM, 1)[0])
        held.append(trainer)
        if how == "cycle":
            held.append(held)
        del trainer
        dropped.set()
        if how == "deleted":
            held.clear()
        elif how == "cycle":
            del held
            gc.collect()
        if how != "own lane":
            assert lanes_alive() == []
        deadline = time.perf_counter() + 10
        while lanes_alive() and time.perf_counter() < deadline:
            time.sleep(0.01)
    assert lanes_alive() == []
    assert [str(w.message) for w in caught if w.category is ResourceWarning] == [
        "a Trainer was never closed: use it in a with statement, or call close()"
    ]
    monkeypatch.undo()
    assert all(map(same, blocks_of(model), trained(model_for(MEDIUM), 2)))


#: What a program begins with: a model, and a profile of it, so that it need not measure.
BEGIN = """
import atexit, os, pickle, random, signal, sys, threading, time
import torch
from support.reference import batches, model_for
from support.measured import MEDIUM
from autohete import Trainer
from autohete.errors import InputError

profile = pickle.loads(sys.stdin.buffer.read())
model = model_for(MEDIUM)
data = batches(MEDIUM, 4)

def trainer_of(model, policy="stronghold:window=1"):
    return Trainer(model, policy=policy, profile=profile)

def blocks(model):
    return [parameter.detach().clone() for parameter in model.parameters()]
"""
TESTS = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}


def program(code: str) -> tuple[int, list[str], list[str]]:
    """Run ``BEGIN`` and ``code`` in a process of its own; exit code and lines of stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", f"{BEGIN}\n{code}"],
        input=pickle.dumps(profile_for(MEDIUM)),
        capture_output=True,
        check=False,
        timeout=120,
        env=ENVIRONMENT,
    )
    return done.returncode, done.stdout.decode().splitlines(), done.stderr.decode().splitlines()


@pytest.mark.parametrize(
    ("end", "code", "last_line"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("raise KeyError('lost')", 1, "KeyError: 'lost'"),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(10)", -signal.SIGINT, "KeyboardInterrupt"),
        ("trainer = None", 0, ""),
        ("trainer.self = trainer; del trainer; sys.exit(4)", 4, ""),
    ],
)
def test_python_ends_with_an_open_trainer(end: str, code: int, last_line: str) -> None:
    """However a program ends that has not closed its trainer: with its own exit code, at once, and the model given back."""
    code_, said, complaint = program(
        "check = lambda: print(all(p.isfinite().all() and p.numel() > 1 for p in model.parameters()), flush=True)\n"
        "atexit.register(check)\n"
        "trainer = trainer_of(model)\n"
        "for batch in data: trainer.step(batch)\n" + end
    )
    assert (code_, said) == (code, ["True"]), complaint
    assert complaint[-1:] == ([last_line] if last_line else [])


# --- forks --------------------------------------------------------------------------------------------------------


def test_a_forked_child_is_refused() -> None:
    """In a fork every use is an error in one line, its end hangs nowhere, and the parent trains on to the same bits."""
    code, said, complaint = program(
        """
trainer = trainer_of(model)

def child(end):
    for use in (lambda: trainer.step(data[0]), lambda: trainer.prepare(data[0]), lambda: trainer.evaluate(data),
                trainer.parameters, trainer.trace, trainer.close):
        try: use()
        except InputError as error: assert "is a fork of" in str(error) and "\\n" not in str(error), error
        else: print("taken", use, flush=True)
    if end == "hard": os._exit(5)
    if end == "exit": sys.exit(5)
    if end == "leave": raise InputError("leave")

def forked(end):
    pid = os.fork()
    if not pid: child(end)
    else:
        deadline = time.time() + 20
        while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            assert time.time() < deadline, f"{end}: hangs"
            time.sleep(0.01)
        print(end, os.waitstatus_to_exitcode(found[1]), flush=True)

class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return data[i]

try:
    with trainer:
        trainer.prepare(data[0])
        torch.manual_seed(2)
        trainer.step(data[0])
        for end in ("hard", "exit", "leave"): forked(end)
        for batch in torch.utils.data.DataLoader(Data(), batch_size=None, num_workers=2, generator=torch.Generator()):
            trainer.step(batch)
except InputError as error:
    os._exit(6 if str(error) == "leave" else 7)
found = blocks(model)
model = model_for(MEDIUM)
with trainer_of(model, "resident") as other:
    other.prepare(data[0])
    torch.manual_seed(2)
    for batch in (data[0], *data): other.step(batch)
print(all(map(torch.equal, found, blocks(model))))
"""
    )
    assert (code, said, complaint) == (0, ["hard 5", "exit 5", "leave 6", "True"], [])


class InterruptedQueue(SimpleQueue[Any]):
    """Whoever first puts something in is interrupted, just before or just after."""

    def __init__(self, before: bool) -> None:
        self.before, self.first = before, True

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        interrupted, self.first = self.first, False
        if not (interrupted and self.before):
            super().put(item)
        if interrupted:
            raise KeyboardInterrupt


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_while_a_job_is_handed_over_loses_nothing(before: bool) -> None:
    """The job is done once, the interrupt is raised afterwards, and the next job is done, too."""
    worker, done = Worker("handed over", "it has ended"), list[int]()
    worker._jobs = InterruptedQueue(before)
    with pytest.raises(KeyboardInterrupt):
        worker.do(lambda: done.append(1), lambda: None)
    assert done == [1]
    assert worker.do(lambda: len(done)) == 1
    worker.end()
    with pytest.raises(InputError, match="it has ended"):
        worker.do(lambda: done.append(2))
    assert done == [1]


# --- signals ------------------------------------------------------------------------------------------------------


def test_an_interrupt_of_preparing_leaves_everything_as_before() -> None:
    """Interrupted at any moment of measuring or planning: one KeyboardInterrupt, soon, the model as before, no thread left."""
    code, said, complaint = program(
        """
before, moments, begin = blocks(model), random.Random(0), time.perf_counter()
with Trainer(model) as trainer:
    trainer.prepare(data[0])
whole = time.perf_counter() - begin
for _ in range(5):
    due = [0.0]
    def interrupt():
        due[0] = time.perf_counter()
        os.kill(os.getpid(), signal.SIGINT)
    timer = threading.Timer(moments.uniform(0, whole), interrupt)
    try:
        with Trainer(model) as trainer:
            timer.start()
            trainer.prepare(data[0])
            timer.join()
    except KeyboardInterrupt:
        took = time.perf_counter() - due[0]
        assert took < 5, took
    timer.join()
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    assert all(map(torch.equal, before, blocks(model)))
    assert model(data[0][0]).isfinite().all()
print("unchanged")
"""
    )
    assert (code, said, complaint) == (0, ["unchanged"], [])


@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interrupt_of_training_leaves_one_step(interrupts: int) -> None:
    """Interrupted at any moment of a step or of closing, the model is of the last step; of the one that is said if twice."""
    code, said, complaint = program(
        f"""
steps = [blocks(model)]
plain = model_for(MEDIUM)
for n in range(1, 7):
    other = model_for(MEDIUM)
    with trainer_of(other, "resident") as trainer:
        trainer.prepare(data[0])
        torch.manual_seed(2)
        for _ in range(n): trainer.step(data[0])
    steps.append(blocks(other))
moments = random.Random(1)
for _ in range(10):
    model = model_for(MEDIUM)
    timers = []
    notes = []
    try:
        with trainer_of(model) as trainer:
            trainer.prepare(data[0])
            torch.manual_seed(2)
            at = moments.uniform(0, 0.3)
            for i in range({interrupts}):
                timers.append(threading.Timer(at + i * 0.01, os.kill, (os.getpid(), signal.SIGINT)))
                timers[-1].start()
            for _ in range(6): trainer.step(data[0])
    except KeyboardInterrupt as error:
        notes = getattr(error, "__notes__", [])
    for timer in timers:
        while timer.is_alive():
            try: timer.join()
            except KeyboardInterrupt: pass
    try: time.sleep(0.05)
    except KeyboardInterrupt: pass
    assert [thread.name for thread in threading.enumerate()] == ["MainThread"], threading.enumerate()
    found = blocks(model)
    whole = [n for n, step in enumerate(steps) if all(map(torch.equal, found, step))]
    assert whole or "Parameters are from different steps" in "".join(notes), notes
    if {interrupts} == 1: assert whole
print("known")
"""
    )
    assert (code, said, complaint) == (0, ["known"], [])


COMMANDS = {"profile": ["profile", "OUT", "--quick"], "train": ["train", "--gpu-memory", "2MiB", "--steps", "2000"]}
SHAPE = ["--hidden", "64", "--blocks", "2", "--heads", "2", "--sequence-length", "32", "--batch-size", "2"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("seed", range(1000 if os.environ.get("AUTOHETE_HYPOTHESIS") == "wide" else 1))
def test_a_signal_ends_a_command_with_one_line(command: str, number: signal.Signals, seed: int, tmp_path: Path) -> None:
    """Whenever it comes while measuring or training: one line, the signal's exit code, no abort, no file half written."""
    words = [str(tmp_path / "out.json") if word == "OUT" else word for word in COMMANDS[command]]
    moment = random.Random(f"{command} {number} {seed}")
    with subprocess.Popen(
        [sys.executable, "-m", "autohete", *words, *SHAPE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        time.sleep(1 + moment.uniform(0, 6))
        process.send_signal(number)
        begin = time.perf_counter()
        _, said = process.communicate(timeout=60)
    assert time.perf_counter() - begin < 10
    word = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[number]
    assert (process.returncode, said) in ((128 + number, f"autohete: {word}\n"), (0, ""), (-number, ""))
    assert [path.name for path in tmp_path.iterdir()] in ([], ["out.json"])
    for path in tmp_path.iterdir():  # it came when all was written
        read_profile(path)
