"""Models whose blocks take and make more than hidden states, and which compute between blocks, train to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from support.modules import EVERYTHING_MOVES, VOCABULARY, Layer, Net, batches, train_by_policy, train_plainly
from support.reference import Outcome
from torch import Tensor, nn
from torch.nn import functional

from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.runtime.batch import Batch
from autohete.runtime.ledger import Counting
from autohete.train.trainer import Trainer
from autohete.train.verification import verify

OTHERS = [*EVERYTHING_MOVES[:-1], "sqrt_checkpoint:segments=1", "offload_activations", "streamed_states:weights"]
POLICIES = ["zero_offload", "autohete", *(pytest.param(policy, marks=pytest.mark.slow) for policy in OTHERS)]


class Between(Net):
    """Computes something between two blocks, with parameters of its own and one that also its head uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"first": nn.LayerNorm(32), "second": nn.Linear(32, 32)})

    def through(self, x: Tensor) -> Tensor:
        x = self.inner["first"](self.blocks[0](x))
        x = self.dropout(self.norm(torch.tanh(self.inner["second"](self.blocks[1](x)))))
        result: Tensor = self.blocks[2](x)
        return result


class Halving(Net):
    """Computes something without parameters after each block."""

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * 0.5
        return x


class Collecting(Net):
    """Its head uses the results of all blocks."""

    def through(self, x: Tensor) -> Tensor:
        results = []
        for block in self.blocks:
            x = block(x)
            results.append(x)
        return torch.stack(results).mean(0)


