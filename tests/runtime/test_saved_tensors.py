"""What a forward saves is known by the module that makes it; each tensor goes its own way, and training stays the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.modules import STEPS, VOCABULARY, batches
from torch import Tensor, nn

from autohete.errors import InputError
from autohete.hardware import Hardware, Place, load_hardware
from autohete.plan import Activations, Plan, Route, SavedRoute, UnitPlan
from autohete.plan.policy import Judge
from autohete.profile import Profile, analytic_profile
from autohete.train.measured import measured_profile_on
from autohete.train.trainer import Trainer
from autohete.workload import Kernels, Precision
from autohete.workload.config import parse_model

transformers = pytest.importorskip("transformers")


def node() -> Hardware:
    """A node with a place behind the host and one beside the GPU."""
    drives = Place("nvme", 10**12, 1e9, 1e9, 1e-5)
    return replace(load_hardware("a100-40gb-epyc7713"), places=(drives, replace(drives, name="peer", beside="gpu")))


def llama(dtype: torch.dtype = torch.float32) -> Any:
    """LLaMA with three blocks, as transformers has it."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=88, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype).train()


class Routed:
    """Each block with the same routes.

    Args:
        unit: the decisions for a block.
    """

    name = "routed"

    def __init__(self, unit: UnitPlan) -> None:
        self.unit = unit

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """The plan; it has no choice."""
        return Plan(self.name, (UnitPlan(), *[self.unit] * (len(profile.units) - 2), UnitPlan()))


@cache
def profile_of(make: Callable[..., Any], dtype: torch.dtype) -> Profile:
    """What was measured of a model."""
    return measured_profile_on(node(), make(dtype), batches()[0])


def trained(make: Callable[..., Any], dtype: torch.dtype, policy: Routed | str) -> tuple[list[float], list[Tensor], int, int]:
    """Losses and parameters of some steps, and the measured and the predicted peak."""
    with Trainer(
        make(dtype), policy=policy, hardware=node(), profile=profile_of(make, dtype), gpu_memory="1GiB", blocks="model.layers"
    ) as trainer:
        torch.manual_seed(2)
        losses = [trainer.step(batch) for batch in batches()[:STEPS]]
        found = trainer.comparison()
        return losses, trainer.parameters(), found.measured_peak_bytes, found.predicted_peak_bytes


def test_saved_tensors_are_named_by_the_modules_that_make_them() -> None:
    """An unmodified LLaMA saves what a lean block would need and no more, once the others are made again: the products' and
    attention's results, and the sum of the residual stream.
    """
    unit = profile_of(llama, torch.float32).units[1]
    kept = {one.name for one in unit.saved} - set(unit.selected)
    assert kept == {f"{name}:kept" for name in ("self_attn", "self_attn.v_proj", "block", "mlp.gate_proj", "mlp.up_proj")}
    assert set(unit.selected) == {"input_layernorm", "post_attention_layernorm", "mlp.act_fn", "mlp"}
    assert all(one.seconds is not None for one in unit.saved)  # nothing in it is random
    assert sum(one.size_bytes for one in unit.saved) == unit.kept_bytes
    config = {**llama().config.to_dict(), "num_hidden_layers": 3}
    workload = replace(parse_model(config, "llama"), batch_size=2, sequence_length=8, precision=Precision.FP32)
    lean = analytic_profile(replace(workload, kernels=Kernels.LEAN), node()).units[1]
    assert unit.kept_bytes - unit.bytes_of(unit.selected) == pytest.approx(lean.kept_bytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turn", range(4))
def test_every_tensor_may_go_any_way(turn: int, dtype: torch.dtype) -> None:
    """Made again, on the host, in a place behind it or beside the GPU: the bits of ordinary training, in the bytes
    predicted.
    """
    ways: list[Callable[[str], SavedRoute]] = [
        lambda name: SavedRoute(name, recomputed=True),
        *(lambda name, home=home: SavedRoute(name, Route(home)) for home in ("host", "nvme", "peer")),
    ]
    names = [one.name for one in profile_of(llama, dtype).units[1].saved]
    routes = tuple(ways[(turn + place) % len(ways)](name) for place, name in enumerate(names))
    kept = [Route(), Route("host", 2)][turn % 2]
    ordinary = trained(llama, dtype, "resident")
    found = trained(llama, dtype, Routed(UnitPlan(Activations.SELECTIVE, kept=kept, saved=routes)))
    assert found[0] == ordinary[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], ordinary[1], strict=True))
    assert found[2] <= found[3] < ordinary[2]


def test_all_of_it_may_be_made_again() -> None:
    """Then a block keeps nothing but its input, as if it were recomputed as a whole."""
    names = [one.name for one in profile_of(llama, torch.float32).units[1].saved]
    routes = tuple(SavedRoute(name, recomputed=True) for name in names)
    ordinary, found = (
        trained(llama, torch.float32, policy) for policy in ("resident", Routed(UnitPlan(Activations.SELECTIVE, saved=routes)))
    )
    assert found[0] == ordinary[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], ordinary[1], strict=True))
    assert found[2] == found[3]


class Drops(nn.Module):
    """A block that draws random numbers and changes a tensor in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, 32) -> the same."""
        result: Tensor = x + self.down(self.drop(torch.sigmoid_(self.up(x))))
        return result


class Model(nn.Module):
    """Three such blocks."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.blocks = nn.ModuleList(Drops() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, sequence) -> (batch, sequence, vocabulary)."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def test_what_is_random_or_changed_later_is_kept() -> None:
    """It is listed as what cannot be made again, and a plan that wants that is refused before training."""
    profile = measured_profile_on(load_hardware("a100-40gb-epyc7713"), Model(), batches()[0])
    times = {one.name: one.seconds for one in profile.units[1].saved}
    assert times["up:kept"] is None  # changed in place after the product
    bad = Routed(UnitPlan(Activations.SELECTIVE, saved=(SavedRoute("up:kept", recomputed=True),)))
    with (
        Trainer(Model(), policy=bad, hardware=load_hardware("a100-40gb-epyc7713"), profile=profile) as trainer,
        pytest.raises(InputError, match=r"the saved tensors up:kept of unit 1 \(transformer\) are to be made again, but only"),
    ):
        trainer.prepare(batches()[0])


def test_names_of_another_model_are_refused() -> None:
    """A profile whose names the forward does not have ends in an error that says what it does have."""
    profile = profile_of(llama, torch.float32)
    renamed = [replace(one, name=one.name.replace("mlp", "ffn")) for one in profile.units[1].saved]
    units = tuple(replace(unit, saved=tuple(renamed)) if unit.saved else unit for unit in profile.units)
    policy = Routed(UnitPlan(saved=(SavedRoute("ffn", Route("host")),)))
    with (
        Trainer(
            llama(), policy=policy, hardware=node(), profile=replace(profile, units=units), blocks="model.layers"
        ) as trainer,
        pytest.raises(Exception, match=r"route for the saved tensors 'ffn', but the forward saves .*mlp.up_proj.*measure"),
    ):
        trainer.step(batches()[0])
