"""Stages that are dealt to GPUs in turn, with cuts of their own for forward and backward; and how RoundPipe cuts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paper import profile_with

from autohete.errors import InputError
from autohete.execution.trace import check_trace
from autohete.hardware import Interconnect, load_hardware
from autohete.lowering import lower
from autohete.plan import Activations, DealtStage, DealtStages, Footprint, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.rules import ByPriority, UpdatesAfterBackward
from autohete.planner.optimistic import OptimisticJudge, lower_bytes
from autohete.policies import parse_policy
from autohete.policies.roundpipe import cut
from autohete.profile import Profile, analytic_profile
from autohete.runtime.takeover import check_executable
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, Kind, Schedule, TaskId, Value, is_gpu, parse_schedule, validate
from autohete.sim import SimExecutor
from autohete.simulate import judge_for, simulate_plan, simulate_policy
from autohete.testing import checks, strategies
from autohete.testing.checks import Paths
from autohete.testing.list_scheduler import list_schedule
from autohete.workload import named_workload

PLENTY = 2**40
#: On two GPUs: stages of forward 0, 1 to 2; 3 to 4 with both passes; of backward 1 to 2, 0.
DEALT = DealtStages(2, (0, 1), (3, 1, 0))


def unit_of(i: int, dealt: DealtStages, activations: Activations | None = None, ahead: int = 1) -> UnitPlan:
    """The decisions for a unit in stages that are dealt."""
    both = i >= dealt.backward[0]
    if activations is None:
        activations = Activations.RECOMPUTE if i in dealt.backward else Activations.DROP
    if both or i < dealt.backward[-1]:
        activations = Activations.KEEP
    return UnitPlan(
        activations=activations,
        parameters=Route(HOST_MEMORY, ahead=ahead, stays_after_forward=both, stays_for_batches=True),
        update=Update(on=Processor.CPU),
        kept=Route(HOST_MEMORY) if i and activations is Activations.RECOMPUTE else Route(),
    )


def plan_of(dealt: DealtStages = DEALT, units: int = 5, *, delayed: bool = False) -> Plan:
    """A plan of as many units."""
    decided = tuple(unit_of(i, dealt) for i in range(units))
    held = Footprint(host_parameter_bytes=4)
    return Plan("by hand", decided, update_bytes=28, footprint=held, dealt=dealt, delayed=delayed)


def passes(schedule: Schedule, lane: str) -> str:
    """The passes of a GPU in order, each without its rank."""
    return " ".join(str(task.id._replace(rank=0)) for task in schedule.tasks if task.lane == lane)


def test_stages_go_to_the_gpus_in_turn() -> None:
    """Each GPU computes a stage for both micro-batches, then its next one; the stage of the head both passes of each."""
    assert DEALT.stages(5) == (
        DealtStage(range(1), forward=True, backward=False),
        DealtStage(range(1, 3), forward=True, backward=False),
        DealtStage(range(3, 5), forward=True, backward=True),
        DealtStage(range(1, 3), forward=False, backward=True),
        DealtStage(range(1), forward=False, backward=True),
    )
    plan = plan_of()
    assert (plan.forward_ranks(), plan.backward_ranks()) == ((0, 1, 1, 0, 0), (0, 1, 1, 0, 0))
    schedule = validate(lower(profile_with(PLENTY, 2, gpus=2), plan))
    both = "F3 F4 L4 B4 B3 F3m1 F4m1 L4m1 B4m1 B3m1"
    assert passes(schedule, "gpu") == f"F0 F0m1 {both} R0 B0 R0m1 B0m1"
    assert passes(schedule, "gpu.1") == "F1 F2 F1m1 F2m1 R1 R2 B2 B1 R1m1 R2m1 B2m1 B1m1"


def test_parameters_come_once_for_all_micro_batches() -> None:
    """A fetch for each stage that has a unit, and the copy home of its gradients, whatever the number of micro-batches."""
    for micro_batches in (1, 2, 5):
        schedule = lower(profile_with(PLENTY, micro_batches, gpus=2), plan_of())
        made = Counter(task.id.kind for task in schedule.tasks)
        assert (made[Kind.PREFETCH_FORWARD], made[Kind.PREFETCH_BACKWARD], made[Kind.OFFLOAD_GRADIENTS]) == (5, 3, 5)


def test_parameters_come_beside_the_stage_before() -> None:
    """Those of a GPU's stage come once it has ended all stages but the one before: two stages are there, not three."""
    schedule = lower(profile_with(PLENTY, 3, gpus=2), plan_of())
    paths = Paths(schedule)
    assert paths.exist(TaskId(Kind.FORWARD, 0, 2), TaskId(Kind.PREFETCH_BACKWARD, 0))
    assert not paths.exist(TaskId(Kind.FORWARD, 3), TaskId(Kind.PREFETCH_BACKWARD, 0))
    assert paths.exist(TaskId(Kind.BACKWARD, 3, 2), TaskId(Kind.PREFETCH_FORWARD, 0), 1)


