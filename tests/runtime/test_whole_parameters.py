"""Optimizers that update whole parameters, several optimizers for one model, and rules of a user's own."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference import batches, model_for
from support.small import SMALL
from torch import Tensor, nn

from autohete import Trainer
from autohete.errors import InputError, OptimizerError, ScheduleError
from autohete.hardware import Place, load_hardware
from autohete.runtime import update_rules
from autohete.runtime.ledger import Counting
from autohete.runtime.losses import next_token_loss
from autohete.runtime.optimizer import MASTER, STEP, Layout, WholeStates, states_of_unit
from autohete.runtime.update_rules import Group, StateTensor, Step, UpdateRule, UpdateSettings, register_rule
from autohete.schedule import Value
from autohete.train.caller_optimizer import rule_of
from autohete.workload import Precision, Workload
from autohete.workload.optimizers import Optimizer

Parameters = list[nn.Parameter]
Optimizers = list[torch.optim.Optimizer]
FP32, BF16 = torch.float32, torch.bfloat16
STEPS = 3
TWIN = "twin_flow:ratio=50,sub_group_size=1000,bucket_size=1"
POLICIES = ["resident", "zero_offload", "autohete", "stronghold:window=1", "streamed_states", "zero_infinity", "joint"]


class Normed(torch.optim.Optimizer):
    """A user's own: momentum, divided by the norm of the whole parameter's momentum."""

    def __init__(self, params: Any, lr: float = 1e-2, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["mean"] = torch.ones_like(parameter)
                    state["mean"].lerp_(parameter.grad, 1 - group["momentum"])
                    parameter.sub_(state["mean"] / state["mean"].norm(), alpha=group["lr"])


def normed_states(shape: torch.Size, dtype: torch.dtype, group: Group) -> dict[str, StateTensor]:
    return {"mean": StateTensor(shape, dtype, initial=torch.ones(shape))}


def normed_step(group: Group, step: Step) -> None:
    (weight,), (gradient,), (mean,) = step.weights, step.gradients, step.states["mean"]
    mean.lerp_(gradient, 1 - group["momentum"])
    weight.sub_(mean / mean.norm(), alpha=group["lr"])


NORMED = UpdateRule(normed_states, normed_step, Optimizer.MUON, Optimizer.MUON_PURE_BF16, saved=update_rules.without_count)


class Signs(torch.optim.Optimizer):
    """A user's own that updates each element by itself: signs of a momentum, without weight decay."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state.setdefault("mean", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                    parameter.sub_(state["mean"].sign(), alpha=group["lr"])


def signs_step(group: Group, step: Step) -> None:
    for weight, gradient, mean in zip(step.weights, step.gradients, step.states["mean"], strict=True):
        mean.lerp_(gradient, 0.1)
        weight.sub_(mean.sign(), alpha=group["lr"])


