"""``autohete sweep --sensitivity``: one figure at a time, each effect that of the same setting answered by itself."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autohete.answer.draws import figures_of
from autohete.cli.axes import parse_over
from autohete.cli.question import Question, Shape
from autohete.cli.shifts import Shift, shifted, shifts
from autohete.cli.sweep import sweep
from autohete.errors import InputError
from autohete.policies import parse_policy
from autohete.simulate import simulate_policy

SHAPE = Shape(hidden_size=256, transformer_blocks=4, heads=4, vocabulary_size=1000, batch_size=8)
QUESTION = Question(shape=SHAPE, set_=("links.h2d.bandwidth=10GB/s",))


def seconds(question: Question, policy: str) -> float:
    return simulate_policy(question.answerable(), parse_policy(policy)).iteration_seconds


def test_an_effect_is_that_of_the_setting_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Percents are those of two answers; the largest effect is first, in the file, in the table and in the picture's order."""
    out, plot = tmp_path / "out.csv", tmp_path / "out.png"
    over = ("batch-size=4,16", "links.h2d.bandwidth", "cpu.cores=4", "gpu-memory=1030MiB", "links.d2h.latency")
    policies = ("zero_offload", "resident")
    sweep(out=str(out), question=QUESTION, policy=policies, over=over, sensitivity=True, plot=str(plot), jobs=1)
    with out.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    by = {(row["key"], row["value"], row["policy"]): row for row in rows}
    for policy in policies:
        base = seconds(QUESTION, policy)
        batch = seconds(replace(QUESTION, shape=replace(SHAPE, batch_size=16)), policy)
        link = seconds(replace(QUESTION, set_=("links.h2d.bandwidth=11GB/s",)), policy)
        for key, value, found in (("batch-size", "16", batch), ("links.h2d.bandwidth", "11GB/s", link)):
            row = by[key, value, policy]
            assert float(row["percent"]) == pytest.approx(100 * (found / base - 1), abs=1e-9)
            assert float(row["base_seconds"]) == base
    short = by["gpu-memory", "1030MiB", "resident"]
    assert (short["verdict"], short["percent"]) == ("gpu-out-of-memory", "")
    order = list(dict.fromkeys(row["key"] for row in rows))
    assert order[:2] == ["gpu-memory", "batch-size"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert re.search(r"batch-size +8 +16 +\+\d+\.\d % +\+\d+\.\d %", said)
    assert "less than 0.05 %: " in said


def test_figures_with_a_range_are_moved_to_its_ends() -> None:
    """Without keys every figure with a range that was not set and concerns one GPU is moved; one set, or without, by 10 %."""
    found = {move.key: move for move in shifts(QUESTION, [])}
    assert list(found) == [one.key for one in figures_of(QUESTION.hardware) if one.key != "links.h2d.bandwidth"]
    assert found["gpu.kernel_overhead"] == Shift("gpu.kernel_overhead", "2us", ("0.6us", "4us"))
    asked = [parse_over(key, bare=True) for key in ("links.h2d.bandwidth", "gpu.multiprocessors", "batch-size")]
    assert [(move.base, move.values) for move in shifts(QUESTION, asked)] == [
        ("10GB/s", ("9GB/s", "11GB/s")),
        ("108", ("97", "119")),
        ("8", ("7", "9")),
    ]
    named = Question(workload="gpt-2b", gpu_memory="16GiB")
    asked = [parse_over(key, bare=True) for key in ("sequence-length", "gpu-memory")]
    sequence, memory = shifts(named, asked)
    assert (sequence.base, sequence.values) == ("1024", ("921", "1127"))
    assert (memory.base, memory.values) == ("16GiB", ("14.4GiB", "17.6GiB"))
    changed = [setting.question for setting in shifted(named, [sequence, memory], ["resident"])]
    assert changed[0] == named
    assert [question.shape.sequence_length for question in changed] == [None, 921, 1127, None, None]
    assert [question.gpu_memory for question in changed] == ["16GiB", "16GiB", "16GiB", "14.4GiB", "17.6GiB"]


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("kernels", "kernels has no number to move"),
        ("policy=resident,autohete", "give policies with --policy"),
        ("links.h2d.bandwith", "did you mean 'links.h2d.bandwidth'?"),
        ("batch-size batch-size=2", "batch-size is given twice"),
        ("batch-size=x", "'x' is not a whole number, such as 8"),
    ],
)
def test_what_cannot_be_moved_is_refused(over: str, message: str, tmp_path: Path) -> None:
    """What has no number, or is no key, is refused before a file is made."""
    out = tmp_path / "out.csv"
    with pytest.raises(Exception, match=re.escape(message)):
        sweep(out=str(out), question=QUESTION, over=tuple(over.split()), sensitivity=True, jobs=1)
    with pytest.raises(InputError, match="leave out --resume"):
        sweep(out=str(out), question=QUESTION, sensitivity=True, resume=True)
    with pytest.raises(InputError, match="is not KEY=V1,V2"):
        sweep(out=str(out), question=QUESTION, over=("batch-size",))
    assert not out.exists()
