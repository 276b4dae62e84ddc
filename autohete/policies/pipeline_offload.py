"""Pipelines that let a part of what forward saves rest on the host, beside the passes of other micro-batches.

Based on github kwai/Megatron-Kwai at b2646e4d, ``megatron/core/pipeline_parallel/offload.py`` and ``schedules.py``
("Accelerating the Training of Large Language Models using Efficient Activation Rematerialization and Optimal Hybrid
Parallelism", USENIX ATC 2024). It is the :mod:`pipeline <autohete.policies.pipeline>` of Megatron-LM with copies:

- After the forwards of a stage for a micro-batch, a fraction of what they saved goes to pinned host memory beside the next
  passes. The rank waits for it after the next forward, or once the pipeline is full before its second next backward
  (``schedule_1f1b_offload``).
- What the next backward needs comes back beside the passes before it, from the backward before it on, into one of two buffers.
- The fraction (``--kaimm-offload-activation-ratio``) is of bytes: the largest tensors first, above one half the smallest
  first; of the last one a part (``ActivationGroup.offload_prologue``).
- What the last stage saves stays, because its backward follows at once.

The user gives the fraction and which blocks are recomputed. Fewer than three ranks offload nothing (``arguments.py`` refuses
them).

Differences: each block lets the fraction go, there the stage as a whole; tensors of less than 1 MiB go as well, and sizes are
not rounded up to MiB; the GPU's memory is free when a copy has ended, there when the rank has waited for it; the two buffers
are memory only while they are full. Without names of saved tensors in the profile all or nothing goes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autohete.errors import InputError, check_fields
from autohete.lowering import never_fits
from autohete.plan import Activations, Plan, Route, SavedRoute, UnitPlan
from autohete.plan.policy import Judge, Verdict
from autohete.plan.rules import ActivationsByTurns
from autohete.policies.checkpointing import Checkpointing, with_checkpointing
from autohete.policies.pipeline import Pipeline
from autohete.profile import Profile, UnitProfile
from autohete.schedule import HOST_MEMORY

#: The fewest ranks that offload.
_RANKS = 3
#: The fractions that are tried, in percent.
_PERCENT = range(0, 101, 10)


@dataclass(frozen=True, slots=True)
class PipelineOffload:
    """A pipeline that offloads a fraction of what forward saves.

    Args:
        percent: the fraction. None: the smallest multiple of 10 with which the model fits.
        chunks, ranks, zero_stage, fp32_sums: see :class:`autohete.policies.pipeline.Pipeline`.
        checkpointing: full, selective, alternate, none, or the better of full and none. With full, nothing is offloaded.
    """

    percent: int | None = None
    chunks: int = 1
    ranks: int | None = None
    zero_stage: int = 0
    fp32_sums: bool = False
    checkpointing: Checkpointing = Checkpointing.BEST

    def __post_init__(self) -> None:
        check_fields(self)
        if self.percent is not None and not 0 <= self.percent <= 100:
            raise InputError(f"percent is {self.percent}: give 0 to 100, or leave it out for the least that fits")
        self._pipeline()

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[PipelineOffload]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield cls()
        for one in Pipeline.variants(profile):
            if one != Pipeline() and one.cut is Pipeline().cut and one.ranks_on(profile) >= _RANKS:
                yield cls(None, one.chunks, one.ranks, one.zero_stage, checkpointing=one.checkpointing)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""

        def plan_for(activations: Activations) -> Plan:
            staying = replace(self._pipeline().plan_for(profile, activations), policy="pipeline_offload")
            if activations is Activations.RECOMPUTE or staying.ranks < _RANKS:
                return staying

            def fits(percent: int) -> bool:
                plan = _offloading(staying, profile, percent)
                return not never_fits(profile, plan) and judge(plan).verdict is Verdict.OK

            percent = self.percent
            if percent is None:
                percent = 0 if fits(0) else _PERCENT[bisect_left(_PERCENT[:-1], True, lo=1, key=fits)]
            return _offloading(staying, profile, percent)

        return with_checkpointing(self.checkpointing, plan_for, profile, judge)

    def _pipeline(self) -> Pipeline:
        return Pipeline(chunks=self.chunks, ranks=self.ranks, zero_stage=self.zero_stage, fp32_sums=self.fp32_sums)


def route_by_turns(home: str, profile: Profile) -> Route:
    """The route of activations whose copies wait for nothing but :class:`~autohete.plan.rules.ActivationsByTurns`.

    Args:
        home: where they rest.
        profile: of which no pipeline has as many passes as a copy back may be ahead.
    """
    return Route(home, ahead=4 * len(profile.units) * profile.workload.micro_batches)


def _offloading(plan: Plan, profile: Profile, percent: int) -> Plan:
    """``plan`` with a fraction of what all blocks save on the host, but for those of the last stage."""
    if not percent:
        return plan
    route = route_by_turns(HOST_MEMORY, profile)
    units = [
        _leaving(unit, profile.units[i], route, percent) if 0 < i < plan.stages[-1].start else unit
        for i, unit in enumerate(plan.units)
    ]
    return replace(plan, units=tuple(units), rules=(*plan.rules, ActivationsByTurns()))


def _leaving(unit: UnitPlan, costs: UnitProfile, route: Route, percent: int) -> UnitPlan:
    """``unit`` with a fraction of what its forward saves on ``route``: the input last."""
    again = costs.selected if unit.activations is Activations.SELECTIVE else ()
    saved = sorted((one for one in costs.saved if one.name not in again), key=lambda one: one.size_bytes, reverse=percent <= 50)
    whole = sum(one.size_bytes for one in saved) + costs.input_bytes
    left, routes = math.ceil(whole * percent / 100), []
    for one in saved:
        goes = min(left, one.size_bytes)
        if goes:
            routes.append(SavedRoute(one.name, route, share=goes / one.size_bytes))
            left -= goes
    if 2 * left > costs.input_bytes:
        return replace(unit, kept=route)
    return replace(unit, saved=tuple(routes))


SYSTEM = PipelineOffload
