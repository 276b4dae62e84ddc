"""What torchtitan's selective checkpointing of operations keeps of a block, by running it, against the profile."""

from __future__ import annotations

import gc
import warnings
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from support.models import built, layers_of, small_config

from autohete.errors import InputError
from autohete.hardware import load_hardware
from autohete.plan import Activations
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.profile.costs import ALTERNATE
from autohete.simulate import judge_for, simulate
from autohete.workload import Kernels, Precision, Units, Workload
from autohete.workload.config import parse_model, read_model

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

BATCH, SEQUENCE = 2, 32
A100 = load_hardware("a100-40gb-epyc7713")


def contexts() -> Any:
    """Save the results of every second ``mm`` and of fused attention (torchtitan at 9dec370, ``parallelize_llama.py``)."""
    seen: defaultdict[bool, int] = defaultdict(int)

    def policy(ctx: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = function is torch.ops.aten.mm.default
        seen[ctx.is_recompute] += product
        attention = function is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        saved = seen[ctx.is_recompute] % 2 if product else attention
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def alive() -> dict[int, int]:
    """The sizes of the storages of all tensors but scalars."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.dim()]
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}


def workload(family: str) -> Workload:
    """A small model of that family."""
    sized = replace(parse_model(small_config(family), family), batch_size=BATCH, sequence_length=SEQUENCE)
    return replace(sized, precision=Precision.BF16, kernels=Kernels.EAGER_FLASH)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "opt"])
def test_as_many_bytes_are_kept_as_by_a_real_block(family: str) -> None:
    """Between forward and backward a block keeps its input and what the profile names: with heads that share keys, biases on
    some products or all, and joint matrices.
    """
    model = built(small_config(family), "cpu", attention="sdpa").to(torch.bfloat16).eval()
    layer, sized = layers_of(model, family)[0], workload(family)
    x = torch.randn(BATCH, SEQUENCE, sized.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    given: dict[str, Any] = {}
    if family != "opt":
        given["position_embeddings"] = model.model.rotary_emb(x, torch.arange(SEQUENCE)[None])
    before = alive()
    out = checkpoint(lambda x: layer(x, **given), x, use_reentrant=False, context_fn=contexts, preserve_rng_state=False)
    last = out[0] if isinstance(out, tuple) else out
    kept = sum(size for place, size in alive().items() if place not in (*before, last.untyped_storage().data_ptr()))
    (named,) = (one for one in analytic_profile(sized, A100).units[1].results if one.name == ALTERNATE)
    assert named.size_bytes == kept
    last.sum().backward()


def test_blocks_take_what_they_keep() -> None:
    """A recomputation leaves out what was kept: it takes as much less time, and as much more memory for each block."""
    w = replace(read_model("llama-3.2-1b"), batch_size=2, precision=Precision.BF16, kernels=Kernels.EAGER_FLASH)
    full, some = (simulate(w, A100, parse_policy(f"resident:checkpointing={how}")) for how in ("full", "alternate"))
    unit = full.profile.units[1]
    (named,) = (one for one in unit.results if one.name == ALTERNATE)
    blocks = w.transformer_blocks
    assert full.iteration_seconds - some.iteration_seconds == pytest.approx(blocks * (named.seconds or 0.0), rel=1e-6)
    assert 0 < some.gpu.peak_bytes - full.gpu.peak_bytes <= blocks * named.size_bytes
    assert {one.activations for one in some.plan.units[1:-1]} == {Activations.RECOMPUTE}


def test_sublayers_keep_what_their_block_does() -> None:
    """Products are counted from the beginning of a block, wherever it is divided."""
    whole = workload("llama")
    of_block, *_ = (one.results[-1] for one in analytic_profile(whole, A100).units[1:2])
    parts = [one.results[-1] for one in analytic_profile(replace(whole, units=Units.SUBLAYER), A100).units[1:3]]
    assert sum(one.size_bytes for one in parts) == of_block.size_bytes
    assert sum(one.seconds or 0.0 for one in parts) == pytest.approx(of_block.seconds)


def test_the_last_product_is_not_subtracted_from_a_recomputation_without_it() -> None:
    """A recomputation that stops early has no last product, though its result is kept."""
    whole = workload("llama")
    early = replace(whole, training=replace(whole.training, early_stop=True))
    lasts = [analytic_profile(one, A100).units[1].results for one in (whole, early)]
    (down,) = (one.seconds for one in lasts[0] if one.name == "mlp_2")
    assert (lasts[0][-1].seconds or 0.0) - (lasts[1][-1].seconds or 0.0) == pytest.approx(down)
    assert lasts[0][-1].size_bytes == lasts[1][-1].size_bytes


def test_blocks_of_other_parts_are_refused() -> None:
    """Experts run products that this rule does not count."""
    profile = analytic_profile(replace(read_model("mixtral-8x7b"), batch_size=1), A100)
    with pytest.raises(InputError, match="needs blocks of softmax attention and a dense MLP, without adapters"):
        parse_policy("resident:checkpointing=alternate").plan(profile, judge_for(profile))
