"""How much time does recomputation cost for the memory that it saves, by what is recomputed together?

Command: ``python experiments/fig_checkpoint_granularity.py [--out DIR] [--jobs N]``. Machine: any; everything is simulated.

Everything stays on a GPU of the published node whose memory is made large enough, so that only activations differ: none
recomputed; attention or elementwise results recomputed (selective); every block from its input; segments of several blocks
(Chen et al. 2016), with and without the last; and Rotor, the fastest plan of each memory budget, which may nest segments.

Writes ``fig_checkpoint_granularity.{png,pdf,csv}``.

What would refute it: a plan below Rotor's line other than a selective one, which Rotor does not choose; or segments of several
blocks that need less memory than segments of one.
"""

from __future__ import annotations

if __name__ == "__main__":
    import _start  # type: ignore[import-not-found]  # noqa: F401

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cyclopts import App
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from autohete.cli.app import run_app
from autohete.files import make_folder
from autohete.quantities import format_bytes, format_seconds
from autohete.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILION, style
from autohete.report.tables import or_dash, table
from experiments.comparison import MODELS, NODE
from experiments.shared import FOLDER, Cell, Grid, Summaries, grid_lines, print_table, run_all, save

NAMES = ("model", "gpu_memory_gib")
#: Enough for every plan.
LARGE_GIB = 400
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Mark:
    """Label, colour and marker of what is recomputed together."""

    label: str
    colour: str
    marker: str


MARKS = {
    "resident:checkpointing=none": Mark("nothing recomputed", GREY, "X"),
    "resident:checkpointing=selective": Mark("selective", GREEN, "P"),
    "resident:checkpointing=full": Mark("every block", BLUE, "o"),
    "sqrt_checkpoint": Mark("segments", ORANGE, "s"),
    "sqrt_checkpoint:keep_last": Mark("segments, the last kept", PURPLE, "D"),
}
ROTOR = "rotor"


def grid(model: str, segments: Sequence[int], budgets: Sequence[int]) -> Grid:
    """Every way to recompute, in ample memory, and Rotor in each budget."""
    blocks = MODELS[model].transformer_blocks
    policies = [policy for policy in MARKS if policy.startswith("resident")]
    for count in segments:
        if count <= blocks:
            policies += [f"sqrt_checkpoint:segments={count}", f"sqrt_checkpoint:keep_last,segments={count}"]
    ample: Grid = {(model, LARGE_GIB, policy): _cell(model, policy, LARGE_GIB) for policy in policies}
    return {**ample, **{(model, gib, ROTOR): _cell(model, ROTOR, gib) for gib in budgets}}


def _cell(model: str, policy: str, gib: int) -> Cell:
    return Cell(MODELS[model], policy, NODE, (("gpu.memory", f"{gib}GiB"),))


def draw(models: Sequence[str], cells: Grid, summaries: Summaries) -> Figure:
    """Draw iteration time by peak memory, one panel per model."""
    with style():
        figure = Figure(figsize=(7.0, 2.8), layout="constrained")
        for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
            points = {key: summaries[cell] for key, cell in cells.items() if key[0] == model}
            rotor = sorted(
                (s.gpu_peak_bytes / _GIB, s.iteration_seconds)
                for key, s in points.items()
                if key[-1] == ROTOR and s.iteration_seconds is not None and s.gpu_peak_bytes is not None
            )
            axes.plot([x for x, _ in rotor], [y for _, y in rotor], color=VERMILION, marker=".", markersize=4, zorder=1)
            for (_, _, policy), s in points.items():
                if policy != ROTOR and s.iteration_seconds is not None and s.gpu_peak_bytes is not None:
                    mark = MARKS[max((name for name in MARKS if str(policy).startswith(name)), key=len)]
                    top = 3 if str(policy).startswith("resident") else 2  # segments of one block are every block
                    at = s.gpu_peak_bytes / _GIB, s.iteration_seconds
                    axes.plot(*at, mark.marker, color=mark.colour, markersize=4.5, zorder=top)
            axes.set_xlabel("peak of GPU memory (GiB)")
            axes.set_ylabel("iteration time (s, simulated)")
            axes.set_title(f"{MODELS[model].parameters / 1e9:.1f}B, {MODELS[model].transformer_blocks} blocks")
        handles = [
            Line2D([], [], linestyle="none", marker=m.marker, color=m.colour, markersize=4.5, label=m.label)
            for m in MARKS.values()
        ]
        handles.append(Line2D([], [], color=VERMILION, marker=".", label="Rotor, one plan per budget"))
        figure.legend(handles=handles, loc="outside upper center", ncols=6)
    return figure


def print_plans(cells: Grid, summaries: Summaries) -> None:
    """Print time and memory of each plan."""
    shown = table("all on the GPU, simulated", ["model", "budget", "policy", "iteration", "GPU peak"], left=3)
    for (model, gib, policy), cell in cells.items():
        s = summaries[cell]
        times = or_dash(s.iteration_seconds, format_seconds), or_dash(s.gpu_peak_bytes, format_bytes)
        shown.add_row(str(model), f"{gib} GiB", str(policy), *times)
    print_table(shown)


def main(
    *,
    out: Path = FOLDER,
    jobs: int | None = None,
    models: tuple[str, ...] = ("gpt-2b", "gpt-4b"),
    segments: tuple[int, ...] = (2, 3, 4, 5, 7, 10, 14, 20),
    budgets: tuple[int, ...] = (36, 38, 40, 42, 46, 50, 56, 64, 72, 74, 76, 80, 84, 88, 92, 96, 104, 112, 120, 128),
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
    segments:
        Numbers of segments.
    budgets:
        Memories of the GPU in GiB that Rotor plans for.
    """
    make_folder(out)
    cells = {key: cell for model in models for key, cell in grid(model, segments, budgets).items()}
    summaries = run_all(Cell.run, cells.values(), jobs)
    print_plans(cells, summaries)
    save(out, "fig_checkpoint_granularity", draw(models, cells, summaries), grid_lines(NAMES, cells, summaries))


if __name__ == "__main__":
    run_app(App(name="fig_checkpoint_granularity", default_command=main, help=__doc__))
