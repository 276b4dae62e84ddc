"""Optimal checkpointing of a chain: which units keep their activations, their input or nothing, within a memory budget.

The dynamic program of Beaumont et al. (2019, hal-02352969, "Optimal checkpointing for heterogeneous chains"). It computes the
units ``first`` to ``last`` forward and backward from the input of ``first``, which stays until its backward. It takes the
fastest of these ways:

- ``first`` keeps its activations; then the units above it; then backward of ``first``.
- ``first`` keeps its input, and the units from there to ``split`` keep nothing; then the units from ``split`` on, which may
  be recomputed again; then the units below ``split``, starting again from the input of ``first``.

The rest of the chain affects the best way for a part only through the memory that it leaves. For each part the program
therefore finds all ways that no other way beats in both memory and time. The published program uses a table over 500 memory
sizes and rounds all sizes up to one of them. This one is exact: a chain of similar units leaves few such ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from autohete.plan import Activations

#: Maximum number of ways kept per part of a chain, spread over memory. A search among more could take hours.
_MOST_WAYS = 2000

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stage:
    """Costs of a unit, in bytes and nanoseconds.

    Args:
        forward_ns: time of a forward, or of a recomputation whose output the unit above needs.
        recompute_ns: time of a recomputation right before its own backward, which may leave out what only the output needs.
        input_bytes, output_bytes: size of its input and of its output.
        gradient_bytes: size of the gradient of its output, which lives from the backward above to its own.
        kept_bytes: what it keeps in addition to its input when it keeps its activations.
        keeping_bytes, dropping_bytes: temporaries of a forward that keeps the activations, and of one that does not.
        backward_bytes: temporaries of backward, excluding input, activations and the gradient of the output.
        left_bytes: what backward leaves until the last backward has ended.
        keeps: forward always keeps the activations.
    """

    forward_ns: int
    recompute_ns: int
    input_bytes: int
    output_bytes: int
    gradient_bytes: int
    kept_bytes: int
    keeping_bytes: int
    dropping_bytes: int
    backward_bytes: int
    left_bytes: int
    keeps: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """The ways to compute a part of a chain, sorted by ascending memory and descending time.

    Attributes:
        memory: bytes, without what backward of the units above has left.
        time: nanoseconds of all forwards and recomputations.
        split: index at which the units start that run before the recomputation of ``first``; -1: ``first`` keeps its
            activations.
    """

    memory: Numbers
    time: Numbers
    split: Numbers

    def within(self, memory: Numbers) -> Numbers:
        """The least time within ``memory`` bytes, which must suffice for at least one way."""
        return self.time[np.searchsorted(self.memory, memory, side="right") - 1]


class Chain:
    """The dynamic program for ``stages`` within ``memory_bytes``.

    Args:
        stages: the units; the last one computes the loss.
        memory_bytes: budget for everything that a stage lists.
        nested: recomputed units may be recomputed again. Otherwise they keep their activations on the first recomputation.

    Attributes:
        least_bytes: the smallest memory that suffices for any way.
        exact: no way was discarded, so the result is the fastest one that fits.
    """

    def __init__(self, stages: Sequence[Stage], memory_bytes: int, *, nested: bool = True) -> None:
        self._stages, self._memory, self._nested = stages, memory_bytes, nested
        numbers = {stage: number for number, stage in enumerate(dict.fromkeys(stages))}
        self._numbers = tuple(numbers[stage] for stage in stages)
        self._left = list(accumulate((stage.left_bytes for stage in stages), initial=0))
        self._forward = list(accumulate((stage.forward_ns for stage in stages), initial=0))
        #: Parts with equal units share one entry; splits are relative to the part's first unit.
        self._found: dict[tuple[tuple[int, ...], bool], _Ways] = {}
        self._last = len(stages) - 1
        self.exact = True
        for first in reversed(range(len(stages))):
            for last in range(first, len(stages)):
                self._ways(first, last, nested=False)
                self._ways(first, last, nested=True)
        self.least_bytes = int(self._ways(0, self._last, nested=True).memory[0])

    def onward(self, first: int) -> tuple[Numbers, Numbers]:
        """The ways to compute the units from some unit on: the memory of each, and the time of its forwards."""
        ways = self._ways(first, self._last, nested=True)
        return ways.memory, ways.time

    def part(self, first: int, last: int) -> tuple[Numbers, Numbers]:
        """The ways to compute some units again: the memory of each, and the time of its forwards."""
        ways = self._ways(first, last, nested=self._nested)
        return ways.memory, ways.time

    def forwards(self, part: tuple[int, int, int] | None = None) -> list[list[Activations]]:
        """What each forward of each unit keeps. If the memory does not suffice, assumes the smallest memory that does.

        Args:
            part: first and last of some units that are computed again, and memory for them, which must suffice. None: all.
        """
        found: list[list[Activations]] = [[] for _ in self._stages]
        #: (first, last, memory, may be recomputed again), the next on top.
        parts = [(0, self._last, max(self._memory, self.least_bytes), True) if part is None else (*part, self._nested)]
        while parts:
            first, last, memory, nested = parts.pop()
            ways, stage = self._ways(first, last, nested=nested), self._stages[first]
            split = int(ways.split[np.searchsorted(ways.memory, memory, side="right") - 1])
            if split < 0:
                found[first].append(Activations.KEEP)
                if first < last:
                    parts.append((first + 1, last, memory - stage.input_bytes - stage.kept_bytes, nested))
                continue
            split += first
            found[first].append(Activations.RECOMPUTE)
            for unit in range(first + 1, split):
                found[unit].append(Activations.DROP)
            parts.append((first, split - 1, memory - self._left[last + 1] + self._left[split], self._nested))
            parts.append((split, last, memory - stage.input_bytes, nested))
        return found

    def _ways(self, first: int, last: int, *, nested: bool) -> _Ways:
        key = (self._numbers[first : last + 1], nested)
        if key not in self._found:
            self._found[key] = self._search(first, last, nested)
        return self._found[key]

    def _search(self, first: int, last: int, nested: bool) -> _Ways:
        """Find the ways of a part from the ways of its shorter parts."""
        stage, output_gradient = self._stages[first], self._stages[last].gradient_bytes
        kept = stage.input_bytes + stage.kept_bytes
        forward = kept + stage.keeping_bytes + stage.output_bytes + output_gradient
        backward = kept + stage.gradient_bytes + stage.backward_bytes + self._left[last + 1] - self._left[first + 1]
        if first == last:
            memory = np.array([max(forward, backward)], np.int64)
            # A part that does not reach the loss is recomputed, up to the unit whose backward is next.
            return _Ways(memory, np.array([stage.recompute_ns], np.int64), np.array([-1], np.int64))
        above = self._ways(first + 1, last, nested=nested)
        candidates = [(np.maximum(above.memory + kept, max(forward, backward)), above.time + stage.forward_ns, -1)]
        if nested and not stage.keeps:
            passing = stage.input_bytes + stage.dropping_bytes + stage.output_bytes
            for split in range(first + 1, last + 1):
                candidates.append(self._split(first, split, last, passing + output_gradient))
                dropping = self._stages[split]
                if dropping.keeps:
                    break
                passing = max(
                    passing, stage.input_bytes + dropping.input_bytes + dropping.dropping_bytes + dropping.output_bytes
                )
        return self._unbeaten(candidates, first)

    def _split(self, first: int, split: int, last: int, passing: int) -> tuple[Numbers, Numbers, int]:
        """Combine ways: ``first`` keeps its input until the units from ``split`` on are done."""
        above, below = self._ways(split, last, nested=True), self._ways(first, split - 1, nested=self._nested)
        needed_above = above.memory + self._stages[first].input_bytes
        needed_below = below.memory + self._left[last + 1] - self._left[split]
        least = max(passing, int(needed_above[0]), int(needed_below[0]))
        memory = np.unique(np.maximum(np.concatenate([needed_above, needed_below]), least))
        time = above.within(memory - self._stages[first].input_bytes)
        time = time + below.within(memory - self._left[last + 1] + self._left[split])
        return memory, time + (self._forward[split] - self._forward[first]), split

    def _unbeaten(self, candidates: list[tuple[Numbers, Numbers, int]], first: int) -> _Ways:
        """The candidates that no other beats in both memory and time and that fit the budget; always the smallest one."""
        memory = np.concatenate([memory for memory, _, _ in candidates])
        time = np.concatenate([time for _, time, _ in candidates])
        split = np.concatenate([np.full(len(m), s - first if s >= 0 else s, np.int64) for m, _, s in candidates])
        order = np.lexsort((split, time, memory))
        memory, time, split = memory[order], time[order], split[order]
        least = np.minimum.accumulate(time)
        taken = np.concatenate([[True], time[1:] < least[:-1]]) & (memory <= max(self._memory, int(memory[0])))
        places = np.flatnonzero(taken)
        if len(places) > _MOST_WAYS:
            self.exact = False
            places = places[np.linspace(0, len(places) - 1, _MOST_WAYS).astype(np.int64)]
        return _Ways(memory[places], time[places], split[places])
