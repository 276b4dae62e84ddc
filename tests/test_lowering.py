"""What every plan's schedule promises about whose data whom reaches, and what every policy promises about its plan.

Only written edges count here, not the order of fifo lanes: an executor with wider lanes must train the same numbers.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import autohete
from autohete.errors import InfeasibleError, InputError
from autohete.hardware import load_hardware
from autohete.lowering import lower
from autohete.plan import BlockPlan, Placement, Plan, Processor
from autohete.policies import POLICIES, NamedPolicy, parse_policy
from autohete.policy import Verdict
from autohete.profile import Profile, analytic_profile
from autohete.schedule import Kind, Schedule, TaskId
from autohete.simulate import judge_for, simulate_plan
from autohete.testing import strategies
from autohete.workload import Workload

# --- what reaches whom --------------------------------------------------------------------------------------------


class Paths:
    """Which task instances wait, directly or not, for which others by written edges."""

    def __init__(self, schedule: Schedule) -> None:
        self.tasks = {task.id for task in schedule.tasks}
        self._after: dict[TaskId, list[tuple[TaskId, int]]] = {task: [] for task in self.tasks}
        for task in schedule.tasks:
            for edge in task.after:
                self._after[edge.task].append((task.id, edge.back))
        self._reached: dict[TaskId, set[tuple[TaskId, int]]] = {}

    def find(self, kind: Kind, block: int) -> TaskId | None:
        task = TaskId(kind, block)
        return task if task in self.tasks else None

    def exist(self, before: TaskId, after: TaskId, later: int = 0) -> bool:
        """Whether ``after`` waits for ``before`` of ``later`` iterations before."""
        if before not in self._reached:
            reached: set[tuple[TaskId, int]] = set()
            stack = [(before, 0)]
            while stack:
                task, iteration = stack.pop()
                for follower, back in self._after[task]:
                    step = (follower, iteration + back)
                    if step[1] <= 1 and step not in reached:
                        reached.add(step)
                        stack.append(step)
            self._reached[before] = reached
        return (after, later) in self._reached[before]


def chain_faults(paths: Paths, chain: list[tuple[TaskId, int]]) -> list[str]:
    """Where a chain of (task, iteration) has a link that no path of edges makes."""
    return [
        f"{after.at(at)} does not wait for {before.at(since)}"
        for (before, since), (after, at) in itertools.pairwise(chain)
        if not paths.exist(before, after, at - since)
    ]


def parameter_faults(profile: Profile, plan: Plan, schedule: Schedule) -> list[str]:
    """Forwards that may not see the update of the iteration before, and fetches that may read an old host copy."""
    paths = Paths(schedule)
    faults: list[str] = []
    for block, decisions in enumerate(plan.blocks):
        update = paths.find(Kind.CPU_UPDATE, block) or paths.find(Kind.GPU_UPDATE, block)
        assert update is not None, f"nobody updates block {block}"
        on_cpu = update.kind is Kind.CPU_UPDATE
        leaves = decisions.parameters is Placement.OFFLOADED
        fetch_forward, fetch_backward = (paths.find(k, block) for k in (Kind.PREFETCH_FORWARD, Kind.PREFETCH_BACKWARD))
        stays = not leaves or decisions.keep_after_backward
        assert (fetch_forward is None) == stays
        assert (fetch_backward is None) == (not leaves or decisions.keep_after_forward)

        # From the update to the next forward, through the copy that carries the parameters where they change sides.
        chain = [(update, 0)]
        write_back = paths.find(Kind.WRITE_BACK_BACKWARD, block)
        if on_cpu and stays:
            chain.append((TaskId(Kind.REFRESH, block), 0))
        if not on_cpu and not stays:
            chain.append((TaskId(Kind.WRITE_BACK_BACKWARD, block), 0))
        if fetch_forward:
            chain.append((fetch_forward, 1))
        if any(task not in paths.tasks for task, _ in chain):
            faults.append(f"block {block}: a copy is missing in {chain}")
            continue
        faults += chain_faults(paths, [*chain, (TaskId(Kind.FORWARD, block), 1)])
        if block == 0 and profile.workload.tied_embeddings:
            faults += chain_faults(paths, [*chain, (TaskId(Kind.FORWARD, len(plan.blocks) - 1), 1)])

        # Backward fetches what is on the host: by then the host has the last update.
        if fetch_backward:
            if on_cpu:
                written = [(update, 0)]
            elif moved := paths.find(Kind.WRITE_BACK_FORWARD, block):
                written = [(moved, 1)]
            else:
                assert write_back is not None, f"block {block} is updated on the GPU and never written back"
                written = [(write_back, 0)]
            faults += chain_faults(paths, [*written, (fetch_backward, 1)])
            user = paths.find(Kind.RECOMPUTE, block) or TaskId(Kind.BACKWARD, block)
            faults += chain_faults(paths, [(fetch_backward, 1), (user, 1)])
        # What is fetched for this iteration is not overwritten on the host while it is read.
        if on_cpu:
            faults += [
                f for fetch in (fetch_forward, fetch_backward) if fetch for f in chain_faults(paths, [(fetch, 0), (update, 0)])
            ]
    return faults


def gradient_faults(plan: Plan, schedule: Schedule) -> list[str]:
    """Updates that may take unfinished gradients."""
    paths = Paths(schedule)
    faults: list[str] = []
    for block, decisions in enumerate(plan.blocks):
        backward = TaskId(Kind.BACKWARD, block)
        if decisions.optimizer is Processor.CPU:
            copy, update = TaskId(Kind.OFFLOAD_GRADIENTS, block), TaskId(Kind.CPU_UPDATE, block)
            late = int(plan.delayed)
            faults += chain_faults(paths, [(backward, 0), (copy, 0), (update, late)])
            if plan.delayed:  # one gradient on the host: the next may not overwrite it unread
                faults += chain_faults(paths, [(copy, 0), (update, 1), (copy, 1)])
        else:
            faults += chain_faults(paths, [(backward, 0), (TaskId(Kind.GPU_UPDATE, block), 0)])
    return faults


@st.composite
def planned(draw: st.DrawFn) -> tuple[Profile, Plan]:
    profile = draw(strategies.profiles())
    return profile, draw(strategies.plans(profile))


def small_profile() -> Profile:
    workload = Workload("small", hidden_size=64, transformer_blocks=4, heads=2, vocabulary_size=500, sequence_length=64)
    return analytic_profile(workload, load_hardware("rtx4090-workstation"))


def plan_of(inner: BlockPlan, **flags: object) -> Plan:
    """A plan of six blocks whose four inner ones are alike, all updated on the CPU unless ``inner`` says otherwise."""
    outer = BlockPlan(optimizer=inner.optimizer)
    plan = Plan(
        policy="by hand",
        blocks=(outer, inner, inner, inner, inner, outer),
        gradient_bytes=2,
        update_bytes=28,
        refresh_bytes=2,
        host_optimizer_bytes=16,
        host_parameter_bytes=2,
    )
    return replace(plan, **flags)  # type: ignore[arg-type]


@given(planned())
def test_every_plan_becomes_a_valid_schedule(case: tuple[Profile, Plan]) -> None:
    """Every plan's schedule can be executed for ever."""
    profile, plan = case
    lower(profile, plan).validate()


