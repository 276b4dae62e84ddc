"""The file of a sweep: CSV, one row per setting, written row by row; a file that was cut short can be continued.

Each row ends with two digests: one of what the names in the setting stand for (see :func:`sealed`), and one of the row. A file
with a row that has changed, or that answers another question, is not continued. A text that a spreadsheet would compute begins
with an apostrophe.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import get_type_hints

from autohete.errors import InputError
from autohete.files import open_at_once, read_bytes
from autohete.plan import PlanCounts
from autohete.printable import printable
from autohete.report.tables import console, print_text, table
from autohete.simulate.summary import Summary

#: The verdict of a setting that is invalid, such as heads that do not divide the hidden size; ``explanation`` has the reason.
INVALID = "invalid"

Row = dict[str, str]

#: The last column.
DIGEST = "digest"
#: Bytes; a million rows have about as many.
_LARGEST = 2_000_000_000
#: How a text begins that a spreadsheet takes for a formula, perhaps after apostrophes; and what is a number all the same.
_FORMULA, _NUMBER = re.compile(r"'*[=+\-@]"), re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")


def _scalars() -> Iterator[str]:
    for name, hint in get_type_hints(Summary).items():
        kinds = hint.__args__ if isinstance(hint, types.UnionType) else (hint,)
        if PlanCounts in kinds:
            yield from (f"{name}.{count.name}" for count in fields(PlanCounts))
        elif all(isinstance(kind, type) and issubclass(kind, (str, int, float, types.NoneType)) for kind in kinds):
            yield name


#: The columns of an answer: every field of :class:`Summary` that is one number or one text, and the plan's counts.
COLUMNS = tuple(_scalars())


def header_of(keys: Sequence[str]) -> list[str]:
    """Return the header of a sweep over ``keys``: these, the columns of the answer that are not among them, and the digests."""
    return [*keys, *(column for column in COLUMNS if column not in keys), DIGEST]


def answered(key: Mapping[str, str], summary: Summary) -> Row:
    """Return the row of an answer. Numbers are written as in JSON; None is empty."""
    row = {column: _cell(_value(summary, column)) for column in COLUMNS}
    return row | dict(key)


def refused(key: Mapping[str, str], reason: str) -> Row:
    """Return the row of a setting that is invalid."""
    return dict.fromkeys(COLUMNS, "") | {"verdict": INVALID, "explanation": _cell(reason)} | dict(key)


def sealed(row: Row, question: str) -> Row:
    """Return ``row`` with its digests.

    Args:
        row: the answer of a setting.
        question: the digest of what the names in the setting stand for: model, hardware, profile and policy.
    """
    return row | {DIGEST: f"{question}-{_digest_of(row, question)}"}


def question_of(row: Row) -> str:
    """Return the digest of the question that ``row`` answers."""
    return row[DIGEST].partition("-")[0]


def digest(*parts: str) -> str:
    """Return a short digest of some texts."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=6).hexdigest()


def _digest_of(row: Row, question: str) -> str:
    # Parquet does not keep whether a number was written as 1 or as 1.0.
    return digest(question, *(f"{name}={cell.removesuffix('.0')}" for name, cell in sorted(row.items()) if name != DIGEST))


def check_sealed(path: str, number: int, row: Row) -> None:
    """Check that row ``number`` of the file ``path``, counted from 1, is as it was written.

    Raises:
        InputError: it is not.
    """
    if sealed(row, question_of(row)) != row:
        raise InputError(f"{path!r} row {number} is not as it was written: remove it, or choose another file")


def _value(summary: Summary, column: str) -> object:
    value: object = summary
    for name in column.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _cell(value: object) -> str:
    if isinstance(value, str):
        return printable(" ".join(value.split()))
    return "" if value is None else json.dumps(value)


def csv_line(cells: Iterable[str]) -> str:
    """Return a line of CSV, in which no text is a formula of a spreadsheet."""
    text = io.StringIO()
    guarded = (f"'{cell}" if _FORMULA.match(cell) and not _NUMBER.fullmatch(cell) else cell for cell in cells)
    csv.writer(text, lineterminator="\n").writerow(guarded)
    return text.getvalue()


