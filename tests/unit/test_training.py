"""What is trained of a model: parameters, FLOPs, bytes and tasks of adapters, quantised bases and frozen blocks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from autohete.answer.levers import levers
from autohete.cli.question import Shape
from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.hardware.document import combine, read_chain
from autohete.lowering import lower
from autohete.plan import Activations
from autohete.plan.policy import Verdict
from autohete.policies import POLICIES, parse_policy
from autohete.profile import analytic_profile
from autohete.profile.profile_file import read_profile, write_profile
from autohete.report.answer_text import decisions
from autohete.report.tables import print_plan
from autohete.schedule import HOST_MEMORY, Kind, Value
from autohete.simulate import judge_for, simulate, simulate_policy
from autohete.simulate.plan_document import plan_json
from autohete.simulate.summary import answer
from autohete.train.arguments import check_profile
from autohete.workload import AttentionMask, Kernels, Precision, Units, Workload, named_workload
from autohete.workload.config import read_model
from autohete.workload.model import Activation, Architecture, Attention, Block, Mlp, Norm, Product
from autohete.workload.optimizers import Optimizer, newton_schulz, state_bytes, updates_in_backward
from autohete.workload.training import Adapters, GaLore, Lora, Training

LLAMA = read_model("llama-3.1-8b")
NODE = load_hardware("rtx4090-workstation")


def test_adapters_of_llama() -> None:
    """Adapters have ``r * (in + out)`` parameters: of Llama 3.1 8B, with its published shapes, added up by hand."""
    h, kv, width = 4096, 1024, 14336
    attention = (h + h) + 2 * (h + kv) + (h + h)
    mlp = 2 * (h + width) + (width + h)
    by_target = {"all": attention + mlp, "attention": attention, "mlp": mlp, "q_proj": h + h, "down_proj": width + h}
    for target, size in by_target.items():
        found = replace(LLAMA, training=Training(Lora(16, (target,))))
        assert found.trained_parameters == 32 * 16 * size
        assert found.parameters == LLAMA.parameters + found.trained_parameters
    assert replace(LLAMA, training=Training(Lora(16), last_blocks=4)).trained_parameters == 4 * 16 * by_target["all"]


def test_adapters_of_gpt2() -> None:
    """GPT-2 has one product for queries, keys and values, and two layers called ``c_proj``."""
    gpt = named_workload("gpt-2b")
    h, blocks = gpt.hidden_size, gpt.transformer_blocks
    found = [replace(gpt, training=Training(Lora(8, (name,)))).trained_parameters for name in ("c_attn", "c_fc", "c_proj")]
    assert found == [blocks * 8 * size for size in (h + 3 * h, h + 4 * h, (h + h) + (4 * h + h))]


def test_last_blocks() -> None:
    """The last blocks and the head are trained; of a tied head only its norm, since its matrix is the embedding's."""
    gpt = replace(named_workload("gpt-2b"), training=Training(last_blocks=3))
    h = gpt.hidden_size
    assert gpt.trained_parameters == 3 * (12 * h * h + 13 * h) + 2 * h
    untied = replace(gpt, tied_embeddings=False)
    assert untied.trained_parameters == gpt.trained_parameters + gpt.vocabulary_size * h


def test_nf4_bytes() -> None:
    """A quantised parameter takes 4 bits, 8 for each block of 64, and 32 for each 256 blocks (QLoRA, section 3)."""
    profile = analytic_profile(replace(LLAMA, training=Training(Lora(16, quantised=True))), NODE)
    block, quantised = profile.units[1], 4096 * (4096 * 2 + 1024 * 2 + 14336 * 3)
    bits = quantised * 4 + quantised // 64 * 8 + quantised // 64 // 256 * 32
    assert block.frozen_bytes == bits // 8 + 2 * 2 * 4096  # and two norms in 16 bit
    assert 3.87 < 2 * block.frozen_parameters / block.frozen_bytes < 3.88
    assert profile.units[0].frozen_bytes is None  # embeddings are not quantised


class _Adapted(nn.Module):
    """A linear layer with an adapter, or without one if the rank is 0."""

    def __init__(self, inner: int, columns: int, rank: int, *, trained: bool) -> None:
        super().__init__()
        self.base = nn.Linear(inner, columns, bias=False).requires_grad_(trained)
        self.adapter = nn.Sequential(nn.Linear(inner, rank, bias=False), nn.Linear(rank, columns, bias=False)) if rank else None

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x)
        return found if self.adapter is None else found + self.adapter(x)


