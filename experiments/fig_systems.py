"""How fast is every system of this package on four machines, for three models, and how small may the GPU be?

Command: ``python experiments/fig_systems.py [--out DIR] [--jobs N]``. Machine: any; everything is simulated.

Bundled models of 3B, 8B and 14B parameters in bf16 with fused kernels, batches of 8 x 1024 tokens on each GPU, which stages of
a pipeline share: on one GPU of the node of the published comparison, of a workstation with a drive and of a server with PCIe
5, and on four GPUs that share a host. Each system has those flags of its users that are fastest; for the smallest GPU,
those that need the least of its memory, while the other memories are those of the machine.

``--model``, ``--hardware`` (NAME, or NAME:GPUS for several) and ``--set`` (for each machine) ask for others.

Writes ``fig_systems.{png,pdf,csv}`` (tokens/s), ``fig_systems_memory.{png,pdf,csv}`` (the smallest GPU), and
``fig_systems_gains.csv``: by how much ``joint`` is faster than the fastest other system that fits and trains synchronously.

What would refute it: a measured ranking of two systems on one of these machines that is the other way round, by more than the
errors of the model (docs/results.md); or a system that trains on a smaller GPU.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
from cyclopts import App, Parameter
from matplotlib import colormaps
from matplotlib.figure import Figure

from autohete.answer.policies import longest_first
from autohete.answer.result import Candidate
from autohete.cli.app import run_app
from autohete.execution.trace import Clock
from autohete.files import make_folder, write_text
from autohete.hardware import node_text
from autohete.plan.policy import Verdict
from autohete.policies import POLICIES
from autohete.quantities import format_bytes
from autohete.report.style import style
from autohete.report.tables import console, print_text, table
from experiments.best_flags import BestFlags, Least
from experiments.setting import Models, Moved, Where, batch_of, model_of
from experiments.shared import FOLDER, RESULTS, csv_text, print_table, result_cells, run_all, save

NAMES = ("hardware", "gpus", "model", "system")
#: The system whose gain over all others is reported.
OWN = "joint"
#: One column: a machine, with its number of GPUs, and a model.
Column = tuple[str, int, str]
Systems = Mapping[tuple[str, int, str, str], BestFlags]


@dataclass(frozen=True, slots=True)
class Results:
    """What was found: columns, systems as they are drawn, and for each of both the fastest plan and the smallest GPU."""

    columns: tuple[Column, ...]
    systems: tuple[str, ...]
    cells: Systems
    found: Mapping[BestFlags, tuple[Candidate, Least | None]]

    def fastest(self, column: Column, system: str) -> Candidate:
        """The fastest plan of a system."""
        return self.found[self.cells[*column, system]][0]

    def least(self, column: Column, system: str) -> Least | None:
        """The smallest GPU that a system trains on."""
        return self.found[self.cells[*column, system]][1]

    def rate(self, column: Column, system: str) -> float:
        """Tokens/s; 0 if it does not fit."""
        return self.fastest(column, system).summary.tokens_per_second or 0.0

    def share(self, column: Column, system: str) -> float:
        """Tokens/s as a share of the fastest system's; 0 if it does not fit."""
        best = max(self.rate(column, other) for other in self.systems)
        return self.rate(column, system) / best if best else 0.0

    def others(self, column: Column) -> list[tuple[float, str]]:
        """Tokens/s of the other systems that fit and train synchronously, the fastest first."""
        fitting = (self.fastest(column, system) for system in self.systems if system != OWN)
        rates = [(one.summary.tokens_per_second, one.name) for one in fitting if one.fits and not is_delayed(one)]
        return sorted(((rate, name) for rate, name in rates if rate), reverse=True)


def is_delayed(candidate: Candidate) -> bool:
    """Whether a plan updates with the gradients of an earlier iteration."""
    return candidate.plan is not None and candidate.plan.delayed


def grid(machines: Sequence[str], models: Sequence[str], policies: Sequence[str], moved: Moved = ()) -> Systems:
    """Every machine, model and system."""
    return {
        (name, gpus, model, policy): BestFlags(model_of(model), policy, name, moved, gpus)
        for name, gpus in map(node_of, machines)
        for model in models
        for policy in policies
    }


def node_of(text: str) -> tuple[str, int]:
    """A machine and its number of GPUs, from NAME or NAME:GPUS."""
    name, _, gpus = text.rpartition(":")
    return (name, int(gpus)) if name and gpus.isdecimal() else (text, 1)


