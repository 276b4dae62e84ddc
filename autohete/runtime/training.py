"""A training as the lanes see it: an action for each kind of task, on the model's real states and passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from autohete.runtime.batch import Inputs, Loss
from autohete.runtime.blocks import Current, Memories
from autohete.runtime.device import Ledger, accounting, keep_freed_memory
from autohete.runtime.guard import Guard, check_trainable
from autohete.runtime.model_state import Place, Snapshot, buffers_of, unchanged_random_state
from autohete.runtime.optimizer import Adam
from autohete.runtime.partition import Partition
from autohete.runtime.passes import Passes
from autohete.runtime.states import States
from autohete.schedule import GPU, Kind, Schedule, Task


class Training:
    """Actions on the states of a model as ``schedule`` needs them. Takes over the model's parameters until :meth:`close`.

    Args:
        partition: the model, cut into blocks.
        schedule: tells by its tasks and buffers where each block's states live.
        loss: of logits and targets.
        adam: the optimizer's settings.
        torch_device: where the passes compute; the CPU stands for the device where there is no other.
        device, host: count the memory of the states, and of the passes; None: it is not counted.
        poison: overwrite what is released with NaN, so that a schedule that still reads it is noticed.

    Attributes:
        states, passes: what the actions work on; ``passes`` takes the batches and has the losses.
        guard: what the caller does with the parameters between the iterations.
    """

    def __init__(
        self,
        partition: Partition,
        schedule: Schedule,
        loss: Loss,
        adam: Adam | None = None,
        *,
        torch_device: torch.device | None = None,
        device: Ledger | None = None,
        host: Ledger | None = None,
        poison: bool = False,
    ) -> None:
        torch_device = torch_device or torch.device("cpu")
        if torch_device.type == "cpu":
            keep_freed_memory()
        self._stream = partial(torch.cuda.current_stream, torch_device) if torch_device.type == "cuda" else None
        self._current = Current()
        self._memories = Memories(torch_device, device, host, self._current)
        self._undo = ExitStack()
        check_trainable(partition.model)
        with ExitStack() as undo:
            self.states = States(partition.owned, schedule, adam or Adam(), self._memories, poison=poison)
            self.passes = Passes(partition, self.states, loss, self._memories)
            undo.callback(self.passes.forget)
            undo.callback(self.states.give_back)
            for place in buffers_of(partition.model.named_modules()):  # which may have another tensor at the end
                undo.callback(_move_what_is_at, place, place.value.device)
            for tensor in partition.lasting:
                undo.callback(_move, tensor, tensor.device)
                _move(tensor, torch_device)
            self.passes.make_room()
            self.states.take_over()
            for i, block in enumerate(self.states.blocks):
                for index, parameter in enumerate(block.parameters):
                    hook = parameter.register_post_accumulate_grad_hook(self.passes.receiver(i, index))  # type: ignore[no-untyped-call]
                    undo.callback(hook.remove)
            self.guard = Guard(partition.model, self.states)
            undo.callback(self.guard.release)
            self._undo = undo.pop_all()
        self._actions: dict[Kind, Callable[[int], None]] = {
            Kind.FORWARD: self.passes.forward,
            Kind.LOSS: self.passes.compute_loss,
            Kind.RECOMPUTE: self.passes.recompute,
            Kind.BACKWARD: self.passes.backward,
            Kind.GPU_UPDATE: self.states.gpu_update,
            Kind.PREFETCH_FORWARD: self.states.prefetch,
            Kind.PREFETCH_BACKWARD: self.states.prefetch,
            Kind.REFRESH: self.states.refresh,
            Kind.FETCH_ACTIVATIONS: self.passes.fetch_activations,
            Kind.OFFLOAD_ACTIVATIONS: self.passes.offload_activations,
            Kind.WRITE_BACK_FORWARD: self.states.write_back,
            Kind.WRITE_BACK_BACKWARD: self.states.write_back,
            Kind.OFFLOAD_GRADIENTS: self.states.offload_gradients,
            Kind.CPU_UPDATE: self.states.cpu_update,
        }
        self._memories.settle()

    def perform(self, task: Task, iteration: int) -> None:
        """Do ``task``: make room for what it brings, act, and let go of what it frees.

        Raises:
            DeviceOutOfMemoryError: a memory's budget is used up.
        """
        try:
            with self.guard.inside(loss=task.id.kind is Kind.LOSS):
                self._perform(task, iteration)
        except BaseException:
            if self._stream is not None:  # what it has enqueued may still use what is released from here on
                self._stream().synchronize()
            raise

    def _perform(self, task: Task, iteration: int) -> None:
        current = self._current
        current.task, current.iteration = task.id.at(iteration), iteration
        current.alive = []
        # Copies and updates allocate nothing but what they enter themselves.
        ledger = self._memories.device if task.lane == GPU and task.id.kind is not Kind.GPU_UPDATE else None
        with accounting(ledger, current.task, self._left_by(task)):
            for buffer in task.allocates:
                if buffer.name.startswith("gradients."):
                    self.states.make_gradients(int(buffer.name.rpartition(".")[2]))
            self._actions[task.id.kind](task.id.block)
        freed = [free.name.rpartition(".")[::2] for free in task.frees]
        for group, number in freed:
            if group == "gradients" and task.id.kind is Kind.BACKWARD:
                self.states.replace_parameters(int(number))
        if self._stream is not None:
            # Only now is the work done: what another stream has allocated may be freed, and the next task begin.
            self._stream().synchronize()
        current.alive = []
        for group, number in freed:
            if group.startswith("parameters"):
                self.states.release(int(number))

    def parameters(self) -> list[Tensor]:
        """A copy of every trained parameter in block order; see :meth:`States.parameters`."""
        with self.guard.resumed(), self.guard.inside():
            return self.states.parameters()

    def close(self) -> None:
        """Give the model its forwards and its parameters back, with their trained values, in host memory."""
        self._undo.close()

    @contextmanager
    def evaluation(self) -> Iterator[Callable[[Inputs], Tensor]]:
        """A function from token ids (or the model's arguments) to logits, dropout off; blocks come to the device one at a time.

        Modes of all modules, buffers and random states are as before afterwards. Call it when every update has ended.
        """
        partition = self.passes.partition
        before = Snapshot(partition.model.named_modules(), partition.effects.changing)
        try:
            with unchanged_random_state(self._memories.torch_device):
                partition.model.eval()
                yield self._evaluate
        finally:
            before.restore()

    def _evaluate(self, inputs: Inputs) -> Tensor:
        with self.guard.resumed(), self.guard.inside():
            return self.passes.evaluate(inputs)

    def _left_by(self, task: Task) -> str:
        """The group of what a pass leaves behind."""
        kind = task.id.kind
        if kind is Kind.FORWARD:
            return "checkpoint" if Kind.RECOMPUTE in self.states.kinds[task.id.block] else "activations"
        return {Kind.RECOMPUTE: "activations", Kind.LOSS: "logits_gradient"}.get(kind, "workspace")


def _move_what_is_at(place: Place, device: torch.device) -> None:
    if isinstance(place.value, Tensor):
        _move(place.value, device)


def _move(tensor: Tensor, device: torch.device) -> None:
    tensor.data = tensor.data.to(device)
