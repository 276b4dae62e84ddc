"""A policy's decisions as data. Only :func:`autohete.lowering.lower` turns them into tasks.

Routes (``routes.py``) say where values rest and how they travel. Rules (``rules.py``) add order to the resulting tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeVar

from autohete.errors import InputError, RuleError, check_fields, check_whole
from autohete.hashing import Hashed, hashed_once, same_objects
from autohete.plan.dealt import DealtStage, DealtStages
from autohete.plan.recomputation import Recomputation, Recomputations, recomputations
from autohete.plan.routes import Activations, Format, Processor, Route, SavedRoute, UnitPlan, Update
from autohete.plan.rules import Barrier, Rule
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, lending_rank, rank_home

__all__ = [
    "Activations",
    "DealtStage",
    "DealtStages",
    "FlatBuffers",
    "Footprint",
    "Format",
    "Hooks",
    "ParameterSlots",
    "PassOrder",
    "Plan",
    "PlanCounts",
    "Processor",
    "Recomputation",
    "Route",
    "SavedRoute",
    "UnitPlan",
    "Update",
    "without_refused_rules",
]

T = TypeVar("T")


def _check_size(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"{name} is {value}: it must be a finite number of bytes, 0 or more")


class PassOrder(StrEnum):
    """The order in which a rank of a pipeline computes the passes of micro-batches: all forwards, then all backwards (GPipe,
    arXiv 1811.06965; with several stages on a rank breadth-first, arXiv 2211.05953); or, once the pipeline is full, one of each
    in turns (PipeDream-Flush, arXiv 2006.09503; with several stages on a rank interleaved, arXiv 2104.04473).
    """

    ALL_FORWARDS_FIRST = "gpipe"
    ONE_FORWARD_ONE_BACKWARD = "1f1b"


@dataclass(frozen=True, slots=True)
class PlanCounts:
    """A plan in three counts and a total. As text: ``24c 10p 26o of 26``."""

    checkpointed_units: int
    offloaded_parameter_units: int
    offloaded_optimizer_units: int
    units: int

    def __str__(self) -> str:
        return f"{self.checkpointed_units}c {self.offloaded_parameter_units}p {self.offloaded_optimizer_units}o of {self.units}"

    @property
    def words(self) -> str:
        """The counts in words, without those that are 0."""
        counts = {
            "recompute": self.checkpointed_units,
            "offload parameters": self.offloaded_parameter_units,
            "update on the CPU": self.offloaded_optimizer_units,
        }
        said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return f"of {self.units} units, {said or 'none recompute, offload parameters or update on the CPU'}"


@dataclass(frozen=True, slots=True)
class ParameterSlots:
    """Preallocated slots for fetched parameters, each as large as the largest unit that leaves the GPU.

    Args:
        count: number of slots.
        with_gradients: each slot also has room for the unit's gradient.
    """

    count: int
    with_gradients: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.count < 1:
            raise InputError(f"ParameterSlots: count is {self.count}: give at least 1, or no slots for no limit")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that a system holds in addition to the values on their routes, and the size of its copies on the host.

    Args:
        gpu_buffer_bytes: GPU memory that is held permanently (buckets, caches).
        gpu_update_bytes: GPU memory that is held only while the GPU updates (copies of all gradients).
        host_buffer_bytes: other host memory, pageable.
        host_pinned_buffer_bytes: other host memory, pinned.
        host_optimizer_bytes: pageable host bytes per parameter updated on the CPU (states, gradient, staging).
        host_pinned_bytes: pinned arrays of each unit for what the CPU updates, bytes per parameter of each.
        rounds_pinned: these are rounded up to a power of two, as PyTorch does since 1.11.
        host_parameter_bytes: host bytes per parameter whose home is the host.
        one_host_copy: the CPU updates the host copy of these parameters in place, so no separate copy is counted.
        pins_optimizer: ``host_optimizer_bytes`` are pinned, in arrays that fill what they take.
    """

    gpu_buffer_bytes: int = 0
    gpu_update_bytes: int = 0
    host_buffer_bytes: int = 0
    host_pinned_buffer_bytes: int = 0
    host_optimizer_bytes: int = 0
    host_pinned_bytes: tuple[int, ...] = ()
    rounds_pinned: bool = True
    host_parameter_bytes: int = 0
    one_host_copy: bool = False
    pins_optimizer: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in (
            "gpu_buffer_bytes",
            "gpu_update_bytes",
            "host_buffer_bytes",
            "host_pinned_buffer_bytes",
            "host_optimizer_bytes",
            "host_parameter_bytes",
        ):
            _check_size(name, getattr(self, name))
        for size in self.host_pinned_bytes:
            _check_size("a size in host_pinned_bytes", size)