def results(cells: Systems, jobs: int | None) -> Results:
    """Simulate, those that search first, and sort the systems by the median of their shares."""
    policies = dict.fromkeys(key[-1] for key in cells)
    order = [cell for name in longest_first([*policies]) for cell in cells.values() if cell.policy == name]
    columns = tuple(dict.fromkeys(key[:-1] for key in cells))
    unsorted = Results(columns, tuple(policies), cells, run_all(BestFlags.fastest_and_least, order, jobs))

    def shares(system: str) -> tuple[float, float]:
        each = [unsorted.share(column, system) for column in columns]
        return median(each), sum(each)

    return Results(columns, tuple(sorted(policies, key=shares, reverse=True)), cells, unsorted.found)


# --- what is written and printed ----------------------------------------------------------------------------------


def rate_lines(found: Results) -> list[list[object]]:
    """A row per cell: the fastest plan."""
    summaries = ((key, found.found[cell][0].summary) for key, cell in found.cells.items())
    return [[*NAMES, *RESULTS], *([*key, *result_cells(s.policy, s)] for key, s in summaries)]


def least_lines(found: Results) -> list[list[object]]:
    """A row per cell: the smallest GPU."""
    rows: list[list[object]] = [[*NAMES, "policy", "gpu_memory_gib", "clock"]]
    for key, cell in found.cells.items():
        one = found.found[cell][1]
        rows.append([*key, *(("", None) if one is None else (one.policy, one.gpu_bytes / 2**30)), Clock.SIMULATED])
    return rows


def gains(found: Results) -> dict[Column, float]:
    """By how much ``joint`` is faster than the fastest other system, as a ratio, where one fits."""
    rates = {column: (found.rate(column, OWN), found.others(column)) for column in found.columns}
    return {column: own / others[0][0] - 1 for column, (own, others) in rates.items() if own and others}


def gain_lines(found: Results) -> list[list[object]]:
    """A row per column: ``joint``, the fastest other system and the gain."""
    head: list[object] = [*NAMES[:-1], "tokens_per_second", "fastest_other", "its_tokens_per_second", "gain_percent", "clock"]
    rows, gained = [head], gains(found)
    for column in found.columns:
        rate, name = next(iter(found.others(column)), (None, ""))
        gain = 100 * gained[column] if column in gained else None
        rows.append([*column, found.rate(column, OWN) or None, name, rate, gain, Clock.SIMULATED])
    return rows


def print_systems(found: Results) -> None:
    """Print tokens/s and the smallest GPU: one table per machine, a row per system; then the gains of ``joint``."""
    for machine in dict.fromkeys(column[:2] for column in found.columns):
        columns = [column for column in found.columns if column[:2] == machine]
        title = f"{node_text(*machine)}: tokens/s, and the smallest GPU in GiB; simulated"
        shown = table(title, ["", *(text for *_, model in columns for text in (model, "GiB"))], left=1)
        for system in found.systems:
            each = ((rate_text(found, c, system), least_text(found, c, system)) for c in columns)
            shown.add_row(system, *(text for both in each for text in both))
        print_table(shown)
    if OWN not in found.systems:
        return
    shown = table(f"{OWN} against the fastest other system that trains synchronously", ["", "fastest other", "gain"], left=2)
    gained = gains(found)
    for column in found.columns:
        _, name = next(iter(found.others(column)), (0.0, "none fits"))
        gain = f"{100 * gained[column]:.1f} %" if column in gained else "-"
        shown.add_row(f"{node_text(*column[:2])}, {column[2]}", name.partition(":")[0], gain)
    print_table(shown)
    if gained:
        print_text(console(), f"median gain of {OWN}: {100 * median(gained.values()):.1f} %")


def rate_text(found: Results, column: Column, system: str) -> str:
    """Tokens/s, with a star if updates are delayed; or the memory that is too small, or nothing if there is no plan."""
    one = found.fastest(column, system)
    if one.fits:
        return f"{one.summary.tokens_per_second:,.0f}{'*' if is_delayed(one) else ''}"
    return "\N{EN DASH}" if one.summary.verdict is Verdict.INVALID else one.summary.verdict.short


def least_text(found: Results, column: Column, system: str) -> str:
    """GiB of the smallest GPU; nothing if no GPU is large enough."""
    one = found.least(column, system)
    if one is None:
        return "\N{EN DASH}"
    gib = one.gpu_bytes / 2**30
    return f"{gib:.1f}" if gib < 99.95 else f"{gib:.0f}"


# --- what is drawn ------------------------------------------------------------------------------------------------


def draw_rates(found: Results) -> Figure:
    """Draw tokens/s, with the share of the column's best as colour."""
    title = f"Tokens/s, simulated, {_setting(found)}; or the memory that is too small (\N{EN DASH}: no plan)"
    if any(is_delayed(found.fastest(column, system)) for column in found.columns for system in found.systems):
        title += "\n* updates with gradients of an earlier iteration"
    return _draw(found, title, "share of the fastest", found.share, rate_text)


