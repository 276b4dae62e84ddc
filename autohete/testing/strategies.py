"""Hypothesis strategies for everything that flows through the pipeline: test your own policy or executor with them.

::

    @given(strategies.profiles())
    def test_my_policy_fits_whenever_resident_training_does(profile: Profile) -> None: ...

Values are small, and extreme on purpose: passes of no time, links a thousand times too slow, memories that hold nothing.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from functools import cache, partial
from itertools import pairwise

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
    Barrier,
    BlockingCopies,
    ByPriority,
    GpuUpdatesAfterBackward,
    GpuUpdatesAfterRecompute,
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
    COPIES,
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
from autohete.workload import Kernels, Precision, Units, Workload
from autohete.workload.optimizers import Optimizer
from autohete.workload.training import Lora, Training

Draw = st.DrawFn


@st.composite
def workloads(draw: Draw, max_transformer_blocks: int = 6, max_micro_batches: int = 1) -> Workload:
    """Small GPT shapes in all precisions, tied or not, with fused attention or without, with gradients clipped or not, cut
    into blocks or into sublayers, trained as a whole or in part.
    """
    heads = draw(st.integers(1, 4))
    units = draw(st.sampled_from([Units.BLOCK, Units.BLOCK, Units.SUBLAYER]))
    most = max_transformer_blocks if units is Units.BLOCK else max(1, max_transformer_blocks // 2)
    blocks = draw(st.integers(1, most))
    return Workload(
        name="random",
        hidden_size=heads * draw(st.sampled_from([1, 8, 64])),
        transformer_blocks=blocks,
        heads=heads,
        vocabulary_size=draw(st.integers(1, 2000)),
        sequence_length=draw(st.integers(1, 256)),
        batch_size=draw(st.integers(1, 4)),
        precision=draw(st.sampled_from(Precision)),
        tied_embeddings=draw(st.booleans()),
        kernels=draw(st.sampled_from(Kernels)),
        micro_batches=draw(st.integers(1, max_micro_batches)),
        clip_norm=draw(st.sampled_from([None, None, 1.0])),
        units=units,
        training=draw(_trainings(blocks)),
    )


@st.composite
def _trainings(draw: Draw, units: int) -> Training:
    """All parameters, adapters, or the last of so many transformer blocks."""
    # All of these have a kernel for the CPU, and update any share of a unit.
    optimizer = draw(st.sampled_from([Optimizer.ADAMW, Optimizer.ADAMW, Optimizer.SGD, Optimizer.SGD_MOMENTUM]))
    if draw(st.booleans()):
        return Training(optimizer=optimizer)
    targets = draw(st.sampled_from([("all",), ("attention",), ("mlp",), ("c_attn", "c_fc")]))
    lora = draw(st.none() | st.builds(Lora, st.integers(1, 4), st.just(targets), st.booleans()))
    return Training(lora, draw(st.none() | st.integers(1, units)), optimizer)


def _decades(lowest: int, highest: int) -> st.SearchStrategy[float]:
    """A number between two powers of ten, each decade equally likely."""
    return st.builds(lambda digits, power: digits * 10.0**power, st.integers(1, 9), st.integers(lowest, highest - 1))


@st.composite
def hardware(draw: Draw) -> Hardware:
    """Slow and fast engines and links, memories from a megabyte to ten terabytes, drives; duplex is never faster than alone."""
    memory_bytes = round(draw(_decades(6, 13)))

    def link() -> Link:
        bandwidth = draw(_decades(6, 12))
        shares = st.sampled_from([0.25, 0.5, 0.8, 1.0])
        pageable = draw(st.none() | shares.map(lambda share: bandwidth * share))
        return Link(bandwidth, bandwidth * draw(shares), draw(_decades(-9, -4)), pageable)

    return Hardware(
        name="random",
        gpu=Gpu(
            memory_bytes=memory_bytes,
            reserved_bytes=draw(st.integers(0, memory_bytes - 1)),
            peak_16bit_flops=draw(_decades(9, 16)),
            peak_32bit_flops=draw(_decades(9, 15)),
            memory_bandwidth=draw(_decades(9, 14)),
            memory_efficiency=draw(st.sampled_from([0.1, 0.8, 1.0])),
            gemm_efficiency=draw(st.sampled_from([0.1, 0.6, 1.0])),
            kernel_overhead_seconds=draw(_decades(-9, -4)),
            gemm_efficiency_32bit=draw(st.sampled_from([None, 0.3])),
            multiprocessors=draw(st.sampled_from([None, 1, 100])),
            attention_share=draw(st.sampled_from([None, 0.3, 1.0])),
        ),
        h2d=link(),
        d2h=link(),
        host=Host(
            round(draw(_decades(6, 14))),
            draw(_decades(8, 13)),
            draw(st.sampled_from([0.25, 0.7, 1.0])),
            draw(st.none() | _decades(6, 14).map(round)),
        ),
        cpu=Cpu(
            draw(st.integers(1, 256)),
            draw(_decades(7, 12)),
            draw(st.none() | _decades(7, 12)),
            draw(st.sampled_from([0.5, 1.0])),
            draw(st.sampled_from([0.0, 1e-5])),
        ),
        places=tuple(draw(_places(name)) for name in draw(st.sampled_from(_PLACES))),
    )


@st.composite
def _saved_tensors(draw: Draw, kept: int) -> tuple[SavedTensors, ...]:
    """Tensors with ``kept`` bytes together, or none that are named."""
    count = draw(st.integers(0, 4))
    cuts = sorted(draw(st.lists(st.integers(0, kept), min_size=count - 1, max_size=count - 1))) if count else []
    sizes = [end - begin for begin, end in pairwise([0, *cuts, kept])] if count else []
    seconds = [draw(st.none() | _decades(-8, 0)) for _ in sizes]
    return tuple(
        SavedTensors(f"saved{i}", size, spent, draw(st.sampled_from([0.0, 1e-5])), spent is not None and draw(st.booleans()))
        for i, (size, spent) in enumerate(zip(sizes, seconds, strict=True))
    )


@st.composite
def synthetic_profiles(draw: Draw, max_micro_batches: int = 1) -> Profile:
    """Blocks with any times and sizes, zero included, that no roofline would give."""
    workload = draw(workloads(max_micro_batches=max_micro_batches))
    seconds = st.one_of(st.just(0.0), st.integers(0, 9).map(lambda x: x * 1e-9), _decades(-8, 0))
    sizes = st.one_of(st.integers(0, 9), st.integers(0, 10**8))

    trained_first, apart = draw(st.integers(0, workload.unit_count - 1)), draw(st.booleans())

    def frozen(index: int, parameters: int) -> int:
        """Of one unit in every profile nothing is frozen."""
        if not apart or index == trained_first:
            return 0
        return draw(st.sampled_from([0, parameters // 2, parameters, parameters]))

    def unit(index: int) -> UnitProfile:
        parameters = draw(st.one_of(st.integers(1, 9), st.integers(1, 10**7)))
        kept = draw(sizes)
        given = draw(st.integers(0, kept))
        forward = draw(seconds)
        return UnitProfile(
            role=workload.role(index),
            parameters=parameters,
            frozen_parameters=frozen(index, parameters),
            frozen_bytes=draw(st.none() | st.integers(1, parameters)) if apart else None,
            forward_seconds=forward,
            backward_seconds=draw(seconds),
            gpu_update_seconds=draw(seconds),
            input_bytes=given,
            cpu_update_seconds=draw(st.none() | seconds),
            activation_bytes=kept,
            forward_workspace_bytes=draw(sizes),
            backward_workspace_bytes=draw(sizes),
            saved=draw(_saved_tensors(kept - given)) if 0 < index < workload.unit_count - 1 else (),
            measured_selective_workspace_bytes=draw(st.none() | st.tuples(sizes, sizes)),
            shorter_recompute_seconds=draw(st.sampled_from([None, 0.0, forward / 2, forward])),
        )

    units = tuple(unit(index) for index in range(workload.unit_count))
    return Profile(workload, draw(hardware()), units, LossProfile(draw(seconds), draw(sizes), draw(sizes), draw(st.booleans())))


def profiles(max_micro_batches: int = 1) -> st.SearchStrategy[Profile]:
    """Analytic and synthetic profiles, of iterations of at most so many micro-batches."""
    analytic = st.builds(analytic_profile, workloads(max_micro_batches=max_micro_batches), hardware())
    return st.one_of(analytic, synthetic_profiles(max_micro_batches=max_micro_batches))


@st.composite
def profiles_of_several_gpus(draw: Draw, max_gpus: int = 4, max_micro_batches: int = 1) -> Profile:
    """The profile of one of up to so many GPUs, on one node or two."""
    profile = draw(profiles(max_micro_batches=max_micro_batches))
    of_node = draw(st.integers(1, max_gpus))
    nodes = draw(st.integers(2 if of_node == 1 else 1, max(2, max_gpus // of_node)))
    rates = draw(_decades(6, 12)), draw(_decades(-9, -4)), draw(_decades(6, 12)), draw(_decades(-9, -4))
    join = Interconnect(of_node, *rates, draw(st.one_of(st.just(1.0), st.floats(0.05, 1))))
    node = replace(profile.hardware, interconnect=join)
    return replace(profile, hardware=node.shared_by(of_node * nodes))


@st.composite
def _zero_stage(draw: Draw, unit: UnitPlan, tied: bool) -> int:
    """A stage that the other decisions allow."""
    route = unit.parameters
    if route.home != GPU_MEMORY:
        whole = unit.update.on is Processor.GPU or route.moves or route.stays_after_backward or tied
        return draw(st.sampled_from([0] if whole or unit.gradients_replace_parameters else [0, 3]))
    return draw(st.integers(0, 1 if unit.gradients_replace_parameters or unit.sums_leave else 2 if tied else 3))


@st.composite
def _saved_routes(draw: Draw, unit: UnitPlan, costs: UnitProfile, homes: Sequence[str]) -> UnitPlan:
    """A unit that keeps its activations, with any routes of its saved tensors; some of them may be made again."""
    if draw(st.booleans()) and costs.selected:
        return replace(unit, activations=Activations.SELECTIVE)
    routes = []
    for one in costs.saved:
        if one.seconds is not None and draw(st.booleans()):
            routes.append(SavedRoute(one.name, recomputed=True))
        elif draw(st.booleans()):
            routes.append(SavedRoute(one.name, Route(draw(st.sampled_from([GPU_MEMORY, *homes])), draw(st.integers(0, 2)))))
    selective = any(one.recomputed for one in routes)
    return replace(unit, activations=Activations.SELECTIVE if selective else Activations.KEEP, saved=tuple(routes))


@st.composite
def plans(draw: Draw, profile: Profile) -> Plan:
    """Plans for ``profile``: any routes, and any rules but those that contradict each other."""
    accumulates = profile.workload.micro_batches > 1
    below = max(profile.first_trained - 1, 0)  # a unit that drops its input has one below it that is recomputed
    forwards = [[Activations.KEEP]] * below + draw(_forwards(len(profile.units) - below))
    delayed = draw(st.booleans()) and not accumulates
    gradients = Route(carried=Format(draw(st.sampled_from([None, 2, 4, 8])), draw(st.booleans())))
    refresh = Format(draw(st.sampled_from([2, 4])), draw(st.booleans()), draw(st.booleans()))
    fetched = Format(draw(st.sampled_from([None, 4])))
    replaced = profile.workload.precision is not Precision.FP32 and not accumulates and draw(st.booleans())
    common = UnitPlan(gradients=gradients, refresh=refresh, gradients_replace_parameters=replaced)
    may_write, places = not (delayed or accumulates), profile.hardware.places
    units = [draw(_updated(common, places, may_write=may_write)) for _ in profile.units]
    for i, unit in enumerate(units):
        shared = i == 0 and profile.workload.tied_embeddings
        route = draw(_routes(may_leave=not (delayed or shared)))
        unit = replace(unit, parameters=replace(draw(_further(route, unit, profile)), carried=fetched))
        if profile.hardware.gpus > 1:
            unit = replace(unit, zero_stage=draw(_zero_stage(unit, shared)))
        units[i] = unit if delayed else draw(_shared(unit, accumulates))
    for i, (first, *again) in enumerate(forwards):
        rests = 0 < i < len(units) - 1 and first is not Activations.DROP and draw(st.booleans())
        homes = [HOST_MEMORY, *(place.name for place in places)]
        kept = Route(draw(st.sampled_from(homes)), draw(st.integers(0, 4))) if rests else Route()
        units[i] = replace(units[i], activations=first, again=tuple(again[:-1]), kept=kept)
        if first is Activations.KEEP and 0 < i < len(units) - 1:
            units[i] = draw(_saved_routes(units[i], profile.units[i], homes))
    plan = Plan(
        policy="random",
        units=tuple(units),
        rules=tuple(draw(st.lists(_rules(len(units)), unique=True, max_size=6))),
        update_bytes=draw(st.sampled_from([0, 28.0, 40.5])),
        elementwise_bytes=draw(st.sampled_from([0, 14.0])),
        scales_gradients=draw(st.booleans()),
        delayed=delayed,
        footprint=Footprint(
            gpu_buffer_bytes=draw(st.integers(0, 10**6)),
            host_buffer_bytes=draw(st.integers(0, 10**6)),
            host_optimizer_bytes=draw(st.integers(0, 18)),
            host_pinned_bytes=tuple(draw(st.lists(st.integers(0, 4), max_size=2))),
            host_pinned_together=draw(st.booleans()),
            host_parameter_bytes=draw(st.integers(0, 4)),
            one_host_copy=draw(st.booleans()),
            gpu_update_bytes=draw(st.integers(0, 10**6)),
            pinned=tuple(draw(st.lists(st.sampled_from([Value.OPTIMIZER_STATES, Value.POLICY_BUFFERS]), unique=True))),
        ),
        flat_buffers=FlatBuffers(draw(st.integers(0, 2)), draw(st.integers(0, 3)), draw(st.booleans())),
    )
    plan = without_contradictions(profile, plan)
    if draw(st.booleans()):
        return plan
    in_slots = draw(st.booleans()) and not (accumulates and any(not unit.accumulates_on_host for unit in units))
    in_slots = in_slots and not any(unit.parameters.leaves and unit.zero_stage for unit in units)
    slots = ParameterSlots(1, in_slots)
    least = least_parameter_slots(profile, replace(plan, slots=slots))
    return without_contradictions(profile, replace(plan, slots=replace(slots, count=max(1, least + draw(st.integers(0, 2))))))


@st.composite
def _shared(draw: Draw, unit: UnitPlan, accumulates: bool) -> UnitPlan:
    """Both sides update a part of it, if the other decisions allow that."""
    stays = unit.parameters.home == GPU_MEMORY and unit.states == Route() and not unit.gradients_replace_parameters
    on_gpu = unit.update.norm_on is None and not (accumulates and unit.accumulates_on_host)
    if not (unit.update.on is Processor.CPU and stays and on_gpu):
        return unit
    return replace(unit, update=replace(unit.update, share=draw(st.sampled_from([0.0, 0.0, 0.1, 0.5, 0.99]))))


@st.composite
def with_shared_updates(draw: Draw, profile: Profile, plan: Plan) -> Plan:
    """``plan`` in which GPU and CPU each update a part of some units, whatever it specifies for them."""
    units, share = list(plan.units), draw(st.sampled_from([0.1, 0.5, 0.99]))
    for unit in draw(st.lists(st.integers(0, len(units) - 1), unique=True, min_size=1)):
        units[unit] = replace(
            units[unit],
            update=Update(Processor.CPU, share),
            parameters=Route(),
            gradients_replace_parameters=False,
            states=Route(),
            gradients=replace(units[unit].gradients, home=GPU_MEMORY),
            sum_bytes=None,
        )
    return without_contradictions(profile, replace(plan, units=tuple(units), delayed=False))


def without_contradictions(profile: Profile, plan: Plan) -> Plan:
    """The plan without the rules that contradict others or the data dependencies."""
    return without_refused_rules(plan, partial(lower, profile))[0]


def _rules(units: int) -> st.SearchStrategy[Rule]:
    """Any rule, for a plan of so many units."""
    small = st.integers(1, 4)
    some = st.lists(st.integers(0, units - 1), unique=True).map(lambda numbers: tuple(sorted(numbers)))
    following = st.sampled_from([Kind.OFFLOAD_GRADIENTS, Kind.WRITE_BACK_FORWARD, Kind.OFFLOAD_ACTIVATIONS])
    return st.one_of(
        st.sampled_from(
            [
                ByPriority(),
                UpdatesAfterBackward(),
                GpuUpdatesAfterBackward(),
                GpuUpdatesAfterRecompute(),
                RefreshAfterBackward(),
                RefreshAfterUpdates(),
                Barrier(),
            ]
        ),
        st.builds(BlockingCopies, following, st.none() | some),
        st.builds(Window, small),
        st.builds(Slots, st.sampled_from(sorted(COPIES)), small),
        st.builds(SerialUpdates, some),
    )


@st.composite
def _forwards(draw: Draw, units: int) -> list[list[Activations]]:
    """Activations that each forward of so many units keeps: segments of any length, also within segments."""
    keep, recompute, drop = Activations.KEEP, Activations.RECOMPUTE, Activations.DROP
    forwards_of = [[keep] for _ in range(units)]

    def draw_sweep(first: int, last: int) -> None:
        """Of units that are computed one after another, the first of which has an input."""
        for unit in range(first, last):
            made_again = unit > first and forwards_of[unit - 1][-1] is not keep
            forwards_of[unit].append(draw(st.sampled_from([keep, recompute, drop] if made_again else [keep, recompute])))

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


@st.composite
def _places(draw: Draw, name: str) -> Place:
    rate = _decades(6, 11)
    # Published systems let the CPU update what rests in the place named nvme.
    beside = HOST_MEMORY if name == "nvme" else draw(st.sampled_from([HOST_MEMORY, GPU_MEMORY]))
    return Place(name, 10**14, draw(rate), draw(rate), draw(_decades(-9, -4)), draw(st.none() | rate), beside)


@st.composite
def _further(draw: Draw, route: Route, unit: UnitPlan, profile: Profile) -> Route:
    """The route, or the same from a place that the processor of the unit's updates reaches."""
    on_cpu = unit.update.on is Processor.CPU
    if route.home != HOST_MEMORY or route.moves or (on_cpu and not profile.workload.has_masters):
        return route
    homes = [place.name for place in profile.hardware.places if not (on_cpu and place.beside == GPU_MEMORY)]
    return replace(route, home=draw(st.sampled_from([HOST_MEMORY, *homes])))


