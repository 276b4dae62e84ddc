"""Do memory, threads and open files stay as they are over many small steps?

Command: ``python benchmarks/endurance.py [--steps N] [--settled N]``. Each step accumulates the gradients of two micro-batches
and clips them. Every 100 steps the model is evaluated, and a checkpoint is saved in the background. Exit code 1: after the last
step the process holds more than after the step ``--settled``, or a thread is left when the training has ended.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from cyclopts import App

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python benchmarks/endurance.py` from anywhere

from autohete import Trainer
from autohete.cli.app import run_app
from autohete.errors import InputError, check_fields
from autohete.quantities import format_bytes
from autohete.train.gpt import seeded_gpt
from autohete.workload import Precision, Workload

#: Steps between two evaluations and saves.
PERIOD = 100
#: What resident memory may grow by: the allocator of the C library does not give back every page.
SLACK_BYTES = 8 * 2**20
_WORKLOAD = Workload("small", 16, 1, 2, vocabulary_size=61, sequence_length=4, batch_size=4, precision=Precision.FP32)


@dataclass(frozen=True, slots=True)
class Usage:
    """What the process holds.

    Args:
        resident_bytes: memory.
        threads: number of threads, of Python and of libraries.
        files: number of open files.
        objects: number of objects that Python's garbage collector tracks.
    """

    resident_bytes: int
    threads: int
    files: int
    objects: int

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def now(cls) -> Usage:
        """Return what this process holds now."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(os.listdir("/proc/self/task")),
            len(os.listdir("/proc/self/fd")),
            len(gc.get_objects()),
        )

    def grown_since(self, before: Usage) -> list[str]:
        """Return what is more than ``before``, beyond what may vary."""
        pairs = {
            "resident memory": (self.resident_bytes, before.resident_bytes + SLACK_BYTES),
            "threads": (self.threads, before.threads),
            "open files": (self.files, before.files),
            "objects": (self.objects, before.objects + before.objects // 100),
        }
        return [name for name, (here, most) in pairs.items() if here > most]

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.resident_bytes)} resident, {self.threads} threads, {self.files} open files, "
            f"{self.objects:,} objects"
        )


def endure(steps: int, settled: int, policy: str = "zero_offload") -> tuple[Usage, Usage]:
    """Train ``steps`` steps, and return what the process held after ``settled`` of them and in the end."""
    model = seeded_gpt(_WORKLOAD, dropout=0.1, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(0)
    shape = 2, _WORKLOAD.batch_size, _WORKLOAD.sequence_length
    usage = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Trainer(model, optimizer=optimizer, policy=policy, micro_batches=2, clip_norm=0.5) as trainer,
    ):
        for step in range(1, steps + 1):
            batch = torch.randint(_WORKLOAD.vocabulary_size, shape, generator=generator).unbind()
            trainer.step(batch)
            schedule.step()
            if step % PERIOD == 0:
                trainer.evaluate([batch])
                trainer.save(folder, extra={"schedule": schedule.state_dict()}, background=True)
            if step in (settled, steps):
                trainer.save(folder)  # waits for the one in the background
                usage.append(Usage.now())
                print(f"step {step}: {usage[-1]}", flush=True)
    first, last = usage
    return first, last


def main(*, steps: int = 20_000, settled: int = 1_000) -> None:
    """Train, and compare what the process holds.

    Parameters
    ----------
    steps:
        Number of steps.
    settled:
        Step after which nothing may grow.
    """
    if not 0 < settled < steps:
        raise InputError(f"settled is {settled}: give a step from 1 to {steps - 1}")
    begin, threads = time.perf_counter(), threading.active_count()
    first, last = endure(steps, settled)
    grown = last.grown_since(first) + ["threads after the end"] * (threading.active_count() > threads)
    print(
        f"{steps} steps in {time.perf_counter() - begin:.0f} s: {', '.join(grown) + ' grown' if grown else 'nothing has grown'}"
    )
    if grown:
        raise SystemExit(1)


if __name__ == "__main__":
    run_app(App(name="endurance", default_command=main, help=__doc__))
