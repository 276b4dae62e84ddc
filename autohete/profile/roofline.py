"""The analytic profile: a roofline per block (Williams et al. 2009).

Matrix products run at the GPU's GEMM rate for their shape, everything else at its memory bandwidth for the operations of the
implementation (:mod:`autohete.profile.kernels`). A fixed cost per kernel is added, and no pass is faster than the host, which
launches its kernels and does what the framework does between them (:attr:`autohete.hardware.Cpu.launch_seconds`). The floor is
one of each unit's pass. The host could run ahead of the GPU over several units; as blocks are alike, this would only save what
it can prepare while embedding, head and loss are computed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache, partial

from autohete.errors import InputError
from autohete.hardware import Gpu, Hardware
from autohete.profile.adapters import PEFT_OPERATIONS, additions, input_cast, shares_input
from autohete.profile.attention import check_attention
from autohete.profile.costs import ALTERNATE, LossProfile, Profile, SavedTensors, UnitProfile
from autohete.profile.divided import ALONE_GROUP, BatchGroup, divided_part, part_of_rank
from autohete.profile.kernels.cross_entropy import head_kernels
from autohete.profile.kernels.decoders import (
    INPUT_ROWS,
    both_parts,
    decoder_part,
    frozen_part,
    masked_part,
    norm_part,
    widened_part,
)
from autohete.profile.kernels.gpt2 import FLASH, GPT2_ROWS, Operation, Part, copied_inputs, leaned, without_inputs
from autohete.profile.kernels.under_autocast import autocast_part
from autohete.profile.loop import expert_loop
from autohete.profile.modules import called_modules, parameter_tensors, small_tensors
from autohete.profile.rates import ALIGNED_ELEMENTS, ATTENTION_BACKWARD, CHUNKED_SHARE, Rates
from autohete.profile.traced_roofline import TracedRoofline
from autohete.workload import EAGER_KERNELS, AttentionMask, BlockRole, LossKernels, Workload
from autohete.workload.model import (
    Attention,
    Block,
    Component,
    Experts,
    FeedForward,
    LatentAttention,
    LinearAttention,
    Mixer,
    Mlp,
    Product,
    gpt2_block,
)
from autohete.workload.optimizers import Optimizer
from autohete.workload.traced import TracedWorkload
from autohete.workload.training import FIRST, LAST, LinearLayer, linear_layers

#: Transformer Engine casts weights in each forward, and keeps the result and its transpose for backward; of inputs it keeps
#: the transpose (2.x, ``pytorch/module/linear.py``: ``get_weight_workspace``, without a cache unless ``is_first_microbatch`` is
#: given, and ``update_usage`` of ``weightmat`` and ``inputmat``). Bytes of a parameter, and of an element of an input.
_FP8_COPIES, _FP8_INPUT = 2, 1
#: A cast reads 16 bit and writes 8 twice, the second time transposed (``cast_transpose``): as much as two accesses. What
#: follows a norm or an activation that is computed again is cast again from its result (Megatron Core 0.14,
#: ``set_for_recompute_input_layernorm`` and ``set_save_original_input``).
_FP8_CAST = Operation("cast", "Transformer Engine 2, cast_transpose", forward=2, forward_kernels=1, kept_copies=_FP8_INPUT)


def _has_bias(layer: LinearLayer, mixer: Attention, mlp: Mlp) -> bool:
    return (mixer.bias if layer.row == FIRST else mixer.output_bias) if layer.mixes else mlp.bias


def analytic_profile(workload: Workload, hardware: Hardware) -> Profile:
    """The roofline profile of ``workload`` on ``hardware``."""
    if workload.training.fp8 and not hardware.gpu.peak_8bit_flops:
        raise InputError(
            f"the workload computes products in fp8, but {hardware.name} has no rate for them: give it the figure "
            "gpu.peak_8bit in a hardware file, choose hardware that has it, such as h100-pcie5, or train in bf16"
        )
    check_attention(workload.attention, hardware.gpu, hardware.name)
    return Profile(workload, hardware, *_on_gpu(workload, hardware.gpu, hardware.cpu.launch_seconds, BatchGroup.of(hardware)))


@lru_cache(maxsize=64)
def _on_gpu(
    workload: Workload, gpu: Gpu, launch_seconds: float, group: BatchGroup
) -> tuple[tuple[UnitProfile, ...], LossProfile]:
    """Blocks and loss. They do not depend on links, host and CPU, so many settings of a sweep share them."""
    roofline: _Roofline | TracedRoofline
    if isinstance(workload, TracedWorkload):
        part_of_rank(workload, group.parallelism)  # refuses
        roofline, firsts = TracedRoofline(workload, gpu, launch_seconds), list(workload.firsts_alike)
    else:
        roofline, firsts = _Roofline(workload, gpu, launch_seconds, group), _first_alike(workload)
    made = {unit: roofline.unit(unit) for unit in dict.fromkeys(firsts)}
    return tuple([made[unit] for unit in firsts]), roofline.loss()


@lru_cache
def _first_alike(workload: Workload) -> list[int]:
    """For each unit, the first one that is equal, so that they share one profile."""
    first: dict[object, int] = {}
    firsts = []
    for unit in range(workload.unit_count):
        parts = workload.components(unit) if workload.is_inner(unit) else ()
        alike = workload.role(unit), parts, workload.has_base_gradients(unit), bool(workload.adapter_products(unit))
        firsts.append(first.setdefault(alike, unit))
    return firsts


def _head_sizes(component: Attention | LatentAttention) -> tuple[int, int]:
    """Number of elements of a query and of a value."""
    if isinstance(component, Attention):
        return component.head_dim, component.head_dim
    return component.nope_dim + component.rope_dim, component.value_dim


def _exchanged_sizes(component: Attention | LatentAttention) -> tuple[float, float]:
    """Number of elements of a token's queries, and of its keys; on average with those of its result, and of its values."""
    if isinstance(component, Attention):
        return component.query_size, component.key_value_size
    both = (component.query_size + component.value_size) / 2
    return both, both


