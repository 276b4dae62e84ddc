"""``verify`` finds that a training has the bits of plain PyTorch, and finds what has not."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.measured import MEDIUM
from support.modules import VOCABULARY
from support.modules import batches as small_batches
from support.reference import batches, lanes_alive, model_for
from torch import Tensor, nn

from autohete import Trainer
from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.runtime.losses import mean_token_loss
from autohete.runtime.passes import Passes
from autohete.runtime.states import States
from autohete.train.verification import Difference, Verification, verify
from autohete.workload import Precision

pytestmark = pytest.mark.slow

#: With a hardware the machine is not measured.
NODE: dict[str, Any] = {"hardware": load_hardware("v100-32gb-dgx2")}
BF16 = {"precision": Precision.BF16}


def verified(shape: dict[str, Any] | None = None, **options: Any) -> Verification:
    """A verification of the reference model, with dropout."""
    workload = replace(MEDIUM, **(shape or {}))
    return verify(model_for(workload), batches(workload, 2), **(NODE | options))


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {"policy": "stronghold:window=1"}),
        ({}, {"policy": "autohete", "gpu_memory": "90%", "clip_norm": 0.1, "micro_batches": 2}),
        ({}, {"policy": "resident:checkpointing=full", "loss": mean_token_loss, "micro_batches": 2}),
        (BF16, {"policy": "autohete", "gpu_memory": "90%", "clip_norm": 0.1}),
        (BF16, {"policy": "resident:checkpointing=full", "master_weights": False, "micro_batches": 2}),
    ],
)
def test_a_training_is_verified(shape: dict[str, Any], options: dict[str, Any]) -> None:
    """Every loss, gradient, parameter and state has the bits of the plain loop, and everything has been compared."""
    found = verified(shape, **options)
    parameters = len(list(model_for(replace(MEDIUM, **shape)).parameters()))
    gradients = parameters * options.get("micro_batches", 1)
    has_masters = bool(shape) and options.get("master_weights", True)
    expected = {"loss": 1, "random state": 1, "gradient": gradients, "parameter": parameters, "step": parameters}
    expected |= {"exp_avg": parameters, "exp_avg_sq": parameters} | ({"master": parameters} if has_masters else {})
    assert found.is_equal, found.differences[:3]
    assert found.steps == 2
    assert found.compared == {what: 2 * count for what, count in expected.items()}
    assert not lanes_alive()


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.Adam([{"params": p[:3], "lr": 1e-2}, {"params": p[3:]}], foreach=True),
    ],
)
def test_the_callers_optimizer_is_verified(optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]) -> None:
    """Any optimizer that a Trainer takes is compared, from the states that it has; model and optimizer stay as they were."""
    model = model_for(MEDIUM)
    given = optimizer(list(model.parameters()))
    torch.optim.lr_scheduler.ConstantLR(given)
    with Trainer(model, optimizer=given, policy="resident", **NODE) as trainer:
        trainer.step(batches(MEDIUM, 1)[0])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = {id(p): {k: v.clone() for k, v in s.items()} for p, s in given.state.items()}
    random = torch.get_rng_state()
    found = verify(model, batches(MEDIUM, 2), optimizer=given, policy="resident:checkpointing=full", **NODE)
    assert found.is_equal, found.differences[:3]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(states[id(p)][k], v) for p, s in given.state.items() for k, v in s.items())
    assert torch.equal(random, torch.get_rng_state())


def test_a_scaled_training_is_verified() -> None:
    """The first step overflows and is skipped in both; the scaler is left as it was."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)
    found = verified({"precision": Precision.FP16}, policy="zero_offload", grad_scaler=scaler)
    assert found.is_equal, found.differences[:3]
    assert found.steps == 2
    assert found.compared["gradient"] == len(list(model_for(MEDIUM).parameters()))
    assert scaler.get_scale() == 2.0**19


