"""The cost that low-rank adapters and a quantised base add to the passes of a unit.

An adapter is computed as PEFT does it (00336949, ``tuners/lora/layer.py``, ``Linear.forward``): ``result + B(A(x)) * scaling``
in two products and two elementwise kernels; in backward the gradient is scaled, and that of ``x`` is added to the base one.
Adapters in fp32 that get a cast input compute all that in fp32, without TF32, which PyTorch does not use by itself. A weight in
NF4 is dequantised in every pass that uses it, as bitsandbytes does (``autograd/_functions.py``, ``MatMul4Bit``): its
bytes are read and 16 bit (or fp32) written, in three kernels with double quantisation. One in GPTQ's format is dequantised in
forward alone, and its product keeps the result.

What adapters keep depends on how they are held (:class:`~autohete.workload.training.Adapters`): the result of A, and if their
input is cast, a copy of it in each layer, and under autocast one of A and B. With dropout, a kernel reads the input as the
adapter gets it and writes what is left of it, and a mask of a byte an element, so that no input is shared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass

from autohete.profile.kernels.gpt2 import Operation
from autohete.workload import EAGER_KERNELS, Workload
from autohete.workload.model import Attention, Product
from autohete.workload.training import LAST, NF4_BYTES, Adapters, LinearLayer

_FP32_BYTES = 4
#: What the host does for an adapter besides launching these kernels, forward and backward: casts, dropout that drops nothing,
#: modules within modules (5 to 16 and 2 to 8 in several counts); the modules that are called, and the parameters of A and B.
#: PEFT 0.21.2 (benchmarks/host_time.py).
PEFT_OPERATIONS, PEFT_MODULES, PEFT_TENSORS = (6, 4), 4, 2
#: Kernels of an adapter forward and backward, and of a dequantisation.
_KERNELS, _DEQUANTISE_KERNELS = (4, 6), 3
#: Dequantisation of a matrix in GPTQ's format. Kernels: four for the zeros, and five for the weights, which shift in 32 bit,
#: cast to 8, mask, subtract the zeros and multiply by the scales. Bytes that these read and write for each weight besides the
#: result: 1/2 and 4, 4 and 1, 1 and 1, 1 and 1, 1. Bytes that exist at a time: a shifted and a cast weight.
_GPTQ_KERNELS, _GPTQ_BYTES, _GPTQ_HELD = 9, 14.5, 5
#: Of an element of a mask of dropout.
_MASK_BYTES = 1


@dataclass(frozen=True, slots=True)
class Additions:
    """The cost added to a unit: GPU time without launches, kernels, bytes kept from forward to backward, and temporaries of
    both passes.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_kernels: int = 0
    backward_kernels: int = 0
    kept_bytes: int = 0
    forward_workspace_bytes: int = 0
    backward_workspace_bytes: int = 0

    def __add__(self, other: Additions) -> Additions:
        return Additions(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))


def shares_input(workload: Workload, layer: LinearLayer) -> bool:
    """Whether an adapter keeps the input of its layer as it is, rather than a copy in another format."""
    lora = workload.training.lora
    if lora is not None and lora.dropout:
        return False
    if workload.adapters is Adapters.PLAIN:
        return True
    if workload.adapters is Adapters.CAST or not (lora and lora.quantised):
        return False
    return not workload.is_prepared or (layer.mixes and layer.row == LAST)  # attention returns 16 bits


def input_cast(workload: Workload) -> Operation:
    """What a copy of a layer's input takes and keeps. Under autocast a layer casts its input from 16 bit to fp32, the format of
    the adapter, and autocast casts it back; what is in fp32 already is cast once, and layers in NF4 cast nothing else.
    """
    casts, kept = _cast_count(workload), _input_bytes(workload)
    source = "PEFT 0.21, tuners/lora/layer.py: Linear.forward"
    return Operation("cast", source, forward=casts, forward_fp32=casts, forward_kernels=casts, kept_copies=kept)


def _cast_count(workload: Workload) -> int:
    """How often an adapter's input is cast from one format to the other, forward; as often its gradient is, backward."""
    return 1 if workload.is_prepared else int(_drops_fp32(workload)) * (1 + (workload.adapters is Adapters.AUTOCAST))


def _drops_fp32(workload: Workload) -> bool:
    """Whether an adapter gets its input, of which dropout drops elements, in fp32."""
    if workload.adapters is Adapters.AUTOCAST:
        return workload.is_prepared or not (workload.training.lora and workload.training.lora.quantised)
    return workload.adapters is Adapters.CAST


def _input_bytes(workload: Workload) -> int:
    """Bytes of an element of an adapter's input, and of its result of A."""
    return 4 if workload.adapters is Adapters.CAST else workload.precision.element_bytes


