"""Search from the relaxation of a joint problem to its best plan. Rows give bounds, the judge gives time and memory.

The search starts from the optima of the relaxation, by its bounds and by estimates, and from the plans of other systems. From
the best of these it applies small random changes to some units and accepts any change that is not slower: among many
assignments of equal time, some have faster neighbours. Assignments that the rows rule out are not simulated. The random
numbers are reproducible: the same input draws the same ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autohete.plan import UnitPlan
from autohete.plan.policy import Judgement, Verdict
from autohete.planner.budgets import Objective
from autohete.planner.choices import Assignment, Choices
from autohete.planner.relaxation import Places, Relaxation, Values, as_assignment
from autohete.planner.search import simulated_micro_batches

#: A plan within this share of the lower bound needs no further search.
_PROVEN = 0.002
#: Judgements per walk: fewer for more units, since each takes time proportional to their number, and a walk has to end within
#: seconds.
_EFFORT_TIMES_SQUARE, _LEAST_EFFORT, _MOST_EFFORT = 100_000, 10, 100
#: The same of a walk that has to be quick.
_QUICK_EFFORT = 6
#: A walk ends after this many judgements without a gain of more than this share.
_PATIENCE, _GAIN = 40, 0.0005
#: Maximum number of changes drawn per judgement when the rows rule most of them out.
_DRAWS = 40
#: Number of the best plans that are judged exactly where times are estimates.
_FEW_BEST = 2
#: Up to this many assignments, all are ranked, and so many of the best are judged.
_FEW, _RANKED = 3000, 80
#: Starting points: shares of the estimated stalls, of which only the first ones are tried where a judgement takes as much work
#: as more than so many units; and the number of plans to spend on each share while they exceed the memory.
_STALLS, _FEWER_STALLS, _LARGE = (1.5, 1.0, 0.3, 0.6), 2, 64
_TRIES, _TIGHTENINGS = 3, 6
#: Share of the stalls that is assumed while units are changed to save memory.
_USUAL_STALLS = 0.3
#: A change may be slower by this share.
_SLACK = 0.002
#: How many units change at once.
_TOGETHER = (1, 1, 2, 4)
_RUN = (1, 1, 2, 4, 8)
#: Number of rows of seconds, and of bytes, evaluated while units are changed to save memory.
_NEAR = 24


@dataclass(frozen=True, slots=True)
class BestAssignment:
    """The best assignment, and its iteration time."""

    assignment: Assignment
    seconds: float


class JointSearch:
    """A search for the fastest assignment that fits.

    Args:
        relaxed: the problem; its rows are bounds.
        judge: time and memory of an assignment.
        bound_seconds: lower bound for all assignments.
        micro_batches: of an iteration; judging more of them takes more work.
        quick: spend the least effort.
    """

    def __init__(
        self,
        relaxed: Relaxation,
        judge: Callable[[Assignment], Judgement],
        bound_seconds: float,
        micro_batches: int = 1,
        *,
        quick: bool = False,
    ) -> None:
        self._relaxed, self._judge, self._bound = relaxed, judge, bound_seconds
        units = len(relaxed.choices.others)
        self._effort = _QUICK_EFFORT if quick else min(max(_EFFORT_TIMES_SQUARE // units**2, _LEAST_EFFORT), _MOST_EFFORT)
        is_large = quick or units * simulated_micro_batches(micro_batches) > _LARGE
        self._stalls = _STALLS[:_FEWER_STALLS] if is_large else _STALLS
        self._judged: dict[Assignment, Judgement] = {}
        self.best: BestAssignment | None = None

    @property
    def seconds(self) -> float:
        """Time of the best plan so far; infinite if none fits yet."""
        return np.inf if self.best is None else self.best.seconds

    def best_few(self) -> list[Assignment]:
        """The best assignment; where times are estimates, some of the best."""
        fitting = {one: found for one, found in self._judged.items() if found.verdict is Verdict.OK}
        order = sorted(fitting, key=lambda one: fitting[one].seconds)
        return order[: 1 if all(found.exact for found in fitting.values()) else _FEW_BEST]

    def try_(self, assignment: Assignment) -> None:
        """Judge an assignment as a possible start of the search."""
        self._seconds(assignment)

    def start(self, *others: Relaxation, below: float = math.inf) -> None:
        """Judge the optima of the relaxation and of ``others``, which have fewer choices. If none fits, judge the one that uses
        the least GPU memory.

        Args:
            others: the same problem with fewer choices.
            below: seconds of a known plan; what takes as long is not changed to make it fit.
        """
        for problem in (*others, self._relaxed):
            taken: set[int] = set()
            for stalls in self._stalls:
                self._start(replace(problem, stalls=stalls, pending=True), taken, below)
        if self.best is None and below == math.inf:
            frugal = replace(self._relaxed, objective=Objective.GPU_BYTES).assignment()
            if frugal is not None:
                self._seconds(frugal)

    def go_on(self) -> None:
        """Walk from the best assignment so far until the effort is spent or no significant gain is possible.

        If there are few assignments, rank all of them instead.
        """
        if math.prod(map(len, (*self._relaxed.choices.activations, *self._relaxed.choices.others))) <= _FEW:
            self._rank_all()
        elif self._judged:
            self._walk()

    def _rank_all(self) -> None:
        choices, lowest = self._relaxed.choices, self._relaxed.values()
        usual = replace(self._relaxed, stalls=_USUAL_STALLS).values()
        pairs = [product(range(len(a)), range(len(o))) for a, o in zip(choices.activations, choices.others, strict=True)]
        ranked = []
        for assignment in product(*pairs):
            rows = lowest.of(assignment)
            if lowest.fits(rows):
                ranked.append((usual.value(usual.of(assignment)), lowest.seconds(rows), assignment))
        effort = _RANKED
        for _, bound, assignment in sorted(ranked):
            if self._done or not effort:
                return
            if assignment not in self._judged and (self.best is None or bound < self.best.seconds):
                self._seconds(assignment)
                effort -= 1

    def _walk(self) -> None:
        drawn = Changes(self._relaxed.choices)
        here = min(self._judged, key=self._score)
        values, last, patience = self._values_near(here), self._score(here), _PATIENCE
        for _ in range(self._effort):
            if self._done or not patience:
                return
            limit = self._score(here)[1] * (1 + _SLACK)
            found = next((one for one in drawn.around(here, _DRAWS, values) if self._may_help(one, values, limit)), None)
            if found is None:
                return
            self._seconds(found)
            excess, seconds = self._score(found)
            if excess < self._score(here)[0] or (excess == self._score(here)[0] and seconds <= limit):
                here, values = found, self._values_near(found)
            patience -= 1
            if (excess, seconds) < (last[0], last[1] * (1 - _GAIN)):
                last, patience = (excess, seconds), _PATIENCE

    def _values_near(self, assignment: Assignment) -> Values:
        """Values for assignments near a judged one, with budgets adjusted by its simulated memory excess."""
        budgets, lowest = self._relaxed.budgets, self._relaxed.bytes_of(assignment)
        budgets = budgets.tightened(lowest, self._judged[assignment])
        return replace(self._relaxed, stalls=_USUAL_STALLS, budgets=budgets).values()

    def _score(self, assignment: Assignment) -> tuple[float, float]:
        """The relative excess over a memory budget, then the time."""
        found = self._judged[assignment]
        excess = self._relaxed.budgets.excess(found)
        return excess, found.seconds if not excess else np.inf

    def _may_help(self, assignment: Assignment, values: Values, limit: float) -> bool:
        return (
            assignment not in self._judged
            and values.fits(values.of(assignment))
            and float(self._relaxed.model.seconds.of(assignment).max()) <= limit
        )

    @property
    def _done(self) -> bool:
        return self.best is not None and self.best.seconds <= self._bound * (1 + _PROVEN)

    def _seconds(self, assignment: Assignment) -> float:
        """Time of the assignment's plan; infinite if it does not fit."""
        if assignment not in self._judged:
            self._judged[assignment] = self._judge(assignment)
        found = self._judged[assignment]
        if found.verdict is not Verdict.OK:
            return np.inf
        if self.best is None or found.seconds < self.best.seconds:
            self.best = BestAssignment(assignment, found.seconds)
        return found.seconds

    def _start(self, problem: Relaxation, taken: set[int], below: float) -> None:
        """Judge the optimum with pending memory. While it is promising but exceeds the memory, change units to save memory."""
        found = None if self._done else problem.assignment(taken)
        most = len(self._judged) + _TRIES
        for _ in range(_TIGHTENINGS):
            # Translate to the full set of choices.
            here = None if found is None else self._relaxed.choices.assignment(problem.choices.units(found))
            if found is None or here is None or self._seconds(here) < np.inf or len(self._judged) == most:
                return
            used = self._judged[here]
            if used.seconds >= min(self.seconds, below):
                return
            problem = replace(problem, budgets=problem.budgets.tightened(self._relaxed.budgets, used))
            found = problem.improved(found)