def _read_cell(text: str) -> str:
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def read_rows(path: str, header: Sequence[str]) -> tuple[list[Row], int]:
    """Read the complete rows of a sweep's file.

    Returns:
        The rows, and the number of bytes up to the end of the last one. Without even a complete header: none, and 0.

    Raises:
        InputError: not a file of a sweep with this header, or with a row that has changed since it was written.
    """
    if not os.path.lexists(path):
        return [], 0
    data = read_bytes(path, "file", "give a file written by this sweep", _LARGEST, continued=True)
    end = data.rfind(b"\n") + 1  # no cell has a line end, so a row without one was cut
    if end == 0 and csv_line(header).encode().startswith(data):
        return [], 0
    try:
        lines = list(csv.reader(io.StringIO(data[:end].decode(), newline=""), strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path!r} is not a sweep's file: {error}; choose another file") from error
    columns = lines[0] if lines else []
    if columns != list(header):
        raise InputError(
            f"{path!r} cannot be continued: {difference(columns, header)}; sweep over the same keys, or choose another file"
        )
    for number, line in enumerate(lines, start=1):
        if len(line) != len(header):
            raise InputError(
                f"{path!r} line {number} has {len(line)} cells, not {len(header)}: remove it, or choose another file"
            )
    rows = [dict(zip(header, map(_read_cell, line), strict=True)) for line in lines[1:]]
    for number, row in enumerate(rows, start=1):
        check_sealed(path, number, row)
    return rows, end


def difference(columns: Sequence[str], header: Sequence[str]) -> str:
    """Describe how the header of a file differs from that of this sweep."""
    missing = [name for name in header if name not in columns]
    other = [name for name in columns if name not in header]
    if not (missing or other):
        return "its columns have another order"
    parts = [("it has no column", missing), ("this sweep has no column", other)]
    return " and ".join(f"{says} {', '.join(map(repr, names[:5]))}" for says, names in parts if names)


@contextmanager
def row_writer(path: str, header: Sequence[str], keep: int = 0) -> Iterator[Callable[[Row], None]]:
    """Continue the file ``path`` after its first ``keep`` bytes, which are rows; 0: begin it with the header.

    Each row that is written reaches the file before the next.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        stream = open(path, "ab", buffering=0, opener=open_at_once)  # noqa: SIM115  (closed below)
    except OSError as error:
        raise InputError(f"{path!r} cannot be written: {error.strerror or error}; choose another file") from error
    with stream:
        os.set_blocking(stream.fileno(), True)
        if os.path.isfile(path):  # a device or a pipe cannot be cut
            stream.truncate(keep)

        def write(cells: Sequence[str]) -> None:
            try:
                rest = memoryview(csv_line(cells).encode())
                while rest:  # a full disk takes a part of it
                    rest = rest[stream.write(rest) :]
            except BrokenPipeError:  # the reader has seen enough
                raise
            except OSError as error:
                raise InputError(
                    f"{path!r} cannot be written: {error.strerror or error}; make room and continue it, or choose another file"
                ) from error

        if not keep:
            write(header)
        yield lambda row: write([row[name] for name in header])


@dataclass(slots=True)
class Tally:
    """Statistics of the rows of a sweep: the number with each verdict, and the fastest, in tokens per second."""

    verdicts: Counter[str] = field(default_factory=Counter)
    fastest: Row | None = None

    def add(self, row: Row) -> None:
        """Count a row."""
        self.verdicts[row["verdict"]] += 1
        if row["tokens_per_second"] and (self.fastest is None or _rate(row) > _rate(self.fastest)):
            self.fastest = row


def _rate(row: Row) -> float:
    return float(row["tokens_per_second"])


def print_tally(tally: Tally, varied: Sequence[str], answered: int, seconds: float, path: str) -> None:
    """Print a sweep's end: rows by verdict, speed, and the fastest setting by its ``varied`` keys."""
    out = console()
    total = tally.verdicts.total()
    shown = table(f"{path}: {total:,} row{'s' * (total != 1)}", ["verdict", "rows", "share"])
    for verdict, count in tally.verdicts.most_common():
        shown.add_row(verdict, f"{count:,}", f"{100 * count / total:.0f} %")
    out.print(shown)
    rate = f", {answered / seconds:.3g} settings per second" if answered and seconds else ""
    print_text(out, f"answered now: {answered:,} in {seconds:.1f} s{rate}")
    if tally.fastest is not None:
        where = ", ".join(f"{key}={tally.fastest[key]}" for key in varied) or f"policy={tally.fastest['policy']}"
        print_text(out, f"fastest: {where}: {_rate(tally.fastest):,.0f} tokens/s")
