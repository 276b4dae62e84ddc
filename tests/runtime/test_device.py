"""The devices behind one interface, without a GPU."""

from __future__ import annotations

import time
from unittest.mock import Mock, patch

import pytest
import torch

from autohete import Trainer
from autohete.hardware import load_hardware
from autohete.runtime.device import AllocatorMemory, CudaDevice, EmulatedDevice, device_for
from autohete.train.gpt import GPT
from autohete.workload import Workload


def event(at_ms: float, measured: list[float] | None = None) -> Mock:
    """A CUDA event that the GPU reaches at a time (ms); what is measured from it is added to ``measured``."""

    def elapsed_time(other: Mock) -> float:
        since = float(other.at_ms) - at_ms
        if measured is not None:
            measured.append(since)
        return since

    made = Mock(spec=torch.cuda.Event, at_ms=at_ms)
    made.elapsed_time.side_effect = elapsed_time
    return made


def test_times_on_a_gpu_are_those_of_the_host() -> None:
    """An event's time is the host's time of a first event, plus what the GPU measures between them, before it or after it."""
    device = CudaDevice(torch.device("cuda", 0))
    with patch.object(device, "record", return_value=event(100.0)), patch.object(time, "perf_counter_ns", return_value=10**9):
        assert device.ended_ns(event(102.5)) == 10**9 + 2_500_000
    assert device.ended_ns(event(99.0)) == 10**9 - 1_000_000


def test_times_on_a_gpu_stay_precise() -> None:
    """PyTorch measures in 32 bits, which after a day are 8 ms; so times are measured from an event of the last second."""
    device, measured = CudaDevice(torch.device("cuda", 0)), list[float]()
    events = [event(900.0 * number, measured) for number in range(10)]
    with patch.object(device, "record", return_value=events[0]):
        times = [device.ended_ns(one) for one in events]
    assert [round((at - times[0]) * 1e-6) for at in times] == [900 * number for number in range(10)]
    assert max(measured) < 2000


def test_each_name_of_pytorch_is_one_device() -> None:
    """The CPU is the emulated device; a GPU is the same object each time, with the times that it has measured."""
    gpu = torch.device("cuda", 0)
    assert isinstance(device_for(torch.device("cpu")), EmulatedDevice)
    assert isinstance(device_for(gpu), CudaDevice)
    assert device_for(gpu) is device_for(torch.device("cuda", 0))
    assert isinstance(device_for(gpu).memory(), AllocatorMemory)


@pytest.mark.parametrize(("before", "expected"), [(1.0, 0.5), (0.25, 0.25)])
def test_a_limit_of_the_user_holds(before: float, expected: float) -> None:
    """The budget never allows more than a limit that is set already, and that limit is there again afterwards, error or not."""
    memory, fractions = AllocatorMemory(torch.device("cuda", 0), 0), list[float]()
    properties = Mock(total_memory=2 * (64 + 34) * 2**20)  # of which fragments and cuBLAS alone may take a half
    with (
        patch.object(torch.cuda, "empty_cache"),
        patch.object(torch.cuda, "get_device_properties", return_value=properties),
        patch.object(torch.cuda, "get_per_process_memory_fraction", return_value=before),
        patch.object(torch.cuda, "set_per_process_memory_fraction", side_effect=lambda share, device: fractions.append(share)),
        pytest.raises(ZeroDivisionError),
        memory.limited(0),
    ):
        raise ZeroDivisionError
    assert fractions == [expected, before]


def test_the_workspaces_of_a_training_are_given_back() -> None:
    """When a training has ended, what cuBLAS holds for its streams is freed, once the GPU has done all work."""
    calls = Mock()
    with (
        patch.object(torch.cuda, "synchronize", calls.synchronize),
        patch.object(torch._C, "_cuda_clearCublasWorkspaces", calls.clear, create=True),
    ):
        CudaDevice(torch.device("cuda", 0)).leave()
    assert [name for name, *_ in calls.mock_calls] == ["synchronize", "clear"]
    workload, ids = Workload("small", 16, 1, 2, vocabulary_size=16, sequence_length=4), torch.zeros(2, 4, dtype=torch.int64)
    with patch.object(EmulatedDevice, "leave") as leave:
        with Trainer(GPT(workload), policy="resident", hardware=load_hardware("v100-32gb-dgx2")) as trainer:
            trainer.step((ids, ids))
            leave.reset_mock()  # from measuring
        leave.assert_called_once()
