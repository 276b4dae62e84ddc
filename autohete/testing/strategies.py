"""Hypothesis strategies for everything that flows through the pipeline: test your own policy or executor with them.

::

    @given(strategies.profiles())
    def test_my_policy_fits_whenever_resident_training_does(profile: Profile) -> None: ...

Values are small, and extreme on purpose: passes of no time, links a thousand times too slow, memories that hold nothing.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from functools import cache, partial
from itertools import pairwise
from typing import TypeVar

from hypothesis import reject
from hypothesis import strategies as st

from autohete.errors import InputError
from autohete.hardware import Cpu, Gpu, Hardware, Host, Interconnect, Link, Place
from autohete.lowering import least_parameter_slots, lower
from autohete.plan import (
    Activations,
    FlatBuffers,
    Footprint,
    Format,
    Hooks,
    ParameterSlots,
    Plan,
    Processor,
    Route,
    SavedRoute,
    UnitPlan,
    Update,
    without_refused_rules,
)
from autohete.plan.rules import (
    SLOTTED,
    Barrier,
    BlockingCopies,
    ByPriority,
    GpuUpdatesAfterBackward,
    GpuUpdatesAfterRecompute,
    GradientsLeaveAfterBackward,
    GradientsLeaveBeforeBackward,
    RefreshAfterBackward,
    RefreshAfterUpdates,
    Rule,
    SerialUpdates,
    Slots,
    UpdatesAfterBackward,
    Window,
)
from autohete.policies import POLICIES, NamedPolicy, parse_policy
from autohete.policies.checkpointing import Checkpointing
from autohete.profile import LossProfile, Profile, SavedTensors, UnitProfile, analytic_profile
from autohete.schedule import (
    GPU_MEMORY,
    HOST_MEMORY,
    Buffer,
    BufferId,
    Discipline,
    Edge,
    Flow,
    Free,
    Kind,
    Lane,
    Memory,
    Schedule,
    SharedResource,
    Task,
    TaskId,
    Value,
    validate,
)
from autohete.workload import GPT2_KERNELS, PLAIN_LOSSES, LossKernels, Precision, Units, Workload
from autohete.workload.optimizers import Optimizer
from autohete.workload.training import Lora, Training

_T = TypeVar("_T")

#: Size of a roll of dice; an example takes a few hundred bytes.
_ROLL_BYTES = 1024


class Dice:
    """Choices read off one drawn string of bytes. Hypothesis would take longer to draw each of the hundreds of choices in an
    example by itself than most tests take. Zeros, towards which examples shrink, choose what comes first.

    Args:
        roll: the bytes; after them come zeros.
    """

    def __init__(self, roll: bytes) -> None:
        self._roll, self._read = roll, 0

    def whole(self, low: int, high: int) -> int:
        """A whole number from ``low`` to ``high``."""
        size = ((high - low).bit_length() + 7) // 8
        self._read += size
        return low + int.from_bytes(self._roll[self._read - size : self._read], "little") % (high - low + 1)

    def of(self, options: Sequence[_T]) -> _T:
        """One of the options."""
        return options[self.whole(0, len(options) - 1)]

    def flip(self) -> bool:
        """Yes or no."""
        return bool(self.whole(0, 1))

    def some(self, options: Sequence[_T]) -> list[_T]:
        """Any of the options, each at most once, in any order."""
        left = list(options)
        return [left.pop(self.whole(0, len(left) - 1)) for _ in range(self.whole(0, len(left)))]

    def decades(self, lowest: int, highest: int) -> float:
        """A number between two powers of ten, each decade equally likely."""
        return self.whole(1, 9) * 10.0 ** self.whole(lowest, highest - 1)


def _rolled(make: Callable[[Dice], _T]) -> st.SearchStrategy[_T]:
    return st.binary(min_size=_ROLL_BYTES, max_size=_ROLL_BYTES).map(lambda roll: make(Dice(roll)))


def workloads(max_transformer_blocks: int = 6, max_micro_batches: int = 1) -> st.SearchStrategy[Workload]:
    """Small GPT shapes in all precisions, under autocast or not, tied or not, with fused attention or without, with gradients
    clipped or not, cut into blocks or into sublayers, trained as a whole or in part.
    """
    return _rolled(lambda dice: _workload(dice, max_transformer_blocks, max_micro_batches))


def _workload(dice: Dice, max_transformer_blocks: int = 6, max_micro_batches: int = 1) -> Workload:
    heads = dice.whole(1, 4)
    units = dice.of([Units.BLOCK, Units.BLOCK, Units.SUBLAYER])
    most = max_transformer_blocks if units is Units.BLOCK else max(1, max_transformer_blocks // 2)
    blocks = dice.whole(1, most)
    precision, training = dice.of(list(Precision)), _training(dice, blocks)
    casts = precision is Precision.FP32 and training.lora is None and dice.flip()
    return Workload(
        name="random",
        hidden_size=heads * dice.of([1, 8, 64]),
        transformer_blocks=blocks,
        heads=heads,
        vocabulary_size=dice.whole(1, 2000),
        sequence_length=dice.whole(1, 256),
        batch_size=dice.whole(1, 4),
        precision=precision,
        autocast=Precision.BF16 if casts else None,
        tied_embeddings=dice.flip(),
        kernels=dice.of(list(GPT2_KERNELS)),
        micro_batches=dice.whole(1, max_micro_batches),
        clip_norm=dice.of([None, None, 1.0]),
        units=units,
        training=training,
        loss=dice.of([None, None, *(one for one in LossKernels if not (casts and one in PLAIN_LOSSES))]),
    )


def _training(dice: Dice, units: int) -> Training:
    """All parameters, adapters, or the last of so many transformer blocks."""
    # All of these have a kernel for the CPU, and update any share of a unit.
    optimizer = dice.of([Optimizer.ADAMW, Optimizer.ADAMW, Optimizer.SGD, Optimizer.SGD_MOMENTUM])
    if dice.flip():
        return Training(optimizer=optimizer)
    targets = dice.of([("all",), ("attention",), ("mlp",), ("c_attn", "c_fc")])
    lora = Lora(dice.whole(1, 4), targets) if dice.flip() else None
    if lora is not None:
        nf4 = replace(lora, quantised=True)
        lora = dice.of([lora, nf4, replace(nf4, gptq=True), replace(lora, base_gradients=True)])
    return Training(lora, dice.whole(1, units) if dice.flip() else None, optimizer)


def hardware() -> st.SearchStrategy[Hardware]:
    """Slow and fast engines and links, memories from a megabyte to ten terabytes, drives; duplex is never faster than alone."""
    return _rolled(_hardware)


def _hardware(dice: Dice) -> Hardware:
    memory_bytes = round(dice.decades(6, 13))

    def link() -> Link:
        bandwidth = dice.decades(6, 12)
        shares = [0.25, 0.5, 0.8, 1.0]
        pageable = bandwidth * dice.of(shares) if dice.flip() else None
        return Link(bandwidth, bandwidth * dice.of(shares), dice.decades(-9, -4), pageable)

    return Hardware(
        name="random",
        gpu=Gpu(
            memory_bytes=memory_bytes,
            reserved_bytes=memory_bytes * dice.of([0, 1, 10, 50, 99]) // 100,
            peak_16bit_flops=dice.decades(9, 16),
            peak_32bit_flops=dice.decades(9, 15),
            memory_bandwidth=dice.decades(9, 14),
            memory_efficiency=dice.of([0.1, 0.8, 1.0]),
            gemm_efficiency=dice.of([0.1, 0.6, 1.0]),
            kernel_overhead_seconds=dice.decades(-9, -4),
            gemm_efficiency_32bit=dice.of([None, 0.3]),
            multiprocessors=dice.of([None, 1, 100]),
            compute_capability=dice.of([None, 7.0, 8.9, 9.0, 10.0]),
        ),
        h2d=link(),
        d2h=link(),
        host=Host(
            round(dice.decades(6, 14)),
            dice.decades(8, 13),
            dice.of([0.25, 0.7, 1.0]),
            round(dice.decades(6, 14)) if dice.flip() else None,
        ),
        cpu=Cpu(
            dice.whole(1, 256),
            dice.decades(7, 12),
            dice.decades(7, 12) if dice.flip() else None,
            dice.of([0.5, 1.0]),
            dice.of([0.0, 1e-5]),
        ),
        places=tuple(_place(dice, name) for name in dice.of(_PLACES)),
    )


def _saved_tensors(dice: Dice, kept: int) -> tuple[SavedTensors, ...]:
    """Tensors with ``kept`` bytes together, or none that are named."""
    count = dice.whole(0, 4)
    cuts = sorted(dice.whole(0, kept) for _ in range(count - 1))
    sizes = [end - begin for begin, end in pairwise([0, *cuts, kept])] if count else []
    seconds = [dice.decades(-8, 0) if dice.flip() else None for _ in sizes]
    return tuple(
        SavedTensors(f"saved{i}", size, spent, dice.of([0.0, 1e-5]), spent is not None and dice.flip())
        for i, (size, spent) in enumerate(zip(sizes, seconds, strict=True))
    )


def synthetic_profiles(max_micro_batches: int = 1) -> st.SearchStrategy[Profile]:
    """Blocks with any times and sizes, zero included, that no roofline would give."""
    return _rolled(lambda dice: _synthetic(dice, max_micro_batches))


def _synthetic(dice: Dice, max_micro_batches: int) -> Profile:
    workload = _workload(dice, max_micro_batches=max_micro_batches)

    def seconds() -> float:
        return dice.of([0.0, dice.whole(0, 9) * 1e-9, dice.decades(-8, 0)])

    def size() -> int:
        return dice.whole(0, dice.of([9, 10**8]))

    trained_first, apart = dice.whole(0, workload.unit_count - 1), dice.flip()

    def frozen(index: int, parameters: int) -> int:
        """Of one unit in every profile nothing is frozen."""
        if not apart or index == trained_first:
            return 0
        return dice.of([0, parameters // 2, parameters, parameters])

    def unit(index: int) -> UnitProfile:
        parameters = dice.whole(1, dice.of([9, 10**7]))
        kept = size()
        given = dice.whole(0, kept)
        forward, tensors = seconds(), dice.whole(0, 20)
        return UnitProfile(
            role=workload.role(index),
            parameters=parameters,
            frozen_parameters=frozen(index, parameters),
            frozen_bytes=dice.whole(1, parameters) if apart and dice.flip() else None,
            forward_seconds=forward,
            backward_seconds=seconds(),
            gpu_update_seconds=seconds(),
            input_bytes=given,
            cpu_update_seconds=seconds() if dice.flip() else None,
            activation_bytes=kept,
            forward_workspace_bytes=size(),
            backward_workspace_bytes=size(),
            saved=_saved_tensors(dice, kept - given) if 0 < index < workload.unit_count - 1 else (),
            measured_selective_workspace_bytes=(size(), size()) if dice.flip() else None,
            shorter_recompute_seconds=dice.of([None, 0.0, forward / 2, forward]),
            forward_host_seconds=dice.of([0.0, forward]),
            modules=dice.whole(0, 20),
            tensors=tensors,
            small_tensors=dice.whole(0, tensors),
        )

    units = tuple(unit(index) for index in range(workload.unit_count))
    return Profile(workload, _hardware(dice), units, LossProfile(seconds(), size(), size(), dice.flip()))


def profiles(max_micro_batches: int = 1) -> st.SearchStrategy[Profile]:
    """Analytic and synthetic profiles, of iterations of at most so many micro-batches."""
    return _rolled(lambda dice: _profile(dice, max_micro_batches))


def _profile(dice: Dice, max_micro_batches: int) -> Profile:
    if dice.flip():
        return _synthetic(dice, max_micro_batches)
    return analytic_profile(_workload(dice, max_micro_batches=max_micro_batches), _hardware(dice))


def profiles_of_several_gpus(max_gpus: int = 4, max_micro_batches: int = 1) -> st.SearchStrategy[Profile]:
    """The profile of one of up to so many GPUs, on one node or two."""
    return _rolled(lambda dice: _of_several_gpus(dice, max_gpus, max_micro_batches))


def _of_several_gpus(dice: Dice, max_gpus: int, max_micro_batches: int) -> Profile:
    profile = _profile(dice, max_micro_batches)
    of_node = dice.whole(1, max_gpus)
    nodes = dice.whole(2 if of_node == 1 else 1, max(2, max_gpus // of_node))
    rates = dice.decades(6, 12), dice.decades(-9, -4), dice.decades(6, 12), dice.decades(-9, -4)
    join = Interconnect(of_node, *rates, dice.of([1.0, dice.whole(5, 100) / 100]), dice.flip())
    node = replace(profile.hardware, interconnect=join)
    return replace(profile, hardware=node.shared_by(of_node * nodes))


def _zero_stage(dice: Dice, unit: UnitPlan, tied: bool) -> int:
    """A stage that the other decisions allow."""
    route = unit.parameters
    if route.home != GPU_MEMORY:
        whole = unit.update.on is Processor.GPU or route.moves or route.stays_after_backward or tied
        return dice.of([0] if whole or unit.gradients_replace_parameters else [0, 3])
    return dice.whole(0, 1 if unit.gradients_replace_parameters or unit.sums_leave else 2 if tied else 3)


def _saved_routes(dice: Dice, unit: UnitPlan, costs: UnitProfile, homes: Sequence[str]) -> UnitPlan:
    """A unit that keeps its activations, with any routes of its saved tensors; some of them may be made again."""
    if dice.flip() and costs.selected:
        return replace(unit, activations=Activations.SELECTIVE)
    routes = []
    for one in costs.saved:
        if one.seconds is not None and dice.flip():
            routes.append(SavedRoute(one.name, recomputed=True))
        elif dice.flip():
            routes.append(SavedRoute(one.name, Route(dice.of([GPU_MEMORY, *homes]), dice.whole(0, 2))))
    selective = any(one.recomputed for one in routes)
    return replace(unit, activations=Activations.SELECTIVE if selective else Activations.KEEP, saved=tuple(routes))


def plans(profile: Profile) -> st.SearchStrategy[Plan]:
    """Plans for ``profile``: any routes, and any rules but those that contradict each other."""
    return _rolled(lambda dice: _plan(dice, profile))


def _plan(dice: Dice, profile: Profile) -> Plan:
    accumulates = profile.workload.micro_batches > 1
    below = max(profile.first_trained - 1, 0)  # a unit that drops its input has one below it that is recomputed
    forwards = [[Activations.KEEP]] * below + _forwards(dice, len(profile.units) - below)
    delayed = dice.flip() and not accumulates
    pinned, size = dice.flip(), dice.of([None, 2, 4, 8])
    gradients = Route(carried=Format(size, pinned, fresh=not pinned and dice.flip(), returned_bytes=dice.of([0, 0, 2])))
    refresh = Format(dice.of([2, 4]), dice.flip(), dice.flip())
    fetched = Format(dice.of([None, 4]))
    replaced = profile.workload.precision is not Precision.FP32 and not accumulates and dice.flip()
    common = UnitPlan(gradients=gradients, refresh=refresh, gradients_replace_parameters=replaced)
    may_write, places = not (delayed or accumulates), profile.hardware.places
    units = [_updated(dice, common, places, may_write=may_write) for _ in profile.units]
    for i, unit in enumerate(units):
        shared = i == 0 and profile.workload.tied_embeddings
        route = _route(dice, may_leave=not (delayed or shared))
        unit = replace(unit, parameters=replace(_further(dice, route, unit, profile), carried=fetched))
        if profile.hardware.gpus > 1:
            unit = replace(unit, zero_stage=_zero_stage(dice, unit, shared))
        unit = unit if delayed else _shared(dice, unit, accumulates)
        travels = unit.fetches_states and (unit.parameters.home, unit.states.home) == (HOST_MEMORY, HOST_MEMORY)
        travels &= not (unit.parameters.moves or unit.parameters.stays_after_backward or unit.zero_stage or replaced)
        units[i] = replace(unit, parameters_with_states=travels and not profile.workload.has_masters and dice.flip())
    for i, (first, *again) in enumerate(forwards):
        rests = 0 < i < len(units) - 1 and first is not Activations.DROP and dice.flip()
        homes = [HOST_MEMORY, *(place.name for place in places)]
        kept = Route(dice.of(homes), dice.whole(0, 4)) if rests else Route()
        units[i] = replace(units[i], activations=first, again=tuple(again[:-1]), kept=kept)
        if first is Activations.KEEP and 0 < i < len(units) - 1:
            units[i] = _saved_routes(dice, units[i], profile.units[i], homes)
    plan = Plan(
        policy="random",
        units=tuple(units),
        rules=tuple(dict.fromkeys(_rule(dice, len(units)) for _ in range(dice.whole(0, 6)))),
        update_bytes=dice.of([0, 28.0, 40.5]),
        elementwise_bytes=dice.of([0, 14.0]),
        scales_gradients=dice.flip(),
        delayed=delayed,
        footprint=Footprint(
            gpu_buffer_bytes=dice.whole(0, 10**6),
            host_buffer_bytes=dice.whole(0, 10**6),
            host_pinned_buffer_bytes=dice.whole(0, 10**6),
            host_optimizer_bytes=dice.whole(0, 18),
            host_pinned_bytes=tuple(dice.whole(0, 4) for _ in range(dice.whole(0, 2))),
            rounds_pinned=dice.flip(),
            host_parameter_bytes=dice.whole(0, 4),
            one_host_copy=dice.flip(),
            gpu_update_bytes=dice.whole(0, 10**6),
            pins_optimizer=dice.flip(),
        ),
        flat_buffers=FlatBuffers(dice.whole(0, 2), dice.whole(0, 3), dice.flip(), dice.flip()),
        hooks=Hooks(
            (dice.whole(0, 60), dice.whole(0, 9), dice.whole(0, 9)),
            (dice.whole(0, 60), dice.whole(0, 9), dice.whole(0, 9)),
            more := dice.whole(0, 9),
            waits=more % 2 == 0,
        ),
        sums_whole=dice.flip(),
        holds_inputs=dice.flip(),
    )
    plan = without_contradictions(profile, plan)
    if dice.flip():
        return plan
    in_slots = dice.flip() and not (accumulates and any(not unit.accumulates_on_host for unit in units))
    in_slots = in_slots and not any(unit.parameters.leaves and unit.zero_stage for unit in units)
    slots = ParameterSlots(1, in_slots)
    least = least_parameter_slots(profile, replace(plan, slots=slots))
    return without_contradictions(profile, replace(plan, slots=replace(slots, count=max(1, least + dice.whole(0, 2)))))


def _shared(dice: Dice, unit: UnitPlan, accumulates: bool) -> UnitPlan:
    """Both sides update a part of it, if the other decisions allow that."""
    stays = unit.parameters.home == GPU_MEMORY and unit.states == Route() and not unit.gradients_replace_parameters
    on_gpu = unit.update.norm_on is None and not (accumulates and unit.accumulates_on_host)
    if not (unit.update.on is Processor.CPU and stays and on_gpu):
        return unit
    return replace(unit, update=replace(unit.update, share=dice.of([0.0, 0.0, 0.1, 0.5, 0.99])))


def with_shared_updates(profile: Profile, plan: Plan) -> st.SearchStrategy[Plan]:
    """``plan`` in which GPU and CPU each update a part of some units, whatever it specifies for them."""
    return _rolled(lambda dice: _with_shared_updates(dice, profile, plan))


def _with_shared_updates(dice: Dice, profile: Profile, plan: Plan) -> Plan:
    units, share = list(plan.units), dice.of([0.1, 0.5, 0.99])
    every = range(len(units))
    for unit in dice.some(every) or [dice.of(every)]:
        units[unit] = replace(
            units[unit],
            update=Update(Processor.CPU, share),
            parameters=Route(),
            gradients_replace_parameters=False,
            parameters_with_states=False,
            states=Route(),
            gradients=replace(units[unit].gradients, home=GPU_MEMORY),
            sum_bytes=None,
            sums_pinned=False,
        )
    return without_contradictions(profile, replace(plan, units=tuple(units), delayed=False))


def without_contradictions(profile: Profile, plan: Plan) -> Plan:
    """The plan without the rules that contradict others or the data dependencies."""
    return without_refused_rules(plan, partial(lower, profile))[0]


def _rule(dice: Dice, units: int) -> Rule:
    """Any rule, for a plan of so many units."""
    some = tuple(sorted(dice.some(range(units))))
    following = dice.of([Kind.OFFLOAD_GRADIENTS, Kind.WRITE_BACK_FORWARD, Kind.OFFLOAD_ACTIVATIONS])
    plain = dice.of(
        [
            ByPriority(),
            UpdatesAfterBackward(),
            GpuUpdatesAfterBackward(),
            GpuUpdatesAfterRecompute(),
            GradientsLeaveBeforeBackward(),
            GradientsLeaveAfterBackward(),
            RefreshAfterBackward(),
            RefreshAfterUpdates(),
            Barrier(),
        ]
    )
    count = dice.whole(1, 4)
    others = (
        BlockingCopies(following, some if dice.flip() else None, dice.flip(), dice.whole(0, 2)),
        Window(count),
        Slots(dice.of(sorted(SLOTTED)), count),
    )
    return dice.of([plain, *others, SerialUpdates(some)])


def _forwards(dice: Dice, units: int) -> list[list[Activations]]:
    """Activations that each forward of so many units keeps: segments of any length, also within segments."""
    keep, recompute, drop = Activations.KEEP, Activations.RECOMPUTE, Activations.DROP
    forwards_of = [[keep] for _ in range(units)]

    def draw_sweep(first: int, last: int) -> None:
        """Of units that are computed one after another, the first of which has an input."""
        for unit in range(first, last):
            made_again = unit > first and forwards_of[unit - 1][-1] is not keep
            forwards_of[unit].append(dice.of([keep, recompute, drop] if made_again else [keep, recompute]))

    for forwards in forwards_of[1:-1]:
        forwards.clear()
    draw_sweep(1, units - 1)
    for unit in reversed(range(1, units - 1)):
        if forwards_of[unit][-1] is not keep:
            start = max(i for i in range(unit + 1) if forwards_of[i][-1] is recompute)
            draw_sweep(start, unit)
            forwards_of[unit].append(keep)
    return forwards_of


#: The names of the places of a node.
_PLACES = ((), ("nvme",), ("cxl", "nvme"))


def _place(dice: Dice, name: str) -> Place:
    def rate() -> float:
        return dice.decades(6, 11)

    # Published systems let the CPU update what rests in the place named nvme.
    beside = HOST_MEMORY if name == "nvme" else dice.of([HOST_MEMORY, GPU_MEMORY])
    both, update = (rate() if dice.flip() else None for _ in range(2))
    return Place(name, 10**14, rate(), rate(), dice.decades(-9, -4), both, beside, update)


def _further(dice: Dice, route: Route, unit: UnitPlan, profile: Profile) -> Route:
    """The route, or the same from a place that the processor of the unit's updates reaches."""
    on_cpu = unit.update.on is Processor.CPU
    if route.home != HOST_MEMORY or route.moves or (on_cpu and not profile.workload.has_masters):
        return route
    homes = [place.name for place in profile.hardware.places if not (on_cpu and place.beside == GPU_MEMORY)]
    return replace(route, home=dice.of([HOST_MEMORY, *homes]))


