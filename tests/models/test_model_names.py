"""Models by the names that people write: as on the Hub, in its local cache, and in folders with weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from autohete.errors import InputError
from autohete.workload.config import model_names, model_source, read_model
from autohete.workload.families import FAMILIES

#: Small sizes under the keys of most families; ``transformers`` ignores those that a family does not have.
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024, "vocab_size": 64}


def cached(cache: Path, name: str, config: dict[str, Any], commit: str = "c0ffee", main: bool = True) -> Path:
    """Lay out a model in a cache of the Hub as ``huggingface_hub`` does, and return its snapshot."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(config))
    if main:
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty cache."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "home" / "hub"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("given", ["meta-llama/Llama-3.1-8B", "Llama-3.1-8B", "META-LLAMA/llama-3.1-8b", "llama-3.1-8b"])
def test_a_bundled_model_is_found_by_its_name_on_the_hub(given: str, cache: Path) -> None:
    """In any case, with and without the organisation."""
    assert read_model(given) == read_model("llama-3.1-8b")


def test_every_bundled_model_is_found_by_the_name_in_its_source() -> None:
    """Each source begins with the name on the Hub, which leads to the model itself."""
    for name in model_names():
        on_hub = model_source(name).removeprefix("huggingface.co/").partition(";")[0].partition(",")[0].partition(" ")[0]
        assert read_model(on_hub).name == name


def test_another_organisation_is_another_model(cache: Path) -> None:
    """What is not bundled is not guessed: the error names the closest, the command that lists all, and the cache."""
    with pytest.raises(InputError) as caught:
        read_model("nobody/Llama-3.1-8B")
    said = str(caught.value)
    assert said.startswith(
        "unknown model 'nobody/Llama-3.1-8B': did you mean 'llama-3.1-8b'? autohete presets models lists all "
    )
    assert str(cache) in said
    assert len(said) < 400


def test_a_model_in_the_cache_is_found(cache: Path) -> None:
    """By its name in any case, with and without the organisation; of two with one name the organisation decides."""
    config = {"model_type": "llama", **SMALL}
    cached(cache, "Some-Lab/Tiny-Llama", config)
    for given in ("some-lab/tiny-llama", "Tiny-Llama"):
        assert (read_model(given).name, read_model(given).hidden_size) == ("Tiny-Llama", 32)
    cached(cache, "other/tiny-llama", config | {"hidden_size": 64})
    assert read_model("Other/Tiny-Llama").hidden_size == 64
    with pytest.raises(InputError, match=r"several models in .*: give 'Some-Lab/Tiny-Llama' or 'other/tiny-llama'"):
        read_model("tiny-llama")


def test_of_several_snapshots_that_of_main_is_read(cache: Path) -> None:
    """A cache keeps what was downloaded before; without a reference the newest is read."""
    snapshot = cached(cache, "lab/model", {"model_type": "llama", **SMALL}, "first")
    other = snapshot.parent / "second"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL, "hidden_size": 64}))
    assert read_model("lab/model").hidden_size == 32
    (snapshot.parents[1] / "refs" / "main").unlink()
    assert read_model("lab/model").hidden_size == 64


def test_the_folder_of_the_cache_is_the_hubs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """HF_HUB_CACHE counts more than HF_HOME."""
    monkeypatch.setenv("HF_HOME", "/none")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    cached(tmp_path, "lab/model", {"model_type": "llama", **SMALL})
    assert read_model("lab/model").transformer_blocks == 2


# --- weights ------------------------------------------------------------------------------------------------------


def saved(folder: Path, model_type: str, **changes: Any) -> None:
    """Write a tiny model of ``transformers``, in several shards."""
    sizes = {**SMALL, **changes} if model_type != "gpt2" else {**GPT2, **changes}
    with torch.random.fork_rng():
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))  # type: ignore[no-untyped-call]
    model.save_pretrained(folder, max_shard_size="20KB")


#: Families whose tiny models differ in what is stored: tied heads, biases, experts, latent attention, learned positions.
STORED: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 8},
    "olmo2": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.mark.parametrize("model_type", STORED)
def test_the_weights_of_a_folder_have_the_parameters_of_its_config(model_type: str, tmp_path: Path) -> None:
    """What ``transformers`` saves is accepted, and counted to the last parameter: one more in config.json is refused."""
    assert model_type in FAMILIES
    saved(tmp_path, model_type, **STORED[model_type])
    blocks = read_model(str(tmp_path)).transformer_blocks
    assert blocks == 2
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"vocab_size": 65}))
    with pytest.raises(InputError, match="64 rows of the embedding instead of 65; give a folder whose files belong together"):
        read_model(str(tmp_path))
    assert read_model(str(file)).vocabulary_size == 65  # the file alone is taken as it is


def test_weights_with_fewer_blocks_are_refused(tmp_path: Path) -> None:
    """The error names both numbers of blocks and of parameters."""
    saved(tmp_path, "llama")
    file = tmp_path / "config.json"
    described = json.loads(file.read_text()) | {"num_hidden_layers": 3, "layer_types": None}
    file.write_text(json.dumps(described))
    with pytest.raises(
        InputError, match=r"they have [\d,]+ parameters, config.json describes [\d,]+; they have 2 blocks instead"
    ):
        read_model(str(tmp_path))


def test_incomplete_and_quantised_weights_are_not_counted(tmp_path: Path) -> None:
    """A download under way, and tensors that pack several weights, tell nothing about parameters."""
    saved(tmp_path, "llama")
    whole = read_model(str(tmp_path))
    shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
    tensors = load_file(shard)
    save_file({name: tensor.to(torch.uint8)[..., ::2].contiguous() for name, tensor in tensors.items()}, shard)
    assert read_model(str(tmp_path)) == whole
    shard.unlink()
    assert read_model(str(tmp_path)) == whole


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, b"\x08" + bytes(7) + b"[1, 2, 3", (20).to_bytes(8, "little") + b'{"x": 1}']
)
def test_damaged_weights_are_refused(content: bytes, tmp_path: Path) -> None:
    """A header that is too long, cut short or no table of tensors names the file."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"model.safetensors' cannot be read: it does not begin with a header"):
        read_model(str(tmp_path))
