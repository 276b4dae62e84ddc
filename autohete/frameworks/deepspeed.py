"""DeepSpeed: a configuration file by version, and a script that trains with it.

Keys and their meaning: ``runtime/config.py``, ``runtime/zero/config.py`` and ``runtime/zero/offload_config.py`` at 0.19.8.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from autohete.errors import InputError
from autohete.frameworks.framework import Abilities, Decided, ModelFiles
from autohete.frameworks.training_script import TRAINED, dtype_of, requirements, steps, torchrun, training_script
from autohete.plan import Processor
from autohete.policies.resident import Resident
from autohete.policies.twin_flow import TwinFlow
from autohete.policies.zenflow import ZenFlow
from autohete.policies.zero3_offload import Zero3Offload
from autohete.policies.zero_infinity import ZeroInfinity
from autohete.policies.zero_offload import DeepSpeed, ZeroOffload
from autohete.workload import Kernels
from autohete.workload.optimizers import Optimizer
from autohete.workload.training import Adapters

#: The configuration's name, and the key in which it has the version that it is for.
CONFIG, WRITTEN_FOR = "ds_config.json", "written_for"
#: The release that is written for each behaviour that is modelled. Earlier ones do not run: they import what PyTorch has no
#: longer had since 2.4 (``elasticity/elastic_agent.py``), and ``transformers`` needs 2.6.
RELEASES = {DeepSpeed.V0_16: "0.16.9", DeepSpeed.V2026: "0.19.8"}
#: Elements in a million, in which policies count buckets.
MILLION = 1_000_000
#: The release for ZenFlow. 0.19.7 and 0.19.8 transpose weights as they flatten them, but not back, and so train a model whose
#: weights are mixed up (``_update_model_bit16_weights`` in ``runtime/zero/stage_1_and_2.py``).
RELEASE_OF_ZENFLOW = "0.19.6"
#: Updates by ZenFlow's CPU between two choices of columns, where an epoch, DeepSpeed's own default, has no length.
CHOSEN_EVERY = 100
#: A folder on the drive, to be replaced by the reader's own.
NVME_PATH = "/local_nvme"

_ABILITIES = Abilities((Optimizer.ADAMW,), lora=True, adapters=Adapters.PLAIN)

_IMPORTS = """\
import deepspeed
import torch
import transformers
from transformers.integrations import HfDeepSpeedConfig"""

_MAIN = """\
config = str(HERE / "ds_config.json")
deepspeed.init_distributed()
partitioned = HfDeepSpeedConfig(config)  # with stage 3, weights are partitioned as they are loaded; has to stay alive
model = build(given, {dtype})
vocabulary = model.config.get_text_config().vocab_size
engine, *_ = deepspeed.initialize(model=model, model_parameters={trained}, config=config)
device, rank = engine.device, engine.global_rank
"""


@dataclass(frozen=True, slots=True)
class DeepSpeedFiles:
    """DeepSpeed."""

    name: str = "deepspeed"
    version: str = RELEASES[DeepSpeed.V2026]
    kernels: ClassVar[Kernels] = Kernels.EAGER_FLASH
    abilities: ClassVar[Abilities] = _ABILITIES

    def check(self, decided: Decided) -> None:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        self.config(decided)

    def config(self, decided: Decided) -> dict[str, Any]:
        """Return the configuration that makes DeepSpeed train as the plan says.

        Raises:
            InputError: it cannot.
        """
        _ABILITIES.check(decided)
        zero = _zero(decided)
        workload, release = decided.workload, _release(decided)
        return {
            WRITTEN_FOR: f"deepspeed {release}",
            "train_micro_batch_size_per_gpu": workload.batch_size,
            "gradient_accumulation_steps": workload.micro_batches,
            "gradient_clipping": workload.clip_norm or 0.0,
            **({workload.precision.value: {"enabled": True}} if workload.precision.is_mixed else {}),
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
            "zero_optimization": zero,
            **({"activation_checkpointing": {"partition_activations": False}} if decided.recomputes else {}),
        }

    def files(self, decided: Decided, model: ModelFiles) -> dict[str, str]:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        config, release = self.config(decided), _release(decided)
        script = training_script(
            decided,
            model,
            tool=f"DeepSpeed {release}",
            command=self.command(decided),
            imports=_IMPORTS,
            main=_MAIN.format(dtype=dtype_of(decided), trained=TRAINED)
            + steps("engine", "engine.backward(loss)\nengine.step()"),
            recomputes=decided.recomputes,
        )
        needed = requirements(decided, "accelerate", f"deepspeed=={release}")
        return {CONFIG: json.dumps(config, indent=2) + "\n", "requirements.txt": needed} | script

    def command(self, decided: Decided) -> str:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        return torchrun(decided)


def _release(decided: Decided) -> str:
    if isinstance(decided.system, ZenFlow):
        return RELEASE_OF_ZENFLOW
    version = decided.system.deepspeed if isinstance(decided.system, ZeroOffload) else DeepSpeed.V2026
    if version not in RELEASES:
        raise InputError(f"{version} runs with no PyTorch that transformers takes: plan with deepspeed={' or '.join(RELEASES)}")
    return RELEASES[version]


# --- the section zero_optimization --------------------------------------------------------------------------------


def _zero(decided: Decided) -> dict[str, Any]:
    sections: dict[type, Callable[[Any, Decided], dict[str, Any]]] = {
        ZeroOffload: _stage2_offload,
        ZenFlow: _zenflow,
        Zero3Offload: _stage3_offload,
        TwinFlow: _twin_flow,
        ZeroInfinity: _infinity,
        Resident: _resident,
    }
    if type(decided.system) not in sections:
        raise InputError("places and orders work in its own way, and has no such schedule")
    return sections[type(decided.system)](decided.system, decided)


def _stage2_offload(system: ZeroOffload, decided: Decided) -> dict[str, Any]:
    for flag in ("paper", "tile_overlap", "delayed_update"):
        if getattr(system, flag):
            raise InputError(f"does not do {flag}, which is in the paper only")
    offload = {"device": "cpu", "pin_memory": system.pins}
    return {"stage": 2, "reduce_bucket_size": system.bucket_size * MILLION, "offload_optimizer": offload}


def _zenflow(system: ZenFlow, decided: Decided) -> dict[str, Any]:
    interval = decided.workload.micro_batches  # DeepSpeed accumulates over update_interval, whatever the file says
    flow = {
        "topk_ratio": system.topk_ratio / 100,
        "select_strategy": "step",
        "select_interval": CHOSEN_EVERY * interval,  # a multiple: columns are chosen where an update is due
        "update_interval": interval,
        "overlap_step": system.overlap_step,
    }
    return _stage2_offload(ZeroOffload(bucket_size=system.bucket_size), decided) | {"zenflow": flow}


def _stage3_offload(system: Zero3Offload, decided: Decided) -> dict[str, Any]:
    section = {
        "stage": 3,
        "reduce_bucket_size": system.bucket_size * MILLION,
        "offload_optimizer": {"device": "cpu", "pin_memory": system.pin_memory},
    }
    if not system.offload_param:
        return section
    offloaded = _offloaded_parameters(decided, system.pin_parameters)
    return section | offloaded | {"stage3_max_reuse_distance": system.reuse_distance * MILLION}


def _offloaded_parameters(decided: Decided, pinned: bool) -> dict[str, Any]:
    """Parameters on the host, each unit's fetched during the one before and released after its use."""
    block = max(unit.parameters for unit in decided.profile.units[1:-1])
    largest = max(unit.parameters for unit in decided.profile.units)
    return {
        "offload_param": {"device": "cpu", "pin_memory": pinned},
        "stage3_prefetch_bucket_size": block,
        "stage3_max_live_parameters": largest + block,
        "stage3_max_reuse_distance": 0,
    }


