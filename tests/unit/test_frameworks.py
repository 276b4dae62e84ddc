"""Frameworks run what they do not refuse: their files say what the plan says, in the keys that each tool has."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.decided import BY_NAME, MODEL, TINY, decided, files_of, schema

from autohete.errors import InfeasibleError, InputError
from autohete.frameworks import FRAMEWORKS, as_run, named_frameworks, refusal, runs_in
from autohete.frameworks.changes import key_changes
from autohete.frameworks.deepspeed import CONFIG
from autohete.frameworks.deepspeed_reading import read_deepspeed
from autohete.frameworks.model_files import model_files
from autohete.hardware.parallelism import ALONE, Parallelism
from autohete.plan import Route, SavedRoute
from autohete.plan.policy import Verdict
from autohete.policies import POLICIES, parse_policy
from autohete.schedule import HOST_MEMORY
from autohete.simulate import simulate_plan, simulate_policy
from autohete.workload import AttentionMask, FusedAttention, Kernels, Precision, Units, Workload
from autohete.workload.config import parse_model, read_model
from autohete.workload.optimizers import Optimizer
from autohete.workload.training import Adapters, Lora, Training

PURE = Training(optimizer=Optimizer.ADAMW_PURE_BF16)
LLAMA = replace(read_model(MODEL), batch_size=2)
EAGER = replace(LLAMA, kernels=Kernels.EAGER_FLASH)


def yaml(text: str) -> Any:
    """What the YAML parser of all such tools reads."""
    return pytest.importorskip("yaml").safe_load(text)


# --- who runs what ------------------------------------------------------------------------------------------------

#: Policies, the training, and the frameworks that run them.
RUN_BY = [
    ("zero_offload", LLAMA, "deepspeed llamafactory trainer"),
    ("zero_offload:paper", LLAMA, "trainer"),
    ("zero_offload:deepspeed=0.14", LLAMA, "trainer"),
    ("zero3_offload", LLAMA, "deepspeed llamafactory trainer"),
    ("twin_flow:ratio=50", LLAMA, "deepspeed llamafactory trainer"),
    ("zenflow", LLAMA, "deepspeed"),
    ("zero_offload:paper,delayed_update", LLAMA, "trainer"),
    ("zero_offload:paper,delayed_update", replace(LLAMA, clip_norm=1.0), ""),
    ("zero_offload:paper,delayed_update", replace(LLAMA, micro_batches=2), ""),
    ("megatron_hybrid:percent=50", LLAMA, "megatron trainer"),
    ("zero_infinity", LLAMA, "deepspeed llamafactory trainer"),
    ("fsdp2_offload", LLAMA, "fsdp2 torchtitan trainer"),
    ("fsdp2_offload:pin_memory=off", replace(LLAMA, precision=Precision.FP32), "fsdp2 trainer"),
    ("fsdp2_offload:checkpointing=alternate", LLAMA, ""),
    ("resident", LLAMA, "megatron trainer"),
    ("resident", replace(LLAMA, training=PURE), "torch llamafactory torchtune trainer"),
    ("resident", replace(LLAMA, precision=Precision.FP32, autocast=Precision.BF16), "torch llamafactory trainer"),
    ("zero_offload", replace(LLAMA, precision=Precision.FP32, autocast=Precision.BF16), "trainer"),
    ("resident", replace(LLAMA, precision=Precision.FP32, autocast=Precision.FP16), ""),
    ("resident:in_backward", replace(LLAMA, training=PURE), "torchtune trainer"),
    ("resident:zero_stage=3", LLAMA, "fsdp2 trainer"),
    ("resident:zero_stage=2,deepspeed", LLAMA, "deepspeed llamafactory trainer"),
    ("offload_activations", replace(LLAMA, training=PURE), "llamafactory trainer"),
    ("offload_activations:streams", replace(LLAMA, training=PURE), "torchtune trainer"),
    ("te_offload:layers=5", LLAMA, "megatron transformer_engine trainer"),
    ("resident", replace(LLAMA, training=Training(Lora(8))), "llamafactory trainer"),
    ("resident", replace(LLAMA, training=Training(Lora(8, quantised=True))), "llamafactory"),
    ("zero_offload", replace(EAGER, training=Training(Lora(8))), "deepspeed trainer"),
    ("zero_offload", replace(EAGER, training=Training(Lora(8, adapters=Adapters.PLAIN))), "deepspeed llamafactory trainer"),
    ("resident", replace(LLAMA, units=Units.SUBLAYER), ""),
    ("resident", replace(LLAMA, attention=FusedAttention.TRITON), ""),
    ("autohete", TINY, "trainer"),
]


@pytest.mark.parametrize(("policy", "workload", "names"), RUN_BY, ids=lambda value: str(getattr(value, "name", value)))
def test_plans_run_where_they_should(policy: str, workload: Workload, names: str) -> None:
    """Each plan is run by the frameworks that have its schedule, and every other one has a reason that names it."""
    one = decided(policy, workload)
    assert set(runs_in(one)) - {"torchtitan"} == set(names.split()) - {"torchtitan"}
    for framework in FRAMEWORKS:
        reason = refusal(framework, one)
        assert bool(reason) != (framework.name in runs_in(one))
        assert not reason or reason.startswith(f"{framework.name} ")
        if not reason:
            _check_files(files_of(framework.name, one))


def _check_files(files: dict[str, str]) -> None:
    """All files are of their kind."""
    readers: dict[str, Callable[[str], object]] = {
        ".json": json.loads,
        ".toml": tomllib.loads,
        ".yaml": yaml,
        ".sh": shlex.split,
        ".txt": str.split,
    }
    for name, text in files.items():
        suffix = Path(name).suffix
        if suffix == ".py":
            compile(text, name, "exec")
            assert max(map(len, text.splitlines())) <= 140
        else:
            assert readers[suffix](text), name


def test_torchtitan_has_its_own_models() -> None:
    """A bundled model runs there as it is published, also with its own checkpointing. Fewer blocks are refused, and one GPU,
    where nothing is sharded.
    """
    llama = replace(read_model("llama-3.1-8b"), batch_size=2)
    assert "torchtitan" in runs_in(decided("fsdp2_offload", llama, gpus=2))
    assert "on several GPUs only" in refusal(BY_NAME["torchtitan"], decided("fsdp2_offload", llama))
    alternate = decided("fsdp2_offload:checkpointing=alternate", llama, gpus=2)
    assert runs_in(alternate) == ("torchtitan",)
    written = tomllib.loads(files_of("torchtitan", alternate)["train.toml"])["activation_checkpoint"]
    assert written == {"mode": "selective", "selective_ac_option": "op"}
    assert {f"activation_checkpoint.{key}" for key in written} <= schema("torchtitan")
    assert "without another transformer_blocks" in refusal(
        BY_NAME["torchtitan"], decided("fsdp2_offload", replace(llama, transformer_blocks=16), gpus=2)
    )


def test_llamafactory_runs_liger_kernel_with_its_loss() -> None:
    """One key turns on both, so a plan with the kernels alone is refused."""
    liger = replace(LLAMA, training=PURE, kernels=Kernels.LIGER)
    whole = decided("resident", replace(liger, chunked_loss=True))
    assert yaml(files_of("llamafactory", whole)["train.yaml"])["enable_liger_kernel"]
    assert "plan with chunked_loss" in refusal(BY_NAME["llamafactory"], decided("resident", liger))


def test_files_are_not_written_for_other_adapters() -> None:
    """Than scripts hold; also asked without a search for what runs a plan."""
    cast = decided("resident:deepspeed,zero_stage=2", replace(LLAMA, training=Training(Lora(8, adapters=Adapters.CAST))))
    assert refusal(BY_NAME["deepspeed"], cast) == "deepspeed is written here with adapters plain: plan with these"
    with pytest.raises(InputError, match="adapters plain"):
        files_of("deepspeed", cast)


def test_ranks_of_the_trainer_do_not_delay() -> None:
    """One process does."""
    delayed = "zero_offload:paper,delayed_update"
    assert "trainer" in runs_in(decided(delayed, LLAMA))
    assert "trainer neither delays updates" in refusal(BY_NAME["trainer"], decided(delayed, LLAMA, gpus=2))


def test_masks_are_not_written() -> None:
    """What is written trains on packed sequences."""
    masked = replace(LLAMA, training=PURE, kernels=Kernels.EAGER_FLASH, attention_mask=AttentionMask.BOOL)
    assert "masks of padded sequences" in refusal(BY_NAME["torch"], decided("resident", masked))


def test_all_policies_have_an_answer() -> None:
    """No policy, with its default flags, makes a framework fail in another way than with a reason."""
    hardware = decided("resident", TINY).hardware
    for name in set(POLICIES) - {"joint"}:
        try:
            one = decided(name, TINY)
        except (InfeasibleError, InputError):  # its drive does not compute
            continue
        assert one.hardware == hardware
        assert all(isinstance(refusal(each, one), str) for each in FRAMEWORKS)


def test_unknown_frameworks_are_named() -> None:
    """A misspelt framework is refused with a suggestion."""
    assert [each.name for each in named_frameworks(["fsdp2", "deepspeed"])] == ["fsdp2", "deepspeed"]
    with pytest.raises(InputError, match="deepspeed"):
        named_frameworks(["deepsped"])


# --- what the files say -------------------------------------------------------------------------------------------


def test_a_script_has_the_batch_of_the_question() -> None:
    """Sequences, tokens, micro-batches, clipping, adapters and recomputation are those that were simulated."""
    workload = replace(TINY, clip_norm=0.5, training=Training(Lora(4, ("c_attn",), dropout=0.1)), precision=Precision.FP32)
    script = files_of("fsdp2", decided("fsdp2_offload:checkpointing=full", workload))["train.py"]
    assert "BATCH_SIZE, SEQUENCE_LENGTH, MICRO_BATCHES = 2, 32, 2" in script
    assert "clip_grad_norm_(model.parameters(), 0.5)" in script
    assert "targets = ['c_attn']\n" in script
    assert "LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=targets)" in script
    assert "gradient_checkpointing_enable" in script
    kept = files_of("fsdp2", decided("fsdp2_offload:checkpointing=none", replace(workload, clip_norm=None)))["train.py"]
    assert "gradient_checkpointing" not in kept
    assert "clip_grad_norm_" not in kept


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gpt2", "gemma-3-4b", "opt-1.3b"])
def test_the_model_is_written_with_its_changes(model: str) -> None:
    """The config.json that is written is read again as the same model, with another number of blocks where one was given."""
    workload = replace(read_model(model), transformer_blocks=7)
    written = model_files(model, workload)
    again = parse_model(dict(written.config), workload.name)
    units = range(workload.unit_count)
    assert [again.unit_parameters(unit) for unit in units] == [workload.unit_parameters(unit) for unit in units]
    assert [again.block(unit) for unit in units[1:-1]] == [workload.block(unit) for unit in units[1:-1]]
    assert (again.transformer_blocks, again.vocabulary_size) == (7, workload.vocabulary_size)
    assert "/" in written.weights


def test_megatron_offloads_what_the_plan_does() -> None:
    """The share of the optimizer, the first layers or saved tensors become flags."""
    for overlap in ("", ",overlap"):
        flags = files_of("megatron", decided(f"megatron_hybrid:percent=50{overlap}"))["train.sh"]
        assert "--optimizer-cpu-offload" in flags
        assert re.search(r"--optimizer-offload-fraction 0\.5\d+", flags)
        assert ("--overlap-cpu-optimizer-d2h-h2d" in flags) == bool(overlap)
    one = decided("resident")
    blocks = [replace(each, saved=(SavedRoute("flash_attention", Route(HOST_MEMORY)),)) for each in one.blocks]
    fine = replace(one, plan=replace(one.plan, units=(one.plan.units[0], *blocks, one.plan.units[-1])))
    modules = files_of("megatron", fine)["train.sh"]
    assert "--fine-grained-activation-offloading" in modules
    assert "--offload-modules core_attn attn_proj" in modules


def test_transformer_engine_offloads_the_first_layers() -> None:
    """Its number of layers is that of the plan's; plans that offload other layers, or all, are refused."""
    one = decided("resident")
    offloaded = replace(one.blocks[0], kept=Route(HOST_MEMORY))
    for order, count in ((range(16), 5), (range(15, -1, -1), 5), (range(16), 16)):
        blocks = list(one.blocks)
        for place in list(order)[:count]:
            blocks[place] = offloaded
        plan = replace(one.plan, units=(one.plan.units[0], *blocks, one.plan.units[-1]))
        other = replace(one, plan=plan)
        reason = refusal(BY_NAME["transformer_engine"], other)
        assert bool(reason) == (order[0] != 0 or count == 16)
        if not reason:
            assert "NUM_LAYERS, MODEL_LAYERS = 5, 16" in files_of("transformer_engine", other)["activation_offload.py"]
            assert "--cpu-offloading-num-layers 5" in files_of("megatron", other)["train.sh"]


