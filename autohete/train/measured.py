"""Measures this machine and a model on it, each apart from the calling thread, so that an interrupt does no harm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autohete.hardware import Hardware, HardwareFile
from autohete.profile import Profile
from autohete.runtime.batch import Batch
from autohete.runtime.claims import Claim
from autohete.runtime.device import device_for
from autohete.runtime.loss_call import LossCall
from autohete.runtime.losses import next_token_loss
from autohete.runtime.observe import observed
from autohete.runtime.partition import partition
from autohete.train.arguments import bytes_of, device_of
from autohete.train.machine import cpu_threads, measure_machine, usable_bytes
from autohete.train.measure import measure, workload_of
from autohete.train.worker import apart


def measured_machine(
    device: str = "emulated", gpu_memory: int | str | None = None, *, quick: bool = False, drive: str | None = None
) -> dict[str, Any]:
    """Measure this machine; return the document of a hardware file. ``quick``: in a few seconds. ``drive``: a folder on a
    drive, which is measured, too.
    """
    where = _prepared(device)

    @apart
    def measured() -> dict[str, Any]:
        with cpu_threads(where, 1):
            return measure_machine(where, bytes_of(gpu_memory) or usable_bytes(where), quick=quick, drive=drive)

    return measured()


def measured_hardware(device: str = "emulated", gpu_memory: int | str | None = None, *, drive: str | None = None) -> Hardware:
    """Measure this machine, in a few seconds."""
    return hardware_of(measured_machine(device, gpu_memory, quick=True, drive=drive))


def hardware_of(document: dict[str, Any]) -> Hardware:
    """Return the hardware that the document of a hardware file describes."""
    return HardwareFile.of(document).hardware()


def measured_profile(
    machine: dict[str, Any],
    model: nn.Module,
    batch: object,
    device: str = "emulated",
    name: str = "model",
    *,
    blocks: str | Sequence[str] | None = None,
) -> tuple[Profile, dict[str, Any]]:
    """Measure the blocks of ``model`` for batches like ``batch``, on a machine that :func:`measured_machine` has measured.

    Returns:
        The profile, and the document of the machine, in which the links' latency includes the handover of a task. With date,
        machine and versions these are the arguments of :func:`autohete.profile.profile_file.write_profile`.
    """
    profile = measured_profile_on(hardware_of(machine), model, batch, device, name, blocks=blocks)
    hardware = profile.hardware
    links = {
        direction: machine["links"][direction] | _with_latency(machine["links"][direction], link.latency_seconds)
        for direction, link in (("h2d", hardware.h2d), ("d2h", hardware.d2h))
    }
    places = {
        place.name: machine["places"][place.name] | _with_latency(machine["places"][place.name], place.latency_seconds)
        for place in hardware.places
    }
    return profile, {**machine, "links": {**machine["links"], **links}, **({"places": places} if places else {})}


def _with_latency(table: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The latency of a table that includes the handover of a task."""
    latency = table["latency"]
    return {"latency": {**latency, "value": f"{seconds!r} s", "source": f"{latency['source']}; plus task handover"}}


def measured_profile_on(
    hardware: Hardware,
    model: nn.Module,
    batch: object,
    device: str = "emulated",
    name: str = "model",
    *,
    blocks: str | Sequence[str] | None = None,
) -> Profile:
    """Measure the blocks of ``model`` for batches like ``batch``; copies take as long as on ``hardware``."""
    where = _prepared(device)

    @apart
    def measured() -> Profile:
        cut, first = partition(model, blocks), Batch.of(batch, model)
        claim = Claim(model, "measured")
        try:
            with cpu_threads(where, 1):
                cut, _ = observed(cut, first, LossCall(next_token_loss))
                return measure(cut, workload_of(cut, first.inputs, name), hardware, first, torch_device=where)
        finally:
            claim.release()

    return measured()


def _prepared(device: str) -> torch.device:
    """The device, and the process prepared for it before it has another thread."""
    where = device_of(device)
    device_for(where).prepare()
    return where
