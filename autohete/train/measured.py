"""Measures this machine and a model on it, each apart from the calling thread, so that an interrupt does no harm."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from autohete.hardware import Hardware, HardwareFile
from autohete.profile import Profile
from autohete.runtime.batch import Batch
from autohete.runtime.claims import Claim
from autohete.runtime.loss_call import LossCall
from autohete.runtime.losses import next_token_loss
from autohete.runtime.observe import observed
from autohete.runtime.partition import partition
from autohete.train.arguments import bytes_of, device_of
from autohete.train.machine import cpu_threads, measure_machine, usable_bytes
from autohete.train.measure import measure, workload_of
from autohete.train.worker import apart


@apart
def measured_machine(device: str = "emulated", gpu_memory: int | str | None = None, *, quick: bool = False) -> dict[str, Any]:
    """Measure this machine; return the document of a hardware file. ``quick``: in a few seconds."""
    where = device_of(device)
    with cpu_threads(where, 1):
        return measure_machine(where, bytes_of(gpu_memory) or usable_bytes(where), quick=quick)


def measured_hardware(device: str = "emulated", gpu_memory: int | str | None = None) -> Hardware:
    """Measure this machine, in a few seconds."""
    return hardware_of(measured_machine(device, gpu_memory, quick=True))


def hardware_of(document: dict[str, Any]) -> Hardware:
    """Return the hardware that the document of a hardware file describes."""
    return HardwareFile.model_validate_json(json.dumps(document)).hardware()


@apart
def measured_profile(
    machine: dict[str, Any],
    model: nn.Module,
    batch: object,
    device: str = "emulated",
    name: str = "model",
    *,
    blocks: str | None = None,
) -> tuple[Profile, dict[str, Any]]:
    """Measure the blocks of ``model`` for batches like ``batch``, on a machine that :func:`measured_machine` has measured.

    Returns:
        The profile, and the document of the machine, in which the links' latency includes the handover of a task. With date,
        machine and versions these are the arguments of :func:`autohete.profile.profile_file.write_profile`.
    """
    profile = measured_profile_on(hardware_of(machine), model, batch, device, name, blocks=blocks)
    links = {}
    for direction, link in (("h2d", profile.hardware.h2d), ("d2h", profile.hardware.d2h)):
        latency = machine["links"][direction]["latency"]
        value, source = f"{link.latency_seconds!r} s", f"{latency['source']}; plus task handover"
        links[direction] = {**machine["links"][direction], "latency": {**latency, "value": value, "source": source}}
    return profile, {**machine, "links": {**machine["links"], **links}}


@apart
def measured_profile_on(
    hardware: Hardware,
    model: nn.Module,
    batch: object,
    device: str = "emulated",
    name: str = "model",
    *,
    blocks: str | None = None,
) -> Profile:
    """Measure the blocks of ``model`` for batches like ``batch``; copies take as long as on ``hardware``."""
    where = device_of(device)
    cut, first = partition(model, blocks), Batch.of(batch, model)
    claim = Claim(model, "measured")
    try:
        with cpu_threads(where, 1):
            cut, _ = observed(cut, first, LossCall(next_token_loss))
            return measure(cut, workload_of(cut, first.inputs, name), hardware, first, torch_device=where)
    finally:
        claim.release()