def expanded(layout: str) -> list[str]:
    """The stages of a layout as Megatron reads it: ``t*3`` is ``ttt``."""
    return re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), layout).split("|")


@pytest.mark.parametrize("flags", ["", "chunks=2", "cut=time", "ranks=2,zero_stage=1,overlap_grad_reduce,fp32_sums"])
def test_megatron_has_the_stages_of_the_plan(flags: str) -> None:
    """Embedding, blocks and head of each, in the order in which ranks get them; pipelines side by side have batches of their
    own.
    """
    one = decided(f"pipeline:{flags}" if flags else "pipeline", replace(LLAMA, micro_batches=4), gpus=4)
    assert runs_in(one) == ("megatron",)
    words = shlex.split(files_of("megatron", one)["train.sh"], comments=True)
    stages = expanded(words[words.index("--pipeline-model-parallel-layout") + 1])
    last = len(one.plan.units) - 1
    kinds = "".join("E" if not unit else "L" if unit == last else "t" for unit in range(last + 1))
    assert stages == [kinds[stage.start : stage.stop] for stage in one.plan.stages]
    side_by_side = "ranks=2" in flags
    ranks, batch = ("2", "16") if side_by_side else ("4", "8")
    assert words[words.index("--pipeline-model-parallel-size") + 1] == ranks
    assert words[words.index("--global-batch-size") + 1] == batch
    for flag in ("--use-distributed-optimizer", "--overlap-grad-reduce"):
        assert (flag in words) == side_by_side
    assert ("--grad-reduce-in-bf16" in words) != side_by_side
    assert {word for word in words if word.startswith("--")} - {"--nproc-per-node"} <= schema("megatron")


