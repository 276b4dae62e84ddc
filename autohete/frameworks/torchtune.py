"""torchtune: one YAML file for its recipes on a single device.

Keys: ``recipes/full_finetune_single_device.py`` and ``recipes/lora_finetune_single_device.py`` at 0.6.1, and the files in
``recipes/configs`` for the models there. Parameters, gradients and states have one type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from autohete.errors import InputError
from autohete.frameworks.framework import Abilities, Decided, ModelFiles, check_published
from autohete.frameworks.settings_text import yaml_text
from autohete.frameworks.training_script import facts
from autohete.policies.offload_activations import OffloadActivations, What
from autohete.policies.resident import Resident
from autohete.workload import Kernels, Precision, Workload
from autohete.workload.optimizers import Optimizer
from autohete.workload.training import Adapters


@dataclass(frozen=True, slots=True)
class _Model:
    """A model's builder, without the prefix of those with adapters, and its files: kind, number of shards."""

    family: str
    builder: str
    kind: str
    shards: int


_MODELS = {
    "llama-3.1-8b": _Model("llama3_1", "llama3_1_8b", "LLAMA3", 4),
    "llama-3.1-70b": _Model("llama3_1", "llama3_1_70b", "LLAMA3", 30),
    "llama-3.2-1b": _Model("llama3_2", "llama3_2_1b", "LLAMA3_2", 1),
    "llama-3.2-3b": _Model("llama3_2", "llama3_2_3b", "LLAMA3_2", 2),
    "qwen2.5-0.5b": _Model("qwen2_5", "qwen2_5_0_5b", "QWEN2", 1),
    "qwen2.5-1.5b": _Model("qwen2_5", "qwen2_5_1_5b_base", "QWEN2", 1),
    "qwen2.5-3b": _Model("qwen2_5", "qwen2_5_3b", "QWEN2", 2),
    "qwen2.5-7b": _Model("qwen2_5", "qwen2_5_7b_base", "QWEN2", 4),
    "qwen2.5-14b": _Model("qwen2_5", "qwen2_5_14b_base", "QWEN2", 8),
}
_OPTIMIZERS = {
    Optimizer.ADAMW: {"_component_": "torch.optim.AdamW", "fused": True, "lr": 1e-5},
    Optimizer.ADAMW_PURE_BF16: {"_component_": "torch.optim.AdamW", "fused": True, "lr": 1e-5},
    Optimizer.ADAMW8BIT_PURE_BF16: {"_component_": "bitsandbytes.optim.AdamW8bit", "lr": 1e-5},
    Optimizer.ADAFACTOR_PURE_BF16: {"_component_": "torch.optim.Adafactor", "lr": 1e-3},
    Optimizer.SGD: {"_component_": "torch.optim.SGD", "lr": 1e-3},
}
_ABILITIES = Abilities(
    tuple(_OPTIMIZERS),
    (Precision.BF16, Precision.FP32),
    lora=True,
    adapters=Adapters.PLAIN,
    chunked_loss=True,
    several_gpus=False,
)
#: Layers of attention as transformers and torchtune name them.
_ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}


@dataclass(frozen=True, slots=True)
class TorchtuneFiles:
    """torchtune."""

    name: str = "torchtune"
    version: str = "0.6.1"
    kernels: ClassVar[Kernels] = Kernels.EAGER_FLASH
    abilities: ClassVar[Abilities] = _ABILITIES

    def check(self, decided: Decided) -> None:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        self._settings(decided)

    def files(self, decided: Decided, model: ModelFiles) -> dict[str, str]:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        heading = (
            f"For torchtune {self.version}. {facts(decided)}\nBefore: tune download {model.weights} --output-dir model\n"
            f"Start: {self.command(decided)}"
        )
        return {"train.yaml": yaml_text(self._settings(decided), heading)}

    def command(self, decided: Decided) -> str:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        kind = "full" if decided.workload.training.lora is None else "lora"
        return f"tune run {kind}_finetune_single_device --config train.yaml"

    def _settings(self, decided: Decided) -> dict[str, Any]:
        _ABILITIES.check(decided)
        check_published(decided, _MODELS)
        workload = decided.workload
        if workload.has_masters:
            raise InputError("has no masters beside 16-bit parameters: plan with optimizer adamw_pure_bf16 or precision fp32")
        recomputes, offloads, in_backward = _method(decided)
        if in_backward and (workload.micro_batches > 1 or workload.clips):
            raise InputError(
                "updates in backward without accumulation and clipping: plan with one micro-batch, or with resident"
            )
        model = _MODELS[workload.name]
        shards = [f"model-{one:05}-of-{model.shards:05}.safetensors" for one in range(1, model.shards + 1)]
        return {
            "output_dir": "output",
            "model": _model(workload, model),
            "tokenizer": _tokenizer(model) | {"max_seq_len": workload.sequence_length},
            "dataset": {
                "_component_": "torchtune.datasets.text_completion_dataset",
                "source": "text",
                "data_files": "text.txt",
                "column": "text",
                "split": "train",
                "packed": True,
            },
            "seed": None,
            "shuffle": True,
            "checkpointer": {
                "_component_": "torchtune.training.FullModelHFCheckpointer",
                "checkpoint_dir": "model",
                "checkpoint_files": shards if model.shards > 1 else ["model.safetensors"],
                "recipe_checkpoint": None,
                "output_dir": "output",
                "model_type": model.kind,
            },
            "resume_from_checkpoint": False,
            **({"save_adapter_weights_only": True} if workload.training.lora else {"optimizer_in_bwd": in_backward}),
            "batch_size": workload.batch_size,
            "epochs": 1,
            "max_steps_per_epoch": 10,
            "gradient_accumulation_steps": workload.micro_batches,
            "clip_grad_norm": workload.clip_norm,
            "optimizer": _OPTIMIZERS[workload.training.optimizer],
            **({"lr_scheduler": _SCHEDULE} if workload.training.lora else {}),
            "loss": {
                "_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"
                if workload.chunked_loss
                else "torch.nn.CrossEntropyLoss"
            },
            "compile": False,
            "device": "cuda",
            "enable_activation_checkpointing": recomputes,
            "enable_activation_offloading": offloads,
            "dtype": "fp32" if workload.precision is Precision.FP32 else "bf16",
            "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "output/logs"},
            "log_every_n_steps": 1,
            "log_peak_memory_stats": True,
        }


_SCHEDULE = {
    "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "num_warmup_steps": 1,
}


def _method(decided: Decided) -> tuple[bool, bool, bool]:
    """Whether blocks are recomputed, their inputs are offloaded, and updates are in backward."""
    system = decided.system
    if isinstance(system, OffloadActivations):
        if system.what is not What.INPUTS or not system.streams:
            raise InputError("offloads inputs of blocks with streams of its own: plan with offload_activations:streams")
        return True, True, False
    if not isinstance(system, Resident) or system.zero_stage:
        raise InputError("on one device keeps parameters, gradients and states on it: plan with resident")
    if system.in_backward and decided.workload.training.lora is not None:
        raise InputError("updates adapters after backward: plan with resident")
    return decided.recomputes, False, system.in_backward


def _model(workload: Workload, model: _Model) -> dict[str, Any]:
    lora, path = workload.training.lora, f"torchtune.models.{model.family}"
    if lora is None:
        return {"_component_": f"{path}.{model.builder}"}
    names = {layer.name for unit in range(workload.unit_count) for layer in workload.adapted_layers(unit)}
    if names & _MLP not in (set(), _MLP) or names - _MLP - {*_ATTENTION}:
        raise InputError(
            f"has adapters on all of the MLP or none, and on attention: give other targets than {', '.join(names)}"
        )
    return {
        "_component_": f"{path}.lora_{model.builder}",
        "lora_attn_modules": [_ATTENTION[name] for name in sorted(names & {*_ATTENTION})],
        "apply_lora_to_mlp": names >= _MLP,
        "apply_lora_to_output": False,
        "lora_rank": lora.rank,
        "lora_alpha": 2 * lora.rank,
        "lora_dropout": lora.dropout,
    }


def _tokenizer(model: _Model) -> dict[str, Any]:
    if model.family == "qwen2_5":
        path = "torchtune.models.qwen2_5.qwen2_5_tokenizer"
        return {"_component_": path, "path": "model/vocab.json", "merges_file": "model/merges.txt"}
    return {"_component_": "torchtune.models.llama3.llama3_tokenizer", "path": "model/original/tokenizer.model"}
