"""Text as batches: what is read, tokens that give the text back, windows that are pieces of the right part."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autohete.errors import InputError
from autohete.train.text_data import ByteTokenizer, TextData, Tokenizer, read_text, train_tokenizer


class Places:
    """A tokenizer whose token is its place in the text, so that a window tells where it was cut."""

    vocabulary_size = 1_000_000

    def encode(self, text: str) -> Tensor:
        """0, 1, 2 …"""
        return torch.arange(len(text))

    def decode(self, ids: Tensor) -> str:
        """Nothing that was ever said."""
        return "x" * len(ids)


@st.composite
def texts_of_places(draw: st.DrawFn) -> TextData:
    """Data of any shape, its text long enough for one batch to validate on and one window to train on."""
    sequence, batch = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    train = draw(st.integers(sequence + 1, 80))
    validation = draw(st.integers(sequence * batch + 1, 80))
    share = validation / (train + validation)
    data = TextData("x" * (train + validation), Places(), sequence, batch, draw(st.integers(0, 2**70)), share)
    assert (data.train_tokens, data.validation_tokens) == (train, validation)
    return data


# --- reading ------------------------------------------------------------------------------------------------------


def test_a_file_is_read(tmp_path: Path) -> None:
    """A file's text is what was written, given as a path or as a string, whatever its ending."""
    path = tmp_path / "novel"
    path.write_text("Grüße\n", encoding="utf-8")
    assert read_text(path) == read_text(str(path)) == "Grüße\n"


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    """All text files under a folder are read in the order of their paths; other endings, other bytes and no files are not."""
    for name in ("b.txt", "a/z.md", "a/b/c.PY", "c.txt", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "picture.png").write_text("not this one")
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "nul.txt").write_bytes(b"a\0b")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "nowhere.txt").symlink_to(tmp_path / "gone")
    assert read_text(tmp_path) == "\n".join(["a/b/c.PY", "a/z.md", "a.txt", "b.txt", "c.txt"])


