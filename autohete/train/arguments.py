"""Checks of a Trainer's arguments; each error says what to give instead."""

from __future__ import annotations

import torch
from torch import nn

from autohete.errors import InputError
from autohete.hardware import Hardware
from autohete.profile import Profile
from autohete.runtime.optimizer import Adam
from autohete.workload.training import FULL


def check_arguments(
    model: object, policy: object, loss: object, adam: object, units: object, device: object, hardware: object, profile: object
) -> None:
    """Check the types of a Trainer's arguments.

    Raises:
        InputError: names the argument and what to give.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is {_named(model)}: give an nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"{type(model).__name__} has no parameters that need gradients: there is nothing to train")
    if not isinstance(policy, str) and (isinstance(policy, type) or not callable(getattr(policy, "plan", None))):
        raise InputError(f"policy is {_named(policy)}: give a name such as 'autohete', or an object with a method plan")
    if not callable(loss):
        raise InputError(f"loss is {_named(loss)}: give a function of logits and targets, such as next_token_loss")
    if adam is not None and not isinstance(adam, Adam):
        raise InputError(
            f"adam is {_named(adam)}: give its settings, such as autohete.runtime.optimizer.Adam(lr=1e-3). AdamW is "
            "the only optimizer, and set_learning_rate changes its rate between steps"
        )
    if units is not None and not isinstance(units, str):
        raise InputError(f"blocks is {_named(units)}: give the name of the block list as text, such as 'transformer.h'")
    if not isinstance(device, str):
        raise InputError(f"device is {device!r}: give the text 'emulated' or 'cuda'")
    if hardware is not None and not isinstance(hardware, Hardware):
        raise InputError(f"hardware is {_named(hardware)}: give a Hardware, such as load_hardware('v100-32gb-dgx2')")
    if profile is not None and not isinstance(profile, Profile):
        raise InputError(f"profile is {_named(profile)}: give a Profile, such as read_profile('profile.json')")
    if profile is not None and profile.workload.training != FULL:
        raise InputError(
            f"profile is for {profile.workload.training}, which only the simulator has: freeze parameters with requires_grad, "
            "and profile the model as it is"
        )


def _named(value: object) -> str:
    """Describe a value in a message: its text if that is short, otherwise its type."""
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


def check_modes() -> None:
    """Reject PyTorch modes that are active in the calling thread but not in the threads that compute.

    Raises:
        InputError: names the mode and the alternative.
    """
    if torch.is_inference_mode_enabled():
        raise InputError("a step cannot run under torch.inference_mode(): leave it first")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise InputError(
            "torch.autocast around a step does not reach the threads that compute: convert the model to the compute type "
            "(model.to(torch.bfloat16); master weights stay in fp32), or use autocast inside the model's blocks"
        )
    if torch.get_default_device().type != "cpu":
        raise InputError(
            f"torch.set_default_device({str(torch.get_default_device())!r}) does not reach the threads that compute: reset "
            "it with torch.set_default_device(None), and create the model's tensors on an explicit device"
        )
