"""Observes one forward of a model before training: who uses which parameters, and which side effects the blocks have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from autohete.errors import AutoHeteError, InputError
from autohete.runtime.autocast import Autocast
from autohete.runtime.batch import Inputs, check_range, first_sequence, leading, named, on_device, padded
from autohete.runtime.forward_pass import BlockCall, ForwardPass, Handed, graph_nodes, hidden_of, with_hidden
from autohete.runtime.ledger import WORKSPACE, Ledger, accounting
from autohete.runtime.losses import check_loss
from autohete.runtime.model_state import (
    NO_EFFECTS,
    Effects,
    RandomState,
    Snapshot,
    addresses,
    tensors_in,
    unchanged_random_state,
)
from autohete.runtime.partition import Partition, check_dense, check_hooks

#: Place of uses by the loss.
LOSS = -1
#: How a refusal of state that is out of sight goes on.
_STATE = (
    "each time it is called with the same input, buffers and random state. Profiling, recomputation and evaluation call it "
    "more often than training would, which advances any counter or random generator that it uses. Draw random numbers from "
    "the global generators, and keep counters in buffers (register_buffer)"
)
_OWN_HOOKS = "a block has hooks of its own for what backward needs"


@dataclass(frozen=True, slots=True)
class Probe:
    """Observations from one forward pass.

    Args:
        hidden: the first block's input.
        logits: the result.
        order: the order of the calls of the blocks.
        used: how often the model's own code uses each parameter, by the unit before it and the parameter's id.
        effects: side effects of the forward pass.
        places: blocks in which each frozen parameter is used, by the address of its memory; -1 for the loss.
        rows: number of rows of the embedding that an input is looked up in, by the input's name.
        own_loss: the model's own loss, if it was given labels.
    """

    hidden: Tensor
    logits: Tensor
    order: Sequence[int]
    used: Mapping[int, Mapping[int, int]]
    effects: Effects
    places: Mapping[int, Set[int]]
    rows: Mapping[str, int]
    own_loss: Tensor | None


def probe(
    cut: Partition, inputs: Inputs, loss: Callable[[Tensor], Tensor] | None = None, autocast: torch.dtype | None = None
) -> Probe:
    """Run forward once, on the first sequence, in the calling thread; restore the model and the random states.

    Args:
        cut: the model, cut into blocks.
        inputs: token ids (batch, sequence), or the model's arguments by name.
        loss: function of the first sequence's logits, which is also run; None: no loss.
        autocast: type in which the model computes under ``torch.autocast``; None: without.

    Raises:
        InputError: the model uses its blocks in a way that cannot be trained block by block, or its forward fails.
    """
    check_hooks(cut.model, cut.modules)
    check_dense(cut.model)
    device = next((parameter.device for parameter in cut.model.parameters()), torch.device("cpu"))
    mode = Autocast.to(autocast, device)
    outside, sequences = Snapshot(cut.named_modules(0)), len(leading(inputs))
    uses = _Uses(parameter for parameter in cut.model.parameters() if not parameter.requires_grad)
    trials = [_Trial(cut.named_modules(place + 1), sequences) for place in range(len(cut.modules))]
    try:
        with cut.intercepted() as forwards, unchanged_random_state(device), torch.enable_grad(), _teaching(inputs):
            forward = ForwardPass(cut.model, mode)
            first = on_device(first_sequence(inputs), device)
            outer = _OuterCode(device)
            with _rows_of_embeddings(cut.named_modules(0), first) as rows, uses.at(0):
                call = begin = forward.start(first)
            for place in range(len(forwards)):
                with uses.at(place + 1):
                    trial = trials[forward.order[place]]
                    result = trial.run(replace(call, place=place), forwards[forward.order[place]], device)
                    others = {other for _, other in trial.effects.others}
                    outer.got(call.hidden, result)
                    if place + 1 < len(forwards):
                        call = forward.resume(result, others=others)
            with uses.at(cut.last):
                logits = forward.finish(result, others=others)
            if loss is not None:
                found = logits.detach().requires_grad_()
                with uses.at(LOSS):
                    _check_twice(loss, found, cut.model, device)
            effects = reduce(Effects.__or__, (trial.effects for trial in trials), _effects_since(outside, sequences))
            effects |= forward.observed
            kept = Snapshot(cut.named_modules(0))  # the loss function may use what the forward has left
            outside.restore()
            outer.check(ForwardPass(cut.model, mode), first, logits)
            kept.restore()
        again = cut.ordered(forward.order)
        with again.intercepted() as forwards, unchanged_random_state(device), torch.enable_grad(), _teaching(inputs):
            beside = _beside_bytes(again, on_device(padded(inputs), device), effects, forwards, mode)
    finally:
        for snapshot in (outside, *(trial.before for trial in trials)):
            snapshot.restore()
    effects |= Effects(kept_bytes=beside)
    own_loss = None if forward.own_loss is None else forward.own_loss.detach()
    return Probe(begin.hidden.detach(), logits.detach(), forward.order, forward.used, effects, uses.found, rows, own_loss)


def by_use(cut: Partition, inputs: Inputs) -> Partition:
    """Return ``cut`` with parameters outside of the blocks assigned by use in a forward of ``inputs``, not by declaration.

    Raises:
        InputError: see :func:`probe` and :meth:`Partition.using`.
    """
    found = probe(cut, inputs)
    return cut.ordered(found.order).using(found.used, found.effects, found.places)


def _check_twice(loss: Callable[[Tensor], Tensor], logits: Tensor, model: nn.Module, device: torch.device) -> None:
    """Check what the loss function returns for ``logits``, also that it is the same a second time.

    Raises:
        InputError: see :func:`autohete.runtime.losses.check_loss`; or it has state that advances.
    """
    random = RandomState(device)
    first = loss(logits)
    check_loss(first, logits, model)
    random.restore()
    if not _equal(loss(logits).detach(), first.detach()):
        raise InputError(f"the loss function returns something else {_STATE} of a module that is the loss function")


class _OuterCode:
    """What the model's own code outside of its blocks computes in a forward, to compare it with a second one.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._random = device, [RandomState(device)]
        self._blocks: list[tuple[Tensor, Any]] = []

    def got(self, hidden: Tensor, result: Any) -> None:
        """It has called a block with these hidden states, and gets a result: it runs on to the next block, or to the end."""
        self._blocks.append((hidden, result))
        self._random.append(RandomState(self._device))

    def check(self, forward: ForwardPass, inputs: Inputs, logits: Tensor) -> None:
        """Run the code again with the results of its blocks.

        Raises:
            InputError: it computes something else.
        """
        self._random[0].restore()
        call = forward.start(inputs)
        for place, ((hidden, result), random) in enumerate(zip(self._blocks, self._random[1:], strict=True), 1):
            same = _equal(call.hidden.detach(), hidden.detach())
            # What a block has handed back as it was given it belongs to the first forward only.
            handed_back = isinstance(result, tuple) and any(isinstance(one, Handed) for one in result)
            if not same or handed_back:
                forward.end()
                break
            random.restore()
            if place < len(self._blocks):
                call = forward.resume(result)
            else:
                same = _equal(forward.finish(result).detach(), logits.detach())
        if not same:
            raise InputError(f"the model's own code outside of its blocks computes something else {_STATE}")


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes where some tensors are used.

    Args:
        tensors: the tensors.

    Attributes:
        found: places in which each is used, by the address of its memory.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[int, set[int]] = {address: set() for address in addresses(tensors)}
        self._place = LOSS

    @contextmanager
    def at(self, place: int) -> Iterator[None]:
        """Note uses at ``place``."""
        self._place = place
        with self if self.found else nullcontext():
            yield

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As in :class:`autohete.runtime.ledger.Accounting`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for address in addresses(tensors_in((args, kwargs or {}))):
            if address in self.found:
                self.found[address].add(self._place)
        return func(*args, **(kwargs or {}))


