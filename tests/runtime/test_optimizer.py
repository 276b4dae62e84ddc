"""AdamW on flat states does to the bit what ``torch.optim.AdamW`` does for each parameter alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autohete.runtime import optimizer
from autohete.runtime.optimizer import Adam, AdamStates

#: Mostly multiples of 64, between which parameters are joined; others end in the kernel's scalar part.
_SIZES = st.lists(st.one_of(st.integers(1, 6).map(lambda n: 64 * n), st.integers(1, 300)), min_size=1, max_size=6)


@st.composite
def _steps(draw: st.DrawFn) -> tuple[list[int], list[set[int]]]:
    """Sizes of parameters, and for some steps which of them have a gradient."""
    sizes = draw(_SIZES)
    places = st.sampled_from(range(len(sizes)))
    everything = st.just(set(range(len(sizes))))
    return sizes, draw(st.lists(st.one_of(everything, st.sets(places)), min_size=1, max_size=4))


@pytest.fixture(params=[1, 3], scope="module", autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """How many threads the kernel divides its work among."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(drawn=_steps(), shares=st.lists(st.floats(0, 1), max_size=2).map(sorted))
def test_flat_states_are_exact(dtype: torch.dtype, drawn: tuple[list[int], list[set[int]]], shares: list[float]) -> None:
    """Whichever parameters have a gradient in which step, wherever pieces are cut, and whoever has which part of the states."""
    sizes, steps = drawn
    torch.manual_seed(0)
    flat = torch.randn(sum(sizes)).to(dtype)
    adam = Adam()
    alone = [nn.Parameter(piece.float()) for piece in torch.split(flat, sizes)]
    reference = torch.optim.AdamW(alone, lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay, fused=True)
    with patch.dict(optimizer.PIECES, cpu=128):
        cuts = [0, *(round(share * sum(sizes)) for share in shares), sum(sizes)]
        spans = [slice(begin, end) for begin, end in pairwise(cuts)]
        parts = [AdamStates(adam, flat[span], sizes, span.start) for span in spans]
    bounds = [0, *accumulate(sizes)]
    for present in steps:
        gradients = torch.randn(sum(sizes)).to(dtype)
        for place, parameter in enumerate(alone):
            parameter.grad = gradients[bounds[place] : bounds[place + 1]].float() if place in present else None
        reference.step()
        for states, span in zip(parts, spans, strict=True):
            pieces = [
                part.of(gradient) if place in present else None
                for place, (part, gradient) in enumerate(zip(states.parts, torch.split(gradients, sizes), strict=True))
            ]
            states.update(flat[span], pieces, states.scratch())
        expected = torch.cat([parameter.detach() for parameter in alone])
        assert torch.equal(flat, expected.to(dtype))
        if dtype is not torch.float32:
            assert torch.equal(torch.cat([states.master for states in parts if states.master is not None]), expected)
        for name, moment in zip(("exp_avg", "exp_avg_sq"), torch.cat([states.moments for states in parts], 1), strict=True):
            kept = [reference.state[parameter].get(name, torch.zeros_like(parameter)) for parameter in alone]
            assert torch.equal(moment, torch.cat(kept))
