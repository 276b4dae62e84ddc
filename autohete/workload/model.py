"""The structure of a transformer: a chain of blocks that may differ, each a token mixer and an MLP.

Counts parameters and FLOPs. Sizes are those of one token; products are matrix products with the weights. ``h`` is the hidden
size, ``s`` the sequence length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import lru_cache

from autohete.errors import InputError, check_fields


class Norm(StrEnum):
    """The normalisation of a block: LayerNorm has a weight and a bias, RMSNorm a weight alone.

    ``RMS_FP32`` multiplies by its weight in fp32, ``RMS`` after the cast back.
    """

    LAYER = "layer"
    RMS = "rms"
    RMS_FP32 = "rms_fp32"

    def parameters(self, size: int) -> int:
        """Parameters of a norm over ``size`` elements."""
        return 2 * size if self is Norm.LAYER else size


class NormPlace(StrEnum):
    """Where a sublayer has norms: before it, after it (OLMo 2), or both (Gemma 2)."""

    BEFORE = "before"
    AFTER = "after"
    BOTH = "both"


class Activation(StrEnum):
    """The activation function of an MLP, by its name in ``config.json``; the last one is gpt-oss's, which has no name there."""

    GELU_NEW = "gelu_new"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"
    RELU = "relu"
    SILU = "silu"
    CLAMPED_SWIGLU = "clamped_swiglu"


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product with weights: ``rows`` of each token times ``inner x columns``, by one of ``matrices`` such matrices."""

    columns: int
    inner: int
    rows: int = 1
    matrices: int = 1

    @property
    def parameters(self) -> int:
        """Elements of all its matrices."""
        return self.columns * self.inner * self.matrices

    @property
    def token_flops(self) -> int:
        """FLOPs for one token, forward."""
        return 2 * self.rows * self.columns * self.inner


class Component(ABC):
    """A part of a block: its matrix products, and its other parameters and activations.

    Every component is a frozen dataclass; two with equal figures are alike.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for field in fields(self):  # type: ignore[arg-type]  # every component is a dataclass
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise InputError(f"{field.name} is {value}: it must be at least 1")

    @abstractmethod
    def products(self, hidden_size: int) -> tuple[Product, ...]:
        """Its matrix products with weights, in the order of forward."""

    @abstractmethod
    def vectors(self, hidden_size: int) -> int:
        """Parameters that are in no product: biases, its own norms and the like."""

    def core_flops(self, sequence_length: int) -> int:
        """FLOPs of products without weights for one token, forward, without a causal mask (as FlashAttention's authors and
        ``torch.utils.flop_counter`` count)."""
        return 0

    def flash_flops(self, sequence_length: int) -> float:
        """Those of ``core_flops`` that a fused kernel computes, which skips what the causal mask hides."""
        return self.core_flops(sequence_length)

    def parameters(self, hidden_size: int) -> int:
        """All its parameters."""
        return sum(product.parameters for product in self.products(hidden_size)) + self.vectors(hidden_size)


#: Queries that FlashAttention-2 works on at a time (Dao-AILab/flash-attention v2.7.4, ``csrc/flash_attn/src/
#: flash_fwd_launch_template.h``, ``kBlockM`` for heads of 64 and 128 elements).
_QUERY_TILE = 128


def causal_tokens(sequence_length: int, window: int | None = None) -> float:
    """Tokens that a query is multiplied with in a causal fused kernel, on average.

    A tile of queries takes all keys up to its last query; in a sliding window it begins with those of its first one.
    """
    reach = sequence_length if window is None else min(window, sequence_length)
    seen = reach - reach**2 / (2 * sequence_length)
    cut = _QUERY_TILE / 2 * (1 + (reach < sequence_length))
    return min(seen + cut, sequence_length)


class JointProduct(StrEnum):
    """How one product for queries, keys and values is taken apart: by three slices, whose gradients backward writes into zeros
    and adds (Phi-3), or by a split, whose gradients it concatenates (the first Qwen).
    """

    SLICES = "slices"
    SPLIT = "split"


