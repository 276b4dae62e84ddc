"""Rules: what distinguishes the published systems. A rule only adds order to the tasks of an iteration.

A rule can therefore make a schedule slower, but never wrong. It decides neither which tasks exist nor what they wait for
because of their data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain, groupby, pairwise
from typing import Protocol

from autohete.errors import InputError, RuleError, check_fields
from autohete.schedule import COPIES, CPU, KIND_MEANING, Kind, TaskId

#: Tasks whose end completes an optimizer step.
_ENDS = (
    Kind.CPU_UPDATE,
    Kind.PLACE_UPDATE,
    Kind.READ_UPDATED,
    Kind.REFRESH,
    Kind.GPU_UPDATE,
    Kind.WRITE_BACK_BACKWARD,
    Kind.WRITE_BACK_STATES,
    Kind.WRITE_STATES,
    Kind.WRITE_PARAMETERS,
    Kind.GATHER_UPDATED,
)
#: What moves values that can share places: copies, and reductions, which free the gradients of which each GPU keeps a part.
SLOTTED = (*COPIES, Kind.REDUCE_GRADIENTS)
#: The copies of parameters in forward: home, and to the GPU.
_IN_FORWARD = (Kind.WRITE_BACK_FORWARD, Kind.PREFETCH_FORWARD)


@dataclass(frozen=True, slots=True)
class Life:
    """A place in memory: taken when ``begin`` starts, free once ``end`` has ended, ``back`` iterations later."""

    begin: TaskId
    end: TaskId
    back: int


class Tasks(Protocol):
    """The tasks of an iteration as a rule sees them: a rule can query them and add order.

    Attributes:
        passes: the GPU's passes, in order.
        gradients_back: age, in iterations, of the gradients that an update on the CPU uses.
    """

    @property
    def passes(self) -> Sequence[TaskId]: ...
    @property
    def gradients_back(self) -> int: ...

    def of(self, kind: Kind) -> list[TaskId]:
        """Return the tasks of a kind, in issue order."""

    def find(self, kind: Kind, unit: int, micro_batch: int = 0) -> TaskId | None:
        """Return the task, or None if it does not exist."""

    def lane(self, task: TaskId) -> str:
        """Return the lane that runs the task."""

    def first_backward(self, unit: int, micro_batch: int = 0) -> TaskId:
        """Return the first pass of backward that needs the unit's parameters."""

    def lives(self, kind: Kind) -> list[Life]:
        """Return the lives of what the copies or reductions of a kind move, in the order in which they take their places on the
        GPU side.
        """

    def starts_early(self, task: TaskId) -> bool:
        """Whether the task waits only for tasks of the previous iteration."""

    def after(self, task: TaskId, before: TaskId | None, back: int = 0) -> None:
        """Make ``task`` wait for ``before`` of this iteration (``back=0``) or the previous one. None adds no wait."""

    def in_turn(self, tasks: Sequence[TaskId]) -> None:
        """Run ``tasks`` of one lane in this order, whatever the lane's discipline."""

    def hold_up(self, blocker: TaskId, overlapped: int = 0) -> None:
        """Make a pass and its synchronous fetches wait for ``blocker``: ``overlapped`` passes after the one that follows it."""

    def take_most_urgent(self) -> None:
        """Let all lanes but the GPU's run the most urgent ready task first."""


class Rule(ABC):
    """Adds order to tasks. A frozen dataclass; messages refer to it by its text."""

    __slots__ = ()

    def __str__(self) -> str:
        """Name and arguments, with kinds as mnemonics: ``Slots(kind=G, count=2)``."""
        values = (f"{field.name}={getattr(self, field.name)}" for field in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(values)})"

    @abstractmethod
    def apply(self, tasks: Tasks) -> None:
        """Add this rule's waits to ``tasks``."""


@dataclass(frozen=True, slots=True)
class ByPriority(Rule):
    """Copies, collectives and CPU updates run the most urgent ready unit first, rather than in arrival order (AutoHete)."""

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        tasks.take_most_urgent()


@dataclass(frozen=True, slots=True)
class BlockingCopies(Rule):
    """The GPU waits for each copy of a kind, as if it ran on the compute stream.

    Args:
        kind: a copy that follows a pass, such as ``Kind.OFFLOAD_GRADIENTS``.
        units: units to which the rule applies. None: all.
        last_only: of several micro-batches, only the copies of the last.
        overlapped: passes that may run before the GPU waits.
    """

    kind: Kind
    units: tuple[int, ...] | None = None
    last_only: bool = False
    overlapped: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.overlapped < 0:
            raise InputError(f"{self}: overlapped is {self.overlapped}: give 0 or more passes")

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        copies = tasks.of(self.kind)
        first = max((copy.micro_batch for copy in copies), default=0) if self.last_only else 0
        for copy in copies:
            if (self.units is None or copy.unit in self.units) and copy.micro_batch >= first:
                tasks.hold_up(copy, self.overlapped)


