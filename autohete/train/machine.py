"""Measures the machine: copies both ways, alone and together, the CPU's optimizer step during copies, and a matrix product.

Without a GPU the CPU stands in for it: copies are copies within host memory, and all lanes share the cores.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from statistics import median
from typing import Any

import torch
from torch import Tensor

from autohete.runtime.device import Device, device_for, gpu_here
from autohete.runtime.optimizer import UnitStates
from autohete.runtime.update_rules import UpdateSettings
from autohete.train.copy_rates import DriveRates, line_through, measure_drive, median_seconds, rates_together

_MIB = 2**20
#: The largest copy.
_LARGEST = 1024 * _MIB
#: Share of a GPU's free memory that measuring may take.
_MEASURING_SHARE = 0.1
_EVICTOR = torch.zeros(16 * _MIB, dtype=torch.float32, device="cpu")  # 64 MiB: more than a core's share of any cache
_ROUNDS, _ROUND_SECONDS = 3, 0.08  # for the measurement that is repeated


def versions() -> dict[str, str]:
    """Return date, machine and versions, for files and tables."""
    gpu = gpu_here()
    accelerator = "no GPU" if gpu is None else device_for(gpu).name
    return {
        "date": datetime.now().astimezone().date().isoformat(),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {_host_bytes() / 2**30:.0f} GiB, {accelerator}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
    }


def measure_machine(
    torch_device: torch.device, device_bytes: int, *, quick: bool = False, drive: str | None = None
) -> dict[str, Any]:
    """Measure this machine with one thread per lane, and return the document of a hardware file.

    Args:
        torch_device: a GPU, or the CPU that stands in for one.
        device_bytes: memory available to tensors on the device.
        quick: measure copies up to 64 MiB instead of 1 GiB; takes a few seconds.
        drive: a folder, whose drive is the place ``nvme``; None: there is no such place.

    Raises:
        InputError: nothing can be written to the folder.
    """
    measured, device = versions(), device_for(torch_device)
    sizes = device.sizes
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        largest = sizes.quick_bytes if quick else _LARGEST
        h2d, d2h = (_Copies(device, up, largest) for up in (True, False))
        links = {"h2d": h2d.line(), "d2h": d2h.line()}
        parameters = sizes.updated
        update = _update(parameters, 1 if device.on_cpu else threads)
        one_way, other_way = h2d.large(), d2h.large()
        both = rates_together({"h2d": one_way, "d2h": other_way})
        alone = rates_together({"cpu": update})["cpu"]
        beside = rates_together({"h2d": one_way, "cpu": update})
        together = _together({"gpu": _product(torch_device), "cpu": update, "h2d": one_way, "d2h": other_way})
        matrix = {dtype: _matrix_rate(torch_device, dtype) for dtype in (torch.float32, torch.bfloat16)}
        rates = None if drive is None else measure_drive(drive, device, largest)
    finally:
        torch.set_num_threads(threads)
    size = h2d.large_bytes
    # The highest traffic observed: one side of each copy, and all bytes that an update touches.
    updated = parameters * 28
    traffic = max(beside["h2d"] * size + beside["cpu"] * updated, (both["h2d"] + both["d2h"]) * size, alone * updated)
    emulated = device.on_cpu

    def figure(value: str | float | int, how: str) -> dict[str, Any]:
        return {"value": value, "source": f"measured on {measured['machine']}: {how}", "date": measured["date"]}

    def link(name: str) -> dict[str, Any]:
        bandwidth, latency = links[name]
        duplex = min(both[name] * size, bandwidth)
        return {
            "bandwidth": figure(f"{bandwidth:.6g} B/s", "line through copies of 64 KiB and more"),
            "duplex_bandwidth": figure(f"{duplex:.6g} B/s", "both directions at once"),
            "latency": figure(f"{latency:.6g} s", "line through copies of 64 KiB and more"),
        }

    def place(folder: str, found: DriveRates) -> dict[str, Any]:
        how = f"in {folder}, " + ("without the page cache" if found.direct else "through the page cache")

        def rate(value: float, ends: tuple[float, float], what: str) -> dict[str, Any]:
            return figure(f"{value:.6g} B/s", f"{what} {how}") | {"range": [f"{end:.6g} B/s" for end in ends]}

        return {
            "model": f"the drive of {folder}",
            "capacity": figure(f"{found.free_bytes} B", f"free {how}"),
            "read_bandwidth": rate(found.read, found.read_range, "line through reads of 64 KiB and more"),
            "write_bandwidth": rate(found.write, found.write_range, "line through writes of 64 KiB and more"),
            "both_bandwidth": figure(f"{found.both:.6g} B/s", f"reads and writes at once {how}"),
            "latency": figure(f"{found.latency_seconds:.6g} s", f"line through transfers of 64 KiB and more {how}"),
        }

    copy_rate = links["h2d"][0]
    return {
        "name": "this-machine",
        "title": f"{measured['machine']}, {measured['versions']}",
        "gpu": {
            "model": device.name,
            "memory": figure(f"{device_bytes + 1} B", "budget"),
            "reserved_memory": figure("1 B", "nothing is reserved besides the budget"),
            "peak_16bit": figure(
                f"{matrix[torch.bfloat16][0]:.6g} FLOP/s", f"matrix product of {matrix[torch.bfloat16][1]}, bf16"
            ),
            "peak_32bit": figure(
                f"{matrix[torch.float32][0]:.6g} FLOP/s", f"matrix product of {matrix[torch.float32][1]}, fp32"
            ),
            "memory_bandwidth": figure(f"{2 * copy_rate if emulated else _device_rate(torch_device):.6g} B/s", "large copy"),
            "memory_efficiency": figure(1.0, "measured, not a datasheet"),
            "gemm_efficiency": figure(1.0, "measured, not a datasheet"),
            "kernel_overhead": figure("5 us", "not measured; measured blocks include it"),
        },
        "links": {"h2d": link("h2d"), "d2h": link("d2h")},
        "host": {
            "memory": figure(f"{_host_bytes()} B", "physical memory"),
            "memory_bandwidth": figure(f"{traffic:.6g} B/s", "optimizer step and copies, together or alone"),
            "usable_share": figure(1.0, "measured, not a datasheet"),
        },
        "cpu": {
            "model": _processor(),
            "cores": figure(os.cpu_count() or 1, "operating system"),
            "update_bandwidth": figure(f"{alone * parameters * 28:.6g} B/s", "fused AdamW, 28 B per parameter"),
        },
        **(
            {"emulation": {"shared_cores": figure(round(together, 3), "all lanes at once against each alone")}}
            if emulated
            else {}
        ),
        **({} if drive is None or rates is None else {"places": {"nvme": place(drive, rates)}}),
    }


class _Copies:
    """Copies of one direction through a buffer on each side."""

    def __init__(self, device: Device, up: bool, largest: int) -> None:
        self._largest, self._device, self._stream = largest, device, device.stream()
        host = device.on_host(largest, torch.uint8).zero_()
        there = torch.zeros(largest, dtype=torch.uint8, device=device.torch_device)
        self._target, self._source = (there, host) if up else (host, there)
        self.large_bytes = min(largest, device.sizes.large_bytes)

    def line(self) -> tuple[float, float]:
        """Return bandwidth (bytes/s) and latency (s) of copies of all sizes."""
        return line_through(self._seconds, self._largest)

    def large(self) -> Callable[[], None]:
        """Return a function that makes one copy of :attr:`large_bytes`."""
        target, source = self._target[: self.large_bytes], self._source[: self.large_bytes]
        return lambda: self._copy(target, source)

    def _seconds(self, size: int) -> float:
        def copy(number: int) -> float:
            # A different place each time, with cold caches: training accesses its parameters in the same way.
            offset = number * max(size, 4 * _MIB) % (self._largest - size + 1)
            target, source = self._target[offset : offset + size], self._source[offset : offset + size]
            forget_cache()
            begin = time.perf_counter()
            self._copy(target, source)
            return time.perf_counter() - begin

        return median_seconds(copy, size)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        with self._stream:
            target.copy_(source, non_blocking=True)
            self._device.finish()


def forget_cache(touched: int | None = None) -> None:
    """Evict the caches by touching ``touched`` bytes of other memory (None: enough for any cache)."""
    _EVICTOR[: None if touched is None else touched // _EVICTOR.element_size()].add_(1)


def _update(count: int, threads: int) -> Callable[[], None]:
    """Return a function that runs an optimizer step over ``count`` parameters in ``threads`` threads."""
    parameters = torch.zeros(count, dtype=torch.float32, device="cpu")
    states, gradients = UnitStates(UpdateSettings(), parameters, [count]), torch.zeros_like(parameters)
    scratch = states.scratch()

    def run() -> None:
        torch.set_num_threads(threads)
        states.update(parameters, [gradients], scratch)

    return run


def _together(jobs: dict[str, Callable[[], None]]) -> float:
    """Return how many lanes at full speed are equivalent to running all of ``jobs``, or the first two of them, at once.

    The result is the median of several rounds, since the speed of a shared machine fluctuates.
    """
    first = dict(list(jobs.items())[:2])
    found = []
    for _ in range(_ROUNDS):
        alone = {name: rates_together({name: job}, _ROUND_SECONDS)[name] for name, job in jobs.items()}
        for some in (first, jobs):
            rates = rates_together(some, _ROUND_SECONDS)
            found.append(sum(rate / alone[name] for name, rate in rates.items()))
    return median(found)


def _product(device: torch.device) -> Callable[[], None]:
    """Return a function that computes a matrix product: one that fits the cache, or as large as in a GPU's passes."""
    size = matrix_sizes(device, torch.float32)[-1]
    a = torch.ones(size, size, dtype=torch.float32, device=device)

    def run() -> None:
        (a @ a).sum().item()

    return run


