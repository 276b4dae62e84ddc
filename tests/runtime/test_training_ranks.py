"""Several ranks give the bits of one process, whatever they shard; and end together."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.rank_trainings import (
    SHORT,
    Case,
    differing_rank,
    ending_rank,
    leaving_rank,
    resumed_rank,
    train_cases,
    train_in_one,
    train_several,
    trainer_in_one,
    trainer_rank,
)
from support.ranks import on_ranks, results
from support.reference import Outcome
from support.small import CLIP_NORM

from autohete.workload import Precision

#: By policy: whether gradients of a micro-batch are reduced at once.
POLICIES = {
    "resident": False,
    "resident:zero_stage=1": False,
    "resident:zero_stage=2": True,
    "resident:zero_stage=3": True,
    "resident:in_backward,zero_stage=2": True,
    "zero_offload": True,
    "zero_offload:paper": True,
    "twin_flow:ratio=50": True,
    "zero3_offload": True,
    "fsdp2_offload": True,
}


def compare(ranks: int, cases: list[Case]) -> None:
    """All ranks have, in each case, losses and parameters of one process that adds the ranks' gradients in order."""
    by_rank: list[list[Any]] = results(train_several, ranks, ranks, cases)
    for place, case in enumerate(cases):
        expected = [one.outcome for one in train_in_one(case, ranks, at_once=POLICIES[case.policy])]
        assert [of_rank[place] for of_rank in by_rank] == expected, case


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_bits_of_one_process(ranks: int) -> None:
    """Losses and parameters are those of one process that adds the gradients of all ranks in their order."""
    compare(ranks, [Case(policy) for policy in POLICIES])


@pytest.mark.slow
def test_clipping_and_micro_batches_have_the_bits_of_one_process() -> None:
    """The norm is that of the whole gradients, in 16 bit, too, and micro-batches are accumulated."""
    clipped = replace(SHORT, clip_norm=CLIP_NORM, precision=Precision.BF16)
    compare(2, [Case(policy, replace(clipped, tied_embeddings=i % 2 == 0)) for i, policy in enumerate(POLICIES)])
    several = replace(SHORT, clip_norm=CLIP_NORM, micro_batches=2)
    compare(3, [Case(policy, several) for policy in POLICIES if "in_backward" not in policy])


CLIPPED, SCALED = replace(SHORT, clip_norm=CLIP_NORM), replace(SHORT, precision=Precision.FP16)
#: Policies whose updates can wait for the whole backward, and those whose updates always do.
WAITING = [policy for policy in POLICIES if "in_backward" not in policy]
ALWAYS_WAITING = ["zero_offload", "zero_offload:paper", "zero3_offload", "fsdp2_offload"]
UNUSUAL = {
    "a gradient of one rank is infinite": [
        *(Case(policy, steps=5, explodes=True) for policy in ALWAYS_WAITING),
        *(Case(policy, CLIPPED, steps=5, explodes=True) for policy in WAITING),
    ],
    "scaled": [Case(policy, SCALED, 6, scaled=True, explodes=True) for policy in WAITING],
    "scaled, clipped, in micro-batches": [
        Case(policy, replace(SCALED, clip_norm=CLIP_NORM, micro_batches=2), 6, scaled=True, explodes=True) for policy in WAITING
    ],
    "weighted": [Case(policy, replace(SHORT, micro_batches=2), weighted=True) for policy in WAITING],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNUSUAL)
def test_ranks_that_meet_different_steps_have_the_bits_of_one_process(name: str) -> None:
    """A step that is skipped for a gradient of one rank is skipped by all, and all have the same scale of the loss; a loss that
    is weighted by tokens is the mean over those of all ranks.
    """
    cases = UNUSUAL[name]
    by_rank: list[list[Any]] = results(train_cases, 2, 2, cases)
    for place, case in enumerate(cases):
        expected = train_in_one(case, 2, at_once=POLICIES[case.policy])
        assert [of_rank[place] for of_rank in by_rank] == expected, case
        assert expected[0].skipped >= case.scaled + case.explodes


