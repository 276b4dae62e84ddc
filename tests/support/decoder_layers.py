"""Layers of decoders as their models call them, and the workloads that describe them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from autohete.workload import Kernels, Precision, Workload
from autohete.workload.config import parse_model
from support.models import NO_FLASH, WIDE, small_config

BATCH, SEQUENCE = 4, 192


class Layer(nn.Module):
    """A decoder layer with the positions that its model would give it."""

    def __init__(self, layer: nn.Module, rotary: int | None) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        given: dict[str, Any] = {"attention_mask": self.mask}
        if self.rotary is not None:
            angles = x.new_empty(1, x.shape[1], self.rotary)  # which all blocks share
            given["position_embeddings"] = (angles, angles)
        out = self.layer(x, **given)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found


def wide(family: str, precision: Precision) -> Workload:
    """A model of that family as :class:`Layer` is called."""
    kernels = Kernels.EAGER if family in NO_FLASH else Kernels.EAGER_FLASH
    workload = parse_model(small_config(family, WIDE), family)
    return replace(workload, sequence_length=SEQUENCE, batch_size=BATCH, precision=precision, kernels=kernels)
