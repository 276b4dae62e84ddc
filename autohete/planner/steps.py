"""AutoHete's three integers and the resulting costs of each block, shared by program, search and policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autohete.plan import Activations, Format, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.moves import When
from autohete.planner.unit_costs import Costs, UnitCosts
from autohete.profile import Profile
from autohete.schedule import D2H, GPU_MEMORY, H2D, HOST_MEMORY, Value

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

    def units(self, total: int, gradients: Format, upload: Format, parts: int = 1) -> tuple[UnitPlan, ...]:
        """The plans of ``total`` units, with the formats in which gradients and updated parameters are copied.

        As many GPUs as there are ``parts`` share each unit's update (ZeRO stage 2), and the parameters that are offloaded
        (stage 3): these rest in parts where they are updated. With one part they share nothing.
        """
        plans = []
        for unit in range(total):
            inner = 0 < unit < total - 1
            planned = _planned(
                gradients, upload, parts, offloaded=inner and unit <= self.offloaded, on_cpu=unit >= total - self.cpu_updated
            )
            recomputed = inner and unit <= self.checkpointed
            plans.append(replace(planned, activations=Activations.RECOMPUTE) if recomputed else planned)
        return tuple(plans)


def _planned(gradients: Format, upload: Format, parts: int, *, offloaded: bool, on_cpu: bool) -> UnitPlan:
    """Where the parameters of a unit rest, and who updates them."""
    return UnitPlan(
        parameters=Route(HOST_MEMORY, carried=upload) if offloaded and (on_cpu or parts == 1) else Route(),
        update=Update(Processor.CPU if on_cpu else Processor.GPU),
        gradients=Route(HOST_MEMORY if on_cpu else GPU_MEMORY, carried=gradients),
        refresh=upload,
        zero_stage=0 if parts == 1 else 3 if offloaded else 2,
    )


@dataclass(frozen=True, slots=True)
class OnHost:
    """Bytes on the host of each block that the CPU updates, of each that is offloaded, and of each that is both."""

    updated: list[int]
    offloaded: list[int]
    both: list[int]


class BlockCosts:
    """Seconds and bytes per block for each decision of a plan.

    Args:
        profile: times and sizes.
        plan: any plan of the policy; defines its formats, its updates and its footprint.

    Attributes, each a list over blocks:
        forward, backward, recompute, gpu_update, cpu_update: passes and updates; ``updates_last``: none precedes a backward.
        parameters: H2D, fetch of what the CPU updates; refreshes: copy of it if it stays on the GPU.
        fetches, write_backs: H2D and D2H of offloaded parameters that the GPU updates; 0 where several GPUs keep them in parts.
        gradients: D2H, of one micro-batch.
        weights, gradient_bytes, states, input, activations, workspace: bytes on the GPU.
        kept: bytes on the GPU of offloaded parameters that it updates.
        trained: whether a block has trained parameters; ``first_trained``: those below have no backward.
        host, pinned: bytes on the host, and the pinned part of it.
    """

    def __init__(self, profile: Profile, plan: Plan) -> None:
        blocks, costs, hardware = profile.units, Costs(profile, plan), profile.hardware
        self.count, self.first_trained = len(blocks), profile.first_trained
        self.trained = [not block.is_frozen for block in blocks]
        self.shared, self.micro_batches = hardware.gpus > 1, profile.workload.micro_batches
        first = plan.units[0]
        copied = first.gradients.carried, first.refresh, hardware.gpus if first.zero_stage else 1

        def decided(*, offloaded: bool, on_cpu: bool) -> list[UnitCosts]:
            planned = _planned(*copied, offloaded=offloaded, on_cpu=on_cpu)
            return [costs.of(unit, planned) for unit in range(self.count)]

        here, on_cpu = decided(offloaded=False, on_cpu=False), decided(offloaded=False, on_cpu=True)
        away, away_on_cpu = decided(offloaded=True, on_cpu=False), decided(offloaded=True, on_cpu=True)
        reached = [i >= self.first_trained for i in range(self.count)]
        self.forward = [block.forward_seconds for block in blocks]
        self.backward = [block.backward_seconds * there for block, there in zip(blocks, reached, strict=True)]
        self.recompute = [block.recompute_seconds * there for block, there in zip(blocks, reached, strict=True)]
        self.gpu_update, self.cpu_update = [one.gpu_update for one in here], [one.cpu_update for one in on_cpu]
        self.updates_last = profile.workload.clips
        self.gradients = [one.seconds_at(D2H, When.AFTER_BACKWARD) for one in on_cpu]
        self.refreshes = [one.seconds(H2D) for one in on_cpu]
        self.parameters = [one.seconds_at(H2D, When.BEFORE_FORWARD) for one in away_on_cpu]
        self.fetches = [one.seconds_at(H2D, When.BEFORE_FORWARD) for one in away]
        self.write_backs = [one.seconds(D2H) for one in away]
        self.weights = [profile.parameter_bytes(i) for i in range(self.count)]
        self.gradient_bytes = [profile.gradient_elements(i) * profile.element_bytes for i in range(self.count)]
        self.states = [one.resting_bytes(GPU_MEMORY, Value.OPTIMIZER_STATES) for one in here]
        self.kept = [one.resting_bytes(GPU_MEMORY, Value.PARAMETER_SHARD) for one in away]
        #: Whether the CPU can update at all.
        self.updates_on_cpu = profile.cpu_updates
        self.input = [block.input_bytes for block in blocks]
        self.activations = [block.activation_bytes * there for block, there in zip(blocks, reached, strict=True)]
        self.workspace = [block.backward_workspace_bytes * there for block, there in zip(blocks, reached, strict=True)]
        self.host = OnHost(*([one.host_bytes for one in some] for some in (on_cpu, away, away_on_cpu)))
        self.pinned = OnHost(*([one.pinned_bytes for one in some] for some in (on_cpu, away, away_on_cpu)))
        self.loss = profile.loss
        #: The gradient of a tied embedding exists from the head's backward on.
        self.long_gradient = self.gradient_bytes[0] if profile.workload.tied_embeddings else 0
