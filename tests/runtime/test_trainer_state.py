"""What callers read and write between the steps: current, exact and of one step, or refused with nothing changed."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.measured import MEDIUM, profile_for
from support.reference import Scaled, batches, model_for
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.utils.flop_counter import FlopCounterMode

from autohete import Trainer
from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.plan import Plan
from autohete.plan.policy import Judge
from autohete.profile import Profile
from autohete.runtime.guard import Guarded
from autohete.runtime.losses import next_token_loss
from autohete.runtime.partition import partition
from autohete.runtime.update_rules import default_optimizer
from autohete.testing.strategies import plans, without_contradictions
from autohete.train.gpt import GPT
from autohete.train.measured import measured_profile_on
from autohete.workload import Precision, Workload

pytestmark = pytest.mark.slow

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
    optimizer = default_optimizer(masters)
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
    "storage": lambda model: [torch.empty(0).set_(p.untyped_storage()) for p in model.parameters()],
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


@pytest.mark.parametrize("policy", ["resident", "zero_offload:paper,tile_overlap", "stronghold:window=1"])
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
        guard = trainer._held.running().session.training.guard
        guard.wait = lambda: pytest.fail("waited")
        for p in model.parameters():
            assert p.numel() == p.shape.numel() == p.size().numel()
            assert (p.dtype, p.device.type, p.requires_grad, p.is_leaf, p.ndim) == (torch.float32, "cpu", True, True, p.dim())
            assert isinstance(p, nn.Parameter)
            assert p.grad_fn is None
        assert model.requires_grad_(True) is model
        model.zero_grad()
        model.zero_grad(set_to_none=False)
        guard.wait = trainer._held.running().session.lanes.drain


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


def test_hugging_face_saves_and_generates(tmp_path: Path) -> None:
    """``save_pretrained`` and ``generate`` between the steps give what a copy of the model gives, and change nothing."""
    transformers = pytest.importorskip("transformers")

    def model() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
        )
        made: nn.Module = transformers.GPT2LMHeadModel(config)
        return made

    def run(between: Callable[[nn.Module], None]) -> list[Tensor]:
        data = [torch.randint(0, 64, (2, 2, 8), generator=torch.Generator().manual_seed(1)).unbind() for _ in range(3)]
        made = model()
        with Trainer(made, policy="stronghold:window=1", hardware=load_hardware("a100-40gb-epyc7713")) as trainer:
            trainer.prepare((data[0][0], data[0][1]))
            torch.manual_seed(2)
            for ids, targets in data:
                trainer.step((ids, targets))
                with torch.random.fork_rng():
                    between(made)
            return trainer.parameters()

    def use(made: Any) -> None:
        copied = copy.deepcopy(made).eval()
        start = torch.tensor([[1, 2, 3]])
        made.save_pretrained(tmp_path)
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
        assert loaded.config.use_cache == model().config.use_cache  # type: ignore[union-attr]
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), made.parameters(), strict=True))
        made.eval()
        found = made.generate(start, max_new_tokens=5, do_sample=False)
        made.train()
        assert torch.equal(found, copied.generate(start, max_new_tokens=5, do_sample=False))

    assert all(torch.equal(a, b) for a, b in zip(run(use), run(lambda made: None), strict=True))


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


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_written_takes_effect(writer: str, precision: Precision) -> None:
    """A training whose caller changes weights between steps is bit-identical to plain PyTorch that does the same."""
    workload = replace(SMALL, precision=precision)
    expected = WRITERS[writer]()
    reference = plainly(workload, expected)
    for policy in POLICIES:
        found = WRITERS[writer]()
        assert same(by_trainer(workload, policy, found), reference)
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
    plan = without_contradictions(profile, replace(data.draw(plans(profile)), delayed=False))
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


class Changing(Scaled):
    """Its caller changes what is not trained."""

    def change(self) -> None:
        """What the caller does after a step."""
        with torch.no_grad():
            self.scale.mul_(1.5)
            self.blocks[1].up.weight.mul_(1.5)  # type: ignore[union-attr, operator]


def test_frozen_parameters_and_buffers_change_between_the_steps() -> None:
    """What is not trained and is changed after a step does not change that step's gradients, which are still computed."""
    torch.set_num_threads(1)
    model = Changing(SMALL)
    with Trainer(model, policy="resident", profile=profile_for(SMALL)) as trainer:
        torch.manual_seed(2)
        for batch in batches(SMALL, STEPS):
            trainer.step(batch)
            model.change()
        copied = copy.deepcopy(model)
        assert type(copied.scale) is type(pickle.loads(pickle.dumps(model)).scale) is Tensor
        assert copied.state_dict().keys() == model.state_dict().keys()
    assert type(model.scale) is Tensor
    expected = Changing(SMALL)
    trained = [p for p in expected.parameters() if p.requires_grad]
    optimizer = default_optimizer(trained)
    torch.manual_seed(2)
    for ids, targets in batches(SMALL, STEPS):
        optimizer.zero_grad()
        next_token_loss(expected(ids), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.change()
    for found in (model, copied):
        assert torch.equal(found.scale, expected.scale)
        assert all(torch.equal(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


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
    with pytest.raises(InputError, match="have been written to"), training() as (trainer, model):
        kept = model.head.norm.weight.data
        trainer.step(batch)
        kept.mul_(2)
    assert type(model.head.norm.weight) is nn.Parameter


def unchanged(model: GPT) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def own_backward(model: GPT) -> None:
    with torch.random.fork_rng():
        model(batches(SMALL, 1)[0][0]).sum().backward()


REFUSED: dict[str, tuple[str, Callable[[GPT], object]]] = {
    "grad": (r"token\.weight\.grad is not available", lambda m: m.embedding.token.weight.grad),
    "set grad": (
        "grad cannot be set",
        lambda m: setattr(m.embedding.token.weight, "grad", torch.zeros_like(m.embedding.token.weight)),
    ),
    "clip_grad_norm_": ("grad is not available", lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0)),
    "clip_grad_value_": ("grad is not available", lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0)),
    "optimizer.step": ("applies the updates", lambda m: torch.optim.AdamW(m.parameters()).step()),
    "sgd.step": ("applies the updates", lambda m: torch.optim.SGD(m.parameters(), foreach=False).step()),
    "register_hook": ("cannot have a hook", lambda m: m.head.norm.weight.register_hook(print)),  # type: ignore[no-untyped-call]
    "post hook": ("cannot have a hook", lambda m: m.head.norm.weight.register_post_accumulate_grad_hook(print)),  # type: ignore[no-untyped-call]
    "backward": ("backward reaches parameters", lambda m: own_backward(m)),
    "half": ("float32 and cannot become .* of torch.float16", lambda m: m.half()),
    "to": ("only values can change", lambda m: m.to(torch.bfloat16)),
    "shape": (r"cannot become \(3,\)", lambda m: setattr(m.head.norm.weight, "data", torch.zeros(3))),
}


@pytest.mark.parametrize("use", REFUSED)
def test_what_cannot_be_is_refused_at_once(use: str) -> None:
    """Gradients, updates and conversions of one's own are refused in one clear line; nothing has changed."""
    message, act = REFUSED[use]
    reference = plainly(SMALL, lambda model, step: None, 2)
    with training() as (trainer, model):
        before = unchanged(model)
        with pytest.raises(InputError, match=message):
            act(model)
        assert all(torch.equal(a, b) for a, b in zip(unchanged(model), before, strict=True))
        loss = trainer.step(batches(SMALL, 2)[1])
        assert (loss, all(torch.equal(a, b) for a, b in zip(trainer.parameters(), reference[1], strict=True))) == (
            reference[0][1],
            True,
        )
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())


