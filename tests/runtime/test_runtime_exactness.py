"""The gate: whatever the schedule, training gives the bits of plain PyTorch; and a schedule that is wrong does not."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.edges import reaches, without_edge
from support.plans import with_gradients_replacing
from support.reference import Outcome, slowed, train_by_schedule
from support.small import CLIP_NORM, POLICIES, SMALL, STEPS, plainly, profile_of
from torch.utils._python_dispatch import TorchDispatchMode

from autohete.errors import AutoHeteError, InputError, ScheduleError
from autohete.execution.trace import check_trace
from autohete.hardware import Interconnect
from autohete.lowering import lower
from autohete.plan import Activations, Plan, Processor, Route, SavedRoute, UnitPlan, Update
from autohete.policies import parse_policy
from autohete.runtime.lanes import Action
from autohete.schedule import (
    COLLECTIVES,
    GPU_MEMORY,
    HOST_MEMORY,
    IN_PLACES,
    TRANSFERS,
    BufferId,
    Kind,
    Schedule,
    Task,
    TaskId,
    Value,
    validate,
)
from autohete.sim import SimExecutor
from autohete.simulate import judge_for
from autohete.testing.strategies import plans, with_shared_updates
from autohete.workload import Precision, Units, Workload

#: Between them these use copies of parameters and gradients both ways and both kinds of update; lanes are fifo.
EVERYTHING_MOVES = [
    "stronghold:window=1,checkpointing=full",
    "zero_offload:paper,tile_overlap",
    "autohete:priority=off",
    "patrickstar:chunk_size=1",
]


def updated_on_cpu(plan: Plan) -> frozenset[int]:
    """The blocks that a delayed update concerns."""
    return frozenset(i for i, unit in enumerate(plan.units) if unit.update.on is Processor.CPU)


def in_pairs(policies: list[str]) -> list[tuple[str, Precision, bool]]:
    """Each policy with each precision and each way of embeddings, and these two in every combination."""
    return [
        (policy, precision, (place + (precision is Precision.BF16)) % 2 == 0)
        for place, policy in enumerate(policies)
        for precision in (Precision.FP32, Precision.BF16)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "precision", "tied"), in_pairs(POLICIES))
def test_every_policy_trains_to_the_bit(policy: str, precision: Precision, tied: bool) -> None:
    """Losses and final parameters are bit-identical to plain PyTorch, dropout on."""
    workload = replace(SMALL, precision=precision, tied_embeddings=tied)
    profile = profile_of(workload)
    schedule = lower(profile, parse_policy(policy).plan(profile, judge_for(profile)))
    outcome, trace = train_by_schedule(workload, STEPS, schedule)
    assert outcome == plainly(workload)
    assert check_trace(trace) == []


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*POLICIES, "l2l:paper,host_stash", "rotor", "capuchin", "te_offload:layers=2"])
def test_attention_and_mlp_by_themselves_train_to_the_bit(policy: str) -> None:
    """Where attention and MLP are units of their own, with their own decisions, training has the bits of whole blocks."""
    workload = replace(SMALL, transformer_blocks=2, units=Units.SUBLAYER)
    profile = profile_of(workload)
    schedule = lower(profile, parse_policy(policy).plan(profile, judge_for(profile)))
    outcome, trace = train_by_schedule(workload, STEPS, schedule)
    assert outcome == plainly(replace(workload, units=Units.BLOCK))
    assert check_trace(trace) == []


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the operations that are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("units", list(Units))
def test_selective_recomputation_computes_no_linear_layer_again(units: Units) -> None:
    """It takes the results of linear layers from forward, and draws the same dropout again."""
    workload = replace(SMALL, units=units, transformer_blocks=1)
    profile = profile_of(workload)
    schedule = lower(profile, parse_policy("resident:checkpointing=selective").plan(profile, judge_for(profile)))
    computed: dict[TaskId, list[str]] = {}

    def counted(action: Action) -> Action:
        def perform(task: Task, iteration: int) -> None:
            with Counted() as counter:
                action(task, iteration)
            computed[task.id] = counter.names

        return perform

    outcome, _ = train_by_schedule(workload, STEPS, schedule, counted)
    assert outcome == plainly(replace(workload, units=Units.BLOCK))
    inner = range(1, len(profile.units) - 1)
    forward = [name for task, names in computed.items() if task.kind is Kind.FORWARD and task.unit in inner for name in names]
    again = [name for task, names in computed.items() if task.kind is Kind.RECOMPUTE for name in names]
    assert forward.count("addmm") == 4
    assert not {"mm", "addmm"} & set(again)
    assert forward.count("bernoulli_") > 0
    assert "bernoulli_" not in again  # what is random is kept
    assert again.count("native_layer_norm") == forward.count("native_layer_norm") == 2


def test_what_cannot_be_selected_is_refused() -> None:
    """A profile that does not say how a unit is recomputed selectively is refused by the unit's name."""
    profile = profile_of(SMALL)
    plan = parse_policy("resident:checkpointing=selective").plan(profile, judge_for(profile))
    measured = replace(profile, units=tuple(replace(block, saved=()) for block in profile.units))
    with pytest.raises(InputError, match=r"unit 1 \(transformer\) is to be recomputed selectively, but its profile does not"):
        lower(measured, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        *(policy for policy in POLICIES if not policy.startswith("stronghold")),
        "stronghold:window=3,window_optimizer=gpu",
        "fsdp2_offload",
        "zero3_offload:pin_memory=off",
        "l2l:paper,update_on=gpu",
        "zero_infinity",
        "mlp_offload:cached=2",
        "twin_flow:ratio=40",
        "twin_flow:ratio=40,sub_group_size=999",
        "zero_offload:delayed_update",
    ],
)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_every_policy_clips_to_the_bit(policy: str, precision: Precision) -> None:
    """Wherever gradients and updates are, clipping has the bits of ``clip_grad_norm_``, and changes what is trained."""
    workload = replace(SMALL, precision=precision, clip_norm=CLIP_NORM)
    profile = profile_of(workload)
    plan = parse_policy(policy).plan(profile, judge_for(profile))
    stale = updated_on_cpu(plan) if plan.delayed else frozenset()
    outcome, trace = train_by_schedule(workload, STEPS, lower(profile, plan))
    assert outcome == plainly(workload, stale)
    assert outcome != plainly(replace(workload, clip_norm=None), stale)
    assert check_trace(trace) == []


