"""``autohete presets``."""

from __future__ import annotations


def presets(name: str | None = None, /) -> None:
    """List named models, workloads, hardware presets and policies with their flags, or describe one of them.

    Parameters
    ----------
    name:
        A model, a workload or a hardware preset: show all its figures, and their sources.
    """
    if name is None:
        from autohete.report.tables import print_presets

        print_presets()
    else:
        from autohete.report.preset_tables import print_preset

        print_preset(name)