def test_megatron_refuses_other_pipelines() -> None:
    """All forwards first, and those of other systems."""
    four = replace(LLAMA, micro_batches=4)
    for policy in ("pipeline:order=gpipe", "pipeline_offload:percent=50,checkpointing=none"):
        assert "one forward and one backward in turns" in refusal(BY_NAME["megatron"], decided(policy, four, gpus=4))
    assert "without pipelines" in refusal(BY_NAME["deepspeed"], decided("pipeline", four, gpus=4))


def test_megatron_overlaps_reductions_and_orders_launches() -> None:
    """Reductions as in the plan; launches in order if tensors or sequences are divided, but on Blackwell."""
    several, alone = (files_of("megatron", decided("resident", gpus=gpus))["train.sh"] for gpus in (2, 1))
    assert "--overlap-grad-reduce" in several
    assert "--overlap-grad-reduce" not in alone
    ordered = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    for parallelism, node, needed in (
        (Parallelism(2), "a100-40gb-epyc7543p", True),
        (Parallelism(context=2), "a100-40gb-epyc7543p", True),
        (Parallelism(2), "b200-8gpu", False),
        (ALONE, "a100-40gb-epyc7543p", False),
    ):
        script = files_of("megatron", decided("resident", gpus=2, parallelism=parallelism, node=node))["train.sh"]
        assert (ordered in script) == needed
        assert ("--overlap-grad-reduce" in script) == (parallelism.tensor == 1)  # others have the same parameters