def test_an_iteration_waits_for_updates_unless_they_are_delayed() -> None:
    """A delayed update uses the gradients of the iteration before; fetches in its own iteration do not wait for it, nor it for
    them.
    """
    profile, update = profile_with(PLENTY, 2, gpus=2), TaskId(Kind.CPU_UPDATE, 2, rank=1)
    last, fetch = TaskId(Kind.BACKWARD, 2, 1, 1), TaskId(Kind.PREFETCH_FORWARD, 2, rank=1)
    paths = Paths(lower(profile, plan_of()))
    assert paths.exist(last, update)
    assert paths.exist(update, fetch, 1)
    paths = Paths(lower(profile, plan_of(delayed=True)))
    assert not paths.exist(last, update)
    assert paths.exist(last, update, 1)
    assert paths.exist(update, fetch, 1)
    assert not paths.exist(fetch, update)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_cut_does_the_work_of_the_plan(data: st.DataObject) -> None:
    """With any cuts, on any number of GPUs, each pass waits for what it needs, from other GPUs as well; two executors agree; no
    memory grows; and no time or memory is below its bound.
    """
    drawn = data.draw(strategies.profiles(max_micro_batches=4))
    ranks = data.draw(st.integers(1, 4))
    hardware = replace(drawn.hardware, shared_cores=None, interconnect=Interconnect(8, 1e11, 1e-6, 1e9, 1e-5))
    if hardware.unified:
        return
    profile = replace(drawn, hardware=hardware.shared_by(ranks) if ranks > 1 else hardware)
    plan = _drawn(data, profile, ranks)
    if plan is None:
        return
    schedule = validate(lower(profile, plan))
    assert parse_schedule(str(schedule)) == schedule
    trace = SimExecutor().run(schedule, 4)
    assert check_trace(trace) == []
    assert (trace.start_ns == list_schedule(schedule, 4).start_ns).all()
    assert [*checks._growth_faults(schedule)] == []
    if ranks == 1:
        assert checks.memory_faults(schedule) == []
    assert [*_missing(profile, plan, schedule)] == []
    bound, found = OptimisticJudge(profile, math.inf)(plan), simulate_plan(profile, plan)
    assert bound.seconds <= found.comparable_seconds
    assert lower_bytes(profile, plan)[GPU_MEMORY] <= max(one.peak_bytes for one in found.memories if is_gpu(one.memory))


def _drawn(data: st.DataObject, profile: Profile, ranks: int) -> Plan | None:
    """A plan with any cuts; None if they have fewer stages than GPUs."""
    count, first = len(profile.units), profile.first_trained
    fused = data.draw(st.integers(0, count - 1))
    low = min(first, fused)
    forward = (0, *_inside(data, 0, fused)) if fused else ()
    backward = (fused, *reversed(_inside(data, low, fused)), *([low] if low < fused else []))
    if len(forward) + len(backward) < ranks:
        return None
    dealt = DealtStages(ranks, forward, backward)

    def decided(i: int) -> UnitPlan:
        again = data.draw(st.sampled_from((Activations.RECOMPUTE, Activations.DROP)))
        again = Activations.RECOMPUTE if i in backward else again
        return unit_of(i, dealt, again, ahead=data.draw(st.integers(0, 3)))

    rules = tuple(rule for rule in (ByPriority(), UpdatesAfterBackward()) if data.draw(st.booleans()))
    plan = plan_of(dealt, count, delayed=data.draw(st.booleans()))
    return replace(plan, units=tuple(map(decided, range(count))), rules=rules)


def _inside(data: st.DataObject, low: int, high: int) -> list[int]:
    """Any numbers between two, in order."""
    return sorted(data.draw(st.sets(st.integers(low + 1, high - 1)))) if high - low > 1 else []


