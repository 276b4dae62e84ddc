"""Detects NaN and infinite values before they change anything: gradients are checked as soon as they exist.

A step with a non-finite loss or gradient updates nothing more. If all updates of the schedule wait for the whole backward
pass, nothing has been updated at all, and the step can be skipped. Otherwise some blocks may already have been updated, and the
training stops.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from autohete.runtime.device import Device
from autohete.schedule import Discipline, Kind, Schedule, graph_of
from autohete.schedule.order import delayed_units

_UPDATES = (Kind.GPU_UPDATE, Kind.CPU_UPDATE)


class UpdateGate:
    """Decides whether the gradients of an iteration may update anything, and records what they have updated.

    Attributes:
        skipped: iterations that update nothing more, and what was non-finite first.
    """

    def __init__(self) -> None:
        self.skipped: dict[int, str] = {}
        self._updated: dict[int, set[int]] = {}
        self._lock = threading.Lock()

    def shut(self, iteration: int, where: str) -> tuple[int, ...]:
        """Block further updates of ``iteration``; return the blocks that have been, or are being, updated."""
        with self._lock:
            self.skipped.setdefault(iteration, where)
            return tuple(sorted(self._updated.get(iteration, ())))

    def admits(self, iteration: int, unit: int) -> bool:
        """Whether the update of ``block`` by the gradients of ``iteration`` may begin; if so, record that it does."""
        with self._lock:
            if iteration in self.skipped:
                return False
            self._updated.setdefault(iteration, set()).add(unit)
            for old in [number for number in self._updated if number < iteration - 1]:
                del self._updated[old]
            return True


def first_not_finite(tensors: Sequence[Tensor]) -> int | None:
    """Return the place of the first tensor with a NaN or an infinity; None if there is none."""
    if not tensors:
        return None
    # A sum over NaN or infinity is not finite, and nothing reads memory faster. Sums of large numbers may overflow: recheck.
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors])
    if math.isfinite(sums.sum().item()):
        return None
    for place, tensor in enumerate(tensors):
        if tensor.numel() and not all(math.isfinite(extreme.item()) for extreme in torch.aminmax(tensor)):
            return place
    return None


def not_finite_among(tensors: Sequence[Tensor], accelerator: Device) -> Callable[[], int | None]:
    """Return a function that returns the result of :func:`first_not_finite`. On a device that runs ahead, call it once the work
    that the calling thread has issued is done; ``tensors`` may have changed by then.
    """
    if not accelerator.runs_ahead or not tensors:
        return partial(first_not_finite, tensors)
    # Not sums, whose overflow would have to be checked again.
    largest = accelerator.read_later(torch.stack([norm.float() for norm in torch._foreach_norm(list(tensors), math.inf)]))
    return lambda: next((place for place, each in enumerate(largest.tolist()) if not math.isfinite(each)), None)


def updates_wait_for_backward(schedule: Schedule) -> bool:
    """Whether every update begins after the last backward of the iteration whose gradients it uses, and after their last sum
    over the ranks if there are several.

    Then a non-finite gradient in any block, of any rank, is detected before anything changes.
    """
    graph = graph_of(schedule)
    onward: list[list[tuple[int, int]]] = [[] for _ in schedule.tasks]
    for before, after, back in graph.edges():
        onward[before].append((after, back))
    fifo = {lane.name for lane in schedule.lanes if lane.discipline is Discipline.FIFO}
    delayed = delayed_units(schedule)
    backwards = [task for task in schedule.tasks if task.id.kind in (Kind.BACKWARD, Kind.REDUCE_GRADIENTS)]
    # In a fifo lane it is enough to look at the last one, which follows all others.
    last = [task for task in backwards if task.lane not in fifo] + list(
        {t.lane: t for t in backwards if t.lane in fifo}.values()
    )
    for backward in last:
        least = {graph.index[backward.id]: 0}  # number of iterations after which a task must wait for it
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
