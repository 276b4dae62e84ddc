"""State that a forward pass reads and changes besides parameters: random states, buffers, attributes.

Recomputation runs a block a second time; profiling and probing run the whole model before training begins. None of them may
have side effects: the random states and everything they change are restored.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autohete.runtime.device import device_for

#: Entries of a module's ``vars`` besides its own attributes; the last two are replaced while blocks are intercepted.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"} | {"forward", "_call_impl"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: Depth to which nested containers are searched.
_DEPTH = 6


class RandomState:
    """States of all global random generators: PyTorch's on the CPU and on ``device``, Python's and NumPy's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device_for(device)
        self._torch = torch.get_rng_state()
        self._own = self._device.random_state()
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()

    def restore(self) -> None:
        """Restore the generators to this state."""
        torch.set_rng_state(self._torch)
        if self._own is not None:
            self._device.set_random_state(self._own)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def is_current(self) -> bool:
        """Whether no random number has been drawn since."""
        return (
            torch.equal(self._torch, torch.get_rng_state())
            and _is_same(self._own, self._device.random_state())
            and self._python == random.getstate()
            and _is_same_numpy(self._numpy, np.random.get_state())
        )


def _is_same(then: Tensor | None, now: Tensor | None) -> bool:
    """Whether two states of a device's generator are equal, or there are none."""
    return then is None or now is None or torch.equal(then, now)


def _is_same_numpy(then: Any, now: Any) -> bool:
    """Whether two states, each (name, keys, position, has_gauss, cached gaussian), are equal."""
    return bool(then[2:] == now[2:] and then[0] == now[0] and np.array_equal(then[1], now[1]))


@contextmanager
def unchanged_random_state(device: torch.device) -> Iterator[None]:
    """Restore all global random generators on exit."""
    state = RandomState(device)
    try:
        yield
    finally:
        state.restore()


@dataclass(frozen=True, slots=True)
class ModulePlace:
    """Where a module keeps a buffer or an attribute.

    Args:
        name: its dotted name, as in ``named_buffers``.
        holder: the dictionary that contains it.
        key: its key there.
    """

    name: str
    holder: dict[str, Any]
    key: str

    @property
    def value(self) -> Any:
        """The current value."""
        return self.holder[self.key]


@dataclass(frozen=True, slots=True)
class Effects:
    """Side effects of a forward pass.

    Args:
        changing: names of the buffers that it changes.
        keeping: names of the attributes in which it keeps computed tensors.
        kept_bytes: size of these tensors.
        python_in_backward: whether backward calls Python code, for example to recompute a part of a block.
        others: units and places, in their results, of tensors other than the hidden states that need gradients.
        handed: of these, and of hidden states (place 0), those that others than the next block take.
        beside: units whose block takes tensors that have gradients besides hidden states, and how many.
        between: units after which the model's own code computes something before the next block.
        keeps_parameters: whether hooks of its own, for what autograd saves, keep parameters by reference until backward.
        needs_grad_mode: whether a block computes other bits where gradients are disabled, as attention with a trained bias.
        loss_keeps: whether the loss function keeps logits, or what it computes from them, until it is called again.
    """

    changing: frozenset[str] = frozenset()
    keeping: frozenset[str] = frozenset()
    kept_bytes: int = 0
    python_in_backward: bool = False
    others: frozenset[tuple[int, int]] = frozenset()
    handed: frozenset[tuple[int, int]] = frozenset()
    beside: frozenset[tuple[int, int]] = frozenset()
    between: frozenset[int] = frozenset()
    keeps_parameters: bool = False
    needs_grad_mode: bool = False
    loss_keeps: bool = False

    def __or__(self, other: Effects) -> Effects:
        """Combine the effects of two parts of a model."""
        return Effects(
            self.changing | other.changing,
            self.keeping | other.keeping,
            self.kept_bytes + other.kept_bytes,
            self.python_in_backward or other.python_in_backward,
            self.others | other.others,
            self.handed | other.handed,
            self.beside | other.beside,
            self.between | other.between,
            self.keeps_parameters or other.keeps_parameters,
            self.needs_grad_mode or other.needs_grad_mode,
            self.loss_keeps or other.loss_keeps,
        )

    def of_units(self, units: Sequence[int]) -> Effects:
        """The effects of a model that has only some of the units, in order."""
        new = {unit: place for place, unit in enumerate(units)}
        return replace(
            self,
            others=frozenset((new[unit], place) for unit, place in self.others if unit in new),
            handed=frozenset((new[unit], place) for unit, place in self.handed if unit in new),
            between=frozenset(new[unit] for unit in self.between if unit in new),
        )


NO_EFFECTS = Effects()


def buffers_of(modules: Iterable[tuple[str, nn.Module]]) -> list[ModulePlace]:
    """Return the places of all buffers of the named modules themselves, not of their children."""
    return [
        ModulePlace(f"{name}.{key}".lstrip("."), module._buffers, key)
        for name, module in modules
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]


def attributes_of(modules: Iterable[tuple[str, nn.Module]]) -> list[ModulePlace]:
    """Return the places of all attributes of the named modules themselves."""
    return [
        ModulePlace(f"{name}.{key}".lstrip("."), vars(module), key)
        for name, module in modules
        for key in _own_attributes(module)
    ]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in ``value``, which may be a tensor or a container of tensors."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, deque, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of the storages of ``tensors``, without those that have no memory."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors} - {0}


