"""The GPU kernels of one transformer block: tables of operations, one for each implementation of a GPT-2-like block.

Counted in the source (file and line in each row) and checked by running the real modules (``tests/models/test_kernels.py``).
An element access is one read or one write of a tensor of ``tokens x hidden`` elements in the type that the GPU computes
with; a score pass is one of ``batch x heads x sequence x sequence`` elements. Matrix products are timed separately; their bias
gradients are counted in their rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from autohete.errors import check_fields
from autohete.workload import BlockRole, Kernels, LossKernels
from autohete.workload.training import FIRST, LAST


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a block in training.

    Args:
        name: name of the operation.
        source: file and line.
        forward, backward: element accesses per token and hidden unit.
        forward_scores, backward_scores: score passes, without those of the matrix products.
        kept: tensors of ``tokens x hidden`` elements kept for backward.
        kept_mask: bytes of mask kept per token and hidden unit, written forward and read backward.
        kept_scores: tensors of scores kept for backward.
        kept_score_mask: bytes of mask kept per score.
        forward_kernels, backward_kernels: kernels launched, matrix products included.
        forward_fp32, backward_fp32: accesses as above, to tensors that are fp32 in every precision.
        kept_fp32: tensors of this kind kept for backward.
        casts: tensors cast to fp32 or back, in forward and again in backward. None in fp32.
        kept_casts, kept_score_casts: tensors (and tensors of scores) kept in fp32, in addition to what is kept without casts.
        kept_copies: bytes of inputs kept in another format, per token and hidden unit.
    """

    name: str
    source: str
    forward: float = 0
    backward: float = 0
    forward_scores: float = 0
    backward_scores: float = 0
    kept: float = 0
    kept_mask: float = 0
    kept_scores: float = 0
    kept_score_mask: float = 0
    forward_kernels: float = 0
    backward_kernels: float = 0
    forward_fp32: float = 0
    backward_fp32: float = 0
    kept_fp32: float = 0
    casts: float = 0
    kept_casts: float = 0
    kept_score_casts: float = 0
    kept_copies: float = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """Tensors that can be released after forward, and made again before backward.

    Args:
        rows: indices of the operations that keep them. Columns that no selection can release stay.
        again: indices of the operations that make them again.
        products: the matrix products of attention are recomputed as well.
        selective: what is published as selective recomputation does so.
        casts: what makes copies of the results in another format again.
    """

    rows: tuple[int, ...]
    again: tuple[int, ...]
    products: bool = False
    selective: bool = True
    casts: tuple[Operation, ...] = ()

    def after(self, count: int) -> Selection:
        """The same in a table with ``count`` more operations before."""
        return replace(self, rows=tuple(row + count for row in self.rows), again=tuple(row + count for row in self.again))


#: The columns of what is kept for backward, and those of them that a selection releases.
_KEPT = ("kept", "kept_mask", "kept_scores", "kept_score_mask", "kept_fp32", "kept_casts", "kept_score_casts", "kept_copies")
_RELEASED = ("kept", "kept_scores", "kept_score_mask", "kept_copies")


