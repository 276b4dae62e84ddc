"""A device that computes on the CPU as late as a GPU might: it shows without a GPU that no wait is missing.

Its streams are threads. An operation that the thread of a lane calls is not computed by that thread: the call returns a tensor
at once, whose values come when the lane's stream gets there, after whatever delays a test puts into it. Nothing orders two
streams but events. So an operation that another stream should have waited for has not happened yet when its result is used.

Memory is that of PyTorch's allocator on a GPU. What a stream allocates comes from the stream's own blocks, and goes back to
them as soon as Python has no reference to it, although the device may still use it. It is then overwritten by NaN, as the next
operation of that stream might. So memory that is released too early shows, too.

Host tensors are those of :meth:`AsyncDevice.on_host`. A read by the host, such as ``.item()``, waits for the stream. Random
numbers are drawn when an operation is called, as a GPU's generator is advanced.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from autohete.runtime.device import EmulatedDevice, Event

#: Operations that give a tensor other memory, at once.
_CHANGES_MEMORY = ("aten::set_", "aten::resize_")
#: Bytes of which every floating-point number is NaN.
_POISON = 255
#: At most so many are overwritten: some policies set hundreds of MiB aside.
_POISONED_BYTES = 2**22
_ALIGNED = 64
#: Seconds after which a stream that waits gives up: in a test, a wait for an event that never comes.
_PATIENCE_SECONDS = 60.0


class Observer(Protocol):
    """Sees what is issued, in that order."""

    def launch(self, stream: str, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """An operation has been issued that reads and writes the memory of these tensors."""

    def record(self, stream: str, event: Event) -> None:
        """An event has been recorded."""

    def wait(self, stream: str, event: Event) -> None:
        """A stream waits for an event."""

    def synchronize(self, event: Event) -> None:
        """The host has waited for an event."""


class _Block:
    """Memory of the device. Tensors of the program and of the device have different storages in it.

    Args:
        size: in bytes, more than 0.
        stream: that has allocated it; None: the host.
    """

    def __init__(self, size: int, stream: _Stream | None) -> None:
        memory = np.empty(size + _ALIGNED, np.uint8)
        begin = -memory.ctypes.data % _ALIGNED
        self.memory, self.size, self.stream = memory[begin : begin + size], size, stream
        self.poison()
        #: What the device computes with.
        self.whole = torch.from_numpy(self.memory)

    def poison(self) -> None:
        """Overwrite it by NaN."""
        self.memory[:_POISONED_BYTES] = _POISON

    def lent(self, released: Callable[[], None]) -> torch.UntypedStorage:
        """Return a new storage; call ``released`` when nothing refers to it any more."""
        lent = self.memory.view()
        weakref.finalize(lent, released).atexit = False
        return torch.from_numpy(lent).untyped_storage()


class AsyncEvent:
    """A place in a stream.

    Args:
        observer: hears when the host has waited for it.
    """

    def __init__(self, observer: Observer | None) -> None:
        self._observer, self.reached = observer, threading.Event()
        self.at_ns = 0
        self.error: BaseException | None = None

    def synchronize(self) -> None:
        """Wait until the stream has done all work before it.

        Raises:
            RuntimeError: an operation before it has failed, as a GPU reports it: later.
        """
        self.wait()
        if self._observer is not None:
            self._observer.synchronize(self)

    def wait(self) -> None:
        """The same for another stream."""
        if not self.reached.wait(_PATIENCE_SECONDS):
            raise RuntimeError(f"a stream has not reached an event for {_PATIENCE_SECONDS:g} s")
        if self.error is not None:
            raise RuntimeError(f"an operation on the device has failed: {self.error}") from self.error


class _Stream:
    """A thread that computes what it is given, one after another."""

    def __init__(self, name: str) -> None:
        self.name, self.error = name, None  # type: str, BaseException | None
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._torch_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name=f"{name}-stream", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def record(self, observer: Observer | None = None) -> AsyncEvent:
        event = AsyncEvent(observer)

        def reach() -> None:
            event.at_ns, event.error = time.perf_counter_ns(), self.error
            event.reached.set()

        self._work.put(reach)
        return event

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._torch_threads)
        with torch.no_grad():
            while (work := self._work.get()) is not None:
                try:
                    work()
                except BaseException as error:  # as on a GPU, whoever waits hears of it
                    self.error = self.error or error
                del work


class AsyncDevice(EmulatedDevice):
    """The CPU with the streams, the events and the allocator of a GPU.

    Args:
        observer: sees what is issued.
    """

    runs_ahead = True

    def __init__(self, observer: Observer | None = None) -> None:
        super().__init__()
        self._observer = observer
        self._local = threading.local()
        self._streams: list[_Stream] = []
        self._lock = threading.Lock()
        #: Blocks that tensors use, by address, and those that none uses, by stream and size. None is ever returned.
        self.blocks: dict[int, _Block] = {}
        self._free: defaultdict[tuple[_Stream | None, int], list[_Block]] = defaultdict(list)
        self._geometries: dict[object, list[_Geometry | None] | None] = {}

    # --- streams

    @contextmanager
    def stream(self) -> Iterator[None]:
        self._local.stream = stream = _Stream(threading.current_thread().name)
        with self._lock:
            self._streams.append(stream)
        try:
            with _Deferring(self):
                yield
        finally:
            self._local.stream = None
            with self._lock:
                self._streams.remove(stream)
            stream.close()

    @property
    def current(self) -> _Stream | None:
        """The calling thread's stream."""
        return getattr(self._local, "stream", None)

    def record(self) -> Event:
        stream = self.current
        if stream is None:
            return super().record()
        if self._observer is None:
            return stream.record()
        event = stream.record(self._observer)
        self._observer.record(stream.name, event)
        return event

    def wait(self, event: Event) -> None:
        stream = self.current
        if stream is None or not isinstance(event, AsyncEvent):
            event.synchronize()
            return
        stream.put(event.wait)
        if self._observer is not None:
            self._observer.wait(stream.name, event)

    def delay(self, seconds: float) -> None:
        """Let the calling thread's stream pause where it is."""
        if self.current is not None:
            self.current.put(partial(time.sleep, seconds))

    def finish(self) -> None:
        if self.current is not None:
            self.record().synchronize()

    def settle(self) -> None:
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.record().synchronize()

    def ended_ns(self, event: Event) -> int:
        return event.at_ns if isinstance(event, AsyncEvent) else super().ended_ns(event)

    # --- tensors

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        return self.allocated(_Geometry((elements,), (1,), 0, dtype, elements * dtype.itemsize))

    def on_host(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.full(elements * dtype.itemsize, _POISON, np.uint8)).view(dtype)  # no operation of the device

    def allocated(self, like: _Geometry) -> Tensor:
        """Return a tensor in memory of the calling thread's stream."""
        if not like.size_bytes:
            return torch.empty(like.shape, dtype=like.dtype, device="cpu")
        key = self.current, like.size_bytes
        with self._lock:
            free = self._free[key]
            block = free.pop() if free else _Block(like.size_bytes, self.current)
            self.blocks[block.whole.data_ptr()] = block
        storage = block.lent(partial(self._release, key, block))
        return torch.empty(0, dtype=like.dtype).set_(storage, like.offset, like.shape, like.strides)

    def _release(self, key: tuple[_Stream | None, int], block: _Block) -> None:
        """Take memory back to which the program no longer refers, whatever the device may still do with it."""
        if block.stream is None:
            block.poison()
        else:
            block.stream.put(block.poison)
            if self._observer is not None:
                self._observer.launch(block.stream.name, "release", [], [block.whole])
        self._free[key].append(block)  # without the lock, which this thread may have: Python collects at any time

    def for_device(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` for the device to compute with, which does not keep its memory for the program."""
        block = self.blocks.get(tensor.untyped_storage().data_ptr())
        if block is None or not tensor.numel():
            return tensor.detach()
        place = torch.empty(0, dtype=tensor.dtype)
        return place.set_(block.whole.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    # --- operations

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Issue an operation, and return its result, whose values come later."""
        stream, schema = self.current, func._schema
        assert stream is not None
        written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
        is_view = any(returned.alias_info is not None for returned in schema.returns) and not any(written)
        if func.is_view or is_view or schema.name in _CHANGES_MEMORY:
            return func(*args, **kwargs)
        named = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        tensors = _tensors(named.values())
        if not all("Tensor" in str(returned.type) for returned in schema.returns):  # the host reads
            if any(tensor.untyped_storage().data_ptr() in self.blocks for tensor in tensors):
                stream.record().synchronize()
            return func(*args, **kwargs)
        changed = _tensors(
            named[argument.name]
            for argument, is_written in zip(schema.arguments, written, strict=True)
            if is_written and argument.name in named
        )
        if torch.Tag.nondeterministic_seeded in func.tags:
            if changed and [tensor is changed[0] for tensor in tensors] == [True]:  # numbers are drawn into a tensor
                drawn = torch.empty_like(changed[0])
                func(drawn, *args[1:], **kwargs)
                # An accelerator draws them in the kernel: nothing else has seen ``drawn``, whose memory is soon used again.
                func, args, kwargs, tensors = torch.ops.aten.copy_.default, (changed[0], drawn), {}, changed
                schema = func._schema
            else:
                stream.record().synchronize()
                return func(*args, **kwargs)
        found = self._geometries_of(func, args, kwargs)
        if found is None:  # how much there will be depends on the values
            stream.record().synchronize()
            return func(*args, **kwargs)
        results = [None if geometry is None else self.allocated(geometry) for geometry in found]
        computes = "empty" not in schema.name
        if computes:
            here = tree_map_only(Tensor, self.for_device, (args, kwargs))
            there = [None if result is None else self.for_device(result) for result in results]
            stream.put(partial(_compute, func, here[0], here[1], there))
        if self._observer is not None and computes:
            made = [result for result in results if result is not None]
            ids = {id(tensor) for tensor in changed}
            self._observer.launch(stream.name, str(func), [one for one in tensors if id(one) not in ids], [*changed, *made])
        return _returned(schema, named, results)

    def _geometries_of(self, func: Any, args: Any, kwargs: Any) -> list[_Geometry | None] | None:
        """Return what the operation makes, but for tensors that it changes; None if that depends on values."""
        key = func, _key((args, kwargs))
        if key not in self._geometries:
            tried = tree_map_only(Tensor, _zeros_like, (args, kwargs))
            ids = {id(tensor) for tensor in _tensors(tried)}
            depends = torch.Tag.dynamic_output_shape in func.tags
            self._geometries[key] = None if depends else _made(func(*tried[0], **tried[1]), ids)
        return self._geometries[key]


@dataclass(frozen=True, slots=True)
class _Geometry:
    """A tensor without its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    size_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Geometry:
        size = tensor.untyped_storage().nbytes()
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, size)


class _Deferring(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a stream compute what its thread calls."""

    def __init__(self, device: AsyncDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device.call(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: Any, results: list[Tensor | None]) -> None:
    found = func(*args, **kwargs)
    ids = {id(tensor) for tensor in _tensors((args, kwargs))}
    outputs = found if isinstance(found, (tuple, list)) else [found]
    for result, one in zip(results, [one for one in outputs if id(one) not in ids], strict=bool(results)):
        if result is not None and isinstance(one, Tensor):
            result.copy_(one)


def _made(found: Any, given: set[int]) -> list[_Geometry | None]:
    outputs = found if isinstance(found, (tuple, list)) else [] if found is None else [found]
    return [None if one is None else _Geometry.of(one) for one in outputs if id(one) not in given]


def _returned(schema: Any, named: dict[str, Any], results: list[Tensor | None]) -> Any:
    """What the operation returns: the tensors that it changes, and new ones."""
    left = iter(results)
    if not schema.returns:
        return None
    if len(schema.returns) == 1:
        (returned,) = schema.returns
        if returned.alias_info is not None:
            return _changed_by(schema, named, returned)
        return list(left) if "List" in str(returned.type) else next(left)
    return tuple(
        next(left) if returned.alias_info is None else _changed_by(schema, named, returned) for returned in schema.returns
    )


def _changed_by(schema: Any, named: dict[str, Any], returned: Any) -> Any:
    return next(
        named[argument.name]
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.before_set & returned.alias_info.before_set
    )


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    leaves, _ = tree_flatten(list(values))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _zeros_like(tensor: Tensor) -> Tensor:
    size = tensor.storage_offset() + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    flat = torch.zeros(size if tensor.numel() else 0, dtype=tensor.dtype, device="cpu")
    return torch.as_strided(flat, tensor.shape, tensor.stride(), tensor.storage_offset() if tensor.numel() else 0)


def _key(value: Any) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(each)) for name, each in value.items())
    return type(value), value if value.__hash__ else repr(value)
