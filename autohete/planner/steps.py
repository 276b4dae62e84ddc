"""AutoHete's three integers, and what each block costs under them: what program, search and policy share."""

from __future__ import annotations

from dataclasses import dataclass

from autohete.plan import Activations, BlockPlan, Placement, Processor
from autohete.profile import Profile

#: Gradients that may wait on the GPU for their copy, the one being made included.
GRADIENT_SLOTS = 2


@dataclass(frozen=True, slots=True, order=True)
class Counts:
    """AutoHete's three integers, over blocks in model order.

    Args:
        checkpointed: the first so many transformer blocks recompute their activations.
        offloaded: the first so many transformer blocks have their parameters offloaded.
        cpu_updated: the last so many of all blocks have their optimizer on the CPU.
    """

    checkpointed: int
    offloaded: int
    cpu_updated: int

    def blocks(self, total: int) -> tuple[BlockPlan, ...]:
        """The decisions for each of ``total`` blocks."""
        plans = []
        for block in range(total):
            inner = 0 < block < total - 1
            plans.append(
                BlockPlan(
                    activations=Activations.RECOMPUTE if inner and block <= self.checkpointed else Activations.KEEP,
                    parameters=Placement.OFFLOADED if inner and block <= self.offloaded else Placement.RESIDENT,
                    optimizer=Processor.CPU if block >= total - self.cpu_updated else Processor.GPU,
                )
            )
        return tuple(plans)


class BlockCosts:
    """Seconds and bytes per block as the plan's choices switch them on.

    Attributes, each a list over blocks:
        forward, backward, recompute, gpu_update, cpu_update, parameters (H2D; fetch or refresh), gradients (D2H; a
        write-back of parameters takes as long).
    """

    def __init__(self, profile: Profile, update_bytes: float) -> None:
        element = profile.element_bytes
        blocks = profile.blocks
        self.count = len(blocks)
        self.forward = [block.forward_seconds for block in blocks]
        self.backward = [block.backward_seconds for block in blocks]
        self.recompute = self.forward
        self.gpu_update = [block.gpu_update_seconds for block in blocks]
        self.cpu_update = [profile.cpu_update_seconds(i, update_bytes) for i in range(len(blocks))]
        self.weights = [block.parameters * element for block in blocks]
        self.gradients = [profile.d2h_seconds(size) for size in self.weights]
        self.parameters = [profile.h2d_seconds(size) for size in self.weights]
        self.states = [block.parameters * profile.optimizer_bytes for block in blocks]
        self.input = [block.input_bytes for block in blocks]
        self.activations = [block.activation_bytes for block in blocks]
        self.workspace = [block.backward_workspace_bytes for block in blocks]
        self.loss = profile.loss
        #: The gradient of a tied embedding begins to exist with the head's backward.
        self.long_gradient = self.weights[0] if profile.workload.tied_embeddings else 0
