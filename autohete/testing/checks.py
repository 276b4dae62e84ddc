"""Properties of every plan's schedule, whatever the policy. Each check returns its faults in words; an empty list means none.

:func:`policy_faults` runs them all on a policy, :func:`plan_faults` on a plan. The others look at one promise of one
schedule, for those who make or change schedules themselves:

- :func:`parameter_faults`: every forward sees the update of the iteration before, and every fetch a host copy that has it.
- :func:`gradient_faults`: every update takes finished gradients.
- :func:`clipping_faults`: where they are clipped, by a norm of all of them.
- :func:`activation_faults`: the passes follow one another, and backward finds its activations.
- :func:`memory_faults`: memory balances, does not grow, and nothing is freed before its last user has ended.
- :func:`trace_faults`: an execution follows its schedule.

Only written edges count, not the order of fifo lanes: an executor with wider lanes must train the same numbers.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from autohete.analysis.occupancy import occupancy
from autohete.analysis.worst_case import worst_case
from autohete.errors import InfeasibleError, InputError, ScheduleError
from autohete.execution.trace import Trace, check_trace
from autohete.lowering import lower
from autohete.lowering.shards import parts_of
from autohete.plan import Activations, Plan, Processor, UnitPlan
from autohete.plan.policy import Judge, Policy
from autohete.plan.rules import Rule
from autohete.profile import Profile
from autohete.schedule import (
    COLLECTIVE,
    CPU,
    GPU_MEMORY,
    HOST_MEMORY,
    Buffer,
    BufferId,
    Kind,
    Schedule,
    TaskId,
    Value,
    validate,
)
from autohete.testing.list_scheduler import list_schedule

#: Enough for every edge to have both ends in the run, and for what an iteration leaves behind to show.
_ITERATIONS = 4

#: A task of some iteration, counted from an arbitrary one.
Instance = tuple[TaskId, int]


def policy_faults(profile: Profile, policy: Policy, judge: Judge) -> list[str]:
    """Faults of what ``policy`` decides for ``profile``; none if it reports that nothing fits. Of a pipeline, only those of its
    execution.

    Args:
        profile: the profile to plan for, such as an example of :func:`autohete.testing.strategies.profiles`.
        policy: the policy. Its plan has its name, and is the same in a second call.
        judge: the judge that the policy may call, such as ``autohete.simulate.judge_for(profile)``.
    """
    try:
        plan, again = policy.plan(profile, judge), policy.plan(profile, judge)
    except InfeasibleError:
        return []
    faults = execution_faults(profile, plan) if plan.is_pipeline else plan_faults(profile, plan)
    if plan != again:
        faults.append(f"{policy.name} returns another plan for the same profile")
    if plan.policy != policy.name:
        faults.append(f"the plan of {policy.name} is called {plan.policy}")
    return faults


def execution_faults(profile: Profile, plan: Plan) -> list[str]:
    """Faults of the execution of a plan's schedule."""
    try:
        return trace_faults(list_schedule(validate(lower(profile, plan)), _ITERATIONS))
    except InfeasibleError:
        return []
    except (InputError, ScheduleError) as error:
        return [str(error)]


def plan_faults(profile: Profile, plan: Plan) -> list[str]:
    """Faults of the schedule of ``plan`` and of its execution. A failure to lower or execute it is also a fault.

    A plan with values in a place that the hardware does not have has no schedule and no faults.

    Raises:
        InputError: the plan is a pipeline.
    """
    if plan.is_pipeline:
        raise InputError("plans are checked whose units every GPU computes, but this one has ranks: leave them out")
    try:
        schedule = validate(lower(profile, plan))
    except InfeasibleError:
        return []
    except (InputError, ScheduleError) as error:
        return [str(error)]
    return [
        *parameter_faults(profile, plan, schedule),
        *gradient_faults(profile, plan, schedule),
        *clipping_faults(profile, plan, schedule),
        *activation_faults(profile, plan, schedule),
        *memory_faults(schedule),
        *trace_faults(list_schedule(schedule, _ITERATIONS)),
    ]


class Paths:
    """Which task instances of a schedule wait, directly or not, for which others by written edges."""

    def __init__(self, schedule: Schedule) -> None:
        self.tasks = {task.id for task in schedule.tasks}
        self._after: dict[TaskId, list[Instance]] = {}
        for task in schedule.tasks:
            for edge in task.after:
                self._after.setdefault(edge.task, []).append((task.id, edge.back))
        self._reached: dict[TaskId, set[Instance]] = {}

    def exist(self, before: TaskId, after: TaskId, later: int = 0) -> bool:
        """Whether ``after`` waits for ``before`` of ``later`` iterations before, 0 or 1."""
        if before not in self._reached:
            reached: set[Instance] = set()
            stack = [(before, 0)]
            while stack:
                task, iteration = stack.pop()
                for follower, back in self._after.get(task, ()):
                    step = (follower, iteration + back)
                    if step[1] <= 1 and step not in reached:
                        reached.add(step)
                        stack.append(step)
            self._reached[before] = reached
        return (after, later) in self._reached[before]


