"""A small, clear GPT to start with. Any other module whose blocks are in a list works too."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from autohete.runtime.precision import DTYPES
from autohete.workload import Units, Workload

#: Name of the list of a GPT's blocks, or of their sublayers.
BLOCKS = "blocks"


class Embedding(nn.Module):
    """Token and learned position embedding, dropout. ``ids`` (batch, sequence) -> (batch, sequence, hidden)."""

    def __init__(self, vocabulary_size: int, sequence_length: int, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary_size, hidden_size)
        self.position = nn.Embedding(sequence_length, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        hidden: Tensor = self.dropout(self.token(ids) + self.position(positions))
        return hidden


class _Sublayer(nn.Module):
    """What attention and MLP have in common."""

    def __init__(self, hidden_size: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.probability = heads, dropout
        self.dropout = nn.Dropout(dropout)


class GPTAttention(_Sublayer):
    """Causal attention, its norm before it, and its residual connection. (batch, sequence, hidden) -> the same."""

    def __init__(self, hidden_size: int, heads: int, dropout: float) -> None:
        super().__init__(hidden_size, heads, dropout)
        self.norm1 = nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, hidden // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.probability if self.training else 0.0, is_causal=True
        )
        y: Tensor = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, sequence, hidden)))
        return y


class GPTMlp(_Sublayer):
    """The MLP, its norm before it, and its residual connection. (batch, sequence, hidden) -> the same."""

    def __init__(self, hidden_size: int, heads: int, dropout: float) -> None:
        super().__init__(hidden_size, heads, dropout)
        self.norm2 = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))
        return y


class GPTBlock(GPTMlp, GPTAttention):
    """Pre-norm transformer block: attention, then MLP. (batch, sequence, hidden) -> the same."""

    def forward(self, x: Tensor) -> Tensor:
        return GPTMlp.forward(self, GPTAttention.forward(self, x))


class GPTHead(nn.Module):
    """Final norm and LM head. (batch, sequence, hidden) -> (batch, sequence, vocabulary).

    Args:
        hidden_size: model width.
        vocabulary_size: None to multiply by a matrix passed to forward (the embedding's, if tied).
    """

    def __init__(self, hidden_size: int, vocabulary_size: int | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.projection = None if vocabulary_size is None else nn.Linear(hidden_size, vocabulary_size, bias=False)

    def forward(self, x: Tensor, tied: Tensor | None = None) -> Tensor:
        if self.projection is not None:
            logits: Tensor = self.projection(self.norm(x))
            return logits
        assert tied is not None, "a head without a projection multiplies by the embedding's matrix"
        return functional.linear(self.norm(x), tied)


class GPT(nn.Module):
    """A GPT-2-like language model with the parameters that :class:`~autohete.workload.Workload` counts.

    Args:
        workload: shape and precision of the parameters, which are drawn in fp32 from PyTorch's global generator. If its units
            are sublayers, ``blocks`` lists attention and MLP of each block in turn.
        dropout: probability, for every dropout layer.

    Attributes:
        units: what ``blocks`` lists.
    """

    def __init__(self, workload: Workload, dropout: float = 0.1) -> None:
        super().__init__()
        h = workload.hidden_size
        self.embedding = Embedding(workload.vocabulary_size, workload.sequence_length, h, dropout)
        self.units = workload.units
        parts: tuple[type[_Sublayer], ...] = (GPTBlock,) if self.units is Units.BLOCK else (GPTAttention, GPTMlp)
        self.blocks = nn.ModuleList(
            part(h, workload.heads, dropout) for _ in range(workload.transformer_blocks) for part in parts
        )
        self.head = GPTHead(h, None if workload.tied_embeddings else workload.vocabulary_size)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * workload.transformer_blocks) if residual else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.to(DTYPES[workload.precision])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x, None if self.head.projection is not None else self.embedding.token.weight)
        return logits


def seeded_gpt(workload: Workload, dropout: float, seed: int, dropout_seed: int | None = None) -> GPT:
    """Return a GPT whose weights and dropout are determined by ``seed``, which also seeds PyTorch globally.

    ``dropout_seed`` determines the dropout instead, as each of several ranks draws its own.
    """
    torch.manual_seed(seed)
    model = GPT(workload, dropout)
    if dropout_seed is not None and dropout_seed != seed:
        torch.manual_seed(dropout_seed)
    return model
