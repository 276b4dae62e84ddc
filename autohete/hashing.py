"""Hashes that are computed once, for deep immutable objects that are looked up often, such as plans and their units."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar


class Hashed:
    """An immutable object with a place for its hash; see :func:`hashed_once`."""

    __slots__ = ("_hash",)


H = TypeVar("H", bound=Hashed)


def hashed_once(cls: type[H]) -> type[H]:
    """Let instances of a frozen dataclass compute their hash once, at its first use. The hash is not pickled."""
    compute = cls.__hash__

    def kept(self: H) -> int:
        try:
            value: int = self._hash  # type: ignore[attr-defined]
        except AttributeError:
            value = compute(self)
            object.__setattr__(self, "_hash", value)
        return value

    cls.__hash__ = kept  # type: ignore[method-assign, assignment]
    return cls


def same_objects(values: tuple[H, ...]) -> tuple[H, ...]:
    """Return equal values, those that are alike as one object, which also stands for them in the next tuple that has them:
    such tuples are quick to compare.
    """
    different = {id(value): value for value in values}  # mostly few
    first = {number: _first_of(value) for number, value in different.items()}
    return tuple([first[id(value)] for value in values])


@lru_cache(maxsize=2**12)
def _first_of(value: H) -> H:
    return value
