"""Records a forward and a backward of a model without values: each operation, what it reads and makes, what is saved."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autohete.runtime.ledger import Ledger
from autohete.tracing.on_cuda import (
    NO_KERNEL,
    Sizes,
    attention_flops,
    elements,
    is_attention,
    is_masked,
    launches,
    products,
    solve_flops,
    touched,
)


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One operation.

    Args:
        kernel: its name.
        module: the module that runs it; of backward the one whose forward it belongs to.
        origin: of backward, the forward operation, by index, that made its node.
        backward: whether it runs in backward.
        read, written: storages, by number.
        launches: kernels.
        accesses, size_bytes: elements that it reads and writes, and their size.
        products, flops, fused_flops, attention, masked: see :class:`~autohete.workload.table.TracedKernel`.
        before_bytes, after_bytes: alive before it and after it.
    """

    kernel: str
    module: str
    origin: int
    backward: bool
    read: tuple[int, ...]
    written: tuple[int, ...]
    launches: int
    accesses: int
    size_bytes: int
    products: tuple[Sizes, ...]
    flops: int
    fused_flops: int
    attention: tuple[int, int, int] | None
    masked: bool
    before_bytes: int
    after_bytes: int


@dataclass(slots=True)
class Storages:
    """The storages of a recording, by number.

    Attributes:
        sizes: bytes of each.
        made_by: the operation that made each, by index; None: it was there before.
        parameters: names of those that are parameters or buffers.
        given: those of the inputs.
        ended: the number of operations when each was freed, of those that were.
        now: the number of operations so far.
    """

    sizes: list[int] = field(default_factory=list)
    made_by: list[int | None] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)
    given: set[int] = field(default_factory=set)
    ended: dict[int, int] = field(default_factory=dict)
    now: int = 0
    _numbers: dict[int, int] = field(default_factory=dict)
    _alive: dict[int, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict)

    def of(self, tensor: Tensor, made_by: int | None = None) -> int:
        """The number of a tensor's storage, which ``made_by`` has made if it was not seen yet."""
        storage = tensor.untyped_storage()
        if (known := self._numbers.get(storage._cdata)) is not None:
            return known
        number = self._numbers[storage._cdata] = len(self.sizes)
        self._alive[number] = weakref.ref(storage, partial(self._end, number, storage._cdata))
        self.sizes.append(storage.nbytes())
        self.made_by.append(made_by)
        return number

    def _end(self, number: int, address: int, _: object) -> None:
        """Note that a storage was freed. Its address may be that of another one now."""
        self.ended[number] = self.now
        if self._numbers.get(address) == number:
            del self._numbers[address]


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what runs inside :meth:`running`.

    Attributes:
        calls: operations, in order.
        saved: the operation after which forward first saves each storage, by the storage.
        entered: for each block in the order of its call: its place, and the number of operations before it.
        ended: the number of operations when the last block was done.
        storages: all storages.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], inputs: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[RecordedCall] = []
        self.saved: dict[int, int] = {}
        self.entered: list[tuple[int, int]] = []
        self.ended = 0
        self.width = 1
        self.storages = Storages()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.storages.parameters.setdefault(self.storages.of(tensor), name)
        self.storages.given.update(self.storages.of(tensor) for tensor in _tensors(inputs))
        self._names: Mapping[nn.Module, str] = {module: name for name, module in model.named_modules()}
        self._places = {module: place for place, module in enumerate(blocks)}
        self._modules: list[str] = []
        self._origins: list[tuple[int, int, str]] = []
        self._last = (0, "")
        self._ledger = Ledger("trace")
        self.backward = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As in :class:`autohete.runtime.ledger.Accounting`."""
        return False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record what runs inside."""
        with ExitStack() as undo:
            undo.callback(register_module_forward_pre_hook(self._enter).remove)
            undo.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            for block in self._places:
                undo.callback(block.register_forward_pre_hook(self._enter_block, with_kwargs=True).remove)
            undo.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
            undo.enter_context(self)
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before, sequence = self._ledger.used_bytes, torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        out = func(*args, **kwargs)
        if func.is_view or func.namespace == "prim":  # such as a tensor's device
            return out
        read, written = _tensors((args, kwargs)), _tensors(out)
        name = func._schema.name.partition("::")[2]
        numbers = tuple([self.storages.of(tensor) for tensor in read])
        made = tuple([self.storages.of(one, made_by=len(self.calls)) for one in written])
        for tensor in written:
            self._ledger.enter(tensor, "trace")
        self._note(func, name, args, out, (read, written), (numbers, made), (before, sequence))
        return out

    def _note(
        self,
        func: Any,
        name: str,
        args: Any,
        out: Any,
        tensors: tuple[list[Tensor], list[Tensor]],
        numbers: tuple[tuple[int, ...], tuple[int, ...]],
        at: tuple[int, int],
    ) -> None:
        before, sequence = at
        origin, module = self._origin() if self.backward else (len(self.calls), self._module)
        if not self.backward:
            self._origins.append((sequence, len(self.calls), module))
        sizes = products(name, args, out)
        flops = fused = solve_flops(name, args)
        attention: tuple[int, int, int] | None = None
        masked = False
        if is_attention(name):
            flops, fused, attention = attention_flops(name, args)
            masked = is_masked(name, args)
        moved = [] if sizes or (fused and not is_attention(name)) or name in NO_KERNEL else touched(name, *tensors)
        counts = [elements(tensor) for tensor in moved]
        mutated = tuple([self.storages.of(one) for one in _mutated(func, args)])
        self.calls.append(
            RecordedCall(
                name,
                module,
                origin,
                self.backward,
                numbers[0],
                (*numbers[1], *mutated),
                launches(name),
                sum(counts),
                sum(count * tensor.element_size() for count, tensor in zip(counts, moved, strict=True)),
                sizes,
                flops,
                fused,
                attention,
                masked,
                before,
                self._ledger.used_bytes,
            )
        )
        self.storages.now = len(self.calls)

    @property
    def _module(self) -> str:
        return self._modules[-1] if self._modules else ""

    def _origin(self) -> tuple[int, str]:
        """The forward operation that the running node of autograd belongs to, and its module. Sums of the gradients of a
        parameter belong to what ran last.
        """
        node = torch._C._current_autograd_node()
        number = None if node is None else node._sequence_nr()
        if number is not None and number <= self._origins[-1][0]:
            place = bisect_right(self._origins, (number, len(self.calls), "")) - 1
            self._last = self._origins[max(place, 0)][1:]
        return self._last

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(module, self._module)
        self._modules.append(name)
        self._mark()

    def _enter_block(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        self.entered.append((self._places[block], len(self.calls)))
        if len(self.entered) == 1:
            hidden = next((one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)), None)
            self.width = hidden.shape[-1] if hidden is not None and hidden.dim() else 1

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._modules.pop()
        self._mark()
        if module in self._places:
            self.ended = len(self.calls)

    def _mark(self) -> None:
        """Note where a module begins or ends, for nodes of autograd without an operation of their own."""
        self._origins.append((torch.autograd._get_sequence_nr(), len(self.calls), self._module))  # type: ignore[attr-defined]

    def _pack(self, tensor: Tensor) -> Tensor:
        if not self.backward:
            number, done = self.storages.of(tensor), len(self.calls)
            made_now = self.storages.made_by[number] == done - 1  # inputs are saved before an operation runs, results after it
            self.saved.setdefault(number, done - made_now)
        return tensor


def _tensors(tree: object) -> list[Tensor]:
    """The tensors in ``tree``, each part of a storage once."""
    found = {}
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            found[leaf.untyped_storage()._cdata, leaf.storage_offset(), leaf.shape] = leaf
    return list(found.values())


def _mutated(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """The arguments that an operation writes in place."""
    if not func._schema.is_mutable:
        return []
    given = zip(func._schema.arguments, args, strict=False)
    return [value for argument, value in given if argument.is_write and isinstance(value, Tensor)]


def run_loss(recording: Recording, forward: Callable[[], tuple[Tensor, Tensor]]) -> int:
    """Run ``forward``, which returns the prediction and the loss, and the loss's backward; return the prediction's storage."""
    with recording.running():
        prediction, loss = forward()
        number = recording.storages.of(prediction)
        recording.backward = True
        loss.backward()  # type: ignore[no-untyped-call]
    return number
