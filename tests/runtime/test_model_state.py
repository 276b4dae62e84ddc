"""What a model changes and draws beside its parameters is that of plain training, whatever runs its blocks how often."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.measured import is_within
from support.modules import STEPS, Layer, Net, batches
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.runtime.losses import next_token_loss
from autohete.runtime.partition import partition
from autohete.runtime.probe import by_use
from autohete.runtime.update_rules import default_optimizer
from autohete.train.trainer import Trainer

#: Recomputed once, and several times; all of them resident, and whatever the planner makes of a tight budget.
POLICIES = [
    ("resident:checkpointing=full", None),
    ("support.plans:OneInput", None),
    ("stronghold:window=1", None),
    ("autohete", "60%"),
]
Between = Callable[[nn.Module], object]


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """Losses, everything in the state dict, and what the global generators give next."""

    losses: list[float]
    state: dict[str, Tensor]
    drawn: tuple[float, float, float]

    def __eq__(self, other: object) -> bool:
        """Bit for bit."""
        assert isinstance(other, Trained)
        assert self.losses == other.losses
        assert self.state.keys() == other.state.keys()
        different = [name for name, tensor in self.state.items() if not torch.equal(tensor, other.state[name])]
        assert not different
        return self.drawn == other.drawn


def seed() -> None:
    """Seed all global generators."""
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)


def drawn() -> tuple[float, float, float]:
    """One number of each global generator."""
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def nothing(model: nn.Module) -> None:
    """Between two steps."""


def train_plainly(model: nn.Module, between: Between = nothing) -> Trained:
    """Ordinary training."""
    torch.set_num_threads(1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = default_optimizer(trained)
    seed()
    losses = []
    for ids, targets in batches():
        loss = next_token_loss(model(ids), targets)
        losses.append(loss.item())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        between(model)
    return Trained(losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}, drawn())


def train(
    model: nn.Module, between: Between = nothing, policy: str = "autohete", memory: str | None = None, *, steady: bool = True
) -> Trained:
    """The same training, from measuring to closing; its peak is one that its schedule allows, if the model is ``steady``."""
    seed()
    hardware = load_hardware("a100-40gb-epyc7713")
    with Trainer(model, policy=policy, gpu_memory=memory, hardware=hardware) as trainer:
        losses = []
        for batch in batches():
            losses.append(trainer.step(batch))
            between(model)
        assert not steady or is_within(trainer)
    return Trained(losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}, drawn())


# --- random numbers


class Slow(Net):
    """A model whose blocks are still recomputed when a loss has been known for long."""

    class layer(Layer):
        """Sleeps."""

        def forward(self, x: Tensor) -> Any:
            time.sleep(2e-3)
            return super().forward(x)


def draw_much(model: nn.Module) -> None:
    """Draw from all global generators for as long as a backward takes."""
    for _ in range(3000):
        torch.randn(())
        random.random()
        np.random.rand()


def validate(model: nn.Module) -> None:
    """Let the model be in another mode for a while, in which it computes something else."""
    model.eval()
    for _ in range(100):
        torch.randn(1000).sum()
    model.train()


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "memory"), POLICIES)
@pytest.mark.parametrize("between", [draw_much, validate])
def test_what_the_caller_does_after_a_step_changes_no_step(between: Between, policy: str, memory: str | None) -> None:
    """Random numbers and modes are the caller's as soon as a step has returned, whatever goes on."""
    assert train(Slow(), between, policy, memory) == train_plainly(Slow(), between)


class DrawingEverywhere(Net):
    """Its blocks draw from Python's and NumPy's generators."""

    class layer(Layer):
        """Scales its result."""

        def forward(self, x: Tensor) -> Any:
            return super().forward(x) * (0.5 + random.random()) * (0.5 + float(np.random.standard_normal()) ** 2)


