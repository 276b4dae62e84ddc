"""Families of models by the keys of their ``config.json``.

Each family is one class: its fields are the keys that it reads, with the defaults that ``transformers`` 5 has for keys that
published files leave out, and composes each block of its parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from autohete.errors import InputError
from autohete.workload.model import (
    Activation,
    Architecture,
    Attention,
    Block,
    ExpertLoop,
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

#: Above this a size is a typing mistake.
_LARGEST = 100_000_000
#: More blocks than any published model has.
_MOST_BLOCKS = 256

#: Keys that Llama's code reads, and that of several relatives does not.
_BIASES = frozenset({"attention_bias", "mlp_bias"})
_MLP_BIAS = frozenset({"mlp_bias"})

Size = Annotated[int, Field(ge=1, le=_LARGEST)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
#: Kinds of blocks by ``layer_types``: with softmax attention alone, and with linear attention.
SoftmaxTypes = list[Literal["full_attention", "sliding_attention"]]
LinearTypes = list[Literal["full_attention", "linear_attention"]]
T = TypeVar("T")


class Family(BaseModel, ABC):
    """Fields of all families: sizes of the whole model."""

    # Validators are built on first use: a command needs at most one family, and building them all delays every start.
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, populate_by_name=True, defer_build=True)

    hidden_size: Size
    num_hidden_layers: Annotated[int, Field(ge=1, le=_MOST_BLOCKS)]
    num_attention_heads: Size
    vocab_size: Size
    tie_word_embeddings: bool = False

    @abstractmethod
    def mixer(self, layer: int) -> Mixer:
        """The token mixer of block ``layer``."""

    @abstractmethod
    def feed_forward(self, layer: int) -> FeedForward:
        """The MLP or the experts of block ``layer``."""

    #: Keys that the family's code in ``transformers`` does not read.
    ignored: ClassVar[Set[str]] = frozenset()
    #: Of what kind the norms are, and how a block is made; of all blocks.
    norm: ClassVar[Norm] = Norm.RMS
    norm_place: ClassVar[NormPlace] = NormPlace.BEFORE
    dropout: ClassVar[bool] = False
    #: The row of learned positions that a sequence begins with.
    first_position: ClassVar[int] = 0

    def block(self, layer: int) -> Block:
        """Block ``layer``, counted from 0."""
        return Block(self.mixer(layer), self.feed_forward(layer), self.norm, self.norm_place, self.dropout)

    @property
    def positions(self) -> int:
        """Rows of learned positions."""
        return 0

    def architecture(self) -> Architecture:
        """All blocks, and what is before and after them."""
        blocks = tuple(self.block(layer) for layer in range(self.num_hidden_layers))
        return Architecture(blocks, self.norm, self.positions, self.first_position)


class Gpt2(Family):
    """GPT-2 (Radford et al. 2019)."""

    norm: ClassVar[Norm] = Norm.LAYER
    dropout: ClassVar[bool] = True

    hidden_size: Size = Field(alias="n_embd")
    num_hidden_layers: Annotated[int, Field(ge=1, le=_MOST_BLOCKS, alias="n_layer")]
    num_attention_heads: Size = Field(alias="n_head")
    n_positions: Size = 1024
    n_inner: Size | None = None
    activation_function: Activation = Activation.GELU_NEW
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: bool = True

    def mixer(self, layer: int) -> Attention:
        heads = self.num_attention_heads
        return Attention(heads, heads, _head_dim(self), bias=True, output_bias=True, rotary=False)

    def feed_forward(self, layer: int) -> Mlp:
        return Mlp(self.n_inner or 4 * self.hidden_size, self.activation_function, gated=False, bias=True)

    @property
    def positions(self) -> int:
        return self.n_positions


class Opt(Family):
    """OPT (Zhang et al. 2022)."""

    norm: ClassVar[Norm] = Norm.LAYER
    dropout: ClassVar[bool] = True
    first_position: ClassVar[int] = 2  # as fairseq, where it was trained, numbers them

    ffn_dim: Size
    max_position_embeddings: Size
    word_embed_proj_dim: Size | None = None
    do_layer_norm_before: bool = True
    enable_bias: bool = True
    layer_norm_elementwise_affine: Literal[True] = True
    activation_function: Activation = Activation.RELU
    tie_word_embeddings: bool = True

    def mixer(self, layer: int) -> Attention:
        heads = self.num_attention_heads
        return Attention(heads, heads, _head_dim(self), bias=self.enable_bias, output_bias=self.enable_bias, rotary=False)

    def feed_forward(self, layer: int) -> Mlp:
        return Mlp(self.ffn_dim, self.activation_function, gated=False, bias=self.enable_bias)

    @property
    def positions(self) -> int:
        return self.max_position_embeddings + self.first_position

    def architecture(self) -> Architecture:
        if self.word_embed_proj_dim not in (None, self.hidden_size):
            raise InputError(
                f"word_embed_proj_dim is {self.word_embed_proj_dim}, hidden_size {self.hidden_size}: embeddings narrower than "
                "the model are not supported; of the OPT models all but opt-350m have them equal"
            )
        if not self.do_layer_norm_before:
            raise InputError(
                "do_layer_norm_before is false: norms after the sublayers are not supported; of the OPT models all but "
                "opt-350m have them before"
            )
        return super().architecture()


class Llama(Family):
    """Llama 2 and 3 (arXiv 2407.21783), and what its code runs."""

    intermediate_size: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: Activation = Activation.SILU
    attention_bias: bool = False
    mlp_bias: bool = False

    def mixer(self, layer: int) -> Mixer:
        return self.attention(layer)

    def attention(self, layer: int) -> Attention:
        """Softmax attention of block ``layer``."""
        return Attention(
            self.num_attention_heads,
            _key_value_heads(self.num_attention_heads, self.num_key_value_heads),
            self.head_dim or _head_dim(self),
            bias=self.attention_bias,
            output_bias=self.attention_bias,
        )

    def mlp(self) -> Mlp:
        """The MLP of dense blocks."""
        return Mlp(self.intermediate_size, self.hidden_act, bias=self.mlp_bias)

    def feed_forward(self, layer: int) -> FeedForward:
        return self.mlp()


class Mistral(Llama):
    """Mistral 7B (arXiv 2310.06825); all blocks attend to a window unless the file says that there is none."""

    ignored: ClassVar[Set[str]] = _BIASES
    num_key_value_heads: Size | None = 8
    sliding_window: Size | None = 4096

    def attention(self, layer: int) -> Attention:
        return replace(super().attention(layer), window=self.sliding_window)


class Phi3(Mistral):
    """Phi-3 and Phi-4 (arXiv 2404.14219)."""

    num_key_value_heads: Size | None = None
    sliding_window: Size | None = None

    def attention(self, layer: int) -> Attention:
        return replace(super().attention(layer), joint=JointProduct.SLICES)

    def mlp(self) -> Mlp:
        return replace(super().mlp(), joint=True)


class Mixtral(Mistral):
    """Mixtral (arXiv 2401.04088)."""

    sliding_window: Size | None = None
    num_local_experts: Size
    num_experts_per_tok: Size

    def feed_forward(self, layer: int) -> Experts:
        return Experts(self.mlp(), self.num_local_experts, self.num_experts_per_tok, weights_fp32=True)


class GraniteMoe(Llama):
    """Granite 3.0 1B-A400M and 3B-A800M. Its scalar factors, a kernel each, are not counted."""

    ignored: ClassVar[Set[str]] = _MLP_BIAS
    num_local_experts: Size
    num_experts_per_tok: Size

    def feed_forward(self, layer: int) -> Experts:
        return Experts(self.mlp(), self.num_local_experts, self.num_experts_per_tok, loop=ExpertLoop.VIEWS)


class _Sliding(Llama):
    """Some blocks attend to a window, by ``layer_types`` or by ``use_sliding_window``."""

    sliding_window: Count | None = None  # 0, too, is none
    use_sliding_window: bool = True
    max_window_layers: Count = 0
    layer_types: SoftmaxTypes | None = None

    def slides(self, layer: int) -> bool:
        """Whether block ``layer`` attends to a window, where the file does not list the blocks."""
        return layer >= self.max_window_layers

    def attention(self, layer: int) -> Attention:
        slides = self.slides(layer) if self.layer_types is None else _of(self.layer_types, layer) == "sliding_attention"
        window = self.sliding_window or None if slides and self.use_sliding_window else None
        return replace(super().attention(layer), window=window)


class Qwen2(_Sliding):
    """Qwen2 and Qwen2.5 (arXiv 2412.15115): biases on queries, keys and values alone."""

    ignored: ClassVar[Set[str]] = _BIASES
    num_key_value_heads: Size | None = 32
    use_sliding_window: bool = False
    max_window_layers: Count = 28

    def attention(self, layer: int) -> Attention:
        return replace(super().attention(layer), bias=True)


class Qwen3(_Sliding):
    """Qwen3 (arXiv 2505.09388): queries and keys are normalised."""

    ignored: ClassVar[Set[str]] = _MLP_BIAS
    num_key_value_heads: Size | None = 32
    head_dim: Size | None = 128
    use_sliding_window: bool = False
    max_window_layers: Count = 28

    def attention(self, layer: int) -> Attention:
        return replace(super().attention(layer), head_norm=True)


class SmolLM3(_Sliding):
    """SmolLM3: every fourth block without rotated positions."""

    num_key_value_heads: Size | None = 4
    use_sliding_window: bool = False
    no_rope_layers: list[int] | None = None  # 0: without
    no_rope_layer_interval: Size = 4
    tie_word_embeddings: bool = True

    def attention(self, layer: int) -> Attention:
        rotates = (layer + 1) % self.no_rope_layer_interval
        if self.no_rope_layers is not None:
            rotates = _of(self.no_rope_layers, layer, "no_rope_layers")
        return replace(super().attention(layer), rotary=rotates > 0)


class _Sparse(Llama):
    """Some blocks have experts, others an MLP, as in Qwen's models."""

    moe_intermediate_size: Size
    num_experts: Count = Field(validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: Size
    decoder_sparse_step: Size = 1
    mlp_only_layers: list[int] | None = None
    shared_expert_intermediate_size: Count = 0

    def feed_forward(self, layer: int) -> FeedForward:
        dense = layer in (self.mlp_only_layers or ()) or not self.num_experts or (layer + 1) % self.decoder_sparse_step
        if dense:
            return self.mlp()
        shared = self.shared_expert_intermediate_size
        return Experts(
            Mlp(self.moe_intermediate_size, self.hidden_act),
            self.num_experts,
            self.num_experts_per_tok,
            shared=Mlp(shared, self.hidden_act) if shared else None,
            shared_gate=bool(shared),
        )


class Qwen2Moe(_Sparse, Qwen2):
    """Qwen1.5-MoE and Qwen2-57B-A14B: a shared expert with a gate."""

    num_key_value_heads: Size | None = 16
    shared_expert_intermediate_size: Count = 5632
    qkv_bias: bool = True

    def attention(self, layer: int) -> Attention:
        return replace(super().attention(layer), bias=self.qkv_bias)


class Qwen3Moe(_Sparse, Qwen3):
    """Qwen3-30B-A3B and Qwen3-235B-A22B."""

    num_key_value_heads: Size | None = 4

    def slides(self, layer: int) -> bool:
        return True


class Qwen3Next(_Sparse):
    """Qwen3-Next: three of four blocks with linear attention, gated softmax attention in the others."""

    ignored: ClassVar[Set[str]] = _MLP_BIAS
    norm: ClassVar[Norm] = Norm.RMS_FP32

    num_key_value_heads: Size | None = 2
    shared_expert_intermediate_size: Count = 512
    head_dim: Size | None = 256
    linear_conv_kernel_dim: Size = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32
    full_attention_interval: Size = 4
    layer_types: LinearTypes | None = None

    def mixer(self, layer: int) -> Mixer:
        full = (layer + 1) % self.full_attention_interval == 0
        if self.layer_types is not None:
            full = _of(self.layer_types, layer) == "full_attention"
        if full:
            return replace(self.attention(layer), head_norm=True, gated=True)
        return LinearAttention(
            self.linear_num_key_heads,
            self.linear_key_head_dim,
            self.linear_num_value_heads,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
        )


class Gemma(Llama):
    """Gemma (arXiv 2403.08295)."""

    ignored: ClassVar[Set[str]] = _MLP_BIAS
    norm: ClassVar[Norm] = Norm.RMS_FP32

    num_key_value_heads: Size | None = 16
    head_dim: Size | None = 256
    hidden_act: Activation = Activation.GELU_TANH
    tie_word_embeddings: bool = True


class Gemma2(_Sliding):
    """Gemma 2 (arXiv 2408.00118): norms before and after each sublayer, every other block with a window."""

    norm: ClassVar[Norm] = Norm.RMS_FP32
    norm_place: ClassVar[NormPlace] = NormPlace.BOTH
    ignored: ClassVar[Set[str]] = _MLP_BIAS

    num_key_value_heads: Size | None = 4
    head_dim: Size | None = 256
    hidden_act: Activation = Field(default=Activation.GELU_TANH, alias="hidden_activation")
    sliding_window: Size | None = 4096
    attn_logit_softcapping: float | None = 50.0
    tie_word_embeddings: bool = True

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0

    def attention(self, layer: int) -> Attention:
        return replace(super().attention(layer), soft_cap=self.attn_logit_softcapping is not None)


class Gemma3(Gemma2):
    """Gemma 3 (arXiv 2503.19786), the language model: five of six blocks with a window, queries and keys normalised."""

    attn_logit_softcapping: float | None = None
    num_attention_heads: Size = 8
    vocab_size: Size = 262_208
    sliding_window_pattern: Size = 6

    def slides(self, layer: int) -> bool:
        return bool((layer + 1) % self.sliding_window_pattern)

    def attention(self, layer: int) -> Attention:
        return replace(super().attention(layer), head_norm=True)


class Olmo2(Llama):
    """OLMo 2 (arXiv 2501.00656): norms after each sublayer, queries and keys normalised over all heads."""

    norm: ClassVar[Norm] = Norm.RMS_FP32
    norm_place: ClassVar[NormPlace] = NormPlace.AFTER
    ignored: ClassVar[Set[str]] = _MLP_BIAS

    def attention(self, layer: int) -> Attention:
        return replace(super().attention(layer), whole_norm=True)


class Olmo3(Olmo2, _Sliding):
    """OLMo 3: three of four blocks with a window."""

    sliding_window: Size | None = 4096

    def slides(self, layer: int) -> bool:
        return bool((layer + 1) % 4)


class GptOss(_Sliding):
    """gpt-oss (arXiv 2508.10925): experts with biases, attention sinks, every other block with a window."""

    ignored: ClassVar[Set[str]] = _MLP_BIAS
    norm: ClassVar[Norm] = Norm.RMS_FP32
    num_key_value_heads: Size | None = 8
    head_dim: Size | None = 64
    attention_bias: bool = True
    sliding_window: Size | None = 128
    num_local_experts: Size
    num_experts_per_tok: Size = 4

    def slides(self, layer: int) -> bool:
        return layer % 2 == 0

    def attention(self, layer: int) -> Attention:
        return replace(super().attention(layer), sinks=True)

    def feed_forward(self, layer: int) -> Experts:
        expert = Mlp(self.intermediate_size, Activation.CLAMPED_SWIGLU, bias=True)
        return Experts(expert, self.num_local_experts, self.num_experts_per_tok, router_bias=True, loop=ExpertLoop.COPIES)


class DeepSeek(Family):
    """DeepSeek-V3 (arXiv 2412.19437): latent attention; experts above the first blocks. Extra layers that predict further
    tokens are not counted, as ``transformers`` leaves them out.
    """

    ignored: ClassVar[Set[str]] = _MLP_BIAS

    intermediate_size: Size
    moe_intermediate_size: Size
    n_routed_experts: Size
    n_shared_experts: Count
    num_experts_per_tok: Size
    first_k_dense_replace: Count
    kv_lora_rank: Size
    q_lora_rank: Size | None = 1536
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size
    hidden_act: Activation = Activation.SILU
    attention_bias: bool = False
    mlp_bias: bool = False

    def mixer(self, layer: int) -> LatentAttention:
        return LatentAttention(
            self.num_attention_heads,
            self.q_lora_rank,
            self.kv_lora_rank,
            self.qk_nope_head_dim,
            self.qk_rope_head_dim,
            self.v_head_dim,
            self.attention_bias,
        )

    def feed_forward(self, layer: int) -> FeedForward:
        if layer < self.first_k_dense_replace:
            return Mlp(self.intermediate_size, self.hidden_act, bias=self.mlp_bias)
        shared = self.n_shared_experts * self.moe_intermediate_size
        return Experts(
            Mlp(self.moe_intermediate_size, self.hidden_act),
            self.n_routed_experts,
            self.num_experts_per_tok,
            shared=Mlp(shared, self.hidden_act, bias=self.mlp_bias) if shared else None,
            router_fp32=True,
            weights_fp32=True,
        )


class DeepSeekV2(DeepSeek):
    """DeepSeek-V2 (arXiv 2405.04434): MLPs may have biases, routed experts have none."""

    ignored: ClassVar[Set[str]] = frozenset()


#: By ``model_type``.
FAMILIES: dict[str, type[Family]] = {
    "gpt2": Gpt2,
    "opt": Opt,
    "llama": Llama,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "granitemoe": GraniteMoe,
    "qwen2": Qwen2,
    "qwen2_moe": Qwen2Moe,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "qwen3_next": Qwen3Next,
    "gemma": Gemma,
    "gemma2": Gemma2,
    "gemma3_text": Gemma3,
    "phi3": Phi3,
    "gpt_oss": GptOss,
    "deepseek_v2": DeepSeekV2,
    "deepseek_v3": DeepSeek,
    "olmo2": Olmo2,
    "olmo3": Olmo3,
    "smollm3": SmolLM3,
}


def _head_dim(family: Family) -> int:
    if family.hidden_size % family.num_attention_heads:
        raise InputError(
            f"hidden_size {family.hidden_size} is not divisible by {family.num_attention_heads} heads: give head_dim, or a "
            "number of heads that divides it"
        )
    return family.hidden_size // family.num_attention_heads


def _key_value_heads(heads: int, given: int | None) -> int:
    if heads % (given or heads):
        raise InputError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {given}")
    return given or heads


def _of(listed: Sequence[T], layer: int, key: str = "layer_types") -> T:
    if layer >= len(listed):
        raise InputError(f"{key} has {len(listed)} entries: list every layer of num_hidden_layers")
    return listed[layer]
