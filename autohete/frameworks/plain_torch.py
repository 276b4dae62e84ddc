"""PyTorch alone: a loop with everything on the GPU, and several GPUs with ``DistributedDataParallel``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autohete.errors import InputError
from autohete.frameworks.framework import Abilities, Decided, ModelFiles
from autohete.frameworks.training_script import (
    OPTIMIZERS,
    dtype_of,
    optimizer_of,
    ranks,
    requirements,
    torch_steps,
    torchrun,
    training_script,
)
from autohete.policies.resident import Resident
from autohete.workload import Kernels, Precision
from autohete.workload.training import Adapters

_ABILITIES = Abilities(
    tuple(OPTIMIZERS), (Precision.BF16, Precision.FP32), lora=True, adapters=Adapters.PLAIN, autocast=(Precision.BF16,)
)

_IMPORTS = """\
import torch
import torch.distributed as dist
import transformers"""

_MAIN = """\
model = build(given, {dtype}).to(device)
{autocast}vocabulary = model.config.get_text_config().vocab_size
{parallel}optimizer = {optimizer}
"""
_AUTOCAST = "model.forward = torch.autocast(device, torch.bfloat16)(model.forward)  # with its loss\n"


@dataclass(frozen=True, slots=True)
class TorchFiles:
    """PyTorch without offloading."""

    name: str = "torch"
    version: str = "2.13.0"
    kernels: ClassVar[Kernels] = Kernels.EAGER_FLASH
    abilities: ClassVar[Abilities] = _ABILITIES

    def check(self, decided: Decided) -> None:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        _ABILITIES.check(decided)
        system = decided.system
        if not isinstance(system, Resident):
            raise InputError("alone moves nothing: plan with resident")
        if system.zero_stage or system.in_backward:
            raise InputError("alone shards nothing and updates after backward: plan with resident, without such flags")
        if decided.workload.has_masters:
            raise InputError(
                "alone has no masters beside 16-bit parameters: plan with optimizer adamw_pure_bf16, or with precision fp32"
            )
        _ = decided.recomputes

    def files(self, decided: Decided, model: ModelFiles) -> dict[str, str]:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        self.check(decided)
        optimizer = optimizer_of(decided)
        tools = ["bitsandbytes"] if "bitsandbytes" in optimizer else []
        parallel = "model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)\n"
        main = _MAIN.format(
            dtype=dtype_of(decided),
            autocast=_AUTOCAST if decided.workload.autocast else "",
            parallel=parallel if decided.hardware.gpus > 1 else "",
            optimizer=optimizer,
        )
        return {
            "requirements.txt": requirements(decided, *tools),
            **training_script(
                decided,
                model,
                tool=f"PyTorch {self.version}",
                command=self.command(decided),
                imports="\n".join([*(f"import {tool}" for tool in tools), _IMPORTS]),
                main=ranks("nccl") + main + torch_steps(decided),
                recomputes=decided.recomputes,
            ),
        }

    def command(self, decided: Decided) -> str:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        return torchrun(decided)
