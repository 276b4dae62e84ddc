"""Several GPUs: what each has of the node, what they do together, and one GPU's schedule against that of all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autohete.analysis.occupancy import occupancy
from autohete.analysis.ranks import every_rank, numbered
from autohete.errors import InputError
from autohete.hardware import Hardware, Interconnect, Place, load_hardware
from autohete.lowering import lower
from autohete.plan import Plan, Processor, Route, UnitPlan, Update
from autohete.policies import parse_policy
from autohete.profile import Profile, analytic_profile
from autohete.schedule import COLLECTIVE, GPU_MEMORY, HOST_MEMORY, Kind, parse_schedule, validate
from autohete.sim import SimExecutor
from autohete.simulate import judge_for, run_until_steady, simulate_plan
from autohete.testing import strategies
from autohete.testing.checks import plan_faults
from autohete.testing.list_scheduler import list_schedule
from autohete.workload import named_workload
from autohete.workload.training import Lora, Training

NODE = load_hardware("a100-40gb-epyc7543p")
#: One pool of memory for CPU and GPU.
POOL = load_hardware("mi300a")
SMALL = named_workload("gpt-2b", transformer_blocks=3, tied_embeddings=False)

fewer = settings(max_examples=40 if settings.get_current_profile_name() == "ci" else 400)


PARTS = [Training(Lora(4)), Training(Lora(2, quantised=True), 2), Training(last_blocks=1)]
ON_SEVERAL = [
    "zero_offload",
    "zero_offload:paper",
    "fsdp2_offload",
    "twin_flow",
    "zero3_offload",
    "deep_optimizer_states",
    "streamed_states",
    "capuchin",
    "autohete",
    "autohete:priority=off",
    "patrickstar",
    "stronghold",
    "stronghold:replicated",
]


def profile_on(gpus: int, node: Hardware = NODE) -> Profile:
    return analytic_profile(SMALL, node.shared_by(gpus))


def planned(policy: str, profile: Profile) -> Plan:
    return parse_policy(policy).plan(profile, judge_for(profile))


# --- hardware


def test_a_gpu_has_an_equal_part_of_its_host() -> None:
    """Memory, bandwidth, cores and drives of a node are divided among its GPUs; links and the GPU itself are not."""
    one, four = NODE, NODE.shared_by(4)
    assert (four.gpus, four.gpus_of_node) == (4, 4)
    assert four.host.memory_bytes == one.host.memory_bytes // 4
    assert four.host.memory_bandwidth == one.host.memory_bandwidth / 4
    assert one.cpu.ranks_update_bandwidth is not None
    assert four.cpu.update_bandwidth == one.cpu.ranks_update_bandwidth / 4
    assert (four.gpu, four.h2d, four.d2h) == (one.gpu, one.h2d, one.d2h)


def test_more_nodes_share_no_host() -> None:
    """The GPUs of two nodes have of their hosts what those of one node have."""
    assert replace(NODE.shared_by(8), gpus=4) == NODE.shared_by(4)


@pytest.mark.parametrize(
    ("node", "gpus", "cure"),
    [
        (NODE, 0, "gpus is 0: give at least 1"),
        (NODE, 6, "up to 4, or a multiple"),
        (load_hardware("gh200"), 2, r"links are not PCIe.* table \[interconnect\]"),
        (load_hardware("a100-40gb-epyc7713"), 8, "interconnect.network_bandwidth"),
        (NODE.shared_by(4), 2, "share the whole node by 2"),
    ],
)
def test_what_cannot_be_shared(node: Hardware, gpus: int, cure: str) -> None:
    """Counts that do not fill nodes, and nodes that do not say how GPUs are joined, are refused with what to give instead."""
    with pytest.raises(InputError, match=cure):
        node.shared_by(gpus)


def test_collectives_are_rings() -> None:
    """Of N GPUs each passes on (N - 1) / N of the bytes in N - 1 steps; between nodes at the network's rate and latency."""
    node = replace(NODE, interconnect=Interconnect(4, 100e9, 1e-6, 10e9, 1e-5))
    assert profile_on(1, node).collective_seconds(4e9) == 0
    assert profile_on(4, node).collective_seconds(4e9) == pytest.approx(3e-6 + 4e9 * 3 / 4 / 100e9)
    assert profile_on(8, node).collective_seconds(4e9) == pytest.approx(6e-6 + 1e-5 + 4e9 * 7 / 8 / 10e9)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("node", [NODE, POOL], ids=lambda node: node.name)