@dataclass(frozen=True, slots=True)
class Attention(Component):
    """Softmax attention with ``heads`` query heads that share ``key_value_heads`` (Ainslie et al. 2023).

    Args:
        heads, key_value_heads, head_dim: of queries; of keys and values; elements of each.
        window: tokens that a token attends to (sliding window); None: all.
        bias, output_bias: of the projections to queries, keys and values; of the one back.
        head_norm: queries and keys are normalised head by head (Qwen3, Gemma 3).
        whole_norm: they are normalised over all heads (OLMo 2).
        gated: the result is multiplied by a gate that comes out of the query projection (Qwen3-Next).
        sinks: each head has a learned logit that no token takes (gpt-oss).
        rotary: positions rotate queries and keys (Su et al. 2021).
        soft_cap: scores are bounded by a hyperbolic tangent (Gemma 2).
        joint: how the one product for queries, keys and values is taken apart; None: there are three.
    """

    heads: int
    key_value_heads: int
    head_dim: int
    window: int | None = None
    bias: bool = False
    output_bias: bool = False
    head_norm: bool = False
    whole_norm: bool = False
    gated: bool = False
    sinks: bool = False
    rotary: bool = True
    soft_cap: bool = False
    joint: JointProduct | None = None

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.key_value_heads else f"{self.heads}/{self.key_value_heads}"
        window = "" if self.window is None else f" over {self.window} tokens"
        return f"{heads} heads x {self.head_dim}{window}"

    @property
    def query_size(self) -> int:
        """Elements of the queries of one token."""
        return self.heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Elements of the keys of one token, and of its values."""
        return self.key_value_heads * self.head_dim

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        queries = self.query_size * (2 if self.gated else 1)
        return Product(queries + 2 * self.key_value_size, hidden_size), Product(hidden_size, self.query_size)

    def vectors(self, hidden_size: int) -> int:
        biases = self.products(hidden_size)[0].columns * self.bias + hidden_size * self.output_bias
        norms = 2 * self.head_dim * self.head_norm + (self.query_size + self.key_value_size) * self.whole_norm
        return biases + norms + self.heads * self.sinks

    def core_flops(self, sequence_length: int) -> int:
        seen = sequence_length if self.window is None else min(self.window, sequence_length)
        return 4 * seen * self.query_size

    def flash_flops(self, sequence_length: int) -> float:
        return 4 * causal_tokens(sequence_length, self.window) * self.query_size


@dataclass(frozen=True, slots=True)
class LatentAttention(Component):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values come out of a small latent vector.

    Args:
        heads: of queries, keys and values alike.
        query_rank: size of the queries' latent vector; None: they are projected directly.
        key_value_rank: size of the latent vector of keys and values.
        nope_dim, rope_dim: elements of each query and key without and with a rotary position.
        value_dim: elements of each value.
        bias: of the projections into the latent vectors and of the one back.
    """

    heads: int
    query_rank: int | None
    key_value_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool = False

    def __str__(self) -> str:
        return f"{self.heads} latent heads x {self.nope_dim + self.rope_dim}"

    @property
    def query_size(self) -> int:
        """Elements of the queries of one token, and of its keys."""
        return self.heads * (self.nope_dim + self.rope_dim)

    @property
    def value_size(self) -> int:
        """Elements of the values of one token."""
        return self.heads * self.value_dim

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        if self.query_rank is None:
            queries: tuple[Product, ...] = (Product(self.query_size, hidden_size),)
        else:
            queries = (Product(self.query_rank, hidden_size), Product(self.query_size, self.query_rank))
        return (
            *queries,
            Product(self.key_value_rank + self.rope_dim, hidden_size),
            Product(self.heads * (self.nope_dim + self.value_dim), self.key_value_rank),
            Product(hidden_size, self.value_size),
        )

    def vectors(self, hidden_size: int) -> int:
        norms = (self.query_rank or 0) + self.key_value_rank
        biases = (self.query_rank or 0) + self.key_value_rank + self.rope_dim + hidden_size
        return norms + biases * self.bias

    def core_flops(self, sequence_length: int) -> int:
        return 2 * sequence_length * (self.query_size + self.value_size)

    def flash_flops(self, sequence_length: int) -> float:
        return 2 * causal_tokens(sequence_length) * (self.query_size + self.value_size)


