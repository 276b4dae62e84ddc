"""Traces as PyTorch's profiler writes them, with times and rates of choice."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from autohete.profile.rates import small_product_factors
from autohete.schedule import D2H, GPU, H2D, Kind
from autohete.simulate import Simulation

MAIN, ENGINE, COMPUTE = 100, 101, 7
STREAMS = {H2D: 20, D2H: 21, GPU: COMPUTE}


@dataclass
class KinetoTrace:
    """Events of one process; times are in microseconds."""

    events: list[dict[str, Any]] = field(default_factory=list)
    launches: int = 0

    def add(self, category: str, name: str, start: float, end: float, thread: int = MAIN, **args: Any) -> None:
        """Add a range, an operator or a call of the host."""
        times = {"ts": 1e9 + start, "dur": end - start}
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": 100, "tid": thread, **times, "args": args})

    def gpu(
        self, name: str, start: float, end: float, issued: float, *, thread: int = MAIN, stream: int = COMPUTE, **args: Any
    ) -> None:
        """Add a kernel or a copy, and its launch."""
        self.launches += 1
        link = {"correlation": self.launches}
        self.add("cuda_runtime", "cudaLaunchKernel", issued, issued + 2, thread, **link)
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        times = {"ts": 1e9 + start, "dur": end - start}
        about = {"device": 0, "stream": stream, **link, **args}
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, **times, "args": about})

    def document(self, **others: Any) -> dict[str, Any]:
        """The whole document."""
        return {"schemaVersion": 1, "traceEvents": self.events, **others}

    def write(self, path: Path, **others: Any) -> Path:
        """Write it to ``path``."""
        path.write_text(json.dumps(self.document(**others)))
        return path


#: The rates of :func:`known_trace`, in SI units.
KNOWN = {
    "links.h2d.latency": 4e-6,
    "links.h2d.bandwidth": 20e9,
    "links.h2d.duplex_bandwidth": 15e9,
    "links.h2d.pageable_bandwidth": 6e9,
    "gpu.kernel_overhead": 1.5e-6,
    "gpu.gemm_efficiency": 0.7,
    "gpu.memory_efficiency": 0.8,
    "gpu.multiprocessors": 100,
    "interconnect.bandwidth": 50e9,
}
STEPS = 6
#: Properties that Kineto writes besides the events.
DEVICE = {"deviceProperties": [{"id": 0, "name": "GPU X", "totalGlobalMem": 40 << 30, "numSms": 100}]}


def known_trace(peak_flops: float, memory_bandwidth: float) -> KinetoTrace:
    """Six steps of 20 ms each, on a GPU of these rates of which the shares in :data:`KNOWN` are reached: a forward of 4 ms, a
    backward of 6 ms, an update of 1 ms; a wait of 2 ms for a copy, and 1 ms for another GPU.
    """
    trace = KinetoTrace()
    mib = 1 << 20
    for step in range(STEPS):
        begin = step * 20_000.0
        trace.add("user_annotation", f"ProfilerStep#{step}", begin, begin + 20_000)
        _products(trace, begin, peak_flops, memory_bandwidth)
        trace.add("cpu_op", "autograd::engine::evaluate_function: MmBackward0", begin + 600, begin + 900, ENGINE)
        trace.gpu("gemm", begin + 5000, begin + 11_000, begin + 700, thread=ENGINE)
        trace.add("user_annotation", "Optimizer.step#AdamW.step", begin + 1000, begin + 1500)
        # The copy ends when the update begins, which has waited for it since the backward's end.
        size = int((2000e-6 - KNOWN["links.h2d.latency"]) * KNOWN["links.h2d.bandwidth"])
        trace.gpu("Memcpy HtoD (Pinned -> Device)", begin + 11_000, begin + 13_000, begin + 950, stream=20, bytes=size)
        trace.gpu("adam", begin + 13_000, begin + 14_000, begin + 1100)
        message: dict[str, Any] = {"Collective name": "allreduce", "In msg nelems": mib, "dtype": "Float", "Group size": 2}
        bus = mib * 4 * 2 * 1 / 2
        end = begin + 14_000 + bus / KNOWN["interconnect.bandwidth"] * 1e6
        trace.gpu("ncclDevKernel_AllReduce_Sum_f32_RING_LL", begin + 14_000, end, begin + 1200, stream=30, **message)
        trace.gpu("last", end, end + 10, begin + 1300)
        for place in range(2):  # while the GPU computes
            at = begin + 5100 + 2500 * place
            size = int((1000e-6 - KNOWN["links.h2d.latency"]) * KNOWN["links.h2d.duplex_bandwidth"])
            trace.gpu("Memcpy HtoD (Pinned -> Device)", at, at + 1000, begin + 800, stream=20, bytes=size)
            trace.gpu("Memcpy DtoH (Device -> Pinned)", at - 50, at + 1050, begin + 810, stream=21, bytes=16 * mib)
            trace.gpu("Memcpy HtoD (Pinned -> Device)", at + 1100, at + 1104, begin + 820, stream=20, bytes=4)
            size = int((1000e-6 - KNOWN["links.h2d.latency"]) * KNOWN["links.h2d.pageable_bandwidth"])
            trace.gpu("Memcpy HtoD (Pageable -> Device)", at + 1200, at + 2200, begin + 830, stream=20, bytes=size)
    return trace


def launched_trace(launch_microseconds: float, kernels: int) -> KinetoTrace:
    """Three steps with a forward and a backward of this many kernels of 5 us each, of which each waits for its launch."""
    trace = KinetoTrace()
    for step in range(3):
        begin, half = step * 2 * kernels * launch_microseconds, kernels * launch_microseconds
        trace.add("user_annotation", f"ProfilerStep#{step}", begin, begin + 2 * half)
        trace.add("cpu_op", "autograd::engine::evaluate_function: X", begin + half, begin + 2 * half - 1, ENGINE)
        for number in range(2 * kernels):
            issued = begin + number * launch_microseconds
            trace.gpu("k", issued + 4, issued + 9, issued, thread=MAIN if number < kernels else ENGINE)
    return trace


def _products(trace: KinetoTrace, begin: float, peak_flops: float, memory_bandwidth: float) -> None:
    """A forward of 4 ms: a product, an addition, and the rest; launched at the step's begin, by the main thread."""
    rows, inner, columns = 4096, 4096, 8192
    factor = prod(small_product_factors(rows, columns, inner, 1, int(KNOWN["gpu.multiprocessors"])))
    product = 2 * rows * inner * columns * factor / (peak_flops * KNOWN["gpu.gemm_efficiency"]) * 1e6
    added = 3 * 2 * 8192**2 / (memory_bandwidth * KNOWN["gpu.memory_efficiency"]) * 1e6
    gap, bf16 = KNOWN["gpu.kernel_overhead"] * 1e6, "c10::BFloat16"
    start = begin + 1000
    for name, shapes, seconds in (
        ("aten::addmm", [[columns], [rows, inner], [inner, columns], []], product),
        ("aten::add", [[8192, 8192], [8192, 8192], []], added),
    ):
        issued = begin + (10 if name == "aten::addmm" else 30)
        kinds = [bf16 if shape else "Scalar" for shape in shapes]
        about: dict[str, Any] = {"Input Dims": shapes, "Input type": kinds}
        trace.add("cpu_op", name, issued, issued + 10, **about)
        trace.gpu(name, start, start + seconds, issued + 5)
        start += seconds + gap
    trace.gpu("rest", start, begin + 5000, begin + 50)


