"""What the figures share: one cell of a grid, running cells in parallel, the look of each system, and the files."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from autohete.cli.interrupt import in_processes
from autohete.files import make_folder, write_text
from autohete.hardware import Hardware, load_hardware
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.report.style import save_figure, style
from autohete.report.tables import FittedTable, console, print_text, table
from autohete.simulate.summary import Summary, answer
from autohete.workload import Workload
from experiments.looks import look
from experiments.setting import Moved

FOLDER = Path("paper_figs")


# --- cells --------------------------------------------------------------------------------------------------------


_Cell = TypeVar("_Cell", bound=Hashable)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation: a workload under a policy on a hardware.

    Args:
        workload: the model and one GPU's batch.
        policy: as ``--policy`` takes it.
        hardware: name of a preset.
        moved: hardware figures that differ from the preset.
        gpus: GPUs that train together.
    """

    workload: Workload
    policy: str
    hardware: str
    moved: Moved = ()
    gpus: int = 1

    @property
    def node(self) -> Hardware:
        """One GPU and its share of the host."""
        return load_hardware(self.hardware, dict(self.moved)).shared_by(self.gpus)

    def run(self) -> Summary:
        """Simulate it."""
        summary, _ = answer(analytic_profile(self.workload, self.node), parse_policy(self.policy))
        return summary


def run_all(run: Callable[[_Cell], _Result], cells: Iterable[_Cell], jobs: int | None = None) -> dict[_Cell, _Result]:
    """Run each cell once, in ``jobs`` processes (None: one per core), with a progress bar on a terminal's stderr."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    todo, batches = list(dict.fromkeys(cells)), dict[object, list[_Cell]]()
    for cell in todo:
        batches.setdefault(_without_order(cell), []).append(cell)
    results: dict[_Cell, _Result] = {}
    with Progress(*columns, console=console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        bar = progress.add_task("simulating", total=len(todo))
        # Small batches: a policy that searches takes ten times as long as one that does not.
        calls = ((run, batch) for batch in batches.values())
        for found in in_processes(_with_cells, calls, jobs or os.cpu_count() or 1):
            results |= found
            progress.advance(bar, len(found))
    return {cell: results[cell] for cell in todo}


def _with_cells(run: Callable[[_Cell], _Result], cells: Sequence[_Cell]) -> dict[_Cell, _Result]:
    return {cell: run(cell) for cell in cells}


def _without_order(cell: Any) -> object:
    """What a cell has in common with those that run after it in one process: with priority, AutoHete also searches without."""
    return replace(cell, policy=cell.policy.replace("priority=off", "").rstrip(":,"))


#: Cells of a figure by what distinguishes them, the policy last.
Grid = Mapping[tuple[object, ...], Cell]
Summaries = Mapping[Cell, Summary]


def grid_lines(names: Sequence[str], grid: Grid, summaries: Summaries) -> list[list[object]]:
    """The rows of a figure's CSV file: ``names`` of what distinguishes the cells, and their :data:`RESULTS`."""
    return [[*names, *RESULTS], *([*key[:-1], *result_cells(str(key[-1]), summaries[cell])] for key, cell in grid.items())]


def print_rates(title: str, grid: Grid, summaries: Summaries, unit: str = "tokens/s") -> None:
    """Print a table in 80 columns: a row per key, a column per policy; what is short where training does not fit."""
    policies = list(dict.fromkeys(str(key[-1]) for key in grid))
    shown = table(f"{title}: {unit}, simulated", ["", *policies], left=1)
    for row in dict.fromkeys(key[:-1] for key in grid):
        shown.add_row(", ".join(map(str, row)), *(_rate(summaries[grid[*row, policy]]) for policy in policies))
    print_table(shown)


def print_table(shown: FittedTable) -> None:
    """Print a table in 80 columns, or fewer on a narrower terminal."""
    Console(width=min(80, console().width)).print(shown)


def _rate(s: Summary) -> str:
    return s.verdict.removesuffix("-out-of-memory") + " short" if s.tokens_per_second is None else f"{s.tokens_per_second:,.0f}"