def test_collectives_slow_what_runs_beside_them(node: Hardware, share: float) -> None:
    """While a collective runs, at full speed, the GPU does ``concurrent_share`` of its other work."""
    node = replace(node, interconnect=Interconnect(4, 20e9, 1e-6, concurrent_share=share))
    profile = profile_on(4, node)
    trace = simulate_plan(profile, planned("resident:zero_stage=3", profile)).trace
    tasks, span = trace.schedule.tasks, trace.end_ns - trace.start_ns
    together = [i for i, task in enumerate(tasks) if task.lane == COLLECTIVE]
    begun, ended = (times[:, together].ravel() for times in (trace.start_ns, trace.end_ns))
    beside = 0
    for i, task in enumerate(tasks):
        if i in together:
            assert (span[:, i] == task.duration_ns).all()
            continue
        for start, end in zip(trace.start_ns[:, i], trace.end_ns[:, i], strict=True):
            overlap = np.maximum(np.minimum(ended, end) - np.maximum(begun, start), 0).sum()
            assert end - start - (1 - share) * overlap == pytest.approx(task.duration_ns, abs=10)
            beside += overlap
    assert beside > 0.1 * span.sum()


# --- what GPUs share


@pytest.mark.parametrize(("stage", "parameters", "states"), [(0, 1, 1), (1, 1, 4), (2, 1, 4), (3, 4, 4)], ids="stage {}".format)
def test_memory_of_the_stages(stage: int, parameters: int, states: int) -> None:
    """ZeRO's stages leave each of four GPUs a quarter of the states, and with stage 3 of the parameters."""
    profile = profile_on(4)
    schedule = lower(profile, planned(f"resident:zero_stage={stage}", profile))
    count = sum(block.parameters for block in profile.units)
    held = {value: sum(b.size_bytes for b in schedule.resident if str(b.id.value) == value) for value in
            ("parameters", "parameter_shard", "optimizer_states")}  # fmt: skip
    assert held["parameters"] + held["parameter_shard"] == pytest.approx(2 * count / parameters, rel=1e-6)
    assert held["optimizer_states"] == pytest.approx(12 * count / states, rel=1e-6)


