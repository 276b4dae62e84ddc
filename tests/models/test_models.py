"""Models by their config.json: the same parameters and FLOPs as the models that transformers builds, and errors that teach."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models import OF_FAMILY, built, config_of, layers_of, small_config
from transformers import AutoConfig

from autohete.errors import InputError
from autohete.frameworks import as_run, named_frameworks
from autohete.hardware import load_hardware
from autohete.profile import analytic_profile
from autohete.workload import Kernels, Units, Workload, named_workload
from autohete.workload.config import model_names, parse_model, read_model
from autohete.workload.families import FAMILIES
from autohete.workload.model import Attention, Experts, LinearAttention, causal_tokens

SEQUENCE, BATCH = 128, 2
#: Keys whose defaults follow from others.
_DERIVED = {"head_dim", "layer_types", "no_rope_layers", "word_embed_proj_dim"}


def test_every_family_is_tested() -> None:
    """What can be read is compared with what transformers builds."""
    assert set(OF_FAMILY) == set(FAMILIES)


@pytest.mark.parametrize("name", model_names())
def test_a_bundled_model_names_its_source_and_date(name: str) -> None:
    """Sizes can be traced to where they were read."""
    assert len(config_of(name)["source"]) > 20
    assert len(config_of(name)["date"]) == len("2026-11-22")


@pytest.mark.slow
@pytest.mark.parametrize("name", model_names())
def test_a_bundled_model_has_as_many_parameters_as_transformers_builds(name: str) -> None:
    """Exactly as many, at full size."""
    model = built(config_of(name), "meta")
    assert read_model(name).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_have_as_many_parameters_as_the_modules(family: str) -> None:
    """Block by block, where they differ, too."""
    config = small_config(family)
    model, workload = built(config, "meta"), parse_model(config, family)
    theirs = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers_of(model, family)]
    assert [workload.unit_parameters(1 + i) for i in range(workload.transformer_blocks)] == theirs
    finer = replace(workload, units=Units.SUBLAYER)
    assert [finer.unit_parameters(1 + 2 * i) + finer.unit_parameters(2 + 2 * i) for i in range(len(theirs))] == theirs


@pytest.mark.parametrize("all_keys", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_can_be_read(family: str, all_keys: bool) -> None:
    """Its own file of a model, with keys renamed and filled in, is that of the keys that it was made of."""
    config = small_config(family)
    written = json.loads(built(config, "meta").config.to_json_string(use_diff=not all_keys))
    assert parse_model(written, family) == parse_model(config, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_pass_has_as_many_flops_as_pytorch_counts(family: str) -> None:
    """Within 1 %, a mixture of experts and linear attention included."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode

    def solve_flops(a: tuple[int, ...], b: tuple[int, ...], *args: object, **kwargs: object) -> int:
        return int(torch.Size(b).numel()) * a[-1]

    config = small_config(family)
    workload = replace(parse_model(config, family), sequence_length=SEQUENCE, batch_size=BATCH)
    torch.manual_seed(0)
    model = built(config, "cpu")
    solve = {torch.ops.aten.linalg_solve_triangular: solve_flops}  # which PyTorch leaves out
    with FlopCounterMode(display=False, custom_mapping=solve) as counter, torch.no_grad():
        model(torch.randint(0, 500, (BATCH, SEQUENCE)), use_cache=False)
    assert workload.forward_flops == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_gpt2_presets_are_the_blocks_of_gpt2() -> None:
    """A shape given by its width alone has GPT-2's parameters, by the closed form of Narayanan et al. 2021."""
    workload = named_workload("gpt-10b")
    h = workload.hidden_size
    assert workload.unit_parameters(1) == 12 * h * h + 13 * h


