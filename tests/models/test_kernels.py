"""The tables of operations against the modules that they describe, run on the meta device: shapes, but no numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.counting import Counter, as_one_kernel, counting, kept_bytes
from torch import Tensor, nn
from torch.nn import functional

from autohete.hardware import Hardware, load_hardware, preset_names
from autohete.profile import Profile, analytic_profile
from autohete.profile.kernels.cross_entropy import head_kernels
from autohete.profile.kernels.gpt2 import IMPLEMENTATIONS
from autohete.profile.roofline import _Roofline
from autohete.runtime.precision import DTYPES
from autohete.testing import strategies
from autohete.tracing.on_cuda import flash_attention, one_kernel_dropout
from autohete.train.gpt import GPTBlock
from autohete.workload import GPT2_KERNELS, WORKLOADS, BlockRole, Kernels, Precision, Units, Workload

modeling_gpt2 = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")

A100 = load_hardware("a100-40gb-epyc7713")
DROPOUT = 0.1


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "dropout", one_kernel_dropout)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", flash_attention)


# --- the blocks ---------------------------------------------------------------------------------------------------


class ScaleMaskSoftmax(torch.autograd.Function):
    """One kernel each way; keeps its result."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        (weights,) = as_one_kernel("softmax", lambda: (torch.empty_like(scores),), scores)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        return as_one_kernel("softmax", lambda: (torch.empty_like(weights),), gradient, weights)[0]


class BiasGelu(torch.autograd.Function):
    """One kernel each way, and the sum for the bias; keeps the product without its bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return as_one_kernel("bias_gelu", lambda: (torch.empty_like(x),), x)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, _ = ctx.saved_tensors
        (result,) = as_one_kernel("bias_gelu", lambda: (torch.empty_like(x),), gradient, x)
        return result, result.sum((0, 1))


class BiasDropoutAdd(torch.autograd.Function):
    """One kernel each way, and the sum for the bias; keeps the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        def compute() -> tuple[Tensor, ...]:
            return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)

        out, mask = as_one_kernel("bias_dropout_add", compute, x, residual)
        ctx.save_for_backward(mask)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (mask,) = ctx.saved_tensors
        (result,) = as_one_kernel("bias_dropout_add", lambda: (torch.empty_like(gradient),), gradient, mask)
        return result, result.sum((0, 1)), gradient


