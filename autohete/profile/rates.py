"""The rates of a GPU: what a matrix product, a pass of kernels and an update on it take."""

from __future__ import annotations

import math

from autohete.hardware import Gpu
from autohete.profile.attention import MASK_READS, attention_speed, default_attention
from autohete.profile.kernels.gpt2 import IMPLEMENTATIONS
from autohete.workload import MASKED_ATTENTION, Precision, Workload
from autohete.workload.model import Product
from autohete.workload.optimizers import newton_schulz, orthogonalised, state_bytes, temporary_bytes, workspace_bytes

#: cuBLAS processes K in steps and fills its pipeline once per tile; a product of inner size K reaches
#: K / (K + 256) of the rate of a long one (NVIDIA, "Matrix Multiplication Background", shape of the K sweep).
_GEMM_INNER_HALF = 256
#: Share of that rate in the small products of linear attention, of chunks of 64 tokens, and in triangular solves. Assumed.
CHUNKED_SHARE = 0.65
#: Backward of attention computes five products where forward computes two (Dao et al. 2022, algorithm 4).
ATTENTION_BACKWARD = 2.5
#: FLOPs/s of a singular value decomposition, on any GPU: products with vectors, which wait for memory, alternate with small
#: ones. Derived from up to 20 minutes for the projectors of Llama 7B, 4.7e14 FLOPs in 224 matrices (GaLore 2, arXiv 2504.20437,
#: as reviewed at themoonlight.io, which names no GPU): the least that it reaches.
_SVD_FLOPS = 3.9e11
#: Numbers that foreach kernels read and write for a parameter besides the 7 of a fused kernel. With m, v and r the moments and
#: the root: decay (2), moving averages of m (3) and v (2 + 3), root (2), bias correction (2) and epsilon (2) on r, and the
#: parameter from m and r (4).
_FOREACH_ACCESSES = 20 - 7
#: A wave of tiles starts and ends unevenly, which costs about a quarter of a wave: 32 and 88 % of the rate at n = 8192 were
#: measured at n = 512 and 2048 (RTX 3090 Ti, github mli/transformers-benchmarks, micro_bench.ipynb).
_TILE, _WAVES_HALF = 128, 0.25
#: FLOPs of a multiprocessor in a cycle if 16-bit rows are an odd number of elements long, and an even one but no multiple of 8,
#: which copies of 16 bytes to shared memory need: 122 and 256 TFLOP/s on an H100 (heads of 50,257, 50,258 and 50,260 tokens,
#: forward and backward together; benchmarks/gpu_rates.json). Assumed for other GPUs as well.
_ODD_ROWS, _EVEN_ROWS, ALIGNED_ELEMENTS = 467.0, 980.0, 8
#: fp32 lanes of a multiprocessor before compute capability 8.6, and since (CUDA Programming Guide, throughput of arithmetic
#: instructions).
_LANES = 64, 128


def small_product_factors(
    rows: float, columns: float, inner: float, batch: float, multiprocessors: int | None
) -> tuple[float, float]:
    """How much longer a product takes than at the rate of a large one: by uneven waves of tiles, and by filling pipelines."""
    uneven = 1.0
    if multiprocessors is not None:
        # Fractions of tiles: with whole tiles, 129 rows would be faster than 128, as more tiles share a wave's loss.
        waves = batch * rows * columns / _TILE**2 / multiprocessors
        uneven = (waves + _WAVES_HALF) / waves
    return uneven, (inner + _GEMM_INNER_HALF) / inner


