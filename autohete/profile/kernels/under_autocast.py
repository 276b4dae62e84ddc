"""The kernels of a block under ``torch.autocast``: parameters are in fp32, products and attention in 16 bit.

PyTorch casts the inputs of each product and of attention, and each weight once in a forward (``lower_precision_fp`` in
aten/src/ATen/autocast_mode.h at 2.13); the results are in 16 bit. A residual stream that begins in fp32 stays so, and with it
norms, and rotations, whose angles have the format of the stream. ``pow`` and ``layer_norm`` compute in fp32 (``fp32`` in the
same file), and so does what follows the ``pow`` of new GELU. Compiled kernels cast as they read and write. Those of a kernel
per operation were counted by running modules of ``transformers`` 5.23 (``tests/models/test_under_autocast.py``).
"""

from __future__ import annotations

from dataclasses import replace

from autohete.profile.kernels.gpt2 import GPT2_ROWS, Implementation, Operation, Part
from autohete.workload.model import Activation, Attention, Block, FeedForward, Mixer, Mlp, Norm, NormPlace
from autohete.workload.training import FIRST

#: New GELU per element: accesses in 16 bit and in fp32 forward, the same backward, tensors kept in 16 bit and in fp32, and
#: casts that are kernels of their own, forward and backward.
_GELU_NEW = {
    "gelu: 0.5 x": (2, 0, 2, 0, 0, 0, 0, 0),
    "gelu: x^3": (1, 3, 1, 8, 0, 1, 1, 1),
    "gelu: 0.044715 x^3": (0, 2, 0, 2, 0, 0, 0, 0),
    "gelu: x + ...": (1, 2, 4, 1, 0, 0, 0, 1),
    "gelu: sqrt(2/pi) (...)": (0, 2, 0, 2, 0, 0, 0, 0),
    "gelu: tanh": (0, 2, 0, 3, 0, 1, 0, 0),
    "gelu: 1 + ...": (0, 2, 0, 0, 0, 0, 0, 0),
    "gelu: product": (1, 2, 5, 6, 1, 1, 0, 1),
}
_GELU_NEW_TOTAL = tuple(map(sum, zip(*_GELU_NEW.values(), strict=True)))
_ACTIVATION = "activation"
#: The rows that GPT-2's tables have for what decoders' call otherwise.
_FIRSTS = {FIRST, *GPT2_ROWS[True, FIRST], *GPT2_ROWS[False, FIRST]}
_NORMS = {"norm", "ln_1", "ln_2", "input layer norm", "post-attention layer norm"}
_RESIDUALS = {"residual", "bias, dropout, residual"}
#: A rotation in a kernel per operation, per element of queries and keys: accesses in 16 bit and in fp32, forward and backward.
_ROTATION = (5, 5, 13, 6)
#: Width of GPT-2's MLP in hidden tensors.
_GPT2_WIDTH = 4


def autocast_part(
    part: Part, block: Block, component: Mixer | FeedForward | None, hidden_size: int, made: Implementation
) -> Part:
    """``part``, which computes in 16 bit, under autocast. Casts of weights are not counted.

    Args:
        part: of ``component``, or a table of GPT-2.
        block: of which it is a part.
        component: attention or MLP of ``block``; None: all of it, by a table of GPT-2.
        hidden_size: elements of the residual stream per token.
        made: the implementation.
    """
    if not made.eager:  # output and gradients of the stream are wider
        operations = tuple(map(_compiled, part.operations))
        forward, backward = part.forward_workspace + 1, part.backward_workspace + 2
        return replace(part, operations=operations, forward_workspace=forward, backward_workspace=backward)
    rows = _Casts(block, component, hidden_size, made)
    wide = rows.gelu * any(one.name == _ACTIVATION or one.name in _GELU_NEW for one in part.operations)
    return replace(
        part,
        operations=tuple(map(rows.row, part.operations)),
        forward_workspace=3 + 2 * wide,
        backward_workspace=part.backward_workspace + 1 + 4 * wide,
    )


def _wide(one: Operation) -> Operation:
    """All in fp32, with no casts to it and back. What is kept is counted in tensors of 16 bit, so that it can be released."""
    casts = 2 * (one.casts > 0)
    return replace(
        one,
        forward=0,
        backward=0,
        forward_fp32=one.forward_fp32 + one.forward,
        backward_fp32=one.backward_fp32 + one.backward,
        kept=2 * one.kept,
        casts=0,
        forward_kernels=one.forward_kernels - casts,
        backward_kernels=one.backward_kernels - casts,
    )


def _compiled(one: Operation) -> Operation:
    """``one`` as a kernel that casts as it reads and writes."""
    if one.name in _NORMS:  # which read the stream and write what a product takes, and in backward the opposite
        forward, backward = one.forward / 2, one.backward / 5
        return replace(one, forward=forward, forward_fp32=forward, backward=2 * backward, backward_fp32=3 * backward)
    if one.name in _RESIDUALS:
        forward, backward = one.forward / 3, one.backward / 3
        return replace(one, forward=forward, forward_fp32=2 * forward, backward=2 * backward, backward_fp32=backward)
    return _wide(one) if one.name == "sum of residual gradients" else one


