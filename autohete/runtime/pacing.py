"""Makes each task of a run last as long as in its schedule.

A task ends at ``max(lane free, edges satisfied) + duration``. Deadlines are absolute, so that errors do not add up; they move
while lanes share a bandwidth.
"""

from __future__ import annotations

import threading
import time

from autohete.execution.sharing import SharedWork, Sharing
from autohete.runtime.history import Instants
from autohete.schedule import Schedule, graph_of

#: Longest single sleep, so that a lane notices when the run is abandoned.
_NAP_SECONDS = 0.1


class Pace:
    """Deadlines of the instances of ``schedule``.

    Args:
        schedule: a valid schedule.
        instants: the clock of the run.

    Attributes:
        late: tasks whose work ended after their deadline, and the delay (ns).
        abandoned: no task waits any more.
    """

    def __init__(self, schedule: Schedule, instants: Instants) -> None:
        sharing = Sharing(schedule)
        self._schedule, self._instants = schedule, instants
        self._shared, self._work = sharing.lanes, SharedWork(sharing)
        self._rates = threading.Condition()
        #: Time from which an admitted instance could have run, by its edges.
        self._free_from: dict[int, int] = {}
        self._lane_free = dict.fromkeys((lane.name for lane in schedule.lanes), 0)
        self.late: dict[str, int] = {}
        self.abandoned = False

    def admit(self, iteration: int) -> None:
        """No task of ``iteration`` could have run before now."""
        with self._rates:
            first, now = iteration * len(self._schedule.tasks), self._instants.now()
            self._free_from |= dict.fromkeys(range(first, first + len(self._schedule.tasks)), now)

    def keep(self, instance: int) -> None:
        """Sleep until the deadline of ``instance``, whose work is done, and hand the deadline on to its successors."""
        task = instance % len(self._schedule.tasks)
        lane, duration = self._schedule.tasks[task].lane, self._schedule.tasks[task].duration_ns
        begin = max(self._lane_free[lane], self._free_from.pop(instance))
        if lane in self._shared:
            due = self._share(lane, begin, instance)
        else:
            due = begin + duration
            self._sleep_until(due, instance)
        self._lane_free[lane] = due
        with self._rates:
            for after, back in graph_of(self._schedule).successors[task]:
                successor = instance + after - task + back * len(self._schedule.tasks)
                if successor in self._free_from:
                    self._free_from[successor] = max(self._free_from[successor], due)

    def wake(self) -> None:
        """Let sleeping lanes see what has changed."""
        with self._rates:
            self._rates.notify_all()

    def _sleep_until(self, due: int, instance: int) -> None:
        left = due - self._instants.now()
        if left < 0:
            self._note_late(instance, -left)
        while left > 0 and not self.abandoned:
            time.sleep(min(left * 1e-9, _NAP_SECONDS))
            left = due - self._instants.now()

    def _share(self, lane: str, planned: int, instance: int) -> int:
        """Sleep until the undisturbed work of ``instance`` is done at shared rates; return the planned end."""
        duration = self._schedule.tasks[instance % len(self._schedule.tasks)].duration_ns
        with self._rates:
            # Two lanes may be booked in a different order than planned, but at most one wake-up apart.
            self._work.begin(lane, duration, planned)
            self._rates.notify_all()
            if (after := self._instants.now() - self._work.due[lane]) > 0:
                self._note_late(instance, after)
            while (left := self._work.due[lane] - self._instants.now()) > 0 and not self.abandoned:
                self._rates.wait(min(left * 1e-9, _NAP_SECONDS))
            due = self._work.due[lane]
            self._work.end(lane, due)
            self._rates.notify_all()
            return due

    def _note_late(self, instance: int, by_ns: int) -> None:
        iteration, task = divmod(instance, len(self._schedule.tasks))
        self.late[self._schedule.tasks[task].id.at(iteration)] = by_ns
