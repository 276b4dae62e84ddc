"""Figures of a run: the work of each lane over time, and the occupancy of each memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from autohete.analysis.occupancy import Occupancy
from autohete.errors import InputError
from autohete.execution.trace import Clock, Nanoseconds, Trace
from autohete.quantities import format_seconds
from autohete.report.style import Look, as_label, look, luminance, style
from autohete.schedule import (
    COLLECTIVE,
    CPU,
    D2H,
    GPU,
    GPU_MEMORY,
    H2D,
    HOST_MEMORY,
    KIND_MEANING,
    KIND_ORDER,
    PINNED_MEMORY,
    SEND,
    Kind,
    Lane,
)

#: Lanes and memories as figures call them.
_LANE_NAMES = {
    GPU: "GPU",
    H2D: "host to GPU",
    D2H: "GPU to host",
    CPU: "CPU",
    COLLECTIVE: "all GPUs",
    SEND: "transfers",
}
_MEMORY_NAMES = {GPU_MEMORY: "GPU", HOST_MEMORY: "host", PINNED_MEMORY: "pinned"}

# Inches and points (1/72 inch) on paper.
_WIDTH_IN, _LANE_IN, _MEMORY_IN, _MARGIN_IN = 7.0, 0.36, 1.3, 1.35
_MARGIN_BETWEEN_IN = 0.7  # between two rows of lanes
_NARROW_LANE_IN = 0.2  # where many rows share a page
_TITLE_PT = 14  # above the lanes, and above the numbers of the iterations
_TEXT_PT, _DIGIT_PT, _PADDING_PT = 6.0, 3.8, 1.6
_GAP_PT = 0.5  # white gap between neighbours of one kind, if there is room for it
_MERGE_PT = 2.0  # touching bars of one kind that are narrower than this are drawn as one: their seams would only be noise
_LEAST_PT = 0.5  # minimum width of a bar, so that a task of microseconds is visible
_BAR_HEIGHT = 0.78  # share of a lane's row


def lane_title(lane: Lane) -> str:
    """Return the name of a lane in figures, such as ``host to GPU 1`` for ``h2d.1``, a lane of the second GPU."""
    name, _, rank = lane.name.partition(".")
    return f"{_LANE_NAMES.get(name, name.replace('_', ' '))} {rank}".rstrip()


def memory_title(memory: str) -> str:
    """Return the name of a memory in figures."""
    return _MEMORY_NAMES.get(memory, memory)


def window_ns(trace: Trace, first: int, last: int) -> tuple[int, int]:
    """Return the start of iteration ``first`` and of the iteration after ``last`` (or the end of the run), in ns of the run.

    Raises:
        InputError: the run does not have these iterations.
    """
    if not 0 <= first <= last < trace.iterations:
        raise InputError(
            f"iterations {first} to {last} of a run of {trace.iterations}: choose 0 <= first <= last <= {trace.iterations - 1}"
        )
    anchors = trace.anchors()
    end = anchors[last + 1] if last + 1 < trace.iterations else trace.end_ns.max(initial=0)
    return int(anchors[first]), int(end)


def gantt_figure(trace: Trace, first: int, last: int, title: str) -> Figure:
    """Draw bars for iterations ``first`` to ``last``, inclusive: one row per lane, time from the start of ``first``.

    Blocks are numbered where the number fits. Every other iteration is pale. Overlapping neighbour iterations are shown.

    Raises:
        InputError: the run does not have these iterations.
    """
    span = window_ns(trace, first, last)
    with style():
        figure = Figure(figsize=(_WIDTH_IN, _gantt_height(trace)))
        axes = figure.subplots()
        _time_axis(axes, span, trace.clock)
        axes.set_title(as_label(title), pad=_TITLE_PT)
        _draw_lanes(figure, [_Row(axes, trace, span)], first)
    return figure


def two_row_figure(a: Trace, b: Trace, iteration: int, title: str) -> Figure:
    """Draw bars for one ``iteration``, of ``a`` above and ``b`` below, on one time axis, each from the start of its iteration.

    The shorter row continues into the next iteration, in pale, until the longer one ends. Each row states its clock and time.

    Raises:
        InputError: one of the runs does not have this iteration.
    """
    return _stacked([(f"{trace.clock}: iteration {iteration} takes", trace) for trace in (a, b)], iteration, title, _LANE_IN)


def stacked_figure(runs: Sequence[tuple[str, Trace]], iteration: int, title: str) -> Figure:
    """Draw bars for one ``iteration`` of several runs, one below the other, on one time axis from the start of the iteration.

    Each row has a name and ends with its iteration, so that a faster run is shorter.

    Args:
        runs: name and trace of each row; all by the same clock.
        iteration: the number of the iteration.
        title: above all rows.

    Raises:
        InputError: no runs, or one that does not have this iteration.
    """
    if not runs:
        raise InputError("there are 0 runs to draw: give at least one")
    return _stacked([(f"{name}:", trace) for name, trace in runs], iteration, title, _NARROW_LANE_IN, goes_on=False)


def _stacked(runs: Sequence[tuple[str, Trace]], iteration: int, title: str, lane_in: float, *, goes_on: bool = True) -> Figure:
    spans = [window_ns(trace, iteration, iteration) for _, trace in runs]
    longest = max(end - begin for begin, end in spans)
    with style():
        lanes = [len(_drawn_lanes(trace)) for _, trace in runs]
        height = _MARGIN_IN + _MARGIN_BETWEEN_IN * (len(runs) - 1) + lane_in * sum(lanes)
        figure = Figure(figsize=(_WIDTH_IN, height))
        axes = figure.subplots(len(runs), sharex=True, height_ratios=lanes, squeeze=False)[:, 0]
        figure.suptitle(as_label(title))
        rows = []
        for each, (name, trace), (begin, end) in zip(axes, runs, spans, strict=True):
            each.set_title(
                f"{as_label(name)} {format_seconds((end - begin) * 1e-9)}", loc="left", pad=_TITLE_PT if goes_on else None
            )
            rows.append(_Row(each, trace, (begin, begin + longest), None if goes_on else end))
        _time_axis(axes[-1], rows[-1].span, None if goes_on else runs[0][1].clock)
        _draw_lanes(figure, rows, iteration)
    return figure


def memory_figure(
    occupancies: Sequence[Occupancy], first_ns: int, last_ns: int, title: str, clock: Clock | None = None
) -> Figure:
    """Draw the occupied GiB of each memory from ``first_ns`` to ``last_ns`` of the run, with capacity and peak contents.

    Raises:
        InputError: no memory, or no time between ``first_ns`` and ``last_ns``.
    """
    if not occupancies or not 0 <= first_ns < last_ns:
        raise InputError(
            f"{len(occupancies)} memories from {first_ns} to {last_ns} ns: give at least one, and 0 <= first_ns < last_ns"
        )
    with style():
        figure = Figure(figsize=(_WIDTH_IN, 0.6 + _MEMORY_IN * len(occupancies)))
        rows = figure.subplots(len(occupancies), sharex=True, squeeze=False)[:, 0]
        for axes, occupancy in zip(rows, occupancies, strict=True):
            _draw_memory(axes, occupancy, (first_ns, last_ns))
        _time_axis(rows[-1], (first_ns, last_ns), clock)
        figure.suptitle(as_label(title))
    return figure


def combined_figure(trace: Trace, occupancy: Occupancy, first: int, last: int, title: str) -> Figure:
    """Draw :func:`gantt_figure` above the ``occupancy`` of one memory, on one time axis.

    Raises:
        InputError: the run does not have these iterations.
    """
    span = window_ns(trace, first, last)
    with style():
        height = _gantt_height(trace)
        figure = Figure(figsize=(_WIDTH_IN, height + _MEMORY_IN))
        above, below = figure.subplots(2, sharex=True, height_ratios=[_LANE_IN * len(_drawn_lanes(trace)), _MEMORY_IN - 0.3])
        _draw_memory(below, occupancy, span)
        _time_axis(below, span, trace.clock)
        above.set_title(as_label(title), pad=_TITLE_PT)
        _draw_lanes(figure, [_Row(above, trace, span)], first)
    return figure


def _gantt_height(trace: Trace) -> float:
    return _MARGIN_IN + _LANE_IN * len(_drawn_lanes(trace))


def _drawn_lanes(trace: Trace) -> list[Lane]:
    """The lanes that have a row: all, but of several GPUs only those that work."""
    lanes = trace.schedule.lanes
    working = {task.lane for task in trace.schedule.tasks}
    several = any("." in lane.name for lane in lanes)
    return [lane for lane in lanes if lane.name in working or not several]


# --- time ---------------------------------------------------------------------------------------------------------


def _time_unit(span: tuple[int, int]) -> tuple[str, float]:
    """Return the unit to show ``span`` in, and its nanoseconds."""
    units = (("s", 1e9), ("ms", 1e6), ("us", 1e3))
    return next((unit for unit in units if span[1] - span[0] >= unit[1]), ("ns", 1.0))


def _time_axis(axes: Axes, span: tuple[int, int], clock: Clock | None) -> None:
    unit, scale = _time_unit(span)
    axes.set_xlim(0, max(1, span[1] - span[0]) / scale)
    axes.set_xlabel(f"time ({unit}, {clock})" if clock else f"time ({unit})")


# --- lanes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _GanttBar:
    """A task instance, clipped to the figure: ``begin`` and ``end`` in ns of the run."""

    lane: int
    kind: Kind
    block: int
    iteration: int
    begin: int
    end: int


def _bars(trace: Trace, span: tuple[int, int]) -> list[_GanttBar]:
    """Return the bars visible in ``span``, lane by lane in order of time."""
    lanes = {lane.name: i for i, lane in enumerate(_drawn_lanes(trace))}
    bars = [
        _GanttBar(lanes[s.lane], s.task.kind, s.task.unit, s.iteration, max(s.start_ns, span[0]), min(s.end_ns, span[1]))
        for s in trace.spans()
        if s.start_ns < span[1] and s.end_ns > span[0]
    ]
    return sorted(bars, key=lambda bar: (bar.lane, bar.begin, bar.end))


def _merged(bars: list[_GanttBar], narrow_ns: float) -> Iterator[_GanttBar]:
    """Merge touching ``bars`` of one kind and iteration if both are narrow."""
    held: _GanttBar | None = None
    for bar in bars:
        alike = held and (held.lane, held.kind, held.iteration, held.end) == (bar.lane, bar.kind, bar.iteration, bar.begin)
        if held and alike and bar.end - bar.begin < narrow_ns:
            held = replace(held, end=bar.end)
            continue
        if held:
            yield held
        held = bar
    if held:
        yield held


@dataclass(frozen=True, slots=True)
class _Row:
    """The lanes of ``trace`` during ``span`` (ns of its run), in ``axes``; it ends at ``end`` (None: goes on)."""

    axes: Axes
    trace: Trace
    span: tuple[int, int]
    end: int | None = None


def _draw_lanes(figure: Figure, rows: Sequence[_Row], first: int) -> None:
    """Draw bars, separators and one legend; the titles and the limits of the time axis must be set."""
    for row in rows:
        lanes = _drawn_lanes(row.trace)
        row.axes.set_ylim(len(lanes) - 0.5, -0.5)
        row.axes.set_yticks(range(len(lanes)), [lane_title(lane) for lane in lanes])
        row.axes.tick_params(axis="y", length=0)
        row.axes.spines["left"].set_visible(False)
    bars = [_bars(row.trace, (row.span[0], row.end or row.span[1])) for row in rows]
    together = [bar for each in bars for bar in each]
    pale = sorted({bar.iteration for bar in together if _is_pale(bar.iteration, first)})
    kinds = sorted({bar.kind for bar in together}, key=KIND_ORDER.__getitem__)
    patches = [_patch(look(kind), KIND_MEANING[kind]) for kind in kinds]
    if pale:
        patches.append(Patch(facecolor="0.85", label=f"pale: iteration{'s' * (len(pale) > 1)} {', '.join(map(str, pale))}"))
    if patches:
        figure.legend(handles=patches, loc="outside lower center", ncols=3)
    # Compute the layout first: what fits into a bar depends on its width in points.
    figure.draw_without_rendering()
    for row, shown in zip(rows, bars, strict=True):
        length = max(1, row.span[1] - row.span[0])
        points = row.axes.get_window_extent().width * 72 / figure.dpi / length  # of one nanosecond
        _draw_bars(row.axes, shown, first, row.span, points)
        _draw_numbers(row.axes, shown, first, row.span, points)
        if row.end is None:
            _draw_iterations(row.axes, row.trace, row.span, points)


def _is_pale(iteration: int, first: int) -> bool:
    return (iteration - first) % 2 == 1


def _patch(drawn: Look, label: str) -> Patch:
    return Patch(facecolor=drawn.colour, edgecolor="0.2", linewidth=0, hatch=drawn.hatch, label=label)


def _draw_bars(axes: Axes, bars: list[_GanttBar], first: int, span: tuple[int, int], points: float) -> None:
    _, scale = _time_unit(span)
    gap_ns, least_ns = _GAP_PT / points, _LEAST_PT / points

    def group(bar: _GanttBar) -> tuple[int, int, bool]:
        return bar.lane, KIND_ORDER[bar.kind], _is_pale(bar.iteration, first)

    # One collection per look: thousands of single patches would take seconds.
    for (lane, _, pale), members in groupby(sorted(_merged(bars, _MERGE_PT / points), key=group), key=group):
        together = list(members)
        drawn = look(together[0].kind)
        widths = [bar.end - bar.begin for bar in together]
        ranges = [
            ((bar.begin - span[0]) / scale, (width - gap_ns if width > 4 * gap_ns else max(width, least_ns)) / scale)
            for bar, width in zip(together, widths, strict=True)
        ]
        axes.broken_barh(
            ranges,
            (lane - _BAR_HEIGHT / 2, _BAR_HEIGHT),
            facecolor=drawn.pale() if pale else drawn.colour,
            edgecolor="0.5" if pale else "0.2",  # of the hatch
            linewidth=0,
            hatch=drawn.hatch,
            snap=False,  # rounding to pixels would make equal bars differ
        )


def _draw_numbers(axes: Axes, bars: list[_GanttBar], first: int, span: tuple[int, int], points: float) -> None:
    _, scale = _time_unit(span)
    # Measure the longest number, so that either all equal bars are numbered or none.
    wide = len(str(max((bar.block for bar in bars), default=0))) * _DIGIT_PT + _PADDING_PT
    for bar in bars:
        if (bar.end - bar.begin) * points < wide:
            continue
        drawn = look(bar.kind)
        colour = drawn.pale() if _is_pale(bar.iteration, first) else drawn.colour
        label = axes.text(
            ((bar.begin + bar.end) / 2 - span[0]) / scale,
            bar.lane,
            str(bar.block),
            size=_TEXT_PT,
            ha="center",
            va="center_baseline",
            color="white" if luminance(colour) < 0.45 else "black",
            clip_on=True,
        )
        if drawn.hatch:  # a number on a hatch needs a plain background
            label.set_bbox({"facecolor": colour, "edgecolor": "none", "pad": 0.5})
        label.set_in_layout(False)


def _draw_iterations(axes: Axes, trace: Trace, span: tuple[int, int], points: float) -> None:
    """Draw a line where an iteration starts, with its number above."""
    _, scale = _time_unit(span)
    starts = [*trace.anchors().tolist(), int(trace.end_ns.max(initial=0))]
    for iteration, (begin, end) in enumerate(pairwise(starts)):
        begin, end = max(begin, span[0]), min(end, span[1])
        if begin >= end:
            continue
        if begin > span[0]:
            axes.axvline((begin - span[0]) / scale, color="black", linewidth=0.8, linestyle=(0, (4, 2)))
        text = f"iteration {iteration}"
        if (end - begin) * points > len(text) * _DIGIT_PT:
            middle = ((begin + end) / 2 - span[0]) / scale
            top = axes.get_xaxis_transform()
            axes.annotate(text, (middle, 1), (0, 2), top, "offset points", ha="center", va="bottom", size="small")


# --- memory -------------------------------------------------------------------------------------------------------


def _draw_memory(axes: Axes, occupancy: Occupancy, span: tuple[int, int]) -> None:
    _, scale = _time_unit(span)
    gib = 2.0**30
    times, used = _cut(occupancy, span)
    edges = np.append(times, span[1])
    axes.stairs(used / gib, (edges - span[0]) / scale, fill=True, color="#0072B2", alpha=0.25, linewidth=0)
    axes.stairs(used / gib, (edges - span[0]) / scale, baseline=None, color="#0072B2")
    capacity = occupancy.capacity_bytes / gib
    axes.axhline(capacity, color="#D55E00", linestyle=(0, (5, 2)))
    axes.annotate(
        f"capacity {capacity:.1f} GiB",
        (1, capacity),
        xycoords=axes.get_yaxis_transform(),
        xytext=(-2, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        size="small",
        color="#A04600",
    )
    axes.set_ylim(0, max(capacity, float(used.max(initial=0)) / gib) * 1.2)
    axes.set_ylabel(f"{memory_title(occupancy.memory)} memory\n(GiB)")
    peak = int(used.argmax())
    axes.plot([(float(times[peak]) - span[0]) / scale], [used[peak] / gib], "o", color="black", markersize=3, clip_on=False)
    axes.set_title(_peak_text(occupancy, int(used[peak])), loc="left", size="small")


def _cut(occupancy: Occupancy, span: tuple[int, int]) -> tuple[Nanoseconds, Nanoseconds]:
    """Return the instants and bytes within ``span``, starting with the value at its start."""
    inside = np.flatnonzero((occupancy.times_ns > span[0]) & (occupancy.times_ns < span[1]))
    before = max(0, int(np.searchsorted(occupancy.times_ns, span[0], side="right")) - 1)
    return np.append(span[0], occupancy.times_ns[inside]), np.append(occupancy.bytes_used[before], occupancy.bytes_used[inside])


def _peak_text(occupancy: Occupancy, shown_bytes: int) -> str:
    """Describe the peak and its contents; the run's peak may lie outside the figure."""
    gib = 2.0**30
    large = [(_group_name(group), size / gib) for group, size in occupancy.holders.items()]
    shown = [f"{name} {size:.1f}" for name, size in large[:4]]
    if rest := sum(size for _, size in large[4:]):
        shown.append(f"other {rest:.1f}")
    where = f" at {occupancy.task.split('@')[0]}" if occupancy.task else ""
    if shown_bytes < occupancy.peak_bytes:
        return f"here up to {shown_bytes / gib:.1f} GiB, in the run {occupancy.peak_bytes / gib:.1f} GiB{where}: " + ", ".join(
            shown
        )
    return f"peak {occupancy.peak_bytes / gib:.1f} GiB{where}: " + ", ".join(shown)


def _group_name(group: str) -> str:
    """Return the text for a buffer group: ``workspace_L`` is the workspace of the loss."""
    head, _, tail = group.rpartition("_")
    meanings = {kind.value: meaning for kind, meaning in KIND_MEANING.items()}
    return f"{head} of {meanings[tail]}" if tail in meanings else group.replace("_", " ")
