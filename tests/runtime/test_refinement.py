"""The plan of a training is refined by what its first steps measure: here by given times, so that no clock decides."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support.measured import profile_for
from support.reference import batches, lanes_alive, model_for
from support.small import POLICIES, SMALL, plainly, profile_of
from torch import Tensor

from autohete import Trainer
from autohete.errors import InputError
from autohete.execution.trace import Trace
from autohete.hardware import load_hardware
from autohete.plan import Plan, UnitPlan
from autohete.plan.policy import Judge, Policy, better
from autohete.policies import parse_policy
from autohete.profile import Profile
from autohete.runtime.ledger import CHECKED_ITERATIONS
from autohete.runtime.takeover import only_gpu_works
from autohete.sim import SimExecutor
from autohete.simulate import Simulation, simulate_plan, simulate_safely
from autohete.train.as_executed import as_executed
from autohete.train.preparation import LEAST_GAIN, Preparation, Prepared
from autohete.train.refinement import MEASURED_STEPS, corrected
from autohete.train.trainer import Mode
from autohete.train.training_run import TrainingRun

#: Number of steps after which another plan may follow.
LEARNED = CHECKED_ITERATIONS + MEASURED_STEPS + 1


@cache
def given() -> Profile:
    """The measured sizes of the small model, with times that are the same on every machine."""
    profile = profile_for(SMALL)
    units = tuple(
        replace(unit, forward_seconds=2e-3, backward_seconds=2e-3, gpu_update_seconds=2e-4, cpu_update_seconds=1e-4, saved=())
        for unit in profile.units
    )
    return replace(profile, units=units, loss=replace(profile.loss, seconds=1e-3))


class Chooses:
    """A policy that searches among a few plans, in no time."""

    name = "chooses"

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """The fastest of those that fit."""
        names = ("zero_offload:checkpointing=none", "resident:checkpointing=full")
        return better([parse_policy(name).plan(profile, judge) for name in names], judge)


CHOOSES = Chooses()


def measured(simulation: Simulation, profile: Profile) -> Trace:
    """What a training by a plan measures if tasks take as long as ``profile`` says."""
    return SimExecutor().run(simulate_plan(profile, simulation.plan).schedule, LEARNED)


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_learned_from_what_was_predicted(policy: str) -> None:
    """If tasks take as long as predicted, corrected times are the predicted ones, and the plan stays."""
    profile = profile_of(SMALL)
    found = simulate_safely(profile, parse_policy(policy), as_executed)
    again = corrected(found, SimExecutor().run(found.schedule, LEARNED))
    for unit, before in zip(again.units, profile.units, strict=True):
        assert unit.forward_seconds == pytest.approx(before.forward_seconds, rel=1e-6)
        assert unit.backward_seconds == pytest.approx(before.backward_seconds, rel=1e-6)
    assert simulate_plan(again, found.plan).iteration_seconds == pytest.approx(
        simulate_plan(profile, found.plan).iteration_seconds, rel=1e-4
    )


def with_links(profile: Profile, factor: float) -> Profile:
    """The same with copies that are faster by a factor."""
    hardware = profile.hardware
    h2d, d2h = (
        replace(link, bandwidth=link.bandwidth * factor, duplex_bandwidth=link.duplex_bandwidth * factor)
        for link in (hardware.h2d, hardware.d2h)
    )
    return replace(profile, hardware=replace(hardware, h2d=h2d, d2h=d2h))


def slow_links() -> Profile:
    """Copies take a hundred times as long."""
    return with_links(given(), 0.01)


def slow_passes() -> Profile:
    """A forward takes a hundred times as long."""
    return replace(given(), units=tuple(replace(unit, forward_seconds=0.2) for unit in given().units))


def measure(monkeypatch: pytest.MonkeyPatch, *profiles: Profile) -> None:
    """Let tasks be measured to take as long as the first profile says when a training looks first, then as the next."""
    left = iter(profiles)

    def trace(run: TrainingRun) -> Trace:
        run.session.drain()
        return measured(run.prepared.prediction, next(left))

    monkeypatch.setattr(TrainingRun, "trace", trace)


def trained(steps: int, policy: str | Policy = CHOOSES, **keywords: Any) -> tuple[list[float], list[Tensor], Trainer]:
    """Losses and parameters of a training, and its Trainer."""
    with Trainer(model_for(SMALL), policy=policy, profile=given(), **keywords) as trainer:
        trainer.prepare(batches(SMALL, 1)[0])
        torch.manual_seed(2)
        losses = [trainer.step(batch) for batch in batches(SMALL, steps)]
        return losses, trainer.parameters(), trainer


@pytest.mark.parametrize(("second", "stays"), [(slow_links, True), (slow_passes, False)])
def test_a_plan_follows_the_measured_times(
    second: Callable[[], Profile], stays: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies that are slower than predicted give another plan, which is said; if it is slower in fact, the first one is used
    again. No bit changes.
    """
    measure(monkeypatch, slow_links(), second())
    caplog.set_level(logging.INFO)
    losses, parameters, trainer = trained(2 * LEARNED + 2)
    found = trainer.refinement
    assert found is not None
    assert found.changes
    assert found.refined_seconds is not None
    assert found.refined_seconds < (1 - LEAST_GAIN) * found.corrected_seconds
    assert found.goes_back is not stays
    assert trainer.prediction is not None
    assert trainer.prediction.plan == (found.after if stays else found.before)
    assert [str(found.before.counts) in record.message for record in caplog.records] == [True, True]
    stayed, expected, _ = trained(2 * LEARNED + 2, refine=False)
    assert losses == stayed
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))
    assert losses[:3] == plainly(SMALL).losses
    assert not lanes_alive()