class Rates:
    """The rates at which ``gpu`` computes ``workload``."""

    def __init__(self, workload: Workload, gpu: Gpu, launch_seconds: float) -> None:
        self.workload = workload
        self.flops_32bit = gpu.peak_32bit_flops * (gpu.gemm_efficiency_32bit or gpu.gemm_efficiency)
        full = (workload.autocast or workload.precision) is Precision.FP32
        self.flops = self.flops_32bit if full else gpu.peak_16bit_flops * gpu.gemm_efficiency
        self.flops_8bit = (gpu.peak_8bit_flops or 0.0) * gpu.gemm_efficiency
        self.bandwidth = gpu.memory_bandwidth * gpu.memory_efficiency
        self.lanes = gpu.peak_32bit_flops / 2  # instructions/s: a multiply-add is two FLOPs
        self.multiprocessors, self.capability = gpu.multiprocessors, gpu.compute_capability
        of_old, of_new = _LANES
        self.cycles = self.lanes / (of_old if (self.capability or 8.0) < 8.6 else of_new)  # of all multiprocessors, in a second
        self.overhead, self.launch = gpu.kernel_overhead_seconds, launch_seconds
        self.element = workload.compute_bytes
        self.kernels = IMPLEMENTATIONS[workload.kernels]

    def _gemm_seconds(
        self,
        rows: float,
        columns: float,
        inner: float,
        batch: int = 1,
        *,
        fp8: bool = False,
        adds: bool = False,
        fp32: bool = False,
        width: int = ALIGNED_ELEMENTS,
    ) -> float:
        """Time of ``rows x inner`` times ``inner x columns``, ``batch`` times: the slower of arithmetic and memory. With
        fp8 the operands have one byte each; the result has not. With fp32 both have four, whatever the workload's precision.
        One that ``adds`` to a sum reads that as well. While a tile's pipeline fills, and while its result is written, it waits
        for memory; so the product takes at most as long as both after each other, which bounds those of small inner size, such
        as adapters. Rows in memory are multiples of ``width`` elements long, which limits the rate if that is no multiple of 8.
        """
        waves, filling = small_product_factors(rows, columns, inner, batch, self.multiprocessors)
        flops = self.flops_32bit if fp32 else self.flops_8bit if fp8 else self.flops
        arithmetic = 2 * batch * rows * columns * inner / flops * waves
        element = 4 if fp32 else self.element
        operand = 1 if fp8 else element
        results = (1 + adds) * element * rows * columns
        traffic = batch * (operand * (rows * inner + inner * columns) + results) / self.bandwidth
        seconds = max(traffic, min(arithmetic * filling, arithmetic + traffic))
        if element != 2 or fp8 or width % ALIGNED_ELEMENTS == 0:
            return seconds
        return max(seconds, 2 * batch * rows * columns * inner / (self.cycles * (_ODD_ROWS if width % 2 else _EVEN_ROWS)))

    def _split_gemm_seconds(self, rows: float, columns: float, inner: float, width: int) -> float:
        """The same where few tiles sum over much: the sum is split, so that all multiprocessors take part (CUTLASS, "Efficient
        GEMM in CUDA", split-K, which cuBLAS chooses as well).
        """
        parts = max(1, round((self.multiprocessors or 1) * _TILE**2 / (rows * columns)))
        return self._gemm_seconds(rows, columns, inner / parts, parts, width=width)

    def _attention_seconds(
        self, flops: float, sizes: tuple[int, int], keys: float, *, backward: bool, masked: bool = False
    ) -> float:
        """Time of ``flops`` in fused attention, with queries and values of ``sizes`` elements, and so many keys a query. If it
        is ``masked``, each head reads its scores' part of the mask as well.
        """
        made = self.workload.attention
        if made is None or (masked and made not in MASKED_ATTENTION):
            made = default_attention(self.capability, sizes[1], masked=masked)
        speed = attention_speed(made, self.capability)
        seconds = flops / self.flops * speed.slowdown(sum(sizes) / 2, keys, backward=backward)
        if not masked:
            return seconds
        scores = flops / (ATTENTION_BACKWARD if backward else 1) / (2 * sum(sizes))
        return seconds + MASK_READS[made][backward] * self.element * scores / self.bandwidth

    def _host_seconds(self, kernels: float, *, backward: bool = False, more: float = 0.0) -> float:
        """Time in which the host launches ``kernels`` kernels of a pass, with ``more`` operations."""
        return (kernels * (self.kernels.host_backward if backward else self.kernels.host_forward) + more) * self.launch

    def _pass_seconds(self, busy: float, kernels: float, host: float) -> float:
        """Time of a pass with ``busy`` seconds of work in ``kernels`` kernels: no faster than the host, which runs ahead of the
        GPU within a pass.
        """
        return max(busy + kernels * self.overhead, host)

    def _update(self, unit: int, trained: int) -> tuple[float, int, int]:
        """Time of an update of ``trained`` parameters on the GPU, the size of its states, and of its temporaries. States and
        masters are read and written, gradients read, and parameters written; without masters these are read, too.
        """
        w, element = self.workload, self.workload.precision.element_bytes
        optimizer, matrices, galore = w.training.optimizer, w.trained_matrices(unit), w.training.galore
        states = state_bytes(optimizer, trained, matrices, mixed=w.precision.is_mixed)
        accesses = 2 if w.has_masters else 3
        largest = max((one.parameters // one.matrices for one in w.tensors(unit, trained=True)), default=0)
        workspace = workspace_bytes(optimizer) * largest
        seconds = trained * (accesses * element + temporary_bytes(optimizer)) / self.bandwidth + self.overhead
        if galore is not None:
            for matrix in w.projected_matrices(unit):
                smaller = galore.states_of(matrix)
                states += math.ceil(
                    state_bytes(optimizer, smaller.parameters, (), mixed=False)
                    - state_bytes(optimizer, matrix.parameters, (), mixed=False)
                    + (4 if w.has_masters else element) * galore.projector_of(matrix).parameters
                )
                projected, held = self._projected(matrix, smaller, galore.gap)
                seconds, workspace = seconds + projected, max(workspace, held)
        seconds += (2 * states + _FOREACH_ACCESSES * w.foreach_bytes * trained) / self.bandwidth
        for matrix in orthogonalised(optimizer, matrices):
            products = newton_schulz(matrix)
            seconds += (
                sum(self._gemm_seconds(*sizes, batch=matrix.matrices) for sizes in products) + len(products) * self.overhead
            )
        return seconds, states, workspace

    def _projected(self, matrix: Product, states: Product, gap: int) -> tuple[float, int]:
        """What GaLore adds to the update of a matrix, and what it holds at the most.

        Two products. Copies: the parameter is cloned, the update scaled and read once more (``adamw8bit.py``, ``step``). Every
        ``gap`` updates a decomposition in fp32 of ``6 m n^2 + 20 n^3`` FLOPs (Golub and Van Loan, "Matrix Computations",
        section 8.6, R-SVD with vectors), which holds the cast gradient, the copy that it destroys, and both factors.
        """
        large, rank = states.columns, states.inner
        small = matrix.parameters // matrix.matrices // large
        products = ((large, rank, small), (large, small, rank))
        seconds = sum(self._gemm_seconds(*sizes, batch=matrix.matrices) + self.overhead for sizes in products)
        seconds += 5 * self.element * matrix.parameters / self.bandwidth
        decomposition = (6 * large * small**2 + 20 * small**3) / _SVD_FLOPS
        held = 4 * (3 * large * small + small**2)
        return seconds + matrix.matrices * decomposition / gap, held
