"""JSON documents that dataclasses describe: one description gives both the document and its JSON Schema.

Each field is a key, described in the class's docstring. A field that is annotated ``Annotated[Part, Flat()]`` gives the keys of
its part to the document itself, less those that are left out.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

from pydantic import BaseModel

#: The dialect of the schemas.
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SIMPLE: dict[object, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    types.NoneType: {"type": "null"},
    object: {},
    Any: {},
}
#: One entry of ``Args:``: names, then a description that may go on in indented lines.
_ENTRY = re.compile(r"^    +((?:\w+, )*\w+): (.*(?:\n {12}.*)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Flat:
    """Marks a part whose keys are those of the document itself.

    Args:
        without: keys that are left out.
    """

    without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stated:
    """Marks a field whose schema is stated, because no type describes it.

    Args:
        name: of the schema, which may refer to itself as ``#/$defs/NAME``.
        schema: the schema, as JSON.
    """

    name: str
    schema: str


def as_json(value: object) -> Any:
    """Return a dataclass, or what consists of them, as :func:`json.dumps` takes it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        document: dict[str, Any] = {}
        for name, _, flat in _fields(type(value)):
            inner = as_json(getattr(value, name))
            document |= {name: inner} if flat is None else {key: inner[key] for key in inner if key not in flat.without}
        return document
    if isinstance(value, Mapping):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [as_json(inner) for inner in value]
    return value


def schema_of(name: str, *kinds: object) -> dict[str, Any]:
    """Return the JSON Schema of documents.

    Args:
        name: of the documents, with the version of their form.
        kinds: types of which a document is one.
    """
    parts: dict[str, Any] = {}
    shown = [_schema(kind, parts) for kind in kinds]
    body = shown[0] if len(shown) == 1 else {"anyOf": shown}
    return {
        "$schema": _DIALECT,
        "$id": f"urn:{name.replace(' ', ':')}",
        "title": name,
        **body,
        "$defs": dict(sorted(parts.items())),
    }


@cache
def _fields(cls: type) -> list[tuple[str, object, Flat | None]]:
    """Return name, type and mark of each field."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = []
    for field in dataclasses.fields(cls):
        if field.init:
            hint = hints[field.name]
            marks = getattr(hint, "__metadata__", ())
            fields.append((field.name, hint, next((mark for mark in marks if isinstance(mark, Flat)), None)))
    return fields


def _schema(kind: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type; those of classes are added to ``parts``."""
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        for mark in kind.__metadata__:
            if isinstance(mark, Stated):
                parts[mark.name] = json.loads(mark.schema)
                return {"$ref": f"#/$defs/{mark.name}"}
            if isinstance(mark, type):  # a model, of which the field has the JSON
                return _schema(mark, parts)
        return _schema(inner[0], parts)
    if origin in (types.UnionType, typing.Union):
        return _any_of([_schema(each, parts) for each in inner])
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin is tuple and inner[-1] is not Ellipsis:
        return {
            "type": "array",
            "prefixItems": [_schema(each, parts) for each in inner],
            "items": False,
            "minItems": len(inner),
        }
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return {"type": "array", "items": _schema(inner[0], parts)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        keys = {} if inner[0] is str else {"propertyNames": _schema(inner[0], parts)}
        return {"type": "object", **keys, "additionalProperties": _schema(inner[1], parts)}
    return _class_schema(kind, parts)


def _class_schema(kind: type, parts: dict[str, Any]) -> dict[str, Any]:
    if issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if issubclass(kind, BaseModel):
        parts |= _model_parts(kind)
    elif dataclasses.is_dataclass(kind):
        if kind.__name__ not in parts:
            parts[kind.__name__] = {}  # ends a recursion
            parts[kind.__name__] = _object_schema(kind, parts)
    elif issubclass(kind, str):
        return _SIMPLE[str]
    else:
        raise TypeError(f"{kind} has no JSON form: give dataclasses of numbers, text, tuples and mappings")
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _model_parts(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the schemas of a model and of those in it, by their titles: pydantic's names of generic models are long."""
    schema = kind.model_json_schema()
    inner = schema.pop("$defs", {})
    text = json.dumps([schema, *inner.values()])
    for name, part in inner.items():
        text = text.replace(f'"#/$defs/{name}"', f'"#/$defs/{part["title"]}"')
    return {part["title"]: part for part in json.loads(text)}


def _object_schema(kind: type, parts: dict[str, Any]) -> dict[str, Any]:
    properties = dict(_properties(kind, parts))
    return {
        "type": "object",
        "description": (kind.__doc__ or "").partition("\n")[0],
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _properties(kind: type, parts: dict[str, Any], without: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    descriptions = {
        name: " ".join(text.split()) for names, text in _ENTRY.findall(kind.__doc__ or "") for name in names.split(", ")
    }
    for name, hint, flat in _fields(kind):
        if flat is not None:
            yield from _properties(typing.get_args(hint)[0], parts, flat.without)
        elif name not in without:
            described = {"description": descriptions[name]} if name in descriptions else {}
            yield name, described | _schema(hint, parts)


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the union of schemas, in one list of types if they say no more."""
    kinds = [schema["type"] for schema in schemas if set(schema) == {"type"}]
    return {"type": kinds} if len(kinds) == len(schemas) else {"anyOf": schemas}
