"""Transfers between the ranks of a pipeline. Sender and receiver each have the task, with the same id: that of the sender."""

from __future__ import annotations

from autohete.lowering import durations
from autohete.lowering.builder import Builder, on_gpu
from autohete.lowering.compute import Compute
from autohete.plan import Plan
from autohete.profile import Profile
from autohete.schedule import SEND, Kind, TaskId, Value


class Transfers:
    """Adds the transfers of a rank to its builder: what it receives before a pass, and what it sends after one.

    Args:
        builder: collects the tasks.
        profile: sizes.
        plan: the rank of each unit. GPUs of all pipelines with the same rank are neighbours.
        compute: the passes, which use what is received and make what is sent.
    """

    def __init__(self, builder: Builder, profile: Profile, plan: Plan, compute: Compute) -> None:
        self._builder, self._profile, self._compute, self._pipelines = builder, profile, compute, profile.hardware.gpus
        self._ranks = [unit.rank or 0 for unit in plan.units]

    def before(self, task: TaskId) -> TaskId | None:
        """Receive what the pass ``task`` needs from another rank. Returns the transfer, if any."""
        unit, m = task.unit, task.micro_batch
        if task.kind is Kind.FORWARD and self._is_border(unit):
            receive = self._add(Kind.SEND_INPUT, unit, m, unit - 1, unit)
            self._compute.receive_input(receive)
            if not m and unit <= self._profile.first_trained:  # nothing goes back: the sender would be iterations ahead
                self._builder.after(receive, self._builder.passes[-1], back=1)
            return receive
        if task.kind is Kind.BACKWARD and self._is_border(unit + 1):
            receive = self._add(Kind.SEND_INPUT_GRADIENT, unit + 1, m, unit + 1, unit)
            size = self._profile.units[unit + 1].input_bytes
            self._builder.allocate(receive, on_gpu(Value.INPUT_GRADIENT, unit + 1, m), size)
            return receive
        return None

    def after(self, task: TaskId) -> None:
        """Send what the pass ``task`` has made to the rank that needs it."""
        unit, m = task.unit, task.micro_batch
        if task.kind is Kind.FORWARD and self._is_border(unit + 1):
            send = self._add(Kind.SEND_INPUT, unit + 1, m, unit, unit + 1)
            self._compute.send_input(send)
        elif task.kind is Kind.BACKWARD and self._is_border(unit) and unit > self._profile.first_trained:
            send = self._add(Kind.SEND_INPUT_GRADIENT, unit, m, unit, unit - 1)
            self._builder.free(send, on_gpu(Value.INPUT_GRADIENT, unit, m))
        else:
            return
        self._builder.after(send, task)

    def _is_border(self, unit: int) -> bool:
        """Whether the input of ``unit`` comes from another rank."""
        return 0 < unit < len(self._ranks) and self._ranks[unit - 1] != self._ranks[unit]

    def _add(self, kind: Kind, unit: int, micro_batch: int, source: int, target: int) -> TaskId:
        """Add a transfer from the rank of unit ``source`` to that of ``target``."""
        sender, apart = self._ranks[source], self._pipelines
        size = self._profile.units[unit].input_bytes
        seconds = durations.transfer(size, sender * apart, self._ranks[target] * apart)
        return self._builder.add(TaskId(kind, unit, micro_batch, sender), SEND, seconds)
