"""The device of a training behind one interface: the CPU that stands in for a GPU, and a GPU.

Work on a device is issued by the thread of a lane, into that thread's own stream. A stream does its work in the order in which
it was issued. An event marks a place in a stream: another stream, or a thread, can wait for all work before it. On a device
that runs ahead, work is done some time after it was issued; on any other device it is done when the call returns.

This is the only module that names CUDA's functions. Another device with streams is
:class:`autohete.runtime.async_device.AsyncDevice`, which shows without a GPU that no wait is missing.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from autohete.errors import DeviceOutOfMemoryError, check_fields
from autohete.execution.trace import Clock
from autohete.quantities import format_bytes
from autohete.runtime.ledger import Ledger, keep_freed_memory
from autohete.schedule import GPU_MEMORY

_MIB = 2**20
#: What PyTorch's GPU allocator may reserve beyond the allocated bytes: the ends of its segments of 2 and 20 MiB.
_FRAGMENTS_SHARE, _FRAGMENTS_BYTES = 1.08, 64 * _MIB
#: The workspace of cuBLAS on the stream of the passes: 32 MiB on Hopper and 8 on others, plus rounding.
_WORKSPACE_BYTES = 34 * _MIB
#: Share of a GPU's free memory that is used by default; the rest is for the workspaces of libraries.
_USABLE_SHARE = 0.92
#: Milliseconds after which times are taken from a later event: PyTorch measures between two events in 32 bits.
_LONG_MS = 1000.0


@dataclass(frozen=True, slots=True)
class MeasuringSizes:
    """How large the work is by which a device is measured.

    Args:
        quick_bytes: the largest copy of a quick measurement.
        large_bytes: copies that run beside other work.
        updated: parameters of the measured optimizer step.
        matrices: rows of the matrices that are multiplied; the fastest product counts.
        warm_up_seconds: time until clocks have ramped up.
    """

    quick_bytes: int
    large_bytes: int
    updated: int
    matrices: tuple[int, ...]
    warm_up_seconds: float

    def __post_init__(self) -> None:
        check_fields(self)


class Event(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Wait until the stream has done all work before it."""