def _beside_bytes(
    cut: Partition, inputs: Inputs, effects: Effects, forwards: Sequence[Callable[..., Any]], autocast: Autocast
) -> int:
    """Return the bytes alive until the last block is done that are neither the first block's input nor moved with the part
    before it: masks and other tensors that go to several blocks, the gradients of those, and what the model's own code keeps
    between blocks.
    """
    ledger, forward, saved, held = Ledger("probe"), ForwardPass(cut.model, autocast, effects), list[Tensor](), list[object]()

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    rows, before = _rows_of_embeddings(cut.named_modules(0), inputs), Snapshot(cut.model.named_modules(), effects.changing)
    with accounting(ledger, "", WORKSPACE):
        with saved_tensors_hooks(pack, lambda tensor: tensor), rows:
            call = forward.start(inputs)
        for tensor in saved if (0, 0) in effects.handed else (call.hidden, *saved):
            ledger.forget(tensor)
        gradients: dict[int, Tensor] = {}
        for place, own in enumerate(forwards if effects.others or effects.between or effects.handed else ()):
            held += [call.args, call.kwargs, forward.graph]
            gradients |= {id(one): one.value for one in call.beside if one.value is not None}
            with torch.no_grad():
                result = call.on(own, call.hidden)
            if place + 1 < len(forwards):
                call = forward.resume(result)
                if place + 1 not in effects.between:
                    ledger.forget(call.hidden)
    used = ledger.used_bytes + 2 * sum(one.nbytes for one in gradients.values())  # the sum so far, and the next
    forward.end()
    before.restore_buffers()
    return used


