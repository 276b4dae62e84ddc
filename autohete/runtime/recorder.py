"""What a forward saves for backward, by the module that has made it, and how some of it is made again.

While a unit's forward runs, :class:`Recorder` notes each operation that allocates a storage. Afterwards every saved tensor is
known by the module whose forward has made it, and by the operations that make it again from the unit's input, its parameters
and the other saved tensors. So any of them can be released, or rest elsewhere, while the rest of autograd's graph stays.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
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
#: They write these arguments although their schemas do not say so.
_STATISTICS = "running_mean", "running_var"
_WRITES_STATISTICS = {
    _ATEN.native_batch_norm,
    _ATEN.cudnn_batch_norm,
    _ATEN.miopen_batch_norm,
    _ATEN.batch_norm_update_stats,
    _ATEN.batch_norm_gather_stats,
    _ATEN.batch_norm_gather_stats_with_counts,
}
#: Of other libraries it is not known what their operations do besides.
_KNOWN_LIBRARIES = "aten", "prims"
#: Name of what the unit's own forward makes, outside all modules in it.
WHOLE = "block"
#: Ends the name of what is not cheap to make again.
_KEPT = ":kept"


class Geometry(NamedTuple):
    """The place of a tensor in a storage.

    Args:
        dtype, offset, size, stride: as of the tensor.
        conjugate, negative: its elements are read so.
    """

    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    conjugate: bool = False
    negative: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> Geometry:
        """That of ``tensor`` in its storage."""
        place = tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()
        return cls(*place, tensor.is_conj(), tensor.is_neg())

    def within(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor in ``storage``."""
        here = torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, self.offset, self.size, self.stride)
        here = here.conj() if self.conjugate else here
        return torch._neg_view(here) if self.negative else here


class AsRead(NamedTuple):
    """A tensor that a forward reads besides its input and its parameters, for a recomputation.

    Args:
        tensor: its memory as it was read, even if the object gets another one.
        source: the object, which knows of changes.
        version: how often it had been changed until then.
    """

    tensor: Tensor
    source: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> AsRead:
        """``tensor`` as it is now."""
        return cls(tensor.detach(), tensor, _version(tensor))

    def check(self, unit: int) -> None:
        """Check that it still has what ``unit`` has read.

        Raises:
            InputError: it has been changed since.
        """
        if _version(self.source) != self.version:
            raise InputError(
                f"a tensor of shape {tuple(self.tensor.shape)} that the forward of block {unit} has read has been changed in "
                "place since, so a recomputation would differ: let the model change a copy, or keep the activations"
            )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # inference tensors do not count their changes


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


