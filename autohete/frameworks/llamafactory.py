"""LLaMA-Factory: one YAML file, and with offloading DeepSpeed's configuration beside it.

Keys: ``src/llamafactory/hparams`` at 0.9.5, and the ``TrainingArguments`` of transformers. Text is trained on as it is
(``stage: pt``), from the file that ``data/dataset_info.json`` names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from autohete.errors import InputError
from autohete.frameworks.deepspeed import CONFIG, RELEASE_OF_ZENFLOW, DeepSpeedFiles
from autohete.frameworks.framework import Abilities, Decided, ModelFiles
from autohete.frameworks.settings_text import yaml_text
from autohete.frameworks.training_script import facts, nodes_of, threads
from autohete.policies.offload_activations import OffloadActivations, What
from autohete.policies.resident import Resident
from autohete.policies.zenflow import ZenFlow
from autohete.workload import Kernels, Precision
from autohete.workload.optimizers import Optimizer
from autohete.workload.training import Adapters

#: What ``transformers`` calls the optimizers.
_OPTIMIZERS = {
    Optimizer.ADAMW: "adamw_torch_fused",
    Optimizer.ADAMW_PURE_BF16: "adamw_torch_fused",
    Optimizer.ADAMW8BIT_PURE_BF16: "adamw_bnb_8bit",
    Optimizer.ADAFACTOR_PURE_BF16: "adafactor",
}
_ABILITIES = Abilities(
    tuple(_OPTIMIZERS),
    (Precision.BF16, Precision.FP32),
    lora=True,
    prepared=False,  # ``prepare_model_for_training`` casts norms only if ``upcast_layernorm`` is given
    quantised=True,
    chunked_loss=True,
    autocast=(Precision.BF16,),
)


@dataclass(frozen=True, slots=True)
class LlamaFactoryFiles:
    """LLaMA-Factory."""

    name: str = "llamafactory"
    version: str = "0.9.5"
    kernels: ClassVar[Kernels] = Kernels.EAGER_FLASH
    abilities: ClassVar[Abilities] = _ABILITIES

    def check(self, decided: Decided) -> None:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        self._settings(decided, "")

    def files(self, decided: Decided, model: ModelFiles) -> dict[str, str]:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        settings = self._settings(decided, model.weights or "model")
        heading = f"For LLaMA-Factory {self.version}. {facts(decided)}\nStart: {self.command(decided)}"
        dataset = {"text": {"file_name": "text.jsonl", "columns": {"prompt": "text"}}}
        files = {
            "train.yaml": yaml_text(settings, heading),
            "data/dataset_info.json": json.dumps(dataset, indent=2) + "\n",
        }
        if "deepspeed" in settings:
            files[CONFIG] = json.dumps(DeepSpeedFiles().config(decided), indent=2) + "\n"
        return files

    def command(self, decided: Decided) -> str:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        nodes, ranks = nodes_of(decided), decided.hardware.all_gpus_of_node
        variables = [threads(decided).strip() or "env"]
        if _has_deepspeed(decided):
            # It starts torchrun by itself on several GPUs only, but refuses DeepSpeed without (``hparams/parser.py``).
            variables += ["FORCE_TORCHRUN=1", f"NPROC_PER_NODE={ranks}"]
        if nodes > 1:
            variables += [f"NNODES={nodes}", "NODE_RANK=RANK", "MASTER_ADDR=HOST", "MASTER_PORT=29400"]
        return " ".join([*(variables if variables != ["env"] else ()), "llamafactory-cli train train.yaml"])

    def _settings(self, decided: Decided, weights: str) -> dict[str, Any]:
        _ABILITIES.check(decided)
        workload, training = decided.workload, decided.workload.training
        if workload.precision is Precision.FP32 and workload.autocast is None:
            raise InputError("is written here with products in bf16: plan with precision bf16, or with autocast bf16 as well")
        if workload.architecture is None:
            raise InputError("trains models that have a config.json and a tokenizer: name a model")
        if workload.kernels is Kernels.LIGER and not workload.chunked_loss:
            raise InputError("runs Liger Kernel only together with its loss: plan with chunked_loss as well")
        method = _method(decided)
        return {
            "model_name_or_path": weights,
            "stage": "pt",
            "do_train": True,
            **_trained(decided),
            **method,
            "dataset": "text",
            "dataset_dir": "data",
            "cutoff_len": workload.sequence_length,
            "output_dir": "output",
            "per_device_train_batch_size": workload.batch_size,
            "gradient_accumulation_steps": workload.micro_batches,
            "max_grad_norm": workload.clip_norm or 0.0,
            "optim": _OPTIMIZERS[training.optimizer],
            "learning_rate": 1e-5,
            "weight_decay": 0.01,
            "bf16": True,
            "logging_steps": 1,
            **({"enable_liger_kernel": True} if workload.chunked_loss else {}),
        }


def _has_deepspeed(decided: Decided) -> bool:
    """Whether DeepSpeed places the values, and not PyTorch alone."""
    system = decided.system
    return system.deepspeed if isinstance(system, Resident) else not isinstance(system, OffloadActivations)


def _method(decided: Decided) -> dict[str, Any]:
    """What is offloaded and recomputed."""
    system, training = decided.system, decided.workload.training
    if isinstance(system, OffloadActivations):
        if system.what is not What.INPUTS or system.streams:
            raise InputError("offloads inputs of blocks, as Unsloth does: plan with offload_activations, without flags")
        return _pure(decided) | {"use_unsloth_gc": True}
    checkpointing = {} if decided.recomputes else {"disable_gradient_checkpointing": True}
    if isinstance(system, Resident) and not _has_deepspeed(decided):
        if system.zero_stage or system.in_backward:
            raise InputError("shards with DeepSpeed and updates after backward: plan with resident:deepspeed,zero_stage=2 or 3")
        return _pure(decided) | checkpointing
    if training.lora is not None and training.lora.quantised:
        raise InputError("has no base in NF4 with DeepSpeed's offloading: plan with LoRA alone, or with resident")
    if training.lora is not None and decided.workload.adapters is not Adapters.PLAIN:
        raise InputError(
            "has adapters in the type of the model with DeepSpeed, whose engine casts them: plan with adapters plain"
        )
    if isinstance(system, ZenFlow):
        raise InputError(f"runs the DeepSpeed that is installed, and ZenFlow needs {RELEASE_OF_ZENFLOW}: plan for deepspeed")
    try:
        DeepSpeedFiles().check(decided)
    except InputError as error:
        raise InputError(f"offloads with DeepSpeed, which {error}") from error
    return {"deepspeed": CONFIG} | checkpointing


def _pure(decided: Decided) -> dict[str, Any]:
    """Whether all is in bf16. Otherwise, without DeepSpeed, trained parameters are in fp32 and used under autocast
    (``init_adapter`` in model/adapter.py).
    """
    if decided.workload.autocast is not None:
        return {}
    if not decided.workload.has_masters:
        return {"pure_bf16": True}
    if decided.workload.training.lora is None:
        raise InputError(
            "has no masters beside 16-bit parameters without DeepSpeed: plan with autocast bf16 and precision fp32, with "
            "optimizer adamw_pure_bf16, or with resident:deepspeed,zero_stage=2"
        )
    return {}


def _trained(decided: Decided) -> dict[str, Any]:
    workload, lora = decided.workload, decided.workload.training.lora
    if lora is None:
        return {"finetuning_type": "full"}
    names = sorted({layer.name for unit in range(workload.unit_count) for layer in workload.adapted_layers(unit)})
    quantised = {"quantization_bit": 4, "quantization_type": "nf4", "double_quantization": True} if lora.quantised else {}
    return {
        "finetuning_type": "lora",
        "lora_rank": lora.rank,
        "lora_alpha": 2 * lora.rank,
        "lora_dropout": lora.dropout,
        "lora_target": ",".join(names),
        **quantised,
    }
