"""The smallest reference model, trained under every policy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autohete.hardware import Place, load_hardware
from autohete.profile import Profile, SavedTensors, analytic_profile
from autohete.runtime.precision import DTYPES
from autohete.runtime.recorder import Recorder, Saved
from autohete.workload import Precision, Workload
from support.reference import Outcome, model_for, train_plainly

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
    drives = Place("nvme", 10**12, 1e9, 1e9, 1e-5, update_bandwidth=2e9)
    places = drives, replace(drives, name="peer", both_bandwidth=1.5e9, beside="gpu")
    profile = analytic_profile(workload, replace(load_hardware("a100-40gb-epyc7713", slow), places=places))
    inner = named_by(replace(workload, transformer_blocks=1, micro_batches=1, clip_norm=None))
    first, *others, last = profile.units
    units = (replace(unit, saved=inner[i % len(inner)]) for i, unit in enumerate(others))
    return replace(profile, units=(first, *units, last))


@cache
def named_by(workload: Workload) -> tuple[tuple[SavedTensors, ...], ...]:
    """What the blocks of the reference model save, by the names that the runtime gives it, without their sizes."""
    found = []
    for block in model_for(workload).blocks:
        recorder, saved = Recorder(block, str), list[Saved]()

        def pack(tensor: Tensor, recorder: Recorder = recorder, saved: list[Saved] = saved) -> Saved:
            saved.append(Saved(tensor.detach()))
            recorder.note(saved[-1])
            return saved[-1]

        shape = workload.batch_size, workload.sequence_length, workload.hidden_size
        x = torch.zeros(shape, dtype=DTYPES[workload.precision], device="cpu", requires_grad=True)
        with saved_tensors_hooks(pack, lambda saved: saved.tensor), recorder.recording():
            block(x)
        found.append(
            tuple(
                SavedTensors(one.name, 0, None if one.remaking is None else 1e-6, selective=one.selective)
                for one in recorder.finished().listed()
            )
        )
    return tuple(found)
