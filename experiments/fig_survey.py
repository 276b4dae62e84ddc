"""How fast is every system of this package by the memory of the GPU, and which is the fastest where?

Command: ``python experiments/fig_survey.py [--out DIR] [--jobs N]``. Machine: any; everything is simulated.

A model of 8B parameters in bf16 with fused kernels, batches of 8 x 1024 tokens, on one GPU of a workstation with 512 GiB of
host memory and a drive. Only the memory of the GPU changes. Each system has the flags of its users that are fastest with that
memory; its line begins with the smallest GPU that it trains on. A larger GPU is never slower, since a plan for less memory
fits it.

``--model``, ``--hardware`` and ``--set`` ask for others.

Writes ``fig_survey.{png,pdf,csv}``.

What would refute it: a system that trains on a smaller GPU than that with which its line begins; or a measured ranking of two
systems with the same memory that is the other way round, by more than the errors of the model (docs/results.md).
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from cyclopts import App
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.path import Path as Stroke
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from autohete.answer.policies import JOINT, longest_first
from autohete.answer.result import Candidate
from autohete.cli.app import run_app
from autohete.files import make_folder
from autohete.policies import POLICIES, STALE
from autohete.report.style import style
from autohete.report.tables import table
from experiments.best_flags import BestFlags, Least
from experiments.looks import look
from experiments.setting import Where, batch_of, model_of, size_of, with_gpu
from experiments.shared import FOLDER, RESULTS, print_table, result_cells, run_all, save, ticks

NAMES = ("system", "gpu_memory_gib")
MODEL = "llama-3.1-8b"
WORKSTATION = Where(hardware="rtx4090-workstation", set_=("host.memory=512GiB",))
#: Memories of the GPU in GiB.
SIZES = (8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 192)
Cells = Mapping[tuple[str, float], BestFlags]
#: For each system that trains, GPU memories in GiB, and the time of a token in ms with at most that.
Curves = Mapping[str, Sequence[tuple[float, float]]]
#: Names are put at most so many points from where their lines begin; a line behind one is as bad as so many points.
_FARTHEST, _BEHIND = 120, 15


def smallest(model: str, systems: Sequence[str], where: Where, jobs: int | None) -> dict[str, float | None]:
    """The smallest GPU of each system, in GiB; None if none is large enough."""
    searches = {name: BestFlags(model_of(model), name, where.hardware, where.moved) for name in longest_first(systems)}
    found = run_all(BestFlags.least, searches.values(), jobs)

    def gib(one: Least | None) -> float | None:
        return None if one is None else round(one.gpu_bytes / 2**30, 1)

    return {name: gib(found[searches[name]]) for name in systems}


def grid(model: str, least: Mapping[str, float | None], sizes: Sequence[int], where: Where) -> Cells:
    """Every system with the smallest GPU that it trains on and with all that are larger; ``joint`` also with those with which
    another line begins, so that it can be compared everywhere.
    """
    begins = sorted({*sizes, *(first for first in least.values() if first is not None)})
    return {
        (name, gib): BestFlags(model_of(model), name, where.hardware, with_gpu(where, gib))
        for name in longest_first([*least])
        if (first := least[name]) is not None
        for gib in (first, *(size for size in (begins if name == JOINT else sizes) if size > first))
    }


def curves(cells: Cells, found: Mapping[BestFlags, Candidate]) -> Curves:
    """The least time of each system with at most each GPU memory."""
    made: dict[str, list[tuple[float, float]]] = {}
    for (name, gib), cell in cells.items():
        points, one = made.setdefault(name, []), found[cell]
        if one.fits:
            points.append((gib, min(1e3 * one.seconds_per_token, points[-1][1] if points else math.inf)))
    return {name: points for name, points in made.items() if points}


def front(drawn: Curves) -> list[tuple[float, float]]:
    """The Pareto front: with at most each GPU memory, the least time of all systems."""
    points, best = list[tuple[float, float]](), math.inf
    for gib, milliseconds in sorted(point for line in drawn.values() for point in line):
        if milliseconds < best:
            best = milliseconds
            points.append((gib, best))
    return points


def lines(cells: Cells, found: Mapping[BestFlags, Candidate]) -> list[list[object]]:
    """The rows of the CSV file."""
    summaries = ((key, found[cell].summary) for key, cell in cells.items())
    return [[*NAMES, *RESULTS], *([*key, *result_cells(s.policy, s)] for key, s in summaries)]


def print_curves(drawn: Curves, missing: Sequence[str]) -> None:
    """Print both ends of each system's line, the smallest GPU first."""
    heads = ["", "smallest GPU (GiB)", "ms/token", "with GiB", "ms/token"]
    shown = table("smallest GPU, and the fastest; simulated", heads, left=1)
    for name, points in sorted(drawn.items(), key=lambda line: line[1][0]):
        best = min(points, key=lambda point: point[1])
        shown.add_row(name, f"{points[0][0]:.1f}", f"{points[0][1]:.3f}", f"{best[0]:.1f}", f"{best[1]:.3f}")
    for name in missing:
        shown.add_row(name, "-", "-", "-", "-")
    print_table(shown)


# --- what is drawn ------------------------------------------------------------------------------------------------


