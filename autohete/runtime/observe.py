"""Observes a model with its first batch: determines its partition, and the form of all batches."""

from __future__ import annotations

import math

from torch import Tensor

from autohete.errors import InputError
from autohete.runtime.batch import Batch, Form, Loss, check_classes
from autohete.runtime.losses import next_token_loss
from autohete.runtime.partition import Partition
from autohete.runtime.probe import probe


def observed(partition: Partition, first: Batch, loss: Loss, micro_batches: int = 1) -> tuple[Partition, Form]:
    """Return the partition as observed in a forward of ``first``, and the form of all batches.

    The forward is of the first sequence. A loss of the caller's gets its logits as often as a micro-batch has sequences: it may
    use other tensors of that size.

    Raises:
        InputError: training is not possible with this batch, model or loss; nothing has been changed.
    """

    def of_first(logits: Tensor) -> Tensor:
        sequences = len(first.targets) // micro_batches
        if loss is next_token_loss:
            check_classes(first.targets, logits.shape[-1])
            sequences = 1
        targets = first.targets[:sequences].to(logits.device)
        return loss(logits.repeat(len(targets), *[1] * (logits.dim() - 1)), targets)

    found = probe(partition, first.with_labels(partition.model), of_first)
    if found.own_loss is not None:
        shifted = next_token_loss(found.logits, first.targets[:1].to(found.logits.device)).item()
        if not math.isclose(shifted, found.own_loss, rel_tol=1e-2) and math.isfinite(found.own_loss):
            raise InputError(
                f"the model's own loss of the first labels is {found.own_loss}, but the cross-entropy of its logits against "
                f"them is {shifted}: it uses labels in another way; give targets (batch, sequence), and a loss of logits "
                "and targets"
            )
    classes = found.logits.shape[-1] if loss is next_token_loss else None
    return partition.using(found.before, found.after, found.effects), Form(first, found.rows, classes)
