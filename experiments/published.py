"""Does the simulator predict what others measured, using figures from other sources?

Command: ``python experiments/published.py [--out DIR]``. Machine: any; everything is simulated.

Each file in ``experiments/published/`` is one source: node, workload, flags, and the measured phases. A phase from which a
hardware figure was derived names that figure ("calibrates"); it is shown, but does not count.

Writes ``published.csv`` (a row per phase) and ``published.{png,pdf}``, and prints predicted beside measured.

What would refute it: among the phases not used for calibration, iteration times off by more than 10 % on average or 25 % at
worst, phases off by more than 15 % on average, or a wrong memory verdict.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

import json
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from cyclopts import App
from matplotlib.figure import Figure
from pydantic import BaseModel, ConfigDict, Field

from autohete.cli.app import run_app
from autohete.files import make_folder, write_text
from autohete.hardware import load_hardware
from autohete.plan import Processor
from autohete.plan.policy import Verdict
from autohete.plan.rules import BlockingCopies
from autohete.policies import parse_policy, traffic
from autohete.quantities import format_seconds
from autohete.report.style import BLUE, GREEN, ORANGE, PURPLE, save_figure, style
from autohete.report.tables import console, print_text, table
from autohete.schedule import Kind
from autohete.simulate import Simulation, simulate
from autohete.workload import WORKLOADS, Kernels, Precision, Workload
from autohete.workload.config import parse_model, read_model
from autohete.workload.optimizers import Optimizer
from autohete.workload.training import Lora, Training
from experiments.shared import csv_text

FOLDER = Path(__file__).parent / "published"
#: Measured quantities other than the seconds of a phase. A peak is that of the GPU's tensors, in GiB; the longest sequence that
#: fits is in tokens, a multiple of 1,024.
VERDICT, COUNT, PEAK, LONGEST = "fits", "cpu_updated_blocks", "gpu_peak", "longest_sequence"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Row(_Table):
    """One published run. ``measured``: phase -> seconds, or their range; ``fits`` -> whether it trains.

    ``changes`` apply to the workload, ``set`` to hardware figures. ``gpu_budget`` is the memory that an allocator may give to
    tensors. ``gpus`` GPUs train together, each with the batch.
    ``calibrates``: phase -> the figure of the hardware file that was derived from it. ``predicted``: phase -> the seconds that
    were predicted before the measurement was looked at, for rows that were added so.
    """

    name: str
    policy: str
    measured: dict[str, bool | float | tuple[float, float]]
    changes: dict[str, Any] = {}
    hardware: str | None = None
    set: dict[str, str] = {}
    gpu_budget: str | None = None
    gpus: int = 1
    calibrates: dict[str, str] = {}
    predicted: dict[str, float] = {}
    remark: str = ""


class Source(_Table):
    """One file: rows from one place that share a node and a workload."""

    title: str
    source: str
    date: str
    hardware: str
    set: dict[str, str] = {}
    workload: dict[str, Any]
    rows: tuple[Row, ...] = Field(alias="row")

    def simulate(self, row: Row, moved: Mapping[str, str] | None = None) -> Simulation:
        """Simulate ``row``, with some hardware figures changed."""
        budget = {"gpu.memory": row.gpu_budget, "gpu.reserved_memory": "1B"} if row.gpu_budget else {}
        name = row.hardware or self.hardware
        where = str(FOLDER / name) if name.endswith(".toml") else name
        hardware = load_hardware(where, {**self.set, **row.set, **budget, **(moved or {})})
        workload = _workload(row.name, self.workload | row.changes)
        return simulate(workload, hardware.shared_by(row.gpus), parse_policy(row.policy))

    def longest(self, row: Row) -> int:
        """Return the longest sequence that fits where ``row`` has another, in whole steps of 1,024 tokens."""

        def fails(tokens: int) -> bool:
            other = row.model_copy(update={"changes": row.changes | {"sequence_length": tokens}})
            return self.simulate(other).verdict is not Verdict.OK

        lengths = range(0, 2**18, 1024)
        return lengths[bisect_left(lengths, True, lo=1, key=fails) - 1]


def _workload(name: str, given: dict[str, Any]) -> Workload:
    fields = dict(given)
    preset, model, config = (fields.pop(key, None) for key in ("preset", "model", "config"))
    for field, kind in (("precision", Precision), ("kernels", Kernels)):
        if field in fields:
            fields[field] = kind(fields[field])
    training: dict[str, Any] = {key: fields.pop(key) for key in ("optimizer", "fp8", "early_stop") if key in fields}
    if "optimizer" in training:
        training["optimizer"] = Optimizer(training["optimizer"])
    if "lora" in fields:
        lora = fields.pop("lora")
        training["lora"] = Lora(lora["rank"], tuple(lora["targets"]), lora.get("quantised", False))
    if training:
        fields["training"] = Training(**training)
    if model is not None or config is not None:
        return replace(read_model(model) if config is None else parse_model(config, name), **fields)
    return replace(WORKLOADS[preset], **fields) if preset else Workload(name=name, **fields)


def sources() -> list[Source]:
    """Return all sources, in the order of their file names."""
    return [
        Source.model_validate_json(json.dumps(tomllib.loads(path.read_text(encoding="utf-8"))))
        for path in sorted(FOLDER.glob("*.toml"))
    ]


def phases(simulation: Simulation) -> dict[str, float]:
    """Return the phases of a steady iteration as a training loop's timers see them, in seconds, and other published figures.

    Forward with the loss; backward with recomputation and the gradient copies that it waits for; the step until the next
    forward begins, of which ``unscale`` is the first part and ``update`` the rest.
    """
    trace, profile, plan = simulation.trace, simulation.profile, simulation.plan
    column = {task.id: i for i, task in enumerate(simulation.schedule.tasks)}
    kinds = {kind: [i for task, i in column.items() if task.kind is kind] for kind in Kind}
    at = min(simulation.steady.first, trace.iterations - 2)
    begin = int(trace.start_ns[at, kinds[Kind.FORWARD]].min())
    turn = int(trace.end_ns[at, kinds[Kind.LOSS]].max())
    backward = list(kinds[Kind.BACKWARD])
    flushes = [rule for rule in plan.rules if isinstance(rule, BlockingCopies) and rule.units is None]
    if any(rule.kind is Kind.OFFLOAD_GRADIENTS for rule in flushes):
        backward += kinds[Kind.OFFLOAD_GRADIENTS]
    back = int(trace.end_ns[at, backward].max())
    following = int(trace.start_ns[at + 1, kinds[Kind.FORWARD]].min())
    updated = sum(
        block.parameters for block, decided in zip(profile.units, plan.units, strict=True) if decided.update.on is Processor.CPU
    )
    cpu = profile.hardware.cpu
    unscale = updated * traffic.UNSCALE / (cpu.elementwise_bandwidth or cpu.update_bandwidth)
    forward_seconds = sum(block.forward_seconds for block in profile.units) + profile.loss.seconds
    copies = sum(simulation.schedule.tasks[i].duration_ns for i in kinds[Kind.OFFLOAD_GRADIENTS]) * 1e-9
    return {
        "forward": (turn - begin) * 1e-9,
        "backward": (back - turn) * 1e-9,
        "step": (following - back) * 1e-9,
        "unscale": unscale,
        "update": (following - back) * 1e-9 - unscale,
        "gradient_copies": copies,
        "iteration": simulation.iteration_seconds,
        "block_forward": profile.units[1].forward_seconds,
        "block_backward": profile.units[1].backward_seconds,
        "passes": forward_seconds + sum(block.backward_seconds for block in profile.units),
        VERDICT: float(simulation.verdict is Verdict.OK),
        COUNT: plan.offloaded_optimizer_units,
        PEAK: simulation.gpu.peak_bytes / 2**30,
    }


@dataclass(frozen=True, slots=True)
class Check:
    """One measured phase beside the predicted one, in seconds; for ``fits`` 1 and 0. ``low`` and ``high`` are equal but for
    a measured range. ``first`` was predicted before the measurement was looked at."""

    source: str
    row: str
    phase: str
    low: float
    high: float
    predicted: float
    calibrates: str
    remark: str
    first: float | None = None

    @property
    def measured(self) -> float:
        """Middle of the measured range."""
        return middle((self.low, self.high))

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1 if self.measured else self.predicted

    @property
    def is_time(self) -> bool:
        """Whether the check is of a time."""
        return self.phase not in (VERDICT, COUNT, PEAK, LONGEST)

    @property
    def is_close(self) -> bool:
        """Whether the prediction is within a quarter; a verdict or a number of blocks has to be right."""
        return self.measured == self.predicted if self.phase in (VERDICT, COUNT) else abs(self.error) <= 0.25

    @property
    def is_verdict(self) -> bool:
        """Whether the check is a memory verdict."""
        return self.phase == VERDICT


def ends(measured: bool | float | tuple[float, float]) -> tuple[float, float]:
    """Return both ends of the measured range, which are usually equal."""
    return measured if isinstance(measured, tuple) else (float(measured), float(measured))


def middle(measured: bool | float | tuple[float, float]) -> float:
    """Return the middle of the measured range."""
    return sum(ends(measured)) / 2


def checks(of: Sequence[Source] | None = None) -> list[Check]:
    """Simulate every row, or every row ``of`` some sources."""
    rows = []
    for source in sources() if of is None else of:
        for row in source.rows:
            simulation = source.simulate(row)
            predicted = phases(simulation)
            for phase, value in row.measured.items():
                low, high = ends(value)
                remark = row.remark
                if phase == LONGEST:
                    predicted[phase] = source.longest(row)
                if phase == VERDICT:
                    gpu = simulation.gpu
                    remark = f"peak {gpu.peak_bytes / 2**30:.1f} of {gpu.capacity_bytes / 2**30:.1f} GiB"
                rows.append(
                    Check(
                        source.title,
                        row.name,
                        phase,
                        low,
                        high,
                        predicted[phase],
                        row.calibrates.get(phase, ""),
                        remark,
                        row.predicted.get(phase),
                    )
                )
    return rows


@dataclass(frozen=True, slots=True)
class Score:
    """Errors over checks that are not used for calibration."""

    what: str
    count: int
    mean_error: float
    signed_error: float
    worst_error: float
    goal: str


def scores(rows: Sequence[Check]) -> list[Score]:
    """Return the scores of iterations, all other phases, GPU peaks and longest sequences; none of what there is none of."""
    timed = [c for c in rows if c.is_time and not c.calibrates]
    groups = {
        ("iteration time", "mean 10 %, worst 25 %"): [c for c in timed if c.phase == "iteration"],
        ("phases", "mean 15 %"): [c for c in timed if c.phase != "iteration"],
        ("GPU peaks", ""): [c for c in rows if c.phase == PEAK],
        ("longest sequences", ""): [c for c in rows if c.phase == LONGEST],
    }
    return [
        Score(
            what,
            len(some),
            mean(abs(c.error) for c in some),
            mean(c.error for c in some),
            max(abs(c.error) for c in some),
            goal,
        )
        for (what, goal), some in groups.items()
        if some
    ]


def as_csv(rows: Iterable[Check]) -> str:
    """One row per check."""
    columns = "source row phase unit measured predicted difference_percent calibrates predicted_before remark clock"
    lines: list[Sequence[object]] = [columns.split()]
    for c in rows:
        unit = {VERDICT: VERDICT, COUNT: "blocks", PEAK: "GiB", LONGEST: "tokens"}.get(c.phase, "s")
        places = 6 if c.phase == LONGEST else 4
        numbers = (f"{c.measured:.{places}g}", f"{c.predicted:.{places}g}", f"{100 * c.error:.1f}")
        lines.append(
            [c.source, c.row, c.phase, unit, *numbers, c.calibrates, repr(c.first) if c.first else "", c.remark, "simulated"]
        )
    return csv_text(lines)


def show(results: Sequence[Check]) -> None:
    """Print the checks by source, and the scores."""
    out = console()
    for source in dict.fromkeys(check.source for check in results):
        columns = ["run", "phase", "measured", "predicted", "difference", "calibrates"]
        rows = table(source, columns, left=2, remark=True, elsewhere="published.csv has them")
        before = ""
        for c in results:
            if c.source != source:
                continue
            if c.is_verdict:
                words = ["does not fit", "fits"]
                cells = [words[round(c.measured)], words[round(c.predicted)], "-" if c.measured == c.predicted else "WRONG"]
            elif c.phase == COUNT:
                cells = [f"{c.measured:.0f}", f"{c.predicted:.0f}", "-" if c.measured == c.predicted else "DIFFERS"]
            elif c.phase == LONGEST:
                cells = [f"{c.measured:,.0f}", f"{c.predicted:,.0f}", f"{100 * c.error:+.0f} %"]
            elif c.phase == PEAK:
                cells = [f"{c.measured:.1f} GiB", f"{c.predicted:.1f} GiB", f"{100 * c.error:+.0f} %"]
            else:
                cells = [format_seconds(c.measured), format_seconds(c.predicted), f"{100 * c.error:+.0f} %"]
            rows.add_row(c.row if c.row != before else "", c.phase.replace("_", " "), *cells, c.calibrates)
            before = c.row
        out.print(rows)
    summary = table("what calibrates nothing", ["", "number", "mean error", "signed", "worst", "goal"])
    for s in scores(results):
        numbers = (f"{100 * s.mean_error:.1f} %", f"{100 * s.signed_error:+.1f} %", f"{100 * s.worst_error:.1f} %")
        summary.add_row(s.what, str(s.count), *numbers, s.goal)
    verdicts = [c for c in results if c.is_verdict]
    right = sum(c.measured == c.predicted for c in verdicts)
    summary.add_row("memory verdicts", str(len(verdicts)), f"{len(verdicts) - right} wrong", "", "", "all right")
    out.print(summary)


#: Marks of the groups of :func:`scores`, and of what is in none of them.
_MARKS = {
    "iteration time": ("o", BLUE),
    "phases": ("^", ORANGE),
    "GPU peaks": ("s", GREEN),
    "longest sequences": ("D", PURPLE),
    "calibrates a figure": ("x", "0.45"),
}


def _group(check: Check) -> str:
    if check.calibrates:
        return "calibrates a figure"
    if check.is_time:
        return "iteration time" if check.phase == "iteration" else "phases"
    return "GPU peaks" if check.phase == PEAK else "longest sequences"


def draw(rows: Sequence[Check]) -> Figure:
    """Draw the error of each prediction: a line per source, a mark per group, and the mean error of the source's iterations."""
    shown = [c for c in rows if c.phase not in (VERDICT, COUNT)]
    titles = list(dict.fromkeys(c.source for c in shown))
    with style():
        figure = Figure(figsize=(7.0, 0.9 + 0.2 * len(titles)), layout="constrained")
        axes = figure.subplots()
        axes.axvspan(-20, 20, color="0.93", linewidth=0, label="within 20 %")
        axes.axvline(0, color="0.4", linewidth=0.8)
        for group, (marker, colour) in _MARKS.items():
            some = [c for c in shown if _group(c) == group]
            places, errors = [titles.index(c.source) for c in some], [100 * c.error for c in some]
            axes.plot(errors, places, marker, color=colour, label=group, markersize=4, alpha=0.8)
        axes.set_yticks(range(len(titles)), titles, fontsize=6.5)
        axes.set_ylim(len(titles) - 0.5, -0.5)
        axes.grid(axis="y", color="0.9", linewidth=0.5)
        axes.set_xlabel("error of the simulated prediction against what others measured (%)")
        means = axes.secondary_yaxis("right")
        means.set_yticks(range(len(titles)), [_mean_error(shown, title) for title in titles], fontsize=6.5)
        means.tick_params(length=0)
        axes.set_title("mean error of iterations", loc="right", fontsize=7)
        figure.legend(loc="outside upper center", ncols=6)
    return figure


def _mean_error(rows: Sequence[Check], title: str) -> str:
    errors = [abs(c.error) for c in rows if c.source == title and _group(c) == "iteration time"]
    return f"{100 * mean(errors):.0f} %" if errors else "-"


def main(*, out: Path = Path("paper_figs")) -> None:
    """Simulate the published measurements, compare, and write the results.

    Parameters
    ----------
    out:
        Folder for ``published.csv`` and ``published.{png,pdf}``.
    """
    make_folder(out)
    rows = checks()
    write_text(out / "published.csv", as_csv(rows))
    figure = draw(rows)
    for suffix in ("png", "pdf"):
        save_figure(figure, out / f"published.{suffix}")
    show(rows)
    print_text(console(), f"written: {out}/published.{{csv,png,pdf}}")


if __name__ == "__main__":
    run_app(App(name="published", default_command=main, help=__doc__))