class DrawingBackward(torch.autograd.Function):
    """The identity, with noise in its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * torch.rand(())


class NoisyGradients(Net):
    """Its blocks draw in backward."""

    class layer(Layer):
        """Without dropout: where gradients are drawn last, recomputation comes earlier than in plain training."""

        def forward(self, x: Tensor) -> Any:
            return DrawingBackward.apply(super().forward(x))  # type: ignore[no-untyped-call]


class PartlyRecomputed(Net):
    """Recomputes a part of each block by itself."""

    class layer(Layer):
        """Half of it twice."""

        def forward(self, x: Tensor) -> Any:
            return checkpoint(super().forward, x, use_reentrant=False)


class RecomputedLater(Net):
    """The same after it has drawn random numbers."""

    class layer(Layer):
        """Of dropout."""

        def forward(self, x: Tensor) -> Any:
            return checkpoint(super().forward, self.dropout(x), use_reentrant=False)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "memory"), POLICIES)
@pytest.mark.parametrize("model", [DrawingEverywhere, NoisyGradients, PartlyRecomputed, RecomputedLater])
def test_all_global_generators_give_what_they_would_give(model: type[Net], policy: str, memory: str | None) -> None:
    """Recomputation draws again what forward drew, backward draws what it would, and the caller gets the next numbers."""
    assert train(model(), draw_much, policy, memory) == train_plainly(model(), draw_much)


# --- buffers


class WithBuffers(Net):
    """Its blocks and its head have what a forward changes."""

    part: Callable[[int], nn.Module] = nn.Identity

    class layer(Layer):
        """Has another part."""

        def __init__(self, hidden: int) -> None:
            super().__init__(hidden)
            self.part: nn.Module = nn.Identity()

        def forward(self, x: Tensor) -> Any:
            return super().forward(self.part(x))

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.part = type(self).part(32)
        self.last = type(self).part(32)

    def head(self, x: Tensor) -> Any:
        return super().head(self.last(x))


class Normed(WithBuffers):
    """Batch normalization: running statistics, which no version counter shows."""

    class part(nn.Module):
        """Over sequences."""

        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(hidden)

        def forward(self, x: Tensor) -> Tensor:
            normed: Tensor = self.norm(x.transpose(1, 2))
            return normed.transpose(1, 2)


class Codebook(WithBuffers):
    """An average that is bound anew, and that the forward uses; and one that is changed in place."""

    class part(nn.Module):
        """Subtracts the mean so far."""

        mean: Tensor
        steps: Tensor
        table: Tensor

        def __init__(self, hidden: int) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(hidden))
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))
            self.register_buffer("table", torch.ones(hidden))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            y = x - self.mean * self.steps * self.table
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
            return y


class Spectral(WithBuffers):
    """Spectral normalization as a parametrization, whose power iteration goes on with each forward."""

    @staticmethod
    def part(hidden: int) -> nn.Module:
        return parametrizations.spectral_norm(nn.Linear(hidden, hidden))


class SpectralByHook(WithBuffers):
    """The same as a hook before the forward, which keeps the weight as an attribute."""

    @staticmethod
    def part(hidden: int) -> nn.Module:
        return spectral_norm(nn.Linear(hidden, hidden))


class FrozenStatistics(Normed):
    """Its normalization is in evaluation mode, in which the statistics are used and not changed."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()


CHANGING = [Normed, Codebook, Spectral, SpectralByHook, FrozenStatistics]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "memory"), POLICIES)
@pytest.mark.parametrize("model", CHANGING)
def test_buffers_that_change_are_those_of_plain_training(model: type[Net], policy: str, memory: str | None) -> None:
    """Measuring changes none, recomputation finds those of its forward, and all are the same after closing. Plans that
    recompute blocks with the older hook need up to 10 KB more than they say, which the first steps show.
    """
    steady = model is not SpectralByHook
    assert train(model(), policy=policy, memory=memory, steady=steady) == train_plainly(model())


def test_statistics_that_begin_to_change_later_are_those_of_plain_training() -> None:
    """A look at the model finds also what changes in training mode only."""

    def thaw(model: nn.Module) -> None:
        model.train()

    policy = "resident:checkpointing=full"
    assert train(FrozenStatistics(), thaw, policy, steady=False) == train_plainly(FrozenStatistics(), thaw)


