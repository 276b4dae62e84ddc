"""Whether a plan fits under any timing, and the waits that make it fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autohete.analysis.memory_waits import with_memory_waits
from autohete.analysis.worst_case import WorstCase, worst_case
from autohete.execution import Executor
from autohete.lowering import lower
from autohete.plan import Plan
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, HOST_MEMORY
from autohete.simulate.simulation import Simulation, simulate_schedule


@dataclass(frozen=True, slots=True, eq=False)
class Safety:
    """Whether a plan fits under any timing, and at what cost.

    Args:
        worst: the most that any execution of the simulated schedule occupies, of each memory.
        safe: the simulation with the waits that make all fit; the original one if it needs none; None if no such waits are
            known.
        cost: relative increase of the iteration time due to the waits.
    """

    worst: dict[str, WorstCase]
    safe: Simulation | None
    cost: float

    @property
    def gpu(self) -> WorstCase:
        """The worst case of the GPU's memory."""
        return self.worst[GPU_MEMORY]

    @property
    def host(self) -> WorstCase:
        """The worst case of the host's memory."""
        return self.worst[HOST_MEMORY]


def safety(simulation: Simulation, executor: Executor | None = None) -> Safety:
    """Compute the worst case of ``simulation``, and simulate its plan with the waits that make it fit under any timing."""
    worst = {one.memory: worst_case(simulation.schedule, one.memory) for one in simulation.memories}
    if all(one.fits for one in worst.values()):
        return Safety(worst, simulation, 0.0)
    schedule = with_memory_waits(simulation.schedule, simulation.trace)
    if schedule is None:
        return Safety(worst, None, 0.0)
    safe = simulate_schedule(simulation.profile, simulation.plan, schedule, executor)
    waits = sum(len(task.after) for task in schedule.tasks) - sum(len(task.after) for task in simulation.schedule.tasks)
    before = simulation.iteration_seconds
    cost = safe.iteration_seconds / before - 1 if before else 0.0
    return Safety(worst, replace(safe, waits=simulation.waits + waits), cost)


def simulate_plan(profile: Profile, plan: Plan, executor: Executor | None = None) -> Simulation:
    """Lower ``plan`` and execute it in the simulator (or in ``executor``), with waits for memory if the plan asks for them."""
    found = simulate_schedule(profile, plan, lower(profile, plan), executor)
    return with_waits(found, executor) if plan.memory_waits else found


def with_waits(simulation: Simulation, executor: Executor | None = None) -> Simulation:
    """Return ``simulation`` with the waits that make it fit under any timing; the same if no such waits are known."""
    return safety(simulation, executor).safe or simulation


def simulate_again(simulation: Simulation, profile: Profile) -> Simulation:
    """Execute the schedule of ``simulation``, waits included, with the times and capacities of another profile.

    Args:
        simulation: of a plan for the same workload.
        profile: with other rates or sizes of memory, such as one draw of uncertain figures.
    """
    plain = lower(profile, simulation.plan)
    lasts = {task.id: task.duration_ns for task in plain.tasks}
    schedule = simulation.schedule
    timed = schedule.timed([lasts[task.id] for task in schedule.tasks], plain.memories, plain.flows, plain.resources)
    return simulate_schedule(profile, simulation.plan, timed)
