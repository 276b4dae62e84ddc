"""Traces read back from their files, and what a comparison of two says."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console
from support.command import SMALL, autohete, refused
from support.plans import with_drives

from autohete.analysis.comparison import Comparison, Pair, compare, pair
from autohete.analysis.usage import Cause
from autohete.errors import InputError
from autohete.execution.trace import Clock, Trace
from autohete.policies import POLICIES, parse_policy
from autohete.report import comparison_tables as tables
from autohete.report.gantt import two_row_figure
from autohete.report.perfetto import check_perfetto, read_trace, write_perfetto
from autohete.report.style import save_figure
from autohete.schedule import Kind, Lane, Schedule, parse_schedule, validate
from autohete.sim import SimExecutor
from autohete.simulate import Simulation, run_until_steady, simulate
from autohete.testing.strategies import schedules
from autohete.workload import named_workload

HEADER = "autohete-schedule 2\nlane gpu fifo\nlane h2d fifo\nlane d2h fifo\nlane cpu priority\n"


def run(text: str, iterations: int = 6) -> Trace:
    """A simulated trace of a hand-made schedule on the usual lanes."""
    return SimExecutor().run(validate(parse_schedule(HEADER + text)), iterations)


@cache
def simulated(policy: str) -> Simulation:
    return simulate(named_workload("gpt-4b"), with_drives("a100-40gb-epyc7713"), parse_policy(policy))


def alone(schedule: Schedule) -> Schedule:
    """``schedule`` with links that do not disturb each other, so that only what is changed changes."""
    return replace(schedule, flows=(), resources=())


def lasting(schedule: Schedule, factor: Callable[[Kind], int]) -> Schedule:
    """``schedule`` with all durations times the factor of their kind."""
    return replace(
        schedule, tasks=tuple(task._replace(duration_ns=task.duration_ns * factor(task.id.kind)) for task in schedule.tasks)
    )


def pairs(value: object) -> list[dict[str, Any]]:
    """Every pair of numbers anywhere in a comparison."""
    if isinstance(value, dict):
        return [value] if value.keys() == {"a", "b", "difference", "percent"} else [p for v in value.values() for p in pairs(v)]
    return [p for item in value for p in pairs(item)] if isinstance(value, list | tuple) else []


def pairs_of(comparison: Comparison) -> list[dict[str, Any]]:
    found = pairs({name: value for name, value in asdict(comparison).items() if name not in ("a", "b")})
    assert found
    return found


# --- traces are read back -----------------------------------------------------------------------------------------


@pytest.mark.slow
@given(schedules(), st.integers(1, 5), st.sampled_from(Clock), st.integers(0, 10**17), st.data())
def test_what_is_written_is_read(schedule: Schedule, iterations: int, clock: Clock, begin: int, data: st.DataObject) -> None:
    """A trace read from its file has the same times to the nanosecond, the same schedule and the same clock."""
    plain = SimExecutor().run(schedule, iterations)
    late = st.lists(st.integers(0, 10**6), min_size=plain.start_ns.size, max_size=plain.start_ns.size)
    waits, lasts = (np.array(data.draw(late), np.int64).reshape(plain.start_ns.shape) for _ in range(2))
    ready = plain.ready_ns + begin
    trace = Trace(schedule, clock, ready, ready + waits, ready + waits + lasts)
    for written in (plain, trace):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            write_perfetto(path, written, [])
            found = read_trace(path)
        assert (found.schedule, found.clock) == (written.schedule, written.clock)
        for name in ("ready_ns", "start_ns", "end_ns"):
            times = getattr(found, name)
            assert times.dtype == np.int64
            assert times.shape == getattr(written, name).shape
            assert np.array_equal(times, getattr(written, name))


def test_shared_links_and_memories_are_read_back(tmp_path: Path) -> None:
    """The trace of a real plan comes back whole, counters of memories beside it or not, and its file has no fault."""
    s = simulated("stronghold")
    write_perfetto(tmp_path / "t.json", s.trace, [s.gpu, s.host])
    found = read_trace(tmp_path / "t.json")
    assert found.schedule == s.schedule
    assert list(found.spans()) == list(s.trace.spans())
    assert check_perfetto((tmp_path / "t.json").read_text()) == []


@pytest.mark.parametrize("shape", [(0, 0), (3, 0)])
def test_an_empty_run_is_read_back(tmp_path: Path, shape: tuple[int, int]) -> None:
    """A run without tasks or without iterations keeps its shape."""
    none = np.zeros(shape, np.int64)
    write_perfetto(tmp_path / "t.json", Trace(Schedule((Lane("gpu"),), ()), Clock.EMULATED, none, none, none), [])
    assert read_trace(tmp_path / "t.json").start_ns.shape == shape


def written(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A small trace file and its document."""
    path = folder / "t.json"
    write_perfetto(path, run("task F0 gpu 3\ntask U0 cpu 5 after=F0\n", 3), [])
    return path, json.loads(path.read_text())


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "not JSON"),
        (b"\x89PNG\r\n\x1a\n", "not JSON"),
        (b'{"traceEvents":[', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"traceEvents":[{"ts":1e99999999999999999999}]}', "not JSON"),
        (b"[]", "does not contain the executed schedule"),
        (b'{"traceEvents":[]}', "does not contain the executed schedule"),
        (b'{"traceEvents":[],"autohete":7}', "does not contain the executed schedule"),
        (b'{"traceEvents":[],"autohete":{"format":"autohete-trace 2"}}', "does not contain the executed schedule"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes, fault: str) -> None:
    """A file that autohete did not write is an input error that names it, the fault and what to give instead."""
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(InputError, match=f"t.json.*{fault}.*give a trace that autohete wrote"):
        read_trace(tmp_path / "t.json")


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_what_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    """A file that does not exist and a folder are input errors that say why."""
    with pytest.raises(InputError, match=r"cannot be read: .*; give a trace that autohete wrote"):
        read_trace(tmp_path / name)


