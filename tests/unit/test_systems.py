"""What the published systems do by version and flag, against arithmetic on paper."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paper import profile_with
from support.plans import with_drives

from autohete.analysis.occupancy import contents
from autohete.errors import InfeasibleError, InputError
from autohete.execution.sharing import FULL_RATE, Sharing
from autohete.hardware import Hardware, Place, load_hardware
from autohete.lowering import lower
from autohete.lowering.budget import with_memory
from autohete.plan import Hooks, Plan, Processor
from autohete.plan.policy import Verdict
from autohete.plan.rules import BlockingCopies
from autohete.planner.optimistic import OptimisticJudge
from autohete.policies import POLICIES, parse_policy, search_space
from autohete.policies.host_arrays import SUB_GROUP, sub_groups, tensors
from autohete.policies.too_large import surely_exceeds_gpu
from autohete.policies.zero_offload import DeepSpeed
from autohete.profile import Profile, analytic_profile
from autohete.quantities import rounded_when_pinned
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, BufferId, Kind, TaskId, Value, parse_schedule
from autohete.sim import SimExecutor
from autohete.simulate import Simulation, judge_for, simulate, simulate_plan
from autohete.simulate.summary import answer
from autohete.testing import strategies
from autohete.testing.checks import plan_faults
from autohete.train.as_executed import as_executed, everything_resident
from autohete.workload import Kernels, Precision, Units, Workload, named_workload
from autohete.workload.optimizers import Optimizer
from autohete.workload.training import Lora, Training

NODE = load_hardware("a100-40gb-epyc7713")
FP16 = named_workload("gpt-4b", precision=Precision.FP16, kernels=Kernels.EAGER)
P = FP16.parameters
VERSIONS = list(DeepSpeed)
WITH_CHECKPOINTING = [name for name, system in POLICIES.items() if "checkpointing" in {field.name for field in fields(system)}]
TILES = [DeepSpeed.V0_3, DeepSpeed.V0_4_3, DeepSpeed.V0_8_3]


def profile_of(precision: Precision = Precision.FP16) -> Profile:
    return analytic_profile(replace(FP16, precision=precision), NODE)


def planned(policy: str, precision: Precision = Precision.FP16) -> tuple[Profile, Plan]:
    profile = profile_of(precision)
    return profile, parse_policy(policy).plan(profile, judge_for(profile))


def simulated(policy: str, precision: Precision = Precision.FP16) -> Simulation:
    return simulate_plan(*planned(policy, precision))


def work(found: Simulation, kind: Kind) -> float:
    """Seconds of all tasks of ``kind``."""
    return sum(task.duration_ns for task in found.schedule.tasks if task.id.kind is kind) * 1e-9


def offloaded(version: DeepSpeed, flags: str = "") -> str:
    return f"zero_offload:checkpointing=full,deepspeed={version}{flags}"


# --- ZenFlow ------------------------------------------------------------------------------------------------------


def test_zenflow_hides_its_update_behind_the_next_steps() -> None:
    """Beside ZeRO-Offload with as many micro-batches it is faster by the update, less what chosen columns and pageable copies
    take; without ``overlap_step`` it is slower by the columns alone.
    """
    profile = analytic_profile(replace(FP16, precision=Precision.BF16, micro_batches=4), NODE)
    plans = {
        name: parse_policy(f"{name}checkpointing=full").plan(profile, judge_for(profile))
        for name in ("zero_offload:", "zenflow:overlap_step=off,", "zenflow:", "zenflow:topk_ratio=0,")
    }
    found = {name: simulate_plan(profile, plan) for name, plan in plans.items()}
    offload, waiting, beside, none = (one.iteration_seconds for one in found.values())
    columns = 4 * 7 * P / (NODE.gpu.memory_bandwidth * NODE.gpu.memory_efficiency)  # 35 numbers of 2 bytes, a tenth of them
    assert waiting - offload == pytest.approx(columns, rel=0.02)
    assert beside - none == pytest.approx(columns, rel=0.02)
    update = work(found["zero_offload:"], Kind.CPU_UPDATE)
    down, up = profile.d2h_seconds, profile.h2d_seconds
    slower = down(4 * P, pinned=False) - down(4 * P) + up(2 * P, pinned=False) - up(2 * P)
    assert offload - none == pytest.approx(update - slower, rel=0.05)


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_zenflow_updates_with_complete_sums(micro_batches: int, clip_norm: float | None, gpus: int) -> None:
    """No update takes a sum that lacks a micro-batch, or that the next iteration overwrites."""
    workload = replace(FP16, precision=Precision.BF16, micro_batches=micro_batches, clip_norm=clip_norm)
    profile = analytic_profile(workload, NODE.shared_by(gpus))
    assert plan_faults(profile, parse_policy("zenflow:checkpointing=none").plan(profile, judge_for(profile))) == []


def test_zenflow_holds_what_its_processes_share() -> None:
    """The GPU has 0.8 bytes a parameter more than under ZeRO-Offload, the host 20 (gradients twice, moments, masters)."""
    profile = analytic_profile(replace(FP16, precision=Precision.BF16, micro_batches=4), NODE)
    offload, flow = (
        parse_policy(f"{name}:checkpointing=full").plan(profile, judge_for(profile)).footprint
        for name in ("zero_offload", "zenflow")
    )
    assert flow.gpu_buffer_bytes - offload.gpu_buffer_bytes == pytest.approx(0.8 * P, rel=1e-6)
    assert flow.host_optimizer_bytes - offload.host_optimizer_bytes == 20


# --- DeepSpeed by version -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_gradients_cross_in_fp32_at_the_rate_of_their_buffer(version: DeepSpeed) -> None:
    """Every version copies 4 bytes per parameter, from 0.10.1 to 0.19.4 into pageable memory unless it is told to pin it."""
    pageable = version in (DeepSpeed.V0_14, DeepSpeed.V0_16)
    rate = NODE.d2h.pageable_bandwidth if pageable else NODE.d2h.bandwidth
    assert rate is not None
    assert work(simulated(offloaded(version)), Kind.OFFLOAD_GRADIENTS) == pytest.approx(4 * P / rate, rel=1e-3)
    if version not in TILES:
        pinned = work(simulated(offloaded(version, ",pin_memory=on")), Kind.OFFLOAD_GRADIENTS)
        assert pinned == pytest.approx(4 * P / NODE.d2h.bandwidth, rel=1e-3)


@pytest.mark.parametrize("version", VERSIONS)
def test_only_the_stream_of_its_own_overlaps_gradient_copies(version: DeepSpeed) -> None:
    """Backward waits for each gradient's copy, but for 0.4.0 to 0.4.3."""
    found = simulated(offloaded(version))
    column = {task.id: i for i, task in enumerate(found.schedule.tasks)}
    overlapping = 0
    for block in range(2, 20):
        copy = column[TaskId(Kind.OFFLOAD_GRADIENTS, block)]
        following = column[TaskId(Kind.RECOMPUTE, block - 1)]
        overlapping += int(found.trace.start_ns[1, following] < found.trace.end_ns[1, copy])
    assert overlapping == (18 if version is DeepSpeed.V0_4_3 else 0)


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.BF16])
@pytest.mark.parametrize("version", VERSIONS)
def test_uploads_hide_behind_updates_in_fp16_up_to_0_8_3(version: DeepSpeed, precision: Precision) -> None:
    """Tiles of fp16 parameters go up while others are updated; bf16 ones, and all from 0.9.0 on, when the CPU has ended."""
    profile, plan = planned(offloaded(version), precision)
    found = simulate_plan(profile, plan)
    column = {task.id: i for i, task in enumerate(found.schedule.tasks)}
    first_refresh = found.trace.start_ns[1, column[TaskId(Kind.REFRESH, len(plan.units) - 1)]]
    last_update = found.trace.end_ns[1, column[TaskId(Kind.CPU_UPDATE, 0)]]
    assert (first_refresh < last_update) == (version in TILES and precision is Precision.FP16)


