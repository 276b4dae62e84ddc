"""Search from the program's optimum to the best plan. The program gives bounds, the judge gives time and memory.

The search starts where the program is best by its bounds and by estimates, walks downhill in all three integers with
decreasing step sizes, and spends the remaining effort on the choices with the lowest bounds. Bounds and judgements together
give the optimality gap of the answer.

A choice whose plan exceeds the memory, but is fast, is tried in other ways: with prefetches as late as possible, and with waits
for memory. Waits cost little time, so of a plan that exceeds the memory its time is an estimate of the time with them.

Where judgements are estimates, since an iteration has many micro-batches, the fastest plans are judged exactly in the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple, TypeVar

import numpy as np

from autohete.errors import InfeasibleError
from autohete.hardware import Hardware
from autohete.plan.policy import Judgement, Verdict
from autohete.planner.budgets import Objective
from autohete.planner.plan_bounds import CountChoices, Numbers
from autohete.planner.program import Program
from autohete.planner.steps import Counts
from autohete.quantities import format_bytes

T = TypeVar("T")

#: A plan within this share of the lower bound needs no further search.
_PROVEN = 0.005
#: Number of judgements to spend. Small models, where they are cheap, get the second number divided by the number of blocks.
#: Of several micro-batches, each takes as many times the work.
_EFFORT, _EFFORT_TIMES_BLOCKS, _LEAST_EFFORT = 45, 2200, 20
#: Estimates simulate five micro-batches: two, and three.
_MOST_SIMULATED = 5
#: The work of a judgement with waits for memory, in judgements without.
_WAITING = 6
#: Waits may even make a plan faster, by about this share.
_SOONER = 0.01
#: Estimates are exact to about this share, and so many of the plans within it are judged exactly.
_ESTIMATED, _CONFIRMED = 0.02, 2
#: Where to start and in which order to explore: shares of the way from the bound to the time with little overlap.
_PESSIMISM = (0.0, 0.1, 0.3, 1.0)
_USUAL_PESSIMISM = 0.3
#: Walks downhill, each from a different start.
_WALKS = 2
_STEPS = (8, 4, 2, 1)
_DIRECTIONS = np.array([step for step in product((-1, 0, 1), repeat=3) if any(step)])
#: Number of judgements to spend on the lowest bounds if they cannot become those of the answer.
_HOPELESS = 12
#: Number of numbers of blocks updated by the CPU that are tried after the walks.
_OTHERS = 8
#: How often the program is solved again with less memory when its plan exceeds the memory.
_TIGHTENINGS = 4


class Way(NamedTuple):
    """How the plan of a choice fetches.

    Args:
        tuned: prefetches start as early as memory surely allows. Otherwise each overlaps the pass before its own.
        waits: what allocates memory waits until there is some.
    """

    tuned: bool = True
    waits: bool = False


#: The ways that are tried if the usual one exceeds the memory, each right after that without waits.
_OTHER_WAYS = (Way(tuned=False), Way(tuned=False, waits=True), Way(waits=True))
USUAL = Way()


@dataclass(frozen=True, slots=True)
class BestCounts:
    """The best choice and the way of its plan, its iteration time, and a lower bound for all choices."""

    counts: Counts
    way: Way
    seconds: float
    bound_seconds: float


#: Time and memory of the plan of a choice, made in one way.
CountsJudge = Callable[[Counts, Way], Judgement]


def best_counts(program: Program, estimate: CountsJudge, judge: CountsJudge) -> BestCounts | None:
    """The best plan of ``program``. None if no plan that fits was found.

    Args:
        program: the choices and their bounds.
        estimate: guides the search; may be ``judge``.
        judge: decides in the end.
    """
    relaxed = replace(program, pending=False)
    first = relaxed.solve()
    if first is None:
        return None
    search = _Search(relaxed, estimate, first.value)
    search.seconds(first.counts)
    for start in _starts(program, search):
        if search.done:
            break
        search.seconds(start)
    # Equal times form one plateau. Starting from another point of it would explore the same neighbourhood again.
    plateaus = {search.seconds(counts): counts for counts in reversed(search.best_first())}
    for time in sorted(plateaus)[:_WALKS]:
        search.walk(plateaus[time])
    before = search.best
    for counts in search.others():
        if search.done:
            break
        search.seconds(counts)
    if search.best < before:
        search.walk(search.best_first()[0])
    search.finish()
    return search.confirmed(judge)


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


def infeasible(memory: str, have: float, needed: float, hardware: Hardware, *, proven: bool) -> InfeasibleError:
    """Return an error that names the binding memory and the smallest size that is known to work.

    Args:
        memory: the binding one.
        have, needed: its bytes, and the smallest number of bytes with which a plan was found.
        hardware: what it belongs to.
        proven: no plan can fit. Otherwise one may that the search has not come across.
    """
    verdict = "no plan fits" if proven else "the search gave up, although a plan may fit"
    reserved = hardware.gpu.reserved_bytes if memory == "gpu" else 0
    beside = f" beside the {format_bytes(reserved)} that are reserved" if reserved > 1 else ""
    return InfeasibleError(
        f"{verdict}: {memory} memory for tensors is {format_bytes(have)}, short by {format_bytes(needed - have)}; "
        f"the smallest that works is {format_bytes(needed)} ({math.ceil(needed)} B){beside}",
        constraint=memory,
        capacity_bytes=round(have),
        needed_bytes=math.ceil(needed),
        proven=proven,
    )


def simulated_micro_batches(micro_batches: int) -> int:
    """How many micro-batches are simulated to judge or estimate an iteration."""
    return min(micro_batches, _MOST_SIMULATED)


def _effort(program: Program, micro_batches: int = 1) -> int:
    blocks = program.costs.count
    return max(max(_EFFORT, _EFFORT_TIMES_BLOCKS // blocks) // micro_batches, min(_LEAST_EFFORT, _EFFORT))


def _starts(program: Program, search: _Search) -> Iterator[Counts]:
    """The program's optima with pending memory, with smaller budgets while they do not fit; then what estimates favour."""
    tighter = program
    for _ in range(_TIGHTENINGS):
        solution = tighter.solve()
        if solution is None:
            break
        yield solution.counts
        found = search.judged[solution.counts][USUAL]
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
        judge: time and memory of the plan of a choice.
        lowest: lower bound for all choices.
    """

    def __init__(self, relaxed: Program, judge: CountsJudge, lowest: float) -> None:
        self.relaxed, self.judge, self.lowest = relaxed, judge, lowest
        self.times = relaxed.times
        self.effort = _effort(relaxed, simulated_micro_batches(relaxed.costs.micro_batches))
        #: For plans made in other ways than the usual one.
        self.other_effort = self.effort // 2
        self.judged: dict[Counts, dict[Way, Judgement]] = {}
        self.best = np.inf

    @property
    def done(self) -> bool:
        """Whether the effort is spent, or no significant gain is possible."""
        return self.effort <= 0 or self.best <= self.lowest * (1 + _PROVEN)

    def seconds(self, counts: Counts) -> float:
        """Time of the choice's fastest plan; infinite if none fits."""
        if counts not in self.judged:
            self._judge(counts)
        return min((found.seconds for found in self.judged[counts].values() if found.verdict is Verdict.OK), default=np.inf)

    def _judge(self, counts: Counts) -> None:
        """Judge the usual plan of a choice. If it exceeds the memory and is faster than the best, judge others, too."""
        found = self.judged[counts] = {USUAL: self.judge(counts, USUAL)}
        self.effort -= 1
        for way in _OTHER_WAYS:
            *_, last = found.values()
            if last.verdict is Verdict.OK or last.seconds >= self.best * (1 + _SOONER) or self.other_effort <= 0:
                break
            found[way] = self.judge(counts, way)
            self.other_effort -= _WAITING if way.waits else 1
        self.best = min(self.best, self.seconds(counts))

    def best_first(self) -> list[Counts]:
        """The judged choices that fit, the fastest first."""
        return sorted((counts for counts in self.judged if self.seconds(counts) < np.inf), key=self.seconds)

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

    def others(self) -> list[Counts]:
        """For some numbers of blocks that the CPU updates, the most promising choice. A walk rarely leaves its own number:
        the best choices of the next one may be far away in the other two integers.
        """
        choices = self.relaxed.ranked(limit=self.best).choices
        estimates = self._estimates(choices)
        _, first = np.unique(choices.cpu_updated[np.argsort(estimates, kind="stable")], return_index=True)
        order = np.argsort(estimates, kind="stable")[np.sort(first)]
        return [choices[int(i)] for i in order[:_OTHERS]]

    def _estimates(self, choices: CountChoices) -> Numbers:
        lowest = self.times.seconds(choices)
        return np.asarray(lowest + _USUAL_PESSIMISM * np.maximum(self.times.alone(choices) - lowest, 0))

    def around(self, counts: Counts, step: int, limit: float) -> list[Counts]:
        """Choices ``step`` away whose time could be below ``limit``, the most promising first."""
        units = self.relaxed.costs.count
        here = np.array([counts.checkpointed, counts.offloaded, counts.cpu_updated])
        places = np.unique(np.clip(here + step * _DIRECTIONS, 0, [units - 2, units - 2, units]), axis=0)
        choices = self.relaxed.within_budgets(CountChoices(*places.T))
        choices = choices.take(self.times.seconds(choices) < limit)
        return [choices[int(i)] for i in np.argsort(self._estimates(choices), kind="stable")]

    def finish(self) -> None:
        """Spend the remaining effort on the choices with the lowest bounds.

        The bound rises to that of the first choice of which a plan might be faster than what was judged.
        """
        ranking, rising = self.relaxed.ranked(limit=self.best), True
        if np.count_nonzero(ranking.values * (1 + _PROVEN) < self.best) > len(self.judged) + self.effort:
            self.effort = min(self.effort, _HOPELESS)  # too many to settle them all
        for place in range(len(ranking.choices)):
            counts, value = ranking.choices[place], float(ranking.values[place])
            if self._is_settled(counts):
                continue
            if rising:
                self.lowest = max(self.lowest, value)
            if self.done or value * (1 + _PROVEN) >= self.best:
                return
            self.seconds(counts)
            rising = rising and self._is_settled(counts)
        if rising:
            self.lowest = max(self.lowest, self.best)

    def _is_settled(self, counts: Counts) -> bool:
        """Whether no plan of the choice can be faster than those that were judged."""
        found = self.judged.get(counts, {})
        exact = all(one.exact for one in found.values())
        return exact and (len(found) == 1 + len(_OTHER_WAYS) or any(one.verdict is Verdict.OK for one in found.values()))

    def confirmed(self, judge: CountsJudge) -> BestCounts | None:
        """The fastest plan by ``judge``. None if none fits."""
        plans = {(counts, way): one for counts, found in self.judged.items() for way, one in found.items()}
        best = fastest(plans, lambda plan: judge(*plan))
        if best is None:
            return None
        seconds = judge(*best).seconds
        return BestCounts(*best, seconds, min(self.lowest, seconds))


def fastest(judged: Mapping[T, Judgement], judge: Callable[[T], Judgement]) -> T | None:
    """The fastest of some plans that fits, the first of equals. None if none fits.

    Args:
        judged: their judgements, or estimates.
        judge: decides between those that are fast by estimates.
    """
    best: tuple[float, T] | None = None
    order = sorted(
        (plan for plan, found in judged.items() if found.verdict is Verdict.OK), key=lambda plan: judged[plan].seconds
    )
    for place, plan in enumerate(order):
        found = judged[plan]
        if best is not None and (found.exact or place >= _CONFIRMED or found.seconds > best[0] * (1 + _ESTIMATED)):
            break
        if not found.exact:
            found = judge(plan)
        if found.verdict is Verdict.OK and (best is None or found.seconds < best[0]):
            best = found.seconds, plan
    return None if best is None else best[1]
