"""Bandwidth that is shared, in simulated time: an end that moves gets another timeout."""

from __future__ import annotations

from functools import partial

import simpy

from autohete.execution.sharing import SharedWork, Sharing


class SharedLinks:
    """The running flows of a simulation."""

    def __init__(self, env: simpy.Environment, sharing: Sharing) -> None:
        self._env = env
        self._work = SharedWork(sharing)
        self._done: dict[str, simpy.Event] = {}

    def occupy(self, lane: str, duration_ns: int) -> simpy.Event:
        """An event that fires when ``lane`` has done ``duration_ns`` of undisturbed work."""
        done = self._done[lane] = self._env.event()
        self._await(self._work.begin(lane, duration_ns, int(self._env.now)))
        return done

    def _await(self, moved: list[str]) -> None:
        for lane in moved:
            due = self._work.due[lane]
            timeout = self._env.timeout(due - self._env.now)
            timeout.callbacks.append(partial(self._arrive, lane, due))

    def _arrive(self, lane: str, due: int, _: simpy.Event) -> None:
        if self._work.due.get(lane) != due or int(self._env.now) != due:
            return  # re-rated since: another timeout stands for it
        self._await(self._work.end(lane, due))
        self._done.pop(lane).succeed()
