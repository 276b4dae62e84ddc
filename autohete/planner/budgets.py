"""How much of each memory a plan may take, and what a planner minimises under that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from autohete.errors import check_fields
from autohete.hardware import Hardware
from autohete.plan.policy import Judgement


class Objective(StrEnum):
    """What to minimise: time under all memories, or one memory under the others, by its name."""

    SECONDS = "seconds"
    GPU_BYTES = "gpu"
    HOST_BYTES = "host"
    PINNED_BYTES = "pinned"


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes for tensors in each memory.

    Args:
        gpu_bytes, host_bytes: capacities.
        pinned_bytes: of what the host has; None: no limit of its own.
    """

    gpu_bytes: float
    host_bytes: float
    pinned_bytes: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, hardware: Hardware) -> Budgets:
        """All that ``hardware`` has."""
        return cls(hardware.gpu_capacity_bytes, hardware.host.memory_bytes, hardware.host.pinned_bytes)

    def limits(self) -> dict[Objective, float]:
        """Of each memory that has one; what is quick to count comes first."""
        pinned = {} if self.pinned_bytes is None else {Objective.PINNED_BYTES: self.pinned_bytes}
        return {**pinned, Objective.HOST_BYTES: self.host_bytes, Objective.GPU_BYTES: self.gpu_bytes}

    def excess(self, used: Judgement) -> float:
        """The share by which a plan exceeds the memory that it exceeds most; 0 if it fits."""
        peaks = _peaks(used)
        return max(0.0, *(peaks[memory] / max(budget, 1) - 1 for memory, budget in self.limits().items()))

    def tightened(self, capacity: Budgets, used: Judgement) -> Budgets:
        """What to ask for next, when a plan that was to keep to these budgets has ``used`` more than ``capacity``."""
        peaks = _peaks(used)
        over = {memory: max(0.0, peaks[memory] - budget) for memory, budget in capacity.limits().items()}
        less = replace(
            self, gpu_bytes=self.gpu_bytes - over[Objective.GPU_BYTES], host_bytes=self.host_bytes - over[Objective.HOST_BYTES]
        )
        if less.pinned_bytes is None:
            return less
        return replace(less, pinned_bytes=less.pinned_bytes - over[Objective.PINNED_BYTES])


def _peaks(used: Judgement) -> dict[Objective, int]:
    return {
        Objective.GPU_BYTES: used.gpu_peak_bytes,
        Objective.HOST_BYTES: used.host_peak_bytes,
        Objective.PINNED_BYTES: used.pinned_peak_bytes,
    }