@dataclass(frozen=True, slots=True)
class SavedRows:
    """Tensors of a part that are kept for backward.

    Args:
        name: name of the operation that keeps them.
        kept: what it keeps, as a table of its own.
        again: the operations that make them again. None: only the whole part does.
        products: the matrix products of attention do so as well.
        selective: selective recomputation makes them again.
    """

    name: str
    kept: Part
    again: Part | None = None
    products: bool = False
    selective: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """The kernels of a transformer block, or of one of its sublayers.

    Args:
        operations: its operations.
        forward_workspace, backward_workspace: tensors of ``tokens x hidden`` elements that live only during the pass. The
            workspace of a block is not the larger of its sublayers': while one of them is computed, the other keeps nothing
            yet, or nothing more.
        backward_score_workspace: tensors of scores that live only during backward.
        selections: what can be made again by itself.
    """

    operations: tuple[Operation, ...]
    forward_workspace: float = 0
    backward_workspace: float = 0
    backward_score_workspace: float = 0
    selections: tuple[Selection, ...] = ()

    def total(self, column: str) -> float:
        """The sum of one column of the table."""
        return float(sum(getattr(operation, column) for operation in self.operations))

    def until_saved(self) -> Part:
        """The operations up to the last that keeps something, or that multiplies by weights, which are kept too."""
        last = max(i for i, one in enumerate(self.operations) if one.name == LAST or any(getattr(one, c) for c in _KEPT))
        return replace(self, operations=self.operations[: last + 1])

    def saved(self) -> Iterator[SavedRows]:
        """What is kept for backward, tensor by tensor. The input is what the first row keeps."""
        released = {row for one in self.selections for row in one.rows}
        first = {one.rows[0]: one for one in self.selections}
        for row, operation in enumerate(self.operations):
            if (one := first.get(row)) is not None:
                rows = tuple(_only(self.operations[kept], _RELEASED) for kept in one.rows)
                again = Part((*(self.operations[made] for made in one.again), *one.casts))
                yield SavedRows(operation.name, Part(rows), again, one.products, one.selective)
            rest = _only(operation, [column for column in _KEPT if row not in released or column not in _RELEASED])
            if any(getattr(rest, column) for column in _KEPT):
                yield SavedRows(operation.name, Part((rest,)))


def _only(operation: Operation, columns: Collection[str]) -> Operation:
    """Some columns of a row."""
    return Operation(operation.name, operation.source, **{column: getattr(operation, column) for column in columns})


def without_inputs(part: Part, names: Collection[str]) -> Part:
    """``part`` without what the operations ``names``, products with weights, keep of their inputs, besides copies: only the
    gradients of weights need inputs. So selective recomputation has nothing to release of frozen products.
    """
    operations = tuple(replace(one, kept=0) if one.name in names else one for one in part.operations)
    still = tuple(
        one for one in part.selections if any(getattr(operations[row], column) for row in one.rows for column in _RELEASED)
    )
    return replace(part, operations=operations, selections=still)


def copied_inputs(part: Part, copies: Mapping[str, int], cast: Operation) -> Part:
    """``part`` that keeps copies of inputs that a selection releases.

    Args:
        part: with what products keep without copies.
        copies: how many, for the names of operations that keep the input of a product with weights.
        cast: what makes one of a tensor of ``tokens x hidden`` elements, and the bytes that it keeps.
    """
    operations, selections = list(part.operations), []
    for one in part.selections:
        casts = []
        for row in (row for row in one.rows if copies.get(part.operations[row].name)):
            count = copies[part.operations[row].name]
            tensors = count * part.operations[row].kept
            operations[row] = replace(operations[row], kept_copies=tensors * cast.kept_copies)
            casts.append(
                replace(
                    cast,
                    forward=tensors * cast.forward,
                    forward_fp32=tensors * cast.forward_fp32,
                    forward_kernels=count * cast.forward_kernels,
                )
            )
        selections.append(replace(one, casts=tuple(casts)))
    return replace(part, operations=tuple(operations), selections=tuple(selections))


def leaned(part: Part) -> Part:
    """``part`` if it makes again, within backward, what selective recomputation would make again before it."""
    operations, largest = list(part.operations), 0.0
    for one in (one for one in part.selections if one.selective):
        largest = max(largest, sum(operations[row].kept for row in one.rows))
        for row in one.rows:
            operations[row] = replace(operations[row], kept=0, kept_scores=0, kept_score_mask=0)
        for row in one.again:
            made = operations[row]
            operations[row] = replace(
                made, backward=made.backward + made.forward, backward_kernels=made.backward_kernels + made.forward_kernels
            )
    return replace(
        part,
        operations=tuple(operations),
        forward_workspace=part.forward_workspace + largest,
        backward_workspace=part.backward_workspace + largest,
        selections=(),
    )