def draw(drawn: Curves, missing: Sequence[str], title: str) -> Figure:
    """Draw the lines over logarithmic axes: each system's, the Pareto front of all but ``joint`` and those that delay updates,
    and ``joint``'s.
    """
    last = max(gib for points in drawn.values() for gib, _ in points)
    with style():
        figure = Figure(figsize=(7.0, 5.4), layout="constrained")
        axes = figure.subplots()
        others = front({name: points for name, points in drawn.items() if name not in (JOINT, *STALE)})
        _steps(axes, others, last, color="0.1", linewidth=2.6, zorder=2.5)
        for name, points in drawn.items():
            ours = name == JOINT
            width, order = (2.0, 3.0) if ours else (0.9, 2.0)
            _steps(axes, points, last, color=look(name).ink, linestyle=look(name).line, linewidth=width, zorder=order)
            axes.plot(*points[0], look(name).marker, color=look(name).ink, markersize=5, markeredgecolor="white", zorder=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        marks = ticks(size for size in (8, 12, 16, 24, 32, 48, 64, 96, 128, 192) if size <= last)
        axes.set_xticks(list(marks), list(marks.values()))
        axes.minorticks_off()
        axes.set_yticks([mantissa * 10.0**power for power in range(-3, 4) for mantissa in (1, 2, 5)])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        times = [milliseconds for points in drawn.values() for _, milliseconds in points]
        axes.set_xlim(min(points[0][0] for points in drawn.values()) / 1.25, last)
        axes.set_ylim(min(times) / 1.3, max(times) * 1.4)
        axes.set_xlabel("GPU memory (GiB)")
        axes.set_ylabel("time per token (ms)")
        but = "joint and *, which delays updates" if set(STALE) & set(drawn) else "joint"
        axes.set_title(f"thick: Pareto front of all but {but}; lines begin with the smallest GPU", fontsize=8)
        without = f"\nno plan on any GPU: {', '.join(look(name).label for name in missing)}" if missing else ""
        figure.suptitle(title + without, fontsize=8)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # names are put where they are free now
        _put_names(axes, drawn)
    return figure


def _steps(axes: Axes, points: Sequence[tuple[float, float]], last: float, **how: Any) -> None:
    ends = [*points, (last, points[-1][1])]
    axes.step([x for x, _ in ends], [y for _, y in ends], where="post", **how)


def _put_names(axes: Axes, drawn: Curves) -> None:
    """Write each name near the beginning of its line, where nothing else is written or marked: as near as can be without
    lines behind it, and names behind the stroke that leads to it.
    """
    points = axes.figure.dpi / 72
    marks = {name: axes.transData.transform(line[0]) for name, line in drawn.items()}
    taken = [Bbox.from_extents(x, y, x, y).padded(3 * points) for x, y in marks.values()]
    strokes = [stroke for line in axes.lines for stroke in _strokes(axes.transData.transform(line.get_xydata()))]
    inside = axes.get_window_extent()
    for name, (x, y) in sorted(marks.items(), key=lambda mark: (mark[1][0], -mark[1][1])):
        text = axes.annotate(
            look(name).label + "*" * (name in STALE),
            drawn[name][0],
            (0, 0),
            textcoords="offset points",
            fontsize=6.5,
            va="center",
            zorder=5,
            path_effects=[withStroke(linewidth=1.5, foreground="white")],
            arrowprops={"arrowstyle": "-", "color": look(name).ink, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2},
        )
        size, places = text.get_window_extent(), list[tuple[float, float, float, Bbox]]()
        for right, up in _offsets():
            left = x + right * points - (0 if right >= 0 else size.width)
            box = Bbox.from_bounds(left, y + up * points - size.height / 2, size.width, size.height)
            within = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
            if within and not box.padded(points).count_overlaps(taken):
                leader = Stroke([(x, y), (x + right * points, y + up * points)])
                crossed = sum(leader.intersects_bbox(other, filled=True) for other in taken[len(marks) :])
                cost = math.hypot(right, up) + _BEHIND * (box.count_overlaps(strokes) + 2 * crossed)
                places.append((cost, right, up, box))
        if places:
            _, right, up, box = min(places, key=lambda place: place[0])
            text.set(position=(right, up), horizontalalignment="left" if right >= 0 else "right")
            taken.append(box)


def _strokes(path: NDArray[np.float64]) -> Iterator[Bbox]:
    """The strokes of a line of steps, between corners in pixels."""
    for (x, y), (right, up) in pairwise(path):
        yield Bbox.from_extents(min(x, right), min(y, up), max(x, right), max(y, up)).padded(1)


def _offsets() -> Iterator[tuple[float, float]]:
    """Places around a mark, in points; those before it first, since its line goes on to the right."""
    for distance in range(6, _FARTHEST, 4):
        for angle in (180, 165, -165, 150, -150, 120, -120, 95, -95, 85, -85, 60, -60, 30, -30, 0):
            yield distance * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle))


def main(
    *,
    out: Path = FOLDER,
    jobs: int | None = None,
    model: str = MODEL,
    sizes: tuple[int, ...] = SIZES,
    systems: tuple[str, ...] = tuple(POLICIES),
    where: Where = WORKSTATION,
) -> None:
    """Simulate, print and draw.

    Parameters
    ----------
    out:
        Folder for the files.
    jobs:
        Number of processes. By default one per core.
    model:
        A model of the published comparison, or another one.
    sizes:
        Memories of the GPU in GiB.
    systems:
        Policies.
    where:
        The hardware.
    """
    make_folder(out)
    least = smallest(model, systems, where, jobs)
    cells = grid(model, least, sizes, where)
    found = run_all(BestFlags.fastest, cells.values(), jobs)
    drawn = curves(cells, found)
    missing = [name for name in systems if name not in drawn]
    print_curves(drawn, missing)
    title = f"{size_of(model)}, {where.text}, {batch_of(model_of(model))}, simulated"
    save(out, "fig_survey", draw(drawn, missing, title), lines(cells, found))


if __name__ == "__main__":
    run_app(App(name="fig_survey", default_command=main, help=__doc__))
