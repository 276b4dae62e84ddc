"""Reading the files that a user names, and writing files that appear whole or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO

from autohete.errors import InputError
from autohete.printable import shown

#: Bytes that a ``config.json`` may have, and a TOML file, which is parsed more slowly; published ones have a few thousand.
LARGEST_TEXT, LARGEST_TOML = 10_000_000, 1_000_000
#: A key of many parts, on which the parser of TOML takes a time that grows with their square.
_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*\.[ \t]*){32}""")
#: What the running command has read, as device and inode -> path. None where no command runs, as in a library.
_inputs: ContextVar[dict[tuple[int, int], str] | None] = ContextVar("inputs", default=None)


# --- reading ------------------------------------------------------------------------------------------------------


@contextmanager
def guarded_inputs() -> Iterator[None]:
    """Refuse to overwrite, until the end, what :func:`opened` has opened. For a command, which reads before it writes."""
    token = _inputs.set({})
    try:
        yield
    finally:
        _inputs.reset(token)


def read_bytes(path: str | Path, what: str, cure: str, limit: int = LARGEST_TEXT, *, continued: bool = False) -> bytes:
    """Return the contents of an ordinary file.

    Args:
        path: the file.
        what: what it is to be, such as ``grid``; for errors.
        cure: what to give instead, such as ``give a TOML file``; for errors.
        limit: most bytes that such a file can have.
        continued: the command will add to it.

    Raises:
        InputError: it cannot be read, is larger, or is a folder, a device or a pipe, which may have no end.
    """
    with opened(path, what, cure, continued=continued) as stream:
        found = os.fstat(stream.fileno()).st_size
        data = stream.read(limit + 1) if found <= limit else b""
    if (size := max(found, len(data))) > limit:
        raise InputError(f"{what} {shown(str(path))} cannot be read: it has {size:,} bytes, more than {limit:,}; {cure}")
    return data


@contextmanager
def opened(path: str | Path, what: str, cure: str, *, continued: bool = False) -> Iterator[BinaryIO]:
    """Open an ordinary file of any size to read it; the arguments are those of :func:`read_bytes`.

    Raises:
        InputError: it cannot be read, or is a folder, a device or a pipe, which may have no end.
    """

    def refused(reason: object) -> InputError:
        return InputError(f"{what} {shown(str(path))} cannot be read: {reason}; {cure}")

    try:
        stream = open(path, "rb", opener=open_at_once)  # noqa: SIM115  (closed below)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise refused(getattr(error, "strerror", None) or error) from error
    with stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise refused("it is a device or a pipe")
        if (inputs := _inputs.get()) is not None and not continued:
            inputs[found.st_dev, found.st_ino] = str(path)
        try:
            yield stream
        except OSError as error:
            raise refused(error.strerror or error) from error


def read_text(path: str | Path, what: str, cure: str, limit: int = LARGEST_TEXT) -> str:
    """Return the UTF-8 text of an ordinary file as :func:`read_bytes` does, without the mark that some editors begin it with.

    Raises:
        InputError: as :func:`read_bytes`, or the file is not UTF-8 text.
    """
    try:
        return read_bytes(path, what, cure, limit).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} {shown(str(path))} is not UTF-8 text: {cure}") from error


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML as :func:`tomllib.loads` does, in a time that grows with its length, with dates as text: a date needs no
    quotes there.

    Raises:
        ValueError: it is not TOML, nests too deep, or has a key of more than 32 parts or a number of thousands of digits.
    """
    if match := _LONG_KEY.search(text):
        raise ValueError(f"the key {shown(match[0])} has too many parts")
    try:
        tables: dict[str, Any] = json.loads(json.dumps(tomllib.loads(text), default=str))
        return tables
    except RecursionError as error:
        raise ValueError("it nests too deep") from error


def open_at_once(path: str, flags: int) -> int:
    """Open a file for :func:`open`; do not wait for the other end of a pipe, and do not let a terminal control the process."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


# --- writing ------------------------------------------------------------------------------------------------------


