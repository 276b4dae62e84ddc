"""A training that is saved and loaded goes on bit for bit, under any policy; a state that does not fit is refused."""

from __future__ import annotations

import copy
import io
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support.measured import MEDIUM, profile_for
from support.reference import Scaled, batches, model_for
from torch import Tensor, nn

from autohete import Trainer
from autohete.errors import InputError
from autohete.runtime.update_rules import default_group, default_optimizer
from autohete.train.gpt import seeded_gpt
from autohete.workload import Precision

pytestmark = pytest.mark.slow

SMALL = replace(MEDIUM, transformer_blocks=2, precision=Precision.BF16)
SHARED = "twin_flow:ratio=50,sub_group_size=1000,bucket_size=1"
POLICIES = ["resident", "zero_offload:paper,tile_overlap", "stronghold:window=1", "autohete:priority=off", SHARED]
DELAYED = ["zero_offload:delayed_update", "zero_offload:paper,tile_overlap,delayed_update"]
BEFORE, AFTER = 3, 2
#: Losses, parameters, and what the caller's generators draw at the end.
Result = tuple[list[float], list[Tensor], tuple[object, ...]]


def rate(step: int) -> float:
    """A learning rate that changes with the step."""
    return 1e-3 / (1 + step)


def trainer_for(policy: str, model: nn.Module | None = None) -> Trainer:
    model = Scaled(SMALL) if model is None else model
    return Trainer(model, policy=policy, profile=profile_for(SMALL))


def steps(trainer: Trainer, begin: int, end: int) -> list[float]:
    """The losses of some steps; the caller draws random numbers, changes a buffer and, at first, the learning rate."""
    losses = []
    for step in range(begin, end):
        if step < BEFORE:
            trainer.optimizer.param_groups[0]["lr"] = rate(step)
        for buffer in trainer._model.buffers():
            buffer += 0.1
        losses.append(trainer.step(batches(SMALL, BEFORE + AFTER)[step]) + random.random() + float(np.random.rand()))
    return losses


def drawn() -> tuple[object, ...]:
    return random.random(), float(np.random.rand()), torch.rand(3).tolist()


def prepared(trainer: Trainer) -> Trainer:
    trainer.prepare(batches(SMALL, 1)[0])
    return trainer


def seeded() -> None:
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)


@cache
def uninterrupted(policy: str) -> Result:
    with prepared(trainer_for(policy)) as trainer:
        seeded()
        losses = steps(trainer, 0, BEFORE + AFTER)
        return losses[BEFORE:], [*trainer.parameters(), *trainer_buffers(trainer)], drawn()


def trainer_buffers(trainer: Trainer) -> list[Tensor]:
    return [buffer.clone() for buffer in trainer._model.buffers()]


@cache
def saved(policy: str) -> bytes:
    """The state after some steps, as a file."""
    with prepared(trainer_for(policy)) as trainer:
        seeded()
        steps(trainer, 0, BEFORE)
        file = io.BytesIO()
        torch.save(trainer.state_dict(), file)
    return file.getvalue()


def read(file: bytes) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(file), weights_only=True)
    return found


def resumed(policy: str, state: dict[str, Any], after_prepare: bool) -> Result:
    """The rest of the training, by a trainer that begins elsewhere."""
    model = Scaled(SMALL, seed=7)
    with torch.no_grad():
        model.blocks[1].up.weight.fill_(0.5)  # type: ignore[union-attr, operator]
    with trainer_for(policy, model) as trainer:
        if after_prepare:
            prepared(trainer)
        trainer.load_state_dict(state)
        losses = steps(trainer, BEFORE, BEFORE + AFTER)
        return losses, [*trainer.parameters(), *trainer_buffers(trainer)], drawn()


def same(a: Result, b: Result) -> bool:
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True)) and a[2] == b[2]


