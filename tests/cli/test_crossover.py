"""``autohete sweep --plot``: crossovers are where interpolated lines meet, and a map has the best policy of each cell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autohete.cli.question import Question, Shape
from autohete.cli.sweep import sweep
from autohete.errors import InputError
from autohete.report import crossover
from autohete.report.crossover import Best, Crossover, Metric, bests, crossovers, lines, metric_of, scales
from autohete.report.records import Row

SECONDS = Metric("iteration_seconds", "", less=True)
RATE = Metric("tokens_per_second", "", less=False)


def row(policy: str, x: str, seconds: float | None, y: str = "1", tokens: float = 100.0) -> Row:
    numbers = ("", "") if seconds is None else (str(seconds), str(tokens / seconds))
    return {"policy": policy, "x": x, "y": y, "iteration_seconds": numbers[0], "tokens_per_second": numbers[1]}


def test_lines_meet_where_they_are_equal() -> None:
    """A crossover is interpolated, names who becomes faster, and says whether a third is faster still."""
    (scale,) = scales({"x": ["20GB/s", "10GB/s", "30GB/s"], "policy": ["a", "b", "c"]})
    assert (scale.numbers, scale.unit, scale.label) == ((10.0, 20.0, 30.0), "GB/s", "x (GB/s)")
    times = {"a": (4.0, 2.0, 1.0), "b": (3.0, 3.0, 3.0), "c": (9.0, 1.0, None)}
    rows = [row(policy, x, t) for policy, ts in times.items() for x, t in zip(scale.texts, ts, strict=True)]
    found = lines(rows, scale, SECONDS)
    assert found["c"] == {10.0: 9.0, 20.0: 1.0}
    assert crossovers(found, SECONDS) == [
        Crossover("a", "b", 15.0, 3.0, best=True),
        Crossover("c", "b", 17.5, 3.0, best=False),
        Crossover("c", "a", pytest.approx(10 + 50 / 6), pytest.approx(4 - 10 / 6), best=True),  # type: ignore[arg-type]
    ]


def test_equal_lines_do_not_cross() -> None:
    """Lines that touch, or are equal for a while, cross where they begin to be equal, and only if they part the other way."""
    touch = {"a": {1.0: 2.0, 2.0: 1.0, 3.0: 2.0}, "b": {1.0: 1.0, 2.0: 1.0, 3.0: 1.0}}
    assert crossovers(touch, SECONDS) == []
    part = {"a": {1.0: 2.0, 2.0: 1.0, 3.0: 1.0, 4.0: 0.5}, "b": dict.fromkeys((1.0, 2.0, 3.0, 4.0), 1.0)}
    assert crossovers(part, SECONDS) == [Crossover("a", "b", 2.0, 1.0, best=True)]
    assert crossovers(part, RATE) == [Crossover("b", "a", 2.0, 1.0, best=True)]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=8))
def test_every_change_of_the_faster_is_a_crossover(points: list[tuple[int, int]]) -> None:
    """Between two crossovers the faster one stays the same; each is inside the values and both lines pass it."""
    found = {
        "a": {float(x): float(a) for x, (a, _) in enumerate(points)},
        "b": {float(x): float(b) for x, (_, b) in enumerate(points)},
    }
    signs = [a > b for a, b in points if a != b]
    some = crossovers(found, SECONDS)
    assert len(some) == sum(first != then for first, then in zip(signs, signs[1:], strict=False))
    for one, then in zip(some, some[1:], strict=False):
        assert one.at <= then.at
        assert one.winner == then.loser
    for one in some:
        for line in found.values():
            assert crossover._between(line, one.at) == pytest.approx(one.value)


def test_a_map_has_the_best_of_each_cell() -> None:
    """The gain is that against the next, None for the only one; a cell in which none fits is left out."""
    axes = scales({"x": ["1", "2"], "y": ["8", "16"], "policy": ["a", "b"]})
    times: list[tuple[str, str, str, float | None]] = [
        ("a", "1", "8", 2.0), ("b", "1", "8", 3.0), ("a", "2", "8", 4.0), ("b", "2", "8", None), ("a", "1", "16", None),
    ]  # fmt: skip
    rows = [row(policy, x, t, y) for policy, x, y, t in times]
    assert metric_of(rows).less
    assert bests(rows, axes, SECONDS) == {("1", "8"): Best("a", 50.0), ("2", "8"): Best("a", None)}
    assert metric_of([*rows, row("a", "1", 1.0, tokens=7.0)]).column == "tokens_per_second"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policy": ["a", "b"]}, "not 0 (none)"),
        ({"x": ["1", "2"], "y": ["1", "2"], "z": ["1", "2"]}, "not 3 (x, y, z)"),
        ({"kernels": ["fused", "eager"]}, "kernels has the value 'fused'"),
        ({"x": ["1GB/s", "2GiB"]}, "have different units"),
    ],
)
def test_what_cannot_be_drawn_is_refused(values: dict[str, list[str]], message: str) -> None:
    """One or two keys with numbers of one dimension are needed."""
    with pytest.raises(InputError, match=re.escape(message)):
        scales(values)


def test_units_of_one_dimension_are_converted() -> None:
    """Values in several units of a dimension become numbers in one of them."""
    (scale,) = scales({"gpu-memory": ["2GiB", "512MiB", "1GiB"]})
    assert (scale.texts, scale.numbers, scale.unit) == (("512MiB", "1GiB", "2GiB"), (0.5, 1.0, 2.0), "GiB")


def test_a_sweep_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A picture of the rows of this sweep, also of those that were there; what cannot be drawn is refused before the work."""
    out, plot = tmp_path / "out.csv", tmp_path / "out.png"
    question = Question(shape=Shape(hidden_size=256, transformer_blocks=4, heads=4, vocabulary_size=1000))
    policies = ("zero_offload", "resident")
    for over, more in (("batch-size=1,64", False), ("batch-size=1,8,64", True)):
        sweep(out=str(out), question=question, policy=policies, over=(over,), plot=str(plot), resume=more, jobs=1)
    assert "no policy overtakes another over batch-size" in capsys.readouterr().out
    data = plot.read_bytes()
    assert data.startswith(b"\x89PNG")
    two = ("batch-size=1,8", "cpu.update_bandwidth=1GB/s,100GB/s")
    sweep(out=str(tmp_path / "map.csv"), question=question, policy=policies, over=two, plot=str(plot), jobs=1)
    assert re.search(r"resident is the fastest in 4 of 4 cells, by \d+\.\d % in the median", capsys.readouterr().out)
    assert plot.read_bytes() != data
    with pytest.raises(InputError, match="a plot needs numbers: kernels has the value"):
        sweep(out=str(tmp_path / "no.csv"), question=question, over=("kernels=fused,eager",), plot=str(plot))
    assert not (tmp_path / "no.csv").exists()
