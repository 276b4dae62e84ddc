"""Clipping by global norm: a norm of each unit's gradients, one coefficient from all norms, and updates that scale by it.

As in ``torch.nn.utils.clip_grad_norm_`` (torch 2.13, ``nn/utils/clip_grad.py``): gradients are read once for their norm, and
read and written once when they are scaled. Copies of single numbers between GPU and host cost only their latency. They are not
tasks: four bytes do not occupy a lane, and on a fifo lane they would wait for unrelated copies. Several GPUs that shard
gradients sum their norms: an all-reduce of one number is part of the coefficient's task. Ranks of a pipeline sum theirs before,
and each computes the coefficient (github NVIDIA/Megatron-LM at d98e8a64, ``megatron/core/optimizer/clip_grads.py``).
"""

from __future__ import annotations

from autohete.errors import InputError
from autohete.lowering import durations
from autohete.lowering.builder import Builder
from autohete.lowering.shards import Shards
from autohete.lowering.stages import PipelineRank
from autohete.plan import Plan, Processor
from autohete.profile import Profile
from autohete.schedule import COLLECTIVE, CPU, GPU, GPU_MEMORY, HOST_MEMORY, SEND, Kind, TaskId, Value


class ClippingTasks:
    """Adds norms and the coefficient to a builder. Adds nothing if the workload does not clip.

    Args:
        builder: collects the tasks.
        profile: whether gradients are clipped, and the durations.
        plan: the places of the gradients.
        shards: how several GPUs shard them.
        rank: the units whose gradients this GPU has.
    """

    def __init__(self, builder: Builder, profile: Profile, plan: Plan, shards: Shards, rank: PipelineRank) -> None:
        self._builder, self._profile, self._plan, self._shards, self._rank = builder, profile, plan, shards, rank
        self.clips = profile.workload.clips

    def norm_on(self, unit: int) -> Processor | None:
        """The processor that computes the norm of the unit's gradients. None: the workload does not clip.

        Raises:
            InputError: the plan assigns the norm to the GPU, where the gradients are never complete.
        """
        plan = self._plan.units[unit]
        if not self.clips:
            return None
        on_host = plan.accumulates_on_host and self._builder.passes[-1].micro_batch > 0
        if on_host and plan.update.norm_on is Processor.GPU:
            raise InputError(
                f"the GPU is to compute the norm of gradients of unit {unit}, which are accumulated on the host: leave norm_on "
                "out, accumulate on the GPU, or use one micro-batch"
            )
        return Processor.CPU if on_host else plan.update.norm_on or Processor.GPU

    def norm(self, unit: int) -> None:
        """Add the norm of the unit's gradients, which are complete."""
        b, on_host = self._builder, self.norm_on(unit) is Processor.CPU
        side, memory = (Processor.CPU, HOST_MEMORY) if on_host else (Processor.GPU, GPU_MEMORY)
        size = _gradient_bytes(self._profile, self._plan, unit, side) * self._shards.share(unit)
        value = Value.GRADIENTS if on_host else self._shards.gradients(unit)
        if on_host:
            seconds = durations.cpu_kernel(size)
            norm = b.task(Kind.GRADIENT_NORM, unit, CPU, seconds, unit)
        else:
            # Overlaps backward: it runs on the stream of the reductions, after them (DeepSpeed's ``reduction_stream``).
            lane = COLLECTIVE if self._shards.gpus > 1 else GPU
            norm = b.task(Kind.GRADIENT_NORM, unit, lane, durations.gpu_kernel(size))
            if self._plan.gradients_in_parameters(unit):
                b.read(norm, Value.PARAMETERS, unit)
        b.write(norm, value, unit, memory)  # does not change them, but makes later takers wait for it
        b.write(norm, Value.GRADIENT_NORM, unit, memory)

    def coefficient(self) -> None:
        """Add the coefficient, computed from all norms on the processor that updates."""
        b = self._builder
        units = [unit for unit in self._rank.units if not self._shards.is_frozen(unit)]
        norms = [self.norm_on(unit) for unit in units]
        updates = [side for side in Processor if any(self._shards.updates_on(unit, side) for unit in units)]
        on_cpu = Processor.CPU in (*norms, *updates)
        in_parts = any(map(self._shards.stage, units))  # each GPU has the norms of its part only
        seconds = durations.coefficient(
            on_cpu=on_cpu, from_gpu=Processor.GPU in norms, to_gpu=Processor.GPU in updates, in_parts=in_parts
        )
        lane = COLLECTIVE if in_parts else CPU if on_cpu else GPU
        clip = b.task(Kind.CLIP, 0, lane, seconds, priority=-1 if lane == CPU else 0)
        reader = self._sum_over_ranks() or clip
        for unit, norm_on in zip(units, norms, strict=True):
            b.read(reader, Value.GRADIENT_NORM, unit, HOST_MEMORY if norm_on is Processor.CPU else GPU_MEMORY)
        if reader != clip:
            b.after(clip, reader)
        b.write(clip, Value.CLIP_COEFFICIENT, 0, HOST_MEMORY)

    def _sum_over_ranks(self) -> TaskId | None:
        """Add the all-reduce of one number over the ranks of a pipeline; None if there is one rank."""
        if self._plan.ranks == 1:
            return None
        ranks = tuple(rank * self._shards.gpus for rank in range(self._plan.ranks))
        return self._builder.add(TaskId(Kind.SUM_NORMS, 0), SEND, durations.all_reduce(4, ranks))

    def scale(self, update: TaskId) -> None:
        """``update`` multiplies its gradients by the coefficient."""
        if self.clips:
            self._builder.read(update, Value.CLIP_COEFFICIENT, 0, HOST_MEMORY)


def scaled_bytes(profile: Profile, plan: Plan, unit: int, updated_on: Processor) -> int | None:
    """Traffic that clipping adds to the unit's update on one processor. None: it adds no pass over the gradients."""
    if not profile.workload.clips or (updated_on is Processor.CPU and plan.scales_gradients):
        return None
    return 2 * _gradient_bytes(profile, plan, unit, updated_on)


def _gradient_bytes(profile: Profile, plan: Plan, unit: int, side: Processor) -> int:
    """Size of the gradients: on the GPU as computed; on the host as they arrive, without accompanying data."""
    count, element = profile.units[unit].trained_parameters, 4 if plan.sums_in_fp32 else profile.element_bytes
    return (
        min(plan.units[unit].gradients.carried.bytes_of(count, element), 4 * count)
        if side is Processor.CPU
        else count * element
    )