@pytest.mark.parametrize("after_prepare", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("before", ["resident", "stronghold:window=1", SHARED])
def test_a_training_goes_on_under_any_policy(before: str, policy: str, after_prepare: bool) -> None:
    """Losses, parameters, buffers and random numbers are those of the training that was not interrupted."""
    assert same(resumed(policy, read(saved(before)), after_prepare), uninterrupted("resident"))


@pytest.mark.parametrize("policy", DELAYED)
def test_delayed_updates_go_on(policy: str) -> None:
    """Gradients that a delayed update has not applied yet are part of the state."""
    assert same(resumed(policy, read(saved(DELAYED[0])), False), uninterrupted(policy))
    with pytest.raises(InputError, match="this policy does not delay updates"):
        resumed("resident", read(saved(DELAYED[0])), False)
    with pytest.raises(InputError, match="this policy does not delay updates"):
        resumed("resident", read(saved(DELAYED[0])), True)


def zeroed(part: str) -> Callable[[dict[str, Any]], None]:
    """Lose a part of the optimizer's state."""

    def lose(state: dict[str, Any]) -> None:
        for one in state["optimizer"].values():
            one[part] = one[part] * 0 if part in one else 0

    return lose


def rounded_masters(state: dict[str, Any]) -> None:
    for one in state["optimizer"].values():
        one["master"] = one["master"].bfloat16().float()


def without_gradients(state: dict[str, Any]) -> None:
    for one in state["optimizer"].values():
        one.pop("gradient")


def fresh_generator(name: str) -> Callable[[dict[str, Any]], None]:
    def lose(state: dict[str, Any]) -> None:
        found = read(saved("resident"))
        seeded()
        with prepared(trainer_for("resident")) as trainer:
            seeded()
            steps(trainer, 0, 1)
            found = trainer.state_dict()
        state["random"][name] = found["random"][name]

    return lose


LOSSES_OF_STATE: dict[str, Callable[[dict[str, Any]], None]] = {
    "first moment": zeroed("exp_avg"),
    "second moment": zeroed("exp_avg_sq"),
    "step counts": zeroed("step"),
    "masters": rounded_masters,
    "learning rate": lambda state: state["groups"][0].update(lr=1e-3),
    "buffers": lambda state: state["buffers"]["scale"].zero_(),
    "frozen parameters": lambda state: state["parameters"]["blocks.1.up.weight"].mul_(2),
    "torch": fresh_generator("torch"),
    "python": fresh_generator("python"),
    "numpy": fresh_generator("numpy"),
}


@pytest.mark.parametrize("part", LOSSES_OF_STATE)
def test_every_part_of_the_state_matters(part: str) -> None:
    """A training that goes on without any one part of the state differs."""
    state = read(saved("resident"))
    LOSSES_OF_STATE[part](state)
    assert not same(resumed("resident", state, False), uninterrupted("resident"))


def test_gradients_of_delayed_updates_matter() -> None:
    """Without them a training with delayed updates differs."""
    state = read(saved(DELAYED[0]))
    without_gradients(state)
    assert not same(resumed(DELAYED[0], state, False), uninterrupted(DELAYED[0]))


def test_a_state_is_a_copy() -> None:
    """Neither later steps nor the training that loads a state change it."""
    with prepared(trainer_for("stronghold:window=1")) as trainer:
        seeded()
        steps(trainer, 0, 2)
        state = trainer.state_dict()
        kept = copy.deepcopy(state)
        steps(trainer, 2, 4)
        trainer.load_state_dict(state)
        steps(trainer, 2, 4)
        assert state["step"] == 2
        assert torch.equal(state["random"]["torch"], kept["random"]["torch"])
        for part in ("parameters", "buffers"):
            assert all(torch.equal(value, kept[part][name]) for name, value in state[part].items())
        for name, one in state["optimizer"].items():
            assert all(torch.equal(one[key], kept["optimizer"][name][key]) for key in ("exp_avg", "exp_avg_sq", "master"))


def test_weights_changed_after_loading_take_effect() -> None:
    """What the caller sets between loading and the first step is trained on, not what was loaded."""

    def run(after_prepare: bool) -> list[Tensor]:
        with trainer_for("stronghold:window=1") as trainer:
            if after_prepare:
                prepared(trainer)
            trainer.load_state_dict(read(saved("resident")))
            with torch.no_grad():
                trainer._model.head.norm.weight.mul_(1.25)  # type: ignore[union-attr, operator]
            steps(trainer, BEFORE, BEFORE + 1)
            return trainer.parameters()

    unchanged = resumed("stronghold:window=1", read(saved("resident")), False)[1]
    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(run(False), unchanged, strict=False))


def test_a_tied_matrix_is_saved_once() -> None:
    """A matrix that embedding and head share has one entry, and is loaded into both."""
    workload = replace(SMALL, tied_embeddings=True)
    with Trainer(model_for(workload), policy="resident", profile=profile_for(workload)) as trainer:
        trainer.step(batches(workload, 1)[0])
        state = trainer.state_dict()
    assert len(state["parameters"]) == len(list(model_for(workload).named_parameters()))


def without(part: str, name: str | None = None) -> Callable[[dict[str, Any]], object]:
    return lambda state: state.pop(part) if name is None else state[part].pop(name)


def as_other(part: str, name: str, change: Callable[[Any], object]) -> Callable[[dict[str, Any]], object]:
    return lambda state: state[part].update({name: change(state[part][name])})


