"""Faults: whatever kind of task fails, at whatever occurrence and in whatever way, training ends with one clear error, nothing
hangs or is left behind, no state is lost, and it can go on from the last checkpoint.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
from support.faults import Fault, State, Undisturbed, same_block, state_of
from support.reference import batches, lanes_alive, model_for
from support.said import said
from support.small import CLIP_NORM, SMALL, STEPS, profile_of
from torch import Tensor, nn

from autohete import Trainer
from autohete.errors import DeviceOutOfMemoryError, InputError, TaskError
from autohete.plan import Activations, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Judge, Policy
from autohete.policies import parse_policy
from autohete.profile import Profile
from autohete.runtime.async_device import AsyncDevice
from autohete.runtime.partition import partition
from autohete.runtime.states import States
from autohete.runtime.units import Memories
from autohete.schedule import COLLECTIVES, HOST_MEMORY, IN_PLACES, TRANSFERS, Kind
from autohete.train.checkpoints import Checkpoint, CheckpointWriter, checkpoints, read_checkpoint
from autohete.train.gpt import BLOCKS
from autohete.train.options import TrainingOptions
from autohete.workload import Precision, Workload
from benchmarks.endurance import Usage, endure

#: An error has to reach the caller within 2 s on an idle machine; tests run on busy ones.
PATIENCE_SECONDS = 30.0
UPDATES = (Kind.GPU_UPDATE, Kind.CPU_UPDATE)


@dataclass(frozen=True, slots=True)
class ByHand:
    """A policy whose plan says what each unit does.

    Args:
        inner: of the blocks between embedding and head.
    """

    inner: tuple[UnitPlan, ...]
    name: str = "by hand"

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        return Plan(self.name, (UnitPlan(), *self.inner, UnitPlan()))


@dataclass(frozen=True, slots=True)
class Mix:
    """What is trained, and how it is planned."""

    policy: Policy
    workload: Workload = SMALL


_ON_CPU = Update(Processor.CPU)
_ACCUMULATED = replace(SMALL, micro_batches=2, clip_norm=CLIP_NORM)
#: Between them they have tasks of every kind, updates that replace gradients, are delayed, or are of two sides.
MIXES = {
    "drive": Mix(
        ByHand(
            (
                UnitPlan(Activations.RECOMPUTE, kept=Route("nvme")),
                UnitPlan(parameters=Route("nvme"), states=Route("nvme")),
                UnitPlan(update=_ON_CPU, states=Route("nvme"), gradients=Route("nvme")),
            )
        )
    ),
    "host": Mix(
        ByHand(
            (
                UnitPlan(gradients=Route(HOST_MEMORY), states=Route(HOST_MEMORY)),
                UnitPlan(update=_ON_CPU, gradients=Route(HOST_MEMORY), kept=Route(HOST_MEMORY)),
                UnitPlan(Activations.RECOMPUTE, parameters=Route(HOST_MEMORY), kept=Route(HOST_MEMORY)),
            )
        ),
        _ACCUMULATED,
    ),
    "window": Mix(parse_policy("stronghold:window=1,checkpointing=full")),
    "layers": Mix(parse_policy("l2l:paper,update_on=gpu"), _ACCUMULATED),
    "in place": Mix(parse_policy("patrickstar"), replace(SMALL, precision=Precision.BF16)),
    "delayed": Mix(parse_policy("zero_offload:delayed_update")),
    "two sides": Mix(parse_policy("twin_flow:ratio=40")),
    "infinity": Mix(parse_policy("zero_infinity"), replace(SMALL, precision=Precision.BF16)),
}


#: On the CPU a task fails before or after its work. On a device that runs ahead it does so while it is issued, when it is done,
#: or, in a lane of the device, in an operation.
WAYS = {"cpu": ("before", "after"), "ahead": ("before", "after", "done", "operation")}


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trainer_for(model: nn.Module, mix: Mix, optimizer: torch.optim.Optimizer) -> Trainer:
    """A trainer that need not measure."""
    return Trainer(
        model,
        policy=mix.policy,
        optimizer=optimizer,
        profile=profile_of(replace(mix.workload, micro_batches=1, clip_norm=None)),
        micro_batches=mix.workload.micro_batches,
        clip_norm=mix.workload.clip_norm,
    )


def data_of(workload: Workload) -> list[tuple[Tensor, Tensor]]:
    """The batch of each step."""
    drawn = iter(batches(workload, STEPS * workload.micro_batches))
    parts = [list(itertools.islice(drawn, workload.micro_batches)) for _ in range(STEPS)]
    return [(torch.cat([ids for ids, _ in some]), torch.cat([targets for _, targets in some])) for some in parts]


@cache
def undisturbed(name: str) -> Undisturbed:
    """The training of a mix, which is ended after each number of steps."""
    mix, losses, states, schedule = MIXES[name], list[float](), list[State](), None
    for steps in range(STEPS + 1):
        model = model_for(mix.workload)
        optimizer = optimizer_for(model)
        with trainer_for(model, mix, optimizer) as trainer:
            schedule = trainer.prepare(data_of(mix.workload)[0]).schedule
            torch.manual_seed(2)
            losses = [trainer.step(batch) for batch in data_of(mix.workload)[:steps]]
        states.append(state_of(model, optimizer))
    assert schedule is not None
    return Undisturbed(schedule, losses, states)


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder with a checkpoint of a mix, written after its first step."""

    @cache
    def folder_of(name: str) -> Path:
        mix, folder = MIXES[name], tmp_path_factory.mktemp("checkpoints")
        model = model_for(mix.workload)
        with trainer_for(model, mix, optimizer_for(model)) as trainer:
            trainer.prepare(data_of(mix.workload)[0])
            torch.manual_seed(2)
            trainer.step(data_of(mix.workload)[0])
            trainer.save(folder)
        return folder

    return folder_of


