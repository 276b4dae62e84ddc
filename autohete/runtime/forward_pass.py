"""Drives a model's forward block by block, without changing its code.

The model's ``forward`` runs as a coroutine (a greenlet) that stops at each block: the part before the first block is the
embedding's pass, the runtime calls the blocks, and with the last block's output the coroutine continues to the logits. What the
model's own code computes between two blocks belongs to the block before.

So one forward has a graph for each block, and one for each part of the model's own code. What one of them hands to another,
such as hidden states or the output of an encoder, is cut between them: see :class:`Handed`. A model that does anything else
with its blocks would train differently, and is rejected.
"""

from __future__ import annotations

import inspect
import threading
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn
from weakref import WeakSet

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward, get_gradient_edge
from torch.utils._pytree import tree_map_only

from autohete.errors import InputError
from autohete.runtime.autocast import Autocast
from autohete.runtime.batch import Inputs
from autohete.runtime.model_state import Effects, tensors_in

_IN_PLACE = (
    "the model changes the result of a block in place, which backward and recomputation need: write x = x + y, not x += y"
)
_UNUSED = (
    "the model uses a tensor that needs gradients, but is neither computed from parameters nor one of them, such as a result "
    "of a block that its first forward did not use"
)
_NEW = "which it did not in its first forward: make a new trainer where the model begins to do so"
#: Placeholders for released tensors; allocated in advance, so that no task is charged for them.
_NAN = {
    dtype: torch.full((), torch.nan, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
_ONCE = "each must be called once, in the order of the first forward"


class _Cut(torch.autograd.Function):
    """Boundary of a graph: passes a tensor on, and captures its gradient.

    A leaf would do the same, but would keep its memory as long as the graph lives, even after what the block saved has moved.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, arrived: list[Tensor]) -> Tensor:
        ctx.arrived = arrived
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.arrived.append(gradients[0])
        return None, None, None


#: Makes the result of a cut need gradients.
_ANCHOR = torch.zeros((), device="cpu", requires_grad=True)


@dataclass(slots=True, eq=False)
class Handed:
    """A tensor with a gradient that a graph makes and later ones take.

    Attributes:
        source: the unit whose block has made it, and the place in its result; of hidden states before the first block (0, 0);
            None: the model's own code has made it.
        value: it without a graph, if others than the next block take it, in memory of its own.
        gradient: the sum of the gradients from those that have taken it, while backward runs.
    """

    source: tuple[int, int] | None = None
    value: Tensor | None = None
    gradient: Tensor | None = None


class Taken(NamedTuple):
    """A tensor that a graph takes, where the graph ends at it, and what collects its gradient there."""

    handed: Handed
    edge: GradientEdge
    arrived: list[Tensor]


def cut(handed: Handed, tensor: Tensor) -> tuple[Tensor, Taken]:
    """Return ``tensor``, the value of ``handed``, as the beginning of a graph."""
    arrived: list[Tensor] = []
    found: Tensor = _Cut.apply(_ANCHOR, tensor.detach(), arrived)  # type: ignore[no-untyped-call]
    return found, Taken(handed, get_gradient_edge(found), arrived)


@dataclass(slots=True)
class BackwardGraph:
    """The graph of a block or of a part of the model's own code.

    Attributes:
        made: what it has made, and where backward starts for that.
        taken: what it has taken.
        parameters: how often the model's own code has used each, by its id.
    """

    made: list[tuple[GradientEdge, Handed]] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)
    parameters: Counter[int] = field(default_factory=Counter)

    def backward(self, *, retain: bool) -> None:
        """Compute gradients of parameters, and of what was taken. The gradients of a tensor that several graphs have taken are
        added one after another, each to the sum of those before, as a backward through the whole model adds them.
        """
        roots = [(edge, handed.gradient) for edge, handed in self.made if handed.gradient is not None]
        if not roots:
            return
        roots += [(edge, handed.gradient) for handed, edge, _ in self.taken if handed.gradient is not None]
        edges, sums = zip(*roots, strict=True)
        # As torch.autograd.backward, which takes as long again to check the shapes of each block.
        _engine_run_backward(edges, sums, retain, False, (), allow_unreachable=True, accumulate_grad=True)
        for _, handed in self.made:
            handed.gradient = None
        for handed, _, arrived in self.taken:
            if arrived:
                handed.gradient = arrived.pop()


@dataclass(frozen=True, slots=True)
class BlockCall:
    """The model's call of a block.

    Args:
        place: the block's place in the list.
        hidden: hidden states.
        args, kwargs: other arguments, without graphs.
        autocast: the mode in which the model has called it.
        given: the hidden states as what has made them hands them on; None: they have no gradient.
        beside: what of the other arguments has a gradient.
    """

    place: int
    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: Autocast
    given: Handed | None = None
    beside: tuple[Handed, ...] = ()

    def on(self, forward: Callable[..., Any], hidden: Tensor, beside: Sequence[Tensor] | None = None) -> Any:
        """Return the block's result for other hidden states, and for ``beside`` in place of what has a gradient. Of the latter
        it has what it returns as it was given.

        Raises:
            InputError: the block has changed them in place.
        """
        version, args, kwargs = _version(hidden), self.args, self.kwargs
        values = [handed.value for handed in self.beside]
        if beside is not None and values:
            given = {id(value): tensor for value, tensor in zip(values, beside, strict=True)}
            args, kwargs = tree_map_only(Tensor, lambda tensor: given.get(id(tensor), tensor), (args, kwargs))
        with self.autocast.entered():
            result = forward(hidden, *args, **kwargs)
        if _version(hidden) != version:
            raise InputError(
                f"block {self.place + 1} changes its input in place, which recomputation needs: write x = x + y, not x += y"
            )
        if not values or not isinstance(result, tuple):
            return result
        own = {id(tensor): handed for tensor, handed in zip(beside or values, self.beside, strict=True)}
        return (result[0], *(own.get(id(item), item) for item in result[1:]))


class ForwardPass:
    """One forward of a model as a coroutine, inside :meth:`autohete.runtime.partition.Partition.intercepted`, in one thread.

    Call :meth:`start`, then :meth:`resume` with each block's result, and :meth:`finish` with the last one. Grad mode and hooks
    are the caller's. All raise InputError if the model uses its blocks in a way that cannot be trained block by block.

    Args:
        model: the model.
        autocast: the mode in which the model is called.
        effects: what it hands on, as observed. None: observe it.

    Attributes:
        graph: of the model's own code since the block before, if it has computed anything.
        handed: what has a gradient of the result that the model was given last, by place.
        beside: tensors that it was given last besides hidden states.
        observed: what the model has handed on so far.
        order: the blocks' places in the list, as they were called.
        logits: the result, in the end.
        own_loss: the model's own loss, if it was given labels.
    """

    def __init__(self, model: nn.Module, autocast: Autocast, effects: Effects | None = None) -> None:
        self.graph: BackwardGraph | None = None
        self.handed: dict[int, Handed] = {}
        self.beside: list[Tensor] = []
        self.observed = Effects()
        self.order: list[int] = []
        self.logits = Handed()
        self.own_loss: Tensor | None = None
        self._coroutine, self._autocast, self._effects = _PassGreenlet(model), autocast, effects
        #: Number of blocks done.
        self._place = 0
        #: The hidden states that the model has called the current block with, if they are the block's before.
        self._given: Tensor | None = None
        #: What others than the next block may take, by the id of the tensor that the model's own code has; these tensors.
        self._known: dict[int, Handed] = {}
        self._tensors: dict[Handed, Tensor] = {}
        #: The cuts at the results of blocks; the graphs of the model's own code, by the unit before it, and their nodes.
        self._cuts: dict[Node, Taken] = {}
        self._graphs: dict[int, BackwardGraph] = {}
        self._seen: dict[int, set[Node]] = {}
        #: By block, the number that autograd gives next after it.
        self._bounds: list[int] = []

    def start(self, inputs: Inputs) -> BlockCall:
        """Run to the first block, and return its call."""
        return self._stopped(self._run(**inputs) if isinstance(inputs, Mapping) else self._run(inputs))

    def resume(self, result: Any, *, others: Set[int] | None = None, frozen: bool = False) -> BlockCall:
        """Return ``result`` from the current block, and run to the next block.

        Args:
            result: its tensors need no gradients.
            others: places in it of tensors other than the hidden states that have gradients; None: as observed.
            frozen: nothing in it has gradients.
        """
        hidden = hidden_of(result)
        given = self._handed_over(result, others, frozen=frozen)
        before = self._given
        assert before is not None
        version = _version(before)
        try:
            call = self._stopped(self._run(given))
        except RuntimeError as error:  # views that a function returns cannot be changed in place
            if "inplace" not in str(error) and "in-place" not in str(error):
                raise
            raise InputError(f"{_IN_PLACE} ({error})") from error
        if _version(before) != version:
            self._refuse(_IN_PLACE)
        return replace(call, hidden=hidden) if call.hidden is before else call

    def let_go(self) -> None:
        """Free the input of the current block, which the model's own code would hold until it is resumed."""
        given = self._given
        if given is not None and id(given) not in self._known:
            for tensor in (given, given._base):  # a cut is a view
                if tensor is not None:
                    tensor.data = _NAN[given.dtype].expand(given.shape)

    def finish(self, result: Any, *, others: Set[int] | None = None, frozen: bool = False) -> Tensor:
        """Return ``result`` from the last block, and run to the logits."""
        found = self._run(self._handed_over(result, others, frozen=frozen))
        if isinstance(found, BlockCall):
            self._refuse(f"the model makes more block calls than it has blocks: {_ONCE}")
        self.own_loss = getattr(found, "loss", None)
        logits = getattr(found, "logits", found[0] if isinstance(found, tuple) else found)
        if not isinstance(logits, Tensor):
            raise InputError(f"the model's forward returns {type(found).__name__}: return logits, or an object with logits")
        self.graph = self._graphs[self._place] = BackwardGraph()
        if logits.requires_grad:
            self._make(logits, self.logits)
        return logits

    @property
    def used(self) -> dict[int, Counter[int]]:
        """How often the model's own code has used each parameter, by the unit before it and the parameter's id."""
        return {unit: graph.parameters for unit, graph in self._graphs.items()}

    def end(self) -> None:
        """Abort the forward where it has stopped, as if by an exception."""
        self._coroutine.end()

    def _run(self, *values: Any, **named: Any) -> Any:
        """Resume the model with the given values, until the next block or the end."""
        modes = _modes()
        with self._autocast.entered():
            found = self._coroutine.switch(*values, **named)
            self._autocast = Autocast.now()  # the model may be inside a torch.autocast of its own
        if _modes() != modes:
            self._refuse(
                "the model calls its blocks in another grad mode, or inside torch.utils.checkpoint, which recomputation would "
                "not have: call them without, and freeze parameters with requires_grad; the policy decides what is recomputed"
            )
        return found

    def _handed_over(self, result: Any, others: Set[int] | None, *, frozen: bool) -> Any:
        """The result of a block as the model gets it. Results besides hidden states that have gradients but are not used, such
        as attention weights, are NaN without memory.
        """
        self._place += 1
        unit, effects = self._place, self._effects
        if others is None:
            others = {place for one, place in effects.others if one == unit} if effects is not None else set()
        self.handed, self.beside = {}, []
        self._bounds.append(torch._C._autograd._get_sequence_nr())
        self._given = given = self._handle(hidden_of(result), 0, frozen=frozen)
        if not isinstance(result, tuple):
            return given
        rest = []
        for place, item in enumerate(result[1:], 1):
            if isinstance(item, Handed):  # as the block was given it
                rest.append(self._tensors[item])
            elif not isinstance(item, Tensor):
                rest.append(item)
            elif place in others and (effects is None or (unit, place) in effects.handed):
                rest.append(self._handle(item, place, frozen=frozen))
            elif place in others or item.requires_grad:
                rest.append(_stand_in(item))
            else:
                rest.append(item)
                self.beside.append(item)
        return (given, *rest)

    def _handle(self, tensor: Tensor, place: int, *, frozen: bool) -> Tensor:
        """A result of the last block as the model gets it."""
        source, grads = (self._place, place), torch.is_grad_enabled() and not frozen
        kept = self._effects is None or source in self._effects.handed
        value = tensor.detach().clone() if kept else tensor.detach()
        if kept:
            self.beside.append(value)
        if not grads:
            return value
        handed = Handed(source)
        found, taken = cut(handed, value)
        self.handed[place], self._cuts[taken.edge.node] = handed, taken
        if kept:
            handed.value, self._tensors[handed], self._known[id(found)] = value, found, handed
        return found

    def _stopped(self, found: Any) -> BlockCall:
        """Check a call of a block, and take what the model's own code has made for it."""
        call, effects = self._checked(found), self._effects
        self.graph = None
        if self._place == 0 or (effects is not None and self._place in effects.between):
            self.graph = self._graph_of(self._place)
        if call.hidden is self._given:
            given = self.handed.get(0)
        else:
            self.graph, self._given = self._graph_of(self._place), None
            given = self._named(call.hidden, is_hidden=True) if call.hidden.requires_grad else None
        args, kwargs, beside = call.args, call.kwargs, dict[int, Handed]()

        def taken(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            handed = self._named(tensor)
            if handed is None or handed.value is None:
                self._refuse(_UNUSED)
            beside[id(handed)] = handed
            return handed.value

        if any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
            args, kwargs = tree_map_only(Tensor, taken, (args, kwargs))
            if any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
                self._refuse(
                    "a block takes tensors that need gradients in a container that torch.utils._pytree does not know: pass "
                    "the tensors themselves, or register the container"
                )
            self.graph = self._graphs.get(self._place)
            count = sum(handed is not given for handed in beside.values())
            self.observed |= Effects(beside=frozenset({(self._place + 1, count)}))
        return replace(call, args=args, kwargs=kwargs, given=given, beside=tuple(beside.values()))

    def _graph_of(self, unit: int) -> BackwardGraph:
        """The graph of the model's own code after a unit."""
        if unit not in self._graphs:
            if unit and self._effects is not None and unit not in self._effects.between:
                self._refuse(f"the model computes something after block {unit}, {_NEW}")
            if unit:
                self.observed |= Effects(between=frozenset({unit}))
            self._graphs[unit] = BackwardGraph()
        return self._graphs[unit]

    def _named(self, tensor: Tensor, *, is_hidden: bool = False) -> Handed | None:
        """What ``tensor`` hands on, from a block or from the model's own code. None: it is neither computed nor a parameter."""
        if id(tensor) in self._known:
            self._note(self._known[id(tensor)].source)
            return self._known[id(tensor)]
        if tensor.is_leaf and not isinstance(tensor, nn.Parameter):
            return None
        first = is_hidden and not self._place
        handed = Handed((0, 0) if first else None)
        self._make(tensor, handed)
        if not first or self._effects is None or (0, 0) in self._effects.handed:
            value = tensor.detach()
            handed.value = value.clone() if tensor.is_leaf else value
            self._tensors[handed], self._known[id(tensor)] = tensor, handed
        return handed

    def _make(self, tensor: Tensor, handed: Handed) -> None:
        """Let the model's own code have made ``tensor``: find the graph that has, and what that has taken."""
        edge = get_gradient_edge(tensor)
        unit = self._place if tensor.is_leaf else bisect(self._bounds, edge.node._sequence_nr())
        graph, nodes, seen = self._graph_of(unit), list[Node | None]([edge.node]), self._seen.setdefault(unit, set())
        graph.made.append((edge, handed))
        if tensor.is_leaf:
            graph.parameters[id(tensor)] += 1
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if node in self._cuts:
                graph.taken.append(self._cuts[node])
                source = self._cuts[node].handed.source
                if source != (unit, 0):
                    self._note(source)
            elif variable is not None:
                if unit and not isinstance(variable, nn.Parameter):
                    self._refuse(_UNUSED)
            elif bisect(self._bounds, node._sequence_nr()) != unit:
                self._refuse(
                    f"after block {unit} the model's own code uses what it has computed before another block, such as the "
                    "first block's input: give that to a block as an argument, or let a block return it"
                )
            else:
                following = [after for after, _ in node.next_functions]
                found = (getattr(after, "variable", None) for after in following)
                graph.parameters.update(id(leaf) for leaf in found if leaf is not None)
                nodes += following

    def _note(self, source: tuple[int, int] | None) -> None:
        """Note that something else than the next block takes a result of a block."""
        if source is None:
            return
        if self._effects is None:
            self.observed |= Effects(handed=frozenset({source}))
        elif source not in self._effects.handed:
            self._refuse(f"the model uses a result of block {source[0]} in another place, {_NEW}")

    def _checked(self, found: Any) -> BlockCall:
        if not isinstance(found, BlockCall):
            raise InputError(f"the model's forward ended without calling all of its blocks: {_ONCE}")
        if self._effects is None and found.place not in self.order:
            self.order.append(found.place)
        elif self._effects is None or found.place != self._place:
            self._refuse(f"the model calls block {found.place + 1} where it should call another: {_ONCE}")
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
    return BlockCall(place, hidden, args[1:], {key: value for key, value in kwargs.items() if key != name}, Autocast.now())


def _modes() -> tuple[object, ...]:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.is_grad_enabled(), hooks


def _version(tensor: Tensor) -> int:
    """Return the version of a tensor, which increases with each in-place change."""
    return 0 if tensor.is_inference() else tensor._version


def graph_nodes(tensor: Tensor) -> Iterator[Node]:
    """Iterate over the graph nodes that ``tensor`` was computed by."""
    return nodes_of([tensor.grad_fn])


def leaves(tensor: Tensor) -> Iterator[Tensor]:
    """Iterate over the parameters that ``tensor`` was computed from."""
    return (node.variable for node in graph_nodes(tensor) if hasattr(node, "variable"))


def nodes_of(roots: Iterable[Node | None]) -> Iterator[Node]:
    """Iterate over the nodes of a graph from ``roots``."""
    nodes, seen = list(roots), set[Node | None]([None])
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [following for following, _ in node.next_functions]


def hidden_of(result: Any) -> Tensor:
    """Return the hidden states in a block's result.

    Raises:
        InputError: there are none.
    """
    hidden = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(hidden, Tensor):
        raise InputError(f"a block returns {type(hidden).__name__}: return hidden states, or a tuple that begins with them")
    return hidden


def with_hidden(result: Any, hidden: Tensor, handed: Set[int] = frozenset()) -> Any:
    """Return a block's result with its hidden states replaced, without the graphs of other tensors.

    Args:
        result: the block's result.
        hidden: the new hidden states.
        handed: places of other tensors that later parts of the model take. The rest is only informative, such as attention
            weights. The model gets NaN without storage instead, so that any use of them shows, and their memory is freed.
    """
    if not isinstance(result, tuple):
        return hidden
    others = []
    for place, item in enumerate(result[1:], 1):
        if not isinstance(item, Tensor) and any(tensor.requires_grad for tensor in tensors_in(item)):
            raise InputError("a block returns tensors that need gradients in a container: return them in the tuple itself")
        needs = isinstance(item, Tensor) and item.requires_grad
        others.append(item.detach() if place in handed and needs else _stand_in(item) if needs else item)
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
