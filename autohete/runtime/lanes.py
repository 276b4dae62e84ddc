"""Threads that work through a schedule: one per lane, each waits for the edges, occupies, signals.

A run is open-ended: iterations are admitted one by one, so the tail of one overlaps the head of the next wherever no edge
forbids it, and a caller that needs a result waits for its task.

A task that fails stops its own iteration and the later ones: of these nothing more begins. No task of an earlier iteration
depends on them, so those run to their end before the failure reaches the caller, whose model is then of the last complete
iteration, but for the blocks that the failed one has updated already. :meth:`LaneThreads.state` names them.
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
from types import TracebackType
from typing import Protocol

import numpy as np
import torch

from autohete.errors import AutoHeteError, InputError, TaskError, check_member, check_switch, check_whole
from autohete.execution.queues import lane_queues
from autohete.execution.sharing import SharedWork, Sharing
from autohete.execution.trace import Clock, Trace
from autohete.schedule import Kind, Schedule, Task, TaskId

#: What a lane does for a task: the task and its iteration.
Action = Callable[[Task, int], None]


class Booking(Protocol):
    """Counts memory at the very moments at which a trace says that tasks begin and end, so that both tell the same order."""

    def begin(self, task: Task, iteration: int) -> None:
        """``task`` has its buffers from now on. What it raises is the task's failure."""

    def end(self, task: Task, iteration: int) -> None:
        """What ``task`` frees is free."""


#: How long a thread may keep Python's lock while another lane wants it. The default of 5 ms is as long as a small task.
_SWITCH_SECONDS = 1e-4
#: The longest piece that a paced task sleeps for, so that it notices when the run is abandoned.
_NAP_SECONDS = 0.1
_UPDATES = (Kind.GPU_UPDATE, Kind.CPU_UPDATE)


