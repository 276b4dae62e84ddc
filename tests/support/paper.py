"""A model that is small enough to follow on paper, on a node that slows nothing else down.

The model has an embedding, three transformer blocks and a head. Copies and updates take whole nanoseconds:

============================  =========  =====  ====
                              embedding  block  head
============================  =========  =====  ====
parameters p, 4 bytes each            2      4     2
forward, ns                           2      6     3
backward, ns                          4     12     6
update on the GPU, ns                 2      4     2
4 bytes per parameter copied          2      4     2
norm of gradients, on either side     2      4     2
gradients scaled, on either side      4      8     4
28 bytes of an update in DRAM        14     28    14
============================  =========  =====  ====

and the loss takes 1 ns. Over all blocks: p 16, forward 23, backward 46.
"""

from __future__ import annotations

from dataclasses import replace

from autohete.hardware import Cpu, Gpu, Hardware, Host, Interconnect, Link, Place
from autohete.profile import LossProfile, Profile, SavedTensors, UnitProfile
from autohete.workload import BlockRole, Precision, Workload

PLENTY = 10**12


def profile_with(
    gpu_bytes: int,
    micro_batches: int,
    gpus: int = 1,
    clip_norm: float | None = None,
    pinned_bytes: int | None = None,
    *,
    selective: bool = False,
    adapters: bool = False,
) -> Profile:
    """The model above on a node with ``gpu_bytes`` for tensors; nothing there slows anything else down.

    With ``adapters`` one of four parameters of each block is trained, and nothing else: backward takes 6 ns for a block, 3 for
    the head, and an update 1 ns. Selective recomputation of a block keeps 16 of the 36 bytes beside the input and takes 2 ns.
    Of several GPUs each passes on 4 bytes/ns, and has an equal part of the processor.
    """
    workload = Workload(
        "paper", hidden_size=1, transformer_blocks=3, heads=1, vocabulary_size=1, sequence_length=1, batch_size=1,
        precision=Precision.FP32, tied_embeddings=False, micro_batches=micro_batches, clip_norm=clip_norm,
    )  # fmt: skip
    link = Link(bandwidth=4e9, duplex_bandwidth=4e9, latency_seconds=0.0)
    hardware = Hardware(
        name="paper",
        gpu=Gpu(gpu_bytes, 0, 1e12, 1e12, 4e9, 1.0, 1.0, 0.0),
        h2d=link,
        d2h=link,
        host=Host(PLENTY, 1e12, 1.0, pinned_bytes),
        cpu=Cpu(1, 4e9),
        places=(Place("nvme", PLENTY, 4e9, 4e9, 0.0, update_bandwidth=4e9),),
        interconnect=Interconnect(4, 4e9, 0.0),
    ).shared_by(gpus)

    saved = SavedTensors("result", 16), SavedTensors("norm", 20, 2e-9, selective=True)

    def block(role: BlockRole, parameters: int, forward_ns: int, backward_ns: int, update_ns: int) -> UnitProfile:
        return UnitProfile(
            role, parameters, forward_ns * 1e-9, backward_ns * 1e-9, update_ns * 1e-9,
            input_bytes=4, activation_bytes=40, forward_workspace_bytes=0, backward_workspace_bytes=8,
            saved=saved if selective and role is BlockRole.TRANSFORMER else (),
        )  # fmt: skip

    inner = block(BlockRole.TRANSFORMER, 4, 6, 12, 4)
    if adapters:
        inner = replace(block(BlockRole.TRANSFORMER, 4, 6, 6, 1), frozen_parameters=3)
        first, last = block(BlockRole.EMBEDDING, 2, 2, 4, 2), block(BlockRole.HEAD, 2, 3, 3, 2)
        first, last = (replace(outer, frozen_parameters=2) for outer in (first, last))
        return Profile(workload, hardware, (first, inner, inner, inner, last), LossProfile(1e-9, 4, 8))
    blocks = (block(BlockRole.EMBEDDING, 2, 2, 4, 2), inner, inner, inner, block(BlockRole.HEAD, 2, 3, 6, 2))
    return Profile(workload, hardware, blocks, LossProfile(1e-9, logits_bytes=4, workspace_bytes=8))