def test_blocks_of_a_model_differ_as_its_file_says() -> None:
    """Dense blocks before experts, windows and linear attention in turn."""
    deepseek = read_model("deepseek-v3")
    assert [isinstance(deepseek.block(1 + i).feed_forward, Experts) for i in range(5)] == [False] * 3 + [True] * 2
    hybrid = read_model("qwen3-next-80b-a3b")
    assert [isinstance(hybrid.block(1 + i).mixer, LinearAttention) for i in range(4)] == [True, True, True, False]
    windows = [
        block.mixer.window for i in range(6) if isinstance((block := read_model("gemma-3-4b").block(1 + i)).mixer, Attention)
    ]
    assert windows == [1024] * 5 + [None]


def test_a_longer_model_repeats_its_blocks() -> None:
    """A number of blocks may be asked for that the file does not have."""
    hybrid = read_model("qwen3-next-80b-a3b")
    longer = replace(hybrid, transformer_blocks=52)
    assert longer.block(49) == hybrid.block(1)
    assert replace(hybrid, transformer_blocks=4).block(4) == hybrid.block(4)


def test_a_file_or_its_folder_is_the_model(tmp_path: Path) -> None:
    """A config.json is named after its folder, another file after itself."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of("llama-3.1-8b")))
    expected = replace(read_model("llama-3.1-8b"), name="my-model")
    assert read_model(str(folder)) == read_model(str(folder / "config.json")) == expected
    (tmp_path / "other.json").write_text(json.dumps(config_of("llama-3.1-8b")))
    assert read_model(str(tmp_path / "other.json")).name == "other"


def test_the_language_model_of_a_multimodal_file_is_read() -> None:
    """As Gemma 3 writes it: sizes in text_config, some of them left to defaults."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    found = parse_model({"model_type": "gemma3", "text_config": text, "vision_config": {}}, "gemma-3-4b")
    assert found.parameters == read_model("gemma-3-4b").parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_a_file_leaves_out_have_the_defaults_of_transformers(family: str) -> None:
    """So that a file with few keys is the model that is built of it."""
    theirs = AutoConfig.for_model(family).to_dict()
    for key, field in FAMILIES[family].model_fields.items():
        name = field.alias or key
        if name not in theirs or field.is_required() or name in _DERIVED:
            continue
        if field.default is None and name == "num_key_value_heads":
            assert theirs[name] == theirs["num_attention_heads"]
        else:
            assert (field.default or None) == (theirs[name] or None), name


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_that_a_family_does_not_read_change_nothing(family: str) -> None:
    """``transformers`` ignores them, whatever the code of relatives does."""
    config = small_config(family)
    changed = config | dict.fromkeys(("attention_bias", "mlp_bias"), True)
    theirs = sum(parameter.numel() for parameter in built(changed, "meta").parameters())
    assert parse_model(changed, family).parameters == theirs


def test_biases_of_queries_keys_and_values_may_be_left_out() -> None:
    """Qwen2-MoE has a key for them."""
    config = small_config("qwen2_moe") | {"qkv_bias": False}
    theirs = sum(parameter.numel() for parameter in built(config, "meta").parameters())
    assert parse_model(config, "qwen2_moe").parameters == theirs < parse_model(config | {"qkv_bias": True}, "").parameters


@pytest.mark.parametrize(("outer", "inner", "tied"), [(True, False, True), (False, True, True), (False, False, False)])
def test_embeddings_are_tied_within_another_model_or_outside(outer: bool, inner: bool, tied: bool) -> None:
    """As releases 5 and 4 of transformers write it."""
    text = small_config("qwen2") | {"tie_word_embeddings": inner}
    config = {"model_type": "llava_onevision", "text_config": text, "tie_word_embeddings": outer}
    assert parse_model(config, "llava").tied_embeddings is tied


