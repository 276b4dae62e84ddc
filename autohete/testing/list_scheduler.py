"""A plain list scheduler to check the simulator against, without SimPy and without any code of ``autohete.sim``.

It follows the same rules: integer nanoseconds; all completions of an instant first, then every idle lane chooses; a task
without duration ends in a further round of the same instant. It therefore agrees with the simulator to the tick. It does
only the work that any simulator must do, so it is the reference of the speed benchmark.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from autohete.errors import InputError, ScheduleError
from autohete.execution.sharing import FULL_RATE, Sharing
from autohete.execution.trace import Clock, Trace
from autohete.schedule import Discipline, Graph, Schedule, graph_of

_NEVER = 1 << 60


def list_schedule(schedule: Schedule, iterations: int) -> Trace:
    """Schedule ``iterations`` iterations of a valid ``schedule``, and return the trace.

    Raises:
        InputError: fewer than one iteration.
        ScheduleError: a task never becomes ready; :func:`~autohete.schedule.validate` reports why.
    """
    if iterations < 1:
        raise InputError(f"cannot run {iterations} iterations: run at least 1")
    graph = graph_of(schedule)
    tasks, lanes = len(schedule.tasks), len(schedule.lanes)
    total = tasks * iterations
    # An instance is iteration * tasks + task. One extra iteration receives the edges that lead out of the run, so that
    # edges need no bounds check.
    durations = [task.duration_ns for task in schedule.tasks]
    successors = [[(after, after + back * tasks) for after, back in edges] for edges in graph.successors]
    both = [same + back for same, back in graph.waits]
    waits = [same for same, _ in graph.waits] + both * (iterations - 1) + [_NEVER] * (tasks + 1)
    ready, start, end = [0] * total, [0] * total, [-1] * total

    # A fifo lane has its instances in order and a position in them; a priority lane has a heap of ready instances.
    orders: list[list[int]] = []
    queues: list[list[int] | None] = []
    for engine, members in zip(schedule.lanes, graph.lane_tasks, strict=True):
        fifo = engine.discipline is Discipline.FIFO
        queues.append(None if fifo else [])
        orders.append([i * tasks + task for i in range(iterations) for task in members] + [total] if fifo else [])
    places = [0] * lanes
    queue_of = [queues[lane] for lane in graph.lane]
    urgency, task_of_rank = _urgency(graph, iterations)
    for instance in range(total):
        task = instance % tasks
        queue = queue_of[task]
        if queue is not None and not waits[instance]:
            queue.append(urgency[task] + instance - task)
    for queue in queues:
        if queue is not None:
            heapify(queue)

    sharing = Sharing(schedule)
    names = [lane.name for lane in schedule.lanes]
    shared = [name in sharing.lanes for name in names]
    remaining: dict[int, int] = {}  # per active shared lane: nanoseconds times FULL_RATE
    rates: dict[int, int] = {}
    dues: dict[int, int] = {}
    rated = 0  # time at which the rates were set

    running = [0] * lanes
    heap: list[int] = []  # end * lanes + lane of the tasks that run on undisturbed lanes
    idle = list(range(lanes))
    now = 0
    changed = False
    while True:
        waiting = []
        for lane in idle:
            queue = queues[lane]
            if queue is None:
                instance = orders[lane][places[lane]]
                if waits[instance]:
                    waiting.append(lane)
                    continue
                places[lane] += 1
                task = instance % tasks
            elif queue:
                key = heappop(queue)
                task = task_of_rank[key % tasks]
                instance = key // tasks % iterations * tasks + task
            else:
                waiting.append(lane)
                continue
            start[instance] = now
            running[lane] = instance
            if shared[lane]:
                remaining[lane], rates[lane] = durations[task] * FULL_RATE, 0
                changed = True
            else:
                heappush(heap, (now + durations[task]) * lanes + lane)
        idle = waiting
        if changed:
            granted = sharing.rates([names[lane] for lane in remaining])
            for lane in remaining:
                remaining[lane] -= rates[lane] * (now - rated)
                rates[lane] = granted[names[lane]]
                dues[lane] = now - (-remaining[lane] // rates[lane])
            rated, changed = now, False

        due = min(dues.values()) if dues else _NEVER
        if heap:
            now = min(due, heap[0] // lanes)
        elif dues:
            now = due
        else:
            break
        next_instant = (now + 1) * lanes
        ended = []
        while heap and heap[0] < next_instant:
            ended.append(heappop(heap) % lanes)
        if due == now:
            for lane in [lane for lane, due in dues.items() if due == now]:
                ended.append(lane)
                del remaining[lane], rates[lane], dues[lane]
            changed = True
        for lane in ended:
            instance = running[lane]
            end[instance] = now
            task = instance % tasks
            base = instance - task
            for after, offset in successors[task]:
                target = base + offset
                waits[target] = left = waits[target] - 1
                if not left:
                    ready[target] = now
                    queue = queue_of[after]
                    if queue is not None:
                        heappush(queue, urgency[after] + target - after)
        idle += ended

    if -1 in end:
        iteration, task = divmod(end.index(-1), tasks)
        raise ScheduleError(f"{schedule.tasks[task].id.at(iteration)} never became ready: the schedule is stuck")
    shape = (iterations, tasks)
    return Trace(schedule, Clock.SIMULATED, *(np.array(times, np.int64).reshape(shape) for times in (ready, start, end)))


def _urgency(graph: Graph, iterations: int) -> tuple[list[int], list[int]]:
    """Encode priority, iteration and the other urgency keys in one integer; return each task's part, and the task of each rank.

    ``part + iteration * tasks`` is smaller for more urgent instances; modulo the number of tasks it is the rank.
    """
    tasks = len(graph.urgency)
    task_of_rank = sorted(range(tasks), key=lambda task: graph.urgency[task][1:])
    rank = {task: place for place, task in enumerate(task_of_rank)}
    level = {priority: place for place, priority in enumerate(sorted({urgency[0] for urgency in graph.urgency}))}
    parts = [level[graph.urgency[task][0]] * iterations * tasks + rank[task] for task in range(tasks)]
    return parts, task_of_rank
