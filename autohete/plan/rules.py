"""What separates the published systems: rules, each of which only adds order to the tasks of an iteration.

So a rule can make a schedule slower, never wrong. Which tasks there are, and what they wait for because of their data, is not
a rule's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from autohete.errors import InputError, RuleError, check_fields
from autohete.schedule import COPIES, CPU, KIND_MEANING, Kind, TaskId

#: Tasks whose end completes an optimizer step.
_ENDS = (
    Kind.CPU_UPDATE,
    Kind.REFRESH,
    Kind.GPU_UPDATE,
    Kind.WRITE_BACK_BACKWARD,
    Kind.WRITE_BACK_STATES,
    Kind.WRITE_STATES,
    Kind.GATHER_UPDATED,
)


@dataclass(frozen=True, slots=True)
class Life:
    """A place in memory that is taken when ``begin`` starts and free when ``end`` has ended, ``back`` iterations later."""

    begin: TaskId
    end: TaskId
    back: int


class Tasks(Protocol):
    """The tasks of an iteration as a rule sees them: it may ask, and add order.

    Attributes:
        passes: what the GPU computes, in order.
        gradients_back: how many iterations ago the gradients were made that an update on the CPU takes.
    """

    @property
    def passes(self) -> Sequence[TaskId]: ...
    @property
    def gradients_back(self) -> int: ...

    def of(self, kind: Kind) -> list[TaskId]:
        """The tasks of a kind, in issue order."""

    def find(self, kind: Kind, unit: int, micro_batch: int = 0) -> TaskId | None:
        """The task, if there is one."""

    def lane(self, task: TaskId) -> str:
        """Who does it."""

    def first_backward(self, unit: int, micro_batch: int = 0) -> TaskId:
        """The pass that needs the unit's parameters first in backward."""

    def lives(self, kind: Kind) -> list[Life]:
        """What the copies of a kind move, in the order in which it takes its places near the GPU."""

    def starts_early(self, task: TaskId) -> bool:
        """Whether all that it waits for is of the iteration before."""

    def after(self, task: TaskId, before: TaskId | None, back: int = 0) -> None:
        """``task`` waits for ``before`` of this iteration or of the one before; for nothing if there is no such task."""

    def in_turn(self, tasks: Sequence[TaskId]) -> None:
        """``tasks`` of one lane run in this order, whatever the lane's discipline."""

    def hold_up(self, blocker: TaskId) -> None:
        """The next pass after the one that ``blocker`` follows, and what it fetches synchronously, waits for ``blocker``."""

    def take_most_urgent(self) -> None:
        """Lanes of copies and of the CPU take the most urgent task that is ready."""


class Rule(ABC):
    """Adds order. A frozen dataclass; its text is how it is named in messages."""

    __slots__ = ()

    def __str__(self) -> str:
        """Its name and arguments, kinds by their mnemonics: ``Slots(kind=G, count=2)``."""
        values = (f"{field.name}={getattr(self, field.name)}" for field in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(values)})"

    @abstractmethod
    def apply(self, tasks: Tasks) -> None:
        """Let tasks wait."""


@dataclass(frozen=True, slots=True)
class ByPriority(Rule):
    """Copies and CPU updates take the most urgent ready unit instead of the first come (AutoHete)."""

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        tasks.take_most_urgent()


@dataclass(frozen=True, slots=True)
class BlockingCopies(Rule):
    """The GPU waits for each copy of a kind, as if it ran on the compute stream.

    Args:
        kind: a copy that follows a pass, such as ``Kind.OFFLOAD_GRADIENTS``.
        units: whose; None: of all units.
    """

    kind: Kind
    units: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        for copy in tasks.of(self.kind):
            if self.units is None or copy.unit in self.units:
                tasks.hold_up(copy)


@dataclass(frozen=True, slots=True)
class Window(Rule):
    """Units share ``size`` places: a forward waits for the write-back, a backward for the update, of the unit whose place it
    takes (StrongHold).
    """

    size: int

    def __post_init__(self) -> None:
        _at_least_one(self, "size", self.size)

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        for moved in tasks.of(Kind.WRITE_BACK_FORWARD):
            follower = tasks.find(Kind.FORWARD, moved.unit + self.size, moved.micro_batch)
            if follower is not None:
                tasks.after(follower, moved)
        for update in tasks.of(Kind.CPU_UPDATE):
            if update.unit >= self.size:
                tasks.after(tasks.first_backward(update.unit - self.size, tasks.passes[-1].micro_batch), update)


