"""The judge of plans that the simulator provides to policies."""

from __future__ import annotations

from dataclasses import replace

from autohete.plan import Plan
from autohete.plan.policy import Judgement, Verdict
from autohete.profile import Profile
from autohete.schedule import validate
from autohete.sim import SimExecutor
from autohete.simulate.safety import simulate_plan
from autohete.simulate.simulation import Simulation


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
                validate(kept.schedule)
                return replace(kept, plan=plan)
        return simulate_plan(self._profile, plan)


def judge_for(profile: Profile) -> SimulatingJudge:
    """Return a judge of plans for ``profile``."""
    return SimulatingJudge(profile)
