"""Foreach kernels of torch's AdamW against ``Training.foreach``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.counting import counting

from autohete.hardware import load_hardware
from autohete.profile import analytic_profile
from autohete.workload import Precision, named_workload
from autohete.workload.optimizers import Optimizer
from autohete.workload.training import Training


@pytest.mark.parametrize(
    ("precision", "optimizer", "dtype"),
    [(Precision.FP32, Optimizer.ADAMW, torch.float32), (Precision.BF16, Optimizer.ADAMW_PURE_BF16, torch.bfloat16)],
)
def test_foreach_kernels_read_write_and_hold_what_torch_does(
    precision: Precision, optimizer: Optimizer, dtype: torch.dtype
) -> None:
    """The list that a step holds and the numbers that it reads and writes are those of ``torch.optim.AdamW(foreach=True)``."""
    parameters = [torch.nn.Parameter(torch.randn(1000, 500, dtype=dtype)) for _ in range(4)]
    adamw = torch.optim.AdamW(parameters, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    adamw.step()  # makes the states
    with counting() as counter:
        adamw.step()
    count = sum(parameter.numel() for parameter in parameters)
    calls = [call for call in counter.calls if call.name.startswith("_foreach") and sum(n for n, _ in call.touched) >= count]
    numbers = sum(n for call in calls for n, _ in call.touched) + count * sum(call.name.endswith("_") for call in calls)

    fused = named_workload("gpt-2b", precision=precision, training=Training(optimizer=optimizer))
    listed = replace(fused, training=replace(fused.training, foreach=True))
    assert counter.peak_bytes == count * listed.foreach_bytes
    hardware = load_hardware("a100-40gb-epyc7713")
    units = [analytic_profile(each, hardware).units[1] for each in (fused, listed)]
    more = (
        (units[1].gpu_update_seconds - units[0].gpu_update_seconds)
        * hardware.gpu.memory_bandwidth
        * hardware.gpu.memory_efficiency
    )
    assert numbers / count - 7 == pytest.approx(more / units[0].parameters / precision.element_bytes)