def _slice(document: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(e for e in document["traceEvents"] if e["name"] == name)
    return found


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda d: d["traceEvents"].remove(_slice(d, "U0@1")), "U0@1 is missing"),
        (lambda d: d["traceEvents"].append(_slice(d, "U0@1")), "U0@1 appears twice"),
        (lambda d: d["traceEvents"].append({**_slice(d, "U0@1"), "name": "U1@1"}), "U1@1 is not in its schedule"),
        (lambda d: d["autohete"].update(iterations=2), "@2 is not in its schedule"),
        (lambda d: d["autohete"].update(iterations=10**15), "F0@3 is missing"),
        (lambda d: d["autohete"].update(iterations="3"), "TypeError"),
        (lambda d: d["autohete"].update(clock="sundial"), "'sundial' is not a valid Clock"),
        (lambda d: d["autohete"].pop("schedule"), "KeyError: 'schedule'"),
        (lambda d: d["autohete"]["schedule"].append("task G0"), "cannot read"),
        (lambda d: d["autohete"]["schedule"].append("task G0 d2h 1 after=B7"), "no task is called B7"),
        (lambda d: d.pop("traceEvents"), "KeyError: 'traceEvents'"),
        (lambda d: d.update(traceEvents=[1]), "TypeError"),
        (lambda d: _slice(d, "F0@0").pop("ts"), "KeyError: 'ts'"),
        (lambda d: _slice(d, "F0@0")["args"].pop("ready_ns"), "KeyError: 'ready_ns'"),
        (lambda d: _slice(d, "F0@0").update(ts=-1.0), "is not a valid time"),
        (lambda d: _slice(d, "F0@0").update(ts=0.0001), "is not a valid time"),
        (lambda d: _slice(d, "F0@0").update(ts="1"), "is not a valid time"),
        (lambda d: _slice(d, "F0@0").update(ts=float("nan")), "is not a valid time"),
        (lambda d: _slice(d, "F0@0").update(ts=2**62), "OverflowError"),
    ],
)
def test_a_damaged_trace_is_refused(tmp_path: Path, damage: Callable[[dict[str, Any]], object], fault: str) -> None:
    """A trace of which something is missing, doubled or impossible is an input error that names it and the file."""
    path, document = written(tmp_path)
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"trace {str(path)!r} is damaged (")
    assert fault in str(caught.value)
    assert "write it again" in str(caught.value)


# --- what a comparison says ---------------------------------------------------------------------------------------


