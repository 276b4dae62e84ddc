"""Edges of a schedule, taken away and followed."""

from __future__ import annotations

from dataclasses import replace

from autohete.schedule import (
    Schedule,
    TaskId,
    graph_of,
)


def without_edge(schedule: Schedule, task: TaskId, place: int) -> Schedule:
    """``schedule`` with one wait of ``task`` removed."""
    changed = [
        t._replace(after=tuple(e for i, e in enumerate(t.after) if i != place)) if t.id == task else t for t in schedule.tasks
    ]
    return replace(schedule, tasks=tuple(changed))


def reaches(schedule: Schedule, before: TaskId, after: TaskId, back: int) -> bool:
    """Whether ``after`` waits for ``before`` of ``back`` iterations earlier by any path of edges and fifo order."""
    graph = graph_of(schedule)
    onward: dict[int, list[tuple[int, int]]] = {}
    for u, v, step in graph.edges():
        onward.setdefault(u, []).append((v, step))
    start, goal = (graph.index[before], 0), (graph.index[after], back)
    seen, stack = {start}, [start]
    while stack:
        node, spent = stack.pop()
        for v, step in onward.get(node, []):
            place = (v, spent + step)
            if place[1] <= back and place not in seen:
                seen.add(place)
                stack.append(place)
    return goal in seen
