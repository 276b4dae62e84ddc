"""Tables of what can be named, and of one hardware or one model with the sources of its figures, legible at 80 columns."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

from rich.console import Console

from autohete.errors import InputError, suggestion, unknown_name
from autohete.hardware import WrittenFigure, left_out, preset_names, read_hardware, written_figures
from autohete.hardware.pcie import DEFAULT
from autohete.policies import POLICIES
from autohete.quantities import split_quantity
from autohete.report.tables import FittedTable, console, print_text, table
from autohete.workload import WORKLOADS, BlockRole, Workload
from autohete.workload.config import bundled_name, model_names, model_source, read_model
from autohete.workload.model import Experts


def print_presets(kinds: tuple[str, ...] = (), word: str = "") -> None:
    """Print what can be named on the command line.

    Args:
        kinds: of :data:`KINDS`; none: all.
        word: print only rows that contain all parts of it, whatever their case and the characters between.

    Raises:
        InputError: there is no such row.
    """
    out, parts = console(), [part for part in re.split(r"[\s_-]+", word.casefold()) if part]
    some, names = False, []
    for kind in kinds or KINDS:
        shown, rows = KINDS[kind]()
        for row in rows:
            names.append(row[0])
            if all(part in " ".join(row).casefold() for part in parts):
                shown.add_row(*row)
        if shown.rows:
            out.print(shown)
            some = True
    if not some:
        raise InputError(f"none of the {' or '.join(kinds)} has {word!r}: give a part of a name{suggestion(word, names)}")


_Rows = tuple[FittedTable, Iterator[tuple[str, ...]]]


def _models() -> _Rows:
    columns = ["name", "parameters", "hidden", "blocks", "heads", "experts", "vocabulary"]
    return table("models (--model)", columns, give_way=["vocabulary", "hidden"]), map(_model_row, model_names())


def _model_row(name: str) -> tuple[str, ...]:
    w = read_model(name)
    last = w.block(w.unit_count - 2)  # of blocks that differ, the usual one is last
    experts = last.feed_forward
    routed = f"{experts.active} of {experts.count}" if isinstance(experts, Experts) else "-"
    heads = str(last.mixer).partition(" ")[0]
    sizes = (str(w.hidden_size), str(w.transformer_blocks), heads, routed, str(w.vocabulary_size))
    return name, f"{w.parameters / 1e9:.2f}B", *sizes


def _workloads() -> _Rows:
    columns = ["name", "parameters", "hidden", "blocks", "heads", "vocabulary"]
    rows = (
        (w.name, f"{w.parameters / 1e9:.2f}B", *map(str, (w.hidden_size, w.transformer_blocks, w.heads, w.vocabulary_size)))
        for w in WORKLOADS.values()
    )
    return table("workloads of the paper (--workload)", columns), rows


def _nodes() -> _Rows:
    return table("hardware", ["name", "what it is"], left=2), ((name, read_hardware(name).title) for name in preset_names())


def _policies() -> _Rows:
    rows = (
        (name, ", ".join(f"{field.name}={flag_text(field.default)}" for field in dataclasses.fields(system)))
        for name, system in POLICIES.items()
    )
    return table("policies", ["name", "flags (with their defaults)"], left=2), rows


def flag_text(value: object) -> str:
    """The value of a flag as it is given."""
    return {True: "on", False: "off", None: "auto"}[value] if value is None or isinstance(value, bool) else str(value)


#: Kinds of presets -> table and rows, whose first cell is the name.
KINDS: dict[str, Callable[[], _Rows]] = {
    "models": _models,
    "workloads": _workloads,
    "hardware": _nodes,
    "policies": _policies,
}


def print_preset(name: str) -> None:
    """Print one hardware preset, model or workload of the paper.

    Raises:
        InputError: unknown name.
    """
    if name in preset_names():
        print_hardware(name)
    elif name in WORKLOADS:
        print_model(WORKLOADS[name], None)
    elif (model := bundled_name(name)) is not None:
        print_model(read_model(model), model_source(model))
    else:
        raise unknown_name("preset", name, [*preset_names(), *WORKLOADS, *model_names()], "autohete presets")


def print_hardware(source: str | Path) -> None:
    """Print all figures of a preset or a hardware file, a table for each part, with their sources below.

    Raises:
        InputError: as :func:`autohete.hardware.read_hardware`.
    """
    out, figures = console(), written_figures(source)
    document = read_hardware(source)
    notes = document.hardware().remarks
    print_text(out, f"{document.name}: {document.title}")
    if document.unified:
        print_text(out, "unified: CPU and GPU have one pool of memory, gpu.memory, and nothing is copied")
    elif document.host is not None and document.host.numa == "far":
        print_text(out, "host.numa is far: copies use memory of another domain, at links.*.far_bandwidth")
    for line in left_out(source):
        print_text(out, line)
    print_text(out, "")
    homes = {figure.home for figure in figures} - {DEFAULT}
    for part, own in groupby(figures, key=lambda figure: figure.key.rpartition(".")[0]):
        model = getattr(getattr(document, part, None), "model", None)  # links have none
        _print_part(out, part if model is None else f"{part}: {model}", list(own), several=len(homes) > 1)
    for note in notes:
        print_text(out, f"note: {note}")


def _print_part(out: Console, title: str, figures: list[WrittenFigure], *, several: bool) -> None:
    """Print one part; with ``several`` files, a column names the one that gives each figure."""
    columns = ["figure", "value", "range", "date", *(["from"] if several else [])]
    shown = table(title, columns, remark=several, give_way=["from"])
    for figure in figures:
        home = [Path(figure.home).name] if several else []
        shown.add_row(_name(figure), _readable(figure.value), _range(figure), figure.date, *home)
    out.print(shown)
    for figure in figures:
        print_text(out, f"  {_name(figure)}: {figure.source}", style="dim", indent=0)
    out.print()


def _name(figure: WrittenFigure) -> str:
    return figure.key.rpartition(".")[2]


def _range(figure: WrittenFigure) -> str:
    """Return both ends, with their unit once if it is the same."""
    if figure.range is None:
        return "-"
    low, high = map(_readable, figure.range)
    number, _, unit = low.partition(" ")
    return f"{number if unit == high.partition(' ')[2] else low} to {high}"


def _readable(written: str | float) -> str:
    """Return a figure with at most six digits and a blank before its unit."""
    parts = split_quantity(str(written))
    assert parts is not None  # it has been validated
    return f"{float(parts[0]):.6g} {parts[1]}".rstrip()


def print_model(workload: Workload, source: str | None) -> None:
    """Print the sizes of a model: of the whole, and of its embedding, its blocks and its head."""
    out, w = console(), workload
    sizes = table(f"{w.name}: {w.parameters / 1e9:.2f}B parameters", ["figure", "value"])
    for name, value in (
        ("hidden size", w.hidden_size),
        ("blocks", w.transformer_blocks),
        ("vocabulary", w.vocabulary_size),
        ("head's matrix", "the embedding's" if w.tied_embeddings else "its own"),
    ):
        sizes.add_row(name, str(value))
    out.print(sizes)
    parts = table("its parts", ["part", "count", "parameters each", "of all"])
    alike = Counter((_part(w, unit), w.unit_parameters(unit)) for unit in range(w.unit_count))
    for (part, parameters), count in alike.items():
        share = f"{100 * count * parameters / w.parameters:.1f} %"
        parts.add_row(part, str(count), f"{parameters:,}", share)
    out.print(parts)
    if source is not None:
        print_text(out, f"source: {source}")


def _part(workload: Workload, unit: int) -> str:
    role = workload.role(unit)
    return f"block: {workload.described(unit)}" if role is BlockRole.TRANSFORMER else str(role)
