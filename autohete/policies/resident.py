"""No offloading: ordinary training with everything on the GPU. The baseline, and the first to run out of memory.

Several GPUs train data-parallel: with stage 0 like PyTorch's DistributedDataParallel whose gradients are views of its buckets
(``gradient_as_bucket_view=True``, not its default; see ``bucket_bytes``), with stage 3 like FSDP2, where each unit is gathered
while the one before it is computed and released after each use. Reductions overlap backward, which from stage 2 on waits for a
free buffer as in FSDP2 or DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, FlatBuffers, Footprint, Hooks, Plan, UnitPlan
from autohete.plan.policy import Judge
from autohete.plan.rules import GpuUpdatesAfterBackward, Rule
from autohete.policies.checkpointing import Checkpointing, choosable, with_checkpointing
from autohete.policies.flags import combinations, if_several
from autohete.policies.several_gpus import (
    FSDP1,
    FSDP1_HOOKS,
    FSDP2,
    FSDP2_HOOKS,
    ZERO2,
    ZERO2_HOOKS,
    ZERO3,
    ZERO3_HOOKS,
    deepspeed_buckets,
    fsdp2_buffers,
    shared,
)
from autohete.profile import Profile

#: ``sub_group_size`` of DeepSpeed's stage 3.
_SUB_GROUP = 1_000_000_000
#: ``reduce_bucket_size`` of DeepSpeed, in elements.
_BUCKET = 500_000_000


@dataclass(frozen=True, slots=True)
class Resident:
    """Everything on the GPU. Gradients live until a fused AdamW uses them, after backward or in it.

    Args:
        checkpointing: full, selective, alternate, none, or the better of full and none.
        zero_stage: what several GPUs shard: 0 nothing, 1 optimizer states, 2 gradients as well, 3 parameters as well.
        in_backward: each unit is updated as soon as its gradients are complete, which frees them (torchtune's
            ``optimizer_in_bwd``).
        deepspeed: as DeepSpeed does it. Before the update the gradients of a GPU's part are put together in one tensor, cast
            to fp32 (``step`` in deepspeed/runtime/zero/stage_1_and_2.py at 0.18.6); with stage 3, of one sub-group at a time.
        fused_sums: products of backward add to the sums of micro-batches, so that no gradient exists besides its sum, as in
            LLMQ and with Megatron-LM's ``gradient_accumulation_fusion``.
        fsdp1: with stage 3, as ``FullyShardedDataParallel`` does it, whose parameters are views of what is gathered.
        reentrant: with ``fsdp1``, ``torch.utils.checkpoint(block, use_reentrant=True)`` around each FSDP module, as in
            transformers up to 4.51 (later versions checkpoint within it). Beside adapters, which are wrapped apart
            (``fsdp_auto_wrap_policy`` of PEFT, set by transformers' ``Trainer``), the frozen parameters of a block are released
            by a hook on the gradient of its input. The hook holds the node of this input until backward has ended
            (``_register_post_backward_reshard_only_hook`` and ``_finalize_params`` in
            torch/distributed/fsdp/_runtime_utils.py at 2.13). As checkpointing has detached the input, the node holds it and
            its gradient.
        no_sync: with stages 2 and 3, all micro-batches but the last run under FSDP1's ``no_sync()``, or FSDP2's
            ``set_requires_gradient_sync(False)``: each GPU sums whole gradients until the last reduces them
            (``_post_backward_hook`` in torch/distributed/fsdp/_runtime_utils.py and ``post_backward`` in
            _fully_shard/_fsdp_param_group.py at 2.13). Users are ``no_backward_sync`` of Lightning and, without
            ``sync_each_batch``, the ``Trainer`` of transformers (5.23, ``trainer.py``). Stages 0 and 1 always sum whole ones.
        bucket_bytes: with stage 0 on several GPUs, bytes per trained parameter of DistributedDataParallel's buckets beside the
            gradients, which is its default: each gradient is copied to its bucket, and back after the reduction, and buckets
            live as long as the model (``mark_variable_ready_dense`` and ``finalize_bucket_dense`` in
            torch/csrc/distributed/c10d/reducer.cpp at 2.13). 2 or 4, the size of a gradient: 4 under autocast, whose gradients
            are in fp32 as the parameters are. 0: gradients are views.
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    zero_stage: int = 0
    in_backward: bool = False
    deepspeed: bool = False
    fsdp1: bool = False
    reentrant: bool = False
    fused_sums: bool = False
    no_sync: bool = False
    bucket_bytes: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.zero_stage <= 3:
            raise InputError(f"resident:zero_stage={self.zero_stage} must be 0, 1, 2 or 3")
        if self.deepspeed and not self.zero_stage:
            raise InputError("resident:deepspeed is for zero_stage 1, 2 and 3, not 0: give one of them, or leave it out")
        if self.fsdp1 and self.zero_stage != 3:
            raise InputError(f"resident:fsdp1 is for zero_stage 3, not {self.zero_stage}: give it, or leave out fsdp1")
        if self.fsdp1 and self.deepspeed:
            raise InputError("resident:fsdp1 and deepspeed are two systems: leave out one of them")
        if self.reentrant and not (self.fsdp1 and self.checkpointing is Checkpointing.FULL):
            raise InputError(
                "resident:reentrant is checkpointing around FSDP's modules: give checkpointing=full and fsdp1, or leave it out"
            )
        if self.fused_sums and (self.deepspeed or self.zero_stage > 1):
            raise InputError(
                "resident:fused_sums keeps sums of whole gradients on each GPU, but DeepSpeed and zero_stage 2 and 3 reduce "
                "the gradients of each micro-batch: leave it out, or give zero_stage 0 or 1"
            )
        if self.no_sync and (self.deepspeed or self.zero_stage < 2):
            raise InputError(
                "resident:no_sync leaves out reductions that zero_stage 2 and 3 of PyTorch have, but not zero_stage "
                f"{self.zero_stage}{' of DeepSpeed' * self.deepspeed}: leave it out"
            )
        if self.bucket_bytes not in (0, 2, 4):
            raise InputError(
                f"resident:bucket_bytes={self.bucket_bytes} is the size of a gradient in a bucket: give 2 or 4, or 0 for views"
            )
        if self.bucket_bytes and (self.zero_stage or self.fused_sums):
            raise InputError(
                "resident:bucket_bytes is for DistributedDataParallel: give zero_stage=0 without fused_sums, or leave it out"
            )
        if self.deepspeed and self.in_backward:
            raise InputError("resident:deepspeed updates all at once, not in_backward: leave out one of them")

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[Resident]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        checkpointing = choosable(profile)
        yield from combinations(
            cls, checkpointing=checkpointing, zero_stage=if_several(profile, 0, 1, 2, 3), in_backward=(False, True)
        )
        if profile.hardware.gpus > 1:
            yield from (cls(one, stage, deepspeed=True) for one in checkpointing for stage in (1, 2, 3))
            yield from (cls(one, 3, fsdp1=True) for one in checkpointing)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""

        def plan_for(activations: Activations) -> Plan:
            inner = UnitPlan(activations)
            units = (UnitPlan(), *[inner] * (len(profile.units) - 2), UnitPlan())
            return Plan(
                policy="resident",
                units=shared(units, self.zero_stage, profile),
                rules=(*([] if self.in_backward else [GpuUpdatesAfterBackward()]), *self._buffers(profile)),
                sums_in_place=self.fused_sums,
                sums_whole=self.no_sync and profile.hardware.gpus > 1,
                holds_inputs=self.reentrant and profile.hardware.gpus > 1,
                footprint=Footprint(gpu_buffer_bytes=self._bucket_bytes(profile), gpu_update_bytes=self._update_bytes(profile)),
                flat_buffers=self._flat_buffers,
                hooks=self._hooks(profile.hardware.gpus),
            )

        return with_checkpointing(self.checkpointing, plan_for, profile, judge)

    def _buffers(self, profile: Profile) -> tuple[Rule, ...]:
        """The places for gradients before their reduction, where these are freed by it and the system limits them."""
        if self.zero_stage < 2 or self.fsdp1:
            return ()
        return deepspeed_buckets(profile, self.zero_stage, _BUCKET) if self.deepspeed else fsdp2_buffers(profile)

    @property
    def _flat_buffers(self) -> FlatBuffers:
        if self.zero_stage == 3:
            return ZERO3 if self.deepspeed else FSDP1 if self.fsdp1 else FSDP2
        return ZERO2 if self.deepspeed else FlatBuffers(reduce_copies=2 if self.bucket_bytes else 0)

    def _hooks(self, gpus: int) -> Hooks:
        """DeepSpeed hooks its modules on one GPU as well; there is no use for FSDP then."""
        if self.deepspeed:
            return ZERO3_HOOKS if self.zero_stage == 3 else ZERO2_HOOKS
        if self.zero_stage < 3 or gpus == 1:
            return Hooks()
        return FSDP1_HOOKS if self.fsdp1 else FSDP2_HOOKS

    def _bucket_bytes(self, profile: Profile) -> int:
        """What buckets beside gradients take."""
        if profile.hardware.gpus == 1:
            return 0
        return self.bucket_bytes * sum(unit.trained_parameters for unit in profile.units)

    def _update_bytes(self, profile: Profile) -> int:
        """What is held while one GPU updates its part: one tensor in the format of gradients, and its fp32 cast."""
        if not self.deepspeed:
            return 0
        part = profile.hardware.part_of(sum(unit.trained_parameters for unit in profile.units))
        if self.zero_stage == 3:
            part = min(part, _SUB_GROUP)
        return part * (profile.element_bytes + 4 * profile.workload.precision.is_mixed)


SYSTEM = Resident
