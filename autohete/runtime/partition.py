"""Cuts a model at its blocks, without changing its code.

The runtime drives a model block by block, but the code before the first block and after the last one is the model's own. Its
``forward`` therefore runs as a coroutine (a greenlet) that stops at each block: the part before the first block is the
embedding's pass, the runtime calls the blocks, and with the last block's output the coroutine continues to the logits. A model
that does anything else with its blocks would train differently, and is rejected.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, disable_saved_tensors_hooks, saved_tensors_hooks
from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks
from torch.nn.utils.parametrize import ParametrizationList

from autohete.errors import AutoHeteError, InputError
from autohete.runtime.batch import Inputs, check_range, first_sequence, leading, on_device, padded
from autohete.runtime.ledger import WORKSPACE, Ledger, accounting
from autohete.runtime.model_state import (
    NO_EFFECTS,
    Effects,
    RandomState,
    Snapshot,
    buffers_of,
    tensors_in,
    unchanged_random_state,
)
from autohete.runtime.precision import DTYPES

_BETWEEN = (
    "the model computes something between two blocks: move it into a block, so that it can be recomputed and its "
    "parameters can move with the block's"
)
#: Placeholders for released tensors; allocated in advance, so that no task is charged for them.
_NAN = {
    dtype: torch.full((), torch.nan, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}
_ONCE = "each must be called once, in order"
_OWN_HOOKS = "a block has hooks of its own for what backward needs"


@dataclass(frozen=True, slots=True)
class Probe:
    """Observations from one forward pass.

    Args:
        hidden: the first block's input.
        logits: the result.
        before, after: ids of the parameters used for the first block's input, and for the logits after the last block.
        effects: side effects of the forward pass.
        rows: number of rows of the embedding that an input is looked up in, by the input's name.
        own_loss: the model's own loss, if it was given labels.
    """

    hidden: Tensor
    logits: Tensor
    before: frozenset[int]
    after: frozenset[int]
    effects: Effects
    rows: Mapping[str, int]
    own_loss: float | None


@dataclass(frozen=True, slots=True)
class Partition:
    """A model as blocks: the part before the block list, the list's modules, and the part after it.

    Args:
        model: the whole model.
        modules: the transformer blocks.
        owned: trained parameters of each block, embedding first, head last; each parameter only once, so a matrix that
            the head shares with the embedding belongs to the embedding.
        effects: side effects of a forward pass, as found by :meth:`by_use`.
    """

    model: nn.Module
    modules: tuple[nn.Module, ...]
    owned: tuple[tuple[nn.Parameter, ...], ...]
    effects: Effects = NO_EFFECTS

    @property
    def last(self) -> int:
        """Index of the head."""
        return len(self.modules) + 1

    @property
    def order(self) -> list[tuple[int, int]]:
        """Block and place of each trained parameter, in the model's order."""
        places = {id(parameter): (i, place) for i, owned in enumerate(self.owned) for place, parameter in enumerate(owned)}
        return [places[id(parameter)] for parameter in self.model.parameters() if id(parameter) in places]

    @property
    def lasting(self) -> list[Tensor]:
        """Buffers and frozen parameters, which are neither trained nor moved: they stay on the device throughout."""
        trained = {id(parameter) for owned in self.owned for parameter in owned}
        return [*self.model.buffers(), *(p for p in self.model.parameters() if id(p) not in trained)]

    @property
    def lasting_bytes(self) -> int:
        """Bytes on the device throughout: :attr:`lasting`, copies of buffers that blocks change, tensors kept by attributes."""
        inside = [place for i in range(1, self.last) for place in buffers_of(self.named_modules(i))]
        copied: list[Tensor] = [place.value for place in inside if place.name in self.effects.changing]
        return self.effects.kept_bytes + sum(tensor.numel() * tensor.element_size() for tensor in (*self.lasting, *copied))

    def named_modules(self, i: int) -> list[tuple[str, nn.Module]]:
        """Return the modules of block ``i`` with their names; 0 and :attr:`last` are the model without its block list."""
        if 0 < i < self.last:
            inside = set(self.modules[i - 1].modules())
        else:
            inside = {*self.model.modules()}.difference(*(module.modules() for module in self.modules))
        return [(name, module) for name, module in self.model.named_modules() if module in inside]

    @contextmanager
    def intercepted(self) -> Iterator[list[Callable[..., Any]]]:
        """Make the blocks stop a :class:`ForwardPass`; yield their original forwards.

        Inside, a Hugging Face model does not cache keys and values (these are for generation), does not collect intermediate
        results of its blocks, and does not recompute blocks itself: the schedule decides what is kept.
        """
        forwards = [module.forward for module in self.modules]
        config: Any = getattr(self.model, "config", None)
        with ExitStack() as undo:
            for flag in ("use_cache", "output_hidden_states", "output_router_logits"):
                if getattr(config, flag, False):
                    undo.callback(setattr, config, flag, getattr(config, flag))
                    setattr(config, flag, False)
            for module in self.model.modules():
                if vars(module).get("gradient_checkpointing") is True:
                    undo.callback(setattr, module, "gradient_checkpointing", True)
                    vars(module)["gradient_checkpointing"] = False
            stops = [_stopping(place, forward) for place, forward in enumerate(forwards)]
            undo.enter_context(replaced_forwards(zip(self.modules, stops, strict=True)))
            yield forwards

    def probe(self, inputs: Inputs, loss: Callable[[Tensor], Tensor] | None = None) -> Probe:
        """Run forward once, on the first sequence, in the calling thread; restore the model and the random states.

        Args:
            inputs: token ids (batch, sequence), or the model's arguments by name.
            loss: function of the first sequence's logits, which is also run; None: no loss.

        Raises:
            InputError: the model uses its blocks in a way that cannot be trained block by block, or its forward fails.
        """
        _check_hooks(self.model, self.modules)
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        outside, sequences = Snapshot(self.named_modules(0)), len(leading(inputs))
        trials = [_Trial(self.named_modules(place + 1), sequences) for place in range(len(self.modules))]
        try:
            with self.intercepted() as forwards, unchanged_random_state(device), torch.enable_grad(), _teaching(inputs):
                forward = ForwardPass(self.model)
                first = on_device(first_sequence(inputs), device)
                with _rows_of_embeddings(self.named_modules(0), first) as rows:
                    call = begin = forward.start(first)
                for place, own in enumerate(forwards):
                    result = trials[place].run(call, own, device)
                    if place + 1 < len(forwards):
                        call = forward.resume(result)
                logits = forward.finish(result)
                if loss is not None:
                    found = logits.detach().requires_grad_()
                    check_loss(loss(found), found, self.model)
                beside = self._beside_bytes(on_device(padded(inputs), device))
            effects = reduce(Effects.__or__, (trial.effects for trial in trials), _effects_since(outside, sequences))
        finally:
            for snapshot in (outside, *(trial.before for trial in trials)):
                snapshot.restore()
        before, after = (frozenset(map(id, _leaves(tensor))) for tensor in (begin.hidden, logits))
        effects |= Effects(kept_bytes=beside)
        own_loss = None if forward.own_loss is None else forward.own_loss.detach().item()
        return Probe(begin.hidden.detach(), logits.detach(), before, after, effects, rows, own_loss)

    def _beside_bytes(self, inputs: Inputs) -> int:
        """Return the bytes alive until the last block is done that are neither the first block's input nor moved with the part
        before it: masks and other tensors that go to every block.
        """
        ledger, forward, saved = Ledger("probe"), ForwardPass(self.model), list[Tensor]()

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        rows = _rows_of_embeddings(self.named_modules(0), inputs)
        with accounting(ledger, "", WORKSPACE), saved_tensors_hooks(pack, lambda tensor: tensor), rows:
            call = forward.start(inputs)
        ledger.forget(call.hidden)
        for tensor in saved:
            ledger.forget(tensor)
        used = ledger.used_bytes
        forward.end()
        return used

    def by_use(self, inputs: Inputs) -> Partition:
        """Call :meth:`using` with a probe of ``inputs``.

        Raises:
            InputError: see :meth:`probe` and :meth:`using`.
        """
        return self.using(self.probe(inputs))

    def using(self, found: Probe) -> Partition:
        """Return this partition with parameters outside of the blocks assigned by use in a forward pass, not by declaration.

        Raises:
            InputError: a parameter of a block is used outside of it.
        """
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter in (parameter for owned in self.owned[1:-1] for parameter in owned):
            if id(parameter) in found.before | found.after:
                raise InputError(
                    f"{names[id(parameter)]} is also used outside of its block: only embedding and head can share parameters"
                )
        first, last = self.owned[0], self.owned[-1]
        before = [p for p in (*first, *last) if id(p) in found.before]
        after = [p for p in (*first, *last) if id(p) in found.after and id(p) not in found.before]
        used = found.before | found.after
        before += [p for p in first if id(p) not in used]
        after += [p for p in last if id(p) not in used]
        owned = (_round_first(before), *self.owned[1:-1], _round_first(after))
        return replace(self, owned=owned, effects=found.effects)


