"""Which units are computed again before the backward of which, as their plans say by what each of their forwards keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autohete.errors import InputError
from autohete.plan.routes import Activations, UnitPlan


class Recomputation(NamedTuple):
    """A unit is computed once more.

    Args:
        unit: which.
        again: which of its recomputations, from 0.
        keeps: what it keeps; only before the unit's backward, or that of a unit above which needs it, all.
        hands_on: its output is the input of the unit above, which is recomputed next.
    """

    unit: int
    again: int
    keeps: Activations
    hands_on: bool


def recomputations(units: Sequence[UnitPlan]) -> list[list[Recomputation]]:
    """Of each unit what is recomputed right before its backward, in order.

    Backward goes from the last unit down. Where it meets a unit whose last forward has not kept its activations, units are
    computed again, from the next one at or below it whose input is there up to itself.

    Raises:
        InputError: a unit whose input nothing would make again, or one that is recomputed less often than it says.
    """
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
                f"unit {top} is recomputed right before its backward, which needs all, but again says {there[top]}: it has "
                "more entries than units above need it recomputed; leave one out"
            )
        if start < top:
            _check_inputs(there[start : top + 1], start)
    return found


def _check_inputs(kept: Sequence[Activations], first: int) -> None:
    """Refuse units that drop their input above one that is not computed again."""
    for below, (lower, upper) in enumerate(zip(kept, kept[1:], strict=False), first):
        if lower in (Activations.KEEP, Activations.SELECTIVE) and upper is Activations.DROP:
            raise InputError(
                f"unit {below + 1} drops its input, but unit {below}, which would make it again, keeps its activations and is "
                f"not recomputed as a whole: let unit {below + 1} keep its input (recompute), or unit {below} be recomputed"
            )
