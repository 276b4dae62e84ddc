"""What a unit's decisions mean: the moves and resting places that lowering and the footprint follow."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autohete.errors import InputError
from autohete.lowering import lower
from autohete.lowering.footprint import pinned_memory
from autohete.lowering.frozen import without_frozen
from autohete.lowering.shards import Shards
from autohete.plan import Footprint, Format, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.moves import Batches, Move, Resting, UnitSizes, When, moves, rests
from autohete.planner.unit_costs import Costs, UnitCosts
from autohete.profile import Profile
from autohete.schedule import (
    COPIES,
    CPU,
    GPU,
    GPU_MEMORY,
    HOST_MEMORY,
    PINNED_MEMORY,
    Buffer,
    BufferId,
    Kind,
    Value,
)
from autohete.testing import strategies

#: 100 trained parameters in 2 bytes, all on one GPU; states of 12 bytes each.
SIZES = UnitSizes(
    element_bytes=2,
    parameters=Value.PARAMETERS,
    parameter_bytes=200,
    is_trained=True,
    trained=100,
    kept=100,
    frozen_bytes=0,
    gpu_updated=100,
    cpu_updated=0,
    gpu_state_bytes=1200,
    cpu_state_bytes=0,
    summed_bytes=0,
    saved_bytes=0,
    input_bytes=7,
    activation_bytes=50,
)


@st.composite
def planned(draw: st.DrawFn) -> tuple[Profile, Plan]:
    profile = draw(st.one_of(strategies.profiles(max_micro_batches=3), strategies.profiles_of_several_gpus()))
    return profile, draw(strategies.plans(profile))


#: A place of a node.
NVME = "nvme"


def batches(move: Move, micro_batches: int) -> int:
    """In how many micro-batches of an iteration ``move`` is made."""
    some = {Batches.ALL: micro_batches, Batches.LAST: 1}
    return some.get(move.batches, micro_batches - 1)


@pytest.mark.slow
@given(planned())
def test_every_move_is_one_copy(drawn: tuple[Profile, Plan]) -> None:
    """A schedule copies what the moves of its units state, as often and as long as they state, and nothing else."""
    profile, plan = drawn
    schedule, shards = lower(profile, plan), Shards(profile, plan)
    h2d, d2h, place = profile.h2d_seconds, profile.d2h_seconds, profile.place_seconds
    expected: Counter[tuple[int, str, str, str]] = Counter()
    nanoseconds: Counter[tuple[int, str, str]] = Counter()
    for i, unit in enumerate(without_frozen(profile, plan).units):
        for move in moves(unit, shards.sizes(i), has_backward=i >= profile.first_trained):
            times, way = batches(move, profile.workload.micro_batches), (move.source, move.target)
            value = Value.ACTIVATIONS if move.value is Value.INPUT else move.value
            together = move.value is Value.GRADIENTS and move.target == HOST_MEMORY and move.source != GPU_MEMORY
            if not together:
                expected[i, value, *way] += times
            if way == (HOST_MEMORY, GPU_MEMORY):
                seconds = h2d(move.size_bytes, pinned=move.pinned)
            elif way == (GPU_MEMORY, HOST_MEMORY):
                seconds = d2h(move.size_bytes, pinned=move.pinned, fresh=move.fresh)
                if move.returned_bytes:
                    seconds += h2d(move.returned_bytes, pinned=move.pinned)
            else:
                write = move.target not in (GPU_MEMORY, HOST_MEMORY)
                name = move.target if write else move.source
                seconds = place(name, move.size_bytes, write=write) - (place(name, 0, write=write) if together else 0)
            nanoseconds[i, *way] += times * round(seconds * 1e9)
    copied: Counter[tuple[int, str, str, str]] = Counter()
    lanes = {lane.name: lane.ends for lane in schedule.lanes}
    for task in schedule.tasks:
        if copy := COPIES.get(task.id.kind):
            between = lanes[task.lane]
            assert between is not None
            copied[task.id.unit, copy.value, *between] += 1
            nanoseconds[task.id.unit, *between] -= task.duration_ns
    assert copied == +expected
    assert all(abs(rest) <= 2 for rest in nanoseconds.values())  # one task of two moves is rounded once


@pytest.mark.slow
@given(planned())
def test_what_rests_is_resident(drawn: tuple[Profile, Plan]) -> None:
    """The resident buffers of units are what rests of each, in every memory; the others belong to no unit."""
    profile, plan = drawn
    shards, pinned = Shards(profile, plan), pinned_memory(profile)
    expected = [
        Buffer(BufferId(value, memory, i), size)
        for i, unit in enumerate(without_frozen(profile, plan).units)
        for value, memory, size in rests(unit, shards.sizes(i), plan.footprint, pinned)
    ]
    assert [buffer for buffer in lower(profile, plan).resident if buffer.id.unit is not None] == expected


def costs_of(profile: Profile, plan: Plan) -> list[UnitCosts]:
    """What the decisions for each unit come to by themselves, whatever the plan that stands for the policy decides."""
    costs = Costs(profile, replace(plan, units=(UnitPlan(),) * len(plan.units), rules=(), slots=None))
    return [costs.of(i, unit) for i, unit in enumerate(without_frozen(profile, plan).units)]


@pytest.mark.slow
@given(planned())
def test_planners_count_the_seconds_that_are_lowered(drawn: tuple[Profile, Plan]) -> None:
    """A unit's costs are its seconds on every lane of the schedule: its copies, its updates, and sums of gradients."""
    profile, plan = drawn
    schedule = lower(profile, plan)
    lowered: Counter[tuple[int, str]] = Counter()
    tasks: Counter[tuple[int, str]] = Counter()
    for task in schedule.tasks:
        if task.id.kind in COPIES or task.id.kind in (Kind.CPU_UPDATE, Kind.GPU_UPDATE, Kind.ACCUMULATE):
            lowered[task.id.unit, task.lane] += task.duration_ns
            tasks[task.id.unit, task.lane] += 1
    copying = [lane.name for lane in schedule.lanes if lane.ends is not None]
    for i, cost in enumerate(costs_of(profile, plan)):
        counted = {lane: cost.seconds(lane) for lane in copying}
        counted |= {CPU: cost.cpu_update + cost.sums, GPU: cost.gpu_update}
        for lane, seconds in counted.items():  # each task is rounded to nanoseconds
            assert seconds * 1e9 == pytest.approx(lowered[i, lane], abs=0.5 * tasks[i, lane] + 1e-3, rel=1e-12), (i, lane)