@pytest.mark.parametrize("model", CHANGING)
def test_only_what_changes_is_copied(model: type[Net]) -> None:
    """The bytes that are set aside are those of the blocks' buffers that a forward changes, once more."""
    found = partition(model())
    cut = by_use(found, batches()[0][0])
    changing = [buffer for name, buffer in found.model.named_buffers() if name in cut.effects.changing]
    assert changing
    assert not any(name.endswith("table") for name in cut.effects.changing)
    inside = [
        buffer for name, buffer in found.model.named_buffers() if name in cut.effects.changing and name.startswith("blocks")
    ]
    assert cut.lasting_bytes - cut.effects.kept_bytes - found.lasting_bytes == sum(buffer.nbytes for buffer in inside)


class Restless(Net):
    """Changes everything with each forward, outside of the blocks, where nothing is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.generator = 0, dict[str, list[int]](), torch.Generator().manual_seed(3)
        self.average = torch.zeros(32)
        self.register_buffer("mean", torch.zeros(32))

    def embed(self, ids: Tensor) -> Tensor:
        x = super().embed(ids)
        self.calls += 1
        self.seen.setdefault("calls", []).append(self.calls)
        self.average += x.detach().mean((0, 1))
        self.mean = self.average * 2
        self.late = True
        return x * torch.rand((), generator=self.generator) + 1e-3 * self.calls + self.mean


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "memory"), POLICIES)
def test_what_changes_outside_of_the_blocks_changes_once_a_step(policy: str, memory: str | None) -> None:
    """Attributes, containers, generators and buffers are as if nothing had been measured."""
    trained, plain = Restless(), Restless()
    assert train(trained, policy=policy, memory=memory) == train_plainly(plain)
    assert trained.calls == plain.calls == STEPS
    assert trained.seen == plain.seen
    assert torch.equal(trained.average, plain.average)


@pytest.mark.slow
def test_preparing_leaves_the_model_as_it_was() -> None:
    """Neither a look at a model nor measuring it leaves anything behind."""
    for make in (*CHANGING, Restless, DrawingEverywhere):
        model = make()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        attributes = {key: value for key, value in vars(model).items() if isinstance(value, (int, str))}
        seed()
        expected = drawn()
        seed()
        with Trainer(model, hardware=load_hardware("a100-40gb-epyc7713")) as trainer:
            trainer.prepare(batches()[0])
        assert drawn() == expected
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert attributes == {key: value for key, value in vars(model).items() if isinstance(value, (int, str))}


# --- evaluation


class Absorbing(Normed):
    """Draws and counts whether it trains or not."""

    class layer(Normed.layer):
        """Has noise."""

        count: Tensor

        def __init__(self, hidden: int) -> None:
            super().__init__(hidden)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            self.count += 1
            return super().forward(x) * torch.rand(()) + random.random()


def test_evaluation_leaves_modes_buffers_and_random_states() -> None:
    """A part that was in evaluation mode stays there, the others train on, and nothing else shows that it was called."""
    model = Absorbing()
    frozen = model.blocks[1].get_submodule("part")
    frozen.eval()
    with Trainer(model, policy="stronghold:window=1", hardware=load_hardware("a100-40gb-epyc7713")) as trainer:
        trainer.step(batches()[0])
        modes = {name: module.training for name, module in model.named_modules()}
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        seed()
        expected = drawn()
        seed()
        trainer.evaluate(batches())
        assert drawn() == expected
        assert {name: module.training for name, module in model.named_modules()} == modes
        assert not frozen.training
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


# --- attributes


class Caching(Net):
    """Its blocks keep what they have computed once."""

    class layer(Layer):
        """Has a table that grows with the longest sequence, and keeps its last result."""

        table: Tensor | None = None

        def forward(self, x: Tensor) -> Any:
            if self.table is None:
                self.table = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
            self.last = super().forward(x + self.table).detach()
            return self.last + super().forward(x)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "memory"), POLICIES)
def test_caches_are_no_obstacle(policy: str, memory: str | None) -> None:
    """What a second forward leaves as it is may be kept."""
    assert train(Caching(), policy=policy, memory=memory) == train_plainly(Caching())


class Counting(Net):
    """Its blocks count."""

    class layer(Layer):
        """In an attribute."""

        calls = 0

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return super().forward(x) / self.calls


class Averaging(Net):
    """Its blocks have an average that is no buffer."""

    class layer(Layer):
        """In a list."""

        def __init__(self, hidden: int) -> None:
            super().__init__(hidden)
            self.averages = [torch.zeros(hidden)]

        def forward(self, x: Tensor) -> Any:
            self.averages[0] += x.detach().mean((0, 1))
            return super().forward(x)


class OwnGenerator(Net):
    """Its blocks draw from a generator of their own."""

    class layer(Layer):
        """Which nobody restores."""

        def __init__(self, hidden: int) -> None:
            super().__init__(hidden)
            self.generator = torch.Generator()

        def forward(self, x: Tensor) -> Any:
            return super().forward(x) * torch.rand((), generator=self.generator)


@pytest.mark.parametrize(
    ("model", "name"),
    [(Counting, "blocks.0.calls"), (Averaging, "blocks.0.averages"), (OwnGenerator, "blocks.0.generator")],
)
def test_attributes_that_change_with_each_forward_are_refused(model: type[Net], name: str) -> None:
    """Before anything has changed, with their names and what to do."""
    refused = model()
    before = {key: tensor.clone() for key, tensor in refused.state_dict().items()}
    with Trainer(refused) as trainer, pytest.raises(InputError) as caught:
        trainer.step(batches()[0])
    assert f"block 1 changes {name} with each forward" in str(caught.value)
    assert "register_buffer" in str(caught.value)
    assert all(torch.equal(tensor, before[key]) for key, tensor in refused.state_dict().items())
    if isinstance(refused, Counting):
        assert [block.calls for block in refused.blocks] == [0, 0, 0]


OUTSIDE = {"numpy": np.random.default_rng(0), "torch": torch.Generator(), "calls": [0]}


class OutsideNumpy(Net):
    """Its blocks draw from a generator that is none of the model's."""

    class layer(Layer):
        """NumPy's."""

        def forward(self, x: Tensor) -> Any:
            return super().forward(x) * float(OUTSIDE["numpy"].random())  # type: ignore[attr-defined]


