"""What the host does for a recomputed block, counted in calls: times of the same are in ``benchmarks/host_time.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import host_time

#: PyTorch says so whenever oneDNN is switched off; and transformers of what other versions lack.
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration", "ignore:`gradient_checkpointing_enable`")


def calls(run: Callable[[], Any]) -> tuple[int, Any]:
    """How many functions of Python and C ``run`` calls, and what it returns."""
    count = 0

    def counts(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counts)
    try:
        returned = run()
    finally:
        sys.setprofile(None)
    return count, returned


def passes(model: Any) -> tuple[int, int]:
    """The calls of a forward and of its backward, once everything is warm."""
    for _ in range(2):
        host_time.loss_of(model).backward()
    forward, loss = calls(lambda: host_time.loss_of(model))
    return forward, calls(loss.backward)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT2"])
def test_recomputation_costs_the_host_another_forward(name: str) -> None:
    """The backward of recomputed blocks calls as many functions more as a forward does, and somewhat more."""
    model: Any = host_time.model(name)
    forward, backward = passes(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    assert forward < passes(model)[1] - backward < 2 * forward