@dataclass(slots=True, eq=False, weakref_slot=True)
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
    """An operation of a forward.

    Args:
        place: its index among those of the forward.
        with_grad: it ran while gradients were enabled, which decides what some kernels make.
        operation: the overload.
        args, kwargs: its arguments, with tensors as :class:`_Argument`.
        results: the storages that it has allocated, by result. Only what needs them keeps them alive.
    """

    place: int
    with_grad: bool
    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Callable[[], _Made | None]] = field(default_factory=list)

    def made(self) -> list[_Made]:
        """The storages that it has allocated and that something still needs."""
        return [made for made in (one() for one in self.results) if made is not None]

    def reads(self) -> Iterator[_Argument]:
        """The tensors among its arguments."""
        yield from (one for one in tree_iter((self.args, self.kwargs)) if isinstance(one, _Argument))

    def named(self) -> dict[str, Any]:
        """Its arguments by name."""
        names = (argument.name for argument in self.operation._schema.arguments)
        return dict(zip(names, self.args, strict=False)) | self.kwargs

    def writes(self) -> Iterator[_Argument]:
        """The tensors that it changes."""
        schema, unsaid = self.operation._schema, self.operation.overloadpacket in _WRITES_STATISTICS
        if not schema.is_mutable and not unsaid:
            return
        named = self.named()
        for argument in schema.arguments:
            said = argument.alias_info is not None and argument.alias_info.is_write
            if said or (unsaid and argument.name in _STATISTICS):
                yield from (one for one in tree_iter(named.get(argument.name)) if isinstance(one, _Argument))


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
        self._thread = threading.get_ident()
        self._calls: list[_Call] = []
        #: By storage; a weak reference keeps the address of a freed storage from being used again.
        self._storages: dict[int, tuple[StorageWeakRef, _Made]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside."""
        with ExitStack() as undo:
            undo.callback(register_module_forward_pre_hook(self._enter).remove)
            undo.callback(register_module_forward_hook(self._leave, always_call=True).remove)
            with self:
                yield

    def _enter(self, module: nn.Module, args: object) -> None:
        if threading.get_ident() == self._thread:  # the hooks are for all threads of the process
            self._inside.append(self._names.get(module, self._inside[-1]))

    def _leave(self, module: nn.Module, args: object, result: object) -> None:
        if threading.get_ident() == self._thread and len(self._inside) > 1:
            self._inside.pop()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether PyTorch should wrap the mode to keep its compiler out; see :class:`autohete.runtime.ledger.Accounting`."""
        return False

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = tree_map_only(Tensor, self._argument, (args, kwargs))
        call = _Call(len(self._calls), torch.is_grad_enabled(), func, *arguments)
        result = func(*args, **kwargs)
        read = {one.made for one in call.reads()}
        for one in call.writes():
            one.made.changes += 1
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            made = None
            if isinstance(tensor, Tensor) and self._made(tensor) not in read and tensor.untyped_storage().nbytes():
                made = _Made(call, self._inside[-1], tensor.untyped_storage().nbytes())
                self._note(tensor, made)
            call.results.append(_nothing if made is None else weakref.ref(made))
        if call.made():
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
        results = [made for call in calls for made in call.made() if made not in staying]  # before storages are let go
        self._calls, self._storages, self._outside = [], {}, str
        for call in calls:
            cheap = _cheap(call)
            for made in call.made():
                if not made.changes:
                    made.cheap = cheap
        return Recorded([made for made in results if made.alive()], {*self._names.values()})


def _nothing() -> None:
    """In place of a reference to a storage."""


def _cheap(call: _Call) -> bool | None:
    """Whether an operation can run again without a product with weights; None if it cannot run again."""
    packet = call.operation.overloadpacket
    known = call.operation.namespace in _KNOWN_LIBRARIES and packet not in _UNWRITTEN
    if not known or any(call.writes()) or _draws(call):
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
    defaults = {argument.name: argument.default_value for argument in call.operation._schema.arguments}
    return bool((defaults | call.named()).get("dropout_p", 1.0))


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class Listed:
    """Saved tensors that share a name.

    Args:
        name: path of the module that has made them. With ``:kept``, those that selective recomputation does not make again,
            whether or not there are others: a name means the same in every forward.
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
        modules: paths of all modules of the unit.
    """

    def __init__(self, made: Iterable[_Made], modules: Set[str]) -> None:
        self._modules, self._named = modules, dict[str, list[_Made]]()
        for one in made:
            self._named.setdefault(one.module if one.cheap else f"{one.module}{_KEPT}", []).append(one)

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
            parts: by name. What has another name keeps its part. A forward need not save something by each name: an expert
                without tokens saves nothing.
            selective: what is cheap to make again is part 0.

        Raises:
            InputError: the unit has no such module.
        """
        if unknown := {name for name in parts if name.removesuffix(_KEPT) not in self._modules}:
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
        #: They are needed although the graph may let them go.
        self._needed = [one for made in self._last if made not in self._released for one in made.alive()[:1]]

    def run(self, outside: Callable[[object], Tensor]) -> None:
        """Make them again.

        Args:
            outside: gives a tensor that came from outside, by its description.
        """
        for made, storage in self._made_again(outside):
            for saved in made.alive():
                if isinstance(saved.value, Geometry):
                    saved.value = saved.value.within(storage)

    def repeats(self, outside: Callable[[object], Tensor]) -> bool:
        """Whether what is made again has the bits of what is still there."""
        repeats = True
        for made, storage in self._made_again(outside):
            for one in made.alive():
                repeats &= torch.equal(_bits(Geometry.of(one.tensor).within(storage)), _bits(one.tensor))
        return repeats

    def _made_again(self, outside: Callable[[object], Tensor]) -> Iterator[tuple[_Made, torch.UntypedStorage]]:
        """The released storages, with new ones of the same content."""

        def tensor_of(one: _Argument) -> Tensor:
            if one.made.call is None:
                return outside(one.place)
            assert isinstance(one.place, Geometry)
            storage = one.made.now
            return one.place.within(one.made.alive()[0].tensor.untyped_storage() if storage is None else storage)

        held: list[_Made] = []
        for call in self._calls:
            args, kwargs = tree_map_only(_Argument, tensor_of, (call.args, call.kwargs))
            with torch.set_grad_enabled(call.with_grad), torch._C._AutoDispatchBelowAutograd():
                result = call.operation(*args, **kwargs)
            del args, kwargs
            for reference, tensor in zip(call.results, result if isinstance(result, (tuple, list)) else (result,), strict=True):
                made = reference()
                if made is None:
                    continue
                if made in self._released:
                    yield made, tensor.untyped_storage()
                if made in self._last:
                    made.now = tensor.untyped_storage()
                    held.append(made)
            del result, tensor
            for made in [one for one in held if self._last[one] is call]:
                made.now = None
                held.remove(made)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)
