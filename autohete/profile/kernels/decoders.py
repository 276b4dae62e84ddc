"""The operations that the GPU runs for any :class:`~autohete.workload.model.Block`, composed from its parts.

Two implementations. ``transformers`` 5.23 launches a kernel per operation; its rows were counted by running its modules
(``tests/models/test_decoder_kernels.py``). The fused one is Megatron Core with Transformer Engine, and flash-linear-attention:
one kernel for a norm, a rotation or an activation. Its rows follow from what these kernels must read and write; they were not
run.

Units are those of :mod:`autohete.profile.kernels.gpt2`: a tensor of ``w`` elements per token counts ``w / hidden_size``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace

from autohete.profile.kernels.gpt2 import FLASH, Implementation, Operation, Part, Selection, core_alone
from autohete.workload import AttentionMask
from autohete.workload.model import (
    LINEAR_CHUNK,
    Activation,
    Attention,
    Block,
    Experts,
    FeedForward,
    JointProduct,
    LatentAttention,
    LinearAttention,
    Mixer,
    Mlp,
    Norm,
    NormPlace,
)
from autohete.workload.training import FIRST, LAST, LATENT

#: Rows that keep the input of a product with weights, and nothing else. A router's keeps more.
INPUT_ROWS = frozenset({FIRST, LATENT, LAST})
#: Bytes of the indices that sort tokens by expert, for each expert of a token: four arrays of 64-bit integers.
_INDEX_BYTES = 32
_TRANSFORMERS = "transformers 5.23, models/"
_MEGATRON = "Megatron Core 0.14, megatron/core/"
_ENGINE = "Transformer Engine 2"
_LIGER = "Liger Kernel 0.8.5, ops/"


def decoder_part(
    block: Block, hidden_size: int, component: Mixer | FeedForward, made: Implementation, *, drops: bool = False
) -> Part:
    """The kernels of one sublayer of ``block``: norm, ``component`` and residual connection.

    Args:
        block: the block that it belongs to.
        hidden_size: elements of the residual stream per token.
        component: the block's mixer or its feed-forward part.
        made: the implementation: as ``transformers`` runs it, or with fused kernels.
        drops: the last product of an MLP does not keep its input for backward, which so cannot release it.
    """
    rows = (_Eager if made.eager else _Fused)(block, hidden_size, made)
    match component:
        case Attention():
            inner = rows.attention(component)
        case LatentAttention():
            inner = rows.latent_attention(component)
        case LinearAttention():
            inner = rows.linear_attention(component)
        case Mlp():
            inner = rows.mlp(component)
        case Experts():
            inner = rows.experts(component)
    before, after = _places(block.norm_place)
    first, last = (rows.norm(name, hidden_size, block.norm) for name in (_NORM, "norm after"))
    operations = (*[first] * before, *inner, *[last] * after, *rows.residual())
    scores = sum(one.kept_scores > 0 for one in operations)
    forward, backward = rows.workspace(component, drops)
    return Part(operations, forward / hidden_size, backward / hidden_size, scores, _selections(operations))


def both_parts(first: Part, second: Part) -> Part:
    """Two sublayers as one block: while one is computed, the other keeps nothing yet, or nothing more, so that what lives in
    passes of the first takes the place of what the second keeps.
    """
    kept = second.total("kept")
    both = first.selections + tuple(one.after(len(first.operations)) for one in second.selections)
    return Part(
        (*first.operations, *second.operations),
        max(first.forward_workspace - kept, second.forward_workspace),
        max(first.backward_workspace - kept, second.backward_workspace),
        max(first.backward_score_workspace, second.backward_score_workspace),
        core_alone(both),
    )


def norm_part(block: Block, hidden_size: int, norm: Norm, made: Implementation) -> Part:
    """A norm by itself, as ``transformers`` runs it, in a model of such blocks."""
    return Part((_Eager(block, hidden_size, made).norm(_NORM, hidden_size, norm),))


def frozen_part(part: Part) -> Part:
    """``part`` with frozen norms: those of a kernel per operation keep what is multiplied by the weights only for the weights'
    gradient (``LlamaRMSNorm``: in 16 bit after the cast, ``Olmo2RMSNorm``: in fp32 before it).
    """

    def without_scaled(one: Operation) -> Operation:
        return replace(one, kept=0, kept_fp32=one.kept_fp32 - (not one.kept and one.kept_fp32) / 2) if one.kept_fp32 else one

    operations = (without_scaled(one) if one.name.startswith(_NORM) else one for one in part.operations)
    return replace(part, operations=tuple(operations))


def widened_part(part: Part) -> Part:
    """``part`` where norms and the residual stream are in fp32, under autocast: products and attention alone get casts to 16
    bit (PyTorch's lists of operations for autocast), and a linear layer in NF4 returns its result as it got its input
    (bitsandbytes, ``nn/modules.py``: ``Linear4bit.forward``).
    """
    narrow = {*INPUT_ROWS, FLASH, _RESULT_COPY, "repeated keys and values", _CORE}

    def wide(one: Operation) -> Operation:
        return replace(
            one,
            forward=0,
            backward=0,
            kept=0,
            casts=0,
            forward_fp32=one.forward_fp32 + one.forward,
            backward_fp32=one.backward_fp32 + one.backward,
            kept_fp32=one.kept_fp32 + one.kept,
        )

    return replace(part, operations=tuple(one if one.name in narrow else wide(one) for one in part.operations))


def masked_part(part: Part, block: Block, hidden_size: int, mask: AttentionMask | None) -> Part:
    """``part`` whose fused attention gets a mask, if there is one. Then ``transformers`` repeats keys and values for their
    query heads (``use_gqa_in_sdpa``), and PyTorch makes of a mask of booleans one that is added to the scores, which backward
    needs (``convert_boolean_attn_mask`` in ``attention.cpp``) and all heads share.
    """
    a = block.mixer
    if mask is None or not isinstance(a, (Attention, LatentAttention)):
        return part
    made = (mask is AttentionMask.BOOL) / a.heads
    q, kv, joint = (a.query_size, a.key_value_size, a.joint) if isinstance(a, Attention) else (0, 0, None)
    grouped = q != kv
    kept = grouped * (q - 3 * kv if joint else 2 * (q - kv)) / hidden_size
    copied = grouped * 2 * (q + kv) / hidden_size

    def masked(one: Operation) -> Operation:
        return replace(
            one,
            forward=one.forward + copied,
            backward=one.backward + copied,
            forward_scores=1.5 * made,
            kept=one.kept + kept,
            kept_scores=made,
            forward_kernels=one.forward_kernels + 2 * grouped + 2 * (made > 0),
            backward_kernels=one.backward_kernels + 2 * grouped,
        )

    def without_copy(one: Operation) -> Operation:  # these kernels do not lay their result out as queries are
        return replace(one, forward=0, kept=0, forward_kernels=0) if one.name == _RESULT_COPY else one

    operations = (masked(one) if one.name == FLASH else without_copy(one) for one in part.operations)
    return replace(part, operations=tuple(operations))


def _places(place: NormPlace) -> tuple[int, int]:
    """How many norms there are before and after."""
    return int(place is not NormPlace.AFTER), int(place is not NormPlace.BEFORE)


#: Operations that selective recomputation repeats. With scores in memory: the core of attention (Korthikanti et al. 2022,
#: section 5). Elsewhere what is elementwise: results of norms and of activation functions (Megatron Core,
#: ``--recompute-modules layernorm mlp_act``), which the products after them keep.
_CORE, _NORM, _ACTIVATION = "scores", "norm", "activation"
_RESULT_COPY = "copy of the result"


def _selections(operations: tuple[Operation, ...]) -> tuple[Selection, ...]:
    core = [Selection((row,), (row,), products=True) for row, one in enumerate(operations) if one.name == _CORE]
    followed = (row for row, one in enumerate(operations[:-1]) if one.name in (_NORM, _ACTIVATION))
    return core_alone((*core, *(Selection((row + 1,), (row,)) for row in followed if operations[row + 1].kept)))


class _Rows(ABC):
    """Makes rows. Columns are given in elements per token (of scores: in tensors), and counted in hidden tensors."""

    def __init__(self, block: Block, hidden_size: int, made: Implementation) -> None:
        self.block, self.h, self.made, self.flash = block, hidden_size, made, made.flash

    def row(self, name: str, source: str, kernels: tuple[int, int], **columns: float) -> Operation:
        """An operation with so many kernels forward and backward."""
        counted = {key: value if "score" in key else value / self.h for key, value in columns.items()}
        return Operation(name, source, **counted, forward_kernels=kernels[0], backward_kernels=kernels[1])

    @abstractmethod
    def norm(self, name: str, size: int, norm: Norm) -> Operation:
        """A norm over ``size`` elements of each token."""

    @abstractmethod
    def residual(self) -> Iterable[Operation]:
        """The end of a sublayer: dropout if there is one, and the residual connection."""

    @abstractmethod
    def attention(self, a: Attention) -> Iterable[Operation]:
        """Softmax attention."""

    @abstractmethod
    def latent_attention(self, a: LatentAttention) -> Iterable[Operation]:
        """Attention through latent vectors."""

    @abstractmethod
    def linear_attention(self, a: LinearAttention) -> Iterable[Operation]:
        """Gated DeltaNet."""

    @abstractmethod
    def mlp(self, mlp: Mlp) -> Iterable[Operation]:
        """An MLP."""

    @abstractmethod
    def experts(self, experts: Experts) -> Iterable[Operation]:
        """Router, experts, and the MLP beside them."""

    @abstractmethod
    def workspace(self, component: Mixer | FeedForward, drops: bool) -> tuple[float, float]:
        """Elements per token that live only during forward and backward: outputs, their gradients and what is between."""


class _Eager(_Rows):
    """A kernel per operation, as ``transformers`` runs it. Attention without FlashAttention repeats keys and values for their
    query heads, and softmax works in fp32. Fused norms, rotations and activation functions write their gradients in the place
    of what they get; in fms-acceleration (Unsloth's) rotations have a kernel for queries and one for keys.
    """

    def norm(self, name: str, size: int, norm: Norm) -> Operation:
        if norm is Norm.LAYER:
            return self.row(name, "aten layer_norm_kernel.cu", (1, 2), forward=2 * size, backward=5 * size, kept=size)
        if self.made.fuses_norms:
            return self.row(name, f"{_LIGER}rms_norm", (1, 2), forward=2 * size, backward=3 * size, kept=size)
        columns = {"forward_fp32": 5, "backward_fp32": 17, "forward": 2, "backward": 6, "kept_fp32": 1, "kept": 1, "casts": 2}
        if norm is Norm.RMS_FP32:
            columns = {"forward_fp32": 7, "backward_fp32": 23, "kept_fp32": 2, "casts": 2}
        source = f"{_TRANSFORMERS}llama: LlamaRMSNorm" if norm is Norm.RMS else f"{_TRANSFORMERS}olmo2: Olmo2RMSNorm"
        return self.row(
            name, source, (8, 16) if norm is Norm.RMS else (9, 16), **{key: value * size for key, value in columns.items()}
        )

    def residual(self) -> Iterable[Operation]:
        if self.block.dropout:
            yield self.row("dropout", "aten Dropout.cu", (1, 1), forward=2 * self.h, backward=2 * self.h, kept_mask=self.h)
        yield self.row("residual", f"{_TRANSFORMERS}llama: LlamaDecoderLayer", (1, 1), forward=3 * self.h, backward=3 * self.h)

    def attention(self, a: Attention) -> Iterable[Operation]:
        q, kv, h = a.query_size, a.key_value_size, self.h
        source = f"{_TRANSFORMERS}llama: LlamaAttention"
        parts = q + 2 * kv
        # Backward adds three gradients of the input, or puts those of the parts together: each in zeros, or all at once.
        gathered, kernels = {
            None: (6 * h, 8),
            JointProduct.SLICES: (13 * parts, 8),
            JointProduct.SPLIT: (2 * parts, 3 + a.bias),
        }[a.joint]
        gate = q * a.gated
        yield self.row("first product", source, (1 if a.joint else 3, kernels), backward=gathered + parts * a.bias, kept=h)
        for size, all_heads in ((q, a.whole_norm), (kv, a.whole_norm), (q, a.head_norm), (kv, a.head_norm)):
            if all_heads:
                yield self.norm("norm of queries or keys", size, self.block.norm)
        if a.rotary and self.made.fuses_norms:
            count = 1 if self.made.fuses_activation else 2
            yield self.row("rotation", f"{_LIGER}rope", (count, count), forward=2 * (q + kv), backward=2 * (q + kv))
        elif a.rotary:
            yield self.row(
                "rotation", f"{source}, apply_rotary_pos_emb", (10, 18), forward=10 * (q + kv), backward=15 * (q + kv)
            )
        values = parts if a.joint else kv  # which they are a part of
        yield from self.core(a, q + kv + values, q, repeated=2 * (q - kv))
        if gate:
            yield self.row(
                "gate", f"{_TRANSFORMERS}qwen3_next: Qwen3NextAttention", (2, 4), forward=5 * q, backward=9 * q, kept=2 * q
            )
        yield self.row(
            "last product",
            source,
            (1, 2 + a.output_bias),
            backward=h * a.output_bias,
            kept=q if self.core_copies or gate else 0,
        )

    @property
    def core_copies(self) -> bool:
        """Without FlashAttention the result is copied, so that heads are side by side."""
        return not self.flash

    def core(self, a: Attention | LatentAttention, kept: int, result: int, repeated: int) -> Iterable[Operation]:
        """Scores, softmax, and the queries, keys and values that it keeps; of which some are repeated for their query heads."""
        if self.flash:
            both = kept + result
            source = "aten flash_attn (Dao 2023)"
            copies = 0 if self.made.fuses_norms else 2  # of gradients that rotations take apart
            yield self.row(
                FLASH,
                source,
                (1, 3 + copies),
                forward=both,
                backward=(2 + copies / 2) * both,
                kept=both,
                kept_fp32=a.heads,
            )
            if isinstance(a, Attention) and a.joint is JointProduct.SLICES:
                # Its result lies as its queries do, which were put together head by head.
                yield self.row(_RESULT_COPY, source, (1, 0), forward=2 * result, kept=result)
            return
        source = f"{_TRANSFORMERS}llama: eager_attention_forward"
        yield self.row(
            "repeated keys and values", source, (2, 2), forward=2 * repeated, backward=3 * repeated, kept=kept + repeated
        )
        if isinstance(a, Attention) and a.soft_cap:
            yield self.row("soft cap", source, (3, 3), forward_scores=6, backward_scores=7, kept_scores=1)
        # Scaled, masked and, unless there are sinks beside them, cast to fp32 for softmax and back.
        casts = int(not (isinstance(a, Attention) and a.sinks))
        yield self.row(_CORE, source, (7, 7), forward_scores=12, backward_scores=11, kept_scores=1, kept_score_casts=casts)
        yield self.row(_RESULT_COPY, source, (1, 1), forward=2 * result, backward=2 * result)

    def latent_attention(self, a: LatentAttention) -> Iterable[Operation]:
        source, h = f"{_TRANSFORMERS}deepseek_v3: DeepseekV3Attention", self.h
        rank, latent, rotated = a.query_rank or 0, a.key_value_rank, a.heads * a.rope_dim
        values = a.heads * (a.nope_dim + a.value_dim)  # with half of the keys, which they are a part of
        yield self.row("first product", source, (2, 6), backward=3 * h, kept=h)
        for size in (rank, latent):
            if size:
                yield self.norm("norm of a latent vector", size, self.block.norm)
                yield self.row("product of a latent vector", source, (1, 2), kept=size)
        yield self.row("rotation", f"{source}, interleaved", (14, 24), forward=14 * rotated, backward=20 * rotated)
        q = a.query_size
        yield self.row("queries and keys put together", source, (3, 8), forward=4 * q, backward=6 * q + 3 * values)
        yield from self.core(a, 2 * q + values, a.value_size, repeated=0)
        yield self.row("last product", source, (1, 2), kept=a.value_size if self.core_copies else 0)

    def linear_attention(self, a: LinearAttention) -> Iterable[Operation]:
        source = f"{_TRANSFORMERS}qwen3_next: Qwen3NextGatedDeltaNet"
        mixed, values, keys = 2 * a.key_size + a.value_size, a.value_size, a.value_heads * a.key_dim
        chunks, states = a.value_heads * LINEAR_CHUNK, keys * a.value_dim / LINEAR_CHUNK
        yield self.row("first product", source, (2, 5), backward=3 * self.h, kept=self.h)
        yield self.row("convolution", source, (4, 8), forward=8 * mixed, backward=12 * mixed, kept=2 * mixed)
        yield self.row(
            "gated delta rule",
            f"{source}, torch_chunk_gated_delta_rule",
            (60, 90),
            forward_fp32=20 * keys + 18 * chunks + 20 * values,
            backward_fp32=80 * keys + 70 * chunks + 65 * values,
            kept_fp32=8 * keys + 5 * chunks + 4 * values + states + 9 * a.value_heads,
        )
        yield self.row(
            "gated norm", source, (12, 24), forward=15 * values, backward=25 * values, kept=2 * values, kept_fp32=2 * values
        )
        yield self.row("last product", source, (1, 2), kept=values)

    def mlp(self, mlp: Mlp, rows_per_token: int = 1) -> Iterable[Operation]:
        """An MLP, or the experts that a token goes to."""
        m, n, h = mlp.width, rows_per_token, self.h
        source = f"{_TRANSFORMERS}llama: LlamaMLP"
        apart = 0 if not mlp.gated or n > 1 else 4 * m if mlp.joint else 3 * h
        yield self.row(
            "first product", source, (1 + mlp.gated, 3 + 2 * mlp.gated), backward=n * (apart + mlp.up * mlp.bias), kept=n * h
        )
        forward, backward, kept, kernels = _ACTIVATIONS[mlp.activation]
        if self._fuses(mlp):
            forward, backward, kept, kernels = 3, 5, 2, (1, 1)
        elif mlp.gated and mlp.activation is not Activation.CLAMPED_SWIGLU:  # and the product with the other half
            forward, backward, kept, kernels = forward + 3, backward + 6, kept + 2, (kernels[0] + 1, kernels[1] + 2)
        yield self.row(_ACTIVATION, source, kernels, forward=n * forward * m, backward=n * backward * m, kept=n * kept * m)
        yield self.row("last product", source, (1, 2 + mlp.bias), backward=n * h * mlp.bias, kept=n * m)

    def _fuses(self, mlp: Mlp) -> bool:
        """Whether the activation function and the product with the other half are one kernel; experts have their own."""
        fused = mlp.gated and mlp.activation in (Activation.SILU, Activation.GELU_TANH)
        return self.made.fuses_activation and fused and mlp is self.block.feed_forward

    def experts(self, experts: Experts) -> Iterable[Operation]:
        source, h, n = "transformers 5.23, integrations/moe.py: grouped_mm_experts_forward", self.h, experts.active
        cast = h * experts.router_fp32
        yield self.row(
            "router",
            source,
            (24, 20) if experts.router_fp32 else (12, 12),
            backward=3 * h,
            kept=h,
            kept_fp32=experts.count * (2 if experts.router_fp32 else 1),
            kept_mask=_INDEX_BYTES * n,
            casts=cast,
            kept_casts=cast,
        )
        yield self.row("gather", source, (2, 2), forward=2 * n * h, backward=8 * n * h + h)
        yield from self.mlp(experts.expert, n)
        wide = experts.weights_fp32
        columns = (
            {"forward_fp32": 4, "backward_fp32": 10, "forward": 1, "backward": 3} if wide else {"forward": 5, "backward": 8}
        )
        weighted = {key: value * n * h for key, value in columns.items()}
        yield self.row("weights and sum", source, (5, 7), **weighted, kept=n * h)
        if experts.shared is not None:
            yield from (_without_input(one) for one in self.mlp(experts.shared))
            gated = experts.shared_gate * h
            yield self.row(
                "shared expert",
                source,
                (1 + 3 * experts.shared_gate, 1),
                forward=3 * h + 3 * gated,
                backward=6 * gated,
                kept=gated,
            )

    def workspace(self, component: Mixer | FeedForward, drops: bool) -> tuple[float, float]:
        h = self.h
        match component:
            case Attention():
                inner = (2 if self.made.fuses_norms else 3) * (component.query_size + component.key_value_size)
            case LatentAttention():
                inner = 3 * component.query_size
            case LinearAttention():
                inner = 8 * component.value_heads * LINEAR_CHUNK
            case Mlp():
                inner = (1 if self._fuses(component) else 2 + (drops and component.gated)) * component.width
            case Experts():
                inner = 2 * component.active * (component.expert.width + h)
        in_fp32 = self.block.norm is not Norm.LAYER and not self.made.fuses_norms
        least = 2 if self.made.fuses_norms else 3 + in_fp32
        again = component.width if drops and isinstance(component, Mlp) and component.gated else 0
        return least * h + again, max((2 + in_fp32) * h + inner, 6 * h * in_fp32)


#: Of an activation function by itself: accesses forward and backward, tensors kept, and kernels, per element that it works on.
_ACTIVATIONS: dict[Activation, tuple[float, float, float, tuple[int, int]]] = {
    Activation.GELU_NEW: (18, 28, 4, (8, 12)),  # eight kernels, as kernels.py lists them
    Activation.GELU: (2, 3, 1, (1, 1)),
    Activation.GELU_TANH: (2, 3, 1, (1, 1)),
    Activation.SILU: (2, 3, 1, (1, 1)),
    Activation.RELU: (2, 3, 0, (1, 1)),  # keeps its result, which the product after it keeps anyway
    Activation.CLAMPED_SWIGLU: (20, 36, 6, (8, 16)),  # gpt_oss: GptOssExperts, both halves
}


class _Fused(_Rows):
    """One kernel for each norm, rotation, activation and attention."""

    def norm(self, name: str, size: int, norm: Norm) -> Operation:
        return self.row(name, f"{_ENGINE}, normalization", (1, 2), forward=2 * size, backward=5 * size, kept=size)

    def residual(self) -> Iterable[Operation]:
        mask = self.h * self.block.dropout
        source = f"{_MEGATRON}fusions/fused_bias_dropout.py"
        yield self.row("bias, dropout, residual", source, (1, 2), forward=3 * self.h, backward=3 * self.h, kept_mask=mask)
        yield self.row("sum of residual gradients", source, (0, 1), backward=3 * self.h)

    def attention(self, a: Attention) -> Iterable[Operation]:
        q, kv, source = a.query_size, a.key_value_size, f"{_MEGATRON}transformer/attention.py"
        biases = (q + 2 * kv) * a.bias
        yield self.row("first product", source, (1, 2 + a.bias), backward=2 * (q + 2 * kv) + biases, kept=self.h)
        for size in (q, kv) if a.head_norm or a.whole_norm else ():
            yield self.norm("norm of queries or keys", size, self.block.norm)
        if a.rotary:
            rope = f"{_ENGINE}, fused_rope"
            yield self.row("rotation", rope, (2, 2), forward=2 * (q + kv), backward=2 * (q + kv))
        yield from self.core(2 * q + 2 * kv, a.heads)
        if a.gated:
            yield self.row("gate", source, (1, 1), forward=3 * q, backward=5 * q, kept=2 * q)
        yield self.row("last product", source, (1, 2), kept=q if a.gated else 0)

    def core(self, kept: float, heads: int) -> Iterable[Operation]:
        """Attention, which keeps queries, keys, values and its result."""
        if self.flash:
            source = "FlashAttention (Dao 2023), algorithms 1 and 2"
            yield self.row(FLASH, source, (1, 3), forward=kept, backward=2 * kept, kept=kept, kept_fp32=heads)
            return
        source = f"{_MEGATRON}fusions/fused_softmax.py"
        yield self.row("copies for the products", source, (1, 4), forward=kept, backward=kept, kept=kept)
        yield self.row(_CORE, source, (3, 6), forward_scores=2, backward_scores=3, kept_scores=1)

    def latent_attention(self, a: LatentAttention) -> Iterable[Operation]:
        source, rank, latent = f"{_MEGATRON}transformer/multi_latent_attention.py", a.query_rank or 0, a.key_value_rank
        yield self.row("first product", source, (2, 5), backward=3 * self.h, kept=self.h)
        for size in (rank, latent):
            if size:
                yield self.norm("norm of a latent vector", size, self.block.norm)
                yield self.row("product of a latent vector", source, (1, 2), kept=size)
        both = a.query_size + a.heads * (a.nope_dim + a.value_dim)
        yield self.row(
            "rotation", f"{_MEGATRON}fusions/fused_mla_yarn_rope_apply.py", (2, 2), forward=2 * both, backward=2 * both
        )
        yield from self.core(2 * a.query_size + 2 * a.value_size, a.heads)
        yield self.row("last product", source, (1, 2))

    def linear_attention(self, a: LinearAttention) -> Iterable[Operation]:
        source = "flash-linear-attention, fla/layers/gated_deltanet.py"
        mixed, values, heads = 2 * a.key_size + a.value_size, a.value_size, a.value_heads
        inside = heads * LINEAR_CHUNK
        yield self.row("first product", source, (2, 5), backward=3 * self.h, kept=self.h)
        yield self.row("convolution", source, (3, 6), forward=2 * mixed, backward=5 * mixed, kept=2 * mixed)
        rule = "fla/ops/gated_delta_rule/chunk.py"  # computes its states again in backward
        yield self.row(
            "gated delta rule", rule, (8, 16), forward=4 * mixed, backward=10 * mixed, kept=inside + values, kept_fp32=2 * heads
        )
        yield self.row("gated norm", source, (1, 2), forward=3 * values, backward=6 * values, kept=values)
        yield self.row("last product", source, (1, 2), kept=values)

    def mlp(self, mlp: Mlp, rows_per_token: int = 1) -> Iterable[Operation]:
        """An MLP, or the experts that a token goes to."""
        m, n, up = mlp.width, rows_per_token, mlp.up
        source = f"{_MEGATRON}transformer/mlp.py"
        yield self.row("first product", source, (1, 2), kept=n * self.h)
        fused = f"{_MEGATRON}fusions/fused_bias_swiglu.py"
        yield self.row(_ACTIVATION, fused, (1, 1 + mlp.bias), forward=n * (up + m), backward=n * (2 * up + m), kept=n * up)
        yield self.row("last product", source, (1, 2), kept=n * m)

    def experts(self, experts: Experts) -> Iterable[Operation]:
        source, h, n = f"{_MEGATRON}transformer/moe/moe_utils.py", self.h, experts.active
        yield self.row(
            "router", source, (4, 6), backward=3 * h, kept=h, kept_fp32=2 * experts.count, kept_mask=_INDEX_BYTES * n
        )
        yield self.row("permute", source, (2, 2), forward=n * h + h, backward=n * h + h)
        yield from self.mlp(experts.expert, n)
        yield self.row("unpermute", source, (2, 2), forward=n * h + h, backward=2 * n * h + h, kept=n * h)
        if experts.shared is not None:
            yield from (_without_input(one) for one in self.mlp(experts.shared))
            yield self.row("shared expert", source, (1, 1), forward=3 * h, kept=h * experts.shared_gate)

    def workspace(self, component: Mixer | FeedForward, drops: bool) -> tuple[float, float]:
        h = self.h
        match component:
            case Attention():
                inner = 2 * (component.query_size + component.key_value_size)
            case LatentAttention():
                inner = 2 * component.query_size
            case LinearAttention():
                inner = 2 * (2 * component.key_size + component.value_size)
            case Mlp():
                inner = component.up
            case Experts():
                inner = component.active * (component.expert.up + h)
        return 2 * h, (1.5 if not self.block.dropout else 2.5) * h + inner


def _without_input(one: Operation) -> Operation:
    """The router keeps that already."""
    return replace(one, kept=one.kept - 1) if one.name == "first product" else one
