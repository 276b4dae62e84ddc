"""Dataflow (als244): PressureFit, a plan for one GPU under a hard memory budget that a simulator has verified.

Based on github als244/dataflow at c56b6ab; it became als244/shadowspill. A step is a chain of tasks over named objects:
weights, gradients, optimizer states, and of every round (micro-batch) what each block saves and what it passes on.

- Every step begins and ends with weights and optimizer states on the host (``final_locations`` in
  ``src/dataflow_training/lowering/shaped_program.py``), so that each is fetched at least once and copied home once it has been
  updated. The GPU updates a block as soon as the gradients of the last round are complete (``optimizer_placement``).
- What a block saves is what its backward cannot make again with norms and activation functions; or nothing, and it is
  recomputed from its input (``docs/models/llama3/llama3_8b_16x4K.md``).
- ``pressure_fit.py`` decides what is away between two uses. The budget is what remains beside the largest temporaries of a
  task (``_object_planning_chain`` in ``src/dataflow_sim/policies/pressurefit.py``). Two scores, with and without headroom for
  fetches, and three rules for the start of fetches give candidates; each is simulated, and the fastest is taken. Where memory
  does not suffice after all, the budget of a candidate is lowered by what is missing, and it is cut again.
- Tasks and copies wait for memory: a task starts when its outputs fit, a copy to the GPU when its target does.
- Which blocks are recomputed (``src/dataflow_sim/planning/recompute.py``): none, all, or every other one; then, from none, of
  the blocks whose copies take longer than their recomputation, half become recomputed as long as that is faster, or else a
  half of that half, down to one.

Differences: objects there are finer than what a plan moves. Head and embedding save nothing there, and a block's input and
what it saves move apart; here together. A gap is cut in one round there, here in all, and recomputation likewise. What stays
from one round to the next stays here from one iteration to the next, and its host copy is not written; there it is fetched once
a step. The simulator blames objects for stalls, which ranks the blocks to recompute; here the part of a copy that its gap does
not hide does. All candidates are simulated for each choice of recomputed blocks there, here for the best of the first three
choices, and 5 to 14 in all, without ``interval-entry``, ``relaxed-stall`` and the coalesced forms. Waits for memory are found
for two candidates, and only for short iterations if something fits without them. Gradients are not clipped there; here their
updates follow backward, up to which gradients and parameters stay. Tied weights stay on the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from autohete.errors import check_fields
from autohete.plan import Activations, Footprint, Plan, Route, SavedRoute, UnitPlan
from autohete.plan.policy import Judge, Judgement, Verdict, estimates
from autohete.plan.rules import Slots
from autohete.policies.pressure_fit import (
    Gap,
    PassChain,
    Residency,
    Score,
    Trigger,
    fitted,
    halves,
    pass_chain,
    saved_again,
)
from autohete.policies.several_gpus import check_one_gpu
from autohete.profile import Profile
from autohete.schedule import HOST_MEMORY, Kind

#: The candidates of each choice of recomputed blocks: the score, whether fetches count early, and when they start.
_PORTFOLIO = (
    (Score.STALL, True, Trigger.PACKED_FIT),
    (Score.STALL, False, Trigger.LATEST_SAFE),
    (Score.STALL, True, Trigger.PACKED_FIFO),
    (Score.TRANSFER, True, Trigger.PACKED_FIT),
    (Score.TRANSFER, False, Trigger.LATEST_SAFE),
    (Score.TRANSFER, True, Trigger.PACKED_FIFO),
)
#: How often the budget of a candidate is lowered, how many candidates are simulated at least and at most, and of how many waits
#: are found.
_REPAIRS, _FEWEST, _MOST, _WAITING = 2, 5, 14, 2
#: Passes over units in all simulations, from which their number follows; a judge estimates more than three micro-batches.
_PASSES, _ESTIMATED = 900, 3
#: Up to so many passes over units waits are found though something fits without them: it takes long.
_FEW_PASSES = 80


@dataclass(frozen=True, slots=True)
class Dataflow:
    """Dataflow with PressureFit.

    Args:
        recompute: blocks may be recomputed. Off: as with ``--no-recompute``.
    """

    recompute: bool = True

    def __post_init__(self) -> None:
        check_fields(self)

    def plan(self, profile: Profile, judge: Judge) -> Plan:
        """See :class:`autohete.plan.policy.Policy`. If nothing fits, returns the fastest candidate."""
        check_one_gpu("dataflow", profile)
        return _CandidateSearch(profile, judge).best(recompute=self.recompute)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A plan, how it was made, and its time and memory if nothing waits for memory."""

    plan: Plan
    recomputed: frozenset[int]
    judged: Judgement

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return self.judged.verdict is Verdict.OK

    @property
    def rank(self) -> tuple[bool, float]:
        """What fits comes first, then what is fast."""
        return not self.fits, self.judged.seconds


