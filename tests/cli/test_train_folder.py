"""``autohete train --model``: fine-tunes a model of Hugging Face in a folder, saves, resumes, and writes it."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.command import ENVIRONMENT, autohete, refused
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from autohete.runtime.losses import next_token_loss
from autohete.runtime.update_rules import default_optimizer
from autohete.train.model_folder import read_tokenizer
from autohete.train.text_data import TextData

TEXT = "the quick brown fox jumps over the lazy dog\n" * 300
OPTIONS = {"--sequence-length": "16", "--batch-size": "2", "--gpu-memory": "95%", "--hardware": "v100-32gb-dgx2"}
STEPS = 4


def tokenizer() -> Any:
    """A small tokenizer that puts a token before each text, as Llama's does, made without download."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = split, decoders.ByteLevel()
    kept: dict[str, Any] = {"initial_alphabet": split.alphabet(), "special_tokens": ["<s>"], "show_progress": False}
    inner.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300, **kept))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")  # type: ignore[no-untyped-call]


def gpt2() -> Any:
    """GPT-2 with dropout and tied embeddings."""
    sizes: dict[str, Any] = {"n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=304, bos_token_id=0, eos_token_id=0, **sizes))


def llama(*, tied: bool = False) -> Any:
    """LLaMA."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.LlamaConfig(vocab_size=304, max_position_embeddings=32, tie_word_embeddings=tied, **sizes, **ends)
    return transformers.LlamaForCausalLM(config)


def written(model: Any, folder: Path, **options: Any) -> Path:
    """A folder with a model, its tokenizer, and the text beside it."""
    model.save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    (folder.parent / "text.txt").write_text(TEXT)
    return folder


def line(folder: Path, *, out: str = "out", **changes: str) -> list[str]:
    """The command line that fine-tunes it."""
    given = {f"--{name.strip('-').replace('_', '-')}": value for name, value in changes.items()}
    options = {"--model": str(folder), "--data": str(folder.parent / "text.txt"), "--out": str(folder.parent / out)}
    options |= OPTIONS | {"--steps": str(STEPS)} | given
    return ["train", *(word for option in options.items() if option[1] for word in option)]


def plainly(folder: Path, steps: int = STEPS, lr: float = 2e-5) -> dict[str, Tensor]:
    """The weights after a loop of plain PyTorch, with fp32 masters of 16-bit weights."""
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    model.config.use_cache = False
    parameters = list(model.parameters())
    masters = [p if p.dtype is torch.float32 else nn.Parameter(p.detach().float()) for p in parameters]
    optimizer = default_optimizer(masters, lr)
    torch.manual_seed(0)
    for ids, targets in islice(TextData(TEXT, read_tokenizer(folder), 16, 2).train(), steps):
        next_token_loss(model(ids).logits, targets).backward()  # type: ignore[no-untyped-call]
        for parameter, master in zip(parameters, masters, strict=True):
            master.grad = parameter.grad if parameter is master else parameter.grad.float()
        optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.grad = None
            parameter.data.copy_(master.detach())
    found: dict[str, Tensor] = model.state_dict()
    return found


def weights(folder: Path) -> dict[str, Tensor]:
    """The weights in a folder, as transformers loads them."""
    found: dict[str, Tensor] = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two models have the same bits in the same types."""
    pairs = [(one[name], other[name]) for name in one]
    return one.keys() == other.keys() and all(a.dtype is b.dtype and torch.equal(a, b) for a, b in pairs)


def left(folder: Path) -> list[str]:
    """Names of what is beside a model."""
    return sorted(path.name for path in folder.parent.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "dtype", "options"),
    [
        (gpt2, torch.float32, {}),
        (gpt2, torch.bfloat16, {}),
        (llama, torch.float32, {"max_shard_size": "40KB"}),
        (lambda: llama(tied=True), torch.bfloat16, {}),
    ],
)
def test_a_folder_trains_to_the_bit(make: Any, dtype: torch.dtype, options: dict[str, str], tmp_path: Path) -> None:
    """The written folder loads, has the plain loop's bits in the same type, and the tokenizer's files as they were."""
    torch.manual_seed(1)
    folder = written(make().to(dtype), tmp_path / "small", **options)
    done = autohete(*line(folder))
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.startswith("small: ")
    found = weights(tmp_path / "out")
    assert same(found, plainly(folder))
    assert not same(found, weights(folder))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    assert list((tmp_path / "out").glob("*.safetensors"))
    assert left(folder) == ["out", "small", "text.txt"]