NAME = "blocks.0.qkv.weight"
WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "format": ("not a saved training state", lambda s: s.update(format="other")),
    "a part": ("the state: missing random", without("random")),
    "type of a part": ("parameters of the state is list", lambda s: s.update(parameters=[])),
    "a parameter": (f"parameters of the state: missing {NAME}", without("parameters", NAME)),
    "another parameter": ("parameters of the state: unexpected more;", lambda s: s["parameters"].update(more=torch.ones(1))),
    "a buffer": ("buffers of the state: missing scale", without("buffers", "scale")),
    "trained": (f"trained parameters of the state: missing {NAME}", without("optimizer", NAME)),
    "shape": (rf"{NAME} of the state is \(3,\)", as_other("parameters", NAME, lambda t: t.new_ones(3))),
    "type": (f"{NAME} of the state is .* of torch.float32", as_other("parameters", NAME, lambda t: t.float())),
    "no tensor": (f"{NAME} of the state is list", as_other("parameters", NAME, lambda t: t.tolist())),
    "a moment": (f"optimizer's states of {NAME}: missing exp_avg;", lambda s: s["optimizer"][NAME].pop("exp_avg")),
    "a master": (f"optimizer's states of {NAME}: missing master;", lambda s: s["optimizer"][NAME].pop("master")),
    "a step": (f"step of {NAME} of the state is 1.5", lambda s: s["optimizer"][NAME].update(step=1.5)),
    "moment's type": (
        "exp_avg of .* torch.float64",
        lambda s: s["optimizer"][NAME].update(exp_avg=torch.zeros(192, 64).double()),
    ),
    "settings": ("the settings of group 0 of the state lack eps", lambda s: s["groups"][0].pop("eps")),
    "a setting": ("lr of group 0 of the optimizer is nan", lambda s: s["groups"][0].update(lr=math.nan)),
    "groups": ("the groups of the state are no list", lambda s: s.update(groups={})),
    "a group": ("the state's 2 groups have other parameters than the optimizer's 1", lambda s: s["groups"].append({})),
    "random": ("random states of the state cannot be read", lambda s: s["random"].update(torch=torch.zeros(3))),
    "python": ("random states of the state cannot be read", lambda s: s["random"].update(python=(3, (1, 2), None))),
    "step": ("step of the state is -1", lambda s: s.update(step=-1)),
}


@pytest.mark.parametrize("after_prepare", [False, True])
@pytest.mark.parametrize("fault", WRONG)
def test_a_state_that_does_not_fit_is_refused(fault: str, after_prepare: bool) -> None:
    """One clear line says what does not fit, and nothing has changed."""
    message, spoil = WRONG[fault]
    state = read(saved("resident"))
    spoil(state)
    model = Scaled(SMALL)
    with trainer_for("resident", model) as trainer:
        if after_prepare:
            prepared(trainer)
        seeded()
        before = [p.detach().clone() for p in (*model.parameters(), *model.buffers())], drawn()
        seeded()
        with pytest.raises(InputError, match=message):
            trainer.load_state_dict(state)
        after = [p.detach().clone() for p in (*model.parameters(), *model.buffers())], drawn()
    assert before[1] == after[1]
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert trainer.optimizer.param_groups[0]["lr"] == default_group()["lr"]


def test_a_state_needs_a_training() -> None:
    """There is no state before the first step, and none after the end."""
    trainer = trainer_for("resident")
    with pytest.raises(InputError, match="has not started"):
        trainer.state_dict()
    with trainer:
        prepared(trainer)
    with pytest.raises(InputError, match="closed"):
        trainer.state_dict()
    with pytest.raises(InputError, match="closed"):
        trainer.load_state_dict(read(saved("resident")))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_learning_rate_is_that_of_its_step(policy: str) -> None:
    """A rate that changes after each step gives the bits of ``torch.optim.AdamW`` with that rate, however late updates run."""
    workload = replace(SMALL, precision=Precision.FP32)
    rates = [1e-3, 5e-4, 0.0, 2e-3]
    torch.set_num_threads(1)
    with Trainer(model_for(workload), policy=policy, profile=profile_for(workload)) as trainer:
        torch.manual_seed(2)
        losses = []
        for lr, batch in zip(rates, batches(workload, 4), strict=True):
            (group,) = trainer.optimizer.param_groups
            group["lr"] = lr
            losses.append(trainer.step(batch))
            group["lr"] = 123.0  # the updates of the step may still be to come
        found = trainer.parameters()
    model = seeded_gpt(workload, dropout=0.2, seed=0)
    parameters = [p for module in (model.embedding, *model.blocks, model.head) for p in module.parameters()]
    optimizer = default_optimizer(parameters)
    torch.manual_seed(2)
    expected = []
    for lr, (ids, targets) in zip(rates, batches(workload, 4), strict=True):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(loss.item())
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(found, parameters, strict=True))