def idle_rules(profile: Profile, plan: Plan) -> list[Rule]:
    """The rules of ``plan`` without each of which it is lowered to the same schedule: they add nothing to the others."""
    schedule = lower(profile, plan)
    without = [plan.rules[:place] + plan.rules[place + 1 :] for place in range(len(plan.rules))]
    return [
        rule
        for rule, rest in zip(plan.rules, without, strict=True)
        if str(lower(profile, replace(plan, rules=rest))) == str(schedule)
    ]


def chain_faults(paths: Paths, *chain: Instance) -> list[str]:
    """Tasks of ``chain`` that do not exist, and those that do not wait for the one before."""
    if missing := [f"{task} is missing" for task, _ in chain if task not in paths.tasks]:
        return missing
    return [
        f"{after.at(at)} does not wait for {before.at(since)}"
        for (before, since), (after, at) in itertools.pairwise(chain)
        if not paths.exist(before, after, at - since)
    ]


def parameter_faults(profile: Profile, plan: Plan, schedule: Schedule) -> list[str]:
    """Forwards that may not see the update of the iteration before, and copies that may read or write the wrong parameters.

    Args:
        profile: specifies whether the head shares the embedding's matrix.
        plan: specifies where each unit is updated and where its parameters stay.
        schedule: of this plan.
    """
    paths, last = Paths(schedule), len(plan.units) - 1
    faults: list[str] = []
    end = profile.workload.micro_batches - 1  # the last micro-batch, whose backward the update follows
    faults += [
        f"{task.id} is there, but unit {task.id.unit} is frozen"
        for task in schedule.tasks
        if task.id.kind in _OF_TRAINED and profile.units[task.id.unit].is_frozen
    ]
    for unit, decisions in enumerate(plan.units):
        if profile.units[unit].is_frozen:
            faults += _frozen_faults(paths, plan, unit, has_backward=unit >= profile.first_trained)
            continue
        elsewhere, in_place = decisions.update.on is not Processor.GPU, decisions.update.on is Processor.PLACE
        route = decisions.parameters
        leaves = route.home != GPU_MEMORY
        forward, backward = TaskId(Kind.FORWARD, unit), TaskId(Kind.BACKWARD, unit, end)
        update = _elsewhere(decisions, unit) if elsewhere else _update_parts(paths, unit)[-1]
        changes = TaskId(Kind.READ_UPDATED, unit) if in_place else update  # what the host has
        refresh = TaskId(Kind.REFRESH, unit)
        moved, written_back = TaskId(Kind.WRITE_BACK_FORWARD, unit), TaskId(Kind.WRITE_BACK_BACKWARD, unit)
        if decisions.parameters_with_states:  # each part of the states takes its parameters along
            written_back = update._replace(kind=Kind.WRITE_BACK_STATES)
            for part in _update_parts(paths, unit):
                home = part._replace(kind=Kind.WRITE_BACK_STATES), 0
                faults += chain_faults(paths, (part, 0), home, (TaskId(Kind.PREFETCH_FORWARD, unit), 1))
        fetches = {
            TaskId(Kind.PREFETCH_FORWARD, unit): leaves and not route.stays_after_backward,
            TaskId(Kind.PREFETCH_BACKWARD, unit): leaves and not route.stays_after_forward,
        }
        (fetch_forward, stays_not), (fetch_backward, returns) = fetches.items()
        stage = _zero_stage(schedule, decisions)
        gathers = {
            TaskId(Kind.GATHER_FORWARD, unit): stage == 3,
            TaskId(Kind.GATHER_BACKWARD, unit): stage == 3 and not route.stays_after_forward,
            TaskId(Kind.GATHER_UPDATED, unit): stage in (1, 2),
        }
        gather_forward, gather_backward, gather_updated = gathers
        brought = {**fetches, **gathers}
        faults += [f"{task} brings what is there" for task, wanted in brought.items() if task in paths.tasks and not wanted]

        # From the update to the next forward, through what carries the parameters where they change sides or are in parts.
        chain = [(update, 0), *([(changes, 0)] if in_place else [])]
        for m in range(end + 1) if gathers[gather_backward] else ():  # not a second copy
            faults += chain_faults(paths, *((task._replace(micro_batch=m), 0) for task in (forward, gather_backward)))
        if (also := TaskId(Kind.GPU_UPDATE, unit)) != update and decisions.update.share and also in paths.tasks:
            faults += chain_faults(paths, (backward, 0), (also, 0), (forward, 1))
        if elsewhere and not stays_not:
            chain.append((refresh, 0))
            reader = gather_backward._replace(micro_batch=end) if stage == 3 else backward
            faults += chain_faults(paths, (reader, 0), (refresh, 0))  # which overwrites what is read for backward
            faults += chain_faults(paths, (refresh, 0), (changes, 1))  # which overwrites what the refresh reads
        if not elsewhere and stays_not:
            chain.append((written_back, 0))
        through = _behind_host(schedule, route.home)
        written, read_forward, read_backward = (
            [TaskId(kind, unit)] if through else [] for kind in (Kind.WRITE_PARAMETERS, Kind.READ_FORWARD, Kind.READ_BACKWARD)
        )
        if stays_not:
            chain += [(task, 0) for task in written]
        if gathers[gather_updated]:
            chain.append((gather_updated, 0))
        if stays_not:
            chain += [*((task, 1) for task in read_forward), (fetch_forward, 1)]
        if stage == 3:
            chain.append((gather_forward, 1))
        faults += chain_faults(paths, *chain, (forward, 1))
        if unit == 0 and profile.workload.tied_embeddings:
            faults += chain_faults(paths, *chain, (TaskId(Kind.FORWARD, last), 1))

        # Backward fetches what is on the host: by then the host has the last update.
        if returns:
            carried_by = (moved, 1) if route.moves else (written_back, 0)
            user = TaskId(Kind.BACKWARD if decisions.activations is Activations.KEEP else Kind.RECOMPUTE, unit)
            if stage == 3:
                faults += chain_faults(paths, (fetch_backward, 0), (gather_backward, 0), (user, 0))
            between = [*((task, 0) for task in written), *((task, 1) for task in read_backward)]
            faults += chain_faults(paths, (changes, 0) if elsewhere else carried_by, *between, (fetch_backward, 1), (user, 1))
        # What was on the GPU before the update does not overwrite it on the host, nor is it overwritten while it is read.
        if route.moves and not route.stays_after_forward:
            last_moved = TaskId(Kind.WRITE_BACK_FORWARD, unit, end)
            faults += chain_faults(paths, (TaskId(Kind.FORWARD, unit, end), 0), (last_moved, 0), (update, 0))
        if elsewhere:
            fetched = [TaskId(fetch.kind, unit, end) for fetch, wanted in fetches.items() if wanted]
            faults += [fault for fetch in fetched for fault in chain_faults(paths, (fetch, 0), (changes, 0))]
    return faults


