"""Files that appear whole, Perfetto documents, and figures."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from decimal import Decimal
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.cells import cell_len
from rich.console import Console
from support.paper import profile_with

from autohete.analysis.comparison import Comparison, compare
from autohete.analysis.occupancy import occupancy
from autohete.errors import InputError
from autohete.execution.trace import Clock, Trace
from autohete.files import atomic_write
from autohete.hardware import load_hardware
from autohete.policies import COMPARED, parse_policy
from autohete.profile import analytic_profile
from autohete.quantities import format_bytes, format_seconds
from autohete.report import preset_tables, tables
from autohete.report.comparison_tables import print_comparison
from autohete.report.gantt import combined_figure, gantt_figure, memory_figure, window_ns
from autohete.report.perfetto import check_perfetto, perfetto_json, write_perfetto
from autohete.report.records import Tally, print_tally
from autohete.report.style import LOOKS, look, luminance, save_figure
from autohete.report.terminal import LETTERS, print_iteration
from autohete.schedule import Edge, Kind, Lane, Memory, Schedule, Task, TaskId, validate
from autohete.sim import SimExecutor
from autohete.simulate import Simulation, simulate
from autohete.simulate.summary import Summary, answer, summarize
from autohete.workload import Workload, named_workload

CASES = {
    "small": Workload("small", 256, 2, 4),
    "gpt-4b": named_workload("gpt-4b"),
    "gpt-10b": named_workload("gpt-10b"),
    "deep": Workload("deep", 2048, 94, 16),
}


@cache
def simulated(case: str, policy: str) -> Simulation:
    return simulate(CASES[case], load_hardware("a100-40gb-epyc7713"), parse_policy(policy))


def events(text: str) -> list[dict[str, Any]]:
    document = json.loads(text, parse_float=Decimal)
    found: list[dict[str, Any]] = document["traceEvents"]
    return found


def document(s: Simulation) -> str:
    return perfetto_json(s.trace, [s.gpu, s.host])


def instant_trace() -> Trace:
    """Two tasks without duration and one with, all at 3 ns on one lane, and one on another that waits for an instant one."""
    f0, f1, b1, u0 = TaskId(Kind.FORWARD, 0), TaskId(Kind.FORWARD, 1), TaskId(Kind.BACKWARD, 1), TaskId(Kind.CPU_UPDATE, 0)
    schedule = Schedule(
        lanes=(Lane("gpu"), Lane("cpu")),
        tasks=(Task(f0, "gpu", 0), Task(f1, "gpu", 0), Task(b1, "gpu", 5), Task(u0, "cpu", 1, (Edge(f0),))),
        memories=(Memory("gpu", 8),),
    )
    start = np.array([[3, 3, 3, 3]], np.int64)
    return Trace(schedule, Clock.SIMULATED, start, start, start + np.array([[0, 0, 5, 1]], np.int64))


# --- tables -------------------------------------------------------------------------------------------------------

POLICY_LISTS = {
    "all": COMPARED,
    "long names": ("zero_offload:paper,tile_overlap", "autohete:priority=off", "stronghold:window=2,checkpointing=full"),
}


@cache
def summaries(policies: str) -> list[Summary]:
    profile = analytic_profile(named_workload("gpt-10b"), load_hardware("a100-40gb-epyc7713"))
    return [answer(profile, parse_policy(policy))[0] for policy in POLICY_LISTS[policies]]


def printed(show: Callable[[], None], width: int) -> list[str]:
    """The lines that ``show`` prints on a terminal of ``width`` columns."""
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        for module in (tables, preset_tables):
            patch.setattr(module, "console", lambda: Console(file=stream, width=width, force_terminal=True, color_system=None))
        show()
    return stream.getvalue().splitlines()


def in_columns(show: Callable[[], None], width: int) -> list[str]:
    """The lines that ``show`` prints into a pipe with ``COLUMNS=width``."""
    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stream):
        patch.setenv("COLUMNS", str(width))
        show()
    return stream.getvalue().splitlines()


def swept(width: int) -> list[str]:
    """The end of a sweep over long keys."""
    tally = Tally()
    values = {"links.h2d.bandwidth": "100GB/s", "policy": "zero_offload:deepspeed=0.8.3", "tokens_per_second": "12345.6"}
    tally.add({"verdict": "ok", **values})
    tally.add({"verdict": "gpu-out-of-memory", **values})
    return in_columns(lambda: print_tally(tally, list(values)[:2], 1234567, 98765.4, "a/rather/long/path/sweep.csv"), width)


@cache
def compared() -> Comparison:
    """A fast and a slow run of one schedule."""
    trace = simulated("gpt-10b", "autohete").trace
    slower = replace(trace, start_ns=trace.start_ns * 2, end_ns=trace.end_ns * 2, ready_ns=trace.ready_ns * 2)
    return compare(trace, slower, ("a/rather/long/path/predicted.json", "a/rather/long/path/measured.json"))


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 100])
def test_every_answer_fits_the_columns_it_is_given(width: int) -> None:
    """No line of any command is longer than ``COLUMNS``, also in a pipe; words, numbers and their units stay whole."""
    found = simulated("gpt-10b", "autohete")
    answers = summaries("all")
    plan = in_columns(lambda: tables.print_plan(summarize(found, parse_policy("autohete")), found), width)
    simulate = in_columns(lambda: tables.print_summaries(answers, CASES["gpt-10b"]), width)
    everything = {
        "plan": plan,
        "simulate": simulate,
        "presets": in_columns(preset_tables.print_presets, width),
        "preset": in_columns(lambda: preset_tables.print_preset("a100-40gb-epyc7713"), width),
        "sweep": swept(width),
        "compare": in_columns(lambda: print_comparison(compared()), width),
        "timeline": in_columns(lambda: print_iteration(tables.console(), found.trace, 1), width),
    }
    for command, lines in everything.items():
        assert max(map(cell_len, lines)) <= width, command
        assert max(map(cell_len, lines)) > width // 2, command
        assert not any("…" in line for line in lines), command
        assert not [line for line in lines if re.match(r" *(?:%|[KMG]iB|GB/s|ms|s|tokens/s)\b", line)], command
    for one in answers:
        if one.iteration_seconds:
            assert any(one.policy in line and format_seconds(one.iteration_seconds) in line for line in simulate)
    assert any(f"ok: {format_seconds(found.iteration_seconds)} an iteration" in line for line in plan)
    sources = " ".join(" ".join(everything["preset"]).split())
    assert "1616 of 2039 GB/s on A100-80GB (github mli/transformers-benchmarks)" in sources
    assert "12,346 tokens/s" in " ".join(everything["sweep"])


@given(st.text("ab 1%漢 ", max_size=60), st.integers(4, 20), st.integers(0, 4))
def test_wrapping_loses_nothing(line: str, width: int, indent: int) -> None:
    """Rows of a wrapped line are never too wide; together they have the characters of the line, and single words are whole."""
    found = tables.wrapped(line, width, indent)
    assert all(cell_len(row) <= width for row in found)
    assert "".join("".join(found).split()) == "".join(line.split())
    for word in re.split(r" +", line):
        assert cell_len(word) > width - 8 or any(word in row for row in found)


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 100, 117, 160])
@pytest.mark.parametrize("policies", POLICY_LISTS)
def test_answers_fit_the_terminal(policies: str, width: int) -> None:
    """At any width no line is longer, every number stands whole in its row, and what is not shown is named."""
    found = summaries(policies)
    lines = printed(lambda: tables.print_summaries(found, CASES["gpt-10b"]), width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    left_out = " ".join(" ".join(lines[: lines.index("")]).split()).partition("not shown at this width: ")[2]
    assert width not in (80, 160) or bool(left_out) == (width == 80)
    start = next(i for i, line in enumerate(lines) if line.startswith("────"))
    for summary, line in zip(found, lines[start + 1 :], strict=False):
        numbers = {
            "iteration": format_seconds(summary.iteration_seconds) if summary.iteration_seconds else "-",
            "samples/s": f"{summary.samples_per_second:.2f}" if summary.samples_per_second else "-",
            "tokens/s": f"{summary.tokens_per_second:,.0f}" if summary.tokens_per_second else "-",
            "TFLOP/s": f"{summary.tflops_per_gpu:.1f}" if summary.tflops_per_gpu else "-",
            "GPU peak": format_bytes(summary.gpu_peak_bytes or 0),
            "GPU reserved": format_bytes(summary.gpu_reserved_bytes) if summary.gpu_reserved_bytes else "-",
            "host peak": format_bytes(summary.host_peak_bytes or 0),
            "recomputed": str(summary.plan.checkpointed_units) if summary.plan else "-",
            "offloaded": str(summary.plan.offloaded_parameter_units) if summary.plan else "-",
            "CPU updates": str(summary.plan.offloaded_optimizer_units) if summary.plan else "-",
        }
        shown = [text for header, text in numbers.items() if header not in left_out]
        assert cells(line)[-len(shown) :] == shown, line
        assert cells(line)[:2] == [summary.policy, summary.verdict]


def test_the_least_important_columns_give_way_first() -> None:
    """At 80 columns verdict, iteration, tokens/s and GPU memory stay; lines below name the rest and where it is."""
    lines = printed(lambda: tables.print_summaries(summaries("all"), CASES["gpt-10b"]), 80)
    assert cells(lines[2]) == ["policy", "verdict", "iteration", "tokens/s", "GPU peak", "CPU updates"]
    left_out = "not shown at this width: samples/s, TFLOP/s, GPU reserved, host peak, recomputed, offloaded; --json has them"
    assert " ".join(" ".join(lines[9:11]).split()) == left_out


@pytest.mark.slow
@pytest.mark.parametrize("width", [40, 80, 100, 160])
def test_presets_and_plans_fit_the_terminal(width: int) -> None:
    """Lists of presets and the decisions of a plan are not wider than the terminal, and cut nothing off."""
    found = simulated("gpt-10b", "autohete")
    for show in (
        preset_tables.print_presets,
        lambda: tables.print_plan(summarize(found, parse_policy("autohete")), found),
        lambda: preset_tables.print_preset("h200-pcie5"),
        lambda: preset_tables.print_preset("qwen3-next-80b-a3b"),
    ):
        lines = printed(show, width)
        assert max(map(len, lines)) <= width
        assert not any("…" in line for line in lines)


def test_a_plan_says_what_recomputations_keep() -> None:
    """Decisions tell units apart whose recomputations keep something else, and count those that keep the same."""
    summary, found = answer(profile_with(10**9, 1), parse_policy("support.plans:OneInput"))
    assert found is not None
    rows = [cells(line)[:2] for line in printed(lambda: tables.print_plan(summary, found), 100)]
    assert [row for row in rows if row[:1] in (["1"], ["2"], ["3"])] == [
        ["1", "recompute x 3"],
        ["2", "drop x 2"],
        ["3", "drop"],
    ]


def test_words_wrap_and_numbers_do_not() -> None:
    """Headers break between words, long texts wrap, a word longer than half the terminal is folded; numbers stay whole."""
    shown = tables.table("t", ["what", "time of one step", "remark"], remark=True)
    shown.add_row("x" * 50, "12.25 s", "some words that need more room than there is here")
    lines = printed(lambda: tables.console().print(shown), 64)
    assert max(map(len, lines)) <= 64
    assert sum("12.25 s" in line for line in lines) == 1
    assert sum(line.count("x") for line in lines) == 50
    assert {"time", "of", "one", "step", "room"} <= set(" ".join(lines).split())


@pytest.mark.parametrize(("columns", "width"), [(None, 160), ("", 160), ("0", 160), ("wide", 160), ("80", 80), ("200", 200)])
def test_a_pipe_is_as_wide_as_asked_for(columns: str | None, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not a terminal has 160 columns, or as many as ``COLUMNS`` says."""
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert tables.console().width == width


