"""The README does what it says."""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import mean

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
    """Each number of the README's table of speed-ups is that of the committed file."""
    rows = list(csv.DictReader((ROOT / "paper_figs" / "fig_throughput_ratios.csv").read_text().splitlines()))
    table = README[README.index("| AutoHete over |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == len(rows)
    for line, row in zip(table, rows, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")[1:]]
        expected = []
        for name, prefix in (("average", ""), ("maximum", "maximum_")):
            number, paper = float(row[name]), float(row[f"{prefix}paper"])
            expected += [
                f"{number:.2f} ({100 * (number / paper - 1):+.0f} %)",
                f"{float(row[f'{prefix}low']):.2f} to {float(row[f'{prefix}high']):.2f}",
                f"{paper:.2f}",
            ]
        assert cells == expected


def test_the_variant_of_autohete_is_the_one_written() -> None:
    """The README's ratios of the variant that uploads the fp32 master are those of the committed file."""
    rows = csv.DictReader((ROOT / "paper_figs" / "fig_throughput_variants.csv").read_text().splitlines())
    average = {row["over"]: f"{float(row['average']):.2f}" for row in rows if row["autohete"] == "fp32_upload"}
    zero, patrickstar = average["zero_offload:deepspeed=0.4.3"], average["patrickstar"]
    text = " ".join(README.split())
    assert f"it would be {average['autohete:priority=off']}, but the other ratios {zero} (0.4.3), {patrickstar} and" in text
    assert f"and {average['stronghold']} (`fig_throughput_variants.csv`)" in text


def test_the_scores_of_published_rows_are_those_written() -> None:
    """The README's errors over published rows are those of the committed file."""
    rows = list(csv.DictReader((ROOT / "paper_figs" / "published.csv").read_text().splitlines()))
    timed = [row for row in rows if row["unit"] == "s" and not row["calibrates"]]
    errors = {
        kind: [abs(float(row["difference_percent"])) for row in timed if (row["phase"] == "iteration") == (kind == "iteration")]
        for kind in ("iteration", "phase")
    }
    verdicts = [row["measured"] == row["predicted"] for row in rows if row["unit"] == "fits"]
    text = " ".join(README.split())
    iteration, phase = errors["iteration"], errors["phase"]
    assert f"off by {mean(iteration):.1f} % on average and {max(iteration):.1f} % at worst ({len(iteration)} rows)" in text
    assert f"phases by {mean(phase):.1f} % ({len(phase)})" in text
    assert f"{sum(verdicts)} of {len(verdicts)} memory verdicts are right" in text
