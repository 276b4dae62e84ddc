"""Tensors of a model that have elements in common: a change of one would change the other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from autohete.errors import InputError

#: Others may have their values elsewhere.
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class _Placed(NamedTuple):
    """A tensor in memory: its first byte, and the one after its last."""

    device: torch.device
    begin: int
    end: int
    name: str
    tensor: Tensor


def check_apart(named: Iterable[tuple[str, Tensor]], trained: Collection[int]) -> None:
    """Check that no tensor has elements in common with a trained one, as training moves and updates each by itself.

    Args:
        named: tensors by name, each once. Attributes of modules are not to be among them: those of PyTorch's own spectral norm
            begin as views of parameters, and are made anew in each forward.
        trained: ids of those that are trained.

    Raises:
        InputError: two have; names both.
    """
    for group in _together(sorted(_placed(named), key=lambda one: (str(one.device), one.begin))):
        for first, second in combinations(group, 2):
            if {id(first.tensor), id(second.tensor)} & {*trained} and _overlap(first, second):
                raise InputError(
                    f"{first.name} and {second.name} share memory, but are two tensors, which training would change apart: "
                    "register one nn.Parameter in both places, or give one of them a copy"
                )


def _placed(named: Iterable[tuple[str, Tensor]]) -> Iterator[_Placed]:
    for name, tensor in named:
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() and type(tensor) in _PLAIN:
            begin = tensor.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            yield _Placed(tensor.device, begin, begin + (last + 1) * tensor.element_size(), name, tensor)


def _together(placed: Iterable[_Placed]) -> Iterator[list[_Placed]]:
    """Tensors in order of their addresses, those together whose bytes overlap from first to last."""
    group: list[_Placed] = []
    for one in placed:
        if group and (one.device != group[0].device or one.begin >= max(other.end for other in group)):
            yield group
            group = []
        group.append(one)
    yield group


def _overlap(first: _Placed, second: _Placed) -> bool:
    """Whether two tensors, whose bytes overlap from first to last, have an element in common."""
    a, b = first.tensor, second.tensor
    size = a.element_size()
    if (a.is_contiguous() and b.is_contiguous()) or size != b.element_size() or (first.begin - second.begin) % size:
        return True
    begin = min(first.begin, second.begin)
    taken = torch.zeros((max(first.end, second.end) - begin) // size, dtype=torch.bool)
    taken.as_strided(a.shape, a.stride(), (first.begin - begin) // size).fill_(True)
    return bool(taken.as_strided(b.shape, b.stride(), (second.begin - begin) // size).any())
