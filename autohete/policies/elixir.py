"""Elixir (Huang et al. 2022, arXiv 2212.05339) as its code runs: github hpcaitech/Elixir at e9ccbd9.

Parameters are packed in chunks of one size, in the order in which they are called. Each GPU has a shard of each chunk, on the
GPU or on the host, with the fp32 parameters and moments of it beside it. Blocks of memory on the GPU, the rCache, hold gathered
chunks.

- Before an operation its chunks are gathered, and the next chunk is prefetched on a stream of its own. If no block is free, the
  chunk goes that is needed furthest in the future (``chunk/fetcher.py``, ``chunk/scheduler/prefetch.py``). So the last chunks
  stay from forward to backward, as many as the rCache holds.
- Gradients replace the parameters of a gathered chunk. When all of a chunk are there, they are reduced, they replace the shard
  (``chunk/core/chunk.py``, ``reduce``), and the block is free. Backward waits for the reduction before the last.
- After backward each shard is updated where it is (``wrapper/optimizer.py``: ``step``; ColossalAI's HybridAdam). A chunk that
  the CPU has updated is next copied to the GPU in fp32, and leaves it in 16 bit (``replicate`` and ``scatter``).
- ``search/optimal.py``: 0.95 of what remains of the GPU after 2 GiB for the driver and 1.25 times the activations of a profile
  is for chunks and a buffer as large as the largest parameter. Chunks have the size with which an rCache that takes it all has
  to fetch least (``search/simulator.py``), from that of the largest parameter, rounded up to a power of two, to three times
  that. By rates that its authors measured (``rcache_prioirity_check``) one GPU has as many blocks as fit, and then shards.
  Several GPUs have a few blocks, then as many shards as fit, the first chunks first, and then more blocks.

Differences: units move instead of chunks: a unit is on the GPU, or stays from forward to backward, if all its chunks do. A
route has one format, so what comes in 4 bytes for forward and in 2 for backward has 3 both times. 32 sizes of chunks are tried
instead of up to 16,384. Of several GPUs, what is on the GPUs and stays is gathered after its update instead of before its next
use, and evicted chunks are not copied home; a gradient has memory of its own until it is reduced. The search stops with an
error where activations leave nothing; here the least rCache is planned. Not modelled: copies of parameters to the buffer for
each operation, and the search without offload (``minimum_waste_search``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Footprint, Format, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Judge
from autohete.plan.rules import Barrier, BlockingCopies, GpuUpdatesAfterBackward, UpdatesAfterBackward
from autohete.policies import host_arrays, traffic
from autohete.policies.checkpointing import Checkpointing, choosable, with_checkpointing
from autohete.policies.flags import combinations
from autohete.policies.several_gpus import shared
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, Kind

#: ``driver_usage``, ``activation_fragment_factor`` and ``allocation_fragment_factor``.
_DRIVER_BYTES, _ACTIVATIONS, _ALLOCATED = 2 * 2**30, 1.25, 0.95
#: ``find_search_range``: the smallest chunk.
_LEAST_CHUNK_BYTES = 32 * 2**20
#: Sizes of chunks that are tried.
_SIZES = 32
#: Blocks that prefetching needs, and the fewest of an rCache that does not come first.
_PREFETCHED, _LEAST_BLOCKS = 2, 4


@dataclass(frozen=True, slots=True)
class Elixir:
    """Elixir.

    Args:
        checkpointing: full, selective, alternate, none, or the better of full and none.
    """

    checkpointing: Checkpointing = Checkpointing.BEST

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[Elixir]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(cls, checkpointing=choosable(profile))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        if profile.workload.micro_batches > 1:
            raise InputError(
                "elixir cannot accumulate gradients: they take the place of the parameters, which the next micro-batch needs. "
                "Use one micro-batch, or another policy, such as autohete"
            )

        def plan_for(activations: Activations) -> Plan:
            return _plan(profile, activations, placement(profile, activations, judge))

        return with_checkpointing(self.checkpointing, plan_for, profile, judge)


@dataclass(frozen=True, slots=True)
class ChunkPlacement:
    """Where chunks are.

    Args:
        chunk_elements: size of a chunk.
        blocks: number of blocks of the rCache.
        on_gpu: number of chunks, from the first on, whose shards are on the GPU.
        private_on_gpu: whether that of a tied embedding is, which has a chunk and a block of its own.
        units: for each unit the chunks of its parameters.
        stays: chunks that stay from forward to backward.
    """

    chunk_elements: int
    blocks: int
    on_gpu: int
    private_on_gpu: bool
    units: tuple[frozenset[int], ...]
    stays: frozenset[int]

    def is_on_gpu(self, unit: int) -> bool:
        """Whether all shards of the unit are on the GPU; of a unit that has none, only if all of the model are."""
        return max(self.units[unit], default=self.chunks - 1) < self.on_gpu

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return 1 + max(chain.from_iterable(self.units), default=-1)


def placement(profile: Profile, activations: Activations, judge: Judge) -> ChunkPlacement:
    """What ``optimal_search`` decides."""
    gpus, element = profile.hardware.gpus, profile.element_bytes
    by_unit = list(host_arrays.tensors_by_unit(profile))
    private = 0
    if profile.workload.tied_embeddings:
        private, by_unit[0] = sum(by_unit[0]), ()
    sizes = list(chain.from_iterable(by_unit))
    largest, total = max((*sizes, private)), sum(sizes)
    room = int(_capacity(profile, activations, judge) // element) - largest - private

    least = 2 ** max(0, (max(sizes, default=1) * element - 1).bit_length()) if sizes else 1
    least = max(least, _LEAST_CHUNK_BYTES) // element
    size, blocks = (total, 1) if total <= least else _best_size(by_unit, activations, least, room)
    size += -size % gpus
    units = packed(by_unit, size)
    chunks = 1 + max(chain.from_iterable(units), default=-1)
    blocks = min(blocks, chunks)

    # In elements of the chunk: a shard has the parameter, and in fp32 the parameter and both moments.
    states = 1 + 3 * (2 if traffic.is_mixed(profile) else 1)
    first = cache_comes_first(gpus, states, element)
    if not first:
        most = max((sum(tensors) for tensors in by_unit[1:-1]), default=0) if activations is Activations.RECOMPUTE else 0
        least_blocks = max(_LEAST_BLOCKS, math.ceil(most / size) + 1 if size else 1) + _PREFETCHED
        blocks, most_blocks = min(least_blocks, blocks), blocks
    room -= blocks * size
    on_gpu = min(chunks, max(0, room) // max(1, states * size // gpus))
    room -= on_gpu * (states * size // gpus)
    private_on_gpu = room >= states * private // gpus
    if not first and size:
        room -= states * private // gpus * private_on_gpu
        blocks += min(max(0, room) // size, most_blocks - blocks)
    _, fetched = fetches(_steps(units, by_unit, size, activations), blocks)
    return ChunkPlacement(size, blocks, on_gpu, private_on_gpu, units, frozenset(range(chunks)) - fetched)


def _capacity(profile: Profile, activations: Activations, judge: Judge) -> float:
    """Bytes on the GPU for chunks."""
    units = [_on_cpu(profile, activations, Route(), unit) for unit in range(len(profile.units))]
    everything = Plan(policy="elixir", units=shared(units, 2 if profile.hardware.gpus > 1 else 0, profile))
    parameters = sum(profile.parameter_bytes(unit) for unit in range(len(units)))
    activation_bytes = judge(everything).gpu_peak_bytes - parameters
    return _ALLOCATED * (profile.hardware.gpu.memory_bytes - _DRIVER_BYTES - _ACTIVATIONS * activation_bytes)


def cache_comes_first(gpus: int, states: int, element_bytes: int) -> bool:
    """Whether the rCache comes before shards (``rcache_prioirity_check``): with the rates that it measured, a further block
    saves more than the shards in its place.

    Args:
        gpus: number of GPUs.
        states: size of a shard with its states, in elements of the chunk.
        element_bytes: size of such an element.
    """
    up, down = 16.3 * gpus + 8.7, 15.8 * gpus + 2.3  # GB/s
    block = element_bytes / up + element_bytes / down
    updates = 1 / (1.66 * math.log(gpus) + 5.15) - 1 / (50 * gpus)
    return block > gpus / states * (4 / up + block + element_bytes / down + updates)


def _best_size(by_unit: Sequence[Sequence[int]], activations: Activations, least: int, room: int) -> tuple[int, int]:
    """The size of chunks, in elements, that makes the rCache fetch least, and the number of its blocks."""
    best, found = math.inf, (least, 1)
    for size in range(least, min(3 * least, max(room, least)) + 1, max(1, 2 * least // _SIZES)):
        blocks = max(1, room // size - _PREFETCHED)
        units = packed(by_unit, size)
        blocks = min(blocks, 1 + max(chain.from_iterable(units)))
        moved = size * fetches(_steps(units, by_unit, size, activations), blocks)[0]
        if moved < best:
            best, found = moved, (size, blocks)
    return found


def packed(by_unit: Sequence[Sequence[int]], size: int) -> tuple[frozenset[int], ...]:
    """The chunks of each unit: a tensor that does not fit in what is left of a chunk begins the next one.

    Args:
        by_unit: elements of each tensor of each unit, in call order.
        size: elements of a chunk.
    """
    return tuple(frozenset(chunks) for chunks in _chunks(by_unit, size))


def _chunks(by_unit: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """The chunk of each tensor."""
    chunk, left = -1, 0
    found: list[list[int]] = []
    for tensors in by_unit:
        found.append([])
        for elements in tensors:
            if elements > left:
                chunk, left = chunk + 1, size
            left -= elements
            found[-1].append(chunk)
    return found


def _steps(
    units: Sequence[frozenset[int]], by_unit: Sequence[Sequence[int]], size: int, activations: Activations
) -> tuple[list[int], list[int]]:
    """The chunks that forward and backward use, one after another."""
    of = _chunks(by_unit, size)
    last = len(units) - 1
    backward = []
    for unit in range(last, -1, -1):
        again = of[unit] if activations is not Activations.KEEP and 0 < unit < last else []
        backward += [*again, *reversed(of[unit])]
    forward = [chunk for chunk, _ in groupby(chain.from_iterable(of))]
    return forward, [chunk for chunk, _ in groupby(backward)]


def fetches(steps: tuple[Sequence[int], Sequence[int]], blocks: int) -> tuple[int, frozenset[int]]:
    """How often chunks are fetched to so many blocks if the one needed furthest in the future makes room, and which chunks are
    fetched in backward (``src/simulator.cpp``).

    Args:
        steps: the chunks that forward and backward use.
        blocks: at least 1.
    """
    forward, order = len(steps[0]), [*steps[0], *steps[1]]
    following, ahead = [len(order)] * len(order), dict[int, int]()
    for i in range(len(order) - 1, -1, -1):
        following[i] = ahead.get(order[i], len(order))
        ahead[order[i]] = i
    there: dict[int, int] = {}  # the next use of each chunk in a block
    furthest: list[tuple[int, int]] = []
    count, again = 0, set[int]()
    for i, chunk in enumerate(order):
        if chunk not in there:
            while len(there) >= blocks:
                use, other = heapq.heappop(furthest)
                if there.get(other) == -use:  # not superseded by a later use
                    del there[other]
            count += 1
            if i >= forward:
                again.add(chunk)
        there[chunk] = following[i]
        heapq.heappush(furthest, (-following[i], chunk))
    return count, frozenset(again)


def _on_cpu(profile: Profile, activations: Activations, parameters: Route, unit: int) -> UnitPlan:
    """A unit that the CPU updates."""
    outer = unit in (0, len(profile.units) - 1)
    return UnitPlan(
        Activations.KEEP if outer else activations,
        parameters,
        Update(Processor.CPU),
        Route(HOST_MEMORY),
        Format(4),
        # In fp32 the parameters of a plan are the masters, which gradients must not overwrite.
        gradients_replace_parameters=traffic.is_mixed(profile) and profile.hardware.gpus == 1,
    )


def _plan(profile: Profile, activations: Activations, chosen: ChunkPlacement) -> Plan:
    gpus, element = profile.hardware.gpus, profile.element_bytes
    tied, mixed = profile.workload.tied_embeddings, traffic.is_mixed(profile)
    cached, units = 0, []
    for i, chunks in enumerate(chosen.units):
        private = tied and i == 0
        stays = private or chunks <= chosen.stays
        if private or not chunks:
            route = Route()
        else:
            carried = Format((4 if stays else 3) if mixed else None)
            route = Route(HOST_MEMORY, carried=carried, stays_after_forward=stays, moves=not stays and gpus == 1)
        unit = _on_cpu(profile, activations, route, i)
        on_gpu = chosen.private_on_gpu if private else chosen.is_on_gpu(i)
        if on_gpu:
            unit = replace(unit, parameters=Route(), update=Update(), gradients=Route(), refresh=Format())
        if gpus > 1:
            unit = replace(unit, zero_stage=2 if unit.parameters == Route() and stays else 3)
        if stays and (gpus > 1 or not on_gpu):
            cached += profile.parameter_bytes(i)
        units.append(unit)
    passes = 1 if activations is Activations.KEEP else 2  # over a block in backward
    kinds = (Kind.OFFLOAD_GRADIENTS, *([Kind.REDUCE_GRADIENTS] if gpus > 1 else []))
    largest = max(chain.from_iterable(host_arrays.tensors_by_unit(profile)))
    shards = [-(-chosen.chunk_elements // gpus)] * (chosen.chunks - chosen.on_gpu)
    if tied and not chosen.private_on_gpu:
        shards.append(profile.hardware.part_of(profile.units[0].trained_parameters))
    return Plan(
        policy="elixir",
        units=tuple(units),
        rules=(
            *(BlockingCopies(kind, overlapped=passes) for kind in kinds),
            UpdatesAfterBackward(),
            GpuUpdatesAfterBackward(),
            Barrier(),
        ),
        update_bytes=traffic.upcast_kernel(profile),
        scales_gradients=True,
        footprint=Footprint(
            # The blocks that hold nothing when backward begins, the buffer for the parameters of an operation, and a shard that
            # has come in fp32 and is cast to its block.
            gpu_buffer_bytes=max(0, chosen.blocks * chosen.chunk_elements * element - cached)
            + largest * element
            + 4 * max(shards, default=0) * mixed,
            host_optimizer_bytes=8,
            host_pinned_buffer_bytes=sum(host_arrays.pinned(profile, shards, size) for size in (element, 4)),
        ),
    )


SYSTEM = Elixir
