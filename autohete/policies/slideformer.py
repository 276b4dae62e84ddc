"""SlideFormer (Yang and Wen, DAC 2026, arXiv 2603.16428): a window of two units, and updates by the CPU during backward.

Based on github RegiaYoung/SlideFormer at a0ddba65: ``offload_transformer.py``, ``transformer_layer.py``,
``sliding_checkpoint.py``, ``optimizer/layer_adam/layer_adam.py``.

- fp32 parameters and both moments rest on the host, in pageable memory. The GPU has two cache units for the 16-bit parameters
  and gradients of a unit, each as large as the largest of embedding, block, and head (``_init_gpu_cache``).
- The hook before a pass of a unit submits the copy of the next one's parameters (``_register_layer_hooks``). A thread casts
  them on the CPU to a pinned buffer and copies them (``to_device_async``). In backward every unit comes again, but the head,
  which has stayed.
- Each block is checkpointed, and its input is copied to pinned host memory, except that of the last block. It comes back while
  the block above is recomputed and trained (``SlidingCheckpoint``).
- After its backward the gradients of a unit are copied to the one pinned gradient buffer of the host, once the unit above,
  whose gradients it holds, has been updated (``to_offload_async``). The same thread and the same stream copy both ways. Another
  thread then updates the unit with DeepSpeed's CPU Adam, which reads 16-bit gradients (``_do_update``).
- ``double_buffer``: three cache units, two gradient buffers on the host, and a thread and a stream for gradients.
- The embedding comes first in forward, and is updated last: an iteration begins when the one before has ended.

Nothing is decided: all blocks are treated alike.

Differences: the pass over a unit's parameters that casts them is counted once, with the update, beside which that for backward
runs; the thread delays the copies for forward by another. An input leaves after the forward that reads it instead of beside
it. A tied matrix stays on the GPU instead of coming as a part of the head and again as the embedding.

Not modelled: states and inputs on drives; of 2026-06 (eeab7d0f) copies and updates in chunks of 32 Mi elements, so that casts
overlap copies and the update begins with the first chunk of gradients; the replicas in ``multi_gpu``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Footprint, ParameterSlots, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Judge
from autohete.plan.rules import Barrier, HostGradientBuffers, OneCopyStream
from autohete.policies import host_arrays, traffic
from autohete.policies.flags import combinations
from autohete.policies.several_gpus import check_one_gpu
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY

#: Passes of a block in backward.
_PASSES = 2
#: Those of the head and its loss, from forward on.
_PASSES_OF_HEAD = 3


@dataclass(frozen=True, slots=True)
class SlideFormer:
    """SlideFormer.

    Args:
        double_buffer: one more cache unit and gradient buffer, and a stream for each direction.
    """

    double_buffer: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[SlideFormer]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(cls, double_buffer=(False, True))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        check_one_gpu("slideformer", profile)
        check_updates_in_backward("slideformer", profile)
        buffers, element, last = 1 + self.double_buffer, profile.element_bytes, len(profile.units) - 1
        # With two cache units a unit comes beside the pass of the one before; with three, one earlier.
        comes = Route(HOST_MEMORY, ahead=buffers, ahead_in_backward=_PASSES * buffers)
        outer = UnitPlan(parameters=comes, update=Update(Processor.CPU), gradients=Route(HOST_MEMORY))
        first = replace(outer, parameters=Route()) if profile.workload.tied_embeddings else outer
        head = replace(outer, parameters=replace(comes, stays_after_forward=True, ahead_in_backward=None))
        block = replace(outer, activations=Activations.RECOMPUTE, kept=Route(HOST_MEMORY, ahead=_PASSES))
        top = replace(block, kept=Route(), parameters=replace(comes, ahead_in_backward=_PASSES_OF_HEAD))
        largest = max(unit.parameters for unit in profile.units)
        return Plan(
            policy="slideformer",
            units=(first, *[block] * (last - 2), top, head),
            rules=(HostGradientBuffers(buffers), *(() if self.double_buffer else (OneCopyStream(),)), Barrier()),
            slots=ParameterSlots(1 + buffers, with_gradients=True),
            update_bytes=traffic.upcast_kernel(profile),
            elementwise_bytes=traffic.CAST if traffic.is_mixed(profile) else 0,
            footprint=Footprint(
                host_optimizer_bytes=profile.optimizer_bytes,
                host_pinned_buffer_bytes=host_arrays.pinned(profile, [largest] * (buffers + 1), element),
                host_parameter_bytes=0 if profile.workload.has_masters else element,
            ),
        )


def check_updates_in_backward(policy: str, profile: Profile) -> None:
    """Refuse what a system cannot do whose units are updated during each backward.

    Raises:
        InputError: the gradients of the workload are clipped or accumulated.
    """
    if profile.workload.clips:
        raise InputError(
            f"{policy} cannot clip gradients: it updates a unit before the backward of those below has given their norm. Leave "
            "clip_norm out, or choose another policy, such as autohete"
        )
    if profile.workload.micro_batches > 1:
        raise InputError(
            f"{policy} cannot accumulate gradients: it updates in the backward of each micro-batch. Use one micro-batch, or "
            "another policy, such as autohete"
        )


SYSTEM = SlideFormer