def test_every_machine_has_text() -> None:
    """Without a source there are four million characters of Python, the same each time, nothing of installed packages."""
    text = read_text(None)
    assert len(text) == 4_000_000
    assert text == read_text(None)
    assert "\ndef " in text
    assert Path(pytest.__file__).read_text(encoding="utf-8") not in text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "none.txt' cannot be read: No such file"),
        ("a\0b", None, "cannot be read: embedded null"),
        ("empty.txt", b"", "empty.txt' has no UTF-8 text: give a text file, or a folder with files that end in .*[.]txt"),
        ("blank.txt", b" \n\t\n", "has no UTF-8 text"),
        ("latin.txt", b"\xff\xfe\x00", "has no UTF-8 text"),
        ("zeros.txt", b"\0" * 8, "has no UTF-8 text"),
    ],
)
def test_a_file_without_text_is_refused(name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    """A file that is missing, empty or binary is an error that names it and says what to give."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_text(tmp_path / name)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    """A folder that holds no text file is an error; so is an empty path, which is not taken for the working directory."""
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(InputError, match="has no UTF-8 text"):
        read_text(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        read_text("")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="needs a user who can be denied something")
def test_what_may_not_be_read_is_not_left_out(tmp_path: Path) -> None:
    """A file or a folder inside that may not be read is an error: the text would be another without it."""
    (tmp_path / "a.txt").write_text("a")
    for secret in (tmp_path / "b.txt", tmp_path / "c"):
        secret.mkdir() if secret.name == "c" else secret.write_text("b")
        secret.chmod(0)
        with pytest.raises(InputError, match="cannot be read: Permission denied"):
            read_text(tmp_path)
        secret.chmod(0o700)


# --- tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.text())
def test_bytes_give_the_text_back(text: str) -> None:
    """Decoding the bytes of any text gives the text; ids are the UTF-8 bytes, int64."""
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == torch.int64
    assert ids.tolist() == list(text.encode())
    assert ByteTokenizer().decode(ids) == text


def test_half_a_character_is_replaced() -> None:
    """Bytes that are not UTF-8, such as a model makes, are decoded with the replacement character."""
    assert ByteTokenizer().decode(torch.tensor([65, 0xC3])) == "A\ufffd"


@pytest.mark.parametrize("ids", [[256], [-1], [0.5], [True]])
def test_ids_that_there_are_not_are_refused(ids: list[float]) -> None:
    """An id outside the vocabulary or no whole number is an error that says which ids there are."""
    with pytest.raises(InputError, match="whole numbers from 0 to 255"):
        ByteTokenizer().decode(torch.tensor(ids))


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    """A tokenizer of 400 tokens, learnt from a little source."""
    pytest.importorskip("tokenizers")
    return train_tokenizer(read_text(__file__), 400)


@pytest.mark.slow
@given(text=st.text())
def test_trained_tokens_give_the_text_back(trained: Tokenizer, text: str) -> None:
    """Decoding what a trained tokenizer encoded gives the text, also text unlike that which it was trained on."""
    ids = trained.encode(text)
    assert ids.dtype == torch.int64
    assert ids.dim() == 1
    assert trained.decode(ids) == text


def test_trained_tokens_are_fewer_than_bytes(trained: Tokenizer) -> None:
    """Training fills the vocabulary, every id is below its size, and the text gets shorter; long texts come back too."""
    text = read_text(__file__) * 20
    ids = trained.encode(text)
    assert trained.vocabulary_size == 400
    assert 0 <= int(ids.min()) <= int(ids.max()) < 400
    assert len(ids) < len(text) / 1.5
    assert trained.decode(ids) == text
    with pytest.raises(InputError, match="whole numbers from 0 to 399"):
        trained.decode(torch.tensor([400]))


def test_a_short_text_trains_what_there_is() -> None:
    """A text with few pairs gives a smaller vocabulary than asked for, and the tokenizer says so."""
    pytest.importorskip("tokenizers")
    assert train_tokenizer("ab", 1000).vocabulary_size == 257


@pytest.mark.slow
def test_training_a_tokenizer_is_deterministic(trained: Tokenizer) -> None:
    """The same text gives the same tokens in another process, with other hash seeds and without threads."""
    code = (
        "from autohete.train.text_data import read_text, train_tokenizer; import sys; "
        "text = read_text(sys.argv[1]); print(train_tokenizer(text, 400).encode(text).tolist())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.run(
        [sys.executable, "-c", code, __file__], env=environment, check=True, capture_output=True, text=True
    )
    assert process.stdout == f"{trained.encode(read_text(__file__)).tolist()}\n"
    assert process.stderr == ""


def test_a_tokenizer_that_cannot_be_trained_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens than bytes and one, and a missing package, are errors that say what to do."""
    with pytest.raises(InputError, match="vocabulary_size is 256: it must be a whole number of at least 257"):
        train_tokenizer("text", 256)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"pip install 'autohete\[huggingface\]'"):
        train_tokenizer("text", 300)


# --- batches ------------------------------------------------------------------------------------------------------


@given(texts_of_places())
def test_train_windows_are_pieces_of_the_train_part(data: TextData) -> None:
    """A training batch has its shape; each row is contiguous, its targets one further, and no token is a validation token."""
    for ids, targets in islice(data.train(), 3):
        assert ids.shape == targets.shape == (data.batch_size, data.sequence_length)
        assert ids.dtype == targets.dtype == torch.int64
        assert torch.equal(ids, ids[:, :1] + torch.arange(data.sequence_length))
        assert torch.equal(targets, ids + 1)
        assert 0 <= int(ids.min()) <= int(targets.max()) < data.train_tokens


@given(texts_of_places())
def test_validation_goes_through_its_part_in_order(data: TextData) -> None:
    """Validation reads its part from the first token, without gap or overlap, and leaves less than a batch; twice the same."""
    batches = list(data.validation())
    ids = torch.cat([ids.flatten() for ids, _ in batches])
    assert all(ids.shape == targets.shape == (data.batch_size, data.sequence_length) for ids, targets in batches)
    assert all(torch.equal(targets, ids + 1) for ids, targets in batches)
    assert torch.equal(ids, data.train_tokens + torch.arange(len(ids)))
    assert 0 <= data.validation_tokens - 1 - len(ids) < data.batch_size * data.sequence_length
    assert torch.equal(ids, torch.cat([ids.flatten() for ids, _ in data.validation()]))


