"""How does throughput depend on the batch, and up to which batch does each system train?

Command: ``python experiments/fig_batch_size.py [--out DIR] [--jobs N]``. Machine: any; everything is simulated.

A larger batch gives the GPU more work for the same parameters, gradients and updates, so copies and CPU updates weigh less.
It also needs more memory for activations. Two models of the published comparison on its node.

Writes ``fig_batch_size.{png,pdf,csv}``.

What would refute it: a system that overlaps nothing (PatrickStar) and gains less from a larger batch than one whose copies
are hidden, or AutoHete slower than a system that it is compared with, at any batch.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python experiments/fig_batch_size.py` from anywhere

if __name__ == "__main__":  # before the imports that take time
    from autohete.cli.interrupt import catch_interrupts

    catch_interrupts("fig_batch_size")

from collections.abc import Sequence
from dataclasses import replace

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
NAMES = ("model", "batch_size")


def grid(models: Sequence[str], batches: Sequence[int]) -> Grid:
    """Every model, batch and policy."""
    return {
        (model, batch, policy): Cell(replace(MODELS[model], batch_size=batch), policy, NODE)
        for model in models
        for batch in batches
        for policy in POLICIES
    }


def draw(models: Sequence[str], batches: Sequence[int], cells: Grid, summaries: Summaries) -> Figure:
    """Draw tokens/s by batch, one panel per model."""
    panels = [
        Panel(
            f"{MODELS[model].parameters / 1e9:.1f}B parameters",
            "batch (sequences of 1024 tokens)",
            "throughput (tokens/s, simulated)",
            ticks(batches),
            lines_of(cells, summaries, model, lambda s: s.tokens_per_second),
        )
        for model in models
    ]
    return draw_panels(panels)


def main(
    *,
    out: Path = FOLDER,
    jobs: int | None = None,
    models: tuple[str, ...] = ("gpt-4b", "gpt-10b"),
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
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
    batches:
        Batch sizes.
    """
    make_folder(out)
    cells = grid(models, batches)
    summaries = run_all(Cell.run, cells.values(), jobs)
    print_rates(f"1 GPU of {NODE}", cells, summaries)
    save(out, "fig_batch_size", draw(models, batches, cells, summaries), grid_lines(NAMES, cells, summaries))


if __name__ == "__main__":
    run_app(App(name="fig_batch_size", default_command=main, help=__doc__))
