"""How does throughput depend on the length of sequences, at the same number of tokens?

Command: ``python experiments/fig_sequence_length.py [--out DIR] [--jobs N]``. Machine: any; everything is simulated.

Each iteration has 32,768 tokens per GPU, as 64 sequences of 512 to one of 32,768. The kernels are fused, with FlashAttention:
eager attention stores a score for each pair of tokens, 64 times as many at the end as at the beginning. What grows is the time
of attention; parameters, gradients and updates stay the same, and activations nearly.

``--model``, ``--hardware`` and ``--set`` ask for others.

Writes ``fig_sequence_length.{png,pdf,csv}``.

What would refute it: a system whose throughput falls faster than that of the GPU's own work, shown by the system that moves
nothing, since longer passes hide more of the copies.
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
from autohete.errors import InputError
from autohete.workload import Kernels
from experiments.setting import PUBLISHED_NODE, Where, model_of, size_of
from experiments.shared import FOLDER, LINES, Cell, Grid, Panel, Summaries, lines_figure, lines_of

NAMES = ("model", "sequence_length")
TOKENS = 32_768


def grid(model: str, lengths: Sequence[int], where: Where = PUBLISHED_NODE) -> Grid:
    """Every length and policy."""
    if any(TOKENS % length for length in lengths):
        raise InputError(f"lengths are {', '.join(map(str, lengths))}: give divisors of {TOKENS}, the tokens of an iteration")
    fused = replace(model_of(model), kernels=Kernels.FUSED)
    return {
        (model, length, policy): Cell(
            replace(fused, sequence_length=length, batch_size=TOKENS // length), policy, where.hardware, where.moved
        )
        for length in lengths
        for policy in LINES
    }


def panels(model: str, lengths: Sequence[int], cells: Grid, summaries: Summaries) -> list[Panel]:
    """Return two panels: tokens/s and TFLOP/s by length."""
    label, names = "length of sequences (tokens)", {n: str(n) if n < 1024 else f"{n // 1024}k" for n in lengths}
    title = f"{size_of(model)} parameters, {TOKENS:,} tokens per iteration"
    rates = lines_of(cells, summaries, model, lambda s: s.tokens_per_second)
    work = lines_of(cells, summaries, model, lambda s: s.tflops_per_gpu)
    return [
        Panel(title, label, "throughput (tokens/s, simulated)", names, rates),
        Panel("the same in work", label, "throughput (model TFLOP/s, simulated)", names, work),
    ]


def main(
    *,
    out: Path = FOLDER,
    jobs: int | None = None,
    model: str = "gpt-6b",
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768),
    where: Where = PUBLISHED_NODE,
) -> None:
    """Simulate, print and draw.

    Parameters
    ----------
    out:
        Folder for the files.
    jobs:
        Number of processes. By default one per core.
    model:
        Model of the published comparison, or another one.
    lengths:
        Lengths of sequences, in tokens.
    where:
        The hardware.
    """
    cells, title = grid(model, lengths, where), f"1 GPU of {where.text}, {model_of(model).precision}, fused kernels"
    lines_figure(out / "fig_sequence_length", NAMES, title, cells, partial(panels, model, lengths, cells), jobs)


if __name__ == "__main__":
    run_app(App(name="fig_sequence_length", default_command=main, help=__doc__))
