"""Results as tables: frames of pandas, and HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from autohete.errors import InputError

if TYPE_CHECKING:
    from pandas import DataFrame


def frame(rows: Iterable[Mapping[str, Any]]) -> DataFrame:
    """Return rows as a frame, a column for each key.

    Raises:
        InputError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise InputError("a frame needs pandas: pip install 'autohete[frames]', or use to_dict()") from error
    return pandas.DataFrame.from_records([dict(row) for row in rows])


def html_table(title: str, rows: Iterable[Mapping[str, object]]) -> str:
    """Return rows as an HTML table, with a head if they have more than two columns."""
    cells = [dict(row) for row in rows]
    names = list(cells[0]) if cells else []
    head = "".join(f"<th>{escape(name)}</th>" for name in names) if len(names) > 2 else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(str(row[name]))}</td>" for name in names) + "</tr>" for row in cells)
    return f"<table><caption>{escape(title)}</caption>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def facts_html(title: str, facts: Mapping[str, object]) -> str:
    """Return facts as an HTML table with a row for each."""
    return html_table(title, ({"fact": name, "value": value} for name, value in facts.items()))
