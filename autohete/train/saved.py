"""The saved state of a training run: one dictionary of plain values and tensors, which ``torch.save`` can write.

    format, versions            format of the state, and the versions that wrote it
    step, skipped_steps         number of steps so far, and of skipped ones
    groups                      the settings of the optimizer's groups, with the names of their parameters
    parameters                  name -> values, including frozen ones; a shared matrix only once
    buffers                     name -> values
    optimizer                   name -> step count, states, fp32 master weights of 16-bit parameters, and the gradient that a
                                delayed update has not applied yet
    random                      states of the random generators of PyTorch, Python and NumPy; of other ranks in "ranks"

The state does not depend on where anything was stored, so training can resume under another policy, budget or device. All
tensors are copies on the CPU, in the model's shapes and types.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autohete.errors import InputError
from autohete.runtime.device import device_for
from autohete.runtime.optimizer import MASTER, STEP
from autohete.runtime.states import GRADIENT, VALUES, States
from autohete.runtime.update_rules import StateTensor, UpdateSettings
from autohete.train.caller_optimizer import CallerOptimizer
from autohete.train.machine import versions

_FORMAT = "autohete-training 2"
#: Key of the state of a GPU's random generator.
_OF_GPU = "cuda"
#: Key of the random states of all ranks but the first.
OTHER_RANKS = "ranks"
#: More steps than any training makes. A parameter may have more than the training itself, if its optimizer had some before.
_MOST_STEPS = 10**10
_PARTS = ("buffers", "format", "groups", "optimizer", "parameters", "random", "skipped_steps", "step", "versions")


def state_of(
    model: nn.Module, states: States, optimizer: CallerOptimizer, step: int, skipped_steps: int, device: torch.device
) -> dict[str, Any]:
    """Return the state of a training run whose updates have all ended."""
    places = states.places()
    parameters: dict[str, Tensor] = {}
    of_optimizer: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in places:
            parameters[name] = states.values(*places[id(parameter)])
        else:
            parameters[name] = parameter.detach().to("cpu", copy=True)
        if parameter.requires_grad:
            of_optimizer[name] = states.saved_states(*places[id(parameter)])
    return {
        "format": _FORMAT,
        "versions": versions(),
        "step": step,
        "skipped_steps": skipped_steps,
        "groups": optimizer.settings(),
        "parameters": parameters,
        "buffers": {name: buffer.detach().to("cpu", copy=True) for name, buffer in model.named_buffers()},
        "optimizer": of_optimizer,
        "random": _random_states(device),
    }


def check_state(state: object, model: nn.Module, optimizer: CallerOptimizer, states: States | None) -> Mapping[str, Any]:
    """Return ``state`` if it can be loaded.

    Args:
        state: the state to load.
        model: the model to train.
        optimizer: the trainer's.
        states: the model states, if they have been taken over.

    Raises:
        InputError: the state belongs to another model or another optimizer.
    """
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        raise InputError(f"this is not a saved training state ({_FORMAT!r}): give the result of Trainer.state_dict()")
    _same_names("the state", _PARTS, state)
    for part in ("buffers", "optimizer", "parameters", "random"):
        if not isinstance(state[part], Mapping):
            raise InputError(f"{part} of the state is {type(state[part]).__name__}: give the result of Trainer.state_dict()")
    for count in ("step", "skipped_steps"):
        _check_count(count, state[count])
    if state["skipped_steps"] > state["step"]:
        raise InputError(f"the state has {state['skipped_steps']} skipped steps of {state['step']}: it is damaged")
    parameters = dict(model.named_parameters())
    _same_names("parameters of the state", parameters, state["parameters"])
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    _same_names("trained parameters of the state", trained, state["optimizer"])
    _same_names("buffers of the state", dict(model.named_buffers()), state["buffers"])
    for name, tensor in (*parameters.items(), *model.named_buffers()):
        part = "parameters" if name in parameters else "buffers"
        _check_tensor(name, state[part][name], tensor.shape, tensor.dtype)
    updates = optimizer.updates()
    for name in trained:
        _check_optimizer(name, state["optimizer"][name], parameters[name], updates)
    if states is not None:
        check_delayed(state, model, states)
    optimizer.check_settings(state["groups"])
    _check_random(state["random"])
    return state


def check_delayed(state: Mapping[str, Any], model: nn.Module, states: States) -> None:
    """Check that gradients that wait for a delayed update are only loaded where updates are delayed.

    Raises:
        InputError: names the parameter.
    """
    places = states.places()
    for name, parameter in model.named_parameters():
        if GRADIENT in state["optimizer"].get(name, {}) and not states.delays(places[id(parameter)][0]):
            raise InputError(
                f"the state has a gradient of {name} that waits for a delayed update, but this policy does not delay "
                "updates: use a policy that does, such as the one that saved the state"
            )


def load_values(state: Mapping[str, Any], model: nn.Module, states: States | None) -> None:
    """Set the values of buffers, and of the parameters that ``states`` have not taken over."""
    taken = {} if states is None else states.places()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if id(parameter) not in taken:
                parameter.copy_(state["parameters"][name])
        for name, buffer in model.named_buffers():
            buffer.copy_(state["buffers"][name])


def load_states(state: Mapping[str, Any], model: nn.Module, states: States, *, by_masters: bool = False) -> None:
    """Set the model states, wherever they are stored. All updates must have ended.

    A state without ``parameters`` leaves their values unchanged; master weights that do not match them are replaced, or, if
    ``by_masters``, the values follow from them. Parameters that its ``optimizer`` does not name keep their states; states that
    are not there are as in the beginning.
    """
    places = states.places()
    for name, parameter in model.named_parameters():
        if id(parameter) not in places:
            continue
        i, place = places[id(parameter)]
        values = state.get("parameters", {}).get(name)
        if not parameter.requires_grad:
            if values is not None:
                states.assign(i, place, values)
            continue
        if name not in state["optimizer"]:
            continue
        given = dict(state["optimizer"][name])
        if values is None:
            values = given[MASTER].to(parameter.dtype) if by_masters and MASTER in given else states.values(i, place)
        beginning = {VALUES: values, STEP: 0, MASTER: values.float()}
        states.load(i, place, beginning | given)
        states.assign(i, place, values)


def set_random_states(state: Mapping[str, Any], device: torch.device, rank: int = 0) -> None:
    """Restore the states of the random generators. Those of a rank that the state does not have stay as they are."""
    of_ranks = [state["random"], *state["random"].get(OTHER_RANKS, ())]
    if rank >= len(of_ranks):
        return
    found = of_ranks[rank]
    torch.set_rng_state(found["torch"])
    here = device_for(device)
    if here.random_state() is not None and _OF_GPU in found:
        here.set_random_state(found[_OF_GPU])
    random.setstate(found["python"])
    name, keys, position, has_gauss, gauss = found["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))


def _random_states(device: torch.device) -> dict[str, Any]:
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    found = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)),
    }
    of_gpu = device_for(device).random_state()
    return found | ({} if of_gpu is None else {_OF_GPU: of_gpu})


def _same_names(what: str, expected: Iterable[str], given: Mapping[str, Any]) -> None:
    missing, foreign = sorted(set(expected) - set(given)), sorted(map(str, set(given) - set(expected)))
    if missing or foreign:
        lacks = f"missing {_some(missing)}" if missing else ""
        has = f"unexpected {_some(foreign)}" if foreign else ""
        raise InputError(f"{what}: {', '.join(filter(None, (lacks, has)))}; load a state of the same model")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _check_tensor(name: str, given: object, shape: torch.Size, dtype: torch.dtype) -> None:
    if not isinstance(given, Tensor):
        raise InputError(f"{name} of the state is {type(given).__name__}: it must be a tensor")
    if given.layout is not torch.strided or given.is_meta or given.is_quantized:
        raise InputError(f"{name} of the state is a tensor of layout {given.layout} on {given.device}: it must have values")
    if (given.shape, given.dtype) != (shape, dtype):
        raise InputError(
            f"{name} of the state is {tuple(given.shape)} of {given.dtype}, here it is {tuple(shape)} of {dtype}: load a state "
            "of the same model in the same type"
        )


def _check_count(name: str, given: object) -> None:
    if type(given) is not int or given < 0:
        raise InputError(f"{name} of the state is {given!r}: it must be a whole number of at least 0")


def _check_optimizer(name: str, given: object, parameter: Tensor, updates: UpdateSettings) -> None:
    if not isinstance(given, Mapping):
        raise InputError(f"the optimizer's state of {name} is {type(given).__name__}: give the result of Trainer.state_dict()")
    shape = parameter.shape
    kept = updates.states_of(shape, parameter.dtype, updates.group_of(parameter))
    tensors = kept | ({MASTER: StateTensor(shape, torch.float32)} if updates.has_masters(parameter.dtype) else {})
    _same_names(f"optimizer's states of {name}", (STEP, *tensors, *({GRADIENT} & set(given))), given)
    _check_count(f"step of {name}", given[STEP])
    if given[STEP] > _MOST_STEPS:
        raise InputError(f"step of {name} of the state is {given[STEP]}, more than any training makes: the state is damaged")
    for part, there in tensors.items():
        _check_tensor(f"{part} of {name}", given[part], torch.Size(there.shape), there.dtype)
        lowest = 0.0 if there.is_square else -math.inf
        if given[part].numel() and not (given[part].min() >= lowest and torch.isfinite(given[part]).all()):
            raise InputError(f"{part} of {name} of the state has values that training never gives: the state is damaged")
    if GRADIENT in given:
        _check_tensor(f"{GRADIENT} of {name}", given[GRADIENT], parameter.shape, parameter.dtype)


def _check_random(given: Mapping[str, Any]) -> None:
    _same_names("random states of the state", ("torch", "python", "numpy", *({_OF_GPU, OTHER_RANKS} & set(given))), given)
    others = given.get(OTHER_RANKS, [])
    if not isinstance(others, list) or not all(isinstance(one, Mapping) and OTHER_RANKS not in one for one in others):
        raise InputError("the random states of the state's other ranks are no list of states: the state is damaged")
    for other in others:
        _check_random(other)
    try:
        torch.Generator().set_state(given["torch"])
        random.Random().setstate(given["python"])
        name, keys, position, has_gauss, gauss = given["numpy"]
        np.random.RandomState().set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise InputError(
            f"the random states of the state cannot be read ({error}): give the result of Trainer.state_dict()"
        ) from None
