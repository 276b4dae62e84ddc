"""What a forward saves for backward, by the module that has made it, and how some of it is made again.

While a unit's forward runs, :class:`Recorder` notes each operation that allocates a storage. Afterwards every saved tensor is
known by the module whose forward has made it, and by the operations that make it again from the unit's input, its parameters
and the other saved tensors. So any of them can be released, or rest elsewhere, while the rest of autograd's graph stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from autohete.errors import InputError

_ATEN = torch.ops.aten
#: What selective recomputation does not run again: products with weights, which take the most time, and fused attention. Other
#: products are those of attention, whose results are its scores.
_SLOW = {
    _ATEN.mm,
    _ATEN.addmm,
    _ATEN.convolution,
    _ATEN._grouped_mm,
    _ATEN._scaled_mm,
    _ATEN._scaled_dot_product_flash_attention_for_cpu,
    _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_efficient_attention,
    _ATEN._scaled_dot_product_cudnn_attention,
}
#: Their results are written by kernels that PyTorch does not see.
_UNWRITTEN = {
    _ATEN.empty,
    _ATEN.empty_like,
    _ATEN.empty_strided,
    _ATEN.empty_permuted,
    _ATEN.new_empty,
    _ATEN.new_empty_strided,
    _ATEN.resize_,
}
#: Name of what the unit's own forward makes, outside all modules in it.
WHOLE = "block"


class Geometry(NamedTuple):
    """The place of a tensor in a storage."""

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """That of ``tensor`` in its storage."""
        return cls(tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride())

    def within(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor in ``storage``."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, self.offset, self.size, self.stride)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Saved:
    """A tensor that a graph keeps for backward: on the device, or its place in a storage that has moved or has been released.

    Only the graph keeps it alive: what no backward can reach any more is freed at once, as in plain PyTorch.

    Attributes:
        value: the tensor; or its place, while its storage is elsewhere.
        storage: key of that storage where it is.
        part: index of the part of the activations that it belongs to.
    """

    value: Tensor | Geometry
    storage: int = 0
    part: int = 0

    @property
    def tensor(self) -> Tensor:
        """The tensor, which is on the device."""
        assert isinstance(self.value, Tensor), "the schedule brings what backward needs"
        return self.value


@dataclass(slots=True, eq=False)
class _Made:
    """A storage that an operation has allocated.

    Attributes:
        call: the operation. None: the storage comes from outside.
        module: path of the module that ran it.
        size_bytes: its size.
        changes: how often operations have changed it since.
        saved: the tensors in it that autograd has saved.
        cheap: it can be made again without a product with weights; None: it cannot be made again by itself.
        now: itself, while what needs it is made again.
    """

    call: _Call | None
    module: str
    size_bytes: int = 0
    changes: int = 0
    saved: list[weakref.ref[Saved]] = field(default_factory=list)
    cheap: bool | None = None
    now: torch.UntypedStorage | None = None

    def alive(self) -> list[Saved]:
        """The tensors in it that a backward still needs."""
        return [one for one in (reference() for reference in self.saved) if one is not None]


@dataclass(slots=True, eq=False)
class _Argument:
    """A tensor that an operation reads.

    Args:
        made: its storage.
        changes: how often that had been changed until then.
        place: where it is in the storage, or what is outside.
    """

    made: _Made
    changes: int
    place: object

    @property
    def is_as_read(self) -> bool:
        """Whether the storage still has what the operation has read."""
        return self.made.changes == self.changes


@dataclass(slots=True, eq=False)
class _Call:
    """An operation of a forward, with tensors in its arguments as :class:`_Argument`."""

    place: int
    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[_Made | None] = field(default_factory=list)

    def reads(self) -> Iterator[_Argument]:
        yield from (one for one in tree_iter((self.args, self.kwargs)) if isinstance(one, _Argument))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what makes the storages of one forward of a unit.

    Args:
        module: the unit's module.
        outside: describes a tensor that comes from outside, without keeping alive what may move.
    """

    def __init__(self, module: nn.Module, outside: Callable[[Tensor], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outside = outside
        self._names = {child: name or WHOLE for name, child in module.named_modules()}
        self._inside = [WHOLE]
        self._calls: list[_Call] = []
        #: By storage; a weak reference keeps the address of a freed storage from being used again.
        self._storages: dict[int, tuple[StorageWeakRef, _Made]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside."""
        with ExitStack() as undo:
            undo.callback(register_module_forward_pre_hook(self._enter).remove)
            undo.callback(register_module_forward_hook(self._leave).remove)
            with self:
                yield

    def _enter(self, module: nn.Module, args: object) -> None:
        self._inside.append(self._names.get(module, self._inside[-1]))

    def _leave(self, module: nn.Module, args: object, result: object) -> None:
        if len(self._inside) > 1:
            self._inside.pop()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = _Call(len(self._calls), func, *tree_map_only(Tensor, self._argument, (args, kwargs)))
        result = func(*args, **kwargs)
        read = {one.made for one in call.reads()}
        if func._schema.is_mutable:
            for schema, argument in zip(func._schema.arguments, call.args, strict=False):
                if schema.alias_info is not None and schema.alias_info.is_write:
                    for one in tree_iter(argument):
                        if isinstance(one, _Argument):
                            one.made.changes += 1
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            made = None
            if isinstance(tensor, Tensor) and self._made(tensor) not in read and tensor.untyped_storage().nbytes():
                made = _Made(call, self._inside[-1], tensor.untyped_storage().nbytes())
                self._note(tensor, made)
            call.results.append(made)
        if any(made is not None for made in call.results):
            self._calls.append(call)
        return result

    def _made(self, tensor: Tensor) -> _Made | None:
        found = self._storages.get(_key(tensor))
        return None if found is None else found[1]

    def _argument(self, tensor: Tensor) -> _Argument:
        made = self._made(tensor)
        if made is None:
            made = _Made(None, WHOLE)
            self._note(tensor, made)
        return _Argument(made, made.changes, self._outside(tensor) if made.call is None else Geometry.of(tensor))

    def _note(self, tensor: Tensor, made: _Made) -> None:
        self._storages[_key(tensor)] = StorageWeakRef(tensor.untyped_storage()), made  # type: ignore[no-untyped-call]

    def note(self, saved: Saved) -> None:
        """Let a tensor that autograd saves be known by its storage."""
        made = self._made(saved.tensor)
        if made is not None and made.call is not None:
            made.saved.append(weakref.ref(saved))

    def finished(self, held: Iterable[Tensor] = ()) -> Recorded:
        """What was saved, once the forward has ended. The hooks of its graph keep this recorder, which keeps nothing more.

        Args:
            held: what the model itself holds on to, which a graph cannot release.
        """
        calls, staying = self._calls, {self._made(tensor) for tensor in held}
        self._calls, self._storages, self._outside = [], {}, str
        for call in calls:
            cheap = _cheap(call)
            for made in call.results:
                if made is not None and not made.changes:
                    made.cheap = cheap
        results = [made for call in calls for made in call.results if made is not None and made not in staying]
        return Recorded([made for made in results if made.alive()])


def _cheap(call: _Call) -> bool | None:
    """Whether an operation can run again without a product with weights; None if it cannot run again."""
    packet = call.operation.overloadpacket
    if packet in _UNWRITTEN or call.operation._schema.is_mutable or _draws(call):
        return None
    cheap = packet not in _SLOW
    for one in call.reads():
        if not one.is_as_read:
            return None
        if one.made.call is not None and not one.made.alive():  # neither from outside nor saved
            if one.made.cheap is None:
                return None
            cheap = cheap and one.made.cheap
    return cheap


def _draws(call: _Call) -> bool:
    """Whether an operation draws random numbers. One that could drop out does not where the probability is 0."""
    if torch.Tag.nondeterministic_seeded not in call.operation.tags:
        return False
    given = dict(zip((argument.name for argument in call.operation._schema.arguments), call.args, strict=False)) | call.kwargs
    defaults = {argument.name: argument.default_value for argument in call.operation._schema.arguments}
    return bool((defaults | given).get("dropout_p", 1.0))


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class Listed:
    """Saved tensors that share a name.

    Args:
        name: path of the module that has made them.
        size_bytes: their size.
        selective: selective recomputation makes them again.
        remaking: makes them again from the input and other saved tensors. None: not possible.
    """

    name: str
    size_bytes: int
    selective: bool
    remaking: Remaking | None


class Recorded:
    """The storages that a forward has made and that its graph keeps.

    Args:
        made: in the order in which they were made.
    """

    def __init__(self, made: Iterable[_Made]) -> None:
        by_module: dict[str, dict[bool, list[_Made]]] = {}
        for one in made:
            by_module.setdefault(one.module, {}).setdefault(bool(one.cheap), []).append(one)
        self._named: dict[str, list[_Made]] = {}
        for module, kinds in by_module.items():
            for cheap, some in kinds.items():
                # A module may make both what a selective forward keeps and what it does not.
                self._named[f"{module}:kept" if len(kinds) > 1 and not cheap else module] = some

    def listed(self) -> list[Listed]:
        """What is saved, by name."""
        return [
            Listed(
                name,
                sum(made.size_bytes for made in some),
                selective=all(made.cheap for made in some),
                remaking=None if any(made.cheap is None for made in some) else Remaking(some),
            )
            for name, some in self._named.items()
        ]

    def assign(self, parts: Mapping[str, int], *, selective: bool) -> None:
        """Give each saved tensor its part of the activations.

        Args:
            parts: by name. What has another name keeps its part.
            selective: what is cheap to make again is part 0.

        Raises:
            InputError: nothing has one of the names.
        """
        if unknown := parts.keys() - self._named.keys():
            raise InputError(
                f"the plan has a route for the saved tensors {min(unknown)!r}, but the forward saves "
                f"{', '.join(self._named) or 'none'}: measure the profile again, and plan for it"
            )
        for name, some in self._named.items():
            part = parts.get(name, 0 if selective and all(made.cheap for made in some) else None)
            if part is not None:
                for saved in (one for made in some for one in made.alive()):
                    saved.part = part

    def release(self, part: int) -> Remaking:
        """Release the tensors of a part, and return what makes them again.

        Raises:
            InputError: they cannot be made again.
        """
        released = [
            (name, made)
            for name, some in self._named.items()
            for made in some
            if (alive := made.alive()) and alive[0].part == part
        ]
        if bad := next((name for name, made in released if made.cheap is None), None):
            raise InputError(
                f"the saved tensors {bad!r} cannot be made again, because they are random or change later: let them rest "
                "somewhere, or recompute the whole unit"
            )
        remaking = Remaking([made for _, made in released])
        for saved in (one for _, made in released for one in made.alive()):
            saved.value = Geometry.of(saved.tensor)
        return remaking


class Remaking:
    """Makes released storages again.

    Args:
        released: the storages.
    """

    def __init__(self, released: Iterable[_Made]) -> None:
        self._released = set(released)
        calls: dict[_Call, None] = {}
        wanted = list(self._released)
        while wanted:
            call = wanted.pop().call
            if call is not None and call not in calls:
                calls[call] = None
                wanted += [one.made for one in call.reads() if one.made in self._released or not one.made.alive()]
        self._calls = sorted(calls, key=lambda call: call.place)
        self._last = {one.made: call for call in self._calls for one in call.reads()}

    @torch.no_grad()
    def run(self, outside: Callable[[object], Tensor]) -> None:
        """Make them again.

        Args:
            outside: gives a tensor that came from outside, by its description.
        """

        def tensor_of(one: _Argument) -> Tensor:
            if one.made.call is None:
                return outside(one.place)
            assert isinstance(one.place, Geometry)
            storage = one.made.now
            return one.place.within(one.made.alive()[0].tensor.untyped_storage() if storage is None else storage)

        held: list[_Made] = []
        for call in self._calls:
            args, kwargs = tree_map_only(_Argument, tensor_of, (call.args, call.kwargs))
            result = call.operation(*args, **kwargs)
            del args, kwargs
            for made, tensor in zip(call.results, result if isinstance(result, (tuple, list)) else (result,), strict=True):
                if made is None:
                    continue
                if made in self._released:
                    for saved in made.alive():
                        if isinstance(saved.value, Geometry):
                            saved.value = saved.value.within(tensor.untyped_storage())
                if made in self._last:
                    made.now = tensor.untyped_storage()
                    held.append(made)
            del result, tensor
            for made in [one for one in held if self._last[one] is call]:
                made.now = None
                held.remove(made)
