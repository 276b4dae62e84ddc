"""Pipeline parallelism: each GPU computes a stage of consecutive units, and micro-batches pass through the stages.

Based on github NVIDIA/Megatron-LM, ``megatron/core/pipeline_parallel/schedules.py``
(``forward_backward_pipelining_without_interleaving``): once a stage has made as many forwards as there are stages after it, it
computes one forward and one backward in turns, and the rest of the backwards at the end (PipeDream-Flush, arXiv 2006.09503).
With ``order=gpipe`` all forwards come first (GPipe, arXiv 1811.06965). A stage sends its output as soon as it has it; Megatron
does so between two passes. Gradients of micro-batches are summed on the GPU, which updates after its last backward.

Megatron gives each stage the same number of blocks, the first one the embedding as well, and the last one the head
(``cut=blocks``). ``cut=time`` makes the longest stage as short as possible, as PipeDream's planner does.

A batch is one of all GPUs, which share its micro-batches; policies that train data-parallel have one for each. On one GPU there
is one stage: ordinary training.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, PassOrder, Plan, UnitPlan
from autohete.plan.policy import Judge
from autohete.plan.rules import GpuUpdatesAfterBackward
from autohete.policies.checkpointing import Checkpointing, choosable, with_checkpointing
from autohete.policies.flags import combinations, if_several
from autohete.profile import Profile


class StageCut(StrEnum):
    """How units are divided among the stages: as many blocks each, or as much time each as can be."""

    BLOCKS = "blocks"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages of a pipeline, one on each GPU.

    Args:
        order: of the passes of micro-batches.
        cut: the division into stages.
        checkpointing: full, selective, none, or the better of full and none.
    """

    order: PassOrder = PassOrder.ONE_FORWARD_ONE_BACKWARD
    cut: StageCut = StageCut.BLOCKS
    checkpointing: Checkpointing = Checkpointing.BEST

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[Pipeline]:
        """What users can choose; see :func:`autohete.policies.search_space`. GPipe's order takes more memory, no less time."""
        yield from combinations(cls, cut=if_several(profile, *StageCut), checkpointing=choosable(profile))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""

        def plan_for(activations: Activations) -> Plan:
            units = (UnitPlan(), *[UnitPlan(activations)] * (len(profile.units) - 2), UnitPlan())
            return Plan("pipeline", in_stages(units, self.cut, profile), (GpuUpdatesAfterBackward(),), pass_order=self.order)

        return with_checkpointing(self.checkpointing, plan_for, profile, judge)


def in_stages(units: Sequence[UnitPlan], cut: StageCut, profile: Profile) -> tuple[UnitPlan, ...]:
    """Return ``units`` with the rank of the GPU that computes each; none if there is one GPU.

    Raises:
        InputError: there are more GPUs than transformer blocks.
    """
    gpus, blocks = profile.hardware.gpus, profile.workload.transformer_blocks
    if gpus == 1:
        return tuple(units)
    if blocks < gpus:
        raise InputError(f"a pipeline of {gpus} stages has a block in each, but there are {blocks}: give at most {blocks} GPUs")
    if cut is StageCut.BLOCKS:
        per_block = (len(units) - 2) // blocks
        inner = [rank for rank in range(gpus) for _ in range(per_block * (blocks * (rank + 1) // gpus - blocks * rank // gpus))]
        ranks = [0, *inner, gpus - 1]
    else:
        ranks = even_stages([_seconds(profile, i, unit) for i, unit in enumerate(units)], gpus)
    return tuple(replace(unit, rank=rank) for unit, rank in zip(units, ranks, strict=True))


def _seconds(profile: Profile, place: int, unit: UnitPlan) -> float:
    """Time of a unit's passes for one micro-batch."""
    costs, recomputes = profile.units[place], unit.activations is Activations.RECOMPUTE
    loss = profile.loss.seconds if place == len(profile.units) - 1 else 0.0
    return costs.forward_seconds * (1 + recomputes) + costs.backward_seconds + loss


def even_stages(seconds: Sequence[float], stages: int) -> list[int]:
    """The stage of each unit: the longest stage is as short as it can be, and the first ones are full."""
    ends = [0.0, *accumulate(seconds)]
    spans = sorted({ends[b] - ends[a] for a in range(len(seconds)) for b in range(a + 1, len(ends))})
    shortest = bisect_left(spans, True, key=lambda longest: len(_filled(seconds, longest, stages)) == len(seconds))
    return _filled(seconds, spans[shortest], stages)


def _filled(seconds: Sequence[float], longest: float, stages: int) -> list[int]:
    """The stage of each unit if one stage after the other is filled up to ``longest`` and none is empty; incomplete if the last
    stage is full before.
    """
    ranks: list[int] = []
    rank, filled = 0, 0.0
    for place, each in enumerate(seconds):
        must = len(seconds) - place <= stages - 1 - rank
        if place and (must or filled + each > longest * (1 + 1e-9)):
            rank, filled = rank + 1, 0.0
            if rank == stages:
                break
        ranks.append(rank)
        filled += each
    return ranks


SYSTEM = Pipeline
