"""How much is gained by deciding parameters, states, gradients and activations together, for each unit separately?

Command: ``python experiments/joint.py [--out DIR]``. Machine: any; everything is simulated. Takes some minutes on two cores.

The models and the node of the published comparison are planned by ``autohete``, by ``joint``, and by ``joint`` without one of
its decisions at a time: optimizer states that stream to the GPU, activations or inputs on the host, parameters that stay on the
GPU between two passes. The loss without a decision is that decision's value. Selective recomputation is left out,
because AutoHete does not have it. Writes ``joint.csv``.

What would refute it: a model that ``joint`` trains slower than ``autohete``, or a median gain below 1 %.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from cyclopts import App
from joblib import Parallel, delayed

from autohete.cli.app import run_app
from autohete.files import make_folder, write_text
from autohete.hardware import load_hardware
from autohete.plan import Activations, Plan, Processor, UnitPlan
from autohete.policies.autohete import AutoHete
from autohete.policies.joint import best_plan, every_choice
from autohete.profile import analytic_profile
from autohete.quantities import format_seconds
from autohete.report.tables import console, print_text, table
from autohete.simulate import judge_for
from autohete.simulate.judge import SimulatingJudge
from experiments.comparison import MODELS, NODE
from experiments.shared import csv_text

#: The choices without each decision.
WITHOUT: dict[str, Callable[[UnitPlan], bool]] = {
    "streamed_states": lambda unit: not unit.fetches_states,
    "host_activations": lambda unit: not unit.kept.leaves,
    "stays": lambda unit: not (unit.parameters.stays_after_forward or unit.parameters.stays_after_backward),
}
#: Counts of units per decision.
UNITS: dict[str, Callable[[UnitPlan], bool]] = {
    "recomputed": lambda unit: unit.activations is Activations.RECOMPUTE,
    "host_kept": lambda unit: unit.kept.leaves,
    "host_parameters": lambda unit: unit.parameters.leaves,
    "staying_parameters": lambda unit: unit.parameters.stays_after_forward or unit.parameters.stays_after_backward,
    "cpu_updated": lambda unit: unit.update.on is Processor.CPU,
    "streamed": lambda unit: unit.fetches_states,
}


@dataclass(frozen=True, slots=True)
class Row:
    """A model: iteration times under both policies, and without each decision.

    Args:
        model: its name.
        autohete_seconds, joint_seconds, bound_seconds: iteration times; the last is a lower bound for all joint plans.
        plan: the joint plan.
        without: iteration time without each decision.
        planning_seconds: processor time of the joint plan.
    """

    model: str
    autohete_seconds: float
    joint_seconds: float
    bound_seconds: float
    plan: Plan
    without: dict[str, float]
    planning_seconds: float

    @property
    def gain(self) -> float:
        """Relative gain in throughput."""
        return self.autohete_seconds / self.joint_seconds - 1


def measure(model: str) -> Row:
    """Plan ``model`` in all ways."""
    profile = analytic_profile(MODELS[model], load_hardware(NODE))
    choices = every_choice(profile).where(lambda unit: unit.activations is not Activations.SELECTIVE)
    judge = judge_for(profile)
    before = judge(AutoHete().plan(profile, judge)).seconds
    judge, begin = SimulatingJudge(profile), time.process_time()  # one that knows nothing yet
    plan = best_plan(profile, judge, choices)
    took, seconds = time.process_time() - begin, judge(plan).seconds
    without = {name: judge(best_plan(profile, judge, choices.where(allowed))).seconds for name, allowed in WITHOUT.items()}
    return Row(model, before, seconds, plan.bound_seconds or 0.0, plan, without, took)


def rows_csv(rows: list[Row]) -> str:
    """One row per model."""
    header = ["model", "autohete_seconds", "joint_seconds", "bound_seconds", "gain", *UNITS]
    lines = [[*header, *(f"gain_without_{name}" for name in WITHOUT)]]
    for row in rows:
        numbers = (row.autohete_seconds, row.joint_seconds, row.bound_seconds, row.gain)
        counts = [str(sum(map(decided, row.plan.units))) for decided in UNITS.values()]
        left = [row.autohete_seconds / seconds - 1 for seconds in row.without.values()]
        lines.append([row.model, *(f"{x:.5g}" for x in numbers), *counts, *(f"{x:.5g}" for x in left)])
    return csv_text(lines)


def main(*, out: Path = Path("paper_figs"), jobs: int = 2) -> None:
    """Plan every model, and write ``joint.csv``.

    Parameters
    ----------
    out:
        Folder for the file.
    jobs:
        Number of processes.
    """
    make_folder(out)
    rows: list[Row] = list(Parallel(n_jobs=jobs, batch_size=1)(delayed(measure)(model) for model in MODELS))
    write_text(out / "joint.csv", rows_csv(rows))
    shown = table("joint against autohete", ["model", "autohete", "joint", "gain", *(f"no {name}" for name in WITHOUT), "plan"])
    for row in rows:
        left = [f"{100 * (row.autohete_seconds / seconds - 1):.1f} %" for seconds in row.without.values()]
        iterations = (format_seconds(row.autohete_seconds), format_seconds(row.joint_seconds))
        shown.add_row(row.model, *iterations, f"{100 * row.gain:.1f} %", *left, format_seconds(row.planning_seconds))
    printed = console()
    printed.print(shown)
    gains = [100 * row.gain for row in rows]
    planning = [row.planning_seconds for row in rows]
    print_text(printed, f"gain: median {median(gains):.1f} %, at most {max(gains):.1f} %, at least {min(gains):.1f} %")
    print_text(printed, f"planning: median {median(planning):.1f} s, at most {max(planning):.1f} s")


if __name__ == "__main__":
    run_app(App(name="joint", default_command=main, help=__doc__))
