"""A Trainer updates as the caller's optimizer would: any groups, any schedule, and its states come and go."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from support.reference import batches, model_for
from support.small import SMALL
from torch import Tensor, nn

from autohete import Trainer
from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.runtime.losses import next_token_loss
from autohete.train.gpt import GPT
from autohete.workload import Precision, Workload

Optimizer = torch.optim.Optimizer
STEPS = 3
CLIP_NORM = 0.05


def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not, and the first two parameters learn faster."""
    matrices = [parameter for parameter in parameters[2:] if parameter.dim() > 1]
    vectors = [parameter for parameter in parameters[2:] if parameter.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.2}, {"params": vectors}, {"params": parameters[:2], "lr": 5e-3}]


MAKES: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(groups(parameters), lr=1e-3, weight_decay=0.0),
    "adamw, fused": lambda parameters: torch.optim.AdamW(groups(parameters), lr=1e-3, weight_decay=0.0, fused=True),
    "adam": lambda parameters: torch.optim.Adam(groups(parameters), lr=1e-3, amsgrad=False),
    "sgd": lambda parameters: torch.optim.SGD(groups(parameters), lr=1e-2, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(groups(parameters), lr=1e-2, momentum=0.9, nesterov=True),
}


def schedule_of(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)


class Plain:
    """Ordinary training, with masters for 16-bit parameters unless they are updated themselves."""

    def __init__(self, make: Callable[[list[nn.Parameter]], Optimizer], workload: Workload, *, masters: bool = True) -> None:
        self.model = model_for(workload)
        self.parameters = list(self.model.parameters())
        masters = masters and workload.precision is not Precision.FP32
        self.updated = [nn.Parameter(p.detach().float()) for p in self.parameters] if masters else self.parameters
        self.optimizer = make(self.updated)
        self.schedule = schedule_of(self.optimizer)

    def steps(self, given: list[tuple[Tensor, Tensor]], clip_norm: float | None = None) -> list[float]:
        """Train on some batches."""
        losses = []
        for ids, targets in given:
            loss = next_token_loss(self.model(ids), targets)
            losses.append(loss.item())
            for parameter, gradient in zip(self.updated, torch.autograd.grad(loss, self.parameters), strict=True):
                parameter.grad = gradient.to(parameter.dtype)
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(self.updated, clip_norm)
            self.optimizer.step()
            self.schedule.step()
            with torch.no_grad():
                for parameter, updated in zip(self.parameters, self.updated, strict=True):
                    parameter.copy_(updated)
        return losses


@contextmanager
def training(model: GPT, optimizer: Optimizer, policy: str, **others: Any) -> Iterator[Trainer]:
    """A Trainer on slow links, so that plans that search use everything."""
    slow = {"links.h2d.bandwidth": "1GB/s", "links.d2h.bandwidth": "1GB/s", "cpu.update_bandwidth": "2GB/s"}
    hardware = load_hardware("a100-40gb-epyc7713", slow)
    with Trainer(model, policy=policy, optimizer=optimizer, hardware=hardware, **others) as trainer:
        yield trainer


