"""Training scripts with models of ``transformers``. Frameworks differ in how a model is prepared and stepped."""

from __future__ import annotations

import json
import textwrap
from string import Template

from autohete import __version__
from autohete.frameworks.framework import Decided, ModelFiles
from autohete.plan import Processor
from autohete.quantities import format_seconds
from autohete.workload import Precision
from autohete.workload.optimizers import Optimizer

#: The version whose models the scripts are tested with.
TRANSFORMERS = "5.23.0"
#: Parameters that are trained, in scripts.
TRAINED = "trained(model)"
#: Where the shape of the model is, beside the script.
MODEL_FOLDER = "model"

#: How the optimizers that scripts use are made.
OPTIMIZERS = {
    Optimizer.ADAMW: "torch.optim.AdamW({trained}, lr=1e-5, fused={fused})",
    Optimizer.ADAMW_PURE_BF16: "torch.optim.AdamW({trained}, lr=1e-5, fused={fused})",
    Optimizer.SGD: "torch.optim.SGD({trained}, lr=1e-3)",
    Optimizer.SGD_MOMENTUM: "torch.optim.SGD({trained}, lr=1e-3, momentum=0.9)",
    Optimizer.ADAFACTOR: "torch.optim.Adafactor({trained}, lr=1e-3)",
    Optimizer.ADAFACTOR_PURE_BF16: "torch.optim.Adafactor({trained}, lr=1e-3)",
    Optimizer.ADAMW8BIT: "bitsandbytes.optim.AdamW8bit({trained}, lr=1e-5)",
    Optimizer.ADAMW8BIT_PURE_BF16: "bitsandbytes.optim.AdamW8bit({trained}, lr=1e-5)",
}
_TYPES = {Precision.BF16: "bfloat16", Precision.FP16: "float16", Precision.FP32: "float32"}

_SCRIPT = Template('''\
"""$title

$facts

Start: $command
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
$imports
HERE = Path(__file__).resolve().parent
BATCH_SIZE, SEQUENCE_LENGTH, MICRO_BATCHES = $batch_size, $sequence_length, $micro_batches
SIMULATED_SECONDS = $seconds


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--model", help="name or folder of weights$weights; default: random ones")
    parser.add_argument("--text", type=Path, help="a text file; default: random tokens, to see speed and memory")
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args()


def build(given: argparse.Namespace, dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    if given.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype)
    else:
        config = transformers.AutoConfig.from_pretrained(HERE / "model")
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
$adapters$recompute    return model.train()


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def batches(given: argparse.Namespace, rows: int, vocabulary: int, rank: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    if given.text is None:
        while True:
            yield torch.randint(vocabulary, (rows, SEQUENCE_LENGTH), generator=generator)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model or HERE / "model")
    tokens = torch.tensor(tokenizer(given.text.read_text()).input_ids)
    while True:
        starts = torch.randint(len(tokens) - SEQUENCE_LENGTH + 1, (rows,), generator=generator)
        yield torch.stack([tokens[start : start + SEQUENCE_LENGTH] for start in starts.tolist()])


def train(steps: int, source: Iterator[torch.Tensor], step: Callable[[Iterator[torch.Tensor]], float], rank: int) -> None:
    for number in range(steps):
        began = time.perf_counter()
        loss = step(source)
        seconds = time.perf_counter() - began
        if rank == 0:
            print(f"step {number}: loss {loss:.6f}, {seconds:.2f} s (simulated: {SIMULATED_SECONDS:.2f} s)", flush=True)


def main() -> None:
    given = arguments()
$main

if __name__ == "__main__":
    main()
''')

_RANKS = """\
on_gpu = torch.accelerator.is_available()
device = "cuda" if on_gpu else "cpu"
dist.init_process_group({gpu} if on_gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
if on_gpu:
    torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
"""
_STEP = """
def step(source: Iterator[torch.Tensor]) -> float:
    total = 0.0
    for _ in range(MICRO_BATCHES):
        tokens = next(source).to(device)
        loss = {model}(input_ids=tokens, labels=tokens, use_cache=False).loss
{backward}
        total += loss.item()
{update}    return total / MICRO_BATCHES

train(given.steps, batches(given, BATCH_SIZE, vocabulary, rank), step, rank)
"""
_ADAPTERS = """\
    targets = $targets
    lora = peft.LoraConfig(r=$rank, lora_alpha=$twice, lora_dropout=$dropout, target_modules=targets)
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    model.enable_input_require_grads()
"""
_RECOMPUTE = 'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'


