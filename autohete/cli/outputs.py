"""Checks of output files, made before anything is computed."""

from __future__ import annotations

import os

from autohete.errors import InputError

#: Outputs that are data, each with an example; the others are pictures.
_DATA_OUTPUTS = {
    "--trace": "timeline.json",
    "--predicted-trace": "predicted.json",
    "--schedule": "schedule.txt",
    "--out": "sweep.csv",
    "--json": "answer.json",
    "--html": "answer.html",
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
        _check_writable(path)


def _check_writable(path: str) -> None:
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path):
        reason = "it is a folder"
    elif os.path.exists(path) and not os.path.isfile(path):
        return  # such as /dev/stdout
    elif not os.path.isdir(folder):
        reason = f"there is no folder {folder!r}"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason = f"folder {folder!r} is not writable"
    else:
        return
    raise InputError(f"{path!r} cannot be written: {reason}; give a file in a folder that exists and is writable")
