"""The simulation of a plan: its schedule, executed until iterations repeat, with the occupancy of each memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from autohete.analysis.allocator import ReservedMemory
from autohete.analysis.occupancy import Occupancy, occupancy
from autohete.collector import paused_collector
from autohete.errors import InputError, check_whole
from autohete.execution import Executor
from autohete.execution.trace import Steady, Trace
from autohete.plan import Plan
from autohete.plan.policy import Verdict
from autohete.profile import Profile
from autohete.quantities import format_bytes, format_rate, format_seconds
from autohete.schedule import HOST_MEMORY, PINNED_MEMORY, Schedule, is_gpu
from autohete.sim import SimExecutor
from autohete.simulate.samples import batches_of_samples
from autohete.simulate.tensors import TensorSizes
from autohete.tabular import facts_html

if TYPE_CHECKING:
    from pandas import DataFrame

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

    def __repr__(self) -> str:
        return f"<Simulation of {self._title()}: {', '.join(f'{name} {value}' for name, value in self._facts().items())}>"

    def _repr_html_(self) -> str:
        return facts_html(self._title(), self._facts())

    def _title(self) -> str:
        return f"{self.profile.workload.name} on {self.profile.hardware.title}: {self.plan.policy}"

    def _facts(self) -> dict[str, str]:
        peaks = {
            f"{one.memory} peak": f"{format_bytes(one.peak_bytes)} of {format_bytes(one.capacity_bytes)}"
            for one in self.memories
        }
        facts = {"verdict": str(self.verdict)}
        if self.verdict is Verdict.OK:
            facts |= {"iteration": format_seconds(self.iteration_seconds), "tokens/s": format_rate(self.tokens_per_second)}
        return facts | peaks

    def to_dict(self) -> dict[str, Any]:
        """Return the document of ``autohete plan --json`` for one policy: all results and decisions, in SI units."""
        from autohete.policies import parse_policy
        from autohete.simulate.plan_document import plan_json
        from autohete.simulate.summary import summarize

        try:
            policy = parse_policy(self.plan.policy)
        except InputError:  # a policy of the caller, which is not registered
            policy = None
        return plan_json(summarize(self, policy), self)

    def to_frame(self) -> DataFrame:
        """Return the spans of the trace as a frame of pandas.

        Raises:
            InputError: pandas is not installed.
        """
        return self.trace.to_frame()

    def gantt(self, iterations: int = 2) -> Any:
        """Return a figure of matplotlib with steady iterations: the lanes, and the GPU's memory below.

        Args:
            iterations: how many; at least one, and at most as many as were simulated from the steady state on.
        """
        from autohete.report.gantt import combined_figure

        check_whole("iterations", iterations, 1)
        last = min(self.steady.first + iterations, self.trace.iterations) - 1
        return combined_figure(self.trace, self.gpu, self.steady.first, last, self._title())

    @property
    def verdict(self) -> Verdict:
        """Whether all memories fit, and if not, which one is exceeded."""
        return verdict(*self.memories)

    @property
    def gpu(self) -> Occupancy:
        """The GPU's memory; of ranks with different units, the fullest one."""
        return max((one for one in self.memories if is_gpu(one.memory)), key=lambda one: one.peak_bytes)

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
    def comparable_seconds(self) -> float:
        """Time by which plans are compared: in which as many batches are trained as if each GPU had its own. Ranks of a
        pipeline share one, so it is that of several of their iterations.
        """
        batches = self.profile.hardware.batches
        return self.iteration_seconds * batches / self.plan.batches(batches)

    @property
    def samples_per_second(self) -> float:
        """Sequences per second on all GPUs."""
        batches = self.plan.batches(self.profile.hardware.batches)
        return self.profile.workload.samples * batches / self.iteration_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second on all GPUs."""
        return self.samples_per_second * self.profile.workload.sequence_length

    @property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s, not counting recomputation."""
        hardware = self.profile.hardware
        shared_by = hardware.all_gpus / self.plan.batches(hardware.batches)
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
    tensors = TensorSizes(profile, first_step_makes_moments=plan.updates_where_it_computes)
    orders = partial(batches_of_samples, profile, plan)
    expandable = profile.workload.expandable_segments
    memories = tuple(
        replace(occupied, reservation=ReservedMemory(trace, occupied.memory, tensors, orders, expandable))
        if is_gpu(occupied.memory)
        else occupied
        for occupied in (occupancy(trace, memory.name) for memory in schedule.memories)
    )
    return Simulation(profile, plan, schedule, trace, steady, memories)
