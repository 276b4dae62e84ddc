"""Units whose trained parameters have several types: fp32 norms and routers in a 16-bit model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.measured import is_within
from torch import Tensor, nn
from torch.nn import functional

from autohete import Trainer
from autohete.errors import InputError
from autohete.hardware import load_hardware

NODE = load_hardware("rtx4090-workstation")
STEPS = 3


class Norm(nn.Module):
    """A norm in fp32 of a size that is no multiple of 64 bytes, whatever comes before and after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        return (functional.normalize(hidden.float(), dim=-1) * self.gain + self.bias).to(hidden.dtype)


class Block(nn.Module):
    def __init__(self, width: int, *, norm: bool) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(width, 2 * width), Norm(width) if norm else nn.Identity()
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        changed: Tensor = hidden + self.down(functional.gelu(self.up(self.norm(hidden))))
        return changed


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, width: int = 30) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm, self.head = nn.Embedding(61, width), Norm(width), nn.Linear(width, 61)
        self.blocks = nn.ModuleList(Block(width, norm=place != 2) for place in range(4))
        self.to(dtype)
        for module in self.modules():
            if isinstance(module, Norm):
                module.float()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, 61, (4, 12), generator=torch.Generator().manual_seed(step))


def in_plain_pytorch(model: Model, *, clip_norm: float | None = None, micro_batches: int = 1) -> list[float]:
    """Train in a usual loop, with fp32 masters of 16-bit parameters; return the losses."""
    torch.set_num_threads(1)
    parameters = list(model.parameters())
    masters = [nn.Parameter(parameter.detach().float().clone()) for parameter in parameters]
    optimizer, losses = torch.optim.AdamW(masters, lr=1e-2, fused=True), []
    for step in range(STEPS):
        parts = [loss(model(part), part) / micro_batches for part in tokens_of(step).chunk(micro_batches)]
        for part in parts:
            part.backward()  # type: ignore[no-untyped-call]
        losses.append(sum(part.item() for part in parts))
        for master, parameter in zip(masters, parameters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(masters, clip_norm)
        optimizer.step()
        for master, parameter in zip(masters, parameters, strict=True):
            parameter.data.copy_(master)
    return losses


def adam(model: Model) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def is_equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(parameter, other.get_parameter(name)) for name, parameter in one.named_parameters())


POLICIES = [
    "resident", "zero_offload", "stronghold", "streamed_states", "fsdp2_offload", "l2l:paper", "mlp_offload", "zero3_offload",
    "zero_infinity", "autohete", "joint",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_units_of_several_types_train_as_in_plain_pytorch(policy: str, dtype: str) -> None:
    """Losses and weights have the bits of plain PyTorch, and the bytes are those of the schedule."""
    plain, trained = Model(getattr(torch, dtype)), Model(getattr(torch, dtype))
    expected = in_plain_pytorch(plain)
    budget = "80%" if policy in ("autohete", "joint") else None
    with Trainer(trained, optimizer=adam(trained), policy=policy, gpu_memory=budget, loss=loss, hardware=NODE) as trainer:
        assert [trainer.step((tokens_of(step), tokens_of(step))) for step in range(STEPS)] == expected
        assert is_within(trainer)
    assert is_equal(plain, trained)
    assert {parameter.dtype for parameter in trained.parameters()} == {torch.float32, getattr(torch, dtype)}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("policy", ["resident", "zero_offload", "streamed_states", "l2l:paper"])
def test_they_clip_and_accumulate(policy: str, micro_batches: int) -> None:
    """The global norm is that of the fp32 gradients of all types, and sums over micro-batches keep each type."""
    plain, trained = Model(torch.bfloat16), Model(torch.bfloat16)
    expected = in_plain_pytorch(plain, clip_norm=0.5, micro_batches=micro_batches)
    with Trainer(
        trained,
        optimizer=adam(trained),
        policy=policy,
        loss=loss,
        hardware=NODE,
        clip_norm=0.5,
        micro_batches=micro_batches,
    ) as trainer:
        assert [trainer.step((tokens_of(step), tokens_of(step))) for step in range(STEPS)] == expected
    assert is_equal(plain, trained)


@pytest.mark.parametrize("policies", [("zero_offload", "streamed_states"), ("fsdp2_offload", "resident")])
def test_they_are_saved_and_changed(policies: tuple[str, str], tmp_path: Path) -> None:
    """A training goes on from a checkpoint under another policy, and with values that the caller has changed, bit by bit."""
    plain, trained = Model(torch.bfloat16), Model(torch.bfloat16)
    expected = in_plain_pytorch(plain)
    with Trainer(trained, optimizer=adam(trained), policy=policies[0], loss=loss, hardware=NODE) as trainer:
        losses = [trainer.step((tokens_of(0), tokens_of(0)))]
        trainer.save(tmp_path)
        with torch.no_grad():
            trained.norm.gain.mul_(2.0)
        assert trained.norm.gain.mean() > 1.5
    again = Model(torch.bfloat16)
    with Trainer(again, optimizer=adam(again), policy=policies[1], loss=loss, hardware=NODE) as trainer:
        trainer.load(tmp_path)
        losses += [trainer.step((tokens_of(step), tokens_of(step))) for step in range(1, STEPS)]
    assert losses == expected
    assert is_equal(plain, again)


@pytest.mark.parametrize("policy", ["patrickstar", "streamed_states:weights"])
def test_a_policy_that_overwrites_parameters_is_refused(policy: str) -> None:
    """Gradients cannot take the place of parameters that have no master weights."""
    model = Model(torch.bfloat16)
    refused = pytest.raises(InputError, match="overwrites parameters with their gradients, but some of block 1 have no master")
    with Trainer(model, optimizer=adam(model), policy=policy, loss=loss, hardware=NODE) as trainer, refused:
        trainer.step((tokens_of(0), tokens_of(0)))
    assert is_equal(model, Model(torch.bfloat16))