@given(planned())
def test_forward_sees_the_update_before(case: tuple[Profile, Plan]) -> None:
    """From every update a path of edges leads to the next forward of its block, through the copies that carry it."""
    profile, plan = case
    # The next test is about this one kind of plan, which no policy makes.
    stale = any(
        b.parameters is Placement.OFFLOADED
        and b.optimizer is Processor.GPU
        and (b.keep_after_forward, b.keep_after_backward, b.write_back_after_forward) == (False, True, False)
        for b in plan.blocks
    )
    assume(not stale)
    assert parameter_faults(profile, plan, lower(profile, plan)) == []


def test_backward_fetch_waits_for_the_write_back_of_the_update() -> None:
    """Parameters updated on the GPU that leave after forward are fetched from a host copy that has the update."""
    profile = small_profile()
    plan = plan_of(BlockPlan(parameters=Placement.OFFLOADED, optimizer=Processor.GPU, keep_after_backward=True))
    assert parameter_faults(profile, plan, lower(profile, plan)) == []


@given(planned())
def test_update_takes_finished_gradients(case: tuple[Profile, Plan]) -> None:
    """Gradients are copied after their backward and taken after their copy; delayed ones are not overwritten unread."""
    profile, plan = case
    assert gradient_faults(plan, lower(profile, plan)) == []