def _missing(profile: Profile, plan: Plan, schedule: Schedule) -> Iterator[str]:
    """Waits that are missing, between GPUs or on one."""
    paths, last = Paths(schedule), profile.workload.micro_batches - 1
    forward, backward = plan.forward_ranks(), plan.backward_ranks()
    for i in range(len(plan.units)):
        back = i >= profile.first_trained
        if not profile.units[i].is_frozen:
            update, done = TaskId(Kind.CPU_UPDATE, i, rank=backward[i]), TaskId(Kind.BACKWARD, i, last, backward[i])
            fetch = TaskId(Kind.PREFETCH_FORWARD, i, rank=forward[i])
            yield from checks.chain_faults(paths, (done, 0), (update, int(plan.delayed)), (fetch, 1 + plan.delayed))
        for m in range(last + 1):
            here, there = TaskId(Kind.FORWARD, i, m, forward[i]), TaskId(Kind.BACKWARD, i, m, backward[i])
            if i:
                yield from checks.chain_faults(paths, (TaskId(Kind.FORWARD, i - 1, m, forward[i - 1]), 0), (here, 0))
            if back:
                yield from checks.chain_faults(paths, (here, 0), (there, 0))
            if i > profile.first_trained:
                yield from checks.chain_faults(paths, (there, 0), (TaskId(Kind.BACKWARD, i - 1, m, backward[i - 1]), 0))


def test_an_input_crosses_the_host() -> None:
    """Where another GPU computes a unit's backward, it fetches the input that the first one has copied to the host, and frees
    it there.
    """
    dealt = DealtStages(2, (0, 2), (4, 3, 1, 0))
    plan = plan_of(dealt)
    assert (plan.forward_ranks()[3], plan.backward_ranks()[3]) == (1, 1)
    assert (plan.forward_ranks()[1], plan.backward_ranks()[1]) == (0, 0)
    plan = plan_of(DealtStages(3, (0, 2), (4, 3, 1, 0)))
    ranks = plan.forward_ranks()[1], plan.backward_ranks()[1]
    assert ranks == (0, 1)
    schedule = validate(lower(profile_with(PLENTY, 2, gpus=3), plan))
    tasks = {task.id: task for task in schedule.tasks}
    away, back = TaskId(Kind.OFFLOAD_ACTIVATIONS, 1, 1, 0), TaskId(Kind.FETCH_ACTIVATIONS, 1, 1, 1)
    (made,) = tasks[away].allocates
    assert (made.id.value, made.id.memory) == (Value.INPUT, HOST_MEMORY)
    assert [free.id for free in tasks[back].frees] == [made.id]
    assert Paths(schedule).exist(away, back)


@pytest.mark.parametrize(
    ("forward", "backward", "ranks", "message"),
    [
        ((1,), (3, 0), 1, "let the first begin at 0"),
        ((0, 2), (2, 0), 1, "let the first begin at 0"),
        ((0,), (3, 4), 1, "let the first begin at 0"),
        ((0,), (), 1, "let the first begin at 0"),
        ((0,), (3, 0), 4, "3 stages are dealt to 4 GPUs"),
        ((0,), (3, 0), 0, "give at least 1"),
    ],
)
def test_cuts_that_are_none_are_refused(forward: tuple[int, ...], backward: tuple[int, ...], ranks: int, message: str) -> None:
    """With what is wrong."""
    with pytest.raises(InputError, match=message):
        DealtStages(ranks, forward, backward)


@pytest.mark.parametrize(
    ("unit", "change", "message"),
    [
        (1, {"parameters": Route(HOST_MEMORY)}, "stay for all micro-batches"),
        (1, {"parameters": Route()}, "rest on the host"),
        (1, {"kept": Route()}, "an input that rests on the host"),
        (4, {"activations": Activations.DROP}, "embedding and head keep"),
        (1, {"activations": Activations.DROP, "kept": Route()}, "drops its input"),
        (1, {"rank": 0}, "ranks of units"),
    ],
)
def test_what_dealt_stages_cannot_do_is_refused(unit: int, change: dict[str, Any], message: str) -> None:
    """With the unit and what to do."""
    plan = plan_of()
    units = [replace(one, **change) if i == unit else one for i, one in enumerate(plan.units)]
    with pytest.raises(InputError, match=message):
        replace(plan, units=tuple(units))