# --- files --------------------------------------------------------------------------------------------------------


def fill(text: bytes) -> Callable[[BinaryIO], object]:
    return lambda stream: stream.write(text)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    """A written file has the new content and nothing stays beside it."""
    target = tmp_path / "trace.json"
    atomic_write(target, fill(b"old"))
    atomic_write(target, fill(b"new"))
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["trace.json"]


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), ValueError("a bug"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, fault: BaseException) -> None:
    """Whatever goes wrong in the middle of a write, the old file is whole and nothing half-written stays."""
    target = tmp_path / "trace.json"
    target.write_bytes(b"old")

    def fail(stream: BinaryIO) -> None:
        stream.write(b"half")
        raise fault

    with pytest.raises(InputError if isinstance(fault, OSError) else type(fault)):
        atomic_write(target, fail)
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["trace.json"]


@pytest.mark.parametrize("name", ["missing/trace.json", "", "file/trace.json"])
def test_an_unwritable_target_is_an_input_error(tmp_path: Path, name: str) -> None:
    """A folder that is missing, a folder as a file and a file as a folder are refused in one line that names the path."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InputError, match=r"cannot be written: .*; give a file") as caught:
        atomic_write(tmp_path / name, fill(b"x"))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    """A symbolic link is followed and a device is written to: neither is replaced."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    atomic_write(link, fill(b"x"))
    assert link.is_symlink()
    assert (tmp_path / "target").read_bytes() == b"x"
    null = tmp_path / "null"
    null.symlink_to(os.devnull)
    atomic_write(null, fill(b"x"))
    assert Path(os.devnull).is_char_device()


