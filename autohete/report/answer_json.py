"""An answer as plain data for JSON: everything that is printed, in SI units."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from autohete.answer import Answer, Candidate, Gain
from autohete.simulate import Simulation
from autohete.simulate.summary import Summary, runs_of_equal_units, training_of


def answer_json(answer: Answer) -> dict[str, Any]:
    """Return the answer as an object for :func:`json.dumps`."""
    assumed = asdict(answer.candidates[0].summary)["assumptions"]
    best, following, simulation = answer.best, answer.next_best, answer.simulation
    return {
        "fits": best is not None,
        "policy": None if best is None else best.name,
        "next_best": None if following is None else following.name,
        "do_not_offload": answer.do_not_offload,
        "tokens": answer.tokens,
        "training_seconds": answer.training_seconds,
        "interval": None if answer.interval is None else asdict(answer.interval) | {"fitting": answer.interval.fitting},
        "budgets": [asdict(budget) for budget in answer.budgets],
        "binds": list(answer.binds),
        "best": None if best is None or simulation is None else plan_json(best.summary, simulation),
        "policies": [_candidate(each) for each in answer.candidates],
        "purchases": [_gain(gain) for gain in answer.gains],
        "free": [_gain(gain) for gain in answer.free],
        "adapters": [_gain(gain) for gain in answer.adapters],
        "needs": [asdict(need) for need in answer.needs],
        "largest": [{"figure": one.figure, "value": one.value, "limit": one.limit} for one in answer.largest],
        "given": list(answer.given),
        "assumptions": {name: value for name, value in assumed.items() if name not in answer.given},
        "system_bytes": answer.system_bytes,
    }


def plan_json(summary: Summary, simulation: Simulation | None) -> dict[str, Any]:
    """Return a summary with the decisions for each run of equal blocks, and the plan's rules."""
    decisions: list[dict[str, Any]] = []
    rules: list[str] = []
    if simulation is not None:
        for first, last, unit in runs_of_equal_units(simulation):
            trained = training_of(simulation.profile, first).value
            decisions.append({"first_block": first, "last_block": last, "training": trained} | asdict(unit))
        rules = [str(rule) for rule in simulation.plan.rules]
    return asdict(summary) | {"decisions": decisions, "rules": rules}


def _gain(gain: Gain) -> dict[str, Any]:
    """A gain, without the workload of its change; the name describes the difference."""
    document = asdict(replace(gain, change=replace(gain.change, workload=None)))
    document["change"].pop("workload")
    return document | {"helps": gain.helps}


def _candidate(each: Candidate) -> dict[str, Any]:
    """A policy's result without what all of them share."""
    summary = asdict(each.summary)
    shared = ("workload", "hardware", "gpus", "assumptions", "notes", "gpu_capacity_bytes", "host_capacity_bytes")
    return {name: value for name, value in summary.items() if name not in shared} | {
        "same_plan_as": each.same_plan_as,
        "runs_in": list(each.runs_in),
    }
