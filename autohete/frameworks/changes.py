"""How one configuration differs from another, key by key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Stands for a key that is not there.
ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A key with dots between its parts, and its values before and after; :data:`ABSENT` if it is not there."""

    key: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.before)} -> {_text(self.after)}"


def key_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[KeyChange, ...]:
    """Return the keys whose values differ, in order."""
    one, two = dict(_flat(before)), dict(_flat(after))
    return tuple(
        KeyChange(key, one.get(key, ABSENT), two.get(key, ABSENT))
        for key in dict.fromkeys([*one, *two])
        if one.get(key, ABSENT) != two.get(key, ABSENT)
    )


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _text(value: object) -> str:
    """A value as the file has it."""
    return ABSENT if value is ABSENT else json.dumps(value)