#: Tasks that only units with trained parameters have.
_OF_TRAINED = (
    Kind.GPU_UPDATE,
    Kind.CPU_UPDATE,
    Kind.OFFLOAD_GRADIENTS,
    Kind.FETCH_GRADIENTS,
    Kind.REDUCE_GRADIENTS,
    Kind.ACCUMULATE,
    Kind.GRADIENT_NORM,
    Kind.REFRESH,
    Kind.WRITE_BACK_BACKWARD,
    Kind.GATHER_UPDATED,
    Kind.FETCH_STATES,
    Kind.WRITE_BACK_STATES,
    Kind.READ_STATES,
    Kind.WRITE_STATES,
    Kind.WRITE_GRADIENTS,
    Kind.WRITE_PARAMETERS,
    Kind.PLACE_UPDATE,
    Kind.READ_UPDATED,
)


def _frozen_faults(paths: Paths, plan: Plan, unit: int, *, has_backward: bool) -> list[str]:
    """Passes of a frozen unit whose parameters may not be there."""
    route = plan.units[unit].parameters
    forward, fetch = TaskId(Kind.FORWARD, unit), TaskId(Kind.PREFETCH_FORWARD, unit)
    stays = has_backward and route.stays_after_backward
    faults = chain_faults(paths, (fetch, 0), (forward, 0)) if route.leaves and not stays else []
    user = TaskId(Kind.BACKWARD if plan.units[unit].activations is Activations.KEEP else Kind.RECOMPUTE, unit)
    fetch = TaskId(Kind.PREFETCH_BACKWARD, unit)
    if has_backward and route.leaves and not route.stays_after_forward:
        faults += chain_faults(paths, (forward, 0), (fetch, 0), (user, 0))
    if not has_backward:
        faults += [f"{task} is there, but unit {unit} has no backward" for task in (fetch, user) if task in paths.tasks]
    return faults


