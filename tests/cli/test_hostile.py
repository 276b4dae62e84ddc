"""Hostile input is refused: exit code 2 and one printable line, soon, and no file is touched."""

from __future__ import annotations

import json
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import hostile
from support.command import SMALL, autohete

pytestmark = pytest.mark.slow
#: A refusal takes less.
SECONDS = 10


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
    begin = time.perf_counter()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.perf_counter() - begin < SECONDS  # what runs in C is not interrupted


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


TRIED = [option for option in hostile.OPTIONS if hostile.values(option) is not None]


def test_most_options_are_tried() -> None:
    """What is left out is named, and is little."""
    assert len(TRIED) >= len(hostile.OPTIONS) - 10


@settings(max_examples=150)
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


@settings(max_examples=32)
@given(hostile.hardware_files(), st.sampled_from([["simulate", "--hardware"], ["hardware", "check"], ["hardware", "show"]]))
def test_a_hostile_hardware_file_is_refused(folder: Path, text: str, command: list[str]) -> None:
    """Any figure, or part of one, that cannot be."""
    _check_file_refused(folder, "x.toml", text, *command, "x.toml", *(SMALL if command[0] == "simulate" else []))


@settings(max_examples=32)
@given(hostile.model_files())
def test_a_hostile_model_is_refused(folder: Path, text: str) -> None:
    """Any size of a family that cannot be."""
    _check_file_refused(folder, "x.json", text, "simulate", "--model", "x.json", "--policy", "resident")


@settings(max_examples=32)
@given(st.data())
def test_a_hostile_profile_is_refused(folder: Path, data: st.DataObject) -> None:
    """Any entry of a profile with another type."""
    document: Any = json.loads((folder / "good.json").read_text())
    text = data.draw(hostile.profile_files(document))
    _check_file_refused(folder, "x.json", text, "simulate", "--profile", "x.json", "--policy", "resident")


@settings(max_examples=32)
@given(st.data())
def test_a_hostile_trace_is_refused(folder: Path, data: st.DataObject) -> None:
    """Any entry of a trace with another type."""
    document: Any = json.loads((folder / "trace.json").read_text())
    _check_file_refused(folder, "x.json", data.draw(hostile.trace_files(document)), "compare", "x.json", "trace.json")


@settings(max_examples=32)
@given(hostile.grid_files())
def test_a_hostile_grid_is_refused(folder: Path, text: str) -> None:
    """Any option with values that it cannot have."""
    _check_file_refused(folder, "x.toml", text, "sweep", *SMALL[:-2], "--grid", "x.toml", "--out", "out.csv", "--jobs", "1")
