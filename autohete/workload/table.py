"""Tables of traced models: the kernels, saved tensors and parameters of every unit, as plain data without torch.

A table holds for one sequence length and one precision. Its sizes grow linearly with the batch: each is a number, or a pair of
a fixed part and a part for each sample.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from autohete.errors import InputError, check_fields
from autohete.files import write_text
from autohete.hashing import Hashed, hashed_once
from autohete.workload import Kernels, Precision

FORMAT = "autohete-table 1"
#: Above this a size is a mistake.
_ABSURD = 2**62


@dataclass(frozen=True, slots=True)
class Growing:
    """A size that grows with the batch: ``fixed + each * batch_size``."""

    fixed: int
    each: int = 0

    def at(self, batch_size: int) -> int:
        """The size for this batch."""
        return self.fixed + self.each * batch_size


def largest(sizes: tuple[Growing, ...], batch_size: int) -> int:
    """The largest of some sizes for this batch; 0 if none is positive."""
    return max((0, *(size.at(batch_size) for size in sizes)))


def _growing(written: object) -> object:
    """Read a number, or a pair of a fixed part and a part for each sample."""
    if type(written) is int:
        return Growing(written)
    if isinstance(written, (list, tuple)) and len(written) == 2 and all(type(part) is int for part in written):
        return Growing(*written)
    raise ValueError(f"{str(written)[:40]} is no size: give a number, or [fixed, for each sample]")


Size = Annotated[Growing, BeforeValidator(_growing)]
#: A matrix product: rows, columns, inner size, and how many of them.
ProductSizes = tuple[Size, Size, Size, Size]


@dataclass(frozen=True, slots=True)
class TracedKernel:
    """One operation of a unit, or several equal ones of one module.

    Args:
        kernel: name of the operation in PyTorch (``aten``).
        module: the module that runs it, within its unit.
        count: number of equal ones.
        launches: kernels that each launches.
        accesses, bytes: elements that each reads and writes, and their size. 0 for products, whose traffic follows from sizes.
        products: the matrix products that it computes.
        flops: FLOPs of a fused kernel, as model FLOPs count: without a causal mask, and backward twice forward.
        fused_flops: those that the fused kernel computes.
        attention: of fused attention, the elements of a query and of a value, and the keys that a query is multiplied with, on
            average.
        masked: whether fused attention gets a mask as a tensor.
    """

    kernel: str
    module: str
    count: int = 1
    launches: int = 1
    accesses: Size = Growing(0)
    bytes: Size = Growing(0)
    products: tuple[ProductSizes, ...] = ()
    flops: Size = Growing(0)
    fused_flops: Size = Growing(0)
    attention: tuple[int, int, int] | None = None
    masked: bool = False


@dataclass(frozen=True, slots=True)
class TracedSaved:
    """A tensor that the forward of a unit saves for backward, besides its input.

    Args:
        name: the module and the operation that make it.
        bytes: size of its storage.
        again: which of the unit's forward kernels, by index, make it again from tensors that stay, and how often each; those
            with equal lists are made together. None: only a recomputation of the whole unit does.
    """

    name: str
    bytes: Size
    again: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class TracedParameter:
    """A parameter. One that is frozen, or that the traced pass left without a gradient, has no optimizer states."""

    name: str
    shape: tuple[int, ...]
    frozen: bool = False

    @property
    def count(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class TracedUnit:
    """A unit of a model.

    Args:
        kind: class of its module.
        parameters: those that it owns.
        forward, backward: its kernels.
        saved: what its forward keeps for backward, besides its input.
        input_bytes: what it receives from the unit before.
        unsaved_input_bytes: the part of it that its forward does not save, such as one that is only cast.
        forward_workspace_bytes, backward_workspace_bytes: temporaries of the pass, without what it receives, keeps and passes
            on: the largest of these sizes.
    """

    kind: str
    parameters: tuple[TracedParameter, ...]
    forward: tuple[TracedKernel, ...]
    backward: tuple[TracedKernel, ...]
    saved: tuple[TracedSaved, ...]
    input_bytes: Size
    unsaved_input_bytes: Size
    forward_workspace_bytes: tuple[Size, ...]
    backward_workspace_bytes: tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class TracedLoss:
    """The loss, forward and backward.

    Args:
        kernels: its kernels.
        prediction_bytes: what it receives, such as logits.
        workspace_bytes: its temporaries, without the gradient of the prediction: the largest of these sizes.
    """

    kernels: tuple[TracedKernel, ...]
    prediction_bytes: Size
    workspace_bytes: tuple[Size, ...]


@hashed_once
@dataclass(frozen=True, slots=True)
class ModelTable(Hashed):
    """The table of a traced model.

    Args:
        name: of the model.
        source: what was traced, with versions.
        precision: in which it was traced.
        kernels: ``eager_flash`` if it has fused attention, otherwise ``eager``.
        sequence_length: tokens of a sample; 1 if samples have none.
        batch_sizes: those that were traced. Of one, the sizes hold for this one only.
        width: last dimension of what the first block receives.
        outputs: last dimension of the prediction, such as the vocabulary.
        tied: a matrix of the first unit is also used by a later one.
        beside_bytes: what several units use, such as masks, the result of an encoder, or skip connections. It stays on the GPU
            from the first forward to the last backward.
        beside_gradient_bytes: its gradients: the largest of these sizes.
        kinds: units that differ.
        units: the kind of each unit: what is before the first block, the blocks, what is after the last one.
        loss: its loss.
    """

    name: str
    source: str
    precision: Precision
    kernels: Kernels
    sequence_length: int
    batch_sizes: tuple[int, ...]
    width: int
    outputs: int
    tied: bool
    beside_bytes: Size
    beside_gradient_bytes: tuple[Size, ...]
    kinds: tuple[TracedUnit, ...]
    units: tuple[int, ...]
    loss: TracedLoss

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.units) < 3:
            raise InputError(f"units has {len(self.units)} entries: a model has at least one block between its ends")
        if wrong := [kind for kind in self.units if not 0 <= kind < len(self.kinds)]:
            raise InputError(f"units names kind {wrong[0]}, but there are {len(self.kinds)} kinds, from 0: give one of them")
        if not self.batch_sizes or min((self.sequence_length, self.width, self.outputs, *self.batch_sizes)) < 1:
            raise InputError("sequence_length, width, outputs and batch_sizes must be at least 1")
        for kind in self.kinds:
            rows = [row for one in kind.saved for row, _ in one.again or ()]
            if wrong := [row for row in rows if not 0 <= row < len(kind.forward)]:
                raise InputError(f"a saved tensor of {kind.kind} is made by forward kernel {wrong[0]}, which is not there")

    def unit(self, number: int) -> TracedUnit:
        """The unit of this number."""
        return self.kinds[self.units[number]]


@lru_cache
def _adapter() -> TypeAdapter[ModelTable]:
    """Built on first use: most commands need none."""
    return TypeAdapter(ModelTable)


def is_table(document: dict[str, Any]) -> bool:
    """Whether a JSON object is a table of a traced model, of this version or another."""
    return str(document.get("format")).startswith(FORMAT.split()[0])


def parse_table(document: dict[str, Any], path: str) -> ModelTable:
    """The table in a JSON object that was read from ``path``.

    Raises:
        InputError: another version, or keys that are missing or wrong.
    """
    if document.get("format") != FORMAT:
        raise InputError(f"{path!r} has the format {document.get('format')!r}, this version reads {FORMAT!r}: trace it again")
    try:
        return table_of({key: value for key, value in document.items() if key != "format"})
    except InputError as error:
        raise InputError(f"table {path!r}: {error}; trace the model again") from error


def table_of(document: dict[str, Any]) -> ModelTable:
    """The table that a JSON object without a format describes.

    Raises:
        InputError: keys are missing or wrong.
    """
    if unknown := sorted(document.keys() - ModelTable.__dataclass_fields__.keys()):
        raise InputError(f"it has the key {unknown[0]!r}, which no table has")
    if wrong := next((n for n in _numbers(document) if not -_ABSURD < n < _ABSURD), None):
        raise InputError(f"it holds {wrong}, but sizes are below {_ABSURD}")
    try:
        return _adapter().validate_python(document)
    except ValidationError as error:
        fault = error.errors()[0]
        raise InputError(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}") from error


def write_table(path: str | Path, table: ModelTable) -> None:
    """Write a table as JSON, a kernel per line.

    Raises:
        InputError: ``path`` cannot be written.
    """
    write_text(path, _readable({"format": FORMAT, **_written(table)}) + "\n")


def _written(value: Any) -> Any:
    """The JSON value of a part of a table; fields with their defaults are left out."""
    if isinstance(value, Growing):
        return [value.fixed, value.each] if value.each else value.fixed
    if isinstance(value, tuple):
        return [_written(one) for one in value]
    if not is_dataclass(value):
        return value
    given = {one.name: getattr(value, one.name) for one in fields(value)}
    return {one.name: _written(given[one.name]) for one in fields(value) if given[one.name] != one.default}


def _numbers(tree: object) -> Iterator[float]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for one in tree:
            yield from _numbers(one)
    elif isinstance(tree, (int, float)):
        yield tree


def _readable(tree: object, indent: str = "") -> str:
    """JSON in which what fits a line is one."""
    line = json.dumps(tree, ensure_ascii=True)
    if not isinstance(tree, (dict, list)) or len(indent) + len(line) <= 160:
        return line
    inner = indent + " "
    if isinstance(tree, dict):
        parts = [f"{json.dumps(key)}: {_readable(value, inner)}" for key, value in tree.items()]
        return "{\n" + ",\n".join(inner + part for part in parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _readable(one, inner) for one in tree) + f"\n{indent}]"
