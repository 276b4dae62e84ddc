"""A caller's ``torch.optim`` optimizers while a Trainer updates in their place.

Each keeps its groups, which the caller or a scheduler changes between steps. Its states live with the Trainer: they
come from ``optimizer.state`` when training begins, are read and replaced by ``optimizer.state_dict()`` and
``optimizer.load_state_dict()``, and go back to ``optimizer.state`` when training ends.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from autohete.errors import InputError
from autohete.runtime.eight_bit import EIGHT_BIT, eight_bit_rule
from autohete.runtime.optimizer import MASTER, STEP
from autohete.runtime.states import GRADIENT
from autohete.runtime.update_rules import Group, UpdateRule, UpdateSettings, default_optimizer, registered_rule

#: States of a parameter by name: its step count, and tensors in its shape.
States = dict[str, Any]


class Running(Protocol):
    """A training that has taken over the states."""

    def read_optimizer(self) -> dict[int, dict[str, Any]]:
        """Its states by the parameter's id, after waiting for all updates."""

    def check_optimizer(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that it can load such states, by the parameters' names."""

    def load_optimizer(self, found: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> None:
        """Replace the states of ``names``; those that are not found are as in the beginning."""


#: What no rule computes.
_NEVER = ("capturable", "differentiable")


class CallerOptimizer:
    """The optimizers of a training.

    Args:
        given: the caller's, one or several; None: AdamW with PyTorch's fused kernel.
        model: the model to train.
        masters: whether 16-bit parameters have fp32 master weights.

    Attributes:
        given: as given; the one that is used if none was given.

    Raises:
        InputError: they cannot be used for this model.
    """

    def __init__(self, given: object, model: nn.Module, *, masters: bool) -> None:
        trained = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        if given is None:
            given = default_optimizer([p for p in model.parameters() if p.requires_grad])
        self._all = _all_of(given)
        self.given: Any = given
        self._masters, self._names = masters, trained
        self._rules = self._rules_now()
        self._members = self._check_members(model)
        self._owners = {id(p): optimizer for optimizer in self._all for p in _parameters_of(optimizer)}
        self._settings = [_kinds_in(group, each.defaults) for each in self._all for group in each.param_groups]
        self._switches, self._kept_states = self._switches_now(), self._states_now()
        self._lent = False  # whether a training has the states
        self._own_hooks: set[int] = set()
        self._check_steps()

    def updates(self, loss_scale: float = 1.0) -> UpdateSettings:
        """What the next step's updates compute.

        Raises:
            InputError: the caller has changed what must not change between steps, or a setting is no number.
        """
        for index, (group, kinds) in enumerate(zip(self._groups(), self._settings, strict=False)):
            _check_group(index, group)
            _check_kinds(index, group, kinds)
        self._check_lent()
        self._check_steps()
        others = self._rules_now() != self._rules or (
            self._switches_now() != self._switches and self._states_now() - self._kept_states
        )
        if self._members_now() != self._members or others:
            raise InputError(
                "the optimizer's groups have other parameters, or keep other states, than when the Trainer was made: make a "
                "new Trainer"
            )
        groups = tuple({name: _copied(value) for name, value in group.items() if name != "params"} for group in self._groups())
        return UpdateSettings(self._rules, groups, self._members, self._masters, loss_scale)

    def check_trained(self, model: nn.Module) -> None:
        """Check that what is trained is the same as when the Trainer was made.

        Raises:
            InputError: names a parameter that is not.
        """
        now = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        for found, names, change in ((now, self._names, "is trained"), (self._names, now, "is not trained any more")):
            if new := [name for one, name in found.items() if one not in names]:
                raise InputError(
                    f"{new[0]} {change}, since requires_grad or the model has changed after the Trainer was made: make it "
                    "after that, with an optimizer of all that is trained"
                )

    def note_step(self) -> None:
        """Tell schedulers that a step has been made: they warn if they are called before."""
        for optimizer in self._all:
            vars(optimizer)["_opt_called"] = True

    # --- states

    def initial(self) -> dict[str, States]:
        """The states in ``optimizer.state`` of the trained parameters that have any, by the parameter's name."""
        return {
            self._names[id(parameter)]: self._checked(self._names[id(parameter)], parameter, states)
            for optimizer in self._all
            for parameter, states in optimizer.state.items()
            if id(parameter) in self._names and states
        }

    def take(self, parameter: Tensor, states: Mapping[str, Any]) -> None:
        """Keep states in ``optimizer.state``."""
        kept, self._lent = self._owners[id(parameter)].state, False
        if found := self._in_pytorchs_form(parameter, states):
            kept[parameter] = found
        else:
            kept.pop(parameter, None)

    def forget(self) -> None:
        """Drop the states of trained parameters from ``optimizer.state``: the training has them."""
        for optimizer in self._all:
            for parameter in [parameter for parameter in optimizer.state if id(parameter) in self._names]:
                del optimizer.state[parameter]
        self._lent = True

    def attach(self, run: Callable[[], Running | None]) -> ExitStack:
        """Serve the optimizers' own methods until the result is closed.

        Args:
            run: returns the training in progress, if there is any.
        """
        undo = ExitStack()
        for optimizer in self._all:
            undo.enter_context(self._attach(optimizer, run))
        return undo

    def _attach(self, optimizer: torch.optim.Optimizer, run: Callable[[], Running | None]) -> ExitStack:
        undo, loading = ExitStack(), threading.local()

        def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if run() is not None:
                raise InputError("a Trainer updates in this optimizer's place: call Trainer.step(batch), not optimizer.step()")

        def fill(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            training = run()
            if training is not None:
                found = training.read_optimizer()
                state_dict["state"] |= {
                    place: states
                    for place, parameter in enumerate(_parameters_of(optimizer))
                    if (states := self._in_pytorchs_form(parameter, found.get(id(parameter), {})))
                }

        def check(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            loading.found, training = self._by_parameter(optimizer, state_dict), run()
            if training is not None:
                training.check_optimizer(self._named(loading.found))

        def loaded(optimizer: torch.optim.Optimizer) -> None:
            training, parameters = run(), list(_parameters_of(optimizer))
            if training is not None:
                self.forget()
                names = [self._names[id(parameter)] for parameter in parameters if id(parameter) in self._names]
                training.load_optimizer(self._named(loading.found), names)
                return
            for parameter in parameters:
                if id(parameter) in loading.found:  # PyTorch has rounded them to the type of 16-bit parameters
                    self.take(parameter, loading.found[id(parameter)])

        self._own_hooks.add(id(refuse))
        undo.callback(self._own_hooks.discard, id(refuse))
        for handle in (
            optimizer.register_step_pre_hook(refuse),
            optimizer.register_state_dict_post_hook(fill),
            optimizer.register_load_state_dict_pre_hook(check),
            optimizer.register_load_state_dict_post_hook(loaded),
        ):
            undo.callback(handle.remove)
        if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:  # it may not call hooks
            own = optimizer.load_state_dict

            def load_state_dict(state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
                check(optimizer, state_dict)
                own(state_dict, *args, **kwargs)
                loaded(optimizer)

            optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]
            undo.callback(vars(optimizer).pop, "load_state_dict", None)
        return undo

    def settings(self) -> list[dict[str, Any]]:
        """The groups as plain values, with the names of their trained parameters."""
        return [
            {name: float(value) if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"}
            | {"params": [self._names[id(p)] for p in group["params"] if id(p) in self._names]}
            for group in self._groups()
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
        for own, group in zip(self._groups(), groups, strict=True):
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
        given = [parameter for optimizer in self._all for parameter in _parameters_of(optimizer)]
        if len(given) > len(members):
            raise InputError(
                f"{len(given) - len(members)} parameters are in several of the {len(self._all)} optimizers: give each to one"
            )
        foreign = [p for p in given if id(p) not in known]
        if foreign:
            raise InputError(
                f"the optimizer has a parameter {tuple(foreign[0].shape)} that is none of the model's: give it the parameters "
                "of this model only, made after the model was moved or converted"
            )
        return members

    def _switches_now(self) -> list[dict[str, bool]]:
        """The settings of each group on which the names of states can depend."""
        return [{name: value for name, value in group.items() if isinstance(value, bool)} for group in self._groups()]

    def _states_now(self) -> set[tuple[int, str]]:
        """The names of the states that each group keeps."""
        return {
            (index, name)
            for index, (group, rule) in enumerate(zip(self._groups(), self._rules_now(), strict=True))
            for parameter in group["params"][:1]
            for name in rule.states(parameter.shape, parameter.dtype, group)
        }

    def _check_lent(self) -> None:
        """Check that nobody has put states where the training would not see them."""
        for optimizer in self._all if self._lent else ():
            for parameter, states in optimizer.state.items():
                if states and id(parameter) in self._names:
                    raise InputError(
                        f"optimizer.state has states of {self._names[id(parameter)]}, but the Trainer has its states while it "
                        "trains: change a copy of optimizer.state_dict() and give it to optimizer.load_state_dict()"
                    )

    def _check_steps(self) -> None:
        """Check that nothing is done in ``optimizer.step`` that would be left out, as it is not called."""
        everywhere = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
        for optimizer in self._all:
            hooks = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values(), *everywhere)
            found = [hook for hook in hooks if id(hook) not in self._own_hooks]
            patched = vars(optimizer).get("step")
            if patched is not None and not _wraps_its_own(optimizer, patched):
                found.append(patched)
            if found:
                name = getattr(found[0], "__qualname__", type(found[0]).__name__)
                raise InputError(
                    f"optimizer.step has a hook or was replaced ({name}), but the Trainer applies the updates and never calls "
                    "optimizer.step: remove it, and do the same before or after Trainer.step; to clip gradients, set clip_norm"
                )

    def _groups(self) -> Iterator[dict[str, Any]]:
        """The groups of all optimizers."""
        return (group for optimizer in self._all for group in optimizer.param_groups)

    def _members_now(self) -> dict[int, int]:
        return {id(p): index for index, group in enumerate(self._groups()) for p in group["params"]}

    def _rules_now(self) -> tuple[UpdateRule, ...]:
        """The rule of each group."""
        return tuple(rule for optimizer in self._all for rule in [rule_of(optimizer)] * len(optimizer.param_groups))

    def _rule(self, parameter: Tensor) -> UpdateRule:
        return self._rules[self._members[id(parameter)]]

    def _named(self, found: Mapping[int, States]) -> dict[str, States]:
        return {self._names[key]: states for key, states in found.items()}

    def _in_pytorchs_form(self, parameter: Tensor, states: Mapping[str, Any]) -> States:
        """States of the runtime, without those that PyTorch makes with the first step only."""
        if not states.get(STEP) and GRADIENT not in states:
            return {}
        tensors = {name: value for name, value in states.items() if name != STEP}
        return self._rule(parameter).saved(states[STEP], tensors)

    def _by_parameter(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[int, States]:
        """The states of a ``state_dict`` by the parameter's id, checked. The optimizer checks the groups."""
        places = [place for group in state_dict["param_groups"] for place in group["params"]]
        found = {}
        for place, parameter in zip(places, _parameters_of(optimizer), strict=False):
            states = state_dict["state"].get(place)
            if states and id(parameter) in self._names:
                found[id(parameter)] = self._checked(self._names[id(parameter)], parameter, states)
        return found

    def _checked(self, name: str, parameter: Tensor, states: Mapping[str, Any]) -> States:
        """States in PyTorch's form as the runtime has them."""
        given: dict[str, Any] = {}
        for key, value in states.items():  # bitsandbytes has some in a dictionary of their own
            given.update(value if isinstance(value, Mapping) else {key: value})
        if STEP not in given and STEP in self._rule(parameter).saved(1, {}):
            raise InputError(f"the optimizer's state of {name} has no step: give the state_dict of the same kind of optimizer")
        found: States = {STEP: int(given.get(STEP, 1))}
        updates = UpdateSettings(self._rules, tuple(self._groups()), self._members, self._masters)
        kept = updates.states_of(parameter.shape, parameter.dtype, updates.group_of(parameter))
        shapes = {part: tuple(state.shape) for part, state in kept.items()} | dict.fromkeys(
            (MASTER, GRADIENT), tuple(parameter.shape)
        )
        for part, shape in shapes.items():
            value = given.get(part)
            if value is None and part in (MASTER, GRADIENT):
                continue
            if not isinstance(value, Tensor) or tuple(value.shape) != shape:
                was = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise InputError(
                    f"{part} of {name} in the optimizer's state is {was}, but has to be {shape}: give the state_dict of the "
                    "same kind of optimizer, of the same model"
                )
            wide = kept[part].dtype if part in kept else torch.float32
            rounds = not self._masters and value.is_floating_point() and wide.is_floating_point  # as PyTorch does
            if part != GRADIENT and value.dtype is not wide and not rounds:
                raise InputError(
                    f"{part} of {name} in the optimizer's state is of {value.dtype}, but has to be of {wide}: "
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
    for index, group in enumerate(optimizer.param_groups):
        for name in _NEVER:
            if group.get(name):
                raise InputError(f"group {index} of the optimizer has {name}, which the Trainer does not support: leave it out")
    rule = registered_rule(optimizer) or eight_bit_rule(optimizer)
    if rule is None:
        kind = type(optimizer)
        raise InputError(
            f"the optimizer is {kind.__module__}.{kind.__qualname__}: a Trainer updates as torch.optim.AdamW, Adam, SGD, "
            f"Adafactor and Muon do, and bitsandbytes' {', '.join(EIGHT_BIT)}, not as their subclasses or others, unless "
            "autohete.runtime.update_rules.register_rule has been given a rule"
        )
    return rule


def _all_of(given: object) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that a caller gives."""
    found = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            what = f"the class {one.__name__}" if isinstance(one, type) else f"of type {type(one).__name__}"
            raise InputError(
                f"optimizer is {what}: give an optimizer of the model's parameters, such as "
                "torch.optim.AdamW(model.parameters(), lr=1e-3), or a list of optimizers"
            )
    if not found:
        raise InputError("the list of optimizers is empty: give an optimizer of the model's parameters")
    return found


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The parameters of all groups, in the order of a ``state_dict``."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _kinds_in(group: Group, names: Container[str]) -> dict[str, str]:
    """The kind of each setting of ``names`` that is a number, a switch, or several numbers."""
    kinds = {name: _kind(value) for name, value in group.items() if name in names}
    return {name: kind for name, kind in kinds.items() if kind}


def _kind(value: object) -> str:
    """What a setting has to stay; empty if it may become anything."""
    if isinstance(value, bool):
        return "true or false"
    if _is_number(value):
        return "a number"
    return f"{len(value)} values" if isinstance(value, (tuple, list)) else ""


def _check_kinds(index: int, group: Group, kinds: Mapping[str, str]) -> None:
    """Check that settings are there and of their kinds: others would fail in the middle of an update."""
    for name, kind in kinds.items():
        if name not in group:
            raise InputError(f"group {index} of the optimizer has no {name} any more: give it {kind}, as it had")
        unset = group[name] is None and kind == "true or false"
        if _kind(group[name]) != kind and not unset:
            raise InputError(f"{name} of group {index} of the optimizer is {group[name]!r}: give {kind}, as it was")


def _check_group(index: int, group: Group) -> None:
    numbers = {name: group.get(name, 0.0) for name in ("lr", "weight_decay", "momentum")}
    eps = group.get("eps", 0.0)  # Adafactor has two, of which the first may follow from the type
    several = isinstance(eps, (tuple, list))
    numbers |= {f"eps[{place}]": one for place, one in enumerate(eps) if one is not None} if several else {"eps": eps}
    for name, value in numbers.items():
        if not _is_number(value) or not 0 <= float(value) < math.inf:
            raise InputError(f"{name} of group {index} of the optimizer is {value!r}: give a finite number that is 0 or more")
    betas = group.get("betas", (0.0, 0.0))
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(_is_number(beta) and 0 <= beta < 1 for beta in betas):
        raise InputError(f"betas of group {index} of the optimizer are {betas!r}: give two numbers in [0, 1)")


def _is_number(value: object) -> bool:
    """Whether it is one number; text would fail only when an update runs."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and not value.is_meta
    return isinstance(value, Real) and not isinstance(value, bool)


def _kind_of(group: Group) -> str:
    """What an optimizer with such a group is, in words."""
    if "decoupled_weight_decay" in group:
        return ("AdamW" if group["decoupled_weight_decay"] else "Adam") + (" with AMSGrad" if group.get("amsgrad") else "")
    if "dampening" in group:
        return "SGD with momentum" if group.get("momentum") else "SGD"
    known = {"beta2_decay": "Adafactor", "ns_steps": "Muon", "t_alpha": "bitsandbytes"}
    return next((kind for setting, kind in known.items() if setting in group), "another optimizer")


def _copied(value: Any) -> Any:
    """A setting that the caller's changes do not reach, as a scheduler fills a tensor."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _wraps_its_own(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> bool:
    """Whether ``step`` wraps the step of the optimizer's class (``functools.wraps``). A scheduler of PyTorch puts such a
    function in its place to count calls, and loops that call the Trainer themselves put one there that does nothing.
    """
    return inspect.unwrap(step) is inspect.unwrap(type(optimizer).step)