def occurrences(name: str, kind: Kind) -> list[str]:
    """The first, a middle and the last task of a kind in a run."""
    of_kind = [task.id for task in undisturbed(name).schedule.tasks if task.id.kind is kind]
    every = [task.at(step) for step in range(STEPS) for task in of_kind]
    return [every[0], every[len(every) // 2], every[-1]]


def kinds_of(name: str) -> list[Kind]:
    """The kinds of task of a mix."""
    found = {task.id.kind for task in undisturbed(name).schedule.tasks}
    return [kind for kind in Kind if kind in found]


def check_fault(name: str, device: str, fault: Fault, folder: Path) -> float:
    """Train until ``fault``, check all that is promised, and return the seconds from the fault to the end of the training."""
    mix, plain = MIXES[name], undisturbed(name)
    model, threads = model_for(mix.workload), set(threading.enumerate())
    optimizer, data = optimizer_for(model), data_of(mix.workload)
    ahead = AsyncDevice() if device == "ahead" else None
    on_device = nullcontext() if ahead is None else patch.object(TrainingOptions, "accelerator", ahead)
    with on_device:
        with (
            fault.planted(ahead),
            pytest.raises(TaskError) as caught,
            trainer_for(model, mix, optimizer) as trainer,
        ):
            trainer.prepare(data[0])
            torch.manual_seed(2)
            for batch in data:
                trainer.step(batch)
        took = time.perf_counter() - fault.at
        assert fault.at, "the task has run"
        assert took < PATIENCE_SECONDS
        assert set(threading.enumerate()) == threads
        check_left(model, optimizer, str(caught.value), fault, plain)

    with trainer_for(model, mix, optimizer) as trainer:
        trainer.load(folder)
        losses = [trainer.step(batch) for batch in data[1:]]
    assert losses == plain.losses[1:]
    assert all(map(same_block, state_of(model, optimizer), plain.states[STEPS]))
    assert set(threading.enumerate()) == threads
    return took


def check_left(model: nn.Module, optimizer: torch.optim.Optimizer, message: str, fault: Fault, plain: Undisturbed) -> None:
    """Check what a training that has failed leaves: each block as the error says, with its optimizer states."""
    cause = "(PlantedError|RuntimeError: an operation on the device has failed)"
    assert re.match(rf"{re.escape(fault.instance)} failed: {cause}: no such luck", message), message
    assert message.count("no such luck") == 1, message
    for parameter in model.parameters():
        assert type(parameter) is nn.Parameter
        assert parameter.requires_grad
        assert parameter.grad is None
        assert parameter.isfinite().all()
        assert all(value.isfinite().all() for value in optimizer.state[parameter].values())
    assert len(optimizer.state_dict()["param_groups"][0]["params"]) == len(list(model.parameters()))
    found = state_of(model, optimizer)
    expected = said(message, len(found))
    for block, steps in expected.items():
        assert same_block(found[block], plain.states[steps][block]), (block, steps, message)
    partly = set(range(len(found))) - expected.keys()
    assert all(f"updated in part by step {fault.instance.split('@')[1]}: block {block}" in message for block in partly), message


# --- every kind of task, in every way


@pytest.mark.slow
@pytest.mark.parametrize(("device", "way"), [(device, way) for device, ways in WAYS.items() for way in ways])
def test_a_failed_task_ends_training_with_one_error(device: str, way: str, checkpoint_of: Callable[[str], Path]) -> None:
    """A task in the middle of a run fails: one error that names it, nothing left running, every block and its states as the
    error says, and the bits of an undisturbed training from the last checkpoint on.
    """
    check_fault("window", device, Fault("B2@1", way), checkpoint_of("window"))


@pytest.mark.slow
def test_what_is_left_to_do_on_the_host_is_done(checkpoint_of: Callable[[str], Path]) -> None:
    """Beside a device that runs ahead, what a task of the CPU leaves for when it is done is done, such as checking sums."""
    check_fault("host", "ahead", Fault("A2m1@1", "done"), checkpoint_of("host"))


@pytest.mark.slow
def test_every_kind_of_task_is_in_a_mix() -> None:
    """The runtime knows no other kinds: those of several GPUs and of places that compute are refused."""
    assert {kind for name in MIXES for kind in kinds_of(name)} | {*COLLECTIVES, *TRANSFERS, *IN_PLACES} == set(Kind)


#: Half of the kinds take the first three, the others the rest, in turn.
IN_TURN = [
    *[("cpu", "before"), ("ahead", "done"), ("ahead", "operation")],
    *[("cpu", "after"), ("ahead", "before"), ("ahead", "after")],
]


def cases_of(kind: Kind) -> list[tuple[str, Fault, str]]:
    """Mix, fault and device for a kind at its first, a middle and its last occurrence, in the mixes that have it in turn: in
    every way if tests are wide, else in one each.
    """
    number, names = list(Kind).index(kind), itertools.cycle([name for name in MIXES if kind in kinds_of(name)])
    turn = [[IN_TURN[3 * (number % 2) + (place + number // 2) % 3]] for place in range(3)]
    chosen = [IN_TURN] * 3 if os.environ.get("AUTOHETE_HYPOTHESIS") == "wide" else turn
    cases = []
    for place, ways in enumerate(chosen):
        for device, way in ways:
            name = next(names)
            cases.append((name, Fault(occurrences(name, kind)[place], way), device))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in (*COLLECTIVES, *TRANSFERS, *IN_PLACES)])
def test_every_kind_of_task_may_fail(kind: Kind, checkpoint_of: Callable[[str], Path]) -> None:
    """The same for each kind at its first, a middle and its last occurrence, on both devices."""
    for name, fault, device in cases_of(kind):
        check_fault(name, device, fault, checkpoint_of(name))


# --- memory


def full(*_: object, **__: object) -> NoReturn:
    """What PyTorch raises if the host has no memory."""
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory")


def test_a_device_that_becomes_too_small_is_one_error(checkpoint_of: Callable[[str], Path]) -> None:
    """A budget that others use up is an error that names task and bytes; the model is of the step that it says, and a new
    training goes on.
    """
    mix, plain = MIXES["window"], undisturbed("window")
    model = model_for(mix.workload)
    optimizer, data = optimizer_for(model), data_of(mix.workload)
    with pytest.raises(DeviceOutOfMemoryError) as caught, trainer_for(model, mix, optimizer) as trainer:
        trainer.prepare(data[0])
        torch.manual_seed(2)
        trainer.step(data[0])
        trainer.parameters()
        device = trainer._held.running().session.device
        assert device is not None
        device.capacity_bytes = device.used_bytes + 1000
        trainer.step(data[1])
    assert caught.value.task.endswith("@1")
    assert caught.value.size_bytes > 1000
    found, expected = state_of(model, optimizer), said(str(caught.value), len(plain.states[0]))
    assert len(expected) == len(found)
    assert all(same_block(found[block], plain.states[steps][block]) for block, steps in expected.items())
    with trainer_for(model, mix, optimizer) as trainer:
        trainer.load(checkpoint_of("window"))
        assert [trainer.step(batch) for batch in data[1:]] == plain.losses[1:]


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXES)
def test_a_host_that_is_full_while_taking_over_leaves_the_model(name: str) -> None:
    """Whichever allocation of taking over fails, the model and the optimizer are as before, and the next attempt trains."""
    mix, plain = MIXES[name], undisturbed(name)
    model = model_for(mix.workload)
    optimizer, batch = optimizer_for(model), data_of(mix.workload)[0]
    on_host, allocated, failing = Memories.on_host, 0, 0

    def counting(*args: Any) -> Tensor:
        nonlocal allocated
        allocated += 1
        if allocated == failing:
            full()
        return on_host(*args)

    with patch.object(Memories, "on_host", counting), trainer_for(model, mix, optimizer) as trainer:
        trainer.prepare(batch)
    for chosen in {1, allocated // 2, allocated} - {0}:
        allocated, failing = 0, chosen
        trainer = trainer_for(model, mix, optimizer)
        with patch.object(Memories, "on_host", counting), pytest.raises(RuntimeError, match="can't allocate"):
            trainer.prepare(batch)
        assert all(map(same_block, state_of(model, optimizer), plain.states[0]))
        with trainer:
            trainer.prepare(batch)
            torch.manual_seed(2)
            assert trainer.step(batch) == plain.losses[0]
        assert lanes_alive() == []
        model = model_for(mix.workload)
        optimizer = optimizer_for(model)


@pytest.mark.parametrize("lasting", [False, True])
def test_a_host_that_is_full_while_giving_back_loses_no_other_block(lasting: bool) -> None:
    """A block whose values cannot be copied is tried again once the others have been released; if there is still no memory,
    that is an error, and all others are back. No thread is left in any case.
    """
    mix, plain = MIXES["window"], undisturbed("window")
    model = model_for(mix.workload)
    optimizer, values, calls = optimizer_for(model), States.values, 0

    def failing(states: States, i: int, place: int) -> Tensor:
        nonlocal calls
        calls += i == 2 and place == 1
        return full() if i == 2 and place == 1 and (lasting or calls == 1) else values(states, i, place)

    trainer = trainer_for(model, mix, optimizer)
    trainer.prepare(data_of(mix.workload)[0])
    torch.manual_seed(2)
    trainer.step(data_of(mix.workload)[0])
    trainer.state_dict()
    with patch.object(States, "values", failing), pytest.raises(RuntimeError) if lasting else nullcontext():
        trainer.close()
    assert calls == 2
    assert lanes_alive() == []
    if lasting:
        with torch.no_grad():  # the rest can be compared then
            for parameter, (before, _) in zip(partition(model, BLOCKS).owned[2], plain.states[1][2], strict=True):
                parameter.data = before.clone()
    found = state_of(model, optimizer)
    assert all(same_block(found[i], plain.states[1][i]) for i in range(len(found)) if i != 2 or not lasting)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory"), KeyError("no such luck")])
def test_a_save_without_memory_is_one_error(background: bool, error: Exception, tmp_path: Path) -> None:
    """It is raised by the save, or by the next call if it was in the background; earlier checkpoints stay, and training goes
    on.
    """
    mix, plain = MIXES["window"], undisturbed("window")
    model, data = model_for(mix.workload), data_of(mix.workload)
    expected = KeyError if isinstance(error, KeyError) else InputError
    with trainer_for(model, mix, optimizer_for(model)) as trainer:
        trainer.prepare(data[0])
        torch.manual_seed(2)
        trainer.step(data[0])
        trainer.save(tmp_path)
        with patch("autohete.train.checkpoints.save_file", side_effect=error):
            if not background:
                with pytest.raises(expected, match="more host memory" if expected is InputError else "luck"):
                    trainer.save(tmp_path)
            else:
                trainer.save(tmp_path, background=True)
                with pytest.raises(expected):
                    trainer._writing.wait()
        assert [path.name for path in tmp_path.iterdir()] == ["000001-step-00000001"]
        trainer.load(tmp_path)
        assert [trainer.step(batch) for batch in data[1:]] == plain.losses[1:]
    assert lanes_alive() == []


def test_an_interrupted_wait_for_a_save_forgets_nothing() -> None:
    """Interrupted while it waits for what is written in the background, the next call waits again and raises its error."""
    writer, end, error = CheckpointWriter(), threading.Event(), InputError("no such luck")

    def write() -> NoReturn:
        assert end.wait(PATIENCE_SECONDS)
        raise error

    writer.run(write, background=True)
    with patch.object(threading.Thread, "join", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        writer.wait()
    end.set()
    with pytest.raises(InputError, match="no such luck"):
        writer.wait()
    assert lanes_alive() == []


def test_what_fails_besides_is_a_note_on_the_callers_error(tmp_path: Path) -> None:
    """An error of the caller stays the one that is raised, with a note for a failed task and for a failed save."""
    model, mix, fault = model_for(SMALL), MIXES["window"], Fault("W0@1", "before")
    with fault.planted(None), pytest.raises(KeyError) as caught, trainer_for(model, mix, optimizer_for(model)) as trainer:
        trainer.step(data_of(SMALL)[0])
        with patch("autohete.train.checkpoints.save_file", side_effect=OSError(28, "No space left on device")):
            trainer.save(tmp_path, background=True)
            assert trainer._writing._thread is not None
            trainer._writing._thread.join()
        trainer.step(data_of(SMALL)[1])
        raise KeyError
    task, save = caught.value.__notes__
    assert task.startswith("W0@1 failed: PlantedError: no such luck")
    assert "No space left on device" in save
    assert lanes_alive() == []


@pytest.mark.parametrize("error", [MemoryError(), SystemExit(3)])
def test_a_failed_close_leaves_no_thread(error: BaseException, tmp_path: Path) -> None:
    """Whatever giving back raises, the threads end, and what is being saved in the background is complete."""
    model, mix = model_for(SMALL), MIXES["window"]
    writing, write = threading.Event(), Checkpoint.write

    def late(*args: Any) -> Path:
        assert writing.wait(PATIENCE_SECONDS)
        time.sleep(0.1)
        return write(*args)

    def failing(states: States) -> NoReturn:
        writing.set()
        raise error

    give_back = States.give_back
    trainer = trainer_for(model, mix, optimizer_for(model))
    with (
        patch.object(Checkpoint, "write", late),
        patch.object(States, "give_back", failing),
        pytest.raises(type(error)),
        trainer,
    ):
        trainer.step(data_of(SMALL)[0])
        states = trainer._held.running().session.training.states
        trainer.save(tmp_path, background=True)
    give_back(states)
    assert lanes_alive() == []
    assert len(list(tmp_path.iterdir())) == 1


# --- signals

#: Trains until a signal. Says when it has begun, and in the end which threads are left and whether the model is there.
PROGRAM = """
import itertools, signal, sys, threading, time
import torch
from support.reference import batches, model_for
from support.small import SMALL, profile_of
from autohete import Trainer
from autohete.train import checkpoints

folder, saves, handler = sys.argv[1], sys.argv[2] == "saving", sys.argv[3]
signal.signal(signal.SIGINT, signal.default_int_handler)
if handler == "exits":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
to_disk = checkpoints.bring_to_disk

def slowly(path):
    time.sleep(0.3)
    to_disk(path)

model = model_for(SMALL)
batch = batches(SMALL, 1)[0]
try:
    with Trainer(model, policy="stronghold:window=1", profile=profile_of(SMALL)) as trainer:
        trainer.step(batch)
        trainer.save(folder)
        checkpoints.bring_to_disk = slowly
        for step in itertools.count(2):
            trainer.step(batch)
            if step == 4:
                if saves:
                    trainer.save(folder, background=True)
                print("ready", flush=True)
finally:
    there = all(p.isfinite().all() and p.numel() for p in model.parameters())
    print([thread.name for thread in threading.enumerate()], bool(there), flush=True)
"""
TESTS = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}


def signalled(code: str, number: signal.Signals, *arguments: str) -> tuple[int, list[str], str, float]:
    """Run a program and send it a signal once it says that it is ready; exit code, what it says after that, its complaint, and
    the seconds that it took to end.
    """
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        killer = threading.Timer(120, process.kill)  # if it hangs
        killer.start()
        try:
            ready = next((line for line in process.stdout if line == "ready\n"), None)
            begin = time.perf_counter()
            process.send_signal(number)
            said_then, complaint = process.communicate()
        finally:
            killer.cancel()
    assert ready is not None, complaint
    return process.returncode, said_then.splitlines(), complaint, time.perf_counter() - begin


@pytest.mark.slow
@pytest.mark.parametrize("saving", ["stepping", "saving"])
@pytest.mark.parametrize(
    ("number", "handler", "code"),
    [(signal.SIGINT, "default", -signal.SIGINT), (signal.SIGTERM, "default", -signal.SIGTERM), (signal.SIGTERM, "exits", 143)],
)
def test_a_signal_ends_a_program(saving: str, number: signal.Signals, handler: str, code: int, tmp_path: Path) -> None:
    """In a step or while a checkpoint is written in the background. What raises an exception gives the model back, leaves no
    thread and completes the checkpoint; what ends the process at once leaves the checkpoint before it.
    """
    found, last, complaint, took = signalled(PROGRAM, number, str(tmp_path), saving, handler)
    assert took < PATIENCE_SECONDS
    assert found == code, complaint
    raises = (number, handler) != (signal.SIGTERM, "default")
    assert last == (["['MainThread'] True"] if raises else []), complaint
    assert ("KeyboardInterrupt" in complaint) == (number is signal.SIGINT)
    names = [path.name for path in checkpoints(tmp_path)]
    assert names == ["000001-step-00000001", *["000002-step-00000004"] * (saving == "saving" and raises)]
    content = read_checkpoint(tmp_path)
    assert content["training"]["step"] == int(names[-1][-8:])


#: Runs the example that a page has about a signal, and says when it has trained two steps.
EXAMPLE = """
import os, sys
from autohete import Trainer

os.chdir(sys.argv[1])
step, done = Trainer.step, []

def counted(trainer, batch):
    loss = step(trainer, batch)
    done.append(loss)
    if len(done) == 2:
        print("ready", flush=True)
    return loss

Trainer.step = counted
exec(sys.argv[2])
"""


@pytest.mark.slow
def test_the_example_saves_when_it_is_terminated(tmp_path: Path) -> None:
    """The example in the page on long trainings ends by itself on SIGTERM, after it has saved the step in progress."""
    page = (TESTS.parent / "docs" / "how-to" / "long_trainings.md").read_text()
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "SIGTERM" in block]
    assert example.count("range(20)") == 1
    endless = example.replace("range(20)", "range(10**9)")
    code, _, complaint, took = signalled(EXAMPLE, signal.SIGTERM, str(tmp_path), endless)
    assert (code, complaint) == (0, "")
    assert took < PATIENCE_SECONDS
    assert read_checkpoint(tmp_path / "checkpoints")["training"]["step"] >= 2


# --- many steps


@pytest.mark.slow
def test_nothing_grows_over_many_steps() -> None:
    """Memory, threads, open files and objects stay as they are, with accumulation, clipping, evaluations and saves."""
    first, last = endure(300, 150)
    assert last.grown_since(first) == []
    assert lanes_alive() == []


def test_what_grows_is_named() -> None:
    """Each of memory, threads, files and objects is compared, the first and the last with what may vary."""
    before = Usage(10**9, 5, 6, 1000)
    assert Usage(10**9 + 2**20, 5, 6, 1005).grown_since(before) == []
    grown = Usage(2 * 10**9, 6, 7, 2000).grown_since(before)
    assert grown == ["resident memory", "threads", "open files", "objects"]