def test_a_tokenizer_adds_nothing_to_a_text(tmp_path: Path) -> None:
    """A text of several pieces is encoded without special tokens, and decodes to itself."""
    folder = written(llama(), tmp_path / "small")
    text = TEXT * 6
    ids = read_tokenizer(folder).encode(text)
    assert len(text) > 2**16
    assert not (ids == 0).any()
    assert read_tokenizer(folder).decode(ids) == text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, which tests copy before they damage it."""
    torch.manual_seed(1)
    return written(gpt2(), tmp_path_factory.mktemp("model") / "small", max_shard_size="40KB")


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """Such a copy."""
    shutil.copytree(model.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / "small"


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def pipe(path: Path) -> None:
    """Put a pipe without a writer in the place of a file."""
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, tuple[Any, str]] = {
    "no folder": (shutil.rmtree, "config.json' cannot be read: No such file or directory; give a folder with config.json and"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json' cannot be read: No such file"),
    "a pipe": (lambda f: pipe(f / "config.json"), "config.json' cannot be read: it is a device or a pipe"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "has no model: config.json cannot be read"),
    "another kind": (
        lambda f: edit(f / "config.json", architectures=["BertForMaskedLM"]),
        "has a BertForMaskedLM, which is no causal language model",
    ),
    "unknown type": (lambda f: edit(f / "config.json", model_type="nothing", architectures=None), "cannot be loaded: "),
    "a shard less": (lambda f: sorted(f.glob("*.safetensors"))[0].unlink(), "cannot be loaded: "),
    "half a shard": (lambda f: _halve(sorted(f.glob("*.safetensors"))[0]), "cannot be loaded: "),
    "a block more": (lambda f: edit(f / "config.json", n_layer=4), r"lacks weights: transformer\.h\.3\."),
    "a block less": (lambda f: edit(f / "config.json", n_layer=2), r"has other weights: transformer\.h\.2\."),
    "another size": (lambda f: edit(f / "config.json", n_embd=64), "cannot be loaded: "),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "has no tokenizer: copy the model's tokenizer.json"),
    "damaged tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "the tokenizer in .* cannot be loaded"),
    "little text": (lambda f: (f.parent / "text.txt").write_text("so little"), "the training part has"),
    "no text": (lambda f: (f.parent / "text.txt").unlink(), "cannot be read: No such file"),
    "a folder out": (lambda f: (f.parent / "out").mkdir(), "exists and is not overwritten"),
    "a small vocabulary": (lambda f: _shrink(f), "the model accepts 0 to 19"),
}


def _halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


def _shrink(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    model = gpt2()
    model.resize_token_embeddings(20)
    model.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_trained_is_refused_in_one_line(damage: str, folder: Path) -> None:
    """Whatever is missing or wrong is one clear line, and nothing is written."""
    damaging, message = DAMAGES[damage]
    damaging(folder)
    before = left(folder)
    assert re.search(message, refused(*line(folder)))
    assert left(folder) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--out": ""}, "--model needs --out"),
        ({"data": ""}, "--model needs a text to train on: give --data"),
        ({"hidden": "64"}, "--hidden is of the small GPT"),
        ({"--model": "", "--out": "x"}, "--out is for a model that --model names"),
        ({"--out": "no/such/folder"}, "there is no folder"),
        ({"hardware": "", "profile": "p.json"}, "leave --profile out"),
        ({"save_every": "2"}, "--save-every needs --save"),
        ({"save": "x", "save_every": "0"}, "it must be at least 1 step"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(changes: dict[str, str], message: str, folder: Path) -> None:
    """Options that are missing, or would be ignored, are named."""
    assert re.search(message, refused(*line(folder, **changes)))


def test_sequences_that_are_too_long_are_refused(folder: Path) -> None:
    """A model has positions for so many tokens only."""
    assert "the model takes sequences of up to 32 tokens" in refused(*line(folder, sequence_length="33"))


@contextmanager
def little_room() -> Iterator[None]:
    """No file may become larger than 20 kB, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.slow
