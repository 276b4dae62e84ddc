"""A module whose blocks are a list, trained plainly and as a policy schedules it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autohete.hardware import load_hardware
from autohete.lowering import lower
from autohete.policies import parse_policy
from autohete.profile import Profile, analytic_profile
from autohete.runtime.batch import Batch
from autohete.runtime.lanes import LaneThreads
from autohete.runtime.ledger import Ledger
from autohete.runtime.losses import next_token_loss
from autohete.runtime.partition import Partition, partition
from autohete.runtime.probe import by_use
from autohete.runtime.settings import Recipe
from autohete.runtime.takeover import Ledgers, Takeover
from autohete.runtime.update_rules import default_optimizer
from autohete.simulate import judge_for
from autohete.train.as_executed import as_executed
from autohete.train.measure import with_parameters_of, workload_of
from support.reference import Outcome

STEPS = 3
VOCABULARY = 61
#: Between them these recompute, copy parameters and gradients both ways, and update on both sides.
EVERYTHING_MOVES = [
    "resident:checkpointing=full",
    "stronghold:window=1,checkpointing=selective",
    "stronghold:window=1",
    "autohete",
]


def batches() -> list[tuple[Tensor, Tensor]]:
    """Random tokens and targets from a fixed seed."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (2 * STEPS, 2, 8), generator=generator)
    return list(zip(ids[::2], ids[1::2], strict=True))


def profile_for(cut: Partition) -> Profile:
    """A profile with the model's own sizes, in which copies and updates are slow: plans that search then use everything."""
    slow = {"links.h2d.bandwidth": "1GB/s", "links.d2h.bandwidth": "1GB/s", "cpu.update_bandwidth": "2GB/s"}
    profile = analytic_profile(workload_of(cut, batches()[0][0]), load_hardware("a100-40gb-epyc7713", slow))
    counts = [sum(parameter.numel() for parameter in owned) for owned in cut.owned]
    blocks = tuple(replace(block, parameters=count) for block, count in zip(profile.units, counts, strict=True))
    return with_parameters_of(cut, replace(profile, units=blocks))


def train_plainly(model: nn.Module) -> Outcome:
    """Ordinary training: one backward through the whole model, one optimizer, fp32 master weights for 16-bit parameters."""
    torch.set_num_threads(1)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    full = trained[0].dtype is torch.float32
    masters = trained if full else [nn.Parameter(parameter.detach().float()) for parameter in trained]
    optimizer = default_optimizer(masters)
    losses = []
    torch.manual_seed(2)
    for ids, targets in batches():
        found = model(ids)
        loss = next_token_loss(getattr(found, "logits", found), targets)
        losses.append(loss.item())
        loss.backward()  # type: ignore[no-untyped-call]
        if not full:
            for parameter, master in zip(trained, masters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
        optimizer.step()
        for parameter, master in zip(trained, masters, strict=True):
            parameter.grad = None
            if not full:
                parameter.data.copy_(master.detach())
    return _outcome(model, losses, [master.detach() for master in masters])


def train_by_policy(model: nn.Module, policy: str, profile: Profile | None = None) -> Outcome:
    """The same training as ``policy`` schedules it, in lane threads; ``profile`` for a model that cannot be profiled."""
    cut = partition(model)
    if profile is None:
        cut = by_use(cut, batches()[0][0])
        profile = profile_for(cut)
    schedule = lower(profile, as_executed(parse_policy(policy).plan(profile, judge_for(profile)), profile))
    device, host = (Ledger(memory.name, memory.capacity_bytes) for memory in schedule.memories)
    training = Takeover(cut, schedule, Recipe(), Ledgers(device=device, host=host), poison=True)
    torch.manual_seed(2)
    try:
        with LaneThreads(schedule, training.actions.perform) as lanes:
            for step, batch in enumerate(batches()):
                training.passes.give(step, Batch(*batch))
                lanes.admit()
        owned = [id(parameter) for block in cut.owned for parameter in block]
        masters = dict(zip(owned, training.parameters(), strict=True))
    finally:
        training.close()
    order = [masters[id(parameter)] for parameter in model.parameters() if parameter.requires_grad]
    return _outcome(model, [training.passes.losses[step] for step in range(STEPS)], order)


def _outcome(model: nn.Module, losses: list[float], masters: list[Tensor]) -> Outcome:
    """Losses, master weights, and what the model itself has afterwards."""
    return Outcome(losses, masters + [parameter.detach().clone() for parameter in model.parameters()])


class Layer(nn.Module):
    """A block with dropout and, if its width is odd, no parameter of a round size."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.gain = nn.LayerNorm(hidden), nn.Parameter(torch.randn(7))
        self.up, self.down = nn.Linear(hidden, 2 * hidden + 1), nn.Linear(2 * hidden + 1, hidden)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Any:
        mixed = self.norm(x).cumsum(1) * self.gain.mean()
        return x + self.dropout(self.down(functional.gelu(self.up(mixed))))


class Net(nn.Module):
    """A model that does with its blocks what it should; the others below differ from it in one thing each."""

    layer: Callable[[int], nn.Module] = Layer

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.dropout = nn.Embedding(VOCABULARY, hidden), nn.Dropout(0.2)
        self.blocks = nn.ModuleList(type(self).layer(hidden) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.through(self.embed(ids)))

    def embed(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.token(ids))
        return hidden

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def head(self, x: Tensor) -> Any:
        return self.out(self.norm(x))