@given(texts_of_places(), st.integers(0, 10))
def test_a_resumed_run_goes_on_as_it_would_have(data: TextData, step: int) -> None:
    """The batches from step k on are those that follow k batches, whatever was drawn elsewhere; torch's own RNG stays."""
    state = torch.get_rng_state()
    continued = list(islice(data.train(), step, step + 3))
    for (ids, targets), (same_ids, same_targets) in zip(islice(data.train(step), 3), continued, strict=True):
        assert torch.equal(ids, same_ids)
        assert torch.equal(targets, same_targets)
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_and_steps_differ() -> None:
    """Other seeds and other steps draw other batches, also seeds that agree in their low 32 bits; the same seed the same."""

    def drawn(seed: int) -> list[list[int]]:
        data = TextData("x" * 10_000, Places(), 8, 4, seed)
        return [ids[:, 0].tolist() for ids, _ in islice(data.train(), 50)]

    batches = [tuple(batch) for seed in (0, 1, 2**32, 2**32 + 1) for batch in drawn(seed)]
    assert len(set(batches)) == len(batches)
    assert drawn(0) == drawn(0)


def test_every_window_is_drawn() -> None:
    """Each place that a window fits is drawn sooner or later, the first and the last too."""
    data = TextData("x" * 20, Places(), 3, 4, validation_share=0.65)
    assert data.train_tokens == 7
    assert {start for ids, _ in islice(data.train(), 50) for start in ids[:, 0].tolist()} == {0, 1, 2, 3}


def test_batches_are_of_the_text() -> None:
    """With a real tokenizer a batch holds pieces of the text."""
    text = "".join(f"{number} " for number in range(2000))
    tokenizer = ByteTokenizer()
    data = TextData(text, tokenizer, 32, 2)
    assert data.train_tokens + data.validation_tokens == len(text)
    for ids, _ in [*islice(data.train(), 5), *data.validation()]:
        assert all(tokenizer.decode(row) in text for row in ids)


def _data(
    characters: int = 100, sequence_length: int = 4, batch_size: int = 2, seed: int = 0, validation_share: float = 0.1
) -> TextData:
    return TextData("x" * characters, Places(), sequence_length, batch_size, seed, validation_share)


def test_the_shortest_text_that_is_enough() -> None:
    """One token less in either part than one window to train on and one batch to validate on is refused with the numbers."""
    assert len(list(_data(5 + 9, validation_share=9 / 14).validation())) == 1
    with pytest.raises(InputError, match=r"training part has 4 of the text's 13 tokens, but needs 5, 1 × 4 [+] 1: give more"):
        _data(4 + 9, validation_share=9 / 13)
    with pytest.raises(InputError, match=r"validation part has 8 of the text's 13 tokens, but needs 9, 2 × 4 [+] 1: give more"):
        _data(5 + 8, validation_share=8 / 13)
    with pytest.raises(InputError, match="training part has 0 of the text's 0 tokens"):
        _data(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": 0}, "sequence_length is 0: it must be a whole number of at least 1"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"batch_size": 2.0}, "batch_size is 2.0"),
        ({"seed": -1}, "seed is -1: it must be a whole number of at least 0"),
        ({"validation_share": 0.0}, "validation_share is 0.0: it must be between 0 and 1"),
        ({"validation_share": 1}, "validation_share is 1"),
        ({"validation_share": float("nan")}, "validation_share is nan"),
    ],
)
def test_absurd_settings_are_refused(changes: dict[str, int], message: str) -> None:
    """Sizes below one, a negative seed and a share that leaves a part empty are errors that say what is allowed."""
    with pytest.raises(InputError, match=message):
        _data(**changes)


def test_a_negative_step_is_refused_at_once() -> None:
    """A run cannot begin before step 0; the error comes with the call, not with the first batch."""
    with pytest.raises(InputError, match="first_step is -1"):
        _data().train(-1)
