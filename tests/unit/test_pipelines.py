"""Pipelines: units that single ranks compute, in the order of GPipe and of one forward and one backward in turns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paper import profile_with

from autohete.analysis.usage import Cause, usage
from autohete.answer.policies import Judged, ranked
from autohete.errors import InputError
from autohete.execution.trace import check_trace
from autohete.hardware import Interconnect, load_hardware
from autohete.lowering import lower
from autohete.plan import Activations, PassOrder, Plan, Processor, Route, UnitPlan, Update
from autohete.plan.policy import Verdict
from autohete.planner.optimistic import OptimisticJudge, lower_bytes
from autohete.policies import parse_policy, search_space
from autohete.policies.pipeline import even_stages
from autohete.profile import LossProfile, Profile, analytic_profile
from autohete.schedule import GPU_MEMORY, TRANSFERS, Kind, Schedule, Task, TaskId, Value, is_gpu, parse_schedule, validate
from autohete.sim import SimExecutor
from autohete.simulate import judge_for, simulate_plan, simulate_policy
from autohete.testing import checks, strategies
from autohete.testing.checks import Paths
from autohete.testing.list_scheduler import list_schedule
from autohete.workload import BlockRole, Workload, named_workload

PLENTY = 2**40
NODE = load_hardware("a100-40gb-epyc7543p")
#: Of five units, ranks 0 and 1 compute two and three.
RANKS = (0, 0, 1, 1, 1)


def plan_of(*units: UnitPlan, order: PassOrder = PassOrder.ONE_FORWARD_ONE_BACKWARD) -> Plan:
    """A plan of units that are on the ranks above."""
    return Plan("by hand", tuple(replace(unit, rank=rank) for unit, rank in zip(units, RANKS, strict=True)), pass_order=order)


def starts(schedule: Schedule, lane: str) -> dict[str, int]:
    """When the tasks of a lane start in the first iteration, in ns."""
    trace = SimExecutor().run(schedule, 2)
    return {str(schedule.tasks[i].id._replace(rank=0)): int(trace.start_ns[0, i]) for i in schedule.tasks_of(lane)}


def test_gpipe_on_paper() -> None:
    """All forwards, then all backwards.

    Stage 0 takes 2 + 6 ns forward and 12 + 4 back, stage 1 6 + 6 + 3 and a loss of 1, and 6 + 12 + 12 back; a transfer of 4
    bytes takes 1. Stage 1 begins at 2 + 6 + 1 = 9, has 3 (16 + 30) ns of passes, and updates of the head (2) and a block (4)
    before its last backward ends: at 153. Then follow 1 + 12 + 4 + 4 + 2, in all 176 ns.
    """
    plan, profile = plan_of(*[UnitPlan()] * 5, order=PassOrder.ALL_FORWARDS_FIRST), profile_with(PLENTY, 3, gpus=2)
    schedule = validate(lower(profile, plan))
    assert starts(schedule, "gpu") == {
        "F0": 0, "F1": 2, "F0m1": 8, "F1m1": 10, "F0m2": 16, "F1m2": 18,
        "B1": 88, "B0": 100, "B1m1": 118, "B0m1": 130, "B1m2": 154, "W1": 166, "B0m2": 170, "W0": 174,
    }  # fmt: skip
    assert starts(schedule, "gpu.1") == {
        "F2": 9, "F3": 15, "F4": 21, "L4": 24, "F2m1": 25, "F3m1": 31, "F4m1": 37, "L4m1": 40,
        "F2m2": 41, "F3m2": 47, "F4m2": 53, "L4m2": 56, "B4": 57, "B3": 63, "B2": 75, "B4m1": 87, "B3m1": 93, "B2m1": 105,
        "B4m2": 117, "W4": 123, "B3m2": 125, "W3": 137, "B2m2": 141, "W2": 153,
    }  # fmt: skip
    assert starts(schedule, "send") == {"XF2": 8, "XF2m1": 16, "XF2m2": 24}
    assert starts(schedule, "send.1") == {"XB2": 87, "XB2m1": 117, "XB2m2": 153}
    found = simulate_plan(profile, plan)
    assert found.iteration_seconds == pytest.approx(176e-9)
    # Rank 0 at the first backward: parameters and states of 6, 12 bytes each; three micro-batches of 40 + 36 of activations and
    # 4 of an input; gradients of a block; an arrived gradient, the one below it; 8 of workspace. Rank 1 at its first: 10
    # parameters; three times 3 x 36 + 3 x 4 + 4 of logits' gradients; gradients of the head, the gradient below it; workspace.
    peaks = {one.memory: one.peak_bytes for one in found.memories}
    assert peaks["gpu"] == 6 * 12 + 3 * (76 + 4) + 16 + 4 + 4 + 8
    assert peaks["gpu.1"] == 10 * 12 + 3 * (108 + 12 + 4) + 8 + 4 + 8


def test_one_forward_one_backward_on_paper() -> None:
    """Stage 0 begins with two forwards, stage 1 with one, then each has a backward and a forward in turns.

    The period is that of GPipe, 9 + 3 (16 + 30) + 6 + 1 + 22 = 176 ns, since stage 1 is never idle in either; but fewer
    micro-batches are under way.
    """
    plan, profile = plan_of(*[UnitPlan()] * 5), profile_with(PLENTY, 3, gpus=2)
    schedule = validate(lower(profile, plan))
    assert starts(schedule, "gpu") == {
        "F0": 0, "F1": 2, "F0m1": 8, "F1m1": 10, "B1": 56, "B0": 68, "F0m2": 72, "F1m2": 74,
        "B1m1": 102, "B0m1": 114, "B1m2": 154, "W1": 166, "B0m2": 170, "W0": 174,
    }  # fmt: skip
    assert starts(schedule, "gpu.1") == {
        "F2": 9, "F3": 15, "F4": 21, "L4": 24, "B4": 25, "B3": 31, "B2": 43,
        "F2m1": 55, "F3m1": 61, "F4m1": 67, "L4m1": 70, "B4m1": 71, "B3m1": 77, "B2m1": 89,
        "F2m2": 101, "F3m2": 107, "F4m2": 113, "L4m2": 116,
        "B4m2": 117, "W4": 123, "B3m2": 125, "W3": 137, "B2m2": 141, "W2": 153,
    }  # fmt: skip
    assert starts(schedule, "send") == {"XF2": 8, "XF2m1": 16, "XF2m2": 80}
    assert starts(schedule, "send.1") == {"XB2": 55, "XB2m1": 101, "XB2m2": 153}
    found = simulate_plan(profile, plan)
    assert found.iteration_seconds == pytest.approx(176e-9)
    # Rank 0 at the second backward of its block: two micro-batches; sums of block and embedding, and what is added to them.
    # Rank 1 at the second of the head: one micro-batch; sums of all three units, and what is added.
    peaks = {one.memory: one.peak_bytes for one in found.memories}
    assert peaks["gpu"] == 6 * 12 + 2 * (76 + 4) + (16 + 8) + 16 + 4 + 4 + 8
    assert peaks["gpu.1"] == 10 * 12 + (108 + 12 + 4) + (16 + 16 + 8) + 8 + 4 + 8
    assert found.gpu.memory == "gpu.1"


def even(stages: int, micro_batches: int, ranks: int | None = None) -> tuple[Profile, Plan]:
    """Stages that take 10 ns forward and 20 back, dealt to as many ranks or fewer; transfers and updates take no time."""
    ranks = ranks or stages
    profile = profile_with(PLENTY, micro_batches)
    block = replace(
        profile.units[1], role=BlockRole.TRANSFORMER, forward_seconds=10e-9, backward_seconds=20e-9, gpu_update_seconds=0.0
    )
    join = Interconnect(ranks, 1e18, 0.0)
    hardware = replace(profile.hardware, interconnect=join).shared_by(ranks)
    workload = replace(profile.workload, transformer_blocks=stages - 2)
    units = (replace(block, role=BlockRole.EMBEDDING), *[block] * (stages - 2), replace(block, role=BlockRole.HEAD))
    profile = Profile(workload, hardware, units, LossProfile(0.0, 4, 8))
    return profile, Plan("even", tuple(UnitPlan(rank=stage % ranks) for stage in range(stages)))


@pytest.mark.parametrize("order", PassOrder)
@pytest.mark.parametrize(("stages", "micro_batches"), [(3, 1), (3, 4), (4, 8), (5, 3)])
def test_even_stages_have_the_bubble_of_the_papers(stages: int, micro_batches: int, order: PassOrder) -> None:
    """With S even stages and M micro-batches an iteration takes M + S - 1 times a stage's passes (GPipe, section 2.2); the
    first stage holds M micro-batches under GPipe, and min(M, S) in the other order.
    """
    profile, plan = even(stages, micro_batches)
    found = simulate_plan(profile, replace(plan, pass_order=order))
    assert found.iteration_seconds == pytest.approx((micro_batches + stages - 1) * 30e-9)
    held = {
        m
        for m in range(micro_batches)
        if starts(found.schedule, "gpu")[str(TaskId(Kind.FORWARD, 0, m))] < first_back(found.schedule)
    }
    assert len(held) == (micro_batches if order is PassOrder.ALL_FORWARDS_FIRST else min(micro_batches, stages))


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 3))
@settings(deadline=None, max_examples=25)
def test_interleaved_stages_divide_the_bubble(ranks: int, chunks: int, groups: int) -> None:
    """With p ranks of v even stages and m micro-batches an iteration takes 1 + (p - 1) / (v m) times the work of a rank (arXiv
    2104.04473, section 2.2), and a rank keeps at most one micro-batch of a stage more than it fills the pipeline with
    (Megatron's ``max_outstanding_backprops``).
    """
    micro_batches = ranks * groups
    profile, plan = even(ranks * chunks, micro_batches, ranks)
    found = simulate_plan(profile, plan)
    work = micro_batches * chunks * 30e-9
    assert found.iteration_seconds == pytest.approx(work * (1 + (ranks - 1) / (chunks * micro_batches)))
    for rank in range(ranks):
        order = [task for task in found.schedule.tasks if task.lane == ("gpu" if not rank else f"gpu.{rank}")]
        passes = [task.id.kind for task in order if task.id.kind in (Kind.FORWARD, Kind.BACKWARD)]
        kept = [passes[: i + 1].count(Kind.FORWARD) - passes[:i].count(Kind.BACKWARD) for i in range(len(passes))]
        filled = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, micro_batches * chunks)
        assert max(kept) == min(filled + 1, micro_batches * chunks)


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 3))
@settings(deadline=None, max_examples=25)
def test_interleaved_passes_are_in_the_order_of_megatron(ranks: int, chunks: int, groups: int) -> None:
    """The stage and the micro-batch of each pass are those of its index in Megatron's formula (arXiv 2104.04473's code:
    ``get_model_chunk_id`` before there was a table).
    """
    micro_batches = ranks * groups
    profile, plan = even(ranks * chunks, micro_batches, ranks)
    schedule, total = lower(profile, plan), micro_batches * chunks

    def named(k: int, rank: int, kind: Kind) -> TaskId:
        chunk = k % (ranks * chunks) // ranks
        if kind is Kind.BACKWARD:
            chunk = chunks - 1 - chunk
        return TaskId(kind, chunk * ranks + rank, k // (ranks * chunks) * ranks + k % ranks, rank)

    for rank in range(ranks):
        filled = min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, total)
        expected = [named(k, rank, Kind.FORWARD) for k in range(filled)]
        for k in range(total - filled):
            expected += [named(filled + k, rank, Kind.FORWARD), named(k, rank, Kind.BACKWARD)]
        expected += [named(k, rank, Kind.BACKWARD) for k in range(total - filled, total)]
        kinds = (Kind.FORWARD, Kind.BACKWARD)
        assert [task.id for task in schedule.tasks if task.id.rank == rank and task.id.kind in kinds] == expected


def test_all_forwards_first_with_several_stages_is_breadth_first() -> None:
    """All micro-batches pass through a stage before the rank's next one, whatever the number of stages."""
    profile, plan = even(3, 2, 2)
    schedule = validate(lower(profile, replace(plan, pass_order=PassOrder.ALL_FORWARDS_FIRST)))
    lanes = {lane: [str(task._replace(rank=0)) for task in passes_on(schedule, lane)] for lane in ("gpu", "gpu.1")}
    assert lanes["gpu"] == ["F0", "F0m1", "F2", "L2", "F2m1", "L2m1", "B2", "B2m1", "B0", "B0m1"]
    assert lanes["gpu.1"] == ["F1", "F1m1", "B1", "B1m1"]


