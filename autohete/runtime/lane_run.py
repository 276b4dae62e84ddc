"""What the lanes of a run and its callers share: what may start, what has ended, and whether something has failed.

One lock guards it. Each waiter has its own wake-up, since every thread that wakes competes for the GIL.

On a device that runs ahead, a task of one of its lanes ends in two steps: :meth:`LaneRun.issue`, then :meth:`LaneRun.complete`
once the device has done it. On any other device there is only the second.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Protocol

from autohete.errors import DeviceOutOfMemoryError, InputError, RankError, TaskError
from autohete.runtime.ahead import NOTHING_AHEAD, Ahead
from autohete.runtime.device import Event
from autohete.runtime.history import History
from autohete.runtime.readiness import Readiness
from autohete.schedule import Schedule, Task, graph_of


class Booking(Protocol):
    """Counts memory exactly when the trace records that tasks begin and end, so that both have the same order."""

    def begin(self, task: Task, iteration: int) -> None:
        """Count the buffers of ``task``. An exception makes the task fail."""

    def end(self, task: Task, iteration: int) -> None:
        """Free what ``task`` frees."""


class _NotStarted(Exception):
    """The run has stopped while a task waited for room."""


class Stop:
    """From which iteration on no task starts any more, and why.

    Attributes:
        iteration: that iteration; infinite while all tasks may start.
        failed: the first iteration of which a task has failed; infinite if none has.
        failures: what has failed, and how.
        closing: the lanes end once their running tasks have.
        abandoned: callers wait for nothing more.
    """

    def __init__(self) -> None:
        self.iteration = self.failed = math.inf
        self.failures: list[tuple[str, BaseException]] = []
        self.closing = self.abandoned = False
        self._error: TaskError | None = None

    def error(self, state: str) -> TaskError:
        """Return the error that describes all failures, and the state of the parameters; always the same one."""
        if self._error is None:
            # That ranks have failed follows from what has failed here, if anything has.
            (name, error), *others = sorted(self.failures, key=lambda one: isinstance(one[1], RankError))
            # A TaskError already names its task.
            text = str(error) if isinstance(error, TaskError) else f"{name} failed: {type(error).__name__}: {error}"
            news = ((other, e) for other, e in others if not isinstance(e, RankError))
            text += "".join(f"; then {other} failed: {type(e).__name__}: {e}" for other, e in news)
            text = ". ".join(filter(None, (text.rstrip("."), state)))
            if isinstance(error, TaskError):
                self._error = error
                error.args = (text, *error.args[1:])
            else:
                self._error = TaskError(text)
                self._error.__cause__ = error
        return self._error


class Callers:
    """The threads that wait for the end of a task.

    A signal may interrupt them at any time, so each waits on a queue: a condition would lose its lock.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int | None, SimpleQueue[None]]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @contextmanager
    def waiting(self, instance: int | None) -> Iterator[SimpleQueue[None]]:
        """Yield a queue that is put to when ``instance`` ends (None: when all have ended), and when anything fails."""
        waiter = (instance, SimpleQueue[None]())
        self._waiting.append(waiter)
        try:
            yield waiter[1]
        finally:
            self._waiting.remove(waiter)

    def wake(self, instance: int | None) -> None:
        """Wake those that wait for ``instance``; None: for all instances."""
        for awaited, news in list(self._waiting):
            if awaited == instance:
                news.put(None)

    def wake_all(self) -> None:
        """Wake all."""
        for _, news in list(self._waiting):
            news.put(None)


class Engine:
    """A lane at work.

    Attributes:
        name: the lane's name.
        pushed: notified when an instance has become ready.
        busy: a task runs.
        issued: number of its tasks that have been issued and are not done.
        busy_ns: time that it has worked.
    """

    def __init__(self, name: str, lock: threading.Lock) -> None:
        self.name, self.pushed = name, threading.Condition(lock)
        self.busy, self.issued, self.busy_ns = False, 0, 0


