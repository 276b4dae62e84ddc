"""How the command line works through an answer: in processes, in order, until a deadline."""

from __future__ import annotations

import time
from functools import partial

import pytest
from support.command import autohete, refused

from autohete.cli.parallel import Stages

TINY = ["--hidden", "256", "--blocks", "2", "--heads", "4", "--vocabulary", "1000", "--batch-size", "2", "--draws", "0"]


def slept(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_in_the_order_of_their_calls(jobs: int) -> None:
    """Whichever ends first."""
    pauses = [0.2, 0.0, 0.1, 0.0]
    assert Stages(jobs, None)("test", [partial(slept, pause) for pause in pauses]) == pauses


def failing() -> None:
    raise ZeroDivisionError("in a call")


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_an_error_of_a_call_is_raised(seconds: float | None) -> None:
    """With a deadline and without."""
    with pytest.raises(ZeroDivisionError, match="in a call"):
        Stages(2, seconds)("test", [failing, failing])


def test_after_the_deadline_there_are_no_more_results() -> None:
    """What has ended is there, and what has not is None; a later stage is not begun."""
    run = Stages(2, 10.0)  # processes take seconds to start
    begin = time.monotonic()
    results = run("test", [partial(slept, 0.0), partial(slept, 600.0)])
    assert results == [0.0, None]
    assert time.monotonic() - begin < 30
    assert run("test", [partial(slept, 0.0)]) == [None]


@pytest.mark.slow
def test_a_fast_answer_leaves_out_what_would_change_it() -> None:
    """Neither levers nor purchases, but the same best plan."""
    fast, whole = (autohete("plan", *TINY, *extra, "--jobs", "1").stdout for extra in (["--fast"], []))
    assert "effect of a purchase" in whole
    assert "with other mathematics" in whole
    assert "effect of a purchase" not in fast
    assert "with other mathematics" not in fast
    assert fast.split("memory  ")[0] == whole.split("memory  ")[0]


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf"])
def test_a_timeout_is_a_time(given: str) -> None:
    """Positive and finite."""
    assert "--timeout is" in refused("plan", *TINY, "--timeout", given)
