"""Hugging Face models, built from a config, train to the bit of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import pytest
import torch
from support.measured import is_within
from support.modules import EVERYTHING_MOVES, VOCABULARY, batches, profile_for, train_by_policy, train_plainly
from support.reference import Outcome
from torch import Tensor, nn

from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.lowering import lower
from autohete.policies import parse_policy
from autohete.runtime.partition import partition
from autohete.runtime.probe import by_use
from autohete.runtime.settings import Recipe
from autohete.runtime.takeover import Takeover
from autohete.runtime.update_rules import default_optimizer
from autohete.simulate import judge_for
from autohete.train.trainer import Trainer

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


@pytest.mark.slow
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
    cut = by_use(partition(model.train()), ids)
    profile = profile_for(cut)
    schedule = lower(profile, parse_policy("stronghold:window=1").plan(profile, judge_for(profile)))
    training = Takeover(cut, schedule, Recipe(), poison=True)
    try:
        with training.evaluation.logits() as logits, mode():
            assert torch.equal(logits(ids), expected)
    finally:
        training.close()


# --- batches with masks and labels


def padded_batches(labels: str = "labels") -> list[Any]:
    """As a tokenizer and a collator give them: none, some and other places padded."""
    found = []
    for ids, padding in zip((ids for ids, _ in batches()), (0, 3, 1), strict=True):
        mask, targets = torch.ones_like(ids), ids.clone()
        if padding:
            mask[0, -padding:], targets[0, -padding:] = 0, -100
        found.append(transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask, labels: targets}))
    return found


def train_as_they_do(model: Any, given: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Training with the model's own loss."""
    torch.set_num_threads(1)
    model.config.use_cache = False
    optimizer = default_optimizer(model.parameters())
    torch.manual_seed(2)
    losses = []
    for batch in given:
        loss = model(**batch).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def train_named(model: Any, given: list[Any], policy: str, memory: str | None) -> tuple[list[float], dict[str, Tensor]]:
    """The same by a trainer, within the memory that it has planned."""
    torch.manual_seed(2)
    with Trainer(model, policy=policy, gpu_memory=memory, hardware=load_hardware("a100-40gb-epyc7713")) as trainer:
        losses = [trainer.step(batch) for batch in given]
        assert is_within(trainer)
    return losses, model.state_dict()


def assert_same(found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    """Bit for bit."""
    assert found[0] == expected[0]
    assert all(torch.equal(tensor, expected[1][name]) for name, tensor in found[1].items())


def built(name: str, **settings: Any) -> Any:
    """A small model of a family by the name of its config and class, from a fixed seed."""
    torch.manual_seed(0)
    config, model = (getattr(transformers, f"{name.partition('/')[0]}Config"), name.replace("/", ""))
    return getattr(transformers, model)(config(vocab_size=VOCABULARY, **{**SPECIAL_TOKENS, **settings})).train()


WIDE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
GROUPED = WIDE | {"num_key_value_heads": 2}
OLDER = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 16}
EXPERTS = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2/LMHeadModel": OLDER,
    "Llama/ForCausalLM": GROUPED,
    "GPTJ/ForCausalLM": OLDER | {"rotary_dim": 4, "tie_word_embeddings": False},
    "Bloom/ForCausalLM": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "OPT/ForCausalLM": WIDE | {"ffn_dim": 64, "word_embed_proj_dim": 32, "pad_token_id": 1},
    "Mixtral/ForCausalLM": EXPERTS,
    "Mamba/ForCausalLM": {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 4},
    "Bert/ForMaskedLM": WIDE | {"pad_token_id": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "memory"), [("resident:checkpointing=full", None), ("autohete", "60%")])
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_train_as_with_the_models_own_loss(family: str, policy: str, memory: str | None) -> None:
    """Masks reach the blocks, labels are shifted as there or not, and the memory of masks that come later is planned."""
    found = train_named(built(family, **FAMILIES[family]), padded_batches(), policy, memory)
    assert_same(found, train_as_they_do(built(family, **FAMILIES[family]), padded_batches()))


def test_labels_may_be_the_token_ids_themselves() -> None:
    """One tensor for both, as when nothing is padded, trains like a copy of it."""

    def given(labels: Callable[[Tensor], Tensor]) -> list[Any]:
        return [{"input_ids": ids, "labels": labels(ids)} for ids, _ in batches()]

    found = train_named(llama(), given(lambda ids: ids), "resident", None)
    assert_same(found, train_named(llama(), given(Tensor.clone), "resident", None))