# --- Perfetto -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["zero_offload", "stronghold", "autohete"])
@pytest.mark.parametrize("case", ["small", "gpt-4b"])
def test_a_document_has_no_fault(case: str, policy: str) -> None:
    """Documents of small and large runs pass the structural check."""
    assert check_perfetto(document(simulated(case, policy))) == []


def test_a_slice_is_a_span() -> None:
    """Every task instance is a slice with its exact nanoseconds, its name, its meaning and its wait."""
    s = simulated("small", "zero_offload")
    found = {e["name"]: e for e in events(document(s)) if e["ph"] == "X"}
    spans = list(s.trace.spans())
    assert len(found) == len(spans)
    for span in spans:
        event = found[span.task.at(span.iteration)]
        assert (event["ts"] * 1000, event["dur"] * 1000) == (span.start_ns, span.end_ns - span.start_ns)
        assert event["args"]["block"] == span.task.unit
        assert event["args"]["kind"] == span.task.kind
        assert event["args"]["iteration"] == span.iteration
        assert event["args"]["ready wait (us)"] * 1000 == span.start_ns - span.ready_ns
    assert found["F3@1"]["cat"] == "forward"


def test_threads_are_lanes_and_the_process_names_the_clock() -> None:
    """Thread ids count the lanes from 1, in the order of the schedule, and the process says whose seconds these are."""
    found = [e for e in events(document(simulated("small", "stronghold"))) if e["ph"] == "M"]
    assert [e["args"]["name"] for e in found if e["name"] == "process_name"] == ["AutoHete (simulated)"]
    assert [(e["tid"], e["args"]["name"]) for e in found if e["name"] == "thread_name"] == [
        (1, "gpu"),
        (2, "h2d"),
        (3, "d2h"),
        (4, "cpu"),
    ]
    assert [e["args"]["sort_index"] for e in found if e["name"] == "thread_sort_index"] == [1, 2, 3, 4]


