"""The measured profile of the reference model, and what the simulator predicts with it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from autohete.analysis.worst_case import worst_case
from autohete.hardware import load_hardware
from autohete.policies import parse_policy
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY
from autohete.simulate import Simulation, judge_for, simulate_plan
from autohete.train.as_executed import as_executed
from autohete.train.measured import measured_profile_on
from autohete.train.trainer import Trainer
from autohete.workload import Workload
from support.reference import batches, model_for
from support.small import SMALL

MEDIUM = replace(SMALL, hidden_size=64, transformer_blocks=4, sequence_length=32, vocabulary_size=128)
#: Policies whose peak does not depend on how long anything takes.
SETTLED = [
    "resident",
    "resident:checkpointing=full",
    "zero_offload",
    "patrickstar:chunk_size=1",
    "stronghold:window=1",
]


@cache
def profile_for(workload: Workload) -> Profile:
    """The measured profile of the reference model on a node with slow links."""
    slow = {"links.h2d.bandwidth": "1GB/s", "links.d2h.bandwidth": "1GB/s", "cpu.update_bandwidth": "2GB/s"}
    node = load_hardware("a100-40gb-epyc7713", slow)
    return measured_profile_on(node, model_for(workload), batches(workload, 1)[0])


def predicted(workload: Workload, policy: str) -> Simulation:
    """What the simulator says about a policy on the measured profile."""
    profile = profile_for(workload)
    return simulate_plan(profile, as_executed(parse_policy(policy).plan(profile, judge_for(profile)), profile))


def is_within(trainer: Trainer) -> bool:
    """Whether a training has needed no more device memory than its schedule may need under any timing. The predicted peak is
    that of the predicted timing, which a busy machine does not keep.
    """
    assert trainer.prediction is not None
    most = worst_case(trainer.prediction.schedule, GPU_MEMORY).peak_bytes
    return most is None or trainer.comparison().measured_peak_bytes <= most