@dataclass(frozen=True, slots=True)
class Implementation:
    """The kernels of one implementation.

    Args:
        block: kernels of one transformer block.
        attention, mlp: kernels of its sublayers; their operations together are the block's.
        loss: the loss of GPT-2.
        flash: attention scores stay out of memory (FlashAttention).
        instructions: instructions per lane and element access, which are the limit if memory is fast. 0: never the limit.
        eager: one kernel per operation.
        host_forward, host_backward: operations of the host for each kernel: Python between the kernels, and its views.
        lean: its parts are to be :func:`leaned`.
        fuses_norms: although ``eager``, each RMSNorm is one kernel, and so are rotations.
        fuses_activation: although ``eager``, a gated activation function is one kernel.
    """

    block: Part
    attention: Part
    mlp: Part
    loss: LossKernels
    flash: bool
    instructions: float = 0
    eager: bool = False
    host_forward: float = 1
    host_backward: float = 1
    lean: bool = False
    fuses_norms: bool = False
    fuses_activation: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def part(self, role: BlockRole) -> Part:
        """The part for a block of GPT-2, or for one of its sublayers."""
        found = {BlockRole.TRANSFORMER: self.block, BlockRole.ATTENTION: self.attention, BlockRole.MLP: self.mlp}[role]
        return leaned(found) if self.lean else found


def _rows(prefix: dict[str, str], *rows: tuple[object, ...]) -> tuple[Operation, ...]:
    """Parse rows of (name, source, then the numbers of :class:`Operation`); ``G:1`` in a source is a line of file ``G``."""

    def path(source: str) -> str:
        return "; ".join(f"{prefix[file]}:{lines}" for file, _, lines in (part.partition(":") for part in source.split()))

    return tuple(Operation(str(row[0]), path(str(row[1])), *row[2:]) for row in rows)  # type: ignore[arg-type]


#: The row of FlashAttention.
FLASH = "flash attention"
#: Hugging Face transformers v4.28.1, ``src/transformers``.
_HF = {"G": "models/gpt2/modeling_gpt2.py", "A": "activations.py", "P": "pytorch_utils.py"}
#: NVIDIA Megatron-LM, ``megatron/model``, at v2.5 and at 23.06.
_MEGATRON = {"T": "transformer.py", "N": "fused_layer_norm.py", "S": "fused_softmax.py", "U": "fused_bias_gelu.py"}
_MEGATRON_2306 = {"F": "transformer.py (23.06)"}

