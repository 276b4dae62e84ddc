"""Smart-Infinity (Jang et al., HPCA 2024, arXiv 2403.06664): ZeRO-Infinity whose drives update what rests in them.

Based on github AIS-SNU/smart-infinity at 00f5f28, a fork of DeepSpeed 0.9.3 with kernels for the FPGA of Samsung's SmartSSD
(``deepspeed/runtime/zero/stage3.py``, ``_optimizer_step_with_fpga``; ``deepspeed/ops/csrc/adam/cpu_adam.cpp``,
``hls_smartInfinity``), and on the paper.

- In backward each gradient is cast to fp32 and written to the drive, as in ZeRO-Infinity.
- When all gradients are there, the drives read states and gradients, update, and write the states, sub-group by sub-group,
  over a switch within each drive. The kernel unscales and clips on the way.
- Updated parameters are read to the host in fp32 (4 of the 28 bytes that ZeRO-Infinity moves over the bus per parameter and
  step), while other sub-groups are updated, and copied to the GPU in 16 bit. With ``half`` the drives cast them to 16 bit.
- Sub-groups are dealt to the drives in turn. Here the place stands for all drives, with the sum of their rates.
- Parameters rest on the host (``offload_param``), where they are pinned; all blocks are recomputed as the user says.

Needs hardware whose place computes: ``places.nvme.update_bandwidth``. The runtime does not execute its plans. Not modelled: the
handler, which writes moments while the next sub-group is read; Top-K compression, which changes gradients; the cast of updated
parameters on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autohete.errors import check_fields
from autohete.plan import Activations, Footprint, Format, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Judge
from autohete.plan.rules import Barrier, BlockingCopies, UpdatesAfterBackward
from autohete.policies.checkpointing import Checkpointing, choosable, with_checkpointing
from autohete.policies.flags import check_place, combinations, place_names
from autohete.policies.several_gpus import ZERO3, shared, zero3_hooks
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, Kind


@dataclass(frozen=True, slots=True)
class SmartInfinity:
    """Smart-Infinity. Needs hardware with a table ``[places.nvme]`` that has ``update_bandwidth``, or with another such place.

    Args:
        checkpointing: full, selective, alternate, none, or the better of full and none.
        half: drives return updated parameters in the format of the GPU instead of fp32.
        place: the place of the hardware where the optimizer rests, and which updates.
    """

    checkpointing: Checkpointing = Checkpointing.BEST
    half: bool = False
    place: str = "nvme"

    def __post_init__(self) -> None:
        check_fields(self)
        check_place("smart_infinity", self.place)

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[SmartInfinity]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        half = (False, True) if profile.element_bytes < 4 else (False,)
        yield from combinations(cls, checkpointing=choosable(profile), half=half, place=place_names(profile))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        return with_checkpointing(self.checkpointing, lambda activations: self._plan(profile, activations), profile, judge)

    def _plan(self, profile: Profile, activations: Activations) -> Plan:
        outer = UnitPlan(
            update=Update(Processor.PLACE, returned_bytes=None if self.half else 4),
            gradients=Route(self.place, carried=Format(4)),
            states=Route(self.place),
        )
        inner = replace(outer, activations=activations, parameters=Route(HOST_MEMORY))
        element, masters = profile.element_bytes, profile.workload.has_masters
        states = profile.optimizer_bytes + (0 if masters else element)  # that rest in the place
        return Plan(
            policy="smart_infinity",
            units=shared((outer, *[inner] * (len(profile.units) - 2), outer), 3, profile),
            rules=(BlockingCopies(Kind.WRITE_GRADIENTS), UpdatesAfterBackward(), Barrier()),
            # The host has the gradients in their own format (``grad_partitions_flat_buffer``), and the parameters.
            footprint=Footprint(host_optimizer_bytes=states + element, host_parameter_bytes=element),
            flat_buffers=ZERO3,
            hooks=zero3_hooks(profile),
        )


SYSTEM = SmartInfinity