def test_arrows_are_the_dependencies_between_lanes() -> None:
    """There is one arrow for each instance of an edge that crosses lanes, and none for the others."""
    trace = simulated("small", "stronghold:window=1").trace
    lane = {task.id: task.lane for task in trace.schedule.tasks}
    crossing = [edge for task in trace.schedule.tasks for edge in task.after if lane[edge.task] != task.lane]
    arrows = [e for e in events(perfetto_json(trace, [])) if e["ph"] == "s"]
    assert len(arrows) == sum(trace.iterations - edge.back for edge in crossing) > 0


def test_a_counter_follows_its_memory() -> None:
    """The counter of a memory has the instants and bytes of its occupancy."""
    s = simulated("small", "zero_offload")
    found = [e for e in events(document(s)) if e["ph"] == "C" and e["name"] == "gpu memory"]
    assert [int(e["ts"] * 1000) for e in found] == s.gpu.times_ns.tolist()
    assert [e["args"]["bytes"] for e in found] == s.gpu.bytes_used.tolist()


def test_tasks_without_duration_are_kept() -> None:
    """Slices of no length are written, before the slice that starts in the same instant, and arrows may leave from them."""
    text = perfetto_json(instant_trace(), [])
    assert check_perfetto(text) == []
    assert [e["name"] for e in events(text) if e["ph"] == "X" and e["tid"] == 1] == ["F0@0", "F1@0", "B1@0"]


def test_times_are_exact_far_from_zero() -> None:
    """A run of weeks keeps every nanosecond, where a float of microseconds would round."""
    far = instant_trace()
    shift = 10**16 + 1
    far = Trace(far.schedule, far.clock, far.ready_ns + shift, far.start_ns + shift, far.end_ns + shift)
    text = perfetto_json(far, [])
    assert check_perfetto(text) == []
    assert {int(e["ts"] * 1000) for e in events(text) if e["ph"] == "X"} == {shift + 3}


