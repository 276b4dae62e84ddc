"""Batches of other shapes than the first, losses with more inputs, and models with other heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.measured import is_within
from support.modules import VOCABULARY, Layer, Net
from support.reference import model_for
from support.small import SMALL
from torch import Tensor, nn
from torch.nn import functional

from autohete import Trainer
from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.runtime.batch import Batch
from autohete.runtime.ledger import Counting
from autohete.runtime.losses import mean_token_loss, next_token_loss
from autohete.runtime.update_rules import default_optimizer

pytestmark = pytest.mark.slow

#: Sequences and their length: the largest first, then shorter ones, and a last batch that is smaller.
SHAPES = [(4, 8), (4, 5), (4, 8), (3, 7), (1, 1), (2, 8)]
POLICIES = ["resident:checkpointing=full", "stronghold:window=1", "zero_offload", "autohete", "joint"]


def batches(shapes: list[tuple[int, int]], vocabulary: int = 61) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and targets, some of which are ignored."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for shape in shapes:
        ids, targets = (torch.randint(0, vocabulary, shape, generator=generator) for _ in range(2))
        targets[torch.rand(shape, generator=generator) < 0.3] = -100
        targets[0, 0] = 3
        found.append((ids, targets))
    return found


def hardware() -> Any:
    slow = {"links.h2d.bandwidth": "1GB/s", "links.d2h.bandwidth": "1GB/s", "cpu.update_bandwidth": "2GB/s"}
    return load_hardware("a100-40gb-epyc7713", slow)


def same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("make", [lambda: model_for(SMALL), Net])
def test_smaller_batches_train_to_the_bit(make: Callable[[], nn.Module], policy: str) -> None:
    """Within the memory that was planned for the largest."""
    given, plain = batches(SHAPES), make()
    optimizer, expected = default_optimizer(plain.parameters()), []
    torch.manual_seed(2)
    for ids, targets in given:
        loss = next_token_loss(plain(ids), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        expected.append(loss.item())
    model = make()
    with Trainer(model, policy=policy, hardware=hardware()) as trainer:
        trainer.prepare(given[0])
        torch.manual_seed(2)
        assert [trainer.step(batch) for batch in given] == expected
        assert trainer.counting is Counting.SCHEDULED
        assert is_within(trainer)
    assert same(model, plain)


@pytest.mark.parametrize("policy", ["resident", "stronghold:window=1,checkpointing=selective", "zero_offload"])
def test_smaller_batches_need_no_more_memory(policy: str) -> None:
    """Counted storage by storage, in a budget that the largest batch just fits."""
    model, given = Net(), batches(SHAPES, VOCABULARY)
    with Trainer(model, policy=policy, hardware=hardware()) as trainer:
        prediction = trainer.prepare(given[0])
        needed = prediction.gpu.peak_bytes
    with Trainer(Net(), policy=policy, hardware=hardware(), gpu_memory=needed) as trainer:
        trainer.prepare(given[0])
        assert trainer._held.run is not None
        count = trainer._held.run.session.training.count
        assert count is not None
        count._scheduled = None  # every storage is counted from here on
        for batch in given:
            trainer.step(batch)
        assert count.ledger.peak_bytes <= needed


@pytest.mark.parametrize("policy", ["resident", "zero_offload", "autohete"])
def test_a_mean_over_tokens_does_not_depend_on_the_cut(policy: str) -> None:
    """Micro-batches of any size add up to the loss of the batch, as with Hugging Face's ``num_items_in_batch``."""
    given, plain = batches([(5, 8), (3, 6), (4, 8)]), model_for(SMALL)
    optimizer, expected = default_optimizer(plain.parameters()), []
    torch.manual_seed(2)
    for ids, targets in given:
        items, total = int((targets != -100).sum()), 0.0
        optimizer.zero_grad()
        for part in torch.tensor_split(torch.arange(len(ids)), 3):
            loss = mean_token_loss(plain(ids[part]), targets[part], items)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        optimizer.step()
        expected.append(total)
    model = model_for(SMALL)
    with Trainer(model, policy=policy, loss=mean_token_loss, micro_batches=3, hardware=hardware()) as trainer:
        trainer.prepare(given[0])
        torch.manual_seed(2)
        assert [trainer.step(batch) for batch in given] == expected
        with pytest.raises(InputError, match=r"has 2 sequences, .* split into 3 micro-batches: give at least 3"):
            trainer.step(batches([(2, 8)])[0])
    assert same(model, plain)


def test_a_batch_may_count_its_items() -> None:
    """The number that a batch gives takes the place of the count; what is no number of items is refused."""
    (ids, targets), trainer = batches([(4, 8)])[0], Trainer(model_for(SMALL), loss=mean_token_loss, hardware=hardware())
    given, items = {"ids": ids, "targets": targets}, 2 * int((targets != -100).sum())
    with trainer:
        trainer.prepare(given)
        counted = trainer.evaluate([given])
        for twice in (items, torch.tensor(items), torch.tensor(float(items))):
            assert trainer.evaluate([given | {"num_items_in_batch": twice}]) == counted / 2
        assert trainer.evaluate([given | {"num_items_in_batch": None}]) == counted
        for wrong in (0, 1.5, float("nan"), "3", True, torch.ones(2)):
            with pytest.raises(InputError, match=r"num_items_in_batch is .*: give a positive whole number"):
                trainer.step(given | {"num_items_in_batch": wrong})


