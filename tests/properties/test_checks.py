"""The checks for other people's policies: silent about every schedule that is right, and loud about each that is not."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from support.plans import with_gradients_replacing

import autohete.testing
from autohete.analysis.occupancy import Occupancy, occupancy
from autohete.errors import InfeasibleError, InputError
from autohete.execution.trace import Trace
from autohete.hardware import Place, load_hardware
from autohete.lowering import lower
from autohete.plan import Activations, Footprint, Plan, Processor, Route, SavedRoute, UnitPlan, Update
from autohete.plan.policy import Judge
from autohete.plan.rules import ByPriority, Rule
from autohete.policies import POLICIES, parse_policy, search_space
from autohete.profile import Profile, analytic_profile
from autohete.schedule import (
    GPU_MEMORY,
    HOST_MEMORY,
    TRANSFERS,
    Buffer,
    BufferId,
    Edge,
    Free,
    Kind,
    Lane,
    Schedule,
    Task,
    TaskId,
    Value,
    parse_task_id,
    validate,
)
from autohete.simulate import judge_for
from autohete.testing import checks, strategies
from autohete.testing.list_scheduler import list_schedule
from autohete.testing.strategies import without_contradictions
from autohete.workload import Workload

SMALL = Workload("small", 32, 3, 4, vocabulary_size=61, sequence_length=8, batch_size=2)
NODE = replace(load_hardware("a100-40gb-epyc7713"), places=(Place("nvme", 10**12, 1e9, 1e9, 1e-5, update_bandwidth=2e9),))
PROFILE = analytic_profile(SMALL, NODE)
#: The same with two micro-batches in an iteration.
TWICE = analytic_profile(replace(SMALL, micro_batches=2), NODE)
#: The same with a matrix of its own for the head.
UNTIED = analytic_profile(replace(SMALL, tied_embeddings=False), NODE)
#: The same with gradients clipped.
CLIPPED = analytic_profile(replace(SMALL, clip_norm=1.0), NODE)
CLIPPED_TWICE = analytic_profile(replace(SMALL, clip_norm=1.0, micro_batches=2), NODE)


def planned_by(policy: str) -> Plan:
    return parse_policy(policy).plan(PROFILE, judge_for(PROFILE))


def plan_of(inner: UnitPlan, *rules: Rule) -> Plan:
    """A plan of five units whose three inner ones are alike."""
    outer = UnitPlan(update=inner.update)
    return Plan("by hand", (outer, inner, inner, inner, outer), rules, update_bytes=28)


def shared(inner: UnitPlan, zero_stage: int) -> Plan:
    """The same of two GPUs; the embedding's matrix, which is the head's, too, stays whole on each."""
    plan = plan_of(replace(inner, zero_stage=zero_stage))
    outer = replace(plan.units[0], zero_stage=min(zero_stage, 2))
    return replace(plan, units=(outer, *plan.units[1:-1], replace(outer, zero_stage=zero_stage)))


KEPT_OR_NOT = (Activations.KEEP, Activations.RECOMPUTE)


def offloaded_in_every_way() -> list[Plan]:
    """Offloaded parameters that are kept, moved, updated and used with activations in every way."""
    switches = product((False, True), repeat=3)
    return [
        without_contradictions(
            PROFILE,
            plan_of(
                UnitPlan(
                    activations,
                    Route(HOST_MEMORY, stays_after_forward=forward, stays_after_backward=backward, moves=moved),
                    Update(processor),
                    kept=Route(home),
                    states=Route(home if processor is Processor.GPU else GPU_MEMORY),
                ),
                ByPriority(),
            ),
        )
        for (activations, home), processor, (forward, backward, moved) in product(
            (
                *zip(KEPT_OR_NOT, (GPU_MEMORY, HOST_MEMORY), strict=True),
                *zip(KEPT_OR_NOT, (HOST_MEMORY, GPU_MEMORY), strict=True),
            ),
            (Processor.GPU, Processor.CPU),
            switches,
        )
        if not (forward and moved)
    ]


def in_segments() -> list[Plan]:
    """One segment of three units, and one in which the first two are recomputed on their own once more."""
    first, inner = (UnitPlan(activations, Route(HOST_MEMORY)) for activations in (Activations.RECOMPUTE, Activations.DROP))
    return [
        replace(plan_of(UnitPlan()), units=(UnitPlan(), *units, UnitPlan()))
        for units in (
            (replace(first, kept=Route(HOST_MEMORY)), inner, inner),
            (replace(first, again=(Activations.RECOMPUTE,)), replace(inner, again=(Activations.DROP,)), inner),
        )
    ]


IN_PLACE = UnitPlan(update=Update(Processor.PLACE), gradients=Route("nvme"), states=Route("nvme"))
RESULTS = SavedRoute("mlp_2", Route(HOST_MEMORY)), SavedRoute("attention_1"), SavedRoute("mlp_1", Route("nvme", ahead=2))
PLANS = [
    plan_of(UnitPlan(Activations.RECOMPUTE, kept=Route(HOST_MEMORY), results=RESULTS)),
    Plan("by hand", (IN_PLACE, *[replace(IN_PLACE, parameters=Route(HOST_MEMORY))] * 3, IN_PLACE)),
    *map(
        planned_by, ["resident", "zero_offload", "zero_offload:paper,tile_overlap,delayed_update", "patrickstar:chunk_size=1"]
    ),
    *map(planned_by, ["stronghold:window=1", "stronghold:window=2,checkpointing=full", "autohete"]),
    with_gradients_replacing(planned_by("zero_offload:delayed_update")),
    plan_of(UnitPlan(states=Route("nvme"))),
    plan_of(UnitPlan(states=Route(HOST_MEMORY, parts=2))),
    plan_of(UnitPlan(parameters=Route("nvme"), kept=Route("nvme"))),
    plan_of(UnitPlan(Activations.RECOMPUTE, Route("nvme"), Update(Processor.CPU), states=Route("nvme"), kept=Route("nvme"))),
    plan_of(UnitPlan(update=Update(Processor.CPU), states=Route("nvme"), gradients=Route("nvme"))),
    *offloaded_in_every_way(),
    *in_segments(),
]
ACCUMULATING = [
    plan_of(UnitPlan(update=Update(Processor.CPU), gradients=Route(HOST_MEMORY))),
    plan_of(UnitPlan(update=Update(Processor.CPU))),
    plan_of(UnitPlan(gradients=Route(HOST_MEMORY))),
    plan_of(
        UnitPlan(Activations.RECOMPUTE, Route(HOST_MEMORY, stays_after_backward=True, moves=True), kept=Route(HOST_MEMORY))
    ),
]
#: Two GPUs, with one micro-batch or two.
SEVERAL = [
    *(
        shared(UnitPlan(update=Update(processor)), stage)
        for processor, stage in product((Processor.GPU, Processor.CPU), range(4))
    ),
    shared(UnitPlan(update=Update(Processor.CPU), parameters=Route(HOST_MEMORY), gradients=Route(HOST_MEMORY)), 3),
    shared(UnitPlan(Activations.RECOMPUTE, Route(HOST_MEMORY, stays_after_forward=True), Update(Processor.CPU)), 3),
    shared(UnitPlan(update=Update(Processor.CPU)), 2),
]
CLIPPING = [
    *map(
        planned_by, ["resident", "zero_offload", "zero_offload:paper,tile_overlap,delayed_update", "fsdp2_offload", "autohete"]
    ),
    planned_by("patrickstar:chunk_size=1"),
    plan_of(UnitPlan(parameters=Route(HOST_MEMORY))),
    with_gradients_replacing(planned_by("zero_offload")),
]
CASES = [
    *((PROFILE, plan) for plan in PLANS),
    *((TWICE, plan) for plan in ACCUMULATING),
    *((replace(profile, hardware=NODE.shared_by(2)), plan) for profile, plan in product((PROFILE, TWICE), SEVERAL)),
    *((CLIPPED, plan) for plan in CLIPPING),
    *((CLIPPED_TWICE, plan) for plan in ACCUMULATING),
    *((replace(CLIPPED, hardware=NODE.shared_by(2)), plan) for plan in SEVERAL),
]


#: Systems that train on one GPU only.
REFUSE = {(name, 2) for name in ("block_swap", "dataflow", "l2l", "megatrain", "ratel", "slideformer", "trainstream")}


def faults(profile: Profile, plan: Plan, schedule: Schedule) -> list[str]:
    """What the checks of a schedule find."""
    return [
        *checks.parameter_faults(profile, plan, schedule),
        *checks.gradient_faults(profile, plan, schedule),
        *checks.clipping_faults(profile, plan, schedule),
        *checks.activation_faults(profile, plan, schedule),
        *checks.memory_faults(schedule),
    ]


def is_noticed(profile: Profile, plan: Plan, schedule: Schedule) -> bool:
    """Whether a check of a schedule finds anything; the first that does is enough."""
    asked = (checks.parameter_faults, checks.gradient_faults, checks.activation_faults, checks.clipping_faults)
    return any(check(profile, plan, schedule) for check in asked) or bool(checks.memory_faults(schedule))


def changed(schedule: Schedule, task: str, change: Callable[[Task], Task]) -> Schedule:
    """``schedule`` with one task changed."""
    wanted = parse_task_id(task)
    return replace(schedule, tasks=tuple(change(t) if t.id == wanted else t for t in schedule.tasks))


def without_edge(schedule: Schedule, task: TaskId, edge: Edge) -> Schedule:
    return changed(schedule, str(task), lambda t: t._replace(after=tuple(e for e in t.after if e != edge)))


# --- silent -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(strategies.profiles().flatmap(lambda profile: strategies.plans(profile).map(lambda plan: (profile, plan))))
def test_every_plan_keeps_every_promise(case: tuple[Profile, Plan]) -> None:
    """No check finds anything in the schedule of any plan, nor in its execution."""
    assert checks.plan_faults(*case) == []


@pytest.mark.slow
@given(strategies.schedules())
def test_memory_of_any_schedule_balances(schedule: Schedule) -> None:
    """Buffers of names that mean nothing are checked for who allocates and who frees them."""
    assert [fault for fault in checks.memory_faults(schedule) if "later and later" not in fault] == []


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_system_keeps_every_promise(name: str, gpus: int) -> None:
    """With each combination of flags that its users can choose, no check finds anything, on one GPU or two, with micro-batches,
    clipping and one matrix for embedding and head, or without; a system that cannot train one of these refuses.

    Stages of a pipeline compute different units: of their schedules only the execution is checked.
    """
    checked = set[Plan]()
    for profile in (replace(each, hardware=NODE.shared_by(gpus)) for each in (UNTIED, CLIPPED_TWICE)):
        judge = judge_for(profile)
        for policy in map(parse_policy, search_space(name, profile)):
            try:
                plan = policy.plan(profile, judge)
                schedule = lower(profile, plan)
            except InputError:
                continue
            if (anonymous := replace(plan, policy="")) in checked:
                continue
            if plan.is_pipeline:
                found = checks.trace_faults(list_schedule(validate(schedule), 4))
            else:
                found = checks.plan_faults(profile, plan)
            assert found == [], (policy.name, profile.workload)
            checked.add(anonymous)
    assert bool(checked) is ((name, gpus) not in REFUSE)


def test_parameters_are_not_released_while_they_are_written_back() -> None:
    """Parameters that the GPU updates, and that leave after the next forward, stay until their write-back has ended."""
    inner = UnitPlan(parameters=Route(HOST_MEMORY, stays_after_backward=True))
    assert checks.plan_faults(PROFILE, plan_of(inner)) == []


# --- loud: waits and copies ---------------------------------------------------------------------------------------


def test_the_plans_use_every_kind_of_task() -> None:
    """What follows takes tasks of every kind apart, but for the transfers of pipelines (tests/unit/test_pipelines.py)."""
    assert {task.id.kind for profile, plan in CASES for task in lower(profile, plan).tasks} == set(Kind) - set(TRANSFERS)


@pytest.mark.slow
def test_a_missing_wait_is_noticed() -> None:
    """Every wait between tasks of one block, and between passes, is noticed when it is missing and nothing else implies it.

    The other waits keep memory bounded or are a system's habits.
    """
    passes = {Kind.FORWARD, Kind.LOSS, Kind.RECOMPUTE, Kind.BACKWARD}
    removed, unnoticed = 0, set()
    for profile, plan in CASES:
        schedule = lower(profile, plan)
        assert faults(profile, plan, schedule) == []
        for task in schedule.tasks:
            for edge in task.after:
                careless = without_edge(schedule, task.id, edge)
                needed = edge.task.unit == task.id.unit or {edge.task.kind, task.id.kind} <= passes
                if needed and not checks.Paths(careless).exist(edge.task, task.id, edge.back):
                    removed += 1
                    if not is_noticed(profile, plan, careless):
                        unnoticed.add(f"{task.id} without {edge} in {plan}")
    assert unnoticed == set()
    assert removed > 1000


@pytest.mark.slow
def test_a_missing_task_is_noticed() -> None:
    """Whichever task is left out, and every wait for it, the checks name it or what lacks it."""
    unnoticed = set()
    for profile, plan in CASES:
        schedule = lower(profile, plan)
        for task in schedule.tasks:
            rest = (t._replace(after=tuple(e for e in t.after if e.task != task.id)) for t in schedule.tasks if t.id != task.id)
            if not is_noticed(profile, plan, replace(schedule, tasks=tuple(rest))):
                unnoticed.add(f"{plan} without {task.id}")
    assert unnoticed == set()


def test_a_fetch_of_what_is_there_is_noticed() -> None:
    """Against a plan that keeps parameters, a fetch of them is a fault."""
    away, kept = (UnitPlan(parameters=Route(home), update=Update(Processor.CPU)) for home in (HOST_MEMORY, GPU_MEMORY))
    assert "PF1 brings what is there" in checks.parameter_faults(PROFILE, plan_of(kept), lower(PROFILE, plan_of(away)))


# --- loud: memory -------------------------------------------------------------------------------------------------


OTHER = BufferId(Value.OTHER, GPU_MEMORY, 9)


@pytest.mark.parametrize(
    ("task", "change", "fault"),
    [
        ("B1", lambda t: t._replace(frees=()), "activations.1:gpu is freed 0 times in an iteration instead of once"),
        ("B1", lambda t: t._replace(frees=t.frees * 2), "activations.1:gpu is freed 2 times in an iteration instead of once"),
        (
            "B1",
            lambda t: t._replace(frees=(*t.frees, Free(OTHER))),
            "other.9:gpu is allocated 0 times in an iteration instead of once",
        ),
        ("F1", lambda t: t._replace(allocates=t.allocates * 2), "activations.1:gpu is allocated 2 times in an iteration"),
        ("F1", lambda t: t._replace(allocates=(Buffer(OTHER, 1), *t.allocates)), "other.9:gpu is freed 0 times"),
        ("B1", lambda t: t._replace(after=()), "B1 uses activations.1:gpu and does not wait for F1, which allocates it"),
    ],
)
def test_memory_that_does_not_balance_is_noticed(task: str, change: Callable[[Task], Task], fault: str) -> None:
    """A buffer that is not allocated and freed once, or freed by a task that does not wait, is named."""
    schedule = lower(PROFILE, planned_by("resident:checkpointing=none"))
    assert checks.memory_faults(schedule) == []
    found = checks.memory_faults(changed(schedule, task, change))
    assert any(fault in sentence for sentence in found), found


def freed_by(schedule: Schedule, buffer: BufferId, task: TaskId) -> Schedule:
    """``schedule`` in which ``task`` frees ``buffer`` of its iteration, and nobody else does."""

    def frees(t: Task) -> tuple[Free, ...]:
        return (*(free for free in t.frees if free.id != buffer), *[Free(buffer)] * (t.id == task))

    return replace(schedule, tasks=tuple(t._replace(frees=frees(t)) for t in schedule.tasks))


@pytest.mark.slow
def test_a_free_that_comes_early_is_noticed() -> None:
    """A buffer that is freed by the very task that allocates it, before others use it, is noticed."""
    for profile, plan in CASES:
        schedule = lower(profile, plan)
        for task in schedule.tasks:
            for free in task.frees:
                (owner,) = (t for t in schedule.tasks if any(b.id == free.id for b in t.allocates))
                if owner.id == task.id or free.id.value is Value.WORKSPACE:
                    continue
                early = freed_by(schedule, free.id, owner.id)
                assert is_noticed(profile, plan, early), f"{free} by {owner.id} instead of {task.id} in {plan}"


def test_memory_that_grows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the bytes in use after some iterations are not those before them, the memory is named."""

    def leaky(trace: Trace, memory: str) -> Occupancy:
        found = occupancy(trace, memory)
        return replace(found, bytes_used=found.bytes_used + np.arange(len(found.bytes_used)))

    monkeypatch.setattr(checks, "occupancy", leaky)
    found = checks.memory_faults(lower(PROFILE, planned_by("resident")))
    assert [sentence for sentence in found if sentence.startswith("memory gpu holds")]


