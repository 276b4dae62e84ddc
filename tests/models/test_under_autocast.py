"""The rows of blocks under autocast against the modules of transformers, run on fake tensors of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.counting import Counter, counting, kept_bytes
from support.decoder_layers import Layer, wide
from support.models import WIDE, built, layers_of, small_config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.plan.policy import Verdict
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.profile.roofline import _Roofline
from autohete.schedule import Kind, Value
from autohete.simulate import simulate
from autohete.tracing.on_cuda import flash_attention, one_kernel_dropout
from autohete.workload import Kernels, LossKernels, Precision, Units, Workload, named_workload
from autohete.workload.training import Lora, Training

A100 = load_hardware("a100-40gb-epyc7713")
#: Families, with the elements of their rotations.
FAMILIES = {"llama": 128, "qwen3": 128, "gpt2": None, "opt": None, "phi3": 64, "gemma3_text": 128, "olmo2": 128}


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast on the CPU with what CUDA does otherwise: attention in 16 bit, and ``pow`` in fp32."""
    power = torch.pow

    def attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, **_: object) -> Tensor:
        q, k, v = (one.to(torch.bfloat16) for one in (q, k, v))
        return flash_attention(q, k, v, dropout_p)

    def wide_power(x: Any, exponent: Any) -> Tensor:
        return power(x.float() if isinstance(x, Tensor) else x, exponent)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    monkeypatch.setattr(functional, "dropout", one_kernel_dropout)
    monkeypatch.setattr(torch, "pow", wide_power)


def under_autocast(family: str, batch: int = 4) -> Workload:
    return replace(wide(family, Precision.FP32), autocast=Precision.BF16, batch_size=batch)


@contextmanager
def layer(workload: Workload, family: str) -> Iterator[tuple[Layer, Tensor]]:
    """A layer in fp32 and its input, for a forward under autocast."""
    config = small_config(family, WIDE)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = built(config, "cpu", attention="sdpa", experts="grouped_mm").train()
        shape = (workload.batch_size, workload.sequence_length, workload.hidden_size)
        with torch.autocast("cpu", torch.bfloat16):
            yield Layer(layers_of(model, family)[0], FAMILIES[family]), torch.empty(shape, requires_grad=True)


def counted(module: Layer, x: Tensor) -> tuple[Counter, int]:
    """Forward under autocast, and backward without, as after ``with torch.autocast``; and the peak bytes of the former."""
    with counting() as counter:
        y = module(x)
        counter.backward, peak, counter.peak_bytes = True, counter.peak_bytes, 0
        with torch.autocast("cpu", enabled=False):
            given: Any = [x, *module.parameters()]
            torch.autograd.grad(y, given, torch.empty_like(y), allow_unused=True)
    counter.calls = [one for one in counter.calls if not one.name.startswith("prim::")]
    return counter, peak