def weighted(logits: Tensor, targets: Tensor, weights: Tensor, *, scale: float = 1.0) -> Tensor:
    """A loss with a weight for each sequence, and a factor."""
    each = functional.cross_entropy(logits.transpose(1, 2).float(), targets, reduction="none").mean(-1)
    return (each * weights).mean() * scale


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_takes_what_the_batch_has_for_it(micro_batches: int) -> None:
    """By the names of its arguments, cut into micro-batches like everything else."""
    ids, targets = batches([(4, 8)])[0]
    targets = targets.clamp(min=0)
    weights = torch.tensor([0.1, 3.0, 0.5, 1.0])
    batch: dict[str, Any] = {"ids": ids, "targets": targets, "weights": weights, "scale": 2.0}
    model = model_for(SMALL).eval()
    with torch.no_grad():
        expected = weighted(model(ids), targets, weights, scale=2.0).item()
    with Trainer(model, loss=weighted, micro_batches=micro_batches, hardware=hardware()) as trainer:
        assert trainer.step(batch) == pytest.approx(expected, rel=1e-6)
        assert trainer.evaluate([batch]) != expected
        with pytest.raises(InputError, match="the first one had ids, targets, weights, scale"):
            trainer.step({key: value for key, value in batch.items() if key != "scale"})


class Scaled(Net):
    """Takes a factor that its loss takes, too."""

    def forward(self, ids: Tensor, factor: Tensor | None = None) -> Any:
        found = super().forward(ids)
        return found if factor is None else found * factor


def test_loss_and_model_may_take_the_same() -> None:
    """As a mask of the tokens that count."""

    def loss(logits: Tensor, targets: Tensor, factor: Tensor) -> Tensor:
        return next_token_loss(logits, targets) * factor.mean()

    ids, targets = batches([(4, 8)], VOCABULARY)[0]
    factor = torch.full((4, 1, 1), 0.5)
    model = Scaled().eval()
    expected = (next_token_loss(model(ids, factor), targets) * 0.5).item()
    with Trainer(model, loss=loss, hardware=hardware()) as trainer:
        assert trainer.step({"ids": ids, "targets": targets, "factor": factor}) == expected


class Classifier(Net):
    """One result for each sequence."""

    class layer(Layer):
        """As any other."""

    def forward(self, ids: Tensor) -> Any:
        return super().forward(ids)[:, -1, :5]


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (nn.CrossEntropyLoss(), torch.tensor([3, 0, 4, 1])),
        (functional.mse_loss, torch.randn(4, 5)),
        (nn.BCEWithLogitsLoss(), torch.ones(4, 5)),
    ],
)
@pytest.mark.parametrize("policy", ["resident", "autohete"])
def test_targets_may_belong_to_sequences(loss: Any, targets: Tensor, policy: str) -> None:
    """Classes, numbers, several labels: whatever the loss takes."""
    given = [(ids, targets[: len(ids)]) for ids, _ in batches([(4, 8), (4, 6), (3, 8)], VOCABULARY)]
    plain, expected = Classifier(), []
    optimizer = default_optimizer(plain.parameters())
    torch.manual_seed(2)
    for ids, wanted in given:
        found = loss(plain(ids), wanted)
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        expected.append(found.item())
    model = Classifier()
    with Trainer(model, policy=policy, loss=loss, hardware=hardware()) as trainer:
        trainer.prepare(given[0])
        torch.manual_seed(2)
        assert [trainer.step(batch) for batch in given] == expected
    assert same(model, plain)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 8), (3, 8)], r"ids \(3, 8\) .* the first one had \(2, 8\) .* others may have fewer or shorter sequences"),
        ([(2, 7), (2, 8)], "call prepare with one of the largest shape"),
    ],
)
def test_larger_batches_are_refused(shapes: list[tuple[int, int]], message: str) -> None:
    """Memory is planned for the first, and training goes on."""
    first, larger = batches(shapes)
    with Trainer(model_for(SMALL), hardware=hardware()) as trainer:
        trainer.step(first)
        with pytest.raises(InputError, match=message):
            trainer.step(larger)
        trainer.step(first)


def test_a_batch_is_cut_where_it_has_sequences() -> None:
    """Positions, masks without sequences and settings stay whole."""
    inputs = {"input_ids": torch.ones(4, 8), "position_ids": torch.arange(4), "mask": torch.ones(1, 8), "flag": True}
    first, *_ = Batch(inputs, torch.ones(4, 8)).split(4)
    assert {k: getattr(v, "shape", v) for k, v in first.inputs.items()} == {
        "input_ids": (1, 8),
        "position_ids": (4,),
        "mask": (1, 8),
        "flag": True,
    }


class InSequence(Net):
    """Its blocks are an ``nn.Sequential``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks)  # type: ignore[assignment]

    def through(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks(x)
        return result


def test_blocks_may_be_in_sequence() -> None:
    """They are cut and moved like those of a list."""
    given = batches([(4, 8), (4, 8)], VOCABULARY)
    losses = []
    for make in (Net, InSequence):
        with Trainer(make(), policy="stronghold:window=1", hardware=hardware()) as trainer:
            trainer.prepare(given[0])
            torch.manual_seed(2)
            losses.append([trainer.step(batch) for batch in given])
            assert trainer.prediction is not None
            assert len(trainer.prediction.plan.units) == 5
    assert losses[0] == losses[1]