class _Model(nn.Module):
    """The products of a small Llama, written out."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        h, first = w.hidden_size, w.first_trained()
        self.heads = w.heads

        def layers(unit: int) -> nn.ModuleDict:
            ranks = {layer.name: w.training.lora.rank for layer in w.adapted_layers(unit)} if w.training.lora else {}
            shapes = {layer.name: layer.shape for layer in w.linear_layers(unit)}
            trained = w.trains_base(unit)
            return nn.ModuleDict({n: _Adapted(s.inner, s.columns, ranks.get(n, 0), trained=trained) for n, s in shapes.items()})

        self.blocks = nn.ModuleList(layers(unit) for unit in range(1, w.unit_count - 1))
        self.head = nn.Linear(h, w.vocabulary_size, bias=False).requires_grad_(w.trains_base(w.unit_count - 1))
        self.first = first - 1  # the first block with backward

    def forward(self, x: Tensor) -> Tensor:
        for place, found in enumerate(self.blocks):
            block: Any = found
            if place == self.first:
                x = x.detach().requires_grad_()  # as the gradient of a norm before it, or PEFT's enable_input_require_grads
            q, k, v = (self.split(block[name](x)) for name in ("q_proj", "k_proj", "v_proj"))
            context = (q @ k.transpose(-1, -2)).softmax(-1) @ v
            x = x + block["o_proj"](context.transpose(1, 2).flatten(2))
            x = x + block["down_proj"](block["gate_proj"](x).sigmoid() * block["up_proj"](x))
        found_logits: Tensor = self.head(x)
        return found_logits

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


@pytest.mark.parametrize(
    "training",
    [
        Training(),
        Training(Lora(4)),
        Training(Lora(2, ("q_proj", "v_proj"))),
        Training(Lora(4, ("mlp",)), last_blocks=2),
        Training(last_blocks=1),
    ],
    ids=str,
)
def test_flops_are_those_that_torch_counts(training: Training) -> None:
    """FLOPs of forward and backward are PyTorch's: frozen products have input gradients only, frozen blocks below nothing."""
    block = Block(Attention(2, 2, 8), Mlp(24, Activation.SILU), Norm.RMS)
    small = Workload(
        "small", 16, 3, 2, vocabulary_size=40, sequence_length=6, batch_size=2, tied_embeddings=False,
        architecture=Architecture((block,), Norm.RMS), training=training,
    )  # fmt: skip
    model = _Model(small)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(2, 6, 16, requires_grad=model.first < 0)).sum().backward()
    assert counter.get_total_flops() == small.model_flops


def test_backward_of_frozen_products_takes_as_long_as_forward() -> None:
    """A large product with frozen weights computes one product in backward, not two."""
    trained, frozen = (analytic_profile(replace(LLAMA, training=t), NODE).units[-1] for t in (Training(), Training(Lora(8))))
    assert frozen.forward_seconds == trained.forward_seconds
    assert frozen.backward_seconds == pytest.approx(frozen.forward_seconds, rel=0.05)
    assert trained.backward_seconds == pytest.approx(2 * trained.forward_seconds, rel=0.05)


def test_quantisation_costs_time_and_saves_copies() -> None:
    """A block in NF4 takes the time to read 4 bit and write 16 longer in each pass, and its copies are smaller."""
    plain, nf4 = (analytic_profile(replace(LLAMA, training=Training(Lora(8, quantised=q))), NODE) for q in (False, True))
    gpu, quantised = NODE.gpu, 4096 * (4096 * 2 + 1024 * 2 + 14336 * 3)
    seconds = quantised * (2 + 0.515869140625) / (gpu.memory_bandwidth * gpu.memory_efficiency)
    for longer in (
        nf4.units[1].forward_seconds - plain.units[1].forward_seconds,
        nf4.units[1].backward_seconds - plain.units[1].backward_seconds,
    ):
        assert longer == pytest.approx(seconds + 7 * 3 * gpu.kernel_overhead_seconds, rel=1e-6)
    assert plain.parameter_bytes(1) > 3.8 * nf4.parameter_bytes(1)


def test_frozen_inputs_are_not_kept() -> None:
    """Without an adapter a frozen product does not keep its input, which only the gradient of its weights needs."""
    everywhere, queries, nowhere = (
        analytic_profile(replace(LLAMA, training=Training(Lora(1, targets), last)), NODE).units[-2].activation_bytes
        for targets, last in ((("all",), None), (("q_proj",), None), (("k_proj",), None))
    )
    element, tokens = 2, LLAMA.tokens
    assert everywhere - queries == element * tokens * (4096 + 14336 + 6)  # inputs of the MLP's products; results of A
    assert queries == nowhere


def test_the_default_of_adapters_is_that_of_peft_under_autocast() -> None:
    """With transformers' kernels and masters adapters are under autocast, and a base in NF4 is prepared; else plain."""
    nf4 = replace(LLAMA, training=Training(Lora(8, quantised=True)))
    assert (nf4.adapters, nf4.is_prepared, nf4.stream_bytes) == (Adapters.PLAIN, False, 2)
    eager = replace(nf4, kernels=Kernels.EAGER_FLASH)
    assert (eager.adapters, eager.is_prepared, eager.stream_bytes) == (Adapters.AUTOCAST, True, 4)
    assert eager.frozen_bytes(0) == 4 * 128256 * 4096
    without_masters = replace(eager, training=replace(eager.training, optimizer=Optimizer.ADAMW_PURE_BF16))
    assert (without_masters.adapters, without_masters.is_prepared) == (Adapters.PLAIN, False)
    assert replace(eager, training=Training(Lora(8))).is_prepared is False
    assert Shape(lora=8, qlora=True, adapters=Adapters.CAST, prepared=False).training().lora == Lora(
        8, quantised=True, adapters=Adapters.CAST, prepared=False
    )


def test_adapters_keep_copies_of_their_inputs() -> None:
    """Two layers with one input keep it once if adapters are plain, twice under autocast, twice in fp32 if it is cast."""
    targets = ("q_proj", "v_proj")
    plain, autocast, cast = (
        analytic_profile(replace(LLAMA, kernels=Kernels.EAGER_FLASH, training=Training(Lora(8, targets, adapters=each))), NODE)
        .units[1]
        .activation_bytes
        for each in (Adapters.PLAIN, Adapters.AUTOCAST, Adapters.CAST)
    )
    h, kv, tokens = 4096, 1024, LLAMA.tokens
    assert autocast - plain == 2 * tokens * h + 2 * (8 * (h + h) + 8 * (h + kv))  # and 16-bit copies of A and B
    assert cast - plain == tokens * ((2 * 4 - 2) * h + 2 * (4 - 2) * 8)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_trains_parts(policy: str) -> None:
    """Every system simulates adapters and last blocks; only units with trained parameters are updated."""
    if policy in ("zero_infinity", "mlp_offload", "flashneuron", "smart_infinity"):  # on hardware with drives
        pytest.skip("needs NVMe")
    for training in (Training(Lora(4, ("attention",))), Training(last_blocks=1)):
        small = Workload("small", 256, 4, 4, vocabulary_size=1000, sequence_length=128, batch_size=2, training=training)
        profile = analytic_profile(small, NODE)
        plan = parse_policy(policy).plan(profile, judge_for(profile))
        tasks = [task.id for task in lower(profile, plan).tasks]
        updated = {task.unit for task in tasks if task.kind in (Kind.CPU_UPDATE, Kind.GPU_UPDATE)}
        backward = {task.unit for task in tasks if task.kind is Kind.BACKWARD}
        assert updated == ({1, 2, 3, 4} if training.lora else {4, 5})
        assert backward == ({1, 2, 3, 4, 5} if training.lora else {4, 5})


