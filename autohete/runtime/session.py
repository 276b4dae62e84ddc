"""A training session: a model that has been taken over, and lanes that execute a schedule on it, iteration by iteration."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch

from autohete.errors import check_member, check_switch
from autohete.execution.trace import Clock
from autohete.runtime.batch import Batch, Loss
from autohete.runtime.closing import Closing
from autohete.runtime.lanes import LaneThreads
from autohete.runtime.ledger import Counting, CudaMemory, Ledger
from autohete.runtime.optimizer import Adam
from autohete.runtime.partition import Partition
from autohete.runtime.takeover import Takeover
from autohete.schedule import GPU_MEMORY, HOST_MEMORY, PINNED_MEMORY, Schedule


@dataclass(frozen=True, slots=True)
class Execution:
    """How a schedule is executed.

    Args:
        torch_device: the device of the passes; the CPU stands in for it if there is no GPU.
        paced: make every task last as long as in the schedule; otherwise tasks run as fast as the device allows.
        budget: enforce the memories' capacities; otherwise they are ignored.
        counting: how device memory is counted.
        clip_norm: the maximum global norm of the gradients, for schedules that clip them.
        skip_nonfinite: skip iterations with non-finite gradients, if the schedule allows it.
        threads: number of torch threads in a lane, by its name; one in every other lane.
        history: minimum number of iterations whose times are kept; None: all.
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
        """Clock of its traces."""
        if self.torch_device.type == "cuda":
            return Clock.MEASURED_CUDA
        return Clock.EMULATED if self.paced else Clock.MEASURED_CPU


class Session(Closing):
    """Executes ``schedule`` on the model, iteration by iteration, until :meth:`close`.

    Args:
        partition: the model, cut into blocks.
        schedule: a valid schedule.
        loss: function of logits and targets.
        adam: optimizer settings.
        execution: how the schedule is executed.

    Attributes:
        training: the model that has been taken over.
        lanes: the threads, which record what has ended and when.
        device, host: current and peak bytes of the memories; None: they are not counted.
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
            self.training = Takeover(
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

    @property
    def device(self) -> Ledger | CudaMemory | None:
        """The ledger of the device's memory; a different one if the schedule's sizes were found wrong."""
        return self._device if self.training.count is None else self.training.count.ledger

    @property
    def counting(self) -> Counting:
        """How device memory is counted: by the schedule's sizes, unless the first iterations have shown them to be wrong."""
        return Counting.EXACT if self.training.count is None else self.training.count.counting

    def admit(self, batches: list[Batch], adam: Adam | None = None) -> int:
        """Admit the next iteration, with a batch for each micro-batch, and return its number.

        Args:
            batches: the batches to train on.
            adam: optimizer settings of the iteration, whenever its updates run; None: those that the session started with.

        Raises:
            TaskError: a task has failed.
        """
        iteration = self.lanes.admitted
        if adam is not None:
            self.training.states.adam_at[iteration] = adam
        self.training.passes.give(iteration, *batches)
        return self.lanes.admit()

    def drain(self) -> None:
        """Wait until all admitted iterations have ended.

        Raises:
            TaskError: a task has failed; raised once all running tasks have ended.
        """
        self.lanes.drain()

    def close(self) -> None:
        """End the lanes once all admitted iterations have ended, and give the trained parameters back to the model.

        Raises:
            TaskError: a task has failed, and this is the first call.
        """
        self._undo.close()


def _own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context with its own CUDA stream for the calling thread; an empty one on the CPU."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
