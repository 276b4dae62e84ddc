"""``autohete presets``."""

from __future__ import annotations

from autohete.errors import InputError


def presets(name: str | None = None, word: str = "", /) -> None:
    """List named models, workloads, hardware presets and policies with their flags, or describe one of them.

    Parameters
    ----------
    name:
        models, workloads, hardware or policies: list only these. A model, a workload or a hardware preset: show all its
        figures, and their sources.
    word:
        List only rows with this word, such as qwen3 or 4090.
    """
    from autohete.report.preset_tables import KINDS, print_preset, print_presets

    if name is None or name in KINDS:
        print_presets(() if name is None else (name,), word)
    elif word:
        raise InputError(f"{name!r} is no list to look for {word!r} in: give {', '.join(KINDS)}, and then the word")
    else:
        print_preset(name)