@pytest.mark.slow
@given(planned())
def test_planners_count_the_bytes_that_rest(drawn: tuple[Profile, Plan]) -> None:
    """What rests of all units is what is resident, but for slots and other buffers of the system."""
    profile, plan = drawn
    found = costs_of(profile, plan)
    resident: Counter[str] = Counter()
    for buffer in lower(profile, plan).resident:
        if buffer.id.value not in (Value.POLICY_BUFFERS, Value.PARAMETER_SLOTS):
            resident[buffer.memory] += buffer.size_bytes
    counted = {memory: sum(one.resting_bytes(memory) for one in found) for memory in (GPU_MEMORY, "nvme", "cxl")}
    counted[HOST_MEMORY] = sum(one.host_bytes for one in found)
    resident[HOST_MEMORY] += resident[PINNED_MEMORY]
    assert counted == {memory: resident[memory] for memory in counted}
    if profile.hardware.host.pinned_bytes is not None:
        assert sum(one.pinned_bytes for one in found) == resident[PINNED_MEMORY]


def test_parameters_that_rest_on_the_host_come_for_each_pass() -> None:
    """They are fetched for forward and backward of each micro-batch, and copied home once after an update on the GPU."""
    unit = UnitPlan(parameters=Route(HOST_MEMORY))
    assert list(moves(unit, SIZES)) == [
        Move(Value.PARAMETERS, HOST_MEMORY, GPU_MEMORY, 200, When.BEFORE_FORWARD, Batches.ALL),
        Move(Value.PARAMETERS, HOST_MEMORY, GPU_MEMORY, 200, When.BEFORE_BACKWARD, Batches.ALL),
        Move(Value.PARAMETERS, GPU_MEMORY, HOST_MEMORY, 200, When.AFTER_UPDATE),
    ]
    assert list(rests(unit, SIZES, Footprint(host_parameter_bytes=2), HOST_MEMORY)) == [
        Resting(Value.PARAMETERS, HOST_MEMORY, 200),
        Resting(Value.OPTIMIZER_STATES, GPU_MEMORY, 1200),
    ]


def test_what_the_cpu_updates_crosses_the_link_once_each_way() -> None:
    """Gradients go down after the last backward, those of other micro-batches in the format of the sums; parameters come up."""
    sizes = UnitSizes(2, Value.PARAMETERS, 200, True, 100, 100, 0, 0, 100, 0, 1200, 0, 0, 7, 50)
    unit = UnitPlan(
        update=Update(Processor.CPU),
        gradients=Route(HOST_MEMORY, carried=Format(4)),
        sum_bytes=2,
        refresh=Format(4, pinned=False),
    )
    assert list(moves(unit, sizes)) == [
        Move(Value.PARAMETERS, HOST_MEMORY, GPU_MEMORY, 400, When.AFTER_UPDATE, pinned=False),
        Move(Value.GRADIENTS, GPU_MEMORY, HOST_MEMORY, 200, When.AFTER_BACKWARD, Batches.OTHERS),
        Move(Value.GRADIENTS, GPU_MEMORY, HOST_MEMORY, 400, When.AFTER_BACKWARD),
    ]


