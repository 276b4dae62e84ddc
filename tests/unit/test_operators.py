"""What recorded operators compute and move, by their shapes."""

from __future__ import annotations

import pytest

from autohete.calibrate.operators import (
    Operator,
    attention_flops,
    is_causal,
    is_counted,
    model_flops_of,
    product_flops,
    traffic_bytes,
)

BF16, QUERIES = "c10::BFloat16", (2, 8, 1024, 64)


def operator(name: str, *shapes: tuple[int, ...], kind: str = BF16, causal: bool = True) -> Operator:
    """An operator whose tensors have one type."""
    return Operator(0, 1, 0, name, shapes, tuple(kind if shape else "Scalar" for shape in shapes), causal)


@pytest.mark.parametrize(
    ("one", "flops"),
    [
        (operator("aten::mm", (2, 3), (3, 5)), 60),
        (operator("aten::addmm", (5,), (2, 3), (3, 5), (), ()), 60),
        (operator("aten::bmm", (7, 2, 3), (7, 3, 5)), 420),
        (operator("aten::baddbmm", (7, 2, 5), (7, 2, 3), (7, 3, 5)), 420),
        (operator("aten::mm", (2, 3), (4, 5)), 0),
        (operator("aten::mm", (2, 3)), 0),
        (operator("aten::mul", (2, 3), (3, 5)), 0),
    ],
)
def test_flops_of_products(one: Operator, flops: int) -> None:
    """Two for each element of the result and of the inner size; none if the shapes do not match."""
    assert product_flops(one) == model_flops_of(one) == flops


def test_flops_of_attention() -> None:
    """Two products of queries with keys, half of them under a mask; 2.5 times as many in a backward, in either layout."""
    whole = 4 * 2 * 8 * 1024 * 1024 * 64
    name = "aten::_scaled_dot_product_flash_attention"
    assert attention_flops(operator(name, QUERIES, QUERIES, QUERIES)) == whole / 2
    assert attention_flops(operator(name, QUERIES, QUERIES, QUERIES, causal=False)) == whole
    assert attention_flops(operator(name, QUERIES, (2, 2, 512, 64), (2, 2, 512, 64))) == whole / 4  # grouped, fewer keys
    assert attention_flops(operator(f"{name}_backward", QUERIES, QUERIES, QUERIES, QUERIES)) == 2.5 * whole / 2
    library = (2, 1024, 8, 64)
    assert attention_flops(operator("flash_attn::_flash_attn_forward", library, library, library)) == whole / 2
    assert model_flops_of(operator(name, QUERIES, QUERIES, QUERIES)) == whole
    assert attention_flops(operator(name, (2, 8), (2, 8))) == 0


def test_the_mask_of_attention() -> None:
    """It is causal unless the recorded argument says that it is not."""
    name = "aten::_scaled_dot_product_flash_attention"
    assert not is_causal(name, ["", "", "", "0.", "False"])
    assert is_causal(name, ["", "", "", "0.", "True"])
    assert is_causal(name, None)
    assert is_causal("flash_attn::_flash_attn_forward", ["", "", "", "", "False"])


def test_traffic_of_elementwise_operators() -> None:
    """What is read and written, in the size of each type; none if tensors differ in shape."""
    assert traffic_bytes(operator("aten::add", (4, 8), (4, 8), ())) == 3 * 32 * 2
    assert traffic_bytes(operator("aten::mul", (4, 8), ())) == 2 * 32 * 2
    assert traffic_bytes(Operator(0, 1, 0, "aten::copy_", ((32,), (32,)), ("float", BF16))) == 32 * (4 + 2)
    assert traffic_bytes(operator("aten::add", (4, 8), (8,))) == 0
    assert traffic_bytes(operator("aten::add", (4, 8), (4, 8), kind="long int")) == 0
    assert traffic_bytes(operator("aten::mm", (4, 8), (8, 4))) == 0


def test_only_what_is_counted_is_kept() -> None:
    """Of all operators of a trace, a few."""
    assert is_counted("aten::add_")
    assert is_counted("aten::_scaled_dot_product_cudnn_attention_backward")
    assert not is_counted("aten::addmv")
    assert not is_counted("aten::view")
