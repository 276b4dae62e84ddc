"""Check for PyTorch, which commands that train need."""

from __future__ import annotations

import importlib.util

from autohete.errors import InputError


def check_runtime(what: str = "training") -> None:
    """Check that PyTorch is installed, which ``what`` needs; the error describes how to install it."""
    missing = [name for name in ("torch", "greenlet") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"{what} needs {' and '.join(missing)}, not installed: pip install 'autohete[runtime]'")