class LaneRun:
    """An open-ended run of ``schedule``: iterations are admitted one by one.

    Args:
        schedule: a valid schedule.
        history: records the times of its tasks.
        booking: called at each task's begin and end; None: nothing is called.
        ahead: what is issued before the tasks that it follows are done.

    Attributes:
        history: as given.
        engines: one per lane.
        stop: whether tasks may still start.
        torn: an admission was interrupted, so its iteration may never end.
    """

    def __init__(self, schedule: Schedule, history: History, booking: Booking | None, ahead: Ahead = NOTHING_AHEAD) -> None:
        self._tasks, self._booking, self.history = schedule.tasks, booking, history
        graph = graph_of(schedule)
        self._readiness, self._follows = Readiness(graph, ahead), graph.successors
        #: By task: the tasks that it may be issued behind, as distances between instances.
        self._behind: list[list[int]] = [[] for _ in schedule.tasks]
        for before, after, back in ahead.edges:
            self._behind[after].append(before - after - back * len(schedule.tasks))
        #: What has been issued and is not done, with the event behind it.
        self._issued: dict[int, Event] = {}
        #: What has been booked and has not ended.
        self._booked: set[int] = set()
        self._runs_ahead, self._readers = bool(ahead.lanes), ahead.readers
        self._callers = Callers()
        self._lock = threading.Lock()
        #: Notified when a task that was issued is done, and when anything fails.
        self._ended = threading.Condition(self._lock)
        self.engines = [Engine(lane.name, self._lock) for lane in schedule.lanes]
        self.stop = Stop()
        self.torn = False

    def admit(self) -> int:
        """Admit the next iteration, and return its number."""
        with self._lock:
            self.torn = True  # until the end, in case of an interrupt in between
            iteration = self.history.admitted
            self.history.admit()
            ended = self.history.ended_in(iteration - 1) if iteration else []
            first = (iteration - 1) * len(self._tasks)
            issued = [instance - first for instance in self._issued if instance >= first]
            for lane in self._readiness.admit(iteration, ended, [*ended, *issued]):
                self.engines[lane].pushed.notify()
            self.torn = False
            return iteration

    def wait_for(self, instance: int | None) -> bool:
        """Wait until ``instance`` (None: every admitted one) has ended; return False if it cannot, because a task has failed
        and all tasks that can still end have ended.

        Raises:
            InputError: the run was abandoned.
        """
        with self._callers.waiting(instance) as news:
            while True:
                with self._lock:
                    if not self.history.open if instance is None else self.history.has_ended(instance):
                        return True
                    if self._is_settled():
                        return False
                    if self.stop.abandoned:
                        raise InputError("the training was closed before this step had ended: its loss is unknown")
                news.get()

    def failure(self, state: Callable[[], str]) -> TaskError:
        """Return the error that describes what has failed and, by ``state()``, the state of the parameters."""
        with self._lock:
            return self.stop.error(state())

    def next(self, lane: int) -> tuple[int, BaseException | None] | None:
        """Wait for the next instance of a lane; return it with the exception of its booking, if any. None: the lane ends."""
        engine = self.engines[lane]
        with self._lock:
            while True:
                instance = self._readiness.take(lane)
                if instance is None:
                    if self.stop.closing:
                        return None
                    engine.pushed.wait()
                elif instance // len(self._tasks) < self.stop.iteration:
                    engine.busy = True
                    self.history.begin(instance)
                    if self._may_read(engine, instance) and not isinstance(refusal := self._book(instance), _NotStarted):
                        return instance, refusal
                    engine.busy = False
                    self._callers.wake_all()

    def events_before(self, instance: int) -> list[Event]:
        """The events that the stream of ``instance`` has to wait for."""
        with self._lock:
            behind = (instance + distance for distance in self._behind[instance % len(self._tasks)])
            return [self._issued[before] for before in behind if before in self._issued]

    def issue(self, lane: int, instance: int, event: Event) -> None:
        """Note that all work of ``instance`` is before ``event``, and let those start that may be issued behind it."""
        engine = self.engines[lane]
        with self._lock:
            self._issued[instance] = event
            engine.issued += 1
            engine.busy = False
            for other, _ in self._readiness.issue(instance):
                self.engines[other].pushed.notify()

    def settle_before(self, instance: int) -> bool:
        """Wait until all tasks that ``instance``, which has been issued, follows have ended; False if one has failed."""
        iteration, task = divmod(instance, len(self._tasks))
        with self._lock:
            while any(
                before >= 0 and not self.history.has_ended(before)
                for before in (instance + distance for distance in self._behind[task])
            ):
                if iteration >= self.stop.failed:
                    return False
                self._ended.wait()
            return True

    def is_behind_failure(self, lane: int, instance: int) -> bool:
        """Whether ``instance``, of a lane of the device, is in its stream behind a task that has failed. What then fails in it
        is no failure of its own. Waits for what the lane has issued before, unless ``instance`` has been issued itself: then
        that has ended.
        """
        engine = self.engines[lane]
        with self._lock:
            while engine.issued and instance not in self._issued:
                self._ended.wait()
            return instance // len(self._tasks) >= self.stop.failed

    def complete(self, lane: int, instance: int, on_device: tuple[int, int] | None = None) -> None:
        """Note that ``instance`` has ended, and let its successors start.

        Args:
            lane: its lane.
            instance: has ended.
            on_device: when the device began and ended it; None: it was not issued ahead, and ends now.
        """
        engine = self.engines[lane]
        with self._lock:
            engine.busy_ns += self.history.end(instance, on_device)
            iteration, task = divmod(instance, len(self._tasks))
            if self._booking is not None:
                self._booking.end(self._tasks[task], iteration)
            for other, successor in self._readiness.end(instance):
                self.history.make_ready(successor, instance)
                self.engines[other].pushed.notify()
            if self._runs_ahead:  # its other successors wait for it, too: in their streams
                self._note_waits(instance)
            self._left(engine, instance)
            if self._callers:
                self._callers.wake(instance)
                if not self.history.open:
                    self._callers.wake(None)
                if self._is_settled():
                    self._callers.wake_all()

    def fail(self, lane: int, name: str, error: BaseException, iteration: float, instance: int = -1) -> None:
        """Note a failure: no task of ``iteration`` or a later one starts any more."""
        with self._lock:
            self.stop.failures.append((name, error))
            self.stop.iteration = min(self.stop.iteration, iteration)
            self.stop.failed = min(self.stop.failed, iteration)
            self._left(self.engines[lane], instance)
            if iteration == -math.inf:  # the lane itself: nothing of it ends any more
                self.engines[lane].issued = 0
            self._callers.wake_all()

    def drop(self, lane: int, instance: int) -> None:
        """Forget ``instance``, which follows a task that has failed."""
        with self._lock:
            self._left(self.engines[lane], instance)
            self._callers.wake_all()

    def abandon(self) -> None:
        """Start no further task, and release all waiting callers. Takes no lock."""
        self.stop.abandoned, self.stop.iteration = True, -math.inf
        self._callers.wake_all()

    def close(self) -> None:
        """End the lanes once their running tasks have ended."""
        self.stop.closing, self.stop.iteration = True, -math.inf
        with self._lock:
            for engine in self.engines:
                engine.pushed.notify_all()
        self._callers.wake_all()

    def _may_read(self, engine: Engine, instance: int) -> bool:
        """If ``instance`` decides by results, wait until all that its lane has issued is done; False if the run stops."""
        iteration, task = divmod(instance, len(self._tasks))
        while task in self._readers and engine.issued:
            self._ended.wait()
            if iteration >= self.stop.iteration:
                return False
        return True

    def _book(self, instance: int) -> BaseException | None:
        if self._booking is None:
            return None
        iteration, task = divmod(instance, len(self._tasks))
        while True:
            try:
                self._booking.begin(self._tasks[task], iteration)
                self._booked.add(instance)
                return None
            except BaseException as error:  # the lane raises it once its lock is free
                # What has been issued frees memory when it is done. Without it there would be room: edges see to that.
                if not (self._runs_ahead and self._booked and isinstance(error, DeviceOutOfMemoryError)):
                    return error
            self._ended.wait()
            if iteration >= self.stop.iteration:
                return _NotStarted()

    def _left(self, engine: Engine, instance: int) -> None:
        """Note that ``instance`` occupies the lane no more."""
        self._booked.discard(instance)
        if self._issued.pop(instance, None) is None:
            engine.busy = False
        else:
            engine.issued -= 1
        if self._runs_ahead:
            self._ended.notify_all()

    def _note_waits(self, instance: int) -> None:
        """Note for all admitted successors of ``instance`` that they have waited for it."""
        task, admitted = instance % len(self._tasks), self.history.admitted * len(self._tasks)
        for after, back in self._follows[task]:
            successor = instance + after - task + back * len(self._tasks)
            if successor < admitted:
                self.history.make_ready(successor, instance)

    def _is_settled(self) -> bool:
        """Whether a task has failed and all tasks that can still end have ended."""
        if not self.stop.failures or any(engine.busy or engine.issued for engine in self.engines):
            return False
        return self.history.is_complete(self.stop.iteration)
