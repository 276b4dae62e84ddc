"""POFO (Beaumont, Eyraud-Dubois, Shilova, NeurIPS 2021): activations of a chain stay, go to the host, or are recomputed.

"Efficient Combination of Rematerialization and Offloading for Training DNNs". After times and sizes of all units and the rate
of the link are measured, a dynamic program walks up the chain. The forward of each unit keeps all that backward needs
(*F_all*), or it keeps its input (*F_ck*) and the units up to some other keep nothing. What is kept stays, or it is copied to
the host while the units above run, and back before its backward, one after another in the order of backward. The text was read
only in its abstract; the program follows ``colossalai/fx/passes/algorithms/ckpt_solver_pofo.py`` (github hpcaitech/ColossalAI
at 2d5a6a02), which is based on the paper and its supplement:

- The state before a unit is the memory that units below keep on the GPU, the bytes of them that still wait for their copy to
  the host, and the bytes of them that have to come back before the unit's backward ends. A pass takes from both what the link
  moves meanwhile.
- A pass whose memory does not suffice beside these bytes waits until enough of them have moved. What is left at the loss moves
  there. The sum of passes and waits is least.
- Units that kept nothing are recomputed as ``rotor`` does, in the memory that is left.

Decided here, and different:

- Backward of recomputed units takes the least of their ways by ``rotor`` with what has to move before it. The code takes the
  mean of a sum and a maximum, and the paper a search of its own.
- The code rounds all sizes up to slots of memory. Here sizes are exact, and of many states before a unit those are kept that
  would end first without further copies. So the result may miss the optimum.
- A copy to the host begins after the forward that kept the values, also that of an input. There are two directions with a rate
  each.
- A copy back begins with the pass that leaves it just enough time. If the plan does not fit, passes wait for memory where it
  runs out, and if it still does not, the program is given less of it.
- The plan of ``rotor``, to which the program comes without a link, is taken where it is no slower.
- Embedding and head keep their activations. The optimizer runs after backward.

The abstract has activations / 4 to 6 with less than 20 % more time, of networks and a machine that it does not name. For 48
blocks of width 1,024, sequences of 512, batch 64, fp16, 1,000 classes on a V100 with PCIe 3, 21 and 25 % were predicted, and
19.0 and 21.5 % are simulated; ``rotor`` takes 22.8 and 25.3 %.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autohete.errors import check_fields
from autohete.plan import Activations, Plan, Route, UnitPlan
from autohete.plan.policy import Judge, Verdict, better
from autohete.plan.recomputation import recomputations
from autohete.plan.rules import GpuUpdatesAfterBackward
from autohete.planner.chain import Chain
from autohete.policies.chain_costs import activation_budget_bytes, stages
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY

#: Maximum number of states kept before a unit, and of ways to recompute some units.
_STATES, _WAYS = 60, 12
#: Shares of the memory that the program is given, until its plan fits.
_SHARES = (1.0, 0.96, 0.92, 0.85, 0.75)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pofo:
    """POFO."""

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`. If nothing fits, returns the plan with the lowest GPU peak."""
        walk = _ChainWalk(profile)
        found = [walk.plan(walk.without_link())]
        for share in _SHARES:
            units = walk.units(share)
            if units is None:
                break
            found += [walk.plan(units)] if found[1:] else [walk.plan(units, waits=True), walk.plan(units)]
            if judge(found[-1]).verdict is Verdict.OK:
                return better(found, judge)
        inputs = [UnitPlan(Activations.RECOMPUTE, kept=Route(HOST_MEMORY))] * (len(profile.units) - 2)
        return better((*found, walk.plan(fetched_in_time(profile, (UnitPlan(), *inputs, UnitPlan())))), judge)


