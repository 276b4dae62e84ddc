"""What callers read and write between the steps: current, exact and of one step, or refused with nothing changed."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import batches, model_for
from test_device import MEDIUM, profile_for
from torch import Tensor, nn

from autohete import Trainer
from autohete.errors import InputError
from autohete.plan import Plan
from autohete.policy import Judge
from autohete.profile import Profile
from autohete.runtime.model import GPT, next_token_loss
from autohete.runtime.optimizer import Adam
from autohete.runtime.partition import partition
from autohete.testing.strategies import plans
from autohete.workload import Precision, Workload

STEPS = 4
SMALL = replace(MEDIUM, transformer_blocks=2)
#: Between them: everything resident; parameters offloaded, in slots, updated on either side; gradients in their place.
POLICIES = [
    "resident",
    "resident:checkpointing=full",
    "zero_offload",
    "zero_offload:paper,tile_overlap",
    "patrickstar:chunk_size=1",
    "stronghold:window=1",
    "autohete:priority=off",
]

#: What a caller does with the model after a step, which is counted from 0.
Between = Callable[[GPT, int], None]


@contextmanager
def training(
    workload: Workload = SMALL, policy: object = "stronghold:window=1", steps: int = 1
) -> Iterator[tuple[Trainer, GPT]]:
    """A trainer that has made ``steps`` steps, and its model."""
    torch.set_num_threads(1)
    model = model_for(workload)
    with Trainer(model, policy=policy, profile=profile_for(workload)) as trainer:  # type: ignore[arg-type]
        torch.manual_seed(2)
        for batch in batches(workload, steps):
            trainer.step(batch)
        yield trainer, model


def by_trainer(workload: Workload, policy: object, between: Between, steps: int = STEPS) -> tuple[list[float], list[Tensor]]:
    """Losses and final master weights of a training with ``between`` after each step."""
    losses = []
    with training(workload, policy, 0) as (trainer, model):
        for step, batch in enumerate(batches(workload, steps)):
            losses.append(trainer.step(batch))
            between(model, step)
        return losses, trainer.parameters()


def plainly(
    workload: Workload, between: Between, steps: int = STEPS, delayed: bool = False
) -> tuple[list[float], list[Tensor]]:
    """The same in plain PyTorch. Master weights of a 16-bit model take over the values that ``between`` has changed."""
    torch.set_num_threads(1)
    model = model_for(workload)
    parameters = [p for owned in partition(model).owned for p in owned]
    full = workload.precision is Precision.FP32
    masters = parameters if full else [nn.Parameter(p.detach().float()) for p in parameters]
    adam = Adam()
    optimizer = torch.optim.AdamW(
        masters, lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay, fused=True
    )
    losses: list[float] = []
    late: list[Tensor | None] = [None] * len(parameters)
    torch.manual_seed(2)
    for step, (ids, targets) in enumerate(batches(workload, steps)):
        loss = next_token_loss(model(ids), targets)
        losses.append(loss.item())
        gradients = [gradient.float() for gradient in torch.autograd.grad(loss, parameters)]
        for master, gradient in zip(masters, late if delayed else gradients, strict=True):
            master.grad = gradient
        late = [*gradients]
        optimizer.step()
        with torch.no_grad():
            if not full:
                for parameter, master in zip(parameters, masters, strict=True):
                    parameter.copy_(master)
            before = [parameter.detach().clone() for parameter in parameters]
            for parameter in parameters:
                parameter.grad = None
        between(model, step)
        with torch.no_grad():
            for parameter, master, was in zip(parameters, masters, before, strict=True):
                if not full:
                    master.copy_(torch.where(parameter != was, parameter.float(), master))
    return losses, [master.detach() for master in masters]


def same(found: tuple[list[float], list[Tensor]], expected: tuple[list[float], list[Tensor]]) -> bool:
    """Whether two trainings agree to the bit."""
    return found[0] == expected[0] and all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


# --- reading


def by_state_dict(model: GPT) -> list[Tensor]:
    return [model.state_dict()[name] for name, _ in model.named_parameters()]


def by_saving(model: GPT) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    found = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    return [found[name] for name, _ in model.named_parameters()]


def by_pickling(model: GPT) -> list[Tensor]:
    return list(pickle.loads(pickle.dumps(model)).parameters())


READERS: dict[str, Callable[[GPT], list[Tensor]]] = {
    "state_dict": by_state_dict,
    "torch.save": by_saving,
    "pickle": by_pickling,
    "deepcopy": lambda model: list(copy.deepcopy(model).parameters()),
    "data": lambda model: [p.data for p in model.parameters()],
    "numpy": lambda model: [torch.from_numpy(p.detach().numpy()) for p in model.parameters()],
    "tolist": lambda model: [torch.tensor(p.tolist()) for p in model.parameters()],
    "arithmetic": lambda model: [(p + 0).detach() for p in model.parameters()],
    "foreach": lambda model: list(torch._foreach_add([p.detach() for p in model.parameters()], 0.0)),
    "storage": lambda model: [torch.tensor(list(p.untyped_storage())) for p in model.parameters()],
    "parameters_to_vector": lambda model: [nn.utils.parameters_to_vector(model.parameters()).detach()],
}


@cache
def expected_by(reader: str, precision: Precision) -> list[Tensor]:
    """What a reader finds after the second step of plain training."""
    found: list[Tensor] = []

    def read(model: GPT, step: int) -> None:
        if step == 1:
            found.extend(t.detach().clone() for t in READERS[reader](model))

    plainly(replace(SMALL, precision=precision), read, 2)
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_read_is_current(reader: str, policy: str) -> None:
    """After a step every way of reading finds the values that plain PyTorch has then, and they stay as they are."""
    with training(SMALL, policy, 2) as (trainer, model):
        found = READERS[reader](model)
        kept = [tensor.clone() for tensor in found]
        trainer.step(batches(SMALL, 1)[0])
        assert all(torch.equal(a, b) for a, b in zip(found, kept, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept, expected_by(reader, Precision.FP32), strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_reading_changes_nothing(policy: str, precision: Precision) -> None:
    """A training whose caller reads the state after all steps stays bit-identical, low bits of master weights included."""
    workload = replace(SMALL, precision=precision)
    found = by_trainer(workload, policy, lambda model, step: [None for _ in by_state_dict(model)].clear())
    assert same(found, plainly(workload, lambda model, step: None))


def test_metadata_waits_for_nothing() -> None:
    """Shapes, types and flags are answered without waiting for updates and without copying values."""
    with training() as (trainer, model):
        guard = trainer._running()[0].guard
        guard.wait = lambda: pytest.fail("waited")
        for p in model.parameters():
            assert p.numel() == p.shape.numel() == p.size().numel()
            assert (p.dtype, p.device.type, p.requires_grad, p.is_leaf, p.ndim) == (torch.float32, "cpu", True, True, p.dim())
            assert isinstance(p, nn.Parameter)
            assert p.grad_fn is None
        assert model.requires_grad_(True) is model
        model.zero_grad()
        model.zero_grad(set_to_none=False)
        guard.wait = trainer._running()[1].drain


def test_copies_are_ordinary() -> None:
    """Copies and pickles have ordinary parameters and compute by themselves; the model's tied matrix stays tied in them."""
    ids, _ = batches(SMALL, 1)[0]
    with training(replace(SMALL, tied_embeddings=True)) as (trainer, model):
        model.eval()
        with torch.no_grad():
            expected = model(ids)
        model.train()
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert all(type(p) is nn.Parameter for p in other.parameters())
            assert not any("forward" in vars(module) for module in other.modules())
            trainer.step(batches(SMALL, 1)[0])
            assert torch.equal(other.eval()(ids), expected)
            other(ids).sum().backward()
            assert all(p.grad is not None for p in other.parameters())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_model_computes_between_the_steps(policy: str) -> None:
    """The model's own forward, with and without a graph, gives what plain PyTorch gives, and the training goes on unchanged."""
    ids, targets = batches(SMALL, 1)[0]

    def use(found: list[object]) -> Between:
        def between(model: GPT, step: int) -> None:
            model.head.norm.weight.sum()  # waits until the step has ended, which may recompute in training mode
            model.eval()
            loss = next_token_loss(model(ids), targets)
            found.append(loss.item())
            found.append([g.sum().item() for g in torch.autograd.grad(loss, [*model.parameters()])])
            model.train()

        return between

    found: list[object] = []
    expected: list[object] = []
    assert same(by_trainer(SMALL, policy, use(found)), plainly(SMALL, use(expected)))
    assert found == expected


