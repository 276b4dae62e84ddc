"""The interface that both executors implement: one method."""

from __future__ import annotations

from typing import Protocol

from autohete.execution.trace import Trace
from autohete.schedule import Schedule


class Executor(Protocol):
    """Runs a schedule for some iterations and records the times of all tasks.

    Implementations: ``autohete.sim.SimExecutor`` (a model, in simulated time) and the torch runtime (real execution).
    """

    def run(self, schedule: Schedule, iterations: int) -> Trace:
        """Execute ``iterations`` iterations of ``schedule``.

        Raises:
            ScheduleError: the schedule is not valid.
        """
        ...
