"""Blocks that hide something from whoever makes their saved tensors again: training has the bits of plain PyTorch all the same.

Each block is trained with selective recomputation, with everything that can be made again made again, and with everything on
the host. What its operations do besides returning their results differs from block to block.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.modules import STEPS, VOCABULARY, batches
from torch import Tensor, nn
from torch.nn import functional

from autohete.errors import InputError, TaskError
from autohete.hardware import load_hardware
from autohete.plan import Activations, Plan, Route, SavedRoute, UnitPlan
from autohete.plan.policy import Judge
from autohete.profile import Profile
from autohete.runtime.losses import next_token_loss
from autohete.train.measured import measured_profile_on
from autohete.train.trainer import Trainer

HIDDEN = 32
NODE = load_hardware("a100-40gb-epyc7713")

Forward = Callable[[Any, Any], Any]


class Block(nn.Module):
    """A norm and an MLP, with what a case adds to them.

    Args:
        forward: computes (batch, sequence, 32) -> the same.
        prepare: adds modules, parameters and buffers.
    """

    def __init__(self, forward: Forward, prepare: Callable[[Any], object]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self._forward = forward
        prepare(self)

    def forward(self, x: Tensor) -> Any:
        """As the case has it."""
        return self._forward(self, x)

    def mlp(self, x: Tensor) -> Tensor:
        """(batch, sequence, 32) -> the same."""
        result: Tensor = self.down(functional.gelu(self.up(x)))
        return result


class Model(nn.Module):
    """Three such blocks between an embedding and a head."""

    def __init__(self, forward: Forward, prepare: Callable[[Any], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.blocks = nn.ModuleList(Block(forward, prepare) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, sequence) -> (batch, sequence, vocabulary)."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        logits: Tensor = self.head(x)
        return logits


def complex_of(x: Tensor) -> Tensor:
    """Pairs of neighbours as complex numbers."""
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))


def norm_of_batch(block: Any, x: Any) -> Any:
    """The kernel writes the running statistics, which its schema does not say."""
    y = functional.gelu(x - block.batch.running_mean)
    y = block.batch(y.mT).mT
    return x + block.mlp(y + block.batch.running_mean)


def written_result(block: Any, x: Any) -> Any:
    """A product is written over its own argument."""
    y = block.norm(x)
    with torch.no_grad():
        b = y.abs() + 1
        torch.mul(b, 0.5, out=b)
    return x + block.mlp(b * block.scale * y)


def changed_result(block: Any, x: Any) -> Any:
    """A result is changed in place by an operation that reads nothing else."""
    y = functional.gelu(block.norm(x))
    y.mul_(1.5)
    return x + block.mlp(y)


def written_buffer(block: Any, x: Any) -> Any:
    """So is a buffer."""
    y = functional.gelu(block.norm(x) + block.count)
    torch.mul(block.count, 1.1, out=block.count)
    return x + block.mlp(y)


def replaced_buffer(block: Any, x: Any) -> Any:
    """The memory of a buffer is another one afterwards."""
    y = functional.gelu(block.norm(x) + block.count)
    block.count.data = block.count.data * 1.1
    return x + block.mlp(functional.gelu(y + block.count))


def conjugate(block: Any, x: Any) -> Any:
    """Elements are read as their conjugates."""
    y = block.norm(x) * 1.5
    c = complex_of(y)
    return x + block.mlp(functional.gelu((c @ c.mH).real @ y))


def negative(block: Any, x: Any) -> Any:
    """Elements are read as their negatives."""
    c = complex_of(block.norm(x) * 1.5) * 1.0
    k = c.conj().imag
    return x + block.mlp(torch.cat([k * k * c.real, k.exp()], -1))


def complex_parameter(block: Any, x: Any) -> Any:
    """A parameter is saved in another type than its own."""
    y = complex_of(block.norm(x)) * torch.view_as_complex(block.pairs)
    return x + block.mlp(functional.gelu(torch.view_as_real(y).flatten(-2)))


def second_result(block: Any, x: Any) -> Any:
    """What only the graph of the second result has saved is gone once nobody has that."""
    h = block.up(block.norm(x))
    return x + block.down(functional.gelu(h + 1)), h.sin()


def recurrent(block: Any, x: Any) -> Any:
    """The kernel returns a workspace only where gradients are enabled."""
    return x + block.mlp(block.lstm(block.norm(x))[0])


def experts(block: Any, x: Any) -> Any:
    """An expert without tokens saves nothing."""
    y = block.norm(x).reshape(-1, HIDDEN)
    weights, chosen = block.router(y).softmax(-1).topk(1, -1)
    out = torch.zeros_like(y)
    for number, expert in enumerate(block.experts):
        token, place = torch.where(chosen == number)
        if token.numel():
            out = out.index_add(0, token, functional.silu(expert(y[token])) * weights[token, place, None])
    return x + out.view_as(x)


def attribute(block: Any, x: Any) -> Any:
    """The block holds on to a tensor that backward needs, too."""
    block.last = functional.gelu(block.norm(x))
    return x + block.mlp(block.last)


class Unseen(torch.autograd.Function):
    """NumPy writes the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y.detach().numpy()[...] = x.detach().numpy() * 2
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (y,) = ctx.saved_tensors
        return gradients[0] * 2 + gradients[0] * y * 0.01