def gradient_faults(profile: Profile, plan: Plan, schedule: Schedule) -> list[str]:
    """Updates that may take gradients that are unfinished, not yet copied, already freed, or overwritten by the next ones.

    Args:
        profile: specifies which units are frozen.
        plan: specifies where each unit is updated.
        schedule: of this plan.
    """
    paths, micro_batches = Paths(schedule), schedule.micro_batches
    faults = [
        f"{task.id} frees {free.id}, but they do not replace the parameters"
        for task in schedule.tasks
        for free in task.frees
        if free.id.value is Value.GRADIENTS and task.id.kind is Kind.BACKWARD
        if free.id.unit is not None and not plan.units[free.id.unit].gradients_replace_parameters
        # On the GPU those of later micro-batches are added to the first's.
        if not free.id.micro_batch or plan.units[free.id.unit].accumulates_on_host
    ]
    faults += [
        f"{task.id} frees {free.id}, which the update takes"
        for task in schedule.tasks
        for free in task.frees
        if free.id.value is Value.GRADIENT_SHARD and task.id.kind is Kind.REDUCE_GRADIENTS
    ]
    for unit, decisions in enumerate(plan.units):
        if profile.units[unit].is_frozen:
            continue
        backwards = [TaskId(Kind.BACKWARD, unit, m) for m in range(micro_batches)]
        backward = backwards[-1]
        stage, reduced = _zero_stage(schedule, decisions), {}
        if _several_gpus(schedule):
            each = decisions.accumulates_on_host or (stage >= 2 and not plan.sums_whole)
            reduced = {task: task._replace(kind=Kind.REDUCE_GRADIENTS) for task in (backwards if each else backwards[-1:])}
            faults += [fault for task, reduce in reduced.items() for fault in chain_faults(paths, (task, 0), (reduce, 0))]
        if decisions.update.on is Processor.GPU:
            update, *others = _update_parts(paths, unit)
            faults += chain_faults(paths, (backward, 0), *((part, 0) for part in (update, *others)))
            if decisions.sums_leave:
                carried = [
                    ((task, 0), (task._replace(kind=Kind.OFFLOAD_GRADIENTS), 0), (then._replace(kind=Kind.FETCH_GRADIENTS), 0))
                    for task, then in itertools.pairwise(backwards)
                ]
                faults += chain_faults(paths, *itertools.chain.from_iterable(carried), (backward, 0), (update, 0))
                faults += chain_faults(paths, *((task, 0) for task in backwards), (backwards[0], 1))
            faults += [fault for reduce in reduced.values() for fault in chain_faults(paths, (reduce, 0), (update, 0))]
            faults += [fault for part in (update, *others) for fault in _state_faults(paths, decisions, part)]
            continue
        update = _elsewhere(decisions, unit)
        faults += _state_faults(paths, decisions, update)
        if decisions.gradients.far:
            written, read = TaskId(Kind.WRITE_GRADIENTS, unit, micro_batches - 1), TaskId(Kind.READ_STATES, unit)
            read = update if update.kind is Kind.PLACE_UPDATE else read
            faults += chain_faults(
                paths, (backward._replace(kind=Kind.OFFLOAD_GRADIENTS), 0), (written, 0), (read, 0), (written, 1)
            )
        first, *others = backwards if decisions.accumulates_on_host else backwards[-1:]
        copy, *added = (task._replace(kind=Kind.OFFLOAD_GRADIENTS) for task in (first, *others))
        for task, reduce in reduced.items():
            taken_by = task._replace(kind=Kind.OFFLOAD_GRADIENTS) if decisions.accumulates_on_host else copy
            faults += chain_faults(paths, (reduce, 0), (taken_by, 0))
        late = int(plan.delayed)
        reused = 1 + (plan.delayed and micro_batches > 1)  # beside what an update takes, sums have a copy of their own
        faults += chain_faults(paths, (first, 0), (copy, 0), (update, late), (copy, reused))
        for other, arrived in zip(others, added, strict=True):
            addition = other._replace(kind=Kind.ACCUMULATE)
            faults += chain_faults(paths, (other, 0), (arrived, 0), (addition, 0), (update, late))
            faults += chain_faults(paths, (copy, 0), (addition, 0))
        if decisions.update.share and (also := TaskId(Kind.GPU_UPDATE, unit)) in paths.tasks:
            faults += [fault for task in reduced.values() for fault in chain_faults(paths, (task, 0), (also, 0))]
            faults += chain_faults(paths, (backward, 0), (also, 0), (backward, 1))
        refresh = TaskId(Kind.REFRESH, unit)
        if decisions.gradients_replace_parameters and refresh in paths.tasks:
            faults += chain_faults(paths, (copy, 0), (refresh, 0))  # which overwrites the gradients
    return faults


def clipping_faults(profile: Profile, plan: Plan, schedule: Schedule) -> list[str]:
    """Updates that may not know how much to scale their gradients by, a coefficient that misses a norm, and norms of gradients
    that are unfinished or overwritten; tasks for that where nothing is clipped.

    Args:
        profile: specifies whether gradients are clipped.
        plan: specifies where each unit is updated.
        schedule: of this plan.
    """
    paths, clip = Paths(schedule), TaskId(Kind.CLIP, 0)
    if not profile.workload.clips:
        kinds = (Kind.CLIP, Kind.GRADIENT_NORM)
        return [f"{task.id} is there, but no gradient is clipped" for task in schedule.tasks if task.id.kind in kinds]
    faults: list[str] = []
    last = profile.workload.micro_batches - 1
    lanes = {task.id: task.lane for task in schedule.tasks}
    for unit, decisions in enumerate(plan.units):
        if profile.units[unit].is_frozen:
            continue
        on_gpu, norm = decisions.update.on is Processor.GPU, TaskId(Kind.GRADIENT_NORM, unit)
        update = TaskId(Kind.GPU_UPDATE, unit) if on_gpu else _elsewhere(decisions, unit)
        # Of an embedding that is tied to the head its own backward is the last.
        complete = [TaskId(Kind.BACKWARD, unit, last)]
        # Who takes them away, or overwrites them.
        takers = [] if on_gpu else [TaskId(Kind.OFFLOAD_GRADIENTS, unit, last)]
        if decisions.gradients_replace_parameters:
            takers.append(TaskId(Kind.REFRESH, unit))
        overwrites = [(task, 0) for task in takers if task in paths.tasks]
        if lanes.get(norm) == CPU:
            summed = decisions.accumulates_on_host and last > 0
            complete.append(TaskId(Kind.ACCUMULATE if summed else Kind.OFFLOAD_GRADIENTS, unit, last))
            overwrites = [(TaskId(Kind.OFFLOAD_GRADIENTS, unit, 0 if summed else last), 1)]
            if summed and plan.delayed:  # the copy after the next overwrites them, which waits for their update
                overwrites = []
        if decisions.update.share and (also := TaskId(Kind.GPU_UPDATE, unit)) in paths.tasks:
            faults += chain_faults(paths, (clip, 0), (also, 0), (clip, 1))
        stale = int(not on_gpu and plan.delayed)
        faults += chain_faults(paths, *((task, 0) for task in complete), (norm, 0), (clip, 0), (update, stale))
        if on_gpu:
            faults += chain_faults(paths, (_update_parts(paths, unit)[-1], 0), (clip, 1))
        for overwriter in overwrites:
            faults += chain_faults(paths, (norm, 0), overwriter)
        # Nor do the next norm and the next coefficient replace these before they have been used.
        faults += chain_faults(paths, (clip, 0), (norm, 1))
        faults += chain_faults(paths, (update, stale), (clip, 1))
    return faults


