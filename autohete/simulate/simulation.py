"""The simulation of a plan: its schedule, executed until iterations repeat, with the occupancy of each memory."""

from __future__ import annotations

from dataclasses import dataclass

from autohete.analysis.occupancy import Occupancy, occupancy
from autohete.collector import paused_collector
from autohete.execution import Executor
from autohete.execution.trace import Steady, Trace
from autohete.plan import Plan
from autohete.plan.policy import Verdict
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY, Schedule
from autohete.sim import SimExecutor

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
    #: All memories: the GPU's, the host's, pinned host memory if that has a limit, and other places that the plan uses.
    memories: tuple[Occupancy, ...]
    #: Number of waits for memory in the schedule, in addition to the plan's own waits.
    waits: int = 0

    @property
    def verdict(self) -> Verdict:
        """Whether all memories fit, and if not, which one is exceeded."""
        return verdict(*self.memories)

    @property
    def gpu(self) -> Occupancy:
        """The GPU's memory; of ranks with different units, the fullest one."""
        return max((one for one in self.memories if one.memory.partition(".")[0] == GPU_MEMORY), key=lambda one: one.peak_bytes)

    @property
    def host(self) -> Occupancy:
        """The host's memory."""
        return next(one for one in self.memories if one.memory == HOST_MEMORY)

    @property
    def pinned(self) -> Occupancy | None:
        """Pinned host memory; None if it has no limit of its own."""
        return next((one for one in self.memories if one.memory == PINNED_MEMORY), None)

    @property
    def iteration_seconds(self) -> float:
        """Time of one iteration in the steady state."""
        return self.steady.period_seconds

    @property
    def samples_per_second(self) -> float:
        """Sequences per second on all GPUs."""
        batches = 1 if self.plan.is_pipeline else self.profile.hardware.gpus  # a pipeline has one batch
        return self.profile.workload.samples * batches / self.iteration_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second on all GPUs."""
        return self.samples_per_second * self.profile.workload.sequence_length

    @property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s, not counting recomputation."""
        shared_by = self.profile.hardware.gpus if self.plan.is_pipeline else 1
        return self.profile.workload.model_flops / shared_by / self.iteration_seconds * 1e-12


def verdict(*memories: Occupancy) -> Verdict:
    """Return the verdict of occupancies; the first that does not fit decides."""
    short = next((one.memory for one in memories if not one.fits), None)
    return Verdict.OK if short is None else Verdict.short_of(short)


def run_until_steady(schedule: Schedule, executor: Executor, iterations: int = _FIRST_TRY) -> tuple[Trace, Steady]:
    """Run ``schedule`` for ``iterations``, then longer, until its iterations repeat (or there are enough to average over)."""
    while True:
        trace = executor.run(schedule, iterations)
        steady = trace.steady()
        if steady.settled or iterations >= _LONGEST_TRY:
            return trace, steady
        iterations *= 2


@paused_collector()
def simulate_schedule(profile: Profile, plan: Plan, schedule: Schedule, executor: Executor | None = None) -> Simulation:
    """Execute ``schedule`` (that of ``plan``, or one with more waits) in the simulator, or in ``executor``."""
    executor = executor or SimExecutor()
    first_try = _FIRST_TRY_WITH_BARRIER if plan.has_barrier else _FIRST_TRY
    trace, steady = run_until_steady(schedule, executor, first_try)
    memories = tuple(occupancy(trace, memory.name) for memory in schedule.memories)
    return Simulation(profile, plan, schedule, trace, steady, memories)
