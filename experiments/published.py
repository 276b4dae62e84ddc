"""Does the simulator predict what others measured, using figures from other sources?

Command: ``python experiments/published.py [--out DIR] [--docs]``. Machine: any; everything is simulated.

Each file in ``experiments/published/`` is one source: node, workload, flags, and the measured phases. A phase from which a
hardware figure was derived names that figure ("calibrates"); it is shown, but does not count. A row of which a whole run was
measured took place, so that it has to fit: that is a verdict like one that is stated.

Four groups are scored apart, because only rows that nobody had looked at say how far off the model is for a user:

- known: looked at while the model was made, whether it calibrates or not
- kept back: of the same sources, but predicted before they were looked at (``predicted``)
- new: of sources that nobody looked at while the model was made
- blind: in ``experiments/published/blind/``, with predictions by ``published_blind.py`` from before the measurements were there

Writes ``published.csv`` (a row per phase) and ``published.{png,pdf}``, and prints predicted beside measured.

What would refute it, without what calibrates: known or kept-back iterations off by more than 8 % on average or 25 % at worst,
phases by 12 %, peaks of GPU memory by 6 %; new or blind iterations or peaks by 10 %, longest sequences by 12 %; a wrong
verdict; a 90 % interval of the model's error that holds fewer than 90 % of the iterations of a group.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

import csv
import json
import os
import re
import tomllib
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

from cyclopts import App
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import BaseModel, ConfigDict, Field

from autohete.answer.certainty import MODEL_FACTOR
from autohete.cli.app import run_app
from autohete.cli.interrupt import in_processes
from autohete.errors import InfeasibleError, InputError
from autohete.files import make_folder, write_text
from autohete.hardware import load_hardware, parse_parallel
from autohete.plan import Processor
from autohete.plan.policy import Verdict
from autohete.plan.rules import BlockingCopies
from autohete.policies import parse_policy, traffic
from autohete.quantities import format_seconds
from autohete.report.style import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, save_figure, style
from autohete.report.tables import FittedTable, console, print_text, table
from autohete.schedule import Kind
from autohete.simulate import Simulation, simulate
from autohete.workload import WORKLOADS, AttentionMask, FusedAttention, Kernels, LossKernels, Precision, Units, Workload
from autohete.workload.config import parse_model, read_model
from autohete.workload.model import Architecture, Attention, JointProduct
from autohete.workload.optimizers import Optimizer
from autohete.workload.training import Adapters, GaLore, Lora, Training
from experiments.shared import csv_text

FOLDER = Path(__file__).parent / "published"
RESULTS = Path(__file__).parents[1] / "docs" / "results.md"
#: Measured quantities other than the seconds of a phase. Peaks are in GiB: of the tensors of a GPU, of what PyTorch's allocator
#: reserves for them, of what nvidia-smi shows, which includes the context, and of the whole host. The longest sequence that
#: fits is in tokens, a multiple of 1,024. Relative iterations are over those of another row, the step's share over its own.
VERDICT, COUNT, LONGEST = "fits", "cpu_updated_blocks", "longest_sequence"
PEAKS = PEAK, RESERVED, USED, HOST_PEAK = "gpu_peak", "gpu_reserved", "gpu_used", "host_peak"
RATIOS = RELATIVE, STEP_SHARE = "relative_iteration", "step_share"
UNITS = {VERDICT: VERDICT, COUNT: "blocks", LONGEST: "tokens"} | dict.fromkeys(PEAKS, "GiB") | dict.fromkeys(RATIOS, "x")
#: Quantities of a part of a run, or of a run of another length: that they were measured does not say that the row fits.
_NOT_OF_THE_RUN = {"block_forward", "block_backward", "passes", LONGEST}
#: Groups of rows, from those that the model was made with to those that say how far off it is for others.
GROUPS = KNOWN, KEPT_BACK, NEW, BLIND = "known", "kept back", "new", "blind"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Row(_Table):
    """One published run. ``measured``: phase -> seconds, or their range; ``fits`` -> whether it trains. In ``blind/`` it may be
    missing yet.

    ``changes`` apply to the workload, ``set`` to hardware figures. ``gpu_budget`` is the memory that an allocator may give to
    tensors. ``gpus`` GPUs train together, each with the batch, or as ``parallel`` says, such as ``tp=8``.
    ``calibrates``: phase -> the figure of the hardware file that was derived from it. ``predicted``: phase -> the seconds that
    were predicted before the measurement was looked at, for rows that were added so. ``asks``: what was measured, for rows
    whose measurements are not there yet. ``relative_to``: the name of the row over whose iteration a relative one is.
    """

    name: str
    policy: str
    measured: dict[str, bool | float | tuple[float, float]] = {}
    changes: dict[str, Any] = {}
    hardware: str | None = None
    set: dict[str, str] = {}
    gpu_budget: str | None = None
    gpus: int | None = None
    parallel: str | None = None
    calibrates: dict[str, str] = {}
    predicted: dict[str, float] = {}
    asks: tuple[str, ...] = ()
    relative_to: str = ""
    remark: str = ""

    @property
    def is_of_one_gpu(self) -> bool:
        """Whether one GPU trains by itself."""
        return self.gpus in (None, 1) and self.parallel is None

    @property
    def times(self) -> list[str]:
        """The measured phases that are times."""
        return [phase for phase in self.measured if phase not in UNITS]


class Source(_Table):
    """One file: rows from one place that share a node and a workload. ``group``: ``new`` if nobody looked at it while the model
    was made. Files in ``blind/`` are blind, but ``kept back`` if they hold further rows of a known source.
    """

    group: Literal["known", "kept back", "new", "blind"] = "known"
    title: str
    source: str
    date: str
    hardware: str
    set: dict[str, str] = {}
    workload: dict[str, Any]
    rows: tuple[Row, ...] = Field(alias="row")

    def node_of(self, row: Row) -> str:
        """Return the preset or the path of the file of a row's hardware."""
        name = row.hardware or self.hardware
        return str(FOLDER / name) if name.endswith(".toml") else name

    def group_of(self, row: Row) -> str:
        """Return the group of ``row``, one of :data:`GROUPS`."""
        return KEPT_BACK if self.group == KNOWN and row.predicted else self.group

    def simulate(self, row: Row, moved: Mapping[str, str] | None = None) -> Simulation:
        """Simulate ``row``, with some hardware figures changed."""
        budget = {"gpu.memory": row.gpu_budget, "gpu.reserved_memory": "1B"} if row.gpu_budget else {}
        hardware = load_hardware(self.node_of(row), {**self.set, **row.set, **budget, **(moved or {})})
        workload = _workload(row.name, self.workload | row.changes)
        return simulate(workload, hardware.shared_by(*parse_parallel(row.parallel, row.gpus)), parse_policy(row.policy))

    def predict(self, row: Row, asked: Collection[str] = ()) -> tuple[dict[str, float], str]:
        """Predict what may have been measured of ``row``, and say which memory decides.

        Where no plan fits, there is only the verdict; of what cannot be simulated there is nothing, and the reason. What takes
        long is predicted only if it is ``asked`` for: the longest sequence, which takes eight further simulations.
        """
        try:
            simulation = self.simulate(row)
        except InfeasibleError as error:
            return {VERDICT: False}, str(error)
        except InputError as error:
            return {}, str(error)
        predicted = phases(simulation)
        if not {RESERVED, USED}.isdisjoint(asked):
            # Where pieces do not fit, the run ends or finds others: it took place within the memory.
            reserved = min(simulation.gpu.reserved_bytes, simulation.profile.hardware.gpu_capacity_bytes)
            predicted[RESERVED] = reserved / 2**30
            predicted[USED] = (reserved + simulation.profile.hardware.gpu.reserved_bytes) / 2**30
        if LONGEST in asked:
            predicted[LONGEST] = self.longest(row)
        if RELATIVE in asked:
            other = next(one for one in self.rows if one.name == row.relative_to)
            predicted[RELATIVE] = simulation.iteration_seconds / self.simulate(other).iteration_seconds
        return predicted, fullest(simulation)

    def longest(self, row: Row) -> int:
        """Return the longest sequence that fits where ``row`` has another, in whole steps of 1,024 tokens."""

        def fails(tokens: int) -> bool:
            other = row.model_copy(update={"changes": row.changes | {"sequence_length": tokens}})
            return not self.predict(other)[0].get(VERDICT)

        lengths = range(0, 2**18, 1024)
        return lengths[bisect_left(lengths, True, lo=1, key=fails) - 1]