def test_frozen_parameters_stream() -> None:
    """A frozen base rests on the host if its parameters do, in its own format, and without states."""
    small = replace(LLAMA, transformer_blocks=4, training=Training(Lora(16, quantised=True)))
    found = simulate(small, NODE, parse_policy("l2l"))
    block = found.profile.units[1]
    fetch = next(task for task in found.schedule.tasks if task.id.kind is Kind.PREFETCH_FORWARD)
    size = block.trained_parameters * 2 + (block.frozen_bytes or 0)
    assert [buffer.size_bytes for buffer in fetch.allocates] in ([size], [0])
    assert fetch.duration_ns == round(found.profile.h2d_seconds(size, pinned=False) * 1e9)
    resting = sum(buffer.size_bytes for buffer in found.schedule.resident if buffer.memory == HOST_MEMORY)
    assert resting < 4 * (block.frozen_bytes or 0) + 20 * small.trained_parameters + 2**20


def test_a_segment_cannot_begin_below_the_first_trained_unit() -> None:
    """A plan in which the first trained unit drops its input is refused, with the cure."""
    small = Workload("small", 64, 4, 4, sequence_length=8, batch_size=1, training=Training(last_blocks=2))
    profile = analytic_profile(small, NODE)
    plan = parse_policy("sqrt_checkpoint:segments=2").plan(profile, judge_for(profile))
    kept = (Activations.KEEP, Activations.RECOMPUTE, Activations.DROP, Activations.DROP, Activations.DROP, Activations.KEEP)
    units = tuple(replace(unit, activations=one) for unit, one in zip(plan.units, kept, strict=True))
    with pytest.raises(InputError, match=r"unit 3 drops its input.*let it keep its input"):
        lower(profile, replace(plan, units=units))


def test_a_profile_file_without_frozen_parameters_can_be_read(tmp_path: Path) -> None:
    """A file keeps how a model is trained; in one written before that could be said, all is trained."""
    profile = analytic_profile(replace(named_workload("gpt-2b"), training=Training(Lora(4, ("c_attn",)))), NODE)
    hardware = dict(combine(read_chain("rtx4090-workstation")))
    write_profile(tmp_path / "p.json", profile, hardware, {})
    found = read_profile(tmp_path / "p.json")
    assert (found.units, found.workload) == (profile.units, profile.workload)
    old = json.loads((tmp_path / "p.json").read_text())
    del old["workload"]["training"]
    for block in old["blocks"]:
        del block["frozen_parameters"], block["frozen_bytes"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    assert all(block.trained_parameters == block.parameters for block in read_profile(tmp_path / "old.json").units)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (Optimizer.ADAMW, 12 * 1000),
        (Optimizer.ADAMW_BF16, 6 * 1000),
        (Optimizer.ADAMW_PURE_BF16, 4 * 1000),
        (Optimizer.ADAMW8BIT, 4 * 1000 + 2 * 1000 + 2 * 4 * 1000 / 256),
        (Optimizer.ADAMW8BIT_PURE_BF16, 2 * 1000 + 2 * 4 * 1000 / 256),
        (Optimizer.SGD, 4 * 1000),
        (Optimizer.SGD_MOMENTUM, 8 * 1000),
        (Optimizer.ADAFACTOR, 4 * 1000 + 4 * (20 + 40) + 4 * 200),  # a row and a column; of vectors every element
        (Optimizer.ADAFACTOR_PURE_BF16, 2 * (20 + 40) + 2 * 200),
        (Optimizer.MUON, 4 * 1000 + 4 * 800 + 8 * 200),  # momentum of the matrix, AdamW for the rest
        (Optimizer.MUON_PURE_BF16, 2 * 800 + 4 * 200),
        (Optimizer.CAME, 4 * 1000 + 4 * 800 + 2 * 4 * (20 + 40) + 8 * 200),  # momentum, and two rows and columns
        (Optimizer.LOMO, 0),
        (Optimizer.ADALOMO, 4 * (20 + 40) + 4 * 200),
    ],
)
def test_state_bytes(optimizer: Optimizer, expected: float) -> None:
    """Bytes of a matrix of 20 x 40 and 200 other parameters in mixed precision; in fp32 there is no master."""
    matrix = Product(20, 40)
    assert state_bytes(optimizer, 1000, (matrix,), mixed=True) == math.ceil(expected)
    none = "pure" in optimizer or "lomo" in optimizer
    master = 2000 if optimizer is Optimizer.ADAMW_BF16 else 0 if none else 4000
    assert state_bytes(optimizer, 1000, (matrix,), mixed=False) == math.ceil(expected - master)


def test_newton_schulz_flops() -> None:
    """Five rounds on a matrix take ``20 r^2 c + 10 r^3`` FLOPs, r being its smaller side."""
    for matrix in (Product(20, 40), Product(40, 20)):
        assert sum(2 * a * b * c for a, b, c in newton_schulz(matrix)) == 20 * 20**2 * 40 + 10 * 20**3


