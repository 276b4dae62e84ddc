"""The operations that the profile counts for a framework against what its modules take on one core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autohete.profile.kernels.gpt2 import IMPLEMENTATIONS
from autohete.workload import Kernels
from benchmarks import host_time

#: PyTorch says so whenever oneDNN is switched off; and transformers of what other versions lack.
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration", "ignore:`gradient_checkpointing_enable`")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT2"])
def test_a_kernel_costs_the_host_what_the_table_says(name: str) -> None:
    """Blocks of transformers take the host within a factor of 1.6 of the operations for each kernel, and more than one."""
    kernels, operations = host_time.plain(name)
    table = IMPLEMENTATIONS[Kernels.EAGER_FLASH]
    for launched, spent, counted in zip(kernels, operations, (table.host_forward, table.host_backward), strict=True):
        assert max(1, counted / 1.6) < spent / launched < counted * 1.6


@pytest.mark.slow
def test_recomputation_costs_the_host_another_forward() -> None:
    """A recomputed block's backward takes the host as much longer as a forward, and somewhat more."""
    (_, plain), (_, recomputed) = host_time.plain("Llama"), host_time.recomputed("Llama", reentrant=True)
    assert 0.7 * plain[0] < recomputed[1] - plain[1] < 2.2 * plain[0]
