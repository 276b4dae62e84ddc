"""The part of a sharded unit that each GPU holds (ZeRO, arXiv 1910.02054): there are as many parts as GPUs."""

from __future__ import annotations

from functools import lru_cache

from autohete.errors import InputError, OptimizerError
from autohete.plan import Activations, Plan, Processor, UnitPlan
from autohete.plan.moves import SavedPart, SavedSize, UnitSizes, kept_results, saved_parts
from autohete.plan.rules import GpuUpdatesAfterBackward
from autohete.profile import Profile, SavedTensors, UnitProfile
from autohete.schedule import GPU_MEMORY, Value
from autohete.workload.optimizers import updates_in_backward


class Shards:
    """Number of elements per GPU. With one GPU, all.

    Args:
        profile: the number of GPUs.
        plan: what they shard.
    """

    def __init__(self, profile: Profile, plan: Plan) -> None:
        self.gpus = profile.hardware.gpus
        self._profile, self._plan = profile, plan
        #: By unit: ZeRO stage; parameters updated per GPU; those updated on the GPU itself; trained parameters kept.
        self._stages = [unit.zero_stage if self.gpus > 1 else 0 for unit in plan.units]
        self._updated = [self._part(unit, from_stage=1) for unit in range(len(plan.units))]
        self._on_gpu = list(map(_updated_on_gpu, plan.units, self._updated))
        self._kept = [self._part(unit, from_stage=3) for unit in range(len(plan.units))]
        part_of, frozen = profile.hardware.part_of, map(profile.frozen_bytes, range(len(plan.units)))
        self._frozen_bytes = [part_of(size) if stage == 3 else size for size, stage in zip(frozen, self._stages, strict=True)]
        self._comes_and_goes = [
            unit.parameters.leaves or stage == 3 for unit, stage in zip(plan.units, self._stages, strict=True)
        ]
        self._beside_gpu = (*profile.hardware.beside_gpu, *plan.lenders)
        #: By a unit's plan and the identity of its profile: units that are alike share one entry.
        self._sizes: dict[tuple[UnitPlan, int], UnitSizes] = {}

    def _part(self, unit: int, from_stage: int) -> int:
        sharded = self._stages[unit] >= from_stage
        return self._profile.part_of(unit) if sharded else self._profile.units[unit].trained_parameters

    def sizes(self, unit: int) -> UnitSizes:
        """The sizes of the unit's values for one GPU."""
        alike = self._plan.units[unit], id(self._profile.units[unit])
        if alike not in self._sizes:
            self._sizes[alike] = self._sizes_of(unit)
        return self._sizes[alike]

    def _sizes_of(self, unit: int) -> UnitSizes:
        profile, on_gpu, on_cpu = self._profile, self._on_gpu[unit], self._updated[unit] - self._on_gpu[unit]
        with_states = self._plan.units[unit].parameters_with_states
        # A place that updates has the parameters in fp32: masters, or without them parameters of its own.
        own = self._plan.units[unit].update.on is Processor.PLACE and not profile.workload.has_masters
        return UnitSizes(
            element_bytes=profile.element_bytes,
            parameters=self.parameters(unit),
            parameter_bytes=profile.parameter_bytes(unit),
            is_trained=not self.is_frozen(unit),
            trained=profile.units[unit].trained_parameters,
            kept=self._kept[unit],
            frozen_bytes=self._frozen_bytes[unit],
            gpu_updated=on_gpu,
            cpu_updated=on_cpu,
            gpu_state_bytes=profile.state_bytes(unit, on_gpu) + on_gpu * profile.element_bytes * with_states,
            cpu_state_bytes=profile.state_bytes(unit, on_cpu) + on_cpu * profile.element_bytes * own,
            summed_bytes=profile.gradient_elements(unit) * profile.element_bytes * (profile.workload.micro_batches > 1),
            saved_bytes=profile.saved_bytes(unit, on_cpu),
            input_bytes=profile.units[unit].input_bytes,
            activation_bytes=profile.units[unit].activation_bytes,
            saved=_saved_sizes(profile.units[unit].saved),
            results=_saved_sizes(profile.units[unit].results),
            beside_gpu=self._beside_gpu,
        )

    def saved_parts(self, unit: int) -> tuple[SavedPart, ...]:
        """The parts of what the unit's forward keeps besides its input; none if it keeps at most that."""
        return parts_of(self._plan.units[unit], self._profile.units[unit])

    def results(self, unit: int) -> tuple[SavedPart, ...]:
        """The results of products that the unit's forward keeps for its recomputation: parts of its activations, from 1 on."""
        return kept_results(self._plan.units[unit], _saved_sizes(self._profile.units[unit].results))

    def stage(self, unit: int) -> int:
        """The unit's ZeRO stage."""
        return self._stages[unit]

    def reduces_each(self, unit: int) -> bool:
        """Whether the gradients of each micro-batch are reduced, because the GPUs sum no more than their parts of them."""
        return self.stage(unit) >= 2 and not self._plan.sums_whole

    def reduced(self, unit: int) -> int:
        """Elements of the gradients that a GPU holds after their reduction."""
        elements = self._profile.gradient_elements(unit)
        return self._profile.hardware.part_of(elements) if self.stage(unit) >= 2 else elements

    def updated(self, unit: int) -> int:
        """Parameters that each GPU, or its process on the host, updates."""
        return self._updated[unit]

    def kept(self, unit: int) -> int:
        """Trained parameters that each GPU holds between uses."""
        return self._kept[unit]

    def frozen_bytes(self, unit: int) -> int:
        """Size of the frozen parameters that each GPU holds between uses."""
        return self._frozen_bytes[unit]

    @property
    def gradient_bytes(self) -> int:
        """Bytes per element of a gradient on the GPU."""
        return 4 if self._plan.sums_in_fp32 else self._profile.element_bytes

    def kept_bytes(self, unit: int) -> int:
        """Size of all parameters that each GPU holds between uses, where the GPU computes with them."""
        return self._kept[unit] * self._profile.element_bytes + self._frozen_bytes[unit]

    def is_frozen(self, unit: int) -> bool:
        """Whether the unit has no gradients, states and update."""
        return self._profile.units[unit].is_frozen

    def updated_on(self, unit: int, side: Processor) -> int:
        """Updated parameters by processor; the GPU takes the first ones."""
        on_gpu, on = self._on_gpu[unit], self._plan.units[unit].update.on
        if side is Processor.GPU:
            return on_gpu
        return self._updated[unit] - on_gpu if side is on else 0

    def updates_on(self, unit: int, side: Processor) -> bool:
        """Whether that processor has an update to run. A frozen unit has none."""
        return not self.is_frozen(unit) and (self._plan.units[unit].update.on is side or self.updated_on(unit, side) > 0)

    def share(self, unit: int, side: Processor | None = None) -> float:
        """Fraction of the work of an update, for one processor or both. A unit may have nothing to update."""
        whole = self._profile.units[unit].trained_parameters
        count = self.updated(unit) if side is None else self.updated_on(unit, side)
        return 1.0 if count == whole and not self.stage(unit) else count / max(whole, 1)

    def comes_and_goes(self, unit: int) -> bool:
        """Whether the full parameters are on the GPU only during their uses."""
        return self._comes_and_goes[unit]

    def parameters(self, unit: int) -> Value:
        """The value that an update changes on the GPU: the parameters, or this GPU's part of them."""
        return Value.PARAMETER_SHARD if self.stage(unit) == 3 else Value.PARAMETERS

    def gradients(self, unit: int) -> Value:
        """The value that an update takes from the GPU: the gradients, or this GPU's part of them."""
        return Value.GRADIENT_SHARD if self.stage(unit) >= 2 else Value.GRADIENTS

    def check(self) -> None:
        """Refuse what cannot be sharded as planned.

        Raises:
            InputError: states the unit, the reason and the cure.
        """
        self._check_optimizer()
        for unit, plan in enumerate(self._plan.units):
            stage = self.stage(unit)
            if refusal := refused_stage(self._profile, unit, plan, stage):
                raise InputError(refusal)
            if stage and plan.parameters_with_states:
                raise InputError(
                    f"parameters of unit {unit} travel with the states, but each GPU has states of a part of them: leave "
                    "parameters_with_states out, or give zero_stage 0"
                )
            if stage >= 2 and self._plan.gradients_in_parameters(unit):
                raise InputError(
                    f"gradients of unit {unit} lie where its parameters do, but each GPU keeps a part of them: give them "
                    "memory of their own, or zero_stage 1"
                )

    def _check_optimizer(self) -> None:
        training, plan = self._profile.workload.training, self._plan
        if updates_in_backward(training.optimizer):
            self._check_updates_in_backward()
        units = range(len(plan.units))
        if any(self.updates_on(unit, side) for unit in units for side in (Processor.CPU, Processor.PLACE)):
            self._profile.check_cpu_updates()
        cut = (unit for unit in units if self.stage(unit) or plan.units[unit].update.share or plan.units[unit].states.parts > 1)
        whole = next((unit for unit in cut if not self._profile.updates_any_share(unit)), None)
        if whole is not None:
            several = training.updates_any_share and f"unit {whole} has several optimizers, or one that"
            raise OptimizerError(
                f"the plan updates parts of a unit by themselves, but {several or training.update_name} needs whole "
                "parameters: choose another optimizer, such as adamw, or leave zero_stage and the share of the update at 0 and "
                "parts at 1"
            )

    def _check_updates_in_backward(self) -> None:
        w = self._profile.workload
        why = {
            "the plan's updates wait for its end": GpuUpdatesAfterBackward() in self._plan.rules,
            "gradients of several micro-batches are summed": w.micro_batches > 1,
            "gradients are clipped by their global norm": w.clips,
        }
        reason = next((reason for reason, holds in why.items() if holds), None)
        if reason is not None:
            raise OptimizerError(
                f"{w.training.optimizer} updates within backward, but {reason}: choose another optimizer, such as adamw, or "
                "train one micro-batch without clipping under resident:in_backward"
            )