class Backwards(Net):
    """Calls its blocks in another order than that of their declaration."""

    def through(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class Passing(Net):
    """Gives all blocks the first one's input, packed away, which they use twice."""

    class layer(Layer):
        """Adds what it is given."""

        def forward(self, x: Tensor, others: Any = None) -> Any:
            first = others["first"][0]
            return super().forward(x) * first.sigmoid() + first

    def through(self, x: Tensor) -> Tensor:
        first = x
        for block in self.blocks:
            x = block(x, others={"first": (first,)})
        return x


class PassingMore(Net):
    """Its blocks get what others return beside, which the head reads."""

    class layer(Layer):
        """Adds it."""

        def forward(self, x: Tensor, weights: Any = 0) -> Any:
            more = x @ x.transpose(1, 2) * self.gain.mean() * 0.01
            return super().forward(x) + (weights @ x if isinstance(weights, Tensor) else 0), more

    def through(self, x: Tensor) -> Tensor:
        weights: Any = 0
        for block in self.blocks:
            x, weights = block(x, weights)
        result: Tensor = x + weights.mean()
        return result


class Biased(Net):
    """Its first block makes a bias that all return as they were given it, as T5's position bias."""

    class layer(Layer):
        """Multiplies by the bias."""

        def forward(self, x: Tensor, bias: Any = None) -> Any:
            bias = self.gain[:1].exp() * self.norm.weight if bias is None else bias
            return super().forward(x) * bias, bias

    def through(self, x: Tensor) -> Tensor:
        bias = None
        for block in self.blocks:
            x, bias = block(x, bias)
        return x


class Crossing(Net):
    """An encoder and a decoder; the decoder's blocks begin with a parameter, or with the encoder's embedding."""

    queries = True

    class layer(Layer):
        """Takes what the encoder has made."""

        def forward(self, x: Tensor, memory: Any = None) -> Any:
            if memory is None:
                return super().forward(x)
            scores = (self.norm(x) @ memory.transpose(-1, -2)).softmax(-1)
            return super().forward(x) + scores @ self.dropout(memory)

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(type(self).layer(32) for _ in range(2))
        self.start, self.scale = nn.Parameter(torch.randn(2, 8, 32)), nn.Parameter(torch.ones(32))

    def through(self, x: Tensor) -> Tensor:
        memory = super().through(x)
        y = self.start if self.queries else self.dropout(self.token.weight[:8].expand(len(x), 8, 32))
        for block in self.decoder:
            y = block(y, memory)
        return y * self.scale


class Translating(Crossing):
    """Its decoder begins with the encoder's embedding, with which its head multiplies, too."""

    queries = False

    def __init__(self) -> None:
        super().__init__()
        self.out.weight = self.token.weight


class FrozenEncoder(Translating):
    """Trains the decoder only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)
        self.token.requires_grad_(False)


class Towers(Net):
    """Two of its blocks begin with the result of the first, and a third with what the embedding has made."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Layer(32))

    def through(self, x: Tensor) -> Tensor:
        begin = self.blocks[0](x)
        result: Tensor = self.blocks[1](begin) + self.blocks[2](begin) * self.blocks[3](x)
        return result


class Attending(Net):
    """Its blocks attend with a trained bias, for which PyTorch takes another kernel where gradients are enabled."""

    class layer(Layer):
        """Adds attention."""

        def forward(self, x: Tensor) -> Any:
            heads = self.norm(x).unflatten(-1, (4, 8)).transpose(1, 2)
            bias = torch.linspace(-1, 1, 256).view(1, 4, 8, 8) * self.gain.mean()
            attended = functional.scaled_dot_product_attention(heads, heads, heads, bias)
            return super().forward(x) + attended.transpose(1, 2).flatten(2)


class Stages(nn.Module):
    """Stages as attributes, with other sizes at each, the results of which come back later, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(VOCABULARY, 32)
        self.one, self.two, self.three = Layer(32), Layer(16), Layer(32)
        self.narrow, self.wide = nn.Linear(32, 16), nn.Linear(16, 32)
        self.out = nn.Linear(64, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        one = self.one(self.token(ids))
        two = self.two(self.narrow(one))
        logits: Tensor = self.out(torch.cat([one, self.three(self.wide(two) + one)], -1))
        return logits


MODELS = [
    Between,
    Halving,
    Collecting,
    Backwards,
    Passing,
    PassingMore,
    Biased,
    Crossing,
    Translating,
    FrozenEncoder,
    Attending,
    Towers,
    Stages,
]


@cache
def plainly(model: Callable[[], nn.Module]) -> Outcome:
    """Plain training, once per model."""
    return train_plainly(model())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_many_graphs_trains_to_the_bit(model: Callable[[], nn.Module], policy: str) -> None:
    """Gradients of a tensor that several blocks take are added in the order of one backward through the whole model."""
    assert train_by_policy(model(), policy) == plainly(model)


#: With a hardware the machine is not measured.
NODE: dict[str, Any] = {"hardware": load_hardware("v100-32gb-dgx2")}


@pytest.mark.parametrize("model", [Net, Between, Passing, Biased, Translating, Stages])
def test_its_memory_is_as_planned(model: Callable[[], nn.Module]) -> None:
    """What several blocks take, and what the model's own code keeps, is in the plan, with micro-batches, too."""
    with Trainer(model(), policy="resident:checkpointing=full", micro_batches=2, **NODE) as trainer:
        for batch in batches():
            trainer.step(batch)
        found = trainer.comparison()
        assert trainer._held.do(lambda run: run.session.counting) is Counting.SCHEDULED
    assert found.measured_peak_bytes == found.predicted_peak_bytes


def t5(tied: bool = True) -> Any:
    """A T5 with shared embeddings; its first blocks make position biases for the others."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    config = transformers.T5Config(vocab_size=VOCABULARY, **sizes, **tokens, tie_word_embeddings=tied)
    return transformers.T5ForConditionalGeneration(config).train()


def t5_untied() -> Any:
    """A T5 whose head has its own matrix."""
    return t5(tied=False)


def bart() -> Any:
    """A BART, whose decoder has positions of its own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    both = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in both.items()}
    tokens = {"decoder_start_token_id": 0, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.BartConfig(vocab_size=VOCABULARY, d_model=32, max_position_embeddings=16, **sizes, **tokens)
    return transformers.BartForConditionalGeneration(config).train()


def translations(lengths: tuple[int, int] = (9, 6)) -> list[dict[str, Tensor]]:
    """Padded sources and shorter labels from a fixed seed."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(2):
        ids, labels = (torch.randint(2, VOCABULARY, (2, length), generator=generator) for length in lengths)
        mask = torch.ones_like(ids)
        mask[0, -2:], labels[1, -1] = 0, -100
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


@pytest.mark.parametrize("policy", ["zero_offload", "autohete"])
@pytest.mark.parametrize("make", [t5, bart])
def test_an_encoder_decoder_model_trains_to_the_bit(make: Callable[[], Any], policy: str) -> None:
    """Every loss, gradient, parameter and state is that of the plain loop, with shorter sources and targets, too."""
    found = verify(make(), [*translations(), *translations((7, 4))], policy=policy, **NODE)
    assert found.is_equal, found.differences[:3]


class UsedTwice(Net):
    """Its embedding is looked up twice before the blocks; its head may use it, too."""

    tied = True

    def embed(self, ids: Tensor) -> Tensor:
        hidden: Tensor = super().embed(ids) + 0.5 * self.token(ids.flip(-1))
        return hidden

    def head(self, x: Tensor) -> Any:
        return super().head(x) if not self.tied else functional.linear(self.norm(x), self.token.weight)


class UsedTwiceAtOnce(UsedTwice):
    """The same with a head of its own."""

    tied = False


def test_uses_whose_gradients_would_be_added_in_another_order_are_refused() -> None:
    """A T5 whose decoder alone is cut has them, and so has an embedding that is looked up twice and tied to the head."""
    message = "is used several times before a block, and again after it"
    with pytest.raises(InputError, match=f"shared.weight {message}.*name all lists of blocks"):
        verify(t5(), translations(), policy="resident", blocks="decoder.block", **NODE)
    with pytest.raises(InputError, match=f"token.weight {message}"):
        verify(UsedTwice(), batches(), policy="resident", **NODE)
    found = verify(UsedTwiceAtOnce(), batches(), policy="resident", **NODE)
    assert found.is_equal, found.differences[:3]


def test_its_evaluation_has_the_bits_of_its_own_loss() -> None:
    """Parameters of its own code are fetched with the block before, and longer batches than the first are refused."""
    model, (batch, _), (longer, _) = t5(), translations(), translations((9, 7))
    with Trainer(model, policy="stronghold:window=1", **NODE) as trainer:
        trainer.step(batch)
        found = trainer.evaluate([batch])
        with pytest.raises(InputError, match=r"the batch has decoder_input_ids \(2, 7\) .*, the first one had \(2, 6\)"):
            trainer.step(longer)
    with torch.no_grad():
        assert model.eval()(**batch, use_cache=False).loss.item() == found


def test_labels_without_a_decoders_input_are_refused() -> None:
    """Where the model does not say how it shifts them."""

    class Config:
        """Of an encoder-decoder model."""

        is_encoder_decoder = True

    model = Net()
    model.config = Config()  # type: ignore[assignment]
    ids, labels = batches()[0]
    with pytest.raises(InputError, match=r"Net has no prepare_decoder_input_ids_from_labels: give decoder_input_ids, too"):
        Batch.of({"ids": ids, "labels": labels}, model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "dtype", "policy", "options"),
    [
        (t5_untied, torch.float32, "resident:checkpointing=full", {"micro_batches": 2}),
        (t5_untied, torch.bfloat16, "sqrt_checkpoint:segments=2", {}),
        (t5_untied, torch.float32, "stronghold:window=1,checkpointing=selective", {}),
        (t5_untied, torch.bfloat16, "autohete", {"gpu_memory": "60%", "micro_batches": 2}),
        (bart, torch.bfloat16, "resident:checkpointing=full", {"micro_batches": 2}),
        (bart, torch.float32, "streamed_states:weights", {"micro_batches": 2}),
        (bart, torch.float32, "offload_activations", {"clip_norm": 0.1}),
    ],
)
def test_it_does_so_under_other_policies(
    make: Callable[[], Any], dtype: torch.dtype, policy: str, options: dict[str, Any]
) -> None:
    """With micro-batches, clipping, a budget, and in 16 bits."""
    found = verify(make().to(dtype), translations(), policy=policy, **NODE, **options)
    assert found.is_equal, found.differences[:3]
