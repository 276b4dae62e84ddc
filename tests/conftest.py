"""How hard Hypothesis tries, how long a test may take, and a fixture that several files share.

By default Hypothesis tries the same examples in every run; ``AUTOHETE_HYPOTHESIS=wide pytest`` looks for new counterexamples
among many random ones, and prints what it finds as a blob to reproduce it.

A test that hangs, which a fault in threads does, ends its process with the stacks of all threads on stderr.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Iterator
from typing import TextIO

import pytest
from hypothesis import HealthCheck, settings

# Drawing a profile with its plan takes many small draws; that is no sign of a bad strategy.
_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=100, print_blob=True, suppress_health_check=_SLOW_IS_FINE
)
settings.register_profile("wide", deadline=None, max_examples=1000, print_blob=True, suppress_health_check=_SLOW_IS_FINE)
settings.load_profile(os.environ.get("AUTOHETE_HYPOTHESIS", "ci"))

#: Seconds after which a test hangs.
_HANG_SECONDS = float(os.environ.get("AUTOHETE_HANG_SECONDS", "1e5" if "AUTOHETE_HYPOTHESIS" in os.environ else "600"))
_stderr = pytest.StashKey[TextIO]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the process's own stderr: while a test runs, pytest captures what is written to it.

    A process in the background inherits that SIGINT is ignored, and so would the processes that tests interrupt.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert sys.__stderr__ is not None
    config.stash[_stderr] = os.fdopen(os.dup(sys.__stderr__.fileno()), "w")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close it."""
    config.stash[_stderr].close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Guard each test with its fixtures."""
    faulthandler.dump_traceback_later(_HANG_SECONDS, exit=True, file=item.config.stash[_stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def little_room() -> Iterator[None]:
    """No file may become larger than 100 kB, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)
