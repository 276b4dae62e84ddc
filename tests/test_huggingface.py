"""Hugging Face models, built from a config, train to the bit of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import pytest
import torch
from reference import Outcome
from test_partition import EVERYTHING_MOVES, VOCABULARY, batches, profile_for, train_by_policy, train_plainly

from autohete.lowering import lower
from autohete.policies import parse_policy
from autohete.runtime.model import next_token_loss
from autohete.runtime.partition import partition
from autohete.runtime.training import Training
from autohete.simulate import judge_for

transformers = pytest.importorskip("transformers")

#: The configs' own are outside of this vocabulary.
SPECIAL_TOKENS = dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"])


def gpt2() -> Any:
    """GPT-2 with dropout and tied embeddings."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=32,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.2,
        embd_pdrop=0.2,
        attn_pdrop=0.2,
        **SPECIAL_TOKENS,
    )
    return transformers.GPT2LMHeadModel(config).train()


def gpt2_bf16() -> Any:
    """GPT-2 in 16 bits."""
    return gpt2().to(torch.bfloat16)


def llama(tied: bool = False) -> Any:
    """LLaMA with grouped queries."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
        **SPECIAL_TOKENS,
    )
    return transformers.LlamaForCausalLM(config).train()


def llama_tied() -> Any:
    """LLaMA whose head shares the embedding's matrix."""
    return llama(tied=True)


@cache
def plainly(make: Callable[[], Any]) -> Outcome:
    """Plain training, once per model, without the cache of keys and values, as transformers' own Trainer trains.

    With it a pass would be rounded otherwise: attention with dropout multiplies by a copy that is laid out in another order.
    """
    model = make()
    model.config.use_cache = False
    return train_plainly(model)


@pytest.mark.parametrize("policy", EVERYTHING_MOVES)
@pytest.mark.parametrize("make", [gpt2, gpt2_bf16, llama, llama_tied])
def test_hugging_face_models_train_to_the_bit(make: Callable[[], Any], policy: str) -> None:
    """Losses and final parameters are bit-identical to plain PyTorch, whatever moves."""
    assert train_by_policy(make(), policy) == plainly(make)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_their_own_recomputation_does_no_harm(make: Callable[[], Any]) -> None:
    """A model that recomputes its blocks by itself trains to the same bits."""
    model = make()
    model.activation_checkpointing_enable()
    assert train_by_policy(model, "autohete") == plainly(make)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_config_is_left_as_it_was(make: Callable[[], Any]) -> None:
    """Keys and values are not cached while training, and are again afterwards."""
    model = make()
    before = model.config.to_dict()
    assert before["use_cache"]
    train_by_policy(model, "autohete")
    assert model.config.to_dict() == before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("make", [gpt2, llama_tied])
def test_evaluation_gives_the_models_own_logits(
    make: Callable[[], Any], mode: Callable[[], AbstractContextManager[None]]
) -> None:
    """Block by block, with parameters fetched for each, the result is that of the whole."""
    model, (ids, _) = make(), batches()[0]
    model.config.use_cache = False
    torch.set_num_threads(1)
    with torch.no_grad():
        expected = model.eval()(ids).logits
    cut = partition(model.train()).by_use(ids)
    profile = profile_for(cut)
    schedule = lower(profile, parse_policy("stronghold:window=1").plan(profile, judge_for(profile)))
    training = Training(cut, schedule, next_token_loss, poison=True)
    try:
        with training.evaluation() as logits, mode():
            assert torch.equal(logits(ids), expected)
    finally:
        training.close()
