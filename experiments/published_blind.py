"""What does the model predict of runs whose measurements are not there yet?

Command: ``python experiments/published_blind.py [--numbers DIR]``. Machine: any; everything is simulated.

``experiments/published/blind/`` has sources in the form of ``published.py`` without measurements, collected by somebody who did
not make the model. Every row without a prediction gets one in its file. With ``--numbers``, measurements from files of the same
names (``[[row]]`` with ``name`` and ``measured``) are added to rows that have a prediction, which then stands. The scores are
printed by source.

What would refute it: what ``published.py`` says of blind rows.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cyclopts import App

from autohete.cli.app import run_app
from autohete.errors import InputError
from autohete.files import write_text
from autohete.report.tables import console, print_text
from experiments.published import BLIND, FOLDER, VERDICT, checks, read_source, show_scores

_ROW = re.compile(r"^(?=\[\[row\]\])", re.MULTILINE)


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["row"]
    named = {row["name"]: row for row in rows}
    if len(named) < len(rows):
        raise InputError(f"{path} has {len(rows)} rows with {len(named)} names; give each row a name of its own")
    return named


def add(path: Path, key: str, values: Mapping[str, Mapping[str, object]]) -> None:
    """Write a line ``key = { ... }`` below the names of rows."""
    head, *rows = _ROW.split(path.read_text(encoding="utf-8"))
    for i, row in enumerate(rows):
        (name,) = (each["name"] for each in tomllib.loads(row)["row"])
        if name in values:
            given = ", ".join(f"{what} = {json.dumps(value)}" for what, value in values[name].items())
            (line,) = re.findall(r"^name\b.*\n", row, re.MULTILINE)
            rows[i] = row.replace(line, f"{line}{key} = {{ {given} }}\n")
    write_text(path, "".join([head, *rows]))


def predict(path: Path) -> int:
    """Predict every row of ``path`` that has no prediction; return their number.

    Raises:
        InputError: a row without a prediction has been measured.
    """
    rows, source = _rows(path), read_source(path)
    found = {}
    for row in source.rows:
        if row.predicted:
            continue
        if row.measured:
            raise InputError(f"{path}: {row.name!r} has measurements and no prediction; measurements come after it")
        predicted, _ = source.predict(row, longest=True)
        found[row.name] = {what: x if isinstance(x, bool) else float(f"{x:.6g}") for what, x in predicted.items()}
    assert found.keys() <= rows.keys()
    if found:
        add(path, "predicted", found)
    return len(found)


def reveal(path: Path, numbers: Path) -> int:
    """Add the measurements of ``numbers`` to the rows of ``path``; return how many were added.

    Raises:
        InputError: there is no such row, or it has no prediction of what was measured, or other measurements.
    """
    rows, found = _rows(path), {}
    for name, given in _rows(numbers).items():
        row, measured = rows.get(name, {}), given["measured"]
        predicted = row.get("predicted", {})
        missing = measured.keys() - predicted.keys()
        if not predicted or (missing and set(predicted) != {VERDICT}):
            what = ", ".join(sorted(missing)) or "anything"
            raise InputError(f"{path}: {name!r} has no prediction of {what}; predict it first")
        if row.get("measured", measured) != measured:
            raise InputError(f"{path}: {name!r} has other measurements than {numbers}")
        if "measured" not in row:
            found[name] = measured
    if found:
        add(path, "measured", found)
    return len(found)


def main(*, folder: Path = FOLDER / BLIND, numbers: Path | None = None) -> None:
    """Predict the rows that have no prediction, or add their measurements, and print the scores.

    Parameters
    ----------
    folder:
        The sources.
    numbers:
        Folder of files with measurements, to be added to rows that have a prediction.
    """
    out = console()
    paths = sorted(folder.glob("*.toml"))
    if not paths:
        raise InputError(f"{folder} has no *.toml; put the sources there")
    for path in paths:
        if numbers is None:
            print_text(out, f"{path.name}: {predict(path)} rows predicted")
        elif (numbers / path.name).is_file():
            print_text(out, f"{path.name}: {reveal(path, numbers / path.name)} rows measured")
    show_scores(checks([read_source(path) for path in paths]))


if __name__ == "__main__":
    run_app(App(name="published_blind", default_command=main, help=__doc__))