def test_states_of_an_optimizer_are_resident() -> None:
    """The GPU holds what the table says, and of SGD the masters alone; updates take less the less they touch."""
    found = {}
    for optimizer in Optimizer:
        gpt = replace(named_workload("gpt-2b", batch_size=1), training=Training(optimizer=optimizer))
        profile = analytic_profile(gpt, NODE)
        schedule = lower(profile, parse_policy("resident:in_backward").plan(profile, judge_for(profile)))
        states = sum(b.size_bytes for b in schedule.resident if b.id.value is Value.OPTIMIZER_STATES)
        assert states == sum(map(profile.state_bytes, range(gpt.unit_count)))
        found[optimizer] = (states / gpt.parameters, profile.units[1].gpu_update_seconds)
    assert found[Optimizer.ADAMW][0] == 12
    assert found[Optimizer.SGD][0] == 4
    assert found[Optimizer.ADAMW8BIT][0] == pytest.approx(6.03125)
    assert found[Optimizer.ADAMW8BIT_PURE_BF16][0] == pytest.approx(2.03125)
    assert found[Optimizer.ADAMW_PURE_BF16][0] == 4
    by_seconds = [Optimizer.SGD, Optimizer.ADAMW8BIT, Optimizer.SGD_MOMENTUM, Optimizer.ADAMW, Optimizer.MUON]
    assert sorted(by_seconds, key=lambda one: found[one][1]) == by_seconds


def test_cpu_updates_and_host_memory_follow_the_optimizer() -> None:
    """ZeRO-Offload with bf16 states (DeepSpeed pull 8010): 6 bytes less per parameter on the host, and traffic of 8 less."""
    plain, small = (
        simulate(replace(named_workload("gpt-2b"), training=Training(optimizer=one)), NODE, parse_policy("zero_offload"))
        for one in (Optimizer.ADAMW, Optimizer.ADAMW_BF16)
    )
    parameters = plain.profile.workload.parameters
    assert plain.host.peak_bytes - small.host.peak_bytes == 6 * parameters
    seconds = [
        sum(task.duration_ns for task in found.schedule.tasks if task.id.kind is Kind.CPU_UPDATE) for found in (plain, small)
    ]
    assert (seconds[0] - seconds[1]) * 1e-9 == pytest.approx(8 * parameters / NODE.cpu.update_bandwidth, rel=1e-3)


@pytest.mark.parametrize(
    ("policy", "optimizer", "message"),
    [
        ("zero_offload", Optimizer.MUON, "zero_offload: .* CPU, which has no kernel for muon.*adamw.*resident"),
        ("stronghold", Optimizer.ADAMW8BIT, "stronghold: .*no kernel for adamw8bit"),
        ("fsdp2_offload", Optimizer.ADAFACTOR, "fsdp2_offload: .*no kernel for adafactor"),
        ("autohete:gpu_updates=off", Optimizer.MUON, "CPU, which has no kernel for muon"),
        ("autohete:gpu_updates=off", Optimizer.ADAMW_PURE_BF16, "no kernel for adamw_pure_bf16"),
    ],
)
def test_optimizers_without_a_cpu_kernel_are_refused(policy: str, optimizer: Optimizer, message: str) -> None:
    """A system that updates on the CPU refuses an optimizer that has no kernel there, by name and with the cure."""
    gpt = named_workload("gpt-2b", training=Training(optimizer=optimizer))
    with pytest.raises(InputError, match=message):
        simulate(gpt, NODE, parse_policy(policy))


def test_updates_measured_on_the_cpu_need_no_kernel() -> None:
    """A profile with the time of every unit's update on the CPU is of something that updates there."""
    gpt = named_workload("gpt-2b", training=Training(optimizer=Optimizer.MUON))
    profile = analytic_profile(gpt, NODE)
    measured = replace(profile, units=tuple(replace(unit, cpu_update_seconds=0.5) for unit in profile.units))
    assert simulate_policy(measured, parse_policy("zero_offload")).iteration_seconds > 0.5 * len(profile.units)
    some = replace(profile, units=(*measured.units[:-1], profile.units[-1]))
    with pytest.raises(InputError, match="no kernel for muon"):
        simulate_policy(some, parse_policy("zero_offload"))


def test_whole_matrices_are_not_shared() -> None:
    """Muon needs whole matrices: several GPUs cannot share a unit's optimizer."""
    node = load_hardware("a100-40gb-epyc7713").shared_by(2)
    gpt = named_workload("gpt-2b", training=Training(optimizer=Optimizer.MUON))
    with pytest.raises(InputError, match=r"needs whole parameters.*zero_stage"):
        simulate(gpt, node, parse_policy("resident:zero_stage=1"))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [Optimizer.ADAMW8BIT, Optimizer.MUON])
def test_autohete_plans_without_the_cpu(optimizer: Optimizer) -> None:
    """Where the CPU cannot update, AutoHete offloads parameters and recomputes, but updates everything on the GPU."""
    gpt = named_workload("gpt-2b", batch_size=4, training=Training(optimizer=optimizer))
    found = simulate(gpt, NODE, parse_policy("autohete"))
    assert found.plan.offloaded_optimizer_units == 0
    assert found.verdict is Verdict.OK


#: Those that may also update after backward.
AFTER = [optimizer for optimizer in Optimizer if not updates_in_backward(optimizer)]


