"""Clipping in the runtime: PyTorch's norm and coefficient, in the model's order, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.edges import without_edge
from support.measured import MEDIUM, profile_for
from support.reference import Outcome, batches, model_for, train_by_schedule, train_plainly
from support.small import CLIP_NORM, SMALL, STEPS, profile_of
from torch import Tensor, nn

from autohete import Trainer
from autohete.errors import InputError, ScheduleError, TaskError
from autohete.lowering import lower
from autohete.policies import parse_policy
from autohete.runtime.batch import Batch
from autohete.runtime.device import EmulatedDevice
from autohete.runtime.gradient_norm import Clipping
from autohete.runtime.loss_call import LossCall
from autohete.runtime.losses import next_token_loss
from autohete.runtime.observe import observed
from autohete.runtime.partition import partition
from autohete.runtime.settings import Recipe
from autohete.runtime.takeover import Takeover
from autohete.schedule import Edge, Kind, Lane, Schedule, Task, TaskId
from autohete.simulate import judge_for
from autohete.train.as_executed import everything_resident
from autohete.workload import Precision, Workload

CLIPS = Schedule((Lane("gpu"),), (Task(TaskId(Kind.CLIP, 0), "gpu", 0),))


@settings(max_examples=100)
@given(
    st.lists(st.lists(st.integers(0, 5000) | st.none(), min_size=1, max_size=4), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([1e-3, 1.0, 1e4]),
    st.randoms(use_true_random=False),
)
def test_coefficient_is_that_of_pytorch(
    blocks: list[list[int | None]], dtype: torch.dtype, clip_norm: float, rng: Random
) -> None:
    """Norms of 16- and 32-bit gradients, block by block in any order, scale as ``clip_grad_norm_`` scales them in fp32."""
    generator = torch.Generator().manual_seed(sum(size or 0 for sizes in blocks for size in sizes))
    order = [(i, place) for i, sizes in enumerate(blocks) for place in range(len(sizes))]
    rng.shuffle(order)
    gradients: list[list[Tensor | None]] = [
        [None if size is None else torch.randn(size, generator=generator).to(dtype) for size in sizes] for sizes in blocks
    ]
    clipping = Clipping(clip_norm, CLIPS, order)
    for i in reversed(range(len(blocks))):
        clipping.measure(7, i, gradients[i], 1.0, EmulatedDevice())
    clipping.combine(7)
    parameters = []
    for i, place in order:
        gradient = gradients[i][place]
        parameter = nn.Parameter(torch.zeros(blocks[i][place] or 0))
        parameter.grad = None if gradient is None else gradient.float().clone()
        parameters.append(parameter)
    assert clipping.total == float(nn.utils.clip_grad_norm_(parameters, clip_norm))
    coefficient = clipping.coefficient(7)
    assert coefficient is not None
    for (i, place), parameter in zip(order, parameters, strict=True):
        gradient = gradients[i][place]
        if gradient is not None:
            assert torch.equal(gradient.float() * coefficient, parameter.grad)  # type: ignore[arg-type]


class HeadFirst(nn.Module):
    """The reference GPT, whose parameters come in another order than its blocks."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        gpt = model_for(workload)
        self.head, self.blocks, self.embedding = gpt.head, gpt.blocks, gpt.embedding

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (batch, sequence) to logits."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x, self.embedding.token.weight)
        return logits


def test_norms_are_in_the_order_of_the_model() -> None:
    """The global norm sums over parameters as ``model.parameters()`` lists them, not block by block."""
    cut, _ = observed(partition(HeadFirst(SMALL)), Batch(*batches(SMALL, 1)[0]), LossCall(next_token_loss))
    first_of_head, first_of_block = (cut.last, 0), (1, 0)
    assert cut.order.index(first_of_head) < cut.order.index(first_of_block) < cut.order.index((0, 0))
    listed = [cut.owned[i][place] for i, place in cut.order]
    assert all(a is b for a, b in zip(listed, cut.model.parameters(), strict=True))


