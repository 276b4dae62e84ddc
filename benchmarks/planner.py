"""How good are AutoHete's plans at realistic sizes, and how long does planning take?

Command: ``python benchmarks/planner.py [--settings N] [--seed N]``. Each setting is a model of 20 to 96 transformer blocks on a
preset, half of them with less memory or other rates. Its plan is compared with the best result of a long search without
bounds: pattern searches from the plan itself, from everything offloaded, and from random points. About 15 s per setting.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

from cyclopts import App
from joblib import Parallel, delayed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python benchmarks/planner.py` from anywhere

from autohete.cli.app import run_app
from autohete.errors import InfeasibleError
from autohete.hardware import Hardware, Link, load_hardware
from autohete.plan.policy import Judge, Verdict
from autohete.planner.steps import Counts
from autohete.policies.autohete import AutoHete
from autohete.profile import Profile, analytic_profile
from autohete.quantities import format_seconds
from autohete.report.tables import console, table
from autohete.simulate import judge_for
from autohete.workload import Workload

_DIRECTIONS = [step for step in product((-1, 0, 1), repeat=3) if any(step)]

#: What is drawn from: a new preset must not change the settings of a seed.
NODES = (
    "a100-40gb-epyc7543p",
    "a100-40gb-epyc7713",
    "h100-80gb-xeon96",
    "h100-pcie5",
    "h200-pcie5",
    "rtx4090-workstation",
    "v100-32gb-12vcpu",
    "v100-32gb-dgx2",
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A problem of realistic size."""

    seed: int
    profile: Profile
    policy: AutoHete

    def __str__(self) -> str:
        w, hardware = self.profile.workload, self.profile.hardware
        gib = hardware.gpu.memory_bytes / 2**30
        return f"{w.transformer_blocks} x {w.hidden_size}, batch {w.batch_size} on {hardware.name}, {gib:.4g} GiB"


def faster(hardware: Hardware, gpu: float = 1, link: float = 1, cpu: float = 1) -> Hardware:
    """Return ``hardware`` with some rates multiplied."""

    def scaled(one: Link) -> Link:
        return replace(one, bandwidth=one.bandwidth * link, duplex_bandwidth=one.duplex_bandwidth * link)

    return replace(
        hardware,
        gpu=replace(
            hardware.gpu,
            peak_16bit_flops=hardware.gpu.peak_16bit_flops * gpu,
            peak_32bit_flops=hardware.gpu.peak_32bit_flops * gpu,
        ),
        h2d=scaled(hardware.h2d),
        d2h=scaled(hardware.d2h),
        cpu=replace(
            hardware.cpu,
            update_bandwidth=hardware.cpu.update_bandwidth * cpu,
            elementwise_bandwidth=(hardware.cpu.elementwise_bandwidth or hardware.cpu.update_bandwidth) * cpu,
        ),
    )


def draw(seed: int, most_blocks: int = 96) -> Setting:
    """Return the setting of ``seed``: a preset, every second one with less memory, every second one with other rates."""
    rng = random.Random(seed)
    hidden = rng.choice([1024, 2048, 3072, 4096, 5120, 6144, 8192])
    workload = Workload(
        "drawn",
        hidden_size=hidden,
        transformer_blocks=rng.choice([blocks for blocks in (20, 24, 32, 40, 48, 64, 96) if blocks <= most_blocks]),
        heads=hidden // 128,
        sequence_length=rng.choice([1024, 2048]),
        batch_size=rng.choice([1, 2, 4, 8, 16]),
    )
    hardware = load_hardware(rng.choice(NODES))
    if rng.random() < 0.5:
        tensors = round(hardware.gpu_capacity_bytes * rng.uniform(0.3, 1))
        hardware = replace(hardware, gpu=replace(hardware.gpu, memory_bytes=tensors + hardware.gpu.reserved_bytes))
    if rng.random() < 0.5:
        hardware = faster(hardware, *(10 ** rng.uniform(-0.7, 0.7) for _ in range(3)))
    return Setting(seed, analytic_profile(workload, hardware), AutoHete(priority=rng.random() < 0.8))


