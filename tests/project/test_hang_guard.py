"""A test that hangs ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HANGING = """
import threading

def wait_in_a_thread():
    threading.Event().wait()

def test_that_hangs():
    thread = threading.Thread(target=wait_in_a_thread, daemon=True)
    thread.start()
    thread.join()
"""


@pytest.mark.slow
def test_a_test_that_hangs_ends_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    """The guard of the test run ends a test that waits for ever, and shows where each of its threads is."""
    (tmp_path / "test_hanging.py").write_text(HANGING)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-p", "no:xdist", "test_hanging.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "AUTOHETE_HANG_SECONDS": "1"},
    )
    assert done.returncode == 1
    assert "in wait_in_a_thread" in done.stderr
    assert "in test_that_hangs" in done.stderr