def _workload(name: str, given: dict[str, Any]) -> Workload:
    fields = dict(given)
    preset, model, config = (fields.pop(key, None) for key in ("preset", "model", "config"))
    texts = {
        "precision": Precision,
        "autocast": Precision,
        "kernels": Kernels,
        "units": Units,
        "loss": LossKernels,
        "attention": FusedAttention,
        "attention_mask": AttentionMask,
    }
    for field, kind in texts.items():
        if field in fields:
            fields[field] = kind(fields[field])
    if "sample_lengths" in fields:
        fields["sample_lengths"] = tuple(fields["sample_lengths"])
    training: dict[str, Any] = {key: fields.pop(key) for key in ("optimizer", "fp8", "early_stop", "foreach") if key in fields}
    if "optimizer" in training:
        training["optimizer"] = Optimizer(training["optimizer"])
    if "lora" in fields:
        lora = fields.pop("lora")
        adapters = Adapters(lora["adapters"]) if "adapters" in lora else None
        training["lora"] = Lora(**lora | {"targets": tuple(lora["targets"]), "adapters": adapters})
    if "galore" in fields:
        training["galore"] = GaLore(**fields.pop("galore"))
    if training:
        fields["training"] = Training(**training)
    if model is not None or config is not None:
        read = read_model(model) if config is None else parse_model(config, name)
        if fields.pop("joint_attention", False):
            fields["architecture"] = _with_joint_attention(read)
        return replace(read, **fields)
    return replace(WORKLOADS[preset], **fields) if preset else Workload(name=name, **fields)