def matrix_sizes(device: torch.device, dtype: torch.dtype) -> list[int]:
    """Return the rows of the matrices to measure: the smallest, and those that take only a small part of the memory."""
    smallest, *larger = device_for(device).sizes.matrices
    free = device_for(device).free_bytes()
    return [smallest, *(size for size in larger if 2 * size * size * dtype.itemsize <= _MEASURING_SHARE * free)]


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> tuple[float, int]:
    """Return the FLOP/s of the fastest square matrix product, and its rows."""
    return max((_rate_of_product(size, device, dtype), size) for size in matrix_sizes(device, dtype))


def _rate_of_product(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a = torch.ones(size, size, dtype=dtype, device=device)
    product = torch.empty_like(a)

    def seconds() -> float:
        begin = time.perf_counter()
        torch.mm(a, a, out=product)
        product[0, 0].item()  # waits for the product
        return time.perf_counter() - begin

    _warm_up(seconds, device)
    return 2 * size**3 / median(seconds() for _ in range(5))


def _device_rate(device: torch.device) -> float:
    """Return the bytes/s that a copy within the device reads and writes."""
    here = device_for(device)
    free = here.free_bytes()
    size = max(256 * _MIB, min(2048 * _MIB, int(_MEASURING_SHARE * free / 2)))  # far more than its caches
    a = torch.zeros(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)

    def seconds() -> float:
        here.settle()
        begin = time.perf_counter()
        b.copy_(a)
        here.settle()
        return time.perf_counter() - begin

    _warm_up(seconds, device)
    return 2 * a.numel() / median(seconds() for _ in range(5))


def _warm_up(run: Callable[[], float], device: torch.device) -> None:
    """Run until clocks have ramped up and libraries are loaded: once on a CPU, for a while on a GPU."""
    end = time.perf_counter() + device_for(device).sizes.warm_up_seconds
    run()
    while time.perf_counter() < end:
        run()


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_bytes(device: torch.device) -> int:
    """Return the memory that a device offers by default."""
    return device_for(device).usable_bytes()


@contextmanager
def cpu_threads(device: torch.device, count: int) -> Iterator[None]:
    """Run in as many CPU threads as the device's lane will have, if the CPU stands in for the device."""
    threads = torch.get_num_threads()
    if device_for(device).on_cpu:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
