"""Guards the parameters of a model that is being trained, and gives the caller access to them between steps.

During training, a parameter's memory is a buffer that lanes fill, update and release in the background. The caller shares the
parameter: it saves, copies, averages or changes the weights, and calls the model. For that time, each parameter therefore has
a special class, and PyTorch passes every use of it from Python to ``__torch_function__``. A use waits until all updates have
ended, gets the current values in separate host memory, and continues as with any parameter. Before the next step, the
caller's changes are written to the model states. Values that the caller keeps do not change. Frozen parameters and buffers
have such classes, too: they stay where they are, but backward may still need their values.

Uses by the training itself, in the lanes and in an evaluation, run under :meth:`Guard.inside`, where PyTorch does not call
``__torch_function__``. It does not call it either in ``torch.tensor``, ``torch.as_tensor``, ``torch.asarray``,
``torch.Tensor`` and ``as_subclass``: give these ``parameter.detach()``.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from autohete.errors import InputError
from autohete.runtime.forward_pass import HOOKS
from autohete.runtime.shared_memory import check_apart
from autohete.runtime.states import States


def _getter(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = vars(torch._C.TensorBase)[name].__get__
    return found


def _setter(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = vars(torch._C.TensorBase)[name].__set__
    return found


_DEVICE, _DATA, _GRADIENT = map(_getter, ("device", "data", "grad"))
_SET_DATA, _SET_GRADIENT, _SET_REQUIRES_GRAD = map(_setter, ("data", "grad", "requires_grad"))
#: Functions that need neither the values nor a wait.
_METADATA = frozenset(
    [
        *map(_getter, ("shape", "dtype", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn")),
        *map(_getter, ("retains_grad", "output_nr", "is_sparse", "is_quantized", "is_nested", "is_meta", "name", "_base")),
        *map(_getter, ("_version", "_backward_hooks", "_post_accumulate_grad_hooks")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__, Tensor.ndimension),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.is_inference),
        *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_inference),
    ]
)
#: Functions with nothing to do unless they are refused: there is no gradient.
_NOTHING_TO_DO = frozenset([_GRADIENT, _SET_GRADIENT])
#: Functions that need no values, but a wait: backward may still ask which gradients it has to compute.
_FLAGS = frozenset([_SET_REQUIRES_GRAD, Tensor.requires_grad_])
#: Callers that only read a gradient to clear it, or to move it with its parameter: there is none.
_HARMLESS = frozenset(
    inspect.unwrap(function).__code__ for function in (nn.Module.zero_grad, torch.optim.Optimizer.zero_grad, nn.Module._apply)
)
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
_UPDATES_HERE = (
    "the Trainer owns the gradients and applies the updates: give it the optimizer and call Trainer.step; between steps there "
    "is nothing to clip, accumulate or apply"
)


def check_trainable(model: nn.Module) -> None:
    """Check that all trained parameters of a model can be guarded.

    Raises:
        InputError: a parameter has a special type, hooks on its gradient, or memory that another tensor shares.
    """
    check_apart(
        [*model.named_parameters(), *model.named_buffers()],
        {id(parameter) for parameter in model.parameters() if parameter.requires_grad},
    )
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if type(parameter) is not nn.Parameter:
            raise InputError(
                f"{name} is a {type(parameter).__name__}: only plain nn.Parameters can be trained; convert it, or freeze it "
                "with requires_grad_(False)"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise InputError(f"{name} has hooks on its gradient: remove them; {_UPDATES_HERE}")


class Guarded:
    """A tensor of a model that is being trained. Each guard creates its own subclasses, one for each type of tensor, which
    refer to it. Copies are of the ordinary type.
    """

    __slots__ = ()
    guard: ClassVar[Guard]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return cls.guard.use(func, types, args, kwargs or {})


@dataclass(frozen=True, slots=True)
class _GuardedTensor:
    """A parameter or buffer, and its place in the states: block, and number in the block; None if it stays on the device."""

    tensor: Tensor
    name: str
    place: tuple[int, int] | None
    trained: bool
    shape: torch.Size
    dtype: torch.dtype


@dataclass(slots=True)
class _Snapshot:
    """Values that the caller may have kept: whether they are still alive, and a counter of writes to them."""

    name: str
    storage: StorageWeakRef
    counter: Tensor
    writes: int

    @property
    def expired(self) -> bool:
        return bool(self.storage.expired())  # type: ignore[no-untyped-call]


class _Inside(threading.local):
    """Whether the calling thread works for the training, and whether it computes the loss."""

    def __init__(self) -> None:
        self.training = self.loss = False


class Guard:
    """Guards the parameters of ``model`` until :meth:`release`.

    Args:
        model: all of its parameters and buffers are guarded.
        states: the model states, which have taken over the trained parameters.

    Attributes:
        wait: function that returns once all updates have ended; set by the owner of the lanes.
    """

    def __init__(self, model: nn.Module, states: States) -> None:
        self.wait: Callable[[], None] = _nothing
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._inside = _Inside()
        places = states.places()
        trained = {id(parameter) for block in states.units for parameter in block.parameters}
        named = [*model.named_parameters(), *model.named_buffers()]
        self._structure = _Structure(model)
        self._guarded = {
            id(tensor): _GuardedTensor(tensor, name, places.get(id(tensor)), id(tensor) in trained, tensor.shape, tensor.dtype)
            for name, tensor in named
            if type(tensor) in (nn.Parameter, Tensor) or id(tensor) in places
        }
        #: What requires gradients; the caller may change that between steps if it changes it back.
        self._requiring = {id(tensor) for _, tensor in named if tensor.requires_grad}
        self._lent = _Lent(states, self._guarded)
        #: The types of the guarded tensors, and the guarded ones of each.
        self._types: dict[type[Tensor], type[Tensor]] = {
            kind: type(kind.__name__, (Guarded, kind), {"guard": self, "__new__": partial(_ordinary, kind)})
            for kind in {type(one.tensor) for one in self._guarded.values()}
        }
        for one in self._guarded.values():
            one.tensor.__class__ = self._types[type(one.tensor)]

    def release(self) -> None:
        """Apply the caller's changes, and make the parameters ordinary ones again.

        Raises:
            InputError: see :meth:`resumed`.
        """
        with self._lock:
            try:
                self._lent.write_back()
                self._lent.check_writes()
            finally:
                self._lent.forget()
                ordinary = {guarded: kind for kind, guarded in self._types.items()}
                for one in self._guarded.values():
                    one.tensor.__class__ = ordinary.get(type(one.tensor), type(one.tensor))
                self._guarded, self._types = {}, {}
                self.wait = _nothing  # breaks a possible reference cycle with the training

    def follow(self, states: States) -> None:
        """Give the caller the values of other states of the same parameters from now on."""
        self._lent.states = states

    @contextmanager
    def inside(self, *, loss: bool = False) -> Iterator[None]:
        """Mark the calling thread's uses of parameters as the training's own. A loss must not use parameters."""
        inside = self._inside
        before = inside.training, inside.loss
        inside.training, inside.loss = True, loss
        try:
            if loss or self._structure.has_other_types:
                yield
            else:
                with torch._C.DisableTorchFunctionSubclass():
                    yield
        finally:
            inside.training, inside.loss = before

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Apply the caller's changes; inside, only the training uses the parameters.

        Raises:
            InputError: the caller has made a change that is not supported, or has written to values that it kept. No change
                has been applied.
        """
        self._check_process()  # before the lock, which another thread may have held during the fork
        with self._lock:
            self._structure.check()
            self._check_flags()
            self._lent.check_writes()
            self._lent.write_back()
            self._lent.forget_expired()
            yield

    def _check_flags(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for one in self._guarded.values():
                if one.tensor.requires_grad != (id(one.tensor) in self._requiring):
                    raise InputError(
                        f"{one.name}.requires_grad has become {one.tensor.requires_grad}, and the plan depends on what is "
                        "trained: change it back before the next step, or leave the Trainer and create a new one"
                    )

    def use(self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a use of parameters by the caller, or by the training.

        Raises:
            InputError: the use is not allowed.
        """
        inside = self._inside
        if inside.training:
            if inside.loss and func not in _METADATA:
                self._refuse_in_loss(args, kwargs)
            return _call(func, types, args, kwargs)
        if func in _METADATA:
            return _call(func, types, args, kwargs)
        self._check_process()
        if func == _DEVICE:  # the caller gets the values on the CPU
            return torch.device("cpu") if self._is_held(args[0]) else _call(func, types, args, kwargs)
        with ExitStack() as held:
            for guard in sorted({t.guard for t in types if issubclass(t, Guarded)}, key=id):
                held.enter_context(guard._lock)
            found = [tensor for tensor in _tensors((args, kwargs)) if isinstance(tensor, Guarded)]
            for tensor in found:
                tensor.guard._check_use(tensor, func, args, kwargs)
            if func in _NOTHING_TO_DO:
                return None
            if func in _FLAGS:
                wanted = bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
                if wanted != args[0].requires_grad:
                    self.wait()
                return _call(func, types, args, kwargs)
            for tensor in found:
                tensor.guard._expose(tensor)
            if func in (_DATA, Tensor.detach) and id(args[0]) in self._lent.values:
                return self._lent.values[id(args[0])].detach()  # with its own write counter, so that steps can be told apart
            if func in (Tensor.__deepcopy__, Tensor.__reduce_ex__):  # a copy has ordinary tensors
                with torch._C.DisableTorchFunctionSubclass():
                    copied = func(args[0].detach(), *args[1:])
                if func == Tensor.__deepcopy__:
                    args[1][id(args[0])] = copied
                return copied
            result = _call(func, types, args, kwargs)
            if func == _SET_DATA:
                self._lent.replace(args[0])
            return result

    def _refuse_in_loss(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for tensor in _tensors((args, kwargs)):
            if isinstance(tensor, Guarded) and self._is_held(tensor):
                raise InputError(
                    f"the loss uses the parameter {self._guarded[id(tensor)].name}, which gets no gradient from it: compute a "
                    "weight penalty with the optimizer's weight_decay, and anything else that needs parameters in the model's "
                    "forward"
                )

    def _is_held(self, tensor: object) -> bool:
        """Whether the states have the tensor."""
        one = self._guarded.get(id(tensor))
        return one is not None and one.place is not None

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise InputError(
                "this process is a fork of the one that trains, without its lanes: save what another process needs to a "
                "file, or start that process before the Trainer"
            )

    def _check_use(self, tensor: object, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found = self._guarded.get(id(tensor))
        if found is None:
            return
        trained = found.trained
        if func == _GRADIENT:
            if trained and sys._getframe(3).f_code not in _HARMLESS:
                raise InputError(f"{found.name}.grad is not available while a Trainer trains it: {_UPDATES_HERE}")
        elif func == _SET_GRADIENT:
            if args[1] is not None:
                raise InputError(f"{found.name}.grad cannot be set while a Trainer trains it: {_UPDATES_HERE}")
        elif func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            raise InputError(f"{found.name} cannot have a hook on its gradient while a Trainer trains it: {_UPDATES_HERE}")
        elif func in (Tensor.backward, Tensor.retain_grad):
            raise InputError(f"{found.name} cannot get a gradient from elsewhere while a Trainer trains it: {_UPDATES_HERE}")
        elif func == _SET_DATA and found.place is not None and tensor is args[0]:
            _check_like(found, args[1])

    def _expose(self, tensor: object) -> None:
        """Wait for tasks that still read the tensor; give the caller a parameter's current values."""
        found = self._guarded.get(id(tensor))
        if found is None or id(tensor) in self._lent.values:
            return
        self.wait()
        if found.place is not None:
            self._lent.give(found)


class _Lent:
    """Values that the caller has between steps, and what it does with them.

    Args:
        states: the model states.
        guarded: all guarded tensors, by id.
    """

    def __init__(self, states: States, guarded: Mapping[int, _GuardedTensor]) -> None:
        self.states, self._guarded = states, guarded
        #: Values given to the caller, by the parameter's id.
        self.values: dict[int, Tensor] = {}
        #: PyTorch's counts of in-place writes to parameters that the states have.
        self._writes = {key: one.tensor._version for key, one in guarded.items() if one.place is not None}
        self._snapshots: list[_Snapshot] = []

    def give(self, one: _GuardedTensor) -> None:
        """Give the caller the current values of a parameter, in separate host memory."""
        assert one.place is not None
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            values = self.states.values(*one.place)
            one.tensor.data = values
        self.values[id(one.tensor)] = values

    def replace(self, parameter: Tensor) -> None:
        """Note that the caller has given ``parameter`` other memory."""
        if id(parameter) in self.values:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                self.values[id(parameter)] = parameter.data

    def check_writes(self) -> None:
        """Reject writes that would be lost; each is reported once."""
        for snapshot in self._snapshots:
            if snapshot.counter._version != snapshot.writes:
                snapshot.writes = snapshot.counter._version
                raise InputError(
                    f"values of {snapshot.name} from before the last step have been written to: they are a copy that the "
                    "model does not see; write to the parameter itself, or to a clone if the model should not change"
                )
        with torch._C.DisableTorchFunctionSubclass():
            for key, writes in self._writes.items():
                one = self._guarded[key]
                if key not in self.values and one.tensor._version != writes:
                    self._writes[key] = one.tensor._version
                    raise InputError(
                        f"{one.name} has been written to behind the Trainer, in the model's forward, by set_ or through a view "
                        "from before the last step: write to the parameter itself between steps"
                    )

    def write_back(self) -> None:
        """Write the values given to the caller, which may have changed, to the states."""
        if not self.values:
            return
        exposed = [(self._guarded[key], values) for key, values in self.values.items()]
        with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            now = [one.tensor.detach() for one, _ in exposed]
            for (one, _), changed in zip(exposed, now, strict=True):
                _check_like(one, changed)
            check_apart([(one.name, changed) for (one, _), changed in zip(exposed, now, strict=True)], {*map(id, now)})
            for (one, _), changed in zip(exposed, now, strict=True):
                assert one.place is not None
                self.states.assign(*one.place, changed)
                if self.states.ranks is not None and one.tensor._version != self._writes[id(one.tensor)]:
                    self.states.ranks.note_change(*one.place, changed)
            del now
            # Graphs that the caller still has were computed from older values: this makes PyTorch reject their backward.
            increment_version([one.tensor for one, _ in exposed])
            self._writes |= {id(one.tensor): one.tensor._version for one, _ in exposed}
            for block in {one.place[0] for one, _ in exposed if one.place is not None}:
                self.states.units[block].bind()
            self.values = {}
            while exposed:
                one, values = exposed.pop()
                storage, counter = StorageWeakRef(values.untyped_storage()), values.detach()  # type: ignore[no-untyped-call]
                counter.data = torch.empty(0, dtype=values.dtype, device="cpu")
                del values
                snapshot = _Snapshot(one.name, storage, counter, counter._version)
                if not snapshot.expired:
                    self._snapshots.append(snapshot)

    def forget_expired(self) -> None:
        """Forget the values that the caller has dropped."""
        self._snapshots = [snapshot for snapshot in self._snapshots if not snapshot.expired]

    def forget(self) -> None:
        """Forget everything, the guarded tensors, too."""
        self._guarded, self.values, self._writes, self._snapshots = {}, {}, {}, []


class _Structure:
    """The modules, parameters and hooks of a model, to detect changes."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        #: Whether some parameters or buffers have other tensor types, which need their own ``__torch_function__``.
        self.has_other_types = any(type(tensor) not in (nn.Parameter, Tensor, nn.Buffer) for tensor in tensors)
        self._frozen = [
            (name, p) for name, p in model.named_parameters() if not p.requires_grad and type(p) is not nn.Parameter
        ]
        modules = list(model.named_modules())
        self._parts = [
            (f"{name or 'the model'}", part) for name, module in modules for part in (module._parameters, module._modules)
        ]
        self._hooks: list[tuple[str, Mapping[Any, Any]]] = [
            (f"{name or 'the model'}", getattr(module, hooks)) for name, module in modules for hooks in HOOKS
        ]
        self._hooks += [("all modules", getattr(nn.modules.module, hooks)) for hooks in _GLOBAL_HOOKS]
        # Keep the objects alive, so that their ids are not reused.
        self._kept = [tuple(part.values()) for _, part in (*self._parts, *self._hooks)]
        self._ids = [tuple(map(id, part.values())) for _, part in self._parts]
        self._hook_ids = [frozenset(map(id, hooks.values())) for _, hooks in self._hooks]

    def check(self) -> None:
        """Check that nothing has changed since.

        Raises:
            InputError: names the change and its place.
        """
        for (where, part), ids in zip(self._parts, self._ids, strict=True):
            if tuple(map(id, part.values())) != ids:
                raise InputError(
                    f"parameters or modules of {where} have been added, removed or replaced since the Trainer took over the "
                    "model: change values in place (load_state_dict without assign=True), or create a new Trainer"
                )
        for (where, hooks), known in zip(self._hooks, self._hook_ids, strict=True):
            if hooks and not known.issuperset(map(id, hooks.values())):
                raise InputError(
                    f"a hook has been registered on {where} since the Trainer took over the model, and is not in the plan: "
                    "remove it, or register it before the first step"
                )
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise InputError(f"{name} was unfrozen after the Trainer took over the model: create a new Trainer to train it")


def _ordinary(kind: type[Tensor], _guarded: type[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Make a tensor of an ordinary type instead of a guarded one."""
    return kind(*args, **kwargs)


def _nothing() -> None:
    """Wait for nothing."""


def _check_like(one: _GuardedTensor, given: object) -> None:
    """Check that ``given`` can replace the values of a parameter."""
    if not isinstance(given, Tensor):
        raise InputError(f"{one.name}.data cannot become {type(given).__name__}: give a tensor")
    with torch._C.DisableTorchFunctionSubclass():
        there = "cpu" if isinstance(given, Guarded) else given.device.type
        if (given.shape, given.dtype, given.layout, there) != (one.shape, one.dtype, torch.strided, "cpu"):
            raise InputError(
                f"{one.name} is {tuple(one.shape)} of {one.dtype} and cannot become {tuple(given.shape)} of {given.dtype} "
                f"on {there}: while a Trainer trains the model, only values can change, in host memory; leave the Trainer "
                "before model.to(...)"
            )


def _call(func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    others = tuple(t for t in types if not issubclass(t, Guarded))
    for other in others:  # other types decide as if there were no guard
        if other not in (Tensor, nn.Parameter):
            result = other.__torch_function__(func, others, args, dict(kwargs))  # type: ignore[attr-defined]
            if result is not NotImplemented:
                return result
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
