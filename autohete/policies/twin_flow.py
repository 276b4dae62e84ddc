"""Twin-Flow, of ZeRO-Offload++: DeepSpeed's ZeRO stage 3 updates part of the parameters on the CPU and the rest on the GPU.

Based on DeepSpeed 0.19.6 at edaa7221, ``deepspeed/runtime/zero/stage3.py``, and ``blogs/deepspeed-offloadpp``; since 0.12.3
(pull 4636). ``offload_optimizer.ratio`` is the share of the optimizer's sub-groups on the CPU, 1.0 by default:

- The *last* sub-groups go to the CPU (line 1055), though the blog says the first. They have ``sub_group_size`` elements, a
  billion by default. Without ``sub_group_size`` a unit is a sub-group, and the split is the one nearest to the ratio. With it
  the first ``int((1 - ratio) * n)`` of n sub-groups are the GPU's, and the split may be inside a unit. Not modelled: a
  sub-group ends with a whole tensor.
- Parameters stay on the GPU: with one GPU a gathered parameter is its own partition (``partition_parameters.py``,
  ``NoGatherHandle``). Several GPUs gather them for each use.
- A gradient is copied to the host twice, in its own format and in fp32 (lines 1905 and 1407), and back in between (line 1908).
  One stream does all three, beside backward; here they are one copy to the host that takes as long. ``pin_memory`` off is
  the default up to 0.19.4 (pull 8207): copies block backward. Not modelled: gradients that the GPU uses also go to the host and
  back; copies begin only when the bucket is full.
- Up to 0.15.3 the second copy blocks backward even if its target is pinned: it brings 16 bit to a pageable temporary, which the
  CPU casts (``fp32_grad_tensor.copy_(grad_buffer)``). The first one does not. From 0.16.3 (pull 6962) to 0.19.4 it blocks, too,
  but the GPU casts and the copy is pinned; this is not modelled.
- Sums over micro-batches rest on the host in the gradients' own format; only after the last there is the second copy. They
  are copied to the GPU, added there, and copied back (line 1914). Both copies are counted, the addition on the GPU is not.
- ``step`` processes the sub-groups one after the other (line 2629): it unscales the gradient, updates, and copies the
  parameters to where they are used. The first are updated on the GPU while CPUAdam updates the others; each of the latter is
  cast on the CPU into a pageable temporary and copied before the next begins. So the time of a step is linear in the ratio.
- The host holds master and moments (12 bytes per parameter), gradients in fp32, an array for each sub-group, and those of both
  processors in their own format, in one array (``grad_partitions_flat_buffer``). With ``pin_memory`` both are pinned and
  rounded up. Not modelled: while the last is pinned, when all others are there, its pageable copy also exists.
- The norm of each complete gradient is computed on the GPU, in fp64 (``_constant_buffered_norm2``). In fp16 the CPU looks for
  infinite values in all gradients before it updates, also in those of the GPU's sub-groups (``has_overflow``); here this is a
  part of its updates.
- Sub-groups on the GPU always have their fp32 master and gradient there, in fp32 training as well. Their optimizer is
  ``torch.optim.AdamW`` (line 312), not fused; here its time is that of the fused one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Footprint, Format, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Judge, Verdict
from autohete.plan.rules import Barrier, BlockingCopies, GpuUpdatesAfterBackward, SerialUpdates, UpdatesAfterBackward
from autohete.policies import traffic
from autohete.policies.checkpointing import Checkpointing, choosable, with_checkpointing
from autohete.policies.flags import combinations
from autohete.policies.host_arrays import sub_groups
from autohete.policies.several_gpus import ZERO3, check_bucket_size, deepspeed_buckets, shared, zero3_hooks
from autohete.policies.too_large import surely_exceeds_gpu
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, Kind


@dataclass(frozen=True, slots=True)
class TwinFlow:
    """Twin-Flow.

    Args:
        checkpointing: full, selective, alternate, none, or the better of full and none.
        ratio: percent of the parameters that the CPU updates. None: the smallest that fits the GPU's memory, as the blog
            advises. The code's default is 100.
        pin_memory: ``offload_optimizer.pin_memory``.
        async_gradients: copies of complete gradients overlap backward; not so up to 0.19.4.
        bucket_size: ``reduce_bucket_size`` in millions of elements.
        sub_group_size: elements of a sub-group. None: a unit is a sub-group.
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    ratio: int | None = None
    pin_memory: bool = True
    async_gradients: bool = True
    bucket_size: int = 500
    sub_group_size: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if not (self.async_gradients or self.pin_memory):
            raise InputError(
                "twin_flow:async_gradients=off changes nothing with pin_memory=off, where copies block: leave it out"
            )
        if self.ratio is not None and not 0 <= self.ratio <= 100:
            raise InputError(f"twin_flow:ratio={self.ratio} must be between 0 and 100 percent of the parameters")
        check_bucket_size("twin_flow", self.bucket_size)
        if self.sub_group_size is not None and self.sub_group_size < 1:
            raise InputError(f"twin_flow:sub_group_size={self.sub_group_size} must be at least 1 element, or left out")

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[TwinFlow]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(
            cls,
            checkpointing=choosable(profile),
            ratio=(None, 100, 50),
            pin_memory=(True, False),
            bucket_size=(500, 50),
        )

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        groups, end_of = self._sub_groups(profile)

        def plan_for(activations: Activations) -> Plan:
            if self.ratio is not None:
                nearest = self.sub_group_size is None
                on_gpu = _nearest(profile, self.ratio) if nearest else (100 - self.ratio) * groups // 100
                return self._plan(profile, activations, end_of(on_gpu))

            def too_many(on_gpu: int) -> bool:  # memory grows with their number
                plan = self._plan(profile, activations, end_of(on_gpu))
                return surely_exceeds_gpu(profile, plan) or judge(plan).verdict is Verdict.GPU_OUT_OF_MEMORY

            return self._plan(profile, activations, end_of(bisect_left(range(1, groups + 1), True, key=too_many)))

        return with_checkpointing(self.checkpointing, plan_for, profile, judge)

    def with_activations(self, profile: Profile, activations: Activations) -> Plan:
        """The plan in which the CPU updates everything, with the same ``activations`` of all blocks."""
        return self._plan(profile, activations, 0)

    def _sub_groups(self, profile: Profile) -> tuple[int, Callable[[int], int]]:
        """The number of sub-groups, and a function from a number of sub-groups to the elements that these have."""
        ends, size = [0, *accumulate(_parameters(profile))], self.sub_group_size
        if size is None:
            return len(ends) - 1, ends.__getitem__
        return -(-ends[-1] // size), lambda groups: min(groups * size, ends[-1])

    def _on_cpu(self, profile: Profile, on_gpu: int) -> list[int]:
        """The elements of each sub-group that are the CPU's."""
        size = self.sub_group_size
        groups = list(_parameters(profile) if size is None else sub_groups(profile, size))
        return [size for end, group in zip(accumulate(groups), groups, strict=True) if (size := min(group, end - on_gpu)) > 0]

    def _plan(self, profile: Profile, activations: Activations, on_gpu: int) -> Plan:
        """The plan in which the GPU updates the first ``on_gpu`` elements."""
        element, mixed = profile.element_bytes, traffic.is_mixed(profile)
        parameters = _parameters(profile)
        # In its own format, and in fp32.
        overlap = self.pin_memory and self.async_gradients
        gradients, refresh = Format(element + 4, overlap, returned_bytes=element), Format(element, pinned=False)

        @cache
        def unit(kept: Activations, share: float) -> UnitPlan:
            """A unit of which the GPU updates a share."""
            if share == 1:
                return UnitPlan(kept)
            return UnitPlan(
                kept,
                update=Update(Processor.CPU, share),
                # The host has no space for the GPU's part.
                gradients=Route(GPU_MEMORY if share else HOST_MEMORY, carried=gradients),
                refresh=refresh,
                sum_bytes=None if share else element,
                sums_pinned=self.pin_memory and not share,
            )

        units = []
        for block, (count, end) in enumerate(zip(parameters, accumulate(parameters), strict=True)):
            share = 1.0 if end <= on_gpu else max(on_gpu - (end - count), 0) / max(count, 1)
            units.append(unit(activations if 0 < block < len(parameters) - 1 else Activations.KEEP, share))
        bucket = round(1e6 * self.bucket_size) * element
        groups = self._on_cpu(profile, on_gpu)
        arrays = [element * sum(parameters), *(4 * group for group in groups)] if self.pin_memory else []
        cast = max(groups, default=0) * element if mixed else 0  # of updated parameters
        temporary = max(cast, traffic.search_held(profile) * sum(parameters))
        return Plan(
            policy="twin_flow",
            units=shared(units, 3, profile),
            rules=(
                *(
                    deepspeed_buckets(profile, 3, 1e6 * self.bucket_size)
                    if overlap
                    else [BlockingCopies(Kind.OFFLOAD_GRADIENTS, last_only=self.pin_memory)]
                ),
                SerialUpdates(),
                UpdatesAfterBackward(),
                GpuUpdatesAfterBackward(),
                Barrier(),
            ),
            update_bytes=traffic.ADAM_KERNEL,
            elementwise_bytes=traffic.UNSCALE + (traffic.CAST if mixed else 0) + traffic.search(profile),
            scales_gradients=True,
            check_bytes=traffic.norm(profile),
            footprint=Footprint(
                # In addition to the states: the gradient in fp32, and in fp32 training a separate master.
                gpu_buffer_bytes=bucket + on_gpu * (16 - profile.optimizer_bytes),
                host_buffer_bytes=temporary + (0 if self.pin_memory else element * sum(parameters)),
                host_pinned_buffer_bytes=sum(map(profile.hardware.host.pinned, arrays)),
                host_optimizer_bytes=12 if self.pin_memory else 16,
            ),
            flat_buffers=ZERO3,
            hooks=zero3_hooks(profile),
        )


def _parameters(profile: Profile) -> list[int]:
    """For each unit, the parameters that one GPU updates."""
    return [*map(profile.part_of, range(len(profile.units)))]


def _nearest(profile: Profile, ratio: int) -> int:
    """Number of units that the GPU updates so that the others' share is nearest to ``ratio`` percent; ties favour the fewer."""
    parameters = [unit.trained_parameters for unit in profile.units]
    return min(
        range(len(parameters) + 1),
        key=lambda on_gpu: abs(100 * sum(parameters[on_gpu:]) - ratio * sum(parameters)),
    )


SYSTEM = TwinFlow
