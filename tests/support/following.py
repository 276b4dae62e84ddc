"""Another plan for a training, between two steps."""

from __future__ import annotations

from dataclasses import replace

from autohete import Trainer
from autohete.policies import parse_policy
from autohete.simulate import simulate_safely
from autohete.train.as_executed import as_executed
from autohete.train.preparation import Prepared
from autohete.train.training_run import TrainingRun


def follow(trainer: Trainer, policy: str) -> None:
    """Go on by the plan of another policy."""
    trainer._held.do(lambda run: run.follow(_planned(run, policy)))


def _planned(run: TrainingRun, policy: str) -> Prepared:
    now = run.prepared
    found = simulate_safely(now.prediction.profile, parse_policy(policy), as_executed, now.partition.lasting_bytes)
    return replace(now, prediction=found)