@dataclass(frozen=True, slots=True)
class FlatBuffers:
    """What collectives of several GPUs need because they work on flat buffers. The GPU copies in its own memory.

    Args:
        gather_copies: how often what a pass has gathered is copied before it: 1 takes the parameters out of the buffer.
        reduce_copies: how often gradients are copied, or changed in place, between the pass that completes them and their
            reduction: 1 puts them into the buffer.
        reduces_all: gradients are all-reduced even if each GPU only uses those of its part.
        adds_whole: every backward puts the gradients of a unit together, and adds them to a sum of whole gradients as one.
            Otherwise it adds those of one parameter at a time, and only sums are put together.
    """

    gather_copies: int = 0
    reduce_copies: int = 0
    reduces_all: bool = False
    adds_whole: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("gather_copies", "reduce_copies"):
            check_whole(name, getattr(self, name), 0)


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a system's hooks cost the host in every pass of a unit, in operations (``cpu.launch``): three counts, for each
    module that is called, for each parameter tensor, and for each small one, which stage 3 does not release
    (``UnitProfile.small_tensors``). The GPU waits only if the host cannot run ahead of it.

    Args:
        forward: in a forward or a recomputation.
        backward: in a backward.
        recomputation: in a recomputation, besides those of a forward, whatever the number of modules.
        waits: the thread that launches a pass waits until the parameters that it needs have been copied from the host. So the
            host does nothing else meanwhile, and not only the pass has to wait for its copy.
    """

    forward: tuple[float, float, float] = (0.0, 0.0, 0.0)
    backward: tuple[float, float, float] = (0.0, 0.0, 0.0)
    recomputation: float = 0.0
    waits: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("forward", "backward", "recomputation"):
            value = getattr(self, name)
            if not all(math.isfinite(count) and count >= 0 for count in (value if isinstance(value, tuple) else (value,))):
                raise InputError(f"{name} of hooks is {value}: it must be a finite number of operations, 0 or more")


@hashed_once
@dataclass(frozen=True, slots=True)
class Plan(Hashed):
    """One policy's decisions for one workload.

    Args:
        policy: name and flags, as given. Not part of equality: two policies may decide the same.
        units: one entry per unit, embedding first, head last.
        rules: order that the system adds to the data dependencies. A rule that adds nothing is harmless.
        slots: where fetched parameters live. None: each is allocated when its fetch starts.
        update_bytes: DRAM traffic per parameter of the Adam kernel on the CPU.
        elementwise_bytes: DRAM traffic per parameter of the elementwise kernels of a CPU update: unscaling, casts.
        scales_gradients: a CPU update always multiplies its gradients by a factor (for example to unscale them), so clipping
            needs no extra pass.
        footprint: additional memory that the system holds.
        flat_buffers: what its collectives need besides.
        gradient_bytes: traffic of the GPU's memory for each trained parameter, of kernels that the system runs on each gradient
            as soon as backward has made it.
        check_bytes: the same for kernels that it runs on each complete gradient before it leaves the GPU: a norm, or a search
            for infinite values. GPUs that shard gradients check their parts.
        hooks: what its hooks cost the host.
        pass_order: the order of forwards and backwards of micro-batches, if ranks compute different units.
        dealt: stages that ranks are dealt in turn. Then no unit names its rank, and all micro-batches pass a stage before the
            next one of the same rank, whatever ``pass_order``. None: units name their ranks, or every GPU computes all.
        sums_in_place: the products of a backward add to the sums of earlier micro-batches (cuBLAS with ``beta = 1``), so on the
            GPU no gradient exists besides its sum. Otherwise a gradient is made, and added.
        sums_whole: each GPU sums whole gradients of micro-batches where it would keep a part of them (stages 2 and 3). Only the
            sums are reduced. Otherwise the gradients of each micro-batch are.
        sums_in_fp32: ranks of a pipeline add up and reduce gradients in fp32, in memory that they always hold.
        holds_inputs: the input of a recomputed unit with frozen parameters, and the gradient of that input, stay until the
            backward of the micro-batch ends. Otherwise each is freed by the pass that needs it last.
        delayed: a CPU update uses the gradients of the previous iteration (stale; changes the mathematics). With dealt stages
            the host has two copies of parameters and of gradients, one to update and one to copy from or to; with several
            micro-batches, whose gradients it adds up, two of gradients.
        memory_waits: the plan fits only with extra waits, which cost time; :func:`autohete.simulate.simulate_plan` adds them.
        bound_seconds: lower bound of the iteration time over all plans that the policy could have chosen, proved by its
            planner. None: the policy does not search. Not part of equality: it rates the plan and does not define it.
    """

    policy: str = field(compare=False)
    units: tuple[UnitPlan, ...]
    rules: tuple[Rule, ...] = ()
    slots: ParameterSlots | None = None
    update_bytes: float = 0
    elementwise_bytes: float = 0
    scales_gradients: bool = False
    footprint: Footprint = Footprint()
    flat_buffers: FlatBuffers = FlatBuffers()
    gradient_bytes: float = 0
    check_bytes: float = 0
    hooks: Hooks = Hooks()
    pass_order: PassOrder = PassOrder.ONE_FORWARD_ONE_BACKWARD
    dealt: DealtStages | None = None
    sums_in_place: bool = False
    sums_whole: bool = False
    sums_in_fp32: bool = False
    holds_inputs: bool = False
    delayed: bool = False
    memory_waits: bool = False
    bound_seconds: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.units) < 3:
            raise InputError(f"a plan needs embedding, transformer blocks and head: got {len(self.units)} units")
        for unit in (self.units[0], self.units[-1]):
            again = unit is self.units[0] and self.dealt is not None and unit.activations is Activations.RECOMPUTE
            if not (again or unit.activations is Activations.KEEP) or unit.kept.leaves or unit.saved:
                raise InputError("embedding and head keep their activations on the GPU: plan them so")
        object.__setattr__(self, "units", same_objects(self.units))
        recomputations(self.units)
        if self.delayed and self.offloaded_parameter_units and self.dealt is None:
            raise InputError(
                "a delayed update writes the host's parameters during the next iteration: it excludes offloaded parameters"
            )
        if self.delayed and any(unit.update.share for unit in self.units):
            raise InputError("the GPU updates with the gradients of this iteration: leave delayed or the share out")
        if self.delayed and any(unit.gradients.far for unit in self.units):
            raise InputError("gradients of a delayed update wait on the host: let them rest there, or leave delayed out")
        if self.dealt is None:
            self._check_ranks()
        else:
            self._check_dealt(self.dealt)
        if lenders := self.lenders:
            self._check_lenders(lenders)
        if self.sums_in_fp32 and not (
            self.is_pipeline and all(unit.update.on is Processor.GPU and unit.gradients == Route() for unit in self.units)
        ):
            raise InputError(
                "sums_in_fp32 is for pipelines whose gradients stay on the GPU, which updates: plan so, or leave it out"
            )
        _check_size("update_bytes", self.update_bytes)
        _check_size("elementwise_bytes", self.elementwise_bytes)
        _check_size("gradient_bytes", self.gradient_bytes)
        _check_size("check_bytes", self.check_bytes)

    def _check_ranks(self) -> None:
        ranks = [unit.rank for unit in self.units]
        if self.is_pipeline and set(ranks) != set(range(self.ranks)):
            raise InputError(f"units are on ranks {ranks}: give each unit a rank, and each rank from 0 on a unit; or none")
        dealt = [self.units[stage[0]].rank for stage in self.stages]
        if self.is_pipeline and dealt != [stage % self.ranks for stage, _ in enumerate(dealt)]:
            raise InputError(
                f"units are on ranks {ranks}: deal stages of consecutive units to the ranks in turn, the lowest stage to rank 0"
            )
        if self.is_pipeline and (self.delayed or self.slots is not None):
            raise InputError("stages of a pipeline neither delay updates nor have slots: leave delayed and slots out")
        if stays := [i for i, unit in enumerate(self.units) if unit.parameters.stays_for_batches]:
            raise InputError(
                f"parameters of unit {stays[0]} stay for all micro-batches of a stage, but no stages are dealt: leave "
                "stays_for_batches out, or give dealt"
            )

    def _check_lenders(self, lenders: tuple[str, ...]) -> None:
        """Only what forward keeps rests in the memory of another rank, which has stages of its own."""
        for place, unit in enumerate(self.units):
            if {unit.parameters.home, unit.gradients.home, unit.states.home}.intersection(lenders):
                raise InputError(
                    f"parameters, gradients or states of unit {place} rest in the memory of a rank ({', '.join(lenders)}): "
                    "only what forward keeps can, so choose gpu, host, or a place of the hardware"
                )
            for home in {*unit.homes}.intersection(lenders):
                if unit.rank is None or home == rank_home(unit.rank) or home not in map(rank_home, range(self.ranks)):
                    own = f"on rank {unit.rank} of {self.ranks}" if unit.rank is not None else "on no rank of its own"
                    raise InputError(
                        f"what forward of unit {place} keeps rests in {home}, but the unit is {own}: give another rank of a "
                        "pipeline"
                    )

    def _check_dealt(self, dealt: DealtStages) -> None:
        """Between two stages of a rank nothing stays on the GPU but what the next one reads."""
        if (fused := dealt.backward[0]) >= len(self.units):
            raise InputError(f"a stage begins at unit {fused}, but there are {len(self.units)} units: let all begin below")
        if self.slots is not None or self.memory_waits or any(unit.rank is not None or unit.zero_stage for unit in self.units):
            raise InputError("stages that are dealt have no slots, waits for memory, ranks of units or shards: leave them out")
        last = dealt.backward[-1]
        for i, unit in enumerate(self.units):
            route, both = unit.parameters, i >= fused
            if not route.stays_for_batches or (route.stays_after_forward and not both) or route.home != HOST_MEMORY:
                raise InputError(
                    f"unit {i} is in stages that are dealt: let its parameters rest on the host, stay for all micro-batches, "
                    "and from forward to backward only in the stage that computes both"
                )
            kept = unit.activations is Activations.KEEP and not (unit.kept.leaves or unit.saved)
            again = unit.activations in (Activations.RECOMPUTE, Activations.DROP) and not (unit.again or unit.results)
            at_host = unit.kept.home == HOST_MEMORY or not i or unit.activations is Activations.DROP
            decided = i >= last and unit.update.on is Processor.CPU  # others are frozen, or else lowering refuses them
            if decided and not (kept if both else again and at_host):
                raise InputError(
                    f"unit {i} is in stages that are dealt: keep its activations only in the stage that computes both passes, "
                    "and let others recompute them, once, from an input that rests on the host"
                )
            if i in dealt.backward and unit.activations is Activations.DROP:
                raise InputError(f"unit {i} drops its input, with which a stage of backward begins: let it keep its input")

    @property
    def is_pipeline(self) -> bool:
        """Whether ranks compute different units, or stages are dealt."""
        return self.dealt is not None or any(unit.rank is not None for unit in self.units)

    @property
    def ranks(self) -> int:
        """The number of ranks that compute different units; 1 if all compute all."""
        return 1 + max((unit.rank or 0 for unit in self.units), default=0) if self.dealt is None else self.dealt.ranks

    def forward_ranks(self) -> tuple[int, ...]:
        """The rank that computes each unit's forward; 0 if all do."""
        return self._dealt_ranks(backward=False)

    def backward_ranks(self) -> tuple[int, ...]:
        """The rank that computes each unit's backward, and has its gradients; 0 if all or none do."""
        return self._dealt_ranks(backward=True)

    def _dealt_ranks(self, *, backward: bool) -> tuple[int, ...]:
        if self.dealt is None:
            return tuple(unit.rank or 0 for unit in self.units)
        found = [0] * len(self.units)
        for stage, rank in self.dealt.turns(len(self.units)):
            if stage.backward if backward else stage.forward:
                found[stage.units.start : stage.units.stop] = [rank] * len(stage.units)
        return tuple(found)

    @property
    def stages(self) -> tuple[range, ...]:
        """The runs of consecutive units that one rank computes, lowest first; one if all ranks compute all units."""
        starts = [i for i, unit in enumerate(self.units) if not i or unit.rank != self.units[i - 1].rank]
        return tuple(range(start, end) for start, end in zip(starts, (*starts[1:], len(self.units)), strict=True))

    @property
    def lenders(self) -> tuple[str, ...]:
        """The homes that are the memory of a rank, for others."""
        homes = {home for unit in self.units for home in unit.homes}
        return tuple(sorted(home for home in homes if lending_rank(home) is not None))

    def batches(self, gpus: int) -> int:
        """The number of batches that ``gpus`` GPUs train at a time: one each, but the ranks of a pipeline share one."""
        return gpus // self.ranks

    def in_slot(self, unit: int) -> bool:
        """Whether the gradients of ``unit`` live in a slot with its parameters."""
        return self.slots is not None and self.slots.with_gradients and self.units[unit].parameters.leaves

    def gradients_in_parameters(self, unit: int) -> bool:
        """Whether the gradients of ``unit`` on the GPU use, and are freed with, the memory of its parameters."""
        return self.in_slot(unit) or self.units[unit].gradients_replace_parameters

    @property
    def has_barrier(self) -> bool:
        """Whether the iteration ends with a barrier that no work crosses."""
        return any(isinstance(rule, Barrier) for rule in self.rules)

    def recomputations(self) -> Recomputations:
        """For each unit, the recomputations right before its backward, in order."""
        return recomputations(self.units)

    @property
    def checkpointed_units(self) -> int:
        """Units that recompute their activations."""
        return sum(unit.activations is not Activations.KEEP for unit in self.units)

    @property
    def offloaded_parameter_units(self) -> int:
        """Units whose parameters are offloaded."""
        return sum(unit.parameters.home != GPU_MEMORY for unit in self.units)

    @property
    def offloaded_optimizer_units(self) -> int:
        """Units that the GPU does not update, or only in part."""
        return sum(unit.update.on is not Processor.GPU for unit in self.units)

    @property
    def updates_where_it_computes(self) -> bool:
        """Whether all parameters stay on the GPU, which updates them: an ordinary optimizer can."""
        return not (self.offloaded_parameter_units or self.offloaded_optimizer_units)

    @property
    def counts(self) -> PlanCounts:
        """The three counts, for display in tables and files."""
        return PlanCounts(
            self.checkpointed_units, self.offloaded_parameter_units, self.offloaded_optimizer_units, len(self.units)
        )


def without_refused_rules(plan: Plan, attempt: Callable[[Plan], T]) -> tuple[Plan, T]:
    """Remove the rules that ``attempt`` refuses. Returns the remaining plan and the result of ``attempt`` for it.

    Args:
        plan: may have rules that contradict each other, or need more places than it has.
        attempt: a function such as :func:`autohete.lowering.lower` that raises :class:`~autohete.errors.RuleError` for one
            rule at a time.
    """
    while True:
        try:
            return plan, attempt(plan)
        except RuleError as error:
            plan = replace(plan, rules=tuple(rule for rule in plan.rules if rule != error.rule))
