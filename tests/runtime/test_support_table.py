"""What the runtime executes: every policy with every feature, as the table in ``docs/reference/support.md`` says.

``AUTOHETE_UPDATE_GOLDEN=1 pytest tests/runtime/test_support_table.py`` tries every cell and writes the table anew, a row at a
time. Without it, two cells of each row are tried, all columns among them, and some on two ranks.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.measured import MEDIUM
from support.rank_trainings import attempts_of_rank, trainer_in_one
from support.ranks import results
from support.reference import batches, model_for
from support.small import CLIP_NORM, profile_of
from torch import Tensor

from autohete.errors import AutoHeteError
from autohete.policies import POLICIES
from autohete.train.verification import verify
from autohete.workload import Precision, Units

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "support.md"
BEGIN, END = "<!-- written by tests/runtime/test_support_table.py -->\n", "<!-- end -->\n"
#: Those that search are given less memory than resident training needs, so that they move something.
BUDGETS = {
    **dict.fromkeys(("autohete", "joint"), "85%"),
    "block_swap": "90%",
    **dict.fromkeys(("autotm", "capuchin", "checkmate", "dtr", "flashneuron", "moccasin", "pofo", "rotor"), "95%"),
    **dict.fromkeys(("superneurons", "te_offload"), "95%"),
}
#: With flags that move other values.
FLAGS = (
    "l2l:paper",
    "megatron_hybrid:percent=50,overlap",
    "resident:in_backward",
    "streamed_states:weights",
    "zero_infinity:offload_param",
)
ROWS = sorted((*POLICIES, *FLAGS))
EXACT, RANKS = "exact", "2 ranks"
UPDATES = os.environ.get("AUTOHETE_UPDATE_GOLDEN") == "1"


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature that training is tried with.

    Args:
        options: keywords of a Trainer.
        shape: fields of the workload that differ from the small model's.
        optimizer: made from the trained parameters.
        trains: whether a parameter is trained, by its name.
    """

    options: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None
    trains: Callable[[str], bool] = lambda name: True

    def attempt(self, policy: str) -> str:
        """Train under ``policy`` beside plain PyTorch: ``exact``, or why not."""
        workload = replace(MEDIUM, **self.shape)
        model = model_for(workload)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.trains(name))
        optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad]) if self.optimizer else None
        options = {"policy": policy, "gpu_memory": BUDGETS.get(policy), "hardware": profile_of(MEDIUM).hardware} | self.options
        try:
            found = verify(model, batches(workload, 2), optimizer=optimizer, blocks="blocks", **options)
        except AutoHeteError as error:
            return reason(error)
        return EXACT if found.is_equal else f"differs: {found.differences[0]}"


def reason(error: Exception) -> str:
    """Why something is refused, without what to do."""
    return str(error).partition(": ")[0]


def adamw8bit(parameters: list[Tensor]) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = importlib.import_module("bitsandbytes.optim").AdamW8bit(parameters, lr=1e-3)
    return made


BF16, FP16 = {"precision": Precision.BF16}, {"precision": Precision.FP16}
FEATURES = {
    "fp32": Feature(),
    "bf16": Feature(shape=BF16),
    "bf16, no masters": Feature({"master_weights": False}, BF16),
    "fp16, scaled": Feature({"grad_scaler": torch.amp.GradScaler("cpu", init_scale=2.0**19)}, FP16),
    "autocast": Feature({"autocast": torch.bfloat16}),
    "clipped": Feature({"clip_norm": CLIP_NORM}),
    "accumulated": Feature({"micro_batches": 2}),
    "both, bf16": Feature({"clip_norm": CLIP_NORM, "micro_batches": 2}, BF16),
    "SGD": Feature(optimizer=lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9)),
    "Adafactor": Feature(optimizer=lambda given: torch.optim.Adafactor(given, lr=1e-3)),
    "8-bit AdamW": Feature(optimizer=adamw8bit),
    "frozen base": Feature(trains=lambda name: "down" in name),
    "sublayers": Feature(shape={"units": Units.SUBLAYER}),
    "pinned limit": Feature({"pinned_memory": "4MiB"}),
}


