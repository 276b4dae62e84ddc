"""Checkmate (Jain et al., MLSys 2020): an integer program finds the least recomputation within the memory.

Based on github parasj/checkmate at 6041c77, ``checkmate/core/solvers/gurobi_solver.py``. After times and sizes are measured, a
program with binary variables says stage by stage which values are computed and which are stored, such that the memory of
every moment is within the budget and the time of all computations is least. Nothing leaves the GPU. The program and what it
becomes for a chain of units is described in ``planner/remat_program.py``. HiGHS solves it within a limit of time, and proves a
bound of the iteration time. The code's approximations, which round the linear program, are not modelled.

Differences:

- Values are those of units, such as transformer blocks: the input, and all that a unit keeps besides. The code has those of
  single operators, of which it could keep some.
- What a stage has kept stays until its backward (*persistent*), as plans cannot express otherwise. Checkmate may free an input
  that has served one recomputation, and compute it again.
- The optimizer runs after backward, and gradients wait for it, as elsewhere in this package.

So it finds the plan of ``rotor``, which takes a small part of the time: the two prove each other. HiGHS (SciPy 1.17, one core
of a shared machine) solved chains of up to 14 like units in 0.5 s, of 26 in 2 to 8 s, and of 34 in 3 s to more than 30.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autohete.errors import InputError, check_fields
from autohete.plan import Plan, UnitPlan
from autohete.plan.policy import Judge
from autohete.plan.rules import GpuUpdatesAfterBackward
from autohete.planner.chain import Chain
from autohete.planner.remat_program import least_recomputation
from autohete.policies.chain_costs import activation_budget_bytes, iteration_seconds, stages
from autohete.profile import Profile


@dataclass(frozen=True, slots=True)
class Checkmate:
    """Checkmate.

    Args:
        seconds: limit of the search, after which the best plan so far is taken; how good that is depends on the machine.
    """

    seconds: int = 10

    def __post_init__(self) -> None:
        check_fields(self)
        if self.seconds < 1:
            raise InputError(f"checkmate:seconds={self.seconds}: give 1 second or more, or leave it out")

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`. If nothing fits or is found in time, the plan with the least memory."""
        chain, budget = stages(profile), activation_budget_bytes(profile)
        found = least_recomputation(chain, budget, self.seconds)
        forwards = Chain(chain, 0).forwards() if found.forwards is None else found.forwards
        units = (*[UnitPlan()] * profile.first_trained, *(UnitPlan(kept[0], again=tuple(kept[1:-1])) for kept in forwards))
        plan = Plan("checkmate", units, rules=(GpuUpdatesAfterBackward(),))
        if found.bound_ns < float("inf"):
            forward_ns = sum(stage.forward_ns for stage in chain)
            plain = iteration_seconds(profile, replace(plan, units=(UnitPlan(),) * len(units)))
            more = profile.workload.micro_batches * (found.bound_ns - forward_ns) * 1e-9
            plan = replace(plan, bound_seconds=min(plain + more, iteration_seconds(profile, plan)))
        return plan


SYSTEM = Checkmate
