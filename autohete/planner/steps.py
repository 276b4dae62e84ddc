"""AutoHete's three integers and the resulting costs of each block, shared by program, search and policy."""

from __future__ import annotations

from dataclasses import dataclass

from autohete.lowering import durations
from autohete.lowering.clipping import scaled_bytes
from autohete.plan import Activations, Format, Plan, Processor, Rest, Route, UnitPlan
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, HOST_MEMORY
from autohete.workload.optimizers import has_cpu_kernel

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

    def units(self, total: int, gradients: Format, upload: Format, gpus: int = 1) -> tuple[UnitPlan, ...]:
        """The plans of ``total`` units on ``gpus`` GPUs, with the formats in which gradients and updated parameters are copied.

        Several GPUs share each unit's update (ZeRO stage 2), and the parameters that are offloaded (stage 3): these rest in
        parts where they are updated.
        """
        plans = []
        for unit in range(total):
            inner, on_cpu = 0 < unit < total - 1, unit >= total - self.cpu_updated
            offloaded = inner and unit <= self.offloaded
            plans.append(
                UnitPlan(
                    activations=Activations.RECOMPUTE if inner and unit <= self.checkpointed else Activations.KEEP,
                    parameters=Route(HOST_MEMORY, fetched=upload) if offloaded and (on_cpu or gpus == 1) else Route(),
                    update_on=Processor.CPU if on_cpu else Processor.GPU,
                    gradients=Rest(HOST_MEMORY if on_cpu else GPU_MEMORY, carried=gradients),
                    refresh=upload,
                    zero_stage=0 if gpus == 1 else 3 if offloaded else 2,
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
        parameters: H2D, fetch of what the CPU updates; refreshes: copy of it if it stays on the GPU.
        fetches, write_backs: H2D and D2H of offloaded parameters that the GPU updates; 0 where several GPUs keep them in parts.
        gradients: D2H.
        weights, gradient_bytes, states, input, activations, workspace: bytes on the GPU.
        kept: bytes on the GPU of offloaded parameters that it updates.
        trained: whether a block has trained parameters; ``first_trained``: those below have no backward.
        host_updated, host_offloaded: host memory of what the CPU updates, and of offloaded parameters.
        pinned_updated, pinned_offloaded: the pinned part of it.
    """

    def __init__(self, profile: Profile, plan: Plan) -> None:
        blocks = profile.units
        hardware = profile.hardware
        self.shared = hardware.gpus > 1
        whole = [block.trained_parameters for block in blocks]
        #: What one GPU, or its part of the host, copies and updates.
        counts = [hardware.part_of(count) for count in whole]
        self.count, self.first_trained = len(blocks), profile.first_trained
        self.trained = [not block.is_frozen for block in blocks]
        reached = [i >= self.first_trained for i in range(self.count)]
        self.forward = [block.forward_seconds for block in blocks]
        self.backward = [block.backward_seconds * there for block, there in zip(blocks, reached, strict=True)]
        self.recompute = [block.recompute_seconds * there for block, there in zip(blocks, reached, strict=True)]
        shares = [count / max(all_, 1) if self.shared else float(all_ > 0) for count, all_ in zip(counts, whole, strict=True)]
        self.gpu_update = [
            durations.gpu_update(i, scaled_bytes(profile, plan, i, Processor.GPU), shares[i])(profile)
            for i in range(self.count)
        ]
        self.cpu_update = [
            durations.cpu_update(
                i,
                plan.update_bytes,
                plan.elementwise_bytes,
                scaled_bytes(profile, plan, i, Processor.CPU),
                shares[i],
            )(profile)
            for i in range(self.count)
        ]
        self.updates_last = profile.workload.clips
        self.weights = [profile.parameter_bytes(i) for i in range(self.count)]
        element, held = profile.element_bytes, plan.footprint
        self.gradient_bytes = [count * element for count in whole]
        units = list(zip(plan.units, counts, self.trained, strict=True))
        self.gradients = [
            profile.d2h_seconds(unit.gradients.carried.bytes_of(count, element)) * trained for unit, count, trained in units
        ]
        self.refreshes = [
            profile.h2d_seconds(unit.refresh.bytes_of(count, element)) * trained for unit, count, trained in units
        ]
        self.parameters = [
            profile.h2d_seconds(unit.refresh.bytes_of(count, element) + hardware.part_of(profile.frozen_bytes(i)))
            for i, (unit, count, _) in enumerate(units)
        ]
        self.fetches = [0.0 if self.shared else profile.h2d_seconds(size) for size in self.weights]
        self.write_backs = [0.0 if self.shared else seconds for seconds in self.gradients]
        self.kept = [count * element if self.shared else 0 for count in counts]
        self.states = [profile.state_bytes(i, count) for i, count in enumerate(counts)]
        #: Whether the CPU can update at all.
        self.updates_on_cpu = has_cpu_kernel(profile.workload.training.optimizer)
        self.input = [block.input_bytes for block in blocks]
        self.activations = [block.activation_bytes * there for block, there in zip(blocks, reached, strict=True)]
        self.workspace = [block.backward_workspace_bytes * there for block, there in zip(blocks, reached, strict=True)]
        pinned = profile.hardware.host.pinned
        self.pinned_updated = [sum(pinned(count * size) for size in held.host_pinned_bytes) for count in counts]
        self.host_updated = [
            max(count * held.host_optimizer_bytes - profile.saved_bytes(i), 0) + size
            for i, (count, size) in enumerate(zip(counts, self.pinned_updated, strict=True))
        ]
        self.frozen_bytes = [profile.frozen_bytes(i) for i in range(self.count)]
        self.host_offloaded = self.pinned_offloaded = [count * held.host_parameter_bytes for count in counts]
        #: Offloaded parameters that the CPU updates are counted as part of what it updates.
        self.one_host_copy = held.one_host_copy
        self.loss = profile.loss
        #: The gradient of a tied embedding exists from the head's backward on.
        self.long_gradient = self.gradient_bytes[0] if profile.workload.tied_embeddings else 0
