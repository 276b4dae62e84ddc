"""Runs a schedule in SimPy: integer nanoseconds, an event for the end of each task."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import simpy

from autohete.errors import InputError, ScheduleError
from autohete.execution.queues import LaneQueue, lane_queues
from autohete.execution.sharing import Sharing
from autohete.execution.trace import Clock, Trace
from autohete.schedule import Schedule, graph_of, validate
from autohete.sim.links import SharedLinks
from autohete.sim.recurrence import undisturbed_trace


class SimExecutor:
    """The model of time. Deterministic: the same schedule gives the same trace to the tick.

    Args:
        validate: check each schedule before it runs; a search over lowered plans, which are valid, may save the time.
        by_events: simulate events even if a recurrence gives the same times (``recurrence.py``), which is quicker.
    """

    def __init__(self, *, validate: bool = True, by_events: bool = False) -> None:
        self._validate, self._by_events = validate, by_events

    def run(self, schedule: Schedule, iterations: int) -> Trace:
        """Simulate ``iterations`` iterations of ``schedule``; see :class:`autohete.execution.Executor`."""
        if iterations < 1:
            raise InputError(f"cannot run {iterations} iterations: at least 1")
        if self._validate:
            validate(schedule)
        trace = None if self._by_events else undisturbed_trace(schedule, iterations)
        return trace or _SimRun(schedule, iterations).trace()


class _Lane:
    """An engine: its ready instances, the instance that occupies it, and whether it waits for one to become ready."""

    __slots__ = ("_end", "instance", "name", "queue", "shared", "waits")

    def __init__(self, name: str, queue: LaneQueue, shared: bool, end: Callable[[list[_Lane]], None]) -> None:
        self.name, self.queue, self.shared, self.instance = name, queue, shared, -1
        self._end, self.waits = end, False

    def end(self, _: simpy.Event) -> None:
        """Its task has ended."""
        self._end([self])


class _SimRun:
    """Lanes wait for the edges of a task, are occupied by it, and signal its end."""

    def __init__(self, schedule: Schedule, iterations: int) -> None:
        graph = graph_of(schedule)
        self.schedule, self.iterations = schedule, iterations
        self.tasks = tasks = len(graph.lane)
        same = [waits for waits, _ in graph.waits]
        both = [waits + back for waits, back in graph.waits]
        self.waits = same + both * (iterations - 1)
        self.durations_ns = [task.duration_ns for task in schedule.tasks]
        # Integers; SimPy's type for the present is float.
        self.ready: list[float] = [0] * len(self.waits)
        self.started: list[float] = [0] * len(self.waits)
        self.ended: list[float] = [-1] * len(self.waits)
        self.env = simpy.Environment(initial_time=0)
        sharing, names, queues = Sharing(schedule), [lane.name for lane in schedule.lanes], lane_queues(graph)
        lanes = [_Lane(name, queue, name in sharing.lanes, self.end) for name, queue in zip(names, queues, strict=True)]
        of_name = dict(zip(names, lanes, strict=True))
        self.links = SharedLinks(self.env, sharing, lambda arrived: self.end([of_name[name] for name in arrived]))
        #: Idle lanes whose queues may have changed since they looked.
        self.idle = [lane for lane, tasks in zip(lanes, graph.lane_tasks, strict=True) if tasks]
        #: For each task its successors as (distance between instances, the successor's lane).
        self.successors = [
            [(i - task + back * tasks, lanes[graph.lane[i]]) for i, back in successors]
            for task, successors in enumerate(graph.successors)
        ]
        for instance, waits in enumerate(self.waits):
            if not waits:
                queues[graph.lane[instance % tasks]].push(instance)

    def trace(self) -> Trace:
        self.choose()
        self.env.run()
        del self.links, self.idle  # they refer to this run, which would keep the schedule until garbage is collected
        tasks, shape = self.schedule.tasks, (self.iterations, self.tasks)
        if -1 in self.ended:
            iteration, task = divmod(self.ended.index(-1), self.tasks)
            raise ScheduleError(f"{tasks[task].id.at(iteration)} never became ready: the schedule is stuck")
        ready, start, end = (np.array(times, np.int64).reshape(shape) for times in (self.ready, self.started, self.ended))
        return Trace(self.schedule, Clock.SIMULATED, ready, start, end)

    def choose(self) -> None:
        """Each idle lane takes what is next, if it is ready."""
        now = self.env.now
        for lane in self.idle:
            instance = lane.queue.pop()
            if instance is None:
                lane.waits = True
                continue
            lane.instance = instance
            self.started[instance] = now
            duration_ns = self.durations_ns[instance % self.tasks]
            if lane.shared:
                self.links.begin(lane.name, duration_ns)
            else:
                self.env.timeout(duration_ns).callbacks.append(lane.end)
        self.idle = []
        self.links.settle()

    def end(self, lanes: list[_Lane]) -> None:
        """The tasks of ``lanes`` have ended. When no more will end in this instant, lanes choose."""
        self.idle += lanes
        for lane in lanes:
            self.signal(lane.instance)
        if self.env.peek() > self.env.now:
            self.choose()

    def signal(self, instance: int) -> None:
        """Release the successors of ``instance``."""
        now, waits, last = self.env.now, self.waits, len(self.waits)
        self.ended[instance] = now
        for distance, lane in self.successors[instance % self.tasks]:
            successor = instance + distance
            if successor < last:
                waits[successor] = left = waits[successor] - 1
                if not left:
                    self.ready[successor] = now
                    lane.queue.push(successor)
                    if lane.waits:
                        lane.waits = False
                        self.idle.append(lane)