SIGNS = UpdateRule(
    lambda shape, dtype, group: {"mean": StateTensor(shape, dtype)},
    signs_step,
    Optimizer.SGD_MOMENTUM,
    per_element=True,
    saved=update_rules.without_count,
)


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own rules are registered during a test; one thread, as in plain training."""
    torch.set_num_threads(1)
    monkeypatch.setattr(update_rules, "_RULES", dict(update_rules._RULES))
    register_rule(Normed, NORMED)
    register_rule(Signs, lambda optimizer: SIGNS)


def matrices_and_rest(parameters: Parameters) -> tuple[Parameters, Parameters]:
    """The matrices of blocks, and embedding, norms and biases."""
    matrices = [parameter for parameter in parameters[2:] if parameter.dim() == 2]
    return matrices, [parameter for parameter in parameters if not any(parameter is matrix for matrix in matrices)]


def groups(parameters: Parameters) -> list[dict[str, Any]]:
    matrices, rest = matrices_and_rest(parameters)
    return [{"params": matrices, "weight_decay": 0.2}, {"params": rest, "lr": 5e-3}]


def muon_and_adamw(parameters: Parameters) -> Optimizers:
    matrices, rest = matrices_and_rest(parameters)
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3, fused=True)]


def eight_bit(parameters: Parameters) -> Optimizers:
    kind: Any = importlib.import_module("bitsandbytes.optim").AdamW8bit
    return [kind(groups(parameters), lr=1e-3, min_8bit_size=512)]


MAKES: dict[str, Callable[[Parameters], Optimizers]] = {
    "adafactor": lambda parameters: [torch.optim.Adafactor(groups(parameters), lr=1e-2)],
    "adafactor, foreach": lambda parameters: [torch.optim.Adafactor(parameters, weight_decay=0.1, maximize=True, foreach=True)],
    "muon": muon_and_adamw,
    "sgd and adam": lambda parameters: [torch.optim.SGD(parameters[::2]), torch.optim.Adam(parameters[1::2], fused=True)],
    "amsgrad": lambda parameters: [torch.optim.AdamW(groups(parameters), amsgrad=True)],
    "amsgrad, fused": lambda parameters: [torch.optim.Adam(groups(parameters), amsgrad=True, fused=True)],
    "own": lambda parameters: [Normed(parameters)],
    "own, per element": lambda parameters: [Signs(parameters)],
    "8 bit": eight_bit,
}
WHOLE = ["adafactor", "muon", "own", "8 bit"]


class Plain:
    """Ordinary training, with masters for 16-bit parameters unless they are updated themselves."""

    def __init__(self, make: str, workload: Workload, *, masters: bool = True) -> None:
        self.model, self.workload = model_for(workload), workload
        self.parameters = list(self.model.parameters())
        masters = masters and workload.precision is not Precision.FP32
        self.updated = [nn.Parameter(p.detach().float()) for p in self.parameters] if masters else self.parameters
        self.optimizers = MAKES[make](self.updated)
        self.schedules = [schedule_of(optimizer) for optimizer in self.optimizers]

    def steps(self, given: list[tuple[Tensor, Tensor]], clip_norm: float | None = None, micro_batches: int = 1) -> list[float]:
        losses = []
        for ids, targets in given:
            total, gradients = 0.0, list[Tensor]()
            for some, wanted in zip(ids.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
                loss = next_token_loss(self.model(some), wanted)
                total += loss.item() / micro_batches
                found = torch.autograd.grad(loss / micro_batches, self.parameters)
                gradients = [a + b for a, b in zip(gradients, found, strict=True)] if gradients else list(found)
            losses.append(total)
            for parameter, gradient in zip(self.updated, gradients, strict=True):
                parameter.grad = gradient.to(parameter.dtype)
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(self.updated, clip_norm)
            for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
                optimizer.step()
                schedule.step()
            with torch.no_grad():
                for parameter, updated in zip(self.parameters, self.updated, strict=True):
                    parameter.copy_(updated)
        return losses


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.7**step)


def trainer_of(model: nn.Module, optimizers: Optimizers, policy: str, **others: Any) -> Trainer:
    """A Trainer on slow links and with a drive, so that plans that search use everything."""
    slow = {"links.h2d.bandwidth": "1GB/s", "links.d2h.bandwidth": "1GB/s", "cpu.update_bandwidth": "2GB/s"}
    drive = Place("nvme", 10**12, 1e9, 1e9, 1e-5)
    hardware = replace(load_hardware("a100-40gb-epyc7713", slow), places=(drive,))
    others = {"gpu_memory": "60%"} | others if policy == "autohete" else others
    given = optimizers if len(optimizers) > 1 else optimizers[0]
    return Trainer(model, policy=policy, optimizer=given, hardware=hardware, **others)


def steps(trainer: Trainer, schedules: list[Any], given: list[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    for batch in given:
        losses.append(trainer.step(batch))
        for schedule in schedules:
            schedule.step()
    return losses


def equal(one: Any, other: Any) -> bool:
    """Whether two nested states are the same to the bit, but for masters, which PyTorch's own have not."""
    if isinstance(one, Mapping):
        keys = {*one} - {MASTER}
        return keys == {*other} - {MASTER} and all(equal(one[key], other[key]) for key in keys)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype is other.dtype and torch.equal(one, other)
    return bool(one == other)


