"""The effect of other hardware: each change by itself, simulated with the current plan and with a new one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from autohete.answer.policies import JOINT, default_policies, longest_first
from autohete.answer.result import Candidate, Change, Gain
from autohete.answer.run import Run
from autohete.answer.site import Site
from autohete.errors import AutoHeteError, InputError
from autohete.hardware import Hardware
from autohete.plan import Plan
from autohete.plan.policy import Verdict
from autohete.policies import NamedPolicy, parse_policy
from autohete.policies.joint import JointFrom
from autohete.profile import Profile, analytic_profile
from autohete.quantities import format_bytes
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY
from autohete.simulate import Simulation, simulate_plan
from autohete.simulate.summary import answer_or_refusal
from autohete.workload import Workload
from autohete.workload.training import Lora

_MORE_GPU_BYTES = 8 * 2**30
#: Rank of the adapters that are tried.
_RANK = 16
#: Names of changes of the training, before the parentheses.
CHUNKED_LOSS = "chunked loss"
LORA = f"LoRA of rank {_RANK}"
QLORA = f"QLoRA of rank {_RANK}"


def purchases(site: Site, simulation: Simulation | None) -> Iterator[Change]:
    """Possible purchases, each by itself: sizes and rates of the whole node."""
    now = site.whole()
    larger = now.gpu.memory_bytes + _MORE_GPU_BYTES
    yield Change(
        f"{format_bytes(_MORE_GPU_BYTES)} more GPU memory ({format_bytes(larger)}{' each' if site.gpus > 1 else ''})",
        {"gpu.memory": f"{larger}B"},
        memory=GPU_MEMORY,
    )
    if not now.unified:
        yield from _host_purchases(now)
    used = {home for unit in simulation.plan.units for home in unit.homes} if simulation is not None else set()
    for place in now.places:
        if place.name in used:
            rates = {"read": place.read_bandwidth, "write": place.write_bandwidth, "both": place.both_bandwidth}
            twice = {f"{name}_bandwidth": 2 * rate for name, rate in rates.items() if rate is not None}
            yield Change(
                f"twice the {place.name} ({' and '.join(f'{rate / 1e9:.3g}' for rate in [*twice.values()][:2])} GB/s)",
                {f"places.{place.name}.{name}": _rate(rate) for name, rate in twice.items()}
                | {f"places.{place.name}.capacity": f"{2 * place.capacity_bytes}B"},
            )
    if now.interconnect is not None:
        more = site.gpus + 1 if site.gpus < now.interconnect.gpus else site.gpus + now.interconnect.gpus
        if more <= now.interconnect.gpus or now.interconnect.network_bandwidth is not None:
            yield Change(f"{more} GPUs instead of {site.gpus}, each with this batch", {}, gpus=more)


def _host_purchases(now: Hardware) -> Iterator[Change]:
    """More of the host, its DRAM, its CPU and the link; ``now`` has one memory domain's part of what the figures give."""
    host, cpu, domains = now.host, now.cpu, now.host.memory_domains
    if host.pinned_bytes is not None:
        limit = 2 * host.pinned_bytes * domains
        yield Change(
            f"twice the pinned memory ({format_bytes(limit)})", {"host.pinned_memory": f"{limit}B"}, memory=PINNED_MEMORY
        )
    twice = 2 * host.memory_bytes * domains
    yield Change(
        f"twice the host memory ({format_bytes(twice)})",
        {"host.memory": f"{twice}B"},
        memory=HOST_MEMORY,
    )
    links = {"h2d": now.h2d, "d2h": now.d2h}
    rates = " and ".join(f"{2 * link.bandwidth / 1e9:.3g}" for link in links.values())
    if now.h2d.far:  # what is between the domains is part of the platform, and its rate the one that counts
        yield Change(
            f"twice the rate to the far memory ({rates} GB/s)",
            {f"links.{name}.far_bandwidth": _rate(2 * link.bandwidth) for name, link in links.items()},
        )
    else:
        yield Change(
            f"the next generation of the link, twice as fast ({rates} GB/s)",
            {
                f"links.{name}.{figure}": _rate(2 * rate)
                for name, link in links.items()
                for figure in ("bandwidth", "all_gpus_bandwidth", "all_gpus_duplex_bandwidth")
                if (rate := getattr(link, figure)) is not None
            },
        )
    dram = 1.25 * host.memory_bandwidth * domains
    yield Change(f"25 % more DRAM bandwidth ({dram / 1e9:.3g} GB/s)", {"host.memory_bandwidth": _rate(dram)})
    cores = max(round(1.25 * cpu.cores), cpu.cores + 1)
    kernels = {
        "update_bandwidth": cpu.update_bandwidth,
        "elementwise_bandwidth": cpu.elementwise_bandwidth,
        "ranks_update_bandwidth": cpu.ranks_update_bandwidth,
    }
    faster = {f"cpu.{name}": _rate(rate * cores / cpu.cores) for name, rate in kernels.items() if rate is not None}
    yield Change(f"{cores} CPU cores instead of {cpu.cores}", {"cpu.cores": str(cores), **faster})


def _rate(value: float) -> str:
    return f"{value:.12g}B/s"


