"""Reads a recording of any profiler, by what the file has and not by its name."""

from __future__ import annotations

import gzip
import io
import zlib
from datetime import date
from os import fstat
from pathlib import Path

from autohete.calibrate.kineto import read_kineto
from autohete.calibrate.nsys import MAGIC, read_nsys
from autohete.calibrate.recorded import RecordedRun
from autohete.errors import InputError
from autohete.files import opened
from autohete.printable import shown

_CURE = "give a trace of torch.profiler (.json, .json.gz), or what nsys export --type sqlite writes"
_GZIP = b"\x1f\x8b"


def read_recorded(path: str, *, device: bool = False) -> RecordedRun:
    """Read the recording at ``path``: a trace of PyTorch's profiler, also compressed, or an export of Nsight Systems.

    Args:
        path: the file.
        device: the CPU stands in for the GPU (a trace of PyTorch's profiler only).

    Raises:
        InputError: it cannot be read or is no recording, it ends in the middle, or nothing of it ran on a GPU.
    """
    name = Path(path).name
    with opened(path, "trace", _CURE) as stream:
        day = date.fromtimestamp(max(fstat(stream.fileno()).st_mtime, 0)).isoformat()
        head = stream.read(len(MAGIC))
        stream.seek(0)
        if head == MAGIC:
            if device:
                raise InputError(f"{shown(name)} is an export of nsys, without operators of the CPU: choose the GPU as device")
            recorded = read_nsys(path, name, day)
        else:
            try:
                whole = gzip.GzipFile(fileobj=stream) if head.startswith(_GZIP) else stream
                text = io.TextIOWrapper(whole, "utf-8-sig", errors="replace")
                recorded = read_kineto(text.read, name, day, device=device)
            except EOFError as error:
                raise InputError(f"trace {shown(name)} ends in the middle of its compressed data: copy it again") from error
            except (gzip.BadGzipFile, zlib.error) as error:
                raise InputError(f"trace {shown(name)} is damaged ({error}): copy it again; {_CURE}") from error
    if not recorded.work:
        raise InputError(
            f"nothing in {shown(name)} ran on a GPU: record it with ProfilerActivity.CUDA (torch.profiler), or let nsys trace "
            "cuda; if the CPU is the device of this training, give cpu as device"
            if not device
            else f"{shown(name)} has no operators of the CPU: record it with ProfilerActivity.CPU"
        )
    return recorded
