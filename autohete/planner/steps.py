"""AutoHete's three integers and the resulting costs of each block, shared by program, search and policy."""

from __future__ import annotations

from dataclasses import dataclass

from autohete.lowering.clipping import scaling_seconds
from autohete.plan import Activations, Format, Plan, Processor, Route, UnitPlan
from autohete.profile import Profile
from autohete.quantities import rounded_when_pinned
from autohete.schedule import HOST_MEMORY

#: Gradients that may be on the GPU while they wait for their copy, including the one being computed.
GRADIENT_SLOTS = 2


@dataclass(frozen=True, slots=True, order=True)
class Counts:
    """AutoHete's three integers, over blocks in model order.

    Args:
        checkpointed: number of transformer blocks, from the first, that recompute their activations.
        offloaded: number of transformer blocks, from the first, whose parameters are offloaded.
        cpu_updated: number of blocks of any kind, from the last, that have their optimizer on the CPU.
    """

    checkpointed: int
    offloaded: int
    cpu_updated: int

    @property
    def moves_several(self) -> bool:
        """Whether any engine other than the GPU has more than one task, so that the order matters."""
        return self.offloaded > 0 or self.cpu_updated > 1

    def units(self, total: int, gradients: Format, upload: Format) -> tuple[UnitPlan, ...]:
        """The plans of ``total`` units, with the formats in which gradients and what the CPU updates are copied."""
        plans = []
        for unit in range(total):
            inner = 0 < unit < total - 1
            plans.append(
                UnitPlan(
                    activations=Activations.RECOMPUTE if inner and unit <= self.checkpointed else Activations.KEEP,
                    parameters=Route(HOST_MEMORY, fetched=upload) if inner and unit <= self.offloaded else Route(),
                    update_on=Processor.CPU if unit >= total - self.cpu_updated else Processor.GPU,
                    gradients=gradients,
                    refresh=upload,
                )
            )
        return tuple(plans)


class BlockCosts:
    """Seconds and bytes per block for each decision of a plan.

    Args:
        profile: times and sizes.
        plan: any plan of the policy; defines its formats, its updates and its footprint.

    Attributes, each a list over blocks:
        forward, backward, recompute, gpu_update, cpu_update: passes and updates; ``updates_last``: none precedes a backward.
        parameters: H2D, fetch or refresh of what the CPU updates; fetches: fetch of what the GPU updates.
        gradients: D2H; a write-back of parameters takes the same time.
        weights, states, input, activations, workspace: bytes on the GPU.
        host_updated, host_offloaded: host memory of what the CPU updates, and of offloaded parameters.
        pinned_updated, pinned_offloaded: the pinned part of it.
    """

    def __init__(self, profile: Profile, plan: Plan) -> None:
        blocks = profile.blocks
        counts = [block.parameters for block in blocks]
        self.count = len(blocks)
        self.forward = [block.forward_seconds for block in blocks]
        self.backward = [block.backward_seconds for block in blocks]
        self.recompute = self.forward
        self.gpu_update = [
            block.gpu_update_seconds + scaling_seconds(profile, plan, i, Processor.GPU) for i, block in enumerate(blocks)
        ]
        self.cpu_update = [
            profile.cpu_update_seconds(i, plan.update_bytes, plan.elementwise_bytes, beside_gpu=plan.updates_beside_gpu)
            + scaling_seconds(profile, plan, i, Processor.CPU)
            for i in range(self.count)
        ]
        self.updates_last = profile.workload.clips
        self.weights = [count * profile.element_bytes for count in counts]
        element, held = profile.element_bytes, plan.footprint
        self.gradients = [
            profile.d2h_seconds(unit.gradients.bytes_of(count, element)) for unit, count in zip(plan.units, counts, strict=True)
        ]
        self.parameters = [
            profile.h2d_seconds(unit.refresh.bytes_of(count, element)) for unit, count in zip(plan.units, counts, strict=True)
        ]
        self.fetches = [profile.h2d_seconds(size) for size in self.weights]
        self.states = [count * profile.optimizer_bytes for count in counts]
        self.input = [block.input_bytes for block in blocks]
        self.activations = [block.activation_bytes for block in blocks]
        self.workspace = [block.backward_workspace_bytes for block in blocks]
        self.pinned_updated = [sum(rounded_when_pinned(count * size) for size in held.host_pinned_bytes) for count in counts]
        self.host_updated = [
            count * held.host_optimizer_bytes + pinned for count, pinned in zip(counts, self.pinned_updated, strict=True)
        ]
        self.host_offloaded = self.pinned_offloaded = [count * held.host_parameter_bytes for count in counts]
        #: Offloaded parameters that the CPU updates are counted as part of what it updates.
        self.one_host_copy = held.one_host_copy
        self.loss = profile.loss
        #: The gradient of a tied embedding exists from the head's backward on.
        self.long_gradient = self.weights[0] if profile.workload.tied_embeddings else 0
