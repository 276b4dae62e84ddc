"""Batches of samples of different lengths: what a schedule allocates for each.

A caching allocator keeps the blocks that a batch had, and those of a longer batch are made anew where pieces of the blocks are
in use. How much that adds depends on the order of the batches, so several orders are tried.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

from autohete.lowering import lower
from autohete.plan import Plan
from autohete.profile import Profile, analytic_profile
from autohete.profile.divided import least_tokens
from autohete.schedule import Buffer, BufferId, Value
from autohete.simulate.tensors import TensorSizes

#: Random orders, and the micro-batches of each, which all have other lengths. Of 31 and of 127 the median is the same.
_ORDERS, _BATCHES = 5, 31
#: What a longer batch has more of.
_OF_TOKENS = (
    Value.ACTIVATIONS,
    Value.INPUT,
    Value.INPUT_GRADIENT,
    Value.LOGITS,
    Value.LOGITS_GRADIENT,
    Value.WORKSPACE,
)


@dataclass(frozen=True, slots=True, eq=False)
class _OfLength:
    """Splits the buffers of a schedule as those of a shorter batch.

    Args:
        longest, own: those of the longest batch, and of this one.
        sizes: bytes of the buffers of this one; of the first micro-batch and one of the others.
    """

    longest: TensorSizes
    own: TensorSizes
    sizes: dict[BufferId, int] = field(repr=False)

    def made_later(self, buffer: Buffer) -> int:
        """As many as of the longest batch."""
        return self.longest.made_later(buffer)

    @property
    def made_last(self) -> Collection[Value]:
        """Those of the longest batch."""
        return self.longest.made_last

    def __call__(self, buffer: Buffer) -> Sequence[int]:
        id = buffer.id if buffer.id in self.sizes else buffer.id._replace(micro_batch=min(buffer.id.micro_batch, 1))
        if id.value in _OF_TOKENS and id in self.sizes:
            return self.own(buffer._replace(size_bytes=self.sizes[id]))
        return self.longest(buffer)


def batches_of_samples(profile: Profile, plan: Plan) -> Iterator[Sequence[_OfLength]]:
    """Yield random orders of micro-batches of ``profile``'s samples under ``plan``, with the tensors of each, and the longest
    batch at last. There are none if all samples are whole sequences.

    The order of allocations is that of the longest batch, as shorter ones run the same schedule.
    """
    workload = profile.workload
    if workload.sample_lengths is None:
        return
    shares = (np.arange(_BATCHES) + 0.5) / _BATCHES  # of batches that are shorter; of samples in each of them are more
    lengths = np.quantile(workload.sample_lengths, shares ** (1 / workload.batch_size)).round().astype(int).tolist()
    made = {length: tensors_of_length(profile, plan, length) for length in {*lengths, workload.sequence_length}}
    for seed in range(_ORDERS):
        order = Random(seed).sample(lengths, len(lengths))
        yield [made[length] for length in (*order, workload.sequence_length)]


def tensors_of_length(profile: Profile, plan: Plan, length: int) -> _OfLength:
    """Return the tensors of a micro-batch whose longest sample has ``length`` tokens, or as few more as can be divided."""
    workload, divided = profile.workload, least_tokens(profile.hardware.parallelism)
    tokens = min(-(-length // divided) * divided, workload.sequence_length)
    chunks = workload.loss_chunks and min(workload.loss_chunks, workload.batch_size * tokens)
    count = workload.micro_batches if plan.is_pipeline else min(workload.micro_batches, 2)
    changed = replace(workload, sequence_length=tokens, sample_lengths=None, loss_chunks=chunks, micro_batches=count)
    shorter = analytic_profile(changed, profile.hardware)
    schedule = lower(shorter, plan)
    buffers = (*schedule.resident, *(one for task in schedule.tasks for one in task.allocates))
    return _OfLength(TensorSizes(profile), TensorSizes(shorter), {one.id: one.size_bytes for one in buffers})
