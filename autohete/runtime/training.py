"""A training as the lanes see it: an action for each kind of task, on the model's real states and passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from autohete.errors import DeviceOutOfMemoryError, InputError, check_member
from autohete.runtime.batch import Batch, Inputs, Loss
from autohete.runtime.blocks import Current, Memories
from autohete.runtime.gradient_norm import Clipping
from autohete.runtime.guard import Guard, check_trainable
from autohete.runtime.ledger import Counting, CudaMemory, DeviceCount, Ledger, accounting, keep_freed_memory
from autohete.runtime.model_state import Place, Snapshot, buffers_of, unchanged_random_state
from autohete.runtime.nonfinite import updates_wait_for_backward
from autohete.runtime.optimizer import Adam
from autohete.runtime.partition import Partition
from autohete.runtime.passes import Passes
from autohete.runtime.states import States
from autohete.schedule import COLLECTIVES, COPIES, GPU, GPU_MEMORY, Buffer, Copy, Free, Kind, Schedule, Task, Value

#: Blocks whose gradients get room before a task, whose gradients replace parameters after it, whose gradients are added to
#: those of the micro-batches before, whose parameters leave then.
_Room = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Training:
    """Actions on the states of a model as ``schedule`` needs them. Takes over the model's parameters until :meth:`close`.

    Args:
        partition: the model, cut into blocks.
        schedule: tells by its tasks and buffers where each block's states live.
        loss: of logits and targets.
        adam: the optimizer's settings.
        torch_device: where the passes compute; the CPU stands for the device where there is no other.
        device, host: count the memory of the states, and of the passes; None: it is not counted. A GPU's is limited to its
            capacity until :meth:`close`.
        counting: how the device's is counted.
        clip_norm: the largest global norm of the gradients, where the schedule clips them: as
            ``torch.nn.utils.clip_grad_norm_`` over all trained parameters.
        skip_nonfinite: let iterations with gradients that are not finite change nothing and go on, where the schedule allows
            it; else they raise :class:`~autohete.errors.NonFiniteGradientError`.
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
        device: Ledger | CudaMemory | None = None,
        host: Ledger | None = None,
        counting: Counting = Counting.EXACT,
        clip_norm: float | None = None,
        skip_nonfinite: bool = False,
        poison: bool = False,
    ) -> None:
        check_member("counting", counting, Counting)
        if any(task.id.kind in COLLECTIVES for task in schedule.tasks):
            raise InputError(
                "the schedule is for several GPUs, but one process trains with one: lower it for hardware of one GPU"
            )
        torch_device = torch_device or torch.device("cpu")
        if torch_device.type == "cpu":
            keep_freed_memory()
        self._stream = partial(torch.cuda.current_stream, torch_device) if torch_device.type == "cuda" else None
        self._current = Current()
        self._cuda_memory = device if isinstance(device, CudaMemory) else CudaMemory(torch_device)
        count = DeviceCount(device, schedule, counting) if isinstance(device, Ledger) else None
        self._memories = Memories(torch_device, count, host, self._current)
        self._rooms = {task.id: _room(task) for task in schedule.tasks}
        self._undo = ExitStack()
        check_trainable(partition.model)
        clipping = Clipping(clip_norm, schedule, partition.order)
        with ExitStack() as undo:
            if isinstance(device, CudaMemory):
                undo.enter_context(device.limited(device.used_bytes + _moving_bytes(partition, torch_device)))
            self.states = States(partition.owned, schedule, adam or Adam(), self._memories, clipping, poison=poison)
            self.passes = Passes(partition, self.states, loss, self._memories)
            self.passes.skips_gradients = skip_nonfinite and updates_wait_for_backward(schedule)
            undo.callback(self.passes.forget)
            if count is not None:
                undo.callback(count.close)
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
            Kind.CPU_UPDATE: self.states.cpu_update,
            Kind.ACCUMULATE: self.states.add_arrived,
            Kind.GRADIENT_NORM: self.states.measure_gradients,
            Kind.CLIP: self.states.clip,
            **{kind: partial(self._copy, copy) for kind, copy in COPIES.items()},
        }
        self._memories.settle()

    def perform(self, task: Task, iteration: int) -> None:
        """Do ``task``: make room for what it brings, act, and let go of what it frees.

        Raises:
            DeviceOutOfMemoryError: a memory's budget is used up.
        """
        with self.guard.inside(loss=task.id.kind is Kind.LOSS):
            self._perform(task, iteration)

    def _perform(self, task: Task, iteration: int) -> None:
        current, states = self._current, self.states
        current.task, current.iteration, current.alive = task.id.at(iteration), iteration, []
        current.micro_batch = task.id.micro_batch
        makes, replaces, adds, releases = self._rooms[task.id]
        count = self._memories.count
        ledger = None if count is None else count.begin(task, iteration)
        try:
            # A context that does nothing takes time, too.
            if ledger is None or count is None:
                self._act(task, makes)
            else:
                with accounting(ledger, current.task, self._left_by(task), count.compare):
                    self._act(task, makes)
            for i in replaces:
                states.replace_parameters(i)
            for i in adds:
                states.add_gradients(i)
            for i in releases:
                states.poison(i)
        except torch.OutOfMemoryError as error:
            raise self._cuda_memory.refusal(current.task, error) from error
        finally:
            if self._stream is not None:
                # Only now is the work done: what another stream has allocated may be freed, and the next task begin.
                self._stream().synchronize()
            current.alive = []
        for i in releases:
            states.release(i)
        if count is not None:
            count.end(task, iteration)

    def _act(self, task: Task, makes: tuple[int, ...]) -> None:
        for i in makes:
            self.states.make_gradients(i)
        self._actions[task.id.kind](task.id.unit)

    def _copy(self, copy: Copy, i: int) -> None:
        copies = {
            Value.PARAMETERS: self.states.copy_parameters,
            Value.GRADIENTS: self.states.copy_gradients,
            Value.ACTIVATIONS: self.passes.copy_activations,
            Value.OPTIMIZER_STATES: self.states.copy_states,
        }
        copies[copy.value](i, copy.source, copy.target)

    @property
    def count(self) -> DeviceCount | None:
        """Who counts the device's memory, and how."""
        return self._memories.count

    @property
    def device(self) -> Ledger | None:
        """What has been counted on the device; None: nothing."""
        return None if self.count is None else self.count.ledger

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

        Modes of all modules, buffers and random states are as before afterwards. Call it when every update has ended. What is
        allocated inside is counted storage by storage.
        """
        partition, count = self.passes.partition, self._memories.count
        with self.guard.inside():
            before = Snapshot(partition.model.named_modules(), partition.effects.changing)
        self._current.task = "evaluation"
        try:
            with (
                unchanged_random_state(self._memories.torch_device),
                nullcontext() if count is None else count.exactly("evaluation"),
            ):
                partition.model.eval()
                yield self._evaluate
        finally:
            with self.guard.inside():
                before.restore()

    def _evaluate(self, inputs: Inputs) -> Tensor:
        with self.guard.resumed(), self.guard.inside():
            return self.passes.evaluate(inputs)

    def evaluate(self, batch: Batch) -> float:
        """Loss of one batch without training; see :meth:`evaluation`.

        Raises:
            DeviceOutOfMemoryError: it takes more than is left on the device; nothing has changed.
        """
        device = self._memories.torch_device
        try:
            with self.evaluation() as logits, torch.no_grad():
                return float(self.passes.loss(logits(batch.inputs), batch.targets.to(device)).item())
        except (DeviceOutOfMemoryError, torch.OutOfMemoryError) as caught:
            error = self._cuda_memory.refusal("evaluation", caught) if isinstance(caught, torch.OutOfMemoryError) else caught
            size = " x ".join(map(str, batch.targets.shape))
            raise DeviceOutOfMemoryError(
                f"a batch of {size} tokens is too large to evaluate beside the states of training: "
                f"{str(error).rpartition('. Give')[0]}. Evaluate smaller batches; training can go on",
                error.task,
                error.size_bytes,
                error.capacity_bytes,
                error.holders,
            ) from caught

    def _left_by(self, task: Task) -> str:
        """The group of what a pass leaves behind."""
        if task.id.kind in (Kind.FORWARD, Kind.RECOMPUTE):
            made = {buffer.id.value for buffer in task.allocates}
            return next((v.value for v in (Value.ACTIVATIONS, Value.SELECTED_ACTIVATIONS) if v in made), "input")
        return "logits_gradient" if task.id.kind is Kind.LOSS else "workspace"


def _move_what_is_at(place: Place, device: torch.device) -> None:
    if isinstance(place.value, Tensor):
        _move(place.value, device)


def only_gpu_works(schedule: Schedule) -> bool:
    """Whether no other lane than the GPU's has a task: where the CPU stands for the GPU, all of its cores are free for it."""
    return all(task.lane == GPU for task in schedule.tasks)


def _room(task: Task) -> _Room:
    """What ``task`` does with room on the device, beside its action."""

    def units(value: Value, buffers: Iterable[Buffer | Free]) -> tuple[int, ...]:
        ids = (buffer.id for buffer in buffers)
        return tuple(b.unit for b in ids if b.value is value and b.memory == GPU_MEMORY and b.unit is not None)

    ended = units(Value.GRADIENTS, task.frees) if task.id.kind is Kind.BACKWARD else ()
    replaces, adds = ((), ended) if task.id.micro_batch else (ended, ())
    return units(Value.GRADIENTS, task.allocates), replaces, adds, units(Value.PARAMETERS, task.frees)


def _moving_bytes(partition: Partition, device: torch.device) -> int:
    """Bytes that taking over brings to ``device`` beside the states of the training: what is frozen comes, what is trained goes
    from where it was."""
    coming = sum(tensor.nbytes for tensor in partition.lasting if tensor.device != device)
    return coming - sum(p.nbytes for owned in partition.owned for p in owned if p.device == device)


def _move(tensor: Tensor, device: torch.device) -> None:
    tensor.data = tensor.data.to(device)
