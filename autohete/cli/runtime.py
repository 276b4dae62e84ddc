"""Commands that train need PyTorch."""

from __future__ import annotations

import importlib.util

from autohete.errors import InputError


def check_runtime() -> None:
    """Say what to install where PyTorch is missing."""
    missing = [name for name in ("torch", "greenlet") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"training needs {' and '.join(missing)}, not installed here: pip install 'autohete[runtime]'")
