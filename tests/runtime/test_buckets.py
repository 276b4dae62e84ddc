"""Batches of several lengths train by plans of their own, to the bit, and a change of the plan moves no state."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.measured import MEDIUM
from support.reference import lanes_alive, model_for
from torch import Tensor

from autohete import Trainer
from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.plan import Activations
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.runtime.batch import Batch, Form
from autohete.runtime.losses import next_token_loss
from autohete.runtime.update_rules import default_optimizer
from autohete.simulate import Simulation, simulate_plan, simulate_safely, with_memory
from autohete.train.as_executed import as_executed, everything_resident
from autohete.train.buckets import keeping_more
from autohete.workload import Workload

LENGTHS = (8, 16, 32)
WORKLOAD = Workload("long", 256, 6, 4, vocabulary_size=512, sequence_length=1024, batch_size=4)
NODE = load_hardware("a100-40gb-epyc7713", {"links.h2d.bandwidth": "1GB/s", "links.d2h.bandwidth": "1GB/s"})


@pytest.mark.parametrize(
    "policy",
    ["resident:checkpointing=full", "sqrt_checkpoint", "stronghold", "rotor", "autohete", "offload_activations"],
)
def test_shorter_batches_keep_more(policy: str) -> None:
    """A plan for a quarter of the length recomputes and moves no more activations than that for the longest, is as safe, and
    is no slower than the same plan; all else is as it was.
    """
    profile = analytic_profile(WORKLOAD, NODE)
    budget = round(0.7 * simulate_plan(profile, everything_resident(profile)).gpu.peak_bytes)
    largest = simulate_safely(with_memory(profile, "gpu", budget), parse_policy(policy), as_executed)
    short = analytic_profile(replace(WORKLOAD, sequence_length=256), NODE)
    found = keeping_more(largest, short)
    assert found.gpu.capacity_bytes == budget
    assert found.gpu.fits
    assert found.iteration_seconds <= simulate_plan(found.profile, largest.plan).iteration_seconds
    kept = [unit.activations is Activations.KEEP and not unit.kept.leaves for unit in found.plan.units]
    before = [unit.activations is Activations.KEEP and not unit.kept.leaves for unit in largest.plan.units]
    assert sum(kept) > sum(before)
    for unit, was in zip(found.plan.units, largest.plan.units, strict=True):
        changed = replace(unit, activations=was.activations, again=was.again, kept=was.kept, saved=was.saved)
        assert changed == was


def data(lengths: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and targets of these lengths."""
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randint(0, MEDIUM.vocabulary_size, (2, length), generator=generator) for _ in range(2))  # type: ignore[misc]
        for length in lengths
    ]


def plainly(lengths: list[int]) -> tuple[list[float], list[Tensor]]:
    """Losses and parameters of plain training."""
    model, losses = model_for(MEDIUM), []
    optimizer = default_optimizer(model.parameters())
    torch.manual_seed(2)
    for ids, targets in data(lengths):
        optimizer.zero_grad()
        loss = next_token_loss(model(ids), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        optimizer.step()
    return losses, list(model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "budget"),
    [("resident:checkpointing=full", "90%"), ("stronghold:window=1,checkpointing=full", "70%"), ("autohete", "60%")],
)
def test_any_order_of_lengths_trains_to_the_bit(policy: str, budget: str) -> None:
    """Each batch trains by the plan of the shortest bucket that it fits into. Between them nothing is handed over: the states
    of all units stay the same tensors. Losses and parameters are those of plain training.
    """
    lengths = [*LENGTHS, 5, 9, *LENGTHS, 16]
    random.Random(0).shuffle(lengths)
    model = model_for(MEDIUM)
    with Trainer(model, policy=policy, gpu_memory=budget, hardware=NODE, buckets=LENGTHS[:2]) as trainer:
        longest = trainer.prepare(data([32])[0])
        units = trainer._held.running().session.training.states.units
        torch.manual_seed(2)
        losses, plans = [], dict[int, Simulation]()
        for length, batch in zip(lengths, data(lengths), strict=True):
            losses.append(trainer.step(batch))
            assert trainer.prediction is not None
            bucket = next(one for one in LENGTHS if one >= length)
            assert plans.setdefault(bucket, trainer.prediction) is trainer.prediction
            assert (trainer.prediction is longest) is (bucket == 32)
            assert trainer._held.running().session.training.states.units is units
            assert trainer.comparison().measured_peak_bytes <= longest.gpu.capacity_bytes
        parameters = trainer.parameters()
    assert plans[8].plan.checkpointed_units <= longest.plan.checkpointed_units
    if policy != "autohete":
        assert plans[8].plan.checkpointed_units == 0
    expected_losses, expected = plainly(lengths)
    assert losses == expected_losses
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
    assert not lanes_alive()