@pytest.mark.parametrize(
    ("version", "upload_bytes", "pinned"),
    [
        (DeepSpeed.V0_8_3, 4, True),  # fp32 tiles, which the GPU casts
        (DeepSpeed.V0_14, 2, False),  # a 16-bit temporary
        (DeepSpeed.V0_16, 4, True),  # the fp32 master
        (DeepSpeed.V2026, 2, True),  # a 16-bit staging buffer
    ],
)
def test_what_goes_up(version: DeepSpeed, upload_bytes: int, pinned: bool) -> None:
    """The upload takes the bytes of its format at the rate of the memory that it comes from."""
    rate = NODE.h2d.bandwidth if pinned else NODE.h2d.pageable_bandwidth
    assert rate is not None
    assert work(simulated(offloaded(version)), Kind.REFRESH) == pytest.approx(upload_bytes * P / rate, rel=1e-3)


@pytest.mark.parametrize(
    ("version", "kernel", "elementwise"),
    [(DeepSpeed.V0_8_3, 28 + 8, 8), (DeepSpeed.V0_14, 28, 8 + 6), (DeepSpeed.V0_16, 28, 8), (DeepSpeed.V2026, 28, 8 + 6)],
)
def test_the_cpu_step_is_adam_and_elementwise_kernels(version: DeepSpeed, kernel: int, elementwise: int) -> None:
    """Unscaling and casts run at their own rate beside Adam's, and a bulk step at the full rates."""
    rate = NODE.cpu.elementwise_bandwidth
    assert rate is not None
    expected = P * (kernel / NODE.cpu.update_bandwidth + elementwise / rate)
    assert work(simulated(offloaded(version)), Kind.CPU_UPDATE) == pytest.approx(expected, rel=1e-6)


def test_the_fp32_master_of_the_whole_model_passes_through_the_gpu() -> None:
    """0.14.1 to 0.16.9 hold 6 bytes per parameter at the step, so 12B does not fit on 40 GB; with 0.8.3 it does."""
    big = replace(named_workload("gpt-12b"), precision=Precision.FP16, kernels=Kernels.EAGER)
    profile = analytic_profile(big, NODE)
    verdicts = {}
    for version in (DeepSpeed.V0_8_3, DeepSpeed.V0_16):
        found = simulate_plan(profile, parse_policy(offloaded(version)).plan(profile, judge_for(profile)))
        verdicts[version] = found.verdict
        if version is DeepSpeed.V0_16:
            assert found.gpu.peak_bytes >= 6 * big.parameters
    assert verdicts == {DeepSpeed.V0_8_3: Verdict.OK, DeepSpeed.V0_16: Verdict.GPU_OUT_OF_MEMORY}


def test_pinning_what_is_always_pinned_is_refused() -> None:
    """``pin_memory`` of a version that has no choice is refused, as a flag that would change nothing."""
    with pytest.raises(InputError, match="always pins"):
        parse_policy("zero_offload:deepspeed=0.8.3,pin_memory=off")


def test_zero3_offload_moves_parameters_and_what_it_holds() -> None:
    """16-bit parameters are fetched for each pass and updated on the host, which holds 22 bytes per parameter."""
    workload = replace(FP16, tied_embeddings=False)
    found = simulate(workload, NODE, parse_policy("zero3_offload:checkpointing=none"))
    assert Kind.REFRESH not in {task.id.kind for task in found.schedule.tasks}
    head = found.profile.units[-1].parameters  # stays for backward
    for kind, elements in [
        (Kind.PREFETCH_FORWARD, workload.parameters),
        (Kind.PREFETCH_BACKWARD, workload.parameters - head),
    ]:
        assert work(found, kind) == pytest.approx(found.profile.h2d_seconds(2 * elements), rel=1e-2)
    # Parameters and gradients in one array each, fp32 gradients by sub-group, and what each tensor had taken before.
    arrays = [2 * workload.parameters] * 2 + [4 * group for group in sub_groups(found.profile, SUB_GROUP)]
    before = [2 * tensor for tensor in tensors(found.profile)]
    rounded = sum(map(rounded_when_pinned, arrays + before))
    assert found.host.peak_bytes == rounded + 12 * workload.parameters


def test_old_deepspeed_flushes_gradients_once_a_step() -> None:
    """With pinned memory, backward of the last micro-batch alone waits for gradients; without, that of each does."""
    times = {}
    for flag in ("", ",async_gradients=off", ",pin_memory=off"):
        policy = parse_policy(f"twin_flow:checkpointing=full,ratio=100{flag}")
        few, more = (simulate(replace(FP16, micro_batches=count), NODE, policy).iteration_seconds for count in (2, 3))
        times[flag] = few, more - few
    assert times[""][0] < times[",async_gradients=off"][0] < times[",pin_memory=off"][0]
    assert times[""][1] == pytest.approx(times[",async_gradients=off"][1], rel=0.02)
    assert times[",pin_memory=off"][1] > 1.2 * times[""][1]
    with pytest.raises(InputError, match="changes nothing with pin_memory=off"):
        parse_policy("twin_flow:async_gradients=off,pin_memory=off")


