"""Hardware files for tests: with a base, and with figures of one's own."""

from __future__ import annotations

from pathlib import Path

#: A desktop with drives and without an interconnect.
NODE = "rtx4090-workstation"
#: What a figure of one's own needs beside its value.
OWN = 'source = "measured"\ndate = "2026-11"'


def write(path: Path, text: str, base: str = NODE) -> Path:
    """Write a hardware file with a base."""
    path.write_text(f'base = "{base}"\n{text}')
    return path


def own(key: str, value: str | float) -> str:
    """A figure's table."""
    return f"[{key}]\nvalue = {value!r}\n{OWN}\n".replace("'", '"')
