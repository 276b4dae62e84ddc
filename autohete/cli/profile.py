"""``autohete profile``."""

from __future__ import annotations

from typing import Literal

from autohete.cli.outputs import check_outputs
from autohete.cli.question import Whole
from autohete.cli.runtime import check_runtime


def profile(
    out: str,
    *,
    device: Literal["emulated", "cuda"] = "emulated",
    gpu_memory: str | None = None,
    hidden: int = 256,
    blocks: Whole = 8,
    heads: Whole = 4,
    sequence_length: Whole = 128,
    batch_size: Whole = 4,
    precision: Literal["fp32", "bf16"] = "fp32",
    units: Literal["block", "sublayer"] = "block",
    dropout: float = 0.1,
    data: str | None = None,
    tokenizer: str = "byte",
    quick: bool = False,
) -> None:
    """Measure this machine, and one block of each kind of a GPT; write both to OUT (.json).

    Parameters
    ----------
    out:
        The file to write; `autohete simulate --profile` and `autohete train --profile` read it.
    device:
        emulated: the CPU stands in for a GPU.
    gpu_memory:
        Memory of the device, such as 64MiB.
    hidden:
        Hidden size.
    blocks:
        Transformer blocks; equal blocks are measured once.
    heads:
        Attention heads.
    sequence_length:
        Tokens of a sequence.
    batch_size:
        Sequences per iteration.
    precision:
        Precision of parameters and computation.
    units:
        Smallest part that is planned by itself: block, or sublayer (attention and MLP of each block separately).
    dropout:
        Dropout probability.
    data:
        Text file, or folder of text files, as for `autohete train`.
    tokenizer:
        byte, or a vocabulary size to train a tokenizer with.
    quick:
        Measure copies up to 64 MiB instead of 1 GiB.
    """
    from autohete.cli.text_model import TextModel
    from autohete.cli.text_model import profile as run
    from autohete.workload import Precision, Units

    check_outputs({"OUT": out})
    check_runtime()
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
        seed=0,
        units=Units(units),
    )
    run(text_model, device=device, gpu_memory=gpu_memory, path=out, quick=quick)
