"""A loss of the logits trains; one that uses anything else is refused before anything has changed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.modules import VOCABULARY, Layer, Net, batches
from torch import Tensor, nn

from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.runtime.batch import Loss
from autohete.runtime.ledger import Counting
from autohete.runtime.losses import next_token_loss
from autohete.runtime.observe import _unscaled
from autohete.train.trainer import Trainer


class Balanced(Net):
    """Its blocks keep a loss of their own."""

    class layer(Layer):
        """As an attribute."""

        aux: Tensor

        def forward(self, x: Tensor) -> Any:
            self.aux = x.square().mean() + self.gain.sum()
            return super().forward(x)


COLLECTED: list[Tensor] = []


class Collecting(Net):
    """Its blocks put a loss of their own into a list that is none of the model's."""

    class layer(Layer):
        """As some routers do."""

        def forward(self, x: Tensor) -> Any:
            COLLECTED.append(self.up(x).mean())
            return super().forward(x)


class Weighted(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 5))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return next_token_loss(logits, targets) * self.weight.mean()


def of_attributes(model: Any) -> Loss:
    """Adds what the blocks keep."""
    return lambda logits, targets: next_token_loss(logits, targets) + sum(block.aux for block in model.blocks)


def of_list(model: Any) -> Loss:
    """Adds what was collected."""

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        collected = torch.stack(COLLECTED).mean()
        COLLECTED.clear()
        return next_token_loss(logits, targets) + collected

    return loss


def with_penalty(model: Any) -> Loss:
    """Adds the square of a weight."""
    return lambda logits, targets: next_token_loss(logits, targets) + model.out.weight.square().mean()


Make = Callable[[Any], Any]


@pytest.mark.parametrize("policy", ["resident", "resident:checkpointing=full", "stronghold:window=1"])
@pytest.mark.parametrize(
    ("make", "loss_of", "message"),
    [
        (Balanced, of_attributes, r"uses more than the logits \(blocks\.0\.gain, blocks\.1\.gain, blocks\.2\.gain"),
        (Collecting, of_list, r"uses more than the logits \(blocks\.0\.up\.bias, blocks\.0\.up\.weight"),
        (Net, lambda model: Weighted(), r"uses more than the logits \(a tensor \(3, 5\)\)"),
        (Net, with_penalty, r"uses more than the logits \(out\.weight\)"),
        (
            Net,
            lambda model: lambda logits, targets: next_token_loss(logits, targets).item(),
            "returns float: return one tensor",
        ),
        (Net, lambda model: lambda logits, targets: (logits.sum(), 1), "returns tuple: return one tensor"),
        (
            Net,
            lambda model: lambda logits, targets: logits.mean(-1),
            r"returns \(2, 8\) of torch\.float32: return one real number",
        ),
        (Net, lambda model: lambda logits, targets: logits.argmax(), r"returns \(\) of torch\.int64: return one real"),
        (Net, lambda model: lambda logits, targets: logits.sum().to(torch.complex64), "one real number"),
        (Net, lambda model: lambda logits, targets: logits.detach().sum(), "does not depend on the logits"),
        (Net, lambda model: lambda logits, targets: torch.zeros(()), "does not depend on the logits"),
        (Net, lambda model: lambda logits, targets: logits["x"].sum(), r"fails on the first batch \(ids \(2, 8\) of torch"),
        (Net, lambda model: nn.CrossEntropyLoss(), r"fails on the first batch"),
    ],
)
def test_a_loss_that_cannot_be_trained_with_is_refused(
    make: Callable[[], Net], loss_of: Make, message: str, policy: str
) -> None:
    """By the first step, whatever would be recomputed; the model and the random state are as before."""
    COLLECTED.clear()
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    with Trainer(model, loss=loss_of(model), policy=policy, hardware=load_hardware("a100-40gb-epyc7713")) as trainer:
        with pytest.raises(InputError, match=message):
            trainer.step(batches()[0])
        assert trainer.prediction is None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_loss_may_use_the_logits_of_a_teacher() -> None:
    """It may have a tensor of the whole batch besides."""
    (ids, targets), *_ = batches()
    teacher = Net()(ids).detach().softmax(-1)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.kl_div(logits.log_softmax(-1), teacher, reduction="batchmean")

    expected = loss(Net()(ids), targets).item()
    with Trainer(Net(), loss=loss, hardware=load_hardware("a100-40gb-epyc7713")) as trainer:
        assert trainer.step((ids, targets)) == expected