class LaneThreads:
    """Executes admitted iterations of ``schedule``.

    Args:
        schedule: a valid schedule.
        action: called in the thread of the task's lane.
        clock: whose seconds the trace is in.
        booking: called at each task's begin and end; None: nothing is.
        paced: make each task last as long as the schedule says: until ``max(lane free, edges satisfied) + duration``, by
            absolute deadlines, so that errors do not add up; longer while lanes share a bandwidth. Work that takes longer
            than that is noted in ``late``.
        threads: what torch may use in a lane, by its name; in every other lane it is one.
        around: a context that each lane's thread works in, such as a CUDA stream of its own.
        history: iterations whose times are kept, at least; older ones that have ended may be forgotten. None: all.

    Raises:
        InputError: an argument is of another type.
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
        graph = schedule.validate().graph()
        self._lane_of, self._successors = graph.lane, graph.successors
        self._both = [waits + back for waits, back in graph.waits]
        self._same = [waits for waits, _ in graph.waits]
        self._index = graph.index
        self._tasks = len(schedule.tasks)
        self._queues = lane_queues(graph)
        # Per instance from the first iteration that is kept; they grow with each that is admitted.
        self._first = 0
        self._waits: list[int] = []
        self._ready: list[int] = []
        self._start: list[int] = []
        self._end: list[int] = []
        self._due: list[int] = []  # planned end, for pacing
        #: Tasks that have not ended, per iteration from the first that is kept.
        self._left: list[int] = []
        self._finished = 0
        self._admitted = 0
        #: Of this iteration and the later ones nothing more begins.
        self._stop_from = math.inf
        self._failures: list[tuple[str, BaseException]] = []
        self._error: TaskError | None = None
        self._closing = self._abandoned = self._torn = self._released = False
        #: Lanes that are inside of a task.
        self._running: set[int] = set()
        #: For each update its last iteration that has ended, and that of one that failed midway.
        self._updated = {task: -1 for task, each in enumerate(schedule.tasks) if each.id.kind in _UPDATES}
        self._broken: dict[int, int] = {}
        #: How long each lane has worked (ns), by name.
        self.busy_ns = {lane.name: 0 for lane in schedule.lanes}
        #: Paced tasks whose work ended after their deadline, and by how much (ns).
        self.late: dict[str, int] = {}
        # One lock guards everything; who waits for what is woken for nothing else: a thread that wakes wants Python's lock.
        # The caller, whom a signal may interrupt at any time, waits at a queue instead: a condition would lose its lock.
        self._lock = threading.Lock()
        self._pushed = [threading.Condition(self._lock) for _ in schedule.lanes]
        self._waiters: list[tuple[int, SimpleQueue[None]]] = []
        self._rates = threading.Condition(self._lock)
        self._begin = time.perf_counter_ns()
        self._process = os.getpid()
        self.threads = [
            threading.Thread(target=self._lane, args=(lane,), name=f"autohete-{schedule.lanes[lane].name}", daemon=True)
            for lane, tasks in enumerate(graph.lane_tasks)
            if tasks
        ]
        _switch_interval.shorten()
        atexit.register(self._at_exit)  # a thread that is inside torch when Python ends would abort the process
        try:
            for thread in self.threads:
                thread.start()
        except BaseException:  # the system has no more threads to give
            self.close(drain=False)
            raise

    def __enter__(self) -> LaneThreads:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except AutoHeteError as failure:
            if error is None:
                raise
            if failure is not error:
                error.add_note(str(failure))

    @property
    def admitted(self) -> int:
        """How many iterations have been admitted."""
        return self._admitted

    def admit(self) -> int:
        """Let the next iteration begin; returns its number.

        Raises:
            TaskError: any task has failed.
        """
        self._check_usable()
        if self._failures:
            self.drain()
        with self._lock:
            self._torn = True  # until it is done, should an interrupt come between
            iteration = self._admitted
            self._forget()
            first = (iteration - self._first) * self._tasks
            # Edges from an iteration that has ended already have nothing left to wait for.
            waits = list(self._both if iteration else self._same)
            if iteration:
                for task, successors in enumerate(self._successors):
                    if self._end[first - self._tasks + task] >= 0:
                        for successor, back in successors:
                            waits[successor] -= back
            self._waits += waits
            now = self._now()
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
        """Return when ``task`` of ``iteration`` has ended.

        Raises:
            TaskError: it will not, because a task has failed; raised when all that still runs has ended.
        """
        index = self._index[task]
        self._wait_for(lambda: self._has_ended(iteration, index), iteration * self._tasks + index)

    def drain(self) -> None:
        """Return when everything admitted has ended.

        Raises:
            TaskError: any task has failed; raised when all that still runs has ended.
        """
        self._wait_for(self._all_ended, _EVERYTHING)

    def updated(self, iteration: int) -> list[int]:
        """Blocks whose update of ``iteration``, or of a later one, has ended or failed midway. Call it after :meth:`drain`."""
        tasks = self._schedule.tasks
        return sorted({tasks[i].id.unit for i in self._updated if max(self._updated[i], self._broken.get(i, -1)) >= iteration})

    def state(self) -> str:
        """A sentence on which steps the blocks' parameters are of, once nothing runs; empty if nothing is updated."""
        updated, broken = (
            {self._schedule.tasks[task].id.unit: step for task, step in steps.items()}
            for steps in (self._updated, self._broken)
        )
        return _state(updated, broken)

    def abandon(self) -> None:
        """Begin no further task, and release all waiting callers. Does not wait and takes no lock."""
        self._abandoned, self._stop_from = True, -math.inf
        self._wake()

    def close(self, *, drain: bool = True) -> None:
        """End all threads, after everything admitted (``drain``) or as soon as the tasks that run now have ended.

        Interrupted while it waits for the former, it does the latter; a note on the interrupt says which steps the blocks'
        parameters are of.

        Raises:
            TaskError: any task has failed, and this is the first time that the lanes are closed.
        """
        if os.getpid() != self._process:
            return  # the threads are the parent's
        try:
            # An admission that was interrupted may never end.
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
        """The trace of all iterations that are kept, which must have ended."""
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
        """Whether a task has failed and all that can end after that has ended."""
        if not self._failures or self._running:
            return False
        return self._stop_from < self._first or not any(self._left[: int(self._stop_from) - self._first])

    def _wait_for(self, over: Callable[[], bool], instance: int) -> None:
        """Return when ``over``, which may become so when ``instance`` ends."""
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
                        raise InputError("the training was closed before this had ended: its loss is not known")
                news.get()
        finally:
            self._waiters.remove(waiter)
        raise self._failure()

    def _wake(self, instance: int | None = None) -> None:
        """Let those look who wait for ``instance``, or everybody."""
        for awaited, news in list(self._waiters):
            if instance is None or awaited == instance:
                news.put(None)

    def _forget(self) -> None:
        """Drop the times of old iterations once there are twice as many as are to be kept."""
        if self._history is None or self._admitted - self._first < 2 * self._history:
            return
        if not any(self._left[: self._history]):
            self._first += self._history
            del self._left[: self._history]
            for times in (self._waits, self._ready, self._start, self._end, self._due):
                del times[: self._history * self._tasks]

    def _now(self) -> int:
        return time.perf_counter_ns() - self._begin

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise InputError(
                f"the lanes are threads of process {self._process}, this is its fork {os.getpid()}: use them there"
            )
        if self._closing and not self._failures:
            raise InputError("the lanes are closed: make new ones")

    def _failure(self) -> TaskError:
        """What has failed, and what that leaves."""
        with self._lock:
            if self._error is None:
                (name, error), *others = self._failures
                # A TaskError says itself which task it was.
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
            # Before anything else: a fresh thread ignores the main thread's setting.
            torch.set_num_threads(self._torch_threads.get(self._schedule.lanes[lane].name, 1))
            with self._around():
                self._work_through(lane)
        except BaseException as error:  # not of a task: this lane has ended, so the others cannot go on
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
            except BaseException as error:  # whatever it is reaches the caller
                if task in self._updated and error is not refusal:  # which comes before anything is updated
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
        """The instance that begins now, once there is one, and what its booking has raised; None when there will be no more."""
        with self._lock:
            while True:
                instance = self._queues[lane].pop()
                if instance is None:
                    if self._closing:
                        return None
                    self._pushed[lane].wait()
                elif instance // self._tasks < self._stop_from:
                    self._running.add(lane)
                    self._start[self._place(instance)] = self._now()
                    return instance, self._book(instance)

    def _book(self, instance: int) -> BaseException | None:
        if self._booking is not None:
            iteration, task = divmod(instance, self._tasks)
            try:
                self._booking.begin(self._schedule.tasks[task], iteration)
            except BaseException as error:  # the lane raises it where its lock is free
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
        """Sleep until ``duration`` of undisturbed work is done, while other lanes that share come and go; its planned end."""
        with self._lock:
            # Two lanes may be booked in another order than they were planned in: at most a wake-up apart.
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
            now = self._now()
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
    """Which steps the parameters of blocks are of.

    Args:
        updated: the last step whose update of a block has ended; -1: none has.
        broken: a step whose update of a block failed midway.
    """
    if not updated:
        return ""
    of_step: dict[int, list[int]] = {}
    for block, step in updated.items():
        if block not in broken:
            of_step.setdefault(step, []).append(block)
    if len(of_step) == 1 and not broken:
        (step,) = of_step
        return f"All parameters are of step {step}, the last complete one" if step >= 0 else "No parameter has been changed"
    parts = [
        f"{f'step {step}' if step >= 0 else 'before the first step'}: {listed(blocks)}"
        for step, blocks in sorted(of_step.items(), reverse=True)
    ]
    parts += [f"updated in part by step {step}: {listed([block])}" for block, step in sorted(broken.items())]
    return f"Parameters are of different steps ({'; '.join(parts)}): load a saved state to go on from one step"


def listed(blocks: Iterable[int]) -> str:
    """``blocks 0, 2 to 5``."""
    runs: list[list[int]] = []
    for block in sorted(blocks):
        if runs and runs[-1][-1] == block - 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    said = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return f"block {said}" if said.isdecimal() else f"blocks {said}"


class _SwitchInterval:
    """How long a thread may keep Python's lock, shortened while any lanes are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._before = 0.0

    def shorten(self) -> None:
        """For lanes that open."""
        with self._lock:
            if not self._open:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(_SWITCH_SECONDS, self._before))
            self._open += 1

    def restore(self) -> None:
        """For lanes that have closed."""
        with self._lock:
            self._open -= 1
            if not self._open:
                sys.setswitchinterval(self._before)


_switch_interval = _SwitchInterval()
