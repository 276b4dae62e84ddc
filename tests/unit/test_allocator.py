"""PyTorch's caching allocator: its documented rules, on sequences made by hand."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from autohete.analysis.allocator import CachingAllocator, Piece, reserve
from autohete.interface import simulate_training
from autohete.lowering import lower
from autohete.profile import analytic_profile
from autohete.schedule import Kind, Value, is_gpu
from autohete.simulate.samples import tensors_of_length
from autohete.simulate.tensors import TensorSizes
from autohete.workload import Kernels, Precision, Workload
from autohete.workload.optimizers import Optimizer
from autohete.workload.training import FULL

KIB, MIB = 1 << 10, 1 << 20
SMALL = Workload("small", 512, 4, 8, sequence_length=256, batch_size=2, kernels=Kernels.EAGER_FLASH)


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ([1], 2 * MIB),  # small ones share 2 MiB
        ([MIB, MIB], 2 * MIB),
        ([MIB, MIB, 512], 4 * MIB),
        ([512 * KIB + 1, 512 * KIB - 512, MIB], 2 * MIB),  # 512 KiB + 512 B, 512 KiB - 512 B and 1 MiB
        ([MIB + 1], 20 * MIB),  # from 1 to 10 MiB share 20 MiB
        ([9 * MIB, 9 * MIB], 20 * MIB),
        ([9 * MIB, 9 * MIB, 2 * MIB], 20 * MIB),
        ([9 * MIB, 10 * MIB], 20 * MIB),  # which what is left of a shared segment serves, too
        ([9 * MIB, 12 * MIB], 32 * MIB),
        ([10 * MIB], 10 * MIB),  # from 10 MiB a segment each, in steps of 2 MiB
        ([11 * MIB], 12 * MIB),
        ([11 * MIB, MIB], 14 * MIB),  # 1 MiB left over in the large pool is not split off
    ],
)
def test_segments_have_the_sizes_that_pytorch_requests(sizes: list[int], reserved: int) -> None:
    """Allocations take segments of 2 MiB, of 20 MiB, or of their own size in steps of 2 MiB, and share them in their pool."""
    allocator = CachingAllocator()
    for size in sizes:
        allocator.allocate(size)
    assert allocator.reserved_bytes == reserved


def test_the_smallest_block_that_is_large_enough_is_used_and_split() -> None:
    """A request takes the smallest free block that holds it; what is left over of that serves the next one."""
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 24, 32)]
    for block in blocks:
        allocator.free(block)
    used = allocator.allocate(22 * MIB)
    assert used.address == 40 * MIB
    assert used.size_bytes == 22 * MIB  # 2 MiB of 24 are split off
    assert allocator.allocate(2 * MIB).address == 62 * MIB
    assert allocator.allocate(31 * MIB).size_bytes == 32 * MIB  # 1 MiB is not
    assert allocator.reserved_bytes == 96 * MIB


def test_what_lies_between_used_blocks_is_not_joined() -> None:
    """Holes of 8 MiB between blocks in use do not hold 9 MiB: reserved memory grows though enough is free."""
    allocator = CachingAllocator()
    big = allocator.allocate(40 * MIB)
    allocator.free(big)
    blocks = [allocator.allocate(8 * MIB) for _ in range(5)]
    assert allocator.reserved_bytes == 40 * MIB
    for block in blocks[::2]:
        allocator.free(block)
    allocator.allocate(9 * MIB)
    assert allocator.reserved_bytes == 60 * MIB
    for block in blocks[1::2]:
        allocator.free(block)
    assert allocator.allocate(40 * MIB).address == big.address  # neighbours are joined again


def test_each_stream_has_a_pool_of_its_own() -> None:
    """What one stream has freed does not serve another one."""
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(64 * MIB, "gpu"))
    allocator.allocate(64 * MIB, "h2d")
    assert allocator.reserved_bytes == 128 * MIB


def test_a_full_gpu_gives_back_what_is_wholly_free() -> None:
    """At the limit, free segments are given back before the next one is taken, but none that is partly in use."""
    allocator = CachingAllocator(100 * MIB)
    whole, partly = allocator.allocate(40 * MIB), [allocator.allocate(8 * MIB), allocator.allocate(8 * MIB)]
    allocator.free(whole)
    allocator.free(partly[0])
    assert allocator.reserved_bytes == 60 * MIB
    allocator.allocate(50 * MIB)
    assert (allocator.reserved_bytes, allocator.peak_bytes, allocator.retries) == (70 * MIB, 70 * MIB, 1)


class Plain:
    """The same rules, searched anew each time: segments are lists of [bytes, whether in use]."""

    def __init__(self, *, expandable: bool) -> None:
        self.expandable = expandable
        self.segments: list[tuple[tuple[str, bool], list[list[int]]]] = []

    def allocate(self, size: int, stream: str) -> list[int]:
        size = max(size + -size % 512, 512)
        pool = stream, size <= MIB
        fitting = [
            (self.expandable and place + 1 == len(pieces), piece[0], at, place)
            for at, (owner, pieces) in enumerate(self.segments)
            for place, piece in enumerate(pieces)
            if owner == pool and not piece[1] and piece[0] >= size
        ]
        if fitting:
            *_, at, place = min(fitting)
        elif self.expandable:
            at, place = self.grown(pool, size)
        else:
            taken = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else size + -size % (2 * MIB)
            self.segments.append((pool, [[taken, 0]]))
            at, place = len(self.segments) - 1, 0
        pieces = self.segments[at][1]
        piece = pieces[place]
        left = piece[0] - size
        if left >= 512 if pool[1] or self.expandable else left > MIB:
            pieces.insert(place + 1, [left, 0])
            piece[0] = size
        piece[1] = 1
        return piece

    def grown(self, pool: tuple[str, bool], size: int) -> tuple[int, int]:
        owners = [owner for owner, _ in self.segments]
        if pool not in owners:
            self.segments.append((pool, []))
            owners.append(pool)
        pieces = self.segments[owners.index(pool)][1]
        if not pieces or pieces[-1][1]:
            pieces.append([0, 0])
        step = 2 * MIB if pool[1] else 20 * MIB
        pieces[-1][0] += size - pieces[-1][0] + (pieces[-1][0] - size) % step
        return owners.index(pool), len(pieces) - 1

    def free(self, piece: list[int]) -> None:
        piece[1] = 0
        pieces = next(pieces for _, pieces in self.segments if any(one is piece for one in pieces))
        joined: list[list[int]] = []
        for one in pieces:
            if joined and not one[1] and not joined[-1][1]:
                joined[-1] = [joined[-1][0] + one[0], 0]
            else:
                joined.append(one)
        pieces[:] = joined

    @property
    def reserved_bytes(self) -> int:
        return sum(piece[0] for _, pieces in self.segments for piece in pieces)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_it_reserves_what_a_plain_search_does(seed: int, expandable: bool) -> None:
    """After any allocations and frees it reserves as much as an allocator that looks at all pieces, at least what is in use;
    and doing the same again from the end reserves nothing more.
    """
    dice, allocator, plain = Random(seed), CachingAllocator(expandable=expandable), Plain(expandable=expandable)
    held: list[tuple[Piece, list[int], int]] = []
    for _ in range(300):
        if held and dice.random() < 0.45:
            block, piece, _ = held.pop(dice.randrange(len(held)))
            allocator.free(block)
            plain.free(piece)
        else:
            size, stream = round(2 ** dice.uniform(0, 26)), dice.choice("ab")
            held.append((allocator.allocate(size, stream), plain.allocate(size, stream), size))
        assert allocator.reserved_bytes == plain.reserved_bytes >= sum(size for *_, size in held)
    for block, _, _ in held:
        allocator.free(block)
    allocator.release()
    assert allocator.reserved_bytes == 0


def test_expandable_segments_grow_at_their_end() -> None:
    """By 20 MiB, so that blocks which were too small hold a larger one together."""
    allocator = CachingAllocator(expandable=True)
    for block in [allocator.allocate(size * MIB) for size in (15, 15, 30)]:
        allocator.free(block)
    assert allocator.reserved_bytes == 60 * MIB
    for size, reserved in ((60, 60), (61, 80), (100, 100)):
        allocator.free(allocator.allocate(size * MIB))
        assert allocator.reserved_bytes == reserved * MIB
    assert allocator.allocate(1) is not None
    assert allocator.reserved_bytes == 102 * MIB


def test_a_full_gpu_gives_back_free_steps() -> None:
    """An expandable segment returns whole steps of 20 MiB between blocks in use, so that its end can grow."""
    allocator = CachingAllocator(100 * MIB, expandable=True)
    held = [allocator.allocate(size * MIB) for size in (20, 40, 30)]
    allocator.free(held[1])
    assert allocator.reserved_bytes == 100 * MIB
    allocator.allocate(50 * MIB)  # at the end, 10 MiB of which are there
    assert (allocator.reserved_bytes, allocator.peak_bytes, allocator.retries) == (100 * MIB, 100 * MIB, 1)


def test_what_is_freed_serves_the_same_sizes_again() -> None:
    """Freeing everything and allocating the same again, largest first, reserves nothing more."""
    allocator, sizes = CachingAllocator(), [30 * MIB, 12 * MIB, 7 * MIB, 3 * MIB, 700 * KIB, 512]
    for _ in range(3):
        blocks = [allocator.allocate(size) for size in sizes]
        before = allocator.reserved_bytes
        for block in blocks:
            allocator.free(block)
    assert allocator.reserved_bytes == before == allocator.peak_bytes


def test_buffers_are_split_into_tensors_that_add_up() -> None:
    """The tensors of each buffer add up to it, the loss's temporaries to them and the gradient that is made of them; there are
    several of those of a block.
    """
    found = simulate_training(SMALL, "h100-pcie5", "resident")
    split = TensorSizes(found.profile)
    for buffer in (*found.schedule.resident, *(one for task in found.schedule.tasks for one in task.allocates)):
        pieces = split(buffer)
        made = found.profile.loss.gradient_bytes if buffer.id.use is Kind.LOSS else 0
        assert sum(pieces) == buffer.size_bytes + made
        assert all(piece > 0 for piece in pieces)
        if buffer.id.unit == 1 and str(buffer.id.value) in ("parameters", "optimizer_states", "activations", "gradients"):
            assert len(pieces) > 3


@pytest.mark.parametrize(
    ("optimizer", "precision", "tensors", "masters"),
    [
        (Optimizer.ADAMW, Precision.BF16, 3, 1),
        (Optimizer.ADAMW, Precision.FP32, 2, 0),
        (Optimizer.ADAMW_PURE_BF16, Precision.BF16, 2, 0),
        (Optimizer.SGD_MOMENTUM, Precision.BF16, 2, 1),
    ],
)
def test_the_first_update_makes_the_moments(optimizer: Optimizer, precision: Precision, tensors: int, masters: int) -> None:
    """Each parameter has so many tensors of states. If the GPU updates, all but the masters are made by the first update."""
    workload = replace(SMALL, precision=precision, training=replace(FULL, optimizer=optimizer))
    found = simulate_training(workload, "h100-pcie5", "resident")
    early, late = TensorSizes(found.profile), TensorSizes(found.profile, first_step_makes_moments=True)
    parameters = len(found.profile.of_rank.tensors(1, trained=True))
    (states,) = (one for one in found.schedule.resident if one.id.value is Value.OPTIMIZER_STATES and one.id.unit == 1)
    assert len(late(states)) == tensors * parameters
    assert (early.made_later(states), late.made_later(states)) == (0, (tensors - masters) * parameters)
    assert found.plan.updates_where_it_computes
    assert not simulate_training(SMALL, "h100-pcie5", "zero_offload").plan.updates_where_it_computes


@pytest.mark.parametrize("policy", ["resident", "zero_offload", "autohete", "sqrt_checkpoint"])
def test_a_simulation_reserves_at_least_what_is_allocated(policy: str) -> None:
    """Reserved bytes are whole segments and at least the peak of allocated ones; only of a GPU something is reserved."""
    found = simulate_training(SMALL, "h100-pcie5", policy)
    assert found.gpu.reserved_bytes >= found.gpu.peak_bytes
    assert found.gpu.reserved_bytes % (2 * MIB) == 0
    assert found.host.reserved_bytes == found.host.peak_bytes
    assert reserve(found.trace, "gpu").peak_bytes >= found.gpu.peak_bytes


def test_samples_of_different_lengths_reserve_more() -> None:
    """With a sample of each length before the longest, blocks are too small for it; with whole sequences none are."""
    whole = replace(SMALL, kernels=Kernels.EAGER)
    same, varied = (
        simulate_training(one, "h100-pcie5", "resident").gpu
        for one in (replace(whole, sample_lengths=(256, 256)), replace(whole, sample_lengths=(16, 256)))
    )
    assert same.reserved_bytes == simulate_training(whole, "h100-pcie5", "resident").gpu.reserved_bytes
    assert varied.peak_bytes == same.peak_bytes
    assert varied.reserved_bytes > 1.3 * same.reserved_bytes
    expandable = simulate_training(
        replace(whole, sample_lengths=(16, 256), expandable_segments=True), "h100-pcie5", "resident"
    ).gpu
    assert expandable.reserved_bytes == varied.expanded_bytes < 1.1 * expandable.peak_bytes  # 1.09 on an H100


@pytest.mark.parametrize("policy", ["resident", "zero_offload", "joint", "pipeline"])
@pytest.mark.parametrize("changes", [{}, {"micro_batches": 3}, {"chunked_loss": True, "loss_chunks": 400}])
def test_shorter_batches_have_what_their_own_schedule_allocates(policy: str, changes: dict[str, Any]) -> None:
    """The tensors of a shorter batch are those of the same plan for it, but parameters and states stay as they are."""
    workload = replace(SMALL, sample_lengths=(64, 256), **changes)
    gpus = 2 if policy == "pipeline" else 1
    found = simulate_training(workload, "a100-40gb-epyc7713", policy, gpus=gpus)
    chunks = changes.get("loss_chunks") and 128  # no more than there are tokens
    shorter = replace(workload, sequence_length=64, sample_lengths=None, loss_chunks=chunks)
    profile = analytic_profile(shorter, found.profile.hardware)
    expected = {one.id: one for task in lower(profile, found.plan).tasks for one in task.allocates}
    split, own, tensors = tensors_of_length(found.profile, found.plan, 64), TensorSizes(found.profile), TensorSizes(profile)
    buffers = [one for task in found.schedule.tasks for one in task.allocates if is_gpu(one.memory)]
    assert len(buffers) > 10
    for buffer in buffers:
        fixed = buffer.id.value in (Value.PARAMETERS, Value.GRADIENTS, Value.OPTIMIZER_STATES)
        assert split(buffer) == (own(buffer) if fixed else tensors(expected[buffer.id]))
