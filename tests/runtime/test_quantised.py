"""Frozen bases in NF4 (QLoRA): they rest where the plan says, and adapters train to the bits of plain PyTorch."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from bitsandbytes.nn.modules import Linear4bit, Params4bit
from support.measured import is_within
from torch import Tensor, nn
from torch.nn import functional

from autohete import Trainer
from autohete.hardware import load_hardware

NODE = load_hardware("rtx4090-workstation")
STEPS = 3


class Layer(nn.Module):
    """A linear layer in NF4, with an adapter."""

    def __init__(self, width: int, out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = Linear4bit(width, out, bias=False, compute_dtype=dtype, quant_type="nf4")  # type: ignore[no-untyped-call]
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, out, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        low = self.up(self.down(hidden.to(self.down.weight.dtype)))
        added: Tensor = self.base(hidden) + low.to(hidden.dtype)
        return added


class Block(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), Layer(width, 3 * width, dtype), Layer(3 * width, width, dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        changed: Tensor = hidden + self.down(functional.silu(self.up(self.norm(hidden))))
        return changed


class Model(nn.Module):
    """A model of blocks in NF4, quantised as bitsandbytes does when the model is moved to its device."""

    def __init__(self, width: int = 64, blocks: int = 3, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(61, width), nn.Linear(width, 61)
        self.blocks = nn.ModuleList(Block(width, dtype) for _ in range(blocks))
        self.to(dtype).requires_grad_(False)
        for block in self.blocks:
            assert isinstance(block, Block)
            for layer in (block.up, block.down):
                assert isinstance(layer, Layer)
                layer.down.to(torch.float32).requires_grad_(True)
                layer.up.to(torch.float32).requires_grad_(True)
        self.to("cpu")

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], fused=True)


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(step))


def in_plain_pytorch(model: nn.Module, steps: int = STEPS) -> list[float]:
    torch.set_num_threads(1)
    optimizer, losses = adam(model), []
    for step in range(steps):
        found = loss(model(tokens_of(step)), tokens_of(step))
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "policy",
    ["resident", "zero_offload", "fsdp2_offload", "fsdp2_offload:checkpointing=none", "stronghold", "streamed_states:weights",
     "l2l:paper", "patrickstar", "zero_infinity", "autohete", "joint"],
)  # fmt: skip
def test_adapters_beside_a_base_in_nf4_train_as_in_plain_pytorch(policy: str, dtype: str) -> None:
    """Losses and weights have the bits of plain PyTorch, and the bytes are those of the schedule."""
    plain, trained = Model(dtype=getattr(torch, dtype)), Model(dtype=getattr(torch, dtype))
    expected = in_plain_pytorch(plain)
    budget = "70%" if policy in ("autohete", "joint") else None
    with Trainer(trained, optimizer=adam(trained), policy=policy, gpu_memory=budget, loss=loss, hardware=NODE) as trainer:
        assert [trainer.step((tokens_of(step), tokens_of(step))) for step in range(STEPS)] == expected
        assert is_within(trainer)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, trained.get_parameter(name)), name


@pytest.mark.slow
def test_gradients_at_the_size_of_real_layers() -> None:
    """Adapters of layers as wide as those of a small model have the bits of plain PyTorch after a step that moves the base."""
    plain, trained = Model(width=1024, blocks=1), Model(width=1024, blocks=1)
    expected = in_plain_pytorch(plain, 1)
    policy = "fsdp2_offload:checkpointing=none"
    with Trainer(trained, optimizer=adam(trained), policy=policy, loss=loss, hardware=NODE) as trainer:
        assert [trainer.step((tokens_of(0), tokens_of(0)))] == expected
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, trained.get_parameter(name)), name


def test_a_base_in_nf4_is_there_between_steps() -> None:
    """The caller reads, saves, copies and evaluates a model whose base is elsewhere; training continues as if it had not."""
    plain, trained = Model(), Model()
    expected = in_plain_pytorch(plain)
    with Trainer(trained, optimizer=adam(trained), policy="fsdp2_offload", loss=loss, hardware=NODE) as trainer:
        losses = [trainer.step((tokens_of(0), tokens_of(0)))]
        copied = deepcopy(trained)
        assert type(copied.get_parameter("blocks.0.up.base.weight")) is Params4bit
        assert torch.equal(copied(tokens_of(1)), trained(tokens_of(1)))
        there = trained.state_dict()
        assert all(torch.equal(value, there[name]) for name, value in plain.state_dict().items() if "base" in name)
        trainer.evaluate([(tokens_of(2), tokens_of(2))])
        losses += [trainer.step((tokens_of(step), tokens_of(step))) for step in range(1, STEPS)]
    assert losses == expected
    assert type(trained.get_parameter("blocks.0.up.base.weight")) is Params4bit