class _CandidateSearch:
    """The candidates for one profile, each simulated once."""

    def __init__(self, profile: Profile, judge: Judge) -> None:
        self._profile, self._judge, self._estimate = profile, judge, estimates(judge)
        self._blocks = range(max(1, profile.first_trained), len(profile.units) - 1)
        self._known: dict[Plan, _Candidate] = {}
        self._chains: dict[frozenset[int], PassChain] = {}
        passes = len(profile.units) * min(profile.workload.micro_batches, _ESTIMATED)
        self._most = min(max(_PASSES // passes, _FEWEST), _MOST)

    def best(self, *, recompute: bool) -> Plan:
        """Return the fastest plan that fits."""
        none, every = frozenset[int](), frozenset(self._blocks)
        start = self._tried(none, _PORTFOLIO[:1])
        for recomputed in (every, frozenset(self._blocks[::2])) if recompute else ():
            # Tasks run one after another, so that no plan takes less time than they.
            if not self._fastest().fits or self._chain(recomputed).seconds < self._fastest().judged.seconds:
                self._tried(recomputed, _PORTFOLIO[:1])
        self._tried(self._fastest().recomputed, _PORTFOLIO)
        if recompute:
            self._convert(start if start.fits else self._fastest())
        fastest = self._fastest()
        return self._waiting(fastest) or fastest.plan

    def _fastest(self) -> _Candidate:
        return min(self._known.values(), key=lambda one: one.rank)

    def _waiting(self, fastest: _Candidate) -> Plan | None:
        """The fastest plan that needs waits for memory, if it is faster than ``fastest``. Waits make no plan faster."""
        best, seconds = None, fastest.judged.seconds if fastest.fits else float("inf")
        if fastest.fits and len(self._profile.units) * self._profile.workload.micro_batches > _FEW_PASSES:
            return None
        short = [one for one in self._known.values() if one.judged.verdict is Verdict.GPU_OUT_OF_MEMORY]
        for one in sorted(short, key=lambda one: one.judged.seconds)[:_WAITING]:
            if one.judged.seconds < seconds:
                plan = replace(one.plan, memory_waits=True)
                found = self._judge(plan)
                if found.verdict is Verdict.OK and found.seconds < seconds:
                    best, seconds = plan, found.seconds
        return best

    def _convert(self, current: _Candidate) -> None:
        """Recompute further blocks as long as that is faster."""
        faster = True
        while faster:
            worth, faster = [*self._worth(current)], False
            for count in halves(len(worth)):
                if self._enough:
                    return
                found = self._tried(current.recomputed | set(worth[:count]), _PORTFOLIO[:1])
                if found.rank < current.rank:
                    current, faster = found, True
                    break

    def _worth(self, one: _Candidate) -> Iterator[int]:
        """The blocks whose copies take longer than their recomputation, those first that their gap hides least."""
        profile, chain, found = self._profile, self._chain(one.recomputed), []
        for gap in chain.gaps:
            if gap.gap is Gap.KEPT and gap.unit not in one.recomputed and one.plan.units[gap.unit].kept.leaves:
                copies = profile.d2h_seconds(gap.size_bytes) + profile.h2d_seconds(gap.size_bytes)
                if copies > profile.units[gap.unit].recompute_seconds:
                    found.append((-chain.delay_seconds(gap), -gap.unit))
        yield from (-unit for _, unit in sorted(found))

    def _chain(self, recomputed: frozenset[int]) -> PassChain:
        if recomputed not in self._chains:
            self._chains[recomputed] = pass_chain(self._profile, recomputed, _resident(self._profile))
        return self._chains[recomputed]

    def _tried(self, recomputed: frozenset[int], portfolio: Iterable[tuple[Score, bool, Trigger]]) -> _Candidate:
        """Return the fastest candidate with these recomputed blocks."""
        tried: list[_Candidate] = []
        for one in portfolio:
            if not tried or not self._enough:
                tried.append(self._candidate(recomputed, *one))
        return min(tried, key=lambda one: one.rank)

    @property
    def _enough(self) -> bool:
        return len(self._known) >= self._most

    def _candidate(self, recomputed: frozenset[int], score: Score, headroom: bool, trigger: Trigger) -> _Candidate:
        """A candidate that fits, or the one that does not with the whole budget."""
        chain, first = self._chain(recomputed), None
        capacity = self._profile.hardware.gpu_capacity_bytes - chain.workspace_bytes
        for _ in range(_REPAIRS):
            residency = fitted(chain, capacity, score, headroom=headroom)
            found = self._simulated(_plan(self._profile, recomputed, residency, trigger), recomputed)
            first = found if first is None else first
            if found.judged.verdict is not Verdict.GPU_OUT_OF_MEMORY:
                return found
            missing = found.judged.gpu_peak_bytes - self._profile.hardware.gpu_capacity_bytes
            capacity = min(capacity, int(residency.pressure.max())) - missing
        assert first is not None, "each candidate is simulated"
        return first

    def _simulated(self, plan: Plan, recomputed: frozenset[int]) -> _Candidate:
        if plan not in self._known:
            self._known[plan] = _Candidate(plan, recomputed, self._estimate(plan))
        return self._known[plan]


def _resident(profile: Profile) -> frozenset[int]:
    """The units whose parameters do not leave."""
    return frozenset({0, len(profile.units) - 1} if profile.workload.tied_embeddings else ())


def _plan(profile: Profile, recomputed: frozenset[int], residency: Residency, trigger: Trigger) -> Plan:
    """The plan with these gaps cut."""
    cut, ahead, last = {one.key for one in residency.cut}, residency.ahead(trigger), len(profile.units) - 1
    states, tied = Route(HOST_MEMORY, ahead=int(trigger is not Trigger.LATEST_SAFE)), _resident(profile)

    def unit_of(unit: int) -> UnitPlan:
        parameters = gradients = kept = Route()
        if unit not in tied:
            single = profile.workload.micro_batches == 1
            parameters = Route(
                HOST_MEMORY,
                ahead=_ahead(ahead, unit, Gap.ARRIVAL if single else Gap.AFTER_BACKWARD),
                ahead_in_backward=ahead.get((Gap.AFTER_FORWARD, unit), 0),
                stays_after_forward=(Gap.AFTER_FORWARD, unit) not in cut,
                stays_after_backward=not single and (Gap.AFTER_BACKWARD, unit) not in cut,
            )
            if not parameters.leaves:
                parameters = Route()
        if (Gap.GRADIENTS, unit) in cut:
            gradients = Route(HOST_MEMORY, ahead=ahead.get((Gap.GRADIENTS, unit), 0))
        if (Gap.KEPT, unit) in cut:
            kept = Route(HOST_MEMORY, ahead=ahead.get((Gap.KEPT, unit), 0))
        activations, saved = Activations.KEEP, tuple[SavedRoute, ...]()
        if unit in recomputed:
            activations = Activations.RECOMPUTE
        elif max(1, profile.first_trained) <= unit < last and (again := saved_again(profile, unit)):
            activations, saved = Activations.SELECTIVE, tuple(SavedRoute(name, recomputed=True) for name in again)
        return UnitPlan(activations, parameters, gradients=gradients, kept=kept, saved=saved, states=states)

    places = residency.copies_in_flight()
    if places is not None and any((Gap.KEPT, unit) in cut for unit in recomputed):
        places += 1  # an input takes its place when the unit below makes it
    return Plan(
        policy="dataflow",
        units=tuple(map(unit_of, range(last + 1))),
        rules=() if places is None else (Slots(Kind.OFFLOAD_ACTIVATIONS, places),),
        footprint=Footprint(host_parameter_bytes=profile.element_bytes),
        sums_in_place=True,
    )


def _ahead(ahead: dict[tuple[Gap, int], int], unit: int, gap: Gap) -> int:
    return ahead.get((gap, unit), ahead.get((Gap.ARRIVAL, unit), 0))


SYSTEM = Dataflow
