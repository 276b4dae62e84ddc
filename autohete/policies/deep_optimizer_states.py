"""Deep Optimizer States (Maurya et al. 2024, arXiv 2410.21316): updates alternate between CPU and GPU. Modelled after the code:
github DataStates/DeepSpeed, branch ``deep-optimizer-states`` at d18d6f81, ``deepspeed/runtime/zero/stage3.py``.

Optimizer states are on the host, in sub-groups. Every k-th sub-group is updated on the GPU. A sub-group is a unit here.

- ``get_opt_update_device``: the last of every ``prefetch_optimizer_gap`` sub-groups is the GPU's.
- Gradients of the GPU's sub-groups stay there. The others are copied to fp32 buffers on the host, asynchronously with
  ``part_grads_async`` (``partition_grads``). PyTorch casts on the GPU for such a copy, so 4 bytes are copied. A blocking copy
  carries 16 bit and is cast on the CPU.
- The step begins when the GPU has finished (``step``). ``opt_transfers``: fp32 parameter and both moments of a sub-group are
  fetched while the CPU updates others. The GPU updates when they have arrived, and they are copied back while the CPU updates
  the next sub-group. They share one buffer, so the next fetch waits for the copy back.
- On the CPU: unscaling in place, then CPUAdam. A thread of its own casts to 16 bit and copies the result to a pinned buffer
  (``downsample_executor``), whose upload overlaps the next updates, so no update waits for it. The step ends with all copies.
- Gradients, states and parameters have separate streams, so a copy waits only for what it needs: lanes run whatever is ready.
- All arrays are pinned, also that of all gradients in 16 bit, to which each micro-batch is added. CPUAdam has its own moments
  in addition to the pinned ones, which are allocated for every sub-group.

- Norms of gradients, and in fp16 a search for infinite values, are as in :mod:`autohete.policies.twin_flow`.

Not modelled: gradients of the CPU's sub-groups are copied back to the GPU, as there; the DRAM traffic of that thread; the GPU's
update waits for the CPU updates before it, and refreshes wait for the others of their gap. Sub-groups are counted in the order
of updates, which here is the order of backward. The paper chooses the stride with a performance model that the code does not
contain; without ``stride``, the stride here keeps CPU and link equally busy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Footprint, Format, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Judge
from autohete.plan.rules import Barrier, BlockingCopies, ByPriority, GpuUpdatesAfterBackward, UpdatesAfterBackward
from autohete.policies import traffic
from autohete.policies.checkpointing import Checkpointing, choosable, with_checkpointing
from autohete.policies.flags import combinations
from autohete.policies.several_gpus import ZERO3, shared, zero3_hooks
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, Kind


@dataclass(frozen=True, slots=True)
class DeepOptimizerStates:
    """Deep Optimizer States.

    Args:
        checkpointing: full, selective, alternate, none, or the better of full and none.
        stride: one of every ``stride`` units is updated on the GPU (``prefetch_optimizer_gap``). None: as many as keep the
            CPU busy while the states of that unit are fetched, updated and copied back.
        async_gradients: gradient copies overlap backward (``part_grads_async``, off by default in the code).
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    stride: int | None = None
    async_gradients: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.stride is not None and self.stride < 2:
            raise InputError(
                f"deep_optimizer_states:stride={self.stride} must be at least 2, for the CPU to update some; streamed_states "
                "updates all on the GPU"
            )

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[DeepOptimizerStates]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(cls, checkpointing=choosable(profile), stride=(None, 2, 3, 5), async_gradients=(True, False))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        return with_checkpointing(self.checkpointing, lambda activations: self._plan(profile, activations), profile, judge)

    def _plan(self, profile: Profile, activations: Activations) -> Plan:
        mixed, count, element = traffic.is_mixed(profile), len(profile.units), profile.element_bytes
        cast = traffic.CAST if mixed and not self.async_gradients else 0
        elementwise_bytes = traffic.UNSCALE + traffic.search(profile) + cast
        stride = self.stride or _balanced(profile, elementwise_bytes)
        on_gpu = [unit for unit in range(count) if (count - unit) % stride == 0]
        cpu = UnitPlan(
            update=Update(Processor.CPU),
            gradients=Route(HOST_MEMORY, carried=Format(4) if self.async_gradients else Format(pinned=not mixed)),
            sum_bytes=element,
            sums_pinned=True,
        )
        gpu = UnitPlan(states=Route(HOST_MEMORY, ahead=0))
        units = [gpu if unit in on_gpu else cpu for unit in range(count)]
        units[1:-1] = [replace(unit, activations=activations) for unit in units[1:-1]]
        parts = [*map(profile.part_of, range(len(profile.units)))]  # one GPU's part of every sub-group
        unused = 4 * sum(parts[unit] for unit in on_gpu)  # gradients that stay on the GPU
        staged = 2 * max(parts) * (min(stride, count) - 1) if mixed else 0
        return Plan(
            policy="deep_optimizer_states",
            units=shared(units, 3, profile),
            rules=(
                *([] if self.async_gradients else [BlockingCopies(Kind.OFFLOAD_GRADIENTS, last_only=True)]),
                UpdatesAfterBackward(),
                GpuUpdatesAfterBackward(),
                Barrier(),
                ByPriority(),
            ),
            update_bytes=traffic.ADAM_KERNEL,
            elementwise_bytes=elementwise_bytes,
            scales_gradients=True,
            check_bytes=traffic.norm(profile),
            footprint=Footprint(
                # The buffers for states are permanently allocated.
                gpu_buffer_bytes=max((profile.state_bytes(unit, parts[unit]) for unit in on_gpu), default=0),
                # fp32 parameter, gradient and moments; the CPU's own moments.
                host_pinned_bytes=(4, 4, 4, 4),
                host_optimizer_bytes=8,
                host_pinned_buffer_bytes=unused + staged + profile.hardware.host.pinned(element * sum(parts)),
            ),
            flat_buffers=ZERO3,
            hooks=zero3_hooks(profile),
        )


def _balanced(profile: Profile, elementwise_bytes: int) -> int:
    """The stride at which the CPU updates the others while the states of one block are fetched, updated and copied back."""
    unit, gpus = 1, profile.hardware.gpus
    times = profile.units[unit]
    states = profile.state_bytes(unit, profile.part_of(unit))
    away = profile.h2d_seconds(states) + times.gpu_update_seconds / gpus + profile.d2h_seconds(states)
    on_cpu = profile.cpu_update_seconds(unit, traffic.ADAM_KERNEL, elementwise_bytes) / gpus
    count = len(profile.units)
    return 1 + (count if away >= count * on_cpu else max(1, math.ceil(away / on_cpu)))


SYSTEM = DeepOptimizerStates