def _with_joint_attention(workload: Workload) -> Architecture:
    """The blocks with one product for queries, keys and values, as in the first Qwen's own code."""
    assert workload.architecture is not None
    blocks = []
    for block in workload.architecture.blocks:
        assert isinstance(block.mixer, Attention)
        blocks.append(replace(block, mixer=replace(block.mixer, joint=JointProduct.SPLIT)))
    return replace(workload.architecture, blocks=tuple(blocks))


def read_source(path: Path) -> Source:
    """Read one file."""
    group = {"group": BLIND} if path.parent.name == BLIND else {}
    return Source.model_validate_json(json.dumps(group | tomllib.loads(path.read_text(encoding="utf-8"))))


def sources() -> list[Source]:
    """Return all sources, in the order of their file names, the blind ones last."""
    return [read_source(path) for folder in (FOLDER, FOLDER / BLIND) for path in sorted(folder.glob("*.toml"))]


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
    again = [*kinds[Kind.RECOMPUTE], *kinds[Kind.BACKWARD]]
    back_again = [i for i in again if (task := simulation.schedule.tasks[i].id).unit == 1 and not task.micro_batch]
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
        STEP_SHARE: (following - back) * 1e-9 / simulation.iteration_seconds,
        "iteration": simulation.iteration_seconds,
        "block_forward": profile.units[1].forward_seconds,
        "block_backward": sum(simulation.schedule.tasks[i].duration_ns for i in back_again) * 1e-9,
        "passes": forward_seconds + sum(block.backward_seconds for block in profile.units),
        VERDICT: simulation.verdict is Verdict.OK,
        COUNT: plan.offloaded_optimizer_units,
        PEAK: simulation.gpu.peak_bytes / 2**30,
        HOST_PEAK: simulation.host.peak_bytes * (1 if plan.is_pipeline else profile.hardware.all_gpus) / 2**30,
    }


