"""Arguments of a Trainer are checked when they are given, with what to give instead."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.reference import model_for
from support.small import SMALL
from torch import Tensor, nn, ops

from autohete import Trainer
from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.profile import analytic_profile
from autohete.train.caller_optimizer import CallerOptimizer
from autohete.train.gpt import GPT
from autohete.train.trainer import Mode, NonFinite

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an optimizer class": ({"optimizer": torch.optim.AdamW}, "optimizer is the class AdamW: give an optimizer of the model's"),
    "an optimizer as a dict": ({"optimizer": {"lr": 1e-3}}, "optimizer is of type dict"),
    "the optimizer of another model": (
        {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)},
        r"the optimizer has no embedding\.\S+ and \d+ others, which would be trained",
    ),
    "another optimizer": ({"optimizer": torch.optim.Adagrad(nn.Linear(1, 1).parameters())}, "is torch.optim.adagrad.Adagrad"),
    "policy as a class": ({"policy": Trainer}, "policy is the class Trainer: give a name such as 'autohete'"),
    "no policy": ({"policy": None}, "policy is None"),
    "a policy without plan": ({"policy": 3}, "policy is 3"),
    "a loss that is a string": ({"loss": "cross_entropy"}, "loss is 'cross_entropy': give a function"),
    "no loss": ({"loss": None}, "loss is None"),
    "blocks as a module": ({"blocks": nn.ModuleList()}, "blocks is of type ModuleList: give the name"),
    "device as torch.device": ({"device": torch.device("cuda")}, r"device is device\(type='cuda'\): give the text"),
    "hardware as a name": ({"hardware": "v100"}, r"hardware is 'v100': give a Hardware, such as load_hardware"),
    "profile as a path": (
        {"profile": Path("profile.json")},
        r"profile is of type \w*Path: give a Profile, such as read_profile",
    ),
    "a share as a number": ({"gpu_memory": 0.5}, "gpu_memory is 0.5: write a share as text, such as '50%'"),
    "memory as a switch": ({"gpu_memory": True}, "a memory of True is not a size"),
    "memory that is no number": ({"gpu_memory": float("nan")}, "a memory of nan is not a size"),
    "memory of fractions": ({"host_memory": 1.5e9}, "a memory of 1500000000.0 is not a size"),
    "mode as text": ({"mode": "paced"}, r"mode is 'paced': give Mode\.NATIVE or Mode\.PACED"),
    "stop as text": ({"on_nonfinite": "stop"}, r"on_nonfinite is 'stop': give NonFinite\.STOP or NonFinite\.SKIP"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_of_other_types_are_refused(case: str) -> None:
    """One line names the argument, what was given, and what to give."""
    arguments, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        Trainer(model_for(SMALL), **arguments)


def test_models_that_cannot_be_trained_are_refused() -> None:
    """What is no module, has no parameters, or has only frozen ones."""
    frozen = model_for(SMALL).requires_grad_(False)
    for model, message in (
        (model_for, "the model is of type function: give an nn.Module"),
        (nn.Linear, "the model is the class Linear"),
        (nn.ModuleList([nn.ReLU()]), "has no parameters that need gradients"),
        (frozen, "GPT has no parameters that need gradients"),
    ):
        with pytest.raises(InputError, match=message):
            Trainer(model)  # type: ignore[arg-type]


def _doubled(x: Tensor) -> Tensor:
    return 2 * x


class _Doubling(nn.Module):
    """Calls a function of its module."""

    def forward(self, x: Tensor) -> Tensor:
        return _doubled(x)


class _Summing(nn.Module):
    """Names ``torch.ops``, which has any attribute."""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = ops.aten.add(x, x)
        return found


@pytest.mark.parametrize("attribute", [True, False])
def test_compiled_functions_are_refused(*, attribute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would run uncompiled, with other bits: as the loss, as attributes of a module, or where its forward names them."""
    model = model_for(SMALL)
    compiled = torch.compile(_doubled, backend="eager")
    with pytest.raises(InputError, match="the loss is compiled, and would run uncompiled here"):
        Trainer(model, loss=compiled)
    block = model.blocks[0]
    block.summing = _Summing()
    Trainer(model)  # is not compiled
    if attribute:
        vars(block)["act"] = compiled
    else:
        block.doubling = _Doubling()
        Trainer(model)
        monkeypatch.setitem(globals(), "_doubled", compiled)
    named = "act" if attribute else "_doubled"
    with pytest.raises(InputError, match=f"calls {named}, which is compiled"):
        Trainer(model)