def _twin_flow(system: TwinFlow, decided: Decided) -> dict[str, Any]:
    if not system.async_gradients:
        raise InputError("does not block backward for gradients that are pinned since 0.19.5: leave out async_gradients")
    units, profile = decided.plan.units, decided.profile
    counts = [*map(profile.part_of, range(len(profile.units)))]
    on_cpu = sum(
        count * (1 - unit.update.share) for count, unit in zip(counts, units, strict=True) if unit.update.on is Processor.CPU
    )
    return {
        "stage": 3,
        "reduce_bucket_size": system.bucket_size * MILLION,
        "sub_group_size": system.sub_group_size or max(counts[1:-1]),
        "offload_optimizer": {
            "device": "cpu",
            "pin_memory": system.pin_memory,
            # Rounded up: a smaller share would need more of the GPU's memory.
            "ratio": math.ceil(100 * on_cpu / sum(counts) - 1e-9) / 100 if system.ratio is None else system.ratio / 100,
        },
    }


def _infinity(system: ZeroInfinity, decided: Decided) -> dict[str, Any]:
    section = {
        "stage": 3,
        "reduce_scatter": system.reduce_scatter,
        "sub_group_size": max(map(decided.profile.part_of, range(len(decided.profile.units)))),
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": NVME_PATH,
            "pin_memory": True,
            "pipeline_read": system.pipeline,
            "pipeline_write": system.pipeline,
        },
    }
    return section | _offloaded_parameters(decided, True) if system.offload_param else section


def _resident(system: Resident, decided: Decided) -> dict[str, Any]:
    if not system.deepspeed:
        raise InputError("keeps everything on the GPU in its own way: plan with resident:deepspeed,zero_stage=1, 2 or 3")
    return {"stage": system.zero_stage}
