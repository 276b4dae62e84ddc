"""Memories with a budget: counts every byte on the emulated device, and of the model states on the host.

Both kinds of tensors are in this machine's memory, so a budget holds only because a ledger counts them. It counts in two ways:

- *exact*: each storage is entered when it is allocated and removed when it is freed. States are entered where they are created.
  A dispatch mode, which PyTorch calls for every operation including those of backward, sees what a pass of the model allocates.
  This takes a fifth to two thirds of the training time.
- *scheduled*: a task has the bytes that it allocates according to the schedule, from its begin until the task that frees them
  ends. This costs nothing, and is as accurate as the sizes in the schedule, so the first iterations are counted in both ways.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autohete.analysis.worst_case import worst_case
from autohete.errors import DeviceOutOfMemoryError
from autohete.quantities import format_bytes
from autohete.schedule import GPU, Buffer, BufferId, Kind, Schedule, Task, TaskId

#: Group of memory that is only alive while a task runs.
WORKSPACE = "workspace"
#: Number of iterations that are counted in both ways if counting follows the schedule.
CHECKED_ITERATIONS = 2
#: Parameters of GNU's malloc (mallopt(3)) and what they are set to.
_ONE_ARENA, _KEEP_FREE, _MAP_LARGER = (-8, 1), (-1, 2**31 - 1), (-3, 32 * 2**20)


@cache
def keep_freed_memory() -> None:
    """Make this process keep memory freed by tensors on the emulated device for reuse, as PyTorch does on a GPU.

    GNU's malloc would return it to the system and take it again, page by page, which sometimes makes a backward pass up to
    15 % longer. Other C libraries are left unchanged.

    Call it before there is a thread that allocates: it would have got memory of its own, which lanes then may get, and which is
    returned whatever is set here.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in (_ONE_ARENA, _KEEP_FREE, _MAP_LARGER):
            mallopt(parameter, value)


class Counting(StrEnum):
    """How bytes on the device are counted: every storage (exact), or the sizes in the schedule (scheduled)."""

    EXACT = "exact"
    SCHEDULED = "scheduled"


class Reservation:
    """Bytes that are counted as long as this object is alive."""

    __slots__ = ("__weakref__",)


class _Counted(weakref.ref[Any]):
    """A counted storage or reservation; calls ``buried`` with itself when it dies."""

    __slots__ = ("group", "key", "size")

    def __new__(cls, holder: object, buried: Callable[[weakref.ref[Any]], None], *_: object) -> _Counted:
        return super().__new__(cls, holder, buried)

    def __init__(self, holder: object, buried: Callable[[weakref.ref[Any]], None], key: int, size: int, group: str) -> None:
        super().__init__(holder, buried)  # type: ignore[call-arg]
        self.key, self.size, self.group = key, size, group


