"""A mixed-integer program that is put together row by row, and solved by HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

#: What HiGHS forgives a row whose largest number is 1 (``primal_feasibility_tolerance``).
TOLERANCE = 1e-6
#: The status that SciPy gives where no solution exists.
_INFEASIBLE = 2

#: A term of a row: a coefficient and the number of a column.
Term = tuple[float, int]


class MixedSolution(NamedTuple):
    """What a search has found.

    Args:
        values: those of the columns. None: there is no solution, or none was found within the limits.
        bound: no solution has less value. Infinite: there is none.
    """

    values: NDArray[np.float64] | None
    bound: float


class MixedProgram:
    """Columns from 0 to a limit, and rows that are at most something, each divided by its largest number."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._bounds: list[tuple[float, float]] = []
        self._integers: list[bool] = []
        self._entries: list[tuple[int, int, float]] = []
        self._limits: list[tuple[float, float]] = []

    def column(self, cost: float = 0.0, least: float = 0.0, most: float = 1.0, *, integer: bool = False) -> int:
        """Add a column, and return its number."""
        self._cost.append(cost)
        self._bounds.append((least, most))
        self._integers.append(integer)
        return len(self._cost) - 1

    def at_most(self, limit: float, *terms: Term, equal: bool = False) -> None:
        """Add a row: the sum of terms, each of another column, is at most ``limit``, or ``equal`` to it."""
        largest = max((abs(coefficient) for coefficient, _ in terms), default=0.0) or 1.0
        self._entries += [(len(self._limits), column, coefficient / largest) for coefficient, column in terms]
        self._limits.append((limit / largest if equal else -np.inf, limit / largest))

    def solve(self, *, gap: float, nodes: int, seconds: float) -> MixedSolution:
        """Minimise the cost.

        Args:
            gap: the search ends when its solution costs at most this much more than the bound, relative to the solution.
            nodes: limit of the search, the same on any machine.
            seconds: another one, if nodes take long.
        """
        rows, columns, values = _transposed(self._entries)
        matrix = csr_array((values, (rows, columns)), shape=(len(self._limits), len(self._cost)))
        least, most = np.array(self._limits).T
        lower, upper = np.array(self._bounds).T
        found = milp(
            np.array(self._cost),
            integrality=np.array(self._integers, int),
            bounds=Bounds(lower, upper),
            constraints=LinearConstraint(matrix, least, most),
            options={"time_limit": seconds, "node_limit": nodes, "mip_rel_gap": gap},
        )
        if found.status == _INFEASIBLE:
            return MixedSolution(None, np.inf)
        return MixedSolution(found.x, -np.inf if found.mip_dual_bound is None else found.mip_dual_bound)


def _transposed(entries: Sequence[tuple[int, int, float]]) -> tuple[list[int], list[int], list[float]]:
    return [row for row, _, _ in entries], [column for _, column, _ in entries], [value for _, _, value in entries]
