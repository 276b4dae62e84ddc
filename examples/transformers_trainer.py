"""The loop of Hugging Face's ``transformers.Trainer``, within a memory budget. Losses and weights are those of the plain loop.

    args = transformers.TrainingArguments("out", use_cpu=True)
    trainer = BudgetTrainer(model, args, train_dataset=data, budget={"gpu_memory": "16GiB"})
    trainer.train()

Schedulers, callbacks, logging, evaluation, checkpoints and ``resume_from_checkpoint`` work as usual. A batch of
``gradient_accumulation_steps`` small ones is loaded at once, and computed in as many parts: use ``dataloader_drop_last=True``.
AutoHete plans memory for the first batch: pad all to one length. ``torch_compile=True`` is refused.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import transformers

import autohete
from autohete.errors import InputError
from autohete.runtime.losses import mean_token_loss, next_token_loss


class BudgetTrainer(transformers.Trainer):
    """A ``transformers.Trainer`` whose steps are those of an :class:`autohete.Trainer`.

    Args:
        model, args, kwargs: those of ``transformers.Trainer``.
        budget: keywords of :class:`autohete.Trainer`, such as ``gpu_memory``.
    """

    def __init__(self, model: Any, args: transformers.TrainingArguments, *, budget: dict[str, Any], **kwargs: Any) -> None:
        args = copy.copy(args)
        parts, args.gradient_accumulation_steps = args.gradient_accumulation_steps, 1
        args.per_device_train_batch_size *= parts
        super().__init__(model, args, **kwargs)
        own_loss = type(self).compute_loss is not transformers.Trainer.compute_loss
        if own_loss or self.label_smoother is not None or self.compute_loss_func is not None:
            raise InputError(
                "label_smoothing_factor, compute_loss_func and another compute_loss would be ignored: give "
                "budget={'loss': function}"
            )
        loss = mean_token_loss if self.model_accepts_loss_kwargs else next_token_loss
        clip_norm = args.max_grad_norm or None
        self.budget = {"loss": loss, "clip_norm": clip_norm, "micro_batches": parts, "master_weights": False} | budget

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as self.until_end:  # gives the model back, also after an exception
            return super().train(*args, **kwargs)

    def _prepare_for_training(self, *args: Any) -> Any:
        model, loader = super()._prepare_for_training(*args)  # type: ignore[no-untyped-call]
        optimizer: Any = self.optimizer.optimizer  # type: ignore[union-attr]  # in accelerate's
        plain = transformers.TrainerCallback.on_pre_optimizer_step
        if any(type(one).on_pre_optimizer_step is not plain for one in self.callback_handler.callbacks):
            raise InputError("on_pre_optimizer_step of a callback would be called after the update: use on_step_begin")
        self.autohete = autohete.Trainer(model, optimizer=optimizer, **self.budget)
        self.until_end.enter_context(self.autohete)
        nothing = wraps(optimizer.step)(lambda closure=None: None)  # training_step has updated
        self.until_end.enter_context(patch.object(optimizer, "step", nothing))
        return model, loader

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        model.train()
        return torch.tensor(self.autohete.step(_counted(self._prepare_inputs(inputs), num_items_in_batch)))

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        if not prediction_loss_only or not self.is_in_train or self.autohete.prediction is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)  # the caller's call of the model
        counted = _counted(inputs, self._get_num_items_in_batch([inputs], self.args.device))
        return torch.tensor(self.autohete.evaluate([counted])), None, None

    def _clip_grad_norm(self, model: Any) -> float | None:
        return self.autohete.gradient_norm

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float | None:
        return grad_norm


def _counted(inputs: Any, items: Any) -> dict[str, Any]:
    """A batch with its number of items, if the model's loss takes it."""
    return {**inputs, **({} if items is None else {"num_items_in_batch": items})}
