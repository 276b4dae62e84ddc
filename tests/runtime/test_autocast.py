"""Training under ``torch.autocast`` has the bits of a loop that has it around forward and loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.measured import MEDIUM, is_within
from support.modules import Net
from support.modules import batches as small_batches
from support.reference import batches, lanes_alive, model_for
from support.small import profile_of
from torch import Tensor

from autohete import Trainer
from autohete.errors import InputError
from autohete.runtime.autocast import Autocast
from autohete.runtime.losses import next_token_loss
from autohete.train.verification import Verification, verify
from autohete.workload import Precision

BF16 = torch.bfloat16


def verified(policy: str, budget: str | None = None, precision: Precision = Precision.FP32, **given: Any) -> Verification:
    """A verification of the reference model, with dropout."""
    workload = replace(MEDIUM, precision=precision)
    options: dict[str, Any] = {"autocast": BF16, "hardware": profile_of(MEDIUM).hardware} | given
    return verify(model_for(workload), batches(workload, 2), policy=policy, gpu_memory=budget, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "budget"),
    [
        ("resident", None),
        ("resident:checkpointing=full", None),
        ("resident:checkpointing=selective", None),
        ("zero_offload", None),
        ("zero3_offload", None),
        ("offload_activations:what=all", None),
        ("stronghold:window=1", None),
        ("streamed_states:weights", None),
        ("zero_infinity:offload_param", None),
        ("autohete", "85%"),
        ("joint", "80%"),
    ],
)
def test_it_has_the_bits_of_the_plain_loop(policy: str, budget: str | None) -> None:
    """Losses, gradients, parameters and states, whatever moves and is recomputed."""
    found = verified(policy, budget)
    assert found.is_equal, found.differences[:3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"autocast": torch.float16, "grad_scaler": torch.amp.GradScaler("cpu", init_scale=2.0**19)},
        {"clip_norm": 0.05, "micro_batches": 2},
        {"precision": Precision.BF16},
    ],
)
def test_it_goes_with_other_features(options: dict[str, Any]) -> None:
    """Scaled losses, accumulated and clipped gradients, parameters in another type."""
    found = verified("zero_offload", **options)
    assert found.is_equal, found.differences[:3]


class OwnAutocast(Net):
    """Calls its blocks under autocast, and its embedding and head without."""

    def through(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return super().through(x).float()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["resident", "resident:checkpointing=full", "zero_offload", "stronghold:window=1"])
def test_a_model_may_use_it_itself(policy: str) -> None:
    """As accelerate's wrapped forward does: blocks are recomputed in the mode that they were called in."""
    found = verify(OwnAutocast(), small_batches(), policy=policy, hardware=profile_of(MEDIUM).hardware)
    assert found.is_equal, found.differences[:3]


def test_it_may_be_around_the_step_too() -> None:
    """The caller's thread is in no other mode afterwards; memory is as planned."""
    plain, trained, hardware = model_for(MEDIUM), model_for(MEDIUM), profile_of(MEDIUM).hardware
    torch.manual_seed(3)
    with torch.autocast("cpu", BF16):
        expected = [next_token_loss(plain(ids), targets).item() for ids, targets in batches(MEDIUM, 1)]
    torch.manual_seed(3)
    with Trainer(trained, autocast=BF16, policy="autohete", gpu_memory="85%", hardware=hardware) as trainer:
        with torch.autocast("cpu", BF16):
            losses = [trainer.step(batch) for batch in batches(MEDIUM, 1)]
            assert Autocast.now() == Autocast.to(BF16, torch.device("cpu"))
        assert is_within(trainer)
    assert losses == expected
    assert Autocast.now() == Autocast()


def test_another_mode_around_the_step_is_refused() -> None:
    """It would have no effect on what is computed."""
    batch = batches(MEDIUM, 1)[0]
    message = r"does not reach .* give the Trainer autocast=torch.bfloat16 as well"
    with (
        Trainer(model_for(MEDIUM), hardware=profile_of(MEDIUM).hardware) as trainer,
        torch.autocast("cpu", BF16),
        pytest.raises(InputError, match=message),
    ):
        trainer.step(batch)
    with pytest.raises(InputError, match=r"autocast is torch.float32: give torch.bfloat16 or torch.float16"):
        Trainer(model_for(MEDIUM), autocast=torch.float32)
    assert not lanes_alive()
