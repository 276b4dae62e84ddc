"""When the tasks of a run were ready, began and ended.

An instance is an integer: ``iteration * tasks + task``. Nothing here takes a lock: the caller has one.
"""

from __future__ import annotations

import time

import numpy as np

from autohete.execution.trace import Clock, Trace
from autohete.schedule import Schedule


class Instants:
    """Nanoseconds since the start of a run."""

    def __init__(self) -> None:
        self._begin = time.perf_counter_ns()
        self._latest = -1

    def now(self) -> int:
        """Return the time."""
        return time.perf_counter_ns() - self._begin

    def at(self, nanoseconds: int) -> int:
        """Return the time at which :func:`time.perf_counter_ns` was ``nanoseconds``."""
        return nanoseconds - self._begin

    def next(self) -> int:
        """Return the time, later than any before. Times then have the order of what they are times of, even where the clock
        ticks slowly, or differs between cores.
        """
        self._latest = max(self.now(), self._latest + 1)
        return self._latest


class History:
    """Times of the admitted instances.

    Args:
        tasks: number of tasks of an iteration.
        instants: the clock.
        keep: minimum number of iterations whose times are kept; older ones that have ended may be dropped. None: all.

    Attributes:
        open: number of admitted instances that have not ended.
    """

    def __init__(self, tasks: int, instants: Instants, keep: int | None) -> None:
        self._tasks, self._instants, self._keep = tasks, instants, keep
        # Per instance, starting with the first kept iteration; extended by each admitted iteration.
        self._first = 0
        self._ready: list[int] = []
        self._begun: list[int] = []
        self._ended: list[int] = []
        #: Number of tasks that have not ended, per kept iteration.
        self._left: list[int] = []
        self.open = 0

    @property
    def admitted(self) -> int:
        """Number of admitted iterations."""
        return self._first + len(self._left)

    def admit(self) -> None:
        """Add the instances of the next iteration."""
        self._forget()
        self._ready += [self._instants.next()] * self._tasks
        for times in (self._begun, self._ended):
            times += [-1] * self._tasks
        self._left.append(self._tasks)
        self.open += self._tasks

    def begin(self, instance: int) -> None:
        """Note that ``instance`` begins."""
        self._begun[instance - self._first * self._tasks] = self._instants.next()

    def end(self, instance: int, on_device: tuple[int, int] | None = None) -> int:
        """Note that ``instance`` ends; return the time that it took.

        Args:
            instance: has ended.
            on_device: when the device began and ended it, by :func:`time.perf_counter_ns`; None: it ends now.
        """
        place = instance - self._first * self._tasks
        if on_device is None:
            self._ended[place] = self._instants.next()
        else:
            self._begun[place], self._ended[place] = map(self._instants.at, on_device)
        self._left[place // self._tasks] -= 1
        self.open -= 1
        return self._ended[place] - self._begun[place]

    def make_ready(self, instance: int, last: int) -> None:
        """Note that ``instance`` has waited for the end of ``last``."""
        first = self._first * self._tasks
        self._ready[instance - first] = max(self._ready[instance - first], self._ended[last - first])

    def has_ended(self, instance: int) -> bool:
        """Whether ``instance`` has ended."""
        place = instance - self._first * self._tasks
        return place < 0 or self._ended[place] >= 0

    def ended_in(self, iteration: int) -> list[int]:
        """Return the tasks of a kept iteration that have ended."""
        first = (iteration - self._first) * self._tasks
        return [task for task, end in enumerate(self._ended[first : first + self._tasks]) if end >= 0]

    def is_complete(self, before: float) -> bool:
        """Whether all tasks of the iterations before ``before`` have ended."""
        return before < self._first or not any(self._left[: int(before) - self._first])

    def trace(self, schedule: Schedule, clock: Clock) -> Trace:
        """Return the trace of all kept iterations, which must have ended."""
        shape = (len(self._left), self._tasks)
        ready, begun, ended = (np.array(times, np.int64).reshape(shape) for times in (self._ready, self._begun, self._ended))
        return Trace(schedule, clock, ready, begun, ended)

    def _forget(self) -> None:
        """Drop the times of old iterations once there are twice as many as must be kept."""
        if self._keep is None or len(self._left) < 2 * self._keep or any(self._left[: self._keep]):
            return
        self._first += self._keep
        del self._left[: self._keep]
        for times in (self._ready, self._begun, self._ended):
            del times[: self._keep * self._tasks]
