"""Models by their ``config.json``, the file beside the weights of every model on the Hugging Face Hub; some are bundled.

Nothing is loaded but the file: no weights, no torch, no network.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Set
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from autohete.errors import InputError, alternatives, suggestion, unknown_name
from autohete.files import read_text
from autohete.printable import printable
from autohete.workload import LONGEST_NAME, Workload
from autohete.workload.families import FAMILIES
from autohete.workload.hub import CONFIG, cache_folder, cached_models, model_of
from autohete.workload.table import is_table, parse_table
from autohete.workload.traced import traced_workload
from autohete.workload.weights import check_weights

#: Models of images and text whose file describes the language model in a part of its own.
_TEXT_CONFIG = "text_config"
_TIED = "tie_word_embeddings"
#: How the names of models end that have another head.
_OTHER_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
#: The command that lists the bundled models.
_LISTED_BY = "autohete presets models"
#: How the source of a bundled model begins that names it as the Hub does.
_ON_HUB = re.compile(r"huggingface\.co/([\w.-]+/[\w.-]+)")


def model_names() -> list[str]:
    """Names of the bundled models, sorted."""
    return sorted(file.name.removesuffix(".json") for file in _bundled().iterdir() if file.name.endswith(".json"))


def read_model(name_or_path: str) -> Workload:
    """The model of that name, or the one that a ``config.json`` describes, with the default batch.

    Args:
        name_or_path: a name of :func:`model_names`, or a name on the Hugging Face Hub, in any case and with or without its
            organisation, of a bundled model or of one in the local cache; a ``config.json``, or the folder that it is in; or
            the table of a trace. Weights in that folder are counted, by their headers.

    Raises:
        InputError: no such model, a file that cannot be read, or one that is not supported; names the keys. Or the weights are
            not those that the file describes.
    """
    found = _found(name_or_path)
    config, name = _config_of(name_or_path, found)
    if is_table(config):
        return traced_workload(parse_table(config, name_or_path))
    workload = parse_model(config, name)
    if isinstance(found, Path) and os.path.isdir(found):
        check_weights(found, config, workload)
    return workload


def model_config(name_or_path: str) -> tuple[dict[str, Any], str]:
    """Return the keys of the ``config.json`` that :func:`read_model` reads, and the model's name.

    Raises:
        InputError: no such model, or a file that cannot be read.
    """
    return _config_of(name_or_path, _found(name_or_path))


def _config_of(given: str, found: str | Path) -> tuple[dict[str, Any], str]:
    if isinstance(found, str):
        return _bundled_config(found), found
    text, name = _read(given, found)
    return _parsed(given, text), name


def model_source(name: str) -> str:
    """Return where the figures of the bundled model ``name`` come from, with the date.

    Raises:
        InputError: no such model.
    """
    if name not in model_names():
        raise unknown_name("model", name, model_names(), _LISTED_BY)
    config = _bundled_config(name)
    return f"{config['source']} ({config['date']})"


def bundled_name(given: str) -> str | None:
    """Return the bundled model that a name means, its own or the Hub's, in any case; None: none."""
    return given if given in model_names() else _names_on_hub().get(given.casefold())


def _found(given: str) -> str | Path:
    """Return the name of the bundled model that is meant, or the path of a file or folder, such as in the Hub's cache.

    Raises:
        InputError: there is no such model, or several.
    """
    path = Path(given)
    if given in model_names():
        return given
    if path.suffix == ".json" or len(path.parts) > 2 or os.path.exists(path):
        return path
    if (bundled := bundled_name(given)) is not None:
        return bundled
    cached = cached_models(given)
    if len(cached) > 1:
        raise InputError(f"{given!r} is the name of several models in {cache_folder()}: give {alternatives(cached)}")
    for folder in cached.values():
        return folder
    unknown = unknown_name("model", given, model_names(), _LISTED_BY)
    raise InputError(
        f"{unknown}. It is not in the Hub's cache {cache_folder()}, either: for another model, give the path of its config.json"
    )