class OutsideTorch(Net):
    """The same with PyTorch's."""

    class layer(Layer):
        """Which a block names, and nobody restores."""

        def forward(self, x: Tensor) -> Any:
            return super().forward(x) * torch.rand((), generator=OUTSIDE["torch"])  # type: ignore[call-overload]


class OutsideCounter(Net):
    """Its blocks count in a list that is none of the model's."""

    class layer(Layer):
        """And compute with the count."""

        def forward(self, x: Tensor) -> Any:
            calls: list[int] = OUTSIDE["calls"]  # type: ignore[assignment]
            calls[0] += 1
            return super().forward(x) / calls[0]


@pytest.mark.parametrize("model", [OutsideNumpy, OutsideTorch, OutsideCounter])
def test_blocks_that_compute_something_else_each_time_are_refused(model: type[Net]) -> None:
    """What they count or draw by is out of sight, so that measuring and recomputation would count and draw as well."""
    with Trainer(model()) as trainer, pytest.raises(InputError, match="block 1 computes something else each time"):
        trainer.step(batches()[0])


class CountsBefore(Net):
    """It counts, in a list that is none of the model's, before its blocks, and computes with the count."""

    def embed(self, ids: Tensor) -> Tensor:
        calls: list[int] = OUTSIDE["calls"]  # type: ignore[assignment]
        calls[0] += 1
        return super().embed(ids) / calls[0]


class CountsAfter(Net):
    """And after them."""

    def head(self, x: Tensor) -> Any:
        calls: list[int] = OUTSIDE["calls"]  # type: ignore[assignment]
        calls[0] += 1
        return super().head(x) / calls[0]


