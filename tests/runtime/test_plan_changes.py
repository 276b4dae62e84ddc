"""A training goes on by another plan between steps, to the bit: whatever both plans are, and whatever lives between steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.following import follow
from support.measured import MEDIUM, profile_for
from support.reference import Scaled, batches, lanes_alive, model_for
from support.small import SMALL, plainly, profile_of
from torch import Tensor

from autohete import Trainer
from autohete.errors import InputError
from autohete.runtime.ledger import Counting
from autohete.runtime.states import States
from autohete.workload import Precision, Workload

#: One after the other: each neighbour keeps its states somewhere else, or moves something else.
CHAIN = (
    "resident",
    "zero_offload",
    "resident:checkpointing=full",
    "patrickstar",
    "stronghold:window=1",
    "streamed_states",
    "zero3_offload",
    "mlp_offload",
    "twin_flow:ratio=50,sub_group_size=1000,bucket_size=1",
    "resident:in_backward",
    "zero_infinity",
    "zero_offload:checkpointing=selective",
    "resident",
)


def trained(workload: Workload, policies: Sequence[str], **keywords: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses and final state of one step under each policy."""
    model, profile = keywords.pop("model", None) or model_for(workload), profile_of(workload)
    torch.manual_seed(2)
    with Trainer(model, policy=policies[0], profile=profile, refine=False, **keywords) as trainer:
        losses = []
        size = replace(workload, batch_size=workload.batch_size * workload.micro_batches)
        for before, policy, batch in zip((policies[0], *policies), policies, batches(size, len(policies)), strict=False):
            if policy != before:
                follow(trainer, policy)
            losses.append(trainer.step(batch))
        return losses, trainer.state_dict()