def passes_on(schedule: Schedule, lane: str) -> list[TaskId]:
    """The passes of a lane, in order."""
    return [task.id for task in schedule.tasks if task.lane == lane and task.id.kind is not Kind.GPU_UPDATE]


def first_back(schedule: Schedule) -> int:
    """When the first stage's first backward starts."""
    return starts(schedule, "gpu")["B0"]


@pytest.mark.slow
@settings(max_examples=100)
@given(st.data())
def test_any_pipeline_does_the_work_of_the_plan(data: st.DataObject) -> None:
    """Dealt to any ranks, one stage or several to each, in either order, in one pipeline or two side by side, any plan makes
    the same tasks, with one transfer each way at each border and a sum of norms; two executors agree on it; and the ranks
    together hold what one GPU would, and besides what has arrived.
    """
    drawn = data.draw(strategies.profiles(max_micro_batches=4))
    drawn = replace(
        drawn,
        workload=replace(drawn.workload, tied_embeddings=False),
        hardware=replace(drawn.hardware, shared_cores=None, interconnect=Interconnect(8, 1e11, 1e-6, 1e9, 1e-5)),
    )
    ranks = data.draw(st.integers(1, min(3, len(drawn.units))))
    apart = data.draw(st.integers(1, 2))
    profile = replace(drawn, hardware=drawn.hardware.shared_by(ranks * apart))
    alone = replace(profile, hardware=replace(profile.hardware, gpus=apart))
    plan = replace(data.draw(strategies.plans(alone)), slots=None, delayed=False, rules=())
    plan = replace(plan, units=tuple(replace(unit, zero_stage=int(unit.zero_stage in (1, 2))) for unit in plan.units))
    most = 1 if ranks == 1 else len(plan.units)
    stages = data.draw(st.integers(ranks, most))
    borders = sorted(data.draw(st.sets(st.integers(1, len(plan.units) - 1), min_size=stages - 1, max_size=stages - 1)))
    of = [sum(unit >= border for border in borders) % ranks for unit in range(len(plan.units))]
    in_turns = stages == ranks or not (stages % ranks or profile.workload.micro_batches % ranks)
    orders = [order for order in PassOrder if in_turns or order is PassOrder.ALL_FORWARDS_FIRST]
    stay = plan.units if profile.workload.micro_batches == 1 else map(never_staying, plan.units)
    plan = replace(plan, units=tuple(stay))
    units = [replace(unit, rank=rank) for unit, rank in zip(plan.units, of, strict=True)]
    for border in borders:
        if units[border].activations is Activations.DROP:
            return
    pipeline = replace(plan, units=tuple(units), pass_order=data.draw(st.sampled_from(orders)))
    schedule, whole = validate(lower(profile, pipeline)), lower(alone, plan)
    assert parse_schedule(str(schedule)) == schedule
    made = Counter(
        (task.id.kind, task.id.unit, task.id.micro_batch, task.id.again, task.duration_ns) for task in of_units(schedule)
    )
    expected = Counter(
        (task.id.kind, task.id.unit, task.id.micro_batch, task.id.again, task.duration_ns) for task in of_units(whole)
    )
    transfers = made - expected
    sums = [task for task in schedule.tasks if task.id.kind is Kind.SUM_NORMS]
    assert len(sums) == (ranks > 1 and profile.workload.clips)
    assert expected - made == Counter()
    back = sum(border > profile.first_trained for border in borders)
    assert sum(transfers.values()) == profile.workload.micro_batches * (len(borders) + back)
    assert {kind for kind, *_ in transfers} <= set(TRANSFERS)
    assert list(border_faults(schedule, borders, ranks, profile.first_trained)) == []
    trace = SimExecutor().run(schedule, 4)
    assert check_trace(trace) == []
    again = list_schedule(schedule, 4)
    assert (trace.start_ns == again.start_ns).all()
    arrived = buffers_of_units(schedule) - buffers_of_units(whole)
    assert buffers_of_units(whole) - buffers_of_units(schedule) == Counter()
    assert {(value, unit) for value, unit, *_ in arrived} <= set(product((Value.INPUT, Value.INPUT_GRADIENT), borders))
    assert sum(arrived.values()) == sum(transfers.values())


