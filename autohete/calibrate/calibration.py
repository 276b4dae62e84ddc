"""A calibration: what a recording shows, and what was predicted for the same training, before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autohete.answer.site import Site
from autohete.calibrate.calibrated import (
    PassFactors,
    calibrated_document,
    calibrated_hardware,
    cpu_update_figure,
    pass_factors,
    scaled_profile,
)
from autohete.calibrate.differences import PartDifference, differences, explanations, predicted_parts
from autohete.calibrate.figures import MeasuredFigure, hardware_figures
from autohete.calibrate.recorded_steps import Phase, Phased
from autohete.plan.policy import Policy
from autohete.profile import Profile
from autohete.profile.roofline import analytic_profile
from autohete.quantities import format_bytes
from autohete.simulate import simulate_policy
from autohete.workload import Kernels, Workload

#: GPUs whose memories differ by more are not the same.
_ANOTHER_GPU = 0.05
#: Predictions with measured figures: first the passes are known, then also what is updated beside them; and once more, because
#: a policy may plan otherwise with other times.
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a recording shows, and what was predicted for it.

    Args:
        format: the form of this document.
        trace, date: the recording's name and date.
        gpu: the name of its GPU; empty if not recorded.
        steps: number of its steps.
        measured_seconds: time of the median step.
        predicted_seconds, calibrated_seconds: of the prediction with the hardware as it was, and with what was measured; None
            without a workload.
        figures: measured figures of the hardware.
        parts: seconds of each part of an iteration.
        explanations: the causes of the largest differences, in words.
        remarks: what was assumed, and what is unusual, in words.
    """

    format: Literal["autohete-calibration 1"]
    trace: str
    date: str
    gpu: str
    steps: int
    measured_seconds: float
    predicted_seconds: float | None
    calibrated_seconds: float | None
    figures: tuple[MeasuredFigure, ...]
    parts: tuple[PartDifference, ...]
    explanations: tuple[str, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CalibratedFiles:
    """What files are written from: the document of the whole hardware, and the profile of the workload if there is one."""

    document: Mapping[str, Any]
    profile: Profile | None


def calibrate(
    phased: Phased, site: Site, workload: Workload | None = None, policy: Policy | None = None, name: str = "calibrated"
) -> tuple[Calibration, CalibratedFiles]:
    """Calibrate the hardware of ``site`` with a recording, and predict the recorded training before and after.

    Args:
        phased: the recording.
        site: the hardware that is calibrated.
        workload, policy: what was trained, and how; None: only figures of the hardware.
        name: of the calibrated hardware.

    Raises:
        InputError: the workload cannot be simulated on the hardware, or no hardware can have the figures of the recording.
        InfeasibleError: the policy finds no plan for it.
    """
    recorded, remarks, base = phased.recorded, list(phased.remarks), site.hardware()
    kernels = Kernels.EAGER_FLASH if workload is None else workload.kernels
    figures = [figure for figure in hardware_figures(phased, base, kernels) if figure.key not in site.given]
    if recorded.memory_bytes and abs(recorded.memory_bytes / base.gpu.memory_bytes - 1) > _ANOTHER_GPU:
        sizes = format_bytes(recorded.memory_bytes), format_bytes(base.gpu.memory_bytes)
        remarks.append(
            f"the GPU of the trace ({recorded.gpu}) has {sizes[0]}, that of {base.name} {sizes[1]}: name the hardware "
            "of the trace with --hardware, because all figures that are not measured are taken from it"
        )
    if recorded.gpus != site.gpus:
        remarks.append(f"{recorded.gpus} processes trained together, but --gpus is {site.gpus}: give --gpus {recorded.gpus}")
    measured, before, after, profile = figures, None, None, None
    document = calibrated_document(site, figures, recorded, name)
    if workload is not None and policy is not None:
        before, factors = simulate_policy(analytic_profile(workload, base), policy), PassFactors()
        updates = [(base.cpu.update_bandwidth, predicted_parts(before)[Phase.CPU_UPDATE])]
        for _ in range(_ROUNDS):
            measured = figures + cpu_update_figure(phased, updates, base.gpus_of_node)
            document = calibrated_document(site, measured, recorded, name)
            hardware = calibrated_hardware(document, site)
            profile = scaled_profile(analytic_profile(workload, hardware), factors)
            after = simulate_policy(profile, policy)
            updates.append((hardware.cpu.update_bandwidth, predicted_parts(after)[Phase.CPU_UPDATE]))
            if (more := pass_factors(phased, after)) is None:
                remarks.append("forward and backward could not be told apart, so that their times are not calibrated")
                break
            factors *= more
    rows = differences(phased, *(None if one is None else predicted_parts(one) for one in (before, after)))
    found = Calibration(
        format="autohete-calibration 1",
        trace=recorded.name,
        date=recorded.date,
        gpu=recorded.gpu,
        steps=len(phased.steps),
        measured_seconds=phased.seconds,
        predicted_seconds=None if before is None else before.iteration_seconds,
        calibrated_seconds=None if after is None else after.iteration_seconds,
        figures=tuple(measured),
        parts=tuple(rows),
        explanations=() if before is None else tuple(explanations(rows, phased, before, measured)),
        remarks=tuple(remarks),
    )
    return found, CalibratedFiles(document, profile)