@dataclass(frozen=True, slots=True)
class Check:
    """One measured phase beside the predicted one, in seconds or its unit (:data:`UNITS`); for ``fits`` 1 and 0. Of a measured
    range, the middle. ``first`` was predicted before the measurement was looked at.
    """

    source: str
    group: str
    row: str
    phase: str
    measured: float
    predicted: float
    calibrates: str
    remark: str
    first: float | None = None

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1 if self.measured else self.predicted

    @property
    def first_error(self) -> float | None:
        """Relative error of what was predicted before the measurement was looked at."""
        return self.first / self.measured - 1 if self.first is not None and self.measured else None

    @property
    def is_time(self) -> bool:
        """Whether the check is of a time."""
        return self.phase not in UNITS

    @property
    def is_close(self) -> bool:
        """Whether the prediction is within a quarter; a verdict or a number of blocks has to be right."""
        return self.measured == self.predicted if self.phase in (VERDICT, COUNT) else abs(self.error) <= 0.25

    @property
    def is_verdict(self) -> bool:
        """Whether the check is a memory verdict."""
        return self.phase == VERDICT

    @property
    def is_inside(self) -> bool:
        """Whether the measured time is in the 90 % interval of the model's error, around what was predicted first.

        The figures of the hardware are taken to be right.
        """
        predicted = self.predicted if self.first is None else self.first
        return predicted / MODEL_FACTOR <= self.measured <= predicted * MODEL_FACTOR


def middle(measured: bool | float | tuple[float, float]) -> float:
    """Return the middle of the measured range; a number is its own."""
    return sum(measured) / 2 if isinstance(measured, tuple) else float(measured)


def checks(of: Sequence[Source] | None = None, jobs: int = 1) -> list[Check]:
    """Simulate every measured row, or those ``of`` some sources, in ``jobs`` processes.

    Raises:
        InputError: a row cannot be simulated.
    """
    runs = [(source, row) for source in (sources() if of is None else of) for row in source.rows if row.measured]
    rows = []
    for (source, row), (predicted, decides) in zip(runs, predictions(runs, jobs), strict=True):
        if not predicted:
            raise InputError(f"{source.title}, {row.name!r}: {decides}")
        ran = {} if VERDICT in row.measured or row.measured.keys() <= _NOT_OF_THE_RUN else {VERDICT: True}
        for phase, value in (row.measured | ran).items():
            if len(predicted) == 1 and phase != VERDICT:  # no plan fits
                continue
            remark = decides if phase == VERDICT else row.remark
            numbers = middle(value), float(predicted[phase])
            calibrates, first = row.calibrates.get(phase, ""), row.predicted.get(phase)
            rows.append(Check(source.title, source.group_of(row), row.name, phase, *numbers, calibrates, remark, first))
    return rows


def predictions(runs: Iterable[tuple[Source, Row]], jobs: int) -> Iterable[tuple[dict[str, float], str]]:
    """Predict each row of a source (:meth:`Source.predict`) in ``jobs`` processes."""
    return in_processes(
        Source.predict,
        ((source, row, {*row.measured, *row.asks}) for source, row in runs),
        jobs,
        ordered=True,
    )


def fullest(simulation: Simulation) -> str:
    """Return what is needed and there of each memory that is short; of the GPU's if none is."""
    short = [one for one in simulation.memories if not one.fits] or [simulation.gpu]
    return ", ".join(f"{one.memory} {one.peak_bytes / 2**30:.1f} of {one.capacity_bytes / 2**30:.1f} GiB" for one in short)


