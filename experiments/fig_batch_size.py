"""How does throughput depend on the batch, and up to which batch does each system train?

Command: ``python experiments/fig_batch_size.py [--out DIR] [--jobs N]``. Machine: any; everything is simulated.

A larger batch gives the GPU more work for the same parameters, gradients and updates, so copies and CPU updates weigh less.
It also needs more memory for activations. Two models of the published comparison on its node.

``--model``, ``--hardware`` and ``--set`` ask for others.

Writes ``fig_batch_size.{png,pdf,csv}``.

What would refute it: a system that overlaps nothing (PatrickStar) and gains less from a larger batch than one whose copies
are hidden, or AutoHete slower than a system that it is compared with, at any batch.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from cyclopts import App

from autohete.cli.app import run_app
from experiments.setting import PUBLISHED_NODE, Models, Where, kernels_of, model_of, size_of
from experiments.shared import FOLDER, LINES, Cell, Grid, Panel, Summaries, lines_figure, lines_of, ticks

NAMES = ("model", "batch_size")


def grid(models: Sequence[str], batches: Sequence[int], where: Where = PUBLISHED_NODE) -> Grid:
    """Every model, batch and policy."""
    return {
        (model, batch, policy): Cell(replace(model_of(model), batch_size=batch), policy, where.hardware, where.moved)
        for model in models
        for batch in batches
        for policy in LINES
    }


def panels(models: Sequence[str], batches: Sequence[int], cells: Grid, summaries: Summaries) -> list[Panel]:
    """Return a panel per model: tokens/s by batch."""
    return [
        Panel(
            f"{size_of(model)} parameters, {kernels_of(model_of(model))}",
            f"batch (sequences of {model_of(model).sequence_length} tokens)",
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
    models: Models = ("gpt-4b", "gpt-10b"),
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
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
    batches:
        Batch sizes.
    where:
        The hardware.
    """
    cells = grid(models, batches, where)
    lines_figure(out / "fig_batch_size", NAMES, f"1 GPU of {where.text}", cells, partial(panels, models, batches, cells), jobs)


if __name__ == "__main__":
    run_app(App(name="fig_batch_size", default_command=main, help=__doc__))
