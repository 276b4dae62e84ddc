"""Checkpoints on disk: complete or not there, verified, and resumed to the bit."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.reference import batches, model_for
from support.small import SMALL, profile_of
from torch import Tensor

from autohete import Trainer
from autohete.errors import InputError
from autohete.train import checkpoints as checkpoints_module
from autohete.train.checkpoints import Checkpoint, checkpoints, read_checkpoint

BEFORE, AFTER = 2, 2
KILLS = Path(__file__).parents[2] / "benchmarks" / "kills.py"


def write(folder: Path, step: int, state: object, keep: int = 1) -> Path:
    return Checkpoint(state).write(folder, step, keep)


def trainer_of(policy: str) -> Trainer:
    model = model_for(SMALL)
    return Trainer(model, policy=policy, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), profile=profile_of(SMALL))


def steps(trainer: Trainer, schedule: Any, begin: int, end: int) -> list[float]:
    """Losses of some steps, with numbers of all generators."""
    losses = []
    for batch in batches(SMALL, BEFORE + AFTER)[begin:end]:
        losses.append(trainer.step(batch) + random.random() + float(np.random.rand()))
        schedule.step()
    return losses


def schedule_of(trainer: Trainer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.MultiStepLR(trainer.optimizer, [1, 3], 0.3)


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[list[float], list[Tensor]]:
    """Losses and parameters of a training without an interruption."""
    with trainer_of("resident") as trainer:
        schedule = schedule_of(trainer)
        prepared(trainer)
        return steps(trainer, schedule, 0, BEFORE + AFTER), trainer.parameters()


def prepared(trainer: Trainer) -> None:
    trainer.prepare(batches(SMALL, 1)[0])
    torch.manual_seed(2)
    random.seed(3)
    np.random.seed(4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the first steps of a training, saved in the background."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with trainer_of("stronghold:window=1") as trainer:
        schedule = schedule_of(trainer)
        prepared(trainer)
        for step in range(BEFORE):
            steps(trainer, schedule, step, step + 1)
            trainer.save(folder, extra={"schedule": schedule.state_dict(), "position": step}, background=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["resident", "zero_offload", "autohete:priority=off"])
@pytest.mark.parametrize("after_prepare", [False, True])
def test_a_training_resumes_to_the_bit(
    policy: str, after_prepare: bool, folder: Path, uninterrupted: tuple[list[float], list[Tensor]]
) -> None:
    """Under another policy, before its first step or between steps; scheduler and position are in the checkpoint."""
    with trainer_of(policy) as trainer:
        schedule = schedule_of(trainer)
        if after_prepare:
            prepared(trainer)
        extra = trainer.load(folder)
        schedule.load_state_dict(extra["schedule"])
        losses = steps(trainer, schedule, extra["position"] + 1, BEFORE + AFTER)
        found = trainer.parameters()
    assert losses == uninterrupted[0][BEFORE:]
    assert all(torch.equal(a, b) for a, b in zip(found, uninterrupted[1], strict=True))


def test_the_last_checkpoints_stay(tmp_path: Path) -> None:
    """The oldest go, whatever their steps: after going back to an earlier step, the last one written is the latest."""
    for step in (1, 10, 11, 2):
        write(tmp_path, step, {"step": step}, keep=3)
    names = ["000002-step-00000010", "000003-step-00000011", "000004-step-00000002"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in checkpoints(tmp_path)] == names
    assert read_checkpoint(tmp_path) == {"step": 2}
    assert read_checkpoint(tmp_path / names[0]) == {"step": 10}


@pytest.mark.slow
def test_going_back_keeps_what_is_saved_then(tmp_path: Path) -> None:
    """The checkpoint of the earlier step is the one that loads."""
    with trainer_of("resident") as trainer:
        trainer.step(batches(SMALL, 1)[0])
        state = trainer.state_dict()
        for batch in batches(SMALL, 3):
            trainer.step(batch)
            trainer.save(tmp_path)
        trainer.load_state_dict(state)
        trainer.save(tmp_path, extra="went back")
        assert trainer.load(tmp_path) == "went back"
        assert trainer.state_dict()["step"] == 1


@pytest.mark.slow
def test_several_threads_may_save(tmp_path: Path) -> None:
    """One after another, in the background or not, and also two trainers into one folder."""
    with trainer_of("resident") as one, trainer_of("resident") as other:
        for trainer in (one, other):
            trainer.step(batches(SMALL, 1)[0])

        def save(number: int) -> None:
            for _ in range(3):
                (one, other)[number % 2].save(tmp_path, keep=100, extra=number, background=number < 2)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(save, range(4)))
    assert len(checkpoints(tmp_path)) == 12
    assert all(read_checkpoint(path)["training"]["step"] == 1 for path in checkpoints(tmp_path))


@pytest.mark.parametrize("moment", ["open", "flock"])
def test_a_folder_that_is_taken_for_a_leftover_is_made_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another save may remove a hidden folder before it is locked: the checkpoint is written all the same."""
    module = {"open": os, "flock": fcntl}[moment]
    real = getattr(module, moment)
    taken: list[Path] = []

    def late(*arguments: object, **named: object) -> object:
        if not taken:
            taken.extend(tmp_path.glob(".autohete-*.part"))
            checkpoints_module._remove_leftovers(tmp_path)
        return real(*arguments, **named)

    monkeypatch.setattr(module, moment, late)
    write(tmp_path, 1, {"step": 1})
    assert len(taken) == 1
    assert read_checkpoint(tmp_path) == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["000001-step-00000001"]