def of_units(schedule: Schedule) -> list[Task]:
    """All tasks but those of the clip coefficient, which each rank has."""
    return [task for task in schedule.tasks if task.id.kind not in (Kind.CLIP, Kind.SUM_NORMS)]


def buffers_of_units(schedule: Schedule) -> Counter[tuple[object, ...]]:
    """The buffers of units, resident or not, wherever they are, with their sizes."""
    every = [*schedule.resident, *(buffer for task in schedule.tasks for buffer in task.allocates)]
    return Counter(
        (b.id.value, b.id.unit, b.id.micro_batch, b.id.use, b.id.again, b.size_bytes) for b in every if b.id.unit is not None
    )


def border_faults(schedule: Schedule, borders: list[int], ranks: int, first_trained: int) -> Iterator[str]:
    """Passes at the borders of stages that may run without what they need from the other side."""
    paths = Paths(schedule)
    for stage, unit in enumerate(borders):
        low, high = stage % ranks, (stage + 1) % ranks
        for m in range(schedule.micro_batches):
            send, back = TaskId(Kind.SEND_INPUT, unit, m, low), TaskId(Kind.SEND_INPUT_GRADIENT, unit, m, high)
            below, above = TaskId(Kind.FORWARD, unit - 1, m, low), TaskId(Kind.FORWARD, unit, m, high)
            yield from checks.chain_faults(paths, (below, 0), (send, 0), (above, 0))
            if unit > first_trained:
                above, below = (task._replace(kind=Kind.BACKWARD) for task in (above, below))
                yield from checks.chain_faults(paths, (above, 0), (back, 0), (below, 0))


def never_staying(unit: UnitPlan) -> UnitPlan:
    """The unit with parameters that leave after each pass, if they do."""
    return replace(unit, parameters=replace(unit.parameters, stays_after_forward=False, stays_after_backward=False))