class DeviceMemory(Protocol):
    """Counts the memory of a device."""

    capacity_bytes: int | None

    @property
    def used_bytes(self) -> int:
        """Bytes in use now."""

    @property
    def peak_bytes(self) -> int:
        """Maximum since :meth:`reset_peak`."""

    def reset_peak(self) -> None:
        """Reset the peak."""

    def counts(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` is counted."""


class Device(ABC):
    """A device that computes passes.

    Args:
        torch_device: PyTorch's name of it.
    """

    #: Work is done after it was issued. Then a task has two ends.
    runs_ahead = False
    #: Host tensors are allocated in pinned memory.
    pins = False
    #: The CPU's threads compute the passes, so all of them may; and they have the caches of the CPU.
    on_cpu = True
    clock = Clock.MEASURED_CPU
    sizes: MeasuringSizes

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    @property
    @abstractmethod
    def name(self) -> str:
        """Its model, for tables."""

    # --- streams

    def stream(self) -> AbstractContextManager[object]:
        """Return a context in which the calling thread has a stream of its own."""
        return nullcontext()

    def record(self) -> Event:
        """Return an event after all work that the calling thread has issued."""
        return _PAST

    def wait(self, event: Event) -> None:
        """Let the calling thread's stream wait for ``event``. The thread goes on."""
        event.synchronize()

    def finish(self) -> None:  # noqa: B027
        """Wait for what the calling thread has issued."""

    def settle(self) -> None:  # noqa: B027
        """Wait for all work on the device."""

    def leave(self) -> None:  # noqa: B027
        """Release what libraries hold for the streams of a training that has ended."""

    def ended_ns(self, event: Event) -> int:
        """Time at which the device has reached ``event``, by :func:`time.perf_counter_ns`."""
        return time.perf_counter_ns()

    # --- tensors

    def empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Allocate a flat tensor on the device."""
        return torch.empty(elements, dtype=dtype, device=self.torch_device)

    def moved(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on the device: itself if it is there."""
        return tensor.to(self.torch_device)

    def on_host(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Allocate a flat tensor on the host, without values, pinned if that makes copies faster."""
        return torch.empty(elements, dtype=dtype, device="cpu", pin_memory=self.pins)

    def read_later(self, tensor: Tensor) -> Tensor:
        """Return a tensor that the host can read once what the calling thread has issued so far is done."""
        if not self.runs_ahead or (tensor.device.type == "cpu" and not self.on_cpu):
            return tensor
        there = self.on_host(tensor.numel(), tensor.dtype).view(tensor.shape)
        return there.copy_(tensor, non_blocking=True)

    # --- memory

    @abstractmethod
    def memory(self, capacity_bytes: int | None = None) -> Ledger | AllocatorMemory:
        """Return what counts its memory. None: as much as there is."""

    @abstractmethod
    def usable_bytes(self) -> int:
        """Memory that it offers by default."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory of its own that is free now."""

    def prepare(self) -> None:  # noqa: B027
        """Prepare the process for a training on the device, if possible before it has another thread."""

    # --- random numbers

    def random_state(self) -> Tensor | None:
        """The state of its random generator; None if it draws from the CPU's."""
        return None

    def set_random_state(self, state: Tensor) -> None:  # noqa: B027
        """Set the state of its random generator."""


class _Past:
    """An event that the device has already reached."""

    def synchronize(self) -> None:
        """Return at once."""


_PAST = _Past()


class EmulatedDevice(Device):
    """The CPU in place of a GPU: work is done when the call returns."""

    sizes = MeasuringSizes(64 * _MIB, 16 * _MIB, 4 * _MIB, (256,), 0.0)

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    @property
    def name(self) -> str:
        return "emulated on the CPU"

    def memory(self, capacity_bytes: int | None = None) -> Ledger:
        return Ledger(GPU_MEMORY, capacity_bytes)

    def usable_bytes(self) -> int:
        return 2**40  # it has no memory of its own: without a budget it is unlimited

    def free_bytes(self) -> int:
        return 0

    def prepare(self) -> None:
        keep_freed_memory()


class CudaDevice(Device):
    """A GPU. Each lane has a CUDA stream."""

    runs_ahead, pins, on_cpu, clock = True, True, False, Clock.MEASURED_CUDA
    sizes = MeasuringSizes(256 * _MIB, 128 * _MIB, 64 * _MIB, (1024, 2048, 4096, 8192), 0.2)

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self._timing = threading.Lock()
        #: An event, and the time at which the GPU reached it.
        self._base: tuple[torch.cuda.Event, int] | None = None

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call, unused-ignore]

    def record(self) -> torch.cuda.Event:
        # Threads that wait for a blocking event sleep, which leaves the CPU to the optimizer.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call, unused-ignore]
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self.torch_device).wait_event(event)

    def finish(self) -> None:
        torch.cuda.current_stream(self.torch_device).synchronize()

    def settle(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def leave(self) -> None:
        # cuBLAS has a workspace for each stream it was used on, which otherwise stays as long as the process.
        self.settle()
        torch._C._cuda_clearCublasWorkspaces()

    def ended_ns(self, event: Event) -> int:
        assert isinstance(event, torch.cuda.Event)
        with self._timing:
            if self._base is None:
                first = self.record()
                first.synchronize()
                self._base = first, time.perf_counter_ns()
            base, then = self._base
            since_ms = float(base.elapsed_time(event))
            at = then + round(since_ms * 1e6)
            if since_ms > _LONG_MS:
                self._base = event, at
            return at

    def memory(self, capacity_bytes: int | None = None) -> AllocatorMemory:
        return AllocatorMemory(self.torch_device, capacity_bytes)

    def usable_bytes(self) -> int:
        return int(_USABLE_SHARE * self.free_bytes())

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def random_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.torch_device)

    def set_random_state(self, state: Tensor) -> None:
        torch.cuda.set_rng_state(state, self.torch_device)


class AllocatorMemory:
    """A GPU's memory as PyTorch's allocator counts it, including workspaces inside of operations.

    It counts in units of 512 bytes. It has the attributes of :class:`~autohete.runtime.ledger.Ledger`.

    Args:
        device: the GPU.
        capacity_bytes: bytes that may be allocated; None: all of the GPU's memory.
    """

    def __init__(self, device: torch.device, capacity_bytes: int | None = None) -> None:
        self._device, self.capacity_bytes = device, capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in use now."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak_bytes(self) -> int:
        """Maximum since :meth:`reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)

    def counts(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` is counted."""
        return tensor.device == self._device

    def reset_peak(self) -> None:
        """Reset the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def limited(self, beside_bytes: int) -> Iterator[None]:
        """Limit PyTorch to the capacity, plus fragmentation in the allocator's segments, plus the workspace of cuBLAS, plus
        ``beside_bytes``; at most to the limit that is set already. That limit is restored on exit.
        """
        if self.capacity_bytes is None:
            yield
            return
        torch.cuda.empty_cache()
        before = torch.cuda.get_per_process_memory_fraction(self._device)
        total = torch.cuda.get_device_properties(self._device).total_memory
        limit = beside_bytes + _WORKSPACE_BYTES + _FRAGMENTS_BYTES + round(_FRAGMENTS_SHARE * self.capacity_bytes)
        torch.cuda.set_per_process_memory_fraction(min(before, limit / total), self._device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self._device)

    def refusal(self, task: str, error: torch.OutOfMemoryError) -> DeviceOutOfMemoryError:
        """Translate the allocator's error. It does not state the size as a number, so ``size_bytes`` is 0."""
        allocated, reserved = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
        total = torch.cuda.get_device_properties(self._device).total_memory
        capacity = total if self.capacity_bytes is None else self.capacity_bytes
        reason = ". ".join(str(error).split(". ")[:2])
        message = (
            f"{task or 'before the first task'}: {GPU_MEMORY} memory is full: {format_bytes(allocated)} are allocated, "
            f"{format_bytes(reserved)} reserved, the budget is {format_bytes(capacity)} ({reason}). Give a "
            "larger budget, or a policy that moves more off the gpu. If much more is reserved than allocated, memory is "
            "fragmented: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
        return DeviceOutOfMemoryError(message, task, 0, capacity, {"allocated": allocated, "reserved": reserved})


_EMULATED = EmulatedDevice()


@cache
def device_for(torch_device: torch.device) -> Device:
    """Return the device that computes on ``torch_device``."""
    return CudaDevice(torch_device) if torch_device.type == "cuda" else _EMULATED


def gpu_here() -> torch.device | None:
    """Return PyTorch's current GPU; None if it can use none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


class CurrentGpu:
    """The GPU that is current for the calling thread, if it has used any."""

    def __init__(self) -> None:
        self._index = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def use(self) -> None:
        """Make it current for the calling thread."""
        if self._index is not None:
            torch.cuda.set_device(self._index)
