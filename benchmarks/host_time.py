"""How many operations does the host of a GPU spend on a block, by framework: modules of transformers, PEFT, DeepSpeed, FSDP?

Command: ``PYTHONPATH=DIR python -W ignore benchmarks/host_time.py``, with these in DIR: ``pip install --no-deps --target DIR
peft==0.21.2 accelerate==1.15.0 deepspeed==0.18.6 einops hjson msgpack ninja psutil py-cpuinfo tqdm``. What is missing there is
left out of the table.

The unit is one small operation: the sum of two small tensors whose gradient is recorded. Blocks have width 16, so that nearly
all the time on one CPU thread is the host's. Before each pass some operations of the unit are timed, and the least
times are divided, which does not depend on the machine. On a GPU an operation also launches a kernel, which takes about
``LAUNCH`` of it. An operation of a block that launches a kernel counts as one unit; what Python does besides has no launches.

Collectives go to PyTorch's fake process group, which returns at once: what the host does for them counts, their time does not.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autohete.report.tables import console, table

WIDTH, BLOCKS, STEPS, WARM_UP, OPERATIONS = 16, 16, 40, 12, 200
#: Of the time of an operation on a GPU's host, what its launch takes: 2.7 of 8 us. An empty kernel is queued in 2.65 to 2.8 us
#: (github ahrefs/ocannl issue 488); a sum of tensors in 8 us on the host of an A100 (github flagos-ai/Torch-FL pull 27).
LAUNCH = 1 / 3
#: Calls of aten that launch nothing.
VIEWS = {
    *(
        "view",
        "_unsafe_view",
        "_reshape_alias",
        "as_strided",
        "t",
        "transpose",
        "permute",
        "slice",
        "select",
        "narrow",
        "split",
    ),
    *("split_with_sizes", "chunk", "unbind", "expand", "unsqueeze", "squeeze", "alias", "detach", "is_same_size", "lift_fresh"),
}


class Kernels(TorchDispatchMode):
    """Counts the operations that would launch a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket.__name__ not in VIEWS
        return function(*args, **(kwargs or {}))


def unit_seconds() -> float:
    """Time of one operation, now."""
    x, y = torch.ones(8, 8, requires_grad=True), torch.ones(8, 8)
    begin = time.process_time()
    for _ in range(OPERATIONS):
        x + y
    return (time.process_time() - begin) / OPERATIONS


def units(forward: Callable[[], Any], backward: Callable[[Any], object]) -> tuple[float, float]:
    """Time of a block's forward and backward, in operations without launches."""
    halves = []
    for _ in range(STEPS):
        unit = unit_seconds() * BLOCKS
        begin = time.process_time()
        loss = forward()
        middle = time.process_time()
        backward(loss)
        end = time.process_time()
        halves.append((unit, middle - begin, end - middle))
    unit, *least = (min(times) for times in zip(*halves[WARM_UP:], strict=True))
    return least[0] / unit, least[1] / unit


