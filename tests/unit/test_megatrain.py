"""MegaTrain: parameters that come for each recomputation, on a model to follow on paper."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from support.paper import PLENTY, profile_with

from autohete.errors import InputError
from autohete.lowering import lower
from autohete.plan import Activations, Plan, Processor, Route, UnitPlan, Update
from autohete.policies import parse_policy
from autohete.schedule import GPU_MEMORY, Kind, Value
from autohete.simulate import Simulation, judge_for, simulate_plan
from autohete.testing import checks


def simulated(interval: int) -> Simulation:
    profile = profile_with(PLENTY, 1)
    return simulate_plan(profile, parse_policy(f"megatrain:interval={interval}").plan(profile, judge_for(profile)))


@pytest.mark.parametrize(
    ("interval", "passes"),
    [
        (1, ["B4", "R3", "B3", "R2", "B2", "R1", "B1", "B0"]),
        (2, ["B4", "R3", "B3", "R1", "R2", "B2", "R1a1", "B1", "B0"]),
        (4, ["B4", "R1", "R2", "R3", "B3", "R2a1", "B2", "R1a1", "B1", "B0"]),
    ],
)
def test_groups_are_recomputed_from_their_first_input(interval: int, passes: list[str]) -> None:
    """Backward recomputes a group, then each of its blocks before its backward; each recomputation fetches its parameters."""
    found = simulated(interval)
    backward = [task.id for task in found.schedule.tasks if task.id.kind in (Kind.RECOMPUTE, Kind.BACKWARD)]
    assert [str(task) for task in backward] == passes
    fetched = [str(task.id) for task in found.schedule.tasks if task.id.kind is Kind.PREFETCH_BACKWARD]
    assert fetched == [f"P{task}".replace("PR", "PB") for task in passes if task[0] == "R"]


@pytest.mark.parametrize("interval", [1, 2, 4])
def test_parameters_leave_after_the_pass_they_came_for(interval: int) -> None:
    """What a fetch brings is freed by the recomputation it came for, or by the backward that follows the last one."""
    found = simulated(interval)
    ends = {
        str(free.id): str(task.id) for task in found.schedule.tasks for free in task.frees if free.id.value is Value.PARAMETERS
    }
    passes = [task.id for task in found.schedule.tasks if task.lane == "gpu"]
    for before, task in pairwise(passes):
        if before.kind is Kind.RECOMPUTE:
            again = f".{before.unit}a{before.again}:gpu" if before.again else f".{before.unit}:gpu"
            (key,) = (key for key in ends if key.startswith("parameters_B") and key.endswith(again))
            assert ends[key] == str(task if task.kind is Kind.BACKWARD else before)


def test_three_blocks_at_a_time_and_room_for_a_fourth() -> None:
    """The GPU always holds four times the largest block, embedding and head, and fetches wait for the block before the last."""
    found = simulated(4)
    resident = {str(buffer.id): buffer.size_bytes for buffer in found.schedule.resident if buffer.id.memory == GPU_MEMORY}
    assert resident == {"parameters.0:gpu": 8, "parameters.4:gpu": 8, "parameter_slots:gpu": 48, "policy_buffers:gpu": 16}
    spans = {str(span.task): span for span in found.trace.spans() if span.iteration == 1}
    assert spans["PB2a1"].start_ns == spans["R2"].end_ns  # never two copies of a block
    assert spans["PB1a1"].start_ns == max(spans["R2"].end_ns, spans["PB2a1"].end_ns)


def test_a_group_has_a_block() -> None:
    """An interval of 0 is refused."""
    with pytest.raises(InputError, match="megatrain:interval=0 must be at least 1 block"):
        parse_policy("megatrain:interval=0")


def test_what_cannot_come_again_is_refused() -> None:
    """Parameters that come again rest on the host and stay after no pass; of several GPUs, each has all of them."""
    for route in ({"home": "gpu"}, {"home": "host", "stays_after_forward": True}, {"home": "nvme"}):
        with pytest.raises(InputError, match="fetched for each recomputation rest on the host"):
            Route(comes_again=True, **route)
    with pytest.raises(InputError, match="gathered once for backward: leave comes_again out"):
        UnitPlan(Activations.RECOMPUTE, Route("host", comes_again=True), zero_stage=3)
    with pytest.raises(InputError, match="only parameters stay"):
        UnitPlan(gradients=Route("host", comes_again=True))


def test_coming_again_keeps_every_promise() -> None:
    """No check finds anything where the GPU or the CPU updates, and a unit that is recomputed once is fetched once."""
    profile = profile_with(PLENTY, 1)

    def plan_of(again: tuple[Activations, ...], processor: Processor, *, comes_again: bool) -> Plan:
        route, update = Route("host", comes_again=comes_again), Update(processor)
        first = UnitPlan(Activations.RECOMPUTE, route, update, again=again)
        second = replace(first, activations=Activations.DROP) if again else first
        return Plan("by hand", (UnitPlan(), first, second, replace(second, again=()), UnitPlan()))

    for processor in (Processor.GPU, Processor.CPU):
        assert checks.plan_faults(profile, plan_of((Activations.RECOMPUTE,), processor, comes_again=True)) == []
        once = [lower(profile, plan_of((), processor, comes_again=comes_again)) for comes_again in (False, True)]
        assert once[0] == once[1]