def test_a_graph_from_before_a_step_is_refused() -> None:
    """Gradients from a graph that was built before a step are refused as in plain PyTorch, not computed with other values."""
    ids, targets = batches(SMALL, 1)[0]
    with training() as (trainer, model):
        loss = next_token_loss(model(ids), targets)
        trainer.step((ids, targets))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, [*model.parameters()])


def test_another_thread_reads_one_step() -> None:
    """A second thread that reads all the time finds each parameter of one step, and the training is unchanged."""
    expected: list[list[Tensor]] = []
    reference = plainly(SMALL, lambda model, step: expected.append([p.detach().clone() for p in model.parameters()]), 6)
    seen: list[list[Tensor]] = []
    with training(SMALL, "stronghold:window=1", 1) as (trainer, model):
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                seen.append([p.detach().clone() for p in model.parameters()])

        reader = threading.Thread(target=read)
        reader.start()
        for batch in batches(SMALL, 6)[1:]:
            trainer.step(batch)
        done.set()
        reader.join()
        assert all(torch.equal(a, b) for a, b in zip(trainer.parameters(), reference[1], strict=True))
    assert seen
    for snapshot in seen:
        assert all(any(torch.equal(p, step[place]) for step in expected) for place, p in enumerate(snapshot))


# --- writing