@dataclass(frozen=True, slots=True)
class Score:
    """Errors over checks that are not used for calibration.

    ``by_source``: mean of the mean errors of the sources, one of which may have a hundred rows that are off for one reason.
    ``inside``: share of measured times in the 90 % interval (:attr:`Check.is_inside`). ``first_error``: mean error of what was
    predicted before the measurements were looked at.
    """

    what: str
    count: int
    mean_error: float
    by_source: float
    median_error: float
    signed_error: float
    worst_error: float
    inside: float | None
    first_error: float | None

    @property
    def cells(self) -> list[str]:
        """All but the name, as text."""
        shares = (self.inside, self.first_error)
        return [
            str(self.count),
            *(f"{100 * error:.1f} %" for error in (self.mean_error, self.by_source, self.median_error)),
            f"{100 * self.signed_error:+.1f} %",
            f"{100 * self.worst_error:.1f} %",
            *("-" if share is None else f"{100 * share:.{places}f} %" for share, places in zip(shares, (0, 1), strict=True)),
        ]


#: Heads of :attr:`Score.cells`.
_HEADS = "number", "mean error", "by source", "median", "signed", "worst", "in the interval", "mean, as first predicted"
#: What is scored, and the largest mean error of a known and of another group that does not refute the model.
_SCORED = {
    "iteration": ("iterations", 0.08, 0.10),
    "phase": ("phases", 0.12, None),
    PEAK: ("GPU peaks", 0.06, 0.10),
    RESERVED: ("reserved peaks", None, 0.10),
    USED: ("peaks by nvidia-smi", None, 0.10),
    HOST_PEAK: ("host peaks", None, None),
    LONGEST: ("longest sequences", None, 0.12),
    RELATIVE: ("relative iterations", None, None),
    STEP_SHARE: ("shares of the step", None, None),
}


def _kind(check: Check) -> str:
    return "phase" if check.is_time and check.phase != "iteration" else check.phase


def mean_by_source(rows: Sequence[Check]) -> float:
    """Return the mean of the mean errors of the sources of ``rows``."""
    return mean(mean(abs(c.error) for c in rows if c.source == source) for source in dict.fromkeys(c.source for c in rows))


def scores(rows: Sequence[Check]) -> list[Score]:
    """Return the scores of iterations, all other phases, peaks and longest sequences; none of what there is none of."""
    found = []
    for kind, (what, *_) in _SCORED.items():
        some = [c for c in rows if _kind(c) == kind and not c.calibrates]
        if some:
            errors = [abs(c.error) for c in some]
            signed = mean(c.error for c in some)
            inside = mean(c.is_inside for c in some) if some[0].is_time else None
            first = [abs(c.first_error) for c in some if c.first_error is not None]
            means = mean(errors), mean_by_source(some), median(errors), signed, max(errors)
            found.append(Score(what, len(some), *means, inside, mean(first) if first else None))
    return found


def as_csv(rows: Iterable[Check]) -> str:
    """One row per check."""
    prediction = "predicted difference_percent inside calibrates predicted_before"
    lines: list[Sequence[object]] = [f"source group row phase unit measured {prediction} remark clock".split()]
    for c in rows:
        places = 6 if c.phase == LONGEST else 4
        numbers = (f"{c.measured:.{places}g}", f"{c.predicted:.{places}g}", f"{100 * c.error:.1f}")
        inside = ("yes" if c.is_inside else "no") if c.is_time else ""
        first = "" if c.first is None else repr(c.first)
        unit = UNITS.get(c.phase, "s")
        lines.append([c.source, c.group, c.row, c.phase, unit, *numbers, inside, c.calibrates, first, c.remark, "simulated"])
    return csv_text(lines)


def read(path: Path) -> list[Check]:
    """Read the file written with :func:`as_csv`; everything that is shown is made from it, so that all numbers agree."""
    return [
        Check(
            row["source"],
            row["group"],
            row["row"],
            row["phase"],
            float(row["measured"]),
            float(row["predicted"]),
            row["calibrates"],
            row["remark"],
            float(row["predicted_before"]) if row["predicted_before"] else None,
        )
        for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    ]


# --- tables -------------------------------------------------------------------------------------------------------


