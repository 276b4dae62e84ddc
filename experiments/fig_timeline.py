"""Where does an iteration's time go under four systems?

Command: ``python experiments/fig_timeline.py [--out DIR]``. Machine: any; everything is simulated.

One steady iteration of a model of the published comparison, on its node: one row of lanes per system, on one time axis. The
CSV file has the busy time of each lane, how much of it the GPU's work hides, and the GPU's idle time by cause.

Writes ``fig_timeline.{png,pdf,csv}``.

What would refute it: a trace from the real system in which another lane is the busiest, or whose GPU waits for something else.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _start  # type: ignore[import-not-found]  # noqa: F401

from pathlib import Path

from cyclopts import App

from autohete.analysis.usage import Cause
from autohete.cli.app import run_app
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
from experiments.comparison import MODELS, NODE
from experiments.shared import FOLDER, look, print_table, save

POLICIES = ("zero_offload", "patrickstar", "stronghold", "autohete")
LANES = (GPU, H2D, D2H, CPU)
#: By then every iteration is like the one before.
ITERATION = 6


def simulate(model: str) -> dict[str, tuple[Summary, Simulation]]:
    """The answer of each system."""
    simulations = {}
    for policy in POLICIES:
        summary, simulation = answer(analytic_profile(MODELS[model], load_hardware(NODE)), parse_policy(policy))
        assert simulation is not None, f"{policy} trains {model}"
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


def main(*, out: Path = FOLDER, jobs: int | None = None, model: str = "gpt-4b") -> None:
    """Simulate, print and draw.

    Parameters
    ----------
    out:
        Folder for the files.
    jobs:
        Not used: four simulations take a second.
    model:
        Model of the published comparison.
    """
    make_folder(out)
    simulations = simulate(model)
    runs = [(look(policy).label, SimExecutor().run(one.schedule, ITERATION + 2)) for policy, (_, one) in simulations.items()]
    batch = f"{MODELS[model].batch_size} x {MODELS[model].sequence_length}"
    title = f"one iteration of {MODELS[model].parameters / 1e9:.1f}B parameters, batch of {batch} tokens, {NODE}"
    print_idle(model, simulations)
    save(out, "fig_timeline", stacked_figure(runs, ITERATION, title), lines(model, simulations))


if __name__ == "__main__":
    run_app(App(name="fig_timeline", default_command=main, help=__doc__))
