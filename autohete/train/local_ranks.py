"""Several ranks on this machine, each a process, connected by Gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from autohete.errors import AutoHeteError, RankError, check_whole

#: Time for the other ranks to end once one has failed.
_END_SECONDS = 30.0


def on_local_ranks(ranks: int, function: Callable[..., None], *args: Any) -> None:
    """Call ``function(rank, *args)`` in a process for each rank, with a default process group, and wait for all of them.

    Args:
        ranks: number of ranks.
        function: importable; the threads of this process are divided among the ranks.
        args: can be pickled.

    Raises:
        RankError: a rank has failed; the message is that of the first one.
    """
    check_whole("ranks", ranks, 1)
    context = multiprocessing.get_context("spawn")
    threads = max(torch.get_num_threads() // ranks, 1)
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "ranks")
        ends = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(target=_run, args=(rank, ranks, meeting, threads, ends[rank][1], function, args), daemon=True)
            for rank in range(ranks)
        ]
        try:
            for process, (_, there) in zip(processes, ends, strict=True):
                process.start()
                there.close()
            failures = _failures([here for here, _ in ends])
        finally:
            end = time.monotonic() + _END_SECONDS  # an interrupt reaches the ranks, too
            for process in processes:
                if process.pid is not None:
                    process.join(max(end - time.monotonic(), 0.0))
                    process.kill()
    if failures:
        raise RankError(failures[0])


def _failures(ends: list[Connection]) -> list[str]:
    """The failures of ranks, in the order in which they come, until all have ended."""
    found, open_ = [], dict(zip(ends, range(len(ends)), strict=True))
    patience: float | None = None
    while open_ and (ready := wait(list(open_), patience)):
        for one in ready:
            assert isinstance(one, Connection)
            rank = open_.pop(one)
            try:
                error = one.recv()
            except EOFError:
                error = "its process has ended"
            if error is not None:
                found.append(f"rank {rank}: {error}")
                patience = _END_SECONDS
    return found


def _run(
    rank: int, ranks: int, meeting: str, threads: int, end: Connection, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(threads)
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
        function(rank, *args)
        dist.destroy_process_group()
    except AutoHeteError as error:
        end.send(str(error))
    except Exception as error:
        end.send(f"{type(error).__name__}: {error}")
        raise
    else:
        end.send(None)
