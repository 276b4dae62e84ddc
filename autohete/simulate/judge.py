"""The judge of plans that the simulator provides to policies."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from autohete.plan import Plan
from autohete.plan.policy import Judgement, Verdict
from autohete.profile import Profile
from autohete.schedule import Kind, validate
from autohete.sim import SimExecutor
from autohete.simulate.safety import simulate_plan, with_waits
from autohete.simulate.simulation import Simulation

#: An iteration of more micro-batches is estimated from two and three.
_SIMULATED = 5
#: A plan that is slower than the fastest by more than this share is not estimated closely.
_SLOWER = 0.03


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
        self._fewer: tuple[SimulatingJudge, SimulatingJudge] | None = None
        #: By plan; and the time of the fastest of those that fit.
        self._estimated: dict[Plan, Judgement] = {}
        self._fastest = math.inf
        if profile.workload.micro_batches > _SIMULATED:
            self._fewer = SimulatingJudge(profile.with_micro_batches(2)), SimulatingJudge(profile.with_micro_batches(3))

    def forget_simulations(self) -> None:
        """Keep what is known of the plans alone: the simulations are another policy's."""
        self._best = self._last = None

    def __call__(self, plan: Plan) -> Judgement:
        """Return time and memory of ``plan``."""
        known = self._known.get(plan)
        if known is None:
            found = self._last = self._simulated(plan)
            if found.verdict is Verdict.OK and (self._best is None or found.comparable_seconds < self._best.comparable_seconds):
                self._best = found
            known = self._known[plan] = Judgement(
                found.verdict,
                found.comparable_seconds,
                {one.memory: one.peak_bytes for one in found.memories},
            )
        return known

    def _simulated(self, plan: Plan) -> Simulation:
        """Simulate ``plan``; for waits for memory, from the simulation without them if that was the last."""
        last = self._last
        if plan.memory_waits and last is not None and last.plan == replace(plan, memory_waits=False):
            return with_waits(replace(last, plan=plan), self._executor)
        return simulate_plan(self._profile, plan, self._executor)

    def estimate(self, plan: Plan) -> Judgement:
        """Return time and memory of ``plan``: where there are many micro-batches, as if each one after the third took as much
        longer as the third does.

        A plan that does not fit, or that is slow even if the third begins no later after the second than each further one after
        the one before it, is simulated with three micro-batches only.
        """
        if self._fewer is None or plan in self._known:
            return self(plan)
        if plan not in self._estimated:
            two, three = self._fewer
            found, further = three(plan), self._profile.workload.micro_batches - 3
            seconds = found.seconds + further * _beginning_later(three.simulation(plan, check=False))
            fits = found.verdict is Verdict.OK
            if fits and seconds <= self._fastest * (1 + _SLOWER):
                seconds = found.seconds + further * max(found.seconds - two(plan).seconds, 0.0)
                self._fastest = min(self._fastest, seconds)
            self._estimated[plan] = replace(found, seconds=seconds, exact=False)
        return self._estimated[plan]

    def simulation(self, plan: Plan, *, check: bool = True) -> Simulation:
        """Return the simulation of ``plan``, with its schedule checked; simulate again only if the result was not kept."""
        for kept in (self._best, self._last):
            if kept is not None and kept.plan == plan:
                if check:
                    validate(kept.schedule)
                return replace(kept, plan=plan)
        return simulate_plan(self._profile, plan)


def _beginning_later(simulation: Simulation) -> float:
    """By how much later than the second its third micro-batch begins, in seconds, on average over a steady cycle."""
    tasks, steady = simulation.schedule.tasks, simulation.steady
    second, third = (
        next(i for i, task in enumerate(tasks) if task.id.kind is Kind.FORWARD and task.id.micro_batch == micro_batch)
        for micro_batch in (1, 2)
    )
    starts = simulation.trace.start_ns[steady.first : steady.first + steady.cycle]
    return float((starts[:, third] - starts[:, second]).mean()) * 1e-9


def judge_for(profile: Profile) -> SimulatingJudge:
    """Return a judge of plans for ``profile``. It remembers what it simulated for the policies before, except where it
    estimates: there, an estimate depends on the plans before.
    """
    if profile.workload.micro_batches > _SIMULATED:
        return SimulatingJudge(profile)
    judge = _judge_of(profile)
    judge.forget_simulations()
    return judge


@lru_cache(maxsize=2)
def _judge_of(profile: Profile) -> SimulatingJudge:
    return SimulatingJudge(profile)