# fmt: off
# Each row: name, source, accesses forward and backward, score passes forward and backward, kept tensors and their masks, kept
# scores and their masks, kernels forward and backward.
_HF_BEFORE_SCORES = _rows(
    _HF,
    ("ln_1", "G:388", 2, 5, 0, 0, 1, 0, 0, 0, 1, 2),
    ("c_attn", "G:311 P:102", 0, 3, 0, 0, 1, 0, 0, 0, 1, 3),
    ("copies of q, k, v", "G:182 G:217", 6, 10, 0, 0, 3, 0, 0, 0, 3, 3),
)
_HF_SCORES = _rows(
    _HF,
    ("scores", "G:182", 0, 0, 0, 0, 0, 0, 0, 0, 1, 2),
    ("scale", "G:185", 0, 0, 2, 2, 0, 0, 0, 0, 2, 1),
    ("causal mask", "G:200-201", 0, 0, 2, 2, 0, 0, 0, 0, 1, 2),
    ("softmax", "G:207", 0, 0, 2, 3, 0, 0, 1, 0, 1, 1),
    ("attention dropout", "G:211", 0, 0, 2, 2, 0, 0, 1, 1, 1, 1),
    ("context", "G:217", 0, 0, 0, 0, 0, 0, 0, 0, 1, 2),
)
_HF_MERGE = _rows(
    _HF,
    ("merge of heads", "G:332", 2, 2, 0, 0, 1, 0, 0, 0, 1, 1),
)
_HF_PROJECTION = _rows(
    _HF,
    ("attention c_proj", "G:333", 0, 1, 0, 0, 0, 0, 0, 0, 1, 3),  # its input is the merged copy
    ("residual dropout", "G:334", 2, 2, 0, 0, 0, 1, 0, 0, 1, 1),
    ("residual", "G:400", 3, 3, 0, 0, 0, 0, 0, 0, 1, 1),
)
_HF_MLP = _rows(
    _HF,
    ("ln_2", "G:425", 2, 5, 0, 0, 1, 0, 0, 0, 1, 2),
    ("c_fc", "G:353", 0, 4, 0, 0, 1, 0, 0, 0, 1, 3),
    ("gelu: 0.5 x", "A:56", 8, 8, 0, 0, 0, 0, 0, 0, 1, 1),
    ("gelu: x^3", "A:56", 8, 28, 0, 0, 4, 0, 0, 0, 1, 3),
    ("gelu: 0.044715 x^3", "A:56", 8, 8, 0, 0, 0, 0, 0, 0, 1, 1),
    ("gelu: x + ...", "A:56", 12, 12, 0, 0, 0, 0, 0, 0, 1, 1),  # backward accumulates
    ("gelu: sqrt(2/pi) (...)", "A:56", 8, 8, 0, 0, 0, 0, 0, 0, 1, 1),
    ("gelu: tanh", "A:56", 8, 12, 0, 0, 4, 0, 0, 0, 1, 1),
    ("gelu: 1 + ...", "A:56", 8, 0, 0, 0, 0, 0, 0, 0, 1, 0),
    ("gelu: product", "A:56", 12, 36, 0, 0, 8, 0, 0, 0, 1, 3),
    ("mlp c_proj", "G:355", 0, 1, 0, 0, 4, 0, 0, 0, 1, 3),
    ("mlp dropout", "G:356", 2, 2, 0, 0, 0, 1, 0, 0, 1, 1),
    ("residual", "G:428", 3, 3, 0, 0, 0, 0, 0, 0, 1, 1),
)
#: For each product, by whether it is attention's and which of the two it is: the rows that keep its input.
GPT2_ROWS = {
    (True, FIRST): ("c_attn", "query_key_value"),
    (True, LAST): ("attention c_proj", "dense"),
    (False, FIRST): ("c_fc", "dense_h_to_4h"),
    (False, LAST): ("mlp c_proj", "dense_4h_to_h"),
}
#: With scaled_dot_product_attention and its flash kernel, queries, keys, values and the merged heads need no copies.
_HF_FLASH = (
    Operation("split of q, k, v", "models/gpt2/modeling_gpt2.py (5.x)", backward=6, kept=3, backward_kernels=1),
    Operation(FLASH, "Dao et al. 2022, algorithms 2 and 4", 4, 8, kept=1, forward_kernels=1, backward_kernels=3),
)
_MEGATRON_NORM = _rows(
    _MEGATRON,
    ("input layer norm", "N:33-58", 2, 5, 0, 0, 1, 0, 0, 0, 1, 3),
)
_MEGATRON_SCORES = _rows(
    _MEGATRON,
    ("query_key_value", "T:198", 0, 3, 0, 0, 1, 0, 0, 0, 1, 3),
    ("split of q, k, v", "T:207", 0, 6, 0, 0, 3, 0, 0, 0, 0, 1),
    ("scores", "T:271", 0, 4, 0, 0, 0, 0, 0, 0, 1, 4),
    ("scale, mask, softmax", "S:29-49", 0, 0, 2, 3, 0, 0, 1, 0, 1, 1),
    ("attention dropout", "T:308", 0, 0, 2, 2, 0, 0, 1, 1, 1, 1),
    ("context", "T:332", 0, 0, 0, 0, 0, 0, 0, 0, 1, 2),
    ("copy of context", "T:338", 2, 0, 0, 0, 1, 0, 0, 0, 1, 0),
)
_MEGATRON_FLASH = _rows(
    _MEGATRON_2306,
    ("query_key_value", "F:340", 0, 3, 0, 0, 1, 0, 0, 0, 1, 3),
    ("q, k, v for flash attention", "F:662", 6, 6, 0, 0, 3, 0, 0, 0, 3, 1),
    (FLASH, "F:392", 4, 8, 0, 0, 1, 0, 0, 0, 1, 3),
    ("copy of context", "F:669", 2, 0, 0, 0, 1, 0, 0, 0, 1, 0),
)
_MEGATRON_PROJECTION = _rows(
    _MEGATRON,
    ("dense", "T:349", 0, 0, 0, 0, 0, 0, 0, 0, 1, 2),
    ("bias, dropout, residual", "T:371 T:476", 3, 3, 0, 0, 0, 1, 0, 0, 1, 2),
    ("sum of residual gradients", "T:476", 0, 3, 0, 0, 0, 0, 0, 0, 0, 1),
)
_MEGATRON_MLP = _rows(
    _MEGATRON,
    ("post-attention layer norm", "T:483", 2, 5, 0, 0, 1, 0, 0, 0, 1, 3),
    ("sum of residual gradients", "T:518", 0, 3, 0, 0, 0, 0, 0, 0, 0, 1),
    ("dense_h_to_4h", "T:91", 0, 0, 0, 0, 1, 0, 0, 0, 1, 2),
    ("bias, gelu", "U:50-58", 8, 16, 0, 0, 4, 0, 0, 0, 1, 2),
    ("dense_4h_to_h", "T:101", 0, 0, 0, 0, 4, 0, 0, 0, 1, 2),
    ("bias, dropout, residual", "T:518", 3, 3, 0, 0, 0, 1, 0, 0, 1, 2),
)
# fmt: on