@st.composite
def _updated(draw: Draw, unit: UnitPlan, places: Sequence[Place], may_write: bool) -> UnitPlan:
    """The CPU updates it, or the GPU, with states that rest there, on the host, or in a place that the processor reaches."""
    homes = [GPU_MEMORY, HOST_MEMORY, *(place.name for place in places)]
    states = Route(draw(st.sampled_from(homes)), draw(st.sampled_from([0, 1, 3])))
    if draw(st.booleans()):
        sums = draw(st.sampled_from([GPU_MEMORY, HOST_MEMORY]))
        if states.leaves:
            states = replace(states, parts=draw(st.sampled_from([1, 1, 2, 3])))
        return replace(unit, states=states, gradients=replace(unit.gradients, home=sums, ahead=draw(st.integers(0, 3))))
    gradients = replace(unit.gradients, home=draw(st.sampled_from([GPU_MEMORY, HOST_MEMORY])))
    if states.home in [place.name for place in places if place.beside == HOST_MEMORY]:
        unit = replace(unit, states=states)
        gradients = replace(gradients, home=states.home) if may_write and draw(st.booleans()) else gradients
    norm_on = None if gradients.far else draw(st.sampled_from([None, Processor.CPU]))
    unit = replace(unit, update=Update(Processor.CPU, norm_on=norm_on), gradients=gradients)
    if unit.accumulates_on_host:
        unit = replace(unit, sum_bytes=draw(st.sampled_from([None, 2, 8])))
    return unit


