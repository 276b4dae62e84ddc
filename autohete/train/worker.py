"""A thread for work that must not be interrupted: no signal reaches it.

Python raises what a signal's handler raises, such as KeyboardInterrupt, in the main thread, between any two instructions.
There it can leave a model half taken over, a lock without its owner, or, in Python code that PyTorch has called, abort the
process. A :class:`Worker` therefore does such work, job by job. The caller only waits, where an interrupt does no harm.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar, cast

import torch

from autohete.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")

#: How long a dropped object, or Python's end, waits for a thread that cannot be stopped.
PATIENCE_SECONDS = 30.0


class _Stopped(BaseException):
    """Ends a job that was asked to stop; no ordinary handler catches it."""


class Ended(InputError):
    """A worker was used after it had ended."""


class _Ticket:
    """A job that is handed over, and what has come of it. Refers to neither once the caller has taken the outcome.

    It may be handed over more than once: it is done once, and :meth:`wait` returns as often. (What a job refers to is often
    dropped right afterwards, by the caller; it must be the caller who drops it.)
    """

    def __init__(self, job: Callable[[], object]) -> None:
        self._job: Callable[[], object] | None = job
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._value: object = None
        self._error: BaseException | None = None
        self._done: SimpleQueue[None] = SimpleQueue()
        self.stopped = False

    def work(self) -> None:
        """Do the job, on the device that is the caller's current one."""
        job, self._job = self._job, None
        try:
            if job is not None:
                if self._device is not None:
                    torch.cuda.set_device(self._device)
                self._value = job()
        except _Stopped:
            self._error = InputError("closed while it measured or planned: nothing has been trained")
        except BaseException as error:
            self._error = error
        del job
        self._done.put(None)

    def refuse(self, message: str) -> None:
        """Do nothing, and say why, if it has not been done."""
        if self._job is not None:
            self._job, self._error = None, Ended(message)
        self._done.put(None)

    def stop(self) -> None:
        """Let the job end where it next calls :func:`check_stop`."""
        self.stopped = True

    def wait(self) -> None:
        """Return when it is done or refused."""
        self._done.get()

    def outcome(self) -> tuple[object, BaseException | None]:
        """Result and error; only once."""
        found = self._value, self._error
        self._value = self._error = None
        return found


class _Local(threading.local):
    """What the calling thread is working on, if it is a worker's."""

    ticket: _Ticket | None = None


_local = _Local()


def check_stop() -> None:
    """End the calling thread's job here if it was asked to stop. Long jobs call it between their parts."""
    if _local.ticket is not None and _local.ticket.stopped:
        raise _Stopped


class Worker:
    """Does jobs one after another, in a thread that starts with the first.

    Args:
        name: of the thread.
        after_end: the message for callers after it has ended.
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
        """Whether this process is a fork of the one that has the thread."""
        return self._process is not None and self._process != os.getpid()

    def check_process(self) -> None:
        """Refuse to go on in a fork.

        Raises:
            InputError: this process is one.
        """
        if self.forked:
            raise InputError(
                f"process {os.getpid()} is a fork of {self._process}, where the training's threads are: use the trainer there"
            )

    def do(self, job: Callable[[], T], *interrupts: Callable[[], object], stoppable: bool = False) -> T:
        """The result of ``job``, or what it raises.

        Args:
            job: what to do.
            stoppable: at the first interrupt, tell the job to stop.
            interrupts: what to do about the first, second, … interrupt of the caller, which is raised when the job has ended;
                one more is raised at once, and the job goes on alone.

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
                self._jobs.put(ticket)  # an interrupt may have come before: then again
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
            del interrupt, failure  # with their traceback they would refer to themselves

    def stop(self) -> None:
        """Let the job that is being done end where it next calls :func:`check_stop`."""
        current = self._current
        if current is not None:
            current.stop()

    def end(self, last: Callable[[], object] | None = None, timeout: float | None = None) -> None:
        """End the thread after the jobs that it has, and after ``last``; wait for that unless called by the thread itself."""
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
        # Once, and first of all: it sets what is each thread's own, and MKL's number, which is everybody's.
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
    """Run ``function`` in a worker of its own; an interrupt of the caller stops it where it calls :func:`check_stop`."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        job: Any = partial(function, *args, **kwargs)
        if _local.ticket is not None:
            return cast(T, job())
        worker = Worker("autohete-measuring", "it has ended")

        def leave() -> None:
            worker.stop()
            worker.end(timeout=PATIENCE_SECONDS)

        atexit.register(leave)  # for an impatient caller
        try:
            return cast(T, worker.do(job, stoppable=True))
        finally:
            worker.end()
            atexit.unregister(leave)

    return run


def stoppable(function: Callable[P, T]) -> Callable[P, T]:
    """``function``, with a :func:`check_stop` before each call."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        check_stop()
        return function(*args, **kwargs)

    return run
