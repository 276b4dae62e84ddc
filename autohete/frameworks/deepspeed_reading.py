"""What a DeepSpeed configuration means: a policy with its flags, and the batch, clipping and precision that it sets.

The reverse of :mod:`autohete.frameworks.deepspeed`. Keys, defaults and the meaning of ``auto`` are those of DeepSpeed 0.19.8
(``runtime/config.py``, ``runtime/zero``) and transformers 5.23.0 (``integrations/deepspeed.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autohete.errors import InputError
from autohete.frameworks.deepspeed import MILLION, RELEASE_OF_ZENFLOW, RELEASES, WRITTEN_FOR
from autohete.hardware.document import find
from autohete.policies.zero_offload import DeepSpeed

#: Stands for what transformers' own options set.
_AUTO = "auto"
#: Gradients are clipped to this norm if the file does not say, since 0.19.2.
_CLIPPED = 1.0
#: Parts of DeepSpeed that change what is moved or computed, and that nothing here does; with the values that leave them out.
_NOT_SIMULATED: dict[str, tuple[object, ...]] = {
    "zero_optimization.zero_hpz_partition_size": (False, 1, {}),
    "zero_optimization.zero_quantized_weights": (False, {}),
    "zero_optimization.zero_quantized_gradients": (False, {}),
    "zero_optimization.zero_quantized_nontrainable_weights": (False, {}),
    "zero_optimization.mics_shard_size": (-1,),
    "tensor_parallel.autotp_size": (0, 1),
    "sequence_parallel_size": (1,),
    "torch_autocast.enabled": (False,),
    "amp.enabled": (False,),
}
#: Keys elsewhere that change times or memory and are not modelled, with DeepSpeed's defaults.
_OTHERS: dict[str, object] = {
    "optimizer.params.torch_adam": False,
    "zero_force_ds_cpu_optimizer": True,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "fp16.fp16_master_weights_and_grads": False,
    "data_types.grad_accum_dtype": None,
    "communication_data_type": None,
    "elasticity.enabled": False,
    "compile.deepcompile": False,
}
#: The largest number that a key may have: more than any model has parameters.
_LARGEST = 1e18
#: Elements of which stage 3 keeps parameters for reuse at the most: all. Sub-groups have at most as many.
_ALL_ELEMENTS = 100_000 * MILLION
#: Names that stage 3's keys have without ``stage3_``, which DeepSpeed takes as well (``populate_by_name``).
_STAGE3 = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
)
#: Keys of ``zero_optimization`` that a policy decides. Others stay as they are, whatever it is.
DECIDED = (
    "stage",
    "offload_optimizer",
    "offload_param",
    "cpu_offload",
    "cpu_offload_param",
    "cpu_offload_use_pin_memory",
    "reduce_bucket_size",
    "reduce_scatter",
    "sub_group_size",
    "zenflow",
)
#: Keys of ``zero_optimization`` that change times or memory a little, or nothing, and are not modelled.
MINOR = (
    "overlap_comm",
    "contiguous_gradients",
    "allgather_bucket_size",
    "allgather_partitions",
    "round_robin_gradients",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
)


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """The meaning of a configuration.

    Args:
        policy: name and flags.
        training: what it sets of the workload: ``batch_size``, ``micro_batches``, ``clip_norm``, ``precision``.
        notes: what was assumed, or is not modelled.
        config: the file itself.
    """

    policy: str
    training: Mapping[str, Any]
    notes: tuple[str, ...]
    config: Mapping[str, Any]


def read_deepspeed(text: str, *, gpus: int, hidden_size: int, flags: str = "") -> ReadConfig:
    """Read a configuration.

    Args:
        text: the JSON file.
        gpus: that train together, by which ``train_batch_size`` is divided.
        hidden_size: of the model, from which transformers sets buckets that are ``auto``.
        flags: more flags of the policy, such as ``checkpointing=full``, which take the place of those that the file means.

    Raises:
        InputError: not JSON, or something that no policy here does; names the key.
    """
    try:
        original = json.loads(text)
        config = _typed(original)
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON: {str(error)[:200]}") from error
    if not isinstance(config, dict):
        raise InputError("holds no JSON object: give a DeepSpeed configuration")
    for key, without in _NOT_SIMULATED.items():
        if (value := find(config, key)) not in (None, _AUTO, *without):
            raise InputError(f"{key} is {json.dumps(value)[:40]}, which is not simulated: leave it out")
    zero = _zero(config)
    given = dict(_flag(item) for item in flags.split(",") if item.strip())
    version = _version(config, given)
    name, meant = _policy(zero, version, hidden_size)
    if WRITTEN_FOR in config:  # elsewhere the section sets up functions that a script may call or not
        meant["checkpointing"] = "full" if "activation_checkpointing" in config else "none"
    words = [flag if value == "on" else f"{flag}={value}" for flag, value in (meant | given).items()]
    training = _training(config, gpus, version)
    notes = (*_assumed(config, given, version, flows=name == "zenflow"), *_notes(config, zero, name, meant | given, training))
    return ReadConfig(name + (":" + ",".join(words) if words else ""), training, notes, original)


def _flag(item: str) -> tuple[str, str]:
    name, _, value = item.strip().partition("=")
    return name, value or "on"


def _typed(value: Any) -> Any:
    """``value`` with the types that DeepSpeed gives to text: pydantic takes ``"true"`` and ``"3"``."""
    if isinstance(value, dict):
        return {key: _typed(each) for key, each in value.items()}
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20 else value


def _zero(config: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``zero_optimization`` by its full names, without what is ``auto``: DeepSpeed then takes its default, but
    transformers sets the size of a bucket.
    """
    zero = {**_section(config, "zero_optimization")}
    for key in ("offload_optimizer", "offload_param", "zenflow"):
        if isinstance(zero.get(key), dict):
            zero[key] = {name: value for name, value in zero[key].items() if value != _AUTO or key == "zenflow"}
    zero |= {f"stage3_{key}": zero.pop(key) for key in _STAGE3 if key in zero and f"stage3_{key}" not in zero}
    return {key: value for key, value in zero.items() if value != _AUTO or key == "reduce_bucket_size"}


