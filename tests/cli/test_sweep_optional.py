"""What ``autohete sweep`` does with optional packages: Parquet files and clusters; without them it says what to install."""

from __future__ import annotations

import csv
import importlib.util
import sys
from pathlib import Path

import pytest
from support.command import SMALL, in_a_process, refused

from autohete.cli.question import Question, Shape
from autohete.cli.sweep import sweep
from autohete.errors import InputError
from autohete.report.parquet import journal_of, read_parquet

QUESTION = Question(shape=Shape(hidden_size=256, transformer_blocks=4, heads=4, vocabulary_size=1000))
needs_pyarrow = pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
needs_dask = pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="dask[distributed] is not installed")


def run(path: Path, over: str, *, resume: bool = False) -> None:
    sweep(out=str(path), question=QUESTION, policy=("resident",), over=(over, "gpu-memory=1030MiB,8GB"), jobs=1, resume=resume)


@needs_pyarrow
def test_parquet_has_the_rows_of_csv(tmp_path: Path) -> None:
    """Cell by cell a Parquet file has what the CSV file has; keys are text and empty numbers null."""
    from pyarrow import parquet

    run(tmp_path / "a.csv", "batch-size=1,2")
    run(tmp_path / "a.parquet", "batch-size=1,2")
    with (tmp_path / "a.csv").open(newline="") as stream:
        expected = list(csv.DictReader(stream))
    found = parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert len(found) == len(expected) == 4
    assert {row["verdict"] for row in found} == {"ok", "gpu-out-of-memory"}
    for row, texts in zip(found, expected, strict=True):
        assert list(row) == list(texts)
        for name, value in row.items():
            assert texts[name] == ("" if value is None else value if isinstance(value, str) else repr(value).lower())
        assert isinstance(row["gpus"], int)
        assert isinstance(row["settled"], bool)
        assert row["batch-size"] in ("1", "2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "a.parquet"]


@needs_pyarrow
def test_a_parquet_file_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted sweep leaves its rows in a journal and no half file; ``--resume`` answers the rest, in a new group."""
    from pyarrow import parquet

    out, journal = tmp_path / "a.parquet", Path(journal_of(str(tmp_path / "a.parquet")))
    run(out, "batch-size=1")
    whole = out.read_bytes()
    with pytest.raises(InputError, match="exists: continue it with --resume"):
        run(out, "batch-size=1")
    from autohete.cli import sweep as module

    answer, asked = module._row, []

    def interrupted(setting: object, keys: list[str]) -> dict[str, str]:
        asked.append(setting)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return answer(setting, keys)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(out, "batch-size=1..4:1", resume=True)
    assert out.read_bytes() == whole
    assert journal.read_bytes().count(b"\n") == 4
    run(out, "batch-size=1..4:1", resume=True)
    assert len(asked) == 4 + 3
    assert not journal.exists()
    file = parquet.ParquetFile(out)
    assert file.num_row_groups == 2
    assert sorted(file.read().column("batch-size").to_pylist()) == sorted("11223344")
    with pytest.raises(InputError, match="cannot be continued: it has no column 'micro-batches'"):
        sweep(out=str(out), question=QUESTION, over=("micro-batches=1,2",), resume=True)
    out.write_bytes(b"PAR1")
    with pytest.raises(InputError, match="not a sweep's file"):
        run(out, "batch-size=1", resume=True)


@pytest.mark.slow
@needs_pyarrow
def test_a_parquet_row_that_has_changed_is_not_continued(tmp_path: Path) -> None:
    """Whatever byte of the file is another, its rows are refused or are as they were; so are rows that were written again."""
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    run(path, "batch-size=1,2")
    whole, header = path.read_bytes(), parquet.read_schema(path).names
    rows = read_parquet(str(path), header)
    refusals = 0
    for place in range(4, len(whole), len(whole) // 200):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            assert read_parquet(str(path), header) == rows
        except InputError:
            refusals += 1
    assert refusals > 50
    path.write_bytes(whole)
    table = parquet.read_table(path)
    place = table.column_names.index("iteration_seconds")
    faster = pyarrow.array([None if x is None else x / 2 for x in table.column(place).to_pylist()])
    parquet.write_table(table.set_column(place, "iteration_seconds", faster), path)
    with pytest.raises(InputError, match=r"row \d is not as it was written: remove it, or choose another file"):
        run(path, "batch-size=1,2", resume=True)


@pytest.mark.slow
@needs_dask
def test_a_cluster_answers_the_same(tmp_path: Path) -> None:
    """The workers of a local cluster write the rows that this process writes; a wrong address is refused, without a file."""
    texts = []
    for name, more in (("here", ["--jobs", "1"]), ("there", ["--cluster", "local", "--jobs", "2"])):
        out = tmp_path / f"{name}.csv"
        done = in_a_process(
            "sweep", *SMALL[:-2], "--over", "batch-size=1..12:1", "--out", str(out), "--policy", "resident", *more
        )
        assert done.returncode == 0, done.stderr
        header, *lines = out.read_text().splitlines()
        texts.append([header, *sorted(lines)])
    assert texts[0] == texts[1]
    none = tmp_path / "none.csv"
    assert "no Dask scheduler at 'tcp://127.0.0.1:1'" in refused(
        "sweep", *SMALL, "--out", str(none), "--cluster", "tcp://127.0.0.1:1"
    )
    assert not none.exists()


@pytest.mark.parametrize(
    ("module", "name", "options", "message"),
    [
        ("pyarrow", "a.parquet", {}, "install it with `pip install 'autohete[parquet]'`"),
        ("distributed", "a.csv", {"cluster": "local"}, "install it with `pip install 'autohete[cluster]'`"),
    ],
)
def test_a_missing_package_is_named(
    module: str, name: str, options: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an optional package the option says what to install, before there is a file."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError) as refusal:
        sweep(out=str(tmp_path / name), question=QUESTION, policy=("resident",), over=("batch-size=1,2",), **options)  # type: ignore[arg-type]
    assert message in str(refusal.value)
    assert not list(tmp_path.iterdir())
