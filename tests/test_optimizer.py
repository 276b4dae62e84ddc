"""AdamW on flat states does to the bit what ``torch.optim.AdamW`` does for each parameter alone."""

from __future__ import annotations

from itertools import accumulate
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(drawn=_steps())
def test_flat_states_are_exact(dtype: torch.dtype, drawn: tuple[list[int], list[set[int]]]) -> None:
    """Whichever parameters have a gradient in which step, and wherever pieces are cut."""
    sizes, steps = drawn
    torch.manual_seed(0)
    flat = torch.randn(sum(sizes)).to(dtype)
    adam = Adam()
    alone = [nn.Parameter(piece.float()) for piece in torch.split(flat, sizes)]
    reference = torch.optim.AdamW(alone, lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay, fused=True)
    with patch.dict(optimizer.PIECES, cpu=128):
        states = AdamStates(adam, flat, sizes)
    bounds = [0, *accumulate(sizes)]
    for present in steps:
        gradients = torch.randn(sum(sizes)).to(dtype)
        for place, parameter in enumerate(alone):
            parameter.grad = gradients[bounds[place] : bounds[place + 1]].float() if place in present else None
        reference.step()
        pieces = [gradient if place in present else None for place, gradient in enumerate(torch.split(gradients, sizes))]
        states.update(flat, pieces, states.scratch())
        expected = torch.cat([parameter.detach() for parameter in alone])
        assert states.master is None or torch.equal(states.master, expected)
        assert torch.equal(flat, expected.to(dtype))
        for name, moment in zip(("exp_avg", "exp_avg_sq"), states.moments, strict=True):
            kept = [reference.state[parameter].get(name, torch.zeros_like(parameter)) for parameter in alone]
            assert torch.equal(moment, torch.cat(kept))
