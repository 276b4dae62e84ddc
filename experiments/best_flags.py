"""A system with the best of the flags that its users can choose: its fastest plan, and the smallest GPU that it trains on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from autohete.answer.policies import Judged
from autohete.answer.result import Candidate
from autohete.errors import AutoHeteError, InfeasibleError
from autohete.plan.policy import Verdict
from autohete.planner.optimistic import OptimisticJudge, lower_bytes
from autohete.policies import NamedPolicy, parse_policy, search_space
from autohete.profile import Profile, analytic_profile
from autohete.schedule import GPU_MEMORY, is_gpu
from autohete.simulate import simulate_policy, with_memory
from experiments.shared import Cell

#: GPUs of other sizes are tried in tenths of a GiB.
_TENTH_BYTES = 2**30 / 10
#: As good as any size.
_PLENTY = 10 * 2**12
#: Where another memory is short, the GPU becomes so much larger, and then smaller until the interval is such a share of it.
_MORE, _CLOSE = 1.5, 0.03


@dataclass(frozen=True, slots=True)
class BestFlags(Cell):
    """A cell whose policy is a name without flags, for all of them that are worth judging."""

    def fastest(self) -> Candidate:
        """The fastest plan; if none fits, the one with the default flags."""
        return self._fastest()[0]

    def least(self) -> Least | None:
        """The smallest GPU with which it trains, with the batch as it is; None if more GPU memory is not enough."""
        return smallest_gpu(analytic_profile(self.workload, self.node), self.policy)

    def fastest_and_least(self) -> tuple[Candidate, Least | None]:
        """The fastest plan, and the smallest GPU with which it trains; None if more GPU memory is not enough."""
        fastest, profiles = self._fastest()
        found = (smallest_gpu(profile, self.policy) for profile in profiles)
        return fastest, min((one for one in found if one is not None), key=lambda one: one.gpu_bytes, default=None)

    def _fastest(self) -> tuple[Candidate, list[Profile]]:
        """The fastest plan, and the profiles of which it was chosen. If GPUs share a batch, as stages of a pipeline do, they
        have the batches of all, in micro-batches of each size.
        """
        one, profile = self.workload, analytic_profile(self.workload, self.node)
        fastest = self._judged(profile)
        sharing = 1 if fastest.plan is None else self.gpus // fastest.plan.batches(self.gpus)
        if sharing == 1:
            return fastest, [profile]
        sizes = (size for size in range(one.batch_size, 0, -1) if one.batch_size % size == 0)
        split = [replace(one, batch_size=size, micro_batches=one.samples * sharing // size) for size in sizes]
        profiles = [analytic_profile(workload, self.node) for workload in split]
        return min(map(self._judged, profiles), key=lambda found: found.seconds_per_token), profiles

    def _judged(self, profile: Profile) -> Candidate:
        return Judged(profile, search_space(self.policy, profile))()


@dataclass(frozen=True, slots=True)
class Least:
    """A policy on the smallest GPU that it trains on.

    Args:
        policy: with its flags.
        gpu_bytes: memory of the GPU, with what is not there for tensors.
    """

    policy: str
    gpu_bytes: int


def smallest_gpu(profile: Profile, name: str) -> Least | None:
    """The smallest GPU on which a system trains with any of its flags, in tenths of a GiB; None if no GPU is enough."""
    best: Least | None = None
    for bound, policy in sorted(_bounds(profile, name), key=lambda one: one[0]):
        most = _PLENTY if best is None else _tenths(best.gpu_bytes) - 1
        if _tenths(bound) > most:
            break
        found = _Sizes(profile, policy).least(most)
        best = min((one for one in (best, found) if one is not None), key=lambda one: one.gpu_bytes, default=None)
    return best


def _bounds(profile: Profile, name: str) -> Iterator[tuple[int, NamedPolicy]]:
    """Each set of flags, with a lower bound of the GPU memory that its thriftiest plan needs; of a single one, no bound."""
    little, names = with_memory(profile, GPU_MEMORY, 1), search_space(name, profile)
    optimist = OptimisticJudge(little, 0.0)
    for policy in map(parse_policy, names):
        bound = 0
        if len(names) > 1:
            with suppress(AutoHeteError):  # it has a plan only if that fits
                bound = lower_bytes(little, policy.plan(little, optimist))[GPU_MEMORY]
        yield bound, policy


class _Sizes:
    """The GPUs of other sizes on which a policy trains. Sizes are in tenths of a GiB.

    Args:
        profile: its other memories stay as they are.
        policy: with flags.
    """

    def __init__(self, profile: Profile, policy: NamedPolicy) -> None:
        self._profile, self._policy = profile, policy
        self._beside = profile.hardware.gpu.reserved_bytes

    def least(self, most: int) -> Least | None:
        """The smallest size, tried up to ``most``.

        Each attempt has what the one before it was short of. Where another memory is short, more GPU memory may help; the size
        is then within 3 % of the smallest one.
        """
        size, other = _tenths(self._beside + 1), 0  # the largest size at which another memory is short
        while size <= most:
            tried = self._tried(size)
            if isinstance(tried, Least):
                return self._between(other, tried) if other else tried
            if tried is not None:
                size = max(tried, size + 1)
            elif other == 0 and not isinstance(self._tried(_PLENTY), Least):
                return None
            else:
                other, size = size, math.ceil(size * _MORE)
        return None

    def _between(self, few: int, found: Least) -> Least:
        while (enough := _tenths(found.gpu_bytes)) - few > max(few * _CLOSE, 1):
            middle = (few + enough) // 2
            tried = self._tried(middle)
            if isinstance(tried, Least) and tried.gpu_bytes < found.gpu_bytes:
                found = tried
            else:
                few = middle
        return found

    def _tried(self, size: int) -> Least | int | None:
        """What trains with this size, or with the size that an error names; otherwise the size of which its plan is short, or
        None if another memory is short, or it has no plan.
        """
        gpu_bytes = math.floor(size * _TENTH_BYTES)
        profile = with_memory(self._profile, GPU_MEMORY, gpu_bytes - self._beside)
        try:
            found = simulate_policy(profile, self._policy)
        except InfeasibleError as error:
            if error.constraint != GPU_MEMORY:
                return None
            return self._of(_tenths(error.needed_bytes + self._beside))
        except AutoHeteError:
            return None
        if found.verdict is Verdict.OK:
            return self._of(size)
        short = [one for one in found.memories if not one.fits]
        if all(is_gpu(one.memory) for one in short):
            return _tenths(max(one.peak_bytes for one in short) + self._beside)
        return None

    def _of(self, size: int) -> Least:
        return Least(self._policy.name, math.floor(size * _TENTH_BYTES))


def _tenths(size_bytes: int) -> int:
    return math.ceil(size_bytes / _TENTH_BYTES)