@st.composite
def _routes(draw: Draw, may_leave: bool) -> Route:
    if not (may_leave and draw(st.booleans())):
        return Route()
    stays_after_forward = draw(st.booleans())
    return Route(
        HOST_MEMORY,
        stays_after_forward=stays_after_forward,
        stays_after_backward=draw(st.booleans()),
        moves=not stays_after_forward and draw(st.booleans()),
        ahead=draw(st.integers(0, 20)),
        ahead_in_backward=draw(st.integers(0, 20)),
    )


#: Policies that plan only for nodes with drives.
NEED_DRIVES = frozenset({"zero_infinity", "mlp_offload"})


@cache
def _flags(name: str) -> dict[str, st.SearchStrategy[str]]:
    """The allowed values of each flag of a policy, by the types of its fields."""
    texts: dict[str, st.SearchStrategy[str]] = {}
    for flag, wanted in typing.get_type_hints(POLICIES[name]).items():
        if wanted is bool or wanted == bool | None:
            texts[flag] = st.sampled_from([flag, f"{flag}=on", f"{flag}=off"])
        elif isinstance(wanted, type) and issubclass(wanted, Enum):
            texts[flag] = st.sampled_from(
                [f"{flag}={member.value}" for member in wanted if member is not Checkpointing.SELECTIVE]
            )
        elif wanted is str:
            texts[flag] = st.just(f"{flag}=nvme")
        else:
            texts[flag] = st.integers(1, 100).map(f"{flag}={{}}".format)
    return texts


