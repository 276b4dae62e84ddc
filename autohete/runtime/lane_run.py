"""What the lanes of a run and its callers share: what may start, what has ended, and whether something has failed.

One lock guards it. Each waiter has its own wake-up, since every thread that wakes competes for the GIL.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Protocol

from autohete.errors import InputError, TaskError
from autohete.runtime.history import History
from autohete.runtime.readiness import Readiness
from autohete.schedule import Schedule, Task, graph_of


class Booking(Protocol):
    """Counts memory exactly when the trace records that tasks begin and end, so that both have the same order."""

    def begin(self, task: Task, iteration: int) -> None:
        """Count the buffers of ``task``. An exception makes the task fail."""

    def end(self, task: Task, iteration: int) -> None:
        """Free what ``task`` frees."""


class Stop:
    """From which iteration on no task starts any more, and why.

    Attributes:
        iteration: that iteration; infinite while all tasks may start.
        failures: what has failed, and how.
        closing: the lanes end once their running tasks have.
        abandoned: callers wait for nothing more.
    """

    def __init__(self) -> None:
        self.iteration = math.inf
        self.failures: list[tuple[str, BaseException]] = []
        self.closing = self.abandoned = False
        self._error: TaskError | None = None

    def error(self, state: str) -> TaskError:
        """Return the error that describes all failures, and the state of the parameters; always the same one."""
        if self._error is None:
            (name, error), *others = self.failures
            # A TaskError already names its task.
            text = str(error) if isinstance(error, TaskError) else f"{name} failed: {type(error).__name__}: {error}"
            text += "".join(f"; then {other} failed: {type(e).__name__}: {e}" for other, e in others)
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
        busy_ns: time that it has worked.
    """

    def __init__(self, name: str, lock: threading.Lock) -> None:
        self.name, self.pushed = name, threading.Condition(lock)
        self.busy, self.busy_ns = False, 0


class LaneRun:
    """An open-ended run of ``schedule``: iterations are admitted one by one.

    Args:
        schedule: a valid schedule.
        history: records the times of its tasks.
        booking: called at each task's begin and end; None: nothing is called.

    Attributes:
        history: as given.
        engines: one per lane.
        stop: whether tasks may still start.
        torn: an admission was interrupted, so its iteration may never end.
    """

    def __init__(self, schedule: Schedule, history: History, booking: Booking | None) -> None:
        self._tasks, self._booking, self.history = schedule.tasks, booking, history
        self._readiness = Readiness(graph_of(schedule))
        self._callers = Callers()
        self._lock = threading.Lock()
        self.engines = [Engine(lane.name, self._lock) for lane in schedule.lanes]
        self.stop = Stop()
        self.torn = False

    def admit(self) -> int:
        """Admit the next iteration, and return its number."""
        with self._lock:
            self.torn = True  # until the end, in case of an interrupt in between
            iteration = self.history.admitted
            self.history.admit()
            ended = self.history.ended_in(iteration - 1) if iteration else ()
            for lane in self._readiness.admit(iteration, ended):
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
                    return instance, self._book(instance)

    def complete(self, lane: int, instance: int) -> None:
        """Note that ``instance`` has ended, and let its successors start."""
        engine = self.engines[lane]
        with self._lock:
            engine.busy_ns += self.history.end(instance)
            if self._booking is not None:
                iteration, task = divmod(instance, len(self._tasks))
                self._booking.end(self._tasks[task], iteration)
            for other, successor in self._readiness.end(instance):
                self.history.make_ready(successor, instance)
                self.engines[other].pushed.notify()
            engine.busy = False
            if self._callers:
                self._callers.wake(instance)
                if not self.history.open:
                    self._callers.wake(None)
                if self._is_settled():
                    self._callers.wake_all()

    def fail(self, lane: int, name: str, error: BaseException, iteration: float) -> None:
        """Note a failure: no task of ``iteration`` or a later one starts any more."""
        with self._lock:
            self.stop.failures.append((name, error))
            self.stop.iteration = min(self.stop.iteration, iteration)
            self.engines[lane].busy = False
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

    def _book(self, instance: int) -> BaseException | None:
        if self._booking is not None:
            iteration, task = divmod(instance, len(self._tasks))
            try:
                self._booking.begin(self._tasks[task], iteration)
            except BaseException as error:  # the lane raises it once its lock is free
                return error
        return None

    def _is_settled(self) -> bool:
        """Whether a task has failed and all tasks that can still end have ended."""
        if not self.stop.failures or any(engine.busy for engine in self.engines):
            return False
        return self.history.is_complete(self.stop.iteration)
