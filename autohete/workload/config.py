"""Models by their ``config.json``, the file beside the weights of every model on the Hugging Face Hub; some are bundled.

Nothing is loaded but the file: no weights, no torch, no network.
"""

from __future__ import annotations

import json
import os
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from autohete.errors import InputError, suggestion, unknown_name
from autohete.files import read_text
from autohete.printable import printable
from autohete.workload import LONGEST_NAME, Workload
from autohete.workload.families import FAMILIES

#: Models of images and text whose file describes the language model in a part of its own.
_TEXT_CONFIG = "text_config"


def model_names() -> list[str]:
    """Names of the bundled models, sorted."""
    return sorted(file.name.removesuffix(".json") for file in _bundled().iterdir() if file.name.endswith(".json"))


def read_model(name_or_path: str) -> Workload:
    """The bundled model of that name, or the one that a ``config.json`` describes, with the default batch.

    Args:
        name_or_path: a name of :func:`model_names`; a ``config.json``, or the folder that it is in.

    Raises:
        InputError: no such model, a file that cannot be read, or one that is not supported; names the keys.
    """
    config, name = _config(name_or_path)
    return parse_model(config, name)


def model_source(name: str) -> str:
    """Return where the figures of the bundled model ``name`` come from, with the date.

    Raises:
        InputError: no such model.
    """
    if name not in model_names():
        raise unknown_name("model", name, model_names())
    config, _ = _config(name)
    return f"{config['source']} ({config['date']})"


def _config(name_or_path: str) -> tuple[dict[str, Any], str]:
    """Return the keys of a bundled model or of a ``config.json``, and the model's name."""
    if name_or_path in model_names():
        text, name = (_bundled() / f"{name_or_path}.json").read_text(encoding="utf-8"), name_or_path
    else:
        text, name = _read(name_or_path)
    try:
        config: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name_or_path!r} is not JSON: {str(error)[:200]}; give a model's config.json") from error
    if not isinstance(config, dict):
        raise InputError(f"{name_or_path!r} holds no JSON object: give a model's config.json")
    return config, name


def parse_model(config: dict[str, Any], name: str) -> Workload:
    """The model that the keys of a ``config.json`` describe, with the default batch.

    Raises:
        InputError: the family is not supported, or keys are missing or wrong.
    """
    inner = config.get(_TEXT_CONFIG)
    if config.get("model_type") not in list(FAMILIES) and isinstance(inner, dict):  # a list: any value can be compared
        shared = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
        config = shared | inner
    family = config.get("model_type")
    if not isinstance(family, str):
        given = "no model_type" if family is None else f"the model_type {json.dumps(family)[:40]}, which is no text"
        raise InputError(f"{name!r} has {given}: give the config.json of a model on the Hugging Face Hub")
    if family not in FAMILIES:
        raise unknown_name("model_type", family, FAMILIES)
    # Lists such as layer_types may hold more than the language model's layers, and JSON keeps strict types apart from enums.
    try:
        model = FAMILIES[family].model_validate_json(json.dumps(config))
    except ValidationError as error:
        faults = "; ".join(_fault(fault) for fault in error.errors()[:8])
        raise InputError(
            f"{name!r} ({family}) cannot be used: {faults}; compare the file with the model's on the Hub"
        ) from error
    return Workload(
        name,
        hidden_size=model.hidden_size,
        transformer_blocks=model.num_hidden_layers,
        heads=model.num_attention_heads,
        vocabulary_size=model.vocab_size,
        tied_embeddings=model.tie_word_embeddings,
        architecture=model.architecture(),
    )


def _fault(fault: ErrorDetails) -> str:
    """Say what is wrong with a key, and what was given for it."""
    key = ".".join(map(str, fault["loc"]))
    if fault["type"] == "missing":
        return f"{key} is missing"
    return f"{key} is {json.dumps(fault['input'])[:40]}: {fault['msg'].removeprefix('Input ')}"


def _bundled() -> Traversable:
    return resources.files("autohete.workload") / "models"


def _read(given: str) -> tuple[str, str]:
    """Text of a ``config.json``, and the name of its model: the folder's, or the file's own where that is more specific."""
    path = given
    if os.path.isdir(path):
        path = os.path.join(given, "config.json")
    if not os.path.exists(path) and not path.endswith(".json") and os.path.basename(path) == path:
        raise unknown_name("model", given, model_names())
    cure = f"give a name that autohete presets lists, or a model's config.json{suggestion(given, model_names())}"
    text = read_text(path, "model", cure)
    stem = Path(path).stem
    name = os.path.basename(os.path.dirname(os.path.realpath(path))) if os.path.basename(path) == "config.json" else stem
    return text, printable(name or stem)[:LONGEST_NAME]
