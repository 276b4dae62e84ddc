"""Reads traces of PyTorch's profiler (Kineto; the Chrome trace event format), event by event, as they have hundreds of MB.

Fields as Kineto writes them: libkineto/src/output_json.cpp (``ChromeTraceLogger``) and the profiler's own metadata,
torch/csrc/autograd/profiler_kineto.cpp (``Input Dims``, ``Input type``, ``Concrete Inputs``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from autohete.calibrate.operators import Operator, is_causal, is_counted, shapes_of
from autohete.calibrate.recorded import (
    COLLECTIVE,
    NODE,
    GpuWork,
    HostRange,
    Reading,
    RecordedRun,
    Work,
    check_length,
    number,
)
from autohete.errors import InputError
from autohete.printable import shown

_CURE = "give a trace that torch.profiler has written (export_chrome_trace, tensorboard_trace_handler)"
_CHUNK, _BLANKS = 1 << 20, re.compile(r"[ \t\r\n]+")
#: Characters of one event, or of another entry of the file. The longest have lists of shapes or of processes.
_LONGEST = 1 << 24
#: Characters of words of JSON, such as "-Infinity".
_LONGEST_WORD = 9
#: Categories of host calls that launch work, and of copies and kernels.
_CALLS = ("cuda_runtime", "cuda_driver", "runtime", "hip_runtime")
_SETS = ("gpu_memset", "memset")
_WORK = ("kernel", "gpu_memcpy", "memcpy", *_SETS)
#: Bytes of the elements of NCCL's messages, by the name of their type.
_ELEMENT = {"Float": 4, "Half": 2, "BFloat16": 2, "Byte": 1, "Char": 1, "Int": 4, "Long": 8, "Double": 8}


class _EndsWithin(Exception):
    """The text ends within a value."""


class _Json:
    """A JSON text of any length, read value by value."""

    def __init__(self, read: Callable[[int], str]) -> None:
        self._read, self._text, self._at = read, "", 0
        self._decode = json.JSONDecoder(strict=False).raw_decode  # names of kernels have control characters

    def _more(self) -> bool:
        left = self._text[self._at :]
        if len(left) > _LONGEST:
            raise InputError(f"an entry of it has more than {_LONGEST:,} characters")
        more = self._read(max(_CHUNK, len(left)))
        self._text, self._at = left + more, 0
        return bool(more)

    def peek(self) -> str:
        """Return the next character that is no blank; empty at the end."""
        while True:
            if (blanks := _BLANKS.match(self._text, self._at)) is not None:
                self._at = blanks.end()
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def skip(self, character: str) -> bool:
        """Skip ``character`` if it is next."""
        found = self.peek() == character
        self._at += found
        return found

    def value(self) -> Any:
        """Return the next value.

        Raises:
            _EndsWithin: the text ends within it.
            InputError: it is no JSON.
        """
        self.peek()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
                if end < len(self._text):  # a number may go on in the next chunk
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                # At the end of what was read, such as in half of a name, the fault may only be that the rest is missing.
                if "Unterminated" not in error.msg and error.pos < len(self._text) - _LONGEST_WORD:
                    raise InputError(f"it is not JSON ({error.msg})") from error
            except RecursionError as error:
                raise InputError("it nests too deep") from error
            except ValueError as error:  # a number of thousands of digits
                raise InputError(str(error)) from error
            if not self._more():
                raise _EndsWithin

    def entries(self) -> Iterator[tuple[str, Any]]:
        """Yield the entries of the object that the text is, but the events of ``traceEvents`` one by one. A text that is a list
        has events only.
        """
        if self.peek() == "[":
            yield from self._events()
            return
        if not self.skip("{"):
            raise InputError("it is not JSON")
        while not self.skip("}"):
            key = self.value()
            if not isinstance(key, str) or not self.skip(":"):
                raise _EndsWithin if not self.peek() else InputError("it is not JSON")
            if key == "traceEvents" and self.peek() == "[":
                yield from self._events()
            else:
                yield key, self.value()
            if not self.skip(",") and self.peek() != "}":
                raise _EndsWithin if not self.peek() else InputError("it is not JSON")

    def _events(self) -> Iterator[tuple[str, Any]]:
        self.skip("[")
        while not self.skip("]"):
            yield "", self.value()
            if not self.skip(",") and self.peek() != "]":
                raise _EndsWithin if not self.peek() else InputError("it is not JSON")


@dataclass(slots=True)
class _Reader:
    """Collects what is of use."""

    device: bool
    events: int = 0
    origin: float | None = None
    found: Reading = field(default_factory=Reading)
    cpu: list[tuple[int, float, float]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def event(self, event: Any) -> None:
        self.events += 1
        if not isinstance(event, dict):
            raise InputError(f"event {self.events} is {shown(event)}: an event is an object")
        category = event.get("cat")
        if event.get("ph") != "X" or not isinstance(category, str):
            return
        where, name = f"event {self.events}: ", str(event.get("name"))
        start, length = (number(event.get(key), f"{where}{key}") * 1e-6 for key in ("ts", "dur"))
        if self.origin is None:
            self.origin = start
        start -= self.origin
        check_length(abs(start) + length, f"event {self.events} and the time before it")
        category, args = category.casefold(), event.get("args")
        args = args if isinstance(args, dict) else {}
        if category in _WORK:
            self._on_gpu(name, start, start + length, args, where, is_set=category in _SETS)
            return
        thread = self.found.thread(f"{event.get('pid')} {event.get('tid')}")
        if category in _CALLS:
            self.found.call(name, thread, start, start + length, _whole(args, "correlation", where))
        elif category == "user_annotation" or (category == "cpu_op" and name.startswith(NODE)):
            self.found.ranges.append(HostRange(start, start + length, thread, name))
        if category == "cpu_op":
            if self.device:
                self.cpu.append((thread, start, start + length))
            if "Input Dims" in args and is_counted(name):
                self._operator(name, start, start + length, thread, args)

    def _operator(self, name: str, start: float, end: float, thread: int, args: dict[str, Any]) -> None:
        shapes, types, concrete = (args.get(key) for key in ("Input Dims", "Input type", "Concrete Inputs"))
        if (found := shapes_of(shapes)) is not None and isinstance(types, list):
            causal = is_causal(name, concrete)
            self.found.operators.append(Operator(start, end, thread, name, found, tuple(map(str, types)), causal))

    def _on_gpu(self, name: str, start: float, end: float, args: dict[str, Any], where: str, *, is_set: bool) -> None:
        size, work, pinned = 0, Work.KERNEL, True
        if name.startswith("Memcpy") or is_set:
            size, pinned = _whole(args, "bytes", where) or 0, "Pageable" not in name
            kinds = {"HtoD": Work.H2D, "DtoH": Work.D2H}
            work = Work.D2D if is_set else next((kind for text, kind in kinds.items() if text in name), Work.D2D)
        elif COLLECTIVE.search(name):
            size, work = _bus_bytes(args, where), Work.COLLECTIVE
        stream, device = _whole(args, "stream", where) or 0, _whole(args, "device", where) or 0
        found = GpuWork(work, start, end, stream, bytes=size, pinned=pinned, device=device)
        self.found.work.append((_whole(args, "correlation", where), found))

    def recorded(self, name: str, date: str) -> RecordedRun:
        gpu = _properties(self.about.get("deviceProperties"))
        if self.device:
            self.found.work, gpu = [(None, one) for one in _outermost(self.cpu)], ("", 0, 0)
        spread = self.about.get("distributedInfo")
        size = spread.get("world_size") if isinstance(spread, dict) else None
        return self.found.recorded(name, date, gpu, size if type(size) is int and 0 < size < 10**6 else 1)


def _whole(args: dict[str, Any], key: str, where: str) -> int | None:
    return int(number(args[key], f"{where}{key}")) if key in args else None


def _bus_bytes(args: dict[str, Any], where: str) -> int:
    """Return the bytes that each GPU of a ring sends in a collective; 0 if its message is not recorded.

    As nccl-tests counts them (doc/PERFORMANCE.md): of N GPUs, each sends (N - 1) / N of the whole message, twice for an
    all-reduce.
    """
    elements = [_whole(args, key, where) or 0 for key in ("In msg nelems", "Out msg nelems")]
    group, name = _whole(args, "Group size", where) or 0, str(args.get("Collective name"))
    element = _ELEMENT.get(str(args.get("dtype")), 0)
    if group < 2 or not any(kind in name for kind in ("allreduce", "allgather", "reduce_scatter")):
        return 0
    return max(elements) * element * (2 if "allreduce" in name else 1) * (group - 1) // group


def _outermost(calls: list[tuple[int, float, float]]) -> list[GpuWork]:
    """Return the operators that are in no other one, as the work of a device that is the CPU. No one launches them."""
    work, ends = [], dict[int, float]()
    for thread, start, end in sorted(calls, key=lambda call: (call[0], call[1], -call[2])):
        if start >= ends.get(thread, -1.0):
            work.append(GpuWork(Work.KERNEL, start, end, thread, thread=thread))
            ends[thread] = end
    return work


def _properties(devices: object) -> tuple[str, int, int]:
    """Return name, memory and multiprocessors of the first GPU; empty and 0 if they are not recorded."""
    first = devices[0] if isinstance(devices, list) and devices and isinstance(devices[0], dict) else {}
    sizes = [value if type(value := first.get(key)) is int else 0 for key in ("totalGlobalMem", "numSms")]
    memory, multiprocessors = (size if 0 < size < 2**50 else 0 for size in sizes)
    name = first.get("name")
    return (name if isinstance(name, str) else "", memory, multiprocessors)


def read_kineto(read: Callable[[int], str], name: str, date: str, *, device: bool = False) -> RecordedRun:
    """Read a trace of PyTorch's profiler.

    Args:
        read: returns the next characters of its text, at most as many as it is given.
        name, date: of the file.
        device: the CPU stands in for the GPU; its outermost operators are what the device does.

    Raises:
        InputError: it is no such trace, it ends in the middle, or it is damaged.
    """
    reader = _Reader(device)
    try:
        for key, value in _Json(read).entries():
            if key:
                reader.about[key] = value
            else:
                reader.event(value)
    except _EndsWithin as error:
        found = f"after {reader.events:,} events" if reader.events else "before its first event"
        raise InputError(
            f"trace {shown(name)} ends in the middle, {found}: the program ended, or the disk was full, while it was written; "
            "record it again, with fewer steps"
        ) from error
    except InputError as error:
        raise InputError(f"{shown(name)} is no trace, or it is damaged: {error}; {_CURE}") from error
    if not reader.events:
        raise InputError(f"{shown(name)} has no events of a trace (traceEvents): {_CURE}")
    return reader.recorded(name, date)
