"""The smallest reference model, trained under every policy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from autohete.hardware import Place, load_hardware
from autohete.profile import Profile, analytic_profile
from autohete.workload import Precision, Workload
from support.reference import Outcome, train_plainly

STEPS = 3
#: Less than the global norm of the small model's gradients, which is about 0.6.
CLIP_NORM = 0.05
#: Little arithmetic per byte, so that a copy that is not waited for is still under way when its result is read.
SMALL = Workload("small", 32, 3, 4, vocabulary_size=61, sequence_length=8, batch_size=2, precision=Precision.FP32)
POLICIES = [
    "resident",
    "resident:checkpointing=full",
    "resident:in_backward",
    "resident:checkpointing=selective",
    "sqrt_checkpoint:segments=1",
    "zero_offload",
    "zero_offload:paper,tile_overlap",
    "zero_offload:checkpointing=selective",
    "zero3_offload",
    "patrickstar",
    "stronghold:window=1",
    "stronghold:window=2",
    "stronghold:window=2,checkpointing=selective",
    "autohete",
    "autohete:priority=off",
    "joint",
]


@cache
def plainly(workload: Workload, stale: frozenset[int] = frozenset()) -> Outcome:
    """Plain training, once per workload and choice of blocks whose updates are a step late."""
    return train_plainly(workload, STEPS, stale)


def profile_of(workload: Workload) -> Profile:
    """A profile in which copies and updates are slow: plans that search then use every mechanism."""
    slow = {"links.h2d.bandwidth": "1GB/s", "links.d2h.bandwidth": "1GB/s", "cpu.update_bandwidth": "2GB/s"}
    drives = Place("nvme", 10**12, 1e9, 1e9, 1e-5)
    places = drives, replace(drives, name="peer", both_bandwidth=1.5e9, beside="gpu")
    return analytic_profile(workload, replace(load_hardware("a100-40gb-epyc7713", slow), places=places))