@pytest.mark.parametrize("optimizer", AFTER)
def test_weights_stream_with_any_optimizer(optimizer: Optimizer) -> None:
    """Gradients take the place of weights only where there are masters to update."""
    gpt = named_workload("gpt-2b", training=Training(optimizer=optimizer))
    found = simulate(gpt, NODE, parse_policy("streamed_states:weights"))
    assert {unit.gradients_replace_parameters for unit in found.plan.units[1:-1]} == {gpt_has_masters(optimizer)}


def gpt_has_masters(optimizer: Optimizer) -> bool:
    return named_workload("gpt-2b", training=Training(optimizer=optimizer)).has_masters


@pytest.mark.parametrize("optimizer", Optimizer)
def test_an_answer_names_its_optimizer(optimizer: Optimizer) -> None:
    """The assumptions of an answer have the optimizer that was given, not the default one."""
    gpt = named_workload("gpt-2b", training=Training(optimizer=optimizer))
    summary, _ = answer(analytic_profile(gpt, NODE), parse_policy("resident:in_backward"))
    assert summary.assumptions["optimizer"] == optimizer.value


@pytest.mark.parametrize("optimizer", [Optimizer.LOMO, Optimizer.ADALOMO])
def test_fused_updates_are_in_backward(optimizer: Optimizer) -> None:
    """LOMO never has the gradients of two units: other orders, several micro-batches and clipping are refused with the cure."""
    gpt = named_workload("gpt-2b", batch_size=2, tied_embeddings=False, training=Training(optimizer=optimizer))
    found = simulate(gpt, NODE, parse_policy("resident:in_backward"))
    gradients = [
        sum(one.size_bytes for one in task.allocates if one.id.value is Value.GRADIENTS) for task in found.schedule.tasks
    ]
    freed = [task.id for task in found.schedule.tasks if any(one.id.value is Value.GRADIENTS for one in task.frees)]
    assert max(gradients) == 2 * max(unit.parameters for unit in found.profile.units)
    assert [one.kind for one in freed] == [Kind.GPU_UPDATE] * gpt.unit_count
    for changed, policy, why in (
        (gpt, "resident", "wait for its end"),
        (replace(gpt, micro_batches=2), "resident:in_backward", "several micro-batches"),
        (replace(gpt, clip_norm=1.0), "resident:in_backward", "clipped"),
        (gpt, "zero_offload", "no kernel"),
    ):
        with pytest.raises(InputError, match=f"{why}.*(adamw|in_backward)"):
            simulate(changed, NODE, parse_policy(policy))


def test_galore_projects_states() -> None:
    """A block of Llama 7B with rank 1024: states of 1024 times the larger side of each of seven layers, and a projector of 1024
    times the smaller side, in 16 bits; embedding and head have whole states.
    """
    llama = replace(read_model("llama-2-7b"), batch_size=1, sequence_length=256)
    galore = Training(optimizer=Optimizer.ADAMW8BIT_PURE_BF16, galore=GaLore(1024))
    profile = analytic_profile(replace(llama, training=galore), NODE)
    each = 2 * (1 + 4 / 256)
    states = 1024 * (4 * 4096 + 3 * 11008)
    assert profile.units[1].state_bytes == pytest.approx(each * states + 2 * 1024 * 7 * 4096 + each * 2 * 4096, abs=8)
    assert profile.units[0].state_bytes == pytest.approx(each * 32000 * 4096)
    assert profile.units[1].gpu_update_workspace_bytes == 4 * (3 * 11008 * 4096 + 4096**2)
    whole = GaLore(65_536).states_of(Product(11008, 4096))
    assert (whole.parameters, GaLore(8).projector_of(Product(20, 40)).parameters) == (11008 * 4096, 8 * 20)


def test_decompositions_of_galore_cost_their_share() -> None:
    """Half as many decompositions save half of their time, and what is left are projections; no gap is free."""
    llama = replace(read_model("llama-2-7b"), batch_size=1, sequence_length=256)
    seconds = [
        analytic_profile(replace(llama, training=Training(optimizer=Optimizer.ADAMW_PURE_BF16, galore=GaLore(1024, gap))), NODE)
        .units[1]
        .gpu_update_seconds
        for gap in (100, 200, 1_000_000)
    ]
    assert seconds[0] - seconds[2] == pytest.approx(2 * (seconds[1] - seconds[2]), rel=1e-3)
    plain = analytic_profile(replace(llama, training=Training(optimizer=Optimizer.ADAMW_PURE_BF16)), NODE)
    assert seconds[2] > plain.units[1].gpu_update_seconds


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"optimizer": Optimizer.MUON, "galore": GaLore(8)}, r"GaLore projects the gradients of adamw.*not of muon"),
        ({"galore": GaLore(8), "lora": Lora(8)}, "leave out one"),
    ],
)
def test_galore_is_refused_where_it_is_not_defined(training: dict[str, Any], message: str) -> None:
    """It projects gradients of whole matrices for AdamW; rank and gap are at least 1."""
    with pytest.raises(InputError, match=message):
        Training(**training)
    with pytest.raises(InputError, match="rank of GaLore is 0"):
        GaLore(0)
    with pytest.raises(InputError, match="every 0 updates"):
        GaLore(8, 0)


def test_levers_keep_galore() -> None:
    """Every lever of a training with GaLore is a training: with another optimizer that it projects, and without adapters."""
    gpt = named_workload("gpt-2b", training=Training(galore=GaLore(64)))
    found = [lever.pulled(gpt).training for lever in levers(gpt)]
    assert {training.galore for training in found} == {GaLore(64)}
    assert {training.optimizer for training in found} >= {Optimizer.ADAMW, Optimizer.ADAMW8BIT, Optimizer.ADAMW_PURE_BF16}