@pytest.mark.parametrize("kind", [Kind.GRADIENT_NORM, Kind.CLIP])
def test_a_norm_or_a_coefficient_that_comes_too_late_is_missed(kind: Kind) -> None:
    """A coefficient before all norms, and an update before the coefficient, are refused: nothing stale is used."""
    workload = replace(SMALL, clip_norm=CLIP_NORM)
    profile = profile_of(workload)
    schedule = lower(profile, everything_resident(profile))
    late = TaskId(kind, 0)
    tasks = sorted(schedule.tasks, key=lambda task: task.id == late)  # all others before it, and none waits for it
    early = [task._replace(after=tuple(edge for edge in task.after if edge.task != late)) for task in tasks]
    with pytest.raises(TaskError, match="before") as caught:
        train_by_schedule(workload, 1, replace(schedule, tasks=tuple(early)))
    assert isinstance(caught.value.__cause__, ScheduleError)


def test_an_update_that_does_not_wait_is_noticed() -> None:
    """Each update waits for the coefficient by an edge of its own: they follow no other task that does."""
    profile = profile_of(replace(SMALL, clip_norm=CLIP_NORM))
    plan = parse_policy("autohete").plan(profile, judge_for(profile))
    schedule = lower(profile, plan)
    clip = TaskId(Kind.CLIP, 0)
    updates = [task for task in schedule.tasks if task.id.kind in (Kind.GPU_UPDATE, Kind.CPU_UPDATE)]
    assert len(updates) == len(plan.units)
    for update in updates:
        assert Edge(clip) in update.after
        assert without_edge(schedule, update.id, update.after.index(Edge(clip))) != schedule


@pytest.mark.parametrize(("scheduled", "clip_norm"), [(None, 1.0), (1.0, None)])
def test_schedule_and_norm_go_together(scheduled: float | None, clip_norm: float | None) -> None:
    """A norm without a schedule that clips, and the other way around, is refused before anything is taken over."""
    workload = replace(SMALL, clip_norm=scheduled)
    profile = profile_of(workload)
    model = model_for(workload)
    with pytest.raises(InputError, match=rf"clip_norm is {clip_norm}, but the schedule"):
        Takeover(partition(model), lower(profile, everything_resident(profile)), Recipe(clip_norm=clip_norm))
    assert model(batches(workload, 1)[0][0]).isfinite().all()


@pytest.mark.parametrize("clip_norm", [0, -1.0, float("inf"), float("nan"), "1", True])
def test_what_is_no_norm_is_refused(clip_norm: object) -> None:
    """A norm is a positive finite number, for a workload and for a Trainer."""
    with pytest.raises(InputError, match=r"clip_norm is .*: give a finite number above 0"):
        replace(SMALL, clip_norm=clip_norm)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"clip_norm is .*: give a finite number above 0"):
        Trainer(model_for(SMALL), clip_norm=clip_norm)  # type: ignore[arg-type]


@cache
def plain(workload: Workload) -> Outcome:
    """Plain training."""
    return train_plainly(workload, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["autohete", "zero_offload", "resident"])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_the_trainer_clips_to_the_bit(policy: str, precision: Precision) -> None:
    """A Trainer with ``clip_norm`` gives the losses and parameters of plain training that clips."""
    workload = replace(MEDIUM, precision=precision)
    gpu_memory = "60%" if policy == "autohete" else None
    with Trainer(
        model_for(workload), policy=policy, gpu_memory=gpu_memory, profile=profile_for(workload), clip_norm=CLIP_NORM
    ) as trainer:
        torch.manual_seed(2)
        losses = [trainer.step(batch) for batch in batches(workload, STEPS)]
        found = Outcome(losses, trainer.parameters())
    assert found == plain(replace(workload, clip_norm=CLIP_NORM))
    assert found != plain(workload)


def test_a_trainer_does_not_clip_what_it_delays() -> None:
    """Its saved state has gradients without their coefficient: refused, and the model is given back."""
    model = model_for(MEDIUM)
    trainer = Trainer(model, policy="zero_offload:delayed_update", profile=profile_for(MEDIUM), clip_norm=1.0)
    with trainer, pytest.raises(InputError, match="there is a clip_norm, but zero_offload:delayed_update delays"):
        trainer.step(batches(MEDIUM, 1)[0])
    assert model(batches(MEDIUM, 1)[0][0]).isfinite().all()
