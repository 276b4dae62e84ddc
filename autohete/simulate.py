"""The whole pipeline in one call: takes a workload, a hardware and a policy; returns plan, schedule, trace and occupancy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autohete.analysis.occupancy import Occupancy, occupancy
from autohete.analysis.worst_case import WorstCase, worst_case
from autohete.errors import InfeasibleError, InputError, OnePoolError
from autohete.execution import Executor
from autohete.execution.trace import Steady, Trace
from autohete.hardware import Hardware
from autohete.lowering import lower
from autohete.lowering.memory_waits import least_bytes, with_memory_waits
from autohete.plan import Plan
from autohete.plan.policy import Judgement, Policy, Verdict
from autohete.profile import Profile, analytic_profile
from autohete.quantities import format_bytes
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY, Schedule
from autohete.sim import SimExecutor
from autohete.workload import Workload

#: Iterations of the first run; doubled until the steady state appears. With a barrier, iterations repeat at once.
_FIRST_TRY = 4
_FIRST_TRY_WITH_BARRIER = 3
_LONGEST_TRY = 32


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """The simulation of a plan on a hardware, with everything that led to it."""

    profile: Profile
    plan: Plan
    schedule: Schedule
    trace: Trace
    steady: Steady
    gpu: Occupancy
    host: Occupancy
    #: None if pinned memory has no limit of its own.
    pinned: Occupancy | None = None
    #: Number of waits for memory in the schedule, in addition to the plan's own waits.
    waits: int = 0

    @property
    def verdict(self) -> Verdict:
        """Whether all memories fit, and if not, which one is exceeded."""
        return verdict(*self.memories)

    @property
    def memories(self) -> tuple[Occupancy, ...]:
        """GPU, host, and pinned host memory if that has a limit."""
        return (self.gpu, self.host) if self.pinned is None else (self.gpu, self.host, self.pinned)

    @property
    def iteration_seconds(self) -> float:
        """Time of one iteration in the steady state."""
        return self.steady.period_seconds

    @property
    def samples_per_second(self) -> float:
        """Sequences per second on all GPUs."""
        return self.profile.workload.samples * self.profile.hardware.gpus / self.iteration_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second on all GPUs."""
        return self.samples_per_second * self.profile.workload.sequence_length

    @property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s, not counting recomputation."""
        return self.profile.workload.model_flops / self.iteration_seconds * 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class Safety:
    """Whether a plan fits under any timing, and at what cost.

    Args:
        gpu, host: the most that any execution of the simulated schedule occupies.
        safe: the simulation with the waits that make all fit; the original one if it needs none; None if no such waits are
            known.
        cost: relative increase of the iteration time due to the waits.
        pinned: the same for pinned host memory; None if it has no limit of its own.
    """

    gpu: WorstCase
    host: WorstCase
    safe: Simulation | None
    cost: float
    pinned: WorstCase | None = None


def safety(simulation: Simulation, executor: Executor | None = None) -> Safety:
    """Compute the worst case of ``simulation``, and simulate its plan with the waits that make it fit under any timing."""
    gpu, host, *parts = (worst_case(simulation.schedule, one.memory) for one in simulation.memories)
    pinned = parts[0] if parts else None
    if all(worst.fits for worst in (gpu, host, *parts)):
        return Safety(gpu, host, simulation, 0.0, pinned)
    schedule = with_memory_waits(simulation.schedule, simulation.trace)
    if schedule is None:
        return Safety(gpu, host, None, 0.0, pinned)
    safe = simulate_schedule(simulation.profile, simulation.plan, schedule, executor)
    waits = sum(len(task.after) for task in schedule.tasks) - sum(len(task.after) for task in simulation.schedule.tasks)
    before = simulation.iteration_seconds
    cost = safe.iteration_seconds / before - 1 if before else 0.0
    return Safety(gpu, host, replace(safe, waits=simulation.waits + waits), cost, pinned)


def verdict(*memories: Occupancy) -> Verdict:
    """Return the verdict of occupancies; the first that does not fit decides."""
    short = next((one.memory for one in memories if not one.fits), None)
    return Verdict.OK if short is None else Verdict(f"{short}-out-of-memory")


def run_until_steady(schedule: Schedule, executor: Executor, iterations: int = _FIRST_TRY) -> tuple[Trace, Steady]:
    """Run ``schedule`` for ``iterations``, then longer, until its iterations repeat (or there are enough to average over)."""
    while True:
        trace = executor.run(schedule, iterations)
        steady = trace.steady()
        if steady.settled or iterations >= _LONGEST_TRY:
            return trace, steady
        iterations *= 2


def simulate_plan(profile: Profile, plan: Plan, executor: Executor | None = None) -> Simulation:
    """Lower ``plan`` and execute it in the simulator (or in ``executor``), with waits for memory if the plan asks for them."""
    found = simulate_schedule(profile, plan, lower(profile, plan), executor)
    return safety(found, executor).safe or found if plan.memory_waits else found


def simulate_schedule(profile: Profile, plan: Plan, schedule: Schedule, executor: Executor | None = None) -> Simulation:
    """Execute ``schedule`` (that of ``plan``, or one with more waits) in the simulator, or in ``executor``."""
    executor = executor or SimExecutor()
    first_try = _FIRST_TRY_WITH_BARRIER if plan.has_barrier else _FIRST_TRY
    trace, steady = run_until_steady(schedule, executor, first_try)
    gpu, host = (occupancy(trace, memory) for memory in (GPU_MEMORY, HOST_MEMORY))
    limited = any(memory.name == PINNED_MEMORY for memory in schedule.memories)
    pinned = occupancy(trace, PINNED_MEMORY) if limited else None
    return Simulation(profile, plan, schedule, trace, steady, gpu, host, pinned)


class SimulatingJudge:
    """A :data:`~autohete.plan.policy.Judge` that simulates each plan once.

    It keeps the simulations of the fastest plan that fits and of the last plan, since policies choose one of these.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._executor = SimExecutor(validate=False)
        self._known: dict[Plan, Judgement] = {}
        self._best: Simulation | None = None
        self._last: Simulation | None = None

    def __call__(self, plan: Plan) -> Judgement:
        """Return time and memory of ``plan``."""
        known = self._known.get(plan)
        if known is None:
            found = self._last = simulate_plan(self._profile, plan, self._executor)
            if found.verdict is Verdict.OK and (self._best is None or found.iteration_seconds < self._best.iteration_seconds):
                self._best = found
            known = self._known[plan] = Judgement(
                found.verdict, found.iteration_seconds, *(memory.peak_bytes for memory in found.memories)
            )
        return known

    def simulation(self, plan: Plan) -> Simulation:
        """Return the simulation of ``plan``, with its schedule checked; simulate again only if the result was not kept."""
        for kept in (self._best, self._last):
            if kept is not None and kept.plan == plan:
                kept.schedule.validate()
                return replace(kept, plan=plan)
        return simulate_plan(self._profile, plan)