def unseen(block: Any, x: Any) -> Any:
    """A kernel that PyTorch does not see fills a tensor of zeros."""
    return x + block.mlp(Unseen.apply(block.norm(x)))  # type: ignore[no-untyped-call]


def derivative(block: Any, x: Any) -> Any:
    """torch.func lets nobody see what is saved."""
    slope = torch.func.vmap(torch.func.vmap(torch.func.grad(lambda z: (z.sin() * z).sum())))
    return x + block.mlp(functional.gelu(slope(block.norm(x))))


def route(block: Any) -> None:
    """Add experts, and what chooses among them."""
    block.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(8))
    block.router = nn.Linear(HIDDEN, 8, bias=False)


CASES: dict[Forward, Callable[[Any], object]] = {
    norm_of_batch: lambda block: setattr(block, "batch", nn.BatchNorm1d(HIDDEN)),
    written_result: lambda block: setattr(block, "scale", nn.Parameter(torch.ones(HIDDEN))),
    changed_result: lambda block: None,
    written_buffer: lambda block: block.register_buffer("count", torch.ones(HIDDEN)),
    replaced_buffer: lambda block: block.register_buffer("count", torch.ones(HIDDEN)),
    conjugate: lambda block: None,
    negative: lambda block: None,
    complex_parameter: lambda block: setattr(block, "pairs", nn.Parameter(torch.randn(HIDDEN // 2, 2) * 0.1 + 1)),
    second_result: lambda block: None,
    recurrent: lambda block: setattr(block, "lstm", nn.LSTM(HIDDEN, HIDDEN, batch_first=True)),
    experts: route,
    attribute: lambda block: None,
    unseen: lambda block: None,
}


class EverythingGoes:
    """Every block has all that its forward saves made again where that is possible, or on the host.

    Args:
        again: which of the two.
    """

    name = "everything goes"

    def __init__(self, *, again: bool) -> None:
        self.again = again

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """The plan; it has no choice."""
        away = UnitPlan(kept=Route("host"))
        inner = []
        for unit in profile.units[1:-1]:
            names = [one.name for one in unit.saved if one.seconds is not None]
            again = UnitPlan(Activations.SELECTIVE, saved=tuple(SavedRoute(name, recomputed=True) for name in names))
            inner.append(again if self.again and names else away)
        return Plan(self.name, (UnitPlan(), *inner, UnitPlan()))


def plain(model: Model) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of ordinary training, and the state after it."""
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses = []
    for ids, targets in batches()[:STEPS]:
        loss = next_token_loss(model(ids), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("forward", CASES, ids=lambda forward: forward.__name__)
def test_what_a_block_hides_changes_no_bit(forward: Forward) -> None:
    """Losses, parameters and buffers are those of plain PyTorch, however what the block saves comes back."""
    torch.set_num_threads(1)
    losses, state = plain(Model(forward, CASES[forward]))
    profile = measured_profile_on(NODE, Model(forward, CASES[forward]), batches()[0])
    for policy in ("resident", "resident:checkpointing=selective", EverythingGoes(again=True), EverythingGoes(again=False)):
        if isinstance(policy, str) and "selective" in policy and not any(unit.selected for unit in profile.units):
            continue
        model = Model(forward, CASES[forward])
        with Trainer(model, policy=policy, hardware=NODE, profile=profile, gpu_memory="1GiB") as trainer:
            assert [trainer.step(batch) for batch in batches()[:STEPS]] == losses, policy
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]), (policy, name)


def test_torch_func_in_a_block_leaves_nothing_to_select() -> None:
    """Its profile names nothing, which is no obstacle to other plans."""
    losses, _ = plain(Model(derivative, lambda block: None))
    profile = measured_profile_on(NODE, Model(derivative, lambda block: None), batches()[0])
    assert not any(unit.saved for unit in profile.units)
    with Trainer(Model(derivative, lambda block: None), policy="resident", hardware=NODE, profile=profile) as trainer:
        assert [trainer.step(batch) for batch in batches()[:STEPS]] == losses


class Shared(nn.Module):
    """Blocks that are given a tensor that changes after them, or only once it is unused."""

    def __init__(self, *, changes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.blocks = nn.ModuleList(Masked() for _ in range(3))
        self.changes = changes

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, sequence) -> (batch, sequence, vocabulary)."""
        x, mask = self.embedding(ids), torch.ones(1000, HIDDEN)
        for block in self.blocks:
            x = block(x, mask)
        if self.changes:
            mask.zero_()
        logits: Tensor = self.head(x)
        return logits


class Masked(nn.Module):
    """A block that adds something it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """(batch, sequence, 32) -> the same."""
        result: Tensor = x + self.inner(functional.gelu(self.norm(x) + mask[: x.shape[1]]))
        return result


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_an_argument_that_changes_later_is_refused(checkpointing: str) -> None:
    """A recomputation would read the changed tensor."""
    profile = measured_profile_on(NODE, Shared(changes=False), batches()[0])
    policy = f"resident:checkpointing={checkpointing}"
    with (
        Trainer(Shared(changes=True), policy=policy, hardware=NODE, profile=profile) as trainer,
        pytest.raises(TaskError, match="that the forward of block 3 has read has been changed in place"),
    ):
        trainer.step(batches()[0])
    with Trainer(Shared(changes=True), policy="resident", hardware=NODE) as trainer:  # measured with the change
        trainer.step(batches()[0])


@pytest.mark.slow
def test_nothing_of_a_step_stays() -> None:
    """What a forward was given is gone after the step without Python's cyclic garbage collector."""

    def masks() -> int:
        return sum(type(one) is Tensor and one.untyped_storage().nbytes() == 4000 * HIDDEN for one in gc.get_objects())

    policy, profile = "resident:checkpointing=selective", measured_profile_on(NODE, Shared(changes=False), batches()[0])
    gc.collect()
    gc.disable()
    try:
        with Trainer(Shared(changes=False), policy=policy, hardware=NODE, profile=profile) as trainer:
            before = masks()
            for batch in [*batches()] * 5:
                trainer.step(batch)
            assert masks() - before < 5 * STEPS  # the last step's may still be there
    finally:
        gc.enable()


class Deep(nn.Module):
    """Modules within modules."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = Deep(depth - 1) if depth else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        result: Tensor = self.inner(x)
        return result


def test_modules_of_other_threads_give_no_names() -> None:
    """A data loader or an evaluation may call modules meanwhile."""
    forward, prepare = attribute, CASES[attribute]
    alone = measured_profile_on(NODE, Model(forward, prepare), batches()[0])
    ended = threading.Event()

    def call_modules() -> None:
        while not ended.wait(1e-4):
            Deep(6)(torch.zeros(1))

    thread = threading.Thread(target=call_modules)
    thread.start()
    try:
        beside = measured_profile_on(NODE, Model(forward, prepare), batches()[0])
    finally:
        ended.set()
        thread.join()
    assert [one.name for one in beside.units[1].saved] == [one.name for one in alone.units[1].saved]


def by_reference(block: Any, x: Any) -> Any:
    """Hooks of its own keep what backward needs as it is, parameters included."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        y = functional.gelu(block.up(block.norm(x)))
    return x + block.down(functional.silu(y))


def copied(block: Any, x: Any) -> Any:
    """They keep copies."""
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        y = functional.gelu(block.up(block.norm(x)))
    return x + block.down(functional.silu(y))


def checkpointed(block: Any, x: Any) -> Any:
    """They keep nothing."""
    return x + torch.utils.checkpoint.checkpoint(block.mlp, block.norm(x), use_reentrant=False)


@pytest.mark.slow
@pytest.mark.parametrize("forward", [by_reference, copied, checkpointed], ids=lambda forward: forward.__name__)
def test_hooks_of_a_block_that_keep_parameters_keep_them_on_the_gpu(forward: Forward) -> None:
    """Where the parameters leave between forward and backward, their memory is another unit's by then."""
    losses, _ = plain(Model(forward, lambda block: None))
    for policy in ("resident", "stronghold:window=1"):
        with Trainer(Model(forward, lambda block: None), policy=policy, hardware=NODE, gpu_memory="1GiB") as trainer:
            if forward is by_reference and policy != "resident":
                with pytest.raises(InputError, match="keeps parameters until backward by saved_tensors_hooks of its own"):
                    trainer.step(batches()[0])
            else:
                assert [trainer.step(batch) for batch in batches()[:STEPS]] == losses
