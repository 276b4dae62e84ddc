"""A thread for work that must not be interrupted by signals.

Python raises exceptions from signal handlers, such as KeyboardInterrupt, in the main thread, between any two instructions.
There they can leave a model half taken over or a lock without its owner or, in Python code called by PyTorch, abort the
process. A :class:`Worker` therefore does such work, job by job. The caller only waits, where an interrupt does no harm.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial, wraps
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar, cast

import torch

from autohete.errors import InputError
from autohete.runtime.device import CurrentGpu

P = ParamSpec("P")
T = TypeVar("T")

#: Time that a dropped object, or Python at exit, waits for a thread that cannot be stopped.
PATIENCE_SECONDS = 30.0


class _Stopped(BaseException):
    """Ends a job that was asked to stop. Ordinary exception handlers do not catch it."""


class Ended(InputError):
    """A worker was used after its end."""


class _Ticket:
    """A job handed to a worker, and its outcome. Refers to neither once the caller has taken the outcome.

    It may be handed over several times: the job runs once, and :meth:`wait` returns as many times. (The caller often drops what
    the job refers to right afterwards, and the last reference must be the caller's.)
    """

    def __init__(self, job: Callable[[], object]) -> None:
        self._job: Callable[[], object] | None = job
        self._context = copy_context()
        self._gpu = CurrentGpu()
        self._value: object = None
        self._error: BaseException | None = None
        self._done: SimpleQueue[None] = SimpleQueue()
        self.stopped = False

    def work(self) -> None:
        """Run the job, on the caller's current device and with the caller's context variables."""
        job, self._job = self._job, None
        try:
            if job is not None:
                self._gpu.use()
                self._value = self._context.run(job)
        except _Stopped:
            self._error = InputError("the trainer was closed during profiling or planning: nothing has been trained")
        except BaseException as error:
            self._error = error
        del job
        self._done.put(None)

    def refuse(self, message: str) -> None:
        """Refuse the job with ``message``, unless it has run."""
        if self._job is not None:
            self._job, self._error = None, Ended(message)
        self._done.put(None)

    def stop(self) -> None:
        """Ask the job to end at its next call of :func:`check_stop`."""
        self.stopped = True

    def wait(self) -> None:
        """Return once the job has run or was refused."""
        self._done.get()

    def outcome(self) -> tuple[object, BaseException | None]:
        """Return the result and the error; works only once."""
        found = self._value, self._error
        self._value = self._error = None
        return found


class _Local(threading.local):
    """The current ticket of the calling thread, if it belongs to a worker."""

    ticket: _Ticket | None = None


_local = _Local()


def check_stop() -> None:
    """End the calling thread's job if it was asked to stop. Long jobs call this between their parts."""
    if _local.ticket is not None and _local.ticket.stopped:
        raise _Stopped


class Worker:
    """Runs jobs one after another, in a thread that starts with the first job.

    Args:
        name: name of the thread.
        after_end: error message for calls after the worker's end.
    """

    def __init__(self, name: str, after_end: str) -> None:
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._after_end = after_end
        self._jobs: SimpleQueue[_Ticket | None] = SimpleQueue()
        self._starting = threading.Lock()
        self._process: int | None = None
        self._torch_threads = 1
        self._current: _Ticket | None = None
        self._ended = False

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one with the thread."""
        return self._process is not None and self._process != os.getpid()

    def check_process(self) -> None:
        """Check that this process is not a fork.

        Raises:
            InputError: this process is a fork.
        """
        if self.forked:
            raise InputError(
                f"process {os.getpid()} is a fork of {self._process}, which has the trainer's threads: use the trainer there"
            )

    def do(self, job: Callable[[], T], *interrupts: Callable[[], object], stoppable: bool = False) -> T:
        """Run ``job`` in the worker's thread, and return its result or raise its error.

        Args:
            job: the function to run.
            stoppable: whether the first interrupt asks the job to stop.
            interrupts: called on the caller's first, second, … interrupt, which is raised once the job has ended; a further
                interrupt is raised at once, and the job continues alone.

        Raises:
            InputError: the worker has ended, or is in another process.
        """
        self.check_process()
        ticket = _Ticket(job)
        del job
        reactions = iter([ticket.stop, *interrupts] if stoppable else interrupts)
        interrupt: BaseException | None = None
        self._start()
        while True:
            try:
                self._jobs.put(ticket)  # again after an interrupt, which may have come before the first put
                if self._ended:
                    self._refuse_rest()
                ticket.wait()
                break
            except BaseException as error:
                react = next(reactions, None)
                if react is None:
                    raise
                interrupt = error
                react()
        value, failure = ticket.outcome()
        try:
            if interrupt is not None:
                raise interrupt from None if ticket.stopped else failure
            if failure is not None:
                raise failure
            return cast(T, value)
        finally:
            del interrupt, failure  # breaks the reference cycle through their tracebacks

    def stop(self) -> None:
        """Ask the current job to end at its next call of :func:`check_stop`."""
        current = self._current
        if current is not None:
            current.stop()

    def end(self, last: Callable[[], object] | None = None, timeout: float | None = None) -> None:
        """End the thread after its pending jobs and ``last``; wait for that, unless called by the thread itself."""
        if last is not None:
            self._jobs.put(_Ticket(last))
        self._jobs.put(None)
        if self.thread.ident is None:
            self._ended = True
        elif threading.current_thread() is not self.thread:
            self.thread.join(timeout)

    def _start(self) -> None:
        with self._starting:
            if self.thread.ident is None and not self._ended:
                self._process, self._torch_threads = os.getpid(), torch.get_num_threads()
                self.thread.start()

    def _work(self) -> None:
        # Once, and first: it sets this thread's own number of threads, and MKL's, which all threads share.
        torch.set_num_threads(self._torch_threads)
        while (ticket := self._jobs.get()) is not None:
            self._current = _local.ticket = ticket
            ticket.work()
            self._current = _local.ticket = None
            del ticket
        self._ended = True
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        with suppress(Empty):
            while True:
                ticket = self._jobs.get_nowait()
                if ticket is not None:
                    ticket.refuse(self._after_end)


def apart(function: Callable[P, T]) -> Callable[P, T]:
    """Run ``function`` in its own worker; an interrupt of the caller stops it at its next call of :func:`check_stop`."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        job: Any = partial(function, *args, **kwargs)
        if _local.ticket is not None:
            return cast(T, job())
        worker = Worker("autohete-measuring", "it has ended")

        def leave() -> None:
            worker.stop()
            worker.end(timeout=PATIENCE_SECONDS)

        atexit.register(leave)  # in case the caller does not wait
        try:
            return cast(T, worker.do(job, stoppable=True))
        finally:
            worker.end()
            atexit.unregister(leave)

    return run


def stoppable(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function`` with a :func:`check_stop` before each call."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        check_stop()
        return function(*args, **kwargs)

    return run
