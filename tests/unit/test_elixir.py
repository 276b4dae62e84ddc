"""Elixir: how it packs parameters in chunks, which of them it keeps on the GPU, and what that makes of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import pytest
from support.paper import PLENTY, profile_with

from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.lowering import lower
from autohete.plan import Activations, Format, Plan, Processor
from autohete.plan.policy import Judgement, Verdict
from autohete.policies import parse_policy
from autohete.policies.elixir import ChunkPlacement, cache_comes_first, fetches, packed, placement
from autohete.policies.host_arrays import tensors_by_unit
from autohete.profile import Profile, analytic_profile
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, Kind
from autohete.simulate import judge_for
from autohete.workload import Kernels, Precision, named_workload

NODE = load_hardware("a100-40gb-epyc7713")
FP16 = replace(named_workload("gpt-4b", precision=Precision.FP16, kernels=Kernels.EAGER), tied_embeddings=False)


def profile_of(gib: int, gpus: int = 1) -> Profile:
    return analytic_profile(FP16, replace(NODE, gpu=replace(NODE.gpu, memory_bytes=gib * 2**30)).shared_by(gpus))


def placed(profile: Profile) -> ChunkPlacement:
    return placement(profile, Activations.RECOMPUTE, judge_for(profile))


@pytest.mark.parametrize(
    ("by_unit", "chunks"),
    [
        ([[3], [2, 2], [4]], [{0}, {1}, {2}]),
        ([[1], [2, 2], [1, 2]], [{0}, {0, 1}, {1, 2}]),
        ([[], [4], [1]], [set(), {0}, {1}]),
    ],
)
def test_a_tensor_that_does_not_fit_begins_a_chunk(by_unit: list[list[int]], chunks: list[set[int]]) -> None:
    """Chunks of 4 elements are filled in the order of use, and no tensor is divided."""
    assert packed(by_unit, 4) == tuple(map(frozenset, chunks))


@pytest.mark.parametrize(
    ("steps", "blocks", "count", "again"),
    [
        (([0, 1, 2], [2, 1, 0]), 3, 3, set()),
        (([0, 1, 2], [2, 1, 0]), 2, 4, {0}),  # 0 makes room for 2, as 1 is needed first
        (([0, 1, 2], [2, 1, 0]), 1, 5, {0, 1}),
        (([0, 1, 2], [2, 1, 2, 0]), 2, 4, {0}),  # recomputed and trained: what backward has begun with is needed again
        (([0], [0]), 1, 1, set()),
    ],
)
def test_the_chunk_needed_last_makes_room(
    steps: tuple[Sequence[int], Sequence[int]], blocks: int, count: int, again: set[int]
) -> None:
    """Fetches are as few as can be with so many blocks, and backward fetches the chunks whose blocks forward took."""
    assert fetches(steps, blocks) == (count, frozenset(again))


def test_the_cache_comes_first_on_one_gpu_only() -> None:
    """By hand, s per G elements of 2 bytes: a block saves 0.190 on one GPU and 0.107 on two, shards 0.091 and 0.118."""
    assert [cache_comes_first(gpus, 7, 2) for gpus in (1, 2, 4, 8)] == [True, False, False, False]
    assert [cache_comes_first(gpus, 4, 4) for gpus in (1, 2, 4, 8)] == [True, False, False, False]


@pytest.mark.parametrize(("gib", "gpus"), [(16, 1), (24, 1), (40, 1), (16, 2), (24, 4), (40, 2)])
def test_the_capacity_is_filled_but_never_exceeded(gib: int, gpus: int) -> None:
    """In 0.95 of what 2 GiB and 1.25 times the activations leave there is room for a buffer, for blocks of 2 bytes an element
    and for shards of 14, but not for another of what comes last.
    """
    profile, activations = profile_of(gib, gpus), 3 * 2**30
    peak = activations + sum(profile.parameter_bytes(unit) for unit in range(len(profile.units)))

    def judge(plan: Plan) -> Judgement:
        return Judgement(Verdict.OK, 1.0, {GPU_MEMORY: peak})

    chosen, largest = placement(profile, Activations.RECOMPUTE, judge), max(chain.from_iterable(tensors_by_unit(profile)))
    block, shard = 2 * chosen.chunk_elements, 14 * chosen.chunk_elements // gpus
    used = 2 * largest + chosen.blocks * block + chosen.on_gpu * shard
    more = shard if chosen.on_gpu < chosen.chunks else block
    assert used <= 0.95 * ((gib - 2) * 2**30 - 1.25 * activations)
    assert chosen.blocks == chosen.chunks == chosen.on_gpu or used + more > 0.95 * ((gib - 2) * 2**30 - 1.25 * activations)


@pytest.mark.parametrize("gib", [12, 16, 24, 40])
def test_the_last_units_stay_and_the_first_have_their_states_on_the_gpu(gib: int) -> None:
    """From some unit on all stay from forward to backward, and up to some unit the GPU updates. What is copied twice was copied
    home in between, in 4 bytes for forward and 2 for backward, 3 on average.
    """
    profile = profile_of(gib)
    plan = parse_policy("elixir:checkpointing=full").plan(profile, judge_for(profile))
    on_gpu = [unit.update.on is Processor.GPU for unit in plan.units]
    assert on_gpu == sorted(on_gpu, reverse=True)
    leaving = [unit.parameters for unit in plan.units if unit.parameters.home == HOST_MEMORY]
    assert len(leaving) == on_gpu.count(False)
    stays = [route.stays_after_forward for route in leaving]
    assert stays == sorted(stays)
    assert [(route.carried, route.moves) for route in leaving] == [(Format(4 if it else 3), not it) for it in stays]
    counts = {kind: sum(task.id.kind is kind for task in lower(profile, plan).tasks) for kind in Kind}
    assert counts[Kind.PREFETCH_FORWARD] == len(leaving)
    assert counts[Kind.PREFETCH_BACKWARD] == counts[Kind.WRITE_BACK_FORWARD] == stays.count(False)


def test_more_memory_keeps_more() -> None:
    """With more memory fewer chunks are fetched twice, then more have their states on the GPU."""
    found = [placed(profile_of(gib)) for gib in (12, 16, 20, 24, 32, 40, 100)]
    stays = [len(one.stays) / one.chunks for one in found]
    assert stays == sorted(stays)
    assert stays[0] < stays[-1] == 1
    shares = [one.on_gpu / one.chunks for one in found]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)


def test_gradients_that_take_the_place_of_parameters_do_not_accumulate() -> None:
    """Several micro-batches are refused."""
    profile = profile_with(PLENTY, 2)
    with pytest.raises(InputError, match=r"elixir cannot accumulate gradients: .*one micro-batch"):
        parse_policy("elixir").plan(profile, judge_for(profile))
