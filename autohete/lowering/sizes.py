"""The parts of a profile that lowering depends on: sizes, not times."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from autohete.hardware import Cpu, Gpu, Hardware, Host, Interconnect, Link, Parallelism, Place
from autohete.profile import Profile, UnitProfile


def sizes_of(profile: Profile) -> Profile:
    """Return ``profile`` without its times, and without the rates and capacities of its hardware.

    Lowering sees nothing else, so what it makes holds for all profiles of these sizes.
    """
    hardware, host = profile.hardware, profile.hardware.host
    return Profile(
        profile.workload,
        _without_rates(
            (hardware.gpus, hardware.gpus_of_node),
            hardware.parallelism,
            hardware.unified,
            host.rounds_pinned,
            host.pinned_bytes is not None,
            hardware.beside_gpu,
        ),
        tuple(map(_without_times, profile.units)),
        replace(profile.loss, seconds=0.0),
    )


@lru_cache
def _without_rates(
    gpus: tuple[int, int],
    parallelism: Parallelism,
    unified: bool,
    rounds_pinned: bool,
    limits_pinned: bool,
    beside_gpu: tuple[str, ...],
) -> Hardware:
    gpu, link = Gpu(0, 0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0), Link(1.0, 1.0, 0.0)
    host = Host(0, 1.0, 1.0, 0 if limits_pinned else None, rounds_pinned=rounds_pinned)
    places = tuple(Place(name, 0, 1.0, 1.0, 0.0, beside="gpu") for name in beside_gpu)
    join = Interconnect(gpus[1], 1.0, 0.0)
    any_node = Hardware("any", gpu, link, link, host, Cpu(1, 1.0), places=places, interconnect=join, unified=unified)
    return replace(any_node, gpus=gpus[0], parallelism=parallelism)


@lru_cache(maxsize=512)
def _without_times(unit: UnitProfile) -> UnitProfile:
    saved, results = (
        tuple(one if one.seconds is None else replace(one, seconds=0.0, launch_seconds=0.0) for one in some)
        for some in (unit.saved, unit.results)
    )
    return replace(
        unit,
        forward_seconds=0.0,
        backward_seconds=0.0,
        gpu_update_seconds=0.0,
        cpu_update_seconds=None if unit.cpu_update_seconds is None else 0.0,  # whether the CPU can update
        saved=saved,
        results=results,
        shorter_recompute_seconds=None,
        forward_host_seconds=0.0,
        backward_host_seconds=0.0,
    )