def same_states(one: Optimizers, other: Optimizers) -> bool:
    return all(equal(a.state_dict(), b.state_dict()) for a, b in zip(one, other, strict=True))


CASES = [
    *(("adafactor", policy, precision) for policy in POLICIES for precision in (Precision.FP32, Precision.BF16)),
    *(("muon", policy, Precision.BF16) for policy in POLICIES),
    *((make, policy, Precision.FP32) for make in ("8 bit", "own") for policy in POLICIES),
    *((make, "autohete", Precision.FP32) for make in MAKES if make not in WHOLE),
    *((make, TWIN, precision) for make in ("amsgrad", "own, per element") for precision in (Precision.FP32, Precision.BF16)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "policy", "precision"), CASES)
def test_every_optimizer_trains_to_the_bit(make: str, policy: str, precision: Precision) -> None:
    """Losses, parameters and states, with schedulers, clipping and accumulation, and with the bytes in the schedule."""
    workload = replace(SMALL, precision=precision)
    clip_norm = None if "stronghold" in policy else 0.05
    micro_batches = 2 if policy in ("zero_offload", "streamed_states") else 1
    plain = Plain(make, workload)
    torch.manual_seed(2)
    expected = plain.steps(batches(workload, STEPS), clip_norm, micro_batches)
    model = model_for(workload)
    optimizers = MAKES[make](list(model.parameters()))
    schedules = [schedule_of(optimizer) for optimizer in optimizers]
    with trainer_of(model, optimizers, policy, clip_norm=clip_norm, micro_batches=micro_batches) as trainer:
        trainer.prepare(batches(workload, 1)[0])
        torch.manual_seed(2)
        assert steps(trainer, schedules, batches(workload, STEPS)) == expected
        assert same_states(optimizers, plain.optimizers)
        if micro_batches == 1:  # a loss of part of a batch has four bytes that the schedule has not
            assert trainer.counting is Counting.SCHEDULED, "a task has used more than the schedule says"
    assert equal([p.detach() for p in model.parameters()], [p.detach() for p in plain.parameters])
    assert same_states(optimizers, plain.optimizers)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["zero_offload", "streamed_states:weights", "joint"])
@pytest.mark.parametrize("make", ["adafactor", "muon", "amsgrad", "8 bit"])
def test_parameters_in_bf16_without_masters_are_pytorchs_own(make: str, policy: str) -> None:
    """What PyTorch's optimizer does with a model in bf16, with states in bf16."""
    workload = replace(SMALL, precision=Precision.BF16)
    plain = Plain(make, workload, masters=False)
    torch.manual_seed(2)
    expected = plain.steps(batches(workload, STEPS))
    model = model_for(workload)
    optimizers = MAKES[make](list(model.parameters()))
    schedules = [schedule_of(optimizer) for optimizer in optimizers]
    with trainer_of(model, optimizers, policy, master_weights=False) as trainer:
        trainer.prepare(batches(workload, 1)[0])
        torch.manual_seed(2)
        assert steps(trainer, schedules, batches(workload, STEPS)) == expected
        assert trainer.counting is Counting.SCHEDULED
    assert equal([p.detach() for p in model.parameters()], [p.detach() for p in plain.parameters])
    assert same_states(optimizers, plain.optimizers)


