"""Runs a schedule in SimPy: integer nanoseconds, an event for the end of each task."""

from __future__ import annotations

from functools import partial

import numpy as np
import simpy

from autohete.errors import InputError, ScheduleError
from autohete.execution.queues import LaneQueue, lane_queues
from autohete.execution.sharing import Sharing
from autohete.execution.trace import Clock, Trace
from autohete.schedule import Graph, Schedule
from autohete.sim.links import SharedLinks


class SimExecutor:
    """The model of time. Deterministic: the same schedule gives the same trace to the tick.

    Args:
        validate: check each schedule before it runs; a search over lowered plans, which are valid, may save the time.
    """

    def __init__(self, *, validate: bool = True) -> None:
        self._validate = validate

    def run(self, schedule: Schedule, iterations: int) -> Trace:
        """Simulate ``iterations`` iterations of ``schedule``; see :class:`autohete.execution.Executor`."""
        if iterations < 1:
            raise InputError(f"cannot run {iterations} iterations: at least 1")
        if self._validate:
            schedule.validate()
        return _Run(schedule.graph(), iterations).trace()


class _Run:
    """Lanes wait for the edges of a task, are occupied by it, and signal its end."""

    def __init__(self, graph: Graph, iterations: int) -> None:
        self.graph = graph
        self.tasks = len(graph.lane)
        self.iterations = iterations
        instances = self.tasks * iterations
        same = [waits for waits, _ in graph.waits]
        both = [waits + back for waits, back in graph.waits]
        self.waits = same + both * (iterations - 1)
        # Integers; SimPy's type for the present is float.
        self.ready: list[float] = [0] * instances
        self.started: list[float] = [0] * instances
        self.ended: list[float] = [-1] * instances
        self.durations = [task.duration_ns for task in graph.schedule.tasks]
        self.env = simpy.Environment(initial_time=0)
        self.queues: list[LaneQueue] = lane_queues(graph)
        #: For each task its successors as (distance between instances, queue of the successor's lane).
        self.successors = [
            [(i - task + back * self.tasks, self.queues[graph.lane[i]]) for i, back in successors]
            for task, successors in enumerate(graph.successors)
        ]
        sharing, names = Sharing(graph.schedule), [lane.name for lane in graph.schedule.lanes]
        lanes = {name: lane for lane, name in enumerate(names)}
        self.links = SharedLinks(self.env, sharing, lambda arrived: self.end([lanes[name] for name in arrived]))
        #: The names of lanes that share bandwidth, None for others; and what ends a task of each.
        self.shared = [name if name in sharing.lanes else None for name in names]
        self.ends = [partial(self.end, [lane]) for lane in lanes.values()]
        self.idle = [lane for lane, tasks in enumerate(graph.lane_tasks) if tasks]
        self.running = [0] * len(names)  # instances

    def trace(self) -> Trace:
        for instance, waits in enumerate(self.waits):
            if not waits:
                self.queues[self.graph.lane[instance % self.tasks]].push(instance)
        self.choose()
        self.env.run()
        if -1 in self.ended:
            stuck = self.ended.index(-1)
            iteration, task = divmod(stuck, self.tasks)
            raise ScheduleError(f"{self.graph.schedule.tasks[task].id.at(iteration)} never became ready: the schedule is stuck")
        shape = (self.iterations, self.tasks)
        ready, start, end = (np.array(times, np.int64).reshape(shape) for times in (self.ready, self.started, self.ended))
        return Trace(self.graph.schedule, Clock.SIMULATED, ready, start, end)

    def choose(self) -> None:
        """Each idle lane takes what is next, if it is ready."""
        waiting, now = [], self.env.now
        for lane in self.idle:
            instance = self.queues[lane].pop()
            if instance is None:
                waiting.append(lane)
                continue
            self.running[lane] = instance
            self.started[instance] = now
            duration, shared = self.durations[instance % self.tasks], self.shared[lane]
            if shared is None:
                self.env.timeout(duration).callbacks.append(self.ends[lane])
            else:
                self.links.begin(shared, duration)
        self.idle = waiting
        self.links.settle()

    def end(self, lanes: list[int], _: simpy.Event | None = None) -> None:
        """The tasks of ``lanes`` have ended. When no more will end in this instant, lanes choose."""
        for lane in lanes:
            self.signal(self.running[lane])
            self.idle.append(lane)
        if self.env.peek() > self.env.now:
            self.choose()

    def signal(self, instance: int) -> None:
        """Those that wait for ``instance`` need not any more."""
        now = self.env.now
        waits, last = self.waits, len(self.waits)
        self.ended[instance] = now
        for distance, queue in self.successors[instance % self.tasks]:
            successor = instance + distance
            if successor < last:
                waits[successor] -= 1
                if not waits[successor]:
                    self.ready[successor] = now
                    queue.push(successor)