def _update_parts(paths: Paths, unit: int) -> list[TaskId]:
    """The parts of the unit's update on the GPU, in order."""
    whole = TaskId(Kind.GPU_UPDATE, unit)
    parts = itertools.takewhile(paths.tasks.__contains__, (whole._replace(again=part) for part in itertools.count()))
    return list(parts) or [whole]


def _elsewhere(decisions: UnitPlan, unit: int) -> TaskId:
    """The update of a unit that the GPU does not update."""
    return TaskId(Kind.PLACE_UPDATE if decisions.update.on is Processor.PLACE else Kind.CPU_UPDATE, unit)


def _state_faults(paths: Paths, decisions: UnitPlan, update: TaskId) -> list[str]:
    """Updates of states that are not there, or that are not brought home before the next."""
    chain = [
        update._replace(kind=kind) for kind in (Kind.READ_STATES, Kind.FETCH_STATES, Kind.WRITE_BACK_STATES, Kind.WRITE_STATES)
    ]
    read, fetch, back, write = ([task] if task in paths.tasks else [] for task in chain)
    if not decisions.states.leaves or decisions.update.on is Processor.PLACE:
        return []
    chain = [*read, *fetch, update, *back, *write]
    if len(chain) == 1:
        return [f"{update} updates with states that rest in {decisions.states.home} and never come"]
    return chain_faults(paths, *((task, 0) for task in chain), (chain[0], 1))


def activation_faults(profile: Profile, plan: Plan, schedule: Schedule) -> list[str]:
    """Passes that may overtake one another, and backwards that may find no activations.

    Args:
        profile: specifies the first unit with a backward.
        plan: specifies what each forward keeps.
        schedule: of this plan.
    """
    paths, last = Paths(schedule), len(plan.units) - 1
    passes: list[TaskId] = []
    faults: list[str] = []
    for m in range(schedule.micro_batches):
        passes += [*(TaskId(Kind.FORWARD, unit, m) for unit in range(last + 1)), TaskId(Kind.LOSS, last, m)]
        for unit, recomputed in reversed([*enumerate(plan.recomputations())][profile.first_trained :]):
            passes += [TaskId(Kind.RECOMPUTE, again.unit, m, again=again.again) for again in recomputed]
            passes.append(TaskId(Kind.BACKWARD, unit, m))
            user = Kind.BACKWARD if plan.units[unit].activations is Activations.KEEP else Kind.RECOMPUTE
            for part, home in _homes_of_activations(profile, plan, unit):
                through = _behind_host(schedule, home)
                further = (Kind.WRITE_ACTIVATIONS, Kind.READ_ACTIVATIONS) if through else ()
                way = (Kind.OFFLOAD_ACTIVATIONS, *further, Kind.FETCH_ACTIVATIONS)
                copies = [(TaskId(kind, unit, m, again=part), 0) for kind in way]
                faults += chain_faults(paths, (TaskId(Kind.FORWARD, unit, m), 0), *copies, (TaskId(user, unit, m), 0))
    present = [task.id for task in schedule.tasks if task.id.kind in _PASSES]
    faults += [f"{task} is not in the plan" for task in present if task not in passes]
    moved = {i for i, unit in enumerate(plan.units) if unit.kept.leaves and parts_of(unit, profile.units[i])}
    taking = {i for i, unit in enumerate(plan.units) if unit.results}
    absent = _absence_faults(schedule, moved, taking)
    return [*chain_faults(paths, *((task, 0) for task in passes), (passes[0], 1)), *faults, *absent]


def _homes_of_activations(profile: Profile, plan: Plan, unit: int) -> list[tuple[int, str]]:
    """The parts of what forward keeps that leave the GPU, with where they rest."""
    decisions = plan.units[unit]
    parts = parts_of(decisions, profile.units[unit])
    if not parts:
        results = [(part, one.route.home) for part, one in enumerate(decisions.results, 1) if one.route.leaves]
        return [*[(0, decisions.kept.home)] * decisions.kept.leaves, *results]
    return [(index, part.route.home) for index, part in enumerate(parts) if part.route.leaves]