def test_a_sub_group_ends_with_the_tensor_that_fills_it() -> None:
    """Sub-groups have whole tensors and all of them, and each but the last is at least as large as asked."""
    profile = planned("zero3_offload:checkpointing=full")[0]
    size = profile.units[1].parameters
    groups, sizes = list(sub_groups(profile, size)), list(tensors(profile))
    assert sum(groups) == sum(sizes) == profile.workload.parameters
    assert all(size <= group < size + max(sizes) for group in groups[:-1])
    ends = set(accumulate(sizes))
    assert ends.issuperset(accumulate(groups))


def test_unpinned_parameters_of_zero3_leave_nothing_behind() -> None:
    """``pin_parameters=off`` saves what was pinned for each tensor, and no time: the flat buffer is pinned in any case."""
    pinned, pageable = (
        simulate(FP16, NODE, parse_policy(f"zero3_offload:checkpointing=full{flag}")) for flag in ("", ",pin_parameters=off")
    )
    left = sum(rounded_when_pinned(2 * tensor) for tensor in tensors(pinned.profile))
    assert pinned.host.peak_bytes - pageable.host.peak_bytes == left
    assert pinned.iteration_seconds == pageable.iteration_seconds


def test_old_pytorch_pins_what_it_is_asked_for() -> None:
    """ZeRO-Offload of 2020 holds 16 bytes a parameter, tiles and a buffer for a tensor; that of 2023 rounds."""
    old, new = (
        simulate(FP16, NODE, parse_policy(f"zero_offload:checkpointing=full,deepspeed={it}")) for it in ("0.4.3", "0.8.3")
    )
    parameters, tensor = FP16.parameters, 2 * FP16.largest_tensor
    assert old.host.peak_bytes == 16 * parameters + tensor + 2**30
    assert new.host.peak_bytes == 12 * parameters + rounded_when_pinned(4 * parameters) + rounded_when_pinned(tensor) + 2**30


def test_zero3_offload_without_parameters_is_twin_flow_on_the_cpu() -> None:
    """``offload_param=off`` plans as Twin-Flow does with everything on the CPU; flags that change nothing are refused."""
    profile, mine = planned("zero3_offload:checkpointing=full,offload_param=off")
    _, other = planned("twin_flow:checkpointing=full,ratio=100,sub_group_size=1000000000")
    assert (mine.units, mine.rules, mine.footprint) == (other.units, other.rules, other.footprint)
    for flags, said in [
        ("offload_param=off,pin_parameters=off", "changes nothing"),
        ("offload_param=off,reuse_distance=1000", "changes nothing"),
        ("bucket_size=0", "between 1 and 100000"),
    ]:
        with pytest.raises(InputError, match=f"zero3_offload:.*{said}"):
            parse_policy(f"zero3_offload:{flags}")
    assert profile.hardware is NODE


def released(elements: Sequence[int], recomputed: bool, distance: int) -> list[bool]:
    """Whether each module is released after its forward, if it has so many elements, by the search of DeepSpeed 0.19.6 through
    the modules that follow (``__params_to_release``). The first and the last module, embedding and head, are not recomputed.
    """
    count = len(elements)
    order = [*range(count)]
    for one in reversed(range(count)):
        order += [one, one] if recomputed and 0 < one < count - 1 else [one]
    found = []
    for step in range(count):
        traversed, release = 0, True
        for after in order[step + 1 :]:
            if traversed >= distance:
                break
            release &= after != step
            traversed += elements[after]
        found.append(release)
    return found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("checkpointing", ["full", "none"])
@pytest.mark.parametrize("distance", [0, 1, 300, 1000, 100_000])
def test_zero3_keeps_what_it_soon_uses_again(distance: int, checkpointing: str, tied: bool) -> None:
    """Units stay that DeepSpeed's search would not release, but for one whose own elements end it; the head always stays."""
    profile = analytic_profile(replace(FP16, tied_embeddings=tied), NODE)
    policy = parse_policy(f"zero3_offload:checkpointing={checkpointing},reuse_distance={distance}")
    plan = policy.plan(profile, judge_for(profile))
    elements = [unit.parameters for unit in profile.units]
    elements[-1] += elements[0] * tied
    expected = [not one for one in released(elements, checkpointing == "full", 1_000_000 * distance)]
    stays = [unit.parameters.stays_after_forward for unit in plan.units]
    inner = slice(1, len(elements) - 1)
    assert stays[-1] == (not tied)
    assert 0 <= sum(expected[inner]) - sum(stays[inner]) <= 1
    assert sorted(stays[inner]) == stays[inner]  # the last ones
    if distance == 100_000:
        assert all(stays[inner])


# --- the others ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("policy", WITH_CHECKPOINTING)
@pytest.mark.parametrize("gpu_memory", [12, 20, 40, 80, 160])
def test_the_better_checkpointing_is_the_faster_one_that_fits(policy: str, gpu_memory: int) -> None:
    """``best`` is full or no checkpointing: the faster one that fits; if none fits, the one that needs less of the GPU."""
    node = with_drives("a100-40gb-epyc7713")
    profile = analytic_profile(FP16, replace(node, gpu=replace(node.gpu, memory_bytes=gpu_memory * 2**30)))
    judge, plans = judge_for(profile), {}
    for choice in ("best", "full", "none"):
        with suppress(InfeasibleError):
            plans[choice] = parse_policy(f"{policy}:checkpointing={choice}").plan(profile, judge)
    if len(plans) < 3:
        assert "best" not in plans
        return
    found = {choice: judge(plan) for choice, plan in plans.items()}
    fitting = [each for each in (found["full"], found["none"]) if each.verdict is Verdict.OK]
    if fitting:
        assert found["best"] == min(fitting, key=lambda each: each.seconds)
    else:
        assert found["best"].gpu_peak_bytes == min(found["full"].gpu_peak_bytes, found["none"].gpu_peak_bytes)