def atomic_write(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a temporary file next to ``path``, and move it to ``path`` once all of it is on disk.

    On any failure ``path`` is unchanged and nothing is left behind. A file that is there keeps its permissions. A device or a
    pipe (``/dev/stdout``) is written directly, since it cannot be replaced.

    Raises:
        InputError: ``path`` cannot be written, is read-only, or is a file that the running command has read.
    """
    check_writable(path)
    try:
        _write(Path(path), write)
    except OSError as error:
        raise InputError(
            f"{shown(str(path))} cannot be written: {error.strerror or error}; "
            "give a file in a folder that exists, is writable and has room"
        ) from error


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text with :func:`atomic_write`."""
    atomic_write(path, lambda stream: stream.write(text.encode()))


def check_writable(path: str | Path) -> None:
    """Check that :func:`atomic_write` may write ``path``, as far as that can be known before.

    Raises:
        InputError: names the reason, and what to give instead.
    """
    if reason := _no_output(str(path)):
        raise InputError(f"{shown(str(path))} cannot be written: {reason}")


def _no_output(path: str) -> str:
    """Return why ``path`` cannot be written and the cure; empty if it can."""
    cure = "give a file in a folder that exists and is writable"
    try:
        found = os.stat(path)
    except FileNotFoundError:
        found = None
    except (OSError, ValueError) as error:
        return f"{getattr(error, 'strerror', None) or error}; {cure}"
    folder = os.path.dirname(os.path.realpath(path))
    if found is not None:
        if read := (_inputs.get() or {}).get((found.st_dev, found.st_ino)):
            return f"this command reads it, as {read!r}; give another file"
        if stat.S_ISDIR(found.st_mode):
            return f"it is a folder; {cure}"
        if stat.S_ISBLK(found.st_mode):
            return f"it is a drive; {cure}"
        if not stat.S_ISREG(found.st_mode):
            return ""  # such as /dev/stdout
        # The superuser may write what has no permission to be written, but does not mean it either.
        if not found.st_mode & 0o222 or not os.access(path, os.W_OK):
            return "it is read-only; give another file, or make it writable"
    if not os.path.isdir(folder):
        return f"there is no folder {folder!r}; {cure}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"folder {folder!r} is not writable; {cure}"
    return ""


def make_folder(path: str | Path) -> None:
    """Create the folder ``path`` and its parents if they do not exist, and check that it is writable.

    Raises:
        InputError: the folder cannot be created or is not writable.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"folder {shown(str(path))} cannot be created: {error.strerror or error}; give one that is writable"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise InputError(f"folder {shown(str(path))} is not writable: give one that is")


@contextmanager
def only_writer(path: str) -> Iterator[None]:
    """Keep other processes that call this from ``path``, an ordinary file, until the end. It is created if it is not there, and
    removed if nothing was written to it. The system ends the lock with the process. A device or a pipe has no lock.

    Raises:
        InputError: another process has it, or it cannot be written.
    """
    check_writable(path)
    if os.path.exists(path) and not os.path.isfile(path):
        yield
        return
    with _locked(path):
        try:
            yield
        finally:
            with suppress(FileNotFoundError):
                if not os.path.getsize(path):
                    os.remove(path)


@contextmanager
def _locked(path: str) -> Iterator[None]:
    while True:
        try:
            stream = open(path, "ab")  # noqa: SIM115  (closed below)
        except OSError as error:
            raise InputError(f"{path!r} cannot be written: {error.strerror or error}; give another file") from error
        with stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InputError(
                    f"{path!r} is being written by another process: wait until that ends, or give another file"
                ) from error
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(stream.fileno()), os.stat(path)):
                    yield
                    return
        # Its last writer has removed or replaced it since it was opened.


def _write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    if path.exists() and not path.is_file():
        with open(path, "wb", opener=open_at_once) as stream:  # a pipe that no one reads fails here
            os.set_blocking(stream.fileno(), True)
            write(stream)
        return
    target = Path(os.path.realpath(path))  # follows a symbolic link, which stays
    # Not tempfile: its files are private to their owner, and the result should have the usual permissions.
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as stream:
            with suppress(FileNotFoundError):
                os.fchmod(stream.fileno(), stat.S_IMODE(target.stat().st_mode))
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, target)
    except BaseException:  # including interrupts: leave nothing behind
        part.unlink(missing_ok=True)
        raise
