"""MLP-Offload (Maurya et al. 2025, arXiv 2509.02480): ZeRO-Infinity with less traffic to its drives.

Based on the README of its artifact (github DataStates/artifacts, MLP-Offload), which changes DeepSpeed's ``stage3.py``; the
paper's text was not read. Differences from ``zero_infinity``:

- Gradients are copied in 16 bit during backward and stay on the host. They are widened right before their update ("delayed
  in-place mixed-precision gradient conversion"), and backward writes nothing to a drive.
- Optimizer states are striped over local drives and a parallel file system, each used by one process at a time ("virtual tier
  concurrency control"). The table ``[places.nvme]`` stands for all of them together, with their throughput without contention.
- States are prefetched before their update and written back after it.
- Sub-groups are updated in alternating order (upwards, then downwards), so the last updated ones are in the host's cache for
  the next step ("cache-friendly ordering") and are neither read nor written. A sub-group is a unit here, and the order is
  always that of backward. As many states as the cache would hold rest on the host instead, which saves the same number of reads
  and writes in each iteration.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Footprint, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Judge, Verdict
from autohete.plan.rules import Barrier, UpdatesAfterBackward
from autohete.policies import traffic
from autohete.policies.checkpointing import Checkpointing, choosable, with_checkpointing
from autohete.policies.flags import check_place, combinations, if_several, place_names
from autohete.policies.several_gpus import ZERO3, ZERO3_ALL_REDUCE, shared, zero3_hooks
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY


@dataclass(frozen=True, slots=True)
class MlpOffload:
    """MLP-Offload. Needs hardware with a table ``[places.nvme]``, or with that of another place.

    Args:
        checkpointing: full, selective, alternate, none, or the better of full and none.
        cached: number of units whose states are cached in host memory. None: as many as fit.
        reduce_scatter: as in DeepSpeed's configuration; off, several GPUs all-reduce gradients.
        place: the place of the hardware where optimizer states rest.
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    cached: int | None = None
    reduce_scatter: bool = True
    place: str = "nvme"

    def __post_init__(self) -> None:
        check_fields(self)
        check_place("mlp_offload", self.place)
        if self.cached is not None and self.cached < 0:
            raise InputError(f"mlp_offload:cached={self.cached} must be 0 or more units, or left out")

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[MlpOffload]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(
            cls,
            checkpointing=choosable(profile),
            reduce_scatter=if_several(profile, True, False),
            place=place_names(profile),
        )

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        count = len(profile.units)

        def plan_for(activations: Activations) -> Plan:
            if self.cached is not None:
                return self._plan(profile, activations, min(self.cached, count))

            def too_many(cached: int) -> bool:  # memory grows with their number
                return judge(self._plan(profile, activations, cached)).verdict in (
                    Verdict.HOST_OUT_OF_MEMORY,
                    Verdict.PINNED_OUT_OF_MEMORY,
                )

            return self._plan(profile, activations, bisect_left(range(1, count + 1), True, key=too_many))

        return with_checkpointing(self.checkpointing, plan_for, profile, judge)

    def _plan(self, profile: Profile, activations: Activations, cached: int) -> Plan:
        """The plan in which the last ``cached`` units to be updated have their states on the host."""
        element, mixed, last = profile.element_bytes, traffic.is_mixed(profile), len(profile.units) - 1
        on_host = UnitPlan(update=Update(Processor.CPU), gradients=Route(HOST_MEMORY))
        on_drives = replace(on_host, states=Route(self.place, ahead=1))

        def unit(block: int) -> UnitPlan:
            found = on_host if block < cached else on_drives
            return replace(found, activations=activations) if 0 < block < last else found

        return Plan(
            policy="mlp_offload",
            units=shared(map(unit, range(last + 1)), 3, profile),
            rules=(UpdatesAfterBackward(), Barrier()),
            update_bytes=traffic.ADAM_KERNEL,
            elementwise_bytes=traffic.UNSCALE + traffic.casts(profile),
            scales_gradients=True,
            footprint=Footprint(
                # States if they are cached; the gradient, which stays; the 16-bit parameters for the upload.
                host_optimizer_bytes=profile.optimizer_bytes + element + (element if mixed else 0),
            ),
            flat_buffers=ZERO3 if self.reduce_scatter else ZERO3_ALL_REDUCE,
            hooks=zero3_hooks(profile),
        )


SYSTEM = MlpOffload
