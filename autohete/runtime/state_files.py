"""Tensors in files: where values rest whose home is another place than the GPU or the host."""

from __future__ import annotations

import os
import tempfile
import threading
from collections import defaultdict
from contextlib import ExitStack

import torch
from torch import Tensor

from autohete.errors import InputError


class Files:
    """The files of one training run, in their own folder below ``TMPDIR``, created on first use.

    The tensors are memory-mapped files: a copy from one reads the file, a copy to one writes it, through the system's page
    cache.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._folder: str | None = None
        self._count = 0
        self._lock = threading.Lock()
        #: Tensors in files that nothing uses any more, by type and number of elements.
        self._unused: defaultdict[tuple[torch.dtype, int], list[Tensor]] = defaultdict(list)

    def holding(self, tensor: Tensor) -> Tensor:
        """Return a tensor in a file with the values of ``tensor``, which must be contiguous and on the CPU.

        Raises:
            InputError: there is no room for the file.
        """
        if not tensor.numel():
            return tensor
        with self._lock:
            unused = self._unused[tensor.dtype, tensor.numel()]
            held = unused.pop() if unused else self._created(tensor)
        return held.view(tensor.shape).copy_(tensor)

    def _created(self, like: Tensor) -> Tensor:
        """Return a flat tensor in a new file."""
        if self._folder is None:
            self._folder = self._undo.enter_context(tempfile.TemporaryDirectory(prefix="autohete-"))
        path = os.path.join(self._folder, str(self._count))
        self._count += 1
        try:
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, like.nbytes)  # otherwise a later write to a full drive kills the process
        except OSError as error:
            raise InputError(
                f"{like.nbytes} bytes cannot rest in {self._folder}: {error.strerror}. Set TMPDIR to a folder with more "
                "room, or train with a policy that lets nothing rest in files"
            ) from error
        return torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype)

    def release(self, tensor: Tensor) -> None:
        """Let the file of ``tensor``, which :meth:`holding` returned, be used again."""
        if tensor.numel():
            with self._lock:
                self._unused[tensor.dtype, tensor.numel()].append(tensor)

    def close(self) -> None:
        """Remove the files. Their tensors stay valid while they are referenced."""
        self._undo.close()
        self._folder = None
        self._unused.clear()