@pytest.mark.slow
@given(schedules(), schedules(sharing=True), st.integers(1, 8))
def test_a_trace_does_not_differ_from_itself(plain: Schedule, shared: Schedule, iterations: int) -> None:
    """Compared with itself a trace, whatever it is and however short, has no difference and no swapped pair."""
    for schedule in (plain, shared):
        trace = SimExecutor().run(schedule, iterations)
        found = compare(trace, trace)
        assert all((p["difference"], p["percent"]) == (0, 0) for p in pairs_of(found))
        assert found.tasks == ()
        assert all((lane.swapped, lane.swaps) == (0, ()) for lane in found.lanes)


@pytest.mark.slow
@given(schedules(), st.integers(1, 8))
def test_twice_as_long_is_a_hundred_percent(schedule: Schedule, iterations: int) -> None:
    """With all durations doubled, every time is doubled, no byte more is needed and nothing runs in another order."""
    a, b = (SimExecutor().run(s, iterations) for s in (schedule, lasting(schedule, lambda _: 2)))
    found = compare(a, b)
    for name, value in asdict(found).items():
        for p in pairs(value):
            assert p["b"] == (p["a"] if name == "peak_bytes" else 2 * p["a"])
            assert p["percent"] == (100 if p["b"] != p["a"] else 0)
    assert all(lane.swapped == 0 for lane in found.lanes)


@pytest.mark.slow
@given(schedules(), st.data())
def test_a_comparison_can_be_turned_round(schedule: Schedule, data: st.DataObject) -> None:
    """B against A is the negative of A against B, number by number."""
    factors = {kind: data.draw(st.integers(0, 3)) for kind in sorted({task.id.kind for task in schedule.tasks})}
    a, b = (SimExecutor().run(s, 6) for s in (schedule, lasting(schedule, factors.__getitem__)))
    there, back = compare(a, b), compare(b, a)
    turned = {kind.kind: kind for kind in back.kinds}
    for kind in there.kinds:
        assert kind.iteration_seconds.difference == -turned[kind.kind].iteration_seconds.difference
        assert kind.wait_seconds.difference == -turned[kind.kind].wait_seconds.difference
    assert [task.task for task in there.tasks] == [task.task for task in back.tasks]
    assert {cause: -p.difference for cause, p in there.idle_seconds.items()} == {
        cause: p.difference for cause, p in back.idle_seconds.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD, Kind.CPU_UPDATE, Kind.OFFLOAD_GRADIENTS, Kind.PREFETCH_BACKWARD])
def test_a_slowed_kind_comes_first(kind: Kind) -> None:
    """Where one kind alone is slowed, it comes first, with its excess exactly, and no other kind's time differs."""
    schedule = alone(simulated("autohete").schedule)
    (a, _), (b, _) = (
        run_until_steady(s, SimExecutor()) for s in (schedule, lasting(schedule, lambda k: 3 if k is kind else 1))
    )
    found = compare(a, b)
    first, *others = found.kinds
    durations = [task.duration_ns for task in schedule.tasks if task.id.kind is kind]
    assert (first.kind, first.tasks) == (kind, len(durations))
    assert first.iteration_seconds.difference == pytest.approx(2e-9 * sum(durations))
    assert first.iteration_seconds.percent == pytest.approx(200)
    assert first.mean_seconds.a == pytest.approx(1e-9 * sum(durations) / len(durations))
    assert all(other.iteration_seconds.difference == 0 for other in others)
    assert all(task.task.rstrip("0123456789") == kind for task in found.tasks)
    assert found.tasks[0].mean_seconds.difference == pytest.approx(2e-9 * max(durations))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_kinds_make_lanes_and_lanes_and_waits_make_the_iteration(policy: str) -> None:
    """On each side the kinds of a lane add up to its work, and the GPU's work and waits to the iteration."""
    if policy == "resident":  # does not fit, but runs all the same
        assert simulated(policy).gpu.peak_bytes > simulated(policy).gpu.capacity_bytes
    schedule = simulated(policy).schedule
    found = compare(simulated(policy).trace, run_until_steady(alone(schedule), SimExecutor())[0])
    lane_of = {task.id.kind: task.lane for task in schedule.tasks}
    busy = {lane.lane: lane.busy_seconds for lane in found.lanes}
    for side in ("a", "b"):
        for name, seconds in busy.items():
            parts = [getattr(kind.iteration_seconds, side) for kind in found.kinds if lane_of[kind.kind] == name]
            assert sum(parts) == pytest.approx(getattr(seconds, side))
        idle = sum(getattr(seconds, side) for seconds in found.idle_seconds.values())
        assert getattr(busy["gpu"], side) + idle == pytest.approx(getattr(found.iteration_seconds, side), rel=1e-6)
    assert found.peak_bytes.keys() == {memory.name for memory in schedule.memories}
    assert found.peak_bytes["gpu"].a == simulated(policy).gpu.peak_bytes