def _absence_faults(schedule: Schedule, moved: set[int], taking: set[int]) -> Iterator[str]:
    """Passes whose input or activations nothing has left on the GPU, in the order of the schedule. The inputs of the units
    ``moved`` leave with their activations. Recomputations of the units ``taking`` take other parts than the first for good.
    """
    there: set[tuple[Value, int | None, int, int]] = set()
    parts: defaultdict[tuple[int | None, int], set[int]] = defaultdict(lambda: {0})
    for task in schedule.tasks:
        unit, m, kind = task.id.unit, task.id.micro_batch, task.id.kind
        # A recomputation takes all parts but the first, which it makes.
        users = (Kind.RECOMPUTE, Kind.BACKWARD)
        needed = [(Value.ACTIVATIONS, part) for part in sorted(parts[unit, m]) if kind in users[not part :]]
        if kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD) and unit and (kind is Kind.FORWARD or unit not in moved):
            needed.append((Value.INPUT, 0))
        yield from (f"{task.id} finds no {value} on the GPU" for value, part in needed if (value, unit, m, part) not in there)
        made, freed = ([each.id for each in some if each.id.memory == GPU_MEMORY] for some in (task.allocates, task.frees))
        for buffer in made:
            if buffer.value is Value.ACTIVATIONS:
                parts[buffer.unit, buffer.micro_batch].add(buffer.again)
        for buffer in freed if kind is Kind.RECOMPUTE and unit in taking else ():  # backward does not need them
            parts[buffer.unit, buffer.micro_batch] -= {buffer.again} - {0}
        there |= {_there(buffer) for buffer in made}
        there -= {_there(buffer) for buffer in freed}


def _there(buffer: BufferId) -> tuple[Value, int | None, int, int]:
    return buffer.value, buffer.unit, buffer.micro_batch, buffer.again * (buffer.value is Value.ACTIVATIONS)


def _behind_host(schedule: Schedule, home: str) -> bool:
    """Whether ``home`` is a place from which values come through the host."""
    return home not in (GPU_MEMORY, HOST_MEMORY) and (home, HOST_MEMORY) in [lane.ends for lane in schedule.lanes]


def _several_gpus(schedule: Schedule) -> bool:
    return any(lane.name == COLLECTIVE for lane in schedule.lanes)


def _zero_stage(schedule: Schedule, decisions: UnitPlan) -> int:
    """The parts of a unit that several GPUs share."""
    return decisions.zero_stage if _several_gpus(schedule) else 0


def memory_faults(schedule: Schedule) -> list[str]:
    """Buffers that are not allocated and freed once in an iteration, or that may be freed before their last user has ended;
    memories that may hold more and more, because nothing waits for a task that frees some.

    Who uses a buffer is known for those that :func:`autohete.lowering.lower` makes, by their values; of others only whoever
    allocates and frees them.
    """
    paths = Paths(schedule)
    # The other norms are of gradients on the GPU.
    on_host = {task.id for task in schedule.tasks if task.id.kind is Kind.GRADIENT_NORM and task.lane == CPU}
    allocated: dict[BufferId, list[TaskId]] = {}
    freed: dict[BufferId, list[Instance]] = {}
    for task in schedule.tasks:
        for buffer in task.allocates:
            allocated.setdefault(buffer.id, []).append(task.id)
        for free in task.frees:
            freed.setdefault(free.id, []).append((task.id, free.back))
    faults = [
        f"{buffer} is {done} {len(places.get(buffer, ()))} times in an iteration instead of once"
        for done, places in (("allocated", allocated), ("freed", freed))
        for buffer in dict.fromkeys([*allocated, *freed])
        if len(places.get(buffer, ())) != 1
    ]
    if faults:
        return faults

    place = {task.id: i for i, task in enumerate(schedule.tasks)}

    def late(before: Instance, after: Instance) -> bool:
        return before != after and bool(chain_faults(paths, before, after))

    for buffer_id, ((end, back),) in freed.items():
        (begin,) = allocated[buffer_id]
        if buffer_id.value is Value.INPUT and buffer_id.memory == GPU_MEMORY:
            users = _users_of_input(buffer_id, begin, end, place)
        else:
            users = _users(buffer_id, begin, end, paths.tasks - on_host)
        for user, later in [(begin, 0), *users]:
            if late((begin, 0), (user, later)):
                faults.append(f"{user} uses {buffer_id} and does not wait for {begin}, which allocates it")
            if late((user, later), (end, back)):
                faults.append(f"{end} frees {buffer_id} and does not wait for {user}, which uses it")
    crossing = {buffer_id for buffer_id, ((_, back),) in freed.items() if back}
    return faults or [*_growth_faults(schedule), *_balance_faults(schedule, crossing)]


def trace_faults(trace: Trace) -> list[str]:
    """Where an execution deviates from its schedule: waits, lanes that do one thing at a time, their disciplines."""
    return check_trace(trace)


