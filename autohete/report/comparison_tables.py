"""Tables that compare two runs in the terminal, legible at 80 columns."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from autohete.analysis.comparison import ComparedRun, Comparison, LaneDifference, Pair
from autohete.quantities import format_bytes, format_seconds
from autohete.report.tables import IN_JSON, console, or_dash, print_text, table
from autohete.schedule import KIND_MEANING


def print_comparison(comparison: Comparison) -> None:
    """Print one line per run, then the differences: kinds, lanes, the GPU's waits, order, single tasks, memories."""
    out = console()
    for letter, side, seconds in (
        ("A", comparison.a, comparison.iteration_seconds.a),
        ("B", comparison.b, comparison.iteration_seconds.b),
    ):
        line = f"{letter}: {side.name}, {side.clock}: {format_seconds(seconds)} per iteration ({_window(side)})"
        print_text(out, line)
    difference, percent = _difference(comparison.iteration_seconds)
    print_text(out, f"B against A: {difference} per iteration, {percent}\n")
    _print_kinds(out, comparison)
    _print_lanes(out, comparison)
    _print_idle(out, comparison)
    _print_order(out, comparison.lanes)
    _print_tasks(out, comparison)
    _print_peaks(out, comparison)


def _window(side: ComparedRun) -> str:
    """Return which iterations the numbers are from."""
    first, last = side.steady.first, side.steady.first + side.steady.cycle - 1
    taken = f"iteration {first}" if first == last else f"iterations {first} to {last}"
    return f"{taken} of 0 to {side.iterations - 1}, {'steady' if side.steady.settled else 'mean, no steady state found'}"


def _difference(pair: Pair, write: Callable[[float], str] = format_seconds) -> tuple[str, str]:
    """Return the signed difference, absolute and in percent."""
    if not pair.difference:
        return write(0), "0 %"
    sign = "+" if pair.difference > 0 else "-"
    return f"{sign}{write(abs(pair.difference))}", or_dash(pair.percent, "{:+.1f} %".format)


def _print_kinds(out: Console, comparison: Comparison) -> None:
    columns = ["kind", "tasks", "task A", "task B", "", "iteration", "wait A", "wait B"]
    title = "kinds, the largest contribution first: mean of a task, difference per iteration, wait for the lane"
    kinds = table(title, columns, give_way=["wait", "tasks"], elsewhere=IN_JSON)
    for kind in comparison.kinds:
        per_iteration, percent = _difference(kind.iteration_seconds)
        kinds.add_row(
            f"{kind.kind} {KIND_MEANING[kind.kind]}",
            str(kind.tasks),
            format_seconds(kind.mean_seconds.a),
            format_seconds(kind.mean_seconds.b),
            percent,
            per_iteration,
            format_seconds(kind.wait_seconds.a),
            format_seconds(kind.wait_seconds.b),
        )
    out.print(kinds)


def _print_lanes(out: Console, comparison: Comparison) -> None:
    lanes = table("lanes: work per iteration", ["lane", "busy A", "busy B", "difference", ""])
    for lane in comparison.lanes:
        lanes.add_row(lane.lane, *_seconds(lane.busy_seconds))
    out.print(lanes)


def _print_idle(out: Console, comparison: Comparison) -> None:
    if not comparison.idle_seconds:
        return
    idle = table("what the GPU waits for, per iteration", ["waits", "A", "B", "difference", ""])
    for cause, seconds in comparison.idle_seconds.items():
        idle.add_row(cause.value, *_seconds(seconds))
    out.print(idle)


def _print_order(out: Console, lanes: tuple[LaneDifference, ...]) -> None:
    if not any(lane.swapped for lane in lanes):
        pairs = sum(lane.neighbours for lane in lanes)
        print_text(out, f"order: the same in both on every lane ({pairs} pairs of neighbours)\n")
        return
    order = table(
        "order: neighbours in A that B ran the other way round", ["lane", "most often (A's order)", "swapped"], left=2
    )
    for lane in lanes:
        swaps = [f"{s.first} {s.then}{f' ({s.times} times)' if s.times > 1 else ''}" for s in lane.swaps]
        order.add_row(lane.lane, ", ".join(swaps) or "-", f"{lane.swapped} of {lane.neighbours} pairs")
    out.print(order)


def _print_tasks(out: Console, comparison: Comparison) -> None:
    if not comparison.tasks:
        return
    tasks = table("tasks that differ most, mean time", ["task", "lane", "A", "B", "difference", ""], left=2)
    for task in comparison.tasks:
        tasks.add_row(task.task, task.lane, *_seconds(task.mean_seconds))
    out.print(tasks)


def _print_peaks(out: Console, comparison: Comparison) -> None:
    if not comparison.peak_bytes:
        return
    peaks = table("memories: peak of the whole run", ["memory", "peak A", "peak B", "difference", ""])
    for memory, peak in comparison.peak_bytes.items():
        peaks.add_row(memory, format_bytes(peak.a), format_bytes(peak.b), *_difference(peak, format_bytes))
    out.print(peaks)


def _seconds(pair: Pair) -> tuple[str, str, str, str]:
    return format_seconds(pair.a), format_seconds(pair.b), *_difference(pair)
