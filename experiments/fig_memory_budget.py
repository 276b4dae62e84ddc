"""What does each GiB of GPU memory buy, for models of 4B and 6B?

Command: ``python experiments/fig_memory_budget.py [--out DIR] [--jobs N]``. Machine: any; everything is simulated.

Only the GPU's memory changes; its speed, the links and the host are those of the node of the published comparison. Each
system plans for each budget. Reserved memory (context, workspaces) is part of the budget.

Writes ``fig_memory_budget.{png,pdf,csv}``.

What would refute it: a system that gets slower with more memory by more than its search's gap, or one that trains in a budget
that others have measured to be too small.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python experiments/fig_memory_budget.py` from anywhere

if __name__ == "__main__":  # before the imports that take time
    from autohete.cli.interrupt import catch_interrupts

    catch_interrupts("fig_memory_budget")

from collections.abc import Sequence

from cyclopts import App
from matplotlib.figure import Figure

from autohete.cli.app import run_app
from autohete.files import make_folder
from experiments.comparison import MODELS, NODE
from experiments.shared import (
    FOLDER,
    Cell,
    Grid,
    Panel,
    Summaries,
    draw_panels,
    grid_lines,
    lines_of,
    print_rates,
    run_all,
    save,
    ticks,
)

POLICIES = ("zero_offload", "patrickstar", "stronghold", "autohete", "joint")
NAMES = ("model", "gpu_memory_gib")


def grid(models: Sequence[str], budgets: Sequence[int]) -> Grid:
    """Every model, budget and policy."""
    return {
        (model, gib, policy): Cell(MODELS[model], policy, NODE, (("gpu.memory", f"{gib}GiB"),))
        for model in models
        for gib in budgets
        for policy in POLICIES
    }


def draw(models: Sequence[str], budgets: Sequence[int], cells: Grid, summaries: Summaries) -> Figure:
    """Draw TFLOP/s by budget, one panel per model."""
    panels = [
        Panel(
            f"{MODELS[model].parameters / 1e9:.1f}B parameters, batch of {MODELS[model].batch_size} x 1024 tokens",
            "GPU memory (GiB)",
            "throughput (model TFLOP/s, simulated)",
            ticks(budgets),
            lines_of(cells, summaries, model, lambda s: s.tflops_per_gpu),
        )
        for model in models
    ]
    return draw_panels(panels)


def main(
    *,
    out: Path = FOLDER,
    jobs: int | None = None,
    models: tuple[str, ...] = ("gpt-4b", "gpt-6b"),
    budgets: tuple[int, ...] = (8, 10, 12, 16, 20, 24, 32, 40),
) -> None:
    """Simulate, print and draw.

    Parameters
    ----------
    out:
        Folder for the files.
    jobs:
        Number of processes. By default one per core.
    models:
        Models of the published comparison.
    budgets:
        Memories of the GPU in GiB.
    """
    make_folder(out)
    cells = grid(models, budgets)
    summaries = run_all(Cell.run, cells.values(), jobs)
    print_rates(f"1 GPU of {NODE} with GiB of memory", cells, summaries)
    save(out, "fig_memory_budget", draw(models, budgets, cells, summaries), grid_lines(NAMES, cells, summaries))


if __name__ == "__main__":
    run_app(App(name="fig_memory_budget", default_command=main, help=__doc__))