class Ledger:
    """Counts the storages of one memory.

    Args:
        memory: its name, for messages.
        capacity_bytes: its capacity; None: no limit, only counted.

    Attributes:
        used_bytes: bytes in use now.
        peak_bytes: maximum so far; ``peak_task`` reached it, ``peak_holders`` are its contents: group -> bytes.
    """

    def __init__(self, memory: str, capacity_bytes: int | None = None) -> None:
        self.memory, self.capacity_bytes = memory, capacity_bytes
        self.reset_peak()
        self._used = 0
        self._groups: dict[str, int] = {}
        #: By the storage's address, which may be reused for a new storage at once.
        self._entries: dict[int, _Counted] = {}
        #: Dead entries, booked later under the lock: Python may report a death between any two instructions of any thread.
        self._dead: deque[weakref.ref[Any]] = deque()
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes in use now."""
        with self._lock:
            self._bury()
            return self._used

    def holders(self) -> dict[str, int]:
        """Return the contents: group -> bytes, largest first."""
        with self._lock:
            self._bury()
            return self._holders()

    def reset_peak(self) -> None:
        """Reset the peak; the next entry sets it again."""
        self.peak_bytes, self.peak_task, self.peak_holders = 0, "", dict[str, int]()

    def enter(self, tensor: Tensor, group: str, task: str = "", size_bytes: int | None = None) -> int | None:
        """Count the storage of ``tensor`` as long as it lives; return the entry's key, or None if it was already counted.

        Args:
            tensor: the tensor whose storage is counted.
            group, task: what it is, and the task that allocates it.
            size_bytes: size to count; None: the storage's size.

        Raises:
            DeviceOutOfMemoryError: not enough memory is left.
        """
        storage = tensor.untyped_storage()
        key: int = storage._cdata
        size = storage.nbytes() if size_bytes is None else size_bytes
        if not size:
            return None
        with self._lock:
            self._bury()
            if key in self._entries:
                return None
            self._add(storage, key, size, group, task)
        return key

    def reserve(self, size_bytes: int, group: str, task: str = "") -> Reservation:
        """Count ``size_bytes`` as long as the returned reservation lives.

        Raises:
            DeviceOutOfMemoryError: not enough memory is left.
        """
        reservation = Reservation()
        if size_bytes:
            with self._lock:
                self._bury()
                self._add(reservation, id(reservation), size_bytes, group, task)
        return reservation

    def counts(self, tensor: Tensor) -> bool:
        """Whether the storage of ``tensor`` is counted."""
        with self._lock:
            self._bury()
            return tensor.untyped_storage()._cdata in self._entries

    def forget(self, tensor: Tensor) -> None:
        """Stop counting the storage of ``tensor``, for example because a reservation includes it."""
        with self._lock:
            self._bury()
            entry = self._entries.pop(tensor.untyped_storage()._cdata, None)
            if entry is not None:
                self._strike(entry)

    def claim(self, tensor: Tensor, group: str, task: str = "", size_bytes: int | None = None) -> None:
        """Call :meth:`enter`; if an operation has already entered the storage, move it to ``group``."""
        if self.enter(tensor, group, task, size_bytes) is None and tensor.untyped_storage().nbytes():
            self.regroup([tensor.untyped_storage()._cdata], group)

    def regroup(self, keys: list[int], group: str) -> None:
        """Move the entries of ``keys`` that are still alive to another group."""
        with self._lock:
            self._bury()
            for entry in filter(None, map(self._entries.get, keys)):
                self._groups[entry.group] -= entry.size
                self._groups[group] = self._groups.get(group, 0) + entry.size
                entry.group = group

    def forget_group(self, group: str, but: Iterable[Tensor]) -> None:
        """Stop counting everything in ``group`` except the storages of ``but``."""
        kept = {tensor.untyped_storage()._cdata for tensor in but}
        with self._lock:
            self._bury()
            for entry in [e for e in self._entries.values() if e.group == group and e.key not in kept]:
                del self._entries[entry.key]
                self._strike(entry)

    def _add(self, holder: object, key: int, size: int, group: str, task: str) -> None:
        if self.capacity_bytes is not None and self._used + size > self.capacity_bytes:
            raise self._refusal(size, group, task)
        self._entries[key] = _Counted(holder, self._dead.append, key, size, group)
        self._used += size
        self._groups[group] = self._groups.get(group, 0) + size
        if self._used > self.peak_bytes:
            self.peak_bytes, self.peak_task, self.peak_holders = self._used, task, dict(self._groups)

    def _bury(self) -> None:
        while self._dead:
            entry = self._dead.popleft()
            assert isinstance(entry, _Counted)
            if self._entries.get(entry.key) is entry:  # it may have died while it was being forgotten
                del self._entries[entry.key]
                self._strike(entry)

    def _strike(self, entry: _Counted) -> None:
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


class Scheduled:
    """Counts in ``ledger`` the buffers of its memory as the schedule states them; resident ones from the beginning.

    Args:
        ledger: the ledger of one of the memories of ``schedule``.
        schedule: the schedule whose tasks allocate and free.

    Attributes:
        begun: number of tasks whose buffers have been counted; changes when they have, and not before.
    """

    def __init__(self, ledger: Ledger, schedule: Schedule) -> None:
        self._ledger = ledger
        self.begun = 0
        self._allocates = {
            task.id: [buffer for buffer in task.allocates if buffer.memory == ledger.memory] for task in schedule.tasks
        }
        self._frees = {task.id: task.frees for task in schedule.tasks}
        #: By id and iteration; what the first iteration frees for the one before exists from the beginning.
        self._alive: dict[tuple[BufferId, int], Reservation] = {}
        earlier = {free.id for task in schedule.tasks for free in task.frees if free.back}
        there = (buffer for buffers in self._allocates.values() for buffer in buffers if buffer.id in earlier)
        for buffer in (*(b for b in schedule.resident if b.memory == ledger.memory), *there):
            self._allocate(buffer, -1, "")

    def begin(self, task: TaskId, iteration: int) -> None:
        """Count the buffers of the task.

        Raises:
            DeviceOutOfMemoryError: not enough memory is left.
        """
        try:
            for buffer in self._allocates[task]:
                self._allocate(buffer, iteration, task.at(iteration))
        except DeviceOutOfMemoryError:  # it may begin later
            self.undo(task, iteration)
            raise
        self.begun += 1

    def undo(self, task: TaskId, iteration: int) -> None:
        """Free what the task, which cannot begin, has been given."""
        for buffer in self._allocates[task]:
            self._alive.pop((buffer.id, iteration), None)

    def end(self, task: TaskId, iteration: int) -> None:
        """Free what the task frees."""
        for free in self._frees[task]:
            self._alive.pop((free.id, iteration - free.back), None)  # buffers of other memories are not here

    def clear(self) -> None:
        """Free everything."""
        self._alive.clear()

    def _allocate(self, buffer: Buffer, iteration: int, task: str) -> None:
        self._alive[buffer.id, iteration] = self._ledger.reserve(buffer.size_bytes, buffer.id.group, task)


class Room:
    """Lets a task be issued once its buffers fit beside those of all tasks that have been issued and are not done.

    They fit into what the tasks need in the worst order when each is issued only after those before it are done: issuing ahead
    takes no more memory.

    Args:
        schedule: what is executed.
        count: counts the device's memory, too; None: the device's allocator does.
    """

    def __init__(self, schedule: Schedule, count: DeviceCount | None) -> None:
        most = {memory.name: worst_case(schedule, memory.name).peak_bytes for memory in schedule.memories}
        self._memories = [Scheduled(Ledger(name, size), schedule) for name, size in most.items()]
        self._count = count

    def begin(self, task: Task, iteration: int) -> None:
        """Count the buffers of ``task``.

        Raises:
            DeviceOutOfMemoryError: not enough memory is left.
        """
        try:
            for memory in self._memories:
                memory.begin(task.id, iteration)
            if self._count is not None:
                self._count.begin(task, iteration)
        except DeviceOutOfMemoryError:
            for memory in self._memories:
                memory.undo(task.id, iteration)
            raise

    def end(self, task: Task, iteration: int) -> None:
        """Free what ``task`` frees."""
        for memory in self._memories:
            memory.end(task.id, iteration)
        if self._count is not None:
            self._count.end(task, iteration)


class DeviceCount:
    """Counts the device memory of a training run, storage by storage or by its schedule.

    Args:
        ledger: the device's.
        schedule: what is executed.
        counting: how to count. ``SCHEDULED`` counts the first iterations in both ways: if a pass uses more than the schedule
            says, its sizes are wrong, and every storage is counted from then on.
        checked: the iterations that are counted in both ways.

    Attributes:
        storages: the ledger to enter storages in; None: they are not counted.
        excess: the first task that used more than the schedule says, and the number of excess bytes.
    """

    def __init__(
        self, ledger: Ledger, schedule: Schedule, counting: Counting, checked: range = range(CHECKED_ITERATIONS)
    ) -> None:
        self._ledger, self._checked = ledger, checked
        self.excess: tuple[str, int] | None = None
        self.storages: Ledger | None = ledger
        self._scheduled: Scheduled | None = None
        if counting is Counting.SCHEDULED:
            self.storages = Ledger(ledger.memory, ledger.capacity_bytes) if checked else None
            self._scheduled = Scheduled(ledger, schedule)

    @property
    def counting(self) -> Counting:
        """The current way of counting."""
        return Counting.EXACT if self._scheduled is None or self.excess is not None else Counting.SCHEDULED

    @property
    def is_compared(self) -> bool:
        """Whether all iterations that are counted in both ways have ended, and the sizes of the schedule were right."""
        return self.storages is None

    @property
    def ledger(self) -> Ledger:
        """The ledger that has counted; not the given one if the schedule's sizes were found wrong."""
        return self._ledger if self.excess is None or self.storages is None else self.storages

    def begin(self, task: Task, iteration: int) -> None:
        """Count the buffers of ``task``.

        Raises:
            DeviceOutOfMemoryError: not enough memory is left.
        """
        scheduled = self._scheduled
        if scheduled is not None:
            scheduled.begin(task.id, iteration)

    def storages_of(self, task: Task, iteration: int) -> Ledger | None:
        """Return the ledger for the storages that ``task`` allocates; None if they are not counted."""
        # Copies and updates enter all that they allocate themselves; a norm is four bytes and not a state.
        if task.lane != GPU or task.id.kind in (Kind.GPU_UPDATE, Kind.GRADIENT_NORM, Kind.CLIP):
            return None
        if self._scheduled is not None and iteration == self._checked.stop:  # all checked passes have ended
            if self.excess is None:
                self.storages = None
            else:
                self._scheduled = None
        return self.storages

    def end(self, task: Task, iteration: int) -> None:
        """Free what ``task`` frees."""
        scheduled = self._scheduled
        if scheduled is not None:
            scheduled.end(task.id, iteration)

    def close(self) -> None:
        """Free everything at the end of the training."""
        if self._scheduled is not None:
            self._scheduled.clear()

    @contextmanager
    def exactly(self, task: str) -> Iterator[None]:
        """Count what runs inside storage by storage, on top of everything already alive."""
        storages, self.storages = self.storages, self.ledger
        try:
            with accounting(self.storages, task, WORKSPACE):
                yield
        finally:
            self.storages = storages

    def compare(self, task: str) -> None:
        """Record it if more is in use than the schedule says."""
        scheduled, storages = self._scheduled, self.storages
        if scheduled is None or storages is None or self.excess is not None:
            return
        while True:
            begun, said, found = scheduled.begun, self._ledger.used_bytes, storages.used_bytes
            if found <= said:
                return
            # A task of another lane that began after ``said`` was read may have allocated; one that ended has only freed.
            if begun == scheduled.begun:
                self.excess = task, found - said
                return


