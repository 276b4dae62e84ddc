"""A loop over experts against the one that transformers has."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.counting import Counter, counting
from support.models import OF_FAMILY
from torch import Tensor, nn
from torch.nn.functional import one_hot, silu
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeParallelExperts

from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.profile import analytic_profile
from autohete.profile.adapters import Additions
from autohete.profile.loop import expert_loop
from autohete.workload import Kernels
from autohete.workload.config import parse_model, read_model

HIDDEN, WIDTH, TOKENS = 32, 48, 64
GPT_OSS = replace(read_model("gpt-oss-20b"), kernels=Kernels.EAGER_FLASH, sequence_length=2048, batch_size=4)
A100 = load_hardware("a100-40gb-epyc7713")


def counted(count: int, used: int) -> Counter:
    """Forward and backward of that many experts, of which the first get tokens."""
    config = SimpleNamespace(
        intermediate_size=WIDTH, num_local_experts=count, hidden_size=HIDDEN, swiglu_alpha=1.7, swiglu_limit=7.0
    )
    experts: nn.Module = GptOssExperts(config)  # type: ignore[no-untyped-call]
    loop = type(experts).forward.__wrapped__  # type: ignore[attr-defined]  # without the choice of an implementation
    x, weights = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.rand(TOKENS, 4, requires_grad=True)
    chosen = (torch.arange(TOKENS)[:, None] * 4 + torch.arange(4)) % used
    with counting() as counter:
        y = loop(experts, x, chosen, weights)
        counter.backward = True
        torch.autograd.grad(y, [x, weights, *experts.parameters()], torch.ones_like(y))
    return counter


def test_the_loop_launches_and_writes_what_is_counted() -> None:
    """Per expert with tokens, kernels as in transformers; gradients of all experts are accessed ``4 k - 3`` times."""
    few, more, wider = counted(8, 4), counted(8, 8), counted(16, 8)
    ours = [expert_loop(replace(GPT_OSS, looped_experts=used), 1, 1.0) for used in (4, 8)]
    copies = 4  # of matrices and biases, which transformers 5 takes as views
    assert ours[1].forward_kernels - ours[0].forward_kernels == more.kernels(False) - few.kernels(False) + 4 * copies
    assert ours[1].backward_kernels - ours[0].backward_kernels == more.kernels(True) - few.kernels(True)
    accessed = [sum(elements for elements, _ in one.tensors(True)) for one in (more, wider)]
    of_all = 8 * (3 * HIDDEN * WIDTH + 2 * WIDTH + HIDDEN)
    assert accessed[1] - accessed[0] == pytest.approx((4 * 8 - 3) * of_all, rel=0.01)


class Separate(nn.Module):
    """Experts that are modules of their own, each of which takes its rows from all tokens, as in transformers 4."""

    def __init__(self, count: int) -> None:
        super().__init__()
        sizes = ((HIDDEN, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN))
        self.experts = nn.ModuleList(nn.ModuleList(nn.Linear(*one, bias=False) for one in sizes) for _ in range(count))

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y, places = torch.zeros_like(x), one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for place, expert in zip(places, self.experts, strict=True):
            slot, row = torch.where(place)
            assert isinstance(expert, nn.ModuleList)
            gate, up, down = expert
            taken = x[row]
            y.index_add_(0, row, down(silu(gate(taken)) * up(taken)) * weights[row, slot, None])
        return y


def separate(count: int) -> Counter:
    """Forward and backward of experts with modules of their own."""
    experts = Separate(count)
    x, weights = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.rand(TOKENS, 4, requires_grad=True)
    chosen = (torch.arange(TOKENS)[:, None] * 4 + torch.arange(4)) % count
    with counting() as counter:
        y = experts(x, weights, chosen)
        counter.backward = True
        torch.autograd.grad(y, [x, weights, *experts.parameters()], torch.ones_like(y))
    return counter


def viewed(count: int) -> Counter:
    """Forward and backward of experts whose matrices are views of one tensor, and whose rows are sorted."""
    first, last = (JetMoeParallelExperts(count, *sizes) for sizes in ((HIDDEN, 2 * WIDTH), (WIDTH, HIDDEN)))
    nn.init.ones_(first.weight)
    nn.init.ones_(last.weight)
    x, rows = torch.randn(4 * TOKENS, HIDDEN, requires_grad=True), [4 * TOKENS // count] * count
    with counting() as counter:
        gate, up = first(x, rows).chunk(2, dim=-1)
        y = last(silu(gate) * up, rows)
        counter.backward = True
        torch.autograd.grad(y, [x, first.weight, last.weight], torch.ones_like(y))
    return counter


def loops(model: str) -> list[Additions]:
    """What loops over four and over eight experts of ``model`` add, in elements of its tensors."""
    workload = replace(read_model(model), kernels=Kernels.EAGER_FLASH)
    return [expert_loop(replace(workload, looped_experts=used), 1, 2.0) for used in (4, 8)]


def test_experts_with_modules_of_their_own_launch_and_write_what_is_counted() -> None:
    """Per expert, kernels as in such a loop; gradients of all tokens are filled and added, those of matrices are not."""
    few, more = separate(4), separate(8)
    ours = loops("mixtral-8x7b")
    assert ours[1].forward_kernels - ours[0].forward_kernels == more.kernels(False) - few.kernels(False)
    assert ours[1].backward_kernels - ours[0].backward_kernels == more.kernels(True) - few.kernels(True)
    written = [
        sum(sum(n for n, _ in call.touched) for call in one.calls if call.name in ("new_zeros", "add")) for one in (few, more)
    ]
    weights = 4 * 4 * 4 * TOKENS  # the weights of a token's four experts are added up in the same way
    assert (written[1] - written[0] - weights) / (TOKENS * HIDDEN) == 4 * 4
    workload = read_model("mixtral-8x7b")
    assert ours[1].backward_seconds - ours[0].backward_seconds == 4 * 4 * workload.tokens * workload.hidden_size
    assert ours[1].forward_workspace_bytes == 0


def test_experts_that_are_views_launch_and_write_what_is_counted() -> None:
    """Per expert, two products forward; backward fills and adds gradients of all experts, and copies each to its place."""
    few, more = viewed(4), viewed(8)
    granite = parse_model(OF_FAMILY["granitemoe"], "granite")
    workload = replace(granite, kernels=Kernels.EAGER_FLASH)
    ours = [expert_loop(replace(workload, looped_experts=used), 1, 2.0) for used in (4, 8)]
    assert ours[1].forward_kernels - ours[0].forward_kernels == more.kernels(False) - few.kernels(False)
    copies = 2 * 4  # select_backward fills with zeros, and copies
    assert ours[1].backward_kernels - ours[0].backward_kernels == more.kernels(True) - few.kernels(True) + copies
    assert all(one.forward_seconds == 0 for one in ours)
    all_experts = ours[0].forward_workspace_bytes / 2
    assert ours[1].backward_seconds - ours[0].backward_seconds == 4 * 4 * all_experts + 2 * 4 * all_experts / 8


def test_a_loop_costs_the_more_the_more_experts_get_tokens() -> None:
    """Backward of a block takes longest with all experts; grouped products are faster than any loop."""
    used = [analytic_profile(replace(GPT_OSS, looped_experts=k), A100).units[1] for k in (None, 4, 8, 32)]
    seconds = [one.backward_seconds for one in used]
    assert seconds == sorted(seconds)
    one = 2 * (3 * 2880 * 2880 + 3 * 2880)  # bytes of an expert
    bandwidth = A100.gpu.memory_bandwidth * A100.gpu.memory_efficiency
    assert seconds[2] - seconds[1] == pytest.approx((4 * 4 * 32 + 3 * 4) * one / bandwidth, rel=0.1)
    assert used[1].backward_workspace_bytes == used[0].backward_workspace_bytes + 32 * one


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"looped_experts": 3}, "looped_experts is 3: give 4, to which a token goes, up to all 32 of a block"),
        ({"looped_experts": 33}, "up to all 32"),
        ({"looped_experts": 4, "kernels": Kernels.FUSED}, "for eager kernels"),
    ],
)
def test_what_no_loop_does_is_refused(changes: dict[str, object], reason: str) -> None:
    """Fewer experts than a token needs, more than there are, and fused kernels are refused; so is a dense model."""
    with pytest.raises(InputError, match=reason):
        replace(GPT_OSS, **changes)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="has no experts"):
        replace(read_model("llama-3.1-8b"), looped_experts=4)