def test_options_of_galore() -> None:
    """A rank alone means a decomposition every 200 updates, and a gap without a rank is refused."""
    assert Shape(galore=64).training() == Training(galore=GaLore(64, 200))
    assert Shape(galore=64, galore_gap=500, optimizer="adamw8bit").training().galore == GaLore(64, 500)
    with pytest.raises(InputError, match=r"--galore-gap describes GaLore.*--galore 1024"):
        Shape(galore_gap=500).changes()


def test_projected_states_stay_whole_and_on_the_gpu() -> None:
    """The CPU has no kernel for them, and several GPUs cannot share them."""
    gpt = named_workload("gpt-2b", training=Training(galore=GaLore(128)))
    with pytest.raises(InputError, match="no kernel for adamw with GaLore"):
        simulate(gpt, NODE, parse_policy("zero_offload"))
    with pytest.raises(InputError, match="adamw with GaLore needs whole parameters"):
        simulate(gpt, load_hardware("a100-40gb-epyc7713").shared_by(2), parse_policy("resident:zero_stage=1"))


def test_fp8_halves_the_time_of_large_products() -> None:
    """On an H100 the products of blocks take half as long, less their casts; two 8-bit copies of their weights are kept, and
    inputs in 8 bits instead of 16. The head's products stay.
    """
    node, wide = load_hardware("h100-pcie5"), replace(LLAMA, batch_size=4, sequence_length=4096)
    plain, fp8 = (analytic_profile(replace(wide, training=Training(fp8=one)), node) for one in (False, True))
    assert 0.5 < fp8.units[1].forward_seconds / plain.units[1].forward_seconds < 0.75
    assert 0.5 < fp8.units[1].backward_seconds / plain.units[1].backward_seconds < 0.75
    weights, h, m = 4096 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 14336, 4096, 14336
    inputs = wide.tokens * ((3 * h + m) - 2 * (2 * h + m))  # attention keeps its result in 16 bits in any case
    assert fp8.units[1].activation_bytes - plain.units[1].activation_bytes == 2 * weights + inputs
    assert fp8.units[-1] == plain.units[-1]
    assert fp8.units[0] == plain.units[0]


@pytest.mark.parametrize("workload", [LLAMA, named_workload("gpt-2b")], ids=lambda one: one.name)
@pytest.mark.parametrize("units", Units)
@pytest.mark.parametrize("kernels", [Kernels.FUSED, Kernels.EAGER_FLASH])
def test_selective_recomputation_makes_inputs_in_fp8_again(workload: Workload, units: Units, kernels: Kernels) -> None:
    """It frees fewer bytes of a block than in bf16, though some, and takes longer; both are between none and full recomputation
    in time and memory.
    """
    wide = replace(workload, batch_size=4, sequence_length=1024, units=units, kernels=kernels)
    node = load_hardware("h100-pcie5", {"gpu.memory": "400GiB"})
    freed, took = [], []
    for fp8 in (False, True):
        profile = analytic_profile(replace(wide, training=Training(fp8=fp8)), node)
        some = profile.units[1:3] if units is Units.SUBLAYER else profile.units[1:2]
        freed.append(sum(unit.bytes_of(unit.selected) for unit in some))
        took.append(sum(unit.again_seconds(unit.selected) for unit in some))
        assert all(sum(one.size_bytes for one in unit.saved) == unit.kept_bytes for unit in some)
        judge = judge_for(profile)
        none, selective, full = (
            judge(parse_policy(f"resident:checkpointing={one}").plan(profile, judge)) for one in ("none", "selective", "full")
        )
        assert none.seconds < selective.seconds < full.seconds
        assert none.peaks["gpu"] > selective.peaks["gpu"] > full.peaks["gpu"]
    assert 0 < freed[1] < freed[0]
    assert took[1] > took[0]


def test_inputs_in_fp8_are_cast_again_once_for_each_copy() -> None:
    """Fused, the products of a Llama keep one copy of the result of each norm and of the activation; by kernels, queries, keys
    and values have one each, and gate and up. A cast moves four bytes of an element, and is a kernel; instructions limit some
    kernels a little.
    """
    node, h, m = load_hardware("h100-pcie5"), 4096, 14336
    wide = replace(LLAMA, batch_size=4, sequence_length=1024)
    for kernels, elements, casts in ((Kernels.FUSED, 2 * h + m, 3), (Kernels.EAGER_FLASH, 5 * h + m, 6)):
        plain, fp8 = (
            analytic_profile(replace(wide, kernels=kernels, training=Training(fp8=one)), node).units[1] for one in (False, True)
        )
        assert fp8.bytes_of(fp8.selected) == wide.tokens * elements
        traffic = 4 * wide.tokens * elements / (node.gpu.memory_bandwidth * node.gpu.memory_efficiency)
        more = sum((one.seconds or 0) * sign for unit, sign in ((fp8, 1), (plain, -1)) for one in unit.saved if one.selective)
        assert more == pytest.approx(traffic + casts * node.gpu.kernel_overhead_seconds, rel=1e-3)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("adapters", Adapters)
@pytest.mark.parametrize("kernels", [Kernels.FUSED, Kernels.EAGER_FLASH])
@pytest.mark.parametrize("units", Units)
@pytest.mark.parametrize("workload", [LLAMA, named_workload("gpt-2b")], ids=lambda one: one.name)
def test_selective_recomputation_makes_inputs_of_adapters_again(
    workload: Workload, units: Units, kernels: Kernels, adapters: Adapters, quantised: bool
) -> None:
    """However adapters are held, it frees something of a block and costs time; full recomputation does both more."""
    training = Training(Lora(16, adapters=adapters, quantised=quantised))
    wide = replace(workload, batch_size=4, sequence_length=1024, units=units, kernels=kernels, training=training)
    profile = analytic_profile(wide, load_hardware("h100-pcie5", {"gpu.memory": "400GiB"}))
    assert all(sum(one.size_bytes for one in unit.saved) == unit.kept_bytes for unit in profile.units[1:-1])
    judge = judge_for(profile)
    none, selective, full = (
        judge(parse_policy(f"resident:checkpointing={one}").plan(profile, judge)) for one in ("none", "selective", "full")
    )
    assert none.seconds < selective.seconds < full.seconds
    assert none.peaks["gpu"] > selective.peaks["gpu"] > full.peaks["gpu"]