def set_storage(p: Tensor) -> None:
    with torch.no_grad():
        p.set_(torch.ones(2))  # type: ignore[call-overload]


CHANGES: dict[str, tuple[str, Callable[[GPT], object]]] = {
    "assign": (
        "have been added, removed or replaced",
        lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True),
    ),
    "parameter": ("of head.norm have been", lambda m: setattr(m.head.norm, "weight", nn.Parameter(torch.ones(64)))),
    "added": ("of the model have been", lambda m: m.register_parameter("more", nn.Parameter(torch.ones(3)))),
    "removed": ("of blocks have been", lambda m: m.blocks.pop(0)),
    "module": (r"of blocks\.0 have been", lambda m: setattr(m.blocks[0], "dropout", nn.Dropout(0.3))),
    "set_": (r"head\.norm\.weight has been written to behind", lambda m: set_storage(m.head.norm.weight)),
    "set_ after reading": (
        r"cannot become \(2,\)",
        lambda m: set_storage(m.head.norm.weight) if m.head.norm.weight.sum() else None,
    ),
    "meta": ("have been added, removed or replaced", lambda m: m.to("meta")),
    "forward hook": (r"registered on blocks\.0\.up", lambda m: m.blocks[0].up.register_forward_hook(lambda *_: None)),  # type: ignore[union-attr]
    "pre-hook": ("registered on the model", lambda m: m.register_forward_pre_hook(lambda *_: None)),
    "backward hook": ("registered on head", lambda m: m.head.register_full_backward_hook(lambda *_: None)),
    "requires_grad": ("requires_grad has become False", lambda m: setattr(m.head.norm.weight, "requires_grad", False)),
    "requires_grad_": ("requires_grad has become False", lambda m: m.requires_grad_(False)),
    "requires_grad_ by name": ("has become False", lambda m: m.head.norm.weight.requires_grad_(requires_grad=False)),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_structure_is_refused_at_the_next_step(change: str) -> None:
    """Other parameters, modules and hooks than those that were planned for are refused, and the model is given back."""
    message, act = CHANGES[change]
    with pytest.raises(InputError, match=message), training() as (trainer, model):
        act(model)
        trainer.step(batches(SMALL, 1)[0])
    assert not any(isinstance(p, Guarded) for p in model.parameters())


