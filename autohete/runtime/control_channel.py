"""Messages between the ranks of a training, apart from its tensors: what each is about to do, and that one has failed.

Before the ranks move tensors they exchange a few facts. So they move them only once all of them are there to do so, and a rank
that waits for another waits here, where a failure reaches it. (A collective of Gloo cannot be interrupted.)

All ranks are connected to rank 0, which decides whether an exchange is complete or a failure comes first. Whoever has begun an
exchange waits for that decision: otherwise some ranks would move tensors, and wait for ever for one that has just failed.

The system closes the connections of a process that ends, however it ends, so the others learn of it at once.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from autohete.errors import InputError, RankError

#: Facts of all ranks, by rank.
Facts = list[dict[str, Any]]

_HEAD = struct.Struct("!BBII")  # kind, stream, rank, bytes
_TOKEN_BYTES = 16
_PART, _WHOLE, _FAILED, _LEFT = range(4)
#: Time for all ranks to connect.
_CONNECT_SECONDS = 60.0


class ControlChannel:
    """One rank's end of the channel.

    Calls of :meth:`exchange` with one stream must come in the same order on all ranks; streams are independent.

    Args:
        rank: of this process.
        ranks: number of ranks.
        peers: connections by rank: of rank 0 to all others, of the others to rank 0.
        timeout_seconds: how long an exchange waits for a rank that lives.
    """

    def __init__(self, rank: int, ranks: int, peers: Mapping[int, socket.socket], timeout_seconds: float) -> None:
        self.rank, self.ranks, self._timeout = rank, ranks, timeout_seconds
        self._peers = dict(peers)
        self._changed = threading.Condition()
        self._sending = {peer: threading.Lock() for peer in peers}
        #: By stream: what each rank has sent that others have not (on rank 0), and what has come from all.
        self._parts: dict[int, dict[int, deque[bytes]]] = defaultdict(lambda: {r: deque() for r in range(ranks)})
        self._whole: dict[int, deque[list[bytes]]] = defaultdict(deque)
        #: By rank: what it did last.
        self._last: dict[int, str] = {}
        self._left: set[int] = set()
        self._failure: str | None = None
        #: Rank 0 has decided that no exchange is complete any more.
        self._over = False
        self._closed = False
        _open.add(self)
        for peer in peers:
            threading.Thread(target=self._receive, args=(peer,), name=f"autohete-rank-{peer}", daemon=True).start()

    @classmethod
    def connect(cls, group: dist.ProcessGroup, timeout_seconds: float) -> ControlChannel:
        """Connect the ranks of ``group``, all of which call this.

        Raises:
            InputError: a rank cannot reach rank 0.
        """
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if rank == 0:
            with socket.create_server(("", 0), backlog=ranks) as server:
                server.settimeout(_CONNECT_SECONDS)
                token = secrets.token_bytes(_TOKEN_BYTES)
                host = os.environ.get("MASTER_ADDR") or socket.gethostname()
                dist.broadcast_object_list([(host, server.getsockname()[1], token)], group=group, group_src=0)
                return cls(rank, ranks, _accepted(server, token, ranks), timeout_seconds)
        found: list[Any] = [None]
        dist.broadcast_object_list(found, group=group, group_src=0)
        host, port, token = found[0]
        try:
            connection = socket.create_connection((host, port), _CONNECT_SECONDS)
            connection.sendall(token + struct.pack("!I", rank))
        except OSError as error:
            raise InputError(
                f"rank {rank} cannot reach rank 0 at {host}:{port} ({error}): let all ranks connect to each other, and set "
                "MASTER_ADDR to the host of rank 0"
            ) from error
        return cls(rank, ranks, {0: connection}, timeout_seconds)

    def exchange(self, stream: int, label: str, facts: Mapping[str, Any], timeout_seconds: float | None = None) -> Facts:
        """Return the facts of all ranks, once all have called this with the same ``label``.

        Args:
            stream: number of the stream.
            label: what this rank is about to do, as in an error's message.
            facts: plain values. With a ``reason``, this rank ends the training for it, and those that go on fail with it.
            timeout_seconds: how long it waits for a rank that lives; None: as long as any exchange.

        Raises:
            RankError: a rank has failed, has ended or is about to do something else.
        """
        part = json.dumps({**facts, "label": label}).encode()
        with self._changed:
            self._check()
            if self.rank == 0:
                self._note_part(stream, 0, part)
        if self.rank:
            self._send(0, _PART, stream, self.rank, part)
        end = time.monotonic() + (self._timeout if timeout_seconds is None else timeout_seconds)
        with self._changed:
            while not self._whole[stream]:
                if self._over or self._closed or (self.rank and self._left):
                    self._check()
                if not self._changed.wait(end - time.monotonic()):
                    self._give_up(label, facts.get("reason"))
                    raise self.error()
            parts = self._whole[stream].popleft()
        found: Facts = [json.loads(one) for one in parts]
        if other := next((r for r, one in enumerate(found) if one["label"] != found[0]["label"]), None):
            for rank, one in enumerate(found):
                if one.get("reason"):
                    self.fail(one["reason"], rank)
            self.fail(
                f"it is at {found[other]['label']!r}, but rank 0 at {found[0]['label']!r}: all ranks must make the same calls "
                "of the Trainer in the same order",
                other,
            )
            raise self.error()
        return found

    def fail(self, reason: str, rank: int | None = None) -> None:
        """Report to all ranks that this rank, or another, has failed. Only the first report counts. Does not wait."""
        with self._changed:
            if self._closed:
                return
            self._note_failure(self.rank if rank is None else rank, reason)

    def error(self) -> RankError:
        """The error that describes the failure."""
        return RankError(f"{self._failure or 'the connection to the other ranks is closed'}")

    @property
    def has_failed(self) -> bool:
        """Whether a failure is known."""
        return self._failure is not None

    def failed_within(self, seconds: float) -> bool:
        """Wait for at most ``seconds`` until a failure is known; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._failure is not None, seconds)

    def close(self) -> None:
        """Leave: others that still need this rank fail. Later calls do nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        _open.discard(self)
        for peer, connection in self._peers.items():
            self._send(peer, _LEFT, 0, self.rank, b"")
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)  # what is under way still arrives

    def forget(self) -> None:
        """Close the connections of a forked process, which would hide that its parent has ended."""
        self._closed = True
        for connection in self._peers.values():
            connection.close()

    # --- with the lock

    def _check(self) -> None:
        if self._failure is not None or self._closed:
            raise self.error()
        if self._left:
            self._note_failure(min(self._left), "it has closed its Trainer, but others go on")
            raise self.error()

    def _give_up(self, label: str, reason: str | None) -> None:
        if reason:
            self._note_failure(self.rank, reason)
        missing = [r for r in range(self.ranks) if r != self.rank and self._last.get(r) != label] if not self.rank else [0]
        self._note_failure(
            missing[0] if missing else 0, f"it has not come to {label!r}{self._after(missing[0] if missing else 0)} in time"
        )

    def _note_part(self, stream: int, rank: int, part: bytes) -> None:
        """On rank 0: complete an exchange once the parts of all ranks are there."""
        if self._over:
            return
        parts = self._parts[stream]
        parts[rank].append(part)
        self._last[rank] = json.loads(part)["label"]
        if all(parts.values()):
            whole = [parts[r].popleft() for r in range(self.ranks)]
            self._whole[stream].append(whole)
            self._changed.notify_all()
            content = b"".join(struct.pack("!I", len(one)) + one for one in whole)
            for peer in self._peers:
                self._send(peer, _WHOLE, stream, 0, content)
        else:
            self._check_left()

    def _check_left(self) -> None:
        """On rank 0: an exchange that has begun cannot end without those that have left."""
        for parts in self._parts.values():
            if any(parts.values()):
                for rank in sorted(self._left):
                    if not parts[rank]:
                        self._note_failure(rank, "it has closed its Trainer, but others go on")

    def _note_failure(self, rank: int, reason: str) -> None:
        if self._failure is not None:
            return
        self._failure = f"rank {rank} has failed: {reason}"
        if not self.rank:
            self._end()
        for peer in self._peers:
            self._send(peer, _FAILED, 0, rank, reason.encode())

    def _end(self) -> None:
        self._over = True
        self._changed.notify_all()

    def _after(self, rank: int) -> str:
        return f" (the last that it came to was {self._last[rank]!r})" if rank in self._last else ""

    # --- connections

    def _send(self, peer: int, kind: int, stream: int, rank: int, content: bytes) -> None:
        with self._sending[peer], suppress(OSError):  # who reads from it learns that it is gone
            self._peers[peer].sendall(_HEAD.pack(kind, stream, rank, len(content)) + content)

    def _receive(self, peer: int) -> None:
        connection = self._peers[peer]
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        while (head := _read(connection, _HEAD.size)) is not None:
            kind, stream, rank, size = _HEAD.unpack(head)
            content = _read(connection, size)
            if content is None:
                break
            with self._changed:
                if kind == _PART:
                    self._note_part(stream, rank, content)
                elif kind == _WHOLE:
                    self._whole[stream].append(_split(content))
                    self._last[peer] = json.loads(self._whole[stream][-1][peer])["label"]
                    self._changed.notify_all()
                elif kind == _FAILED:
                    self._note_failure(rank, content.decode())
                    self._end()
                else:
                    self._left.add(rank)
                    self._check_left()
                    self._changed.notify_all()
        with self._changed:
            if peer not in self._left and not self._closed:
                self._note_failure(peer, f"its process has ended{self._after(peer)}")
                self._end()
        if self._closed or peer in self._left:
            connection.close()


def _accepted(server: socket.socket, token: bytes, ranks: int) -> dict[int, socket.socket]:
    """The connections of all other ranks, by rank."""
    found: dict[int, socket.socket] = {}
    end = time.monotonic() + _CONNECT_SECONDS
    while len(found) < ranks - 1:
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = next(r for r in range(1, ranks) if r not in found)
            raise InputError(f"rank {missing} has not connected to rank 0: let all ranks connect to each other") from None
        connection.settimeout(max(end - time.monotonic(), 1.0))
        hello = _read(connection, _TOKEN_BYTES + 4)
        if hello is None or not secrets.compare_digest(hello[:_TOKEN_BYTES], token):
            connection.close()  # not one of ours
            continue
        found[struct.unpack("!I", hello[_TOKEN_BYTES:])[0]] = connection
    return found


def _read(connection: socket.socket, size: int) -> bytes | None:
    """Exactly so many bytes; None: the other end has closed."""
    found = bytearray()
    while len(found) < size:
        try:
            more = connection.recv(size - len(found))
        except OSError:
            return None
        if not more:
            return None
        found += more
    return bytes(found)


def _split(content: bytes) -> list[bytes]:
    found, place = [], 0
    while place < len(content):
        (size,) = struct.unpack_from("!I", content, place)
        found.append(content[place + 4 : place + 4 + size])
        place += 4 + size
    return found


def _after_fork() -> None:
    for channel in list(_open):
        channel.forget()


_open: weakref.WeakSet[ControlChannel] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)


def first_difference(found: Sequence[Mapping[str, Any]], key: str) -> int | None:
    """The first rank whose fact ``key`` differs from that of rank 0; None: all are equal."""
    return next((rank for rank, facts in enumerate(found) if facts[key] != found[0][key]), None)
