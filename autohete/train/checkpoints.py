"""Checkpoints of a training on disk: a folder for each, complete or absent, without pickled code.

    FOLDER/000007-step-00000020/tensors-0.safetensors    all tensors, in files of about a gigabyte
                                state.json               everything else, and the digests of those files and of itself

The first number counts the checkpoints of the folder: the last one written is the latest, also if training went back to an
earlier step. A checkpoint is written to a hidden folder in the same place, synced to disk, and renamed; earlier ones stay until
then. The next save removes what a killed process has left behind.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from autohete.errors import InputError, check_whole
from autohete.files import make_folder
from autohete.train.checkpoint_document import FORMAT

_STATE = "state.json"
#: Bytes of tensors in a file. Writing a file needs as much memory again.
_SHARD_BYTES = 2**30
_NAME = re.compile(r"(\d{6,})-step-(\d{8,})")
_PARTS = "format", "shards", "state"
#: Names of hidden folders that are being written or removed.
_HIDDEN, _END = ".autohete-", ".part"


class Checkpoint:
    """A state that can be written.

    Args:
        state: plain values and tensors in dictionaries, lists and tuples.

    Raises:
        InputError: names a value that a checkpoint cannot have.
    """

    def __init__(self, state: object) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._known: set[int] = set()
        self._plain = self._encoded(state, "state")

    def write(self, folder: str | Path, step: int, keep: int) -> Path:
        """Write it as the latest checkpoint of a folder, and remove the oldest ones.

        Args:
            folder: contains the checkpoints; it is created.
            step: number of steps so far.
            keep: number of checkpoints that stay, this one included.

        Returns:
            The checkpoint's own folder.

        Raises:
            InputError: the folder cannot be written to. Earlier checkpoints are as before.
        """
        check_whole("keep", keep, 1)
        folder = Path(folder)
        make_folder(folder)
        try:
            _remove_leftovers(folder)
            with hidden_folder(folder) as part:
                self._write(part)
                there = checkpoints(folder)
                target = _renamed(part, folder, int(_number(there[-1])) + 1 if there else 1, step)
            bring_to_disk(folder)
        except (OSError, SafetensorError, MemoryError, RuntimeError) as error:  # PyTorch's of a full memory is the last one
            full = isinstance(error, (MemoryError, RuntimeError))
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise InputError(
                f"the checkpoint of step {step} cannot be written to {str(folder)!r}: {reason}; earlier checkpoints are as "
                f"before. {'Leave more host memory free' if full else 'Give a folder that is writable and has room'}"
            ) from error
        for old in [*there, target][:-keep]:
            with suppress(OSError):  # this checkpoint is there in any case
                gone = old.rename(folder / f"{_HIDDEN}{secrets.token_hex(8)}{_END}")
                shutil.rmtree(gone)
        return target

    def _write(self, part: Path) -> None:
        shards = {}
        for number, shard in enumerate(_shards(self._tensors)):
            file = part / f"tensors-{number}.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in shard.items()}, file)
            shards[file.name] = _digest(file)
            bring_to_disk(file)
        content = {"format": FORMAT, "shards": shards, "state": self._plain}
        (part / _STATE).write_text(json.dumps(content | {"digest": _digest_of(content)}))
        bring_to_disk(part / _STATE)
        bring_to_disk(part)

    def _encoded(self, value: Any, where: str) -> Any:
        """``value`` as JSON has it. Its tensors get numbers, and memory of their own."""
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, Tensor):
            return {"tensor": self._noted(value, where)}
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, (list, tuple)):
            items = [self._encoded(item, f"{where}[{place}]") for place, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, Mapping):
            if not all(isinstance(key, (str, int)) for key in value):
                raise InputError(f"{where} has keys that are neither text nor whole numbers: use strings or integers")
            return {"dict": [[key, self._encoded(item, f"{where}.{key}")] for key, item in value.items()]}
        raise InputError(
            f"{where} is a {type(value).__name__}, which a checkpoint cannot have: give numbers, text, tensors, and "
            "dictionaries, lists and tuples of them"
        )

    def _noted(self, tensor: Tensor, where: str) -> str:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise InputError(
                f"{where} is a tensor of layout {tensor.layout} on {tensor.device}: only dense tensors with values can be saved"
            )
        storage = tensor.untyped_storage()
        alone = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in self._known
        self._known.add(storage.data_ptr())
        name = f"{len(self._tensors)}:{where}"
        self._tensors[name] = tensor.detach().to("cpu") if alone else tensor.detach().to("cpu", copy=True).contiguous()
        return name


def read_checkpoint(folder: str | Path) -> Any:
    """Return the state in a checkpoint, or in the latest one of a folder of checkpoints. Everything is verified.

    Raises:
        InputError: there is none, or it is damaged; names the file, and the checkpoint before it.
    """
    folder = Path(folder)
    found = [folder] if (folder / _STATE).is_file() else checkpoints(folder)
    if not found:
        raise InputError(f"{str(folder)!r} has no checkpoint: give a folder that Trainer.save has written")
    latest = found[-1]
    others = f"; {found[-2].name} is the one before" if found[1:] else ""
    try:
        content = json.loads((latest / _STATE).read_text())
        rest = {name: content[name] for name in _PARTS}
        if rest["format"] != FORMAT or _digest_of(rest) != content["digest"]:
            raise ValueError(f"it is not of the format {FORMAT!r}, or has changed")
        tensors: dict[str, Tensor] = {}
        for name, digest in rest["shards"].items():
            if _digest(latest / name) != digest:
                raise ValueError(f"{name} has changed since it was written")
            tensors |= load_file(latest / name)
        return _decoded(rest["state"], tensors)
    except FileNotFoundError as error:
        raise InputError(f"checkpoint {str(latest)!r} lacks {Path(str(error.filename)).name}{others}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise InputError(f"checkpoint {str(latest)!r} cannot be read: {error}{others}") from error


class CheckpointWriter:
    """Writes one checkpoint at a time, in the calling thread or in one of its own."""

    def __init__(self) -> None:
        #: Held by whoever saves or loads.
        self.lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def run(self, write: Callable[[], object], *, background: bool) -> None:
        """Write, after the one before has ended. An error of that one is raised once this one has been written, or begun."""
        with self.lock:
            earlier = self._ended()
            if background:
                self._thread = threading.Thread(target=self._run, args=(write,), name="autohete-checkpoint")
                self._thread.start()
            else:
                write()
            if earlier is not None:
                raise earlier

    def wait(self) -> None:
        """Return once nothing is being written.

        Raises:
            InputError: the last checkpoint could not be written, and nobody has been told yet.
        """
        with self.lock:
            earlier = self._ended()
        if earlier is not None:
            raise earlier

    def _ended(self) -> Exception | None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None  # only now: an interrupt may end the wait
        error, self._error = self._error, None
        return error

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except Exception as error:
            self._error = error


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the latest last."""
    try:
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(found, key=lambda path: int(_number(path)))