def test_a_global_hook_is_refused_until_it_is_removed() -> None:
    """A hook on all modules is refused like one on a single module, and training goes on once it is gone."""
    with training() as (trainer, _):
        hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
        with pytest.raises(InputError, match="registered on all modules"):
            trainer.step(batches(SMALL, 1)[0])
        hook.remove()
        trainer.step(batches(SMALL, 1)[0])


def test_what_is_trained_may_change_until_the_next_step() -> None:
    """As in PEFT's ``disable_adapter``: flags that are changed back change no bit."""
    (ids, _), *_ = batches(SMALL, 1)

    def between(model: GPT, step: int) -> None:
        model.requires_grad_(False)
        assert not model(ids).requires_grad
        model.requires_grad_(True)

    assert same(by_trainer(SMALL, "stronghold:window=1", between), plainly(SMALL, between))


def test_gradients_from_before_never_enter() -> None:
    """What is left in ``.grad`` from before the training takes no part in it."""

    def first(stale: bool) -> list[Tensor]:
        model = model_for(SMALL)
        for p in model.parameters():
            p.grad = torch.ones_like(p) if stale else None
        with Trainer(model, policy="resident", profile=profile_for(SMALL)) as trainer:
            torch.manual_seed(2)
            trainer.step(batches(SMALL, 1)[0])
            return trainer.parameters()

    assert all(torch.equal(a, b) for a, b in zip(first(True), first(False), strict=True))


def test_hooks_on_gradients_are_refused_before() -> None:
    """A parameter that has a hook on its gradient is refused before anything has changed."""
    model = model_for(SMALL)
    model.head.norm.weight.register_hook(lambda gradient: gradient * 2)  # type: ignore[no-untyped-call]
    before = unchanged(model)
    trainer = Trainer(model, policy="resident", profile=profile_for(SMALL))
    with trainer, pytest.raises(InputError, match=r"head\.norm\.weight has hooks"):
        trainer.step(batches(SMALL, 1)[0])
    assert all(torch.equal(a, b) for a, b in zip(unchanged(model), before, strict=True))


def test_parameters_of_other_types_are_refused() -> None:
    """A trained parameter of a type of its own is refused before anything has changed."""

    class Own(nn.Parameter):
        pass

    model = model_for(SMALL)
    model.head.norm.weight = Own(torch.ones(64))
    trainer = Trainer(model, policy="resident", profile=profile_for(SMALL))
    with trainer, pytest.raises(InputError, match=r"head\.norm\.weight is a Own: only plain"):
        trainer.step(batches(SMALL, 1)[0])
    assert type(model.head.norm.weight) is Own


