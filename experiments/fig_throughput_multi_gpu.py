"""How fast do GPT models of 2B to 22B train on four A100-40GB that share a host, and how much faster is AutoHete?

Command: ``python experiments/fig_throughput_multi_gpu.py [--out DIR] [--jobs N]``. Machine: any; everything is simulated.

The node of the published comparison, 4 x A100-40GB with NVLink and one EPYC 7713 with 440 GB, with all four GPUs. The paper
states a global batch of 8, here 2 per GPU; 8 per GPU, the batch of the comparison on one GPU, is the other panel. Each GPU
has an equal part of the host. The baselines are those that such a paper would run: DeepSpeed's stage 3 with offload, which
shares what rests on the host as well, beside its stage 2, PatrickStar, StrongHold, and AutoHete without priority. What each
system shares is in its module in ``autohete/policies``. ZeRO-Infinity needs drives, which the node is not known to have.

What is not known about the implementations has readings (:data:`READINGS`): which versions and settings of DeepSpeed ran,
whether every block was checkpointed, what AutoHete and StrongHold share, and how AutoHete uploads.

Writes ``fig_throughput_multi_gpu.{png,pdf,csv}`` and ``fig_throughput_multi_gpu_ratios.csv``: average and maximum of AutoHete's
speed-ups over the models that both train. Their intervals are the 5 to 95 % of draws from the ranges of the node's figures,
widened by the readings: by how much each changes the speed-up on the node as it is. A reading that trains fewer of the models
is a row of the table only, since it is not what a comparison of all models ran. The predictions were made without the paper's
results on four GPUs.

``--model``, ``--hardware`` and ``--set`` ask for others.

What would refute it: a published speed-up on four GPUs outside the interval, widened by the error of the model.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
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
from experiments.comparison import AUTOHETE, MODELS, NO_PRIORITY, NODE
from experiments.fig_ablation import SAME_PLAN
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
    "zero3_offload",
    "fsdp2_offload",
    "twin_flow",
    "deep_optimizer_states",
    "streamed_states",
    "patrickstar",
    "stronghold",
    NO_PRIORITY,
    AUTOHETE,
)
#: Other readings of what the paper may have run. They are rows of the table of ratios, too.
READINGS = {
    "zero_offload": (
        "zero_offload:deepspeed=0.4.3",
        "zero_offload:deepspeed=0.8.3",
        "zero_offload:checkpointing=full",
    ),
    "zero3_offload": (
        "zero3_offload:pin_memory=off",
        "zero3_offload:offload_param=off",
        "zero3_offload:checkpointing=full",
    ),
    "patrickstar": ("patrickstar:checkpointing=full",),
    "stronghold": ("stronghold:replicated",),
    NO_PRIORITY: (SAME_PLAN,),
    AUTOHETE: ("autohete:replicated", "autohete:fp32_upload"),
}
NAMES = ("gpus", "batch_per_gpu", "model")
#: Systems of the draws: those that the paper compares.
DRAWN = tuple(READINGS)
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

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        """The speed-up on these models."""
        return cls(len(ratios), mean(ratios), max(ratios)) if ratios else cls(0, None, None)


def by_model(batch: int, over: str, cells: Grid, summaries: Summaries, own: str = AUTOHETE) -> dict[object, float]:
    """The speed-up of ``own``, AutoHete or a reading of it, over one system on each model that both train."""
    found = {}
    for (_, of, model, policy), cell in cells.items():
        if (of, policy) == (batch, over):
            slow, fast = summaries[cell].tokens_per_second, summaries[cells[GPUS, batch, model, own]].tokens_per_second
            if slow is not None and fast is not None:
                found[model] = fast / slow
    return found


def factors(batch: int, over: str, cells: Grid, summaries: Summaries, what: str) -> tuple[float, float]:
    """By how much the readings that train the same models change a speed-up, at least and at most."""
    nominal, owns = by_model(batch, over, cells, summaries), (AUTOHETE, *READINGS[AUTOHETE])
    if over == NO_PRIORITY:  # the same implementation, in another order
        owns = (AUTOHETE,)
    found = [1.0]
    for own, system in product(owns, (over, *READINGS[over])):
        other = by_model(batch, system, cells, summaries, own)
        if nominal and other.keys() >= nominal.keys():
            new, old = (getattr(Ratio.of([some[model] for model in nominal]), what) for some in (other, nominal))
            found.append(new / old)
    return min(found), max(found)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table of ratios: nominal, and for the systems that are drawn the ends of their intervals.

    Args:
        batch: per GPU.
        over: the other system.
        nominal: on the node as it is.
        drawn: at each draw.
        readings: factors by which the readings change average and maximum, at least and at most.
    """

    batch: int
    over: str
    nominal: Ratio
    drawn: tuple[Ratio, ...] = ()
    readings: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def interval(self, what: str) -> tuple[float | None, float | None]:
        """5 and 95 % of the draws, times what the readings change."""
        values = [value for one in self.drawn if (value := getattr(one, what)) is not None]
        if not values:
            return None, None
        low, high = np.percentile(values, [LOW, HIGH]).tolist()
        least, most = self.readings[what]
        return low * least, high * most


def ratios(batches: Sequence[int], cells: Grid, summaries: Summaries, drawn: Mapping[Moved, Grid]) -> list[Row]:
    """The speed-ups over every other system, by batch."""
    others = [policy for policy in dict.fromkeys(str(key[-1]) for key in cells) if policy != AUTOHETE]
    rows = []
    for batch, over in product(batches, others):
        nominal = Ratio.of([*by_model(batch, over, cells, summaries).values()])
        if over not in DRAWN:
            rows.append(Row(batch, over, nominal))
            continue
        draws = tuple(Ratio.of([*by_model(batch, over, some, summaries).values()]) for some in drawn.values())
        readings = {what: factors(batch, over, cells, summaries, what) for what in ("average", "maximum")}
        rows.append(Row(batch, over, nominal, draws, readings))
    return rows


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
    columns = ["over", "batch", "models", "average", "interval", "maximum", "interval"]
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
    samples: int = 4,
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
    cells = grid(models, batches, (*POLICIES, *chain(*READINGS.values())), where.moved, where.hardware)
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