def _updated(dice: Dice, unit: UnitPlan, places: Sequence[Place], may_write: bool) -> UnitPlan:
    """The CPU updates it, or the GPU, with states that rest there, on the host, or in a place that the processor reaches."""
    homes = [GPU_MEMORY, HOST_MEMORY, *(place.name for place in places)]
    states = Route(dice.of(homes), dice.of([0, 1, 3]))
    if dice.flip():
        sums = dice.of([GPU_MEMORY, HOST_MEMORY])
        if states.leaves:
            states = replace(states, parts=dice.of([1, 1, 2, 3]))
        return replace(unit, states=states, gradients=replace(unit.gradients, home=sums, ahead=dice.whole(0, 3)))
    gradients = replace(unit.gradients, home=dice.of([GPU_MEMORY, HOST_MEMORY]))
    if states.home in [place.name for place in places if place.beside == HOST_MEMORY]:
        unit = replace(unit, states=states)
        gradients = replace(gradients, home=states.home) if may_write and dice.flip() else gradients
    norm_on = None if gradients.far else dice.of([None, Processor.CPU])
    unit = replace(unit, update=Update(Processor.CPU, norm_on=norm_on), gradients=gradients)
    if unit.accumulates_on_host:
        unit = replace(unit, sum_bytes=dice.of([None, 2, 8]), sums_pinned=dice.flip())
    return unit


