"""Capuchin (Peng et al., ASPLOS 2020): swap or recompute, decided per tensor by cost. No public code; this follows the paper.

Parameters, gradients and optimizer states stay on the GPU. A first iteration measures when tensors are accessed. Then:

- Swapping comes first, because a copy can be hidden. A tensor's *free time* is the time between its last use in forward and
  its first in backward, less a copy to the host and one back. Tensors with the most free time are swapped first, as long as
  their copies are hidden. Only one copy per direction runs at a time.
- A fetch is triggered by the tensor access that leaves it just enough time (*in-trigger*). Here the trigger is the end of a
  pass, at the earliest the end of forward, up to which memory fills.
- When no more copies can be hidden, tensors are recomputed, first those that save most memory per second of recomputation.
- It stops when the rest fits.
- The GPU waits for a copy to the host only when it runs out of memory ("decoupled computation and swapping").

The paper decides per tensor. This implementation decides per transformer block: everything a block keeps, or everything but
its input. Where a copy is not hidden, the paper weighs its cost against recomputation; here the block is recomputed. Updates
follow backward, as clipping requires. Not published, and decided here: if this does not suffice, swapped blocks are recomputed
instead, the last chosen first, because a fetched block occupies memory while the one above it still has its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from autohete.errors import check_fields
from autohete.plan import Activations, Plan, Route, UnitPlan
from autohete.plan.policy import Judge, Verdict, better
from autohete.plan.rules import GpuUpdatesAfterBackward
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY


class Method(StrEnum):
    """Which techniques may be used: both, or only one of them, as in the paper's breakdown."""

    BOTH = "both"
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Capuchin:
    """Capuchin.

    Args:
        method: swap and recompute, or only one of them.
    """

    method: Method = Method.BOTH

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`. If nothing fits, returns the plan with the lowest GPU peak."""
        timeline, blocks = _Timeline(profile), range(1, len(profile.units) - 1)
        swapped = [] if self.method is Method.RECOMPUTE else timeline.swapped(only_hidden=self.method is Method.BOTH)
        decisions = [(block, UnitPlan(kept=Route(HOST_MEMORY, ahead))) for block, ahead in swapped]
        if self.method is not Method.SWAP:
            left = sorted(set(blocks) - {block for block, _ in swapped}, key=lambda block: -_saved_per_second(profile, block))
            instead = [block for block, _ in reversed(swapped)]
            decisions += [(block, UnitPlan(Activations.RECOMPUTE)) for block in [*left, *instead]]

        def plan_for(made: int) -> Plan:
            units = [UnitPlan() for _ in profile.units]
            for block, unit in decisions[:made]:
                units[block] = unit
            return Plan(policy="capuchin", units=tuple(units), rules=(GpuUpdatesAfterBackward(),))

        def fits(made: int) -> bool:
            return judge(plan_for(made)).verdict is not Verdict.GPU_OUT_OF_MEMORY

        count = len(decisions) + 1
        made = bisect_left(range(count), True, key=fits)
        return plan_for(made) if made < count else better(map(plan_for, range(count)), judge)


def _saved_per_second(profile: Profile, unit: int) -> float:
    """Memory saved per second of recomputation; MSPS in the paper."""
    times = profile.units[unit]
    return times.kept_bytes / times.forward_seconds if times.forward_seconds else float("inf")


class _Timeline:
    """The timeline of an iteration without copies, and the copies for swapping that are placed in it."""

    def __init__(self, profile: Profile) -> None:
        self._profile, self._last = profile, len(profile.units) - 1
        forward = [unit.forward_seconds for unit in profile.units]
        backward = [unit.backward_seconds for unit in reversed(profile.units)]
        self._ends = list(accumulate([*forward, profile.loss.seconds, *backward]))

    def _made(self, unit: int) -> float:
        """Time at which forward of ``block`` ends."""
        return self._ends[unit]

    def _needed(self, unit: int) -> float:
        """Time at which backward of ``block`` begins."""
        return self._ends[self._place(unit) - 1]

    def _place(self, unit: int) -> int:
        """Index of backward of ``block`` among the passes."""
        return 2 * self._last + 2 - unit

    def _free_seconds(self, unit: int) -> float:
        size = self._profile.units[unit].activation_bytes
        both = self._profile.d2h_seconds(size) + self._profile.h2d_seconds(size)
        return self._needed(unit) - self._made(unit) - both

    def swapped(self, *, only_hidden: bool) -> list[tuple[int, int]]:
        """Blocks in the order in which they are chosen, with the number of passes ahead at which each is fetched."""
        found: list[int] = []
        starts: dict[int, float] = {}
        for unit in sorted(range(1, self._last), key=lambda unit: (-self._free_seconds(unit), unit)):
            latest = self._fetches(sorted([*found, unit]))
            if latest is None and only_hidden:
                break
            found.append(unit)
            starts = latest or {}
        return [(unit, self._ahead(unit, starts.get(unit, 0.0))) for unit in found]

    def _fetches(self, units: list[int]) -> dict[int, float] | None:
        """Latest fetch starts of ``blocks`` such that each ends in time. None if the copies to the host do not end before."""
        profile = self._profile
        sent, away = 0.0, {}
        for unit in units:
            sent = max(sent, self._made(unit)) + profile.d2h_seconds(profile.units[unit].activation_bytes)
            away[unit] = sent
        starts: dict[int, float] = {}
        start = float("inf")
        for unit in units:  # the last needed first
            start = min(start, self._needed(unit)) - profile.h2d_seconds(profile.units[unit].activation_bytes)
            if start < max(away[unit], self._ends[self._last]):
                return None
            starts[unit] = start
        return starts

    def _ahead(self, unit: int, start: float) -> int:
        """Number of passes before backward of ``block`` that a fetch overlaps if it begins by ``start``, but after forward."""
        ended = max(bisect_right(self._ends, start), self._last + 1)  # number of passes that have ended
        return self._place(unit) - ended


SYSTEM = Capuchin