def test_ranks_that_update_are_bound_and_have_threads() -> None:
    """As their seconds assume; torchrun alone gives each of several ranks one thread, and no rank is bound."""
    several, alone = (decided("zero_offload", TINY, gpus=gpus) for gpus in (4, 1))
    staying = decided("resident:zero_stage=3", TINY, gpus=4)
    threads = f"env OMP_NUM_THREADS={several.hardware.cpu.cores} "
    bound = f"{threads}torchrun --numa-binding exclusive --nproc-per-node 4 train.py"
    assert BY_NAME["deepspeed"].command(several) == BY_NAME["trainer"].command(several) == bound
    started = "FORCE_TORCHRUN=1 NPROC_PER_NODE={} llamafactory-cli train train.yaml"  # DeepSpeed needs torchrun on one GPU, too
    assert BY_NAME["llamafactory"].command(several) == threads + started.format(4)
    assert BY_NAME["llamafactory"].command(alone) == "env " + started.format(1)
    assert BY_NAME["llamafactory"].command(decided("resident", TINY)) == "llamafactory-cli train train.yaml"
    assert BY_NAME["deepspeed"].command(alone) == "torchrun --nproc-per-node 1 train.py"
    assert BY_NAME["fsdp2"].command(staying) == "torchrun --nproc-per-node 4 train.py"


