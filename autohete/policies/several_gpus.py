"""What several GPUs shard in published systems."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autohete.errors import InputError
from autohete.plan import UnitPlan
from autohete.profile import Profile


def shared(units: Iterable[UnitPlan], zero_stage: int, profile: Profile) -> tuple[UnitPlan, ...]:
    """Return ``units`` at a ZeRO stage. Parameters of a tied embedding, which the head also uses, are replicated on each GPU.

    Args:
        units: embedding first.
        zero_stage: 0 to 3.
        profile: says whether embeddings are tied.
    """
    units = tuple(units)
    different = {id(unit): unit for unit in units}  # mostly few
    made = {number: replace(unit, zero_stage=zero_stage) for number, unit in different.items()}
    first, *others = (made[id(unit)] for unit in units)
    if profile.workload.tied_embeddings:
        first = replace(first, zero_stage=min(zero_stage, 2))
    return (first, *others)


def check_one_gpu(policy: str, profile: Profile) -> None:
    """Refuse several GPUs.

    Raises:
        InputError: the profile has several GPUs.
    """
    if profile.hardware.gpus > 1:
        raise InputError(
            f"{policy} plans for one GPU, not for {profile.hardware.gpus}: leave out --gpus, or choose a policy that shares a "
            "model, such as zero_offload, fsdp2_offload or resident:zero_stage=3"
        )
