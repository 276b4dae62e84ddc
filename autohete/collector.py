"""Python's garbage collector, paused while much is made that is needed to the end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Do not look for garbage in the meantime: a function that makes a hundred thousand objects and keeps them all would have
    them looked at again and again, which takes a third of its time. Also a decorator.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