_PASSES = (Kind.FORWARD, Kind.LOSS, Kind.RECOMPUTE, Kind.BACKWARD)
_OF_ALL_GRADIENTS = (Kind.GRADIENT_NORM, Kind.GPU_UPDATE)
_AFTER_BACKWARD = (Kind.GPU_UPDATE, Kind.WRITE_BACK_BACKWARD, Kind.REFRESH)
_PARAMETERS_IN_BACKWARD = (Kind.RECOMPUTE, Kind.BACKWARD, *_AFTER_BACKWARD)
#: Kinds of task that use a value on the GPU, of the same unit; where it is there for one kind of task only, with that.
_USERS: dict[tuple[Value, Kind | None], tuple[Kind, ...]] = {
    (Value.OPTIMIZER_STATES, None): (Kind.GPU_UPDATE, Kind.WRITE_BACK_STATES),
    (Value.ACTIVATIONS, None): (Kind.BACKWARD,),
    (Value.ACTIVATIONS, Kind.BACKWARD): (Kind.BACKWARD,),
    (Value.LOGITS, None): (Kind.LOSS,),
    (Value.LOGITS_GRADIENT, None): (Kind.BACKWARD,),
    (Value.INPUT_GRADIENT, None): (Kind.BACKWARD,),
    (Value.GRADIENTS, None): (
        Kind.BACKWARD,
        Kind.REDUCE_GRADIENTS,
        Kind.GRADIENT_NORM,
        Kind.GPU_UPDATE,
        Kind.OFFLOAD_GRADIENTS,
    ),
    (Value.GRADIENTS, Kind.BACKWARD): (
        Kind.BACKWARD,
        Kind.REDUCE_GRADIENTS,
        Kind.GRADIENT_NORM,
        Kind.GPU_UPDATE,
        Kind.OFFLOAD_GRADIENTS,
    ),
    (Value.GRADIENT_SHARD, None): (Kind.REDUCE_GRADIENTS, Kind.GRADIENT_NORM, Kind.GPU_UPDATE, Kind.OFFLOAD_GRADIENTS),
    (Value.PARAMETER_SHARD, Kind.FORWARD): (Kind.GATHER_FORWARD,),
    (Value.PARAMETER_SHARD, Kind.BACKWARD): (Kind.GATHER_BACKWARD,),
    (Value.PARAMETERS, Kind.FORWARD): (Kind.FORWARD, Kind.WRITE_BACK_FORWARD),
    (Value.PARAMETERS, Kind.BACKWARD): _PARAMETERS_IN_BACKWARD,
    (Value.PARAMETERS, None): (Kind.FORWARD, Kind.WRITE_BACK_FORWARD, *_PARAMETERS_IN_BACKWARD),
}


#: The copies of what forward keeps, in order.
_WAY_OF_ACTIVATIONS = (Kind.OFFLOAD_ACTIVATIONS, Kind.WRITE_ACTIVATIONS, Kind.READ_ACTIVATIONS, Kind.FETCH_ACTIVATIONS)
#: The users of parameters that pass the host, by the task that brings them there.
_USERS_ON_THE_WAY = {
    Kind.READ_FORWARD: (Kind.PREFETCH_FORWARD,),
    Kind.READ_BACKWARD: (Kind.PREFETCH_BACKWARD,),
    Kind.WRITE_BACK_BACKWARD: (Kind.WRITE_PARAMETERS,),
    Kind.CPU_UPDATE: (Kind.WRITE_PARAMETERS, Kind.REFRESH),
}
#: The same for other values that are not on the GPU.
_HOST_USERS: dict[Value, tuple[Kind, ...]] = {
    Value.ARRIVED_GRADIENTS: (Kind.ACCUMULATE, Kind.WRITE_GRADIENTS),
    Value.GRADIENTS: (Kind.CPU_UPDATE,),
    Value.OPTIMIZER_STATES: (Kind.FETCH_STATES, Kind.CPU_UPDATE, Kind.WRITE_BACK_STATES, Kind.WRITE_STATES),
}


