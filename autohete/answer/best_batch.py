"""The batch and the accumulation that train the most tokens per second, for whoever does not name any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from autohete.answer.result import NOISE
from autohete.answer.run import Run
from autohete.errors import AutoHeteError, InputError
from autohete.hardware import Hardware
from autohete.plan.policy import Verdict
from autohete.policies import parse_policy
from autohete.profile import analytic_profile
from autohete.simulate import judge_for
from autohete.workload import Workload

#: Tokens of an iteration at most, by default: what recipes for fine-tuning give an optimizer step (torchtune's and
#: LLaMA-Factory's examples have 16 to 64 sequences of 1,024 to 4,096 tokens).
ITERATION_TOKENS = 2**16


def best_batches(
    workload: Workload,
    hardware: Hardware,
    run: Run,
    most_tokens: int = ITERATION_TOKENS,
    *,
    names: Sequence[str] = ("joint:quick",),
    micro_batches: int | None = None,
) -> Workload | None:
    """Return ``workload`` with the batch and the number of micro-batches that train the most tokens per second.

    Batches are powers of two. Of each, as many micro-batches are accumulated as ``most_tokens`` allow, since more of them never
    train fewer tokens per second. Of what is as fast within :data:`NOISE`, the fewest sequences are chosen.

    Args:
        workload: its own batch and micro-batches do not matter.
        hardware: one GPU's share, less what is left to the system.
        run: works through the batches.
        most_tokens: tokens of an iteration on all GPUs.
        names: policies, of which the fastest counts.
        micro_batches: the number of micro-batches, if only the batch is open.

    Returns:
        None if nothing fits with a batch of 1.
    """
    sequences = most_tokens // (workload.sequence_length * hardware.batches)
    if sequences < 1:
        raise InputError(
            f"an iteration of at most {most_tokens:,} tokens has no sequence of {workload.sequence_length:,} for each of "
            f"{hardware.all_gpus} GPUs: allow more tokens, or give shorter sequences"
        )
    most = int(math.log2(sequences))
    shapes = [(2**power, 2 ** (most - power) if micro_batches is None else micro_batches) for power in range(most + 1)]
    calls = []
    for batch, times in shapes:
        with suppress(InputError):  # a traced model may have one batch only
            changed = replace(workload, batch_size=batch, micro_batches=times)
            calls.append(_Rate(changed, hardware, tuple(names), micro_batches is None))
    rates: list[_Found] = [found for found in run("batches", calls) if found is not None and found.best]
    if not rates:
        return None
    fastest = max(found.best for found in rates)
    enough = [
        (batch.workload.batch_size * times, -batch.workload.batch_size, replace(batch.workload, micro_batches=times))
        for batch in rates
        for times, rate in batch.tokens_per_second.items()
        if rate >= fastest * (1 - NOISE)
    ]
    return min(enough, key=lambda each: each[:2])[2]


@dataclass(frozen=True, slots=True)
class _Found:
    """Tokens per second by the number of micro-batches, with the fastest policy's plan."""

    workload: Workload
    tokens_per_second: dict[int, float]

    @property
    def best(self) -> float:
        return max(self.tokens_per_second.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class _Rate:
    """The rate of one batch under the fastest policy."""

    workload: Workload
    hardware: Hardware
    names: tuple[str, ...]
    fewer: bool

    def __call__(self) -> _Found:
        profile, best, plan = analytic_profile(self.workload, self.hardware), math.inf, None
        judge = judge_for(profile)
        for name in self.names:
            try:
                found = parse_policy(name).plan(profile, judge)
                judged = judge.estimate(found)
            except AutoHeteError:  # does not fit, or cannot plan this
                continue
            seconds = judged.seconds / self.hardware.batches
            if judged.verdict is Verdict.OK and seconds < best:
                best, plan = seconds, found
        rates: dict[int, float] = {}
        times = self.workload.micro_batches
        while plan is not None and times >= 1:
            fewer = profile if times == self.workload.micro_batches else profile.with_micro_batches(times)
            judged = judge_for(fewer).estimate(plan)
            if judged.verdict is Verdict.OK:
                tokens = fewer.workload.samples * self.workload.sequence_length * self.hardware.batches
                rates[times] = tokens / judged.seconds
            times = times // 2 if self.fewer else 0
        return _Found(self.workload, rates)
