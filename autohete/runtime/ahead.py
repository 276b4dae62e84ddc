"""Which tasks are issued before the tasks that they follow are done, on a device that runs ahead.

On such a device a task has two ends. It is *issued* when its lane has put all of its work into the lane's stream, and *done*
when the device has done that work. A task that follows another may be issued once that one is issued, if its stream waits for
it. It waits until the other is done

- if one of them is the CPU's or a drive's: no stream orders their work;
- if it decides by what the device has computed: an update, by whether gradients are finite, and the scale of the gradients;
  it waits for all tasks before it in its lane, too;
- if it fetches into memory that the other may have released, as memory is released when a task is done;
- if its lane chooses by priority: the order is fixed when a task is issued, so it is one of those that could begin then. Such a
  lane issues a task when the one before it is done.
"""

from __future__ import annotations

from dataclasses import dataclass

from autohete.schedule import COPIES, GPU, GPU_MEMORY, Discipline, Kind, Schedule, graph_of

#: They read on the host what the device has computed: whether gradients are finite, and their norms.
_READS_RESULTS = {Kind.GPU_UPDATE, Kind.CLIP}


@dataclass(frozen=True, slots=True)
class Ahead:
    """What may be issued ahead.

    Args:
        lanes: the lanes of the device, each with a stream.
        edges: (task, following task, iterations between them) for those that wait in the stream.
        readers: tasks that decide by results: all that their lane has been given before them must be done, too.
    """

    lanes: frozenset[int]
    edges: frozenset[tuple[int, int, int]]
    readers: frozenset[int]


#: On a device that does not run ahead.
NOTHING_AHEAD = Ahead(frozenset(), frozenset(), frozenset())


def ahead_of(schedule: Schedule) -> Ahead:
    """Return what may be issued ahead in ``schedule``."""
    graph, tasks = graph_of(schedule), schedule.tasks
    lanes = {place for place, lane in enumerate(schedule.lanes) if lane.name == GPU or (lane.ends and GPU_MEMORY in lane.ends)}
    issued = {
        place
        for place, task in enumerate(tasks)
        if graph.lane[place] in lanes
        and graph.lanes[graph.lane[place]].discipline is Discipline.FIFO
        and task.id.kind not in _READS_RESULTS
        and not (task.id.kind in COPIES and _ends_on_device(schedule, graph.lane[place]))
    }
    edges = (
        (before, after, back)
        for before, successors in enumerate(graph.successors)
        for after, back in successors
        if graph.lane[before] in lanes and after in issued
    )
    readers = (place for place, task in enumerate(tasks) if graph.lane[place] in lanes and task.id.kind in _READS_RESULTS)
    return Ahead(frozenset(lanes), frozenset(edges), frozenset(readers))


def _ends_on_device(schedule: Schedule, lane: int) -> bool:
    ends = schedule.lanes[lane].ends
    return ends is not None and ends[1] == GPU_MEMORY
