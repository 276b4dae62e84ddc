"""Values in a file: where they rest whose home is another place than the GPU or the host.

Reads and writes bypass the system's page cache (``O_DIRECT``), so that they take as long as the drive takes, and leave host
memory to the training. Lengths and offsets are multiples of :data:`BLOCK_BYTES`. Memory that the drive cannot reach directly,
because of its alignment or because it is a GPU's, is copied through a buffer. A file system that refuses this, such as older
tmpfs, is used through the page cache.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from autohete.errors import DriveError, InputError
from autohete.runtime.device import Device

#: Of lengths and offsets in the file: at least the logical block of any drive.
BLOCK_BYTES = 4096
#: Alignments of memory that drives demand, the best first: PyTorch aligns host memory to the first one.
_ALIGNMENTS = (64, 512, BLOCK_BYTES)
#: Size of a buffer, and of a transfer without one: the system transfers less than 2 GiB at once.
_BUFFER_BYTES, _LARGEST_BYTES = 8 * 2**20, 2**30
_LOG = logging.getLogger("autohete")


class Files:
    """The file of one training run. It has no name once it is open, so the system removes it when the process ends in any way.

    Args:
        device: of the passes; it finishes what the calling thread has issued on values before they are written.
        folder: where the file is, created on first use; None: ``TMPDIR``.
    """

    def __init__(self, device: Device, folder: str | None = None) -> None:
        self._device, self._folder = device, folder
        self._lock = threading.Lock()
        self._buffers = threading.local()
        self._file: _OpenFile | None = None
        #: Bytes of the file that are in use or have been.
        self._end = 0
        #: Where ranges of the file begin that nothing uses any more, by size.
        self._unused: defaultdict[int, list[int]] = defaultdict(list)

    @property
    def is_direct(self) -> bool:
        """Whether the page cache is bypassed, once something is in the file."""
        return self._file is not None and self._file.is_direct

    def holding(self, tensor: Tensor) -> Stored:
        """Write the values of ``tensor``, which must be contiguous, to the file."""
        found = self.place_for(tensor)
        found.write(tensor)
        return found

    def place_for(self, tensor: Tensor) -> Stored:
        """Return a place in the file with room for the values of ``tensor``.

        Raises:
            InputError: there is no such folder, or no room.
        """
        stored = Stored(self, tensor.shape, tensor.dtype)
        if stored.file_bytes:
            with self._lock:
                stored.offset = self._claim(stored.file_bytes)
        return stored

    def release(self, stored: Stored) -> None:
        """Let the place of ``stored`` be used again."""
        if stored.file_bytes:
            with self._lock:
                self._unused[stored.file_bytes].append(stored.offset)

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.close()
        self._file, self._end = None, 0
        self._unused.clear()

    def transfer(self, stored: Stored, tensor: Tensor, *, write: bool) -> None:
        """Read values to ``tensor``, or write them from there.

        Raises:
            DriveError: the drive does not read or write all of them.
        """
        if not stored.file_bytes:
            return
        if self._file is None:
            raise InputError("the file is closed, and the values in it are gone: create a new training")
        data = tensor.detach().view(-1).view(torch.uint8)
        self._device.finish()  # before the drive reads it, or while something is still issued on memory used before
        if self._reaches(self._file, data):
            self._directly(self._file, stored.offset, data, write=write)
        else:
            self._through_buffer(self._file, stored.offset, data, write=write)

    def _reaches(self, file: _OpenFile, data: Tensor) -> bool:
        """Whether the drive can reach the memory of ``data``. What a device that runs ahead computes with is its own."""
        on_host = data.device.type == "cpu" and not (self._device.runs_ahead and self._device.on_cpu)
        return on_host and data.data_ptr() % file.alignment == 0

    def _directly(self, file: _OpenFile, offset: int, data: Tensor, *, write: bool) -> None:
        memory, rest = data.numpy().data, len(data) % BLOCK_BYTES
        whole = len(data) - rest
        for begin in range(0, whole, _LARGEST_BYTES):
            file.move(memory[begin : min(begin + _LARGEST_BYTES, whole)], offset + begin, write=write)
        if rest:
            self._through_buffer(file, offset + whole, data[whole:], write=write)

    def _through_buffer(self, file: _OpenFile, offset: int, data: Tensor, *, write: bool) -> None:
        buffer = self._buffer()
        memory = buffer.numpy().data
        for begin in range(0, len(data), _BUFFER_BYTES):
            part = data[begin : begin + _BUFFER_BYTES]
            here, there = buffer[: len(part)], memory[: -(-len(part) // BLOCK_BYTES) * BLOCK_BYTES]
            if write:
                here.copy_(part)
                self._device.finish()
            file.move(there, offset + begin, write=write)
            if not write:
                part.copy_(here)
                self._device.finish()  # the next part needs the buffer

    def _buffer(self) -> Tensor:
        """The calling thread's buffer, aligned to pages."""
        found: Tensor | None = getattr(self._buffers, "buffer", None)
        if found is None:
            found = self._buffers.buffer = torch.from_numpy(np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8))
        return found

    def _claim(self, size: int) -> int:
        """Return where ``size`` bytes of the file begin that nothing uses."""
        if self._file is None:
            self._file = _OpenFile(tempfile.gettempdir() if self._folder is None else self._folder)
        if unused := self._unused[size]:
            return unused.pop()
        self._file.extend(self._end, size)
        self._end += size
        return self._end - size


