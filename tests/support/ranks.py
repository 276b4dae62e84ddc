"""Functions called on several ranks, each a process with Gloo."""

from __future__ import annotations

import os
import pickle
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from autohete.errors import AutoHeteError
from support.fork_server import fork_server

#: No test waits longer for its ranks.
LIMIT_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank has ended: the result of its function, or the text of its error; its process's exit code."""

    result: Any
    error: str
    code: int | None


def on_ranks(function: Callable[..., Any], ranks: int, *args: Any, limit_seconds: float = LIMIT_SECONDS) -> list[Ended]:
    """Call ``function(rank, *args)`` in a process for each rank, with a default group of Gloo.

    Args:
        function: importable.
        ranks: number of ranks.
        args: can be pickled.
        limit_seconds: all of them have ended by then, or the test fails.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = fork_server()
    ends = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=_rank, args=(function, rank, ranks, port, ends[rank][1], args), daemon=True)
        for rank in range(ranks)
    ]
    try:
        for process, (_, there) in zip(processes, ends, strict=True):
            process.start()
            there.close()
        found = [_received(here, limit_seconds) for here, _ in ends]
        for process in processes:
            process.join(limit_seconds)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert None not in codes, f"ranks have not ended: exit codes {codes}, {found}"
    return [Ended(*one, code) for one, code in zip(found, codes, strict=True)]


def results(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """The results of all ranks, none of which has failed."""
    ended = on_ranks(function, ranks, *args)
    assert not any(one.error for one in ended), "\n".join(one.error for one in ended)
    return [one.result for one in ended]


def _received(here: Connection, limit_seconds: float) -> tuple[Any, str]:
    if not here.poll(limit_seconds):
        return None, "time limit"
    try:
        found: tuple[Any, str] = pickle.loads(here.recv_bytes())
    except EOFError:
        return None, "killed"
    return found


def _rank(function: Callable[..., Any], rank: int, ranks: int, port: int, end: Connection, args: tuple[Any, ...]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    try:
        found = function(rank, *args), ""
    except BaseException as error:
        trace = "" if isinstance(error, AutoHeteError) else traceback.format_exc()
        found = None, f"{type(error).__name__}: {error}{trace}"
    end.send_bytes(pickle.dumps(found))  # not through shared memory, which ends with this process
    end.close()
    dist.destroy_process_group()