def test_many_saves_into_one_folder_at_once(tmp_path: Path) -> None:
    """None fails, and each gets a number of its own."""
    with ThreadPoolExecutor(8) as pool:
        targets = list(pool.map(lambda value: write(tmp_path, 7, {"value": value}, keep=1000), range(100)))
    assert {read_checkpoint(target)["value"] for target in targets} == set(range(100))
    assert set(targets) == set(tmp_path.iterdir())


def test_hidden_files_of_others_stay(tmp_path: Path) -> None:
    """Only what was left behind by a save is removed."""
    (tmp_path / ".x.part").write_text("mine")
    (tmp_path / ".mine.part").mkdir()
    (tmp_path / ".autohete-0.part").mkdir()
    write(tmp_path, 0, {}, keep=1)
    assert {path.name for path in tmp_path.iterdir()} == {".x.part", ".mine.part", "000001-step-00000000"}


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, "x", None, True], 3: (1, (2, [])), "inf": float("-inf")},
        {"tensor": "no tensor", "dict": {"float": 1.0}},
        np.float64(0.5),
    ],
    ids=str,
)
def test_every_plain_value_is_read_as_it_was(value: object, tmp_path: Path) -> None:
    """Types, keys and order included."""
    write(tmp_path, 0, {"value": value}, keep=1)
    assert repr(read_checkpoint(tmp_path)["value"]) == repr(value.item() if isinstance(value, np.generic) else value)


def test_tensors_are_read_as_they_were(tmp_path: Path) -> None:
    """Of any type and shape, and also if they share memory, in several files."""
    whole = torch.randn(6, 4)
    given = {"a": whole, "b": whole, "row": whole[2], "turned": whole.T, "none": torch.empty(0, 3), "one": torch.tensor(3)}
    given |= {"bf16": whole.bfloat16(), "bytes": torch.arange(5, dtype=torch.uint8)}
    given |= {"in.one": torch.zeros(2)}
    write(tmp_path, 0, given | {"in": {"one": torch.ones(2)}}, keep=1)
    found = read_checkpoint(tmp_path)
    assert found.pop("in")["one"].tolist() == [1, 1]
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype is tensor.dtype for name, tensor in given.items())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: {"f": print}, r"state\.f is a builtin_function_or_method, which a checkpoint cannot have"),
        (lambda: [torch.zeros(2, 2).to_sparse()], r"state\[0\] is a tensor of layout torch\.sparse_coo"),
        (lambda: {(1, 2): 3}, "state has keys that are neither text nor whole numbers"),
    ],
)
def test_what_cannot_be_written_is_named(value: Callable[[], object], message: str, tmp_path: Path) -> None:
    """Before anything is written."""
    with pytest.raises(InputError, match=message):
        write(tmp_path, 0, value(), keep=1)
    assert not list(tmp_path.iterdir())


