"""ZenFlow (arXiv 2505.12242), in DeepSpeed since 0.17.5: ZeRO-Offload whose CPU updates every few steps, beside the next ones.

Based on github deepspeedai/DeepSpeed at edaa7221, ``runtime/zenflow/zenflow_stage_1_and_2.py``; ``"zenflow"`` in
``zero_optimization``. It changes the mathematics: most of a gradient takes part in an update late.

- ``update_interval`` steps of ZenFlow are the micro-batches of an iteration here, as DeepSpeed counts them too
  (``configure_zenflow`` sets ``gradient_accumulation_steps``): the host sums their gradients as ZeRO-Offload's.
- In each step a tenth of the columns of each matrix, those of the largest gradients, is updated on the GPU, which has their
  moments in the format of the parameters (``ZenFlowSelectiveAdamW``). All GPUs have all of these.
- After the last step the host waits for the update before, which another process has computed beside the steps
  (``wait_last_update_and_copy``). Its parameters are cast, copied and gathered; then the next update is submitted. Without
  ``overlap_step`` it is waited for at once.
- The processes share masters, two buffers of gradients and copies of the masters, in memory that is not pinned, beside the
  pinned buffer that they were moved from (``share_memory_``); the other one has both moments twice.

Not modelled: unscaling by the process that trains, which is part of the update here; sums that come to the GPU and go back,
which the CPU adds up here; the choice of columns, which is rare; the broadcast of their gradients; half of the cores, which the
other process has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Plan, UnitPlan
from autohete.plan.policy import Judge
from autohete.policies.checkpointing import Checkpointing, choosable, with_checkpointing
from autohete.policies.flags import combinations
from autohete.policies.several_gpus import check_bucket_size
from autohete.policies.zero_offload import ZeroOffload
from autohete.profile import Profile

#: Numbers that are read and written for each parameter of a chosen column in a step: its gradient is gathered and cloned (4),
#: the parameter gathered and put back (4), and foreach kernels of AdamW in between (27).
_ACCESSES = 35
#: Numbers that the GPU holds for each of them: two moments, the gradient, and until the update a copy of the parameter.
_HELD = 4
#: Bytes of the host for each parameter besides ZeRO-Offload's: two buffers of gradients, other moments, and the copy.
_SHARED_BYTES = 20


@dataclass(frozen=True, slots=True)
class ZenFlow:
    """ZenFlow.

    Args:
        checkpointing: full, selective, alternate, none, or the better of full and none.
        topk_ratio: percentage of the columns that the GPU updates.
        overlap_step: the CPU updates beside the next steps, with gradients of those before.
        bucket_size: ``reduce_bucket_size`` in millions of elements.
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    topk_ratio: int = 10
    overlap_step: bool = True
    bucket_size: int = 500

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.topk_ratio <= 100:
            raise InputError(f"zenflow:topk_ratio={self.topk_ratio} must be between 0 and 100 percent")
        check_bucket_size("zenflow", self.bucket_size)

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[ZenFlow]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(cls, checkpointing=choosable(profile), topk_ratio=(10, 1), bucket_size=(500, 50))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        return with_checkpointing(self.checkpointing, partial(self._plan, profile), profile, judge)

    def _plan(self, profile: Profile, activations: Activations) -> Plan:
        offload = ZeroOffload(self.checkpointing, bucket_size=self.bucket_size, delayed_update=self.overlap_step)
        plan, chosen = offload.with_activations(profile, activations), self.topk_ratio / 100
        trained, footprint = sum(unit.trained_parameters for unit in profile.units), plan.footprint
        held = round(_HELD * chosen * profile.element_bytes * trained)
        return replace(
            plan,
            policy="zenflow",
            units=tuple(map(self._in_shared_memory, plan.units)) if self.overlap_step else plan.units,
            gradient_bytes=_ACCESSES * chosen * profile.element_bytes,
            footprint=replace(
                footprint,
                gpu_buffer_bytes=footprint.gpu_buffer_bytes + held,
                host_optimizer_bytes=footprint.host_optimizer_bytes + _SHARED_BYTES * self.overlap_step,
            ),
        )

    def _in_shared_memory(self, unit: UnitPlan) -> UnitPlan:
        """Complete gradients come to shared memory, and the copy of the masters is cast to a temporary; neither is pinned."""
        gradients, refresh = (replace(form, pinned=False) for form in (unit.gradients.carried, unit.refresh))
        return replace(
            unit,
            gradients=replace(unit.gradients, carried=gradients),
            refresh=refresh,
            sums_pinned=unit.accumulates_on_host,
        )


SYSTEM = ZenFlow