def _users(buffer: BufferId, begin: TaskId, end: TaskId, tasks: set[TaskId]) -> Iterator[Instance]:
    """The tasks that use a buffer between ``begin``, which allocates it, and ``end``, and how many iterations later."""
    value, unit, last = buffer.value, buffer.unit, max(task.micro_batch for task in tasks)
    kinds = _USERS.get((value, buffer.use), ())
    if unit is None or buffer.memory != GPU_MEMORY:
        kinds = _HOST_USERS.get(value, ())
        if value in (Value.INPUT, Value.ACTIVATIONS) and begin.kind in _WAY_OF_ACTIVATIONS:
            after = _WAY_OF_ACTIVATIONS[_WAY_OF_ACTIVATIONS.index(begin.kind) + 1 :]
            kinds = tuple(kind for kind in after if begin._replace(kind=kind) in tasks)[:1]
        elif value is Value.PARAMETERS:
            kinds = _USERS_ON_THE_WAY.get(begin.kind, ())
    elif value is Value.ACTIVATIONS and end.kind is Kind.OFFLOAD_ACTIVATIONS:
        kinds = (Kind.FORWARD, end.kind)  # backward uses what is fetched again
    elif value is Value.ACTIVATIONS and end.kind is Kind.RECOMPUTE and buffer.again:
        kinds = (end.kind,)
    elif value is Value.ACTIVATIONS and begin.kind is not Kind.RECOMPUTE:
        kinds = (Kind.RECOMPUTE, Kind.BACKWARD)  # other parts are made again from it
    elif value is Value.LOGITS and end.kind is Kind.BACKWARD:
        kinds = (*kinds, Kind.BACKWARD)  # the model's output holds them until then
    elif value is Value.GRADIENTS and end.kind is Kind.BACKWARD:
        # They are added to those of other micro-batches, or replace the parameters, in whose memory they live on.
        kinds = (Kind.BACKWARD,) if buffer.micro_batch else ()
        if TaskId(Kind.REDUCE_GRADIENTS, unit or 0) in tasks and buffer.micro_batch:
            kinds = (*kinds, Kind.REDUCE_GRADIENTS)  # each micro-batch's are reduced, not the sum of all
    elif value is Value.GRADIENTS and end.kind is Kind.REDUCE_GRADIENTS:
        kinds = (Kind.BACKWARD, end.kind)  # the update takes the shard
    elif value is Value.GRADIENTS and end.kind is Kind.OFFLOAD_GRADIENTS and buffer.micro_batch != last:
        kinds = tuple(kind for kind in kinds if kind not in _OF_ALL_GRADIENTS)  # those of the last micro-batch complete them
    elif value is Value.PARAMETERS and begin.kind in (Kind.GATHER_FORWARD, Kind.GATHER_BACKWARD):
        kinds = tuple(kind for kind in kinds if kind not in _AFTER_BACKWARD)  # the update changes the shard
    elif value is Value.PARAMETERS and _travel_with_states(begin, tasks):
        kinds = tuple(kind for kind in kinds if kind not in _AFTER_BACKWARD)  # the update changes what comes with the states
    if begin.kind is Kind.PREFETCH_BACKWARD and begin._replace(again=begin.again + 1) in tasks:  # it comes again
        yield TaskId(Kind.RECOMPUTE, begin.unit, begin.micro_batch, begin.again), 0
        return
    for kind in kinds:
        micro_batch, later = buffer.micro_batch, 0
        if begin.kind is Kind.PREFETCH_BACKWARD and kind in (Kind.FORWARD, Kind.WRITE_BACK_FORWARD):
            # What is fetched for backward and kept is there for the next forward.
            micro_batch, later = (0, 1) if micro_batch == last else (micro_batch + 1, 0)
        elif value is Value.GRADIENTS and kind in _OF_ALL_GRADIENTS:
            micro_batch = 0
        elif value is Value.PARAMETERS and kind in _AFTER_BACKWARD:
            if micro_batch != last:
                continue  # updates follow the last micro-batch
            micro_batch = 0
        # The gradient of a unit's input is for the unit below.
        user = TaskId(kind, (unit or 0) - (value is Value.INPUT_GRADIENT), micro_batch)
        came_again = value is Value.PARAMETERS and kind is Kind.RECOMPUTE
        if came_again or value is Value.OPTIMIZER_STATES or (value is Value.ACTIVATIONS and kind in _WAY_OF_ACTIVATIONS):
            user = user._replace(again=buffer.again)
        if user in tasks:
            yield user, later
        if kind is Kind.GPU_UPDATE and value is not Value.OPTIMIZER_STATES:
            yield from ((part, later) for part in tasks if part[:3] == user[:3] and part.again)


def _travel_with_states(fetch: TaskId, tasks: set[TaskId]) -> bool:
    """Whether the parameters that ``fetch`` brings come to the update with the states: then nothing else brings them home."""
    kinds = {task.kind for task in tasks if task.unit == fetch.unit}
    home = {Kind.WRITE_BACK_FORWARD, Kind.WRITE_BACK_BACKWARD, Kind.CPU_UPDATE}
    return fetch.kind in (Kind.PREFETCH_FORWARD, Kind.PREFETCH_BACKWARD) and Kind.FETCH_STATES in kinds and not kinds & home


def _users_of_input(buffer: BufferId, begin: TaskId, end: TaskId, place: dict[TaskId, int]) -> Iterator[Instance]:
    """The passes of the unit between ``begin``, which makes or fetches its input, and ``end``, which frees it."""
    for task in place:
        if end.kind is Kind.OFFLOAD_ACTIVATIONS:
            uses = task.kind is Kind.FORWARD or task == end  # backward uses what is fetched again
        else:
            uses = task.kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD) and place[task] <= place[end]
        if uses and place[task] > place[begin] and (task.unit, task.micro_batch) == (buffer.unit, buffer.micro_batch):
            yield task, 0


def _growth_faults(schedule: Schedule) -> Iterator[str]:
    """Memories without a worst case."""
    for memory in schedule.memories:
        worst = worst_case(schedule, memory.name)
        if worst.peak_bytes is None:
            yield f"{worst.task} may free {memory.name} memory later and later: no later allocation waits for it"


def _balance_faults(schedule: Schedule, crossing: set[BufferId]) -> Iterator[str]:
    """Memories that hold more or less after some iterations than before them."""
    trace = list_schedule(schedule, _ITERATIONS)
    buffers: list[Buffer] = [b for task in schedule.tasks for b in task.allocates if b.id in crossing]
    for memory in schedule.memories:
        within = schedule.within(memory.name)
        before = sum(b.size_bytes for b in [*schedule.resident, *buffers] if b.memory in within)
        after = int(occupancy(trace, memory.name).bytes_used[-1])
        if after != before:
            yield f"memory {memory.name} holds {before} bytes before {_ITERATIONS} iterations and {after} after them"