@pytest.mark.parametrize("model", [CountsBefore, CountsAfter])
def test_outer_code_that_computes_something_else_each_time_is_refused(model: type[Net]) -> None:
    """The model's own code outside of its blocks runs more often, too."""
    with Trainer(model()) as trainer, pytest.raises(InputError, match="code outside of its blocks computes something"):
        trainer.step(batches()[0])


class DrawsBefore(Net):
    """It draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = np.random.RandomState(3)

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * float(self.noise.rand())


@pytest.mark.parametrize(("policy", "memory"), POLICIES)
def test_a_generator_of_outer_code_is_restored(policy: str, memory: str | None) -> None:
    """As those of blocks are."""
    assert train(DrawsBefore(), policy=policy, memory=memory) == train_plainly(DrawsBefore())


class Places(nn.Embedding):
    """It gets the ids, and looks up their places, as BART's does."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(torch.arange(ids.shape[1]))


class Placed(Net):
    """It has fewer places than tokens, and calls its tables by position and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.places = Places(batches()[0][0].shape[1], self.token.embedding_dim)

    def embed(self, ids: Tensor) -> Tensor:
        return self.dropout(self.token(input=ids) + self.places(ids))  # type: ignore[no-any-return]


def test_the_ids_of_an_embedding_are_those_that_it_looks_up() -> None:
    """A table that is called with the ids may look up something else; ids that are out of range are refused."""
    assert train(Placed(), policy="zero_offload") == train_plainly(Placed())
    ids, targets = batches()[0]
    with Trainer(Placed()) as trainer, pytest.raises(InputError, match=r"ids has values from .* the model accepts 0 to"):
        trainer.step((ids + 1000, targets))


class WarmUp(nn.Module):
    """A loss that grows with each call."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return next_token_loss(logits, targets) * self.calls


def test_the_state_of_a_loss_advances_with_steps_only() -> None:
    """Not as it is measured, and not in an evaluation; state that cannot be restored is refused."""
    loss = WarmUp()
    with Trainer(Net(), loss=loss) as trainer:
        for count, batch in enumerate(batches(), 1):
            trainer.step(batch)
            trainer.evaluate([batch])
            assert loss.calls == count
    inner = WarmUp()
    trainer = Trainer(Net(), loss=lambda logits, targets: inner(logits, targets))
    with pytest.raises(InputError, match="the loss function returns something else each time"), trainer:
        trainer.step(batches()[0])


SCALE: ContextVar[float] = ContextVar("scale", default=1.0)


class Scaled(Net):
    """Its blocks read a context variable, as mixed precision or a tracer may."""

    class layer(Layer):
        """That the caller sets around a step."""

        def forward(self, x: Tensor) -> Any:
            return super().forward(x) * SCALE.get()


@pytest.mark.parametrize(("policy", "memory"), POLICIES)
def test_the_callers_context_variables_are_those_of_the_model(policy: str, memory: str | None) -> None:
    """Also where the caller changes them between steps."""

    def change(model: nn.Module) -> None:
        SCALE.set(SCALE.get() / 2)

    found, expected = (
        copy_context().run(each)
        for each in (lambda: train(Scaled(), change, policy, memory), lambda: train_plainly(Scaled(), change))
    )
    assert found == expected


class BeginningLate(Net):
    """Its blocks begin to change a buffer after the first step."""

    class layer(Layer):
        """When they are told to."""

        count: Tensor

        def __init__(self, hidden: int) -> None:
            super().__init__(hidden)
            self.begun = False
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            if self.begun:
                self.count += 1
            return super().forward(x)


def test_buffers_that_begin_to_change_later_are_not_recomputed_wrongly() -> None:
    """A change that the first look did not show ends the training."""

    def begin(model: nn.Module) -> None:
        for block in partition(model).modules:
            vars(block)["begun"] = True

    with pytest.raises(Exception, match=r"block 1 changes blocks\.0\.count, which it did not in the first forward"):
        train(BeginningLate(), begin, "resident:checkpointing=full")
