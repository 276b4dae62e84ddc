"""Plans that no published system makes."""

from __future__ import annotations

from dataclasses import replace

from autohete.plan import Plan


def with_gradients_replacing(plan: Plan) -> Plan:
    """The same, but every finished gradient takes the place of its parameters."""
    return replace(plan, units=tuple(replace(unit, gradients_replace_parameters=True) for unit in plan.units))
