"""Tables of several batches as one, whose sizes grow linearly, and rows that are equal as one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any


class _Bent(Exception):
    """A size does not grow linearly. No error: it ends the merging."""


def merged(documents: Sequence[dict[str, Any]], batch_sizes: Sequence[int]) -> dict[str, Any] | None:
    """The JSON object of a table for all batches, from one for each of several; None if a size does not grow linearly."""
    try:
        found: dict[str, Any] = _merged(documents, batch_sizes)
    except _Bent:
        return None
    return found


def _merged(trees: Sequence[Any], batches: Sequence[int]) -> Any:
    first = trees[0]
    if isinstance(first, dict) and all(isinstance(tree, dict) and tree.keys() == first.keys() for tree in trees):
        return {key: _merged([tree[key] for tree in trees], batches) for key in first}
    if isinstance(first, list) and all(isinstance(tree, list) and len(tree) == len(first) for tree in trees):
        return [_merged(some, batches) for some in zip(*trees, strict=True)]
    if all(tree == first for tree in trees):
        return first
    if all(type(tree) is int for tree in trees):
        each, rest = divmod(trees[1] - first, batches[1] - batches[0])
        fixed = first - each * batches[0]
        if not rest and all(tree == fixed + each * batch for tree, batch in zip(trees, batches, strict=True)):
            return [fixed, each]
    raise _Bent


def shortened(unit: dict[str, Any]) -> dict[str, Any]:
    """A unit whose equal rows are one with their number, of which saved tensors name so many; and of what is alive after each
    operation only what may be the peak.
    """
    forward, places = _counted(unit["forward"])
    saved = [
        one | {"again": None if one["again"] is None else sorted(Counter(places[row] for row in one["again"]).items())}
        for one in unit["saved"]
    ]
    largest = {name: peaks(unit[name]) for name in ("forward_workspace_bytes", "backward_workspace_bytes")}
    return unit | {"forward": forward, "backward": _counted(unit["backward"])[0], "saved": saved, **largest}


def shortened_loss(loss: dict[str, Any]) -> dict[str, Any]:
    """The same of a loss."""
    return loss | {"kernels": _counted(loss["kernels"])[0], "workspace_bytes": peaks(loss["workspace_bytes"])}


def peaks(sizes: Sequence[Any]) -> list[Any]:
    """Those of some sizes that may be the largest for some batch; none if nothing is alive."""
    grown = {(size, 0) if type(size) is int else (sum(size), size[1]) for size in sizes} | {(0, 0)}  # from that of one sample
    largest = {p for p in grown if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in grown)}
    return [[one - each, each] for one, each in sorted(largest - {(0, 0)})]


def _counted(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """Equal rows as one with their number, and the new place of each."""
    new: dict[str, int] = {}
    places = [new.setdefault(json.dumps(row), len(new)) for row in rows]
    counts = Counter(places)
    return [json.loads(text) | ({"count": counts[place]} if counts[place] > 1 else {}) for text, place in new.items()], places
