"""Several ranks give the bits of one process, whatever they shard; and end together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import (
    differing_rank,
    ending_rank,
    on_ranks,
    results,
    resumed_rank,
    train_in_one,
    train_several,
    trainer_in_one,
    trainer_rank,
)
from support.small import CLIP_NORM, SMALL, STEPS

from autohete.workload import Precision, Workload

#: By policy: whether gradients of a micro-batch are reduced at once.
POLICIES = {
    "resident": False,
    "resident:zero_stage=1": False,
    "resident:zero_stage=2": True,
    "resident:zero_stage=3": True,
    "resident:in_backward,zero_stage=2": True,
    "zero_offload": True,
    "zero_offload:paper": True,
    "twin_flow:ratio=50": True,
    "zero3_offload": True,
    "fsdp2_offload": True,
}
SHALLOW = replace(SMALL, transformer_blocks=2)


def compare(ranks: int, several: list[tuple[Workload, str]]) -> None:
    """All ranks have, under each policy, losses and parameters of one process that adds the ranks' gradients in order."""
    by_rank: list[list[Any]] = results(train_several, ranks, ranks, STEPS, several)
    for place, (workload, policy) in enumerate(several):
        expected = train_in_one(workload, STEPS, ranks, at_once=POLICIES[policy])
        found = [of_rank[place] for of_rank in by_rank]
        assert found == expected, f"{policy}, {workload}"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_bits_of_one_process(ranks: int) -> None:
    """Losses and parameters are those of one process that adds the gradients of all ranks in their order."""
    compare(ranks, [(SHALLOW, policy) for policy in POLICIES])


@pytest.mark.slow
def test_clipping_and_micro_batches_have_the_bits_of_one_process() -> None:
    """The norm is that of the whole gradients, in 16 bit, too, and micro-batches are accumulated."""
    clipped = replace(SHALLOW, clip_norm=CLIP_NORM, precision=Precision.BF16)
    compare(2, [(replace(clipped, tied_embeddings=i % 2 == 0), policy) for i, policy in enumerate(POLICIES)])
    several = replace(SHALLOW, clip_norm=CLIP_NORM, micro_batches=2)
    compare(3, [(several, policy) for policy in POLICIES if "in_backward" not in policy])


def same(one: Any, other: Any) -> bool:
    """Whether nested values are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.slow
def test_a_trainer_on_ranks_is_one_with_micro_batches(tmp_path: Path) -> None:
    """Weights, optimizer states and the model that is given back are those of one process with the ranks' batches as
    micro-batches; and a state that two ranks have saved loads in one process and in four."""
    policies = ["resident", "zero_offload", "autohete", "resident:zero_stage=3"]
    expected = trainer_in_one(2)
    for of_rank in results(trainer_rank, 2, 2, policies, str(tmp_path)):
        for policy, found in zip(policies, of_rank, strict=True):
            assert same(found, expected), policy
    assert same(resumed_rank(0, "zero_offload", str(tmp_path)), expected["state"])
    for resumed in results(resumed_rank, 4, "resident:zero_stage=3", str(tmp_path)):
        assert same(resumed, expected["state"])


@pytest.mark.slow
@pytest.mark.parametrize(("how", "policy", "which"), [("killed", "zero_offload", 0), ("killed", "resident:zero_stage=3", 2)])
def test_a_killed_rank_ends_all(how: str, policy: str, which: int) -> None:
    """Within seconds every other rank has an error with its name."""
    for rank, ended in enumerate(on_ranks(ending_rank, 3, 3, policy, how, which)):
        if rank == which:
            assert (ended.error, ended.code) == ("killed", -9)
            continue
        assert not ended.error
        seconds, text = ended.result
        assert f"rank {which} has failed: its process has ended (the last that it came to was" in text
        assert seconds < 20


@pytest.mark.slow
def test_a_rank_that_raises_ends_all() -> None:
    """The other ranks name it, its task and its error."""
    (_, first), (seconds, second) = results(ending_rank, 2, 2, "resident:zero_stage=2", "raises", 0)
    assert "ValueError: boom" in first
    assert "rank 0 has failed: L3@" in second
    assert "ValueError: boom" in second
    assert seconds < 20


DIFFERENCES = {
    "seed": "the model: blocks.0",
    "policy": "the training: policy of rank 1 is NamedPolicy(name='resident:zero_stage=1'",
    "lr": "the optimizer's settings of rank 1 differ from those of rank 0: 'lr 0.5', not 'lr 0.001'",
    "weights": "changes of parameters of rank 1 differ from those of rank 0",
    "calls": "rank 1 has failed: it is at 'the state of the training', but rank 0 at 'step 1'",
}


@pytest.mark.slow
def test_ranks_that_differ_are_refused() -> None:
    """Both ranks name what differs, rather than to train apart or to wait for each other."""
    for errors in results(differing_rank, 2, list(DIFFERENCES)):
        for error, expected in zip(errors, DIFFERENCES.values(), strict=True):
            assert expected in error
