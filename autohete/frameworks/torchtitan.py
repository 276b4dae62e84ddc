"""torchtitan: one TOML file for its models, which trains with FSDP2.

Keys: ``torchtitan/config/job_config.py`` at 0.2.2, the last version that reads TOML; flavors: ``torchtitan/models``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from autohete.errors import InputError
from autohete.frameworks.framework import Abilities, Decided, ModelFiles, check_published
from autohete.frameworks.settings_text import toml_text
from autohete.frameworks.training_script import facts, torchrun
from autohete.policies.fsdp2_offload import Fsdp2Offload
from autohete.policies.resident import Resident
from autohete.profile.costs import ALTERNATE
from autohete.workload import Kernels, Precision
from autohete.workload.optimizers import Optimizer

#: Names of bundled models, and torchtitan's names and flavors of them.
FLAVORS = {
    "llama-3.1-8b": ("llama3", "8B"),
    "llama-3.1-70b": ("llama3", "70B"),
    "llama-3.1-405b": ("llama3", "405B"),
    "qwen3-0.6b": ("qwen3", "0.6B"),
    "qwen3-1.7b": ("qwen3", "1.7B"),
    "qwen3-4b": ("qwen3", "4B"),
    "qwen3-8b": ("qwen3", "8B"),
    "qwen3-14b": ("qwen3", "14B"),
    "qwen3-32b": ("qwen3", "32B"),
}
_ABILITIES = Abilities((Optimizer.ADAMW,), (Precision.BF16, Precision.FP32))


@dataclass(frozen=True, slots=True)
class TorchtitanFiles:
    """torchtitan."""

    name: str = "torchtitan"
    version: str = "0.2.2"
    kernels: ClassVar[Kernels] = Kernels.EAGER_FLASH
    abilities: ClassVar[Abilities] = _ABILITIES

    def check(self, decided: Decided) -> None:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        self._tables(decided, "")

    def files(self, decided: Decided, model: ModelFiles) -> dict[str, str]:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        heading = (
            f"For torchtitan {self.version}. {facts(decided)}\nhf_assets_path: a folder with the tokenizer of "
            f"{model.weights}.\nStart: {self.command(decided)}"
        )
        return {"train.toml": toml_text(self._tables(decided, "model"), heading)}

    def command(self, decided: Decided) -> str:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        return torchrun(decided, "-m torchtitan.train --job.config_file train.toml")

    def _tables(self, decided: Decided, assets: str) -> dict[str, dict[str, Any]]:
        _ABILITIES.check(decided)
        if decided.hardware.gpus == 1:  # ``fsdp_enabled`` in distributed/parallel_dims.py; weights would stay on the host
            raise InputError("applies FSDP2, and with it CPU offloading, on several GPUs only: plan for more of them")
        check_published(decided, FLAVORS)
        workload, system = decided.workload, decided.system
        offloads = isinstance(system, Fsdp2Offload)
        in_backward = False
        if isinstance(system, Fsdp2Offload):
            if not system.pin_memory:
                raise InputError("pins what it offloads: plan without pin_memory=off")
        elif isinstance(system, Resident) and system.zero_stage == 3 and not (system.deepspeed or system.fsdp1):
            in_backward = system.in_backward
        else:
            raise InputError("trains with FSDP2: plan with fsdp2_offload or resident:zero_stage=3")
        fused = not isinstance(system, Fsdp2Offload) or system.fused
        name, flavor = FLAVORS[workload.name]
        sequences = workload.samples * decided.hardware.gpus
        return {
            "job": {"dump_folder": "outputs", "description": facts(decided)},
            "model": {"name": name, "flavor": flavor, "hf_assets_path": assets},
            "optimizer": {
                "name": "AdamW",
                "lr": 1e-5,
                "implementation": "fused" if fused else "for-loop",
                "early_step_in_backward": in_backward,
            },
            "lr_scheduler": {"warmup_steps": 0},
            "training": {
                "dataset": "c4",
                "local_batch_size": workload.batch_size,
                "global_batch_size": sequences,
                "seq_len": workload.sequence_length,
                "max_norm": math.inf if workload.clip_norm is None else workload.clip_norm,
                "steps": 10,
                "enable_cpu_offload": offloads,
                "dtype": "float32",
                "mixed_precision_param": "bfloat16" if workload.precision.is_mixed else "float32",
                "mixed_precision_reduce": "float32",
            },
            "parallelism": {"data_parallel_shard_degree": -1, "fsdp_reshard_after_forward": "always"},
            "activation_checkpoint": _checkpointing(decided),
            "compile": {"enable": False},
        }


def _checkpointing(decided: Decided) -> dict[str, str]:
    if all([one.name for one in block.results] == [ALTERNATE] for block in decided.blocks):
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": "full" if decided.recomputes else "none"}
