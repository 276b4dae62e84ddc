"""Operators of PyTorch with the shapes of their inputs: how much they compute and move."""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

from autohete.profile.rates import ATTENTION_BACKWARD

_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}
_ELEMENTWISE = re.compile(r"aten::(?:add_?|mul_?|copy_|gelu|silu|gelu_backward|silu_backward)$")
#: Queries are (batch, heads, tokens, size) in PyTorch, (batch, tokens, heads, size) in the library flash-attn.
_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_(?:flash|efficient|cudnn)_attention(_backward)?$|(flash_attn)::_flash_attn_forward$"
)
#: Places of ``is_causal`` among their arguments (torch 2.13, native_functions.yaml).
_CAUSAL = {
    "aten::_scaled_dot_product_flash_attention": 4,
    "aten::_scaled_dot_product_efficient_attention": 6,
    "aten::_scaled_dot_product_cudnn_attention": 6,
    "aten::_scaled_dot_product_flash_attention_backward": 11,
    "aten::_scaled_dot_product_efficient_attention_backward": 11,
    "aten::_scaled_dot_product_cudnn_attention_backward": 14,
}
_BYTES = {"float": 4, "c10::Half": 2, "c10::BFloat16": 2, "double": 8, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1}


class Operator(NamedTuple):
    """An operator with the shapes of its inputs, a scalar being ``()``, and their types; ``causal``: its mask."""

    start: float
    end: float
    thread: int
    name: str
    shapes: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    causal: bool = True


def is_causal(name: str, inputs: object) -> bool:
    """Whether attention has a causal mask, by its inputs as text; True if that is not recorded."""
    place = _CAUSAL.get(name)
    return place is None or not isinstance(inputs, list) or len(inputs) <= place or inputs[place] != "False"


def is_counted(name: str) -> bool:
    """Whether an operator's work is counted."""
    return name in _PRODUCTS or bool(_ELEMENTWISE.match(name) or _ATTENTION.match(name))


def shapes_of(value: object) -> tuple[tuple[int, ...], ...] | None:
    """Return the shapes of the inputs of an operator; None if they are not lists of whole numbers."""
    if not isinstance(value, list):
        return None
    shapes = []
    for one in value:
        if not isinstance(one, list) or not all(type(size) is int and 0 <= size < 2**40 for size in one):
            return None
        shapes.append(tuple(one))
    return tuple(shapes)


def product_sizes(operator: Operator) -> tuple[int, int, int, int]:
    """Batch, rows, inner and columns of a product of matrices; zeros for another operator."""
    first = _PRODUCTS.get(operator.name, len(operator.shapes))
    shapes = operator.shapes[first : first + 2]
    if len(shapes) < 2 or not 2 <= len(shapes[0]) == len(shapes[1]) <= 3 or shapes[0][-1] != shapes[1][-2]:
        return 0, 0, 0, 0
    return prod(shapes[0][:-2]), shapes[0][-2], shapes[0][-1], shapes[1][-1]


def input_type(operator: Operator) -> str:
    """The type of the first matrix of a product, or of the queries of attention; empty if types are not recorded."""
    first = _PRODUCTS.get(operator.name, _queries(operator))
    return operator.types[first] if len(operator.types) > first else ""


def product_flops(operator: Operator) -> float:
    """FLOPs of a product of matrices; 0 for another operator."""
    return 2.0 * prod(product_sizes(operator))


def _attended_tokens(operator: Operator) -> int:
    """Keys that a query of fused attention is multiplied with, a mask apart; 0 for another operator."""
    found = _ATTENTION.match(operator.name)
    keys = operator.shapes[_queries(operator) + 1 :][:1]
    return keys[0][1 if found[2] else 2] if found and keys and len(keys[0]) == 4 else 0


def attention_flops(operator: Operator) -> float:
    """FLOPs of fused attention, without those that a causal mask saves; 0 for another operator."""
    queries, keys = _queries(operator), _attended_tokens(operator)
    passes = ATTENTION_BACKWARD if queries else 1.0
    return 4.0 * prod(operator.shapes[queries]) * keys * (0.5 if operator.causal else 1.0) * passes if keys else 0.0


def _queries(operator: Operator) -> int:
    """The place of the queries among the inputs of attention: after the gradient, in a backward."""
    return int(operator.name.endswith("_backward"))


def model_flops_of(operator: Operator) -> float:
    """FLOPs as a model's are counted: attention without a mask."""
    return product_flops(operator) + attention_flops(operator) * (2.0 if operator.causal else 1.0)


def traffic_bytes(operator: Operator) -> float:
    """Bytes that an elementwise operator reads and writes; 0 for another one, or if its tensors differ in shape."""
    if not _ELEMENTWISE.match(operator.name):
        return 0.0
    shapes = [shape for shape in operator.shapes if shape]
    sizes = [_BYTES.get(kind, 0) for shape, kind in zip(operator.shapes, operator.types, strict=False) if shape]
    if not sizes or not all(sizes) or len(set(shapes)) > 1 or len(sizes) != len(shapes):
        return 0.0
    written = 0 if operator.name == "aten::copy_" else sizes[0]
    return float(prod(shapes[0])) * (sum(sizes) + written)
