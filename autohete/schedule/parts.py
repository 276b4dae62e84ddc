"""The parts in which a large value moves, is used and is released, one after another."""

from __future__ import annotations

#: Parts begin at multiples of this many elements, so that kernels compute whole vectors.
_GROUP = 64


def part_ranges(elements: int, parts: int) -> list[range]:
    """Cut ``elements`` into at most ``parts`` parts of equal size, of which the last may be smaller."""
    size = max(-(-elements // (parts * _GROUP)) * _GROUP, 1)
    return [range(begin, min(begin + size, elements)) for begin in range(0, max(elements, 1), size)]
