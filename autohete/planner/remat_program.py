"""Integer program of recomputation, stage by stage, within a memory budget (Checkmate).

The program of Jain et al. (MLSys 2020) as their code has it (github parasj/checkmate at 6041c77,
``checkmate/core/solvers/gurobi_solver.py``, ``ILPSolverGurobi``), for a chain of units. There a stage is the first computation
of one value; binary variables say which values are computed in a stage (R), which are in memory when it begins (S), and which
are freed after which use (FREE); the memory of each computation (U) follows, and the cost of all computations is least. On a
chain:

- A unit has two values, its input and what else it keeps for backward. One forward makes the input of the unit above, and may
  keep the unit's own.
- Computing anything twice before the first backward has no use. So the forwards of all units are one stage, and each backward
  is one more, in which units are computed again right before it, up to its own.
- An input has one use in a stage. What is freed when is known from R and S, so U is linear in them and there is no FREE.

The optimum of a plan (``persistent``) also keeps what it has kept until its backward. Without, a stage may free what an earlier
one kept, as in Checkmate; that is never worse, and a plan cannot express it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from autohete.plan import Activations
from autohete.planner.chain import Stage

#: A variable: its letter, the unit whose backward ends the stage (the number of units: that of the forwards), and its unit.
_Name = tuple[str, int, int]


#: What HiGHS forgives a row (``primal_feasibility_tolerance``), and the status that SciPy gives where no solution exists.
_TOLERANCE, _INFEASIBLE = 1e-6, 2


class _Solved(NamedTuple):
    """Values of the variables, or None; and a bound of the time."""

    values: list[bool] | None
    bound_ns: float


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What a search has found.

    Attributes:
        forwards: what each forward of each unit keeps. None: nothing was found, as nothing fits or for want of time.
        bound_ns: no way takes less time for all forwards and recomputations. Infinite: nothing fits.
    """

    forwards: list[list[Activations]] | None
    bound_ns: float


def least_recomputation(stages: Sequence[Stage], memory_bytes: int, seconds: float, *, persistent: bool = True) -> Recomputed:
    """Search for the fastest way to compute ``stages`` within ``memory_bytes``.

    Args:
        stages: the units; the input of the first is always there, and the last one computes the loss.
        memory_bytes: budget for everything that a stage lists.
        seconds: time for the search.
        persistent: what is kept stays until its backward.
    """
    if memory_bytes <= 0:
        return Recomputed(None, math.inf)
    program = _StagesProgram(stages, memory_bytes, persistent=persistent)
    return program.solve(seconds)


