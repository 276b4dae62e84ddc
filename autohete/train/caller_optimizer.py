"""A caller's ``torch.optim`` optimizer while a Trainer updates in its place.

The optimizer keeps its groups, which the caller or a scheduler changes between steps. Its states live with the Trainer: they
come from ``optimizer.state`` when training begins, are read and replaced by ``optimizer.state_dict()`` and
``optimizer.load_state_dict()``, and go back to ``optimizer.state`` when training ends.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autohete.errors import InputError
from autohete.runtime.optimizer import MASTER, STEP
from autohete.runtime.states import GRADIENT
from autohete.runtime.update_rules import ADAM, SGD, SGD_MOMENTUM, Group, UpdateRule, UpdateSettings, default_optimizer

#: States of a parameter by name: its step count, and tensors in its shape.
States = dict[str, Any]


class Running(Protocol):
    """A training that has taken over the states."""

    def read_optimizer(self) -> dict[int, dict[str, Any]]:
        """Its states by the parameter's id, after waiting for all updates."""

    def check_optimizer(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that it can load such states, by the parameters' names."""

    def load_optimizer(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace its states."""


#: What no rule computes.
_NEVER = ("amsgrad", "capturable", "differentiable")


class CallerOptimizer:
    """The optimizer of a training.

    Args:
        given: the caller's; None: AdamW with PyTorch's fused kernel.
        model: the model to train.
        masters: whether 16-bit parameters have fp32 master weights.

    Attributes:
        torch: the ``torch.optim`` optimizer.
        rule: how it updates.

    Raises:
        InputError: it cannot be used for this model.
    """

    def __init__(self, given: object, model: nn.Module, *, masters: bool) -> None:
        trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        if given is None:
            given = default_optimizer([p for p in model.parameters() if p.requires_grad])
        if not isinstance(given, torch.optim.Optimizer):
            what = f"the class {given.__name__}" if isinstance(given, type) else f"of type {type(given).__name__}"
            raise InputError(
                f"optimizer is {what}: give an optimizer of the model's parameters, such as "
                "torch.optim.AdamW(model.parameters(), lr=1e-3)"
            )
        self.torch, self._masters, self._names = given, masters, trained
        self.rule = rule_of(given)
        self._members = self._check_members(model)

    def updates(self, loss_scale: float = 1.0) -> UpdateSettings:
        """What the next step's updates compute.

        Raises:
            InputError: the caller has changed what must not change between steps, or a setting is no number.
        """
        if self._members_now() != self._members or (rule := rule_of(self.torch)) is not self.rule:
            raise InputError(
                "the optimizer's groups have other parameters, or keep other states, than when the Trainer was made: make a "
                "new Trainer"
            )
        groups = tuple(
            {name: _copied(value) for name, value in group.items() if name != "params"} for group in self.torch.param_groups
        )
        for index, group in enumerate(groups):
            _check_group(index, group)
        return UpdateSettings(rule, groups, self._members, self._masters, loss_scale)

    def note_step(self) -> None:
        """Tell schedulers that a step has been made: they warn if they are called before."""
        vars(self.torch)["_opt_called"] = True

    # --- states

    def initial(self) -> dict[str, States]:
        """The states in ``optimizer.state`` of the trained parameters that have any, by the parameter's name."""
        return {
            self._names[id(parameter)]: self._checked(self._names[id(parameter)], parameter, states)
            for parameter, states in self.torch.state.items()
            if id(parameter) in self._names and states
        }

    def take(self, parameter: Tensor, states: Mapping[str, Any]) -> None:
        """Keep states in ``optimizer.state``."""
        if found := self._in_pytorchs_form(states):
            self.torch.state[parameter] = found
        else:
            self.torch.state.pop(parameter, None)

    def forget(self) -> None:
        """Drop the states of trained parameters from ``optimizer.state``: the training has them."""
        for parameter in [parameter for parameter in self.torch.state if id(parameter) in self._names]:
            del self.torch.state[parameter]

    def attach(self, run: Callable[[], Running | None]) -> ExitStack:
        """Serve the optimizer's own methods until the result is closed.

        Args:
            run: returns the training in progress, if there is any.
        """
        undo, optimizer = ExitStack(), self.torch
        loading = threading.local()

        def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if run() is not None:
                raise InputError("a Trainer updates in this optimizer's place: call Trainer.step(batch), not optimizer.step()")

        def fill(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            training = run()
            if training is not None:
                found = training.read_optimizer()
                places = (p for group in optimizer.param_groups for p in group["params"])
                state_dict["state"] |= {
                    place: states
                    for place, parameter in enumerate(places)
                    if (states := self._in_pytorchs_form(found.get(id(parameter), {})))
                }

        def check(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            loading.found, training = self._by_parameter(state_dict), run()
            if training is not None:
                training.check_optimizer(self._named(loading.found))

        def loaded(optimizer: torch.optim.Optimizer) -> None:
            training = run()
            if training is not None:
                self.forget()
                training.load_optimizer(self._named(loading.found))
                return
            for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
                if id(parameter) in loading.found:  # PyTorch has rounded them to the type of 16-bit parameters
                    self.take(parameter, loading.found[id(parameter)])

        for handle in (
            optimizer.register_step_pre_hook(refuse),
            optimizer.register_state_dict_post_hook(fill),
            optimizer.register_load_state_dict_pre_hook(check),
            optimizer.register_load_state_dict_post_hook(loaded),
        ):
            undo.callback(handle.remove)
        return undo

    def settings(self) -> list[dict[str, Any]]:
        """The groups as plain values, with the names of their trained parameters."""
        return [
            {name: float(value) if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"}
            | {"params": [self._names[id(p)] for p in group["params"] if id(p) in self._names]}
            for group in self.torch.param_groups
        ]

    def check_settings(self, groups: object) -> None:
        """Check the result of :meth:`settings` of another training.

        Raises:
            InputError: it is of other groups, or of another kind of optimizer.
        """
        here = self.settings()
        if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
            raise InputError("the groups of the state are no list of settings: give the result of Trainer.state_dict()")
        if [group.get("params") for group in groups] != [group["params"] for group in here]:
            raise InputError(
                f"the state's {len(groups)} groups have other parameters than the optimizer's {len(here)}: give the Trainer "
                "an optimizer with the same groups"
            )
        for index, (group, own) in enumerate(zip(groups, here, strict=True)):
            missing = sorted({*own} - {*group, "initial_lr"})
            if missing or _kind_of(group) != _kind_of(own):
                found = f"lack {', '.join(missing)}" if missing else f"are of {_kind_of(group)}"
                raise InputError(f"the settings of group {index} of the state {found}: give the Trainer the same optimizer")
            _check_group(index, group)

    def use_settings(self, groups: list[dict[str, Any]]) -> None:
        """Use the result of :meth:`settings` of another training."""
        for own, group in zip(self.torch.param_groups, groups, strict=True):
            for name, value in group.items():
                if isinstance(own.get(name), Tensor):  # whoever holds it sees the value
                    own[name].fill_(value)
                elif name != "params":
                    own[name] = value

    def _check_members(self, model: nn.Module) -> dict[int, int]:
        members = self._members_now()
        missing = [name for key, name in self._names.items() if key not in members]
        if missing:
            raise InputError(
                f"the optimizer has no {missing[0]}{f' and {len(missing) - 1} others' if missing[1:] else ''}, which would be "
                "trained: give it all parameters of the model that need gradients, or freeze the others with "
                "requires_grad_(False)"
            )
        known = {id(parameter) for parameter in model.parameters()}
        foreign = [p for group in self.torch.param_groups for p in group["params"] if id(p) not in known]
        if foreign:
            raise InputError(
                f"the optimizer has a parameter {tuple(foreign[0].shape)} that is none of the model's: give it the parameters "
                "of this model only, made after the model was moved or converted"
            )
        return members

    def _members_now(self) -> dict[int, int]:
        return {id(p): index for index, group in enumerate(self.torch.param_groups) for p in group["params"]}

    def _named(self, found: Mapping[int, States]) -> dict[str, States]:
        return {self._names[key]: states for key, states in found.items()}

    def _in_pytorchs_form(self, states: Mapping[str, Any]) -> States:
        """States of the runtime, without those that PyTorch makes with the first step only."""
        if not states.get(STEP) and GRADIENT not in states:
            return {}
        step = {STEP: torch.tensor(float(states[STEP]))} if self.rule.counts_steps else {}
        return step | {name: value for name, value in states.items() if name != STEP}

    def _by_parameter(self, state_dict: Mapping[str, Any]) -> dict[int, States]:
        """The states of a ``state_dict`` by the parameter's id, checked. PyTorch checks the groups."""
        parameters = [parameter for group in self.torch.param_groups for parameter in group["params"]]
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        found = {}
        for place, parameter in zip(places, parameters, strict=False):
            states = state_dict["state"].get(place)
            if states and id(parameter) in self._names:
                found[id(parameter)] = self._checked(self._names[id(parameter)], parameter, states)
        return found

    def _checked(self, name: str, parameter: Tensor, states: Mapping[str, Any]) -> States:
        """States in PyTorch's form as the runtime has them."""
        if self.rule.counts_steps and STEP not in states:
            raise InputError(f"the optimizer's state of {name} has no step: give the state_dict of the same kind of optimizer")
        found: States = {STEP: int(states.get(STEP, 1))}
        for part in (*self.rule.states, MASTER, GRADIENT):
            value = states.get(part)
            if value is None and part in (MASTER, GRADIENT):
                continue
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise InputError(
                    f"{part} of {name} in the optimizer's state is {shape}, the parameter {tuple(parameter.shape)}: give the "
                    "state_dict of the same kind of optimizer, of the same model"
                )
            if part != GRADIENT and self._masters and value.dtype is not torch.float32:
                raise InputError(
                    f"{part} of {name} in the optimizer's state is of {value.dtype}, but with master weights of torch.float32: "
                    "optimizer.load_state_dict rounds states to the type of the parameters, so call it once the Trainer is "
                    "made, or give master_weights=False"
                )
            found[part] = value.detach().to("cpu", copy=True)
        return found


def rule_of(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """How an optimizer updates.

    Raises:
        InputError: there is no rule for it; says for which there is.
    """
    kind, groups = type(optimizer), optimizer.param_groups
    for index, group in enumerate(groups):
        for name in _NEVER:
            if group.get(name):
                raise InputError(f"group {index} of the optimizer has {name}, which the Trainer does not support: leave it out")
    if kind in (torch.optim.AdamW, torch.optim.Adam):
        return ADAM
    if kind is torch.optim.SGD:
        keep = {bool(group["momentum"]) for group in groups}
        if len(keep) > 1:
            raise InputError("some groups of SGD have momentum and others none: give all of them momentum, or none")
        return SGD_MOMENTUM if keep == {True} else SGD
    raise InputError(
        f"the optimizer is {kind.__module__}.{kind.__qualname__}: a Trainer updates as torch.optim.AdamW, Adam and SGD do, not "
        "as their subclasses or others"
    )


def _check_group(index: int, group: Group) -> None:
    for name in ("lr", "eps", "weight_decay", "momentum"):
        value = group.get(name, 0.0)
        if not _is_number(value) or not 0 <= float(value) < math.inf:
            raise InputError(f"{name} of group {index} of the optimizer is {value!r}: give a finite number that is 0 or more")
    betas = group.get("betas", (0.0, 0.0))
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise InputError(f"betas of group {index} of the optimizer are {betas!r}: give two numbers in [0, 1)")


def _is_number(value: object) -> bool:
    """Whether it is one number; text would fail only when an update runs."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kind_of(group: Group) -> str:
    """What an optimizer with such a group is, in words."""
    if "betas" in group:
        return "AdamW" if group.get("decoupled_weight_decay") else "Adam"
    return "SGD with momentum" if group.get("momentum") else "SGD"


def _copied(value: Any) -> Any:
    """A setting that the caller's changes do not reach, as a scheduler fills a tensor."""
    return value.detach().clone() if isinstance(value, Tensor) else value