def _score_lines(rows: Sequence[Check]) -> list[list[str]]:
    """What is scored and its numbers, a line each, and how many verdicts are wrong."""
    lines = [[s.what, *s.cells] for s in scores(rows)]
    verdicts = [c for c in rows if c.is_verdict]
    if verdicts:
        wrong = sum(not c.is_close for c in verdicts)
        lines.append(["verdicts", str(len(verdicts)), f"{wrong} wrong", *["-"] * (len(_HEADS) - 2)])
    return lines


def group_lines(rows: Sequence[Check]) -> list[list[str]]:
    """The scores of each group, with the goal of each mean."""
    goals = {what: (known, other) for what, known, other in _SCORED.values()}
    lines = []
    for group in GROUPS:
        for what, *cells in _score_lines([c for c in rows if c.group == group]):
            goal = goals.get(what, (0.0, 0.0))[group in (NEW, BLIND)]
            lines.append([group, what, *cells, "-" if goal is None else f"{100 * goal:.0f} %" if goal else "none wrong"])
    return lines


def wrong_lines(rows: Sequence[Check]) -> list[list[str]]:
    """The verdicts that are wrong, with the memory that is short or suffices."""
    words = ("did not fit", "ran")
    return [[c.source, c.row, c.group, words[round(c.measured)], c.remark] for c in rows if c.is_verdict and not c.is_close]


def blind_lines(rows: Sequence[Check]) -> list[list[str]]:
    """A line for each source in ``blind/``: mean errors as first predicted, now and signed, and how many verdicts are wrong."""
    lines = []
    for title in (read_source(path).title for path in sorted((FOLDER / BLIND).glob("*.toml"))):
        of = [c for c in rows if c.source == title]
        line = [title, str(len({c.row for c in of}))]
        for phases in ({"iteration"}, {PEAK, RESERVED, USED}):
            errors = [(c.first_error, c.error) for c in of if c.phase in phases and c.first_error is not None]
            means = [mean(abs(first) for first, _ in errors), mean(abs(now) for _, now in errors)] if errors else []
            line += [f"{100 * one:.1f} %" for one in means] or ["-"] * 2
            line.append(f"{100 * mean(now for _, now in errors):+.1f} %" if errors else "-")
        verdicts = [(c.first, c.predicted, c.measured) for c in of if c.is_verdict and c.first is not None]
        line += [str(sum(verdict[which] != verdict[2] for verdict in verdicts)) for which in (0, 1)]
        if of:
            lines.append(line)
    return lines