def test_the_beginning_of_a_batch_has_all_that_belongs_to_its_positions() -> None:
    """Tensors are cut where they have an entry for each position, masks of pairs of them twice, and others not at all."""
    inputs = {
        "input_ids": torch.arange(12).view(2, 6),
        "attention_mask": torch.ones(2, 1, 6, 6),
        "position_ids": torch.arange(6),
        "scale": torch.ones(2),
        "flag": True,
    }
    batch = Batch(inputs, torch.arange(12).view(2, 6), None, {"weights": torch.ones(2, 6)}, 12)
    found = batch.shorter(4)
    assert isinstance(found.inputs, dict)
    shapes = {name: tuple(value.shape) for name, value in found.tensors.items() if isinstance(value, Tensor)}
    assert shapes == {
        "input_ids": (2, 4),
        "attention_mask": (2, 1, 4, 4),
        "position_ids": (4,),
        "scale": (2,),
        "targets": (2, 4),
        "weights": (2, 4),
    }
    assert found.inputs["input_ids"].tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert found.inputs["flag"] is True


def test_a_batch_must_fit_into_a_bucket_with_all_that_it_has() -> None:
    """A short sequence beside a long one, such as that of a decoder, takes the plan of the bucket that has room for both."""

    def batch(length: int, other: int) -> Batch:
        return Batch({"ids": torch.zeros(2, length), "decoder_ids": torch.zeros(2, other)}, torch.zeros(2, other))

    whole = batch(32, 32)
    form = Form(whole, {}, None)
    assert form.of(whole.shorter(8)).admits(batch(5, 8))
    assert form.of(whole.shorter(8)).admits(whole.shorter(8))
    assert not form.of(whole.shorter(8)).admits(batch(5, 9))
    assert not form.of(whole.shorter(8)).admits(batch(9, 5))
    assert not form.of(whole.shorter(8)).admits(whole.shorter(9))


@pytest.mark.parametrize(
    ("buckets", "message"),
    [
        ("128", "give lengths of sequences"),
        (128, "give lengths of sequences"),
        ([0], "a length in buckets"),
        ([8, "16"], "a length in buckets"),
        ([64], "a bucket of length 64 is longer than the first batch, which has 32"),
    ],
)
def test_buckets_that_cannot_be_are_refused(buckets: object, message: str) -> None:
    """Each names what is wrong, before a step has run; the model is given back."""
    with (
        pytest.raises(InputError, match=message),
        Trainer(model_for(MEDIUM), policy="resident", hardware=NODE, buckets=buckets) as trainer,  # type: ignore[arg-type]
    ):
        trainer.prepare(data([32])[0])
    assert not lanes_alive()


def test_a_profile_is_of_one_length() -> None:
    """A profile that is given cannot be that of all buckets."""
    with pytest.raises(InputError, match="a profile is of batches of one length"):
        Trainer(model_for(MEDIUM), profile=analytic_profile(MEDIUM, NODE), buckets=[8])
