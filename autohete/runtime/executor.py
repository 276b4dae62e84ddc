"""Executes a schedule for real: trains on the batches that it is given, and says when everything happened."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from autohete.errors import InputError
from autohete.runtime.lanes import LaneThreads
from autohete.runtime.model import Stack
from autohete.runtime.training import Adam, Batch, Loss, Training
from autohete.schedule import Schedule
from autohete.trace import Clock, Trace


class TorchExecutor:
    """The runtime behind :class:`autohete.executor.Executor`: real tensors, autograd and threads, on the CPU.

    Args:
        stack: the model's blocks; their parameters are taken over by the run.
        batches: token ids and targets, each (batch, sequence), one pair per iteration.
        loss: of logits and targets.
        adam: the optimizer's settings.

    After :meth:`run`, ``losses`` has the loss of each iteration and ``parameters`` every trained parameter in block order
    (fp32 master weights where the model is in 16 bit).
    """

    def __init__(self, stack: Stack, batches: Iterator[tuple[Tensor, Tensor]], loss: Loss, adam: Adam | None = None) -> None:
        self._stack, self._batches, self._loss, self._adam = stack, batches, loss, adam
        self.losses: list[Tensor] = []
        self.parameters: list[Tensor] = []

    def run(self, schedule: Schedule, iterations: int) -> Trace:
        """Train ``iterations`` iterations as ``schedule`` says.

        Raises:
            TaskError: a task failed; names it, with the original error as its cause. No thread is left behind.
            InputError: there are fewer batches than iterations.
        """
        if iterations < 1:
            raise InputError(f"cannot run {iterations} iterations: at least 1")
        training = Training(self._stack, schedule, self._loss, self._adam)
        with LaneThreads(schedule, training.perform, Clock.MEASURED_CPU) as lanes:
            for iteration in range(iterations):
                pair = next(self._batches, None)
                if pair is None:
                    raise InputError(f"{iterations} iterations need as many batches, but there are {iteration}: give more data")
                training.batches[iteration] = Batch(*pair)
                lanes.admit()
        self.losses = [batch.loss for batch in training.batches.values() if batch.loss is not None]
        self.parameters = training.parameters()
        return lanes.trace()