def test_numbers_of_a_small_example() -> None:
    """A slower update shows as its kind's time, as the GPU's wait for the optimizer, and as the other kind's longer wait."""
    text = "task F0 gpu 30 after=U0@-1,U1@-1\ntask U0 cpu {} after=F0\ntask U1 cpu 10 after=F0\n"
    a, b = run(text.format(20)), replace(run(text.format(50)), clock=Clock.MEASURED_CPU)
    found = compare(a, b, ("sim", "real"))
    assert (found.a.name, found.a.clock, found.b.name, found.b.clock) == ("sim", "simulated", "real", "measured-cpu")
    seconds = found.iteration_seconds
    assert [round(x * 1e9) for x in (seconds.a, seconds.b, seconds.difference)] == [60, 90, 30]
    assert seconds.percent == pytest.approx(50)
    updates, forward = found.kinds
    assert (updates.kind, updates.tasks, forward.kind) == (Kind.CPU_UPDATE, 2, Kind.FORWARD)
    assert [round(x * 1e9) for x in (updates.mean_seconds.a, updates.mean_seconds.b)] == [15, 30]
    assert [round(x * 1e9) for x in (updates.wait_seconds.a, updates.wait_seconds.b)] == [10, 25]  # U1 waits 20 and 50
    waits = found.idle_seconds[Cause.OPTIMIZER]
    assert [round(x * 1e9) for x in (waits.a, waits.b)] == [30, 60]
    assert [(task.task, task.lane) for task in found.tasks] == [("U0", "cpu")]


def test_no_time_is_no_percentage() -> None:
    """Where A takes no time and B some there is a difference, but no percentage of nothing."""
    assert pair(0, 0) == Pair(0, 0, 0, 0)
    assert pair(0, 2) == Pair(0, 2, 2, None)
    assert pair(2, 0) == Pair(2, 0, -2, -100)


# --- order --------------------------------------------------------------------------------------------------------


def test_another_order_is_counted_and_named() -> None:
    """Tasks that a priority lane ran the other way round are named, with how often, and only that lane has them."""
    text = "task F0 gpu 9\ntask F1 gpu 9\ntask U0 cpu 2 after=F0 priority={}\ntask U1 cpu 2 after=F0 priority=1\n"
    found = {lane.lane: lane for lane in compare(run(text.format(0), 4), run(text.format(2), 4)).lanes}
    assert [(swap.first, swap.then, swap.times) for swap in found["cpu"].swaps] == [("U0", "U1", 1)]
    assert (found["cpu"].swapped, found["cpu"].neighbours) == (1, 2)  # U1 and the next iteration's U0 are in order
    assert (found["gpu"].swapped, found["gpu"].neighbours) == (0, 2)
    assert (found["h2d"].swapped, found["h2d"].neighbours) == (0, 0)


def test_order_across_iterations_is_named_with_the_iteration() -> None:
    """A task that only in A runs after one of the following iteration is named beside it as such."""
    text = "task F0 gpu 10\ntask F1 gpu 10\ntask U0 cpu 5 after=F0\ntask U1 cpu 5 after=F1\n"
    late, early = run(text), run(text)
    for times in (late.start_ns, late.end_ns):
        times[:, 3] += 15  # U1, to the end of the next iteration's U0
    (swap,) = next(lane for lane in compare(late, early).lanes if lane.lane == "cpu").swaps
    assert (swap.first, swap.then) == ("U0@+1", "U1")
    (swap,) = next(lane for lane in compare(early, late).lanes if lane.lane == "cpu").swaps
    assert (swap.first, swap.then) == ("U1", "U0@+1")


