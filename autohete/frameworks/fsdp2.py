"""PyTorch's FSDP2: a script that shards each unit, and with offload has them on the host.

Calls as in ``torch/distributed/fsdp/_fully_shard/_fully_shard.py`` and ``_fsdp_api.py`` at 2.13.0. Embedding, blocks and head
are units, except that a tied embedding belongs to the root, as the policies assume.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autohete.errors import InputError
from autohete.frameworks.framework import Abilities, Decided, ModelFiles
from autohete.frameworks.training_script import optimizer_of, ranks, requirements, torch_steps, torchrun, training_script
from autohete.policies.fsdp2_offload import Fsdp2Offload, Torch
from autohete.policies.resident import Resident
from autohete.workload import Kernels, Precision
from autohete.workload.optimizers import Optimizer
from autohete.workload.training import Adapters

_ABILITIES = Abilities((Optimizer.ADAMW,), (Precision.BF16, Precision.FP32), lora=True, adapters=Adapters.PLAIN)

_IMPORTS = """\
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard"""

_MAIN = """\
mesh = dist.device_mesh.init_device_mesh(device, (ranks,))
how = {{
    "mesh": mesh,
    "mp_policy": {precision},
    "offload_policy": {offload},
}}
model = build(given, torch.float32)
vocabulary = model.config.get_text_config().vocab_size
lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
blocks = next(each for each in lists if len(each) == model.config.get_text_config().num_hidden_layers)
embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
if embedding.weight is not head.weight:
    fully_shard(embedding, **how)
    fully_shard(head, **how, reshard_after_forward=False)
for block in blocks:
    fully_shard(block, **how)
fully_shard(model, **how)
optimizer = {optimizer}
"""


@dataclass(frozen=True, slots=True)
class Fsdp2Files:
    """PyTorch with FSDP2."""

    name: str = "fsdp2"
    version: str = "2.13.0"
    kernels: ClassVar[Kernels] = Kernels.EAGER_FLASH
    abilities: ClassVar[Abilities] = _ABILITIES

    def check(self, decided: Decided) -> None:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        _ABILITIES.check(decided)
        system = decided.system
        if isinstance(system, Fsdp2Offload):
            if system.torch is not Torch.V2026:
                raise InputError(f"is written for {self.version}, not for torch={system.torch}: leave the flag out")
        elif not isinstance(system, Resident):
            raise InputError("places and orders work in its own way, and has no such schedule")
        elif system.zero_stage != 3 or system.fsdp1 or system.deepspeed or system.in_backward:
            raise InputError(
                "shards everything and updates after backward: plan with resident:zero_stage=3, without other flags"
            )
        _ = decided.recomputes

    def files(self, decided: Decided, model: ModelFiles) -> dict[str, str]:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        self.check(decided)
        workload, system = decided.workload, decided.system
        offload = "OffloadPolicy()"
        if isinstance(system, Fsdp2Offload):
            offload = f"CPUOffloadPolicy(pin_memory={'on_gpu' if system.pin_memory else False})"
        mixed = "MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        main = _MAIN.format(
            precision=mixed if workload.precision.is_mixed else "MixedPrecisionPolicy()",
            offload=offload,
            optimizer=optimizer_of(decided, fused=not isinstance(system, Fsdp2Offload) or system.fused),
        )
        return {
            "requirements.txt": requirements(decided, torch=f"torch=={self.version}"),
            **training_script(
                decided,
                model,
                tool=f"PyTorch {self.version}, FSDP2",
                command=self.command(decided),
                imports=_IMPORTS,
                main=ranks() + main + torch_steps(decided),
                recomputes=decided.recomputes,
            ),
        }

    def command(self, decided: Decided) -> str:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        return torchrun(decided)
