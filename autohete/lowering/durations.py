"""How long the tasks of a schedule take: seconds on an undisturbed lane, as functions of a profile.

All else about a task follows from sizes, so one lowering serves all profiles that differ in times and rates only. Tasks that do
the same share one function: it is made once, and asked once for each profile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from autohete.profile import Profile

Duration = Callable[[Profile], float]
#: Operations of hooks: for each module, for each parameter tensor, and for each small one.
Counts = tuple[float, float, float]
_NONE: Counts = (0.0, 0.0, 0.0)
#: Bytes of a copy from the host for which the thread that launches a pass waits, and whether they are pinned.
Awaited = tuple[int, bool]
NO_COPY: Awaited = (0, True)

#: Keeps so many functions of a kind.
_kept = lru_cache(maxsize=2**12)
#: Kernels after the norms: stack, norm of norms, sum, quotient, clamp.
_COEFFICIENT_KERNELS = 5


def _hooked(
    profile: Profile, unit: int, seconds: float, host_seconds: float, hooks: Counts, awaited: Awaited, more: float = 0.0
) -> float:
    """A pass of ``seconds``, of which the host needs ``host_seconds``, with so many operations of hooks for each module and
    each parameter tensor, and ``more`` of them, and a copy that is ``awaited``: the GPU waits only for what the host needs
    longer than it. A measured unit, whose modules are not counted, has both in its times.
    """
    costs = profile.units[unit]
    of_module, of_tensor, of_small = hooks
    operations = of_module * costs.modules + of_tensor * (costs.tensors - costs.small_tensors)
    operations += of_small * costs.small_tensors + more * (costs.modules > 0)
    size, pinned = awaited
    waited = profile.h2d_seconds(size, pinned=pinned) if size else 0.0
    return max(seconds, min(host_seconds, seconds) + operations * profile.hardware.cpu.launch_seconds + waited)


@_kept
def forward(unit: int, hooks: Counts = _NONE, more: float = 0.0, awaited: Awaited = NO_COPY) -> Duration:
    """A forward of ``unit``, or a recomputation that makes its output."""

    def seconds(profile: Profile) -> float:
        costs = profile.units[unit]
        return _hooked(profile, unit, costs.forward_seconds, costs.forward_host_seconds, hooks, awaited, more)

    return seconds


@_kept
def recompute(unit: int, hooks: Counts = _NONE, more: float = 0.0, awaited: Awaited = NO_COPY) -> Duration:
    """A recomputation of ``unit`` whose output is not needed."""

    def seconds(profile: Profile) -> float:
        costs = profile.units[unit]
        return _hooked(profile, unit, costs.recompute_seconds, costs.forward_host_seconds, hooks, awaited, more)

    return seconds


@_kept
def without_products(unit: int, whole: Duration, results: frozenset[str]) -> Duration:
    """A recomputation of ``unit`` that lasts ``whole``, without the products of some results."""
    return lambda profile: max(whole(profile) - profile.units[unit].product_seconds(results), 0.0)


@_kept
def selective(unit: int, names: frozenset[str]) -> Duration:
    """The recomputation of some saved tensors of ``unit``."""
    return lambda profile: profile.units[unit].again_seconds(names)


@_kept
def backward(unit: int, hooks: Counts = _NONE, awaited: Awaited = NO_COPY, extra_bytes: float = 0.0) -> Duration:
    """A backward of ``unit``, with kernels that access so many bytes of the GPU's memory besides."""

    def seconds(profile: Profile) -> float:
        costs = profile.units[unit]
        busy = costs.backward_seconds + (profile.gpu_memory_seconds(extra_bytes) if extra_bytes else 0.0)
        return _hooked(profile, unit, busy, costs.backward_host_seconds, hooks, awaited)

    return seconds


def loss(profile: Profile) -> float:
    """The loss."""
    return profile.loss.seconds


@_kept
def to_gpu(size_bytes: int, *, pinned: bool = True) -> Duration:
    """A copy from the host."""
    return lambda profile: profile.h2d_seconds(size_bytes, pinned=pinned)


