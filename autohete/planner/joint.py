"""From the relaxation of a joint problem to its best plan: the rows know bounds, the judge knows time and memory.

The search starts where the relaxation is best by its bounds and by estimates, and where other systems are, and then goes on to
faster assignments around the best: so many units as help take another choice together, and where memory then does not suffice,
others give way. The rows say which of these are worth a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autohete.plan import UnitPlan
from autohete.planner.choices import Assignment, Choices
from autohete.planner.relaxation import Places, Relaxation, Values, as_assignment
from autohete.planner.rows import Numbers
from autohete.policy import Judgement, Verdict

#: A plan this close to what no other can beat needs no further search.
_PROVEN = 0.002
#: Judgements to spend: so many, and in small models, where they are cheap, so many divided by the number of units.
_EFFORT, _EFFORT_TIMES_UNITS = 70, 2200
#: Where to start: shares of the estimated stalls, and how often with less memory when a start needs more than there is.
_STALLS = (0.0, 0.3, 1.0)
_TIGHTENINGS = 3
#: Share of the stalls by which assignments around another are ranked.
_USUAL_STALLS = 0.3
#: How many units change at a time.
_STEPS = (8, 4, 2, 1)
#: Rows of seconds, and of bytes, that are looked at when changes are chosen.
_NEAR = 24


@dataclass(frozen=True, slots=True)
class Found:
    """The best assignment, and its iteration time."""

    assignment: Assignment
    seconds: float


class JointSearch:
    """A search for the fastest assignment that fits.

    Args:
        relaxed: the problem; its rows are bounds.
        judge: time and memory of an assignment.
        bound_seconds: what no assignment goes below.
    """

    def __init__(self, relaxed: Relaxation, judge: Callable[[Assignment], Judgement], bound_seconds: float) -> None:
        self._relaxed, self._judge, self._bound = relaxed, judge, bound_seconds
        self._effort = max(_EFFORT, _EFFORT_TIMES_UNITS // len(relaxed.choices.others))
        self._judged: dict[Assignment, Judgement] = {}
        self._limit = np.inf

    def run(self, starts: Iterable[Assignment]) -> Found | None:
        """The best that is found, beginning with ``starts``; None if nothing fits."""
        for start in starts:
            self._seconds(start)
        for stalls in _STALLS:
            self._start(stalls)
        fitting = self._fitting()
        if not fitting:
            return None
        self._walk(fitting[0])
        best = self._fitting()[0]
        return Found(best, self._seconds(best))

    def _fitting(self) -> list[Assignment]:
        return sorted((one for one, found in self._judged.items() if found.verdict is Verdict.OK), key=self._seconds)

    @property
    def _done(self) -> bool:
        return self._effort <= 0 or self._limit <= self._bound * (1 + _PROVEN)

    def _seconds(self, assignment: Assignment) -> float:
        """Time of a plan that fits; infinite if it does not."""
        if assignment not in self._judged:
            self._effort -= 1
            self._judged[assignment] = self._judge(assignment)
        found = self._judged[assignment]
        if found.verdict is not Verdict.OK:
            return np.inf
        self._limit = min(self._limit, found.seconds)
        return found.seconds

    def _start(self, stalls: float) -> None:
        """The optimum with pending memory, asked for less while too much is used."""
        problem = replace(self._relaxed, stalls=stalls, pending=True)
        for _ in range(_TIGHTENINGS):
            assignment = None if self._done else problem.assignment()
            if assignment is None:
                return
            if self._seconds(assignment) < np.inf:
                return
            found = self._judged[assignment]
            problem = replace(
                problem,
                gpu_budget_bytes=problem.gpu_budget_bytes - max(0, found.gpu_peak_bytes - self._relaxed.gpu_budget_bytes),
                host_budget_bytes=problem.host_budget_bytes - max(0, found.host_peak_bytes - self._relaxed.host_budget_bytes),
            )

    def _walk(self, start: Assignment) -> None:
        """Go on to a faster assignment as long as there is one around."""
        here, time = start, self._seconds(start)
        moved = True
        while moved:
            moved = False
            for assignment in self._around(here, time):
                if self._done:
                    return
                if (found := self._seconds(assignment)) < time:
                    here, time, moved = assignment, found, True
                    break

    def _around(self, here: Assignment, limit: float) -> list[Assignment]:
        """Assignments around ``here`` that could take less than ``limit``, the most promising first."""
        lowest = self._relaxed.values()
        usual = replace(self._relaxed, stalls=_USUAL_STALLS).values()
        near = Neighbourhood(self._relaxed.choices, usual, here)
        ranked: dict[Assignment, float] = {}
        for assignment in near.moves():
            if assignment in self._judged or assignment in ranked:
                continue
            rows = lowest.of(assignment)
            if lowest.fits(rows) and lowest.seconds(rows) < limit:
                ranked[assignment] = usual.value(usual.of(assignment))
        return sorted(ranked, key=lambda assignment: ranked[assignment])


class Neighbourhood:
    """What is around an assignment: some units take another choice together.

    Args:
        choices: of each unit.
        values: what makes one better than another.
        here: the assignment.
    """

    def __init__(self, choices: Choices, values: Values, here: Assignment) -> None:
        self._here = np.array(here)
        self._values = values.near(values.of(here), _NEAR)
        self._rows = self._values.of(here)
        self._targets = [*_targets(choices)]

    def moves(self) -> Iterator[Assignment]:
        """Each kind of change, of one unit and of several."""
        for half, target in self._targets:
            yield from self._towards(half, target)

    def _towards(self, half: int, target: Places) -> Iterator[Assignment]:
        """Units that take the choice ``target[unit, choice]`` of theirs, best first; others give way if memory asks for it."""
        here, rows = self._here.copy(), self._rows
        changed = np.zeros(len(here), bool)
        units = np.arange(len(here))
        for count in range(1, max(_STEPS) + 1):
            wanted = target[units, here[:, half]]
            open_ = (wanted >= 0) & (wanted != here[:, half]) & ~changed
            if not open_.any():
                return
            values = self._values.to(here, rows, half, np.where(open_, wanted, here[:, half]))
            unit = int(np.where(open_, values, np.inf).argmin())
            changed[unit] = True
            rows = self._values.after(here, rows, unit, half, int(wanted[unit]))
            here[unit, half] = wanted[unit]
            if count in _STEPS:
                yield self._repaired(here, rows, changed)

    def _repaired(self, here: Places, rows: Numbers, changed: NDArray[np.bool_]) -> Assignment:
        """The same, but units that were not ``changed`` give way until memory suffices."""
        here = here.copy()
        for _ in range(2 * int(changed.sum()) + 2):
            if self._values.fits(rows):
                break
            unit, half, choice = self._values.best(here, rows, ~changed)
            if here[unit, half] == choice:
                break
            rows = self._values.after(here, rows, unit, half, choice)
            here[unit, half] = choice
        return as_assignment(here)


def _targets(choices: Choices) -> Iterator[tuple[int, Places]]:
    """For each half and each way in which a unit can be there: from which choice to which, -1 for none."""
    for half, every in enumerate((choices.activations, choices.others)):
        ways = _WAYS[half]
        for way in ways:
            for value in dict.fromkeys(way(one) for some in every for one in some):
                table = np.full((len(every), max(map(len, every))), -1)
                for unit, some in enumerate(every):
                    places = {tuple(other(one) for other in ways): place for place, one in enumerate(some)}
                    for place, one in enumerate(some):
                        table[unit, place] = places.get(tuple(value if w is way else w(one) for w in ways), -1)
                yield half, table


def _activations(one: UnitPlan) -> Hashable:
    return one.activations, one.kept.home


def _parameters(one: UnitPlan) -> Hashable:
    return one.parameters


def _update(one: UnitPlan) -> Hashable:
    return one.update_on, one.states.home, one.accumulate_on


#: What of a choice of each half changes by itself.
_WAYS: tuple[tuple[Callable[[UnitPlan], Hashable], ...], ...] = ((_activations,), (_parameters, _update))