def test_stronghold_takes_the_faster_optimizer_of_its_window() -> None:
    """Without a choice the window is updated where that is faster: on the CPU for a large model, whose states crowd the GPU."""
    profile = analytic_profile(replace(named_workload("gpt-20b"), precision=Precision.FP16, kernels=Kernels.EAGER), NODE)
    judge = judge_for(profile)
    best, gpu, cpu = (
        judge(parse_policy(f"stronghold{flag}").plan(profile, judge)).seconds
        for flag in ("", ":window_optimizer=gpu", ":window_optimizer=cpu")
    )
    assert best == min(gpu, cpu) == cpu < gpu


def test_stronghold_keeps_all_blocks_where_they_fit_with_several_micro_batches() -> None:
    """A place in the window cannot hold the gradients' sum of a block that is away, but none has to be away."""
    several = Workload("small", 256, 4, 4, sequence_length=128, batch_size=2, micro_batches=2)
    profile = analytic_profile(several, NODE)
    plan = parse_policy("stronghold").plan(profile, judge_for(profile))
    assert all(unit.update.on is Processor.GPU and not unit.parameters.leaves for unit in plan.units[1:-1])


def test_stronghold_holds_16_bytes_a_parameter_in_fp32() -> None:
    """Parameter, gradient and both moments: 16 bytes on the host, no array rounded up, no second copy."""
    profile, plan = planned("stronghold:checkpointing=full,window=2,window_optimizer=cpu", Precision.FP32)
    host = sum(buffer.size_bytes for buffer in lower(profile, plan).resident if buffer.memory == "host")
    assert host == 16 * sum(block.parameters for block in profile.units)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_stronghold_replicated_has_a_buffer_for_gradients(precision: Precision) -> None:
    """Each of two processes holds as much as the only one, and gradients of what its CPU updates in pageable memory."""
    workload, host, expected = replace(FP16, precision=precision), [], 0
    for gpus, flag in ((1, ""), (2, ",replicated")):
        profile = analytic_profile(workload, NODE.shared_by(gpus))
        plan = parse_policy(f"stronghold:checkpointing=full,window=2,window_optimizer=gpu{flag}").plan(
            profile, judge_for(profile)
        )
        host.append(sum(buffer.size_bytes for buffer in lower(profile, plan).resident if buffer.memory == "host"))
        expected = profile.element_bytes * sum(unit.parameters for unit in profile.units[3:-1])
    assert host[1] - host[0] == expected > 0


def test_async_moves_of_patrickstar_hide_behind_a_pass() -> None:
    """With ``async_move`` a chunk moves beside the pass before its own, so the iteration is shorter, at the same work."""
    tight = replace(profile_of(), hardware=load_hardware("a100-40gb-epyc7713", {"gpu.memory": "14GiB"}))
    plain, moved = (
        simulate_plan(tight, parse_policy(f"patrickstar:checkpointing=full{flag}").plan(tight, judge_for(tight)))
        for flag in ("", ",async_move")
    )
    assert moved.iteration_seconds < 0.99 * plain.iteration_seconds
    assert work(moved, Kind.PREFETCH_FORWARD) == work(plain, Kind.PREFETCH_FORWARD) > 0


@pytest.mark.parametrize("gpus", [2, 4])
def test_patrickstar_on_several_gpus_keeps_the_first_chunks_and_fetches_the_others(gpus: int) -> None:
    """From two GPUs on, parameters are sharded; blocks that do not fit are fetched anew for each pass, and none moves out."""
    node = load_hardware("a100-40gb-epyc7713")
    kept = []
    for gpu_memory in (6, 8, 10, 12, 16):
        tight = replace(node, gpu=replace(node.gpu, memory_bytes=gpu_memory * 2**30)).shared_by(gpus)
        profile = analytic_profile(profile_of().workload, tight)
        plan = parse_policy("patrickstar:checkpointing=full,chunk_size=64").plan(profile, judge_for(profile))
        homes = [unit.parameters.home for unit in plan.units]
        kept.append(homes.count(GPU_MEMORY))
        assert homes == [GPU_MEMORY] * (kept[-1] - 1) + [HOST_MEMORY] * (len(homes) - kept[-1]) + [GPU_MEMORY]
        assert not any(unit.parameters.moves or unit.parameters.stays_after_forward for unit in plan.units)
        assert all(unit.zero_stage == 3 for unit in plan.units[1:-1])
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (2, len(homes))
    assert set(kept) - {2, len(homes)}


@pytest.mark.parametrize(
    ("flag", "least", "most"),
    [
        ("patrickstar:chunk_size", 1, 4096),
        ("patrickstar:gpu_share", 1, 100),
        ("zero3_offload:bucket_size", 1, 100_000),
        ("zero_offload:bucket_size", 1, 100_000),
    ],
)
def test_the_ends_of_a_range_belong_to_it(flag: str, least: int, most: int) -> None:
    """A flag takes the smallest and the largest value that its refusal names, and no other beyond them."""
    for value in (least, most):
        parse_policy(f"{flag}={value}")
    for value in (least - 1, most + 1):
        with pytest.raises(InputError, match=f"{flag}={value} must be between {least} and {most} "):
            parse_policy(f"{flag}={value}")