def _route(dice: Dice, may_leave: bool) -> Route:
    if not (may_leave and dice.flip()):
        return Route()
    return Route(
        HOST_MEMORY,
        stays_after_forward=dice.flip(),
        stays_after_backward=dice.flip(),
        moves=dice.flip(),
        ahead=dice.whole(0, 20),
        ahead_in_backward=dice.whole(0, 20),
    )


#: Policies that plan only for nodes with drives.
NEED_DRIVES = frozenset({"zero_infinity", "mlp_offload", "ratel", "smart_infinity"})


@cache
def _flags(name: str) -> dict[str, st.SearchStrategy[str]]:
    """The allowed values of each flag of a policy, by the types of its fields."""
    texts: dict[str, st.SearchStrategy[str]] = {}
    for flag, wanted in typing.get_type_hints(POLICIES[name]).items():
        if wanted is bool or wanted == bool | None:
            texts[flag] = st.sampled_from([flag, f"{flag}=on", f"{flag}=off"])
        elif isinstance(wanted, type) and issubclass(wanted, Enum):
            texts[flag] = st.sampled_from(
                [
                    f"{flag}={member.value}"
                    for member in wanted
                    if member not in (Checkpointing.SELECTIVE, Checkpointing.ALTERNATE)
                ]
            )
        elif wanted is str:
            texts[flag] = st.just(f"{flag}=nvme")
        else:
            texts[flag] = st.integers(1, 100).map(f"{flag}={{}}".format)
    return texts