def test_nodes_meet_at_one_of_them() -> None:
    """torchrun's default, static, would take each node for the first; LLaMA-Factory is told by its variables."""
    two = decided("zero_offload", TINY, gpus=8)
    assert "torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 " in BY_NAME["deepspeed"].command(two)
    assert "NNODES=2 NODE_RANK=RANK MASTER_ADDR=HOST MASTER_PORT=29400 llama" in BY_NAME["llamafactory"].command(two)


# --- the keys that each tool has ----------------------------------------------------------------------------------


def test_flags_of_megatron_exist() -> None:
    """All flags that are written are options of the stated version."""
    for policy in ("resident", "megatron_hybrid:percent=50,checkpointing=full,overlap"):
        words = shlex.split(files_of("megatron", decided(policy))["train.sh"], comments=True)
        written = {word for word in words if word.startswith("--")} - {"--nproc-per-node", "--numa-binding"}
        assert "--num-layers" in written
        assert written <= schema("megatron")


def test_keys_of_torchtitan_exist() -> None:
    """All keys that are written are fields of the stated version's configuration."""
    llama = replace(read_model("llama-3.1-8b"), batch_size=2, clip_norm=1.0, micro_batches=3)
    tables = tomllib.loads(files_of("torchtitan", decided("fsdp2_offload", llama, gpus=2))["train.toml"])
    assert {f"{table}.{key}" for table, keys in tables.items() for key in keys} <= schema("torchtitan")
    assert tables["training"]["enable_cpu_offload"] is True
    assert (tables["training"]["local_batch_size"], tables["training"]["global_batch_size"]) == (2, 12)


@pytest.mark.parametrize("policy", ["zero_offload", "resident", "offload_activations"])
def test_keys_of_llamafactory_exist(policy: str) -> None:
    """All keys that are written are fields of its arguments or of those of transformers, which has these."""
    of_transformers = {
        "do_train",
        "output_dir",
        "deepspeed",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_grad_norm",
        "optim",
        "learning_rate",
        "weight_decay",
        "bf16",
        "logging_steps",
    }
    workload = replace(LLAMA, training=Training(Lora(8, dropout=0.1))) if policy == "resident" else LLAMA
    workload = replace(LLAMA, training=PURE) if policy == "offload_activations" else workload
    keys = yaml(files_of("llamafactory", decided(policy, workload))["train.yaml"])
    assert set(keys) - of_transformers <= schema("llamafactory")
    assert isinstance(keys["learning_rate"], float)
    assert ("deepspeed" in keys) == (policy == "zero_offload")
    assert keys.get("lora_dropout") == (0.1 if policy == "resident" else None)


# --- DeepSpeed, there and back ------------------------------------------------------------------------------------

ROUND_TRIPS = [
    "zero_offload",
    "zero_offload:pin_memory=off,bucket_size=50,checkpointing=none",
    "zero_offload:deepspeed=0.16,pin_memory",
    "zenflow:bucket_size=50,checkpointing=none",
    "zenflow:topk_ratio=5,overlap_step=off",
    "twin_flow:ratio=40,sub_group_size=100000000",
    "twin_flow:ratio=60,pin_memory=off,sub_group_size=200000000",
    "zero3_offload",
    "zero3_offload:offload_param=off,pin_memory=off",
    "zero3_offload:pin_parameters=off,bucket_size=17",
    "zero3_offload:reuse_distance=500",
    "zero_infinity",
    "zero_infinity:offload_param,pipeline,reduce_scatter=off",
    "resident:zero_stage=1,deepspeed",
    "resident:zero_stage=3,deepspeed,checkpointing=full",
]


@pytest.mark.parametrize("policy", ROUND_TRIPS)
def test_a_written_configuration_is_read_as_the_same_policy(policy: str) -> None:
    """What is read decides the same plan, has the same training, and is written as the same file."""
    workload = replace(LLAMA, micro_batches=3, clip_norm=0.7)
    one = decided(policy, workload)
    text = files_of("deepspeed", one)[CONFIG]
    read = read_deepspeed(text, gpus=1, hidden_size=workload.hidden_size)
    assert read.training == {"batch_size": 2, "micro_batches": 3, "clip_norm": 0.7, "precision": "bf16"}
    assert read.notes == ()
    again = decided(read.policy, workload)
    assert again.plan == one.plan
    assert json.loads(files_of("deepspeed", again)[CONFIG]) == json.loads(text)


