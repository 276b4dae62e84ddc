"""The rule of bitsandbytes' optimizers with states in 8 bit. The library is used if the caller's optimizer is of it.

Its optimizers initialise and update each parameter by itself, in two methods, which a copy of the caller's optimizer runs here.
A state in 8 bit has one scale per block of 256 elements. Parameters of fewer than 4096 elements have states in fp32. The tables
of the values of the 256 codes are constants of the optimizer. They are never copied: with tables that come and go in two
threads its kernels for the CPU gave other results in 3 of 6 runs (version 0.50.2), with constant ones in none of 12.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from autohete.errors import InputError
from autohete.runtime.update_rules import Group, StateTensor, Step, UpdateRule
from autohete.workload.optimizers import Optimizer

#: Classes of ``bitsandbytes.optim`` that are known.
EIGHT_BIT = ("AdamW8bit", "Adam8bit", "Lion8bit")
#: The name of the table of each state in the optimizer's attribute ``name2qmap``.
_TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}
#: The number of steps among the states of a parameter.
_STEP = "step"


def eight_bit_rule(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    """The rule of an optimizer of bitsandbytes; None: it is none that is known.

    Raises:
        InputError: single parameters have settings of their own.
    """
    kind = type(optimizer)
    if kind.__name__ not in EIGHT_BIT or kind.__module__.partition(".")[0] != "bitsandbytes":
        return None
    given: Any = optimizer
    if given.mng.pid2config or given.mng.index2config or given.mng.module_weight_config_triple:
        raise InputError(
            f"parameters of {kind.__name__} have settings in bitsandbytes' GlobalOptimManager, which a Trainer does not "
            "support: leave override_config and register_module_override out, and put such parameters into another optimizer"
        )
    states, step, saved = _States(optimizer), _Step(optimizer), _Saved(optimizer)
    return UpdateRule(states, step, Optimizer.ADAMW8BIT, Optimizer.ADAMW8BIT_PURE_BF16, saved=saved)


@dataclass(frozen=True, slots=True, eq=True)
class _Rule:
    """A part of the rule.

    Args:
        optimizer: the caller's.
    """

    optimizer: Any

    def alone(self, group: Group, parameter: Tensor, states: dict[str, Any]) -> Any:
        """A copy of the optimizer for one parameter with its states."""
        copied = object.__new__(type(self.optimizer))
        vars(copied).update(vars(self.optimizer))
        copied.name2qmap = dict(self.optimizer.name2qmap)
        copied.param_groups, copied.state = [{**group, "params": [parameter]}], defaultdict(dict, {parameter: states})
        return copied

    def tables(self, states: Mapping[str, object], device: torch.device) -> dict[str, Any]:
        """The tables of those of the states that are in 8 bit."""
        in_8bit = [table for table in _TABLES if table.replace("qmap", "absmax") in states]
        return {table: _on(self.optimizer.name2qmap[_TABLES[table]], device) for table in in_8bit}


@lru_cache(maxsize=16)
def _on(table: Tensor, device: torch.device) -> Tensor:
    """The one copy of a table on a device; the table itself if it is there."""
    return table.to(device)


@dataclass(frozen=True, slots=True, eq=True)
class _Saved(_Rule):
    """What the optimizer saves."""

    def __call__(self, count: int, states: Mapping[str, Any]) -> dict[str, Any]:
        return {_STEP: count, **self.tables(states, torch.device("cpu")), **states}


@dataclass(frozen=True, slots=True, eq=True)
class _States(_Rule):
    """The states of a parameter, as the optimizer makes them."""

    def __call__(self, shape: torch.Size, dtype: torch.dtype, group: Group) -> dict[str, StateTensor]:
        probe = torch.empty(shape, dtype=dtype, device="meta")
        made = self.alone(group, probe, {})
        made.init_state(group, probe, 0, 0)
        return {
            name: StateTensor(value.shape, value.dtype)
            for name, value in made.state[probe].items()
            if name != _STEP and name not in _TABLES
        }


@dataclass(frozen=True, slots=True, eq=True)
class _Step(_Rule):
    """A step of one parameter."""

    def __call__(self, group: Group, step: Step) -> None:
        parameter = nn.Parameter(step.weights[0])
        parameter.grad = step.gradients[0]
        states = self.tables(step.states, step.weights[0].device) | {name: tensors[0] for name, tensors in step.states.items()}
        states[_STEP] = step.counts[0] - 1
        self.alone(group, parameter, states).update_step(group, parameter, 0, 0)
