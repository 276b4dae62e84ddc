"""Every task needs what its schedule says: no byte more, and where operations allow, no byte less."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.measured import MEDIUM, SETTLED, predicted, profile_for
from support.reference import batches, model_for
from torch import Tensor, nn

from autohete.hardware import load_hardware
from autohete.lowering import lower
from autohete.plan import Activations, Plan, UnitPlan
from autohete.policies import parse_policy
from autohete.runtime.batch import Batch
from autohete.runtime.ledger import Ledger
from autohete.runtime.partition import partition
from autohete.runtime.probe import by_use
from autohete.runtime.settings import Recipe
from autohete.runtime.takeover import Ledgers, Takeover
from autohete.schedule import GPU_MEMORY, Schedule
from autohete.simulate import judge_for
from autohete.testing.strategies import plans
from autohete.train.as_executed import as_executed
from autohete.train.measured import measured_profile_on
from autohete.workload import Precision

pytestmark = pytest.mark.slow

ITERATIONS = 2


def needs(
    schedule: Schedule, model: nn.Module, batch: tuple[Tensor, Tensor], clip_norm: float | None = None
) -> list[tuple[str, int, int, int, int]]:
    """One task after another, in issue order: (task, bytes said and needed at its peak, bytes said and left after it)."""
    ledger = Ledger(GPU_MEMORY)
    cut = by_use(partition(model), batch[0])
    training = Takeover(cut, schedule, Recipe(clip_norm=clip_norm), Ledgers(device=ledger))
    sizes = {b.id: b.size_bytes * (b.memory == GPU_MEMORY) for task in schedule.tasks for b in task.allocates}
    alive = {(b.id, 0): b.size_bytes for b in schedule.resident if b.memory == GPU_MEMORY}
    alive |= {(free.id, -1): sizes[free.id] for task in schedule.tasks for free in task.frees if free.back}
    found = []
    try:
        for iteration in range(ITERATIONS):
            training.passes.give(iteration, Batch(*batch))
            for task in schedule.tasks:
                alive |= {(b.id, iteration): sizes[b.id] for b in task.allocates}
                said = sum(alive.values())
                ledger.reset_peak()
                before = ledger.used_bytes
                training.actions.perform(task, iteration)
                needed = max(before, ledger.peak_bytes)
                for free in task.frees:
                    del alive[free.id, iteration - free.back]
                found.append((task.id.at(iteration), said, needed, sum(alive.values()), ledger.used_bytes))
    finally:
        training.close()
    return found


@pytest.mark.parametrize(
    "policy",
    [
        *SETTLED,
        "sqrt_checkpoint:segments=1",
        "stronghold:window=2",
        "zero_offload:paper,tile_overlap",
        "autohete",
        "autohete:priority=off",
        "twin_flow:ratio=50,sub_group_size=1000,bucket_size=1",
        "resident:checkpointing=selective",
    ],
)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_every_task_needs_what_its_schedule_says(policy: str, precision: Precision) -> None:
    """At each task's peak and after it, the tensors on the device have as many bytes as the schedule's buffers."""
    workload = replace(MEDIUM, precision=precision)
    schedule = predicted(workload, policy).schedule
    for task, said, needed, said_left, left in needs(schedule, model_for(workload), batches(workload, 1)[0]):
        if not task.startswith(("G", "U")):  # what a copy of gradients needs at most is checked by what it leaves
            assert (task, said) == (task, needed)
        assert (task, said_left) == (task, left)


def test_segments_within_segments_need_what_their_schedule_says() -> None:
    """Byte for byte, where units are recomputed several times and inputs live in turn."""
    keep, recompute, drop = Activations.KEEP, Activations.RECOMPUTE, Activations.DROP
    forwards = [(recompute, recompute, keep), (drop, drop, keep), (drop, keep), (recompute, keep), (drop, keep)]
    inner = [UnitPlan(first, again=tuple(again[:-1])) for first, *again in forwards]
    workload = replace(MEDIUM, transformer_blocks=len(inner))
    profile = profile_for(workload)
    plan = as_executed(Plan("by hand", (UnitPlan(), *inner, UnitPlan())), profile)
    for task, said, needed, said_left, left in needs(lower(profile, plan), model_for(workload), batches(workload, 1)[0]):
        assert (task, said, said_left) == (task, needed, left)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.data())
def test_no_task_of_any_plan_needs_more(data: st.DataObject) -> None:
    """Whatever a plan moves and recomputes: no task needs, nor leaves, more bytes than the schedule says."""
    clip_norm = data.draw(st.sampled_from([None, 1.0]))
    workload = replace(MEDIUM, precision=data.draw(st.sampled_from([Precision.FP32, Precision.BF16])))
    profile = profile_for(workload)
    profile = replace(profile, workload=replace(workload, clip_norm=clip_norm))
    plan = as_executed(data.draw(plans(profile)), profile)
    if plan.delayed:  # one after another is not an order that overlaps iterations
        return
    model, batch = model_for(workload), batches(workload, 1)[0]
    for task, said, needed, said_left, left in needs(lower(profile, plan), model, batch, clip_norm):
        assert (task, needed) <= (task, said)
        assert (task, left) <= (task, said_left)


class EndsInTanh(nn.Module):
    """A block whose output is kept for its own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, 16) -> the same."""
        return torch.tanh(self.inner(x))


class Shown(EndsInTanh):
    """A block that keeps its output and the output's gradient, for someone to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(16, 64)
        self.shown = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, 16) -> the same."""
        self.shown = x + torch.tanh(self.outer(torch.tanh(self.inner(x)))).mean(-1, keepdim=True)
        if self.shown.requires_grad:
            self.shown.retain_grad()
        return self.shown


class Model(nn.Module):
    """Three such blocks between an embedding and a head."""

    def __init__(self, block: type[nn.Module] = EndsInTanh) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, sequence) -> (batch, sequence, 31)."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize(
    "policy", ["resident", "resident:checkpointing=full", "sqrt_checkpoint:segments=1", "stronghold:window=1"]
)
@pytest.mark.parametrize("block", [EndsInTanh, Shown])
def test_an_output_that_is_kept_is_counted(block: type[nn.Module], policy: str) -> None:
    """A block's output that its own backward needs outlives the input that it is for the block above. What an attribute
    keeps, with its gradient, is counted beside the schedule.
    """
    ids = torch.zeros(4, 8, dtype=torch.long)
    profile = measured_profile_on(load_hardware("a100-40gb-epyc7713"), Model(block), (ids, ids))
    plan = as_executed(parse_policy(policy).plan(profile, judge_for(profile)), profile)
    schedule = lower(profile, plan)
    for task, said, needed, said_left, left in needs(schedule, Model(block), (ids, ids)):
        assert (task, needed) <= (task, said)
        assert (task, left) <= (task, said_left)