class _Roofline(Rates):
    """Prices units and loss. ``workload`` is what one GPU computes; ``whole`` is that of its group."""

    def __init__(self, workload: Workload, gpu: Gpu, launch_seconds: float, group: BatchGroup = ALONE_GROUP) -> None:
        self.group, self.whole = group, workload
        super().__init__(part_of_rank(workload, self.group.parallelism), gpu, launch_seconds)

    def _core_seconds(self, component: Component) -> tuple[float, float]:
        """Time of the products without weights, forward and backward. The operations between them are in the table."""
        w = self.workload
        if isinstance(component, (Attention, LatentAttention)) and not self.kernels.flash:
            head, value = _head_sizes(component)
            batch, s = w.batch_size * component.heads, w.sequence_length
            # Scores (and the gradient of the weights) have the head size as inner dimension, the others the sequence length.
            wide, deep = self._gemm_seconds(s, s, head, batch), self._gemm_seconds(s, value, s, batch)
            return wide + deep, wide + 3 * deep
        flops = w.tokens * component.flash_flops(self.whole.attended_tokens)
        if not isinstance(component, (Attention, LatentAttention)):
            seconds = flops / (self.flops * CHUNKED_SHARE)
            return seconds, ATTENTION_BACKWARD * seconds
        sizes = _head_sizes(component)
        masked = self._mask(component) is not None
        if masked:  # the kernel does not know what the mask removes
            flops = 2.0 * w.tokens * w.sequence_length * component.heads * sum(sizes)
        keys = flops / (2 * w.tokens * component.heads * sum(sizes))
        seconds = self._attention_seconds(flops, sizes, keys, backward=False, masked=masked)
        backward = self._attention_seconds(ATTENTION_BACKWARD * flops, sizes, keys, backward=True, masked=masked)
        sent = [w.tokens * self.element * size for size in _exchanged_sizes(component)]
        exchange = self.group.context_seconds
        return seconds + exchange(seconds, *sent, backward=False), backward + exchange(backward, *sent, backward=True)

    def _width(self, columns: int, inner: int) -> int:
        """A common divisor of the rows of a matrix, its input and its result. Kernels that are not eager belong to systems that
        pad their matrices (``make_vocab_size_divisible_by`` in Megatron-LM, nanoGPT's ``vocab_size``).
        """
        return math.gcd(columns, inner) if self.workload.kernels in EAGER_KERNELS else ALIGNED_ELEMENTS

    def _product_seconds(
        self, product: Product, fp32: bool = False, *, trained: bool = True, fp8: bool = False
    ) -> tuple[float, float]:
        """Time of a product with weights, forward and backward. Each expert's matrix works on an equal share of rows, one after
        another in a loop. Frozen weights have no gradient: backward is the product for the input's alone. For ``fp32`` and
        ``fp8`` see ``_gemm_seconds``.
        """
        looped = self.workload.looped_experts
        batch, times = (product.matrices, 1) if looped is None or product.matrices == 1 else (1, looped)
        rows, columns, inner = self.workload.tokens * product.rows / (batch * times), product.columns, product.inner
        if rows < 1:  # some matrices are not used
            rows, batch = 1, round(rows * batch)
        seconds = partial(self._gemm_seconds, batch=batch, fp8=fp8, fp32=fp32, width=self._width(columns, inner))
        forward, backward = seconds(rows, columns, inner), seconds(rows, inner, columns)
        backward += seconds(inner, columns, rows) * trained
        if not fp8:
            return times * forward, times * backward
        # Transformer Engine, cast_transpose: 16 bit are read and 8 written; what the gradient of the weights needs is written
        # a second time, transposed, and so are the weights, for the gradient of the input.
        activations, gradients = rows * batch * inner * (3 + trained), rows * batch * columns * (3 + trained)
        forward += (activations + 4 * batch * inner * columns) / self.bandwidth + 2 * self.overhead
        return times * forward, times * (backward + gradients / self.bandwidth + self.overhead)

    def _head_seconds(self, *, trained: bool) -> tuple[float, float]:
        """Time of the head's products, forward and backward: those of a chunk of the loss, as often as there are chunks. Each
        chunk adds to the gradient of the matrix (``addmm`` in Liger Kernel's ``ops/fused_linear_cross_entropy.py``).
        """
        w = self.workload
        rows, columns, inner = w.loss_tokens, w.vocabulary_size, w.hidden_size
        width = self._width(columns, inner)
        forward = self._gemm_seconds(rows, columns, inner, width=width)
        backward = self._split_gemm_seconds(rows, inner, columns, width)
        backward += self._gemm_seconds(inner, columns, rows, adds=rows < w.tokens, width=width) * trained
        return w.tokens / rows * forward, w.tokens / rows * backward

    def _products_seconds(self, unit: int) -> tuple[float, float]:
        """Time of all matrix products of a unit between embedding and head, forward and backward."""
        w = self.workload
        components, h, trained = w.components(unit), w.hidden_size, w.has_base_gradients(unit)
        products = [product for component in components for product in component.products(h)]
        fp8 = self.workload.training.fp8
        seconds = [self._product_seconds(product, trained=trained, fp8=fp8) for product in products]
        seconds += [self._core_seconds(component) for component in components]
        return sum(forward for forward, _ in seconds), sum(backward for _, backward in seconds)

    def _exchange_seconds(self, unit: int, *, last: bool = True) -> tuple[float, float]:
        """Time that collectives among GPUs that divide tensors add, forward and backward: those of each sublayer, or of
        embedding and head. Without ``last`` the result of the unit is not needed, and so not summed.
        """
        w, group = self.workload, self.group
        inner = w.components(unit) if w.is_inner(unit) else ()
        tokens = sum(one.active for one in inner if isinstance(one, Experts)) * w.tokens * w.hidden_size * self.element
        sent = 2 * group.all_to_all_seconds(tokens / group.parallelism.along_sequence)  # to experts, and back
        if group.parallelism.tensor == 1:
            return sent, sent
        once = group.gather_seconds(w.stream_bytes * w.tokens * w.hidden_size)
        divided = group.parallelism.sequence
        role = w.role(unit)
        if role is BlockRole.EMBEDDING:
            return (once, once) if divided else (2 * once, 0.0)
        if role is BlockRole.HEAD:
            firsts = [Product(w.vocabulary_size, w.hidden_size)]
            trained = w.has_base_gradients(0 if w.tied_embeddings else unit)
        else:
            trained = w.has_base_gradients(unit)
            firsts = [one.products(w.hidden_size)[isinstance(one, Experts)] for one in inner]
        forward = once * divided if role is BlockRole.HEAD else 2 * once * len(firsts) - (2 - divided) * once * (not last)
        backward = once * divided * (role is not BlockRole.HEAD) * len(firsts)
        for first in firsts:
            input_gradient = self._product_seconds(first, trained=False)[1]
            weights = self._product_seconds(first)[1] - input_gradient if trained else 0.0
            backward += group.beside((2 - divided) * once, weights)
            backward += group.beside(once, input_gradient) if divided and trained else 0.0
        return forward + sent, backward + sent

    def _part(self, unit: int) -> Part:
        """The kernels of a unit between embedding and head, in addition to its products."""
        w, block, in_fp8 = self.workload, self.workload.block(unit), self._casts_inputs(unit)
        frozen, adapted = not w.has_base_gradients(unit), [one for one in w.adapted_layers(unit) if shares_input(w, one)]
        copies, cast = self._copies(unit), _FP8_CAST if in_fp8 else input_cast(w)
        whole, parallelism = self.whole, self.group.parallelism
        if whole.block(unit) == gpt2_block(whole.hidden_size, whole.heads):
            part = divided_part(self._cast_part(self.kernels.part(w.role(unit)), block), parallelism, narrow=False)
            used = {name for layer in adapted for name in GPT2_ROWS[layer.mixes, layer.row]}
            copied = {name: copies[row] for row, names in GPT2_ROWS.items() for name in names}
            part = copied_inputs(part, copied, cast)
            part = masked_part(part, block, w.hidden_size, self._mask(block.mixer))
            return without_inputs(part, copied.keys() - used) if frozen or in_fp8 else part
        drops = frozen and not any(not one.mixes and one.row == LAST for one in adapted)
        parts = []
        for component in w.components(unit):
            mixes = component is block.mixer
            part = decoder_part(block, w.hidden_size, component, self.kernels, drops=drops)
            part = masked_part(part, block, w.hidden_size, self._mask(block.mixer))
            part = divided_part(self._cast_part(part, block, component), parallelism, narrow=True)
            part = copied_inputs(part, {row: copies[mixes, row] for row in INPUT_ROWS}, cast)
            if frozen or in_fp8:
                part = without_inputs(part, INPUT_ROWS - {layer.row for layer in adapted if layer.mixes is mixes})
            part = frozen_part(part) if frozen else part
            parts.append(widened_part(part) if w.is_prepared and frozen else part)
        part = both_parts(*parts) if len(parts) == 2 else parts[0]
        return leaned(part) if self.kernels.lean else part

    def _scores(self, unit: int) -> int:
        """Number of attention scores: ``batch x heads x sequence x sequence``."""
        w, mixer = self.workload, self.workload.block(unit).mixer
        heads = mixer.heads if isinstance(mixer, (Attention, LatentAttention)) else 0
        return w.tokens * w.sequence_length * heads

    def _mask_bytes(self) -> int:
        """Size of the masks that all blocks share, one for each size of window: they live as long as passes of blocks and the
        loss take, and so are counted with what each of them holds meanwhile.
        """
        w = self.workload
        mixers = {w.block(unit).mixer for unit in range(1, w.unit_count - 1)}
        kinds = {
            (one.window if isinstance(one, Attention) else None, mask)
            for one in mixers
            if not isinstance(one, LinearAttention) and (mask := self._mask(one)) is not None
        }
        elements = sum(1 if mask is AttentionMask.BOOL else self.element for _, mask in kinds)
        return elements * w.tokens * w.sequence_length

    def _mask(self, mixer: Mixer) -> AttentionMask | None:
        """The mask that attention in ``mixer`` gets; none where GPUs divide sequences, as kernels do that know windows."""
        return None if self.group.parallelism.context > 1 else self.workload.mask_of(mixer)

    def _elementwise_seconds(self, part: Part, direction: str, scores: int) -> float:
        """Time of everything except matrix products, from the table of operations: the slower of memory and instructions."""
        w, total = self.workload, part.total
        hidden, casts = w.tokens * w.hidden_size, total("casts") if self.element == 2 else 0
        fp32 = total(f"{direction}_fp32") + casts
        bytes_of_hidden = (total(direction) + casts) * self.element + fp32 * 4 + total("kept_mask")
        bytes_of_scores = total(f"{direction}_scores") * self.element + total("kept_score_mask")
        traffic = (bytes_of_hidden * hidden + bytes_of_scores * scores) / self.bandwidth
        accesses = (total(direction) + casts + fp32) * hidden + total(f"{direction}_scores") * scores
        return max(traffic, accesses * self.kernels.instructions / self.lanes)

    def unit(self, unit: int) -> UnitProfile:
        w, element, role = self.workload, self.element, self.workload.role(unit)
        hidden_bytes = element * w.tokens * w.hidden_size  # one activation of the residual stream
        whole_bytes = w.stream_bytes * w.tokens * w.hidden_size  # the same as it is handed from block to block
        cast_bytes, cast_seconds = self._cast_weights(unit)
        stream_bytes = whole_bytes // self.group.parallelism.along_sequence
        exchanged, exchanged_back = self._exchange_seconds(unit)
        parameters = w.unit_parameters(unit)
        saved: tuple[SavedTensors, ...] = ()
        results: tuple[SavedTensors, ...] = ()
        shorter: float | None = None
        activations: float
        workspaces: tuple[float, float]
        if role is BlockRole.EMBEDDING:
            # Gather (or scatter-add) of token rows; where positions are learned, of position rows, and dropout.
            learned = self.whole.architecture is None or self.whole.architecture.positions > 0
            activations = w.tokens * 8 + w.tokens * w.hidden_size * learned / self.group.parallelism.along_sequence  # ids, mask
            gathered, scattered, kernels = (6, 5, 3) if learned else (2, 2, 1)
            forward_host, backward_host = self._host_seconds(kernels), self._host_seconds(kernels, backward=True)
            forward = self._pass_seconds(gathered * whole_bytes / self.bandwidth + exchanged, kernels, forward_host)
            # The gradient of the whole table is written, even for few tokens.
            traffic = scattered * whole_bytes + 2 * w.precision.element_bytes * parameters
            backward = self._pass_seconds(traffic / self.bandwidth + exchanged_back, kernels, backward_host)
            workspaces = (whole_bytes, 0)
        elif role is BlockRole.HEAD:
            frozen = not w.has_base_gradients(0 if w.tied_embeddings else unit)  # its matrix
            activations = self._head_kept_bytes(unit, frozen) + cast_bytes
            gemm, gemm_backward = self._head_seconds(trained=not frozen)
            forward_host, backward_host = self._host_seconds(2), self._host_seconds(4, backward=True)
            forward = self._pass_seconds(gemm + 2 * whole_bytes / self.bandwidth + cast_seconds + exchanged, 2, forward_host)
            busy = gemm_backward + 5 * whole_bytes / self.bandwidth + cast_seconds * (not frozen) + exchanged_back
            backward = self._pass_seconds(busy, 4, backward_host)
            workspaces = (0, hidden_bytes + cast_bytes * (not frozen))  # the gradient of the matrix before it is cast
        else:
            part, scores = self._part(unit), self._scores(unit)
            total = part.total
            gemm, gemm_backward = self._products_seconds(unit)
            added = additions(w, unit, self._product_seconds, self.bandwidth) + expert_loop(w, unit, self.bandwidth)
            casts, frozen = self._cast_count(unit), not w.has_base_gradients(unit)
            forward_kernels = total("forward_kernels") + added.forward_kernels + casts
            backward_kernels = total("backward_kernels") + added.backward_kernels + casts * (not frozen)
            adapters = len(w.adapted_layers(unit)) * self.kernels.eager
            forward_host = self._host_seconds(forward_kernels, more=PEFT_OPERATIONS[0] * adapters)
            backward_host = self._host_seconds(backward_kernels, backward=True, more=PEFT_OPERATIONS[1] * adapters)
            busy = gemm + self._elementwise_seconds(part, "forward", scores) + added.forward_seconds + exchanged + cast_seconds
            forward = self._pass_seconds(busy, forward_kernels, forward_host)
            busy = gemm_backward + self._elementwise_seconds(part, "backward", scores) + added.backward_seconds + exchanged_back
            busy += cast_seconds * (not frozen)
            backward = self._pass_seconds(busy, backward_kernels, backward_host)
            copied = round(total("kept_copies") * w.tokens * w.hidden_size)
            saved = self._saved(unit, part, scores, added.kept_bytes - copied * bool(w.adapted_layers(unit)))
            saved += self._saved_in_fp8(unit, copied)
            saved += (SavedTensors("weights_in_16_bit", cast_bytes),) if cast_bytes else ()
            activations = min(self._kept_bytes(part, scores), stream_bytes) + sum(one.size_bytes for one in saved)
            shorter = self._shorter_recompute_seconds(unit, part, scores)
            results = (*self._results(unit), *self._alternate_results(unit, part, last=shorter is None))
            # The table's workspaces include the output, and in backward its gradient and that of the input. Of a narrow MLP
            # those two alone are more. Under autocast they are in tensors of 16 bit.
            tensor_bytes = hidden_bytes if w.autocast else whole_bytes
            workspaces = (
                part.forward_workspace * tensor_bytes - whole_bytes + added.forward_workspace_bytes,
                max(part.backward_workspace * tensor_bytes - 2 * whole_bytes, 0.0)
                + part.backward_score_workspace * element * scores
                + added.backward_workspace_bytes,
            )
        masks = 0 if role is BlockRole.EMBEDDING else self._mask_bytes()
        frozen_parameters = w.frozen_parameters(unit)
        update, states, temporaries = self._update(unit, parameters - frozen_parameters)
        return UnitProfile(
            role=role,
            parameters=parameters,
            forward_seconds=forward,
            backward_seconds=backward,
            gpu_update_seconds=update,
            gpu_update_workspace_bytes=temporaries,
            input_bytes=round(min(activations, 8 * w.tokens if role is BlockRole.EMBEDDING else stream_bytes)),
            activation_bytes=round(activations),
            forward_workspace_bytes=round(workspaces[0]) + masks,
            backward_workspace_bytes=round(workspaces[1]) + masks,
            saved=saved,
            frozen_parameters=frozen_parameters,
            frozen_bytes=w.frozen_bytes(unit),
            state_bytes=None if w.training.update_name == Optimizer.ADAMW else states,
            shorter_recompute_seconds=shorter,
            largest_parameter=max((matrix.parameters for matrix in w.trained_matrices(unit)), default=None),
            forward_host_seconds=forward_host,
            backward_host_seconds=backward_host,
            modules=called_modules(w, unit),
            tensors=parameter_tensors(w, unit),
            small_tensors=small_tensors(w, unit),
            routed_parameters=self._routed_parameters(unit),
            cast_bytes=cast_bytes,
            results=results,
        )

    def _cast_part(self, part: Part, block: Block, component: Mixer | FeedForward | None = None) -> Part:
        """``part`` under autocast, if there is any; see :func:`autocast_part`."""
        w = self.workload
        return autocast_part(part, block, component, w.hidden_size, self.kernels) if w.autocast else part

    def _cast_weights(self, unit: int) -> tuple[int, float]:
        """Bytes of the copies of weights that autocast makes in a forward, and the time that it takes; casts of their gradients
        in backward take as long.
        """
        w = self.workload
        if not w.autocast:
            return 0, 0.0
        if w.is_inner(unit):
            count = sum(product.parameters for part in w.components(unit) for product in part.products(w.hidden_size))
        else:
            count = w.vocabulary_size * w.hidden_size * (w.role(unit) is BlockRole.HEAD)
        return w.compute_bytes * count, (w.compute_bytes + w.precision.element_bytes) * count / self.bandwidth

    def _cast_count(self, unit: int) -> int:
        """The number of weights and biases that autocast casts in a unit between embedding and head."""
        w, mixer, mlp = self.workload, self.workload.block(unit).mixer, self.workload.block(unit).feed_forward
        if not w.autocast or not isinstance(mixer, Attention) or not isinstance(mlp, Mlp):
            return 0
        return sum(1 + _has_bias(layer, mixer, mlp) for layer in w.linear_layers(unit))

    def _results(self, unit: int) -> Iterator[SavedTensors]:
        """What the products with weights of attention and MLP give: ``attention_1``, ``attention_2``, ``mlp_1``, ``mlp_2``."""
        w = self.workload
        for component in w.components(unit):
            if isinstance(component, (Attention, Mlp)):
                for number, product in enumerate(component.products(w.hidden_size), 1):
                    size = self.element * w.tokens * product.columns
                    seconds, _ = self._product_seconds(product, trained=w.trains_base(unit), fp8=w.training.fp8)
                    yield SavedTensors(f"{type(component).__name__.lower()}_{number}", size, seconds)

    def _alternate_results(self, unit: int, part: Part, *, last: bool) -> Iterator[SavedTensors]:
        """What :data:`ALTERNATE` names: the results of every second product with weights, and that of fused attention.

        Products are counted as autograd calls ``mm``, which a layer with a bias does not. Whether sublayers are units or not,
        the count begins anew only with a block. Without ``last`` the last product is in no recomputation.
        """
        w, block = self.workload, self.workload.block(unit)
        mixer, mlp = block.mixer, block.feed_forward
        if not (isinstance(mixer, Attention) and isinstance(mlp, Mlp)) or w.training.lora is not None:
            return
        layers = [one for one in linear_layers(block, w.hidden_size) if not _has_bias(one, mixer, mlp)]
        here = {isinstance(component, Attention) for component in w.components(unit)}
        size, seconds = 0, 0.0
        for layer in (one for one in layers[::2] if one.mixes in here):
            size += self.element * w.tokens * layer.shape.columns
            if last or layer.mixes or layer.row != LAST:
                seconds += self._product_seconds(layer.shape, fp8=w.training.fp8)[0]
        if True in here and self.kernels.flash:
            rows = Part(tuple(one for one in part.operations if one.name == FLASH))
            size += round(w.tokens * (self.element * mixer.query_size + 4 * mixer.heads))
            seconds += self._core_seconds(mixer)[0] + self._elementwise_seconds(rows, "forward", 0)
        if size:
            yield SavedTensors(ALTERNATE, size, seconds)

    def _routed_parameters(self, unit: int) -> int:
        """Parameters of experts that are divided among GPUs."""
        parts = self.workload.components(unit) if self.workload.is_inner(unit) and self.group.parallelism.expert > 1 else ()
        return sum(one.routed_parameters(self.workload.hidden_size) for one in parts if isinstance(one, Experts))

    def _casts_inputs(self, unit: int) -> bool:
        """Whether products keep their inputs in 8 bits, and none in 16: those of Transformer Engine with trained weights."""
        return self.workload.training.fp8 and not self.kernels.lean and self.workload.has_base_gradients(unit)

    def _copies(self, unit: int) -> Counter[tuple[bool, str]]:
        """How many copies of an input in another format are kept, by whether it is the mixer's and the row that keeps it:
        those of products in fp8, of which fused ones of queries, keys and values, or of gate and up, have one; or of adapters.
        """
        w, in_fp8 = self.workload, self._casts_inputs(unit)
        if self.kernels.lean:  # what is made again within backward is no copy
            return Counter()
        layers = w.linear_layers(unit) if in_fp8 else [one for one in w.adapted_layers(unit) if not shares_input(w, one)]
        copies = Counter((one.mixes, one.row) for one in layers)
        fused = in_fp8 and not self.kernels.eager
        for mixes, row in copies:
            if row != FIRST or (fused and (not mixes or isinstance(w.block(unit).mixer, Attention))):
                copies[mixes, row] = 1
        return copies

    def _saved_in_fp8(self, unit: int, copied: int) -> tuple[SavedTensors, ...]:
        """What Transformer Engine's products keep in 8 bits: copies of weights, and inputs besides those ``copied``."""
        w = self.workload
        if not w.training.fp8 or self.kernels.lean:
            return ()
        h = w.hidden_size
        products = [product for part in w.components(unit) for product in part.products(h)]
        layers = [layer.shape for layer in w.linear_layers(unit)] if self.kernels.eager else products
        inputs = round(_FP8_INPUT * w.tokens * sum(one.rows * one.inner for one in layers))
        weights = SavedTensors("weights_in_fp8", _FP8_COPIES * sum(one.parameters for one in products))
        others = (inputs - copied) * self._casts_inputs(unit)
        return (weights, SavedTensors("inputs_in_fp8", others)) if others else (weights,)

    def _head_kept_bytes(self, unit: int, frozen: bool) -> float:
        """What the head keeps: the input of its norm and, if its matrix is not ``frozen``, that of the projection. Under
        autocast a frozen matrix in fp32 is cast, and backward needs the 16-bit copy.
        """
        w = self.workload
        whole, parallelism = self.whole.architecture, self.group.parallelism
        input_bytes = self.element * w.tokens * w.hidden_size / parallelism.along_sequence
        if whole is None or not self.kernels.eager:
            kept: float = input_bytes * w.stream_bytes / self.element
        else:
            norm = norm_part(whole.blocks[0], w.hidden_size, whole.final_norm, self.kernels)
            norm = divided_part(self._cast_part(norm, whole.blocks[0]), parallelism, narrow=True)
            kept = self._kept_bytes(norm if w.has_base_gradients(unit) else frozen_part(norm), 0)
        return kept + input_bytes * (not frozen) + 2 * w.vocabulary_size * w.hidden_size * w.is_prepared

    def _shorter_recompute_seconds(self, unit: int, part: Part, scores: int) -> float | None:
        """Time of a recomputation that stops at the last tensor that backward needs. An operation's inputs are saved before it
        runs (``pack_hook`` of ``_recomputation_hook`` in torch/utils/checkpoint.py), so a product that is the last is left out.
        """
        w = self.workload
        if not w.training.early_stop or w.looped_experts is not None or w.adapted_layers(unit):
            return None
        needed = part.until_saved()
        last_product = needed.operations[-1].name == LAST
        gemm, _ = self._products_seconds(unit)
        if last_product:
            component = w.components(unit)[-1]
            gemm -= self._product_seconds(component.products(w.hidden_size)[-1])[0]
        kernels = needed.total("forward_kernels") - last_product + self._cast_count(unit)
        exchanged, _ = self._exchange_seconds(unit, last=not last_product)
        busy = gemm + self._elementwise_seconds(needed, "forward", scores) + self._cast_weights(unit)[1] + exchanged
        return self._pass_seconds(busy, kernels, self._host_seconds(kernels))

    def _kept_bytes(self, part: Part, scores: int) -> float:
        """Size of what ``part`` keeps for backward, its input included."""
        w, total = self.workload, part.total
        casts = 4 * (self.element == 2)
        of_hidden = total("kept") * self.element + total("kept_mask") + 4 * total("kept_fp32") + casts * total("kept_casts")
        of_hidden += total("kept_copies")
        of_scores = total("kept_scores") * self.element + total("kept_score_mask") + casts * total("kept_score_casts")
        return of_hidden * w.tokens * w.hidden_size + of_scores * scores

    def _saved(self, unit: int, part: Part, scores: int, added_bytes: int) -> tuple[SavedTensors, ...]:
        """What ``part`` keeps besides its input, tensor by tensor, and ``added_bytes`` of adapters and loops."""
        w, found, names = self.workload, [], Counter[str]()
        input_bytes = w.stream_bytes * w.tokens * w.hidden_size // self.group.parallelism.along_sequence
        for one in part.saved():
            size = round(self._kept_bytes(one.kept, scores))
            there = min(size, input_bytes) if one.again is None else 0
            size, input_bytes = size - there, input_bytes - there
            if not size:
                continue
            name = re.sub(r"\W+", "_", one.name)
            names[name] += 1
            name = f"{name}_{names[name]}" if names[name] > 1 else name
            if one.again is None:
                found.append(SavedTensors(name, size))
                continue
            kernels = one.again.total("forward_kernels")
            busy = self._elementwise_seconds(one.again, "forward", scores)
            busy += self._core_seconds(w.block(unit).mixer)[0] * one.products + kernels * self.overhead
            found.append(SavedTensors(name, size, busy, self._host_seconds(kernels), one.selective))
        return (*found, *([SavedTensors("adapters", added_bytes)] if added_bytes else []))

    def loss(self) -> LossProfile:
        w, element = self.workload, self.element
        if w.chunked_loss or w.loss is LossKernels.IN_PLACE:
            return self._chunked_loss()
        fp32 = w.autocast or (self.kernels.eager and self.whole.architecture is not None)
        default = LossKernels.FP32 if fp32 else self.kernels.loss
        copies = w.batch_size > 1 or w.loss is None  # a default counts the copy in any case
        head = head_kernels(w.loss or default, element, copies=copies, keeps=w.keeps_logits)
        logits = w.tokens * w.vocabulary_size
        busy = head.traffic * logits / self.bandwidth + self.group.loss_seconds(w.tokens)
        seconds = self._pass_seconds(busy, head.kernels, self._host_seconds(head.kernels))
        size, workspace = (element + head.wider) * logits, round(head.workspace * logits) + self._mask_bytes()
        return LossProfile(seconds, size, workspace, head.keeps_logits, wider_bytes=head.wider * logits)

    def _chunked_loss(self) -> LossProfile:
        """A kernel reads a chunk's logits and writes their gradient in their place. It reads each row twice, the second time
        from cache, where those of all multiprocessors fit (300 KB for 150,000 logits). LLMQ at b77d9691,
        ``fused_classifier.cu`` and ``_backward_lmhead`` in ``llama_model.cpp``; Liger Kernel, ``cross_entropy.py`` and
        ``fused_linear_cross_entropy.py``. From 2025-08 to 2026-08 (2845fe83 to pull 1454) Liger did not add up the gradient of
        the head's matrix in the product, but in two passes more.
        """
        w, element = self.workload, self.element
        chunks = -(-w.tokens // w.loss_tokens)
        kernels, traffic = 4 * chunks, 2 * element * w.tokens * w.vocabulary_size
        busy = traffic / self.bandwidth + chunks * self.group.loss_seconds(w.loss_tokens)
        seconds = self._pass_seconds(busy, kernels, self._host_seconds(kernels))
        return LossProfile(seconds, element * w.loss_tokens * w.vocabulary_size, self._mask_bytes(), in_place=True)
