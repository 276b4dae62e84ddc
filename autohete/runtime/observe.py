"""Observes a model with its first batch: determines its partition, and the form of all batches."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from autohete.errors import InputError
from autohete.runtime.batch import Batch, Form, check_classes
from autohete.runtime.ledger import WORKSPACE, Ledger, accounting
from autohete.runtime.loss_call import LossCall
from autohete.runtime.losses import next_token_loss
from autohete.runtime.model_state import Effects
from autohete.runtime.partition import Partition
from autohete.runtime.probe import probe

#: Largest relative difference between a model's own loss and the cross-entropy of its logits, in fp32 and in 16-bit types. A
#: loss with a small additional term, such as label smoothing, must not pass for the cross-entropy.
_ROUNDING, _NARROW_ROUNDING = 1e-5, 1e-2


class _Unscaled(threading.local):
    """Whether the calling thread may scale no loss."""

    here = False


_unscaled_loss, _patching = _Unscaled(), threading.Lock()
_patches = 0


@contextmanager
def _unscaled() -> Iterator[None]:
    """Let the calling thread scale no loss: nothing would divide the gradients by the scale again."""
    global _patches
    with _patching:
        _patches += 1
        if _patches == 1:
            _patch()
    _unscaled_loss.here = True
    try:
        yield
    finally:
        _unscaled_loss.here = False
        with _patching:
            _patches -= 1
            if not _patches:
                torch.amp.GradScaler.scale = _SCALE  # type: ignore[method-assign]


_SCALE = torch.amp.GradScaler.scale


def _patch() -> None:
    @wraps(_SCALE)
    def refuse(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if _unscaled_loss.here and scaler.is_enabled():
            raise InputError(
                "the loss calls GradScaler.scale, but the Trainer applies the updates, and would apply them with scaled "
                "gradients: return the loss as it is, and give the Trainer grad_scaler=..."
            )
        return _SCALE(scaler, outputs)

    torch.amp.GradScaler.scale = refuse  # type: ignore[assignment, method-assign]


def observed(partition: Partition, first: Batch, loss: LossCall, micro_batches: int = 1) -> tuple[Partition, Form]:
    """Return the partition as observed in a forward of ``first``, and the form of all batches.

    The forward is of the first sequence. A loss of the caller's gets its logits as often as a micro-batch has sequences: it may
    use other tensors of that size.

    Raises:
        InputError: training is not possible with this batch, model or loss; nothing has been changed.
    """

    kept, state = Ledger("loss"), loss.state(partition.model)

    def of_first(logits: Tensor) -> Tensor:
        state.restore()
        part = first.split(micro_batches, equal=not loss.adds_up)[0]
        if loss.per_position:
            check_classes(first.targets, logits.shape[-1])
            part = first.part(slice(1))
        with accounting(kept, "", WORKSPACE), _unscaled():
            return loss(logits.repeat(len(part.targets), *[1] * (logits.dim() - 1)), part, logits.device)

    try:
        found = probe(partition, first.with_labels(partition.model), of_first, loss.autocast)
        kept_bytes = kept.used_bytes  # before what its modules keep is dropped
    finally:
        state.restore()
    if found.own_loss is not None:
        shifted = next_token_loss(found.logits, first.targets[:1].to(found.logits.device)).item()
        own, rounding = found.own_loss.item(), _ROUNDING if found.own_loss.dtype.itemsize > 2 else _NARROW_ROUNDING
        if not math.isclose(shifted, own, rel_tol=rounding) and math.isfinite(own):
            raise InputError(
                f"the model's own loss of the first labels is {own}, but the cross-entropy of its logits against "
                f"them is {shifted}: it uses labels in another way; give targets (batch, sequence), and a loss of logits "
                "and targets"
            )
    classes = found.logits.shape[-1] if loss.per_position else None
    effects = found.effects | Effects(kept_bytes=kept_bytes, loss_keeps=kept_bytes > 0)
    return partition.ordered(found.order).using(found.used, effects, found.places), Form(first, found.rows, classes)