def as_kineto(simulation: Simulation) -> KinetoTrace:
    """A simulated run as if a profiler had recorded it: each task of the GPU is a kernel, each copy a copy of as many bytes as
    its link carries in its time, and each update of the CPU a step of an optimizer.
    """
    trace, hardware = KinetoTrace(), simulation.profile.hardware
    links = {H2D: hardware.h2d, D2H: hardware.d2h}
    spans, iterations = list(simulation.trace.spans()), simulation.trace.iterations
    firsts = [min(span.start_ns for span in spans if span.iteration == one) / 1000 for one in range(iterations)]
    bounds = [*firsts, max(span.end_ns for span in spans) / 1000]
    for number in range(iterations):
        trace.add("user_annotation", f"ProfilerStep#{number}", bounds[number], bounds[number + 1])
    for span in spans:
        start, end, issued = span.start_ns / 1000, span.end_ns / 1000, bounds[span.iteration] + 0.001
        if span.lane in links:
            size = round(max(0.0, (end - start) * 1e-6 - links[span.lane].latency_seconds) * links[span.lane].bandwidth)
            name = "Memcpy HtoD (Pinned -> Device)" if span.lane == H2D else "Memcpy DtoH (Device -> Pinned)"
            trace.gpu(name, start, end, issued, stream=STREAMS[span.lane], bytes=size)
        elif span.lane == GPU:
            trace.gpu(f"kernel of {span.task}", start, end, issued, thread=_thread(span.task.kind))
        elif span.task.kind is Kind.CPU_UPDATE:
            trace.add("user_annotation", "Optimizer.step#DeepSpeedCPUAdam.step", start, end, 300)
    for number in range(iterations):
        trace.add("cpu_op", "autograd::engine::evaluate_function: X", bounds[number], bounds[number] + 0.002, ENGINE)
        trace.add("user_annotation", "Optimizer.step#GPU.step", bounds[number], bounds[number] + 0.002, 102)
    return trace


def _thread(kind: Kind) -> int:
    """The thread that launches a kind of task."""
    backward = kind in (Kind.BACKWARD, Kind.RECOMPUTE)
    return ENGINE if backward else 102 if kind in (Kind.GPU_UPDATE, Kind.GRADIENT_NORM, Kind.CLIP) else MAIN