def training_script(
    decided: Decided, model: ModelFiles, *, tool: str, command: str, imports: str, main: str, recomputes: bool
) -> dict[str, str]:
    """Return ``train.py`` and the model's shape beside it.

    Args:
        decided, model: what is trained.
        tool: name and version.
        command: starts it.
        imports: lines of imports besides the standard library's that all scripts have.
        main: statements after ``given = arguments()``, which call ``build``, ``batches`` and ``train``.
        recomputes: whether blocks recompute their activations.
    """
    workload = decided.workload
    script = _SCRIPT.substitute(
        title=f"Train {workload.name} with {tool}.",
        facts=textwrap.fill(facts(decided), 110),
        command=command,
        imports=f"\n{imports}\n" + ("import peft\n" if workload.training.lora else ""),
        batch_size=workload.batch_size,
        sequence_length=workload.sequence_length,
        micro_batches=workload.micro_batches,
        seconds=f"{decided.seconds:.4g}",
        weights=f", such as {model.weights}" if model.weights else "",
        adapters=_adapters(decided),
        recompute=f"    {_RECOMPUTE}\n" if recomputes else "",
        main=textwrap.indent(main, "    "),
    )
    return {"train.py": script, f"{MODEL_FOLDER}/config.json": json.dumps(dict(model.config), indent=2) + "\n"}


def ranks(gpu: str = "cpu:gloo,cuda:nccl") -> str:
    """Statements that join the ranks, and set ``on_gpu``, ``device`` and ``rank``; ``gpu`` is the backend on GPUs."""
    return _RANKS.format(gpu=json.dumps(gpu))


def steps(model: str, backward: str, update: str = "") -> str:
    """Statements that train, where ``device``, ``vocabulary`` and ``rank`` are known.

    Args:
        model: what is called with tokens.
        backward: statements after each forward.
        update: statements after all micro-batches.
    """
    return _STEP.format(model=model, backward=textwrap.indent(backward, 8 * " "), update=textwrap.indent(update, 4 * " "))


def torch_steps(decided: Decided) -> str:
    """The :func:`steps` of ``model`` and ``optimizer`` in plain PyTorch, and the end of the ranks."""
    norm = decided.workload.clip_norm
    clip = f"torch.nn.utils.clip_grad_norm_(model.parameters(), {norm})\n" if decided.workload.clips else ""
    update = f"{clip}optimizer.step()\noptimizer.zero_grad()\n"
    return steps("model", "(loss / MICRO_BATCHES).backward()", update) + "dist.destroy_process_group()\n"


def _adapters(decided: Decided) -> str:
    workload = decided.workload
    if workload.training.lora is None:
        return ""
    names = {layer.name for unit in range(workload.unit_count) for layer in workload.adapted_layers(unit)}
    rank, dropout = workload.training.lora.rank, workload.training.lora.dropout
    return Template(_ADAPTERS).substitute(rank=rank, twice=2 * rank, dropout=dropout, targets=sorted(names))


def requirements(decided: Decided, *tools: str, torch: str = "torch") -> str:
    """What ``pip install -r`` needs to run the script."""
    adapters = ["peft"] if decided.workload.training.lora else []
    return "\n".join(sorted([*tools, *adapters, torch, f"transformers=={TRANSFORMERS}"])) + "\n"


def facts(decided: Decided) -> str:
    """The origin of a written file, in one paragraph."""
    workload, hardware = decided.workload, decided.hardware
    return (
        f"Written by autohete {__version__} for the plan of {decided.plan.policy}: simulated at "
        f"{format_seconds(decided.seconds)} per iteration of {workload.micro_batches} x {workload.batch_size} x "
        f"{workload.sequence_length} tokens on {hardware.title}, with {workload.kernels} kernels."
    )


def optimizer_of(decided: Decided, fused: bool = True) -> str:
    """The expression that makes the optimizer of ``model``."""
    return OPTIMIZERS[decided.workload.training.optimizer].format(trained=TRAINED, fused=fused)


def dtype_of(decided: Decided) -> str:
    """The type of the model's parameters, as torch names it."""
    return f"torch.{_TYPES[decided.workload.precision]}"


def threads(decided: Decided) -> str:
    """What a command starts with if several ranks update on the CPU: torchrun alone gives each of them one thread."""
    hardware = decided.hardware
    updates = any(unit.update.on is Processor.CPU for unit in decided.plan.units)
    return f"env OMP_NUM_THREADS={hardware.cpu.cores} " if updates and hardware.all_gpus_of_node > 1 else ""


def nodes_of(decided: Decided) -> int:
    """The number of nodes whose GPUs train together."""
    hardware = decided.hardware
    return hardware.all_gpus // hardware.all_gpus_of_node if hardware.all_gpus > 1 else 1


def torchrun(decided: Decided, program: str = "train.py") -> str:
    """The command that starts a program on each GPU; ranks that update on the CPU are bound to cores of their own."""
    environment, nodes = threads(decided), nodes_of(decided)
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29400 " if nodes > 1 else ""
    bound = "--numa-binding exclusive " if environment else ""
    return f"{environment}torchrun {several}{bound}--nproc-per-node {decided.hardware.all_gpus // nodes} {program}"
