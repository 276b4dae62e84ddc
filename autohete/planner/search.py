"""Search from the program's optimum to the best plan. The program gives bounds, the judge gives time and memory.

The search starts where the program is best by its bounds and by estimates, walks downhill in all three integers with
decreasing step sizes, and spends the remaining effort on the choices with the lowest bounds. Bounds and judgements together
give the optimality gap of the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from autohete.errors import InfeasibleError
from autohete.hardware import Hardware
from autohete.plan.policy import Judgement, Verdict
from autohete.planner.budgets import Objective
from autohete.planner.plan_bounds import CountChoices
from autohete.planner.program import Program
from autohete.planner.steps import Counts
from autohete.quantities import format_bytes

#: A plan within this share of the lower bound needs no further search.
_PROVEN = 0.005
#: Number of judgements to spend. Small models, where they are cheap, get the second number divided by the number of blocks.
_EFFORT, _EFFORT_TIMES_BLOCKS = 45, 2200
#: Where to start and in which order to explore: shares of the way from the bound to the time with little overlap.
_PESSIMISM = (0.0, 0.1, 0.3, 1.0)
_USUAL_PESSIMISM = 0.3
#: Walks downhill, each from a different start.
_WALKS = 2
_STEPS = (8, 4, 2, 1)
_DIRECTIONS = np.array([step for step in product((-1, 0, 1), repeat=3) if any(step)])
#: How often the program is solved again with less memory when its plan exceeds the memory.
_TIGHTENINGS = 4


@dataclass(frozen=True, slots=True)
class BestCounts:
    """The best choice, its iteration time, and a lower bound for all choices."""

    counts: Counts
    seconds: float
    bound_seconds: float


def best_counts(program: Program, judge: Callable[[Counts], Judgement]) -> BestCounts | None:
    """The best plan of ``program`` according to ``judge``. None if no plan that fits was found."""
    relaxed = replace(program, pending=False)
    first = relaxed.solve()
    if first is None:
        return None
    search = _Search(relaxed, judge, first.value)
    search.seconds(first.counts)
    for start in _starts(program, search):
        if search.done:
            break
        search.seconds(start)
    # Equal times form one plateau. Starting from another point of it would explore the same neighbourhood again.
    plateaus = {search.seconds(counts): counts for counts in reversed(search.best_first())}
    for time in sorted(plateaus)[:_WALKS]:
        search.walk(plateaus[time])
    return search.finish()


def least_memory(
    program: Program, objective: Objective, measure: Callable[[Counts], float | None]
) -> tuple[float, Counts] | None:
    """The plan that needs the least of one memory within the others' budgets, by ``measure`` (None: it does not fit)."""
    ranking = replace(program, pending=False).ranked(objective)
    best: tuple[float, Counts] | None = None
    for place in range(min(len(ranking.choices), _effort(program))):
        if best is not None and best[0] <= ranking.values[place] * (1 + _PROVEN):
            break
        counts = ranking.choices[place]
        found = measure(counts)
        if found is not None and (best is None or found < best[0]):
            best = found, counts
    return best


def infeasible(memory: str, have: float, needed: float, hardware: Hardware) -> InfeasibleError:
    """Return an error that names the binding memory and the smallest size that works."""
    reserved = hardware.gpu.reserved_bytes if memory == "gpu" else 0
    beside = f" beside the {format_bytes(reserved)} that are reserved" if reserved > 1 else ""
    return InfeasibleError(
        f"no plan fits: {memory} memory for tensors is {format_bytes(have)}, short by {format_bytes(needed - have)}; "
        f"the smallest that works is {format_bytes(needed)} ({math.ceil(needed)} B){beside}",
        constraint=memory,
        capacity_bytes=round(have),
        needed_bytes=math.ceil(needed),
    )


