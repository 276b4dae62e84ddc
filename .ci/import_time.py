"""Measure how long AutoHete takes to start, and fail above a limit. Command: ``python .ci/import_time.py``.

CPU time of a fresh interpreter, least of several, without that of an interpreter that imports nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys

#: Limits in seconds of CPU time; about three times what a desktop CPU of 2024 takes.
LIMITS = {"import autohete": 0.15, "import autohete.simulate": 3.0, "from autohete.cli.app import app": 1.5}
RUNS = 5


def seconds(code: str) -> float:
    """Return the CPU time of an interpreter that runs ``code``: the least of :data:`RUNS`."""
    least = float("inf")
    for _ in range(RUNS):
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True)
        after = os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        least = min(least, spent)
    return least


def main() -> int:
    """Print the time of each statement; return 1 if one is above its limit."""
    nothing, slow = seconds("pass"), 0
    for code, limit in LIMITS.items():
        spent = max(seconds(code) - nothing, 0.0)
        slow += spent > limit
        print(f"{code}: {1000 * spent:.0f} ms, limit {1000 * limit:.0f} ms{' EXCEEDED' if spent > limit else ''}")
    return min(slow, 1)


if __name__ == "__main__":
    sys.exit(main())
