"""What does the model predict of runs whose measurements are not there yet?

Command: ``python experiments/published_blind.py [--numbers DIR]``. Machine: any; everything is simulated.

``experiments/published/blind/`` has sources in the form of ``published.py``, with what was measured (``asks``) but without the
measurements, collected by somebody who does not work on the model. Each row gets a prediction of it in its file, which then
stands. With ``--numbers``, measurements from files of the same names (``[[row]]`` with ``name`` and ``measured``) are added to
what was predicted. What cannot be predicted is named. The scores are printed by source.

What would refute it: what ``published.py`` says of blind rows.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

import json
import os
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
from experiments.published import BLIND, FOLDER, VERDICT, checks, predictions, read_source, show_scores

_ROW = re.compile(r"^(?=\[\[row\]\])", re.MULTILINE)


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["row"]
    named = {row["name"]: row for row in rows}
    if len(named) < len(rows):
        raise InputError(f"{path} has {len(rows)} rows with {len(named)} names; give each row a name of its own")
    return named


def add(path: Path, key: str, values: Mapping[str, Mapping[str, object]]) -> None:
    """Write a line ``key = { ... }`` below the names of rows."""
    _rows(path)
    head, *rows = _ROW.split(path.read_text(encoding="utf-8"))
    for i, row in enumerate(rows):
        (name,) = (each["name"] for each in tomllib.loads(row)["row"])
        if name in values:
            given = ", ".join(f"{what} = {json.dumps(value)}" for what, value in values[name].items())
            (line,) = re.findall(r"^name\b.*\n", row, re.MULTILINE)
            rows[i] = row.replace(line, f"{line}{key} = {{ {given} }}\n")
    write_text(path, "".join([head, *rows]))


def predict(path: Path, jobs: int = 1) -> list[str]:
    """Predict what was measured of every row of ``path`` that has no prediction, and its verdict; say what is not predicted.

    Raises:
        InputError: a row without a prediction has been measured, or two rows have one name.
    """
    source = read_source(path)
    rows = [row for row in source.rows if not row.predicted]
    for row in rows:
        if row.measured:
            raise InputError(f"{path}: {row.name!r} has measurements and no prediction; measurements come after it")
    found, missing = {}, []
    for row, (predicted, why) in zip(rows, predictions([(source, row) for row in rows], jobs), strict=True):
        if not predicted:
            missing.append(f"{row.name}: {why}")
            continue
        asked = dict.fromkeys((*row.asks, VERDICT))
        if predicted.keys() != {VERDICT}:
            missing += [f"{row.name}: {what}" for what in asked if what not in predicted]
        numbers = {what: predicted[what] for what in asked if what in predicted}
        found[row.name] = {what: x if isinstance(x, bool) else float(f"{x:.6g}") for what, x in numbers.items()}
    add(path, "predicted", found)
    return missing


def reveal(path: Path, numbers: Path) -> list[str]:
    """Add the measurements of ``numbers`` to the rows of ``path``; say which are left out, because they were not predicted.

    Raises:
        InputError: a row has other measurements.
    """
    rows, found, missing = _rows(path), {}, []
    for name, given in _rows(numbers).items():
        predicted = rows.get(name, {}).get("predicted", {})
        unfit = predicted.keys() == {VERDICT}  # then nothing else can be predicted
        measured = {what: value for what, value in given["measured"].items() if what in predicted or unfit}
        missing += [f"{name}: {what}" for what in given["measured"] if what not in measured]
        if rows.get(name, {}).get("measured", measured) != measured:
            raise InputError(f"{path}: {name!r} has other measurements than {numbers}")
        if measured and "measured" not in rows[name]:
            found[name] = measured
    add(path, "measured", found)
    return missing


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
    jobs = os.cpu_count() or 1
    for path in paths:
        missing = predict(path, jobs) if numbers is None else reveal(path, numbers / path.name)
        for what in missing:
            print_text(out, f"{path.name}: not predicted: {what}")
    show_scores(checks([read_source(path) for path in paths], jobs))


if __name__ == "__main__":
    run_app(App(name="published_blind", default_command=main, help=__doc__))
