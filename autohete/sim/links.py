"""Bandwidth that is shared: flows are re-rated whenever one starts or ends."""

from __future__ import annotations

from functools import partial

import simpy

from autohete.sharing import FULL_RATE, Sharing


class SharedLinks:
    """The running flows of a simulation.

    Work is counted in nanoseconds times :data:`FULL_RATE`, and rates are integers, so nothing is ever rounded away:
    re-rating a flow twice in one instant changes nothing.
    """

    def __init__(self, env: simpy.Environment, sharing: Sharing) -> None:
        self._env = env
        self._sharing = sharing
        self._remaining: dict[str, int] = {}
        self._rate: dict[str, int] = {}
        self._due: dict[str, int] = {}
        self._done: dict[str, simpy.Event] = {}
        self._last = 0

    def occupy(self, lane: str, duration_ns: int) -> simpy.Event:
        """An event that fires when ``lane`` has done ``duration_ns`` of undisturbed work."""
        done = self._env.event()
        self._settle()
        self._remaining[lane] = duration_ns * FULL_RATE
        self._done[lane] = done
        self._rerate()
        return done

    def _settle(self) -> None:
        """Book the work done since the last change."""
        now = int(self._env.now)
        elapsed = now - self._last
        if elapsed:
            for lane, rate in self._rate.items():
                self._remaining[lane] -= rate * elapsed
            self._last = now

    def _rerate(self) -> None:
        rates = self._sharing.rates(list(self._remaining))
        now = self._last
        for lane, rate in rates.items():
            if self._rate.get(lane) == rate:
                continue  # its due time stands
            self._rate[lane] = rate
            # Work is done on the tick after it ends, so a rate that falls on that very tick finds less than none left.
            due = max(now, now - (-self._remaining[lane] // rate))
            self._due[lane] = due
            timeout = self._env.timeout(due - now)
            timeout.callbacks.append(partial(self._arrive, lane, due))

    def _arrive(self, lane: str, due: int, _: simpy.Event) -> None:
        if self._due.get(lane) != due or int(self._env.now) != due:
            return  # re-rated since: another timeout stands for it
        self._settle()
        del self._remaining[lane], self._rate[lane], self._due[lane]
        self._rerate()
        self._done.pop(lane).succeed()