def same(one: Any, other: Any) -> bool:
    """Whether nested values are equal, tensors bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.slow
def test_a_trainer_on_ranks_is_one_with_micro_batches(tmp_path: Path) -> None:
    """Weights, optimizer states and the model that is given back are those of one process with the ranks' batches as
    micro-batches; and a state that two ranks have saved loads in one process and in four."""
    policies = ["resident", "zero_offload", "autohete", "resident:zero_stage=3"]
    expected = trainer_in_one(2)
    for of_rank in results(trainer_rank, 2, 2, policies, str(tmp_path)):
        for policy, found in zip(policies, of_rank, strict=True):
            assert same(found, expected), policy
    assert same(resumed_rank(0, "zero_offload", str(tmp_path)), expected["state"])
    for resumed in results(resumed_rank, 4, "resident:zero_stage=3", str(tmp_path)):
        assert same(resumed, expected["state"])


@pytest.mark.slow
@pytest.mark.parametrize(("how", "policy", "which"), [("killed", "zero_offload", 0), ("killed", "resident:zero_stage=3", 2)])
def test_a_killed_rank_ends_all(how: str, policy: str, which: int) -> None:
    """Within seconds every other rank has an error with its name."""
    for rank, ended in enumerate(on_ranks(ending_rank, 3, 3, policy, how, which)):
        if rank == which:
            assert (ended.error, ended.code) == ("killed", -9)
            continue
        assert not ended.error
        seconds, text = ended.result
        assert f"rank {which} has failed: its process has ended (the last that it came to was" in text
        assert seconds < 20


@pytest.mark.slow
def test_a_rank_that_raises_ends_all() -> None:
    """The other ranks name it, its task and its error."""
    (_, first), (seconds, second) = results(ending_rank, 2, 2, "resident:zero_stage=2", "raises", 0)
    assert "ValueError: boom" in first
    assert "rank 0 has failed: L3@" in second
    assert "ValueError: boom" in second
    assert seconds < 20


DIFFERENCES = {
    "batch": "to 61, the model accepts 0 to 60",
    "seed": "the model: blocks.0",
    "policy": "the training: policy of rank 1 is NamedPolicy(name='resident:zero_stage=1'",
    "lr": "the optimizer's settings of rank 1 differ from those of rank 0: 'lr 0.5', not 'lr 0.001'",
    "weights": "changes of parameters of rank 1 differ from those of rank 0",
    "calls": "rank 1 has failed: it is at 'the state of the training', but rank 0 at 'step 1'",
}


@pytest.mark.slow
def test_ranks_that_differ_are_refused() -> None:
    """Both ranks name what differs, rather than to train apart or to wait for each other."""
    for errors in results(differing_rank, 2, list(DIFFERENCES)):
        for error, expected in zip(errors, DIFFERENCES.values(), strict=True):
            assert expected in error


@pytest.mark.slow
def test_ranks_that_leave_with_an_error_of_their_own_say_so() -> None:
    """One that goes on, or ends as it should, has the error of the one that leaves; if all leave, nothing is lost."""
    policies = ["resident", "zero_offload", "resident:zero_stage=3"]
    several = [(policy, leaving) for policy in policies for leaving in ([1], [0, 1], [])]
    first, second = results(leaving_rank, 2, several)
    own = "KeyError: 'no such luck on rank {}'".format
    for (policy, leaving), (text, whole), (other, other_whole) in zip(several, first, second, strict=True):
        assert other == (own(1) if leaving else "")
        assert whole is other_whole is (leaving != [1] or policy == "resident")
        if leaving == [1]:
            assert text.startswith(
                f"RankError: rank 1 has failed: {own(1)}. All parameters are from step 0, the last complete one"
            )
            assert ("are NaN in what is given back" in text) is not whole
        else:
            assert text == (own(0) if leaving else "")


#: A program as a user writes it. In the end rank 1 is killed.
SCRIPT = """
import os, signal, sys
import torch
import torch.distributed as dist
from autohete import Trainer
from support.rank_trainings import Case, joined

dist.init_process_group("gloo")
rank, case = dist.get_rank(), Case("zero_offload")
data = [joined(some) for some in case.data(rank, 2)]
with Trainer(case.model(), policy=case.policy) as trainer:
    trainer.prepare(data[0])
    torch.manual_seed(2 + rank)
    losses = [trainer.step(batch) for batch in data]
    torch.save((losses, trainer.parameters()), f"{sys.argv[1]}/rank{rank}.pt")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    trainer.step(data[0])
"""


@pytest.mark.slow
def test_torchrun_trains_and_ends_when_a_rank_is_killed(tmp_path: Path) -> None:
    """Under torchrun, a script trains to the bits of one process, and a rank that is killed ends all, with its name."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--monitor-interval",
        "3",
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    script = [str(tmp_path / "script.py"), str(tmp_path)]
    done = subprocess.run([*command, *script], capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 1, done.stderr
    assert "RankError: rank 1 has failed: its process has ended" in done.stderr
    for rank, expected in enumerate(train_in_one(Case("zero_offload"), 2, at_once=True)):
        losses, parameters = torch.load(tmp_path / f"rank{rank}.pt")
        assert Outcome(losses, parameters) == expected.outcome