def refused_stage(profile: Profile, unit: int, plan: UnitPlan, stage: int) -> str:
    """Why several GPUs cannot share a unit at a ZeRO stage, with the cure; empty if they can."""
    route, on_host = plan.parameters, plan.parameters.home != GPU_MEMORY
    written = plan.update.on is Processor.GPU and not profile.units[unit].is_frozen
    if stage == 3 and unit == 0 and profile.workload.tied_embeddings:
        return (
            "the head shares the embedding's matrix, so each GPU needs all of it: give the first unit zero_stage 2, or "
            "untie the embeddings"
        )
    if stage in (1, 2) and on_host:
        return (
            f"parameters of unit {unit} leave the GPU, and each GPU updates a part of them: share them, too, with "
            "zero_stage 3, or nothing with 0"
        )
    if stage == 3 and on_host and (written or route.moves or route.stays_after_backward):
        return (
            f"parameters of unit {unit} rest elsewhere in parts: update them on the CPU, and let them neither move "
            "nor stay on the GPU after backward"
        )
    if stage >= 2 and plan.sums_leave and profile.workload.micro_batches > 1:
        return (
            f"gradients of unit {unit} rest on the host between micro-batches, but each GPU keeps a part of them: let "
            "them rest on the GPU, or give the unit zero_stage 0 or 1"
        )
    return ""


def parts_of(unit: UnitPlan, costs: UnitProfile) -> tuple[SavedPart, ...]:
    """The parts of what a forward keeps besides its input; none if it keeps at most that."""
    if unit.activations in (Activations.RECOMPUTE, Activations.DROP):
        return ()
    return saved_parts(unit, _saved_sizes(costs.saved), costs.kept_bytes)


@lru_cache(maxsize=2**8)
def _saved_sizes(saved: tuple[SavedTensors, ...]) -> tuple[SavedSize, ...]:
    return tuple([SavedSize(one.name, one.size_bytes, one.selective) for one in saved])


def _updated_on_gpu(unit: UnitPlan, count: int) -> int:
    """The number of ``count`` parameters that the GPU updates. The CPU has at least one if it updates."""
    return count if unit.update.on is Processor.GPU else min(round(count * unit.update.share), max(count - 1, 0))