@pytest.mark.slow
@given(schedules(), st.data())
def test_fifo_lanes_never_swap(schedule: Schedule, data: st.DataObject) -> None:
    """However long tasks take, fifo lanes keep their order, also where windows have different lengths."""
    fifo = replace(schedule, lanes=tuple(Lane(lane.name) for lane in schedule.lanes))
    factors = {kind: data.draw(st.integers(0, 3)) for kind in sorted({task.id.kind for task in fifo.tasks})}
    lengths = data.draw(st.tuples(st.integers(1, 8), st.integers(1, 8)))
    a, b = (SimExecutor().run(s, n) for s, n in zip((fifo, lasting(fifo, factors.__getitem__)), lengths, strict=True))
    assert all(lane.swapped == 0 for lane in compare(a, b).lanes)


@pytest.mark.slow
@given(schedules())
def test_tasks_are_found_by_name(schedule: Schedule) -> None:
    """A trace whose schedule lists the same tasks in another order, but for that of each lane, does not differ."""
    trace = SimExecutor().run(schedule, 6)
    places = sorted(range(len(schedule.tasks)), key=lambda place: schedule.tasks[place].lane, reverse=True)
    turned = validate(replace(schedule, tasks=tuple(schedule.tasks[place] for place in places)))
    times = (np.ascontiguousarray(t[:, places]) for t in (trace.ready_ns, trace.start_ns, trace.end_ns))
    found = compare(trace, Trace(turned, trace.clock, *times))
    assert all(p["difference"] == 0 for kind in asdict(found)["kinds"] for p in pairs(kind))
    assert all(lane.swapped == 0 for lane in found.lanes)


# --- what cannot be compared --------------------------------------------------------------------------------------

_BASE = "memory gpu 9\ntask F0 gpu 3\ntask F1 gpu 3 after=F0\ntask U0 cpu 5 after=F0,F1\n"


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        (_BASE + "task U1 cpu 1\n", "only real has task U1"),
        (_BASE.replace("task F1 gpu 3 after=F0\n", "").replace(",F1", ""), "only sim has task F1"),
        (_BASE + "".join(f"task W{i} gpu 1\n" for i in range(9)), "only real has task W0, W1, W2, W3, W4 and 4 more"),
        (_BASE.replace("F0,F1", "F0"), "only sim has a wait of U0 for F1"),
        (_BASE.replace("F0,F1", "F0,F1,F1@-1"), "only real has a wait of U0 for F1@-1"),
        (_BASE.replace("U0 cpu", "U0 h2d"), "task U0 runs on lane cpu in sim and on h2d in real"),
        (_BASE.replace("memory gpu", "memory host"), "only sim has memory gpu"),
        ("lane nvme fifo\n" + _BASE, "only real has lane nvme"),
    ],
)
def test_runs_of_different_schedules_are_refused(other: str, fault: str) -> None:
    """What only one of both has is named, with the run that has it."""
    with pytest.raises(InputError, match=f"not runs of one schedule: {fault}; compare runs with the same lanes"):
        compare(run(_BASE), run(other), ("sim", "real"))


def test_another_first_lane_is_refused() -> None:
    """Iterations that are counted on different lanes are not compared."""
    lanes = "lane gpu fifo", "lane cpu fifo"
    a, b = (
        SimExecutor().run(parse_schedule("\n".join(["autohete-schedule 2", *order, "task F0 gpu 1"])), 2)
        for order in (lanes, lanes[::-1])
    )
    with pytest.raises(InputError, match="iterations are counted in A by lane gpu and B by lane cpu"):
        compare(a, b)


def test_a_run_without_iterations_is_refused() -> None:
    """There is nothing to compare in a run that never ran."""
    trace = run(_BASE)
    none = np.zeros((0, 3), np.int64)
    with pytest.raises(InputError, match="real has no iterations"):
        compare(trace, Trace(trace.schedule, trace.clock, none, none, none), ("sim", "real"))


def test_without_a_gpu_nothing_waits_for_its_cause() -> None:
    """Runs on other lanes are compared, without the GPU's waits."""
    trace = SimExecutor().run(parse_schedule("autohete-schedule 2\nlane nvme fifo\ntask F0 nvme 3\n"), 4)
    found = compare(trace, trace)
    assert found.idle_seconds == {}
    assert found.lanes[0].busy_seconds.a == pytest.approx(3e-9)
    assert "waits for" not in shown(found)


