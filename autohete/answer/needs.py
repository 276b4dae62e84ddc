"""The least memory with which something fits: rounded up as it is printed, and tried before it is named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autohete.answer.policies import longest_first
from autohete.answer.result import Need
from autohete.answer.run import Run
from autohete.errors import AutoHeteError, InfeasibleError
from autohete.plan.policy import Verdict
from autohete.policies import parse_policy
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY
from autohete.simulate import memory_bytes, simulate_policy, with_memory

#: As good as any size of memory.
_PLENTY = 2**50
#: Attempts to find the least memory; each begins at what the one before it was short of.
_ATTEMPTS = 8
#: How often the interval of a need is halved.
_HALVINGS = 4
#: Whole memories are named in tenths of a GiB, as they are printed.
_STEP = 2**30 / 10


def least_memory(profile: Profile, system_bytes: int, names: Sequence[str], run: Run) -> list[Need]:
    """The least GPU memory, host memory and limit of pinned memory, each alone; or of GPU and host, if none alone is enough.

    Args:
        profile: of the hardware on which nothing fits, less what is left to the system.
        system_bytes: of the node's host memory, left to the system.
        names: policies.
        run: works through them.
    """
    limited = profile.hardware.host.pinned_bytes is not None
    memories = [GPU_MEMORY, HOST_MEMORY, *([PINNED_MEMORY] if limited else [])]
    order = longest_first(names)
    each = run("least memory", [_Least(profile, name, (memory,), system_bytes) for memory in memories for name in order])
    found = [_smallest(each, (memory,)) for memory in memories]
    if any(found):
        rough = [_Smaller(profile, need, system_bytes) for need in found if need is not None]
        return run("less memory", rough)
    plenty = with_memory(profile, HOST_MEMORY, _PLENTY)
    if limited:
        plenty = with_memory(plenty, PINNED_MEMORY, _PLENTY)
    both = (GPU_MEMORY, HOST_MEMORY)
    least = _smallest(run("least memory of GPU and host", [_Least(plenty, name, both, system_bytes) for name in order]), both)
    return [] if least is None else [least]


def _smallest(each: Sequence[tuple[Need, ...]], grows: tuple[str, ...]) -> Need | None:
    """The smallest need for more of some memories."""

    def size(need: Need) -> tuple[int, ...]:
        sizes = {GPU_MEMORY: need.gpu_bytes, HOST_MEMORY: need.host_bytes, PINNED_MEMORY: need.pinned_bytes or 0}
        return tuple(sizes[memory] for memory in need.grows)

    needs = (need for some in each for need in some if need.grows == grows)
    return min(needs, key=lambda need: (size(need), -need.tokens_per_second), default=None)


@dataclass(frozen=True, slots=True)
class _Least:
    """The least of some memories with which one policy fits, one after the other; none if they are not enough."""

    profile: Profile
    name: str
    grows: tuple[str, ...]
    system_bytes: int

    def __call__(self) -> tuple[Need, ...]:
        profile, speed = self.profile, (math.inf, 0.0)
        for memory in self.grows:
            found = self._least(profile, memory)
            if found is None:
                return ()
            profile, speed = found
        hardware = profile.hardware
        need = Need(
            self.grows,
            hardware.gpu.memory_bytes,
            hardware.host.memory_bytes + self.system_bytes // hardware.all_gpus_of_node,
            hardware.host.pinned_bytes,
            self.name,
            *speed,
        )
        return (need,)

    def _least(self, profile: Profile, memory: str) -> tuple[Profile, tuple[float, float]] | None:
        """The profile with the least size of one memory, and then the time of an iteration and the tokens/s.

        From 1 byte on, each attempt has what the one before it was short of: the size that a policy's error names, or its peak.
        """
        policy, needed = parse_policy(self.name), 1
        for _ in range(_ATTEMPTS):
            size = self._rounded(profile, memory, needed)
            there = with_memory(profile, memory, size)
            try:
                result = simulate_policy(there, policy)
            except InfeasibleError as error:
                short, needed = error.constraint, error.needed_bytes
            except AutoHeteError:
                return None
            else:
                if result.verdict is Verdict.OK:
                    return there, (result.iteration_seconds, result.tokens_per_second)
                occupied = next(one for one in result.memories if not one.fits)
                if any(not one.fits for one in result.memories if one.memory != memory):
                    return None
                short, needed = occupied.memory, occupied.peak_bytes
            if short != memory:
                return None
            needed = max(needed, size + 1)
        return None

    def _rounded(self, profile: Profile, memory: str, needed: int) -> int:
        """The least size for tensors with which the whole memory is a number of tenths of a GiB and holds ``needed``."""
        beside = _beside(profile, memory, self.system_bytes)
        return math.floor(math.ceil((needed + beside) / _STEP) * _STEP) - beside


@dataclass(frozen=True, slots=True)
class _Smaller:
    """A need with less of its one memory, if its policy finds a plan there: an error names the least that was found, which need
    not be the least. Halves the interval between what is there now and the need a few times.
    """

    profile: Profile
    need: Need
    system_bytes: int

    def __call__(self) -> Need:
        (memory,) = self.need.grows
        beside = _beside(self.profile, memory, self.system_bytes)
        field = {GPU_MEMORY: "gpu_bytes", HOST_MEMORY: "host_bytes", PINNED_MEMORY: "pinned_bytes"}[memory]
        policy, best = parse_policy(self.need.policy), self.need
        few, enough = (memory_bytes(self.profile, memory) + beside) / _STEP, getattr(best, field) / _STEP
        for _ in range(_HALVINGS):
            middle = math.ceil((few + enough) / 2)
            if not few < middle < enough:
                break
            size = math.floor(middle * _STEP)
            try:
                found = simulate_policy(with_memory(self.profile, memory, size - beside), policy)
            except AutoHeteError:
                few = middle
                continue
            if found.verdict is Verdict.OK:
                speed: dict[str, Any] = {
                    "iteration_seconds": found.iteration_seconds,
                    "tokens_per_second": found.tokens_per_second,
                }
                best, enough = replace(best, **{field: size}, **speed), middle
            else:
                few = middle
        return best


def _beside(profile: Profile, memory: str, system_bytes: int) -> int:
    """Bytes of a memory that are not there for tensors."""
    if memory == GPU_MEMORY:
        return profile.hardware.gpu.memory_bytes - memory_bytes(profile, GPU_MEMORY)
    return system_bytes // profile.hardware.all_gpus_of_node if memory == HOST_MEMORY else 0
