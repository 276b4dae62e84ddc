"""Lowering of plans to tasks. :func:`lower` is the only place that makes tasks from plans.

:func:`_tasks` follows the course of an iteration: bring what a pass needs, compute the pass, and send what it leaves behind to
where it rests (``compute.py``, ``parameters.py``, ``activations.py``, ``updates.py``). Each task declares what it reads and
writes; the dependencies follow from that (``builder.py``, ``waits.py``). Published systems differ in their rules, which only
add order (``autohete/plan/rules.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autohete.analysis.occupancy import unavoidable_bytes
from autohete.analysis.ranks import Ranks
from autohete.collector import paused_collector
from autohete.errors import InfeasibleError, InputError, OnePoolError
from autohete.hardware import Hardware, Place
from autohete.lowering.activations import OffloadedActivations
from autohete.lowering.builder import Builder
from autohete.lowering.clipping import ClippingTasks
from autohete.lowering.compute import Compute, begins_of, passes_of
from autohete.lowering.copies import Copies, lane_between, update_lane
from autohete.lowering.durations import Duration
from autohete.lowering.footprint import pinned_memory, resident_buffers, shared_bandwidth, shared_interconnect
from autohete.lowering.frozen import without_frozen
from autohete.lowering.parameters import Parameters, Stay
from autohete.lowering.shards import Shards
from autohete.lowering.sizes import sizes_of
from autohete.lowering.slots import least_slots, lives_of, share_slots
from autohete.lowering.stages import PipelineRank, joined, of_one_rank, ranks_of
from autohete.lowering.tied import copied_parameters, on_one_rank, with_copy
from autohete.lowering.transfers import Transfers
from autohete.lowering.updates import Updates
from autohete.lowering.waits import CycleError, explained
from autohete.plan import Activations, DealtStages, PassOrder, Plan, Processor, Route
from autohete.plan.rules import Rule
from autohete.profile import LONGEST_TASK_SECONDS, Profile
from autohete.quantities import format_bytes
from autohete.schedule import (
    COLLECTIVE,
    CPU,
    D2H,
    GPU,
    GPU_MEMORY,
    H2D,
    HOST_MEMORY,
    KIND_MEANING,
    PINNED_MEMORY,
    SEND,
    Buffer,
    Discipline,
    Kind,
    Lane,
    Memory,
    SavedNames,
    Schedule,
    Task,
    is_gpu,
    lending_rank,
)

__all__ = ["least_parameter_slots", "lower", "never_fits"]

#: Number of lowered plans that are kept for profiles that differ in times and rates only, such as the settings of a sweep. A
#: plan is kept when it is lowered a second time: a search lowers hundreds once, and the garbage collector would only look at
#: them again.
_KEPT, _REMEMBERED = 32, 256


def lower(profile: Profile, plan: Plan) -> Schedule:
    """Return the schedule of ``plan`` for the workload and hardware of ``profile``.

    Raises:
        InfeasibleError: the hardware does not have a place where values rest.
        OnePoolError: the hardware is unified, and the plan uses the CPU or its memory.
        InputError: the plan is for another number of units, its gradients replace parameters that are still needed, it has too
            few slots, several GPUs cannot shard what they should, or one of its rules contradicts another rule or the data
            dependencies.
    """
    if len(plan.units) != len(profile.units):
        raise InputError(f"the plan has {len(plan.units)} units, the profile {len(profile.units)}: plan for this workload")
    profile = with_copy(profile, plan)
    lowered, hardware = _for_all_rates(profile, plan), profile.hardware
    schedule = lowered.schedule
    if hardware.unified:
        _check_one_pool(hardware.name, schedule.tasks)
    places = [_place_for(hardware, name, needed) for name, needed in lowered.places]
    for name in _updating(plan):
        _check_computes(hardware, name, dict(lowered.places)[name])
    alike = of_one_rank(profile, plan)
    flows, resources = shared_bandwidth(alike.hardware, places, uses_cpu=lowered.uses_cpu)
    memories = _memories(hardware, {place.name: place.capacity_bytes for place in places})
    if plan.is_pipeline:
        ranks = _written_out(hardware, plan)
        memories, flows, resources = ranks.memories(memories), ranks.flows(flows), ranks.resources(resources)
        lent = [lane for lane in schedule.lanes if _is_between_gpus(lane)]
        more_flows, more_resources = shared_interconnect(hardware, lent)
        flows, resources = (*flows, *more_flows), (*resources, *more_resources)
    profile = alike
    seconds = [duration(profile) for duration in lowered.durations]
    if not all(each < LONGEST_TASK_SECONDS for each in seconds):
        _refuse_absurd([seconds[which] for which in lowered.lasts], schedule.tasks)
    whole = [round(each * 1e9) for each in seconds]
    return schedule.timed([whole[which] for which in lowered.lasts], memories, flows, resources)


def never_fits(profile: Profile, plan: Plan) -> bool:
    """Whether a memory is too small for ``plan``, however long its tasks take.

    Raises:
        InputError: as for :func:`lower`.
    """
    lowered = _for_all_rates(with_copy(profile, plan), plan)
    memories = _memories(profile.hardware, {})
    if plan.is_pipeline:
        memories = _written_out(profile.hardware, plan).memories(memories)
    return any(unavoidable_bytes(lowered.schedule, memory.name) > memory.capacity_bytes for memory in memories)


def _refuse_absurd(seconds: Sequence[float], tasks: tuple[Task, ...]) -> None:
    for task, each in zip(tasks, seconds, strict=True):
        if not each < LONGEST_TASK_SECONDS:
            raise InputError(
                f"{task.id} ({KIND_MEANING[task.id.kind]}) would last {each:.3g} s: the workload is too large for this "
                f"hardware, or a rate too low; a task may last {LONGEST_TASK_SECONDS:.0e} s"
            )


@dataclass(frozen=True, slots=True)
class _Lowered:
    """The schedule of a plan for all profiles of the same sizes.

    Args:
        schedule: without durations, capacities and shared bandwidth.
        durations: the different ones.
        lasts: for each task, its place among the durations.
        places: the places that it uses, with the bytes that always rest there.
        uses_cpu: whether the CPU has a task.
    """

    schedule: Schedule
    durations: tuple[Duration, ...]
    lasts: tuple[int, ...]
    places: tuple[tuple[str, int], ...]
    uses_cpu: bool


def _for_all_rates(profile: Profile, plan: Plan) -> _Lowered:
    """Lower ``plan``, or take what was kept."""
    sizes = sizes_of(profile)
    return _kept(sizes, plan) if _was_asked(hash((sizes, plan))) else _lowered(sizes, plan)


@lru_cache(maxsize=_KEPT)
def _kept(sizes: Profile, plan: Plan) -> _Lowered:
    return _lowered(sizes, plan)


#: Hashes of what was lowered lately, oldest first.
_lately: dict[int, None] = {}


def _was_asked(key: int) -> bool:
    """Whether ``key`` was asked before, and remember it."""
    if key in _lately:
        return True
    _lately[key] = None
    if len(_lately) > _REMEMBERED:
        _lately.pop(next(iter(_lately)), None)
    return False


@lru_cache(maxsize=4)  # a plan that might fit is lowered again at once, and the next setting of a sweep has the same few
@paused_collector()
def _lowered(profile: Profile, plan: Plan) -> _Lowered:
    """Lower ``plan`` for a profile without times and rates."""
    plan = without_frozen(profile, plan)
    if not profile.workload.has_masters and any(
        unit.gradients_replace_parameters and unit.update.on is Processor.GPU for unit in plan.units
    ):
        raise InputError(
            "gradients cannot replace parameters that the GPU updates and that are their own master weights: update on the "
            "CPU, or train in 16 bit with masters"
        )
    if profile.workload.has_masters and any(unit.parameters_with_states for unit in plan.units):
        raise InputError("parameters_with_states is for parameters that are their own masters: train without masters")
    if profile.workload.micro_batches > 1:
        _check_accumulation(profile, plan)
    if on_one_rank(profile, plan) and plan.units[0].parameters.leaves:
        raise InputError("the head shares the embedding's matrix, so that cannot leave the GPU: let the first unit stay there")
    _check_places(profile, plan)
    hardware = profile.hardware
    asked = hardware.parallelism.pipeline
    if asked not in (1, plan.ranks):
        cure = "leave its ranks out" if plan.is_pipeline else "choose a policy such as pipeline"
        raise InputError(
            f"{asked} GPUs are to share a pipeline (pp={asked}), but {plan.policy} gives {plan.ranks} a part of the model: "
            f"{cure}, or leave pp out"
        )
    if plan.is_pipeline:
        _check_pipeline(profile, plan)
    profile = of_one_rank(profile, plan)
    shards = Shards(profile, plan)
    shards.check()
    ordered = [_ordered(profile, plan, shards, rank) for rank in ranks_of(plan, profile.workload.micro_batches)]
    builder, order = ordered[0]
    homes = sorted({home for unit in plan.units for home in unit.homes} - {GPU_MEMORY, HOST_MEMORY, *plan.lenders})
    resident = tuple(resident_buffers(profile, plan, shards))
    used = tuple((home, sum(each.size_bytes for each in resident if each.memory == home)) for home in homes)
    discipline = Discipline.PRIORITY if builder.by_priority else Discipline.FIFO
    lanes = [] if hardware.unified else [Lane(name, discipline) for name in (H2D, D2H, CPU)]
    for home in (*homes, *plan.lenders):
        near = GPU_MEMORY if home in (*hardware.beside_gpu, *plan.lenders) else HOST_MEMORY
        ends = (home, near), (near, home)
        lanes += [Lane(lane_between(*pair), discipline, *pair) for pair in ends]
    lanes += [Lane(update_lane(home), discipline) for home in _updating(plan)]
    # GPUs must agree on the order of their collectives: that of issue, or with priorities what is most urgent on all.
    lanes = [Lane(GPU), *lanes, *([Lane(COLLECTIVE, discipline)] if profile.hardware.gpus > 1 else [])]
    memories = _memories(hardware, dict.fromkeys(homes, 0))
    if plan.is_pipeline:
        ranks = _written_out(hardware, plan)
        lanes, memories = [*ranks.lanes([*lanes, Lane(SEND, discipline)])], ranks.memories(memories)
        resident = tuple(_resident_of_ranks(plan, resident, ranks))
        tasks, durations = joined(ordered, ranks)
        if plan.lenders:  # a rank has lanes to those which lend to it
            working = {task.lane for task in tasks}
            lanes = [lane for lane in lanes if lane.name in working or not _is_between_gpus(lane)]
    else:
        tasks, durations = builder.tasks(order), builder.durations(order)
    saved = tuple(_saved_names(plan, shards))
    schedule = Schedule(lanes=tuple(lanes), tasks=tasks, memories=memories, resident=resident, saved=saved)
    uses_cpu = any(task.lane.partition(".")[0] == CPU for task in schedule.tasks)
    places = {duration: place for place, duration in enumerate(dict.fromkeys(durations))}
    return _Lowered(schedule, tuple(places), tuple(places[duration] for duration in durations), used, uses_cpu)


def _saved_names(plan: Plan, shards: Shards) -> Iterator[SavedNames]:
    """The names of the saved tensors in each part, but the one where the others are."""
    for i, unit in enumerate(plan.units):
        parts = enumerate(shards.saved_parts(i)) if unit.saved else ()
        kept = unit.kept if unit.kept.leaves else Route()
        yield from (SavedNames(i, at, tuple(sorted(one.names))) for at, one in parts if one.recomputed or one.route != kept)
        yield from (SavedNames(i, at, tuple(one.names)) for at, one in enumerate(shards.results(i), 1))


def _memories(hardware: Hardware, places: Mapping[str, int]) -> tuple[Memory, ...]:
    """The memories of a GPU and its host, and ``places`` with their capacities."""
    found = [Memory(GPU_MEMORY, hardware.gpu_capacity_bytes), Memory(HOST_MEMORY, hardware.host.memory_bytes)]
    if hardware.host.pinned_bytes is not None:
        found.append(Memory(PINNED_MEMORY, hardware.host.pinned_bytes, part_of=HOST_MEMORY))
    return (*found, *(Memory(name, capacity) for name, capacity in places.items()))


def _ordered(profile: Profile, plan: Plan, shards: Shards, rank: PipelineRank) -> tuple[Builder, list[int]]:
    """Return the tasks of a rank with all waits from data, rules and slots, and their issue order."""
    builder, stays = _tasks(profile, plan, shards, rank)
    builder.order_by_data()
    _apply(plan.rules, builder)
    try:
        order = builder.order()
        if plan.slots is not None:
            share_slots(builder, lives_of(builder, stays, order), plan.slots.count)
            order = builder.order()
    except CycleError as error:
        raise explained(error, [draft.id for draft in builder.drafts], plan.rules) from None
    builder.waits.reduce(order)
    return builder, order


def _check_one_pool(name: str, tasks: tuple[Task, ...]) -> None:
    """Refuse a plan with tasks that no engine of unified hardware runs."""
    task = next((task for task in tasks if task.lane.partition(".")[0] not in (GPU, COLLECTIVE, SEND)), None)
    if task is not None:
        raise OnePoolError(
            f"needs lane {task.lane} ({task.id}), but {name} is unified: one pool of memory, and nothing to copy; choose "
            "resident, with or without checkpointing, or joint"
        )


def _place_for(hardware: Hardware, name: str, needed: int) -> Place:
    """Return the place that a plan uses."""
    place = hardware.place(name)
    if place is None:
        there = f"its places are {', '.join(each.name for each in hardware.places)}" if hardware.places else "it has no places"
        raise InfeasibleError(
            f"the plan lets {format_bytes(needed)} ({needed} B) rest in {name}, but {hardware.name} has no such place; "
            f"{there}. Give it a table [places.{name}], choose other hardware, or another policy",
            constraint=name,
            capacity_bytes=0,
            needed_bytes=needed,
        )
    return place


def _updating(plan: Plan) -> list[str]:
    """The places that update."""
    return sorted({unit.states.home for unit in plan.units if unit.update.on is Processor.PLACE})


def _check_computes(hardware: Hardware, name: str, needed: int) -> None:
    """Refuse a place that does not update what rests in it."""
    place = hardware.place(name)
    if place is None or place.update_bandwidth is None:
        raise InfeasibleError(
            f"the plan updates {format_bytes(needed)} ({needed} B) in {name}, which does not compute on {hardware.name}: give "
            f"the figure places.{name}.update_bandwidth, choose other hardware, or another policy",
            constraint=name,
            capacity_bytes=0,
            needed_bytes=needed,
        )


def _check_places(profile: Profile, plan: Plan) -> None:
    """Refuse what the CPU updates with values that it cannot reach."""
    beside = profile.hardware.beside_gpu
    for i, unit in enumerate(plan.units):
        if unit.update.on is not Processor.CPU or profile.units[i].is_frozen:
            continue
        if wrong := [home for home in (unit.states.home, unit.gradients.home, unit.parameters.home) if home in beside]:
            raise InputError(
                f"values of unit {i} rest in {wrong[0]}, which only the GPU reaches, but the CPU updates it: update on the "
                "GPU, or let them rest on the host"
            )
        if unit.parameters.far and not profile.workload.has_masters:
            raise InputError(
                f"parameters of unit {i} rest in {unit.parameters.home} and are their own master weights, which the CPU "
                "updates: let them rest on the host, update on the GPU, or train in 16 bit with masters"
            )


def _check_pipeline(profile: Profile, plan: Plan) -> None:
    """Refuse what stages of a pipeline cannot do."""
    hardware, stages, micro_batches = profile.hardware, plan.stages, profile.workload.micro_batches
    pipelines, of_node = hardware.gpus // plan.ranks, hardware.gpus_of_node
    if hardware.gpus % plan.ranks or max(pipelines, of_node) % min(pipelines, of_node):
        raise InputError(
            f"the plan's units are on {plan.ranks} ranks, but {hardware.gpus} GPUs train together, {of_node} on a node: give "
            "as many GPUs as ranks, or so many times as many that neighbours share a node evenly or fill nodes"
        )
    if pipelines % (neighbours := hardware.parallelism.neighbours):
        raise InputError(
            f"{neighbours} GPUs divide sequences or experts ({hardware.parallelism}), but only {pipelines} compute the same "
            "units: give the pipeline fewer ranks"
        )
    if plan.dealt is not None:
        _check_dealt(profile, plan, plan.dealt)
        return
    if len(stages) > plan.ranks and plan.pass_order is PassOrder.ONE_FORWARD_ONE_BACKWARD:
        if len(stages) % plan.ranks:
            raise InputError(
                f"{len(stages)} stages are dealt to {plan.ranks} ranks, which take turns with them: give each rank as many"
            )
        if micro_batches % plan.ranks:
            raise InputError(
                f"{plan.ranks} ranks with {len(stages) // plan.ranks} stages each train {micro_batches} micro-batches: give a "
                "multiple of the ranks, or one stage to each"
            )
    on_host = [unit for unit in (0, len(plan.units) - 1) if plan.units[unit].accumulates_on_host]
    if on_host and micro_batches > 1 and copied_parameters(profile, plan):
        raise InputError(
            f"gradients of unit {on_host[0]} are summed on the host, but two ranks have copies of the matrix that embedding "
            "and head share, whose gradients they sum up: sum on the GPU, or untie the embeddings"
        )
    for i, unit in enumerate(plan.units):
        route = unit.parameters
        if micro_batches > 1 and (route.stays_after_forward or route.stays_after_backward):
            raise InputError(
                f"parameters of unit {i} stay between forward and backward, but passes of other micro-batches come in between: "
                "let them not stay, or train one micro-batch"
            )
    for i, unit in enumerate(plan.units):
        for home in {*unit.homes} & {*plan.lenders}:
            join, lender = hardware.interconnect, lending_rank(home) or 0
            if join is None or join.through_host or lender * pipelines // of_node != (unit.rank or 0) * pipelines // of_node:
                raise InputError(
                    f"what forward of unit {i} keeps rests in {home}, but rank {unit.rank} does not copy to that GPU directly: "
                    "give hardware whose GPUs do, and a rank of the same node, or let it rest on the host"
                )
    if dropping := [stage[0] for stage in stages if plan.units[stage[0]].activations is Activations.DROP]:
        raise InputError(
            f"unit {dropping[0]} drops its input, which comes from another rank and is not recomputed: let it keep its input"
        )


def _check_dealt(profile: Profile, plan: Plan, dealt: DealtStages) -> None:
    """Refuse what GPUs cannot do that stages are dealt to."""
    hardware = profile.hardware
    if not hardware.gpus == plan.ranks <= hardware.gpus_of_node:
        raise InputError(
            f"stages are dealt to {plan.ranks} GPUs, but {hardware.gpus} train together, {hardware.gpus_of_node} on a node: "
            "give as many GPUs, of one node, as what a stage leaves rests on their host"
        )
    if dealt.backward[-1] > profile.first_trained:
        raise InputError(
            f"unit {profile.first_trained} is trained, but the last stage of backward begins at unit {dealt.backward[-1]}: let "
            "it begin there or below"
        )
    if dealt.backward[1:] and dealt.backward[-2] <= profile.first_trained:
        raise InputError(
            f"the last stage of backward has units from {dealt.backward[-1]} to {dealt.backward[-2] - 1}, but none of them has "
            "a backward: leave that stage out"
        )
    for i, unit in enumerate(plan.units):
        if i >= max(dealt.backward[0], profile.first_trained) and not unit.parameters.stays_after_forward:
            raise InputError(f"unit {i} is in the stage that computes both passes: let its parameters stay after forward")
        alone = unit.update.on is Processor.CPU and not (unit.update.share or unit.states.far or unit.gradients.leaves)
        if not (alone or profile.units[i].is_frozen):
            raise InputError(
                f"unit {i} is in stages that are dealt: sum its gradients on the GPU, and let the CPU update all of it with "
                "states on the host"
            )


def _is_between_gpus(lane: Lane) -> bool:
    """Whether a lane copies from one GPU to another, whose memory it borrows."""
    return lane.ends is not None and all(map(is_gpu, lane.ends))


def _written_out(hardware: Hardware, plan: Plan) -> Ranks:
    """The ranks of one of the pipelines, which all do the same."""
    return Ranks(hardware, pipelines=hardware.gpus // plan.ranks)


def _resident_of_ranks(plan: Plan, resident: Sequence[Buffer], ranks: Ranks) -> Iterator[Buffer]:
    """What is permanently allocated on each rank: of its units, and what every rank holds besides."""
    having = plan.backward_ranks()
    for buffer in resident:
        some = ranks.all if buffer.id.unit is None else [having[buffer.id.unit]]
        yield from (ranks.buffer(buffer, rank) for rank in some)


def _check_accumulation(profile: Profile, plan: Plan) -> None:
    on_gpu = (not (unit.accumulates_on_host or profile.units[i].is_frozen) for i, unit in enumerate(plan.units))
    if plan.delayed and plan.dealt is None and any(on_gpu):
        raise InputError(
            "a delayed update and the sums of several micro-batches need copies of their own, which only the host has: let the "
            "CPU update all units and add up their gradients, or use one micro-batch"
        )
    for i, unit in enumerate(plan.units):
        if profile.units[i].is_frozen:
            continue
        if unit.gradients_replace_parameters:
            raise InputError(
                f"gradients of unit {i} would replace parameters that the next micro-batch needs: use one micro-batch, or let "
                "gradients have memory of their own"
            )
        if unit.update.share and unit.accumulates_on_host:
            raise InputError(
                f"gradients of unit {i} are accumulated on the host, but the GPU updates a part: accumulate on the GPU, use "
                "one micro-batch, or leave the share out"
            )
        if plan.in_slot(i) and not unit.accumulates_on_host:
            raise InputError(
                f"gradients of unit {i} are to be accumulated on the GPU, but live in a slot with parameters that leave it: "
                "accumulate on the host, use one micro-batch, or slots without gradients"
            )


def least_parameter_slots(profile: Profile, plan: Plan) -> int:
    """The fewest parameter slots with which ``plan`` can be lowered; 0 if no unit's parameters leave the GPU.

    The result depends on whether slots have room for gradients, but not on the count in ``plan.slots``.
    """
    plan = without_frozen(profile, plan)
    (rank,) = ranks_of(plan, profile.workload.micro_batches)
    builder, stays = _tasks(profile, plan, Shards(profile, plan), rank)
    builder.order_by_data()
    _apply(plan.rules, builder)
    return least_slots(lives_of(builder, stays, builder.order()), len(builder.passes))


def _tasks(profile: Profile, plan: Plan, shards: Shards, rank: PipelineRank) -> tuple[Builder, list[Stay]]:
    """Return the tasks of a rank's iteration in program order, and the stays of parameters that come and go."""
    micro_batches = profile.workload.micro_batches
    recomputations = plan.recomputations()
    passes = [*passes_of(recomputations, profile.first_trained, rank)]
    begins = begins_of(recomputations, profile.first_trained, rank)
    builder = Builder(passes, gradients_back=int(plan.delayed), begins=begins)
    compute, clipping = (
        Compute(builder, profile, plan, shards, recomputations, rank),
        ClippingTasks(builder, profile, plan, shards, rank),
    )
    copies = Copies(builder, profile, plan, shards)
    updates = Updates(builder, profile, plan, shards, clipping, copies, rank.units)
    parameters = Parameters(builder, profile, plan, shards, copies, rank.units)
    transfers = Transfers(builder, profile, plan, compute)
    activations = OffloadedActivations(builder, copies, plan, shards, pinned_memory(profile))

    def update(unit: int) -> None:
        if shards.is_frozen(unit):
            parameters.after_backward(unit)
            return
        if plan.units[unit].parameters_with_states:
            parameters.after_backward(unit)
            updates.update(unit)
            return
        updates.update(unit)
        parameters.after_update(unit)

    late = []  # backwards whose gradients wait for another rank: what takes them must not hold up the passes
    for task in builder.passes:
        if task.kind is Kind.LOSS:
            compute.loss(task)
            continue
        parameters.bring(task)
        received = transfers.before(task)
        if task.kind is Kind.FORWARD:
            compute.forward(task)
            builder.after(task, received)
            transfers.after(task)
            parameters.after_forward(task)
            activations.after_forward(task)
            continue
        activations.bring(task)
        if task.kind is Kind.RECOMPUTE:
            compute.recompute(task)
            parameters.after_recompute(task)
            continue
        updates.bring_sums(task)
        compute.backward(task)
        builder.after(task, received)
        transfers.after(task)
        if task.micro_batch + 1 < micro_batches:
            updates.between(task)
            parameters.between(task.unit)
            continue
        if updates.waits_for_other_rank(task.unit):
            late.append(task)
            continue
        updates.after_backward(task)
        if not clipping.clips:
            update(task.unit)
    for task in late:
        updates.after_backward(task)
        if not clipping.clips:
            update(task.unit)
    if clipping.clips:  # no update can start before all gradients are complete
        clipping.coefficient()
        for unit in reversed(rank.units):
            if unit >= profile.first_trained:
                update(unit)
    parameters.refresh_all()
    if plan.dealt is not None:
        return builder, parameters.stays
    if shards.is_frozen(rank.units[0]):  # otherwise the first forward waits for its update, and so for the last backward
        builder.after(builder.passes[0], builder.passes[-1], back=1)
    if plan.ranks > 1 and rank.units[-1] < profile.first_trained:  # it has no backward that would wait for another rank
        builder.after(builder.passes[0], builder.of(Kind.SEND_INPUT)[-1], back=1)
    return builder, parameters.stays


def _apply(rules: tuple[Rule, ...], builder: Builder) -> None:
    for author, rule in enumerate(rules, start=1):
        builder.waits.author = author
        rule.apply(builder)
    builder.waits.author = 0