def test_masks_that_differ_between_blocks_are_planned() -> None:
    """Some blocks look at a window only: there are two masks."""
    settings = GROUPED | {"head_dim": 8, "sliding_window": 4}

    def make() -> Any:
        torch.manual_seed(0)
        config = transformers.Gemma3TextConfig(vocab_size=VOCABULARY, **SPECIAL_TOKENS, **settings)
        return transformers.Gemma3ForCausalLM(config).train()

    assert_same(train_named(make(), padded_batches(), "autohete", "60%"), train_as_they_do(make(), padded_batches()))


@pytest.mark.slow
def test_routers_that_want_a_loss_of_their_own_are_refused() -> None:
    """With labels it would be a part of the loss; with targets it is nobody's."""
    model = built("Mixtral/ForCausalLM", **EXPERTS, output_router_logits=True)
    with Trainer(model) as trainer, pytest.raises(InputError, match=r"config\.output_router_logits adds an auxiliary loss"):
        trainer.step(padded_batches()[0])
    pairs = [(ids, targets) for ids, targets in batches()]
    found, _ = train_named(model, pairs, "resident:checkpointing=full", None)
    plain = built("Mixtral/ForCausalLM", **EXPERTS)
    assert found == train_named(plain, pairs, "resident", None)[0]
    assert model.config.output_router_logits


@pytest.mark.parametrize(
    ("name", "value"), [("use_cache", True), ("output_hidden_states", True), ("num_items_in_batch", 3), ("input_idz", 1)]
)
def test_arguments_that_cannot_be_are_refused(name: str, value: object) -> None:
    """Those that ask for what a training has not, and those that the forward does not take."""
    with Trainer(llama()) as trainer, pytest.raises(InputError, match=name):
        trainer.step({**padded_batches()[0], name: value})


def test_labels_that_mean_something_else_are_refused() -> None:
    """A model whose own loss does not shift them says so by that loss."""
    model = built("XLNet/LMHeadModel", d_model=32, n_layer=2, n_head=4, d_inner=64)
    with Trainer(model) as trainer, pytest.raises(InputError, match="it uses labels in another way; give targets"):
        trainer.step(padded_batches()[0])


def test_a_loss_that_is_nearly_the_usual_one_is_refused() -> None:
    """A term that is small in the beginning, such as that of smoothed labels, must not be left out."""
    model = llama()

    def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return nn.functional.cross_entropy(logits.view(-1, vocab_size), shifted.flatten(), label_smoothing=0.01)

    model.loss_function = smoothed
    with Trainer(model) as trainer, pytest.raises(InputError, match="it uses labels in another way; give targets"):
        trainer.step(padded_batches()[0])


IMAGES = WIDE | {"image_size": 16, "patch_size": 4}
HEADS: dict[str, dict[str, Any]] = {
    "GPT2/ForSequenceClassification": OLDER | {"pad_token_id": 0},
    "Llama/ForSequenceClassification": GROUPED | {"pad_token_id": 0},
    "Bert/ForSequenceClassification": WIDE | {"pad_token_id": 0},
    "Bert/ForTokenClassification": WIDE | {"pad_token_id": 0},
    "ViT/ForImageClassification": {name: value for name, value in IMAGES.items() if name != "max_position_embeddings"},
}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["resident:checkpointing=full", "stronghold:window=1"])
@pytest.mark.parametrize("head", HEADS)
def test_other_heads_train_to_the_bit(head: str, policy: str) -> None:
    """Classes of sequences, tokens and images, by models whose own code stays as it is."""
    generator = torch.Generator().manual_seed(1)
    tokens = "Token" in head
    classes = torch.randint(0, 3, (4, 8) if tokens else (4,), generator=generator)
    name = "pixel_values" if "Image" in head else "input_ids"
    inputs = (
        torch.randn(4, 3, 16, 16, generator=generator)
        if "Image" in head
        else torch.randint(1, VOCABULARY, (4, 8), generator=generator)
    )
    given = [(inputs[:count], classes[:count]) for count in (4, 4, 3)]

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.reshape(-1, 3), targets.reshape(-1))

    torch.set_num_threads(1)
    plain, expected = built(head, num_labels=3, **HEADS[head]), []
    plain.config.use_cache = False  # which is for generation
    optimizer = default_optimizer(plain.parameters())
    torch.manual_seed(2)
    for some, targets in given:
        loss = loss_of(plain(**{name: some}).logits, targets)
        expected.append(loss.item())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    model = built(head, num_labels=3, **HEADS[head])
    with Trainer(model, policy=policy, loss=loss_of, hardware=load_hardware("a100-40gb-epyc7713")) as trainer:
        trainer.prepare({name: given[0][0], "targets": given[0][1]})
        torch.manual_seed(2)
        found = [trainer.step({name: some, "targets": targets}) for some, targets in given]
    assert_same((found, model.state_dict()), (expected, plain.state_dict()))