def test_only_copies_home_touch_new_pages() -> None:
    """What moves home after each pass needs neither pinned room nor old pages there, even if the CPU updates."""
    new = Format(pinned=False, fresh=True)
    unit = UnitPlan(
        parameters=Route(HOST_MEMORY, carried=new, moves=True),
        update=Update(Processor.CPU),
        gradients=Route(HOST_MEMORY, carried=new),
    )
    sizes = UnitSizes(2, Value.PARAMETERS, 200, True, 100, 100, 0, 0, 100, 0, 1200, 0, 0, 7, 50)
    found = list(moves(unit, sizes))
    assert {(move.value, move.target) for move in found if move.fresh} == {
        (Value.PARAMETERS, HOST_MEMORY),
        (Value.GRADIENTS, HOST_MEMORY),
    }
    assert not any(move.pinned for move in found)
    with pytest.raises(InputError, match="pinned=False"):
        Format(fresh=True)
    with pytest.raises(InputError, match="returned_bytes is 65: give 0 to 64"):
        Format(returned_bytes=65)


def test_states_on_drives_pass_through_the_host() -> None:
    """States on NVMe that the GPU updates come in two hops and return in two, and what forward keeps goes and returns."""
    unit = UnitPlan(states=Route(NVME), kept=Route(HOST_MEMORY))
    kept, states = list(moves(unit, SIZES))[:2], list(moves(unit, SIZES))[2:]
    assert [(move.value, move.target, move.size_bytes) for move in kept] == [
        (Value.ACTIVATIONS, HOST_MEMORY, 50),
        (Value.ACTIVATIONS, GPU_MEMORY, 50),
    ]
    assert [(move.source, move.target) for move in states] == [
        (NVME, HOST_MEMORY),
        (HOST_MEMORY, GPU_MEMORY),
        (GPU_MEMORY, HOST_MEMORY),
        (HOST_MEMORY, NVME),
    ]
    assert list(rests(unit, SIZES, Footprint(), HOST_MEMORY))[1:] == [Resting(Value.OPTIMIZER_STATES, NVME, 1200)]


def test_a_frozen_unit_has_parameters_alone() -> None:
    """Without trained parameters nothing else rests or moves, and without backward parameters come for forward alone."""
    sizes = UnitSizes(2, Value.PARAMETERS, 200, False, 0, 0, 200, 0, 0, 0, 0, 0, 0, 7, 50)
    unit = UnitPlan(parameters=Route(HOST_MEMORY))
    assert [move.when for move in moves(unit, sizes)] == [When.BEFORE_FORWARD, When.BEFORE_BACKWARD]
    assert [move.when for move in moves(unit, sizes, has_backward=False)] == [When.BEFORE_FORWARD]
    assert list(rests(unit, sizes, Footprint(), HOST_MEMORY)) == [Resting(Value.PARAMETERS, HOST_MEMORY, 200)]


def test_sums_that_rest_on_the_host_come_back_for_the_next_backward() -> None:
    """Gradients of an update on the GPU go down after each micro-batch but the last, and come up for each but the first."""
    unit, sizes = UnitPlan(gradients=Route(HOST_MEMORY)), replace(SIZES, summed_bytes=200)
    assert list(moves(unit, sizes)) == [
        Move(Value.GRADIENTS, GPU_MEMORY, HOST_MEMORY, 200, When.AFTER_BACKWARD, Batches.OTHERS),
        Move(Value.GRADIENTS, HOST_MEMORY, GPU_MEMORY, 200, When.BEFORE_BACKWARD, Batches.LATER),
    ]
    assert Resting(Value.GRADIENTS, HOST_MEMORY, 200) in rests(unit, sizes, Footprint(), HOST_MEMORY)
    assert not list(moves(unit, SIZES))  # one micro-batch has no sums


def test_states_move_in_parts() -> None:
    """Parts are cut at multiples of 64 elements, each comes before its update and goes after it, and together they are all."""
    unit = UnitPlan(states=Route(HOST_MEMORY, parts=2))
    assert list(moves(unit, SIZES)) == [
        Move(Value.OPTIMIZER_STATES, HOST_MEMORY, GPU_MEMORY, 768, When.BEFORE_UPDATE),
        Move(Value.OPTIMIZER_STATES, GPU_MEMORY, HOST_MEMORY, 768, When.AFTER_UPDATE),
        Move(Value.OPTIMIZER_STATES, HOST_MEMORY, GPU_MEMORY, 432, When.BEFORE_UPDATE, part=1),
        Move(Value.OPTIMIZER_STATES, GPU_MEMORY, HOST_MEMORY, 432, When.AFTER_UPDATE, part=1),
    ]
