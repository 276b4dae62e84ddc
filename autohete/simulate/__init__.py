"""Simulation of a policy: from workload and hardware to plan, schedule, trace and occupancy."""

from autohete.lowering.budget import memory_bytes, with_memory
from autohete.simulate.by_policy import simulate, simulate_policy, simulate_safely
from autohete.simulate.judge import SimulatingJudge, judge_for
from autohete.simulate.safety import Safety, safety, simulate_again, simulate_plan
from autohete.simulate.simulation import Simulation, run_until_steady, simulate_schedule, verdict

__all__ = [
    "Safety",
    "SimulatingJudge",
    "Simulation",
    "judge_for",
    "memory_bytes",
    "run_until_steady",
    "safety",
    "simulate",
    "simulate_again",
    "simulate_plan",
    "simulate_policy",
    "simulate_safely",
    "simulate_schedule",
    "verdict",
    "with_memory",
]