def differences(a: Any, b: Any, name: str = "state") -> list[str]:
    """Where two states differ in a bit."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [found for key in a for found in differences(a[key], b[key], f"{name}.{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [found for i, (x, y) in enumerate(zip(a, b, strict=True)) for found in differences(x, y, f"{name}.{i}")]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return [] if a.dtype is b.dtype and torch.equal(a, b) else [name]
    return [] if a == b else [name]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_any_plan_follows_any_other_to_the_bit(precision: Precision, seed: int) -> None:
    """A step under each of many policies in turn, in one order and another, gives the losses and the whole state of a training
    that stays with one.
    """
    workload, order = replace(SMALL, precision=precision), list(CHAIN)
    if seed:
        random.Random(seed).shuffle(order)
    losses, state = trained(workload, order)
    stayed, expected = trained(workload, ["resident"] * len(order))
    assert losses == stayed
    assert not differences(state, expected)
    assert losses[:3] == plainly(workload).losses
    assert not lanes_alive()


@pytest.mark.parametrize(
    ("changes", "keywords"),
    [
        ({"clip_norm": 0.05}, {"clip_norm": 0.05}),
        ({"micro_batches": 2, "precision": Precision.BF16}, {"micro_batches": 2}),
        ({"micro_batches": 3, "clip_norm": 0.05}, {"micro_batches": 3, "clip_norm": 0.05}),
    ],
)
def test_clipped_and_accumulated_steps_go_on_to_the_bit(changes: dict[str, Any], keywords: dict[str, Any]) -> None:
    """Norms and sums of gradients are those of a training that stays with one plan, and so is the norm that it reports."""
    workload = replace(SMALL, **changes)
    order = ["resident", "zero_offload", "streamed_states", "resident:checkpointing=full", "zero_offload", "resident"]
    losses, state = trained(workload, order, **keywords)
    stayed, expected = trained(workload, ["resident"] * len(order), **keywords)
    assert losses == stayed
    assert not differences(state, expected)


def test_buffers_and_frozen_parameters_stay() -> None:
    """A buffer, and a frozen matrix that moves, have their values and places after each change."""
    order = ["resident", "zero3_offload", "stronghold:window=1", "resident:checkpointing=full", "zero3_offload"]
    losses, state = trained(SMALL, order, model=Scaled(SMALL), blocks="blocks")
    stayed, expected = trained(SMALL, ["resident"] * len(order), model=Scaled(SMALL), blocks="blocks")
    assert losses == stayed
    assert not differences(state, expected)


def test_gradients_that_wait_are_handed_on() -> None:
    """A delayed update uses the gradients of the step before, although another plan has followed meanwhile; a plan that delays
    other updates is refused, and training goes on.
    """
    full, none = ("zero_offload:delayed_update,checkpointing=full", "zero_offload:delayed_update,checkpointing=none")
    losses, state = trained(SMALL, [full, none, none, full, full])
    stayed, expected = trained(SMALL, [full] * 5)
    assert losses == stayed
    assert not differences(state, expected)
    with Trainer(model_for(SMALL), policy=full, profile=profile_of(SMALL)) as trainer:
        trainer.step(batches(SMALL, 1)[0])
        with pytest.raises(InputError, match="delay the updates of different blocks"):
            follow(trainer, "zero_offload")
        trainer.step(batches(SMALL, 1)[0])


def test_what_the_caller_does_between_steps_holds() -> None:
    """Weights that are changed before a plan follows are trained on; what was kept from before it stays, and writing to that
    is refused as without a change.
    """

    def run(policies: Sequence[str]) -> tuple[list[float], list[Tensor]]:
        model = model_for(SMALL)
        torch.manual_seed(2)
        with Trainer(model, policy=policies[0], profile=profile_of(SMALL)) as trainer:
            losses, weight = [], model.get_parameter("blocks.1.down.weight")
            for policy, batch in zip(policies, batches(SMALL, len(policies)), strict=True):
                with torch.no_grad():
                    weight.clamp_(-0.05, 0.05)
                kept = weight.detach()
                before = kept.clone()
                if trainer.steps:
                    follow(trainer, policy)
                losses.append(trainer.step(batch))
                assert torch.equal(kept, before)
            kept.zero_()
            with pytest.raises(InputError, match=r"values of blocks\.1\.down.weight from before the last step"):
                trainer.step(batch)
            assert trainer.busy_seconds["gpu"] > 0
            return losses, trainer.parameters()

    changed, stayed = run(["resident", "zero_offload", "zero3_offload"]), run(["resident"] * 3)
    assert changed[0] == stayed[0]
    assert all(torch.equal(a, b) for a, b in zip(changed[1], stayed[1], strict=True))


def test_steps_keep_their_numbers() -> None:
    """Steps, their errors and the norm of gradients count on after a change of the plan."""
    data = batches(SMALL, 3)
    with Trainer(model_for(SMALL), policy="zero_offload", profile=profile_of(SMALL), clip_norm=1.0) as trainer:
        for batch in data:
            trainer.step(batch)
        norm = trainer.gradient_norm
        follow(trainer, "resident")
        assert (trainer.steps, trainer.gradient_norm) == (3, norm)
        run = trainer._held.running()
        assert run.session.lanes.progress.state() == "All parameters are from step 2, the last complete one"
        trainer.step(data[0])
        assert trainer.steps == 4
        trainer._held.do(lambda run: run.session.drain())
        assert run.session.lanes.progress.state() == "All parameters are from step 3, the last complete one"


@pytest.mark.slow
def test_memory_is_counted_for_each_plan() -> None:
    """Each plan has the peak that is predicted for it, and counting goes on by its schedule."""
    profile = profile_for(MEDIUM)
    data = batches(MEDIUM, 4)
    with Trainer(model_for(MEDIUM), policy="resident:checkpointing=none", profile=profile, refine=False) as trainer:
        for policy in ("resident:checkpointing=none", "zero_offload", "resident:checkpointing=full", "zero_offload"):
            if trainer.steps:
                follow(trainer, policy)
            for batch in data:
                trainer.step(batch)
            found = trainer.comparison()
            assert found.measured_peak_bytes == found.predicted_peak_bytes
            assert trainer.counting is Counting.SCHEDULED


def test_a_change_that_fails_gives_the_model_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the states find no room under another plan, model and optimizer have those of the last step, whatever has moved."""
    model, other = model_for(SMALL), model_for(SMALL)
    states: list[Any] = []
    data = batches(SMALL, 3)
    for one, fails in ((model, True), (other, False)):
        torch.manual_seed(2)
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3)
        with Trainer(one, optimizer=optimizer, policy="zero_offload", profile=profile_of(SMALL)) as trainer:
            for batch in data:
                trainer.step(batch)
            if fails:
                place, count = States._place_states, iter(range(9))

                def refuse(self: States, i: int, *rest: Any, place: Any = place, count: Any = count) -> None:
                    if next(count) == 2:
                        raise MemoryError("full")
                    place(self, i, *rest)

                monkeypatch.setattr(States, "_place_states", refuse)
                with pytest.raises(MemoryError):
                    follow(trainer, "resident")
                with pytest.raises(InputError, match="closed"):
                    trainer.step(data[0])
        states.append((one.state_dict(), optimizer.state_dict()))
    assert not differences(states[0], states[1])
    assert not lanes_alive()