def test_a_full_disk_leaves_no_half_a_model(folder: Path) -> None:
    """A model that cannot be written is one line, and no folder."""
    with little_room():
        done = autohete(*line(folder))
    assert done.returncode == 2
    assert re.fullmatch("autohete: the model cannot be written to .*; give a new folder where there is room\n", done.stderr)
    assert left(folder) == ["small", "text.txt"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_verified(dtype: torch.dtype, tmp_path: Path) -> None:
    """``--verify`` compares a model in a folder, needs no folder to write to, and writes nothing."""
    folder = written(llama(tied=True).to(dtype), tmp_path / "small")
    options = {"--verify": "2", "--out": "", "--micro-batches": "2", "--clip-norm": "0.1"}
    done = autohete(*line(folder, **options))
    assert (done.returncode, done.stderr) == (0, ""), done
    assert re.match(r"small: 2 steps beside plain PyTorch, threads: 1; compared 2 x loss, 80 x gradient, ", done.stdout)
    assert done.stdout.endswith("all bits are equal\n")
    assert left(folder) == ["small", "text.txt"]


# --- saving


@pytest.mark.slow
def test_a_model_that_could_not_be_written_is_written_later(folder: Path) -> None:
    """After a training that has ended, but whose model had no room, ``--resume`` writes the model without another step."""
    save = str(folder.parent / "saved")
    first = autohete(*line(folder, out="first", save=save))
    assert first.returncode == 0
    shutil.rmtree(folder.parent / "first")
    done = autohete(*line(folder, save=save), "--resume")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [f"resumed from {save} after step {STEPS}", f"written: {folder.parent / 'out'}"]
    assert same(weights(folder.parent / "out"), plainly(folder))


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_on_a_signal_is_reported(folder: Path) -> None:
    """The program ends as the signal wants, and says that nothing was saved and why."""
    saved = folder.parent / "saved"
    command = [sys.executable, "-u", "-m", "autohete", *line(folder, save=str(saved), steps="1000000")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        assert process.stdout is not None
        while "measured and planned" not in process.stdout.readline():
            assert process.poll() is None
        saved.rmdir()
        saved.write_text("in the way")
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, said
    assert re.fullmatch(r"not saved: .*'.*saved'.*\nautohete: interrupted\n", said), said
    assert left(folder) == ["saved", "small", "text.txt"]


def test_a_folder_that_cannot_be_made_is_refused_before_training(folder: Path) -> None:
    """A folder for checkpoints is made first."""
    (folder.parent / "file").write_text("")
    assert "cannot be created" in refused(*line(folder, save=str(folder.parent / "file" / "saved")))


@pytest.mark.slow
def test_a_training_continues_to_the_bit(folder: Path) -> None:
    """Saved in the end and every few steps, it continues to the bits of a training that was never cut."""
    save = str(folder.parent / "saved")
    first = autohete(*line(folder, out="first", steps="3", save=save, save_every="2"))
    assert (first.returncode, first.stderr) == (0, "")
    assert [path.name[-6:] for path in sorted((folder.parent / "saved").iterdir())] == ["000002", "000003"]
    again = autohete(*line(folder, steps="6", save=save), "--resume")
    assert (again.returncode, again.stderr) == (0, "")
    assert "after step 3" in again.stdout
    assert same(weights(folder.parent / "out"), plainly(folder, 6))
    assert same(weights(folder.parent / "first"), plainly(folder, 3))


@pytest.mark.slow
def test_a_training_of_the_small_gpt_continues(tmp_path: Path) -> None:
    """The small GPT saves and continues, too: the loss of the held-back text is that of a training that was never cut."""
    (tmp_path / "text.txt").write_text(TEXT)
    small = ["--hidden", "32", "--blocks", "2", "--heads", "2", "--data", str(tmp_path / "text.txt")]
    command = ["train", *(word for option in OPTIONS.items() for word in option), *small]
    whole = autohete(*command, "--steps", "5")
    cut = autohete(*command, "--steps", "2", "--save", str(tmp_path / "saved"))
    rest = autohete(*command, "--steps", "5", "--save", str(tmp_path / "saved"), "--resume")
    assert [done.returncode for done in (whole, cut, rest)] == [0, 0, 0], rest
    held_back = [re.search(r"on held-back text (\S+)", done.stdout) for done in (whole, cut, rest)]
    assert held_back[0]
    assert held_back[1]
    assert held_back[2]
    assert held_back[0][1] == held_back[2][1] != held_back[1][1]


@pytest.mark.slow
def test_a_training_that_does_not_fit_its_checkpoints_is_refused(folder: Path) -> None:
    """Another training, none, or one that has ended, is not continued; a folder with checkpoints is not begun anew."""
    save = str(folder.parent / "saved")
    assert "has no checkpoint" in refused(*line(folder, save=save), "--resume")
    assert autohete(*line(folder, save=save, out="first")).returncode == 0
    assert "has checkpoints of a training: continue it with --resume" in refused(*line(folder, save=save))
    assert "has made 4 steps: give --steps of more" in refused(*line(folder, save=save, steps="3"), "--resume")
    others = {"seed": "1", "lr": "1e-3", "batch size": "4", "clip norm": "1.0"}
    for name, value in others.items():
        changed = line(folder, **{"steps": "9", "save": save, name.replace(" ", "_"): value})
        assert f"has another {name}" in refused(*changed, "--resume")
    assert "has another handling of non-finite losses" in refused(
        *line(folder, save=save, steps="9"), "--skip-nonfinite", "--resume"
    )
    (folder.parent / "text.txt").write_text(TEXT + "more")
    assert "has another text" in refused(*line(folder, save=save, steps="9"), "--resume")
    assert left(folder) == ["first", "saved", "small", "text.txt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated"), (signal.SIGHUP, 129, "hung up")],
)
def test_a_signal_saves_before_the_end(number: signal.Signals, code: int, word: str, folder: Path) -> None:
    """After Ctrl-C, kill or the end of the terminal, the last step is saved, and training continues to the bits of one that was
    never cut.
    """
    saved = folder.parent / "saved"
    # nohup, under which these tests may run, would let the signal be ignored.
    heard = "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-m", "autohete", *line(folder, save=str(saved), save_every="5", steps="1000000")]
    begun = [sys.executable, "-c", heard, *command]
    process = subprocess.Popen(begun, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + 120
        while not list(saved.glob("0*")) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        time.sleep(0.2)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, said
    found = re.fullmatch(rf"saved after step (\d+): .*\nautohete: {word}\n", said)
    assert found, said
    steps = int(found[1])
    assert steps >= 5
    assert max(path.name for path in saved.iterdir()).endswith(f"-step-{steps:08}")
    assert left(folder) == ["saved", "small", "text.txt"]
    assert autohete(*line(folder, save=str(saved), steps=str(steps + 2)), "--resume").returncode == 0
    assert same(weights(folder.parent / "out"), plainly(folder, steps + 2))
