"""ZeRO-Infinity (Rajbhandari et al. 2021, arXiv 2104.07857) with the optimizer on NVMe, as DeepSpeed's ZeRO stage 3 runs it.

Based on github deepspeedai/DeepSpeed at 12e65a6b: ``runtime/swap_tensor/pipelined_optimizer_swapper.py``.

- Optimizer states are files, one for each sub-group and state. ``step`` processes one sub-group after another: it reads master,
  moments and gradient, unscales and updates them on the CPU, copies the 16-bit parameters, and writes master and moments.
- ``pipeline_read`` and ``pipeline_write`` (both off by default) read the next sub-group, and write the previous one, during the
  update of the one in between (``swap_in_optimizer_state``, ``swap_out_optimizer_state``).
- In backward each gradient is cast to fp32 and written to its file (``swap_out_gradients``) through two pinned buffers. The
  first read of a step waits for all writes (``flush_gradients``).
- Parameters of stage 3 rest on the GPU, or on the host (``offload_param``), from where modules fetch them one module ahead.
  There they are pinned, as with ``offload_param.pin_memory`` in the examples (off by default).
- Reads and writes go through locked buffers of the size of the largest sub-group in fp32 (``swap_tensor/utils.py``,
  ``SwapBufferManager``): four (``buffer_count``), which a sub-group takes, and twelve with pipelines, where one is read and one
  written beside it. They are permanent; here they last as long as they hold something.
- Norms of gradients, and in fp16 a search for infinite values, are as in :mod:`autohete.policies.twin_flow`.
- The host holds an array of all gradients in their own format (``grad_partitions_flat_buffer`` in ``stage3.py``), and the cast
  of one sub-group.

A sub-group is a unit here. Not modelled: a gradient smaller than ``MIN_AIO_BYTES`` stays on the host; writes overlap the
computation of the next gradients as long as a buffer is free. Here a pass waits for the write of the previous gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autohete.errors import check_fields
from autohete.plan import Activations, Footprint, Format, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Judge
from autohete.plan.rules import Barrier, BlockingCopies, UpdatesAfterBackward
from autohete.policies import traffic
from autohete.policies.checkpointing import Checkpointing, choosable, with_checkpointing
from autohete.policies.flags import check_place, combinations, if_several, place_names
from autohete.policies.several_gpus import ZERO3, ZERO3_ALL_REDUCE, shared, zero3_hooks
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, Kind


@dataclass(frozen=True, slots=True)
class ZeroInfinity:
    """ZeRO-Infinity with the optimizer on NVMe. Needs hardware with a table ``[places.nvme]``, or with that of another place.

    Args:
        checkpointing: full, selective, alternate, none, or the better of full and none.
        pipeline: ``pipeline_read`` and ``pipeline_write``.
        offload_param: parameters of the transformer blocks rest on the host.
        reduce_scatter: as in DeepSpeed's configuration; off, several GPUs all-reduce gradients.
        place: the place of the hardware where the optimizer rests.
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    pipeline: bool = False
    offload_param: bool = False
    reduce_scatter: bool = True
    place: str = "nvme"

    def __post_init__(self) -> None:
        check_fields(self)
        check_place("zero_infinity", self.place)

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[ZeroInfinity]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(
            cls,
            checkpointing=choosable(profile),
            pipeline=(False, True),
            offload_param=(False, True),
            reduce_scatter=if_several(profile, True, False),
            place=place_names(profile),
        )

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        return with_checkpointing(self.checkpointing, lambda activations: self._plan(profile, activations), profile, judge)

    def _plan(self, profile: Profile, activations: Activations) -> Plan:
        outer = UnitPlan(
            update=Update(Processor.CPU),
            gradients=Route(self.place, carried=Format(4)),
            states=Route(self.place, ahead=int(self.pipeline)),
        )
        inner = replace(outer, activations=activations)
        if self.offload_param:
            inner = replace(inner, parameters=Route(HOST_MEMORY))
        mixed, element = traffic.is_mixed(profile), profile.element_bytes
        largest = max(map(profile.part_of, range(len(profile.units))))
        return Plan(
            policy="zero_infinity",
            units=shared((outer, *[inner] * (len(profile.units) - 2), outer), 3, profile),
            rules=(BlockingCopies(Kind.WRITE_GRADIENTS), UpdatesAfterBackward(), Barrier()),
            update_bytes=traffic.ADAM_KERNEL,
            elementwise_bytes=traffic.UNSCALE + (traffic.CAST if mixed else 0) + traffic.search(profile),
            scales_gradients=True,
            check_bytes=traffic.norm(profile),
            footprint=Footprint(
                # Of states and gradients the host has what is in transit, and the gradients in their own format.
                host_optimizer_bytes=profile.optimizer_bytes + element,
                host_buffer_bytes=largest * element if mixed and not self.offload_param else 0,
                host_parameter_bytes=element,
            ),
            flat_buffers=ZERO3 if self.reduce_scatter else ZERO3_ALL_REDUCE,
            hooks=zero3_hooks(profile),
        )


SYSTEM = ZeroInfinity
