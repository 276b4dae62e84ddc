"""The size of one memory of a profile's hardware."""

from __future__ import annotations

from dataclasses import replace

from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, PINNED_MEMORY


def memory_bytes(profile: Profile, memory: str) -> int:
    """Return the size of one memory, as far as it is there for tensors."""
    hardware = profile.hardware
    if (place := hardware.place(memory)) is not None:
        return place.capacity_bytes
    if memory == PINNED_MEMORY and hardware.host.pinned_bytes is not None:
        return hardware.host.pinned_bytes
    return hardware.gpu_capacity_bytes if memory == GPU_MEMORY else hardware.host.memory_bytes


def with_memory(profile: Profile, memory: str, size_bytes: int) -> Profile:
    """Return ``profile`` with another size of one memory for tensors."""
    hardware = profile.hardware
    if memory == GPU_MEMORY:
        gpu = replace(hardware.gpu, memory_bytes=size_bytes + hardware.gpu.reserved_bytes)
        return replace(profile, hardware=replace(hardware, gpu=gpu))
    if hardware.place(memory) is not None:
        places = (replace(one, capacity_bytes=size_bytes) if one.name == memory else one for one in hardware.places)
        return replace(profile, hardware=replace(hardware, places=tuple(places)))
    host = hardware.host
    host = replace(host, pinned_bytes=size_bytes) if memory == PINNED_MEMORY else replace(host, memory_bytes=size_bytes)
    return replace(profile, hardware=replace(hardware, host=host))