def steps(trainer: Trainer, schedule: Any, given: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for batch in given:
        losses.append(trainer.step(batch))
        schedule.step()
    return losses


def same(found: list[Tensor], expected: list[nn.Parameter]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


TWIN = "twin_flow:ratio=50,sub_group_size=1000,bucket_size=1"
EVERYWHERE = ["resident", "zero_offload:paper,tile_overlap", "patrickstar", "autohete:priority=off", TWIN]


@pytest.mark.slow
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize(
    ("make", "policy"), [*((make, "autohete") for make in MAKES), *(("adamw", policy) for policy in EVERYWHERE)]
)
def test_groups_and_schedules_train_to_the_bit(make: str, policy: str, precision: Precision) -> None:
    """Wherever updates run, also if both sides update a part of a unit, and with the kernel that the optimizer would choose."""
    workload = replace(SMALL, precision=precision)
    plain = Plain(MAKES[make], workload)
    torch.manual_seed(2)
    expected = plain.steps(batches(workload, STEPS), CLIP_NORM)
    model = model_for(workload)
    optimizer = MAKES[make](list(model.parameters()))
    schedule = schedule_of(optimizer)
    with training(model, optimizer, policy, gpu_memory="60%" if "auto" in policy else None, clip_norm=CLIP_NORM) as trainer:
        trainer.prepare(batches(workload, 1)[0])
        torch.manual_seed(2)
        with warnings.catch_warnings(action="error"):  # a scheduler warns if it is called before the optimizer
            losses = steps(trainer, schedule, batches(workload, STEPS))
    assert losses == expected
    assert same([p.detach() for p in model.parameters()], plain.parameters)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["resident", "zero_offload", "streamed_states:weights", "joint"])
def test_parameters_in_bf16_without_masters_are_pytorchs_own(policy: str) -> None:
    """What PyTorch's optimizer does with a model in bf16."""
    workload = replace(SMALL, precision=Precision.BF16)
    plain = Plain(MAKES["adamw"], workload, masters=False)
    torch.manual_seed(2)
    expected = plain.steps(batches(workload, STEPS), CLIP_NORM)
    model = model_for(workload)
    optimizer = MAKES["adamw"](list(model.parameters()))
    schedule = schedule_of(optimizer)
    with training(model, optimizer, policy, master_weights=False, clip_norm=CLIP_NORM) as trainer:
        trainer.prepare(batches(workload, 1)[0])
        torch.manual_seed(2)
        assert steps(trainer, schedule, batches(workload, STEPS)) == expected
    assert same([p.detach() for p in model.parameters()], plain.parameters)
    for parameter, other in zip(model.parameters(), plain.parameters, strict=True):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], plain.optimizer.state[other]["exp_avg"])


def equal_states(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two results of ``state_dict`` are the same to the bit."""
    if one["param_groups"] != other["param_groups"] or one["state"].keys() != other["state"].keys():
        return False
    return all(
        found.keys() == one["state"][place].keys()
        and all(torch.equal(value, one["state"][place][name]) for name, value in found.items())
        for place, found in other["state"].items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["resident", "stronghold:window=1", TWIN])
@pytest.mark.parametrize("make", ["adamw", "momentum"])
def test_states_come_from_the_optimizer_and_go_back(make: str, policy: str) -> None:
    """Plain steps, steps of a Trainer, and plain steps again are as plain steps; in between its ``state_dict`` is PyTorch's."""
    given = batches(SMALL, 4)
    plain = Plain(MAKES[make], SMALL)
    torch.manual_seed(2)
    expected, states = [], []
    for batch in given:
        expected += plain.steps([batch])
        states.append(copy.deepcopy(plain.optimizer.state_dict()))
    mixed = Plain(MAKES[make], SMALL)
    with training(mixed.model, mixed.optimizer, policy) as trainer:
        torch.manual_seed(2)
        losses = mixed.steps(given[:1])
        random = torch.get_rng_state()
        trainer.prepare(given[0])
        assert not mixed.optimizer.state
        torch.set_rng_state(random)
        losses += steps(trainer, mixed.schedule, given[1:3])
        assert equal_states(mixed.optimizer.state_dict(), states[2])
        assert not mixed.optimizer.state
    assert equal_states(mixed.optimizer.state_dict(), states[2])
    losses += mixed.steps(given[3:])
    assert losses == expected
    assert same([p.detach() for p in mixed.parameters], plain.parameters)


@pytest.mark.slow
@pytest.mark.parametrize("make", ["adamw", "momentum"])
def test_a_state_dict_of_the_optimizer_is_loaded_between_steps(make: str) -> None:
    """Settings and states are those of the plain training that it is from; what has no state begins anew."""
    given = batches(SMALL, 4)
    plain = Plain(MAKES[make], SMALL)
    torch.manual_seed(2)
    plain.steps(given[:2])
    fresh, state = MAKES[make](plain.parameters), copy.deepcopy(plain.optimizer.state_dict())
    values = [p.detach().clone() for p in plain.parameters]
    random = torch.get_rng_state()
    expected = plain.steps(given[2:])
    plain.optimizer.load_state_dict(copy.deepcopy(fresh.state_dict()))
    expected += plain.steps(given[:1])
    model = model_for(SMALL)
    optimizer = MAKES[make](list(model.parameters()))
    schedule = schedule_of(optimizer)
    with training(model, optimizer, "stronghold:window=1") as trainer:
        steps(trainer, schedule, given[:2])
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)
        optimizer.load_state_dict(state)
        torch.set_rng_state(random)
        losses = steps(trainer, schedule, given[2:])
        optimizer.load_state_dict(fresh.state_dict())
        losses += steps(trainer, schedule, given[:1])
    assert losses == expected
    assert same([p.detach() for p in model.parameters()], plain.parameters)