@pytest.mark.slow
@pytest.mark.parametrize("make", WHOLE)
def test_states_come_from_the_optimizer_and_go_back(make: str) -> None:
    """A plain step, one of a Trainer, one of another that loads all states, and a plain one are four plain steps."""
    given, plain = batches(SMALL, 4), Plain(make, SMALL)
    torch.manual_seed(2)
    expected, states = [], []
    for batch in given:
        expected += plain.steps([batch])
        states.append(copy.deepcopy([optimizer.state_dict() for optimizer in plain.optimizers]))
    mixed = Plain(make, SMALL)
    torch.manual_seed(2)
    losses = mixed.steps(given[:1])
    random = torch.get_rng_state()
    with trainer_of(mixed.model, mixed.optimizers, "zero_offload") as trainer:
        trainer.prepare(given[0])
        torch.set_rng_state(random)
        losses += steps(trainer, mixed.schedules, given[1:2])
        saved = copy.deepcopy([optimizer.state_dict() for optimizer in mixed.optimizers])
        values, random = copy.deepcopy(mixed.model.state_dict()), torch.get_rng_state()
        assert equal(saved, states[1])
    again = Plain(make, SMALL)
    with trainer_of(again.model, again.optimizers, "streamed_states") as trainer:
        trainer.step(given[3])
        again.model.load_state_dict(values)
        for optimizer, state, schedule in zip(again.optimizers, saved, again.schedules, strict=True):
            optimizer.load_state_dict(copy.deepcopy(state))
            schedule.last_epoch = 2
        torch.set_rng_state(random)
        losses += steps(trainer, again.schedules, given[2:3])
        assert equal([optimizer.state_dict() for optimizer in again.optimizers], states[2])
        random = torch.get_rng_state()
    torch.set_rng_state(random)
    losses += again.steps(given[3:])
    assert losses == expected
    assert equal([optimizer.state_dict() for optimizer in again.optimizers], states[3])


@pytest.mark.slow
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("make", WHOLE)
def test_a_checkpoint_resumes_under_another_policy(make: str, precision: Precision, tmp_path: Path) -> None:
    """Bit by bit, with the settings of every optimizer; also when it is loaded before the first step."""
    workload = replace(SMALL, precision=precision)
    given, outcomes = batches(workload, 3), []
    for policy, loads in (("resident", False), ("zero_infinity", True), ("streamed_states", True)):
        model = model_for(workload)
        optimizers = MAKES[make](list(model.parameters()))
        with trainer_of(model, optimizers, policy) as trainer:
            if loads:
                trainer.load(tmp_path)
            else:
                trainer.step(given[0])
                optimizers[0].param_groups[0]["lr"] = 0.02
                trainer.step(given[1])
                trainer.save(tmp_path)
            outcomes.append((trainer.step(given[2]), trainer.parameters(), [each.state_dict() for each in optimizers]))
    assert equal(outcomes[0], outcomes[1])
    assert equal(outcomes[0], outcomes[2])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["resident", "zero_offload"])
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("make", WHOLE)
def test_the_schedule_has_the_bytes_of_the_states(make: str, masters: bool, policy: str) -> None:
    """Those of the tensors that the optimizer keeps, with masters; and the peaks of device and host are the predicted ones."""
    workload = replace(SMALL, precision=Precision.BF16)
    model = model_for(workload)
    optimizers = MAKES[make](list(model.parameters()))
    with trainer_of(model, optimizers, policy, master_weights=masters) as trainer:
        for batch in batches(workload, STEPS):
            trainer.step(batch)
        comparison, prediction = trainer.comparison(), trainer.prediction
    assert prediction is not None
    assert comparison.measured_peak_bytes == comparison.predicted_peak_bytes
    assert comparison.measured_host_bytes == comparison.predicted_host_bytes
    if policy == "zero_offload":  # on the host, next to gradients and parameters in one buffer
        return
    said = sum(b.size_bytes for b in prediction.schedule.resident if b.id.value is Value.OPTIMIZER_STATES)
    kept = [state for optimizer in optimizers for state in optimizer.state.values()]
    tables = {STEP, "qmap1", "qmap2"}  # constants, and a number
    assert said == sum(tensor.nbytes for state in kept for name, tensor in state.items() if name not in tables)


@pytest.mark.parametrize("make", ["adafactor", "muon", "8 bit", "sgd and adam"])
def test_plans_that_cut_parameters_are_refused(make: str) -> None:
    """Before training, with what to do."""
    model = model_for(SMALL)
    optimizers = MAKES[make](list(model.parameters()))
    with trainer_of(model, optimizers, TWIN) as trainer, pytest.raises(OptimizerError, match="needs whole parameters"):
        trainer.step(batches(SMALL, 1)[0])


def test_a_part_of_whole_parameters_is_refused() -> None:
    """A schedule of somebody's own that updates a unit in parts."""
    updates = UpdateSettings([update_rules.MUON], [{}])
    with pytest.raises(ScheduleError, match="the schedule updates a unit in parts, but its optimizer"):
        states_of_unit(updates, torch.zeros(5), Layout((torch.Size([2, 3]),), (FP32,)), [0])


