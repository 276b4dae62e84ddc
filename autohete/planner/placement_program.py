"""Integer program of where tensors are at each kernel, and beside which kernel they move (AutoTM).

The program of Hildebrand et al. (ASPLOS 2020; github darchr/AutoTM at c6d4f2c, ``AutoTM/src/optimizer/ilp/formulation.jl`` and
``tensor_graphs.jl``, ``ILPHolder{Asynchronous}``) for what forwards save. There each tensor takes a path through a graph with a
node per place and kernel. An edge between places is a copy: synchronous at a kernel that uses the tensor, or beside another
kernel that is near one. On the GPU a kernel needs its operands in GPU memory, so a path is one of these:

- The tensor stays on the GPU from the forward that makes it to the backward that uses it.
- It goes to the host right after that forward or beside the next pass, and comes back right before that backward or beside the
  pass before it. It is on the GPU during a pass beside which it moves.

The code lets a tensor move beside any of the 15 kernels on either side of one that uses it, which is about one pass of a block.
What leaves a unit goes either at once or beside the next pass. What is on the GPU during a pass fits. The cost is the time of
all synchronous copies, and of each pass that of its kernel or of the copies beside it, whichever is longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from autohete.planner.chain import Stage
from autohete.planner.mixed_program import TOLERANCE, MixedProgram, Term

#: The gap at which the search ends, of the time of all passes and waits; its limits in nodes and, if these take long, seconds.
GAP = 0.01
_NODES, _SECONDS = 100, 60.0


class Placed(NamedTuple):
    """A tensor that a forward saves and that may leave the GPU.

    Args:
        unit: index of the unit.
        size_bytes: its size.
        away_seconds, back_seconds: times of its copies.
    """

    unit: int
    size_bytes: int
    away_seconds: float
    back_seconds: float


class Placement(NamedTuple):
    """The copies of a tensor that leaves the GPU.

    Args:
        away_beside: it goes beside the pass after the forward that makes it. Otherwise at once, and the pass waits.
        back_beside: it comes back beside the pass before the backward that uses it. Otherwise right before that.
    """

    away_beside: bool
    back_beside: bool


class PlacementSearch(NamedTuple):
    """What a search has found.

    Args:
        placements: those of each tensor, None for one that stays. None: nothing fits, or nothing was found within the limits.
        seconds: time of all passes and waits by the program.
        bound_seconds: no placements take less.
    """

    placements: list[Placement | None] | None
    seconds: float
    bound_seconds: float


class PassTimes(NamedTuple):
    """Times of the passes of a chain, in seconds: forwards and backwards of its units, in the order of the chain; the loss."""

    forwards: Sequence[float]
    backwards: Sequence[float]
    loss: float

    def in_order(self) -> list[float]:
        """Times in the order in which the passes run."""
        return [*self.forwards, self.loss, *reversed(self.backwards)]


def least_by_placement(
    stages: Sequence[Stage], times: PassTimes, tensors: Sequence[Placed], memory_bytes: int
) -> PlacementSearch:
    """Search for the placements of ``tensors`` with the least cost.

    Args:
        stages: the units; all keep what they save.
        times: of their passes.
        tensors: what may leave.
        memory_bytes: budget for everything that a stage lists.
    """
    if memory_bytes <= 0:
        return PlacementSearch(None, math.inf, math.inf)
    found = _PlacementRows(stages, times, tensors, memory_bytes, memory_bytes).solve()
    if found.fits:
        return found.search
    less = round(memory_bytes * (1 - 100 * TOLERANCE))  # by more than rows are forgiven
    again = _PlacementRows(stages, times, tensors, memory_bytes, less).solve()
    search = again.search if again.fits else PlacementSearch(None, math.inf, math.inf)
    return search._replace(bound_seconds=found.search.bound_seconds)


class _Checked(NamedTuple):
    """What a search has found, and whether it really fits."""

    search: PlacementSearch
    fits: bool


class _Columns(NamedTuple):
    """The columns of the copies of a tensor: at once, and beside a pass."""

    away: tuple[int, int]
    back: tuple[int, int]


class _PlacementRows:
    """The program, with sizes relative to the memory and times relative to that of all passes."""

    def __init__(
        self, stages: Sequence[Stage], times: PassTimes, tensors: Sequence[Placed], memory_bytes: int, limit_bytes: int
    ) -> None:
        self._stages, self._tensors, self._memory, self._limit = stages, tensors, memory_bytes, limit_bytes
        self._passes = times.in_order()
        self._scale = sum(self._passes) or 1.0
        self._program = MixedProgram()
        self._beside: list[list[Term]] = [[] for _ in self._passes]
        at_once = {one.unit: self._program.column(integer=True) for one in tensors}
        self._columns = [self._copies(one, at_once[one.unit]) for one in tensors]
        self._gone: list[int] = []
        for unit in range(len(stages)):
            self._fits(unit)
        for index, seconds in enumerate(self._passes):
            lasting = self._program.column(1.0, seconds / self._scale, math.inf)
            if self._beside[index]:
                self._program.at_most(0, *self._beside[index], (-1, lasting))

    def _use(self, unit: int) -> int:
        """Index of the backward of a unit among the passes."""
        return len(self._passes) - 1 - unit

    def _copies(self, one: Placed, at_once: int) -> _Columns:
        """Add the columns of the copies of a tensor, and that it comes back if it goes."""
        away, back = one.away_seconds / self._scale, one.back_seconds / self._scale
        found = _Columns(
            (self._program.column(away, integer=True), self._program.column(integer=True)),
            (self._program.column(back, integer=True), self._program.column(integer=True)),
        )
        self._beside[one.unit + 1].append((away, found.away[1]))
        self._beside[self._use(one.unit) - 1].append((back, found.back[1]))
        goes = [(1.0, column) for column in found.away]
        self._program.at_most(0, *goes, *((-1.0, column) for column in found.back), equal=True)
        self._program.at_most(0, (1, found.away[0]), (-1, at_once))
        self._program.at_most(1, (1, found.away[1]), (1, at_once))
        return found

    def _needed(self, unit: int) -> tuple[int, int]:
        """What the forward and the backward of a unit need if nothing leaves; that of the last unit includes the loss."""
        stage = self._stages[unit]
        kept = sum(lower.input_bytes + lower.kept_bytes for lower in self._stages[: unit + 1])
        left = sum(upper.left_bytes for upper in self._stages[unit + 1 :])
        return kept + stage.keeping_bytes + stage.output_bytes, kept + stage.gradient_bytes + stage.backward_bytes + left

    def _of(self, unit: int) -> list[tuple[int, _Columns]]:
        """The tensors of a unit: size and columns."""
        pairs = zip(self._tensors, self._columns, strict=True)
        return [(one.size_bytes, columns) for one, columns in pairs if one.unit == unit]

    def _fits(self, unit: int) -> None:
        """What is on the GPU during the forward and the backward of a unit fits.

        Of the unit below, what goes beside the forward is still there, and what comes back beside the backward already is. The
        columns of ``_gone`` are what has left of a unit and of those below it.
        """
        forward, backward = self._needed(unit)
        below = self._of(unit - 1)
        at_once = [(-size / self._limit, columns.away[0]) for size, columns in below]
        gone_before = [(-1.0, column) for column in self._gone[unit - 2 : unit - 1] if unit > 1]
        self._program.at_most(1 - forward / self._limit, *at_once, *gone_before)
        back = [(size / self._limit, columns.back[1]) for size, columns in below]
        gone = [(-1.0, column) for column in self._gone[-1:]]
        self._program.at_most(1 - backward / self._limit, *back, *gone)
        self._gone.append(self._program.column(most=math.inf))
        leaving = [(size / self._limit, column) for size, columns in self._of(unit) for column in columns.away]
        self._program.at_most(0, *leaving, *((1.0, column) for column in self._gone[-2:-1]), (-1, self._gone[-1]), equal=True)

    def _exceeds(self, placements: Sequence[Placement | None]) -> bool:
        """Whether a pass needs more than the memory, added up exactly."""
        gone = 0
        sent = [0] * len(self._stages)
        at_once, back = sent.copy(), sent.copy()
        for one, placed in zip(self._tensors, placements, strict=True):
            if placed is not None:
                sent[one.unit] += one.size_bytes
                at_once[one.unit] += one.size_bytes * (not placed.away_beside)
                back[one.unit] += one.size_bytes * placed.back_beside
        for unit in range(len(self._stages)):
            forward, backward = self._needed(unit)
            if unit:
                forward -= gone + at_once[unit - 1]
                backward -= gone + sent[unit - 1] - back[unit - 1]
                gone += sent[unit - 1]
            if max(forward, backward) > self._memory:
                return True
        return False

    def solve(self) -> _Checked:
        """Solve the program within the limits of the search."""
        found = self._program.solve(gap=GAP, nodes=_NODES, seconds=_SECONDS)
        bound = max(1.0, found.bound) * self._scale
        if found.values is None:
            return _Checked(PlacementSearch(None, math.inf, bound), fits=True)
        chosen = found.values > 0.5
        placements = [
            Placement(bool(chosen[columns.away[1]]), bool(chosen[columns.back[1]]))
            if chosen[columns.away[0]] or chosen[columns.away[1]]
            else None
            for columns in self._columns
        ]
        return _Checked(PlacementSearch(placements, self._cost(placements), bound), fits=not self._exceeds(placements))

    def _cost(self, placements: Sequence[Placement | None]) -> float:
        beside, waits = [0.0] * len(self._passes), 0.0
        for one, placed in zip(self._tensors, placements, strict=True):
            if placed is None:
                continue
            if placed.away_beside:
                beside[one.unit + 1] += one.away_seconds
            else:
                waits += one.away_seconds
            if placed.back_beside:
                beside[self._use(one.unit) - 1] += one.back_seconds
            else:
                waits += one.back_seconds
        return waits + sum(map(max, self._passes, beside))