def test_a_tied_matrix_is_on_both_ranks() -> None:
    """Embedding and head have a copy each, with states; both wait for the sum of its gradients, and the head's update is that
    of its own parameters and of the matrix.
    """
    profile = profile_with(PLENTY, 2, gpus=2)
    plan = plan_of(*[UnitPlan()] * 5)
    tied = replace(profile, workload=replace(profile.workload, tied_embeddings=True))
    schedule, untied = validate(lower(tied, plan)), lower(profile, plan)
    sizes, before = ({str(b.id): b.size_bytes for b in one.resident} for one in (schedule, untied))
    # The matrix has one of the embedding's two parameters: 4 bytes, 8 of states, half of the update's 2 ns.
    assert {name: size - before[name] for name, size in sizes.items() if size != before[name]} == {
        "parameters.4r1:gpu.1": 4, "optimizer_states.4r1:gpu.1": 8,
    }  # fmt: skip
    times = {str(task.id): task.duration_ns for task in schedule.tasks}
    assert (times["XT0"], times["W4r1"], times["W0"]) == (1, 2 + 1, 2)
    paths, both = Paths(schedule), TaskId(Kind.SUM_TIED_GRADIENTS, 0)
    for rank, unit in ((0, 0), (1, 4)):
        backward, update = TaskId(Kind.BACKWARD, unit, 1, rank), TaskId(Kind.GPU_UPDATE, unit, 0, rank)
        assert list(checks.chain_faults(paths, (backward, 0), (both, 0), (update, 0))) == []
    alone = lower(tied, Plan("one", tuple(replace(unit, rank=0) for unit in plan.units)))
    assert not any(task.id.kind is Kind.SUM_TIED_GRADIENTS for task in alone.tasks)


def test_sums_in_fp32_are_held_and_reduced() -> None:
    """Each rank holds four bytes for each parameter and no other gradient; reductions and norms are of as many bytes."""
    workload = Workload("small", 256, 8, 4, 1000, sequence_length=64, batch_size=2, micro_batches=4, clip_norm=1.0)
    profile = analytic_profile(workload, NODE.shared_by(4))
    found = []
    for flag in ("", ",fp32_sums"):
        plan = parse_policy(f"pipeline:ranks=2,checkpointing=none{flag}").plan(profile, judge_for(profile))
        found.append((plan, validate(lower(profile, plan))))
    (_, bf16), (plan, fp32) = found
    held = {b.id.unit: b.size_bytes for b in fp32.resident if b.id.value is Value.POLICY_BUFFERS}
    assert {unit: held[unit] for unit in range(1, 9)} == {unit: 4 * profile.units[unit].parameters for unit in range(1, 9)}
    made = [b for task in fp32.tasks for b in task.allocates if b.id.value is Value.GRADIENTS]
    assert not any(b.size_bytes for b in made)
    for kind in (Kind.REDUCE_GRADIENTS, Kind.GRADIENT_NORM):
        before, after = (sum(t.duration_ns for t in one.tasks if t.id.kind is kind) for one in (bf16, fp32))
        assert before < after <= 2 * before + len(fp32.tasks)
    with pytest.raises(InputError, match="sums_in_fp32 is for pipelines"):
        replace(plan, units=tuple(replace(unit, rank=None) for unit in plan.units))


def test_all_ranks_clip_by_the_same_norm() -> None:
    """No rank scales a gradient before the norms of all are summed up."""
    schedule = validate(lower(profile_with(PLENTY, 2, gpus=2, clip_norm=1.0), plan_of(*[UnitPlan()] * 5)))
    paths, total = Paths(schedule), TaskId(Kind.SUM_NORMS, 0)
    for unit, rank in enumerate(RANKS):
        norm, update = TaskId(Kind.GRADIENT_NORM, unit, 0, rank), TaskId(Kind.GPU_UPDATE, unit, 0, rank)
        for any_rank in (0, 1):
            clip = TaskId(Kind.CLIP, 0, 0, any_rank)
            assert list(checks.chain_faults(paths, (norm, 0), (total, 0), (clip, 0))) == []
        assert list(checks.chain_faults(paths, (total, 0), (TaskId(Kind.CLIP, 0, 0, rank), 0), (update, 0))) == []


@pytest.mark.parametrize(("ranks", "zero_stage"), [(2, 0), (2, 1), (4, 1), (1, 0)])
def test_pipelines_side_by_side_reduce_among_neighbours(ranks: int, zero_stage: int) -> None:
    """Eight GPUs on nodes of four are pipelines of so many ranks. GPUs with the same units are neighbours: they reduce within a
    node if it has all of them, and a transfer goes through the network where the next rank's are on another node.
    """
    profile, plan = even(4, 4, ranks)
    join = Interconnect(4, 1e9, 0.0, network_bandwidth=1e8, network_latency_seconds=3e-9)
    hardware = replace(profile.hardware, gpus=1, interconnect=join).shared_by(8)
    profile = replace(profile, hardware=hardware)
    units = tuple(replace(unit, zero_stage=zero_stage) for unit in plan.units)
    schedule = validate(lower(profile, replace(plan, units=units)))
    apart = 8 // ranks
    assert plan.batches(8) == apart
    times = {(task.id.kind, task.id.unit, task.id.rank): (task.duration_ns, task.lane) for task in schedule.tasks}
    steps, rate = (1 if zero_stage else 2) * (apart - 1) / apart, 0.1 if apart > 4 else 1.0
    for unit in range(4):
        size, rank = profile.units[unit].parameters * 4, unit % ranks
        network = 3 * (apart > 4) * (1 if zero_stage else 2)
        lane = f"collective.{rank}" if rank else "collective"
        assert times[Kind.REDUCE_GRADIENTS, unit, rank] == (round(steps * size / rate + network), lane)
    for unit in range(1, 4) if ranks > 1 else ():
        sender, receiver = (unit - 1) % ranks * apart, unit % ranks * apart
        expected = 4 if sender // 4 == receiver // 4 else 43
        assert times[Kind.SEND_INPUT, unit, (unit - 1) % ranks][0] == expected
    hosts = {memory.name for memory in schedule.memories if memory.name.startswith("host")}
    assert hosts == ({"host", "host.1"} if ranks > 1 else {"host"})