# --- lines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of lines.

    Args:
        title, x, y: of the panel and of its axes.
        ticks: where the x axis has marks, and their names.
        lines: for each policy its (x, y), with None for y where training does not fit.
    """

    title: str
    x: str
    y: str
    ticks: Mapping[int, str]
    lines: Mapping[str, Sequence[tuple[float, float | None]]]


def draw_panels(panels: Sequence[Panel], title: str) -> Figure:
    """Draw panels with the same systems side by side over logarithmic axes, with ``title`` above and their legend below."""
    with style():
        figure = Figure(figsize=(7.0, 2.9), layout="constrained")
        figure.suptitle(title)
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for policy, points in panel.lines.items():
                _draw_line(axes, policy, points)
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(panel.ticks), list(panel.ticks.values()), minor=False)
            axes.set_xlim(min(panel.ticks) / 1.1, max(panel.ticks) * 1.1)
            axes.set_ylim(bottom=0)
            axes.set_xlabel(panel.x)
            axes.set_ylabel(panel.y)
            axes.set_title(panel.title, fontsize=8)
        policies = list(panels[0].lines)
        handles = [_handle(policy) for policy in policies]
        handles.append(Line2D([], [], linestyle="none", label="(no point: does not fit)"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) if len(handles) <= 6 else 4)
    return figure


def _handle(policy: str) -> Line2D:
    drawn = look(policy)
    return Line2D([], [], color=drawn.ink, linestyle=drawn.line, marker=drawn.marker, markersize=4, label=drawn.label)


def _draw_line(axes: Axes, policy: str, points: Sequence[tuple[float, float | None]]) -> None:
    drawn = look(policy)
    xs, ys = [x for x, _ in points], [float("nan") if y is None else y for _, y in points]
    axes.plot(
        xs,
        ys,
        drawn.line,
        color=drawn.ink,
        marker=drawn.marker,
        markersize=4,
        markeredgecolor=drawn.ink,
        markeredgewidth=0.5,
        clip_on=False,
    )


#: The systems of the figures of lines.
LINES = ("zero_offload", "patrickstar", "stronghold", "autohete", "joint")


def lines_figure(
    path: Path,
    names: Sequence[str],
    title: str,
    cells: Grid,
    panels: Callable[[Summaries], Sequence[Panel]],
    jobs: int | None,
) -> None:
    """Simulate ``cells``, print their rates, and write the figure of the panels to ``path``.png and .pdf, with its CSV file."""
    make_folder(path.parent)
    summaries = run_all(Cell.run, cells.values(), jobs)
    print_rates(title, cells, summaries)
    save(path.parent, path.name, draw_panels(panels(summaries), title), grid_lines(names, cells, summaries))


def ticks(values: Iterable[int]) -> dict[int, str]:
    """Marks at ``values``, named by their numbers."""
    return {value: str(value) for value in values}


def lines_of(
    cells: Grid, summaries: Summaries, panel: object, value: Callable[[Summary], float | None]
) -> dict[str, list[tuple[float, float | None]]]:
    """The lines of a panel: cells with keys (panel, x, policy), and a value of each summary."""
    lines: dict[str, list[tuple[float, float | None]]] = {}
    for (of, x, policy), cell in cells.items():
        if of == panel:
            lines.setdefault(str(policy), []).append((float(str(x)), value(summaries[cell])))
    return lines


# --- files --------------------------------------------------------------------------------------------------------


def csv_text(lines: Iterable[Sequence[object]]) -> str:
    """Format rows as CSV: numbers with 6 digits, None as an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(map(_cells, lines))
    return text.getvalue()


def _cells(line: Sequence[object]) -> list[str]:
    return ["" if x is None else f"{x:.6g}" if isinstance(x, float) else str(x) for x in line]


#: Columns of every cell, after those that distinguish the cells of a figure.
RESULTS = (
    "policy",
    "verdict",
    "iteration_seconds",
    "tokens_per_second",
    "tflops_per_gpu",
    "gpu_peak_bytes",
    "host_peak_bytes",
    "plan",
    "clock",
)


def result_cells(policy: str, s: Summary) -> list[object]:
    """The values of :data:`RESULTS`; times and rates are empty if training does not fit."""
    rates = (s.iteration_seconds, s.tokens_per_second, s.tflops_per_gpu)
    return [policy, s.verdict, *rates, s.gpu_peak_bytes, s.host_peak_bytes, s.plan or "", s.clock]


def save(out: Path, name: str, figure: Figure, lines: Iterable[Sequence[object]]) -> None:
    """Write ``name``.png, .pdf and .csv, and print their names."""
    write_text(out / f"{name}.csv", csv_text(lines))
    for suffix in ("png", "pdf"):
        save_figure(figure, out / f"{name}.{suffix}")
    print_text(console(), f"written: {out}/{name}.{{png,pdf,csv}}")