@dataclass(frozen=True, slots=True)
class Slots(Rule):
    """What the copies of a kind move has ``count`` places on the GPU, or on the host for copies to and from NVMe. A task that
    takes a place waits until the one taken ``count`` times before it is free.

    Args:
        kind: a copy. Of ``Kind.OFFLOAD_GRADIENTS`` backward takes the places, and the copy frees them; of
            ``Kind.FETCH_ACTIVATIONS`` the copy takes them, and backward frees them.
        count: how many.
    """

    kind: Kind
    count: int

    def __post_init__(self) -> None:
        _at_least_one(self, "count", self.count)
        if self.kind not in COPIES:
            raise InputError(f"{self}: a {KIND_MEANING[self.kind]} moves nothing: give a copy ({', '.join(COPIES)})")

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        lives = tasks.lives(self.kind)
        for place, life in enumerate(lives):
            before = place - self.count
            if before >= 0 and lives[before].back:
                raise RuleError(f"{self}: places are not free before the next iteration: give at least {len(lives)}", self)
            if before >= -len(lives):
                earlier = lives[before]
                tasks.after(life.begin, earlier.end, 1 - earlier.back if before < 0 else 0)


@dataclass(frozen=True, slots=True)
class SerialUpdates(Rule):
    """After backward, the update of one unit and its refresh end before the next unit's begin (PatrickStar).

    Args:
        with_copies: the units whose gradient is copied as a part of that, instead of during backward.
    """

    with_copies: tuple[int, ...] = ()

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        previous: TaskId | None = None
        for update in tasks.of(Kind.CPU_UPDATE):
            copy = tasks.find(Kind.OFFLOAD_GRADIENTS, update.unit, tasks.passes[-1].micro_batch)
            begin = copy if copy is not None and update.unit in self.with_copies else update
            tasks.after(begin, tasks.passes[-1])
            tasks.after(begin, previous)
            previous = tasks.find(Kind.REFRESH, update.unit) or update


@dataclass(frozen=True, slots=True)
class UpdatesAfterBackward(Rule):
    """CPU updates, and norms that the CPU computes, begin one after another when every gradient is on the host (clipping,
    overflow check); reads of their states from NVMe when the last backward has ended and every gradient is where it waits.
    """

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        updates, reads = tasks.of(Kind.CPU_UPDATE), tasks.of(Kind.READ_STATES)
        gradients = [*tasks.of(Kind.OFFLOAD_GRADIENTS), *tasks.of(Kind.ACCUMULATE)]
        norms = [norm for norm in tasks.of(Kind.GRADIENT_NORM) if tasks.lane(norm) == CPU]
        for before in (tasks.passes[-1], *gradients) if updates else ():
            tasks.after(updates[0], before, tasks.gradients_back)
            if norms:
                tasks.after(norms[0], before)
        tasks.in_turn(norms)
        for before in (tasks.passes[-1], *tasks.of(Kind.WRITE_GRADIENTS)) if reads else ():
            tasks.after(reads[0], before)
        for read in reads[1:]:
            tasks.after(read, tasks.passes[-1])
        tasks.in_turn(reads)
        tasks.in_turn(updates)


@dataclass(frozen=True, slots=True)
class GpuUpdatesAfterBackward(Rule):
    """GPU updates, and fetches of the states that they need, wait for the last backward."""

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        for task in (*tasks.of(Kind.READ_STATES), *tasks.of(Kind.FETCH_STATES), *tasks.of(Kind.GPU_UPDATE)):
            tasks.after(task, tasks.passes[-1])


@dataclass(frozen=True, slots=True)
class RefreshAfterBackward(Rule):
    """Refreshes wait for the last backward."""

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        for refresh in tasks.of(Kind.REFRESH):
            tasks.after(refresh, tasks.passes[-1])


@dataclass(frozen=True, slots=True)
class RefreshAfterUpdates(Rule):
    """Refreshes begin, one after another, when the last CPU update has ended."""

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        refreshes, updates = tasks.of(Kind.REFRESH), tasks.of(Kind.CPU_UPDATE)
        if refreshes:
            tasks.after(refreshes[0], updates[-1])
        tasks.in_turn(updates)
        tasks.in_turn(refreshes)


@dataclass(frozen=True, slots=True)
class Barrier(Rule):
    """The next forward waits for every update, refresh and write-back of an update."""

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        ends = [task for kind in _ENDS for task in tasks.of(kind)]
        # A fetch that does not wait for a pass of its own iteration must not slip past the barrier.
        fetches = [*tasks.of(Kind.PREFETCH_FORWARD), *tasks.of(Kind.GATHER_FORWARD)]
        early = [fetch for fetch in fetches if tasks.starts_early(fetch)]
        for task in (tasks.passes[0], *early):
            for end in ends:
                tasks.after(task, end, back=1)


def _at_least_one(rule: Rule, name: str, value: int) -> None:
    check_fields(rule)
    if value < 1:
        raise InputError(f"{rule}: {name} is {value}: give at least 1, or leave the rule out where there is no limit")
