"""Which policy is best where, from the rows of a sweep: lines with crossovers over one key, a map over two."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

from autohete.errors import InputError
from autohete.quantities import UNITS, parse_quantity
from autohete.report.records import Row
from autohete.report.tables import console, print_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POLICY = "policy"
_WRITTEN = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-z/]*)\s*")
#: Units of options whose values have none.
_COUNTED = {
    "batch-size": "sequences",
    "micro-batches": "batches per iteration",
    "sequence-length": "tokens",
    "gpus": "GPUs",
    "blocks": "transformer blocks",
    "hidden": "elements",
    "vocabulary": "tokens",
}
#: Relative differences below this are none.
_EQUAL = 1e-9
#: A map with more cells shows the gain by its shade only.
_MOST_NUMBERS = 150


@dataclass(frozen=True, slots=True)
class Scale:
    """A key as an axis: its values as text, from the smallest, the same as numbers, and their unit."""

    key: str
    texts: tuple[str, ...]
    numbers: tuple[float, ...]
    unit: str

    @property
    def label(self) -> str:
        """The key with its unit."""
        unit = self.unit or _COUNTED.get(self.key, "")
        return f"{self.key} ({unit})" if unit else self.key

    def text(self, number: float) -> str:
        """Write a number with its unit."""
        return f"{number:.3g} {self.unit}".rstrip()


def scales(values: Mapping[str, Sequence[str]]) -> list[Scale]:
    """Return the axes of a plot over all keys with several values, except the policy.

    Raises:
        InputError: not one or two keys, or values that are no numbers.
    """
    axes = [_scale(key, texts) for key, texts in values.items() if key != POLICY and len(texts) > 1]
    if len(axes) not in (1, 2):
        has = ", ".join(scale.key for scale in axes) or "none"
        raise InputError(f"a plot shows one or two keys with several values, not {len(axes)} ({has}): vary one or two")
    return axes


def _scale(key: str, texts: Sequence[str]) -> Scale:
    matches = [_WRITTEN.fullmatch(text) for text in texts]
    units = {match[2] if match else None for match in matches}
    if units == {None} or None in units:
        wrong = next(text for text, match in zip(texts, matches, strict=True) if match is None)
        raise InputError(f"a plot needs numbers: {key} has the value {wrong!r}; plot another key, or policies")
    if len(units) == 1:
        unit = next(iter(units)) or ""
        numbers = [float(match[1]) for match in matches if match]
    else:
        unit, numbers = _in_one_unit(key, texts)
    order = sorted(range(len(texts)), key=numbers.__getitem__)
    return Scale(key, tuple(texts[i] for i in order), tuple(numbers[i] for i in order), unit)


def _in_one_unit(key: str, texts: Sequence[str]) -> tuple[str, list[float]]:
    for dimension, factors in UNITS.items():
        try:
            numbers = [parse_quantity(text, dimension) for text in texts]
        except InputError:
            continue
        match = _WRITTEN.fullmatch(texts[-1])
        assert match is not None
        return match[2], [number / factors[match[2]] for number in numbers]
    raise InputError(f"the values of {key} have different units and cannot be plotted: write all in one unit")


@dataclass(frozen=True, slots=True)
class Metric:
    """The compared quantity: a column of the rows, its label, and whether less is better."""

    column: str
    label: str
    less: bool

    def better(self, a: float, b: float) -> bool:
        """Whether ``a`` is better than ``b``."""
        return a < b if self.less else a > b


_SECONDS = Metric("iteration_seconds", "iteration time (s)", less=True)
_RATE = Metric("tokens_per_second", "throughput (tokens/s)", less=False)


def metric_of(rows: Iterable[Row]) -> Metric:
    """Iteration time where all rows process as many tokens in one, throughput otherwise."""
    tokens = [float(row["tokens_per_second"]) * float(row["iteration_seconds"]) for row in rows if row["iteration_seconds"]]
    return _SECONDS if not tokens or max(tokens) - min(tokens) < 1e-6 * max(tokens) else _RATE


@dataclass(frozen=True, slots=True)
class Crossover:
    """Where, as the key grows, ``winner`` becomes better than ``loser``: interpolated between the neighbouring values.

    Args:
        at, value: place on the axis, and what both reach there.
        best: whether no other policy is better there.
    """

    winner: str
    loser: str
    at: float
    value: float
    best: bool


Line = dict[float, float]


def lines(rows: Iterable[Row], scale: Scale, metric: Metric) -> dict[str, Line]:
    """Return the value of each policy by the number on the axis; what does not fit is left out."""
    numbers = dict(zip(scale.texts, scale.numbers, strict=True))
    curves: dict[str, Line] = {}
    for row in rows:
        line = curves.setdefault(row[POLICY], {})
        if row[metric.column]:
            line[numbers[row[scale.key]]] = float(row[metric.column])
    return curves


def crossovers(curves: Mapping[str, Line], metric: Metric) -> list[Crossover]:
    """Return all crossovers of two policies, from the smallest number."""
    some = [one for a, b in combinations(curves, 2) for one in _crossings(a, b, curves, metric)]
    return sorted(some, key=lambda one: one.at)


def _crossings(a: str, b: str, curves: Mapping[str, Line], metric: Metric) -> Iterator[Crossover]:
    before: tuple[float, float] | None = None  # the last number at which they differ, and by how much
    equal: float | None = None  # the first number since at which they do not
    for x in sorted(curves[a].keys() & curves[b].keys()):
        difference = curves[a][x] - curves[b][x]
        if abs(difference) <= _EQUAL * abs(curves[a][x]):
            equal = x if equal is None else equal
            continue
        if before is not None and (before[1] > 0) != (difference > 0):
            at = before[0] + (x - before[0]) * before[1] / (before[1] - difference) if equal is None else equal
            value = _between(curves[a], at)
            assert value is not None
            first = metric.better(curves[a][x], curves[b][x])
            others = (_between(line, at) for name, line in curves.items() if name not in (a, b))
            best = not any(other is not None and metric.better(other, value) for other in others)
            yield Crossover(a if first else b, b if first else a, at, value, best)
        before, equal = (x, difference), None


def _between(line: Line, x: float) -> float | None:
    """Interpolate; None outside of the line."""
    left, right = max((p for p in line if p <= x), default=None), min((p for p in line if p >= x), default=None)
    if left is None or right is None:
        return None
    share = (x - left) / (right - left) if right > left else 0.0
    return line[left] + share * (line[right] - line[left])


def draw(rows: Sequence[Row], axes: Sequence[Scale], title: str) -> Figure:
    """Draw lines over one axis, or a map over two."""
    from matplotlib.figure import Figure

    from autohete.report.style import as_label, style

    metric = metric_of(rows)
    with style():
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        panel = figure.subplots()
        if len(axes) == 1:
            _draw_lines(panel, lines(rows, axes[0], metric), axes[0], metric)
        else:
            _draw_map(panel, rows, axes, metric)
        panel.set_title(as_label(title), fontsize="medium")
    return figure


def _looks() -> list[tuple[str, str, str]]:
    """Colour, marker and hatch of each policy in turn: also in greyscale no two look alike."""
    from autohete.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION

    colours = (BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY)
    return list(zip(colours, "os^DvPX", ("", "////", "....", "\\\\\\\\", "xxxx", "----", "++++"), strict=True))


def _draw_lines(panel: Axes, curves: Mapping[str, Line], scale: Scale, metric: Metric) -> None:
    looks = _looks()
    for place, (policy, line) in enumerate(curves.items()):
        colour, marker, _ = looks[place % len(looks)]
        dashes = "-" if place < len(looks) else "--"
        missing = len(scale.numbers) - len(line)
        label = f"{policy} (does not fit at {missing} of {len(scale.numbers)})" if missing else policy
        values = [line.get(x, float("nan")) for x in scale.numbers]
        panel.plot(scale.numbers, values, dashes, color=colour, marker=marker, markersize=4, label=label)
    for one in crossovers(curves, metric):
        panel.plot(one.at, one.value, "o", color="black", markersize=10, fillstyle="none")
        if one.best:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.8}
            spot = (one.at, one.value)
            panel.annotate(scale.text(one.at), spot, xytext=(0, 12), textcoords="offset points", ha="center", bbox=box)
    if scale.numbers[0] > 0 and scale.numbers[-1] >= 20 * scale.numbers[0]:
        panel.set_xscale("log")
        panel.set_xticks(scale.numbers, [f"{number:g}" for number in scale.numbers])
        panel.set_xticks([], minor=True)
    panel.set_ylim(bottom=0)
    panel.set_xlabel(scale.label)
    panel.set_ylabel(metric.label)
    panel.legend()


@dataclass(frozen=True, slots=True)
class Best:
    """The best policy of a cell, and by how many percent it is better than the next; None if it is the only one."""

    policy: str
    percent: float | None


def bests(rows: Iterable[Row], axes: Sequence[Scale], metric: Metric) -> dict[tuple[str, ...], Best]:
    """Return the best policy of each cell in which one fits."""
    cells: dict[tuple[str, ...], dict[str, float]] = {}
    for row in rows:
        if row[metric.column]:
            cells.setdefault(tuple(row[axis.key] for axis in axes), {})[row[POLICY]] = float(row[metric.column])
    fastest = {}
    for cell, by in cells.items():
        first, *others = sorted(by, key=by.__getitem__, reverse=not metric.less)
        gain = None
        if others:
            ratio = by[others[0]] / by[first] if metric.less else by[first] / by[others[0]]
            gain = 100 * (ratio - 1)
        fastest[cell] = Best(first, gain)
    return fastest


def _draw_map(panel: Axes, rows: Sequence[Row], axes: Sequence[Scale], metric: Metric) -> None:
    from matplotlib.patches import Patch, Rectangle

    across, up = axes
    looks = _looks()
    policies = list(dict.fromkeys(row[POLICY] for row in rows))
    best = bests(rows, axes, metric)
    numbers = len(across.texts) * len(up.texts) <= _MOST_NUMBERS
    most = max((one.percent or 0.0 for one in best.values()), default=0.0) or 1.0
    for x, right in enumerate(across.texts):
        for y, above in enumerate(up.texts):
            one = best.get((right, above))
            if one is None:
                panel.add_patch(
                    Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor="white", edgecolor="0.7", hatch="xx", linewidth=0)
                )
                continue
            colour, _, hatch = looks[policies.index(one.policy) % len(looks)]
            strength = 0.35 + 0.65 * min((most if one.percent is None else one.percent) / most, 1.0)
            panel.add_patch(
                Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=(colour, strength), edgecolor="white", hatch=hatch, linewidth=0.5)
            )
            if numbers:
                text = "only" if one.percent is None else f"{one.percent:.0f} %"
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.8}
                panel.annotate(text, (x, y), ha="center", va="center", fontsize=7, bbox=box)
    panel.set_xlim(-0.5, len(across.texts) - 0.5)
    panel.set_ylim(-0.5, len(up.texts) - 0.5)
    for axis, scale in ((panel.xaxis, across), (panel.yaxis, up)):
        step = max(1, len(scale.texts) // 12)
        axis.set_ticks(range(0, len(scale.texts), step), [f"{number:g}" for number in scale.numbers[::step]])
        axis.set_label_text(scale.label)
    won = [policy for policy in policies if any(one.policy == policy for one in best.values())]
    handles = [
        Patch(facecolor=looks[place][0], hatch=looks[place][2], edgecolor="white", label=policy)
        for policy in won
        for place in [policies.index(policy) % len(looks)]
    ]
    if len(best) < len(across.texts) * len(up.texts):
        handles.append(Patch(facecolor="white", hatch="xx", edgecolor="0.7", label="none fits"))
    title = "fastest, and by how much against the next"
    panel.figure.legend(handles=handles, loc="outside lower center", ncols=3, title=title)


def print_best(rows: Sequence[Row], axes: Sequence[Scale]) -> None:
    """Print the crossovers over one axis, or where which policy is best over two."""
    out, metric = console(), metric_of(rows)
    if len(axes) == 1:
        (scale,) = axes
        curves = lines(rows, scale, metric)
        for policy, line in curves.items():
            if len(line) < len(scale.numbers):
                print_text(out, f"{policy} does not fit at {len(scale.numbers) - len(line)} of {len(scale.numbers)} values")
        some = crossovers(curves, metric)
        for one in some:
            fastest = ", and is the fastest" if one.best and len(curves) > 2 else ""
            print_text(out, f"{one.winner} overtakes {one.loser} at {scale.key} {scale.text(one.at)}{fastest}")
        if not some and len(curves) > 1:
            print_text(out, f"no policy overtakes another over {scale.key}")
        return
    best = bests(rows, axes, metric)
    total = len(axes[0].texts) * len(axes[1].texts)
    for policy in dict.fromkeys(one.policy for one in best.values()):
        own = [one for one in best.values() if one.policy == policy]
        gains = [one.percent for one in own if one.percent is not None]
        gain = f", by {median(gains):.1f} % in the median, at most {max(gains):.1f} %" if gains else ""
        only = f"; the only one that fits in {len(own) - len(gains)}" if len(own) > len(gains) else ""
        print_text(out, f"{policy} is the fastest in {len(own)} of {total} cells{gain}{only}")
    if len(best) < total:
        print_text(out, f"none fits in {total - len(best)} of {total} cells")
