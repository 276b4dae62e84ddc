"""Checks of output files, made before anything is computed."""

from __future__ import annotations

import os

from autohete.errors import InputError
from autohete.files import check_writable

#: Outputs that are data, each with an example; the others are pictures.
_DATA_OUTPUTS = {
    "--trace": "timeline.json",
    "--predicted-trace": "predicted.json",
    "--schedule": "schedule.txt",
    "--out": "sweep.csv",
    "--json": "answer.json",
    "--html": "answer.html",
    "--hardware-out": "my-node.toml",
    "--profile-out": "measured.json",
    "OUT": "profile.json",
    "FILE": "hardware.toml",
}


def check_outputs(outputs: dict[str, str]) -> None:
    """Check that all ``outputs`` (option -> path) can be written, before anything is computed."""
    files: dict[str, str] = {}
    for option, path in outputs.items():
        other = files.setdefault(os.path.realpath(path), option) if path else option
        if other != option:
            raise InputError(f"{other} and {option} name the same file {path!r}: give each its own")
    for option, path in outputs.items():
        if not path:
            raise InputError(f"{option} is empty: give a file, such as {_DATA_OUTPUTS.get(option, 'timeline.png')}")
        if option not in _DATA_OUTPUTS:
            from autohete.report.style import figure_format

            figure_format(path)
        check_writable(path)
