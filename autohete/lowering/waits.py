"""What waits for what, by numbers of tasks: who asked for it, which waits follow from others, and an order that keeps them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from autohete.errors import InputError, RuleError
from autohete.schedule import TaskId

#: Before any iteration that a task may have waited for.
NEVER = -(2**40)


class Turn(Protocol):
    """When a program would issue a task.

    Attributes:
        place: of a pass, in the order of the passes; -1 for other tasks.
        follows: the place of the pass after which it was declared, or of the pass itself.
        phase: of several that follow the same pass: 0 for what passes need and leave, 1 for the optimizer's step, 2 for what
            brings its result back.
    """

    @property
    def place(self) -> int: ...
    @property
    def follows(self) -> int: ...
    @property
    def phase(self) -> int: ...


class Waits:
    """The waits of the tasks of an iteration, numbered as they were declared; each for a task and a number of iterations back.

    Attributes:
        author: who adds waits now: 0 the data, else a rule, by its place counted from 1.
        claims: (rule, rule or data): the second had asked before for what the first asks.
    """

    def __init__(self) -> None:
        self.author = 0
        self.claims: set[tuple[int, int]] = set()
        #: Of some tasks one that is issued before them.
        self._issued_before: dict[int, int] = {}
        #: Of each task what it waits for of its iteration, and who asked first; likewise of the iteration before, if anything.
        self._same: list[dict[int, int]] = []
        self._previous: defaultdict[int, dict[int, int]] = defaultdict(dict)
        #: Of each task as bits what of that does not follow from the rest; after :meth:`reduce`.
        self._needed_same: list[int] = []
        self._needed_previous: list[int] = []

    def add_task(self) -> None:
        """A task that waits for nothing."""
        self._same.append({})

    def add(self, task: int, before: int, back: int) -> None:
        """``task`` waits for ``before``, so many iterations back."""
        first = (self._previous if back else self._same)[task].setdefault(before, self.author)
        if first != self.author:
            self.claims.add((self.author, first))

    def issue(self, task: int, before: int) -> None:
        """Issue ``task`` later than ``before``, for which it need not wait by itself: they are on one fifo lane."""
        self._issued_before[task] = before

    def of(self, task: int) -> list[tuple[int, int]]:
        """What ``task`` waits for, and how many iterations back."""
        return [*((before, 0) for before in self._same[task]), *((before, 1) for before in self._previous.get(task, ()))]

    def needed(self, task: int) -> list[tuple[int, int]]:
        """The same, without what follows from the rest."""
        same, previous = self._needed_same[task], self._needed_previous[task]
        found = [(before, 0) for before in self._same[task] if same >> before & 1]
        if previous:
            found += [(before, 1) for before in self._previous[task] if previous >> before & 1]
        found.sort()
        return found

    def authors(self) -> set[int]:
        """The rules that have asked for a wait that does not follow from others."""
        both = ((enumerate(self._same), self._needed_same), (self._previous.items(), self._needed_previous))
        return {
            author
            for asked, needed in both
            for task, waits in asked
            for before, author in waits.items()
            if author and needed[task] >> before & 1
        }

    def order(self, turns: Sequence[Turn]) -> list[int]:
        """All tasks, each issued after those of its iteration that it waits for.

        Of several that may be next: what has to follow the earlier pass, as data and rules say; then by phase; then the first
        declared.

        Args:
            turns: of each task.

        Raises:
            CycleError: tasks wait for each other.
        """
        if not any(same and max(same) > task for task, same in enumerate(self._same)) and not any(
            u > task for task, u in self._issued_before.items()
        ):
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
        #: The last pass that each has to follow, as far as is known.
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
        """(task, what it waits for, who asked) around a cycle, which is among the tasks of which something is missing."""
        task = next(task for task, count in enumerate(missing) if count)
        way = [task]
        while True:
            task = next(u for u in before[task] if missing[u])
            if task in way:
                way = [*way[way.index(task) :], task]
                return [(a, b, self._same[a].get(b, 0)) for a, b in zip(way, way[1:], strict=False)]
            way.append(task)

    def reduce(self, order: Sequence[int]) -> None:
        """Find which waits do not follow from others; sets of tasks are bits of integers.

        Args:
            order: of :meth:`order`.
        """
        bits = [1 << task for task in range(len(self._same))]
        #: What has ended when a task begins, of this iteration and of the one before.
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
        """Of each task the last of some others that has surely ended when it does, itself included.

        Args:
            order: of :meth:`order`.
            places: those others, which follow one another, and the place of each.
            count: how many they are; places in the iteration before are that much lower.

        Returns:
            a place for each task, :data:`NEVER` where it waits for none of them in this iteration or the one before.
        """
        found = [NEVER] * len(self._same)
        for rounds in range(2):  # what a task waited for in the iteration before may have waited for another
            for task in order:
                here = places.get(task, found[task] if rounds else NEVER)
                for before, back in self.of(task):
                    here = max(here, found[before] - back * count)
                found[task] = here
        return found


class CycleError(Exception):
    """Tasks wait for each other; ``waits`` are (task, what it waits for, who asked) around the cycle."""

    def __init__(self, waits: list[tuple[int, int, int]]) -> None:
        super().__init__(waits)
        self.waits = waits


def explained(error: CycleError, names: Sequence[TaskId], rules: Sequence[object]) -> InputError:
    """The same for people: the tasks by name, and the rules that cannot all hold."""
    asked = [rules[author - 1] for _, _, author in error.waits if author]
    steps = ", ".join(
        f"{names[task]} waits for {names[before]} ({rules[author - 1] if author else 'data'})"
        for task, before, author in error.waits
    )
    told = f"the plan cannot be carried out, because tasks would wait for each other: {steps}"
    if not asked:
        return InputError(f"{told}. Change its routes")
    return RuleError(f"{told}. Leave out {' or '.join(dict.fromkeys(map(str, asked)))}", asked[0])
