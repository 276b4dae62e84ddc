"""A model taken over for training, until it is given back: its states, passes, actions and evaluation."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autohete.errors import InputError, check_fields
from autohete.runtime.actions import Actions
from autohete.runtime.collectives import Collectives
from autohete.runtime.device import AllocatorMemory, Device, device_for
from autohete.runtime.evaluation import Evaluation
from autohete.runtime.gradient_norm import Clipping
from autohete.runtime.guard import Guard, check_trainable
from autohete.runtime.ledger import Counting, DeviceCount, Ledger
from autohete.runtime.loss_call import LossCall
from autohete.runtime.model_state import ModulePlace, buffers_of
from autohete.runtime.nonfinite import updates_wait_for_backward
from autohete.runtime.partition import Partition, packed_for_training
from autohete.runtime.passes import Passes
from autohete.runtime.settings import Recipe
from autohete.runtime.states import States
from autohete.runtime.units import Memories
from autohete.schedule import COLLECTIVES, GPU, TRANSFERS, Kind, Schedule


@dataclass(frozen=True, slots=True)
class Ledgers:
    """The device of a training, and what counts its memory and the host's.

    Args:
        accelerator: the device of the passes; the CPU stands in for it if there is no GPU.
        device, host: for the memory of states and passes; None: not counted. A GPU's memory is limited to its capacity as long
            as the model is taken over.
        pinned: for pinned host memory; there is none if the CPU stands in for the device.
        counting: how device memory is counted.
    """

    accelerator: Device = field(default_factory=lambda: device_for(torch.device("cpu")))
    device: Ledger | AllocatorMemory | None = None
    host: Ledger | None = None
    pinned: Ledger | None = None
    counting: Counting = Counting.EXACT

    def __post_init__(self) -> None:
        check_fields(self)


class Takeover:
    """The states of a model as ``schedule`` needs them. Takes over the model's parameters until :meth:`close`.

    Args:
        partition: the model, cut into blocks.
        schedule: its tasks and buffers determine where each block's states live.
        recipe: what a step computes.
        ledgers: the device, and what counts memory.
        collectives: if this process is one of several ranks, each of which takes over its own copy of the model.
        poison: overwrite released memory with NaN, so that a schedule that still reads it is detected.

    Attributes:
        states: the model states.
        passes: the computation; takes the batches and has the losses.
        actions: perform the schedule's tasks, with the states and the passes.
        evaluation: evaluates the model between iterations.
        guard: handles the caller's uses of the parameters between iterations.
    """

    def __init__(
        self,
        partition: Partition,
        schedule: Schedule,
        recipe: Recipe,
        ledgers: Ledgers | None = None,
        *,
        collectives: Collectives | None = None,
        poison: bool = False,
    ) -> None:
        if any(task.id.kind in TRANSFERS for task in schedule.tasks):
            raise InputError("the schedule is a pipeline, which the runtime cannot execute: plan without stages")
        if collectives is None and any(task.id.kind in COLLECTIVES for task in schedule.tasks):
            raise InputError(
                "the schedule is for several GPUs, but one process trains on one: start a process for each "
                "(torch.distributed), or lower the schedule for hardware with one GPU"
            )
        ledgers = ledgers or Ledgers()
        accelerator, device = ledgers.accelerator, ledgers.device
        accelerator.prepare()
        allocator = device if isinstance(device, AllocatorMemory) else AllocatorMemory(accelerator.torch_device)
        #: Counts the device's memory; None: not counted.
        self.count = count = DeviceCount(device, schedule, ledgers.counting) if isinstance(device, Ledger) else None
        memories = Memories(accelerator, count, ledgers.host, allocator, ledgers.pinned)
        self._undo = ExitStack()
        check_trainable(partition.model)
        clipping = Clipping(recipe.clip_norm, schedule, partition.order, wide=recipe.updates.masters)
        with ExitStack() as undo:
            if device is allocator:
                moving = _moving_bytes(partition, accelerator.torch_device)
                undo.enter_context(allocator.limited(allocator.used_bytes + moving))
            self.states = States(
                partition.owned,
                partition.frozen,
                schedule,
                recipe.updates,
                memories,
                clipping,
                poison=poison,
                collectives=collectives,
            )
            self.passes = Passes(partition, self.states, LossCall(recipe.loss), memories)
            self.passes.skips_gradients = recipe.skip_nonfinite and updates_wait_for_backward(schedule)
            if self.states.ranks is not None and recipe.skip_nonfinite and recipe.clip_norm is None:
                self.states.ranks.agrees = True
                if any(task.id.kind is Kind.ACCUMULATE for task in schedule.tasks):  # sums that one rank alone knows
                    self.passes.skips_gradients = False
            undo.callback(self.passes.forget)
            if count is not None:
                undo.callback(count.close)
            undo.callback(self.states.give_back)
            for place in buffers_of(partition.model.named_modules()):  # by place, which may have another tensor at the end
                undo.callback(_move_what_is_at, place, place.value.device)
            for tensor in partition.lasting:
                undo.callback(_move, tensor, tensor.device)
                tensor.data = accelerator.moved(tensor.data)
            self.passes.make_room()
            self.states.take_over()
            for i, unit in enumerate(self.states.units):
                for index, parameter in enumerate(unit.parameters):
                    hook = parameter.register_post_accumulate_grad_hook(self.passes.receiver(i, index))  # type: ignore[no-untyped-call]
                    undo.callback(hook.remove)
            undo.enter_context(packed_for_training(partition.model))
            self.guard = Guard(partition.model, self.states)
            undo.callback(self.guard.release)
            self._undo = undo.pop_all()
        self.actions = Actions(schedule, self.states, self.passes, self.guard, memories)
        self.evaluation = Evaluation(self.passes, self.guard, memories)
        memories.settle()

    @property
    def device(self) -> Ledger | None:
        """The ledger of the device; None: not counted."""
        return None if self.count is None else self.count.ledger

    def parameters(self) -> list[Tensor]:
        """Return a copy of every trained parameter in block order; see :meth:`States.parameters`."""
        with self.guard.resumed(), self.guard.inside():
            return self.states.parameters()

    def close(self) -> None:
        """Give the model back its forwards and its trained parameters, in host memory."""
        self._undo.close()


def _move_what_is_at(place: ModulePlace, device: torch.device) -> None:
    if isinstance(place.value, Tensor):
        _move(place.value, device)


def only_gpu_works(schedule: Schedule) -> bool:
    """Whether only the GPU's lane has tasks. If the CPU stands in for the GPU, all of its cores are then free for it."""
    return all(task.lane == GPU for task in schedule.tasks)


def _moving_bytes(partition: Partition, device: torch.device) -> int:
    """Return the bytes that taking over brings to ``device`` besides the training states: frozen tensors move in, and trained
    ones leave their old place."""
    coming = sum(tensor.nbytes for tensor in partition.lasting if tensor.device != device)
    return coming - sum(p.nbytes for owned in partition.owned for p in owned if p.device == device)


def _move(tensor: Tensor, device: torch.device) -> None:
    tensor.data = tensor.data.to(device)
