"""The analytic profile: what it must say of itself, and what others measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given

from autohete.hardware import Cpu, Hardware, load_hardware, preset_names
from autohete.profile import Profile, analytic_profile
from autohete.profile.costs import FIRST_TOUCH_BANDWIDTH
from autohete.testing import strategies
from autohete.workload import GPT2_KERNELS, BlockRole, Kernels, Precision, Units, Workload, named_workload

A100 = load_hardware("a100-40gb-epyc7713")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def efficiency(profile: Profile) -> float:
    """Share of the GPU's peak that one transformer block's forward reaches."""
    w = profile.workload
    flops = 24 * w.tokens * w.hidden_size**2 + 4 * w.tokens * w.sequence_length * w.hidden_size
    peak = profile.hardware.gpu.peak_16bit_flops
    return flops / profile.units[1].forward_seconds / peak


@pytest.mark.parametrize(("name", "low", "high"), [("gpt-2b", 0.3, 0.5), ("gpt-4b", 0.5, 0.65), ("gpt-8b", 0.5, 0.65)])
def test_efficiency_depends_on_the_shape_as_measured(name: str, low: float, high: float) -> None:
    """Hidden 2048 reaches less of an A100 than hidden 4096 (measured: 0.3 to 0.4 against 0.54 to 0.59)."""
    assert low <= efficiency(analytic_profile(named_workload(name, kernels=Kernels.FUSED_SOFTMAX), A100)) <= high


@pytest.mark.parametrize(("hidden", "vocabulary"), [(768, 50257), (768, 50258), (768, 50260), (768, 50304), (1600, 50257)])
def test_rows_of_odd_length_are_slow_as_measured(hidden: int, vocabulary: int) -> None:
    """The head's products on an H100, forward and backward together, as ``benchmarks/gpu_rates.json`` has them. Kernels of
    systems that pad their matrices are not slower for an odd vocabulary.
    """
    measured = json.loads((BENCHMARKS / "gpu_rates.json").read_text())["alignment"]
    ahead, back = (measured[f"{hidden} x {vocabulary}, {which}"] for which in ("forward", "backward"))
    workload = Workload("head", hidden, 4, hidden // 64, vocabulary, 1024, 8, kernels=Kernels.EAGER)
    fused = replace(workload, kernels=Kernels.FUSED)
    found, padded, aligned = map(head_rate, (workload, fused, replace(fused, vocabulary_size=50264)))
    assert found == pytest.approx(3 / (1 / ahead + 2 / back), rel=0.1)
    assert padded >= found
    assert padded == pytest.approx(aligned, rel=0.01)


def head_rate(workload: Workload) -> float:
    """TFLOP/s of the head on an H100."""
    head = analytic_profile(workload, load_hardware("h100-80gb-xeon96")).units[-1]
    flops = 6 * workload.tokens * workload.hidden_size * workload.vocabulary_size
    return flops / (head.forward_seconds + head.backward_seconds) / 1e12


def test_few_tokens_are_inefficient() -> None:
    """Efficiency rises with the tokens of an iteration."""
    shares = [
        efficiency(analytic_profile(named_workload("gpt-2b", batch_size=1, sequence_length=s), A100)) for s in (16, 128, 1024)
    ]
    assert shares == sorted(shares)
    assert shares[0] < 0.5 * shares[-1]


def test_forward_of_the_calibration_run() -> None:
    """Deep Optimizer States logs (A100-40, 32 x 4096, batch 4 x 2048, plain attention): forward takes 0.63 s within 15 %."""
    workload = Workload("log", 4096, 32, 32, 32000, 2048, 4, kernels=Kernels.FUSED_SOFTMAX)
    profile = analytic_profile(workload, load_hardware("a100-40gb-epyc7543p"))
    forward = sum(block.forward_seconds for block in profile.units) + profile.loss.seconds
    assert forward == pytest.approx(0.63, rel=0.15)


@pytest.mark.parametrize(
    ("kernels", "forward", "backward", "scores"),
    [
        (Kernels.FUSED, 1, 4.5, 0),
        (Kernels.LEAN, 5, 8.5, 0),
        (Kernels.FUSED_SOFTMAX, 1, 4.5, 1),
        (Kernels.EAGER, 2, 7.5, 1),
        (Kernels.EAGER_FLASH, 2, 7.5, 0),
    ],
)
def test_a_block_needs_workspace_for_some_hidden_tensors(kernels: Kernels, forward: int, backward: float, scores: int) -> None:
    """Beside its output, and in backward beside two gradients, some tensors of hidden states and some of scores."""
    b, s, h, a = 4, 512, 1024, 16
    block = analytic_profile(Workload("x", h, 2, a, 1000, s, b, kernels=kernels), A100).units[1]
    assert block.forward_workspace_bytes == forward * 2 * b * s * h
    assert block.backward_workspace_bytes == backward * 2 * b * s * h + scores * 2 * b * a * s * s


def test_activations_follow_korthikanti() -> None:
    """A 16-bit block of fused kernels keeps 34 b s h + 5 b s^2 a bytes; FlashAttention keeps its output for the scores."""
    workload = Workload("x", 1024, 2, 16, sequence_length=512, batch_size=4)
    b, s, h, a = 4, 512, 1024, 16
    flash = analytic_profile(workload, A100).units[1]
    plain = analytic_profile(replace(workload, kernels=Kernels.FUSED_SOFTMAX), A100).units[1]
    assert plain.activation_bytes == 34 * b * s * h + 5 * b * s * s * a
    assert flash.activation_bytes == 34 * b * s * h + 2 * b * s * h
    assert flash.input_bytes == plain.input_bytes == 2 * b * s * h


@given(strategies.workloads(), strategies.hardware())
def test_sublayers_add_up_to_their_block(workload: Workload, node: Hardware) -> None:
    """Attention and MLP have the block's parameters and keep its bytes, and no pass is quicker in parts than as a whole."""
    workload = replace(workload, training=replace(workload.training, last_blocks=None))  # so that blocks are alike
    lora = workload.training.lora
    if lora is not None and lora.targets in (("attention",), ("mlp",)):  # a sublayer without adapters has no gradients at all
        workload = replace(workload, training=replace(workload.training, lora=replace(lora, base_gradients=False)))
    (block,) = {
        u for u in analytic_profile(replace(workload, units=Units.BLOCK), node).units if u.role is BlockRole.TRANSFORMER
    }
    profile = analytic_profile(replace(workload, units=Units.SUBLAYER), node)
    inner = profile.units[1:-1]
    assert [unit.role for unit in inner] == [BlockRole.ATTENTION, BlockRole.MLP] * workload.transformer_blocks
    assert profile.workload.parameters == workload.parameters
    attention, mlp = inner[:2]
    assert attention.parameters + mlp.parameters == block.parameters
    assert attention.activation_bytes + mlp.activation_bytes == block.activation_bytes
    assert attention.input_bytes == mlp.input_bytes == block.input_bytes
    # A part may be bound by launching its kernels, or by instructions, where the whole is not.
    bound = node.cpu.launch_seconds > 0 or workload.kernels in (Kernels.EAGER, Kernels.EAGER_FLASH)
    for time in ("forward_seconds", "backward_seconds"):
        parts, whole = getattr(attention, time) + getattr(mlp, time), getattr(block, time)
        assert parts >= whole * (1 - 1e-9)
        assert bound or parts == pytest.approx(whole)
    # One more kernel for the other tensor.
    more = attention.gpu_update_seconds + mlp.gpu_update_seconds - block.gpu_update_seconds
    assert more == pytest.approx(node.gpu.kernel_overhead_seconds, abs=1e-9 * block.gpu_update_seconds)


