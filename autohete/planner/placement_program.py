"""Integer program of where tensors are at each kernel, and beside which kernel they move (AutoTM).

The program of Hildebrand et al. (ASPLOS 2020; github darchr/AutoTM at c6d4f2c, ``AutoTM/src/optimizer/ilp/formulation.jl`` and
``tensor_graphs.jl``, ``ILPHolder{Asynchronous}``) for what forwards save. There each tensor takes a path through a graph with a
node per place and kernel. An edge between places is a copy: synchronous at a kernel that uses the tensor, or beside another
kernel that is near one. On the GPU a kernel needs its operands in GPU memory, so a path is one of these:

- The tensor stays on the GPU from the forward that makes it to the backward that uses it.
- It goes to the host right after that forward (W) or beside one of the next passes, and comes back right before that backward
  or beside one of the passes before it (R). Beside a pass it is in both memories until the pass ends, or from its start on.

What is on the GPU during a pass fits. The cost is the time of all synchronous copies, and of each pass that of its kernel or of
the copies beside it, whichever is longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from autohete.planner.chain import Stage
from autohete.planner.mixed_program import TOLERANCE, MixedProgram, Term

#: The gap at which the search ends, of the time of all passes and waits; its limits in nodes and, if a node takes long, seconds.
GAP = 0.01
_NODES, _SECONDS = 100, 20.0


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
        away, back: by how many passes they are apart from the forward that makes it and the backward that uses it. 0: the copy
            is synchronous.
    """

    away: int
    back: int


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
    stages: Sequence[Stage], times: PassTimes, tensors: Sequence[Placed], memory_bytes: int, near: int
) -> PlacementSearch:
    """Search for the placements of ``tensors`` with the least cost.

    Args:
        stages: the units; all keep what they save.
        times: of their passes.
        tensors: what may leave.
        memory_bytes: budget for everything that a stage lists.
        near: passes on either side beside which a tensor may be copied.
    """
    if memory_bytes <= 0:
        return PlacementSearch(None, math.inf, math.inf)
    return _PlacementRows(stages, times, tensors, memory_bytes, near).solve()


class _PlacementRows:
    """The program, with sizes relative to the memory and times relative to that of all passes."""

    def __init__(
        self, stages: Sequence[Stage], times: PassTimes, tensors: Sequence[Placed], memory_bytes: int, near: int
    ) -> None:
        self._stages, self._tensors, self._near = stages, tensors, near
        self._passes = times.in_order()
        self._scale = sum(self._passes) or 1.0
        self._memory = memory_bytes * (1 - 10 * TOLERANCE)
        self._program = MixedProgram()
        self._beside: list[list[Term]] = [[] for _ in self._passes]
        #: Of each tensor, the columns of its copies by the number of passes that they are apart.
        self._away: list[dict[int, int]] = []
        self._back: list[dict[int, int]] = []
        for one in tensors:
            self._copies(one)
        for index, seconds in enumerate(self._passes):
            self._fits(index)
            lasting = self._program.column(1.0, seconds / self._scale, math.inf)
            if self._beside[index]:
                self._program.at_most(0, *self._beside[index], (-1, lasting))

    def _use(self, unit: int) -> int:
        """Index of the backward of a unit among the passes."""
        return len(self._passes) - 1 - unit

    def _copies(self, one: Placed) -> None:
        """Add the columns of the copies of a tensor, and that it comes back if it goes."""
        away, back = one.away_seconds / self._scale, one.back_seconds / self._scale
        self._away.append({0: self._program.column(away, integer=True)})
        self._back.append({0: self._program.column(back, integer=True)})
        # With a kernel in which it is on the host between both copies; without, a copy has no use.
        apart = self._use(one.unit) - one.unit - 1
        for distance in range(1, min(self._near, apart - 1) + 1):
            for copies, seconds, index in (
                (self._away[-1], away, one.unit + distance),
                (self._back[-1], back, self._use(one.unit) - distance),
            ):
                copies[distance] = self._program.column(integer=True)
                self._beside[index].append((seconds, copies[distance]))
        goes = [(1.0, column) for column in self._away[-1].values()]
        comes = [(-1.0, column) for column in self._back[-1].values()]
        self._program.at_most(1, *goes)
        self._program.at_most(0, *goes, *comes, equal=True)

    def _fits(self, index: int) -> None:
        """What is on the GPU during a pass fits."""
        count = len(self._stages)
        if index == count:
            return  # the loss: its memory is that of the backward of the last unit
        unit = index if index < count else self._use(index)
        stage, backward = self._stages[unit], index > count
        needed = stage.input_bytes + stage.kept_bytes
        needed += sum(lower.input_bytes + lower.kept_bytes for lower in self._stages[:unit])
        needed += stage.gradient_bytes + stage.backward_bytes if backward else stage.keeping_bytes + stage.output_bytes
        needed += sum(upper.left_bytes for upper in self._stages[unit + 1 :]) if backward else 0
        terms: list[Term] = []
        for one, away, back in zip(self._tensors, self._away, self._back, strict=True):
            if one.unit < unit:
                part = one.size_bytes / self._memory
                terms += [(-part, column) for distance, column in away.items() if one.unit + distance < index]
                terms += [(part, column) for distance, column in back.items() if self._use(one.unit) - distance <= index]
        self._program.at_most(1 - needed / self._memory, *terms)

    def solve(self) -> PlacementSearch:
        """Solve the program within the limits of the search."""
        found = self._program.solve(gap=GAP, nodes=_NODES, seconds=_SECONDS)
        bound = max(1.0, found.bound) * self._scale
        if found.values is None:
            return PlacementSearch(None, math.inf, bound)
        chosen = found.values > 0.5
        placements: list[Placement | None] = []
        for away, back in zip(self._away, self._back, strict=True):
            gone = [distance for distance, column in away.items() if chosen[column]]
            come = [distance for distance, column in back.items() if chosen[column]]
            placements.append(Placement(gone[0], come[0]) if gone and come else None)
        return PlacementSearch(placements, self._cost(placements), bound)

    def _cost(self, placements: Sequence[Placement | None]) -> float:
        beside, waits = [0.0] * len(self._passes), 0.0
        for one, placed in zip(self._tensors, placements, strict=True):
            if placed is None:
                continue
            waits += one.away_seconds * (not placed.away) + one.back_seconds * (not placed.back)
            if placed.away:
                beside[one.unit + placed.away] += one.away_seconds
            if placed.back:
                beside[self._use(one.unit) - placed.back] += one.back_seconds
        return waits + sum(map(max, self._passes, beside))
