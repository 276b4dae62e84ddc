"""This project's Trainer: a script that trains with the policy itself, within the memory that it was planned for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autohete import __version__
from autohete.errors import InputError
from autohete.frameworks.framework import Abilities, Decided, ModelFiles
from autohete.frameworks.training_script import (
    OPTIMIZERS,
    dtype_of,
    optimizer_of,
    ranks,
    requirements,
    torchrun,
    training_script,
)
from autohete.plan.trained import check_trained
from autohete.schedule import GPU_MEMORY, HOST_MEMORY
from autohete.workload import Kernels, Precision
from autohete.workload.training import Adapters

_ABILITIES = Abilities(
    tuple(OPTIMIZERS), (Precision.BF16, Precision.FP32), lora=True, adapters=Adapters.PLAIN, autocast=(Precision.BF16,)
)

_DISTRIBUTED = "import torch\nimport torch.distributed as dist"
_IMPORTS = """\
import transformers

import autohete"""

_MAIN = """\
model = build(given, {dtype})
vocabulary = model.config.get_text_config().vocab_size
trainer = autohete.Trainer(
    model,
    optimizer={optimizer},
    policy={policy!r},
{arguments}    device="cuda" if torch.accelerator.is_available() else "emulated",
)

def step(source: Iterator[torch.Tensor]) -> float:
    tokens = next(source)
    return trainer.step({{"input_ids": tokens, "labels": tokens}})

with trainer:
    train(given.steps, batches(given, BATCH_SIZE * MICRO_BATCHES, vocabulary, rank), step, rank)
"""


@dataclass(frozen=True, slots=True)
class TrainerFiles:
    """:class:`autohete.Trainer`."""

    name: str = "trainer"
    version: str = __version__
    kernels: ClassVar[Kernels] = Kernels.EAGER_FLASH
    abilities: ClassVar[Abilities] = _ABILITIES

    def check(self, decided: Decided) -> None:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        _ABILITIES.check(decided)
        plan, workload = decided.plan, decided.workload
        try:
            scaled_by = None if workload.clip_norm is None else "clip_norm"
            check_trained(plan, scaled_by=scaled_by, micro_batches=workload.micro_batches)
        except InputError as error:
            raise InputError(f"refuses the plan: {error}") from error
        if decided.hardware.gpus > 1 and (plan.delayed or _far(decided)):
            raise InputError(
                "neither delays updates nor has values on drives with several ranks: plan without them, or for one GPU"
            )
        if _far(decided) - {"nvme"}:
            raise InputError("has one place besides GPU and host, nvme: plan with that")
        if any(unit.results for unit in plan.units):
            raise InputError("keeps no results of products for recomputations: plan without them")

    def files(self, decided: Decided, model: ModelFiles) -> dict[str, str]:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        self.check(decided)
        workload, hardware = decided.workload, decided.hardware
        optimizer = optimizer_of(decided)
        tools = ["bitsandbytes"] if "bitsandbytes" in optimizer else []
        host, several = hardware.host, hardware.gpus > 1
        arguments = {
            "gpu_memory": hardware.gpu_capacity_bytes,
            "host_memory": host.memory_bytes,
            "pinned_memory": host.pinned_bytes,
            "micro_batches": workload.micro_batches if workload.micro_batches > 1 else None,
            "clip_norm": workload.clip_norm,
            "master_weights": None if workload.has_masters else False,
            "drive": "." if _far(decided) else None,
        }
        lines = "".join(f"    {name}={value!r},\n" for name, value in arguments.items() if value is not None)
        lines += "    autocast=torch.bfloat16,\n" * (workload.autocast is not None)
        return {
            "requirements.txt": requirements(decided, f"autohete[runtime]=={self.version}", *tools),
            **training_script(
                decided,
                model,
                tool=f"autohete {self.version}",
                command=self.command(decided),
                imports="\n".join(
                    [*(f"import {tool}" for tool in tools), _DISTRIBUTED if several else "import torch", _IMPORTS]
                ),
                main=(ranks() if several else "rank = 0\n")
                + _MAIN.format(
                    dtype=dtype_of(decided),
                    optimizer=optimizer,
                    policy=decided.plan.policy,
                    arguments=lines,
                ),
                recomputes=False,  # the plan decides
            ),
        }

    def command(self, decided: Decided) -> str:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        return torchrun(decided) if decided.hardware.gpus > 1 else "python train.py"


def _far(decided: Decided) -> set[str]:
    """Places of values besides the GPU and the host."""
    return {home for unit in decided.plan.units for home in unit.homes} - {GPU_MEMORY, HOST_MEMORY}
