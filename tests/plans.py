"""Plans that no published system makes, and a node that every one can use."""

from __future__ import annotations

from dataclasses import replace

from autohete.hardware import Hardware, Nvme, load_hardware
from autohete.plan import Plan


def with_drives(node: str) -> Hardware:
    """The preset with NVMe."""
    return replace(load_hardware(node), nvme=Nvme(10**13, 7e9, 6e9, 1e-4))


def with_gradients_replacing(plan: Plan) -> Plan:
    """The same, but every finished gradient takes the place of its parameters."""
    return replace(plan, units=tuple(replace(unit, gradients_replace_parameters=True) for unit in plan.units))
