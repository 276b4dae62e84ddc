"""What arXiv 2503.01890 (AutoHete) published for one A100-40GB; its absolute throughputs are not published."""

from __future__ import annotations

#: Baseline -> average and maximum speed-up of AutoHete over it (abstract and section 5).
SPEEDUPS: dict[str, tuple[float, float]] = {
    "zero_offload": (1.85, 2.08),
    "patrickstar": (1.63, 1.91),
    "stronghold": (1.32, 1.41),
}
#: AutoHete with against without its priority scheduling, one GPU: average and maximum; "small at 2B and 4B".
PRIORITY_SPEEDUP = (1.16, 1.24)
#: The largest model that ZeRO-Offload trains on this GPU.
ZERO_OFFLOAD_LIMIT = "gpt-12b"
