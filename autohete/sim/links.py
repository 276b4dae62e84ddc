"""Bandwidth that is shared, in simulated time: an end that moves gets another timeout."""

from __future__ import annotations

from collections.abc import Callable

import simpy

from autohete.execution.sharing import SharedWork, Sharing


class SharedLinks:
    """The running flows of a simulation. What begins and ends in one instant changes their rates once.

    Args:
        env: the simulation.
        sharing: the rates.
        arrived: called with the lanes whose work is done.
    """

    def __init__(self, env: simpy.Environment, sharing: Sharing, arrived: Callable[[list[str]], None]) -> None:
        self._env, self._arrived = env, arrived
        self._work = SharedWork(sharing)
        self._begun: dict[str, int] = {}
        self._ended: list[str] = []
        self._next: int | None = None  # the earliest end, which a timeout stands for

    def begin(self, lane: str, duration_ns: int) -> None:
        """``lane`` starts ``duration_ns`` of undisturbed work."""
        self._begun[lane] = duration_ns

    def settle(self) -> None:
        """All lanes that begin or end in this instant have begun or ended."""
        if not (self._begun or self._ended):
            return
        now = int(self._env.now)
        self._work.change(self._ended, self._begun, now)
        self._begun, self._ended = {}, []
        due = min(self._work.due.values(), default=None)
        if due is not None and due != self._next:
            self._next = due
            self._env.timeout(due - now).callbacks.append(self._arrive)

    def _arrive(self, _: simpy.Event) -> None:
        now, arrived = int(self._env.now), []
        if now == self._next:  # otherwise re-rated since: another timeout stands for the earliest end
            self._next = None
            arrived = self._ended = [lane for lane, due in self._work.due.items() if due == now]
        self._arrived(arrived)
