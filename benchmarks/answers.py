"""What does one answer take, step by step, and the grid of the figure, in this version and in others?

Command: ``python benchmarks/answers.py [OTHER ...] [--grid]``, where ``OTHER`` are working trees of other versions (made by
``git worktree add DIR REVISION``). Each version is measured in a process of its own, in turns; each figure is the median of all
turns, in CPU time of one process, which other programs on the machine disturb least.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from cyclopts import App

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, os.environ.get("AUTOHETE_TREE", str(HERE)))  # the version that this process measures

#: The models of the figure that are answered: the smallest, the largest, and one between.
MODELS = ("gpt-2b", "gpt-12b", "gpt-22b")
#: How often a step is repeated in each turn.
ROUNDS = 5


def _module(*names: str) -> Any:
    """The first of ``names`` that there is: versions call a module differently."""
    for name in names:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name and not name.startswith(f"{error.name}."):
                raise
    raise ModuleNotFoundError(f"none of {', '.join(names)} exists in {sys.path[0]}")


def milliseconds(action: Callable[[], object], rounds: int = ROUNDS) -> float:
    """CPU time of one call, the median of several after one that does not count."""
    action()
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        action()
        times.append(1e3 * (time.process_time() - begin))
    return median(times)


def one_answer(blocks: int) -> dict[str, float]:
    """The steps of one answer, as :func:`benchmarks.simulator.example` plans it."""
    example, simulate = _module("benchmarks.simulator"), _module("autohete.simulate")
    bounds = _module("autohete.analysis.bounds", "autohete.bounds")
    memory = _module("autohete.analysis.occupancy", "autohete.memory")
    analysis = _module("autohete.analysis.usage", "autohete.analysis")
    lowering, testing = _module("autohete.lowering"), _module("autohete.testing.list_scheduler")
    counts = _module("autohete.planner.steps").Counts(blocks, blocks, blocks * 9 // 10)
    profile = example.profile(blocks)
    plan = _module("autohete.policies.autohete").AutoHete().plan_for(profile, counts)
    simulation = simulate.simulate_plan(profile, plan)
    schedule, trace = simulation.schedule, simulation.trace
    executor = _module("autohete.sim").SimExecutor(validate=False)
    steps: dict[str, Callable[[], object]] = {
        "profile": lambda: example.profile(blocks),
        "lowering": lambda: lowering.lower(profile, plan),
        "check": lambda: _module("autohete.schedule").validate(schedule),
        f"simulation of {trace.iterations} iterations": lambda: executor.run(schedule, trace.iterations),
        "occupancy": lambda: memory.occupancy(trace, "gpu"),
        "usage and idle causes": lambda: analysis.usage(trace, simulation.steady),
        "bounds": lambda: bounds.period_bounds(schedule),
    }
    times = {name: milliseconds(step) for name, step in steps.items()}
    times["all of that"] = sum(times.values())
    times["list scheduler, as many iterations"] = milliseconds(lambda: testing.list_schedule(schedule, trace.iterations))
    return times


def answers_of_grid() -> dict[str, float]:
    """The answers of some models under all policies of the figure, after one that does not count."""
    comparison = _module("experiments.comparison")
    comparison.Job(MODELS[0], comparison.POLICIES[0]).run()
    begin = time.process_time()
    for model in MODELS:
        for policy in comparison.POLICIES:
            comparison.Job(model, policy).run()
    return {f"{len(MODELS) * len(comparison.POLICIES)} answers": 1e3 * (time.process_time() - begin)}


def _measured(tree: Path, blocks: int, grid: bool) -> dict[str, float]:
    """What a process of the version in ``tree`` prints."""
    command = [sys.executable, str(Path(__file__).resolve()), "--blocks", str(blocks), "--measure", *["--grid"] * grid]
    environment = {**os.environ, "AUTOHETE_TREE": str(tree), "PYTHONPATH": str(tree)}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=tree).stdout
    times: dict[str, float] = json.loads(printed)
    return times


def main(*others: Path, blocks: int = 96, turns: int = 9, grid: bool = False, measure: bool = False) -> None:
    """Measure versions in turns.

    Parameters
    ----------
    others:
        Working trees of other versions.
    blocks:
        Transformer blocks of the one answer.
    turns:
        Processes of each version.
    grid:
        Measure the grid instead of the one answer.
    measure:
        Measure once in this process, and print that as JSON.
    """
    if measure:
        print(json.dumps(answers_of_grid() if grid else one_answer(blocks)))
        return
    trees = [HERE, *(other.resolve() for other in others)]
    measured: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
    for _ in range(turns):
        for tree in trees:
            measured[tree].append(_measured(tree, blocks, grid))
    tables = _module("autohete.report.tables")
    what = "the grid" if grid else f"one answer for {blocks} blocks"
    shown = tables.table(f"{what}, CPU time", ["step", *(tree.name for tree in trees)])
    for name in measured[HERE][0]:
        cells = [median(times[name] for times in measured[tree]) for tree in trees]
        shown.add_row(name, *(f"{cell:.1f} ms" for cell in cells))
    tables.console().print(shown)


if __name__ == "__main__":
    app = App(name="answers", default_command=main, help=__doc__)
    app()
