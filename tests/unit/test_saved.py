"""Routes of saved tensors: what a unit's forward saves is kept, made again, or rests elsewhere, tensor by tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.paper import profile_with

from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.lowering import lower
from autohete.plan import Activations, Plan, Route, SavedRoute, UnitPlan
from autohete.profile import Profile, SavedTensors, analytic_profile
from autohete.schedule import parse_schedule
from autohete.simulate import simulate_plan
from autohete.workload import Kernels
from autohete.workload.config import read_model

AGAIN = SavedRoute("norm", recomputed=True)
AWAY = SavedRoute("result", Route("host"))


def paper(**changes: Any) -> Profile:
    """Blocks that save a result of 16 bytes, and a norm of 20 that is made again in 2 ns, besides an input of 4."""
    profile = profile_with(10**12, 1, selective=True)
    return replace(profile, units=tuple(replace(unit, **changes) if unit.saved else unit for unit in profile.units))


def planned(middle: UnitPlan) -> Plan:
    """A plan that decides only about the second of three blocks."""
    return Plan("by hand", (UnitPlan(), UnitPlan(), middle, UnitPlan(), UnitPlan()))


def tasks_of(plan: Plan, unit: int) -> list[str]:
    """The lines of the schedule that are about one unit, without its parameters."""
    lines = str(lower(paper(), plan)).splitlines()
    kinds = ("F", "AO", "AF", "AW", "AR", "R", "B")
    wanted = tuple(f"task {kind}{unit}" for kind in kinds)
    return [line for line in lines if line.startswith((f"saved {unit}", *wanted))]


def test_one_tensor_is_made_again_and_another_rests_on_the_host() -> None:
    """The parts in order: what is made again, what stays (here nothing), and what rests elsewhere. Worked out by hand: the copy
    takes 16 bytes / 4 bytes per ns, and the recomputation waits for what is fetched.
    """
    plan = planned(UnitPlan(Activations.SELECTIVE, saved=(AGAIN, AWAY)))
    assert tasks_of(plan, 2) == [
        "saved 2 0 norm",
        "saved 2 2 result",
        "task F2 gpu 6 after=F1,W2@-1 allocates=activations.2a1:gpu:0,activations.2a2:gpu:16,workspace_F.2:gpu:20,"
        "input.3:gpu:4 frees=workspace_F.2:gpu",
        "task AO2a2 d2h 4 after=F2 allocates=activations.2a2:host:16 frees=activations.2a2:gpu",
        "task AF2a2 h2d 4 after=AO2a2,B4 allocates=activations_B.2a2:gpu:16 frees=activations.2a2:host",
        "task R2 gpu 2 after=B3,AF2a2 allocates=activations.2:gpu:20",
        "task B2 gpu 12 after=R2 allocates=input_gradient.2:gpu:4,workspace_B.2:gpu:8,gradients.2:gpu:16 "
        "frees=input.2:gpu,activations.2:gpu,activations.2a1:gpu,activations_B.2a2:gpu,input_gradient.3:gpu,workspace_B.2:gpu",
    ]


def test_what_is_selected_is_made_again_from_what_rests_on_the_host() -> None:
    """Selective recomputation whose other tensors rest on the host, with the input: 16 + 4 bytes."""
    plan = planned(UnitPlan(Activations.SELECTIVE, kept=Route("host")))
    assert [line.split(" allocates=")[0] for line in tasks_of(plan, 2)] == [
        "task F2 gpu 6 after=F1,W2@-1",
        "task AO2a1 d2h 5 after=F2",
        "task AF2a1 h2d 5 after=AO2a1,B4",
        "task R2 gpu 2 after=B3,AF2a1",
        "task B2 gpu 12 after=R2",
    ]


def test_parts_rest_in_different_places() -> None:
    """One tensor on the host and another in a place behind it, while the input stays: two copies of their own each way."""
    plan = planned(UnitPlan(saved=(SavedRoute("norm", Route("nvme")), AWAY)))
    assert [line.split()[1] for line in tasks_of(plan, 2) if line.startswith("task")] == [
        *("F2", "AO2a1", "AO2a2", "AW2a2", "AF2a1", "AR2a2", "AF2a2", "B2"),
    ]


def test_whole_units_are_cases_of_it() -> None:
    """All tensors routed alike is what activations as a whole are, to the nanosecond and byte: kept, and selective."""
    profile = paper()
    for whole, parts in (
        (UnitPlan(), UnitPlan(saved=(SavedRoute("norm"), SavedRoute("result")))),
        (UnitPlan(Activations.SELECTIVE), UnitPlan(Activations.SELECTIVE, saved=(AGAIN,))),
    ):
        one, other = (simulate_plan(profile, planned(unit)) for unit in (whole, parts))
        assert one.iteration_seconds == other.iteration_seconds
        assert one.gpu.peak_bytes == other.gpu.peak_bytes


def test_a_schedule_with_named_parts_reads_back() -> None:
    """The names are part of its text."""
    schedule = lower(paper(), planned(UnitPlan(Activations.SELECTIVE, saved=(AGAIN, AWAY))))
    assert [str(one) for one in schedule.saved] == ["saved 2 0 norm", "saved 2 2 result"]
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"saved": (AGAIN,)}, "saved recomputes norm, but activations are kept: make them selective"),
        ({"activations": Activations.RECOMPUTE, "saved": (AWAY,)}, "saves no tensors: leave saved out"),
        ({"saved": (AWAY, AWAY)}, "give each name once"),
    ],
)
def test_routes_that_contradict_are_refused(changes: dict[str, Any], said: str) -> None:
    """A plan is refused with what is wrong and what to do."""
    with pytest.raises(InputError, match=said):
        UnitPlan(**changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"recomputed": True, "route": Route("host")}, "norm is recomputed, so it rests nowhere"),
        ({"route": Route("host", parts=2)}, "copied as it is, and as a whole"),
        ({"name": "two words"}, "give a name without spaces"),
    ],
)
def test_a_route_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    """So is one route by itself."""
    with pytest.raises(InputError, match=said):
        SavedRoute(**{"name": "norm", **changes})


def test_a_plan_for_another_profile_is_refused() -> None:
    """Names that the profile does not know, and tensors that it cannot make again, are refused by unit and name."""
    unknown = planned(UnitPlan(saved=(SavedRoute("gate", Route("host")),)))
    with pytest.raises(InputError, match=r"saved tensors 'gate', which the profile does not name \(it names result, norm\)"):
        lower(paper(), unknown)
    alone = planned(UnitPlan(Activations.SELECTIVE, saved=(SavedRoute("result", recomputed=True),)))
    with pytest.raises(InputError, match=r"the saved tensors result of unit 2 \(transformer\) are to be made again, but only"):
        lower(paper(), alone)
    with pytest.raises(InputError, match=r"51 bytes together, but a forward keeps 36"):
        paper(saved=(SavedTensors("a", 31), SavedTensors("b", 20)))


@pytest.mark.parametrize("kernels", list(Kernels))
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "gemma-2-9b", "gpt2-xl"])
def test_the_tables_list_everything_that_is_kept(name: str, kernels: Kernels) -> None:
    """Tensor by tensor, each with a name of its own."""
    workload = read_model(name)
    for unit in analytic_profile(replace(workload, kernels=kernels), load_hardware("h100-pcie5")).units[1:-1]:
        assert sum(one.size_bytes for one in unit.saved) == unit.kept_bytes > 0
        assert bool(unit.selected) is (kernels is not Kernels.LEAN)


def test_lean_kernels_keep_what_others_make_again() -> None:
    """Of Llama-3-8B per token: 84 KiB besides the input (queries, keys, values and attention's result, the residual stream, and
    both projections of the MLP) and the statistics of attention, 4 bytes a head; fused kernels keep 136 with the input, and
    without attention's. The time is that of fused ones with all that is selected made again.
    """
    workload = read_model("llama-3.1-8b")
    lean, fused, eager = (
        analytic_profile(replace(workload, kernels=kernels), load_hardware("h100-pcie5")).units[1]
        for kernels in (Kernels.LEAN, Kernels.FUSED, Kernels.EAGER_FLASH)
    )
    heads = 4 * 32 * workload.tokens
    assert lean.kept_bytes - heads == 84 * 1024 * workload.tokens
    assert fused.activation_bytes - heads == 136 * 1024 * workload.tokens
    assert eager.activation_bytes - heads == 196 * 1024 * workload.tokens
    assert lean.kept_bytes == fused.kept_bytes - fused.bytes_of(fused.selected)
    assert lean.forward_seconds == fused.forward_seconds
    again = lean.backward_seconds - fused.backward_seconds
    assert again == pytest.approx(fused.again_seconds(fused.selected), rel=0.01)