_GROUP_HEADS = ["Group", "What", *_HEADS, "goal (mean)"]
_ERROR_HEADS = "as first predicted", "now", "signed"
_BLIND_HEADS = ["Blind source", "rows"]
_BLIND_HEADS += [f"{what}, {head}" for what in ("iterations", "GPU memory") for head in _ERROR_HEADS]
_BLIND_HEADS += [f"wrong verdicts, {head}" for head in _ERROR_HEADS[:2]]
_WRONG_HEADS = ["Wrong verdict", "Row", "Group", "Measured", "Predicted need"]


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """The table as a page of docs/ has it."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (heads, ["---"] * len(heads), *lines)).replace(" --- ", "---")


def tables(rows: Sequence[Check]) -> list[str]:
    """The tables of docs/results.md that are made from the rows."""
    made = (_GROUP_HEADS, group_lines(rows)), (_BLIND_HEADS, blind_lines(rows)), (_WRONG_HEADS, wrong_lines(rows))
    return [markdown(*one) for one in made]


def write_docs(rows: Sequence[Check], page: Path = RESULTS) -> None:
    """Replace each table of ``page`` that is made from the rows; it is found by the first cell of its head."""
    text = page.read_text(encoding="utf-8")
    for made in tables(rows):
        head = made[: made.index("|", 1)]
        parts = re.split(rf"^{re.escape(head)}\|.*\n(?:\|.*\n)+", text, flags=re.MULTILINE)
        if len(parts) != 2:
            raise InputError(f"{page} has {len(parts) - 1} tables that begin with {head!r}; there must be one")
        text = made.join(parts)
    write_text(page, text)


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
            elif c.phase in RATIOS:
                cells = [f"{c.measured:.3f}", f"{c.predicted:.3f}", f"{100 * c.error:+.0f} %"]
            elif c.phase in PEAKS:
                cells = [f"{c.measured:.1f} GiB", f"{c.predicted:.1f} GiB", f"{100 * c.error:+.0f} %"]
            else:
                cells = [format_seconds(c.measured), format_seconds(c.predicted), f"{100 * c.error:+.0f} %"]
            rows.add_row(c.row if c.row != before else "", c.phase.replace("_", " "), *cells, c.calibrates)
            before = c.row
        out.print(rows)
    show_scores(results)


def show_scores(results: Sequence[Check]) -> None:
    """Print the wrong verdicts, and the scores by source and by group."""
    wrong = wrong_lines(results)
    if wrong:
        _print(table("wrong verdicts", _WRONG_HEADS, left=5), wrong)
    by_source = table("by source, without what calibrates", ["source", "group", "what", *_HEADS], left=3)
    of = dict.fromkeys((c.source, c.group) for c in results)
    lines = [[*key, *line] for key in of for line in _score_lines([c for c in results if (c.source, c.group) == key])]
    _print(by_source, lines)
    _print(table("by group, without what calibrates", _GROUP_HEADS, left=2), group_lines(results))


def _print(shown: FittedTable, lines: Iterable[Sequence[str]]) -> None:
    for line in lines:
        shown.add_row(*line)
    console().print(shown)


# --- figure -------------------------------------------------------------------------------------------------------

#: Mark and colour of what is shown.
_MARKS = {
    "iteration": ("o", BLUE),
    "phase": ("^", ORANGE),
    PEAK: ("s", GREEN),
    RESERVED: ("v", SKY),
    USED: ("<", SKY),
    HOST_PEAK: ("P", VERMILION),
    LONGEST: ("D", PURPLE),
    RELATIVE: ("h", BLUE),
    STEP_SHARE: (">", ORANGE),
}
_HEADINGS = {KNOWN: "Known sources", NEW: "New sources", BLIND: "Predicted blind"}
#: Errors beyond are drawn there, in percent; the largest of a lane is written beside.
_WIDEST = 100.0
_SMALL = 6.0


def draw(rows: Sequence[Check]) -> Figure:
    """Draw the error of each prediction.

    A line per source, a mark and a lane per quantity, open where the row was kept back, and the mean error of its iterations.
    Known, new and blind sources stand apart. The band is the 90 % interval of the model's error.
    """
    shown = [c for c in rows if _kind(c) in _MARKS]
    places: dict[str, float] = {}
    headings: dict[str, float] = {}
    at = 0.0
    for group, heading in _HEADINGS.items():
        titles = dict.fromkeys(c.source for c in shown if (KNOWN if c.group == KEPT_BACK else c.group) == group)
        if titles:
            headings[heading] = at
            places |= {title: at + 1 + i for i, title in enumerate(titles)}
            at += len(titles) + 1.3
    with style():
        figure = Figure(figsize=(7.0, 0.9 + 0.165 * at), layout="constrained")
        axes = figure.subplots()
        band = [100 * (end - 1) for end in (1 / MODEL_FACTOR, MODEL_FACTOR)]
        axes.axvspan(*band, color="0.93", linewidth=0, label="90 % interval")
        axes.axvline(0, color="0.4", linewidth=0.8)
        for title, where in places.items():
            of = [c for c in shown if c.source == title]
            lanes = [kind for kind in _MARKS if kind in map(_kind, of)]
            for lane, kind in enumerate(lanes):
                y = where + min(0.27, 0.8 / len(lanes)) * (lane - (len(lanes) - 1) / 2)
                _draw_lane(axes, y, kind, [c for c in of if _kind(c) == kind])
        for kind in dict.fromkeys(_kind(c) for c in shown):
            mark, colour = _MARKS[kind]
            axes.plot([], [], mark, color=colour, markersize=4, label=_SCORED[kind][0])
        axes.plot([], [], "o", color="0.3", markerfacecolor="white", markersize=4, label="kept back (open)")
        axes.plot([], [], "x", color="0.45", markersize=4, label="calibrates a figure")
        lines = headings | places
        axes.set_yticks(list(lines.values()), list(lines), fontsize=_SMALL)
        for label in axes.get_yticklabels():
            if label.get_text() in headings:
                label.set_fontweight("bold")
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(at - 0.7, -0.6)
        for where in places.values():
            axes.axhline(where + 0.5, color="0.88", linewidth=0.5, zorder=0)
        if any(100 * c.error > _WIDEST for c in shown):
            axes.set_xlim(right=_WIDEST + 32)  # leaves room for their values
        axes.set_xlabel("error of the simulated prediction against what others measured (%)")
        axes.set_title("mean error of iterations", loc="right", fontsize=7)
        _write_means(axes, shown, places, headings)
        figure.legend(loc="outside upper center", ncols=4)
    return figure


def _draw_lane(axes: Axes, y: float, kind: str, checks: Sequence[Check]) -> None:
    mark, colour = _MARKS[kind]
    for which, face in ((KEPT_BACK, "white"), ("", colour)):
        errors = [100 * c.error for c in checks if not c.calibrates and (c.group == KEPT_BACK) == (which == KEPT_BACK)]
        shown = [min(error, _WIDEST) for error in errors]
        axes.plot(shown, [y] * len(errors), mark, color=colour, markerfacecolor=face, markersize=2.8, markeredgewidth=0.6)
    calibrate = [100 * c.error for c in checks if c.calibrates]
    axes.plot(calibrate, [y] * len(calibrate), "x", color="0.45", markersize=2.8, markeredgewidth=0.6)
    widest = max(100 * c.error for c in checks)
    if widest > _WIDEST:
        axes.annotate(f"{widest:+.0f} %", (_WIDEST, y), (3, 0), textcoords="offset points", va="center", fontsize=_SMALL)


def _write_means(axes: Axes, shown: Sequence[Check], places: Mapping[str, float], headings: Mapping[str, float]) -> None:
    """Write the mean errors of iterations to the right, beside them those of what was kept back."""

    def write(group: str, y: float, text: str, weight: str = "normal") -> None:
        right = 38 if group == KEPT_BACK else 6  # points
        at = axes.get_yaxis_transform()
        axes.annotate(
            text, (1, y), (right, 0), at, "offset points", annotation_clip=False, va="center", fontsize=_SMALL, weight=weight
        )

    for heading, where in headings.items():
        known = heading == _HEADINGS[KNOWN]
        write(KNOWN, where, "known" if known else "mean", "bold")
        if known:
            write(KEPT_BACK, where, "kept back", "bold")
    for title, group in dict.fromkeys((c.source, c.group) for c in shown):
        of = [c for c in shown if (c.source, c.group, c.phase) == (title, group, "iteration")]
        errors = [abs(c.error) for c in of if not c.calibrates]
        if errors:
            write(group, places[title], f"{100 * mean(errors):.0f} %")


def main(*, out: Path = Path("paper_figs"), docs: bool = False) -> None:
    """Simulate the published measurements, compare, and write the results.

    Parameters
    ----------
    out:
        Folder for ``published.csv`` and ``published.{png,pdf}``.
    docs:
        Write the tables of ``docs/results.md`` that are made from them, too.
    """
    make_folder(out)
    write_text(out / "published.csv", as_csv(checks(jobs=os.cpu_count() or 1)))
    rows = read(out / "published.csv")
    figure = draw(rows)
    for suffix in ("png", "pdf"):
        save_figure(figure, out / f"published.{suffix}")
    show(rows)
    print_text(console(), f"written: {out}/published.{{csv,png,pdf}}")
    if docs:
        write_docs(rows)


if __name__ == "__main__":
    run_app(App(name="published", default_command=main, help=__doc__))
