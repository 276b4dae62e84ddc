"""Slows a hardware down until this machine can keep up with it."""

from __future__ import annotations

from dataclasses import replace

from autohete.profile import Profile

#: Minimum ratio of a task's paced duration to its actual work.
_PACE_MARGIN = 1.5


def slowed(measured: Profile, wanted: Profile) -> tuple[Profile, float]:
    """Combine the measured sizes with the wanted times, slowed down so that this machine can keep up; return the factor, too.

    The passes of the transformer blocks determine the factor. Tasks that are still too short (a norm, a loss over few tokens)
    last as long as this machine needs.
    """

    def kept_up(real: float) -> float:
        return _PACE_MARGIN * real

    factor = 1.0
    for real, ideal in zip(measured.units[1:-1], wanted.units[1:-1], strict=True):
        factor = max(factor, kept_up(real.forward_seconds) / ideal.forward_seconds)
        factor = max(factor, kept_up(real.backward_seconds) / ideal.backward_seconds)
    update_bandwidth = wanted.hardware.cpu.update_bandwidth
    blocks = tuple(
        replace(
            real,
            forward_seconds=max(ideal.forward_seconds * factor, kept_up(real.forward_seconds)),
            backward_seconds=max(ideal.backward_seconds * factor, kept_up(real.backward_seconds)),
            gpu_update_seconds=max(ideal.gpu_update_seconds * factor, kept_up(real.gpu_update_seconds)),
            cpu_update_seconds=max(real.parameters * 28 / update_bandwidth * factor, kept_up(real.cpu_update_seconds or 0.0)),
        )
        for real, ideal in zip(measured.units, wanted.units, strict=True)
    )
    hardware = wanted.hardware
    h2d, d2h = (
        replace(
            link,
            bandwidth=link.bandwidth / factor,
            duplex_bandwidth=link.duplex_bandwidth / factor,
            latency_seconds=link.latency_seconds * factor,
        )
        for link in (hardware.h2d, hardware.d2h)
    )
    host = replace(hardware.host, memory_bandwidth=hardware.host.memory_bandwidth / factor)
    # Updates during training run at the bulk rate here: on the emulated machine they share its cores instead.
    cpu = replace(hardware.cpu, update_bandwidth=hardware.cpu.update_bandwidth / factor, concurrent_share=1.0)
    slower = replace(hardware, h2d=h2d, d2h=d2h, host=host, cpu=cpu)
    loss = replace(measured.loss, seconds=max(wanted.loss.seconds * factor, kept_up(measured.loss.seconds)))
    return replace(measured, hardware=slower, units=blocks, loss=loss), factor