@pytest.mark.parametrize("forgotten", [Kind.REFRESH, Kind.CPU_UPDATE, Kind.OFFLOAD_GRADIENTS])
def test_search_for_paths_notices(forgotten: Kind) -> None:
    """With the waits for one kind of task taken away, the two tests above have something to say."""
    profile, plan = small_profile(), plan_of(BlockPlan(optimizer=Processor.CPU))
    schedule = lower(profile, plan)
    careless = replace(
        schedule,
        tasks=tuple(replace(t, after=tuple(e for e in t.after if e.task.kind is not forgotten)) for t in schedule.tasks),
    )
    assert not parameter_faults(profile, plan, schedule) + gradient_faults(plan, schedule)
    assert parameter_faults(profile, plan, careless) + gradient_faults(plan, careless)


@pytest.mark.parametrize(
    "flags",
    [
        {"serial_updates": True, "gradient_slots": 1},
        {"serial_updates": True, "window": 1},
        {"serial_updates": True, "update_after_backward": True},
        {"serial_updates": True, "refresh_after_updates": True},
        {"update_after_backward": True, "window": 1},
        {"update_after_backward": True, "gradient_slots": 1},
    ],
    ids="+".join,
)
def test_contradictory_plan_is_refused_early(flags: dict[str, object]) -> None:
    """Decisions whose waits form a circle are refused as a plan, not later as a schedule with a cycle."""
    try:
        plan = plan_of(BlockPlan(optimizer=Processor.CPU), **flags)
    except InputError:
        return
    lower(small_profile(), plan).validate()


@pytest.mark.parametrize(
    "flag",
    [
        {"window": 0},
        {"gradient_slots": 0},
        {"parameter_slots": -1},
        {"gpu_buffer_bytes": -1},
        {"host_buffer_bytes": -1},
        {"host_optimizer_bytes": -1},
        {"host_parameter_bytes": -1},
        {"gradient_bytes": -1},
        {"refresh_bytes": -1},
        {"update_bytes": -1.0},
        {"update_bytes": float("nan")},
        {"update_bytes": float("inf")},
    ],
    ids=str,
)
def test_absurd_number_in_a_plan_is_refused(flag: dict[str, object]) -> None:
    """A plan with a size below zero, no places at all, or no number is a typed error that names the field."""
    with pytest.raises(InputError, match=next(iter(flag))):
        plan_of(BlockPlan(), **flag)


def calls_to_lower(transformer_blocks: int) -> int:
    """Calls of Python functions, steps of generators included, that lowering a window of StrongHold takes."""
    workload = Workload("deep", hidden_size=64, transformer_blocks=transformer_blocks, heads=2)
    profile = analytic_profile(workload, load_hardware("rtx4090-workstation"))
    plan = parse_policy("stronghold:window=4,checkpointing=full").plan(profile, judge_for(profile))
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        lower(profile, plan)
    finally:
        sys.setprofile(before)
    return calls


def test_lowering_grows_with_the_model() -> None:
    """Four times the blocks take about four times the steps, also where blocks share preallocated slots."""
    assert calls_to_lower(128) < 5 * calls_to_lower(32)


def test_plan_for_another_model_is_refused() -> None:
    """A plan with another number of blocks than the profile is a typed error with both numbers."""
    profile, plan = small_profile(), plan_of(BlockPlan())
    with pytest.raises(InputError, match="the plan has 5 blocks, the profile 6"):
        lower(profile, replace(plan, blocks=plan.blocks[1:]))


# --- policies -----------------------------------------------------------------------------------------------------

