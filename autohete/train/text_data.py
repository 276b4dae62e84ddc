"""Training text from a file, a folder or Python's own source code; tokenizers; and batches of token windows."""

from __future__ import annotations

import hashlib
import itertools
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from autohete.errors import InputError
from autohete.files import read_bytes

if TYPE_CHECKING:
    import tokenizers

_PROSE = {".txt", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv", ".json", ".jsonl", ".toml", ".yaml", ".yml", ".ini"}
_CODE = {".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh", ".sql"}
#: Suffixes of the files in a folder that are read as text.
SUFFIXES = frozenset(_PROSE | _CODE)
#: Folders left out: installed packages, and the standard library's tests, tables, applications and old copies.
_NO_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "encodings", "idlelib", "turtledemo", "lib2to3", "distutils"}
_LIBRARY_CHARACTERS = 4_000_000
#: Bytes of a file.
_LARGEST = 2**32


def read_text(source: str | Path | None) -> str:
    """Read text to train on.

    Args:
        source: a UTF-8 text file; a folder, for all UTF-8 files under it that end in :data:`SUFFIXES`, in the order of
            their paths; or None for the first 4,000,000 characters of Python's standard library, which every machine has.

    Raises:
        InputError: the source cannot be read, or contains no text.
    """
    path = Path(sysconfig.get_path("stdlib") if source is None else source)
    try:
        if source is None:
            text = "\n".join(_texts(path, {".py"}, _NO_LIBRARY))[:_LIBRARY_CHARACTERS]
        elif path.is_dir() and source != "":  # an empty string is a mistake, not the working directory
            text = "\n".join(_texts(path, SUFFIXES, set()))
        else:
            text = _text(path)
    except (OSError, ValueError) as error:  # a NUL in the path is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"text {str(path)!r} cannot be read: {reason}; give a UTF-8 text file or a folder of them") from error
    if not text.strip():
        endings = " ".join(sorted(SUFFIXES))
        raise InputError(f"{str(path)!r} has no UTF-8 text: give a text file, or a folder with files that end in {endings}")
    return text


def _texts(folder: Path, suffixes: set[str] | frozenset[str], without: set[str]) -> Iterator[str]:
    """Return the texts under ``folder`` in the order of their paths, except in folders named in ``without``."""

    def refuse(error: OSError) -> None:  # os.walk would skip a folder that it cannot list
        raise error

    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name not in without]
        found += [Path(parent, name) for name in names if Path(name).suffix.lower() in suffixes]
    # Skip broken links, and pipes, on which reading would block.
    return filter(None, (_text(path) for path in sorted(found) if path.is_file()))


def _text(path: Path) -> str:
    """Return the file's text; empty if it is not UTF-8 or contains a NUL, as binary files do."""
    try:
        text = read_bytes(path, "text", "give a UTF-8 text file or a folder of them", _LARGEST).decode()
    except UnicodeDecodeError:
        return ""
    return "" if "\0" in text else text.replace("\r\n", "\n").replace("\r", "\n")


class Tokenizer(Protocol):
    """Converts text to token ids and back; decoding encoded text gives the same text."""

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens; ids are below this."""

    def encode(self, text: str) -> Tensor:
        """Return the ids of ``text``: (tokens,), int64."""

    def decode(self, ids: Tensor) -> str:
        """Return the text of ``ids`` (tokens,); bytes that are not UTF-8 become U+FFFD. InputError: an id out of range."""


class ByteTokenizer:
    """A :class:`Tokenizer` of UTF-8 bytes: nothing to train, nothing to install."""

    vocabulary_size = 256

    def encode(self, text: str) -> Tensor:
        """Return the bytes of ``text``: (tokens,), int64."""
        return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).astype(np.int64))

    def decode(self, ids: Tensor) -> str:
        """Decode the bytes ``ids`` (tokens,); invalid UTF-8 becomes U+FFFD. InputError: an id that is not a byte."""
        return bytes(_numbers(ids, self.vocabulary_size)).decode(errors="replace")


@dataclass(frozen=True, slots=True)
class _TrainedTokenizer:
    inner: tokenizers.Tokenizer

    @property
    def vocabulary_size(self) -> int:
        return self.inner.get_vocab_size()

    def encode(self, text: str) -> Tensor:
        pieces = self.inner.encode_batch_fast(pieces_of(text))
        return torch.tensor([number for piece in pieces for number in piece.ids], dtype=torch.int64)

    def decode(self, ids: Tensor) -> str:
        return self.inner.decode(_numbers(ids, self.vocabulary_size))


def pieces_of(text: str) -> list[str]:
    """Cut ``text`` at fixed places: pieces are encoded in parallel, and the cuts cost about one token in ten thousand."""
    return [text[start : start + 2**16] for start in range(0, len(text), 2**16)]


def _numbers(ids: Tensor, vocabulary_size: int) -> list[int]:
    numbers: list[int] = ids.flatten().tolist()
    for number in numbers:
        if type(number) is not int or not 0 <= number < vocabulary_size:
            raise InputError(f"token id {number!r} cannot be decoded: ids are whole numbers from 0 to {vocabulary_size - 1}")
    return numbers


def train_tokenizer(text: str, vocabulary_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on ``text``, without download; the same text gives the same tokenizer.

    Args:
        text: the text to train on.
        vocabulary_size: number of tokens: the 256 bytes and the most common merges. A short text yields fewer tokens.

    Raises:
        InputError: fewer than 257 tokens, or the package ``tokenizers`` is not installed.
    """
    _at_least(257, vocabulary_size=vocabulary_size)
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        message = "a trained tokenizer needs tokenizers: pip install 'autohete[huggingface]', or use ByteTokenizer"
        raise InputError(message) from error
    inner, split = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.pre_tokenizer, inner.decoder = split, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary_size, initial_alphabet=split.alphabet(), show_progress=False)
    inner.train_from_iterator(pieces_of(text), trainer)
    return _TrainedTokenizer(inner)


