"""ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840) as DeepSpeed runs it: ``deepspeed/runtime/zero/stage_1_and_2.py``.

16-bit parameters stay on the GPU, the optimizer is on the CPU. Read at commit edaa7221 (2026-08), unless a flag says
otherwise:

- Gradients are cast to fp32 on the GPU and copied tensor by tensor on the compute stream
  (``async_inplace_copy_grad_to_fp32_buffer_from_gpu``; ``overlap_comm`` is off at stage 2 unless set): 4 bytes, blocking.
- ``step``: a host synchronisation for norm and overflow, unscaling of all gradients on the CPU, CPUAdam, a cast on the CPU
  into a pinned 16-bit buffer, one copy to the GPU; each for the whole model at once.
- The next forward waits for all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from autohete.errors import check_fields
from autohete.plan import Activations, BlockPlan, Plan, Processor
from autohete.policies import traffic
from autohete.policies.checkpointing import Checkpointing, with_checkpointing
from autohete.policy import Judge
from autohete.profile import Profile

#: ``reduce_bucket_size``: elements of the contiguous gradient bucket.
_BUCKET_ELEMENTS = 500_000_000


@dataclass(frozen=True, slots=True)
class ZeroOffload:
    """ZeRO-Offload.

    Args:
        checkpointing: full, none, or the better of both.
        paper: gradients as the paper describes them: 16 bit, copied beside backward.
        tile_overlap: refresh each block's parameters as soon as they are updated (in the paper, not in the code).
        delayed_update: one-step delayed parameter update (in the paper, not in the code). Changes the mathematics.
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    paper: bool = False
    tile_overlap: bool = False
    delayed_update: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.policy.Policy`."""
        element, mixed = profile.element_bytes, traffic.is_mixed(profile)
        workload = profile.workload
        largest_tensor = workload.hidden_size * max(workload.vocabulary_size, 4 * workload.hidden_size)
        buckets = _BUCKET_ELEMENTS * (2 if self.paper else 1)  # overlap_comm fills one while the other is copied

        def plan_for(activations: Activations) -> Plan:
            outer = BlockPlan(optimizer=Processor.CPU)
            inner = BlockPlan(activations, optimizer=Processor.CPU)
            return Plan(
                policy="zero_offload",
                blocks=(outer, *[inner] * (len(profile.blocks) - 2), outer),
                gradient_bytes=element if self.paper else 4,
                blocking_gradients=not self.paper,
                update_after_backward=True,
                update_bytes=traffic.UNSCALE + traffic.ADAM_KERNEL + (traffic.CAST if mixed else 0),
                refresh_bytes=element,
                refresh_after_updates=not self.tile_overlap,
                barrier=not self.delayed_update,
                delayed=self.delayed_update,
                gpu_buffer_bytes=(buckets + largest_tensor) * element,
                # master 4, gradient 4, moments 8, and the pinned 16-bit staging buffer
                host_optimizer_bytes=16 + (2 if mixed else 0),
                host_parameter_bytes=0,
            )

        return with_checkpointing(self.checkpointing, plan_for, judge)
