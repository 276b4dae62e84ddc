"""From the program's optimum to the best plan: the program knows bounds, the judge knows time and memory.

The program counts the memory that any timing needs, so it is asked again with less memory when the judge finds that its
plan needs more; its time is a bound, so near its optimum there can be a better plan. The walk tries the plans around the
best one so far, nearest first, as long as that pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from autohete.planner.steps import Counts
from autohete.policy import Judgement, Verdict

#: A plan this close to the program's bound needs no further search: with the program's own gap, within one percent.
_PROVEN = 0.009
#: Judgements to spend, times blocks: small models have coarse choices and cheap judgements, large ones the contrary.
_EFFORT = 1000
_REACH = 2
_FAR = (3, 5, 8, 13, 21, 34, 55, 89, 144)


def polish(starts: Iterator[tuple[Counts, float]], blocks: int, judge: Callable[[Counts], Judgement]) -> Counts | None:
    """The best plan near the program's answers; None if nothing fits.

    Args:
        starts: answers of the program with the bound each came with, each asked for more slack than the one before. Only as
            many are drawn as it takes for one to fit.
        blocks: of the model.
        judge: time and memory of given counts.
    """
    judged: dict[Counts, tuple[int, float]] = {}

    def cost(counts: Counts) -> tuple[int, float]:
        """Bytes over capacity first, then seconds."""
        if counts not in judged:
            found = judge(counts)
            over = 0 if found.verdict is Verdict.OK else max(found.gpu_peak_bytes, found.host_peak_bytes)
            judged[counts] = (over, found.seconds)
        return judged[counts]

    bound = 0.0
    for start, value in starts:
        bound = bound or value
        if cost(start)[0] == 0:
            break
    if not judged:
        return None
    budget = max(_EFFORT // blocks, 10)
    best, along = min(judged, key=cost), None
    while len(judged) < budget and cost(best) > (0, bound * (1 + _PROVEN)):
        better = next((c for c in _around(best, blocks, along) if cost(c) < cost(best) or len(judged) >= budget), best)
        if cost(better) >= cost(best):
            break
        along = better - best
        best = better
    return best if cost(best)[0] == 0 else None


def _around(center: Counts, blocks: int, along: Counts | None) -> Iterator[Counts]:
    """Counts farther ``along`` the last step that paid, then near ``center``, nearest first, then far along each axis."""
    reach = range(-_REACH, _REACH + 1)
    near = sorted((Counts(*m) for m in product(reach, reach, reach) if any(m)), key=lambda m: (m.size, m))
    far = [sign * step for step in _FAR if step <= blocks for sign in (-1, 1)]
    axes = [*(Counts(0, d, 0) for d in far), *(Counts(0, 0, d) for d in far), *(Counts(d, 0, 0) for d in far)]
    for move in [*([along + along, along] if along else []), *near, *axes]:
        found = center + move
        if 0 <= found.checkpointed <= blocks - 2 and 0 <= found.offloaded <= blocks - 2 and 0 <= found.cpu_updated <= blocks:
            yield found