def test_what_a_caller_must_not_do_is_refused() -> None:
    """Its own step, other groups, a state of another optimizer: each in one line, and training goes on."""
    model, batch = model_for(SMALL), batches(SMALL, 1)[0]
    optimizer = MAKES["momentum"](list(model.parameters()))
    with training(model, optimizer, "resident") as trainer:
        trainer.step(batch)
        with pytest.raises(InputError, match=r"call Trainer\.step"):
            optimizer.step()
        state = optimizer.state_dict()
        for change, message in (
            ({"momentum_buffer": torch.zeros(3)}, r"momentum_buffer of \S+ in the optimizer's state is \(3,\), but has to be"),
            ({"momentum_buffer": None}, r"momentum_buffer of \S+ in the optimizer's state is NoneType"),
        ):
            wrong = copy.deepcopy(state)
            wrong["state"][0] |= change
            with pytest.raises(InputError, match=message):
                optimizer.load_state_dict(wrong)
        optimizer.param_groups[0]["momentum"] = 0.0
        with pytest.raises(InputError, match="some groups of SGD have momentum and others none"):
            trainer.step(batch)
        optimizer.param_groups[0]["momentum"] = 0.9
        moved = optimizer.param_groups[0]["params"].pop()
        with pytest.raises(InputError, match="the optimizer's groups have other parameters"):
            trainer.step(batch)
        optimizer.param_groups[0]["params"].append(moved)
        trainer.step(batch)
        assert equal_states(trainer.optimizer.state_dict(), optimizer.state_dict())