@dataclass(slots=True, eq=False)
class Stored:
    """Values in a file.

    Args:
        files: has the file.
        shape, dtype: of the tensor.
        offset: where it begins in the file.
    """

    files: Files
    shape: torch.Size
    dtype: torch.dtype
    offset: int = 0

    @property
    def file_bytes(self) -> int:
        """What it takes in the file."""
        return -(-self.shape.numel() * self.dtype.itemsize // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def absent(self) -> Tensor:
        """A tensor of this shape and type that has no values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def write(self, tensor: Tensor) -> None:
        """Write a tensor's values, which are contiguous, in any memory.

        Raises:
            DriveError: the drive does not write them.
        """
        self.files.transfer(self, tensor, write=True)

    def read(self, tensor: Tensor | None = None) -> Tensor:
        """Read the values to ``tensor``, in any memory, and return it; None: to new host memory.

        Raises:
            DriveError: the drive does not read them.
        """
        found = torch.empty(self.shape, dtype=self.dtype, device="cpu") if tensor is None else tensor
        self.files.transfer(self, found, write=False)
        return found


def copied_to(target: Tensor, source: Tensor | Stored) -> Tensor:
    """Copy values from any memory, or from a file, to ``target``, and return it."""
    return source.read(target) if isinstance(source, Stored) else target.copy_(source, non_blocking=True)


class _OpenFile:
    """A file without a name, and what its file system allows.

    Args:
        folder: where it is.

    Attributes:
        alignment: of memory, for transfers without a buffer.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        try:
            plain, path = tempfile.mkstemp(prefix="autohete-", dir=folder)
        except OSError as error:
            raise InputError(
                f"nothing can rest in {folder}: {error.strerror}. Give a folder that exists and can be written to, or train "
                "with a policy that lets nothing rest on a drive"
            ) from error
        self._plain = self._direct = plain
        try:
            self._direct = os.open(path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
            self.alignment = self._found_alignment()
        except OSError as error:
            if error.errno != errno.EINVAL:
                self.close()
                raise
            _LOG.warning("%s does not allow O_DIRECT: what rests there is read and written through the page cache", folder)
            self.alignment = 1
            if self._direct != plain:
                os.close(self._direct)
            self._direct = plain
        finally:
            os.unlink(path)

    def _found_alignment(self) -> int:
        """The least alignment of memory with which the drive reads and writes a block."""
        memory = memoryview(mmap.mmap(-1, 2 * BLOCK_BYTES))
        for alignment in _ALIGNMENTS:
            place = memory[alignment % BLOCK_BYTES :][:BLOCK_BYTES]
            try:
                for transfer in (os.pwritev, os.preadv):
                    transfer(self._direct, [place], 0)
            except OSError as error:
                if error.errno != errno.EINVAL or alignment == BLOCK_BYTES:
                    raise
            else:
                return alignment
        raise AssertionError("a block is aligned to a block")

    @property
    def is_direct(self) -> bool:
        """Whether the page cache is bypassed."""
        return self._direct != self._plain

    def extend(self, end: int, size: int) -> None:
        """Reserve ``size`` bytes behind ``end``: otherwise a full drive would show in the middle of a training.

        Raises:
            InputError: there is no room.
        """
        try:
            os.posix_fallocate(self._plain, end, size)
        except OSError as error:
            raise InputError(
                f"{size} bytes cannot rest in {self._folder}: {error.strerror}. Give a folder with more room, or train with a "
                "policy that lets less rest on a drive"
            ) from error

    def move(self, memory: memoryview, offset: int, *, write: bool) -> None:
        """Read or write all of ``memory``, whole blocks unless the page cache is used.

        Raises:
            DriveError: the drive does not.
        """
        transfer: Callable[[int, list[memoryview], int], int] = os.pwritev if write else os.preadv
        done, reason = 0, ""
        while done < len(memory) and not reason:
            try:
                moved = transfer(self._direct, [memory[done:]], offset + done)
            except OSError as error:
                reason = error.strerror or str(error)
            else:
                reason = "" if moved >= min(BLOCK_BYTES, len(memory) - done) else "the file ends there"
                done += moved // BLOCK_BYTES * BLOCK_BYTES if done + moved < len(memory) else moved
        if reason:
            raise DriveError(
                f"the drive of {self._folder} does not {'write' if write else 'read'} {len(memory)} bytes of what rests there "
                f"({reason}): continue from a checkpoint, with a folder of another drive if this one is damaged"
            )

    def close(self) -> None:
        """Close the file, which removes it."""
        for descriptor in {self._plain, self._direct}:
            os.close(descriptor)