#: Tokens that linear attention works on at a time, in transformers and in flash-linear-attention.
LINEAR_CHUNK = 64


@dataclass(frozen=True, slots=True)
class LinearAttention(Component):
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), as Qwen3-Next has it.

    Args:
        key_heads, key_dim: heads of queries and keys, elements of each.
        value_heads, value_dim: of values and of the state.
        convolution: tokens that the causal convolution of queries, keys and values spans.
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    convolution: int

    def __post_init__(self) -> None:
        Component.__post_init__(self)
        if self.value_heads % self.key_heads:
            raise InputError(
                f"{self.value_heads} heads of values share {self.key_heads} heads of keys in linear attention: give a multiple"
            )

    def __str__(self) -> str:
        return f"{self.value_heads}/{self.key_heads} linear heads x {self.value_dim}"

    @property
    def key_size(self) -> int:
        """Elements of the keys of one token, and of its queries."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Elements of the values of one token, and of the gate of its result."""
        return self.value_heads * self.value_dim

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        return (
            Product(2 * self.key_size + 2 * self.value_size, hidden_size),
            Product(2 * self.value_heads, hidden_size),
            Product(hidden_size, self.value_size),
        )

    def vectors(self, hidden_size: int) -> int:
        convolution = self.convolution * (2 * self.key_size + self.value_size)
        return convolution + 2 * self.value_heads + self.value_dim  # decay and its bias for each head; the result's norm

    def core_flops(self, sequence_length: int) -> int:
        """Convolution, and what the chunked delta rule takes (transformers 5, ``torch_chunk_gated_delta_rule``): three products
        and two triangular solves within a chunk, three products with the state.
        """
        convolution = 2 * self.convolution * (2 * self.key_size + self.value_size)
        within = 2 * LINEAR_CHUNK * (2 * self.key_dim + self.value_dim) + LINEAR_CHUNK * (self.key_dim + self.value_dim)
        state = 6 * self.key_dim * self.value_dim
        return convolution + self.value_heads * (within + state)


@dataclass(frozen=True, slots=True)
class Mlp(Component):
    """Two products with an activation function between them, or three with a gate (Shazeer 2020).

    Args:
        width: elements between the products.
        activation: the function.
        gated: half of what goes up is multiplied by the activation of the other half.
        bias: of all products.
        joint: one product computes both halves (Phi-3).
    """

    width: int
    activation: Activation
    gated: bool = True
    bias: bool = False
    joint: bool = False

    def __str__(self) -> str:
        return f"{'gated ' if self.gated else ''}MLP {self.width}"

    @property
    def up(self) -> int:
        """Elements of one token that go up."""
        return self.width * (2 if self.gated else 1)

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        return Product(self.up, hidden_size), Product(hidden_size, self.width)

    def vectors(self, hidden_size: int) -> int:
        return (self.up + hidden_size) * self.bias


class ExpertLoop(StrEnum):
    """How a loop of ``transformers`` 4 over experts takes what one of them needs."""

    #: Each expert is a module. Its rows are taken from all tokens (Mixtral, Qwen, DeepSeek: ``MixtralSparseMoeBlock``).
    MODULES = "modules"
    #: The same, but a tensor of indices takes its matrices from those of all experts, and copies them (``GptOssExperts``).
    COPIES = "copies"
    #: Rows are sorted by expert and split once; a number takes its matrices, as views (``GraniteMoeParallelExperts``).
    VIEWS = "views"