#: Conversions, index arithmetic and the operation itself. Calibrated on the forward pass of a block on V100 and A100-80GB
#: (experiments/published/huggingface-layer.toml): the A100's memory is 2.3 times as fast, its lanes only 1.24 times.
_EAGER_INSTRUCTIONS = 23

#: Operations of the host for each kernel, forward and backward, of blocks of transformers 5.23: 2.8 to 3.7 and 1.8 to 2.7 in
#: GPT-2, Llama and Qwen3 (benchmarks/host_time.py). Compiled code and C++ spend one or less.
_EAGER_HOST = (3.2, 2.2)

_MEGATRON_FLASH_ATTENTION = (*_MEGATRON_NORM, *_MEGATRON_FLASH, *_MEGATRON_PROJECTION)
_MEGATRON_SCORES_ATTENTION = (*_MEGATRON_NORM, *_MEGATRON_SCORES, *_MEGATRON_PROJECTION)
_HF_SCORES_ATTENTION = (*_HF_BEFORE_SCORES, *_HF_SCORES, *_HF_MERGE, *_HF_PROJECTION)
_HF_FLASH_ATTENTION = (*_HF_BEFORE_SCORES[:2], *_HF_FLASH, *_HF_PROJECTION)

#: What selective recomputation makes again: for the operations that keep it, those that are repeated.
_Selected = tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]

#: If scores are in memory: the core of attention, that is products, softmax and dropout (Korthikanti et al. 2022, section 5;
#: Megatron-LM v3.0, ``megatron/model/transformer.py``, ``CoreAttention`` with ``--recompute-granularity selective``). Its
#: inputs and its result stay, because the surrounding products keep them anyway. For a block this is all, as published.
_MEGATRON_CORE: _Selected = (
    (
        ("scale, mask, softmax", "attention dropout"),
        ("scores", "scale, mask, softmax", "attention dropout", "context", "copy of context"),
    ),
)
_HF_CORE: _Selected = (
    (
        ("softmax", "attention dropout"),
        ("copies of q, k, v", "scores", "scale", "causal mask", "softmax", "attention dropout", "context"),
    ),
)
#: FlashAttention does this inside its kernel. What remains is elementwise: results of norms and of the activation function,
#: which the products after them keep (Megatron Core, ``--recompute-modules layernorm mlp_act``).
_MEGATRON_NORM_AGAIN: _Selected = ((("query_key_value",), ("input layer norm",)),)
_MEGATRON_MLP_AGAIN: _Selected = (
    (("dense_h_to_4h",), ("post-attention layer norm",)),
    (("dense_4h_to_h",), ("bias, gelu",)),
)
_HF_NORM_AGAIN: _Selected = ((("c_attn",), ("ln_1",)),)
#: For an activation function in eight kernels, only its input stays.
_HF_MLP_AGAIN: _Selected = (
    (("c_fc",), ("ln_2",)),
    (
        ("gelu: tanh", "gelu: product", "mlp c_proj"),
        tuple(operation.name for operation in _HF_MLP if operation.name.startswith("gelu")),
    ),
)


