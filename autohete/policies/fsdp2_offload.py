"""PyTorch's FSDP2, ``fully_shard`` with ``CPUOffloadPolicy``.

Based on ``torch/distributed/fsdp/_fully_shard/`` of torch 2.13.0:

- Parameters rest on the host in fp32. Those of a unit are copied in fp32 and cast on the GPU, tensor by tensor
  (``_fsdp_param.py:834``, ``all_gather_inputs``), once for forward and once for backward, and released after each use.
- With one GPU there is nothing to gather. The copy is issued when it is waited for, on the compute stream, even if prefetching
  is configured (``_fsdp_param_group.py:392`` and ``:437``, pull 160135 of August 2025): nothing overlaps it. Up to 2.8, and
  still with several GPUs, it has a separate stream. In forward it waits for the parameters of the unit before the last; in
  backward the copy for the unit below overlaps the unit being computed (``_backward_prefetch``).
- Gradients are cast to fp32 on the GPU and copied on the reduce-scatter stream (``_fsdp_collectives.py:711-741``). Backward
  waits for the reduction of the unit above, and so for the copy of the unit above that (``_fsdp_param_group.py:647``): at most
  three units' gradients exist at a time. Without pinned memory each copy blocks the thread that launches backward.
- The user's optimizer steps on the CPU after all gradients have arrived (``finalize_backward``). On the CPU
  ``torch.optim.AdamW`` uses neither the fused nor the foreach kernel by default (``optim/optimizer.py:161``): its loop over
  tensors passes over the data eight times. Clipping precedes the step: ``torch.nn.utils.clip_grad_norm_`` over gradients on
  the host, one pass that reads them and one that scales them.

Embedding, each block, and head with the last norm are separate units, and the last is not released after forward, as in
pytorch/torchtitan at 018740b7 (``models/llama3/infra/parallelize.py``, ``apply_fsdp``). With tied embeddings the first and the
last are one unit (torchtitan pull 2522), which is on the GPU from the start of forward to the end of backward. It is planned
as resident and refreshed after the updates, which takes the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from autohete.errors import check_fields
from autohete.plan import Activations, Footprint, Format, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Judge
from autohete.plan.rules import Barrier, BlockingCopies, RefreshAfterUpdates, Slots, UpdatesAfterBackward
from autohete.policies import traffic
from autohete.policies.checkpointing import Checkpointing, choosable, with_checkpointing
from autohete.policies.flags import combinations
from autohete.policies.several_gpus import FSDP2, FSDP2_HOOKS, fsdp2_buffers, shared
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, Kind

#: ``_single_tensor_adam`` in fp32: decay of the weights 8, ``lerp_`` 12, ``mul_`` 8, ``addcmul_`` 12, ``sqrt`` 8, division 8,
#: ``add_`` 8, ``addcdiv_`` 16 bytes per parameter. The new allocations of ``sqrt`` and division are not counted.
_LOOP = 80
#: ``torch._fused_adamw_`` reads parameter, gradient and both moments (16) and writes all but the gradient (12).
_FUSED = 28


class Torch(StrEnum):
    """Versions that differ in how parameters are copied on one GPU."""

    V2_8 = "2.8"  # up to 2.8
    V2026 = "2026"  # 2.9 and later


@dataclass(frozen=True, slots=True)
class Fsdp2Offload:
    """FSDP2 with parameters, gradients and optimizer on the host.

    Args:
        checkpointing: full, selective, alternate, none, or the better of full and none.
        torch: the version whose behaviour is modelled.
        pin_memory: ``CPUOffloadPolicy.pin_memory``.
        fused: the optimizer is created with ``fused=True``.
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    torch: Torch = Torch.V2026
    pin_memory: bool = True
    fused: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[Fsdp2Offload]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        versions = tuple(Torch) if profile.hardware.gpus == 1 else (Torch.V2026,)  # several copy alike
        yield from combinations(
            cls, checkpointing=choosable(profile), torch=versions, pin_memory=(True, False), fused=(False, True)
        )

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        return with_checkpointing(self.checkpointing, lambda activations: self._plan(profile, activations), profile, judge)

    def _plan(self, profile: Profile, activations: Activations) -> Plan:
        tied, fp32, last = profile.workload.tied_embeddings, Format(4, self.pin_memory), len(profile.units) - 1
        gradients = Route(HOST_MEMORY, carried=fp32)
        update = Update(Processor.CPU, norm_on=Processor.CPU)

        def unit(block: int) -> UnitPlan:
            outer = block in (0, last)
            if outer and tied:
                return UnitPlan(update=update, gradients=gradients, refresh=fp32)
            in_forward, in_backward = self._ahead(profile, activations if block + 1 < last else Activations.KEEP)
            return UnitPlan(
                Activations.KEEP if outer else activations,
                Route(
                    HOST_MEMORY,
                    stays_after_forward=block == last,
                    ahead=in_forward,
                    ahead_in_backward=in_backward,
                    carried=fp32,
                ),
                update,
                gradients,
            )

        return Plan(
            policy="fsdp2_offload",
            units=shared((unit(0), *[unit(1)] * (last - 2), unit(last - 1), unit(last)), 3, profile),
            rules=(
                Slots(Kind.OFFLOAD_GRADIENTS, 3) if self.pin_memory else BlockingCopies(Kind.OFFLOAD_GRADIENTS),
                *fsdp2_buffers(profile),
                UpdatesAfterBackward(),
                RefreshAfterUpdates(),
                Barrier(),
            ),
            update_bytes=_FUSED if self.fused else 0,
            elementwise_bytes=0 if self.fused else _LOOP,
            footprint=Footprint(
                gpu_buffer_bytes=self._buffer_bytes(profile),
                host_optimizer_bytes=8 if self.pin_memory else 16,
                host_pinned_bytes=(4, 4) if self.pin_memory else (),
                one_host_copy=True,
            ),
            flat_buffers=FSDP2,
            hooks=FSDP2_HOOKS,
        )

    def _copies_when_needed(self, profile: Profile) -> bool:
        """Whether parameters are copied on the compute stream."""
        return self.torch is Torch.V2026 and profile.hardware.gpus == 1

    def _ahead(self, profile: Profile, activations_above: Activations) -> tuple[int, int]:
        """How many passes before its own a unit's parameters may be fetched, in forward and in backward."""
        if self._copies_when_needed(profile):
            return 0, 0
        if not self.pin_memory:  # the launching thread blocks: before backward of the unit above, but after its forward
            return 1, 0
        return 2, 1 if activations_above is Activations.KEEP else 2

    def _buffer_bytes(self, profile: Profile) -> int:
        """GPU buffers for copies of the largest unit, in addition to its parameters and its gradients."""
        element = profile.element_bytes
        master = 4 if traffic.is_mixed(profile) else 0
        unit = max(block.trained_parameters for block in profile.units)
        frozen = max(map(profile.frozen_bytes, range(len(profile.units))))  # needs no cast
        tensor = min(unit, profile.of_rank.largest_tensor)
        # Up: fp32 and its cast, for one tensor; or for one unit, plus the gathered copy.
        fetched = tensor * (element + master) if self._copies_when_needed(profile) else unit * (2 * element + master) + frozen
        return fetched + unit * (element + master)  # down: the reduced gradient, and its fp32 cast


SYSTEM = Fsdp2Offload
