"""What each published system does with one model that is small enough to follow on paper, pinned as text.

A file of ``tests/golden/`` is one example: a head written by hand, which says what is asked and works the period out on paper,
and below it what is pinned. ``AUTOHETE_UPDATE_GOLDEN=1 pytest tests/unit/test_golden.py`` writes that part anew; read the
difference before you commit it.

The model is that of :mod:`support.paper`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest
from support.paper import profile_with

from autohete.execution.trace import check_trace
from autohete.plan import Plan
from autohete.plan.policy import Judgement, Verdict
from autohete.policies import POLICIES, parse_policy
from autohete.simulate import Simulation, judge_for, simulate_plan

GOLDEN = Path(__file__).parents[1] / "golden"
ITERATIONS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """A golden file: what is asked, the period worked out on paper, and all that was written below that.

    The head of the file is written by hand, in comments: ``policy``, ``gpu bytes`` (few, where that makes it offload),
    ``period ns`` as a sum, and where the sum comes from; ``micro-batches`` and ``gpus`` where there are several; ``clip norm``
    where gradients are clipped; ``pinned bytes`` where pinned memory has a limit; ``selective`` where the profile says how
    blocks are recomputed selectively; ``adapters`` where only one of four parameters of each block is trained.
    """

    name: str
    policy: str
    gpu_bytes: int
    micro_batches: int
    gpus: int
    clip_norm: float | None
    pinned_bytes: int | None
    selective: bool
    adapters: bool
    period_ns: int
    head: str
    told: str


def case(path: Path) -> Case:
    """Read a golden file."""
    text = path.read_text(encoding="utf-8")
    head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("# "))
    given = {key: value for key, _, value in (line[2:].partition(": ") for line in head.splitlines())}
    period = given["period ns"]
    assert re.fullmatch(r"[\d +*()-]+", period), f"{path.name}: a period is a sum of whole numbers"
    micro_batches, gpus = (int(given.get(key, 1)) for key in ("micro-batches", "gpus"))
    clip_norm = float(given["clip norm"]) if "clip norm" in given else None
    gpu_bytes = int(given["gpu bytes"])
    pinned_bytes = int(given["pinned bytes"]) if "pinned bytes" in given else None
    asked = (
        given["policy"],
        gpu_bytes,
        micro_batches,
        gpus,
        clip_norm,
        pinned_bytes,
        "selective" in given,
        "adapters" in given,
    )
    return Case(path.stem, *asked, eval(period), head, text[len(head) :])


CASES = {path.stem: case(path) for path in sorted(GOLDEN.glob("*.txt"))}


@lru_cache
def simulated(name: str) -> Simulation:
    asked = CASES[name]
    profile = profile_with(
        asked.gpu_bytes,
        asked.micro_batches,
        asked.gpus,
        asked.clip_norm,
        asked.pinned_bytes,
        selective=asked.selective,
        adapters=asked.adapters,
    )
    judge = judge_for(profile)

    def without_waits(plan: Plan) -> Judgement:
        """Refuse waits for memory: few could follow them on paper."""
        return replace(judge(plan), verdict=Verdict.GPU_OUT_OF_MEMORY) if plan.memory_waits else judge(plan)

    return simulate_plan(profile, parse_policy(asked.policy).plan(profile, without_waits))


def told(found: Simulation) -> str:
    """Plan, peak, schedule and the first iterations as text."""
    rules = ", ".join(map(str, found.plan.rules)) or "none"
    lines = [
        f"#= plan {found.plan.counts}, rules: {rules}",
        f"#= peak {found.gpu.peak_bytes} bytes on the GPU",
        *([f"#= peak {found.pinned.peak_bytes} of {found.host.peak_bytes} bytes on the host pinned"] if found.pinned else []),
        *str(found.schedule).splitlines(),
        *[f"#= {span}" for span in found.trace.spans() if span.iteration < ITERATIONS],
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_schedule_and_first_iterations(name: str) -> None:
    """The printed schedule and the spans of the first iterations are the pinned ones, to the letter."""
    found = simulated(name)
    if os.environ.get("AUTOHETE_UPDATE_GOLDEN") == "1":
        (GOLDEN / f"{name}.txt").write_text(CASES[name].head + told(found), encoding="utf-8")
    assert told(found) == case(GOLDEN / f"{name}.txt").told
    assert check_trace(found.trace) == []


@pytest.mark.parametrize("name", CASES)
def test_period(name: str) -> None:
    """The steady period is the one worked out on paper."""
    found = simulated(name)
    assert found.steady.settled
    assert round(found.iteration_seconds * 1e9, 6) == CASES[name].period_ns


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_shared(name: str) -> None:
    """In these examples every lane works at full rate, so that paper suffices."""
    trace = simulated(name).trace
    assert (trace.end_ns - trace.start_ns == [task.duration_ns for task in trace.schedule.tasks]).all()


def test_every_policy_has_an_example() -> None:
    """Each published system is among the pinned ones."""
    assert {parse_policy(asked.policy).name.partition(":")[0] for asked in CASES.values()} == set(POLICIES)
