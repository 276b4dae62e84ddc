"""Check of a ``config.json`` against the weights beside it, by the headers of their safetensors files; no weights are read.

A file begins with the length of its header, 8 bytes little-endian, and the header: JSON with the type and shape of each tensor.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autohete.errors import InputError
from autohete.workload import Workload

#: The longest header that the safetensors library reads, in bytes.
_LONGEST_HEADER = 100_000_000
_INDEX, _WHOLE, _SHARDS = "model.safetensors.index.json", "model.safetensors", "model-*.safetensors"
_FLOATS = ("F8_E4M3", "F8_E5M2", "F16", "BF16", "F32", "F64")
#: Tensors that are no parameters: rotary tables, GPT-2's masks, scales of 8-bit weights, and the balance of experts.
_BUFFERS = re.compile(r"inv_freq$|\.attn\.(masked_)?bias$|_scale_inv$|e_score_correction_bias$")
#: Parts of models of images, sound and text beside the language model.
_OTHER_PARTS = re.compile(r"(^|\.)(vision|visual|audio|multi_modal|mm_)")
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte)\.weight$")
_HEAD = "lm_head.weight"
_CURE = "give a folder whose files belong together, or config.json itself, without its weights"

_Shapes = dict[str, tuple[int, ...]]


def check_weights(folder: Path, config: Mapping[str, Any], workload: Workload) -> None:
    """Check that the weights in ``folder`` have the parameters that ``config`` describes.

    Weights that are not there or not complete, and quantised ones, whose tensors do not have the parameters' shapes, are not
    checked.

    Raises:
        InputError: they have not, or a header is damaged.
    """
    files = _files(folder)
    if not files or "quantization_config" in config:
        return
    types: dict[str, str] = {}
    shapes: _Shapes = {}
    for file in files:
        for name, tensor in _header(file).items():
            types[name], shapes[name] = tensor
    own = {name: shape for name, shape in shapes.items() if _is_parameter(name, config, workload)}
    if not own or any(types[name] not in _FLOATS for name in own):
        return
    count = sum(map(math.prod, own.values()))
    if count != workload.parameters:
        raise InputError(
            f"the weights in {str(folder)!r} do not belong to its config.json: they have {count:,} parameters, config.json "
            f"describes {workload.parameters:,}{_difference(own, workload)}; {_CURE}"
        )


def _files(folder: Path) -> list[Path]:
    """Return the files of a model's weights; none if any is missing."""
    names = {_WHOLE}
    if (folder / _INDEX).is_file():
        try:
            if (folder / _INDEX).stat().st_size > _LONGEST_HEADER:
                raise ValueError("it is too long")
            names = {str(name) for name in json.loads((folder / _INDEX).read_bytes())["weight_map"].values()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{str(folder / _INDEX)!r} is damaged: download it again, or {_CURE}") from error
    elif not (folder / _WHOLE).is_file():
        names = {file.name for file in folder.glob(_SHARDS)}
    files = [folder / Path(name).name for name in sorted(names)]
    return files if all(file.is_file() for file in files) else []


def _header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of each tensor in a file.

    Raises:
        InputError: the file is damaged.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(_LONGEST_HEADER, file.stat().st_size):
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        return {name: (tensor["dtype"], tuple(map(int, tensor["shape"]))) for name, tensor in tensors.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it does not begin with a header of safetensors"
        raise InputError(f"{str(file)!r} cannot be read: {reason}; download it again, or {_CURE}") from error


def _is_parameter(name: str, config: Mapping[str, Any], workload: Workload) -> bool:
    """Whether a tensor is a parameter of the language model, of which a tied head is none."""
    if _OTHER_PARTS.search(name) or _BUFFERS.search(name) or (workload.tied_embeddings and name.endswith(_HEAD)):
        return False
    block = _BLOCK.search(name)
    beyond = block is not None and int(block[1]) >= workload.transformer_blocks
    return not (beyond and config.get("num_nextn_predict_layers"))


def _difference(own: _Shapes, workload: Workload) -> str:
    """Name the sizes in which weights differ, as far as the names of tensors tell; empty if they do not."""
    blocks = {int(block[1]) for block in map(_BLOCK.search, own) if block is not None}
    embedding = next((shape for name, shape in own.items() if _EMBEDDING.search(name) and len(shape) == 2), None)
    figures = [("blocks", max(blocks) + 1, workload.transformer_blocks)] if blocks else []
    if embedding is not None:
        figures += [
            ("rows of the embedding", embedding[0], workload.vocabulary_size),
            ("units of width", embedding[1], workload.hidden_size),
        ]
    apart = [f"{there:,} {what} instead of {described:,}" for what, there, described in figures if there != described]
    return f"; they have {', '.join(apart)}" if apart else ""
