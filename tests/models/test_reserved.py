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

from autohete.analysis.allocator import CachingAllocator, Piece  # noqa: E402
from autohete.hardware import load_hardware  # noqa: E402
from autohete.policies import parse_policy  # noqa: E402
from autohete.simulate import simulate  # noqa: E402
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hidden", "width", "blocks", "recomputed"), [(512, 1376, 8, False), (1024, 2816, 4, True), (1024, 2816, 12, False)]
)
def test_a_schedule_reserves_what_a_real_training_does(hidden: int, width: int, blocks: int, recomputed: bool) -> None:
    """Two steps of a Llama, by transformers with all states on the GPU, reserve as much as the schedule, within 4 %; so is what
    is allocated, within 2 %.
    """
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": blocks,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
    }
    allocator = CachingAllocator()
    with FakeTensorMode(), Storages(allocator) as storages:
        config = transformers.LlamaConfig(**sizes, attn_implementation="sdpa")
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        storages.watch(list(model.parameters()))
        states = [[torch.empty_like(one, dtype=torch.float32) for _ in range(3)] for one in model.parameters()]
        if recomputed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        tokens = torch.zeros(4, 256, dtype=torch.long)
        for _ in range(2):
            outputs = model(input_ids=tokens, labels=tokens, use_cache=False)
            outputs.loss.backward()
            del outputs
            model.zero_grad(set_to_none=True)
    assert len(states) == len(list(model.parameters()))
    workload = parse_model({"model_type": "llama", **sizes}, "small")
    workload = replace(workload, sequence_length=256, batch_size=4, kernels=Kernels.EAGER_FLASH)
    policy = parse_policy(f"resident:checkpointing={'full' if recomputed else 'none'}")
    found = simulate(workload, load_hardware("a100-40gb-epyc7713"), policy).gpu
    assert found.peak_bytes == pytest.approx(storages.peak_bytes, rel=0.02)
    assert found.reserved_bytes == pytest.approx(allocator.peak_bytes, rel=0.04)