@pytest.mark.parametrize(
    ("lora", "element_bytes", "traffic", "kernels"),
    [
        (Lora(16, adapters=Adapters.CAST), 4, 6, 1),
        (Lora(16, adapters=Adapters.AUTOCAST), 2, 12, 2),
        (Lora(16, adapters=Adapters.AUTOCAST, quantised=True), 2, 6, 1),
        (Lora(16, ("q_proj", "v_proj"), adapters=Adapters.CAST), 4, 6, 1),
    ],
)
def test_inputs_of_adapters_are_cast_again_once_for_each_layer(
    lora: Lora, element_bytes: int, traffic: int, kernels: int
) -> None:
    """Of a Llama three layers with an adapter have the result of a norm as input, two that of the other, one that of the
    activation; to fp32 a copy is cast once, under autocast twice, or once from fp32. Where the stream is in fp32, norms cast
    nothing (2 x 6 bytes of an element each) and access 2 x 2 bytes more, and activations 5 x 2.
    """
    node, h, m = load_hardware("h100-pcie5"), 4096, 14336
    copies, elements = (6, 5 * h + m) if lora.targets == ("all",) else (2, 2 * h)
    wide = replace(LLAMA, batch_size=4, sequence_length=1024, kernels=Kernels.EAGER_FLASH)
    cast, plain = (
        analytic_profile(replace(wide, training=Training(each)), node).units[1]
        for each in (lora, replace(lora, adapters=Adapters.PLAIN))
    )
    assert cast.bytes_of(cast.selected) == wide.tokens * elements * element_bytes
    wider = (10 * m - 2 * (12 - 4) * h) * lora.quantised
    seconds = wide.tokens * (traffic * elements + wider) / (node.gpu.memory_bandwidth * node.gpu.memory_efficiency)
    more = sum((one.seconds or 0) * sign for unit, sign in ((cast, 1), (plain, -1)) for one in unit.saved if one.selective)
    assert more == pytest.approx(seconds + copies * kernels * node.gpu.kernel_overhead_seconds, rel=1e-3)


def test_fp8_needs_its_figure() -> None:
    """Hardware without a rate for 8 bit is refused, with the key; so is fp32."""
    with pytest.raises(InputError, match=r"a100-40gb-epyc7713 has no rate for them: give it the figure gpu\.peak_8bit"):
        analytic_profile(replace(LLAMA, training=Training(fp8=True)), load_hardware("a100-40gb-epyc7713"))
    with pytest.raises(InputError, match="precision is fp32: train in bf16"):
        replace(LLAMA, precision=Precision.FP32, training=Training(fp8=True))
    asked = Shape(precision="fp8", lora=4).workload(None, "llama-3.1-8b")
    assert (asked.precision, asked.training) == (Precision.BF16, Training(Lora(4), fp8=True))


def test_documents_save_attention_alone() -> None:
    """Packed documents of a quarter of the sequence take a quarter of the FLOPs of the products without weights."""
    whole = replace(LLAMA, sequence_length=8192)
    packed = replace(whole, document_length=2048)
    attention = 32 * 4 * 4096 * 8192 * whole.tokens  # scores, and their product with the values: 4 s h for each token
    assert whole.forward_flops - packed.forward_flops == attention * 3 // 4
    assert whole.model_flops - packed.model_flops == 3 * attention * 3 // 4
    assert replace(whole, document_length=8192).model_flops == whole.model_flops
    times = [analytic_profile(one, NODE).units[1] for one in (whole, packed)]
    assert times[0].forward_seconds > times[1].forward_seconds
    assert times[0].activation_bytes == times[1].activation_bytes