def draw_least(found: Results) -> Figure:
    """Draw the smallest GPU, with its ratio to that of the column's best as colour; none where the machine's GPU is smaller."""

    def share(column: Column, system: str) -> float:
        one = found.least(column, system)
        if one is None or one.gpu_bytes > found.cells[*column, system].node.gpu.memory_bytes:
            return 0.0
        sizes = (found.least(column, other) for other in found.systems)
        return min(size.gpu_bytes for size in sizes if size is not None) / one.gpu_bytes

    title = f"Smallest GPU in GiB, simulated, {_setting(found)}\ngrey: larger than the machine's (\N{EN DASH}: none is enough)"
    return _draw(found, title, "smallest of all / this one", share, least_text)


def _setting(found: Results) -> str:
    return batch_of(model_of(found.columns[0][-1]))


def _draw(
    found: Results,
    title: str,
    label: str,
    share: Callable[[Column, str], float],
    text: Callable[[Results, Column, str], str],
) -> Figure:
    """Draw a table whose cells have a text, and a share as colour, or none where that is 0."""
    columns, systems = found.columns, found.systems
    shares = np.array([[share(column, system) for column in columns] for system in systems])
    with style():
        figure = Figure(figsize=(7.0, 1.1 + 0.165 * len(systems)), layout="constrained")
        axes = figure.subplots()
        colours = colormaps["cividis"].with_extremes(bad="0.95")
        image = axes.imshow(np.where(shares > 0, shares, np.nan), cmap=colours, vmin=0, vmax=1, aspect="auto")
        for x, column in enumerate(columns):
            for y, system in enumerate(systems):
                ink = "0.4" if shares[y, x] == 0 else "black" if shares[y, x] > 0.6 else "white"
                axes.text(x, y, text(found, column, system), ha="center", va="center_baseline", fontsize=6.5, color=ink)
        axes.set_xticks(range(len(columns)), [model.replace("-", "\n", 1) for *_, model in columns], fontsize=6.5)
        axes.set_yticks(range(len(systems)), systems, fontsize=7)
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        machines = list(dict.fromkeys(column[:2] for column in columns))
        for machine in machines:
            places = [x for x, column in enumerate(columns) if column[:2] == machine]
            heading = _heading(*machine, found.cells[*columns[places[0]], systems[0]])
            axes.text((places[0] + places[-1]) / 2, -0.65, heading, ha="center", va="bottom", fontsize=6.5)
            if places[0]:
                axes.axvline(places[0] - 0.5, color="white", linewidth=2)
        bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)
        bar.set_label(label, fontsize=7)
        bar.ax.tick_params(labelsize=6.5)
        figure.suptitle(title, fontsize=8)
    return figure


def _heading(name: str, gpus: int, cell: BestFlags) -> str:
    """A machine, and the memories of one GPU and of its part of the host."""
    node = cell.node
    host = f"{format_bytes(node.host.memory_bytes)} host{' each' if gpus > 1 else ''}"
    places = [place.name for place in node.places]
    return f"{f'{gpus} x ' if gpus > 1 else ''}{name}\n{format_bytes(node.gpu.memory_bytes)}\n{', '.join([host, *places])}"


def main(
    *,
    out: Path = FOLDER,
    jobs: int | None = None,
    machines: Annotated[tuple[str, ...], Parameter(name=("--machines", "--hardware"))] = (
        "a100-40gb-epyc7713",
        "rtx4090-workstation",
        "h100-pcie5",
        "rtx4090-4gpu:4",
    ),
    models: Models = ("llama-3.2-3b", "llama-3.1-8b", "qwen3-14b"),
    systems: tuple[str, ...] = tuple(POLICIES),
    set_: Annotated[tuple[str, ...], Parameter(name="--set", negative=(), show_default=False)] = (),
) -> None:
    """Simulate, print and draw.

    Parameters
    ----------
    out:
        Folder for the files.
    jobs:
        Number of processes. By default one per core.
    machines:
        Hardware presets or files, each with :GPUS if several GPUs train together; repeatable.
    models:
        Bundled models, or files of others; repeatable.
    systems:
        Policies.
    set_:
        Change a hardware figure of each machine: KEY=VALUE. Repeatable.
    """
    make_folder(out)
    found = results(grid(machines, models, systems, Where(set_=set_).moved), jobs)
    print_systems(found)
    save(out, "fig_systems", draw_rates(found), rate_lines(found))
    save(out, "fig_systems_memory", draw_least(found), least_lines(found))
    write_text(out / "fig_systems_gains.csv", csv_text(gain_lines(found)))


if __name__ == "__main__":
    run_app(App(name="fig_systems", default_command=main, help=__doc__))
