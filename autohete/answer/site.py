"""Where training runs: hardware by name, less what the system takes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autohete.errors import InputError, check_fields
from autohete.hardware import ALONE, Hardware, Parallelism, load_hardware
from autohete.quantities import format_bytes

#: Host memory of the operating system and other programs, by default. An assumption: an idle desktop
#: takes 2 to 4 GiB, and a Python process with CUDA one or two.
SYSTEM_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class Site:
    """Where training runs: hardware by name, so that its figures can be changed.

    Args:
        source: a preset's name or the path of a hardware file.
        given: figures that replace its own: dotted key -> text with unit.
        gpus: GPUs that train together.
        system_bytes: host memory that is left to the system.
        parallelism: how they divide each batch.
    """

    source: str
    given: Mapping[str, str]
    gpus: int = 1
    system_bytes: int = SYSTEM_BYTES
    parallelism: Parallelism = ALONE

    def __post_init__(self) -> None:
        check_fields(self)

    def hardware(self, moved: Mapping[str, str] | None = None) -> Hardware:
        """Return one GPU's share of the hardware, with more figures replaced, and without what is left to the system.

        Raises:
            InputError: invalid figures, or the system's part leaves nothing.
        """
        return without_system(self._whole(moved or {}).shared_by(self.gpus, self.parallelism), self.system_bytes)

    def whole(self) -> Hardware:
        """Return the whole node, with the figures given."""
        return self._whole({})

    def _whole(self, moved: Mapping[str, str]) -> Hardware:
        return load_hardware(self.source, {**self.given, **moved})


def without_system(hardware: Hardware, system_bytes: int) -> Hardware:
    """Return ``hardware`` with an equal part of ``system_bytes`` taken from each GPU's share of the host's memory.

    Raises:
        InputError: nothing is left.
    """
    if hardware.unified:  # gpu.reserved_memory has what the system keeps of the pool
        return hardware
    host = hardware.host
    left = host.memory_bytes - system_bytes // hardware.all_gpus_of_node
    if left < 1:
        raise InputError(
            f"{format_bytes(system_bytes)} for the system leaves nothing of {format_bytes(host.memory_bytes)} of host memory: "
            "leave less to the system, or give hardware with a larger host.memory"
        )
    pinned = None if host.pinned_bytes is None else min(host.pinned_bytes, left)
    return replace(hardware, host=replace(host, memory_bytes=left, pinned_bytes=pinned))
