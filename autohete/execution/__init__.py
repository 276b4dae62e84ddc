"""The interface of both executors: one method."""

from __future__ import annotations

from typing import Protocol

from autohete.execution.trace import Trace
from autohete.schedule import Schedule


class Executor(Protocol):
    """Runs a schedule for some iterations and records when everything happened.

    Implementations: ``autohete.sim.SimExecutor`` (a model, in simulated time) and the torch runtime (the real thing).
    """

    def run(self, schedule: Schedule, iterations: int) -> Trace:
        """Execute ``iterations`` iterations of ``schedule``.

        Raises:
            ScheduleError: the schedule is not valid.
        """
        ...
