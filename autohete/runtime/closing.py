"""What must be closed, as a context manager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from autohete.errors import AutoHeteError


class Closing(ABC):
    """Closes at the end of a ``with`` block. If both the block and closing fail, the block's error is raised, with a note."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except AutoHeteError as failure:
            if error is None:
                raise
            if failure is not error:
                error.add_note(str(failure))
