"""What several GPUs shard in published systems."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from autohete.errors import InputError
from autohete.plan import FlatBuffers, Hooks, UnitPlan
from autohete.plan.rules import Rule, Slots
from autohete.profile import Profile
from autohete.schedule import Kind

#: PyTorch's ``fully_shard``: what is gathered is split into parameters, and gradients are put together (2.13,
#: ``_fsdp_collectives.py``: ``foreach_all_gather_copy_out``, ``foreach_reduce_scatter_copy_in``).
FSDP2 = FlatBuffers(gather_copies=1, reduce_copies=1)
#: ``FullyShardedDataParallel``: parameters are views of what is gathered, and the backward of the split that makes them puts
#: their gradients together (2.13, ``_flat_param.py``).
FSDP1 = FlatBuffers(reduce_copies=1, adds_whole=True)
#: DeepSpeed, stage 3: each parameter is concatenated from its parts (``AllGatherCoalescedHandle.wait``). Gradients are copied
#: to the bucket (``stage3.py``), concatenated by owner and divided (``reduce_scatter_coalesced``); edaa7221.
ZERO3 = FlatBuffers(gather_copies=1, reduce_copies=3)
#: The same with ``reduce_scatter`` off, where gradients are only copied to the bucket and divided.
ZERO3_ALL_REDUCE = FlatBuffers(gather_copies=1, reduce_copies=2, reduces_all=True)
#: DeepSpeed, stages 1 and 2: gradients are copied to the bucket, divided and flattened, and all-reduced since 0.12.6
#: (``stage_1_and_2.py``: ``average_tensor``, ``allreduce_and_copy_with_multiple_ranks``); before, reduced to their owners.
ZERO2 = FlatBuffers(reduce_copies=3, reduces_all=True)
ZERO2_TO_OWNERS = FlatBuffers(reduce_copies=3)

#: Operations of the host for each module and parameter of blocks of transformers: DeepSpeed 0.18.6, PyTorch 2.13, on
#: 2026-11-26 (benchmarks/host_time.py). Stage 3 hooks each module, and fetches and releases its parameters. Chains of linear
#: layers and identities take 27 to 29 and 18 to 20 forward, 19 to 21 and 33 to 37 backward; blocks with and without adapters
#: as much as this, within 8 %, and on a loaded machine up to a third more. Small parameters are never released, and their hooks
#: take 1 to 9 forward and 22 to 27 backward, in which their gradients are reduced as well. DeepSpeed 0.12.6 takes as much,
#: within 15 %. Hooks of stages 1 and 2 take gradients to their bucket (9 to 14).
ZERO3_HOOKS, ZERO2_HOOKS = Hooks((30, 24, 5), (22, 39, 25)), Hooks(backward=(0, 11, 11))
#: Those of FSDP gather and release whole units, parameter by parameter (21 to 30 forward, 25 to 36 backward).
FSDP1_HOOKS, FSDP2_HOOKS = Hooks((0, 26, 26), (0, 31, 31)), Hooks((0, 25, 25), (0, 30, 30))


#: Units whose gradients exist before they are reduced. FSDP2 keeps the input of one reduction beside what is computed: after
#: each backward the compute stream waits for the reduction of the unit above (2.13, ``_fsdp_param_group.py``:
#: ``post_backward``, ``reduce_scatter_max_input_buffers``). FSDP1 and DistributedDataParallel wait for none: gathers of the
#: former queue behind its reductions, and buckets of the latter are the gradients, which stay until the update
#: (``_runtime_utils.py``: ``_post_backward_hook``; ``reducer.cpp``).
_FSDP2_UNITS = 2
#: Buckets of DeepSpeed by stage. Stages 1 and 2 fill one while one is reduced, since the compute stream waits for the reduction
#: stream before the next is (``stage_1_and_2.py``: ``average_tensor``, with ``overlap_comm``). Stage 3 fills one beside three,
#: because the thread that launches backward waits for the third last (``stage3.py``: ``max_param_reduce_events``); edaa7221.
_BUCKETS = {1: 2, 2: 2, 3: 4}


def zero3_hooks(profile: Profile) -> Hooks:
    """The hooks of DeepSpeed's stage 3. On one GPU nothing is gathered, and the thread that launches a pass waits for copies of
    its parameters (``NoGatherHandle.wait`` in ``partition_parameters.py``, since 2023-04).
    """
    return replace(ZERO3_HOOKS, waits=profile.hardware.gpus == 1)


def fsdp2_buffers(profile: Profile) -> tuple[Rule, ...]:
    """The rule that backward of FSDP2 waits for a free buffer; none for one GPU."""
    return (Slots(Kind.REDUCE_GRADIENTS, _FSDP2_UNITS),) if profile.hardware.gpus > 1 else ()


def check_bucket_size(policy: str, bucket_size: int) -> None:
    """Refuse a ``reduce_bucket_size``, in millions of elements, that no training has."""
    if not 1 <= bucket_size <= 100_000:
        raise InputError(f"{policy}:bucket_size={bucket_size} must be between 1 and 100000 million elements")


def deepspeed_buckets(profile: Profile, zero_stage: int, bucket_elements: float) -> tuple[Rule, ...]:
    """The rule that backward of DeepSpeed waits for a free bucket; none for one GPU, or if the buckets hold all gradients. A
    place is a unit here: there are as many as fill the buckets, but two at least.

    Args:
        profile: the sizes of the units.
        zero_stage: 1 to 3.
        bucket_elements: ``reduce_bucket_size``.
    """
    largest = max(1, *(unit.trained_parameters for unit in profile.units[1:-1]))
    places = max(2, math.ceil(_BUCKETS[zero_stage] * bucket_elements / largest))
    holds_all = profile.hardware.gpus == 1 or places >= len(profile.units)
    return () if holds_all else (Slots(Kind.REDUCE_GRADIENTS, places),)


def shared(units: Iterable[UnitPlan], zero_stage: int, profile: Profile) -> tuple[UnitPlan, ...]:
    """Return ``units`` at a ZeRO stage. Parameters of a tied embedding, which the head also uses, are replicated on each GPU.

    Args:
        units: embedding first.
        zero_stage: 0 to 3.
        profile: says whether embeddings are tied.
    """
    units = tuple(units)
    different = {id(unit): unit for unit in units}  # mostly few
    made = {number: replace(unit, zero_stage=zero_stage) for number, unit in different.items()}
    first, *others = (made[id(unit)] for unit in units)
    if profile.workload.tied_embeddings:
        first = replace(first, zero_stage=min(zero_stage, 2))
    return (first, *others)


def check_one_gpu(policy: str, profile: Profile) -> None:
    """Refuse several GPUs.

    Raises:
        InputError: the profile has several GPUs.
    """
    if profile.hardware.gpus > 1:
        raise InputError(
            f"{policy} plans for one GPU, not for {profile.hardware.gpus}: give gpus=1, or choose a policy that shards a "
            "model, such as zero_offload, fsdp2_offload or resident:zero_stage=3"
        )
