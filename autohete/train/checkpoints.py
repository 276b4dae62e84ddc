"""Checkpoints of a training on disk: a folder for each, complete or not there, without pickled code.

    FOLDER/step-00000020/tensors-0.safetensors    all tensors, in files of about a gigabyte
                         state.json               everything else, and the digests of those files and of itself

A checkpoint is written into a hidden folder beside, brought to disk, and renamed; those before it stay until then. What a
killed process has left behind is removed by the next save.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from autohete.errors import InputError, check_whole
from autohete.files import make_folder

_FORMAT = "autohete-checkpoint 1"
_STATE = "state.json"
#: Bytes of tensors in a file. Writing a file needs as much memory again.
_SHARD_BYTES = 2**30
_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_PARTS = "format", "shards", "state"


def write_checkpoint(folder: str | Path, step: int, state: Mapping[str, Any], keep: int) -> Path:
    """Write ``state`` as a new checkpoint, and remove the oldest ones.

    Args:
        folder: contains the checkpoints; it is created.
        step: number of steps so far.
        state: plain values and tensors in dictionaries, lists and tuples.
        keep: number of checkpoints that stay, this one included.

    Returns:
        The checkpoint's own folder.

    Raises:
        InputError: a value cannot be written, or the folder not be written to. Earlier checkpoints are as before.
    """
    check_whole("keep", keep, 1)
    tensors: dict[str, Tensor] = {}
    plain = _plain(state, "state", tensors, set())
    folder = Path(folder)
    make_folder(folder)
    part = folder / f".{secrets.token_hex(8)}.part"
    try:
        for left in folder.glob(".*.part"):
            shutil.rmtree(left)
        part.mkdir()
        shards = {}
        for number, shard in enumerate(_shards(tensors)):
            file = part / f"tensors-{number}.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in shard.items()}, file)
            shards[file.name] = _digest(file)
            _bring_to_disk(file)
        content = {"format": _FORMAT, "shards": shards, "state": plain}
        (part / _STATE).write_text(json.dumps(content | {"digest": _digest_of(content)}))
        _bring_to_disk(part / _STATE)
        _bring_to_disk(part)
        target = _free_name(folder, step)
        part.rename(target)
        _bring_to_disk(folder)
        for old in checkpoints(folder)[:-keep]:
            gone = old.rename(folder / f".{secrets.token_hex(8)}.part")
            shutil.rmtree(gone)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"the checkpoint of step {step} cannot be written to {str(folder)!r}: {reason}; earlier checkpoints are as before. "
            "Give a folder that is writable and has room"
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def read_checkpoint(folder: str | Path) -> dict[str, Any]:
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
        if rest["format"] != _FORMAT or _digest_of(rest) != content["digest"]:
            raise ValueError(f"it is not of the format {_FORMAT!r}, or has changed")
        tensors: dict[str, Tensor] = {}
        for name, digest in rest["shards"].items():
            if _digest(latest / name) != digest:
                raise ValueError(f"{name} has changed since it was written")
            tensors |= load_file(latest / name)
        state: dict[str, Any] = _read(rest["state"], tensors)
    except FileNotFoundError as error:
        raise InputError(f"checkpoint {str(latest)!r} lacks {Path(str(error.filename)).name}{others}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise InputError(f"checkpoint {str(latest)!r} cannot be read: {error}{others}") from error
    return state


class BackgroundWrite:
    """Writes one checkpoint at a time in a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], object]) -> None:
        """Begin to write, after the one before."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="autohete-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Return once nothing is being written.

        Raises:
            InputError: it could not be written, and nobody has been told yet.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], object]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the latest last."""
    try:
        found = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    except OSError:
        return []
    return [path for match, path in sorted(found, key=lambda each: (int(each[0][1]), int(each[0][2] or 0)))]


def _free_name(folder: Path, step: int) -> Path:
    """Where the checkpoint goes; one of the same step stays until then."""
    target, number = folder / f"step-{step:08d}", 0
    while target.exists():
        number += 1
        target = folder / f"step-{step:08d}.{number}"
    return target


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


def _plain(value: Any, where: str, tensors: dict[str, Tensor], known: set[int]) -> Any:
    """``value`` as JSON has it; ``tensors`` collects its tensors by their place, each with memory of its own."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise InputError(f"{where} is a tensor of layout {value.layout} on {value.device}: a checkpoint has ordinary ones")
        alone = value.untyped_storage().nbytes() == value.nbytes and value.untyped_storage().data_ptr() not in known
        tensors[where] = value.detach().to("cpu") if alone else value.detach().to("cpu", copy=True).contiguous()
        known.add(value.untyped_storage().data_ptr())
        return {"tensor": where}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, f"{where}[{place}]", tensors, known) for place, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        if not all(isinstance(key, (str, int)) for key in value):
            raise InputError(f"{where} has keys that are neither text nor whole numbers: a checkpoint has no others")
        return {"dict": [[key, _plain(item, f"{where}.{key}", tensors, known)] for key, item in value.items()]}
    raise InputError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot have: give numbers, text, tensors, and dictionaries, "
        "lists and tuples of them"
    )


def _read(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of :func:`_plain`."""
    if isinstance(value, list):
        return [_read(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "float":
        return float(inner)
    if kind == "tuple":
        return tuple(_read(item, tensors) for item in inner)
    return {key: _read(item, tensors) for key, item in inner}


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _bring_to_disk(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
