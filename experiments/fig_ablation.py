"""What does each technique of AutoHete add, on one GPU and on four?

Command: ``python experiments/fig_ablation.py [--out DIR] [--jobs N]``. Machine: any; everything is simulated.

AutoHete plans each model of the published comparison on its node, with one of its techniques turned off at a time. The loss
of throughput without a technique is that technique's share: a technique that others can replace loses little. Where a model
does not train without it, the technique is what makes it fit. Without priority there are two questions, and a paper may answer
either: what another plan reaches that was chosen for issue order, and what the same plan reaches in issue order.

``--model``, ``--hardware`` and ``--set`` ask for others.

Writes ``fig_ablation.{png,pdf,csv}``.

What would refute it: a measured ablation in which another technique matters most.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import numpy as np
from cyclopts import App
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autohete.cli.app import run_app
from autohete.files import make_folder
from autohete.plan import Plan
from autohete.plan.policy import Judge
from autohete.plan.rules import ByPriority
from autohete.policies.autohete import AutoHete
from autohete.profile import Profile
from autohete.report.style import style
from autohete.report.tables import table
from experiments.comparison import AUTOHETE, NO_PRIORITY
from experiments.setting import PUBLISHED_NODE, Models, Where, kernels_of, model_of, size_of
from experiments.shared import FOLDER, Cell, Grid, Summaries, grid_lines, print_table, run_all, save

#: AutoHete's plan in issue order, as a policy; see :class:`InIssueOrder`.
SAME_PLAN = "experiments.fig_ablation:InIssueOrder"
#: Names of the techniques, with AutoHete without each.
WITHOUT = {
    "priority, planned again": NO_PRIORITY,
    "priority, same plan": SAME_PLAN,
    "overlap of iterations": "autohete:across_iterations=off",
    "prefetch tuning": "autohete:prefetch_tuning=off",
    "recomputing some blocks": "autohete:some_checkpointed=off",
    "offload of parameters": "autohete:parameter_offload=off",
    "updates on the GPU": "autohete:gpu_updates=off",
}
NAMES = ("gpus", "batch_per_gpu", "model")


@dataclass(frozen=True, slots=True)
class InIssueOrder:
    """The plan that AutoHete chooses for its order by priority, carried out in issue order."""

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        plan = AutoHete().plan(profile, judge)
        return replace(plan, rules=tuple(rule for rule in plan.rules if rule != ByPriority()), bound_seconds=None)


def grid(models: Sequence[str], gpus: Mapping[int, int], where: Where = PUBLISHED_NODE) -> Grid:
    """Every number of GPUs with its batch, every model, with all techniques and without each."""
    return {
        (count, batch, model, policy): Cell(
            replace(model_of(model), batch_size=batch), policy, where.hardware, where.moved, count
        )
        for count, batch in gpus.items()
        for model in models
        for policy in (AUTOHETE, *WITHOUT.values())
    }


def losses(models: Sequence[str], count: int, batch: int, cells: Grid, summaries: Summaries) -> dict[str, list[float | None]]:
    """Loss of throughput without each technique, by model, in percent. None: does not fit without it."""

    def rate(model: str, policy: str) -> float | None:
        return summaries[cells[count, batch, model, policy]].tokens_per_second

    lost: dict[str, list[float | None]] = {}
    for name, policy in WITHOUT.items():
        lost[name] = []
        for model in models:
            full, less = rate(model, AUTOHETE), rate(model, policy)
            lost[name].append(100 * (1 - less / full) if full is not None and less is not None else None)
    return lost


def draw(models: Sequence[str], gpus: Mapping[int, int], cells: Grid, summaries: Summaries) -> Figure:
    """Draw a table per number of GPUs: the loss without each technique, darker where it is larger."""
    with style():
        figure = Figure(figsize=(7.0, 0.6 + (0.55 + 0.22 * len(WITHOUT)) * len(gpus)), layout="constrained")
        rows = figure.subplots(len(gpus), 1, squeeze=False)[:, 0]
        for axes, (count, batch) in zip(rows, gpus.items(), strict=True):
            _draw_losses(axes, models, losses(models, count, batch, cells, summaries))
            axes.set_title(f"{count} GPU{'s' * (count > 1)}, batch {batch} per GPU: loss of throughput without it (%)")
        one = model_of(models[0])
        rows[-1].set_xlabel(f"parameters of the model; {one.sequence_length} tokens, {kernels_of(one)}, simulated")
    return figure


def _draw_losses(axes: Axes, models: Sequence[str], lost: Mapping[str, Sequence[float | None]]) -> None:
    values = np.array([[np.nan if x is None else x for x in row] for row in lost.values()])
    axes.imshow(values, cmap=colormaps["cividis_r"].with_extremes(bad="0.95"), vmin=0, vmax=50, aspect="auto")
    for y, row in enumerate(lost.values()):
        for x, value in enumerate(row):
            text = "no fit" if value is None else "0" if abs(value) < 0.05 else f"{value:.1f}"
            ink = "white" if value is not None and value > 25 else "black"
            axes.text(x, y, text, ha="center", va="center", fontsize=6.5, color=ink)
    axes.set_xticks(range(len(models)), [size_of(model) for model in models])
    axes.set_yticks(range(len(lost)), list(lost), fontsize=7)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def print_losses(models: Sequence[str], gpus: Mapping[int, int], cells: Grid, summaries: Summaries) -> None:
    """Print average and largest loss without each technique, over the models that train without it."""
    columns = ["without", "GPUs", "average", "largest", "models that need it"]
    shown = table("loss of throughput of AutoHete, simulated", columns, left=1)
    for count, batch in gpus.items():
        for name, row in losses(models, count, batch, cells, summaries).items():
            known = [x for x in row if x is not None]
            numbers = (f"{mean(known):.1f} %", f"{max(known):.1f} %") if known else ("-", "-")
            shown.add_row(name, str(count), *numbers, f"{len(row) - len(known)} of {len(row)}")
    print_table(shown)


def main(
    *,
    out: Path = FOLDER,
    jobs: int | None = None,
    models: Models = ("gpt-2b", "gpt-4b", "gpt-6b", "gpt-10b", "gpt-15b", "gpt-22b"),
    one: int = 8,
    four: int = 2,
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
    one:
        Batch on one GPU.
    four:
        Batch of each of four GPUs.
    where:
        The hardware.
    """
    make_folder(out)
    gpus = {1: one, 4: four}
    cells = grid(models, gpus, where)
    summaries = run_all(Cell.run, cells.values(), jobs)
    print_losses(models, gpus, cells, summaries)
    save(out, "fig_ablation", draw(models, gpus, cells, summaries), grid_lines(NAMES, cells, summaries))


if __name__ == "__main__":
    run_app(App(name="fig_ablation", default_command=main, help=__doc__))
