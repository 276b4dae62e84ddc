"""Gradients that are not finite are noticed before they change anything, and what has been changed is said."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.edges import reaches
from support.exploding import BAD_TOKEN, ExplodingGPT
from support.measured import MEDIUM
from support.plans import with_gradients_replacing
from support.reference import batches
from support.small import CLIP_NORM, POLICIES, profile_of
from torch import Tensor, nn

from autohete.errors import NonFiniteGradientError
from autohete.lowering import lower
from autohete.plan import Plan
from autohete.policies import parse_policy
from autohete.runtime.async_device import AsyncDevice
from autohete.runtime.batch import Batch
from autohete.runtime.device import Device, EmulatedDevice
from autohete.runtime.lanes import LaneThreads
from autohete.runtime.losses import next_token_loss
from autohete.runtime.nonfinite import UpdateGate, first_not_finite, updates_wait_for_backward
from autohete.runtime.partition import partition
from autohete.runtime.settings import Execution, Recipe
from autohete.runtime.takeover import Ledgers, Takeover
from autohete.runtime.update_rules import default_optimizer
from autohete.schedule import Kind, Schedule, Task, TaskId
from autohete.simulate import judge_for
from autohete.testing.strategies import plans
from autohete.workload import Precision, Workload

STEPS, BAD_STEP, BAD_BLOCK = 4, 2, 3


def data(workload: Workload) -> list[tuple[Tensor, Tensor]]:
    """Batches, of which one explodes in backward."""
    made = [(ids.clone(), targets) for ids, targets in batches(workload, STEPS)]
    for step, (ids, _) in enumerate(made):
        ids[0, 0] = BAD_TOKEN if step == BAD_STEP else BAD_TOKEN + 1
    return made


@cache
def plainly(precision: Precision, steps: int, clip_norm: float | None = None) -> list[Tensor]:
    """Parameters in block order after plain training that skips a step with infinite gradients, as GradScaler does."""
    model = ExplodingGPT(replace(MEDIUM, precision=precision), BAD_BLOCK)
    parameters = [parameter for owned in partition(model).owned for parameter in owned]
    masters = [nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizer = default_optimizer(masters)
    torch.manual_seed(2)
    for ids, targets in data(MEDIUM)[:steps]:
        gradients = torch.autograd.grad(next_token_loss(model(ids), targets), parameters)
        if all(torch.isfinite(gradient).all() for gradient in gradients):
            for master, gradient in zip(masters, gradients, strict=True):
                master.grad = gradient.float()
            if clip_norm is not None:
                places = {id(parameter): place for place, parameter in enumerate(parameters)}
                nn.utils.clip_grad_norm_([masters[places[id(parameter)]] for parameter in model.parameters()], clip_norm)
            optimizer.step()
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.data.copy_(master.detach())
    return [master.detach() for master in masters]


def planned(policy: str, precision: Precision) -> tuple[Plan, Schedule]:
    """A policy's plan and schedule for the model."""
    profile = profile_of(replace(MEDIUM, precision=precision))
    plan = parse_policy(policy).plan(profile, judge_for(profile))
    return plan, lower(profile, plan)


def train(training: Takeover, schedule: Schedule, steps: int, *, hold: bool = False) -> None:
    """So many steps; with ``hold``, the bad backward begins only when the step has begun to update a block."""
    torch.manual_seed(2)
    accelerator = training.states.memories.accelerator
    perform = training.actions.act if accelerator.runs_ahead else training.actions.perform

    def held(task: Task, iteration: int) -> Callable[[], None] | None:
        if hold and task.id == TaskId(Kind.BACKWARD, BAD_BLOCK) and iteration == BAD_STEP:
            deadline = time.monotonic() + 60
            while not training.states.gate._updated.get(iteration) and time.monotonic() < deadline:
                time.sleep(0.001)
        return perform(task, iteration)

    with LaneThreads(schedule, held, Execution(accelerator)) as lanes:
        for step, (ids, targets) in enumerate(data(MEDIUM)[:steps]):
            training.passes.give(step, Batch(ids, targets))
            lanes.admit()


