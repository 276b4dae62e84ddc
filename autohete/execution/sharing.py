"""How lanes that share bandwidth slow each other down: weighted max-min fairness.

All active flows grow in proportion to their weights until their demand is met or a resource they use is full; the rest
keep growing (Bertsekas and Gallager, "Data Networks", section 6.5.2). A lane's rate depends only on which lanes are
active, so the result is computed once per set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autohete.schedule import Schedule, SharedResource

#: Rates are integers in this unit, so that work done is exact and two executors agree to the tick.
FULL_RATE = 1 << 20


class Sharing:
    """The rates of a schedule's lanes while some of them are active.

    Args:
        schedule: has the flows and the shared resources.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._flows = {flow.lane: flow for flow in schedule.flows}
        self._resources = schedule.resources
        self._rates: dict[frozenset[str], dict[str, int]] = {}

    @property
    def lanes(self) -> frozenset[str]:
        """Lanes that others can slow down."""
        return frozenset(lane for resource in self._resources for lane in resource.lanes)

    def rates(self, active: Iterable[str]) -> dict[str, int]:
        """Return the rate of each of the ``active`` lanes, in 1/:data:`FULL_RATE` of the undisturbed rate, at least 1."""
        key = frozenset(active)
        rates = self._rates.get(key)
        if rates is None:
            rates = self._rates[key] = self._divide(sorted(key))
        return rates

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
        """Return how much of ``resource`` ``lane`` uses as its flow grows by its weight."""
        flow = self._flows[lane]
        return flow.weight / flow.demand if resource.counts_lanes else flow.weight


class SharedWork:
    """The remaining work of active lanes; rates are updated whenever a lane starts or ends.

    Work is counted in nanoseconds times :data:`FULL_RATE`, and rates are integers, so no work is lost to rounding: updating
    the rates twice in one instant changes nothing.

    Attributes:
        due: time at which each active lane's work ends at the current rates.
    """

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._left: dict[str, int] = {}
        self._rates: Mapping[str, int] = {}
        self._last = 0
        self.due: dict[str, int] = {}

    def begin(self, lane: str, duration_ns: int, now: int) -> None:
        """Start work on ``lane``, of ``duration_ns`` if undisturbed."""
        self.change((), {lane: duration_ns}, now)

    def end(self, lane: str, now: int) -> None:
        """End the work of ``lane``."""
        self.change((lane,), {}, now)

    def change(self, ended: Iterable[str], begun: Mapping[str, int], now: int) -> None:
        """End the work of some lanes, then start work on others, or on the same: nanoseconds if undisturbed."""
        elapsed = now - self._last
        if elapsed > 0:  # book the work done since the last change
            for lane, rate in self._rates.items():
                self._left[lane] -= rate * elapsed
            self._last = now
        for lane in ended:
            del self._left[lane], self.due[lane]
        for lane, duration_ns in begun.items():
            self._left[lane] = duration_ns * FULL_RATE
        rates, last = self._sharing.rates(self._left), self._last
        for lane, rate in rates.items():
            if lane in begun or rate != self._rates[lane]:  # otherwise its due time does not change
                due = last - (-self._left[lane] // rate)
                # Work ends on the next full tick, so if a rate falls on that very tick, the remaining work is negative.
                self.due[lane] = due if due > last else last
        self._rates = rates
