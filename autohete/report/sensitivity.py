"""The effect of each figure alone on the iteration time: CSV, a table, and a tornado plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autohete.quantities import format_seconds
from autohete.report.records import Row, csv_line
from autohete.report.tables import console, print_text, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Bars of a plot, and rows of the table.
_MOST_BARS, _MOST_ROWS = 15, 30
#: Smaller effects, in percent, are none: they are shorter than what two orders of equal tasks can make.
_NOTHING = 0.05


@dataclass(frozen=True, slots=True)
class Moved:
    """One value of one figure under one policy.

    Args:
        key, value, policy: the figure, its value and the policy; ``base`` is the value in the question.
        row: the answer.
        base_seconds: iteration time of the question itself; None if that does not fit.
    """

    key: str
    base: str
    value: str
    policy: str
    row: Row
    base_seconds: float | None

    @property
    def percent(self) -> float | None:
        """Change of the iteration time; None if one of both does not fit."""
        seconds = self.row["iteration_seconds"]
        return 100 * (float(seconds) / self.base_seconds - 1) if seconds and self.base_seconds else None


def effects(rows: Sequence[Row], bases: Mapping[str, str]) -> list[Moved]:
    """Return the moves of answered rows, those of the figure with the largest effect first, then by policy as they came.

    Args:
        rows: answers with ``key``, ``value`` and ``policy``; without a key: the question itself.
        bases: each key's value in the question.
    """
    seconds = {row["policy"]: float(row["iteration_seconds"]) for row in rows if not row["key"] and row["iteration_seconds"]}
    moved = [
        Moved(row["key"], bases[row["key"]], row["value"], row["policy"], row, seconds.get(row["policy"]))
        for row in rows
        if row["key"]
    ]
    largest = {key: max((_weight(one) for one in moved if one.key == key), default=0.0) for key in bases}
    places = {key: place for place, key in enumerate(bases)}
    return sorted(moved, key=lambda one: (-largest[one.key], places[one.key]))


def _weight(one: Moved) -> float:
    """Return the size of an effect; the largest for what fits on one side only."""
    if one.percent is not None:
        return abs(one.percent)
    return float("inf") if bool(one.row["iteration_seconds"]) != (one.base_seconds is not None) else 0.0


def effects_csv(moved: Sequence[Moved]) -> str:
    """Return one row per value and policy."""
    header = ["key", "base", "value", "policy", "verdict", "iteration_seconds", "base_seconds", "percent", "explanation"]
    lines = [csv_line(header)]
    for one in moved:
        numbers = ("" if x is None else repr(x) for x in (one.base_seconds, one.percent))
        row = one.row
        before = (one.key, one.base, one.value, one.policy, row["verdict"], row["iteration_seconds"])
        lines.append(csv_line([*before, *numbers, row["explanation"]]))
    return "".join(lines)


def print_effects(moved: Sequence[Moved], rows: Sequence[Row]) -> None:
    """Print the iteration time of each policy, and a row for each value that changes one."""
    out = console()
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    for row in rows:
        if not row["key"]:
            time = row["iteration_seconds"]
            says = f"{format_seconds(float(time))} an iteration" if time else f"{row['verdict']}: {row['explanation']}"
            print_text(out, f"{row['policy']}: {says}")
    points: dict[tuple[str, str], dict[str, Moved]] = {}
    for one in moved:
        points.setdefault((one.key, one.value), {})[one.policy] = one
    shown = {point: by for point, by in points.items() if any(_weight(one) >= _NOTHING for one in by.values())}
    effect = table("effect of one value alone on the iteration time", ["figure", "is", "value", *policies])
    for (key, value), by in list(shown.items())[:_MOST_ROWS]:
        effect.add_row(key, next(iter(by.values())).base, value, *(_cell(by.get(policy)) for policy in policies))
    if shown:
        out.print(effect)
    if len(shown) > _MOST_ROWS:
        print_text(out, f"{len(shown) - _MOST_ROWS} more values with smaller effects are in the file")
    quiet = [key for key in dict.fromkeys(key for key, _ in points) if not any(key == other for other, _ in shown)]
    if quiet:
        print_text(out, f"less than {_NOTHING} %: {', '.join(quiet)}")


def _cell(one: Moved | None) -> str:
    if one is None:
        return "-"
    if one.percent is not None:
        return f"{one.percent:+.1f} %"
    return one.row["verdict"] if not one.row["iteration_seconds"] else "fits"


def tornado(moved: Sequence[Moved], title: str) -> Figure:
    """Draw a panel per policy: for each figure a bar from its lowest to its highest iteration time, the largest on top."""
    from matplotlib.figure import Figure

    from autohete.report.style import as_label, style

    policies = list(dict.fromkeys(one.policy for one in moved))
    keys = list(dict.fromkeys(one.key for one in moved if _weight(one) >= _NOTHING))[:_MOST_BARS]
    with style():
        size = (1.8 + 3.4 * len(policies), 1.3 + 0.34 * max(len(keys), 2))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, len(policies), sharey=True, squeeze=False)[0]
        for panel, policy in zip(panels, policies, strict=True):
            _draw_bars(panel, [one for one in moved if one.policy == policy], keys)
            base = next((one.base_seconds for one in moved if one.policy == policy), None)
            time = "does not fit" if base is None else f"{format_seconds(base)} an iteration"
            panel.set_title(as_label(f"{policy}\n{time}"), fontsize="medium")
        panels[0].set_yticks(range(len(keys)), keys)
        panels[0].set_ylim(len(keys) - 0.4, -0.6)
        figure.supxlabel("change of the iteration time (%)", fontsize="medium")
        figure.suptitle(as_label(title), fontsize="medium")
    return figure


def _draw_bars(axes: Axes, moved: Sequence[Moved], keys: Sequence[str]) -> None:
    from autohete.report.style import BLUE, ORANGE

    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.grid(axis="y", visible=False)
    for y, key in enumerate(keys):
        own = [one for one in moved if one.key == key]
        for place, one in enumerate(own):
            first = place < len(own) / 2
            if one.percent is not None and abs(one.percent) > 1e-9:
                right = one.percent > 0
                colour, hatch = (BLUE, "") if first else (ORANGE, "////")
                axes.barh(y, one.percent, 0.62, color=colour, hatch=hatch, edgecolor="white")
                axes.annotate(
                    one.value,
                    (one.percent, y),
                    xytext=(3 if right else -3, 0),
                    textcoords="offset points",
                    ha="left" if right else "right",
                    va="center",
                    fontsize=6,
                )
        missing = [f"{one.value}: {one.row['verdict']}" for one in own if not one.row["iteration_seconds"]]
        if missing:
            axes.annotate(", ".join(missing), (0, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=6)
    axes.margins(x=0.28)