def _kept_bytes(workload: Workload, layers: tuple[LinearLayer, ...]) -> int:
    """Bytes that the adapters of ``layers`` keep, besides inputs that they share."""
    assert workload.training.lora is not None
    element, rank = workload.precision.element_bytes, workload.training.lora.rank
    wide = _input_bytes(workload)
    kept = wide * workload.tokens * rank * sum(layer.shape.rows for layer in layers)
    copied = [layer.shape for layer in layers if not shares_input(workload, layer)]
    kept += wide * workload.tokens * sum(shape.rows * shape.inner for shape in copied)
    if workload.training.lora.dropout:
        kept += _MASK_BYTES * workload.tokens * sum(layer.shape.rows * layer.shape.inner for layer in layers)
    if workload.adapters is Adapters.AUTOCAST:
        kept += element * sum(product.parameters for layer in layers for product in layer.adapter_products(rank))
    return kept


def _accesses(workload: Workload, *, cloned: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes that an adapter's elementwise kernels access, forward and backward: for an element of its result, and of its input.

    The result is scaled and added, the gradient scaled, and that of the input added to the base one. PEFT's adapters of a base
    in NF4 clone its result first (``tuners/lora/bnb.py``, ``Linear4bit.forward``) and cast their own before they add it; others
    add it in fp32 and cast the sum.
    """
    narrow, stream = workload.precision.element_bytes, workload.stream_bytes
    cast = narrow + _FP32_BYTES
    if workload.adapters is Adapters.CAST:
        added = cast + 5 * narrow if cloned else cast + _FP32_BYTES + cast
        result = 2 * _FP32_BYTES + added, 2 * _FP32_BYTES + cast * (1 if cloned else 2)
    else:
        result = (2 * cloned + 2) * stream + 3 * narrow, 2 * narrow + cast * (stream != narrow)
    casts = cast * _cast_count(workload)
    return result, (casts, casts + 3 * stream)


def _prepared_casts(workload: Workload, unit: int) -> int:
    """Bytes that casts of a token access in a unit that is prepared, forward and as many backward: layers in NF4 take inputs in
    fp32, multiply in 16 bit and return fp32, and attention casts that back. What follows it is in 16 bit.
    """
    mixer = workload.block(unit).mixer
    if not (workload.is_prepared and workload.quantised_parameters(unit)):
        return 0
    wide = [one.shape for one in workload.linear_layers(unit) if not (one.mixes and one.row == LAST)]
    elements = sum(shape.rows * (shape.inner + shape.columns) for shape in wide)
    if isinstance(mixer, Attention) and any(one.mixes for one in workload.linear_layers(unit)):
        elements += mixer.query_size + 2 * mixer.key_value_size
    return (workload.precision.element_bytes + _FP32_BYTES) * elements


def additions(
    workload: Workload, unit: int, product_seconds: Callable[[Product, bool], tuple[float, float]], bandwidth: float
) -> Additions:
    """Return the cost that adapters and quantisation add to ``unit``.

    Args:
        workload: the model and its training.
        unit: counted from 0.
        product_seconds: time of a product forward and backward; True: in fp32.
        bandwidth: of the GPU's memory in bytes/s.
    """
    element, tokens, layers = workload.precision.element_bytes, workload.tokens, workload.adapted_layers(unit)
    times = [product_seconds(product, workload.adapters is Adapters.CAST) for product in workload.adapter_products(unit)]
    quantised = workload.linear_layers(unit) if workload.quantised_parameters(unit) else ()
    gptq = workload.training.lora is not None and workload.training.lora.gptq
    results = sum(layer.shape.rows * layer.shape.columns for layer in layers)
    inputs = sum(layer.shape.rows * layer.shape.inner for layer in layers)
    sizes = results * tokens / bandwidth, inputs * tokens / bandwidth
    cast = sum(product.parameters for product in workload.adapter_products(unit)) * (workload.adapters is Adapters.AUTOCAST)
    of_result, of_input = _accesses(workload, cloned=bool(quantised) and not gptq and workload.kernels in EAGER_KERNELS)
    read, held, kernels, passes = (
        (_GPTQ_BYTES, _GPTQ_HELD, _GPTQ_KERNELS, (1, 0)) if gptq else (float(NF4_BYTES), element, _DEQUANTISE_KERNELS, (1, 1))
    )
    dequantised = workload.quantised_parameters(unit) * (read + element) / bandwidth
    casts = ((element + _FP32_BYTES) * cast + _prepared_casts(workload, unit) * tokens) / bandwidth
    drops = workload.training.lora is not None and workload.training.lora.dropout > 0
    dropped = drops * (2 * (4 if _drops_fp32(workload) else element) + _MASK_BYTES) * tokens * inputs / bandwidth
    forward, backward = (
        sum(seconds[way] for seconds in times)
        + of_result[way] * sizes[0]
        + of_input[way] * sizes[1]
        + casts
        + dropped
        + dequantised * passes[way]
        for way in (0, 1)
    )
    workspace = held * max((layer.shape.columns * layer.shape.inner for layer in quantised), default=0)  # one matrix at a time
    return Additions(
        forward_seconds=forward,
        backward_seconds=backward,
        forward_kernels=(_KERNELS[0] + drops) * len(layers) + kernels * len(quantised),
        backward_kernels=(_KERNELS[1] + drops) * len(layers) + kernels * passes[1] * len(quantised),
        kept_bytes=(_kept_bytes(workload, layers) if layers else 0) + element * workload.quantised_parameters(unit) * gptq,
        forward_workspace_bytes=workspace,
        backward_workspace_bytes=workspace * passes[1],
    )