def test_the_split_of_twin_flow_fits_again() -> None:
    """A split found for the memory is written as a share; the policy that is read keeps at most as much on the GPU."""
    one = decided("twin_flow", gpu_memory="13GiB")
    read = read_deepspeed(files_of("deepspeed", one)[CONFIG], gpus=1, hidden_size=2048)
    again = simulate_policy(one.profile, parse_policy(read.policy))
    assert again.verdict is Verdict.OK
    assert simulate_plan(one.profile, one.plan).gpu.peak_bytes >= again.gpu.peak_bytes
    assert one.seconds <= again.iteration_seconds <= 1.1 * one.seconds


ZERO_OFFLOAD: dict[str, Any] = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def configuration(zero: dict[str, Any], **other: Any) -> str:
    return json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero} | other)


#: What other people's files mean.
MEANINGS = [
    ({"stage": 2, "cpu_offload": True}, "zero_offload:bucket_size=500,deepspeed=2026"),
    ({"stage": 2, "offload_optimizer": {"device": "none"}}, "resident:zero_stage=2,deepspeed"),
    ({}, "resident"),
    (
        {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}, "reduce_bucket_size": "auto"},
        "zero3_offload:offload_param,pin_memory,pin_parameters,bucket_size=5,reuse_distance=1000",
    ),
    (
        {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}},
        "twin_flow:ratio=30,pin_memory,bucket_size=500,sub_group_size=1000000000",
    ),
]


@pytest.mark.parametrize(("zero", "policy"), MEANINGS)
def test_files_of_others_are_read(zero: dict[str, Any], policy: str) -> None:
    """Deprecated keys, ``auto`` and defaults mean what the tools make of them, and the notes say what was assumed."""
    read = read_deepspeed(configuration(zero), gpus=1, hidden_size=2048)
    assert read.policy == policy
    assert parse_policy(read.policy)
    precision = {} if "auto" in zero.values() else {"precision": "fp32"}  # left to transformers, like what is auto
    assert read.training == {"batch_size": 2, "clip_norm": 1.0} | precision
    assert any("recompute" in note for note in read.notes)
    full = read_deepspeed(configuration(zero), gpus=1, hidden_size=2048, flags="checkpointing=full")
    assert "checkpointing=full" in full.policy
    assert not any("recompute" in note for note in full.notes)


#: Keys that mean the same to DeepSpeed.
ZERO3: dict[str, Any] = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
ALIKE = [
    (ZERO3 | {"max_reuse_distance": 0}, ZERO3 | {"stage3_max_reuse_distance": 0}),
    (ZERO3 | {"stage3_max_reuse_distance": "auto"}, ZERO3),
    (ZERO3 | {"stage": "3", "reduce_bucket_size": "50000000"}, ZERO3 | {"reduce_bucket_size": 50_000_000}),
    (ZERO3 | {"stage3_max_reuse_distance": 1e12}, ZERO3 | {"stage3_max_reuse_distance": 1e11}),
    ({"stage": 2, "cpu_offload": "false"}, {"stage": 2}),
    (ZERO3 | {"stage": 2}, {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
    (ZERO3 | {"reduce_bucket_size": 0}, ZERO3 | {"reduce_bucket_size": 1}),
    (
        {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": "auto", "ratio": 0.3}, "sub_group_size": 1e12},
        {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}, "sub_group_size": 1e11},
    ),
]


@pytest.mark.parametrize(("zero", "other"), ALIKE)
def test_keys_mean_what_deepspeed_makes_of_them(zero: dict[str, Any], other: dict[str, Any]) -> None:
    """Short names, text, ``auto``, and what it does not read."""
    read, same = (read_deepspeed(configuration(each), gpus=1, hidden_size=64) for each in (zero, other))
    assert read.policy == same.policy
    assert parse_policy(read.policy)
    ignored = zero["stage"] == 2 and "offload_param" in zero
    assert any("offload_param changes nothing" in note for note in read.notes) == ignored


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}}, "bf16"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "true"}}, "fp16"),
        ({"bf16": {"enabled": "false"}}, "fp32"),
        ({"bfloat16": {"enabled": True}}, "bf16"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, None),
        ({"gradient_clipping": "auto"}, None),
        ({}, "fp32"),
    ],
)
def test_precision_is_that_which_is_enabled(keys: dict[str, Any], precision: str | None) -> None:
    """If none is, the file leaves it to transformers if it leaves other keys to it, too."""
    assert read_deepspeed(json.dumps(keys), gpus=1, hidden_size=64).training.get("precision") == precision


