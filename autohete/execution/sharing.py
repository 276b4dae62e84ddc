"""How lanes that draw from the same bandwidth slow each other down: weighted max-min fairness.

All active flows grow in proportion to their weights until they have what they demand or a resource they use is full;
the rest grow on (Bertsekas and Gallager, "Data Networks", section 6.5.2). What a lane gets depends only on which lanes
are active, so the result is computed once per set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autohete.schedule import Schedule, SharedResource

#: Rates are integers in this unit, so that work done is exact and two executors agree to the tick.
FULL_RATE = 1 << 20


class Sharing:
    """The rates of a schedule's lanes while some of them are active.

    Args:
        schedule: its flows and shared resources.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._flows = {flow.lane: flow for flow in schedule.flows}
        self._resources = schedule.resources
        self._rates: dict[frozenset[str], dict[str, int]] = {}

    @property
    def lanes(self) -> frozenset[str]:
        """Lanes that can be slowed down at all."""
        return frozenset(lane for resource in self._resources for lane in resource.lanes)

    def rates(self, active: Iterable[str]) -> dict[str, int]:
        """Rate of each of the ``active`` lanes, in 1/:data:`FULL_RATE` of the undisturbed rate, at least 1."""
        key = frozenset(active)
        found = self._rates.get(key)
        if found is None:
            found = self._rates[key] = self._divide(sorted(key))
        return found

    def _divide(self, active: list[str]) -> dict[str, int]:
        free = {resource.name: resource.capacity for resource in self._resources}
        got = dict.fromkeys(active, 0.0)
        growing = set(active)
        while growing:
            steps = [(self._flows[lane].demand - got[lane]) / self._flows[lane].weight for lane in growing]
            for resource in self._resources:
                weights = sum(self._draw(resource, lane) for lane in resource.lanes if lane in growing)
                if weights:
                    steps.append(free[resource.name] / weights)
            step = max(min(steps), 0.0)
            for lane in growing:
                got[lane] += step * self._flows[lane].weight
            stopped = {lane for lane in growing if got[lane] >= self._flows[lane].demand * (1 - 1e-12)}
            for resource in self._resources:
                users = [lane for lane in resource.lanes if lane in growing]
                free[resource.name] -= step * sum(self._draw(resource, lane) for lane in users)
                if free[resource.name] <= resource.capacity * 1e-12:
                    stopped.update(users)
            growing -= stopped
        return {lane: max(1, round(FULL_RATE * min(1.0, got[lane] / self._flows[lane].demand))) for lane in active}

    def _draw(self, resource: SharedResource, lane: str) -> float:
        """What ``lane`` takes of ``resource`` as its flow grows by its weight."""
        flow = self._flows[lane]
        return flow.weight / flow.demand if resource.counts_lanes else flow.weight


class SharedWork:
    """The work that active lanes have left, re-rated whenever one of them starts or ends.

    Work is counted in nanoseconds times :data:`FULL_RATE`, and rates are integers, so nothing is ever rounded away:
    re-rating twice in one instant changes nothing.

    Attributes:
        due: when each active lane's work ends at the current rates.
    """

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._left: dict[str, int] = {}
        self._rates: Mapping[str, int] = {}
        self._last = 0
        self.due: dict[str, int] = {}

    def begin(self, lane: str, duration_ns: int, now: int) -> None:
        """``lane`` starts work of ``duration_ns`` when undisturbed."""
        self.change((), {lane: duration_ns}, now)

    def end(self, lane: str, now: int) -> None:
        """``lane`` has done its work."""
        self.change((lane,), {}, now)

    def change(self, ended: Iterable[str], begun: Mapping[str, int], now: int) -> None:
        """Lanes have done their work; then others, or the same, start work of so many nanoseconds when undisturbed."""
        elapsed = now - self._last
        if elapsed > 0:  # book the work done since the last change
            for lane, rate in self._rates.items():
                self._left[lane] -= rate * elapsed
            self._last = now
        for lane in ended:
            del self._left[lane], self.due[lane]
        for lane, duration_ns in begun.items():
            self._left[lane] = duration_ns * FULL_RATE
        rates = self._sharing.rates(self._left)
        for lane, rate in rates.items():
            if lane in begun or rate != self._rates[lane]:  # otherwise its due time does not change
                # Work is done on the tick after it ends, so a rate that falls on that very tick finds less than none left.
                self.due[lane] = max(self._last, self._last - (-self._left[lane] // rate))
        self._rates = rates
