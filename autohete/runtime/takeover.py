"""A model taken over for training, until it is given back: its states, passes, actions and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autohete.errors import InputError, check_fields
from autohete.runtime.actions import Actions
from autohete.runtime.collectives import Collectives
from autohete.runtime.device import AllocatorMemory, Device, device_for
from autohete.runtime.evaluation import Evaluation
from autohete.runtime.gradient_norm import Clipping
from autohete.runtime.guard import Guard, check_trainable
from autohete.runtime.ledger import CHECKED_ITERATIONS, Counting, DeviceCount, Ledger
from autohete.runtime.model_state import ModulePlace, buffers_of
from autohete.runtime.nonfinite import updates_wait_for_backward
from autohete.runtime.partition import Partition, packed_for_training
from autohete.runtime.passes import Passes
from autohete.runtime.settings import Recipe
from autohete.runtime.states import States
from autohete.runtime.units import Memories
from autohete.schedule import COLLECTIVES, GPU, IN_PLACES, SEND, Kind, Schedule, Value


@dataclass(frozen=True, slots=True)
class Ledgers:
    """The device of a training, and what counts its memory and the host's.

    Args:
        accelerator: the device of the passes; the CPU stands in for it if there is no GPU.
        device, host: for the memory of states and passes; None: not counted. A GPU's memory is limited to its capacity as long
            as the model is taken over.
        pinned: for pinned host memory; there is none if the CPU stands in for the device.
        counting: how device memory is counted.
        folder: of the file with what rests in another place than the device and the host; None: ``TMPDIR``.
    """

    accelerator: Device = field(default_factory=lambda: device_for(torch.device("cpu")))
    device: Ledger | AllocatorMemory | None = None
    host: Ledger | None = None
    pinned: Ledger | None = None
    counting: Counting = Counting.EXACT
    folder: str | None = None

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
        gave_back: whether it has given back the model because a schedule could not be followed.
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
        check_executable(schedule, collectives)
        self._partition, self._recipe, self._collectives, self._poison = partition, recipe, collectives, poison
        self._ledgers = ledgers or Ledgers()
        accelerator, device = self._ledgers.accelerator, self._ledgers.device
        accelerator.prepare()
        #: Counts the device's memory; None: not counted.
        self.count: DeviceCount | None = None
        self.gave_back = False
        #: What ends with the schedule; and the schedules whose sizes have been compared with what is allocated.
        self._following, self._compared = ExitStack(), list[Schedule]()
        check_trainable(partition.model)
        self.states = self._states_for(schedule)
        with ExitStack() as undo:
            if isinstance(device, AllocatorMemory):
                moving = _moving_bytes(partition, accelerator.torch_device)
                undo.enter_context(device.limited(device.used_bytes + moving))
            for place in buffers_of(partition.model.named_modules()):  # by place, which may have another tensor at the end
                undo.callback(_move_what_is_at, place, place.value.device)
            for tensor in partition.lasting:
                undo.callback(_move, tensor, tensor.device)
                tensor.data = accelerator.moved(tensor.data)
            undo.callback(self._following.close)
            self._begin(self.states.take_over)
            undo.enter_context(packed_for_training(partition.model))
            self.guard = Guard(partition.model, self.states)
            undo.callback(self.guard.release)
            self._undo = undo.pop_all()
        self._set_actions()

    def follow(self, schedule: Schedule, first: int) -> None:
        """Follow another schedule from iteration ``first`` on, once all iterations before it have ended.

        The states move to where it expects them: not at all if they are there, otherwise through the memory of the host, which
        has all of them meanwhile.

        Raises:
            InputError: it cannot follow the present one; nothing has been changed.
            DeviceOutOfMemoryError: there is no room for the states; the model has been given back.
        """
        check_executable(schedule, self._collectives)
        if self._collectives is not None:
            raise InputError("several ranks have one schedule throughout: leave it, or train in one process")
        before, observe, held = self.states, self.passes.observe, dict[int, dict[str, Any]]()
        after = self._states_for(schedule)
        if not after.delays_as(before):
            raise InputError(
                "the schedules delay the updates of different blocks, which changes what is trained: follow one that delays "
                "those of the same blocks"
            )
        if self.count is not None and self.count.is_compared and not self._is_compared(before.schedule):
            self._compared.append(before.schedule)
        with self.guard.resumed(), self.guard.inside():
            after.continue_from(before)
            if after.is_placed_as(before):
                after.adopt(before)
                place = after.count
            else:
                before.handed_to = lambda parameter, states: held.__setitem__(id(parameter), states)
                place = partial(after.take_over, held)
            try:
                self._following.close()
                self._reset_peaks()
                self.states = after
                self._begin(place, first)
            except BaseException:
                self.gave_back = True
                for parameter in (parameter for owned in self._partition.owned for parameter in owned):
                    if id(parameter) in held and after.handed_to is not None:  # those that were not reached
                        after.handed_to(parameter, held[id(parameter)])
                raise
            self.guard.follow(after)
        self.passes.observe = observe
        self._set_actions()

    def _states_for(self, schedule: Schedule) -> States:
        """The states as a schedule needs them, which have taken over nothing yet."""
        ledgers, partition, recipe = self._ledgers, self._partition, self._recipe
        accelerator, device = ledgers.accelerator, ledgers.device
        allocator = device if isinstance(device, AllocatorMemory) else AllocatorMemory(accelerator.torch_device)
        return States(
            partition.owned,
            partition.frozen,
            schedule,
            recipe.updates,
            Memories(accelerator, None, ledgers.host, allocator, ledgers.pinned),
            Clipping(recipe.clip_norm, schedule, partition.order, wide=recipe.updates.masters),
            poison=self._poison,
            collectives=self._collectives,
            folder=ledgers.folder,
        )

    def _begin(self, place: Callable[[], None], first: int = 0) -> None:
        """Prepare the passes, let ``place`` bring the states to their places, and count both."""
        partition, recipe, states = self._partition, self._recipe, self.states
        schedule, memories = states.schedule, states.memories
        self.count = memories.count = self._count_for(schedule, first)
        with ExitStack() as undo:
            self.passes = Passes(partition, states, recipe.loss_call, memories)
            self.passes.skips_gradients = recipe.skip_nonfinite and updates_wait_for_backward(schedule)
            if states.ranks is not None and recipe.skip_nonfinite and recipe.clip_norm is None:
                states.ranks.agrees = True
                if any(task.id.kind is Kind.ACCUMULATE for task in schedule.tasks):  # sums that one rank alone knows
                    self.passes.skips_gradients = False
            undo.callback(self.passes.forget)
            if self.count is not None:
                undo.callback(self.count.close)
            undo.callback(states.give_back)
            self.passes.make_room()
            place()
            for i, unit in enumerate(states.units):
                for index, parameter in enumerate(unit.parameters):
                    hook = parameter.register_post_accumulate_grad_hook(self.passes.receiver(i, index))  # type: ignore[no-untyped-call]
                    undo.callback(hook.remove)
            self._following.enter_context(undo.pop_all())

    def _count_for(self, schedule: Schedule, first: int) -> DeviceCount | None:
        """Counts the device's memory from iteration ``first`` on; None: it is not counted."""
        device, counting = self._ledgers.device, self._ledgers.counting
        if self.count is not None:
            device, counting = self.count.ledger, self.count.counting
        if not isinstance(device, Ledger):
            return None
        checked = range(first, first if self._is_compared(schedule) else first + CHECKED_ITERATIONS)
        return DeviceCount(device, schedule, counting, checked)

    def _is_compared(self, schedule: Schedule) -> bool:
        return any(one is schedule for one in self._compared)

    def _reset_peaks(self) -> None:
        counted = self._ledgers.device if self.count is None else self.count.ledger
        for ledger in (counted, self._ledgers.host, self._ledgers.pinned):
            if ledger is not None:
                ledger.reset_peak()

    def _set_actions(self) -> None:
        memories = self.states.memories
        self.actions = Actions(self.states.schedule, self.states, self.passes, self.guard, memories)
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
        self._ledgers.accelerator.leave()


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


def check_executable(schedule: Schedule, collectives: Collectives | None) -> None:
    """Check that this process can execute a schedule.

    Raises:
        InputError: it is a pipeline, updates in a place, keeps results of products, or is of several GPUs though this process
            is alone.
    """
    if any(lane.name.partition(".")[0] == SEND for lane in schedule.lanes):
        raise InputError("the schedule is a pipeline, which the runtime cannot execute: plan without stages")
    if any(task.id.kind in IN_PLACES for task in schedule.tasks):
        raise InputError("the schedule updates in a place, which the runtime cannot execute: update on the GPU or the CPU")
    recomputations = (task for task in schedule.tasks if task.id.kind is Kind.RECOMPUTE)
    if any(free.id.value is Value.ACTIVATIONS for task in recomputations for free in task.frees):
        raise InputError(
            "the schedule keeps results of products for recomputations, which the runtime cannot execute: keep only inputs"
        )
    if collectives is None and any(task.id.kind in COLLECTIVES for task in schedule.tasks):
        raise InputError(
            "the schedule is for several GPUs, but one process trains on one: start a process for each "
            "(torch.distributed), or lower the schedule for hardware with one GPU"
        )