@pytest.mark.parametrize("node", preset_names())
@pytest.mark.parametrize("kernels", list(GPT2_KERNELS))
def test_sublayers_of_large_models_take_as_long_as_their_block(node: str, kernels: Kernels) -> None:
    """On every preset the passes of attention and MLP last together exactly as long as those of the block."""
    workload, hardware = named_workload("gpt-4b", kernels=kernels), load_hardware(node)
    whole = analytic_profile(workload, hardware).units[1]
    attention, mlp = analytic_profile(replace(workload, units=Units.SUBLAYER), hardware).units[1:3]
    assert attention.forward_seconds + mlp.forward_seconds == pytest.approx(whole.forward_seconds, rel=1e-12)
    assert attention.backward_seconds + mlp.backward_seconds == pytest.approx(whole.backward_seconds, rel=1e-12)


def test_selective_recomputation_follows_korthikanti() -> None:
    """With scores in memory a block keeps 34 b s h of its 34 b s h + 5 b s^2 a bytes, and computes no linear layer again."""
    workload = Workload("x", 1024, 2, 16, sequence_length=512, batch_size=4, kernels=Kernels.FUSED_SOFTMAX)
    block = analytic_profile(workload, A100).units[1]
    assert block.activation_bytes - block.bytes_of(block.selected) == 34 * 4 * 512 * 1024
    longer = analytic_profile(replace(workload, hidden_size=2048, heads=16), A100).units[1]  # twice the width of a head
    assert longer.again_seconds(longer.selected) < 2 * block.again_seconds(block.selected)
    assert longer.forward_seconds > 2 * block.forward_seconds


@pytest.mark.parametrize("node", preset_names())
@pytest.mark.parametrize("kernels", list(GPT2_KERNELS))
@pytest.mark.parametrize("units", list(Units))
def test_selective_recomputation_saves_more_per_second_than_all_of_it(units: Units, kernels: Kernels, node: str) -> None:
    """On every preset what is selected costs less time for each byte that it saves than a whole forward does."""
    profile = analytic_profile(named_workload("gpt-4b", kernels=kernels, units=units), load_hardware(node))
    assert (profile.units[1].selected == ()) is (kernels is Kernels.LEAN)
    for block in profile.units[1:-1] if kernels is not Kernels.LEAN else ():
        saved, seconds = block.bytes_of(block.selected), block.again_seconds(block.selected)
        assert 0 < seconds < block.forward_seconds
        assert saved / seconds > 1.1 * block.kept_bytes / block.forward_seconds
    assert profile.units[0].selected == ()
    assert profile.units[-1].selected == ()