def test_a_loss_may_use_other_tensors() -> None:
    """Weights of classes, whatever needs no gradient, and another type are the loss's own affair."""
    weights = torch.rand(VOCABULARY)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), weights).double()[None]

    with Trainer(Net(), loss=loss, hardware=load_hardware("a100-40gb-epyc7713")) as trainer:
        assert torch.isfinite(torch.tensor([trainer.step(batch) for batch in batches()])).all()


class Remembering:
    """A loss that keeps its logits.

    Args:
        calls: of so many of the last calls.
    """

    def __init__(self, calls: int) -> None:
        self.calls, self.logits = calls, list[Tensor]()

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.logits = [*self.logits, logits][-self.calls :]
        return next_token_loss(logits, targets)


class RememberingModule(nn.Module):
    """The same in an attribute of a module, whose state is restored after measuring."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.logits = logits
        return next_token_loss(logits, targets)


@pytest.mark.parametrize("memory", ["100%", "40%"])
def test_logits_that_the_loss_keeps_are_counted(memory: str) -> None:
    """They are no part of any plan: a budget that is accepted has room for them."""
    losses, budgets = [], []
    for loss in (lambda logits, targets: next_token_loss(logits, targets), Remembering(1), RememberingModule()):
        with Trainer(Net(), loss=loss, gpu_memory=memory, hardware=load_hardware("a100-40gb-epyc7713")) as trainer:
            losses.append([trainer.step(batch) for batch in batches()])
            budgets.append(trainer.resident_bytes)
            assert trainer.counting is Counting.SCHEDULED  # nothing is there that was not counted
    assert losses[0] == losses[1] == losses[2]
    assert budgets[1] == budgets[2]
    assert budgets[1] - budgets[0] == 4 * batches()[0][0].numel() * VOCABULARY


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_logits_of_every_call_are_refused(micro_batches: int) -> None:
    """A list of them would grow without end, which no budget allows."""
    hardware = load_hardware("a100-40gb-epyc7713")
    trainer = Trainer(Net(), loss=Remembering(9), micro_batches=micro_batches, hardware=hardware)
    with trainer, pytest.raises(InputError, match="keeps the logits of every call"):
        for batch in batches():
            trainer.step(batch)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaled_loss_is_refused(enabled: bool) -> None:
    """Nobody would unscale the gradients. A scaler that is off scales nothing."""
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        scaled: Tensor = scaler.scale(next_token_loss(logits, targets))
        return scaled

    refusal = pytest.raises(InputError, match=r"the loss calls GradScaler\.scale")
    trainer = Trainer(Net(), loss=loss, hardware=load_hardware("a100-40gb-epyc7713"))
    with trainer, refusal if enabled else nullcontext():
        trainer.step(batches()[0])
    assert scaler.scale(torch.ones(())) == (2.0**16 if enabled else 1)


def test_scalers_are_as_before_whoever_prepares_beside() -> None:
    """Two threads may observe losses at a time, and other threads scale theirs meanwhile."""
    scale = torch.amp.GradScaler.scale
    one, other = _unscaled(), _unscaled()
    with ThreadPoolExecutor(1) as pool:
        one.__enter__()
        pool.submit(other.__enter__).result()
        with pytest.raises(InputError):
            torch.amp.GradScaler("cpu").scale(torch.ones(()))
        one.__exit__(None, None, None)
        assert torch.amp.GradScaler("cpu").scale(torch.ones(())) == 2.0**16
        pool.submit(other.__exit__, None, None, None).result()
    assert torch.amp.GradScaler.scale is scale