def test_what_changes_times_is_noted() -> None:
    """Also where a script decides, and where a distance does not act."""
    text = configuration(
        ZERO_OFFLOAD | {"stage3_max_reuse_distance": 1e9},
        optimizer={"type": "ADAMW", "params": {"torch_adam": True}},
        bf16={"enabled": True, "bf16_optimizer_states": True},
        zero_force_ds_cpu_optimizer=False,
        activation_checkpointing={"partition_activations": False},
        train_batch_size=None,
    )
    read = read_deepspeed(text, gpus=1, hidden_size=64)
    assert "checkpointing" not in read.policy
    assert (
        "not modelled: stage3_max_reuse_distance, optimizer.params.torch_adam, zero_force_ds_cpu_optimizer, "
        "bf16.bf16_optimizer_states" in read.notes
    )


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, (4, 4)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, (2, 8)),
        ({"train_batch_size": 32}, (16, 1)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": "auto"}, (3, None)),
        ({"train_batch_size": "auto"}, (None, None)),
    ],
)
def test_two_of_three_batch_sizes_give_the_third(keys: dict[str, Any], sizes: tuple[int | None, int | None]) -> None:
    """As DeepSpeed completes them, for two GPUs."""
    read = read_deepspeed(json.dumps(keys), gpus=2, hidden_size=64)
    assert (read.training.get("batch_size"), read.training.get("micro_batches")) == sizes


def test_zenflow_counts_its_steps_as_micro_batches() -> None:
    """What DeepSpeed accumulates over is its update interval, whatever the file says; defaults are DeepSpeed's."""
    flow = {"topk_ratio": 0.05, "update_interval": 4, "overlap_step": True}
    text = configuration(ZERO_OFFLOAD | {"zenflow": flow}, gradient_accumulation_steps=1)
    read = read_deepspeed(text, gpus=2, hidden_size=64)
    assert read.policy == "zenflow:bucket_size=500,topk_ratio=5,overlap_step"
    assert (read.training["batch_size"], read.training["micro_batches"]) == (2, 4)
    plain = read_deepspeed(configuration(ZERO_OFFLOAD | {"zenflow": {"update_interval": 2}}), gpus=1, hidden_size=64)
    assert plain.policy == "zenflow:bucket_size=500,topk_ratio=10,overlap_step=off"
    assert any("0.19.6 is assumed: 0.19.7" in note for note in plain.notes)


@pytest.mark.parametrize(
    ("written", "flags", "noted"),
    [
        (None, "", ("DeepSpeed 0.19.8 is assumed", "gradients are clipped to 1.0")),
        (None, "deepspeed=0.14", ()),
        ("deepspeed 0.16.9", "", ()),
        ("deepspeed 0.14.0", "", ('written_for is "deepspeed 0.14.0", which is not known here: DeepSpeed 0.19.8 is assumed',)),
        ("deepspeed 0.14.0", "deepspeed=0.14", ()),
        (3, "", ("written_for is 3, which is not known here",)),
    ],
)
def test_the_release_that_is_assumed_is_said(written: object, flags: str, noted: tuple[str, ...]) -> None:
    """If neither the file nor a flag says it; and clipping by default, which came with a release."""
    config: dict[str, object] = {"zero_optimization": ZERO_OFFLOAD, "bf16": {"enabled": True}}
    config |= {} if written is None else {"written_for": written}
    flags = f"checkpointing=full,{flags}"
    read = read_deepspeed(json.dumps(config), gpus=1, hidden_size=64, flags=flags)
    assert len(read.notes) == len(noted)
    assert all(note.startswith(begin) for note, begin in zip(read.notes, noted, strict=True))
    assert read.training["clip_norm"] == (None if "0.14" in flags or written == "deepspeed 0.16.9" else 1.0)


