"""Models of which a part is frozen: they train to the bits of plain PyTorch under every kind of policy."""

from __future__ import annotations

import pytest
import torch
from support.measured import is_within
from torch import Tensor, nn
from torch.nn import functional

from autohete import Trainer
from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.schedule import Value

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


class Cast(Adapted):
    """The same with adapters of another type than the layer, as peft has them."""

    def forward(self, hidden: Tensor) -> Tensor:
        low = self.up(self.down(hidden.to(self.down.weight.dtype)))
        added: Tensor = self.layer(hidden) + low.to(hidden.dtype)
        return added


def adapted(base: torch.dtype, adapter: torch.dtype) -> Small:
    """A model with a frozen base and adapters in each block; embedding and head are frozen, too."""
    torch.manual_seed(0)
    small = Small().to(base)
    small.requires_grad_(False)
    for block in small.blocks:
        assert isinstance(block, Residual)
        assert isinstance(block.a, nn.Linear)
        block.a = Cast(block.a)
        block.a.down.to(adapter).requires_grad_(True)
        block.a.up.to(adapter).requires_grad_(True)
    return small


def in_plain_pytorch(small: Small, batches: list[Tensor], micro_batches: int = 1) -> list[float]:
    """Train in a usual loop, with fp32 masters of 16-bit parameters; return the losses."""
    torch.set_num_threads(1)
    given = [parameter for parameter in small.parameters() if parameter.requires_grad]
    masters = [nn.Parameter(parameter.detach().float()) for parameter in given]
    adam, losses = torch.optim.AdamW(masters, fused=True), []
    for tokens in batches:
        parts = [loss(small(part), part) / micro_batches for part in tokens.chunk(micro_batches)]
        for part in parts:
            part.backward()  # type: ignore[no-untyped-call]
        losses.append(sum(part.item() for part in parts))
        for master, parameter in zip(masters, given, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        adam.step()
        for master, parameter in zip(masters, given, strict=True):
            parameter.data.copy_(master)
    return losses


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, 61, (4, 12), generator=torch.Generator().manual_seed(step))


LORA_POLICIES = [*POLICIES, "zero3_offload", "twin_flow", "zero_infinity", "mlp_offload", "rotor"]
DRIVE = load_hardware("rtx4090-workstation")


def adam(small: Small) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in small.parameters() if p.requires_grad], fused=True)