def _effort(program: Program) -> int:
    return max(_EFFORT, _EFFORT_TIMES_BLOCKS // program.costs.count)


def _starts(program: Program, search: _Search) -> Iterator[Counts]:
    """The program's optima with pending memory, with smaller budgets while they do not fit; then what estimates favour."""
    tighter = program
    for _ in range(_TIGHTENINGS):
        solution = tighter.solve()
        if solution is None:
            break
        yield solution.counts
        found = search.judged[solution.counts]
        if found.verdict is Verdict.OK:
            break
        tighter = replace(tighter, budgets=tighter.budgets.tightened(program.budgets, found))
    for budget in (tighter, search.relaxed):
        choices = budget.fitting()
        if len(choices):
            lowest, highest = search.times.loads(choices), search.times.alone(choices)
            for share in _PESSIMISM:
                yield choices[int((lowest + share * np.maximum(highest - lowest, 0)).argmin())]


class _Search:
    """The choices judged so far, and the best of them.

    Args:
        relaxed: the program whose values are bounds.
        judge: time and memory of a choice.
        lowest: lower bound for all choices.
    """

    def __init__(self, relaxed: Program, judge: Callable[[Counts], Judgement], lowest: float) -> None:
        self.relaxed, self.judge, self.lowest = relaxed, judge, lowest
        self.times = relaxed.times
        self.effort = _effort(relaxed)
        self.judged: dict[Counts, Judgement] = {}
        self.best = np.inf

    @property
    def done(self) -> bool:
        """Whether the effort is spent, or no significant gain is possible."""
        return self.effort <= 0 or self.best <= self.lowest * (1 + _PROVEN)

    def seconds(self, counts: Counts) -> float:
        """Time of the choice's plan; infinite if it does not fit."""
        if counts not in self.judged:
            self.effort -= 1
            self.judged[counts] = self.judge(counts)
        found = self.judged[counts]
        if found.verdict is not Verdict.OK:
            return np.inf
        self.best = min(self.best, found.seconds)
        return found.seconds

    def best_first(self) -> list[Counts]:
        """The judged choices that fit, the fastest first."""
        return sorted((c for c, found in self.judged.items() if found.verdict is Verdict.OK), key=self.seconds)

    def walk(self, start: Counts) -> None:
        """Move to a faster choice as long as there is one nearby, at any step size."""
        here, time = start, self.seconds(start)
        for step in _STEPS:
            moved = True
            while moved:
                moved = False
                for counts in self.around(here, step, time):
                    if self.done:
                        return
                    if (found := self.seconds(counts)) < time:
                        here, time, moved = counts, found, True
                        break

    def around(self, counts: Counts, step: int, limit: float) -> list[Counts]:
        """Choices ``step`` away whose time could be below ``limit``, the most promising first."""
        units = self.relaxed.costs.count
        here = np.array([counts.checkpointed, counts.offloaded, counts.cpu_updated])
        places = np.unique(np.clip(here + step * _DIRECTIONS, 0, [units - 2, units - 2, units]), axis=0)
        choices = self.relaxed.within_budgets(CountChoices(*places.T))
        lowest = self.times.seconds(choices)
        estimates = lowest + _USUAL_PESSIMISM * np.maximum(self.times.alone(choices) - lowest, 0)
        return [choices[int(i)] for i in np.argsort(estimates, kind="stable") if lowest[i] < limit]

    def finish(self) -> BestCounts | None:
        """Spend the remaining effort on the choices with the lowest bounds."""
        ranking = self.relaxed.ranked(limit=self.best)
        for place in range(len(ranking.choices)):
            counts = ranking.choices[place]
            if counts not in self.judged:
                self.lowest = max(self.lowest, float(ranking.values[place]))
                if self.done or ranking.values[place] * (1 + _PROVEN) >= self.best:
                    break
                self.seconds(counts)
        else:
            self.lowest = max(self.lowest, self.best)
        found = self.best_first()
        return BestCounts(found[0], self.best, min(self.lowest, self.best)) if found else None
