"""The least memory with which something fits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

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


def least_memory(profile: Profile, system_bytes: int, names: Sequence[str], run: Run) -> list[Need]:
    """The least GPU memory, host memory and limit of pinned memory, each alone; or of GPU and host, if none alone is enough."""
    limited = profile.hardware.host.pinned_bytes is not None
    memories = [GPU_MEMORY, HOST_MEMORY, *([PINNED_MEMORY] if limited else [])]
    work = [(name, memory) for memory in memories for name in longest_first(names)]
    results = run(partial(_least, profile), work)
    needs = []
    for memory in memories:
        sized = [result for (_, asked), result in zip(work, results, strict=True) if asked == memory and result is not None]
        if sized:
            least = min(sized, key=lambda result: (memory_bytes(result[1], memory), result[2]))
            needs.append(_need((memory,), least, system_bytes))
    if needs:
        return needs
    plenty = with_memory(profile, HOST_MEMORY, _PLENTY)
    if limited:
        plenty = with_memory(plenty, PINNED_MEMORY, _PLENTY)
    order = longest_first(names)
    sized = [result for result in run(partial(_least_of_both, plenty), order) if result is not None]
    if sized:
        least = min(sized, key=lambda result: _sizes(result[1]))
        needs.append(_need((GPU_MEMORY, HOST_MEMORY), least, system_bytes))
    return needs


def _sizes(profile: Profile) -> tuple[int, int]:
    return memory_bytes(profile, GPU_MEMORY), memory_bytes(profile, HOST_MEMORY)


def _need(grows: tuple[str, ...], least: tuple[str, Profile, float], system_bytes: int) -> Need:
    policy, profile, seconds = least
    hardware = profile.hardware
    return Need(
        grows,
        hardware.gpu.memory_bytes,
        hardware.host.memory_bytes + system_bytes // hardware.gpus_of_node,
        hardware.host.pinned_bytes,
        policy,
        seconds,
    )


def _least(profile: Profile, asked: tuple[str, str]) -> tuple[str, Profile, float] | None:
    """The policy, the profile with the least size of one memory with which it fits, and its time; None if that is not enough.

    From 1 byte on, each attempt has what the one before it was short of: the size that a policy's error names, or its peak.
    """
    name, memory = asked
    policy, size = parse_policy(name), 1
    for _ in range(_ATTEMPTS):
        there = with_memory(profile, memory, size)
        try:
            result = simulate_policy(there, policy)
        except InfeasibleError as error:
            short, needed = error.constraint, error.needed_bytes
        except AutoHeteError:
            return None
        else:
            if result.verdict is Verdict.OK:
                return name, there, result.iteration_seconds
            occupied = next(one for one in result.memories if not one.fits)
            others = [one for one in result.memories if not one.fits and one.memory != memory]
            if others:
                return None
            short, needed = occupied.memory, occupied.peak_bytes
        if short != memory:
            return None
        size = max(needed, size + 1)
    return None


def _least_of_both(plenty: Profile, name: str) -> tuple[str, Profile, float] | None:
    """The least GPU memory with any amount of host memory, and with that the least host memory."""
    first = _least(plenty, (name, GPU_MEMORY))
    return None if first is None else _least(first[1], (name, HOST_MEMORY))
