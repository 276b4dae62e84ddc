"""``autohete trace``, ``--module`` and tables of traced models."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.command import autohete, refused
from support.traced import simulated, table_of_model

from autohete import tracing
from autohete.errors import InputError
from autohete.workload.config import read_model
from autohete.workload.optimizers import Optimizer
from autohete.workload.table import FORMAT, ModelTable, write_table
from autohete.workload.traced import TracedWorkload, traced_workload
from autohete.workload.training import Training

MODULE = """
import torch
from torch import nn
from torch.nn import functional

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.token, self.blocks = nn.Embedding(50, width), nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 50)
        self.blocks[0].norm.requires_grad_(False)
    def forward(self, ids):
        x = self.token(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

class Looking(Net):
    def forward(self, ids):
        return super().forward(ids) * (1 if ids.sum().item() else 2)

class Twice(Net):
    def forward(self, ids):
        return super().forward(ids) + self.head(self.blocks[0](self.token(ids)))

class Contrast(Net):
    def forward(self, ids):
        pooled = super().forward(ids).mean(1)
        return pooled @ pooled.mT

def build():
    return Net(64)

def looking():
    return Looking(64)

def twice():
    return Twice(64)

def contrast():
    return Contrast(64)

def nothing():
    return 5
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    """A file that builds a model."""
    path = tmp_path / "net.py"
    path.write_text(MODULE)
    return str(path)


def test_a_table_answers_what_its_module_answers(module: str, tmp_path: Path) -> None:
    """``simulate`` prints the same for a module that is traced at once and for its table."""
    table = str(tmp_path / "table.json")
    traced = autohete("trace", f"{module}:build", table, "--sequence-length", "32")
    assert traced.returncode == 0
    assert "0.1M parameters in 5 units" in traced.stdout
    asked = ("--policy", "resident", "--policy", "zero_offload", "--batch-size", "16", "--json")
    answers = [
        autohete("simulate", "--module", f"{module}:build", "--sequence-length", "32", *asked),
        autohete("simulate", "--model", table, *asked),
    ]
    assert [one.returncode for one in answers] == [0, 0]
    assert answers[0].stdout == answers[1].stdout
    assert [one["verdict"] for one in json.loads(answers[0].stdout)] == ["ok", "ok"]


def test_a_sweep_and_a_plan_take_a_table(module: str, tmp_path: Path) -> None:
    """A sweep over batches answers each; a plan shows every unit, and names the largest batch."""
    table, rows = str(tmp_path / "table.json"), tmp_path / "rows.csv"
    assert autohete("trace", f"{module}:build", table, "--sequence-length", "32").returncode == 0
    swept = autohete(
        "sweep", "--model", table, "--over", "batch-size=1,2", "--policy", "resident", "--out", str(rows), "--jobs", "1"
    )
    assert swept.returncode == 0
    assert [line.count(",ok,") for line in rows.read_text().splitlines()[1:]] == [1, 1]
    planned = autohete("plan", "--model", table, "--policy", "resident", "--gpu-memory", "1030MiB", "--max", "batch", "--json")
    assert planned.returncode == 0
    assert json.loads(planned.stdout)["largest"][0]["value"] > 8


@pytest.fixture(scope="module")
def table() -> ModelTable:
    """A traced model."""
    return table_of_model("state space")


def test_a_table_is_what_was_written(table: ModelTable, tmp_path: Path) -> None:
    """Reading returns an equal table; the file is lines that can be read, of some kernels at most."""
    path = tmp_path / "table.json"
    write_table(path, table)
    workload = read_model(str(path))
    assert isinstance(workload, TracedWorkload)
    assert workload.table == table
    rows = sum(len(kind.forward) + len(kind.backward) for kind in table.kinds) + len(table.loss.kernels)
    assert path.read_text().count('{"kernel"') == rows
    assert len(path.read_text().splitlines()) > rows / 2


CHANGES: list[tuple[Any, str]] = [
    ({"format": "autohete-table 0"}, "this version reads"),
    ({"more": 1}, "the key 'more'"),
    ({"width": 0}, "must be at least 1"),
    ({"beside_bytes": "many"}, "is no size"),
    ({"beside_bytes": 2**70}, "sizes are below"),
    ({"units": [0, 9, 1]}, "names kind 9"),
    ({"units": [0, 1]}, "at least one block"),
    ({"loss": {}}, "loss.kernels"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=lambda one: one if isinstance(one, str) else "")
def test_a_wrong_table_is_refused(change: dict[str, Any], message: str, table: ModelTable, tmp_path: Path) -> None:
    """The message names what is wrong and the cure."""
    path = tmp_path / "table.json"
    write_table(path, table)
    document = json.loads(path.read_text())
    assert document["format"] == FORMAT
    path.write_text(json.dumps(document | change))
    with pytest.raises(InputError, match=message) as error:
        read_model(str(path))
    assert "again" in str(error.value)


FIXED = [
    ("--sequence-length", "64", "sequence_length is 64"),
    ("--units", "sublayer", "units is sublayer"),
    ("--chunked-loss", "", "chunked_loss is True"),
    ("--lora", "8", "add adapters to the module"),
    ("--precision", "bf16", "was traced in fp32"),
    ("--blocks", "9", "transformer_blocks is 9"),
    ("--block-names", "layers", "give --module as well"),
]


@pytest.mark.parametrize(("option", "value", "message"), FIXED)
def test_what_a_table_does_not_hold_for_is_refused(
    option: str, value: str, message: str, table: ModelTable, tmp_path: Path
) -> None:
    """The message names the figure."""
    path = str(tmp_path / "table.json")
    write_table(path, table)
    assert message in refused("simulate", "--model", path, "--policy", "resident", option, *([value] if value else []))
    free = autohete(
        "simulate", "--model", path, "--policy", "resident", "--clip-norm", "1", "--optimizer", "muon", "--micro-batches", "2"
    )
    assert free.returncode == 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor", "adamw8bit", "came"])
def test_batch_and_optimizer_are_free(optimizer: str, table: ModelTable) -> None:
    """Any batch of a table trains with any optimizer, gradients clipped or not; larger batches take longer."""
    training = Training(optimizer=Optimizer(optimizer))
    small = replace(traced_workload(table), batch_size=64, micro_batches=2, clip_norm=1.0, training=training)
    seconds = [simulated(one, "resident").iteration_seconds for one in (small, replace(small, batch_size=640))]
    assert seconds[1] > 2 * seconds[0]


WRONG = [
    ("build", ["--kernels", "fused"], "a module runs its own"),
    ("looking", [], "depends on values"),
    ("twice", [], "calls block 0 (Block) 2 times"),
    ("nothing", [], "returns int: return a module"),
    ("buidl", [], "has no function 'buidl'"),
    ("build", ["--model", "gpt2"], "--module is a model of its own"),
    ("build", ["--block-names", "layers"], "has no blocks 'layers'"),
]


@pytest.mark.parametrize(("function", "options", "message"), WRONG)
def test_a_module_that_cannot_be_traced_is_refused(function: str, options: list[str], message: str, module: str) -> None:
    """One line says what is wrong, and nothing is simulated."""
    assert message in refused("simulate", "--module", f"{module}:{function}", "--sequence-length", "16", *options)


def test_an_unknown_module_is_refused(tmp_path: Path) -> None:
    """Neither a missing file nor an unknown name or key of transformers is traced."""
    assert "is no file" in refused("trace", f"{tmp_path}/none.py:build", str(tmp_path / "out.json"))
    pytest.importorskip("transformers")
    assert "did you mean" in refused("trace", "lamma", str(tmp_path / "out.json")).lower()
    unknown = refused("trace", "gpt2:n_layers=2", str(tmp_path / "out.json"))
    assert "'n_layers' in 'gpt2:n_layers=2' is no key of GPT2Config; did you mean 'n_layer'" in unknown
    assert not (tmp_path / "out.json").exists()


def test_tracing_without_torch_is_refused(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the package to install; a table is read without."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "tracing a module needs torch" in refused("simulate", "--module", f"{module}:build", "--sequence-length", "17")


def test_a_batch_that_counts_twice_holds_alone(module: str) -> None:
    """Where a size grows with the square of the batch, the table is of the batch that was asked for."""
    table = tracing.trace(f"{module}:contrast", sequence_length=16, batch_size=6)
    assert table.batch_sizes == (6,)
    with pytest.raises(InputError, match="do not grow linearly"):
        replace(traced_workload(table), batch_size=7)


def test_frozen_parameters_have_no_states(module: str) -> None:
    """A parameter without a gradient is frozen, so its unit has fewer states and is of another kind."""
    table = tracing.trace(f"{module}:build", sequence_length=16)
    frozen = [[one.name for one in table.unit(unit).parameters if one.frozen] for unit in range(5)]
    assert frozen == [[], ["norm.weight", "norm.bias"], [], [], []]
    assert table.units == (0, 1, 2, 2, 3)
