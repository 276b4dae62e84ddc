"""A training under way: a model that is taken over, and lanes that execute a schedule on it, iteration by iteration."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import torch

from autohete.errors import AutoHeteError, check_member, check_switch
from autohete.execution.trace import Clock
from autohete.runtime.batch import Batch, Loss
from autohete.runtime.lanes import LaneThreads
from autohete.runtime.ledger import Counting, CudaMemory, Ledger
from autohete.runtime.optimizer import Adam
from autohete.runtime.partition import Partition
from autohete.runtime.training import Training
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY, Schedule


@dataclass(frozen=True, slots=True)
class Execution:
    """How a schedule is executed.

    Args:
        torch_device: where the passes compute; the CPU stands for the device where there is no other.
        paced: let every task take as long as the schedule says; otherwise it runs as fast as the device does.
        budget: enforce the memories' capacities; otherwise they are ignored.
        counting: how the device's bytes are counted.
        clip_norm: the largest global norm of the gradients, for schedules that clip them.
        skip_nonfinite: let iterations with gradients that are not finite change nothing, where the schedule allows it.
        threads: what torch may use in a lane, by its name; in every other lane it is one.
        history: iterations whose times are kept, at least; None: all.
    """

    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    paced: bool = False
    budget: bool = True
    counting: Counting = Counting.EXACT
    clip_norm: float | None = None
    skip_nonfinite: bool = False
    threads: Mapping[str, int] = field(default_factory=dict)
    history: int | None = None

    def __post_init__(self) -> None:
        check_switch("paced", self.paced)
        check_switch("budget", self.budget)
        check_member("counting", self.counting, Counting)

    @property
    def clock(self) -> Clock:
        """Whose seconds its traces are in."""
        if self.torch_device.type == "cuda":
            return Clock.MEASURED_CUDA
        return Clock.EMULATED if self.paced else Clock.MEASURED_CPU


class Session:
    """Executes ``schedule`` on the model, iteration by iteration, from here until :meth:`close`.

    Args:
        partition: the model, cut into blocks.
        schedule: a valid schedule.
        loss: of logits and targets.
        adam: the optimizer's settings.
        execution: how.

    Attributes:
        training: the model that is taken over.
        lanes: the threads; they know what has ended, and when.
        device, host: what lives in the memories, and the most there has been; None: they are not counted.
    """

    def __init__(self, partition: Partition, schedule: Schedule, loss: Loss, adam: Adam | None, execution: Execution) -> None:
        self._device: Ledger | CudaMemory | None = None
        self.host: Ledger | None = None
        pinned: Ledger | None = None
        if execution.budget:
            capacities = {memory.name: memory.capacity_bytes for memory in schedule.memories}
            on_cuda = execution.torch_device.type == "cuda"
            capacity = capacities[GPU_MEMORY]
            self._device = CudaMemory(execution.torch_device, capacity) if on_cuda else Ledger(GPU_MEMORY, capacity)
            self.host = Ledger(HOST_MEMORY, capacities[HOST_MEMORY])
            pinned = Ledger(PINNED_MEMORY, capacities.get(PINNED_MEMORY))
        with ExitStack() as undo:
            self.training = Training(
                partition,
                schedule,
                loss,
                adam,
                torch_device=execution.torch_device,
                device=self._device,
                host=self.host,
                pinned=pinned,
                counting=execution.counting,
                clip_norm=execution.clip_norm,
                skip_nonfinite=execution.skip_nonfinite,
            )
            undo.callback(self.training.close)
            self.lanes = LaneThreads(
                schedule,
                self.training.actions.act,
                execution.clock,
                booking=self.training.count,
                paced=execution.paced,
                threads=execution.threads,
                history=execution.history,
                around=partial(_own_stream, execution.torch_device),
            )
            undo.callback(self.lanes.close)
            self.training.guard.wait = self.lanes.drain
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except AutoHeteError as failure:
            if error is None:
                raise
            if failure is not error:
                error.add_note(str(failure))

    @property
    def device(self) -> Ledger | CudaMemory | None:
        """What counts the device's memory; a different ledger if the schedule's sizes were found wrong."""
        return self._device if self.training.count is None else self.training.count.ledger

    @property
    def counting(self) -> Counting:
        """How bytes on the device are counted: by the schedule's sizes, unless the first iterations have shown them wrong."""
        return Counting.EXACT if self.training.count is None else self.training.count.counting

    def admit(self, batches: list[Batch], adam: Adam | None = None) -> int:
        """Let the next iteration begin, with a batch for each micro-batch; returns its number.

        Args:
            batches: what it trains on.
            adam: its optimizer settings, whenever its updates run; None: those that the session began with.

        Raises:
            TaskError: any task has failed.
        """
        iteration = self.lanes.admitted
        if adam is not None:
            self.training.states.adam_at[iteration] = adam
        self.training.passes.give(iteration, *batches)
        return self.lanes.admit()

    def drain(self) -> None:
        """Return when everything admitted has ended.

        Raises:
            TaskError: any task has failed; raised when all that still runs has ended.
        """
        self.lanes.drain()

    def close(self) -> None:
        """End the lanes when all that was admitted has ended, and give the model its trained parameters back.

        Raises:
            TaskError: any task has failed, and this is the first time that the lanes are closed.
        """
        self._undo.close()


def _own_stream(device: torch.device) -> AbstractContextManager[object]:
    """A CUDA stream for the calling thread; nothing on the CPU."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
