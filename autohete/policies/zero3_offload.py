"""DeepSpeed's ZeRO stage 3 with its optimizer on the host, and with ``offload_param`` its 16-bit parameters, too.

Based on DeepSpeed 0.19.6 at edaa7221. The optimizer is that of :mod:`autohete.policies.twin_flow` with everything updated on
the CPU. Parameters on the host (``partition_parameters.py``, ``partitioned_param_coordinator.py``):

- A partition is copied in its own format when its module, or one shortly before it, begins (``fetch_sub_module``), on a stream
  of its own; several GPUs then gather it. It is released after each use, except that the head stays for backward, and what is
  used again soon: the modules that follow are counted, parameter by parameter, until they have ``stage3_max_reuse_distance``
  elements, and what is among them stays (``__params_to_release``, once a step has been traced). Here a unit stays as a whole,
  and the modules between are those of the units above, forward, in their recomputation and backward, and its own. DeepSpeed's
  default of 1e9 elements keeps the last few units, or all of a small model; the files that are written set 0. Reuse within
  backward, of what a recomputation has fetched, is part of the unit's pass.
- Here a unit is fetched during the one before; how far ahead DeepSpeed prefetches depends on ``stage3_prefetch_bucket_size``.
  ``stage3_max_live_parameters`` limits this alone.
- The optimizer's step casts the updated masters into the partitions on the host, so nothing is copied to the GPU.
- Trained partitions lie in one flat buffer, which is pinned whatever ``offload_param.pin_memory`` is
  (``_create_param_groups_fp16_flat_cpu_memory``); frozen ones are where they were made. With ``pin_memory`` each partition was
  first pinned by itself (``_partition_param``); when it moves to the flat buffer, PyTorch's allocator keeps that memory.
- Not modelled: parameters of fewer than ``stage3_param_persistence_threshold`` elements stay on the GPU.

With tied embeddings the first and the last unit are one, which stays on the GPU from the start of forward to the end of
backward. It is planned as resident and refreshed after its update, which takes the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Format, Plan, Route, UnitPlan
from autohete.plan.policy import Judge
from autohete.policies.checkpointing import Checkpointing, choosable, with_checkpointing
from autohete.policies.flags import combinations
from autohete.policies.host_arrays import SUB_GROUP, pinned, tensors
from autohete.policies.several_gpus import check_bucket_size
from autohete.policies.twin_flow import TwinFlow
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY


@dataclass(frozen=True, slots=True)
class Zero3Offload:
    """ZeRO stage 3 with offload.

    Args:
        checkpointing: full, selective, alternate, none, or the better of full and none.
        offload_param: the parameters rest on the host, as well as the optimizer.
        pin_memory: ``offload_optimizer.pin_memory``, off by default up to 0.19.4. Off, gradient copies block backward.
        pin_parameters: ``offload_param.pin_memory``. Copies of units with frozen parameters need it to be fast.
        bucket_size: ``reduce_bucket_size`` in millions of elements. ``transformers`` sets the square of the hidden size.
        reuse_distance: ``stage3_max_reuse_distance`` in millions of elements, 1000 by DeepSpeed's default.
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    offload_param: bool = True
    pin_memory: bool = True
    pin_parameters: bool = True
    bucket_size: int = 500
    reuse_distance: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_bucket_size("zero3_offload", self.bucket_size)
        if not 0 <= self.reuse_distance <= 100_000:
            raise InputError(
                f"zero3_offload:reuse_distance={self.reuse_distance} must be between 0 and 100000 million elements"
            )
        if self.reuse_distance and not self.offload_param:
            raise InputError("zero3_offload:reuse_distance changes nothing if parameters stay on the GPU: leave it out")
        if not (self.offload_param or self.pin_parameters):
            raise InputError("zero3_offload:pin_parameters=off changes nothing if parameters stay on the GPU: leave it out")

    def _optimizer(self) -> TwinFlow:
        return TwinFlow(
            self.checkpointing, ratio=100, pin_memory=self.pin_memory, bucket_size=self.bucket_size, sub_group_size=SUB_GROUP
        )

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[Zero3Offload]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        switch = (True, False)
        yield from combinations(
            cls,
            checkpointing=choosable(profile),
            offload_param=switch,
            pin_memory=switch,
            pin_parameters=switch,
            bucket_size=(500, 50),
        )

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        if not self.offload_param:
            return self._optimizer().plan(profile, judge)
        return with_checkpointing(self.checkpointing, lambda activations: self._plan(profile, activations), profile, judge)

    def _plan(self, profile: Profile, activations: Activations) -> Plan:
        plan = self._optimizer().with_activations(profile, activations)
        last, tied = len(plan.units) - 1, profile.workload.tied_embeddings
        element, held = profile.element_bytes, plan.footprint
        trained = [*map(profile.part_of, range(len(profile.units)))]
        leaving = [block for block in range(last + 1) if not tied or block not in (0, last)]

        first_staying = self._first_staying(profile, plan.units)

        @cache
        def offloaded(unit: UnitPlan, *, stays: bool, pinned: bool) -> UnitPlan:
            route = Route(HOST_MEMORY, stays_after_forward=stays, carried=Format(element, pinned))
            return replace(unit, parameters=route, refresh=Format())

        # The flat buffer, less what is counted with its units; and what was pinned before.
        flat = pinned(profile, [sum(trained)], element) - element * sum(trained[block] for block in leaving)
        before = pinned(profile, map(profile.hardware.part_of, tensors(profile)), element) if self.pin_parameters else 0
        return replace(
            plan,
            policy="zero3_offload",
            units=tuple(
                offloaded(unit, stays=block >= first_staying, pinned=self.pin_parameters or not profile.frozen_bytes(block))
                if block in leaving
                else unit
                for block, unit in enumerate(plan.units)
            ),
            footprint=replace(
                held,
                host_parameter_bytes=element,
                host_buffer_bytes=0 if self.pin_memory else element * sum(trained),  # no cast in a temporary
                host_pinned_buffer_bytes=held.host_pinned_buffer_bytes + flat + before,
            ),
        )

    def _first_staying(self, profile: Profile, units: tuple[UnitPlan, ...]) -> int:
        """The first of the units that stay between forward and backward."""
        last = len(units) - 1
        tied = profile.units[0].parameters if profile.workload.tied_embeddings else 0  # the head uses this matrix
        first, distance = last, 2 * (profile.units[last].parameters + tied)
        while first > profile.first_trained:
            below = first - 1
            if distance + profile.units[below].parameters >= self.reuse_distance * 1_000_000:
                break
            first, distance = (
                below,
                distance + (2 + (units[below].activations is not Activations.KEEP)) * profile.units[below].parameters,
            )
        return first


SYSTEM = Zero3Offload
