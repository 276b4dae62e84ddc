"""A model whose gradients are not finite in some batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autohete.train.gpt import GPT
from autohete.workload import Workload
from support.reference import model_for

#: The first token of a batch whose backward explodes.
BAD_TOKEN = 7


class _Exploding(torch.autograd.Function):
    """Hands its input on; the gradient of it is infinite if it is to explode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, explodes: bool) -> Tensor:
        ctx.explodes = explodes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * (math.inf if ctx.explodes else 1.0), None


class _ExplodingBlock(nn.Module):
    """A block whose own gradients are not finite in the backward of a bad batch, though its output is."""

    def __init__(self, inner: nn.Module, explodes: Callable[[], bool]) -> None:
        super().__init__()
        self.inner, self._explodes = inner, explodes

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Exploding.apply(self.inner(x), self._explodes())  # type: ignore[no-untyped-call]
        return result


class ExplodingGPT(nn.Module):
    """The reference GPT with one such block, which explodes if the first token of a batch is ``BAD_TOKEN``.

    Args:
        workload: the sizes of the GPT.
        bad_block: the block, counted from 1.
    """

    def __init__(self, workload: Workload, bad_block: int) -> None:
        super().__init__()
        self.gpt: GPT = model_for(workload)
        self._bad = False
        blocks: list[nn.Module] = list(self.gpt.blocks)
        blocks[bad_block - 1] = _ExplodingBlock(blocks[bad_block - 1], lambda: self._bad)
        self.gpt.blocks = nn.ModuleList(_Alike(block) for block in blocks)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (batch, sequence) to logits."""
        self._bad = int(ids[0, 0]) == BAD_TOKEN
        logits: Tensor = self.gpt(ids)
        return logits


class _Alike(nn.Module):
    """Makes modules of one type, as a block list has them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result
