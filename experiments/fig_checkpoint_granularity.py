"""How much time does recomputation cost for the memory that it saves, by what is recomputed together?

Command: ``python experiments/fig_checkpoint_granularity.py [--out DIR] [--jobs N]``. Machine: any; everything is simulated.

Everything stays on a GPU of the published node whose memory is made large enough, so that only activations differ: none
recomputed; attention or elementwise results recomputed (selective); every block from its input; segments of several blocks
(Chen et al. 2016), with and without the last; and Rotor, the fastest plan of each memory budget, which may nest segments.

``--model``, ``--hardware`` and ``--set`` ask for others.

Writes ``fig_checkpoint_granularity.{png,pdf,csv}``.

What would refute it: a plan below Rotor's line other than a selective one, which Rotor does not choose; or segments of several
blocks that need less memory than segments of one.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cyclopts import App
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from autohete.cli.app import run_app
from autohete.files import make_folder
from autohete.quantities import format_bytes, format_seconds
from autohete.report.style import style
from autohete.report.tables import or_dash, table
from experiments.looks import SystemLook, look
from experiments.setting import PUBLISHED_NODE, Models, Where, batch_of, model_of, size_of, with_gpu
from experiments.shared import FOLDER, Cell, Grid, Summaries, grid_lines, print_table, run_all, save

NAMES = ("model", "gpu_memory_gib")
#: Enough for every plan.
LARGE_GIB = 400
_GIB = 2**30


#: Ways to recompute, besides Rotor's.
WAYS = (
    "resident:checkpointing=none",
    "resident:checkpointing=selective",
    "resident:checkpointing=full",
    "sqrt_checkpoint",
    "sqrt_checkpoint:keep_last",
)
ROTOR = "rotor"


def grid(model: str, segments: Sequence[int], budgets: Sequence[int], where: Where = PUBLISHED_NODE) -> Grid:
    """Every way to recompute, in ample memory, and Rotor in each budget."""
    blocks = model_of(model).transformer_blocks
    policies = [policy for policy in WAYS if policy.startswith("resident")]
    for count in segments:
        if count <= blocks:
            policies += [f"sqrt_checkpoint:segments={count}", f"sqrt_checkpoint:keep_last,segments={count}"]
    ample: Grid = {(model, LARGE_GIB, policy): _cell(model, policy, LARGE_GIB, where) for policy in policies}
    return {**ample, **{(model, gib, ROTOR): _cell(model, ROTOR, gib, where) for gib in budgets}}


def _cell(model: str, policy: str, gib: int, where: Where) -> Cell:
    return Cell(model_of(model), policy, where.hardware, with_gpu(where, gib))


def draw(models: Sequence[str], cells: Grid, summaries: Summaries, where: Where) -> Figure:
    """Draw iteration time by peak memory, one panel per model."""
    with style():
        figure = Figure(figsize=(7.0, 2.9), layout="constrained")
        figure.suptitle(f"{where.text} with a larger GPU, {batch_of(model_of(models[0]))}")
        for axes, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
            points = {key: summaries[cell] for key, cell in cells.items() if key[0] == model}
            rotor = sorted(
                (s.gpu_peak_bytes / _GIB, s.iteration_seconds)
                for key, s in points.items()
                if key[-1] == ROTOR and s.iteration_seconds is not None and s.gpu_peak_bytes is not None
            )
            axes.plot([x for x, _ in rotor], [y for _, y in rotor], color=look(ROTOR).ink, marker=".", markersize=4, zorder=1)
            for (_, _, policy), s in points.items():
                if policy != ROTOR and s.iteration_seconds is not None and s.gpu_peak_bytes is not None:
                    mark = look(str(policy))
                    top = 3 if str(policy).startswith("resident") else 2  # segments of one block are every block
                    at = s.gpu_peak_bytes / _GIB, s.iteration_seconds
                    axes.plot(*at, mark.marker, markersize=4.5, zorder=top, **_edges(mark))
            axes.set_xlabel("peak of GPU memory (GiB)")
            axes.set_ylabel("iteration time (s, simulated)")
            axes.set_title(f"{size_of(model)}, {model_of(model).transformer_blocks} blocks", fontsize=8)
        handles = [
            Line2D([], [], linestyle="none", marker=m.marker, markersize=4.5, label=m.label, **_edges(m))
            for m in map(look, WAYS)
        ]
        handles.append(Line2D([], [], color=look(ROTOR).ink, marker=".", label="Rotor, one plan per budget"))
        figure.legend(handles=handles, loc="outside lower center", ncols=6)
    return figure


def _edges(mark: SystemLook) -> dict[str, Any]:
    """The colours of a marker: with a dark edge, so that marks on the line are seen."""
    return {"color": mark.colour, "markeredgecolor": "0.2", "markeredgewidth": 0.4}


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
    models: Models = ("gpt-2b", "gpt-4b"),
    segments: tuple[int, ...] = (2, 3, 4, 5, 7, 10, 14, 20),
    budgets: tuple[int, ...] = (36, 38, 40, 42, 46, 50, 56, 64, 72, 74, 76, 80, 84, 88, 92, 96, 104, 112, 120, 128),
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
    segments:
        Numbers of segments.
    budgets:
        Memories of the GPU in GiB that Rotor plans for.
    where:
        The hardware.
    """
    make_folder(out)
    cells = {key: cell for model in models for key, cell in grid(model, segments, budgets, where).items()}
    summaries = run_all(Cell.run, cells.values(), jobs)
    print_plans(cells, summaries)
    save(out, "fig_checkpoint_granularity", draw(models, cells, summaries, where), grid_lines(NAMES, cells, summaries))


if __name__ == "__main__":
    run_app(App(name="fig_checkpoint_granularity", default_command=main, help=__doc__))
