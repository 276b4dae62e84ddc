"""Optimizers: the states of each, the bytes that an update reads and writes, and the processors with a kernel.

Sizes hold for mixed precision as for fp32; masters that an optimizer has in mixed precision only are counted there alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from autohete.workload.model import Product


class Optimizer(StrEnum):
    """The optimizer of all trained parameters.

    ``ADAMW_BF16`` has its master weights and moments in bf16. With ``PURE_BF16`` there are no masters: parameters in bf16 are
    updated as they are. ``MUON`` updates the matrices of blocks, and AdamW the rest:
    embedding, head, norms and biases. ``LOMO`` and ``ADALOMO`` have no masters either, and update within backward.
    """

    ADAMW = "adamw"
    ADAMW_BF16 = "adamw_bf16"
    ADAMW_PURE_BF16 = "adamw_pure_bf16"
    ADAMW8BIT = "adamw8bit"
    ADAMW8BIT_PURE_BF16 = "adamw8bit_pure_bf16"
    SGD = "sgd"
    SGD_MOMENTUM = "sgd_momentum"
    ADAFACTOR = "adafactor"
    ADAFACTOR_PURE_BF16 = "adafactor_pure_bf16"
    MUON = "muon"
    MUON_PURE_BF16 = "muon_pure_bf16"
    CAME = "came"
    LOMO = "lomo"
    ADALOMO = "adalomo"


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """One row of the table, bytes per parameter.

    Args:
        label: in words.
        source: the source of the figures.
        states: moments.
        master: master weights in mixed precision.
        cpu_kernel: has a fused kernel for the CPU.
        shares: any elements can be updated by themselves, as ZeRO and shared updates need it.
        temporaries: traffic in addition to one pass over states, master, gradient and parameter.
        workspace: temporaries that are held at a time, of one parameter after another.
        number: bytes of a number of the states.
        vector_states: moments of what is no matrix; None: ``states``.
        factors: statistics of which a matrix has a row and a column each, besides ``states``.
        orthogonalised: matrices are updated as a whole.
        in_backward: updates within backward only, where gradients of all parameters are never there together.
    """

    label: str
    source: str
    states: float
    master: int = 4
    cpu_kernel: bool = False
    shares: bool = True
    temporaries: float = 0
    workspace: int = 0
    number: int = 4
    vector_states: float | None = None
    factors: int = 0
    orthogonalised: bool = False
    in_backward: bool = False


_ADAMW_STATES = 8
#: Elements that share an fp32 scale in 8-bit states.
_BLOCK = 256
_STATES_8BIT = 2 * (1 + 4 / _BLOCK)
_BITSANDBYTES = "bitsandbytes, optim/optimizer.py, Optimizer2State"
_FUSED_SGD = "torch 2.13, torch._fused_sgd_, for CPU and CUDA"
# Without fused kernel: squares (fp32 read, written), their means by row and column (8 read), the update (12), its norm (4)
# and scaling (8).
_ADAFACTOR = _Optimizer(
    "Adafactor",
    "transformers, optimization.py, no first moment",
    0,
    temporaries=40,
    shares=False,
    vector_states=4,
    factors=1,
)
_MUON = _Optimizer("Muon", "torch 2.13, optim/_muon.py", 4, shares=False, vector_states=8, orthogonalised=True)
# All in fp32, without fused kernel, in the order of ``step``; what reads or writes gradient (2), moment (8), master (8) and
# parameter (2) once is no temporary. Cast (2 + 4), norm of the parameter (4), squares and eps (16), their means (8), the
# approximation (4) times the gradient (12), its norm and scaling (12), moment (20), residual, its square and eps (28), their
# means (8), the approximation (4) times the moment (12), decay (8), times the rate (8), negated (8), added (12): 170 - 18.
# At the largest, the cast and three arrays are held: the update, the residual, and its square or the approximation.
_CAME = _Optimizer(
    "CAME",
    "github yangluo7/CAME at e77c5c0, came_pytorch/CAME.py",
    4,
    temporaries=152,
    workspace=16,
    shares=False,
    vector_states=8,
    factors=2,
)
# Without fused kernel: gradient and parameter are cast to fp32 (6 + 6), the parameter is updated (12) and copied back (6), less
# one access to each of 16 bits and a second to the parameter. Both casts are held.
_LOMO = _Optimizer(
    "LOMO",
    "github OpenLMLab/LOMO at 45d4bac, lomo_optim/lomo.py, fuse_update",
    0,
    master=0,
    temporaries=24,
    workspace=8,
    in_backward=True,
)
# The same, and of the gradient: division by the scale of the loss (8), squares and eps (16), their means (8), the approximation
# (4) times the gradient (12), its norm and scaling (12), norm of the parameter (4). Cast gradient, update and cast parameter
# are held.
_ADALOMO = replace(
    _LOMO,
    label="AdaLOMO",
    source="github OpenLMLab/LOMO at 45d4bac, lomo_optim/adalomo.py, fuse_update",
    temporaries=88,
    workspace=12,
    shares=False,
    vector_states=4,
    factors=1,
)
_OPTIMIZERS = {
    Optimizer.ADAMW: _Optimizer(
        "AdamW", "torch 2.13, torch._fused_adamw_; DeepSpeed csrc/adam/cpu_adam.cpp", _ADAMW_STATES, cpu_kernel=True
    ),
    # bf16_master_weights_and_grads with bf16_optimizer_states: 2 bytes of master and two of each moment, also with offload.
    Optimizer.ADAMW_BF16: _Optimizer("AdamW in bf16", "DeepSpeed pulls 7700 and 8010", 4, master=2, cpu_kernel=True, number=2),
    # torch makes moments in the format of parameters, which torchtune's recipes keep in bf16.
    Optimizer.ADAMW_PURE_BF16: _Optimizer("AdamW in bf16 without masters", "torch 2.13, optim/adamw.py", 4, master=0, number=2),
    # Two states of 8 bit with a scale for each block: of 256 elements since 0.44, of 2048 before (as at 06029dd6). Tensors of
    # fewer than 4096 elements keep 32 bit, which is not counted.
    Optimizer.ADAMW8BIT: _Optimizer("8-bit AdamW", _BITSANDBYTES, _STATES_8BIT, number=1),
    Optimizer.ADAMW8BIT_PURE_BF16: _Optimizer(
        "8-bit AdamW, bf16 without masters", _BITSANDBYTES, _STATES_8BIT, master=0, number=1
    ),
    Optimizer.SGD: _Optimizer("SGD", _FUSED_SGD, 0, cpu_kernel=True),
    Optimizer.SGD_MOMENTUM: _Optimizer("SGD with momentum", _FUSED_SGD, 4, cpu_kernel=True),
    Optimizer.ADAFACTOR: _ADAFACTOR,
    Optimizer.ADAFACTOR_PURE_BF16: replace(
        _ADAFACTOR,
        label="Adafactor in bf16 without masters",
        source="torch 2.13, optim/_adafactor.py",
        vector_states=2,
        number=2,
        master=0,
        temporaries=20,
    ),
    Optimizer.MUON: _MUON,
    Optimizer.MUON_PURE_BF16: replace(
        _MUON, label="Muon in bf16 without masters", states=2, vector_states=4, number=2, master=0
    ),
    Optimizer.CAME: _CAME,
    Optimizer.LOMO: _LOMO,
    Optimizer.ADALOMO: _ADALOMO,
}
#: Newton-Schulz iterations of Muon.
_ROUNDS = 5


def optimizer_source(optimizer: Optimizer) -> str:
    """Where the figures of ``optimizer`` come from."""
    return _OPTIMIZERS[optimizer].source


def optimizer_label(optimizer: Optimizer) -> str:
    """The optimizer in words."""
    return _OPTIMIZERS[optimizer].label


def has_cpu_kernel(optimizer: Optimizer) -> bool:
    """Whether the CPU can update with it."""
    return _OPTIMIZERS[optimizer].cpu_kernel


def has_masters(optimizer: Optimizer) -> bool:
    """Whether parameters of 16 bit have master weights."""
    return _OPTIMIZERS[optimizer].master > 0


def updates_any_share(optimizer: Optimizer) -> bool:
    """Whether a part of a unit can be updated by itself."""
    return _OPTIMIZERS[optimizer].shares


def state_bytes(optimizer: Optimizer, trained: int, matrices: Sequence[Product], *, mixed: bool) -> int:
    """Bytes of optimizer states, and of master weights, if any.

    Args:
        optimizer: the optimizer.
        trained: trained parameters.
        matrices: those of them that are matrices of a block; the rest are vectors, or matrices of embedding and head.
        mixed: parameters are in 16 bit.
    """
    row = _OPTIMIZERS[optimizer]
    inside = sum(matrix.parameters for matrix in matrices)
    sides = sum(matrix.matrices * (matrix.columns + matrix.inner) for matrix in matrices)
    of_vectors = row.states if row.vector_states is None else row.vector_states
    of_matrices = row.states * inside + row.factors * row.number * sides
    return math.ceil(row.master * trained * mixed + of_matrices + of_vectors * (trained - inside))


def state_tensors(optimizer: Optimizer, *, mixed: bool) -> tuple[float, list[float]]:
    """Bytes per parameter of the master weights, and of each moment, which are tensors of their own.

    Args:
        optimizer: the optimizer.
        mixed: parameters are in 16 bit.
    """
    row = _OPTIMIZERS[optimizer]
    moments = round(row.states / row.number)
    return row.master * mixed, [row.states / moments] * moments if moments else []


def moment_bytes(optimizer: Optimizer) -> float:
    """Bytes of moments per parameter that a CPU kernel reads and writes."""
    return _OPTIMIZERS[optimizer].states


def temporary_bytes(optimizer: Optimizer) -> float:
    """Traffic of temporaries per parameter."""
    return _OPTIMIZERS[optimizer].temporaries


def workspace_bytes(optimizer: Optimizer) -> int:
    """Temporaries that are held at a time, per element of the parameter that is updated."""
    return _OPTIMIZERS[optimizer].workspace


def updates_in_backward(optimizer: Optimizer) -> bool:
    """Whether it updates within backward only."""
    return _OPTIMIZERS[optimizer].in_backward


def orthogonalised(optimizer: Optimizer, matrices: Sequence[Product]) -> tuple[Product, ...]:
    """The matrices that an update on the GPU orthogonalises."""
    return tuple(matrices) if _OPTIMIZERS[optimizer].orthogonalised else ()


def newton_schulz(matrix: Product) -> tuple[tuple[int, int, int], ...]:
    """Products of Muon's iterations on one matrix, as rows, columns and inner size: with r the smaller side and c the larger,
    ``20 r^2 c + 10 r^3`` FLOPs.
    """
    r, c = sorted((matrix.columns, matrix.inner))
    return ((r, r, c), (r, r, r), (r, c, r)) * _ROUNDS