def free_changes(workload: Workload) -> Iterator[Change]:
    """Changes that cost nothing and compute the same gradients."""
    try:
        chunked = replace(workload, chunked_loss=True)
    except InputError:  # a traced model has a loss of its own
        return
    if chunked.loss_tokens < workload.loss_tokens:
        yield Change(f"{CHUNKED_LOSS} (logits some tokens at a time)", {}, workload=chunked)


def adapter_changes(workload: Workload) -> Iterator[Change]:
    """Adapters instead of all parameters, the usual choice if all do not fit. This trains something else."""
    if workload.training.lora is None and workload.training.last_blocks is None:
        for name, lora in ((LORA, Lora(_RANK)), (QLORA, Lora(_RANK, quantised=True))):
            with suppress(InputError):  # such as an optimizer that does not go with it
                adapted = replace(workload, training=replace(workload.training, lora=lora))
                yield Change(f"{name} ({adapted.trained_parameters / 1e6:,.0f}M parameters)", {}, workload=adapted)


@dataclass(frozen=True, slots=True)
class _Again:
    """A change to simulate with one policy, or with the current plan.

    Args:
        change: of hardware or training.
        policy: its name.
        plan: the current plan; None to plan anew.
        start: the current plan, if ``joint`` plans anew and may start from it.
    """

    change: Change
    policy: str
    plan: Plan | None = None
    start: Plan | None = None

    def planner(self) -> NamedPolicy:
        """The policy that plans anew."""
        return parse_policy(self.policy) if self.start is None else NamedPolicy(self.policy, JointFrom(self.start))


def simulate_changes(
    profile: Profile,
    site: Site,
    changes: Sequence[Change],
    candidates: Sequence[Candidate],
    names: Sequence[str],
    run: Run,
) -> list[Gain]:
    """Simulate each change with the best plan as it is, and planned anew.

    ``joint`` plans wherever it can, and starts from the current plan where only the hardware changes: it is never slower than
    another policy. Without it the best and the next best policy plan;
    all of them for several GPUs, or if nothing fits.
    """
    fitting = [each for each in candidates if each.fits]
    best = fitting[0] if fitting else None
    work: list[_Again] = []
    for change in changes:
        gpus = change.gpus or site.gpus
        covers = gpus == 1 and JOINT in names
        chosen = [each.name for each in fitting if not each.same_plan_as][:2]
        if change.gpus is not None:
            chosen = [*dict.fromkeys([*names, *default_policies(gpus)])]
        elif covers:
            chosen = [JOINT]
        elif gpus > 1 or not fitting:
            chosen = [*names]
        start = best.plan if best is not None and covers and change.workload is None else None
        work += [_Again(change, name, start=start if name == JOINT else None) for name in longest_first(chosen)]
        if best is not None and change.gpus is None:
            work.append(_Again(change, best.name, best.plan))
    results = run(partial(_with_change, profile.workload, site), work)
    now = min((each.seconds / _tokens(profile) for each in fitting), default=None)
    changed = []
    for change in changes:
        here = [result for asked, result in zip(work, results, strict=True) if asked.change == change]
        changed.append(_gain(change, min(here, key=lambda result: result.key), now, _tokens(profile)))
    return changed


def _tokens(profile: Profile) -> int:
    """Tokens of an iteration on all GPUs."""
    return profile.workload.samples * profile.workload.sequence_length * profile.hardware.gpus


@dataclass(frozen=True, slots=True)
class _Result:
    """How one policy, or one plan, does after a change."""

    policy: str
    verdict: Verdict
    explanation: str
    seconds: float | None
    tokens_per_second: float | None

    @property
    def key(self) -> tuple[bool, float, bool]:
        """Orders results: what fits, the fastest first, then what is planned for one reason only."""
        token = 0.0 if self.tokens_per_second is None else 1 / self.tokens_per_second
        return self.verdict is not Verdict.OK, token, self.policy == JOINT


def _with_change(workload: Workload, site: Site, asked: _Again) -> _Result:
    change = asked.change
    there = replace(site, gpus=change.gpus or site.gpus)
    try:
        profile = analytic_profile(change.workload or workload, there.hardware(change.moved))
        if asked.plan is None:
            summary, _ = answer_or_refusal(profile, asked.planner())
            return _Result(
                asked.policy, summary.verdict, summary.explanation, summary.iteration_seconds, summary.tokens_per_second
            )
        kept = simulate_plan(profile, asked.plan)
    except AutoHeteError as error:  # a plan or a number of GPUs that is not possible after the change
        return _Result(asked.policy, Verdict.INVALID, str(error), None, None)
    if kept.verdict is not Verdict.OK:
        return _Result(asked.policy, kept.verdict, "", None, None)
    return _Result(asked.policy, kept.verdict, "", kept.iteration_seconds, kept.tokens_per_second)


def _gain(change: Change, best: _Result, now: float | None, tokens: int) -> Gain:
    if best.tokens_per_second is None:
        return Gain(change, "", best.verdict, best.explanation, None, None, None, None)
    each = 1 / best.tokens_per_second
    saved = None if now is None else now - each
    return Gain(
        change,
        best.policy,
        best.verdict,
        "",
        best.seconds,
        best.tokens_per_second,
        None if saved is None else saved * tokens,
        None if saved is None or now is None else saved / now,
    )