def test_an_empty_run_is_a_document() -> None:
    """A run without iterations has threads and no slices."""
    none = np.zeros((0, 0), np.int64)
    text = perfetto_json(Trace(Schedule((Lane("gpu"),), ()), Clock.EMULATED, none, none, none), [])
    assert check_perfetto(text) == []
    assert {e["ph"] for e in events(text)} == {"M"}


_PRINT_DIGEST = """
import hashlib
from autohete.hardware import load_hardware
from autohete.policies import parse_policy
from autohete.report.perfetto import perfetto_json
from autohete.simulate import simulate
from autohete.workload import Workload
s = simulate(Workload("small", 256, 2, 4), load_hardware("a100-40gb-epyc7713"), parse_policy("zero_offload"))
print(hashlib.sha256(perfetto_json(s.trace, [s.gpu, s.host]).encode()).hexdigest())
"""


@pytest.mark.slow
def test_a_document_does_not_depend_on_the_process() -> None:
    """Processes with different hash seeds write the same bytes."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", _PRINT_DIGEST], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_the_file_is_the_document(tmp_path: Path) -> None:
    """What is written is the document, as UTF-8."""
    s = simulated("small", "zero_offload")
    write_perfetto(tmp_path / "t.json", s.trace, [s.gpu])
    assert (tmp_path / "t.json").read_text(encoding="utf-8") == perfetto_json(s.trace, [s.gpu])


_SLICE = {"ph": "X", "tid": 1, "name": "F0@0", "ts": 1.0, "dur": 2.0}
_START = {"ph": "s", "tid": 1, "name": "d", "cat": "d", "id": 1, "ts": 1.5}
_FINISH = {**_START, "ph": "f", "bp": "e"}


@pytest.mark.parametrize(
    ("faulty", "fault"),
    [
        ([{**_SLICE, "tid": 0}], "thread id 0"),
        ([_SLICE, {**_SLICE, "name": "F1@0", "ts": 2.999}], "F1@0 overlaps F0@0"),
        ([{**_SLICE, "ts": 1.0001}], "whole nanoseconds"),
        ([_SLICE, _START], "ends"),
        ([_SLICE, _START, {**_FINISH, "cat": "other"}], "ends"),
        ([_SLICE, _START, {**_FINISH, "ts": 3.0}], "in no slice"),
        ([_SLICE, _START, {k: v for k, v in _FINISH.items() if k != "bp"}], "not bound"),
        ([{"ph": "C", "name": "gpu", "ts": 0.0, "args": {"bytes": -1}}], "below zero"),
    ],
)
def test_the_check_finds_each_fault(faulty: list[dict[str, Any]], fault: str) -> None:
    """Each fault that Perfetto passes over in silence is put into words."""
    assert check_perfetto(json.dumps({"traceEvents": [_SLICE, _START, _FINISH]})) == []
    assert any(fault in line for line in check_perfetto(json.dumps({"traceEvents": faulty})))


# --- figures ------------------------------------------------------------------------------------------------------


def png(figure: Figure, path: Path) -> bytes:
    save_figure(figure, path)
    return path.read_bytes()


def texts(figure: Figure) -> list[str]:
    """All words in the axes of ``figure``."""
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_every_kind_has_its_own_look() -> None:
    """All kinds have a look, and no two the same."""
    assert set(LOOKS) == set(Kind)
    assert len(set(LOOKS.values())) == len(Kind)
    assert look(Kind.FORWARD) is LOOKS[Kind.FORWARD]


def test_each_kind_of_task_is_one_character() -> None:
    """In the picture of an iteration in a terminal; no character has two meanings."""
    assert LETTERS.keys() == set(Kind)
    assert all(len(letter) == 1 for letter, _ in LETTERS.values())
    assert len(dict(LETTERS.values())) == len(set(LETTERS.values()))


@pytest.mark.parametrize("policy", ["zero_offload", "patrickstar", "stronghold", "autohete"])
def test_kinds_of_a_lane_differ_in_grey(policy: str) -> None:
    """On one lane any two kinds differ in hatch, or clearly in lightness, so that a print in grey can be read."""
    tasks = simulated("gpt-4b", policy).schedule.tasks
    pairs = {(a.id.kind, b.id.kind) for a in tasks for b in tasks if a.lane == b.lane and a.id.kind < b.id.kind}
    for a, b in pairs:
        grey = abs(luminance(look(a).colour) - luminance(look(b).colour))
        assert look(a).hatch != look(b).hatch or grey > 0.1, (a, b)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["zero_offload", "stronghold", "autohete"])
@pytest.mark.parametrize("case", ["small", "gpt-4b", "deep"])
def test_all_pictures_of_all_sizes_can_be_drawn(tmp_path: Path, case: str, policy: str) -> None:
    """From 4 blocks to 96, one iteration and two, each picture has its rows, its unit, its legend and its clock."""
    s = simulated(case, policy)
    first = s.steady.first
    one, two = combined_figure(s.trace, s.gpu, first, first, "one"), gantt_figure(s.trace, first, first + 1, "two")
    for figure in (one, two):
        above, below = figure.axes[0], figure.axes[-1]
        assert [label.get_text() for label in above.get_yticklabels()] == ["GPU", "host to GPU", "GPU to host", "CPU"]
        assert below.get_xlabel() in ("time (s, simulated)", "time (ms, simulated)")
        assert below.get_xlim()[0] == 0
        assert "forward" in [text.get_text() for text in figure.legends[0].get_texts()]
        save_figure(figure, tmp_path / "f.png")
    assert f"iteration {first}" in texts(two)
    assert f"iteration {first + 1}" in texts(two)


def test_bars_are_inside_their_rows_and_the_picture() -> None:
    """No bar leaves the time axis, and bars of a lane do not overlap by more than the least width of a mark."""
    s = simulated("gpt-4b", "autohete")
    axes = gantt_figure(s.trace, s.steady.first, s.steady.first + 1, "t").axes[0]
    end = axes.get_xlim()[1]
    least = end / (7 * 72 * 0.5)  # a point of a figure 7 inches wide, generously
    rows: dict[int, list[tuple[float, float]]] = {}
    for collection in axes.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            rows.setdefault(round((box.y0 + box.y1) / 2), []).append((box.x0, box.x1))
            assert box.y1 - box.y0 < 1
    assert sorted(rows) == [0, 1, 2, 3]
    for bars in rows.values():
        bars.sort()
        assert bars[0][0] >= 0
        assert bars[-1][1] <= end + least
        assert all(before[1] <= after[0] + least for before, after in pairwise(bars))


def test_numbers_fit_into_their_bars() -> None:
    """A block's number is drawn only where it is narrower than its bar, and no two numbers touch."""
    s = simulated("gpt-4b", "autohete")
    figure = combined_figure(s.trace, s.gpu, s.steady.first, s.steady.first, "t")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text().isdecimal()]
    assert len(boxes) > 20
    bars = [
        path.get_extents().transformed(axes.transData) for collection in axes.collections for path in collection.get_paths()
    ]
    for box in boxes:
        middle = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
        bar = next(bar for bar in bars if bar.contains(*middle))
        assert bar.x0 <= box.x0
        assert box.x1 <= bar.x1
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])


