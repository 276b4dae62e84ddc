"""Several ranks give the bits of one process, whatever they shard; and end together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.ranks import results, train_in_one, train_several
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