class Chain(nn.Module):
    """Blocks of so many linear layers and modules without parameters."""

    def __init__(self, linear: int, identities: int, bias: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        layers = [nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(linear * BLOCKS)]
        self.layers = nn.Sequential(*layers, *(nn.Identity() for _ in range(identities * BLOCKS)))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        """Return the output as transformers does."""
        outputs = import_module("transformers.modeling_outputs")
        return outputs.CausalLMOutput(logits=self.layers(self.embedding(input_ids)))


#: Linear layers of a block, modules without parameters, and whether the former have a bias.
CHAINS = {
    "4 linear layers": (4, 0, False),
    "12 linear layers": (12, 0, False),
    "4 linear layers, 8 identities": (4, 8, False),
    "4 linear layers with bias": (4, 0, True),
    "12 linear layers with bias": (12, 0, True),
}


def model(name: str) -> nn.Module:
    """Blocks of transformers, or a chain."""
    if name in CHAINS:
        return Chain(*CHAINS[name]).bfloat16()
    transformers = import_module("transformers")
    sizes: dict[str, Any] = {
        "Llama": {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 2, "num_key_value_heads": 2},
        "GPT2": {"n_embd": WIDTH, "n_head": 2, "n_layer": BLOCKS, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 1},
    }
    sizes["Qwen3"] = {**sizes["Llama"], "head_dim": WIDTH // 2}
    if name != "GPT2":
        sizes[name]["num_hidden_layers"] = BLOCKS
    config = getattr(transformers, f"{name}Config")(vocab_size=WIDTH, attn_implementation="sdpa", **sizes[name])
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config).train().bfloat16()
    return made


def loss_of(made: Callable[..., Any]) -> Any:
    """A forward."""
    return made(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False).logits.float().mean()


def counted(made: Any, backward: Callable[[Any], object]) -> tuple[tuple[float, float], tuple[float, float]]:
    """For a block, forward and backward: kernels, and operations with their launches."""
    with torch.backends.mkldnn.flags(enabled=False):  # it prepares each small product at length
        python = units(lambda: loss_of(made), backward)
        with Kernels() as forward_kernels:
            loss = loss_of(made)
        with Kernels() as backward_kernels:
            backward(loss)
    kernels = forward_kernels.count / BLOCKS, backward_kernels.count / BLOCKS
    operations = [LAUNCH * launched + (1 - LAUNCH) * all_ for launched, all_ in zip(kernels, python, strict=True)]
    return kernels, (operations[0], operations[1])


def plain(name: str) -> Any:
    """A model as it is."""
    return counted(model(name), torch.Tensor.backward)


def with_adapters(name: str) -> Any:
    """A frozen model with adapters on all products."""
    peft = import_module("peft")
    made = peft.get_peft_model(model(name), peft.LoraConfig(r=4, target_modules="all-linear"))
    made.enable_input_require_grads()
    return made


def adapted(name: str) -> Any:
    """A model with adapters."""
    return counted(with_adapters(name), torch.Tensor.backward)


def recomputed(name: str, *, reentrant: bool = False) -> Any:
    """A model that recomputes its blocks."""
    made: Any = model(name)
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    made.enable_input_require_grads()
    return counted(made, torch.Tensor.backward)


def zero(name: str, stage: int, made: Callable[[str], Any] = model, *, persistent: int = 0) -> Any:
    """A model under DeepSpeed, without the counting for each gradient that only 0.18.5 and 0.18.6 do (pull 7886). Stage 3 never
    releases parameters of fewer than ``persistent`` elements.
    """
    deepspeed = import_module("deepspeed")
    for file in ("stage3", "stage_1_and_2"):
        vars(import_module(f"deepspeed.runtime.zero.{file}"))["count_used_parameters_in_backward"] = len
    module = made(name)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": persistent, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_allow_untested_optimizer": True,
    }
    trained = [one for one in module.parameters() if one.requires_grad]
    engine = deepspeed.initialize(model=module, config=config, model_parameters=trained)[0]
    return counted(engine, engine.backward)


def sharded(name: str, version: int) -> Any:
    """A model under FSDP, block by block."""
    made: Any = model(name)
    blocks = made.transformer.h if name == "GPT2" else made.model.layers
    fsdp = import_module("torch.distributed.fsdp")
    if version == 2:
        mesh = import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (dist.get_world_size(),))
        for block in [*blocks, made]:
            fsdp.fully_shard(block, mesh=mesh)
        return counted(made, torch.Tensor.backward)
    policy = fsdp.wrap.ModuleWrapPolicy({type(blocks[0])})
    made = fsdp.FullyShardedDataParallel(made, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))
    return counted(made, torch.Tensor.backward)


def main() -> None:
    """Measure and print a table."""
    torch.set_num_threads(1)
    environment = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"}
    os.environ.update(environment, DS_ACCELERATOR="cpu")
    fake: Any = import_module("torch.testing._internal.distributed.fake_pg")
    start: Any = dist.init_process_group
    start("fake", rank=0, world_size=8, store=fake.FakeStore())
    shown = table(
        f"PyTorch {torch.__version__}, one CPU thread, an operation of {unit_seconds() * 1e6:.1f} us",
        ["", "modules", "kernels forward", "backward", "operations forward", "backward"],
    )
    for name in sys.argv[1:] or ("Llama", "Qwen3", "GPT2", *CHAINS):
        lists = [one for one in model(name).modules() if isinstance(one, nn.ModuleList)]
        modules = sum(1 for _ in lists[0][0].modules()) if lists else sum(CHAINS[name][:2])
        measures: dict[str, Callable[[str], Any]] = {
            name: plain,
            f"{name}, recomputed": recomputed,
            f"{name}, recomputed, reentrant": lambda name: recomputed(name, reentrant=True),
            f"{name}, PEFT": adapted,
            f"{name}, ZeRO-2": lambda name: zero(name, 2),
            f"{name}, ZeRO-3": lambda name: zero(name, 3),
            f"{name}, ZeRO-3, persistent": lambda name: zero(name, 3, persistent=10**6),
            f"{name}, PEFT, ZeRO-3": lambda name: zero(name, 3, with_adapters),
            f"{name}, FSDP1": lambda name: sharded(name, 1),
            f"{name}, FSDP2": lambda name: sharded(name, 2),
        }
        if name in CHAINS:
            measures = {
                label: measure for label, measure in measures.items() if label == name or label.startswith(f"{name}, ZeRO-3")
            }
        for label, measure in measures.items():
            try:
                kernels, operations = measure(name)
            except ModuleNotFoundError as error:
                print(f"{label}: {error}", file=sys.stderr)
                continue
            shown.add_row(label, str(modules), *(f"{one:.0f}" for one in (*kernels, *operations)))
    console().print(shown)


if __name__ == "__main__":
    main()
