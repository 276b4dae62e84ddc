"""The effect of changes of hardware or training: each is simulated with the current plan and with a new one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autohete.answer.policies import JOINT, default_policies, longest_first
from autohete.answer.result import AND, Candidate, Change, Gain
from autohete.answer.site import Site
from autohete.errors import AutoHeteError, InfeasibleError
from autohete.plan import Plan
from autohete.plan.policy import Verdict
from autohete.policies import NamedPolicy, parse_policy
from autohete.policies.joint import JointFrom, refined
from autohete.profile import Profile, analytic_profile
from autohete.simulate import Simulation, simulate_plan, simulate_policy
from autohete.workload import Units, Workload


@dataclass(frozen=True, slots=True)
class Trial:
    """A change to simulate with one policy, or with the current plan.

    Args:
        change: of hardware or training.
        workload: before the change.
        site: before the change.
        policy: its name.
        plan: the current plan; None to plan anew.
        starts: plans that ``joint`` starts from if it plans anew.
    """

    change: Change
    workload: Workload
    site: Site
    policy: str
    plan: Plan | None = None
    starts: tuple[Plan, ...] = ()

    def __call__(self) -> Result:
        """Simulate it."""
        change = self.change
        there = replace(self.site, gpus=change.gpus or self.site.gpus)
        try:
            profile = analytic_profile(change.workload or self.workload, there.hardware(change.moved))
            found = simulate_policy(profile, self._planner()) if self.plan is None else simulate_plan(profile, self.plan)
        except InfeasibleError as error:
            return Result(self.policy, Verdict.short_of(error.constraint), str(error))
        except AutoHeteError as error:  # a plan or a number of GPUs that is not possible after the change
            return Result(self.policy, Verdict.INVALID, str(error))
        if found.verdict is not Verdict.OK:
            return Result(self.policy, found.verdict, "")
        return Result(
            self.policy, found.verdict, "", found.iteration_seconds, found.tokens_per_second, _peaks(found), found.plan
        )

    def _planner(self) -> NamedPolicy:
        """The policy that plans anew. ``joint`` is quick, as there are many changes."""
        if self.policy != JOINT:
            return parse_policy(self.policy)
        return NamedPolicy(JOINT, JointFrom(self.starts, quick=True))


def _peaks(simulation: Simulation) -> Mapping[str, int]:
    return {one.memory: one.peak_bytes for one in simulation.memories}


@dataclass(frozen=True, slots=True)
class Result:
    """How one policy, or one plan, does after a change. The last four are there if it fits."""

    policy: str
    verdict: Verdict
    explanation: str
    seconds: float | None = None
    tokens_per_second: float | None = None
    peaks: Mapping[str, int] = field(default_factory=dict)
    plan: Plan | None = None

    @property
    def key(self) -> tuple[bool, float, bool]:
        """Orders results: what fits, the fastest first, then what is planned for one reason only."""
        token = 0.0 if self.tokens_per_second is None else 1 / self.tokens_per_second
        return self.verdict is not Verdict.OK, token, self.policy == JOINT


def trials(
    profile: Profile,
    site: Site,
    changes: Sequence[Change],
    candidates: Sequence[Candidate],
    names: Sequence[str],
    alone: Mapping[str, Plan] | None = None,
) -> list[Trial]:
    """What to simulate for each change: the best plan as it is, and planned anew.

    ``joint`` plans wherever it can, and starts from plans that are known; for another number of GPUs, where none may be, the
    two best policies plan, too. Without it the best and the next best policy plan; all of them for several GPUs, or if nothing
    fits.

    Args:
        profile: before the changes.
        site: before the changes.
        changes: single ones, or several together.
        candidates: the policies before the changes.
        names: the policies that were asked for.
        alone: the best plan after each single change by its name; several together start from those of their parts.
    """
    fitting = [each for each in candidates if each.fits]
    best = fitting[0] if fitting else None
    work: list[Trial] = []
    for change in changes:
        gpus = change.gpus or site.gpus
        covers = JOINT in names
        chosen = [each.name for each in fitting if not each.same_plan_as][:2]
        if covers:  # without a known plan, the quick search may miss what another policy finds
            chosen = [JOINT] if change.gpus is None else [*dict.fromkeys([JOINT, *chosen])]
        elif change.gpus is not None:
            chosen = [*dict.fromkeys([*names, *default_policies(gpus, site.parallelism.pipeline)])]
        elif gpus > 1 or not fitting:
            chosen = [*names]
        trial = partial(Trial, change, profile.workload, site)
        starts = tuple(_starts(profile, change, best, alone or {})) if covers else ()
        work += [trial(name, starts=starts if name == JOINT else ()) for name in longest_first(chosen)]
        if best is not None and change.gpus is None and _units(profile, change) is profile.workload.units:
            work.append(trial(best.name, best.plan))
    return work


def _units(profile: Profile, change: Change) -> Units:
    return (change.workload or profile.workload).units


def _starts(profile: Profile, change: Change, best: Candidate | None, alone: Mapping[str, Plan]) -> Iterator[Plan]:
    """Plans to start from: the current one, and those of the parts of a change. What has other units is not possible there."""
    units = _units(profile, change)
    if best is not None and best.plan is not None and change.gpus is None:
        if units is profile.workload.units:
            yield best.plan
        elif units is Units.SUBLAYER:
            yield replace(best.plan, units=refined(best.plan.units))
    yield from (alone[part] for part in change.name.split(AND) if part in alone)


def best_plans(tried: Sequence[Trial], results: Sequence[Result | None]) -> dict[str, Plan]:
    """The plan of the best result of each change by the change's name."""
    best: dict[str, Result] = {}
    for trial, result in zip(tried, results, strict=True):
        if result is not None and result.plan is not None:
            name = trial.change.name
            best[name] = min(best.get(name, result), result, key=lambda one: one.key)
    return {name: result.plan for name, result in best.items() if result.plan is not None}