def test_zenflow_is_written_for_a_release_that_trains_the_weights_it_is_given() -> None:
    """Columns are chosen where an update is due, and micro-batches are its steps."""
    files = files_of("deepspeed", decided("zenflow", replace(LLAMA, micro_batches=4)))
    config = json.loads(files[CONFIG])
    flow = config["zero_optimization"]["zenflow"]
    assert flow["update_interval"] == config["gradient_accumulation_steps"] == 4
    assert (flow["select_strategy"], flow["select_interval"] % 4) == ("step", 0)
    assert config["written_for"] == "deepspeed 0.19.6"
    assert "deepspeed==0.19.6" in files["requirements.txt"].split()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ('{"a":' * 700 + "{}" + "}" * 700, "is not JSON"),
        ("[]", "holds no JSON object"),
        ('{"zero_optimization": 3}', "zero_optimization is 3: give an object"),
        (configuration({"stage": 1, "offload_optimizer": {"device": "cpu"}}), "stage 1 with the optimizer on cpu"),
        (configuration({"stage": 2, "zenflow": {"topk_ratio": 0.1}}), "zenflow is simulated for stage 2 with the optimizer on"),
        (configuration(ZERO_OFFLOAD | {"zenflow": {"topk_ratio": 2}}), "zenflow.topk_ratio is 2"),
        (configuration(ZERO_OFFLOAD | {"zenflow": {"offload": True}}), "zenflow.offload is not simulated"),
        (configuration(ZERO_OFFLOAD | {"zenflow": {"update_interval": "auto"}}), 'zenflow.update_interval is "auto"'),
        (configuration({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 2}}), "ratio is 2"),
        (configuration({"stage": True}), "stage is true: give a number"),
        (configuration({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}), "splits the optimizer in stage 3"),
        (configuration({"stage": 2, "reduce_bucket_size": 10**400}), "give a number from 0 to 1e+18"),
        (configuration({}, bf16={"enabled": True}, fp16={"enabled": True}), "bf16 and fp16 are both enabled"),
        (configuration({}, bf16={"enabled": [1]}), "enabled is [1]: give true or false"),
        (configuration({"stage": 2}, tensor_parallel={"autotp_size": 2}), "tensor_parallel.autotp_size is 2"),
        (configuration({"stage": 3, "mics_shard_size": 2}), "zero_optimization.mics_shard_size is 2"),
        (configuration({}, torch_autocast={"enabled": True}), "torch_autocast.enabled is true"),
        (configuration({"stage": 2.5}), "stage 2.5 with the optimizer on none"),
        (configuration({"stage": 2, "offload_optimizer": {"device": ["cpu"]}}), "stage 2 with the optimizer on ['cpu']"),
        (configuration({"stage": 2, "reduce_bucket_size": "much"}), 'reduce_bucket_size is "much"'),
        (configuration({}, optimizer={"type": "Lion"}), 'optimizer.type is "Lion"'),
        (configuration({}, train_batch_size=7, gradient_accumulation_steps=2), "train_batch_size is 7"),
        (configuration({}, gradient_accumulation_steps=0), "gradient_accumulation_steps is 0"),
    ],
)
def test_what_is_not_understood_is_named(text: str, reason: str) -> None:
    """A refusal names the key and its value."""
    with pytest.raises(InputError) as caught:
        read_deepspeed(text, gpus=1, hidden_size=64)
    assert reason in str(caught.value)


def test_changes_name_each_key() -> None:
    """Keys that differ, are new or go are listed with their values as the file has them; equal ones are not."""
    before = {"stage": 2, "same": 1, "offload": {"pin": False}}
    after = {"stage": 3, "same": 1, "new": {"device": "cpu"}}
    assert [str(change) for change in key_changes(before, after)] == [
        "stage: 2 -> 3",
        "offload.pin: false -> absent",
        'new.device: absent -> "cpu"',
    ]


def test_llama_factory_leaves_what_is_not_quantised_in_16_bit() -> None:
    """Its files do not ask for fp32 norms and heads, so a base in NF4 is simulated without, and refused with them."""
    lora = Lora(16, quantised=True)
    quantised = replace(EAGER, training=replace(EAGER.training, lora=lora))
    assert quantised.is_prepared
    (factory,) = named_frameworks(["llamafactory"])
    assert not as_run(factory, quantised).is_prepared
    prepared = replace(quantised, training=replace(quantised.training, lora=replace(lora, prepared=True)))
    assert "does not hold norms, embedding and head in fp32" in refusal(factory, decided("resident", prepared))
