"""From the program's optimum to the best plan: the program knows bounds, the judge knows time and memory.

Plans around the optimum are judged in the order of their bounds, until no bound is left that could beat the best plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

from autohete.planner.program import Objective, Program
from autohete.planner.steps import Counts
from autohete.policy import Judgement, Verdict

#: A plan this close to what no other can beat needs no further search: with the program's own gap, within one percent.
_PROVEN = 0.009
#: Judgements to spend, times blocks: small models have coarse choices and cheap judgements, large ones the contrary.
_EFFORT = 1000
#: Candidates around the optimum: all there are in a small model, so many steps each way in a large one.
_ALL = 2500
_REACH = 6
#: How often the program is asked again with less memory when its plan turns out to need more than there is.
_TIGHTENINGS = 4


def best_counts(program: Program, judge: Callable[[Counts], Judgement]) -> Counts | None:
    """The best plan of ``program`` as ``judge`` finds it; None if nothing was found that fits."""
    judged: dict[Counts, Judgement] = {}

    def seconds(counts: Counts) -> float | None:
        """Time of a plan that fits."""
        if counts not in judged:
            judged[counts] = judge(counts)
        return judged[counts].seconds if judged[counts].verdict is Verdict.OK else None

    bound: float | None = None
    best: tuple[float, Counts] | None = None
    for start, value in _answers(program, judged):
        bound = value if bound is None else bound
        if (found := seconds(start)) is not None:
            best = (found, start)
            break
    if bound is None or (best is not None and best[0] <= bound * (1 + _PROVEN)):
        return best[1] if best else None
    center = best[1] if best else next(iter(judged))
    best = _branch_and_bound(program, center, Objective.SECONDS, seconds, best)
    return best[1] if best else None


def least_memory(
    program: Program, objective: Objective, measure: Callable[[Counts], float | None]
) -> tuple[float, Counts] | None:
    """The plan that needs the least of one memory within the other's budget, by ``measure`` (None: it does not fit)."""
    start = replace(program, pending=False).solve(objective)
    return _branch_and_bound(program, start.counts, objective, measure, None) if start else None


def _branch_and_bound(
    program: Program,
    center: Counts,
    objective: Objective,
    measure: Callable[[Counts], float | None],
    best: tuple[float, Counts] | None,
) -> tuple[float, Counts] | None:
    """Measure candidates in the order of their bounds, as long as one could beat the best and the effort lasts."""
    effort = max(_EFFORT // program.costs.count, 10)
    for lowest, counts in _candidates(program, center, objective):
        if effort == 0:
            break
        if best is None or best[0] > lowest * (1 + _PROVEN):
            effort -= 1
            found = measure(counts)
            if found is not None and (best is None or found < best[0]):
                best = (found, counts)
    return best


def _answers(program: Program, judged: dict[Counts, Judgement]) -> Iterator[tuple[Counts, float]]:
    """The relaxation, whose value bounds all plans; then with pending memory, asked for less while too much is used."""
    relaxed = replace(program, pending=False).solve()
    if relaxed is None:
        return
    yield relaxed.counts, relaxed.value
    tighter = program
    for _ in range(_TIGHTENINGS):
        solution = tighter.solve()
        if solution is None:
            break
        yield solution.counts, solution.value
        found = judged[solution.counts]
        tighter = replace(
            tighter,
            gpu_budget_bytes=tighter.gpu_budget_bytes - max(0, found.gpu_peak_bytes - program.gpu_budget_bytes),
            host_budget_bytes=tighter.host_budget_bytes - max(0, found.host_peak_bytes - program.host_budget_bytes),
        )


def _candidates(program: Program, center: Counts, objective: Objective) -> list[tuple[float, Counts]]:
    """Plans around ``center`` with the bounds of their values, the lowest first; last those that fit only with luck."""
    blocks = program.costs.count
    limits = (blocks - 2, blocks - 2, blocks)
    if (blocks - 1) ** 2 * (blocks + 1) <= _ALL:
        ranges = [range(limit + 1) for limit in limits]
    else:
        middle = (center.checkpointed, center.offloaded, center.cpu_updated)
        ranges = [range(max(0, m - _REACH), min(limit, m + _REACH) + 1) for m, limit in zip(middle, limits, strict=True)]
    counts = [Counts(*choice) for choice in product(*ranges)]
    typical, lucky = program.rate(counts, objective), replace(program, pending=False).rate(counts, objective)
    ranked = sorted(
        # For time, a plan that fits typically is the better bet. For memory, luck is what is sought.
        (objective is Objective.SECONDS and not fits, value, choice)
        for fits, possible, value, choice in zip(typical.fits, lucky.fits, lucky.values, counts, strict=True)
        if possible
    )
    return [(float(value), choice) for _, value, choice in ranked]
