"""What a profiler recorded of a training, in one form for all profilers. Times are seconds from the start of the recording."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from autohete.calibrate.operators import Operator
from autohete.errors import InputError
from autohete.printable import shown

#: No recording is longer; a year and a half, as :data:`autohete.profile.costs.LONGEST_TASK_SECONDS`.
_LONGEST_SECONDS = 5e7
#: Nothing in a recording is more.
_MOST = 2**62


class Work(StrEnum):
    """What the GPU, or one of its copy engines, does."""

    KERNEL = "kernel"
    COLLECTIVE = "collective"
    H2D = "h2d"
    D2H = "d2h"
    D2D = "d2d"


class GpuWork(NamedTuple):
    """A kernel or a copy.

    Args:
        work: what it is.
        start, end: its times.
        stream: the stream that it ran on.
        issued: when the host began to launch it; NaN if that was not recorded.
        thread: the thread that launched it; -1 if that was not recorded.
        bytes: of a copy, its size; of a collective, what each GPU sends to the next ("bus bytes" of nccl-tests); 0: not known.
        pinned: of a copy, whether the host's memory was page-locked.
        device: the GPU.
    """

    work: Work
    start: float
    end: float
    stream: int
    issued: float = math.nan
    thread: int = -1
    bytes: int = 0
    pinned: bool = True
    device: int = 0


class HostRange(NamedTuple):
    """A range of the host: an annotation, an NVTX range, or a node of autograd."""

    start: float
    end: float
    thread: int
    name: str


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A recording.

    Args:
        name: the file's name.
        date: the file's date.
        work: what the GPU did, by start.
        ranges: ranges of the host, by start.
        operators: operators with shapes.
        waits: the calls in which the host waited for the GPU, as (thread, start, end).
        gpu: the product's name; empty if not recorded.
        memory_bytes, multiprocessors: of the GPU; 0 if not recorded.
        gpus: number of processes that trained together.
        remarks: what was left out, in words.
    """

    name: str
    date: str
    work: tuple[GpuWork, ...]
    ranges: tuple[HostRange, ...]
    operators: tuple[Operator, ...]
    waits: tuple[tuple[int, float, float], ...]
    gpu: str = ""
    memory_bytes: int = 0
    multiprocessors: int = 0
    gpus: int = 1
    remarks: tuple[str, ...] = ()


#: Host calls in which the host waits until the GPU is done, of the CUDA runtime and of HIP.
WAITS = re.compile(r"(?:cuda|hip|cu|)(?:Device|Stream|Event|Ctx)Synchronize|^(?:cuda|hip)Memcpy(?:_v\d+)?$")
#: Kernels of NCCL and RCCL.
COLLECTIVE = re.compile(r"nccl(?:Dev)?Kernel", re.IGNORECASE)
#: Ranges that autograd makes for each node of the graph.
NODE = "autograd::engine::evaluate_function"


def number(value: object, what: str) -> float:
    """Return a recorded number.

    Raises:
        InputError: it is no number, or negative, or no recording has it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST:  # also NaN
        raise InputError(f"{what} is {shown(value)}: a number of at least 0 belongs there")
    return value


def check_length(seconds: float, what: str) -> None:
    """Check that a recording is not absurdly long.

    Raises:
        InputError: it is.
    """
    if not math.isfinite(seconds) or seconds > _LONGEST_SECONDS:
        raise InputError(f"{what} lasts {seconds:.3g} s, longer than any training step: its times are damaged")


@dataclass(slots=True)
class Reading:
    """What has been read of a recording, in any order.

    Args:
        threads: numbers of the threads.
        issued: thread and start of each call that launched work, by the key that the work has, too.
        work: of all GPUs, each with the key of its launch; None if it has none.
        ranges, operators, waits: see :class:`RecordedRun`.
    """

    threads: dict[Hashable, int] = field(default_factory=dict)
    issued: dict[int, tuple[int, float]] = field(default_factory=dict)
    work: list[tuple[int | None, GpuWork]] = field(default_factory=list)
    ranges: list[HostRange] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    waits: list[tuple[int, float, float]] = field(default_factory=list)

    def thread(self, key: Hashable) -> int:
        """The number of a thread."""
        return self.threads.setdefault(key, len(self.threads))

    def call(self, name: str, thread: int, start: float, end: float, launched: int | None) -> None:
        """Add a call of the GPU's runtime."""
        if launched is not None:
            self.issued[launched] = thread, start
        if WAITS.search(name):
            self.waits.append((thread, start, end))

    def recorded(self, name: str, date: str, gpu: tuple[str, int, int], gpus: int = 1) -> RecordedRun:
        """The recording of the busiest GPU.

        Args:
            name, date: of the file.
            gpu: name, memory and multiprocessors.
            gpus: number of processes that trained together.
        """
        work = [one for _, one in self.work]
        for place, (key, one) in enumerate(self.work):
            if key in self.issued:
                thread, issued = self.issued[key]
                work[place] = one._replace(thread=thread, issued=issued)
        kept, remarks = only_busiest(work)
        columns = tuple(sorted(self.ranges)), tuple(sorted(self.operators)), tuple(sorted(self.waits))
        return RecordedRun(name, date, tuple(kept), *columns, *gpu, gpus, remarks)


def only_busiest(work: list[GpuWork]) -> tuple[list[GpuWork], tuple[str, ...]]:
    """Return the work of the GPU that worked longest, by start, and a remark on what was left out."""
    busy: dict[int, float] = {}
    for one in work:
        busy[one.device] = busy.get(one.device, 0.0) + one.end - one.start
    chosen = max(busy, key=busy.__getitem__, default=0)
    kept = sorted((one for one in work if one.device == chosen), key=lambda one: one.start)
    others = sorted(set(busy) - {chosen})
    return kept, (f"GPU {chosen} only; {len(others)} more GPUs of this process are left out",) if others else ()
