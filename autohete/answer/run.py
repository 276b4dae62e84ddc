"""How the parts of an answer are worked through: one after the other, or in whatever way the caller brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: Works through the calls of a stage, such as in several processes, and returns their results in order. The result of a call
#: that there was no time for is None.
Run = Callable[[str, Sequence[Callable[[], Any]]], list[Any]]


def in_turn(stage: str, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """A :data:`Run` in this process. The command line has one that runs in several and reports its progress."""
    return [call() for call in calls]
