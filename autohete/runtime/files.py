"""Tensors in files: what rests on a drive while it is not used."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack

import torch
from torch import Tensor

from autohete.errors import InputError


class Files:
    """Files of one training, in a folder of their own below ``TMPDIR``, which is made when it is needed.

    The tensors are the files, mapped into memory: a copy from one reads it, a copy to one writes it, and the system's cache
    lies between them and the drive.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._folder: str | None = None
        self._count = 0

    def holding(self, tensor: Tensor) -> Tensor:
        """A tensor in a file, with the values of ``tensor``, which is contiguous and on the CPU.

        Raises:
            InputError: there is no room for the file.
        """
        if not tensor.numel():
            return tensor
        if self._folder is None:
            self._folder = self._undo.enter_context(tempfile.TemporaryDirectory(prefix="autohete-"))
        path = os.path.join(self._folder, str(self._count))
        self._count += 1
        try:
            with open(path, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, tensor.nbytes)  # else a full drive would end the process at some write
        except OSError as error:
            raise InputError(
                f"{tensor.nbytes} bytes of optimizer states cannot rest in {self._folder}: {error.strerror}. Let TMPDIR name a "
                "folder with more room, or train with a policy that does not use NVMe"
            ) from error
        held = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype)
        return held.view(tensor.shape).copy_(tensor)

    def close(self) -> None:
        """Remove the files. Tensors in them live on while they are referenced."""
        self._undo.close()
        self._folder = None
