"""What one GPU of a group that divides each batch computes, keeps and exchanges.

Tensors (Megatron-LM, ``megatron/core/tensor_parallel/layers.py`` and ``mappings.py``): a GPU has a part of the heads, of the
MLP's width and of the vocabulary, so its matrices are those of a narrower block. The first product of a sublayer takes the
whole residual stream, and the last one gives a sum over the group. Without sequence parallelism that sum is an all-reduce in
forward, and in backward that of the input's gradient is another. With it, norms, dropout and residual connections work on a
part of the tokens; the input is gathered and the result reduced and scattered, in backward the other way round, and the input,
of which only a part is kept, is gathered again. In backward the collective of the input's gradient overlaps with the product
for the gradient of the weights, and the second gather with that for the input's
(``LinearWithGradAccumulationAndAsyncCommunication``).

Context (Transformer Engine 2, ``pytorch/attention/dot_product_attention/context_parallel.py``, ``AttnFuncWithCPAndKVP2P``): a
GPU has a part of each sequence, in two pieces, so that all have as many keys under the causal mask. Keys and values go around
in a ring, each step beside the attention with those that have come; backward sends their gradients as well. Or queries, keys
and values are exchanged, so that each GPU has some heads of the whole sequence, and results back
(``AttnFuncWithCPAndQKVOA2A``; DeepSpeed Ulysses, arXiv 2309.14509); nothing overlaps.

Experts (``megatron/core/transformer/moe/token_dispatcher.py``, ``MoEAlltoAllTokenDispatcher``): a GPU has a part of them. Each
token is sent to the GPUs of its experts, and the results back, in forward and in backward; all experts get as many tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autohete.errors import InputError
from autohete.hardware import ALONE, ContextExchange, Hardware, Parallelism
from autohete.profile.kernels.gpt2 import Operation, Part
from autohete.workload import FLASH_KERNELS, Workload
from autohete.workload.model import (
    Architecture,
    Attention,
    Block,
    Experts,
    FeedForward,
    LatentAttention,
    LinearAttention,
    Mixer,
    Mlp,
    Norm,
    gpt2_block,
)
from autohete.workload.traced import TracedWorkload

#: Rows of the tables whose tensors are as wide as the residual stream, and of which each GPU has all or, with sequence
#: parallelism, those of its tokens; and rows that keep such a tensor as the input of the first product.
_OF_STREAM = frozenset(
    {
        "ln_1",
        "ln_2",
        "input layer norm",
        "post-attention layer norm",
        "norm",
        "norm after",
        "dropout",
        "residual dropout",
        "mlp dropout",
        "residual",
        "bias, dropout, residual",
        "sum of residual gradients",
        "router",
    }
)
_FIRST_PRODUCTS = frozenset({"c_attn", "c_fc", "query_key_value", "dense_h_to_4h", "first product"})
#: Tensors of ``tokens x hidden`` elements among the workspaces of GPT-2's blocks that are no part of heads or of the MLP: the
#: output, and in backward its gradient and that of the input.
_STREAM_WORKSPACE = (2.0, 2.5)


def part_of_rank(workload: Workload, parallelism: Parallelism) -> Workload:
    """The workload of one GPU: narrower blocks, fewer rows of the vocabulary, and a part of each sequence.

    Raises:
        InputError: it cannot be divided so.
    """
    if not parallelism.divides:
        return workload
    if isinstance(workload, TracedWorkload):
        raise InputError(f"{workload.name} was traced, and a trace does not say how {parallelism} divides it: leave it out")
    tensor, context = parallelism.tensor, parallelism.context
    if context > 1 and workload.kernels not in FLASH_KERNELS:
        raise InputError(
            f"kernels {workload.kernels} compute all scores of a sequence at once, so cp cannot divide it: use fused"
        )
    if context > 1 and workload.attention_mask is not None:
        raise InputError(
            f"attention_mask is {workload.attention_mask}, a mask of whole sequences, so cp cannot divide them: leave out one "
            "of both"
        )
    if parallelism.expert > 1:
        _check_experts(workload, parallelism.expert)
    whole = workload.architecture
    if whole is None:
        block = gpt2_block(workload.hidden_size, workload.heads)
        whole = Architecture((block,), Norm.LAYER, positions=workload.sequence_length)
    blocks = tuple([_narrower(block, parallelism) for block in whole.blocks])
    for block in blocks:
        _check_heads(block.mixer, parallelism)
    sequence = _sequence_of_rank(workload.sequence_length, parallelism)
    return replace(
        workload,
        sequence_length=sequence,
        sample_lengths=None,
        document_length=None if workload.document_length is None else min(workload.document_length, sequence),
        vocabulary_size=-(-workload.vocabulary_size // tensor),
        architecture=replace(whole, blocks=blocks),
    )


def least_tokens(parallelism: Parallelism) -> int:
    """The tokens of the shortest sequence that can be divided so; others are a multiple of it."""
    context = parallelism.context
    return context * math.lcm(parallelism.along_sequence, 1 if context == 1 else 2)


def _sequence_of_rank(tokens: int, parallelism: Parallelism) -> int:
    """The tokens that a GPU has of each sequence."""
    context, between = parallelism.context, parallelism.along_sequence
    multiple = least_tokens(parallelism)
    if tokens % multiple:
        pieces = "two pieces of it each" if context > 1 else "equal parts of it between products"
        other = ", or sp=off" if between > 1 else ""
        raise InputError(
            f"a sequence of {tokens} tokens cannot be divided by {parallelism}, whose GPUs have {pieces}: give a multiple of "
            f"{multiple} tokens{other}"
        )
    return tokens // context


def _check_experts(workload: Workload, expert: int) -> None:
    blocks = () if workload.architecture is None else workload.architecture.blocks
    if not any(isinstance(block.feed_forward, Experts) for block in blocks):
        raise InputError(f"{workload.name} has no experts, so ep={expert} cannot divide them: leave it out")
    if workload.training.lora is not None or workload.looped_experts is not None:
        raise InputError(f"ep={expert} is for experts that are trained whole, in grouped products: leave it out")


def _divided(count: int, parts: int, what: str) -> int:
    if count % parts:
        raise InputError(f"{count} {what} cannot be divided among {parts} GPUs: give a divisor of {count}")
    return count // parts


def _narrower(block: Block, parallelism: Parallelism) -> Block:
    part = _feed_forward(block.feed_forward, parallelism.tensor)
    if isinstance(part, Experts) and parallelism.expert > 1:
        part = replace(part, held=_divided(part.count, parallelism.expert, "experts"))
    return replace(block, mixer=_mixer(block.mixer, parallelism.tensor), feed_forward=part)


def _check_heads(mixer: Mixer, parallelism: Parallelism) -> None:
    """Refuse heads of a GPU that cannot be exchanged for tokens in equal parts, as ``AttnFuncWithCPAndQKVOA2A`` does."""
    if parallelism.context == 1 or parallelism.exchange is not ContextExchange.ALL_TO_ALL:
        return
    counts: tuple[tuple[int, str], ...]
    match mixer:
        case Attention():
            counts = (mixer.heads, "heads"), (mixer.key_value_heads, "heads of keys and values")
        case LatentAttention():
            counts = ((mixer.heads, "heads"),)
        case LinearAttention():
            counts = (mixer.key_heads, "heads of keys"), (mixer.value_heads, "heads of values")
    for count, what in counts:
        if count % parallelism.context:
            raise InputError(
                f"{count} {what} on a GPU cannot be exchanged in equal parts (cp={parallelism.context},comm=a2a): give cp a "
                f"divisor of {count}, or comm=p2p"
            )


def _mixer(mixer: Mixer, tensor: int) -> Mixer:
    match mixer:
        case Attention():
            heads = _divided(mixer.heads, tensor, "heads")
            shared = mixer.key_value_heads  # several GPUs may have the same one
            shared = _divided(shared, tensor, "heads of keys and values") if tensor % shared else 1
            return replace(mixer, heads=heads, key_value_heads=shared)
        case LatentAttention():
            return replace(mixer, heads=_divided(mixer.heads, tensor, "heads"))
        case LinearAttention():
            return replace(
                mixer,
                key_heads=_divided(mixer.key_heads, tensor, "heads of keys"),
                value_heads=_divided(mixer.value_heads, tensor, "heads of values"),
            )


def _feed_forward(part: FeedForward, tensor: int) -> FeedForward:
    match part:
        case Mlp():
            return replace(part, width=_divided(part.width, tensor, "columns of an MLP"))
        case Experts():
            expert, shared = (None if one is None else _feed_forward(one, tensor) for one in (part.expert, part.shared))
            assert isinstance(expert, Mlp)
            assert shared is None or isinstance(shared, Mlp)
            return replace(part, expert=expert, shared=shared)


def divided_part(part: Part, parallelism: Parallelism, *, narrow: bool) -> Part:
    """The kernels of one GPU of those that divide tensors.

    Args:
        part: the kernels of a block.
        parallelism: the number of GPUs.
        narrow: these are of the narrower block already, except for what is as wide as the residual stream.
    """
    if parallelism.tensor == 1:
        return part
    inside = 1.0 if narrow else 1 / parallelism.tensor
    stream = 1 / parallelism.along_sequence
    operations = tuple(_divided_row(one, inside, stream) for one in part.operations)
    if narrow:
        return replace(part, operations=operations)
    forward, backward = (
        fixed + (all_of_it - fixed) * inside
        for fixed, all_of_it in zip(_STREAM_WORKSPACE, (part.forward_workspace, part.backward_workspace), strict=True)
    )
    return replace(part, operations=operations, forward_workspace=forward, backward_workspace=backward)


def _divided_row(one: Operation, inside: float, stream: float) -> Operation:
    share = stream if one.name in _OF_STREAM else inside
    columns = ("forward", "backward", "kept", "kept_mask", "forward_fp32", "backward_fp32", "kept_fp32", "casts", "kept_casts")
    scaled = {column: getattr(one, column) * share for column in columns}
    if one.name in _FIRST_PRODUCTS:
        scaled["kept"] = one.kept * stream
    return replace(one, **scaled)


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """The GPUs that divide a batch, and how they are joined.

    Args:
        parallelism: how they divide it.
        bandwidth: bytes/s that each sends, in a ring and to its neighbour.
        latency_seconds: of one step.
        kept: share of its speed that a GPU keeps beside a collective.
        here: GPUs of its node with tokens of their own.
        network_bandwidth: bytes/s that these send to other nodes together.
    """

    parallelism: Parallelism
    bandwidth: float
    latency_seconds: float
    kept: float
    here: int = 1
    network_bandwidth: float = math.inf

    @classmethod
    def of(cls, hardware: Hardware) -> BatchGroup:
        """The group of each GPU of ``hardware``."""
        join = hardware.interconnect
        if not hardware.parallelism.divides:
            return ALONE_GROUP
        assert join is not None, "several GPUs are joined"
        if hardware.parallelism.context > hardware.gpus_of_node:
            bandwidth = min(join.bandwidth, join.network_bandwidth or join.bandwidth)
        else:
            bandwidth = join.bandwidth
        network = math.inf if join.network_bandwidth is None else join.network_bandwidth
        kept, here = join.concurrent_share, hardware.gpus_of_node
        return cls(hardware.parallelism, bandwidth, join.latency_seconds, kept, here, network)

    def gather_seconds(self, size_bytes: float) -> float:
        """Time of an all-gather to ``size_bytes`` among those that divide tensors, or of a reduce-scatter; an all-reduce is
        both.
        """
        steps = self.parallelism.tensor - 1
        return 0.0 if not steps else steps * (self.latency_seconds + size_bytes / (steps + 1) / self.bandwidth)

    def all_to_all_seconds(self, size_bytes: float) -> float:
        """Time in which each GPU sends equal parts of ``size_bytes`` to all that divide experts, one of which it is."""
        expert = self.parallelism.expert
        if expert == 1:
            return 0.0
        near = min(self.here, expert)
        within, between = size_bytes * (near - 1) / expert, size_bytes * (expert - near) / expert
        return self.latency_seconds + max(within / self.bandwidth, between * self.here / self.network_bandwidth)

    def loss_seconds(self, tokens: int) -> float:
        """Time of the loss's sums over parts of the vocabulary: the largest logit, that of the label, and the sum of exponents,
        in fp32 (Megatron-LM, ``megatron/core/tensor_parallel/cross_entropy.py``).
        """
        return 3 * 2 * self.gather_seconds(4 * tokens)

    def beside(self, collective: float, product: float) -> float:
        """Time that a collective adds to a product that it overlaps with."""
        return max(collective - product, (1 - self.kept) * collective)

    def context_seconds(self, core: float, queries: float, keys: float, *, backward: bool) -> float:
        """Time that the exchange adds to ``core`` seconds of attention in a pass.

        Args:
            core: what the GPU computes.
            queries: bytes of the queries of its tokens, and of their results.
            keys: bytes of their keys, and of their values.
            backward: gradients of keys and values go around with them.
        """
        context = self.parallelism.context
        if context == 1:
            return 0.0
        if self.parallelism.exchange is ContextExchange.ALL_TO_ALL:
            sent = 2 * (queries + keys) * (context - 1) / context
            return 2 * self.latency_seconds + sent / self.bandwidth
        step = self.latency_seconds + 2 * keys * (1 + backward) / self.bandwidth
        return (context - 1) * self.beside(step, core / context)


#: A GPU computes its batch by itself.
ALONE_GROUP = BatchGroup(ALONE, math.inf, 0.0, 1.0)
