"""How long does the joint planner take for 96 unequal units, and how far is its plan from the lower bound?

Command: ``python benchmarks/joint.py [--units N] [--seeds N]``. Each model has N transformer blocks with sizes drawn between
0.3 and 1.7 times that of a preset, on a node with a large enough host. Times are processor time of one process.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cyclopts import App

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python benchmarks/joint.py` from anywhere

from autohete.cli.app import run_app
from autohete.hardware import load_hardware
from autohete.plan import Plan
from autohete.plan.policy import Judge
from autohete.policies.autohete import AutoHete
from autohete.policies.joint import Joint
from autohete.profile import Profile, analytic_profile
from autohete.quantities import format_seconds
from autohete.report.tables import console, table
from autohete.simulate import judge_for
from autohete.workload import Workload

NODE = "a100-40gb-epyc7713"


def unequal(units: int, seed: int) -> Profile:
    """Return a model of ``units`` transformer blocks of different sizes."""
    rng = random.Random(seed)
    hidden = rng.choice([2048, 3072, 4096])
    workload = Workload("unequal", hidden, units, hidden // 128, batch_size=rng.choice([2, 4, 8]))
    profile = analytic_profile(workload, load_hardware(NODE, {"host.memory": "2TB"}))
    blocks = list(profile.units)
    for place in range(1, units + 1):
        factor, block = rng.uniform(0.3, 1.7), blocks[place]
        saved = tuple(
            replace(one, size_bytes=round(one.size_bytes * factor), seconds=one.seconds and one.seconds * factor)
            for one in block.saved
        )
        blocks[place] = replace(
            block,
            parameters=round(block.parameters * factor),
            forward_seconds=block.forward_seconds * factor,
            backward_seconds=block.backward_seconds * factor,
            gpu_update_seconds=block.gpu_update_seconds * factor,
            activation_bytes=sum(one.size_bytes for one in saved) + block.input_bytes,
            saved=saved,
        )
    return replace(profile, units=tuple(blocks))


def planned(profile: Profile, plan_for: Callable[[Profile, Judge], Plan]) -> tuple[float, float, float]:
    """Return the seconds of an iteration, of planning, and of the bound."""
    judge, begin = judge_for(profile), time.process_time()
    plan = plan_for(profile, judge)
    took = time.process_time() - begin
    return judge(plan).seconds, took, plan.bound_seconds or 0.0


def main(*, units: int = 96, seeds: int = 3) -> None:
    """Plan models of unequal units.

    Parameters
    ----------
    units:
        Transformer blocks.
    seeds:
        Number of models.
    """
    shown = table(f"{units} unequal units", ["hidden", "autohete", "planning", "joint", "planning", "bound"])
    for seed in range(seeds):
        profile = unequal(units, seed)
        plans = [planned(profile, AutoHete().plan), planned(profile, Joint().plan)]
        cells = [text for seconds, took, _ in plans for text in (format_seconds(seconds), format_seconds(took))]
        shown.add_row(str(profile.workload.hidden_size), *cells, format_seconds(plans[1][2]))
    console().print(shown)


if __name__ == "__main__":
    run_app(App(name="joint", default_command=main, help=__doc__))
