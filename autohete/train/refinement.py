"""Refines a plan with what the first steps under it have measured."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from autohete.errors import AutoHeteError, check_fields
from autohete.execution.trace import Trace
from autohete.plan import Plan
from autohete.profile import Profile, UnitProfile
from autohete.runtime.ledger import CHECKED_ITERATIONS
from autohete.schedule import CPU, D2H, GPU, GPU_MEMORY, H2D, Kind, Lane, Task
from autohete.simulate import Simulation, memory_bytes, safety, simulate_plan, with_memory
from autohete.train.preparation import LEAST_GAIN, Prepared

logger = logging.getLogger(__name__)

#: Number of steps that are measured, after those that are counted in both ways.
MEASURED_STEPS = 5


@dataclass(frozen=True, slots=True)
class Refinement:
    """What the first steps have taught.

    Args:
        predicted_seconds: of an iteration, as the first plan was made.
        measured_seconds: the same in fact, in the median.
        corrected_seconds: the prediction for the first plan with the measured times; infinite if steps need so much more memory
            than predicted that it may not fit.
        refined_seconds: that for the plan that is made with these times; None: it is the same plan, or there is none.
        planning_seconds: how long that took.
        before, after: the plan of the first steps, and that of the next.
        after_seconds: measured under the second plan; None: not yet, or there is none.
        goes_back: whether the second plan was slower in fact, and the first one is used again.
    """

    predicted_seconds: float
    measured_seconds: float
    corrected_seconds: float
    refined_seconds: float | None
    planning_seconds: float
    before: Plan
    after: Plan
    after_seconds: float | None = None
    goes_back: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def changes(self) -> bool:
        """Whether another plan follows."""
        return self.after != self.before

    def __str__(self) -> str:
        learned = f"an iteration takes {self.measured_seconds:.3g} s, predicted were {self.predicted_seconds:.3g} s"
        if self.refined_seconds is None:
            return f"{learned}; the plan stays {self.before.counts}"
        expected = "steps need more memory than was predicted"
        if math.isfinite(self.corrected_seconds):
            expected = f"{self.refined_seconds:.3g} instead of {self.corrected_seconds:.3g} s are predicted with measured times"
        if not self.changes:
            return f"{learned}; the plan stays {self.before.counts}: {expected} for another"
        change = f"{learned}; the plan changes from {self.before.counts} to {self.after.counts}: {expected}"
        if self.after_seconds is None:
            return change
        back = f", so the plan {self.before.counts} is used again" if self.goes_back else ""
        return f"{change}; it takes {self.after_seconds:.3g} s{back}"


def iteration_seconds(trace: Trace) -> float:
    """The median time from the begin of an iteration to that of the next, after the first ones, which are slower."""
    return float(np.median(np.diff(trace.anchors()[min(CHECKED_ITERATIONS, trace.iterations - 2) :]))) * 1e-9


def corrected(simulation: Simulation, trace: Trace) -> Profile:
    """Return the profile of a simulation with the times that a training by its schedule has measured.

    Each time is multiplied by the ratio of measured to simulated time of the tasks that it is for: of the same kind and unit
    (equal units are one), otherwise of the same kind, otherwise of the same lane.
    """
    ratios = _Ratios(simulation, trace)
    profile, hardware = simulation.profile, simulation.profile.hardware
    units = tuple(_corrected_unit(unit, ratios) for unit in profile.units)
    h2d, d2h = (
        replace(
            link,
            bandwidth=link.bandwidth / ratio,
            duplex_bandwidth=link.duplex_bandwidth / ratio,
            pageable_bandwidth=None if link.pageable_bandwidth is None else link.pageable_bandwidth / ratio,
            latency_seconds=link.latency_seconds * ratio,
        )
        for link, ratio in ((hardware.h2d, ratios.of(H2D)), (hardware.d2h, ratios.of(D2H)))
    )
    update = ratios.of(Kind.CPU_UPDATE)
    cpu = replace(
        hardware.cpu,
        update_bandwidth=hardware.cpu.update_bandwidth / update,
        elementwise_bandwidth=None
        if hardware.cpu.elementwise_bandwidth is None
        else hardware.cpu.elementwise_bandwidth / update,
    )
    places = tuple(
        replace(
            place,
            read_bandwidth=place.read_bandwidth / ratios.of((place.name, "read")),
            write_bandwidth=place.write_bandwidth / ratios.of((place.name, "write")),
        )
        for place in hardware.places
    )
    loss = replace(profile.loss, seconds=profile.loss.seconds * ratios.of(Kind.LOSS, GPU))
    return replace(profile, units=units, loss=loss, hardware=replace(hardware, h2d=h2d, d2h=d2h, cpu=cpu, places=places))


class _Ratios:
    """Ratios of measured to simulated times, by what the tasks have in common."""

    def __init__(self, simulation: Simulation, trace: Trace) -> None:
        said, found = (_seconds(one) for one in (simulation.trace, trace))
        sums = defaultdict[Hashable, list[float]](lambda: [0.0, 0.0])
        lanes = {lane.name: lane for lane in simulation.schedule.lanes}
        for task, predicted, measured in zip(simulation.schedule.tasks, said, found, strict=True):
            for key in _groups(task, lanes[task.lane], simulation.profile.units[task.id.unit]):
                sums[key][0] += predicted
                sums[key][1] += measured
        self._ratios = {key: measured / predicted for key, (predicted, measured) in sums.items() if predicted and measured}

    def of(self, *groups: Hashable) -> float:
        """The ratio of the first group that has tasks; 1 if none has."""
        return next((self._ratios[group] for group in groups if group in self._ratios), 1.0)


def _groups(task: Task, lane: Lane, unit: UnitProfile) -> Iterator[Hashable]:
    """What a task has in common with others, by which times are corrected."""
    yield lane.name
    yield task.id.kind
    yield task.id.kind, unit
    if lane.ends is not None:
        source, target = lane.ends
        yield source, "read"
        yield target, "write"


def _seconds(trace: Trace) -> list[float]:
    """The time of each task: the median over the iterations after the first ones, which are slower."""
    first = min(CHECKED_ITERATIONS, trace.iterations - 1)
    return [float(ns) * 1e-9 for ns in np.median((trace.end_ns - trace.start_ns)[first:], axis=0)]


def _corrected_unit(unit: UnitProfile, ratios: _Ratios) -> UnitProfile:
    forward, backward, update, recompute = (
        ratios.of((kind, unit), kind, GPU) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.GPU_UPDATE, Kind.RECOMPUTE)
    )
    on_cpu = ratios.of((Kind.CPU_UPDATE, unit), Kind.CPU_UPDATE, CPU)
    shorter, seconds = unit.shorter_recompute_seconds, unit.forward_seconds * forward
    return replace(
        unit,
        forward_seconds=seconds,
        backward_seconds=unit.backward_seconds * backward,
        gpu_update_seconds=unit.gpu_update_seconds * update,
        cpu_update_seconds=None if unit.cpu_update_seconds is None else unit.cpu_update_seconds * on_cpu,
        shorter_recompute_seconds=None if shorter is None else min(shorter * recompute, seconds),
        saved=tuple(one if one.seconds is None else replace(one, seconds=one.seconds * recompute) for one in unit.saved),
    )


class Measuring(Protocol):
    """A training whose steps are measured."""

    @property
    def prepared(self) -> Prepared:
        """The present plan."""

    @property
    def executed(self) -> int:
        """Number of steps under it."""

    @property
    def excess_bytes(self) -> int:
        """Device memory that was needed beyond what the schedule says."""

    def trace(self) -> Trace:
        """The times of the steps under the present plan, after waiting for all."""


class Refining:
    """Refines the plan of a training once: after some steps it plans again with measured times, and after as many steps under
    the new plan it goes back if they were slower.

    Args:
        planned: plans again with another profile.

    Attributes:
        found: what was learned so far; None: nothing yet.
    """

    def __init__(self, planned: Callable[[Prepared, Profile], Prepared]) -> None:
        self._planned = planned
        self.found: Refinement | None = None
        #: The plan of the first steps, once they have been measured.
        self._first: Prepared | None = None
        self._ended = False

    def next(self, training: Measuring) -> Prepared | None:
        """The plan for the next step; None: the present one. Waits for all steps so far if they are enough to learn from."""
        if self._ended or training.executed < CHECKED_ITERATIONS + MEASURED_STEPS + 1:
            return None
        present, trace = training.prepared, training.trace()
        self._ended = self._first is not None
        if self._first is None:
            self.found, following = self._refined(present, trace, training.excess_bytes)
            self._first, self._ended = present, following is None
        else:
            assert self.found is not None, "another plan has followed"
            after = iteration_seconds(trace)
            goes_back = after > self.found.measured_seconds
            self.found = replace(self.found, after_seconds=after, goes_back=goes_back)
            following = self._first if goes_back else None
        logger.info("%s", self.found)
        return following

    def _refined(self, present: Prepared, trace: Trace, excess_bytes: int) -> tuple[Refinement, Prepared | None]:
        begin, old = time.perf_counter(), present.prediction
        profile = corrected(old, trace)
        if excess_bytes:
            profile = with_memory(profile, GPU_MEMORY, memory_bytes(profile, GPU_MEMORY) - excess_bytes)
        same = safety(simulate_plan(profile, old.plan)).safe  # None: it does not fit beside the excess
        expected = math.inf if same is None else same.iteration_seconds
        try:
            found: Prepared | None = self._planned(present, profile)
        except AutoHeteError as error:  # there is a plan, so training goes on by it
            logger.info("no plan is found with measured times: %s", error)
            found = None
        if found is not None and found.prediction.plan == old.plan:
            found = None
        refined = None if found is None else found.prediction.iteration_seconds
        if refined is not None and refined > (1 - LEAST_GAIN) * expected:
            found = None
        after = old.plan if found is None else found.prediction.plan
        seconds = time.perf_counter() - begin
        measured = iteration_seconds(trace)
        return Refinement(old.iteration_seconds, measured, expected, refined, seconds, old.plan, after), found
