"""Lower bounds of the iteration time for many choices of the three integers at once.

Sums over "the first k" or "the last k" blocks are prefix sums, so a bound is an array expression over the choices. Each bound
comes from an engine's total work or from a cycle of waits. None depends on timing, so no plan is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autohete.hardware import Hardware
from autohete.planner.steps import GRADIENT_SLOTS, BlockCosts, Counts

Numbers = NDArray[np.float64]
Integers = NDArray[np.integer[Any]]

#: Durations are rounded to nanoseconds: in a cycle of up to this many tasks per block, each may be half a nanosecond shorter.
_TASKS_PER_BLOCK = 10
#: Maximum number of elements of an array over choices and blocks.
_CHUNK = 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class CountChoices:
    """Choices of the three integers: arrays of equal shape."""

    checkpointed: Integers
    offloaded: Integers
    cpu_updated: Integers

    def __len__(self) -> int:
        return len(self.checkpointed)

    def __getitem__(self, place: int) -> Counts:
        return Counts(int(self.checkpointed[place]), int(self.offloaded[place]), int(self.cpu_updated[place]))

    def take(self, places: Integers | NDArray[np.bool_] | slice) -> CountChoices:
        """The choices at the given indices."""
        return CountChoices(self.checkpointed[places], self.offloaded[places], self.cpu_updated[places])

    def columns(self) -> CountChoices:
        """The same choices with a trailing axis over blocks."""
        return CountChoices(self.checkpointed[:, None], self.offloaded[:, None], self.cpu_updated[:, None])


def all_choices(units: int) -> CountChoices:
    """Every choice for a model of ``blocks`` blocks."""
    ranges = (np.arange(size, dtype=np.int16) for size in (units - 1, units - 1, units + 1))
    grid = np.meshgrid(*ranges, indexing="ij")
    return CountChoices(*(axis.ravel() for axis in grid))


def below(values: list[float] | list[int]) -> Numbers:
    """Prefix sums: element ``k`` is the sum over the blocks below ``k``, for k from 0 to the number of blocks."""
    return np.concatenate([[0.0], np.cumsum(np.array(values, float))])


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """The work of copies and CPU for the blocks below an index, in seconds without contention."""

    down: Numbers
    up: Numbers
    cpu: Numbers


class TimeBounds:
    """The bounds for one workload and node.

    Args:
        costs: seconds per block.
        hardware: links and shared bandwidth.
        priority: whether copies and updates run lower block indices first.
    """

    def __init__(self, costs: BlockCosts, hardware: Hardware, priority: bool) -> None:
        self.costs, self.hardware, self.priority = costs, hardware, priority
        self.n, self.m = costs.count, costs.micro_batches
        self.forward, self.backward = below(costs.forward), below(costs.backward)
        self.recompute, self.gpu_update = below(costs.recompute), below(costs.gpu_update)
        #: GPU updates that precede the backward of a block below.
        self.early_update = 0 * self.gpu_update if costs.updates_last else self.gpu_update
        self.cpu_update = below(costs.cpu_update)
        reached = np.arange(self.n) >= costs.first_trained  # by backward
        self.down, self.refresh = below(costs.gradients), below(costs.refreshes)
        self.write_back = below(costs.write_backs)
        #: Fetches that follow the backward of their block; and those of blocks without backward, for forward alone.
        self.up, self.fetch = (below(list(np.array(some) * reached)) for some in (costs.parameters, costs.fetches))
        self.forward_alone = below(list(np.minimum(costs.parameters, costs.fetches) * ~reached))
        either = np.minimum(costs.parameters, costs.fetches) * reached  # valid for both processors
        self.least_fetch = below(list(either))
        # Minimum over the blocks up to each: a lower bound for a chain through any of them.
        self.least_down = np.minimum.accumulate(np.array(costs.gradients))
        self.least_up = np.minimum.accumulate(np.minimum(either, costs.refreshes))
        self.least_update = np.minimum.accumulate(np.array(costs.cpu_update))
        #: At or above each block, the first that has a gradient.
        trained = [i for i, one in enumerate(costs.trained) if one]
        self.next_trained = np.array([next((i for i in trained if i >= unit), self.n) for unit in range(self.n + 1)])
        self.contiguous = trained == list(range(trained[0], trained[-1] + 1))
        self.rounding = 0.5e-9 * _TASKS_PER_BLOCK * self.n * self.m

    def loads(self, x: CountChoices) -> Numbers:
        """The work of the busiest engine or shared resource. Cheaper than :meth:`seconds`."""
        work, gpu = self._work(x, np.array(self.n)), self._gpu(x)
        slowed = work.cpu + gpu * self.hardware.cpu_lost_beside_gpu
        return np.maximum(np.maximum(gpu, slowed), self._slowest(work)) - self.rounding

    def total_load(self, x: CountChoices) -> Numbers:
        """The total work of all engines."""
        work = self._work(x, np.array(self.n))
        return self._gpu(x) + work.down + work.up + work.cpu

    def alone(self, x: CountChoices) -> Numbers:
        """Estimated time if each prefetch overlaps only the pass before its own, and each gradient copy only the next pass."""
        costs, stalls = self.costs, []
        fetch, passes = np.array(costs.parameters), (np.array(costs.forward), np.array(costs.backward))
        for during in passes:
            stalls.append(below(list(np.maximum(fetch - during, 0))))
        copies = below(list(np.maximum(np.array(costs.gradients) - passes[1], 0)))
        waiting = sum(stall[x.offloaded + 1] - stall[1] for stall in stalls) + copies[-1] - copies[self.n - x.cpu_updated]
        return np.asarray(self._gpu(x) + waiting * self.m, float)

    def seconds(self, x: CountChoices) -> Numbers:
        """Lower bound of the iteration time of each choice."""
        size = max(_CHUNK // self.n, 1)
        parts = [self._cycles(x.take(slice(i, i + size))) for i in range(0, len(x), size)]
        return np.maximum(self.loads(x), np.concatenate(parts) if parts else np.empty(0))

    # --- work

    def _gpu(self, x: CountChoices) -> Numbers:
        return np.asarray(self._passes(x) * self.m + self.gpu_update[self.n - x.cpu_updated], float)

    def _passes(self, x: CountChoices) -> Numbers:
        """All passes of one micro-batch."""
        fixed = self.forward[-1] + self.backward[-1] + self.costs.loss.seconds
        return np.asarray(fixed + self.recompute[x.checkpointed + 1] - self.recompute[1], float)

    def _work(self, x: CountChoices, under: Integers) -> _Work:
        """The work for the blocks below ``under`` after the last backward; if that is the whole model, of the whole iteration.

        Down: gradients of the blocks that the CPU updates, and write-backs of the offloaded blocks that it does not update. Up:
        prefetches (for the next forward; in the whole iteration for every pass), and refreshes of what is updated on the CPU
        and stays on the GPU.
        """
        first = self.n - x.cpu_updated  # first block that the CPU updates
        gpu_offloaded = np.minimum(x.offloaded, first - 1)
        refreshed = np.maximum(first, x.offloaded + 1)  # first refreshed block, except the embedding
        end = np.minimum

        def above(prefix: Numbers, start: Integers) -> Numbers:
            return np.asarray(prefix[under] - prefix[end(start, under)], float)

        def inner(prefix: Numbers, last: Integers) -> Numbers:
            return np.asarray(prefix[np.maximum(end(last + 1, under), 1)] - prefix[1], float)

        down = above(self.down, first) + inner(self.write_back, gpu_offloaded)
        embedding = np.where((first == 0) & (under > 0), self.refresh[1], 0.0)
        fetched = inner(self.fetch, gpu_offloaded) + inner(self.up, x.offloaded) - inner(self.up, gpu_offloaded)
        up = fetched + above(self.refresh, np.maximum(refreshed, 1)) + embedding
        if under.ndim == 0:
            up = up + fetched * (2 * self.m - 1) + inner(self.forward_alone, x.offloaded) * self.m
            if not self.costs.shared:  # several GPUs may copy sums
                down = down + above(self.down, first) * (self.m - 1)
        return _Work(down, up, above(self.cpu_update, first))

    def _slowest(self, work: _Work) -> Numbers:
        """The time for ``work``: each engine at full rate, and all together within their shared capacity."""
        h2d, d2h, update = self.hardware.h2d_copies, self.hardware.d2h_copies, self.hardware.cpu.update_bandwidth
        link = max(h2d.duplex_bandwidth + d2h.duplex_bandwidth, h2d.bandwidth, d2h.bandwidth)
        copied = work.up * h2d.bandwidth + work.down * d2h.bandwidth
        engines = np.maximum(np.maximum(work.down, work.up), work.cpu)
        return np.maximum(engines, np.maximum(copied / link, (copied + work.cpu * update) / self.hardware.dram_bandwidth))

    # --- cycles

    def _cycles(self, choices: CountChoices) -> Numbers:
        """The longest cycle among several families, each with a row per block m."""
        x, m = choices.columns(), np.arange(self.n)[None, :]
        gpu = self._gpu(choices)
        earlier = self._passes(x) * (self.m - 1)  # of all micro-batches but the last
        above = earlier + self._gpu_from(x, m) + self._gradient_wait(x, m)
        found = np.maximum(above + self._until_forward(x, m), gpu[:, None] + self._fetched_for_backward(x, m) * self.m)
        if self.costs.updates_last:
            found = np.maximum(found, earlier + self._updated_last(x, m))
        return np.asarray(found.max(axis=1) - self.rounding, float)

    def _gpu_from(self, x: CountChoices, m: Integers) -> Numbers:
        """GPU work from forward of block m to backward of block m."""
        first = self.n - x.cpu_updated
        passes = (self.forward[-1] - self.forward[m]) + (self.backward[-1] - self.backward[m]) + self.costs.loss.seconds
        last = x.checkpointed + 1
        recomputed = self.recompute[last] - self.recompute[np.minimum(last, np.maximum(m, 1))]
        updated = self.early_update[np.maximum(first, m + 1)] - self.early_update[m + 1]
        return np.asarray(passes + recomputed + updated, float)

    def _until_forward(self, x: CountChoices, m: Integers) -> Numbers:
        """Time from the end of backward of block m to the next forward of a block up to m.

        Gradients, write-backs, updates, refreshes and prefetches of all blocks up to m follow their own backward, hence that of
        block m, and precede their own forward, hence that of block m. After the last task on an engine, the rest of its chain
        still follows: after a copy down, at least a copy up. Before the first task, the start of its chain has run. In issue
        order updates run from the last block down, so the next forward waits for the *first* block that the CPU updates.
        """
        first = self.n - x.cpu_updated
        work = self._work(x, np.broadcast_to(m + 1, (1, self.n)))
        down = np.where(work.down > 0, work.down + self.least_up[m], 0.0)
        up = np.where(work.up > 0, work.up + self.least_down[m], 0.0)
        cpu = np.where(first <= m, work.cpu + self.least_down[m] + self.least_up[m], 0.0)
        if not self.priority:
            first = self.next_trained[first]
            cpu = cpu + np.where(first <= m, self.forward[m] - self.forward[np.minimum(first, m)], 0.0)
            # The first prefetch of a forward is issued after all refreshes, so block 1 waits for the updates before them.
            refreshed = self.next_trained[np.maximum(first, x.offloaded + 1)]
            last = self.cpu_update[m + 1] - self.cpu_update[np.minimum(refreshed, m + 1)]
            last = last + self.least_down[m] + 2 * self.least_up[m] + self.forward[m] - self.forward[1]
            fetched = (x.offloaded >= max(1, self.costs.first_trained)) & ((first <= 1) | (not self.costs.shared))
            cpu = np.maximum(cpu, np.where(fetched & (refreshed <= m), last, 0.0))
        return np.maximum(np.maximum(down, up), np.maximum(cpu, self._slowest(work)))

    def _updated_last(self, x: CountChoices, m: Integers) -> Numbers:
        """Time from forward of block m to the next one if no update precedes the last backward.

        The CPU then updates all its blocks up to m after it, and a copy up of one of them follows.
        """
        passes = self.forward[-1] - self.forward[m] + self.backward[-1] + self.costs.loss.seconds
        recomputed = self.recompute[x.checkpointed + 1] - self.recompute[1]
        updated = self.cpu_update[m + 1] - self.cpu_update[np.minimum(self.n - x.cpu_updated, m + 1)]
        return np.asarray(np.where(updated > 0, passes + recomputed + updated + self.least_up[m], 0.0), float)

    def _gradient_wait(self, x: CountChoices, m: Integers) -> Numbers:
        """Time that gradients waiting for their copy add to backward of the blocks above m.

        Backward of block a - slots, if its gradient is copied too, waits for the gradient of block a. From the end of backward
        of a block b, the gradients of blocks b down to a are copied one after another before backward continues at a - slots.
        """
        if self.costs.shared or not self.contiguous:
            # On several GPUs gradients wait for their copy in parts, and backward for no copy. Otherwise gradients of other
            # blocks take the places.
            return np.zeros((x.checkpointed.shape[0], m.shape[1]))
        first = np.maximum(self.n - x.cpu_updated, self.costs.first_trained)
        recompute = np.minimum(np.arange(self.n + 1), x.checkpointed + 1)
        begun = self.backward + self.recompute[recompute] - self.recompute[np.minimum(recompute, 1)]  # of the blocks below each
        copied = np.where(np.arange(self.n) >= first, self.down[1:] - begun[:, :-1], -np.inf)
        best = np.maximum.accumulate(copied[:, ::-1], axis=1)[:, ::-1]  # the best b at or above each a
        gain = np.full((x.checkpointed.shape[0], self.n), 0.0)
        a = np.arange(GRADIENT_SLOTS, self.n)
        target = a - GRADIENT_SLOTS
        # These precede backward of the target: its recomputation, and the GPU updates down to the block above it.
        updates = self.early_update[np.maximum(first, target + 1)] - self.early_update[target + 1]
        redone = np.where(target >= 1, self.recompute[target + 1] - self.recompute[target], 0.0)
        redone = np.where(target <= x.checkpointed, redone, 0.0)
        gain[:, target] = np.where(target >= first, best[:, a] - self.down[a] + begun[:, target + 1] - redone - updates, 0.0)
        above = np.maximum.accumulate(np.maximum(gain, 0.0)[:, ::-1], axis=1)[:, ::-1]
        return np.asarray(above[np.arange(len(above))[:, None], m], float)

    def _fetched_for_backward(self, x: CountChoices, m: Integers) -> Numbers:
        """Time that prefetches for backward add to the GPU's work, for all offloaded blocks from m up.

        Parameters are not fetched for backward before their own forward has ended. Backward of m or of a block above it waits
        for the last of these fetches.
        """
        fetched = np.maximum(self.least_fetch[x.offloaded + 1] - self.least_fetch[m], 0.0)
        backward = self.backward[m + 1] - self.backward[m]
        redone = np.where(m <= x.checkpointed, self.recompute[m + 1] - self.recompute[m], 0.0)
        beside = self._gpu_from(x, m) - (self.forward[m + 1] - self.forward[m]) - backward - redone
        return np.asarray(np.where((m >= 1) & (m <= x.offloaded), fetched - beside, -np.inf), float)
