"""The files of a calibration: a hardware with measured figures, and a profile with measured times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from autohete.answer.site import Site, without_system
from autohete.calibrate.differences import predicted_parts, seconds_by_kind
from autohete.calibrate.figures import MeasuredFigure
from autohete.calibrate.recorded import RecordedRun
from autohete.calibrate.recorded_steps import PASSES, Phase, Phased
from autohete.errors import InputError
from autohete.hardware import Hardware, HardwareFile
from autohete.hardware.document import changed, combine, overridden, read_chain
from autohete.printable import shown
from autohete.profile import Profile, UnitProfile
from autohete.schedule import GPU, Kind
from autohete.simulate import Simulation

#: Seconds that an update on the CPU must last to give a rate.
_SHORTEST_UPDATE = 1e-4


def _tables(figures: Iterable[MeasuredFigure], recorded: RecordedRun) -> dict[str, Any]:
    """Return the figures as the tables of a hardware file."""
    tables: dict[str, Any] = {}
    for figure in figures:
        *path, name = figure.key.split(".")
        node = tables
        for part in path:
            node = node.setdefault(part, {})
        node[name] = figure.entry(recorded.name, recorded.date)
    return tables


def calibrated_document(site: Site, figures: Iterable[MeasuredFigure], recorded: RecordedRun, name: str) -> Mapping[str, Any]:
    """Return the whole document of the hardware of ``site``, called ``name``, with measured figures.

    Raises:
        InputError: the hardware, or a figure given with it, is not valid; or no hardware can have the measured ones.
    """
    whole = combine(read_chain(site.source))
    if site.given:
        whole = overridden(whole, site.given)
    document = changed(whole, {**_tables(figures, recorded), "name": name})
    try:
        HardwareFile.of(document)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3])
        raise InputError(f"{shown(recorded.name)} has times or sizes of no hardware ({faults}): record it again") from error
    return document


def calibrated_hardware(document: Mapping[str, Any], site: Site) -> Hardware:
    """Return one GPU's share of the hardware of a whole document, without what ``site`` leaves to the system."""
    return without_system(HardwareFile.of(document).hardware().shared_by(site.gpus), site.system_bytes)


def cpu_update_figure(phased: Phased, predicted: Sequence[tuple[float, float]], ranks: int = 1) -> list[MeasuredFigure]:
    """The rate of the CPU's updates, of all ``ranks`` of a node together.

    A recording has no bytes of an update. The prediction counts them from the plan, for the trained parameters of the model,
    and adds elementwise work at a rate of its own: its seconds are a line over one divided by the rate.

    Args:
        phased: the recording.
        predicted: rates of a rank in B/s and the seconds predicted with them; the first is of the hardware that is calibrated.
        ranks: GPUs of a node, each with a process that updates its share.
    """
    measured = sorted(step.parts[Phase.CPU_UPDATE] for step in phased.steps)
    (first, seconds), (last, others) = predicted[0], predicted[-1]
    if measured[0] < _SHORTEST_UPDATE or seconds < _SHORTEST_UPDATE:
        return []
    work, beside = first * seconds, 0.0
    if last != first and others != seconds:
        work = (others - seconds) / (1 / last - 1 / first)
        beside = seconds - work / first
    if work <= 0 or measured[0] <= beside:
        work, beside = first * seconds, 0.0
    rates = [ranks * work / (one - beside) for one in reversed(measured)]
    key = "cpu.update_bandwidth" if ranks == 1 else "cpu.ranks_update_bandwidth"
    what = f"{len(rates)} steps of the optimizer on the CPU, with the bytes that the plan moves"
    return [MeasuredFigure(key, rates[len(rates) // 2], rates[0], rates[-1], "B/s", what, ranks * first)]


@dataclass(frozen=True, slots=True)
class PassFactors:
    """How many times as long each pass takes as it was computed."""

    forward: float = 1.0
    backward: float = 1.0
    update: float = 1.0

    def __mul__(self, other: PassFactors) -> PassFactors:
        return PassFactors(self.forward * other.forward, self.backward * other.backward, self.update * other.update)


def pass_factors(phased: Phased, simulation: Simulation) -> PassFactors | None:
    """Compare the passes of a recording with those of a simulation; None if the recording has no forward or no backward."""
    predicted, seconds = predicted_parts(simulation), seconds_by_kind(simulation)
    forward, backward, update = (phased.median(part) for part in PASSES)
    if not forward or not backward or not predicted[Phase.FORWARD]:
        return None
    first = forward / predicted[Phase.FORWARD]
    # A recomputation is a forward; what is left of the backward is the backward's own.
    again, own = (seconds.get((GPU, kind), 0.0) for kind in (Kind.RECOMPUTE, Kind.BACKWARD))
    second = (backward - first * again) / own if own and backward > first * again else first
    third = update / predicted[Phase.UPDATE] if update and predicted[Phase.UPDATE] else 1.0
    return PassFactors(first, second, third)


def scaled_profile(profile: Profile, factors: PassFactors) -> Profile:
    """Return ``profile`` with the times of its passes multiplied, its memory as it is."""

    def scaled(unit: UnitProfile) -> UnitProfile:
        shorter = unit.shorter_recompute_seconds
        return replace(
            unit,
            forward_seconds=unit.forward_seconds * factors.forward,
            backward_seconds=unit.backward_seconds * factors.backward,
            gpu_update_seconds=unit.gpu_update_seconds * factors.update,
            shorter_recompute_seconds=None if shorter is None else shorter * factors.forward,
            saved=tuple(
                replace(
                    one,
                    seconds=None if one.seconds is None else one.seconds * factors.forward,
                    launch_seconds=one.launch_seconds * factors.forward,
                )
                for one in unit.saved
            ),
        )

    made = {unit: scaled(unit) for unit in dict.fromkeys(profile.units)}
    loss = replace(profile.loss, seconds=profile.loss.seconds * factors.forward)
    return replace(profile, units=tuple(made[unit] for unit in profile.units), loss=loss)