def _part(
    operations: tuple[Operation, ...], forward: float, backward: float, scores: float = 0, selected: _Selected = ()
) -> Part:
    """A part whose selections are given by name."""
    index = {operation.name: row for row, operation in enumerate(operations)}
    selections = tuple(
        Selection(tuple(index[name] for name in rows), tuple(index[name] for name in again), products="scores" in again)
        for rows, again in selected
    )
    return Part(operations, forward, backward, scores, core_alone(selections))


def core_alone(selections: tuple[Selection, ...]) -> tuple[Selection, ...]:
    """Where scores are in memory, what is published of a block is the core of attention alone."""
    core = any(one.products for one in selections)
    return tuple(replace(one, selective=one.products or not core) for one in selections)


_FUSED = Implementation(
    _part((*_MEGATRON_FLASH_ATTENTION, *_MEGATRON_MLP), 2, 6.5, 0, (*_MEGATRON_NORM_AGAIN, *_MEGATRON_MLP_AGAIN)),
    _part(_MEGATRON_FLASH_ATTENTION, 3.5, 4.5, selected=_MEGATRON_NORM_AGAIN),
    _part(_MEGATRON_MLP, 2, 6.5, selected=_MEGATRON_MLP_AGAIN),
    LossKernels.MEGATRON,
    flash=True,
)

_EAGER_FLASH = Implementation(
    _part((*_HF_FLASH_ATTENTION, *_HF_MLP), 3, 9.5, 0, (*_HF_NORM_AGAIN, *_HF_MLP_AGAIN)),
    _part(_HF_FLASH_ATTENTION, 2, 5.5, selected=_HF_NORM_AGAIN),
    _part(_HF_MLP, 2, 9.5, selected=_HF_MLP_AGAIN),
    LossKernels.SHIFTED,
    flash=True,
    instructions=_EAGER_INSTRUCTIONS,
    eager=True,
    host_forward=_EAGER_HOST[0],
    host_backward=_EAGER_HOST[1],
)

IMPLEMENTATIONS: dict[Kernels, Implementation] = {
    Kernels.FUSED: _FUSED,
    Kernels.LEAN: replace(_FUSED, lean=True),
    Kernels.FUSED_SOFTMAX: replace(
        _FUSED,
        block=_part(
            (*_MEGATRON_SCORES_ATTENTION, *_MEGATRON_MLP),
            2,
            6.5,
            1,
            (*_MEGATRON_CORE, *_MEGATRON_NORM_AGAIN, *_MEGATRON_MLP_AGAIN),
        ),
        attention=_part(_MEGATRON_SCORES_ATTENTION, 2, 4.5, 1, (*_MEGATRON_CORE, *_MEGATRON_NORM_AGAIN)),
        flash=False,
    ),
    Kernels.EAGER: replace(
        _EAGER_FLASH,
        block=_part((*_HF_SCORES_ATTENTION, *_HF_MLP), 3, 9.5, 1, (*_HF_CORE, *_HF_NORM_AGAIN, *_HF_MLP_AGAIN)),
        attention=_part(_HF_SCORES_ATTENTION, 2, 3.5, 1, (*_HF_CORE, *_HF_NORM_AGAIN)),
        flash=False,
    ),
    Kernels.EAGER_FLASH: _EAGER_FLASH,
    Kernels.FUSED_NORMS: replace(_EAGER_FLASH, fuses_norms=True),
    Kernels.LIGER: replace(_EAGER_FLASH, fuses_norms=True, fuses_activation=True),
}
