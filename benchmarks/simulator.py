"""How fast are the simulator and the planner, and how long does the figure take?

Command: ``make benchmark``. Prints tables; ``benchmarks/README.md`` has the results. Since machines are noisy, variants that
are compared run alternately in one process, and each figure is a median.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python benchmarks/simulator.py` from anywhere

from autohete.execution.trace import Trace
from autohete.hardware import load_hardware
from autohete.lowering import lower
from autohete.plan import Plan
from autohete.plan.policy import Judge, Judgement
from autohete.planner.steps import Counts
from autohete.policies.autohete import AutoHete
from autohete.profile import Profile, analytic_profile
from autohete.report.tables import console, table
from autohete.schedule import Schedule, validate
from autohete.sim import SimExecutor
from autohete.simulate import judge_for, simulate_plan
from autohete.testing.list_scheduler import list_schedule
from autohete.workload import Workload

ROUNDS = 9
NODE = "a100-40gb-epyc7713"


def seconds(action: Callable[..., object], *arguments: object) -> float:
    """Return the wall time of one call."""
    begin = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - begin


def profile(blocks: int, hidden: int = 4096) -> Profile:
    """Return the profile of a GPT of ``blocks`` transformer blocks on the figure's node."""
    return analytic_profile(Workload(f"{blocks} blocks", hidden, blocks, hidden // 128), load_hardware(NODE))


def example(blocks: int) -> Schedule:
    """AutoHete's schedule with every mechanism in use: all blocks recomputed and offloaded, nine tenths updated on the CPU."""
    costs = profile(blocks)
    return lower(costs, AutoHete().plan_for(costs, Counts(blocks, blocks, blocks * 9 // 10)))


def against_list_scheduler() -> None:
    """Compare SimPy with the plain list scheduler at 96 blocks x 10 iterations, with and without shared bandwidth."""
    shared = example(96)
    shown = table(
        "simulator against the plain list scheduler, 96 blocks x 10 iterations",
        ["schedule", "tasks", "list scheduler", "simulator", "tasks/s", "times", "goal", "validation"],
    )
    for name, schedule in (("shared bandwidth", shared), ("no sharing", replace(shared, resources=(), flows=()))):
        plain, simulated, validated = [], [], []
        for _ in range(ROUNDS):
            plain.append(seconds(list_schedule, schedule, 10))
            simulated.append(seconds(SimExecutor(validate=False).run, schedule, 10))
            validated.append(seconds(validate, schedule))
        tasks = 10 * len(schedule.tasks)
        shown.add_row(
            name,
            f"{tasks:,}",
            f"{1e3 * median(plain):.1f} ms",
            f"{1e3 * median(simulated):.1f} ms",
            f"{tasks / median(simulated):,.0f}",
            f"{median(simulated) / median(plain):.2f}",
            "<= 2.5",
            f"{1e3 * median(validated):.1f} ms",
        )
    console().print(shown)


def growth() -> None:
    """Measure microseconds per task from a thousand to a million tasks."""
    schedule = example(96)
    shown = table("time per task as a run grows", ["iterations", "tasks", "seconds", "us/task", "peak memory so far"])
    for iterations in (2, 15, 150, 1500):
        tasks = iterations * len(schedule.tasks)
        rounds = max(1, min(ROUNDS, 200_000 // tasks))
        took = median(seconds(SimExecutor(validate=False).run, schedule, iterations) for _ in range(rounds))
        shown.add_row(str(iterations), f"{tasks:,}", f"{took:.3f}", f"{1e6 * took / tasks:.1f}", peak_memory())
    console().print(shown)


def _counted(judge: Judge, seen: set[Plan]) -> Judge:
    def counted(plan: Plan) -> Judgement:
        seen.add(plan)
        return judge(plan)

    return counted


def planner() -> None:
    """Measure the integer program alone, and the whole plan with its judgements, by number of blocks."""
    shown = table("AutoHete's planner", ["blocks", "integer program", "whole plan", "judgements", "goal"])
    for blocks, hidden in ((20, 4096), (48, 4096), (96, 4096), (192, 2048)):
        costs, policy = profile(blocks, hidden), AutoHete()
        program = policy.program(costs)
        solving = [seconds(program.solve) for _ in range(3)]
        planning: list[float] = []
        judgements: set[Plan] = set()
        for _ in range(3):
            planning.append(seconds(policy.plan, costs, _counted(judge_for(costs), judgements)))
        goal = "< 1 s" if blocks == 96 else ""
        shown.add_row(str(blocks), f"{median(solving):.2f} s", f"{median(planning):.2f} s", str(len(judgements)), goal)
    console().print(shown)


def analyses() -> None:
    """Measure one simulated answer, step by step."""
    from autohete.analysis.bounds import period_bounds
    from autohete.analysis.memory_waits import with_memory_waits
    from autohete.analysis.occupancy import occupancy
    from autohete.analysis.usage import usage
    from autohete.analysis.worst_case import worst_case

    costs = profile(96)
    plan = AutoHete().plan_for(costs, Counts(96, 96, 86))
    simulation = simulate_plan(costs, plan)
    trace: Trace = simulation.trace
    steps: dict[str, Callable[[], object]] = {
        "profile": lambda: profile(96),
        "lower": lambda: lower(costs, plan),
        "validate": lambda: validate(simulation.schedule),
        f"simulate {trace.iterations} iterations": lambda: SimExecutor(validate=False).run(
            simulation.schedule, trace.iterations
        ),
        "steady state": trace.steady,
        "occupancy": lambda: occupancy(trace, "gpu"),
        "worst case of GPU memory (linear program)": lambda: worst_case(simulation.schedule, "gpu"),
        "waits for memory": lambda: with_memory_waits(simulation.schedule, trace),
        "usage and idle causes": lambda: usage(trace, simulation.steady),
        "bounds": lambda: period_bounds(simulation.schedule),
    }
    shown = table("one answer for 96 blocks", ["step", "time"])
    for name, step in steps.items():
        shown.add_row(name, f"{1e3 * median(seconds(step) for _ in range(5)):.1f} ms")
    console().print(shown)


def figure() -> None:
    """Measure the whole throughput figure with all policies and sensitivities, in its own process."""
    script = Path(__file__).resolve().parents[1] / "experiments" / "fig_throughput.py"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script), "--out", folder]
        took = [seconds(lambda: subprocess.run(command, check=True, capture_output=True)) for _ in range(3)]
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 2**20
    shown = table("python experiments/fig_throughput.py", ["median of 3", "goal", "largest process"])
    shown.add_row(f"{median(took):.1f} s", "< 30 s", f"{memory:.0f} MiB")
    console().print(shown)


def peak_memory() -> str:
    """Return the peak memory of this process."""
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**20:.0f} MiB"


def main() -> None:
    """Run all benchmarks, in about two minutes."""
    figure()  # first: a child's peak memory is at least what its parent had when it started
    against_list_scheduler()
    planner()
    analyses()
    growth()


if __name__ == "__main__":
    main()
