"""What PyTorch runs on CUDA where the CPU runs something else, and each operation's kernels, accesses and products there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import sdpa_flop_count

from autohete.workload.model import causal_tokens

#: Rows, columns, inner size and number of a matrix product.
Sizes = tuple[int, int, int, int]

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "convolution_backward", "linalg_solve_triangular"}
#: These launch no kernel.
NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh", "detach"}
#: These touch an element or two per token and leave the logits alone.
_SPARSE = {"nll_loss_forward", "gather", "scatter_add_"}
#: Operations that are several kernels on CUDA: input and parameters of the norm (layer_norm_kernel.cu), the fill with zeros
#: first, flash attention's row sums before and its cast after.
_LAUNCHES = {
    "native_layer_norm_backward": 2,
    "nll_loss_backward": 2,
    "slice_backward": 2,
    "_scaled_dot_product_flash_attention_backward": 3,
}
_FORWARD_ATTENTION = {"_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"}
_BACKWARD_ATTENTION = {f"{name}_backward" for name in _FORWARD_ATTENTION}
#: Head sizes that FlashAttention takes (ATen/native/transformers/cuda/sdp_utils.cpp, ``check_head_dim_size_flash``).
_LARGEST_HEAD = 256


def flash_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, **_: object) -> Tensor:
    """Causal ``scaled_dot_product_attention`` as CUDA runs it in 16 bit."""
    if q.shape[-1] != v.shape[-1]:  # for which the kernel that it chooses has another name
        different: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout_p, True)[0]
        return different
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, True)[0]
    return out


def one_kernel_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``dropout`` as CUDA runs it: one kernel that keeps a mask of bytes; elsewhere it is taken apart."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``scaled_dot_product_attention`` as CUDA runs it: by FlashAttention without a mask in 16 bit, otherwise by the
    memory-efficient kernel, which takes a mask that is added to the scores (``sdp_utils.cpp``, ``attention.cpp`` of PyTorch).
    """
    sizes, half = {query.shape[-1], key.shape[-1], value.shape[-1]}, query.dtype in (torch.bfloat16, torch.float16)
    if attn_mask is None and half and len(sizes) == 1 and max(sizes) <= _LARGEST_HEAD and query.dim() == 4:
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[
            0
        ]
        return out
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    batch = query.shape[:-3]
    flat = [one.reshape(-1, *one.shape[-3:]) if one.dim() > 3 else one.unsqueeze(0) for one in (query, key, value)]
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        while attn_mask.dim() < 4:
            attn_mask = attn_mask.unsqueeze(0)
        attn_mask = attn_mask.expand(flat[0].shape[0], flat[0].shape[1], query.shape[-2], key.shape[-2])
    result: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        *flat, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]
    return result.reshape(*batch, *result.shape[-3:])


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Run attention and dropout as on CUDA meanwhile, and let ``transformers`` choose masks as for real tensors."""
    changes: list[tuple[Any, str, Any]] = [
        (functional, "scaled_dot_product_attention", _attention),
        (functional, "dropout", one_kernel_dropout),
    ]
    try:
        from transformers import masking_utils
    except ImportError:
        pass
    else:  # which takes positions without values for those of packed documents, and gives kernels a mask
        changes.append((masking_utils, "find_packed_sequence_indices", lambda positions: None))
    before = [(place, name, getattr(place, name)) for place, name, _ in changes]
    try:
        for place, name, value in changes:
            setattr(place, name, value)
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def launches(name: str) -> int:
    """Kernels of one operation."""
    return 0 if name in NO_KERNEL else _LAUNCHES.get(name, 1)


def elements(tensor: Tensor) -> int:
    """Elements in memory: an expanded dimension is one."""
    found = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found *= size if stride else 1
    return found


def touched(name: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> list[Tensor]:
    """What an operation reads and writes on CUDA."""
    if name in _SPARSE:
        return []
    if name == "embedding":  # the rows that it copies
        return [*written, *written, *read[1:]]
    if name == "nll_loss_backward":  # of the log-probabilities it needs the shape
        return list(written)
    if name == "slice_backward":  # zeros, then a copy into them
        return [*read, *written, *read]
    if name == "native_layer_norm_backward":  # the parameters' kernel reads gradient and input again
        return [*read, *read[:2], *written]
    return [*read, *written]


def attention_flops(name: str, args: Sequence[Any]) -> tuple[int, int, tuple[int, int, int]]:
    """Model FLOPs of a fused attention, and those that it computes: five products where forward has two, and a causal mask
    skips what it hides (Dao 2023); with the elements of a query and of a value, and the keys of a query.
    """
    backward = name in _BACKWARD_ATTENTION
    q, k, v = args[backward : 3 + backward]
    forward: int = sdpa_flop_count(  # type: ignore[no-untyped-call]
        q.shape, (*q.shape[:2], *k.shape[2:]), (*q.shape[:2], *v.shape[2:])
    )
    place = 11 if backward else 4 if "flash" in name else 6
    causal = len(args) > place and args[place] is True
    keys = causal_tokens(k.shape[-2]) if causal else k.shape[-2]
    computed = round(forward * (2.5 if backward else 1) * keys / k.shape[-2])
    return forward * (2 if backward else 1), computed, (q.shape[-1], v.shape[-1], round(keys))


def is_masked(name: str, args: Sequence[Any]) -> bool:
    """Whether a fused attention gets a mask, which the memory-efficient kernel takes behind queries, keys and values."""
    return "efficient" in name and args[3 + (name in _BACKWARD_ATTENTION)] is not None


def is_attention(name: str) -> bool:
    """Whether it is a fused attention."""
    return name in _FORWARD_ATTENTION or name in _BACKWARD_ATTENTION


def products(name: str, args: Sequence[Any], out: Any) -> tuple[Sizes, ...]:
    """The matrix products of an operation; none if it is something else."""
    match name:
        case "mm" | "bmm" | "addmm" | "baddbmm":
            a, b = args[1:3] if "add" in name else args[:2]
            return ((a.shape[-2], b.shape[-1], a.shape[-1], 1 if a.dim() == 2 else a.shape[0]),)
        case "_grouped_mm":
            a, b = args[:2]
            if b.dim() == 3:  # rows of a are divided among the matrices
                return ((-(-a.shape[0] // b.shape[0]), b.shape[2], a.shape[1], b.shape[0]),)
            return ((a.shape[0], b.shape[1], -(-a.shape[1] // out.shape[0]), out.shape[0]),)
        case "convolution":
            return (_convolution(args[0].shape, args[1].shape, out.shape, args[6], args[8]),)
        case "convolution_backward":
            sizes = _convolution(args[1].shape, args[2].shape, args[0].shape, args[7], args[9])
            m, n, k, groups = sizes
            return tuple(one for one, made in zip(((m, k, n, groups), (n, k, m, groups)), args[10], strict=False) if made)
        case _:
            return ()


def _convolution(x: Sequence[int], weight: Sequence[int], out: Sequence[int], transposed: bool, groups: int) -> Sizes:
    """A convolution as the implicit matrix product that it is (cuDNN, Chetlur et al. 2014, arXiv 1410.0759)."""
    positions = 1
    for size in (x[0], *(x if transposed else out)[2:]):
        positions *= size
    window = 1
    for size in weight[2:]:
        window *= size
    if transposed:
        return positions, weight[1] * window, x[1] // groups, groups
    return positions, weight[0] // groups, weight[1] * window, groups


def solve_flops(name: str, args: Sequence[Any]) -> int:
    """FLOPs of a triangular solve, which is no product."""
    return int(args[1].numel() * args[0].shape[-1]) if name == "linalg_solve_triangular" else 0