def test_a_fixed_plan_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the policy makes the same plan again, nothing follows, and what was measured is said."""
    measure(monkeypatch, slow_links())
    _, _, trainer = trained(LEARNED + 2, "zero_offload:checkpointing=none")
    found = trainer.refinement
    assert found is not None
    assert (found.refined_seconds, found.changes) == (None, False)
    assert "the plan stays" in str(found)
    assert found.corrected_seconds > 2 * found.predicted_seconds


def test_a_small_gain_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is predicted to be less than 3 % faster does not follow."""

    def barely(simulation: Simulation) -> Simulation:
        steady = replace(simulation.steady, period_seconds=simulation.steady.period_seconds * 0.98)
        return replace(simulation, steady=steady, plan=replace(simulation.plan, update_bytes=1.0))

    measure(monkeypatch, given())
    planned = Preparation.planned_again

    def again(self: Preparation, prepared: Prepared, profile: Profile) -> Prepared:
        found = planned(self, prepared, profile)
        return replace(found, prediction=barely(found.prediction))

    monkeypatch.setattr(Preparation, "planned_again", again)
    _, _, trainer = trained(LEARNED + 2)
    found = trainer.refinement
    assert found is not None
    assert found.refined_seconds is not None
    assert not found.changes
    assert "for another" in str(found)


def test_more_memory_than_predicted_gives_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """If steps need so much more memory than the schedule says that the plan does not fit beside it, one that does follows."""
    measure(monkeypatch, given())
    monkeypatch.setattr(TrainingRun, "excess_bytes", 2**29)
    _, _, trainer = trained(LEARNED + 2, gpu_memory="2GiB")
    found = trainer.refinement
    assert found is not None
    assert found.changes
    assert found.before.offloaded_optimizer_units > found.after.offloaded_optimizer_units == 0
    assert "more memory than was predicted" in str(found)
    assert trainer.prediction is not None
    assert trainer.prediction.gpu.capacity_bytes == 2**31 - 2**29


def test_without_another_plan_training_goes_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A policy that finds no plan with measured times, or one that cannot be trained, leaves the first one."""

    def refuse(self: Preparation, prepared: Prepared, profile: Profile) -> Prepared:
        raise InputError("nothing is found")

    measure(monkeypatch, slow_links())
    monkeypatch.setattr(Preparation, "planned_again", refuse)
    caplog.set_level(logging.INFO)
    _, _, trainer = trained(LEARNED + 2)
    assert trainer.refinement is not None
    assert not trainer.refinement.changes
    assert "nothing is found" in caplog.text


def test_the_plan_stays_if_the_caller_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without refinement nothing is measured, and the plan stays."""
    measure(monkeypatch)
    _, _, trainer = trained(LEARNED + 2, refine=False)
    assert trainer.refinement is None


def test_a_paced_plan_stays() -> None:
    """The times of a paced device are given: there is nothing to learn, whatever this machine is busy with."""
    hardware = load_hardware("v100-32gb-dgx2", {"links.h2d.bandwidth": "100GB/s", "links.d2h.bandwidth": "100GB/s"})
    with Trainer(model_for(SMALL), policy=CHOOSES, mode=Mode.PACED, hardware=hardware) as trainer:
        before = trainer.prepare(batches(SMALL, 1)[0])
        for batch in batches(SMALL, LEARNED + 2):
            trainer.step(batch)
        assert trainer.refinement is None
        assert trainer.prediction is before


@pytest.mark.parametrize("policy", ["autohete", "joint"])
@pytest.mark.parametrize(("seconds", "pays"), [(1e-4, False), (2e-4, True)])
def test_where_everything_fits_plain_training_runs(policy: str, seconds: float, pays: bool) -> None:
    """A policy that searches moves nothing where all fits and moving does not make training clearly faster: only the lane of
    the GPU works, as in plain training. Here updates by the CPU would save 2 % of the time, or 5 %.
    """
    profile = replace(given(), units=tuple(replace(unit, gpu_update_seconds=seconds) for unit in given().units))
    with Trainer(model_for(SMALL), policy=policy, profile=profile) as trainer:
        prediction = trainer.prepare(batches(SMALL, 1)[0])
        assert only_gpu_works(prediction.schedule) is not pays
        assert all(unit == UnitPlan() for unit in prediction.plan.units) is not pays
        assert prediction.plan.policy == policy
        lanes = {thread.name for thread in trainer._held.running().session.lanes.threads}
        assert lanes == {"autohete-gpu", *(["autohete-cpu", "autohete-d2h", "autohete-h2d"] if pays else [])}
