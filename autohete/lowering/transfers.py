"""Transfers between the ranks of a pipeline. Sender and receiver each have the task, with the same id: that of the sender."""

from __future__ import annotations

from collections.abc import Sequence

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
        plan: the ranks of each unit. GPUs of all pipelines with the same rank are neighbours.
        compute: the passes, which use what is received and make what is sent.
    """

    def __init__(self, builder: Builder, profile: Profile, plan: Plan, compute: Compute) -> None:
        self._builder, self._profile, self._compute, self._pipelines = builder, profile, compute, profile.hardware.gpus
        self._forward, self._backward = plan.forward_ranks(), plan.backward_ranks()
        #: Whether no gradient that goes back keeps a rank from being iterations ahead of another.
        self._free = plan.dealt is not None

    def before(self, task: TaskId) -> TaskId | None:
        """Receive what the pass ``task`` needs from another rank. Returns the transfer, if any."""
        unit, m = task.unit, task.micro_batch
        if task.kind is Kind.FORWARD and self._is_border(unit, self._forward):
            receive = self._add(Kind.SEND_INPUT, unit, m, self._forward[unit - 1], self._forward[unit])
            self._compute.receive_input(receive)
            if self._free or (not m and unit <= self._profile.first_trained):  # the sender would be iterations ahead
                self._builder.after(receive, self._builder.passes[-1], back=1)
            return receive
        if task.kind is Kind.BACKWARD and self._is_border(unit + 1, self._backward):
            receive = self._add(Kind.SEND_INPUT_GRADIENT, unit + 1, m, self._backward[unit + 1], self._backward[unit])
            size = self._profile.units[unit + 1].input_bytes
            self._builder.allocate(receive, on_gpu(Value.INPUT_GRADIENT, unit + 1, m), size)
            if self._free:
                self._builder.after(receive, self._builder.passes[-1], back=1)
            return receive
        return None

    def after(self, task: TaskId) -> None:
        """Send what the pass ``task`` has made to the rank that needs it."""
        unit, m = task.unit, task.micro_batch
        if task.kind is Kind.FORWARD and self._is_border(unit + 1, self._forward):
            send = self._add(Kind.SEND_INPUT, unit + 1, m, self._forward[unit], self._forward[unit + 1])
            self._compute.send_input(send)
        elif task.kind is Kind.BACKWARD and self._is_border(unit, self._backward) and unit > self._profile.first_trained:
            send = self._add(Kind.SEND_INPUT_GRADIENT, unit, m, self._backward[unit], self._backward[unit - 1])
            self._builder.free(send, on_gpu(Value.INPUT_GRADIENT, unit, m))
        else:
            return
        self._builder.after(send, task)
        if self._free:
            self._builder.after(task, send, back=1)

    def _is_border(self, unit: int, ranks: Sequence[int]) -> bool:
        """Whether what a pass of ``unit`` and of the unit below exchange goes from rank to rank."""
        return 0 < unit < len(ranks) and ranks[unit - 1] != ranks[unit]

    def _add(self, kind: Kind, unit: int, micro_batch: int, sender: int, receiver: int) -> TaskId:
        """Add a transfer from one rank to another."""
        apart, size = self._pipelines, self._profile.units[unit].input_bytes
        seconds = durations.transfer(size, sender * apart, receiver * apart)
        return self._builder.add(TaskId(kind, unit, micro_batch, sender), SEND, seconds)
