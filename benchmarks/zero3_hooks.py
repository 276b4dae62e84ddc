"""What do DeepSpeed's hooks of ZeRO stage 3 cost the host, per block, in forward and in backward with recomputation?

Command: ``PYTHONPATH=DIR python -W ignore benchmarks/zero3_hooks.py``, with DeepSpeed in DIR: ``pip install --no-deps --target
DIR deepspeed==0.18.6 einops hjson msgpack ninja psutil py-cpuinfo tqdm``.

Forty blocks of a GPT, twelve parameters each, of width 8: on one CPU nearly all the time is the hooks'. Medians over steps,
plain PyTorch beside it. Since 0.18 each gradient's hook counts the parameters that take part in the backward, so their time
grows with the square of the number of parameters; it is shown with and without.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autohete.report.tables import console, table

WIDTH, BLOCKS, STEPS, WARM_UP = 8, 40, 25, 8


class Attention(nn.Module):
    """The two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        query, key, value = self.query_key_value(x).chunk(3, -1)
        return self.dense(query + key + value)


class Block(nn.Module):
    """The modules of a Megatron GPT block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    """Blocks that are recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x.float().square().mean()


def milliseconds(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], object]) -> tuple[float, float]:
    """Per block: forward, and backward with recomputation."""
    x = torch.randn(1, 2, WIDTH).bfloat16().requires_grad_()
    halves = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        loss = forward(x)
        middle = time.perf_counter()
        backward(loss)
        halves.append((middle - begin, time.perf_counter() - middle))
    forwards, backwards = zip(*halves[WARM_UP:], strict=True)
    return median(forwards) / BLOCKS * 1e3, median(backwards) / BLOCKS * 1e3


def main() -> None:
    """Measure and print a table."""
    one_process = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ.update(one_process, DS_ACCELERATOR="cpu")
    deepspeed = import_module("deepspeed")
    stage3: Any = import_module("deepspeed.runtime.zero.stage3")

    torch.set_num_threads(1)
    model = Model()
    plain = copy.deepcopy(model).bfloat16()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "stage3_param_persistence_threshold": 0,
            "overlap_comm": True,
        },
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]
    rows = {"plain PyTorch": milliseconds(plain, Tensor.backward), "ZeRO-3": milliseconds(engine, engine.backward)}
    stage3.count_used_parameters_in_backward = lambda parameters: len(parameters)
    rows["ZeRO-3, parameters not counted"] = milliseconds(engine, engine.backward)
    shown = table(f"DeepSpeed {deepspeed.__version__}, one CPU thread", ["", "forward of a block", "backward of a block"])
    for name, (forward, backward) in rows.items():
        shown.add_row(name, f"{forward:.2f} ms", f"{backward:.2f} ms")
    console().print(shown)


if __name__ == "__main__":
    main()
