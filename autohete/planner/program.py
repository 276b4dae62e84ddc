"""AutoHete's integer program: three integers that minimise the iteration time under the GPU's and the host's memory.

The integers are written in unary: a binary per block and choice, chained so that only "the first k" or "the last k" can
be said. Blocks may then differ from one another, every sum over a prefix is linear, and the relaxation is tight.

The objective is the largest of lower bounds of the period, each of which some cycle of the schedule or some engine
imposes, so its value is what no plan can beat; see :func:`_time_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from autohete.errors import AutoHeteError
from autohete.hardware import Hardware
from autohete.planner.steps import GRADIENT_SLOTS, BlockCosts, Counts

#: Stop within this share of the optimum: a tenth of what the planner promises.
_GAP = 1e-3
#: Of plans that the bounds cannot tell apart, the one that moves and computes less is better in practice.
_LOAD_WEIGHT = 5e-4
_TIME_LIMIT_SECONDS = 20.0


class Objective(StrEnum):
    """What to minimise: time under both memories, or one memory under the other."""

    SECONDS = "seconds"
    GPU_BYTES = "gpu"
    HOST_BYTES = "host"


@dataclass(frozen=True, slots=True)
class Solution:
    """The program's answer: the counts, and the value of the objective (for seconds, within the gap of a lower bound)."""

    counts: Counts
    value: float


@dataclass(frozen=True, slots=True)
class Program:
    """The program for one workload and node.

    Args:
        costs: seconds and bytes per block.
        hardware: capacities and links.
        priority: whether updates run smaller block first.
        host_optimizer_bytes: host bytes per byte of 16-bit parameter updated on the CPU, as a multiple of its size.
        host_parameter_bytes: likewise per offloaded byte.
        gpu_budget_bytes, host_budget_bytes: capacities for tensors.
        pending: count also what typical timing adds to the GPU's memory: a gradient that still waits for its copy and the
            parameters fetched ahead. Without it the program is a relaxation: its value is what no plan can beat.
    """

    costs: BlockCosts
    hardware: Hardware
    priority: bool
    host_optimizer_bytes: float
    host_parameter_bytes: float
    gpu_budget_bytes: float
    host_budget_bytes: float
    pending: bool = True

    def solve(self, objective: Objective = Objective.SECONDS) -> Solution | None:
        """The optimum, or None if nothing fits.

        Raises:
            AutoHeteError: the solver gave up (time limit without any solution).
        """
        rows = _Rows(self, objective)
        found = milp(
            c=rows.objective(),
            constraints=rows.constraints(),
            bounds=rows.bounds(),
            integrality=rows.integrality(),
            options={"mip_rel_gap": _GAP, "time_limit": _TIME_LIMIT_SECONDS, "presolve": True},
        )
        if found.x is None:
            if found.status == 2:
                return None
            raise AutoHeteError(f"the integer program was not solved: {found.message}")
        return Solution(rows.counts(found.x), float(found.x[rows.value]) * rows.scale)

    def rate(self, candidates: Sequence[Counts], objective: Objective = Objective.SECONDS) -> Rating:
        """What the program says of each candidate: the objective's value, and whether it satisfies the memory rows."""
        rows = _Rows(self, objective)
        matrix, limits = rows.matrix(), np.array(rows.limits)
        choices = np.array([rows.columns(counts) for counts in candidates])
        excess = matrix @ choices.T - limits[:, None]
        valued = np.array([rows.value in row for row in rows.rows])
        return Rating(excess[valued].max(axis=0) * rows.scale, (excess[~valued] <= 1e-9).all(axis=0))


@dataclass(frozen=True, slots=True, eq=False)
class Rating:
    """For each candidate the objective's value (a lower bound of it), and whether its memory fits."""

    values: NDArray[np.float64]
    fits: NDArray[np.bool_]


Row = Mapping[int, float]


