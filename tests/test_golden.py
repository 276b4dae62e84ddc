"""What each published system does with one model that is small enough to follow on paper, pinned as text.

``AUTOHETE_UPDATE_GOLDEN=1 pytest tests/test_golden.py`` writes the files of ``tests/golden/`` anew; read the difference
before you commit it.

The model has an embedding, three transformer blocks and a head. Copies and updates take whole nanoseconds:

============================  =========  =====  ====
                              embedding  block  head
============================  =========  =====  ====
parameters p, 4 bytes each            2      4     2
forward, ns                           2      6     3
backward, ns                          4     12     6
update on the GPU, ns                 2      4     2
4 bytes per parameter copied          2      4     2
28 bytes of an update in DRAM        14     28    14
============================  =========  =====  ====

and the loss takes 1 ns. Over all blocks: p 16, forward 23, backward 46.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autohete.hardware import Cpu, Gpu, Hardware, Host, Link
from autohete.policies import POLICIES, parse_policy
from autohete.profile import BlockProfile, LossProfile, Profile
from autohete.sharing import FULL_RATE, Sharing
from autohete.simulate import Simulation, judge_for, simulate_plan
from autohete.trace import check_trace
from autohete.workload import BlockRole, Precision, Workload

GOLDEN = Path(__file__).parent / "golden"
ITERATIONS = 3
PLENTY = 10**12


def profile_with(gpu_bytes: int) -> Profile:
    """The model above on a node with ``gpu_bytes`` for tensors; nothing there slows anything else down."""
    workload = Workload(
        "paper", hidden_size=1, transformer_blocks=3, heads=1, vocabulary_size=1, sequence_length=1, batch_size=1,
        precision=Precision.FP32, tied_embeddings=False,
    )  # fmt: skip
    link = Link(bandwidth=4e9, duplex_bandwidth=4e9, latency_seconds=0.0)
    hardware = Hardware(
        name="paper",
        gpu=Gpu(gpu_bytes, 0, 1e12, 1e12, 1e12, 1.0, 1.0, 0.0),
        h2d=link,
        d2h=link,
        host=Host(PLENTY, 1e12, 1.0),
        cpu=Cpu(1, 4e9),
    )

    def block(role: BlockRole, parameters: int, forward_ns: int, backward_ns: int, update_ns: int) -> BlockProfile:
        return BlockProfile(
            role, parameters, forward_ns * 1e-9, backward_ns * 1e-9, update_ns * 1e-9,
            input_bytes=4, activation_bytes=40, forward_workspace_bytes=0, backward_workspace_bytes=8,
        )  # fmt: skip

    inner = block(BlockRole.TRANSFORMER, 4, 6, 12, 4)
    blocks = (block(BlockRole.EMBEDDING, 2, 2, 4, 2), inner, inner, inner, block(BlockRole.HEAD, 2, 3, 6, 2))
    return Profile(workload, hardware, blocks, LossProfile(1e-9, logits_bytes=4, workspace_bytes=8))


#: Policy, bytes of GPU memory (few, where that makes it offload), and the period in nanoseconds.
CASES: dict[str, tuple[str, int, int]] = {
    # On paper: the GPU does everything: forward 23, loss 1, backward 46, updates 2 + 3 x 4 + 2.
    "resident": ("resident:checkpointing=none", PLENTY, 23 + 1 + 46 + 16),
    # On paper: one thing after another. 4-byte gradients hold up backward: p ns. An update touches 36 bytes (28 and 8
    # for unscaling): 9 p ns. The refresh takes p ns, and the next forward waits for it.
    "zero_offload": ("zero_offload:checkpointing=none", PLENTY, 23 + 1 + 46 + 16 + 9 * 16 + 16),
    # On paper: gradients go beside backward, refreshes beside updates; only those of the embedding, 2 ns each, come alone.
    "zero_offload_paper": ("zero_offload:checkpointing=none,paper,tile_overlap", PLENTY, 23 + 1 + 46 + 2 + 9 * 16 + 2),
    # On paper: the CPU is always busy but for the embedding's gradient, which overwrites what its last update has read
    # and which the first update of the next iteration waits for.
    "zero_offload_delayed": ("zero_offload:checkpointing=none,paper,delayed_update", PLENTY, 9 * 16 + 2),
    # On paper: two blocks fit, so block 1 moves out after its forward (4 ns) and in again before its backward (4 ns), and
    # block 3 moves in before its forward (4 ns) and gives way to its gradient after its backward (4 ns), all of which the
    # GPU waits for. Then one update after another: 7 p ns, with gradient and refresh of p ns each for all but block 3.
    "patrickstar": (
        "patrickstar:checkpointing=none,chunk_size=1,gpu_share=100",
        4 * 2**20 + 272,
        23 + 1 + 46 + 4 * 4 + 7 * 16 + 2 * (16 - 4),
    ),
    # On paper: all optimizers but the head's are on the GPU; the head's way over the CPU is 2 + 14 + 2 ns after backward,
    # and the GPU's updates of 14 ns hide beside it.
    "patrickstar_hybrid": ("patrickstar:checkpointing=none,chunk_size=1", PLENTY, 23 + 1 + 46 + 2 + 14 + 2),
    # On paper: forward and loss, 24, wait for the write-backs of blocks 1 and 2, 4 ns each. Backward, 46, with three
    # recomputations and the updates of what stays (2 + 4 + 2), waits for gradients and parameters (2 x 4 ns) and update
    # (28 ns) of blocks 3 and 2.
    "stronghold": (
        "stronghold:checkpointing=full,window=1,window_optimizer=gpu",
        PLENTY,
        24 + 2 * 4 + 46 + 3 * 6 + 8 + 2 * (2 * 4 + 28),
    ),
    # On paper: the GPU never waits. Forward, loss, backward, one recomputation, updates of the first three blocks.
    "autohete": ("autohete", 300, 23 + 1 + 46 + 6 + 2 + 4 + 4),
    # On paper: the CPU updates all but the embedding, block 1 last; from there the way leads over its fetch (4), forward of
    # it and all above, loss, backward of the head (6) and its gradient (2) to the first update.
    "autohete_tight": ("autohete", 204, 7 * 14 + 4 + (3 * 6 + 3) + 1 + 6 + 2),
    "autohete_fifo": ("autohete:priority=off", 204, 7 * 14 + 4 + (3 * 6 + 3) + 1 + 6 + 2),
}


def simulated(name: str) -> Simulation:
    policy, gpu_bytes, _ = CASES[name]
    profile = profile_with(gpu_bytes)
    return simulate_plan(profile, parse_policy(policy).plan(profile, judge_for(profile)))


def told(found: Simulation, gpu_bytes: int) -> str:
    """Plan, period, schedule and the first iterations as text."""
    lines = [
        f"# {found.plan.policy} with {gpu_bytes} bytes: {found.plan.counts}",
        f"# period {found.iteration_seconds * 1e9:g} ns, peak {found.gpu.peak_bytes} bytes on the GPU",
        *str(found.schedule).splitlines(),
        *[f"# {span}" for span in found.trace.spans() if span.iteration < ITERATIONS],
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_schedule_and_first_iterations(name: str) -> None:
    """The printed schedule and the spans of the first iterations are the pinned ones, to the letter."""
    found = simulated(name)
    text = told(found, CASES[name][1])
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("AUTOHETE_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert check_trace(found.trace) == []


@pytest.mark.parametrize("name", CASES)
def test_period(name: str) -> None:
    """The steady period is the pinned one."""
    found = simulated(name)
    assert found.steady.settled
    assert round(found.iteration_seconds * 1e9, 6) == CASES[name][2]


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_shared(name: str) -> None:
    """In these examples every lane works at full rate in any company, so that paper suffices."""
    sharing = Sharing(simulated(name).schedule)
    assert set(sharing.rates(sorted(sharing.lanes)).values()) == {FULL_RATE}


def test_every_policy_has_an_example() -> None:
    """Each published system is among the pinned ones, and no file is left over."""
    assert {parse_policy(policy).name.partition(":")[0] for policy, _, _ in CASES.values()} == set(POLICIES)
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)
