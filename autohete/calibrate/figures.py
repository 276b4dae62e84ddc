"""Figures of a hardware from a recording: each with the middle and the spread of its samples."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from autohete.calibrate.operators import (
    Operator,
    input_type,
    product_flops,
    product_sizes,
    traffic_bytes,
)
from autohete.calibrate.recorded import GpuWork, RecordedRun, Work
from autohete.calibrate.recorded_steps import Intervals, Phase, Phased
from autohete.hardware import Gpu, Hardware
from autohete.printable import printable
from autohete.profile.kernels.gpt2 import IMPLEMENTATIONS, Implementation
from autohete.profile.rates import small_product_factors
from autohete.workload import Kernels

#: Ends of a range, in percent of the samples.
_LOW, _HIGH = 5, 95
#: Fewer samples are no figure.
_FEWEST = 5
#: Copies that show a link's latency, and those that show its rate, in bytes.
_SMALL, _LARGE = 16 << 10, 1 << 20
#: Traffic of an operator that no cache holds, in bytes. The L2 of an H100 has 50 MB, that of a B200 126 MB.
_UNCACHED = 256 << 20
#: FLOPs of a product that fills a GPU for some tens of microseconds at least.
_LARGE_PRODUCT = 1e10
#: Types of 16 bit; exports of Nsight Systems have none.
_SIXTEEN_BIT = ("c10::Half", "c10::BFloat16", "")
#: FLOPs for each byte from which a product is bound by arithmetic on all GPUs of the presets.
_INTENSE = 400
#: A kernel that starts this long after its launch began found no queue: the GPU had been waiting for the host.
_NO_QUEUE_SECONDS = 1e-4
#: Longer gaps in a full stream are waits for another stream, not what a kernel costs; shorter ones are none, but rounding.
_LONGEST_GAP_SECONDS, _SHORTEST_GAP_SECONDS = 3e-5, 1e-9


@dataclass(frozen=True, slots=True)
class MeasuredFigure:
    """A figure of a hardware, as a recording has it.

    Args:
        key: as hardware files have it.
        value: in SI units.
        low, high: 5 and 95 % of its samples, in SI units.
        unit: of SI; empty for a plain number.
        samples: what was measured, in words.
        before: what the hardware said that is being calibrated; None if it has no such figure.
    """

    key: str
    value: float
    low: float
    high: float
    unit: str
    samples: str
    before: float | None

    def entry(self, name: str, date: str) -> dict[str, Any]:
        """Return the figure as hardware files have it; ``name`` and ``date`` are those of the recording."""
        source = f"measured: {self.samples} in {printable(name)}"
        entry: dict[str, Any] = {"value": self._written(self.value), "source": source, "date": date}
        if self.low < self.high:
            entry["range"] = [self._written(self.low), self._written(self.high)]
        return entry

    def _written(self, value: float) -> str | float | int:
        if self.unit:
            return f"{value:.0f}B" if self.unit == "B" else f"{value:.6g}{self.unit}"
        return int(value) if self.key.endswith("multiprocessors") else float(f"{value:.6g}")


def _figure(
    key: str, samples: Sequence[float], unit: str, what: str, before: float | None, weights: Sequence[float] | None = None
) -> list[MeasuredFigure]:
    """Return the figure of some samples; none if they are too few. The value is their median, of ``weights`` if given."""
    if len(samples) < _FEWEST:
        return []
    order = np.argsort(samples)
    ordered = np.array(samples, float)[order]
    passed = np.cumsum(np.ones(len(ordered)) if weights is None else np.array(weights, float)[order])
    value = float(ordered[np.searchsorted(passed, passed[-1] / 2)])
    low, high = (float(np.percentile(ordered, end)) for end in (_LOW, _HIGH))
    return [MeasuredFigure(key, value, min(low, value), max(high, value), unit, f"{len(samples):,} {what}", before)]


def hardware_figures(phased: Phased, hardware: Hardware, kernels: Kernels = Kernels.EAGER_FLASH) -> list[MeasuredFigure]:
    """Return the figures that a recording shows, for a file based on ``hardware``; none that has too few samples.

    Args:
        phased: the recording.
        hardware: has what the recording does not show.
        kernels: what was trained with, which says how many operations the host does for each launch.
    """
    recorded, gpu = phased.recorded, hardware.gpu
    found: list[MeasuredFigure] = []
    for key, size, before in (
        ("gpu.memory", recorded.memory_bytes, gpu.memory_bytes),
        ("gpu.multiprocessors", recorded.multiprocessors, gpu.multiprocessors),
    ):
        if size:
            unit = "B" if key == "gpu.memory" else ""
            found.append(MeasuredFigure(key, size, size, size, unit, "a property of the device", before))
    for work in (Work.H2D, Work.D2H):
        found += [] if hardware.unified else _link(recorded.work, work, hardware)
    found += _figure(
        "gpu.kernel_overhead",
        _kernel_gaps(recorded.work),
        "s",
        "gaps between kernels of a full stream",
        gpu.kernel_overhead_seconds,
    )
    operations = _operations(IMPLEMENTATIONS[kernels])
    launches = [seconds / operations.get(part, 1.0) for seconds, part in _launches(phased)]
    found += _figure("cpu.launch", launches, "s", "passes in which the GPU waited for launches", hardware.cpu.launch_seconds)
    rates = OperatorRates(recorded, replace(gpu, multiprocessors=recorded.multiprocessors or gpu.multiprocessors))
    found += rates.products() + rates.elementwise()
    found += _collectives(recorded.work, hardware)
    return [one for one in found if one.value > 0]


# --- copies -------------------------------------------------------------------------------------------------------


def _link(work: Sequence[GpuWork], direction: Work, hardware: Hardware) -> list[MeasuredFigure]:
    link, table = (hardware.h2d, "links.h2d") if direction is Work.H2D else (hardware.d2h, "links.d2h")
    other = Work.D2H if direction is Work.H2D else Work.H2D
    copies = [one for one in work if one.work is direction and one.end > one.start]
    small = [one.end - one.start for one in copies if 0 < one.bytes <= _SMALL]
    found = _figure(f"{table}.latency", small, "s", f"copies of at most {_SMALL >> 10} KiB", link.latency_seconds)
    latency = found[0].value if found else 0.0
    large = [one for one in copies if one.bytes >= _LARGE and one.end - one.start > 2 * latency]
    against = Intervals((one.start, one.end) for one in work if one.work is other)
    covered = against.within([one.start for one in large], [one.end for one in large])
    shares = [float(part) / (one.end - one.start) for one, part in zip(large, covered, strict=True)]
    for name, before, pinned, low, high, what in (
        ("bandwidth", link.bandwidth, True, 0.0, 0.1, "copies of 1 MiB or more, the other direction idle"),
        ("duplex_bandwidth", link.duplex_bandwidth, True, 0.9, 1.1, "copies while the other direction was in use"),
        ("pageable_bandwidth", link.pageable_bandwidth, False, 0.0, 1.1, "copies of pageable memory"),
    ):
        some = [one for one, share in zip(large, shares, strict=True) if one.pinned is pinned and low <= share <= high]
        rates = [one.bytes / (one.end - one.start - latency) for one in some]
        found += _figure(f"{table}.{name}", rates, "B/s", what, before, [one.bytes for one in some])
    return found


def _collectives(work: Sequence[GpuWork], hardware: Hardware) -> list[MeasuredFigure]:
    """The bus bandwidth. A collective also waits for the slowest GPU, so that the fastest quarter shows the rate."""
    join = hardware.interconnect
    rates = [one.bytes / (one.end - one.start) for one in work if one.work is Work.COLLECTIVE and one.bytes >= _LARGE]
    if join is None or join.assumed or len(rates) < _FEWEST:  # a file has all figures of the table, or none
        return []
    value, low, high = (float(np.percentile(rates, end)) for end in (75, _LOW, _HIGH))
    what = f"{len(rates):,} collectives, of which the faster quarter did not wait for other GPUs"
    return [MeasuredFigure("interconnect.bandwidth", value, low, high, "B/s", what, join.bandwidth)]


# --- kernels ------------------------------------------------------------------------------------------------------


def _kernel_gaps(work: Sequence[GpuWork]) -> list[float]:
    """Times between two kernels of a stream of which the second had been launched before the first ended."""
    streams: dict[int, list[GpuWork]] = {}
    for one in work:
        if one.work in (Work.KERNEL, Work.D2D):
            streams.setdefault(one.stream, []).append(one)
    gaps = [
        after.start - before.end
        for stream in streams.values()
        for before, after in pairwise(stream)
        if after.issued < before.start and after.thread >= 0
    ]
    return [gap for gap in gaps if _SHORTEST_GAP_SECONDS < gap < _LONGEST_GAP_SECONDS]


def _operations(implementation: Implementation) -> dict[Phase, float]:
    """Operations of the host for each launch in a pass."""
    return {Phase.FORWARD: implementation.host_forward, Phase.BACKWARD: implementation.host_backward}


def _launches(phased: Phased) -> list[tuple[float, Phase]]:
    """For each pass of each step, the host's mean time from launch to launch while the GPU waited for it. What took longer than
    95 % of these is work of the host's own, such as loading data.
    """
    recorded = phased.recorded
    launched: dict[int, list[tuple[float, bool, Phase]]] = {}
    for one, part in zip(recorded.work, phased.passes, strict=True):
        if part is not None and one.work is Work.KERNEL and one.thread >= 0 and one.issued == one.issued:
            launched.setdefault(one.thread, []).append((one.issued, one.start - one.issued < _NO_QUEUE_SECONDS, part))
    waits = Intervals((start, end) for _, start, end in recorded.waits)
    starts, found = [step.start for step in phased.steps], dict[tuple[int, Phase], list[float]]()
    for calls in launched.values():
        calls.sort()
        pairs = [(before, after) for before, after in pairwise(calls) if after[1] and before[2] is after[2]]
        waited = waits.within([before[0] for before, _ in pairs], [after[0] for _, after in pairs])
        for (before, after), wait in zip(pairs, waited, strict=True):
            key = bisect_right(starts, after[0]), after[2]
            found.setdefault(key, []).append(after[0] - before[0] - float(wait))
    means = []
    for (_, part), some in found.items():
        if len(some) >= 4 * _FEWEST:
            limit = float(np.percentile(some, _HIGH))
            means.append((float(np.mean([one for one in some if one <= limit])), part))
    return means


class OperatorRates:
    """Rates of operators whose shapes are recorded."""

    def __init__(self, recorded: RecordedRun, gpu: Gpu) -> None:
        self._gpu, self._operators = gpu, recorded.operators
        kernels: dict[int, list[tuple[float, float]]] = {}
        for one in recorded.work:
            if one.work is Work.KERNEL and one.issued == one.issued:
                kernels.setdefault(one.thread, []).append((one.issued, one.end - one.start))
        self._issued, self._sums = {}, {}
        for thread, some in kernels.items():
            some.sort()
            self._issued[thread] = [issued for issued, _ in some]
            self._sums[thread] = np.concatenate([[0.0], np.cumsum([seconds for _, seconds in some])])

    def _seconds(self, operator: Operator) -> float:
        """Time of the kernels that an operator launched."""
        if (issued := self._issued.get(operator.thread)) is None:
            return 0.0
        sums = self._sums[operator.thread]
        return float(sums[bisect_right(issued, operator.end)] - sums[bisect_left(issued, operator.start)])

    def _timed(self, work: Callable[[Operator], float]) -> list[tuple[Operator, float, float]]:
        """Operators with the work that ``work`` counts, if any, and their seconds."""
        found = [(one, work(one), self._seconds(one)) for one in self._operators]
        return [(one, done, seconds) for one, done, seconds in found if done > 0 and seconds > 0]

    def products(self) -> list[MeasuredFigure]:
        """Shares of the peaks that large products reach. What the model takes off for small sizes is added."""
        found: list[MeasuredFigure] = []
        gpu = self._gpu
        timed = self._timed(product_flops)
        for key, peak, types, before in (
            ("gpu.gemm_efficiency", gpu.peak_16bit_flops, _SIXTEEN_BIT, gpu.gemm_efficiency),
            ("gpu.gemm_efficiency_32bit", gpu.peak_32bit_flops, ("float",), gpu.gemm_efficiency_32bit),
        ):
            shares, weights = [], []
            for one, flops, seconds in timed:
                batch, rows, inner, columns = product_sizes(one)
                intensity = flops / (batch * (rows * inner + inner * columns + rows * columns) * 2)
                if input_type(one) in types and flops >= _LARGE_PRODUCT and intensity >= _INTENSE:
                    factor = prod(small_product_factors(rows, columns, inner, batch, gpu.multiprocessors))
                    shares.append(flops * factor / seconds / peak)
                    weights.append(seconds)
            figure = _figure(key, shares, "", "large matrix products", before, weights)
            # More than the peak: fp32 products ran in TF32, or the hardware is another one.
            found += [one for one in figure if one.value <= 1]
        return [_within_one(one) for one in found]

    def elementwise(self) -> list[MeasuredFigure]:
        """The share of the memory's bandwidth that operators without arithmetic reach."""
        timed = [one for one in self._timed(traffic_bytes) if one[1] >= _UNCACHED]
        shares = [traffic / seconds / self._gpu.memory_bandwidth for _, traffic, seconds in timed]
        figure = _figure("gpu.memory_efficiency", shares, "", "elementwise operators", self._gpu.memory_efficiency)
        return [_within_one(one) for one in figure if one.value <= 1]


def _within_one(figure: MeasuredFigure) -> MeasuredFigure:
    """The figure of a share, whose range ends at 1."""
    return MeasuredFigure(
        figure.key, figure.value, figure.low, min(1.0, figure.high), figure.unit, figure.samples, figure.before
    )