class _Rows:
    """Columns: c (checkpointed), p (offloaded), o (CPU-updated), h (refreshed: o and not p), w (written back: p and not o),
    each per block; last the objective's value. Seconds and bytes are scaled to about one."""

    def __init__(self, program: Program, objective: Objective) -> None:
        self.program, self.costs, self.kind = program, program.costs, objective
        n = self.n = self.costs.count
        self.c, self.p, self.o, self.h, self.w = (range(k * n, (k + 1) * n) for k in range(5))
        self.value = 5 * n
        self.rows: list[Row] = []
        self.limits: list[float] = []
        self.load: dict[int, float] = {}
        costs = self.costs
        self.serial_seconds = (
            sum(costs.forward) * 2 + sum(costs.backward) + sum(costs.gpu_update) + costs.loss.seconds
            + sum(costs.cpu_update) + 3 * sum(costs.parameters) + 2 * sum(costs.gradients)
        )  # fmt: skip
        gpu_total = sum(costs.weights) * 2 + sum(costs.states) + sum(costs.activations) + 4 * costs.loss.logits_bytes
        self.byte_scale = float(max(gpu_total, 1))
        self.scale = self.serial_seconds if objective is Objective.SECONDS else self.byte_scale
        self._chains()
        if objective is Objective.SECONDS:
            self._time_rows()
        self._gpu_rows()
        self._host_row()

    # --- assembling

    def at_most(self, row: Row, limit: float, scale: float = 1.0) -> None:
        self.rows.append({column: factor / scale for column, factor in row.items()})
        self.limits.append(limit / scale)

    def objective(self) -> list[float]:
        cost = [0.0] * self.value + [1.0]
        for column, seconds in self.load.items():
            cost[column] = _LOAD_WEIGHT * seconds / self.scale
        return cost

    def constraints(self) -> LinearConstraint:
        return LinearConstraint(self.matrix(), -np.inf, np.array(self.limits))

    def matrix(self) -> csr_array:
        data = [(r, column, factor) for r, row in enumerate(self.rows) for column, factor in row.items() if factor]
        r, c, v = zip(*data, strict=True)
        return csr_array((v, (r, c)), shape=(len(self.rows), self.value + 1))

    def columns(self, counts: Counts) -> NDArray[np.float64]:
        """The columns that say ``counts``, with an objective of 0."""
        block = np.arange(self.n)
        inner = (block > 0) & (block < self.n - 1)
        c, p = inner & (block <= counts.checkpointed), inner & (block <= counts.offloaded)
        o = block >= self.n - counts.cpu_updated
        return np.concatenate([c, p, o, o & ~p, p & ~o, [0]]).astype(float)

    def bounds(self) -> Bounds:
        upper = np.ones(self.value + 1)
        upper[-1] = np.inf
        for edge in (0, self.n - 1):  # embedding and head keep parameters and activations
            for columns in (self.c, self.p):
                upper[columns[edge]] = 0
        return Bounds(np.zeros(self.value + 1), upper)

    def integrality(self) -> list[int]:
        return [1] * (3 * self.n) + [0] * (2 * self.n + 1)

    def counts(self, x: np.ndarray) -> Counts:
        c, p, o = (round(sum(x[columns.start : columns.stop])) for columns in (self.c, self.p, self.o))
        return Counts(c, p, o)

    # --- rows

    def _chains(self) -> None:
        """First k of the transformer blocks for c and p, last k of all blocks for o."""
        for block in range(1, self.n - 2):
            for columns in (self.c, self.p):
                self.at_most({columns[block + 1]: 1, columns[block]: -1}, 0)
        for block in range(self.n - 1):
            self.at_most({self.o[block]: 1, self.o[block + 1]: -1}, 0)
        for block in range(self.n):
            self.at_most({self.o[block]: 1, self.p[block]: -1, self.h[block]: -1}, 0)
            self.at_most({self.p[block]: 1, self.o[block]: -1, self.w[block]: -1}, 0)

    def _time_rows(self) -> None:
        """Lower bounds of the period; the value is at least each of them."""
        costs, n = self.costs, self.n
        blocks = range(n)
        gpu: dict[int, float] = {}
        for i in blocks:
            gpu[self.c[i]] = costs.recompute[i]
            gpu[self.o[i]] = -costs.gpu_update[i]
        fixed = sum(costs.forward) + sum(costs.backward) + sum(costs.gpu_update) + costs.loss.seconds
        self._period(gpu, fixed)
        down: dict[int, float] = {}
        up: dict[int, float] = {}
        for i in blocks:
            down[self.o[i]] = costs.gradients[i]
            down[self.w[i]] = costs.gradients[i]
            up[self.p[i]] = 2 * costs.parameters[i]
            up[self.h[i]] = costs.parameters[i]
        cpu = {self.o[i]: costs.cpu_update[i] for i in blocks}
        for engine in (down, up, cpu):
            self._period(engine, 0)
        for engine in (gpu, down, up, cpu):
            self.load = _add(self.load, engine)
        hardware = self.program.hardware
        h2d, d2h, update = hardware.h2d, hardware.d2h, hardware.cpu.update_bandwidth
        link = max(h2d.duplex_bandwidth + d2h.duplex_bandwidth, h2d.bandwidth, d2h.bandwidth)
        dram = max(hardware.host.memory_bandwidth * hardware.host.usable_share, update)
        copies = _add(_times(up, h2d.bandwidth), _times(down, d2h.bandwidth))
        self._period(_times(copies, 1 / link), 0)
        self._period(_times(_add(copies, _times(cpu, update)), 1 / dram), 0)
        for m in blocks:
            self._update_cycle(m)
            self._write_back_cycle(m)

    def _update_cycle(self, m: int) -> None:
        """From the end of backward of block m to its next forward: the updates of all blocks up to m, one after another.

        Their gradients all come later than m's, and forward of m needs them all (by way of the forwards before it). The GPU
        fills the rest of the period: forward from m up, loss, backward down to m. Without priority, updates run from the
        last block down, so the next forward waits at the *first* block that the CPU updates.
        """
        costs, n = self.costs, self.n
        above = range(m, n)
        row: dict[int, float] = {}
        fixed = costs.loss.seconds + sum(costs.backward[i] for i in above) + min(costs.gradients[: m + 1])
        for i in above:
            row[self.c[i]] = costs.recompute[i]
        if self.program.priority:
            fixed += sum(costs.forward[i] for i in above) + min(costs.parameters[: m + 1])
        else:
            fixed += min(costs.parameters[: m + 1])
            for i in range(n):
                row[self.o[i]] = costs.forward[i]
        for i in range(m + 1):
            row[self.o[i]] = row.get(self.o[i], 0.0) + costs.cpu_update[i]
        # Binding only if the CPU updates block m.
        big = self.serial_seconds
        row[self.o[m]] = row.get(self.o[m], 0.0) + big
        self._period(row, fixed - big)

    def _write_back_cycle(self, m: int) -> None:
        """Offloaded and updated on the GPU: written back after its backward, fetched again before its forward."""
        costs = self.costs
        above = range(m, self.n)
        fixed = costs.loss.seconds + sum(costs.forward[i] + costs.backward[i] + costs.gpu_update[i] for i in above)
        row = {self.c[i]: costs.recompute[i] for i in above} | {self.o[i]: -costs.gpu_update[i] for i in above}
        big = self.serial_seconds
        row[self.w[m]] = big
        self._period(row, fixed + costs.gradients[m] + costs.parameters[m] - big)

    def _period(self, row: Row, fixed: float) -> None:
        self.at_most({**row, self.value: -self.scale}, -fixed, self.scale)

    def _gpu_rows(self) -> None:
        """What lives on the GPU at the loss and at each backward: surely, and if asked for what is pending."""
        costs, n = self.costs, self.n
        static: dict[int, float] = {}
        fixed = float(sum(costs.weights) + sum(costs.states))
        for i in range(n):
            static[self.p[i]] = -costs.weights[i]
            static[self.o[i]] = -costs.states[i]
        loss = costs.loss
        at_loss = loss.logits_bytes * 2 + loss.workspace_bytes
        self._gpu_row(*self._alive(static, fixed, n), extra=at_loss)
        for m in range(n - 1, -1, -1):
            row, base = self._alive(static, fixed, m)
            # This block's activations in full, its gradient, its fetched parameters.
            extra = costs.activations[m] + costs.workspace[m] + costs.weights[m]
            if m == n - 1:
                extra += loss.logits_bytes
            if costs.long_gradient and m > 0:
                extra += costs.long_gradient
            row[self.p[m]] = 0.0  # their bytes are there again
            if self.program.pending:
                for waiting in range(m + 1, min(m + GRADIENT_SLOTS, n)):
                    row[self.o[waiting]] = row.get(self.o[waiting], 0.0) + costs.weights[waiting]
                if m:
                    row[self.p[m - 1]] = 0.0
            self._gpu_row(row, base, extra)

    def _alive(self, static: Row, fixed: float, below: int) -> tuple[dict[int, float], float]:
        """States, and what blocks under ``below`` keep for backward."""
        costs, row = self.costs, dict(static)
        for i in range(below):
            row[self.c[i]] = float(costs.input[i] - costs.activations[i])
        return row, fixed + sum(costs.activations[:below])

    def _gpu_row(self, row: Row, base: float, extra: float) -> None:
        if self.kind is Objective.GPU_BYTES:
            self.at_most({**row, self.value: -self.scale}, -base - extra, self.byte_scale)
        else:
            self.at_most(row, self.program.gpu_budget_bytes - base - extra, self.byte_scale)

    def _host_row(self) -> None:
        weights = self.costs.weights
        row = {self.o[i]: weights[i] * self.program.host_optimizer_bytes for i in range(self.n)}
        row |= {self.p[i]: weights[i] * self.program.host_parameter_bytes for i in range(self.n)}
        if self.kind is Objective.HOST_BYTES:
            self.at_most({**row, self.value: -self.scale}, 0, self.byte_scale)
        else:
            self.at_most(row, self.program.host_budget_bytes, self.byte_scale)


def _times(row: Row, factor: float) -> dict[int, float]:
    return {column: value * factor for column, value in row.items()}


def _add(a: Row, b: Row) -> dict[int, float]:
    return {column: a.get(column, 0.0) + b.get(column, 0.0) for column in {**a, **b}}