def rest_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are in no block."""
    return [parameter for name, parameter in model.named_parameters() if not name.startswith("blocks.")]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: torch.optim.AdamW(m.parameters(), capturable=True), "group 0 of the optimizer has capturable"),
        (lambda m: torch.optim.RMSprop(m.parameters()), "updates as torch.optim.AdamW, Adam, SGD, Adafactor and Muon do"),
        (lambda m: [], "the list of optimizers is empty"),
        (lambda m: [torch.optim.SGD(m.parameters()), m], "optimizer is of type GPT: give an optimizer"),
        (
            lambda m: [torch.optim.SGD(m.parameters()), torch.optim.Adam(m.blocks.parameters())],
            "in several of the 2",
        ),
        (
            lambda m: torch.optim.Adam([{"params": m.blocks.parameters(), "amsgrad": True}, {"params": rest_of(m)}]),
            "some groups of Adam have amsgrad and others none",
        ),
        (lambda m: type("Mine", (torch.optim.AdamW,), {})(m.parameters()), "Mine: a Trainer updates as .*not as their"),
        (lambda m: torch.optim.AdamW(list(m.parameters())[1:]), r"the optimizer has no embedding\.\S+, which would be trained"),
        (
            lambda m: torch.optim.AdamW(chain(m.parameters(), nn.Linear(2, 3).parameters())),
            r"has a parameter \(3, 2\) that is none of the model's",
        ),
    ],
)
def test_optimizers_that_cannot_be_used_are_refused_at_once(make: Callable[[nn.Module], Optimizer], message: str) -> None:
    """With what to give instead."""
    model = model_for(SMALL)
    with pytest.raises(InputError, match=message):
        Trainer(model, optimizer=make(model))


def test_frozen_parameters_may_be_in_the_optimizer() -> None:
    """As in plain training they have no gradient and do not change."""
    model = model_for(SMALL)
    frozen = next(iter(model.blocks[0].parameters()))
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    with training(model, torch.optim.AdamW(model.parameters()), "resident") as trainer:
        trainer.step(batches(SMALL, 1)[0])
    assert torch.equal(frozen, before)


@pytest.mark.parametrize(("make", "precision"), [("sgd", Precision.BF16), ("adamw", Precision.FP16)])
def test_no_masters_where_the_simulator_knows_none(make: str, precision: Precision) -> None:
    """The table of optimizers has no such row."""
    workload = replace(SMALL, precision=precision)
    model = model_for(workload)
    optimizer = MAKES[make](list(model.parameters()))
    with (
        training(model, optimizer, "resident", master_weights=False) as trainer,
        pytest.raises(InputError, match=r"without master weights, which is known in torch\.bfloat16 only"),
    ):
        trainer.step(batches(workload, 1)[0])


def saved_after_two(
    trainer: Trainer, model: GPT, given: list[tuple[Tensor, Tensor]]
) -> tuple[tuple[dict[str, Any], dict[str, Any], Tensor], list[Tensor]]:
    """Train on two batches and one more: states of model, optimizer and generator after the two, and parameters in the end."""
    trainer.prepare(given[0])
    torch.manual_seed(2)
    for batch in given[:2]:
        trainer.step(batch)
    saved = copy.deepcopy((model.state_dict(), trainer.optimizer.state_dict(), torch.get_rng_state()))
    trainer.step(given[2])
    return saved, trainer.parameters()


@pytest.mark.slow
def test_states_loaded_before_the_first_step_are_not_rounded() -> None:
    """PyTorch rounds them to the parameters' 16 bit; those that it has rounded before are refused."""
    workload = replace(SMALL, precision=Precision.BF16)
    given, model = batches(workload, 3), model_for(workload)
    optimizer = MAKES["adamw"](list(model.parameters()))
    with training(model, optimizer, "resident") as trainer:
        saved, expected = saved_after_two(trainer, model, given)
    resumed = model_for(workload)
    optimizer = MAKES["adamw"](list(resumed.parameters()))
    resumed.load_state_dict(saved[0])
    with training(resumed, optimizer, "stronghold:window=1") as trainer:
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        trainer.prepare(given[0])
        torch.set_rng_state(saved[2])
        trainer.step(given[2])
        assert same(trainer.parameters(), [nn.Parameter(value) for value in expected])
    optimizer.load_state_dict(saved[1])
    with (
        training(resumed, optimizer, "resident") as trainer,
        pytest.raises(InputError, match="call it once the Trainer is made"),
    ):
        trainer.step(given[0])


@pytest.mark.slow
@pytest.mark.parametrize("model_first", [True, False])
def test_weights_and_states_may_be_loaded_in_either_order(model_first: bool) -> None:
    """Between steps, in 16 bit: masters keep the bits that the weights do not have."""
    workload = replace(SMALL, precision=Precision.BF16)
    given, model = batches(workload, 4), model_for(workload)
    optimizer = MAKES["adamw"](list(model.parameters()))
    with training(model, optimizer, "stronghold:window=1") as trainer:
        saved, expected = saved_after_two(trainer, model, given)
        trainer.step(given[3])
        for load_model in (True, False) if model_first else (False, True):
            if load_model:
                model.load_state_dict(saved[0])
            else:
                optimizer.load_state_dict(copy.deepcopy(saved[1]))
        torch.set_rng_state(saved[2])
        trainer.step(given[2])
        assert same(trainer.parameters(), [nn.Parameter(value) for value in expected])


