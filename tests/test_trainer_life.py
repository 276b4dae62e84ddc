"""A Trainer's life: whatever ends it, the model comes back of a known step, and nothing is left running."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import batches, model_for, train_plainly
from test_device import MEDIUM, profile_for
from test_runtime_lanes import lanes_alive
from torch import Tensor, nn

from autohete import Trainer
from autohete.errors import DeviceOutOfMemoryError, TaskError
from autohete.runtime.partition import partition
from autohete.runtime.training import Training
from autohete.schedule import Kind, Task

STEPS = 3
#: Each with a budget that makes it move what it can.
POLICIES = {"autohete": "40%", "stronghold:window=1": "60%", "zero_offload": None, "resident": None}


@cache
def after(steps: int) -> list[list[Tensor]]:
    """The parameters of each block after so many steps of plain training, embedding first."""
    parameters = iter(train_plainly(MEDIUM, steps).parameters)
    return [[next(parameters) for _ in owned] for owned in partition(model_for(MEDIUM)).owned]


def blocks_of(model: nn.Module) -> list[list[Tensor]]:
    """The parameters of each block now."""
    return [[parameter.detach() for parameter in owned] for owned in partition(model).owned]


def same(block: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two blocks are bitwise equal."""
    return all(torch.equal(a, b) for a, b in zip(block, other, strict=True))


def numbers(listed: str) -> list[int]:
    """The blocks that ``0, 2 to 4`` means."""
    ends = [[int(end) for end in run.split(" to ")] for run in listed.split(", ")]
    return [block for run in ends for block in range(run[0], run[-1] + 1)]


def said(message: str, blocks: int) -> dict[int, int]:
    """How many steps each block has been updated by, as an error says it; without those that are updated in part."""
    if "No parameter has been changed" in message:
        return dict.fromkeys(range(blocks), 0)
    if found := re.search(r"All parameters are of step (\d+), the last complete one", message):
        return dict.fromkeys(range(blocks), int(found[1]) + 1)
    assert message.endswith("): load a saved state to go on from one step")
    of_step = {
        block: int(n) + 1
        for n, listed in re.findall(r"[(;] ?step (\d+): blocks? ([^;)]*)", message)
        for block in numbers(listed)
    }
    return of_step | {
        block: 0 for listed in re.findall(r"before the first step: blocks? ([^;)]*)", message) for block in numbers(listed)
    }


def trainer_for(model: nn.Module, policy: str) -> Trainer:
    """A trainer that need not measure."""
    return Trainer(model, policy=policy, gpu_memory=POLICIES[policy], profile=profile_for(MEDIUM))


@cache
def tasks_of(policy: str) -> list[Task]:
    """The tasks of an iteration."""
    with trainer_for(model_for(MEDIUM), policy) as trainer:
        return list(trainer.prepare(batches(MEDIUM, 1)[0]).schedule.tasks)


@settings(max_examples=40)
@given(st.sampled_from(list(POLICIES)), st.integers(0, STEPS - 1), st.booleans(), st.data())
def test_after_any_failure_each_block_is_of_the_step_that_is_said(
    policy: str, iteration: int, before: bool, data: st.DataObject
) -> None:
    """An error in any task, before or after its work, leaves every block bitwise at the step that the error names for it."""
    model, perform = model_for(MEDIUM), Training.perform
    failed = data.draw(st.sampled_from(tasks_of(policy)), "task")

    def failing(training: Training, task: Task, at: int) -> None:
        fails = task.id == failed.id and at == iteration
        if fails and before:
            raise ValueError("no such luck")
        perform(training, task, at)
        if fails:
            raise ValueError("no such luck")

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(TaskError, match=f"^{failed.id}@{iteration} failed: ValueError: no such luck. ") as caught,
        trainer_for(model, policy) as trainer,
    ):
        patch.setattr(Training, "perform", failing)
        torch.manual_seed(2)
        for batch in batches(MEDIUM, STEPS):
            trainer.step(batch)
    assert lanes_alive() == []
    message, found = str(caught.value), blocks_of(model)
    expected = said(message, len(found))
    assert all(same(found[i], after(steps)[i]) for i, steps in expected.items())
    missing = set(range(len(found))) - expected.keys()
    if failed.id.kind in (Kind.GPU_UPDATE, Kind.CPU_UPDATE):  # here all of it was done, or nothing
        assert missing == {failed.id.block}
        assert f"updated in part by step {iteration}: block {failed.id.block}" in message
        assert same(found[failed.id.block], after(iteration + (not before))[failed.id.block])
    else:
        assert not missing


@pytest.mark.parametrize("policy", POLICIES)
def test_an_error_of_the_caller_leaves_the_last_step(policy: str) -> None:
    """An exception between two steps, while the last one's updates are under way, leaves the model after that step."""
    model = model_for(MEDIUM)
    with pytest.raises(KeyError), trainer_for(model, policy) as trainer:
        torch.manual_seed(2)
        for batch in batches(MEDIUM, STEPS):
            trainer.step(batch)
        raise KeyError
    assert all(map(same, blocks_of(model), after(STEPS)))
    assert lanes_alive() == []


def test_out_of_memory_says_which_step_the_model_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that a task passes is an error that keeps its fields and says which step is complete."""
    model, perform = model_for(MEDIUM), Training.perform

    def failing(training: Training, task: Task, iteration: int) -> None:
        if task.id.at(iteration) == "F2@2":
            raise DeviceOutOfMemoryError("F2@2: gpu memory is full", "F2@2", 8, 4, {})
        perform(training, task, iteration)

    monkeypatch.setattr(Training, "perform", failing)
    with (
        pytest.raises(DeviceOutOfMemoryError) as caught,
        trainer_for(model, "resident") as trainer,
    ):
        torch.manual_seed(2)
        for batch in batches(MEDIUM, STEPS):
            trainer.step(batch)
    assert str(caught.value) == "F2@2: gpu memory is full. All parameters are of step 1, the last complete one"
    assert (caught.value.task, caught.value.size_bytes, caught.value.capacity_bytes) == ("F2@2", 8, 4)
    assert all(map(same, blocks_of(model), after(2)))
