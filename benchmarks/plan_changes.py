"""What does a change of the plan cost, and what do plans for shorter batches gain?

Command: ``python benchmarks/plan_changes.py [--policy NAME] [--gpu-memory SHARE] [--rounds N]``. Two Trainers train the same
model by turns, one by a plan for each length and one by that for the longest. Changes are timed once all updates have ended:
between plans that have all states in the same places, and between plans that have them elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cyclopts import App

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python benchmarks/plan_changes.py` from anywhere

from autohete import Trainer
from autohete.cli.app import run_app
from autohete.policies import parse_policy
from autohete.quantities import format_bytes, format_seconds
from autohete.simulate import Simulation, simulate_safely
from autohete.train.as_executed import as_executed
from autohete.train.gpt import GPT, seeded_gpt
from autohete.train.training_run import TrainingRun
from autohete.workload import Precision, Workload

LENGTHS = (64, 128, 256)
_WORKLOAD = Workload("gpt", 256, 8, 4, vocabulary_size=512, sequence_length=256, batch_size=4, precision=Precision.FP32)
#: Steps of each length in a round; the first of them, and the first round, are not timed.
_STEPS = 4
_CHANGES = 20

app = App(help=__doc__)


@app.default
def main(*, policy: str = "autohete", gpu_memory: str = "25%", rounds: int = 8) -> None:
    """Print medians of the steps of each length, and of the changes."""
    torch.set_num_threads(1)
    data = {length: (torch.randint(512, (4, length)), torch.randint(512, (4, length))) for length in LENGTHS}
    keywords: dict[str, Any] = {"policy": policy, "gpu_memory": gpu_memory, "refine": False}
    seconds, plans = defaultdict[tuple[int, str], list[float]](list), dict[tuple[int, str], Simulation]()
    with Trainer(_model(), buckets=LENGTHS[:-1], **keywords) as bucketed, Trainer(_model(), **keywords) as longest:
        trainers = {"own": bucketed, "longest": longest}
        for trainer in trainers.values():
            trainer.prepare(data[LENGTHS[-1]])
        for turn in range(rounds):
            for length in LENGTHS:
                for name, trainer in trainers.items():
                    for step in range(_STEPS):
                        begin = time.perf_counter()
                        trainer.step(data[length])
                        trainer.parameters()  # waits for all updates
                        if turn and step:
                            seconds[length, name].append(time.perf_counter() - begin)
                    assert trainer.prediction is not None
                    plans[length, name] = trainer.prediction
        for length in LENGTHS:
            shown = (
                f"{format_seconds(median(seconds[length, name]))} ({plans[length, name].plan.counts})" for name in trainers
            )
            print(f"length {length}: {', by the plan of the longest '.join(shown)}")
        print(f"change between buckets: {bucketed._held.do(lambda run: _change(run, [plans[one, 'own'] for one in LENGTHS]))}")
    with Trainer(_model(), policy="resident", refine=False) as trainer:
        profile = trainer.prepare(data[LENGTHS[-1]]).profile
        moved = [simulate_safely(profile, parse_policy(name), as_executed) for name in ("resident", "zero_offload")]
        print(f"change with {_states()} moved: {trainer._held.do(lambda run: _change(run, moved))}")


def _model() -> GPT:
    return seeded_gpt(_WORKLOAD, dropout=0.0, seed=0)


def _states() -> str:
    """Size of parameters and of AdamW's moments."""
    return format_bytes(sum(3 * parameter.nbytes for parameter in _model().parameters()))


def _change(run: TrainingRun, predictions: Sequence[Simulation]) -> str:
    """The median time of a change from each plan to the next."""
    times = []
    for turn in range(_CHANGES):
        run.session.drain()
        begin = time.perf_counter()
        run.follow(replace(run.prepared, prediction=predictions[turn % len(predictions)]))
        times.append(time.perf_counter() - begin)
    return format_seconds(median(times[1:]))


if __name__ == "__main__":
    run_app(app)
