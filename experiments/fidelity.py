"""Do simulator and runtime agree on order and waiting?

Command: ``python experiments/fidelity.py [--out DIR] [--settings N] [--seed N]``. Machine: any with PyTorch; takes about 2 s
a setting.

Settings are drawn with a seed: policy, model, GPU memory, speed of links and CPU. The schedule of each is scaled to
iterations of a quarter of a second, simulated, and executed by the torch runtime in lane threads that train a tiny model for
real and pace every task to the schedule's duration by deadlines. Measured are wall-clock times. So this proves order and
waiting, not the model of time: seconds are paced (clock ``emulated``), and the links do not disturb each other, in the
simulation neither.

Writes ``fidelity.{csv,png,pdf}``. What would refute it: a mean absolute error of the iteration time above 2 %, or any
above 5 %.
"""

from __future__ import annotations

import csv
import io
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import torch
from cyclopts import App
from matplotlib.figure import Figure
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python experiments/fidelity.py` from anywhere

from autohete.cli import run_app
from autohete.errors import InfeasibleError
from autohete.hardware import load_hardware
from autohete.lowering import lower
from autohete.memory import occupancy
from autohete.policies import parse_policy
from autohete.policy import Verdict
from autohete.profile import analytic_profile
from autohete.report.style import BLUE, VERMILION, save_figure, style
from autohete.report.tables import console, table
from autohete.report.write import make_folder, write_text
from autohete.runtime.lanes import LaneThreads
from autohete.runtime.model import GPT, next_token_loss
from autohete.runtime.partition import partition
from autohete.runtime.training import Batch, Training
from autohete.schedule import GPU_MEMORY, Schedule
from autohete.sim import SimExecutor
from autohete.simulate import judge_for, run_until_steady
from autohete.trace import Clock, Trace
from autohete.workload import Workload

POLICIES = [
    "resident",
    "zero_offload",
    "zero_offload:paper,tile_overlap",
    "patrickstar",
    "stronghold",
    "stronghold:window=1",
    "autohete",
    "autohete:priority=off",
]
ITERATIONS = 6
ITERATION_SECONDS = 0.25
GOAL_MEAN_PERCENT, GOAL_WORST_PERCENT = 2.0, 5.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained where, under which policy."""

    policy: str
    workload: Workload
    overrides: dict[str, str]

    @property
    def name(self) -> str:
        """Short and unique enough for a table."""
        w = self.workload
        return f"{w.transformer_blocks}x{w.hidden_size} b{w.batch_size} {' '.join(self.overrides.values())}"


@dataclass(frozen=True, slots=True)
class Result:
    """Predicted and measured, of one setting."""

    setting: Setting
    predicted_seconds: float
    measured_seconds: float
    predicted_peak_bytes: int
    measured_peak_bytes: int

    @property
    def error_percent(self) -> float:
        """Predicted against measured."""
        return 100 * (self.predicted_seconds / self.measured_seconds - 1)


def draw(rng: random.Random, number: int) -> Setting:
    """A random setting; policies take turns."""
    workload = Workload(
        "drawn",
        hidden_size=rng.choice([1024, 2048, 4096]),
        transformer_blocks=rng.randint(3, 8),
        heads=16,
        batch_size=rng.choice([2, 4, 8]),
        fused_attention=rng.random() < 0.5,
    )
    link = f"{rng.choice([6, 12, 25, 50])}GB/s"
    overrides = {
        "gpu.memory": f"{rng.choice([4, 5, 6, 8, 12])}GiB",
        "links.h2d.bandwidth": link,
        "links.d2h.bandwidth": link,
        "cpu.update_bandwidth": f"{rng.choice([20, 40, 80])}GB/s",
    }
    return Setting(POLICIES[number % len(POLICIES)], workload, overrides)


def scaled_schedule(setting: Setting) -> Schedule | None:
    """The setting's schedule with iterations of :data:`ITERATION_SECONDS`; None if it does not fit."""
    profile = analytic_profile(setting.workload, load_hardware("a100-40gb-epyc7713", setting.overrides))
    judge = judge_for(profile)
    try:
        plan = parse_policy(setting.policy).plan(profile, judge)
    except InfeasibleError:
        return None
    if judge(plan).verdict is not Verdict.OK:
        return None
    schedule = replace(lower(profile, plan), flows=(), resources=())
    _, steady = run_until_steady(schedule, SimExecutor())
    scale = ITERATION_SECONDS / steady.period_seconds
    return replace(schedule, tasks=tuple(replace(t, duration_ns=round(t.duration_ns * scale)) for t in schedule.tasks))


def execute(schedule: Schedule, transformer_blocks: int) -> Trace:
    """Train a tiny model of as many blocks by ``schedule``, paced."""
    tiny = Workload("tiny", 32, transformer_blocks, 2, vocabulary_size=101, sequence_length=16, batch_size=2)
    torch.manual_seed(0)
    training = Training(partition(GPT(tiny)), schedule, next_token_loss)
    with LaneThreads(schedule, training.perform, Clock.EMULATED, paced=True) as lanes:
        for iteration in range(ITERATIONS):
            ids = torch.randint(0, tiny.vocabulary_size, (tiny.batch_size, tiny.sequence_length))
            training.batches[iteration] = Batch(ids, ids)
            lanes.admit()
    return lanes.trace()


def compare(setting: Setting) -> Result | None:
    """Simulate and execute one setting; None if it does not fit."""
    schedule = scaled_schedule(setting)
    if schedule is None:
        return None
    simulated, steady = run_until_steady(schedule, SimExecutor())
    measured = execute(schedule, setting.workload.transformer_blocks)
    return Result(
        setting,
        steady.period_seconds,
        measured.steady().period_seconds,
        occupancy(simulated, GPU_MEMORY).peak_bytes,
        occupancy(measured, GPU_MEMORY).peak_bytes,
    )


def as_csv(results: list[Result]) -> str:
    """One row per setting."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = "setting policy clock predicted_seconds measured_seconds error_percent"
    writer.writerow([*columns.split(), "predicted_peak_bytes", "measured_peak_bytes"])
    for r in results:
        times = (f"{r.predicted_seconds:.6f}", f"{r.measured_seconds:.6f}", f"{r.error_percent:.3f}")
        peaks = (r.predicted_peak_bytes, r.measured_peak_bytes)
        writer.writerow([r.setting.name, r.setting.policy, Clock.EMULATED, *times, *peaks])
    return text.getvalue()


def show(results: list[Result]) -> None:
    """Errors by policy, and against the goal."""
    shown = table(
        "iteration time, predicted against measured (paced)", ["policy", "settings", "mean |error|", "worst", "same peak"]
    )
    for policy in [*POLICIES, "all"]:
        rows = [r for r in results if policy in (r.setting.policy, "all")]
        if rows:
            errors = [abs(r.error_percent) for r in rows]
            same = sum(r.predicted_peak_bytes == r.measured_peak_bytes for r in rows)
            shown.add_row(policy, str(len(rows)), f"{mean(errors):.2f} %", f"{max(errors):.2f} %", f"{same} of {len(rows)}")
    console().print(shown)
    console().print(f"goal: mean at most {GOAL_MEAN_PERCENT} %, worst at most {GOAL_WORST_PERCENT} %")


def plot(results: list[Result]) -> Figure:
    """One point per setting."""
    with style():
        figure = Figure(figsize=(5.5, 3.2), layout="constrained")
        axes = figure.subplots()
        for place, policy in enumerate(POLICIES):
            errors = [r.error_percent for r in results if r.setting.policy == policy]
            axes.plot(errors, [place] * len(errors), "o", color=BLUE, alpha=0.6, markersize=5)
        for goal, label in ((GOAL_WORST_PERCENT, "goal for the worst"), (-GOAL_WORST_PERCENT, None)):
            axes.axvline(goal, color=VERMILION, linestyle="--", linewidth=1, label=label)
        axes.set_yticks(range(len(POLICIES)), POLICIES)
        axes.invert_yaxis()
        axes.set_xlabel("predicted against measured iteration time (%, paced)")
        axes.legend(loc="center", bbox_to_anchor=(0.78, 0.5), fontsize=7)
    return figure


def main(*, out: Path = Path("paper_figs"), settings: int = 60, seed: int = 0) -> None:
    """Draw settings, simulate and execute them, compare.

    Parameters
    ----------
    out:
        Folder for the figure and the CSV file.
    settings:
        How many settings that fit to compare.
    seed:
        Of the drawing.
    """
    make_folder(out)
    torch.set_num_threads(1)
    rng, results, number = random.Random(seed), [], 0
    for _ in track(range(settings), "comparing", console=console(stderr=True), disable=not sys.stderr.isatty(), transient=True):
        found = None
        while found is None:
            found = compare(draw(rng, number))
            number += 1
        results.append(found)
    write_text(out / "fidelity.csv", as_csv(results))
    figure = plot(results)
    for suffix in ("png", "pdf"):
        save_figure(figure, out / f"fidelity.{suffix}")
    show(results)
    console().print(f"{number - settings} drawn settings did not fit; written: {out}/fidelity.{{csv,png,pdf}}", soft_wrap=True)


if __name__ == "__main__":
    run_app(App(name="fidelity", default_command=main, help=__doc__))
