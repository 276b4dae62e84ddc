"""The loss of a language model."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of ``logits`` (batch, sequence, vocabulary) against ``targets`` (batch, sequence)."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