def judge_for(profile: Profile) -> SimulatingJudge:
    """Return a judge of plans for ``profile``."""
    return SimulatingJudge(profile)


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


def memory_bytes(profile: Profile, memory: str) -> int:
    """Return the size of one memory, as far as it is there for tensors."""
    hardware = profile.hardware
    if memory == PINNED_MEMORY and hardware.host.pinned_bytes is not None:
        return hardware.host.pinned_bytes
    return hardware.gpu_capacity_bytes if memory == GPU_MEMORY else hardware.host.memory_bytes


def with_memory(profile: Profile, memory: str, size_bytes: int) -> Profile:
    """Return ``profile`` with another size of one memory for tensors."""
    hardware = profile.hardware
    if memory == GPU_MEMORY:
        gpu = replace(hardware.gpu, memory_bytes=size_bytes + hardware.gpu.reserved_bytes)
        return replace(profile, hardware=replace(hardware, gpu=gpu))
    host = hardware.host
    host = replace(host, pinned_bytes=size_bytes) if memory == PINNED_MEMORY else replace(host, memory_bytes=size_bytes)
    return replace(profile, hardware=replace(hardware, host=host))


def simulate(workload: Workload, hardware: Hardware, policy: Policy) -> Simulation:
    """Simulate ``policy`` training ``workload`` on ``hardware``; see :func:`simulate_policy`."""
    return simulate_policy(analytic_profile(workload, hardware), policy)
