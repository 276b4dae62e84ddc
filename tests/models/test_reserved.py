"""What is reserved for a real training step: the sequence of allocations of transformers, at full size without memory."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from autohete.analysis.allocator import CachingAllocator, Piece, reserve  # noqa: E402
from autohete.hardware import load_hardware  # noqa: E402
from autohete.policies import parse_policy  # noqa: E402
from autohete.simulate import Simulation, simulate  # noqa: E402
from autohete.simulate.samples import tensors_of_length  # noqa: E402
from autohete.simulate.tensors import TensorSizes  # noqa: E402
from autohete.workload import Kernels  # noqa: E402
from autohete.workload.config import parse_model  # noqa: E402


class Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Allocates each storage when it is made, and frees it when it is gone."""

    def __init__(self, allocator: CachingAllocator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocator, self.alive_bytes, self.peak_bytes = allocator, 0, 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.watch([leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)])
        return made

    def watch(self, tensors: list[Tensor]) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage._cdata not in self.known and storage.nbytes():
                self.known.add(storage._cdata)
                piece = self.allocator.allocate(storage.nbytes())
                self.alive_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes(), piece)

    def gone(self, key: int, size_bytes: int, piece: Piece) -> None:
        self.known.discard(key)
        self.alive_bytes -= size_bytes
        self.allocator.free(piece)


def trained(sizes: dict[str, Any], batches: list[tuple[int, int]], *, recomputed: bool) -> Storages:
    """Train a Llama by ``transformers`` with batches of some sequences of some tokens, and AdamW as PyTorch's on the GPU."""
    storages = Storages(CachingAllocator())
    with FakeTensorMode(), storages:
        config = transformers.LlamaConfig(**sizes, attn_implementation="sdpa")
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        storages.watch(list(model.parameters()))
        masters = [torch.empty_like(one, dtype=torch.float32) for one in model.parameters()]
        moments = list[Tensor]()
        if recomputed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        for shape in batches:
            tokens = torch.zeros(*shape, dtype=torch.long)
            outputs = model(input_ids=tokens, labels=tokens, use_cache=False)
            outputs.loss.backward()
            del outputs
            moments = moments or [torch.empty_like(master) for master in masters for _ in range(2)]  # by the first step
            model.zero_grad(set_to_none=True)
    return storages


def simulated(sizes: dict[str, Any], batch_size: int, length: int, *, recomputed: bool) -> Simulation:
    """The same, with sequences of ``length`` tokens."""
    workload = parse_model({"model_type": "llama", **sizes}, "small")
    workload = replace(workload, sequence_length=length, batch_size=batch_size, kernels=Kernels.EAGER_FLASH)
    policy = parse_policy(f"resident:checkpointing={'full' if recomputed else 'none'}")
    return simulate(workload, load_hardware("a100-40gb-epyc7713"), policy)


def llama(hidden: int, width: int, blocks: int, vocabulary: int = 32000) -> dict[str, Any]:
    """The sizes of a small Llama."""
    return {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": blocks,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "width", "blocks", "recomputed"), [(512, 1376, 8, False), (1024, 2816, 4, True), (1024, 2816, 12, False)]
)
def test_a_schedule_reserves_what_a_real_training_does(hidden: int, width: int, blocks: int, recomputed: bool) -> None:
    """Two steps of a Llama, by transformers with all states on the GPU, reserve as much as the schedule, within 4 %; so is what
    is allocated, within 2 %.
    """
    sizes = llama(hidden, width, blocks)
    storages = trained(sizes, [(4, 256)] * 2, recomputed=recomputed)
    found = simulated(sizes, 4, 256, recomputed=recomputed).gpu
    assert found.peak_bytes == pytest.approx(storages.peak_bytes, rel=0.02)
    assert found.reserved_bytes == pytest.approx(storages.allocator.peak_bytes, rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocabulary", "recomputed", "lengths", "times"),
    [
        (32000, True, (256, 512, 768, 1024, 1280, 1536, 1792, 2048), 2.5),
        (32000, True, (1000, 700, 1500, 300, 1200, 1600, 200, 1900, 400, 2048), 2.3),
        (1000, False, (256, 512, 768, 1024, 1280, 1536, 1792, 2048), 1.3),
        (32000, True, (2048, 256, 1500, 700), 1.0),
    ],
)
def test_batches_of_different_lengths_reserve_more(
    vocabulary: int, recomputed: bool, lengths: tuple[int, ...], times: float
) -> None:
    """Blocks of shorter batches are too small for longer ones, so that rising lengths reserve ``times`` what is allocated, and
    what the real sequence of allocations reserves, within 6 %.
    """
    sizes = llama(1024, 2816, 4, vocabulary)
    storages = trained(sizes, [(2, length) for length in lengths], recomputed=recomputed)
    found = simulated(sizes, 2, max(lengths), recomputed=recomputed)
    batches = [tensors_of_length(found.profile, found.plan, length) for length in lengths]
    reserved = reserve(found.trace, "gpu", TensorSizes(found.profile, first_step_makes_moments=True), batches).peak_bytes
    assert reserved == pytest.approx(storages.allocator.peak_bytes, rel=0.06)
    assert reserved / found.gpu.peak_bytes == pytest.approx(times, rel=0.1)
