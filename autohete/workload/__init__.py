"""Workloads: a transformer times a batch. Independent of hardware and of torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from autohete.errors import InputError, check_fields, unknown_name
from autohete.hashing import Hashed, hashed_once
from autohete.printable import shown
from autohete.workload.model import Architecture, Attention, Block, Experts, FeedForward, Mixer, Mlp, Norm, Product, gpt2_block
from autohete.workload.optimizers import Optimizer, has_masters
from autohete.workload.training import FULL, Adapters, LinearLayer, Training, is_target, linear_layers

#: Characters.
LONGEST_NAME = 200


class Precision(StrEnum):
    """Arithmetic of the training.

    ``BF16`` and ``FP16`` are mixed precision: 16-bit parameters, gradients and activations, fp32 master
    weights and moments. ``FP32`` holds everything in fp32 and has no separate master weights.
    """

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def element_bytes(self) -> int:
        """Bytes of one parameter, gradient or activation element."""
        return 4 if self is Precision.FP32 else 2

    @property
    def is_mixed(self) -> bool:
        """Whether master weights are apart from parameters."""
        return self is not Precision.FP32


class Kernels(StrEnum):
    """The implementation that computes a transformer block; :mod:`autohete.profile.kernels.gpt2` counts what each of them does.

    ``FUSED``: fused kernels and FlashAttention (Megatron-LM). ``FUSED_SOFTMAX``: fused kernels, attention scores in memory
    (Megatron-LM before that). ``LEAN``: ``FUSED``, but backward makes again the results of norms and of the activation function
    instead of keeping them. ``EAGER``: Hugging Face GPT-2 in PyTorch, a kernel per operation. ``EAGER_FLASH``: the same
    with ``scaled_dot_product_attention``. ``FUSED_NORMS``: the same with one kernel for each RMSNorm and for rotations
    (Unsloth's, as fms-acceleration runs them). ``LIGER``: the same with one for gated activation functions, too (Liger Kernel,
    without its loss).
    """

    FUSED = "fused"
    FUSED_SOFTMAX = "fused_softmax"
    LEAN = "lean"
    EAGER = "eager"
    EAGER_FLASH = "eager_flash"
    FUSED_NORMS = "fused_norms"
    LIGER = "liger"


#: Those of ``transformers``: a kernel per operation, except for what others put in their place.
EAGER_KERNELS = (Kernels.EAGER, Kernels.EAGER_FLASH, Kernels.FUSED_NORMS, Kernels.LIGER)
#: Those that compute blocks of GPT-2, which have neither RMSNorm nor rotations.
GPT2_KERNELS: tuple[Kernels, ...] = tuple(one for one in Kernels if one not in (Kernels.FUSED_NORMS, Kernels.LIGER))
#: Those whose scores stay out of memory.
FLASH_KERNELS = (Kernels.FUSED, Kernels.LEAN, *EAGER_KERNELS[1:])


class FusedAttention(StrEnum):
    """The implementation of attention whose scores stay out of memory; :mod:`autohete.profile.attention` has their rates.

    ``FA1``, ``FA2``, ``FA3``: FlashAttention of the package ``flash-attn``. ``CUDNN``: cuDNN's. ``TRITON``: FlashAttention in
    Triton, as of 2023. ``EFFICIENT``: the memory-efficient kernel of xFormers and PyTorch.
    """

    FA1 = "fa1"
    FA2 = "fa2"
    FA3 = "fa3"
    CUDNN = "cudnn"
    TRITON = "triton"
    EFFICIENT = "efficient"


class AttentionMask(StrEnum):
    """The mask that attention gets as a tensor, as ``transformers`` makes one of padded sequences for PyTorch's attention. The
    kernel then computes all scores, also those that the mask removes.

    ``BOOL``: one of booleans, of which PyTorch makes a 16-bit one in each block, where backward needs it (``transformers`` 5).
    ``ADDITIVE``: one in the format of the scores, which all blocks share (``transformers`` 4).
    """

    BOOL = "bool"
    ADDITIVE = "additive"


#: Implementations of attention that take a mask.
MASKED_ATTENTION = (FusedAttention.CUDNN, FusedAttention.EFFICIENT)


class LossKernels(StrEnum):
    """How cross-entropy is computed, and in which formats the logits exist.

    ``PLAIN``: PyTorch's, of the logits in the format that the GPU computes with. ``SHIFTED``: the same of a copy without the
    last token of each sequence (GPT-2 of ``transformers`` up to 4.45). ``FP32``: of a copy in fp32 (``transformers`` from 4.49,
    and PyTorch's under autocast). ``FP32_SHIFTED``: of a copy in fp32, copied again without last tokens (4.46 to 4.48).
    ``FP32_OUTPUT``: the same, and the model's output is in fp32 (decoders other than GPT-2 up to 4.45). ``MEGATRON``: in fp32,
    computed in place. ``IN_PLACE``: one kernel, which writes the gradient in the place of the logits (``flash-attn``, Liger
    Kernel and Unsloth without their products), as a chunked loss with one chunk does.
    :mod:`autohete.profile.kernels.cross_entropy` counts what each of them does.
    """

    PLAIN = "plain"
    SHIFTED = "shifted"
    FP32 = "fp32"
    FP32_SHIFTED = "fp32_shifted"
    FP32_OUTPUT = "fp32_output"
    MEGATRON = "megatron"
    IN_PLACE = "in_place"


#: PyTorch's, of logits as they are.
PLAIN_LOSSES = (LossKernels.PLAIN, LossKernels.SHIFTED)


class Units(StrEnum):
    """The smallest part that is planned by itself: a transformer block, or each of its two sublayers.

    A sublayer is attention or MLP with its norm before it and its residual connection (Vaswani et al. 2017, section 3.1).
    """

    BLOCK = "block"
    SUBLAYER = "sublayer"


class BlockRole(StrEnum):
    """The role of a unit. Unit 0 is the embedding, the last one the head; those between are transformer blocks, or by turns the
    attention and the MLP (or the experts) of one.
    """

    EMBEDDING = "embedding"
    TRANSFORMER = "transformer"
    ATTENTION = "attention"
    MLP = "mlp"
    EXPERTS = "experts"
    HEAD = "head"


#: The parts of a transformer block.
_PARTS = {Units.BLOCK: (BlockRole.TRANSFORMER,), Units.SUBLAYER: (BlockRole.ATTENTION, BlockRole.MLP)}


#: Above these a shape is a typing mistake: the largest published models stay well below them.
LIMITS = {
    "hidden_size": 1_000_000,
    "transformer_blocks": 256,
    "heads": 100_000,
    "vocabulary_size": 100_000_000,
    "sequence_length": 100_000_000,
    "batch_size": 1_000_000,
    "micro_batches": 1_000,
}


@hashed_once
@dataclass(frozen=True, slots=True)
class Workload(Hashed):
    """A transformer, its kernels, and the batch of one GPU.

    Args:
        name: of the model; printable.
        hidden_size: width ``h`` of the residual stream.
        transformer_blocks: number ``L`` of transformer blocks; embedding and head come on top.
        heads: attention heads ``a``; without an architecture a divisor of the hidden size.
        vocabulary_size: ``V``, rows of the embedding.
        sequence_length: ``s`` tokens.
        batch_size: ``b`` sequences that one GPU computes with at a time.
        precision: see :class:`Precision`.
        tied_embeddings: the LM head multiplies by the embedding's own matrix, as in GPT-2.
        autocast: format of matrix products and attention if model and loss run under ``torch.autocast``; ``precision``, the
            format of parameters and gradients, must be fp32. So train ``Trainer(bf16=True)`` of ``transformers`` with a model
            in fp32, nanoGPT, and Lightning in mixed precision. None: no autocast.
        kernels: see :class:`Kernels`.
        micro_batches: batches in one iteration, whose gradients are accumulated before the update.
        clip_norm: gradients are scaled down before the update where their global norm is larger than this, as
            ``torch.nn.utils.clip_grad_norm_`` does; None: they are not clipped.
        units: see :class:`Units`.
        chunked_loss: logits are made, used and dropped some tokens at a time, as Liger Kernel does.
        loss_chunks: the number of these times; None: as many as Liger Kernel takes, if ``chunked_loss``.
        architecture: its blocks; None: all are GPT-2's, and positions are learned, as many as a sequence has tokens.
        training: the trained parameters and the training options.
        sample_lengths: tokens of samples where they differ: evenly spaced quantiles, such as shortest, median and longest, or
            all of them. A batch is padded to its longest sample, at most to ``sequence_length``. They decide what an allocator
            reserves, while times and peaks are those of whole sequences. None: there are no others.
        expandable_segments: PyTorch's allocator runs with ``expandable_segments``, with which it reserves little more than is
            allocated.
        document_length: a sequence is packed of documents of so many tokens, and attention stays within each; None: a sequence
            is one document.
        looped_experts: experts are computed one after another, as ``transformers`` 4 trains them, and so many of each block get
            tokens; None: all do, in grouped products.
        attention: see :class:`FusedAttention`; None: what PyTorch takes on the GPU.
        attention_mask: see :class:`AttentionMask`; None: the kernel knows that attention is causal, and skips what that hides;
            windows have masks of their own (``mask_of``).
        loss: see :class:`LossKernels`; None: that of the implementation that ``kernels`` names.
        keeps_logits: the caller holds the model's output until backward has ended, as a loop does that names it, and the
            ``Trainer`` of ``transformers`` does not. None: with the losses of PyTorch and ``transformers``.
    """

    name: str
    hidden_size: int
    transformer_blocks: int
    heads: int
    vocabulary_size: int = 50257
    sequence_length: int = 1024
    batch_size: int = 8
    precision: Precision = Precision.BF16
    autocast: Precision | None = None
    tied_embeddings: bool = True
    kernels: Kernels = Kernels.FUSED
    micro_batches: int = 1
    clip_norm: float | None = None
    units: Units = Units.BLOCK
    chunked_loss: bool = False
    loss_chunks: int | None = None
    architecture: Architecture | None = None
    training: Training = FULL
    sample_lengths: tuple[int, ...] | None = None
    expandable_segments: bool = False
    document_length: int | None = None
    looped_experts: int | None = None
    attention: FusedAttention | None = None
    attention_mask: AttentionMask | None = None
    loss: LossKernels | None = None
    keeps_logits: bool | None = None

    def __post_init__(self) -> None:
        for field, limit in LIMITS.items():
            value = getattr(self, field)
            if type(value) is not int or not 1 <= value <= limit:
                raise InputError(f"{field} is {value!r}: it must be a whole number between 1 and {limit:,}")
        check_fields(self)
        if not (self.name.isprintable() and len(self.name) <= LONGEST_NAME):
            raise InputError(f"name is {shown(self.name)}: give at most {LONGEST_NAME} printable characters")
        if self.loss_chunks is not None and not self.chunked_loss:
            raise InputError(f"loss_chunks is {self.loss_chunks}, but the loss is not chunked: give chunked_loss as well")
        if self.loss_chunks is not None and not 1 <= self.loss_chunks <= self.tokens:
            raise InputError(
                f"loss_chunks is {self.loss_chunks}: it must be a whole number from 1 to the {self.tokens} tokens of a batch"
            )
        self._check_loss()
        if self.architecture is not None:
            _check_positions(self.architecture, self.sequence_length)
        elif self.hidden_size % self.heads:
            raise InputError(
                f"hidden_size {self.hidden_size} is not divisible by {self.heads} heads: "
                "each head takes an equal part of the hidden size, so choose a divisor"
            )
        check_clip_norm(self.clip_norm)
        self._check_samples()
        self._check_documents()
        self._check_loop()
        if self.attention is not None and self.kernels not in FLASH_KERNELS:
            raise InputError(
                f"attention is {self.attention}, but kernels {self.kernels} have scores in memory: use fused, lean or "
                "eager_flash, or leave attention out"
            )
        if self.architecture is None and self.kernels not in GPT2_KERNELS:
            raise InputError(
                f"kernels {self.kernels} stand in for RMSNorm and rotations, of which blocks of GPT-2 have none: use "
                f"{Kernels.EAGER_FLASH}, or name a model that has them"
            )
        self._check_mask()
        self._check_autocast()
        last = self.training.last_blocks
        if last is not None and last > self.transformer_blocks:
            raise InputError(
                f"the last {last} blocks are to be trained, but there are {self.transformer_blocks}: give at most as many"
            )
        blocks = (gpt2_block(self.hidden_size, self.heads),) if self.architecture is None else self.architecture.blocks
        self.training.check(blocks[: self.transformer_blocks], self.hidden_size)
        if self.training.fp8 and not self.precision.is_mixed:
            raise InputError("fp8 is for products of 16-bit parameters, but precision is fp32: train in bf16")
        if "bf16" in (optimizer := self.training.optimizer) and self.precision is not Precision.BF16:
            raise InputError(f"{optimizer} is for parameters in bf16, but precision is {self.precision}: train in bf16")
        if self.training.lora is not None and not any(self.adapter_products(unit) for unit in range(self.unit_count)):
            raise InputError(
                f"{self.training}: none of these blocks has such a layer, so nothing would be trained; give other targets or "
                "more blocks"
            )

        self._check_adapters()

    def _check_loss(self) -> None:
        if self.loss is not None and self.chunked_loss:
            raise InputError(
                f"loss is {self.loss}, of all logits at a time, but the loss is chunked, and a chunked loss works in place: "
                "leave out one of them"
            )
        if self.keeps_logits and (self.chunked_loss or self.loss is LossKernels.IN_PLACE):
            raise InputError(
                "keeps_logits is True, but this loss writes the gradient in the place of the logits: leave keeps_logits out"
            )

    def _check_adapters(self) -> None:
        lora = self.training.lora
        if lora is None:
            return
        if not self.precision.is_mixed and (lora.adapters or lora.prepared):
            raise InputError(f"{lora}: in fp32 nothing is cast; leave adapters and prepared out, or train in bf16")
        if lora.prepared and not (lora.quantised and self.adapters is Adapters.AUTOCAST):
            raise InputError(
                f"{lora}: a model is prepared for training with a base in NF4, under autocast; make it quantised with "
                f"adapters {Adapters.AUTOCAST}, or leave prepared out"
            )

    def _check_samples(self) -> None:
        if self.sample_lengths is None:
            return
        if type(self.sample_lengths) is not tuple or not self.sample_lengths:
            raise InputError(f"sample_lengths is {shown(self.sample_lengths)}: give a tuple of the tokens of some samples")
        for length in self.sample_lengths:
            if type(length) is not int or not 1 <= length <= self.sequence_length:
                raise InputError(
                    f"sample_lengths has {shown(length)}: give whole numbers from 1 to the {self.sequence_length} tokens of a "
                    "sequence"
                )
        if self.document_length is not None:
            raise InputError(
                "sample_lengths is for batches of different lengths, but sequences that are packed of documents have one: "
                "leave document_length or sample_lengths out"
            )

    def _check_documents(self) -> None:
        if self.document_length is None:
            return
        if not 1 <= self.document_length <= self.sequence_length:
            raise InputError(
                f"document_length is {self.document_length}: give 1 up to the {self.sequence_length} tokens of a sequence"
            )
        if self.kernels not in FLASH_KERNELS:
            raise InputError(
                f"kernels {self.kernels} compute scores between all tokens of a sequence, so documents save nothing: use "
                "fused, lean or eager_flash, or leave document_length out"
            )

    def _check_mask(self) -> None:
        if self.attention_mask is None:
            return
        given = f"attention_mask {self.attention_mask}"
        if self.kernels not in EAGER_KERNELS[1:]:
            able = " or ".join(EAGER_KERNELS[1:])
            raise InputError(
                f"kernels is {self.kernels}, but {given} is for those of transformers: use {able}, or leave it out, as "
                f"{Kernels.EAGER} has a mask in any case"
            )
        if self.attention is not None and self.attention not in MASKED_ATTENTION:
            able = " or ".join(MASKED_ATTENTION)
            raise InputError(f"attention {self.attention} takes no mask such as {given}: use {able}, or leave attention out")
        if self.document_length is not None:
            raise InputError(
                f"documents save nothing with {given}, as attention then computes all scores of a sequence: leave "
                "document_length or attention_mask out"
            )

    def _check_autocast(self) -> None:
        if self.autocast is None:
            return
        if self.precision is not Precision.FP32 or self.autocast is Precision.FP32:
            raise InputError(
                f"precision is {self.precision}, with autocast to {self.autocast}: autocast computes in 16 bit with parameters "
                "in fp32, so give precision fp32, and autocast bf16 or fp16"
            )
        if self.loss in PLAIN_LOSSES:
            raise InputError(
                f"loss {self.loss} is of 16-bit logits, but autocast computes PyTorch's cross-entropy of a copy in fp32: give "
                f"{LossKernels.FP32} or {LossKernels.FP32_SHIFTED}, or leave loss out"
            )
        if self.training.lora is not None or self.training.galore is not None:
            raise InputError(
                f"autocast to {self.autocast} is modelled where parameters are trained themselves, not with "
                f"{self.training}: leave it out, and train in bf16"
            )
        blocks = () if self.architecture is None else self.architecture.blocks
        parts = [part for block in blocks for part in (block.mixer, block.feed_forward)]
        if not all(isinstance(part, (Attention, Mlp)) for part in parts):
            raise InputError(
                f"autocast to {self.autocast} is modelled for softmax attention and dense MLPs, but {self.name} has "
                "other blocks: leave it out"
            )

    def _check_loop(self) -> None:
        if self.looped_experts is None:
            return
        parts = () if self.architecture is None else (block.feed_forward for block in self.architecture.blocks)
        mixtures = [part for part in parts if isinstance(part, Experts)]
        if not mixtures:
            raise InputError(f"looped_experts is {self.looped_experts}, but {self.name} has no experts: leave it out")
        if self.kernels not in EAGER_KERNELS:
            raise InputError(f"looped_experts is for eager kernels, but kernels is {self.kernels}: use eager or eager_flash")
        least, most = max(part.active for part in mixtures), min(part.count for part in mixtures)
        if not least <= self.looped_experts <= most:
            raise InputError(
                f"looped_experts is {self.looped_experts}: give {least}, to which a token goes, up to all {most} of a block"
            )

    @property
    def attended_tokens(self) -> int:
        """Tokens that attention without a window relates to each other: those of a document."""
        return self.sequence_length if self.document_length is None else self.document_length

    @property
    def clips(self) -> bool:
        """Whether updates take gradients that are scaled by their global norm."""
        return self.clip_norm is not None

    @property
    def has_masters(self) -> bool:
        """Whether what is trained has fp32 or bf16 master weights; without them parameters are updated as they are."""
        return self.precision.is_mixed and has_masters(self.training.optimizer)

    @property
    def foreach_bytes(self) -> int:
        """Bytes that foreach kernels hold for each parameter of an update; see ``Training.foreach``."""
        return (4 if self.has_masters else self.precision.element_bytes) * self.training.foreach

    @property
    def adapters(self) -> Adapters:
        """How adapters are held; the default is that of PEFT for what ``transformers`` trains in mixed precision."""
        lora = self.training.lora
        if lora is not None and lora.adapters is not None:
            return lora.adapters
        eager = self.kernels in EAGER_KERNELS
        return Adapters.AUTOCAST if lora is not None and eager and self.has_masters else Adapters.PLAIN

    @property
    def is_prepared(self) -> bool:
        """Whether what is neither quantised nor an adapter is in fp32, with the residual stream; see ``Lora.prepared``."""
        lora = self.training.lora
        if lora is None or lora.prepared is not None:
            return lora is not None and bool(lora.prepared)
        return lora.quantised and not lora.gptq and self.adapters is Adapters.AUTOCAST  # as PEFT tells them apart

    @property
    def compute_bytes(self) -> int:
        """Bytes per element of what products take and give."""
        return (self.autocast or self.precision).element_bytes

    @property
    def stream_bytes(self) -> int:
        """Bytes per element of what one block hands to the next."""
        return 4 if self.is_prepared else self.precision.element_bytes

    @property
    def unit_count(self) -> int:
        """All units: embedding, transformer blocks or their sublayers, head."""
        return len(_PARTS[self.units]) * self.transformer_blocks + 2

    def role(self, unit: int) -> BlockRole:
        """The role of ``unit``, counted from 0."""
        if unit == 0:
            return BlockRole.EMBEDDING
        if unit == self.unit_count - 1:
            return BlockRole.HEAD
        parts = _PARTS[self.units]
        role = parts[(unit - 1) % len(parts)]
        experts = role is BlockRole.MLP and isinstance(self.block(unit).feed_forward, Experts)
        return BlockRole.EXPERTS if experts else role

    def is_inner(self, unit: int) -> bool:
        """Whether ``unit`` is between embedding and head."""
        return 0 < unit < self.unit_count - 1

    def block(self, unit: int) -> Block:
        """The transformer block that ``unit``, which is neither embedding nor head, is or belongs to."""
        if self.architecture is None:
            return gpt2_block(self.hidden_size, self.heads)
        blocks = self.architecture.blocks
        return blocks[(unit - 1) // len(_PARTS[self.units]) % len(blocks)]

    def mask_of(self, mixer: Mixer) -> AttentionMask | None:
        """The mask that attention in ``mixer`` gets as a tensor.

        Without ``attention_mask``, ``transformers`` makes one for PyTorch's attention where a window hides tokens
        (``create_sliding_window_causal_mask``), but none for packages such as FlashAttention's, which know windows.
        """
        window = mixer.window if isinstance(mixer, Attention) else None
        if self.attention_mask is not None or window is None or window > self.sequence_length:
            return self.attention_mask
        by_pytorch = self.kernels in EAGER_KERNELS[1:] and self.attention in (None, *MASKED_ATTENTION)
        return AttentionMask.BOOL if by_pytorch and self.document_length is None else None

    @property
    def tokens(self) -> int:
        """Tokens that one GPU computes with at a time: those of one micro-batch."""
        return self.batch_size * self.sequence_length

    @property
    def loss_tokens(self) -> int:
        """Tokens whose logits are in memory at a time: all, a given share, or so many that the logits are about as large as the
        head's input (Liger Kernel at 00eba63, ``ops/fused_linear_cross_entropy.py``).
        """
        if not self.chunked_loss:
            return self.tokens
        if self.loss_chunks is not None:
            return -(-self.tokens // self.loss_chunks)
        chunk = -(-self.tokens // -(-self.vocabulary_size // self.hidden_size))
        return min(self.tokens, 1 << (chunk - 1).bit_length())

    @property
    def samples(self) -> int:
        """Sequences in one iteration of one GPU."""
        return self.batch_size * self.micro_batches

    def unit_parameters(self, unit: int) -> int:
        """Parameters that ``unit`` owns, counted from 0, with those of its adapters.

        Of a block or sublayer: what :class:`~autohete.workload.model.Block` counts, such as ``12 h^2 + 13 h`` for GPT-2
        (Narayanan et al. 2021, eq. 2). Embedding: tokens and learned positions. Head: the final norm, and the projection where
        it is not tied.
        """
        h, role, architecture = self.hidden_size, self.role(unit), self.architecture
        if role is BlockRole.EMBEDDING:
            return (self.vocabulary_size + (self.sequence_length if architecture is None else architecture.positions)) * h
        if role is BlockRole.HEAD:
            norm = Norm.LAYER if architecture is None else architecture.final_norm
            return norm.parameters(h) + (0 if self.tied_embeddings else self.vocabulary_size * h)
        parts = self.components(unit)
        own = sum(part.parameters(h) for part in parts) + len(parts) * self.block(unit).norm_parameters(h)
        return own + self._adapter_parameters(unit)

    def described(self, unit: int) -> str:
        """The block of ``unit``, which is neither embedding nor head, in words."""
        return str(self.block(unit))

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest parameter: the embedding, or a product of an MLP that is four times as wide as the model."""
        return self.hidden_size * max(self.vocabulary_size, 4 * self.hidden_size)

    def components(self, unit: int) -> tuple[Mixer | FeedForward, ...]:
        """The components of ``unit``, which is neither embedding nor head: mixer and feed-forward part, or one of them."""
        block, role = self.block(unit), self.role(unit)
        if role is BlockRole.TRANSFORMER:
            return block.mixer, block.feed_forward
        return (block.mixer if role is BlockRole.ATTENTION else block.feed_forward,)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, trained or not."""
        return sum(self.unit_parameters(unit) for unit in range(self.unit_count))

    @property
    def trained_parameters(self) -> int:
        """Trained parameters of the whole model."""
        return self.parameters - sum(self.frozen_parameters(unit) for unit in range(self.unit_count))

    def _is_reached(self, unit: int) -> bool:
        """Whether ``unit`` is among the last blocks, or above them, if only those are trained."""
        last = self.training.last_blocks
        first = 0 if last is None else self.unit_count - 1 - last * len(_PARTS[self.units])
        return unit >= first

    def trains_base(self, unit: int) -> bool:
        """Whether the unit's own parameters are trained, rather than frozen."""
        return self.training.lora is None and self._is_reached(unit)

    def has_base_gradients(self, unit: int) -> bool:
        """Whether backward computes gradients of the unit's own parameters."""
        lora = self.training.lora
        return self.trains_base(unit) or (lora is not None and lora.base_gradients and bool(self.adapted_layers(unit)))

    def frozen_parameters(self, unit: int) -> int:
        """Those of :meth:`unit_parameters` that are not trained."""
        return 0 if self.trains_base(unit) else self.unit_parameters(unit) - self._adapter_parameters(unit)

    def frozen_bytes(self, unit: int) -> int | None:
        """Bytes of the frozen parameters; None: they are held in the format that the GPU computes with."""
        quantised = self.quantised_parameters(unit)
        if not quantised and not self.is_prepared:
            return None
        others = self.frozen_parameters(unit) - quantised
        assert self.training.lora is not None, "only the base of adapters is quantised or prepared"
        return others * self.stream_bytes + math.ceil(quantised * self.training.lora.quantised_bytes)

    def quantised_parameters(self, unit: int) -> int:
        """Parameters of the unit's linear layers, if they are quantised; 0 for embedding and head."""
        lora = self.training.lora
        if lora is None or not lora.quantised:
            return 0
        return sum(layer.shape.parameters for layer in self.linear_layers(unit))

    def linear_layers(self, unit: int) -> tuple[LinearLayer, ...]:
        """The unit's linear layers; none of embedding and head."""
        if not self.is_inner(unit):
            return ()
        return tuple(
            layer for part in self.components(unit) for layer in linear_layers(self.block(unit), self.hidden_size, part)
        )

    def adapted_layers(self, unit: int) -> tuple[LinearLayer, ...]:
        """The linear layers of the unit that have adapters."""
        lora = self.training.lora
        if lora is None or not self._is_reached(unit):
            return ()
        return tuple(layer for layer in self.linear_layers(unit) if is_target(lora, layer))

    def adapter_products(self, unit: int) -> tuple[Product, ...]:
        """The products of the unit's adapters, in pairs."""
        lora = self.training.lora
        if lora is None:
            return ()
        return tuple(product for layer in self.adapted_layers(unit) for product in layer.adapter_products(lora.rank))

    def trained_matrices(self, unit: int) -> tuple[Product, ...]:
        """The matrices among the unit's trained parameters, as its optimizer sees them. To Muon those of embedding and head are
        none.
        """
        adapters = self.adapter_products(unit)
        if adapters or not self.trains_base(unit):
            return adapters
        if self.is_inner(unit):
            return tuple(product for part in self.components(unit) for product in part.products(self.hidden_size))
        outer = unit > 0 and self.tied_embeddings
        is_muon = self.training.optimizer in (Optimizer.MUON, Optimizer.MUON_PURE_BF16)
        return () if outer or is_muon else (Product(self.vocabulary_size, self.hidden_size),)

    def tensors(self, unit: int, *, trained: bool = False) -> tuple[Product, ...]:
        """The unit's parameters, or those that are trained: its matrices, as ``transformers`` has them, with the matrices of
        alike experts in one product; and what is of no matrix, as one.
        """
        adapters = self.adapter_products(unit)
        if trained and not self.trains_base(unit):
            return adapters
        matrices = (*(layer.shape for layer in self.linear_layers(unit)), *adapters)
        if not self.is_inner(unit) and not (unit and self.tied_embeddings):
            matrices = (Product(self.vocabulary_size, self.hidden_size),)
        rest = self.unit_parameters(unit) - sum(one.parameters for one in matrices)
        return (*matrices, *([Product(rest, 1)] if rest else []))

    def projected_matrices(self, unit: int) -> tuple[Product, ...]:
        """Those whose gradients GaLore projects: the linear layers of blocks, each by itself."""
        if self.training.galore is None or not self.trains_base(unit):
            return ()
        return tuple(layer.shape for layer in self.linear_layers(unit))

    def _adapter_parameters(self, unit: int) -> int:
        return sum(product.parameters for product in self.adapter_products(unit))

    def first_trained(self) -> int:
        """The first unit that has trained parameters. Units below it need no backward."""
        return next(unit for unit in range(self.unit_count) if self.frozen_parameters(unit) < self.unit_parameters(unit))

    @property
    def model_flops(self) -> int:
        """Model FLOPs of one iteration, without recomputation: forward, and backward for what is trained.

        Matrix products and full (not causal) attention; for GPT-2 ``3 * (24 b s h^2 + 4 b s^2 h) L + 6 b s h V``
        (Narayanan et al. 2021, section 5.1, without its recomputation). A product with frozen weights has the gradient of its
        input alone, which is as much as its forward; units below the first trained one have no backward.
        """
        return _model_flops(self)

    @property
    def forward_flops(self) -> int:
        """FLOPs of the forward pass of one micro-batch, counted like ``model_flops``."""
        units = range(1, self.unit_count)
        return self.tokens * sum(
            self._products_flops(unit) + self._adapter_flops(unit) + self._core_flops(unit) for unit in units
        )

    @property
    def _backward_flops(self) -> int:
        first, flops = self.first_trained(), 0
        for unit in range(max(first, 1), self.unit_count):
            trained = self.trains_base(0 if unit == self.unit_count - 1 and self.tied_embeddings else unit)
            flops += (1 + trained) * self._products_flops(unit)
            flops += 2 * (self._adapter_flops(unit) + self._core_flops(unit))
        return self.tokens * flops

    def _products_flops(self, unit: int) -> int:
        """FLOPs for one token of the products with the unit's own weights, forward."""
        h = self.hidden_size
        if not self.is_inner(unit):
            return 2 * h * self.vocabulary_size
        return sum(product.token_flops for part in self.components(unit) for product in part.products(h))

    def _adapter_flops(self, unit: int) -> int:
        return sum(product.token_flops for product in self.adapter_products(unit))

    def _core_flops(self, unit: int) -> int:
        parts = self.components(unit) if self.is_inner(unit) else ()
        return sum(part.core_flops(self.attended_tokens) for part in parts)


@lru_cache
def _model_flops(workload: Workload) -> int:
    return workload.micro_batches * (workload.forward_flops + workload._backward_flops)


def _check_positions(architecture: Architecture, sequence_length: int) -> None:
    most = architecture.positions - architecture.first_position
    if architecture.positions and sequence_length > most:
        raise InputError(
            f"sequence_length is {sequence_length}, but the model has {most} learned positions: give at most as many tokens"
        )


def check_clip_norm(given: object) -> None:
    """Refuse what is no global norm to clip to.

    Raises:
        InputError: says what to give.
    """
    if given is None:
        return
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given < math.inf:
        raise InputError(f"clip_norm is {given!r}: give a finite number above 0, such as 1.0, or leave it out to clip nothing")


def _gpt(billions: int, hidden_size: int, transformer_blocks: int) -> Workload:
    return Workload(f"gpt-{billions}b", hidden_size, transformer_blocks, heads=hidden_size // 128)


#: GPT-like models over the published range: 2B to 22B, hidden 2048 to 8192, 20 to 42 blocks, sequence 1024, global batch 8
#: (arXiv 2503.01890). The paper does not list its shapes, except that its 4B model has 21 blocks; these hold to all of that.
WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        _gpt(2, 2048, 40),
        _gpt(4, 4096, 21),
        _gpt(6, 4096, 30),
        _gpt(8, 4096, 40),
        _gpt(10, 5120, 32),
        _gpt(12, 5120, 38),
        _gpt(15, 6144, 33),
        _gpt(18, 6144, 40),
        _gpt(20, 8192, 25),
        _gpt(22, 8192, 27),
    )
}


def named_workload(name: str, **changes: object) -> Workload:
    """The preset ``name`` with some fields changed, for example ``named_workload("gpt-2b", batch_size=4)``."""
    if name not in WORKLOADS:
        raise unknown_name("workload", name, WORKLOADS)
    return replace(WORKLOADS[name], **changes)  # type: ignore[arg-type]
