"""The cost that low-rank adapters and a quantised base add to the passes of a unit.

An adapter is computed as PEFT does it (00336949, ``tuners/lora/layer.py``, ``Linear.forward``): ``result + B(A(x)) * scaling``
in two products and two elementwise kernels; in backward the gradient is scaled, and that of ``x`` is added to the base one. A
weight in NF4 is dequantised in every pass that uses it, as bitsandbytes does (``autograd/_functions.py``, ``MatMul4Bit``): its
bytes are read and 16 bit (or fp32) written, in three kernels with double quantisation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass

from autohete.workload import Workload
from autohete.workload.model import Product
from autohete.workload.training import NF4_BYTES

#: Elementwise accesses of an adapter: to its result in forward and in backward, to its input in backward, per element.
_RESULT_FORWARD, _RESULT_BACKWARD, _INPUT_BACKWARD = 5, 2, 3
#: What the host does for an adapter besides launching these kernels, forward and backward: casts, dropout that drops nothing,
#: modules within modules; and the modules that are called. PEFT 0.21.2 (benchmarks/host_time.py).
PEFT_OPERATIONS, PEFT_MODULES = (8, 9), 4
#: Kernels of an adapter forward and backward, and of a dequantisation.
_KERNELS, _DEQUANTISE_KERNELS = (4, 6), 3


@dataclass(frozen=True, slots=True)
class Additions:
    """The cost added to a unit: GPU time without launches, kernels, bytes kept from forward to backward, and temporaries."""

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_kernels: int = 0
    backward_kernels: int = 0
    kept_bytes: int = 0
    workspace_bytes: int = 0

    def __add__(self, other: Additions) -> Additions:
        return Additions(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))


def additions(
    workload: Workload, unit: int, product_seconds: Callable[[Product], tuple[float, float]], bandwidth: float
) -> Additions:
    """Return the cost that adapters and quantisation add to ``unit``.

    Args:
        workload: the model and its training.
        unit: counted from 0.
        product_seconds: time of a product forward and backward.
        bandwidth: of the GPU's memory in bytes/s.
    """
    element, tokens, layers = workload.precision.element_bytes, workload.tokens, workload.adapted_layers(unit)
    times = [product_seconds(product) for product in workload.adapter_products(unit)]
    results = sum(layer.shape.rows * layer.shape.columns for layer in layers)
    inputs = sum(layer.shape.rows * layer.shape.inner for layer in layers)
    rank = workload.training.lora.rank if workload.training.lora else 0
    traffic = element * tokens / bandwidth
    quantised = workload.linear_layers(unit) if workload.quantised_parameters(unit) else ()
    dequantised = workload.quantised_parameters(unit) * float(NF4_BYTES + element) / bandwidth
    return Additions(
        forward_seconds=sum(forward for forward, _ in times) + _RESULT_FORWARD * results * traffic + dequantised,
        backward_seconds=sum(backward for _, backward in times)
        + (_RESULT_BACKWARD * results + _INPUT_BACKWARD * inputs) * traffic
        + dequantised,
        forward_kernels=_KERNELS[0] * len(layers) + _DEQUANTISE_KERNELS * len(quantised),
        backward_kernels=_KERNELS[1] * len(layers) + _DEQUANTISE_KERNELS * len(quantised),
        kept_bytes=element * tokens * rank * sum(layer.shape.rows for layer in layers),
        # One matrix at a time.
        workspace_bytes=max((element * layer.shape.columns * layer.shape.inner for layer in quantised), default=0),
    )