@st.composite
def policies(draw: st.DrawFn, name: str | None = None) -> NamedPolicy:
    """Published systems (or the one called ``name``) with some of their flags set.

    None recomputes selectively or keeps results, because a profile need not support it.
    """
    name = name or draw(st.sampled_from(sorted(set(POLICIES) - NEED_DRIVES)))
    texts = _flags(name)
    chosen = draw(st.lists(st.sampled_from(sorted(texts)), unique=True)) if texts else []
    try:
        return parse_policy(f"{name}:{','.join(draw(texts[flag]) for flag in chosen)}" if chosen else name)
    except InputError:  # flags that contradict each other
        reject()


def schedules(sharing: bool = False, max_tasks: int = 12) -> st.SearchStrategy[Schedule]:
    """Valid periodic schedules that no plan would give, with durations of a few nanoseconds.

    Args:
        sharing: lanes draw from one to three resources that may not suffice for all of them.
        max_tasks: at most so many tasks.
    """
    return _rolled(lambda dice: _schedule(dice, sharing, max_tasks))


def _schedule(dice: Dice, sharing: bool, max_tasks: int) -> Schedule:
    lanes = [Lane(name, dice.of(list(Discipline))) for name in ("gpu", "h2d", "d2h", "cpu")[: dice.whole(1, 4)]]
    kinds, count = list(Kind), dice.whole(1, max_tasks)
    ids = list(dict.fromkeys(TaskId(dice.of(kinds), dice.whole(0, 3)) for _ in range(count)))
    tasks: list[Task] = []
    names = [lane.name for lane in lanes]
    for place, task in enumerate(ids):
        # Edges of the same iteration lead up the list, which is also the order of the fifo lanes: there is no cycle.
        edges = [Edge(before) for before in ids[:place] if dice.of(_RARELY)]
        edges += [Edge(before, back=1) for before in ids if dice.of(_RARELY)]
        duration = dice.whole(0, dice.of([6, 40]))
        tasks.append(Task(task, dice.of(names), duration, tuple(edges), dice.whole(-2, 2)))
    memories = (Memory("gpu", 1000), Memory("host", 1000), Memory("pinned", 500, part_of="host"))
    places = [dice.of(memories).name for _ in range(dice.whole(0, 2))]
    resident = tuple(Buffer(BufferId(Value.OTHER, name, i), dice.whole(0, 9)) for i, name in enumerate(places))
    flows: tuple[Flow, ...] = ()
    resources: tuple[SharedResource, ...] = ()
    if sharing:
        small = [1.0, 2.0, 3.0, 5.0, 8.0]
        flows = tuple(Flow(name, dice.of(small), dice.of(small)) for name in names)
        resources = tuple(
            SharedResource(
                f"share{i}",
                dice.of(small),
                tuple(dice.some(names) or names),
                counts_lanes=dice.flip(),
            )
            for i in range(dice.whole(1, 3))
        )
    return validate(Schedule(tuple(lanes), tuple(_with_buffers(dice, tasks)), memories, resident, flows, resources))


_RARELY = (False, False, False, True)


def _with_buffers(dice: Dice, tasks: list[Task]) -> list[Task]:
    """Some tasks allocate; the task itself, or one that waits for it, frees."""
    allocates: dict[TaskId, list[Buffer]] = {task.id: [] for task in tasks}
    frees: dict[TaskId, list[Free]] = {task.id: [] for task in tasks}
    for number, task in enumerate(tasks):
        if not dice.flip():
            continue
        buffer = BufferId(dice.of(list(Value)), dice.of(["gpu", "host", "pinned"]), 9 + number)
        allocates[task.id].append(Buffer(buffer, dice.whole(0, 9)))
        waiting = [(other.id, edge.back) for other in tasks for edge in other.after if edge.task == task.id]
        who, back = dice.of([(task.id, 0), *waiting])
        frees[who].append(Free(buffer, back))
    return [
        Task(task.id, task.lane, task.duration_ns, task.after, task.priority, tuple(allocates[task.id]), tuple(frees[task.id]))
        for task in tasks
    ]
