"""Batches are taken in the forms that people have, and refused with what is wrong before anything has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from support.modules import VOCABULARY, Net, batches
from torch import Tensor
from torch.utils._pytree import register_dataclass

from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.lowering import lower
from autohete.policies import parse_policy
from autohete.runtime.batch import Batch
from autohete.runtime.torch_executor import TorchExecutor
from autohete.simulate import judge_for
from autohete.train.as_executed import as_executed
from autohete.train.measured import measured_profile_on
from autohete.train.trainer import Trainer

IDS, TARGETS = batches()[0]


class Named(Net):
    """Takes its arguments by name, a mask of places among them."""

    def forward(self, ids: Tensor, places: Tensor | None = None, scale: float = 1.0) -> Any:
        x = self.embed(ids) * scale
        return self.head(self.through(x if places is None else x * places[..., None]))


class Given(Mapping[str, Any]):
    """A mapping that is no dict, as tokenizers return them."""

    def __init__(self, **entries: Any) -> None:
        self.entries = entries

    def __getitem__(self, name: str) -> Any:
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class Places(NamedTuple):
    """Two masks of places."""

    first: Tensor
    second: Tensor


@dataclass
class Words:
    """Ids, a mask of places, and how much it counts."""

    ids: Tensor
    places: Tensor
    scale: float = 1.0


register_dataclass(Words)


class OfTrees(Net):
    """Takes trees of tensors, by name or as its only argument."""

    def forward(self, words: Any, more: Any = None) -> Any:
        if isinstance(words, dict):
            (ids, places), scale = words["words"], words.get("scale", 1.0)
        else:
            ids, places, scale = words.ids, words.places, words.scale
        x = self.embed(ids) * scale * places[..., None]
        return self.head(self.through(x if more is None else x * (more[0].first * more[0].second)[..., None]))


class LabelledWords(NamedTuple):
    """A batch with names."""

    words: Any
    targets: Tensor


def losses_of(given: list[object], model: type[Net] = Named) -> list[float]:
    """Of a training on ``given``, evaluated at its end."""
    torch.manual_seed(2)
    with Trainer(model(), policy="stronghold:window=1", hardware=load_hardware("a100-40gb-epyc7713")) as trainer:
        return [*(trainer.step(batch) for batch in given), trainer.evaluate(given)]


@pytest.mark.slow
def test_all_forms_of_a_batch_train_to_the_same_bits() -> None:
    """Pairs, lists, dicts and other mappings; what a forward has a default for may be given or not."""
    expected = losses_of([(ids, targets) for ids, targets in batches()])
    assert losses_of([[ids, targets] for ids, targets in batches()]) == expected
    assert losses_of([{"ids": ids, "targets": targets} for ids, targets in batches()]) == expected
    assert losses_of([Given(targets=targets, ids=ids, scale=1.0, places=None) for ids, targets in batches()]) == expected
    places = torch.ones(2, 8)
    assert losses_of([{"ids": ids, "targets": targets, "places": places} for ids, targets in batches()]) == expected
    assert losses_of([{"ids": ids, "targets": targets, "scale": 2.0} for ids, targets in batches()]) != expected


def test_trees_of_tensors_train_to_the_same_bits() -> None:
    """Lists, dicts, named tuples and registered dataclasses, as arguments by name, as the only one, or as the whole batch."""
    some, ones = batches(), torch.ones(2, 8)
    expected = losses_of([(ids, targets) for ids, targets in some])
    forms: list[Callable[[Tensor, Tensor], object]] = [
        lambda ids, targets: {"words": {"words": [ids, ones]}, "more": (Places(ones, ones),), "targets": targets},
        lambda ids, targets: ({"words": {"words": (ids, ones), "scale": 1.0}}, targets),
        lambda ids, targets: (Words(ids, ones), targets),
        lambda ids, targets: LabelledWords(Words(ids, ones), targets),
    ]
    for form in forms:
        assert losses_of([form(*batch) for batch in some], OfTrees) == expected


def test_trees_are_checked_and_cut_leaf_by_leaf() -> None:
    """Later batches may have fewer and shorter sequences, micro-batches are parts of each leaf, and errors name the leaf."""
    node = load_hardware("a100-40gb-epyc7713")
    with Trainer(OfTrees(), policy="resident", hardware=node, micro_batches=2) as trainer:
        trainer.step((Words(IDS, torch.ones(2, 8)), TARGETS))
        trainer.step((Words(IDS[:, :5], torch.ones(2, 5)), TARGETS[:, :5]))
        with pytest.raises(
            InputError, match=r"the batch has ids\.places \(3, 8\) of torch\.float32, the first one had \(2, 8\)"
        ):
            trainer.step((Words(IDS, torch.ones(3, 8)), TARGETS))
        with pytest.raises(InputError, match=r"the batch has ids\.scale 2\.0, the first one had 1\.0"):
            trainer.step((Words(IDS, torch.ones(2, 8), 2.0), TARGETS))
        with pytest.raises(
            InputError, match=r"the batch has ids\[0\], ids\[1\], targets; the first one had ids\.ids, ids\.places"
        ):
            trainer.step(([IDS, torch.ones(2, 8)], TARGETS))
        trainer.step((Words(IDS, torch.ones(2, 8)), TARGETS))


def test_leaves_that_are_no_tensors_are_refused() -> None:
    """What a class that is not registered holds would neither be moved nor cut."""

    class Unknown:
        """Has ids."""

    message = r"words\[1\] is a Unknown: give a tensor, or register the class with torch\.utils\._pytree"
    with pytest.raises(InputError, match=message):
        Batch.of({"words": [IDS, Unknown()], "targets": TARGETS}, OfTrees())


@pytest.mark.slow
def test_profiles_and_executors_take_named_arguments() -> None:
    """Measuring and executing a schedule give what they give for pairs."""
    node, losses = load_hardware("a100-40gb-epyc7713"), []
    for given in ([(ids, t) for ids, t in batches()], [{"ids": ids, "targets": t} for ids, t in batches()]):
        profile = measured_profile_on(node, Named(), given[0])
        plan = as_executed(parse_policy("resident:checkpointing=full").plan(profile, judge_for(profile)), profile)
        executor = TorchExecutor(Named(), iter(given))
        torch.manual_seed(2)
        executor.run(lower(profile, plan), 3)
        losses.append(executor.result.losses)
    assert losses[0] == losses[1]


REFUSED = [
    ((IDS, TARGETS, IDS), "the batch is a tuple of 3: give (ids, targets)"),
    ((IDS,), "the batch is a tuple of 1: give (ids, targets)"),
    (IDS, "the batch is (2, 8) of torch.int64: give (ids, targets)"),
    (None, "the batch is None: give (ids, targets)"),
    ("text", "the batch is 'text': give (ids, targets)"),
    ((IDS[0], TARGETS[0]), "the ids are (8,) of torch.int64: give (batch, sequence), such as ids.unsqueeze(0)"),
    ((IDS[:0], TARGETS[:0]), "ids (0, 8) of torch.int64 is empty"),
    ((IDS.tolist(), TARGETS), "ids is a list: give a tensor, such as torch.as_tensor(ids)"),
    ((IDS, TARGETS.numpy()), "targets is a ndarray: give a tensor, such as torch.as_tensor(targets)"),
    (
        (IDS, TARGETS[:, 1:]),
        "the targets are (2, 7) of torch.int64, the inputs (2, 8) of torch.int64: give one target per position",
    ),
    ((IDS.float(), TARGETS), "fails on the first batch (ids (2, 8) of torch.float32)"),
    ((IDS + VOCABULARY, TARGETS), f"the model accepts 0 to {VOCABULARY - 1}"),
    ((-1 - IDS, TARGETS), f"the model accepts 0 to {VOCABULARY - 1}"),
    ((IDS, TARGETS + VOCABULARY), "targets has values from"),
    ((IDS, TARGETS.float()), "the targets are (2, 8) of torch.float32: give whole numbers"),
    ({"ids": IDS}, "the batch has ids: give targets (aligned with the logits) or labels (shifted here), and one of them"),
    ({"ids": IDS, "targets": TARGETS, "labels": IDS}, "and not both"),
    ({}, "the batch has nothing: give targets"),
    ({"targets": TARGETS}, "the batch has no inputs, no token ids among them"),
    (
        {"ids": IDS, "targets": TARGETS, "mask": IDS},
        "unknown argument of the forward of Named 'mask': choose one of ids, places",
    ),
    ({"ids": IDS, "targets": TARGETS, 3: IDS}, "the batch has the key 3: give (ids, targets)"),
    ({"ids": IDS, "targets": TARGETS, "use_cache": True}, "use_cache=True is not supported in training: keys and values"),
    ({"ids": IDS, "targets": TARGETS, "places": [1]}, "places is a list: give a tensor"),
]


@pytest.mark.parametrize(("batch", "message"), REFUSED)
def test_what_is_no_batch_is_refused(batch: object, message: str) -> None:
    """With what is wrong and what to give, before the model is taken over."""
    model = Named()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Trainer(model, hardware=load_hardware("a100-40gb-epyc7713")) as trainer:
        for attempt in (trainer.prepare, trainer.step):
            with pytest.raises(InputError) as caught:
                attempt(batch)
            assert message in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.fixture(scope="module")
def trained() -> Iterator[Trainer]:
    """A trainer after a first step."""
    with Trainer(Named(), hardware=load_hardware("a100-40gb-epyc7713")) as trainer:
        trainer.step({"ids": IDS, "targets": TARGETS, "places": torch.ones(2, 8)})
        yield trainer


LATER = [
    *((batch, message) for batch, message in REFUSED if isinstance(batch, dict)),
    ({"ids": IDS, "targets": TARGETS}, "the batch has ids, targets; the first one had ids, places, targets: give the same"),
    ({"ids": IDS, "targets": TARGETS, "places": torch.ones(2, 1)}, "the batch has places (2, 1) of torch.float32, the first"),
    ({"ids": IDS[:1], "targets": TARGETS[:1], "places": torch.ones(2, 8)}, "the batch has places (2, 8) of torch.float32"),
    ({"ids": IDS + VOCABULARY, "targets": TARGETS, "places": torch.ones(2, 8)}, "ids has values from"),
    ({"ids": IDS, "targets": TARGETS - 99, "places": torch.ones(2, 8)}, "targets has values from"),
    ({"ids": IDS, "targets": TARGETS, "places": None}, "the batch has places None, the first one had (2, 8) of torch.float32"),
]


@pytest.mark.parametrize(("batch", "message"), LATER)
def test_later_batches_are_like_the_first(batch: object, message: str, trained: Trainer) -> None:
    """What differs is refused without an effect on the training, which goes on."""
    before = trained.parameters()
    with pytest.raises(InputError) as caught:
        trained.step(batch)
    assert message in str(caught.value)
    assert all(map(torch.equal, before, trained.parameters()))


def test_a_refused_batch_does_not_end_a_training(trained: Trainer) -> None:
    """The next right one trains."""
    before = trained.parameters()
    trained.step({"ids": IDS, "targets": TARGETS, "places": torch.zeros(2, 8)})
    assert not all(map(torch.equal, before, trained.parameters()))


def test_labels_become_targets_that_are_shifted_to_the_left() -> None:
    """The last place has none; without a model's word, labels are those of a causal language model."""
    batch = Batch.of({"ids": IDS, "labels": IDS}, Named())
    assert torch.equal(batch.targets[:, :-1], IDS[:, 1:])
    assert (batch.targets[:, -1] == -100).all()
    assert Batch.of(batch, Named()) is batch
