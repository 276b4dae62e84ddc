"""How optimizers of ``torch.optim`` update: what each keeps per element, and the function of PyTorch that computes a step.

Each of them treats every element alike, so a part of a parameter can be updated by itself. What a user chose in the optimizer's
groups (``fused``, ``foreach`` or neither) is the implementation that runs, because their roundings differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from autohete.errors import InputError, check_fields
from autohete.workload.optimizers import Optimizer

#: Settings of a group of parameters, as in ``torch.optim.Optimizer.param_groups`` without the parameters.
Group = Mapping[str, Any]
#: Numbers per element that a step without fused kernel allocates at most: a changed gradient and two intermediate results.
TEMPORARIES = 3


@dataclass(frozen=True, slots=True)
class Step:
    """Tensors of one step: those at one index belong together.

    Args:
        weights: changed in place.
        gradients: not changed.
        states: for each of the rule's states its values, changed in place.
        counts: number of steps of each, this one included.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    states: list[list[Tensor]]
    counts: list[int]


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The update of one kind of optimizer.

    Args:
        optimizer: its row in the simulator's table.
        states: names of what it keeps per element, as in PyTorch.
        step: computes a step with the settings of a group.
        counts_steps: whether PyTorch saves the number of steps.
        makes_states: whether the first step of a parameter makes the states, instead of changing zeros.
    """

    optimizer: Optimizer
    states: tuple[str, ...]
    step: Callable[[Group, Step], None]
    counts_steps: bool = True
    makes_states: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def is_in_place(self, group: Group, *, first: bool) -> bool:
        """Whether a step, perhaps the first, allocates nothing and takes any number of tensors at once."""
        return bool(group.get("fused")) and not (first and self.makes_states)


def _counts(step: Step) -> list[Tensor]:
    """Step counts for a kernel: on the host for the CPU and on the device for CUDA; four bytes each, not counted as state."""
    device = step.weights[0].device
    known = {count: torch.full((), count, dtype=torch.float32, device=device) for count in set(step.counts)}
    return [known[count] for count in step.counts]


def _adam_step(group: Group, step: Step) -> None:
    """A step of Adam or AdamW."""
    first, second = step.states
    shared = {name: group[name] for name in ("lr", "weight_decay", "eps", "maximize", "amsgrad")}
    shared |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
    if group["fused"]:  # the functional form would first count up one tensor per parameter
        kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        kernel(step.weights, step.gradients, first, second, [], _counts(step), **shared)
        return
    before = [torch.full((), count - 1, dtype=torch.float32) for count in step.counts]
    flags = {name: group[name] for name in ("foreach", "fused", "decoupled_weight_decay")}
    adam(step.weights, step.gradients, first, second, [], before, **flags, **shared)


def _sgd_step(group: Group, step: Step) -> None:
    """A step of SGD. The first makes the momentum from the gradient."""
    shared = {name: group[name] for name in ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize")}
    buffers: list[Tensor | None] = [None] * len(step.weights)
    makes = bool(step.states) and step.counts[0] == 1
    if step.states and not makes:
        buffers = [*step.states[0]]
    flags = {name: group[name] for name in ("foreach", "fused")}
    sgd(step.weights, step.gradients, buffers, **flags, **shared)
    if makes:
        for there, made in zip(step.states[0], buffers, strict=True):
            assert made is not None
            there.copy_(made)


ADAM = UpdateRule(Optimizer.ADAMW, ("exp_avg", "exp_avg_sq"), _adam_step)
SGD = UpdateRule(Optimizer.SGD, (), _sgd_step, counts_steps=False)
SGD_MOMENTUM = UpdateRule(Optimizer.SGD_MOMENTUM, ("momentum_buffer",), _sgd_step, counts_steps=False, makes_states=True)


def default_optimizer(parameters: Iterable[Tensor], lr: float = 1e-3) -> torch.optim.AdamW:
    """The optimizer if a user gives none: AdamW with betas of 0.9 and 0.95, a decay of 0.1, and the fused kernel."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


@cache
def default_group() -> Group:
    """Its settings."""
    (group,) = default_optimizer([torch.zeros((), requires_grad=True)]).param_groups
    return {name: value for name, value in group.items() if name != "params"}


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """What the updates of an iteration compute.

    Args:
        rule: of all parameters.
        groups: settings of the optimizer's groups.
        members: index of a parameter's group, by ``id`` of the parameter; of any other it is 0.
        masters: whether 16-bit parameters have fp32 master weights and states. Otherwise they are updated as they are, with
            states of their type.
        loss_scale: a power of two by which the loss is multiplied, and gradients divided before they are used.
    """

    rule: UpdateRule = ADAM
    groups: Sequence[Group] = field(default_factory=lambda: (default_group(),))
    members: Mapping[int, int] = field(default_factory=dict)
    masters: bool = True
    loss_scale: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self)

    def has_masters(self, dtype: torch.dtype) -> bool:
        """Whether parameters of ``dtype`` have master weights."""
        return self.masters and dtype is not torch.float32

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Type of the states of such parameters."""
        return torch.float32 if self.has_masters(dtype) else dtype

    def simulated_by(self, dtype: torch.dtype) -> Optimizer:
        """The row of the simulator's table for parameters of ``dtype``.

        Raises:
            InputError: there is none.
        """
        if self.masters or dtype is torch.float32:
            return self.rule.optimizer
        if (self.rule, dtype) != (ADAM, torch.bfloat16):
            raise InputError(
                f"parameters are of {dtype} and are to be updated without master weights, which the simulator knows of "
                "Adam and AdamW in torch.bfloat16 only: leave master_weights out"
            )
        return Optimizer.ADAMW_PURE_BF16

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of optimizer state per element, master weights included."""
        return (len(self.rule.states) + self.has_masters(dtype)) * self.state_dtype(dtype).itemsize
