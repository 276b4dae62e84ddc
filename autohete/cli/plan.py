"""``autohete plan``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from autohete.cli.outputs import check_outputs
from autohete.cli.question import BLANK, Question
from autohete.errors import InputError

if TYPE_CHECKING:
    from autohete.largest import Largest


def plan(
    *,
    question: Question = BLANK,
    policy: str = "autohete",
    max_: Annotated[Literal["batch", "sequence", "blocks"] | None, Parameter(name="--max")] = None,
    schedule: str | None = None,
    json_: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Show what a policy decides for each block.

    Parameters
    ----------
    policy:
        NAME[:flag,flag=value].
    max_:
        Plan the largest batch, sequence or number of blocks that fits, instead of the one given.
    schedule:
        Write the plan's schedule to this file: one line per task.
    json_:
        Print JSON: the object of `autohete simulate --json`, with the decisions for each run of equal blocks.
    """
    from autohete.largest import Figure, largest
    from autohete.policies import parse_policy
    from autohete.profile import analytic_profile
    from autohete.report.summary import answer, runs_of_equal_units
    from autohete.report.write import write_text

    if max_ is not None and question.profile is not None:
        raise InputError("--max asks for sizes that a profile was not measured for: leave out --profile or --max")
    chosen = question.answerable()
    check_outputs({"--schedule": schedule} if schedule is not None else {})
    asked = parse_policy(policy)
    grown = None if max_ is None else largest(chosen.workload, chosen.hardware, asked, Figure[max_.upper()])
    if grown is not None:
        chosen = analytic_profile(grown.workload, chosen.hardware)
    summary, simulation = answer(chosen, asked)
    if schedule is not None:
        if simulation is None:
            raise InputError(f"there is no schedule to write: {summary.explanation}")
        write_text(schedule, str(simulation.schedule))
    if json_:
        runs = runs_of_equal_units(simulation.plan) if simulation else []
        decisions = [{"first_block": first, "last_block": last} | asdict(unit) for first, last, unit in runs]
        rules = [str(rule) for rule in simulation.plan.rules] if simulation else []
        found = {"decisions": decisions, "rules": rules} | ({"largest": grown.value, "limit": grown.limit} if grown else {})
        print(json.dumps(asdict(summary) | found, indent=2, ensure_ascii=True))
    else:
        from autohete.report.tables import console, print_plan, say

        print_plan(summary, simulation)
        if grown is not None:
            say(console(), _limit(grown))


def _limit(grown: Largest) -> str:
    """One line: the largest value, and what limits it."""
    name = grown.figure.replace("_", " ")
    if not grown.value:
        return f"not even {name} 1 fits: {grown.limit}"
    return f"largest {name} that fits: {grown.value:,}; one more does not: {grown.limit}"