def _section(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object of the file; empty if it is not there."""
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise InputError(f"{key} is {json.dumps(value)[:40]}: give an object")
    return value


def _version(config: Mapping[str, Any], given: Mapping[str, str]) -> DeepSpeed:
    """The modelled version: that of a flag, or that for which the file was written; the latest if neither says."""
    if given.get("deepspeed") in [*DeepSpeed]:
        return DeepSpeed(given["deepspeed"])
    named = {f"deepspeed {release}": version for version, release in RELEASES.items()}
    written = config.get(WRITTEN_FOR)
    return named.get(written, DeepSpeed.V2026) if isinstance(written, str) else DeepSpeed.V2026


def _number(section: Mapping[str, Any], key: str, default: float) -> float:
    value = section.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        raise InputError(f"{key} is {json.dumps(value)[:40]}: give a number from 0 to {_LARGEST:.0e}")
    return value


def _switch(section: Mapping[str, Any], key: str, default: bool) -> str:
    value = section.get(key, default)
    if not isinstance(value, bool):
        raise InputError(f"{key} is {json.dumps(value)[:40]}: give true or false")
    return "on" if value else "off"


# --- zero_optimization --------------------------------------------------------------------------------------------


def _policy(zero: Mapping[str, Any], version: DeepSpeed, hidden_size: int) -> tuple[str, dict[str, str]]:
    """The policy's name, and the flags that the file means."""
    stage = _number(zero, "stage", 0)
    optimizer = _section(zero, "offload_optimizer") or ({"device": "cpu"} if zero.get("cpu_offload") else {})
    parameters = _section(zero, "offload_param") or ({"device": "cpu"} if zero.get("cpu_offload_param") else {})
    if stage < 3:
        parameters = {}  # which DeepSpeed reads in stage 3 only (``runtime/engine.py``)
    where, rest = (str(section.get("device", "none")) for section in (optimizer, parameters))
    if (stage, where, rest) not in _READERS:
        raise InputError(
            f"stage {stage} with the optimizer on {where} and parameters on {rest} is not simulated: give one of "
            + "; ".join(f"stage {one}, {two}, {three}" for one, two, three in _READERS)
        )
    flow = _section(zero, "zenflow")
    if flow and _READERS[stage, where, rest] != "zero_offload":
        raise InputError(
            "zero_optimization.zenflow is simulated for stage 2 with the optimizer on cpu: give these, or leave it out"
        )
    bucket = {"bucket_size": _bucket(zero, hidden_size)}
    pinned = {"pin_memory": _switch(optimizer, "pin_memory", True)}
    if optimizer.get("super_offload"):
        raise InputError("zero_optimization.offload_optimizer.super_offload is not simulated: leave it out")
    name = _READERS[stage, where, rest]
    ratio = _number(optimizer, "ratio", 1.0)
    if ratio > 1:
        raise InputError(f"ratio is {ratio}: give a share of the parameters, from 0 to 1")
    if ratio < 1 and name != "zero3_offload":
        raise InputError(
            f"ratio is {ratio}: DeepSpeed splits the optimizer in stage 3 with device cpu; give these, or leave it out"
        )
    if name == "resident":
        return name, {} if stage == 0 else {"zero_stage": str(int(stage)), "deepspeed": "on"}
    if name == "zero_offload":
        if flow:
            return "zenflow", bucket | _zenflow(flow)
        unsaid = "pin_memory" not in optimizer  # the version's own default
        return name, bucket | {"deepspeed": version.value} | ({} if unsaid else pinned)
    if name == "zero_infinity":
        pipelined = _switch(optimizer, "pipeline_read", False)
        if pipelined != _switch(optimizer, "pipeline_write", False):
            raise InputError("pipeline_read and pipeline_write are simulated together: set both, or none")
        scattered = _switch(zero, "reduce_scatter", True)
        return name, {"pipeline": pipelined, "offload_param": "off" if rest == "none" else "on", "reduce_scatter": scattered}
    if ratio < 1 and rest != "none":
        raise InputError("offload_optimizer.ratio below 1 is not simulated with offload_param: leave out one of them")
    if ratio < 1:
        groups = {"sub_group_size": str(max(1, int(min(_number(zero, "sub_group_size", 1e9), _ALL_ELEMENTS))))}
        return "twin_flow", {"ratio": str(math.ceil(100 * ratio - 1e-9))} | pinned | bucket | groups
    pins = {} if rest == "none" else {"pin_parameters": _switch(parameters, "pin_memory", True)}
    elements = min(_number(zero, "stage3_max_reuse_distance", 1e9), _ALL_ELEMENTS)
    distance = 0 if rest == "none" else math.ceil(elements / MILLION)
    reuse = {"reuse_distance": str(distance)} if distance else {}
    return name, {"offload_param": "off" if rest == "none" else "on"} | pinned | pins | bucket | reuse


def _zenflow(flow: Mapping[str, Any]) -> dict[str, str]:
    """The flags that a section ``zenflow`` means."""
    ratio = _number(flow, "topk_ratio", 0.1)
    if ratio > 1:
        raise InputError(f"zenflow.topk_ratio is {ratio}: give a share of the columns, from 0 to 1")
    if flow.get("offload"):
        raise InputError("zenflow.offload is not simulated: leave it out")
    return {"topk_ratio": str(math.ceil(100 * ratio - 1e-9)), "overlap_step": _switch(flow, "overlap_step", False)}


def _update_interval(config: Mapping[str, Any]) -> int | None:
    """The steps of ZenFlow between two updates by the CPU, which are micro-batches; None: it is not asked for."""
    flow = _section(_section(config, "zero_optimization"), "zenflow")
    if not flow:
        return None
    interval = flow.get("update_interval", _AUTO)
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise InputError(
            f"zenflow.update_interval is {json.dumps(interval)[:40]}: what DeepSpeed finds while it trains is not simulated, "
            "so give a whole number, 1 or more"
        )
    return interval


#: The policy for each stage, place of the optimizer and place of the parameters.
_READERS: dict[tuple[float, str, str], str] = {
    (0, "none", "none"): "resident",
    (1, "none", "none"): "resident",
    (2, "none", "none"): "resident",
    (3, "none", "none"): "resident",
    (2, "cpu", "none"): "zero_offload",
    (3, "cpu", "none"): "zero3_offload",
    (3, "cpu", "cpu"): "zero3_offload",
    (3, "nvme", "none"): "zero_infinity",
    (3, "nvme", "cpu"): "zero_infinity",
}


def _bucket(zero: Mapping[str, Any], hidden_size: int) -> str:
    """``reduce_bucket_size`` in millions of elements."""
    auto = zero.get("reduce_bucket_size") == _AUTO
    return str(max(1, math.ceil((hidden_size**2 if auto else _number(zero, "reduce_bucket_size", 5e8)) / MILLION)))


# --- the rest of the file -----------------------------------------------------------------------------------------


def _training(config: Mapping[str, Any], gpus: int, version: DeepSpeed) -> dict[str, Any]:
    """What the file sets of the workload; what is ``auto`` or left out is not in it."""
    optimizer = _section(config, "optimizer").get("type", "AdamW")
    if str(optimizer).lower() not in ("adam", "adamw"):
        raise InputError(f"optimizer.type is {json.dumps(optimizer)[:40]}: Adam and AdamW are simulated")
    training: dict[str, Any] = dict(_batch(config, gpus))
    if interval := _update_interval(config):
        training["micro_batches"] = interval
    clip = config.get("gradient_clipping", _CLIPPED if version is DeepSpeed.V2026 else 0.0)
    clip = _CLIPPED if clip == _AUTO else _number({"gradient_clipping": clip}, "gradient_clipping", 0)
    training["clip_norm"] = clip or None
    if (precision := _precision(config)) is not None:
        training["precision"] = precision
    return training


def _precision(config: Mapping[str, Any]) -> str | None:
    """The precision that the file enables; None: it leaves that to transformers' options, as it leaves other keys to them.

    Raises:
        InputError: both are enabled.
    """
    sections = {"bf16": _section(config, "bf16") or _section(config, "bfloat16"), "fp16": _section(config, "fp16")}
    enabled = [name for name, one in sections.items() if one.get("enabled") != _AUTO and _switch(one, "enabled", False) == "on"]
    if len(enabled) > 1:
        raise InputError("bf16 and fp16 are both enabled, with which DeepSpeed does not start: disable one of them")
    if enabled:
        return enabled[0]
    left_open = _AUTO in [one.get("enabled") for one in sections.values()]
    return None if left_open or (not any(sections.values()) and f'"{_AUTO}"' in json.dumps(config)) else "fp32"


def _batch(config: Mapping[str, Any], gpus: int) -> Iterator[tuple[str, int]]:
    """Sequences of a micro-batch and micro-batches of an iteration, of which the file may leave out one."""
    keys = {
        "batch_size": "train_micro_batch_size_per_gpu",
        "micro_batches": "gradient_accumulation_steps",
        "all": "train_batch_size",
    }
    sizes: dict[str, int] = {}
    for name, key in keys.items():
        if config.get(key) not in (None, _AUTO):
            size = _number(config, key, 0)
            if size < 1 or size != int(size):
                raise InputError(f"{key} is {json.dumps(config[key])[:40]}: give a whole number, 1 or more")
            sizes[name] = int(size)
    both = sizes.get("all", 0) / gpus
    for name, other in (("batch_size", "micro_batches"), ("micro_batches", "batch_size")):
        if name not in sizes and other in sizes and both:
            sizes[name] = int(both // sizes[other])
    if "all" in sizes and len(sizes) == 1:
        sizes |= {"batch_size": int(both), "micro_batches": 1}
    if "all" in sizes and sizes["all"] != sizes["batch_size"] * sizes["micro_batches"] * gpus:
        raise InputError(
            f"train_batch_size is {sizes['all']}, which is not {keys['batch_size']} x {keys['micro_batches']} x {gpus} GPUs"
        )
    for name in ("batch_size", "micro_batches"):
        if name in sizes:
            yield name, sizes[name]


def _assumed(config: Mapping[str, Any], given: Mapping[str, str], version: DeepSpeed, *, flows: bool) -> Iterator[str]:
    """The release that is assumed, and what follows from it."""
    release, written = RELEASE_OF_ZENFLOW if flows else RELEASES[DeepSpeed.V2026], config.get(WRITTEN_FOR)
    if "deepspeed" not in given and written is None:
        yield f"DeepSpeed {release} is assumed" + (
            ": 0.19.7 and 0.19.8 mix up the weights of a model that is trained with ZenFlow" if flows else ""
        )
    elif "deepspeed" not in given and written not in [f"deepspeed {each}" for each in (*RELEASES.values(), RELEASE_OF_ZENFLOW)]:
        yield f"{WRITTEN_FOR} is {json.dumps(written)[:40]}, which is not known here: DeepSpeed {release} is assumed"
    if "gradient_clipping" not in config and written is None and version is DeepSpeed.V2026:
        yield f"gradients are clipped to {_CLIPPED}, as DeepSpeed does since 0.19.2 if gradient_clipping is left out"


def _notes(
    config: Mapping[str, Any], zero: Mapping[str, Any], policy: str, flags: Mapping[str, str], training: Mapping[str, Any]
) -> Iterator[str]:
    if "checkpointing" not in flags:
        yield (
            "the file does not say whether blocks recompute their activations, which the script decides: the better of both is "
            "assumed; add :checkpointing=full or :checkpointing=none to the file's name"
        )
    if zero.get("offload_param") and _number(zero, "stage", 0) < 3:
        yield "offload_param changes nothing below stage 3, as in DeepSpeed"
    if WRITTEN_FOR in config:
        return
    if training.get("precision") == "fp32" and not config.get("fp16") and not config.get("bf16"):
        yield "precision is fp32, as the file enables neither bf16 nor fp16"
    modelled = policy == "zero3_offload" and flags.get("offload_param") == "on"
    minor = [key for key in MINOR if key in zero and not (modelled and key == "stage3_max_reuse_distance")]
    others = [key for key, default in _OTHERS.items() if find(config, key) not in (None, _AUTO, default)]
    if minor or others:
        yield f"not modelled: {', '.join(minor + others)}"
