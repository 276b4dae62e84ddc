"""The form of a checkpoint's ``state.json``, beside which its tensors lie. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from autohete.documents import Stated

FORMAT: Literal["autohete-checkpoint 1"] = "autohete-checkpoint 1"

#: A value of the training. What JSON cannot tell apart is an object with one key that names its type.
_VALUE = """{
  "anyOf": [
    {"type": ["null", "boolean", "integer", "number", "string"]},
    {"type": "array", "items": {"$ref": "#/$defs/Value"}},
    {"type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": false, "properties": {
      "tensor": {"type": "string"},
      "float": {"enum": ["nan", "inf", "-inf"]},
      "tuple": {"type": "array", "items": {"$ref": "#/$defs/Value"}},
      "dict": {"type": "array", "items": {
        "type": "array", "minItems": 2, "maxItems": 2, "items": false,
        "prefixItems": [{"type": ["string", "integer"]}, {"$ref": "#/$defs/Value"}]}}}}
  ]
}"""


@dataclass(frozen=True, slots=True)
class CheckpointDocument:
    """The state of a training, without its tensors.

    Args:
        format: the form of this document.
        shards: the files with the tensors, and the SHA-256 of each.
        state: the state; a tensor stands as its name in these files.
        digest: the SHA-256 of all else in this document.
    """

    format: Literal["autohete-checkpoint 1"]
    shards: Mapping[str, str]
    state: Annotated[object, Stated("Value", _VALUE)]
    digest: str