@pytest.mark.slow
def test_the_last_load_counts() -> None:
    """Whether by the Trainer or by the optimizer, and also if no step follows."""
    given, model = batches(SMALL, 2), model_for(SMALL)
    optimizer = MAKES["adamw"](list(model.parameters()))
    with training(model, optimizer, "resident") as trainer:
        trainer.step(given[0])
        state = trainer.state_dict()
        trainer.step(given[1])
        later = optimizer.state_dict()

    def steps_of(state_dict: dict[str, Any]) -> set[float]:
        return {float(states["step"]) for states in state_dict["state"].values()}

    for load, expected in (("trainer", 1), ("optimizer", 2)):
        fresh = model_for(SMALL)
        optimizer = MAKES["adamw"](list(fresh.parameters()))
        with training(fresh, optimizer, "resident") as trainer:
            trainer.load_state_dict(state)
            assert steps_of(optimizer.state_dict()) == {1}
            if load == "optimizer":
                optimizer.load_state_dict(copy.deepcopy(later))
        assert steps_of(optimizer.state_dict()) == {expected}
        with training(fresh, optimizer, "resident") as trainer:
            trainer.prepare(given[0])
            assert steps_of(optimizer.state_dict()) == {expected}
            trainer.load_state_dict(trainer.state_dict())  # also if the optimizer has made more steps than the training


@pytest.mark.slow
def test_states_of_parameters_that_are_frozen_stay() -> None:
    """They are in the optimizer during the training and after it, as with PyTorch."""
    model, batch = model_for(SMALL), batches(SMALL, 1)[0]
    optimizer = MAKES["adamw"](list(model.parameters()))
    with training(model, optimizer, "resident") as trainer:
        trainer.step(batch)
    frozen = list(model.blocks[0].parameters())
    before = [optimizer.state[parameter]["exp_avg"].clone() for parameter in frozen]
    for parameter in frozen:
        parameter.requires_grad_(False)
    with training(model, optimizer, "resident") as trainer:
        trainer.step(batch)
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
        optimizer.load_state_dict(optimizer.state_dict())
    assert same([optimizer.state[parameter]["exp_avg"] for parameter in frozen], [nn.Parameter(value) for value in before])


@pytest.mark.slow
def test_several_threads_may_read_the_optimizer() -> None:
    """Each gets all states."""
    model, batch = model_for(SMALL), batches(SMALL, 1)[0]
    optimizer = MAKES["adamw"](list(model.parameters()))
    with training(model, optimizer, "resident") as trainer:
        trainer.step(batch)
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda _: len(optimizer.state_dict()["state"]), range(12)))
    assert found == [len(list(model.parameters()))] * 12


def test_a_closed_trainer_loads_nothing() -> None:
    """The model stays as it is."""
    model = model_for(SMALL)
    optimizer = MAKES["adamw"](list(model.parameters()))
    with training(model, optimizer, "resident") as trainer:
        trainer.step(batches(SMALL, 1)[0])
        state = trainer.state_dict()
    other = model_for(SMALL)
    before = [p.detach().clone() for p in other.parameters()]
    with training(other, MAKES["adamw"](list(other.parameters())), "resident") as trainer:
        pass
    with pytest.raises(InputError, match="the trainer is closed"):
        trainer.load_state_dict(state)
    assert same(before, list(other.parameters()))


def test_nothing_stays_on_an_optimizer() -> None:
    """A Trainer that is closed or dropped, used or not, leaves no hooks."""
    model = model_for(SMALL)
    optimizer = MAKES["adamw"](list(model.parameters()))
    Trainer(model, optimizer=optimizer).close()
    with Trainer(model, optimizer=optimizer):
        pass
    trainer = Trainer(model, optimizer=optimizer)
    del trainer
    gc.collect()
    hooks = ("step_pre", "state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    assert not any(getattr(optimizer, f"_optimizer_{hook}_hooks") for hook in hooks)


def test_a_state_of_adam_is_none_of_adamw() -> None:
    """Their settings differ in how weights decay."""
    model, batch = model_for(SMALL), batches(SMALL, 1)[0]
    with training(model, torch.optim.AdamW(model.parameters()), "resident") as trainer:
        trainer.step(batch)
        state = trainer.state_dict()
    model = model_for(SMALL)
    adam = training(model, torch.optim.Adam(model.parameters()), "resident")
    with adam as trainer, pytest.raises(InputError, match="group 0 of the state are of AdamW"):
        trainer.load_state_dict(state)
