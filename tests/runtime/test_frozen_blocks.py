"""Models with blocks of which nothing is trained: they train to the bits of plain PyTorch under every kind of policy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autohete import Trainer
from autohete.hardware import load_hardware

STEPS = 3
NODE = load_hardware("a100-40gb-epyc7713")
#: Policies that move each kind of value.
POLICIES = [
    "resident", "streamed_states", "streamed_states:weights", "l2l:paper", "stronghold", "patrickstar", "zero_offload",
    "fsdp2_offload", "autohete", "joint",
]  # fmt: skip
#: Share of the resident memory that policies may use that plan for a budget. Frozen parameters of trained blocks stay.
BUDGETS = {"embedding": "60%", "blocks.1": "60%", "head": "60%", "adapters": "85%"}


class Adapted(nn.Module):
    """A linear layer with low-rank adapters beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(layer.in_features, 4, bias=False), nn.Linear(4, layer.out_features, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = self.layer(hidden) + self.up(self.down(hidden))
        return added


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a: nn.Module = nn.Linear(32, 64)
        self.b = nn.Linear(64, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        changed: Tensor = hidden + self.b(functional.gelu(self.a(hidden)))
        return changed


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, 32), nn.Linear(32, 61)
        self.blocks = nn.ModuleList(Residual() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def model(frozen: str) -> Small:
    """A model with fresh weights in which some units are frozen as a whole."""
    torch.manual_seed(0)
    small = Small()
    if frozen == "adapters":  # as peft does with layers_to_transform: the other blocks are frozen as a whole
        small.requires_grad_(False)
        for block in (small.blocks[1], small.blocks[3]):
            assert isinstance(block, Residual)
            assert isinstance(block.a, nn.Linear)
            block.a = Adapted(block.a)
            block.a.down.requires_grad_(True)
            block.a.up.requires_grad_(True)
    else:
        small.get_submodule(frozen).requires_grad_(False)
    return small


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("frozen", BUDGETS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_frozen_block_trains_as_in_plain_pytorch(policy: str, frozen: str) -> None:
    """Losses and weights have the bits of plain PyTorch, whichever unit has nothing to train."""
    tokens = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    plain, trained = model(frozen), model(frozen)
    given = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(given, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    expected, losses = [], []
    torch.set_num_threads(1)
    for _ in range(STEPS):
        expected.append(loss(plain(tokens), tokens))
        expected[-1].backward()  # type: ignore[no-untyped-call]
        adam.step()
        adam.zero_grad()
    budget = BUDGETS[frozen] if policy in ("autohete", "joint") else None
    with Trainer(trained, policy=policy, gpu_memory=budget, loss=loss, hardware=NODE) as trainer:
        losses = [trainer.step((tokens, tokens)) for _ in range(STEPS)]
    assert losses == [one.item() for one in expected]
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, trained.get_parameter(name)), name
