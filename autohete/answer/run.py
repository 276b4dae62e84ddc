"""How the parts of an answer are worked through: one after the other, or in whatever way the caller brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: Applies a function to each of some arguments and returns the results in order; see :func:`in_turn`.
Run = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]


def in_turn(function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
    """A :data:`Run` in this process. The command line has one that runs in several."""
    return [function(each) for each in arguments]
