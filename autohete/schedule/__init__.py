"""The schedule: the tasks of one iteration, with edges that may reach back one iteration.

A schedule exists before it runs, is plain data, and contains everything an executor needs. Two executors read it (``sim`` and
``runtime``); neither sees the plan or the policy it came from. ``str(schedule)`` and :func:`parse_schedule` are inverses.
"""

from autohete.schedule.graph import Graph, Urgency, graph_of, urgency
from autohete.schedule.ids import (
    COLLECTIVE,
    COLLECTIVES,
    COPIES,
    CPU,
    CPU_BESIDE_GPU,
    D2H,
    GPU,
    GPU_MEMORY,
    H2D,
    HOST_MEMORY,
    KIND_MEANING,
    KIND_ORDER,
    LINK,
    MULTIPROCESSORS,
    PINNED_MEMORY,
    BufferId,
    Copy,
    Kind,
    TaskId,
    Value,
    parse_buffer_id,
    parse_instance,
    parse_task_id,
)
from autohete.schedule.schedule import Buffer, Discipline, Edge, Flow, Free, Lane, Memory, Schedule, SharedResource, Task
from autohete.schedule.text import parse_schedule
from autohete.schedule.validation import validate

__all__ = [
    "COLLECTIVE",
    "COLLECTIVES",
    "COPIES",
    "CPU",
    "CPU_BESIDE_GPU",
    "D2H",
    "GPU",
    "GPU_MEMORY",
    "H2D",
    "HOST_MEMORY",
    "KIND_MEANING",
    "KIND_ORDER",
    "LINK",
    "MULTIPROCESSORS",
    "PINNED_MEMORY",
    "Buffer",
    "BufferId",
    "Copy",
    "Discipline",
    "Edge",
    "Flow",
    "Free",
    "Graph",
    "Kind",
    "Lane",
    "Memory",
    "Schedule",
    "SharedResource",
    "Task",
    "TaskId",
    "Urgency",
    "Value",
    "graph_of",
    "parse_buffer_id",
    "parse_instance",
    "parse_schedule",
    "parse_task_id",
    "urgency",
    "validate",
]
