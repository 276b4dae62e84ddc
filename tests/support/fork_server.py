"""Processes that start within milliseconds: forks of one that has imported what they need."""

from __future__ import annotations

import multiprocessing
import os
import sys
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from unittest.mock import patch

#: What the processes need. Importing it takes longer than most of them run.
_MODULES = ["torch._dynamo", "support.rank_trainings"]  # optimizers import the first


@cache
def fork_server() -> ForkServerContext:
    """A context whose processes are forks of a server, which starts with the first call.

    Threads do not survive a fork, so the server and all that it starts have ``OMP_NUM_THREADS=1``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_MODULES)
    with patch.dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return context
