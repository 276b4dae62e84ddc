"""Clean endings on signals: SIGINT (Ctrl-C) ends a program with at most one line on stderr and exit code 130, SIGTERM with
exit code 143 and SIGHUP (a terminal that is closed) with 129, whatever the program is doing.

Programs call :func:`catch_interrupts` before they import anything heavy: an interrupt then ends the process at once, since
there is nothing to clean up. Inside :func:`interruptible` it is a ``KeyboardInterrupt``, so that files and threads are
cleaned up on the way out; a second interrupt does not wait for that.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Literal, NoReturn

from autohete.collector import collect_rarely

#: The line printed when these signals end the program. The exit code is what a shell reports for a killed program.
_ENDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


class _Handler:
    """Handles SIGINT, SIGTERM and SIGHUP."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.working = False
        self.interrupted = False
        self.reported = False
        self.signal = signal.SIGINT
        self._process = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT and os.getpid() != self._process:  # a forked child; its parent expects it to die
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self.interrupted:
            self.signal = signal.Signals(number)
        if not self.working or self.interrupted:
            self.end()
        self.interrupted = True
        raise KeyboardInterrupt

    def uncaught(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """End without a traceback after an interrupt outside of :func:`interruptible`."""
        if issubclass(kind, KeyboardInterrupt):
            self.end()
        sys.__excepthook__(kind, error, traceback)

    def unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """End after an interrupt in code that cannot propagate it, such as a callback; it would be lost otherwise."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self.end()
        sys.__unraisablehook__(unraisable)

    def report(self) -> None:
        """Print the line, once."""
        if not self.reported:
            self.reported = True
            with suppress(OSError):
                os.write(2, f"{self.program}: {_ENDS[self.signal]}\n".encode())

    def end(self) -> NoReturn:
        """End the process now."""
        self.report()
        os._exit(128 + self.signal)


def catch_interrupts(program: str, instead_of: object = signal.default_int_handler) -> _Handler | None:
    """Let SIGINT, SIGTERM and SIGHUP end this process as described above, and return the handler.

    Returns None if SIGINT is not handled by Python or ``instead_of``: it is ignored, as in a background job, or handled
    elsewhere.
    """
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Handler):
        return handler
    if handler not in (signal.default_int_handler, instead_of):
        return None
    made = _Handler(program)
    sys.excepthook, sys.unraisablehook = made.uncaught, made.unraisable
    signal.signal(signal.SIGINT, made)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, made)
    return made


@contextmanager
def interruptible(program: str) -> Iterator[None]:
    """Clean up when interrupted, then exit with code 130, 143 or 129. Other exceptions propagate."""
    handler = catch_interrupts(program)
    if handler is None:
        yield
        return
    try:
        handler.working = True
        yield
    except BaseException as error:
        if not handler.interrupted:
            raise
        _close_generators(error)
    finally:
        handler.working = False
        if not handler.interrupted:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left is the interpreter's end
    if handler.interrupted:
        handler.report()
        for process in multiprocessing.active_children():  # exit functions wait for them, for idle ones of joblib 5 minutes
            process.terminate()
        atexit._run_exitfuncs()  # such as joblib's, which removes its folders
        handler.end()  # skips the interpreter's teardown, which aborts threads that are in native code


def _close_generators(error: BaseException) -> None:
    """Close the generators in the frames that an interrupt ended, as if ``error`` were caught: they end their processes.

    The interrupt is the error or was handled when the error was raised: Cyclopts makes a SystemExit of it.
    """
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__context__


def end_with(parent: int) -> None:
    """Let this process end when its parent has ended in whatever way, such as by a second interrupt or by SIGKILL."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="watch of the parent", daemon=True).start()


def _begin(parent: int) -> None:
    """Prepare a process for its calls."""
    end_with(parent)
    collect_rarely()


@contextmanager
def children_uninterrupted() -> Iterator[None]:
    """Start processes that never see SIGINT, which a terminal sends to all; the parent ends them."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # starting it unblocks SIGINT again
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited; an interrupt meanwhile stays pending
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def in_processes(
    function: Callable[..., Any],
    arguments: Iterable[tuple[Any, ...]],
    jobs: int,
    *,
    batch_size: int | Literal["auto"] = 1,
    ordered: bool = False,
) -> Generator[Any]:
    """Start to apply ``function`` to many arguments in ``jobs`` processes, which end with this one however it ends.

    Args:
        function: the function to call; like its arguments and results, it must be possible to pickle it.
        arguments: those of each call.
        jobs: number of processes.
        batch_size: calls that go to a process together. With 1, a call that takes long delays no others.
        ordered: return results in the order of their arguments, not as they come.
    """
    import joblib

    # joblib replaces a process whose memory has grown, and says so.
    warnings.filterwarnings("ignore", "A worker stopped while some jobs", UserWarning)
    returns = "generator" if ordered else "generator_unordered"
    watched = {"initializer": _begin, "initargs": (os.getpid(),)}
    parallel = joblib.Parallel(n_jobs=jobs, return_as=returns, batch_size=batch_size, **watched)
    with children_uninterrupted():
        results = parallel(joblib.delayed(function)(*each) for each in arguments)
    return _closed_quietly(results)


def _closed_quietly(results: Generator[Any]) -> Generator[Any]:
    """Pass results on; without joblib's warning where the reader stops before the end, such as at a closed pipe."""
    try:
        for result in results:  # noqa: UP028  (`yield from` closes it outside of what follows)
            yield result
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            results.close()
