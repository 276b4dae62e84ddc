"""``autohete train``."""

from __future__ import annotations

from typing import Literal

from autohete.cli.outputs import check_outputs
from autohete.cli.question import Whole
from autohete.cli.runtime import check_runtime


def train(
    *,
    policy: str = "autohete",
    device: Literal["emulated", "cuda"] = "emulated",
    gpu_memory: str = "25%",
    host_memory: str | None = None,
    pinned_memory: str | None = None,
    steps: Whole = 60,
    data: str | None = None,
    tokenizer: str = "byte",
    hidden: int = 256,
    blocks: Whole = 8,
    heads: Whole = 4,
    sequence_length: Whole = 128,
    batch_size: Whole = 4,
    micro_batches: Whole = 1,
    precision: Literal["fp32", "bf16"] = "fp32",
    units: Literal["block", "sublayer"] = "block",
    dropout: float = 0.1,
    lr: float = 1e-3,
    clip_norm: float | None = None,
    seed: Whole = 0,
    mode: Literal["native", "paced"] = "native",
    hardware: str | None = None,
    profile: str | None = None,
    skip_nonfinite: bool = False,
    trace: str | None = None,
    predicted_trace: str | None = None,
    gantt: str | None = None,
) -> None:
    """Train a GPT on text, within a memory budget, and compare the prediction with the measurement.

    Parameters
    ----------
    policy:
        NAME[:flag,flag=value].
    device:
        emulated: the CPU stands in for a GPU, with a byte-exact memory budget.
    gpu_memory:
        Device memory budget, such as 64MiB; or a share of what fully resident training would need, such as 25%.
    host_memory:
        Budget for the model states on the host.
    pinned_memory:
        Limit of page-locked host memory, such as 64MiB. Default: all of it. The emulated device pins nothing, but plans keep to
        the limit.
    steps:
        Number of iterations.
    data:
        Text file, or folder of text files. Without it: the source of Python's standard library.
    tokenizer:
        byte, or a vocabulary size to train a tokenizer with.
    hidden:
        Hidden size.
    blocks:
        Transformer blocks.
    heads:
        Attention heads; must divide the hidden size.
    sequence_length:
        Tokens per sequence.
    batch_size:
        Sequences that are processed at a time.
    micro_batches:
        Batches per iteration; their gradients are accumulated before the update.
    precision:
        bf16 uses fp32 master weights.
    units:
        Smallest part that is planned by itself: block, or sublayer (attention and MLP of each block separately).
    dropout:
        Dropout probability.
    lr:
        Learning rate of AdamW.
    clip_norm:
        Scale gradients so that their global norm is at most this, such as 1.0.
    seed:
        Seed of weights, batches and dropout.
    mode:
        native: as fast as this machine; paced: like --hardware, slowed down so that this machine can keep up.
    hardware:
        A preset's name or a TOML file. Without it: this machine, measured.
    profile:
        A file written by `autohete profile` for this model, used instead of measuring.
    skip_nonfinite:
        Skip a step whose loss is NaN or infinite, instead of stopping.
    trace:
        Write the measured timeline for ui.perfetto.dev to this file.
    predicted_trace:
        Write the simulated timeline; `autohete compare` explains how the two differ.
    gantt:
        Draw one iteration, simulated above and measured below, to this .png, .pdf or .svg file.
    """
    from autohete.cli.text_model import TextModel
    from autohete.cli.text_model import train as run
    from autohete.workload import Precision, Units

    outputs = {"--trace": trace, "--predicted-trace": predicted_trace, "--gantt": gantt}
    check_outputs({option: path for option, path in outputs.items() if path is not None})
    text_model = TextModel(
        hidden,
        blocks,
        heads,
        sequence_length,
        batch_size,
        Precision(precision),
        dropout,
        data,
        tokenizer,
        seed,
        micro_batches,
        Units(units),
    )
    check_runtime()
    run(
        text_model,
        policy=policy,
        device=device,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        pinned_memory=pinned_memory,
        steps=steps,
        lr=lr,
        clip_norm=clip_norm,
        mode=mode,
        hardware=hardware,
        profile=profile,
        skip_nonfinite=skip_nonfinite,
        trace=trace,
        predicted_trace=predicted_trace,
        gantt=gantt,
    )