class Snapshot:
    """A copy of the buffers and attributes of modules.

    Tensors, arrays, containers and generators are copied; other objects are kept by reference.

    Args:
        modules: modules with their names; children are not included.
        wanted: names of the buffers to copy; None: all.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], wanted: frozenset[str] | None = None) -> None:
        self._modules = list(modules)
        places = [place for place in buffers_of(self._modules) if wanted is None or place.name in wanted]
        self._buffers = [(place, _Copy(place.value), _writes(place.value)) for place in places]
        self._attributes = [
            (name, module, {key: _Copy(vars(module)[key]) for key in _own_attributes(module)}) for name, module in self._modules
        ]

    def changed_buffers(self) -> frozenset[str]:
        """Return the names of the buffers that have been written to, or that are different tensors now."""
        return frozenset(
            place.name
            for place, then, writes in self._buffers
            if place.value is not then.value or _writes(place.value) != writes or not then.is_like(place.value)
        )

    def changed_attributes(self) -> list[str]:
        """Return the names of the attributes whose values have changed."""
        changed = []
        for name, module, then in self._attributes:
            now = vars(module)
            for key in dict.fromkeys([*then, *_own_attributes(module)]):
                if key not in then or key not in now or not then[key].is_like(now[key]):
                    changed.append(f"{name}.{key}".lstrip("."))
        return changed

    def tensors_kept(self) -> dict[str, list[Tensor]]:
        """Return the tensors in attributes that have changed, by the attribute's name."""
        changed = set(self.changed_attributes())
        found = {place.name: list(tensors_in(place.value)) for place in attributes_of(self._modules) if place.name in changed}
        return {name: tensors for name, tensors in found.items() if tensors}

    def restore_buffers(self) -> None:
        """Restore the buffers and their values."""
        for place, then, _ in self._buffers:
            place.holder[place.key] = then.restored()

    def forget_buffers(self) -> None:
        """Drop the copies of the buffers; :meth:`restore` then leaves buffers unchanged."""
        self._buffers = []

    def restore(self) -> None:
        """Restore the buffers and attributes."""
        self.restore_buffers()
        for _, module, then in self._attributes:
            for key in set(_own_attributes(module)).difference(then):
                del vars(module)[key]
            for key, copy in then.items():
                vars(module)[key] = copy.restored()


def _writes(tensor: Tensor) -> int:
    """PyTorch's count of writes to a tensor in place, which may leave its values as they are."""
    return 0 if tensor.is_inference() else tensor._version


def _own_attributes(module: nn.Module) -> list[str]:
    return [key for key in vars(module) if key not in _OF_EVERY_MODULE]


class _Copy:
    """A value with a copy of its content; without a copy for objects of unknown types."""

    def __init__(self, value: Any, depth: int = 0) -> None:
        self.value, self._content = value, None
        content: Any = None
        if depth == _DEPTH:
            pass
        elif isinstance(value, Tensor):
            content = value.detach().clone() if _is_plain(value) else None
        elif isinstance(value, dict):
            content = {key: _Copy(item, depth + 1) for key, item in value.items()}
        elif isinstance(value, (list, tuple, deque)):
            content = [_Copy(item, depth + 1) for item in value]
        elif isinstance(value, (set, np.ndarray)):
            content = value.copy()
        elif isinstance(value, torch.Generator):
            content = value.get_state()
        elif isinstance(value, random.Random):
            content = value.getstate()
        elif isinstance(value, np.random.Generator):
            content = deepcopy(value.bit_generator.state)
        elif isinstance(value, np.random.RandomState):
            content = value.get_state(legacy=True)
        self._content = content

    def is_like(self, now: Any) -> bool:
        """Whether ``now`` has the same type and content, as far as known."""
        then, content = self.value, self._content
        if type(then) is not type(now):
            return False
        if isinstance(then, _PLAIN):
            return bool(then == now or (then != then and now != now))
        if content is None:
            return True
        if isinstance(now, Tensor):
            return _equal(content, now)
        if isinstance(now, dict):
            return content.keys() == now.keys() and all(content[key].is_like(item) for key, item in now.items())
        if isinstance(now, (list, tuple, deque)):
            return len(content) == len(now) and all(copy.is_like(item) for copy, item in zip(content, now, strict=True))
        if isinstance(now, np.ndarray):
            return np.array_equal(content, now, equal_nan=now.dtype.kind in "fc")
        if isinstance(now, np.random.RandomState):
            return _is_same_numpy(content, now.get_state(legacy=True))
        if isinstance(now, torch.Generator):
            return torch.equal(content, now.get_state())
        return bool(content == (_Copy(now)._content))

    def restored(self) -> Any:
        """Return the value with its content restored."""
        value, content = self.value, self._content
        if content is None or self.is_like(value):
            return value
        if isinstance(value, Tensor):
            # A tensor with a graph was computed by a forward pass, and the next pass computes it anew.
            if not value.requires_grad and value.shape == content.shape:
                value.data.copy_(content)
            elif not value.requires_grad:
                value.data = content
        elif isinstance(value, dict):
            value.clear()
            value.update({key: copy.restored() for key, copy in content.items()})
        elif isinstance(value, (list, deque)):
            value.clear()
            value.extend(copy.restored() for copy in content)
        elif isinstance(value, tuple):
            for copy in content:
                copy.restored()
        elif isinstance(value, set):
            value.clear()
            value.update(content)
        elif isinstance(value, np.ndarray):
            value[...] = content
        elif isinstance(value, torch.Generator):
            value.set_state(content)
        elif isinstance(value, random.Random):
            value.setstate(content)
        elif isinstance(value, np.random.Generator):
            value.bit_generator.state = content
        elif isinstance(value, np.random.RandomState):
            value.set_state(content)
        return value


def _is_plain(tensor: Tensor) -> bool:
    own_data = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__  # not a wrapper of other tensors
    return own_data and tensor.layout is torch.strided and not tensor.is_quantized


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are bit-identical; NaN equals NaN."""
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return torch.equal(*(tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in (a, b)))