@contextmanager
def _watched_hooks(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[list[Tensor]]:
    """Yield a list that collects the parameters that a block's own hooks keep by reference for backward. Hooks that keep
    copies, or nothing, as those of ``torch.utils.checkpoint`` do, are no obstacle to a plan whose parameters leave.
    """
    kept: list[Tensor] = []
    parameters = addresses(parameter for _, module in modules for parameter in module.parameters(recurse=False))
    entered = saved_tensors_hooks.__enter__

    def enter(hooks: saved_tensors_hooks) -> None:
        def pack(tensor: Tensor) -> Any:
            packed = hooks.pack_hook(tensor)
            kept.extend(one for one in tensors_in(packed) if one.untyped_storage().data_ptr() in parameters)
            return packed

        torch._C._autograd._push_saved_tensors_default_hooks(pack, hooks.unpack_hook)

    saved_tensors_hooks.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield kept
    finally:
        saved_tensors_hooks.__enter__ = entered  # type: ignore[method-assign]


@contextmanager
def _teaching(inputs: Inputs) -> Iterator[None]:
    """Report the inputs if the model's own code fails."""
    try:
        yield
    except AutoHeteError:
        raise
    except Exception as error:
        given = ", ".join(f"{k} {tuple(v.shape)} of {v.dtype}" for k, v in named(inputs).items() if isinstance(v, Tensor))
        raise InputError(
            f"the model or the loss fails on the first batch ({given}): {type(error).__name__}: {error}. Call "
            "loss(model(...), targets) with this batch, without a trainer: if that fails, too, fix the error; otherwise the "
            "model's own code cannot run block by block"
        ) from error


@contextmanager
def _rows_of_embeddings(modules: Iterable[tuple[str, nn.Module]], inputs: Inputs) -> Iterator[dict[str, int]]:
    """Yield a dict that collects, by input name, the rows of the embedding it is looked up in; check the ids' range. Labels may
    be the same tensor as the ids, and are looked up in none.
    """
    tensors = {v.data_ptr(): name for name, v in named(inputs).items() if isinstance(v, Tensor) and name != "labels"}
    rows: dict[str, int] = {}

    own, look_up = {module for _, module in modules}, nn.Embedding.forward

    def note(module: nn.Embedding, *args: Any, **kwargs: Any) -> Tensor:
        ids = args[0] if args else kwargs.get("input")
        if module in own and isinstance(ids, Tensor) and (name := tensors.get(ids.data_ptr())) is not None:
            rows[name] = module.num_embeddings
            check_range(name, ids, rows[name])
        return look_up(module, *args, **kwargs)

    # No hook: subclasses such as BART's positional embedding are called with the ids, but look up something else.
    nn.Embedding.forward = note  # type: ignore[assignment, method-assign]
    try:
        yield rows
    finally:
        nn.Embedding.forward = look_up  # type: ignore[method-assign]


class _Trial:
    """One run of a block to observe its side effects; restores its buffers.

    Args:
        modules: the block's modules, with their names.
        sequences: number of sequences in a training batch; the run uses one.

    Attributes:
        effects: effects of a forward; changing buffers are those that change in the block's current mode or in training mode.
        before: the block's attributes, to be restored after the loss, which may use them.
    """

    def __init__(self, modules: list[tuple[str, nn.Module]], sequences: int) -> None:
        self._modules, self._sequences = modules, sequences
        self.effects, self.before = NO_EFFECTS, Snapshot(())

    def run(self, call: BlockCall, own: Callable[..., Any], device: torch.device) -> Any:
        """Return the result of ``call``; its hidden states need no gradients.

        Raises:
            InputError: the block changes state with each forward that recomputation cannot restore.
        """
        self.before, random = Snapshot(self._modules), RandomState(device)
        before = self.before
        try:
            result = self._run_once(call, own, random)
            self.effects |= _effects_since(before, self._sequences)
            after = Snapshot(self._modules) if before.changed_attributes() else None  # caches do so, once
            with torch.no_grad():
                without = hidden_of(self._repeat(call, own, random))
            self.effects |= Effects(needs_grad_mode=not torch.equal(without, hidden_of(result)))
            again = self._repeat(call, own, random)  # the last, as the loss may use what it leaves
            if after is not None and (unsettled := after.changed_attributes()):
                raise InputError(
                    f"block {call.place + 1} changes {' and '.join(unsettled)} with each forward, and recomputation would "
                    "change it once more: make it a buffer (register_buffer) if it is a tensor or a number, draw random "
                    "numbers from the global generators, or do it outside of the blocks"
                )
            if not _equal(hidden_of(again).detach(), hidden_of(result)):
                raise InputError(f"block {call.place + 1} computes something else {_STATE}")
            if not all(module.training for _, module in self._modules) and any(m._buffers for _, m in self._modules):
                for _, module in self._modules:
                    module.training = True
                self._repeat(call, own, random)
                self.effects |= Effects(before.changed_buffers())
        finally:
            before.restore_buffers()
            before.forget_buffers()
        return result

    def _run_once(self, call: BlockCall, own: Callable[..., Any], random: RandomState) -> Any:
        hooks = False
        try:
            with disable_saved_tensors_hooks(_OWN_HOOKS):
                result = call.on(own, *_given(call))
        except RuntimeError as error:
            if _OWN_HOOKS not in str(error):
                raise
            with _watched_hooks(self._modules) as kept:
                result, hooks = self._repeat(call, own, random), True
            self.effects |= Effects(keeps_parameters=bool(kept))
        found = hidden_of(result)
        others = result[1:] if isinstance(result, tuple) else ()
        needing = [place for place, item in enumerate(others, 1) if isinstance(item, Tensor) and item.requires_grad]
        functions = (node for node in graph_nodes(found) if isinstance(node, BackwardCFunction))
        places = frozenset((call.place + 1, one) for one in needing)
        self.effects |= Effects(python_in_backward=hooks or any(functions), others=places)
        return with_hidden(result, found.detach(), frozenset(needing))

    def _repeat(self, call: BlockCall, own: Callable[..., Any], random: RandomState) -> Any:
        self.before.restore_buffers()
        random.restore()
        return call.on(own, *_given(call))


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two results are the same; up to rounding on a GPU, whose kernels may add in another order."""
    rtol, atol = (0.0, 0.0) if one.device.type == "cpu" else (1e-2, 1e-3)
    return one.shape == other.shape and torch.allclose(one, other, rtol, atol, equal_nan=True)


def _given(call: BlockCall) -> tuple[Tensor, list[Tensor]]:
    """Return the hidden states with a graph, but not as a leaf, so that they can be changed in place; and what else has one."""
    values = [handed.value for handed in call.beside if handed.value is not None]
    hidden, *beside = (tensor.detach().requires_grad_(torch.is_grad_enabled()) for tensor in (call.hidden, *values))
    return hidden.clone(), beside


def _effects_since(before: Snapshot, sequences: int) -> Effects:
    """Return the effects of a forward of one sequence, with the bytes that a forward of ``sequences`` keeps."""
    kept = before.tensors_kept()
    sizes = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        * (sequences if tensor.shape[:1] == (1,) else 1)
        * (2 if tensor.retains_grad else 1)  # its gradient, too
        for tensors in kept.values()
        for tensor in tensors
    }
    return Effects(before.changed_buffers(), frozenset(kept), sum(sizes.values()))
