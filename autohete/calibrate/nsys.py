"""Reads an export of Nsight Systems (``nsys export --type sqlite``).

Tables as NVIDIA documents them (Nsight Systems documentation, "SQLite Export Schema Reference"): tables without entries are
not there, and enumerations have tables of their own. Kinds of copy are those of CUPTI (``CUpti_ActivityMemcpyKind``).
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from typing import Any
from urllib.parse import quote

from autohete.calibrate.operators import Operator, is_counted
from autohete.calibrate.recorded import (
    COLLECTIVE,
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

#: The first bytes of every SQLite file.
MAGIC = b"SQLite format 3\0"
_CURE = "give what nsys export --type sqlite writes"
_COPIES = {1: Work.H2D, 2: Work.D2H}
#: ``torch.autograd.profiler.emit_nvtx(record_shapes=True)`` names ranges ``aten::mm, seq = 7, sizes = [[8, 4], [4, 2]]``.
_SIZES = re.compile(r"^([\w:]+),.*?sizes = (\[[\d, \[\]]*\])")
_SHAPE = re.compile(r"\[([\d, ]*)\]")


class _Export:
    """An open export. Times are nanoseconds in it."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        rows = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self.tables = {str(name) for (name,) in rows}
        self.strings = {key: str(value) for key, value in self._rows("StringIds", "id", "value")}
        self.origin: float | None = None

    def _rows(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """Return these columns of a table; None for those that its version does not have; nothing if there is no such table."""
        if table not in self.tables:
            return []
        has = {str(row[1]) for row in self._database.execute(f'PRAGMA table_info("{table}")')}
        asked = ", ".join(f'"{name}"' if name in has else "NULL" for name in columns)
        return self._database.execute(f'SELECT {asked} FROM "{table}"').fetchall()

    def timed(self, table: str, *columns: str) -> list[tuple[float, float, tuple[Any, ...]]]:
        """Return start and end, in seconds, and these columns, of the entries that have both."""
        found = []
        for start, end, *rest in self._rows(table, "start", "end", *columns):
            if start is None or end is None:
                continue
            times = number(start, f"{table}.start"), number(end, f"{table}.end")
            if self.origin is None:
                self.origin = times[0]
            first, last = ((time - self.origin) * 1e-9 for time in times)
            check_length(abs(first) + abs(last), f"an entry of {table} and the time before it")
            found.append((first, max(first, last), tuple(rest)))
        return found

    def pageable(self) -> set[object]:
        """The ids of the kinds of memory that are pageable."""
        rows = self._rows("ENUM_CUDA_MEM_KIND", "id", "label", "name")
        return {key for key, *names in rows if any("pageable" in str(name).casefold() for name in names)}

    def gpu(self) -> tuple[str, int, int]:
        """Name, memory and multiprocessors of the first GPU."""
        for name, memory, multiprocessors in self._rows("TARGET_INFO_GPU", "name", "totalMemory", "smCount"):
            sizes = (size if type(size) is int and 0 < size < 2**50 else 0 for size in (memory, multiprocessors))
            return (str(name), *sizes)  # type: ignore[return-value]
        return "", 0, 0


def _whole(value: object, what: str, absent: int = 0) -> int:
    return absent if value is None else int(number(value, what))


def _shapes(name: str) -> Operator | None:
    if (found := _SIZES.match(name)) is None or not is_counted(found[1]):
        return None
    shapes = [tuple(int(size[:12]) for size in re.findall(r"\d+", one)) for one in _SHAPE.findall(found[2][1:-1])]
    return Operator(0, 0, 0, found[1], tuple(shapes), ())


def _recorded(export: _Export, name: str, date: str) -> RecordedRun:
    reading = Reading()
    runtime = export.timed("CUPTI_ACTIVITY_KIND_RUNTIME", "correlationId", "globalTid", "nameId")
    for start, end, (correlation, thread, call) in runtime:
        reading.call(export.strings.get(call, ""), reading.thread(thread), start, end, correlation)
    for start, end, (correlation, stream, device, long, short) in export.timed(
        "CUPTI_ACTIVITY_KIND_KERNEL", "correlationId", "streamId", "deviceId", "demangledName", "shortName"
    ):
        text = export.strings.get(long) or export.strings.get(short, "")
        kind = Work.COLLECTIVE if COLLECTIVE.search(text) else Work.KERNEL
        where = _whole(stream, "streamId"), _whole(device, "deviceId")
        reading.work.append((correlation, GpuWork(kind, start, end, where[0], device=where[1])))
    pageable = export.pageable()
    for start, end, (correlation, stream, device, size, kind, source, target) in export.timed(
        "CUPTI_ACTIVITY_KIND_MEMCPY", "correlationId", "streamId", "deviceId", "bytes", "copyKind", "srcKind", "dstKind"
    ):
        pinned = source not in pageable and target not in pageable
        where = _whole(stream, "streamId"), _whole(device, "deviceId")
        direction, moved = _COPIES.get(kind, Work.D2D), _whole(size, "bytes")
        copy = GpuWork(direction, start, end, where[0], bytes=moved, pinned=pinned, device=where[1])
        reading.work.append((correlation, copy))
    for start, end, (text, key, thread) in export.timed("NVTX_EVENTS", "text", "textId", "globalTid"):
        label = str(text) if text is not None else export.strings.get(key, "")
        number_of = reading.thread(thread)
        reading.ranges.append(HostRange(start, end, number_of, label))
        if (shaped := _shapes(label)) is not None:
            reading.operators.append(shaped._replace(start=start, end=end, thread=number_of))
    return reading.recorded(name, date, export.gpu())


def read_nsys(path: str, name: str, date: str) -> RecordedRun:
    """Read the export at ``path``; ``name`` and ``date`` are the file's.

    Raises:
        InputError: it is damaged, or no export of nsys.
    """
    try:
        with closing(sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True)) as database:
            database.text_factory = lambda data: data.decode(errors="replace")
            export = _Export(database)
            if not any(table.startswith(("CUPTI_ACTIVITY_KIND_", "NVTX_EVENTS", "TARGET_INFO_")) for table in export.tables):
                raise InputError("it has none of the tables of nsys")
            return _recorded(export, name, date)
    except sqlite3.Error as error:
        raise InputError(f"{shown(name)} is a damaged database ({error}): export it again; {_CURE}") from error
    except InputError as error:
        raise InputError(f"{shown(name)} is no export of nsys, or it is damaged: {error}; {_CURE}") from error