def best_known(setting: Setting, judge: Judge, plan: Counts, judgements: int) -> tuple[float, Counts]:
    """Search for the shortest iteration and its choice, from ``plan``, from everything offloaded, and from random points."""
    rng = random.Random(setting.seed)
    blocks = len(setting.profile.units)
    limits = (blocks - 2, blocks - 2, blocks)
    known: dict[tuple[int, ...], float] = {}

    def seconds(place: tuple[int, ...]) -> float:
        if place not in known:
            result = judge(setting.policy.plan_for(setting.profile, Counts(*place)))
            known[place] = result.seconds if result.verdict is Verdict.OK else float("inf")
        return known[place]

    def descend(here: tuple[int, ...], step: int = 16) -> None:
        while step and len(known) < judgements:
            around = (tuple(h + step * d for h, d in zip(here, direction, strict=True)) for direction in _DIRECTIONS)
            inside = [p for p in around if all(0 <= x <= limit for x, limit in zip(p, limits, strict=True))]
            best = min(inside, key=seconds, default=here)
            if seconds(best) < seconds(here):
                here = best
            else:
                step //= 2

    descend((plan.checkpointed, plan.offloaded, plan.cpu_updated), 8)
    descend(limits)
    while len(known) < judgements // 2:
        start = (rng.randint(0, limits[0]), rng.randint(0, limits[1]), rng.randint(0, limits[2]))
        if seconds(start) < float("inf"):
            descend(start)
    best = min(known, key=lambda place: known[place])
    return known[best], Counts(*best)


@dataclass(frozen=True, slots=True)
class Result:
    """A setting's plan (None: nothing fits), what it cost to find, and the best known."""

    setting: Setting
    plan: Counts | None
    seconds: float
    bound_seconds: float
    planning_seconds: float
    best_known_seconds: float

    @property
    def excess(self) -> float:
        """Relative excess of the plan's iteration time over the best known."""
        return self.seconds / self.best_known_seconds - 1


def compare(seed: int, most_blocks: int = 96, judgements: int = 1000) -> Result:
    """Plan the setting of ``seed``, then continue to search, with at least half of the given number of judgements."""
    setting = draw(seed, most_blocks)
    judge = judge_for(setting.profile)
    begin = time.process_time()
    try:
        plan = setting.policy.plan(setting.profile, judge)
    except InfeasibleError:
        return Result(setting, None, 0, 0, time.process_time() - begin, 0)
    took, seconds = time.process_time() - begin, judge(plan).seconds
    counts = Counts(plan.checkpointed_units, plan.offloaded_parameter_units, plan.offloaded_optimizer_units)
    best = min(best_known(setting, judge, counts, judgements)[0], seconds)
    return Result(setting, counts, seconds, plan.bound_seconds or 0, took, best)


def main(*, settings: int = 60, seed: int = 0, jobs: int = 2) -> None:
    """Compare plans with the results of a long search.

    Parameters
    ----------
    settings:
        Number of settings to draw.
    seed:
        The first setting's seed; the others follow.
    jobs:
        Number of processes.
    """
    parallel = Parallel(n_jobs=jobs, return_as="generator", batch_size=1)
    results = list(parallel(delayed(compare)(s) for s in range(seed, seed + settings)))
    running = [r for r in results if r.plan is not None]
    columns = ["seed", "setting", "plan", "iteration", "best", "excess"]
    shown = table("plans more than 1 % slower than the best known", columns, left=3)
    for r in sorted(running, key=lambda r: -r.excess):
        if r.excess > 0.01:
            iteration, best = format_seconds(r.seconds), format_seconds(r.best_known_seconds)
            counts = r.plan and f"{r.plan.checkpointed}c {r.plan.offloaded}p {r.plan.cpu_updated}o"
            shown.add_row(str(r.setting.seed), str(r.setting), counts, iteration, best, f"{100 * r.excess:.1f} %")
    out = console()
    out.print(shown)
    figures = {
        "slower than the best known, %": [100 * r.excess for r in running],
        "proven within, %": [100 * (r.seconds / r.bound_seconds - 1) for r in running],
        "planning, s": [r.planning_seconds for r in running],
        "planning up to 42 blocks, s": [r.planning_seconds for r in running if len(r.setting.profile.units) <= 42],
    }
    summary = table(f"{len(running)} of {settings} settings fit", ["", "median", "worst"])
    for name, numbers in figures.items():
        if numbers:
            summary.add_row(name, f"{median(numbers):.2f}", f"{max(numbers):.2f}")
    out.print(summary)


if __name__ == "__main__":
    run_app(App(name="planner", default_command=main, help=__doc__))
