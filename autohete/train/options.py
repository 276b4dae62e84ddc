"""How a Trainer trains: its keywords, checked, as one value."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, is_dataclass, replace
from enum import StrEnum
from typing import Self

import torch

from autohete.documents import as_json
from autohete.errors import InputError, check_fields, check_whole
from autohete.hardware import Hardware
from autohete.plan.policy import Policy
from autohete.profile import Profile
from autohete.runtime.device import Device, device_for
from autohete.runtime.settings import Recipe
from autohete.train.arguments import bytes_of, check_hardware, check_profile, share_of


class Mode(StrEnum):
    """Speed of the emulated device: native, as this machine, or paced, as a given hardware, to scale."""

    NATIVE = "native"
    PACED = "paced"


class NonFinite(StrEnum):
    """What to do when a loss or a gradient is NaN or infinite."""

    STOP = "stop"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Budgets of the memories; None leaves that of the hardware.

    Args:
        gpu_bytes: of the device.
        gpu_share: the same as a share of what fully resident training would need.
        host_bytes: of the host.
        pinned_bytes: of pinned host memory.
    """

    gpu_bytes: int | None
    gpu_share: float | None
    host_bytes: int | None
    pinned_bytes: int | None

    @classmethod
    def of(cls, gpu: int | str | None, host: int | str | None, pinned: int | str | None) -> Self:
        """Return the budgets that a user gives in bytes or text: ``24MiB``, and for the device ``25%``.

        Raises:
            InputError: one of them is not a size.
        """
        share = share_of(gpu)
        if share is None and isinstance(gpu, float) and 0 < gpu <= 1:
            raise InputError(f"gpu_memory is {gpu!r}: write a share as text, such as '{gpu:.0%}'")
        return cls(None if share is not None else bytes_of(gpu), share, bytes_of(host), bytes_of(pinned))

    def applied(self, profile: Profile, resident_bytes: int, lasting_bytes: int) -> Profile:
        """Return ``profile`` on hardware with these budgets.

        Args:
            profile: its hardware has the memory that is not limited here.
            resident_bytes: device memory that fully resident training would need.
            lasting_bytes: device memory of buffers and frozen parameters, which no task moves: it is not available to tasks.
        """
        gpu, host = profile.hardware.gpu, profile.hardware.host
        budget = self.gpu_bytes if self.gpu_share is None else round(self.gpu_share * resident_bytes)
        if budget is not None:
            gpu = replace(gpu, memory_bytes=budget + gpu.reserved_bytes)
        gpu = replace(gpu, reserved_bytes=gpu.reserved_bytes + lasting_bytes)
        if self.host_bytes is not None:
            host = replace(host, memory_bytes=self.host_bytes)
        if self.pinned_bytes is not None:
            host = replace(host, pinned_bytes=self.pinned_bytes)
        return replace(profile, hardware=replace(profile.hardware, gpu=gpu, host=host))


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How a Trainer trains.

    Args:
        policy: plans.
        limits: budgets of the memories.
        recipe: what a step computes; its optimizer settings are those of the first step.
        micro_batches: number of equal parts in which each step's batch is computed.
        torch_device: the device of the passes; the CPU stands in for it if it is emulated.
        mode: speed of the emulated device.
        hardware: the hardware to plan for; None: this machine, measured.
        profile: an earlier measurement; None: the model is measured.
        refines: whether the first steps may change the plan.
        drive: a folder for what rests in a place besides the device and the host; None: ``TMPDIR``.

    Raises:
        InputError: a value has the wrong type, or values contradict each other.
    """

    policy: Policy
    limits: MemoryLimits
    recipe: Recipe
    micro_batches: int
    torch_device: torch.device
    mode: Mode
    hardware: Hardware | None
    profile: Profile | None
    refines: bool = True
    drive: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_whole("micro_batches", self.micro_batches, 1)
        check_hardware(self.hardware)
        check_profile(self.profile)
        if self.mode is Mode.PACED and self.hardware is None:
            raise InputError("a paced device needs hardware to pace to: give one, such as load_hardware('v100-32gb-dgx2')")
        if self.mode is Mode.PACED and self.on_gpu:
            raise InputError("a GPU cannot be paced: leave mode out, or choose the device 'emulated'")

    def described(self) -> dict[str, str]:
        """What all ranks of a training have in common, as text."""
        recipe = self.recipe
        return {
            "policy": repr(self.policy) if is_dataclass(self.policy) else self.policy.name,
            "memory": repr(self.limits),
            "loss": getattr(recipe.loss, "__qualname__", type(recipe.loss).__qualname__),
            "update rules": ", ".join(str(rule.optimizer) for rule in recipe.updates.rules),
            "optimizer groups": str(len(recipe.updates.groups)),
            "clip_norm": repr(recipe.clip_norm),
            "autocast": repr(recipe.autocast),
            "skips non-finite steps": repr(recipe.skip_nonfinite),
            "micro_batches": repr(self.micro_batches),
            "device": self.torch_device.type,
            "mode": repr(self.mode),
            "hardware": str(as_json(self.hardware)),
            "profile": hashlib.sha256(str(as_json(self.profile)).encode()).hexdigest(),
        }

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return not self.accelerator.on_cpu

    @property
    def accelerator(self) -> Device:
        """The device of the passes."""
        return device_for(self.torch_device)

    @property
    def may_use_threads(self) -> bool:
        """Whether passes may use all threads of the CPU; not if their times are given."""
        return not self.on_gpu and self.mode is Mode.NATIVE and self.profile is None
