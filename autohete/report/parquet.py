"""The file of a sweep as Parquet. Needs pyarrow, which is an optional dependency.

A Parquet file can only be read once its end is written. So rows first go into a CSV journal beside it, as they come; at the end
the journal becomes row groups of the file, which appears whole. What is interrupted is continued from both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, get_type_hints

from autohete.errors import InputError
from autohete.files import atomic_write, read_bytes
from autohete.plan import PlanCounts
from autohete.report.records import COLUMNS, Row, check_sealed, difference, read_rows, row_writer
from autohete.simulate.summary import Summary

#: Rows of a group; a reader loads one at a time.
_GROUP = 10_000
#: Bytes.
_LARGEST = 2_000_000_000


def is_parquet(path: str) -> bool:
    """Whether the name ends in ``.parquet``."""
    return path.endswith(".parquet")


def journal_of(path: str) -> str:
    """Return the file that has the rows until the Parquet file is complete."""
    return f"{path}.csv"


def check_pyarrow() -> None:
    """Check that Parquet can be written.

    Raises:
        InputError: pyarrow is not installed.
    """
    _pyarrow()


def _pyarrow() -> tuple[ModuleType, ModuleType]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(
            "a .parquet file needs pyarrow: install it with `pip install 'autohete[parquet]'`, or give a .csv file"
        ) from error
    return pyarrow, pyarrow.parquet


def _kind(name: str, keys: Sequence[str]) -> type:
    """Return what a column holds: bool, int, float or str. Keys are text, since values such as ``8GB`` have units."""
    if name in keys or name not in COLUMNS:
        return str
    first, _, count = name.partition(".")
    hint = get_type_hints(PlanCounts)[count] if count else get_type_hints(Summary)[first]
    kinds = set(getattr(hint, "__args__", (hint,)))
    return next((kind for kind in (bool, float, int) if kind in kinds), str)


def _cell(text: str, kind: type) -> object:
    if kind is str:
        return text
    if not text:
        return None
    return text == "true" if kind is bool else kind(text)


def _schema(header: Sequence[str], keys: Sequence[str]) -> Any:
    arrow, _ = _pyarrow()
    types = {bool: arrow.bool_(), int: arrow.int64(), float: arrow.float64(), str: arrow.string()}
    return arrow.schema([(name, types[_kind(name, keys)]) for name in header])


def read_parquet(path: str, header: Sequence[str]) -> list[Row]:
    """Read the rows of a sweep's Parquet file and of its journal; none if neither exists.

    Raises:
        InputError: not a file of a sweep with this header, or with a row that has changed since it was written.
    """
    return [*_read(path, header), *read_rows(journal_of(path), header)[0]]


def _read(path: str, header: Sequence[str]) -> list[Row]:
    if not os.path.lexists(path):
        return []
    arrow, parquet = _pyarrow()
    data = read_bytes(path, "file", "give a file written by this sweep", _LARGEST, continued=True)
    try:
        table = parquet.read_table(arrow.BufferReader(data))
        values = table.to_pylist()
    except (arrow.ArrowException, OSError, ValueError) as error:  # ValueError: text that is not UTF-8
        problem = str(error).partition("\n")[0]
        raise InputError(f"{path!r} is not a sweep's file: {problem}; choose another file") from error
    if table.column_names != list(header):
        mismatch = difference(table.column_names, header)
        raise InputError(f"{path!r} cannot be continued: {mismatch}; sweep over the same keys, or choose another file")
    rows = [{name: _text(value) for name, value in row.items()} for row in values]
    for number, row in enumerate(rows, start=1):
        check_sealed(path, number, row)
    return rows


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else value if isinstance(value, str) else repr(value)


@contextmanager
def parquet_writer(path: str, header: Sequence[str], keys: Sequence[str]) -> Iterator[Callable[[Row], None]]:
    """Continue the Parquet file ``path``: each row reaches its journal at once, and at the end all are row groups of it."""
    journal = journal_of(path)
    _, kept = read_rows(journal, header)
    with row_writer(journal, header, kept) as write:
        yield write
    rows, _ = read_rows(journal, header)
    schema = _schema(header, keys)
    arrow, parquet = _pyarrow()

    def fill(stream: object) -> None:
        with parquet.ParquetWriter(stream, schema) as writer:
            if os.path.exists(path):
                before = parquet.ParquetFile(path)
                for group in range(before.num_row_groups):
                    writer.write_table(before.read_row_group(group).cast(schema))
            for begin in range(0, len(rows), _GROUP):
                some = rows[begin : begin + _GROUP]
                columns: Mapping[str, list[object]] = {
                    name: [_cell(row[name], _kind(name, keys)) for row in some] for name in header
                }
                writer.write_table(arrow.Table.from_pydict(columns, schema=schema))

    if rows or not os.path.exists(path):
        atomic_write(path, fill)
    os.remove(journal)
