"""Drives a model's forward block by block, without changing its code.

The model's ``forward`` runs as a coroutine (a greenlet) that stops at each block: the part before the first block is the
embedding's pass, the runtime calls the blocks, and with the last block's output the coroutine continues to the logits. A model
that does anything else with its blocks would train differently, and is rejected.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.autograd.graph import Node

from autohete.errors import InputError
from autohete.runtime.batch import Inputs
from autohete.runtime.model_state import tensors_in

_BETWEEN = (
    "the model computes something between two blocks: move it into a block, so that it can be recomputed and its "
    "parameters can move with the block's"
)
#: Placeholders for released tensors; allocated in advance, so that no task is charged for them.
_NAN = {
    dtype: torch.full((), torch.nan, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
_ONCE = "each must be called once, in order"


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
    """One forward of a model as a coroutine, inside :meth:`autohete.runtime.partition.Partition.intercepted`, in one thread.

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
        self._before = {node for node in graph_nodes(call.hidden) if not hasattr(node, "variable")}
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
        for node in graph_nodes(logits, hidden_of(result)):
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


#: Hooks of a module around its forward, in PyTorch's own attributes.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def stopping(blocks: Iterable[nn.Module]) -> Iterator[list[Callable[..., Any]]]:
    """Make the blocks stop a :class:`ForwardPass`; yield what computes each: its forward, with the block's own hooks if it has
    any. An ordinary call of the model does not stop.
    """
    entries = [(block, "_call_impl" if any(getattr(block, hooks) for hooks in HOOKS) else "forward") for block in blocks]
    own = [getattr(block, name) for block, name in entries]
    stops = [_stopping(place, block.forward, whole) for place, ((block, _), whole) in enumerate(zip(entries, own, strict=True))]
    with ExitStack() as undo:
        for (block, name), stop in zip(entries, stops, strict=True):
            undo.enter_context(_replaced(block, name, stop))
        yield own


def _stopping(place: int, forward: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
    def stop(*args: Any, **kwargs: Any) -> Any:
        current = getcurrent()
        if not isinstance(current, _PassGreenlet):
            return whole(*args, **kwargs)  # an ordinary call of the model
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


def graph_nodes(tensor: Tensor, until: Tensor | None = None) -> Iterator[Node]:
    """Iterate over the graph nodes that ``tensor`` was computed by, back to ``until``."""
    return nodes_of(tensor.grad_fn, None if until is None else until.grad_fn)


def nodes_of(root: Node | None, until: Node | None = None) -> Iterator[Node]:
    """Iterate over the nodes of a graph from ``root``, back to ``until``."""
    nodes, seen = [root], {None, until}
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [following for following, _ in node.next_functions]


def leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Iterate over the parameters that ``tensor`` was computed from."""
    return (node.variable for node in graph_nodes(tensor) if hasattr(node, "variable"))


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


@contextmanager
def replaced_forwards(forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Replace the forwards of modules inside the context."""
    with ExitStack() as undo:
        for module, forward in forwards:
            undo.enter_context(_replaced(module, "forward", forward))
        yield


@contextmanager
def _replaced(module: nn.Module, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of a module inside the context."""
    own = vars(module).get(name)
    vars(module)[name] = method
    try:
        yield
    finally:
        del vars(module)[name]
        if own is not None:
            vars(module)[name] = own