@st.composite
def policies(draw: Draw, name: str | None = None) -> NamedPolicy:
    """Published systems (or the one called ``name``) with some of their flags set.

    None recomputes selectively, because a profile need not support it.
    """
    name = name or draw(st.sampled_from(sorted(set(POLICIES) - NEED_DRIVES)))
    texts = _flags(name)
    chosen = draw(st.lists(st.sampled_from(sorted(texts)), unique=True)) if texts else []
    try:
        return parse_policy(f"{name}:{','.join(draw(texts[flag]) for flag in chosen)}" if chosen else name)
    except InputError:  # flags that contradict each other
        reject()


@st.composite
def schedules(draw: Draw, sharing: bool = False, max_tasks: int = 12) -> Schedule:
    """Valid periodic schedules that no plan would give, with durations of a few nanoseconds.

    Args:
        sharing: lanes draw from one to three resources that may not suffice for all of them.
        max_tasks: at most so many tasks.
    """
    lanes = [Lane(name, draw(st.sampled_from(Discipline))) for name in ("gpu", "h2d", "d2h", "cpu")[: draw(st.integers(1, 4))]]
    one = st.tuples(st.sampled_from(Kind), st.integers(0, 3)).map(lambda named: TaskId(*named))
    ids = draw(st.lists(one, unique=True, min_size=1, max_size=max_tasks))
    tasks: list[Task] = []
    names = [lane.name for lane in lanes]
    for place, task in enumerate(ids):
        # Edges of the same iteration lead up the list, which is also the order of the fifo lanes: there is no cycle.
        edges = [Edge(before) for before in ids[:place] if draw(_rarely)]
        edges += [Edge(before, back=1) for before in ids if draw(_rarely)]
        duration = draw(st.integers(0, 6) if draw(st.booleans()) else st.just(draw(st.integers(0, 40))))
        tasks.append(Task(task, draw(st.sampled_from(names)), duration, tuple(edges), draw(st.integers(-2, 2))))
    memories = (Memory("gpu", 1000), Memory("host", 1000), Memory("pinned", 500, part_of="host"))
    places = [draw(st.sampled_from(memories)).name for _ in range(draw(st.integers(0, 2)))]
    resident = tuple(Buffer(BufferId(Value.OTHER, name, i), draw(st.integers(0, 9))) for i, name in enumerate(places))
    flows: tuple[Flow, ...] = ()
    resources: tuple[SharedResource, ...] = ()
    if sharing:
        small = st.sampled_from([1.0, 2.0, 3.0, 5.0, 8.0])
        flows = tuple(Flow(name, draw(small), draw(small)) for name in names)
        resources = tuple(
            SharedResource(
                f"share{i}",
                draw(small),
                tuple(draw(st.lists(st.sampled_from(names), unique=True, min_size=1))),
                counts_lanes=draw(st.booleans()),
            )
            for i in range(draw(st.integers(1, 3)))
        )
    return validate(Schedule(tuple(lanes), tuple(_with_buffers(draw, tasks)), memories, resident, flows, resources))


_rarely = st.sampled_from([False, False, False, True])


def _with_buffers(draw: Draw, tasks: list[Task]) -> list[Task]:
    """Some tasks allocate; the task itself, or one that waits for it, frees."""
    allocates: dict[TaskId, list[Buffer]] = {task.id: [] for task in tasks}
    frees: dict[TaskId, list[Free]] = {task.id: [] for task in tasks}
    for number, task in enumerate(tasks):
        if not draw(st.booleans()):
            continue
        buffer = BufferId(draw(st.sampled_from(Value)), draw(st.sampled_from(["gpu", "host", "pinned"])), 9 + number)
        allocates[task.id].append(Buffer(buffer, draw(st.integers(0, 9))))
        waiting = [(other.id, edge.back) for other in tasks for edge in other.after if edge.task == task.id]
        who, back = draw(st.sampled_from([(task.id, 0), *waiting]))
        frees[who].append(Free(buffer, back))
    return [
        Task(task.id, task.lane, task.duration_ns, task.after, task.priority, tuple(allocates[task.id]), tuple(frees[task.id]))
        for task in tasks
    ]