@pytest.mark.slow
@pytest.mark.parametrize("home", [HOST_MEMORY, "nvme", "peer"])
def test_what_is_kept_elsewhere_is_not_kept_for_ever(home: str) -> None:
    """Each step frees what it has sent away: the host is left with as much after six steps as after two."""
    inner = UnitPlan(parameters=Route(home), kept=Route(home), states=Route(home))
    profile = profile_of(replace(SMALL, micro_batches=2))
    schedule = lower(profile, Plan("by hand", (UnitPlan(), *[inner] * SMALL.transformer_blocks, UnitPlan())))
    few, many = (train_by_schedule(profile.workload, steps, schedule)[0].host_left_bytes for steps in (2, 6))
    assert many == few


@pytest.mark.slow
@settings(max_examples=60)
@given(st.data())
def test_every_plan_trains_to_the_bit(data: st.DataObject) -> None:
    """Whatever a plan moves, recomputes, delays and updates where, with whichever of its rules: plain PyTorch's bits."""
    shape = data.draw(st.sampled_from([1, 2, 3]))
    workload = replace(
        SMALL,
        transformer_blocks=shape,
        precision=data.draw(st.sampled_from([Precision.FP32, Precision.BF16])),
        tied_embeddings=data.draw(st.booleans()),
        micro_batches=data.draw(st.sampled_from([1, 1, 2, 3])),
        clip_norm=data.draw(st.sampled_from([None, CLIP_NORM])),
    )
    profile = profile_of(workload)
    plan = data.draw(plans(profile))
    seed = data.draw(st.integers(0, 2**16))
    plan = replace(plan, rules=tuple(rule for rule in plan.rules if data.draw(st.integers(0, 3))))
    outcome, trace = train_by_schedule(workload, STEPS, validate(lower(profile, plan)), slowed(seed, 0.0005))
    assert outcome == plainly(workload, updated_on_cpu(plan) if plan.delayed else frozenset())
    assert check_trace(trace) == []


