"""Work on the machines of a Dask cluster. Needs ``dask[distributed]``, which is an optional dependency."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from typing import Any, TypeVar

from autohete.cli.interrupt import children_uninterrupted
from autohete.errors import InputError

LOCAL = "local"
#: Seconds to wait for a scheduler.
_PATIENCE = 10
#: Calls per worker that are submitted ahead.
_AHEAD = 4

T = TypeVar("T")
R = TypeVar("R")


def on_cluster(address: str, jobs: int | None, action: Callable[[T], R], work: Iterable[T]) -> Iterator[R]:
    """Connect to a Dask cluster, and return the results of ``action`` on all of ``work``, each as soon as it is there.

    Not by joblib's backend for Dask, which returns all results at the end: they would be lost by an interrupt.

    Args:
        address: of the scheduler; ``local`` starts ``jobs`` processes on this machine, one per core if None.
        action, work: importable and picklable.

    Raises:
        InputError: Dask is not installed, or there is no scheduler or no worker at ``address``.
    """
    try:
        from distributed import Client, LocalCluster, as_completed
    except ImportError as error:
        raise InputError(
            "--cluster needs Dask: install it with `pip install 'autohete[cluster]'`, or leave out --cluster"
        ) from error
    with ExitStack() as stack:
        where: Any = address
        if address == LOCAL:
            with children_uninterrupted():
                count = jobs or os.cpu_count()
                options = {"threads_per_worker": 1, "dashboard_address": None, "silence_logs": logging.CRITICAL}
                where = stack.enter_context(LocalCluster(n_workers=count, **options))
        try:
            client = stack.enter_context(Client(where, timeout=_PATIENCE))
            workers = len(client.scheduler_info()["workers"])
        except (OSError, ValueError, ImportError) as error:
            raise InputError(
                f"there is no Dask scheduler at {address!r}: start one with `dask scheduler` and give its address, such as "
                "tcp://10.0.0.1:8786, or local"
            ) from error
        if not workers:
            raise InputError(f"the scheduler at {address!r} has no workers: start some with `dask worker {address}`")
        connected = stack.pop_all()

    def results() -> Iterator[R]:
        with connected:
            some = iter(work)
            first = [client.submit(action, each, pure=False) for each in islice(some, _AHEAD * workers)]
            running = as_completed(first, with_results=True)
            for _, result in running:
                for each in islice(some, 1):
                    running.add(client.submit(action, each, pure=False))
                yield result

    return results()
