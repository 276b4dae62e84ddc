"""What a caller changes between steps takes effect or is refused before anything has changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.reference import batches, model_for
from support.small import SMALL
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autohete import Trainer
from autohete.errors import InputError, NonFiniteLossError
from autohete.hardware import load_hardware
from autohete.runtime.shared_memory import check_apart

#: Measured times do not matter here.
HARDWARE = load_hardware("rtx4090-workstation")


def trainer_for(model: nn.Module, optimizer: Any = None, policy: str = "zero_offload") -> Trainer:
    return Trainer(model, optimizer=optimizer, policy=policy, hardware=HARDWARE)


def settings_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    group: dict[str, Any] = optimizer.param_groups[0]
    return group


#: Optimizers, changes of their first group, and what is said of them.
CHANGES: list[tuple[type[torch.optim.Optimizer], Callable[[dict[str, Any]], Any], str]] = [
    (torch.optim.AdamW, lambda group: group.update(amsgrad=True), "keep other states"),
    (torch.optim.AdamW, lambda group: group.update(eps=(1e-8, 1e-8)), "eps of group 0 .* give a number"),
    (torch.optim.AdamW, lambda group: group.pop("lr"), "group 0 of the optimizer has no lr any more: give it a number"),
    (torch.optim.AdamW, lambda group: group.pop("betas"), "has no betas any more: give it 2 values"),
    (torch.optim.AdamW, lambda group: group.update(lr=torch.tensor(0.1 + 1j)), "lr of group 0"),
    (torch.optim.AdamW, lambda group: group.update(lr=torch.tensor(0.1, device="meta")), "lr of group 0"),
    (torch.optim.AdamW, lambda group: group.update(maximize="yes"), "maximize of group 0 .* give true or false"),
    (torch.optim.SGD, lambda group: group.update(dampening="x"), "dampening of group 0 .* give a number"),
    (torch.optim.Adafactor, lambda group: group.update(eps=1e-3), "eps of group 0 .* give 2 values"),
    (torch.optim.Adafactor, lambda group: group.update(eps=(None,)), "eps of group 0 .* give 2 values"),
    (torch.optim.Adafactor, lambda group: group.update(beta2_decay=None), "beta2_decay of group 0"),
]


@pytest.mark.parametrize(("kind", "change", "message"), CHANGES)
def test_bad_settings_are_refused_before_the_step(
    kind: type[torch.optim.Optimizer], change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    """They would fail in the middle of an update; once they are as before, training goes on as if nothing had been."""
    model, given = model_for(SMALL), batches(SMALL, 2)
    optimizer: Any = kind(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    with trainer_for(model, optimizer, "resident") as trainer:
        trainer.step(given[0])
        before, group = trainer.parameters(), settings_of(optimizer)
        was = dict(group)
        change(group)
        with pytest.raises(InputError, match=message):
            trainer.step(given[1])
        assert all(map(torch.equal, before, trainer.parameters()))
        group.update(was)
        trainer.step(given[1])
        assert trainer.steps == 2
    assert trainer.steps == 2
    assert trainer.skipped_steps == 0


def test_settings_may_be_any_numbers() -> None:
    """Of NumPy as well, and a switch may be left to PyTorch."""
    model = model_for(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True, fused=True)
    with trainer_for(model, optimizer, "resident") as trainer:
        trainer.step(batches(SMALL, 1)[0])
        settings_of(optimizer).update(lr=np.float32(0.01), fused=None, amsgrad=False)
        trainer.step(batches(SMALL, 1)[0])


def test_states_put_into_the_optimizer_are_refused() -> None:
    """The Trainer would not see them."""
    model, batch = model_for(SMALL), batches(SMALL, 1)[0]
    optimizer = torch.optim.AdamW(model.parameters())
    parameter = next(model.parameters())
    with trainer_for(model, optimizer) as trainer:
        trainer.step(batch)
        optimizer.state[parameter] = {"step": torch.tensor(0.0)}
        with pytest.raises(InputError, match=r"optimizer\.state has states of .* give it to optimizer\.load_state_dict"):
            trainer.step(batch)
        del optimizer.state[parameter]
        trainer.step(batch)
    assert optimizer.state[parameter]["step"] == 2


# --- shared memory ------------------------------------------------------------------------------------------------


def matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Two of the same shape."""
    shapes: dict[torch.Size, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and parameter.shape in shapes:
            return [shapes[parameter.shape], (name, parameter)]
        shapes[parameter.shape] = name, parameter
    raise AssertionError


@pytest.mark.parametrize("share", ["parameters", "buffer"])
def test_memory_that_tensors_share_is_refused(share: str) -> None:
    """Training would change each by itself. Both are named, and the model is given back."""
    model, batch = model_for(SMALL), batches(SMALL, 1)[0]
    (name, first), (other, second) = matrices(model)
    if share == "parameters":
        second.data = first.data
    else:
        other = "view"
        model.register_buffer(other, first.data[0])
    with trainer_for(model) as trainer, pytest.raises(InputError, match="share memory, but are two tensors") as caught:
        trainer.step(batch)
    assert {name, other} <= {*str(caught.value).split()}
    assert model(batch[0]).isfinite().all()


def test_memory_shared_between_steps_is_refused() -> None:
    """Before it is written to the states; apart again, training goes on."""
    model, batch = model_for(SMALL), batches(SMALL, 1)[0]
    (_, first), (_, second) = matrices(model)
    with trainer_for(model) as trainer:
        trainer.step(batch)
        values = second.detach().clone()
        second.data = first.data
        with pytest.raises(InputError, match="share memory"):
            trainer.step(batch)
        second.data = values
        trainer.step(batch)


def test_views_of_one_vector_that_do_not_overlap_train() -> None:
    """As ``vector_to_parameters`` makes them; so do columns of one matrix."""
    model, batch = model_for(SMALL), batches(SMALL, 1)[0]
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    with trainer_for(model) as trainer:
        trainer.step(batch)
    whole = torch.zeros(4, 6)
    left, right = whole[:, :3], whole[:, 3:]
    check_apart([("left", left), ("right", right)], {id(left), id(right)})
    with pytest.raises(InputError, match="left and middle share memory"):
        middle = whole[:, 2:4]
        check_apart([("left", left), ("middle", middle)], {id(left)})
    check_apart([("whole", whole), ("left", left)], set())


# --- buffers and batches ------------------------------------------------------------------------------------------


class Rewriting(nn.Module):
    """A block that writes the value that a buffer has already."""

    scale: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("scale", torch.ones(()))

    def forward(self, hidden: Tensor) -> Any:
        self.scale.fill_(1.0)
        return self.inner(hidden * self.scale)


def test_a_buffer_that_is_rewritten_as_it_is_recomputes() -> None:
    """Writes count, not values."""
    losses = []
    for policy in ("resident", "sqrt_checkpoint"):
        model = model_for(SMALL)
        blocks = model.blocks
        for place, block in enumerate(blocks):
            blocks[place] = Rewriting(block)
        with trainer_for(model, policy=policy) as trainer:
            losses.append([trainer.step(batch) for batch in batches(SMALL, 3)])
    assert losses[0] == losses[1]


def test_batches_without_values_are_refused() -> None:
    """Sparse and meta tensors; ids below 0 need no larger model; a loss of ignored targets alone is named."""
    model, (ids, targets) = model_for(SMALL), batches(SMALL, 1)[0]
    with trainer_for(model) as trainer:
        trainer.step((ids, targets))
        with pytest.raises(InputError, match="is sparse_coo: give an ordinary tensor"):
            trainer.step((ids.to_sparse(), targets))
        with pytest.raises(InputError, match="has no values: give an ordinary tensor"):
            trainer.step((ids.to("meta"), targets))
        with pytest.raises(InputError, match=r"use the model's tokenizer$"):
            trainer.step((ids - 1000, targets))
        with pytest.raises(NonFiniteLossError, match="or the loss alone, as when all targets are ignored"):
            trainer.step((ids, torch.full_like(targets, -100)))


# --- steps of the optimizer, and copies ----------------------------------------------------------------------------


def _nothing(*args: object) -> None:
    """A hook."""


#: What puts something in or around an optimizer's step, and takes it away again.
STEPS: list[Callable[[torch.optim.Optimizer], Callable[[], object]]] = [
    lambda optimizer: optimizer.register_step_pre_hook(_nothing).remove,
    lambda optimizer: optimizer.register_step_post_hook(_nothing).remove,
    lambda optimizer: register_optimizer_step_pre_hook(_nothing).remove,
    lambda optimizer: register_optimizer_step_post_hook(_nothing).remove,
    lambda optimizer: vars(optimizer).update(step=_nothing) or partial(vars(optimizer).pop, "step"),
]


@pytest.mark.parametrize("put", STEPS)
def test_what_would_be_left_out_of_an_optimizers_step_is_refused(
    put: Callable[[torch.optim.Optimizer], Callable[[], object]],
) -> None:
    """In the beginning and between steps; a scheduler of PyTorch may count steps."""
    model, given = model_for(SMALL), batches(SMALL, 1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    remove = put(optimizer)
    with pytest.raises(InputError, match=r"has a hook or was replaced \(_nothing\).*: remove it"):
        trainer_for(model, optimizer)
    remove()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with trainer_for(model, optimizer) as trainer:
        trainer.step(given)
        if put is not STEPS[-1]:  # the scheduler has its own in that place
            remove = put(optimizer)
            with pytest.raises(InputError, match="remove it"):
                trainer.step(given)
            remove()
        trainer.step(given)


def test_a_trainer_is_not_copied_and_its_folder_is_a_path() -> None:
    """Nothing is written to the working directory for an empty text."""
    with trainer_for(model_for(SMALL)) as trainer:
        trainer.step(batches(SMALL, 1)[0])
        for made in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(InputError, match=r"use Trainer\.save"):
                made(trainer)
        for folder in (None, 5, b"x", ""):
            with pytest.raises(InputError, match="give the path of the folder of the checkpoints"):
                trainer.save(folder)  # type: ignore[arg-type]
            with pytest.raises(InputError, match="give the path of the folder of the checkpoints"):
                trainer.load(folder)  # type: ignore[arg-type]
