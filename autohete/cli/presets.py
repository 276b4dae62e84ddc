"""``autohete presets``."""

from __future__ import annotations


def presets() -> None:
    """List named workloads, hardware presets and policies with their flags."""
    from autohete.report.tables import print_presets

    print_presets()
