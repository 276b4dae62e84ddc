"""Faults on one of several ranks: whatever kind of task fails, all ranks end within seconds with one clear error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.rank_faults import MIXES, RANKS, faulty_rank
from support.ranks import results

from autohete.schedule import COLLECTIVES


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXES)
def test_a_task_that_fails_on_one_rank_ends_all(name: str, tmp_path: Path) -> None:
    """A task of each kind, collectives too, fails on one of two ranks. Both ranks have one error that names rank and task;
    nothing hangs or is left behind, every block is as the error says, and both go on from the last checkpoint. Each kind in
    turn; if tests are wide, its first, a middle and its last task, on each rank, before its work and after it.
    """
    wide = os.environ.get("AUTOHETE_HYPOTHESIS") == "wide"
    first, second = results(faulty_rank, RANKS, name, wide, str(tmp_path))
    assert first == second
    assert {str(kind) for kind in COLLECTIVES} & set(first)
