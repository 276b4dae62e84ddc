"""``autohete plan``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter

from autohete.cli.outputs import check_outputs
from autohete.cli.question import BLANK, Question
from autohete.errors import InputError


def plan(
    *,
    question: Question = BLANK,
    policy: str = "autohete",
    schedule: str | None = None,
    json_: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Show what a policy decides for each block.

    Parameters
    ----------
    policy:
        NAME[:flag,flag=value].
    schedule:
        Write the plan's schedule to this file: one line per task.
    json_:
        Print JSON: the object of `autohete simulate --json`, with the decisions for each run of equal blocks.
    """
    from autohete.policies import parse_policy
    from autohete.report.summary import answer, runs_of_equal_units
    from autohete.report.write import write_text

    chosen = question.answerable()
    check_outputs({"--schedule": schedule} if schedule is not None else {})
    summary, simulation = answer(chosen, parse_policy(policy))
    if schedule is not None:
        if simulation is None:
            raise InputError(f"there is no schedule to write: {summary.explanation}")
        write_text(schedule, str(simulation.schedule))
    if json_:
        runs = runs_of_equal_units(simulation.plan) if simulation else []
        decisions = [{"first_block": first, "last_block": last} | asdict(unit) for first, last, unit in runs]
        rules = [str(rule) for rule in simulation.plan.rules] if simulation else []
        print(json.dumps(asdict(summary) | {"decisions": decisions, "rules": rules}, indent=2, ensure_ascii=True))
    else:
        from autohete.report.tables import print_plan

        print_plan(summary, simulation)
