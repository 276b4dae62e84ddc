"""FlashNeuron (Bae et al., FAST 2021): saved tensors to an SSD beside the GPU, in the order of forward, until the rest fits.

"FlashNeuron: SSD-Enabled Large-Batch Training of Very Deep Neural Networks". Based on github SNU-ARC/flashneuron at a5b578f,
``torch/csrc/autograd/saved_variable.cpp`` (``offloading_scheduler``, called in ``engine.cpp`` after the first backward, in
which all saved tensors have left on demand):

- What all saved tensors need, less 0.6 of the memory that is free without them, is to leave. Tensors are marked in the order in
  which forward saves them until their sum exceeds that (phase 1).
- A marked tensor is copied when it is saved, one after another. After each operation of backward the next one is fetched, in
  the reverse order (``tools/autograd/gen_autograd_functions.py``).
- Phase 2 exchanges marked tensors for later ones that compress, if the last copy would end after forward: outputs of ReLU and
  dropout as sparse rows, and in training with fp32 those that go in fp16. It is off here, as is compression: what transformers
  save is dense, and what goes in fp16 is not what is trained with.

The place is one of the hardware's. With ``beside = "gpu"``, GPU and drive exchange data directly, as there (GPUDirect);
otherwise through the host. The code can also use host memory: ``place=host``. Parameters, gradients and optimizer states stay
on the GPU, which updates after backward.

If copies are late, passes wait for memory. Differences: of a block, what leaves is copied as one when its forward has ended,
and fetched while the block above has its backward; embedding and head keep theirs. Tensors without a name in the profile go
with the input of the block, and tensors of at most 1 MiB, which stay there, as all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autohete.errors import InputError, check_fields
from autohete.plan import Plan, Route, UnitPlan
from autohete.plan.policy import Judge, Verdict
from autohete.plan.routes import SavedRoute
from autohete.plan.rules import GpuUpdatesAfterBackward
from autohete.policies.flags import combinations, place_names
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, HOST_MEMORY

#: Share of the free memory that saved tensors may take.
_USABLE = 0.6


@dataclass(frozen=True, slots=True)
class FlashNeuron:
    """FlashNeuron. Needs hardware with a table ``[places.nvme]``, or with that of another place; or ``place=host``.

    Args:
        place: where saved tensors rest.
    """

    place: str = "nvme"

    def __post_init__(self) -> None:
        check_fields(self)
        if Route(self.place).home == GPU_MEMORY:
            raise InputError(f"flashneuron:place={self.place} is where tensors come from: give a place such as nvme, or host")

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[FlashNeuron]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(cls, place=(*place_names(profile), HOST_MEMORY))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        plan = self._plan(profile)
        return plan if judge(plan).verdict is not Verdict.GPU_OUT_OF_MEMORY else replace(plan, memory_waits=True)

    def _plan(self, profile: Profile) -> Plan:
        elements, count = profile.element_bytes, len(profile.units)
        there = sum(profile.state_bytes(unit) + profile.parameter_bytes(unit) for unit in range(count))
        there += sum(unit.trained_parameters * elements for unit in profile.units)
        free = _USABLE * max(0, profile.hardware.gpu_capacity_bytes - there)
        excess = sum(unit.activation_bytes for unit in profile.units[profile.first_trained :]) - free
        units = [UnitPlan()] * count
        for unit in range(max(1, profile.first_trained), count - 1):
            if excess <= 0:
                break
            left, units[unit] = self._unit(profile, unit, excess)
            excess -= left
        return Plan("flashneuron", tuple(units), rules=(GpuUpdatesAfterBackward(),))

    def _unit(self, profile: Profile, unit: int, excess: float) -> tuple[int, UnitPlan]:
        """Bytes that leave a unit, up to the tensor with which ``excess`` is exceeded, and its plan."""
        costs = profile.units[unit]
        left = costs.activation_bytes - sum(one.size_bytes for one in costs.saved)  # the input, and what has no name
        staying = []
        for one in costs.saved:
            if left < excess:
                left += one.size_bytes
            else:
                staying.append(SavedRoute(one.name))
        return left, UnitPlan(kept=Route(self.place), saved=tuple(staying))


SYSTEM = FlashNeuron
