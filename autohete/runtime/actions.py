"""The action of each kind of task, with the allocations before it and the frees after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial

import torch
from torch.autograd import profiler

from autohete.runtime.guard import Guard
from autohete.runtime.ledger import accounting
from autohete.runtime.passes import Passes
from autohete.runtime.states import States, ends_of_copies
from autohete.runtime.units import Memories
from autohete.schedule import COPIES, GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY, Buffer, Free, Kind, Schedule, Task, Value

#: Blocks whose gradients are allocated before a task, whose gradients replace parameters after it, whose gradients are added
#: to those of earlier micro-batches after it, whose parameters are released after it, and have passed the host.
_Room = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Actions:
    """Maps each kind of task to its action.

    Args:
        schedule: the schedule whose tasks are performed.
        states: the model states, for copies, updates and norms.
        passes: the GPU's computations.
        guard: gives the actions access to the parameters.
        memories: where tensors live.
    """

    def __init__(self, schedule: Schedule, states: States, passes: Passes, guard: Guard, memories: Memories) -> None:
        self._states, self._passes, self._guard, self._memories = states, passes, guard, memories
        self._rooms = {task.id: _room(task) for task in schedule.tasks}
        self._actions: dict[Kind, Callable[[int], None]] = {
            Kind.FORWARD: passes.forward,
            Kind.LOSS: passes.compute_loss,
            Kind.RECOMPUTE: passes.recompute,
            Kind.BACKWARD: passes.backward,
            Kind.GPU_UPDATE: states.gpu_update,
            Kind.CPU_UPDATE: states.cpu_update,
            Kind.ACCUMULATE: states.add_arrived,
            Kind.GRADIENT_NORM: states.measure_gradients,
            Kind.CLIP: states.clip,
            **(states.ranks.actions if states.ranks is not None else {}),
        }
        self._copies: dict[Value, Callable[[int, str, str], None]] = {
            Value.PARAMETERS: states.copy_parameters,
            Value.GRADIENTS: states.copy_gradients,
            Value.ACTIVATIONS: passes.copy_activations,
            Value.OPTIMIZER_STATES: states.copy_states,
        }
        self._ends = ends_of_copies(schedule)

    def perform(self, task: Task, iteration: int) -> None:
        """Perform ``task`` and count its bytes, for callers that run one task after another.

        Raises:
            DeviceOutOfMemoryError: a memory's budget is used up.
        """
        count = self._memories.count
        if count is not None:
            count.begin(task, iteration)
        finish = self.act(task, iteration)
        if finish is not None:
            self._memories.accelerator.finish()
            finish()
        if count is not None:
            count.end(task, iteration)

    def act(self, task: Task, iteration: int) -> Callable[[], None] | None:
        """Perform ``task``, whose buffers the caller counts: allocate its buffers, act, then release what it frees.

        On a device that runs ahead, return what to call once the device has done the work. It releases what must live until
        then, and raises what the results show, such as a gradient that is not finite.

        Raises:
            DeviceOutOfMemoryError: a memory's budget is used up.
        """
        profiled = profiler._is_profiler_enabled  # even an empty context manager takes time
        named = profiler.record_function(task.id.at(iteration)) if profiled else nullcontext()
        with named, self._guard.inside(loss=task.id.kind is Kind.LOSS):
            return self._act(task, iteration)

    def _act(self, task: Task, iteration: int) -> Callable[[], None] | None:
        current, states = self._memories.current, self._states
        current.task, current.iteration, current.alive, current.later = task.id.at(iteration), iteration, [], []
        current.micro_batch, current.part = task.id.micro_batch, task.id.again
        makes, replaces, adds, releases, arrived = self._rooms[task.id]
        count = self._memories.count
        ledger = None if count is None else count.storages_of(task, iteration)
        try:
            # Even an empty context manager takes time.
            if ledger is None or count is None:
                self._work(task, makes)
            else:
                with accounting(ledger, current.task, _left_by(task), count.compare):
                    self._work(task, makes)
            for i in replaces:
                states.replace_parameters(i)
            for i in adds:
                states.add_gradients(i)
            if task.id.kind is Kind.BACKWARD:
                states.end_backward(task.id.unit)
            for i in releases:
                states.poison(i)
            for i in releases:
                states.release(i)
            for i in arrived:
                states.release_on_host(i)
        except BaseException as error:
            self._memories.accelerator.finish()  # only now may be freed what the work uses
            current.alive, current.later = [], []
            if isinstance(error, torch.OutOfMemoryError):
                raise self._memories.allocator.refusal(current.task, error) from error
            raise
        alive, later, current.alive, current.later = current.alive, current.later, [], []
        if not self._memories.accelerator.runs_ahead:
            return None
        return partial(self._finish, task, iteration, alive, later)

    def _finish(self, task: Task, iteration: int, alive: list[object], later: list[Callable[[], None]]) -> None:
        current = self._memories.current
        current.task, current.iteration = task.id.at(iteration), iteration
        current.micro_batch, current.part = task.id.micro_batch, task.id.again
        alive.clear()
        for act in later:
            act()

    def _work(self, task: Task, makes: tuple[int, ...]) -> None:
        for i in makes:
            self._states.make_gradients(i)
        copy = COPIES.get(task.id.kind)
        if copy is None:
            self._actions[task.id.kind](task.id.unit)
        else:
            self._copies[copy.value](task.id.unit, *self._ends[task.lane])


def _left_by(task: Task) -> str:
    """Return the buffer group of what a pass leaves behind."""
    if task.id.kind in (Kind.FORWARD, Kind.RECOMPUTE):
        made = {buffer.id.value for buffer in task.allocates}
        return Value.ACTIVATIONS.value if Value.ACTIVATIONS in made else "input"
    return "logits_gradient" if task.id.kind is Kind.LOSS else "workspace"


def _room(task: Task) -> _Room:
    """Return what ``task`` allocates, replaces, adds and releases on the device, besides its action."""

    def units(value: Value, buffers: Iterable[Buffer | Free]) -> tuple[int, ...]:
        ids = (buffer.id for buffer in buffers)
        return tuple(b.unit for b in ids if b.value is value and b.memory == GPU_MEMORY and b.unit is not None)

    ended = units(Value.GRADIENTS, task.frees) if task.id.kind is Kind.BACKWARD else ()
    replaces, adds = ((), ended) if task.id.micro_batch else (ended, ())
    made = units(Value.GRADIENTS, task.allocates) if task.id.kind is Kind.BACKWARD else ()
    if task.id.micro_batch:  # what is freed at once is added, one parameter after another, to gradients that are there
        at_once = set(made) & set(ended)
        made, adds = (tuple(unit for unit in some if unit not in at_once) for some in (made, adds))
    on_host = (HOST_MEMORY, PINNED_MEMORY)
    arrived = tuple(b.id.unit for b in task.frees if b.id.value is Value.PARAMETERS and b.id.memory in on_host)
    return made, replaces, adds, units(Value.PARAMETERS, task.frees), tuple(unit for unit in arrived if unit is not None)
