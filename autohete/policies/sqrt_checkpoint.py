"""Sublinear memory by segments (Chen et al. 2016, arXiv 1604.06174): about the square root of n units keep their input.

Forward keeps only the input of each segment's first unit. Backward runs forward of a segment again, this time keeping all
activations, and then goes through it. With k segments of n units, k inputs and the activations of n / k units are held at a
time, for one additional forward in total (abstract: memory of the square root of n for one extra forward). The minimum is at k
near the square root of n if inputs and activations are of similar size. A transformer block keeps many times its input, so
segments of one block, ``resident:checkpointing=full``, need less. Units are those of the workload, such as transformer blocks.
Everything else is on the GPU, which updates after backward.

A segment has n // k units, and the last one also has the remainder, as in ``torch.utils.checkpoint.checkpoint_sequential``
(PyTorch 2.13). That function does not recompute the last segment, whose backward follows its forward: ``keep_last``. Not
modelled: the paper's search for segments by their size in bytes; its recursion is part of what ``rotor`` decides. The text of
the paper beyond its abstract was not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Plan, UnitPlan
from autohete.plan.policy import Judge
from autohete.plan.rules import GpuUpdatesAfterBackward
from autohete.policies.flags import combinations
from autohete.profile import Profile


@dataclass(frozen=True, slots=True)
class SqrtCheckpoint:
    """Checkpointing in segments of several blocks.

    Args:
        segments: number of segments, at most the number of blocks. None: the square root of that number, rounded.
        keep_last: the last segment keeps its activations.
    """

    segments: int | None = None
    keep_last: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.segments is not None and self.segments < 1:
            raise InputError(f"sqrt_checkpoint:segments={self.segments} must be at least 1, or left out")

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[SqrtCheckpoint]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(cls, keep_last=(False, True))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        frozen = max(profile.first_trained - 1, 0)  # blocks without backward, which are in no segment
        units = max(len(profile.units) - 2 - frozen, 1)
        segments = min(self.segments or round(math.sqrt(units)), units)
        size, last = units // segments, units // segments * (segments - 1)

        def kept_by(unit: int) -> Activations:
            if unit >= last:
                begins = unit == last
                return Activations.KEEP if self.keep_last else Activations.RECOMPUTE if begins else Activations.DROP
            return Activations.DROP if unit % size else Activations.RECOMPUTE

        inner = [UnitPlan(kept_by(unit)) for unit in range(units)]
        inner = [*[UnitPlan()] * frozen, *inner][: len(profile.units) - 2]
        return Plan("sqrt_checkpoint", (UnitPlan(), *inner, UnitPlan()), rules=(GpuUpdatesAfterBackward(),))


SYSTEM = SqrtCheckpoint
