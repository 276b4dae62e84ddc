"""The effect of changes of hardware or training: each is simulated with the current plan and with a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autohete.answer.policies import JOINT, default_policies, longest_first
from autohete.answer.result import Candidate, Change, Gain
from autohete.answer.site import Site
from autohete.errors import AutoHeteError, InfeasibleError
from autohete.plan import Plan
from autohete.plan.policy import Verdict
from autohete.policies import NamedPolicy, parse_policy
from autohete.policies.joint import Joint, JointFrom
from autohete.profile import Profile, analytic_profile
from autohete.simulate import Simulation, simulate_plan, simulate_policy
from autohete.workload import Workload


@dataclass(frozen=True, slots=True)
class Trial:
    """A change to simulate with one policy, or with the current plan.

    Args:
        change: of hardware or training.
        workload: before the change.
        site: before the change.
        policy: its name.
        plan: the current plan; None to plan anew.
        start: the current plan, if ``joint`` plans anew and may start from it.
    """

    change: Change
    workload: Workload
    site: Site
    policy: str
    plan: Plan | None = None
    start: Plan | None = None

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
        return Result(self.policy, found.verdict, "", found.iteration_seconds, found.tokens_per_second, _peaks(found))

    def _planner(self) -> NamedPolicy:
        """The policy that plans anew. ``joint`` is quick, as there are many changes, but for another number of GPUs."""
        if self.policy != JOINT or self.change.gpus is not None:
            return parse_policy(self.policy)
        return NamedPolicy(JOINT, Joint(quick=True) if self.start is None else JointFrom(self.start, quick=True))


def _peaks(simulation: Simulation) -> Mapping[str, int]:
    return {one.memory: one.peak_bytes for one in simulation.memories}


@dataclass(frozen=True, slots=True)
class Result:
    """How one policy, or one plan, does after a change. The last three are there if it fits."""

    policy: str
    verdict: Verdict
    explanation: str
    seconds: float | None = None
    tokens_per_second: float | None = None
    peaks: Mapping[str, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[bool, float, bool]:
        """Orders results: what fits, the fastest first, then what is planned for one reason only."""
        token = 0.0 if self.tokens_per_second is None else 1 / self.tokens_per_second
        return self.verdict is not Verdict.OK, token, self.policy == JOINT


def trials(
    profile: Profile, site: Site, changes: Sequence[Change], candidates: Sequence[Candidate], names: Sequence[str]
) -> list[Trial]:
    """What to simulate for each change: the best plan as it is, and planned anew.

    ``joint`` plans wherever it can, and starts from the current plan where that has as many units: it is never slower than
    another policy. Without it the best and the next best policy plan; all of them for several GPUs, or if nothing fits.
    """
    fitting = [each for each in candidates if each.fits]
    best = fitting[0] if fitting else None
    work: list[Trial] = []
    for change in changes:
        gpus = change.gpus or site.gpus
        covers = JOINT in names
        chosen = [each.name for each in fitting if not each.same_plan_as][:2]
        if covers:
            chosen = [JOINT]
        elif change.gpus is not None:
            chosen = [*dict.fromkeys([*names, *default_policies(gpus)])]
        elif gpus > 1 or not fitting:
            chosen = [*names]
        trial = partial(Trial, change, profile.workload, site)
        same_units = change.workload is None or change.workload.units is profile.workload.units
        same_units = same_units and change.gpus is None
        start = best.plan if best is not None and covers and same_units else None
        work += [trial(name, start=start if name == JOINT else None) for name in longest_first(chosen)]
        if best is not None and same_units:
            work.append(trial(best.name, best.plan))
    return work


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
    now = min((each.seconds / tokens for each in candidates if each.fits), default=None)
    found = []
    for change in changes:
        here = [result for trial, result in zip(tried, results, strict=True) if trial.change == change]
        if here and None not in here:
            found.append(_gain(change, min(filter(None, here), key=lambda result: result.key), now, tokens))
    return found


def _tokens(profile: Profile) -> int:
    """Tokens of an iteration on all GPUs."""
    return profile.workload.samples * profile.workload.sequence_length * profile.hardware.gpus


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