@_kept
def to_host(size_bytes: int, *, pinned: bool = True, fresh: bool = False, returned_bytes: int = 0) -> Duration:
    """A copy to the host, during which ``returned_bytes`` are copied back."""

    def seconds(profile: Profile) -> float:
        back = profile.h2d_seconds(returned_bytes, pinned=pinned) if returned_bytes else 0.0
        return profile.d2h_seconds(size_bytes, pinned=pinned, fresh=fresh) + back

    return seconds


@_kept
def with_place(name: str, size_bytes: int, *, write: bool) -> Duration:
    """A copy from a place of the hardware, or to it."""
    return lambda profile: profile.place_seconds(name, size_bytes, write=write)


@_kept
def place_update(name: str, traffic_bytes: int) -> Duration:
    """An update within a place of the hardware."""
    return lambda profile: profile.place_update_seconds(name, traffic_bytes)


@_kept
def collective(unit: int, size_bytes: int, rounds: int = 1) -> Duration:
    """A gather of values of ``unit``, or a reduction to parts; an all-reduce has two rounds."""
    return lambda profile: rounds * profile.unit_collective_seconds(unit, size_bytes)


@_kept
def transfer(size_bytes: int, sender: int, receiver: int) -> Duration:
    """A transfer from one GPU to another."""
    return lambda profile: profile.transfer_seconds(size_bytes, sender, receiver)


@_kept
def all_reduce(size_bytes: int, ranks: tuple[int, ...]) -> Duration:
    """An all-reduce over these GPUs of a pipeline: a ring of two passes, as slow as its slowest transfer."""
    steps, part = 2 * (len(ranks) - 1), size_bytes / len(ranks)
    pairs = [*zip(ranks, (*ranks[1:], ranks[0]), strict=True)]
    return lambda profile: steps * max(profile.transfer_seconds(part, *pair) for pair in pairs) if steps else 0.0


@_kept
def gpu_kernel(traffic_bytes: float) -> Duration:
    """A kernel on the GPU that its memory bounds."""
    return lambda profile: profile.gpu_memory_seconds(traffic_bytes)


@_kept
def gpu_copies(size_bytes: int, copies: int) -> Duration:
    """Copies within the GPU's memory: each reads and writes all bytes."""
    return lambda profile: profile.gpu_memory_seconds(2 * size_bytes * copies)


@_kept
def total(parts: tuple[Duration, ...]) -> Duration:
    """One part after the other, as one task."""
    return lambda profile: sum(part(profile) for part in parts)


@_kept
def cpu_kernel(traffic_bytes: float) -> Duration:
    """An elementwise kernel on the CPU."""
    return lambda profile: profile.elementwise_seconds(traffic_bytes)


@_kept
def gpu_update(unit: int, scaled_bytes: int | None, share: float) -> Duration:
    """A share of the update on the GPU, with a pass over the gradients that scales them, if any."""

    def seconds(profile: Profile) -> float:
        scaling = 0.0 if scaled_bytes is None else profile.gpu_memory_seconds(scaled_bytes)
        return (profile.units[unit].gpu_update_seconds + scaling) * share

    return seconds


@_kept
def cpu_update(unit: int, kernel_bytes: float, elementwise_bytes: float, scaled_bytes: int | None, share: float) -> Duration:
    """The same on the CPU, where the traffic of its kernels counts."""

    def seconds(profile: Profile) -> float:
        scaling = 0.0 if scaled_bytes is None else profile.elementwise_seconds(scaled_bytes)
        update = profile.cpu_update_seconds(unit, kernel_bytes, elementwise_bytes)
        return (update + scaling) * share

    return seconds


@_kept
def coefficient(*, on_cpu: bool, from_gpu: bool, to_gpu: bool, in_parts: bool) -> Duration:
    """The clipping coefficient: kernels on the GPU, or on the CPU copies of single numbers. If each GPU has the norms of its
    part only, an all-reduce of one number comes first.
    """

    def seconds(profile: Profile) -> float:
        copies = profile.d2h_seconds(0) * from_gpu + profile.h2d_seconds(0) * to_gpu
        alone = copies if on_cpu else _COEFFICIENT_KERNELS * profile.hardware.gpu.kernel_overhead_seconds
        return alone + 2 * profile.collective_seconds(0) * in_parts

    return seconds