def _number(path: Path) -> str:
    return path.name.partition("-")[0]


def _renamed(part: Path, folder: Path, number: int, step: int) -> Path:
    """Give a written checkpoint its name, with the first free number from ``number`` on."""
    while True:
        target = folder / f"{number:06d}-step-{step:08d}"
        try:
            return part.rename(target)
        except OSError as error:  # another process has written its checkpoint of this step meanwhile
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            number += 1


@contextmanager
def hidden_folder(folder: Path) -> Iterator[Path]:
    """A new hidden folder, which is removed unless it gets another name. A lock marks it as in use."""
    part, descriptor = _locked_folder(folder)
    try:
        yield part
    finally:
        os.close(descriptor)
        shutil.rmtree(part, ignore_errors=True)


def _locked_folder(folder: Path) -> tuple[Path, int]:
    """A new hidden folder and the descriptor that holds its lock.

    Between its creation and its lock another process can take it for a leftover and remove it: then there is one more.
    """
    while True:
        part = folder / f"{_HIDDEN}{secrets.token_hex(8)}{_END}"
        part.mkdir()
        try:
            descriptor = os.open(part, os.O_RDONLY)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if part.exists():
            return part, descriptor
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Remove the hidden folders that nobody is writing."""
    for left in folder.glob(f"{_HIDDEN}*{_END}"):
        with suppress(OSError):  # it is in use, or another process removes it
            number = os.open(left, os.O_RDONLY)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left)
            finally:
                os.close(number)


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of ``Checkpoint._encoded``."""
    if isinstance(value, list):
        return [_decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "float":
        return float(inner)
    if kind == "tuple":
        return tuple(_decoded(item, tensors) for item in inner)
    return {key: _decoded(item, tensors) for key, item in inner}


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def bring_to_disk(path: Path) -> None:
    """Return once a file, or the names in a folder, are on disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
