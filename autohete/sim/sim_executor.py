"""Runs a schedule in SimPy: one process per lane, integer nanoseconds."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import simpy
from simpy.events import EventPriority

from autohete.errors import InputError, ScheduleError
from autohete.execution.queues import LaneQueue, lane_queues
from autohete.execution.sharing import Sharing
from autohete.execution.trace import Clock, Trace
from autohete.schedule import Graph, Schedule
from autohete.sim.links import SharedLinks

#: After every completion of an instant (SimPy's URGENT is 0, NORMAL 1).
_AFTER_COMPLETIONS = EventPriority(2)


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


class _Settled(simpy.Event):
    """Fires once in an instant in which tasks have ended, when no further task ends in it: then lanes choose."""

    def __init__(self, env: simpy.Environment) -> None:
        super().__init__(env)
        self._ok, self._value = True, None

    def schedule(self) -> None:
        self.env.schedule(self, priority=_AFTER_COMPLETIONS)


class _Run:
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
        self.start: list[float] = [0] * instances
        self.end: list[float] = [-1] * instances
        self.durations = [task.duration_ns for task in graph.schedule.tasks]
        self.env = simpy.Environment(initial_time=0)
        sharing = Sharing(graph.schedule)
        self.shared = sharing.lanes
        self.links = SharedLinks(self.env, sharing)
        self.queues: list[LaneQueue] = lane_queues(graph)
        #: For each task its successors as (distance between instances, queue of the successor's lane).
        self.successors = [
            [(i - task + back * self.tasks, self.queues[graph.lane[i]]) for i, back in successors]
            for task, successors in enumerate(graph.successors)
        ]
        self.choosing = False
        self.settled = self._new_settled()

    def trace(self) -> Trace:
        for instance, waits in enumerate(self.waits):
            if not waits:
                self.queues[self.graph.lane[instance % self.tasks]].push(instance)
        for lane, tasks in enumerate(self.graph.lane_tasks):
            if tasks:
                self.env.process(self.lane(lane, len(tasks) * self.iterations))
        self.env.run()
        if -1 in self.end:
            stuck = self.end.index(-1)
            iteration, task = divmod(stuck, self.tasks)
            raise ScheduleError(f"{self.graph.schedule.tasks[task].id.at(iteration)} never became ready: the schedule is stuck")
        shape = (self.iterations, self.tasks)
        ready, start, end = (np.array(times, np.int64).reshape(shape) for times in (self.ready, self.start, self.end))
        return Trace(self.graph.schedule, Clock.SIMULATED, ready, start, end)

    def lane(self, lane: int, instances: int) -> Generator[simpy.Event, None, None]:
        """Wait for the edges, occupy, signal."""
        env, pop, durations, tasks = self.env, self.queues[lane].pop, self.durations, self.tasks
        name = self.graph.schedule.lanes[lane].name
        shared = name in self.shared
        for _ in range(instances):
            while (instance := pop()) is None:
                yield self.settled
            self.start[instance] = env.now
            task = instance % tasks
            yield self.links.occupy(name, durations[task]) if shared else env.timeout(durations[task])
            self.complete(instance, task)
            yield self.settled

    def complete(self, instance: int, task: int) -> None:
        now = self.env.now
        waits, last = self.waits, len(self.waits)
        self.end[instance] = now
        for distance, queue in self.successors[task]:
            successor = instance + distance
            if successor < last:
                waits[successor] -= 1
                if not waits[successor]:
                    self.ready[successor] = now
                    queue.push(successor)
        if not self.choosing:
            self.choosing = True
            self.settled.schedule()

    def _new_settled(self) -> _Settled:
        settled = _Settled(self.env)
        # Runs before the lanes that wait for it resume, because it was there first.
        settled.callbacks.append(self._renew)
        return settled

    def _renew(self, _: simpy.Event) -> None:
        self.choosing = False
        self.settled = self._new_settled()
