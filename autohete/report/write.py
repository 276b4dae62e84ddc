"""Files appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from autohete.errors import InputError


def atomic_write(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a file beside ``path`` and move it there once all of it is on the disk.

    Whatever goes wrong, ``path`` stays as it was and nothing else stays behind. A device or a pipe (``/dev/stdout``)
    is written directly: it cannot be replaced.

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
    """:func:`atomic_write` of UTF-8 text."""
    atomic_write(path, lambda stream: stream.write(text.encode()))


def make_folder(path: str | Path) -> None:
    """Make the folder ``path`` and those above it where they do not exist, and see that files can be put there.

    Raises:
        InputError: it cannot be made or written.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"folder {str(path)!r} cannot be made: {error.strerror or error}; give one that is writable"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"folder {str(path)!r} is not writable: give one that is")


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:  # a folder refuses here
            write(stream)
        return
    target = Path(os.path.realpath(path))  # through a symbolic link: the link stays
    # Not tempfile: its files are private to their owner, and the result is to have the usual permissions.
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as stream:
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, target)
    except BaseException:  # an interrupt, too, leaves nothing behind
        part.unlink(missing_ok=True)
        raise