@dataclass(frozen=True, slots=True)
class Experts(Component):
    """A mixture of experts: a router sends each token to some of many MLPs (Shazeer et al. 2017).

    Args:
        expert: one of them.
        count, active: how many there are, and to how many a token goes.
        router_bias: whether the router has a bias.
        shared: the MLP that every token goes through beside its experts, or None.
        shared_gate: the result of that MLP is weighted by a gate of its own (Qwen).
        router_fp32: the router works in fp32 (DeepSeek).
        weights_fp32: experts' results are weighted in fp32.
        loop: how a loop over them takes one after another.
        held: how many of them a GPU has, which works for as many others in turn; None: all.
    """

    expert: Mlp
    count: int
    active: int
    router_bias: bool = False
    shared: Mlp | None = None
    shared_gate: bool = False
    router_fp32: bool = False
    weights_fp32: bool = False
    loop: ExpertLoop = ExpertLoop.MODULES
    held: int | None = None

    def __post_init__(self) -> None:
        Component.__post_init__(self)
        if self.active > self.count:
            raise InputError(f"each token goes to {self.active} of {self.count} experts: it can go to all of them at most")

    def __str__(self) -> str:
        shared = "" if self.shared is None else f" + {self.shared.width}"
        return f"{self.active} of {self.count} experts x {self.expert.width}{shared}"

    def products(self, hidden_size: int) -> tuple[Product, ...]:
        up, down = self.expert.products(hidden_size)
        routed = [Product(p.columns, p.inner, self.active, self.here) for p in (up, down)]
        shared = self.shared.products(hidden_size) if self.shared else ()
        gate = (Product(1, hidden_size),) if self.shared_gate else ()
        return (Product(self.count, hidden_size), *routed, *shared, *gate)

    def vectors(self, hidden_size: int) -> int:
        shared = self.shared.vectors(hidden_size) if self.shared else 0
        return self.here * self.expert.vectors(hidden_size) + self.count * self.router_bias + shared

    @property
    def here(self) -> int:
        """How many of the experts this GPU has."""
        return self.count if self.held is None else self.held

    def routed_parameters(self, hidden_size: int) -> int:
        """Parameters of the experts that this GPU has, without those that every token goes through."""
        return self.here * self.expert.parameters(hidden_size)


#: Token mixers.
Mixer = Attention | LatentAttention | LinearAttention
#: Parts that compute each token by itself.
FeedForward = Mlp | Experts


@dataclass(frozen=True, slots=True)
class Block:
    """A transformer block: a mixer and a feed-forward part, each with its norms and a residual connection.

    Args:
        mixer, feed_forward: its parts.
        norm: of what kind its norms are.
        norm_place: where each of its two sublayers has them.
        dropout: the results of both sublayers, and attention, are dropped out (GPT-2).
    """

    mixer: Mixer
    feed_forward: FeedForward
    norm: Norm
    norm_place: NormPlace = NormPlace.BEFORE
    dropout: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        return f"{self.mixer}, {self.feed_forward}"

    def norm_parameters(self, hidden_size: int) -> int:
        """Parameters of the norms of one of its two sublayers."""
        return (2 if self.norm_place is NormPlace.BOTH else 1) * self.norm.parameters(hidden_size)


@dataclass(frozen=True, slots=True)
class Architecture:
    """All that a model is beside the sizes that every transformer has.

    Args:
        blocks: each block of the model, in order; a longer model repeats them, a shorter one has the first ones.
        final_norm: the norm before the head.
        positions: rows of learned positions that the embedding has beside its tokens; 0: it has none.
        first_position: the row of a sequence's first token.
    """

    blocks: tuple[Block, ...]
    final_norm: Norm
    positions: int = 0
    first_position: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.blocks:
            raise InputError("blocks is empty: give at least one block")


@lru_cache
def gpt2_block(hidden_size: int, heads: int) -> Block:
    """A block of GPT-2 (Radford et al. 2019), whose MLP is four times as wide as the model."""
    attention = Attention(heads, heads, hidden_size // heads, bias=True, output_bias=True, rotary=False)
    return Block(attention, Mlp(4 * hidden_size, Activation.GELU_NEW, gated=False, bias=True), Norm.LAYER, dropout=True)
