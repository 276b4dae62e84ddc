"""``autohete trace``, and ``--module`` of the commands that simulate."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from autohete.cli.outputs import check_outputs
from autohete.cli.question import Whole
from autohete.cli.runtime import check_runtime
from autohete.errors import InputError
from autohete.workload import Kernels, Precision

if TYPE_CHECKING:
    from autohete.workload.traced import TracedWorkload


def trace(
    module: str,
    out: str,
    /,
    *,
    sequence_length: Whole | None = None,
    batch_size: Whole | None = None,
    precision: Literal["bf16", "fp16", "fp32"] | None = None,
    kernels: Literal["eager", "eager_flash"] | None = None,
    block_names: str | None = None,
) -> None:
    """Trace any module on the CPU, without weights, and write its table: units, kernels, saved tensors and parameters.

    Parameters
    ----------
    module:
        FILE.py:FUNCTION that returns the module, (module, inputs) or (module, inputs, loss); a model type or class of
        transformers with changed keys, NAME[:key=value,...]; or a config.json.
    out:
        The file to write (.json); --model of `autohete simulate`, `plan` and `sweep` reads it, without torch.
    sequence_length:
        Tokens per sequence, for which the table holds; default 1024.
    batch_size:
        The batch for which the table holds if its sizes do not grow linearly with the batch, by default 8; otherwise it holds
        for all.
    precision:
        Type of parameters and passes; default bf16.
    kernels:
        Attention of a model of transformers: eager (scores in memory) or eager_flash (PyTorch's fused attention, the default).
    block_names:
        Names of the blocks, such as encoder.layer,decoder.layer, if they are not found by themselves.
    """
    from autohete.workload.table import write_table

    check_outputs({"OUT": out})
    asked = None if precision is None else Precision(precision)
    workload = traced(module, sequence_length, asked, None if kernels is None else Kernels(kernels), batch_size, block_names)
    table = workload.table
    write_table(out, table)
    batches = "any batch" if len(table.batch_sizes) > 1 else f"batches of {table.batch_sizes[0]} alone"
    tokens = f" of {table.sequence_length} tokens" if table.sequence_length > 1 else ""
    print(
        f"{table.name}: {workload.parameters / 1e6:,.1f}M parameters in {workload.unit_count} units, "
        f"{workload.forward_flops / workload.batch_size / 1e9:,.1f} GFLOP per sample{tokens} forward; {out} is for {batches}"
    )


@lru_cache(maxsize=64)
def traced(
    module: str,
    sequence_length: int | None,
    precision: Precision | None,
    kernels: Kernels | None,
    batch_size: int | None,
    block_names: str | None,
) -> TracedWorkload:
    """The workload of a module; options that are None have their defaults.

    Raises:
        InputError: PyTorch is not installed, or the module cannot be traced.
    """
    check_runtime("tracing a module")
    if kernels not in (None, Kernels.EAGER, Kernels.EAGER_FLASH):
        raise InputError(f"--kernels is {kernels}, but a module runs its own: give eager or eager_flash, or leave it out")
    for option, value in (("--sequence-length", sequence_length), ("--batch-size", batch_size)):
        if value is not None and value < 1:
            raise InputError(f"{option} is {value}: give at least 1")
    from autohete.tracing import trace as run
    from autohete.workload.traced import traced_workload

    table = run(
        module,
        sequence_length=1024 if sequence_length is None else sequence_length,
        precision=precision or Precision.BF16,
        kernels=kernels or Kernels.EAGER_FLASH,
        batch_size=8 if batch_size is None else batch_size,
        blocks=None if block_names is None else block_names.split(","),
    )
    return traced_workload(table)
