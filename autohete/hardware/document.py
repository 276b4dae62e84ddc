"""The raw documents of hardware files: where they are, what they take over from their base, and how one changes another."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import reduce
from importlib import resources
from pathlib import Path
from typing import Any

from autohete.errors import InputError, unknown_name
from autohete.quantities import parse_quantity

#: The key of a hardware file that names the preset or file whose figures it takes over.
BASE = "base"
#: The one figure that can be set where a file leaves it out: a limit of the system, not of the machine.
PINNED_MEMORY = "host.pinned_memory"
#: Rates of a link that keep their proportion to its bandwidth if only the bandwidth is changed.
_FOLLOW = ("duplex_bandwidth", "pageable_bandwidth")


@dataclass(frozen=True, slots=True)
class Document:
    """One TOML document as written, without its key ``base``: the preset's name or the file's path, and its tables."""

    label: str
    tables: Mapping[str, Any]


def preset_names() -> list[str]:
    """Return the names of the hardware presets that come with the package."""
    folder = resources.files("autohete.hardware") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_chain(source: str) -> list[Document]:
    """Return the document of the preset or file ``source``, then its base, then the base's base, and so on.

    Raises:
        InputError: one of them cannot be read or is not TOML, or is its own base.
    """
    chain: list[Document] = []
    asked: object = source
    folder = Path()  # a path is relative to the file that names it
    while asked is not None:
        try:
            label, text = _read(asked, folder)
            tables = _parse(label, text)
        except InputError as error:
            if not chain:
                raise
            raise InputError(f"base of hardware {chain[-1].label!r}: {error}") from error
        labels = [document.label for document in chain]
        if any(_place(label) == _place(other) for other in labels):
            raise InputError(
                f"hardware {source!r} is based on itself: {' -> '.join([*labels, label])}; remove {BASE!r} from one of these"
            )
        asked = tables.pop(BASE, None)
        folder = Path(label).parent
        chain.append(Document(label, tables))
    return chain


def _place(label: str) -> str:
    """Return what two labels of the same document have in common."""
    return label if label in preset_names() else os.path.realpath(label)


def _read(asked: object, folder: Path) -> tuple[str, str]:
    """Return the label and the text of a preset, by name, or of a file, by its path from ``folder``."""
    if not isinstance(asked, str):
        raise InputError(f"{BASE} is {asked!r}: give a preset's name or the path of a TOML file as text")
    try:
        if asked in preset_names():
            preset = resources.files("autohete.hardware") / "presets" / f"{asked}.toml"
            return asked, preset.read_text(encoding="utf-8")
        if asked.endswith(".toml") or "/" in asked:
            path = folder / asked
            return str(path), path.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"hardware file {asked!r} cannot be read: {reason}; give a preset or a TOML file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"hardware file {asked!r} is not UTF-8 text: give a TOML file") from error
    except ValueError as error:  # a NUL in the path
        raise InputError(f"hardware file {asked!r} cannot be read: {error}; give a preset or a TOML file") from error
    raise unknown_name("hardware", asked, [*preset_names(), "FILE.toml"])


def _parse(label: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, a number of thousands of digits
        raise InputError(f"hardware file {label!r} is not valid TOML: {str(error)[:200]}") from error


def combine(chain: Sequence[Document]) -> Mapping[str, Any]:
    """Return the figures of the first document over those of its bases."""
    return reduce(changed, (document.tables for document in reversed(chain)))


def changed(document: Mapping[str, Any], changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``document`` with ``changes``.

    A figure is replaced as a whole, because the source, date and range of another value say nothing about the new one. The
    other rates of a link whose bandwidth changes keep their proportion to it, unless they are given too: a faster link is also
    faster in duplex.
    """
    merged = _merge(document, changes)
    for direction in ("h2d", "d2h"):
        before, given, after = (_tables(node, "links", direction) for node in (document, changes, merged))
        factor = _factor(before.get("bandwidth"), given.get("bandwidth"))
        for name in _FOLLOW:
            if factor is not None and name in before and name not in given:
                after[name] = _scaled(before[name], factor, f"links.{direction}.bandwidth")
    return merged


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {key: _merge(node, {}) if isinstance(node, Mapping) else node for key, node in base.items()}
    for key, node in changes.items():
        below = merged.get(key)
        if isinstance(node, Mapping):
            node = _merge(below if isinstance(below, Mapping) and not _is_figure(below) else {}, node)
        merged[key] = node
    return merged


def _is_figure(node: object) -> bool:
    return isinstance(node, Mapping) and "value" in node


def _tables(document: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """Return a table of ``document``; empty if it is not there."""
    node: Any = document
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def _factor(before: Any, after: Any) -> float | None:
    """Return how much faster ``after`` is; None if it is as fast, or if one of the two is not a bandwidth."""
    try:
        factor = parse_quantity(after["value"], "bandwidth") / parse_quantity(before["value"], "bandwidth")
    except (InputError, KeyError, TypeError):
        return None  # validation reports the fault
    return None if factor == 1 else factor


def _scaled(figure: Any, factor: float, why: str) -> Any:
    """Return the figure of a bandwidth, its range too, multiplied by ``factor``."""

    def scale(text: str) -> str:
        return f"{parse_quantity(text, 'bandwidth') * factor / 1e9:.15g}GB/s"

    try:
        scaled = {**figure, "value": scale(figure["value"]), "source": f"in proportion to {why}; before: {figure['source']}"}
        if "range" in figure:
            scaled["range"] = [scale(end) for end in figure["range"]]
    except (InputError, KeyError, TypeError):
        return figure  # validation reports the fault
    return scaled


def overridden(document: Mapping[str, Any], overrides: Mapping[str, str]) -> Mapping[str, Any]:
    """Return ``document`` with the figures ``overrides``, dotted key -> text with unit.

    Raises:
        InputError: ``document`` has no such figure, or the figure is a plain number and the text is not.
    """
    known = [*figure_keys(document), PINNED_MEMORY]
    changes: dict[str, Any] = {}
    for key, text in overrides.items():
        if key not in known:
            raise unknown_name("hardware figure", key, known)
        *tables, name = key.split(".")
        node = changes
        for table in tables:
            node = node.setdefault(table, {})
        node[name] = {"value": _number_like(document, key, text), "source": "an override", "date": date.today().isoformat()}
    return changed(document, changes)


def _number_like(document: Mapping[str, Any], key: str, text: str) -> int | float | str:
    """Return ``text``, as a number if figure ``key`` of ``document`` has no unit."""
    figure = find(document, key)
    if figure is None or isinstance(figure["value"], str):
        return text
    try:
        return int(text) if text.isdecimal() and len(text) < 20 else float(text)
    except ValueError:
        raise InputError(f"{key} is a plain number, not {text!r}: write it such as {figure['value']}") from None


def find(document: Mapping[str, Any], key: str) -> Any:
    """Return what ``document`` has at a dotted key; None if nothing."""
    node: Any = document
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def figure_keys(document: Mapping[str, Any]) -> list[str]:
    """Return the dotted keys of all figures in a raw document."""

    def walk(node: Mapping[str, Any], prefix: str) -> list[str]:
        found: list[str] = []
        for key, child in node.items():
            if isinstance(child, Mapping):
                found += [f"{prefix}{key}"] if _is_figure(child) else walk(child, f"{prefix}{key}.")
        return found

    return walk(document, "")