# Searching policies simulate dozens of plans per example.
fewer = settings(max_examples=25 if settings.get_current_profile_name() == "ci" else 200)


def planned_by(profile: Profile, policy: NamedPolicy) -> Plan | None:
    """The policy's plan, or None where nothing fits; any other error fails the test."""
    try:
        return policy.plan(profile, judge_for(profile))
    except InfeasibleError:
        return None


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(data=st.data())
@fewer
def test_every_policy_plans(name: str, data: st.DataObject) -> None:
    """Every policy ends on every input: with a plan of one entry per block that keeps every promise, or infeasible."""
    profile, policy = data.draw(strategies.profiles()), data.draw(strategies.policies(name))
    plan = planned_by(profile, policy)
    if plan is None:
        assert name == "autohete", "policies with fixed rules return their plan all the same"
        return
    assert len(plan.blocks) == len(profile.blocks)
    assert plan.policy == policy.name
    schedule = lower(profile, plan).validate()
    assert parameter_faults(profile, plan, schedule) == []
    assert gradient_faults(plan, schedule) == []
    if name == "autohete":
        assert simulate_plan(profile, plan).verdict is Verdict.OK, "what is searched for fits"


@given(strategies.profiles(), strategies.policies())
@fewer
def test_same_input_same_plan(profile: Profile, policy: NamedPolicy) -> None:
    """Twice the same question gives the same plan and the same printed schedule."""
    first, second = planned_by(profile, policy), planned_by(profile, policy)
    assert first == second
    if first and second:
        assert str(lower(profile, first)) == str(lower(profile, second))


def with_memory(profile: Profile, gpu_bytes: int, host_bytes: int) -> Profile:
    """``profile`` with so much memory for tensors."""
    hardware = profile.hardware
    gpu = replace(hardware.gpu, memory_bytes=hardware.gpu.reserved_bytes + gpu_bytes)
    return replace(profile, hardware=replace(hardware, gpu=gpu, host=replace(hardware.host, memory_bytes=host_bytes)))


@given(strategies.profiles())
@fewer
def test_infeasible_says_what_is_missing(profile: Profile) -> None:
    """An infeasible answer names the memory that binds, what there is of it, and that more is needed."""
    with_little = with_memory(profile, 1, 1)
    with pytest.raises(InfeasibleError, match=r"no plan fits: .* memory for tensors is .*, short by") as caught:
        parse_policy("autohete").plan(with_little, judge_for(with_little))
    assert caught.value.constraint in ("gpu", "host")
    assert caught.value.needed_bytes > caught.value.capacity_bytes == 1


@given(strategies.policies())
@example(parse_policy("resident"))
def test_policy_is_its_name(policy: NamedPolicy) -> None:
    """A policy's name reads back as the policy."""
    assert parse_policy(policy.name) == policy


_PRINT_ALL = """
from autohete.hardware import load_hardware
from autohete.lowering import lower
from autohete.policies import POLICIES, parse_policy
from autohete.profile import analytic_profile
from autohete.simulate import judge_for
from autohete.workload import Workload
from dataclasses import replace

workload = Workload("small", 1024, 6, 8, sequence_length=512)
hardware = load_hardware("rtx4090-workstation")
hardware = replace(hardware, gpu=replace(hardware.gpu, memory_bytes=hardware.gpu.reserved_bytes + 28 * 10**8))
profile = analytic_profile(workload, hardware)
for name in sorted(POLICIES):
    policy = parse_policy(name)
    plan = policy.plan(profile, judge_for(profile))
    print(plan, lower(profile, plan))
"""


def test_schedules_do_not_depend_on_the_hash_seed() -> None:
    """Plans and printed schedules of all policies are byte-identical in processes with different hash seeds."""
    printed = set()
    for seed in ("0", "1", "2"):
        environment = {**os.environ, "PYTHONPATH": str(Path(autohete.__file__).parents[1]), "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", _PRINT_ALL], env=environment, check=True, capture_output=True)
        printed.add(done.stdout)
    assert len(printed) == 1
    assert printed.pop().count(b"autohete-schedule 1") == len(POLICIES)