# --- loud: executions and policies --------------------------------------------------------------------------------


def test_a_span_that_moves_is_noticed() -> None:
    """Any task that runs before what it waits for is named."""
    trace = list_schedule(lower(PROFILE, planned_by("zero_offload")), 3)
    assert checks.trace_faults(trace) == []
    for column, task in enumerate(trace.schedule.tasks):
        if task.after:
            start, end = trace.start_ns.copy(), trace.end_ns.copy()
            start[1, column], end[1, column] = -2, -1
            found = checks.trace_faults(Trace(trace.schedule, trace.clock, trace.ready_ns, start, end))
            assert any(sentence.startswith(f"{task.id}@1 starts before") for sentence in found), (task.id, found)


def test_a_plan_for_another_model_is_a_fault() -> None:
    """What cannot be lowered is told in the words of the error."""
    plan = planned_by("resident")
    assert checks.plan_faults(PROFILE, replace(plan, units=plan.units[1:])) == [
        "the plan has 4 units, the profile 5: plan for this workload"
    ]


class Fickle:
    """Another plan each time, under another name."""

    name = "fickle"

    def __init__(self) -> None:
        self.asked = 0

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        self.asked += 1
        return replace(plan_of(UnitPlan(update=Update(Processor.CPU))), footprint=Footprint(host_buffer_bytes=self.asked))