@pytest.mark.slow
def test_the_ancestor_of_autohete_sends_the_fp32_master_up() -> None:
    """``fp32_upload``: 4 bytes up, 2 down, an Adam of 26 bytes per parameter without casts, and no 16-bit copy on the host."""
    profile, plan = planned("autohete:fp32_upload")
    found = simulate_plan(profile, plan)
    on_cpu = [i for i, unit in enumerate(plan.units) if unit.update.on is Processor.CPU]
    updated = sum(profile.units[i].parameters for i in on_cpu)
    cpu = NODE.cpu
    assert work(found, Kind.CPU_UPDATE) == pytest.approx(updated * 26 / cpu.update_bandwidth, rel=1e-6)
    assert work(found, Kind.OFFLOAD_GRADIENTS) == pytest.approx(updated * 2 / NODE.d2h.bandwidth, rel=1e-3)
    fetched = {task.id.unit: task for task in found.schedule.tasks if task.id.kind is Kind.PREFETCH_FORWARD}
    assert fetched.keys() & set(on_cpu)
    assert fetched.keys() - set(on_cpu)
    for block, task in fetched.items():  # what the GPU updates has no fp32 master on the host
        size = profile.units[block].parameters * (4 if block in on_cpu else 2)
        assert task.duration_ns * 1e-9 == pytest.approx(size / NODE.h2d.bandwidth, rel=1e-3)
    with pytest.raises(InputError, match="choose one"):
        parse_policy("autohete:fp32_upload,fused_casts")


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.4, 0.73])
def test_the_cpu_works_at_its_concurrent_share_while_the_gpu_computes(share: float) -> None:
    """An update beside the GPU's passes takes 1 / share as long, the rest of it its own time, and the passes theirs."""
    resources = f"""autohete-schedule 2
lane gpu fifo
lane cpu fifo
flow gpu 1.0 {1 / share!r}
flow cpu 30000000000.0 30000000000.0
share cpu_beside_gpu {1 + share!r} gpu,cpu counts-lanes
task F0 gpu 1000000
task U0 cpu 2000000
task F1 gpu 5000000 after=U0
"""
    trace = SimExecutor().run(parse_schedule(resources), 1)
    assert trace.end_ns[0].tolist() == pytest.approx([1_000_000, 3_000_000 - share * 1_000_000, 8_000_000 - share * 1_000_000])
    node = replace(NODE, cpu=replace(NODE.cpu, concurrent_share=share))
    profile, plan = planned("autohete")
    lowered = lower(replace(profile, hardware=node), plan)
    assert set(map(str, lowered.flows)) >= {f"flow gpu 1.0 {1 / share!r}"}
    assert f"share cpu_beside_gpu {1 + share!r} gpu,cpu counts-lanes" in map(str, lowered.resources)


def test_bounds_know_what_the_gpu_takes_from_the_cpu() -> None:
    """Where the CPU is slower beside the GPU, no plan that updates there can be as fast, and the bound says so."""
    bounds = []
    for share in (1.0, 0.5):
        node = replace(NODE, cpu=replace(NODE.cpu, concurrent_share=share))
        found = simulate(replace(FP16, batch_size=8), node, parse_policy("autohete:gpu_updates=off"))
        assert found.plan.bound_seconds is not None
        assert found.plan.bound_seconds <= found.iteration_seconds
        bounds.append(found.plan.bound_seconds)
    assert bounds[1] > 1.01 * bounds[0]


def test_updates_in_backward_hold_the_gradients_of_one_unit() -> None:
    """The iteration takes as long, and of all gradients only those of the largest unit are there at a time."""
    untied = replace(FP16, tied_embeddings=False)
    flags = ("", ",in_backward")
    after, during = (simulate(untied, NODE, parse_policy(f"resident:checkpointing=full{flag}")) for flag in flags)
    assert during.iteration_seconds == pytest.approx(after.iteration_seconds, rel=1e-3)
    _, groups = contents(during.trace, GPU_MEMORY)
    sizes = [block.parameters * during.profile.element_bytes for block in during.profile.units]
    assert max(groups["gradients"]) == max(sizes)
    assert max(contents(after.trace, GPU_MEMORY)[1]["gradients"]) == sum(sizes)
    with pytest.raises(InputError, match="deepspeed updates all at once, not in_backward"):
        parse_policy("resident:zero_stage=2,deepspeed,in_backward")


def test_weights_that_are_masters_travel_with_the_states() -> None:
    """Without masters the GPU holds the weights of few blocks, and 6 bytes a parameter go up and come home for the update."""
    pure = replace(FP16, precision=Precision.BF16, micro_batches=2, training=Training(optimizer=Optimizer.ADAMW_PURE_BF16))
    found = simulate(pure, NODE, parse_policy("streamed_states:weights,inputs"))
    groups = contents(found.trace, GPU_MEMORY)[1]
    blocks = [unit.parameters for unit in found.profile.units[1:-1]]
    assert max(groups["parameters"] + groups["parameters_B"] + groups["parameters_F"]) < 2 * (
        4 * blocks[0] + 2 * found.profile.units[0].parameters
    )
    for kind, copy in ((Kind.FETCH_STATES, found.profile.h2d_seconds), (Kind.WRITE_BACK_STATES, found.profile.d2h_seconds)):
        assert work(found, kind) == pytest.approx(copy(6 * sum(blocks) + 4 * found.profile.units[0].parameters), rel=1e-2)
    assert found.host.peak_bytes >= 6 * sum(blocks)


@pytest.mark.parametrize(("in_place", "beside"), [(False, True), (True, False)])
def test_sums_in_place_leave_no_gradient_beside_them(in_place: bool, beside: bool) -> None:
    """With several micro-batches the GPU holds one gradient of every parameter, and no other if products add to the sums."""
    flag = ",fused_sums" if in_place else ""
    found = simulate(replace(FP16, micro_batches=3), NODE, parse_policy(f"resident:checkpointing=full{flag}"))
    whole = 2 * FP16.parameters
    assert bool(max(contents(found.trace, GPU_MEMORY)[1]["gradients"]) > whole) is beside
    with pytest.raises(InputError, match="fused_sums keeps sums of whole gradients"):
        parse_policy("resident:fused_sums,zero_stage=2")


def test_casts_on_a_thread_of_their_own_delay_no_update() -> None:
    """Deep Optimizer States' CPU updates take as long as unscaling, a search for infinite values in fp16 (4 + 3 bytes, 3, and 1
    for each ``any``) and CPUAdam, whatever is cast beside them.
    """
    found = simulate(FP16, NODE, parse_policy("deep_optimizer_states:stride=2"))
    profile, plan = found.profile, found.plan
    on_cpu = [i for i, unit in enumerate(plan.units) if unit.update.on is Processor.CPU]
    expected = sum(profile.cpu_update_seconds(i, 28, 8 + 12) for i in on_cpu)
    assert work(found, Kind.CPU_UPDATE) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("precision", "searched"), [(Precision.FP16, 12), (Precision.BF16, 0), (Precision.FP32, 0)])
def test_stage_3_searches_gradients_on_the_cpu_in_fp16_alone(precision: Precision, searched: int) -> None:
    """Besides unscaling and, in mixed precision, the cast; the temporaries of the search are larger than that of the cast."""
    cast = 0 if precision is Precision.FP32 else 6
    for policy in ("twin_flow:ratio=100", "zero3_offload:offload_param=off", "superoffload"):
        _, plan = planned(f"{policy}{',' if ':' in policy else ':'}checkpointing=none", precision)
        assert plan.elementwise_bytes == 8 + cast + searched + 8 * (policy == "superoffload")
    profile, plan = planned("twin_flow:checkpointing=none,ratio=100", precision)
    held = plan.footprint.host_buffer_bytes / sum(map(profile.part_of, range(len(profile.units))))
    assert held == 3 if searched else held < 1


