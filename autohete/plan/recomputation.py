"""Which units are recomputed before which backward, derived from what each forward of a unit keeps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from autohete.errors import InputError
from autohete.plan.routes import Activations, UnitPlan


class Recomputation(NamedTuple):
    """One recomputation of a unit.

    Args:
        unit: index of the unit.
        again: index of this recomputation among those of the unit, from 0.
        keeps: what it keeps. It keeps everything only right before the backward of the unit, or of a unit above that needs it.
        hands_on: its output is the input of the unit above, which is recomputed next.
    """

    unit: int
    again: int
    keeps: Activations
    hands_on: bool


#: For each unit, recomputations in order.
Recomputations = tuple[tuple[Recomputation, ...], ...]


def recomputations(units: Sequence[UnitPlan]) -> Recomputations:
    """Return, for each unit, the recomputations right before its backward, in order.

    Backward runs from the last unit down. When it reaches a unit whose most recent forward did not keep its activations, units
    are recomputed in order, from the nearest unit at or below it whose input is available up to the unit itself.

    Raises:
        InputError: the input of a unit cannot be recomputed, or a unit is recomputed less often than it says.
    """
    return _recomputations(tuple(units))


@lru_cache
def _recomputations(units: tuple[UnitPlan, ...]) -> Recomputations:
    forwards = [unit.forwards for unit in units]
    done = [1] * len(units)
    there = [kept[0] for kept in forwards]
    _check_inputs(there, 0)
    found: list[list[Recomputation]] = [[] for _ in units]
    for top in reversed(range(len(units))):
        if there[top] is Activations.KEEP:
            continue
        start = top
        while there[start] is Activations.DROP:
            start -= 1
        for unit in range(start, top + 1):
            there[unit] = forwards[unit][done[unit]]
            found[top].append(Recomputation(unit, done[unit] - 1, there[unit], unit < top))
            done[unit] += 1
        if there[top] is not Activations.KEEP:
            raise InputError(
                f"unit {top} is recomputed right before its backward, which needs all, but again specifies {there[top]}: it "
                "has more entries than units above need it recomputed; leave one out"
            )
        if start < top:
            _check_inputs(there[start : top + 1], start)
    return tuple(map(tuple, found))


def _check_inputs(kept: Sequence[Activations], first: int) -> None:
    """Refuse a unit that drops its input although the unit below is not recomputed."""
    for below, (lower, upper) in enumerate(zip(kept, kept[1:], strict=False), first):
        if lower in (Activations.KEEP, Activations.SELECTIVE) and upper is Activations.DROP:
            raise InputError(
                f"unit {below + 1} drops its input, but unit {below}, which would make it again, keeps its activations and is "
                f"not recomputed as a whole: let unit {below + 1} keep its input (recompute), or unit {below} be recomputed"
            )
