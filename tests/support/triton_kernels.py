"""Stand-ins for Triton kernels of Liger Kernel and Unsloth, which need a GPU: they read, write and keep the same tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.counting import as_one_kernel


class RmsNorm(torch.autograd.Function):
    """One kernel each way, and the sum for the weights; keeps its input, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out, deviations = as_one_kernel(
            "rms_norm", lambda: (torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)), x
        )
        ctx.save_for_backward(x, weight, deviations)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        as_one_kernel("rms_norm", lambda: (), gradient, x, gradient)
        return gradient, as_one_kernel("sum", lambda: (torch.empty_like(weight),), weight)[0]


class Rotation(torch.autograd.Function):
    """Rotates in place, each way: queries and keys together, or each by itself."""

    @staticmethod
    def forward(ctx: Any, *some: Tensor) -> tuple[Tensor, ...]:
        return _rotated(*some)

    @staticmethod
    def backward(ctx: Any, *some: Tensor) -> tuple[Tensor, ...]:
        return _rotated(*some)


class SiluProduct(torch.autograd.Function):
    """One kernel each way; keeps both halves, in whose place backward writes their gradients."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return as_one_kernel("silu_mul", lambda: (torch.empty_like(gate),), gate, up)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        as_one_kernel("silu_mul", lambda: (), gradient, gate, up, gate, up)
        return gate, up


def _rotated(*some: Tensor) -> tuple[Tensor, ...]:
    physical = [one.transpose(1, 2).contiguous() for one in some]
    as_one_kernel("rope", lambda: (), *physical, *physical)
    return tuple(one.transpose(1, 2) for one in physical)


def patch(modeling: Any, name: str, liger: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have blocks of ``transformers`` call them, as ``apply_liger_kernel_to_llama`` does for Llama, or as fms-acceleration."""

    def norm(self: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = RmsNorm.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return found

    def rotation(q: Tensor, k: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
        pairs = [(q, k)] if liger else [(q,), (k,)]
        return tuple(one for pair in pairs for one in Rotation.apply(*pair))  # type: ignore[no-untyped-call]

    def mlp(self: Any, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(SiluProduct.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-untyped-call]
        return found

    monkeypatch.setattr(getattr(modeling, f"{name}RMSNorm"), "forward", norm)
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", rotation)
    if liger:
        monkeypatch.setattr(getattr(modeling, f"{name}MLP"), "forward", mlp)
