"""What it takes to dequantise a matrix in GPTQ's format by operations of PyTorch, and to multiply by it, counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.counting import counting
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.profile import analytic_profile
from autohete.profile.adapters import _GPTQ_BYTES, _GPTQ_HELD, _GPTQ_KERNELS
from autohete.tracing.on_cuda import PRODUCTS
from autohete.workload import Kernels
from autohete.workload.config import read_model
from autohete.workload.training import GPTQ_BYTES, Lora, Training

ROWS, COLUMNS, GROUP, PACKED = 4096, 11008, 128, 8
SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32, device="meta")


def unpacked(packed: Tensor, dim: int, shifts: Tensor) -> Tensor:
    """Eight numbers of 4 bits from each of 32."""
    shape = [-1] * packed.dim()
    spread = packed.unsqueeze(dim).expand(*shape[:dim], PACKED, *shape[dim:])
    narrow = torch.bitwise_right_shift(spread, shifts).to(torch.int8)
    return torch.bitwise_and(narrow, 15, out=narrow)


def dequantised(weights: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """A matrix of ``ROWS x COLUMNS`` in fp16."""
    zero = (unpacked(zeros, 2, SHIFTS) + 1).reshape(-1, 1, COLUMNS)
    weight = unpacked(weights, 1, SHIFTS.unsqueeze(-1)).reshape(-1, GROUP, COLUMNS)
    return (scales.reshape(-1, 1, COLUMNS) * (weight - zero)).reshape(ROWS, COLUMNS)


def test_dequantising_takes_what_is_counted() -> None:
    """Kernels, bytes and temporaries; and the product keeps the matrix for backward."""
    weights = torch.empty(ROWS // PACKED, COLUMNS, dtype=torch.int32, device="meta")
    zeros = torch.empty(ROWS // GROUP, COLUMNS // PACKED, dtype=torch.int32, device="meta")
    scales = torch.empty(ROWS // GROUP, COLUMNS, dtype=torch.float16, device="meta")
    with counting() as counter:
        made = dequantised(weights, zeros, scales)
    count = ROWS * COLUMNS
    touched = sum(n * size for n, size in counter.tensors(backward=False))
    assert counter.kernels(backward=False) == _GPTQ_KERNELS
    assert touched / count == pytest.approx(_GPTQ_BYTES + 2, rel=0.02)
    assert counter.peak_bytes / count == pytest.approx(_GPTQ_HELD, rel=0.02)
    kept = []
    with saved_tensors_hooks(lambda one: kept.append(one.numel()), lambda one: one), counting() as counter:
        torch.empty(8, ROWS, dtype=torch.float16, device="meta", requires_grad=True) @ made
    assert kept == [count]
    assert {call.name for call in counter.calls} <= PRODUCTS


def test_a_base_in_gptq_keeps_its_dequantised_weights() -> None:
    """Forward takes longer than with NF4, backward does not, and a block keeps 2 bytes a weight; its base takes 4.16 bits."""
    plain = replace(read_model("llama-3.1-8b"), kernels=Kernels.EAGER_FLASH, batch_size=1, sequence_length=2048)
    nf4, gptq = (
        replace(plain, training=Training(Lora(16, quantised=True, prepared=False, gptq=gptq))) for gptq in (False, True)
    )
    before, after = (analytic_profile(one, load_hardware("a100-40gb-epyc7713")).units[1] for one in (nf4, gptq))
    count = gptq.quantised_parameters(1)
    assert after.activation_bytes - before.activation_bytes == 2 * count
    assert after.forward_seconds > before.forward_seconds
    assert after.backward_seconds < before.backward_seconds
    assert after.frozen_bytes == pytest.approx(count * float(GPTQ_BYTES), rel=0.01)


def test_gptq_is_a_way_to_quantise() -> None:
    with pytest.raises(InputError, match=r"gptq .* give quantised"):
        Lora(8, gptq=True)
