"""``torch.autocast`` in the threads that compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Autocast:
    """A thread's mode of ``torch.autocast``.

    Args:
        types: the type to compute in, by the kind of device where it is on.
    """

    types: tuple[tuple[str, torch.dtype], ...] = ()

    @classmethod
    def to(cls, dtype: torch.dtype | None, device: torch.device) -> Autocast:
        """Compute in ``dtype`` on ``device``; None: as without autocast."""
        return cls() if dtype is None else cls(((device.type, dtype),))

    @classmethod
    def now(cls) -> Autocast:
        """The mode of the calling thread."""
        return cls(tuple((kind, torch.get_autocast_dtype(kind)) for kind in _DEVICES if torch.is_autocast_enabled(kind)))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make it the mode of the calling thread inside the context, which may change it."""
        before = self.now()
        if before != self:
            self._set()
        try:
            yield
        finally:
            if self.now() != before:
                before._set()

    def _set(self) -> None:
        types = dict(self.types)
        for kind in _DEVICES:
            torch.set_autocast_enabled(kind, kind in types)
            if kind in types:
                torch.set_autocast_dtype(kind, types[kind])
        torch.clear_autocast_cache()  # of cast parameters, which may leave