@pytest.mark.slow
@pytest.mark.parametrize("device", [EmulatedDevice, AsyncDevice])
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("policy", POLICIES)
def test_infinite_gradients_change_no_block_that_has_them(
    policy: str, precision: Precision, device: Callable[[], Device]
) -> None:
    """The error names step, block and parameter, and the blocks that were updated before; all others are as before."""
    _, schedule = planned(policy, precision)
    early = policy.startswith("autohete")  # it updates each block as soon as its gradients have arrived
    model = ExplodingGPT(replace(MEDIUM, precision=precision), BAD_BLOCK)
    training = Takeover(partition(model), schedule, Recipe(), Ledgers(device()), poison=True)
    try:
        with pytest.raises(NonFiniteGradientError) as caught:
            train(training, schedule, STEPS, hold=early)
        found = training.parameters()
        counts = [
            max((max(part.optimizer._steps, default=0) for part in side.states), default=0)
            for b in training.states.units
            for side in (b.device, b.host)
            if side.states
        ]
    finally:
        training.close()
    error = caught.value
    assert (error.step, error.block) == (BAD_STEP, BAD_BLOCK)
    assert error.parameter.startswith(f"gpt.blocks.{BAD_BLOCK - 1}.inner.inner.")
    assert str(error).startswith(
        f"B{BAD_BLOCK}@{BAD_STEP}: the gradient of {error.parameter} (block {BAD_BLOCK}) is not finite"
    )
    assert all(block > BAD_BLOCK for block in error.updated)
    assert not (error.updated and updates_wait_for_backward(schedule))
    told = "have been updated by this step before" if error.updated else "No parameter has been changed by this step"
    assert told in str(error)
    before = plainly(precision, BAD_STEP)
    place = 0
    for block, owned in enumerate(partition(model).owned):
        same = [torch.equal(a, b) for a, b in zip(found[place:], before[place:], strict=True)][: len(owned)]
        assert any(same) is all(same) is (block not in error.updated)
        assert counts[block] == BAD_STEP + (block in error.updated)
        place += len(owned)
    assert error.updated or not early
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("device", [EmulatedDevice, AsyncDevice])
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("policy", [*POLICIES, "patrickstar:chunk_size=1"])
def test_a_step_is_skipped_as_a_whole_or_not_at_all(policy: str, precision: Precision, device: Callable[[], Device]) -> None:
    """Where all updates wait for the backward the step changes nothing and training goes on; elsewhere it stops."""
    plan, schedule = planned(policy, precision)
    replacing = not precision.element_bytes > 2
    if replacing and plan.slots is None:  # also with gradients in the place of the parameters
        schedule = lower(profile_of(replace(MEDIUM, precision=precision)), with_gradients_replacing(plan))
    model = ExplodingGPT(replace(MEDIUM, precision=precision), BAD_BLOCK)
    training = Takeover(partition(model), schedule, Recipe(skip_nonfinite=True), Ledgers(device()), poison=True)
    try:
        if not updates_wait_for_backward(schedule):
            with pytest.raises(NonFiniteGradientError):
                train(training, schedule, STEPS)
            return
        train(training, schedule, STEPS)
        assert list(training.passes.skipped) == [BAD_STEP]
        assert f"(block {BAD_BLOCK})" in training.passes.skipped[BAD_STEP]
        assert all(torch.equal(a, b) for a, b in zip(training.parameters(), plainly(precision, STEPS), strict=True))
    finally:
        training.close()


@pytest.mark.slow
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("policy", ["autohete", "zero_offload"])
def test_a_step_that_is_clipped_can_be_skipped(policy: str, precision: Precision) -> None:
    """Clipped updates wait for the whole backward under any policy; the steps after the skipped one are clipped as before."""
    workload = replace(MEDIUM, precision=precision, clip_norm=CLIP_NORM)
    profile = profile_of(workload)
    schedule = lower(profile, parse_policy(policy).plan(profile, judge_for(profile)))
    assert updates_wait_for_backward(schedule)
    model = ExplodingGPT(workload, BAD_BLOCK)
    recipe = Recipe(clip_norm=CLIP_NORM, skip_nonfinite=True)
    training = Takeover(partition(model), schedule, recipe, poison=True)
    try:
        train(training, schedule, STEPS)
        assert list(training.passes.skipped) == [BAD_STEP]
        expected = plainly(precision, STEPS, CLIP_NORM)
        assert all(torch.equal(a, b) for a, b in zip(training.parameters(), expected, strict=True))
    finally:
        training.close()


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_waiting_for_backward_is_seen_in_the_edges(drawn: st.DataObject) -> None:
    """A schedule's updates wait for the backward whose gradients they take if there is a path from each of its backwards."""
    profile = profile_of(replace(MEDIUM, transformer_blocks=2))
    plan = drawn.draw(plans(profile))
    schedule = lower(profile, plan)
    blocks = range(len(plan.units))
    expected = all(
        reaches(schedule, TaskId(Kind.BACKWARD, block), task.id, int(plan.delayed and task.id.kind is Kind.CPU_UPDATE))
        for task in schedule.tasks
        if task.id.kind in (Kind.GPU_UPDATE, Kind.CPU_UPDATE)
        for block in blocks
    )
    event(f"they wait: {expected}")
    assert updates_wait_for_backward(schedule) is expected


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.data(),
)
def test_the_first_that_is_not_finite_is_found(sizes: list[int], dtype: torch.dtype, drawn: st.DataObject) -> None:
    """A NaN or an infinity of either sign is found wherever it is; the largest finite numbers are none."""
    tensors = [torch.full((size,), torch.finfo(dtype).max, dtype=dtype) for size in sizes]
    assert first_not_finite(tensors) is None
    places = [place for place, size in enumerate(sizes) if size]
    if places:
        bad = drawn.draw(st.sets(st.sampled_from(places), min_size=1))
        for place in bad:
            value = drawn.draw(st.sampled_from([math.inf, -math.inf, math.nan]))
            tensors[place][drawn.draw(st.integers(0, sizes[place] - 1))] = value
        assert first_not_finite(tensors) == min(bad)


def test_the_gate_tells_what_has_begun() -> None:
    """Once shut, a gate admits no update of that iteration, tells those it has admitted, and admits the next iteration's."""
    gate = UpdateGate()
    assert gate.admits(0, 3)
    assert gate.admits(0, 2)
    assert gate.shut(0, "there") == (2, 3)
    assert not gate.admits(0, 1)
    assert gate.admits(1, 1)
    assert gate.skipped == {0: "there"}