def clamp(model: GPT, step: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.03, 0.03)


def scale_data(model: GPT, step: int) -> None:
    model.blocks[1].up.weight.data.mul_(0.5 + step)  # type: ignore[union-attr, operator]


def load_another(model: GPT, step: int) -> None:
    if step == 1:
        model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def from_a_vector(model: GPT, step: int) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector.roll(step), model.parameters())


def by_numpy(model: GPT, step: int) -> None:
    if model.head.norm.weight.dtype is torch.float32:
        model.head.norm.weight.detach().numpy()[: step + 1] = 0.25


def reinitialise(model: GPT, step: int) -> None:
    if step == 2:
        nn.init.constant_(model.embedding.position.weight, 0.01)
        nn.init.zeros_(model.blocks[0].qkv.bias)  # type: ignore[union-attr, arg-type]


class Average:
    """Weights averaged over the steps, swapped in for an evaluation as many training scripts do."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.losses: list[float] = []

    def __call__(self, model: GPT, step: int) -> None:
        for name, p in model.named_parameters():
            if name in self.average:
                self.average[name].lerp_(p.detach(), 0.1)
            else:
                self.average[name] = p.detach().clone()
        kept = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.data = self.average[name]
        ids, targets = batches(SMALL, 1)[0]
        model.eval()
        with torch.inference_mode():
            self.losses.append(next_token_loss(model(ids), targets).item())
        model.train()
        for name, p in model.named_parameters():
            p.data.copy_(kept[name]) if step % 2 else setattr(p, "data", kept[name])
        if step % 2:
            self.average = {name: kept[name].clone() for name in self.average}


WRITERS: dict[str, Callable[[], Between]] = {
    "clamp": lambda: clamp,
    "data": lambda: scale_data,
    "load_state_dict": lambda: load_another,
    "vector_to_parameters": lambda: from_a_vector,
    "numpy": lambda: by_numpy,
    "init": lambda: reinitialise,
    "average": Average,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_written_takes_effect(writer: str, precision: Precision, policy: str) -> None:
    """A training whose caller changes weights between steps is bit-identical to plain PyTorch that does the same."""
    workload = replace(SMALL, precision=precision)
    found, expected = WRITERS[writer](), WRITERS[writer]()
    assert same(by_trainer(workload, policy, found), plainly(workload, expected))
    assert getattr(found, "losses", None) == getattr(expected, "losses", None)


@pytest.mark.parametrize("policy", ["zero_offload:delayed_update", "zero_offload:paper,tile_overlap,delayed_update"])
def test_what_is_written_takes_effect_before_delayed_updates(policy: str) -> None:
    """With delayed updates, too: the gradients that wait are applied to the weights that the caller has set."""
    assert same(by_trainer(SMALL, policy, clamp), plainly(SMALL, clamp, delayed=True))


class _Fixed:
    """A policy that returns a given plan."""

    def __init__(self, plan: Plan) -> None:
        self.name, self._plan = plan.policy, plan

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        return self._plan


@settings(max_examples=25)
@given(st.data())
def test_any_plan_reads_and_writes(data: st.DataObject) -> None:
    """Whatever a plan moves and updates where: what is read is what plain training has, what is written takes effect."""
    workload = replace(SMALL, precision=data.draw(st.sampled_from([Precision.FP32, Precision.BF16])))
    profile = profile_for(workload)
    plan = replace(data.draw(plans(profile)), delayed=False)
    found: list[list[Tensor]] = []
    expected: list[list[Tensor]] = []

    def reading(into: list[list[Tensor]]) -> Between:
        def between(model: GPT, step: int) -> None:
            into.append([p.detach().clone() for p in model.parameters()])
            clamp(model, step)

        return between

    assert same(by_trainer(workload, _Fixed(plan), reading(found), 3), plainly(workload, reading(expected), 3))
    assert all(torch.equal(a, b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True))


def test_what_is_written_before_the_end_is_kept() -> None:
    """Weights that are changed after the last step are those of the model that is given back."""
    with training() as (_, model), torch.no_grad():
        model.head.norm.weight.fill_(3.0)
    assert torch.equal(model.head.norm.weight, torch.full_like(model.head.norm.weight, 3.0))


def test_what_is_written_is_evaluated_and_returned() -> None:
    """An evaluation, and ``Trainer.parameters``, see what has been changed."""
    ids, targets = batches(SMALL, 1)[0]
    with training() as (trainer, model):
        clamp(model, 0)
        found = trainer.evaluate([(ids, targets)])
        clamp(model, 0)
        assert all(p.abs().max() <= 0.03 for p in trainer.parameters())
    model.eval()
    torch.set_num_threads(1)
    assert found == next_token_loss(model(ids), targets).item()


def test_frozen_parameters_change_between_the_steps() -> None:
    """A frozen matrix that is changed after a step does not change that step's gradients, which are still computed."""

    def frozen(model: GPT) -> GPT:
        model.blocks[1].requires_grad_(False)
        return model

    def run(with_trainer: bool) -> list[Tensor]:
        model = frozen(model_for(SMALL))
        if with_trainer:
            with Trainer(model, policy="resident", profile=profile_for(SMALL)) as trainer:
                torch.manual_seed(2)
                for batch in batches(SMALL, STEPS):
                    trainer.step(batch)
                    model.blocks[1].up.weight.data.mul_(1.5)  # type: ignore[union-attr, operator]
            return list(model.parameters())
        adam = Adam()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(
            trained, lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay, fused=True
        )
        torch.manual_seed(2)
        for ids, targets in batches(SMALL, STEPS):
            optimizer.zero_grad()
            next_token_loss(model(ids), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            model.blocks[1].up.weight.data.mul_(1.5)  # type: ignore[union-attr, operator]
        return list(model.parameters())

    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


# --- what is refused


def test_values_that_were_kept_cannot_be_written() -> None:
    """A write to values from before a step is refused at the next one, whether or not the parameter has been read since."""
    with training() as (trainer, model):
        batch = batches(SMALL, 1)[0]
        kept = model.head.norm.weight.data
        trainer.step(batch)
        for again in (False, True):
            if again:
                _ = model.head.norm.weight.sum()
            kept.mul_(2)
            with pytest.raises(
                InputError, match=r"values of head\.norm\.weight from before the last step have been written to"
            ):
                trainer.step(batch)
            trainer.step(batch)
