"""The documents of ``simulate --json``, and of ``plan --json`` for one policy, in SI units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from autohete.documents import Flat, as_json
from autohete.plan import UnitPlan
from autohete.simulate import Simulation
from autohete.simulate.largest import GrowingFigure, Largest
from autohete.simulate.summary import Summary, UnitTraining, runs_of_equal_units, training_of


@dataclass(frozen=True, slots=True)
class SimulationDocument:
    """The result of one policy.

    Args:
        format: the form of this document.
        summary: the result.
    """

    format: Literal["autohete-simulation 1"]
    summary: Annotated[Summary, Flat()]


@dataclass(frozen=True, slots=True)
class Decision:
    """The decisions for a run of units that are planned alike.

    Args:
        first_block, last_block: the units; 0 is the embedding.
        training: whether and how they are trained.
        unit: the decisions.
    """

    first_block: int
    last_block: int
    training: UnitTraining
    unit: Annotated[UnitPlan, Flat()]


@dataclass(frozen=True, slots=True)
class GrownFigure:
    """The largest value of a figure of the workload that fits.

    Args:
        figure: the figure.
        value: the largest that fits; 0 if not even 1 does.
        limit: why one more does not.
    """

    figure: GrowingFigure
    value: int
    limit: str


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """The result of one policy, with its plan.

    Args:
        format: the form of this document.
        summary: the result.
        decisions: the plan of each run of equal units; none if nothing fits.
        rules: the plan's rules, as text.
        largest: the largest sizes that fit, if they were asked for.
        written: the files that were written, if they were asked for.
    """

    format: Literal["autohete-plan 1"]
    summary: Annotated[Summary, Flat()]
    decisions: tuple[Decision, ...]
    rules: tuple[str, ...]
    largest: tuple[GrownFigure, ...]
    written: Mapping[str, object] | None = None


def simulation_json(summary: Summary) -> dict[str, Any]:
    """Return a summary as an object for :func:`json.dumps`."""
    document: dict[str, Any] = as_json(SimulationDocument("autohete-simulation 1", summary))
    return document


def plan_document(summary: Summary, simulation: Simulation | None, sizes: tuple[Largest, ...] = ()) -> PlanDocument:
    """Return a summary with the decisions for each run of equal blocks, the plan's rules, and the largest sizes."""
    decisions: tuple[Decision, ...] = ()
    rules: tuple[str, ...] = ()
    if simulation is not None:
        decisions = tuple(
            Decision(first, last, training_of(simulation.profile, first), unit)
            for first, last, unit in runs_of_equal_units(simulation)
        )
        rules = tuple(map(str, simulation.plan.rules))
    return PlanDocument("autohete-plan 1", summary, decisions, rules, grown_figures(sizes))


def grown_figures(sizes: tuple[Largest, ...]) -> tuple[GrownFigure, ...]:
    """Return the largest sizes without their workloads."""
    return tuple(GrownFigure(one.figure, one.value, one.limit) for one in sizes)


def plan_json(
    summary: Summary,
    simulation: Simulation | None,
    sizes: tuple[Largest, ...] = (),
    written: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Return :func:`plan_document` as an object for :func:`json.dumps`, with the files that were written for it."""
    document: dict[str, Any] = as_json(replace(plan_document(summary, simulation, sizes), written=written))
    return document