@pytest.mark.slow
@pytest.mark.parametrize("types", [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("policy", LORA_POLICIES)
def test_adapters_beside_a_frozen_base_of_any_type_train_as_in_plain_pytorch(policy: str, types: tuple[str, str]) -> None:
    """Losses and weights have the bits of plain PyTorch, wherever the base rests, and all bytes are those of the schedule."""
    base, adapter = (getattr(torch, name) for name in types)
    plain, trained, batches = adapted(base, adapter), adapted(base, adapter), [tokens_of(step) for step in range(STEPS)]
    expected = in_plain_pytorch(plain, batches)
    budget = "60%" if policy in ("autohete", "joint") else None
    with Trainer(trained, optimizer=adam(trained), policy=policy, gpu_memory=budget, loss=loss, hardware=DRIVE) as trainer:
        assert [trainer.step((tokens, tokens)) for tokens in batches] == expected
        assert is_within(trainer)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, trained.get_parameter(name)), name


def test_a_frozen_base_leaves_the_device() -> None:
    """Less device memory than the frozen base alone is enough."""
    small = adapted(torch.float32, torch.float32)
    base = sum(parameter.nbytes for parameter in small.parameters() if not parameter.requires_grad)
    tokens = tokens_of(0)[:1, :4]
    with Trainer(small, optimizer=adam(small), policy="fsdp2_offload", loss=loss, hardware=NODE) as trainer:
        trainer.step((tokens, tokens))
        assert is_within(trainer)
        assert trainer.comparison().measured_peak_bytes < 0.8 * base


@pytest.mark.parametrize("policy", ["resident", "fsdp2_offload", "streamed_states:weights"])
def test_frozen_parameters_are_read_and_written_between_steps(policy: str) -> None:
    """The caller sees the values of frozen parameters, and what it writes into them takes effect."""
    plain, trained = adapted(torch.float32, torch.float32), adapted(torch.float32, torch.float32)
    expected = in_plain_pytorch(plain, [tokens_of(0)])
    with Trainer(trained, optimizer=adam(trained), policy=policy, loss=loss, hardware=NODE) as trainer:
        found = [trainer.step((tokens_of(0), tokens_of(0)))]
        for name, value in plain.state_dict().items():
            assert torch.equal(value, trained.state_dict()[name]), name
        changed = {name: value * 0.5 for name, value in plain.state_dict().items() if "layer" in name}
        trained.load_state_dict(changed, strict=False)
        again = adapted(torch.float32, torch.float32)
        again.load_state_dict(plain.state_dict() | changed)
        trained.embedding.weight.requires_grad_(True)
        with pytest.raises(InputError, match=r"embedding\.weight\.requires_grad has become True"):
            trainer.step((tokens_of(1), tokens_of(1)))
        trained.embedding.weight.requires_grad = False
        for wanted in (False, True):  # as in ``disable_adapter`` of PEFT
            for block in trained.blocks:
                block.get_submodule("a.down").requires_grad_(wanted)
        found.append(trainer.step((tokens_of(1), tokens_of(1))))
    assert found == [*expected, loss(again(tokens_of(1)), tokens_of(1)).item()]


@pytest.mark.parametrize("used_by", ["loss", "two blocks"])
def test_a_frozen_parameter_that_is_used_elsewhere_stays(used_by: str) -> None:
    """A parameter that one block owns and something else uses, too, is on the device whenever it is needed."""

    def shared() -> Small:
        small = adapted(torch.float32, torch.float32)
        if used_by == "two blocks":
            small.blocks[2].b = small.blocks[0].b
        return small

    def penalised(logits: Tensor, targets: Tensor) -> Tensor:
        weight = trained.blocks[0].b.weight  # type: ignore[union-attr]
        return loss(logits, targets) + weight.square().sum() * 0.0  # type: ignore[operator]

    plain, trained = shared(), shared()
    expected = in_plain_pytorch(plain, [tokens_of(0), tokens_of(1)])
    given = penalised if used_by == "loss" else loss
    with Trainer(trained, optimizer=adam(trained), policy="fsdp2_offload", loss=given, hardware=NODE) as trainer:
        assert [trainer.step((tokens_of(step), tokens_of(step))) for step in range(2)] == expected


def test_a_frozen_expert_without_tokens_moves_with_its_block() -> None:
    """What no sequence of the first batch has used belongs to its block, and is there when it is used later."""

    class Routed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.expert = inner, nn.Linear(32, 32)

        def forward(self, hidden: Tensor) -> Tensor:
            changed: Tensor = self.inner(hidden)
            return changed + self.expert(changed) if len(hidden) == 1 and hidden.shape[1] == 7 else changed

    def routed() -> Small:
        small = adapted(torch.float32, torch.float32)
        small.blocks[1] = Routed(small.blocks[1])
        small.blocks[1].expert.requires_grad_(False)
        return small

    plain, trained = routed(), routed()
    given = [tokens_of(0), tokens_of(1)[:1, :7]]
    expected, policy = in_plain_pytorch(plain, given), "fsdp2_offload"
    with Trainer(trained, optimizer=adam(trained), policy=policy, loss=loss, hardware=NODE, blocks="blocks") as trainer:
        assert [trainer.step((tokens, tokens)) for tokens in given] == expected
        assert trainer.prediction is not None
        resting = {
            (one.id.unit, one.memory) for one in trainer.prediction.schedule.resident if one.id.value is Value.PARAMETERS
        }
    assert (2, "host") in resting


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["zero_offload", "fsdp2_offload", "streamed_states:weights", "patrickstar", "l2l:paper"])
def test_adapters_accumulate(policy: str) -> None:
    """Gradients of several micro-batches are added up beside a frozen base as in plain PyTorch."""
    plain, trained = (adapted(torch.bfloat16, torch.float32) for _ in range(2))
    batches = [tokens_of(step) for step in range(STEPS)]
    expected = in_plain_pytorch(plain, batches, micro_batches=2)
    with Trainer(trained, optimizer=adam(trained), policy=policy, loss=loss, hardware=NODE, micro_batches=2) as trainer:
        assert [trainer.step((tokens, tokens)) for tokens in batches] == expected
        assert is_within(trainer)
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, trained.get_parameter(name)), name