class _Casts:
    """A kernel per operation. Each product casts its input for itself, and the gradient of it back."""

    def __init__(self, block: Block, component: Mixer | FeedForward | None, hidden_size: int, made: Implementation) -> None:
        attention = component if isinstance(component, Attention) else None
        mlp = component if isinstance(component, Mlp) else None
        #: Tensors of the hidden size that queries and keys are.
        self.queries, self.keys = (
            (attention.query_size / hidden_size, attention.key_value_size / hidden_size) if attention else (0.0, 0.0)
        )
        #: Linear layers that have one input.
        self.layers = 1 if block.joint else 3 if attention else 1 + bool(mlp and mlp.gated)
        #: Whether norms that read 16 bit write fp32, as ``Norm.RMS`` multiplies by its weight after the cast back.
        self.norm = block.norm
        self.widens = block.norm is not Norm.RMS_FP32 and not made.fuses_norms
        normalised = self.widens and attention is not None and (attention.head_norm or attention.whole_norm)
        #: Whether queries and keys are in fp32 before they are rotated, and after.
        self.wide_before = normalised
        self.wide_after = normalised or (attention is not None and attention.rotary and not made.fuses_norms)
        #: Elements of an MLP with new GELU, in hidden tensors.
        self.gelu = _GPT2_WIDTH if component is None else mlp.width / hidden_size if mlp and _has_new_gelu(mlp) else 0.0
        self.ends_wide = self.widens and block.norm_place is not NormPlace.BEFORE

    def row(self, one: Operation) -> Operation:
        if one.name in _FIRSTS:  # the gradients of its input are summed in fp32
            summed = 3 * (self.layers - 1)
            one = replace(one, backward=one.backward - summed, backward_fp32=summed, kept=self.layers * one.kept)
            return _cast(one, self.layers, self.layers)
        if one.name in _GELU_NEW:
            return _gelu(one, _GELU_NEW[one.name], _GPT2_WIDTH)
        if one.name in _NORMS:
            return _wide(one)
        if one.name in _RESIDUALS:
            return _wide(one) if self.ends_wide else self._residual(one)
        match one.name:
            case "norm of queries or keys" | "norm after" if self.widens:
                return self._widening(one)
            case "rotation" if self.wide_before:
                return _wide(one)
            case "rotation" if self.wide_after:
                return self._rotation(one)
            case "flash attention" if self.wide_after:
                return _cast(one, self.queries + self.keys, 2)
            case "repeated keys and values" if self.wide_after:
                return _cast(one, 2 * self.queries, 2)
            case "activation" if self.gelu:
                return _gelu(one, _GELU_NEW_TOTAL, self.gelu)
            case "last product" | "mlp c_proj" if self.gelu:
                return _cast(one, self.gelu, 1)
        return one

    def _residual(self, one: Operation) -> Operation:
        """The sublayer's result is in 16 bit, and so is its gradient."""
        forward, backward = one.forward / 3, one.backward / 3
        return replace(
            one,
            forward=forward,
            forward_fp32=2 * forward,
            backward=backward,
            backward_fp32=4 * backward,
            backward_kernels=one.backward_kernels + 1,
        )

    def _widening(self, one: Operation) -> Operation:
        """A norm of 16 bit whose weights make its result fp32."""
        if self.norm is Norm.LAYER:
            return _cast(_wide(one), one.forward / 2, 1)
        size = one.forward / 2
        return replace(
            one,
            forward=one.forward - size,
            forward_fp32=one.forward_fp32 + size,
            backward=one.backward - 4 * size,
            backward_fp32=one.backward_fp32 + 6 * size,
            backward_kernels=one.backward_kernels + 1,
        )

    def _rotation(self, one: Operation) -> Operation:
        """Products with angles, which are in fp32, and their sum; in backward the products alone."""
        size = self.queries + self.keys
        forward, forward_fp32, backward, backward_fp32 = (size * each for each in _ROTATION)
        return replace(
            one,
            forward=forward,
            forward_fp32=forward_fp32,
            backward=backward,
            backward_fp32=backward_fp32,
            backward_kernels=one.backward_kernels + 4,
        )


def _has_new_gelu(mlp: Mlp) -> bool:
    return mlp.activation is Activation.GELU_NEW


def _cast(one: Operation, tensors: float, kernels: int) -> Operation:
    """``one`` that casts so many hidden tensors from fp32, and backward their gradients to it."""
    return replace(
        one,
        casts=one.casts + tensors,
        forward_kernels=one.forward_kernels + kernels,
        backward_kernels=one.backward_kernels + kernels,
    )


def _gelu(one: Operation, columns: tuple[int, ...], width: float) -> Operation:
    """A part of new GELU over ``width`` hidden tensors."""
    forward, forward_fp32, backward, backward_fp32, kept, kept_fp32 = (width * each for each in columns[:6])
    return replace(
        one,
        forward=forward,
        forward_fp32=forward_fp32,
        backward=backward,
        backward_fp32=backward_fp32,
        kept=kept + 2 * kept_fp32,
        forward_kernels=one.forward_kernels + columns[6],
        backward_kernels=one.backward_kernels + columns[7],
    )
