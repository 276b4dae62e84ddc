"""The raw documents of hardware files: how they are located, and how they inherit from their base."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache, lru_cache, reduce
from importlib import resources
from pathlib import Path
from typing import Any

from autohete.errors import InputError, unknown_name
from autohete.files import LARGEST_TOML, parse_toml, read_text
from autohete.hardware.pcie import JOIN, joined
from autohete.printable import shown
from autohete.quantities import parse_quantity

#: How the name of a profile ends, which has the hardware that it was measured on.
_PROFILE = ".json"
#: The key of a hardware file that names the preset or file whose figures it takes over.
BASE = "base"
#: The key that lists what a file leaves out of its base, as dotted keys of tables and figures.
WITHOUT = "without"
#: Bytes that a profile may have: some thousands for each unit of its model.
LARGEST_PROFILE = 100_000_000
#: Documents that a hardware file may be based on, one on the other.
_MOST_BASES = 16
#: A figure is ``table.table.figure.value``; tables nested deeper than this mean nothing.
_DEEPEST = 8
#: Figures that can be set where a file leaves them out: a limit of the system, not of the machine, and how nodes are joined.
_ABSENT = ("host.pinned_memory", f"{JOIN}.network_bandwidth", f"{JOIN}.network_latency")
#: Figures of a place that can be set where its table leaves them out.
_ABSENT_OF_PLACE = ("both_bandwidth", "update_bandwidth")
#: Keys that files had before, and what to give instead.
REPLACED = {
    "gpu.attention_share": "attention runs at the rate of its implementation: give gpu.compute_capability, such as 9.0, and "
    "name the implementation with --attention, such as fa2"
}
#: Keys that take a word, not a figure: where the memory is that copies use, how pinned arrays are rounded, and whether GPUs
#: copy to each other directly or through host memory.
WORDS = ("host.numa", "host.pinned_rounding", f"{JOIN}.path")
#: Rates of a link that keep their proportion to its bandwidth if only the bandwidth is changed.
_FOLLOW = ("duplex_bandwidth", "pageable_bandwidth")
#: How the source of a rate begins that was scaled with the bandwidth of its link.
_IN_PROPORTION = "in proportion to "


@dataclass(frozen=True, slots=True)
class Document:
    """One TOML document as written.

    Args:
        label: the preset's name or the file's path.
        tables: its entries, without the keys ``base`` and ``without``.
        without: dotted keys of what it leaves out of its base.
    """

    label: str
    tables: Mapping[str, Any]
    without: tuple[str, ...] = ()


@cache
def preset_names() -> tuple[str, ...]:
    """Return the names of the hardware presets that come with the package."""
    folder = resources.files("autohete.hardware") / "presets"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def presets_like(text: str) -> list[str]:
    """Return the presets whose names have all parts of ``text``, such as ``4090`` or ``RTX 4090``, in any case.

    A part is all of a number or of a word: B300 is no part of gb300. If one preset has just these parts, it is the only one.
    """
    parts = [part for part in re.split(r"[\s_-]+", text.casefold()) if part]
    same = [name for name in preset_names() if name.split("-") == parts]
    return same or [name for name in preset_names() if parts and all(_is_part(part, name) for part in parts)]


def _is_part(part: str, name: str) -> bool:
    before, after = (r"\d" if end.isdecimal() else "[a-z]" for end in (part[0], part[-1]))
    return re.search(f"(?<!{before}){re.escape(part)}(?!{after})", name) is not None


def read_chain(source: str) -> list[Document]:
    """Return the document of the preset or file ``source``, then its base, then the base's base, and so on.

    Raises:
        InputError: one of them cannot be read or is not TOML, is its own base, or leaves out what its base does not have.
    """
    chain: list[Document] = []
    asked: object = source
    folder = Path()  # a path is relative to the file that names it
    while asked is not None:
        try:
            label, text = _read(asked, folder)
            content = _measured(label, text) if label.endswith(_PROFILE) else _toml(label, text)
        except InputError as error:
            if not chain:
                raise
            raise InputError(f"base of hardware {chain[-1].label!r}: {error}") from error
        labels = [document.label for document in chain]
        if any(_place(label) == _place(other) for other in labels):
            raise InputError(
                f"hardware {source!r} is based on itself: {' -> '.join([*labels, label])}; remove {BASE!r} from one of these"
            )
        if len(chain) > _MOST_BASES:
            raise InputError(
                f"hardware {source!r} has more than {_MOST_BASES} bases, one based on the other: combine some of them"
            )
        asked, folder = content.get(BASE), Path(label).parent
        tables = {key: node for key, node in content.items() if key not in (BASE, WITHOUT)}
        chain.append(Document(label, tables, _left_out(label, content.get(WITHOUT, []), asked is not None)))
    for place, document in enumerate(chain):
        _check_without(document, chain[place + 1 :])
    return chain


def _check_depth(label: str, tables: Mapping[str, Any]) -> None:
    """Refuse tables nested so deep that no figure can be there."""
    level = [tables]
    for _ in range(_DEEPEST):
        level = [child for table in level for child in table.values() if isinstance(child, Mapping)]
    if level:
        raise InputError(f"hardware file {label!r} nests tables more than {_DEEPEST} deep: a figure is written [table.figure]")


def _left_out(label: str, keys: object, has_base: bool) -> tuple[str, ...]:
    """Return the keys under ``without`` of the document ``label``."""
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise InputError(
            f'hardware {label!r}: {WITHOUT} is {shown(keys)}: give a list of keys, such as ["interconnect", "places.nvme"]'
        )
    if keys and not has_base:
        raise InputError(
            f"hardware {label!r}: {WITHOUT} leaves {', '.join(keys)} out of a base, but the file has none: remove it, or "
            f"name a {BASE}"
        )
    return tuple(keys)


def _check_without(document: Document, bases: Sequence[Document]) -> None:
    """Refuse to leave out what the bases together do not have, or only a part of a figure."""
    if not document.without:
        return
    have = combine(bases)
    figures = figure_keys(have)
    tables = {key.rsplit(".", depth)[0] for key in figures for depth in range(1, key.count(".") + 1)}
    for key in document.without:
        if key not in figures and key not in tables:
            unknown = unknown_name("key of its base", key, [*tables, *figures])
            raise InputError(f"hardware {document.label!r}: {WITHOUT}: {unknown}")


def _place(label: str) -> str:
    """Return what two labels of the same document have in common."""
    return label if label in preset_names() else os.path.realpath(label)


def _read(asked: object, folder: Path) -> tuple[str, str]:
    """Return the label and the text of a preset, by name, or of a file, by its path from ``folder``."""
    if not isinstance(asked, str):
        raise InputError(f"{BASE} is {shown(asked)}: give a preset's name or the path of a TOML file as text")
    if asked in preset_names():
        preset = resources.files("autohete.hardware") / "presets" / f"{asked}.toml"
        return asked, preset.read_text(encoding="utf-8")
    if asked.endswith((".toml", _PROFILE)) or "/" in asked:
        path = str(folder / asked)
        limit = LARGEST_PROFILE if asked.endswith(_PROFILE) else LARGEST_TOML
        return path, read_text(path, "hardware file", "give a preset, a TOML file or a profile", limit)
    raise unknown_name("hardware", asked, [*preset_names(), "FILE.toml"], "autohete presets hardware")


@lru_cache(maxsize=64)
def _toml(label: str, text: str) -> Mapping[str, Any]:
    """Return the tables in ``text``. The settings of a sweep read the same preset thousands of times."""
    try:
        tables = parse_toml(text)
    except ValueError as error:
        raise InputError(f"hardware file {label!r} is not valid TOML: {str(error)[:200]}") from error
    _check_depth(label, tables)
    return tables


def _measured(label: str, text: str) -> Mapping[str, Any]:
    """Return the hardware that a profile was measured on."""
    try:
        profile = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"hardware file {label!r} is not valid JSON: {str(error)[:200]}") from error
    hardware = profile.get("hardware") if isinstance(profile, dict) else None
    if not isinstance(hardware, dict):
        raise InputError(f"{label!r} has no table of hardware: give a TOML file, or a profile that autohete profile wrote")
    _check_depth(label, hardware)
    return hardware


def combine(chain: Sequence[Document]) -> Mapping[str, Any]:
    """Return the figures of the first document over those that it takes over from its bases."""
    start: Mapping[str, Any] = {}
    return reduce(lambda below, document: changed(_dropped(below, document.without), document.tables), reversed(chain), start)


def _dropped(document: Mapping[str, Any], keys: Sequence[str]) -> Mapping[str, Any]:
    """Return a copy of ``document`` without some dotted keys."""
    left = _merge(document, {})
    for key in keys:
        *tables, name = key.split(".")
        _tables(left, *tables).pop(name, None)
    return left


def changed(document: Mapping[str, Any], changes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``document`` with ``changes``.

    A figure is replaced as a whole, because the source, date and range of another value do not apply to the new one. The
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
        scaled = {**figure, "value": scale(figure["value"]), "source": f"{_IN_PROPORTION}{why}; before: {figure['source']}"}
        if "range" in figure:
            scaled["range"] = [scale(end) for end in figure["range"]]
    except (InputError, KeyError, TypeError):
        return figure  # validation reports the fault
    return scaled


def follows(source: str) -> str | None:
    """Return the key that a rate was scaled with, by the source of that rate; None if the rate was given."""
    return source.removeprefix(_IN_PROPORTION).partition(";")[0] if source.startswith(_IN_PROPORTION) else None


def settable(figures: Iterable[str]) -> list[str]:
    """Return the dotted keys that can be set where a hardware has ``figures``."""
    figures = tuple(figures)
    places = dict.fromkeys(key.split(".")[1] for key in figures if key.startswith("places."))
    absent = [f"places.{place}.{name}" for place in places for name in _ABSENT_OF_PLACE]
    return list(dict.fromkeys([*figures, *_ABSENT, *absent, *WORDS]))


def overridden(document: Mapping[str, Any], overrides: Mapping[str, str]) -> Mapping[str, Any]:
    """Return ``document`` with the figures ``overrides``, dotted key -> text with unit, or the word of one of :data:`WORDS`.

    Raises:
        InputError: ``document`` has no such figure, because unified hardware has no host or for another reason, or the figure
            is a plain number and the text is not.
    """
    with_join = joined(document)
    known = settable(figure_keys(with_join))
    changes: dict[str, Any] = {}
    for key, text in overrides.items():
        if document.get("unified") is True and key.partition(".")[0] in ("host", "links"):
            raise InputError(f"{key} cannot be set: the hardware is unified, with one pool of memory: set gpu.memory instead")
        if key in REPLACED:
            raise InputError(f"{key} is no longer a figure: {REPLACED[key]}")
        if key not in known:
            raise unknown_name("hardware figure", key, known, "autohete hardware show NAME")
        *tables, name = key.split(".")
        node = changes
        for table in tables:
            node = node.setdefault(table, {})
        node[name] = (
            text
            if key in WORDS
            else {"value": _number_like(with_join, key, text), "source": "an override", "date": date.today().isoformat()}
        )
    join = changes.pop(JOIN, None)
    after = joined(changed(document, changes))  # the default over PCIe follows the links
    return after if join is None else changed(after, {JOIN: join})


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
        keys: list[str] = []
        for key, child in node.items():
            if isinstance(child, Mapping):
                keys += [f"{prefix}{key}"] if _is_figure(child) else walk(child, f"{prefix}{key}.")
        return keys

    return walk(document, "")
