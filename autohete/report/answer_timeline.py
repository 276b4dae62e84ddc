"""The timeline of an iteration on the page of an answer: its tasks by lane, its memory over time, what waits for what.

It is stretched to the width of the page, so its text is HTML above the rows. Without JavaScript everything is still drawn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np

from autohete.analysis.occupancy import Occupancy, contents
from autohete.analysis.usage import binding_waits
from autohete.execution.trace import Nanoseconds
from autohete.quantities import format_bytes, format_seconds
from autohete.report.gantt import lane_title, memory_title, window_ns
from autohete.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, YELLOW, look
from autohete.schedule import KIND_MEANING, KIND_ORDER, Kind, TaskId, Value
from autohete.simulate import Simulation
from autohete.workload import Units, Workload

# Pixels, but the width is stretched to that of the page. A row is a line of text and what is below it.
_WIDTH, _TEXT, _BAR, _MEMORY, _GAP = 1000, 20, 22, 110, 10
_LANE = _TEXT + _BAR
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
class Timeline:
    """One steady iteration: lanes above, memories below, on one axis of ``length_ns``."""

    simulation: Simulation
    iteration: int
    length_ns: int
    bars: tuple[_Bar, ...]

    @staticmethod
    def of(simulation: Simulation) -> Timeline:
        trace, first = simulation.trace, simulation.steady.first
        begin, end = window_ns(trace, first, first)
        return Timeline(simulation, first, end - begin, tuple(_bars(simulation, begin, end)))

    def html(self) -> str:
        """Return the drawing with what explains it."""
        seconds = format_seconds(self.length_ns * 1e-9)
        clock = self.simulation.trace.clock
        return (
            f"<p>Iteration {self.iteration} of the run, in its steady state: {seconds} ({escape(str(clock))}). Tasks of the "
            "iterations before and after it that run meanwhile are shown, too.</p>\n"
            '<div class="scripted" role="group" aria-label="Timeline" hidden>'
            '<button id="chain" type="button">What the next iteration waits for</button> '
            '<button id="in" type="button">Zoom in</button> <button id="out" type="button">Zoom out</button> '
            '<button id="reset" type="button">Whole iteration</button>'
            '<p id="help">Click a task to see what it waited for, step by step. Ctrl and the wheel zoom; drag to move. '
            "On the keyboard: arrows go from task to task, Enter follows its waits, + and - zoom, Escape resets.</p></div>\n"
            f'<div class="timeline">\n{self._svg()}\n</div>\n'
            '<div id="tip"></div><div id="spoken" role="status"></div>\n<ol id="waits" '
            f'aria-label="Chain of waits, latest task first"></ol>\n{self._legend()}'
        )

    def data(self) -> dict[str, object]:
        """Return what the script needs."""
        return {
            "width": _WIDTH,
            "least": _LEAST,
            "length": self.length_ns,
            "last": self._last(),
            "bars": [
                [bar.name, bar.begin_ns, bar.end_ns, -1 if bar.waits_for is None else bar.waits_for, int(bar.by_lane)]
                for bar in self.bars
            ],
        }

    def _last(self) -> int:
        """Where the chain of waits starts: the first GPU task of the next iteration, or in the last iteration the last one."""
        on_gpu = [number for number, bar in enumerate(self.bars) if bar.lane == 0]
        return max(on_gpu, key=lambda number: self.bars[number].begin_ns, default=-1)

    def _svg(self) -> str:
        lanes = [lane_title(lane) for lane in self.simulation.schedule.lanes]
        bottom = _LANE * len(lanes)
        memories = self.simulation.memories
        height = bottom + (_TEXT + _MEMORY + _GAP) * len(memories)
        kinds = sorted({bar.kind for bar in self.bars}, key=KIND_ORDER.__getitem__)
        texts = [_label(row * _LANE, escape(name)) for row, name in enumerate(lanes)]
        parts = [
            f'<svg id="drawing" viewBox="0 0 {_WIDTH} {height}" height="{height}" preserveAspectRatio="none" role="img" '
            f'aria-label="Timeline of one iteration by lane, and memory over time">',
            "<defs>",
            *(_pattern(kind) for kind in kinds),
            "</defs>",
            *(f'<rect class="row" y="{row * _LANE + _TEXT}" width="{_WIDTH}" height="{_BAR}"/>' for row in range(len(lanes))),
        ]
        parts += [self._bar(number, bar) for number, bar in enumerate(self.bars)]
        parts.append('<g id="path"></g>')
        for row, memory in enumerate(memories):
            top = bottom + _GAP + row * (_TEXT + _MEMORY + _GAP)
            texts.append(_label(top, _memory_label(memory)))
            parts += self._memory(memory, top + _TEXT)
        return "\n".join([*parts, "</svg>", *texts, self._axis()])

    def _x(self, time_ns: float) -> float:
        return _WIDTH * time_ns / self.length_ns

    def _bar(self, number: int, bar: _Bar) -> str:
        begin, end = max(bar.begin_ns, 0), min(bar.end_ns, self.length_ns)
        x, width = self._x(begin), max(self._x(end) - self._x(begin), _LEAST)
        title = f"{bar.name}\n{_time(bar.begin_ns)} to {_time(bar.end_ns)}"
        return (
            f'<rect class="task" data-task="{number}" x="{x:.2f}" y="{bar.lane * _LANE + _TEXT}" width="{width:.2f}" '
            f'height="{_BAR}" fill="url(#{bar.kind})"><title>{escape(title)}</title></rect>'
        )

    def _memory(self, memory: Occupancy, top: float) -> Iterator[str]:
        """Draw what fills one memory, stacked, below a line for its capacity."""
        limit, nearly_empty = memory.capacity_bytes, _is_nearly_empty(memory)
        most = round(1.1 * memory.peak_bytes) + 1 if nearly_empty else max(limit, memory.peak_bytes)
        times, filled = _filled(self.simulation, memory.memory, self.iteration)
        yield f'<rect class="row" y="{top}" width="{_WIDTH}" height="{_MEMORY}"/>'
        yield f'<g class="zoomed" data-memory="{escape(memory.memory)}">'
        lower = np.zeros(len(times) - 1, np.int64)
        for what, size in filled.items():
            upper = lower + size
            edge = [*_steps(times, upper, self.length_ns, top, most), *_steps(times, lower, self.length_ns, top, most)[::-1]]
            points = " ".join(f"{x:.2f},{y:.2f}" for x, y in edge)
            peak = f"{what}: at most {format_bytes(float(size.max()))}"
            yield f'<polygon fill="{_STACK[what][0]}" points="{points}"><title>{escape(peak)}</title></polygon>'
            lower = upper
        yield "</g>"
        y = top + _MEMORY * (1 - limit / most)
        if not nearly_empty:
            yield f'<path class="capacity" d="M0 {y:.2f}h{_WIDTH}"/>'

    def _axis(self) -> str:
        ticks = "".join(f'<span style="left:{25 * part}%">{_time(self.length_ns * part / 4)}</span>' for part in range(4))
        return f'<div id="axis">{ticks}</div>'

    def _legend(self) -> str:
        kinds = sorted({bar.kind for bar in self.bars}, key=KIND_ORDER.__getitem__)
        swatch = '<svg class="swatch" aria-hidden="true" viewBox="0 0 24 14"><rect width="24" height="14" fill="{}"/></svg>'
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
    # The next iteration's first GPU task starts where the window ends: what that waits for makes an iteration this long.
    on_gpu = np.tile([task.lane == schedule.lanes[0].name for task in schedule.tasks], trace.iterations)
    following = np.flatnonzero(on_gpu & (starts == end) & (ends > end))
    shown = np.union1d(np.flatnonzero((starts < end) & (ends > begin)), following[:1]).tolist()
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


def _is_nearly_empty(memory: Occupancy) -> bool:
    return memory.peak_bytes < _NEARLY_EMPTY * memory.capacity_bytes


def _memory_label(memory: Occupancy) -> str:
    scale = " (off the scale)" if _is_nearly_empty(memory) else ""
    used = f"at most {format_bytes(memory.peak_bytes)} of {format_bytes(memory.capacity_bytes)}{scale}"
    return f"{escape(memory_title(memory.memory))} memory <small>{used}</small>"


def _label(top: float, html: str) -> str:
    return f'<span class="label" style="top:{top:g}px">{html}</span>'


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
    xs = np.repeat(_WIDTH * times / length_ns, 2)[1:-1]
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
