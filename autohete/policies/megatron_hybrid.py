"""Megatron-LM's optimizer CPU offload: a fraction of the parameters is updated on the CPU.

Based on github NVIDIA/Megatron-LM at d98e8a64, ``megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py``
(``HybridDeviceOptimizer``) and ``megatron/core/optimizer/__init__.py``; ``--optimizer-cpu-offload``,
``--optimizer-offload-fraction``, ``--overlap-cpu-optimizer-d2h-h2d``, with ``--use-precision-aware-optimizer``.

- Whole parameters, from the first on, are the CPU's until their elements reach the fraction. The host has their masters and
  gradients in pinned memory, and their moments. The GPU has states of the others, and the gradients of all, in fp32.
- ``step`` follows the last backward. It copies gradients in fp32 (``_set_sub_optimizer_grads``), launches the update on the
  GPU, and updates on the CPU with the fused AdamW of ``torch.optim``. Updated parameters go back in fp32 and are cast on the
  GPU, as in every copy that does not block (``copy_kernel_cuda`` in ``ATen/native/cuda/Copy.cu``).
- With ``overlap`` every parameter has an optimizer of its own, which waits for the copy of its gradient alone; a second stream
  copies parameters back. Without it, all gradients are copied, then all is updated, then all parameters go back.

Several GPUs shard the optimizer (``--use-distributed-optimizer``). Differences: a unit's parameters are copied and updated
together; updates run in the order of backward, there in that of the model; biases and norms, which are a parameter group of
their own behind all weights, stay with their unit; gradients of a unit are freed once they have been used, there not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Footprint, Format, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Judge, Verdict
from autohete.plan.rules import (
    Barrier,
    GpuUpdatesAfterBackward,
    GradientsLeaveAfterBackward,
    RefreshAfterUpdates,
    UpdatesAfterBackward,
)
from autohete.policies import host_arrays, traffic
from autohete.policies.checkpointing import Checkpointing, choosable, with_checkpointing
from autohete.policies.flags import combinations
from autohete.policies.several_gpus import shared
from autohete.policies.too_large import surely_exceeds_gpu
from autohete.profile import Profile


@dataclass(frozen=True, slots=True)
class MegatronHybrid:
    """Optimizer CPU offload.

    Args:
        checkpointing: full, selective, alternate, none, or the better of full and none.
        percent: of the parameters, updated on the CPU; from 100 on all. None: the least that fits.
        overlap: copies overlap updates (``--overlap-cpu-optimizer-d2h-h2d``).
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    percent: int | None = None
    overlap: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.percent is not None and self.percent < 0:
            raise InputError(f"megatron_hybrid:percent={self.percent}: give 0 to 100 % of the parameters, or leave it out")

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[MegatronHybrid]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(cls, checkpointing=choosable(profile), overlap=(False, True))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""

        def plan_for(activations: Activations) -> Plan:
            def fits(percent: int) -> bool:  # memory falls with it
                plan = self._plan(profile, activations, percent)
                return not surely_exceeds_gpu(profile, plan) and judge(plan).verdict is not Verdict.GPU_OUT_OF_MEMORY

            least = bisect_left(range(100), True, key=fits) if self.percent is None else min(self.percent, 100)
            return self._plan(profile, activations, least)

        return with_checkpointing(self.checkpointing, plan_for, profile, judge)

    def _plan(self, profile: Profile, activations: Activations, percent: int) -> Plan:
        units = []
        for i, on_cpu in enumerate(_on_cpu(profile, percent)):
            kept = activations if 0 < i < len(profile.units) - 1 else Activations.KEEP
            on_gpu = 1 - on_cpu / max(profile.units[i].trained_parameters, 1)
            if not on_cpu:
                units.append(UnitPlan(kept))
                continue
            update, fp32 = Update(Processor.CPU, share=on_gpu), Format(4)
            units.append(UnitPlan(kept, update=update, gradients=Route(carried=fp32), refresh=fp32))
        together = () if self.overlap else (UpdatesAfterBackward(), RefreshAfterUpdates())
        trained = sum(unit.trained_parameters for unit in profile.units)
        return Plan(
            policy="megatron_hybrid",
            units=shared(units, 1, profile),
            rules=(GradientsLeaveAfterBackward(), *together, GpuUpdatesAfterBackward(), Barrier()),
            update_bytes=traffic.ADAM_KERNEL,
            sums_in_place=True,
            footprint=Footprint(
                gpu_buffer_bytes=(4 - profile.element_bytes) * trained if traffic.is_mixed(profile) else 0,
                host_optimizer_bytes=8,
                host_pinned_bytes=(4, 4),
            ),
        )


def _on_cpu(profile: Profile, percent: int) -> Iterator[int]:
    """For each unit, the elements that are the CPU's: those of whole tensors, until so many percent are reached. Of a unit that
    is updated as a whole, these are all or none.
    """
    threshold = sum(unit.trained_parameters for unit in profile.units) * percent / 100
    before = 0
    for i, tensors in enumerate(host_arrays.tensors_by_unit(profile)):
        mine = 0
        for tensor in tensors:
            mine += tensor if before < threshold else 0
            before += tensor
        yield mine if not mine or profile.updates_any_share(i) else sum(tensors)


SYSTEM = MegatronHybrid