def test_a_pipeline_beside_others_takes_as_long_as_alone_if_reductions_take_no_time() -> None:
    """Pipelines side by side do not disturb each other: symmetric ones are simulated once."""
    profile, plan = even(8, 8, 4)
    alone = simulate_plan(profile, plan)
    join = Interconnect(16, 1e18, 0.0)
    several = replace(profile, hardware=replace(profile.hardware, gpus=1, interconnect=join).shared_by(16))
    beside = simulate_plan(several, plan)
    assert beside.iteration_seconds == pytest.approx(alone.iteration_seconds)
    assert beside.tokens_per_second == pytest.approx(4 * alone.tokens_per_second)


def test_gpus_that_are_no_whole_pipelines_are_refused() -> None:
    """Ranks divide the GPUs; neighbours fill nodes, or nodes are filled by whole groups of them."""
    profile, plan = even(4, 2, 2)
    join = Interconnect(4, 1e9, 0.0, network_bandwidth=1e8)
    node = replace(profile.hardware, gpus=1, interconnect=join)
    with pytest.raises(InputError, match="on 2 ranks, but 12 GPUs train together, 4 on a node"):
        lower(replace(profile, hardware=node.shared_by(12)), plan)
    small = analytic_profile(named_workload("gpt-2b", transformer_blocks=8), NODE.shared_by(4))
    with pytest.raises(InputError, match="4 GPUs cannot be pipelines of 3 each"):
        parse_policy("pipeline:ranks=3").plan(small, judge_for(small))


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(st.integers(3, 4), st.integers(1, 2), st.integers(1, 2), st.integers(1, 100))
def test_a_fraction_of_what_stages_save_leaves(ranks: int, chunks: int, groups: int, percent: int) -> None:
    """Of each block but those of the last stage the fraction of bytes goes away and comes back, in any pipeline; a backward of
    a stage begins once all of it is back, and a rank has what two of them need at most. Two executors agree.
    """
    workload = Workload(
        "small", 256, 2 * ranks * chunks, 4, 1000, sequence_length=64, batch_size=2, micro_batches=ranks * groups,
    )  # fmt: skip
    hardware = replace(NODE, interconnect=Interconnect(8, 1e11, 1e-6)).shared_by(ranks)
    profile = analytic_profile(workload, hardware)
    name = f"pipeline_offload:percent={percent},chunks={chunks},checkpointing=none"
    plan = parse_policy(name).plan(profile, judge_for(profile))
    schedule = validate(lower(profile, plan))
    sent, came = (
        Counter[tuple[int, int]](
            {
                (unit, m): sum(b.size_bytes for t in schedule.tasks if t.id[:3] == (kind, unit, m) for b in t.allocates)
                for unit in range(1, plan.stages[-1].start)
                for m in range(workload.micro_batches)
            }
        )
        for kind in (Kind.OFFLOAD_ACTIVATIONS, Kind.FETCH_ACTIVATIONS)
    )
    whole, input_bytes = profile.units[1].activation_bytes, profile.units[1].input_bytes
    assert sent == came
    assert all(abs(size - whole * percent / 100) <= input_bytes / 2 + 1 for size in sent.values())
    assert not any(t.id.unit in plan.stages[-1] for t in schedule.tasks if t.id.kind is Kind.OFFLOAD_ACTIVATIONS)
    trace = SimExecutor().run(schedule, 3)
    assert check_trace(trace) == []
    assert (trace.start_ns == list_schedule(schedule, 3).start_ns).all()
    starts_ns = {task.id: int(trace.start_ns[1, i]) for i, task in enumerate(schedule.tasks)}
    ends_ns = {task.id: int(trace.end_ns[1, i]) for i, task in enumerate(schedule.tasks)}
    for task, end in ends_ns.items():
        if task.kind is Kind.FETCH_ACTIVATIONS:
            stage = next(stage for stage in plan.stages if task.unit in stage)
            assert starts_ns[TaskId(Kind.BACKWARD, stage[-1], task.micro_batch, task.rank)] >= end
    for rank in range(ranks):
        backs = sorted((starts_ns[t], ends_ns[t]) for t in starts_ns if t.rank == rank and t.kind is Kind.BACKWARD)
        fetches = [t for t in starts_ns if t.rank == rank and t.kind is Kind.FETCH_ACTIVATIONS]
        for begin, _ in backs:
            here = {
                (next(stage for stage in plan.stages if t.unit in stage), t.micro_batch)
                for t in fetches
                if starts_ns[t] < begin < ends_ns[TaskId(Kind.BACKWARD, t.unit, t.micro_batch, rank)]
            }
            assert len(here) <= 2


@pytest.mark.parametrize("gpus", [1, 2])
def test_fewer_than_three_ranks_offload_nothing(gpus: int) -> None:
    """The plan is that of a pipeline."""
    profile = analytic_profile(named_workload("gpt-2b", transformer_blocks=8, tied_embeddings=False), NODE.shared_by(gpus))
    judge = judge_for(profile)
    plans = [parse_policy(name).plan(profile, judge) for name in ("pipeline", "pipeline_offload:percent=50")]
    assert plans[0] == plans[1]