def test_updates_on_the_gpu_are_refused() -> None:
    """Gradients leave with the stage."""
    plan = plan_of()
    units = (*plan.units[:2], replace(plan.units[2], update=Update()), *plan.units[3:])
    with pytest.raises(InputError, match="let the CPU update all of it"):
        lower(profile_with(PLENTY, 2, gpus=2), replace(plan, units=units))


def test_stages_of_frozen_units_are_refused() -> None:
    """A stage of backward has a unit that has a backward."""
    profile = profile_with(PLENTY, 2)
    units = [replace(unit, frozen_parameters=unit.parameters) if i < 3 else unit for i, unit in enumerate(profile.units)]
    frozen = replace(profile, units=tuple(units))
    assert frozen.first_trained == 3
    with pytest.raises(InputError, match="units from 0 to 2, but none of them has a backward"):
        lower(frozen, plan_of(DealtStages(1, (0,), (4, 3, 0))))


def test_other_numbers_of_gpus_are_refused() -> None:
    """The stages of a plan are dealt to all GPUs."""
    with pytest.raises(InputError, match="dealt to 2 GPUs, but 4 train"):
        lower(profile_with(PLENTY, 2, gpus=4), plan_of())


def test_the_runtime_refuses_dealt_stages() -> None:
    """On one GPU as well, where no transfer shows that it is a pipeline."""
    schedule = lower(profile_with(PLENTY, 2), plan_of(DealtStages(1, (0, 1), (3, 1, 0))))
    with pytest.raises(InputError, match="the runtime cannot execute"):
        check_executable(schedule, None)


# --- RoundPipe ----------------------------------------------------------------------------------------------------


def test_the_cut_on_paper() -> None:
    """Times of forward are 2, 6, 6, 6, 3, those of backward with recomputation 6, 18, 18, 18, 9 and a loss of 1.

    No stage is shorter than a block's backward, 18. Three forwards of blocks are as long; the embedding's makes a second stage.
    The head's stage of 10 has no room for a block, and backward has one unit in each stage: 2 + 1 + 4 stages. The next longer
    sums, such as 6 + 6 + 6 + 2, exceed 1.1 times 18.
    """
    assert cut(profile_with(PLENTY, 2)) == DealtStages(1, (0, 1), (4, 3, 2, 1, 0))


def test_memory_limits_stages() -> None:
    """Two stages of parameters and gradients have 0.6 of the GPU. A block has 16 bytes of parameters and as many of gradients,
    so that with 110 bytes, of which 33 are for a stage, forward has two blocks in a stage, not three.
    """
    assert cut(profile_with(110, 2)) == DealtStages(1, (0, 2), (4, 3, 2, 1, 0))


def test_fewer_stages_than_gpus_are_refused() -> None:
    """With how many GPUs there can be."""
    profile = profile_with(PLENTY, 2)
    with pytest.raises(InputError, match="give at most 7 GPUs"):
        cut(replace(profile, hardware=replace(profile.hardware, gpus=8)))


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_the_grain_decides_what_rests(grain: str) -> None:
    """The inputs of stages of backward rest on the host, or those of all layers below the stage with both passes."""
    profile = analytic_profile(named_workload("gpt-2b", micro_batches=4), load_hardware("rtx4090-workstation"))
    plan = parse_policy(f"roundpipe:recompute_grain={grain}").plan(profile, judge_for(profile))
    assert plan.dealt is not None
    begins = [i for i, unit in enumerate(plan.units) if unit.kept.leaves]
    fused = plan.dealt.backward[0]
    assert begins == ([*range(1, fused)] if grain == "layer" else sorted({*plan.dealt.backward} - {0, fused}))


def test_stale_gradients_hide_the_updates() -> None:
    """With synchronous updates an iteration takes longer, as the next one waits for the CPU."""
    profile = analytic_profile(named_workload("gpt-2b", micro_batches=4), load_hardware("rtx4090-workstation"))
    stale, synchronous = (simulate_policy(profile, parse_policy(f"roundpipe{flag}")) for flag in ("", ":synchronous"))
    assert (stale.plan.delayed, synchronous.plan.delayed) == (True, False)
    assert stale.iteration_seconds < synchronous.iteration_seconds
