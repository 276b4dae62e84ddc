"""What does each GiB of GPU memory buy, for models of 4B and 6B?

Command: ``python experiments/fig_memory_budget.py [--out DIR] [--jobs N]``. Machine: any; everything is simulated.

Only the GPU's memory changes; its speed, the links and the host are those of the node of the published comparison. Each
system plans for each budget. Reserved memory (context, workspaces) is part of the budget.

``--model``, ``--hardware`` and ``--set`` ask for others.

Writes ``fig_memory_budget.{png,pdf,csv}``.

What would refute it: a system that gets slower with more memory by more than its search's gap, or one that trains in a budget
that others have measured to be too small.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cyclopts import App

from autohete.cli.app import run_app
from experiments.setting import PUBLISHED_NODE, Models, Where, batch_of, model_of, size_of, with_gpu
from experiments.shared import FOLDER, LINES, Cell, Grid, Panel, Summaries, lines_figure, lines_of, ticks

NAMES = ("model", "gpu_memory_gib")


def grid(models: Sequence[str], budgets: Sequence[int], where: Where = PUBLISHED_NODE) -> Grid:
    """Every model, budget and policy."""
    return {
        (model, gib, policy): Cell(model_of(model), policy, where.hardware, with_gpu(where, gib))
        for model in models
        for gib in budgets
        for policy in LINES
    }


def panels(models: Sequence[str], budgets: Sequence[int], cells: Grid, summaries: Summaries) -> list[Panel]:
    """Return a panel per model: TFLOP/s by budget."""
    return [
        Panel(
            f"{size_of(model)}, {batch_of(model_of(model))}",
            "GPU memory (GiB)",
            "throughput (model TFLOP/s, simulated)",
            ticks(budgets),
            lines_of(cells, summaries, model, lambda s: s.tflops_per_gpu),
        )
        for model in models
    ]


def main(
    *,
    out: Path = FOLDER,
    jobs: int | None = None,
    models: Models = ("gpt-4b", "gpt-6b"),
    budgets: tuple[int, ...] = (8, 10, 12, 16, 20, 24, 32, 40),
    where: Where = PUBLISHED_NODE,
) -> None:
    """Simulate, print and draw.

    Parameters
    ----------
    out:
        Folder for the files.
    jobs:
        Number of processes. By default one per core.
    models:
        Models of the published comparison, or other models; repeatable.
    budgets:
        Memories of the GPU in GiB.
    where:
        The hardware.
    """
    cells, title = grid(models, budgets, where), f"1 GPU of {where.text}, by its memory in GiB"
    lines_figure(out / "fig_memory_budget", NAMES, title, cells, partial(panels, models, budgets, cells), jobs)


if __name__ == "__main__":
    run_app(App(name="fig_memory_budget", default_command=main, help=__doc__))
