"""Threads that execute a schedule: one per lane; each waits for a task's edges, runs the task, and signals its end.

A run is open-ended: iterations are admitted one by one, so the tail of one overlaps the head of the next wherever no edge
forbids it. A caller that needs a result waits for its task.

A task that fails stops its own iteration and all later ones: none of their tasks starts any more. No task of an earlier
iteration depends on them, so earlier iterations run to their end before the failure reaches the caller. The model is then in
the state after the last complete iteration, except for blocks that the failed one has already updated.
:attr:`LaneThreads.progress` names them.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import torch

from autohete.errors import AutoHeteError, InputError
from autohete.execution.trace import Trace
from autohete.runtime.ahead import NOTHING_AHEAD, ahead_of
from autohete.runtime.closing import Closing
from autohete.runtime.device import Event
from autohete.runtime.history import History, Instants
from autohete.runtime.lane_run import Booking, LaneRun
from autohete.runtime.pacing import Pace
from autohete.runtime.progress import UpdateProgress
from autohete.runtime.settings import Execution
from autohete.schedule import GPU, Discipline, Schedule, Task, TaskId, graph_of, validate
from autohete.schedule.order import delayed_units

#: Function that performs a task, given the task and its iteration. On a device that runs ahead, it returns what is left to do
#: once the device has done the work of the task.
Action = Callable[[Task, int], Callable[[], None] | None]

#: Time for which a thread may keep the GIL while another lane wants it. The default of 5 ms is as long as a small task.
_SWITCH_SECONDS = 1e-4


@dataclass(frozen=True, slots=True)
class _Issued:
    """A task that has been issued.

    Args:
        instance: it.
        begin, end: events before and behind its work.
        finish: what is left to do once the work is done.
    """

    instance: int
    begin: Event
    end: Event
    finish: Callable[[], None] | None


class LaneThreads(Closing):
    """Executes admitted iterations of ``schedule``.

    Args:
        schedule: a valid schedule.
        action: called in the thread of the task's lane.
        execution: pace, number of torch threads, and how much of the history is kept.
        booking: called at each task's begin and end; None: nothing is called.
        failed: called with what has failed, and how, as soon as it has; None: nothing is called.
        first: number of the first iteration.

    Attributes:
        progress: which step the parameters are from; call it once nothing runs.
        threads: one per lane that has tasks. On a device that runs ahead, that of a fifo lane only issues the tasks, and starts
            another that ends those that are done.

    Raises:
        ScheduleError: the schedule cannot be executed.
    """

    def __init__(
        self,
        schedule: Schedule,
        action: Action,
        execution: Execution | None = None,
        *,
        booking: Booking | None = None,
        failed: Callable[[str, BaseException], None] | None = None,
        first: int = 0,
    ) -> None:
        execution = execution or Execution()
        graph, instants = graph_of(validate(schedule)), Instants()
        self._schedule, self._action, self._clock, self._failed = schedule, action, execution.clock, failed
        #: Iterations count from here; those of everything below from 0.
        self._first = first
        self._accelerator = execution.accelerator
        self._ahead = ahead_of(schedule) if self._accelerator.runs_ahead else NOTHING_AHEAD
        self._run = LaneRun(schedule, History(len(schedule.tasks), instants, execution.history), booking, self._ahead)
        self._pace = Pace(schedule, instants) if execution.paced else None
        #: By iteration, until the next one runs on the GPU: the caller's context variables, which the model may read.
        self._contexts: dict[int, Context] = {}
        self.progress = UpdateProgress(schedule.tasks, delayed_units(schedule), first)
        self._process = os.getpid()
        self.threads = [
            threading.Thread(
                target=self._lane,
                args=(lane, execution.threads.get(schedule.lanes[lane].name, 1)),
                name=f"autohete-{schedule.lanes[lane].name}",
                daemon=True,
            )
            for lane, tasks in enumerate(graph.lane_tasks)
            if tasks
        ]
        _switch_interval.shorten(self)
        atexit.register(self._at_exit)  # a thread inside torch at Python's exit would abort the process
        try:
            for thread in self.threads:
                thread.start()
        except BaseException:  # the system is out of threads
            self.close(drain=False)
            raise

    @property
    def admitted(self) -> int:
        """Number of admitted iterations, with those before the first."""
        return self._first + self.executed

    @property
    def executed(self) -> int:
        """Number of admitted iterations of this schedule."""
        return self._run.history.admitted

    @property
    def idle(self) -> bool:
        """Whether all admitted iterations have ended."""
        return not self._run.history.open

    @property
    def busy_ns(self) -> dict[str, int]:
        """Time that each lane has worked (ns), by name."""
        return {engine.name: engine.busy_ns for engine in self._run.engines}

    @property
    def late(self) -> dict[str, int]:
        """Paced tasks whose work ended after their deadline, and the delay (ns)."""
        return {} if self._pace is None else self._pace.late

    def admit(self) -> int:
        """Admit the next iteration, and return its number.

        Raises:
            TaskError: a task has failed.
        """
        self._check_usable()
        if self._run.stop.failures:
            self.drain()
        if self._pace is not None:
            self._pace.admit(self.executed)
        self._contexts[self.admitted] = copy_context()
        return self._first + self._run.admit()

    def wait(self, task: TaskId, iteration: int) -> None:
        """Wait until ``task`` of ``iteration`` has ended.

        Raises:
            TaskError: it cannot end, because a task has failed; raised once all running tasks have ended.
        """
        self._wait_for((iteration - self._first) * len(self._schedule.tasks) + graph_of(self._schedule).index[task])

    def drain(self) -> None:
        """Wait until all admitted iterations have ended.

        Raises:
            TaskError: a task has failed; raised once all running tasks have ended.
        """
        self._wait_for(None)

    def abandon(self) -> None:
        """Start no further task, and release all waiting callers. Does not wait and takes no lock."""
        if self._pace is not None:
            self._pace.abandoned = True
        self._run.abandon()

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
            if drain and not (self._run.stop.closing or self._run.torn):
                self.drain()
        except BaseException as error:
            self._end_all()
            if not isinstance(error, AutoHeteError):
                error.add_note(self.progress.state())
            raise
        else:
            self._end_all()

    def trace(self) -> Trace:
        """Return the trace of all kept iterations, which must have ended."""
        return self._run.history.trace(self._schedule, self._clock)

    def _end_all(self) -> None:
        self._run.close()
        if self._pace is not None:
            self._pace.wake()
        for thread in self.threads:
            if thread.ident is not None:
                thread.join()
        atexit.unregister(self._at_exit)
        _switch_interval.restore(self)

    def _at_exit(self) -> None:
        try:
            self.close()
        except (AutoHeteError, KeyboardInterrupt):
            self.close(drain=False)  # there is no caller left to raise to

    def _wait_for(self, instance: int | None) -> None:
        """Wait until ``instance`` has ended; None: until all have."""
        self._check_usable()
        if not self._run.wait_for(instance):
            raise self._run.failure(self.progress.state)

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise InputError(
                f"the lanes are threads of process {self._process}, and this is its fork {os.getpid()}: use them there"
            )
        if self._run.stop.closing and not self._run.stop.failures:
            raise InputError("the lanes are closed: create new ones")

    def _lane(self, lane: int, threads: int) -> None:
        try:
            torch.set_num_threads(threads)  # first of all: a new thread ignores the main thread's setting
            torch.get_num_threads()  # keeps it: otherwise the first operation takes over what others have set meanwhile
            if lane in self._ahead.lanes:
                with self._accelerator.stream(), self._ending(lane) as issued:
                    self._work_through(lane, issued)
            else:
                self._work_through(lane, None)
        except BaseException as error:
            self._fail_lane(lane, error)

    def _report(self, lane: int, name: str, error: BaseException, iteration: float, instance: int = -1) -> None:
        if self._failed is not None:
            self._failed(name, error)
        self._run.fail(lane, name, error, iteration, instance)

    def _fail_lane(self, lane: int, error: BaseException) -> None:
        """Note an error that is not a task's: the lane has ended, so the others cannot continue."""
        self._report(lane, f"lane {self._schedule.lanes[lane].name}", error, -math.inf)

    def _work_through(self, lane: int, issued: Callable[[_Issued], None] | None) -> None:
        named = self._schedule.lanes[lane]
        perform = partial(self._in_context, named.discipline is Discipline.FIFO) if named.name == GPU else self._action
        while (begun := self._run.next(lane)) is not None:
            instance, refusal = begun
            iteration, task = self._divided(instance)
            try:
                if refusal is not None:
                    raise refusal
                if issued is not None:
                    self._issue(lane, instance, perform, issued)
                    continue
                finish = perform(self._schedule.tasks[task], iteration)
                if finish is not None:  # the lane is none of the device's, so its work is done
                    finish()
            except BaseException as error:  # every exception reaches the caller
                if error is not refusal:  # a refusal comes before anything is updated
                    self.progress.fail(task, iteration)
                self._fail(lane, instance, error, on_device=issued is not None)
                continue
            if self._pace is not None:
                self._pace.keep(instance)
            self.progress.end(task, iteration)
            self._run.complete(lane, instance)

    def _issue(self, lane: int, instance: int, perform: Action, issued: Callable[[_Issued], None]) -> None:
        """Put the work of a task into the stream of this thread, behind the work that it waits for."""
        iteration, task = self._divided(instance)
        for event in self._run.events_before(instance):
            self._accelerator.wait(event)
        begin = self._accelerator.record()
        finish = perform(self._schedule.tasks[task], iteration)
        end = self._accelerator.record()
        self._run.issue(lane, instance, end)
        issued(_Issued(instance, begin, end, finish))

    @contextmanager
    def _ending(self, lane: int) -> Iterator[Callable[[_Issued], None]]:
        """Yield a function that ends a task of the lane once it is done: later, in another thread, or before it returns if the
        lane chooses by priority.
        """
        if self._schedule.lanes[lane].discipline is Discipline.PRIORITY:
            yield partial(self._end, lane)
            return
        queue = SimpleQueue[_Issued | None]()

        def work() -> None:
            try:
                while (one := queue.get()) is not None:
                    self._end(lane, one)
            except BaseException as error:
                self._fail_lane(lane, error)

        thread = threading.Thread(target=work, name=f"{threading.current_thread().name}-done", daemon=True)
        thread.start()
        try:
            yield queue.put
        finally:
            queue.put(None)
            thread.join()

    def _end(self, lane: int, issued: _Issued) -> None:
        """Wait until a task that has been issued is done, and end it."""
        iteration, task = self._divided(issued.instance)
        try:
            if not self._run.settle_before(issued.instance):  # first, so that a failure is told of the task that has it
                self._run.drop(lane, issued.instance)
                return
            issued.end.synchronize()
            if issued.finish is not None:
                issued.finish()
        except BaseException as error:
            self.progress.fail(task, iteration)
            self._fail(lane, issued.instance, error, on_device=True)
            return
        self.progress.end(task, iteration)
        at = self._accelerator.ended_ns(issued.begin), self._accelerator.ended_ns(issued.end)
        self._run.complete(lane, issued.instance, at)

    def _fail(self, lane: int, instance: int, error: BaseException, *, on_device: bool) -> None:
        """Note that a task has failed, unless a task before it in its stream has: that one is told."""
        iteration, task = self._divided(instance)
        if on_device and self._run.is_behind_failure(lane, instance):
            self._run.drop(lane, instance)
        else:
            self._report(lane, self._schedule.tasks[task].id.at(iteration), error, iteration - self._first, instance)

    def _divided(self, instance: int) -> tuple[int, int]:
        """The iteration and the task of an instance."""
        iteration, task = divmod(instance, len(self._schedule.tasks))
        return self._first + iteration, task

    def _in_context(self, in_order: bool, task: Task, iteration: int) -> Callable[[], None] | None:
        """Perform a task that runs the model, with the context variables of the caller of its iteration.

        Args:
            in_order: whether the lane takes the tasks of one iteration after those of the one before.
            task: to perform.
            iteration: of the task.
        """
        if in_order:
            self._contexts.pop(iteration - 1, None)
        return self._contexts[iteration].run(self._action, task, iteration)


class _SwitchInterval:
    """Shortens the GIL's switch interval while any lanes are open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[object] = set()
        self._before = 0.0

    def shorten(self, lanes: object) -> None:
        """Called by lanes that open."""
        with self._lock:
            if not self._open:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(_SWITCH_SECONDS, self._before))
            self._open.add(lanes)

    def restore(self, lanes: object) -> None:
        """Called by lanes that have closed, perhaps again."""
        with self._lock:
            if lanes in self._open:
                self._open.remove(lanes)
                if not self._open:
                    sys.setswitchinterval(self._before)


_switch_interval = _SwitchInterval()