class _Doubled(Tensor):
    """A frozen matrix that counts twice in a linear map: what it does is in its ``__torch_function__``."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        with torch._C.DisableTorchFunctionSubclass():
            if func is nn.functional.linear:
                return func(args[0], 2 * args[1].as_subclass(Tensor), *args[2:])
            return func(*args, **(kwargs or {}))


def test_frozen_parameters_of_other_types_keep_their_meaning() -> None:
    """A frozen parameter whose type overrides operations does so in the lanes, too."""

    def model() -> GPT:
        made = model_for(SMALL)
        up = made.blocks[1].up
        own = up.weight.detach().clone().as_subclass(_Doubled)  # type: ignore[union-attr, operator]
        del up.weight  # type: ignore[union-attr]
        up.weight = own  # type: ignore[union-attr]
        up._buffers["weight"] = own  # type: ignore[union-attr]
        return made

    def first_loss(made: GPT) -> float:
        torch.manual_seed(2)
        return next_token_loss(made(ids), targets).item()

    torch.set_num_threads(1)
    ids, targets = batches(SMALL, 1)[0]
    with Trainer(model(), policy="resident", profile=profile_for(SMALL)) as trainer:
        trainer.prepare((ids, targets))
        torch.manual_seed(2)
        found = trainer.step((ids, targets))
    assert found == first_loss(model()) != first_loss(model_for(SMALL))


def test_a_loss_cannot_use_parameters() -> None:
    """A penalty on weights in the loss, which would get no gradient, is refused with what to do instead."""
    model = model_for(SMALL)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(logits, targets) + 0.1 * model.head.norm.weight.square().sum()

    trainer = Trainer(model, policy="resident", loss=loss, profile=profile_for(SMALL))
    with pytest.raises(InputError, match=r"more than the logits .head\.norm\.weight.*weight_decay"), trainer:
        trainer.step(batches(SMALL, 1)[0])


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference_mode": lambda: torch.inference_mode(),
    "default device": lambda: torch.device("meta"),
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(partial(torch.mul, other=1), lambda tensor: tensor),
    "_FlopCounterMode": lambda: FlopCounterMode(display=False),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_the_calling_thread_are_refused(mode: str) -> None:
    """What would not reach the lanes is refused, before and after the model is taken over; nothing has changed."""
    batch = batches(SMALL, 1)[0]
    model = model_for(SMALL)
    before = unchanged(model)
    with Trainer(model, policy="resident", profile=profile_for(SMALL)) as trainer:
        with MODES[mode](), pytest.raises(InputError, match=mode.replace(" ", "_")):
            trainer.step(batch)
        assert all(torch.equal(a, b) for a, b in zip(unchanged(model), before, strict=True))
        trainer.step(batch)
        with MODES[mode](), pytest.raises(InputError, match=mode.replace(" ", "_")):
            trainer.step(batch)
        trainer.step(batch)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("around", [torch.no_grad, default_dtype, deterministic, torch.autograd.graph.save_on_cpu])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_other_modes_change_nothing(around: Callable[[], AbstractContextManager[None]], precision: Precision) -> None:
    """Steps inside ``no_grad``, another default type or deterministic algorithms give the same bits, measuring included."""
    workload = replace(SMALL, precision=precision)
    losses = []
    with Trainer(model_for(workload), policy="autohete", hardware=load_hardware("a100-40gb-epyc7713")) as trainer, around():
        trainer.prepare(batches(workload, 1)[0])
        torch.manual_seed(2)
        losses = [trainer.step(batch) for batch in batches(workload, STEPS)]
        found = losses, trainer.parameters()
    assert same(found, plainly(workload, lambda model, step: None))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_is_told_so() -> None:
    """In a forked child, where there are no lanes, a use of the parameters is refused instead of waiting for ever."""
    with training() as (trainer, model):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                model.state_dict()
            except InputError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        assert b"is a fork of" in os.read(read, 1000)
        os.close(read)
        trainer.step(batches(SMALL, 1)[0])


def test_each_parameter_gets_storage_of_its_own(tmp_path: Path) -> None:
    """Between the steps and afterwards no two parameters share memory, as safetensors demands; a tied matrix stays one."""
    safetensors = pytest.importorskip("safetensors.torch")
    with training(replace(SMALL, tied_embeddings=True)) as (_, model):
        safetensors.save_file(model.state_dict(), tmp_path / "between")
        kept = unchanged(model)
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == len(list(model.parameters()))
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    safetensors.save_file(model.state_dict(), tmp_path / "after")
    names = [name for name, _ in model.named_parameters()]
    for file in ("between", "after"):
        found = safetensors.load_file(tmp_path / file)
        assert all(torch.equal(found[name], value) for name, value in zip(names, kept, strict=True))


def test_a_profiler_of_all_threads_sees_every_task() -> None:
    """By the task's name, with the operations in it. One of the calling thread alone sees nothing, which is said."""
    batch = batches(SMALL, 1)[0]
    with training() as (trainer, _):
        with torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as profile:
            trainer.step(batch)
            trainer.parameters()
        assert {"F1@1", "L3@1", "B1@1", "aten::mm"} <= {event.key for event in profile.key_averages()}
        with torch.profiler.profile(), pytest.warns(UserWarning, match="records the calling thread only"):
            trainer.step(batch)


def test_measuring_and_training_leave_the_parameters_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither looks at a parameter as a caller does, who gets its values on the host, where a pass on a GPU would find it."""

    def refuse(lent: object, one: object) -> None:
        raise AssertionError(f"{one} is given to the caller")

    batch, hardware = batches(SMALL, 1)[0], load_hardware("v100-32gb-dgx2")
    for precision in (Precision.FP32, Precision.BF16):
        workload = replace(SMALL, precision=precision)
        with monkeypatch.context() as patched:
            patched.setattr("autohete.runtime.guard._Lent.give", refuse)
            profile = measured_profile_on(hardware, model_for(workload), batch)
        for policy in POLICIES:
            with Trainer(model_for(workload), policy=policy, profile=profile) as trainer, monkeypatch.context() as patched:
                patched.setattr("autohete.runtime.guard._Lent.give", refuse)
                trainer.step(batch)