def test_a_window_runs_from_start_to_start() -> None:
    """A window of steady iterations is as long as their periods; the last iteration's ends with the run."""
    s = simulated("gpt-4b", "zero_offload")
    begin, end = window_ns(s.trace, s.steady.first, s.steady.first + 1)
    assert (end - begin) * 1e-9 == pytest.approx(2 * s.steady.period_seconds)
    last = s.trace.iterations - 1
    assert window_ns(s.trace, last, last)[1] == s.trace.end_ns.max()


@pytest.mark.parametrize(("first", "last"), [(-1, 0), (1, 0), (0, 10_000)])
def test_iterations_that_were_not_run_are_refused(first: int, last: int) -> None:
    """Iterations outside the run, or none, are an input error that says which there are."""
    s = simulated("small", "zero_offload")
    with pytest.raises(InputError, match=r"choose 0 <= first <= last <= \d+"):
        gantt_figure(s.trace, first, last, "t")


def test_memory_shows_capacity_and_what_holds_the_peak() -> None:
    """The picture of a memory labels its capacity and names the largest holders of its peak, in GiB."""
    s = simulated("gpt-4b", "zero_offload")
    figure = memory_figure([s.gpu, s.host], *window_ns(s.trace, s.steady.first, s.steady.first), "t", s.trace.clock)
    gpu, host = figure.axes
    assert f"capacity {s.gpu.capacity_bytes / 2**30:.1f} GiB" in texts(figure)
    assert gpu.get_title("left").startswith(f"peak {s.gpu.peak_bytes / 2**30:.1f} GiB at L22: activations 22.4, parameters 8.3")
    assert (gpu.get_ylabel(), host.get_ylabel()) == ("GPU memory\n(GiB)", "host memory\n(GiB)")
    assert host.get_xlabel() == "time (s, simulated)"


