"""How a training calls its loss function."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from autohete.runtime.autocast import Autocast
from autohete.runtime.batch import ITEMS
from autohete.runtime.losses import mean_token_loss, next_token_loss
from autohete.runtime.model_state import Snapshot

if TYPE_CHECKING:
    from autohete.runtime.batch import Batch, Loss


class LossCall:
    """A loss function as a training calls it.

    Args:
        function: takes logits and targets, and perhaps more by name: ``num_items_in_batch``, the number of targets in the whole
            batch that are not ignored, or whatever a batch has by that name.
        autocast: type in which forward and loss compute under ``torch.autocast``; None: without.

    Attributes:
        function, autocast: as given.
        names: what it takes from a batch.
        adds_up: whether it takes ``num_items_in_batch``. The losses of micro-batches are then added up, not averaged.
        per_position: whether it needs a target for each position of the inputs.
    """

    def __init__(self, function: Loss, autocast: torch.dtype | None = None) -> None:
        self.function, self.autocast, self.per_position = function, autocast, function in (next_token_loss, mean_token_loss)
        names = _more_arguments(function)
        self.adds_up = ITEMS in names
        self.names = tuple(name for name in names if name != ITEMS)

    def __call__(self, logits: Tensor, batch: Batch, device: torch.device) -> Tensor:
        """Return the loss of ``batch``, whose tensors are copied to ``device``: they belong to the caller."""
        targets, more = batch.of_loss(device)
        with Autocast.to(self.autocast, device).entered():
            return self.function(logits, targets, **more, **({ITEMS: batch.items} if self.adds_up else {}))

    def state(self, model: nn.Module) -> Snapshot:
        """Copies of the buffers and attributes of the function's modules, if it has any that are not the model's."""
        function = self.function
        while isinstance(function, partial):
            function = function.func
        owner = getattr(function, "__self__", function)
        if not isinstance(owner, nn.Module):
            return Snapshot(())
        own = set(model.modules())
        return Snapshot((name, module) for name, module in owner.named_modules() if module not in own)


def _more_arguments(function: Loss) -> list[str]:
    """Names of the arguments after logits and targets."""
    try:
        found = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters.values()
    except (TypeError, ValueError):  # a built-in function
        return []
    kinds = inspect.Parameter
    positional = [p.name for p in found if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    return [*positional[2:], *(p.name for p in found if p.kind is kinds.KEYWORD_ONLY)]
