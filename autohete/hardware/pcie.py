"""How GPUs are joined where a hardware file does not specify it: over PCIe, through host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autohete.errors import InputError
from autohete.quantities import parse_quantity

#: The table of a hardware file that describes how its GPUs are joined.
JOIN = "interconnect"
#: Where the figures of the default are said to come from.
DEFAULT = "the default over PCIe"
#: How the source of an assumed bandwidth begins.
ASSUMED = "assumed, as the file has no table [interconnect]: "
#: Share of a link in duplex that NCCL reaches through host memory, least, usual and most, from bus bandwidths of nccl-tests.
_SHARES = (0.35, 0.7, 0.82)
_SHARES_SOURCE = (
    f"{ASSUMED}{_SHARES[1]} of a link in duplex. NCCL through host memory: 18 GB/s on 4 RTX 4090 (github NVIDIA/nccl issue "
    "1603; 0.82 of 22), 35 on 4 RTX 5090 (issue 1639; 0.69 of 50.9); lower end: 4.0 in all-reduce on two RTX 2080 Ti behind "
    "one switch of PCIe 3.0 (github Anthony-Hoo/Anthony-Hoo.github.io, AutoDL_Multi-GPU_Interconnection_Test.md), 0.33 of 12.2"
)
#: No PCIe slot is faster: version 6.0 with 16 lanes has 121 GB/s each way. Faster links are of another kind.
_FASTEST = 130e9


def joined(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the raw ``document`` with a table for the interconnect: its own, or the default over PCIe.

    Unified and emulated hardware, and links that are faster than PCIe, have no default.
    """
    if JOIN in document or "emulation" in document or document.get("unified") is True:
        return document
    try:
        links = document["links"]
        rates = [parse_quantity(links[way][name]["value"], "bandwidth") for way in ("h2d", "d2h") for name in _RATES]
    except (InputError, KeyError, TypeError):
        return document  # validation reports the fault
    return document if max(rates) > _FASTEST else {**document, JOIN: _table(min(rates))}


_RATES = ("bandwidth", "duplex_bandwidth")


def _table(link: float) -> dict[str, Any]:
    """Return the default for links of ``link`` bytes/s in duplex."""
    low, value, high = (f"{share * link / 1e9:.4g}GB/s" for share in _SHARES)
    return {
        "model": "PCIe without peer-to-peer (assumed)",
        "path": "host",
        "gpus": {"value": 8, "source": "assumed: as many as one host has slots for", "date": "2026-11"},
        "bandwidth": {"value": value, "range": [low, high], "source": _SHARES_SOURCE, "date": "2026-11"},
        "latency": {
            "value": "5.7us",
            "range": ["2.5us", "5.7us"],
            "source": "NCCL src/graph/tuning.cc, ring with the Simple protocol: 5.7 us a step over PCIe (LL128 2.5)",
            "date": "2025",
        },
        "concurrent_share": {
            "value": 0.9,
            "range": [0.5, 1.0],
            "source": "assumed: as on rtxpro6000-8gpu, where NCCL needs few channels over PCIe",
            "date": "2026-11",
        },
    }
