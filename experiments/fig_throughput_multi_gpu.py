"""How fast do GPT models of 2B to 22B train on four A100-40GB that share a host, and how much faster is AutoHete?

Command: ``python experiments/fig_throughput_multi_gpu.py [--out DIR] [--jobs N]``. Machine: any; everything is simulated.

The node of the published comparison, 4 x A100-40GB with NVLink and one EPYC 7713 with 440 GB, with all four GPUs. The paper
states a global batch of 8, here 2 per GPU; 8 per GPU, the batch of the comparison on one GPU, is the other panel. Each GPU
has an equal part of the host. What each system shares is in its module in ``autohete/policies``; for AutoHete and StrongHold
it is assumed, since no source says it. ZeRO-Infinity needs drives, which the node is not known to have.

Writes ``fig_throughput_multi_gpu.{png,pdf,csv}`` and ``fig_throughput_multi_gpu_ratios.csv``: average and maximum of AutoHete's
speed-ups over the models that both train, with the 5 to 95 % of draws from the ranges of the node's figures. The predictions
were made without the paper's results on four GPUs.

``--model``, ``--hardware`` and ``--set`` ask for others.

What would refute it: a published speed-up on four GPUs outside the interval, widened by the error of the model.
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
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from autohete.cli.app import run_app
from autohete.execution.trace import Clock
from autohete.files import make_folder, write_text
from autohete.report.style import style
from autohete.report.tables import table
from experiments.comparison import AUTOHETE, MODELS, NODE
from experiments.intervals import draws
from experiments.looks import look
from experiments.setting import PUBLISHED_NODE, Models, Moved, Where, kernels_of, model_of, size_of
from experiments.shared import (
    FOLDER,
    Cell,
    Grid,
    Summaries,
    csv_text,
    grid_lines,
    print_rates,
    print_table,
    run_all,
    save,
)

GPUS = 4
#: Every system that shares a model.
POLICIES = (
    "resident:zero_stage=3",
    "zero_offload",
    "fsdp2_offload",
    "twin_flow",
    "deep_optimizer_states",
    "streamed_states",
    "patrickstar",
    "stronghold",
    AUTOHETE,
)
#: Beside them, in the table of ratios only: other versions and readings of the same systems.
OTHERS = ("zero_offload:deepspeed=0.4.3", "stronghold:replicated")
NAMES = ("gpus", "batch_per_gpu", "model")
#: Systems of the draws: those that the paper compares.
DRAWN = ("zero_offload", "patrickstar", "stronghold", AUTOHETE)
LOW, HIGH = 5, 95


def grid(
    models: Sequence[str], batches: Sequence[int], policies: Sequence[str], moved: Moved = (), hardware: str = NODE
) -> Grid:
    """Every batch, model and policy."""
    return {
        (GPUS, batch, model, policy): Cell(replace(model_of(model), batch_size=batch), policy, hardware, moved, GPUS)
        for batch in batches
        for model in models
        for policy in policies
    }


@dataclass(frozen=True, slots=True)
class Ratio:
    """AutoHete's speed-up over a system: average and maximum over ``models`` models that both train; None if there are none."""

    models: int
    average: float | None
    maximum: float | None


