"""On a GPU: training is exact there, too, and takes the memory that is predicted."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch

from autohete.runtime.device import CudaDevice
from autohete.workload import Precision, Workload
from experiments import gpu_check
from experiments.fidelity import with_budget

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic mode needs it before cuBLAS begins

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("default"),  # drivers and libraries may warn of what is not ours
]
#: Large enough that what cuBLAS keeps for itself, up to 100 MiB, is little.
LARGE = Workload("large", 1536, 10, 12, vocabulary_size=4096, sequence_length=512, batch_size=8)


@pytest.mark.parametrize("policy", ["resident:checkpointing=full", "stronghold:window=1", "autohete"])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_training_on_a_gpu_is_exact(policy: str, precision: Precision) -> None:
    """Losses and parameters are those of a plain loop on the GPU whose AdamW runs where the policy runs it, bit for bit."""
    found = gpu_check.exact(policy, gpu_check.small_profile(replace(gpu_check.SMALL, precision=precision)))
    assert found.identical_updates_alike
    assert found.identical or found.cpu_blocks


@pytest.mark.parametrize("policy", ["stronghold:window=1", "zero_offload", "autohete"])
def test_delays_of_streams_never_change_the_bits(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that pause before and after their tasks change the order of what is free to vary, and no bit of the result."""
    record, draws = CudaDevice.record, random.Random(0)

    def late(device: CudaDevice) -> torch.cuda.Event:
        torch.cuda._sleep(draws.choice((0, 3_000_000)))  # type: ignore[no-untyped-call]  # clock cycles
        return record(device)

    monkeypatch.setattr(CudaDevice, "record", late)
    assert gpu_check.exact(policy, gpu_check.small_profile(gpu_check.SMALL)).identical_updates_alike


@pytest.mark.parametrize("policy", ["resident", "stronghold:window=2", "autohete"])
def test_the_peak_on_a_gpu_is_as_predicted(policy: str) -> None:
    """The most that PyTorch has allocated on the GPU is within a tenth of what was predicted."""
    profile = gpu_check.machine_profile(LARGE)
    percent = 50 if policy == "autohete" else 120
    row = gpu_check.Run(policy, percent, 0)
    found = gpu_check.run_within(row, with_budget(profile, percent / 100), {})
    assert found.failure == ""
    assert found.clock == "measured-cuda"
    assert found.peak_error_percent == pytest.approx(0, abs=10)