@pytest.mark.parametrize("node", preset_names())
@pytest.mark.parametrize("precision", list(Precision))
def test_every_preset_gives_positive_times(node: str, precision: Precision) -> None:
    """On every node and in every precision each block takes time, backward longer than forward."""
    profile = analytic_profile(named_workload("gpt-2b", precision=precision, batch_size=1), load_hardware(node))
    for block in profile.units:
        assert 0 < block.forward_seconds < block.backward_seconds
        assert block.gpu_update_seconds > 0
        assert block.input_bytes <= block.activation_bytes


def test_fp32_is_slower_and_larger() -> None:
    """fp32 runs at the fp32 peak and keeps twice the elements."""
    half, full = (analytic_profile(named_workload("gpt-2b", precision=p), A100) for p in (Precision.BF16, Precision.FP32))
    assert full.units[1].forward_seconds > 5 * half.units[1].forward_seconds
    assert full.units[1].activation_bytes > 1.8 * half.units[1].activation_bytes
    assert full.element_bytes == 2 * half.element_bytes


def test_copies_are_latency_and_bandwidth() -> None:
    """A copy takes its latency and its bytes over the bandwidth, of pinned or of pageable memory."""
    profile = analytic_profile(named_workload("gpt-2b"), A100)
    for seconds, link in ((profile.h2d_seconds, A100.h2d), (profile.d2h_seconds, A100.d2h)):
        assert link.pageable_bandwidth is not None
        assert seconds(0) == seconds(0, pinned=False) == link.latency_seconds
        assert seconds(25.5e9) == pytest.approx(25.5e9 / link.bandwidth + link.latency_seconds)
        assert seconds(25.5e9, pinned=False) == pytest.approx(25.5e9 / link.pageable_bandwidth + link.latency_seconds)


def test_a_copy_to_new_pages_waits_for_the_kernel() -> None:
    """Page faults add their time to a copy to memory that nothing has touched, whatever the link."""
    profile = analytic_profile(named_workload("gpt-2b"), A100)
    assert profile.d2h_seconds(0, pinned=False, fresh=True) == A100.d2h.latency_seconds
    faults = profile.d2h_seconds(8e9, pinned=False, fresh=True) - profile.d2h_seconds(8e9, pinned=False)
    assert faults == pytest.approx(8e9 / FIRST_TOUCH_BANDWIDTH) == pytest.approx(4.0)


def test_a_cpu_update_is_the_traffic_of_its_kernels() -> None:
    """A CPU update takes Adam's traffic and that of the elementwise kernels, each at its rate."""
    profile, cpu = analytic_profile(named_workload("gpt-2b"), A100), A100.cpu
    assert cpu.elementwise_bandwidth is not None
    assert cpu.elementwise_bandwidth != cpu.update_bandwidth
    parameters = profile.units[1].parameters
    adam, elementwise = parameters * 28 / cpu.update_bandwidth, parameters * 14 / cpu.elementwise_bandwidth
    assert profile.cpu_update_seconds(1, 28) == pytest.approx(adam)
    assert profile.cpu_update_seconds(1, 28, 14) == pytest.approx(adam + elementwise)


def test_a_measured_cpu_update_is_taken_as_it_is() -> None:
    """Where a block's update was measured, traffic does not change it."""
    profile = analytic_profile(named_workload("gpt-2b"), A100)
    measured = replace(profile, units=tuple(replace(block, cpu_update_seconds=0.5) for block in profile.units))
    assert measured.cpu_update_seconds(1, 28, 14) == 0.5


def test_figures_that_are_left_out_are_neutral() -> None:
    """Without the optional figures 16 and 32 bit, pinned and pageable, Adam and casts have one rate, and launches are free."""
    bare = replace(
        A100,
        gpu=replace(A100.gpu, gemm_efficiency_32bit=None, multiprocessors=None),
        h2d=replace(A100.h2d, pageable_bandwidth=None),
        d2h=replace(A100.d2h, pageable_bandwidth=None),
        cpu=Cpu(A100.cpu.cores, A100.cpu.update_bandwidth),
    )
    profile = analytic_profile(named_workload("gpt-2b"), bare)
    assert profile.h2d_seconds(1e9, pinned=False) == profile.h2d_seconds(1e9)
    assert profile.d2h_seconds(1e9, pinned=False) == profile.d2h_seconds(1e9)
    assert profile.cpu_update_seconds(1, 28, 14) == pytest.approx(profile.cpu_update_seconds(1, 42))
    full = analytic_profile(named_workload("gpt-2b"), A100)
    assert all(a.forward_seconds < b.forward_seconds for a, b in zip(profile.units[1:], full.units[1:], strict=True))
    few = analytic_profile(Workload("x", 64, 1, 4, 100, 4, 1), bare).units[1].forward_seconds
    assert few < analytic_profile(Workload("x", 64, 1, 4, 100, 4, 1), A100).units[1].forward_seconds
