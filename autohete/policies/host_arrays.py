"""Sizes of the arrays that DeepSpeed's stage 3 and its relatives keep on the host: how large each is decides what it takes.

PyTorch rounds a pinned array up to a power of two since 1.11 (``aten/src/ATen/cuda/CachingHostAllocator.cpp``; in pytorch issue
95823 the same 8.7 GB take 17.2 with 1.11 and 8.7 with 1.10). The allocator keeps the memory of an array that is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from autohete.profile import Profile

#: ``sub_group_size`` of DeepSpeed's stage 3, in elements.
SUB_GROUP = 1_000_000_000


def tensors_by_unit(profile: Profile) -> Iterator[tuple[int, ...]]:
    """Yield the elements of each trained tensor of a unit, unit by unit; all of one that is only measured as a whole."""
    for unit, costs in enumerate(profile.units):
        products = profile.of_rank.tensors(unit, trained=True)
        sizes = [one.parameters // one.matrices for one in products for _ in range(one.matrices)]
        yield tuple(sizes) if sum(sizes) == costs.trained_parameters else (costs.trained_parameters,)


def tensors(profile: Profile) -> Iterator[int]:
    """Yield the elements of each trained tensor, in the order of the model."""
    return chain.from_iterable(tensors_by_unit(profile))


def sub_groups(profile: Profile, size: int) -> Iterator[int]:
    """Yield the elements of the sub-groups of one GPU's part. Each ends with the tensor that makes it as large as ``size``.

    Source: ``_create_fp16_sub_groups`` in ``deepspeed/runtime/zero/stage3.py`` at edaa7221.
    """
    elements = 0
    for tensor in tensors(profile):
        elements += profile.hardware.part_of(tensor)
        if elements >= size:
            yield elements
            elements = 0
    if elements:
        yield elements


def pinned(profile: Profile, arrays: Iterable[int], element_bytes: int) -> int:
    """Return what pinned arrays of so many elements take."""
    return sum(profile.hardware.host.pinned(element_bytes * elements) for elements in arrays)
