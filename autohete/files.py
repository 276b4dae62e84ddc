"""Atomic writing of files: they appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from autohete.errors import InputError


def atomic_write(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a temporary file next to ``path``, and move it to ``path`` once all of it is on disk.

    On any failure ``path`` is unchanged and nothing is left behind. A device or a pipe (``/dev/stdout``) is written
    directly, since it cannot be replaced.

    Raises:
        InputError: ``path`` cannot be written.
    """
    try:
        _write(Path(path), write)
    except OSError as error:
        raise InputError(
            f"{str(path)!r} cannot be written: {error.strerror or error}; "
            "give a file in a folder that exists, is writable and has room"
        ) from error


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text with :func:`atomic_write`."""
    atomic_write(path, lambda stream: stream.write(text.encode()))


def make_folder(path: str | Path) -> None:
    """Create the folder ``path`` and its parents if they do not exist, and check that it is writable.

    Raises:
        InputError: the folder cannot be created or is not writable.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"folder {str(path)!r} cannot be created: {error.strerror or error}; give one that is writable"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"folder {str(path)!r} is not writable: give one that is")


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:  # raises for a folder
            write(stream)
        return
    target = Path(os.path.realpath(path))  # follows a symbolic link, which stays
    # Not tempfile: its files are private to their owner, and the result should have the usual permissions.
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, target)
    except BaseException:  # including interrupts: leave nothing behind
        part.unlink(missing_ok=True)
        raise