def partition(model: nn.Module, blocks: str | None = None) -> Partition:
    """Cut ``model`` at its list of blocks.

    Modules declared before the list are assigned to the embedding, those after it to the head; :meth:`Partition.by_use`
    corrects this by observing a forward pass.

    Args:
        model: its forward takes token ids and returns logits (or an object with ``logits``).
        blocks: dotted name of the ``nn.ModuleList``; None: the only list of equal modules that is not inside another.

    Raises:
        InputError: there is no such list, or several (the message lists them); or blocks share parameters or mix types.
    """
    _check_wrapping(model)
    modules = _block_list(model, blocks)
    inside = {id(module) for block in modules for module in block.modules()}
    before: list[nn.Parameter] = []
    after: list[nn.Parameter] = []
    passed = False
    for module in model.modules():
        if module is modules:
            passed = True
        elif id(module) not in inside:
            (after if passed else before).extend(module.parameters(recurse=False))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owner: dict[int, int] = {}
    owned: list[tuple[nn.Parameter, ...]] = []
    for i, parameters in enumerate((before, *(list(module.parameters()) for module in modules), after)):
        mine = []
        for parameter in filter(lambda parameter: parameter.requires_grad, parameters):
            other = owner.setdefault(id(parameter), i)
            if other == i:
                mine.append(parameter)
            elif (other, i) != (0, len(modules) + 1):
                raise InputError(
                    f"blocks {other} and {i} (0 is the part before the list) share {names[id(parameter)]}: only embedding "
                    "and head can share parameters; copy it, or put the blocks that share it into one"
                )
        owned.append(_round_first(dict.fromkeys(mine)))
    for i, own in enumerate(owned):
        for parameter in own:
            if type(parameter.data) is not Tensor or parameter.is_meta:
                what = "on the meta device" if parameter.is_meta else f"a {type(parameter.data).__name__}"
                raise InputError(
                    f"{names[id(parameter)]} is {what}: trained parameters must be ordinary tensors with values, such as after "
                    "model.to_empty(device='cpu') and initialization"
                )
        types = {parameter.dtype for parameter in own}
        if len(types) > 1 or types.difference(DTYPES.values()):
            raise InputError(
                f"block {i} has parameters of {' and '.join(sorted(map(str, types)))}: convert the model to one type of "
                f"{', '.join(map(str, DTYPES.values()))}, such as model.to(torch.bfloat16)"
            )
    return Partition(model, tuple(modules), tuple(owned))


