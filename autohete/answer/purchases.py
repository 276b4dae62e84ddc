"""What could be bought: other hardware, each purchase by itself and two together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from autohete.answer.result import AND, Change, Gain
from autohete.answer.site import Site
from autohete.hardware import OVER_PCIE, Hardware
from autohete.quantities import format_bytes
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY
from autohete.simulate import Simulation

_MORE_GPU_BYTES = 8 * 2**30
#: Pairs are made of the best purchases only.
_PAIRED = 3


def single_purchases(site: Site, simulation: Simulation | None) -> Iterator[Change]:
    """Possible purchases, each by itself: sizes and rates of the whole node."""
    now = site.whole()
    larger = now.gpu.memory_bytes + _MORE_GPU_BYTES
    yield Change(
        f"{format_bytes(_MORE_GPU_BYTES)} more GPU memory ({format_bytes(larger)}{' each' if site.gpus > 1 else ''})",
        {"gpu.memory": f"{larger}B"},
        memory=GPU_MEMORY,
        item="gpu-memory",
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
                {f"places.{place.name}.{name}": rate_text(rate) for name, rate in twice.items()}
                | {f"places.{place.name}.capacity": f"{2 * place.capacity_bytes}B"},
                item=place.name,
            )
    if now.interconnect is not None:
        group = site.parallelism.gpus
        more = site.gpus + (group if site.gpus + group <= now.interconnect.gpus else now.interconnect.gpus)
        if more <= now.interconnect.gpus or now.interconnect.network_bandwidth is not None:
            assumed = f", {OVER_PCIE} (an assumption)" if now.interconnect.assumed else ""
            yield Change(f"{more} GPUs instead of {site.gpus}, each with this batch{assumed}", {}, gpus=more, item="gpus")


def _host_purchases(now: Hardware) -> Iterator[Change]:
    """More of the host, its DRAM, its CPU and the link; ``now`` has one memory domain's part of what the figures give."""
    host, cpu, domains = now.host, now.cpu, now.host.memory_domains
    if host.pinned_bytes is not None:
        limit = 2 * host.pinned_bytes * domains
        yield Change(
            f"twice the pinned memory ({format_bytes(limit)})",
            {"host.pinned_memory": f"{limit}B"},
            memory=PINNED_MEMORY,
            item="pinned-memory",
        )
    twice = 2 * host.memory_bytes * domains
    yield Change(
        f"twice the host memory ({format_bytes(twice)})",
        {"host.memory": f"{twice}B"},
        memory=HOST_MEMORY,
        item="host-memory",
    )
    links = {"h2d": now.h2d, "d2h": now.d2h}
    rates = " and ".join(f"{2 * link.bandwidth / 1e9:.3g}" for link in links.values())
    if now.h2d.far:  # what is between the domains is part of the platform, and its rate the one that counts
        yield Change(
            f"twice the rate to the far memory ({rates} GB/s)",
            {f"links.{name}.far_bandwidth": rate_text(2 * link.bandwidth) for name, link in links.items()},
            item="link",
        )
    else:
        yield Change(
            f"the next generation of the link, twice as fast ({rates} GB/s)",
            {
                f"links.{name}.{figure}": rate_text(2 * rate)
                for name, link in links.items()
                for figure in ("bandwidth", "all_gpus_bandwidth", "all_gpus_duplex_bandwidth")
                if (rate := getattr(link, figure)) is not None
            },
            item="link",
        )
    dram = 1.25 * host.memory_bandwidth * domains
    yield Change(f"25 % more DRAM bandwidth ({dram / 1e9:.3g} GB/s)", {"host.memory_bandwidth": rate_text(dram)}, item="dram")
    cores = max(round(1.25 * cpu.cores), cpu.cores + 1)
    kernels = {
        "update_bandwidth": cpu.update_bandwidth,
        "elementwise_bandwidth": cpu.elementwise_bandwidth,
        "ranks_update_bandwidth": cpu.ranks_update_bandwidth,
    }
    faster = {f"cpu.{name}": rate_text(rate * cores / cpu.cores) for name, rate in kernels.items() if rate is not None}
    yield Change(f"{cores} CPU cores instead of {cpu.cores}", {"cpu.cores": str(cores), **faster}, item="cores")


def rate_text(value: float) -> str:
    """Return bytes/s as a figure of hardware."""
    return f"{value:.12g}B/s"


def pairs(gains: Sequence[Gain]) -> list[Change]:
    """Two of the best purchases together.

    Args:
        gains: of single purchases, best first.
    """
    best = [gain.change for gain in gains if gain.helps][:_PAIRED]
    return [
        Change(AND.join((one.name, other.name)), {**one.moved, **other.moved}, gpus=one.gpus or other.gpus)
        for one, other in combinations(best, 2)
    ]
