"""What FSDP holds beside the passes, against real trainings of a small Llama with PEFT's adapters on the CPU.

One process stands for both: collectives of the ``fake`` backend do nothing, so values are wrong, but every tensor is there.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from peft.utils.other import fsdp_auto_wrap_policy  # noqa: E402
from support.counting import Counter  # noqa: E402
from torch import distributed, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from autohete.hardware import load_hardware  # noqa: E402
from autohete.policies import parse_policy  # noqa: E402
from autohete.schedule import BufferId, Kind, Value  # noqa: E402
from autohete.simulate import Simulation, simulate  # noqa: E402
from autohete.workload import Kernels, Workload  # noqa: E402
from autohete.workload.config import parse_model  # noqa: E402
from autohete.workload.training import Adapters, Lora, Training  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

GPUS, BATCH, SEQUENCE, LAYERS = 2, 3, 40, 4
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
INPUT_BYTES = 2 * BATCH * SEQUENCE * 64
TARGETS, MICRO_BATCHES = ("q_proj", "v_proj"), 3


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    distributed.init_process_group("fake", rank=0, world_size=GPUS, store=FakeStore())
    yield
    distributed.destroy_process_group()


class Checkpointed(nn.Module):
    """Checkpoints a block with whatever wraps it, as the loop over blocks of transformers 4.45 does."""

    def __init__(self, block: Any, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Any, **kwargs: Any) -> Any:
        return checkpoint(lambda x: self.block(x, **kwargs), x, use_reentrant=self.reentrant)


def adapted(base: Any) -> Any:
    config = peft.LoraConfig(r=8, target_modules=list(TARGETS))
    return peft.get_peft_model(base, config, autocast_adapter_dtype=False).train()


def held_at_each_backward(version: int, around: bool, reentrant: bool) -> list[int]:
    """Tensors as large as a block's input, when the backward of each block begins, last block first."""
    config = transformers.LlamaConfig(**SIZES, attn_implementation="sdpa")
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = adapted(base)
    if not around:
        base.gradient_checkpointing_enable({"use_reentrant": reentrant})
    base.enable_input_require_grads()
    layers = base.model.layers
    if version == 1:
        apart = fsdp_auto_wrap_policy(model)  # type: ignore[no-untyped-call]
        whole = FullyShardedDataParallel(model, auto_wrap_policy=apart, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        mesh = init_device_mesh("cpu", (GPUS,))
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        whole = fully_shard(model, mesh=mesh)
    if around:
        base.model.layers = nn.ModuleList(Checkpointed(layer, reentrant) for layer in base.model.layers)
    counter, found = Counter(), []

    def count(_: Any) -> None:
        counter.watch([])
        found.append(sum(size == INPUT_BYTES for _, size in counter._storages.values()))

    def hook(module: Any, inputs: Any, output: Any) -> None:
        if output.requires_grad and not torch._C._current_graph_task_id() >= 0:
            output.register_hook(count)

    for layer in base.model.layers:  # of what is checkpointed again
        layer.register_forward_hook(hook)
    tokens = torch.randint(0, 1000, (BATCH, SEQUENCE))
    with counter:
        whole(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return found


def simulated(policy: str, lora: Lora | None, micro_batches: int = 1) -> Simulation:
    plain = parse_model({"model_type": "llama", **SIZES}, "small")
    shape: dict[str, Any] = {"sequence_length": SEQUENCE, "batch_size": BATCH, "kernels": Kernels.EAGER_FLASH}
    workload: Workload = replace(plain, **shape, micro_batches=micro_batches, training=Training(lora))
    return simulate(workload, replace(load_hardware("a100-40gb-epyc7713"), gpus=GPUS), parse_policy(policy))


def predicted(policy: str) -> list[int]:
    """The same of the simulated schedule."""
    schedule = simulated(policy, Lora(8, TARGETS, adapters=Adapters.PLAIN)).schedule
    alive: dict[BufferId, int] = {}
    found = []
    for task in schedule.tasks:
        if task.id.kind is Kind.BACKWARD and 0 < task.id.unit <= LAYERS:
            found.append(sum(size == INPUT_BYTES for size in alive.values()))
        alive |= {one.id: one.size_bytes for one in task.allocates if one.id.value in (Value.INPUT, Value.INPUT_GRADIENT)}
        for one in task.frees:
            alive.pop(one.id, None)
    return found


@pytest.mark.parametrize(
    ("policy", "version", "around", "reentrant"),
    [
        ("resident:checkpointing=full,zero_stage=3,fsdp1,reentrant", 1, True, True),
        ("resident:checkpointing=full,zero_stage=3,fsdp1", 1, True, False),
        ("resident:checkpointing=full,zero_stage=3,fsdp1", 1, False, True),
        ("resident:checkpointing=full,zero_stage=3", 2, True, True),
    ],
)
def test_inputs_of_blocks_are_held_as_by_the_real_module(policy: str, version: int, around: bool, reentrant: bool) -> None:
    """FSDP1 with reentrant checkpointing around it holds the input of each block and its gradient until backward ends; it does
    not otherwise, and FSDP2 never does.
    """
    expected = (
        [LAYERS + 1, *(LAYERS + done for done in range(1, LAYERS))] if "reentrant" in policy else range(LAYERS + 1, 1, -1)
    )
    assert held_at_each_backward(version, around, reentrant) == predicted(policy) == [*expected]


def gradients_at_each_backward(with_adapters: bool, no_sync: bool) -> list[int]:
    """Bytes of the blocks' gradients when the backward of each block begins, last block first, micro-batch by micro-batch."""
    config = transformers.LlamaConfig(**SIZES, attn_implementation="sdpa")
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model, layers = adapted(base) if with_adapters else base.train(), base.model.layers
    base.gradient_checkpointing_enable({"use_reentrant": False})
    base.enable_input_require_grads()
    whole = sum(parameter.numel() * parameter.element_size() for parameter in layers[0].parameters())
    apart, cpu = ModuleWrapPolicy({type(layers[0])}), torch.device("cpu")
    fsdp = FullyShardedDataParallel(model, auto_wrap_policy=apart, device_id=cpu, use_orig_params=True)
    counter, found = Counter(), []

    def count(_: Any) -> None:
        counter.watch([])
        sizes = [size for _, size in counter._storages.values()]
        gathered = LAYERS * whole  # of parameters: FSDP resizes these storages, which the counter does not see
        found.append(sum(size for size in sizes if size in (whole, whole // GPUS)) - gathered)

    def hook(module: Any, inputs: Any, output: Any) -> None:
        if output.requires_grad and not torch._C._current_graph_task_id() >= 0:
            output.register_hook(count)

    for layer in layers:
        layer.register_forward_hook(hook)
    tokens = torch.randint(0, 1000, (BATCH, SEQUENCE))
    with counter:
        for left in reversed(range(MICRO_BATCHES)):
            with fsdp.no_sync() if no_sync and left else nullcontext():
                fsdp(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return found


@pytest.mark.parametrize("no_sync", [True, False], ids=["no_sync", "sync"])
@pytest.mark.parametrize("with_adapters", [True, False], ids=["adapters", "full"])
def test_gradients_of_flat_parameters_are_those_of_the_real_module(with_adapters: bool, no_sync: bool) -> None:
    """FSDP1 holds gradients of the frozen parameters beside adapters, under ``no_sync`` whole ones, as in the schedule."""
    lora = Lora(8, TARGETS, adapters=Adapters.PLAIN, base_gradients=True) if with_adapters else None
    policy = "resident:checkpointing=full,zero_stage=3,fsdp1" + ",no_sync" * no_sync
    simulation = simulated(policy, lora, MICRO_BATCHES)
    alive: dict[BufferId, int] = {}
    expected = []
    for task in simulation.schedule.tasks:
        if 0 < task.id.unit <= LAYERS:
            if task.id.kind is Kind.BACKWARD:
                expected.append(sum(alive.values()))
            alive |= {
                one.id: one.size_bytes for one in task.allocates if one.id.value in (Value.GRADIENTS, Value.GRADIENT_SHARD)
            }
            for one in task.frees:
                alive.pop(one.id, None)
    sums = LAYERS * 2 * simulation.profile.units[1].parameters // (1 if no_sync else GPUS)
    assert max(expected) == sums
    assert gradients_at_each_backward(with_adapters, no_sync) == expected
