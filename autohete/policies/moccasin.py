"""Moccasin (Bartan et al., ICML 2023, arXiv 2304.14463): each value is computed at most twice, with an interval for each time.

"Moccasin: Efficient Tensor Rematerialization for Neural Networks". Based on github haoming-codes/moccasin at ff7ad8b,
``src/moccasin/cp.py``, of one of the authors; of the text the abstract was read. Each value has at most C retention intervals
(2 by default), from a computation of it to its last use. Intervals that overlap share the memory (a cumulative constraint), and
the time of all computations is least. The number of integer variables is linear in that of values, where ``checkmate`` has the
square. The program and what it becomes for a chain of units is described in ``planner/interval_program.py``. Nothing leaves the
GPU.

Differences:

- The code gives the model to CP-SAT, a solver of constraint programs, for up to an hour. Here it is an integer program with the
  same intervals for HiGHS, which needs no further package. It stops when its plan takes at most 0.5 % more time for forwards
  and recomputations than any could, or after 200 nodes.
- Values are those of units, such as transformer blocks: the input, each saved tensor that the profile can make again by itself,
  and all others together. The code has those of single operators.
- What is computed a second time stays until its backward, and tensors that are made again by themselves are so from what their
  unit keeps, right before its backward, as plans cannot express otherwise. The code may end a second interval early, and
  restricts lengths of intervals to some values.
- If nothing fits, or nothing was found within the limit, units are computed again as a whole, as ``rotor:nested=off`` does. The
  code first searches for the least memory, and takes that as its budget if it exceeds the one that was given.
- Embedding and head keep their activations. The optimizer runs after backward, and gradients wait for it.

Where the profile names no saved tensors, its plans take as long as those of ``rotor:nested=off``, within that gap; ``rotor``
computes units more often than twice in the least memory. HiGHS (SciPy 1.17, one core of a shared machine) took 0.2 to 1.5 s for
80 like blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autohete.errors import check_fields
from autohete.plan import Plan, SavedRoute, UnitPlan
from autohete.plan.policy import Judge
from autohete.plan.rules import GpuUpdatesAfterBackward
from autohete.planner.chain import Chain, Stage
from autohete.planner.interval_program import Alone, FirstInterval, Remade, least_by_intervals
from autohete.policies.chain_costs import activation_budget_bytes, iteration_seconds, stages
from autohete.profile import Profile, UnitProfile


@dataclass(frozen=True, slots=True)
class Moccasin:
    """Moccasin."""

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`. If nothing fits, the plan with the least memory."""
        chain, budget = stages(profile), activation_budget_bytes(profile)
        alone = [
            what_is_made_alone(stage, unit) for stage, unit in zip(chain, profile.units[profile.first_trained :], strict=True)
        ]
        found = least_by_intervals(chain, alone, budget)
        intervals = found.intervals
        if intervals is None:
            intervals = [FirstInterval(kept[0]) for kept in Chain(chain, budget, nested=False).forwards()]
        units = (*[UnitPlan()] * profile.first_trained, *map(_unit, intervals))
        plan = Plan("moccasin", units, rules=(GpuUpdatesAfterBackward(),))
        if found.bound_ns < math.inf:
            plain = iteration_seconds(profile, replace(plan, units=(UnitPlan(),) * len(units)))
            more = found.bound_ns - sum(stage.forward_ns for stage in chain)
            plan = replace(plan, bound_seconds=plain + profile.workload.micro_batches * more * 1e-9)
        return plan


def what_is_made_alone(stage: Stage, unit: UnitProfile) -> Alone:
    """What can be made again by itself of what a unit saves."""
    if stage.keeps:
        return Alone((), 0, 0)
    some = [one for one in unit.saved if one.seconds is not None and one.size_bytes]
    tensors = [Remade(one.name, one.size_bytes, (one.seconds or 0.0) * 1e9, one.launch_seconds * 1e9) for one in some]
    forward, again = unit.workspace_bytes_without(unit.selected)
    # Temporaries of a forward that does not keep all, with what it does not keep; those of other choices are not measured.
    forward = max(forward - unit.bytes_of(unit.selected), unit.forward_workspace_bytes)
    return Alone(tuple(tensors), forward, max(again, unit.forward_workspace_bytes)) if tensors else Alone((), 0, 0)


def _unit(interval: FirstInterval) -> UnitPlan:
    return UnitPlan(interval.kept, saved=tuple(SavedRoute(name, recomputed=True) for name in interval.again))


SYSTEM = Moccasin
