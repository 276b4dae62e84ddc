"""The whole pipeline in one call: takes a workload, a hardware and a policy; returns plan, schedule, trace and occupancy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autohete.analysis.memory_waits import least_bytes
from autohete.errors import InfeasibleError, InputError, OnePoolError
from autohete.hardware import Hardware
from autohete.lowering.budget import memory_bytes, with_memory
from autohete.plan import Plan
from autohete.plan.policy import Policy
from autohete.profile import Profile, analytic_profile
from autohete.quantities import format_bytes
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY
from autohete.simulate.judge import judge_for
from autohete.simulate.safety import safety, simulate_plan
from autohete.simulate.simulation import Simulation
from autohete.workload import Workload


def simulate_policy(profile: Profile, policy: Policy) -> Simulation:
    """Simulate ``policy`` with the times and sizes of ``profile``, computed or measured.

    Raises:
        InfeasibleError: the policy searches for a plan and finds none.
        OnePoolError: the policy copies, and the hardware is unified.
        InputError: a task, or the whole iteration, takes absurdly long or no time at all.
    """
    judge = judge_for(profile)
    try:
        found = judge.simulation(policy.plan(profile, judge))
    except OnePoolError as error:
        raise OnePoolError(f"{policy.name}: {error}") from None
    finally:
        judge.forget_simulations()
    if found.iteration_seconds == 0:
        raise InputError(
            f"an iteration on {profile.hardware.name} takes less than a nanosecond, too short to simulate: check its rates"
        )
    return found


def simulate_safely(
    profile: Profile, policy: Policy, adapt: Callable[[Plan, Profile], Plan] = lambda plan, _: plan, beside_bytes: int = 0
) -> Simulation:
    """Simulate the plan of ``policy``, with the waits that make it fit under any timing.

    Args:
        profile: times, sizes and memory budgets.
        policy: if its plan does not fit, it plans again with more memory to find the smallest budget that works.
        adapt: turns the policy's plan into the one that is executed.
        beside_bytes: GPU memory that the plan cannot use; included in the budgets that the error names.

    Raises:
        InfeasibleError: no plan fits. With the budget that the error names, the same call succeeds.
    """
    found = _try_safely(profile, policy, adapt)
    if isinstance(found, Simulation):
        return found
    memory, needed = found.memory, found.needed_bytes
    while True:
        again = _try_safely(with_memory(profile, memory, needed), policy, adapt)
        if isinstance(again, Simulation) or again.memory != memory:
            break
        needed = max(again.needed_bytes, needed + 1)
    beside = beside_bytes if memory == GPU_MEMORY else 0
    have = memory_bytes(profile, memory)
    raise InfeasibleError(
        f"{policy.name} does not fit: {found.reason}the budget is {have + beside} B"
        f"{f', of which buffers and frozen parameters take {beside} B' if beside else ''}. The smallest {memory} memory that "
        f"works is {needed + beside} B ({format_bytes(needed + beside)})",
        constraint=memory,
        capacity_bytes=have + beside,
        needed_bytes=needed + beside,
    )


@dataclass(frozen=True, slots=True)
class _Short:
    """A memory that is too small: the bytes that would suffice, and where it is exceeded, as the start of a sentence."""

    memory: str
    needed_bytes: int
    reason: str


def _try_safely(profile: Profile, policy: Policy, adapt: Callable[[Plan, Profile], Plan]) -> Simulation | _Short:
    try:
        plan = adapt(policy.plan(profile, judge_for(profile)), profile)
    except InfeasibleError as error:
        if error.constraint not in (GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY):  # a place that the hardware does not have
            raise
        return _Short(error.constraint, error.needed_bytes, f"each of its plans needs at least {error.needed_bytes} B, ")
    found = simulate_plan(profile, plan)
    if (safe := safety(found).safe) is not None:
        return safe
    for short in found.memories:
        needed = least_bytes(found.schedule, short.memory)
        if needed > short.capacity_bytes:
            holder, size = next(iter(short.holders.items()))
            return _Short(
                short.memory,
                needed,
                f"at {short.task or 'rest'} it needs {short.peak_bytes} B ({format_bytes(short.peak_bytes)}) of {short.memory} "
                f"memory, largest: {holder.replace('_', ' ')} {format_bytes(size)}; ",
            )
    raise AssertionError(f"{plan.policy} fits all memories in its thrifty order, but not with the waits of that order")


def simulate(workload: Workload, hardware: Hardware, policy: Policy) -> Simulation:
    """Simulate ``policy`` training ``workload`` on ``hardware``; see :func:`simulate_policy`."""
    return simulate_policy(analytic_profile(workload, hardware), policy)
