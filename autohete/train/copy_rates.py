"""Measures how fast copies are: a line through their sizes, several at once, and those to and from a drive."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch

from autohete.errors import InputError, check_fields
from autohete.runtime.device import Device
from autohete.runtime.state_files import BLOCK_BYTES, Files, Stored
from autohete.train.worker import check_stop

_KIB, _MIB = 2**10, 2**20
#: Sizes of copies: from 64 KiB, in steps of a factor of four.
_SMALLEST, _FACTOR = 64 * _KIB, 4
_SECONDS = 0.25  # per measurement of several copies at once
#: Transfers of a drive whose rates are its spread, their size, and the largest one: much more would be known about the drive's
#: cache, at the price of its life.
_SPREAD, _LARGE, _LARGEST = 8, 64 * _MIB, 256 * _MIB


def line_through(seconds: Callable[[int], float], largest: int) -> tuple[float, float]:
    """Fit a line through all sizes with the least relative error.

    Args:
        seconds: time of a copy of so many bytes.
        largest: the largest size.

    Returns:
        Bandwidth (bytes/s) and latency (s).
    """
    sizes, times = [], []
    size = _SMALLEST
    while size <= largest:
        sizes.append(size)
        times.append(seconds(size))
        size *= _FACTOR
    x, y = np.array(sizes, float), np.array(times)
    design = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    latency, per_byte = np.linalg.lstsq(design, np.ones_like(y), rcond=None)[0]
    return 1 / max(float(per_byte), 1e-15), min(max(float(latency), 1e-7), 1.0)


def median_seconds(copy: Callable[[int], float], size: int) -> float:
    """Return the median time of copies of ``size`` bytes, each given its number."""
    times = []
    for number in range(9 if size <= 16 * _MIB else 3):
        check_stop()
        times.append(copy(number))
    return median(times)


def rates_together(jobs: dict[str, Callable[[], None]], seconds: float = _SECONDS) -> dict[str, float]:
    """Return how many times per second each of ``jobs`` completes while all run for ``seconds``, each in its own thread.

    An exception of a job is raised once all have ended.
    """
    check_stop()
    rates: dict[str, float] = {}
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(jobs))

    def run(name: str, job: Callable[[], None]) -> None:
        try:
            torch.set_num_threads(1)
            job()
            barrier.wait()
            done, begin = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - begin) < seconds:
                job()
                done += 1
            rates[name] = done / elapsed
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=item) for item in jobs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return rates


@dataclass(frozen=True, slots=True)
class DriveRates:
    """What a drive does, measured in a folder.

    Args:
        direct: reads and writes bypass the page cache.
        free_bytes: room in the folder.
        read, write: bandwidth (bytes/s).
        read_range, write_range: the lowest and the highest that was observed of large transfers.
        both: bytes/s of reads and writes together while both run.
        latency_seconds: fixed cost of a transfer, the larger one of both directions.
    """

    direct: bool
    free_bytes: int
    read: float
    write: float
    read_range: tuple[float, float]
    write_range: tuple[float, float]
    both: float
    latency_seconds: float

    def __post_init__(self) -> None:
        check_fields(self)


def measure_drive(folder: str, device: Device, largest: int) -> DriveRates:
    """Measure the drive of ``folder`` as training uses it, with one thread for each direction.

    Args:
        folder: where a file is written, which is gone afterwards.
        device: of the passes.
        largest: size of the largest transfer (bytes), if it is not more than 256 MiB.

    Raises:
        InputError: there is no such folder, or no room in it.
        DriveError: it cannot be read or written.
    """
    files, largest = Files(device, folder), min(largest, _LARGEST)
    try:
        read, write = (_Transfers(files, device, largest, write=writes) for writes in (False, True))
        lines = [line_through(one.seconds, largest) for one in (read, write)]
        size = min(_LARGE, largest)
        ranges = [one.range(size) for one in (read, write)]
        both = rates_together({"read": lambda: read.large(size), "write": lambda: write.large(size)}, 4 * _SECONDS)
        (read_rate, read_latency), (write_rate, write_latency) = lines
        return DriveRates(
            direct=files.is_direct,
            free_bytes=shutil.disk_usage(folder).free,
            read=read_rate,
            write=write_rate,
            read_range=_around(read_rate, ranges[0]),
            write_range=_around(write_rate, ranges[1]),
            both=sum(both.values()) * size,
            latency_seconds=max(read_latency, write_latency),
        )
    except OSError as error:
        raise InputError(f"the drive of {folder} cannot be measured: {error.strerror}. Give another folder") from error
    finally:
        files.close()


def _around(rate: float, found: tuple[float, float]) -> tuple[float, float]:
    """A range that contains ``rate``."""
    return min(rate, found[0]), max(rate, found[1])


class _Transfers:
    """Transfers of one direction between host memory and a place in the file of their own."""

    def __init__(self, files: Files, device: Device, largest: int, *, write: bool) -> None:
        self._memory = device.on_host(largest, torch.uint8).zero_()
        self._place, self._writes = files.place_for(self._memory), write
        self._place.write(self._memory)  # a file system is slower where a file has nothing yet

    def seconds(self, size: int) -> float:
        """Time of a transfer of ``size`` bytes."""
        room = len(self._memory) - size

        def copy(number: int) -> float:
            begin = number * max(size, 4 * _MIB) % (room + 1) // BLOCK_BYTES * BLOCK_BYTES
            started = time.perf_counter()
            self._transfer(begin, size)
            return time.perf_counter() - started

        return median_seconds(copy, size)

    def range(self, size: int) -> tuple[float, float]:
        """The lowest and the highest rate of some transfers of ``size`` bytes (bytes/s)."""
        rates = []
        for _ in range(_SPREAD):
            check_stop()
            begin = time.perf_counter()
            self._transfer(0, size)
            rates.append(size / (time.perf_counter() - begin))
        return min(rates), max(rates)

    def large(self, size: int) -> None:
        """Make one transfer of ``size`` bytes."""
        self._transfer(0, size)

    def _transfer(self, begin: int, size: int) -> None:
        place: Stored = replace(self._place, shape=torch.Size([size]), offset=self._place.offset + begin)
        memory = self._memory[begin : begin + size]
        if self._writes:
            place.write(memory)
        else:
            place.read(memory)