# --- tables -------------------------------------------------------------------------------------------------------


def shown(comparison: Comparison, width: int = 100) -> str:
    """What is printed on a terminal of ``width`` columns."""
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "console", lambda: Console(file=stream, width=width))
        tables.print_comparison(comparison)
    return stream.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_tables_fit_a_hundred_columns(policy: str) -> None:
    """On 100 columns no line is longer, no cell is cut off, and every kind, lane and memory is there."""
    found = compare(simulated(policy).trace, run_until_steady(alone(simulated(policy).schedule), SimExecutor())[0])
    text = shown(found)
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    starts = {line.split()[0] for line in text.splitlines() if line.strip()}
    assert {kind.kind.value for kind in found.kinds} | {"gpu", "h2d", "d2h", "cpu", "host", "optimizer"} <= starts
    rows = {line.split()[0]: line for line in text[text.index("kinds,") :].splitlines() if line.strip()}
    for kind in found.kinds:
        assert len(re.findall(r" [-+]?[\d.]+ (?:%|s|ms|us|ns)(?: |$)", rows[kind.kind])) == 6


@pytest.mark.parametrize("width", [60, 80])
def test_tables_fit_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """On fewer columns nothing is longer or cut off; columns that are left out are named, both waits together."""
    monkeypatch.setenv("COLUMNS", str(width))
    found = compare(simulated("autohete").trace, run_until_steady(alone(simulated("autohete").schedule), SimExecutor())[0])
    lines = shown(found, width).splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    assert re.search("not shown at this width: [^:]*wait A, wait B", " ".join(line.strip() for line in lines))


def test_the_head_names_both_runs() -> None:
    """The first lines say what the runs are called, whose seconds they are in, and what the difference is, with its sign."""
    a, b = run("task F0 gpu 1000\n"), replace(run("task F0 gpu 900\n"), clock=Clock.MEASURED_CUDA)
    lines = shown(compare(a, b, ("a [bold].json", "b.json"))).splitlines()
    assert lines[0] == "A: a [bold].json, simulated: 1.00 us per iteration (iteration 3 of 0 to 5, steady)"
    assert lines[1].startswith("B: b.json, measured-cuda: 900 ns per iteration")
    assert lines[2] == "B against A: -100 ns per iteration, -10.0 %"


def test_swapped_tasks_are_printed() -> None:
    """Where the order differs the lane's row names the tasks; where it does not one line says so."""
    text = "task F0 gpu 9\ntask U0 cpu 2 after=F0 priority={}\ntask U1 cpu 2 after=F0 priority=1\n"
    a, b = run(text.format(0), 4), run(text.format(2), 4)
    assert "U0 U1" in shown(compare(a, b))
    assert "1 of 2 pairs" in shown(compare(a, b))
    assert "order: the same in both on every lane (3 pairs of neighbours)" in shown(compare(a, a))


# --- picture ------------------------------------------------------------------------------------------------------


def rows_of(figure: Figure) -> list[str]:
    return [axes.get_title("left") for axes in figure.axes]


@pytest.mark.slow
def test_two_rows_share_a_time_axis(tmp_path: Path) -> None:
    """Both rows have the length of the longer iteration, all lanes, and their clock; the shorter one's end is marked."""
    s = simulated("autohete")
    slow = SimExecutor().run(lasting(s.schedule, lambda kind: 2 if kind is Kind.CPU_UPDATE else 1), 6)
    slow = replace(slow, clock=Clock.MEASURED_CPU)
    figure = two_row_figure(s.trace, slow, 2, "sim above, real below")
    above, below = figure.axes
    assert [row.split(":")[0] for row in rows_of(figure)] == ["simulated", "measured-cpu"]
    assert above.get_xlim() == below.get_xlim()
    anchors = slow.anchors()
    assert below.get_xlim()[1] == pytest.approx((anchors[3] - anchors[2]) * 1e-9)
    assert below.get_xlabel() == "time (s)"
    for axes in (above, below):
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert labels == ["GPU", "host to GPU", "GPU to host", "CPU"]
        assert "iteration 2" in [text.get_text() for text in axes.texts]
    assert [line.get_xdata()[0] for line in above.lines] == [pytest.approx(s.iteration_seconds, rel=1e-6)]  # type: ignore[index]
    save_figure(figure, tmp_path / "f.png")