class _StagesProgram:
    """R, X (inputs) and A (the other values) of units, in rows of a matrix."""

    def __init__(self, stages: Sequence[Stage], memory_bytes: int, *, persistent: bool) -> None:
        self._stages, self._memory, self._persistent = stages, memory_bytes, persistent
        self._columns: dict[_Name, int] = {}
        self._rows: list[tuple[Mapping[int, int], int]] = []
        self._fixed: dict[int, float] = {}
        count = len(stages)
        self._left = [sum(stage.left_bytes for stage in stages[unit + 1 :]) for unit in range(count)]
        for unit in range(count):
            self._forward(unit)
        for top in reversed(range(count)):
            self._backward(top)

    def _column(self, letter: str, top: int, unit: int) -> int:
        return self._columns.setdefault((letter, top, unit), len(self._columns))

    def _at_most(self, limit: int, *terms: tuple[int, int]) -> None:
        """Add a row: a sum of terms, coefficient and column each, is at most ``limit``."""
        row: dict[int, int] = {}
        for coefficient, column in terms:
            row[column] = row.get(column, 0) + coefficient
        self._rows.append((row, limit))

    def _stored(self, top: int, unit: int) -> list[tuple[int, int]]:
        """What is kept of a unit at the end of a stage."""
        stage = self._stages[unit]
        return [(stage.input_bytes, self._column("X", top, unit)), (stage.kept_bytes, self._column("A", top, unit))]

    def _carried(self, top: int, unit: int) -> list[tuple[int, int]]:
        """What a backward stage keeps on of what it has found."""
        if self._persistent:
            return self._stored(top + 1, unit)
        stage = self._stages[unit]
        return [(stage.input_bytes, self._column("CX", top, unit)), (stage.kept_bytes, self._column("CA", top, unit))]

    def _forward(self, unit: int) -> None:
        """The first forward of a unit."""
        end, stage = len(self._stages), self._stages[unit]
        keeps, has_input = self._column("A", end, unit), self._column("X", end, unit)
        below = [term for lower in range(unit) for term in self._stored(end, lower)]
        more = stage.kept_bytes + stage.keeping_bytes - stage.dropping_bytes
        needed = stage.input_bytes + stage.dropping_bytes + stage.output_bytes
        self._at_most(self._memory - needed, *below, (more, keeps))
        if stage.keeps:
            self._fixed[keeps] = 1.0
        if unit == 0:
            self._fixed[has_input] = 1.0
        if self._persistent:
            self._at_most(0, (1, keeps), (-1, has_input))

    def _backward(self, top: int) -> None:
        """The stage of a backward: its recomputations, and itself."""
        for unit in range(top + 1):
            self._recomputation(top, unit)
        stage = self._stages[top]
        for letter in ("A", "X"):
            self._fixed[self._column(letter, top, top)] = 1.0
        below = [term for lower in range(top) for term in self._stored(top, lower)]
        own = stage.input_bytes + stage.kept_bytes + stage.gradient_bytes + stage.backward_bytes
        self._at_most(self._memory - own - self._left[top], *below)

    def _recomputation(self, top: int, unit: int) -> None:
        """What a stage may compute again of a unit, and keep."""
        stage = self._stages[unit]
        again, keeps, has_input = (self._column(letter, top, unit) for letter in "RAX")
        had, had_input = self._column("A", top + 1, unit), self._column("X", top + 1, unit)
        (_, carried_input), (_, carried) = self._carried(top, unit)
        below = [(-1, self._column("R", top, unit - 1))] if unit else []
        self._at_most(0, (1, again), (-1, had_input), *below)
        if unit < top:
            self._at_most(0, (1, again), (-1, self._column("R", top, unit + 1)))
        if unit:
            self._at_most(0, (1, has_input), (-1, carried_input), *below)
        else:
            self._fixed[has_input] = 1.0
        self._at_most(0, (1, keeps), (-1, carried), (-1, again))
        self._at_most(0, (1, carried_input), (-1, has_input))
        self._at_most(0, (1, carried), (-1, keeps))
        if stage.keeps:
            self._fixed[again] = 0.0
        if self._persistent:  # recomputation begins at the nearest input, and what is kept is not made again
            self._at_most(0, (1, keeps), (-1, has_input))
            self._at_most(1, (1, again), (1, had))
            if unit < top:
                self._at_most(1, (1, again), (1, self._column("X", top + 1, unit + 1)))
        else:
            self._at_most(0, (1, carried), (-1, had))
            self._at_most(0, (1, carried_input), (-1, had_input))
        there = [term for lower in range(unit) for term in self._stored(top, lower)]
        there += [term for upper in range(unit + 1, top + 1) for term in self._carried(top, upper)]
        rise = stage.keeping_bytes - stage.dropping_bytes
        self._at_most(
            self._memory - self._stages[top].gradient_bytes - self._left[top],
            *there,
            (stage.input_bytes + stage.dropping_bytes + stage.output_bytes, again),
            (stage.kept_bytes + rise, keeps),
            (-rise, carried),
        )

    def _cost(self, letter: str, top: int, unit: int) -> int:
        if letter != "R":
            return 0
        return self._stages[unit].recompute_ns if unit == top else self._stages[unit].forward_ns

    def solve(self, seconds: float) -> Recomputed:
        """Solve the program. HiGHS takes a row as satisfied within a tolerance, so what exceeds the budget is solved again."""
        found = self._solved(0.0, seconds)
        bound = found.bound_ns
        if found.values is not None and not self._satisfied(found.values):
            found = self._solved(10 * _TOLERANCE, seconds)
        values = found.values if found.values is not None and self._satisfied(found.values) else None
        return Recomputed(None if values is None else self._forwards(values), bound)

    def _satisfied(self, values: list[bool]) -> bool:
        return all(sum(size for column, size in row.items() if values[column]) <= limit for row, limit in self._rows)

    def _solved(self, spare: float, seconds: float) -> _Solved:
        """Solve with rows divided by their largest number, and ``spare`` of that left."""
        count = len(self._columns)
        cost = np.array([self._cost(*name) for name in self._columns], float)
        scale = max(cost.max(), 1.0)
        sizes = [max(abs(limit), *map(abs, row.values()), 1) for row, limit in self._rows]
        values = [value / size for (row, _), size in zip(self._rows, sizes, strict=True) for value in row.values()]
        places = [(place, column) for place, (row, _) in enumerate(self._rows) for column in row]
        matrix = csr_array((values, tuple(zip(*places, strict=True))), shape=(len(self._rows), count))
        limits = [limit / size - (spare if size > 1 else 0) for (_, limit), size in zip(self._rows, sizes, strict=True)]
        lower, upper = np.zeros(count), np.ones(count)
        for column, value in self._fixed.items():
            lower[column] = upper[column] = value
        found = milp(
            cost / scale,
            integrality=np.ones(count),
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(matrix, ub=limits),
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
        if found.status == _INFEASIBLE:
            return _Solved(None, math.inf)
        bound = 0.0 if found.mip_dual_bound is None else max(0.0, found.mip_dual_bound)
        forwards = sum(stage.forward_ns for stage in self._stages)
        return _Solved(None if found.x is None else [bool(value) for value in found.x > 0.5], forwards + bound * scale)

    def _forwards(self, values: list[bool]) -> list[list[Activations]]:
        """What each forward of each unit keeps, by the values of the variables."""
        count = len(self._stages)

        def kept(top: int, unit: int) -> Activations:
            if values[self._columns["A", top, unit]]:
                return Activations.KEEP
            return Activations.RECOMPUTE if values[self._columns["X", top, unit]] else Activations.DROP

        forwards = [[kept(count, unit)] for unit in range(count)]
        for top in reversed(range(count)):
            for unit in range(top + 1):
                if values[self._columns["R", top, unit]]:
                    forwards[unit].append(kept(top, unit))
        return forwards