def flipped(file: Path) -> None:
    """Change one bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of a tensor": (lambda one: flipped(one / "tensors-0.safetensors"), "tensors-0.safetensors has changed since"),
    "a bit of a number": (lambda one: flipped(one / "state.json"), "cannot be read"),
    "another number": (
        lambda one: (one / "state.json").write_text((one / "state.json").read_text().replace('"step", 2', '"step", 3')),
        "or has changed",
    ),
    "a file less": (lambda one: (one / "tensors-0.safetensors").unlink(), "lacks tensors-0.safetensors"),
    "no state": (lambda one: (one / "state.json").unlink(), "lacks state.json"),
    "half a file": (lambda one: os.truncate(one / "tensors-0.safetensors", 100), "tensors-0.safetensors has changed since"),
    "another format": (lambda one: (one / "state.json").write_text(json.dumps({"format": "x"})), "cannot be read"),
    "no object": (lambda one: (one / "state.json").write_text("[]"), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(damage: str, folder: Path, tmp_path: Path) -> None:
    """In one line that names the one before, which loads."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    act, message = DAMAGES[damage]
    act(tmp_path / "000002-step-00000002")
    with pytest.raises(InputError, match=message) as caught:
        read_checkpoint(tmp_path)
    assert "000001-step-00000001 is the one before" in str(caught.value)
    assert read_checkpoint(tmp_path / "000001-step-00000001")["training"]["step"] == 1


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    """Also if it is not there, or has something else."""
    for wrong in (tmp_path, tmp_path / "not there"):
        with pytest.raises(InputError, match="has no checkpoint"):
            read_checkpoint(wrong)
    write(tmp_path, 3, {"other": 1}, keep=1)
    with trainer_of("resident") as trainer, pytest.raises(InputError, match="a checkpoint of something else"):
        trainer.load(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_leaves_the_checkpoint_before(background: bool, tmp_path: Path, little_room: None) -> None:
    """One clear error, at once or at the next call, and training goes on."""
    write(tmp_path, 1, {"step": 1}, keep=3)
    with trainer_of("resident") as trainer:
        trainer.step(batches(SMALL, 1)[0])
        with pytest.raises(InputError, match=r"the checkpoint of step 1 cannot be written to .*; earlier checkpoints are as"):
            trainer.save(tmp_path, background=background)
            trainer.load(tmp_path)
        trainer.step(batches(SMALL, 1)[0])
    assert [path.name for path in tmp_path.iterdir()] == ["000001-step-00000001"]


@pytest.mark.slow
def test_an_error_in_the_background_is_raised_by_close(tmp_path: Path) -> None:
    """If no other call has."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be created"), trainer_of("resident") as trainer:
        trainer.step(batches(SMALL, 1)[0])
        trainer.save(tmp_path / "file", background=True)


@pytest.mark.slow
def test_an_error_in_the_background_does_not_prevent_the_next_save(tmp_path: Path) -> None:
    """It is raised once that one is written; what cannot be written at all is refused at once."""
    (tmp_path / "file").write_text("")
    with trainer_of("resident") as trainer:
        trainer.step(batches(SMALL, 1)[0])
        with pytest.raises(InputError, match=r"state\.extra is a object"):
            trainer.save(tmp_path, extra=object(), background=True)
        trainer.save(tmp_path / "file", background=True)
        with pytest.raises(InputError, match="cannot be created"):
            trainer.save(tmp_path / "good")
        trainer.save(tmp_path / "good")
    assert len(checkpoints(tmp_path / "good")) == 2


@pytest.mark.slow
def test_a_killed_training_resumes_to_the_bit() -> None:
    """Whenever it is killed, also within a save, the next process trains to the bits of one that was never killed, and removes
    what was left behind.
    """
    done = subprocess.run(
        [sys.executable, str(KILLS), "--kills", "4", "--seed", "3"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": 4 trainings resumed to the bits" in done.stdout


NAME = "blocks.0.qkv.weight"
HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "NaN moment": lambda s: s["optimizer"][NAME]["exp_avg"].view(-1)[3].fill_(torch.nan),
    "infinite moment": lambda s: s["optimizer"][NAME]["exp_avg_sq"].view(-1)[3].fill_(torch.inf),
    "negative square": lambda s: s["optimizer"][NAME]["exp_avg_sq"].view(-1)[3].fill_(-1.0),
    "more steps than any": lambda s: s["optimizer"][NAME].update(step=10**12),
    "more skipped than made": lambda s: s.update(skipped_steps=99),
    "sparse": lambda s: s["parameters"].update({NAME: s["parameters"][NAME].to_sparse()}),
    "meta at the end": lambda s: s["parameters"].update({[*s["parameters"]][-1]: [*s["parameters"].values()][-1].to("meta")}),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", HOSTILE)
@pytest.mark.parametrize("after_prepare", [False, True])
def test_a_hostile_state_changes_nothing(fault: str, after_prepare: bool, folder: Path) -> None:
    """What training never gives is refused as a whole."""
    state = copy.deepcopy(read_checkpoint(folder)["training"])
    HOSTILE[fault](state)
    with trainer_of("resident") as trainer:
        if after_prepare:
            prepared(trainer)
        before = {name: value.clone() for name, value in trainer._model.state_dict().items()}
        with pytest.raises(InputError):
            trainer.load_state_dict(state)
        assert all(torch.equal(value, before[name]) for name, value in trainer._model.state_dict().items())
