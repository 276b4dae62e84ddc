"""How does throughput depend on the batch, and up to which batch does each system train?

Command: ``python experiments/fig_batch_size.py [--out DIR] [--jobs N]``. Machine: any; everything is simulated.

A larger batch gives the GPU more work for the same parameters, gradients and updates, so copies and CPU updates weigh less.
It also needs more memory for activations. Two models of the published comparison on its node.

Writes ``fig_batch_size.{png,pdf,csv}``.

What would refute it: a system that overlaps nothing (PatrickStar) and gains less from a larger batch than one whose copies
are hidden, or AutoHete slower than a system that it is compared with, at any batch.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _start  # type: ignore[import-not-found]  # noqa: F401

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cyclopts import App

from autohete.cli.app import run_app
from experiments.comparison import MODELS, NODE
from experiments.shared import FOLDER, LINES, Cell, Grid, Panel, Summaries, lines_figure, lines_of, ticks

NAMES = ("model", "batch_size")


def grid(models: Sequence[str], batches: Sequence[int]) -> Grid:
    """Every model, batch and policy."""
    return {
        (model, batch, policy): Cell(replace(MODELS[model], batch_size=batch), policy, NODE)
        for model in models
        for batch in batches
        for policy in LINES
    }


def panels(models: Sequence[str], batches: Sequence[int], cells: Grid, summaries: Summaries) -> list[Panel]:
    """Return a panel per model: tokens/s by batch."""
    return [
        Panel(
            f"{MODELS[model].parameters / 1e9:.1f}B parameters",
            "batch (sequences of 1024 tokens)",
            "throughput (tokens/s, simulated)",
            ticks(batches),
            lines_of(cells, summaries, model, lambda s: s.tokens_per_second),
        )
        for model in models
    ]


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
    cells = grid(models, batches)
    lines_figure(out / "fig_batch_size", NAMES, f"1 GPU of {NODE}", cells, partial(panels, models, batches, cells), jobs)


if __name__ == "__main__":
    run_app(App(name="fig_batch_size", default_command=main, help=__doc__))