def test_an_optimizer_with_attributes_of_its_own_is_verified() -> None:
    """PyTorch leaves them out of an optimizer's copy."""
    model = model_for(MEDIUM)
    optimizer = importlib.import_module("bitsandbytes.optim").AdamW8bit(model.parameters(), lr=1e-3)
    found = verify(model, batches(MEDIUM, 2), optimizer=optimizer, policy="zero_offload", **NODE)
    assert found.is_equal, found.differences[:3]
    assert found.compared["state1"] == 2 * len(list(model.parameters()))


def test_the_callers_number_of_threads_does_not_matter() -> None:
    """Whatever another thread sets between the first plan and the first step, lanes compute with their own number."""
    torch.set_num_threads(2)
    try:
        assert verified(policy="stronghold:window=1").is_equal
    finally:
        torch.set_num_threads(1)


# --- what differs

LOCAL = threading.local()


class OfItsThread(nn.Module):
    """A block that depends on the thread that calls it, which AutoHete does not promise to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.inner(x) * getattr(LOCAL, "factor", 1.0)
        return result


class Net(nn.Module):
    """Three such blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(OfItsThread() for _ in range(3))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        result: Tensor = self.head(hidden)
        return result


def test_a_block_that_depends_on_its_thread_is_found() -> None:
    """What plain training computes otherwise differs from the first loss on, in the first step."""
    assert verify(Net(), small_batches(), policy="resident", **NODE).is_equal
    LOCAL.factor = 1.5
    try:
        found = verify(Net(), small_batches(), policy="resident", **NODE)
    finally:
        del LOCAL.factor
    assert not found.is_equal
    assert found.steps == 1
    assert found.differences[0].what == "loss"
    assert str(found.differences[0]).startswith("step 0: loss differs: by at most ")
    assert {difference.what for difference in found.differences} >= {"loss", "gradient", "parameter", "exp_avg"}


def test_a_recomputation_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault when one block is recomputed leaves the loss, and the first difference is that block's gradient."""
    recompute = Passes.recompute

    def wrong(self: Passes, i: int) -> None:
        unit = self.states.units[i]
        if i == 4 and unit.checkpoint is not None:  # dropout is drawn anew
            unit.checkpoint = unit.checkpoint[0], None
        recompute(self, i)

    monkeypatch.setattr(Passes, "recompute", wrong)
    found = verified(policy="resident:checkpointing=full")
    first = found.differences[0]
    assert (first.step, first.what) == (0, "gradient")
    assert first.name.startswith("blocks.3.")
    assert not any(difference.name.startswith("head") for difference in found.differences)


def test_a_gradient_that_is_lost_on_its_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a gradient is right but an update gets another, the gradients agree, and what is updated differs."""
    take = States.take_gradient

    def wrong(self: States, i: int, place: int, gradient: Tensor) -> None:
        take(self, i, place, gradient * 2 if (i, place) == (2, 0) else gradient)

    monkeypatch.setattr(States, "take_gradient", wrong)
    found = verified(policy="resident")
    name = found.differences[0].name
    assert {(difference.what, difference.name) for difference in found.differences} == {
        ("parameter", name),
        ("exp_avg", name),
        ("exp_avg_sq", name),
    }
    assert name.startswith("blocks.1.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "device is cuda, which is not compared with plain PyTorch"),
        ({"grad_scaler": object()}, "grad_scaler is of type object"),
        ({"policy": "zero_offload:delayed_update"}, "delays updates, which the plain loop does not"),
    ],
)
def test_what_cannot_be_compared_is_refused(options: dict[str, Any], message: str) -> None:
    """What is no plain loop, or differs from it by intent, is refused."""
    with pytest.raises(InputError, match=message):
        verified(**options)


def test_nothing_to_compare_is_refused() -> None:
    """Without a batch nothing has been verified."""
    with pytest.raises(InputError, match="there is no batch to verify with"):
        verify(Net(), [], **NODE)


def test_a_difference_is_one_line() -> None:
    """A difference says what, where, how many elements and how much."""
    assert str(Difference(2, "gradient", "head.weight", 3, 4000, 1e-7, 1)) == (
        "step 2: gradient of head.weight (micro-batch 1) differs: 3 of 4,000 elements, by at most 1e-07"
    )
