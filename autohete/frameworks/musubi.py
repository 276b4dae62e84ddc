"""musubi-tuner: its configuration file and that of its data, for adapters of a diffusion transformer that was traced.

Keys: ``src/musubi_tuner/training/parser_common.py`` of github kohya-ss/musubi-tuner at 30c658c4, and those of its scripts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from autohete.errors import InputError
from autohete.frameworks.framework import Abilities, Decided, ModelFiles
from autohete.frameworks.settings_text import toml_text
from autohete.frameworks.training_script import facts
from autohete.policies.block_swap import BlockSwap
from autohete.policies.resident import Resident
from autohete.workload import Kernels, Precision
from autohete.workload.optimizers import Optimizer
from autohete.workload.traced import TracedWorkload

#: The script and the network of each class of diffusers.
_SCRIPTS = {
    "FluxTransformer2DModel": ("flux_kontext_train_network.py", "networks.lora_flux"),
    "WanTransformer3DModel": ("wan_train_network.py", "networks.lora_wan"),
    "HunyuanVideoTransformer3DModel": ("hv_train_network.py", "networks.lora"),
    "QwenImageTransformer2DModel": ("qwen_image_train_network.py", "networks.lora_qwen_image"),
    "ZImageTransformer2DModel": ("zimage_train_network.py", "networks.lora_zimage"),
}
#: The task of a Wan model, by its blocks.
_WAN_TASKS = {30: "t2v-1.3B", 40: "t2v-14B"}
_OPTIMIZERS = {
    Optimizer.ADAMW: "AdamW",
    Optimizer.ADAMW8BIT: "AdamW8bit",
    Optimizer.ADAFACTOR: "Adafactor",
}
_ABILITIES = Abilities(tuple(_OPTIMIZERS), (Precision.BF16,), several_gpus=False, traced=True)

_DATA = """
[general]
resolution = [1024, 1024]
caption_extension = ".txt"
batch_size = {batch_size}

[[datasets]]
image_directory = "images"
cache_directory = "cache"
"""


@dataclass(frozen=True, slots=True)
class MusubiFiles:
    """musubi-tuner."""

    name: str = "musubi"
    version: str = "30c658c4"
    kernels: ClassVar[Kernels] = Kernels.EAGER_FLASH
    abilities: ClassVar[Abilities] = _ABILITIES

    def check(self, decided: Decided) -> None:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        self._settings(decided)

    def files(self, decided: Decided, model: ModelFiles) -> dict[str, str]:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        heading = (
            f"For musubi-tuner at {self.version}. {facts(decided)}\nStart in its folder: {self.command(decided)}\n"
            "It adapts all linear layers of the blocks. Add the sampling of timesteps that its page about the model recommends."
        )
        data = "# The samples must have the size of those that were traced: set resolution, and video_directory for videos.\n"
        return {
            "train.toml": toml_text(self._settings(decided), heading),
            "dataset.toml": data + _DATA.format(batch_size=decided.workload.batch_size),
        }

    def command(self, decided: Decided) -> str:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        script, _ = _script(decided)
        launch = "accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16"
        return f"{launch} src/musubi_tuner/{script} --config_file train.toml"

    def _settings(self, decided: Decided) -> dict[str, dict[str, Any]]:
        _ABILITIES.check(decided)
        _, network = _script(decided)
        workload, rank = decided.workload, _rank(decided)
        return {
            "model": {"dit": "dit.safetensors", "vae": "vae.safetensors", **_task(workload)},
            "training": {
                "dataset_config": "dataset.toml",
                "mixed_precision": "bf16",
                "sdpa": True,
                "gradient_checkpointing": decided.recomputes,
                "gradient_accumulation_steps": workload.micro_batches,
                "max_grad_norm": workload.clip_norm or 0.0,
                "optimizer_type": _OPTIMIZERS[workload.training.optimizer],
                "learning_rate": 1e-4,
            },
            "block_swap": _swap(decided),
            "network": {"network_module": network, "network_dim": rank, "network_alpha": rank},
            "output": {"output_dir": "output", "output_name": "lora"},
        }


def _script(decided: Decided) -> tuple[str, str]:
    """The script that trains the model, and the module of its adapters."""
    workload = decided.workload
    if not isinstance(workload, TracedWorkload) or workload.name not in _SCRIPTS:
        raise InputError(f"trains diffusion transformers: trace {', '.join(_SCRIPTS)} of diffusers")
    return _SCRIPTS[workload.name]


def _rank(decided: Decided) -> int:
    """The rank of the adapters: the smaller size of each trained matrix."""
    workload = decided.workload
    assert isinstance(workload, TracedWorkload), "others have no script"
    trained = [one for kind in workload.table.kinds for one in kind.parameters if not one.frozen]
    ranks = {min(one.shape) for one in trained}
    if len(ranks) > 1 or any(len(one.shape) != 2 for one in trained):
        raise InputError("is written here with adapters of one rank alone: freeze the module, and add them before it is traced")
    return ranks.pop()


def _task(workload: Any) -> dict[str, str]:
    if workload.name != "WanTransformer3DModel":
        return {}
    if workload.transformer_blocks not in _WAN_TASKS:
        raise InputError(f"has Wan with {' or '.join(map(str, _WAN_TASKS))} blocks, not {workload.transformer_blocks}")
    return {"task": _WAN_TASKS[workload.transformer_blocks]}


def _swap(decided: Decided) -> dict[str, Any]:
    system = decided.system
    if isinstance(system, Resident) and decided.stays and not system.in_backward:
        return {}
    if not isinstance(system, BlockSwap):
        raise InputError("swaps blocks: plan with block_swap, or with resident")
    blocks = system.blocks_of(decided.profile, decided.plan)
    flags = {"use_pinned_memory_for_block_swap": system.pin_memory, "block_swap_h2d_only": system.h2d_only}
    return {"blocks_to_swap": blocks} | {flag: True for flag, given in flags.items() if given} if blocks else {}
