"""Where does an iteration's time go under four systems?

Command: ``python experiments/fig_timeline.py [--out DIR]``. Machine: any; everything is simulated.

One steady iteration of a model of the published comparison, on its node: one row of lanes per system, on one time axis. The
CSV file has the busy time of each lane, how much of it the GPU's work hides, and the GPU's idle time by cause.

``--model``, ``--hardware`` and ``--set`` ask for others.

Writes ``fig_timeline.{png,pdf,csv}``.

What would refute it: a trace from the real system in which another lane is the busiest, or whose GPU waits for something else.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

from pathlib import Path

from cyclopts import App

from autohete.analysis.usage import Cause
from autohete.cli.app import run_app
from autohete.errors import InputError
from autohete.files import make_folder
from autohete.hardware import load_hardware
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.quantities import format_seconds
from autohete.report.gantt import stacked_figure
from autohete.report.tables import table
from autohete.schedule import CPU, D2H, GPU, H2D
from autohete.sim import SimExecutor
from autohete.simulate import Simulation
from autohete.simulate.summary import Summary, answer
from experiments.looks import look
from experiments.setting import PUBLISHED_NODE, Where, batch_of, model_of, size_of
from experiments.shared import FOLDER, print_table, save

POLICIES = ("zero_offload", "patrickstar", "stronghold", "autohete")
LANES = (GPU, H2D, D2H, CPU)
#: By then every iteration is like the one before.
ITERATION = 6


def simulate(model: str, where: Where) -> dict[str, tuple[Summary, Simulation]]:
    """The answer of each system."""
    simulations, profile = {}, analytic_profile(model_of(model), load_hardware(where.hardware, dict(where.moved)))
    for policy in POLICIES:
        summary, simulation = answer(profile, parse_policy(policy))
        if simulation is None or summary.iteration_seconds is None:
            raise InputError(f"{policy} does not train {model} on {where.text}: {summary.explanation}")
        simulations[policy] = summary, simulation
    return simulations


def lines(model: str, simulations: dict[str, tuple[Summary, Simulation]]) -> list[list[object]]:
    """One row per system and lane: seconds of work, the share of it that the GPU hides; and seconds of idle time by cause."""
    rows: list[list[object]] = [["model", "policy", "iteration_seconds", "what", "name", "seconds", "hidden_share", "clock"]]
    for policy, (s, _) in simulations.items():
        assert s.iteration_seconds is not None, f"{policy} trains {model}"
        head = [model, policy, s.iteration_seconds]
        rows += [[*head, "lane", lane, s.lanes[lane] * s.iteration_seconds, s.overlaps.get(lane), s.clock] for lane in LANES]
        rows += [[*head, "idle", str(cause), seconds, None, s.clock] for cause, seconds in s.idle_seconds.items()]
    return rows


def print_idle(model: str, simulations: dict[str, tuple[Summary, Simulation]]) -> None:
    """Print busy shares and the main cause of idle time of each system."""
    shown = table(f"{model}, simulated", ["policy", "iteration", *(f"{lane} busy" for lane in LANES), "GPU waits for"], left=1)
    for policy, (s, _) in simulations.items():
        cause, seconds = max(s.idle_seconds.items(), key=lambda item: item[1], default=(Cause.NOTHING, 0.0))
        times = format_seconds(s.iteration_seconds or 0.0), *(f"{100 * s.lanes[lane]:.0f} %" for lane in LANES)
        shown.add_row(policy, *times, f"{cause} ({format_seconds(seconds)})")
    print_table(shown)


def main(*, out: Path = FOLDER, jobs: int | None = None, model: str = "gpt-4b", where: Where = PUBLISHED_NODE) -> None:
    """Simulate, print and draw.

    Parameters
    ----------
    out:
        Folder for the files.
    jobs:
        Not used: four simulations take a second.
    model:
        Model of the published comparison, or another one.
    where:
        The hardware.
    """
    make_folder(out)
    simulations = simulate(model, where)
    runs = [(look(policy).label, SimExecutor().run(one.schedule, ITERATION + 2)) for policy, (_, one) in simulations.items()]
    title = f"one iteration of {size_of(model)}, {batch_of(model_of(model))}, {where.text}"
    print_idle(model, simulations)
    save(out, "fig_timeline", stacked_figure(runs, ITERATION, title), lines(model, simulations))


if __name__ == "__main__":
    run_app(App(name="fig_timeline", default_command=main, help=__doc__))
