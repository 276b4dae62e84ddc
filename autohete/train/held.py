"""The life of a Trainer's resources: its threads, its claim of the model, and the training in progress."""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from autohete.errors import InputError, RankError, TaskError
from autohete.runtime.claims import Claim
from autohete.train.training_ranks import TrainingRanks
from autohete.train.training_run import TrainingRun
from autohete.train.worker import PATIENCE_SECONDS, Ended, Worker

T = TypeVar("T")


class Held:
    """The resources of a Trainer. It does not refer to the Trainer, so that it can release them if the Trainer is dropped.

    Attributes:
        worker: the thread in which the model is measured, taken over, trained and given back.
        claim: exclusive use of the model; None: it is not used.
        run: the training in progress; None: it has not started, or has ended.
        closed: whether :meth:`close` was called.
        serving: closed in the end.
        ranks: this process as one of several; None: it trains alone.
    """

    def __init__(self) -> None:
        self.worker = Worker("autohete-trainer", "the trainer is closed: create a new one to continue")
        self.claim: Claim | None = None
        self.run: TrainingRun | None = None
        self.closed = False
        self.serving = ExitStack()
        self.ranks: TrainingRanks | None = None
        #: Whether a call has raised the failure of a task or of a rank.
        self._reported = False

    @property
    def threads(self) -> list[threading.Thread]:
        """The worker's thread and the lanes' threads."""
        run = self.run
        return [self.worker.thread, *(run.session.lanes.threads if run is not None else ())]

    def check_caller(self) -> None:
        """Check that the calling thread may wait for the trainer's threads.

        Raises:
            InputError: it is one of them, or in another process.
        """
        self.worker.check_process()
        if threading.current_thread() in self.threads:
            raise InputError(
                "the trainer is called from within its own step, such as by its loss or model, and would wait for itself: use "
                "it between steps"
            )

    def running(self) -> TrainingRun:
        """Return the training in progress.

        Raises:
            InputError: there is none.
        """
        if self.run is None:
            if self.closed:
                raise InputError("the trainer is closed: create a new one to continue")
            raise InputError("the trainer has not started: call step inside its with statement")
        return self.run

    def do(self, job: Callable[[TrainingRun], T]) -> T:
        """Run ``job`` with the training in progress, in the trainer's thread, and return its result."""
        self.check_caller()
        self.running()
        try:
            return self.worker.do(lambda: self._done(job))
        except (TaskError, RankError):
            self._reported = True
            raise

    def close(self, error: BaseException | None) -> None:
        """Wait for the work in progress, and release everything. Later calls do nothing.

        Args:
            error: the caller's, if any. If it is an interrupt, the second one does not wait.

        Raises:
            TaskError: a task failed and no call has raised the error yet.
            RankError: another rank has failed or goes on, and no call has raised the error yet.
        """
        self.check_caller()
        self.closed, run = True, self.run
        self.worker.stop()
        interrupted = isinstance(error, KeyboardInterrupt)
        leave = partial(self._leave, "" if error is None else f"{type(error).__name__}: {error}")
        try:
            if self.worker.thread.ident is not None:
                self.worker.do(leave, *[lambda: None] * (not interrupted), self.abandon)
            self.worker.end()
        except Ended:
            pass  # already closed
        except (TaskError, RankError):
            self.worker.end()
            if not self._reported:
                raise
        except BaseException as error:
            self.worker.end(self.give_back)  # an interrupt may have come before the wait
            if run is not None and not isinstance(error, Exception):  # of any signal handler
                error.add_note(run.session.lanes.progress.state())
            raise
        finally:
            self.serving.close()

    def _leave(self, reason: str) -> None:
        """Give everything back, together with all ranks; ``reason``: the caller's error, if any."""
        ranks, failure = self.ranks, None
        try:
            if ranks is not None and self.run is not None:
                self.run.session.drain()
                failure = self._done(lambda run: ranks.leave(reason))
        finally:
            self.give_back()
        if failure is not None:
            raise failure

    def _done(self, job: Callable[[TrainingRun], T]) -> T:
        """The result of ``job``. If another rank fails meanwhile, the error says which step the parameters are from."""
        run = self.running()
        try:
            return job(run)
        except RankError as error:
            run.session.drain()  # raises its own error if a task has failed
            raise RankError(". ".join(filter(None, (str(error), run.session.lanes.progress.state())))) from error

    def give_back(self) -> None:
        """End the lanes once all admitted iterations have ended, and give the model back."""
        try:
            with ExitStack() as undo:  # each one, even if another fails
                if self.ranks is not None:
                    undo.callback(self.ranks.close)
                if self.claim is not None:
                    undo.callback(self.claim.release)
                if self.run is not None:
                    undo.callback(self.run.session.close)
        finally:
            run, self.claim, self.run = self.run, None, None
            if run is not None:
                run.ended()
            atexit.unregister(self.at_exit)

    def abandon(self) -> None:
        """Stop waiting for tasks that have not started."""
        self.worker.stop()
        run = self.run
        if run is not None:
            run.session.lanes.abandon()
        if self.ranks is not None:
            self.ranks.fail("it was interrupted")

    def at_exit(self) -> None:
        """Give the model back when Python exits: a thread still inside PyTorch would abort the process."""
        if self.worker.forked:
            return
        self.worker.stop()
        try:
            self.worker.end(self.give_back, PATIENCE_SECONDS)
        except KeyboardInterrupt:
            self.abandon()
            self.worker.end(timeout=PATIENCE_SECONDS)

    def dropped(self) -> None:
        """Release the resources of a Trainer that was never closed. Can run in any thread, at any time."""
        self.serving.close()
        if self.worker.forked or self.worker.thread.ident is None:
            return
        open_ = self.run is not None
        if threading.current_thread() in self.threads:  # it would wait for itself
            self.worker.end(self.give_back, timeout=0)
        else:
            self.at_exit()
        if open_:
            warnings.warn(
                "a Trainer was never closed: use it in a with statement, or call close()", ResourceWarning, stacklevel=2
            )