class Changes:
    """Random changes of an assignment, drawn from one fixed sequence.

    Args:
        choices: the available choices of every unit.
    """

    def __init__(self, choices: Choices) -> None:
        self._random = random.Random(0)
        self._targets = list(_targets(choices))
        #: Number of choices of each unit; choices that only some units have come last.
        self._counts = np.array([(len(a), len(o)) for a, o in zip(choices.activations, choices.others, strict=True)])

    def around(self, assignment: Assignment, count: int, values: Values) -> Iterator[Assignment]:
        """Yield ``count`` changes: units are swapped, made equal, or switched; other units give way where memory requires it.

        Args:
            assignment: the assignment to change.
            count: number of changes.
            values: decides how units give way.
        """
        for _ in range(count):
            here, changed = np.array(assignment), np.zeros(len(assignment), bool)
            self._random.choice((self._swap, self._run, self._turn, self._turn))(here, changed)
            yield _repaired(values, here, changed)

    def _swap(self, here: Places, changed: NDArray[np.bool_]) -> None:
        """Swap two units between embedding and head."""
        if len(here) < 4:
            return
        two = self._random.sample(range(1, len(here) - 1), 2)
        if (here[two[::-1]] < self._counts[two]).all():
            here[two], changed[two] = here[two[::-1]], True

    def _run(self, here: Places, changed: NDArray[np.bool_]) -> None:
        """Copy the choices of one unit to the units above or below it."""
        unit, length = self._random.randrange(1, len(here) - 1), self._random.choice(_RUN)
        others = range(unit + 1, unit + length + 1) if self._random.random() < 0.5 else range(unit - length, unit)
        for other in others:
            if 0 < other < len(here) - 1 and (here[unit] < self._counts[other]).all():
                here[other], changed[other] = here[unit], True

    def _turn(self, here: Places, changed: NDArray[np.bool_]) -> None:
        """Switch one decision of some units to another option; or do so for two decisions."""
        for _ in range(self._random.choice((1, 1, 2))):
            half, to = self._random.choice(self._targets)
            now = here[:, half]
            wanted = to[np.arange(len(here)), now]
            able = np.flatnonzero((wanted >= 0) & (wanted != now)).tolist()
            for unit in self._random.sample(able, min(self._random.choice(_TOGETHER), len(able))):
                here[unit, half], changed[unit] = wanted[unit], True


