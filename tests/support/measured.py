"""The measured profile of the reference model, and what the simulator predicts with it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from autohete.hardware import load_hardware
from autohete.policies import parse_policy
from autohete.profile import Profile
from autohete.simulate import Simulation, judge_for, simulate_plan
from autohete.train.as_executed import as_executed
from autohete.train.measured import measured_profile_on
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
