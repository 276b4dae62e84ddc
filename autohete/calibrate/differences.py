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
#: A part that is more than this share of a whole is a cause of it.
_MOST_OF = 0.3
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
#: Shares of its limits that the GPU reaches.
_SHARES = {
    "gpu.gemm_efficiency": "Large matrix products",
    "gpu.memory_efficiency": "Elementwise operators",
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


def predicted_flops(simulation: Simulation) -> dict[Phase, float]:
    """Return the FLOPs of forward and backward of one iteration on one GPU, recomputation included."""
    workload, seconds = simulation.profile.workload, seconds_by_kind(simulation)
    forward = workload.forward_flops * workload.micro_batches
    again, first = (seconds.get((GPU, kind), 0.0) for kind in (Kind.RECOMPUTE, Kind.FORWARD))
    return {
        Phase.FORWARD: forward,
        Phase.BACKWARD: workload.model_flops - forward + (forward * again / first if first else 0.0),
    }


def explanations(
    rows: Sequence[PartDifference], phased: Phased, simulation: Simulation, figures: Sequence[MeasuredFigure]
) -> list[str]:
    """Explain the three largest differences, the largest first, of the parts that make up the iteration: passes and waits."""
    known = {figure.key.replace("ranks_", ""): figure for figure in figures}
    by_part = {row.part: row for row in rows}
    explainer = _Explainer(phased, by_part, known, predicted_flops(simulation))
    least, found = _SMALL * simulation.iteration_seconds, []
    added = [row for row in rows if row.part not in _RATES]
    for row in sorted(added, key=lambda row: -abs(row.measured - (row.predicted or 0.0)))[:_EXPLAINED]:
        more = row.measured - (row.predicted or 0.0)
        if abs(more) > least:
            line = f"{row.part}: {format_seconds(abs(more))} {'longer' if more > 0 else 'shorter'} than predicted"
            found.append(f"{line}. {'; '.join(explainer.causes(row))}.")
    return found


@dataclass(frozen=True, slots=True)
class _Explainer:
    """Names causes by what a recording shows: its steps, all parts, measured figures, and the predicted FLOPs of passes."""

    phased: Phased
    rows: Mapping[Phase, PartDifference]
    known: Mapping[str, MeasuredFigure]
    flops: Mapping[Phase, float]

    def causes(self, row: PartDifference) -> list[str]:
        """The causes of a difference; at least one, or what to compare."""
        if row.part is Phase.IDLE_BETWEEN:
            return ["The host does something else between steps, such as loading data or logging, which is not simulated"]
        cause = self.rows.get(_WAITS[row.part], row) if row.part in _WAITS else row
        if not cause.measured:
            return [f"The recording has no {cause.part}: the program does without, or its range is not marked"]
        if not cause.predicted:
            return [f"No {cause.part} is predicted: the policy does without, or moves and computes elsewhere"]
        if row.part in PASSES:
            return self._pass(row, row.predicted or 0.0)
        hidden, expected = (
            100 * (1 - min(1.0, waited / busy))
            for waited, busy in ((row.measured, cause.measured), (row.predicted or 0.0, cause.predicted))
        )
        shares = f"{hidden:.0f} % of it runs while the GPU computes, where {expected:.0f} % is predicted"
        return [*self._lane(cause, cause.predicted), *([shares] if abs(hidden - expected) > 100 * _ALIKE else [])]

    def _pass(self, row: PartDifference, predicted: float) -> list[str]:
        more, steps, said = row.measured - predicted, self.phased.steps, []
        late, kernels, counted = (
            float(np.median([one[row.part] for one in some]))
            for some in ([step.late for step in steps], [step.kernels for step in steps], [step.flops for step in steps])
        )
        if late > _MOST_OF * more > 0:
            each = f", {format_seconds(row.measured / kernels)} for each of {kernels:,.0f} kernels" if kernels else ""
            said.append(f"For {format_seconds(late)} the GPU waits for the host's launches{each}")
        flops = self.flops.get(row.part, 0.0)
        if counted and flops and abs(counted / flops - 1) > 2 * _ALIKE:
            said.append(
                f"Its products have {counted / 1e12:.3g} TFLOP, those of the model as named {flops / 1e12:.3g}: compare batch, "
                "length, layers, adapters and recomputation"
            )
        for key, what in _SHARES.items():
            figure = self.known.get(key)
            if figure and figure.before and (1 - figure.value / figure.before) * (1 if more > 0 else -1) > _ALIKE:
                said.append(f"{what} reach {figure.value:.2f} of their limit, where {key} is {figure.before:.2f}")
        cure = (
            "No rate that the recording shows explains it: compare --kernels, --precision and the recomputation of the policy"
        )
        return said or [f"{cure} with what the program runs ({kernels:,.0f} kernels)"]

    def _lane(self, row: PartDifference, predicted: float) -> list[str]:
        size, pageable = (
            float(np.median([one.get(row.part, 0) for one in some]))
            for some in ([step.bytes for step in self.phased.steps], [step.pageable_bytes for step in self.phased.steps])
        )
        figure, said, faster = self.known.get(_RATES[row.part]), [], 1.0
        if size:
            said.append(f"{format_bytes(size)} take {format_seconds(row.measured)} ({size / row.measured / 1e9:.3g} GB/s)")
        if pageable > _MOST_OF * size:
            said.append(f"{100 * pageable / size:.0f} % of it is pageable memory")
        if figure and figure.before and abs(figure.value / figure.before - 1) > _ALIKE:
            faster = figure.value / figure.before
            said.append(f"{figure.key} is {figure.value / 1e9:.3g} GB/s instead of {figure.before / 1e9:.3g}")
        more = row.measured * faster / predicted
        if size and abs(more - 1) > 2 * _ALIKE:
            said.append(f"at this rate, {more:.2g} times as many bytes are moved as predicted")
        return said or [f"The {row.part} take {format_seconds(row.measured)}, where {format_seconds(predicted)} is predicted"]
