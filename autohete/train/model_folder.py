"""Causal language models of Hugging Face in folders: read, with their tokenizer, and written, whole or not at all.

    FOLDER/config.json                  the architecture
           model.safetensors            the weights, or their shards and model.safetensors.index.json
           tokenizer.json, ...          the tokenizer

Only local files are read, and no code of the folder is run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from autohete.errors import InputError
from autohete.files import read_text
from autohete.train.checkpoints import bring_to_disk, hidden_folder
from autohete.train.text_data import Tokenizer, pieces_of

_CONFIG = "config.json"
#: Files of a tokenizer.
_TOKENIZER = (
    *("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "spiece*"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*"),
)
#: Files without which there is no tokenizer.
_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class _FolderTokenizer:
    inner: Any

    @property
    def vocabulary_size(self) -> int:
        return len(self.inner)

    def encode(self, text: str) -> Tensor:
        found = self.inner(pieces_of(text), add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor([number for piece in found for number in piece], dtype=torch.int64)

    def decode(self, ids: Tensor) -> str:
        return str(self.inner.decode(ids.flatten().tolist()))


def check_model_folder(folder: str | Path) -> None:
    """Check that a folder has the config of a causal language model.

    Raises:
        InputError: says what is wrong.
    """
    folder, transformers = Path(folder), _transformers()
    cure = f"give a folder with {_CONFIG} and model.safetensors, such as save_pretrained writes"
    text = read_text(folder / _CONFIG, "model", cure)
    try:
        architectures = json.loads(text).get("architectures") or []
    except (ValueError, RecursionError, AttributeError) as error:
        raise InputError(f"{str(folder)!r} has no model: {_CONFIG} cannot be read ({str(error)[:200]}); {cure}") from error
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    for name in architectures:
        if name not in known:
            raise InputError(
                f"{str(folder)!r} has a {name}, which is no causal language model of transformers "
                f"{transformers.__version__}: give a folder whose {_CONFIG} names one, such as LlamaForCausalLM"
            )


def read_model(folder: str | Path) -> nn.Module:
    """Return the causal language model in a folder, in its own type, ready to be trained.

    Raises:
        InputError: the folder has no such model, or not all of its weights; says what is wrong.
    """
    check_model_folder(folder)
    transformers = _transformers()
    try:
        with _quiet(transformers):
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError, SafetensorError) as error:
        raise InputError(
            f"the model in {str(folder)!r} cannot be loaded: {_line(error)}; give a folder such as save_pretrained writes, "
            "with all of its .safetensors files"
        ) from error
    for kind, names in (("lacks", found["missing_keys"]), ("has other", found["unexpected_keys"])):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise InputError(
                f"the model in {str(folder)!r} {kind} weights: {min(names)}{more}; give those that belong to its {_CONFIG}"
            )
    return cast(nn.Module, model.train())


def longest_sequence(model: nn.Module) -> int | None:
    """Return the number of tokens that a model has positions for; None: its config does not say."""
    found = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def seed_random(seed: int) -> None:
    """Set the seed of what is drawn in training, such as dropout."""
    torch.manual_seed(seed)


def read_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer in a model's folder. It adds no special tokens to a text.

    Raises:
        InputError: there is none, or it cannot be loaded.
    """
    folder, transformers = Path(folder), _transformers()
    if not any(next(folder.glob(pattern), None) for pattern in _VOCABULARIES):
        raise InputError(f"{str(folder)!r} has no tokenizer: copy the model's tokenizer.json there")
    try:
        with _quiet(transformers):
            return _FolderTokenizer(
                transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            )
    except Exception as error:  # tokenizers raises plain Exceptions
        raise InputError(f"the tokenizer in {str(folder)!r} cannot be loaded: {_line(error)}") from error


def write_model(model: nn.Module, source: str | Path, out: str | Path) -> None:
    """Write a model as safetensors, with the tokenizer's files of the folder that it came from.

    Args:
        model: was read from ``source``.
        source: the folder with the tokenizer.
        out: the new folder.

    Raises:
        InputError: the folder exists, or cannot be written. Nothing has been written then.
    """
    source, out, transformers = Path(source), Path(out), _transformers()
    check_new_folder(out)
    try:
        with hidden_folder(out.absolute().parent) as part:
            with _quiet(transformers):
                cast(Any, model).save_pretrained(part)
            for file in sorted({file for pattern in _TOKENIZER for file in source.glob(pattern) if file.is_file()}):
                shutil.copyfile(file, part / file.name)
            for file in part.iterdir():
                bring_to_disk(file)
            bring_to_disk(part)
            check_new_folder(out)
            part.rename(out)
        bring_to_disk(out.absolute().parent)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"the model cannot be written to {str(out)!r}: {_line(error)}; give a new folder where there is room"
        ) from error


def check_new_folder(out: str | Path) -> None:
    """Check that a folder can be made.

    Raises:
        InputError: it exists, or its parent does not, or is not writable.
    """
    out = Path(out)
    if out.exists() or out.is_symlink():
        raise InputError(f"{str(out)!r} exists and is not overwritten: give the name of a new folder")
    parent = out.absolute().parent
    if not parent.is_dir():
        raise InputError(f"{str(out)!r} cannot be made: there is no folder {str(parent)!r}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"{str(out)!r} cannot be made: folder {str(parent)!r} is not writable")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError("models of Hugging Face need transformers: pip install 'autohete[huggingface]'") from error
    return transformers


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without what transformers prints; what matters is checked here."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _line(error: BaseException) -> str:
    """Its message, on one line and not too long."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
    return text if len(text) < 200 else f"{text[:200]} ..."
