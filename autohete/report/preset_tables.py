"""Tables that describe one hardware or one model, with the sources of its figures, legible at 80 columns."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from pathlib import Path

from rich.console import Console

from autohete.errors import unknown_name
from autohete.hardware import WrittenFigure, left_out, preset_names, read_hardware, written_figures
from autohete.quantities import split_quantity
from autohete.report.tables import console, print_text, table
from autohete.workload import WORKLOADS, BlockRole, Workload
from autohete.workload.config import model_names, model_source, read_model


def print_preset(name: str) -> None:
    """Print one hardware preset, model or workload of the paper.

    Raises:
        InputError: unknown name.
    """
    if name in preset_names():
        print_hardware(name)
    elif name in model_names():
        print_model(read_model(name), model_source(name))
    elif name in WORKLOADS:
        print_model(WORKLOADS[name], None)
    else:
        raise unknown_name("preset", name, [*preset_names(), *WORKLOADS, *model_names()])


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
    homes = list(dict.fromkeys(figure.home for figure in figures))
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
    return f"block: {workload.block(unit)}" if role is BlockRole.TRANSFORMER else str(role)