@cache
def _names_on_hub() -> dict[str, str]:
    """Lower-case name -> bundled model: its own name and the Hub's, each with and without the organisation."""
    names = {}
    for name in model_names():
        match = _ON_HUB.match(_bundled_config(name)["source"])
        organisation, _, on_hub = match[1].casefold().partition("/") if match is not None else ("", "", name)
        for short in (name, on_hub):
            names[short] = names[f"{organisation}/{short}"] = name
    return names


def _bundled_config(name: str) -> dict[str, Any]:
    return _parsed(name, (_bundled() / f"{name}.json").read_text(encoding="utf-8"))


def _parsed(given: str, text: str) -> dict[str, Any]:
    """Return the keys of a ``config.json``."""
    try:
        config: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{given!r} is not JSON: {str(error)[:200]}; give a model's config.json") from error
    if not isinstance(config, dict):
        raise InputError(f"{given!r} holds no JSON object: give a model's config.json")
    return config


def parse_model(config: dict[str, Any], name: str) -> Workload:
    """The model that the keys of a ``config.json`` describe, with the default batch.

    Raises:
        InputError: the family is not supported, or keys are missing or wrong.
    """
    inner = config.get(_TEXT_CONFIG)
    if config.get("model_type") not in list(FAMILIES) and isinstance(inner, dict):  # a list: any value can be compared
        config = inner | _ties(config, inner)
    family = config.get("model_type")
    if not isinstance(family, str):
        given = "no model_type" if family is None else f"the model_type {json.dumps(family)[:40]}, which is no text"
        raise InputError(f"{name!r} has {given}: give the config.json of a model on the Hugging Face Hub")
    if family not in FAMILIES:
        raise InputError(
            f"{unknown_name('model_type', family, FAMILIES)}. A file of another family is not read: trace the model instead "
            "(autohete trace), which takes any module"
        )
    _check_head(config, name)
    # Lists such as layer_types may hold more than the language model's layers, and JSON keeps strict types apart from enums.
    try:
        model = FAMILIES[family].model_validate_json(json.dumps(_without(config, FAMILIES[family].ignored)))
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


def _ties(outer: Mapping[str, Any], inner: Mapping[str, Any]) -> dict[str, Any]:
    """Whether a model within another has tied embeddings, if either says so. Files of ``transformers`` 4 have it inside, and
    false outside; those of ``transformers`` 5 have it outside, and its default inside.
    """
    said = [part[_TIED] for part in (outer, inner) if _TIED in part]
    return {_TIED: next((one for one in said if one is not False), False)} if said else {}


def _without(config: Mapping[str, Any], ignored: Set[str]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ignored}


def _check_head(config: Mapping[str, Any], name: str) -> None:
    """Check that the model has the head of a language model."""
    listed = config.get("architectures")
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, str) and one.endswith(_OTHER_HEADS):
            raise InputError(
                f"{name!r} is a {printable(one)}, whose head is not that of a language model: trace its module instead "
                "(autohete trace), or leave architectures out for the language model"
            )


def _fault(fault: ErrorDetails) -> str:
    """Say what is wrong with a key, and what was given for it."""
    key = ".".join(map(str, fault["loc"]))
    if fault["type"] == "missing":
        return f"{key} is missing"
    return f"{key} is {json.dumps(fault['input'])[:40]}: {fault['msg'].removeprefix('Input ')}"


def _bundled() -> Traversable:
    return resources.files("autohete.workload") / "models"


def _read(given: str, path: Path) -> tuple[str, str]:
    """Text of a ``config.json``, and the name of its model: the folder's, or the file's own where that is more specific."""
    if os.path.isdir(path):
        path = path / CONFIG
    inside = f" ({CONFIG} in it)" if path != Path(given) else ""
    cure = f"give a name that {_LISTED_BY} lists, or a config.json{suggestion(given, model_names())}"
    text = read_text(str(path), f"model{inside}", cure)
    name = model_of(path.parent) if path.name == CONFIG else path.stem
    return text, printable(name or path.stem)[:LONGEST_NAME]
