"""Threads that work through a schedule: one per lane, each waits for the edges, occupies, signals.

A run is open-ended: iterations are admitted one by one, so the tail of one overlaps the head of the next wherever no edge
forbids it, and whoever needs a result waits for that task.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import numpy as np
import torch

from autohete.errors import TaskError, check_member
from autohete.queues import lane_queues
from autohete.schedule import CPU, Schedule, Task, TaskId
from autohete.sharing import SharedWork, Sharing
from autohete.trace import Clock, Trace

#: What a lane does for a task: the task and its iteration.
Action = Callable[[Task, int], None]

#: How long a thread may keep Python's lock while another lane wants it. The default of 5 ms is as long as a small task.
_SWITCH_SECONDS = 1e-4


class LaneThreads:
    """Executes admitted iterations of ``schedule``.

    Args:
        schedule: a valid schedule.
        action: called in the thread of the task's lane.
        clock: whose seconds the trace is in.
        paced: make each task last as long as the schedule says: until ``max(lane free, edges satisfied) + duration``, by
            absolute deadlines, so that errors do not add up; longer while lanes share a bandwidth. Work that takes longer
            than that is noted in ``late``.
        update_threads: what torch may use in the lane that updates on the CPU; in every other lane it is one.
        around: a context that each lane's thread works in, such as a CUDA stream of its own.
        history: iterations whose times are kept, at least; older ones that have ended may be forgotten. None: all.
    """

    def __init__(
        self,
        schedule: Schedule,
        action: Action,
        clock: Clock,
        *,
        paced: bool = False,
        update_threads: int = 1,
        history: int | None = None,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        check_member("clock", clock, Clock)
        self._schedule, self._action, self._clock, self._paced = schedule, action, clock, paced
        self._update_threads, self._history, self._around = update_threads, history, around
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
        self._finished = 0
        self._admitted = 0
        self._closing = False
        self._failure: tuple[str, BaseException] | None = None
        #: How long each lane has worked (ns), by name.
        self.busy_ns = {lane.name: 0 for lane in schedule.lanes}
        #: Paced tasks whose work ended after their deadline, and by how much (ns).
        self.late: dict[str, int] = {}
        # One lock guards everything; who waits for what is woken for nothing else: a thread that wakes wants Python's lock.
        self._lock = threading.Lock()
        self._pushed = [threading.Condition(self._lock) for _ in schedule.lanes]
        self._ended = threading.Condition(self._lock)
        self._awaited: set[int] = set()
        self._rates = threading.Condition(self._lock)
        self._begin = time.perf_counter_ns()
        self._threads = [
            threading.Thread(target=self._lane, args=(lane,), name=f"autohete-{schedule.lanes[lane].name}", daemon=True)
            for lane, tasks in enumerate(graph.lane_tasks)
            if tasks
        ]
        self._switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_SECONDS, self._switch_seconds))
        atexit.register(self._abandon)  # a thread that is inside torch when Python ends would abort the process
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> LaneThreads:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(drain=kind is None)

    @property
    def admitted(self) -> int:
        """How many iterations have been admitted."""
        return self._admitted

    def admit(self) -> int:
        """Let the next iteration begin; returns its number."""
        with self._lock:
            self._raise_failure()
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
            self._admitted += 1
            for task, count in enumerate(waits):
                if not count:
                    self._push(task, iteration * self._tasks + task)
            return iteration

    def _push(self, task: int, instance: int) -> None:
        lane = self._lane_of[task]
        self._queues[lane].push(instance)
        self._pushed[lane].notify()

    def wait(self, task: TaskId, iteration: int) -> None:
        """Return when ``task`` of ``iteration`` has ended.

        Raises:
            TaskError: any task has failed.
        """
        with self._lock:
            if not self._has_ended(iteration, self._index[task]):
                self._awaited.add(iteration * self._tasks + self._index[task])
            self._ended.wait_for(lambda: self._failure is not None or self._has_ended(iteration, self._index[task]))
            self._raise_failure()

    def drain(self) -> None:
        """Return when everything admitted has ended.

        Raises:
            TaskError: any task has failed.
        """
        with self._lock:
            self._ended.wait_for(lambda: self._failure is not None or self._finished == self._admitted * self._tasks)
            self._raise_failure()

    def close(self, *, drain: bool = True) -> None:
        """End all threads, after everything admitted (``drain``) or as soon as the tasks that run now have ended."""
        try:
            if drain:
                self.drain()
        finally:
            with self._lock:
                self._end_all()
            for thread in self._threads:
                thread.join()
            atexit.unregister(self._abandon)
            sys.setswitchinterval(self._switch_seconds)

    def _abandon(self) -> None:
        self.close(drain=False)

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

    def _forget(self) -> None:
        """Drop the times of old iterations once there are twice as many as are to be kept."""
        if self._history is None or self._admitted - self._first < 2 * self._history:
            return
        gone = self._history * self._tasks
        if all(end >= 0 for end in self._end[:gone]):
            self._first += self._history
            for times in (self._waits, self._ready, self._start, self._end, self._due):
                del times[:gone]

    def _now(self) -> int:
        return time.perf_counter_ns() - self._begin

    def _raise_failure(self) -> None:
        if self._failure is not None:
            name, error = self._failure
            if isinstance(error, TaskError):  # says itself which task it was
                raise error
            raise TaskError(f"{name} failed: {type(error).__name__}: {error}") from error

    def _lane(self, lane: int) -> None:
        # Before anything else: a fresh thread ignores the main thread's setting.
        torch.set_num_threads(self._update_threads if self._schedule.lanes[lane].name == CPU else 1)
        with self._around():
            self._work_through(lane)

    def _work_through(self, lane: int) -> None:
        free = 0
        while True:
            with self._lock:
                instance = self._queues[lane].pop()
                while instance is None and not self._closing:
                    self._pushed[lane].wait()
                    instance = self._queues[lane].pop()
                if instance is None or self._closing:
                    return
                iteration, task = divmod(instance, self._tasks)
                self._start[self._place(instance)] = self._now()
                due = max(free, self._due[self._place(instance)])
            try:
                self._action(self._schedule.tasks[task], iteration)
            except BaseException as error:  # whatever it is reaches the caller, and stops the other lanes
                self._fail(self._schedule.tasks[task].id.at(iteration), error)
                return
            duration = self._schedule.tasks[task].duration_ns
            if self._schedule.lanes[lane].name in self._shared:
                due = self._share(self._schedule.lanes[lane].name, due, duration, instance)
            else:
                due += duration
                if self._paced:
                    self._sleep_until(due, instance)
            free = due
            self._complete(instance, task, due)

    def _sleep_until(self, due: int, instance: int) -> None:
        left = due - self._now()
        if left < 0:
            self._note_late(instance, -left)
        while left > 0 and not self._closing:
            time.sleep(left * 1e-9)
            left = due - self._now()

    def _share(self, lane: str, planned: int, duration: int, instance: int) -> int:
        """Sleep until ``duration`` of undisturbed work is done, while other lanes that share come and go; its planned end."""
        with self._lock:
            # Two lanes may be booked in another order than they were planned in: at most a wake-up apart.
            self._work.begin(lane, duration, planned)
            self._rates.notify_all()
            if (after := self._now() - self._work.due[lane]) > 0:
                self._note_late(instance, after)
            while (left := self._work.due[lane] - self._now()) > 0 and not self._closing:
                self._rates.wait(left * 1e-9)
            due = self._work.due[lane]
            self._work.end(lane, due)
            self._rates.notify_all()
            return due

    def _note_late(self, instance: int, by_ns: int) -> None:
        iteration, task = divmod(instance, self._tasks)
        self.late[self._schedule.tasks[task].id.at(iteration)] = by_ns

    def _complete(self, instance: int, task: int, due: int) -> None:
        with self._lock:
            now = self._now()
            place = self._place(instance)
            self._end[place] = now
            self.busy_ns[self._schedule.tasks[task].lane] += now - self._start[place]
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
            if instance in self._awaited or self._finished == self._admitted * self._tasks:
                self._awaited.discard(instance)
                self._ended.notify_all()

    def _fail(self, name: str, error: BaseException) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = (name, error)
            self._end_all()

    def _end_all(self) -> None:
        """Let every thread that waits see that nothing more will come; the lock is held."""
        self._closing = True
        for condition in (*self._pushed, self._ended, self._rates):
            condition.notify_all()
