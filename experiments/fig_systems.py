"""How fast is every system of this package on three machines, for three models?

Command: ``python experiments/fig_systems.py [--out DIR] [--jobs N]``. Machine: any; everything is simulated.

Bundled models of 3B, 8B and 14B parameters in bf16 with fused kernels, batches of 8 x 1024 tokens, on one GPU of the node of
the published comparison, of a workstation and of a server with PCIe 5. Each system with its defaults.

``--model``, ``--hardware`` and ``--set`` (for each machine) ask for others.

Writes ``fig_systems.{png,pdf,csv}``.

What would refute it: a measured ranking of two systems on one of these machines that is the other way round, by more than the
errors of the model (docs/results.md).
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from cyclopts import App, Parameter
from matplotlib import colormaps
from matplotlib.figure import Figure

from autohete.cli.app import run_app
from autohete.files import make_folder
from autohete.plan.policy import Verdict
from autohete.policies import POLICIES
from autohete.report.style import style
from autohete.report.tables import table
from experiments.setting import Models, Moved, Where, batch_of, model_of
from experiments.shared import FOLDER, Cell, Grid, Summaries, grid_lines, print_table, run_all, save

NAMES = ("hardware", "model")
#: All but pipelines, which on one GPU are ordinary training.
SYSTEMS = tuple(name for name in POLICIES if not name.startswith("pipeline"))


def grid(machines: Sequence[str], models: Sequence[str], policies: Sequence[str], moved: Moved = ()) -> Grid:
    """Every machine, model and system."""
    return {
        (machine, model, policy): Cell(model_of(model), policy, machine, moved)
        for machine in machines
        for model in models
        for policy in policies
    }


def _short(verdict: Verdict) -> str:
    return verdict.removesuffix("-out-of-memory")


def draw(machines: Sequence[str], models: Sequence[str], policies: Sequence[str], cells: Grid, summaries: Summaries) -> Figure:
    """Draw a table: tokens/s, with the share of the column's best as colour, or the memory that is too small."""
    columns = [(machine, model) for machine in machines for model in models]
    best = {column: max(summaries[cells[*column, p]].tokens_per_second or 0.0 for p in policies) for column in columns}
    with style():
        figure = Figure(figsize=(7.0, 1.0 + 0.2 * len(policies)), layout="constrained")
        axes = figure.subplots()
        shares = [[(summaries[cells[*c, p]].tokens_per_second or np.nan) / (best[c] or 1.0) for c in columns] for p in policies]
        colours = colormaps["cividis"].with_extremes(bad="0.95")
        image = axes.imshow(shares, cmap=colours, vmin=0, vmax=1, aspect="auto")
        for x, column in enumerate(columns):
            for y, policy in enumerate(policies):
                s = summaries[cells[*column, policy]]
                if s.tokens_per_second is None:
                    axes.text(x, y, _short(s.verdict), ha="center", va="center", fontsize=6, color="0.4")
                else:
                    ink = "black" if shares[y][x] > 0.6 else "white"
                    axes.text(x, y, f"{s.tokens_per_second:,.0f}", ha="center", va="center", fontsize=7, color=ink)
        for x in range(len(models), len(columns), len(models)):
            axes.axvline(x - 0.5, color="white", linewidth=2)
        names = [model.replace("-", "\n", 1) for _, model in columns]
        axes.set_xticks(range(len(columns)), names, fontsize=6.5)
        axes.set_yticks(range(len(policies)), policies, fontsize=7)
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        for i, machine in enumerate(machines):
            middle = i * len(models) + (len(models) - 1) / 2
            axes.text(middle, -0.65, machine, ha="center", va="bottom", fontsize=8)
        bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01)
        bar.set_label("share of the fastest")
        one = model_of(models[0])
        figure.suptitle(f"tokens/s, simulated, {batch_of(one)}; or the memory that is too small")
    return figure


def print_systems(policies: Sequence[str], cells: Grid, summaries: Summaries) -> None:
    """Print tokens/s: one table per machine, a row per system."""
    for machine in dict.fromkeys(key[0] for key in cells):
        models = list(dict.fromkeys(key[1] for key in cells))
        shown = table(f"{machine}, tokens/s, simulated", ["", *map(str, models)], left=1)
        for policy in policies:
            rates = (summaries[cells[machine, model, policy]] for model in models)
            shown.add_row(policy, *(f"{s.tokens_per_second:,.0f}" if s.tokens_per_second else _short(s.verdict) for s in rates))
        print_table(shown)


def main(
    *,
    out: Path = FOLDER,
    jobs: int | None = None,
    machines: Annotated[tuple[str, ...], Parameter(name=("--machines", "--hardware"))] = (
        "a100-40gb-epyc7713",
        "rtx4090-workstation",
        "h100-pcie5",
    ),
    models: Models = ("llama-3.2-3b", "llama-3.1-8b", "qwen3-14b"),
    systems: tuple[str, ...] = SYSTEMS,
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
        Hardware presets or files; repeatable.
    models:
        Bundled models, or files of others; repeatable.
    systems:
        Policies.
    set_:
        Change a hardware figure of each machine: KEY=VALUE. Repeatable.
    """
    make_folder(out)
    cells = grid(machines, models, systems, Where(set_=set_).moved)
    summaries = run_all(Cell.run, cells.values(), jobs)
    print_systems(systems, cells, summaries)
    save(out, "fig_systems", draw(machines, models, systems, cells, summaries), grid_lines(NAMES, cells, summaries))


if __name__ == "__main__":
    run_app(App(name="fig_systems", default_command=main, help=__doc__))