def gains(
    profile: Profile,
    changes: Sequence[Change],
    candidates: Sequence[Candidate],
    tried: Sequence[Trial],
    results: Sequence[Result | None],
) -> list[Gain]:
    """The gain of each change from the results of its trials, without those that there was no time for.

    Args:
        profile: before the changes.
        changes: in the order of the gains.
        candidates: the policies before the changes.
        tried, results: the trials, and the result of each.
    """
    tokens = _tokens(profile)
    now = min((each.seconds_per_token for each in candidates if each.fits), default=None)
    found = []
    for change in changes:
        here = [result for trial, result in zip(tried, results, strict=True) if trial.change == change]
        if here and None not in here:
            found.append(_gain(change, min(filter(None, here), key=lambda result: result.key), now, tokens))
    return found


def _tokens(profile: Profile) -> int:
    """Tokens of an iteration on all GPUs."""
    return profile.workload.samples * profile.workload.sequence_length * profile.hardware.batches


def _gain(change: Change, best: Result, now: float | None, tokens: int) -> Gain:
    if best.tokens_per_second is None:
        return Gain(change, "", best.verdict, best.explanation, None, None, {}, None, None)
    saved = None if now is None else now - 1 / best.tokens_per_second
    return Gain(
        change,
        best.policy,
        best.verdict,
        "",
        best.seconds,
        best.tokens_per_second,
        best.peaks,
        None if saved is None else saved * tokens,
        None if saved is None or now is None else saved / now,
    )


def with_price(gain: Gain, prices: Mapping[str, float], tokens: int) -> Gain:
    """``gain`` with its price for each hour that it saves of a training on so many tokens, if there is a price."""
    price = prices.get(gain.change.item)
    if price is None or not gain.helps or gain.saved_share is None:
        return gain
    before = gain.seconds_per_token / (1 - gain.saved_share)
    return replace(gain, price_per_hour=price / (gain.saved_share * before * tokens / 3600))