def _round_first(parameters: Iterable[nn.Parameter]) -> tuple[nn.Parameter, ...]:
    """Order the parameters of a block, which will be one after another in memory.

    Those of odd sizes, such as a bias over 50,257 tokens, come last, so that all others start at a multiple of 64 bytes, as if
    they were allocated one by one. Where a tensor starts can decide which kernel is chosen, its speed, and the last bit of its
    sums.
    """
    return tuple(sorted(parameters, key=lambda parameter: parameter.nbytes % 64 != 0))


def _check_wrapping(model: nn.Module) -> None:
    """Check that all modules can be stopped at a block.

    Raises:
        InputError: names the module, and what to give instead.
    """
    for name, module in model.named_modules():
        kind, where = type(module).__name__, name or "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(f"{where} is a {kind}, which cannot stop at its blocks: give the original module")
        if kind in _WRAPPERS:
            raise InputError(f"{where} is wrapped in {kind}, which makes its own copies or shards: give its .module")
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise InputError(
                f"{where} is compiled, and compiled code cannot stop at the blocks, nor can its memory be counted: give the "
                "original module (_orig_mod)"
            )


def _check_hooks(model: nn.Module, modules: tuple[nn.Module, ...]) -> None:
    """Check that there are no backward hooks around blocks; hooks of modules inside a block run with its backward.

    Raises:
        InputError: names the module.
    """
    inside = {part for block in modules for part in block.modules()}.difference(modules)
    for name, module in model.named_modules():
        if (module._backward_hooks or module._backward_pre_hooks) and module not in inside:
            raise InputError(
                f"{name or 'the model'} has a backward hook, which needs gradients across blocks: register it on a "
                "module inside a block, or on parameters (register_post_accumulate_grad_hook)"
            )
    if _global_backward_hooks or _global_backward_pre_hooks:
        raise InputError("there are backward hooks for all modules (register_module_full_backward_hook): remove them")


