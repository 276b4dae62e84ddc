"""The kernels of a block under ``torch.autocast``: parameters are in fp32, products and attention in 16 bit.

PyTorch casts the inputs of each product and of attention, and each weight once in a forward (``lower_precision_fp`` in
aten/src/ATen/autocast_mode.h at 2.13); the results are in 16 bit. A residual stream that begins in fp32 stays so, and with it
norms, and rotations, whose angles have the format of the stream. ``pow`` and ``layer_norm`` compute in fp32 (``fp32`` in the
same file), and so does what follows the ``pow`` of new GELU. Compiled kernels cast as they read and write. Those of a kernel
per operation were counted by running modules of ``transformers`` 5.23 (``tests/models/test_under_autocast.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from autohete.profile.kernels.gpt2 import FLASH, GPT2_ROWS, Implementation, Operation, Part
from autohete.workload.model import Activation, Attention, Block, FeedForward, Mixer, Mlp, Norm, NormPlace
from autohete.workload.training import FIRST, LAST

#: Returns a row as it is under autocast.
_Rule = Callable[[Operation], Operation]
#: A row per element: accesses in 16 bit and in fp32 forward, the same backward, tensors kept in 16 bit and in fp32, and casts
#: that are kernels of their own, forward and backward.
_Columns = tuple[int, ...]
_GELU_NEW: dict[str, _Columns] = {
    "gelu: 0.5 x": (2, 0, 2, 0, 0, 0, 0, 0),
    "gelu: x^3": (1, 3, 1, 8, 0, 1, 1, 1),
    "gelu: 0.044715 x^3": (0, 2, 0, 2, 0, 0, 0, 0),
    "gelu: x + ...": (1, 2, 4, 1, 0, 0, 0, 1),
    "gelu: sqrt(2/pi) (...)": (0, 2, 0, 2, 0, 0, 0, 0),
    "gelu: tanh": (0, 2, 0, 3, 0, 1, 0, 0),
    "gelu: 1 + ...": (0, 2, 0, 0, 0, 0, 0, 0),
    "gelu: product": (1, 2, 5, 6, 1, 1, 0, 1),
}
_GELU_NEW_TOTAL: _Columns = tuple(map(sum, zip(*_GELU_NEW.values(), strict=True)))
#: A rotation, per element of queries and keys.
_ROTATION: _Columns = (5, 5, 13, 6, 0, 0, 0, 4)
_ACTIVATION = "activation"
#: The rows that GPT-2's tables have for what decoders' call otherwise.
_FIRSTS = {FIRST, *GPT2_ROWS[True, FIRST], *GPT2_ROWS[False, FIRST]}
_NORMS = {"norm", "ln_1", "ln_2", "input layer norm", "post-attention layer norm"}
_RESIDUALS = {"residual", "bias, dropout, residual"}
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
    rules = _rules(block, component, hidden_size, made)
    wide = _gelu_width(component, hidden_size) * any(one.name in (_ACTIVATION, *_GELU_NEW) for one in part.operations)
    return replace(
        part,
        operations=tuple(rules[one.name](one) if one.name in rules else one for one in part.operations),
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


def _rules(block: Block, component: Mixer | FeedForward | None, hidden_size: int, made: Implementation) -> dict[str, _Rule]:
    """The rules by name of row, if each operation is a kernel of its own. Other rows are the same under autocast."""
    attention = component if isinstance(component, Attention) else None
    # A norm of ``Norm.RMS`` that reads 16 bit writes fp32, as it multiplies by its weight after the cast back.
    widens = block.norm is not Norm.RMS_FP32 and not made.fuses_norms
    joint = isinstance(component, (Attention, Mlp)) and bool(component.joint)
    layers = 1 if joint else 3 if attention else 1 + (isinstance(component, Mlp) and component.gated)
    rules: dict[str, _Rule] = dict.fromkeys(_FIRSTS, partial(_first, layers=layers)) | dict.fromkeys(_NORMS, _wide)
    ends_wide = widens and block.norm_place is not NormPlace.BEFORE
    rules |= dict.fromkeys(_RESIDUALS, _wide if ends_wide else _residual)
    if widens:
        rules |= dict.fromkeys(("norm of queries or keys", "norm after"), partial(_widening, norm=block.norm))
    if attention is not None:
        rules |= _rules_of_attention(attention, hidden_size, made, normalised_wide=widens)
    if width := _gelu_width(component, hidden_size):
        rules |= {name: partial(_scaled, width=width, columns=columns) for name, columns in _GELU_NEW.items()}
        rules[_ACTIVATION] = partial(_scaled, width=width, columns=_GELU_NEW_TOTAL)
        rules |= dict.fromkeys((LAST, "mlp c_proj"), partial(_cast, tensors=width, kernels=1))
    return rules


def _rules_of_attention(a: Attention, hidden_size: int, made: Implementation, *, normalised_wide: bool) -> dict[str, _Rule]:
    """Queries and keys are in fp32 once they have been normalised or rotated, and attention casts them back."""
    queries, keys = a.query_size / hidden_size, a.key_value_size / hidden_size
    before = normalised_wide and (a.head_norm or a.whole_norm)
    if not before and (made.fuses_norms or not a.rotary):
        return {}
    return {
        "rotation": _wide if before else partial(_scaled, width=queries + keys, columns=_ROTATION),
        FLASH: partial(_cast, tensors=queries + keys, kernels=2),
        "repeated keys and values": partial(_cast, tensors=2 * queries, kernels=2),
    }


def _gelu_width(component: Mixer | FeedForward | None, hidden_size: int) -> float:
    """Elements of an MLP with new GELU, in hidden tensors; 0: it has another activation function."""
    if component is None:
        return _GPT2_WIDTH
    if isinstance(component, Mlp) and component.activation is Activation.GELU_NEW:
        return component.width / hidden_size
    return 0


def _first(one: Operation, layers: int) -> Operation:
    """The product of linear layers that have one input: each casts it for itself, and backward sums its gradients in fp32."""
    summed = 3 * (layers - 1)
    one = replace(one, backward=one.backward - summed, backward_fp32=summed, kept=layers * one.kept)
    return _cast(one, layers, layers)


def _residual(one: Operation) -> Operation:
    """The sublayer's result is in 16 bit, and so is its gradient."""
    return replace(
        one,
        forward=one.forward / 3,
        forward_fp32=2 * (one.forward / 3),
        backward=one.backward / 3,
        backward_fp32=4 * (one.backward / 3),
        backward_kernels=one.backward_kernels + 1,
    )


def _widening(one: Operation, norm: Norm) -> Operation:
    """A norm of 16 bit whose weights make its result fp32."""
    size = one.forward / 2
    if norm is Norm.LAYER:
        return _cast(_wide(one), size, 1)
    return replace(
        one,
        forward=one.forward - size,
        forward_fp32=one.forward_fp32 + size,
        backward=one.backward - 4 * size,
        backward_fp32=one.backward_fp32 + 6 * size,
        backward_kernels=one.backward_kernels + 1,
    )


def _cast(one: Operation, tensors: float, kernels: int) -> Operation:
    """``one`` that casts so many hidden tensors from fp32, and backward their gradients to it."""
    return replace(
        one,
        casts=one.casts + tensors,
        forward_kernels=one.forward_kernels + kernels,
        backward_kernels=one.backward_kernels + kernels,
    )


def _scaled(one: Operation, width: float, columns: _Columns) -> Operation:
    """``one`` over ``width`` hidden tensors."""
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
