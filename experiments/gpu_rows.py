"""Do predictions hold for what people run: models of transformers and PEFT, trained by a plain loop on this GPU?

Command: ``python experiments/gpu_rows.py [--source FILE] [--out DIR] [--only TEXT] [--kernels]``. Machine: one with the GPU
that the source names, otherwise idle; ten seconds a row. Needs transformers, PEFT for rows with adapters, Liger Kernel for
rows with its kernels. Without a GPU it says so and does nothing.

The rows of a source in ``experiments/published`` say what is trained. Each is trained here as their comments say, with weights
and tokens that are drawn, and its median iteration and its memory are written to ``gpu_rows.json``, beside what was predicted.
Other rows of an earlier run stay in it.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

import gc
import json
import statistics
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cyclopts import App
from torch import Tensor, nn

from autohete.cli.app import run_app
from autohete.files import make_folder, write_text
from autohete.report.tables import console, print_text
from autohete.train.machine import versions
from experiments.gpu_check import earlier, told
from experiments.published import FOLDER, Row, Source

DEVICE = "cuda"
WARMUP, STEPS = 3, 5
#: Steps with batches of different lengths, after which most sizes of memory have been asked for.
OF_LENGTHS = 60


def model_of(given: dict[str, Any], *, checkpoints: bool) -> Any:
    """Return the model on the GPU: in bf16 if its parameters are updated in bf16 or frozen, else in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**given["config"])
    config.use_cache = False
    kernels, lora = given.get("kernels", "fused"), given.get("lora")
    if kernels == "liger" or given.get("chunked_loss"):
        blocks = kernels == "liger"
        import_module("liger_kernel.transformers").apply_liger_kernel_to_llama(
            rope=blocks, swiglu=blocks, rms_norm=blocks, fused_linear_cross_entropy=bool(given.get("chunked_loss"))
        )
    pure = lora is not None or "pure_bf16" in given.get("optimizer", "")
    with torch.device(DEVICE):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config,
            attn_implementation="eager" if kernels == "eager" else "sdpa",
            dtype=torch.bfloat16 if pure else torch.float32,
        )
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora is not None:
        from peft import LoraConfig, get_peft_model

        targets = "all-linear" if lora.get("targets", ["all"]) == ["all"] else list(lora["targets"])
        if checkpoints:
            model.enable_input_require_grads()
        model = get_peft_model(model, LoraConfig(r=lora["rank"], target_modules=targets, lora_dropout=0.0))
    return model.train()


def lengths_of(given: dict[str, Any]) -> list[int]:
    """Tokens of the batches, one after another."""
    if (samples := given.get("sample_lengths")) is None:
        return [given["sequence_length"]] * (WARMUP + STEPS)
    draws = np.random.default_rng(0).random((OF_LENGTHS, given.get("batch_size", 1)))
    return [round(length) for length in np.quantile(samples, draws.max(axis=1)).tolist()]


def train(given: dict[str, Any], *, checkpoints: bool, kernels: bool = False) -> dict[str, Any]:
    """Train; return seconds of an iteration, GiB of memory (allocated, reserved, in use on the GPU), and if asked the GPU's
    kernels by their time.
    """
    model = model_of(given, checkpoints=checkpoints)
    vocabulary, trained = model.config.vocab_size, [p for p in model.parameters() if p.requires_grad]
    foreach = bool(given.get("foreach"))
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=not foreach, foreach=foreach)
    casts = trained[0].dtype is torch.float32
    micro_batches, clip = given.get("micro_batches", 1), given.get("clip_norm")

    def step(ids: Tensor) -> None:
        for _ in range(micro_batches):
            scope: AbstractContextManager[Any] = torch.autocast(DEVICE, torch.bfloat16) if casts else nullcontext()
            with scope:
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        optimizer.zero_grad()

    seconds = []
    for tokens in lengths_of(given):
        ids = torch.randint(0, vocabulary, (given.get("batch_size", 1), tokens), device=DEVICE)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step(ids)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    free, total = torch.cuda.mem_get_info()
    found = {
        "gpu_peak": torch.cuda.max_memory_allocated() / 2**30,
        "gpu_reserved": torch.cuda.max_memory_reserved() / 2**30,
        "gpu_used": (total - free) / 2**30,
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
    }
    if "sample_lengths" not in given:
        found = {"iteration": statistics.median(seconds[WARMUP:]), **found}
    return found | ({"kernels": kernels_of(lambda: step(ids))} if kernels else {})


def kernels_of(step: Callable[[], None]) -> list[tuple[str, int, float]]:
    """The GPU's kernels in a step: name, calls, milliseconds; the longest first."""
    calls, took = Counter[str](), Counter[str]()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    for event in seen.events() or ():
        if event.device_type.name == "CUDA":
            calls[event.name] += 1
            took[event.name] += event.time_range.elapsed_us() / 1e3
    return [(name, calls[name], round(ms, 3)) for name, ms in took.most_common(40)]


def measured(source: Source, row: Row, *, kernels: bool = False) -> dict[str, Any]:
    """Train ``row`` in a clean GPU memory."""
    given = source.workload | row.changes
    gc.collect()  # what a failed row has left, too
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{bool(given.get('expandable_segments'))}")
    return train(given, checkpoints="checkpointing=full" in row.policy, kernels=kernels)


def main(
    *,
    source: Path = FOLDER / "blind" / "transformers-h100.toml",
    out: Path = Path("benchmarks"),
    only: str = "",
    kernels: bool = False,
) -> None:
    """Train the rows of a source on this GPU.

    Parameters
    ----------
    source:
        The file of the rows.
    out:
        Folder for gpu_rows.json.
    only:
        Train the rows with this text in their names.
    kernels:
        Also list the GPU's kernels of a step by their time.
    """
    screen = console()
    if not torch.cuda.is_available():
        print_text(screen, "there is no GPU that PyTorch can use here: nothing to train")
        return
    make_folder(out)
    rows = Source(**tomllib.loads(source.read_text()))
    torch.ones(1, device=DEVICE)
    free, total = torch.cuda.mem_get_info()
    machine = {**versions(), "cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name(), "total": total}
    context_gib = (total - free - torch.cuda.memory_reserved()) / 2**30
    path = out / "gpu_rows.json"
    document = {**machine, "context_gib": context_gib, "rows": earlier(path).get("rows", {})}
    for row in rows.rows:
        if only not in row.name:
            continue
        try:
            found = measured(rows, row, kernels=kernels)
        except Exception as error:
            found = {"failure": told(error)}
        document["rows"][row.name] = {"measured": found, "predicted": row.predicted}
        write_text(path, json.dumps(document, indent=1) + "\n")
        print_text(screen, f"{row.name}: {_beside(found, row.predicted)}")


def _beside(found: dict[str, Any], predicted: dict[str, float]) -> str:
    if "failure" in found:
        return str(found["failure"])
    parts = [
        f"{name} {value:.4g}" + (f" (predicted {100 * (predicted[name] / value - 1):+.1f} %)" if name in predicted else "")
        for name, value in found.items()
        if not isinstance(value, list)
    ]
    return ", ".join(parts)


if __name__ == "__main__":
    run_app(App(name="gpu_rows", default_command=main, help=__doc__))
