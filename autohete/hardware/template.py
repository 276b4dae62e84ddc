"""The text of a new hardware file: a base, and every figure that it may change, commented out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from autohete.errors import InputError
from autohete.hardware.document import WITHOUT, combine, find, preset_names, read_chain
from autohete.hardware.pcie import DEFAULT
from autohete.hardware.schema import HardwareFile, WrittenFigure, known_keys, read_hardware, written_figures
from autohete.printable import printable, shown

_HEAD = """\
# This hardware has all figures of its base, except those given here. To give one, remove the "#" before its lines and fill in
# its source and date; "base:" shows the value that it replaces. Rates of a link follow its bandwidth unless they are given.
# Then: autohete hardware check FILE
"""


def new_hardware_text(path: str, base: str) -> str:
    """Return the text of a hardware file at ``path`` that is based on ``base``, a preset's name or a file's path.

    Raises:
        InputError: ``base`` is not valid, or its path cannot be written in a file.
    """
    document, figures = read_hardware(base), {each.key: each for each in written_figures(base) if each.home != DEFAULT}
    lines = [
        *_based(path, base),
        f"title = {_toml(f'Based on {document.name}')}",
    ]
    figure_keys, model_keys = known_keys([*document.places] or ["nvme"])
    optional = [f"places.{name}" for name in document.places]
    optional += [key for key in ("interconnect", "emulation") if find(combine(read_chain(base)), key) is not None]
    lines += ["", "# What the base has and this hardware has not: tables or figures.", f"#{WITHOUT} = {json.dumps(optional)}"]
    lines += ["", "# CPU and GPU have one pool of memory, gpu.memory: then without links and host.", "#unified = true"]
    lines += ["", *(f"#{key} = {_toml(_model(document, key))}" for key in model_keys)]
    for key in figure_keys:
        lines += ["", *_figure(key, figures.get(key))]
    return _HEAD + "\n".join(lines) + "\n"


def based_text(path: str, base: str, title: str, figures: Mapping[str, object]) -> str:
    """Return the text of a hardware file at ``path`` with ``figures`` over those of ``base``.

    Args:
        path: where the file will be.
        base: a preset's name or a file's path.
        title: one line that describes the hardware.
        figures: dotted key -> value, source, date and range, as a file has them; or a word.

    Raises:
        InputError: the path of ``base`` cannot be written in a file.
    """
    lines = [*_based(path, base), f"title = {_toml(printable(title)[:200])}"]
    lines += [f"{key} = {_toml(word)}" for key, word in figures.items() if isinstance(word, str)]
    for key, figure in figures.items():
        if isinstance(figure, Mapping):
            lines += ["", f"[{key}]", *(f"{part} = {json.dumps(value, ensure_ascii=False)}" for part, value in figure.items())]
    return "\n".join(lines) + "\n"


def hardware_name(path: str) -> str:
    """Return a name for the hardware in a file at ``path``."""
    return re.sub(r"[^\w.+-]", "-", Path(path).stem)[:100] or "hardware"


def _based(path: str, base: str) -> list[str]:
    """Return the lines that name the base and the hardware."""
    if not base.isprintable():
        raise InputError(f"base {shown(base)} cannot be named in a file: give it a name of printable text")
    named = base if base in preset_names() else _relative(base, path)
    return [f"base = {_toml(named)}", f"name = {_toml(hardware_name(path))}"]


def _figure(key: str, figure: WrittenFigure | None) -> list[str]:
    """Return the lines of one figure; None if the base does not have it."""
    if figure is None:
        before, value = "none", '""'
    else:
        value = json.dumps(figure.value)
        ends = f", range {json.dumps(figure.range)}" if figure.range is not None else ""
        before = f"{value}{ends}, {figure.date}"
    return [f"# base: {before}", f"#[{key}]", f"#value = {value}", '#source = ""', '#date = ""']


def _model(document: HardwareFile, key: str) -> str:
    *tables, name = key.split(".")
    there: object = document
    for table in tables:
        there = there.get(table) if isinstance(there, dict) else getattr(there, table)
    return getattr(there, name, "")


def _relative(base: str, path: str) -> str:
    """Return the path of ``base`` from the folder of ``path``; with a slash, which distinguishes it from a preset's name."""
    return os.path.join(".", os.path.relpath(os.path.realpath(base), os.path.dirname(os.path.realpath(path))))


def _toml(text: str) -> str:
    """Return ``text`` as a TOML string: one of JSON, with DEL escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
