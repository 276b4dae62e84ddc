"""The command line: within this process, where what it says and answers is tested; or in one of its own."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from subprocess import CompletedProcess
from types import FrameType
from unittest.mock import patch

from rich.console import Console

from autohete.cli.app import app, main

SMALL = ["--hidden", "256", "--blocks", "4", "--heads", "4", "--vocabulary", "1000", "--batch-size", "2"]
ENVIRONMENT = os.environ | {"COLUMNS": "200", "PYTHONPATH": str(Path(__file__).parents[2])}


def in_a_process(*arguments: str) -> CompletedProcess[str]:
    """Run ``python -m autohete`` and capture what it says."""
    command = [sys.executable, "-W", "error", "-m", "autohete", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False, timeout=120)


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def autohete(*arguments: str, cwd: Path | None = None) -> CompletedProcess[str]:
    """Run the command line here, which takes a tenth of the time of a process, and capture what it says."""
    out, complaint = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    code = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Cyclopts application invoked without tokens")  # which it reads from sys.argv
        stack.enter_context(patch.object(sys, "argv", ["autohete", *arguments]))
        stack.enter_context(patch.dict(os.environ, COLUMNS="200"))
        app.console = Console()  # cyclopts would keep the one of an earlier command, which may have had another width
        stack.callback(setattr, app, "console", None)
        stack.enter_context(contextlib.chdir(cwd or "."))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(complaint))
        # With a handler of its own the program leaves signals alone.
        stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, _interrupted))
        try:
            main()
        except SystemExit as ending:
            code = 0 if ending.code is None else int(ending.code)
    for stream in (out, complaint):
        stream.seek(0)
    return CompletedProcess(["autohete", *arguments], code, out.read(), complaint.read())


def refused(*arguments: str) -> str:
    """The one line of a refusal."""
    done = autohete(*arguments)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith("autohete: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr
