"""NaN and infinite values are detected before they change anything: gradients are checked as soon as they exist.

A step whose loss or gradients are not finite updates nothing from then on. In a schedule all of whose updates wait for the
whole backward that is nothing at all, and the step can be skipped; in any other, blocks may have been updated already, and the
training stops.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from autohete.schedule import Discipline, Kind, Schedule
from autohete.schedule.order import delayed_units

_UPDATES = (Kind.GPU_UPDATE, Kind.CPU_UPDATE)


class UpdateGate:
    """Whether the gradients of an iteration may change anything, and what they have changed already.

    Attributes:
        skipped: iterations that update nothing, and what was not finite there first.
    """

    def __init__(self) -> None:
        self.skipped: dict[int, str] = {}
        self._updated: dict[int, set[int]] = {}
        self._lock = threading.Lock()

    def shut(self, iteration: int, where: str) -> tuple[int, ...]:
        """Let no update of ``iteration`` begin any more; the blocks that have been updated, or are being updated now."""
        with self._lock:
            self.skipped.setdefault(iteration, where)
            return tuple(sorted(self._updated.get(iteration, ())))

    def admits(self, iteration: int, block: int) -> bool:
        """Whether the update of ``block`` by the gradients of ``iteration`` may begin; if so, it does."""
        with self._lock:
            if iteration in self.skipped:
                return False
            self._updated.setdefault(iteration, set()).add(block)
            for old in [number for number in self._updated if number < iteration - 1]:
                del self._updated[old]
            return True


def first_not_finite(tensors: Sequence[Tensor]) -> int | None:
    """Place of the first tensor that has a NaN or an infinity in it; None if there is none."""
    if not tensors:
        return None
    # A sum over NaN or infinity is not finite, and nothing reads memory faster. That of large numbers may overflow: look again.
    sums = torch.stack([tensor.sum().float() for tensor in tensors])
    if math.isfinite(sums.sum().item()):
        return None
    for place, tensor in enumerate(tensors):
        if tensor.numel() and not all(math.isfinite(extreme.item()) for extreme in torch.aminmax(tensor)):
            return place
    return None


def updates_wait_for_backward(schedule: Schedule) -> bool:
    """Whether every update begins after the last backward of the iteration whose gradients it takes.

    Then a gradient that is not finite, in whichever block, is known before anything changes.
    """
    graph = schedule.graph()
    onward: list[list[tuple[int, int]]] = [[] for _ in schedule.tasks]
    for before, after, back in graph.edges():
        onward[before].append((after, back))
    fifo = {lane.name for lane in schedule.lanes if lane.discipline is Discipline.FIFO}
    delayed = delayed_units(schedule)
    backwards = [task for task in schedule.tasks if task.id.kind is Kind.BACKWARD]
    # The last one of a fifo lane has all others of it behind it.
    last = [task for task in backwards if task.lane not in fifo] + list(
        {t.lane: t for t in backwards if t.lane in fifo}.values()
    )
    for backward in last:
        least = {graph.index[backward.id]: 0}  # after how many iterations a task must wait for it
        queue = deque(least)
        while queue:
            place = queue.popleft()
            for after, back in onward[place]:
                distance = least[place] + back
                if distance <= 1 and distance < least.get(after, 2):
                    least[after] = distance
                    queue.append(after)
        for task in schedule.tasks:
            if task.id.kind in _UPDATES:
                arrives = int(task.id.kind is Kind.CPU_UPDATE and task.id.unit in delayed)
                if least.get(graph.index[task.id], 2) > arrives:
                    return False
    return True
