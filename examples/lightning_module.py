"""The loop of PyTorch Lightning, within a memory budget. Losses and weights are those of the plain loop.

    class Mine(BudgetModule):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    lightning.Trainer(accelerator="cpu", gradient_clip_val=1.0).fit(Mine(model, gpu_memory="16GiB"), batches)

It is a ``LightningModule`` because the loss must be a function of logits and targets, which a strategy cannot take out of a
``training_step``. Optimization stays automatic: Lightning counts and logs steps, calls schedulers and callbacks, and saves and
resumes checkpoints. Lightning must not move the model: choose its accelerator ``cpu`` also if AutoHete's device is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

import autohete
from autohete.errors import InputError
from autohete.runtime.losses import next_token_loss


class BudgetModule(lightning.LightningModule):
    """Trains ``model`` on batches of ids and targets with the steps of an :class:`autohete.Trainer`.

    Args:
        model: maps ids to logits.
        budget: keywords of :class:`autohete.Trainer`, such as ``gpu_memory``.
    """

    def __init__(self, model: torch.nn.Module, **budget: Any) -> None:
        super().__init__()
        self.model = model
        self.budget: dict[str, Any] = {"loss": next_token_loss, "master_weights": False, **budget}
        self.until_end = ExitStack()

    def configure_callbacks(self) -> list[lightning.Callback]:
        return [_GiveBack()]

    def on_fit_start(self) -> None:
        if self.trainer.gradient_clip_algorithm not in (None, "norm"):
            raise InputError("gradients are clipped by norm only: leave gradient_clip_algorithm out")
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        owners = [(self, lightning.LightningModule), *((one, lightning.Callback) for one in callbacks)]
        for name in ("on_before_optimizer_step", "configure_gradient_clipping"):
            if any(is_overridden(name, one, kind) for one, kind in owners if hasattr(kind, name)):
                raise InputError(f"{name} would not be called before the update: leave it out, or give the budget a clip_norm")
        clip_norm = self.trainer.gradient_clip_val or None
        found: dict[str, Any] = {
            "autocast": torch.bfloat16 if self.trainer.precision == "bf16-mixed" else None,
            "clip_norm": clip_norm,
        }
        self.autohete = autohete.Trainer(self.model, optimizer=self.trainer.optimizers[0], **found, **self.budget)
        self.until_end.enter_context(self.autohete)

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.trainer.accumulate_grad_batches != 1:  # also by a callback, in a later epoch
            raise InputError("accumulate_grad_batches is not 1: give larger batches, and micro_batches=2 or more")
        loss = torch.tensor(self.autohete.step(batch), dtype=torch.float32)  # whatever the default type is
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Nothing is left to do: ``training_step`` has updated the model."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Callable[[], Any] | None = None) -> None:
        assert closure is not None
        closure()  # calls training_step, then backward

    def validation_step(self, batch: Any, index: int) -> None:
        ids, targets = batch
        self.log("val_loss", self.budget["loss"](self.model(ids), targets))


class _GiveBack(lightning.Callback):
    def on_fit_end(self, trainer: lightning.Trainer, module: Any) -> None:
        module.until_end.close()

    def on_exception(self, trainer: lightning.Trainer, module: Any, exception: BaseException) -> None:
        module.until_end.close()
