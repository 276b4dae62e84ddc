"""The table of losses against the real functions, run on the meta device with every allocation counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.counting import counting
from torch import Tensor
from torch.nn import functional

from autohete.cli.question import Shape
from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.policies import parse_policy
from autohete.profile import LossProfile, analytic_profile
from autohete.profile.kernels.cross_entropy import head_kernels
from autohete.simulate import simulate
from autohete.tracing.on_cuda import PRODUCTS
from autohete.workload import Kernels, LossKernels, Precision, Workload
from autohete.workload.config import read_model

_Loss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

VOCABULARY = 5003


def entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """PyTorch's, of logits of any shape."""
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    """As ``transformers`` shifts logits up to 4.48."""
    return entropy(logits[..., :-1, :].contiguous(), labels[..., 1:])


def plain(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A loop of one's own."""
    logits = functional.linear(x, weight)
    return entropy(logits, labels), logits


def gpt2(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """GPT2LMHeadModel of 4.28."""
    logits = functional.linear(x, weight)
    return shifted(logits, labels), logits


def today(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """That of the installed transformers for every model that predicts the next token."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    logits = functional.linear(x, weight)
    return ForCausalLMLoss(logits, labels, vocab_size=VOCABULARY), logits


def of_4_48(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """ForCausalLMLoss of 4.46 to 4.48, ``loss/loss_utils.py:36-46``: the function's own copy lives until it returns."""
    logits = functional.linear(x, weight)

    def loss(logits: Tensor) -> Tensor:
        logits = logits.float()
        return shifted(logits, labels)

    return loss(logits), logits


def of_4_45(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """LlamaForCausalLM of 4.45, ``models/llama/modeling_llama.py:1214-1229``; likewise 4.31."""
    logits = functional.linear(x, weight).float()
    return shifted(logits, labels), logits


class InPlaceCrossEntropy(torch.autograd.Function):
    """Megatron-LM's without its parallelism: shifted, exponentiated and normalised in place, the gradient too."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        logits.sub_(logits.max(dim=-1, keepdim=True).values)
        chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        total = torch.exp(logits, out=logits).sum(-1, keepdim=True)
        losses = total.squeeze(-1).log() - chosen
        ctx.save_for_backward(logits.div_(total), labels)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        weights, labels = ctx.saved_tensors
        one = torch.empty(1, dtype=weights.dtype, device=weights.device).expand(*labels.shape, 1)
        weights.scatter_add_(-1, labels.unsqueeze(-1), one)
        return weights.mul_(gradient.unsqueeze(-1)), None


def megatron(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy in fp32, whatever the logits are in."""
    logits = functional.linear(x, weight)
    losses: Tensor = InPlaceCrossEntropy.apply(logits.float(), labels)  # type: ignore[no-untyped-call]
    return losses.mean(), logits


REAL: dict[LossKernels, _Loss] = {
    LossKernels.PLAIN: plain,
    LossKernels.SHIFTED: gpt2,
    LossKernels.FP32: today,
    LossKernels.FP32_SHIFTED: of_4_48,
    LossKernels.FP32_OUTPUT: of_4_45,
    LossKernels.MEGATRON: megatron,
}


def counted(loss: _Loss, dtype: torch.dtype, batch: int, *, keeps: bool) -> tuple[float, float, int]:
    """Bytes read and written and bytes at the peak, per logit, and kernels."""
    sequence, hidden = 64, 8
    count = batch * sequence * VOCABULARY
    weight = torch.empty(VOCABULARY, hidden, dtype=dtype, device="meta", requires_grad=True)
    x = torch.empty(batch, sequence, hidden, dtype=dtype, device="meta", requires_grad=True)
    labels = torch.empty(batch, sequence, dtype=torch.long, device="meta")
    output: Tensor | None
    with counting() as counter:
        value, output = loss(x, weight, labels)
        if not keeps:
            output = None
        counter.backward = True
        torch.autograd.grad(value, [x, weight])
    assert keeps == (output is not None)
    touched = [*counter.tensors(False), *counter.tensors(True)]
    traffic = sum(elements * bytes_each for elements, bytes_each in touched if elements > count / 2)
    launched = sum(call.launches for call in counter.calls if call.name not in PRODUCTS)
    return traffic / count, counter.peak_bytes / count, launched


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("element", [2, 4])
@pytest.mark.parametrize("loss", REAL)
def test_a_loss_takes_what_the_table_says(loss: LossKernels, element: int, batch: int, keeps: bool) -> None:
    """Traffic and peak are within 5 % of the table: at the peak are logits, gradient and workspace. Megatron's passes in place
    need less than the gradient that is counted.
    """
    dtype = {2: torch.bfloat16, 4: torch.float32}[element]
    traffic, peak, launched = counted(REAL[loss], dtype, batch, keeps=keeps)
    table = head_kernels(loss, element, copies=batch > 1, keeps=keeps)
    assert traffic == pytest.approx(table.traffic, rel=0.05)
    assert launched == pytest.approx(table.kernels, rel=0.2)
    expected = table.workspace + 2 * element + table.wider
    if loss is LossKernels.MEGATRON:
        assert peak <= 1.05 * expected
    else:
        assert peak == pytest.approx(expected, rel=0.05)


def profiled(workload: Workload) -> LossProfile:
    """Its loss on an A100."""
    return analytic_profile(workload, load_hardware("a100-40gb-epyc7713")).loss


@pytest.mark.parametrize(
    ("workload", "loss"),
    [
        (Workload("gpt", 64, 1, 4, kernels=Kernels.EAGER), LossKernels.SHIFTED),
        (Workload("gpt", 64, 1, 4), LossKernels.MEGATRON),
        (replace(read_model("llama-3.2-1b"), kernels=Kernels.EAGER_FLASH), LossKernels.FP32),
        (read_model("llama-3.2-1b"), LossKernels.MEGATRON),
    ],
)
def test_the_default_is_the_loss_of_the_kernels(workload: Workload, loss: LossKernels) -> None:
    """GPT-2's of transformers shifts 16-bit logits, that of other decoders computes in fp32, Megatron's in place."""
    assert workload.batch_size > 1
    assert profiled(workload) == profiled(replace(workload, loss=loss))


def test_a_loss_in_place_is_one_chunk() -> None:
    """Both write the gradient in the place of all logits."""
    workload = read_model("llama-3.2-1b")
    one = analytic_profile(replace(workload, loss=LossKernels.IN_PLACE), load_hardware("h100-pcie5"))
    other = analytic_profile(replace(workload, chunked_loss=True, loss_chunks=1), load_hardware("h100-pcie5"))
    assert (one.loss, one.units) == (other.loss, other.units)


@pytest.mark.parametrize("loss", REAL)
@pytest.mark.parametrize("keeps", [None, False])
def test_the_schedule_holds_what_the_loss_holds(loss: LossKernels, keeps: bool | None) -> None:
    """Where the loss is the peak, the peaks of two losses differ by what the table says, to the byte."""
    workload = Workload("x", 64, 1, 4, vocabulary_size=50_000, sequence_length=64, batch_size=2)
    at = {}
    for one in (LossKernels.PLAIN, loss):
        held = None if one is LossKernels.PLAIN else keeps
        hardware = load_hardware("a100-40gb-epyc7713")
        given = replace(workload, loss=one, keeps_logits=held)
        at[one] = simulate(given, hardware, parse_policy("resident")).gpu.peak_bytes - profiled(given).peak_bytes
    assert len(set(at.values())) == 1


def test_logits_in_fp32_stay_in_fp32() -> None:
    """The output of Llama of 4.45 takes twice the 16-bit gradient until backward has ended, or none if it is dropped."""
    workload = replace(read_model("llama-3.2-1b"), loss=LossKernels.FP32_OUTPUT, kernels=Kernels.EAGER_FLASH)
    loss = profiled(workload)
    assert (loss.logits_bytes, loss.passed_bytes) == (2 * loss.passed_bytes, workload.tokens * workload.vocabulary_size * 2)
    assert loss.keeps_logits
    assert not profiled(replace(workload, keeps_logits=False)).keeps_logits
    assert profiled(replace(workload, precision=Precision.FP32)).wider_bytes == 0


def test_the_option_is_that_of_the_workload() -> None:
    """``--loss fp32`` and ``Workload(loss=...)`` are one; a chunked loss has no kernels of whole logits."""
    shape = Shape(loss=LossKernels.FP32)
    assert json.dumps(shape.changes()) == '{"loss": "fp32"}'
    workload = shape.workload("gpt-2b")
    assert workload.loss is LossKernels.FP32
    with pytest.raises(InputError, match="a chunked loss works in place: leave out one of them"):
        replace(workload, chunked_loss=True)
    with pytest.raises(InputError, match="leave keeps_logits out"):
        replace(workload, loss=LossKernels.IN_PLACE, keeps_logits=True)
