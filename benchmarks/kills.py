"""Does a training that is killed at any moment resume to the same bits?

Command: ``python benchmarks/kills.py [--kills N] [--seed N]``. Each training has 12 steps with two micro-batches, clipping,
dropout and a scheduler, and saves a checkpoint in the background after each step. It is killed (SIGKILL) at a drawn moment. The
next process resumes from the latest checkpoint and trains to the end. Exit code 1: its last checkpoint has other bits than that
of a training that was never killed, or something is left behind.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python benchmarks/kills.py` from anywhere
os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork

import numpy as np
import torch
import torch._dynamo  # which optimizers import: once, and not in each process
from cyclopts import App

from autohete import Trainer
from autohete.cli.app import run_app
from autohete.errors import check_whole
from autohete.hardware import load_hardware
from autohete.profile import analytic_profile
from autohete.train.checkpoints import checkpoints, read_checkpoint
from autohete.train.gpt import seeded_gpt
from autohete.workload import Precision, Workload

STEPS = 12
_WORKLOAD = Workload("small", 64, 2, 2, vocabulary_size=61, sequence_length=8, batch_size=2, precision=Precision.FP32)
_PROFILE = analytic_profile(_WORKLOAD, load_hardware("a100-40gb-epyc7713"))


def train(folder: Path, end: Connection) -> None:
    """Train to the last step, from the latest checkpoint in ``folder`` if there is one. Report -1, each
    step that begins, and ``STEPS``.
    """
    model = seeded_gpt(_WORKLOAD, dropout=0.1, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    data = torch.Generator().manual_seed(1)
    shape = 2, 2 * _WORKLOAD.batch_size, _WORKLOAD.sequence_length
    batches = torch.randint(_WORKLOAD.vocabulary_size, (STEPS, *shape), generator=data)
    torch.manual_seed(2)
    random.seed(3)
    np.random.seed(4)
    options: dict[str, Any] = {"policy": "zero_offload", "profile": _PROFILE, "micro_batches": 2, "clip_norm": 0.5}
    end.send(-1)
    with Trainer(model, optimizer=optimizer, **options) as trainer:
        if checkpoints(folder):
            schedule.load_state_dict(trainer.load(folder))
        for step in range(trainer.steps, STEPS):
            end.send(step)
            trainer.step(batches[step].unbind())
            schedule.step()
            trainer.save(folder, extra=schedule.state_dict(), keep=2, background=True)
        end.send(STEPS)


def run(folder: Path, kill: tuple[int, float] | None = None) -> int:
    """Train in a process of its own, until the end or until it is killed; return its exit code.

    Args:
        folder: contains the checkpoints.
        kill: what ``train`` has reported, and the time after that (s); None: it is not killed.
    """
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(folder, there))
    process.start()
    there.close()
    if kill is not None:
        while here.recv() < kill[0]:
            pass
        time.sleep(kill[1])
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def last_state(folder: Path) -> Any:
    """The latest checkpoint, without the date and the versions that wrote it."""
    content = read_checkpoint(folder)
    del content["training"]["versions"]
    return content


def same(one: Any, other: Any) -> bool:
    """Whether nested values are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def killed_at(folder: Path, expected: Any, kill: tuple[int, float]) -> str:
    """Kill a training, resume it, and return what was found: where it was killed, or what is wrong."""
    if run(folder, kill) != -signal.SIGKILL:
        return "ended before"
    before = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    if (code := run(folder)) != 0:
        return f"exit code {code} of the resumed training: wrong"
    if not same(last_state(folder), expected):
        return "other bits: wrong"
    after = sorted(path.name for path in folder.iterdir())
    if after != before and len(after) != 2:  # the next save removes what a killed one has left
        return f"{', '.join(after)} left: wrong"
    return "within a save" if any(name.startswith(".") for name in before) else "between saves"


def main(*, kills: int = 100, seed: int = 0) -> None:
    """Kill, resume and compare.

    Parameters
    ----------
    kills:
        Number of trainings that are killed.
    seed:
        Of the moments.
    """
    check_whole("kills", kills, 1)
    drawn, found, begin = random.Random(seed), Counter[str](), time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        assert run(Path(root, "whole")) == 0
        expected = last_state(Path(root, "whole"))
        times = [path.stat().st_mtime for path in checkpoints(Path(root, "whole"))]
        step_seconds = times[-1] - times[-2]
        number = 0
        while found.total() - found["ended before"] < kills:
            number += 1
            moment = drawn.randrange(-1, STEPS + 1), drawn.uniform(0, step_seconds)
            what = killed_at(Path(root, str(number)), expected, moment)
            found[what] += 1
            if what.endswith("wrong"):
                print(f"killed {moment[1] * 1e3:.1f} ms after {moment[0]} was reported: {what}", flush=True)
    wrong = sum(count for what, count in found.items() if what.endswith("wrong"))
    print(
        f"{kills} kills in {time.perf_counter() - begin:.0f} s, {found['within a save']} of them within a save: "
        f"{kills - wrong} trainings resumed to the bits of one that was never killed"
    )
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    run_app(App(name="kills", default_command=main, help=__doc__))
