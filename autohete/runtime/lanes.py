"""Threads that execute a schedule: one per lane; each waits for a task's edges, runs the task, and signals its end.

A run is open-ended: iterations are admitted one by one, so the tail of one overlaps the head of the next wherever no edge
forbids it. A caller that needs a result waits for its task.

A task that fails stops its own iteration and all later ones: none of their tasks starts any more. No task of an earlier
iteration depends on them, so earlier iterations run to their end before the failure reaches the caller. The model is then in
the state after the last complete iteration, except for blocks that the failed one has already updated.
:meth:`LaneThreads.state` names them.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch

from autohete.errors import AutoHeteError, InputError, TaskError, check_member, check_switch, check_whole
from autohete.execution.queues import lane_queues
from autohete.execution.sharing import SharedWork, Sharing
from autohete.execution.trace import Clock, Trace
from autohete.runtime.closing import Closing
from autohete.schedule import Kind, Schedule, Task, TaskId, graph_of, validate

#: Function that performs a task, given the task and its iteration.
Action = Callable[[Task, int], None]


class Booking(Protocol):
    """Counts memory exactly when the trace records that tasks begin and end, so that both have the same order."""

    def begin(self, task: Task, iteration: int) -> None:
        """Count the buffers of ``task``. An exception makes the task fail."""

    def end(self, task: Task, iteration: int) -> None:
        """Free what ``task`` frees."""


#: Time for which a thread may keep the GIL while another lane wants it. The default of 5 ms is as long as a small task.
_SWITCH_SECONDS = 1e-4
#: Longest single sleep of a paced task, so that it notices when the run is abandoned.
_NAP_SECONDS = 0.1
_UPDATES = (Kind.GPU_UPDATE, Kind.CPU_UPDATE)


class LaneThreads(Closing):
    """Executes admitted iterations of ``schedule``.

    Args:
        schedule: a valid schedule.
        action: called in the thread of the task's lane.
        clock: clock of the trace.
        booking: called at each task's begin and end; None: nothing is called.
        paced: make each task last as long as in the schedule, until ``max(lane free, edges satisfied) + duration``. Deadlines
            are absolute, so that errors do not add up; they move while lanes share a bandwidth. Work that takes longer is
            recorded in ``late``.
        threads: number of torch threads in a lane, by its name; one in every other lane.
        around: context manager around each lane's thread, such as its own CUDA stream.
        history: minimum number of iterations whose times are kept; older ones that have ended may be dropped. None: all.

    Raises:
        InputError: an argument has the wrong type.
        ScheduleError: the schedule cannot be executed.
    """

    def __init__(
        self,
        schedule: Schedule,
        action: Action,
        clock: Clock,
        *,
        booking: Booking | None = None,
        paced: bool = False,
        threads: Mapping[str, int] | None = None,
        history: int | None = None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        check_member("clock", clock, Clock)
        check_switch("paced", paced)
        for name, number in (threads or {}).items():
            check_whole(f"threads of lane {name}", number, 1)
        if history is not None:
            check_whole("history", history, 1)
        self._schedule, self._action, self._clock, self._paced = schedule, action, clock, paced
        self._booking = booking
        self._torch_threads, self._history, self._around = threads or {}, history, around
        sharing = Sharing(schedule)
        self._shared = sharing.lanes if paced else frozenset()
        self._work = SharedWork(sharing)
        graph = graph_of(validate(schedule))
        self._lane_of, self._successors = graph.lane, graph.successors
        self._both = [waits + back for waits, back in graph.waits]
        self._same = [waits for waits, _ in graph.waits]
        self._index = graph.index
        self._tasks = len(schedule.tasks)
        self._queues = lane_queues(graph)
        # Per instance, starting with the first kept iteration; extended by each admitted iteration.
        self._first = 0
        self._waits: list[int] = []
        self._ready: list[int] = []
        self._start: list[int] = []
        self._end: list[int] = []
        self._due: list[int] = []  # planned end, for pacing
        #: Number of tasks that have not ended, per iteration, starting with the first kept one.
        self._left: list[int] = []
        self._finished = 0
        self._admitted = 0
        #: No task of this iteration or a later one starts any more.
        self._stop_from = math.inf
        self._failures: list[tuple[str, BaseException]] = []
        self._error: TaskError | None = None
        self._closing = self._abandoned = self._torn = self._released = False
        #: Lanes that are running a task.
        self._running: set[int] = set()
        #: The last iteration in which each update has ended; the iteration in which an update failed midway.
        self._updated = {task: -1 for task, each in enumerate(schedule.tasks) if each.id.kind in _UPDATES}
        self._broken: dict[int, int] = {}
        #: Time that each lane has worked (ns), by name.
        self.busy_ns = {lane.name: 0 for lane in schedule.lanes}
        #: Paced tasks whose work ended after their deadline, and the delay (ns).
        self.late: dict[str, int] = {}
        # One lock guards everything. Each waiter has its own wake-up, since every thread that wakes competes for the GIL.
        # The caller, which a signal may interrupt at any time, waits on a queue: a condition would lose its lock.
        self._lock = threading.Lock()
        self._pushed = [threading.Condition(self._lock) for _ in schedule.lanes]
        self._waiters: list[tuple[int, SimpleQueue[None]]] = []
        self._rates = threading.Condition(self._lock)
        self._begin = time.perf_counter_ns()
        self._latest = -1
        self._process = os.getpid()
        self.threads = [
            threading.Thread(target=self._lane, args=(lane,), name=f"autohete-{schedule.lanes[lane].name}", daemon=True)
            for lane, tasks in enumerate(graph.lane_tasks)
            if tasks
        ]
        _switch_interval.shorten()
        atexit.register(self._at_exit)  # a thread inside torch at Python's exit would abort the process
        try:
            for thread in self.threads:
                thread.start()
        except BaseException:  # the system is out of threads
            self.close(drain=False)
            raise

    @property
    def admitted(self) -> int:
        """Number of admitted iterations."""
        return self._admitted

    def admit(self) -> int:
        """Admit the next iteration, and return its number.

        Raises:
            TaskError: a task has failed.
        """
        self._check_usable()
        if self._failures:
            self.drain()
        with self._lock:
            self._torn = True  # until the end, in case of an interrupt in between
            iteration = self._admitted
            self._forget()
            first = (iteration - self._first) * self._tasks
            # Edges from tasks that have already ended need no wait.
            waits = list(self._both if iteration else self._same)
            if iteration:
                for task, successors in enumerate(self._successors):
                    if self._end[first - self._tasks + task] >= 0:
                        for successor, back in successors:
                            waits[successor] -= back
            self._waits += waits
            now = self._next_instant()
            for times in (self._ready, self._due):
                times += [now] * self._tasks
            for times in (self._start, self._end):
                times += [-1] * self._tasks
            self._left.append(self._tasks)
            self._admitted += 1
            for task, count in enumerate(waits):
                if not count:
                    self._push(task, iteration * self._tasks + task)
            self._torn = False
            return iteration

    def _push(self, task: int, instance: int) -> None:
        lane = self._lane_of[task]
        self._queues[lane].push(instance)
        self._pushed[lane].notify()

    def wait(self, task: TaskId, iteration: int) -> None:
        """Wait until ``task`` of ``iteration`` has ended.

        Raises:
            TaskError: it cannot end, because a task has failed; raised once all running tasks have ended.
        """
        index = self._index[task]
        self._wait_for(lambda: self._has_ended(iteration, index), iteration * self._tasks + index)

    def drain(self) -> None:
        """Wait until all admitted iterations have ended.

        Raises:
            TaskError: a task has failed; raised once all running tasks have ended.
        """
        self._wait_for(self._all_ended, _EVERYTHING)

    def updated(self, iteration: int) -> list[int]:
        """Return the blocks whose update in ``iteration`` or later has ended or failed midway. Call after :meth:`drain`."""
        tasks = self._schedule.tasks
        return sorted({tasks[i].id.unit for i in self._updated if max(self._updated[i], self._broken.get(i, -1)) >= iteration})

    def state(self) -> str:
        """Describe which steps the blocks' parameters are from, once nothing runs; empty if the schedule has no updates."""
        tasks = self._schedule.tasks
        broken = {tasks[task].id.unit: step for task, step in self._broken.items()}
        updated: dict[int, int] = {}
        for task, step in self._updated.items():
            unit = tasks[task].id.unit
            earlier = updated.setdefault(unit, step)
            if step != earlier:  # one of two sides, each of which updates a part
                broken.setdefault(unit, max(step, earlier))
        return _state(updated, broken)

    def abandon(self) -> None:
        """Start no further task, and release all waiting callers. Does not wait and takes no lock."""
        self._abandoned, self._stop_from = True, -math.inf
        self._wake()

    def close(self, *, drain: bool = True) -> None:
        """End all threads, after all admitted iterations (``drain``) or as soon as the running tasks have ended.

        If interrupted while it drains, it only waits for the running tasks; a note on the interrupt says which steps the
        blocks' parameters are from.

        Raises:
            TaskError: a task has failed, and this is the first call.
        """
        if os.getpid() != self._process:
            return  # the threads are the parent's
        try:
            # An iteration whose admission was interrupted may never end.
            if drain and not (self._closing or self._torn):
                self.drain()
        except BaseException as error:
            self._end_all()
            if not isinstance(error, AutoHeteError):
                error.add_note(self.state())
            raise
        else:
            self._end_all()

    def _end_all(self) -> None:
        self._closing, self._stop_from = True, -math.inf
        with self._lock:
            for condition in (*self._pushed, self._rates):
                condition.notify_all()
        self._wake()
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()
        with self._lock:
            released, self._released = self._released, True
        if not released:
            atexit.unregister(self._at_exit)
            _switch_interval.restore()

    def _at_exit(self) -> None:
        try:
            self.close()
        except (AutoHeteError, KeyboardInterrupt):
            self.close(drain=False)  # there is no caller left to raise to

    def trace(self) -> Trace:
        """Return the trace of all kept iterations, which must have ended."""
        shape = (self._admitted - self._first, self._tasks)
        ready, start, end = (np.array(times, np.int64).reshape(shape) for times in (self._ready, self._start, self._end))
        return Trace(self._schedule, self._clock, ready, start, end)

    def _place(self, instance: int) -> int:
        return instance - self._first * self._tasks

    def _has_ended(self, iteration: int, task: int) -> bool:
        place = (iteration - self._first) * self._tasks + task
        return place < 0 or self._end[place] >= 0

    def _all_ended(self) -> bool:
        return self._finished == self._admitted * self._tasks

    def _settled(self) -> bool:
        """Whether a task has failed and all tasks that can still end have ended."""
        if not self._failures or self._running:
            return False
        return self._stop_from < self._first or not any(self._left[: int(self._stop_from) - self._first])

    def _wait_for(self, over: Callable[[], bool], instance: int) -> None:
        """Wait until ``over()`` is true, which may happen when ``instance`` ends."""
        self._check_usable()
        news: SimpleQueue[None] = SimpleQueue()
        waiter = (instance, news)
        self._waiters.append(waiter)
        try:
            while True:
                with self._lock:
                    if over():
                        return
                    if self._settled():
                        break
                    if self._abandoned:
                        raise InputError("the training was closed before this step had ended: its loss is unknown")
                news.get()
        finally:
            self._waiters.remove(waiter)
        raise self._failure()

    def _wake(self, instance: int | None = None) -> None:
        """Wake the callers that wait for ``instance``; None: all callers."""
        for awaited, news in list(self._waiters):
            if instance is None or awaited == instance:
                news.put(None)

    def _forget(self) -> None:
        """Drop the times of old iterations once there are twice as many as must be kept."""
        if self._history is None or self._admitted - self._first < 2 * self._history:
            return
        if not any(self._left[: self._history]):
            self._first += self._history
            del self._left[: self._history]
            for times in (self._waits, self._ready, self._start, self._end, self._due):
                del times[: self._history * self._tasks]

    def _now(self) -> int:
        return time.perf_counter_ns() - self._begin

    def _next_instant(self) -> int:
        """Return the time, later than any before. Call with the lock: times then have the order of what they are times of, even
        where the clock ticks slowly, or differs between cores.
        """
        self._latest = max(self._now(), self._latest + 1)
        return self._latest

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise InputError(
                f"the lanes are threads of process {self._process}, and this is its fork {os.getpid()}: use them there"
            )
        if self._closing and not self._failures:
            raise InputError("the lanes are closed: create new ones")

    def _failure(self) -> TaskError:
        """Return the error that describes what has failed and the state of the parameters."""
        with self._lock:
            if self._error is None:
                (name, error), *others = self._failures
                # A TaskError already names its task.
                said = str(error) if isinstance(error, TaskError) else f"{name} failed: {type(error).__name__}: {error}"
                said += "".join(f"; then {other} failed: {type(e).__name__}: {e}" for other, e in others)
                said = ". ".join(filter(None, (said.rstrip("."), self.state())))
                if isinstance(error, TaskError):
                    self._error = error
                    error.args = (said, *error.args[1:])
                else:
                    self._error = TaskError(said)
                    self._error.__cause__ = error
            return self._error

    def _lane(self, lane: int) -> None:
        try:
            # First of all: a new thread ignores the main thread's setting.
            torch.set_num_threads(self._torch_threads.get(self._schedule.lanes[lane].name, 1))
            with self._around():
                self._work_through(lane)
        except BaseException as error:  # not a task's: this lane has ended, so the others cannot continue
            self._fail(lane, f"lane {self._schedule.lanes[lane].name}", error, -math.inf)

    def _work_through(self, lane: int) -> None:
        free = 0
        while (begun := self._next(lane)) is not None:
            instance, refusal = begun
            iteration, task = divmod(instance, self._tasks)
            due = max(free, self._due[self._place(instance)])
            try:
                if refusal is not None:
                    raise refusal
                self._action(self._schedule.tasks[task], iteration)
            except BaseException as error:  # every exception reaches the caller
                if task in self._updated and error is not refusal:  # a refusal comes before anything is updated
                    self._broken[task] = iteration
                self._fail(lane, self._schedule.tasks[task].id.at(iteration), error, iteration)
                continue
            duration = self._schedule.tasks[task].duration_ns
            if self._schedule.lanes[lane].name in self._shared:
                due = self._share(self._schedule.lanes[lane].name, due, duration, instance)
            else:
                due += duration
                if self._paced:
                    self._sleep_until(due, instance)
            free = due
            self._complete(lane, instance, task, due)

    def _next(self, lane: int) -> tuple[int, BaseException | None] | None:
        """Wait for the next instance; return it with the exception of its booking, if any. Returns None at the end."""
        with self._lock:
            while True:
                instance = self._queues[lane].pop()
                if instance is None:
                    if self._closing:
                        return None
                    self._pushed[lane].wait()
                elif instance // self._tasks < self._stop_from:
                    self._running.add(lane)
                    self._start[self._place(instance)] = self._next_instant()
                    return instance, self._book(instance)

    def _book(self, instance: int) -> BaseException | None:
        if self._booking is not None:
            iteration, task = divmod(instance, self._tasks)
            try:
                self._booking.begin(self._schedule.tasks[task], iteration)
            except BaseException as error:  # the lane raises it once its lock is free
                return error
        return None

    def _sleep_until(self, due: int, instance: int) -> None:
        left = due - self._now()
        if left < 0:
            self._note_late(instance, -left)
        while left > 0 and not self._abandoned:
            time.sleep(min(left * 1e-9, _NAP_SECONDS))
            left = due - self._now()

    def _share(self, lane: str, planned: int, duration: int, instance: int) -> int:
        """Sleep until ``duration`` of undisturbed work is done at shared rates; return the planned end."""
        with self._lock:
            # Two lanes may be booked in a different order than planned, but at most one wake-up apart.
            self._work.begin(lane, duration, planned)
            self._rates.notify_all()
            if (after := self._now() - self._work.due[lane]) > 0:
                self._note_late(instance, after)
            while (left := self._work.due[lane] - self._now()) > 0 and not self._abandoned:
                self._rates.wait(min(left * 1e-9, _NAP_SECONDS))
            due = self._work.due[lane]
            self._work.end(lane, due)
            self._rates.notify_all()
            return due

    def _note_late(self, instance: int, by_ns: int) -> None:
        iteration, task = divmod(instance, self._tasks)
        self.late[self._schedule.tasks[task].id.at(iteration)] = by_ns

    def _complete(self, lane: int, instance: int, task: int, due: int) -> None:
        with self._lock:
            now = self._next_instant()
            place = self._place(instance)
            self._end[place] = now
            if self._booking is not None:
                self._booking.end(self._schedule.tasks[task], instance // self._tasks)
            if task in self._updated:
                self._updated[task] = instance // self._tasks
            self.busy_ns[self._schedule.tasks[task].lane] += now - self._start[place]
            self._left[place // self._tasks] -= 1
            self._finished += 1
            for successor, back in self._successors[task]:
                distance = successor - task + back * self._tasks
                target = place + distance
                if target < len(self._waits):
                    self._waits[target] -= 1
                    self._due[target] = max(self._due[target], due)
                    if not self._waits[target]:
                        self._ready[target] = now
                        self._push(successor, instance + distance)
            self._running.discard(lane)
            if self._waiters:
                self._wake(instance)
                if self._all_ended():
                    self._wake(_EVERYTHING)
                if self._failures and self._settled():
                    self._wake()

    def _fail(self, lane: int, name: str, error: BaseException, stop_from: float) -> None:
        with self._lock:
            self._failures.append((name, error))
            self._stop_from = min(self._stop_from, stop_from)
            self._running.discard(lane)
            self._wake()


#: Awaited by callers that wait for all tasks.
_EVERYTHING = -1


def _state(updated: dict[int, int], broken: dict[int, int]) -> str:
    """Describe which steps the parameters of blocks are from.

    Args:
        updated: the last step whose update of a block has ended; -1: none.
        broken: a step whose update of a block failed midway, or has ended on one of two sides.
    """
    if not updated:
        return ""
    of_step: dict[int, list[int]] = {}
    for unit, step in updated.items():
        if unit not in broken:
            of_step.setdefault(step, []).append(unit)
    if len(of_step) == 1 and not broken:
        (step,) = of_step
        return f"All parameters are from step {step}, the last complete one" if step >= 0 else "No parameter has been changed"
    parts = [
        f"{f'step {step}' if step >= 0 else 'before the first step'}: {listed(units)}"
        for step, units in sorted(of_step.items(), reverse=True)
    ]
    parts += [f"updated in part by step {step}: {listed([unit])}" for unit, step in sorted(broken.items())]
    return f"Parameters are from different steps ({'; '.join(parts)}): load a saved state to continue from a complete step"


def listed(units: Iterable[int]) -> str:
    """Format block numbers as text, such as ``blocks 0, 2 to 5``."""
    runs: list[list[int]] = []
    for unit in sorted(units):
        if runs and runs[-1][-1] == unit - 1:
            runs[-1].append(unit)
        else:
            runs.append([unit])
    said = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return f"block {said}" if said.isdecimal() else f"blocks {said}"


class _SwitchInterval:
    """Shortens the GIL's switch interval while any lanes are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._before = 0.0

    def shorten(self) -> None:
        """Called by lanes that open."""
        with self._lock:
            if not self._open:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(_SWITCH_SECONDS, self._before))
            self._open += 1

    def restore(self) -> None:
        """Called by lanes that have closed."""
        with self._lock:
            self._open -= 1
            if not self._open:
                sys.setswitchinterval(self._before)


_switch_interval = _SwitchInterval()
