"""Hostile input is refused: exit code 2 and one printable line, soon, and no file is touched."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support import hostile
from support.command import ENVIRONMENT, SMALL, autohete, refused

from autohete.printable import printable
from autohete.report.records import Tally, print_tally

pytestmark = pytest.mark.slow
#: A refusal takes less.
SECONDS = 10
#: To explain a failure, every line is traced, which takes several times as long.
PHASES = set(Phase) - {Phase.explain}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are not what they are named, a good trace, and a good profile."""
    path = tmp_path_factory.mktemp("hostile")
    hostile.make_files(path)
    import_module("autohete.train.trainer")  # PyTorch, which takes seconds by itself
    assert autohete("simulate", *SMALL, "--policy", "resident", "--trace", str(path / "trace.json")).returncode == 0
    hostile.profile_document(path)
    return path


def _state(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Each file with its mode, size, time of change and, if it is small, its contents."""
    state = {}
    for path in sorted(folder.iterdir()):
        found = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(found.st_mode) and found.st_size < 10_000 else b""
        state[path.name] = (found.st_mode, found.st_size, found.st_mtime_ns, content)
    return state


def _too_late(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"no answer in {SECONDS} s")


@contextmanager
def _soon() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(SECONDS)
    begin = time.process_time()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - begin < SECONDS  # what runs in C is not interrupted


def _check_refused(folder: Path, arguments: list[str]) -> None:
    before = _state(folder)
    with _soon():
        done = autohete(*arguments, cwd=folder)
    shown = [text if len(text) < 200 else f"{text[:200]}… ({len(text)})" for text in arguments]
    assert done.returncode == 2, (shown, done.returncode, done.stdout[-500:], done.stderr[-500:])
    assert done.stdout == "", (shown, done.stdout)
    line = done.stderr.removesuffix("\n")
    assert line.startswith("autohete: "), (shown, line)
    assert line.isprintable(), (shown, line)
    assert len(line) < 9000, (shown, line)
    assert _state(folder) == before, shown


def test_what_is_refused_is_right_but_for_one_value(folder: Path) -> None:
    """With a good file, the command lines in which the tests below give a bad one are answered."""
    for option, value in (
        (hostile.Option(("simulate",), "--trace", str), "/dev/null"),
        (hostile.Option(("sweep",), "--out", str), "/dev/null"),
        (hostile.Option(("plan",), "--schedule", str), "/dev/null"),
        (hostile.Option(("plan",), "--batch-size", int), "1"),
        (hostile.Option(("compare",), "1", str), "trace.json"),
        (hostile.Option(("calibrate",), "--step-name", str), "ProfilerStep"),
        (hostile.Option(("hardware", "check"), "0", str), "input.toml"),
    ):
        line = [
            word.replace("input.json", "trace.json") if option.command == ("compare",) else word
            for word in hostile.command_line(option, value)
        ]
        assert autohete(*line, cwd=folder).returncode == 0, line
    for line in (["simulate", "--profile", "good.json", "--policy", "resident"], ["compare", "trace.json", "trace.json"]):
        assert autohete(*line, cwd=folder).returncode == 0, line


TRIED = [option for option in hostile.OPTIONS if hostile.values(option) is not None]


def test_most_options_are_tried() -> None:
    """What is left out is named, and is little."""
    assert len(TRIED) >= len(hostile.OPTIONS) - 10


@settings(max_examples=150, phases=PHASES)
@given(st.data())
def test_a_hostile_value_of_any_option_is_refused(folder: Path, data: st.DataObject) -> None:
    """Of any option of any command: no number, name, quantity or policy, and files that cannot be read or written."""
    option = data.draw(st.sampled_from(TRIED))
    values = hostile.values(option)
    assert values is not None
    _check_refused(folder, hostile.command_line(option, data.draw(values)))


def _check_file_refused(folder: Path, name: str, text: str, *arguments: str) -> None:
    path = folder / name
    path.write_text(text)
    try:
        _check_refused(folder, [*arguments])
    finally:
        path.unlink()


@settings(max_examples=32, phases=PHASES)
@given(hostile.hardware_files(), st.sampled_from([["simulate", "--hardware"], ["hardware", "check"], ["hardware", "show"]]))
def test_a_hostile_hardware_file_is_refused(folder: Path, text: str, command: list[str]) -> None:
    """Any figure, or part of one, that cannot be."""
    _check_file_refused(folder, "x.toml", text, *command, "x.toml", *(SMALL if command[0] == "simulate" else []))


@settings(max_examples=32, phases=PHASES)
@given(hostile.model_files())
def test_a_hostile_model_is_refused(folder: Path, text: str) -> None:
    """Any size of a family that cannot be."""
    _check_file_refused(folder, "x.json", text, "simulate", "--model", "x.json", "--policy", "resident")


@settings(max_examples=32, phases=PHASES)
@given(st.data())
def test_a_hostile_profile_is_refused(folder: Path, data: st.DataObject) -> None:
    """Any entry of a profile with another type."""
    document: Any = json.loads((folder / "good.json").read_text())
    text = data.draw(hostile.profile_files(document))
    _check_file_refused(folder, "x.json", text, "simulate", "--profile", "x.json", "--policy", "resident")


@settings(max_examples=32, phases=PHASES)
@given(st.data())
def test_a_hostile_trace_is_refused(folder: Path, data: st.DataObject) -> None:
    """Any entry of a trace with another type."""
    document: Any = json.loads((folder / "trace.json").read_text())
    _check_file_refused(folder, "x.json", data.draw(hostile.trace_files(document)), "compare", "x.json", "trace.json")


@settings(max_examples=32, phases=PHASES)
@given(st.data())
def test_a_hostile_recording_is_answered(folder: Path, data: st.DataObject) -> None:
    """Any entry of a profiler's trace with another type: it is refused in one line, or not needed."""
    document: Any = json.loads((folder / "recording.json").read_text())
    (folder / "x.json").write_text(data.draw(hostile.recordings(document)))
    with _soon():
        done = autohete("calibrate", "x.json", "--hardware", hostile.NODE, *SMALL, cwd=folder)
    (folder / "x.json").unlink()
    assert done.returncode in (0, 2), done.stderr
    assert done.stderr.count("\n") == (done.returncode == 2)
    assert all(line.isprintable() for line in (done.stdout + done.stderr).splitlines())


@settings(max_examples=32, phases=PHASES)
@given(hostile.grid_files())
def test_a_hostile_grid_is_refused(folder: Path, text: str) -> None:
    """Any option with values that it cannot have."""
    _check_file_refused(folder, "x.toml", text, "sweep", *SMALL[:-2], "--grid", "x.toml", "--out", "out.csv", "--jobs", "1")


# --- names --------------------------------------------------------------------------------------------------------

#: Mathtext that does not parse, markup, what a terminal obeys, letters that a font lacks, a byte that is no UTF-8.
NAMES = ["$x_{$", "[bold]a[b]:x:", "\x1b[31mred\x07", "模型", "a\udcff", "=1+1", "a\nb"]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_model_may_have_any_name(name: str, tmp_path: Path) -> None:
    """Tables, figures and timelines show it, and obey nothing in it."""
    file = tmp_path / f"{name}.json"
    file.write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 1024})
    )
    question = ["--model", str(file), "--sequence-length", "64", "--batch-size", "1"]
    outputs = ["--gantt", "g.png", "--memory", "m.svg", "--trace", "t.json"]
    done = autohete("simulate", *question, "--policy", "resident", *outputs, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert printable(name) in done.stdout
    assert all(line.isprintable() for line in done.stdout.splitlines())
    drawn = (tmp_path / "m.svg").read_text()
    assert "\x1b" not in drawn


def test_a_verdict_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Cells of tables and lines are plain text, whatever a resumed file has."""
    row = dict.fromkeys(("verdict", "policy"), "[red]:x:[/nothing]\x1b[31m") | {"tokens_per_second": "1"}
    tally = Tally()
    tally.add(row)
    print_tally(tally, ["policy"], 1, 1.0, "[bold]\x1b.csv")
    printed = capsys.readouterr().out
    assert printed.count(r"[red]:x:[/nothing]\x1b[31m") == 2
    assert r"[bold]\x1b.csv: 1 row" in printed


# --- code ---------------------------------------------------------------------------------------------------------


def test_no_code_of_the_current_folder_is_run(tmp_path: Path) -> None:
    """A policy, also one that a grid names, is imported from the current folder only if PYTHONPATH names that."""
    (tmp_path / "mine.py").write_text("from autohete.policies.resident import Resident\nprint('imported')\n")
    (tmp_path / "grid.toml").write_text('[over]\npolicy = ["mine:Resident"]\n')
    command = [sys.executable, "-m", "autohete", "sweep", *SMALL, "--grid", "grid.toml", "--out", "out.csv", "--jobs", "1"]
    installed = ENVIRONMENT["PYTHONPATH"]
    for path, code in ((installed, 2), (f".{os.pathsep}{installed}", 0)):
        environment = ENVIRONMENT | {"PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False, timeout=120)
        assert done.returncode == code, done
        assert ("imported" in done.stdout) == (code == 0)
        assert ("for a module in the current folder set PYTHONPATH=." in done.stderr) == (code == 2)


def test_a_class_that_cannot_be_made_is_no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the one that gives policies their names, and one with a field that the command line does not give."""
    (tmp_path / "lacking.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Policy:\n    a: int\n    def plan(self, profile, judge): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "is no policy" in refused("simulate", *SMALL, "--policy", "autohete.policies:NamedPolicy,name=x")
    assert "lacking:a is missing: give a=VALUE" in refused("simulate", *SMALL, "--policy", "lacking:Policy")
