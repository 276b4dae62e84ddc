"""The command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SMALL = ["--hidden", "256", "--blocks", "4", "--heads", "4", "--vocabulary", "1000", "--batch-size", "2"]
ENVIRONMENT = os.environ | {"COLUMNS": "200", "PYTHONPATH": str(Path(__file__).parents[2])}


def autohete(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python -m autohete`` and capture what it says."""
    command = [sys.executable, "-W", "error", "-m", "autohete", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT, check=False, timeout=120)


def refused(*arguments: str) -> str:
    """The one line of a refusal."""
    done = autohete(*arguments)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith("autohete: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr
