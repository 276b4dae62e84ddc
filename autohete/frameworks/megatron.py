"""Megatron-LM: flags of ``pretrain_gpt.py``.

Flags: ``megatron/training/arguments.py``, ``megatron/training/config`` and ``megatron/core/transformer/transformer_config.py``
at core_v0.19.0. Gradients stay on the GPU until the update, which is the plan's placement. The stages of a pipeline are written
as a layout (``megatron/core/transformer/pipeline_parallel_layer_layout.py``), which says what each has.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from autohete.errors import InputError
from autohete.frameworks.framework import Abilities, Decided, ModelFiles
from autohete.frameworks.training_script import facts, torchrun
from autohete.frameworks.transformer_engine import offloaded_layers
from autohete.plan import Activations, PassOrder, Processor
from autohete.plan.rules import ReductionsAfterBackward
from autohete.policies.megatron_hybrid import MegatronHybrid
from autohete.policies.pipeline import Pipeline
from autohete.policies.resident import Resident
from autohete.schedule import HOST_MEMORY
from autohete.workload import Kernels, Precision
from autohete.workload.model import Activation, Attention, Block, Mlp, Norm, NormPlace
from autohete.workload.optimizers import Optimizer

_ABILITIES = Abilities((Optimizer.ADAMW,), parallel=True, pipelines=True)
#: Compute capability.
_BLACKWELL = 10
#: Saved tensors, and the modules whose inputs they are: those of attention's core, and its result.
_MODULES = {"flash_attention": ("core_attn", "attn_proj")}


@dataclass(frozen=True, slots=True)
class MegatronFiles:
    """Megatron-LM."""

    name: str = "megatron"
    version: str = "core_v0.19.0"
    kernels: ClassVar[Kernels] = Kernels.FUSED
    abilities: ClassVar[Abilities] = _ABILITIES

    def check(self, decided: Decided) -> None:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        self._flags(decided)

    def files(self, decided: Decided, model: ModelFiles) -> dict[str, str]:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        base = model.config.get("rope_theta")
        flags = self._flags(decided) + ([f"--rotary-base {int(base)}"] if isinstance(base, int | float) else [])
        return {
            "train.sh": "\n".join(
                [
                    "#!/bin/sh",
                    f"# For Megatron-LM {self.version}, run in its folder. {facts(decided)}",
                    "# On mock data: give --data-path and a tokenizer instead, and rates of learning.",
                    *(["export CUDA_DEVICE_MAX_CONNECTIONS=1"] if _needs_order(decided) else []),
                    f"exec {torchrun(decided, 'pretrain_gpt.py')} \\",
                    *(f"    {flag} \\" for flag in flags),
                    '    "$@"',
                    "",
                ]
            )
        }

    def command(self, decided: Decided) -> str:
        """See :class:`~autohete.frameworks.framework.Framework`."""
        return "sh train.sh"

    def _flags(self, decided: Decided) -> list[str]:
        _ABILITIES.check(decided)
        workload, parallelism, plan = decided.workload, decided.hardware.parallelism, decided.plan
        block, batches = _block(decided), plan.batches(decided.hardware.batches)
        sums_in_bf16 = workload.precision is Precision.BF16 and not plan.sums_in_fp32
        waits = any(isinstance(rule, ReductionsAfterBackward) for rule in plan.rules)
        overlaps = plan.batches(decided.hardware.gpus) > 1 and not waits
        return [
            f"--num-layers {workload.transformer_blocks}",
            f"--hidden-size {workload.hidden_size}",
            *_block_flags(block, workload.heads),
            f"--seq-length {workload.sequence_length}",
            f"--max-position-embeddings {workload.sequence_length}",
            *([] if workload.tied_embeddings else ["--untie-embeddings-and-output-weights"]),
            f"--micro-batch-size {workload.batch_size}",
            f"--global-batch-size {workload.samples * batches}",
            *_stages(decided),
            *([f"--tensor-model-parallel-size {parallelism.tensor}"] if parallelism.tensor > 1 else []),
            *(["--sequence-parallel"] if parallelism.along_sequence > 1 else []),
            *(
                [f"--context-parallel-size {parallelism.context}", f"--cp-comm-type {parallelism.exchange}"]
                * (parallelism.context > 1)
            ),
            f"--clip-grad {workload.clip_norm or 0.0}",
            *([f"--{workload.precision}"] if workload.precision.is_mixed else []),
            *(["--grad-reduce-in-bf16"] if sums_in_bf16 else []),
            *(["--overlap-grad-reduce"] if overlaps else []),
            "--transformer-impl transformer_engine",
            "--optimizer adam",
            "--lr 1e-5",
            "--train-iters 10",
            "--mock-data",
            "--tokenizer-type NullTokenizer",
            f"--vocab-size {workload.vocabulary_size}",
            *_offload(decided),
        ]


def _needs_order(decided: Decided) -> bool:
    """Whether kernels have to start in the order of their launches: asserted before Blackwell where GPUs divide tensors or
    sequences (``validate_args`` in ``megatron/training/arguments.py``).
    """
    parallelism, capability = decided.hardware.parallelism, decided.hardware.gpu.compute_capability
    return max(parallelism.tensor, parallelism.context) > 1 and (capability or 0) < _BLACKWELL


def _block(decided: Decided) -> Block:
    """The one kind of block, of those that the flags describe."""
    workload = decided.workload
    blocks = {workload.block(unit) for unit in range(1, workload.unit_count - 1)}
    if len(blocks) > 1:
        raise InputError("is written here for models whose blocks are alike")
    block = blocks.pop()
    mixer, mlp = block.mixer, block.feed_forward
    if not isinstance(mixer, Attention) or not isinstance(mlp, Mlp):
        raise InputError("is written here for dense models with attention")
    if mixer.window is not None or mixer.gated or mixer.sinks or mixer.soft_cap or mixer.whole_norm:
        raise InputError("is written here for attention without windows, gates, sinks, caps and norms of whole projections")
    if block.norm_place is not NormPlace.BEFORE or mixer.joint or mlp.joint:
        raise InputError("is written here for blocks with norms before their parts")
    if (mlp.activation, mlp.gated) not in _ACTIVATIONS:
        raise InputError(f"is written here without the activation {mlp.activation}")
    return block


_ACTIVATIONS: dict[tuple[Activation, bool], list[str]] = {
    (Activation.SILU, True): ["--swiglu"],
    (Activation.GELU_NEW, False): [],
    (Activation.GELU_TANH, False): [],
}


def _block_flags(block: Block, heads: int) -> Iterator[str]:
    mixer, mlp = block.mixer, block.feed_forward
    assert isinstance(mixer, Attention)
    assert isinstance(mlp, Mlp)
    yield f"--num-attention-heads {heads}"
    yield f"--kv-channels {mixer.head_dim}"
    if mixer.key_value_heads != mixer.heads:
        yield "--group-query-attention"
        yield f"--num-query-groups {mixer.key_value_heads}"
    yield f"--ffn-hidden-size {mlp.width}"
    yield from _ACTIVATIONS[mlp.activation, mlp.gated]
    yield f"--normalization {'LayerNorm' if block.norm is Norm.LAYER else 'RMSNorm'}"
    yield f"--position-embedding-type {'rope' if mixer.rotary else 'learned_absolute'}"
    if not (mixer.output_bias or mlp.bias):
        yield "--disable-bias-linear"
        if mixer.bias:
            yield "--add-qkv-bias"
    if mixer.head_norm:
        yield "--qk-layernorm"
    if not block.dropout:
        yield "--attention-dropout 0"
        yield "--hidden-dropout 0"


def _stages(decided: Decided) -> list[str]:
    """The stages of a pipeline, in the order in which they are dealt to its ranks: embedding (E), blocks (t) and head (L)."""
    plan, system = decided.plan, decided.system
    if not plan.is_pipeline:
        return []
    if not isinstance(system, Pipeline) or plan.pass_order is not PassOrder.ONE_FORWARD_ONE_BACKWARD:
        raise InputError("has stages that stay on their GPU, and one forward and one backward in turns: plan with pipeline")
    last, layout = len(plan.units) - 1, []
    for stage in plan.stages:
        blocks = len(stage) - (0 in stage) - (last in stage)
        layout.append("E" * (0 in stage) + f"t*{blocks}" * (blocks > 0) + "L" * (last in stage))
    return [
        f"--pipeline-model-parallel-size {plan.ranks}",
        f"--pipeline-model-parallel-layout {shlex.quote('|'.join(layout))}",
    ]


# --- what is offloaded and recomputed -----------------------------------------------------------------------------


def _offload(decided: Decided) -> list[str]:
    system = decided.system
    if isinstance(system, MegatronHybrid):
        return [*_optimizer_offload(system, decided), *_recompute(decided)]
    if not decided.stays:
        raise InputError("keeps parameters and gradients on the GPU: plan with megatron_hybrid or resident")
    if isinstance(system, Resident) and (system.zero_stage > 1 or system.in_backward or system.deepspeed):
        raise InputError("shards states alone and updates after backward: plan with resident, or with resident:zero_stage=1")
    shards = ["--use-distributed-optimizer"] if isinstance(system, Resident | Pipeline) and system.zero_stage else []
    if any(each.saved for each in decided.blocks):
        return [*shards, *_fine_grained(decided)]
    if any(each.activations_leave for each in decided.blocks):
        return [*shards, f"--cpu-offloading-num-layers {offloaded_layers(decided)}"]
    return [*shards, *_recompute(decided)]


def _recompute(decided: Decided) -> list[str]:
    if not decided.recomputes:
        return []
    return ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]


def _optimizer_offload(system: MegatronHybrid, decided: Decided) -> list[str]:
    """``HybridDeviceOptimizer``, of which a fraction of the parameters is on the CPU."""
    counts = [*map(decided.profile.part_of, range(len(decided.profile.units)))]
    on_cpu = sum(
        count * (1 - unit.update.share)
        for count, unit in zip(counts, decided.plan.units, strict=True)
        if unit.update.on is Processor.CPU
    )
    return [
        "--use-distributed-optimizer",
        "--use-precision-aware-optimizer",
        "--optimizer-cpu-offload",
        f"--optimizer-offload-fraction {on_cpu / sum(counts):.4f}",
        *(["--overlap-cpu-optimizer-d2h-h2d"] if system.overlap else []),
    ]


def _fine_grained(decided: Decided) -> list[str]:
    saved = {each.saved for each in decided.blocks}
    if len(saved) > 1 or any(each.kept.leaves or each.activations is not Activations.KEEP for each in decided.blocks):
        raise InputError("offloads the same modules of all blocks, and recomputes none beside it")
    routes = {one.name: one for one in saved.pop()}
    unknown = [name for name, one in routes.items() if name not in _MODULES or one.recomputed or one.route.home != HOST_MEMORY]
    if unknown:
        raise InputError(
            f"offloads inputs of modules to the host, such as flash_attention, not {', '.join(unknown)} as planned"
        )
    modules = [module for name in routes for module in _MODULES[name]]
    return ["--fine-grained-activation-offloading", f"--offload-modules {shlex.join(modules)}"]
