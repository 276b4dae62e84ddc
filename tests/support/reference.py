"""Plain PyTorch training of the reference model, and the same training through a schedule."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autohete.execution.trace import Trace
from autohete.runtime.batch import Batch
from autohete.runtime.lanes import Action, LaneThreads
from autohete.runtime.ledger import Ledger
from autohete.runtime.losses import next_token_loss
from autohete.runtime.partition import partition
from autohete.runtime.settings import Recipe
from autohete.runtime.takeover import Ledgers, Takeover
from autohete.runtime.update_rules import default_optimizer
from autohete.schedule import Schedule, Task
from autohete.train.gpt import BLOCKS, GPT, seeded_gpt
from autohete.workload import Precision, Workload

torch.set_num_threads(1)  # how many there are changes the bits of gradients


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Losses, final parameters, the most that was in host memory, and what was left there after the last step."""

    losses: list[float]
    parameters: list[Tensor]
    host_peak_bytes: int = 0
    host_left_bytes: int = 0

    def __eq__(self, other: object) -> bool:
        """Losses and parameters bit for bit; NaN equals nothing, so poison never passes for agreement."""
        assert isinstance(other, Outcome)
        same = all(torch.equal(a, b) for a, b in zip(self.parameters, other.parameters, strict=True))
        return same and self.losses == other.losses


def model_for(workload: Workload) -> GPT:
    """The reference GPT with dropout on, from a fixed seed."""
    return seeded_gpt(workload, dropout=0.2, seed=0)


class Scaled(GPT):
    """A GPT whose logits are scaled by a buffer, and that has a frozen matrix."""

    def __init__(self, workload: Workload, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(workload, dropout=0.2)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(()))
        self.blocks[1].up.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale


def batches(workload: Workload, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and targets from a fixed seed."""
    generator = torch.Generator().manual_seed(1)
    shape = (workload.batch_size, workload.sequence_length)

    def tokens() -> Tensor:
        return torch.randint(0, workload.vocabulary_size, shape, generator=generator)

    return [(tokens(), tokens()) for _ in range(steps)]


def train_plainly(workload: Workload, steps: int, stale: frozenset[int] = frozenset(), threads: int = 1) -> Outcome:
    """Ordinary training: one backward through the whole model, one optimizer, fp32 master weights for bf16.

    Where the workload clips, PyTorch clips the gradients that the optimizer takes. Parameters of the blocks ``stale`` are
    updated with the gradients of the step before: after the first step not at all, after step k with the gradients of step
    k - 1, as they were clipped then. Those of the last step are never used.
    """
    torch.set_num_threads(threads)
    model = model_for(workload)
    parameters = list(model.parameters())
    late = {
        id(parameter) for block, owned in enumerate(partition(model, BLOCKS).owned) for parameter in owned if block in stale
    }
    before: list[Tensor | None] = [None] * len(parameters)
    full = workload.precision is Precision.FP32
    masters = parameters if full else [nn.Parameter(p.detach().float()) for p in parameters]
    optimizer = default_optimizer(masters)
    losses = []
    torch.manual_seed(2)
    drawn = iter(batches(workload, steps * workload.micro_batches))
    for _ in range(steps):
        losses.append(0.0)
        gradients: list[Tensor] = []
        for ids, targets in itertools.islice(drawn, workload.micro_batches):
            loss = next_token_loss(model(ids), targets)
            losses[-1] += loss.item() / workload.micro_batches
            found = torch.autograd.grad(loss / workload.micro_batches, parameters)
            gradients = [a + b for a, b in zip(gradients, found, strict=True)] if gradients else list(found)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient.float()
        if workload.clip_norm is not None:
            nn.utils.clip_grad_norm_(masters, workload.clip_norm)
        for place, master in enumerate(masters):
            clipped = master.grad
            master.grad = before[place] if id(parameters[place]) in late else clipped
            before[place] = clipped
        optimizer.step()
        if not full:
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.data.copy_(master.detach())
    return Outcome(losses, [master.detach() for master in masters])


def train_by_schedule(
    workload: Workload,
    steps: int,
    schedule: Schedule,
    around: Callable[[Action], Action] = lambda action: action,
) -> tuple[Outcome, Trace]:
    """The same training as ``schedule`` says, in lane threads; ``around`` wraps the action of each task."""
    device, host = (Ledger(memory.name, memory.capacity_bytes) for memory in schedule.memories[:2])
    model = model_for(workload)
    recipe = Recipe(clip_norm=workload.clip_norm)
    training = Takeover(partition(model, BLOCKS), schedule, recipe, Ledgers(device=device, host=host), poison=True)
    torch.manual_seed(2)
    try:
        with LaneThreads(schedule, around(training.actions.perform)) as lanes:
            drawn = iter(batches(workload, steps * workload.micro_batches))
            for step in range(steps):
                training.passes.give(step, *(Batch(*pair) for pair in itertools.islice(drawn, workload.micro_batches)))
                lanes.admit()
        losses = [training.passes.losses[step] for step in range(steps)]
        return Outcome(losses, training.parameters(), host.peak_bytes, host.used_bytes), lanes.trace()
    finally:
        training.close()


def slowed(seed: int, most_seconds: float) -> Callable[[Action], Action]:
    """Actions that sleep before they work, each for a time that depends on ``seed``, the task and the iteration only."""

    def around(action: Action) -> Action:
        def perform(task: Task, iteration: int) -> None:
            time.sleep(random.Random(f"{seed} {task.id.at(iteration)}").random() * most_seconds)
            action(task, iteration)

        return perform

    return around


def lanes_alive() -> list[str]:
    """Names of lane threads that have not ended."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("autohete-")]
