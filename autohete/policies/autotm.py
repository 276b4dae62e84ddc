"""AutoTM (Hildebrand et al., ASPLOS 2020): an integer program decides where each tensor is at each kernel, and when it moves.

"AutoTM: Automatic Tensor Movement in Heterogeneous Memory Systems using Integer Linear Programming". Based on github
darchr/AutoTM at c6d4f2c, ``AutoTM/src/optimizer/ilp/formulation.jl`` and ``tensor_graphs.jl``. Besides DRAM with persistent
memory, the code has a variant for a GPU and its host, in which kernels need their operands in the GPU's memory. Tensors move
between kernels, while all waits, or beside a kernel that is near one that uses them. The sum of all synchronous moves and, of
each kernel, its time or that of the moves beside it is least, within the memory of each kernel. The program and what it becomes
for units is described in ``planner/placement_program.py``.

Differences:

- Kernels are the passes of units. Tensors are what a forward saves and the profile names, with the input and all without a name
  as one more; a unit without names has one. In the code they are all tensors, also weights, which stay on the GPU here as
  gradients and optimizer states do.
- The code lets a tensor move beside 15 kernels before and after one that uses it; here this is one pass. Tensors may also leave
  and come back between other uses there. What leaves a unit goes either at once or beside the next pass, not some of it so.
- Cbc solves the program until it is optimal; a comment has Gurobi with a gap of 1 %. Here HiGHS stops at that gap, or after 100
  nodes.
- The code lowers the limit of kernels whose tensors did not fit for want of unbroken room, and solves it again. Memory has no
  addresses here.
- If nothing fits, all blocks send all that they save, and the GPU waits for each copy.
- Embedding and head keep their activations. The optimizer runs after backward.

HiGHS (SciPy 1.17, one core of a shared machine) took 0.4 to 1.5 s for 80 like blocks with 11 tensors each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autohete.errors import check_fields
from autohete.plan import Plan, Route, SavedRoute, UnitPlan
from autohete.plan.policy import Judge
from autohete.plan.rules import BlockingCopies, GpuUpdatesAfterBackward
from autohete.planner.placement_program import PassTimes, Placed, Placement, least_by_placement
from autohete.policies.chain_costs import activation_budget_bytes, stages
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, Kind

#: A tensor: the index of its unit, and its name; None: the input and all without a name.
_Tensor = tuple[int, str | None]


@dataclass(frozen=True, slots=True)
class AutoTm:
    """AutoTM."""

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`. If nothing fits, returns the plan in which all leaves at once."""
        return plan_with(profile, placements_of(profile))


def _tensors(profile: Profile) -> Iterator[tuple[_Tensor, int]]:
    """What may leave, and its size."""
    for unit in range(max(1, profile.first_trained), len(profile.units) - 1):
        costs = profile.units[unit]
        named = {one.name: one.size_bytes for one in costs.saved if one.size_bytes}
        yield (unit, None), costs.activation_bytes - sum(named.values())
        for name, size in named.items():
            yield (unit, name), size


def placements_of(profile: Profile) -> dict[_Tensor, Placement]:
    """The copies of the tensors that leave."""
    first, tensors = profile.first_trained, dict(_tensors(profile))
    units = profile.units[first:]
    times = PassTimes([unit.forward_seconds for unit in units], [unit.backward_seconds for unit in units], profile.loss.seconds)
    placed = [
        Placed(unit - first, size, profile.d2h_seconds(size), profile.h2d_seconds(size)) for (unit, _), size in tensors.items()
    ]
    found = least_by_placement(stages(profile), times, placed, activation_budget_bytes(profile)).placements
    if found is None:
        return dict.fromkeys(tensors, Placement(away_beside=False, back_beside=False))
    return {tensor: copies for tensor, copies in zip(tensors, found, strict=True) if copies is not None}


def plan_with(profile: Profile, placements: dict[_Tensor, Placement]) -> Plan:
    """The plan in which tensors leave like that."""
    units = [UnitPlan() for _ in profile.units]
    waiting: list[int] = []  # units whose copies the next pass waits for
    overlapped: list[int] = []  # those whose copies the pass after that waits for
    for unit in sorted({unit for unit, _ in placements}):
        copies = {name: copy for (of, name), copy in placements.items() if of == unit}
        routes = {name: Route(HOST_MEMORY, int(copy.back_beside)) for name, copy in copies.items()}
        kept = routes.pop(None, Route())
        staying = {one.name: Route() for one in profile.units[unit].saved if one.size_bytes}
        saved = (SavedRoute(name, route) for name, route in (staying | routes).items() if name and route != kept)
        units[unit] = UnitPlan(kept=kept, saved=tuple(saved))
        (overlapped if next(iter(copies.values())).away_beside else waiting).append(unit)
    rules = [
        BlockingCopies(Kind.OFFLOAD_ACTIVATIONS, tuple(some), overlapped=passes)
        for passes, some in enumerate((waiting, overlapped))
        if some
    ]
    return Plan("autotm", tuple(units), rules=(*rules, GpuUpdatesAfterBackward()))


SYSTEM = AutoTm
