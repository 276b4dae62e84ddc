"""From the program's optimum to the best plan: the program knows bounds, the judge knows time."""

from __future__ import annotations

from collections.abc import Callable

from autohete.planner.program import Solution
from autohete.planner.steps import Counts
from autohete.policy import Judgement, Verdict

#: A plan this close to what no plan can beat needs no further search.
_PROVEN = 0.002
_MOVES = [
    (c, p, o) for c in (-1, 0, 1) for p in (-1, 0, 1) for o in (-1, 0, 1) if (c, p, o) != (0, 0, 0)
]  # fmt: skip


def polish(solution: Solution, blocks: int, judge: Callable[[Counts], Judgement]) -> Counts | None:
    """Walk downhill from the program's counts by single steps of the three integers; None if nothing near them fits."""
    judged: dict[Counts, tuple[int, float]] = {}

    def cost(counts: Counts) -> tuple[int, float]:
        """Bytes over capacity first, then seconds."""
        if counts not in judged:
            found = judge(counts)
            over = 0 if found.verdict is Verdict.OK else max(found.gpu_peak_bytes, found.host_peak_bytes)
            judged[counts] = (over, found.seconds)
        return judged[counts]

    best = solution.counts
    while cost(best) > (0, solution.value * (1 + _PROVEN)):
        near = [
            Counts(best.checkpointed + c, best.offloaded + p, best.cpu_updated + o)
            for c, p, o in _MOVES
            if 0 <= best.checkpointed + c <= blocks - 2
            and 0 <= best.offloaded + p <= blocks - 2
            and 0 <= best.cpu_updated + o <= blocks
        ]
        candidate = min(near, key=lambda counts: (*cost(counts), counts))
        if cost(candidate) >= cost(best):
            break
        best = candidate
    return best if cost(best)[0] == 0 else None
