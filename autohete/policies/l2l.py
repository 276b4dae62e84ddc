"""L2L, layer to layer (Pudipeddi et al. 2020, arXiv 2002.05645): one transformer block on the GPU at a time.

By default as the artifact of StrongHold runs it, github strongh2/sc22-ae at f1842755, ``L2L/megatron`` (fp32):

- Hooks move a block to the GPU before its forward and back to the host after it, although it has not changed
  (``Module.cuda()`` and ``cpu()``, ``training.py:244-272``). The GPU waits for both copies. Each copy home goes to pageable
  memory that is allocated for it, and freed when the block leaves again: most of its pages are new. Embedding and head stay on
  the GPU.
- Every block is checkpointed; its input stays on the GPU. The hook before its recomputation first moves the block above home.
- Gradients of a block go home with its parameters: ``cpu()`` moves both.
- Then CPUAdam updates one tensor after another, from copies in host memory (``optimizer/cpp/ds/cpu_adam.cpp:363``).
- Three bugs of the artifact are not modelled. What is on the GPU at the update (embedding, head and the first block) is never
  updated; here embedding and head are copied to the host, and the first block is treated like the others. CPUAdam gets matrices
  and updates ``size(0)`` elements of each (``cpu_adam.cpp:402``), one of each row; here all. The GPU has one buffer for all
  gradients (``model/distributed.py``, ``MemoryBuffer``), whose hooks are lost when a block first moves to another device
  (PyTorch, ``VariableHooks::set_data``), so that it keeps zeros; before the update it replaces the gradients on the host
  (``optimizer/optimizer.py:1083-1098``).

``paper`` follows the abstract, and github TezRomacH/layer-to-layer-pytorch at 0688cc65 (``l2l.py``), which implements it;
the text of the paper was not read:

- Blocks are copied for each use, not moved, and a gradient is copied home after its backward. The GPU waits for both. The
  implementation copies from pageable memory; here it is pinned.
- "By running the optimizer in the host": the host updates a block as soon as it has its gradient, in parallel with the GPU.
- Inputs of blocks (the "stash") may rest on the host: the "constant memory variation".
- Micro-batches inside a layer are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from autohete.errors import InputError, check_fields
from autohete.plan import Activations, Footprint, Format, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Judge
from autohete.plan.rules import Barrier, BlockingCopies, RefreshAfterUpdates, UpdatesAfterBackward
from autohete.policies import traffic
from autohete.policies.flags import combinations
from autohete.policies.several_gpus import check_one_gpu
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, Kind


class L2LOptimizer(StrEnum):
    """The processor that updates."""

    GPU = "gpu"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class L2L:
    """L2L.

    Args:
        paper: follow the paper instead of the artifact.
        host_stash: inputs of blocks rest on the host (in the paper).
        update_on: the processor that updates. With ``gpu`` and ``paper``, the states of one unit at a time are fetched from
            the host for its update; neither the abstract nor the artifact does this.
    """

    paper: bool = False
    host_stash: bool = False
    update_on: L2LOptimizer = L2LOptimizer.CPU

    def __post_init__(self) -> None:
        check_fields(self)
        if self.host_stash and not self.paper:
            raise InputError("l2l:host_stash=on is not in the artifact, whose inputs stay on the GPU: give paper, too, or off")
        if self.update_on is L2LOptimizer.GPU and not self.paper:
            raise InputError(f"l2l:update_on={self.update_on} is not in the artifact: give paper, too, or update_on=cpu")

    @classmethod
    def variants(cls, profile: Profile) -> Iterator[L2L]:
        """What users can choose; see :func:`autohete.policies.search_space`."""
        yield from combinations(cls, paper=(False, True), host_stash=(False, True))

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`."""
        check_one_gpu("l2l", profile)
        return self._paper(profile) if self.paper else _artifact(profile)

    def _paper(self, profile: Profile) -> Plan:
        on_gpu, element = self.update_on is L2LOptimizer.GPU, profile.element_bytes
        kept, states = (Route(HOST_MEMORY, ahead=0) if host else Route() for host in (self.host_stash, on_gpu))
        outer = UnitPlan(update=Update(Processor(self.update_on)), states=states)
        inner = replace(outer, activations=Activations.RECOMPUTE, parameters=Route(HOST_MEMORY, ahead=0), kept=kept)
        sent = (Kind.OFFLOAD_ACTIVATIONS, Kind.WRITE_BACK_STATES, Kind.WRITE_BACK_BACKWARD, Kind.OFFLOAD_GRADIENTS)
        return Plan(
            policy="l2l",
            units=_units(profile, outer, inner),
            rules=tuple(map(BlockingCopies, sent)),
            update_bytes=0 if on_gpu else traffic.ADAM_KERNEL,
            elementwise_bytes=0 if on_gpu else traffic.casts(profile),
            footprint=Footprint(
                host_optimizer_bytes=profile.optimizer_bytes,
                host_pinned_bytes=(element,),
                host_parameter_bytes=element,
            ),
        )


def _artifact(profile: Profile) -> Plan:
    element = profile.element_bytes
    # A block's parameters go home with its gradients; embedding and head are copied for the update.
    outer = UnitPlan(
        update=Update(Processor.CPU),
        gradients=Route(HOST_MEMORY, carried=Format(2 * element, pinned=False, fresh=True)),
        refresh=Format(element, pinned=False),
    )
    route = Route(HOST_MEMORY, ahead=0, carried=Format(pinned=False, fresh=True), moves=True)
    return Plan(
        policy="l2l",
        units=_units(profile, outer, replace(outer, activations=Activations.RECOMPUTE, parameters=route)),
        rules=(
            BlockingCopies(Kind.WRITE_BACK_FORWARD),
            BlockingCopies(Kind.OFFLOAD_GRADIENTS),
            UpdatesAfterBackward(),
            RefreshAfterUpdates(),
            Barrier(),
        ),
        update_bytes=traffic.ADAM_KERNEL,
        elementwise_bytes=traffic.casts(profile),
        footprint=Footprint(
            gpu_buffer_bytes=sum(unit.trained_parameters for unit in profile.units) * element,
            host_optimizer_bytes=profile.optimizer_bytes + element,
            host_parameter_bytes=element,
        ),
    )


def _units(profile: Profile, outer: UnitPlan, inner: UnitPlan) -> tuple[UnitPlan, ...]:
    return (outer, *[inner] * (len(profile.units) - 2), outer)


SYSTEM = L2L
