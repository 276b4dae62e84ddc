"""Memory budgets of a plan, and the objective that a planner minimises within them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from autohete.errors import check_fields
from autohete.hardware import Hardware
from autohete.plan.policy import Judgement
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY


class Objective(StrEnum):
    """What to minimise: time within all memory budgets, or the named memory within the budgets of the others."""

    SECONDS = "seconds"
    GPU_BYTES = "gpu"
    HOST_BYTES = "host"
    PINNED_BYTES = "pinned"


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes available for tensors in each memory.

    Args:
        gpu_bytes, host_bytes: capacities.
        pinned_bytes: pinned part of the host memory. None: no separate limit.
        places: capacities of other places.
    """

    gpu_bytes: float
    host_bytes: float
    pinned_bytes: float | None = None
    places: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def of(cls, hardware: Hardware) -> Budgets:
        """The full capacity of ``hardware``."""
        places = {place.name: float(place.capacity_bytes) for place in hardware.places}
        return cls(hardware.gpu_capacity_bytes, hardware.host.memory_bytes, hardware.host.pinned_bytes, places)

    def limits(self) -> dict[Objective, float]:
        """The budget of each limited memory, cheapest to evaluate first."""
        pinned = {} if self.pinned_bytes is None else {Objective.PINNED_BYTES: self.pinned_bytes}
        return {**pinned, Objective.HOST_BYTES: self.host_bytes, Objective.GPU_BYTES: self.gpu_bytes}

    def excess(self, used: Judgement) -> float:
        """The largest relative excess over a budget among the memories; 0 if the plan fits."""
        peaks = _peaks(used)
        shares = [peaks[memory] / max(budget, 1) for memory, budget in self.limits().items()]
        shares += [used.peaks.get(place, 0) / max(budget, 1) for place, budget in self.places.items()]
        return max(0.0, max(shares) - 1)

    def tightened(self, capacity: Budgets, used: Judgement) -> Budgets:
        """Budgets for the next attempt, after a plan made for these budgets ``used`` more than ``capacity``."""
        peaks = _peaks(used)
        over = {memory: max(0.0, peaks[memory] - budget) for memory, budget in capacity.limits().items()}
        less = replace(
            self, gpu_bytes=self.gpu_bytes - over[Objective.GPU_BYTES], host_bytes=self.host_bytes - over[Objective.HOST_BYTES]
        )
        if less.pinned_bytes is None:
            return less
        return replace(less, pinned_bytes=less.pinned_bytes - over[Objective.PINNED_BYTES])


def _peaks(used: Judgement) -> dict[Objective, int]:
    of = {Objective.GPU_BYTES: GPU_MEMORY, Objective.HOST_BYTES: HOST_MEMORY, Objective.PINNED_BYTES: PINNED_MEMORY}
    return {objective: used.peaks.get(memory, 0) for objective, memory in of.items()}
