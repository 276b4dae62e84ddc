"""Small models of every family that a ``config.json`` can name, as transformers builds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autohete.workload.config import model_names

MODELS = Path(__file__).parents[2] / "autohete" / "workload" / "models"
#: The sizes of a small model of any family.
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "n_embd": 128,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "num_attention_heads": 8,
    "n_head": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "intermediate_size": 352,
    "ffn_dim": 512,
    "word_embed_proj_dim": 128,
    "moe_intermediate_size": 96,
    "shared_expert_intermediate_size": 80,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 48,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}


#: Sizes with which nothing that grows with tokens is hidden by what does not.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "n_embd": 256,
    "ffn_dim": 1024,
    "word_embed_proj_dim": 256,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 768,
    "moe_intermediate_size": 192,
    "shared_expert_intermediate_size": 320,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 48,
    "kv_lora_rank": 96,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
#: Without scaled_dot_product_attention in transformers.
NO_FLASH = {"gemma2", "gpt_oss"}


def config_of(name: str) -> dict[str, Any]:
    """The file of a bundled model."""
    found: dict[str, Any] = json.loads((MODELS / f"{name}.json").read_text())
    return found


#: A file of each family; of OLMo 3 and GraniteMoE no model is bundled.
OF_FAMILY = {config_of(name)["model_type"]: config_of(name) for name in reversed(model_names())}
OF_FAMILY["olmo3"] = config_of("olmo-2-7b") | {"model_type": "olmo3", "sliding_window": 4096}
_MIXTURE = {key: value for key, value in config_of("mixtral-8x7b").items() if key not in ("head_dim", "sliding_window")}
OF_FAMILY["granitemoe"] = _MIXTURE | {"model_type": "granitemoe"}


def small_config(family: str, sizes: dict[str, Any] | None = None) -> dict[str, Any]:
    """A file of that family with small sizes, or some given ones, whatever else it has."""
    config, wanted = OF_FAMILY[family], SMALL | (sizes or {})
    small: dict[str, Any] = {key: wanted[key] if config[key] is not None else None for key in wanted if key in config}
    if config["model_type"] == "phi3":
        small["head_dim"] = small["hidden_size"] // small["num_attention_heads"]  # its code divides
    return config | small


def built(config: dict[str, Any], device: str, attention: str | None = "eager", experts: str = "eager") -> Any:
    """The model that transformers builds from the same keys; None: with the attention that it chooses."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    keys = {key: value for key, value in config.items() if key not in ("model_type", "source", "date")}
    if "kv_lora_rank" in keys:  # has no keys of its own to share
        keys |= {"num_key_value_heads": keys["num_attention_heads"], "n_group": 2, "topk_group": 1}
    made = transformers.CONFIG_MAPPING[config["model_type"]](**keys, pad_token_id=0)
    implementations = {"attn_implementation": attention} if attention is not None else {}
    if any("experts" in key for key in keys):
        implementations["experts_implementation"] = experts
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(made, **implementations)


def layers_of(model: Any, family: str) -> Any:
    """Its blocks."""
    base = next(part for part in model.children() if len(list(part.parameters())) > 1)
    return base.decoder.layers if family == "opt" else base.h if family == "gpt2" else base.layers