class _WalkStates(NamedTuple):
    """States before a unit, one per row.

    Attributes:
        kept: bytes that units below keep on the GPU.
        leaving: bytes that wait for their copy to the host.
        coming: bytes that have to come back.
        seconds: passes and waits so far.
        origin: of each, the unit and the row that it comes from, whether what is kept there goes to the host, and the bytes for
            recomputation; -1: nothing is recomputed.
    """

    kept: Floats
    leaving: Floats
    coming: Floats
    seconds: Floats
    origin: NDArray[np.int64]

    def where(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> _WalkStates:
        """Some of the states."""
        return _WalkStates._make(column[rows] for column in self)


class _ChainWalk:
    """The dynamic program for the trained units of a profile."""

    def __init__(self, profile: Profile) -> None:
        self._profile, self._first = profile, profile.first_trained
        self._stages = stages(profile)
        self._budget = activation_budget_bytes(profile)
        self._chain = Chain(self._stages, self._budget)
        self._left = [sum(stage.left_bytes for stage in self._stages[unit + 1 :]) for unit in range(len(self._stages))]
        times = profile.units[self._first :]
        self._forward, self._backward = ([getattr(t, f"{way}_seconds") for t in times] for way in ("forward", "backward"))
        self._seconds = sum(self._forward) + sum(self._backward)
        block = max(1, *(stage.input_bytes + stage.kept_bytes for stage in self._stages))
        self._away, self._back = block / profile.d2h_seconds(block), block / profile.h2d_seconds(block)

    def plan(self, units: tuple[UnitPlan, ...], *, waits: bool = False) -> Plan:
        """The plan of the system with such units."""
        return Plan("pofo", units, rules=(GpuUpdatesAfterBackward(),), memory_waits=waits)

    def without_link(self) -> tuple[UnitPlan, ...]:
        """The fastest plans in which nothing is copied."""
        kept = ((forwards[0], tuple(forwards[1:-1])) for forwards in self._chain.forwards())
        return (*[UnitPlan()] * self._first, *(UnitPlan(first, again=again) for first, again in kept))

    def units(self, share: float) -> tuple[UnitPlan, ...] | None:
        """The fastest plans of all units found within a share of the memory; None if there are none."""
        budget, count = share * self._budget, len(self._stages)
        if budget <= 0:
            return None
        limit = np.inf
        at: list[list[_WalkStates]] = [[] for _ in range(count + 1)]
        none = np.zeros(1)
        at[0] = [_WalkStates(none, none, none, none, np.full((1, 4), -1))]
        reached: list[_WalkStates] = []
        for unit in range(count):
            states, least = self._thinned(unit, _joined(at[unit]), budget, limit)
            reached.append(states)
            limit = min(limit, least)
            if len(reached[unit].kept) == 0:
                continue
            for target, states in (*self._keeping(unit, reached[unit], budget), *self._dropping(unit, reached[unit], budget)):
                at[target].append(states)
        ends = _joined(at[count])
        if len(ends.kept) == 0:
            return None
        total = ends.seconds + ends.leaving / self._away + ends.coming / self._back
        decisions, origin = {}, ends.origin[int(np.argmin(total))]
        while origin[0] >= 0:
            unit, row, goes, memory = map(int, origin)
            decisions[unit] = bool(goes), memory
            origin = reached[unit].origin[row]
        return self._planned(decisions)

    def _thinned(self, unit: int, states: _WalkStates, budget: float, limit: float) -> tuple[_WalkStates, float]:
        """The states that can end within ``limit`` and that no other beats; and the seconds of the best end without copies.

        Of many, those are kept that would end first without further copies: if what has to move stays; if all waits until it is
        gone; or if it is gone at once.
        """
        forward, backward = sum(self._forward[unit:]), sum(self._backward[unit:])

        def late(states: _WalkStates) -> Floats:
            """Seconds by which the link falls behind all passes that are left, at least."""
            forwards: Floats = np.maximum(0, states.leaving / self._away - forward)
            backwards: Floats = np.maximum(0, states.coming / self._back - backward)
            return forwards + backwards

        states = states.where(states.seconds + forward + backward + late(states) <= limit * (1 + 1e-6))
        memory, forwards = self._chain.onward(unit)
        seconds = np.append(np.inf, forwards * 1e-9 + backward)
        least = np.inf
        for most in (4 * _STATES, _STATES):

            def ends(there: Floats, states: _WalkStates = states) -> Floats:
                found: Floats = states.seconds + seconds[np.searchsorted(memory, budget - there, side="right")]
                return found

            moving = states.leaving / self._away + states.coming / self._back
            stays, gone = ends(states.kept + np.maximum(states.leaving, states.coming)), ends(states.kept)
            least = min(least, stays.min(initial=np.inf), (gone + moving).min(initial=np.inf))
            if len(stays) > most:
                best = [np.lexsort((moving, estimate))[: most // 3] for estimate in (stays, gone + moving, gone + late(states))]
                states = states.where(np.unique(np.concatenate(best)))
            if most > _STATES:
                states = states.where(_unbeaten(states, 1e-4 * self._seconds * np.array([0, self._away, self._back])))
        return states, float(least)

    def _keeping(self, unit: int, before: _WalkStates, budget: float) -> Iterator[tuple[int, _WalkStates]]:
        """A forward that keeps all."""
        stage = self._stages[unit]
        own = stage.input_bytes + stage.kept_bytes
        forward = own + stage.keeping_bytes + stage.output_bytes
        backward = own + stage.gradient_bytes + stage.backward_bytes + self._left[unit]
        rows = np.flatnonzero(before.kept + max(forward, backward) <= budget)
        fitting = before.where(rows)
        leaving, waited = self._moved(fitting, fitting.leaving, forward, self._forward[unit], self._away, budget)
        coming, waited_again = self._moved(fitting, fitting.coming, backward, self._backward[unit], self._back, budget)
        seconds = fitting.seconds + waited + waited_again + self._forward[unit] + self._backward[unit]
        for goes in (False,) if stage.keeps else (False, True):
            origin = np.column_stack([np.full_like(rows, unit), rows, np.full_like(rows, goes), np.full_like(rows, -1)])
            yield (
                unit + 1,
                _WalkStates(fitting.kept + own * (not goes), leaving + own * goes, coming + own * goes, seconds, origin),
            )

    def _dropping(self, first: int, before: _WalkStates, budget: float) -> Iterator[tuple[int, _WalkStates]]:
        """A forward that keeps its input, with the units up to some other that keep nothing."""
        for goes in (False, True):
            given, states = self._stages[first].input_bytes, before
            rows = np.arange(len(before.kept))
            for last in range(first, len(self._stages) - 1):
                stage = self._stages[last]
                if stage.keeps:
                    break
                needed = stage.dropping_bytes + stage.input_bytes + stage.output_bytes + given * (last > first and not goes)
                fits = states.kept + needed <= budget
                states, rows = states.where(fits), rows[fits]
                leaving, waited = self._moved(states, states.leaving, needed, self._forward[last], self._away, budget)
                if last == first:
                    leaving = leaving + given * goes
                states = states._replace(leaving=leaving, seconds=states.seconds + waited + self._forward[last])
                again, chosen, memory = self._again(first, last, states, budget)
                origin = np.column_stack([np.full_like(chosen, first), rows[chosen], np.full_like(chosen, goes), memory])
                coming = again.coming + given * goes
                yield last + 1, again._replace(kept=again.kept + given * (not goes), coming=coming, origin=origin)

    def _again(
        self, first: int, last: int, states: _WalkStates, budget: float
    ) -> tuple[_WalkStates, NDArray[np.int64], NDArray[np.int64]]:
        """Backward of units that kept nothing, the fastest way of each state: the states, which they were, and its memory."""
        memory, forwards = self._chain.part(first, last)
        few = np.unique(np.linspace(0, len(memory) - 1, min(_WAYS, len(memory))).astype(np.int64))
        memory, passes = memory[few], forwards[few] * 1e-9 + sum(self._backward[first : last + 1])
        room = budget - self._left[last] - states.kept[:, None] - memory
        waits = np.maximum(0, states.coming[:, None] - room)
        seconds = np.where(room >= 0, passes + waits / self._back, np.inf)
        way = np.argmin(seconds, axis=1)
        chosen = np.flatnonzero(np.isfinite(seconds[np.arange(len(way)), way]))
        way, states = way[chosen], states.where(chosen)
        coming = np.maximum(0, states.coming - waits[chosen, way] - passes[way] * self._back)
        states = states._replace(coming=coming, seconds=states.seconds + seconds[chosen, way])
        return states, chosen, memory[way]

    def _moved(
        self, states: _WalkStates, moving: Floats, needed: int, seconds: float, rate: float, budget: float
    ) -> tuple[Floats, Floats]:
        """What is still to move after a pass beside it, and how long the pass waits for memory."""
        waits = np.maximum(0, states.kept + moving + needed - budget)
        return np.maximum(0, moving - waits - seconds * rate), waits / rate

    def _planned(self, decisions: dict[int, tuple[bool, int]]) -> tuple[UnitPlan, ...]:
        """Plans of all units, with each copy back as late as it can be."""
        found = [UnitPlan()] * self._first
        ends = [*sorted(decisions)[1:], len(self._stages)]
        for (first, (goes, memory)), end in zip(sorted(decisions.items()), ends, strict=True):
            kept = Route(HOST_MEMORY) if goes else Route()
            if memory < 0:
                found.append(UnitPlan(kept=kept))
                continue
            segment = [[Activations.RECOMPUTE], *([Activations.DROP] for _ in range(first + 1, end))]
            for forwards, more in zip(segment, self._chain.forwards((first, end - 1, memory))[first:end], strict=True):
                forwards += more
            found += [UnitPlan(forwards[0], again=tuple(forwards[1:-1])) for forwards in segment]
            found[self._first + first] = replace(found[self._first + first], kept=kept)
        return fetched_in_time(self._profile, found)


def _joined(states: Sequence[_WalkStates]) -> _WalkStates:
    if not states:
        none = np.zeros(0)
        return _WalkStates(none, none, none, none, np.zeros((0, 4), np.int64))
    return _WalkStates._make(np.concatenate(columns) for columns in zip(*states, strict=True))


def _unbeaten(states: _WalkStates, forgiven: Floats) -> NDArray[np.int64]:
    """The rows of states that no other beats, the fastest first.

    Args:
        forgiven: by how many bytes each size may be larger and still beat.
    """
    order = np.lexsort((states.kept, states.seconds))
    columns = np.stack(states[:3])[:, order]
    taken: list[int] = []
    left = np.arange(len(order))
    while len(left):
        best, left = left[0], left[1:]
        taken.append(int(best))
        left = left[(columns[:, left] < (columns[:, best] - forgiven)[:, None]).any(axis=0)]
    return order[taken]


def fetched_in_time(profile: Profile, units: Sequence[UnitPlan]) -> tuple[UnitPlan, ...]:
    """Let each copy back of kept values begin with the pass that leaves it just enough time, one copy after another."""
    ends: list[float] = [0.0]
    needed: dict[int, int] = {}
    for unit in reversed(range(profile.first_trained, len(units))):
        times = profile.units[unit]
        for again in recomputations(units)[unit]:
            needed.setdefault(again.unit, len(ends) - 1)
            each = profile.units[again.unit]
            ends.append(ends[-1] + (each.forward_seconds if again.hands_on else each.recompute_seconds))
        needed.setdefault(unit, len(ends) - 1)
        ends.append(ends[-1] + times.backward_seconds)
    found, start = list(units), float("inf")
    for unit in sorted((unit for unit in needed if units[unit].kept.leaves), key=lambda unit: -needed[unit]):
        times = profile.units[unit]
        size = times.activation_bytes if units[unit].activations is Activations.KEEP else times.input_bytes
        start = min(start, ends[needed[unit]]) - profile.h2d_seconds(size)
        ahead = max(0, needed[unit] - max(0, bisect_right(ends, start) - 1))
        found[unit] = replace(units[unit], kept=replace(units[unit].kept, ahead=ahead))
    return tuple(found)


SYSTEM = Pofo
