"""Checks and conversions of a Trainer's arguments; each error says what to give instead."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autohete.errors import InputError
from autohete.hardware import Hardware
from autohete.plan.policy import Policy
from autohete.policies import parse_policy
from autohete.profile import Profile
from autohete.quantities import parse_quantity
from autohete.runtime.autocast import Autocast
from autohete.runtime.device import gpu_here
from autohete.runtime.partition import is_compiled
from autohete.runtime.settings import Recipe
from autohete.runtime.update_rules import UpdateSettings
from autohete.workload import check_clip_norm
from autohete.workload.training import FULL


def check_model(model: object) -> None:
    """Check that there is something to train.

    Raises:
        InputError: says what to give.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is {_named(model)}: give an nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"{type(model).__name__} has no parameters that need gradients: there is nothing to train")


def policy_of(given: object) -> Policy:
    """Return the policy that a user gives as text, such as ``stronghold:window=2``, or as an object.

    Raises:
        InputError: it is not a policy.
    """
    if isinstance(given, str):
        return parse_policy(given)
    if isinstance(given, type) or not callable(getattr(given, "plan", None)):
        raise InputError(f"policy is {_named(given)}: give a name such as 'autohete', or an object with a method plan")
    return cast(Policy, given)


def recipe_of(
    loss: object, updates: UpdateSettings, clip_norm: float | None, autocast: object = None, *, skips: bool
) -> Recipe:
    """Return what a step computes.

    Args:
        loss: function of logits and targets.
        updates: what the updates compute.
        clip_norm: maximum global norm of the gradients; None: they are not clipped.
        autocast: type in which forward and loss compute under ``torch.autocast``; None: without.
        skips: whether to skip steps whose loss or gradients are not finite.

    Raises:
        InputError: names the argument and what to give.
    """
    check_clip_norm(clip_norm)
    if not callable(loss):
        raise InputError(f"loss is {_named(loss)}: give a function of logits and targets, such as next_token_loss")
    if is_compiled(loss):
        raise InputError(
            "the loss is compiled, and would run uncompiled here, so its results would differ: give the original function"
        )
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise InputError(f"autocast is {autocast!r}: give torch.bfloat16 or torch.float16, or leave it out")
    return Recipe(loss, updates, clip_norm, skips, autocast)


def check_blocks(name: object) -> None:
    """Check the names of blocks; None: they are found.

    Raises:
        InputError: says what to give.
    """
    names = name if isinstance(name, (list, tuple)) and name else [name]
    if name is not None and not all(isinstance(one, str) for one in names):
        raise InputError(f"blocks is {_named(name)}: give the name of a list of blocks, such as 'transformer.h', or several")


def check_hardware(hardware: object) -> None:
    """Check that a hardware is one, or None.

    Raises:
        InputError: says what to give.
    """
    if hardware is not None and not isinstance(hardware, Hardware):
        raise InputError(f"hardware is {_named(hardware)}: give a Hardware, such as load_hardware('v100-32gb-dgx2')")


def check_profile(profile: object) -> None:
    """Check that a profile is one that can be trained with, or None.

    Raises:
        InputError: says what to give.
    """
    if profile is not None and not isinstance(profile, Profile):
        raise InputError(f"profile is {_named(profile)}: give a Profile, such as read_profile('profile.json')")
    if profile is not None and replace(profile.workload.training, optimizer=FULL.optimizer) != FULL:
        raise InputError(
            f"profile is for {profile.workload.training}, which only the simulator has: freeze parameters with requires_grad, "
            "and profile the model as it is"
        )


def device_of(name: str) -> torch.device:
    """Return the device that a user names.

    Raises:
        InputError: it is unknown, or there is none.
    """
    if not isinstance(name, str):
        raise InputError(f"device is {name!r}: give the text 'emulated' or 'cuda'")
    if name == "emulated":
        return torch.device("cpu")
    if name == "cuda":
        gpu = gpu_here()
        if gpu is None:
            raise InputError("there is no GPU that PyTorch can use here: choose the device 'emulated'")
        return gpu
    raise InputError(f"unknown device {name!r}: choose emulated or cuda")


def bytes_of(given: int | str | None) -> int | None:
    """Return the bytes that a size means, such as ``24MiB``.

    Raises:
        InputError: it is not a size.
    """
    if given is not None and (isinstance(given, bool) or not isinstance(given, (int, str))):
        raise InputError(f"a memory of {given!r} is not a size: give a whole number of bytes, or text such as 24MiB")
    size = round(parse_quantity(given, "bytes")) if isinstance(given, str) else given
    if size is not None and size < 1:
        raise InputError(f"a memory of {size} bytes is too small: give a positive number, or text such as 24MiB")
    return size


def share_of(given: int | str | None) -> float | None:
    """Return the share that text such as ``25%`` means; None for anything else."""
    if not isinstance(given, str) or not given.strip().endswith("%"):
        return None
    try:
        share = float(given.strip().removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 < share < 1e6:
        raise InputError(f"{given!r} is not a share of memory: write it such as 25%")
    return share


def _named(value: object) -> str:
    """Describe a value in a message: its text if that is short, otherwise its type."""
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


def check_modes(autocast: Autocast) -> None:
    """Reject PyTorch modes that are active in the calling thread but not in the threads that compute. Warn about a profiler
    that records only the calling thread.

    Args:
        autocast: the mode in which the threads compute.

    Raises:
        InputError: names the mode and the alternative.
    """
    if torch._C._autograd._profiler_enabled():
        warnings.warn(
            "torch.profiler records the calling thread only, but a step computes in others: give it experimental_config="
            "torch._C._profiler._ExperimentalConfig(profile_all_threads=True)",
            stacklevel=3,
        )
    if torch.is_inference_mode_enabled():
        raise InputError("a step cannot run under torch.inference_mode(): leave it first")
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and not getattr(hooks[0], "__qualname__", "").startswith("save_on_cpu."):  # which changes no value
        raise InputError(
            "torch.autograd.graph.saved_tensors_hooks around a step do not reach the threads that compute: leave them, or set "
            "them within the blocks"
        )
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = [*functions, *_get_current_dispatch_mode_stack()]
    if found := [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]:
        raise InputError(f"the mode {found[-1]} around a step does not reach the threads that compute: leave it first")
    around = Autocast.now()
    if around not in (Autocast(), autocast):
        types = " and ".join(str(dtype) for _, dtype in around.types)
        raise InputError(
            f"torch.autocast around a step, here to {types}, does not reach the threads that compute: give the Trainer "
            f"autocast={around.types[0][1]} as well"
        )
    if torch.get_default_device().type != "cpu":
        raise InputError(
            f"torch.set_default_device({str(torch.get_default_device())!r}) does not reach the threads that compute: reset "
            "it with torch.set_default_device(None), and create the model's tensors on an explicit device"
        )