class MegatronBlock(nn.Module):
    """A block with the kernel boundaries of Megatron-LM's: (sequence, batch, hidden), biases added by the kernel after."""

    def __init__(self, hidden: int, heads: int, flash: bool) -> None:
        super().__init__()
        self.heads, self.flash = heads, flash
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))

    def attention(self, x: Tensor) -> Tensor:
        """One sublayer."""
        return self._join(self._attention(self.norm1(x)), self.out.bias, x)

    def mlp(self, x: Tensor) -> Tensor:
        """The other."""
        return self._join(self._mlp(self.norm2(x)), self.down.bias, x)

    def owned(self, role: BlockRole) -> list[nn.Module]:
        """The modules of a sublayer."""
        return [self.norm1, self.qkv, self.out] if role is BlockRole.ATTENTION else [self.norm2, self.up, self.down]

    def _attention(self, x: Tensor) -> Tensor:
        s, b, h = x.shape
        mixed = self.qkv(x).view(s, b, self.heads, 3 * h // self.heads)
        context = (self._flash if self.flash else self._scores)(*mixed.chunk(3, dim=-1))
        return functional.linear(context.reshape(s, b, h), self.out.weight)

    def _mlp(self, x: Tensor) -> Tensor:
        y = BiasGelu.apply(functional.linear(x, self.up.weight), self.up.bias)  # type: ignore[no-untyped-call]
        return functional.linear(y, self.down.weight)

    def _join(self, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        joined: Tensor = BiasDropoutAdd.apply(x, bias, residual)  # type: ignore[no-untyped-call]
        return joined

    def _flash(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.transpose(0, 1).contiguous().transpose(1, 2) for part in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT, is_causal=True).permute(2, 0, 1, 3)

    def _scores(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s, b, a, d = q.shape
        q, k, v = (part.reshape(s, b * a, d).transpose(0, 1) for part in (q, k, v))
        scores = torch.baddbmm(torch.empty(b * a, s, s, dtype=q.dtype, device=q.device), q, k.mT, beta=0.0, alpha=d**-0.5)
        weights = functional.dropout(ScaleMaskSoftmax.apply(scores), DROPOUT)  # type: ignore[no-untyped-call]
        return torch.bmm(weights, v).view(b, a, s, d).permute(2, 0, 1, 3)


class HuggingFaceBlock(nn.Module):
    """The installed GPT2Block, with the causal mask that its model would hand it."""

    def __init__(self, hidden: int, heads: int, attention: str) -> None:
        super().__init__()
        config = modeling_gpt2.GPT2Config(n_embd=hidden, n_head=heads, attn_implementation=attention)
        self.block, self.eager = modeling_gpt2.GPT2Block(config, layer_idx=0), attention == "eager"

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x, attention_mask=self._mask(x))
        return out

    def attention(self, x: Tensor) -> Tensor:
        """One sublayer, as GPT2Block.forward computes it."""
        out: Tensor = self.block.attn(self.block.ln_1(x), attention_mask=self._mask(x))[0] + x
        return out

    def mlp(self, x: Tensor) -> Tensor:
        """The other."""
        out: Tensor = x + self.block.mlp(self.block.ln_2(x))
        return out

    def owned(self, role: BlockRole) -> list[nn.Module]:
        """The modules of a sublayer."""
        b = self.block
        return [b.ln_1, b.attn] if role is BlockRole.ATTENTION else [b.ln_2, b.mlp]

    def _mask(self, x: Tensor) -> Tensor | None:
        return torch.empty(1, 1, x.shape[1], x.shape[1], dtype=x.dtype, device=x.device) if self.eager else None


class Sublayer(nn.Module):
    """Attention or MLP of a block, with its parameters alone."""

    def __init__(self, whole: MegatronBlock | HuggingFaceBlock, role: BlockRole) -> None:
        super().__init__()
        self.owned, self.compute = nn.ModuleList(whole.owned(role)), getattr(whole, role)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.compute(x)
        return out


def eager_attention_of_4_28(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: object
) -> tuple[Tensor, None]:
    """Eager attention as transformers 4.28 had it: divided by a tensor, masked with ``where`` (one value more to fill in)."""
    causal = torch.empty(mask.shape, dtype=torch.bool, device=mask.device)
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores = scores / torch.full([], value.shape[-1] ** 0.5, dtype=scores.dtype, device=scores.device)
    scores = torch.where(causal, scores, torch.full([], -1e4, dtype=scores.dtype, device=scores.device))
    weights = functional.dropout(functional.softmax(scores, dim=-1), DROPOUT)
    return torch.matmul(weights, value).transpose(1, 2), None


def block(
    kernels: Kernels,
    hidden: int,
    heads: int,
    dtype: torch.dtype = torch.bfloat16,
    role: BlockRole = BlockRole.TRANSFORMER,
) -> nn.Module:
    """The module that the table of ``kernels`` describes, or a sublayer of it."""
    makers: dict[Kernels, Callable[[], MegatronBlock | HuggingFaceBlock]] = {
        Kernels.FUSED: lambda: MegatronBlock(hidden, heads, flash=True),
        Kernels.FUSED_SOFTMAX: lambda: MegatronBlock(hidden, heads, flash=False),
        Kernels.EAGER: lambda: HuggingFaceBlock(hidden, heads, "eager"),
        Kernels.EAGER_FLASH: lambda: HuggingFaceBlock(hidden, heads, "sdpa"),
    }
    with torch.device("meta"):
        whole = makers[kernels]().to(dtype).train()
        return whole if role is BlockRole.TRANSFORMER else Sublayer(whole, role).train()


def given_input(kernels: Kernels, batch: int, sequence: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The input of a block."""
    fused = kernels in (Kernels.FUSED, Kernels.FUSED_SOFTMAX)
    shape = (sequence, batch, hidden) if fused else (batch, sequence, hidden)
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


# --- what is kept -------------------------------------------------------------------------------------------------

#: No batch of one: (sequence, 1, hidden) needs none of Megatron-LM's copies.
SHAPES = [(16, 32), (8, 64), (4, 128), (2, 256)]
WIDTH, HEADS = 256, 4
#: Lean kernels are the fused ones with a backward that makes more; no module of theirs is run.
REAL = [kernels for kernels in GPT2_KERNELS if kernels is not Kernels.LEAN]
#: A block, and what it consists of.
PARTS = [BlockRole.TRANSFORMER, BlockRole.ATTENTION, BlockRole.MLP]


def predicted_bytes(
    kernels: Kernels,
    batch: int,
    sequence: int,
    precision: Precision = Precision.BF16,
    role: BlockRole = BlockRole.TRANSFORMER,
    *,
    selective: bool = False,
) -> int:
    """What the profile says that a block keeps, or a sublayer."""
    units = Units.BLOCK if role is BlockRole.TRANSFORMER else Units.SUBLAYER
    workload = Workload("x", WIDTH, 1, HEADS, 1000, sequence, batch, precision, kernels=kernels, units=units)
    (found,) = (unit for unit in analytic_profile(workload, A100).units if unit.role is role)
    if not selective:
        return found.activation_bytes
    return found.activation_bytes - found.bytes_of(found.selected)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
@pytest.mark.parametrize(("batch", "sequence"), SHAPES)
@pytest.mark.parametrize("kernels", REAL)
@pytest.mark.parametrize("role", PARTS)
def test_a_block_keeps_what_the_table_says(
    role: BlockRole, kernels: Kernels, batch: int, sequence: int, precision: Precision
) -> None:
    """What a block or a sublayer keeps for backward, its input included, is the profile's within 2 %: statistics of rows are
    left out.
    """
    dtype = DTYPES[precision]
    kept = kept_bytes(block(kernels, WIDTH, HEADS, dtype, role), given_input(kernels, batch, sequence, WIDTH, dtype))
    assert kept == pytest.approx(predicted_bytes(kernels, batch, sequence, precision, role), rel=0.02)


@pytest.mark.parametrize(("batch", "sequence"), SHAPES)
def test_the_runtimes_block_keeps_one_tensor_less_than_fused_kernels(batch: int, sequence: int) -> None:
    """The runtime's own block keeps what Megatron-LM's keeps, but the copy of the context: its heads are joined by a view."""
    with torch.device("meta"):
        module = GPTBlock(WIDTH, HEADS, DROPOUT).to(torch.bfloat16).train()
    kept = kept_bytes(module, given_input(Kernels.EAGER, batch, sequence, WIDTH))
    predicted, copy = predicted_bytes(Kernels.FUSED, batch, sequence), 2 * batch * sequence * WIDTH
    assert kept == pytest.approx(predicted - copy, rel=0.02)
    assert kept < predicted < 1.06 * kept


class Again(nn.Module):
    """Keeps its inputs alone, as what is computed again before backward does; that is not run here."""

    def __init__(self, *steps: Callable[..., Tensor]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, *inputs: Tensor) -> Tensor:
        found: Tensor = _Again.apply(self.steps, *inputs)  # type: ignore[no-untyped-call]
        return found


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps: Sequence[Callable[..., Tensor]], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        first, *others = steps
        return reduce(lambda x, step: step(x), others, first(*inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError


def select(whole: MegatronBlock | HuggingFaceBlock, again: Collection[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operations ``again``, which a block computes again, keep their inputs alone."""
    if isinstance(whole, MegatronBlock):
        up, down = whole.up, whole.down
        if "scores" in again:
            monkeypatch.setattr(whole, "_scores", Again(whole._scores).forward)
        if "input layer norm" in again:
            whole.qkv, whole.norm1 = Again(whole.norm1, whole.qkv), nn.Identity()  # type: ignore[assignment]
        if "post-attention layer norm" in again:
            before = Again(whole.norm2, lambda x: functional.linear(x, up.weight))
            after = Again(lambda x: BiasGelu.apply(x, up.bias), lambda x: functional.linear(x, down.weight))  # type: ignore[no-untyped-call]
            whole.norm2 = nn.Identity()  # type: ignore[assignment]
            monkeypatch.setattr(whole, "_mlp", lambda x: after(before(x)))
        return
    b = whole.block
    if "scores" in again:

        def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **_: object) -> tuple[Tensor, None]:
            return Again(lambda q, k, v: eager_attention_of_4_28(module, q, k, v, mask)[0])(q, k, v), None

        monkeypatch.setattr(modeling_gpt2, "eager_attention_forward", attention)
    if "ln_1" in again:
        b.attn.c_attn, b.ln_1 = Again(b.ln_1, b.attn.c_attn), nn.Identity()
    if "ln_2" in again:
        b.mlp.c_fc, b.ln_2 = Again(b.ln_2, b.mlp.c_fc), nn.Identity()
        b.mlp.c_proj, b.mlp.act = Again(b.mlp.act, b.mlp.c_proj), nn.Identity()


@pytest.mark.parametrize("kernels", REAL)
@pytest.mark.parametrize("role", PARTS)
def test_a_selective_forward_keeps_what_the_table_says(
    role: BlockRole, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block or a sublayer in which what is computed again keeps its inputs alone keeps what the profile says, within 2 %."""
    batch, sequence = 4, 128
    part = IMPLEMENTATIONS[kernels].part(role)
    again = {part.operations[row].name for one in part.selections if one.selective for row in one.again}
    whole = block(kernels, WIDTH, HEADS)
    assert isinstance(whole, (MegatronBlock, HuggingFaceBlock))
    select(whole, again, monkeypatch)
    module = whole if role is BlockRole.TRANSFORMER else Sublayer(whole, role).train()
    kept = kept_bytes(module, given_input(kernels, batch, sequence, WIDTH))
    assert kept == pytest.approx(predicted_bytes(kernels, batch, sequence, role=role, selective=True), rel=0.02)


# --- what is read, written and launched -----------------------------------------------------------------------------

#: No number of scores is a multiple of the hidden elements, and no parameter has a multiple of these.
BATCH, SEQUENCE, HIDDEN = 3, 40, 64
TOKENS, SCORES = BATCH * SEQUENCE * HIDDEN, BATCH * HEADS * SEQUENCE**2


def counted(kernels: Kernels, role: BlockRole = BlockRole.TRANSFORMER) -> Counter:
    """Forward and backward of a block, or of a sublayer."""
    module, x = block(kernels, HIDDEN, HEADS, role=role), given_input(kernels, BATCH, SEQUENCE, HIDDEN)
    with counting() as counter:
        y = module(x)
        counter.backward = True
        torch.autograd.grad(y, [x, *module.parameters()], torch.empty_like(y))
    return counter


def accesses(counter: Counter, backward: bool, width: int = 2) -> float:
    """Tensors of ``tokens x hidden`` elements of ``width`` bytes that were read or written."""
    sizes = [n for n, bytes_each in counter.tensors(backward) if bytes_each == width and n != SCORES and n % TOKENS == 0]
    return sum(sizes) / TOKENS


def score_passes(counter: Counter, backward: bool, width: int = 2) -> int:
    """Tensors of scores that were read or written outside the matrix products."""
    return counter.tensors(backward).count((SCORES, width))


@pytest.fixture
def _eager_attention_of_4_28(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_gpt2, "eager_attention_forward", eager_attention_of_4_28)


@pytest.mark.usefixtures("_eager_attention_of_4_28")
@pytest.mark.parametrize("kernels", REAL)
@pytest.mark.parametrize("role", PARTS)
def test_a_block_accesses_and_launches_what_the_table_says(role: BlockRole, kernels: Kernels) -> None:
    """Accesses are within 2 % of the table, passes over scores and masks exactly its own, and kernels within 15 %."""
    table, counter = IMPLEMENTATIONS[kernels].part(role), counted(kernels, role)
    for backward, direction in ((False, "forward"), (True, "backward")):
        assert accesses(counter, backward) == pytest.approx(table.total(direction), rel=0.02)
        assert score_passes(counter, backward) == table.total(f"{direction}_scores")
        assert accesses(counter, backward, width=1) == table.total("kept_mask")
        assert score_passes(counter, backward, width=1) == table.total("kept_score_mask")
        assert counter.kernels(backward) == pytest.approx(table.total(f"{direction}_kernels"), rel=0.15)


def test_eager_attention_of_today_differs_in_the_mask_alone() -> None:
    """The installed transformers adds the mask, which backward passes over: that row's backward is all that is missing."""
    table, counter = IMPLEMENTATIONS[Kernels.EAGER].block, counted(Kernels.EAGER)
    (mask,) = (operation for operation in table.operations if operation.name == "causal mask")
    assert accesses(counter, False) == pytest.approx(table.total("forward"), rel=0.02)
    assert accesses(counter, True) == pytest.approx(table.total("backward"), rel=0.02)
    assert score_passes(counter, False) == table.total("forward_scores")
    assert score_passes(counter, True) == table.total("backward_scores") - mask.backward_scores
    assert counter.kernels(False) == pytest.approx(table.total("forward_kernels"), rel=0.15)
    assert counter.kernels(True) == pytest.approx(table.total("backward_kernels") - mask.backward_kernels, rel=0.15)


# --- what lives only during a pass ----------------------------------------------------------------------------------


def workspaces(kernels: Kernels, role: BlockRole, batch: int, sequence: int, heads: int) -> tuple[int, int]:
    """Bytes at the peak of forward and backward, output and its gradient included, beyond those kept for backward."""
    module, x = block(kernels, HIDDEN, heads, role=role), given_input(kernels, batch, sequence, HIDDEN)
    before = kept_bytes(module, x) - x.untyped_storage().nbytes()
    with counting() as counter:
        y = module(x)
        forward, counter.peak_bytes = counter.peak_bytes, 0
        torch.autograd.grad(y, [x, *module.parameters()], torch.empty_like(y))
    return forward - before, counter.peak_bytes - before


@pytest.mark.usefixtures("_eager_attention_of_4_28")
@pytest.mark.parametrize("kernels", REAL)
@pytest.mark.parametrize("role", PARTS)
def test_a_pass_needs_the_workspace_of_the_table(role: BlockRole, kernels: Kernels) -> None:
    """Peaks are within 5 % of the table: of hidden tensors where scores are few, of scores where these are most of all."""
    table = IMPLEMENTATIONS[kernels].part(role)
    batch, sequence = 4096, 4
    forward, backward = (size / (2 * batch * sequence * HIDDEN) for size in workspaces(kernels, role, batch, sequence, heads=1))
    assert forward == pytest.approx(table.forward_workspace, rel=0.05)
    assert backward == pytest.approx(table.backward_workspace, rel=0.05)
    batch, sequence, heads = 4, 4096, 8
    _, backward = (size / (2 * batch * heads * sequence**2) for size in workspaces(kernels, role, batch, sequence, heads))
    assert backward == pytest.approx(table.backward_score_workspace, abs=0.05)


# --- times --------------------------------------------------------------------------------------------------------


def seconds(profile: Profile) -> list[float]:
    """Every time that depends on the tokens."""
    passes = [time for block in profile.units for time in (block.forward_seconds, block.backward_seconds)]
    return [*passes, profile.loss.seconds]


@pytest.mark.parametrize("kernels", REAL)
def test_few_tokens_take_the_launches_of_their_kernels(kernels: Kernels) -> None:
    """With next to no tokens each pass of a block takes exactly the operations that the host spends on each of its kernels."""
    profile = analytic_profile(Workload("x", 64, 1, 4, 100, 4, 1, kernels=kernels), A100)
    table, launch = IMPLEMENTATIONS[kernels], A100.cpu.launch_seconds
    assert launch > A100.gpu.kernel_overhead_seconds
    forward, backward = (table.block.total(f"{direction}_kernels") for direction in ("forward", "backward"))
    assert profile.units[1].forward_seconds == pytest.approx(forward * table.host_forward * launch)
    assert profile.units[1].backward_seconds == pytest.approx(backward * table.host_backward * launch)
    assert profile.loss.seconds == pytest.approx(head_kernels(table.loss, 2).kernels * table.host_forward * launch)


@pytest.mark.slow
@given(strategies.workloads(), strategies.hardware(), st.sampled_from([0.0, 1e-5]), st.integers(1, 300), st.integers(1, 300))
def test_more_tokens_never_take_less_time(workload: Workload, node: Hardware, launch: float, batch: int, sequence: int) -> None:
    """A larger batch or a longer sequence makes no pass and no loss quicker."""
    node = replace(node, gpu=replace(node.gpu, multiprocessors=108), cpu=replace(node.cpu, launch_seconds=launch))
    before = seconds(analytic_profile(workload, node))
    for field, more in (("batch_size", batch), ("sequence_length", sequence)):
        larger = replace(workload, **{field: getattr(workload, field) + more})
        after = seconds(analytic_profile(larger, node))
        assert all(now >= then * (1 - 1e-9) for then, now in zip(before, after, strict=True))


@pytest.mark.parametrize("node", preset_names())
@pytest.mark.parametrize("name", WORKLOADS)
def test_eager_is_slower_than_fused(name: str, node: str) -> None:
    """Without fused kernels, and without FlashAttention, every pass of every preset's block takes longer."""
    hardware = load_hardware(node)
    blocks = {k: analytic_profile(replace(WORKLOADS[name], kernels=k), hardware).units[1] for k in GPT2_KERNELS}
    for slow, fast in (
        (Kernels.EAGER, Kernels.FUSED_SOFTMAX),
        (Kernels.EAGER_FLASH, Kernels.FUSED),
        (Kernels.EAGER, Kernels.EAGER_FLASH),
        (Kernels.FUSED_SOFTMAX, Kernels.FUSED),
    ):
        assert blocks[slow].forward_seconds > blocks[fast].forward_seconds
        assert blocks[slow].backward_seconds > blocks[fast].backward_seconds


SIDES = st.one_of(st.integers(1, 600), st.integers(1, 20_000))


@example(128, 2048, 2048, 1, 0, "a100-40gb-epyc7713", Precision.BF16)  # from one row of tiles to two
@given(SIDES, SIDES, SIDES, SIDES, st.sampled_from(range(3)), st.sampled_from(preset_names()), st.sampled_from(Precision))
def test_a_smaller_product_is_quicker_but_at_no_higher_rate(
    rows: int, columns: int, inner: int, more: int, side: int, node: str, precision: Precision
) -> None:
    """Making a matrix product longer on one side, rows, columns or inside, lowers neither its time nor its FLOP/s."""
    roofline = _Roofline(Workload("x", 64, 1, 4, precision=precision), load_hardware(node).gpu, launch_seconds=0.0)
    shape = (rows, columns, inner)
    larger = tuple(size + more * (k == side) for k, size in enumerate(shape))
    before, after = roofline._gemm_seconds(*shape), roofline._gemm_seconds(*larger)
    assert after >= before * (1 - 1e-9)
    assert math.prod(larger) / after >= math.prod(shape) / before * (1 - 1e-9)
