"""Workloads whose sizes are those of a traced model."""

from __future__ import annotations

from dataclasses import dataclass

from autohete.errors import InputError
from autohete.hashing import hashed_once
from autohete.workload import Workload
from autohete.workload.model import Product
from autohete.workload.optimizers import Optimizer
from autohete.workload.table import ModelTable, TracedKernel
from autohete.workload.training import Training


@hashed_once
@dataclass(frozen=True, slots=True, kw_only=True)
class TracedWorkload(Workload):
    """A model of any architecture, as its table describes it, and the batch of one GPU.

    The batch, the micro-batches, clipping and the optimizer are free; all else is what was traced. See :func:`traced_workload`.

    Args:
        table: of the model.
    """

    table: ModelTable

    def __post_init__(self) -> None:
        Workload.__post_init__(self)
        table = self.table
        for field, value in _fixed(table).items():
            if getattr(self, field) != value:
                raise InputError(
                    f"{field} is {getattr(self, field)}, but the table of {table.name} was traced with {value}: leave it out, "
                    "or change the module and trace it again"
                )
        if self.training != Training(
            optimizer=self.training.optimizer, galore=self.training.galore, foreach=self.training.foreach
        ):
            raise InputError(
                f"{self.training}: a traced model is trained as it was traced; add adapters to the module, or freeze its "
                "parameters, and trace it again"
            )
        if self.precision.element_bytes != table.precision.element_bytes:
            raise InputError(f"precision is {self.precision}, but {table.name} was traced in {table.precision}: trace it again")
        if len(table.batch_sizes) == 1 and self.batch_size != table.batch_sizes[0]:
            raise InputError(
                f"batch_size is {self.batch_size}, but the sizes of {table.name} do not grow linearly with the batch, and it "
                f"was traced with {table.batch_sizes[0]}: trace it again"
            )

    @property
    def largest_tensor(self) -> int:
        return max(one.count for kind in self.table.kinds for one in kind.parameters)

    @property
    def firsts_alike(self) -> tuple[int, ...]:
        """For each unit, the first one that is equal. What several units use counts to the first of all."""
        return (0, *(self.table.units.index(kind, 1) for kind in self.table.units[1:]))

    def described(self, unit: int) -> str:
        return self.table.unit(unit).kind

    def unit_parameters(self, unit: int) -> int:
        return sum(one.count for one in self.table.unit(unit).parameters)

    def frozen_parameters(self, unit: int) -> int:
        return sum(one.count for one in self.table.unit(unit).parameters if one.frozen)

    def tensors(self, unit: int, *, trained: bool = False) -> tuple[Product, ...]:
        return tuple(Product(one.count, 1) for one in self.table.unit(unit).parameters if not (trained and one.frozen))

    def trained_matrices(self, unit: int) -> tuple[Product, ...]:
        if not self.is_inner(unit) and self.training.optimizer in (Optimizer.MUON, Optimizer.MUON_PURE_BF16):
            return ()
        shapes = [one.shape for one in self.table.unit(unit).parameters if not one.frozen and len(one.shape) > 1]
        # Adafactor takes what is before the last two dimensions as so many matrices.
        return tuple(Product(shape[-2], shape[-1], matrices=_times(shape[:-2])) for shape in shapes)

    def projected_matrices(self, unit: int) -> tuple[Product, ...]:
        if self.training.galore is None or not self.is_inner(unit):
            return ()
        shapes = [one.shape for one in self.table.unit(unit).parameters if not one.frozen and len(one.shape) == 2]
        return tuple(Product(*shape) for shape in shapes)

    @property
    def model_flops(self) -> int:
        units = [self.table.unit(unit) for unit in range(self.unit_count)]
        kernels = [kernel for unit in units for kernel in (*unit.forward, *unit.backward)]
        return self.micro_batches * sum(flops(kernel, self.batch_size) for kernel in kernels)

    @property
    def forward_flops(self) -> int:
        units = [self.table.unit(unit) for unit in range(self.unit_count)]
        return sum(flops(kernel, self.batch_size) for unit in units for kernel in unit.forward)


def traced_workload(table: ModelTable) -> TracedWorkload:
    """The workload of a table, with the default batch, or the one that was traced if it holds for that one only."""
    batch = {"batch_size": table.batch_sizes[0]} if len(table.batch_sizes) == 1 else {}
    given = _fixed(table) | batch | {"precision": table.precision}
    return TracedWorkload(name=table.name, table=table, **given)  # type: ignore[arg-type]


def flops(kernel: TracedKernel, batch_size: int) -> int:
    """Model FLOPs of a row of a table."""
    products = [[size.at(batch_size) for size in sizes] for sizes in kernel.products]
    return kernel.count * (sum(2 * _times(sizes) for sizes in products) + kernel.flops.at(batch_size))


def _times(sizes: tuple[int, ...] | list[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _fixed(table: ModelTable) -> dict[str, object]:
    """The figures of a workload that are the table's."""
    plain = Workload("plain", 1, 1, 1)
    names = ("units", "chunked_loss", "loss_chunks", "architecture", "sample_lengths", "document_length", "looped_experts")
    same = {name: getattr(plain, name) for name in (*names, "attention_mask", "loss", "keeps_logits", "autocast")}
    return {
        "hidden_size": table.width,
        "transformer_blocks": len(table.units) - 2,
        "heads": 1,
        "vocabulary_size": table.outputs,
        "sequence_length": table.sequence_length,
        "tied_embeddings": table.tied,
        "kernels": table.kernels,
        **same,
    }
