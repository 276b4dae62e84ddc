"""An answer as one HTML page: its text, the timeline of an iteration, its memory over time, and what waits for what.

The page is one file. Its Content-Security-Policy forbids loading anything, so it works offline and sends no requests.
Without JavaScript everything is still drawn; only zooming and following the waits need it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from importlib import resources

import numpy as np

from autohete.analysis.occupancy import Occupancy, contents
from autohete.analysis.usage import binding_waits
from autohete.answer import Answer
from autohete.execution.trace import Nanoseconds
from autohete.quantities import format_bytes, format_seconds
from autohete.report.answer_text import sections
from autohete.report.gantt import lane_title, memory_title, window_ns
from autohete.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, YELLOW, look
from autohete.schedule import KIND_MEANING, KIND_ORDER, Kind, TaskId, Value
from autohete.simulate import Simulation
from autohete.simulate.summary import node_text
from autohete.workload import Units, Workload

# Pixels.
_LEFT, _WIDTH, _LANE, _BAR, _MEMORY, _GAP = 128, 912, 30, 24, 110, 26
#: A memory of which less is used is drawn up to its peak, not up to its capacity.
_NEARLY_EMPTY = 0.25
_LEAST = 0.6  # a task of microseconds is visible

#: The contents of a memory, in the order in which they are stacked, with their colours.
_STACK = {
    "parameters": (GREEN, (Value.PARAMETERS, Value.PARAMETER_SHARD, Value.PARAMETER_SLOTS)),
    "optimizer states": (GREY, (Value.OPTIMIZER_STATES, Value.PINNED_STATES)),
    "gradients": (
        BLUE,
        (
            Value.GRADIENTS,
            Value.GRADIENT_SHARD,
            Value.ARRIVED_GRADIENTS,
            Value.GRADIENT_NORM,
            Value.CLIP_COEFFICIENT,
        ),
    ),
    "activations": (PURPLE, (Value.ACTIVATIONS, Value.INPUT, Value.INPUT_GRADIENT)),
    "logits": (YELLOW, (Value.LOGITS, Value.LOGITS_GRADIENT)),
    "buffers and workspace": (ORANGE, (Value.WORKSPACE, Value.POLICY_BUFFERS, Value.OTHER)),
}
_FILLS = {value: name for name, (_, values) in _STACK.items() for value in values}
#: Lines of a hatch in a square of 8 by 8, by the character that matplotlib has for it.
_HATCHES = {
    "/": "M-2 2L2 -2M0 8L8 0M6 10L10 6",
    "\\": "M-2 6L2 10M0 0L8 8M6 -2L10 2",
    "x": "M0 0L8 8M0 8L8 0",
    "+": "M4 0V8M0 4H8",
    "-": "M0 4H8",
    ".": "M3 4H5",
}


def answer_page(answer: Answer) -> str:
    """Return the page as HTML; the same answer gives the same text."""
    hardware = answer.profile.hardware
    title = f"{answer.profile.workload.name} on {node_text(hardware.name, hardware.gpus)}"
    parts = [(name, f"<pre>{escape(chr(10).join(lines))}</pre>") for name, lines in sections(answer)]
    data: dict[str, object] = {}
    if answer.simulation is not None:
        drawing = _Drawing.of(answer.simulation)
        data = drawing.data()
        parts.insert(1, ("One iteration", drawing.html()))
    body = "\n".join(f"<section><h2>{escape(name)}</h2>\n{html}\n</section>" for name, html in parts)
    folder = resources.files("autohete.report")
    filled = {
        "title": escape(title),
        "body": body,
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "style": (folder / "answer_page.css").read_text(encoding="utf-8"),
        "script": (folder / "answer_page.js").read_text(encoding="utf-8"),
    }
    template = (folder / "answer_page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled[match[1]], template)


@dataclass(frozen=True, slots=True)
class _Bar:
    """One task in the window: its place among the bars is its number.

    Args:
        kind: its kind.
        name: in words.
        lane: row.
        begin_ns, end_ns: from the start of the window; they may lie outside of it.
        waits_for: number of the bar whose end let it start; None if that is not in the window.
        by_lane: whether it waited because its lane was busy, not for what the other task made.
    """

    kind: Kind
    name: str
    lane: int
    begin_ns: int
    end_ns: int
    waits_for: int | None
    by_lane: bool


@dataclass(frozen=True, slots=True)
class _Drawing:
    """One steady iteration: lanes above, memories below, on one axis of ``length_ns``."""

    simulation: Simulation
    iteration: int
    length_ns: int
    bars: tuple[_Bar, ...]

    @staticmethod
    def of(simulation: Simulation) -> _Drawing:
        trace, first = simulation.trace, simulation.steady.first
        begin, end = window_ns(trace, first, first)
        return _Drawing(simulation, first, end - begin, tuple(_bars(simulation, begin, end)))

    def html(self) -> str:
        """Return the drawing with what explains it."""
        seconds = format_seconds(self.length_ns * 1e-9)
        clock = self.simulation.trace.clock
        return (
            f"<p>Iteration {self.iteration} of the run, in its steady state: {seconds} ({escape(str(clock))}). Tasks of the "
            "iterations before and after it that run meanwhile are shown, too. Point at a task to see its times; click it to "
            'see what it waited for, step by step; use the wheel to zoom and drag to move. <button id="chain" type="button">'
            'Follow the last GPU task</button> <button id="reset" type="button">Whole iteration</button></p>\n'
            f'{self._svg()}\n<div id="tip" role="status"></div>\n<ol id="waits" aria-live="polite"></ol>\n{self._legend()}'
        )

    def data(self) -> dict[str, object]:
        """Return what the script needs."""
        on_gpu = [number for number, bar in enumerate(self.bars) if bar.lane == 0 and bar.end_ns <= self.length_ns]
        return {
            "left": _LEFT,
            "width": _WIDTH,
            "least": _LEAST,
            "length": self.length_ns,
            "last": max(on_gpu, key=lambda number: self.bars[number].end_ns, default=-1),
            "bars": [
                [bar.name, bar.begin_ns, bar.end_ns, -1 if bar.waits_for is None else bar.waits_for, int(bar.by_lane)]
                for bar in self.bars
            ],
        }

    def _svg(self) -> str:
        lanes = [lane_title(lane) for lane in self.simulation.schedule.lanes]
        bottom = _LANE * len(lanes)
        memories = self.simulation.memories
        height = bottom + (_MEMORY + _GAP) * len(memories) + _GAP
        kinds = sorted({bar.kind for bar in self.bars}, key=KIND_ORDER.__getitem__)
        parts = [
            f'<svg id="drawing" viewBox="0 0 {_LEFT + _WIDTH + 8} {height}" role="img" '
            f'aria-label="Timeline of one iteration by lane, and memory over time">',
            f'<defs><clipPath id="inside"><rect x="{_LEFT}" y="0" width="{_WIDTH}" height="{height}"/></clipPath>',
            *(_pattern(kind) for kind in kinds),
            "</defs>",
        ]
        for row, name in enumerate(lanes):
            y = row * _LANE
            parts.append(f'<text class="name" x="{_LEFT - 8}" y="{y + _LANE / 2 + 4:g}">{escape(name)}</text>')
            parts.append(f'<rect class="row" x="{_LEFT}" y="{y + 3}" width="{_WIDTH}" height="{_BAR}"/>')
        parts.append('<g clip-path="url(#inside)">')
        parts += [self._bar(number, bar) for number, bar in enumerate(self.bars)]
        parts.append('<g id="path"></g></g>')
        for row, memory in enumerate(memories):
            parts += self._memory(memory, bottom + _GAP + row * (_MEMORY + _GAP))
        parts.append(self._axis(height - 14))
        return "\n".join([*parts, "</svg>"])

    def _x(self, time_ns: float) -> float:
        return _LEFT + _WIDTH * time_ns / self.length_ns

    def _bar(self, number: int, bar: _Bar) -> str:
        begin, end = max(bar.begin_ns, 0), min(bar.end_ns, self.length_ns)
        x, width = self._x(begin), max(self._x(end) - self._x(begin), _LEAST)
        title = f"{bar.name}\n{_time(bar.begin_ns)} to {_time(bar.end_ns)}"
        return (
            f'<rect class="task" data-task="{number}" x="{x:.2f}" y="{bar.lane * _LANE + 3}" width="{width:.2f}" '
            f'height="{_BAR}" fill="url(#{bar.kind})"><title>{escape(title)}</title></rect>'
        )

    def _memory(self, memory: Occupancy, top: float) -> Iterator[str]:
        """Draw what fills one memory, stacked, below a line for its capacity."""
        name, limit = memory_title(memory.memory), memory.capacity_bytes
        nearly_empty = memory.peak_bytes < _NEARLY_EMPTY * limit
        most = round(1.1 * memory.peak_bytes) + 1 if nearly_empty else max(limit, memory.peak_bytes)
        scale = f"{format_bytes(memory.peak_bytes)} of " if nearly_empty else ""
        times, filled = _filled(self.simulation, memory.memory, self.iteration)
        yield f'<text class="name" x="{_LEFT - 8}" y="{top + _MEMORY / 2:g}">{escape(name)}</text>'
        yield f'<text class="small" x="{_LEFT - 8}" y="{top + _MEMORY / 2 + 15:g}">{scale}{format_bytes(limit)}</text>'
        yield f'<rect class="row" x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_MEMORY}"/>'
        yield f'<g clip-path="url(#inside)"><g class="zoomed" data-memory="{escape(memory.memory)}">'
        lower = np.zeros(len(times) - 1, np.int64)
        for what, size in filled.items():
            upper = lower + size
            edge = [*_steps(times, upper, self.length_ns, top, most), *_steps(times, lower, self.length_ns, top, most)[::-1]]
            points = " ".join(f"{x:.2f},{y:.2f}" for x, y in edge)
            peak = f"{what}: at most {format_bytes(float(size.max()))}"
            yield f'<polygon fill="{_STACK[what][0]}" points="{points}"><title>{escape(peak)}</title></polygon>'
            lower = upper
        yield "</g></g>"
        y = top + _MEMORY * (1 - limit / most)
        if not nearly_empty:
            yield f'<path class="capacity" d="M{_LEFT} {y:.2f}h{_WIDTH}"/>'

    def _axis(self, y: float) -> str:
        ticks = "".join(
            f'<text x="{self._x(time):.2f}" y="{y}">{_time(time)}</text>'
            for time in (self.length_ns * part / 4 for part in range(4))
        )
        return f'<g id="axis">{ticks}</g>'

    def _legend(self) -> str:
        kinds = sorted({bar.kind for bar in self.bars}, key=KIND_ORDER.__getitem__)
        swatch = '<svg class="swatch" viewBox="0 0 24 14"><rect width="24" height="14" fill="{}"/></svg>'
        tasks = (f"<li>{swatch.format(f'url(#{kind})')} {escape(KIND_MEANING[kind])}</li>" for kind in kinds)
        filled = dict.fromkeys(
            what for memory in self.simulation.memories for what in _filled(self.simulation, memory.memory, self.iteration)[1]
        )
        contained = (f"<li>{swatch.format(_STACK[what][0])} {escape(what)}</li>" for what in _STACK if what in filled)
        return (
            f'<h3>Tasks</h3><ul class="legend">{"".join(tasks)}</ul>\n'
            f'<h3>Memory (dashed: its capacity)</h3><ul class="legend">{"".join(contained)}</ul>'
        )


def _bars(simulation: Simulation, begin: int, end: int) -> Iterator[_Bar]:
    """Return the tasks that run between two instants, in the order of the trace."""
    trace, schedule = simulation.trace, simulation.schedule
    lanes = {lane.name: row for row, lane in enumerate(schedule.lanes)}
    place_of = {task.id: place for place, task in enumerate(schedule.tasks)}
    tasks, waits = len(schedule.tasks), binding_waits(trace)
    starts, ends = trace.start_ns.ravel(), trace.end_ns.ravel()
    shown = np.flatnonzero((starts < end) & (ends > begin)).tolist()
    numbers = {instance: number for number, instance in enumerate(shown)}
    for instance in shown:
        iteration, place = divmod(instance, tasks)
        task, cause = schedule.tasks[place], waits[instance]
        named = {(iteration - edge.back) * tasks + place_of[edge.task] for edge in task.after}
        yield _Bar(
            task.id.kind,
            _task_name(task.id, iteration, simulation.profile.workload),
            lanes[task.lane],
            int(starts[instance]) - begin,
            int(ends[instance]) - begin,
            None if cause is None else numbers.get(cause),
            cause is not None and cause not in named,
        )


def _task_name(task: TaskId, iteration: int, workload: Workload) -> str:
    word = "block" if workload.units is Units.BLOCK else "unit"
    unit = f"{word} {task.unit}" if workload.is_inner(task.unit) else f"the {workload.role(task.unit)}"
    return f"{KIND_MEANING[task.kind]}, {unit} ({task.at(iteration)})"


def _filled(simulation: Simulation, memory: str, iteration: int) -> tuple[Nanoseconds, dict[str, Nanoseconds]]:
    """Return what fills a memory in one iteration, by the names of :data:`_STACK`, from the start of the iteration on."""
    begin, end = window_ns(simulation.trace, iteration, iteration)
    times, groups = contents(simulation.trace, memory)
    first = int(np.searchsorted(times, begin, "right")) - 1  # holds at the start
    last = int(np.searchsorted(times, end, "left"))
    filled: dict[str, Nanoseconds] = {}
    for what in _STACK:
        some = [size[first:last] for group, size in groups.items() if _FILLS[_value_of(group)] == what]
        if any(size.any() for size in some):
            total = np.zeros_like(some[0])
            for size in some:
                total += size
            filled[what] = total
    return np.append(np.maximum(times[first:last], begin), end) - begin, filled


def _value_of(group: str) -> Value:
    """The value of a buffer group, such as ``parameters`` of ``parameters_B``."""
    return Value(re.sub(r"_[A-Z]+$", "", group))


def _steps(times: Nanoseconds, sizes: Nanoseconds, length_ns: int, top: float, most: int) -> list[tuple[float, float]]:
    """Return the points of a line that holds each size until the next time."""
    xs = np.repeat(_LEFT + _WIDTH * times / length_ns, 2)[1:-1]
    ys = np.repeat(top + _MEMORY * (1 - sizes / most), 2)
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


def _pattern(kind: Kind) -> str:
    """Return the fill of a kind: its colour, with lines where figures have a hatch."""
    shown = look(kind)
    lines = f'<path d="{_HATCHES[shown.hatch[0]]}"/>' if shown.hatch else ""
    return (
        f'<pattern id="{kind}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{shown.colour}"/>{lines}</pattern>'
    )


def _time(time_ns: float) -> str:
    return format_seconds(abs(time_ns) * 1e-9) if time_ns >= 0 else f"-{format_seconds(-time_ns * 1e-9)}"
