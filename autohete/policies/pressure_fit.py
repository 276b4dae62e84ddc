"""PressureFit: residency under a memory budget, decided by cutting the gaps between uses where memory is shortest.

github als244/dataflow at c56b6ab, ``docs/dataflow_sim/policy/PRESSUREFIT_ALGO.md`` and ``src/dataflow_sim/policies/``. A value
is on the GPU from its first use to its last. Where the values of a pass exceed the budget, one of those that it does not use is
away between the two uses around it; which one, a score of the gap decides (``pressurefit_aux/reducer.py``). Then each fetch is
given the pass after which it may start (``pressurefit_aux/prefetch_rules.py``).

Here a gap is one that a plan has: it is cut in all micro-batches or in none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autohete.profile import Profile
from autohete.schedule import Kind


class Gap(StrEnum):
    """The gaps of a unit's values that a plan can cut: of its parameters, of what its forward keeps, and of the sums of
    gradients between micro-batches. Cut or not, parameters arrive for the first forward, if they leave at all.
    """

    ARRIVAL = "arrival"
    AFTER_FORWARD = "after forward"
    AFTER_BACKWARD = "after backward"
    KEPT = "kept"
    GRADIENTS = "gradients"


class Score(StrEnum):
    """Which gap to cut first: the one whose fetch delays its user least, or one that needs no copy to the host."""

    STALL = "min-stall"
    TRANSFER = "min-transfer"


class Trigger(StrEnum):
    """When a fetch may start: so that all fetches of one queue end in time, the same as far as memory allows, or as late as it
    would end in time if it were alone.
    """

    PACKED_FIFO = "packed-fifo"
    PACKED_FIT = "packed-fit"
    LATEST_SAFE = "latest-safe"


class TimedPass(NamedTuple):
    """A task of the GPU.

    Args:
        kind: forward, loss, recomputation, backward or update.
        unit: index.
        micro_batch: index; of updates the last.
        seconds: its time.
    """

    kind: Kind
    unit: int
    micro_batch: int
    seconds: float


class ValueGap(NamedTuple):
    """A gap of one value in all micro-batches.

    Args:
        gap: which one.
        unit: whose value.
        size_bytes: its size.
        written: the host has no copy, so that one is made first.
        first_use: index of the first task that uses the value, without the one that makes it.
        spans: the passes before and after the gap, by index; -1 for one that nothing precedes.
    """

    gap: Gap
    unit: int
    size_bytes: int
    written: bool
    first_use: int
    spans: tuple[tuple[int, int], ...]

    @property
    def key(self) -> tuple[Gap, int]:
        """Gap and unit."""
        return self.gap, self.unit

    def is_over(self, task: int, early: int) -> bool:
        """Whether a task is in the gap, which ends ``early`` tasks before the next use."""
        place = bisect_left(self.spans, (task, -1)) - 1
        return place >= 0 and self.spans[place][0] < task < self.spans[place][1] - early


@dataclass(frozen=True, slots=True, eq=False)
class PassChain:
    """The tasks of an iteration in order, and the memory that they need.

    Args:
        profile: sizes and times.
        passes: the tasks.
        starts: when each starts if none waits, and the end of the last, in seconds.
        held: bytes on the GPU during each if no gap is cut, without temporaries.
        workspace_bytes: the largest temporaries of one of them.
        gaps: all gaps with passes in between.
        states: index of each update, and the bytes of its states.
    """

    profile: Profile
    passes: tuple[TimedPass, ...]
    starts: tuple[float, ...]
    held: NDArray[np.int64]
    workspace_bytes: int
    gaps: tuple[ValueGap, ...]
    states: tuple[tuple[int, int], ...]

    @property
    def seconds(self) -> float:
        """Time of all tasks."""
        return self.starts[-1]

    def delay_seconds(self, gap: ValueGap) -> float:
        """By how much the user of a value waits at most if the gap is cut and nothing else is copied."""
        there = self.profile.d2h_seconds(gap.size_bytes) if gap.written else 0.0
        back, found = self.profile.h2d_seconds(gap.size_bytes), 0.0
        for before, after in gap.spans:
            left, triggered = self.starts[before + 1], self.starts[min(before + 2, after)]
            found = max(found, max(triggered, left + there) + back - self.starts[after])
        return found


def pass_chain(profile: Profile, recomputed: Collection[int], resident: Collection[int]) -> PassChain:
    """Return the tasks of an iteration in which the GPU updates each unit as soon as its gradients are complete.

    Args:
        profile: times and sizes.
        recomputed: the units that keep their input only.
        resident: the units whose parameters and gradients stay on the GPU.
    """
    return _Chain(profile, frozenset(recomputed), frozenset(resident)).built()


def saved_again(profile: Profile, unit: int) -> tuple[str, ...]:
    """Names of the saved tensors that backward makes again even if the unit is not recomputed: norms, activation functions."""
    return tuple(one.name for one in profile.units[unit].saved if one.seconds is not None)


class _Chain:
    """Collects a :class:`PassChain`."""

    def __init__(self, profile: Profile, recomputed: frozenset[int], resident: frozenset[int]) -> None:
        self._profile, self._recomputed, self._resident = profile, recomputed, resident
        self._passes = tuple(_passes(profile, recomputed))
        self._at = {(one.kind, one.micro_batch, one.unit): i for i, one in enumerate(self._passes)}
        self._held = np.zeros(len(self._passes) + 1, np.int64)
        self._gaps: list[ValueGap] = []
        self._states: list[tuple[int, int]] = []

    def built(self) -> PassChain:
        profile = self._profile
        for unit in range(len(profile.units)):
            self._parameters(unit)
            if unit >= profile.first_trained:
                self._activations(unit)
            if profile.units[unit].trained_parameters:
                self._trained(unit)
        return PassChain(
            profile,
            self._passes,
            tuple(accumulate((one.seconds for one in self._passes), initial=0.0)),
            np.cumsum(self._held)[:-1],
            max(map(self._workspace, self._passes)),
            tuple(self._gaps),
            tuple(self._states),
        )

    def _hold(self, size_bytes: int, first: int, last: int) -> None:
        self._held[first] += size_bytes
        self._held[last + 1] -= size_bytes

    def _find(self, kind: Kind, unit: int, micro_batch: int) -> int | None:
        return self._at.get((kind, micro_batch, unit))

    def _back(self, unit: int, micro_batch: int) -> int | None:
        """The first pass of backward of a unit."""
        again = self._find(Kind.RECOMPUTE, unit, micro_batch)
        return self._find(Kind.BACKWARD, unit, micro_batch) if again is None else again

    @property
    def _batches(self) -> range:
        return range(self._profile.workload.micro_batches)

    def _add(self, gap: Gap, unit: int, size: int, written: bool, first_use: int, spans: list[tuple[int, int]]) -> None:
        if size and spans:
            self._gaps.append(ValueGap(gap, unit, size, written, first_use, tuple(spans)))

    def _parameters(self, unit: int) -> None:
        size, last = self._profile.parameter_bytes(unit), len(self._profile.units) - 1
        forwards = [self._at[Kind.FORWARD, one, unit] for one in self._batches]
        backs = [self._back(unit, one) for one in self._batches]
        ends = [self._find(Kind.BACKWARD, unit, one) for one in self._batches]
        update = self._find(Kind.GPU_UPDATE, unit, self._batches[-1])
        if unit in self._resident:
            self._hold(size, 0, len(self._passes) - 1)
            return
        self._hold(size, forwards[0], next(one for one in (update, ends[-1], forwards[-1]) if one is not None))
        self._add(Gap.ARRIVAL, unit, size, False, forwards[0], [(-1, forwards[0])])
        spans = [(there, back) for there, back in zip(forwards, backs, strict=True) if back is not None]
        # The head's backward follows at once.
        self._add(Gap.AFTER_FORWARD, unit, size, False, forwards[0], spans if unit < last else [])
        between = [
            (there if end is None else end, after) for there, end, after in zip(forwards, ends, forwards[1:], strict=False)
        ]
        self._add(Gap.AFTER_BACKWARD, unit, size, False, forwards[0], between)

    def _activations(self, unit: int) -> None:
        profile = self._profile.units[unit]
        inner, last = 0 < unit < len(self._profile.units) - 1, len(self._profile.units) - 1
        again = unit in self._recomputed
        kept = 0 if again else profile.kept_bytes - (profile.bytes_of(saved_again(self._profile, unit)) if inner else 0)
        spans = []
        for one in self._batches:
            forward, back, end = (
                self._at[Kind.FORWARD, one, unit], self._back(unit, one), self._at[Kind.BACKWARD, one, unit],
            )  # fmt: skip
            assert back is not None, "a unit with activations has a backward"
            self._hold(kept, forward, end)
            self._hold(profile.input_bytes, forward - bool(unit), end)  # the forward below makes it
            if again:
                self._hold(profile.kept_bytes, back, end)
            if unit > self._profile.first_trained:  # the gradient of the input
                self._hold(profile.input_bytes, end, self._at[Kind.BACKWARD, one, unit - 1])
            if forward + 1 < back and unit < last:
                spans.append((forward, back))
        if inner and spans:
            first_use = spans[0][0 if again else 1]  # forward uses an input
            self._add(Gap.KEPT, unit, kept + profile.input_bytes, True, first_use, spans)

    def _trained(self, unit: int) -> None:
        profile, last = self._profile, self._batches[-1]
        size = profile.units[unit].trained_parameters * profile.element_bytes
        ends = [self._at[Kind.BACKWARD, one, unit] for one in self._batches]
        update = self._at[Kind.GPU_UPDATE, last, unit]
        self._hold(size, ends[0], update)
        if unit not in self._resident:
            backs = [self._back(unit, one) or end for one, end in zip(self._batches, ends, strict=True)]
            self._add(Gap.GRADIENTS, unit, size, True, ends[min(1, last)], [*zip(ends, backs[1:], strict=False)])
        states = profile.state_bytes(unit)
        self._hold(states, update, update)
        self._states.append((update, states))

    def _workspace(self, one: TimedPass) -> int:
        profile, inner = self._profile.units[one.unit], 0 < one.unit < len(self._profile.units) - 1
        again = profile.bytes_of(saved_again(self._profile, one.unit)) if inner else 0
        if one.kind is Kind.GPU_UPDATE:
            return profile.gpu_update_workspace_bytes
        if one.kind is Kind.LOSS:
            return self._profile.loss.peak_bytes
        if one.kind is Kind.BACKWARD:
            return profile.backward_workspace_bytes + (0 if one.unit in self._recomputed else again)
        if one.kind is Kind.FORWARD and one.unit in self._recomputed:
            return profile.checkpointed_workspace_bytes
        return profile.forward_workspace_bytes + (again if one.kind is Kind.FORWARD else 0)


def _passes(profile: Profile, recomputed: Collection[int]) -> Iterator[TimedPass]:
    units, last = profile.units, profile.workload.micro_batches - 1
    clips = profile.workload.clips
    for micro_batch in range(last + 1):
        for unit, one in enumerate(units):
            yield TimedPass(Kind.FORWARD, unit, micro_batch, one.forward_seconds)
        yield TimedPass(Kind.LOSS, len(units) - 1, micro_batch, profile.loss.seconds)
        for unit in reversed(range(profile.first_trained, len(units))):
            one, again = units[unit], 0.0
            if unit in recomputed:
                yield TimedPass(Kind.RECOMPUTE, unit, micro_batch, one.recompute_seconds)
            elif 0 < unit < len(units) - 1:
                again = one.again_seconds(saved_again(profile, unit))
            yield TimedPass(Kind.BACKWARD, unit, micro_batch, one.backward_seconds + again)
            if micro_batch == last and one.trained_parameters and not clips:
                yield TimedPass(Kind.GPU_UPDATE, unit, micro_batch, one.gpu_update_seconds)
    for unit in reversed(range(profile.first_trained, len(units) if clips else 0)):
        if units[unit].trained_parameters:
            yield TimedPass(Kind.GPU_UPDATE, unit, last, units[unit].gpu_update_seconds)


@dataclass(frozen=True, slots=True, eq=False)
class Residency:
    """Which gaps are cut.

    Args:
        chain: of the tasks.
        cut: the gaps, in the order in which they were cut.
        pressure: bytes on the GPU during each task.
        capacity_bytes: the most that there may be.
        headroom: whether what is fetched counts one task early.
    """

    chain: PassChain
    cut: tuple[ValueGap, ...]
    pressure: NDArray[np.int64]
    capacity_bytes: int
    headroom: bool

    @property
    def fits(self) -> bool:
        """Whether it stays within the capacity."""
        return int(self.pressure.max()) <= self.capacity_bytes

    def copies_in_flight(self) -> int | None:
        """How many forwards may keep what they have made on the GPU while it is copied to the host; None: all."""
        leaving = [one for one in self.cut if one.gap is Gap.KEPT]
        if not leaving:
            return None
        forwards = [before for one in leaving for before, _ in one.spans]
        room = self.capacity_bytes - int(self.pressure[forwards].max())
        places = 1 + max(0, room) // max(one.size_bytes for one in leaving)
        return places if places < len(forwards) else None

    def ahead(self, trigger: Trigger) -> dict[tuple[Gap, int], int]:
        """For each gap that is cut, and for arrivals, how many passes before the next use the fetch may overlap; of several
        micro-batches the fewest.
        """
        chain, found = self.chain, dict[tuple[Gap, int], int]()
        passes = [0, *accumulate(one.kind is not Kind.GPU_UPDATE for one in chain.passes)]
        jobs = [(after, before, one) for one in self._fetched() for before, after in one.spans]
        pressure, next_start = self.pressure.copy(), float("inf")
        states = {at: size for at, size in chain.states if size}
        for after, before, one in sorted(
            [*jobs, *((at, -1, None) for at in states)], key=lambda job: (job[0], job[2] is None), reverse=True
        ):
            size = states[after] if one is None else one.size_bytes
            deadline = chain.starts[after]
            finish = deadline if trigger is Trigger.LATEST_SAFE else min(deadline, next_start)
            begin = finish - chain.profile.h2d_seconds(size)
            # The fetch begins with the first task that starts no later, but after the one that follows the last use.
            first = max(bisect_right(chain.starts, begin) - 1, min(before + 2, after), 0)
            next_start = min(next_start, max(begin, chain.starts[first]))
            if one is None:
                continue
            if trigger is Trigger.PACKED_FIT:
                first = self._fitting(first, after, size, pressure)
            ahead = passes[after] - passes[first]
            found[one.key] = min(found.get(one.key, ahead), ahead)
        return found

    def _fetched(self) -> Iterator[ValueGap]:
        yield from self.cut
        yield from (one for one in self.chain.gaps if one.gap is Gap.ARRIVAL)

    def _fitting(self, first: int, after: int, size: int, pressure: NDArray[np.int64]) -> int:
        """The first task from ``first`` on from which what is fetched fits up to its use; it counts from then on."""
        entry = after - 1 if self.headroom else after
        begin = entry
        while begin > first and pressure[begin - 1] + size <= self.capacity_bytes:
            begin -= 1
        if begin < entry:
            pressure[begin:entry] += size
        return max(first, begin)


def fitted(chain: PassChain, capacity_bytes: int, score: Score, *, headroom: bool) -> Residency:
    """Cut gaps until the values of every task fit, those of the worst task first.

    Args:
        chain: of the tasks.
        capacity_bytes: for all but temporaries.
        score: which gap of the worst task is cut.
        headroom: what is fetched counts one task early.
    """
    pressure, early = chain.held.copy(), 1 if headroom else 0
    if headroom:
        for one in chain.gaps:
            if one.gap is Gap.ARRIVAL and one.spans[0][1]:
                pressure[one.spans[0][1] - 1] += one.size_bytes
        for at, size in chain.states:
            pressure[at - 1] += size
    left = sorted((one for one in chain.gaps if one.gap is not Gap.ARRIVAL), key=lambda one: _rank(chain, one, score))
    cut: list[ValueGap] = []
    while pressure[worst := int(pressure.argmax())] > capacity_bytes:
        best = next((one for one in left if one.is_over(worst, early)), None)
        if best is None:
            break
        left.remove(best)
        cut.append(best)
        for before, after in best.spans:
            pressure[before + 1 : max(after - early, before + 1)] -= best.size_bytes
    return Residency(chain, tuple(cut), pressure, capacity_bytes, headroom)


def _rank(chain: PassChain, one: ValueGap, score: Score) -> tuple[float, ...]:
    length = max(after - before - 1 for before, after in one.spans)
    rest = (float(one.written), -one.first_use, -one.size_bytes, -length, one.unit)
    return rest if score is Score.TRANSFER else (chain.delay_seconds(one), *rest)


def halves(count: int) -> Iterator[int]:
    """Half of ``count``, rounded down but at least 1, and so on down to 1."""
    while count:
        count = max(1, count // 2)
        yield count
        if count == 1:
            return
