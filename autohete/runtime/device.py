"""Memories with a budget: every byte that lives on the emulated device, or in the host's part of the model states.

Tensors of both are in this machine's memory, so a budget holds only because each storage is entered into a ledger when it
comes to life and struck out when it dies. States are entered where they are made; what a pass of the model allocates is
seen by a dispatch mode, which PyTorch calls for every operation, those of backward included.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autohete.errors import DeviceOutOfMemoryError
from autohete.units import format_bytes

#: Group of what is alive only while a task runs.
WORKSPACE = "workspace"
#: Parameters of GNU's malloc (mallopt(3)) and what they are set to.
_ONE_ARENA, _KEEP_FREE, _MAP_LARGER = (-8, 1), (-1, 2**31 - 1), (-3, 32 * 2**20)


@cache
def keep_freed_memory() -> None:
    """Let this process keep what tensors on the emulated device free for the next ones, as PyTorch keeps a GPU's memory.

    GNU's malloc would hand it back to the system and take it anew, page by page, which makes a backward pass up to 15 % longer,
    at one time and not at another. Other C libraries are left as they are.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in (_ONE_ARENA, _KEEP_FREE, _MAP_LARGER):
            mallopt(parameter, value)


class _Entry(weakref.ref[torch.UntypedStorage]):
    """A storage that is counted; calls ``buried`` with itself when it dies."""

    __slots__ = ("group", "key", "size")

    def __new__(
        cls, storage: torch.UntypedStorage, buried: Callable[[weakref.ref[torch.UntypedStorage]], None], *_: object
    ) -> _Entry:
        return super().__new__(cls, storage, buried)

    def __init__(
        self,
        storage: torch.UntypedStorage,
        buried: Callable[[weakref.ref[torch.UntypedStorage]], None],
        key: int,
        size: int,
        group: str,
    ) -> None:
        super().__init__(storage, buried)  # type: ignore[call-arg]
        self.key, self.size, self.group = key, size, group


