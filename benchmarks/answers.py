"""What does one answer take, step by step, and the grid of the figure, in this version and in others?

Command: ``python benchmarks/answers.py [OTHER ...]``, where ``OTHER`` are working trees of other versions (``git worktree add
DIR REVISION``). Each version is measured in a process of its own, in turns; each figure is the median of all turns, in CPU time
of one process, which other programs on the machine disturb least.
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
    found = []
    for _ in range(rounds):
        begin = time.process_time()
        action()
        found.append(1e3 * (time.process_time() - begin))
    return median(found)


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
    found = simulate.simulate_plan(profile, plan)
    schedule, trace = found.schedule, found.trace
    executor = _module("autohete.sim").SimExecutor(validate=False)
    steps: dict[str, Callable[[], object]] = {
        "profile": lambda: example.profile(blocks),
        "lowering": lambda: lowering.lower(profile, plan),
        "check": schedule.validate,
        f"simulation of {trace.iterations} iterations": lambda: executor.run(schedule, trace.iterations),
        "occupancy": lambda: memory.occupancy(trace, "gpu"),
        "usage and idle causes": lambda: analysis.usage(trace, found.steady),
        "bounds": lambda: bounds.period_bounds(schedule),
    }
    times = {name: milliseconds(step) for name, step in steps.items()}
    times["all of that"] = sum(times.values())
    times["list scheduler, as many iterations"] = milliseconds(lambda: testing.list_schedule(schedule, trace.iterations))
    return times


def grid() -> dict[str, float]:
    """The answers of some models under all policies of the figure."""
    comparison = _module("experiments.comparison")

    def answers() -> None:
        for model in MODELS:
            for policy in comparison.POLICIES:
                comparison.Job(model, policy).run()

    return {f"grid: {len(MODELS) * len(comparison.POLICIES)} answers": milliseconds(answers, rounds=1)}


def _measured(tree: Path, blocks: int) -> dict[str, float]:
    """What a process of the version in ``tree`` prints."""
    command = [sys.executable, str(Path(__file__).resolve()), "--blocks", str(blocks), "--measure"]
    environment = {**os.environ, "AUTOHETE_TREE": str(tree), "PYTHONPATH": str(tree)}
    printed = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, cwd=tree).stdout
    found: dict[str, float] = json.loads(printed)
    return found


def main(*others: Path, blocks: int = 96, turns: int = 9, measure: bool = False) -> None:
    """Measure versions in turns.

    Parameters
    ----------
    others:
        Working trees of other versions.
    blocks:
        Transformer blocks of the one answer.
    turns:
        Processes of each version.
    measure:
        Measure once in this process, and print that as JSON.
    """
    if measure:
        print(json.dumps({**one_answer(blocks), **grid()}))
        return
    trees = [HERE, *(other.resolve() for other in others)]
    found: dict[Path, list[dict[str, float]]] = {tree: [] for tree in trees}
    for _ in range(turns):
        for tree in trees:
            found[tree].append(_measured(tree, blocks))
    tables = _module("autohete.report.tables")
    shown = tables.table(f"one answer for {blocks} blocks, and the grid, CPU time", ["step", *(tree.name for tree in trees)])
    for name in found[HERE][0]:
        cells = [median(times[name] for times in found[tree]) for tree in trees]
        shown.add_row(name, *(f"{cell:.1f} ms" for cell in cells))
    tables.console().print(shown)


if __name__ == "__main__":
    app = App(name="answers", default_command=main, help=__doc__)
    app()
