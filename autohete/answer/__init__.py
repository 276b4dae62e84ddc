"""The whole answer to "can I train this here, how fast, and what should I buy".

Everything in it is simulated. :func:`find_answer` judges all policies, then plans again with each change of hardware.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from autohete.answer.draws import Sampling, draw, open_figures
from autohete.answer.gains import adapter_changes, free_changes, purchases, simulate_changes
from autohete.answer.needs import least_memory
from autohete.answer.policies import JOINT, default_policies, judged, longest_first, ranked
from autohete.answer.result import NOISE, Answer, Budget, Candidate, Change, Gain, Interval, Need
from autohete.answer.run import Run, in_turn
from autohete.answer.site import SYSTEM_BYTES, Site, without_system
from autohete.errors import InputError
from autohete.hardware import Hardware
from autohete.plan import Plan
from autohete.plan.policy import Verdict
from autohete.policies import parse_policy
from autohete.profile import Profile, analytic_profile
from autohete.quantities import parse_quantity
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY
from autohete.simulate import Simulation, simulate_plan
from autohete.simulate.largest import GrowingFigure, Largest, largest
from autohete.workload import Workload

__all__ = [
    "NOISE",
    "SYSTEM_BYTES",
    "Answer",
    "Budget",
    "Candidate",
    "Change",
    "Gain",
    "Interval",
    "Need",
    "Run",
    "Sampling",
    "Site",
    "default_policies",
    "find_answer",
    "in_turn",
    "without_system",
]

#: Both ends of the interval of draws.
_LOW, _HIGH = 0.05, 0.95


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
    run: Run = in_turn,
) -> Answer:
    """Judge all policies, and simulate what would change the result.

    Args:
        profile: of the workload on the hardware, before anything is left to the system.
        site: where its hardware comes from. None for a measured profile: then nothing is drawn, and no other hardware or size
            is simulated, since the times are those of one machine and one size.
        system_bytes: host memory of the node that is left to the system.
        policies: names with flags; None: all that are registered.
        runnable: frameworks, of which one has to run what is recommended; none: any plan may be.
        tokens: of the whole training.
        sampling: draws of uncertain figures; None: as many as by default.
        sizes: figures of the workload whose largest value is looked for.
        given: names of the figures that were given.
        run: applies a function to many arguments, such as in several processes.

    Raises:
        InputError: invalid figures, or no policy can plan this workload at all.
    """
    system_bytes = 0 if profile.hardware.unified else system_bytes  # gpu.reserved_memory has it
    profile = replace(profile, hardware=without_system(profile.hardware, system_bytes))
    names = default_policies(profile.hardware.gpus) if policies is None else tuple(policies)
    candidates = ranked(run(partial(judged, profile), longest_first(names)))
    if all(each.summary.verdict is Verdict.INVALID for each in candidates):
        raise InputError(candidates[0].summary.explanation)
    if runnable:
        candidates = tuple(each for each in candidates if {*runnable} & {*each.runs_in})
        if not candidates:
            raise InputError(f"{' and '.join(runnable)} can run no plan here: name other frameworks, or none")
        names = tuple(name for name in names if name in {each.name for each in candidates})
    best = candidates[0] if candidates[0].fits else None
    simulation = None
    if best is not None:
        assert best.plan is not None
        simulation = simulate_plan(profile, best.plan)
    gains, free, adapters, interval, grown = [], [], [], None, []
    if site is not None:
        site = replace(site, system_bytes=system_bytes)
        bought, freely = list(purchases(site, simulation)), list(free_changes(profile.workload))
        instead = list(adapter_changes(profile.workload)) if best is None else []
        if best is None:  # rates do not change what fits
            bought = [change for change in bought if change.memory or change.gpus is not None]
        changed = simulate_changes(profile, site, [*bought, *freely, *instead], candidates, names, run)
        gains, free, adapters = (
            changed[: len(bought)],
            changed[len(bought) :][: len(freely)],
            changed[len(bought) + len(freely) :],
        )
        if simulation is not None:
            interval = _interval(site, simulation, sampling or Sampling(), run)
        asked = sizes if best is not None else [GrowingFigure.BATCH, *sizes]
        grown = _largest(profile, _who_grows(candidates, profile.hardware), list(dict.fromkeys(asked)), run)
    needs = [] if best is not None else least_memory(profile, system_bytes, names, run)
    return Answer(
        profile,
        system_bytes,
        tokens,
        candidates,
        simulation,
        _budgets(profile, system_bytes, simulation),
        tuple(gains),
        tuple(free),
        tuple(adapters),
        tuple(needs),
        tuple(grown),
        interval,
        tuple(sorted(given)),
        tuple(runnable),
    )


# --- budgets ------------------------------------------------------------------------------------------------------


def _budgets(profile: Profile, system_bytes: int, simulation: Simulation | None) -> tuple[Budget, ...]:
    gpu, host, here = profile.hardware.gpu, profile.hardware.host, profile.hardware.gpus_of_node
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


# --- sizes and draws ----------------------------------------------------------------------------------------------


def _who_grows(candidates: Sequence[Candidate], hardware: Hardware) -> list[str]:
    """Policies of which one fits wherever any does: ``joint``, or without it all that can plan; the fastest may grow least."""
    able = [each.name for each in candidates if each.summary.verdict is not Verdict.INVALID]
    return [JOINT] if JOINT in able and hardware.gpus == 1 else longest_first(able)


def _largest(profile: Profile, names: Sequence[str], sizes: Sequence[GrowingFigure], run: Run) -> list[Largest]:
    """The largest value of each figure under any of some policies."""
    work = [(name, figure) for figure in sizes for name in names]
    results: list[Largest] = run(partial(_grown, profile), work)
    each = (results[start : start + len(names)] for start in range(0, len(results), len(names)))
    return [max(some, key=lambda one: one.value) for some in each]


def _grown(profile: Profile, asked: tuple[str, GrowingFigure]) -> Largest:
    return largest(profile.workload, profile.hardware, parse_policy(asked[0]), asked[1])


def _interval(site: Site, simulation: Simulation, sampling: Sampling, run: Run) -> Interval | None:
    """Simulate the plan again with draws of the uncertain figures."""
    figures = open_figures(site.source, site.given, site.gpus)
    if not (sampling.draws and figures):
        return None
    results = run(partial(_drawn, site, simulation.profile.workload, simulation.plan), draw(figures, sampling))
    low, high = np.quantile([seconds for seconds, _ in results], [_LOW, _HIGH]).tolist()
    short: dict[str, int] = {}
    for _, memory in results:
        if memory:
            short[memory] = short.get(memory, 0) + 1
    return Interval(sampling, len(figures), low, high, dict(sorted(short.items())))


def _drawn(site: Site, workload: Workload, plan: Plan, moved: Mapping[str, str]) -> tuple[float, str]:
    """The plan's time with some figures, and the memory that is then too small; empty if it fits.

    Sizes of GPU memory decide whether the plan fits, not how long it takes.
    """
    sizes = {name: moved[f"gpu.{name}"] for name in ("memory", "reserved_memory") if f"gpu.{name}" in moved}
    rates = {key: text for key, text in moved.items() if key.removeprefix("gpu.") not in sizes}
    hardware = site.hardware(rates)
    result = simulate_plan(analytic_profile(workload, hardware), plan)
    whole, reserved = (
        parse_quantity(sizes[name], "bytes") if name in sizes else now
        for name, now in (("memory", hardware.gpu.memory_bytes), ("reserved_memory", hardware.gpu.reserved_bytes))
    )
    if result.gpu.peak_bytes > whole - reserved:
        return result.iteration_seconds, GPU_MEMORY
    return result.iteration_seconds, next((one.memory for one in result.memories[1:] if not one.fits), "")