def test_a_peak_outside_the_picture_is_said() -> None:
    """Where the run's peak is not in the window, the title gives both the most that is shown and the peak."""
    s = simulated("gpt-4b", "zero_offload")
    title = memory_figure([s.gpu], 0, 1000, "t").axes[0].get_title("left")
    assert title.startswith("here up to ")
    assert f"in the run {s.gpu.peak_bytes / 2**30:.1f} GiB" in title


@pytest.mark.parametrize("window", [(5, 5), (6, 5), (-1, 5)])
def test_a_window_without_time_is_refused(window: tuple[int, int]) -> None:
    """A memory cannot be drawn over no time."""
    with pytest.raises(InputError, match="0 <= first_ns < last_ns"):
        memory_figure([simulated("small", "zero_offload").gpu], *window, "t")


def test_a_run_of_an_instant_can_be_drawn(tmp_path: Path) -> None:
    """Tasks of nanoseconds and of none, and a memory that nothing occupies, make a picture."""
    trace = instant_trace()
    figure = combined_figure(trace, occupancy(trace, "gpu"), 0, 0, "instant")
    assert figure.axes[-1].get_xlabel() == "time (ns, simulated)"
    save_figure(figure, tmp_path / "f.png")


def test_lanes_without_a_readable_name_keep_their_own(tmp_path: Path) -> None:
    """A lane that the reports do not know is drawn under its own name."""
    task = Task(TaskId(Kind.FORWARD, 0), "nvme", 10)
    trace = SimExecutor().run(validate(Schedule((Lane("nvme"),), (task,))), 2)
    labels = gantt_figure(trace, 0, 1, "t").axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["nvme"]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "pdf", "svg"])
def test_a_figure_is_the_same_each_time(tmp_path: Path, suffix: str) -> None:
    """Drawing and writing twice gives the same bytes, which name no date and no tool."""
    s = simulated("small", "autohete")
    written = [
        png(combined_figure(s.trace, s.gpu, s.steady.first, s.steady.first, "t"), tmp_path / f"{i}.{suffix}") for i in range(2)
    ]
    assert written[0] == written[1]
    assert b"matplotlib.org" not in written[0]
    assert b"CreationDate" not in written[0]


def test_a_reader_s_own_settings_change_nothing(tmp_path: Path) -> None:
    """Figures come out the same under another matplotlib configuration."""
    import matplotlib

    s = simulated("small", "autohete")

    def draw(name: str) -> bytes:
        return png(gantt_figure(s.trace, s.steady.first, s.steady.first, "t"), tmp_path / name)

    plain = draw("a.png")
    with matplotlib.rc_context({"font.size": 20, "hatch.linewidth": 5, "savefig.dpi": 50, "axes.grid": True}):
        assert draw("b.png") == plain


@pytest.mark.parametrize("name", ["figure.jpg", "figure"])
def test_another_suffix_is_refused(tmp_path: Path, name: str) -> None:
    """A suffix that is not PNG, PDF or SVG is an input error that lists them."""
    with pytest.raises(InputError, match=r"end the name in \.png, \.pdf, \.svg"):
        save_figure(Figure(), tmp_path / name)
    assert os.listdir(tmp_path) == []


def test_pyplot_stays_out() -> None:
    """The reports do not load pyplot, which would choose a backend and keep every figure alive."""
    code = "import sys, autohete.report.gantt, autohete.report.perfetto; print('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_perfetto_needs_no_matplotlib() -> None:
    """Writing a trace does not load matplotlib."""
    code = "import sys, autohete.report.perfetto; print('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_a_figure_goes_into_any_stream() -> None:
    """A figure is an ordinary matplotlib figure, which can be drawn without a file."""
    s = simulated("small", "zero_offload")
    stream = io.BytesIO()
    gantt_figure(s.trace, 0, 0, "t").savefig(stream)
    assert stream.getvalue().startswith(b"\x89PNG")
