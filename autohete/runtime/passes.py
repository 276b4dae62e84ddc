"""The GPU's passes: forward, loss, recomputation and backward, and the movement of what a pass keeps for backward.

Kept tensors can be moved. Parameters are kept by reference only, because they may be elsewhere by the time of backward.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_map

from autohete.errors import InputError, NonFiniteGradientError, ScheduleError
from autohete.quantities import format_bytes
from autohete.runtime.autocast import Autocast
from autohete.runtime.batch import Batch, Inputs, on_device
from autohete.runtime.forward_pass import BackwardGraph, BlockCall, ForwardPass, Handed, cut, hidden_of, nodes_of, with_hidden
from autohete.runtime.ledger import WORKSPACE, Ledger
from autohete.runtime.loss_call import LossCall
from autohete.runtime.losses import check_loss
from autohete.runtime.model_state import ModulePlace, RandomState, addresses, buffers_of, tensors_in, unchanged_random_state
from autohete.runtime.nonfinite import not_finite_among
from autohete.runtime.partition import Partition
from autohete.runtime.recorder import AsRead, Geometry, Recorder, Remaking, Saved
from autohete.runtime.state_files import Stored, copied_to
from autohete.runtime.states import States
from autohete.runtime.units import Memories, UnitTensors
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, Kind, Schedule, Value

#: Backward of a block with such tasks needs values that may have moved since its forward.
_MOVING = {
    Kind.PREFETCH_FORWARD,
    Kind.PREFETCH_BACKWARD,
    Kind.GATHER_FORWARD,
    Kind.GATHER_BACKWARD,
    Kind.OFFLOAD_ACTIVATIONS,
}
#: Calls of the loss, the current one included, whose logits it may keep.
_KEPT_LOGITS = 2


@dataclass(frozen=True, slots=True)
class _Forward:
    """A forward of a block, or a recomputation, derived from the buffers that its task allocates and frees.

    Args:
        keeps_all: it keeps everything backward needs.
        selects: it keeps some of what backward needs, and the rest is made again from it.
        keeps_input: it keeps at least the input.
        hands_on: its output is the input of the block above, which runs next.
    """

    keeps_all: bool
    selects: bool
    keeps_input: bool
    hands_on: bool


def _forwards_of(schedule: Schedule, units: int) -> list[list[_Forward]]:
    """The forwards of each block, in order. They are the same for all micro-batches."""
    found: list[list[_Forward]] = [[] for _ in range(units)]
    recomputed = {task.id.unit for task in schedule.tasks if task.id.kind is Kind.RECOMPUTE}
    for task in schedule.tasks:
        unit = task.id.unit
        if task.id.kind in (Kind.FORWARD, Kind.RECOMPUTE) and not task.id.micro_batch:
            made = {(buffer.id.value, buffer.id.unit) for buffer in task.allocates}
            dropped = any((free.id.value, free.id.unit) == (Value.INPUT, unit) for free in task.frees)
            keeps = (Value.ACTIVATIONS, unit) in made
            selects = keeps and task.id.kind is Kind.FORWARD and unit in recomputed
            found[unit].append(_Forward(keeps and not selects, selects, not dropped, (Value.INPUT, unit + 1) in made))
    return found


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a block's activations, of which each goes its own way.

    Args:
        names: the part of the saved tensors that the schedule names.
        others: the part of all others, and of the input.
        recomputes: part 0 is made again.
        selective: it is what is cheap to make again.
    """

    names: Mapping[str, int]
    others: int
    recomputes: bool
    selective: bool


def _parts_of(schedule: Schedule, forwards: Sequence[Sequence[_Forward]]) -> list[_Parts | None]:
    """The parts of each block's activations; None if all of them go one way."""
    names: list[dict[str, int]] = [{} for _ in forwards]
    for unit, part, some in schedule.saved:
        names[unit] |= dict.fromkeys(some, part)
    found: list[_Parts | None] = []
    for named, passes in zip(names, forwards, strict=True):
        selects = bool(passes) and passes[0].selects
        taken = {*named.values(), *([0] if selects else [])}
        others = next(part for part in range(len(taken) + 1) if part not in taken)
        found.append(_Parts(named, others, selects, selects and not named) if taken else None)
    return found


