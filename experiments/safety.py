"""What does it cost to make a plan fit its memory under any timing?

Command: ``python experiments/safety.py [--out DIR]``. Machine: any; everything is simulated.

A plan fits if its simulated peak fits. If a copy is late, memory is freed later than simulated, and a plan that fits can run
out of memory. The worst case is the most that any order of the schedule's tasks occupies; if it exceeds the capacity, waits
are added that make it fit. This is checked for the grid of the published comparison: every policy, every model.

Writes ``safety.csv`` (one row per plan that fits), and prints the unsafe plans and the cost of their waits.

What would refute it: a plan for which no waits are found, or waits that make an iteration more than 2 % longer.
"""

from __future__ import annotations

if __name__ == "__main__" and not __package__:
    import _start  # type: ignore[import-not-found]  # noqa: F401

import csv
import io
from pathlib import Path

from cyclopts import App

from autohete.cli.app import run_app
from autohete.files import make_folder, write_text
from autohete.plan.policy import Verdict
from autohete.quantities import format_bytes, format_seconds
from autohete.report.tables import console, print_text, table
from autohete.simulate.summary import Summary
from experiments.comparison import Job, grid
from experiments.shared import run_all

COLUMNS = [
    "model",
    "policy",
    "gpu_capacity_bytes",
    "gpu_peak_bytes",
    "gpu_worst_bytes",
    "host_capacity_bytes",
    "host_peak_bytes",
    "host_worst_bytes",
    "waits",
    "iteration_seconds",
    "safe_iteration_seconds",
    "cost_percent",
]


def row(job: Job, summary: Summary) -> dict[str, object]:
    """Return one row of the file."""
    safe, seconds = summary.safe_iteration_seconds, summary.iteration_seconds
    return {
        "model": job.model,
        "policy": job.policy,
        **{name: getattr(summary, name) for name in COLUMNS[2:8]},
        "waits": summary.memory_waits,
        "iteration_seconds": seconds,
        "safe_iteration_seconds": safe,
        "cost_percent": None if safe is None or not seconds else round(100 * (safe / seconds - 1), 6),
    }


def exceeds(summary: Summary) -> bool:
    """Whether late copies could make the plan exceed its memory without waits; a plan may have them of its own."""
    return (
        bool(summary.memory_waits)
        or summary.gpu_worst_bytes is None
        or summary.gpu_worst_bytes > summary.gpu_capacity_bytes
        or summary.host_worst_bytes is None
        or summary.host_worst_bytes > summary.host_capacity_bytes
    )


def main(*, out: Path = Path("paper_figs")) -> None:
    """Simulate the grid, write the file, and print the unsafe plans.

    Parameters
    ----------
    out:
        Folder for the CSV file.
    """
    make_folder(out)
    summaries = {job: summary for job, summary in run_all(Job.run, grid()).items() if summary.verdict is Verdict.OK}
    jobs = [job for job in grid() if job in summaries]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row(job, summaries[job]) for job in jobs)
    write_text(out / "safety.csv", text.getvalue())
    unsafe = [job for job in jobs if exceeds(summaries[job])]
    shown = table(
        f"{len(unsafe)} of {len(jobs)} plans that fit would not fit under any timing",
        ["model", "policy", "peak", "worst case", "capacity", "waits", "iteration", "with them"],
    )
    for job in unsafe:
        one = summaries[job]
        safe = one.safe_iteration_seconds
        shown.add_row(
            job.model,
            job.policy,
            format_bytes(one.gpu_peak_bytes or 0),
            "any amount" if one.gpu_worst_bytes is None else format_bytes(one.gpu_worst_bytes),
            format_bytes(one.gpu_capacity_bytes),
            "-" if one.memory_waits is None else str(one.memory_waits),
            format_seconds(one.iteration_seconds or 0.0),
            "none found" if safe is None else format_seconds(safe),
        )
    console().print(shown)
    costs = [
        100 * (s.safe_iteration_seconds / s.iteration_seconds - 1)
        for s in summaries.values()
        if s.safe_iteration_seconds and s.iteration_seconds
    ]
    print_text(console(), f"with their waits iterations are at most {max(costs):.2f} % longer; written: {out}/safety.csv")


if __name__ == "__main__":
    run_app(App(name="safety", default_command=main, help=__doc__))
