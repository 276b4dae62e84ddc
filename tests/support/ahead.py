"""Training by schedule on a device that runs ahead, and a recording of what is issued."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from autohete.execution.trace import Trace
from autohete.runtime.ahead import ahead_of
from autohete.runtime.async_device import AsyncDevice
from autohete.runtime.batch import Batch
from autohete.runtime.device import Event
from autohete.runtime.lanes import LaneThreads
from autohete.runtime.ledger import Ledger, Room
from autohete.runtime.partition import partition
from autohete.runtime.settings import Execution, Recipe
from autohete.runtime.takeover import Ledgers, Takeover
from autohete.schedule import HOST_MEMORY, Kind, Schedule, Task, TaskId, graph_of
from autohete.train.gpt import BLOCKS
from autohete.workload import Workload
from support.edges import reaches, without_edge
from support.reference import Outcome, batches, model_for

#: Of a task and an iteration: seconds by which its stream pauses before its work.
Pause = Callable[[Task, int], float]
#: A wait of a stream: index of the task that it waits for, of the task that waits, and number of iterations between them.
Wait = tuple[int, int, int]


def drawn(seed: int, most_seconds: float) -> Pause:
    """Pauses that depend on ``seed``, the task and the iteration only; half of them are none."""

    def pause(task: Task, iteration: int) -> float:
        draw = random.Random(f"{seed} {task.id.at(iteration)}")
        return draw.choice((0.0, draw.random() * most_seconds))

    return pause


def waits_for_data(schedule: Schedule) -> list[Wait]:
    """The waits of streams that carry data and that nothing else implies: between tasks of one unit in different lanes. A
    write-back of parameters that the CPU updates writes what the host has already.
    """
    graph, found = graph_of(schedule), []
    for before, after, back in sorted(ahead_of(schedule).edges):
        first, then = schedule.tasks[before], schedule.tasks[after]
        updated = TaskId(Kind.CPU_UPDATE, first.id.unit) in graph.index
        unchanged = updated and first.id.kind in (Kind.WRITE_BACK_FORWARD, Kind.WRITE_BACK_BACKWARD)
        if first.id.unit != then.id.unit or first.lane == then.lane or unchanged:
            continue
        place = next(i for i, edge in enumerate(then.after) if (edge.task, edge.back) == (first.id, back))
        if not reaches(without_edge(schedule, then.id, place), first.id, then.id, back):
            found.append((before, after, back))
    return found


@dataclass(frozen=True, slots=True)
class Launch:
    """An operation: its stream, and the bytes of memory that it reads and writes, each from an address to another."""

    stream: str
    name: str
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event behind what a stream has been given so far."""

    stream: str
    event: int


@dataclass(frozen=True, slots=True)
class Waited:
    """A stream waits for an event."""

    stream: str
    event: int


@dataclass(frozen=True, slots=True)
class Synchronized:
    """The host has waited for an event."""

    event: int


class Recording:
    """All that a training issues, in order; see :class:`autohete.runtime.async_device.Observer`."""

    def __init__(self) -> None:
        self.issued: list[Launch | Recorded | Waited | Synchronized] = []
        self._events: dict[Event, int] = {}

    def launch(self, stream: str, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        self.issued.append(Launch(stream, name, list(_bytes_of(reads)), list(_bytes_of(writes))))

    def record(self, stream: str, event: Event) -> None:
        number = self._events[event] = len(self._events)
        self.issued.append(Recorded(stream, number))

    def wait(self, stream: str, event: Event) -> None:
        self.issued.append(Waited(stream, self._events[event]))

    def synchronize(self, event: Event) -> None:
        self.issued.append(Synchronized(self._events[event]))


def _bytes_of(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    for tensor in tensors:
        if tensor.numel():
            last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            yield tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def train_ahead(
    workload: Workload,
    steps: int,
    schedule: Schedule,
    pause: Pause = lambda task, iteration: 0.0,
    *,
    without: Wait | None = None,
    recording: Recording | None = None,
) -> tuple[Outcome, Trace]:
    """The training of :func:`support.reference.train_by_schedule`, on a device that runs ahead.

    Args:
        workload, steps, schedule: what is trained.
        pause: of each task.
        without: a wait of streams that is left out. Memory is then unlimited, as what waits for room may wait long enough.
        recording: of what is issued.
    """
    device, host, model = AsyncDevice(recording), Ledger(HOST_MEMORY), model_for(workload)
    recipe = Recipe(clip_norm=workload.clip_norm)
    training = Takeover(partition(model, BLOCKS), schedule, recipe, Ledgers(device, None, host), poison=True)

    def paused(task: Task, iteration: int) -> Callable[[], None] | None:
        device.delay(pause(task, iteration))
        return training.actions.act(task, iteration)

    torch.manual_seed(2)
    try:
        room = None if without else Room(schedule, None)
        with LaneThreads(schedule, paused, Execution(device), booking=room) as lanes:
            if without is not None:
                before, after, back = without
                lanes._run._behind[after].remove(before - after - back * len(schedule.tasks))
            given = iter(batches(workload, steps * workload.micro_batches))
            for step in range(steps):
                training.passes.give(step, *(Batch(*pair) for pair in itertools.islice(given, workload.micro_batches)))
                lanes.admit()
        losses = [training.passes.losses[step] for step in range(steps)]
        return Outcome(losses, training.parameters(), host.peak_bytes, host.used_bytes), lanes.trace()
    finally:
        training.close()
