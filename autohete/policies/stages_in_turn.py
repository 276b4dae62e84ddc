"""What systems decide alike that deal stages to GPUs in turn (:class:`autohete.plan.DealtStages`)."""

from __future__ import annotations

from autohete.errors import InputError
from autohete.plan import Activations, DealtStages, Processor, Route, UnitPlan, Update
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY

#: Bytes a parameter on the host in fp32: masters, two moments, and gradients.
FP32_BYTES = 16


def check_dealt(name: str, profile: Profile) -> None:
    """Refuse GPUs that divide sequences or experts.

    Args:
        name: of the policy.
        profile: specifies the GPUs.
    """
    hardware = profile.hardware
    if hardware.gpus > 1 and hardware.parallelism.neighbours > 1:
        raise InputError(
            f"{name} deals stages to all GPUs, but {hardware.parallelism.neighbours} divide sequences or experts "
            f"({hardware.parallelism}): let them share nothing"
        )


def dealt_units(dealt: DealtStages, units: int, *, ahead: int, layer_by_layer: bool = False) -> tuple[UnitPlan, ...]:
    """Units whose parameters and states rest on the host. Backward recomputes its stages from their inputs, which also do.

    Args:
        dealt: the stages.
        units: their number.
        ahead: stages of a GPU before its own in which parameters may be uploaded.
        layer_by_layer: every unit is recomputed from its own input.
    """
    fused, ends = dealt.backward[0], set(dealt.backward)

    def unit_of(unit: int) -> UnitPlan:
        activations = Activations.DROP
        if unit >= fused or unit < dealt.backward[-1]:
            activations = Activations.KEEP
        elif unit in ends or layer_by_layer:
            activations = Activations.RECOMPUTE
        rests = activations is Activations.RECOMPUTE and unit
        return UnitPlan(
            activations=activations,
            parameters=Route(HOST_MEMORY, ahead=ahead, stays_after_forward=unit >= fused, stays_for_batches=True),
            update=Update(on=Processor.CPU),
            kept=Route(HOST_MEMORY) if rests else Route(),
        )

    return tuple(map(unit_of, range(units)))


def seconds_of_units(profile: Profile) -> tuple[list[float], list[float]]:
    """GPU time of each unit's forward, and of its recomputation and backward with the loss.

    Args:
        profile: the units.
    """
    forward = [unit.forward_seconds for unit in profile.units]
    backward = [unit.forward_seconds + unit.backward_seconds for unit in profile.units]
    backward[-1] += profile.loss.seconds
    return forward, backward


def bytes_of_units(profile: Profile) -> tuple[list[int], list[int]]:
    """Each unit's parameters and gradients in bytes. A head has the matrix that it shares with the embedding as well.

    Args:
        profile: the units.
    """
    parameters = [profile.parameter_bytes(i) for i in range(len(profile.units))]
    gradients = [profile.gradient_elements(i) * profile.element_bytes for i in range(len(profile.units))]
    if profile.workload.tied_embeddings:
        parameters[-1] += parameters[0]
        gradients[-1] += gradients[0]
    return parameters, gradients
