"""From one GPU's schedule to the schedule of all GPUs.

A schedule for several GPUs describes one of them while the others do the same at the same time: it has an equal part of the
host, and a lane for collectives. :func:`every_rank` writes out all of them, to study what happens when they diverge.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from autohete.errors import InputError
from autohete.hardware import Hardware
from autohete.schedule import (
    COLLECTIVE,
    CPU_BESIDE_GPU,
    GPU_MEMORY,
    LINK,
    MULTIPROCESSORS,
    TRANSFERS,
    Buffer,
    BufferId,
    Edge,
    Flow,
    Free,
    Lane,
    Memory,
    Schedule,
    SharedResource,
    Task,
    TaskId,
    lending_rank,
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
    ranks = Ranks(hardware, {task.id for task in schedule.tasks if task.lane == COLLECTIVE})
    own = [lane for lane in schedule.lanes if lane.name != COLLECTIVE]
    together = [lane for lane in schedule.lanes if lane.name == COLLECTIVE]
    return Schedule(
        lanes=(*ranks.lanes(own), *together),
        tasks=tuple(ranks.task(task, r) for task in schedule.tasks for r in ranks.all if r == 0 or task.lane != COLLECTIVE),
        memories=ranks.memories(schedule.memories),
        resident=tuple(ranks.buffer(buffer, r) for r in ranks.all for buffer in schedule.resident),
        flows=ranks.flows(schedule.flows),
        resources=ranks.resources(schedule.resources),
        saved=schedule.saved,
    )


def numbered(name: str, number: int) -> str:
    """The name of a rank's lane or memory, or of a node's: that of the first has no number."""
    return f"{name}.{number}" if number else name


class Ranks:
    """What each of several GPUs has, from what one has that has an equal part of its host.

    Args:
        hardware: how many GPUs train together, how many of them share a host, and the places that each GPU has for itself.
        together: tasks that exist once, for all GPUs.
        pipelines: number of pipelines side by side, of which one is written out. GPUs with the same place in theirs are
            neighbours. A GPU takes part in collectives with these, on a lane of its own. None: all GPUs do the same.

    Attributes:
        all: the ranks.
    """

    def __init__(self, hardware: Hardware, together: Collection[TaskId] = (), pipelines: int | None = None) -> None:
        apart = pipelines or 1
        self.all, self._of_node = range(hardware.gpus // apart), max(hardware.gpus_of_node // apart, 1)
        self._together, self._lane_of_all = together, COLLECTIVE if pipelines is None else None
        self._own = {GPU_MEMORY, *hardware.beside_gpu}

    def memory(self, name: str, rank: int) -> str:
        """The memory of a GPU: its own, that of its node, or that of the rank which is the home of its values."""
        if (lender := lending_rank(name)) is not None:
            return numbered(GPU_MEMORY, lender)
        return numbered(name, rank if name in self._own else rank // self._of_node)

    def lane_name(self, name: str, rank: int) -> str:
        """The name of a lane of a GPU; all that do the same have that of collectives in common."""
        return name if name == self._lane_of_all else numbered(name, rank)

    def lanes(self, lanes: Iterable[Lane]) -> tuple[Lane, ...]:
        """The lanes of all GPUs, each between the memories of its GPU."""
        return tuple(self._lane(lane, rank) for rank in self.all for lane in lanes)

    def _lane(self, lane: Lane, rank: int) -> Lane:
        named = replace(lane, name=self.lane_name(lane.name, rank))
        if lane.ends is None:
            return named
        source, target = (self.memory(end, rank) for end in lane.ends)
        return named if named.ends == (source, target) else replace(named, source=source, target=target)

    def task(self, task: Task, rank: int) -> Task:
        """The task on one GPU, or the single task of all."""
        ranks = self.all if task.id in self._together else [rank]
        edges = [Edge(copy, edge.back) for edge in task.after for copy in self._tasks(edge.task, ranks)]
        return task._replace(
            id=self.task_id(task.id, rank),
            lane=self.lane_name(task.lane, rank),
            after=tuple(edges),
            allocates=tuple(self.buffer(buffer, r) for r in ranks for buffer in task.allocates),
            frees=tuple(Free(self.buffer_id(free.id, r), free.back) for r in ranks for free in task.frees),
        )

    def task_id(self, task: TaskId, rank: int) -> TaskId:
        """Its id on a GPU. A transfer has the rank of its sender on both."""
        return task if task.kind in TRANSFERS else task._replace(rank=rank)

    def _tasks(self, task: TaskId, ranks: Iterable[int]) -> list[TaskId]:
        return [task] if task in self._together else [self.task_id(task, rank) for rank in ranks]

    def buffer(self, buffer: Buffer, rank: int) -> Buffer:
        """The buffer of one GPU."""
        return buffer._replace(id=self.buffer_id(buffer.id, rank))

    def buffer_id(self, buffer: BufferId, rank: int) -> BufferId:
        """The id of a GPU's buffer."""
        return buffer._replace(memory=self.memory(buffer.memory, rank), rank=rank)

    def memories(self, memories: Iterable[Memory]) -> tuple[Memory, ...]:
        """The memories of each GPU and of each node."""
        copies = []
        for memory in memories:
            shared = 1 if memory.name in self._own else self._of_node
            for number in range(len(self.all) // shared):
                part = None if memory.part_of is None else numbered(memory.part_of, number)
                copies.append(Memory(numbered(memory.name, number), memory.capacity_bytes * shared, part))
        return tuple(copies)

    def flows(self, flows: Sequence[Flow]) -> tuple[Flow, ...]:
        """The flows of all lanes."""
        return tuple(
            replace(flow, lane=self.lane_name(flow.lane, rank))
            for rank in self.all
            for flow in flows
            if rank == 0 or flow.lane != self._lane_of_all
        )

    def resources(self, resources: Iterable[SharedResource]) -> tuple[SharedResource, ...]:
        """Those of each GPU, and the shared resources of each node."""
        copies = []
        for resource in resources:
            shared = 1 if resource.name in {LINK, MULTIPROCESSORS, CPU_BESIDE_GPU, *self._own} else self._of_node
            for number in range(len(self.all) // shared):
                lanes = [self.lane_name(lane, number * shared + r) for r in range(shared) for lane in resource.lanes]
                name, capacity = numbered(resource.name, number), resource.capacity * shared
                copies.append(replace(resource, name=name, capacity=capacity, lanes=tuple(lanes)))
        return tuple(copies)