BROKEN: list[tuple[dict[str, Any] | str, str]] = [
    ("{", "is not JSON"),
    ("[]", "holds no JSON object"),
    ({}, "has no model_type"),
    ({"model_type": "llamma"}, "did you mean 'llama'"),
    ({"model_type": ["llama"]}, 'has the model_type ["llama"], which is no text'),
    ({"model_type": {}, "text_config": {"model_type": []}}, "has the model_type [], which is no text"),
    ({"model_type": "llama"}, "hidden_size is missing; num_hidden_layers is missing"),
    (config_of("llama-3.1-8b") | {"num_hidden_layers": 0}, "num_hidden_layers is 0: should be greater than or equal to 1"),
    (config_of("llama-3.1-8b") | {"hidden_size": "4096"}, 'hidden_size is "4096": should be a valid integer'),
    ("[" * 100_000, "is not JSON"),
    ('{"text_config": ' * 100_000, "is not JSON"),
    (config_of("mixtral-8x7b") | {"num_experts_per_tok": 9}, "9 of 8 experts"),
    (config_of("llama-3.1-8b") | {"num_key_value_heads": 5}, "not a multiple of num_key_value_heads 5"),
    (config_of("llama-3.1-8b") | {"head_dim": None, "hidden_size": 4095}, "not divisible by 32 heads"),
    (config_of("llama-3.1-8b") | {"hidden_act": "swish2"}, "hidden_act"),
    (config_of("gemma-3-4b") | {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
    (config_of("qwen3-8b") | {"layer_types": ["linear_attention"] * 36}, "should be 'full_attention' or 'sliding_attention'"),
    (config_of("qwen3-next-80b-a3b") | {"layer_types": ["sliding_attention"] * 48}, "'full_attention' or 'linear_attention'"),
    (config_of("qwen3-next-80b-a3b") | {"linear_num_value_heads": 30}, "30 heads of values share 16 heads of keys"),
    (config_of("opt-125m") | {"word_embed_proj_dim": 512}, "embeddings narrower than the model"),
    ({"model_type": "falcon"}, "trace the model instead (autohete trace)"),
    (config_of("opt-125m") | {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is false"),
    (config_of("gpt2") | {"add_cross_attention": True}, "add_cross_attention is true"),
    (config_of("llama-3.1-8b") | {"architectures": ["LlamaForSequenceClassification"]}, "is not that of a language model"),
    (config_of("opt-125m") | {"do_layer_norm_before": False}, "norms after the sublayers are not supported"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: dict[str, Any] | str, message: str) -> None:
    """The message names the key and what is allowed."""
    file = tmp_path / "config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError) as caught:
        read_model(str(file))
    assert message in str(caught.value)


def test_an_unknown_name_suggests_a_model() -> None:
    """A typing mistake is answered with the closest name."""
    with pytest.raises(InputError, match=r"did you mean 'llama-3\.1-8b'"):
        read_model("llama-3.1-8")


def test_a_file_that_begins_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    """Some editors write one."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config_of("llama-3.1-8b")), encoding="utf-8-sig")
    assert read_model(str(file)).parameters == read_model("llama-3.1-8b").parameters


@pytest.mark.parametrize(("name", "positions"), [("gpt2", 1024), ("opt-1.3b", 2048)])
def test_more_tokens_than_learned_positions_are_refused(name: str, positions: int) -> None:
    """GPT-2 has 1,024 positions, OPT 2,048 and two rows before them."""
    assert isinstance(replace(read_model(name), sequence_length=positions), Workload)
    with pytest.raises(InputError, match=f"{positions} learned positions"):
        replace(read_model(name), sequence_length=positions + 1)


def test_chunks_of_the_loss_are_those_of_liger_kernel() -> None:
    """170 times as many tokens as hidden units: 16,384 tokens in 170 parts, rounded up to a power of two."""
    workload = replace(read_model("qwen2.5-0.5b"), batch_size=16, sequence_length=1024)
    assert workload.loss_tokens == workload.tokens
    assert replace(workload, chunked_loss=True).loss_tokens == 128


def test_a_given_number_of_chunks_divides_the_tokens() -> None:
    """16,384 tokens in 16 chunks; without a chunked loss, and for more chunks than tokens, the number is refused."""
    workload = replace(read_model("qwen2.5-0.5b"), batch_size=16, sequence_length=1024, chunked_loss=True)
    assert replace(workload, loss_chunks=16).loss_tokens == 1024
    few, many = (analytic_profile(replace(workload, loss_chunks=n), load_hardware("h100-pcie5")).loss for n in (2, 64))
    assert few.logits_bytes == 32 * many.logits_bytes
    assert few.seconds < many.seconds  # each chunk adds to the gradient of the head's matrix
    with pytest.raises(InputError, match=r"loss_chunks is 20000: .* to the 16384 tokens"):
        replace(workload, loss_chunks=20_000)
    with pytest.raises(InputError, match="give chunked_loss as well"):
        replace(workload, chunked_loss=False, loss_chunks=4)


@pytest.mark.parametrize(("sequence", "window"), [(1024, None), (8192, None), (4096, 512), (256, 4096), (100, None)])
def test_a_causal_kernel_skips_what_is_hidden(sequence: int, window: int | None) -> None:
    """Tokens per query are those of a loop over tiles of 128 queries, to a tile."""
    tile, seen = 128, 0
    for first in range(0, sequence, tile):
        last = min(first + tile, sequence)
        begin = 0 if window is None else max(0, first - window)
        seen += (last - first) * (last - begin)
    assert causal_tokens(sequence, window) == pytest.approx(seen / sequence, abs=tile / 2)
    assert causal_tokens(sequence, window) <= sequence


def test_fused_attention_is_faster_than_without_a_mask() -> None:
    """Only the time changes: model FLOPs are counted without a mask, as published."""
    architecture = read_model("llama-3.1-8b").architecture
    assert architecture is not None
    (attention,) = {block.mixer for block in architecture.blocks}
    assert isinstance(attention, Attention)
    assert attention.flash_flops(8192) == pytest.approx(0.508 * attention.core_flops(8192), rel=0.001)
    assert attention.flash_flops(64) == attention.core_flops(64)


def test_a_chunked_loss_takes_what_liger_measured() -> None:
    """Head and loss of 128,256 logits in 32 chunks, both ways, on an A100-80GB (benchmark/data of Liger Kernel, 0.4.2):
    small chunks, whose products wait for memory, are too fast by 22 % at most, all others within 11 %.
    """
    hardware = load_hardware("a100-40gb-epyc7713", {"gpu.memory_bandwidth": "2039GB/s"})
    ratios = []
    for tokens, measured in ((4096, 0.1214), (8192, 0.1667), (16384, 0.2771), (32768, 0.5111)):
        workload = replace(read_model("llama-3.1-8b"), sequence_length=1024, batch_size=tokens // 1024, chunked_loss=True)
        profile = analytic_profile(workload, hardware)
        head = profile.units[-1]
        ratios.append((head.forward_seconds + head.backward_seconds + profile.loss.seconds) / measured)
    assert 0.78 < ratios[0] < 1
    assert all(0.89 < ratio < 1 for ratio in ratios[1:])


@pytest.mark.parametrize("name", model_names())
def test_a_chunked_loss_bounds_the_logits(name: str) -> None:
    """They take at most twice what the head's input takes, or those of one token."""
    workload = replace(read_model(name), chunked_loss=True)
    profile = analytic_profile(workload, load_hardware("h100-pcie5"))
    token_bytes = profile.element_bytes * workload.vocabulary_size
    assert profile.loss.logits_bytes <= max(token_bytes, 2 * profile.units[-1].input_bytes)
    assert not profile.loss.keeps_logits


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_with_caps_or_sinks_are_computed_eagerly(family: str) -> None:
    """Frameworks that train models of ``transformers`` are given the kernels that it chooses by itself."""
    config = small_config(family)
    chosen = built(config, "meta", attention=None).config._attn_implementation
    workload = parse_model(config, family)
    kernels = [as_run(named_frameworks([name])[0], workload).kernels for name in ("fsdp2", "megatron")]
    assert kernels == [{"eager": Kernels.EAGER, "sdpa": Kernels.EAGER_FLASH}[chosen], Kernels.FUSED]
