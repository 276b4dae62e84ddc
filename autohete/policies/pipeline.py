"""Pipeline parallelism: each GPU computes a stage of consecutive units, and micro-batches pass through the stages.

Based on github NVIDIA/Megatron-LM at d98e8a64, ``megatron/core/pipeline_parallel/schedules.py``
(``forward_backward_pipelining_without_interleaving``): once a stage has made as many forwards as there are stages after it, it
computes one forward and one backward in turns, and the rest of the backwards at the end (PipeDream-Flush, arXiv 2006.09503).
With ``order=gpipe`` all forwards come first (GPipe, arXiv 1811.06965). A stage sends its output as soon as it has it; Megatron
does so between two passes. Gradients of micro-batches are summed on the GPU, which updates after its last backward.

With ``chunks=v`` a GPU has v stages (Megatron's virtual stages: ``forward_backward_pipelining_with_interleaving``, arXiv
2104.04473), dealt to the GPUs in turn. As many micro-batches as there are GPUs pass through its first stage, then through its
second, and so on; a GPU is idle for a v-th of the time, but sends v times as much and keeps more. Megatron takes a number of
micro-batches that the GPUs divide. With ``order=gpipe`` all micro-batches pass through a stage before the GPU's next one.

Megatron gives each stage the same number of blocks, the first one the embedding as well, and the last one the head
(``cut=blocks``). ``cut=time`` makes the longest stage as short as possible, as PipeDream's planner does.

A batch is one of all ranks of a pipeline, which share its micro-batches; policies that train data-parallel have one for each
GPU. With fewer ``ranks`` than GPUs, pipelines train side by side, each with a batch. GPUs with the same stages are neighbours
(Megatron's order of ranks, ``tp-cp-ep-dp-pp``), and reduce their gradients after the last backward, or with
``overlap_grad_reduce`` as soon as they are complete. Megatron reduces them in buckets, here by unit. With ``zero_stage=1`` each
updates a part, and the parameters are gathered (``--use-distributed-optimizer``). On one GPU there is one stage: ordinary
training.

If embedding and head share a matrix, the first and the last rank have copies of it, and sum up their gradients. If gradients
are clipped, the ranks sum up their norms after the last backward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, PassOrder, Plan, UnitPlan
from autohete.plan.policy import Judge
from autohete.plan.rules import GpuUpdatesAfterBackward, ReductionsAfterBackward, Rule
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
        chunks: stages of each GPU.
        ranks: GPUs of one pipeline. None: those of ``Parallelism.pipeline``, or all that do not divide sequences and experts
            with others.
        zero_stage: 1 shards the optimizer states over pipelines side by side.
        fp32_sums: gradients are summed and reduced in fp32, in memory that is always held (Megatron's
            ``--accumulate-allreduce-grads-in-fp32``, which ``--bf16`` implies).
        overlap_grad_reduce: these reduce gradients during the last backward.
        checkpointing: full, selective, alternate, none, or the better of full and none.
    """

    order: PassOrder = PassOrder.ONE_FORWARD_ONE_BACKWARD
    cut: StageCut = StageCut.BLOCKS
    chunks: int = 1
    ranks: int | None = None
    zero_stage: int = 0
    fp32_sums: bool = False
    overlap_grad_reduce: bool = False
    checkpointing: Checkpointing = Checkpointing.BEST

    def __post_init__(self) -> None:
        check_fields(self)
        if self.chunks < 1:
            raise InputError(f"chunks is {self.chunks}: give each GPU at least 1 stage")
        if self.ranks is not None and self.ranks < 1:
            raise InputError(f"ranks is {self.ranks}: give at least 1, or leave it out for a pipeline over all GPUs")
        if self.zero_stage not in (0, 1):
            raise InputError(f"zero_stage is {self.zero_stage}: pipelines shard nothing (0) or the optimizer states (1)")

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[Pipeline]:
        """What users can choose; see :func:`autohete.policies.search_space`. GPipe's order takes more memory, no less time."""
        workload, gpus, neighbours = profile.workload, profile.hardware.gpus, profile.hardware.parallelism.neighbours
        whole = cls().ranks_on(profile)
        yield from combinations(cls, cut=if_several(profile, *StageCut), checkpointing=choosable(profile))
        given = profile.hardware.parallelism.pipeline > 1
        for ranks in (whole,) if given else range(whole, 1, -1):
            most = workload.transformer_blocks // ranks
            if gpus % (ranks * neighbours) or not most:
                continue
            for chunks in {1, most} if not workload.micro_batches % ranks else {1}:
                if (ranks, chunks) != (whole, 1):
                    one = cls(chunks=chunks, ranks=None if ranks == whole else ranks, zero_stage=int(ranks < gpus))
                    yield from (replace(one, checkpointing=each) for each in choosable(profile))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        return with_checkpointing(self.checkpointing, lambda kept: self.plan_for(profile, kept), profile, judge)

    def ranks_on(self, profile: Profile) -> int:
        """The number of GPUs of one pipeline on the hardware of ``profile``."""
        gpus, parallelism = profile.hardware.gpus, profile.hardware.parallelism
        if self.ranks is not None and gpus > 1:
            return self.ranks
        return parallelism.pipeline if parallelism.pipeline > 1 else gpus // parallelism.neighbours

    def plan_for(self, profile: Profile, activations: Activations) -> Plan:
        """The plan whose blocks keep these activations."""
        gpus = profile.hardware.gpus
        ranks = self.ranks_on(profile)
        if gpus % ranks:
            raise InputError(f"{gpus} GPUs cannot be pipelines of {ranks} each: let ranks divide the number of GPUs")
        rules: tuple[Rule, ...] = (GpuUpdatesAfterBackward(),)
        if not self.overlap_grad_reduce:
            rules = (*rules, ReductionsAfterBackward())
        units = (UnitPlan(), *[UnitPlan(activations)] * (len(profile.units) - 2), UnitPlan())
        staged = in_stages(units, self.cut, profile, ranks, self.chunks)
        if ranks < gpus:
            staged = tuple(replace(unit, zero_stage=self.zero_stage) for unit in staged)
        fp32_sums = self.fp32_sums and ranks > 1
        return Plan("pipeline", staged, rules, pass_order=self.order, sums_in_fp32=fp32_sums)


def in_stages(units: Sequence[UnitPlan], cut: StageCut, profile: Profile, ranks: int, chunks: int) -> tuple[UnitPlan, ...]:
    """Return ``units`` with the rank that computes each, which has ``chunks`` stages; none if there is one rank.

    Raises:
        InputError: there are more stages than transformer blocks, or units if they are cut by time.
    """
    stages, blocks = ranks * chunks, profile.workload.transformer_blocks
    if ranks == 1:
        return tuple(units)
    most, part = (blocks, "block") if cut is StageCut.BLOCKS else (len(units), "unit")
    if most < stages:
        fewer = f"at most {most // ranks} chunks" if most >= ranks else f"at most {most} GPUs"
        raise InputError(f"a pipeline of {stages} stages has a {part} in each, but there are {most}: give {fewer}")
    if cut is StageCut.BLOCKS:
        per_block = (len(units) - 2) // blocks
        starts = [per_block * (blocks * stage // stages) for stage in range(stages + 1)]
        inner = [stage for stage, (start, end) in enumerate(pairwise(starts)) for _ in range(start, end)]
        which = [0, *inner, stages - 1]
    else:
        which = even_stages([_seconds(profile, i, unit) for i, unit in enumerate(units)], stages)
    return tuple(replace(unit, rank=stage % ranks) for unit, stage in zip(units, which, strict=True))


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