@pytest.mark.slow
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize(("tied", "home", "clip_norm"), [(True, HOST_MEMORY, CLIP_NORM), (False, "nvme", None)])
def test_sums_away_and_states_in_parts_train_to_the_bit(
    precision: Precision, tied: bool, home: str, clip_norm: float | None
) -> None:
    """Sums that rest on the host between micro-batches, and states that come and go in parts, give plain PyTorch's bits."""
    workload = replace(SMALL, precision=precision, tied_embeddings=tied, micro_batches=3, clip_norm=clip_norm)
    unit = UnitPlan(gradients=Route(HOST_MEMORY), states=Route(home, parts=3), parameters=Route(HOST_MEMORY))
    first = replace(unit, parameters=Route()) if tied else unit
    schedule = lower(profile_of(workload), Plan("by hand", (first, *[unit] * (SMALL.transformer_blocks + 1))))
    assert {task.id.again for task in schedule.tasks if task.id.kind is Kind.GPU_UPDATE} == {0, 1, 2}
    outcome, trace = train_by_schedule(workload, STEPS, validate(schedule), slowed(0, 0.0005))
    assert outcome == plainly(workload)
    assert check_trace(trace) == []


@pytest.mark.slow
@settings(max_examples=30)
@given(st.data())
def test_updates_on_both_sides_train_to_the_bit(data: st.DataObject) -> None:
    """Wherever a block is cut into what the GPU and what the CPU updates: plain PyTorch's bits."""
    workload = replace(
        SMALL,
        transformer_blocks=1,
        precision=data.draw(st.sampled_from([Precision.FP32, Precision.BF16])),
        tied_embeddings=data.draw(st.booleans()),
        micro_batches=data.draw(st.sampled_from([1, 2])),
        clip_norm=data.draw(st.sampled_from([None, CLIP_NORM])),
    )
    profile = profile_of(workload)
    plan = data.draw(with_shared_updates(profile, data.draw(plans(profile))))
    outcome, trace = train_by_schedule(workload, STEPS, lower(profile, plan), slowed(0, 0.0005))
    assert outcome == plainly(workload)
    assert check_trace(trace) == []


def with_states(size_bytes: int) -> Callable[[Schedule], Schedule]:
    """Let the GPU have other bytes of the optimizer states of unit 2."""

    def change(schedule: Schedule) -> Schedule:
        states = BufferId(Value.OPTIMIZER_STATES, GPU_MEMORY, 2)
        return replace(
            schedule, resident=tuple(b._replace(size_bytes=size_bytes) if b.id == states else b for b in schedule.resident)
        )

    return change


