"""The README does what it says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The README's code blocks in ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Every ``autohete`` command of the README."""
    return [line for block in blocks("sh") for line in block.splitlines() if line.startswith("autohete ")]


def run(*command: str, cwd: Path) -> str:
    """The output of a command that must succeed without a warning."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("command", commands())
def test_every_command_works(command: str, tmp_path: Path) -> None:
    """Each command line of the README runs as it stands, and writes the files that it names."""
    words = shlex.split(command)
    assert run(sys.executable, "-m", *words, cwd=tmp_path)
    written = {word for word in words if re.fullmatch(r"\w+\.(png|json)", word)}
    assert {path.name for path in tmp_path.iterdir()} == written


def test_the_python_example_works(tmp_path: Path) -> None:
    """The README's Python runs as it stands and prints a line per policy."""
    code, _ = blocks("python")
    lines = run(sys.executable, "-c", code, cwd=tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == ["zero_offload", "autohete"]


def test_the_training_example_works(tmp_path: Path) -> None:
    """The README's training in ten lines runs as it stands."""
    _, code = blocks("python")
    assert re.fullmatch(r"loss \d\.\d\d, device peak \d+\.\d MiB\n", run(sys.executable, "-c", code, cwd=tmp_path))


def test_the_make_targets_exist() -> None:
    """The README names no make target that the Makefile does not have."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([\w-]+)", README)) - {"in"}
    assert named <= targets
    assert {"figure", "test"} <= named


def test_the_files_exist() -> None:
    """Every picture and file that the README links to is in the repository."""
    for path in re.findall(r"\]\((.*?)\)", README):
        assert path.startswith("https://") or (ROOT / path).is_file(), path


def test_the_figures_of_the_comparison_are_those_written() -> None:
    """The speed-ups at 10B that the README quotes are those of the sensitivity table."""
    rows = (ROOT / "paper_figs" / "fig_throughput_sensitivity.csv").read_text().splitlines()
    quoted = {
        "nominal": "2.56, 1.99\n  and 1.35",
        "cpu.update_bandwidth,42GB/s": "2.11, 1.54 and 1.23",
        "autohete,fused_casts": "3.42,\n  2.66, 1.79",
    }
    for start, text in quoted.items():
        (row,) = [row for row in rows if row.startswith(start)]
        numbers = [f"{float(number):.2f}" for number in row.split(",")[3:]]
        assert text in README
        assert re.findall(r"\d\.\d\d", text) == numbers