def _block_list(model: nn.Module, wanted: str | None) -> nn.ModuleList:
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and not isinstance(module, ParametrizationList)
    }
    types = {name: list(dict.fromkeys(type(block).__name__ for block in module)) for name, module in lists.items()}
    found = ", ".join(f"{name!r} ({len(module)} x {' and '.join(types[name])})" for name, module in lists.items())
    if wanted is not None:
        if wanted not in lists:
            raise InputError(
                f"{type(model).__name__} has no block list {wanted!r}: its module lists are {found or 'none'}; "
                "a block list is an nn.ModuleList with at least one block"
            )
        return lists[wanted]
    outer = [
        module
        for name, module in lists.items()
        if len(types[name]) == 1 and not any(name.startswith(f"{other}.") for other in lists)
    ]
    if len(outer) != 1:
        raise InputError(
            f"the blocks of {type(model).__name__} are ambiguous: it has {len(outer)} lists of equal blocks "
            f"(module lists: {found or 'none'}); name one, such as blocks={next(iter(lists), 'transformer.h')!r}, "
            "or put the blocks into an nn.ModuleList"
        )
    return outer[0]


def check_loss(loss: object, logits: Tensor, model: nn.Module) -> None:
    """Check that ``loss`` can be differentiated and depends on ``logits`` only.

    Raises:
        InputError: states what the loss function returned, and which parameters it uses.
    """
    if not isinstance(loss, Tensor):
        raise InputError(f"the loss function returns {type(loss).__name__}: return one tensor, without .item() or a tuple")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise InputError(
            f"the loss function returns {tuple(loss.shape)} of {loss.dtype}: return one real number, such as loss.mean()"
        )
    leaves = list(_leaves(loss))
    others = [leaf for leaf in leaves if leaf is not logits]
    if others:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = sorted({names[id(leaf)] for leaf in others if id(leaf) in names})
        named = ", ".join(found[:4] or [f"a tensor {tuple(others[0].shape)}"])
        raise InputError(
            f"the loss uses more than the logits ({named}), which would get no gradient from it: let a block add the gradient "
            "of an auxiliary loss itself (a torch.autograd.Function that passes its input through), use the optimizer's "
            "weight_decay for weight penalties, move what the loss trains into the model behind its blocks, or detach() it"
        )
    if not leaves:
        raise InputError("the loss does not depend on the logits: compute it from them, without detach(), .data or no_grad()")


@contextmanager
def _teaching(inputs: Inputs) -> Iterator[None]:
    """Report the inputs if the model's own code fails."""
    try:
        yield
    except AutoHeteError:
        raise
    except Exception as error:
        named = {"ids": inputs} if isinstance(inputs, Tensor) else inputs
        given = ", ".join(f"{k} {tuple(v.shape)} of {v.dtype}" for k, v in named.items() if isinstance(v, Tensor))
        raise InputError(
            f"the model or the loss fails on the first batch ({given}): {type(error).__name__}: {error}. Call "
            "loss(model(...), targets) with this batch, without a trainer, and fix the error"
        ) from error


