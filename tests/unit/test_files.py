"""Files that a user names are read and written in one way: inputs have an end, and outputs destroy nothing."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from autohete.errors import InputError
from autohete.files import atomic_write, guarded_inputs, only_writer, parse_toml, read_bytes, read_text, write_text
from autohete.printable import printable, shown


def test_only_ordinary_files_of_a_limited_size_are_read(tmp_path: Path) -> None:
    """A device, a pipe, a folder and a file that is too large are refused at once; one byte less is read."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "ten").write_bytes(b"0123456789")
    for path, reason in (
        ("/dev/zero", "it is a device or a pipe"),
        (tmp_path / "pipe", "it is a device or a pipe"),
        (tmp_path, "Is a directory"),
        (tmp_path / "ten", "it has 10 bytes, more than 9"),
    ):
        with pytest.raises(InputError, match=f"^grid '.*' cannot be read: {reason}; give a grid$"):
            read_bytes(path, "grid", "give a grid", limit=9)
    assert read_bytes(tmp_path / "ten", "grid", "", limit=10) == b"0123456789"


def test_text_is_utf8_with_or_without_a_mark(tmp_path: Path) -> None:
    """The mark that some editors write is no part of the text; other encodings are refused."""
    (tmp_path / "a").write_bytes("\ufeffä".encode())
    assert read_text(tmp_path / "a", "grid", "give a grid") == "ä"
    (tmp_path / "a").write_bytes(b"\xe4")
    with pytest.raises(InputError, match=r"grid '.*' is not UTF-8 text: give a grid"):
        read_text(tmp_path / "a", "grid", "give a grid")


@pytest.mark.parametrize(
    "text",
    ["a" + ".a" * 100_000 + " = 1", "[" + '"a".' * 100_000 + "a]", "a = " + "[" * 100_000, "a=0x" + "f" * 9999],
    ids=["key", "table", "nesting", "integer"],
)
def test_toml_is_parsed_in_a_time_that_grows_with_its_length(text: str) -> None:
    """Keys of many parts, deep nesting and endless integers are errors, in less than a second."""
    begin = time.process_time()
    with pytest.raises(ValueError):  # noqa: PT011  (the messages are tomllib's and json's)
        parse_toml(text)
    assert time.process_time() - begin < 1


def test_what_a_command_has_read_is_not_overwritten(tmp_path: Path) -> None:
    """Also by a link to it; after the command it may be, and so may a file that the command continues."""
    given, link, other = tmp_path / "in.json", tmp_path / "link.json", tmp_path / "other.json"
    for path in (given, other):
        path.write_text("keep")
    link.symlink_to(given)
    with guarded_inputs():
        read_text(given, "model", "")
        read_bytes(other, "file", "", continued=True)
        for path in (given, link):
            with pytest.raises(InputError, match=r"this command reads it, as .*in.json'; give another file"):
                write_text(path, "lost")
        write_text(other, "new")
    assert (given.read_text(), other.read_text()) == ("keep", "new")
    write_text(given, "new")
    assert given.read_text() == "new"


def test_a_file_keeps_its_permissions(tmp_path: Path) -> None:
    """What replaces a file has its permissions; a new one has the usual ones; one that is read-only stays, for every user."""
    path = tmp_path / "a"
    write_text(path, "1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    for mode in (0o600, 0o640, 0o664):
        path.chmod(mode)
        write_text(path, "2")
        assert (stat.S_IMODE(path.stat().st_mode), path.read_text()) == (mode, "2")
    path.chmod(0o444)
    with pytest.raises(InputError, match="it is read-only; give another file, or make it writable"):
        write_text(path, "3")
    assert path.read_text() == "2"
    assert [found.name for found in tmp_path.iterdir()] == ["a"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_pipe_without_a_reader_is_not_waited_for(tmp_path: Path) -> None:
    """It is an error; with a reader the pipe is written."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(InputError, match="cannot be written: No such device or address"):
        write_text(path, "text")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    atomic_write(path, lambda stream: stream.write(b"text"))
    assert os.read(reader, 9) == b"text"
    os.close(reader)


def test_a_file_has_one_writer_at_a_time(tmp_path: Path) -> None:
    """A second one is refused until the first has ended; what neither has written is not left behind."""
    path = tmp_path / "a.csv"
    with only_writer(str(path)):
        with pytest.raises(InputError, match=r"a.csv' is being written by another process: wait"), only_writer(str(path)):
            pass
        assert path.exists()
    assert not path.exists()
    with only_writer(str(path)):
        path.write_text("row")
    assert path.read_text() == "row"
    with only_writer("/dev/null"), only_writer("/dev/null"):
        pass


def test_text_from_outside_is_printable() -> None:
    """What a terminal would obey is shown as its escape; letters of all languages stay; what is long is cut."""
    assert printable("größe 模型 $x$ [b]") == "größe 模型 $x$ [b]"
    assert printable("\x1b[31m\x07\u202e\udcff\n\x9b") == r"\x1b[31m\x07\u202e\udcff\n\x9b"
    assert shown("a" * 200) == repr("a" * 200)
    assert shown("a" * 10**6) == f"'{'a' * 199}… (1,000,000 characters)"
    assert len(shown([*range(10**4)])) < 250