class Ledger:
    """The storages of one memory.

    Args:
        memory: its name, for messages.
        capacity_bytes: what it holds; None: no limit, only counted.

    Attributes:
        used_bytes: what lives now.
        peak_bytes: the most there has been; ``peak_task`` made it, ``peak_holders`` had it: group -> bytes.
    """

    def __init__(self, memory: str, capacity_bytes: int | None = None) -> None:
        self.memory, self.capacity_bytes = memory, capacity_bytes
        self.reset_peak()
        self._used = 0
        self._groups: dict[str, int] = {}
        #: By the storage's address. That of a dead storage may be given to a new one at once.
        self._entries: dict[int, _Entry] = {}
        #: Python may bury a storage between any two instructions of any thread; it is booked later, under the lock.
        self._dead: deque[weakref.ref[torch.UntypedStorage]] = deque()
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """What lives now."""
        with self._lock:
            self._bury()
            return self._used

    def holders(self) -> dict[str, int]:
        """Who has it: group -> bytes, the largest first."""
        with self._lock:
            self._bury()
            return self._holders()

    def reset_peak(self) -> None:
        """Forget the peak; the next entry sets it anew."""
        self.peak_bytes, self.peak_task, self.peak_holders = 0, "", dict[str, int]()

    def enter(self, tensor: Tensor, group: str, task: str = "") -> int | None:
        """Count the storage of ``tensor`` as long as it lives; the entry's key, or None if it was counted before.

        Raises:
            DeviceOutOfMemoryError: there is not as much left.
        """
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        size = storage.nbytes()
        if not size:
            return None
        with self._lock:
            self._bury()
            if key in self._entries:
                return None
            if self.capacity_bytes is not None and self._used + size > self.capacity_bytes:
                raise self._refusal(size, group, task)
            self._entries[key] = _Entry(storage, self._dead.append, key, size, group)
            self._used += size
            self._groups[group] = self._groups.get(group, 0) + size
            if self._used > self.peak_bytes:
                self.peak_bytes, self.peak_task, self.peak_holders = self._used, task, dict(self._groups)
        return key

    def claim(self, tensor: Tensor, group: str, task: str = "") -> None:
        """:meth:`enter`, or put what an operation has entered already into ``group``."""
        if self.enter(tensor, group, task) is None and tensor.untyped_storage().nbytes():
            self.regroup([tensor.untyped_storage()._cdata], group)

    def regroup(self, keys: list[int], group: str) -> None:
        """Count what is left of ``keys`` under another group."""
        with self._lock:
            self._bury()
            for entry in filter(None, map(self._entries.get, keys)):
                self._groups[entry.group] -= entry.size
                self._groups[group] = self._groups.get(group, 0) + entry.size
                entry.group = group

    def leave_out(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor`` no longer: its bytes are set aside for as long as the training lasts."""
        with self._lock:
            self._bury()
            entry = self._entries.pop(tensor.untyped_storage()._cdata, None)
            if entry is not None:
                self._used -= entry.size
                self._groups[entry.group] -= entry.size

    def leave_out_group(self, group: str, but: Iterable[Tensor]) -> None:
        """:meth:`leave_out` everything in ``group`` except for the storages of ``but``."""
        kept = {tensor.untyped_storage()._cdata for tensor in but}
        with self._lock:
            self._bury()
            for entry in [e for e in self._entries.values() if e.group == group and e.key not in kept]:
                del self._entries[entry.key]
                self._used -= entry.size
                self._groups[group] -= entry.size

    def _bury(self) -> None:
        while self._dead:
            entry = self._dead.popleft()
            assert isinstance(entry, _Entry)
            del self._entries[entry.key]
            self._used -= entry.size
            self._groups[entry.group] -= entry.size

    def _holders(self) -> dict[str, int]:
        return dict(sorted(((g, n) for g, n in self._groups.items() if n), key=lambda item: -item[1]))

    def _refusal(self, size: int, group: str, task: str) -> DeviceOutOfMemoryError:
        assert self.capacity_bytes is not None
        largest = ", ".join(f"{name.replace('_', ' ')} {format_bytes(n)}" for name, n in list(self._holders().items())[:3])
        free = self.capacity_bytes - self._used
        message = (
            f"{task or 'before the first task'}: {self.memory} memory is full: {size} B more ({group.replace('_', ' ')}) are "
            f"needed, {free} of {self.capacity_bytes} B are free; largest: {largest or 'nothing'}. Give a larger budget, or a "
            f"policy that moves more off the {self.memory}"
        )
        return DeviceOutOfMemoryError(message, task, size, self.capacity_bytes, self._holders())


class CudaMemory:
    """A GPU's memory as PyTorch's allocator counts it: with the workspaces that operations have inside.

    It counts in pieces of 512 bytes. Its attributes are those of :class:`Ledger`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def used_bytes(self) -> int:
        """What lives now."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak_bytes(self) -> int:
        """The most there has been since :meth:`reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Forget the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)


class Accounting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enters into ``ledger`` what the operations of one task allocate.

    Args:
        ledger: the device's.
        task: who allocates.
    """

    def __init__(self, ledger: Ledger, task: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._task = ledger, task
        self.keys: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether PyTorch is to wrap what follows, so that its compiler stays out of it: that doubles the time per operation,
        and loads the compiler. While a mode like this is active nothing is compiled anyway.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        known: set[int] | None = None
        for output in outputs:
            if isinstance(output, Tensor):
                if known is None:
                    known = {storage._cdata for storage in _storages(args)}
                if output.untyped_storage()._cdata not in known:  # a view allocates nothing
                    key = self._ledger.enter(output, WORKSPACE, self._task)
                    if key is not None:
                        self.keys.append(key)
        return result


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if isinstance(value, Tensor):
            yield value.untyped_storage()
        elif isinstance(value, (tuple, list)):
            yield from _storages(value)


@contextmanager
def accounting(ledger: Ledger | None, task: str, group: str) -> Iterator[None]:
    """Count what is allocated inside; what outlives the block belongs to ``group``. Without a ledger nothing is counted."""
    if ledger is None:
        yield
        return
    mode = Accounting(ledger, task)
    with mode:
        yield
    ledger.regroup(mode.keys, group)
