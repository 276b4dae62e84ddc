"""The rule of bitsandbytes' optimizers with states in 8 bit. The library is used if the caller's optimizer is of it.

Its optimizers initialise and update each parameter by itself, in two methods, which a copy of the caller's optimizer runs here.
A state in 8 bit has one scale per block of 256 elements, and a table of the values of the 256 codes. Parameters of fewer than
4096 elements have states in fp32.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
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
    return UpdateRule(
        _States(optimizer), _Step(optimizer), Optimizer.ADAMW8BIT, Optimizer.ADAMW8BIT_PURE_BF16, count=_whole_number
    )


def _whole_number(count: int) -> int:
    return count


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


@dataclass(frozen=True, slots=True, eq=True)
class _States(_Rule):
    """The states of a parameter, as the optimizer makes them."""

    def __call__(self, shape: torch.Size, dtype: torch.dtype, group: Group) -> dict[str, StateTensor]:
        probe = torch.empty(shape, dtype=dtype, device="meta")
        made = self.alone(group, probe, {})
        made.init_state(group, probe, 0, 0)
        return {
            name: StateTensor(value.shape, value.dtype, self.optimizer.name2qmap[_TABLES[name]] if name in _TABLES else None)
            for name, value in made.state[probe].items()
            if name != _STEP
        }


@dataclass(frozen=True, slots=True, eq=True)
class _Step(_Rule):
    """A step of one parameter."""

    def __call__(self, group: Group, step: Step) -> None:
        parameter = nn.Parameter(step.weights[0])
        parameter.grad = step.gradients[0]
        states = {name: tensors[0] for name, tensors in step.states.items()} | {_STEP: step.counts[0] - 1}
        self.alone(group, parameter, states).update_step(group, parameter, 0, 0)
