"""The pipeline in one call: workload, hardware and policy in, plan, schedule, trace and summary out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autohete.errors import InputError
from autohete.executor import Executor
from autohete.hardware import Hardware
from autohete.lowering import lower
from autohete.memory import Occupancy, occupancy
from autohete.plan import Plan
from autohete.policy import Judgement, Policy, Verdict
from autohete.profile import Profile, analytic_profile
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, Schedule
from autohete.sim import SimExecutor
from autohete.trace import Steady, Trace
from autohete.workload import Workload

#: Iterations of the first try; doubled until the steady state shows. Behind a barrier each repeats the one before at once.
_FIRST_TRY = 4
_FIRST_TRY_WITH_BARRIER = 3
_LONGEST_TRY = 32


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """What a plan comes to on a hardware, with everything that led to it."""

    profile: Profile
    plan: Plan
    schedule: Schedule
    trace: Trace
    steady: Steady
    gpu: Occupancy
    host: Occupancy

    @property
    def verdict(self) -> Verdict:
        """Whether both memories hold."""
        return verdict(self.gpu, self.host)

    @property
    def iteration_seconds(self) -> float:
        """Steady time of one iteration."""
        return self.steady.period_seconds

    @property
    def samples_per_second(self) -> float:
        """Sequences per second on one GPU."""
        return self.profile.workload.batch_size / self.iteration_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second on one GPU."""
        return self.profile.workload.tokens / self.iteration_seconds

    @property
    def tflops_per_gpu(self) -> float:
        """Model TFLOP/s: what the model asks for, recomputation not counted."""
        return self.profile.workload.model_flops / self.iteration_seconds * 1e-12


def verdict(gpu: Occupancy, host: Occupancy) -> Verdict:
    """The verdict of two occupancies; the GPU's comes first."""
    if not gpu.fits:
        return Verdict.GPU_OUT_OF_MEMORY
    return Verdict.OK if host.fits else Verdict.HOST_OUT_OF_MEMORY


def run_until_steady(schedule: Schedule, executor: Executor, iterations: int = _FIRST_TRY) -> tuple[Trace, Steady]:
    """Unroll ``schedule``, ``iterations`` long at first, until they repeat (or for long enough to average over)."""
    while True:
        trace = executor.run(schedule, iterations)
        steady = trace.steady()
        if steady.settled or iterations >= _LONGEST_TRY:
            return trace, steady
        iterations *= 2


def simulate_plan(profile: Profile, plan: Plan, executor: Executor | None = None) -> Simulation:
    """Lower ``plan`` and execute it in the simulator (or in ``executor``)."""
    schedule = lower(profile, plan)
    first_try = _FIRST_TRY_WITH_BARRIER if plan.barrier else _FIRST_TRY
    trace, steady = run_until_steady(schedule, executor or SimExecutor(), first_try)
    gpu, host = (occupancy(trace, memory) for memory in (GPU_MEMORY, HOST_MEMORY))
    return Simulation(profile, plan, schedule, trace, steady, gpu, host)


class SimulatingJudge:
    """The judge that a policy tries its plans on: the simulator, each plan once. A :data:`~autohete.policy.Judge`.

    It keeps the simulations of the fastest plan that fits and of the last one, which is what policies choose.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._executor = SimExecutor(validate=False)
        self._known: dict[Plan, Judgement] = {}
        self._best: Simulation | None = None
        self._last: Simulation | None = None

    def __call__(self, plan: Plan) -> Judgement:
        """Time and memory of ``plan``; its policy's name does not matter."""
        plan = replace(plan, policy="")
        if plan not in self._known:
            found = self._last = simulate_plan(self._profile, plan, self._executor)
            if found.verdict is Verdict.OK and (self._best is None or found.iteration_seconds < self._best.iteration_seconds):
                self._best = found
            self._known[plan] = Judgement(found.verdict, found.iteration_seconds, found.gpu.peak_bytes, found.host.peak_bytes)
        return self._known[plan]

    def simulation(self, plan: Plan) -> Simulation:
        """The simulation of ``plan``, made anew only if it is none of those kept; its schedule is checked."""
        for kept in (self._best, self._last):
            if kept is not None and kept.plan == replace(plan, policy=""):
                kept.schedule.validate()
                return replace(kept, plan=plan)
        return simulate_plan(self._profile, plan)


def judge_for(profile: Profile) -> SimulatingJudge:
    """The judge of plans for ``profile``."""
    return SimulatingJudge(profile)


def simulate_policy(profile: Profile, policy: Policy) -> Simulation:
    """Simulate ``policy`` with the times and sizes of ``profile``, computed or measured.

    Raises:
        InfeasibleError: the policy searches for a plan and there is none.
        InputError: a task, or the whole iteration, takes absurdly long or no time at all.
    """
    judge = judge_for(profile)
    found = judge.simulation(policy.plan(profile, judge))
    if found.iteration_seconds == 0:
        raise InputError(
            f"an iteration on {profile.hardware.name} takes less than a nanosecond: too short to simulate, check its rates"
        )
    return found


def simulate(workload: Workload, hardware: Hardware, policy: Policy) -> Simulation:
    """Simulate ``policy`` training ``workload`` on ``hardware``; see :func:`simulate_policy`."""
    return simulate_policy(analytic_profile(workload, hardware), policy)
