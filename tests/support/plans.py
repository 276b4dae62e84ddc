"""Plans that no published system makes, and a node that every one can use."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autohete.hardware import Hardware, Place, load_hardware
from autohete.plan import Activations, Plan, UnitPlan
from autohete.plan.policy import Judge
from autohete.profile import Profile


def with_drives(node: str) -> Hardware:
    """The preset with NVMe."""
    return replace(load_hardware(node), places=(Place("nvme", 10**13, 7e9, 6e9, 1e-4, update_bandwidth=7e9),))


def with_gradients_replacing(plan: Plan) -> Plan:
    """The same, but every finished gradient takes the place of its parameters."""
    return replace(plan, units=tuple(replace(unit, gradients_replace_parameters=True) for unit in plan.units))


@dataclass(frozen=True, slots=True)
class OneInput:
    """Of all blocks the first alone keeps its input, from which all up to it are recomputed for each block's backward."""

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        recompute, drop = Activations.RECOMPUTE, Activations.DROP
        blocks = len(profile.units) - 2
        first = UnitPlan(recompute, again=(recompute,) * (blocks - 1))
        others = [UnitPlan(drop, again=(drop,) * (blocks - block)) for block in range(2, blocks + 1)]
        return Plan("one input", (UnitPlan(), first, *others, UnitPlan()))
