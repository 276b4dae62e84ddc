"""From one GPU's schedule to the schedule of all GPUs.

A schedule for several GPUs describes one of them while the others do the same at the same time: it has an equal part of the
host, and a lane for collectives. :func:`every_rank` writes out all of them, to study what happens when they diverge.
"""

from __future__ import annotations

from dataclasses import replace

from autohete.errors import InputError
from autohete.hardware import Hardware
from autohete.schedule import (
    COLLECTIVE,
    CPU_BESIDE_GPU,
    GPU_MEMORY,
    LINK,
    MULTIPROCESSORS,
    Buffer,
    BufferId,
    Edge,
    Flow,
    Free,
    Memory,
    Schedule,
    SharedResource,
    Task,
    TaskId,
)


def every_rank(schedule: Schedule, hardware: Hardware) -> Schedule:
    """Return the tasks of all GPUs. Tasks of GPU ``r`` have rank ``r``; its lanes and memory are ``gpu.r``, ``h2d.r`` etc.

    A collective is one task, of rank 0: it begins when all GPUs are ready, and all wait for its end. GPUs of one node share its
    DRAM bandwidth and host memory; a GPU gets at least as much of them when the others are idle.

    Args:
        schedule: the result of :func:`autohete.lowering.lower` for ``hardware``.
        hardware: how many GPUs train together, and how many of them share a host.

    Raises:
        InputError: there is only one GPU.
    """
    if hardware.gpus == 1:
        raise InputError(f"{hardware.name} trains with one GPU: share it by several with Hardware.shared_by first")
    made = _Ranks(schedule, hardware.gpus, hardware.gpus_of_node)
    ranks = range(hardware.gpus)
    own = [lane for lane in schedule.lanes if lane.name != COLLECTIVE]
    together = [lane for lane in schedule.lanes if lane.name == COLLECTIVE]
    return Schedule(
        lanes=(*(replace(lane, name=numbered(lane.name, r)) for r in ranks for lane in own), *together),
        tasks=tuple(made.task(task, r) for task in schedule.tasks for r in ranks if r == 0 or task.lane != COLLECTIVE),
        memories=tuple(made.memories()),
        resident=tuple(made.buffer(buffer, r) for r in ranks for buffer in schedule.resident),
        flows=tuple(
            replace(flow, lane=made.lane(flow.lane, r))
            for r in ranks
            for flow in schedule.flows
            if r == 0 or flow.lane != COLLECTIVE
        ),
        resources=tuple(made.resources()),
    )


def numbered(name: str, number: int) -> str:
    """The name of a lane, memory or resource of one of several GPUs or nodes."""
    return f"{name}.{number}" if number else name


def of_all_ranks(
    memories: tuple[Memory, ...], flows: tuple[Flow, ...], resources: tuple[SharedResource, ...], hardware: Hardware
) -> tuple[tuple[Memory, ...], tuple[Flow, ...], tuple[SharedResource, ...]]:
    """Return the memories, flows and shared resources of all GPUs from those of one, which has an equal part of the host.

    Args:
        memories, flows, resources: of one GPU. The lane of collectives has no flow.
        hardware: how many GPUs train together, and how many of them share a host.
    """
    one = Schedule((), (), memories, (), flows, resources)
    made = _Ranks(one, hardware.gpus, hardware.gpus_of_node)
    every = (replace(flow, lane=made.lane(flow.lane, r)) for r in range(hardware.gpus) for flow in flows)
    return tuple(made.memories()), tuple(every), tuple(made.resources())


class _Ranks:
    def __init__(self, schedule: Schedule, gpus: int, gpus_of_node: int) -> None:
        self._schedule, self._gpus, self._of_node = schedule, gpus, gpus_of_node
        self._together = {task.id for task in schedule.tasks if task.lane == COLLECTIVE}

    def lane(self, name: str, rank: int) -> str:
        """The lane of one GPU; all have that of collectives in common."""
        return name if name == COLLECTIVE else numbered(name, rank)

    def task(self, task: Task, rank: int) -> Task:
        """The task on one GPU, or the single task of a collective."""
        together = task.lane == COLLECTIVE
        ranks = range(self._gpus) if together else [rank]
        edges = [Edge(copy, edge.back) for edge in task.after for copy in self._tasks(edge.task, ranks)]
        return task._replace(
            id=task.id._replace(rank=rank),
            lane=self.lane(task.lane, rank),
            after=tuple(edges),
            allocates=tuple(self.buffer(buffer, r) for r in ranks for buffer in task.allocates),
            frees=tuple(Free(self._buffer_id(free.id, r), free.back) for r in ranks for free in task.frees),
        )

    def _tasks(self, task: TaskId, ranks: range | list[int]) -> list[TaskId]:
        return [task] if task in self._together else [task._replace(rank=r) for r in ranks]

    def buffer(self, buffer: Buffer, rank: int) -> Buffer:
        return buffer._replace(id=self._buffer_id(buffer.id, rank))

    def _buffer_id(self, buffer: BufferId, rank: int) -> BufferId:
        number = rank if buffer.memory == GPU_MEMORY else rank // self._of_node
        return buffer._replace(memory=numbered(buffer.memory, number), rank=rank)

    def memories(self) -> list[Memory]:
        """The memories of each GPU and of each node."""
        copies = []
        for memory in self._schedule.memories:
            own = memory.name == GPU_MEMORY
            size = memory.capacity_bytes * (1 if own else self._of_node)
            count = self._gpus if own else self._gpus // self._of_node
            parts = [None if memory.part_of is None else numbered(memory.part_of, number) for number in range(count)]
            copies += [Memory(numbered(memory.name, number), size, part) for number, part in enumerate(parts)]
        return copies

    def resources(self) -> list[SharedResource]:
        """Those of each GPU, and the shared resources of each node."""
        copies = []
        for resource in self._schedule.resources:
            shared = 1 if resource.name in (LINK, MULTIPROCESSORS, CPU_BESIDE_GPU) else self._of_node
            for number in range(self._gpus // shared):
                lanes = [self.lane(lane, number * shared + r) for r in range(shared) for lane in resource.lanes]
                copies.append(
                    replace(
                        resource, name=numbered(resource.name, number), capacity=resource.capacity * shared, lanes=tuple(lanes)
                    )
                )
        return copies