def copies(workload: Workload) -> int:
    """Bytes of the 16-bit copies of a block's weights."""
    return 2 * sum(one.shape.parameters for one in workload.linear_layers(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_keeps_what_the_rows_say(family: str) -> None:
    """Within 2 % of what autograd saves, 16-bit copies of weights included. Within 4 % for OLMo 2, which keeps copies of its
    input but not the input, which counts here.
    """
    workload = under_autocast(family)
    with layer(workload, family) as (module, x):
        kept = kept_bytes(module, x)
    unit = analytic_profile(workload, A100).units[1]
    assert unit.activation_bytes == pytest.approx(kept, rel=0.04 if family == "olmo2" else 0.02)
    assert unit.cast_bytes == copies(workload)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_accesses_and_launches_what_the_rows_say(family: str) -> None:
    """Bytes of everything that is no product within 6 %, kernels within 12 %."""
    workload = under_autocast(family)
    with layer(workload, family) as (module, x):
        counter, _ = counted(module, x)
    roofline = _Roofline(workload, A100.gpu, A100.cpu.launch_seconds)
    rows, tensor = roofline._part(1), workload.tokens * workload.hidden_size
    for backward, direction in ((False, "forward"), (True, "backward")):
        theirs = sum(n * width for n, width in counter.tensors(backward)) / tensor
        ours = 2 * (rows.total(direction) + rows.total("casts")) + 4 * (rows.total(f"{direction}_fp32") + rows.total("casts"))
        ours += rows.total("kept_mask") + 3 * copies(workload) / tensor
        assert ours == pytest.approx(theirs, rel=0.06), direction
        kernels = rows.total(f"{direction}_kernels") + roofline._cast_count(1)
        assert kernels == pytest.approx(counter.kernels(backward), rel=0.12), direction


@pytest.mark.parametrize(("family", "width"), [("llama", 768), ("llama", 2048), ("qwen3", 1280), ("gpt2", 1280)])
def test_a_pass_needs_the_workspace_of_the_rows(family: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 6 % of what is alive at once besides what is kept."""
    monkeypatch.setitem(WIDE, "intermediate_size", width)
    workload = under_autocast(family, batch=64)
    with layer(workload, family) as (module, x):
        others = kept_bytes(module, x) - x.untyped_storage().nbytes()
    with layer(workload, family) as (module, x):
        counter, peak = counted(module, x)
    unit = analytic_profile(workload, A100).units[1]
    stream = unit.input_bytes
    forward = unit.forward_workspace_bytes + stream
    assert forward == pytest.approx(peak - others, rel=0.06)
    backward = unit.backward_workspace_bytes + 2 * stream + unit.activation_bytes
    assert backward == pytest.approx(counter.peak_bytes + stream, rel=0.06)


def test_what_trains_under_autocast_has_fp32_parameters() -> None:
    """States take what they take in fp32, and the 16-bit copies that forward makes are there up to the loss, or backward."""
    plain = named_workload("gpt-2b", kernels=Kernels.EAGER_FLASH, precision=Precision.FP32)
    cast, policy = replace(plain, autocast=Precision.BF16), parse_policy("resident:checkpointing=full")
    for one in (plain, cast):
        simulation = simulate(one, load_hardware("h100-pcie5"), policy)
        resting = sum(buffer.size_bytes for buffer in simulation.schedule.resident)
        assert resting == 12 * one.parameters
    blocks = range(1, cast.unit_count - 1)
    buffers = (one for task in simulation.schedule.tasks for one in task.allocates)
    held = {one.id.unit: one.size_bytes for one in buffers if one.id.value is Value.OTHER and one.id.use is Kind.LOSS}
    assert [held[unit] for unit in blocks] == [
        2 * sum(layer.shape.parameters for layer in cast.linear_layers(unit)) for unit in blocks
    ]


@pytest.mark.parametrize("policy", ["rotor", "checkmate", "moccasin", "dtr", "pofo", "autotm"])
def test_plans_of_chains_leave_room_for_the_cached_copies(policy: str) -> None:
    """Where recomputing every block fits, what plans within the GPU's memory fits as well."""
    small = Workload("small", 512, 8, 8, vocabulary_size=8192, sequence_length=256, batch_size=4, precision=Precision.FP32)
    workload, full = replace(small, autocast=Precision.BF16), parse_policy("resident:checkpointing=full")
    needed = simulate(workload, A100, full).memories[0].peak_bytes
    for more in (0, 10 << 20, 30 << 20):
        tight = replace(A100, gpu=replace(A100.gpu, memory_bytes=needed + more, reserved_bytes=0))
        assert simulate(workload, tight, parse_policy(policy)).verdict is Verdict.OK


def test_attention_alone_has_no_gelu() -> None:
    """As a unit of its own it needs less than the MLP, whose activation function is in fp32."""
    sublayers = replace(under_autocast("gpt2"), units=Units.SUBLAYER)
    attention, mlp = analytic_profile(sublayers, A100).units[1:3]
    assert 3 * attention.forward_workspace_bytes < mlp.forward_workspace_bytes
    assert 2 * attention.backward_workspace_bytes < mlp.backward_workspace_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": Precision.BF16},
        {"autocast": Precision.FP32},
        {"training": Training(Lora(8))},
        {"loss": LossKernels.SHIFTED},
    ],
)
def test_other_trainings_are_refused(changes: dict[str, Any]) -> None:
    plain = named_workload("gpt-2b", precision=Precision.FP32, kernels=Kernels.EAGER_FLASH)
    with pytest.raises(InputError, match=r"autocast (to (bf16|fp32)|computes PyTorch's cross-entropy)"):
        replace(plain, **{"autocast": Precision.BF16, **changes})