class Accounting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enters in ``ledger`` what the operations of one task allocate.

    Args:
        ledger: the device's.
        task: the task that allocates.
        entered: called with the task after each entry.
    """

    def __init__(self, ledger: Ledger, task: str, entered: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._task, self._entered = ledger, task, entered
        self.keys: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether PyTorch should wrap the mode to keep its compiler out. That doubles the time per operation and loads the
        compiler. Nothing is compiled while a mode like this is active anyway.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        known: set[int] | None = None
        for output in outputs:
            if isinstance(output, Tensor) and output.layout is torch.strided:  # others have no storage
                if known is None:
                    known = {storage._cdata for storage in _storages(args)}
                if output.untyped_storage()._cdata not in known:  # a view allocates nothing
                    key = self._ledger.enter(output, WORKSPACE, self._task)
                    if key is not None:
                        self.keys.append(key)
                        self._entered(self._task)
        return result


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                yield value.untyped_storage()
        elif isinstance(value, (tuple, list)):
            yield from _storages(value)


@contextmanager
def accounting(ledger: Ledger, task: str, group: str, entered: Callable[[str], None] = lambda task: None) -> Iterator[None]:
    """Count what is allocated inside; what outlives the block goes to ``group``. Calls ``entered`` after each entry."""
    mode = Accounting(ledger, task, entered)
    with mode:
        yield
    ledger.regroup(mode.keys, group)