@pytest.mark.parametrize(("size", "pinned"), [(0, 0), (1, 1), (2**30, 2**30), (2**30 + 1, 2**31), (40_000_000_000, 2**36)])
def test_pinned_memory_is_rounded_as_pytorch_rounds_it(size: int, pinned: int) -> None:
    """A pinned allocation takes the next power of two."""
    assert rounded_when_pinned(size) == pinned


def test_host_memory_counts_the_rounding() -> None:
    """A host that holds the bytes of all arrays, but not their rounding, is too small, and a policy that searches says so."""
    profile = analytic_profile(replace(named_workload("gpt-22b"), precision=Precision.FP16, kernels=Kernels.EAGER), NODE)
    judge = judge_for(profile)
    plan = parse_policy("autohete").plan(profile, judge)
    held = plan.footprint
    exact = sum(
        block.parameters * (held.host_optimizer_bytes + sum(held.host_pinned_bytes))
        for block, unit in zip(profile.units, plan.units, strict=True)
        if unit.update.on is Processor.CPU
    )
    offloaded = plan.offloaded_parameter_units * profile.units[1].parameters * held.host_parameter_bytes
    assert judge(plan).host_peak_bytes > (exact + offloaded) * 1.05
    small = replace(profile, hardware=replace(NODE, host=replace(NODE.host, memory_bytes=exact // 2)))
    with pytest.raises(InfeasibleError, match="host memory"):
        parse_policy("autohete").plan(small, judge_for(small))


@pytest.mark.parametrize("policy", ["zero_infinity:pipeline", "mlp_offload:cached=0"])
def test_drives_read_and_write_in_turns(policy: str) -> None:
    """A step takes as long as all that is read and then all that is written, even if both are asked for at once."""
    node = with_drives("a100-40gb-epyc7713")
    fast = replace(node, cpu=replace(node.cpu, update_bandwidth=1e15, elementwise_bandwidth=1e15))
    found = simulate(FP16, fast, parse_policy(f"{policy}"))
    drives = work(found, Kind.READ_STATES) + work(found, Kind.WRITE_STATES) + work(found, Kind.WRITE_GRADIENTS)
    assert found.iteration_seconds > 0.98 * drives
    both = Sharing(found.schedule).rates(["nvme_read", "nvme_write"])
    assert sum(both.values()) == FULL_RATE
    assert [Sharing(found.schedule).rates([lane])[lane] for lane in both] == [FULL_RATE, FULL_RATE]


def test_states_on_drives_need_drives() -> None:
    """Where there are none, or too small ones, the answer names what is short, and how much it would take."""
    summary, found = answer(profile_of(), parse_policy("zero_infinity"))
    assert (summary.verdict, found) == (Verdict.short_of("nvme"), None)
    assert "has no such place" in summary.explanation
    small = replace(NODE, places=(Place("nvme", 10**9, 1e9, 1e9, 0.0),))
    summary, found = answer(replace(profile_of(), hardware=small), parse_policy("zero_infinity"))
    assert summary.verdict is Verdict.short_of("nvme")
    assert re.search(r"of nvme memory, there are 953\.\d MiB", summary.explanation)
    needed = summary.places["nvme"].peak_bytes
    enough = replace(small, places=(Place("nvme", needed, 1e9, 1e9, 0.0),))
    summary, found = answer(replace(profile_of(), hardware=enough), parse_policy("zero_infinity"))
    assert summary.verdict is Verdict.OK
    assert found is not None
    assert found.plan.units[1].states.far


@given(st.data())
@settings(max_examples=30)
def test_what_surely_exceeds_the_gpu_does_not_fit(data: st.DataObject) -> None:
    """A plan is not too large for a GPU as large as its simulated peak, and too large for one smaller than what rests there."""
    several = strategies.profiles_of_several_gpus(max_micro_batches=2)
    profile = data.draw(st.one_of(strategies.profiles(max_micro_batches=2), several))
    plan = data.draw(strategies.plans(profile))
    try:
        found = simulate_plan(profile, plan)
    except (InfeasibleError, InputError):
        return
    reserved = profile.hardware.gpu.reserved_bytes
    assert not surely_exceeds_gpu(_with_gpu(profile, found.gpu.peak_bytes + reserved), plan)
    resting = sum(buffer.size_bytes for buffer in found.schedule.resident if buffer.memory == GPU_MEMORY)
    if resting > 1:
        assert surely_exceeds_gpu(_with_gpu(profile, resting - 1 + reserved), plan)


def _with_gpu(profile: Profile, memory_bytes: int) -> Profile:
    gpu = replace(profile.hardware.gpu, memory_bytes=memory_bytes)
    return replace(profile, hardware=replace(profile.hardware, gpu=gpu))


def test_deepspeed_casts_all_gradients_of_a_part_at_once() -> None:
    """On four GPUs with stage 2 the update needs 2 P of parameters, and 12 + 2 + 6 P / 4 of states, gradients and copies."""
    workload = replace(FP16, batch_size=1, sequence_length=128, tied_embeddings=False)
    profile = analytic_profile(workload, NODE.shared_by(4))
    found = [
        simulate_plan(
            profile, parse_policy(f"resident:checkpointing=full,zero_stage=2{more}").plan(profile, judge_for(profile))
        )
        for more in ("", ",deepspeed")
    ]
    plain, deepspeed = (one.gpu.peak_bytes for one in found)
    at_update = workload.parameters * (2 + (12 + 2 + 6) / 4)
    assert plain < at_update <= deepspeed < 1.03 * at_update  # the last gradients are still being reduced
    assert found[0].iteration_seconds < found[1].iteration_seconds  # it also copies and all-reduces them
    with pytest.raises(InputError, match="resident:deepspeed is for zero_stage 1, 2 and 3, not 0"):
        parse_policy("resident:deepspeed")


@pytest.mark.parametrize(
    ("policy", "gathers", "reduces", "rounds", "checks"),
    [
        ("resident:zero_stage=2", 0, 0, 1, 0),
        ("resident:zero_stage=2,deepspeed", 0, 3, 2, 0),
        ("resident:zero_stage=3", 1, 1, 1, 0),
        ("resident:zero_stage=3,fsdp1", 0, 1, 1, 0),
        ("resident:zero_stage=3,deepspeed", 1, 3, 1, 0),
        ("fsdp2_offload", 1, 1, 1, 0),
        ("zero_offload:deepspeed=0.8.3", 0, 3, 1, (2 + 8 + 8) + (2 + 4 + 4)),
        ("zero_offload", 0, 3, 2, (2 + 8 + 8) + (2 + 4) + (4 + 1) + (4 + 4 + 4 + 1) + 3 + (1 + 4 + 4)),
        ("zero_offload:paper=on", 0, 3, 1, 0),
        ("zero3_offload", 1, 3, 1, 2 + 8 + 8),
        ("deep_optimizer_states", 1, 3, 1, 2 + 8 + 8),
        ("stronghold", 0, 0, 1, 0),
    ],
)
def test_collectives_work_on_flat_buffers(policy: str, gathers: int, reduces: int, rounds: int, checks: int) -> None:
    """The GPU copies what it gathers, and what it reduces, so many times, each time reading and writing all of it. Checks of
    its part of complete gradients access so many bytes each.
    """
    workload = replace(FP16, tied_embeddings=False)
    alone, profile = (analytic_profile(workload, NODE.shared_by(gpus)) for gpus in (1, 4))
    plan = parse_policy(policy).plan(profile, judge_for(profile))
    tasks = {task.id: task.duration_ns for task in lower(profile, plan).tasks}
    unit, times = 2, alone.units[2]
    byte_ns = times.parameters / (NODE.gpu.memory_bandwidth * NODE.gpu.memory_efficiency) * 1e9
    copy_ns, checks_ns = 2 * 2 * byte_ns, checks * byte_ns / 4
    first = next(task for task in tasks if task.kind in (Kind.RECOMPUTE, Kind.BACKWARD) and task.unit == unit)
    recomputed = first.kind is Kind.RECOMPUTE
    passes = {
        TaskId(Kind.FORWARD, unit): times.forward_seconds * 1e9 + gathers * copy_ns,
        TaskId(Kind.BACKWARD, unit): times.backward_seconds * 1e9
        + (reduces + gathers * (not recomputed)) * copy_ns
        + checks_ns,
    }
    if recomputed:
        passes[first] = times.recompute_seconds * 1e9 + gathers * copy_ns
    assert {task: tasks[task] for task in passes} == pytest.approx(passes, rel=1e-3)
    reduction = rounds * profile.collective_seconds(2 * times.parameters) * 1e9
    assert tasks[TaskId(Kind.REDUCE_GRADIENTS, unit)] == pytest.approx(reduction, rel=1e-3)


@pytest.mark.parametrize("policy", ["zero_offload", "zero3_offload", "twin_flow:ratio=50", "superoffload"])
def test_the_runtime_has_no_kernels_of_a_system(policy: str) -> None:
    """What it executes of a system's plan works on gradients with its backward alone, and no gradient comes back."""
    name, _, flags = policy.partition(":")
    profile, plan = planned(f"{name}:checkpointing=none{',' * bool(flags)}{flags}")
    backwards, copies = (
        [
            {task.id: task.duration_ns for task in lower(profile, one).tasks if task.id.kind is kind}
            for one in (plan, replace(as_executed(plan, profile), hooks=Hooks()), everything_resident(profile))
        ]
        for kind in (Kind.BACKWARD, Kind.OFFLOAD_GRADIENTS)
    )
    assert all(seconds > backwards[2][task] for task, seconds in backwards[0].items())
    assert backwards[1] == backwards[2]
    assert all(seconds < copies[0][task] for task, seconds in copies[1].items())


@pytest.mark.parametrize("lora", [None, Lora(8)], ids=["full", "adapters"])
def test_fsdp1_holds_inputs_beside_adapters(lora: Lora | None) -> None:
    """With reentrant checkpoints around FSDP1, the backward of the first block begins with the inputs of all
    blocks and the gradients of all others; in full fine-tuning with the one input and gradient that it needs.
    """
    workload = replace(FP16, tied_embeddings=False, training=Training(lora))
    profile = analytic_profile(workload, replace(NODE, gpus=4))
    policy = parse_policy("resident:checkpointing=full,zero_stage=3,fsdp1,reentrant")
    schedule = lower(profile, policy.plan(profile, judge_for(profile)))
    alive: dict[BufferId, int] = {}
    for task in schedule.tasks:
        if task.id == TaskId(Kind.BACKWARD, 1):
            break
        alive |= {one.id: one.size_bytes for one in task.allocates if one.id.value in (Value.INPUT, Value.INPUT_GRADIENT)}
        for one in task.frees:
            alive.pop(one.id, None)
    blocks = len(profile.units) - 2
    assert sum(alive.values()) == profile.units[1].input_bytes * (2 * blocks - 1 if lora else 2)


@pytest.mark.parametrize(
    "policy",
    [
        "resident:fsdp1",
        "resident:zero_stage=3,fsdp1,deepspeed",
        "resident:checkpointing=full,zero_stage=3,reentrant",
        "resident:checkpointing=none,zero_stage=3,fsdp1,reentrant",
        "resident:zero_stage=3,fsdp1,reentrant",
        "resident:zero_stage=1,no_sync",
        "resident:zero_stage=3,deepspeed,no_sync",
    ],
)
def test_a_system_shards_its_own_way(policy: str) -> None:
    """FSDP1 shards parameters, is not DeepSpeed, and is what reentrant checkpoints may be around; only FSDP has no_sync."""
    with pytest.raises(InputError, match=r"resident:(fsdp1|reentrant|no_sync)"):
        parse_policy(policy)


@pytest.mark.parametrize("hardware", [NODE, with_drives(NODE.name), replace(NODE, gpus=4)], ids=["one", "drives", "four"])
def test_a_search_space_has_each_choice_once_and_none_without_effect(hardware: Hardware) -> None:
    """Names of variants differ and parse back to themselves, defaults first; places and shards appear where there are any."""
    profile = analytic_profile(FP16, hardware)
    for policy in POLICIES:
        names = search_space(policy, profile)
        systems = [parse_policy(name).system for name in names]
        assert names[0] == policy
        assert len({str(system) for system in systems}) == len(names)
        assert all(search_space(name, profile) == (name,) for name in names[1:])
        sharded = [name for name in names if "zero_stage" in name or "reduce_scatter" in name or "replicated" in name]
        assert hardware.gpus > 1 or not sharded
    spaces = {name: search_space(name, profile) for name in ("zero_infinity", "resident")}
    assert ("zero_infinity:pipeline,offload_param" in spaces["zero_infinity"]) == bool(hardware.places)
    assert ("resident:zero_stage=3" in spaces["resident"]) == (hardware.gpus > 1)


# --- Transformer Engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu_bytes", "layers"), [(416, 0), (415, 1), (376, 1), (375, 2), (344, 2), (343, 2)])
def test_transformer_engine_offloads_the_fewest_layers_that_fit(gpu_bytes: int, layers: int) -> None:
    """Each layer of the paper's model that leaves frees 40 or 32 bytes at the peak; the last one always stays."""
    profile = profile_with(gpu_bytes, 1)
    plan = parse_policy("te_offload").plan(profile, judge_for(profile))
    assert [unit.kept.leaves for unit in plan.units[1:-1]] == [True] * layers + [False] * (3 - layers)


def test_transformer_engine_keeps_the_last_layer() -> None:
    """Of as many layers as there are, or more, the last one stays."""
    profile = profile_with(1000, 1)
    plans = [parse_policy(f"te_offload:layers={layers}").plan(profile, judge_for(profile)) for layers in (2, 3, 100)]
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize("layers", [1, 3])
def test_transformer_engine_offloads_whole_blocks(layers: int) -> None:
    """Where sublayers are units, both of a layer leave, and the passes of both are counted."""
    workload = named_workload("gpt-2b", transformer_blocks=4, units=Units.SUBLAYER)
    profile = analytic_profile(workload, load_hardware("a100-40gb-epyc7543p"))
    plan = parse_policy(f"te_offload:layers={layers}").plan(profile, judge_for(profile))
    assert [unit.kept.leaves for unit in plan.units[1:-1]] == [True] * 2 * layers + [False] * 2 * (4 - layers)
    assert {unit.kept.ahead for unit in plan.units if unit.kept.leaves} == {2 * (3 - layers)}
    assert BlockingCopies(Kind.OFFLOAD_ACTIVATIONS, overlapped=2 * (3 - layers)) in plan.rules
    assert simulate_plan(profile, plan).verdict is Verdict.OK


# --- FlashNeuron --------------------------------------------------------------------------------------------------


def test_flashneuron_sends_tensors_in_the_order_of_forward() -> None:
    """What leaves is a prefix of what forward saves, just enough for 0.6 of the free memory to hold the rest."""
    profile = profile_with(496, 1, selective=True)  # 240 of it are free without the 200 bytes that forward saves
    plan = parse_policy("flashneuron").plan(profile, judge_for(profile))
    first, second = plan.units[1:3]
    assert (first.kept.home, first.saved) == ("nvme", ())
    assert (second.kept.home, [one.name for one in second.saved]) == ("nvme", ["norm"])  # 40 + 4 + 16 exceed 56
    assert not plan.units[3].activations_leave


def test_flashneuron_has_a_place_besides_the_gpu() -> None:
    """Tensors may rest on the host or in a place of the hardware, but not where they come from."""
    profile = profile_with(400, 1)
    assert parse_policy("flashneuron:place=host").plan(profile, judge_for(profile)).units[1].kept.home == "host"
    with pytest.raises(InputError, match="flashneuron:place=gpu is where tensors come from"):
        parse_policy("flashneuron:place=gpu")


def test_joint_plans_where_a_system_lacks_its_place() -> None:
    """Saved tensors that would rest in a place that the hardware does not have fit nowhere; joint goes on with the others."""
    profile = profile_with(400, 1)
    profile = replace(profile, hardware=replace(profile.hardware, places=()))
    plan = parse_policy("flashneuron").plan(profile, OptimisticJudge(profile, math.inf))
    assert OptimisticJudge(profile, math.inf)(plan).verdict == "nvme-out-of-memory"
    assert judge_for(profile)(parse_policy("joint").plan(profile, judge_for(profile))).verdict is Verdict.OK


# --- SuperNeurons -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpu_bytes", "leaving"), [(356, 0), (355, 1), (348, 1)])
def test_superneurons_sends_the_oldest_kept_outputs_that_do_not_fit(gpu_bytes: int, leaving: int) -> None:
    """Cheap tensors are always made again; of what is kept the first blocks' goes to the host, no more than has to."""
    profile = profile_with(gpu_bytes, 1, selective=True)
    plan = parse_policy("superneurons").plan(profile, judge_for(profile))
    assert [unit.activations_leave for unit in plan.units[1:-1]] == [True] * leaving + [False] * (3 - leaving)
    assert all([(one.name, one.recomputed) for one in unit.saved] == [("norm", True)] for unit in plan.units[1:-1])
    everything = parse_policy("superneurons:cache=off").plan(profile, judge_for(profile))
    assert all(unit.activations_leave for unit in everything.units[1:-1])


# --- POFO ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_pofo_takes_less_than_a_fifth_more_time_with_a_quarter_of_the_activations() -> None:
    """As in the abstract, which names no machine; and in between what nothing and everything recomputed take."""
    workload = Workload("deep", 1024, 48, 16, 1000, 512, 64, precision=Precision.FP16)
    profile = analytic_profile(workload, load_hardware("v100-32gb-12vcpu"))
    plenty = with_memory(profile, GPU_MEMORY, 10**13)
    resident, judge = parse_policy("resident:checkpointing=none"), judge_for(plenty)
    whole = judge(resident.plan(plenty, judge))
    there = sum(profile.state_bytes(unit) + profile.parameter_bytes(unit) for unit in range(len(profile.units)))
    usable = there + (whole.gpu_peak_bytes - there) // 4
    tight = with_memory(profile, GPU_MEMORY, usable + profile.hardware.gpu.reserved_bytes)
    judge = judge_for(tight)
    pofo, rotor = (judge(parse_policy(name).plan(tight, judge)) for name in ("pofo", "rotor"))
    assert pofo.verdict is rotor.verdict is Verdict.OK
    assert round(pofo.seconds / whole.seconds, 3) == 1.19
    assert round(rotor.seconds / whole.seconds, 3) == 1.228
