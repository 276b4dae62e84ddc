"""Transfers between the stages of a pipeline. Sender and receiver each have the task, with the same id: that of the sender."""

from __future__ import annotations

from autohete.lowering import durations
from autohete.lowering.builder import Builder, on_gpu
from autohete.lowering.compute import Compute
from autohete.lowering.stages import PipelineStage
from autohete.profile import Profile
from autohete.schedule import SEND, Kind, TaskId, Value


class Transfers:
    """Adds the transfers of a stage to its builder: what it receives before a pass, and what it sends after one.

    Args:
        builder: collects the tasks.
        profile: sizes.
        compute: the passes, which use what is received and make what is sent.
        stage: the units of the stage.
    """

    def __init__(self, builder: Builder, profile: Profile, compute: Compute, stage: PipelineStage) -> None:
        self._builder, self._profile, self._compute, self._stage = builder, profile, compute, stage

    def before(self, task: TaskId) -> TaskId | None:
        """Receive what the pass ``task`` needs from another rank. Returns the transfer, if any."""
        stage, unit, m = self._stage, task.unit, task.micro_batch
        if task.kind is Kind.FORWARD and unit == stage.first and stage.rank:
            receive = self._add(Kind.SEND_INPUT, unit, m, stage.rank - 1, stage.rank)
            self._compute.receive_input(receive)
            return receive
        if task.kind is Kind.BACKWARD and unit == stage.last and not stage.is_last:
            receive = self._add(Kind.SEND_INPUT_GRADIENT, unit + 1, m, stage.rank + 1, stage.rank)
            size = self._profile.units[unit + 1].input_bytes
            self._builder.allocate(receive, on_gpu(Value.INPUT_GRADIENT, unit + 1, m), size)
            return receive
        return None

    def after(self, task: TaskId) -> None:
        """Send what the pass ``task`` has made to the rank that needs it."""
        stage, unit, m = self._stage, task.unit, task.micro_batch
        if task.kind is Kind.FORWARD and unit == stage.last and not stage.is_last:
            send = self._add(Kind.SEND_INPUT, unit + 1, m, stage.rank, stage.rank + 1)
            self._compute.send_input(send)
        elif task.kind is Kind.BACKWARD and unit == stage.first and stage.rank and unit > self._profile.first_trained:
            send = self._add(Kind.SEND_INPUT_GRADIENT, unit, m, stage.rank, stage.rank - 1)
            self._builder.free(send, on_gpu(Value.INPUT_GRADIENT, unit, m))
        else:
            return
        self._builder.after(send, task)

    def _add(self, kind: Kind, unit: int, micro_batch: int, sender: int, receiver: int) -> TaskId:
        """Add a transfer."""
        seconds = durations.transfer(self._profile.units[unit].input_bytes, sender, receiver)
        return self._builder.add(TaskId(kind, unit, micro_batch, sender), SEND, seconds)
