"""How a schedule trains a model: what a step computes, and how the tasks are executed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from autohete.errors import InputError, check_fields, check_whole
from autohete.execution.trace import Clock
from autohete.runtime.batch import Loss
from autohete.runtime.device import Device, device_for
from autohete.runtime.ledger import Counting
from autohete.runtime.loss_call import LossCall
from autohete.runtime.losses import next_token_loss
from autohete.runtime.update_rules import UpdateSettings


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a training step computes.

    Args:
        loss: function of logits and targets.
        updates: what the updates compute.
        clip_norm: the maximum global norm of the gradients, if the schedule clips them, as in
            ``torch.nn.utils.clip_grad_norm_`` over all trained parameters.
        skip_nonfinite: skip iterations with non-finite gradients, if the schedule allows it; otherwise they raise
            :class:`~autohete.errors.NonFiniteGradientError`.
        autocast: type in which forward and loss compute under ``torch.autocast``; None: without.
    """

    loss: Loss = next_token_loss
    updates: UpdateSettings = field(default_factory=UpdateSettings)
    clip_norm: float | None = None
    skip_nonfinite: bool = False
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def loss_call(self) -> LossCall:
        """The loss as a training calls it."""
        return LossCall(self.loss, self.autocast)


@dataclass(frozen=True, slots=True)
class Execution:
    """How a schedule is executed.

    Args:
        accelerator: the device of the passes; the CPU stands in for it if there is no GPU.
        paced: make every task last as long as in the schedule; otherwise tasks run as fast as the device allows.
        budget: enforce the memories' capacities; otherwise they are ignored.
        counting: how device memory is counted.
        threads: number of torch threads in a lane, by its name; one in every other lane.
        history: minimum number of iterations whose times are kept; None: all.
        folder: of the file with what rests in another place than the device and the host; None: ``TMPDIR``.
    """

    accelerator: Device = field(default_factory=lambda: device_for(torch.device("cpu")))
    paced: bool = False
    budget: bool = True
    counting: Counting = Counting.EXACT
    threads: Mapping[str, int] = field(default_factory=dict)
    history: int | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name, number in self.threads.items():
            check_whole(f"threads of lane {name}", number, 1)
        if self.history is not None:
            check_whole("history", self.history, 1)
        if self.paced and self.accelerator.runs_ahead:
            raise InputError("a device that runs ahead cannot be paced: run without paced, or on the emulated device")

    @property
    def clock(self) -> Clock:
        """Clock of its traces."""
        return Clock.EMULATED if self.paced else self.accelerator.clock