class Unable:
    """Fits nowhere."""

    name = "unable"

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        raise InfeasibleError("no plan fits", "gpu", 1, 2)


def test_a_fickle_policy_is_noticed() -> None:
    """A policy that answers differently when asked again, or under another name, is told so; that nothing fits is an answer."""
    assert checks.policy_faults(PROFILE, Fickle(), judge_for(PROFILE)) == [
        "fickle returns another plan for the same profile",
        "the plan of fickle is called by hand",
    ]
    assert checks.policy_faults(PROFILE, Unable(), judge_for(PROFILE)) == []


def example_in(docstring: str) -> str:
    """The indented code after a double colon."""
    code = docstring.partition("::\n")[2]
    return textwrap.dedent("\n".join(line for line in code.splitlines() if not line or line.startswith("    ")))


@pytest.mark.slow
def test_the_example_works() -> None:
    """The example of how to test a policy of one's own runs as it stands; it fails for a policy with a block too many."""
    assert autohete.testing.__doc__ is not None
    code, names = example_in(autohete.testing.__doc__), dict[str, Any]()
    exec(code, names)
    names["test_no_wait_is_missing_and_memory_balances"]()
    exec(code.replace("(len(profile.units) - 1)", "len(profile.units)"), names)
    with pytest.raises(AssertionError):
        names["test_no_wait_is_missing_and_memory_balances"].hypothesis.inner_test(PROFILE)


def test_memory_that_may_grow_is_a_fault() -> None:
    """Where no later allocation waits for the copy that frees a buffer, the copy may fall behind without end."""
    schedule = lower(PROFILE, plan_of(UnitPlan(kept=Route(HOST_MEMORY))))
    assert checks.memory_faults(schedule) == []
    lanes = (*schedule.lanes, Lane("disk"))
    stray = (
        Task(TaskId(Kind.FORWARD, 9), "gpu", 1, allocates=(Buffer(OTHER, 1),)),
        Task(TaskId(Kind.OFFLOAD_ACTIVATIONS, 9), "disk", 1, (Edge(TaskId(Kind.FORWARD, 9)),), frees=(Free(OTHER),)),
    )
    growing = validate(replace(schedule, lanes=lanes, tasks=(*schedule.tasks, *stray)))
    assert checks.memory_faults(growing) == ["AO9 may free gpu memory later and later: no later allocation waits for it"]
