"""Settings as YAML and TOML text. Scalars are written so that both the languages' parsers read the same values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any


def yaml_text(settings: Mapping[str, Any], heading: str) -> str:
    """Return nested settings as YAML, below a comment."""
    return "\n".join([*_comment(heading), *_yaml(settings, "")]) + "\n"


def toml_text(tables: Mapping[str, Mapping[str, Any]], heading: str) -> str:
    """Return tables of scalars as TOML, below a comment."""
    lines = _comment(heading)
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_scalar(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _comment(heading: str) -> list[str]:
    return [f"# {line}" for line in heading.splitlines()]


def _yaml(settings: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _yaml(value, indent + "  ")
        else:
            yield f"{indent}{key}: {_scalar(value)}"


def _scalar(value: object) -> str:
    """JSON, but with a point in each float, without which YAML 1.1 reads 1e-05 as text; and TOML's word for infinity."""
    if isinstance(value, float):
        if math.isinf(value):
            return "inf"
        text = repr(value)
        return text if "." in text else text.replace("e", ".0e")
    return json.dumps(value)