def test_peaks_fall_with_the_stage() -> None:
    """Each stage needs less GPU memory than the one before, where there is more of that than of activations."""
    profile = analytic_profile(replace(SMALL, batch_size=1, sequence_length=64), NODE.shared_by(4))
    peaks = [simulate_plan(profile, planned(f"resident:zero_stage={stage}", profile)).gpu.peak_bytes for stage in range(4)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("policy", ON_SEVERAL)
@pytest.mark.parametrize("gpus", [2, 8])
@pytest.mark.parametrize("tied", [False, True])
def test_policies_of_several_gpus(policy: str, gpus: int, tied: bool) -> None:
    """They plan for several GPUs, each of which has a schedule that keeps every promise."""
    profile = analytic_profile(replace(SMALL, tied_embeddings=tied), NODE.shared_by(gpus))
    plan = planned(policy, profile)
    assert plan_faults(profile, plan) == []
    assert Kind.REDUCE_GRADIENTS in {task.id.kind for task in lower(profile, plan).tasks}


@pytest.mark.slow
@pytest.mark.parametrize("policy", [*ON_SEVERAL, "resident:zero_stage=2", "resident:zero_stage=3"])
@pytest.mark.parametrize("training", PARTS, ids=str)
def test_policies_of_several_gpus_train_a_part(policy: str, training: Training) -> None:
    """GPUs reduce gradients of what is trained and nothing else, in no more memory and time than to train all.

    The time is that of the GPUs: adapters are modules with hooks of their own, for which a host takes longer.
    """
    node = NODE.shared_by(4)
    node = replace(node, cpu=replace(node.cpu, launch_seconds=0))
    every, part = (analytic_profile(replace(SMALL, training=each), node) for each in (Training(), training))
    plan = planned(policy, part)
    assert plan_faults(part, plan) == []
    reduced = {task.id.unit for task in lower(part, plan).tasks if task.id.kind is Kind.REDUCE_GRADIENTS}
    assert reduced == {unit for unit, block in enumerate(part.units) if block.trained_parameters}
    of_part, of_every = simulate_plan(part, plan), simulate_plan(every, planned(policy, every))
    assert of_part.gpu.peak_bytes <= of_every.gpu.peak_bytes
    assert of_part.gpu.peak_bytes + of_part.host.peak_bytes <= of_every.gpu.peak_bytes + of_every.host.peak_bytes
    assert of_part.iteration_seconds <= of_every.iteration_seconds


@pytest.mark.parametrize("policy", ["l2l", "streamed_states:weights"])
def test_policies_of_one_gpu(policy: str) -> None:
    """What plans for one GPU says so, and which policies share a model."""
    with pytest.raises(InputError, match=r"plans for one GPU, not for 4: .*zero_offload"):
        planned(policy, profile_on(4))


def test_a_stage_means_nothing_to_one_gpu() -> None:
    """With one GPU every stage is the same schedule, without collectives."""
    profile = profile_on(1)
    schedules = {str(lower(profile, planned(f"resident:zero_stage={stage}", profile))) for stage in range(4)}
    assert len(schedules) == 1
    assert COLLECTIVE not in schedules.pop()


CPU_UNIT = UnitPlan(update=Update(Processor.CPU), parameters=Route(HOST_MEMORY), gradients=Route(HOST_MEMORY))


@pytest.mark.parametrize(
    ("units", "tied", "cure"),
    [
        ([UnitPlan(zero_stage=3)] * 5, True, "first unit zero_stage 2"),
        ([replace(CPU_UNIT, zero_stage=1)] * 5, False, "with zero_stage 3, or nothing with 0"),
        ([UnitPlan(parameters=Route(HOST_MEMORY), zero_stage=3)] * 5, False, "update them on the CPU"),
        ([UnitPlan(gradients_replace_parameters=True, zero_stage=2)] * 5, False, "or zero_stage 1"),
    ],
)
def test_what_cannot_be_planned(units: list[UnitPlan], tied: bool, cure: str) -> None:
    """What GPUs cannot share is refused with the unit and what to plan instead."""
    profile = analytic_profile(replace(SMALL, tied_embeddings=tied), NODE.shared_by(2))
    with pytest.raises(InputError, match=cure):
        lower(profile, Plan("wrong", tuple(units)))


@pytest.mark.slow
@given(strategies.profiles_of_several_gpus(max_micro_batches=3), st.data())
@fewer
def test_any_plan(profile: Profile, data: st.DataObject) -> None:
    """Any plan for several GPUs keeps every promise, and simulates as the plain scheduler says."""
    plan = data.draw(strategies.plans(profile))
    assert plan_faults(profile, plan) == []
    schedule = lower(profile, plan)
    assert list(SimExecutor().run(schedule, 3).spans()) == list(list_schedule(schedule, 3).spans())


# --- every rank


@pytest.mark.slow
@given(strategies.profiles_of_several_gpus(), st.data())
@fewer
def test_one_gpu_stands_for_all(profile: Profile, data: st.DataObject) -> None:
    """With all GPUs written out, every one does at every tick, and holds, what the one schedule says."""
    one = lower(profile, data.draw(strategies.plans(profile)))
    everyone = validate(every_rank(one, profile.hardware))
    single, all_ = (SimExecutor().run(schedule, 3) for schedule in (one, everyone))
    told = {(str(span.task), span.iteration): (span.start_ns, span.end_ns) for span in single.spans()}
    for span in all_.spans():
        assert (span.start_ns, span.end_ns) == told[str(span.task._replace(rank=0)), span.iteration]
    for rank in range(profile.hardware.gpus):
        memory = numbered(GPU_MEMORY, rank)
        assert occupancy(all_, memory).peak_bytes == occupancy(single, GPU_MEMORY).peak_bytes


def test_every_rank_as_text() -> None:
    """The schedule of all GPUs is read back from its text."""
    profile = profile_on(4)
    everyone = every_rank(lower(profile, planned("fsdp2_offload", profile)), profile.hardware)
    assert parse_schedule(str(everyone)) == everyone


def test_lanes_of_a_place_are_of_the_same_rank() -> None:
    """A place beside the GPU is there once for each rank, and its lanes copy between that and the rank's GPU."""
    peer = replace(NODE, places=(Place("peer", 10**12, 5e10, 4e10, 1e-5, beside="gpu"),))
    profile = profile_on(4, peer)
    inner = [UnitPlan(kept=Route("peer"))] * (len(profile.units) - 2)
    one = lower(profile, Plan("by hand", (UnitPlan(), *inner, UnitPlan())))
    ends = {lane.name: lane.ends for lane in validate(every_rank(one, profile.hardware)).lanes}
    assert (ends["peer_read"], ends["peer_write"]) == (("peer", "gpu"), ("gpu", "peer"))
    assert (ends["peer_read.2"], ends["peer_write.2"]) == (("peer.2", "gpu.2"), ("gpu.2", "peer.2"))


def test_every_rank_of_one() -> None:
    """One GPU has no others to write out."""
    with pytest.raises(InputError, match="trains with one GPU"):
        every_rank(lower(profile_on(1), planned("resident", profile_on(1))), NODE)


def test_the_slowest_holds_up_all() -> None:
    """When one of four GPUs takes twice as long for each pass, all have its iteration."""
    profile = profile_on(4)
    everyone = every_rank(lower(profile, planned("resident:zero_stage=3", profile)), profile.hardware)
    late = replace(everyone, tasks=tuple(
        task._replace(duration_ns=2 * task.duration_ns) if task.lane == "gpu.2" else task for task in everyone.tasks
    ))  # fmt: skip
    even, uneven = (run_until_steady(schedule, SimExecutor())[1].period_seconds for schedule in (everyone, late))
    assert uneven > 1.8 * even


@given(st.integers(2, 10))
@settings(max_examples=9, deadline=None)
def test_many_gpus(power: int) -> None:
    """Up to 1,024 GPUs the one schedule has as many tasks as for two."""
    node = replace(NODE, interconnect=Interconnect(2, 1e11, 1e-6, 1e10, 1e-5))
    policy = "resident:zero_stage=3,checkpointing=none"
    two, many = (lower(profile, planned(policy, profile)) for profile in (profile_on(2, node), profile_on(2**power, node)))
    assert len(many.tasks) == len(two.tasks)