@pytest.mark.parametrize("factor", [1, 5])
def test_the_words_of_two_rows_do_not_touch(factor: int) -> None:
    """Titles, numbers of iterations, legend and axis labels lie apart and inside the picture, also for unequal rows."""
    s = simulated("zero_offload")
    slow = SimExecutor().run(lasting(s.schedule, lambda _: factor), 6)
    figure = two_row_figure(s.trace, slow, 1, "title")
    figure.draw_without_rendering()
    words = [figure._suptitle] + [axes._left_title for axes in figure.axes]  # type: ignore[attr-defined]
    words += [text for axes in figure.axes for text in axes.texts if text.get_text().startswith("iteration")]
    below = figure.axes[1]
    words += [label for label in below.get_xticklabels() if label.get_position()[0] <= below.get_xlim()[1]]
    words += [below.xaxis.label, *figure.legends[0].get_texts()]
    boxes = [word.get_window_extent() for word in words]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1


def test_an_iteration_that_one_run_lacks_is_refused() -> None:
    """An iteration that only one of both has is an input error that says which there are."""
    with pytest.raises(InputError, match=r"run of 3: choose 0 <= first <= last <= 2"):
        two_row_figure(run(_BASE, 6), run(_BASE, 3), 4, "t")


# --- command line -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Traces of one schedule on a fast and a slow CPU, and one of another schedule."""
    folder = tmp_path_factory.mktemp("traces")
    named = tuple(str(folder / name) for name in ("fast.json", "slow.json", "other.json"))
    cpu = ("--set", "cpu.update_bandwidth=10GB/s")
    for path, options in zip(named, (("zero_offload",), ("zero_offload", *cpu), ("stronghold",)), strict=True):
        done = autohete("simulate", *SMALL, "--policy", *options, "--trace", path)
        assert done.returncode == 0, done.stderr
    return named[0], named[1], named[2]


@pytest.mark.slow
def test_two_files_are_compared(files: tuple[str, str, str], tmp_path: Path) -> None:
    """Two trace files give tables that begin with both, and a picture where one is asked for."""
    picture = tmp_path / "two.png"
    done = autohete("compare", files[0], files[1], "--gantt", str(picture))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"A: {files[0]}, simulated: ")
    assert f"\nB: {files[1]}, simulated: " in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["two.png"]


def test_a_comparison_as_json(files: tuple[str, str, str]) -> None:
    """--json prints one object with the numbers, in which the slower CPU's updates come first."""
    done = autohete("compare", files[0], files[1], "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout, parse_constant=pytest.fail)
    assert answer["kinds"][0]["kind"] == "U"
    assert answer["iteration_seconds"]["difference"] > 0
    assert answer["idle_seconds"]["optimizer"]["difference"] > 0
    assert answer["peak_bytes"]["gpu"]["difference"] == 0


def test_bad_comparisons_are_refused_in_one_line(files: tuple[str, str, str], tmp_path: Path) -> None:
    """Files that cannot be read or compared, and pictures that cannot be written, are refused with exit code 2."""
    fast, _, other = files
    assert "'none.json' cannot be read: No such file" in refused("compare", fast, "none.json")
    assert "is not a trace: it is not JSON" in refused("compare", fast, __file__)
    assert "not runs of one schedule: only " in refused("compare", fast, other)
    assert "requires an argument" in refused("compare", fast)
    assert "end the name in .png" in refused("compare", fast, fast, "--gantt", "x.bmp")
    assert "--gantt is empty" in refused("compare", fast, fast, "--gantt", "")
    assert "cannot be written" in refused("compare", fast, fast, "--gantt", str(tmp_path / "none" / "x.png"))


def test_help_of_compare_is_quick() -> None:
    """``compare --help`` loads neither numpy nor matplotlib nor torch."""
    code = (
        "import sys, contextlib\n"
        "from autohete.cli.app import main\n"
        "sys.argv = ['autohete', 'compare', '--help']\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "print(sorted(m for m in ('numpy', 'scipy', 'matplotlib', 'simpy', 'torch') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--gantt" in done.stdout