def with_task(kind: Kind, **other: Any) -> Callable[[Schedule], Schedule]:
    """Change the task of ``kind`` of unit 2."""
    return lambda schedule: replace(
        schedule, tasks=tuple(task._replace(**other) if task.id == TaskId(kind, 2) else task for task in schedule.tasks)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_states(12), "gives the GPU 12 bytes of its optimizer states: give a positive multiple of 8"),
        (with_states(10**9), r"less than the \d+ of the whole block"),
        (with_task(Kind.REFRESH, id=TaskId(Kind.WRITE_BACK_FORWARD, 2)), "has a write-back of parameters after forward for it"),
        (with_task(Kind.CPU_UPDATE, after=()), "its CPU update is delayed"),
        (with_task(Kind.GRADIENT_NORM, lane="cpu"), "the norm of its gradients is computed on the host"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(change: Callable[[Schedule], Schedule], message: str) -> None:
    """A schedule in which both sides update a block says how much of it each has, and moves nothing that has to be whole."""
    workload = replace(SMALL, clip_norm=CLIP_NORM)
    units = [UnitPlan(update=Update(Processor.CPU, 0.5)) if unit == 2 else UnitPlan() for unit in range(5)]
    schedule = lower(profile_of(workload), Plan("by hand", tuple(units)))
    with pytest.raises(ScheduleError, match=f"GPU and CPU each update a part of block 2, but .*{message}"):
        train_by_schedule(workload, STEPS, change(schedule))


@pytest.mark.parametrize(
    ("policy", "precision", "tied"),
    in_pairs(["zero_offload:delayed_update", "zero_offload:paper,tile_overlap,delayed_update"]),
)
def test_delayed_updates_take_the_gradients_of_the_step_before(policy: str, precision: Precision, tied: bool) -> None:
    """One-step delayed updates give the bits of plain PyTorch that does the same, and not those of ordinary training."""
    workload = replace(SMALL, precision=precision, tied_embeddings=tied)
    profile = profile_of(workload)
    plan = parse_policy(policy).plan(profile, judge_for(profile))
    assert plan.delayed
    assert updated_on_cpu(plan) == frozenset(range(len(plan.units)))
    outcome, trace = train_by_schedule(workload, STEPS, lower(profile, plan))
    assert outcome == plainly(workload, updated_on_cpu(plan))
    assert outcome != plainly(workload)
    assert check_trace(trace) == []


@pytest.mark.slow
@pytest.mark.parametrize("route", [Route(), Route(HOST_MEMORY)], ids=["here", "away"])
@pytest.mark.parametrize("kept", [Route(), Route(HOST_MEMORY)], ids=["here", "away"])
def test_segments_within_segments_train_to_the_bit(route: Route, kept: Route) -> None:
    """Units that are recomputed up to three times, and a plain segment behind them, give the bits of plain PyTorch."""
    keep, recompute, drop = Activations.KEEP, Activations.RECOMPUTE, Activations.DROP
    forwards = [
        *[(recompute, recompute, recompute, keep), (drop, drop, drop, keep), (drop, drop, keep), (drop, recompute, keep)],
        *[(drop, drop, keep), (drop, keep), (recompute, keep), (drop, keep)],
    ]
    inner = [
        UnitPlan(first, route, kept=kept if first is recompute else Route(), again=tuple(again[:-1]))
        for first, *again in forwards
    ]
    workload = replace(SMALL, transformer_blocks=len(inner), micro_batches=2)
    plan = Plan("by hand", (UnitPlan(), *inner, UnitPlan()))
    outcome, trace = train_by_schedule(workload, STEPS, validate(lower(profile_of(workload), plan)), slowed(0, 0.0005))
    assert outcome == plainly(workload)
    assert check_trace(trace) == []


def test_a_late_refresh_brings_no_newer_parameters() -> None:
    """A delayed update does not overwrite the host's parameters while a refresh still reads them."""
    profile = profile_of(SMALL)
    plan = parse_policy("zero_offload:paper,tile_overlap,delayed_update").plan(profile, judge_for(profile))
    outcome, _ = train_by_schedule(SMALL, STEPS, lower(profile, plan), slow_kind(Kind.REFRESH))
    assert outcome == plainly(SMALL, updated_on_cpu(plan))


def test_parameters_stay_until_they_are_written_back() -> None:
    """Parameters that the GPU updated are not released by the next forward while their write-back still reads them."""
    profile = profile_of(SMALL)
    inner = UnitPlan(parameters=Route(HOST_MEMORY, stays_after_backward=True))
    plan = Plan("by hand", (UnitPlan(), *[inner] * SMALL.transformer_blocks, UnitPlan()))
    outcome, _ = train_by_schedule(SMALL, STEPS, lower(profile, plan), slow_kind(Kind.WRITE_BACK_BACKWARD))
    assert outcome == plainly(SMALL)


def test_gradients_in_the_place_of_parameters_stay_until_they_are_copied() -> None:
    """With delayed updates, a refresh does not overwrite gradients that have replaced the parameters on the GPU."""
    workload = replace(SMALL, precision=Precision.BF16)
    profile = profile_of(workload)
    plan = parse_policy("zero_offload:paper,tile_overlap,delayed_update").plan(profile, judge_for(profile))
    plan = with_gradients_replacing(plan)
    outcome, _ = train_by_schedule(workload, STEPS, lower(profile, plan), slow_kind(Kind.OFFLOAD_GRADIENTS))
    assert outcome == plainly(workload, updated_on_cpu(plan))


def slow_kind(kind: Kind) -> Callable[[Action], Action]:
    """Actions that sleep before they work if they are of ``kind``."""

    def around(action: Action) -> Action:
        def perform(task: Task, iteration: int) -> None:
            if task.id.kind is kind:
                time.sleep(0.03)
            action(task, iteration)

        return perform

    return around


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_delays_never_change_the_bits(seed: int) -> None:
    """Random delays before every task change the order of what is free to vary, and no bit of the result."""
    profile = profile_of(SMALL)
    schedule = lower(profile, parse_policy("autohete").plan(profile, judge_for(profile)))
    outcome, _ = train_by_schedule(SMALL, STEPS, schedule, slowed(seed, 0.003))
    assert outcome == plainly(SMALL)


def data_edges(schedule: Schedule) -> list[tuple[TaskId, int]]:
    """Waits that carry data and that nothing else implies (other waits keep memory bounded, or a system's habits).

    Data passes between tasks of one block on different lanes. A fetch that waits for a pass waits for room; a write-back of
    parameters that the CPU updates writes what the host has already.
    """
    ids = {task.id for task in schedule.tasks}
    lanes = {task.id: task.lane for task in schedule.tasks}
    fetches = (Kind.PREFETCH_FORWARD, Kind.PREFETCH_BACKWARD)
    found = []
    for task in schedule.tasks:
        for place, edge in enumerate(task.after):
            before, block = edge.task, task.id.unit
            room = task.id.kind in fetches and lanes[before] == "gpu"
            unchanged = before.kind is Kind.WRITE_BACK_FORWARD and TaskId(Kind.CPU_UPDATE, block) in ids
            if before.unit != block or lanes[before] == task.lane or room or unchanged:
                continue
            if not reaches(without_edge(schedule, task.id, place), before, task.id, edge.back):
                found.append((task.id, place))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("policy", EVERYTHING_MOVES)
def test_a_missing_wait_is_noticed(policy: str) -> None:
    """Removing any one wait that carries data changes the bits or fails, when one of its ends, or what is before it, is slow.

    What is before it: a slow task occupies its lane, and may so hold up the very task that should have waited for it. On
    priority lanes that hides some waits however slow anything is, so their schedules are not among these.
    """
    profile = profile_of(SMALL)
    schedule = lower(profile, parse_policy(policy).plan(profile, judge_for(profile)))
    edges = data_edges(schedule)
    assert len(edges) >= 2
    unnoticed = []
    for task, place in edges:
        edge = next(t for t in schedule.tasks if t.id == task).after[place]
        mutant = without_edge(schedule, task, place)
        before = next(t for t in schedule.tasks if t.id == edge.task)
        if not any(notices(mutant, slow) for slow in (edge.task, task, *(e.task for e in before.after))):
            unnoticed.append(f"{task} without {edge}")
    assert unnoticed == []


def notices(mutant: Schedule, slow: TaskId) -> bool:
    """Whether training by ``mutant``, with ``slow`` slowed down in the middle iteration, does not train exactly."""

    def around(action: Action) -> Action:
        def perform(task: Task, iteration: int) -> None:
            if task.id == slow and iteration == 1:
                time.sleep(0.2)
            action(task, iteration)

        return perform

    outcome = trained(mutant, around)
    return outcome is None or outcome != plainly(SMALL)


def trained(schedule: Schedule, around: Callable[[Action], Action], workload: Workload = SMALL) -> Outcome | None:
    """What training by ``schedule`` gives, with every action wrapped by ``around``; None if it fails."""
    try:
        return train_by_schedule(workload, STEPS, schedule, around)[0]
    except (AutoHeteError, KeyError):  # a loss that was not computed is missing
        return None


_AWAY = UnitPlan(parameters=Route(HOST_MEMORY))
#: For each kind of task what a block decides so that training cannot do without it.
NEEDS: dict[Kind, UnitPlan] = {
    Kind.FORWARD: UnitPlan(),
    Kind.LOSS: UnitPlan(),
    Kind.RECOMPUTE: UnitPlan(Activations.RECOMPUTE),
    Kind.BACKWARD: UnitPlan(),
    Kind.GPU_UPDATE: UnitPlan(),
    Kind.PREFETCH_FORWARD: _AWAY,
    Kind.PREFETCH_BACKWARD: _AWAY,
    Kind.REFRESH: UnitPlan(update=Update(Processor.CPU)),
    Kind.FETCH_ACTIVATIONS: UnitPlan(kept=Route(HOST_MEMORY)),
    Kind.OFFLOAD_ACTIVATIONS: UnitPlan(kept=Route(HOST_MEMORY)),
    Kind.WRITE_BACK_FORWARD: UnitPlan(parameters=Route(HOST_MEMORY, stays_after_backward=True, moves=True)),
    Kind.WRITE_BACK_BACKWARD: _AWAY,
    Kind.OFFLOAD_GRADIENTS: UnitPlan(update=Update(Processor.CPU)),
    Kind.FETCH_GRADIENTS: UnitPlan(gradients=Route(HOST_MEMORY)),
    Kind.CPU_UPDATE: UnitPlan(update=Update(Processor.CPU)),
    Kind.ACCUMULATE: UnitPlan(update=Update(Processor.CPU), gradients=Route(HOST_MEMORY)),
    Kind.FETCH_STATES: UnitPlan(states=Route(HOST_MEMORY)),
    Kind.WRITE_BACK_STATES: UnitPlan(states=Route(HOST_MEMORY)),
    Kind.READ_STATES: UnitPlan(states=Route("nvme")),
    Kind.WRITE_STATES: UnitPlan(update=Update(Processor.CPU), states=Route("nvme")),
    Kind.WRITE_GRADIENTS: UnitPlan(update=Update(Processor.CPU), states=Route("nvme"), gradients=Route("nvme")),
    Kind.WRITE_ACTIVATIONS: UnitPlan(kept=Route("nvme")),
    Kind.READ_ACTIVATIONS: UnitPlan(Activations.RECOMPUTE, kept=Route("nvme")),
    Kind.READ_FORWARD: UnitPlan(parameters=Route("nvme")),
    Kind.READ_BACKWARD: UnitPlan(parameters=Route("nvme"), states=Route("nvme")),
    Kind.WRITE_PARAMETERS: UnitPlan(parameters=Route("nvme", stays_after_forward=True)),
    Kind.GRADIENT_NORM: UnitPlan(),
    Kind.CLIP: UnitPlan(),
}


def test_every_kind_has_a_need() -> None:
    """All kinds are below, but for what several GPUs do together, as the runtime trains with one, and what places do."""
    assert set(NEEDS) | {*COLLECTIVES, *TRANSFERS, *IN_PLACES} == set(Kind)


def test_a_schedule_of_several_gpus_is_refused() -> None:
    """The runtime is one process and trains with one GPU."""
    profile = profile_of(SMALL)
    join = Interconnect(2, 1e9, 1e-6)
    profile = replace(profile, hardware=replace(profile.hardware, interconnect=join, shared_cores=None).shared_by(2))
    schedule = lower(profile, Plan("by hand", (UnitPlan(),) * (SMALL.transformer_blocks + 2)))
    with pytest.raises(InputError, match="lower the schedule for hardware with one GPU"):
        train_by_schedule(SMALL, STEPS, schedule)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (UnitPlan(update=Update(Processor.PLACE), gradients=Route("nvme"), states=Route("nvme")), "updates in a place"),
        (UnitPlan(Activations.RECOMPUTE, results=(SavedRoute("mlp_2"),)), "keeps results of products"),
    ],
)
def test_what_only_the_simulator_does_is_refused(inner: UnitPlan, message: str) -> None:
    """The runtime trains with what rests elsewhere, but not there, and recomputes whole blocks."""
    outer = replace(inner, activations=Activations.KEEP, results=())
    schedule = lower(profile_of(SMALL), Plan("by hand", (outer, *[inner] * SMALL.transformer_blocks, outer)))
    with pytest.raises(InputError, match=message):
        train_by_schedule(SMALL, STEPS, schedule)


