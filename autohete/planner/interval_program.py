"""Integer program of recomputation by retention intervals, with a number of variables that is linear in the units (Moccasin).

The model of Bartan et al. (ICML 2023, arXiv 2304.14463; github haoming-codes/moccasin at ff7ad8b, ``src/moccasin/cp.py``) for a
chain of units. There each value has at most C intervals in which it is in memory, each with a start, an end and a bit that says
whether it is used; each start is one more computation of the value. Intervals that overlap need their sizes together
(``AddCumulative``), what is computed needs its operands in memory (``AddReservoirConstraintWithActive``), and the times of all
computations are least. With C = 2, the default, and a given order of computation, this becomes for a unit of a chain:

- The first interval of all values starts in forward. That of the input and those of what the unit saves end there or last until
  its backward: one binary variable each.
- A second interval lasts until the unit's backward. A saved tensor that can be made again by itself has it right before that
  backward. All values of a unit have it before the backward of the unit itself, or, if that of the input of the unit above has
  ended in forward as well, when the unit above has it. So no variable is needed for its start.

The cumulative constraint has three sums per unit, in rows from one unit to the next: what first intervals below hold (P), what
second intervals below that are open at this unit hold in addition (E), and the gradients that exist when its second interval
starts (G). The last two depend on products of variables, so their rows hold only if a binary variable is 0 or 1 (big M).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autohete.errors import check_fields
from autohete.plan import Activations
from autohete.planner.chain import Stage
from autohete.planner.mixed_program import TOLERANCE, MixedProgram

#: The gap at which the search ends, of the time of all computations; its limits in nodes and, if a node takes long, in seconds.
GAP = 0.005
_NODES, _SECONDS = 200, 60.0


class Remade(NamedTuple):
    """A saved tensor of a unit that can be made again by itself.

    Args:
        name: its name.
        size_bytes: its size.
        nanoseconds: time on the GPU.
        launch_ns: time that the host needs for it; a unit's tensors take the larger sum.
    """

    name: str
    size_bytes: int
    nanoseconds: float
    launch_ns: float


class Alone(NamedTuple):
    """What units save that can be made again by itself, and the temporaries that this takes.

    Args:
        tensors: the tensors.
        forward_bytes: temporaries of a forward that does not keep some of them, with what it does not keep.
        again_bytes: temporaries when they are made again.
    """

    tensors: tuple[Remade, ...]
    forward_bytes: int
    again_bytes: int


@dataclass(frozen=True, slots=True)
class FirstInterval:
    """The first intervals of a unit's values.

    Args:
        kept: which last until its backward.
        again: names of saved tensors that do not, although others do.
    """

    kept: Activations
    again: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)


class IntervalSearch(NamedTuple):
    """What a search has found.

    Args:
        intervals: those of each unit. None: nothing fits, or nothing was found within the limits.
        bound_ns: no intervals take less time for all forwards and recomputations. Infinite: nothing fits.
    """

    intervals: list[FirstInterval] | None
    bound_ns: float


def least_by_intervals(stages: Sequence[Stage], alone: Sequence[Alone], memory_bytes: int) -> IntervalSearch:
    """Search for the intervals with which ``stages`` take the least time within ``memory_bytes``.

    Args:
        stages: the units; the input of the first is always there, and the last one computes the loss.
        alone: what they save that can be made again by itself.
        memory_bytes: budget for everything that a stage lists.
    """
    if memory_bytes <= 0:
        return IntervalSearch(None, math.inf)
    found = _IntervalRows(stages, alone, memory_bytes).solve()
    if found.intervals is None or peak_bytes(stages, alone, found.intervals) <= memory_bytes:
        return found
    less = round(memory_bytes * (1 - 100 * TOLERANCE))  # by more than rows are forgiven
    again = _IntervalRows(stages, alone, less).solve()
    fits = again.intervals is not None and peak_bytes(stages, alone, again.intervals) <= memory_bytes
    return IntervalSearch(again.intervals if fits else None, found.bound_ns)


def peak_bytes(stages: Sequence[Stage], alone: Sequence[Alone], intervals: Sequence[FirstInterval]) -> int:
    """The most memory that a moment takes, added up exactly."""
    below = peak = 0
    left = sum(stage.left_bytes for stage in stages)
    tops = list(range(len(stages)))  # of each unit, the one before whose backward its second intervals start
    for unit in reversed(range(len(stages) - 1)):
        if intervals[unit + 1].kept is Activations.DROP:
            tops[unit] = tops[unit + 1]
    lefts = []
    for stage in stages:
        left -= stage.left_bytes
        lefts.append(left)
    opened = 0
    for unit, (stage, interval) in enumerate(zip(stages, intervals, strict=True)):
        kept, again = interval.kept, interval.again
        own = stage.input_bytes + stage.kept_bytes
        opened = opened if kept is Activations.DROP else 0
        keeps = kept in (Activations.KEEP, Activations.SELECTIVE)
        some = max(stage.keeping_bytes, alone[unit].forward_bytes) if again else stage.keeping_bytes
        forward = stage.kept_bytes + some if keeps else stage.dropping_bytes
        peak = max(peak, below + stage.input_bytes + forward + stage.output_bytes)
        there, top = below + opened + own, tops[unit]
        if not keeps:
            more = stage.keeping_bytes + stage.output_bytes
            peak = max(peak, there + more + stages[top].gradient_bytes + lefts[top])
        elif again:
            peak = max(peak, there + alone[unit].again_bytes + stage.gradient_bytes + lefts[unit])
        peak = max(peak, there + stage.gradient_bytes + stage.backward_bytes + lefts[unit])
        less = sum(one.size_bytes for one in alone[unit].tensors if one.name in again)
        first = stage.input_bytes * (kept is not Activations.DROP) + (stage.kept_bytes - less) * keeps
        below, opened = below + first, opened + (own - first) * (not keeps)
    return peak


class _IntervalRows:
    """The program, with sizes relative to the memory and times relative to that of all forwards.

    Columns are named by a letter and a unit: k, what the unit saves is kept; x, its input is; q and a number, a tensor is made
    again by itself; s, any is; t, the time of that; P, E and G as above.
    """

    def __init__(self, stages: Sequence[Stage], alone: Sequence[Alone], memory_bytes: int) -> None:
        self._stages, self._alone, self._memory = stages, alone, memory_bytes
        self._columns: dict[tuple[str, int], int] = {}
        self._program = MixedProgram()
        self._scale = max(1, sum(stage.forward_ns for stage in stages))
        self._left = [sum(stage.left_bytes for stage in stages[unit + 1 :]) for unit in range(len(stages))]
        for unit in range(len(stages)):
            self._add_columns(unit)
        # The time if all units had second intervals, together with the units above; the gap is relative to the whole time.
        fixed = sum(stage.forward_ns + stage.recompute_ns for stage in stages)
        fixed += sum(stage.forward_ns - stage.recompute_ns for stage in stages[:-1])
        self._column("1", 0, cost=fixed, least=1.0)
        for unit in range(len(stages)):
            self._saved(unit)
            self._passed_on(unit)
            self._moments(unit)
            self._ordered(unit)

    def _column(self, letter: str, unit: int, *, cost: float = 0.0, least: float = 0.0, integer: bool = False) -> None:
        most = math.inf if letter == "t" else 1.0
        self._columns[letter, unit] = self._program.column(cost / self._scale, least, most, integer=integer)

    def _at_most(self, limit: float, *terms: tuple[float, str, int], equal: bool = False) -> None:
        """Add a row: a sum of terms, coefficient and column each, is at most ``limit``."""
        named = ((coefficient, self._columns[letter, unit]) for coefficient, letter, unit in terms)
        self._program.at_most(limit, *named, equal=equal)

    def _part(self, size_bytes: float) -> float:
        return size_bytes / self._memory

    def _tensors(self, unit: int) -> list[tuple[str, Remade]]:
        return [(f"q{number}", one) for number, one in enumerate(self._alone[unit].tensors)]

    def _released(self, unit: int, sign: int) -> list[tuple[float, str, int]]:
        """What a unit saves in its first intervals until backward, as terms."""
        kept = (sign * self._part(self._stages[unit].kept_bytes), "k", unit)
        return [kept, *((-sign * self._part(one.size_bytes), letter, unit) for letter, one in self._tensors(unit))]

    def _add_columns(self, unit: int) -> None:
        stage, always = self._stages[unit], 1.0 if self._stages[unit].keeps else 0.0
        # A second interval takes a forward, less what only the output needs if the unit above has none with it.
        self._column("k", unit, cost=-stage.recompute_ns, least=always, integer=True)
        output = self._stages[unit - 1].recompute_ns - self._stages[unit - 1].forward_ns if unit else 0
        self._column("x", unit, cost=output, least=always if unit else 1.0, integer=True)
        for letter in "PEG":
            self._column(letter, unit)
        for letter, _ in self._tensors(unit):
            self._column(letter, unit, integer=True)
        if self._alone[unit].tensors:
            self._column("s", unit)
            self._column("t", unit, cost=self._scale)

    def _saved(self, unit: int) -> None:
        """What may end without what."""
        self._at_most(0, (1, "k", unit), (-1, "x", unit))
        if unit:
            self._at_most(0, (1, "k", unit - 1), (-1, "x", unit))
        for letter, _ in self._tensors(unit):
            self._at_most(0, (1, letter, unit), (-1, "k", unit))
            self._at_most(0, (1, letter, unit), (-1, "s", unit))
        if tensors := self._tensors(unit):
            for times in ("nanoseconds", "launch_ns"):
                terms = [(getattr(one, times) / self._scale, letter, unit) for letter, one in tensors]
                self._at_most(0, *terms, (-1, "t", unit))

    def _passed_on(self, unit: int) -> None:
        """The sums P, E and G of a unit by those of its neighbours."""
        stages, below = self._stages, unit - 1
        if unit:
            input_part = self._part(stages[below].input_bytes)
            first = [(input_part, "x", below), *self._released(below, 1)]
            self._at_most(0, *first, (1, "P", below), (-1, "P", unit), equal=True)
            own = self._part(stages[below].input_bytes + stages[below].kept_bytes)
            most = min(1.0, sum(self._part(stage.input_bytes + stage.kept_bytes) for stage in stages[:unit])) + own
            self._at_most(-own, (1, "E", below), (-1, "E", unit), (-input_part, "x", below), (-most, "x", unit))
        else:
            self._at_most(0, (1, "P", unit), equal=True)
        gradients = self._part(stages[unit].gradient_bytes + self._left[unit])
        if unit + 1 < len(stages):
            self._at_most(0, (gradients, "x", unit + 1), (-1, "G", unit))
            self._at_most(0, (1, "G", unit + 1), (-1, "G", unit), (-1, "x", unit + 1))

    def _moments(self, unit: int) -> None:
        """Forward, recomputation and backward of a unit need what is there beside them, and what they make."""
        stage, alone = self._stages[unit], self._alone[unit]
        own = stage.input_bytes + stage.kept_bytes
        some = self._part(max(0, alone.forward_bytes - stage.keeping_bytes))
        keeping = self._part(stage.kept_bytes + stage.keeping_bytes - stage.dropping_bytes)
        terms = [(some, "s", unit)] if alone.tensors else []
        dropping = self._part(stage.input_bytes + stage.dropping_bytes + stage.output_bytes)
        self._at_most(1 - dropping, (1, "P", unit), (keeping, "k", unit), *terms)
        if not (stage.keeps or self._starts_within_backward(unit)):
            again = self._part(own + stage.keeping_bytes + stage.output_bytes)
            self._at_most(1 - again, (1, "P", unit), (1, "E", unit), (1, "G", unit), (-max(1.0, again), "k", unit))
        there = self._part(own + stage.gradient_bytes + self._left[unit])
        self._at_most(1 - there - self._part(stage.backward_bytes), (1, "P", unit), (1, "E", unit))
        if alone.tensors and not self._starts_within_backward(unit):
            self._at_most(1 - there, (1, "P", unit), (1, "E", unit), (self._part(alone.again_bytes), "s", unit))

    def _starts_within_backward(self, unit: int) -> bool:
        """Whether the second intervals of a unit need no more at their start, whenever that is, than its backward does."""
        stage = self._stages[unit]
        again = max(stage.keeping_bytes + stage.output_bytes, self._alone[unit].again_bytes)
        gradients = [self._stages[top].gradient_bytes + self._left[top] for top in range(unit, len(self._stages))]
        return again <= stage.backward_bytes and max(gradients) == gradients[0]

    def _ordered(self, unit: int) -> None:
        """Of two like units in a row, the upper keeps as much at least.

        What a unit keeps is in memory for all backwards between it and the loss, and for no other, so to exchange what two keep
        needs no less at any backward; and where second intervals need no more than that at their start, nowhere.
        """
        stage, above = self._stages[unit], unit + 1
        if above == len(self._stages) or (stage, self._alone[unit]) != (self._stages[above], self._alone[above]):
            return
        if stage.keeps or not (self._starts_within_backward(unit) and self._starts_within_backward(above)):
            return
        self._at_most(0, (1, "k", unit), (-1, "k", above))
        self._at_most(0, *self._released(unit, 1), *self._released(above, -1))

    def solve(self) -> IntervalSearch:
        """Solve the program within the limits of the search."""
        found = self._program.solve(gap=GAP, nodes=_NODES, seconds=_SECONDS)
        least_ns = sum(stage.forward_ns for stage in self._stages)
        intervals = None if found.values is None else self._intervals(found.values > 0.5)
        return IntervalSearch(intervals, max(least_ns, found.bound * self._scale))

    def _intervals(self, values: NDArray[np.bool_]) -> list[FirstInterval]:
        found = []
        for unit in range(len(self._stages)):
            again = tuple(one.name for letter, one in self._tensors(unit) if values[self._columns[letter, unit]])
            if values[self._columns["k", unit]]:
                found.append(FirstInterval(Activations.SELECTIVE, again) if again else FirstInterval(Activations.KEEP))
            else:
                has_input = values[self._columns["x", unit]]
                found.append(FirstInterval(Activations.RECOMPUTE if has_input else Activations.DROP))
        return found
