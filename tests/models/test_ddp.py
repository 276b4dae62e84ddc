"""What DistributedDataParallel and autocast hold, by running them on the CPU, against ``resident:bucket_bytes``."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.policies import parse_policy
from autohete.schedule import GPU_MEMORY, Value
from autohete.simulate import simulate
from autohete.workload import Workload
from autohete.workload.training import Lora, Training

LAYERS, WIDTH = 6, 64
PARAMETERS = LAYERS * WIDTH**2


def model() -> nn.Module:
    """Layers without biases, one after another."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def allocated(run: torch.profiler.profile) -> int:
    """Bytes that were allocated and not freed while it was recorded, of what was allocated then."""
    recorded: Any = run.profiler
    return sum(event.nbytes() for event in recorded.kineto_results.events() if event.name() == "[memory]")


def rank_of_two(rank: int, folder: str, views: bool) -> None:
    """Train three iterations, and write what the second holds: it makes the final buckets, in the order of gradients."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/{views}", rank=rank, world_size=2)
    made = model()
    parallel = DistributedDataParallel(made, gradient_as_bucket_view=views, bucket_cap_mb=0.05)
    x = torch.randn(2, WIDTH)
    held = []
    for _ in range(3):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
            parallel(x).sum().backward()
        held.append(allocated(run))
        made.zero_grad(set_to_none=True)
    if rank == 0:
        Path(folder, f"{views}.held").write_text(" ".join(map(str, held)), encoding="utf-8")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("views", [False, True])
def test_buckets_exist_beside_gradients(tmp_path: Path, views: bool) -> None:
    """Without views, backward leaves buckets and gradients; with them, one of both. Buckets stay when gradients are gone."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_of_two, args=(rank, str(tmp_path), views)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    _, second, third = map(int, (tmp_path / f"{views}.held").read_text(encoding="utf-8").split())
    size = 4 * PARAMETERS
    assert second == pytest.approx(size * (1 if views else 2), rel=0.05)
    assert third == pytest.approx(0 if views else size, abs=0.05 * size)


def test_autocast_keeps_a_copy_of_each_weight() -> None:
    """Forward leaves a 16-bit copy of each fp32 weight, of 2 bytes a parameter, until backward; gradients are fp32."""
    made = model()
    saved: dict[int, torch.Tensor] = {}
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: saved.setdefault(one.data_ptr(), one), lambda one: one)
    with torch.autocast("cpu", torch.bfloat16), hooks:
        loss = made(torch.randn(2, WIDTH, requires_grad=True)).sum()
    copies = [one for one in saved.values() if one.numel() == WIDTH**2]
    assert {one.dtype for one in copies} == {torch.bfloat16}
    assert sum(one.untyped_storage().nbytes() for one in copies) == 2 * PARAMETERS
    loss.backward()
    assert {one.grad.dtype for one in made.parameters() if one.grad is not None} == {torch.float32}


def test_buckets_take_memory_and_two_copies() -> None:
    """Each trained parameter takes its bytes once more on each of several GPUs, and backward copies gradients twice."""
    workload = Workload("x", 64, 4, 4, vocabulary_size=1000, batch_size=1, sequence_length=64)
    hardware = load_hardware("a100-40gb-epyc7713")
    for gpus, per_parameter in ((4, 4), (4, 2), (1, 4)):
        node = hardware.shared_by(gpus)
        views, copied = (
            simulate(workload, node, parse_policy(f"resident:checkpointing=none,bucket_bytes={count}"))
            for count in (0, per_parameter)
        )
        more = copied.gpu.peak_bytes - views.gpu.peak_bytes
        assert more == (per_parameter * workload.parameters if gpus > 1 else 0)
        assert (copied.iteration_seconds > views.iteration_seconds) == (gpus > 1)
        buffers = [one for one in copied.schedule.resident if one.id.value is Value.POLICY_BUFFERS]
        assert [(one.id.memory, one.size_bytes) for one in buffers] == [(GPU_MEMORY, more)] * (gpus > 1)


@pytest.mark.parametrize("flags", ["bucket_bytes=3", "bucket_bytes=4,zero_stage=3", "bucket_bytes=4,fused_sums"])
def test_buckets_are_refused_where_there_are_none(flags: str) -> None:
    """Only gradients of DistributedDataParallel have buckets, of 2 or 4 bytes a parameter."""
    with pytest.raises(InputError, match=r"resident:bucket_bytes.*give"):
        parse_policy(f"resident:{flags}")


def test_adapters_alone_have_buckets() -> None:
    """Frozen parameters have no gradients, so no buckets."""
    training = Training(Lora(2))
    workload = Workload("x", 64, 2, 4, vocabulary_size=100, batch_size=1, sequence_length=8, training=training)
    node = load_hardware("a100-40gb-epyc7713").shared_by(2)
    found = simulate(workload, node, parse_policy("resident:bucket_bytes=2"))
    (buffer,) = [one for one in found.schedule.resident if one.id.value is Value.POLICY_BUFFERS]
    assert buffer.size_bytes == 2 * workload.trained_parameters