@st.composite
def drawn_shapes(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Scalars, vectors, matrices and more."""
    sides = st.lists(st.integers(1, 9), max_size=3).map(tuple)
    return draw(st.lists(sides, min_size=1, max_size=5))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("masters", [True, False])
@settings(max_examples=40)
@given(shapes=drawn_shapes(), present=st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=3))
def test_whole_states_are_exact(
    dtype: torch.dtype, masters: bool, shapes: list[tuple[int, ...]], present: list[set[int]]
) -> None:
    """Parameters of any shapes, with three optimizers by turns, whichever have a gradient; a copy of the states goes on."""
    torch.manual_seed(0)
    wide = FP32 if masters else dtype
    values = [torch.randn(shape).to(dtype) for shape in shapes]
    alone = [nn.Parameter(value.to(wide, copy=True)) for value in values]
    kinds: list[Callable[[Parameters], torch.optim.Optimizer]] = [
        lambda some: torch.optim.Adafactor(some, lr=1e-2, weight_decay=0.1),
        lambda some: torch.optim.AdamW(some, amsgrad=True),
        lambda some: Normed(some),
    ]
    optimizers = [kind(some) for place, kind in enumerate(kinds) if (some := alone[place::3])]
    updates = UpdateSettings(
        [rule_of(each) for each in optimizers], [dict(each.param_groups[0]) for each in optimizers], masters=masters
    )
    flat = torch.cat([value.reshape(-1) for value in values])
    layout = Layout(tuple(map(torch.Size, shapes)), (dtype,) * len(shapes))
    states = WholeStates(updates, flat, layout, [place % 3 for place in range(len(shapes))])
    counts = [0] * len(shapes)
    for places in present:
        counts = [count + (place in places) for place, count in enumerate(counts)]
        gradients = [torch.randn(shape).to(dtype) for shape in shapes]
        for place, (parameter, gradient) in enumerate(zip(alone, gradients, strict=True)):
            parameter.grad = gradient.to(wide, copy=True).mul_(0.5) if place in places else None
        for optimizer in optimizers:
            optimizer.step()
        states.use([tensor.clone() for tensor in states.tensors])
        found = [gradient.clone() if place in places else None for place, gradient in enumerate(gradients)]
        states.update(flat, found, states.scratch(), torch.tensor(0.5, dtype=wide))
        assert torch.equal(flat, torch.cat([parameter.detach().reshape(-1) for parameter in alone]).to(dtype))
        for place, parameter in enumerate(alone):
            kept = states.saved(place)
            expected: dict[str, Any] = next((each.state[parameter] for each in optimizers if parameter in each.state), {})
            assert kept.pop(STEP) == counts[place]
            assert not expected or equal(kept, {name: tensor for name, tensor in expected.items() if name != STEP})


def test_a_rule_must_be_a_rule() -> None:
    """What is registered is checked at once."""
    for kind, rule, message in (
        (nn.Linear, NORMED, "no class of optimizers"),
        (Normed, "normed", "the rule of Normed is 'normed': give an UpdateRule"),
    ):
        with pytest.raises(InputError, match=message):
            register_rule(kind, rule)  # type: ignore[arg-type]


def test_states_per_element_are_like_the_parameter() -> None:
    """A rule that says otherwise is refused before training."""
    wrong = replace(SIGNS, states=lambda shape, dtype, group: {"mean": StateTensor(shape[:1], dtype)})
    register_rule(Signs, wrong)
    model = model_for(SMALL)
    with (
        trainer_of(model, [Signs(model.parameters())], "resident") as trainer,
        pytest.raises(InputError, match=r"per_element, but mean of a parameter \(2, 3\) of torch.float32 is \(2,\)"),
    ):
        trainer.step(batches(SMALL, 1)[0])


def test_one_of_several_optimizers_loads_its_own_states() -> None:
    """Those of the other stay."""
    model, batch = model_for(SMALL), batches(SMALL, 1)[0]
    muon, adamw = MAKES["muon"](list(model.parameters()))
    with trainer_of(model, [muon, adamw], "resident") as trainer:
        trainer.step(batch)
        first = copy.deepcopy((muon.state_dict(), adamw.state_dict()))
        trainer.step(batch)
        second = copy.deepcopy(adamw.state_dict())
        muon.load_state_dict(first[0])
        assert equal(muon.state_dict(), first[0])
        assert equal(adamw.state_dict(), second)
        assert trainer.optimizer == [muon, adamw]


def test_a_state_of_one_optimizer_is_none_of_another() -> None:
    """Their settings differ."""
    model, batch = model_for(SMALL), batches(SMALL, 1)[0]
    with trainer_of(model, MAKES["own"](list(model.parameters())), "resident") as trainer:
        trainer.step(batch)
        state = trainer.state_dict()
    model = model_for(SMALL)
    adafactor = torch.optim.Adafactor(model.parameters())
    with trainer_of(model, [adafactor], "resident") as trainer, pytest.raises(InputError, match="optimizer's states of"):
        trainer.load_state_dict(state)


def test_a_profile_of_other_states_is_refused() -> None:
    """It would plan with the wrong bytes."""
    model, batch = model_for(SMALL), batches(SMALL, 1)[0]
    with trainer_of(model, MAKES["muon"](list(model.parameters())), "resident") as trainer:
        assert trainer.prepare(batch)
        profile = trainer.prediction.profile if trainer.prediction else None
    with (
        trainer_of(model, MAKES["own"](list(model.parameters())), "resident", profile=profile) as trainer,
        pytest.raises(InputError, match=r"the profile has \d+ bytes of optimizer states of unit 0, but this"),
    ):
        trainer.step(batch)


def test_settings_of_single_parameters_of_bitsandbytes_are_refused() -> None:
    """A copy of the optimizer would not find them."""
    model = model_for(SMALL)
    (optimizer,) = MAKES["8 bit"](list(model.parameters()))
    manager: Any = vars(optimizer)["mng"]
    manager.pid2config[0] = {"optim_bits": 32}
    try:
        with pytest.raises(InputError, match="leave override_config and register_module_override out"):
            Trainer(model, optimizer=optimizer)
    finally:
        manager.pid2config.clear()


def test_nothing_stays_on_an_optimizer_of_bitsandbytes() -> None:
    """Its own ``load_state_dict`` calls no hooks, so a Trainer puts another in its place until it is closed."""
    model = model_for(SMALL)
    (optimizer,) = MAKES["8 bit"](list(model.parameters()))
    with Trainer(model, optimizer=optimizer):
        assert "load_state_dict" in vars(optimizer)
    assert "load_state_dict" not in vars(optimizer)


def test_states_of_another_type_are_refused() -> None:
    """States in fp32 are not taken for codes of 8 bit, whether or not there are masters."""
    workload, kept = replace(SMALL, precision=Precision.BF16), list[dict[str, Any]]()
    kind: Any = type(MAKES["8 bit"](list(model_for(workload).parameters()))[0])
    for smallest in (10**9, 512):
        model = model_for(workload)
        optimizer: Any = kind(model.parameters(), min_8bit_size=smallest)
        with trainer_of(model, [optimizer], "resident", master_weights=False) as trainer:
            trainer.step(batches(workload, 1)[0])
            kept.append(optimizer.state_dict())
            if len(kept) > 1:
                with pytest.raises(InputError, match=r"is of torch\.float32, but has to be of torch\.uint8"):
                    optimizer.load_state_dict(kept[0])


def test_damaged_statistics_are_refused() -> None:
    """Means of squares are never negative."""
    model, batch = model_for(SMALL), batches(SMALL, 1)[0]
    with trainer_of(model, [torch.optim.Adafactor(model.parameters())], "resident") as trainer:
        trainer.step(batch)
        state = trainer.state_dict()
        name, kept = next((name, kept) for name, kept in state["optimizer"].items() if "row_var" in kept)
        kept["row_var"][0, 0] = -1.0
        with pytest.raises(InputError, match=f"row_var of {name} of the state has values that training never gives"):
            trainer.load_state_dict(state)