@dataclass(slots=True)
class _Transit:
    """What one pass leaves for the next: the suspended forward of the model, and a result of the GPU.

    ``redone`` is the output of a recomputation within a segment; ``handed`` is what backward has last computed the gradient of.
    """

    forward: ForwardPass | None = None
    call: BlockCall | None = None
    redone: Tensor | None = None
    result: Any = None
    logits: Tensor | None = None
    handed: Handed | None = None

    @property
    def tensor(self) -> Tensor | None:
        """Hidden states, logits, or the gradient of either."""
        if self.call is not None:
            return self.call.hidden
        if self.result is not None:
            return hidden_of(self.result)
        if self.redone is not None:
            return self.redone
        return self.logits if self.logits is not None or self.handed is None else self.handed.gradient


@dataclass(frozen=True, slots=True)
class _OfParameters:
    """Stands for a tensor in the memory of a block's parameters, which may leave and come back elsewhere."""

    place: Geometry


class _Kept:
    """What a block keeps from forward to forward in addition to its parameters.

    Args:
        partition: the model, cut into blocks.
        i: index of the block.

    Attributes:
        changing, unchanging: buffers that a forward changes, and the others.
        copies: the changing buffers, with memory for their values before the forward.
        attributes: attributes that hold tensors of a forward.
    """

    def __init__(self, partition: Partition, i: int) -> None:
        modules, effects = partition.named_modules(i), partition.effects
        buffers, holders = buffers_of(modules), {name: vars(module) for name, module in modules}
        self.changing = [place for place in buffers if place.name in effects.changing]
        self.unchanging = [place for place in buffers if place.name not in effects.changing]
        self.copies: list[tuple[ModulePlace, Tensor]] = []
        names = [name.rpartition(".")[::2] for name in sorted(effects.keeping)]
        self.attributes = [(holders[module], key) for module, key in names if module in holders]

    def make_copies(self) -> None:
        """Allocate the copies of the changing buffers."""
        self.copies = [(place, torch.empty_like(place.value)) for place in self.changing]

    def tensors(self) -> Iterator[Tensor]:
        """The tensors kept now that are not parameters."""
        yield from (place.value for place in self.changing)
        yield from (then for _, then in self.copies)
        for holder, key in self.attributes:
            for tensor in tensors_in(holder.get(key)):
                yield tensor
                if tensor.retains_grad and tensor.grad is not None:
                    yield tensor.grad


