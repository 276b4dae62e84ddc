"""The whole answer to "can I train this here, how fast, and what should I buy".

Everything in it is simulated. :func:`find_answer` judges all policies, then plans again with each change of hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autohete.answer import certainty
from autohete.answer.binding import bindings
from autohete.answer.draws import Sampling
from autohete.answer.levers import combinations, levers, pull
from autohete.answer.needs import least_memory
from autohete.answer.policies import JOINT, Judged, default_policies, longest_first, ranked
from autohete.answer.purchases import pairs, single_purchases
from autohete.answer.result import (
    AND,
    NOISE,
    Answer,
    Budget,
    Candidate,
    Change,
    Gain,
    Interval,
    Need,
    Offloading,
    fastest_staying,
)
from autohete.answer.run import Run, in_turn
from autohete.answer.site import SYSTEM_BYTES, Site, without_system
from autohete.answer.trials import best_plans, gains, trials, with_price
from autohete.errors import InputError
from autohete.hardware import Hardware
from autohete.plan.policy import Verdict
from autohete.policies import parse_policy, search_space
from autohete.profile import Profile
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY
from autohete.simulate import Simulation, simulate_plan
from autohete.simulate.largest import GrowingFigure, Largest, largest

__all__ = [
    "AND",
    "NOISE",
    "SYSTEM_BYTES",
    "Answer",
    "Budget",
    "Candidate",
    "Change",
    "Gain",
    "Interval",
    "Need",
    "Offloading",
    "Run",
    "Sampling",
    "Site",
    "default_policies",
    "find_answer",
    "in_turn",
    "without_system",
]


def find_answer(
    profile: Profile,
    site: Site | None,
    *,
    system_bytes: int = SYSTEM_BYTES,
    policies: Sequence[str] | None = None,
    runnable: Sequence[str] = (),
    tokens: int = 10**9,
    sampling: Sampling | None = None,
    sizes: Sequence[GrowingFigure] = (),
    given: Iterable[str] = (),
    chosen: Iterable[str] = (),
    prices: Mapping[str, float] | None = None,
    fast: bool = False,
    run: Run = in_turn,
) -> Answer:
    """Judge all policies, and simulate what would change the result.

    Args:
        profile: of the workload on the hardware, before anything is left to the system.
        site: where its hardware comes from. None for a measured profile: then nothing is drawn, and no other hardware or size
            is simulated, since the times are those of one machine and one size.
        system_bytes: host memory of the node that is left to the system.
        policies: names with flags; None: all that are registered, with all flags that their users can choose.
        runnable: frameworks, of which one has to run what is recommended; none: any plan may be.
        tokens: of the whole training.
        sampling: draws of uncertain figures; None: as many as by default.
        sizes: figures of the workload whose largest value is looked for.
        given: names of the figures that were given.
        chosen: names of the figures that were searched for, such as the batch.
        prices: of purchases, by their ``item``.
        fast: leave out levers and purchases.
        run: works through many calls, such as in several processes.

    Raises:
        InputError: invalid figures, or no policy can plan this workload at all.
    """
    system_bytes = 0 if profile.hardware.unified else system_bytes  # gpu.reserved_memory has it
    profile = replace(profile, hardware=without_system(profile.hardware, system_bytes))
    hardware = profile.hardware
    names = default_policies(hardware.gpus, hardware.parallelism.pipeline) if policies is None else tuple(policies)
    spaces = [search_space(name, profile) if policies is None else (name,) for name in longest_first(names)]
    judged = run("policies", [Judged(profile, space, tuple(runnable)) for space in spaces])
    stages = _Stages(run)
    candidates = ranked(stages.done("policies", judged))
    if not candidates:
        raise InputError("there was no time to judge any policy: give more, or a smaller workload")
    if all(each.summary.verdict is Verdict.INVALID for each in candidates):
        raise InputError(candidates[0].summary.explanation)
    if runnable:
        candidates = tuple(each for each in candidates if {*runnable} & {*each.runs_in})
        if not candidates:
            raise InputError(f"{' and '.join(runnable)} can run no plan here: name other frameworks, or none")
        names = tuple(each.name for each in candidates)
    best = candidates[0] if candidates[0].fits else None
    simulation = None if best is None else _simulated(profile, best)
    found = _Varied()
    if site is not None:
        site = replace(site, system_bytes=system_bytes)
        found = _varied(profile, site, candidates, simulation, names, sampling or Sampling(), sizes, stages, fast=fast)
    needs = [] if best is not None else least_memory(profile, system_bytes, names, stages)
    return Answer(
        profile,
        system_bytes,
        tokens,
        candidates,
        simulation,
        _budgets(profile, system_bytes, simulation),
        _best_first(found.levers),
        _best_first([with_price(gain, prices or {}, tokens) for gain in found.purchases]),
        tuple(needs),
        tuple(found.largest),
        found.interval,
        tuple(sorted(given)),
        tuple(chosen),
        tuple(dict.fromkeys(stages.left_out)),
        tuple(runnable),
    )


def _simulated(profile: Profile, candidate: Candidate) -> Simulation:
    assert candidate.plan is not None
    return simulate_plan(profile, candidate.plan)


class _Stages:
    """Runs stages, and notes those that there was not enough time for."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.left_out: list[str] = []

    def __call__(self, stage: str, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        results = self._run(stage, calls)
        self.done(stage, results)
        return results

    def done(self, stage: str, results: Sequence[Any]) -> list[Any]:
        """The results that are there."""
        there = [result for result in results if result is not None]
        if len(there) < len(results):
            self.left_out.append(stage)
        return there


# --- budgets ------------------------------------------------------------------------------------------------------


def _budgets(profile: Profile, system_bytes: int, simulation: Simulation | None) -> tuple[Budget, ...]:
    gpu, host, here = profile.hardware.gpu, profile.hardware.host, profile.hardware.all_gpus_of_node
    total = host.memory_bytes + system_bytes // here
    used = dict.fromkeys((GPU_MEMORY, PINNED_MEMORY, HOST_MEMORY)) if simulation is None else _peaks(simulation)
    limit = host.memory_bytes if host.pinned_bytes is None else host.pinned_bytes
    return (
        Budget(GPU_MEMORY, used[GPU_MEMORY], profile.hardware.gpu_capacity_bytes, gpu.memory_bytes),
        Budget(PINNED_MEMORY, used[PINNED_MEMORY], limit, total, host.pinned_bytes is not None),
        Budget(HOST_MEMORY, used[HOST_MEMORY], host.memory_bytes, total),
        *(
            Budget(place.name, used[place.name], place.capacity_bytes, place.capacity_bytes)
            for place in profile.hardware.places
            if used.get(place.name)
        ),
    )


def _peaks(simulation: Simulation) -> dict[str, int | None]:
    """Peaks of all memories. Pinned memory without a limit is counted with one that is as large as the host."""
    pinned, hardware = simulation.pinned, simulation.profile.hardware
    if pinned is None:
        limited = replace(hardware, host=replace(hardware.host, pinned_bytes=hardware.host.memory_bytes))
        pinned = simulate_plan(replace(simulation.profile, hardware=limited), simulation.plan).pinned
    assert pinned is not None
    return {**{one.memory: one.peak_bytes for one in simulation.memories}, PINNED_MEMORY: pinned.peak_bytes}


# --- what varies --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Varied:
    """What other sizes, hardware and ways to train bring."""

    levers: Sequence[Gain] = ()
    purchases: Sequence[Gain] = ()
    interval: Interval | None = None
    largest: Sequence[Largest] = ()


def _varied(
    profile: Profile,
    site: Site,
    candidates: Sequence[Candidate],
    simulation: Simulation | None,
    names: Sequence[str],
    sampling: Sampling,
    sizes: Sequence[GrowingFigure],
    run: _Stages,
    *,
    fast: bool,
) -> _Varied:
    """Simulate everything that depends on the recommended plan only, then what depends on that."""
    alone = [] if fast else levers(profile.workload)
    pulled = [change for lever in alone if (change := pull(profile.workload, [lever])) is not None]
    bound = [] if fast or simulation is None else list(bindings(site, simulation))
    bought = [] if fast else list(single_purchases(site, simulation))
    if simulation is None:  # rates do not change what fits
        bought = [change for change in bought if change.memory or change.gpus is not None]

    drawn = []
    if simulation is not None:
        staying = fastest_staying(candidates)
        other = None if staying is None or staying is candidates[0] else _simulated(profile, staying)
        drawn = certainty.draws(site, simulation, other, sampling)
    asked = list(dict.fromkeys(sizes if simulation is not None else [GrowingFigure.BATCH, *sizes]))
    grown = [_Grown(profile, name, figure) for figure in asked for name in _who_grows(candidates, profile.hardware)]
    tried = trials(profile, site, [*pulled, *bound, *bought], candidates, names)
    results = run("levers, purchases and uncertain figures", [*tried, *drawn, *grown])
    effects, times = results[: len(tried)], results[len(tried) :][: len(drawn)]

    lever_gains = gains(profile, pulled, candidates, tried, effects)
    purchase_gains = gains(profile, bought, candidates, tried, effects)
    known = {gain.change.name: gain for gain in lever_gains}
    worth = [lever for lever in alone if lever.name in known]
    combined = combinations(profile.workload, worth, [known[lever.name] for lever in worth])
    together = pairs(_best_first(purchase_gains)) if simulation is not None else []
    again = trials(profile, site, [*combined, *together], candidates, names, best_plans(tried, effects))
    more = run("combinations", again)
    return _Varied(
        [*lever_gains, *gains(profile, bound, candidates, tried, effects), *gains(profile, combined, candidates, again, more)],
        [*purchase_gains, *gains(profile, together, candidates, again, more)],
        certainty.interval(site, sampling, [time for time in times if time is not None]),
        _largest([one for one in results[len(tried) + len(drawn) :] if one is not None]),
    )


def _best_first(some: Sequence[Gain]) -> tuple[Gain, ...]:
    return tuple(sorted(some, key=lambda gain: gain.seconds_per_token))


def _who_grows(candidates: Sequence[Candidate], hardware: Hardware) -> list[str]:
    """Policies of which one fits wherever any does: ``joint``, or without it all that can plan; the fastest may grow least."""
    able = [each.name for each in candidates if each.summary.verdict is not Verdict.INVALID]
    return [JOINT] if JOINT in able else longest_first(able)


@dataclass(frozen=True, slots=True)
class _Grown:
    """The largest value of a figure under one policy."""

    profile: Profile
    name: str
    figure: GrowingFigure

    def __call__(self) -> Largest:
        return largest(self.profile.workload, self.profile.hardware, parse_policy(self.name), self.figure)


def _largest(found: Sequence[Largest]) -> list[Largest]:
    """The largest value of each figure under any of some policies."""
    best: dict[GrowingFigure, Largest] = {}
    for one in found:
        if one.figure not in best or one.value > best[one.figure].value:
            best[one.figure] = one
    return list(best.values())
