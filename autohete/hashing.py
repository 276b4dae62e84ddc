"""Hashes that are computed once, for deep immutable objects that are looked up often, such as plans and their units."""

from __future__ import annotations

from typing import TypeVar


class Hashed:
    """An immutable object with a place for its hash; see :func:`hashed_once`."""

    __slots__ = ("_hash",)


H = TypeVar("H", bound=Hashed)


def hashed_once(cls: type[H]) -> type[H]:
    """Let instances of a frozen dataclass compute their hash when it is first asked for. It is not pickled with them."""
    compute = cls.__hash__

    def kept(self: H) -> int:
        try:
            found: int = self._hash  # type: ignore[attr-defined]
        except AttributeError:
            found = compute(self)
            object.__setattr__(self, "_hash", found)
        return found

    cls.__hash__ = kept  # type: ignore[method-assign, assignment]
    return cls