@contextmanager
def _rows_of_embeddings(modules: Iterable[tuple[str, nn.Module]], inputs: Inputs) -> Iterator[dict[str, int]]:
    """Yield a dict that collects, by input name, the rows of the embedding it is looked up in; check the ids' range."""
    named = {"ids": inputs} if isinstance(inputs, Tensor) else inputs
    tensors = {value.data_ptr(): name for name, value in named.items() if isinstance(value, Tensor)}
    rows: dict[str, int] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        name = tensors.get(args[0].data_ptr()) if args and isinstance(args[0], Tensor) else None
        if name is not None:
            rows[name] = int(module.num_embeddings)  # type: ignore[arg-type]
            check_range(name, args[0], rows[name])

    with ExitStack() as undo:
        for module in (module for _, module in modules if isinstance(module, nn.Embedding)):
            undo.callback(module.register_forward_pre_hook(note).remove)
        yield rows


@contextmanager
def replaced_forwards(forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Replace the forwards of modules inside the context."""
    with ExitStack() as undo:
        for module, forward in forwards:
            if "forward" in vars(module):
                undo.callback(setattr, module, "forward", module.forward)
            else:
                undo.callback(delattr, module, "forward")
            module.forward = forward
        yield


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
            result = self._run_once(call, own)
            self.effects |= _effects_since(before, self._sequences)
            if before.changed_attributes():  # caches do so, once
                after = Snapshot(self._modules)
                before.restore_buffers()
                self._repeat(call, own, random)
                if unsettled := after.changed_attributes():
                    raise InputError(
                        f"block {call.place + 1} changes {' and '.join(unsettled)} with each forward, and recomputation would "
                        "change it once more: make it a buffer (register_buffer) if it is a tensor or a number, draw random "
                        "numbers from the global generators, or do it outside of the blocks"
                    )
            if not all(module.training for _, module in self._modules) and any(m._buffers for _, m in self._modules):
                before.restore_buffers()
                for _, module in self._modules:
                    module.training = True
                self._repeat(call, own, random)
                self.effects |= Effects(before.changed_buffers())
        finally:
            before.restore_buffers()
            before.forget_buffers()
        return result

    def _run_once(self, call: BlockCall, own: Callable[..., Any]) -> Any:
        hidden, hooks = _given(call), False
        try:
            with disable_saved_tensors_hooks(_OWN_HOOKS):
                result = call.on(own, hidden)
        except RuntimeError as error:
            if _OWN_HOOKS not in str(error):
                raise
            result, hooks = call.on(own, hidden), True
        found = hidden_of(result)
        others = result[1:] if isinstance(result, tuple) else ()
        unused = frozenset(place for place, item in enumerate(others, 1) if isinstance(item, Tensor) and item.requires_grad)
        functions = (node for node in _graph(found) if isinstance(node, BackwardCFunction))
        self.effects |= Effects(python_in_backward=hooks or any(functions), unused=unused)
        return with_hidden(result, found.detach())

    def _repeat(self, call: BlockCall, own: Callable[..., Any], random: RandomState) -> None:
        random.restore()
        call.on(own, _given(call))


def _given(call: BlockCall) -> Tensor:
    """Return the hidden states with a graph, but not as a leaf, so that they can be changed in place."""
    return call.hidden.detach().requires_grad_().clone()


def _effects_since(before: Snapshot, sequences: int) -> Effects:
    """Return the effects of a forward of one sequence, with the bytes that a forward of ``sequences`` keeps."""
    kept = before.tensors_kept()
    sizes = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() * (sequences if tensor.shape[:1] == (1,) else 1)
        for tensors in kept.values()
        for tensor in tensors
    }
    return Effects(before.changed_buffers(), frozenset(kept), sum(sizes.values()))


@dataclass(frozen=True, slots=True)
class BlockCall:
    """The model's call of a block: the block's place in the list, hidden states and other arguments."""

    place: int
    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, forward: Callable[..., Any], hidden: Tensor) -> Any:
        """Return the block's result for other hidden states.

        Raises:
            InputError: the block has changed them in place.
        """
        version = _version(hidden)
        result = forward(hidden, *self.args, **self.kwargs)
        if _version(hidden) != version:
            raise InputError(
                f"block {self.place + 1} changes its input in place, which recomputation needs: write x = x + y, not x += y"
            )
        return result


class ForwardPass:
    """One forward of a model as a coroutine, inside :meth:`Partition.intercepted`, in one thread.

    Call :meth:`start`, then :meth:`resume` with each block's result, and :meth:`finish` with the last one. Grad mode and hooks
    are the caller's. All raise InputError if the model uses its blocks in a way that cannot be trained block by block.
    """

    def __init__(self, model: nn.Module) -> None:
        self._coroutine = _PassGreenlet(model)
        self._place = 0
        #: The hidden states that the model has called the current block with.
        self._given: Tensor | None = None
        #: The model's own loss, if it was given labels.
        self.own_loss: Tensor | None = None
        #: Graph nodes of the first block's input: nothing after the blocks may depend on them.
        self._before: set[Node] = set()

    def start(self, inputs: Inputs) -> BlockCall:
        """Run to the first block, and return its call."""
        call = self._checked(self._run(inputs) if isinstance(inputs, Tensor) else self._run(**inputs))
        self._before = {node for node in _graph(call.hidden) if not hasattr(node, "variable")}
        return call

    def resume(self, result: Any) -> BlockCall:
        """Return ``result`` from the current block (its hidden states need no gradients), and run to the next block."""
        hidden = hidden_of(result)
        # The model gets hidden states that need gradients, so that any other use of them is detected.
        given = self._given = hidden.detach().requires_grad_(torch.is_grad_enabled())
        version = _version(given)
        self._place += 1
        try:
            call = self._checked(self._run(with_hidden(result, given)))
        except RuntimeError as error:  # for example because ``given`` is a leaf and cannot be changed in place
            raise InputError(f"{_BETWEEN} ({error})") from error
        if call.hidden is not given or _version(given) != version:
            self._refuse(_BETWEEN)
        return replace(call, hidden=hidden)

    def let_go(self) -> None:
        """Free the input of the current block, which the model's own code would hold until it is resumed."""
        if self._given is not None:
            self._given.data = _NAN[self._given.dtype].expand(self._given.shape)

    def finish(self, result: Any) -> Tensor:
        """Return ``result`` from the last block, and run to the logits."""
        found = self._run(result)
        if isinstance(found, BlockCall):
            self._refuse(f"the model makes more block calls than it has blocks: {_ONCE}")
        self.own_loss = getattr(found, "loss", None)
        logits = getattr(found, "logits", found[0] if isinstance(found, tuple) else found)
        if not isinstance(logits, Tensor):
            raise InputError(f"the model's forward returns {type(found).__name__}: return logits, or an object with logits")
        for node in _graph(logits, hidden_of(result)):
            leaf = getattr(node, "variable", None)
            if node in self._before or (leaf is not None and not isinstance(leaf, nn.Parameter)):
                raise InputError(
                    "after its last block the model uses more than that block's result (the first block's input, or results of "
                    "others): only the last block's result is passed on"
                )
        return logits

    def end(self) -> None:
        """Abort the forward where it has stopped, as if by an exception."""
        self._coroutine.end()

    def _run(self, *values: Any, **named: Any) -> Any:
        """Resume the model with the given values, until the next block or the end."""
        modes = _modes()
        found = self._coroutine.switch(*values, **named)
        if _modes() != modes:
            self._refuse(
                "the model calls its blocks in another grad or autocast mode, or inside torch.utils.checkpoint, which "
                "recomputation would not have: call them without, freeze parameters with requires_grad, and convert the model "
                "to the compute type; the policy decides what is recomputed"
            )
        return found

    def _checked(self, found: Any) -> BlockCall:
        if not isinstance(found, BlockCall):
            raise InputError(f"the model's forward ended without calling all of its blocks: {_ONCE}")
        if found.place != self._place:
            self._refuse(f"the model calls block {found.place + 1} of its list where it should call {self._place + 1}: {_ONCE}")
        if any(tensor.requires_grad for tensor in tensors_in((found.args, found.kwargs))):
            self._refuse(
                "a block takes tensors that need gradients besides its hidden states: only hidden states are passed on"
            )
        return found

    def _refuse(self, message: str) -> NoReturn:
        self.end()
        raise InputError(message)


class _PassGreenlet(greenlet):  # type: ignore[misc, unused-ignore]
    """A model's forward as a greenlet that its blocks stop."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.__call__)
        _of_thread.passes.open.add(self)

    def end(self) -> None:
        """Abort the forward where it has stopped, as if by an exception."""
        if self:
            self.throw()


class _Passes:
    """The passes of one thread. Unfinished passes end with the thread; otherwise what they hold would live for ever."""

    def __init__(self) -> None:
        self.open: WeakSet[_PassGreenlet] = WeakSet()

    def __del__(self) -> None:
        for unfinished in list(self.open):
            unfinished.end()


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.passes = _Passes()


_of_thread = _OfThread()


def _stopping(place: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    def stop(*args: Any, **kwargs: Any) -> Any:
        current = getcurrent()
        if not isinstance(current, _PassGreenlet):
            return forward(*args, **kwargs)  # an ordinary call of the model
        assert current.parent is not None
        return current.parent.switch(call_of(place, forward, args, kwargs))

    return stop


def call_of(place: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
    """Return the call of a block's ``forward``, whose first argument, positional or by name, is the hidden states.

    Raises:
        InputError: the first argument is not a tensor.
    """
    name = "" if args else next(iter(inspect.signature(forward).parameters), "")
    hidden = args[0] if args else kwargs.get(name)
    if not isinstance(hidden, Tensor):
        raise InputError(f"block {place + 1} is called with {type(hidden).__name__} first: pass hidden states first")
    return BlockCall(place, hidden, args[1:], {key: value for key, value in kwargs.items() if key != name})


def _modes() -> tuple[object, ...]:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda"), hooks


def _version(tensor: Tensor) -> int:
    """Return the version of a tensor, which increases with each in-place change."""
    return 0 if tensor.is_inference() else tensor._version


def _graph(tensor: Tensor, until: Tensor | None = None) -> Iterator[Node]:
    """Iterate over the graph nodes that ``tensor`` was computed by, back to ``until``."""
    nodes, seen = [tensor.grad_fn], {None if until is None else until.grad_fn}
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [following for following, _ in node.next_functions]


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Iterate over the parameters that ``tensor`` was computed from."""
    return (node.variable for node in _graph(tensor) if hasattr(node, "variable"))


def hidden_of(result: Any) -> Tensor:
    """Return the hidden states in a block's result.

    Raises:
        InputError: there are none.
    """
    hidden = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(hidden, Tensor):
        raise InputError(f"a block returns {type(hidden).__name__}: return hidden states, or a tuple that begins with them")
    return hidden


def with_hidden(result: Any, hidden: Tensor, unused: frozenset[int] = frozenset()) -> Any:
    """Return a block's result with its hidden states replaced.

    Other tensors in it that need gradients, such as attention weights, are only informative. The model gets NaN without
    storage in their place, so that any use of them shows, and their memory is freed.

    Args:
        result: the block's result.
        hidden: the new hidden states.
        unused: places in the tuple of tensors that need gradients when computed with gradients enabled.

    Raises:
        InputError: tensors that need gradients are inside other containers.
    """
    if not isinstance(result, tuple):
        return hidden
    others = [
        _stand_in(item) if isinstance(item, Tensor) and (item.requires_grad or place in unused) else item
        for place, item in enumerate(result[1:], 1)
    ]
    if any(tensor.requires_grad for item in others if not isinstance(item, Tensor) for tensor in tensors_in(item)):
        raise InputError(
            "a block returns tensors that need gradients besides its hidden states: only hidden states are passed on"
        )
    return (hidden, *others)


def _stand_in(tensor: Tensor) -> Tensor:
    """Return NaN in the shape of ``tensor``; with gradients enabled, a leaf that needs gradients, so that uses are seen."""
    nan = torch.full((), torch.nan, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return nan.requires_grad_(torch.is_grad_enabled())