@pytest.mark.parametrize("change", ["unfrozen", "frozen", "replaced", "compiled"])
def test_what_changes_before_the_first_step_is_seen(change: str) -> None:
    """The Trainer would train something else than its optimizer has; the error says which parameter."""
    model = model_for(SMALL)
    if change == "unfrozen":
        model.blocks[0].requires_grad_(False)
    trainer = Trainer(model)
    last = model.blocks[1]
    if change == "unfrozen":
        model.blocks[0].requires_grad_(True)
    elif change == "frozen":
        last.requires_grad_(False)
    elif change == "replaced":
        model.blocks[1] = copy.deepcopy(last)
    else:
        last.compile(backend="eager")
    message = {
        "unfrozen": r"blocks\.0\.\S+ is trained, since requires_grad or the model has changed after the Trainer was made",
        "frozen": r"blocks\.1\.\S+ is not trained any more",
        "replaced": r"blocks\.1\.\S+ is trained",
        "compiled": r"blocks\.1 is compiled",
    }
    tokens = torch.zeros(SMALL.batch_size, SMALL.sequence_length, dtype=torch.int64)
    with trainer, pytest.raises(InputError, match=message[change]):
        trainer.step((tokens, tokens))


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": "1e-3"},
        {"lr": torch.tensor([1e-3, 1e-3])},
        {"lr": -1e-3},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"lr": True},
        {"eps": -1e-8},
        {"eps": None},
        {"weight_decay": -0.1},
        {"betas": 0.9},
        {"betas": (0.9,)},
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.9)},
        {"betas": ("0.9", "0.95")},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    """What a caller sets between steps and ``torch.optim.AdamW`` would refuse, or misread, is refused with its name."""
    ((name, _),) = settings.items()
    optimizer = CallerOptimizer(None, model_for(SMALL), masters=True)
    optimizer.given.param_groups[0].update(settings)
    with pytest.raises(InputError, match=rf"^{name} of group 0 of the optimizer (is|are) .*: give "):
        optimizer.updates()


def test_settings_at_the_ends_of_their_ranges_are_taken() -> None:
    """Zeros are allowed where ``torch.optim.AdamW`` allows them."""
    model = model_for(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.0, 0.0), eps=0.0, weight_decay=0.0)
    limits: dict[str, Any] = {"gpu_memory": "1GiB", "host_memory": 2**30}
    with Trainer(model, optimizer=optimizer, on_nonfinite=NonFinite.SKIP, mode=Mode.NATIVE, **limits) as trainer:
        assert trainer.optimizer is optimizer


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would train a model of its own without a word, which is what torchrun's environment shows."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="this process is rank 1 of 2, but they are not connected"):
        Trainer(model_for(SMALL))
    monkeypatch.setenv("WORLD_SIZE", "1")
    Trainer(model_for(SMALL)).close()


def test_ranks_compare_every_figure_of_hardware_and_profile() -> None:
    """What ranks exchange differs if one figure does, although the reprs of both are short and equal."""
    node = load_hardware("rtx4090-workstation")
    other = replace(node, gpu=replace(node.gpu, kernel_overhead_seconds=3e-6))
    assert repr(node) == repr(other)
    given: list[dict[str, Any]] = [{"hardware": one, "profile": None} for one in (node, other)]
    given += [{"hardware": None, "profile": analytic_profile(SMALL, one)} for one in (node, other)]
    described = [Trainer(GPT(SMALL), **one)._options.described() for one in given]
    assert described[0]["hardware"] != described[1]["hardware"]
    assert described[2]["profile"] != described[3]["profile"]