@dataclass(frozen=True, slots=True)
class Window(Rule):
    """Units share ``size`` places. A forward waits for the write-back, and a backward for the update, of the unit whose place
    it takes (StrongHold).
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
                below = tasks.first_backward(update.unit - self.size, tasks.passes[-1].micro_batch)
                if tasks.find(below.kind, below.unit, below.micro_batch):  # none below the first trained unit
                    tasks.after(below, update)


@dataclass(frozen=True, slots=True)
class Slots(Rule):
    """What the copies of a kind move shares ``count`` places: on the GPU, or on the host for copies from and to what is behind
    it. A task that takes a place waits until the place taken ``count`` takes earlier is free. So do the buffers of
    reductions, where each GPU keeps a part of what is reduced: a slow interconnect costs time, not memory.

    Args:
        kind: a copy, or ``Kind.REDUCE_GRADIENTS``. For ``Kind.OFFLOAD_GRADIENTS``, backward takes a place and the copy frees
            it; for ``Kind.FETCH_ACTIVATIONS``, the copy takes a place and backward frees it.
        count: number of places.
    """

    kind: Kind
    count: int

    def __post_init__(self) -> None:
        _at_least_one(self, "count", self.count)
        if self.kind not in SLOTTED:
            raise InputError(f"{self}: a {KIND_MEANING[self.kind]} moves nothing: give a copy ({', '.join(SLOTTED)})")

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
class Exchanges(Rule):
    """Of some units, parameters that come take the memory of those that go, in one pair after another, as on one stream: first
    the copy home, then the fetch. The copy home in backward begins after the backward of the unit below (musubi-tuner).

    Args:
        first, last: the units.
    """

    first: int
    last: int

    def __post_init__(self) -> None:
        check_fields(self)

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        last = tasks.passes[-1].micro_batch
        before: TaskId | None = None
        leaving = self._mine(tasks, Kind.WRITE_BACK_BACKWARD)  # of the last micro-batch, as the updates that precede them
        for out in leaving:
            tasks.after(out, tasks.find(Kind.BACKWARD, out.unit - 1, last))
        for micro_batch in range(last + 1):
            in_forward = zip(*(self._mine(tasks, kind, micro_batch) for kind in _IN_FORWARD), strict=False)
            returning = self._mine(tasks, Kind.PREFETCH_BACKWARD, last) if micro_batch == last else []
            for out, into in chain(in_forward, zip(leaving, returning, strict=False)):
                tasks.after(out, before)
                tasks.after(into, out)
                before = into

    def _mine(self, tasks: Tasks, kind: Kind, micro_batch: int = 0) -> list[TaskId]:
        return [t for t in tasks.of(kind) if self.first <= t.unit <= self.last and t.micro_batch == micro_batch]


@dataclass(frozen=True, slots=True)
class HostGradientBuffers(Rule):
    """Gradients of the last micro-batch share ``count`` buffers on the host, in the order in which they leave the GPU: a copy
    waits for the update on the CPU that uses what the buffer holds (SlideFormer).

    Args:
        count: number of buffers.
    """

    count: int

    def __post_init__(self) -> None:
        _at_least_one(self, "count", self.count)

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        last = tasks.passes[-1].micro_batch
        copies = [copy for copy in tasks.of(Kind.OFFLOAD_GRADIENTS) if copy.micro_batch == last]
        for copy, before in zip(copies[self.count :], copies, strict=False):
            tasks.after(copy, tasks.find(Kind.CPU_UPDATE, before.unit))


@dataclass(frozen=True, slots=True)
class OneCopyStream(Rule):
    """Fetches of parameters for backward and copies of gradients to the host take turns, as on one stream: gradients of a unit
    follow the parameters of the unit below, and precede those of the next (SlideFormer).
    """

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        for copy in tasks.of(Kind.OFFLOAD_GRADIENTS):
            tasks.after(copy, tasks.find(Kind.PREFETCH_BACKWARD, copy.unit - 1, copy.micro_batch))
            following = tasks.find(Kind.PREFETCH_BACKWARD, copy.unit - 2, copy.micro_batch)
            if following is not None:
                tasks.after(following, copy)


@dataclass(frozen=True, slots=True)
class SerialUpdates(Rule):
    """After backward, units are updated one at a time: update and refresh of a unit end before those of the next begin
    (PatrickStar).

    Args:
        with_copies: units whose gradient copy is part of this sequence rather than running during backward.
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
    """CPU updates and CPU gradient norms begin, one after another, once every gradient is on the host (clipping, overflow
    check). Reads of states from their place, and updates there, begin once the last backward has ended and every gradient is
    where it waits.
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
        for first, *others in (some for some in (reads, tasks.of(Kind.PLACE_UPDATE)) if some):
            for before in (tasks.passes[-1], *tasks.of(Kind.WRITE_GRADIENTS)):
                tasks.after(first, before)
            for task in others:
                tasks.after(task, tasks.passes[-1])
            tasks.in_turn([first, *others])
        tasks.in_turn(updates)


@dataclass(frozen=True, slots=True)
class GpuUpdatesAfterBackward(Rule):
    """GPU updates, and fetches of the states they need, wait for the last backward."""

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        for task in (*tasks.of(Kind.READ_STATES), *tasks.of(Kind.FETCH_STATES), *tasks.of(Kind.GPU_UPDATE)):
            tasks.after(task, tasks.passes[-1])


@dataclass(frozen=True, slots=True)
class ReductionsAfterBackward(Rule):
    """Reductions of complete gradients over the GPUs, and their norms, wait for the last backward."""

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        last = tasks.passes[-1]
        for task in tasks.of(Kind.REDUCE_GRADIENTS):
            if task.micro_batch == last.micro_batch:
                tasks.after(task, last)
        for task in tasks.of(Kind.GRADIENT_NORM):
            tasks.after(task, last)


@dataclass(frozen=True, slots=True)
class GpuUpdatesAfterRecompute(Rule):
    """GPU updates wait for the recomputation that follows their backward, if there is one. Until then a backward needs the
    memory; from then on the states of the update may come.
    """

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        last = tasks.passes[-1].micro_batch
        follows: dict[int, TaskId] = {}
        for before, task in pairwise(task for task in tasks.passes if task.micro_batch == last):
            if before.kind is Kind.BACKWARD:
                unit = before.unit
            if task.kind is Kind.RECOMPUTE and before.kind in (Kind.BACKWARD, Kind.RECOMPUTE):
                follows[unit] = task
        for update in tasks.of(Kind.GPU_UPDATE):
            tasks.after(update, follows.get(update.unit))


@dataclass(frozen=True, slots=True)
class GradientsLeaveBeforeBackward(Rule):
    """Backward begins once all gradients of the previous iteration have left the GPU. Without delayed updates they
    always have.
    """

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        first = next(task for task in tasks.passes if task.kind is Kind.BACKWARD)
        for copy in tasks.of(Kind.OFFLOAD_GRADIENTS):
            tasks.after(first, copy, back=1)


@dataclass(frozen=True, slots=True)
class GradientsLeaveAfterBackward(Rule):
    """The gradients of the last micro-batch leave the GPU once the last backward has ended: a step that follows copies them."""

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        last = tasks.passes[-1]
        for copy in tasks.of(Kind.OFFLOAD_GRADIENTS):
            if copy.micro_batch == last.micro_batch:
                tasks.after(copy, last)


@dataclass(frozen=True, slots=True)
class ActivationsByTurns(Rule):
    """What a stage of a pipeline keeps of a micro-batch elsewhere leaves once all its forwards have ended, and comes back as a
    whole. Each copy runs beside other passes of the rank, which waits for it: a copy away runs beside the next forwards of a
    stage, or from the first backward on beside the next backwards and forwards; a copy back begins before the backwards that
    precede its own, the first one before the forwards that do.
    """

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        turns = [list(some) for _, some in groupby(tasks.passes, key=_turn)]
        of = {task: place for place, some in enumerate(turns) for task in some}
        backwards = [place for place, some in enumerate(turns) if some[0].kind is not Kind.FORWARD]
        for away in tasks.of(Kind.OFFLOAD_ACTIVATIONS):
            turn = of[TaskId(Kind.FORWARD, away.unit, away.micro_batch)]
            tasks.after(away, turns[turn][-1])
            later = [place for place in backwards if place > turn + 1]
            waiting = turn + 2 if turn + 1 not in backwards else later[0] if later else None
            if waiting is not None and waiting < len(turns):
                tasks.after(turns[waiting][0], away)
        for back in tasks.of(Kind.FETCH_ACTIVATIONS):
            turn = of[tasks.first_backward(back.unit, back.micro_batch)]
            tasks.after(turns[turn][0], back)
            before = backwards[backwards.index(turn) - 1] if turn != backwards[0] else turn - 1
            if before:
                tasks.after(back, turns[before - 1][-1])


def _turn(task: TaskId) -> tuple[int, bool]:
    """The micro-batch of a pass, and whether it is a forward."""
    return task.micro_batch, task.kind in (Kind.FORWARD, Kind.LOSS)


@dataclass(frozen=True, slots=True)
class RefreshAfterBackward(Rule):
    """Refreshes wait for the last backward."""

    def apply(self, tasks: Tasks) -> None:
        """See :class:`Rule`."""
        for refresh in tasks.of(Kind.REFRESH):
            tasks.after(refresh, tasks.passes[-1])


@dataclass(frozen=True, slots=True)
class RefreshAfterUpdates(Rule):
    """Refreshes run one after another, once the last CPU update has ended."""

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
        # A fetch without a wait on a pass of its own iteration must not slip past the barrier.
        fetches = [task for kind in (Kind.PREFETCH_FORWARD, Kind.GATHER_FORWARD, Kind.READ_FORWARD) for task in tasks.of(kind)]
        early = [fetch for fetch in fetches if tasks.starts_early(fetch)]
        for task in (tasks.passes[0], *early):
            for end in ends:
                tasks.after(task, end, back=1)


def _at_least_one(rule: Rule, name: str, value: int) -> None:
    check_fields(rule)
    if value < 1:
        raise InputError(f"{rule}: {name} is {value}: give at least 1, or leave the rule out where there is no limit")
