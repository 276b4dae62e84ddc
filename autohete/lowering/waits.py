"""Dependencies between tasks by number: who added them, which are redundant, and an order that satisfies them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from autohete.errors import InputError, RuleError
from autohete.schedule import TaskId

#: Earlier than any iteration that a task may have waited for.
NEVER = -(2**40)


class Turn(Protocol):
    """Position of a task in the issue order.

    Attributes:
        place: index of a pass among the passes; -1 for other tasks.
        follows: index of the pass after which the task was declared, or of the pass itself.
        phase: order among tasks that follow the same pass: 0 for what passes need and leave, 1 for the optimizer's step, 2 for
            what copies its result back.
    """

    @property
    def place(self) -> int: ...
    @property
    def follows(self) -> int: ...
    @property
    def phase(self) -> int: ...


class Waits:
    """The waits of the tasks of an iteration, in declaration order; each is for a task and a number of iterations back.

    Attributes:
        author: who adds waits now: 0 for data, otherwise a rule by its index counted from 1.
        issues_early: whether a task is issued before it is declared.
    """

    def __init__(self) -> None:
        self.author, self.issues_early = 0, False
        #: For some tasks, a task that is issued before them.
        self._issued_before: dict[int, int] = {}
        #: For each task, its waits within the iteration with the first author; and those on the previous iteration, if any.
        self._same: list[dict[int, int]] = []
        self._previous: defaultdict[int, dict[int, int]] = defaultdict(dict)
        #: For each task, the non-redundant waits as bits; set by :meth:`reduce`.
        self._needed_same: list[int] = []
        self._needed_previous: list[int] = []

    def add_task(self) -> None:
        """Add a task without waits."""
        self._same.append({})

    def add(self, task: int, before: int, back: int) -> None:
        """Make ``task`` wait for ``before``, ``back`` iterations back."""
        (self._previous if back else self._same)[task].setdefault(before, self.author)

    def issue(self, task: int, before: int) -> None:
        """Issue ``task`` later than ``before``. No wait is needed, because both are on one fifo lane."""
        self._issued_before[task] = before

    def of(self, task: int) -> list[tuple[int, int]]:
        """The waits of ``task``, as (task, iterations back)."""
        return [*((before, 0) for before in self._same[task]), *((before, 1) for before in self._previous.get(task, ()))]

    def needed(self, task: int) -> list[tuple[int, int]]:
        """The same, without redundant waits."""
        same, previous = self._needed_same[task], self._needed_previous[task]
        found = [(before, 0) for before in self._same[task] if same >> before & 1]
        if previous:
            found += [(before, 1) for before in self._previous[task] if previous >> before & 1]
        found.sort()
        return found

    def order(self, turns: Sequence[Turn]) -> list[int]:
        """Return all tasks, each after those of its iteration that it waits for.

        Candidates are sorted by the pass they have to follow, as data and rules say; then by phase; then by declaration.

        Args:
            turns: the position of each task.

        Raises:
            CycleError: tasks wait for each other.
        """
        declared = not self.issues_early and all(u <= task for task, u in self._issued_before.items())
        if declared and not any(same and max(same) > task for task, same in enumerate(self._same)):
            return list(range(len(self._same)))
        before = [[*same] for same in self._same]
        for task, u in self._issued_before.items():
            if u not in before[task]:
                before[task].append(u)
        followers: list[list[int]] = [[] for _ in before]
        missing = [len(some) for some in before]
        for task, some in enumerate(before):
            for u in some:
                followers[u].append(task)
        #: The last pass that each task has to follow, as far as known.
        passed = [turn.follows for turn in turns]
        ready = [(passed[task], turns[task].phase, task) for task, count in enumerate(missing) if not count]
        heapify(ready)
        found = []
        while ready:
            _, _, task = heappop(ready)
            found.append(task)
            here = max(passed[task], turns[task].place)
            for follower in followers[task]:
                passed[follower] = max(passed[follower], here)
                missing[follower] -= 1
                if not missing[follower]:
                    heappush(ready, (passed[follower], turns[follower].phase, follower))
        if len(found) < len(before):
            raise CycleError(self._cycle(before, missing))
        return found

    def _cycle(self, before: list[list[int]], missing: list[int]) -> list[tuple[int, int, int]]:
        """(task, what it waits for, author) around a cycle. The cycle is among the tasks with unmet waits."""
        task = next(task for task, count in enumerate(missing) if count)
        way = [task]
        while True:
            task = next(u for u in before[task] if missing[u])
            if task in way:
                way = [*way[way.index(task) :], task]
                return [(a, b, self._same[a].get(b, 0)) for a, b in zip(way, way[1:], strict=False)]
            way.append(task)

    def reduce(self, order: Sequence[int]) -> None:
        """Find the waits that do not follow from others. Sets of tasks are the bits of integers.

        Args:
            order: the result of :meth:`order`.
        """
        bits = [1 << task for task in range(len(self._same))]
        #: Tasks that have ended when a task begins, of this iteration and of the previous one.
        now, then = [0] * len(bits), [0] * len(bits)
        self._needed_same, self._needed_previous = [0] * len(bits), [0] * len(bits)
        for task in order:
            through = to = 0
            for before in self._same[task]:
                through |= now[before]
                to |= bits[before]
            now[task], self._needed_same[task] = through | to, to & ~through
        for task in order:
            through = to = 0
            for before in self._same[task]:
                through |= then[before]
            for before in self._previous.get(task, ()):
                through |= now[before]
                to |= bits[before]
            then[task], self._needed_previous[task] = through | to, to & ~through

    def latest(self, order: Sequence[int], places: dict[int, int], count: int) -> list[int]:
        """For each task, the last of the given tasks that has ended under any timing when it ends, itself included.

        Args:
            order: the result of :meth:`order`.
            places: the given tasks, which follow one another, with the index of each.
            count: their number; indices in the previous iteration are lower by it.

        Returns:
            an index for each task; :data:`NEVER` if it waits for none of them in this iteration or the previous one.
        """
        found = [NEVER] * len(self._same)
        for rounds in range(2):  # what a task waited for in the previous iteration may itself have waited
            for task in order:
                here = places.get(task, found[task] if rounds else NEVER)
                for before, back in self.of(task):
                    here = max(here, found[before] - back * count)
                found[task] = here
        return found


class CycleError(Exception):
    """Tasks wait for each other; ``waits`` are (task, what it waits for, author) around the cycle."""

    def __init__(self, waits: list[tuple[int, int, int]]) -> None:
        super().__init__(waits)
        self.waits = waits


def explained(error: CycleError, names: Sequence[TaskId], rules: Sequence[object]) -> InputError:
    """Convert the error to a message that names the tasks and the rules that cannot all hold."""
    asked = [rules[author - 1] for _, _, author in error.waits if author]
    steps = ", ".join(
        f"{names[task]} waits for {names[before]} ({rules[author - 1] if author else 'data'})"
        for task, before, author in error.waits
    )
    told = f"the plan cannot be carried out, because tasks would wait for each other: {steps}"
    if not asked:
        return InputError(f"{told}. Change its routes")
    return RuleError(f"{told}. Leave out {' or '.join(dict.fromkeys(map(str, asked)))}", asked[0])