class TextData:
    """Batches of a text's tokens, split into a first part to train on and a last part to validate on.

    A batch is ids and targets, each (batch, sequence), int64, on the CPU; the target of a token is the next one.

    Args:
        text: the text to train and validate on.
        tokenizer: converts the text to tokens, once.
        sequence_length, batch_size: shape of a batch.
        seed: seed of the training windows, at least 0.
        validation_share: share of the tokens to validate on, between 0 and 1.

    Raises:
        InputError: a value out of range, too few tokens to train on (one window) or to validate on (one batch).
    """

    def __init__(
        self,
        text: str,
        tokenizer: Tokenizer,
        sequence_length: int,
        batch_size: int,
        seed: int = 0,
        validation_share: float = 0.1,
    ) -> None:
        _at_least(1, sequence_length=sequence_length, batch_size=batch_size)
        _at_least(0, seed=seed)
        if not 0 < validation_share < 1:
            raise InputError(f"validation_share is {validation_share!r}: it must be between 0 and 1, such as 0.1")
        self.sequence_length, self.batch_size, self.seed = sequence_length, batch_size, seed
        tokens = tokenizer.encode(text)
        cut = round(len(tokens) * (1 - validation_share))
        self._train, self._validation = tokens[:cut], tokens[cut:]
        # With less than one batch, validation would be empty and its mean loss NaN.
        for part, have, windows in (("training", self.train_tokens, 1), ("validation", self.validation_tokens, batch_size)):
            if have < (need := windows * sequence_length + 1):
                raise InputError(
                    f"the {part} part has {have} of the text's {len(tokens)} tokens, but needs {need}, {windows} × "
                    f"{sequence_length} + 1: give more text, shorter sequences or smaller batches"
                )

    @property
    def digest(self) -> str:
        """SHA-256 of all tokens, as hexadecimal digits: the same text and tokenizer have the same."""
        return hashlib.sha256(self._train.numpy().tobytes() + self._validation.numpy().tobytes()).hexdigest()

    @property
    def train_tokens(self) -> int:
        """Number of tokens to train on."""
        return len(self._train)

    @property
    def validation_tokens(self) -> int:
        """Number of tokens to validate on."""
        return len(self._validation)

    def train(self, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Return an endless iterator of batches of random windows; each depends only on the seed and its step number.

        Args:
            first_step: number of the first batch: ``k`` to resume after ``k`` steps. InputError: it is negative.
        """
        _at_least(0, first_step=first_step)
        return map(self._drawn, itertools.count(first_step))

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate once over the validation part, window by window, in full batches; leftover tokens at its end are not used."""
        size = self.batch_size * self.sequence_length
        for start in range(0, self.validation_tokens - size, size):
            yield self._windows(self._validation, torch.arange(start, start + size, self.sequence_length))

    def _drawn(self, step: int) -> tuple[Tensor, Tensor]:
        # Torch's CPU generator uses only 32 bits of its seed; numpy mixes seed and step into them.
        mixed = np.random.SeedSequence(self.seed, spawn_key=(step,)).generate_state(1)
        generator = torch.Generator().manual_seed(int(mixed[0]))
        places = self.train_tokens - self.sequence_length
        return self._windows(self._train, torch.randint(places, (self.batch_size,), generator=generator))

    def _windows(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        index = starts[:, None] + torch.arange(self.sequence_length)
        return tokens[index], tokens[index + 1]


def _at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if type(value) is not int or value < least:
            raise InputError(f"{name} is {value!r}: it must be a whole number of at least {least}")
