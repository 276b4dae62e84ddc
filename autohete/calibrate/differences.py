"""A prediction beside a recording, part by part, and the causes of the largest differences in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autohete.analysis.usage import Cause, usage
from autohete.calibrate.figures import MeasuredFigure
from autohete.calibrate.recorded_steps import PASSES, Phase, Phased
from autohete.quantities import format_bytes, format_seconds
from autohete.schedule import COLLECTIVE, CPU, D2H, GPU, H2D, Kind
from autohete.simulate import Simulation

#: Differences that are explained.
_EXPLAINED = 3
#: Parts of an iteration that differ by less of it are not explained.
_SMALL = 0.005
#: Figures that differ by less from those of the hardware explain nothing.
_ALIKE = 0.05
_KINDS = {
    Kind.FORWARD: Phase.FORWARD,
    Kind.LOSS: Phase.FORWARD,
    Kind.RECOMPUTE: Phase.BACKWARD,
    Kind.BACKWARD: Phase.BACKWARD,
}
_LANES = {H2D: Phase.H2D, D2H: Phase.D2H, CPU: Phase.CPU_UPDATE, COLLECTIVE: Phase.COLLECTIVES}
_IDLE = {
    Cause.H2D: Phase.IDLE_H2D,
    Cause.D2H: Phase.IDLE_D2H,
    Cause.OPTIMIZER: Phase.IDLE_UPDATE,
    Cause.COLLECTIVE: Phase.IDLE_COLLECTIVES,
}
_RATES = {
    Phase.H2D: "links.h2d.bandwidth",
    Phase.D2H: "links.d2h.bandwidth",
    Phase.COLLECTIVES: "interconnect.bandwidth",
    Phase.CPU_UPDATE: "cpu.update_bandwidth",
}
#: What a wait of the GPU ends with.
_WAITS = {
    Phase.IDLE_H2D: Phase.H2D,
    Phase.IDLE_D2H: Phase.D2H,
    Phase.IDLE_COLLECTIVES: Phase.COLLECTIVES,
    Phase.IDLE_UPDATE: Phase.CPU_UPDATE,
}


@dataclass(frozen=True, slots=True)
class PartDifference:
    """One part of an iteration, in seconds; ``low`` and ``high`` are the ends of the measured steps.

    Args:
        part: the part.
        predicted: with the hardware that is calibrated; None without a prediction.
        measured: of the median step.
        low, high: 5 and 95 % of the steps.
        calibrated: predicted with the calibrated figures; None without a prediction.
    """

    part: Phase
    predicted: float | None
    measured: float
    low: float
    high: float
    calibrated: float | None = None


def seconds_by_kind(simulation: Simulation) -> dict[tuple[str, Kind], float]:
    """Return the seconds of one steady iteration that each lane spends on each kind of task."""
    trace, steady = simulation.trace, simulation.steady
    window = slice(steady.first, steady.first + steady.cycle)
    spent = (trace.end_ns[window] - trace.start_ns[window]).sum(axis=0) * 1e-9 / steady.cycle
    found: dict[tuple[str, Kind], float] = {}
    for task, seconds in zip(trace.schedule.tasks, spent.tolist(), strict=True):
        key = task.lane.partition(".")[0], task.id.kind
        found[key] = found.get(key, 0.0) + seconds
    return found


def predicted_parts(simulation: Simulation) -> dict[Phase, float]:
    """Return the seconds of each part of one steady iteration."""
    parts = dict.fromkeys(Phase, 0.0)
    for (lane, kind), seconds in seconds_by_kind(simulation).items():
        part = _KINDS.get(kind, Phase.UPDATE) if lane == GPU else _LANES.get(lane)
        if part is not None:
            parts[part] += seconds
    for cause, seconds in usage(simulation.trace, simulation.steady).idle_seconds.items():
        parts[_IDLE.get(cause, Phase.IDLE_BETWEEN)] += seconds
    return parts


def differences(
    phased: Phased, predicted: Mapping[Phase, float] | None, calibrated: Mapping[Phase, float] | None
) -> list[PartDifference]:
    """Return all parts that were predicted or measured."""
    rows = []
    for part in Phase:
        seconds = [step.parts[part] for step in phased.steps]
        low, middle, high = (float(np.percentile(seconds, share)) for share in (5, 50, 95))
        before, after = (None if some is None else some[part] for some in (predicted, calibrated))
        if high or before:
            rows.append(PartDifference(part, before, middle, low, high, after))
    return rows


def explanations(
    rows: Sequence[PartDifference], phased: Phased, simulation: Simulation, figures: Sequence[MeasuredFigure]
) -> list[str]:
    """Explain the three largest differences, the largest first."""
    known = {figure.key: figure for figure in figures}
    predicted = {row.part: row.predicted or 0.0 for row in rows}
    least = _SMALL * simulation.iteration_seconds
    differing = [row for row in rows if abs(row.measured - predicted[row.part]) > least]
    differing.sort(key=lambda row: -abs(row.measured - predicted[row.part]))
    found = []
    for row in differing[:_EXPLAINED]:
        before = predicted[row.part]
        more = "longer" if row.measured > before else "shorter"
        line = f"{row.part}: {format_seconds(abs(row.measured - before))} {more} than predicted"
        found.append(f"{line}. {_why(row, before, phased, known)}")
    return found


def _why(row: PartDifference, predicted: float, phased: Phased, known: Mapping[str, MeasuredFigure]) -> str:
    if row.part in PASSES:
        return _why_pass(row, predicted, phased, known)
    if row.part in _WAITS:
        cause = _WAITS[row.part]
        busy = phased.median(cause)
        if not busy:
            return f"The recording has no {cause} at all: the policy moves or computes what the program does not."
        hidden = 1 - min(1.0, row.measured / busy)
        return (
            f"In the recording {cause} take {format_seconds(busy)}, of which {100 * hidden:.0f} % run while the GPU computes; "
            f"the prediction hides {'less' if predicted > row.measured else 'more'} of them."
        )
    if row.part is Phase.IDLE_BETWEEN:
        return "The host does something else between steps, such as loading data or logging, which is not simulated."
    return _why_lane(row, predicted, phased, known)


def _why_pass(row: PartDifference, predicted: float, phased: Phased, known: Mapping[str, MeasuredFigure]) -> str:
    late = float(np.median([step.late[row.part] for step in phased.steps]))
    kernels = int(np.median([step.kernels[row.part] for step in phased.steps]))
    if not row.measured:
        return "The recording has no such work: it is done elsewhere, or the range that marks it is missing."
    if not predicted:
        return f"It is not predicted at all: {kernels:,} kernels of the program that the policy runs elsewhere."
    said = []
    if row.measured > predicted and late > 0.3 * (row.measured - predicted):
        launch = f", {format_seconds(row.measured / kernels)} for each of its {kernels:,} kernels" if kernels else ""
        said.append(f"For {format_seconds(late)} the GPU waits until the host has launched the next kernel{launch}")
    for key, what in (
        ("gpu.gemm_efficiency", "large matrix products"),
        ("gpu.attention_share", "attention"),
        ("gpu.memory_efficiency", "elementwise operators"),
    ):
        figure = known.get(key)
        if figure is None or figure.before is None or abs(figure.value / figure.before - 1) < _ALIKE:
            continue
        if (figure.value < figure.before) == (row.measured > predicted):
            said.append(f"{what} reach {figure.value:.2f}, where {key} is {figure.before:.2f}")
    if not said:
        said.append(
            f"No rate that the recording shows explains it; it has {kernels:,} kernels. Compare what the program runs with "
            "--kernels, --precision, --lora and the policy's recomputation"
        )
    return "; ".join(said) + "."


def _why_lane(row: PartDifference, predicted: float, phased: Phased, known: Mapping[str, MeasuredFigure]) -> str:
    sizes = float(np.median([step.bytes.get(row.part, 0) for step in phased.steps]))
    pageable = float(np.median([step.pageable_bytes.get(row.part, 0) for step in phased.steps]))
    figure = known.get(_RATES[row.part])
    if not row.measured:
        return f"The recording has no {row.part}: the program keeps these values elsewhere than the policy does."
    said = [f"{format_bytes(sizes)} were recorded, at {sizes / row.measured / 1e9:.3g} GB/s"] if sizes else []
    if pageable > 0.1 * sizes:
        said.append(f"{100 * pageable / sizes:.0f} % of it is pageable memory, which is slower")
    if figure is not None and figure.before and abs(figure.value / figure.before - 1) >= _ALIKE:
        said.append(f"{figure.key} is {figure.value / 1e9:.3g} GB/s instead of {figure.before / 1e9:.3g}")
        left = row.measured * figure.value / figure.before / predicted if predicted else 1.0
        if abs(left - 1) > 2 * _ALIKE and figure.key != "cpu.update_bandwidth":
            said.append(f"at that rate {left:.2g} times as many bytes are moved as predicted")
    elif predicted and sizes:
        said.append(f"the rate is as predicted, so {row.measured / predicted:.2g} times as many bytes are moved")
    return "; ".join(said or ["Its bytes are not recorded, so that the cause cannot be told"]) + "."