def test_a_window_is_not_widened_by_documents() -> None:
    """Sliding-window attention within a document sees at most the window, and at most the document."""
    block = Block(Attention(2, 2, 8, window=16), Mlp(24, Activation.SILU), Norm.RMS)
    packed = [
        Workload(
            "small", 16, 1, 2, vocabulary_size=40, sequence_length=64, batch_size=1,
            architecture=Architecture((block,), Norm.RMS), document_length=length,
        )
        for length in (8, 16, 32)
    ]  # fmt: skip
    assert packed[1].forward_flops - packed[0].forward_flops == 64 * 4 * 8 * 16
    assert packed[2].forward_flops == packed[1].forward_flops


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(qlora=True), "--qlora describes adapters.*--lora 16"),
        (Shape(lora_targets="all"), "--lora-targets describes adapters"),
        (Shape(adapters=Adapters.CAST), "--adapters describes adapters"),
        (Shape(lora=8, prepared=True), "prepared for training with a base in NF4, under autocast; make it quantised"),
        (
            Shape(lora=8, qlora=True, prepared=True, kernels=Kernels.FUSED),
            "under autocast; make it quantised with adapters autocast",
        ),
        (Shape(lora=8, adapters=Adapters.PLAIN, precision="fp32"), "in fp32 nothing is cast.*train in bf16"),
        (Shape(lora=0), "rank of LoRA is 0"),
        (Shape(lora=8, lora_targets="q_projj"), "unknown target of LoRA 'q_projj'.*did you mean 'q_proj'"),
        (Shape(lora=8, lora_targets="q_proj,q_proj"), "each once"),
        (Shape(lora=8, lora_targets=""), "unknown target of LoRA ''"),
        (Shape(sample_lengths="5,x"), "--sample-lengths is '5,x': give whole numbers with commas between, such as 50"),
        (Shape(sample_lengths=""), "--sample-lengths is '': give whole numbers"),
        (Shape(sample_lengths="0,9"), "sample_lengths has 0: give whole numbers from 1 to the 1024 tokens"),
        (Shape(sample_lengths="7,1025"), "sample_lengths has 1025: give whole numbers from 1 to the 1024 tokens"),
        (
            Shape(sample_lengths="7", document_length=64),
            "documents have one: leave document_length or sample_lengths",
        ),
        (Shape(document_length=2000), "document_length is 2000.*1024 tokens"),
        (
            Shape(document_length=64, kernels=Kernels.EAGER),
            "kernels eager compute scores.*documents save nothing: use fused, lean or eager_flash",
        ),
        (
            Shape(attention_mask=AttentionMask.BOOL),
            "kernels is fused, but attention_mask bool.*use eager_flash",
        ),
        (Shape(train_last=0), "last 0 blocks"),
        (Shape(optimizer="adamw_bf16", precision="fp32"), "adamw_bf16 is for parameters in bf16, but precision is fp32.*bf16"),
        (Shape(optimizer="adamw_pure_bf16", precision="fp16"), "adamw_pure_bf16 is for parameters in bf16.*train in bf16"),
        (Shape(train_last=33), "last 33 blocks are to be trained, but there are 32"),
    ],
)
def test_refusals(shape: Shape, message: str) -> None:
    """What cannot be trained is refused, with the value and the cure."""
    with pytest.raises(InputError, match=message):
        shape.workload(None, "llama-3.1-8b")


@pytest.mark.parametrize("kernels", [Kernels.FUSED_NORMS, Kernels.LIGER])
def test_blocks_of_gpt2_have_no_rms_norms_to_fuse(kernels: Kernels) -> None:
    """So kernels that stand in for them are refused."""
    with pytest.raises(InputError, match="blocks of GPT-2 have none: use eager_flash"):
        Shape(kernels=kernels).workload("gpt-2b")


def test_the_runtime_refuses_adapters() -> None:
    """A profile with adapters is refused where a model is trained for real, with the cure."""
    profile = analytic_profile(replace(LLAMA, training=Training(Lora(4))), NODE)
    with pytest.raises(InputError, match=r"LoRA of rank 4 on all, which only the simulator has: .*requires_grad"):
        check_profile(profile)


def test_decisions_of_frozen_units_leave_out_what_they_do_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    """Frozen units have no update to say where, and below the first trained one nothing that backward needs."""
    workload = replace(named_workload("gpt-2b", transformer_blocks=4), training=Training(last_blocks=2))
    summary, found = answer(analytic_profile(workload, NODE), parse_policy("zero_offload:checkpointing=full"))
    assert found is not None
    assert decisions(found) == [
        ("0 to 2", "parameters on the GPU, frozen, without backward"),
        ("3 to 4", "recompute activations, parameters on the GPU, CPU updates"),
        ("5", "keep activations, parameters on the GPU, CPU updates"),
    ]
    assert [each["training"] for each in plan_json(summary, found)["decisions"]] == [
        "frozen, without backward",
        "frozen, without backward",
        "trained",
        "trained",
    ]
    assert str(summary.plan) == "2c 0p 3o of 6"
    print_plan(summary, found)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "to", "2", "-", "resident", "frozen", "-", "-"] in printed
    assert ["3", "to", "4", "recompute", "resident", "cpu", "-", "-"] in printed


def test_foreach_kernels_hold_the_root_of_all_second_moments() -> None:
    """After backward one call updates all, so the peak of a small batch is that of the update, whatever the batch."""
    mistral = named_workload(
        "gpt-2b", precision=Precision.BF16, batch_size=1, training=Training(optimizer=Optimizer.ADAMW_PURE_BF16)
    )
    foreach = replace(mistral, training=replace(mistral.training, foreach=True))
    fused, listed, in_backward = (
        simulate(each, NODE, parse_policy(name))
        for each, name in (
            (mistral, "resident:checkpointing=full"),
            (foreach, "resident:checkpointing=full"),
            (foreach, "resident:checkpointing=full,in_backward"),
        )
    )
    parameters = sum(unit.parameters for unit in listed.profile.units)
    assert listed.gpu.peak_bytes == 10 * parameters  # parameters, gradients, two moments and the root, of 2 bytes each
    assert fused.gpu.peak_bytes < listed.gpu.peak_bytes
    assert in_backward.gpu.peak_bytes < listed.gpu.peak_bytes
    longest = max(range(len(fused.profile.units)), key=lambda unit: fused.profile.units[unit].parameters)
    seconds = [each.profile.units[longest].gpu_update_seconds for each in (fused, listed)]
    assert seconds[1] / seconds[0] == pytest.approx(20 / 7, rel=0.01)


def test_foreach_kernels_are_those_of_adamw() -> None:
    """Other optimizers are refused, and levers leave them out."""
    with pytest.raises(InputError, match="foreach kernels are modelled for adamw and adamw_pure_bf16, not for muon"):
        Training(optimizer=Optimizer.MUON, foreach=True)
    gpt = named_workload("gpt-2b", precision=Precision.BF16, training=Training(foreach=True))
    found = {lever.pulled(gpt).training.optimizer for lever in levers(gpt)}
    assert found == {Optimizer.ADAMW, Optimizer.ADAMW_PURE_BF16}
    assert Shape(foreach=True).training() == Training(foreach=True)
