"""A model cut at its blocks, whoever wrote it.

The runtime drives a model block by block, but what happens before the first block and after the last is the model's own
code. So its ``forward`` runs as a coroutine (a greenlet) that stops at each block: the part before the first block is the
embedding's pass, the blocks are called by the runtime, and with the last block's output the coroutine runs on to the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from greenlet import getcurrent, greenlet
from torch import Tensor, nn

from autohete.errors import InputError


@dataclass(frozen=True, slots=True)
class Partition:
    """A model as blocks: what comes before the block list, the list's modules, what comes after it.

    Args:
        model: the whole.
        modules: the transformer blocks.
        owned: trained parameters of each block, embedding first, head last; each parameter once, so a matrix that
            the head shares with the embedding is the embedding's.
    """

    model: nn.Module
    modules: tuple[nn.Module, ...]
    owned: tuple[tuple[nn.Parameter, ...], ...]

    @property
    def last(self) -> int:
        """Index of the head."""
        return len(self.modules) + 1

    @contextmanager
    def intercepted(self) -> Iterator[list[Callable[..., Any]]]:
        """Let the blocks stop a :class:`ForwardPass`; gives their own forwards."""
        forwards = [module.forward for module in self.modules]
        had = ["forward" in vars(module) for module in self.modules]
        for module, forward in zip(self.modules, forwards, strict=True):
            module.forward = _stopping(forward)
        try:
            yield forwards
        finally:
            for module, forward, own in zip(self.modules, forwards, had, strict=True):
                if own:
                    module.forward = forward
                else:
                    del module.forward


def partition(model: nn.Module, blocks: str | None = None) -> Partition:
    """Cut ``model`` at its list of blocks.

    Args:
        model: its forward takes token ids and gives logits (or an object with ``logits``).
        blocks: dotted name of the ``nn.ModuleList``; None: the only list of equal modules, or the one with most parameters
            if the others are inside of its blocks.

    Raises:
        InputError: there is no such list, or several; says what was found.
    """
    name, modules = _block_list(model, blocks)
    inside = {id(parameter) for parameter in modules.parameters()}
    config: Any = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # Hugging Face: keys and values of earlier tokens are for generating, not training
    before: list[nn.Parameter] = []
    after: list[nn.Parameter] = []
    passed = False
    for key, parameter in model.named_parameters():
        if key.startswith(f"{name}."):
            passed = True
        elif parameter.requires_grad and id(parameter) not in inside:
            (after if passed else before).append(parameter)
    seen: set[int] = set()
    owned = []
    for parameters in (before, *(list(module.parameters()) for module in modules), after):
        mine = [p for p in parameters if p.requires_grad and id(p) not in seen]
        seen.update(map(id, mine))
        owned.append(tuple(mine))
    for i, mine in enumerate(map(list, owned)):
        types = {parameter.dtype for parameter in mine}
        if len(types) > 1:
            raise InputError(
                f"block {i} has parameters of {' and '.join(sorted(map(str, types)))}: convert the model to one type, such as "
                "model.to(torch.bfloat16)"
            )
    return Partition(model, tuple(modules), tuple(owned))


def _block_list(model: nn.Module, wanted: str | None) -> tuple[str, nn.ModuleList]:
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)}
    found = ", ".join(f"{name!r} ({len(module)} x {type(module[0]).__name__})" for name, module in lists.items())
    if wanted is not None:
        if wanted not in lists:
            raise InputError(
                f"{type(model).__name__} has no block list {wanted!r}: its module lists are {found or 'none'}; "
                "a block list is an nn.ModuleList with at least one block"
            )
        return wanted, lists[wanted]
    outer = {
        name: module
        for name, module in lists.items()
        if len({type(block) for block in module}) == 1 and not any(name.startswith(f"{other}.") for other in lists)
    }
    if len(outer) != 1:
        raise InputError(
            f"which blocks of {type(model).__name__} are to be moved is not clear: it has {len(outer)} lists of equal blocks "
            f"(module lists: {found or 'none'}); name one, such as blocks='transformer.h', "
            "or put the blocks into an nn.ModuleList"
        )
    return next(iter(outer.items()))


@dataclass(frozen=True, slots=True)
class BlockCall:
    """How the model calls a block: hidden states and whatever else."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def on(self, forward: Callable[..., Any], hidden: Tensor) -> Any:
        """The block's result for other hidden states."""
        return forward(hidden, *self.args, **self.kwargs)


class ForwardPass:
    """One forward of a model as a coroutine, inside :meth:`Partition.intercepted`.

    Call :meth:`start`, then :meth:`resume` with each block's result. Grad mode and hooks are the caller's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._coroutine = _Pass(model)

    def start(self, ids: Tensor) -> BlockCall:
        """Run to the first block; its call is the result."""
        return self._checked(self._coroutine.switch(ids))

    def resume(self, result: Any) -> BlockCall:
        """Let the block that is called return ``result``, and run to the next."""
        found = self._checked(self._coroutine.switch(result))
        if found.hidden is not hidden_of(result):
            raise InputError(
                "the model computes something between two of its blocks; put it into a block, so that it can be recomputed and "
                "its parameters can move with them"
            )
        return found

    def finish(self, result: Any) -> Tensor:
        """Let the last block return ``result``, and run to the logits."""
        found = self._coroutine.switch(result)
        if isinstance(found, BlockCall):
            raise InputError("the model calls its blocks more often than it has blocks: each must be called once, in order")
        logits = getattr(found, "logits", found[0] if isinstance(found, tuple) else found)
        if not isinstance(logits, Tensor):
            raise InputError(f"the model's forward gives {type(found).__name__}: logits are needed, or an object with them")
        return logits

    def _checked(self, found: Any) -> BlockCall:
        if not isinstance(found, BlockCall):
            raise InputError("the model's forward ended without calling all of its blocks: each must be called once, in order")
        others = [value for value in (*found.args, *found.kwargs.values()) if isinstance(value, Tensor) and value.requires_grad]
        if others:
            raise InputError(
                "a block takes other tensors that need gradients beside its hidden states: only these are passed on"
            )
        return found


class _Pass(greenlet):  # type: ignore[misc, unused-ignore]
    """A model's forward, as the greenlet that its blocks stop."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.__call__)


def _stopping(forward: Callable[..., Any]) -> Callable[..., Any]:
    def stop(hidden: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        current = getcurrent()
        if not isinstance(current, _Pass):
            return forward(hidden, *args, **kwargs)  # somebody calls the model in the ordinary way
        if hidden is None:
            hidden = kwargs.pop("hidden_states")
        assert current.parent is not None
        return current.parent.switch(BlockCall(hidden, args, kwargs))

    return stop


def hidden_of(result: Any) -> Tensor:
    """The hidden states of what a block returned."""
    hidden: Tensor = result[0] if isinstance(result, tuple) else result
    return hidden


def with_hidden(result: Any, hidden: Tensor) -> Any:
    """What a block returned, with other hidden states in it.

    Raises:
        InputError: it returned other tensors that need gradients.
    """
    if not isinstance(result, tuple):
        return hidden
    if any(isinstance(value, Tensor) and value.requires_grad for value in result[1:]):
        raise InputError("a block returns other tensors that need gradients beside its hidden states: only these are passed on")
    return (hidden, *result[1:])
