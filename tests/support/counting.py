"""Counts what a module runs on the meta device: operations, what they read and write, and what forward keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


def flash_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, **_: object) -> Tensor:
    """``scaled_dot_product_attention`` as CUDA runs it in 16 bit; meta tensors would be taken apart."""
    if q.shape[-1] != v.shape[-1]:  # for which the kernel that it chooses has another name
        different: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout_p, True)[0]
        return different
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, True)[0]
    return out


def one_kernel_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """``dropout`` as CUDA runs it: one kernel that keeps a mask of bytes; meta tensors would be taken apart."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution", "convolution_backward", "linalg_solve_triangular"}
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
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


@dataclass(frozen=True, slots=True)
class Call:
    """One operation: elements and bytes per element of each tensor that it reads or writes."""

    name: str
    backward: bool
    touched: tuple[tuple[int, int], ...]

    @property
    def launches(self) -> int:
        return _LAUNCHES.get(self.name, 1)


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation that launches a kernel, and the most bytes alive at once of tensors made meanwhile."""

    active: ClassVar[Counter | None] = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.backward = False
        self.peak_bytes = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read, written = _tensors((args, kwargs)), _tensors(out)
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and name not in _NO_KERNEL:
            self.add(name, _touched(name, read, written))
        self.watch(written)
        return out

    def add(self, name: str, touched: Sequence[Tensor]) -> None:
        """Write down one operation."""
        sizes = tuple((_elements(tensor), tensor.element_size()) for tensor in touched)
        self.calls.append(Call(name, self.backward, sizes))

    def watch(self, made: Sequence[Tensor]) -> None:
        """Count the storages that are alive now."""
        for tensor in made:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
        alive = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}  # type: ignore[no-untyped-call]
        self._storages = alive
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in alive.values()))

    def kernels(self, backward: bool) -> int:
        """Kernels launched."""
        return sum(call.launches for call in self.calls if call.backward is backward)

    def tensors(self, backward: bool) -> list[tuple[int, int]]:
        """Elements and bytes per element of what is read and written outside the matrix products."""
        calls = (call for call in self.calls if call.backward is backward and call.name not in PRODUCTS)
        return [touched for call in calls for touched in call.touched]


@contextmanager
def counting() -> Iterator[Counter]:
    """Count what is run meanwhile."""
    Counter.active = counter = Counter()
    try:
        with counter:
            yield counter
    finally:
        Counter.active = None


def _tensors(tree: object) -> list[Tensor]:
    """The tensors in ``tree``, each part of a storage once."""
    found = {}
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found[leaf.untyped_storage()._cdata, leaf.storage_offset(), leaf.shape] = leaf
    return list(found.values())


def _elements(tensor: Tensor) -> int:
    """Elements in memory: an expanded dimension is one."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements


def _touched(name: str, read: list[Tensor], written: list[Tensor]) -> list[Tensor]:
    """What the operation reads and writes on CUDA."""
    if name in _SPARSE:
        return []
    if name == "nll_loss_backward":  # of the log-probabilities it needs the shape
        return written
    if name == "slice_backward":  # zeros, then a copy into them
        return [*read, *written, *read]
    if name == "native_layer_norm_backward":  # the parameters' kernel reads gradient and input again
        return [*read, *read[:2], *written]
    return [*read, *written]


def as_one_kernel(name: str, compute: Callable[[], tuple[Tensor, ...]], *read: Tensor) -> tuple[Tensor, ...]:
    """What ``compute`` returns, counted as one kernel that reads ``read``: stands for a kernel that PyTorch does not have."""
    with _disable_current_modes():
        written = compute()
    if Counter.active is not None:
        Counter.active.add(name, [*read, *written])
        Counter.active.watch(written)
    return written


def kept_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes of the storages that forward saves for backward, without parameters."""
    parameters = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    return sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in parameters)
