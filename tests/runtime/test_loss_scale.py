"""Dynamic loss scaling: steps, skips and scales are those of PyTorch's GradScaler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.reference import batches, model_for
from support.small import SMALL
from torch import Tensor, nn

from autohete import Trainer
from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.runtime.losses import next_token_loss
from autohete.runtime.update_rules import default_optimizer
from autohete.workload import Precision

STEPS = 6
#: At first gradients overflow in fp16; later the scale grows again.
SETTINGS: dict[str, Any] = {"init_scale": 2.0**19, "growth_interval": 2}
WORKLOAD = replace(SMALL, precision=Precision.FP16)
NODE = load_hardware(
    "a100-40gb-epyc7713",
    {"links.h2d.bandwidth": "1GB/s", "links.d2h.bandwidth": "1GB/s", "cpu.update_bandwidth": "2GB/s"},
)


def plainly(clip_norm: float | None, micro_batches: int = 1) -> tuple[list[float], list[float], list[Tensor]]:
    """Losses, scales and master weights of the usual loop, with fp32 masters of fp16 parameters."""
    torch.set_num_threads(1)
    model, scaler = model_for(WORKLOAD), torch.amp.GradScaler("cpu", **SETTINGS)
    parameters = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in parameters]
    optimizer = default_optimizer(masters)
    losses, scales = [], []
    torch.manual_seed(2)
    for ids, targets in batches(WORKLOAD, STEPS):
        total, gradients = 0.0, [torch.zeros_like(p) for p in parameters]
        for some, wanted in zip(ids.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
            loss = next_token_loss(model(some), wanted)
            total += loss.item() / micro_batches
            found = torch.autograd.grad(scaler.scale(loss / micro_batches), parameters)
            gradients = [a + b for a, b in zip(gradients, found, strict=True)]
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient.float()
        scaler.unscale_(optimizer)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(masters, clip_norm)
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
        losses.append(total)
        scales.append(scaler.get_scale())
    return losses, scales, [master.detach() for master in masters]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["resident", "zero_offload", "autohete", "joint"])
@pytest.mark.parametrize(("clip_norm", "micro_batches"), [(None, 1), (0.05, 1), (None, 2)])
def test_scaled_steps_train_to_the_bit(policy: str, clip_norm: float | None, micro_batches: int) -> None:
    """Skipped steps and growing scales included, wherever updates run."""
    losses, scales, masters = plainly(clip_norm, micro_batches)
    assert any(later > earlier for earlier, later in zip(scales, scales[1:], strict=False))
    model, scaler = model_for(WORKLOAD), torch.amp.GradScaler("cpu", **SETTINGS)
    optimizer = default_optimizer(model.parameters())
    with Trainer(
        model,
        optimizer=optimizer,
        policy=policy,
        grad_scaler=scaler,
        clip_norm=clip_norm,
        micro_batches=micro_batches,
        hardware=NODE,
    ) as trainer:
        trainer.prepare(batches(WORKLOAD, 1)[0])
        assert scaler.get_scale() == SETTINGS["init_scale"]
        torch.manual_seed(2)
        found = []
        for batch in batches(WORKLOAD, STEPS):
            found.append((trainer.step(batch), scaler.get_scale()))
        assert trainer.skipped_steps == sum(
            later < earlier for earlier, later in zip([SETTINGS["init_scale"], *scales], scales, strict=False)
        )
    assert found == list(zip(losses, scales, strict=True))
    states = [optimizer.state[p] for p in model.parameters()]
    assert all(torch.equal(state["master"], master) for state, master in zip(states, masters, strict=True))


@pytest.mark.parametrize(
    ("scaler", "message"),
    [
        (torch.amp.GradScaler("cpu", init_scale=1000.0), "scale is 1000.0: let init_scale"),
        (2.0**16, "grad_scaler is of type float: give a torch.amp.GradScaler"),
    ],
)
def test_scalers_that_would_change_bits_are_refused(scaler: object, message: str) -> None:
    """As is whatever is no scaler."""
    given: Any = scaler
    with pytest.raises(InputError, match=message), Trainer(model_for(WORKLOAD), grad_scaler=given, hardware=NODE) as trainer:
        trainer.step(batches(WORKLOAD, 1)[0])


def test_a_scaler_that_is_off_changes_nothing() -> None:
    """Then updates need not wait for the backward pass either."""
    losses = []
    for scaler in (None, torch.amp.GradScaler("cpu", enabled=False)):
        with Trainer(model_for(SMALL), policy="stronghold:window=1", grad_scaler=scaler, hardware=NODE) as trainer:
            trainer.prepare(batches(SMALL, 1)[0])
            torch.manual_seed(2)
            losses.append([trainer.step(batch) for batch in batches(SMALL, 2)])
    assert losses[0] == losses[1]