def test_sums_in_place_are_not_taken_for_gradients_in_slots() -> None:
    """Gradients of later micro-batches have no bytes where products add to the sums; the parameters that are fetched have."""
    workload = replace(SMALL, micro_batches=2)
    inner = UnitPlan(parameters=Route("host"), states=Route("host"))
    plan = Plan("by hand", (UnitPlan(), *[inner] * SMALL.transformer_blocks, UnitPlan()), sums_in_place=True)
    outcome, _ = train_by_schedule(workload, STEPS, lower(profile_of(workload), plan))
    assert outcome == plainly(workload)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NEEDS)
def test_every_kind_is_simulated_and_executed(kind: Kind) -> None:
    """Simulator and runtime execute tasks of every kind; if the runtime does nothing for one of them, that has consequences."""
    micro_batches, clips = 2 if kind in (Kind.ACCUMULATE, Kind.FETCH_GRADIENTS) else 1, kind in (Kind.GRADIENT_NORM, Kind.CLIP)
    workload = replace(SMALL, micro_batches=micro_batches, clip_norm=CLIP_NORM if clips else None)
    profile, inner = profile_of(workload), NEEDS[kind]
    outer = UnitPlan(update=inner.update)
    schedule = lower(profile, Plan("by hand", (outer, *[inner] * SMALL.transformer_blocks, outer)))
    assert kind in {task.id.kind for task in schedule.tasks}
    simulated = SimExecutor().run(schedule, STEPS)
    outcome, measured = train_by_schedule(workload, STEPS, schedule)
    assert check_trace(simulated) == check_trace(measured) == []
    assert outcome == plainly(workload)

    def around(action: Action) -> Action:
        def perform(task: Task, iteration: int) -> None:
            if task.id.kind is not kind:
                action(task, iteration)

        return perform

    without = trained(schedule, around, workload)
    # Activations that are not offloaded are still there.
    assert without is None or without != outcome or without.host_peak_bytes < outcome.host_peak_bytes
