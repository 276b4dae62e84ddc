"""The time that the host of a GPU needs for a pass: no pass is faster, and long ones do not notice it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autohete.errors import InputError
from autohete.hardware import Hardware, load_hardware
from autohete.lowering import durations, lower
from autohete.plan import Hooks
from autohete.policies import parse_policy
from autohete.policies.several_gpus import ZERO3_HOOKS
from autohete.profile import Profile, analytic_profile
from autohete.schedule import Kind, TaskId
from autohete.simulate import judge_for, simulate
from autohete.testing import strategies
from autohete.workload import Kernels, Workload
from autohete.workload.config import read_model
from autohete.workload.training import Lora, Training

A100 = load_hardware("a100-40gb-epyc7713")
NO_HOOKS = Hooks()
LLAMA = replace(read_model("llama-3.1-8b"), kernels=Kernels.EAGER_FLASH)
SHORT = replace(LLAMA, batch_size=1, sequence_length=64)


def with_launch(node: Hardware, seconds: float) -> Hardware:
    """``node`` with another host."""
    return replace(node, cpu=replace(node.cpu, launch_seconds=seconds))


def passes(profile: Profile, hooks: Hooks = NO_HOOKS) -> list[float]:
    """What every pass of every unit takes."""
    kinds = (
        (durations.forward, (hooks.forward,)),
        (durations.recompute, (hooks.forward, hooks.recomputation)),
        (durations.backward, (hooks.backward,)),
    )
    return [kind(unit, *counts)(profile) for unit in range(len(profile.units)) for kind, counts in kinds]


@given(strategies.workloads(), strategies.hardware(), st.floats(0, 1e-4), st.floats(1, 10))
def test_a_slower_host_makes_no_pass_faster(workload: Workload, node: Hardware, launch: float, factor: float) -> None:
    """A pass takes at least its time with a host that needs none, and no less the slower the host is."""
    none, fast, slow = (passes(analytic_profile(workload, with_launch(node, s))) for s in (0.0, launch, launch * factor))
    assert all(a <= b * (1 + 1e-12) and b <= c * (1 + 1e-12) for a, b, c in zip(none, fast, slow, strict=True))


@given(strategies.synthetic_profiles(), st.floats(0, 1e3), st.floats(0, 1e3))
def test_more_hooks_make_no_pass_faster(profile: Profile, some: float, more: float) -> None:
    """Without hooks a pass takes what the profile has; with more of them never less."""
    plain = passes(profile)
    assert plain == [
        seconds for unit in profile.units for seconds in (unit.forward_seconds, unit.recompute_seconds, unit.backward_seconds)
    ]
    few, many = (passes(profile, Hooks((count,) * 3, (count,) * 3, count)) for count in (some, some + more))
    assert all(a <= b <= c for a, b, c in zip(plain, few, many, strict=True))


@pytest.mark.parametrize("kernels", list(Kernels))
def test_long_passes_do_not_wait_for_their_host(kernels: Kernels) -> None:
    """With 16,384 tokens no block of an 8B model takes longer than with a host that needs no time, under ZeRO-3's hooks."""
    workload = replace(LLAMA, batch_size=4, sequence_length=4096, kernels=kernels)
    profile, without = (analytic_profile(workload, node) for node in (A100, with_launch(A100, 0.0)))
    assert durations.forward(1, ZERO3_HOOKS.forward)(profile) == without.units[1].forward_seconds
    assert durations.backward(1, ZERO3_HOOKS.backward)(profile) == without.units[1].backward_seconds


def test_a_short_pass_takes_what_its_hooks_and_operations_take() -> None:
    """The forward of a Llama block on 64 tokens takes its 38 kernels' operations, and those of hooks: 13 modules, 9 weights, of
    which 2 are norms."""
    costs = analytic_profile(SHORT, A100).units[1]
    launch = A100.cpu.launch_seconds
    assert (costs.modules, costs.tensors, costs.small_tensors) == (13, 9, 2)
    assert costs.forward_seconds == pytest.approx(38 * 3.2 * launch)
    hooked = durations.forward(1, (30, 20, 4))(analytic_profile(SHORT, A100))
    assert hooked == pytest.approx((38 * 3.2 + 13 * 30 + 7 * 20 + 2 * 4) * launch)


def test_adapters_cost_the_host_as_much_as_the_model() -> None:
    """LoRA on all layers of a block makes a short forward more than twice as long, though its products are small."""
    profile = analytic_profile(SHORT, A100)
    adapted = analytic_profile(replace(SHORT, training=Training(lora=Lora(rank=16))), A100)
    assert adapted.units[1].forward_seconds > 2 * profile.units[1].forward_seconds
    assert (adapted.units[1].modules, adapted.units[1].tensors) == (13 + 4 * 7, 9 + 2 * 7)
    large = 3  # of rank 16, those matrices that are as wide as the MLP, of 14,336
    assert adapted.units[1].small_tensors == 2 + 2 * 7 - large


def test_one_gpu_has_hooks_only_under_deepspeed() -> None:
    """On one GPU FSDP shards nothing and hooks nothing; DeepSpeed's stage 3 hooks its modules all the same."""
    node = replace(A100, gpu=replace(A100.gpu, memory_bytes=10**12))
    plain, sharded, hooked = (
        simulate(SHORT, node, parse_policy(f"resident:checkpointing=full{flags}")).iteration_seconds
        for flags in ("", ",zero_stage=3", ",zero_stage=3,deepspeed")
    )
    assert plain == sharded < hooked


def test_a_host_that_waits_for_a_copy_runs_no_hooks_meanwhile() -> None:
    """On one GPU a short forward under ZeRO-3 takes as much longer as the copy of the block takes; a long one does not, nor
    does any where several GPUs gather, or the parameters stay.
    """
    node = replace(A100, gpu=replace(A100.gpu, memory_bytes=10**12))
    long = replace(LLAMA, batch_size=4, sequence_length=4096)

    def forward(workload: Workload, policy: str, gpus: int = 1) -> tuple[float, float, Profile]:
        """With hooks that wait, and without."""
        profile = analytic_profile(workload, node.shared_by(gpus))
        plan = parse_policy(policy).plan(profile, judge_for(profile))
        plain = replace(plan, hooks=replace(plan.hooks, waits=False))
        schedules = (lower(profile, one).tasks for one in (plan, plain))
        both = [next(t.duration_ns for t in tasks if t.id == TaskId(Kind.FORWARD, 1)) for tasks in schedules]
        return both[0] * 1e-9, both[1] * 1e-9, profile

    offload = "zero3_offload:checkpointing=full"
    waiting, plain, profile = forward(SHORT, offload)
    assert waiting - plain == pytest.approx(profile.h2d_seconds(profile.parameter_bytes(1)), abs=2e-9)
    for others in ((long, offload), (SHORT, offload, 2), (SHORT, "twin_flow:checkpointing=full")):
        waiting, plain, _ = forward(*others)
        assert waiting == plain


@pytest.mark.parametrize("count", [-1.0, float("nan"), float("inf")])
def test_hooks_are_counted(count: float) -> None:
    """Counts of operations are finite and not negative."""
    with pytest.raises(InputError, match="backward of hooks is"):
        Hooks(backward=(0.0, count, 0.0))