class Passes:
    """The passes of a training run.

    Args:
        partition: the model, cut into blocks. It is intercepted only during its forward, so the caller's model is unmodified
            between iterations.
        states: its model states.
        loss: of logits and a batch.
        memories: where tensors live.

    Attributes:
        batches: by iteration and micro-batch; to be given before the iteration begins.
        losses: by iteration, as they become known. With several micro-batches, the mean.
        skipped: iterations with a non-finite loss or gradient, with the first place where it occurred. They update nothing
            more.
        observe: called with a parameter, the micro-batch and the gradient that a backward has just found.
        before_release: called with a block whose forward is about to release what is made again.
        adds_to_zeros: gradients of what blocks take besides hidden states are added to zeros where no later block has taken it,
            so that every block takes the memory of a sum.
        skips_gradients: continue after non-finite gradients. Only possible if all updates wait for the whole backward.
    """

    def __init__(self, partition: Partition, states: States, loss: LossCall, memories: Memories) -> None:
        self.partition, self.states, self.loss, self.memories = partition, states, loss, memories
        self.batches: dict[tuple[int, int], Batch] = {}
        self.micro_batches = states.micro_batches
        self.losses: dict[int, float] = {}
        self.skipped = states.gate.skipped
        self.skips_gradients = self.adds_to_zeros = False
        states.not_finite = self._refuse
        self.observe: Callable[[Tensor, int, Tensor], None] | None = None
        self.before_release: Callable[[int], None] | None = None
        #: Addresses of storages that are neither trained nor moved.
        self._lasting: set[int] = set()
        #: Of each block, places in its result besides hidden states that later parts of the model take.
        self._handed = [
            {place for unit, place in partition.effects.handed if unit == i and place} for i in range(partition.last + 1)
        ]
        self._kept = [_Kept(partition, i) for i in range(partition.last + 1)]
        self._passes = _forwards_of(states.schedule, partition.last + 1)
        #: The first block with a backward. Those below it are frozen.
        self._lowest = min((task.id.unit for task in states.schedule.tasks if task.id.kind is Kind.BACKWARD), default=0)
        self._parts = _parts_of(states.schedule, self._passes)
        #: Whether what a block's backward needs is kept in movable form.
        self._moves = [
            bool(kinds & _MOVING) or parts is not None for kinds, parts in zip(states.kinds, self._parts, strict=True)
        ]
        self._interception = ExitStack()
        #: The blocks' original forwards.
        self._forwards: list[Callable[..., Any]] = []
        self._transit, self._autocast = _Transit(), Autocast.to(loss.autocast, memories.torch_device)
        #: Logits that the loss has got and that still live, and the size of the largest.
        self._given, self._most_logits = Ledger("loss"), 0
        #: Block and parameter index of the gradients found by the current backward.
        self._found: list[tuple[int, int]] = []

    @property
    def in_transit(self) -> Tensor | None:
        """The tensor that the last pass of the GPU has left for the next."""
        return self._transit.tensor

    def keeps(self, tensor: Tensor | None, i: int) -> bool:
        """Whether the storage of ``tensor`` is among those that block ``i`` keeps for backward."""
        if tensor is None:
            return False
        return tensor.untyped_storage().data_ptr() in (saved.untyped_storage().data_ptr() for saved in self._saved_by(i))

    def _saved_by(self, i: int) -> list[Tensor]:
        """The tensors that block ``i`` keeps on the device for backward."""
        unit = self.states.units[i]
        if self._moves[i]:
            return [saved.value for saved in unit.still_saved() if isinstance(saved.value, Tensor)]
        inner = 0 < i < self.partition.last
        edges = list(unit.edges.values()) if inner else [edge for graph in unit.graphs for edge, _ in graph.made]
        return list(_saved(edge.node for edge in edges))

    def make_room(self) -> None:
        """Allocate copies for recomputation, which live as long as the training. Call it once the buffers are in place."""
        self._lasting = addresses(self.partition.lasting)
        for kept, forwards in zip(self._kept, self._passes, strict=True):
            if len(forwards) > 1 and not forwards[0].selects:
                kept.make_copies()

    def give(self, iteration: int, *batches: Batch) -> None:
        """Set the batches of an iteration, one for each micro-batch."""
        assert len(batches) == self.micro_batches, "a batch for each micro-batch"
        self.batches |= {(iteration, micro_batch): batch for micro_batch, batch in enumerate(batches)}

    def forget(self) -> None:
        """Discard the passes in progress."""
        self.states.not_finite = None  # it refers to this object
        self._transit = _Transit()
        self._interception.close()

    def forward(self, i: int) -> None:
        """Compute the block. Keep its graph, or only its input and the random state if it will be recomputed."""
        self._forward(i)
        self._leave_out(i)

    def _forward(self, i: int) -> None:
        unit, last, transit = self.states.units[i], self.partition.last, self._transit
        if i == 0:
            self._forwards = self._interception.enter_context(self.partition.intercepted())
            transit.forward = ForwardPass(self.partition.model, self._autocast, self.partition.effects)
            inputs = on_device(self.batches[self._turn].inputs, self.memories.torch_device, copy=True)
            with torch.enable_grad(), self._saving(0):
                first = transit.forward.start(inputs)
            unit.after, hidden = transit.forward.graph, first.hidden.detach()
            hidden = hidden.clone() if (0, 0) in self.partition.effects.handed else hidden
            self._set_aside(hidden, *self._saved_by(0))  # it lives until the last block: see Partition.lasting_bytes
            transit.call = replace(first, hidden=hidden)
            return
        assert transit.forward is not None
        frozen = i <= self._lowest  # what is below
        if i == last:
            result, transit.result = transit.result, None
            with torch.enable_grad(), self._saving(i):
                logits = transit.forward.finish(result, frozen=frozen)
            self._interception.close()
            below = self.states.units[i - 1]
            below.handed, unit.after, unit.handed = transit.forward.handed, transit.forward.graph, {0: transit.forward.logits}
            unit.given, transit.logits, transit.forward = below.handed.get(0), logits.detach(), None
            self._take_parameters(i, (edge.node for graph in unit.graphs for edge, _ in graph.made))
            return
        call, transit.call = transit.call, None
        assert call is not None
        if call.given is None and i > self._lowest:
            call = replace(call, given=Handed())  # it is measured for equal blocks, whose input has a gradient
        now = self._passes[i][0]
        if i < self._lowest:
            with torch.no_grad():
                result = call.on(self._forwards[i - 1], call.hidden)
        elif now.keeps_all or now.selects:
            result = self._compute_with_graph(i, call)
        else:
            random = RandomState(self.memories.torch_device)
            with self._remembered(i):
                result = self._compute_without_graph(i, call)
            self._checkpoint(unit, call, None if random.is_current() else random, now)
        result = with_hidden(result, hidden_of(result).detach(), self._handed[i])
        if i + 1 < last:
            self._resume(i, result)
        else:
            transit.result = result
            if Kind.OFFLOAD_ACTIVATIONS in self.states.kinds[i] or not now.keeps_input:
                transit.forward.let_go()

    def _resume(self, i: int, result: Any) -> None:
        """Give the model the result of block ``i``. What the model's own code computes with it is the block's, too, but stays
        on the device until backward, whatever the plan says of the block: see Partition.lasting_bytes.
        """
        unit, forward = self.states.units[i], self._transit.forward
        assert forward is not None
        between = i in self.partition.effects.between
        with self._saving(i, stays=True) if between else nullcontext():
            call = forward.resume(result, frozen=i < self._lowest)
        unit.handed, unit.after = forward.handed, forward.graph
        handed_on = call.hidden.untyped_storage().data_ptr()
        self.memories.leave_out(
            one for one in forward.beside if one.untyped_storage().data_ptr() != handed_on and not unit.holds(one)
        )
        if between:
            unit.output = call.hidden.detach()
            call = replace(call, hidden=unit.output.clone())
            checkpointed = [] if unit.checkpoint is None else [unit.checkpoint[0].hidden]
            self._set_aside(call.hidden, *self._saved_by(i), *checkpointed)
            self._take_parameters(i, (edge.node for edge, _ in unit.after.made) if unit.after else ())
        self._transit.call = call

    def _set_aside(self, *but: Tensor) -> None:
        """Stop counting what the current task has allocated and is still there, except ``but``."""
        if self.memories.device is not None:
            self.memories.device.forget_group(WORKSPACE, but=but)

    def recompute(self, i: int) -> None:
        """Run forward again from the checkpoint, with its random state and buffers; the current ones are preserved. If forward
        has only released some of what it saves, make that again.
        """
        unit, transit = self.states.units[i], self._transit
        if unit.remaking is not None:
            self.make_again(i, unit.remaking)
            return
        assert unit.checkpoint is not None
        (call, random), unit.checkpoint = unit.checkpoint, None
        for tensor in unit.beside:
            tensor.check(i)
        if transit.redone is not None:
            call, transit.redone = replace(call, hidden=transit.redone), None
        now = self._passes[i][1 + unit.recomputed]
        unit.recomputed += 1
        with ExitStack() as undo:
            if random is not None:
                undo.enter_context(unchanged_random_state(self.memories.torch_device))
                random.restore()
            for place, then in self._kept[i].copies:
                undo.callback(place.holder.__setitem__, place.key, place.value)
                # A forward changes the buffer, and the next recomputation needs the old value.
                place.holder[place.key] = then if now.keeps_all else then.clone()
            if now.keeps_all:
                result = self._compute_with_graph(i, call)
            else:
                result = self._compute_without_graph(i, call)
                self._checkpoint(unit, call, random, now)
        if now.hands_on:
            transit.redone = hidden_of(result).detach() if unit.output is None else unit.output.clone()
        self._leave_out(i)

    def _checkpoint(self, unit: UnitTensors, call: BlockCall, random: RandomState | None, forward: _Forward) -> None:
        """Keep what a recomputation needs."""
        unit.beside = [AsRead.of(tensor) for tensor in tensors_in((call.args, call.kwargs))]
        unit.checkpoint = (call if forward.keeps_input else _without_input(call), random)

    def compute_loss(self, i: int) -> None:
        """Compute the loss of a micro-batch, and the gradient of the iteration's mean loss with respect to its logits."""
        batch = self.batches.pop(self._turn)
        assert self._transit.logits is not None
        logits, self._transit.logits = self._transit.logits.requires_grad_(), None
        self._given.enter(logits, "logits")
        with torch.enable_grad():
            loss = self.loss(logits, batch, self.memories.torch_device)
        self._most_logits = max(self._most_logits, logits.untyped_storage().nbytes())
        if self._given.used_bytes > _KEPT_LOGITS * self._most_logits:
            raise InputError(
                f"the loss function keeps the logits of every call, {format_bytes(self._given.used_bytes)} so far: let it keep "
                "detach().cpu() copies, or numbers (.item())"
            )
        check_loss(loss, logits, self.partition.model)
        with torch.autograd.set_multithreading_enabled(False):
            parts = 1 if self.loss.adds_up else self.micro_batches
            scale = self.states.updates_of(self._iteration).loss_scale
            ranks = 1 if self.states.ranks is None else self.states.ranks.count
            shares = parts if self.loss.adds_up else parts * ranks
            # That of the loss in a loop that calls (loss / shares * scale).backward(), without results of these operations.
            of_loss = torch.ones_like(loss)
            of_loss = of_loss if scale == 1.0 else of_loss.mul_(scale)
            of_loss = of_loss if shares == 1 else of_loss.div_(shares)
            (gradient,) = torch.autograd.grad(loss, logits, of_loss)
        self._transit.handed = self.states.units[i].handed[0]
        self._transit.handed.gradient = gradient
        if self.partition.effects.loss_keeps:  # counted in Partition.lasting_bytes
            self._set_aside(gradient)
            self.memories.leave_out([logits])
        self.memories.once_done(partial(self._note_loss, self.memories.accelerator.read_later(loss.detach()), parts))

    def _note_loss(self, loss: Tensor, parts: int) -> None:
        value = loss.item()
        if not math.isfinite(value):
            with torch._C.DisableTorchFunctionSubclass():  # a graph may keep a parameter, which a loss must not use
                self.skipped[self._iteration] = self._first_not_finite()
        self.losses[self._iteration] = self.losses.get(self._iteration, 0.0) + value / parts

    def backward(self, i: int) -> None:
        """Compute gradients of the block's parameters, and of its input for the block below.

        Raises:
            NonFiniteGradientError: a gradient is NaN or infinite, and the iteration cannot be skipped.
        """
        unit, self._transit.handed = self.states.units[i], None
        graphs = unit.graphs
        self.memories.current.alive += [graphs, unit.still_saved()]
        for handed in {taken.handed for graph in graphs for taken in graph.taken} if self.adds_to_zeros else ():
            if handed.value is not None and handed.gradient is None:
                handed.gradient = torch.zeros_like(handed.value)
                self.memories.leave_out([handed.gradient])
        with torch.autograd.set_multithreading_enabled(False):  # run in this thread, which owns the task, on CUDA too
            self._give_parameters(unit)
            # Keep what backward needs until it has ended, which is when the schedule frees it. Incremental freeing would
            # lower the peak by 0.1 to 1 %, but the memory left when a copy arrives would depend on timing. A graph held by
            # an attribute of the model would stay alive.
            retain = not any(tensor.grad_fn for tensor in self._kept[i].tensors())
            for graph in graphs:
                graph.backward(retain=retain)
        self._transit.handed = unit.given
        into = None if unit.given is None else unit.given.gradient
        beside = (taken.handed.gradient for graph in graphs for taken in graph.taken)
        self.memories.leave_out(one for one in beside if one is not None and one is not into)
        self._leave_out(i)
        unit.forget_passes()
        found, self._found = self._found, []
        gradients = [self.states.units[owner].device.gradients[place] for owner, place in found]
        there = [gradient for gradient in gradients if gradient is not None]
        self.memories.once_done(partial(self._check, found, not_finite_among(there, self.memories.accelerator)))

    def _check(self, found: Sequence[tuple[int, int]], first: Callable[[], int | None]) -> None:
        """Refuse the gradients that a backward has found if one of them is not finite."""
        bad = first()
        if bad is not None and self._iteration not in self.skipped:
            self._refuse(*found[bad])

    def _refuse(self, i: int, place: int) -> None:
        """Prevent the gradients of this iteration from changing anything more."""
        parameter = self.states.units[i].parameters[place]
        name = next(name for name, other in self.partition.model.named_parameters() if other is parameter)
        where = f"the gradient of {name} (block {i})"
        updated = self.states.gate.shut(self._iteration, where)
        if not self.skips_gradients:
            changed = (
                f"Blocks {', '.join(map(str, updated))} have been updated by this step before, the others are as the step "
                "before has left them"
                if updated
                else "No parameter has been changed by this step"
            )
            raise NonFiniteGradientError(
                f"{self.memories.current.task}: {where} is not finite in step {self._iteration}. {changed}. Lower the learning "
                "rate; steps can be skipped (on_nonfinite=NonFinite.SKIP) where the policy lets all updates wait for the whole "
                "backward",
                self._iteration,
                i,
                name,
                updated,
            )

    def receiver(self, i: int, place: int) -> Callable[[Tensor], None]:
        """Return a hook for a parameter whose gradient a backward has found. The hook collects the gradient."""

        def receive(parameter: Tensor) -> None:
            if not self.memories.current.task:
                with torch._C.DisableTorchFunctionSubclass():
                    parameter.grad = None
                raise InputError(
                    "backward reaches parameters that a Trainer trains: compute the loss in the Trainer's loss function and "
                    "call step, or get gradients without training by torch.autograd.grad"
                )
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and self._iteration not in self.skipped:
                self.states.take_gradient(i, place, gradient)
                if self.observe is not None:
                    self.observe(parameter, self.memories.current.micro_batch, gradient)
                self._found.append((i, place))

        return receive

    def copy_activations(self, i: int, source: str, target: str) -> None:
        """Copy what backward needs, or a part of it, from one memory to new places in another."""
        unit, part = self.states.units[i], self.memories.current.part
        there = unit.kept_in.get(part, GPU_MEMORY)
        if source != there:
            raise ScheduleError(
                f"{self.memories.current.task} copies what forward keeps from {source}, but it is in {there} memory"
            )
        unit.kept_in[part] = target
        if source == GPU_MEMORY:
            self._offload_activations(i, target, part)
            return
        moved = unit.moved.pop(part, {})
        if target == GPU_MEMORY:
            self._fetch_activations(i, moved, part)
        else:
            unit.moved[part] = {key: self._kept_in(target, there) for key, there in moved.items()}
        self.memories.once_done(partial(self._leave, moved.values()))

    def _kept_in(self, memory: str, data: Tensor | Stored) -> Tensor | Stored:
        """Copy bytes to new memory on the host, or to the file."""
        if memory != HOST_MEMORY:
            assert isinstance(data, Tensor), "what is in the file comes to the host, or to the device"
            return self.states.files.holding(data)
        return copied_to(self.memories.on_host(data.shape.numel(), torch.uint8, "activations"), data)

    def _leave(self, moved: Iterable[Tensor | Stored]) -> None:
        """Let places in the file that have been read be used again."""
        for there in moved:
            if isinstance(there, Stored):
                self.states.files.release(there)

    def _offload_activations(self, i: int, target: str, part: int) -> None:
        """Copy what backward needs from the device: each storage once, even if several saved tensors are views of it."""
        unit, memories = self.states.units[i], self.memories
        if unit.checkpoint is not None:
            call, random = unit.checkpoint
            unit.input = Saved(call.hidden, part=part)
            unit.checkpoint = (_without_input(call), random)
        moved = unit.moved.setdefault(part, {})
        for saved in self._movable(unit, part):
            tensor = saved.value
            if isinstance(tensor, Geometry) or tensor.device.type != memories.torch_device.type:
                continue  # it is made again, or is a random seed that attention keeps on the host
            memories.current.alive.append(tensor)
            storage = tensor.untyped_storage()
            saved.storage = storage.data_ptr()
            if saved.storage not in moved:
                here = torch.empty(0, dtype=torch.uint8, device=memories.torch_device).set_(storage)
                moved[saved.storage] = self._kept_in(target, here)
            saved.value = Geometry.of(tensor)

    def _fetch_activations(self, i: int, moved: dict[int, Tensor | Stored], part: int) -> None:
        """Copy what backward needs back to the device."""
        unit, memories = self.states.units[i], self.memories
        memories.current.alive.append(moved)
        back: dict[int, Tensor] = {}
        for key, there in moved.items():
            back[key] = copied_to(memories.on_device(there.shape.numel(), torch.uint8, "activations"), there)
        for saved in self._movable(unit, part):
            if isinstance(saved.value, Geometry) and saved.storage in back:
                saved.value = saved.value.within(back[saved.storage].untyped_storage())
        if unit.checkpoint is not None and unit.input is not None:
            call, random = unit.checkpoint
            unit.checkpoint, unit.input = (replace(call, hidden=unit.input.tensor), random), None

    @staticmethod
    def _movable(unit: UnitTensors, part: int) -> list[Saved]:
        """What is saved in a part of the activations."""
        return [one for one in (*unit.still_saved(), *([unit.input] if unit.input else [])) if one.part == part]

    @torch.no_grad()
    def evaluate(self, inputs: Inputs) -> Tensor:
        """Compute logits of ``inputs`` without training. Blocks are on the device one at a time."""
        last, present = self.partition.last, self.states.present
        with self.partition.intercepted() as forwards, present(0), present(last):
            forward = ForwardPass(self.partition.model, self._autocast, self.partition.effects)
            call = forward.start(on_device(inputs, self.memories.torch_device))
            for i in range(1, last):
                with present(i):
                    result = call.on(forwards[i - 1], call.hidden)
                    if i + 1 < last:
                        call = forward.resume(result)
            return forward.finish(result)

    @property
    def _turn(self) -> tuple[int, int]:
        """Current iteration and micro-batch."""
        return self.memories.current.iteration, self.memories.current.micro_batch

    @property
    def _iteration(self) -> int:
        return self.memories.current.iteration

    def _leave_out(self, i: int) -> None:
        """Stop counting what the passes of block ``i`` keep: it is part of the partition's lasting bytes."""
        self.memories.leave_out(self._kept[i].tensors())

    @contextmanager
    def _remembered(self, i: int) -> Iterator[None]:
        """Copy the buffers that a forward of block ``i`` changes, before it changes them.

        Raises:
            InputError: it has changed another buffer as well.
        """
        for place, then in self._kept[i].copies:
            if place.value.shape != then.shape:
                raise InputError(f"block {i} changes the shape of {place.name}, which recomputation needs: keep its shape")
            then.copy_(place.value)
        others = [(place, place.value, place.value._version) for place in self._kept[i].unchanging]
        yield
        for place, before, version in others:
            if place.value is not before or before._version != version:
                raise InputError(
                    f"block {i} changes {place.name}, which it did not in the first forward, so recomputation cannot put it "
                    "back: make a new trainer where the model begins to do so"
                )

    def _compute_with_graph(self, i: int, call: BlockCall) -> Any:
        unit, parts = self.states.units[i], self._parts[i]
        recorder = Recorder(self.partition.modules[i - 1], partial(self._described, unit, call)) if parts else None
        with torch.enable_grad(), self._saving(i, tensors_in((call.args, call.kwargs)), recorder):
            unit.graph = graph = BackwardGraph()
            given = self._cuts(i, graph, call)
            with recorder.recording() if recorder else nullcontext():  # only the block's own operations
                result = call.on(self._forwards[i - 1], *given)
        unit.given = call.given
        unit.edges = {
            place: get_gradient_edge(tensor)
            for place, tensor in enumerate(result if isinstance(result, tuple) else (result,))
            if (not place or place in self._handed[i]) and isinstance(tensor, Tensor) and tensor.requires_grad
        }
        self._take_parameters(i, (edge.node for edge in unit.edges.values()))
        result = with_hidden(result, hidden_of(result).detach(), self._handed[i])  # frees the graphs of others
        if recorder is not None and parts is not None:
            unit.named = recorder.finished(self._kept[i].tensors())
            unit.named.assign(parts.names, selective=parts.selective)
            if parts.recomputes:
                unit.input = Saved(call.hidden, part=parts.others)
                if self.before_release is not None:
                    self.before_release(i)
                unit.remaking = unit.named.release(0)
        return result

    def _compute_without_graph(self, i: int, call: BlockCall) -> Any:
        """Compute the block and keep nothing; with a graph of which nothing is saved, where it would compute other bits."""
        if not self.partition.effects.needs_grad_mode:
            with torch.no_grad():
                return call.on(self._forwards[i - 1], call.hidden)
        graph = BackwardGraph()
        with torch.enable_grad(), saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
            result = call.on(self._forwards[i - 1], *self._cuts(i, graph, call))
        return with_hidden(result, hidden_of(result).detach(), self._handed[i])

    def _described(self, unit: UnitTensors, call: BlockCall, tensor: Tensor) -> object:
        """What comes from outside of a block's forward: where it is in what may move, or the tensor."""
        if unit.holds(tensor):
            return "parameters", Geometry.of(tensor)
        if tensor.untyped_storage().data_ptr() == call.hidden.untyped_storage().data_ptr():
            return "input", Geometry.of(tensor)
        return AsRead.of(tensor)

    def make_again(self, i: int, remaking: Remaking) -> None:
        """Make what the forward of block ``i`` has released from what it has kept."""
        remaking.run(self.outside(i))

    def outside(self, i: int) -> Callable[[object], Tensor]:
        """Gives what came from outside of a forward of block ``i`` by its description, while it is on the device."""
        unit = self.states.units[i]
        given, flat = unit.input, unit.device.parameters
        assert given is not None
        assert flat is not None, "recomputation without parameters"

        def outside(described: object) -> Tensor:
            if isinstance(described, AsRead):
                described.check(i)
                return described.tensor
            assert isinstance(described, tuple)
            what, place = described
            assert isinstance(place, Geometry)
            return place.within((flat if what == "parameters" else given.tensor).untyped_storage())

        return outside

    def _cuts(self, i: int, graph: BackwardGraph, call: BlockCall) -> tuple[Tensor, list[Tensor]]:
        """What block ``i`` is given, as the beginnings of its graph: hidden states, and what else has gradients."""

        def begun(handed: Handed | None, value: Tensor | None) -> Tensor:
            assert value is not None, "what a block takes besides has a value"
            if handed is None or i == self._lowest:
                return value.detach()
            found, taken = cut(handed, value)
            graph.taken.append(taken)
            return found

        hidden = begun(call.given, call.hidden)
        return hidden, [hidden if one is call.given else begun(one, one.value) for one in call.beside]

    def _take_parameters(self, i: int, roots: Iterable[Node]) -> None:
        """Let functions in Python not keep the parameters of block ``i`` in attributes, as those of bitsandbytes do: no hook
        sees these, and the parameters may leave before backward.
        """
        unit = self.states.units[i]
        if not (self._moves[i] and self.partition.effects.python_in_backward):
            return

        def taken(value: Any) -> Any:
            held = isinstance(value, Tensor) and unit.holds(value)
            return _OfParameters(Geometry.of(value)) if held else value

        for node in (node for node in nodes_of(roots) if isinstance(node, BackwardCFunction)):
            for name, value in list(vars(node).items()):
                if any(unit.holds(tensor) for tensor in tensors_in(value)):
                    setattr(node, name, tree_map(taken, value))
                    unit.kept_by.append((node, name))

    def _give_parameters(self, unit: UnitTensors) -> None:
        """Give the functions these parameters back, for backward."""

        def given(value: Any) -> Any:
            if not isinstance(value, _OfParameters):
                return value
            assert unit.device.parameters is not None, "backward without parameters"
            return value.place.within(unit.device.parameters.untyped_storage())

        for node, name in unit.kept_by:
            setattr(node, name, tree_map(given, getattr(node, name)))
        unit.kept_by = []

    @contextmanager
    def _saving(
        self, i: int, beside: Iterable[Tensor] = (), recorder: Recorder | None = None, *, stays: bool = False
    ) -> Iterator[None]:
        """Keep what backward needs in movable form, if anything of the block moves or is released before its backward.

        Buffers, frozen parameters and ``beside`` stay where they are. ``recorder`` is told of all else. If it ``stays``, only
        parameters move.
        """
        unit = self.states.units[i]
        if not self._moves[i]:
            yield
            return
        parts = self._parts[i]
        staying = self._lasting | addresses(beside)
        unit.saved = unit.saved if stays else []

        def pack(tensor: Tensor) -> object:
            if unit.holds(tensor):
                return Geometry.of(tensor)
            tensor = tensor.detach()  # break the reference cycle with the graph, or it would never be freed
            if stays or tensor.untyped_storage().data_ptr() in staying:
                return tensor
            saved = Saved(tensor, part=parts.others if parts else 0)
            unit.saved.append(weakref.ref(saved))
            if recorder is not None:
                recorder.note(saved)
            return saved

        def unpack(handle: object) -> Tensor:
            if isinstance(handle, Tensor):
                return handle
            if isinstance(handle, Geometry):
                assert unit.device.parameters is not None, "backward without parameters"
                return handle.within(unit.device.parameters.untyped_storage())
            assert isinstance(handle, Saved)
            return handle.tensor

        with saved_tensors_hooks(pack, unpack):
            yield

    def _first_not_finite(self) -> str:
        """Locate the first non-finite values. Slow; called only after a failure."""
        if self.memories.accelerator.runs_ahead:  # later tasks have begun to change what was there
            return "the loss, or what it was computed from"
        for i, unit in enumerate(self.states.units):
            if not all(torch.isfinite(view).all() for view in unit.device.views):
                return f"the parameters of block {i}"
            kept = self._saved_by(i) if unit.checkpoint is None else [unit.checkpoint[0].hidden]
            if any(tensor.is_floating_point() and not torch.isfinite(tensor).all() for tensor in kept):
                return f"what block {i} keeps for backward"
        return "the logits, or the loss alone, as when all targets are ignored"


def _without_input(call: BlockCall) -> BlockCall:
    """The same call without its hidden states, which are elsewhere."""
    return replace(call, hidden=call.hidden.new_empty(0))


def _saved(roots: Iterable[Node]) -> Iterator[Tensor]:
    """The tensors that a graph keeps for its backward."""
    for node in nodes_of(roots):
        for name in dir(node):
            if name == "saved_tensors" or name.startswith("_saved_"):
                value = getattr(node, name)
                yield from (kept for kept in (value if isinstance(value, tuple) else (value,)) if isinstance(kept, Tensor))
