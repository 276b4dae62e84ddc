"""GPUs that divide each batch: tensors, what lies between them along the sequence, and the sequence itself."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command import autohete

from autohete.answer.policies import default_policies
from autohete.errors import InputError
from autohete.hardware import ContextExchange, Interconnect, Parallelism, load_hardware, parse_parallel
from autohete.policies import parse_policy, search_space
from autohete.profile import Profile, analytic_profile
from autohete.simulate import simulate
from autohete.workload import Kernels, Precision, Units, Workload, named_workload
from autohete.workload.config import read_model
from autohete.workload.model import Experts
from autohete.workload.optimizers import Optimizer
from autohete.workload.training import Training

#: Eight GPUs in a node, and many nodes.
NODE = load_hardware(
    "a100-40gb-epyc7713", {"interconnect.gpus": "8", "interconnect.network_bandwidth": "200GB/s", "gpu.memory": "80GiB"}
)
FREE = replace(NODE, interconnect=Interconnect(8, math.inf, 0.0))
TENSOR = st.sampled_from((2, 4, 8))
_HEADS = ContextExchange.ALL_TO_ALL
MUON = Training(optimizer=Optimizer.MUON)


def gpt(**changes: object) -> Workload:
    shape: dict[str, object] = {"sequence_length": 2048, "batch_size": 4, "kernels": Kernels.FUSED_SOFTMAX}
    shape |= {"precision": Precision.FP16, "vocabulary_size": 51200}
    return Workload("gpt", 6144, 4, 64, **(shape | changes))  # type: ignore[arg-type]


def divided(workload: Workload, tensor: int = 1, *, sequence: bool = True, context: int = 1, expert: int = 1) -> Profile:
    parallelism = Parallelism(tensor, sequence, context, expert=expert)
    return analytic_profile(workload, NODE.shared_by(tensor * context * expert, parallelism))


@given(tensor=TENSOR, batch=st.integers(1, 4), heads=st.sampled_from((32, 64)))
def test_kept_bytes_are_those_of_korthikanti(tensor: int, batch: int, heads: int) -> None:
    """A block keeps sbh (10 + 24/t + 5as/ht) bytes with t-way tensor parallelism, and sbh/t (34 + 5as/h) with sequence
    parallelism as well (arXiv 2205.05198, equations 2 and 4).
    """
    workload = replace(gpt(batch_size=batch), heads=heads)
    s, h = workload.sequence_length, workload.hidden_size
    scores = 5 * heads * s / h
    plain, both = (divided(workload, tensor, sequence=sequence).units[1].activation_bytes for sequence in (False, True))
    assert plain == round(s * batch * h * (10 + (24 + scores) / tensor))
    assert both == round(s * batch * h * (34 + scores) / tensor)


@given(tensor=TENSOR, name=st.sampled_from(("llama-3.1-8b", "qwen3-8b", "gpt-oss-20b")))
def test_gpus_together_have_all_matrices(tensor: int, name: str) -> None:
    """Parameters of all GPUs are those of the model, and norms, routers, biases of sums and shared heads as often as they are
    repeated.
    """
    workload = replace(read_model(name), sequence_length=1024, batch_size=1)
    one, each = divided(workload), divided(workload, tensor)
    for whole, part in zip(one.units, each.units, strict=True):
        repeated = tensor * part.parameters - whole.parameters
        assert 0 <= repeated <= (tensor - 1) * 300 * workload.hidden_size + workload.hidden_size * 2 * tensor


@given(tensor=TENSOR)
def test_free_collectives_leave_the_work_divided(tensor: int) -> None:
    """Without a cost of exchange, GPUs take at least their part of the time of one, and with products that are large still less
    than twice that.
    """
    workload = gpt(kernels=Kernels.FUSED)
    alone = analytic_profile(workload, FREE)
    parts = analytic_profile(workload, FREE.shared_by(tensor, Parallelism(tensor)))
    for whole, part in zip(alone.units[1:-1], parts.units[1:-1], strict=True):
        for seconds, all_of_it in (
            (part.forward_seconds, whole.forward_seconds),
            (part.backward_seconds, whole.backward_seconds),
        ):
            assert all_of_it / tensor <= seconds < 2 * all_of_it / tensor


def test_a_forward_without_sequence_parallelism_waits_for_two_all_reduces() -> None:
    """The time of exchange in forward is that of two ring all-reduces of the residual stream, whichever way it is divided."""
    workload = gpt()
    join = NODE.shared_by(8, Parallelism(8)).interconnect
    assert join is not None
    stream = 2 * workload.tokens * workload.hidden_size
    expected = 2 * 2 * 7 * (join.latency_seconds + stream / 8 / join.bandwidth)
    for sequence in (False, True):
        parallelism = Parallelism(8, sequence)
        costly, free_of_it = (
            analytic_profile(workload, node.shared_by(8, parallelism)).units[1].forward_seconds for node in (NODE, FREE)
        )
        assert costly - free_of_it == pytest.approx(expected)


@given(context=st.sampled_from((2, 4, 8)))
def test_a_ring_divides_tokens_and_hides_behind_attention(context: int) -> None:
    """Each GPU keeps its part of the tokens, and with long sequences takes about its part of the time."""
    workload = replace(read_model("llama-3.1-8b"), sequence_length=65536, batch_size=1)
    alone, each = divided(workload).units[1], divided(workload, context=context).units[1]
    assert each.activation_bytes * context == alone.activation_bytes
    assert each.parameters == alone.parameters
    assert alone.forward_seconds / context <= each.forward_seconds < 1.2 * alone.forward_seconds / context


def test_a_ring_that_is_slower_than_attention_is_waited_for() -> None:
    """With short sequences each step lasts as long as the transfer of keys and values."""
    workload = replace(read_model("llama-3.1-8b"), sequence_length=8192, batch_size=1)
    slow = load_hardware("a100-40gb-epyc7713", {"interconnect.gpus": "8", "interconnect.bandwidth": "1GB/s"})
    slow, fast = (node.shared_by(4, Parallelism(context=4)) for node in (slow, FREE))
    sent = 2 * 2 * 1024 * 8192 / 4
    core = sent / 1e9 + 3.4e-6
    times = [analytic_profile(workload, node).units[1].forward_seconds for node in (slow, fast)]
    assert 2.5 * core < times[0] - times[1] < 3 * core


def test_a_group_is_planned_like_one_gpu() -> None:
    """Eight GPUs with one batch have a rank, with the policies of one GPU, an eighth of the host, and tokens of one batch."""
    workload = replace(named_workload("gpt-4b"), batch_size=8)
    hardware = NODE.shared_by(8, Parallelism(8))
    assert (hardware.gpus, hardware.all_gpus, hardware.batches) == (1, 8, 1)
    assert hardware.host.memory_bytes == NODE.host.memory_bytes // 8
    for name in ("resident", "zero_offload", "stronghold", "autohete", "patrickstar"):
        assert name in default_policies(hardware.gpus)
        simulation = simulate(workload, hardware, parse_policy(name))
        assert simulation.tokens_per_second == pytest.approx(workload.tokens / simulation.iteration_seconds)


def test_groups_share_the_network_and_sum_gradients() -> None:
    """Each GPU of a group exchanges its part of the gradients with those of other nodes, over its part of the network."""
    hardware = NODE.shared_by(16, Parallelism(8))
    assert hardware.gpus == hardware.batches == 2
    assert hardware.interconnect is not None
    assert hardware.interconnect.network_bandwidth == 25e9
    workload = named_workload("gpt-4b")
    alone, two = (
        simulate(workload, NODE.shared_by(gpus, Parallelism(8)), parse_policy("resident")).iteration_seconds for gpus in (8, 16)
    )
    assert two > alone


def test_heads_are_exchanged_for_tokens() -> None:
    """Each GPU sends queries, keys, values and results of its tokens but for its own heads, and waits for them."""
    workload = replace(read_model("llama-3.1-8b"), sequence_length=8192, batch_size=1)
    parallelism = Parallelism(context=4, exchange=ContextExchange.ALL_TO_ALL)
    slow = replace(NODE, interconnect=Interconnect(8, 1e9, 1e-6))
    times = [analytic_profile(workload, node.shared_by(4, parallelism)).units[1].backward_seconds for node in (slow, FREE)]
    assert times[0] - times[1] == pytest.approx(2e-6 + 2 * (4096 + 1024 + 1024 + 4096) * 2048 * 3 / 4 / 1e9)


MIXTURE = replace(read_model("qwen3-30b-a3b"), transformer_blocks=4, sequence_length=4096, batch_size=1)


@given(expert=st.sampled_from((2, 4, 8)))
def test_experts_are_divided_and_their_work_is_not(expert: int) -> None:
    """Each GPU has its experts, and computes as many tokens as before: those of others instead of those that it sends."""
    alone = analytic_profile(MIXTURE, FREE.shared_by(8)).units[1]
    each = analytic_profile(MIXTURE, FREE.shared_by(8, Parallelism(expert=expert))).units[1]
    experts = MIXTURE.block(1).feed_forward
    assert isinstance(experts, Experts)
    routed = experts.routed_parameters(MIXTURE.hidden_size)
    assert each.routed_parameters * expert == routed
    assert each.parameters == alone.parameters - routed + routed // expert
    assert each.activation_bytes == alone.activation_bytes
    assert each.forward_seconds <= alone.forward_seconds


def test_tokens_go_to_their_experts_and_back() -> None:
    """A pass exchanges every token with its experts twice, but for what stays; across nodes over the network."""
    size = 2 * 8 * 4096 * 2048
    bandwidth, network = 100e9, 25e9
    for gpus, expert, expected in (
        (8, 4, 1e-6 + size * 3 / 4 / bandwidth),
        (16, 16, 1e-6 + max(size * 7 / 16 / bandwidth, size * 8 / 16 * 8 / network)),
    ):
        join = Interconnect(8, bandwidth, 1e-6, network_bandwidth=network)
        slow, free = (
            analytic_profile(MIXTURE, replace(NODE, interconnect=one).shared_by(gpus, Parallelism(expert=expert))).units[1]
            for one in (join, Interconnect(8, math.inf, 0.0, network_bandwidth=math.inf))
        )
        assert slow.forward_seconds - free.forward_seconds == pytest.approx(2 * expected)


@given(expert=st.sampled_from((1, 2, 4, 8)), unit=st.sampled_from((0, 1, 5)))
def test_states_are_shared_by_the_gpus_that_have_the_parameters(expert: int, unit: int) -> None:
    """With ZeRO each GPU updates as much as without divided experts, and experts on all GPUs are not exchanged."""
    whole, each = (analytic_profile(MIXTURE, NODE.shared_by(8, Parallelism(expert=count))) for count in (1, expert))
    assert each.part_of(unit) == whole.part_of(unit)
    states = [
        simulate(MIXTURE, profile.hardware, parse_policy("resident:zero_stage=3")).gpu.holders["optimizer_states"]
        for profile in (whole, each)
    ]
    assert states[0] == states[1]
    if expert == 8:
        size = each.parameter_bytes(unit)
        dense = size - each.units[unit].routed_parameters * 2
        assert each.unit_collective_seconds(unit, size) == pytest.approx(each.collective_seconds(dense))


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        (None, None, (1, Parallelism())),
        (None, 4, (4, Parallelism())),
        ("tp=4,dp=2", None, (8, Parallelism(4))),
        ("tp=2, sp=off, cp=2", 8, (8, Parallelism(2, False, 2))),
        ("tp=2,pp=2,dp=2", None, (8, Parallelism(2, pipeline=2))),
        ("tp=2,ep=4", None, (8, Parallelism(2, expert=4))),
        ("cp=4,ep=2,comm=a2a", None, (4, Parallelism(1, True, 4, ContextExchange.ALL_TO_ALL, 2))),
    ],
)
def test_parallel_is_read(text: str | None, gpus: int | None, expected: tuple[int, Parallelism]) -> None:
    """Keys multiply to the number of GPUs, and the rest have batches of their own."""
    assert parse_parallel(text, gpus) == expected


@pytest.mark.parametrize(
    ("text", "gpus", "said"),
    [
        ("tp", None, "write it such as"),
        ("tp=0", None, "a whole number from 1 on"),
        ("tp=2,tp=2", None, "twice"),
        ("sp=maybe", None, "neither on nor off"),
        ("tp=4", 6, "a multiple of 4"),
        ("tp=2,dp=2", 8, "divides 4 GPUs"),
        ("zp=2", None, "is not understood"),
        ("tp=" + 5000 * "9", None, "whole number from 1 on, of up to 7 digits"),
        ("sp=off,cp=2", None, "there is no tp"),
        ("comm=a2a,tp=2", None, "there is no cp"),
    ],
)
def test_parallel_says_what_to_give(text: str, gpus: int | None, said: str) -> None:
    """What cannot be read is refused with the cure."""
    with pytest.raises(InputError, match=said):
        parse_parallel(text, gpus)


@pytest.mark.parametrize(
    ("workload", "parallelism", "said"),
    [
        (gpt(), Parallelism(3), "64 heads cannot be divided among 3 GPUs"),
        (gpt(), Parallelism(context=2), "use fused"),
        (gpt(), Parallelism(expert=2), "has no experts"),
        (gpt(kernels=Kernels.FUSED, sequence_length=2047), Parallelism(context=2), "2047 tokens .* multiple of 4"),
        (gpt(kernels=Kernels.FUSED, sequence_length=2050), Parallelism(context=2), "2050 tokens .* multiple of 4"),
        (gpt(sequence_length=2047), Parallelism(2), "2047 tokens .* multiple of 2 tokens, or sp=off"),
        (gpt(kernels=Kernels.FUSED), Parallelism(context=8, tensor=8, exchange=_HEADS), None),
        (gpt(kernels=Kernels.FUSED), Parallelism(context=16, tensor=8, exchange=_HEADS), "8 heads on a GPU .*comm=p2p"),
        (
            replace(read_model("llama-3.1-8b"), sequence_length=2048),
            Parallelism(context=16, exchange=_HEADS),
            "8 heads of keys",
        ),
        (replace(read_model("llama-3.1-8b"), sequence_length=2048), Parallelism(context=16), None),
    ],
)
def test_what_cannot_be_divided_is_refused(workload: Workload, parallelism: Parallelism, said: str | None) -> None:
    """Heads, widths and sequences divide evenly, also heads that are exchanged, and sequences only where attention is fused."""
    hardware = replace(NODE, interconnect=replace(NODE.interconnect, gpus=6)) if parallelism.tensor == 3 else NODE  # type: ignore[type-var]
    with nullcontext() if said is None else pytest.raises(InputError, match=said):
        analytic_profile(
            workload, hardware.shared_by(parallelism.tensor * parallelism.context * parallelism.expert, parallelism)
        )


@pytest.mark.parametrize("name", ["qwen1.5-moe-a2.7b", "gpt-oss-20b"])
@pytest.mark.parametrize("expert", [2, 4])
def test_tensors_of_a_gpu_are_of_its_experts(name: str, expert: int) -> None:
    """Those of its own experts, none of negative size, and the states of an optimizer of matrices are theirs."""
    workload = replace(read_model(name), sequence_length=1024, batch_size=1)
    part = divided(workload, expert=expert).of_rank
    for unit in range(part.unit_count):
        sizes = [one.parameters for one in part.tensors(unit)]
        assert min(sizes) > 0
        assert sum(sizes) == part.unit_parameters(unit)
    alone, each = (divided(replace(workload, training=MUON), expert=count).units[1].state_bytes or 0 for count in (1, expert))
    assert alone / expert <= each < alone / expert * 1.5


@pytest.mark.parametrize("units", Units)
@pytest.mark.parametrize("name", ["llama-3.2-1b", "gemma-2-2b", "phi-4-mini"])
def test_narrow_sublayers_have_no_less_than_no_workspace(name: str, units: Units) -> None:
    """Whatever the number of GPUs that divide tensors."""
    workload = replace(read_model(name), sequence_length=1024, batch_size=1, units=units)
    profile = divided(workload, 4 if name == "gemma-2-2b" else 8)
    assert all(min(unit.forward_workspace_bytes, unit.backward_workspace_bytes) >= 0 for unit in profile.units)


def test_groups_stay_within_a_node() -> None:
    """GPUs that divide tensors share a node."""
    with pytest.raises(InputError, match="give a divisor of 8"):
        NODE.shared_by(16, Parallelism(16))


def test_pipelines_of_groups_share_a_batch() -> None:
    """With ``pp`` pipelines have as many ranks, the others train beside, and other policies are refused."""
    hardware = NODE.shared_by(*parse_parallel("tp=2,pp=2,dp=2", None))
    workload = replace(named_workload("gpt-4b"), micro_batches=4)
    simulation = simulate(workload, hardware, parse_policy("pipeline"))
    assert (simulation.plan.ranks, hardware.gpus, hardware.all_gpus) == (2, 4, 8)
    tokens = 2 * 4 * workload.tokens
    assert simulation.tokens_per_second == pytest.approx(tokens / simulation.iteration_seconds)
    for policy, cure in (("resident", "choose a policy such as pipeline"), ("pipeline:ranks=4", "leave its ranks out")):
        with pytest.raises(InputError, match=cure):
            simulate(workload, hardware, parse_policy(policy))


def test_pipelines_leave_gpus_to_divide_sequences_and_experts() -> None:
    """Those that divide a sequence or experts compute the same units, so a pipeline has fewer ranks, not more."""
    workload = replace(read_model("llama-3.2-1b"), sequence_length=2048, batch_size=1, micro_batches=4)
    for hardware, model, ranks in (
        (NODE.shared_by(8, Parallelism(context=2)), workload, 4),
        (NODE.shared_by(8, Parallelism(context=8)), workload, 1),
        (NODE.shared_by(8, Parallelism(expert=4)), replace(MIXTURE, micro_batches=4, transformer_blocks=2), 2),
    ):
        simulation = simulate(model, hardware, parse_policy("pipeline"))
        batches = hardware.batches // ranks
        assert simulation.plan.ranks == ranks
        assert simulation.tokens_per_second == pytest.approx(4 * batches * model.tokens / simulation.iteration_seconds)
        assert len(search_space("pipeline", simulation.profile)) > 0
        with pytest.raises(InputError, match="give the pipeline fewer ranks"):
            simulate(replace(model, transformer_blocks=8), hardware, parse_policy("pipeline:ranks=8"))


def test_a_pipeline_divides_no_unit() -> None:
    """With ``pp`` alone each GPU computes whole units, as without."""
    for workload in (gpt(kernels=Kernels.FUSED), named_workload("gpt-2b")):
        assert divided(workload).units == analytic_profile(workload, NODE.shared_by(2, Parallelism(pipeline=2))).units
    assert not Parallelism(pipeline=2).divides


def test_the_command_line_divides() -> None:
    """``--parallel`` takes as many GPUs as it needs, and the title says so."""
    done = autohete(
        *["simulate", "--policy", "resident", "--workload", "gpt-2b", "--hardware", "h100-8gpu", "--parallel", "tp=4,dp=2"]
    )
    assert "8 GPUs of h100-8gpu (tp=4)" in done.stdout


@given(*[st.sampled_from((1, 2, 3, 4))] * 4)
def test_the_smallest_number_of_gpus_can_be_divided(tensor: int, context: int, expert: int, pipeline: int) -> None:
    """So can its multiples, and no GPU is left over."""
    parallelism = Parallelism(tensor, context=context, expert=expert, pipeline=pipeline)
    for times in (1, 2, 3):
        assert parallelism.ranks(times * parallelism.gpus) * tensor == times * parallelism.gpus