def ratio(batch: int, over: str, cells: Grid, summaries: Summaries) -> Ratio:
    """The speed-up over one system."""
    ratios = []
    for (_, of, model, policy), cell in cells.items():
        if (of, policy) == (batch, over):
            slow, fast = summaries[cell].tokens_per_second, summaries[cells[GPUS, batch, model, AUTOHETE]].tokens_per_second
            if slow is not None and fast is not None:
                ratios.append(fast / slow)
    return Ratio(len(ratios), mean(ratios), max(ratios)) if ratios else Ratio(0, None, None)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table of ratios: nominal, and for the systems that are drawn the ends of their intervals."""

    batch: int
    over: str
    nominal: Ratio
    drawn: tuple[Ratio, ...]

    def interval(self, what: str) -> tuple[float | None, float | None]:
        """5 and 95 % of the draws."""
        values = [value for one in self.drawn if (value := getattr(one, what)) is not None]
        if not values:
            return None, None
        low, high = np.percentile(values, [LOW, HIGH]).tolist()
        return low, high


def ratios(batches: Sequence[int], cells: Grid, summaries: Summaries, drawn: Mapping[Moved, Grid]) -> list[Row]:
    """The speed-ups over every other system, by batch."""
    others = [policy for policy in dict.fromkeys(str(key[-1]) for key in cells) if policy != AUTOHETE]
    return [
        Row(
            batch,
            over,
            ratio(batch, over, cells, summaries),
            tuple(ratio(batch, over, some, summaries) for some in drawn.values()) if over in DRAWN else (),
        )
        for batch in batches
        for over in others
    ]


def ratio_lines(rows: Sequence[Row]) -> list[list[object]]:
    """One row per batch and system."""
    ends = ("", "_low", "_high")
    head = ["gpus", "batch_per_gpu", "over", "models", *(f"{what}{end}" for what in ("average", "maximum") for end in ends)]
    lines: list[list[object]] = [[*head, "clock"]]
    for row in rows:
        numbers: list[object] = []
        for what in ("average", "maximum"):
            numbers += [getattr(row.nominal, what), *row.interval(what)]
        lines.append([GPUS, row.batch, row.over, row.nominal.models, *numbers, Clock.SIMULATED])
    return lines


def print_ratios(rows: Sequence[Row]) -> None:
    """Print the speed-ups."""
    columns = ["over", "batch", "models", "average", "5 to 95 %", "maximum", "5 to 95 %"]
    shown = table("speed-ups of AutoHete on 4 GPUs, simulated", columns, left=1)
    for row in rows:
        cells = [row.over, str(row.batch), str(row.nominal.models)]
        for what in ("average", "maximum"):
            value, (low, high) = getattr(row.nominal, what), row.interval(what)
            cells.append("-" if value is None else f"{value:.2f}")
            cells.append("-" if low is None or high is None else f"{low:.2f} to {high:.2f}")
        shown.add_row(*cells)
    print_table(shown)


def draw(
    models: Sequence[str], batches: Sequence[int], cells: Grid, summaries: Summaries, drawn: Mapping[Moved, Grid], where: Where
) -> Figure:
    """Draw throughput by model, one panel per batch, with whiskers for the systems that are drawn."""
    with style():
        figure = Figure(figsize=(7.0, 1.2 + 1.8 * len(batches)), layout="constrained")
        figure.suptitle(f"{GPUS} GPUs of {where.text}, {kernels_of(model_of(models[0]))}, simulated")
        for axes, batch in zip(figure.subplots(len(batches), 1, sharex=True, squeeze=False)[:, 0], batches, strict=True):
            _draw_batch(axes, models, batch, cells, summaries, drawn)
        axes.set_xlabel("parameters of the model (x: out of memory)")
        handles = [
            Patch(facecolor=look(policy).colour, hatch=look(policy).hatch, edgecolor="white", label=look(policy).label)
            for policy in POLICIES
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure


def _draw_batch(
    axes: Axes, models: Sequence[str], batch: int, cells: Grid, summaries: Summaries, drawn: Mapping[Moved, Grid]
) -> None:
    width = 0.86 / len(POLICIES)
    for x, model in enumerate(models):
        for place, policy in enumerate(POLICIES):
            key, at = (GPUS, batch, model, policy), x + (place - (len(POLICIES) - 1) / 2) * width
            flops, seen = summaries[cells[key]].tflops_per_gpu, look(policy)
            if flops is None:
                axes.plot(at, 2, "x", color="0.35", markersize=2.5, markeredgewidth=0.6)
                continue
            axes.bar(at, flops, width, color=seen.colour, hatch=seen.hatch, edgecolor="white", linewidth=0.2)
            draws = [s for some in drawn.values() if key in some and (s := summaries[some[key]].tflops_per_gpu) is not None]
            if draws:
                low, high = np.percentile(draws, [LOW, HIGH]).tolist()
                axes.plot([at, at], [low, high], color="black", linewidth=0.7, solid_capstyle="butt")
    axes.set_xticks(range(len(models)), [size_of(model) for model in models])
    axes.set_xlim(-0.5, len(models) - 0.5)
    axes.set_ylabel("model TFLOP/s per GPU")
    axes.set_title(f"batch {batch} x {model_of(models[0]).sequence_length} tokens per GPU")


def main(
    *,
    out: Path = FOLDER,
    jobs: int | None = None,
    models: Models = tuple(MODELS),
    batches: tuple[int, ...] = (2, 8),
    samples: int = 8,
    seed: int = 1,
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
        Batches of one GPU. The systems are drawn with the first of them.
    samples:
        Draws from the ranges of the node's figures; 0 for none.
    seed:
        Seed of the draws.
    where:
        The hardware.
    """
    make_folder(out)
    cells = grid(models, batches, (*POLICIES, *OTHERS), where.moved, where.hardware)
    points = [tuple((dict(moved) | dict(where.moved)).items()) for moved in draws(where.hardware, samples, seed, GPUS)]
    drawn = {moved: grid(models, batches[:1], DRAWN, moved, where.hardware) for moved in points}
    summaries = run_all(Cell.run, [cell for some in (cells, *drawn.values()) for cell in some.values()], jobs)
    rows = ratios(batches, cells, summaries, drawn)
    for batch in batches:
        of: Grid = {
            (m, p): cells[GPUS, batch, m, p] for m in models for p in reversed(POLICIES)
        }  # the last columns may not fit
        print_rates(f"{GPUS} GPUs of {where.text}, batch of {batch} per GPU", of, summaries)
    print_ratios(rows)
    write_text(out / "fig_throughput_multi_gpu_ratios.csv", csv_text(ratio_lines(rows)))
    save(
        out,
        "fig_throughput_multi_gpu",
        draw(models, batches, cells, summaries, drawn, where),
        grid_lines(NAMES, cells, summaries),
    )


if __name__ == "__main__":
    run_app(App(name="fig_throughput_multi_gpu", default_command=main, help=__doc__))