def test_the_least_fraction_that_fits_is_offloaded() -> None:
    """What fits as it is stays; with less memory the smallest multiple of ten percent goes with which the model fits."""
    workload = Workload("small", 512, 8, 8, 1000, sequence_length=256, batch_size=4, micro_batches=8)
    profile = analytic_profile(workload, NODE.shared_by(4))

    def planned(profile: Profile, flags: str = "") -> Plan:
        return parse_policy(f"pipeline_offload:checkpointing=none{flags}").plan(profile, judge_for(profile))

    assert planned(profile) == planned(profile, ",percent=0")
    most, least = (judge_for(profile)(planned(profile, f",percent={percent}")).gpu_peak_bytes for percent in (0, 100))
    gpu = replace(profile.hardware.gpu, memory_bytes=(most + least) // 2, reserved_bytes=0)
    small = replace(profile, hardware=replace(profile.hardware, gpu=gpu))
    plans = [planned(small, f",percent={percent}") for percent in range(0, 101, 10)]
    place = plans.index(planned(small))
    assert [judge_for(small)(plans[i]).verdict is Verdict.OK for i in (place - 1, place)] == [False, True]


def test_one_rank_is_the_ordinary_schedule() -> None:
    """A pipeline of one stage has the tasks of a plan without ranks."""
    profile = profile_with(PLENTY, 3)
    inner = UnitPlan(Activations.RECOMPUTE, Route("host"), Update(Processor.CPU), kept=Route("host"))
    outer = UnitPlan(update=Update(Processor.CPU))
    units = (outer, inner, inner, inner, outer)
    ordinary = lower(profile, Plan("one", units))
    pipeline = lower(profile, Plan("one", tuple(replace(unit, rank=0) for unit in units)))
    assert (pipeline.tasks, pipeline.resident, pipeline.memories) == (ordinary.tasks, ordinary.resident, ordinary.memories)


def test_a_pipeline_of_gpus_on_two_nodes_sends_through_the_network() -> None:
    """A transfer takes the rate and the latency of what connects the two ranks."""
    profile, plan = even(4, 1)
    join = Interconnect(2, 1e9, 0.0, network_bandwidth=1e8, network_latency_seconds=3e-9)
    node = replace(profile.hardware, gpus=1, interconnect=join)
    schedule = lower(replace(profile, hardware=node.shared_by(4)), plan)
    sizes = {task.id.unit: task.duration_ns for task in schedule.tasks if task.id.kind is Kind.SEND_INPUT}
    assert sizes == {1: 4, 2: 43, 3: 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": (1, 1, 0, 0, 0)}, "deal stages of consecutive units to the ranks in turn"),
        ({"ranks": (0, 1, 0, 0, 0)}, "3 stages are dealt to 2 ranks, which take turns with them: give each rank as many"),
        ({"ranks": (0, 1, 0, 1, 1), "micro_batches": 3}, "2 ranks with 2 stages each train 3 micro-batches: give a multiple"),
        ({"ranks": (0, 0, None, 1, 1)}, "give each unit a rank"),
        ({"ranks": (0, 0, 2, 2, 2)}, "each rank from 0 on a unit"),
        ({"ranks": (0, 0, 1, 1, 2)}, "on 3 ranks, but 2 GPUs train together"),
        ({"on_host": 4}, "gradients of unit 4 are summed on the host, but two ranks have copies of the matrix"),
        ({"drop": 2}, "unit 2 drops its input, which comes from another rank"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(change: dict[str, object], message: str) -> None:
    """The error names the ranks or the unit, and what to do."""
    micro_batches = change.get("micro_batches", 2)
    assert isinstance(micro_batches, int)
    profile = profile_with(PLENTY, micro_batches, gpus=2)
    if "on_host" in change:
        profile = replace(profile, workload=replace(profile.workload, tied_embeddings=True))
    ranks = change.get("ranks", RANKS)
    assert isinstance(ranks, tuple)
    units = [UnitPlan(rank=rank) for rank in ranks]
    if "on_host" in change:
        units[4] = replace(units[4], update=Update(Processor.CPU), gradients=Route("host"))
    if "drop" in change:
        units[1], units[2] = (
            replace(unit, activations=kept)
            for unit, kept in zip(units[1:3], ("recompute", "drop"), strict=True)
            for kept in [Activations(kept)]
        )
    with pytest.raises(InputError, match=message):
        lower(profile, Plan("by hand", tuple(units)))


def test_a_pipeline_on_two_nodes_uses_the_memory_of_both() -> None:
    """What a rank offloads is on the host of its node, and each of its lanes copies between the memories that it has."""
    profile, plan = even(4, 1)
    node = replace(profile.hardware, gpus=1, interconnect=Interconnect(2, 1e9, 0.0, network_bandwidth=1e8))
    units = tuple(replace(unit, states=Route("host")) for unit in plan.units)
    schedule = validate(lower(replace(profile, hardware=node.shared_by(4)), replace(plan, units=units)))
    hosts = {b.id.unit: b.memory for b in schedule.resident if b.id.value is Value.OPTIMIZER_STATES}
    assert hosts == {0: "host", 1: "host", 2: "host.1", 3: "host.1"}
    ends = {lane.name: lane.ends for lane in schedule.lanes}
    assert (ends["h2d"], ends["h2d.1"], ends["d2h.3"]) == (("host", "gpu"), ("host", "gpu.1"), ("gpu.3", "host.1"))


@pytest.mark.parametrize("node", ["h100-8gpu", "a100-40gb-epyc7713"])
def test_a_pipeline_runs_on_a_preset(node: str) -> None:
    """Where collectives slow GPUs down and where they do not: there are none. All ranks together train one batch."""
    workload = Workload("small", 512, 6, 8, 1000, sequence_length=64, batch_size=2, micro_batches=4, tied_embeddings=False)
    profile = analytic_profile(workload, load_hardware(node).shared_by(2))
    units = tuple(UnitPlan(rank=int(unit > 3)) for unit in range(len(profile.units)))
    found = simulate_plan(profile, Plan("two stages", units))
    assert found.tokens_per_second == pytest.approx(2 * 4 * 64 / found.iteration_seconds)
    assert {lane.name for lane in found.schedule.lanes} >= {"gpu", "send", "gpu.1", "send.1"}
    assert usage(found.trace, found.steady).idle_seconds[Cause.COLLECTIVE] > 0


def test_memories_of_ranks_are_counted_apart() -> None:
    """A rank that is too small is named in the verdict, whichever it is."""
    plan, profile = plan_of(*[UnitPlan()] * 5), profile_with(PLENTY, 3, gpus=2)
    peaks = {one.memory: one.peak_bytes for one in simulate_plan(profile, plan).memories}
    assert peaks[GPU_MEMORY] < peaks["gpu.1"]
    small = replace(
        profile, hardware=replace(profile.hardware, gpu=replace(profile.hardware.gpu, memory_bytes=peaks["gpu.1"] - 1))
    )
    assert str(simulate_plan(small, plan).verdict) == "gpu.1-out-of-memory"


@given(st.lists(st.integers(1, 50), min_size=2, max_size=9), st.data())
def test_even_stages_are_the_shortest(seconds: list[int], data: st.DataObject) -> None:
    """No other cut into as many stages has a shorter longest stage, each stage has a unit, and they are consecutive."""
    stages = data.draw(st.integers(1, len(seconds)))
    ranks = even_stages(seconds, stages)
    assert ranks == sorted(ranks)
    assert set(ranks) == set(range(stages))
    longest = max(sum(each for each, rank in zip(seconds, ranks, strict=True) if rank == stage) for stage in range(stages))
    cuts = ((0, *some, len(seconds)) for some in combinations(range(1, len(seconds)), stages - 1))
    assert longest == min(max(sum(seconds[a:b]) for a, b in pairwise(cut)) for cut in cuts)


@pytest.mark.parametrize("gpus", [1, 2, 3, 4])
def test_stages_have_as_many_blocks(gpus: int) -> None:
    """The first stage has the embedding as well and the last one the head; on one GPU no unit has a rank."""
    profile = analytic_profile(named_workload("gpt-2b", transformer_blocks=8, tied_embeddings=False), NODE.shared_by(gpus))
    plan = parse_policy("pipeline:checkpointing=full").plan(profile, judge_for(profile))
    ranks = [unit.rank for unit in plan.units]
    if gpus == 1:
        assert ranks == [None] * 10
        return
    assert (ranks[0], ranks[-1]) == (0, gpus - 1)
    blocks = Counter(ranks[1:-1])
    assert sum(blocks.values()) == 8
    assert max(blocks.values()) - min(blocks.values()) <= 1


def test_pipelines_are_compared_by_tokens() -> None:
    """A pipeline, whose GPUs share a batch, is not taken for faster than GPUs that have one each because it ends earlier."""
    workload = named_workload("gpt-2b", transformer_blocks=8, tied_embeddings=False, batch_size=2, micro_batches=2)
    profile = analytic_profile(workload, NODE.shared_by(4))
    found = [Judged(profile, (name,))() for name in ("pipeline", "resident:zero_stage=3")]
    assert found[0].seconds < found[1].seconds
    assert found[0].seconds_per_token > found[1].seconds_per_token
    assert [each.name for each in ranked(found)] == ["resident:zero_stage=3", "pipeline"]


def test_the_best_pipeline_trains_the_most_tokens() -> None:
    """Of all flags those are taken that are fastest for each batch, though other pipelines have shorter iterations of fewer."""
    workload = named_workload("gpt-2b", transformer_blocks=8, tied_embeddings=False, batch_size=1, micro_batches=4)
    profile = analytic_profile(workload, NODE.shared_by(4))
    names = search_space("pipeline", profile)
    found = Judged(profile, names)()
    rates = {name: simulate_policy(profile, parse_policy(name)).tokens_per_second for name in names}
    assert found.name == max(rates, key=rates.__getitem__)
    assert found.summary.tokens_per_second == pytest.approx(max(rates.values()))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_bounds_of_pipelines_hold(data: st.DataObject) -> None:
    """No pipeline is faster for each batch, and no rank fits in less, than is said at first."""
    drawn = replace(data.draw(strategies.profiles(max_micro_batches=4)))
    join = Interconnect(8, 1e11, 1e-6, 1e9, 1e-5)
    ranks, apart = data.draw(st.integers(2, min(3, len(drawn.units)))), data.draw(st.integers(1, 2))
    hardware = replace(drawn.hardware, shared_cores=None, interconnect=join).shared_by(ranks * apart)
    workload = replace(drawn.workload, tied_embeddings=False)
    profile = replace(drawn, hardware=hardware, workload=workload)
    ends = [len(profile.units) * rank // ranks for rank in range(1, ranks)]
    units = tuple(UnitPlan(rank=sum(unit >= end for end in ends)) for unit in range(len(profile.units)))
    plan = Plan("by hand", units, pass_order=data.draw(st.sampled_from(PassOrder)))
    bound, found = OptimisticJudge(profile, math.inf)(plan), simulate_plan(profile, plan)
    assert bound.seconds <= found.comparable_seconds
    assert bound.verdict is Verdict.OK or found.verdict is not Verdict.OK
    assert lower_bytes(profile, plan)[GPU_MEMORY] <= max(one.peak_bytes for one in found.memories if is_gpu(one.memory))


def test_more_stages_than_blocks_are_refused() -> None:
    """With how many GPUs there can be."""
    profile = analytic_profile(named_workload("gpt-2b", transformer_blocks=3, tied_embeddings=False), NODE.shared_by(4))
    with pytest.raises(InputError, match="at most 3 GPUs"):
        parse_policy("pipeline").plan(profile, judge_for(profile))
    profile = analytic_profile(named_workload("gpt-2b", transformer_blocks=9, tied_embeddings=False), NODE.shared_by(4))
    with pytest.raises(InputError, match="a pipeline of 12 stages has a block in each, but there are 9: give at most 2 chunks"):
        parse_policy("pipeline:chunks=3").plan(profile, judge_for(profile))


NVLINK = Interconnect(8, 2e11, 1e-6)


def lending(gpu_gib: float, join: Interconnect = NVLINK) -> Profile:
    """Four ranks with NVLink. If all stays, they take 1.36, 1.06, 0.78 and 0.52 GiB; if all is recomputed, 0.37 at most."""
    workload = Workload("small", 512, 16, 8, 1000, sequence_length=512, batch_size=8, micro_batches=8)
    hardware = replace(NODE, interconnect=join).shared_by(4)
    gpu = replace(hardware.gpu, memory_bytes=round(gpu_gib * 2**30), reserved_bytes=0)
    return analytic_profile(workload, replace(hardware, gpu=gpu))


def homes_of(plan: Plan) -> Counter[str]:
    """Where the activations of blocks rest; those that are recomputed, nowhere."""
    inner = plan.units[1:-1]
    return Counter("again" if unit.activations is Activations.RECOMPUTE else unit.kept.home for unit in inner)


@pytest.mark.parametrize(
    ("gpu_gib", "join", "homes"),
    [
        (1.5, NVLINK, {"gpu"}),
        (1.2, NVLINK, {"gpu", "rank2", "rank3"}),
        (1.2, replace(NVLINK, through_host=True), {"gpu", "host", "again"}),
        (1.2, replace(NVLINK, gpus=2, network_bandwidth=5e10), {"gpu", "host", "again"}),
        (0.4, NVLINK, {"again"}),
    ],
)
def test_what_the_first_ranks_lack_the_last_ones_lend(gpu_gib: float, join: Interconnect, homes: set[str]) -> None:
    """Copies to other GPUs come first, of the same node and where they copy directly; then the host and recomputation. The
    plan fits, and is never slower than recomputing all.
    """
    profile = lending(gpu_gib, join)
    found = simulate_policy(profile, parse_policy("mpress"))
    assert found.verdict is Verdict.OK
    assert set(homes_of(found.plan)) == homes
    again = simulate_policy(profile, parse_policy("pipeline:checkpointing=full"))
    assert found.iteration_seconds <= again.iteration_seconds * (1 + 1e-9)


def test_what_is_lent_takes_the_memory_of_the_lender() -> None:
    """The first rank takes less than if all stayed, and the lenders as much more as it lets rest there at a time."""
    staying = simulate_policy(lending(1.5), parse_policy("mpress"))
    lent = simulate_policy(lending(1.2), parse_policy("mpress"))
    before, after = ({one.memory: one.peak_bytes for one in found.memories} for found in (staying, lent))
    assert after["gpu"] < before["gpu"]
    assert after["gpu.1"] == before["gpu.1"]
    size = lending(1.2).units[1].activation_bytes
    for rank in (2, 3):
        blocks = homes_of(lent.plan)[f"rank{rank}"]
        assert 0 < after[f"gpu.{rank}"] - before[f"gpu.{rank}"] <= blocks * 4 * size
    assert lent.iteration_seconds <= staying.iteration_seconds * 1.001
    lanes = {lane.name: lane.ends for lane in lent.schedule.lanes}
    assert lanes["rank3_write"] == ("gpu", "gpu.3")
    assert "rank3_write.1" not in lanes


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(st.integers(2, 5), st.integers(1, 8), st.floats(0.25, 1.4), st.integers(1, 2), st.floats(1e9, 1e12))
def test_memory_is_lent_and_given_back(ranks: int, micro_batches: int, share: float, pipelines: int, rate: float) -> None:
    """Two executors agree on any plan of MPress; what leaves comes back, and no rank exceeds its memory."""
    workload = Workload("small", 256, 2 * ranks, 4, 1000, sequence_length=128, batch_size=4, micro_batches=micro_batches)
    hardware = replace(NODE, interconnect=Interconnect(16, rate, 1e-6)).shared_by(ranks * pipelines)
    profile = analytic_profile(workload, hardware)
    policy = parse_policy(f"mpress:ranks={ranks},zero_stage={pipelines - 1}")
    peak = judge_for(profile)(parse_policy(f"pipeline:ranks={ranks},checkpointing=none").plan(profile, judge_for(profile)))
    gpu = replace(hardware.gpu, memory_bytes=round(share * peak.gpu_peak_bytes), reserved_bytes=0)
    profile = replace(profile, hardware=replace(hardware, gpu=gpu))
    found = simulate_policy(profile, policy)
    if found.verdict is Verdict.OK:
        assert all(one.peak_bytes <= one.capacity_bytes for one in found.memories)
    schedule = validate(lower(profile, found.plan))
    sent, came = (
        Counter(task.id[1:4] for task in schedule.tasks if task.id.kind is kind)
        for kind in (Kind.OFFLOAD_ACTIVATIONS, Kind.FETCH_ACTIVATIONS)
    )
    assert sent == came
    assert parse_schedule(str(schedule)) == schedule
    trace = SimExecutor().run(schedule, 3)
    assert check_trace(trace) == []
    assert (trace.start_ns == list_schedule(schedule, 3).start_ns).all()


def test_ranks_that_borrow_of_one_share_its_interconnect() -> None:
    """What two ranks write to a third at a time, each gets half of the bandwidth for."""
    keeps = UnitPlan(kept=Route("rank2"))
    units = (UnitPlan(), keeps, keeps, UnitPlan(), UnitPlan())
    plan = Plan("by hand", tuple(replace(unit, rank=rank) for unit, rank in zip(units, (0, 0, 1, 2, 2), strict=True)))
    schedule = lower(profile_with(PLENTY, 3, gpus=3), plan)
    shared = {one.name: (one.capacity, set(one.lanes)) for one in schedule.resources if "gpu.2_" in one.name}
    assert shared == {
        "gpu.2_receives": (4e9, {"rank2_write", "rank2_write.1"}),
        "gpu.2_sends": (4e9, {"rank2_read", "rank2_read.1"}),
    }
    assert {flow.lane: flow.demand for flow in schedule.flows if "rank2" in flow.lane} == dict.fromkeys(
        ("rank2_read", "rank2_write", "rank2_read.1", "rank2_write.1"), 4e9
    )
    trace = SimExecutor().run(schedule, 2)
    assert check_trace(trace) == []


def test_values_rest_on_ranks_of_a_pipeline_only() -> None:
    """Parameters cannot, nor what a rank itself, or one that is not there, has; and GPUs must copy to each other."""
    keeps = UnitPlan(kept=Route("rank1"))
    for units, message in (
        ((UnitPlan(parameters=Route("rank1")),), "only what forward keeps can"),
        ((UnitPlan(), UnitPlan(), keeps), "rests in rank1, but the unit is on rank 1 of 2"),
        ((UnitPlan(), UnitPlan(kept=Route("rank2"))), "rests in rank2, but the unit is on rank 0 of 2"),
    ):
        with pytest.raises(InputError, match=message):
            plan_of(*units, *[UnitPlan()] * (5 - len(units)))
    with pytest.raises(InputError, match="the unit is on no rank of its own"):
        Plan("by hand", (UnitPlan(), keeps, UnitPlan()))
    plan, profile = plan_of(UnitPlan(), keeps, *[UnitPlan()] * 3), profile_with(PLENTY, 3, gpus=2)
    assert lower(profile, plan).memories
    apart = replace(profile, hardware=replace(profile.hardware, interconnect=Interconnect(1, 4e9, 0.0, 4e9)))
    with pytest.raises(InputError, match="rank 0 does not copy to that GPU directly"):
        lower(apart, plan)