def on_two_ranks(policies: Sequence[str]) -> dict[str, str]:
    """What two ranks do under each policy, with the bits of one process that computes their batches as micro-batches."""
    expected = trainer_in_one(2, clip_norm=None)["after"]
    by_rank: list[list[dict[str, Tensor] | str]] = results(attempts_of_rank, 2, 2, list(policies))
    found = {}
    for policy, *ranks in zip(policies, *by_rank, strict=True):
        refusals = {rank.partition(": ")[0] for rank in ranks if isinstance(rank, str) and "has failed" not in rank}
        weights = [rank for rank in ranks if not isinstance(rank, str)]
        differing = [name for rank in weights for name, value in rank.items() if not torch.equal(value, expected[name])]
        found[policy] = "; ".join(sorted(refusals)) or (f"differs: {differing[0]}" if differing else EXACT)
    return found


def written(cells: Mapping[tuple[str, str], str]) -> str:
    """The table, and below it why cells are refused."""
    columns = [*FEATURES, RANKS]
    reasons = {why: i for i, why in enumerate(dict.fromkeys(why for why in cells.values() if why not in ("", EXACT)), 1)}
    shown = {EXACT: EXACT, "": ""} | {why: f"[{i}]" for why, i in reasons.items()}
    head = f"| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}\n"
    rows = [[f"`{row}`", *(shown[cells[row, column]] for column in columns)] for row in ROWS]
    table = head + "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return table + "\nRefused:\n\n" + "".join(f"{i}. {why}\n" for why, i in reasons.items())


def read(page: str) -> dict[tuple[str, str], str]:
    """The cells of a page, with the reasons that it gives."""
    lines = page.partition(BEGIN)[2].partition(END)[0].splitlines()
    reasons = {f"[{line.partition('. ')[0]}]": line.partition(". ")[2] for line in lines if line[:1].isdigit()}
    head, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("|")] or [[], []]
    return {
        (row[0].strip("`"), column): reasons.get(cell, cell)
        for row in rows
        for column, cell in zip(head[1:], row[1:], strict=True)
    }


def update(cells: Mapping[tuple[str, str], str]) -> None:
    """Write cells to the page; those of rows that it lacks are empty."""
    page = PAGE.read_text(encoding="utf-8")
    everywhere = dict.fromkeys(((row, column) for row in ROWS for column in (*FEATURES, RANKS)), "")
    found = everywhere | {cell: told for cell, told in read(page).items() if cell in everywhere} | dict(cells)
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + written(found) + "\n" + END + rest.partition(END)[2], encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_a_row_says_what_the_runtime_does(row: str) -> None:
    """Cells that are tried are as the page says."""
    columns, place = list(FEATURES), ROWS.index(row)
    if UPDATES:
        update({(row, column): FEATURES[column].attempt(row) for column in columns})
    tried = [columns[(2 * place + i) % len(columns)] for i in range(2)]
    told = read(PAGE.read_text(encoding="utf-8"))
    assert {column: FEATURES[column].attempt(row) for column in tried} == {column: told[row, column] for column in tried}


@pytest.mark.slow
def test_the_column_of_ranks_says_what_they_do() -> None:
    """Some policies, each exact or refused on both ranks."""
    if UPDATES:
        update({(row, RANKS): found for row, found in on_two_ranks(ROWS).items()})
    told, some = read(PAGE.read_text(encoding="utf-8")), ROWS[:: len(ROWS) // 4]
    assert on_two_ranks(some) == {row: told[row, RANKS] for row in some}


def test_every_cell_is_exact_or_refused() -> None:
    """The page has all policies and features, and no training that differs from plain PyTorch."""
    told = read(PAGE.read_text(encoding="utf-8"))
    assert told.keys() == {(row, column) for row in ROWS for column in (*FEATURES, RANKS)}
    assert not [cell for cell in told.items() if not cell[1] or cell[1].startswith("differs")]
