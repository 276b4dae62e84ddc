"""The batch that a plan is made for where nobody names one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.answers import WORKLOAD, profile_at, site

from autohete.answer import NOISE, in_turn
from autohete.answer.best_batch import best_batches
from autohete.errors import AutoHeteError, InputError
from autohete.hardware import Hardware
from autohete.plan.policy import Verdict
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.simulate import simulate_policy
from autohete.workload import Workload

NAMES = ("resident", "zero_offload")
TOKENS = 4 * 512


def hardware(gpu_memory: str) -> Hardware:
    return profile_at(site(gpu_memory=gpu_memory)).hardware


def rate(workload: Workload, where: Hardware) -> float:
    """Tokens per second under the fastest of the policies; 0 if none fits."""
    rates = [0.0]
    for name in NAMES:
        try:
            found = simulate_policy(analytic_profile(workload, where), parse_policy(name))
        except AutoHeteError:
            continue
        if found.verdict is Verdict.OK:
            rates.append(found.tokens_per_second)
    return max(rates)


@pytest.mark.parametrize("gpu_memory", ["2500MiB", "8GiB"])
def test_no_other_batch_trains_more_tokens_per_second(gpu_memory: str) -> None:
    """Of all batches and numbers of micro-batches that are powers of two, and it has the fewest sequences of those as fast."""
    where = hardware(gpu_memory)
    best = best_batches(WORKLOAD, where, in_turn, TOKENS, names=NAMES)
    assert best is not None
    rates = {
        (batch, times): rate(replace(WORKLOAD, batch_size=batch, micro_batches=times), where)
        for batch in (1, 2, 4)
        for times in (1, 2, 4)
        if batch * times <= 4
    }
    limit = max(rates.values()) * (1 - NOISE)
    assert rates[best.batch_size, best.micro_batches] >= limit * (1 - 1e-9)
    assert best.samples == min(batch * times for (batch, times), found in rates.items() if found >= limit)


def test_a_number_of_micro_batches_that_is_given_stays() -> None:
    """Only the batch is searched for then."""
    best = best_batches(WORKLOAD, hardware("8GiB"), in_turn, TOKENS, names=NAMES, micro_batches=3)
    assert best is not None
    assert best.micro_batches == 3


def test_what_fits_with_no_batch_has_none() -> None:
    """Neither has an iteration with room for no sequence."""
    assert best_batches(WORKLOAD, hardware("1100MiB"), in_turn, TOKENS, names=("resident",)) is None
    with pytest.raises(InputError, match="allow more tokens, or give shorter sequences"):
        best_batches(WORKLOAD, hardware("8GiB"), in_turn, 511, names=NAMES)