def _repaired(values: Values, here: Places, changed: NDArray[np.bool_]) -> Assignment:
    """Change units that are not in ``changed`` until memory suffices."""
    if values.fits(values.of(here)):
        return as_assignment(here)
    values = values.near(values.of(here), _NEAR)
    rows = values.of(here)
    for _ in range(2 * int(changed.sum()) + 2):
        unit, half, choice = values.best(here, rows, ~changed)
        if values.fits(rows) or here[unit, half] == choice:
            break
        rows = values.after(here, rows, unit, half, choice)
        here[unit, half] = choice
    return as_assignment(here)


def _targets(choices: Choices) -> Iterator[tuple[int, Places]]:
    """For each half and each option of a decision: a table from old choice to new choice, -1 if there is none."""
    for half, every in enumerate((choices.activations, choices.others)):
        ways = _WAYS[half]
        if any(one.zero_stage for some in every for one in some):
            ways = (*ways, _stage)
        for way in ways:
            for value in dict.fromkeys(way(one) for some in every for one in some):
                table = np.full((len(every), max(map(len, every))), -1)
                for unit, some in enumerate(every):
                    places = {tuple(other(one) for other in ways): place for place, one in enumerate(some)}
                    for place, one in enumerate(some):
                        table[unit, place] = places.get(tuple(value if w is way else w(one) for w in ways), -1)
                yield half, table


def _activations(one: UnitPlan) -> Hashable:
    return one.activations, one.kept.home, one.saved


def _parameters(one: UnitPlan) -> Hashable:
    return one.parameters


def _update(one: UnitPlan) -> Hashable:
    return one.update.on, one.states.home, one.gradients.home


def _stage(one: UnitPlan) -> Hashable:
    return one.zero_stage


#: The decisions within each half that change independently, beside what several GPUs share.
_WAYS: tuple[tuple[Callable[[UnitPlan], Hashable], ...], ...] = ((_activations,), (_parameters, _update))
