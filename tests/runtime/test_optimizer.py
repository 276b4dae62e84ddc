"""Updates of flat states do to the bit what the optimizers of ``torch.optim`` do for each parameter alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autohete.runtime import optimizer
from autohete.runtime.ledger import Ledger, accounting
from autohete.runtime.optimizer import UnitStates
from autohete.runtime.update_rules import UpdateSettings
from autohete.train.caller_optimizer import rule_of

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


KINDS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "adamw, fused": lambda groups: torch.optim.AdamW(groups, weight_decay=0.1, fused=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, weight_decay=0.1),
    "adamw, foreach": lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=True),
    "adam, fused": lambda groups: torch.optim.Adam(groups, weight_decay=0.1, maximize=True, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(1e-2), weight_decay=0.1, maximize=True),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, weight_decay=0.1, amsgrad=True),
    "amsgrad, foreach": lambda groups: torch.optim.Adam(groups, weight_decay=0.1, amsgrad=True, foreach=True),
    "amsgrad, fused": lambda groups: torch.optim.AdamW(groups, weight_decay=0.1, amsgrad=True, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, weight_decay=0.1),
    "sgd, fused": lambda groups: torch.optim.SGD(groups, lr=1e-2, fused=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "nesterov, fused": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
}
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "masters"),
    [*itertools.product(KINDS, [FP32, BF16], [True]), *((kind, BF16, False) for kind in list(KINDS)[:8])],
)
@settings(max_examples=30)
@given(drawn=_steps(), shares=st.lists(st.floats(0, 1), max_size=2).map(sorted))
def test_flat_states_are_exact(
    kind: str, dtype: torch.dtype, masters: bool, drawn: tuple[list[int], list[set[int]]], shares: list[float]
) -> None:
    """Whichever parameters have a gradient in which step, wherever pieces are cut, and whoever has which part of the states.

    Every other parameter is in a group of its own settings, which change from step to step. Gradients are scaled.
    """
    sizes, steps = drawn
    torch.manual_seed(0)
    flat = torch.randn(sum(sizes)).to(dtype)
    wide = FP32 if masters else dtype
    alone = [nn.Parameter(piece.to(wide, copy=True)) for piece in torch.split(flat, sizes)]
    reference = KINDS[kind]([{"params": alone[::2]}, {"params": alone[1::2], "lr": 3e-3, "weight_decay": 0.0}][: len(alone)])
    rule, groups = rule_of(reference), [place % 2 for place in range(len(sizes))]

    def updates() -> UpdateSettings:
        return UpdateSettings([rule] * 2, [dict(group) for group in reference.param_groups], masters=masters)

    with patch.dict(optimizer.PIECES, cpu=128):
        cuts = [0, *(round(share * sum(sizes)) for share in shares), sum(sizes)]
        spans = [slice(begin, end) for begin, end in pairwise(cuts)]
        parts = [UnitStates(updates(), flat[span], sizes, groups, span.start) for span in spans]
    bounds, scale = [0, *accumulate(sizes)], torch.tensor(0.7, dtype=wide)
    for step, present in enumerate(steps if kind != "nesterov, fused" else [{*range(len(sizes))}] * len(steps)):
        reference.param_groups[-1]["lr"] = 1e-3 * step
        gradients = torch.randn(sum(sizes)).to(dtype)
        for place, parameter in enumerate(alone):
            gradient = gradients[bounds[place] : bounds[place + 1]].to(wide, copy=True)
            parameter.grad = gradient.mul_(scale) if place in present else None
        reference.step()
        for states, span in zip(parts, spans, strict=True):
            pieces = [
                part.of(gradient) if place in present else None
                for place, (part, gradient) in enumerate(zip(states.parts, torch.split(gradients, sizes), strict=True))
            ]
            states.updates = updates()
            states.update(flat[span], pieces, states.scratch(), scale)
        expected = torch.cat([parameter.detach() for parameter in alone])
        assert torch.equal(flat, expected.to(dtype))
        if wide is not dtype:
            assert torch.equal(torch.cat([states.master for states in parts if states.master is not None]), expected)
        for name, found in zip(parts[0]._names, torch.cat([states.states for states in parts], 1), strict=True):
            kept = [reference.state[parameter].get(name, torch.zeros_like(parameter)) for parameter in alone]
            assert torch.equal(found, torch.cat(kept))


def test_pieces_grow_with_the_threads() -> None:
    """On a host with many cores a piece is larger, so that its operations take long beside their beginning and end."""
    pieces = []
    for threads in (1, 2, 16):
        with patch.object(torch, "get_num_threads", return_value=threads):
            states = UnitStates(UpdateSettings(masters=True), torch.zeros(3_000_000, dtype=torch.bfloat16), [3_000_000])
        pieces.append(states.scratch().numel())
    assert pieces == [256 * 1024, 256 * 1024, 8 * 256 * 1024]


def test_what_an_update_allocates_is_known() -> None:
    """No step of any kernel allocates more than is said, and a fused one nothing."""
    for kind, make in KINDS.items():
        parameter = nn.Parameter(torch.randn(5000))
        reference = make([parameter])
        with patch.dict(optimizer.PIECES, cpu=1024):
            updates = UpdateSettings([rule_of(reference)], [dict(group) for group in reference.param_groups])
            states = UnitStates(updates, parameter.detach(), [5000])
        for step in range(3):
            gradient, said, ledger = torch.randn(5000), states.temporary_bytes, Ledger("gpu")
            with accounting(ledger, "", "workspace"):
                states.update(parameter.detach(), [gradient], states.scratch())
            counts = 4 * 4  # step counts, which are no states
            assert ledger.peak_bytes <= said + counts, (kind, step)
            in_place = "fused" in kind and (step > 0 or "nesterov" not in kind)
            assert in_place == (said == 0), (kind, step)
